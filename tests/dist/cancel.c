// cancel: receives and probes that idist_cancel ends, and the messages that they would have
// received
#include "idist.h"

#include "ranks.h"

// Cancels a request and waits for it. The wait must return IDIST_ERR_CANCELLED if the request was
// cancelled, and IDIST_OK otherwise. Returns true if the request was cancelled.
static bool cancels(int rank, idist_request *request) {
    bool cancelled = false;
    rank_ok(rank, idist_cancel(request, &cancelled));
    rank_is(rank, idist_wait(request), cancelled ? IDIST_ERR_CANCELLED : IDIST_OK);
    rank_check(!request->impl, "rank %d: the request is not empty", rank);
    return cancelled;
}

// Cancels each kind of receive and probe. Nothing was sent, so each cancellation must succeed. Then
// a message arrives, and a new receive must get it.
static void before_a_message(idist_group *world, int rank, int n, void *arg) {
    int left = (rank + n - 1) % n, right = (rank + 1) % n;
    idist_request r = {NULL};
    idist_opts a = opts_async(world, &r), o = opts_of(world);
    idist_recv_info info = {-7, -7, 77, IDIST_I8}, probed = info;
    idist_message message;
    bool cancelled = false, done = false;
    int32_t x = 5, y = rank;
    (void)arg;
    rank_ok(rank, idist_recv(&x, 1, IDIST_I32, left, 3, &info, &a));
    rank_ok(rank, idist_cancel(&r, &cancelled));
    rank_check(cancelled && r.impl, "rank %d: in time, and the request is open", rank);
    cancelled = true;
    rank_ok(rank, idist_cancel(&r, &cancelled));
    rank_check(!cancelled, "rank %d: it is complete already", rank);
    rank_is(rank, idist_test(&r, &done), IDIST_ERR_CANCELLED);
    rank_check(done && !r.impl, "rank %d: the request is not empty", rank);
    rank_check(strstr(idist_last_error(), "recv") && strstr(idist_last_error(), "idist_cancel"),
               "rank %d: %s", rank, idist_last_error());
    rank_ok(rank, idist_recv(&x, 1, IDIST_I32, IDIST_ANY_SOURCE, 3, &info, &a));
    rank_check(cancels(rank, &r), "rank %d: from any source", rank);
    rank_ok(rank, idist_recv(&x, 1, IDIST_I32, left, IDIST_ANY_TAG, &info, &a));
    rank_check(cancels(rank, &r), "rank %d: with any tag", rank);
    rank_ok(rank, idist_recv(&x, 1, IDIST_I32, left, 3, &info, &a));
    rank_ok(rank, idist_cancel(&r, &cancelled));
    rank_is(rank, idist_request_free(&r), IDIST_ERR_CANCELLED);
    rank_check(cancelled && !r.impl, "rank %d: the request is not empty", rank);
    rank_ok(rank, idist_probe(left, 3, &probed, &a));
    rank_check(cancels(rank, &r), "rank %d: a probe", rank);
    rank_ok(rank, idist_mprobe(left, 3, &message, &a));
    rank_check(cancels(rank, &r) && !message.group, "rank %d: a matched probe", rank);
    rank_check(x == 5 && info.source == -7 && info.count == 77 && probed.source == -7,
               "rank %d: a cancelled receive wrote %d, %d", rank, x, info.source);
    rank_ok(rank, idist_barrier(&o));
    rank_ok(rank, idist_send(&y, 1, IDIST_I32, right, 3, &o));
    rank_ok(rank, idist_recv(&x, 1, IDIST_I32, left, 3, &info, &o));
    rank_check(x == left && info.source == left && info.count == 1, "rank %d: got %d", rank, x);
}

