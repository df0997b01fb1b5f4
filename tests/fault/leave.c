// leave: ranks leave a world that has failed, each after its last call on a group that the failure
// does not affect.
//
// Rank 1 dies or aborts the world. All other ranks have a group without rank 1. If one member of
// the group has completed a call, the call must complete on all other members, too. This holds even
// if that member has closed the world in the meantime. A call that needs a member that has left
// must fail immediately. Its status must be the status of the world's failure, and its text must
// first name the rank that caused that failure.
#define IDIST_IMPLEMENTATION
#include "idist.h"

#include "ranks.h"

enum { VICTIM = 1, LARGE = 300000, LIMIT_MS = 2000 };

// The last call of the group. From EARLY on, the root makes the call and leaves before any other
// member begins it.
enum { BARRIER, SMALL, BIG, BROADCAST, EARLY, EARLY_FREED, EARLY_CHILD, N_LAST, NONE = N_LAST };
static const char *const lasts[N_LAST + 1] = {
    "barrier",
    "all_reduce",
    "large all_reduce",
    "large broadcast",
    "broadcast of a root that is gone",
    "broadcast of a root that has freed the group and is gone",
    "broadcast in a child of the group, root gone",
    "no call, root ends without closing the world"};

// Actions of the other ranks after an early root has left.
enum {
    NOTHING,
    THEN_BARRIER,
    THEN_REDUCE,
    THEN_RECV,
    THEN_ANY,
    THEN_ANY_THREADS, // the program has another thread, which might send
    THEN_SEND,
    THEN_SPLIT,
    N_THEN
};
static const char *const thens[N_THEN] = {"",
                                          ", then a barrier",
                                          ", then a large all_reduce",
                                          ", then recv",
                                          ", then recv from any",
                                          ", then recv from any beside a thread",
                                          ", then a large send",
                                          ", then a split"};

typedef struct plan {
    int last, then;
    bool aborts;     // rank 1 aborts the world instead of dying
    int is_gone;     // set when the early root has left; atomic
    int ready_count; // number of ranks that have passed the first barrier of the world; atomic
    int done_count;  // number of ranks that made the last call after an early root; atomic
} plan;

static int32_t data[LARGE];

static idist_status make_last(const plan *p, idist_opts *o, int m) {
    int32_t one = 1;
    idist_status status = IDIST_OK;
    switch (p->last) {
    case BARRIER: return idist_barrier(o);
    case SMALL:
        status = idist_all_reduce(&one, &one, 1, IDIST_I32, IDIST_SUM, o);
        rank_check(status != IDIST_OK || one == m, "the sum is %d", (int)one);
        return status;
    case BIG:
        for (int i = 0; i < LARGE; i++) data[i] = i;
        status = idist_all_reduce(data, data, LARGE, IDIST_I32, IDIST_SUM, o);
        rank_check(status != IDIST_OK || data[LARGE - 1] == m * (LARGE - 1), "the sum is %d",
                   (int)data[LARGE - 1]);
        return status;
    default:
        for (int i = 0; i < LARGE; i++) data[i] = idist_group_rank(o->group) ? 0 : i;
        status = idist_broadcast(data, p->last == BROADCAST ? LARGE : 100, IDIST_I32, 0, o);
        rank_check(status != IDIST_OK || data[99] == 99, "element 99 is %d", (int)data[99]);
        return status;
    }
}

static void *idle(void *arg) {
    for (;;) pause();
    return arg;
}

static idist_status make_then(const plan *p, const idist_opts *o) {
    idist_group *g = NULL;
    pthread_t thread;
    idist_status status = IDIST_OK;
    switch (p->then) {
    case THEN_BARRIER: return idist_barrier(o);
    case THEN_REDUCE: return idist_all_reduce(data, data, LARGE, IDIST_I32, IDIST_SUM, o);
    case THEN_RECV: return idist_recv(data, 1, IDIST_I32, 0, 1, NULL, o);
    case THEN_ANY_THREADS:
        TAP_REQUIRE(pthread_create(&thread, NULL, idle, NULL) == 0);
        return idist_recv(data, 1, IDIST_I32, IDIST_ANY_SOURCE, 1, NULL, o);
    case THEN_ANY: return idist_recv(data, 1, IDIST_I32, IDIST_ANY_SOURCE, 1, NULL, o);
    case THEN_SEND: return idist_send(data, LARGE, IDIST_I32, 0, 1, o);
    default:
        // The new group fails with its parent, but it is created nevertheless.
        status = idist_split(o->group, 0, 0, &g);
        if (status == IDIST_OK) {
            idist_opts of_child = opts_of(g);
            status = idist_barrier(&of_child);
        }

        return status;
    }
}

