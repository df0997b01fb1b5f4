// scatter: block r of the root's buffer arrives on rank r; send may be NULL on other ranks
#include "idist.h"

#include "grid.h"

static void check_case(grid_case *c) {
    size_t esize = idist_dtype_size(c->dtype), block = c->count * esize,
           total = c->count * (size_t)c->n;
    bool is_root = c->rank == c->root, in_place = c->in_place && is_root;
    guarded_buffer send = guarded_buffer_make(is_root ? total * esize : 0, c->misalign),
                   recv = guarded_buffer_make(block, c->misalign);
    if (is_root) pattern_fill(send.p, 0, total, esize, c->root, c->salt);
    const void *from = is_root || c->salt % 2 ? (const void *)send.p : NULL;
    unsigned char *to = in_place ? send.p + block * (size_t)c->rank : recv.p;
    if (grid_done(c, idist_scatter(from, to, c->count, c->dtype, c->root, &c->opts))) {
        grid_check_pattern(c, to, c->count * (size_t)c->rank, c->count, c->root);
        grid_check_guards(c, &recv, "receive");
        if (is_root) grid_check_send_pattern(c, &send, total);
        if (in_place) grid_check_untouched(c, &recv, "unused");
    }
    guarded_buffer_free(&send);
    guarded_buffer_free(&recv);
}

int main(void) {
    tap_deadline(60);
    grid_run("scatter", check_case, GRID_ROOTED | GRID_WIDE);
    return tap_done();
}
