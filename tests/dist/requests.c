// requests: wait, test, wait_all, wait_any, several collectives in flight, progress while the
// program computes
#include "idist.h"

#include "grid.h"

static void empty_ones(idist_group *world, int rank, int n, void *arg) {
    idist_request r[3] = {{NULL}, {NULL}, {NULL}};
    size_t index = 77, count = 77, indices[3];
    bool done = false;
    (void)world;
    (void)n;
    (void)arg;
    rank_ok(rank, idist_wait(&r[0]));
    rank_ok(rank, idist_test(&r[0], &done));
    rank_check(done, "an empty request is complete");
    rank_ok(rank, idist_wait_all(r, 3));
    rank_ok(rank, idist_wait_all(NULL, 0));
    rank_ok(rank, idist_wait_any(r, 3, &index));
    rank_check(index == 3, "wait_any of empty ones: got %zu expected 3", index);
    rank_ok(rank, idist_wait_some(r, 3, indices, &count));
    rank_check(count == 0, "wait_some of empty ones: got %zu expected 0", count);
    rank_ok(rank, idist_wait_some(NULL, 0, NULL, &count));
    done = false;
    rank_ok(rank, idist_test_all(r, 3, &done));
    rank_check(done, "test_all of empty ones");
    rank_is(rank, idist_test_all(r, 3, NULL), IDIST_ERR_ARG);
    rank_is(rank, idist_wait_some(r, 3, NULL, &count), IDIST_ERR_ARG);
}

static void check_sum(int rank, int n, const int64_t *x, size_t count, int which) {
    for (size_t i = 0; i < count; i++) {
        int64_t want = (int64_t)n * (which * 100 + (int64_t)i % 7) + n * (n - 1) / 2;
        if (x[i] == want) continue;
        rank_fail("rank %d: all_reduce %d element %zu: got %lld expected %lld", rank, which, i,
                  (long long)x[i], (long long)want);
        return;
    }
}

// Completes n_requests all_reduces with wait_some and checks each result as soon as it is complete.
static void complete_some(int rank, int n, idist_request *r, size_t n_requests, int64_t *const *x,
                          const size_t *counts) {
    size_t some[16], left = n_requests, count = 0;
    for (; left > 0; left -= count) {
        rank_ok(rank, idist_wait_some(r, n_requests, some, &count));
        if (count == 0 || count > left) {
            rank_fail("rank %d: wait_some gave %zu of %zu", rank, count, left);
            break;
        }
        for (size_t k = 0; k < count; k++) {
            rank_check(k == 0 || some[k] > some[k - 1], "rank %d: wait_some: the order", rank);
            check_sum(rank, n, x[some[k]], counts[some[k] % 4], (int)some[k]);
        }
    }
}

// Starts K all_reduces of different sizes and completes them in the way that `how` selects. If
// `how` is 1, the ranks wait in different orders.
static void many_in_flight(idist_group *world, int rank, int n, void *arg) {
    enum { K = 12 };
    static const size_t counts[4] = {1, 100, 5000, 60000};
    int how = *(const int *)arg;
    idist_request r[K];
    int64_t *x[K];
    memset(r, 0, sizeof r);
    for (int k = 0; k < K; k++) {
        size_t count = counts[k % 4];
        x[k] = (int64_t *)malloc(count * sizeof **x);
        TAP_REQUIRE(x[k]);
        for (size_t i = 0; i < count; i++) x[k][i] = k * 100 + (int64_t)i % 7 + rank;
        idist_opts o = opts_async(world, &r[k]);
        rank_ok(rank, idist_all_reduce(x[k], x[k], count, IDIST_I64, IDIST_SUM, &o));
    }
    if (how == 0) {
        rank_ok(rank, idist_wait_all(r, K));
    } else if (how == 1) {
        for (int k = 0; k < K; k++) rank_ok(rank, idist_wait(&r[(k * 5 + rank) % K]));
    } else if (how == 2) {
        bool seen[K] = {false};
        for (int k = 0; k < K; k++) {
            size_t index = K;
            rank_ok(rank, idist_wait_any(r, K, &index));
            if (index >= K || seen[index]) {
                rank_fail("rank %d: wait_any gave %zu", rank, index);
                break;
            }
            seen[index] = true;
            // The result is valid immediately.
            check_sum(rank, n, x[index], counts[index % 4], (int)index);
        }
    } else if (how == 4) {
        complete_some(rank, n, r, K, x, counts);
    } else if (how == 5) {
        bool done = false;
        while (!done)
            if (!rank_ok(rank, idist_test_all(r, K, &done))) break;
    } else {
        for (int left = K, turns = 0; left > 0 && turns < 100000000; turns++) {
            int k = turns % K;
            bool done = false;
            if (!r[k].impl) continue;
            if (!rank_ok(rank, idist_test(&r[k], &done))) break;
            left -= done;
        }
    }
    for (int k = 0; k < K; k++) {
        rank_check(r[k].impl == NULL, "rank %d: request %d is not empty", rank, k);
        check_sum(rank, n, x[k], counts[k % 4], k);
        free(x[k]);
    }
}

static int32_t *freed_buffers[3]; // buffers of freed_early, by rank

