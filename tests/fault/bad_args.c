// bad_args: every misuse returns IDIST_ERR_ARG or IDIST_ERR_STATE with an error text, on the
// calling rank only, and the world stays usable
#include "idist.h"

#include "grid.h"

static void bad_at(int line, const char *call, int rank, idist_status got) {
    if (got != IDIST_ERR_ARG && got != IDIST_ERR_STATE)
        rank_fail(
            "%s:%d: rank %d: %s: got %s expected IDIST_ERR_ARG or IDIST_ERR_STATE; last error: %s",
            __FILE__, line, rank, call, idist_status_name(got), idist_last_error());
    else if (!idist_last_error()[0])
        rank_fail("%s:%d: rank %d: %s: no text", __FILE__, line, rank, call);
}
#define bad(rank, call) bad_at(__LINE__, #call, (rank), (call))

static const idist_dtype no_dtype[3] = {IDIST_DTYPE_COUNT, (idist_dtype)-1, (idist_dtype)999};
static const idist_op no_op[5] = {(idist_op)10, (idist_op)15, (idist_op)16, (idist_op)240,
                                  (idist_op)-1};

static void null_buffers(int r, const idist_opts *o) {
    float x[64] = {0};
    bad(r, idist_all_reduce(NULL, x, 1, IDIST_F32, IDIST_SUM, o));
    bad(r, idist_all_reduce(x, NULL, 1, IDIST_F32, IDIST_SUM, o));
    bad(r, idist_reduce(NULL, x, 1, IDIST_F32, IDIST_SUM, 0, o));
    bad(r, idist_broadcast(NULL, 1, IDIST_F32, 0, o));
    bad(r, idist_all_gather(NULL, x, 1, IDIST_F32, o));
    bad(r, idist_all_gather(x, NULL, 1, IDIST_F32, o));
    bad(r, idist_gather(NULL, x, 1, IDIST_F32, 0, o));
    bad(r, idist_scatter(x, NULL, 1, IDIST_F32, 0, o));
    bad(r, idist_reduce_scatter(NULL, x, 1, IDIST_F32, IDIST_SUM, o));
    bad(r, idist_reduce_scatter(x, NULL, 1, IDIST_F32, IDIST_SUM, o));
    bad(r, idist_all_to_all(NULL, x, 1, IDIST_F32, o));
    bad(r, idist_all_to_all(x, NULL, 1, IDIST_F32, o));
    bad(r, idist_scan(NULL, x, 1, IDIST_F32, IDIST_SUM, o));
    bad(r, idist_scan(x, NULL, 1, IDIST_F32, IDIST_SUM, o));
    bad(r, idist_exscan(NULL, x, 1, IDIST_F32, IDIST_SUM, o));
    bad(r, idist_send(NULL, 1, IDIST_F32, 0, 0, o));
    bad(r, idist_recv(NULL, 1, IDIST_F32, 0, 0, NULL, o));
    bad(r, idist_sendrecv(NULL, 1, 0, 0, x, 1, 0, 0, IDIST_F32, NULL, o));
    bad(r, idist_sendrecv(x, 1, 0, 0, NULL, 1, 0, 0, IDIST_F32, NULL, o));
}

// Passes NULL for buffers that only the root needs.
static void null_at_root(int rank, const idist_opts *o) {
    float x[64] = {0};
    bad(rank, idist_reduce(x, NULL, 1, IDIST_F32, IDIST_SUM, rank, o));
    bad(rank, idist_gather(x, NULL, 1, IDIST_F32, rank, o));
    bad(rank, idist_scatter(NULL, x, 1, IDIST_F32, rank, o));
}

static void bad_dtypes(int r, const idist_opts *o) {
    float x[64] = {0}, y[64] = {0};
    size_t counts[RANKS_MAX] = {1, 1, 1};
    for (int i = 0; i < 3; i++) {
        idist_dtype d = no_dtype[i];
        bad(r, idist_all_reduce(x, y, 1, d, IDIST_SUM, o));
        bad(r, idist_reduce(x, y, 1, d, IDIST_SUM, 0, o));
        bad(r, idist_broadcast(x, 1, d, 0, o));
        bad(r, idist_all_gather(x, y, 1, d, o));
        bad(r, idist_gather(x, y, 1, d, 0, o));
        bad(r, idist_scatter(x, y, 1, d, 0, o));
        bad(r, idist_reduce_scatter(x, y, 1, d, IDIST_SUM, o));
        bad(r, idist_all_to_all(x, y, 1, d, o));
        bad(r, idist_scan(x, y, 1, d, IDIST_SUM, o));
        bad(r, idist_exscan(x, y, 1, d, IDIST_SUM, o));
        bad(r, idist_all_gatherv(x, 1, y, counts, NULL, d, o));
        bad(r, idist_gatherv(x, 1, y, counts, NULL, d, 0, o));
        bad(r, idist_scatterv(x, counts, NULL, y, 1, d, 0, o));
        bad(r, idist_all_to_allv(x, counts, NULL, y, counts, NULL, d, o));
        bad(r, idist_send(x, 1, d, 0, 0, o));
        bad(r, idist_recv(x, 1, d, 0, 0, NULL, o));
        bad(r, idist_sendrecv(x, 1, 0, 0, y, 1, 0, 0, d, NULL, o));
        bad(r, idist_reduce_local(x, y, 1, d, IDIST_SUM));
    }
}

