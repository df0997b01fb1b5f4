// lifecycle: worlds one after another and several at the same time, getters, handles of closed
// worlds, fork, and backends. A closed world must not leave anything in the process.
#define IDIST_IMPLEMENTATION
#include "idist.h"

#include "grid.h"

static void a_little_work(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    int32_t x = 1;
    (void)arg;
    rank_ok(rank, idist_all_reduce(&x, &x, 1, IDIST_I32, IDIST_SUM, &o));
    rank_check(x == n, "rank %d: got %d expected %d", rank, x, n);
    idist_request request = {NULL}; // starts the progress thread
    idist_opts a = opts_async(world, &request);
    rank_ok(rank, idist_all_reduce(&x, &x, 1, IDIST_I32, IDIST_MAX, &a));
    rank_ok(rank, idist_wait(&request));
}

static void one_after_another(const char *transport, int n) {
    idist_desc d = desc_with(transport, "auto");
    tap_running("12 worlds of %d, %s", n, transport);
    ranks_reset();
    // The first worlds create objects that are never freed (a descriptor for random numbers, a
    // lock).
    ranks_threads(n, &d, a_little_work, NULL);
    int fds = count_fds(), threads = count_threads();
    for (int i = 0; i < 12; i++) ranks_threads(n, &d, a_little_work, NULL);
    int fds_now = count_fds(), threads_now = count_threads();
    // A joined thread leaves /proc a moment later.
    for (int i = 0; i < 100 && threads_now != threads; i++) {
        tap_sleep_ms(5);
        threads_now = count_threads();
    }
    rank_check(fds_now == fds, "open fds: got %d expected %d", fds_now, fds);
    rank_check(threads_now == threads, "threads: got %d expected %d", threads_now, threads);
    ranks_report("12 worlds of %d one after another leave no fd and no thread, %s", n, transport);
}

// Checks that without a world the getters return the values of a world of 1 rank, and that
// idist_initialize and idist_finalize change the state.
static void default_world_of_one(void) {
    idist_desc d = desc_with(NULL, NULL);
    tap_ok(!idist_is_initialized(), "not initialized at first");
    tap_is(idist_get_rank(), 0, "rank before");
    tap_is(idist_get_world_size(), 1, "world size before");
    tap_is(idist_get_local_rank(), 0, "local rank before");
    tap_is(idist_get_nproc_per_node(), 1, "ranks per node before");
    tap_is(idist_get_nnodes(), 1, "nodes before");
    tap_is(idist_get_node_rank(), 0, "node rank before");
    tap_is(idist_group_rank(NULL), 0, "rank in the world before");
    tap_is(idist_group_size(NULL), 1, "size of the world before");
    tap_ok(idist_backend() && idist_device() && idist_hostname() && idist_launcher() &&
               idist_show_config(),
           "strings before");
    tap_like(idist_available_backends(), "ring", "ring is in the build");
    for (int i = 0; i < 12; i++) {
        tap_is(idist_initialize(&d), IDIST_OK, "initialize %d", i);
        tap_ok(idist_is_initialized(), "initialized %d", i);
        int32_t x = 5, y = 0;
        tap_is(idist_all_reduce(&x, &y, 1, IDIST_I32, IDIST_SUM, NULL), IDIST_OK,
               "all_reduce in a world of 1");
        tap_is(y, 5, "its value");
        tap_is(idist_finalize(), IDIST_OK, "finalize %d", i);
        tap_ok(!idist_is_initialized(), "not initialized after finalize %d", i);
    }
    tap_is(idist_initialize(NULL), IDIST_OK, "initialize(NULL)");
    tap_ok(strcmp(idist_backend(), "self") == 0, "backend of a world of 1 is self, got %s",
           idist_backend());
    tap_ok(strcmp(idist_device(), "cpu") == 0, "device is cpu, got %s", idist_device());
    tap_is(idist_finalize(), IDIST_OK, "finalize");
    tap_is(idist_finalize(), IDIST_ERR_STATE, "finalize again");
}

// The stores of two worlds that are open at the same time in each thread. The second world has the
// ranks in reverse order.
typedef struct two_worlds {
    idist_store *store[2];
} two_worlds;

typedef struct waits {
    idist_request requests[2];
    idist_status status;
} waits;

static void waits_for_all(const void *in, void *inout, size_t count, idist_dtype dtype, void *arg) {
    waits *w = (waits *)arg;
    (void)in, (void)inout, (void)count, (void)dtype;
    w->status = idist_wait_all(w->requests, 2);
}

// Waits inside a user op for a split and for a request of another world. The wait must be refused,
// and the requests must complete afterwards.
static void waits_in_callback(idist_group *const *worlds, int rank) {
    waits w = {{{NULL}, {NULL}}, IDIST_OK};
    idist_opts o = opts_of(worlds[0]), async = opts_async(worlds[1], &w.requests[1]);
    idist_group *g = NULL;
    idist_op op;
    int32_t x = 1, y = 0, z = 0;
    rank_ok(rank, idist_split_start(worlds[0], 0, 0, &g, &w.requests[0]));
    rank_ok(rank, idist_all_reduce(&x, &y, 1, IDIST_I32, IDIST_SUM, &async));
    rank_ok(rank, idist_op_create(waits_for_all, &w, true, worlds[0], &op));
    rank_ok(rank, idist_all_reduce(&x, &z, 1, IDIST_I32, op, &o));
    rank_is(rank, w.status, IDIST_ERR_STATE);
    rank_ok(rank, idist_wait_all(w.requests, 2));
    rank_check(y == 3 && g && idist_group_size(g) == 3, "rank %d: got %d", rank, y);
    rank_ok(rank, idist_free_group(&g));
}

