// send, recv, sendrecv: order, tags, wildcards, probes, sizes from zero to large, time-outs
#include "idist.h"

#include "grid.h"

// Passes messages of many sizes and all dtypes around a ring. Each rank sends to its right neighbor
// and receives from its left neighbor.
static void ring_sendrecv(idist_group *world, int rank, int n, void *arg) {
    static const size_t counts[9] = {0, 1, 2, 3, 1000, 8191, 8193, 65537, 300001};
    idist_opts o = opts_of(world);
    int right = (rank + 1) % n, left = (rank + n - 1) % n;
    (void)arg;
    for (int i = 0; i < 9; i++) {
        for (int d = i; d < IDIST_DTYPE_COUNT; d += i < 5 ? 1 : 5) {
            size_t esize = idist_dtype_size((idist_dtype)d), count = counts[i];
            guarded_buffer s = guarded_buffer_make(count * esize, (size_t)(d % 2)),
                           r = guarded_buffer_make(count * esize, (size_t)(i % 2));
            idist_recv_info info = {-5, -5, 99, IDIST_I8};
            pattern_fill(s.p, 0, count, esize, rank, (uint64_t)i);
            rank_ok(rank, idist_sendrecv(s.p, count, right, i, r.p, count, left, i, (idist_dtype)d,
                                         &info, &o));
            rank_check(info.source == left && info.tag == i && info.count == count,
                       "rank %d: info got %d,%d,%zu expected %d,%d,%zu", rank, info.source,
                       info.tag, info.count, left, i, count);
            rank_check(pattern_find_wrong(r.p, 0, count, esize, left, (uint64_t)i) == count,
                       "rank %d: %zu x %s: wrong data", rank, count,
                       idist_dtype_name((idist_dtype)d));
            rank_check(pattern_find_wrong(s.p, 0, count, esize, rank, (uint64_t)i) == count,
                       "rank %d: send buffer changed", rank);
            rank_check(guarded_buffer_guards_hold(&s) && guarded_buffer_guards_hold(&r),
                       "rank %d: written outside of a buffer", rank);
            guarded_buffer_free(&s);
            guarded_buffer_free(&r);
        }
    }
}

// Sends small messages and receives them in reverse order of their tags. Each message must be kept
// until a receive asks for it.
static void tags_out_of_order(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    int32_t x;
    (void)arg;
    (void)n;
    if (rank == 0)
        for (int32_t tag = 0; tag < 10; tag++)
            rank_ok(rank, idist_send(&tag, 1, IDIST_I32, 1, tag, &o));
    if (rank == 1) {
        for (int tag = 9; tag >= 0; tag--) {
            x = -1;
            rank_ok(rank, idist_recv(&x, 1, IDIST_I32, 0, tag, NULL, &o));
            rank_check(x == tag, "tag %d: got %d", tag, x);
        }
    }
    rank_ok(rank, idist_barrier(&o));
}

static void same_tag_in_order(idist_group *world, int rank, int n, void *arg) {
    // The sizes cover both ways in which the library sends a message.
    static const size_t counts[5] = {1, 20000, 3, 200000, 0};
    idist_opts o = opts_of(world);
    int32_t *x = (int32_t *)malloc(200000 * sizeof *x);
    TAP_REQUIRE(x);
    (void)arg;
    (void)n;
    for (int i = 0; i < 50; i++) {
        size_t count = counts[i % 5];
        if (rank == 0) {
            pattern_fill(x, 0, count, 4, 0, (uint64_t)i);
            rank_ok(rank, idist_send(x, count, IDIST_I32, 1, 7, &o));
        } else if (rank == 1) {
            idist_recv_info info;
            int tag = i % 3 == 0 ? IDIST_ANY_TAG : 7, src = i % 4 == 0 ? IDIST_ANY_SOURCE : 0;
            rank_ok(rank, idist_recv(x, 200000, IDIST_I32, src, tag, &info, &o));
            rank_check(info.count == count && info.tag == 7 && info.source == 0,
                       "message %d: got %zu elements expected %zu", i, info.count, count);
            rank_check(pattern_find_wrong(x, 0, count, 4, 0, (uint64_t)i) == count,
                       "message %d: wrong data", i);
        }
    }
    free(x);
}

static void wildcards(idist_group *world, int rank, int n, void *arg) {
    enum { EACH = 40 };
    idist_opts o = opts_of(world);
    int seen[RANKS_MAX] = {0};
    (void)arg;
    if (rank != 0) {
        for (int i = 0; i < EACH; i++) {
            int32_t x[2] = {rank, i};
            rank_ok(rank, idist_send(x, 2, IDIST_I32, 0, rank * 1000 + i, &o));
        }
    }
    for (int i = 0; rank == 0 && i < EACH * (n - 1); i++) {
        int32_t x[4] = {-1, -1, -1, -1};
        idist_recv_info info = {-1, -1, 0, IDIST_I8};
        rank_ok(rank, idist_recv(x, 4, IDIST_I32, IDIST_ANY_SOURCE, IDIST_ANY_TAG, &info, &o));
        if (info.source < 1 || info.source >= n) {
            rank_fail("source: got %d expected 1..%d", info.source, n - 1);
            break;
        }
        rank_check(info.count == 2 && x[0] == info.source && x[1] == seen[info.source] &&
                       x[2] == -1,
                   "from rank %d: got %d,%d (count %zu) expected number %d", info.source, x[0],
                   x[1], info.count, seen[info.source]);
        rank_check(info.tag == info.source * 1000 + x[1], "tag: got %d", info.tag);
        seen[info.source]++;
    }
    rank_ok(rank, idist_barrier(&o));
}

// Receives from rank n - 1 first and from rank 1 last. A receive must not take a message from
// another rank. All messages have the largest tag.
static void selective(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    int32_t x = rank * 10, y = -1;
    (void)arg;
    if (rank != 0) {
        rank_ok(rank, idist_send(&x, 1, IDIST_I32, 0, INT32_MAX, &o));
    } else {
        for (int k = n - 1; k >= 1; k--) {
            rank_ok(rank, idist_recv(&y, 1, IDIST_I32, k, IDIST_ANY_TAG, NULL, &o));
            rank_check(y == k * 10, "from rank %d: got %d expected %d", k, y, k * 10);
        }
    }
    rank_ok(rank, idist_barrier(&o));
}

