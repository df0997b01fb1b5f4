// idist_group_begin / idist_group_end: several calls progress together
#include "idist.h"

#include "grid.h"

// Exchanges messages between all pairs, with all sends first on every rank. Outside a group, the
// large sends would wait for receives that no rank has posted.
static void all_pairs(idist_group *world, int rank, int n, void *arg) {
    size_t count = *(const size_t *)arg;
    idist_opts o = opts_of(world);
    guarded_buffer s = guarded_buffer_make(count * (size_t)n * 4, 0),
                   r = guarded_buffer_make(count * (size_t)n * 4, 0);
    idist_recv_info info[RANKS_MAX];
    memset(info, 0xFF, sizeof info);
    pattern_fill(s.p, 0, count * (size_t)n, 4, rank, 1);
    rank_ok(rank, idist_group_begin());
    for (int k = 0; k < n; k++)
        rank_ok(rank, idist_send(s.p + (size_t)k * count * 4, count, IDIST_I32, k, 3, &o));
    for (int k = 0; k < n; k++)
        rank_ok(rank,
                idist_recv(r.p + (size_t)k * count * 4, count, IDIST_I32, k, 3, &info[k], &o));
    rank_ok(rank, idist_group_end());
    for (int k = 0; k < n; k++) {
        rank_check(info[k].source == k && info[k].count == count,
                   "rank %d: info of %d: got %d, %zu", rank, k, info[k].source, info[k].count);
        size_t wrong =
            pattern_find_wrong(r.p + (size_t)k * count * 4, count * (size_t)rank, count, 4, k, 1);
        rank_check(wrong == count, "rank %d: from rank %d: element %zu is wrong", rank, k, wrong);
    }
    guarded_buffer_free(&s);
    guarded_buffer_free(&r);
}

// Nests groups of collectives and messages.
static void nested(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    int32_t a = rank, b = 1, c[RANKS_MAX], in = -1, out = rank * 7;
    int right = (rank + 1) % n, left = (rank + n - 1) % n;
    (void)arg;
    rank_ok(rank, idist_group_begin());
    rank_ok(rank, idist_recv(&in, 1, IDIST_I32, left, 0, NULL, &o));
    rank_ok(rank, idist_all_reduce(&a, &a, 1, IDIST_I32, IDIST_MAX, &o));
    rank_ok(rank, idist_group_begin());
    rank_ok(rank, idist_all_reduce(&b, &b, 1, IDIST_I32, IDIST_SUM, &o));
    rank_ok(rank, idist_send(&out, 1, IDIST_I32, right, 0, &o));
    rank_ok(rank, idist_group_end()); // the inner end does not wait
    rank_ok(rank, idist_all_gather(&out, c, 1, IDIST_I32, &o));
    rank_ok(rank, idist_group_end());
    rank_check(a == n - 1 && b == n && in == left * 7, "rank %d: got %d %d %d", rank, a, b, in);
    for (int k = 0; k < n; k++)
        rank_check(c[k] == k * 7, "rank %d: block %d: got %d expected %d", rank, k, c[k], k * 7);
}

// Calls the collectives of two groups in opposite orders on even and odd ranks. Outside a pair of
// idist_group_begin and idist_group_end, these calls would deadlock.
static void opposite_orders(idist_group *world, int rank, int n, void *arg) {
    idist_group *g[2] = {NULL, NULL};
    int32_t x[2] = {rank + 1, rank + 10};
    (void)arg;
    rank_ok(rank, idist_split(world, 0, rank, &g[0]));
    rank_ok(rank, idist_split(world, 0, rank, &g[1]));
    rank_ok(rank, idist_group_begin());
    for (int i = 0; i < 2; i++) {
        int which = (rank + i) % 2;
        idist_opts o = opts_of(g[which]);
        rank_ok(rank, idist_all_reduce(&x[which], &x[which], 1, IDIST_I32, IDIST_SUM, &o));
    }
    rank_ok(rank, idist_group_end());
    rank_check(x[0] == n * (n + 1) / 2 && x[1] == n * (n - 1) / 2 + 10 * n, "rank %d: got %d %d",
               rank, x[0], x[1]);
    rank_ok(rank, idist_free_group(&g[0]));
    rank_ok(rank, idist_free_group(&g[1]));
}