// Frees requests that are not complete. The messages must still arrive, even if the receive starts
// after the sender has begun to leave the world.
static void freed_early(idist_group *world, int rank, int n, void *arg) {
    enum { COUNT = 300000 };
    idist_request request = {NULL}, copy;
    idist_opts o = opts_of(world), a = opts_async(world, &request);
    int32_t *x = (int32_t *)malloc(COUNT * sizeof *x);
    int32_t small = 5, sum = 1;
    (void)arg;
    TAP_REQUIRE(x);
    for (int i = 0; i < COUNT; i++) x[i] = i;
    if (rank == 0) {
        rank_ok(rank, idist_send(&small, 1, IDIST_I32, 1 % n, 1, &a));
        rank_ok(rank, idist_request_free(&request));
        rank_ok(rank, idist_send(x, COUNT, IDIST_I32, 1 % n, 2, &a));
        copy = request; // a request may move
        request.impl = NULL;
        rank_ok(rank, idist_request_free(&copy));
        rank_check(copy.impl == NULL, "the request is not empty");
    }
    if (rank == 1 % n) {
        rank_ok(rank, idist_recv(&sum, 1, IDIST_I32, 0, 1, NULL, &a));
        rank_ok(rank, idist_request_free(&request));
        if (n > 1) {
            memset(x, 0, COUNT * sizeof *x);
            tap_sleep_ms(20);
        }
        rank_ok(rank, idist_recv(x, COUNT, IDIST_I32, 0, 2, NULL, &o));
        for (int i = 0; i < COUNT; i += 999) rank_check(x[i] == i, "element %d: got %d", i, x[i]);
        rank_check(sum == 5, "a receive that was let go got %d", sum);
    }
    rank_ok(rank, idist_request_free(&request)); // an empty request
    rank_ok(rank, idist_barrier(&o));
    if (rank == 0) rank_ok(rank, idist_send(x, COUNT, IDIST_I32, 1 % n, 3, &a));
    if (rank == 0) rank_ok(rank, idist_request_free(&request));
    if (rank == 1 % n) rank_ok(rank, idist_recv(x, COUNT, IDIST_I32, 0, 3, NULL, &a));
    if (rank == 1 % n) rank_ok(rank, idist_request_free(&request));
    freed_buffers[rank] = x; // used until the world is closed
}

// Starts 300 collectives at the same time, which is more than the number of past calls that the
// library remembers. The last rank comes late to most of them.
static void very_many(idist_group *world, int rank, int n, void *arg) {
    enum { K = 300 };
    idist_request r[K];
    int64_t x[K];
    (void)arg;
    memset(r, 0, sizeof r);
    for (int k = 0; k < K; k++) {
        idist_opts o = opts_async(world, &r[k]);
        x[k] = 100 * k + rank;
        if (rank == n - 1 && k == 10) tap_sleep_ms(30);
        rank_ok(rank, k % 3 ? idist_all_reduce(&x[k], &x[k], 1, IDIST_I64, IDIST_SUM, &o)
                            : idist_broadcast(&x[k], 1, IDIST_I64, k % n, &o));
    }
    rank_ok(rank, idist_wait_all(r, K));
    for (int k = 0; k < K; k++)
        if (k % 3) check_sum(rank, n, &x[k], 1, k);
        else
            rank_check(x[k] == 100 * k + k % n, "rank %d: broadcast %d: got %lld", rank, k,
                       (long long)x[k]);
}

// Runs eight different collectives at the same time.
static void a_mix(idist_group *world, int rank, int n, void *arg) {
    enum { C = 3000 };
    const size_t m = (size_t)n;
    idist_request r[8];
    idist_opts o[8];
    (void)arg;
    memset(r, 0, sizeof r);
    for (int i = 0; i < 8; i++) o[i] = opts_async(world, &r[i]);
    int32_t *buf = (int32_t *)calloc(C * (8 + 4 * m), sizeof *buf);
    TAP_REQUIRE(buf);
    int32_t *bc = buf, *ar = buf + C, *sc = buf + 2 * C, *rsr = buf + 3 * C, *sr = buf + 4 * C,
            *rr = buf + 5 * C;
    int32_t *ag = buf + 8 * C, *rss = ag + C * m, *a2a = rss + C * m, *sb = a2a + C * m;
    for (size_t i = 0; i < C; i++) {
        if (rank == n - 1) bc[i] = (int32_t)i;
        ar[i] = rank;
        sc[i] = 1;
        ag[C * (size_t)rank + i] = rank * 10;
    }
    for (size_t i = 0; i < C * m; i++) {
        rss[i] = (int32_t)(i / C);
        a2a[i] = rank * 100 + (int32_t)(i / C);
        sb[i] = (int32_t)(i / C) + 500;
    }
    rank_ok(rank, idist_broadcast(bc, C, IDIST_I32, n - 1, &o[0]));
    rank_ok(rank, idist_all_reduce(ar, ar, C, IDIST_I32, IDIST_MAX, &o[1]));
    rank_ok(rank, idist_scan(sc, sc, C, IDIST_I32, IDIST_SUM, &o[2]));
    rank_ok(rank, idist_all_gather(ag + C * (size_t)rank, ag, C, IDIST_I32, &o[3]));
    rank_ok(rank, idist_reduce_scatter(rss, rsr, C, IDIST_I32, IDIST_SUM, &o[4]));
    rank_ok(rank, idist_all_to_all(a2a, a2a, C, IDIST_I32, &o[5]));
    rank_ok(rank, idist_scatter(sb, sr, C, IDIST_I32, 0, &o[6]));
    rank_ok(rank, idist_reduce(sr + C * 2, rr, C, IDIST_I32, IDIST_SUM, 0, &o[7]));
    rank_ok(rank, idist_wait_all(r, 8));
    for (size_t i = 0; i < C; i++) {
        bool ok = bc[i] == (int32_t)i && ar[i] == n - 1 && sc[i] == rank + 1 &&
                  rsr[i] == n * rank && sr[i] == rank + 500;
        for (size_t k = 0; k < m; k++)
            ok =
                ok && ag[C * k + i] == (int32_t)k * 10 && a2a[C * k + i] == (int32_t)k * 100 + rank;
        rank_check(ok, "rank %d: element %zu is wrong", rank, i);
        if (!ok) break;
    }
    free(buf);
}

