// all_gatherv, gatherv, scatterv, all_to_allv: counts that differ from rank to rank, gaps between
// blocks, and blocks in any order
#include "idist.h"

#include "grid.h"

// Positions of the blocks of all ranks in one large buffer, in elements.
typedef struct layout {
    size_t counts[RANKS_MAX];
    size_t displs[RANKS_MAX];
    size_t extent; // elements of the large buffer
} layout;

// Returns a layout of n blocks. Style 0 has no gaps, style 1 has gaps, and style 2 has gaps and the
// blocks in reverse order.
static layout make_layout(int n, size_t count, int style, uint64_t salt) {
    layout l;
    size_t at = style ? 3 : 0;
    memset(&l, 0, sizeof l);
    for (int i = 0; i < n; i++) {
        int k = style == 2 ? n - 1 - i : i;
        uint64_t h = tap_mix(salt * 31 + (uint64_t)k);
        l.counts[k] = h % 4 == 0 || count == 0 ? 0 : (size_t)(h % (2 * count + 1));
        l.displs[k] = at;
        at += l.counts[k] + (style ? (size_t)(h % 5) : 0);
    }
    l.extent = at;
    return l;
}

static int style_of(const grid_case *c) { return (int)(c->salt % 3); }

static const size_t *displs_of(const grid_case *c, const layout *l) {
    return style_of(c) == 0 ? NULL : l->displs;
}

// Checks that bytes of the large buffer that belong to no block are unchanged.
static void check_gaps(const grid_case *c, const guarded_buffer *b, const layout *l) {
    size_t esize = idist_dtype_size(c->dtype);
    for (size_t i = 0; i < l->extent; i++) {
        bool inside = false;
        for (int k = 0; k < c->n && !inside; k++)
            inside = i >= l->displs[k] && i < l->displs[k] + l->counts[k];
        for (size_t j = 0; j < esize && !inside; j++) {
            if (b->p[i * esize + j] == 0x5A) continue;
            grid_fail(c, "element %zu lies between the blocks and was written", i);
            return;
        }
    }
}

static void check_blocks(const grid_case *c, const guarded_buffer *b, const layout *l) {
    size_t esize = idist_dtype_size(c->dtype);
    for (int k = 0; k < c->n; k++)
        grid_check_pattern(c, b->p + l->displs[k] * esize, 0, l->counts[k], k);
    check_gaps(c, b, l);
    grid_check_guards(c, b, "receive");
}

static void all_gatherv(grid_case *c) {
    size_t esize = idist_dtype_size(c->dtype);
    layout l = make_layout(c->n, c->count, style_of(c), c->salt);
    size_t own = l.counts[c->rank];
    guarded_buffer send = guarded_buffer_make(own * esize, c->misalign),
                   recv = guarded_buffer_make(l.extent * esize, c->misalign);
    unsigned char *from = c->in_place ? recv.p + l.displs[c->rank] * esize : send.p;
    pattern_fill(from, 0, own, esize, c->rank, c->salt);
    if (grid_done(c, idist_all_gatherv(from, own, recv.p, l.counts, displs_of(c, &l), c->dtype,
                                       &c->opts))) {
        check_blocks(c, &recv, &l);
        if (!c->in_place) grid_check_send_pattern(c, &send, own);
    }
    guarded_buffer_free(&send);
    guarded_buffer_free(&recv);
}

static void gatherv(grid_case *c) {
    size_t esize = idist_dtype_size(c->dtype);
    bool is_root = c->rank == c->root, in_place = c->in_place && is_root;
    layout l = make_layout(c->n, c->count, style_of(c), c->salt);
    size_t own = l.counts[c->rank];
    guarded_buffer send = guarded_buffer_make(own * esize, c->misalign),
                   recv = guarded_buffer_make(is_root ? l.extent * esize : 0, c->misalign);
    unsigned char *from = in_place ? recv.p + l.displs[c->rank] * esize : send.p;
    const size_t *counts = is_root ? l.counts : NULL, *displs = is_root ? displs_of(c, &l) : NULL;
    pattern_fill(from, 0, own, esize, c->rank, c->salt);
    if (grid_done(c, idist_gatherv(from, own, is_root ? recv.p : NULL, counts, displs, c->dtype,
                                   c->root, &c->opts))) {
        if (is_root) check_blocks(c, &recv, &l);
        if (!in_place) grid_check_send_pattern(c, &send, own);
    }
    guarded_buffer_free(&send);
    guarded_buffer_free(&recv);
}