// Receives, in the inner pair, a message that the sender sends only after its own inner pair.
static void inner_end_does_not_wait(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    int32_t out = rank + 5, in = -1;
    (void)arg;
    o.timeout_ms = 3000 * test_slow_factor();
    rank_ok(rank, idist_group_begin());
    rank_ok(rank, idist_group_begin());
    rank_ok(rank, idist_recv(&in, 1, IDIST_I32, (rank + n - 1) % n, 0, NULL, &o));
    rank_ok(rank, idist_group_end());
    rank_ok(rank, idist_send(&out, 1, IDIST_I32, (rank + 1) % n, 0, &o));
    rank_ok(rank, idist_group_end());
    rank_check(in == (rank + n - 1) % n + 5, "rank %d: got %d", rank, in);
}

static void odd_uses(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    int32_t x = 1, y = 0;
    (void)arg;
    rank_is(rank, idist_group_end(), IDIST_ERR_STATE); // without a begin
    rank_ok(rank, idist_group_begin());
    rank_ok(rank, idist_group_end()); // empty
    rank_ok(rank, idist_group_begin());
    rank_is(rank, idist_send(&x, 1, IDIST_I32, 99, 0, &o), IDIST_ERR_ARG); // refused immediately
    rank_ok(rank, idist_all_reduce(&x, &y, 1, IDIST_I32, IDIST_SUM, &o));
    rank_is(rank, idist_group_end(), IDIST_ERR_ARG); // reported again; the all_reduce completes
    rank_check(strstr(idist_last_error(), "99") != NULL, "rank %d: got \"%s\"", rank,
               idist_last_error());
    rank_check(y == n, "rank %d: the call beside it: got %d expected %d", rank, y, n);
    rank_ok(rank, idist_group_begin());
    rank_ok(rank, idist_group_end()); // the next pair does not see the failure
    rank_ok(rank, idist_barrier(&o));
}

// Fails two calls of a group. idist_group_end must report the failure of the earlier call, even if
// the later call fails first. All other calls complete.
static void failure_in_group(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world), brief = opts_of(world);
    int32_t x = 0, y = 0, z = 5, pair[2] = {1, 2};
    (void)arg;
    (void)n;
    brief.timeout_ms = 80;
    if (rank == 0) {
        rank_ok(rank, idist_group_begin());
        rank_ok(rank, idist_recv(&x, 1, IDIST_I32, 1, 1, NULL, &brief)); // never sent
        rank_ok(rank, idist_recv(&y, 1, IDIST_I32, 1, 2, NULL, &o));
        rank_ok(rank, idist_recv(&x, 1, IDIST_I32, 1, 3, NULL, &o)); // too short
        rank_is(rank, idist_group_end(), IDIST_ERR_TIMEOUT);
        rank_check(strstr(idist_last_error(), "not done after") != NULL, "got \"%s\"",
                   idist_last_error());
        rank_check(y == 5, "got %d expected 5", y);
        rank_ok(rank, idist_recv(pair, 2, IDIST_I32, 1, 3, NULL, &o));
    } else if (rank == 1) {
        rank_ok(rank, idist_send(&z, 1, IDIST_I32, 0, 2, &o));
        rank_ok(rank, idist_send(pair, 2, IDIST_I32, 0, 3, &o));
    }
    rank_ok(rank, idist_barrier(&o));
}

int main(void) {
    static const size_t counts[4] = {0, 1, 3000, 40000};
    tap_deadline(60);
    for (int n = 1; n <= 5; n++) {
        for (int t = 0; t < (n == 3 ? 2 : 1); t++) {
            idist_desc d = desc_with(t ? "tcp" : "auto", "auto");
            for (int i = 0; i < 4; i++) {
                size_t count = counts[i];
                ranks_case(n, &d, all_pairs, &count, "all pairs n=%d count %zu, %s", n, count,
                           d.transport);
            }
            ranks_case(n, &d, nested, NULL, "collectives and messages, nested n=%d, %s", n,
                       d.transport);
        }
        ranks_case(n, NULL, odd_uses, NULL, "odd uses n=%d", n);
        ranks_case(n, NULL, inner_end_does_not_wait, NULL, "the inner end does not wait n=%d", n);
    }
    ranks_case(2, NULL, opposite_orders, NULL, "two groups in opposite orders n=2");
    ranks_case(4, NULL, opposite_orders, NULL, "two groups in opposite orders n=4");
    ranks_case(2, NULL, failure_in_group, NULL, "a failure inside");
    return tap_done();
}
