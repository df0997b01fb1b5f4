// wakes: ranks sleep in collectives at random moments, with one thread or two, and only other ranks
// wake them.
//
// A rank that waits for the next step of one member announces which member, and the other ranks do
// not wake it. Normally a lost wake-up causes only a delay. A sleeping rank wakes every 10 to 30 ms
// to check for ended processes. A rank that has waited for 20 ms announces itself, which wakes the
// other ranks. Here neither ever happens, so a lost wake-up becomes a hang and ends in a time-out.
#ifndef RANKS_MPI
#define IDIST__ANNOUNCE_NS ((int64_t)3600 * 1000000000)
#define IDIST__LOOK_NS ((int64_t)3600 * 1000000000)
#define IDIST_IMPLEMENTATION
#endif
#include "idist.h"

#include "ranks.h"

enum { N_THREADS = 2, COUNT_MAX = 60000, N_OPERATIONS = 6 };

typedef struct caller { // one thread of a rank
    idist_group *group;
    int rank, n, number, turns;
    uint64_t seed; // equal on all ranks for threads of the same number
    int32_t *x, *y;
} caller;

// Returns element i of `rank`. Only the term 1000 * rank differs between ranks.
static int32_t value_of(int rank, size_t i) { return (int32_t)(i % 1000) + 1000 * rank; }

static void check(const caller *c, const char *what, const int32_t *got, size_t count,
                  int64_t times, int64_t ranks) {
    for (size_t i = 0; i < count; i++) {
        int64_t want = times * (int64_t)(i % 1000) + 1000 * ranks;
        if (got[i] == want) continue;
        rank_fail("%s of %zu: rank %d, thread %d: element %zu: got %d expected %lld", what, count,
                  c->rank, c->number, i, got[i], (long long)want);
        return;
    }
}

static void pass_on(const caller *c, size_t count, const idist_opts *o) {
    int right = (c->rank + 1) % c->n, left = (c->rank + c->n - 1) % c->n;
    rank_ok(c->rank,
            idist_sendrecv(c->x, count, right, 5, c->y, count, left, 5, IDIST_I32, NULL, o));
    check(c, "sendrecv", c->y, count, 1, left);
}

static void one_call(const caller *c, int operation, size_t count, int root) {
    idist_opts o = opts_of(c->group);
    idist_request r;
    int64_t ranks = (int64_t)c->n * (c->n - 1) / 2;
    for (size_t i = 0; i < count; i++) c->x[i] = value_of(c->rank, i);
    switch (operation) {
    case 0: rank_ok(c->rank, idist_barrier(&o)); break;
    case 1:
        rank_ok(c->rank, idist_all_reduce(c->x, c->y, count, IDIST_I32, IDIST_SUM, &o));
        check(c, "all_reduce", c->y, count, c->n, ranks);
        break;
    case 2:
        rank_ok(c->rank, idist_broadcast(c->x, count, IDIST_I32, root, &o));
        check(c, "broadcast", c->x, count, 1, root);
        break;
    case 3:
        rank_ok(c->rank, idist_reduce(c->x, c->y, count, IDIST_I32, IDIST_SUM, root, &o));
        if (c->rank == root) check(c, "reduce", c->y, count, c->n, ranks);
        break;
    case 4: pass_on(c, count, &o); break;
    default:
        o.request = &r;
        rank_ok(c->rank, idist_all_reduce(c->x, c->y, count, IDIST_I32, IDIST_SUM, &o));
        rank_ok(c->rank, idist_wait(&r));
        check(c, "immediate all_reduce", c->y, count, c->n, ranks);
        break;
    }
}

// Delays a rank by a random time, now and then so long that other ranks fall asleep.
static void come_late(uint64_t h) {
    int64_t until = tap_now_ns() + (int64_t)(h % 100000);
    if (h / 100000 % 12 == 0) tap_sleep_ms(8 + (int)(h % 8));
    while (h / 100000 % 12 < 6 && tap_now_ns() < until) sched_yield();
}

static void *calls(void *arg) {
    static const size_t counts[] = {1, 100, 3000, COUNT_MAX};
    const caller *c = (const caller *)arg;
    for (int i = 0; i < c->turns; i++) {
        uint64_t h = tap_mix(c->seed + (uint64_t)i);
        come_late(tap_mix(h + (uint64_t)c->rank + 1));
        one_call(c, (int)(h % N_OPERATIONS), counts[h / 64 % 4], (int)(h / 1024 % (uint64_t)c->n));
    }
    return NULL;
}

