// abort: idist_abort from another thread ends every call in which a rank is blocked
#include "idist.h"

#include "grid.h"

enum { IN_BARRIER, IN_ALL_REDUCE, IN_RECV, IN_SEND, IN_WAIT, IN_WAIT_ANY, IN_GROUP_END, N_PLACES };
static const char *const places[N_PLACES] = {"barrier", "all_reduce", "recv",     "send of much",
                                             "wait",    "wait_any",   "group_end"};

typedef struct experiment {
    int place;
    int aborter;        // the rank whose second thread calls idist_abort
    int64_t aborted_ms; // time in ms just before idist_abort; atomic
    int is_aborted;     // set just after idist_abort; atomic
    int woken;          // atomic
} experiment;

typedef struct second_thread {
    idist_group *group;
    experiment *e;
} second_thread;

static void *abort_soon(void *arg) {
    second_thread *t = (second_thread *)arg;
    tap_sleep_ms(60);
    __atomic_store_n(&t->e->aborted_ms, tap_now_ms(), __ATOMIC_RELEASE);
    rank_ok(t->e->aborter, idist_abort(t->group));
    __atomic_store_n(&t->e->is_aborted, 1, __ATOMIC_RELEASE);
    return NULL;
}

// Blocks in a call. Rank n-1 never makes the call, so no call can end by itself. The ranks do not
// wait for each other in a cycle.
static idist_status block(idist_group *g, int rank, int n, int place, float *x) {
    idist_opts o = opts_of(g);
    idist_request request[2] = {{NULL}, {NULL}};
    idist_opts a = opts_async(g, &request[0]), b = opts_async(g, &request[1]);
    idist_status status;
    size_t index = 0;
    int peer = (rank + 1) % n;
    switch (place) {
    case IN_BARRIER: return idist_barrier(&o);
    case IN_ALL_REDUCE: return idist_all_reduce(x, x, 300000, IDIST_F32, IDIST_SUM, &o);
    case IN_RECV: return idist_recv(x, 1, IDIST_F32, peer, 0, NULL, &o);
    case IN_SEND: return idist_send(x, 300000, IDIST_F32, peer, 0, &o);
    case IN_WAIT:
        status = idist_all_reduce(x, x, 100, IDIST_F32, IDIST_SUM, &a);
        return status ? status : idist_wait(&request[0]);
    case IN_WAIT_ANY:
        status = idist_recv(x, 1, IDIST_F32, IDIST_ANY_SOURCE, 0, NULL, &a);
        if (status == IDIST_OK) status = idist_recv(x + 1, 1, IDIST_F32, peer, 1, NULL, &b);
        if (status == IDIST_OK) status = idist_wait_any(request, 2, &index);
        idist_wait_all(request, 2);
        return status;
    default:
        idist_group_begin();
        idist_recv(x, 1, IDIST_F32, peer, 0, NULL, &o);
        return idist_group_end();
    }
}

static void body(idist_group *world, int rank, int n, void *arg) {
    experiment *e = (experiment *)arg;
    float *x = (float *)calloc(300000, sizeof *x);
    pthread_t thread;
    second_thread second = {world, e};
    idist_opts o = opts_of(world);
    TAP_REQUIRE(x);
    rank_ok(rank, idist_barrier(&o));
    if (rank == e->aborter) TAP_REQUIRE(pthread_create(&thread, NULL, abort_soon, &second) == 0);
    bool joins = rank != n - 1;
    if (joins) {
        idist_status status = block(world, rank, n, e->place, x);
        int64_t after_ms = tap_now_ms() - __atomic_load_n(&e->aborted_ms, __ATOMIC_ACQUIRE);
        rank_check(status == IDIST_ERR_ABORTED,
                   "rank %d: got %s expected IDIST_ERR_ABORTED; last error: %s", rank,
                   idist_status_name(status), idist_last_error());
        rank_check(after_ms <= 500 * test_slow_factor(), "rank %d: %lld ms after the abort", rank,
                   (long long)after_ms);
        rank_check(idist_last_error()[0] != 0, "rank %d: a failure has a text", rank);
    } else {
        while (!__atomic_load_n(&e->is_aborted, __ATOMIC_ACQUIRE)) tap_sleep_ms(1);
    }
    if (rank == e->aborter) TAP_REQUIRE(pthread_join(thread, NULL) == 0);
    // Later calls fail, even on the rank that was in no call.
    rank_is(rank, idist_barrier(&o), IDIST_ERR_ABORTED);
    rank_is(rank, idist_send(x, 1, IDIST_F32, 0, 0, &o), IDIST_ERR_ABORTED);
    rank_ok(rank, idist_abort(world)); // a second abort has no effect
    free(x);
}