// Calls idist_cancel for requests that are complete or empty, for requests of other operations, and
// with NULL arguments. None of these calls may cancel anything.
static void refused(idist_group *world, int rank, int n, void *arg) {
    enum { LARGE = 200000 };
    idist_request r = {NULL};
    idist_opts a = opts_async(world, &r), o = opts_of(world);
    idist_plan *plan = NULL;
    bool cancelled = true;
    int32_t *x = (int32_t *)calloc(LARGE, sizeof *x), *y = (int32_t *)calloc(LARGE, sizeof *y);
    int left = (rank + n - 1) % n, right = (rank + 1) % n;
    idist_recv_info info;
    (void)arg;
    TAP_REQUIRE(x && y);
    rank_is(rank, idist_cancel(NULL, &cancelled), IDIST_ERR_ARG);
    rank_check(!cancelled, "rank %d: without a request", rank);
    rank_is(rank, idist_cancel(&r, NULL), IDIST_ERR_ARG);
    cancelled = true;
    rank_ok(rank, idist_cancel(&r, &cancelled));
    rank_check(!cancelled, "rank %d: an empty request", rank);

    rank_ok(rank, idist_all_reduce(x, y, LARGE, IDIST_I32, IDIST_SUM, &a));
    if (n > 1 || r.impl) {
        idist_status status = idist_cancel(&r, &cancelled);
        rank_check(status == IDIST_ERR_ARG || status == IDIST_OK, "rank %d: got %s", rank,
                   idist_status_name(status)); // OK if it completed immediately
        rank_check(!cancelled, "rank %d: a collective", rank);
    }
    rank_ok(rank, idist_wait(&r));
    rank_ok(rank, idist_send(x, LARGE, IDIST_I32, right, 1, &a)); // waits for its receive
    idist_status s = idist_cancel(&r, &cancelled);
    rank_check(!cancelled, "rank %d: a send", rank);
    if (s != IDIST_OK || n > 1) { // MPI may complete a rank's send to itself at once
        rank_check(s == IDIST_ERR_ARG && strstr(idist_last_error(), "send"), "rank %d: %s, %s",
                   rank, idist_status_name(s), idist_last_error());
    }
    rank_ok(rank, idist_barrier(&o)); // no rank has posted its receive yet
    rank_ok(rank, idist_recv(y, LARGE, IDIST_I32, left, 1, NULL, &o));
    rank_ok(rank, idist_wait(&r));

    // The receive of a plan can be cancelled like any other, and the plan can then be started
    // again.
    rank_ok(rank, idist_plan_create(&plan));
    o.plan = plan;
    rank_ok(rank, idist_recv(y, 1, IDIST_I32, left, 2, NULL, &o));
    o.plan = NULL;
    rank_ok(rank, idist_plan_start(plan, &r));
    rank_check(cancels(rank, &r), "rank %d: a plan", rank);
    rank_ok(rank, idist_barrier(&o));
    x[0] = 40 + rank;
    rank_ok(rank, idist_plan_start(plan, &r));
    rank_ok(rank, idist_send(x, 1, IDIST_I32, right, 2, &o));
    rank_ok(rank, idist_wait(&r));
    rank_check(y[0] == 40 + left, "rank %d: got %d", rank, y[0]);
    rank_ok(rank, idist_plan_free(&plan));

    // Cancels a receive that is complete at once, because its message has already arrived.
    rank_ok(rank, idist_send(x, 1, IDIST_I32, right, 2, &o));
    rank_ok(rank, idist_probe(left, 2, &info, &o));
    rank_ok(rank, idist_recv(y, 1, IDIST_I32, left, 2, NULL, &a));
    rank_check(!cancels(rank, &r), "rank %d: its message was there", rank);
    free(x);
    free(y);
}

#ifndef RANKS_MPI
static void split_refused(idist_group *world, int rank, int n, void *arg) {
    idist_request r = {NULL};
    idist_group *part = NULL;
    bool cancelled = true;
    (void)n;
    (void)arg;
    rank_ok(rank, idist_split_start(world, 0, 0, &part, &r));
    rank_is(rank, idist_cancel(&r, &cancelled), IDIST_ERR_ARG);
    rank_check(!cancelled, "rank %d: a split", rank);
    rank_ok(rank, idist_wait(&r));
    rank_ok(rank, idist_free_group(&part));
}
#endif