static void check_info(int rank, const idist_recv_info *info, int source, int tag, size_t count,
                       idist_dtype dtype) {
    rank_check(info->source == source && info->tag == tag && info->count == count &&
                   info->dtype == dtype,
               "rank %d: info: got %d, %d, %zu, %s expected %d, %d, %zu, %s", rank, info->source,
               info->tag, info->count, idist_dtype_name(info->dtype), source, tag, count,
               idist_dtype_name(dtype));
}

// Receives a message into too small a buffer, and as another dtype. Both receives must fail and
// leave the message for a receive that fits. Covers messages that are sent immediately and large
// messages that wait at the sender.
static void kept_after_misfit(idist_group *world, int rank, int n, void *arg) {
    static const size_t counts[3] = {10, 5000, 100000};
    idist_opts o = opts_of(world);
    (void)arg;
    (void)n;
    for (int i = 0; i < 3; i++) {
        size_t count = counts[i];
        guarded_buffer b = guarded_buffer_make(count * 4, 0);
        if (rank == 0) {
            pattern_fill(b.p, 0, count, 4, 0, 8);
            rank_ok(rank, idist_send(b.p, count, IDIST_F32, 1, 5, &o));
        } else if (rank == 1) {
            idist_recv_info info = {-1, -1, 0, IDIST_I8};
            rank_is(rank, idist_recv(b.p, count - 1, IDIST_F32, 0, 5, &info, &o),
                    IDIST_ERR_TRUNCATED);
            check_info(rank, &info, 0, 5, count, IDIST_F32);
            rank_check(idist_last_error()[0] != 0, "a failure has a text");
            rank_check(guarded_buffer_untouched(&b),
                       "count %zu: nothing is written when the message is too long", count);
            info.count = 0;
            rank_is(rank, idist_recv(b.p, count, IDIST_I32, 0, 5, &info, &o), IDIST_ERR_MISMATCH);
            check_info(rank, &info, 0, 5, count, IDIST_F32);
            rank_check(guarded_buffer_untouched(&b),
                       "count %zu: nothing is written when the dtype is another", count);
            rank_ok(rank, idist_recv(b.p, count, IDIST_F32, IDIST_ANY_SOURCE, 5, &info, &o));
            rank_check(info.count == count && pattern_find_wrong(b.p, 0, count, 4, 0, 8) == count,
                       "count %zu: wrong data", count);
        }
        guarded_buffer_free(&b);
        rank_ok(rank, idist_barrier(&o)); // the group must still work
    }
}

// Sends, from rank 0, a message for rank 1 to probe and a second message behind it. If i is odd,
// first waits for a message from rank 1, which then starts its probe.
static void send_to_probe(idist_group *world, int i, int tag, size_t count, unsigned char *p) {
    idist_request request = {NULL};
    idist_opts o = opts_of(world), a = opts_async(world, &request);
    char go = 1;
    pattern_fill(p, 0, count, 4, 0, 8);
    if (i % 2) rank_ok(0, idist_recv(&go, 1, IDIST_U8, 1, 1, NULL, &o));
    rank_ok(0, idist_send(p, count, IDIST_F32, 1, tag, &a));
    rank_ok(0, idist_send(&go, 1, IDIST_U8, 1, 100, &o));
    rank_ok(0, idist_wait(&request));
}

// Probes for messages of several sizes. A probe must describe the message and leave it. If i is
// odd, rank 0 sends the message only when rank 1 is about to probe.
static void probes(idist_group *world, int rank, int n, void *arg) {
    static const size_t counts[4] = {0, 10, 5000, 100000};
    idist_opts o = opts_of(world);
    (void)arg;
    (void)n;
    for (int i = 0; i < 8; i++) {
        size_t count = counts[i / 2];
        guarded_buffer b = guarded_buffer_make(count * 4, 0);
        idist_request request = {NULL};
        idist_opts a = opts_async(world, &request);
        char go = 1;
        if (rank == 0) {
            send_to_probe(world, i, 5 + i, count, b.p);
        } else if (rank == 1) {
            idist_recv_info info = {-1, -1, 0, IDIST_I8};
            bool found = true;
            rank_ok(rank, idist_iprobe(0, 99, &found, &info, &o));
            rank_check(!found, "iprobe finds a message with tag %d", info.tag);
            if (i % 2) rank_ok(rank, idist_send(&go, 1, IDIST_U8, 0, 1, &o));
            if (i % 4 < 2)
                rank_ok(rank, idist_probe(i % 2 ? 0 : IDIST_ANY_SOURCE, 5 + i, &info, &o));
            else rank_ok(rank, idist_probe(0, IDIST_ANY_TAG, &info, &a));
            rank_ok(rank, idist_wait(&request));
            check_info(rank, &info, 0, 5 + i, count, IDIST_F32);
            memset(&info, 0, sizeof info);
            rank_ok(rank, idist_iprobe(IDIST_ANY_SOURCE, 5 + i, &found, &info, &o));
            rank_check(found, "count %zu: iprobe does not find what probe has found", count);
            check_info(rank, &info, 0, 5 + i, count, IDIST_F32);
            rank_ok(rank, idist_recv(b.p, info.count, info.dtype, info.source, info.tag, NULL, &o));
            rank_check(pattern_find_wrong(b.p, 0, count, 4, 0, 8) == count,
                       "count %zu: wrong data after a probe", count);
            rank_ok(rank, idist_iprobe(0, 5 + i, &found, NULL, &o));
            rank_check(!found, "count %zu: iprobe finds what was received", count);
            rank_ok(rank, idist_recv(&go, 1, IDIST_U8, 0, 100, NULL, &o));
        }
        guarded_buffer_free(&b);
        rank_ok(rank, idist_barrier(&o));
    }
}