// Aborts a group. The world and another group must stay usable.
static void group_only(idist_group *world, int rank, int n, void *arg) {
    experiment *e = (experiment *)arg;
    idist_group *g = NULL, *h = NULL;
    pthread_t thread;
    int32_t x = 1, y = 0;
    rank_ok(rank, idist_split(world, 0, rank, &g));
    rank_ok(rank, idist_split(world, rank % 2, rank, &h));
    second_thread second = {g, e};
    idist_opts og = opts_of(g), oh = opts_of(h), ow = opts_of(world);
    if (rank == 0) TAP_REQUIRE(pthread_create(&thread, NULL, abort_soon, &second) == 0);
    if (rank != n - 1) {
        rank_is(rank, idist_barrier(&og), IDIST_ERR_ABORTED);
    } else {
        rank_is(rank, idist_recv(&x, 1, IDIST_I32, 0, 0, NULL, &og), IDIST_ERR_ABORTED);
    }
    if (rank == 0) TAP_REQUIRE(pthread_join(thread, NULL) == 0);
    rank_ok(rank, idist_all_reduce(&x, &y, 1, IDIST_I32, IDIST_SUM, &ow));
    rank_check(y == n, "rank %d: the world: got %d expected %d", rank, y, n);
    rank_ok(rank, idist_all_reduce(&x, &y, 1, IDIST_I32, IDIST_SUM, &oh));
    rank_check(y == idist_group_size(h), "rank %d: the other group: got %d", rank, y);
    rank_ok(rank, idist_free_group(&g));
    rank_ok(rank, idist_free_group(&h));
}

// Rank 0 is in a call that no rank answers, and all other ranks are in no call. Only idist_abort
// can wake rank 0.
static void wakes_the_sleeper(idist_group *world, int rank, int n, void *arg) {
    experiment *e = (experiment *)arg;
    idist_opts o = opts_of(world);
    pthread_t thread;
    second_thread second = {world, e};
    int32_t x = 0;
    rank_ok(rank, idist_barrier(&o));
    if (rank == 0) {
        TAP_REQUIRE(pthread_create(&thread, NULL, abort_soon, &second) == 0);
        rank_is(rank, idist_recv(&x, 1, IDIST_I32, n - 1, 0, NULL, &o), IDIST_ERR_ABORTED);
        int64_t after_ms = tap_now_ms() - __atomic_load_n(&e->aborted_ms, __ATOMIC_ACQUIRE);
        rank_check(after_ms <= 400 * test_slow_factor(), "%lld ms after the abort",
                   (long long)after_ms);
        TAP_REQUIRE(pthread_join(thread, NULL) == 0);
        __atomic_store_n(&e->woken, 1, __ATOMIC_RELEASE);
    } else { // in no call until rank 0 is done
        int64_t end_ms = tap_now_ms() + 2000 * test_slow_factor();
        while (!__atomic_load_n(&e->woken, __ATOMIC_ACQUIRE) && tap_now_ms() < end_ms)
            tap_sleep_ms(1);
    }
}

// Rank 0 aborts groups that other ranks may not have created yet.
static void abort_at_once(idist_group *world, int rank, int n, void *arg) {
    (void)n;
    (void)arg;
    for (int i = 0; i < 200; i++) {
        idist_group *g = NULL;
        if (!rank_ok(rank, idist_split(world, 0, rank, &g))) return;
        idist_opts o = opts_of(g);
        o.timeout_ms = 3000 * test_slow_factor();
        if (rank == 0) rank_ok(rank, idist_abort(g));
        if (!rank_is(rank, idist_barrier(&o), IDIST_ERR_ABORTED)) return;
        rank_ok(rank, idist_free_group(&g));
    }
}

typedef struct midway {
    idist_group *group;
    int after_us;
} midway;