static void bad_ops(int r, const idist_opts *o) {
    float x[64] = {0}, y[64] = {0};
    idist_op op = IDIST_SUM;
    for (int i = 0; i < 5; i++) {
        bad(r, idist_all_reduce(x, y, 1, IDIST_F32, no_op[i], o));
        bad(r, idist_reduce(x, y, 1, IDIST_F32, no_op[i], 0, o));
        bad(r, idist_reduce_scatter(x, y, 1, IDIST_F32, no_op[i], o));
        bad(r, idist_scan(x, y, 1, IDIST_F32, no_op[i], o));
        bad(r, idist_exscan(x, y, 1, IDIST_F32, no_op[i], o));
        bad(r, idist_reduce_local(x, y, 1, IDIST_F32, no_op[i]));
        bad(r, idist_op_free(no_op[i], o->group));
    }
    bad(r, idist_all_reduce(x, y, 1, IDIST_F32, IDIST_BAND, o));
    bad(r, idist_all_reduce(x, y, 1, IDIST_F16, IDIST_LOR, o));
    bad(r, idist_all_reduce(x, y, 1, IDIST_F8E4M3, IDIST_BXOR, o));
    bad(r, idist_all_reduce(x, y, 1, IDIST_F8E5M2, IDIST_LAND, o));
    bad(r, idist_scan(x, y, 1, IDIST_F32, IDIST_AVG, o));
    bad(r, idist_exscan(x, y, 1, IDIST_F32, IDIST_AVG, o));
    bad(r, idist_reduce_local(x, y, 1, IDIST_F32, IDIST_AVG));
    bad(r, idist_reduce_local(NULL, y, 1, IDIST_F32, IDIST_SUM));
    bad(r, idist_reduce_local(x, NULL, 1, IDIST_F32, IDIST_SUM));
    bad(r, idist_op_create(NULL, NULL, true, o->group, &op));
    bad(r, idist_op_create_premul_sum(1.0, o->group, NULL));
    bad(r, idist_op_free(IDIST_SUM, o->group));
}

static void bad_ranks(int r, int n, const idist_opts *o) {
    float x[64] = {0}, y[64] = {0};
    const int wrong[4] = {-1, n, 1000000, -2147483647 - 1};
    size_t nbytes = 4, counts[RANKS_MAX] = {1, 1, 1};
    for (int i = 0; i < 4; i++) {
        int k = wrong[i];
        bad(r, idist_reduce(x, y, 1, IDIST_F32, IDIST_SUM, k, o));
        bad(r, idist_broadcast(x, 1, IDIST_F32, k, o));
        bad(r, idist_gather(x, y, 1, IDIST_F32, k, o));
        bad(r, idist_scatter(x, y, 1, IDIST_F32, k, o));
        bad(r, idist_gatherv(x, 1, y, counts, NULL, IDIST_F32, k, o));
        bad(r, idist_scatterv(x, counts, NULL, y, 1, IDIST_F32, k, o));
        bad(r, idist_broadcast_bytes(x, 8, &nbytes, k, o));
        bad(r, idist_send(x, 1, IDIST_F32, k, 0, o));
        if (k != IDIST_ANY_SOURCE) bad(r, idist_recv(x, 1, IDIST_F32, k, 0, NULL, o));
        bad(r, idist_sendrecv(x, 1, k, 0, y, 1, 0, 0, IDIST_F32, NULL, o));
    }
    bad(r, idist_send(x, 1, IDIST_F32, 0, -1, o)); // a negative tag
    bad(r, idist_send(x, 1, IDIST_F32, 0, -7, o));
    bad(r, idist_recv(x, 1, IDIST_F32, 0, -2, NULL, o));
}