// Posts a receive and then a probe. The receive must get the first message, and the probe the
// second.
static void probe_after_receive(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    int32_t x[2] = {7, 8}, y = 0;
    (void)arg;
    (void)n;
    if (rank == 0) {
        rank_ok(rank, idist_barrier(&o));
        for (int i = 0; i < 2; i++)
            rank_ok(rank, idist_send(&x[i], (size_t)1, IDIST_I32, 1, i, &o));
    } else if (rank == 1) {
        idist_recv_info info = {-1, -1, 0, IDIST_I8};
        idist_request requests[2] = {{NULL}, {NULL}};
        idist_opts a = opts_async(world, &requests[0]), b = opts_async(world, &requests[1]);
        rank_ok(rank, idist_recv(&y, 1, IDIST_I32, 0, IDIST_ANY_TAG, NULL, &a));
        rank_ok(rank, idist_probe(IDIST_ANY_SOURCE, IDIST_ANY_TAG, &info, &b));
        rank_ok(rank, idist_barrier(&o));
        rank_ok(rank, idist_wait(&requests[0]));
        rank_check(y == 7, "the receive got %d", y);
        rank_ok(rank, idist_wait(&requests[1]));
        check_info(rank, &info, 0, 1, 1, IDIST_I32);
        rank_ok(rank, idist_recv(&y, 1, IDIST_I32, 0, 1, NULL, &o));
        rank_check(y == 8, "the next receive got %d", y);
    }
    rank_ok(rank, idist_barrier(&o));
}

static void probe_times_out(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    int32_t x = 5;
    (void)arg;
    (void)n;
    if (rank == 1) {
        idist_recv_info info;
        idist_opts brief = o;
        brief.timeout_ms = 30;
        rank_is(rank, idist_probe(0, 1, &info, &brief), IDIST_ERR_TIMEOUT);
        rank_check(strstr(idist_last_error(), "probe (from rank 0, tag 1)") != NULL, "%s",
                   idist_last_error());
        rank_is(rank, idist_probe(0, 1, NULL, &o), IDIST_ERR_ARG);
        rank_is(rank, idist_iprobe(0, 1, NULL, &info, &o), IDIST_ERR_ARG);
        rank_is(rank, idist_probe(n, 1, &info, &o), IDIST_ERR_ARG);
    }
    rank_ok(rank, idist_barrier(&o));
    if (rank == 0) rank_ok(rank, idist_send(&x, 1, IDIST_I32, 1, 1, &o));
    if (rank == 1) rank_ok(rank, idist_recv(&x, 1, IDIST_I32, 0, 1, NULL, &o));
    rank_ok(rank, idist_barrier(&o));
}

// Probes in a loop on rank 0 while rank 1 aborts. A program that only probes must learn of the
// abort, too.
static void probes_in_vain(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    idist_status status = IDIST_OK;
    idist_message message;
    bool found = false;
    int32_t x = 0;
    (void)arg;
    (void)n;
    // The ranks meet by a message, because a barrier of rank 0 could fail when rank 1 aborts.
    if (rank == 0) rank_ok(rank, idist_send(&x, 1, IDIST_I32, 1, 0, &o));
    if (rank == 1) rank_ok(rank, idist_recv(&x, 1, IDIST_I32, 0, 0, NULL, &o));
    if (rank == 1) rank_ok(rank, idist_abort(world));
    while (rank == 0 && status == IDIST_OK && !found)
        status = idist_improbe(1, 7, &found, &message, &o);
    if (rank == 0) {
        rank_check(status == IDIST_ERR_ABORTED, "got %s", idist_status_name(status));
        rank_check(strncmp(idist_last_error(), "improbe (from rank 1, tag 7): ", 30) == 0 ||
                       strncmp(idist_last_error(), "improbe: the group failed", 25) == 0,
                   "got: %s", idist_last_error());
    }
}

// Matches a message and then receives it. Between these calls, probes must not find the message,
// and an ordinary receive must get the next message. If i is odd, rank 0 sends only when rank 1 is
// about to probe.
static void matched_once(idist_group *world, int rank, int i, size_t count, unsigned char *p) {
    idist_request request = {NULL};
    idist_opts o = opts_of(world), a = opts_async(world, &request);
    idist_message message = {{-1, -1, 0, IDIST_I8}, world, 0, 0, 5}, none;
    idist_recv_info info;
    bool found = true;
    char go = 1;
    rank_ok(rank, idist_improbe(0, 99, &found, &message, &o));
    rank_check(!found && !message.group, "improbe finds a message with tag 99");
    if (i % 2) rank_ok(rank, idist_send(&go, 1, IDIST_U8, 0, 1, &o));
    if (i % 4 < 2) rank_ok(rank, idist_mprobe(i % 2 ? 0 : IDIST_ANY_SOURCE, 5, &message, &o));
    else rank_ok(rank, idist_mprobe(0, IDIST_ANY_TAG, &message, &a));
    rank_ok(rank, idist_wait(&request));
    check_info(rank, &message.info, 0, 5, count, IDIST_F32);
    rank_ok(rank, idist_iprobe(0, 5, &found, &info, &o));
    rank_check(!found, "count %zu: iprobe finds what is matched", count);
    rank_ok(rank, idist_improbe(IDIST_ANY_SOURCE, 5, &found, &none, &o));
    rank_check(!found, "count %zu: improbe finds what is matched", count);
    rank_ok(rank, idist_recv(&go, 1, IDIST_U8, IDIST_ANY_SOURCE, IDIST_ANY_TAG, &info, &o));
    check_info(rank, &info, 0, 100, 1, IDIST_U8);
    rank_ok(rank, idist_mrecv(p, count, IDIST_F32, &message, i % 3 ? &a : NULL));
    rank_check(!message.group, "count %zu: the message is not empty", count);
    rank_ok(rank, idist_wait(&request));
    check_info(rank, &message.info, 0, 5, count, IDIST_F32);
    rank_is(rank, idist_mrecv(p, count, IDIST_F32, &message, &o), IDIST_ERR_ARG);
}

static void matched(idist_group *world, int rank, int n, void *arg) {
    static const size_t counts[4] = {0, 10, 5000, 100000};
    idist_opts o = opts_of(world);
    (void)arg;
    (void)n;
    for (int i = 0; i < 8; i++) {
        size_t count = counts[i / 2];
        guarded_buffer b = guarded_buffer_make(count * 4, 0);
        if (rank == 0) {
            send_to_probe(world, i, 5, count, b.p);
        } else if (rank == 1) {
            matched_once(world, rank, i, count, b.p);
            rank_check(pattern_find_wrong(b.p, 0, count, 4, 0, 8) == count &&
                           guarded_buffer_guards_hold(&b),
                       "count %zu: wrong data of a matched message", count);
        }
        guarded_buffer_free(&b);
        rank_ok(rank, idist_barrier(&o));
    }
}