static void *abort_midway(void *arg) {
    midway *m = (midway *)arg;
    struct timespec t = {0, m->after_us * 1000L};
    nanosleep(&t, NULL);
    idist_abort(m->group);
    return NULL;
}

// A thread of the last rank aborts a busy group at a random moment. No rank may stay blocked in a
// call.
static void abort_a_stream(idist_group *world, int rank, int n, void *arg) {
    uint64_t random_state = tap_seed() + 17;
    float *x = (float *)calloc(20000, sizeof *x);
    TAP_REQUIRE(x);
    (void)arg;
    for (int i = 0; i < (test_quick() ? 60 : 200); i++) {
        midway m = {NULL, (int)(tap_rand(&random_state) % 3000)};
        size_t count = 100 + (size_t)(tap_rand(&random_state) % 19900);
        pthread_t thread;
        idist_status status = IDIST_OK;
        if (!rank_ok(rank, idist_split(world, 0, rank, &m.group))) break;
        idist_opts o = opts_of(m.group);
        o.timeout_ms = 3000 * test_slow_factor();
        if (rank == n - 1) TAP_REQUIRE(pthread_create(&thread, NULL, abort_midway, &m) == 0);
        while (status == IDIST_OK) status = idist_all_reduce(x, x, count, IDIST_F32, IDIST_SUM, &o);
        if (rank == n - 1) TAP_REQUIRE(pthread_join(thread, NULL) == 0);
        rank_ok(rank, idist_free_group(&m.group));
        if (!rank_is(rank, status, IDIST_ERR_ABORTED)) break;
    }
    free(x);
}

// Rank 1 calls idist_abort and keeps running. The other processes must notice the abort.
static int abort_process(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    idist_opts o = opts_of(world);
    idist_status status = idist_barrier(&o);
    (void)n;
    (void)arg;
    if (rank == 1) {
        if (status != IDIST_OK) return 96;
        tap_sleep_ms(30);
        slot->when_ns = tap_now_ns();
        status = idist_abort(world);
        proc_phase(slot, status == IDIST_OK ? 1 : 2);
        tap_sleep_ms(700);
        idist_close(&world);
        return 0;
    }
    // On a busy machine the abort may reach a rank that is still in the first barrier.
    if (status == IDIST_OK) status = idist_barrier(&o);
    proc_result(slot, status);
    idist_close(&world); // leaving without closing would count as another loss
    return 0;
}

static void between_processes(const char *transport) {
    procs p;
    idist_desc d = desc_with(transport, "auto");
    tap_running("abort between processes, %s", transport);
    ranks_reset();
    procs_start(&p, 3, &d, abort_process, NULL);
    int n_hung = procs_wait(&p, 8000);
    rank_check(n_hung == 0, "%d ranks hang", n_hung);
    rank_check(p.slot[1].phase == 1, "idist_abort failed");
    for (int k = 0; k < 3; k += 2) {
        long long ms = (long long)((p.slot[k].when_ns - p.slot[1].when_ns) / 1000000);
        rank_check(p.slot[k].status == IDIST_ERR_ABORTED && ms <= 500 * test_slow_factor(),
                   "rank %d: got %s after %lld ms: %s", k,
                   idist_status_name((idist_status)p.slot[k].status), ms, p.slot[k].text);
    }
    ranks_report("abort between processes, %s", transport);
    procs_free(&p);
}

#ifndef RANKS_MPI // MPI starts the ranks, so the test cannot stop them
// Rank 0 is stopped in an all_reduce when rank 1 aborts, so the all_reduce still seems to be
// running. Rank 2 calls another operation and must report the abort, not the mismatch.
static int differs_after_abort(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    idist_request request = {NULL};
    idist_opts o = opts_of(world), immediate = opts_async(world, &request);
    float x[100] = {0};
    (void)n, (void)arg;
    if (idist_barrier(&o) != IDIST_OK) return 96;
    if (rank == 0) {
        idist_status status = idist_all_reduce(x, x, 100, IDIST_F32, IDIST_SUM, &immediate);
        proc_phase(slot, 1);
        proc_await_phase(slot, 2); // stopped here
        proc_result(slot, status ? status : idist_wait(&request));
    } else {
        proc_phase(slot, 1);
        proc_await_phase(slot, 2);
        proc_result(slot, rank == 1 ? idist_abort(world) : idist_barrier(&o));
    }
    idist_close(&world);
    return 0;
}

