// mismatch: ranks that call different operations, or one operation with different arguments, all
// get IDIST_ERR_MISMATCH.
//
// Each case opens a world and lets one rank, chosen by the seed, make a different call than all
// other ranks. Every rank must soon get IDIST_ERR_MISMATCH, from that call or from the next one on
// the group. The error text must name two ranks, one of them the odd rank, and the field that
// differs. No byte may be written outside a buffer.
#include "idist.h"

#include "grid.h"

enum {
    ALL_REDUCE,
    REDUCE,
    BROADCAST,
    BARRIER,
    ALL_GATHER,
    GATHER,
    SCATTER,
    REDUCE_SCATTER,
    ALL_TO_ALL,
    SCAN,
    EXSCAN,
    ALL_GATHERV,
    GATHERV,
    SCATTERV,
    ALL_TO_ALLV,
    REDUCE_SCATTERV,
    N_OPERATIONS
};

static const char *const operation_names[N_OPERATIONS] = {
    "all_reduce", "reduce",         "broadcast",   "barrier",        "all_gather", "gather",
    "scatter",    "reduce_scatter", "all_to_all",  "scan",           "exscan",     "all_gatherv",
    "gatherv",    "scatterv",       "all_to_allv", "reduce_scatterv"};

typedef struct one_call {
    int operation;
    size_t count;
    idist_dtype dtype;
    idist_op op;
    int root;
} one_call;

typedef struct experiment {
    one_call normal, odd;
    int odd_rank;
    const char *field; // the field that the error text must name
    bool async;
} experiment;

static idist_status make_call(const one_call *c, int n, const unsigned char *s, unsigned char *r,
                              const idist_opts *o) {
    static _Thread_local size_t counts[RANKS_MAX]; // must outlive a call with a request
    for (int k = 0; k < n; k++) counts[k] = c->count;
    switch (c->operation) {
    case ALL_REDUCE: return idist_all_reduce(s, r, c->count, c->dtype, c->op, o);
    case REDUCE: return idist_reduce(s, r, c->count, c->dtype, c->op, c->root, o);
    case BROADCAST: return idist_broadcast(r, c->count, c->dtype, c->root, o);
    case BARRIER: return idist_barrier(o);
    case ALL_GATHER: return idist_all_gather(s, r, c->count, c->dtype, o);
    case GATHER: return idist_gather(s, r, c->count, c->dtype, c->root, o);
    case SCATTER: return idist_scatter(s, r, c->count, c->dtype, c->root, o);
    case REDUCE_SCATTER: return idist_reduce_scatter(s, r, c->count, c->dtype, c->op, o);
    case ALL_TO_ALL: return idist_all_to_all(s, r, c->count, c->dtype, o);
    case SCAN: return idist_scan(s, r, c->count, c->dtype, c->op, o);
    case EXSCAN: return idist_exscan(s, r, c->count, c->dtype, c->op, o);
    case ALL_GATHERV: return idist_all_gatherv(s, c->count, r, counts, NULL, c->dtype, o);
    case GATHERV: return idist_gatherv(s, c->count, r, counts, NULL, c->dtype, c->root, o);
    case SCATTERV: return idist_scatterv(s, counts, NULL, r, c->count, c->dtype, c->root, o);
    case REDUCE_SCATTERV: return idist_reduce_scatterv(s, r, counts, c->dtype, c->op, o);
    default: return idist_all_to_allv(s, counts, NULL, r, counts, NULL, c->dtype, o);
    }
}

static int ranks_named(const char *text, int n) {
    int named = 0;
    for (int k = 0; k < n; k++) named += text_names_rank(text, k);
    return named;
}

static void check_text(const experiment *e, int rank, int n) {
    const char *text = idist_last_error();
    bool says_field = text_has_word(text, e->field);
    if (e->normal.operation != e->odd.operation)
        says_field = says_field || (text_has_word(text, operation_names[e->normal.operation]) &&
                                    text_has_word(text, operation_names[e->odd.operation]));
    // The library may first compare the next call, the barrier. In this case one rank is in barrier
    // #1 and another rank is in barrier #2.
    if (e->normal.operation == BARRIER || e->odd.operation == BARRIER)
        says_field =
            says_field || (text_has_word(text, "sequence") && text_has_word(text, "barrier #2"));
    rank_check(ranks_named(text, n) >= 2 && text_names_rank(text, e->odd_rank),
               "rank %d: the text names two ranks, one of them %d: got \"%s\"", rank, e->odd_rank,
               text);
    rank_check(says_field, "rank %d: the text says \"%s\": got \"%s\"", rank, e->field, text);
}

