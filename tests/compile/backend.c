// backend.c - a third-party backend, outside the library, written only against the contract in the
// comment above struct idist_backend_api in src/core/model.h.
//
// The backend's ranks are threads of one process that meet at a table. It supports barriers and
// reductions, one call after the other. Every other call must return IDIST_ERR_UNSUPPORTED, and the
// world must stay usable. The program has no other backend except `self`, so the names of backends
// from other headers are unknown.
#define IDIST_NO_RING
#define IDIST_IMPLEMENTATION
#include "idist.h"

#include "tap.h"

enum { MAX_RANKS = 8, MAX_NBYTES = 4096, N_RANKS = 3 };

// In call k each rank puts its contribution into half k % 2, and takes the result when all ranks
// have contributed. A rank may be one call ahead of the slowest rank, but never two. Therefore no
// rank overwrites data that another rank still reads.
static struct {
    pthread_mutex_t lock;
    int n_joined;
    // IDIST_OK, or the failure that one rank has reported to the other ranks.
    idist_status status;
    char cause[400];             // why the group failed
    uint32_t n_given[MAX_RANKS]; // number of calls to which the rank has contributed
    idist__fingerprint prints[2][MAX_RANKS];
    char given[2][MAX_RANKS][MAX_NBYTES];
} table = {.lock = PTHREAD_MUTEX_INITIALIZER};

// The state of one world, which is one rank.
typedef struct seat {
    uint32_t call; // the current call, or the last one
    bool given;    // true if the rank has contributed to that call
} seat;

static idist_status table_claim(idist__config *config, const char **why) {
    *why = "it serves 2 to 8 ranks";
    return config->world_size >= 2 && config->world_size <= MAX_RANKS ? IDIST_OK
                                                                      : IDIST_ERR_NO_BACKEND;
}

static int joined(int more) {
    pthread_mutex_lock(&table.lock);
    int n = table.n_joined += more;
    if (n == 0) { // resets the table for the next world
        table.status = IDIST_OK;
        memset(table.n_given, 0, sizeof table.n_given);
    }
    pthread_mutex_unlock(&table.lock);
    return n;
}

static idist_status table_open(idist__world *w) {
    int64_t end_ms = tap_now_ms() + w->cfg.init_timeout_ms;

    for (int n = joined(1); n < w->group.size; n = joined(0)) {
        if (tap_now_ms() > end_ms) {
            joined(-1);
            return idist__fail(IDIST_ERR_TIMEOUT, "only %d of %d ranks came", n, w->group.size);
        }
        tap_sleep_ms(1);
    }

    for (int r = 0; r < w->group.size; r++) {
        snprintf(w->nodes[r].hostname, sizeof w->nodes[r].hostname, "%s", w->about.hostname);
        w->nodes[r].host = 1;
    }

    w->impl = calloc(1, sizeof(seat));
    return w->impl ? IDIST_OK : IDIST_ERR_NO_MEMORY;
}

static void table_close(idist__world *w, bool clean) {
    (void)clean;
    free(w->impl);
    joined(-1);
}

static idist_status table_group_open(idist_group *g) {
    if (g == &g->w->group) return IDIST_OK;
    return idist__fail(IDIST_ERR_UNSUPPORTED, "the table has one group only");
}

static void table_group_close(idist_group *g) { (void)g; }

// Contributes the data of this rank, and records to which call the data belong. Called with the
// table's lock held.
static void give(const idist__task *t, seat *mine) {
    const idist__call *c = &t->call;
    int rank = t->group->rank;

    mine->given = true;
    mine->call++;
    if (c->count)
        memcpy(table.given[mine->call % 2][rank], c->send, c->count * idist_dtype_size(c->dtype));
    table.prints[mine->call % 2][rank] = idist__fingerprint_of_task(t, 0);
    table.n_given[rank] = mine->call;
}