static void overlaps(int r, int n, const idist_opts *o) {
    float x[256] = {0};
    bad(r, idist_all_reduce(x, x + 3, 10, IDIST_F32, IDIST_SUM, o));
    bad(r, idist_all_reduce(x + 3, x, 10, IDIST_F32, IDIST_SUM, o));
    bad(r, idist_all_reduce(x, (char *)x + 1, 10, IDIST_F32, IDIST_SUM, o));
    bad(r, idist_scan(x, x + 9, 10, IDIST_F32, IDIST_SUM, o));
    bad(r, idist_exscan(x + 9, x, 10, IDIST_F32, IDIST_SUM, o));
    // The buffers overlap, but not at the rank's own block.
    bad(r, idist_all_gather(x + 10 * r + 1, x, 10, IDIST_F32, o));
    bad(r, idist_reduce_scatter(x, x + 10 * r + 1, 10, IDIST_F32, IDIST_SUM, o));
    bad(r, idist_all_to_all(x, x + 1, 10, IDIST_F32, o));
    bad(r, idist_gather(x + 10 * r + 1, x, 10, IDIST_F32, r, o));
    bad(r, idist_scatter(x, x + 10 * r + 1, 10, IDIST_F32, r, o));
    bad(r, idist_reduce(x, x + 1, 10, IDIST_F32, IDIST_SUM, r, o));
    bad(r, idist_sendrecv(x, 10, r, 0, x + 5, 10, r, 0, IDIST_F32, NULL, o));
    bad(r, idist_sendrecv(x, 10, r, 0, x, 10, r, 0, IDIST_F32, NULL, o));
    (void)n;
}

static void too_much(int r, const idist_opts *o) {
    double x[4] = {0};
    const size_t huge = SIZE_MAX / 4; // times 8 bytes overflows
    bad(r, idist_all_reduce(x, x, huge, IDIST_F64, IDIST_SUM, o));
    bad(r, idist_broadcast(x, huge, IDIST_F64, 0, o));
    bad(r, idist_all_gather(x, x, huge, IDIST_F64, o));
    bad(r, idist_send(x, huge, IDIST_F64, 0, 0, o));
    bad(r, idist_recv(x, huge, IDIST_F64, 0, 0, NULL, o));
    bad(r, idist_all_to_all(x, x, SIZE_MAX, IDIST_U16, o));
}

static void v_forms(int r, int n, const idist_opts *o) {
    float x[64] = {0}, y[64] = {0};
    size_t counts[RANKS_MAX], huge[RANKS_MAX];
    for (int k = 0; k < RANKS_MAX; k++) {
        counts[k] = 2;
        huge[k] = SIZE_MAX / 2;
    }
    bad(r, idist_all_gatherv(x, 2, y, NULL, NULL, IDIST_F32, o));
    bad(r, idist_all_gatherv(x, 3, y, counts, NULL, IDIST_F32, o)); // sendcount != recvcounts[r]
    bad(r, idist_all_gatherv(NULL, 2, y, counts, NULL, IDIST_F32, o));
    bad(r, idist_all_gatherv(x, 2, NULL, counts, NULL, IDIST_F32, o));
    bad(r, idist_all_gatherv(x, SIZE_MAX / 2, y, huge, NULL, IDIST_F32, o));
    bad(r, idist_gatherv(x, 2, y, NULL, NULL, IDIST_F32, r, o));
    bad(r, idist_gatherv(x, 3, y, counts, NULL, IDIST_F32, r, o));
    bad(r, idist_gatherv(x, 2, NULL, counts, NULL, IDIST_F32, r, o));
    bad(r, idist_scatterv(x, NULL, NULL, y, 2, IDIST_F32, r, o));
    bad(r, idist_scatterv(x, counts, NULL, y, 3, IDIST_F32, r, o));
    bad(r, idist_scatterv(NULL, counts, NULL, y, 2, IDIST_F32, r, o));
    bad(r, idist_all_to_allv(x, NULL, NULL, y, counts, NULL, IDIST_F32, o));
    bad(r, idist_all_to_allv(x, counts, NULL, y, NULL, NULL, IDIST_F32, o));
    bad(r, idist_all_to_allv(NULL, counts, NULL, y, counts, NULL, IDIST_F32, o));
    bad(r, idist_all_to_allv(x, counts, NULL, x + 1, counts, NULL, IDIST_F32, o)); // overlap
    bad(r, idist_all_to_allv(x, counts, NULL, x, NULL, NULL, IDIST_F32, o));
    bad(r, idist_reduce_scatterv(x, y, NULL, IDIST_F32, IDIST_SUM, o));
    bad(r, idist_reduce_scatterv(NULL, y, counts, IDIST_F32, IDIST_SUM, o));
    bad(r, idist_reduce_scatterv(x, NULL, counts, IDIST_F32, IDIST_SUM, o));
    bad(r, idist_reduce_scatterv(x, y, huge, IDIST_F32, IDIST_SUM, o));
    bad(r, idist_reduce_scatterv(x, y, counts, IDIST_F32, IDIST_BXOR, o));
    bad(r, idist_reduce_scatterv(x, x + 2 * r + 1, counts, IDIST_F32, IDIST_SUM, o)); // overlap
    size_t own[RANKS_MAX];
    memcpy(own, counts, sizeof own);
    own[r]++; // the rank receives more from itself than it sends to itself
    bad(r, idist_all_to_allv(x, counts, NULL, y, own, NULL, IDIST_F32, o));
    counts[r]++;
    bad(r, idist_all_to_allv(x, counts, NULL, y, huge, NULL, IDIST_F32, o));
    (void)n;
}