// Cancels every other one of several receives. The remaining receives must get the messages in
// order.
static void order(idist_group *world, int rank, int n, void *arg) {
    enum { K = 6 };
    idist_request r[K];
    idist_opts o = opts_of(world);
    int32_t x[K], y;
    bool cancelled = false;
    (void)n;
    (void)arg;
    for (int turn = 0; turn < 20; turn++) {
        if (rank == 0) {
            rank_ok(rank, idist_barrier(&o));
            for (int k = 0; k < K / 2; k++) {
                y = 10 * turn + k;
                rank_ok(rank, idist_send(&y, 1, IDIST_I32, 1, 4, &o));
            }
            continue;
        }
        for (int k = 0; k < K; k++) {
            idist_opts a = opts_async(world, &r[k]);
            x[k] = -1;
            rank_ok(rank, idist_recv(&x[k], 1, IDIST_I32, k % 3 ? 0 : IDIST_ANY_SOURCE,
                                     k % 2 ? 4 : IDIST_ANY_TAG, NULL, &a));
        }
        for (int k = 0; k < K; k++) { // every other one, starting with the first or second
            if (k % 2 != turn % 2) continue;
            rank_ok(rank, idist_cancel(&r[k], &cancelled));
            rank_check(cancelled, "turn %d: receive %d is too late", turn, k);
        }
        rank_ok(rank, idist_barrier(&o));
        for (int k = 0; k < K; k++) {
            bool left = k % 2 != turn % 2;
            rank_is(rank, idist_wait(&r[k]), left ? IDIST_OK : IDIST_ERR_CANCELLED);
            rank_check(x[k] == (left ? 10 * turn + k / 2 : -1), "turn %d: receive %d got %d", turn,
                       k, x[k]);
        }
    }
}

//------------------------------------------------------------------------------
// while messages arrive: each message is received once, and in order
//------------------------------------------------------------------------------

enum { SMALL = 1, MEDIUM = 3000, LARGEST = 300000 };

static size_t size_of_message(int i) {
    if (i % 501 == 500) return LARGEST;
    return i % 37 == 36 ? MEDIUM * (size_t)(1 + i % 20) : SMALL;
}

static void sends_all(idist_group *world, int count) {
    int32_t *x = (int32_t *)calloc(LARGEST, sizeof *x);
    idist_opts o = opts_of(world);
    TAP_REQUIRE(x);
    for (int i = 0; i < count; i++) {
        x[0] = x[size_of_message(i) - 1] = i;
        if (!rank_ok(0, idist_send(x, size_of_message(i), IDIST_I32, 1, 6, &o))) break;
    }
    free(x);
}

static bool is_message(const int32_t *x, const idist_recv_info *info, int i) {
    size_t count = size_of_message(i);
    bool same = info->count == count && info->source == 0 && x[0] == i && x[count - 1] == i;
    rank_check(same, "message %d: got %d .. %d, %zu elements expected %zu", i, x[0], x[count - 1],
               info->count, count);
    return same;
}

static void pause_turns(unsigned turns) {
    for (volatile unsigned k = 0; k < turns; k++) continue;
}

// Cancels a receive soon after it is posted, again and again, while messages arrive.
static void races(idist_group *world, int rank, int n, void *arg) {
    int count = *(const int *)arg, got = 0, in_time = 0, late = 0;
    int32_t *x = (int32_t *)calloc(LARGEST, sizeof *x);
    uint64_t random = tap_seed();
    idist_request r = {NULL};
    idist_opts a = opts_async(world, &r);
    idist_recv_info info;
    (void)n;
    TAP_REQUIRE(x);
    if (rank == 0) sends_all(world, count);
    while (rank == 1 && got < count) {
        bool done = false;
        random = random * 6364136223846793005u + 1442695040888963407u;
        if (!rank_ok(rank,
                     idist_recv(x, LARGEST, IDIST_I32, random >> 40 & 1 ? 0 : -1, 6, &info, &a)))
            break;
        pause_turns((unsigned)(random >> 50) % 2000);
        if (random >> 41 & 1) rank_ok(rank, idist_test(&r, &done));
        if (!done && cancels(rank, &r)) {
            in_time++;
            continue;
        }
        late++;
        if (!is_message(x, &info, got++)) break;
    }
    free(x);
    if (rank == 1 && getenv("TEST_VERBOSE")) tap_diag("%d in time, %d not", in_time, late);
}

// Requests that one thread waits for while another thread cancels the first of them.
typedef struct canceller {
    idist_request r[3];
    uint64_t random;
    // Counters of turns. The thread that waits sets `turn`, and the thread that cancels sets
    // `ended_turn`.
    int turn, ended_turn;
    bool cancelled;
} canceller;