// Flags that the ranks share in the tests of progress.
typedef struct flags {
    int rank0_done; // atomic
} flags;

// Starts a request on every rank but rank 0. These ranks then only compute, without any call, until
// the call of rank 0 has returned. If their requests made no progress, rank 0 would time out.
static void progress_without_calls(idist_group *world, int rank, int n, void *arg) {
    flags *shared = (flags *)arg;
    const size_t count = 200000; // many steps
    float *x = (float *)malloc(count * sizeof *x);
    TAP_REQUIRE(x);
    (void)n;
    for (size_t i = 0; i < count; i++) x[i] = 1.0f;
    if (rank == 0) {
        idist_opts o = opts_of(world);
        o.timeout_ms = 5000 * test_slow_factor();
        rank_ok(rank, idist_all_reduce(x, x, count, IDIST_F32, IDIST_SUM, &o));
        __atomic_store_n(&shared->rank0_done, 1, __ATOMIC_RELEASE);
    } else {
        idist_request r = {NULL};
        idist_opts o = opts_async(world, &r);
        rank_ok(rank, idist_all_reduce(x, x, count, IDIST_F32, IDIST_SUM, &o));
        int64_t end_ms = tap_now_ms() + 6000 * test_slow_factor();
        while (!__atomic_load_n(&shared->rank0_done, __ATOMIC_ACQUIRE) && tap_now_ms() < end_ms) {}
        rank_check(__atomic_load_n(&shared->rank0_done, __ATOMIC_ACQUIRE),
                   "rank %d: rank 0 got no answer meanwhile", rank);
        rank_ok(rank, idist_wait(&r));
    }
    rank_check(x[0] == (float)n && x[count - 1] == (float)n, "rank %d: got %g expected %d", rank,
               (double)x[0], n);
    free(x);
}

// Sends a large message from rank 1, which then only computes. The data must move while the sender
// makes no calls.
static void p2p_without_calls(idist_group *world, int rank, int n, void *arg) {
    flags *shared = (flags *)arg;
    const size_t count = 500000;
    uint8_t *x = (uint8_t *)calloc(count, 1);
    TAP_REQUIRE(x);
    (void)n;
    if (rank == 0) {
        idist_opts o = opts_of(world);
        o.timeout_ms = 5000 * test_slow_factor();
        rank_ok(rank, idist_recv(x, count, IDIST_U8, 1, 0, NULL, &o));
        rank_check(pattern_find_wrong(x, 0, count, 1, 1, 0) == count, "wrong data");
        __atomic_store_n(&shared->rank0_done, 1, __ATOMIC_RELEASE);
    } else if (rank == 1) {
        idist_request r = {NULL};
        idist_opts o = opts_async(world, &r);
        pattern_fill(x, 0, count, 1, 1, 0);
        rank_ok(rank, idist_send(x, count, IDIST_U8, 0, 0, &o));
        int64_t end_ms = tap_now_ms() + 6000 * test_slow_factor();
        while (!__atomic_load_n(&shared->rank0_done, __ATOMIC_ACQUIRE) && tap_now_ms() < end_ms) {}
        rank_ok(rank, idist_wait(&r));
    }
    free(x);
}

// Waits for a request that another thread started.
static void *waiter(void *arg) {
    idist_request *r = (idist_request *)arg;
    idist_status status = idist_wait(r);
    rank_check(status == IDIST_OK, "wait in another thread: got %s", idist_status_name(status));
    return NULL;
}

static void another_thread_waits(idist_group *world, int rank, int n, void *arg) {
    int32_t x = rank + 1;
    idist_request r = {NULL};
    idist_opts o = opts_async(world, &r);
    pthread_t thread;
    (void)arg;
    rank_ok(rank, idist_all_reduce(&x, &x, 1, IDIST_I32, IDIST_SUM, &o));
    TAP_REQUIRE(pthread_create(&thread, NULL, waiter, &r) == 0);
    TAP_REQUIRE(pthread_join(thread, NULL) == 0);
    rank_check(x == n * (n + 1) / 2, "rank %d: got %d expected %d", rank, x, n * (n + 1) / 2);
}