static void bytes(int r, const idist_opts *o) {
    idist_request request = {NULL};
    idist_opts a = *o;
    char x[64] = "", y[64] = "";
    size_t nbytes = 5, sizes[RANKS_MAX];
    a.request = &request;
    bad(r, idist_broadcast_bytes(x, 64, NULL, 0, o));
    bad(r, idist_broadcast_bytes(NULL, 64, &nbytes, 0, o));
    bad(r, idist_broadcast_bytes(x, 64, &nbytes, 0, &a)); // the call is blocking only
    bad(r, idist_all_gather_bytes(NULL, 5, y, 64, sizes, o));
    bad(r, idist_all_gather_bytes(x, 5, NULL, 64, sizes, o));
    bad(r, idist_all_gather_bytes(x, 5, y, 64, NULL, o));
    bad(r, idist_all_gather_bytes(x, 5, y, 64, sizes, &a));
    bad(r, idist_sendrecv(x, 1, r, 0, y, 1, r, 0, IDIST_U8, NULL, &a));
    nbytes = 65;
    bad(r, idist_broadcast_bytes(x, 64, &nbytes, r, o)); // the root's size exceeds its buffer
    rank_check(request.impl == NULL, "rank %d: a refused call leaves no request", r);
}

static void requests(int r, const idist_opts *o) {
    idist_request one = {NULL}, pair[2] = {{NULL}, {NULL}};
    idist_opts a = *o;
    int x = 0, stream = 0;
    size_t index;
    bool done;
    bad(r, idist_wait(NULL));
    bad(r, idist_test(NULL, &done));
    bad(r, idist_test(&one, NULL));
    bad(r, idist_wait_all(NULL, 2));
    bad(r, idist_wait_any(NULL, 2, &index));
    bad(r, idist_wait_any(pair, 2, NULL));
    a.request = &one;
    rank_ok(r, idist_recv(&x, 1, IDIST_I32, r, 77, NULL, &a));
    rank_ok(r, idist_send(&r, 1, IDIST_I32, r, 77, o));
    rank_ok(r, idist_wait(&one));
    a = *o;
    a.stream = &stream; // host buffers have no stream
    idist_status status = idist_all_reduce(&x, &x, 1, IDIST_I32, IDIST_SUM, &a);
    rank_check(status == IDIST_ERR_ARG || status == IDIST_ERR_UNSUPPORTED, "a stream: got %s",
               idist_status_name(status));
    bad(r, idist_group_end());
}

// Checks requests of calls that fail. The failing call must reset the request, whatever it
// contained, so that the program may wait for all requests.
static void refused_requests(int r, const idist_opts *o) {
    idist_request q[9];
    idist_message message;
    idist_opts a = *o;
    idist_plan *plan = NULL;
    int x = 0, i = 0;
    memset(q, 0x5a, sizeof q);
    memset(&message, 0, sizeof message);
    a.request = &q[i++];
    bad(r, idist_all_reduce(NULL, &x, 1, IDIST_I32, IDIST_SUM, &a));
    a.request = &q[i++];
    bad(r, idist_send(&x, 1, IDIST_I32, -1, 0, &a));
    a.request = &q[i++];
    bad(r, idist_probe(0, 0, NULL, &a));
    a.request = &q[i++];
    bad(r, idist_mprobe(0, 0, NULL, &a));
    a.request = &q[i++];
    bad(r, idist_mrecv(&x, 1, IDIST_I32, &message, &a));
    bad(r, idist_plan_start(NULL, &q[i++]));
    rank_ok(r, idist_plan_create(&plan));
    bad(r, idist_plan_start(plan, &q[i++]));
    a.request = &q[i++];
    a.plan = plan;
    bad(r, idist_barrier(&a));
    rank_ok(r, idist_plan_free(&plan));
    bad(r, idist_split_start(o->group, 0, 0, NULL, &q[i++]));
    for (int k = 0; k < i; k++) {
        rank_check(q[k].impl == NULL, "rank %d: refused call %d leaves a request", r, k);
        q[k].impl = NULL;
    }
    rank_ok(r, idist_wait_all(q, (size_t)i));
}