static void describe(const experiment *e, char *text, size_t capacity) {
    const one_call *a = &e->odd, *b = &e->normal;
    snprintf(text, capacity, "rank %d: %s x %zu %s %s root %d, others: %s x %zu %s %s root %d",
             e->odd_rank, operation_names[a->operation], a->count, idist_dtype_name(a->dtype),
             idist_op_name(a->op), a->root, operation_names[b->operation], b->count,
             idist_dtype_name(b->dtype), idist_op_name(b->op), b->root);
}

static void experiment_rank(idist_group *world, int rank, int n, void *arg) {
    const experiment *e = (const experiment *)arg;
    const one_call *c = rank == e->odd_rank ? &e->odd : &e->normal;
    size_t nbytes = c->count * idist_dtype_size(c->dtype) * (size_t)n;
    guarded_buffer s = guarded_buffer_make(nbytes, 0), r = guarded_buffer_make(nbytes, 0);
    idist_request request = {NULL};
    idist_opts plain = opts_of(world), async = opts_async(world, &request);
    char what[300];
    describe(e, what, sizeof what);
    memset(s.p, 0, nbytes);
    int64_t start = tap_now_ms();
    idist_status first = make_call(c, n, s.p, r.p, e->async ? &async : &plain), second = IDIST_OK;
    if (e->async && first == IDIST_OK) first = idist_wait(&request);
    if (first == IDIST_OK) second = idist_barrier(&plain);
    int64_t took = tap_now_ms() - start;
    idist_status got = first ? first : second;
    if (got != IDIST_ERR_MISMATCH)
        rank_fail("rank %d: got %s, then %s expected IDIST_ERR_MISMATCH (%s); last error: %s", rank,
                  idist_status_name(first), idist_status_name(second), what, idist_last_error());
    else check_text(e, rank, n);
    if (took > 2000 * test_slow_factor())
        rank_fail("rank %d: took %lld ms (%s)", rank, (long long)took, what);
    rank_check(guarded_buffer_guards_hold(&r) && guarded_buffer_guards_hold(&s),
               "rank %d: written outside of a buffer (%s)", rank, what);
    idist_status later = idist_barrier(&plain);
    if (got == IDIST_ERR_MISMATCH)
        rank_check(later == IDIST_ERR_MISMATCH, "rank %d: a later call gives the same: got %s (%s)",
                   rank, idist_status_name(later), what);
    guarded_buffer_free(&s);
    guarded_buffer_free(&r);
}

typedef struct setting {
    int n;
    size_t count;
    const char *algorithm, *transport;
    bool async;
} setting;

static one_call plain_call(int operation, const setting *s) {
    one_call c;
    c.operation = operation;
    c.count = operation == BARRIER ? 0 : s->count;
    c.dtype = IDIST_F32;
    c.op = IDIST_SUM;
    c.root = 0;
    return c;
}

static void run_experiment(experiment *e, const setting *s, uint64_t *random_state) {
    idist_desc d = desc_with(s->transport, s->algorithm);
    char what[300];
    d.timeout_ms = 5000 * test_slow_factor();
    e->odd_rank = (int)(tap_rand(random_state) % (uint64_t)s->n);
    e->async = s->async;
    describe(e, what, sizeof what);
    tap_running("n=%d %s %s: %s", s->n, s->algorithm, s->transport, what);
    ranks_threads_fault(s->n, &d, experiment_rank, e);
}

static void pairs(const setting *s, uint64_t *random_state) {
    for (int a = 0; a < N_OPERATIONS; a++) {
        ranks_reset();
        for (int b = 0; b < N_OPERATIONS; b++) {
            experiment e;
            if (a == b) continue;
            memset(&e, 0, sizeof e);
            e.odd = plain_call(a, s);
            e.normal = plain_call(b, s);
            e.field = "operation";
            run_experiment(&e, s, random_state);
        }
        ranks_report("one rank calls %s, the others each other collective: n=%d count %zu %s %s%s",
                     operation_names[a], s->n, s->count, s->algorithm, s->transport,
                     s->async ? " async" : "");
    }
}