// Checks scatterv. Block k of the root holds elements 0 .. counts[k] - 1 of the pattern of rank k.
static void scatterv(grid_case *c) {
    size_t esize = idist_dtype_size(c->dtype);
    bool is_root = c->rank == c->root, in_place = c->in_place && is_root;
    layout l = make_layout(c->n, c->count, style_of(c), c->salt);
    size_t own = l.counts[c->rank];
    guarded_buffer send = guarded_buffer_make(is_root ? l.extent * esize : 0, c->misalign),
                   recv = guarded_buffer_make(own * esize, c->misalign);
    for (int k = 0; k < c->n && is_root; k++)
        pattern_fill(send.p + l.displs[k] * esize, 0, l.counts[k], esize, k, c->salt);
    unsigned char *to = in_place ? send.p + l.displs[c->rank] * esize : recv.p;
    const size_t *counts = is_root ? l.counts : NULL, *displs = is_root ? displs_of(c, &l) : NULL;
    if (grid_done(c, idist_scatterv(is_root ? send.p : NULL, counts, displs, to, own, c->dtype,
                                    c->root, &c->opts))) {
        grid_check_pattern(c, to, 0, own, c->rank);
        grid_check_guards(c, &recv, "receive");
        if (is_root) check_blocks(c, &send, &l); // must be unchanged
    }
    guarded_buffer_free(&send);
    guarded_buffer_free(&recv);
}

static size_t pair_count(const grid_case *c, int from, int to) {
    uint64_t h = tap_mix(c->salt + (uint64_t)(from * 97 + to * 7));
    return h % 4 == 0 || c->count == 0 ? 0 : (size_t)(h % (c->count + 1));
}

static layout pair_layout(const grid_case *c, bool sending) {
    layout l;
    int style = style_of(c);
    size_t at = style ? 2 : 0;
    memset(&l, 0, sizeof l);
    for (int i = 0; i < c->n; i++) {
        int k = style == 2 ? c->n - 1 - i : i;
        l.counts[k] = sending ? pair_count(c, c->rank, k) : pair_count(c, k, c->rank);
        l.displs[k] = at;
        at += l.counts[k] + (style ? 1 : 0);
    }
    l.extent = at;
    return l;
}

// Checks all_to_allv. Rank a sends to rank b the elements of its pattern from b * 100000 on. This
// exposes a block that is in the wrong place.
static void all_to_allv(grid_case *c) {
    size_t esize = idist_dtype_size(c->dtype);
    layout out = pair_layout(c, true), in = pair_layout(c, false);
    guarded_buffer send = guarded_buffer_make(out.extent * esize, c->misalign),
                   recv = guarded_buffer_make(in.extent * esize, c->misalign);
    for (int k = 0; k < c->n; k++)
        pattern_fill(send.p + out.displs[k] * esize, (size_t)k * 100000, out.counts[k], esize,
                     c->rank, c->salt);
    guarded_buffer copy = guarded_buffer_make(send.nbytes, 0);
    memcpy(copy.p, send.p, send.nbytes);
    if (grid_done(c, idist_all_to_allv(send.p, out.counts, displs_of(c, &out), recv.p, in.counts,
                                       displs_of(c, &in), c->dtype, &c->opts))) {
        for (int k = 0; k < c->n; k++)
            grid_check_pattern(c, recv.p + in.displs[k] * esize, (size_t)c->rank * 100000,
                               in.counts[k], k);
        check_gaps(c, &recv, &in);
        grid_check_guards(c, &recv, "receive");
        grid_check_guards(c, &send, "send");
        if (memcmp(copy.p, send.p, send.nbytes) != 0) grid_fail(c, "the send buffer was modified");
    }
    guarded_buffer_free(&copy);
    guarded_buffer_free(&send);
    guarded_buffer_free(&recv);
}