// Checks that idist_group_end returns the error of a call that failed early because of its
// arguments.
static void refused_in_group(int r, const idist_opts *o) {
    int x = 0;
    idist_message message;
    memset(&message, 0, sizeof message);
    rank_ok(r, idist_group_begin());
    bad(r, idist_probe(0, 0, NULL, o));
    rank_is(r, idist_group_end(), IDIST_ERR_ARG);
    rank_ok(r, idist_group_begin());
    bad(r, idist_mrecv(&x, 1, IDIST_I32, &message, o));
    rank_is(r, idist_group_end(), IDIST_ERR_ARG);
    rank_ok(r, idist_group_begin());
    bad(r, idist_plan_start(NULL, NULL));
    rank_is(r, idist_group_end(), IDIST_ERR_ARG);
}

static void groups(int r, idist_group *world, int n) {
    idist_group *g = NULL, *none = NULL;
    bad(r, idist_split(world, 0, 0, NULL));
    bad(r, idist_free_group(NULL));
    bad(r, idist_close(NULL));
    bad(r, idist_close(&none));
    rank_ok(r, idist_split(world, 0, r, &g));
    bad(r, idist_close(&g)); // g is not a world
    rank_check(g != NULL, "rank %d: a refused close leaves the pointer", r);
    idist_group *copy = world;
    bad(r, idist_free_group(&copy)); // the world does not come from new_group or split
    rank_ok(r, idist_free_group(&g));
    rank_check(g == NULL, "rank %d: free sets the pointer to NULL", r);
    bad(r, idist_free_group(&none));
    rank_check(idist_group_translate(world, 0, world) == 0 &&
                   idist_group_translate(world, n, world) == -1,
               "translate");
}

// Uses a copy of the pointer after the group is freed.
static void freed_group(idist_group *world, int r, int n, void *arg) {
    idist_group *g = NULL, *stale;
    int x = 0;
    (void)arg;
    rank_ok(r, idist_split(world, 0, r, &g));
    stale = g;
    rank_ok(r, idist_free_group(&g));
    idist_opts o = opts_of(stale), w = opts_of(world);
    bad(r, idist_barrier(&o));
    bad(r, idist_all_reduce(&x, &x, 1, IDIST_I32, IDIST_SUM, &o));
    bad(r, idist_send(&x, 1, IDIST_I32, 0, 0, &o));
    bad(r, idist_recv(&x, 1, IDIST_I32, 0, 0, NULL, &o));
    bad(r, idist_split(stale, 0, 0, &g));
    bad(r, idist_abort(stale));
    bad(r, idist_free_group(&stale));
    rank_check(idist_group_rank(stale) == -1, "rank %d: rank in a freed group: got %d expected -1",
               r, idist_group_rank(stale));
    rank_ok(r, idist_barrier(&w));
    (void)n;
}

// Runs a case in a separate process. A library that trusts the stale pointer crashes, and the
// results of the other cases must not be lost in such a crash.
static void in_child(int n) {
    int wait_status = 0;
    tap_running("a freed group in a world of %d", n);
    ranks_reset();
    pid_t pid = fork();
    TAP_REQUIRE(pid >= 0);
    if (pid == 0) {
        alarm((unsigned)(30 * test_slow_factor()));
        ranks_threads(n, NULL, freed_group, NULL);
        _exit(0);
    }
    tap_register_child(pid);
    TAP_REQUIRE(waitpid(pid, &wait_status, 0) == pid);
    tap_forget_child(pid);
    rank_check(wait_status == 0, "wait status 0x%x (low bits: a signal)", (unsigned)wait_status);
    ranks_report("a freed group in a world of %d", n);
}

static void everything(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    int32_t x = 1, y = 0;
    (void)arg;
    null_buffers(rank, &o);
    null_at_root(rank, &o);
    bad_dtypes(rank, &o);
    bad_ops(rank, &o);
    bad_ranks(rank, n, &o);
    overlaps(rank, n, &o);
    too_much(rank, &o);
    v_forms(rank, n, &o);
    bytes(rank, &o);
    requests(rank, &o);
    refused_requests(rank, &o);
    refused_in_group(rank, &o);
    groups(rank, world, n);
    rank_ok(rank, idist_all_reduce(&x, &y, 1, IDIST_I32, IDIST_SUM, &o)); // nothing is broken
    rank_check(y == n, "rank %d: got %d expected %d", rank, y, n);
}