// Makes one request fail. wait_all must complete the other requests and then return the first
// failure by index.
static void first_failure(idist_group *world, int rank, int n, void *arg) {
    idist_request r[3] = {{NULL}, {NULL}, {NULL}};
    idist_opts o = opts_async(world, &r[0]), b = opts_of(world);
    int32_t x = 0, y = 0, z = rank;
    (void)n;
    (void)arg;
    if (rank == 0) {
        o.timeout_ms = 50;
        rank_ok(rank, idist_recv(&x, 1, IDIST_I32, 1, 1, NULL, &o)); // never sent
        o = opts_async(world, &r[1]);
        rank_ok(rank, idist_recv(&y, 1, IDIST_I32, 1, 2, NULL, &o));
        rank_is(rank, idist_wait_all(r, 3), IDIST_ERR_TIMEOUT);
        rank_check(r[0].impl == NULL && r[1].impl == NULL, "all requests are empty");
        rank_check(y == 1, "the other one completed: got %d expected 1", y);
    }
    if (rank == 1) {
        tap_sleep_ms(80); // so that request 0 fails before request 1 can complete
        rank_ok(rank, idist_send(&z, 1, IDIST_I32, 0, 2, &b));
    }
    rank_ok(rank, idist_barrier(&b));
}

// Starts two receives, one of them too short. wait_some or test_all must report the failure exactly
// once.
static void some_fail(idist_group *world, int rank, int n, void *arg) {
    idist_request r[2] = {{NULL}, {NULL}};
    idist_opts a = opts_async(world, &r[0]), b = opts_async(world, &r[1]), o = opts_of(world);
    int32_t x[2] = {7, 8}, y = 0;
    size_t some[2], count = 0, seen = 0;
    idist_recv_info info;
    (void)n;
    (void)arg;
    for (int way = 0; way < 2; way++) {
        int failures = 0;
        bool done = false;
        if (rank == 1) {
            rank_ok(rank, idist_send(x, 2, IDIST_I32, 0, 2, &o));
            rank_ok(rank, idist_send(x, 1, IDIST_I32, 0, 3, &o));
        }
        if (rank == 0) {
            rank_ok(rank, idist_probe(1, 2, &info, &o)); // so both receives complete immediately
            rank_ok(rank, idist_probe(1, 3, &info, &o));
            rank_ok(rank, idist_recv(&y, 1, IDIST_I32, 1, 3, NULL, &a));
            rank_ok(rank, idist_recv(&y, 1, IDIST_I32, 1, 2, NULL, &b)); // too short
            for (seen = 0; way == 0 && seen < 2; seen += count) {
                idist_status status = idist_wait_some(r, 2, some, &count);
                bool has_last = count > 0 && some[count - 1] == 1;
                rank_is(rank, status, has_last ? IDIST_ERR_TRUNCATED : IDIST_OK);
                rank_check(count > 0, "wait_some completes none");
                if (count == 0) break;
            }
            while (way == 1 && !done) failures += idist_test_all(r, 2, &done) != IDIST_OK;
            rank_check(failures == way, "test_all: %d failures", failures);
            rank_check(way == 0 || strstr(idist_last_error(), "recv") != NULL, "got \"%s\"",
                       idist_last_error());
            rank_check(!r[0].impl && !r[1].impl && y == 7, "both are complete");
            rank_ok(rank, idist_recv(x, 2, IDIST_I32, 1, 2, NULL, &o));
        }
        rank_ok(rank, idist_barrier(&o));
    }
}

// Makes two requests fail in different ways. wait_all must return the first failure by index, not
// the first in time.
static void first_of_two_failures(idist_group *world, int rank, int n, void *arg) {
    idist_request r[2] = {{NULL}, {NULL}};
    idist_opts a = opts_async(world, &r[0]), b = opts_async(world, &r[1]), o = opts_of(world);
    int32_t x[2] = {0, 0};
    (void)n;
    (void)arg;
    if (rank == 1) rank_ok(rank, idist_send(x, 2, IDIST_I32, 0, 2, &o));
    if (rank == 0) {
        a.timeout_ms = 50;
        rank_ok(rank, idist_recv(x, 1, IDIST_I32, 1, 1, NULL, &a)); // never sent
        rank_ok(rank, idist_recv(x, 1, IDIST_I32, 1, 2, NULL, &b)); // too short
        rank_is(rank, idist_wait_all(r, 2), IDIST_ERR_TIMEOUT);
        rank_check(strstr(idist_last_error(), "not done after") != NULL, "got \"%s\"",
                   idist_last_error());
        rank_ok(rank, idist_recv(x, 2, IDIST_I32, 1, 2, NULL, &o));
    }
    rank_ok(rank, idist_barrier(&o));
}

// Tests a request until it times out. A program that never waits must see the time-out as well.
static void test_has_deadlines(idist_group *world, int rank, int n, void *arg) {
    idist_request r = {NULL};
    idist_opts a = opts_async(world, &r), o = opts_of(world);
    int32_t x;
    bool done = false;
    idist_status s = IDIST_OK;
    (void)arg;
    a.timeout_ms = 60;
    rank_ok(rank, idist_recv(&x, 1, IDIST_I32, (rank + 1) % n, 1, NULL, &a));
    int64_t end_ms = tap_now_ms() + 60 + 500 * test_slow_factor();
    while (!done && s == IDIST_OK && tap_now_ms() < end_ms) s = idist_test(&r, &done);
    rank_check(done && s == IDIST_ERR_TIMEOUT, "rank %d: got %s", rank, idist_status_name(s));
    rank_ok(rank, idist_barrier(&o));
}