static void *two_worlds_thread(void *p) {
    void **args = (void **)p;
    two_worlds *shared = (two_worlds *)args[0];
    int rank = *(int *)args[1], n = 3;
    idist_group *w[2] = {NULL, NULL};
    for (int i = 0; i < 2; i++) {
        idist_desc d = desc_with("auto", "auto");
        d.store = shared->store[i];
        d.world_size = n;
        d.rank = i == 0 ? rank : n - 1 - rank;
        d.timeout_ms = d.init_timeout_ms = RANKS_TIMEOUT_MS;
        if (!rank_ok(rank, idist_open(&d, &w[i]))) return NULL;
    }
    for (int round = 0; round < 20; round++) {
        for (int i = 0; i < 2; i++) {
            idist_opts o = opts_of(w[i]);
            int32_t x = rank * 100 + i, all[3] = {-1, -1, -1};
            rank_ok(rank, idist_all_gather(&x, all, 1, IDIST_I32, &o));
            for (int k = 0; k < n; k++) {
                int want = (i == 0 ? k : n - 1 - k) * 100 + i;
                rank_check(all[k] == want, "rank %d world %d: got %d expected %d", rank, i, all[k],
                           want);
            }
        }
    }
    waits_in_callback(w, rank);
    rank_ok(rank, idist_close(&w[0]));
    idist_opts o = opts_of(w[1]);
    rank_ok(rank, idist_barrier(&o)); // the other world stays open
    rank_ok(rank, idist_close(&w[1]));
    return NULL;
}

static void two_at_once(void) {
    two_worlds shared;
    pthread_t threads[3];
    int rank[3];
    void *args[3][2];
    tap_running("two worlds at once");
    ranks_reset();
    for (int i = 0; i < 2; i++) rank_ok(-1, idist_store_open("mem://", NULL, &shared.store[i]));
    for (int k = 0; k < 3; k++) {
        rank[k] = k;
        args[k][0] = &shared;
        args[k][1] = &rank[k];
        TAP_REQUIRE(pthread_create(&threads[k], NULL, two_worlds_thread, args[k]) == 0);
    }
    for (int k = 0; k < 3; k++) TAP_REQUIRE(pthread_join(threads[k], NULL) == 0);
    for (int i = 0; i < 2; i++) rank_ok(-1, idist_store_close(&shared.store[i]));
    ranks_report("two worlds open at once in each thread");
}

// Handles that a program keeps after their worlds were closed.
typedef struct handles {
    idist_group *world[3], *part[3], *outside[3];
} handles;

static void hand_out(idist_group *world, int rank, int n, void *arg) {
    handles *h = (handles *)arg;
    (void)n;
    h->world[rank] = world;
    rank_ok(rank, idist_split(world, rank % 2, 0, &h->part[rank]));
    rank_ok(rank, idist_split(world, -1, 0, &h->outside[rank]));
}

static int no_task(void *arg) {
    (void)arg;
    return 0;
}

// Checks that every call on a handle of a closed world returns an error. No call may access memory
// that the world has freed.
static void is_of_no_more_use(idist_group *g) {
    idist_opts o = opts_of(g);
    idist_request request = {NULL};
    idist_opts a = opts_async(g, &request);
    idist_group *made = NULL;
    idist_op op;
    int flag = 1;
    int32_t x = 1, y = 2;
    rank_is(0, idist_barrier(&o), IDIST_ERR_STATE);
    rank_check(strstr(idist_last_error(), "world of this group was closed"), "got \"%s\"",
               idist_last_error());
    rank_is(0, idist_all_reduce(&x, &x, 1, IDIST_I32, IDIST_SUM, &a), IDIST_ERR_STATE);
    rank_ok(0, idist_wait(&request));
    rank_is(0, idist_send(&x, 1, IDIST_I32, 0, 0, &o), IDIST_ERR_STATE);
    rank_is(0, idist_sendrecv(&x, 1, 0, 0, &y, 1, 0, 0, IDIST_I32, NULL, &o), IDIST_ERR_STATE);
    rank_is(0, idist_one_rank_only(no_task, NULL, 0, false, &o), IDIST_ERR_STATE);
    rank_is(0, idist_split(g, 0, 0, &made), IDIST_ERR_STATE);
    rank_is(0, idist_shrink(g, &made), IDIST_ERR_STATE);
    rank_is(0, idist_agree(g, &flag), IDIST_ERR_STATE);
    rank_is(0, idist_abort(g), IDIST_ERR_STATE);
    rank_is(0, idist_op_create_premul_sum(2, g, &op), IDIST_ERR_STATE);
    rank_is(0, idist_op_free(IDIST_OP_USER, g), IDIST_ERR_STATE);
    rank_check(idist_alloc(64, &o) == NULL, "idist_alloc gave memory");
    rank_check(idist_group_rank(g) == -1 && idist_group_size(g) == 0, "rank %d of %d",
               idist_group_rank(g), idist_group_size(g));
    rank_check(idist_group_translate(g, 0, g) == -1, "translate");
}