static bool has_op(int operation) {
    return operation == ALL_REDUCE || operation == REDUCE || operation == REDUCE_SCATTER ||
           operation == REDUCE_SCATTERV || operation == SCAN || operation == EXSCAN;
}

static bool has_root(int operation) {
    return operation == REDUCE || operation == BROADCAST || operation == GATHER ||
           operation == SCATTER || operation == GATHERV || operation == SCATTERV;
}

static void one_field(experiment e, const char *field, const setting *s, uint64_t *random_state) {
    e.field = field;
    run_experiment(&e, s, random_state);
}

static void fields(const setting *s, uint64_t *random_state) {
    for (int a = 0; a < N_OPERATIONS; a++) {
        if (a == BARRIER) continue;
        experiment base, e;
        memset(&base, 0, sizeof base);
        base.odd = base.normal = plain_call(a, s);
        ranks_reset();
        e = base;
        e.odd.count++;
        one_field(e, "count", s, random_state);
        e = base;
        e.odd.count--;
        one_field(e, "count", s, random_state);
        e = base;
        e.odd.dtype = IDIST_I32; // has the size of IDIST_F32
        one_field(e, "dtype", s, random_state);
        e = base;
        e.odd.dtype = IDIST_F64;
        one_field(e, "dtype", s, random_state);
        e = base;
        e.odd.op = IDIST_MAX;
        if (has_op(a)) one_field(e, "op", s, random_state);
        e.odd.op = IDIST_AVG; // adds like SUM
        if (has_op(a) && a != SCAN && a != EXSCAN) one_field(e, "op", s, random_state);
        e = base;
        e.odd.root = s->n - 1;
        if (has_root(a)) one_field(e, "root", s, random_state);
        ranks_report("%s with another count, dtype, op, root on one rank: n=%d count %zu %s %s%s",
                     operation_names[a], s->n, s->count, s->algorithm, s->transport,
                     s->async ? " async" : "");
    }
}

// Passes, on rank 0, a count to all_to_allv that is one more than rank 1 expects. All ranks must
// report the mismatch.
static void v_counts(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    size_t sends[RANKS_MAX], receives[RANKS_MAX];
    int32_t s[64] = {0}, r[64] = {0};
    (void)arg;
    for (int k = 0; k < n; k++) sends[k] = receives[k] = 4;
    if (rank == 0) sends[1] = 5;
    idist_status status = idist_all_to_allv(s, sends, NULL, r, receives, NULL, IDIST_I32, &o);
    if (status == IDIST_OK) status = idist_barrier(&o);
    rank_check(status == IDIST_ERR_MISMATCH, "rank %d: got %s expected IDIST_ERR_MISMATCH", rank,
               idist_status_name(status));
    const char *text = idist_last_error();
    rank_check(text_names_rank(text, 0) && text_names_rank(text, 1) && text_has_word(text, "count"),
               "rank %d: the text names ranks 0 and 1 and the count: got \"%s\"", rank, text);
}

// Makes the root of gatherv expect 6 elements from rank 1, which sends 5. All ranks must report the
// mismatch.
static void gatherv_counts(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    size_t counts[RANKS_MAX];
    int32_t s[64] = {0}, r[64] = {0};
    (void)arg;
    for (int k = 0; k < n; k++) counts[k] = k == 1 ? 6 : 5;
    idist_status status = idist_gatherv(s, 5, r, counts, NULL, IDIST_I32, 0, &o);
    if (status == IDIST_OK) status = idist_barrier(&o);
    rank_check(status == IDIST_ERR_MISMATCH, "rank %d: got %s expected IDIST_ERR_MISMATCH", rank,
               idist_status_name(status));
    const char *text = idist_last_error();
    rank_check(text_names_rank(text, 0) && text_names_rank(text, 1) && text_has_word(text, "count"),
               "rank %d: the text names ranks 0 and 1 and the count: got \"%s\"", rank, text);
}

// Kinds of calls in which ranks wait for each other forever. If every process has only one thread,
// the library can detect such a deadlock with certainty. Two groups may have the same ranks, so the
// ranks compare the groups of their calls as well.
typedef enum {
    ALL_REDUCE_IN_ANOTHER_GROUP,
    RECV_AGAINST_BARRIER,
    RECV_AGAINST_ALL_REDUCE,
    RECV_AGAINST_RECV,
    BROADCASTS_IN_ANOTHER_GROUP // fails once the root must wait; it may be some calls ahead
} crossing;

