// no_memory: the k-th allocation of one rank fails, for every k, while a world opens, works,
// creates groups, and ends.
//
// No rank may hang. The rank without memory must report an error or do without the memory, and all
// memory must be freed. Any other rank that fails must name the rank without memory. If the
// allocation fails before the rank has reached the store, the other ranks cannot know the reason.
// In this case they report that the rank did not show up.
#include "idist.h"

#include "ranks.h"

enum {
    INIT_TIMEOUT_MS = 1500,
    EARLY = 12
}; // EARLY: upper bound of allocations before a rank has reached the store

typedef struct memory {
    int64_t n_live;  // number of blocks; atomic
    int n_calls;     // number of allocations so far; atomic
    int fails;       // number of the allocation that fails, from 1
    int hit, status; // hit: the allocation failed; status: of the rank's first call that failed
    bool absent;     // the error text says that another rank did not show up
    char text[300];  // of the rank's first error
} memory;

typedef struct plan {
    const char *transport;
    int n;
    idist_store *store;
    memory memory[4]; // of each rank
} plan;

static void *scarce_alloc(size_t nbytes, void *user) {
    memory *m = (memory *)user;
    void *p;
    if (__atomic_add_fetch(&m->n_calls, 1, __ATOMIC_ACQ_REL) == m->fails) {
        m->hit = 1;
        return NULL;
    }
    p = malloc(nbytes);
    if (p) __atomic_add_fetch(&m->n_live, 1, __ATOMIC_ACQ_REL);
    return p;
}

static void scarce_free(void *ptr, void *user) {
    memory *m = (memory *)user;
    if (ptr) __atomic_sub_fetch(&m->n_live, 1, __ATOMIC_ACQ_REL);
    free(ptr);
}

static idist_status work(idist_group *world, int rank) {
    enum { LARGE = 100000 };
    float x = (float)rank, *large = (float *)calloc(2 * LARGE, sizeof(float));
    idist_opts o = opts_of(world);
    idist_group *half = NULL;
    idist_status status = IDIST_OK;
    TAP_REQUIRE(large);
    if (!status) status = idist_all_reduce(&x, &x, 1, IDIST_F32, IDIST_SUM, &o);
    if (!status) status = idist_split(world, rank % 2, rank, &half);
    if (!status) status = idist_all_reduce(large, large + LARGE, LARGE, IDIST_F32, IDIST_SUM, &o);
    if (half) {
        o.group = half;
        if (!status) status = idist_broadcast(large, LARGE, IDIST_F32, 0, &o);
        if (!status) status = idist_scan(large, large + LARGE, LARGE, IDIST_F32, IDIST_SUM, &o);
        idist_free_group(&half);
    }
    free(large);
    return status;
}

typedef struct one_rank {
    plan *p;
    int rank;
} one_rank;

static void *rank_main(void *arg) {
    const one_rank *self = (const one_rank *)arg;
    memory *m = &self->p->memory[self->rank];
    idist_desc d = desc_with(self->p->transport, NULL);
    idist_group *world = NULL;
    idist_status status, closed;
    d.rank = self->rank;
    d.world_size = self->p->n;
    d.store = self->p->store;
    d.timeout_ms = 10000 * test_slow_factor();
    d.init_timeout_ms = INIT_TIMEOUT_MS * test_slow_factor();
    d.allocator.alloc_fn = scarce_alloc;
    d.allocator.free_fn = scarce_free;
    d.allocator.user = m;
    ranks__place(&d);
    status = idist_open(&d, &world);
    if (status == IDIST_OK) status = work(world, self->rank);
    copy_text(m->text, sizeof m->text, status ? idist_last_error() : "");
    if (world) {
        closed = idist_close(&world);
        if (status == IDIST_OK && closed != IDIST_OK)
            copy_text(m->text, sizeof m->text, idist_last_error());
        if (status == IDIST_OK) status = closed;
    }
    m->status = (int)status;
    m->absent = status == IDIST_ERR_TIMEOUT && text_has_word(m->text, "did not show up");
    return NULL;
}

// Runs one world in which allocation number `fails` of rank `loser` fails. Returns false if the
// rank made fewer allocations.
static bool round_of(plan *p, int loser, int fails) {
    one_rank ranks[4];
    pthread_t threads[4];
    int64_t begun = tap_now_ms();
    memset(p->memory, 0, sizeof p->memory);
    p->memory[loser].fails = fails;
    if (!rank_ok(-1, idist_store_open("mem://", NULL, &p->store))) return false;
    for (int k = 0; k < p->n; k++) {
        ranks[k].p = p;
        ranks[k].rank = k;
        TAP_REQUIRE(pthread_create(&threads[k], NULL, rank_main, &ranks[k]) == 0);
    }
    for (int k = 0; k < p->n; k++) TAP_REQUIRE(pthread_join(threads[k], NULL) == 0);
    rank_ok(-1, idist_store_close(&p->store));
    for (int k = 0; k < p->n; k++) {
        idist_status status = (idist_status)p->memory[k].status;
        rank_check(p->memory[k].n_live == 0,
                   "allocation %d of rank %d fails: rank %d keeps %lld blocks", fails, loser, k,
                   (long long)p->memory[k].n_live);
        rank_check(k == loser || status == IDIST_OK || text_names_rank(p->memory[k].text, loser),
                   "allocation %d of rank %d fails: rank %d does not name it: %s", fails, loser, k,
                   p->memory[k].text);
        rank_check(status != IDIST_ERR_ABORTED,
                   "allocation %d of rank %d fails: rank %d hears of an abort: %s", fails, loser, k,
                   p->memory[k].text);
        rank_check(status != IDIST_ERR_TIMEOUT || (p->memory[k].absent && fails <= EARLY),
                   "allocation %d of rank %d fails: rank %d hears of a time-out", fails, loser, k);
    }
    rank_check(tap_now_ms() - begun < 4000 * test_slow_factor(),
               "allocation %d of rank %d: all were through after %lld ms", fails, loser,
               (long long)(tap_now_ms() - begun));
    return p->memory[loser].hit;
}

int main(void) {
    static const struct {
        const char *transport;
        int n, loser;
    } worlds[5] = {{"auto", 2, 1}, {"tcp", 2, 0}, {"2+2", 4, 1}, {"2+2", 4, 2}, {"socket", 3, 0}};
    tap_deadline(200 * test_slow_factor());
    setenv("IDIST_ADDR", "127.0.0.1", 1); // otherwise the ranks find their own addresses
    (void)ranks__log();
    for (int i = 0; i < 5; i++) {
        plan p = {worlds[i].transport, worlds[i].n, NULL, {{0}}};
        int fails = i ? EARLY : 1; // each early failure takes a time-out
        tap_running("%s, rank %d of %d", p.transport, worlds[i].loser, p.n);
        ranks_reset();
        while (fails < 1000 && round_of(&p, worlds[i].loser, fails)) fails++;
        rank_check(fails > 20, "there were only %d allocations", fails - 1);
        ranks_report("each of %d allocations of rank %d fails in turn, %s with %d ranks",
                     fails - (i ? EARLY : 1), worlds[i].loser, p.transport, p.n);
    }
    return tap_done();
}