static void handles_of_closed_worlds(const char *transport, int n) {
    idist_desc d = desc_with(transport, "auto");
    handles old, later;
    memset(&old, 0, sizeof old);
    memset(&later, 0, sizeof later);
    tap_running("handles of closed worlds, %s", transport);
    ranks_reset();
    ranks_threads(n, &d, hand_out, &old);
    ranks_threads(n, &d, hand_out, &later); // a new world must not reuse the handles
    for (int i = 0; i < n; i++) {
        idist_group *copy = old.world[i];
        for (int k = 0; k < n; k++)
            rank_check(old.part[i] != later.part[k] && old.outside[i] != later.outside[k] &&
                           old.world[i] != later.world[k],
                       "a handle is used again");
        is_of_no_more_use(old.world[i]);
        is_of_no_more_use(old.part[i]);
        is_of_no_more_use(old.outside[i]);
        rank_is(0, idist_close(&copy), IDIST_ERR_STATE);
        copy = old.part[i];
        rank_ok(0, idist_free_group(&copy));
        rank_check(!copy, "free_group leaves the pointer");
        rank_ok(0, idist_free_group(&old.outside[i]));
    }
    ranks_report("calls on handles of closed worlds of %d are refused, %s", n, transport);
}

// Checks that calls on groups of the default world are refused after idist_finalize, and that ended
// groups do not accumulate.
static void handles_after_finalize(void) {
    tap_running("handles after finalize");
    ranks_reset();
    for (int i = 0; i < 600; i++) {
        idist_group *g = NULL;
        rank_ok(0, idist_initialize(NULL));
        rank_ok(0, idist_split(NULL, 0, 0, &g));
        rank_ok(0, idist_finalize());
        if (i % 50 == 0) is_of_no_more_use(g);
    }
    // The limits allow for 3 * RANKS_MAX groups and RANKS_MAX worlds that were open at the same
    // time.
    rank_check(idist__ended_groups.n <= IDIST__ENDED_GROUPS + 3 * RANKS_MAX &&
                   idist__ended_worlds.n <= IDIST__ENDED_WORLDS + RANKS_MAX,
               "%d groups and %d worlds are kept", idist__ended_groups.n, idist__ended_worlds.n);
    ranks_report("calls on groups after idist_finalize are refused");
}

// A world is closed while N_INSIDE threads of a rank are inside calls that no rank answers. The
// calls must return an error before anything that they use is freed.
enum { N_INSIDE = 3 };
typedef struct insider {
    idist_group *world, *part;
    int number;
    int begun; // atomic
    idist_status status;
    pthread_t thread;
} insider;

// Receives once, receives twice in a group of calls, or makes a group, depending on in->number. No
// rank answers.
static void *calls_in_vain(void *arg) {
    insider *in = (insider *)arg;
    idist_opts o = opts_of(in->world);
    idist_group *made = NULL;
    int32_t none[2];
    __atomic_store_n(&in->begun, 1, __ATOMIC_RELEASE);
    if (in->number == 1) {
        idist_group_begin();
        for (int k = 0; k < 2; k++) (void)!idist_recv(&none[k], 1, IDIST_I32, 0, 10 + k, NULL, &o);
        in->status = idist_group_end();
    } else if (in->number == 2 && idist_group_size(in->part) > 1) {
        in->status = idist_split(in->part, 0, 0, &made);
    } else {
        in->status = idist_recv(&none[0], 1, IDIST_I32, 0, in->number, NULL, &o);
    }
    return NULL;
}

// Waits until n threads of this rank are blocked in calls.
static void wait_for_blocked(idist_group *world, int n) {
    int blocked = 0;
    for (int i = 0; i < 5000 && blocked < n; i++) {
        if (i) tap_sleep_ms(1);
        idist__world_lock(world->w);
        blocked = world->w->wait.blocked_count;
        idist__os_mutex_unlock(&world->w->lock);
    }
    rank_check(blocked == n, "%d threads are inside calls, expected %d", blocked, n);
}

static void *closed_beside_rank(void *arg) {
    const ranks__thread *t = (const ranks__thread *)arg;
    idist_group *world = NULL, *part = NULL;
    idist_desc d = *t->base;
    insider in[N_INSIDE];
    d.rank = t->rank;
    d.world_size = t->n;
    d.store = t->store;
    d.timeout_ms = d.init_timeout_ms = RANKS_TIMEOUT_MS;
    if (!rank_ok(t->rank, idist_open(&d, &world))) return NULL;
    rank_ok(t->rank, idist_split(world, 0, t->rank, &part));
    memset(in, 0, sizeof in);
    for (int k = 0; k < N_INSIDE && t->rank == t->n - 1; k++) {
        in[k].world = world;
        in[k].part = part;
        in[k].number = k;
        TAP_REQUIRE(pthread_create(&in[k].thread, NULL, calls_in_vain, &in[k]) == 0);
        while (!__atomic_load_n(&in[k].begun, __ATOMIC_ACQUIRE)) tap_sleep_ms(1);
    }
    if (t->rank == t->n - 1) wait_for_blocked(world, N_INSIDE);
    rank_ok(t->rank, idist_close(&world));
    for (int k = 0; k < N_INSIDE && t->rank == t->n - 1; k++) {
        TAP_REQUIRE(pthread_join(in[k].thread, NULL) == 0);
        rank_is(t->rank, in[k].status, IDIST_ERR_ABORTED);
    }
    return NULL;
}

