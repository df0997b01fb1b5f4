// reduce_scatter, reduce_scatterv: rank r gets block r of the reduction
#include "idist.h"

#include "grid.h"

// Checks one call in which rank r gets counts[r] elements. `v` selects reduce_scatterv, which takes
// the counts. In place, recv is this rank's block of send, and the library may use the other blocks
// as scratch memory. Therefore only the result and the guards are checked then.
static void check_blocks(grid_case *c, const size_t *counts, bool v) {
    size_t esize = idist_dtype_size(c->dtype), own = counts[c->rank], total = 0, at = 0;
    for (int k = 0; k < c->n; k++) {
        if (k == c->rank) at = total;
        total += counts[k];
    }
    guarded_buffer send = guarded_buffer_make(total * esize, c->misalign),
                   recv = guarded_buffer_make(own * esize, c->misalign);
    unsigned char *to = c->in_place ? send.p + at * esize : recv.p;
    reduced_fill(send.p, c->dtype, c->op, c->n, 0, total, c->rank, c->salt);
    idist_status status = v ? idist_reduce_scatterv(send.p, to, counts, c->dtype, c->op, &c->opts)
                            : idist_reduce_scatter(send.p, to, c->count, c->dtype, c->op, &c->opts);
    if (grid_done(c, status)) {
        grid_check_reduced(c, to, 0, c->n, at, own);
        grid_check_guards(c, &recv, "receive");
        grid_check_guards(c, &send, "send");
        if (!c->in_place) grid_check_send_reduced(c, &send, 0, total);
        if (c->in_place) grid_check_untouched(c, &recv, "unused");
    }
    guarded_buffer_free(&send);
    guarded_buffer_free(&recv);
}

static void check_case(grid_case *c) {
    size_t counts[RANKS_MAX];
    for (int k = 0; k < c->n; k++) counts[k] = c->count;
    check_blocks(c, counts, false);
}

// Checks blocks of different sizes, some of them empty.
static void check_case_v(grid_case *c) {
    size_t counts[RANKS_MAX];
    for (int k = 0; k < c->n; k++) {
        uint64_t h = tap_mix(c->salt * 31 + (uint64_t)k);
        counts[k] = h % 4 == 0 || !c->count ? 0 : (size_t)(h % (2 * c->count + 1));
    }
    check_blocks(c, counts, true);
}

static void half_rounds_once(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    uint16_t x[4], y = 0;
    (void)arg;
    for (int i = 0; i < n; i++) store_double(&x[i], IDIST_BF16, rank == (i + 1) % n ? 256.0 : 1.0);
    rank_ok(rank, idist_reduce_scatter(x, &y, 1, IDIST_BF16, IDIST_SUM, &o));
    rank_check(f32_of_bf16(y) == 260.0f, "rank %d: got %g expected 260", rank,
               (double)f32_of_bf16(y));
}

// Gives the whole result to one rank. Narrow floats and a premultiplied sum are reduced in scratch
// memory.
static void one_rank_gets_all(idist_group *world, int rank, int n, void *arg) {
    enum { COUNT = 400000 };
    idist_opts o = opts_of(world);
    size_t counts[RANKS_MAX] = {0};
    uint16_t *h = (uint16_t *)calloc(COUNT, sizeof *h), *got = (uint16_t *)calloc(COUNT, sizeof *h);
    float *x = (float *)calloc(COUNT, sizeof *x), *y = (float *)calloc(COUNT, sizeof *y);
    idist_op twice = IDIST_OP_COUNT;
    (void)arg;
    TAP_REQUIRE(h && got && x && y);
    counts[n - 1] = COUNT;
    for (int i = 0; i < COUNT; i++) {
        store_double(&h[i], IDIST_F16, i % 100);
        x[i] = (float)(i % 100);
    }
    rank_ok(rank, idist_op_create_premul_sum(2, world, &twice));
    rank_ok(rank, idist_reduce_scatterv(h, got, counts, IDIST_F16, IDIST_SUM, &o));
    rank_ok(rank, idist_reduce_scatterv(x, y, counts, IDIST_F32, twice, &o));
    rank_ok(rank, idist_reduce_scatterv(x, x, counts, IDIST_F32, twice, &o)); // in place
    for (int i = 0; i < COUNT && rank == n - 1; i++) {
        double want = n * (i % 100), a = load_double(&got[i], IDIST_F16), b = y[i], c = x[i];
        if (a >= want && a <= want && b >= 2 * want && b <= 2 * want && c >= b && c <= b) continue;
        rank_fail("element %d: got %g, %g, %g expected %g, twice that and again", i, a, b, c, want);
        break;
    }
    free(h);
    free(got);
    free(x);
    free(y);
}

int main(void) {
    tap_deadline(200);
    grid_run("reduce_scatter", check_case, GRID_REDUCES | GRID_WIDE);
    grid_run("reduce_scatterv", check_case_v, GRID_REDUCES | GRID_WIDE);
    for (int n = 2; n <= 3; n++)
        ranks_case(n, NULL, one_rank_gets_all, NULL, "reduce_scatterv: one rank gets all, n=%d", n);
    bool on_nccl = getenv("IDIST_TEST_NCCL") != NULL; // runs on device memory
    for (int a = 0; a < N_ALGORITHMS; a++) {
        idist_desc desc = desc_with("auto", algorithm_names[a]);
        if (on_nccl) tap_skip("half sums are rounded once", "NCCL rounds them at every step");
        if (!on_nccl)
            ranks_case(4, &desc, half_rounds_once, NULL, "BF16 sum is rounded once, %s",
                       algorithm_names[a]);
    }
    return tap_done();
}