// Checks all_to_allv in place. Each block that two ranks exchange has the same place and count in
// both directions.
static void all_to_allv_in_place(grid_case *c) {
    size_t esize = idist_dtype_size(c->dtype), counts[RANKS_MAX];
    layout l = pair_layout(c, true);
    for (int k = 0; k < c->n; k++) {
        counts[k] = c->rank < k ? pair_count(c, c->rank, k) : pair_count(c, k, c->rank);
        l.counts[k] = counts[k];
    }
    l.extent = style_of(c) ? 2 : 0;
    for (int i = 0; i < c->n; i++) {
        int k = style_of(c) == 2 ? c->n - 1 - i : i;
        l.displs[k] = l.extent;
        l.extent += counts[k] + (style_of(c) ? 1 : 0);
    }
    guarded_buffer x = guarded_buffer_make(l.extent * esize, c->misalign);
    for (int k = 0; k < c->n; k++)
        pattern_fill(x.p + l.displs[k] * esize, (size_t)k * 100000, counts[k], esize, c->rank,
                     c->salt);
    if (grid_done(c, idist_all_to_allv(x.p, NULL, NULL, x.p, counts, displs_of(c, &l), c->dtype,
                                       &c->opts))) {
        for (int k = 0; k < c->n; k++)
            grid_check_pattern(c, x.p + l.displs[k] * esize, (size_t)c->rank * 100000, counts[k],
                               k);
        check_gaps(c, &x, &l);
        grid_check_guards(c, &x, "receive");
    }
    guarded_buffer_free(&x);
}

// Calls all_to_allv in place. Ranks with nothing to exchange pass NULL.
static void in_place_of_nothing(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    size_t counts[RANKS_MAX] = {0};
    int32_t x[2] = {10 * rank, 10 * rank + 1};
    (void)arg;
    if (rank < 2) counts[0] = counts[1] = 1;
    rank_ok(rank, idist_all_to_allv(rank < 2 ? x : NULL, NULL, NULL, rank < 2 ? x : NULL, counts,
                                    NULL, IDIST_I32, &o));
    if (rank < 2)
        rank_check(x[0] == rank && x[1] == 10 + rank, "rank %d: got %d %d of %d", rank, x[0], x[1],
                   n);
}

// Exchanges elements only between ranks 2k and 2k + 1. Each pair of ranks has its own dtype.
static void dtypes_of_pairs(idist_group *world, int rank, int n, void *arg) {
    static const idist_dtype dtypes[4] = {IDIST_F64, IDIST_U8, IDIST_F32_I64, IDIST_I16};
    static const size_t counts[3] = {1, 1000, 70001};
    const idist_dtype dtype = dtypes[rank / 2 % 4];
    idist_opts o = opts_of(world);
    size_t esize = idist_dtype_size(dtype);
    int peer = (rank ^ 1) < n ? rank ^ 1 : rank;
    (void)arg;
    for (int i = 0; i < 3; i++) {
        size_t each[RANKS_MAX] = {0};
        guarded_buffer s = guarded_buffer_make(counts[i] * esize, 0),
                       r = guarded_buffer_make(counts[i] * esize, 0);
        each[peer] = counts[i];
        pattern_fill(s.p, 0, counts[i], esize, rank, (uint64_t)i);
        rank_ok(rank, idist_all_to_allv(s.p, each, NULL, r.p, each, NULL, dtype, &o));
        rank_check(pattern_find_wrong(r.p, 0, counts[i], esize, peer, (uint64_t)i) == counts[i] &&
                       guarded_buffer_guards_hold(&r),
                   "rank %d: wrong data", rank);
        guarded_buffer_free(&s);
        guarded_buffer_free(&r);
    }
}

// Makes one pair of ranks disagree on the dtype. The two dtypes have the same size. All ranks must
// get IDIST_ERR_MISMATCH.
static void dtypes_that_differ(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    size_t sends[RANKS_MAX] = {0}, recvs[RANKS_MAX] = {0};
    float s[3] = {1, 2, 3}, r[3] = {0};
    (void)arg;
    if (rank == 0) sends[n - 1] = 3;
    if (rank == n - 1) recvs[0] = 3;
    idist_status status =
        idist_all_to_allv(s, sends, NULL, r, recvs, NULL, rank == 0 ? IDIST_F32 : IDIST_I32, &o);
    if (status == IDIST_OK) status = idist_barrier(&o);
    rank_check(status == IDIST_ERR_MISMATCH, "rank %d: got %s", rank, idist_status_name(status));
    rank_check(strstr(idist_last_error(), "dtype differs") &&
                   strstr(idist_last_error(), "sends 3 F32") &&
                   strstr(idist_last_error(), "expects 3 I32"),
               "the text is: %s", idist_last_error());
}