static void closed_beside(const char *transport, int n) {
    idist_desc d = desc_with(transport, NULL);
    ranks__thread t[3];
    pthread_t id[3];
    idist_store *store = NULL;
    tap_running("closed beside calls, %s, %d ranks", transport, n);
    ranks_reset();
    for (int turn = 0; turn < 5; turn++) {
        rank_ok(-1, idist_store_open("mem://", NULL, &store));
        for (int k = 0; k < n; k++) {
            memset(&t[k], 0, sizeof t[k]);
            t[k].base = &d;
            t[k].store = store;
            t[k].rank = k;
            t[k].n = n;
            TAP_REQUIRE(pthread_create(&id[k], NULL, closed_beside_rank, &t[k]) == 0);
        }
        for (int k = 0; k < n; k++) TAP_REQUIRE(pthread_join(id[k], NULL) == 0);
        rank_ok(-1, idist_store_close(&store));
    }
    ranks_report("a world of %d closes while threads are inside calls, %s", n, transport);
}

// A thread that has called idist_group_begin and made a call, but has not called idist_group_end
// yet. If another thread closes the world now, the close must be refused. The world of a failed
// worker is closed nevertheless, and idist_group_end must then return IDIST_ERR_ABORTED.
typedef struct opener {
    idist_group *world;
    int32_t got;
    int step;                   // atomic: 1 when the group is open, 2 when it may end
    idist_status begun, status; // status of the call and of idist_group_end
} opener;

static void *opens_a_group(void *arg) {
    opener *o = (opener *)arg;
    idist_opts opts = opts_of(o->world);
    idist_group_begin();
    o->begun = idist_recv(&o->got, 1, IDIST_I32, 0, 1, NULL, &opts);
    __atomic_store_n(&o->step, 1, __ATOMIC_RELEASE);
    while (__atomic_load_n(&o->step, __ATOMIC_ACQUIRE) < 2) tap_sleep_ms(1);
    o->status = idist_group_end();
    return NULL;
}

static void group_open_elsewhere(bool worker_failed) {
    static idist_group *left; // stays in memory until the process ends
    opener o;
    idist_group *world = NULL;
    idist_desc d = desc_with(NULL, NULL);
    int32_t x = 7;
    pthread_t thread;
    tap_running("closed with an open group");
    ranks_reset();
    memset(&o, 0, sizeof o);
    rank_ok(0, idist_open(&d, &world));
    o.world = world;
    idist_opts opts = opts_of(world);
    TAP_REQUIRE(pthread_create(&thread, NULL, opens_a_group, &o) == 0);
    while (!__atomic_load_n(&o.step, __ATOMIC_ACQUIRE)) tap_sleep_ms(1);

    if (worker_failed) {
        left = world;
        rank_ok(0, idist__life_close(left->w, true));
    } else {
        rank_is(0, idist_close(&world), IDIST_ERR_STATE);
        rank_check(strstr(idist_last_error(), "another thread is inside idist_group_begin"),
                   "got \"%s\"", idist_last_error());
        if (world) rank_ok(0, idist_send(&x, 1, IDIST_I32, 0, 1, &opts));
    }

    __atomic_store_n(&o.step, 2, __ATOMIC_RELEASE);
    TAP_REQUIRE(pthread_join(thread, NULL) == 0);
    rank_ok(0, o.begun);
    rank_is(0, o.status, worker_failed ? IDIST_ERR_ABORTED : IDIST_OK);
    rank_check(o.got == (worker_failed ? 0 : 7), "got %d", o.got);
    if (!worker_failed) rank_ok(0, idist_close(&world));
    ranks_report("idist_group_begin of another thread, %s",
                 worker_failed ? "the worker failed" : "the world stays open");
}

// A thread of rank 0 that makes calls while another thread waits for rank 1 in idist_close. Calls
// that would outlast the world must be refused.
typedef struct latecomer {
    idist_group *world;
    idist_request request;
    int refused; // atomic
    pthread_t thread;
} latecomer;

static void *comes_late(void *arg) {
    latecomer *late = (latecomer *)arg;
    idist_group *world = late->world;
    idist_opts o = opts_of(world), a = opts_async(world, &late->request);
    int32_t none = 0;
    wait_for_blocked(world, 1);
    rank_is(0, idist_recv(&none, 1, IDIST_I32, 1, 1, NULL, &a), IDIST_ERR_STATE);
    rank_check(strstr(idist_last_error(), "another thread is closing"), "got \"%s\"",
               idist_last_error());
    idist_group_begin();
    rank_is(0, idist_recv(&none, 1, IDIST_I32, 1, 2, NULL, &o), IDIST_ERR_STATE);
    rank_is(0, idist_group_end(), IDIST_ERR_STATE);
    rank_is(0, idist_close(&world), IDIST_ERR_STATE);
    __atomic_store_n(&late->refused, 1, __ATOMIC_RELEASE);
    return NULL;
}

