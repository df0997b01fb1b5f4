// all_reduce: the grid, and properties that the grid cannot show. Sums of half floats are rounded
// once, all ranks get equal bits, and MIN and MAX return NaN if an operand is NaN.
#include "idist.h"

#include "grid.h"

static void check_case(grid_case *c) {
    size_t nbytes = c->count * idist_dtype_size(c->dtype);
    guarded_buffer send = guarded_buffer_make(nbytes, c->misalign),
                   recv = guarded_buffer_make(nbytes, c->misalign);
    guarded_buffer *out = c->in_place ? &send : &recv;
    reduced_fill(send.p, c->dtype, c->op, c->n, 0, c->count, c->rank, c->salt);
    if (grid_done(c, idist_all_reduce(send.p, out->p, c->count, c->dtype, c->op, &c->opts))) {
        grid_check_reduced(c, out->p, 0, c->n, 0, c->count);
        grid_check_guards(c, out, "receive");
        if (!c->in_place) grid_check_send_reduced(c, &send, 0, c->count);
    }
    guarded_buffer_free(&send);
    guarded_buffer_free(&recv);
}

static void no_buffers(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    (void)arg;
    rank_ok(rank, idist_all_reduce(NULL, NULL, 0, IDIST_F32, IDIST_SUM, &o));
    int32_t x = rank + 1;
    rank_ok(rank, idist_all_reduce(&x, &x, 1, IDIST_I32, IDIST_SUM, &o));
    rank_check(x == n * (n + 1) / 2, "rank %d: got %d expected %d", rank, x, n * (n + 1) / 2);
}

// Adds 1 from three ranks to 2^(fraction bits + 1) from the fourth. Rounding at every step would
// lose each 1. A float sum that is rounded once keeps all three. The sum is a tie, which rounds to
// even.
static void half_rounds_once(idist_group *world, int rank, int n, void *arg) {
    static const struct {
        idist_dtype dtype;
        double big, want;
    } types[] = {{IDIST_F16, 2048, 2052},
                 {IDIST_BF16, 256, 260},
                 {IDIST_F8E4M3, 16, 20},
                 {IDIST_F8E5M2, 8, 12}};
    size_t count = *(const size_t *)arg;
    idist_opts o = opts_of(world);
    unsigned char *x = (unsigned char *)malloc(count * 2), *y = (unsigned char *)malloc(count * 2);
    TAP_REQUIRE(x && y);
    for (int k = 0; k < 4; k++) {
        idist_dtype dtype = types[k].dtype;
        size_t size = idist_dtype_size(dtype);
        for (int owner = 0; owner < n; owner++) {
            for (size_t i = 0; i < count; i++)
                store_double(x + i * size, dtype, owner == rank ? types[k].big : 1.0);
            rank_ok(rank, idist_all_reduce(x, y, count, dtype, IDIST_SUM, &o));
            size_t wrong = 0;
            for (size_t i = 0; i < count; i++)
                wrong += load_double(y + i * size, dtype) != types[k].want;
            rank_check(
                wrong == 0,
                "rank %d: %s, large value on rank %d: %zu of %zu wrong, first got %g expected %g",
                rank, idist_dtype_name(dtype), owner, wrong, count, load_double(y, dtype),
                types[k].want);
        }
    }
    free(x);
    free(y);
}

// Fills buf with random floats. Their sum depends on the order of the additions, so equal results
// prove a fixed order.
static void fill_random(void *buf, idist_dtype dtype, size_t count, int rank) {
    unsigned char *p = (unsigned char *)buf;
    for (size_t i = 0; i < count; i++) {
        double u = (double)(pattern_bits(rank, i, 99) >> 11) / 9007199254740992.0; // in [0, 1)
        store_double(p + i * idist_dtype_size(dtype), dtype, (u - 0.5) * 64.0);
    }
}

static void check_close(const void *got, idist_dtype dtype, size_t count, int rank, int n) {
    static const double eps[N_NUMBERS] = {0, 0,    0,    0,      0,       0,      0,
                                          0, 1e-3, 8e-3, 1.2e-7, 2.3e-16, 0.0625, 0.125};
    const unsigned char *p = (const unsigned char *)got;
    for (size_t i = 0; i < count; i++) {
        double want = 0, scale = 0;
        for (int k = 0; k < n; k++) {
            unsigned char cell[8];
            double u = (double)(pattern_bits(k, i, 99) >> 11) / 9007199254740992.0;
            store_double(cell, dtype, (u - 0.5) * 64.0);
            want += load_double(cell, dtype);
            scale += 32.0;
        }
        double diff = load_double(p + i * idist_dtype_size(dtype), dtype) - want;
        if (diff < 0) diff = -diff;
        if (diff <= scale * eps[dtype] * n) continue;
        rank_fail("rank %d: %s element %zu: got %.17g expected %.17g", rank,
                  idist_dtype_name(dtype), i, want + diff, want);
        return;
    }
}

