// plans: calls that are prepared once and made often. In one case out of eight, the grid of each
// operation checks that the operation works from a plan.
#include "idist.h"

#include "ranks.h"

enum { ROUNDS = 50, COUNT = 3000 };

static idist_opts opts_plan(idist_group *world, idist_plan *plan) {
    idist_opts o = opts_of(world);
    o.plan = plan;
    return o;
}

// Starts a planned reduction and planned messages around a ring many times, with new values each
// time. Every third reduction uses a request. Every fifth is a plain call, which meets the plans of
// other ranks.
static void made_often(idist_group *world, int rank, int n, void *arg) {
    int right = (rank + 1) % n, left = (rank + n - 1) % n;
    idist_plan *sum = NULL, *send = NULL, *recv = NULL;
    idist_recv_info info = {-1, -1, 0, IDIST_I8};
    int32_t x[COUNT], y[COUNT], from_left[4], mine[4];
    size_t count = *(const size_t *)arg;
    rank_ok(rank, idist_plan_create(&sum));
    rank_ok(rank, idist_plan_create(&send));
    rank_ok(rank, idist_plan_create(&recv));
    memset(y, 0, sizeof y);
    idist_opts o = opts_plan(world, sum), plain = opts_of(world);
    rank_ok(rank, idist_all_reduce(x, y, count, IDIST_I32, IDIST_SUM, &o));
    rank_check(y[0] == 0, "rank %d: the call was made", rank);
    o.plan = send;
    rank_ok(rank, idist_send(mine, 4, IDIST_I32, right, 5, &o));
    o.plan = recv;
    rank_ok(rank, idist_recv(from_left, 4, IDIST_I32, left, IDIST_ANY_TAG, &info, &o));
    for (int i = 0; i < ROUNDS; i++) {
        idist_request r[2] = {{NULL}, {NULL}};
        for (size_t k = 0; k < count; k++) x[k] = rank + i + (int32_t)(k % 7);
        for (int k = 0; k < 4; k++) mine[k] = 100 * i + 10 * rank + k;
        if (i % 5 == rank % 5) {
            rank_ok(rank, idist_all_reduce(x, y, count, IDIST_I32, IDIST_SUM, &plain));
        } else {
            rank_ok(rank, idist_plan_start(sum, i % 3 ? NULL : &r[0]));
            rank_ok(rank, idist_wait(&r[0]));
        }
        for (size_t k = 0; k < count; k++) {
            int32_t want = n * (n - 1) / 2 + n * (i + (int32_t)(k % 7));
            if (y[k] == want) continue;
            rank_fail("rank %d round %d element %zu: got %d expected %d", rank, i, k, y[k], want);
            break;
        }
        if (i % 2) {
            rank_ok(rank, idist_plan_start(recv, &r[0]));
            rank_ok(rank, idist_plan_start(send, &r[1]));
            rank_ok(rank, idist_wait_all(r, 2));
        } else {
            rank_ok(rank, idist_group_begin());
            rank_ok(rank, idist_plan_start(send, NULL));
            rank_ok(rank, idist_plan_start(recv, NULL));
            rank_ok(rank, idist_group_end());
        }
        rank_check(from_left[3] == 100 * i + 10 * left + 3 && info.source == left &&
                       info.tag == 5 && info.count == 4,
                   "rank %d round %d: received %d", rank, i, from_left[3]);
    }
    rank_ok(rank, idist_plan_free(&sum));
    rank_ok(rank, idist_plan_free(&send));
    rank_ok(rank, idist_plan_free(&recv));
    rank_check(!sum, "rank %d: the plan is still there", rank);
}