static void close_slowly(idist_group *world, int rank, int n, void *arg) {
    latecomer *late = (latecomer *)arg;
    (void)n;
    if (rank == 1) {
        while (!__atomic_load_n(&late->refused, __ATOMIC_ACQUIRE)) tap_sleep_ms(1);
    } else {
        late->world = world;
        TAP_REQUIRE(pthread_create(&late->thread, NULL, comes_late, late) == 0);
    }
}

static void begun_while_closing(const char *transport) {
    idist_desc d = desc_with(transport, NULL);
    latecomer late;
    memset(&late, 0, sizeof late);
    tap_running("calls while the world closes, %s", transport);
    ranks_reset();
    ranks_threads(2, &d, close_slowly, &late);
    TAP_REQUIRE(pthread_join(late.thread, NULL) == 0);
    rank_ok(0, idist_wait(&late.request));
    ranks_report("nothing that outlasts the world begins while it closes, %s", transport);
}

// Counters of desc.allocator, which must get back every block.
typedef struct tally {
    int n_live; // atomic
    int n_calls;
} tally;

static void *tally_alloc(size_t nbytes, void *user) {
    tally *t = (tally *)user;
    __atomic_add_fetch(&t->n_live, 1, __ATOMIC_ACQ_REL);
    __atomic_add_fetch(&t->n_calls, 1, __ATOMIC_ACQ_REL);
    return malloc(nbytes);
}

static void tally_free(void *ptr, void *user) {
    tally *t = (tally *)user;
    if (ptr) __atomic_sub_fetch(&t->n_live, 1, __ATOMIC_ACQ_REL);
    free(ptr);
}

static void allocator_is_used(void) {
    idist_desc d = desc_with("auto", "auto");
    tally t = {0, 0};
    d.allocator.alloc_fn = tally_alloc;
    d.allocator.free_fn = tally_free;
    d.allocator.user = &t;
    handles unused;
    ranks_case(3, &d, a_little_work, NULL, "a world with an allocator of its own");
    ranks_case(3, &d, hand_out, &unused, "and one whose groups are not freed");
    tap_ok(t.n_calls > 0, "the allocator was called %d times", t.n_calls);
    tap_is(t.n_live, 0, "blocks not given back");
}

// Checks that idist_alloc returns aligned and zeroed memory, even if the memory was used before.
static void buffers(void) {
    static const size_t sizes[6] = {0, 1, 63, 64, 65, 100000};
    int wrong = 0;
    for (int i = 0; i < 120; i++) {
        size_t nbytes = sizes[i % 6];
        unsigned char *p = (unsigned char *)idist_alloc(nbytes, NULL);
        wrong += !p || (uintptr_t)p % 64;
        for (size_t k = 0; p && k < nbytes; k++) wrong += p[k] != 0;
        if (p) memset(p, 0xEE, nbytes);
        idist_free(p);
    }
    tap_is(wrong, 0, "idist_alloc: aligned to 64 bytes, and zeros");
    tap_ok(idist_alloc(SIZE_MAX, NULL) == NULL && idist_last_error()[0], "idist_alloc: too much");
    idist_free(NULL);
}

typedef struct lines {
    int n, last_level;
    char last[600];
} lines;

static void keep_line(idist_log_level level, const char *line, void *user) {
    lines *l = (lines *)user;
    l->n++;
    l->last_level = (int)level;
    copy_text(l->last, sizeof l->last, line);
}

static void keep_first_line(idist_log_level level, const char *line, void *user) {
    lines *l = (lines *)user;
    if (!l->n) keep_line(level, line, user);
}

static void logger(void) {
    lines l;
    idist_desc d = desc_with(NULL, NULL);
    const char *old = getenv("IDIST_LOG");
    char saved[32];
    copy_text(saved, sizeof saved, old ? old : "");
    memset(&l, 0, sizeof l);
    d.logger.log_fn = keep_line;
    d.logger.user = &l;
    setenv("IDIST_LOG", "info", 1);
    tap_is(idist_initialize(&d), IDIST_OK, "initialize with a logger");
    tap_ok(l.n == 1 && l.last_level == IDIST_LOG_INFO && strstr(l.last, "joined a world of 1"),
           "it got \"%s\"", l.last);
    idist_abort(NULL);
    tap_ok(l.last_level == IDIST_LOG_INFO && strstr(l.last, "idist_abort"), "it got \"%s\"",
           l.last);
    idist_finalize();
    unsetenv("IDIST_LOG");
    l.n = 0;
    tap_is(idist_initialize(&d), IDIST_OK, "and without IDIST_LOG");
    idist_abort(NULL);
    tap_is(idist_barrier(NULL), IDIST_ERR_ABORTED, "the status tells of a failure");
    tap_is(idist_finalize(), IDIST_ERR_ABORTED, "also that of finalize");
    tap_is(l.n, 0, "so no line does");
    setenv("IDIST_LOG", "error", 1);
    l.n = 0;
    tap_is(idist_initialize(&d), IDIST_OK, "and with IDIST_LOG=error");
    idist_finalize();
    tap_is(l.n, 0, "nothing below the level");
    if (old) setenv("IDIST_LOG", saved, 1);
    else unsetenv("IDIST_LOG");
}