// Matches messages of one tag, which must come in order, and receives them in reverse order. A
// receive that was posted before a matched probe must get the earlier message.
static void matched_in_order(idist_group *world, int rank, int n, void *arg) {
    enum { K = 5 };
    static const size_t counts[K] = {1, 40000, 2, 30000, 3};
    idist_opts o = opts_of(world);
    idist_request requests[K];
    idist_message messages[K];
    int32_t *x = (int32_t *)calloc(K * 40000, sizeof *x);
    TAP_REQUIRE(x);
    (void)arg;
    (void)n;
    for (int k = 0; k < K; k++) {
        idist_opts a = opts_async(world, &requests[k]);
        int32_t *at = x + k * 40000;
        requests[k].impl = NULL;
        if (rank == 0) {
            if (k == 0) rank_ok(rank, idist_barrier(&o)); // rank 1 has posted its calls
            pattern_fill((unsigned char *)at, 0, counts[k], 4, 0, (uint64_t)k);
            rank_ok(rank, idist_send(at, counts[k], IDIST_I32, 1, 3, &a));
        } else if (rank == 1) {
            if (k == 2) rank_ok(rank, idist_recv(at, 2, IDIST_I32, 0, 3, NULL, &a));
            else rank_ok(rank, idist_mprobe(IDIST_ANY_SOURCE, 3, &messages[k], &a));
        }
    }
    if (rank == 1) rank_ok(rank, idist_barrier(&o));
    rank_ok(rank, idist_wait_all(requests, K));
    for (int k = K - 1; k >= 0 && rank == 1; k--) {
        int32_t *at = x + k * 40000;
        if (k != 2) {
            check_info(rank, &messages[k].info, 0, 3, counts[k], IDIST_I32);
            rank_ok(rank, idist_mrecv(at, counts[k], IDIST_I32, &messages[k], NULL));
        }
        rank_check(pattern_find_wrong((unsigned char *)at, 0, counts[k], 4, 0, (uint64_t)k) ==
                       counts[k],
                   "message %d: wrong data", k);
    }
    rank_ok(rank, idist_barrier(&o));
    free(x);
}

// Two threads of rank 0 match messages from any rank and receive the messages that they matched.
// All messages differ in size.
enum { EACH_SENDS = 60 };

typedef struct contest {
    idist_group *world;
    int *left, *seen; // messages that no thread waits for yet; arrivals of each message
    int thread;
} contest;

static size_t contest_count(int source, int i) {
    return (size_t)(i % 7 == 3 ? 20000 : 1) + (size_t)(source * EACH_SENDS + i);
}

static void *contest_receive(void *arg) {
    const contest *c = (const contest *)arg;
    idist_opts o = opts_of(c->world);
    while (__atomic_fetch_sub(c->left, 1, __ATOMIC_ACQ_REL) > 0) {
        idist_message m;
        bool found = false;
        int32_t *x;
        while (c->thread && !found)
            if (!rank_ok(0, idist_improbe(IDIST_ANY_SOURCE, IDIST_ANY_TAG, &found, &m, &o)))
                return NULL;
        if (!c->thread && !rank_ok(0, idist_mprobe(IDIST_ANY_SOURCE, IDIST_ANY_TAG, &m, &o)))
            return NULL;
        x = (int32_t *)calloc(m.info.count, sizeof *x);
        TAP_REQUIRE(x);
        if (rank_ok(0, idist_mrecv(x, m.info.count, m.info.dtype, &m, &o)))
            rank_check(x[0] == m.info.source && x[m.info.count - 1] == m.info.tag &&
                           m.info.count == contest_count(m.info.source, m.info.tag),
                       "%zu elements from %d with tag %d: got %d .. %d", m.info.count,
                       m.info.source, m.info.tag, x[0], x[m.info.count - 1]);
        __atomic_fetch_add(&c->seen[m.info.source * EACH_SENDS + m.info.tag], 1, __ATOMIC_ACQ_REL);
        free(x);
    }
    return NULL;
}

static void matched_by_two_threads(idist_group *world, int rank, int n, void *arg) {
    int left = (n - 1) * EACH_SENDS, seen[RANKS_MAX * EACH_SENDS] = {0};
    contest sides[2] = {{world, &left, seen, 0}, {world, &left, seen, 1}};
    idist_opts o = opts_of(world);
    pthread_t thread;
    (void)arg;
    if (rank == 0) {
        TAP_REQUIRE(pthread_create(&thread, NULL, contest_receive, &sides[1]) == 0);
        contest_receive(&sides[0]);
        TAP_REQUIRE(pthread_join(thread, NULL) == 0);
        for (int i = EACH_SENDS; i < n * EACH_SENDS; i++)
            rank_check(seen[i] == 1, "message %d of rank %d came %d times", i % EACH_SENDS,
                       i / EACH_SENDS, seen[i]);
    }
    for (int i = 0; rank && i < EACH_SENDS; i++) {
        size_t count = contest_count(rank, i);
        int32_t *x = (int32_t *)calloc(count, sizeof *x);
        TAP_REQUIRE(x);
        x[0] = rank;
        x[count - 1] = i;
        rank_ok(rank, idist_send(x, count, IDIST_I32, 0, i, &o));
        free(x);
    }
    rank_ok(rank, idist_barrier(&o));
}

