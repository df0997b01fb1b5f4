// reduce: the result arrives on the root only, and nothing is written on other ranks
#include "idist.h"

#include "grid.h"

static void check_case(grid_case *c) {
    size_t nbytes = c->count * idist_dtype_size(c->dtype);
    bool is_root = c->rank == c->root;
    bool no_recv = !is_root && c->salt % 2 == 0; // NULL is allowed on other ranks
    guarded_buffer send = guarded_buffer_make(nbytes, c->misalign),
                   recv = guarded_buffer_make(nbytes, c->misalign);
    bool in_place = c->in_place && is_root;
    guarded_buffer *out = in_place ? &send : &recv;
    reduced_fill(send.p, c->dtype, c->op, c->n, 0, c->count, c->rank, c->salt);
    void *dst = no_recv ? NULL : (void *)out->p;
    if (grid_done(c, idist_reduce(send.p, dst, c->count, c->dtype, c->op, c->root, &c->opts))) {
        if (is_root) {
            grid_check_reduced(c, out->p, 0, c->n, 0, c->count);
            grid_check_guards(c, out, "receive");
        } else {
            grid_check_untouched(c, &recv, "receive");
        }
        if (!in_place) grid_check_send_reduced(c, &send, 0, c->count);
    }
    guarded_buffer_free(&send);
    guarded_buffer_free(&recv);
}

static void half_rounds_once(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    (void)arg;
    for (int root = 0; root < n; root++) {
        uint16_t x, y = 0;
        store_double(&x, IDIST_F16, rank == 1 ? 2048.0 : 1.0);
        rank_ok(rank, idist_reduce(&x, &y, 1, IDIST_F16, IDIST_SUM, root, &o));
        if (rank == root)
            rank_check(f32_of_f16(y) == 2052.0f, "root %d: got %g expected 2052", root,
                       (double)f32_of_f16(y));
    }
}

// Makes 300 reduces in a row with changing roots. On a slow root, data of the next reduce must not
// end up in the current one.
static void many_in_a_row(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    (void)arg;
    for (int i = 0; i < 300; i++) {
        int root = i % n;
        int64_t x = (int64_t)i * 1000 + rank, y = -1,
                want = (int64_t)n * i * 1000 + n * (n - 1) / 2;
        rank_ok(rank, idist_reduce(&x, &y, 1, IDIST_I64, IDIST_SUM, root, &o));
        if (rank == root)
            rank_check(y == want, "reduce %d: got %lld expected %lld", i, (long long)y,
                       (long long)want);
    }
}

int main(void) {
    tap_deadline(60);
    grid_run("reduce", check_case, GRID_REDUCES | GRID_ROOTED);
    bool on_nccl = getenv("IDIST_TEST_NCCL") != NULL; // runs on device memory
    for (int a = 0; a < N_ALGORITHMS; a++) {
        idist_desc desc = desc_with("auto", algorithm_names[a]);
        if (on_nccl) tap_skip("half sums are rounded once", "NCCL rounds them at every step");
        if (!on_nccl)
            ranks_case(4, &desc, half_rounds_once, NULL, "F16 sum is rounded once, every root, %s",
                       algorithm_names[a]);
        ranks_case(5, &desc, many_in_a_row, NULL, "300 in a row with changing roots, %s",
                   algorithm_names[a]);
    }
    return tap_done();
}