// Runs in a child of fork. Calls on worlds of the parent must be refused with a text that mentions
// the fork, and the child can open its own world.
static int child_of_fork(int number, void *arg) {
    idist_opts o = opts_of(*(idist_group **)arg);
    int32_t x = 3;
    (void)number;
    rank_check(!idist_is_initialized(), "the child is initialized");
    rank_is(0, idist_barrier(NULL), IDIST_ERR_STATE);
    rank_is(0, idist_barrier(&o), IDIST_ERR_STATE);
    rank_check(strstr(idist_last_error(), "fork"), "got \"%s\"", idist_last_error());
    rank_is(0, idist_finalize(), IDIST_ERR_STATE);
    rank_ok(0, idist_initialize(NULL));
    rank_ok(0, idist_all_reduce(&x, &x, 1, IDIST_I32, IDIST_SUM, NULL));
    rank_is(0, idist_barrier(&o), IDIST_ERR_STATE); // still refused
    rank_check(strstr(idist_last_error(), "fork"), "got \"%s\"", idist_last_error());
    rank_ok(0, idist_finalize());
    return 0;
}

static void forked(void) {
    idist_group *g = NULL;
    tap_running("fork");
    ranks_reset();
    rank_ok(0, idist_initialize(NULL));
    rank_ok(0, idist_split(NULL, 0, 0, &g));
    procs_run(1, 5000, child_of_fork, &g);
    rank_ok(0, idist_barrier(NULL)); // the parent's world stays open
    rank_ok(0, idist_free_group(&g));
    rank_ok(0, idist_finalize());
    ranks_report("a child of fork has no world, and can have one");
}

// A thread that holds locks of the library during a fork, as a thread inside the library may.
typedef struct holder {
    pthread_t thread;
    pthread_barrier_t barrier; // first pass: the locks are held; second pass: they may be released
    int n;                     // the first n locks are held
} holder;

enum { N_LOCKS = 7, N_LOCKS_OF_WORLDS = 4 }; // idist_spawn itself takes the last three

static void *hold_locks(void *arg) {
    holder *h = (holder *)arg;
    idist__os_mutex *locks[N_LOCKS] = {&idist__life_lock,    &idist__default_lock,
                                       &idist__ended_lock,   &idist__windows_lock,
                                       &idist__backend_lock, &idist__pmi_known.lock,
                                       &idist__log_lock};
    for (int i = 0; i < h->n; i++) idist__os_mutex_lock(locks[i]);
    pthread_barrier_wait(&h->barrier);
    pthread_barrier_wait(&h->barrier);
    for (int i = 0; i < h->n; i++) idist__os_mutex_unlock(locks[i]);
    return NULL;
}

static void hold(holder *h, int n) {
    h->n = n;
    pthread_barrier_init(&h->barrier, NULL, 2);
    TAP_REQUIRE(pthread_create(&h->thread, NULL, hold_locks, h) == 0);
    pthread_barrier_wait(&h->barrier);
}

static void hold_no_more(holder *h) {
    pthread_barrier_wait(&h->barrier);
    pthread_join(h->thread, NULL);
    pthread_barrier_destroy(&h->barrier);
}

static int child_beside_a_thread(int number, void *arg) {
    idist_free(idist_alloc(100, NULL));
    rank_is(0, idist_abort(NULL), IDIST_ERR_STATE);
    rank_ok(0, idist_register_backend(idist_self_backend()));
    return child_of_fork(number, arg);
}

static void forked_beside_a_thread(void) {
    holder h;
    idist_group *g = NULL;
    tap_running("fork while another thread holds the locks of the library");
    ranks_reset();
    rank_ok(0, idist_initialize(NULL));
    rank_ok(0, idist_split(NULL, 0, 0, &g));
    hold(&h, N_LOCKS);
    procs_run(1, 5000, child_beside_a_thread, &g);
    hold_no_more(&h);
    rank_ok(0, idist_free_group(&g));
    rank_ok(0, idist_finalize());
    ranks_report("a child of fork does not wait for the threads of its parent");
}

static int worker_beside_a_thread(int local_rank, void *arg) {
    idist_group *g = NULL;
    (void)arg;
    rank_ok(local_rank, idist_split(NULL, 0, 0, &g));
    rank_ok(local_rank, idist_free_group(&g));
    idist_free(idist_alloc(100, NULL));
    return 0;
}

