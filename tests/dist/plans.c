// plans: calls that are prepared once and made often. That each operation works from a plan is
// checked by its grid, in one case of eight.
#include "idist.h"

#include "ranks.h"

enum { ROUNDS = 50, COUNT = 3000 };

static idist_opts opts_plan(idist_group *world, idist_plan *plan) {
    idist_opts o = opts_of(world);
    o.plan = plan;
    return o;
}

// A reduction, and messages around a ring, with new values each time; every third time by a
// request, every fifth time by the plain call, which the plans of others meet.
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
    // A group that is freed, and another one in its place.
    rank_ok(rank, idist_split(world, 0, 0, &group));
    o.group = group;
    rank_ok(rank, idist_all_reduce(x, y, 2, IDIST_I32, IDIST_SUM, &o));
    rank_ok(rank, idist_plan_start(plan, NULL));
    rank_ok(rank, idist_free_group(&group));
    rank_is(rank, idist_plan_start(plan, NULL), IDIST_ERR_STATE);
    for (int key = 0; key < 2; key++) { // the same ranks, then in reverse
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

// An op that is freed after the plan was made.
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

// A plan of a world that was closed.
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

// A plan of the default world, which was closed; there is a new one.
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
    tap_deadline(60);
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
    return tap_done();
}