static int first_named(const char *text) {
    const char *at = strstr(text, "rank ");
    return at ? atoi(at + 5) : -1;
}

static void check_then(const plan *p, int rank, const idist_opts *o) {
    idist_status expected = p->aborts ? IDIST_ERR_ABORTED : IDIST_ERR_PEER_LOST;
    int64_t start_ms = tap_now_ms();
    idist_status status = make_then(p, o);
    rank_check(status == expected, "rank %d%s: got %s: %s", rank, thens[p->then],
               idist_status_name(status), idist_last_error());
    rank_check(first_named(strchr(idist_last_error(), ':')) == VICTIM,
               "rank %d%s: must name rank %d first: got \"%s\"", rank, thens[p->then], VICTIM,
               idist_last_error());
    rank_check(tap_now_ms() - start_ms < LIMIT_MS * test_slow_factor(), "rank %d%s: after %lld ms",
               rank, thens[p->then], (long long)(tap_now_ms() - start_ms));
}

static void await(const int *count, int value) {
    int64_t end_ms = tap_now_ms() + 10000 * test_slow_factor();
    while (__atomic_load_n(count, __ATOMIC_ACQUIRE) < value && tap_now_ms() < end_ms)
        tap_sleep_ms(1);
}

static int body(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    plan *p = (plan *)arg;
    idist_opts of_world = opts_of(world), o;
    idist_group *g = NULL, *child = NULL;
    idist_status expected = p->aborts ? IDIST_ERR_ABORTED : IDIST_ERR_PEER_LOST;
    bool early = p->last >= EARLY;
    (void)slot;
    if (!rank_ok(rank, idist_split(world, rank == VICTIM ? -1 : 0, rank, &g))) return 1;
    if (!rank_ok(rank, idist_barrier(&of_world))) return 1;
    __atomic_add_fetch(&p->ready_count, 1, __ATOMIC_ACQ_REL);
    if (rank == VICTIM) await(&p->ready_count, n);
    if (rank == VICTIM && !p->aborts) raise(SIGKILL);
    if (rank == VICTIM) idist_abort(world);
    rank_is(rank, idist_barrier(&of_world), expected);
    if (rank == VICTIM) return idist_close(&world) == expected ? 0 : 1;

    o = opts_of(g);
    if (p->last == EARLY_CHILD) rank_ok(rank, idist_split(g, 0, rank, &child));
    if (child) o.group = child;
    if (p->last == NONE && !rank) __atomic_store_n(&p->is_gone, 1, __ATOMIC_RELEASE);
    if (p->last == NONE && !rank) _exit(0);
    if (early && rank) await(&p->is_gone, 1);
    if (p->last != NONE) rank_ok(rank, make_last(p, &o, n - 1));
    if (early && rank) {
        // A later call that fails would end the last call on ranks that have not completed it.
        __atomic_add_fetch(&p->done_count, 1, __ATOMIC_ACQ_REL);
        await(&p->done_count, n - 2);
    }

    if (early && rank && p->then) check_then(p, rank, &o);
    if (p->last == EARLY_FREED && !rank) rank_ok(rank, idist_free_group(&g));
    idist_close(&world);
    if (early && !rank) __atomic_store_n(&p->is_gone, 1, __ATOMIC_RELEASE);
    return world == NULL ? 0 : 1;
}

