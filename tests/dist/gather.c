// gather: the root receives the n blocks in rank order; recv may be NULL on all other ranks
#include "idist.h"

#include "grid.h"

static void check_case(grid_case *c) {
    size_t esize = idist_dtype_size(c->dtype), block = c->count * esize;
    bool is_root = c->rank == c->root, in_place = c->in_place && is_root;
    bool no_recv = !is_root && c->salt % 2 == 0;
    guarded_buffer send = guarded_buffer_make(block, c->misalign),
                   recv = guarded_buffer_make(block * (size_t)c->n, c->misalign);
    unsigned char *own = recv.p + block * (size_t)c->rank;
    const void *from = in_place ? own : send.p;
    pattern_fill(in_place ? own : send.p, 0, c->count, esize, c->rank, c->salt);
    if (grid_done(c, idist_gather(from, no_recv ? NULL : recv.p, c->count, c->dtype, c->root,
                                  &c->opts))) {
        for (int k = 0; k < c->n && is_root; k++)
            grid_check_pattern(c, recv.p + block * (size_t)k, 0, c->count, k);
        if (!is_root) grid_check_untouched(c, &recv, "receive");
        grid_check_guards(c, &recv, "receive");
        if (!in_place) grid_check_send_pattern(c, &send, c->count);
    }
    guarded_buffer_free(&send);
    guarded_buffer_free(&recv);
}

int main(void) {
    tap_deadline(60);
    grid_run("gather", check_case, GRID_ROOTED | GRID_WIDE);
    return tap_done();
}