static void spawned_beside_a_thread(void) {
    const char *name = "a worker of idist_spawn does not wait for the threads of its parent";
    holder h;
    idist_workers *workers = NULL;
    bool possible = true;
// The runtime of the thread sanitizer cannot start a thread in a process that was forked while
// another thread ran.
#ifdef __SANITIZE_THREAD__
    possible = false;
#endif
    if (!possible) {
        tap_skip(name, "not under the thread sanitizer");
        return;
    }
    tap_running("%s", name);
    ranks_reset();
    hold(&h, N_LOCKS_OF_WORLDS);
    rank_ok(-1, idist_spawn_start(worker_beside_a_thread, NULL, 2, NULL, &workers));
    idist_status status = idist_spawn_wait(workers, 5000 * test_slow_factor());
    rank_check(status == IDIST_OK, "the workers: %s", idist_status_name(status));
    if (status == IDIST_ERR_TIMEOUT) {
        idist_spawn_kill(workers, SIGKILL);
        idist_spawn_wait(workers, -1);
    }
    hold_no_more(&h);
    ranks_report("%s", name);
}

static void backends(void) {
    idist_backend_api odd = *idist_ring_backend();
    idist_group *w = NULL;
    idist_desc d = desc_with(NULL, NULL);
    odd.abi++;
    tap_is(idist_register_backend(&odd), IDIST_ERR_NO_BACKEND, "a backend of another abi");
    odd = *idist_ring_backend();
    odd.size--;
    tap_is(idist_register_backend(&odd), IDIST_ERR_NO_BACKEND, "of another size");
    odd = *idist_ring_backend();
    tap_is(idist_register_backend(&odd), IDIST_ERR_ARG, "another one of the name ring");
    tap_is(idist_register_backend(idist_ring_backend()), IDIST_OK, "ring itself, once more");
    tap_is(idist_register_backend(NULL), IDIST_ERR_ARG, "no backend");
    odd.name = "";
    tap_is(idist_register_backend(&odd), IDIST_ERR_ARG, "a backend without a name");
    const char *names = idist_available_backends();
    tap_ok(strcmp(names, "ring,self") == 0, "names of the backends: got %s", names);
    d.backend = "self,ring"; // self refuses a world of two; ring is next and waits for rank 1
    d.world_size = 2;
    d.init_method = "tcp://127.0.0.1:1";
    d.init_timeout_ms = 50;
    tap_is(idist_open(&d, &w), IDIST_ERR_TIMEOUT, "the second of the list is tried");
    d.backend = "self";
    tap_is(idist_open(&d, &w), IDIST_ERR_NO_BACKEND, "self alone refuses");
    d.backend = "ring";
    d.world_size = 1;
    tap_is(idist_open(&d, &w), IDIST_OK, "ring serves one rank when asked for");
    if (w) idist_close(&w);
}

// Device backend of the world that was opened last.
static char seen_device_backend[32];

static idist_status take_device(idist__world *w) {
    snprintf(seen_device_backend, sizeof seen_device_backend, "%s", w->cfg.device_backend);
    return IDIST_OK;
}

static idist_status claim_all_but_odd(idist__config *config, const char **why) {
    (void)why;
    if (strcmp(config->device_backend, "odd") != 0) return IDIST_OK;
    return idist__fail(IDIST_ERR_ENV, "there is no odd device backend");
}

static int gloo_worker(int local_rank, void *arg) {
    int32_t x = local_rank;
    (void)arg;
    rank_check(strcmp(idist_backend(), "ring") == 0, "the backend is %s", idist_backend());
    rank_ok(local_rank, idist_all_reduce(&x, &x, 1, IDIST_I32, IDIST_SUM, NULL));
    rank_check(x == 1, "got %d expected 1", x);
    return 0;
}

// Opens worlds with the backend names of torch.distributed and Ignite, which ported programs still
// pass. The name gloo must select ring. Without idist_nccl.h, the name nccl must be refused with a
// text that names this header.
static void names_of_host_backends(void) {
    idist_desc d = desc_with(NULL, NULL);
    idist_group *w = NULL;
    lines l;
    memset(&l, 0, sizeof l);
    d.logger.log_fn = keep_first_line;
    d.logger.user = &l;
    setenv("IDIST_LOG", "info", 1);

    d.backend = "gloo";
    tap_is(idist_open(&d, &w), IDIST_OK, "gloo: got %s", idist_last_error());
    tap_ok(w && strcmp(w->w->backend->name, "ring") == 0, "gloo is ring");
    tap_ok(strstr(l.last, "gloo") && strstr(l.last, "ring"), "and says so: \"%s\"", l.last);
    if (w) idist_close(&w);

    d.backend = "nccl";
    tap_is(idist_open(&d, &w), IDIST_ERR_NO_BACKEND, "nccl without its header");
    tap_like(idist_last_error(), "idist_nccl.h", "which the error names");

    setenv("IDIST_LOG", "error", 1);
    memset(&d, 0, sizeof d);
    d.backend = "gloo";
    d.nproc_per_node = 2;
    ranks_reset();
    rank_ok(-1, idist_parallel_run(&d, gloo_worker, NULL));
    ranks_report("idist_parallel_run with the backend gloo");
}