static void misuse(idist_group *world, int rank, int n, void *arg) {
    idist_plan *plan = NULL;
    idist_group *group = NULL;
    idist_request r = {NULL};
    idist_opts o = opts_of(world);
    int32_t x[2] = {0}, y[2] = {0};
    size_t nbytes = 4;
    (void)arg;
    rank_is(rank, idist_plan_create(NULL), IDIST_ERR_ARG);
    rank_is(rank, idist_plan_start(NULL, NULL), IDIST_ERR_ARG);
    rank_is(rank, idist_plan_free(NULL), IDIST_ERR_ARG);
    rank_ok(rank, idist_plan_free(&plan));
    rank_ok(rank, idist_plan_create(&plan));
    rank_is(rank, idist_plan_start(plan, NULL), IDIST_ERR_STATE);
    rank_check(strstr(idist_last_error(), "empty") != NULL, "the text is: %s", idist_last_error());
    o.plan = plan;
    rank_is(rank, idist_all_reduce(x, NULL, 2, IDIST_I32, IDIST_SUM, &o), IDIST_ERR_ARG);
    rank_is(rank, idist_plan_start(plan, NULL), IDIST_ERR_STATE); // nothing was kept
    o.request = &r;
    rank_is(rank, idist_all_reduce(x, y, 2, IDIST_I32, IDIST_SUM, &o), IDIST_ERR_ARG);
    o.request = NULL;
    rank_is(rank, idist_broadcast_bytes(x, 8, &nbytes, 0, &o), IDIST_ERR_ARG);
    rank_is(rank, idist_sendrecv(x, 1, rank, 0, y, 1, rank, 0, IDIST_I32, NULL, &o), IDIST_ERR_ARG);
    // The group of the plan is freed, and another group takes its place.
    rank_ok(rank, idist_split(world, 0, 0, &group));
    o.group = group;
    rank_ok(rank, idist_all_reduce(x, y, 2, IDIST_I32, IDIST_SUM, &o));
    rank_ok(rank, idist_plan_start(plan, NULL));
    rank_ok(rank, idist_free_group(&group));
    rank_is(rank, idist_plan_start(plan, NULL), IDIST_ERR_STATE);
    for (int key = 0; key < 2; key++) { // ranks in the same order, then in reverse
        rank_ok(rank, idist_split(world, 0, key * (n - rank), &group));
        rank_is(rank, idist_plan_start(plan, NULL), IDIST_ERR_STATE);
        rank_ok(rank, idist_free_group(&group));
    }
    rank_ok(rank, idist_plan_free(&plan));
}

static void add(const void *in, void *inout, size_t count, idist_dtype dtype, void *arg) {
    const int32_t *a = (const int32_t *)in;
    int32_t *b = (int32_t *)inout;
    (void)dtype;
    (void)arg;
    for (size_t i = 0; i < count; i++) b[i] += a[i];
}

// Frees the op of a plan. The plan must then be refused.
static void freed_op(idist_group *world, int rank, int n, void *arg) {
    idist_plan *plan = NULL;
    idist_op op = IDIST_OP_COUNT;
    int32_t x = 1, y = 0;
    (void)arg;
    rank_ok(rank, idist_op_create(add, NULL, true, world, &op));
    rank_ok(rank, idist_plan_create(&plan));
    idist_opts o = opts_plan(world, plan), plain = opts_of(world);
    rank_ok(rank, idist_all_reduce(&x, &y, 1, IDIST_I32, op, &o));
    rank_ok(rank, idist_plan_start(plan, NULL));
    rank_check(y == n, "rank %d: got %d", rank, y);
    rank_ok(rank, idist_op_free(op, world));
    rank_is(rank, idist_plan_start(plan, NULL), IDIST_ERR_ARG);
    rank_ok(rank, idist_barrier(&plain));
    rank_ok(rank, idist_plan_free(&plan));
}

//------------------------------------------------------------------------------
// the order in which plans start
//------------------------------------------------------------------------------

// Ranks that get wrong data if the last rank swaps two plans: all ranks, root 0, or the last rank.
typedef enum reached { ALL_RANKS, ROOT_0, LAST_RANK } reached;

// A collective that a rank plans twice. Both plans look the same to the other ranks.
typedef struct twins {
    const char *name;
    size_t count;
    reached reached;
    bool asynchronous;
} twins;

static idist_status call_twin(const twins *twin, int32_t *x, int32_t *y, const size_t *counts,
                              const idist_opts *o) {
    const size_t n = twin->count;
    const char *name = twin->name;
    if (!strcmp(name, "all_reduce")) return idist_all_reduce(x, y, n, IDIST_I32, IDIST_SUM, o);
    if (!strcmp(name, "reduce_scatter"))
        return idist_reduce_scatter(x, y, n, IDIST_I32, IDIST_SUM, o);
    if (!strcmp(name, "all_gather")) return idist_all_gather(x, y, n, IDIST_I32, o);
    if (!strcmp(name, "all_to_all")) return idist_all_to_all(x, y, n, IDIST_I32, o);
    if (!strcmp(name, "all_to_allv"))
        return idist_all_to_allv(x, counts, NULL, y, counts, NULL, IDIST_I32, o);
    if (!strcmp(name, "all_gatherv")) return idist_all_gatherv(x, n, y, counts, NULL, IDIST_I32, o);
    if (!strcmp(name, "scan")) return idist_scan(x, y, n, IDIST_I32, IDIST_SUM, o);
    if (!strcmp(name, "reduce")) return idist_reduce(x, y, n, IDIST_I32, IDIST_SUM, 0, o);
    if (!strcmp(name, "gather")) return idist_gather(x, y, n, IDIST_I32, 0, o);
    if (!strcmp(name, "barrier")) return idist_barrier(o);
    return idist_broadcast(x, n, IDIST_I32, 0, o);
}