// Receives, in a second thread, a message that comes late.
static void *receive(void *arg) {
    idist_group *world = (idist_group *)arg;
    idist_opts o = opts_of(world);
    int rank = idist_group_rank(world), n = idist_group_size(world);
    int32_t x;
    rank_ok(rank, idist_recv(&x, 1, IDIST_I32, (rank + 1) % n, 1, NULL, &o));
    return NULL;
}

// Receives with a short time-out while another thread sleeps in a call with a long one. The short
// time-out must be kept.
static void beside_a_sleeping_thread(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world), brief = opts_of(world);
    pthread_t thread;
    int32_t x;
    (void)arg;
    brief.timeout_ms = 80;
    TAP_REQUIRE(pthread_create(&thread, NULL, receive, world) == 0);
    // After this time the other thread sleeps and has announced that it sleeps. The result must
    // also be right without the delay.
    tap_sleep_ms(150);
    // Time during which a thread or the machine waits for a processor does not count.
    int64_t start_ns = tap_now_ns(), waited_ns = tap_all_waited_ns() + tap_stolen_ns();
    rank_is(rank, idist_recv(&x, 1, IDIST_I32, (rank + 1) % n, 2, NULL, &brief), IDIST_ERR_TIMEOUT);
    waited_ns = tap_all_waited_ns() + tap_stolen_ns() - waited_ns;
    int took_ms = (int)((tap_now_ns() - start_ns - waited_ns) / 1000000);
    rank_check(took_ms < 80 + 400 * test_slow_factor(), "rank %d: after %d ms", rank, took_ms);
    rank_ok(rank, idist_send(&rank, 1, IDIST_I32, (rank + n - 1) % n, 1, &o));
    TAP_REQUIRE(pthread_join(thread, NULL) == 0);
}

// A model that says which receive gets which message: the oldest receive that matches. Receives
// come before or after the messages, and name a tag, a source, both or none. Rank 1 sends, rank 0
// receives.
enum { RECEIVES = 400, MATCHES = 3 * RECEIVES };

typedef struct matching {
    int n_receives, n_messages;
    int wants[MATCHES], source[MATCHES]; // tag and source of a receive
    int tag[MATCHES];                    // tag of a message
    int got[MATCHES];                    // message that a receive gets, -1 if none yet
} matching;

static bool matching_send(matching *m, int tag) {
    m->tag[m->n_messages++] = tag;
    for (int i = 0; i < m->n_receives; i++) {
        if (m->got[i] >= 0 || (m->wants[i] != IDIST_ANY_TAG && m->wants[i] != tag)) continue;
        m->got[i] = m->n_messages - 1;
        return true;
    }
    return false;
}

static void matching_make(matching *m, uint64_t seed) {
    memset(m, 0, sizeof *m);
    while (m->n_receives < RECEIVES) {
        uint64_t x = tap_mix(seed + (uint64_t)m->n_receives);
        m->wants[m->n_receives] = x % 5 == 0 ? IDIST_ANY_TAG : (int)(x / 5 % 40);
        m->source[m->n_receives] = x / 200 % 4 == 0 ? IDIST_ANY_SOURCE : 1;
        m->got[m->n_receives++] = -1;
    }
    // Adds a receive for each message that no receive matches.
    for (int k = 0; k < RECEIVES; k++)
        if (!matching_send(m, (int)(tap_mix(seed + 500 + (uint64_t)k) % 40))) {
            m->wants[m->n_receives] = IDIST_ANY_TAG;
            m->source[m->n_receives] = 1;
            m->got[m->n_receives++] = m->n_messages - 1;
        }
    // Adds a message for each receive that got nothing.
    for (int i = 0; i < m->n_receives; i++)
        while (m->got[i] < 0) (void)matching_send(m, m->wants[i] < 0 ? 0 : m->wants[i]);
}

static void who_gets_what(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    (void)n;
    (void)arg;
    for (int turn = 0; turn < 4; turn++) {
        matching model, *m = &model;
        // Number of receives that are posted before the messages.
        int first = turn == 0 ? 0 : turn == 1 ? RECEIVES : RECEIVES / 2;
        idist_request r[MATCHES];
        idist_recv_info info[MATCHES];
        int32_t x[MATCHES];
        matching_make(m, (uint64_t)turn * 1000);
        rank_ok(rank, idist_barrier(&o));
        if (rank == 0) {
            for (int i = 0; i < m->n_receives; i++) {
                idist_opts a = opts_async(world, &r[i]);
                if (i == first) rank_ok(rank, idist_barrier(&o));
                rank_ok(rank,
                        idist_recv(&x[i], 1, IDIST_I32, m->source[i], m->wants[i], &info[i], &a));
            }
            if (first >= m->n_receives) rank_ok(rank, idist_barrier(&o));
            rank_ok(rank, idist_wait_all(r, (size_t)m->n_receives));
            for (int i = 0; i < m->n_receives; i++)
                rank_check(x[i] == m->got[i] && info[i].tag == m->tag[m->got[i]] &&
                               info[i].source == 1,
                           "turn %d receive %d of tag %d from %d: got message %d of tag %d "
                           "expected %d of tag %d",
                           turn, i, m->wants[i], m->source[i], x[i], info[i].tag, m->got[i],
                           m->tag[m->got[i]]);
        } else if (rank == 1) {
            rank_ok(rank, idist_barrier(&o));
            for (int k = 0; k < m->n_messages; k++) {
                idist_opts a = opts_async(world, &r[k]);
                x[k] = k;
                rank_ok(rank, idist_send(&x[k], 1, IDIST_I32, 0, m->tag[k], &a));
            }
            rank_ok(rank, idist_wait_all(r, (size_t)m->n_messages));
        }
        rank_ok(rank, idist_barrier(&o));
    }
}