// All ranks have a group. The last rank dies after rank 0 has freed the group. Rank 0 learns of the
// loss from the world and leaves. The other ranks learn of the loss later, through the group, and
// must blame the last rank.
static int freed_before(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    plan *p = (plan *)arg;
    idist_opts of_world = opts_of(world), o;
    idist_group *g = NULL;
    (void)slot;
    if (!rank_ok(rank, idist_split(world, 0, rank, &g))) return 1;
    if (!rank_ok(rank, idist_barrier(&of_world))) return 1;
    o = opts_of(g);
    if (rank == 0) rank_ok(rank, idist_free_group(&g));
    __atomic_add_fetch(&p->ready_count, 1, __ATOMIC_ACQ_REL);
    if (rank == n - 1) {
        await(&p->ready_count, n);
        raise(SIGKILL);
    }

    if (rank) await(&p->is_gone, 1);
    else rank_is(rank, idist_barrier(&of_world), IDIST_ERR_PEER_LOST);
    if (rank) {
        rank_is(rank, idist_barrier(&o), IDIST_ERR_PEER_LOST);
        rank_check(text_names_only(idist_last_error(), n - 1, rank, n),
                   "rank %d: must name rank %d only: got \"%s\"", rank, n - 1, idist_last_error());
    }

    idist_close(&world);
    if (!rank) __atomic_store_n(&p->is_gone, 1, __ATOMIC_RELEASE);
    return world == NULL ? 0 : 1;
}

static void freed_before_case(int n, const char *transport) {
    idist_desc d = desc_with(transport, "auto");
    plan *p = (plan *)shared_alloc(sizeof *p);
    procs ps;
    tap_running("freed before, %s", transport);
    ranks_reset();
    procs_start(&ps, n, &d, freed_before, p);
    int n_hung = procs_wait(&ps, 10000);
    rank_check(n_hung == 0, "%d ranks hang", n_hung);
    procs_free(&ps);
    ranks_report("n=%d, %s: a rank frees the group, learns of a lost rank in it and leaves", n,
                 transport);
    munmap(p, sizeof *p);
}

static void one_case(int n, int hosts, const char *transport, int last, int then, bool aborts,
                     int trials) {
    static char names[2][4] = {"h0", "h1"};
    idist_desc bases[RANKS_MAX];
    plan *p = (plan *)shared_alloc(sizeof *p);
    memset(bases, 0, sizeof bases);
    for (int k = 0; k < n; k++) {
        bases[k] = desc_with(transport, "auto");
        if (hosts > 1) bases[k].host_id = names[k % 2];
    }
    ranks_reset();
    for (int i = 0; i < trials; i++) {
        procs ps;
        memset(p, 0, sizeof *p);
        p->last = last;
        p->then = then;
        p->aborts = aborts;
        tap_running("n=%d on %d hosts, %s: %s%s", n, hosts, transport, lasts[last], thens[then]);
        procs_start_each(&ps, n, bases, body, p);
        int n_hung = procs_wait(&ps, 10000);
        rank_check(n_hung == 0, "%d ranks hang", n_hung);
        for (int k = 0; k < n; k++)
            rank_check((k == VICTIM && !aborts) || ps.wait_status[k] == 0,
                       "rank %d: wait status 0x%x", k, (unsigned)ps.wait_status[k]);
        procs_free(&ps);
    }
    ranks_report("n=%d on %d hosts, %s, world %s: %s%s", n, hosts, transport,
                 aborts ? "aborted" : "lost a rank", lasts[last], thens[then]);
    munmap(p, sizeof *p);
}

int main(void) {
    static const char *const transports[3] = {"auto", "socket", "tcp"};
    tap_deadline(240 * test_slow_factor());
    setenv("IDIST_ADDR", "127.0.0.1", 1); // so that "hosts" need no secret
    for (int i = 0; i < 6; i++) {
        const char *transport = transports[i % 3];
        int hosts = 1 + i / 3;
        for (int last = 0; last < N_LAST; last++) {
            int n = last % 2 ? 5 : 3;
            one_case(n, hosts, transport, last, NOTHING, false, test_quick() ? 2 : 10);
            if (!test_quick()) one_case(8, hosts, transport, last, NOTHING, false, 5);
        }
        for (int then = NOTHING + 1; then < N_THEN; then++) {
            int n = then == THEN_ANY || then == THEN_ANY_THREADS ? 3 : 4;
            one_case(n, hosts, transport, EARLY, then, then % 2 == 0, 1);
            if (!test_quick()) one_case(n, hosts, transport, EARLY_FREED, then, then % 2, 1);
            if (then == THEN_BARRIER) one_case(4, hosts, transport, NONE, then, true, 1);
        }
    }
    for (int i = 0; i < 3; i++) freed_before_case(4, transports[i]);
    return tap_done();
}
