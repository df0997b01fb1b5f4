// all_gather: every rank receives the blocks of all n ranks in rank order
#include "idist.h"

#include "grid.h"

static void check_case(grid_case *c) {
    size_t esize = idist_dtype_size(c->dtype), block = c->count * esize;
    guarded_buffer send = guarded_buffer_make(block, c->misalign),
                   recv = guarded_buffer_make(block * (size_t)c->n, c->misalign);
    unsigned char *own = recv.p + block * (size_t)c->rank;
    pattern_fill(c->in_place ? own : send.p, 0, c->count, esize, c->rank, c->salt);
    const void *from = c->in_place ? own : send.p;
    if (grid_done(c, idist_all_gather(from, recv.p, c->count, c->dtype, &c->opts))) {
        for (int k = 0; k < c->n; k++)
            grid_check_pattern(c, recv.p + block * (size_t)k, 0, c->count, k);
        grid_check_guards(c, &recv, "receive");
        if (!c->in_place) grid_check_send_pattern(c, &send, c->count);
    }
    guarded_buffer_free(&send);
    guarded_buffer_free(&recv);
}

int main(void) {
    tap_deadline(200);
    grid_run("all_gather", check_case, GRID_WIDE);
    return tap_done();
}