#ifndef RANKS_MPI
// ---- a request costs the same beside thousands of others ----
//
// Compares the cost of MANY requests that are open at the same time with the cost of MANY requests
// in batches of FEW. The cost is the processor time of the process, which runs both ranks. A single
// list that every call or frame searches from the beginning would multiply the cost by ten.
enum { FEW = 1000, MANY = 16000 };

static idist_request *crowd_requests[2];
static char *crowd_buffers[2];

static void crowd_recv(idist_group *world, int rank, int k, size_t nbytes, int tag) {
    idist_opts a = opts_async(world, &crowd_requests[rank][k]);
    rank_ok(rank, idist_recv(crowd_buffers[rank] + (size_t)k * nbytes, nbytes, IDIST_U8, 1, tag,
                             NULL, &a));
}

static void crowd_send(idist_group *world, int rank, int k, size_t nbytes, int tag) {
    idist_opts a = opts_async(world, &crowd_requests[rank][k]);
    rank_ok(rank, idist_send(crowd_buffers[rank], nbytes, IDIST_U8, 0, tag, &a));
}

// Posts the receives first and sends the messages from the last to the first, so that each message
// matches the newest of the open receives. Both ranks have announced that they wait before the
// first message is sent.
static void receives_first(idist_group *world, int rank, int count) {
    idist_opts o = opts_of(world);
    for (int k = 0; k < count && rank == 0; k++) crowd_recv(world, rank, k, 4, k);
    tap_sleep_ms(25);
    rank_ok(rank, idist_barrier(&o));
    for (int k = 0; k < count && rank == 1; k++) crowd_send(world, rank, k, 4, count - 1 - k);
    rank_ok(rank, idist_wait_all(crowd_requests[rank], (size_t)count));
}

// Sends the messages first. MANY messages need more space than a rank has for messages without a
// receive.
static void messages_first(idist_group *world, int rank, int count) {
    idist_opts o = opts_of(world);
    for (int k = 0; k < count && rank == 1; k++) crowd_send(world, rank, k, 1500, k);
    tap_sleep_ms(25);
    rank_ok(rank, idist_barrier(&o));
    for (int k = 0; k < count && rank == 0; k++) crowd_recv(world, rank, k, 1500, count - 1 - k);
    rank_ok(rank, idist_wait_all(crowd_requests[rank], (size_t)count));
}

static void all_reduces(idist_group *world, int rank, int count) {
    if (rank == 1) tap_sleep_ms(25);
    for (int k = 0; k < count; k++) {
        idist_opts a = opts_async(world, &crowd_requests[rank][k]);
        char *x = crowd_buffers[rank] + 4 * k;
        rank_ok(rank, idist_all_reduce(x, x, 1, IDIST_I32, IDIST_SUM, &a));
    }
    rank_ok(rank, idist_wait_all(crowd_requests[rank], (size_t)count));
}

static void in_one_group(idist_group *world, int rank, int count) {
    idist_opts o = opts_of(world);
    if (rank == 1) tap_sleep_ms(25);
    rank_ok(rank, idist_group_begin());
    for (int k = 0; k < count; k++) {
        char *x = crowd_buffers[rank] + 4 * k;
        if (k % 4 == 0) rank_ok(rank, idist_broadcast(x, 1, IDIST_I32, k % 2, &o));
        else if (k % 2) rank_ok(rank, idist_all_reduce(x, x, 1, IDIST_I32, IDIST_SUM, &o));
        else if (rank == 0) rank_ok(rank, idist_recv(x, 1, IDIST_I32, 1, 3, NULL, &o));
        else rank_ok(rank, idist_send(x, 1, IDIST_I32, 0, 3, &o));
    }
    rank_ok(rank, idist_group_end());
}

// Receives when no rank sends. The time-outs cancel the receives one by one.
static void time_outs(idist_group *world, int rank, int count) {
    idist_opts o = opts_of(world);
    for (int k = 0; k < count && rank == 0; k++) {
        idist_opts a = opts_async(world, &crowd_requests[rank][k]);
        a.timeout_ms = 30;
        rank_ok(rank, idist_recv(crowd_buffers[rank] + 4 * k, 4, IDIST_U8, 1, k, NULL, &a));
    }
    if (rank == 0)
        rank_is(rank, idist_wait_all(crowd_requests[rank], (size_t)count), IDIST_ERR_TIMEOUT);
    rank_ok(rank, idist_barrier(&o));
}

typedef struct crowd {
    void (*body)(idist_group *world, int rank, int count);
    const char *name;
} crowd;

static int64_t crowd_cpu_ns(void) {
    struct timespec ts;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ts);
    return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