// Misuses the library on one rank only. The other ranks must not be affected.
static void one_rank_only(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    int32_t x = 1, y = 0;
    (void)arg;
    for (int i = 0; i < 20; i++) {
        if (rank == i % n) {
            bad(rank, idist_all_reduce(NULL, &y, 1, IDIST_I32, IDIST_SUM, &o));
            bad(rank, idist_broadcast(&x, 1, IDIST_I32, n, &o));
        }
        rank_ok(rank, idist_all_reduce(&x, &y, 1, IDIST_I32, IDIST_SUM, &o));
        rank_check(y == n, "rank %d: got %d expected %d", rank, y, n);
    }
}

//------------------------------------------------------------------------------
// the default world
//------------------------------------------------------------------------------

static int task(void *arg) {
    (void)arg;
    return 0;
}

static int nothing(int local_rank, void *arg) {
    (void)local_rank;
    (void)arg;
    return 0;
}

static void uninitialized(void) {
    float x[8] = {0}, y[8] = {0};
    size_t counts[1] = {1}, nbytes = 1;
    const int ranks[1] = {0};
    idist_group *g = NULL;
    bad(-1, idist_all_reduce(x, y, 1, IDIST_F32, IDIST_SUM, NULL));
    bad(-1, idist_reduce(x, y, 1, IDIST_F32, IDIST_SUM, 0, NULL));
    bad(-1, idist_broadcast(x, 1, IDIST_F32, 0, NULL));
    bad(-1, idist_barrier(NULL));
    bad(-1, idist_all_gather(x, y, 1, IDIST_F32, NULL));
    bad(-1, idist_gather(x, y, 1, IDIST_F32, 0, NULL));
    bad(-1, idist_scatter(x, y, 1, IDIST_F32, 0, NULL));
    bad(-1, idist_reduce_scatter(x, y, 1, IDIST_F32, IDIST_SUM, NULL));
    bad(-1, idist_all_to_all(x, y, 1, IDIST_F32, NULL));
    bad(-1, idist_scan(x, y, 1, IDIST_F32, IDIST_SUM, NULL));
    bad(-1, idist_exscan(x, y, 1, IDIST_F32, IDIST_SUM, NULL));
    bad(-1, idist_all_gatherv(x, 1, y, counts, NULL, IDIST_F32, NULL));
    bad(-1, idist_gatherv(x, 1, y, counts, NULL, IDIST_F32, 0, NULL));
    bad(-1, idist_scatterv(x, counts, NULL, y, 1, IDIST_F32, 0, NULL));
    bad(-1, idist_all_to_allv(x, counts, NULL, y, counts, NULL, IDIST_F32, NULL));
    bad(-1, idist_broadcast_bytes(x, 8, &nbytes, 0, NULL));
    bad(-1, idist_all_gather_bytes(x, 1, y, 8, counts, NULL));
    bad(-1, idist_send(x, 1, IDIST_F32, 0, 0, NULL));
    bad(-1, idist_recv(x, 1, IDIST_F32, 0, 0, NULL, NULL));
    bad(-1, idist_sendrecv(x, 1, 0, 0, y, 1, 0, 0, IDIST_F32, NULL, NULL));
    bad(-1, idist_new_group(ranks, 1, &g));
    bad(-1, idist_split(NULL, 0, 0, &g));
    bad(-1, idist_one_rank_first(task, NULL, 0, false, NULL));
    bad(-1, idist_one_rank_only(task, NULL, 0, true, NULL));
    bad(-1, idist_finalize());
    rank_check(g == NULL, "no group comes out of a failure");
}

static void names_and_sizes(void) {
    for (int i = 0; i < 3; i++) {
        rank_check(idist_dtype_size(no_dtype[i]) == 0, "size of a dtype that is none: %zu",
                   idist_dtype_size(no_dtype[i]));
        rank_check(idist_dtype_name(no_dtype[i]) != NULL, "name of a dtype that is none");
    }
    for (int i = 0; i < 5; i++)
        rank_check(idist_op_name(no_op[i]) != NULL, "name of an op that is none");
    rank_check(idist_status_name((idist_status)-99) && idist_status_string((idist_status)77),
               "names of no status");
    rank_check(strcmp(idist_status_name(IDIST_ERR_TIMEOUT), "IDIST_ERR_TIMEOUT") == 0, "got %s",
               idist_status_name(IDIST_ERR_TIMEOUT));
}