// Gives everything to one rank and nothing to the other ranks. This exposes an algorithm that
// divides by the average count.
static void one_rank_has_all(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    (void)arg;
    for (int owner = 0; owner < n; owner++) {
        size_t counts[RANKS_MAX] = {0}, own;
        uint32_t *x = (uint32_t *)malloc(50001 * sizeof *x);
        TAP_REQUIRE(x);
        memset(x, 0, 50001 * sizeof *x);
        counts[owner] = 50001;
        own = counts[rank];
        uint32_t *mine = (uint32_t *)malloc(50001 * sizeof *mine);
        TAP_REQUIRE(mine);
        pattern_fill(mine, 0, own, 4, rank, 5);
        rank_ok(rank, idist_all_gatherv(own ? mine : NULL, own, x, counts, NULL, IDIST_U32, &o));
        rank_check(pattern_find_wrong(x, 0, 50001, 4, owner, 5) == 50001,
                   "rank %d: wrong data from rank %d", rank, owner);
        free(x);
        free(mine);
    }
}

// Passes invalid pointers for counts and displacements on all ranks but the root. Only the root may
// read them.
static void counts_of_the_root(idist_group *world, int rank, int n, void *arg) {
    const size_t *nowhere = (const size_t *)(uintptr_t)8;
    idist_opts o = opts_of(world);
    (void)arg;
    for (int root = 0; root < n; root++) {
        size_t counts[RANKS_MAX];
        int32_t all[RANKS_MAX] = {0}, one = 0, mine = 10 * rank;
        for (int k = 0; k < n; k++) counts[k] = 1;
        for (int k = 0; k < n; k++) all[k] = k + 1;
        const size_t *c = rank == root ? counts : nowhere;
        rank_ok(rank, idist_scatterv(all, c, rank == root ? NULL : nowhere, &one, 1, IDIST_I32,
                                     root, &o));
        rank_check(one == rank + 1, "rank %d: scatterv: got %d expected %d", rank, one, rank + 1);
        rank_ok(rank, idist_gatherv(&mine, 1, all, c, rank == root ? NULL : nowhere, IDIST_I32,
                                    root, &o));
        for (int k = 0; k < n && rank == root; k++)
            rank_check(all[k] == 10 * k, "gatherv: got %d from rank %d expected %d", all[k], k,
                       10 * k);
    }
}

int main(void) {
    tap_deadline(200);
    grid_run("all_gatherv", all_gatherv, GRID_ONE_WAY | GRID_WIDE | GRID_BLOCKING);
    grid_run("gatherv", gatherv, GRID_ONE_WAY | GRID_WIDE | GRID_ROOTED);
    grid_run("scatterv", scatterv, GRID_ONE_WAY | GRID_WIDE | GRID_ROOTED | GRID_BLOCKING);
    grid_run("all_to_allv", all_to_allv, GRID_ONE_WAY | GRID_WIDE | GRID_NO_IN_PLACE);
    grid_run("all_to_allv in place", all_to_allv_in_place, GRID_ONE_WAY | GRID_WIDE);
    for (int a = 0; a < N_ALGORITHMS; a++) {
        idist_desc d = desc_with("auto", algorithm_names[a]);
#ifndef ON_DEVICE_H // only a pointer to device memory shows that a call is for the device
        ranks_case(4, &d, in_place_of_nothing, NULL, "all_to_allv in place of nothing, %s",
                   algorithm_names[a]);
#endif
        ranks_case(5, &d, dtypes_of_pairs, NULL, "all_to_allv: pairs have dtypes of their own, %s",
                   algorithm_names[a]);
        ranks_case_fault(3, &d, dtypes_that_differ, NULL,
                         "all_to_allv: a pair must agree on it, %s", algorithm_names[a]);
    }
    ranks_case(4, NULL, one_rank_has_all, NULL, "all_gatherv where one rank has all");
    for (int t = 0; t < N_PLACEMENTS; t++) {
        idist_desc d = desc_with(transport_names[t], "auto");
        ranks_case(3, &d, counts_of_the_root, NULL, "counts are looked at on the root only, %s",
                   d.transport);
    }
    return tap_done();
}