static void crowded(idist_group *world, int rank, int n, void *arg) {
    const crowd *c = (const crowd *)arg;
    idist_opts o = opts_of(world);
    int64_t best[2] = {INT64_MAX, INT64_MAX};
    (void)n;
    crowd_requests[rank] = (idist_request *)calloc(MANY, sizeof **crowd_requests);
    crowd_buffers[rank] = (char *)calloc(MANY, 1500);
    TAP_REQUIRE(crowd_requests[rank] && crowd_buffers[rank]);
    for (int turn = 0; turn < 3; turn++) {
        int part = turn ? MANY : FEW;
        rank_ok(rank, idist_barrier(&o));
        int64_t spent = crowd_cpu_ns();
        for (int done = 0; done < MANY; done += part) c->body(world, rank, part);
        rank_ok(rank, idist_barrier(&o));
        spent = crowd_cpu_ns() - spent;
        if (spent < best[turn > 0]) best[turn > 0] = spent;
    }
    if (rank == 0)
        tap_diag("%s: %.2f and %.2f us", c->name, (double)best[0] / 1e3 / MANY,
                 (double)best[1] / 1e3 / MANY);
    // Allows up to 10 us more per request for memory that is no longer in any cache.
    rank_check(best[1] <= 4 * best[0] + (int64_t)MANY * 10000 * test_slow_factor(),
               "rank %d: a request costs %.2f us of processor time among %d, %.2f us among %d",
               rank, (double)best[0] / 1e3 / MANY, FEW, (double)best[1] / 1e3 / MANY, MANY);
    free(crowd_requests[rank]);
    free(crowd_buffers[rank]);
}

static void crowds(void) {
    static const crowd all[5] = {{receives_first, "receives first"},
                                 {messages_first, "messages first"},
                                 {all_reduces, "all_reduces"},
                                 {in_one_group, "between group_begin and group_end"},
                                 {time_outs, "time-outs"}};
    for (int t = 0; t < N_TRANSPORTS; t++) {
        for (int i = 0; i < 5; i++) {
            idist_desc d = desc_with(transport_names[t], "auto");
            crowd c = all[i];
            if (test_quick() && i % N_TRANSPORTS != t) continue; // each case over one transport
            ranks_case(2, &d, crowded, &c,
                       "a request costs the same among 16,000 as among 1,000: %s, %s", c.name,
                       d.transport);
        }
    }
}

static void two_worlds(void) {
    idist_group *w[2] = {NULL, NULL};
    idist_request r[2] = {{NULL}, {NULL}};
    int32_t x[2], one = 1;
    size_t index = 9;
    tap_running("requests of two worlds");
    ranks_reset();
    for (int i = 0; i < 2; i++) {
        rank_ok(0, idist_open(NULL, &w[i]));
        idist_opts a = opts_async(w[i], &r[i]), o = opts_of(w[i]);
        rank_ok(0, idist_recv(&x[i], 1, IDIST_I32, 0, 0, NULL, &a));
        rank_ok(0, idist_send(&one, 1, IDIST_I32, 0, 0, &o));
    }
    idist_request *pointers[3] = {NULL, &r[1], &r[0]};
    rank_ok(0, idist_wait_any_of(pointers, 3, &index));
    rank_check(index == 1 || index == 2, "index: got %zu", index);
    rank_ok(0, idist_wait_any(r, 2, &index));
    rank_check(index < 2, "index: got %zu", index);
    rank_ok(0, idist_wait_any(r, 2, &index));
    rank_check(index == 2, "index: got %zu expected 2", index);
    rank_check(x[0] == 1 && x[1] == 1, "got %d and %d", x[0], x[1]);
    rank_check(idist_group_translate(w[0], 0, w[1]) == -1,
               "ranks of one world are none of another's");
    for (int i = 0; i < 2; i++) rank_ok(0, idist_close(&w[i]));
    ranks_report("requests of two worlds");
}
#endif

#ifndef RANKS_MPI
// Starts a large request on rank 0, which then computes and exchanges small messages with itself
// until the other rank is done. The small messages complete immediately. The library must still
// make progress on the large request.
static void progress_beside_small_ones(idist_group *world, int rank, int n, void *arg) {
    enum { COUNT = 4 << 20 };
    static int arrived;
    int32_t *x = (int32_t *)calloc(COUNT, sizeof *x), one = 1, got;
    idist_request large = {NULL}, r[2];
    idist_opts o = opts_of(world), a = opts_async(world, &large), in = opts_async(world, &r[0]),
               out = opts_async(world, &r[1]);
    (void)n;
    (void)arg;
    TAP_REQUIRE(x);
    if (rank == 0) __atomic_store_n(&arrived, 0, __ATOMIC_RELEASE);
    rank_ok(rank, idist_barrier(&o));
    if (rank == 0) {
        rank_ok(rank, idist_all_reduce(x, x, COUNT, IDIST_I32, IDIST_SUM, &a));
        int64_t end = tap_now_ms() + 10000 * test_slow_factor();
        while (!__atomic_load_n(&arrived, __ATOMIC_ACQUIRE) && tap_now_ms() < end) {
            int64_t until = tap_now_ns() + 150000;
            while (tap_now_ns() < until) continue;
            rank_ok(rank, idist_recv(&got, 1, IDIST_I32, 0, 0, NULL, &in));
            rank_ok(rank, idist_send(&one, 1, IDIST_I32, 0, 0, &out));
            rank_ok(rank, idist_wait_all(r, 2));
        }
        rank_check(__atomic_load_n(&arrived, __ATOMIC_ACQUIRE),
                   "the other rank waited for this one");
        rank_ok(rank, idist_wait(&large));
    } else {
        o.timeout_ms = 9000 * test_slow_factor();
        rank_ok(rank, idist_all_reduce(x, x, COUNT, IDIST_I32, IDIST_SUM, &o));
        __atomic_store_n(&arrived, 1, __ATOMIC_RELEASE);
    }
    free(x);
}