// Receives a matched message into too small a buffer, and as another dtype. The receives must fail,
// and the holder must keep the message.
static void matched_misfit(idist_group *world, int rank, int n, void *arg) {
    static const size_t counts[3] = {10, 5000, 100000};
    idist_opts o = opts_of(world);
    (void)arg;
    (void)n;
    for (int i = 0; i < 3; i++) {
        size_t count = counts[i];
        guarded_buffer b = guarded_buffer_make(count * 4, 0);
        if (rank == 0) {
            pattern_fill(b.p, 0, count, 4, 0, 8);
            rank_ok(rank, idist_send(b.p, count, IDIST_F32, 1, 5, &o));
        } else if (rank == 1) {
            idist_message m;
            idist_request request = {NULL};
            idist_opts a = opts_async(world, &request);
            rank_ok(rank, idist_mprobe(0, 5, &m, &o));
            rank_is(rank, idist_mrecv(b.p, count - 1, IDIST_F32, &m, &o), IDIST_ERR_TRUNCATED);
            rank_check(strstr(idist_last_error(), "with tag 5") != NULL, "%s", idist_last_error());
            rank_ok(rank, idist_mrecv(b.p, count, IDIST_I32, &m, &a));
            rank_is(rank, idist_wait(&request), IDIST_ERR_MISMATCH);
            rank_check(strstr(idist_last_error(), "sent F32") != NULL, "%s", idist_last_error());
            check_info(rank, &m.info, 0, 5, count, IDIST_F32);
            rank_ok(rank, idist_group_begin());
            rank_ok(rank, idist_mrecv(b.p, 0, IDIST_F32, &m, &o));
            rank_is(rank, idist_group_end(), IDIST_ERR_TRUNCATED);
            rank_check(guarded_buffer_untouched(&b), "count %zu: something is written", count);
            rank_ok(rank, idist_group_begin());
            rank_ok(rank, idist_mrecv(b.p, count, IDIST_F32, &m, &o));
            rank_ok(rank, idist_group_end());
            rank_check(pattern_find_wrong(b.p, 0, count, 4, 0, 8) == count, "count %zu: wrong data",
                       count);
        }
        guarded_buffer_free(&b);
        rank_ok(rank, idist_barrier(&o));
    }
}

static void matched_wrongly(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world), brief = o, planned = o;
    idist_message m = {{-1, -1, 0, IDIST_I8}, world, 0, 0, 5};
    idist_message none = {{0, 0, 0, IDIST_I8}, NULL, 0, 0, 0};
    idist_request request = {NULL};
    idist_opts a = opts_async(world, &request);
    int32_t x = 5;
    bool found;
    (void)arg;
    if (rank == 1) {
        brief.timeout_ms = 30;
        rank_is(rank, idist_mprobe(0, 1, &m, &brief), IDIST_ERR_TIMEOUT);
        rank_check(strstr(idist_last_error(), "mprobe (from rank 0, tag 1)") && !m.group, "%s",
                   idist_last_error());
        rank_is(rank, idist_mprobe(0, 1, NULL, &o), IDIST_ERR_ARG);
        rank_is(rank, idist_improbe(0, 1, &found, NULL, &o), IDIST_ERR_ARG);
        rank_is(rank, idist_improbe(0, 1, NULL, &m, &o), IDIST_ERR_ARG);
        rank_is(rank, idist_improbe(0, 1, &found, &m, &a), IDIST_ERR_ARG);
        rank_is(rank, idist_mprobe(n, 1, &m, &o), IDIST_ERR_ARG);
        rank_is(rank, idist_mrecv(&x, 1, IDIST_I32, NULL, &o), IDIST_ERR_ARG);
        rank_is(rank, idist_mrecv(&x, 1, IDIST_I32, &none, &o), IDIST_ERR_ARG);
    }
    rank_ok(rank, idist_barrier(&o)); // the probe that timed out must take nothing
    if (rank == 0) rank_ok(rank, idist_send(&x, 1, IDIST_I32, 1, 1, &o));
    if (rank == 1) {
        rank_ok(rank, idist_mprobe(0, 1, &m, &o));
        rank_ok(rank, idist_plan_create(&planned.plan));
        rank_is(rank, idist_mrecv(&x, 1, IDIST_I32, &m, &planned), IDIST_ERR_ARG);
        rank_ok(rank, idist_plan_free(&planned.plan));
        rank_ok(rank, idist_mrecv(&x, 1, IDIST_I32, &m, &o));
    }
    rank_ok(rank, idist_barrier(&o));
}

// Matches messages and never receives them. They must be freed with their groups, and a receive
// after that must be refused.
static void matched_and_left(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    idist_group *group = NULL;
    idist_message m[2];
    int32_t x = 5;
    (void)arg;
    (void)n;
    if (!rank_ok(rank, idist_split(world, 0, rank, &group))) return;
    for (int i = 0; i < 2; i++) {
        idist_opts at = opts_of(i ? world : group);
        if (rank == 0) rank_ok(rank, idist_send(&x, 1, IDIST_I32, 1, 1, &at));
        if (rank == 1) rank_ok(rank, idist_mprobe(0, 1, &m[i], &at));
    }
    rank_ok(rank, idist_barrier(&o));
    rank_ok(rank, idist_free_group(&group));
    if (rank == 1) rank_is(rank, idist_mrecv(&x, 1, IDIST_I32, &m[0], &o), IDIST_ERR_STATE);
    if (!rank_ok(rank, idist_split(world, 0, rank, &group))) return; // maybe at the same address
    if (rank == 1) rank_is(rank, idist_mrecv(&x, 1, IDIST_I32, &m[0], &o), IDIST_ERR_STATE);
    rank_ok(rank, idist_free_group(&group));
    rank_ok(rank, idist_barrier(&o)); // m[1] is freed with the world
}

// Matches messages that a rank sends to itself. If i is odd, the probe is posted before the send.
// Otherwise a small message is matched after its send has completed, and a large message while its
// send waits.
static void matched_to_self(idist_group *world, int rank, int n, void *arg) {
    static const size_t counts[3] = {0, 1000, 200000};
    idist_opts o = opts_of(world);
    (void)arg;
    (void)n;
    for (int i = 0; i < 6; i++) {
        size_t count = counts[i / 2];
        guarded_buffer s = guarded_buffer_make(count * 4, 0), r = guarded_buffer_make(count * 4, 0);
        idist_request request[2] = {{NULL}, {NULL}};
        idist_opts a = opts_async(world, &request[0]), b = opts_async(world, &request[1]);
        idist_message m;
        bool found = true;
        pattern_fill(s.p, 0, count, 4, rank, 3);
        if (i % 2) rank_ok(rank, idist_mprobe(rank, 4, &m, &b));
        rank_ok(rank, idist_send(s.p, count, IDIST_U32, rank, 4, &a));
        if (i % 2) rank_ok(rank, idist_wait(&request[1]));
        else rank_ok(rank, idist_mprobe(IDIST_ANY_SOURCE, IDIST_ANY_TAG, &m, &o));
        check_info(rank, &m.info, rank, 4, count, IDIST_U32);
        rank_ok(rank, idist_iprobe(rank, IDIST_ANY_TAG, &found, NULL, &o));
        rank_check(!found, "rank %d: iprobe finds what is matched", rank);
        rank_ok(rank, idist_mrecv(r.p, count, IDIST_U32, &m, &o));
        rank_ok(rank, idist_wait(&request[0]));
        rank_check(pattern_find_wrong(r.p, 0, count, 4, rank, 3) == count, "rank %d: wrong data",
                   rank);
        guarded_buffer_free(&s);
        guarded_buffer_free(&r);
    }
}

