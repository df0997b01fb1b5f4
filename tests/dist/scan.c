// scan and exscan: rank r gets the reduction over ranks 0 .. r (scan) or 0 .. r - 1 (exscan)
#include "idist.h"

#include "grid.h"

static void inclusive(grid_case *c) {
    size_t nbytes = c->count * idist_dtype_size(c->dtype);
    guarded_buffer send = guarded_buffer_make(nbytes, c->misalign),
                   recv = guarded_buffer_make(nbytes, c->misalign);
    guarded_buffer *out = c->in_place ? &send : &recv;
    reduced_fill(send.p, c->dtype, c->op, c->n, 0, c->count, c->rank, c->salt);
    if (grid_done(c, idist_scan(send.p, out->p, c->count, c->dtype, c->op, &c->opts))) {
        grid_check_reduced(c, out->p, 0, c->rank + 1, 0, c->count);
        grid_check_guards(c, out, "receive");
        if (!c->in_place) grid_check_send_reduced(c, &send, 0, c->count);
    }
    guarded_buffer_free(&send);
    guarded_buffer_free(&recv);
}

static void exclusive(grid_case *c) {
    size_t nbytes = c->count * idist_dtype_size(c->dtype);
    guarded_buffer send = guarded_buffer_make(nbytes, c->misalign),
                   recv = guarded_buffer_make(nbytes, c->misalign);
    guarded_buffer *out = c->in_place ? &send : &recv;
    reduced_fill(send.p, c->dtype, c->op, c->n, 0, c->count, c->rank, c->salt);
    if (grid_done(c, idist_exscan(send.p, out->p, c->count, c->dtype, c->op, &c->opts))) {
        if (c->rank > 0) grid_check_reduced(c, out->p, 0, c->rank, 0, c->count);
        else grid_check_untouched(c, &recv, "receive");
        grid_check_guards(c, out, "receive");
        if (!c->in_place || c->rank == 0) grid_check_send_reduced(c, &send, 0, c->count);
    }
    guarded_buffer_free(&send);
    guarded_buffer_free(&recv);
}

static void refuses_avg(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    float x = 1.0f, y = 0.0f;
    (void)arg;
    (void)n;
    rank_is(rank, idist_scan(&x, &y, 1, IDIST_F32, IDIST_AVG, &o), IDIST_ERR_ARG);
    rank_is(rank, idist_exscan(&x, &y, 1, IDIST_F32, IDIST_AVG, &o), IDIST_ERR_ARG);
    rank_ok(rank, idist_scan(&x, &y, 1, IDIST_F32, IDIST_SUM, &o));
    rank_check(y == (float)(rank + 1), "rank %d: got %g expected %d", rank, (double)y, rank + 1);
}

// Checks that the running sum is passed from rank to rank as a float. Rank 3 must get the sum of
// 2048, 1, 1 and 1, rounded once.
static void half_rounds_once(idist_group *world, int rank, int n, void *arg) {
    static const float want[4] = {2048.0f, 2048.0f, 2050.0f, 2052.0f};
    idist_opts o = opts_of(world);
    uint16_t x, y = 0;
    (void)arg;
    (void)n;
    store_double(&x, IDIST_F16, rank == 0 ? 2048.0 : 1.0);
    rank_ok(rank, idist_scan(&x, &y, 1, IDIST_F16, IDIST_SUM, &o));
    rank_check(f32_of_f16(y) == want[rank], "rank %d: got %g expected %g", rank,
               (double)f32_of_f16(y), (double)want[rank]);
}

int main(void) {
    tap_deadline(200);
    grid_run("scan", inclusive, GRID_REDUCES | GRID_NO_AVG);
    grid_run("exscan", exclusive, GRID_REDUCES | GRID_NO_AVG);
    for (int a = 0; a < N_ALGORITHMS; a++) {
        idist_desc desc = desc_with("auto", algorithm_names[a]);
        ranks_case(4, &desc, half_rounds_once, NULL, "F16 prefix sums are rounded once, %s",
                   algorithm_names[a]);
    }
    ranks_case(1, NULL, refuses_avg, NULL, "AVG is refused, n=1");
    ranks_case(3, NULL, refuses_avg, NULL, "AVG is refused, n=3");
    return tap_done();
}
