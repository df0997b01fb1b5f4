// all_to_all: block r of rank k arrives as block k on rank r, also in place
#include "idist.h"

#include "grid.h"

static void check_case(grid_case *c) {
    size_t esize = idist_dtype_size(c->dtype), block = c->count * esize,
           total = c->count * (size_t)c->n;
    guarded_buffer send = guarded_buffer_make(total * esize, c->misalign),
                   recv = guarded_buffer_make(total * esize, c->misalign);
    guarded_buffer *out = c->in_place ? &send : &recv;
    pattern_fill(send.p, 0, total, esize, c->rank, c->salt);
    if (grid_done(c, idist_all_to_all(send.p, out->p, c->count, c->dtype, &c->opts))) {
        for (int k = 0; k < c->n; k++)
            grid_check_pattern(c, out->p + block * (size_t)k, c->count * (size_t)c->rank, c->count,
                               k);
        grid_check_guards(c, out, "receive");
        if (!c->in_place) grid_check_send_pattern(c, &send, total);
    }
    guarded_buffer_free(&send);
    guarded_buffer_free(&recv);
}

int main(void) {
    tap_deadline(60);
    grid_run("all_to_all", check_case, GRID_WIDE);
    return tap_done();
}
