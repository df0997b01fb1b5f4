// broadcast: every root, every size; the root's buffer is not modified
#include "idist.h"

#include "grid.h"

static void check_case(grid_case *c) {
    guarded_buffer b = guarded_buffer_make(c->count * idist_dtype_size(c->dtype), c->misalign);
    if (c->rank == c->root)
        pattern_fill(b.p, 0, c->count, idist_dtype_size(c->dtype), c->root, c->salt);
    if (grid_done(c, idist_broadcast(b.p, c->count, c->dtype, c->root, &c->opts))) {
        grid_check_pattern(c, b.p, 0, c->count, c->root);
        grid_check_guards(c, &b, "broadcast");
    }
    guarded_buffer_free(&b);
}

// Runs 400 broadcasts in a row. The root may return before the other ranks enter the call. The
// root's next message must not overtake the previous one.
static void in_a_row(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    (void)arg;
    for (int i = 0; i < 400; i++) {
        int root = i < 200 ? 0 : i % n;
        uint64_t x[3] = {0, 0, 0};
        for (int j = 0; j < 3 && rank == root; j++)
            x[j] = pattern_bits(root, (size_t)j, (uint64_t)i);
        rank_ok(rank, idist_broadcast(x, (size_t)(i % 4), IDIST_U64, root, &o));
        for (int j = 0; j < i % 4; j++)
            rank_check(x[j] == pattern_bits(root, (size_t)j, (uint64_t)i),
                       "rank %d: broadcast %d element %d wrong", rank, i, j);
    }
}

int main(void) {
    tap_deadline(60);
    grid_run("broadcast", check_case, GRID_ROOTED | GRID_NO_IN_PLACE);
    ranks_case(5, NULL, in_a_row, NULL, "400 in a row");
    return tap_done();
}