static void keep_line(idist_log_level level, const char *line, void *user) {
    (void)level;
    if (strstr(line, "after idist_request_free")) snprintf((char *)user, 400, "%s", line);
}

// Closes a world with a freed request that never completes. idist_close must wait for the request
// until its deadline and then log a warning.
static void freed_and_lost(void) {
    static int32_t x[100000];
    const char *before = getenv("IDIST_LOG");
    char line[400] = "", level[40];
    idist_group *w = NULL;
    idist_request request = {NULL};
    idist_desc d;
    tap_running("closing waits for freed requests");
    ranks_reset();
    memset(&d, 0, sizeof d);
    d.timeout_ms = 50;
    d.logger.log_fn = keep_line;
    d.logger.user = line;
    snprintf(level, sizeof level, "%s", before ? before : "");
    setenv("IDIST_LOG", "warn", 1);
    rank_ok(0, idist_open(&d, &w));
    setenv("IDIST_LOG", level, 1);
    idist_opts a = opts_async(w, &request);
    rank_ok(0, idist_send(x, 100000, IDIST_I32, 0, 0, &a));
    rank_ok(0, idist_request_free(&request));
    rank_ok(0, idist_close(&w));
    rank_check(strstr(line, "not done after") != NULL, "the log says: %s", line);
    ranks_report("closing waits for what was let go");
}
#endif

// Runs the cases that are repeated for every placement of the ranks.
static void placed(const char *transport) {
    idist_desc many = desc_with(transport, "latency"), d = desc_with(transport, "auto");
    ranks_case(3, &many, very_many, NULL, "300 collectives in flight, one rank late, %s",
               many.transport);
    for (int n = 1; n <= 3; n++) {
        ranks_case(n, &d, freed_early, NULL, "requests that are freed early n=%d, %s", n,
                   d.transport);
        for (int k = 0; k < 3; k++) {
            free(freed_buffers[k]);
            freed_buffers[k] = NULL;
        }
    }
#ifndef RANKS_MPI
    ranks_case(2, &d, progress_beside_small_ones, NULL,
               "a large request beside small ones and no wait for it, %s", d.transport);
#endif
    ranks_case(2, &d, who_gets_what, NULL, "who gets which of many messages, %s", d.transport);
    ranks_case(2, &d, test_has_deadlines, NULL, "deadlines without a wait n=2, %s", d.transport);
    ranks_case(2, &d, beside_a_sleeping_thread, NULL, "a deadline beside a sleeping thread n=2, %s",
               d.transport);
}

int main(void) {
    static const char *ways[6] = {"wait_all",  "wait in another order",
                                  "wait_any",  "test",
                                  "wait_some", "test_all"};
    static const int sizes[5] = {1, 2, 3, 4, 7};
    tap_deadline(200);
    ranks_case(1, NULL, empty_ones, NULL, "empty requests, n=1");
    ranks_case(2, NULL, empty_ones, NULL, "empty requests, n=2");
    for (int i = 0; i < 5; i++) {
        for (int how = 0; how < 6; how++) {
            idist_desc d = desc_with(how == 1 && sizes[i] == 3 ? "tcp" : "auto",
                                     algorithm_names[(i + how) % N_ALGORITHMS]);
            ranks_case(sizes[i], &d, many_in_flight, &how, "12 all_reduces in flight n=%d, %s, %s",
                       sizes[i], ways[how], d.algorithm);
        }
        ranks_case(sizes[i], NULL, a_mix, NULL, "8 different collectives in flight n=%d", sizes[i]);
        ranks_case(sizes[i], NULL, another_thread_waits, NULL, "another thread waits n=%d",
                   sizes[i]);
    }
    for (int a = 0; a < N_ALGORITHMS; a++) {
        idist_desc d = desc_with("auto", algorithm_names[a]);
        for (int n = 2; n <= 3; n++) {
            ranks_case(n, &d, progress_without_calls, shared_alloc(sizeof(flags)),
                       "all_reduce progresses while others compute n=%d %s", n, algorithm_names[a]);
        }
    }
    idist_desc tcp = desc_with("tcp", "auto");
    ranks_case(2, NULL, p2p_without_calls, shared_alloc(sizeof(flags)),
               "a large send progresses while the sender computes");
    ranks_case(2, &tcp, p2p_without_calls, shared_alloc(sizeof(flags)),
               "a large send progresses while the sender computes, tcp");
    ranks_case(2, NULL, first_failure, NULL,
               "wait_all returns the first failure and completes the rest");
    ranks_case(2, NULL, some_fail, NULL, "wait_some and test_all tell of a failure");
    ranks_case(2, NULL, first_of_two_failures, NULL, "wait_all returns the first of two failures");
#ifndef RANKS_MPI
    two_worlds();
    freed_and_lost();
    crowds();
#endif
    ranks_case(1, NULL, test_has_deadlines, NULL, "deadlines without a wait n=1");
    ranks_case(1, NULL, beside_a_sleeping_thread, NULL, "a deadline beside a sleeping thread n=1");
    for (int t = 0; t < N_PLACEMENTS; t++) placed(transport_names[t]);
    return tap_done();
}