// Posts a receive that is too short for its message. The receive must fail when the message
// arrives, and the message must stay.
static void posted_too_short(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    int32_t x[4] = {1, 2, 3, 4}, y[4] = {0, 0, 0, 0};
    (void)arg;
    (void)n;
    idist_request request = {NULL};
    idist_opts a = opts_async(world, &request);
    if (rank == 1) rank_ok(rank, idist_recv(y, 2, IDIST_I32, 0, 1, NULL, &a));
    rank_ok(rank, idist_barrier(&o));
    if (rank == 0) rank_ok(rank, idist_send(x, 4, IDIST_I32, 1, 1, &o));
    if (rank == 1) {
        rank_is(rank, idist_wait(&request), IDIST_ERR_TRUNCATED);
        rank_check(y[0] == 0, "got %d: a receive that fails writes nothing", y[0]);
        rank_ok(rank, idist_recv(y, 4, IDIST_I32, 0, 1, NULL, &o));
        rank_check(y[0] == 1 && y[3] == 4, "got %d..%d expected 1..4", y[0], y[3]);
    }
    rank_ok(rank, idist_barrier(&o));
}

static void to_self(idist_group *world, int rank, int n, void *arg) {
    static const size_t counts[4] = {0, 1, 1000, 200000};
    idist_opts o = opts_of(world);
    (void)arg;
    (void)n;
    for (int i = 0; i < 4; i++) {
        size_t nbytes = counts[i] * 8;
        guarded_buffer s = guarded_buffer_make(nbytes, 0), r = guarded_buffer_make(nbytes, 0);
        idist_request request[2] = {{NULL}, {NULL}};
        idist_opts a = opts_async(world, &request[0]), b = opts_async(world, &request[1]);
        idist_recv_info info = {-1, -1, 0, IDIST_I8};
        pattern_fill(s.p, 0, counts[i], 8, rank, 3);
        rank_ok(rank, idist_send(s.p, counts[i], IDIST_F64, rank, 4, &a));
        rank_ok(rank, idist_recv(r.p, counts[i], IDIST_F64, i % 2 ? rank : IDIST_ANY_SOURCE, 4,
                                 &info, &b));
        rank_ok(rank, idist_wait_all(request, 2));
        rank_check(info.source == rank && info.count == counts[i], "rank %d: got %zu from %d", rank,
                   info.count, info.source);
        rank_check(pattern_find_wrong(r.p, 0, counts[i], 8, rank, 3) == counts[i],
                   "rank %d: wrong data", rank);
        memset(r.p, 0, nbytes);
        rank_ok(rank, idist_sendrecv(s.p, counts[i], rank, 1, r.p, counts[i], rank, 1, IDIST_F64,
                                     NULL, &o));
        rank_check(pattern_find_wrong(r.p, 0, counts[i], 8, rank, 3) == counts[i],
                   "rank %d: wrong data by sendrecv", rank);
        guarded_buffer_free(&s);
        guarded_buffer_free(&r);
    }
}

static void nothing_sent(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    (void)arg;
    if (rank == 0)
        for (int k = 1; k < n; k++) rank_ok(rank, idist_send(NULL, 0, IDIST_F64, k, 3, &o));
    if (rank > 0) {
        idist_recv_info info = {-1, -1, 77, IDIST_I8};
        rank_ok(rank, idist_recv(NULL, 0, IDIST_F64, 0, IDIST_ANY_TAG, &info, &o));
        rank_check(info.source == 0 && info.tag == 3 && info.count == 0, "rank %d: got %d %d %zu",
                   rank, info.source, info.tag, info.count);
    }
    rank_ok(rank, idist_barrier(&o));
}

// Exchanges large messages in pairs with blocking calls. Even ranks send first, odd ranks receive
// first.
static void large_blocking(idist_group *world, int rank, int n, void *arg) {
    const size_t counts[3] = {65536, 65537, 3000001};
    idist_opts o = opts_of(world);
    (void)arg;
    if (rank >= n / 2 * 2) return;
    int peer = rank ^ 1;
    for (int i = 0; i < 3; i++) {
        guarded_buffer s = guarded_buffer_make(counts[i], 1), r = guarded_buffer_make(counts[i], 0);
        pattern_fill(s.p, 0, counts[i], 1, rank, 6);
        if (rank % 2 == 0) {
            rank_ok(rank, idist_send(s.p, counts[i], IDIST_U8, peer, i, &o));
            rank_ok(rank, idist_recv(r.p, counts[i], IDIST_U8, peer, i, NULL, &o));
        } else {
            rank_ok(rank, idist_recv(r.p, counts[i], IDIST_U8, peer, i, NULL, &o));
            rank_ok(rank, idist_send(s.p, counts[i], IDIST_U8, peer, i, &o));
        }
        rank_check(pattern_find_wrong(r.p, 0, counts[i], 1, peer, 6) == counts[i],
                   "rank %d: %zu bytes: wrong data", rank, counts[i]);
        rank_check(guarded_buffer_guards_hold(&s) && guarded_buffer_guards_hold(&r),
                   "rank %d: written outside of a buffer", rank);
        guarded_buffer_free(&s);
        guarded_buffer_free(&r);
    }
}

// Exchanges large messages in both directions. Sends and receives are posted in opposite orders of
// tags.
static void large_reversed(idist_group *world, int rank, int n, void *arg) {
    enum { K = 8 };
    const size_t count = 50000;
    (void)arg;
    if (rank >= n / 2 * 2) return;
    int peer = rank ^ 1;
    idist_request request[2 * K];
    idist_recv_info info[K];
    guarded_buffer s[K], r[K];
    memset(request, 0, sizeof request);
    for (int i = 0; i < K; i++) {
        s[i] = guarded_buffer_make(count * 4, 0);
        r[i] = guarded_buffer_make(count * 4, 0);
        pattern_fill(s[i].p, 0, count, 4, rank, (uint64_t)i);
        idist_opts a = opts_async(world, &request[i]);
        rank_ok(rank, idist_send(s[i].p, count, IDIST_F32, peer, i, &a));
    }
    for (int i = K - 1; i >= 0; i--) {
        idist_opts a = opts_async(world, &request[K + i]);
        rank_ok(rank, idist_recv(r[i].p, count, IDIST_F32, peer, i, &info[i], &a));
    }
    rank_ok(rank, idist_wait_all(request, 2 * K));
    for (int i = 0; i < K; i++) {
        rank_check(info[i].tag == i && info[i].count == count, "rank %d: tag %d: got tag %d", rank,
                   i, info[i].tag);
        rank_check(pattern_find_wrong(r[i].p, 0, count, 4, peer, (uint64_t)i) == count,
                   "rank %d: tag %d: wrong data", rank, i);
        guarded_buffer_free(&s[i]);
        guarded_buffer_free(&r[i]);
    }
}