// Starts two plans of the same collective, on the last rank in reverse order. No rank that gets
// data of the wrong plan may complete a start. All ranks must learn of the mismatch.
static void twins_swapped(idist_group *world, int rank, int n, void *arg) {
    const twins *twin = (const twins *)arg;
    const size_t nbytes = twin->count * (size_t)n * sizeof(int32_t);
    bool swaps = rank == n - 1, named = false;
    bool must_fail = twin->reached == ALL_RANKS || (twin->reached == ROOT_0 ? rank == 0 : swaps);
    idist_plan *plan[2] = {NULL, NULL};
    idist_request r[2] = {{NULL}, {NULL}};
    int32_t *x[2], *y[2];
    size_t counts[RANKS_MAX];
    idist_status s[2] = {IDIST_OK, IDIST_OK}, later = IDIST_OK;
    for (int k = 0; k < n; k++) counts[k] = twin->count;
    for (int i = 0; i < 2; i++) {
        x[i] = (int32_t *)calloc(1, nbytes + 1);
        y[i] = (int32_t *)calloc(1, nbytes + 1);
        TAP_REQUIRE(x[i] && y[i]);
        rank_ok(rank, idist_plan_create(&plan[i]));
        idist_opts o = opts_plan(world, plan[i]);
        rank_ok(rank, call_twin(twin, x[i], y[i], counts, &o));
    }
    for (int i = 0; i < 2; i++) {
        s[i] = idist_plan_start(plan[i != swaps], twin->asynchronous ? &r[i] : NULL);
        if (s[i]) named |= strstr(idist_last_error(), "by plan") != NULL;
    }
    for (int i = 0; i < 2; i++) {
        idist_status waited = idist_wait(&r[i]);
        if (waited) named |= strstr(idist_last_error(), "by plan") != NULL;
        if (!s[i]) s[i] = waited;
    }
    idist_opts o = opts_of(world);
    for (int i = 0; i < 17 && later == IDIST_OK; i++) later = idist_barrier(&o);
    rank_check(later == IDIST_ERR_MISMATCH, "rank %d: got %s", rank, idist_status_name(later));
    rank_check(strstr(idist_last_error(), "by plan 1") && strstr(idist_last_error(), "by plan 2") &&
                   strstr(idist_last_error(), twin->name),
               "rank %d: %s", rank, idist_last_error());
    for (int i = 0; i < 2; i++) {
        rank_check(s[i] == IDIST_ERR_MISMATCH || (s[i] == IDIST_OK && !must_fail),
                   "rank %d: start %d: got %s", rank, i, idist_status_name(s[i]));
        if (s[i] == IDIST_ERR_MISMATCH) rank_check(named, "rank %d: the text names no plan", rank);
        rank_ok(rank, idist_plan_free(&plan[i]));
        free(x[i]);
        free(y[i]);
    }
}

// Starts the plans of a broadcast and a barrier, on the last rank in reverse order. MPI would allow
// any order. Here the broadcast of one rank meets the barrier of another, which must be a mismatch.
static void others_swapped(idist_group *world, int rank, int n, void *arg) {
    idist_plan *plan[2] = {NULL, NULL};
    idist_request r[2] = {{NULL}, {NULL}};
    int32_t x = 42 * !rank;
    idist_status s = IDIST_OK;
    (void)arg;
    for (int i = 0; i < 2; i++) rank_ok(rank, idist_plan_create(&plan[i]));
    idist_opts a = opts_plan(world, plan[0]), b = opts_plan(world, plan[1]), o = opts_of(world);
    rank_ok(rank, idist_broadcast(&x, 1, IDIST_I32, 0, &a));
    rank_ok(rank, idist_barrier(&b));
    for (int i = 0; i < 2 && s == IDIST_OK; i++)
        s = idist_plan_start(plan[i ^ (rank == n - 1)], &r[i]);
    for (int i = 0; i < 2; i++) {
        idist_status waited = idist_wait(&r[i]);
        if (s == IDIST_OK) s = waited;
    }
    rank_check(s == IDIST_ERR_MISMATCH && strstr(idist_last_error(), "called broadcast #") &&
                   strstr(idist_last_error(), "called barrier #") &&
                   strstr(idist_last_error(), "by plan 1"),
               "rank %d: got %s: %s", rank, idist_status_name(s), idist_last_error());
    rank_is(rank, idist_barrier(&o), IDIST_ERR_MISMATCH);
    for (int i = 0; i < 2; i++) rank_ok(rank, idist_plan_free(&plan[i]));
}