static void *cancels_in_thread(void *arg) {
    canceller *c = (canceller *)arg;
    for (int turn = 1;; turn++) {
        int now;
        while ((now = __atomic_load_n(&c->turn, __ATOMIC_ACQUIRE)) >= 0 && now < turn)
            sched_yield();
        if (now < 0) return NULL;
        c->random = c->random * 6364136223846793005u + 1442695040888963407u;
        if (turn % 50) pause_turns((unsigned)(c->random >> 45) % 40000);
        else tap_sleep_ms(25); // lets the waiting thread fall asleep; the test does not need this
        rank_ok(1, idist_cancel(&c->r[0], &c->cancelled));
        __atomic_store_n(&c->ended_turn, turn, __ATOMIC_RELEASE);
    }
}

// Waits in one of several ways for c->r[0]. The requests r[1] and r[2] stay open.
static idist_status waits_somehow(canceller *c, int turn) {
    size_t index = 9;
    bool done = false;
    idist_status s;
    switch (turn % 4) {
    case 0: return idist_wait(&c->r[0]);
    case 1: return idist_wait_all(c->r, 1);
    case 2:
        s = idist_wait_any(c->r, 3, &index);
        rank_check(index == 0, "wait_any gave %zu", index);
        return s;
    default:
        do s = idist_test(&c->r[0], &done);
        while (!done && s == IDIST_OK);
        return s;
    }
}

static void thread_races(idist_group *world, int rank, int n, void *arg) {
    int count = *(const int *)arg, got = 0, turn = 0;
    int32_t *x = (int32_t *)calloc(LARGEST, sizeof *x), never[2];
    idist_recv_info info;
    canceller c;
    pthread_t thread;
    (void)n;
    TAP_REQUIRE(x);
    if (rank == 0) {
        sends_all(world, count);
        free(x);
        return;
    }
    memset(&c, 0, sizeof c);
    c.random = tap_seed();
    idist_opts a = opts_async(world, &c.r[0]), never_1 = opts_async(world, &c.r[1]),
               never_2 = opts_async(world, &c.r[2]);
    rank_ok(rank, idist_recv(&never[0], 1, IDIST_I32, 0, 7, NULL, &never_1));
    rank_ok(rank, idist_recv(&never[1], 1, IDIST_I32, IDIST_ANY_SOURCE, 8, NULL, &never_2));
    TAP_REQUIRE(pthread_create(&thread, NULL, cancels_in_thread, &c) == 0);
    // After the last message, only the cancelling thread can end the wait.
    for (int rest = 400; got < count || rest-- > 0;) {
        idist_status s;
        if (!rank_ok(rank, idist_recv(x, LARGEST, IDIST_I32, 0, 6, &info, &a))) break;
        __atomic_store_n(&c.turn, ++turn, __ATOMIC_RELEASE);
        s = waits_somehow(&c, turn);
        while (__atomic_load_n(&c.ended_turn, __ATOMIC_ACQUIRE) < turn) sched_yield();
        rank_check(s == (c.cancelled ? IDIST_ERR_CANCELLED : IDIST_OK), "turn %d: got %s", turn,
                   idist_status_name(s));
        if (s == IDIST_OK && !is_message(x, &info, got++)) break;
        if (s != IDIST_OK && s != IDIST_ERR_CANCELLED) break;
    }
    __atomic_store_n(&c.turn, -1, __ATOMIC_RELEASE);
    TAP_REQUIRE(pthread_join(thread, NULL) == 0);
    rank_check(cancels(rank, &c.r[1]) && cancels(rank, &c.r[2]), "the other two were open");
    free(x);
}

//------------------------------------------------------------------------------
// after failures
//------------------------------------------------------------------------------

// Cancels a receive of a group that has failed. The receive is already complete and has the group's
// status.
static void after_a_failure(idist_group *world, int rank, int n, void *arg) {
    idist_request r = {NULL};
    idist_opts a = opts_async(world, &r), o = opts_of(world);
    bool cancelled = true;
    int32_t x;
    (void)arg;
    rank_ok(rank, idist_recv(&x, 1, IDIST_I32, (rank + 1) % n, 1, NULL, &a));
    if (rank == 0) rank_ok(rank, idist_abort(world));
    rank_is(rank, idist_barrier(&o), IDIST_ERR_ABORTED);
    rank_ok(rank, idist_cancel(&r, &cancelled));
    rank_check(!cancelled, "rank %d: the receive has ended before", rank);
    rank_is(rank, idist_wait(&r), IDIST_ERR_ABORTED);
}