static void many_outstanding(idist_group *world, int rank, int n, void *arg) {
    enum { EACH = 150 };
    size_t total = (size_t)EACH * (size_t)n;
    idist_request *request = (idist_request *)calloc(2 * total, sizeof *request);
    int32_t *s = (int32_t *)calloc(total, sizeof *s), *r = (int32_t *)calloc(total, sizeof *r);
    TAP_REQUIRE(request && s && r);
    (void)arg;
    for (size_t i = 0; i < total; i++) { // from all ranks to all ranks, including themselves
        int peer = (int)(i % (size_t)n), tag = (int)(i / (size_t)n);
        idist_opts a = opts_async(world, &request[i]);
        rank_ok(rank, idist_recv(&r[i], 1, IDIST_I32, peer, tag, NULL, &a));
    }
    for (size_t i = 0; i < total; i++) {
        int peer = (int)(i % (size_t)n), tag = EACH - 1 - (int)(i / (size_t)n);
        idist_opts a = opts_async(world, &request[total + i]);
        s[i] = rank * 1000 + tag;
        rank_ok(rank, idist_send(&s[i], 1, IDIST_I32, peer, tag, &a));
    }
    rank_ok(rank, idist_wait_all(request, 2 * total));
    for (size_t i = 0; i < total; i++) {
        int want = (int)(i % (size_t)n) * 1000 + (int)(i / (size_t)n);
        rank_check(r[i] == want, "rank %d: message %zu: got %d expected %d", rank, i, r[i], want);
    }
    free(request);
    free(s);
    free(r);
}

// Receives when no rank sends. The time-out must cancel the receive, and a message that is sent
// later must go to the next receive.
static void recv_times_out(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world), brief = opts_of(world);
    int32_t x = 41, y = 0, z = 0;
    (void)arg;
    brief.timeout_ms = 100;
    if (rank == 1) {
        int64_t start = tap_now_ms();
        rank_is(rank, idist_recv(&y, 1, IDIST_I32, 0, 3, NULL, &brief), IDIST_ERR_TIMEOUT);
        int64_t took = tap_now_ms() - start;
        rank_check(took >= 95 && took <= 100 + 500 * test_slow_factor(),
                   "the time-out of 100 ms took %lld ms", (long long)took);
        rank_check(text_names_rank(idist_last_error(), 0), "the text names rank 0: got \"%s\"",
                   idist_last_error());
        rank_is(rank, idist_recv(&y, 1, IDIST_I32, IDIST_ANY_SOURCE, IDIST_ANY_TAG, NULL, &brief),
                IDIST_ERR_TIMEOUT);
    }
    rank_ok(rank, idist_barrier(&o));
    if (rank == 0) rank_ok(rank, idist_send(&x, 1, IDIST_I32, 1, 3, &o));
    if (rank == 1) {
        rank_ok(rank, idist_recv(&z, 1, IDIST_I32, 0, 3, NULL, &o));
        rank_check(z == 41 && y == 0, "got %d, and %d in the cancelled buffer; expected 41 and 0",
                   z, y);
    }
    (void)n;
    rank_ok(rank, idist_barrier(&o));
}

// Receives by a request when no rank sends. After the time-out the library must no longer write to
// the buffer.
static void request_times_out(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    (void)arg;
    (void)n;
    guarded_buffer b = guarded_buffer_make(400000, 0);
    if (rank == 1) {
        idist_request request = {NULL};
        idist_opts a = opts_async(world, &request);
        a.timeout_ms = 100;
        rank_ok(rank, idist_recv(b.p, 400000, IDIST_U8, 0, 9, NULL, &a));
        rank_is(rank, idist_wait(&request), IDIST_ERR_TIMEOUT);
        rank_check(request.impl == NULL, "a failed request is empty, too");
    }
    rank_ok(rank, idist_barrier(&o));
    guarded_buffer s = guarded_buffer_make(400000, 0);
    pattern_fill(s.p, 0, 400000, 1, 0, 1);
    if (rank == 0) rank_ok(rank, idist_send(s.p, 400000, IDIST_U8, 1, 9, &o));
    if (rank == 1) {
        guarded_buffer r = guarded_buffer_make(400000, 0);
        rank_ok(rank, idist_recv(r.p, 400000, IDIST_U8, 0, 9, NULL, &o));
        rank_check(memcmp(r.p, s.p, 400000) == 0, "wrong data after a cancelled receive");
        rank_check(guarded_buffer_untouched(&b), "the cancelled buffer was written");
        guarded_buffer_free(&r);
    }
    guarded_buffer_free(&b);
    guarded_buffer_free(&s);
    rank_ok(rank, idist_barrier(&o));
}

#ifndef RANKS_MPI
// Lets a send of a rank to itself time out. A receive must then find nothing. After another send, a
// receive must get that message, and not the cancelled one.
static void cancelled_to_self(idist_group *world, int rank, int n, void *arg) {
    const size_t count = 200000;
    idist_opts o = opts_of(world), brief = opts_of(world);
    int32_t *x = (int32_t *)calloc(count, sizeof *x), y = 7, z = -1;
    idist_recv_info info = {-1, -1, 0, IDIST_I8};
    TAP_REQUIRE(x);
    (void)n;
    (void)arg;
    brief.timeout_ms = 60;
    rank_is(rank, idist_send(x, count, IDIST_I32, rank, 4, &brief), IDIST_ERR_TIMEOUT);
    rank_is(rank, idist_recv(x, count, IDIST_I32, rank, 4, NULL, &brief), IDIST_ERR_TIMEOUT);
    rank_ok(rank, idist_send(&y, 1, IDIST_I32, rank, 4, &o));
    rank_ok(rank, idist_recv(&z, 1, IDIST_I32, rank, IDIST_ANY_TAG, &info, &o));
    rank_check(z == 7 && info.count == 1, "rank %d: got %d, %zu elements", rank, z, info.count);
    rank_ok(rank, idist_barrier(&o));
    free(x);
}
#endif