static int crossing_body(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    crossing what = *(crossing *)arg;
    idist_group *g = NULL;
    int32_t x = 1;
    bool odd = rank == n - 1;
    // With six ranks, ranks 2 and 5 exchange no message in a barrier made of messages.
    int source = n == 6 ? 2 : 0;
    if (idist_split(world, 0, rank, &g) != IDIST_OK) return 96;
    idist_opts o = opts_of(odd && what == ALL_REDUCE_IN_ANOTHER_GROUP ? g : world);
    idist_opts ahead = opts_of(g);
    int64_t start = tap_now_ms();
    idist_status status = IDIST_OK;
    if (what == ALL_REDUCE_IN_ANOTHER_GROUP)
        status = idist_all_reduce(&x, &x, 1, IDIST_I32, IDIST_SUM, &o);
    else if (what == RECV_AGAINST_RECV && rank == 0)
        status = idist_recv(&x, 1, IDIST_I32, n - 1, 7, NULL, &o);
    else if (odd && what == BROADCASTS_IN_ANOTHER_GROUP)
        while (status == IDIST_OK) status = idist_broadcast(&x, 1, IDIST_I32, rank, &ahead);
    else if (odd) status = idist_recv(&x, 1, IDIST_I32, source, 7, NULL, &o);
    else if (what == RECV_AGAINST_ALL_REDUCE)
        status = idist_all_reduce(&x, &x, 1, IDIST_I32, IDIST_SUM, &o);
    else status = idist_barrier(&o);
    proc_phase(slot, (int)(tap_now_ms() - start));
    proc_result(slot, status);
    return 0;
}

static void crossing_calls(int n, const char *transport, crossing what, const char *field,
                           const char *name) {
// Deadlocks are detected only between ranks that have one thread each, and the runtime of the
// thread sanitizer starts another thread.
#ifdef __SANITIZE_THREAD__
    tap_skip(name, "%d ranks, %s, case %d: the thread sanitizer adds a thread", n, field,
             (int)what);
    return;
#endif
    procs p;
    idist_desc d = desc_with(transport, "auto");
    tap_running("%s, n=%d, %s", name, n, transport);
    ranks_reset();
    procs_start(&p, n, &d, crossing_body, &what);
    int n_hung = procs_wait(&p, 8000);
    rank_check(n_hung == 0, "%d ranks hang", n_hung);
    for (int k = 0; k < n; k++) {
        rank_check(p.slot[k].status == IDIST_ERR_MISMATCH, "rank %d: got %s: %s", k,
                   idist_status_name((idist_status)p.slot[k].status), p.slot[k].text);
        bool other = false; // true if the text names a rank that waits for the odd rank
        for (int i = 0; i < n - 1; i++) other = other || text_names_rank(p.slot[k].text, i);
        rank_check(other && text_names_rank(p.slot[k].text, n - 1) &&
                       text_has_word(p.slot[k].text, field),
                   "rank %d: the text names rank %d, another one and the %s: got \"%s\"", k, n - 1,
                   field, p.slot[k].text);
        rank_check(p.slot[k].phase < 500 * test_slow_factor(), "rank %d: after %d ms", k,
                   p.slot[k].phase);
    }
    ranks_report("%s: a mismatch on all of %d ranks, %s", name, n, transport);
    procs_free(&p);
}

// A receive of rank 1 that timed out no longer waits. Rank 0 enters a collective after the time-out
// and must not take the receive for one half of a deadlock. Meanwhile rank 1 waits for rank 2. The
// search for deadlocks ignores calls with their own time-out, so rank 1's short time-out is set for
// its world.
enum { TIMED_OUT = 1, ENTERS, IS_THROUGH };