// Rank 1 is stopped, so that messages of a group are queued at rank 0 when rank 0 aborts the group.
// The queued messages must return their part of the eager window. Rank 0 can then send half a
// window of messages on the world before rank 1 receives any of them.
static int queued_come_back(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    enum { COUNT = 250, NBYTES = 8000, LAST = (1 << 20) / (NBYTES + 64) - 2 };
    static char buf[NBYTES];
    static idist_request requests[COUNT];
    idist_opts o = opts_of(world), brief = o;
    idist_status status = IDIST_OK;
    idist_group *g = NULL;
    (void)n, (void)arg;
    brief.timeout_ms = 3000 * test_slow_factor();
    if (idist_split(world, 0, rank, &g) != IDIST_OK || idist_barrier(&o) != IDIST_OK) return 96;
    proc_phase(slot, 1);
    proc_await_phase(slot, 2); // rank 1 is stopped here
    for (int k = 0; k < COUNT && rank == 0; k++) {
        idist_opts immediate = opts_async(g, &requests[k]);
        if (!status) status = idist_send(buf, NBYTES, IDIST_U8, 1, 0, &immediate);
    }
    if (rank == 0) {
        if (!status) status = idist_abort(g);
        // Most requests are aborted.
        for (int k = 0; k < COUNT; k++) (void)!idist_wait(&requests[k]);
        proc_phase(slot, 3);
        proc_await_phase(slot, 4);
    }
    idist_free_group(&g);
    for (int k = 0; k < LAST && rank == 0 && !status; k++)
        status = idist_send(buf, NBYTES, IDIST_U8, 1, 3, &brief);
    if (!status) status = idist_barrier(&o);
    for (int k = 0; k < LAST && rank == 1 && !status; k++)
        status = idist_recv(buf, NBYTES, IDIST_U8, 0, 3, NULL, &o);
    proc_result(slot, status);
    idist_close(&world);
    return 0;
}

// Rank 0 aborts the world. Rank 1 frees the group that it shares with rank 2 and leaves. Rank 2
// waits for rank 1 in that group and must report the reason.
static int leaves_after_abort(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    idist_opts o = opts_of(world);
    idist_group *g = NULL;
    int32_t x = 0;
    (void)n, (void)arg;
    if (idist_split(world, rank > 0, rank, &g) != IDIST_OK || idist_barrier(&o) != IDIST_OK)
        return 96;
    proc_phase(slot, 1);
    if (rank == 0) {
        proc_await_phase(slot, 2); // rank 2 is in its receive
        proc_result(slot, idist_abort(world));
        proc_await_phase(slot, 3); // this rank leaves last
    } else if (rank == 1) {
        // Receives from rank 0, because a receive from rank 2 would be a deadlock. On a busy
        // machine the library might detect that deadlock before the abort.
        proc_result(slot, idist_recv(&x, 1, IDIST_I32, 0, 0, NULL, &o));
    } else {
        o.group = g;
        proc_result(slot, idist_recv(&x, 1, IDIST_I32, 0, 0, NULL, &o));
    }
    idist_free_group(&g);
    idist_close(&world);
    return 0;
}

static void abort_drives_others_away(const char *transport) {
    procs p;
    idist_desc d = desc_with(transport, "auto");
    bool reached;
    tap_running("one leaves after the abort, %s", transport);
    ranks_reset();
    procs_start(&p, 3, &d, leaves_after_abort, NULL);
    reached = procs_await_phase(&p, 1, 5000);
    tap_sleep_ms(20);
    proc_phase(&p.slot[0], 2);
    for (int k = 0; k < 3; k++) reached = proc_await_result(&p.slot[k], 5000) && reached;
    proc_phase(&p.slot[0], 3);
    rank_check(procs_wait(&p, 8000) == 0 && reached, "a rank hangs");
    for (int k = 0; k < 3; k++) {
        static const idist_status expected[3] = {IDIST_OK, IDIST_ERR_ABORTED, IDIST_ERR_ABORTED};
        rank_check((idist_status)p.slot[k].status == expected[k], "rank %d: got %s: %s", k,
                   idist_status_name((idist_status)p.slot[k].status), p.slot[k].text);
    }
    const char *first = strstr(p.slot[2].text, "rank 0 on ");
    rank_check(first && strstr(first, "rank 1 on "), "rank 2 does not name both, rank 0 first: %s",
               p.slot[2].text);
    ranks_report("who waits for a rank that leaves after an abort hears of both, %s", transport);
    procs_free(&p);
}