static void own_tags(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    (void)n;
    (void)arg;
    for (int32_t tag = 0; tag < 5; tag++)
        rank_ok(rank, idist_send(&tag, 1, IDIST_I32, rank, tag, &o));
    for (int tag = 4; tag >= 0; tag--) {
        int32_t x = -1;
        rank_ok(rank, idist_recv(&x, 1, IDIST_I32, rank, tag, NULL, &o));
        rank_check(x == tag, "rank %d: tag %d: got %d", rank, tag, x);
    }
}

// Sends megabytes of small messages, which are received. After that, a small blocking send must
// return before its receive is posted, because the receiver has returned the sender's credit (its
// right to send small messages). The messages have many sizes, so that they cross the end of a pipe
// at any offset. They must arrive unchanged.
static void window_opens_again(idist_group *world, int rank, int n, void *arg) {
    enum { EACH = 3000, NBYTES = 2000 };
    idist_opts o = opts_of(world), brief = opts_of(world);
    unsigned char x[NBYTES] = {0};
    int wrong = 0;
    (void)n;
    (void)arg;
    brief.timeout_ms = 3000 * test_slow_factor();
    for (int i = 0; i < EACH; i++) {
        size_t count = (size_t)(i * 37 % NBYTES);
        for (size_t k = 0; k < count && rank == 0; k++) x[k] = (unsigned char)(i + (int)k * 7);
        if (rank == 0) rank_ok(rank, idist_send(x, count, IDIST_U8, 1, 0, &o));
        else rank_ok(rank, idist_recv(x, count, IDIST_U8, 0, 0, NULL, &o));
        for (size_t k = 0; k < count && rank == 1; k++)
            wrong += x[k] != (unsigned char)(i + (int)k * 7);
    }
    rank_check(!wrong, "rank %d: %d wrong bytes", rank, wrong);
    rank_ok(rank, idist_barrier(&o));
    // Rank 1 receives this message only after the barrier.
    if (rank == 0) rank_ok(rank, idist_send(x, NBYTES, IDIST_U8, 1, 1, &brief));
    rank_ok(rank, idist_barrier(&o));
    if (rank == 1) rank_ok(rank, idist_recv(x, NBYTES, IDIST_U8, 0, 1, NULL, &o));
}

static void matched_cases(const idist_desc *d, const char *name) {
    ranks_case(2, d, matched, NULL, "only its holder finds a matched message, %s", name);
    ranks_case(2, d, matched_in_order, NULL, "messages are matched in order, %s", name);
    for (int n = 2; n <= 4; n += 2)
        ranks_case(n, d, matched_by_two_threads, NULL,
                   "two threads match messages of any rank n=%d, %s", n, name);
    ranks_case(2, d, matched_misfit, NULL, "its holder keeps a message that does not fit, %s",
               name);
    ranks_case(2, d, matched_wrongly, NULL, "matched probes: time-outs and wrong arguments, %s",
               name);
    ranks_case(2, d, matched_and_left, NULL, "a matched message that is never received, %s", name);
}

int main(void) {
    tap_deadline(60);
    for (int t = 0; t < N_PLACEMENTS; t++) {
        const char *name = transport_names[t];
        idist_desc d = desc_with(name, "auto");
        for (int n = 1; n <= 2; n++) {
#ifndef RANKS_MPI // MPI completes a rank's send to itself at once
            ranks_case(n, &d, cancelled_to_self, NULL, "a send to oneself that timed out n=%d, %s",
                       n, name);
#endif
            ranks_case(n, &d, own_tags, NULL, "tags of messages to oneself n=%d, %s", n, name);
            ranks_case(n, &d, matched_to_self, NULL, "matched messages to oneself n=%d, %s", n,
                       name);
        }
        for (int n = 1; n <= 5; n += n == 3 ? 2 : 1) {
            ranks_case(n, &d, ring_sendrecv, NULL, "sendrecv around n=%d, %s", n, name);
            ranks_case(n, &d, to_self, NULL, "to oneself n=%d, %s", n, name);
            ranks_case(n, &d, wildcards, NULL, "any source, any tag n=%d, %s", n, name);
            ranks_case(n, &d, large_blocking, NULL, "large, blocking n=%d, %s", n, name);
            ranks_case(n, &d, large_reversed, NULL, "large, requests in reversed order n=%d, %s", n,
                       name);
            ranks_case(n, &d, many_outstanding, NULL, "150 messages to each of n=%d at once, %s", n,
                       name);
        }
        ranks_case(2, &d, tags_out_of_order, NULL, "tags out of order, %s", name);
        ranks_case(2, &d, same_tag_in_order, NULL, "same tag, mixed sizes stay in order, %s", name);
        ranks_case(4, &d, selective, NULL, "by source; largest tag, %s", name);
        ranks_case(2, &d, kept_after_misfit, NULL,
                   "too long or another dtype: the message stays, %s", name);
        ranks_case(2, &d, posted_too_short, NULL, "posted receive too short: the message stays, %s",
                   name);
        ranks_case(2, &d, probes, NULL, "a probe describes a message and leaves it, %s", name);
        ranks_case(2, &d, probe_after_receive, NULL, "a posted receive comes before a probe, %s",
                   name);
        ranks_case(2, &d, probe_times_out, NULL, "a probe that times out, %s", name);
        ranks_case_fault(2, &d, probes_in_vain, NULL, "an abort while a rank probes, %s", name);
        matched_cases(&d, name);
        ranks_case(3, &d, nothing_sent, NULL, "messages of nothing, %s", name);
        ranks_case(2, &d, recv_times_out, NULL, "recv time-out cancels, %s", name);
        ranks_case(2, &d, request_times_out, NULL, "recv time-out of a request cancels, %s", name);
        ranks_case(2, &d, window_opens_again, NULL,
                   "a sender of small messages gets its room back, %s", name);
    }
    return tap_done();
}