static void default_world(void) {
    const int twice[2] = {0, 0}, outside[2] = {0, 1}, negative[1] = {-1}, fine[1] = {0};
    idist_group *g = NULL;
    int32_t x = 5, y = 0;
    idist_request request = {NULL};
    idist_opts a = opts_async(NULL, &request);
    rank_ok(-1, idist_initialize(NULL));
    bad(-1, idist_initialize(NULL)); // initialized twice
    bad(-1, idist_new_group(NULL, 1, &g));
    bad(-1, idist_new_group(fine, 1, NULL));
    bad(-1, idist_new_group(fine, 0, &g));
    bad(-1, idist_new_group(fine, -1, &g));
    bad(-1, idist_new_group(twice, 2, &g));
    bad(-1, idist_new_group(outside, 2, &g));
    bad(-1, idist_new_group(negative, 1, &g));
    bad(-1, idist_one_rank_first(NULL, NULL, 0, false, NULL));
    bad(-1, idist_one_rank_first(task, NULL, 1, false, NULL));
    bad(-1, idist_one_rank_only(NULL, NULL, 0, false, NULL));
    bad(-1, idist_one_rank_only(task, NULL, -1, false, NULL));
    bad(-1, idist_parallel_run(NULL, NULL, NULL));
    rank_ok(-1, idist_recv(&y, 1, IDIST_I32, 0, 3, NULL, &a));
    bad(-1, idist_finalize()); // a request is open
    rank_check(idist_is_initialized(), "a refused finalize leaves the world");
    rank_ok(-1, idist_send(&x, 1, IDIST_I32, 0, 3, NULL));
    rank_ok(-1, idist_wait(&request));
    rank_ok(-1, idist_group_begin());
    bad(-1, idist_finalize()); // inside group_begin
    rank_ok(-1, idist_group_end());
    rank_check(y == 5, "got %d expected 5", y);
    rank_ok(-1, idist_finalize());
    bad(-1, idist_finalize());
}

static idist_desc world_desc(int rank, int world_size) {
    idist_desc d = desc_with(NULL, NULL);
    d.rank = rank;
    d.world_size = world_size;
    d.init_timeout_ms = 1000;
    return d;
}

static void *only_alloc(size_t nbytes, void *user) {
    (void)user;
    return malloc(nbytes);
}

static void bad_desc(void) {
    idist_group *w = NULL;
    idist_desc d = world_desc(2, 2);
    bad(-1, idist_open(&d, &w));
    d = world_desc(-1, 2);
    bad(-1, idist_open(&d, &w));
    d = world_desc(0, -1);
    bad(-1, idist_open(&d, &w));
    d = world_desc(0, 1);
    bad(-1, idist_open(&d, NULL));
    d.transport = "pigeon";
    bad(-1, idist_open(&d, &w));
    d = world_desc(0, 1);
    d.algorithm = "magic";
    bad(-1, idist_open(&d, &w));
    d = world_desc(0, 1);
    d.allocator.alloc_fn = only_alloc; // the caller must set both functions or neither
    bad(-1, idist_open(&d, &w));
    d = world_desc(0, 1);
    d.secret = "too short";
    d.secret_nbytes = 9;
    bad(-1, idist_open(&d, &w));
    d = world_desc(0, 2);
    d.init_method = "smoke://signals";
    bad(-1, idist_open(&d, &w));
    d.init_method = "tcp://127.0.0.1:99999";
    bad(-1, idist_open(&d, &w));
    d.init_method = "tcp://127.0.0.1";
    bad(-1, idist_open(&d, &w));
    d = world_desc(0, 1); // an init method is checked even if it is not used
    d.init_method = "smoke://signals";
    bad(-1, idist_open(&d, &w));
    d = desc_with(NULL, NULL); // neither the desc nor the environment gives the rank
    d.init_method = "tcp://127.0.0.1:1";
    bad(-1, idist_open(&d, &w));
    d.init_method = "file:///tmp/idist-none";
    bad(-1, idist_open(&d, &w));
    d = world_desc(0, 1);
    d.backend = "none-such";
    idist_status status = idist_open(&d, &w);
    rank_check(status == IDIST_ERR_NO_BACKEND && strstr(idist_last_error(), "none-such"),
               "got %s: %s", idist_status_name(status), idist_last_error());
    rank_check(w == NULL, "no world comes out of a failure");
    bad(-1, idist_spawn(NULL, NULL, 2, NULL));
    bad(-1, idist_spawn(nothing, NULL, -1, NULL));
}