static void abort_before_messages_left(void) {
    procs p;
    idist_desc d = desc_with("auto", "auto");
    bool reached;
    tap_running("abort before messages have left");
    ranks_reset();
    procs_start(&p, 2, &d, queued_come_back, NULL);
    reached = procs_await_phase(&p, 1, 5000);
    kill(p.pid[1], SIGSTOP);
    proc_phase(&p.slot[0], 2);
    for (int k = 0; k < 10000 && __atomic_load_n(&p.slot[0].phase, __ATOMIC_ACQUIRE) < 3; k++)
        tap_sleep_ms(1);
    reached = __atomic_load_n(&p.slot[0].phase, __ATOMIC_ACQUIRE) >= 3 && reached;
    proc_phase(&p.slot[1], 2);
    kill(p.pid[1], SIGCONT);
    proc_phase(&p.slot[0], 4);
    rank_check(procs_wait(&p, 8000) == 0 && reached, "a rank hangs");
    for (int k = 0; k < 2; k++)
        rank_check(p.slot[k].status == IDIST_OK, "rank %d: got %s: %s", k,
                   idist_status_name((idist_status)p.slot[k].status), p.slot[k].text);
    ranks_report("messages that an abort takes back return their part of the eager window");
    procs_free(&p);
}

static void abort_beside_another_call(const char *transport) {
    procs p;
    idist_desc d = desc_with(transport, "auto");
    bool reached;
    tap_running("another call after the abort, %s", transport);
    ranks_reset();
    procs_start(&p, 3, &d, differs_after_abort, NULL);
    reached = procs_await_phase(&p, 1, 5000);
    kill(p.pid[0], SIGSTOP);
    for (int k = 1; k < 3; k++) {
        proc_phase(&p.slot[k], 2);
        reached = proc_await_result(&p.slot[k], 5000) && reached;
    }
    proc_phase(&p.slot[0], 2);
    kill(p.pid[0], SIGCONT);
    rank_check(procs_wait(&p, 8000) == 0 && reached, "a rank hangs");
    for (int k = 0; k < 3; k++)
        rank_check(p.slot[k].status == (k == 1 ? IDIST_OK : IDIST_ERR_ABORTED),
                   "rank %d: got %s: %s", k, idist_status_name((idist_status)p.slot[k].status),
                   p.slot[k].text);
    ranks_report("a rank makes another call after the abort, %s", transport);
    procs_free(&p);
}
#endif

// Aborts a group while a member is still creating it. Rank 1 has already started a large broadcast
// in the group, and over several hosts this message belongs to one of the group's inner groups. The
// message must return its part of the eager window between the two ranks.
static void window_comes_back(idist_group *world, int rank, int n, void *arg) {
#ifdef RANKS_MPI // the windows of an MPI are smaller
    enum { ROUNDS = 600, NBYTES = 60000, LAST = 1, LAST_NBYTES = 4 };
#else // the last messages fit into half the window, which is always available
    enum {
        ROUNDS = 600,
        NBYTES = 60000,
        LAST = (1 << 20) / (NBYTES + 64) - 1,
        LAST_NBYTES = NBYTES
    };
#endif
    static char buf[NBYTES];
    idist_opts o = opts_of(world);
    (void)n, (void)arg;
    for (int k = 0; k < ROUNDS; k++) {
        idist_group *g = NULL;
        if (!rank_ok(rank, idist_split(world, 0, rank, &g))) return;
        if (rank == 1) {
            idist_request request = {NULL};
            idist_opts immediate = opts_async(g, &request);
            idist_broadcast(buf, NBYTES, IDIST_U8, 1, &immediate);
            rank_ok(rank, idist_abort(g));
            (void)!idist_wait(&request); // done or aborted
        }
        rank_ok(rank, idist_free_group(&g));
        if (!rank_ok(rank, idist_barrier(&o))) return;
    }
    o.timeout_ms = 3000 * test_slow_factor();
    for (int k = 0; k < LAST && rank == 1; k++) // before the receives
        if (!rank_ok(rank, idist_send(buf, LAST_NBYTES, IDIST_U8, 0, 3, &o))) return;
    rank_ok(rank, idist_barrier(&o));
    for (int k = 0; k < LAST && rank == 0; k++)
        rank_ok(rank, idist_recv(buf, LAST_NBYTES, IDIST_U8, 1, 3, NULL, &o));
}