typedef struct plan {
    int thread_count, turns;
} plan;

static void sleep_and_wake(idist_group *world, int rank, int n, void *arg) {
    const plan *p = (const plan *)arg;
    caller callers[N_THREADS];
    pthread_t threads[N_THREADS];
    for (int k = 0; k < p->thread_count; k++) {
        caller *c = &callers[k];
        memset(c, 0, sizeof *c);
        c->rank = rank;
        c->n = n;
        c->number = k;
        c->turns = p->turns;
        c->seed = tap_mix(tap_seed() + (uint64_t)k);
        c->x = (int32_t *)malloc(COUNT_MAX * sizeof *c->x);
        c->y = (int32_t *)malloc(COUNT_MAX * sizeof *c->y);
        TAP_REQUIRE(c->x && c->y);
        if (!rank_ok(rank, idist_split(world, 0, rank, &c->group))) return;
    }
    for (int k = 0; k < p->thread_count; k++)
        TAP_REQUIRE(pthread_create(&threads[k], NULL, calls, &callers[k]) == 0);
    for (int k = 0; k < p->thread_count; k++) {
        TAP_REQUIRE(pthread_join(threads[k], NULL) == 0);
        rank_ok(rank, idist_free_group(&callers[k].group));
        free(callers[k].x);
        free(callers[k].y);
    }
}

#ifndef RANKS_MPI
// Sends a burst of small messages from rank 0, which then makes no call until they have arrived.
// The library may hold back such sends to combine them, but must not wait for a call of the
// program.
static void burst_while_computing(idist_group *world, int rank, int n, void *arg) {
    enum { K = 20 };
    static int arrived;
    int32_t x[K], sum = 0;
    idist_request r[K];
    (void)n;
    (void)arg;
    for (int round = 0; round < 10; round++) {
        idist_opts o = opts_of(world);
        if (rank == 0) __atomic_store_n(&arrived, 0, __ATOMIC_RELEASE);
        rank_ok(rank, idist_barrier(&o));
        for (int i = 0; i < K && rank == 0; i++) {
            idist_opts a = opts_async(world, &r[i]);
            x[i] = i + round;
            rank_ok(rank, idist_send(&x[i], 1, IDIST_I32, 1, i, &a));
        }
        o.timeout_ms = 3000 * test_slow_factor();
        for (int i = 0; i < K && rank == 1; i++) {
            rank_ok(rank, idist_recv(&sum, 1, IDIST_I32, 0, i, NULL, &o));
            rank_check(sum == i + round, "message %d: got %d", i, sum);
        }
        if (rank == 1) __atomic_store_n(&arrived, 1, __ATOMIC_RELEASE);
        for (int ms = 0; ms < 5000 && !__atomic_load_n(&arrived, __ATOMIC_ACQUIRE); ms++)
            tap_sleep_ms(1);
        if (rank == 0) rank_ok(rank, idist_wait_all(r, K));
    }
}
#endif

int main(void) {
    static const struct {
        int n;
        const char *transport;
    } ways[] = {{2, "auto"}, {3, "auto"}, {6, "auto"}, {4, "2+2"}, {6, "3+1+2"}};
    int slow = test_slow_factor(), turns = test_quick() ? 80 : 600;
    tap_deadline(220 * slow);
    for (int i = 0; i < 2 * (int)(sizeof ways / sizeof ways[0]); i++) {
        idist_desc d = desc_with(ways[i / 2].transport, "auto");
        plan p = {1 + i % N_THREADS, turns};
        d.timeout_ms = RANKS_TIMEOUT_MS * slow;
        tap_running("%d ranks, %s, %d threads", ways[i / 2].n, ways[i / 2].transport, 1 + i % 2);
        ranks_reset();
        ranks_processes(ways[i / 2].n, &d, sleep_and_wake, &p, 60000 * slow);
        ranks_report("%d ranks, %s, %d threads: every sleeper is woken by those that it waits for",
                     ways[i / 2].n, ways[i / 2].transport, 1 + i % 2);
    }
#ifndef RANKS_MPI
    for (int t = 0; t < N_TRANSPORTS; t++) {
        idist_desc d = desc_with(transport_names[t], "auto");
        ranks_case(2, &d, burst_while_computing, NULL, "a burst of sends, then no call, %s",
                   d.transport);
    }
#endif
    return tap_done();
}