// Registers device backends and opens worlds that request them by name. Also requests a name that
// no backend has.
static void names_of_device_backends(void) {
    static idist_backend_api nccl, other; // stay registered
    idist_desc d = desc_with(NULL, NULL);
    idist_group *w = NULL;
    nccl.abi = IDIST__BACKEND_ABI;
    nccl.size = sizeof nccl;
    nccl.name = "nccl";
    nccl.claim = claim_all_but_odd;
    nccl.wrap = take_device;

    tap_is(idist_register_backend(&nccl), IDIST_OK, "a device backend registers");
    d.backend = "nccl";
    tap_is(idist_open(&d, &w), IDIST_OK, "nccl with it: got %s", idist_last_error());
    tap_ok(w && strcmp(w->w->backend->name, "ring") == 0, "nccl is ring, ...");
    tap_ok(strcmp(seen_device_backend, "nccl") == 0, "... and the device backend nccl");
    if (w) idist_close(&w);
    d.device_backend = "staged";
    tap_is(idist_open(&d, &w), IDIST_OK, "nccl and another device backend");
    tap_ok(strcmp(seen_device_backend, "staged") == 0, "the device backend asked for counts");
    if (w) idist_close(&w);
    d.device_backend = "auto";
    tap_is(idist_open(&d, &w), IDIST_OK, "nccl and any device backend");
    tap_ok(strcmp(seen_device_backend, "nccl") == 0, "is nccl");
    if (w) idist_close(&w);
    d.device_backend = NULL;
    setenv("IDIST_BACKEND", "nccl", 1);
    d.backend = NULL;
    tap_is(idist_open(&d, &w), IDIST_OK, "IDIST_BACKEND=nccl");
    tap_ok(strcmp(seen_device_backend, "nccl") == 0, "is the same");
    if (w) idist_close(&w);
    unsetenv("IDIST_BACKEND");
    setenv("IDIST_DEVICE_BACKEND", "odd", 1);
    tap_is(idist_open(&d, &w), IDIST_ERR_ENV, "a device backend that does not know its name");
    unsetenv("IDIST_DEVICE_BACKEND");

    other = nccl;
    other.name = "other";
    tap_is(idist_register_backend(&other), IDIST_OK, "a second device backend");
    d.backend = "other";
    tap_is(idist_open(&d, &w), IDIST_OK, "whose name asks for it: got %s", idist_last_error());
    tap_ok(strcmp(seen_device_backend, "other") == 0, "and for any host backend");
    if (w) idist_close(&w);

    d.backend = "horovod";
    tap_is(idist_open(&d, &w), IDIST_ERR_NO_BACKEND, "a name that nobody has");
    tap_ok(!strstr(idist_last_error(), "idist_horovod.h") &&
               strstr(idist_last_error(), "other,nccl,ring,self.") &&
               strstr(idist_last_error(), "gloo"),
           "got \"%s\"", idist_last_error());
}

static int init_worker(int local_rank, void *arg) {
    int expected = *(const int *)arg;
    rank_check(idist_is_initialized() && idist_get_rank() == local_rank &&
                   idist_get_local_rank() == local_rank,
               "worker %d: rank %d local rank %d", local_rank, idist_get_rank(),
               idist_get_local_rank());
    rank_check(idist_get_world_size() == expected && idist_get_nproc_per_node() == expected,
               "worker %d: size %d", local_rank, idist_get_world_size());
    rank_check(idist_get_nnodes() == 1 && idist_get_node_rank() == 0, "worker %d: nodes %d",
               local_rank, idist_get_nnodes());
    rank_check(strcmp(idist_launcher(), "spawn") == 0, "worker %d: launcher is %s", local_rank,
               idist_launcher());
    rank_check(strcmp(idist_backend(), expected == 1 ? idist_backend() : "ring") == 0,
               "worker %d: backend is %s", local_rank, idist_backend());
    rank_is(local_rank, idist_initialize(NULL), IDIST_ERR_STATE);
    return 0;
}

static void spawned(void) {
    for (int n = 1; n <= 4; n += 1) {
        int expected = n;
        tap_running("getters in %d spawned ranks", n);
        ranks_reset();
        rank_ok(-1, idist_spawn(init_worker, &expected, n, NULL));
        ranks_report("getters in %d spawned ranks", n);
    }
    tap_ok(!idist_is_initialized(), "spawn leaves the parent uninitialized");
}

int main(void) {
    static const int sizes[4] = {1, 2, 3, 5};
    tap_deadline(60);
    (void)ranks__log();
    spawned_beside_a_thread(); // before there is a world
    default_world_of_one();
    for (int i = 0; i < 4; i++) one_after_another("auto", sizes[i]);
    one_after_another("socket", 3);
    one_after_another("tcp", 3);
    two_at_once();
    allocator_is_used();
    for (int i = 0; i < 3; i++)
        handles_of_closed_worlds(i == 0 ? "auto" : i == 1 ? "socket" : "tcp", i + 1);
    handles_after_finalize();
    for (int i = 0; i < 3; i++) closed_beside(i == 0 ? "auto" : i == 1 ? "socket" : "tcp", i + 1);
    group_open_elsewhere(false);
    group_open_elsewhere(true);
    begun_while_closing("auto");
    begun_while_closing("tcp");
    buffers();
    logger();
    forked();
    forked_beside_a_thread();
    backends();
    names_of_host_backends();
    names_of_device_backends();
    spawned();
    return tap_done();
}