// Does everything that ranks may do differently. Ranks fill plans of different collectives in
// different orders, fill a plan again, have more plans than others, or use none.
static void filled_differently(idist_group *world, int rank, int n, void *arg) {
    enum { N = 3 };
    idist_plan *plan[N] = {NULL}, *own = NULL;
    idist_opts o = opts_of(world), p;
    int32_t x[N][8], y[N][8];
    (void)arg;
    for (int i = 0; i < N; i++) rank_ok(rank, idist_plan_create(&plan[i]));
    rank_ok(rank, idist_plan_create(&own));
    p = opts_plan(world, own);
    if (rank % 2) rank_ok(rank, idist_all_gather(x[0], y[0], 1, IDIST_I32, &p)); // never started
    for (int k = 0; k < N; k++) {
        int i = rank % 2 ? N - 1 - k : k; // plans of all_reduces with 1, 2 and 3 elements
        p.plan = plan[i];
        if (rank == 1) rank_ok(rank, idist_barrier(&p));
        for (int times = 0; times <= rank; times++) // fills the plan again with the same call
            rank_ok(rank, idist_all_reduce(x[i], y[i], (size_t)i + 1, IDIST_I32, IDIST_SUM, &p));
    }
    for (int turn = 0; turn < 20; turn++)
        for (int i = 0; i < N; i++) {
            for (int k = 0; k <= i; k++) x[i][k] = rank + turn + k;
            if (rank == turn % n)
                rank_ok(rank,
                        idist_all_reduce(x[i], y[i], (size_t)i + 1, IDIST_I32, IDIST_SUM, &o));
            else rank_ok(rank, idist_plan_start(plan[i], NULL));
            rank_check(y[i][i] == n * (n - 1) / 2 + n * (turn + i), "rank %d turn %d: got %d", rank,
                       turn, y[i][i]);
        }
    for (int i = 0; i < N; i++) rank_ok(rank, idist_plan_free(&plan[i]));
    rank_ok(rank, idist_plan_free(&own));
}

// Swaps two plans on the last rank while odd ranks make the calls without plans. The calls without
// plans must not hide the swap.
static void swapped_beside_plain_ones(idist_group *world, int rank, int n, void *arg) {
    idist_plan *plan[2] = {NULL, NULL};
    int32_t x[2] = {1, 100}, y[2] = {0};
    idist_opts o = opts_of(world);
    idist_status s = IDIST_OK;
    (void)arg;
    for (int i = 0; i < 2; i++) {
        rank_ok(rank, idist_plan_create(&plan[i]));
        idist_opts p = opts_plan(world, plan[i]);
        rank_ok(rank, idist_all_reduce(&x[i], &y[i], 1, IDIST_I32, IDIST_SUM, &p));
    }
    for (int i = 0; i < 2 && s == IDIST_OK; i++)
        s = rank % 2 ? idist_all_reduce(&x[i], &y[i], 1, IDIST_I32, IDIST_SUM, &o)
                     : idist_plan_start(plan[i ^ (rank == n - 1)], NULL);
    rank_check(s == IDIST_ERR_MISMATCH && strstr(idist_last_error(), "by plan 1") &&
                   strstr(idist_last_error(), "by plan 2"),
               "rank %d: got %s: %s", rank, idist_status_name(s), idist_last_error());
    for (int i = 0; i < 2; i++) rank_ok(rank, idist_plan_free(&plan[i]));
}