// Returns true if all ranks made the same call. Otherwise writes the error text to `text`. This
// error text is the same on all ranks.
static bool same_call(const idist_group *g, const idist__fingerprint *prints, char *text,
                      size_t cap) {
    for (int r = 1; r < g->size; r++) {
        const char *field = idist__fingerprint_difference(&prints[0], &prints[r]);
        if (!field) continue;
        idist__explain_mismatch(g->w, field, 0, &prints[0], r, &prints[r], text, cap);
        return false;
    }
    return true;
}

static void take(const idist__call *c, int size, char (*given)[MAX_NBYTES]) {
    const void *in[MAX_RANKS];

    for (int r = 0; r < size; r++) in[r] = given[r];
    if (c->kind == IDIST__ALL_REDUCE && c->count)
        idist__reduce_many(c->recv, in, size, c->count, c->dtype, c->op,
                           c->op == IDIST_AVG ? size : 0);
}

// Makes progress on the oldest task. The task contributes when its turn comes, and completes when
// all other ranks have contributed too.
static void table_progress(idist__world *w) {
    seat *mine = (seat *)w->impl;
    idist__task *oldest = w->tasks.running;
    bool all = true;
    idist_status failure;
    char cause[400];

    while (oldest && oldest->next) oldest = oldest->next;
    if (!oldest) return;

    pthread_mutex_lock(&table.lock);
    if (!mine->given) give(oldest, mine);
    for (int r = 0; r < w->group.size; r++) all = all && table.n_given[r] >= mine->call;
    failure = table.status;
    snprintf(cause, sizeof cause, "%s", table.cause);

    if (all && !failure) {
        if (!same_call(&w->group, table.prints[mine->call % 2], cause, sizeof cause))
            failure = IDIST_ERR_MISMATCH;
        else take(&oldest->call, w->group.size, table.given[mine->call % 2]);
        mine->given = false;
    }

    pthread_mutex_unlock(&table.lock);
    if (failure) idist__group_fail(&w->group, failure, cause);
    else if (all) idist__task_complete(oldest, IDIST_OK, "");
}

static void table_start(idist__task *t) {
    const idist__call *c = &t->call;
    bool reduction = c->kind == IDIST__ALL_REDUCE && (int)c->op < IDIST_OP_USER &&
                     c->count * idist_dtype_size(c->dtype) <= MAX_NBYTES;

    if (c->kind == IDIST__BARRIER || reduction) table_progress(t->group->w);
    else
        idist__task_complete(t, IDIST_ERR_UNSUPPORTED,
                             "the table has small reductions and barriers only");
}

// Sleeps for a short time, whatever until_ns is. A waiting rank calls this function again, so no
// rank has to be woken.
static void table_sleep(idist__world *w, int64_t until_ns) {
    struct timespec nap = {0, 200000};

    (void)until_ns;
    idist__os_mutex_unlock(&w->lock);
    nanosleep(&nap, NULL);
    idist__world_lock(w);
    table_progress(w);
}

static void table_wake(idist__world *w) { (void)w; }

static bool table_cancel(idist__task *t) {
    seat *mine = (seat *)t->group->w->impl;
    bool was_given = mine->given;

    mine->given = false;
    return !was_given;
}

static void table_tell(idist_group *g) {
    pthread_mutex_lock(&table.lock);
    if (!table.status) snprintf(table.cause, sizeof table.cause, "%s", g->cause);
    if (!table.status) table.status = g->status;
    pthread_mutex_unlock(&table.lock);
}

static void table_flush(idist__world *w, int64_t until_ns) {
    (void)w;
    (void)until_ns;
}

static void table_announce(idist__task *t) { (void)t; }

static int table_missing(idist__task *t, char *text, size_t cap) {
    const seat *mine = (const seat *)t->group->w->impl;
    int n = 0;

    pthread_mutex_lock(&table.lock);
    for (int r = 0; r < t->group->size; r++)
        if (table.n_given[r] < mine->call)
            idist__text_append(text, cap, "%srank %d", n++ ? ", " : "", r);
    pthread_mutex_unlock(&table.lock);
    return n;
}