static int waits_no_more(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    const proc_slot *slots = slot - rank;
    idist_opts o = opts_of(world), patient = opts_of(world);
    int32_t x = 1;
    (void)arg;
    patient.timeout_ms = RANKS_TIMEOUT_MS;
    rank_ok(rank, idist_barrier(&patient));
    if (rank == 0) {
        proc_await_phase(&slots[1], TIMED_OUT);
        proc_phase(slot, ENTERS);
    }
    if (rank == 1) {
        rank_is(rank, idist_recv(&x, 1, IDIST_I32, 0, 7, NULL, &o), IDIST_ERR_TIMEOUT);
        proc_phase(slot, TIMED_OUT);
        rank_ok(rank, idist_recv(&x, 1, IDIST_I32, 2, 7, NULL, &patient));
    }
    if (rank == 2) {
        proc_await_phase(&slots[0], ENTERS);
        tap_sleep_ms(300); // time for rank 0 to look for a deadlock; the test does not need it
        rank_ok(rank, idist_send(&x, 1, IDIST_I32, 1, 7, &patient));
    }
    proc_result(slot, idist_all_reduce(&x, &x, 1, IDIST_I32, IDIST_SUM, rank == 0 ? &o : &patient));
    rank_check(x == n, "rank %d: got %d", rank, x);
    proc_phase(slot, IS_THROUGH);
    for (int k = 0; k < n; k++) proc_await_phase(&slots[k], IS_THROUGH);
    (void)idist_close(&world); // may time out on rank 1
    return 0;
}

static void timed_out_before(void) {
    procs p;
    idist_desc d[3];
    for (int k = 0; k < 3; k++) d[k] = desc_with("auto", "auto");
    d[1].timeout_ms = 500;
    tap_running("a receive that timed out, then a collective");
    ranks_reset();
    procs_start_each(&p, 3, d, waits_no_more, NULL);
    rank_check(procs_wait(&p, RANKS_TIMEOUT_MS + 5000) == 0, "hang");
    for (int k = 0; k < 3; k++)
        rank_check(p.slot[k].has_result && p.slot[k].status == IDIST_OK, "rank %d: %s", k,
                   p.slot[k].text);
    ranks_report("a receive that timed out is no half of a deadlock");
    procs_free(&p);
}

// A call that ended because its group was aborted no longer waits, and the world still works. Rank
// 2 waits for rank 0 in the group, in a receive or in a collective, until rank 1 aborts the group.
enum { FAILED = 1, ENTERS_WORLD };

static int fails_in_group(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    const proc_slot *slots = slot - rank;
    bool receives = *(bool *)arg;
    idist_group *g = NULL;
    idist_opts o = opts_of(world);
    int32_t x = 1;
    if (idist_split(world, 0, rank, &g) != IDIST_OK) return 96;
    idist_opts in_group = opts_of(g);
    if (rank == 0) {
        proc_await_phase(&slots[2], FAILED);
        proc_phase(slot, ENTERS_WORLD);
    }
    if (rank == 1) {
        // Gives rank 2 time to report that it waits. The test does not depend on this delay.
        tap_sleep_ms(300);
        rank_ok(rank, idist_abort(g));
    }
    if (rank == 2) {
        rank_is(rank,
                receives ? idist_recv(&x, 1, IDIST_I32, 0, 7, NULL, &in_group)
                         : idist_all_reduce(&x, &x, 1, IDIST_I32, IDIST_SUM, &in_group),
                IDIST_ERR_ABORTED);
        x = 1;
        proc_phase(slot, FAILED);
        proc_await_phase(&slots[0], ENTERS_WORLD);
        tap_sleep_ms(300); // time for rank 0 to look for a deadlock; the test does not need it
    }
    proc_result(slot, idist_all_reduce(&x, &x, 1, IDIST_I32, IDIST_SUM, &o));
    rank_check(x == n, "rank %d: got %d", rank, x);
    idist_free_group(&g);
    rank_ok(rank, idist_close(&world));
    return 0;
}

static void failed_before(const char *transport, bool receives) {
    procs p;
    idist_desc d = desc_with(transport, "auto");
    tap_running("a group that was aborted, then a collective of the world, %s", transport);
    ranks_reset();
    procs_start(&p, 3, &d, fails_in_group, &receives);
    rank_check(procs_wait(&p, RANKS_TIMEOUT_MS + 5000) == 0, "hang");
    for (int k = 0; k < 3; k++)
        rank_check(p.slot[k].has_result && p.slot[k].status == IDIST_OK, "rank %d: %s", k,
                   p.slot[k].text);
    ranks_report("%s that was aborted is no half of a deadlock, %s",
                 receives ? "a receive" : "an all_reduce", transport);
    procs_free(&p);
}

