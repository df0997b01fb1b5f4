// all_to_all: block r of rank k arrives as block k on rank r; in place too
#include "idist.h"

#include "grid.h"

static void one(grid_case *c) {
    size_t esize = idist_dtype_size(c->dtype), block = c->count * esize,
           total = c->count * (size_t)c->n;
    gbuf send = gbuf_make(total * esize, c->misalign), recv = gbuf_make(total * esize, c->misalign);
    gbuf *out = c->in_place ? &send : &recv;
    pat_fill(send.p, 0, total, esize, c->rank, c->salt);
    if (grid_done(c, idist_all_to_all(send.p, out->p, c->count, c->dtype, &c->opts))) {
        for (int k = 0; k < c->n; k++)
            grid_check_pat(c, out->p + block * (size_t)k, c->count * (size_t)c->rank, c->count, k);
        grid_check_guards(c, out, "receive");
        if (!c->in_place) grid_check_send_pat(c, &send, total);
    }
    gbuf_free(&send);
    gbuf_free(&recv);
}

int main(void) {
    tap_deadline(60);
    grid_run("all_to_all", one, GRID_WIDE);
    return tap_done();
}