#ifndef RANKS_MPI
// Deadlocks are detected only between ranks that have one thread each, and the runtime of the
// thread sanitizer starts another thread.
#ifndef __SANITIZE_THREAD__
// Cancels a receive, then blocks both ranks in receives. A rank does not wait for a cancelled
// receive, so the library must detect the deadlock.
static int deadlock_rank(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    idist_request r = {NULL};
    idist_opts a = opts_async(world, &r), o = opts_of(world);
    int32_t x;
    (void)arg;
    rank_ok(rank, idist_recv(&x, 1, IDIST_I32, (rank + 1) % n, 1, NULL, &a));
    rank_check(cancels(rank, &r), "rank %d: in time", rank);
    rank_ok(rank, idist_barrier(&o));
    proc_result(slot, idist_recv(&x, 1, IDIST_I32, (rank + 1) % n, 2, NULL, &o));
    rank_check(slot->status == IDIST_ERR_MISMATCH && strstr(slot->text, "deadlock"),
               "rank %d: got %s: %s", rank, idist_status_name((idist_status)slot->status),
               slot->text);
    return 0;
}

static void deadlock_after(const idist_desc *d, const char *name) {
    procs p;
    tap_running("a deadlock after a cancelled receive, %s", name);
    ranks_reset();
    procs_start(&p, 2, d, deadlock_rank, NULL);
    rank_check(procs_wait(&p, 15000) == 0, "hang");
    for (int k = 0; k < 2; k++)
        rank_check(p.wait_status[k] == 0, "rank %d: wait status %d", k, p.wait_status[k]);
    procs_free(&p);
    ranks_report("a deadlock after a cancelled receive, %s", name);
}
#endif

// Closes a world that has a cancelled receive for which no thread has waited. The close must be
// refused, and the world must stay open.
static void not_waited_for(void) {
    idist_group *w = NULL;
    idist_request r = {NULL};
    idist_desc d = desc_with("auto", "auto");
    bool cancelled = false;
    int32_t x;
    tap_running("closing with a cancelled request");
    ranks_reset();
    rank_ok(0, idist_open(&d, &w));
    idist_opts a = opts_async(w, &r);
    rank_ok(0, idist_recv(&x, 1, IDIST_I32, 0, 0, NULL, &a));
    rank_ok(0, idist_cancel(&r, &cancelled));
    rank_is(0, idist_close(&w), IDIST_ERR_STATE);
    rank_is(0, idist_wait(&r), IDIST_ERR_CANCELLED);
    rank_ok(0, idist_close(&w));
    ranks_report("closing with a cancelled request is refused until it is waited for");
}
#endif

static void placed(const idist_desc *d, const char *name, int rounds) {
    int few = rounds / 10;
    for (int n = 1; n <= 3; n++) {
        ranks_case(n, d, before_a_message, NULL, "before a message n=%d, %s", n, name);
        ranks_case(n, d, refused, NULL, "what is not cancelled n=%d, %s", n, name);
    }
    ranks_case(2, d, order, NULL, "messages go to the receives that are left, %s", name);
    ranks_case(2, d, races, &rounds, "each message is received once, %s", name);
    ranks_case(2, d, thread_races, &few, "a thread cancels what another one waits for, %s", name);
    ranks_case_fault(2, d, after_a_failure, NULL, "after a failure, %s", name);
#ifndef RANKS_MPI
    ranks_case(2, d, split_refused, NULL, "a split is not cancelled, %s", name);
#ifndef __SANITIZE_THREAD__
    deadlock_after(d, name);
#endif
#endif
}

int main(void) {
    tap_deadline(200);
    for (int t = 0; t < N_PLACEMENTS; t++) {
        idist_desc d = desc_with(transport_names[t], "auto");
        placed(&d, transport_names[t], test_quick() ? 10000 : 30000);
    }
    idist_desc remote = desc_with("auto", "remote");
    placed(&remote, "auto, remote", test_quick() ? 5000 : 30000);
#ifndef RANKS_MPI
    not_waited_for();
#endif
    return tap_done();
}