// One thread makes its call on a different group than all other threads. Any thread might still
// make the matching call, so the ranks must time out and not hang.
static void another_group(idist_group *world, int rank, int n, void *arg) {
    idist_group *g = NULL;
    int32_t x = 1;
    (void)arg;
    rank_ok(rank, idist_split(world, 0, rank, &g));
    idist_opts o = opts_of(rank == n - 1 ? g : world);
    o.timeout_ms = 400;
    int64_t start = tap_now_ms();
    idist_status status = idist_all_reduce(&x, &x, 1, IDIST_I32, IDIST_SUM, &o);
    // The rank whose time-out expires first closes the world. The other ranks may detect this
    // before their own time-outs, as a mismatch with finalize or as a lost rank.
    rank_check(status == IDIST_ERR_TIMEOUT || status == IDIST_ERR_PEER_LOST ||
                   status == IDIST_ERR_MISMATCH,
               "rank %d: got %s", rank, idist_status_name(status));
    rank_check(tap_now_ms() - start < 400 + 1000 * test_slow_factor(), "rank %d: too late", rank);
    idist_free_group(&g);
}

// Rank 0 closes the world while all other ranks are in a barrier. Each rank stays until all ranks
// have their results, because a rank that leaves early could be reported as lost instead.
static int closes_early(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    idist_opts o = opts_of(world);
    (void)arg;
    proc_result(slot, rank ? idist_barrier(&o) : idist_close(&world));
    proc_phase(slot, 1);
    for (int k = 0; k < n; k++) proc_await_phase(&slot[k - rank], 1);
    return 0;
}

static void close_against_barrier(const char *transport) {
    procs p;
    idist_desc d = desc_with(transport, "auto");
    tap_running("close against a barrier, %s", transport);
    ranks_reset();
    procs_start(&p, 2, &d, closes_early, NULL);
    int n_hung = procs_wait(&p, 8000);
    rank_check(n_hung == 0, "%d ranks hang", n_hung);
    for (int k = 0; k < 2; k++)
        rank_check(p.slot[k].status == IDIST_ERR_MISMATCH &&
                       text_has_word(p.slot[k].text, "finalize"),
                   "rank %d: got %s: %s", k, idist_status_name((idist_status)p.slot[k].status),
                   p.slot[k].text);
    ranks_report("one rank closes the world, the other is in a barrier: a mismatch on both, %s",
                 transport);
    procs_free(&p);
}

#ifndef RANKS_MPI
// Passes a different list to idist_new_group on rank 1. All ranks must report the mismatch.
static int other_lists(int local_rank, void *arg) {
    static const int lists[2][2] = {{0, 1}, {0, 2}};
    idist_group *g = NULL;
    (void)arg;
    rank_is(local_rank, idist_new_group(lists[local_rank == 1], 2, &g), IDIST_ERR_MISMATCH);
    rank_check(strstr(idist_last_error(), "the group differs between rank ") != NULL,
               "rank %d: got \"%s\"", local_rank, idist_last_error());
    return 0;
}

static void new_group_lists(void) {
    tap_running("idist_new_group with other lists");
    ranks_reset();
    // The world has failed, and closing it reports that.
    (void)idist_spawn(other_lists, NULL, 3, NULL);
    ranks_report("idist_new_group with another list on one rank");
}
#endif

// A mismatch inside a group leaves the world usable.
static void only_the_group(idist_group *world, int rank, int n, void *arg) {
    idist_group *g = NULL;
    float x[2] = {1, 2}, y[2];
    (void)arg;
    rank_ok(rank, idist_split(world, rank < 2 ? 0 : -1, rank, &g));
    idist_opts o = opts_of(g), w = opts_of(world);
    if (rank < 2) {
        idist_status status = idist_all_reduce(x, y, 1 + (size_t)rank, IDIST_F32, IDIST_SUM, &o);
        if (status == IDIST_OK) status = idist_barrier(&o);
        rank_check(status == IDIST_ERR_MISMATCH, "rank %d: got %s expected IDIST_ERR_MISMATCH",
                   rank, idist_status_name(status));
    }
    rank_ok(rank, idist_all_reduce(x, y, 2, IDIST_F32, IDIST_SUM, &w));
    rank_check(y[0] == (float)n, "rank %d: got %g expected %d", rank, (double)y[0], n);
    idist_free_group(&g);
}