#ifndef RANKS_MPI
typedef struct meeting {
    const char *transport;
    int port;
} meeting;

// Rank 2 holds a handle of a group of ranks 0 and 1, but it is not a member. An abort of the group
// by rank 2 must fail.
static int aborts_as_outsider(int rank, void *arg) {
    const int members[2] = {0, 1};
    const meeting *m = (const meeting *)arg;
    idist_desc d = desc_with(m->transport, "auto");
    idist_group *g = NULL;
    d.master_addr = "127.0.0.1";
    d.master_port = m->port;
    d.rank = rank;
    d.world_size = 3;
    d.timeout_ms = d.init_timeout_ms = RANKS_TIMEOUT_MS;
    if (!rank_ok(rank, idist_initialize(&d))) return 1;
    rank_ok(rank, idist_new_group(members, 2, &g));
    if (rank == 2) rank_is(rank, idist_abort(g), IDIST_ERR_STATE);
    rank_ok(rank, idist_barrier(NULL));
    idist_opts o = opts_of(g);
    rank_is(rank, idist_barrier(&o), rank < 2 ? IDIST_OK : IDIST_ERR_STATE);
    rank_ok(rank, idist_free_group(&g));
    rank_ok(rank, idist_finalize());
    return 0;
}

static void abort_by_an_outsider(const char *transport) {
    meeting m = {transport, free_port()};
    tap_running("abort by an outsider, %s", transport);
    ranks_reset();
    procs_run(3, 20000, aborts_as_outsider, &m);
    ranks_report("a rank that is no member cannot abort a group, %s", transport);
}
#endif

int main(void) {
    uint64_t random_state = tap_seed();
    tap_deadline(60);
    for (int place = 0; place < N_PLACES; place++) {
        for (int n = 2; n <= 5; n += n == 2 ? 1 : 2) {
            experiment *e = (experiment *)shared_alloc(sizeof *e);
            idist_desc d = desc_with(n == 3 ? "tcp" : "auto", "auto");
            e->place = place;
            e->aborter = (int)(tap_rand(&random_state) % (uint64_t)n);
            if (test_quick() && n == (place % 2 ? 3 : 5)) continue;
            ranks_case_fault(n, &d, body, e, "rank %d of %d aborts, the others are in %s, %s",
                             e->aborter, n, places[place], d.transport);
        }
    }
    for (int n = 2; n <= 3; n++)
        ranks_case(n, NULL, abort_a_stream, NULL, "abort of a busy group of %d, at any moment", n);
    ranks_case(4, NULL, group_only, shared_alloc(sizeof(experiment)),
               "abort of a group leaves the world alone");
    for (int t = 0; t < N_PLACEMENTS; t++) {
        idist_desc d = desc_with(transport_names[t], "auto");
        for (int n = t == 0 ? 1 : 2; n <= 2; n++) {
            ranks_case_fault(n, &d, wakes_the_sleeper, shared_alloc(sizeof(experiment)),
                             "abort wakes who sleeps alone n=%d, %s", n, d.transport);
        }
        for (int n = 2; n <= 3; n++)
            ranks_case(n, &d, abort_at_once, NULL,
                       "abort of a group that others do not have yet n=%d, %s", n, d.transport);
        between_processes(d.transport);
#ifndef RANKS_MPI
        abort_beside_another_call(d.transport);
        abort_drives_others_away(d.transport);
        // The first three names are also values of desc.transport.
        if (t < 3) abort_by_an_outsider(d.transport);
#endif
    }
    {
        idist_desc d = desc_with("hosts", "auto");
        ranks_case(3, &d, window_comes_back, NULL, "aborted groups leave the eager window alone");
    }
#ifndef RANKS_MPI
    abort_before_messages_left();
#endif
    tap_is(idist_abort(NULL), IDIST_ERR_STATE, "abort without a world");
    return tap_done();
}