static void same_bits(idist_group *world, int rank, int n, void *arg) {
    static const idist_dtype dtypes[] = {IDIST_F32,  IDIST_F64,    IDIST_F16,
                                         IDIST_BF16, IDIST_F8E4M3, IDIST_F8E5M2};
    static const size_t counts[4] = {1, 5, 1003, 70001};
    idist_opts o = opts_of(world);
    (void)arg;
    for (int d = 0; d < 6; d++) {
        for (int c = 0; c < 4; c++) {
            size_t nbytes = counts[c] * idist_dtype_size(dtypes[d]);
            unsigned char *x = (unsigned char *)malloc(nbytes),
                          *y = (unsigned char *)malloc(nbytes);
            unsigned char *all = (unsigned char *)malloc(nbytes * (size_t)n),
                          *z = (unsigned char *)malloc(nbytes);
            TAP_REQUIRE(x && y && z && all);
            fill_random(x, dtypes[d], counts[c], rank);
            rank_ok(rank, idist_all_reduce(x, y, counts[c], dtypes[d], IDIST_SUM, &o));
            rank_ok(rank, idist_all_reduce(x, z, counts[c], dtypes[d], IDIST_SUM, &o));
            rank_ok(rank, idist_all_gather(y, all, nbytes, IDIST_U8, &o));
            for (int k = 0; k < n; k++)
                rank_check(memcmp(all + nbytes * (size_t)k, y, nbytes) == 0,
                           "%s x %zu: rank %d and rank %d got other bits",
                           idist_dtype_name(dtypes[d]), counts[c], rank, k);
            rank_check(memcmp(y, z, nbytes) == 0,
                       "%s x %zu: rank %d: the second run gave other bits",
                       idist_dtype_name(dtypes[d]), counts[c], rank);
            check_close(y, dtypes[d], counts[c], rank, n);
            free(x);
            free(y);
            free(z);
            free(all);
        }
    }
}

static void nan_wins(idist_group *world, int rank, int n, void *arg) {
    static const idist_op ops[2] = {IDIST_MIN, IDIST_MAX};
    idist_opts o = opts_of(world);
    (void)arg;
    for (int owner = 0; owner < n; owner++) {
        for (int k = 0; k < 2; k++) {
            float x[3] = {1.0f, (float)rank, 3.0f}, y[3];
            double u[3] = {1.0, (double)rank, 3.0}, v[3];
            if (rank == owner) x[1] = f32_of_bits(0x7FC00000);
            if (rank == owner) u[1] = (double)x[1];
            rank_ok(rank, idist_all_reduce(x, y, 3, IDIST_F32, ops[k], &o));
            rank_ok(rank, idist_all_reduce(u, v, 3, IDIST_F64, ops[k], &o));
            rank_check(y[1] != y[1] && v[1] != v[1],
                       "rank %d: %s with NaN on rank %d: got %g and %g expected NaN", rank,
                       idist_op_name(ops[k]), owner, (double)y[1], v[1]);
            rank_check(y[0] == 1.0f && y[2] == 3.0f, "rank %d: got %g %g expected 1 3", rank,
                       (double)y[0], (double)y[2]);
        }
    }
}

int main(void) {
    tap_deadline(200);
    grid_run("all_reduce", check_case, GRID_REDUCES);
    ranks_case(3, NULL, no_buffers, NULL, "count 0 with NULL buffers");
    bool on_nccl = getenv("IDIST_TEST_NCCL") != NULL; // runs on device memory
    int algorithm_count = on_nccl ? 1 : N_ALGORITHMS; // NCCL and XLA choose algorithms themselves
    for (int a = 0; a < algorithm_count; a++) {
        idist_desc desc = desc_with("auto", algorithm_names[a]);
        size_t few = 1, some = 37, many = 40000;
        if (on_nccl) tap_skip("half sums are rounded once", "NCCL rounds them at every step");
        if (!on_nccl)
            ranks_case(4, &desc, half_rounds_once, &few, "half sums are rounded once, count 1, %s",
                       algorithm_names[a]);
        if (!on_nccl)
            ranks_case(4, &desc, half_rounds_once, &some,
                       "half sums are rounded once, count 37, %s", algorithm_names[a]);
        if (!on_nccl)
            ranks_case(4, &desc, half_rounds_once, &many,
                       "half sums are rounded once, count 40000, %s", algorithm_names[a]);
        for (int n = 2; n <= 7; n += a == 0 ? 1 : 2)
            ranks_case(n, &desc, same_bits, NULL,
                       "n=%d %s: same bits on all ranks and in the second run", n,
                       algorithm_names[a]);
        if (on_nccl) tap_skip("MIN and MAX of a NaN are NaN", "NCCL does not say what they are");
        else
            ranks_case(3, &desc, nan_wins, NULL, "MIN and MAX of a NaN are NaN, %s",
                       algorithm_names[a]);
    }
    return tap_done();
}