// Only shared memory lets a rank get 16 calls ahead.
#if !defined(RANKS_MPI) && !defined(ON_DEVICE_H)
#define RANKS_GET_AHEAD
// A rank that waits for no other rank can be up to 16 calls ahead. Rank 0 broadcasts, but rank 1
// contributes to a gather from the fifth call on. The next call that compares the calls of rank 1
// must fail.
static void found_while_ahead(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    int x = rank, all[2] = {0, 0}, *entered = (int *)arg;
    (void)n;
    for (int i = 1; i <= (rank ? 9 : 16); i++)
        rank_ok(rank, rank && i > 4 ? idist_gather(&x, all, 1, IDIST_I32, 0, &o)
                                    : idist_broadcast(&x, 1, IDIST_I32, 0, &o));
    if (rank) {
        __atomic_store_n(entered, 1, __ATOMIC_RELEASE);
        rank_is(rank, idist_barrier(&o), IDIST_ERR_MISMATCH);
        return;
    }
    while (!__atomic_load_n(entered, __ATOMIC_ACQUIRE)) sched_yield();
    rank_is(rank, idist_broadcast(&x, 1, IDIST_I32, 0, &o), IDIST_ERR_MISMATCH);
    rank_check(text_has_word(idist_last_error(), "operation differs: rank 0 called broadcast #5"),
               "rank %d: got \"%s\"", rank, idist_last_error());
}
#endif

int main(void) {
    static const setting settings[7] = {{2, 5, "auto", "auto", false},
                                        {3, 5, "latency", "auto", false},
                                        {3, 50000, "bandwidth", "auto", false},
                                        {4, 700, "auto", "tcp", true},
                                        {5, 100, "bandwidth", "auto", true},
                                        {4, 5, "auto", "blocks", false},
                                        {5, 700, "auto", "hosts", true}};
    uint64_t random_state = tap_seed();
    tap_deadline(300);
    int n_settings = test_quick() ? 2 : 7;
    for (int i = 0; i < n_settings; i++) {
        if (i < 3 || i == 5) pairs(&settings[i], &random_state);
        fields(&settings[i], &random_state);
    }
    ranks_case_fault(3, NULL, v_counts, NULL,
                     "all_to_allv: sender and receiver disagree on a count");
    ranks_case_fault(3, NULL, gatherv_counts, NULL, "gatherv: root expects another count");
    ranks_case_fault(3, NULL, another_group, NULL,
                     "one rank calls on another group, in threads: no hang");
    for (int n = 2; n <= 3; n++) {
        crossing_calls(n, "auto", ALL_REDUCE_IN_ANOTHER_GROUP, "group",
                       "one rank calls on another group");
#ifndef RANKS_MPI
        crossing_calls(n, "auto", BROADCASTS_IN_ANOTHER_GROUP, "group",
                       "one rank broadcasts on another group");
#endif
        crossing_calls(n, "auto", RECV_AGAINST_BARRIER, "operation",
                       "one rank receives, the others are in a barrier");
    }
    for (int t = 0; t < N_PLACEMENTS; t++) {
        crossing_calls(6, transport_names[t], RECV_AGAINST_BARRIER, "operation",
                       "one rank receives, the others are in a barrier");
        crossing_calls(6, transport_names[t], RECV_AGAINST_ALL_REDUCE, "operation",
                       "one rank receives, the others are in an all_reduce");
    }
    crossing_calls(2, "auto", RECV_AGAINST_RECV, "deadlock", "both ranks receive from each other");
    crossing_calls(3, "blocks", RECV_AGAINST_BARRIER, "operation",
                   "one rank receives, the others are in a barrier");
    timed_out_before();
    for (int t = 0; t < N_TRANSPORTS; t++) {
        failed_before(transport_names[t], true);
        failed_before(transport_names[t], false);
    }
    for (int t = 0; t < N_PLACEMENTS; t++) close_against_barrier(transport_names[t]);
#ifndef RANKS_MPI
    new_group_lists();
#endif
#ifdef RANKS_GET_AHEAD
    int entered = 0;
    ranks_case_fault(2, NULL, found_while_ahead, &entered,
                     "the call that finds a mismatch in an earlier one fails");
#endif
    ranks_case_fault(4, NULL, only_the_group, NULL,
                     "a mismatch in a group leaves the world usable");
    return tap_done();
}