static const idist_backend_api *table_backend(void) {
    static idist_backend_api api; // members that stay NULL are optional

    api.abi = IDIST__BACKEND_ABI;
    api.size = sizeof api;
    api.name = "table";
    api.claim = table_claim;
    api.open = table_open;
    api.close = table_close;
    api.group_open = table_group_open;
    api.group_close = table_group_close;
    api.start = table_start;
    api.progress = table_progress;
    api.sleep = table_sleep;
    api.wake = table_wake;
    api.cancel = table_cancel;
    api.tell = table_tell;
    api.flush = table_flush;
    api.announce = table_announce;
    api.missing = table_missing;
    return &api;
}

//------------------------------------------------------------------------------
// worlds over the table
//------------------------------------------------------------------------------

static int n_wrong, n_failed;

#define EXPECT(condition)                                                          \
    do {                                                                           \
        if (!(condition)) {                                                        \
            tap_diag("line %d: %s; %s", __LINE__, #condition, idist_last_error()); \
            __atomic_add_fetch(&n_wrong, 1, __ATOMIC_RELAXED);                     \
        }                                                                          \
    } while (0)

static idist_group *join(int rank) {
    idist_group *world = NULL;
    idist_desc desc;

    memset(&desc, 0, sizeof desc);
    desc.rank = rank;
    desc.world_size = N_RANKS;
    desc.init_method = "tcp://127.0.0.1:1"; // nothing listens there
    desc.timeout_ms = 20000;
    desc.backend = "table";
    EXPECT(!idist_open(&desc, &world));

    return world;
}

static void first_of(const void *in, void *inout, size_t count, idist_dtype dtype, void *arg) {
    (void)arg;
    memcpy(inout, in, count * idist_dtype_size(dtype));
}

static void *rank_main(void *arg) {
    int rank = *(int *)arg;
    idist_group *world = join(rank), *half = NULL;
    idist_request request;
    idist_opts opts;
    idist_op op;
    float x[100], late = 1;
    int32_t y = rank;

    if (!world) return NULL;
    memset(&opts, 0, sizeof opts);
    memset(&request, 0, sizeof request);
    opts.group = world;

    for (int k = 0; k < 200; k++) {
        for (int i = 0; i < 100; i++) x[i] = (float)(rank + k + i);
        EXPECT(!idist_all_reduce(x, x, 100, IDIST_F32, IDIST_SUM, &opts));
        for (int i = 0; i < 100; i++) EXPECT(x[i] == (float)(N_RANKS * (k + i) + 3));
    }

    opts.request = &request;
    EXPECT(!idist_all_reduce(&y, &y, 1, IDIST_I32, IDIST_SUM, &opts));
    EXPECT(!idist_wait(&request) && y == 3);
    opts.request = NULL;
    EXPECT(!idist_all_reduce(x, x, 100, IDIST_F16, IDIST_AVG, &opts));
    EXPECT(!idist_op_create(first_of, NULL, false, world, &op));
    EXPECT(idist_all_reduce(&y, &y, 1, IDIST_I32, op, &opts) == IDIST_ERR_UNSUPPORTED);
    EXPECT(idist_broadcast(&y, 1, IDIST_I32, 0, &opts) == IDIST_ERR_UNSUPPORTED);
    EXPECT(idist_split(world, rank % 2, 0, &half) != IDIST_OK);
    EXPECT(!idist_barrier(&opts));

    // Rank 1 does not take part. The rank that times out first names rank 1, and the other ranks
    // report the same cause.
    opts.timeout_ms = 300;
    while (rank == 1 && __atomic_load_n(&n_failed, __ATOMIC_ACQUIRE) < N_RANKS - 1) tap_sleep_ms(1);
    idist_status status = rank == 1
                              ? idist_barrier(&opts)
                              : idist_all_reduce(&late, &late, 1, IDIST_F32, IDIST_SUM, &opts);
    EXPECT(status == IDIST_ERR_TIMEOUT && strstr(idist_last_error(), "rank 1") != NULL);
    __atomic_add_fetch(&n_failed, 1, __ATOMIC_ACQ_REL);
    (void)idist_close(&world);

    return NULL;
}

// Rank 2 makes a different call. All ranks must report the mismatch.
static void *mismatched_main(void *arg) {
    int rank = *(int *)arg;
    idist_group *world = join(rank);
    idist_opts opts;
    float x = 1;

    if (!world) return NULL;
    memset(&opts, 0, sizeof opts);
    opts.group = world;
    idist_status status =
        rank == 2 ? idist_barrier(&opts) : idist_all_reduce(&x, &x, 1, IDIST_F32, IDIST_SUM, &opts);
    EXPECT(status == IDIST_ERR_MISMATCH &&
           strstr(idist_last_error(), "the operation differs: rank 0 called all_reduce") != NULL &&
           strstr(idist_last_error(), "rank 2 called barrier") != NULL);
    EXPECT(idist_barrier(&opts) == IDIST_ERR_MISMATCH);
    (void)idist_close(&world);

    return NULL;
}

// The claim function of a backend that serves no world.
static idist_status spare_claim(idist__config *config, const char **why) {
    (void)config;
    *why = "it is a spare one";
    return IDIST_ERR_NO_BACKEND;
}

// Checks backend names that are registered and names that are not. Registers more backends than any
// program has.
static void names(void) {
    static const char *const hints[][2] = {{"gloo", "idist_ring.h"}, {"ring", "idist_ring.h"},
                                           {"mpi", "idist_mpi.h"},   {"nccl", "idist_nccl.h"},
                                           {"xla", "idist_xla.h"},   {"xla-tpu", "idist_xla.h"}};
    static idist_backend_api spares[20];
    static char spare_names[20][16];
    idist_group *world = NULL;
    idist_desc desc;

    memset(&desc, 0, sizeof desc);
    tap_is(idist_register_backend(table_backend()), IDIST_OK, "the backend registers");
    tap_ok(strcmp(idist_available_backends(), "table,self") == 0, "the backend is listed");

    for (int i = 0; i < 6; i++) {
        desc.backend = hints[i][0];
        tap_is(idist_open(&desc, &world), IDIST_ERR_NO_BACKEND, "%s is not there", hints[i][0]);
        tap_like(idist_last_error(), hints[i][1], "the error names the header");
    }

    for (int i = 0; i < 20; i++) {
        snprintf(spare_names[i], sizeof spare_names[i], "spare%d", i);
        spares[i] = *table_backend();
        spares[i].name = spare_names[i];
        spares[i].claim = spare_claim;
        TAP_REQUIRE(idist_register_backend(&spares[i]) == IDIST_OK);
    }
    tap_like(idist_available_backends(), "spare19,spare18,", "20 more: the latest comes first");
    tap_like(idist_available_backends(), "spare0,table,self", "and none is left out");
    desc.backend = "pigeon";
    tap_is(idist_open(&desc, &world), IDIST_ERR_NO_BACKEND, "a name that nobody has");
    tap_like(idist_last_error(), "spare3,spare2,spare1,spare0,table,self",
             "the error lists the registered names");
    desc.backend = "spare7,table";
    desc.world_size = 1;
    tap_is(idist_open(&desc, &world), IDIST_ERR_NO_BACKEND, "who is asked for may refuse");
    desc.backend = "spare7,self";
    tap_is(idist_open(&desc, &world), IDIST_OK, "and the next is asked");
    if (world) (void)idist_close(&world);
}

static void run_ranks(void *(*fn)(void *arg)) {
    pthread_t threads[N_RANKS];
    int ranks[N_RANKS];

    for (int r = 0; r < N_RANKS; r++) {
        ranks[r] = r;
        TAP_REQUIRE(pthread_create(&threads[r], NULL, fn, &ranks[r]) == 0);
    }
    for (int r = 0; r < N_RANKS; r++) TAP_REQUIRE(pthread_join(threads[r], NULL) == 0);
}

int main(void) {
    tap_deadline(60);
    names();
    run_ranks(rank_main);
    tap_is(n_wrong, 0, "sums, a request, what is unsupported, and a rank that does not come");
    run_ranks(mismatched_main);
    tap_is(n_wrong, 0, "a rank that makes another call");
    return tap_done();
}