static void orders(void) {
    static const struct {
        const char *name;
        reached reached;
    } calls[] = {{"all_reduce", ALL_RANKS},  {"reduce_scatter", ALL_RANKS},
                 {"all_gather", ALL_RANKS},  {"all_to_all", ALL_RANKS},
                 {"all_to_allv", ALL_RANKS}, {"all_gatherv", ALL_RANKS},
                 {"barrier", ALL_RANKS},     {"broadcast", LAST_RANK},
                 {"reduce", ROOT_0},         {"gather", ROOT_0},
                 {"scan", LAST_RANK}};
    static const size_t counts[3] = {2, 3000, 200000};
    unsigned number = 0;
    for (int t = 0; t < N_PLACEMENTS; t++)
        for (size_t k = 0; k < sizeof calls / sizeof *calls; k++)
            for (int i = 0; i < 3; i++) {
                idist_desc d =
                    desc_with(transport_names[t], algorithm_names[++number % N_ALGORITHMS]);
                twins twin = {calls[k].name, counts[i], calls[k].reached, number % 3 == 0};
                int n = 2 + (int)number % 3;
                if (test_quick() && number % 2) continue;
                ranks_case_fault(n, &d, twins_swapped, &twin,
                                 "two plans of %s x %zu swapped n=%d, %s, %s, %s", twin.name,
                                 twin.count, n, d.transport, d.algorithm,
                                 twin.asynchronous ? "requests" : "blocking");
            }
    for (int t = 0; t < N_PLACEMENTS; t++) {
        idist_desc d = desc_with(transport_names[t], "auto");
        for (int n = 2; n <= 3; n++) {
            ranks_case_fault(n, &d, others_swapped, NULL,
                             "plans of other collectives swapped n=%d, %s", n, d.transport);
            ranks_case(n, &d, filled_differently, NULL, "what may differ n=%d, %s", n, d.transport);
        }
    }
    idist_desc d = desc_with("auto", "auto");
    ranks_case_fault(5, &d, swapped_beside_plain_ones, NULL, "swapped, other ranks without plans");
    ranks_case_fault(3, &d, swapped_beside_plain_ones, NULL, "swapped, another rank without plans");
}

static void mismatch(idist_group *world, int rank, int n, void *arg) {
    idist_plan *plan = NULL;
    int32_t x[2] = {0}, y[2] = {0};
    (void)n;
    (void)arg;
    rank_ok(rank, idist_plan_create(&plan));
    idist_opts o = opts_plan(world, plan);
    rank_ok(rank, idist_all_reduce(x, y, 2, IDIST_I32, rank ? IDIST_SUM : IDIST_MAX, &o));
    rank_is(rank, idist_plan_start(plan, NULL), IDIST_ERR_MISMATCH);
    rank_is(rank, idist_plan_start(plan, NULL), IDIST_ERR_MISMATCH);
    rank_ok(rank, idist_plan_free(&plan));
}

// Plans of a world that was closed, one for each rank, and their buffers.
static idist_plan *kept[RANKS_MAX];
static int32_t kept_x[RANKS_MAX], kept_y[RANKS_MAX];

static void outlives_its_world(idist_group *world, int rank, int n, void *arg) {
    (void)n;
    (void)arg;
    rank_ok(rank, idist_plan_create(&kept[rank]));
    idist_opts o = opts_plan(world, kept[rank]);
    rank_ok(rank, idist_all_reduce(&kept_x[rank], &kept_y[rank], 1, IDIST_I32, IDIST_SUM, &o));
    rank_ok(rank, idist_plan_start(kept[rank], NULL));
}

// Starts a plan of a default world that was closed while a new default world is open. The start
// must be refused.
static void outlives_the_default_world(void) {
    idist_plan *plan = NULL;
    idist_opts o;
    int32_t x = 1, y = 0;
    memset(&o, 0, sizeof o);
    tap_is(idist_plan_create(&plan), IDIST_OK, "a plan of the default world");
    o.plan = plan;
    for (int i = 0; i < 2; i++) {
        tap_is(idist_initialize(NULL), IDIST_OK, "world %d", i);
        if (i == 0) tap_is(idist_all_reduce(&x, &y, 1, IDIST_I32, IDIST_SUM, &o), IDIST_OK, "kept");
        tap_is(idist_plan_start(plan, NULL), i ? IDIST_ERR_STATE : IDIST_OK, "started in world %d",
               i);
        tap_is(idist_finalize(), IDIST_OK, "world %d ends", i);
    }
    (void)idist_plan_free(&plan);
}

int main(void) {
    static const size_t counts[3] = {2, 1000, COUNT};
    tap_deadline(200);
    for (int t = 0; t < N_TRANSPORTS; t++)
        for (int i = 0; i < 3; i++) {
            idist_desc d = desc_with(transport_names[t], "auto");
            size_t count = counts[i];
            ranks_case(i + 1, &d, made_often, &count, "made often n=%d count %zu, %s", i + 1, count,
                       d.transport);
        }
    ranks_case(2, NULL, misuse, NULL, "misuse");
    ranks_case(2, NULL, freed_op, NULL, "an op that was freed");
    ranks_case_fault(3, NULL, mismatch, NULL, "plans that differ");
    ranks_case(2, NULL, outlives_its_world, NULL, "made for a world that ends");
    for (int rank = 0; rank < 2; rank++) {
        if (kept[rank])
            tap_is(idist_plan_start(kept[rank], NULL), IDIST_ERR_STATE, "the world is gone: %s",
                   idist_last_error());
        (void)idist_plan_free(&kept[rank]);
    }
    outlives_the_default_world();
    orders();
    return tap_done();
}