static void parallel_run(void) {
    idist_desc d = desc_with(NULL, NULL);
    d.nproc_per_node = 2;
    d.nnodes = 2;
    bad(-1, idist_parallel_run(&d, nothing, NULL));
    rank_check(strstr(idist_last_error(), "master_addr and master_port"),
               "two nodes without a master: got \"%s\"", idist_last_error());
    d.master_addr = "127.0.0.1";
    d.master_port = 1;
    d.node_rank = 2;
    bad(-1, idist_parallel_run(&d, nothing, NULL));
    d = desc_with(NULL, NULL);
    d.nproc_per_node = -1;
    bad(-1, idist_parallel_run(&d, nothing, NULL));
}

// Checks that closing a world is refused while a request is open, even on a group of the world.
static void close_with_a_request(void) {
    idist_group *w = NULL, *g = NULL;
    idist_request r = {NULL};
    int32_t x = 1, y = 0;
    rank_ok(-1, idist_open(NULL, &w));
    rank_ok(-1, idist_split(w, 0, 0, &g));
    idist_opts a = opts_async(g, &r), o = opts_of(g);
    rank_ok(-1, idist_recv(&y, 1, IDIST_I32, 0, 0, NULL, &a));
    rank_is(-1, idist_close(&w), IDIST_ERR_STATE);
    rank_check(w != NULL, "a refused close leaves the world");
    if (!w) return;
    rank_ok(-1, idist_send(&x, 1, IDIST_I32, 0, 0, &o));
    rank_ok(-1, idist_wait(&r));
    rank_ok(-1, idist_close(&w));
}

static void stores(void) {
    static char long_key[1100];
    idist_store *s = NULL, *view = NULL;
    char value[8];
    const char *keys[1] = {"k"};
    size_t nbytes;
    int64_t sum;
    bool flag;
    memset(long_key, 'k', sizeof long_key - 1);
    bad(-1, idist_store_open(NULL, NULL, &s));
    bad(-1, idist_store_open("mem://", NULL, NULL));
    bad(-1, idist_store_open("smoke://signals", NULL, &s));
    bad(-1, idist_store_open("tcp://127.0.0.1:70000", NULL, &s));
    bad(-1, idist_store_close(NULL));
    bad(-1, idist_store_set(NULL, "k", "v", 1));
    rank_ok(-1, idist_store_open("mem://", NULL, &s));
    bad(-1, idist_store_set(s, NULL, "v", 1));
    bad(-1, idist_store_set(s, "", "v", 1));
    bad(-1, idist_store_set(s, long_key, "v", 1));
    bad(-1, idist_store_set(s, "k", NULL, 1));
    bad(-1, idist_store_set(s, "k", value, ((size_t)8 << 20) + 1));
    bad(-1, idist_store_get(s, "k", NULL, 8, &nbytes, 10));
    bad(-1, idist_store_get(s, NULL, value, 8, &nbytes, 10));
    bad(-1, idist_store_add(NULL, "k", 1, &sum));
    bad(-1, idist_store_wait(s, NULL, 1, 10));
    bad(-1, idist_store_check(s, keys, 1, NULL));
    bad(-1, idist_store_delete(NULL, "k", &flag));
    bad(-1, idist_store_num_keys(s, NULL));
    bad(-1, idist_store_prefix(NULL, "p", &view));
    bad(-1, idist_store_prefix(s, NULL, &view));
    bad(-1, idist_store_prefix(s, "p", NULL));
    rank_ok(-1, idist_store_set(s, "k", "v", 1));
    rank_ok(-1, idist_store_get(s, "k", value, sizeof value, &nbytes, 10));
    rank_check(nbytes == 1 && value[0] == 'v', "the store works on");
    rank_ok(-1, idist_store_close(&s));
}

static void in_main(void (*fn)(void), const char *name) {
    tap_running("%s", name);
    ranks_reset();
    fn();
    ranks_report("%s", name);
}

int main(void) {
    tap_deadline(60);
    (void)ranks__log();
    in_main(uninitialized, "calls before initialize");
    in_main(names_and_sizes, "names of what does not exist");
    in_main(default_world, "the default world of 1");
    in_main(bad_desc, "descriptions that make no sense");
    in_main(parallel_run, "idist_parallel_run of what makes no sense");
    in_main(close_with_a_request, "close with a request open on a group");
    in_main(stores, "stores");
    in_child(1);
    in_child(2);
    ranks_case(1, NULL, everything, NULL, "every misuse in a world of 1");
    ranks_case(2, NULL, everything, NULL, "every misuse in a world of 2");
    ranks_case(3, NULL, one_rank_only, NULL, "misuse on one rank is not noticed by the others");
    return tap_done();
}
