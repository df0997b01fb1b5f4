// groups: new_group, split, translate, non-members, overlapping groups in use at the same time,
// free
#ifndef RANKS_MPI
#define IDIST_IMPLEMENTATION
#endif
#include "idist.h"

#include "grid.h"

static int sum_in(idist_group *g, int rank, int value) {
    idist_opts o = opts_of(g);
    int32_t x = value, y = -1;
    rank_ok(rank, idist_all_reduce(&x, &y, 1, IDIST_I32, IDIST_SUM, &o));
    return y;
}

static void new_group(idist_group *world, int rank, int n, void *arg) {
    static const int unsorted[3] = {4, 0, 2};
    idist_group *g = NULL;
    (void)arg;
    rank_check(idist_group_rank(world) == rank && idist_group_size(world) == n,
               "rank %d: world is %d of %d", rank, idist_group_rank(world),
               idist_group_size(world));
    // idist_new_group takes ranks of the default world. The worlds of this test come from
    // idist_open, so the test uses idist_split.
    bool inside = rank == 0 || rank == 2 || rank == 4;
    rank_ok(rank, idist_split(world, inside ? 1 : -1, rank, &g));
    rank_check(g != NULL, "rank %d: everyone gets a group", rank);
    rank_check(idist_group_rank(g) == (inside ? rank / 2 : -1), "rank %d: group rank: got %d", rank,
               idist_group_rank(g));
    if (inside) {
        rank_check(idist_group_size(g) == 3, "rank %d: size: got %d expected 3", rank,
                   idist_group_size(g));
        rank_check(sum_in(g, rank, unsorted[rank / 2]) == 6, "rank %d: wrong sum", rank);
    } else {
        idist_opts o = opts_of(g);
        int32_t x = 1;
        rank_is(rank, idist_barrier(&o), IDIST_ERR_STATE);
        rank_is(rank, idist_all_reduce(&x, &x, 1, IDIST_I32, IDIST_SUM, &o), IDIST_ERR_STATE);
        rank_is(rank, idist_send(&x, 1, IDIST_I32, 0, 0, &o), IDIST_ERR_STATE);
        rank_is(rank, idist_recv(&x, 1, IDIST_I32, 0, 0, NULL, &o), IDIST_ERR_STATE);
        rank_check(idist_last_error()[0] != 0, "rank %d: a failure has a text", rank);
    }
    for (int k = 0; k < n; k++) {
        int want = inside && k % 2 == 0 ? k / 2 : -1;
        int back = inside && k < 3 ? k * 2 : -1;
        if (inside) {
            rank_check(idist_group_translate(world, k, g) == want,
                       "rank %d: world %d in group: got %d expected %d", rank, k,
                       idist_group_translate(world, k, g), want);
            rank_check(idist_group_translate(g, k, world) == back,
                       "rank %d: group %d in world: got %d expected %d", rank, k,
                       idist_group_translate(g, k, world), back);
        }
    }
    rank_check(idist_group_translate(world, -1, world) == -1 &&
                   idist_group_translate(world, n, world) == -1,
               "rank %d: ranks outside translate to -1", rank);
    rank_ok(rank, idist_free_group(&g));
    rank_check(g == NULL, "rank %d: freeing sets the pointer to NULL", rank);
    rank_check(sum_in(world, rank, 1) == n, "rank %d: the world works on", rank);
}

// Splits with keys that reverse the order, then with equal keys, which keep the parent's order.
static void split_keys(idist_group *world, int rank, int n, void *arg) {
    idist_group *g = NULL, *h = NULL;
    (void)arg;
    rank_ok(rank, idist_split(world, rank % 2, -rank, &g));
    int size = (n + 1 - rank % 2) / 2;
    rank_check(idist_group_size(g) == size && idist_group_rank(g) == size - 1 - rank / 2,
               "rank %d: reversed: got %d of %d expected %d of %d", rank, idist_group_rank(g),
               idist_group_size(g), size - 1 - rank / 2, size);
    int32_t mine = rank, all[RANKS_MAX];
    idist_opts o = opts_of(g);
    rank_ok(rank, idist_all_gather(&mine, all, 1, IDIST_I32, &o));
    for (int k = 0; k < size; k++)
        rank_check(all[k] == (size - 1 - k) * 2 + rank % 2, "rank %d: member %d: got %d", rank, k,
                   all[k]);
    rank_ok(rank, idist_broadcast(&mine, 1, IDIST_I32, 0, &o)); // root is a rank of the group
    rank_check(mine == all[0], "rank %d: broadcast in the group: got %d expected %d", rank, mine,
               all[0]);
    rank_ok(rank, idist_split(g, 7, 0, &h)); // splits a group; all keys are equal
    rank_check(idist_group_rank(h) == idist_group_rank(g) && idist_group_size(h) == size,
               "rank %d: split of a split: got %d", rank, idist_group_rank(h));
    rank_check(sum_in(h, rank, 1) == size, "rank %d: wrong sum in the split of a split", rank);
    rank_ok(rank, idist_free_group(&g)); // the child outlives its parent
    rank_check(sum_in(h, rank, 2) == 2 * size, "rank %d: wrong sum after the parent is gone", rank);
    rank_ok(rank, idist_free_group(&h));
}

// Reduces in the rows and columns of a grid and in the world at the same time.
static void overlapping(idist_group *world, int rank, int n, void *arg) {
    enum { COUNT = 20000 };
    const int width = 2;
    idist_group *row = NULL, *column = NULL, *groups[3];
    (void)arg;
    rank_ok(rank, idist_split(world, rank / width, rank, &row));
    rank_ok(rank, idist_split(world, rank % width, rank, &column));
    groups[0] = world;
    groups[1] = row;
    groups[2] = column;
    for (int round = 0; round < 20; round++) {
        idist_request r[3] = {{NULL}, {NULL}, {NULL}};
        int32_t *x[3];
        size_t count = round % 2 ? COUNT : 3;
        for (int i = 0; i < 3; i++) {
            x[i] = (int32_t *)malloc(COUNT * sizeof(int32_t));
            TAP_REQUIRE(x[i]);
            for (size_t j = 0; j < count; j++) x[i][j] = 1 + (int32_t)j % 3;
        }
        // The order differs between rounds, and between even and odd ranks.
        for (int i = 0; i < 3; i++) {
            int which = (i * (rank % 2 ? 2 : 1) + round) % 3;
            idist_opts o = opts_async(groups[which], &r[which]);
            rank_ok(rank, idist_all_reduce(x[which], x[which], count, IDIST_I32, IDIST_SUM, &o));
        }
        rank_ok(rank, idist_wait_all(r, 3));
        for (int i = 0; i < 3; i++) {
            int size = idist_group_size(groups[i]);
            for (size_t j = 0; j < count; j++) {
                if (x[i][j] == size * (1 + (int32_t)j % 3)) continue;
                rank_fail("rank %d round %d group %d element %zu: got %d expected %d", rank, round,
                          i, j, x[i][j], size * (1 + (int32_t)j % 3));
                break;
            }
            free(x[i]);
        }
    }
    (void)n;
    rank_ok(rank, idist_free_group(&row));
    rank_ok(rank, idist_free_group(&column));
}

// Checks with an all_gather that the group has the members of the list, in the order of the list.
static void check_members(int rank, idist_group *g, const int *list, int n) {
    idist_opts o = opts_of(g);
    int32_t mine = rank, all[RANKS_MAX];
    if (!g) return;
    rank_check(idist_group_size(g) == n, "rank %d: the group has %d members", rank,
               idist_group_size(g));
    rank_ok(rank, idist_all_gather(&mine, all, 1, IDIST_I32, &o));
    for (int i = 0; i < n; i++)
        rank_check(all[i] == list[i], "rank %d: member %d is %d expected %d", rank, i, all[i],
                   list[i]);
}

// Makes groups of the even and of the odd ranks, several times, in an order unlike the world's.
// Only the members take part. Meanwhile the remaining ranks make other calls.
static void by_members(idist_group *world, int rank, int n, void *arg) {
    int list[RANKS_MAX], count = 0;
    idist_group *g[3] = {NULL, NULL, NULL}, *inner = NULL;
    idist_opts o = opts_of(world);
    idist_request r = {NULL};
    idist_recv_info info = {-1, -1, 0, IDIST_I8};
    int32_t x = -1, y = rank;
    idist_opts async = opts_async(world, &r);
    (void)arg;
    // This receive must match only messages that the program sends, and none that idist sends to
    // make a group.
    rank_ok(rank, idist_recv(&x, 1, IDIST_I32, IDIST_ANY_SOURCE, IDIST_ANY_TAG, &info, &async));
    for (int k = n - 1; k >= 0; k--)
        if (k % 2 == rank % 2) list[count++] = k;
    for (int i = 0; i < 3; i++) {
        if (rank % 2 && i == 2) continue; // so that odd ranks make fewer groups
        rank_ok(rank, idist_new_group_by_members(world, list, count, i == 1 ? 7 : 3, &g[i]));
        check_members(rank, g[i], list, count);
    }
    // Makes a group from the first two ranks of a group.
    if (rank % 2 == 0 && count > 1 && g[0]) {
        static const int two[2] = {1, 0};
        const int world_ranks[2] = {list[1], list[0]};
        if (idist_group_rank(g[0]) < 2) {
            rank_ok(rank, idist_new_group_by_members(g[0], two, 2, 0, &inner));
            check_members(rank, inner, world_ranks, 2);
            rank_ok(rank, idist_free_group(&inner));
        }
    }
    rank_ok(rank, idist_send(&y, 1, IDIST_I32, (rank + 1) % n, 11, &o));
    rank_ok(rank, idist_wait(&r));
    rank_check(info.tag == 11 && x == (rank + n - 1) % n, "rank %d: received %d with tag %d", rank,
               x, info.tag);
    for (int i = 0; i < 3; i++)
        if (g[i]) rank_ok(rank, idist_free_group(&g[i]));
    // Makes a group of all ranks, which have made different numbers of groups before.
    for (int k = 0; k < n; k++) list[k] = k;
    rank_ok(rank, idist_new_group_by_members(world, list, n, 3, &g[0]));
    check_members(rank, g[0], list, n);
    // The split succeeds although the ranks have made different numbers of groups.
    rank_ok(rank, idist_split(world, 0, 0, &inner));
    check_members(rank, inner, list, n);
    rank_ok(rank, idist_free_group(&inner));
    rank_ok(rank, idist_free_group(&g[0]));
}

typedef struct maker {
    idist_group *world, *made;
    int rank, n, tag;
} maker;

static void *make_in_thread(void *arg) {
    maker *m = (maker *)arg;
    int list[RANKS_MAX];
    for (int k = 0; k < m->n; k++) list[k] = (k + m->tag) % m->n;
    rank_ok(m->rank, idist_new_group_by_members(m->world, list, m->n, m->tag, &m->made));
    check_members(m->rank, m->made, list, m->n);
    return NULL;
}

// Makes groups of the same ranks in two threads of each rank at the same time.
static void by_members_in_threads(idist_group *world, int rank, int n, void *arg) {
    (void)arg;
    for (int round = 0; round < 20; round++) {
        maker makers[2] = {{world, NULL, rank, n, round % 3}, {world, NULL, rank, n, 5}};
        pthread_t other;
        TAP_REQUIRE(pthread_create(&other, NULL, make_in_thread, &makers[rank % 2]) == 0);
        make_in_thread(&makers[1 - rank % 2]);
        pthread_join(other, NULL);
        for (int i = 0; i < 2; i++)
            if (makers[i].made) rank_ok(rank, idist_free_group(&makers[i].made));
    }
}

static void by_members_misuse(idist_group *world, int rank, int n, void *arg) {
    const int all[3] = {0, 1, 2}, twice[2] = {rank, rank}, outside[2] = {rank, n};
    const int others[1] = {(rank + 1) % n};
    idist_opts o = opts_of(world);
    idist_group *g = world;
    (void)arg;
    rank_is(rank, idist_new_group_by_members(world, all, n, 0, NULL), IDIST_ERR_ARG);
    rank_is(rank, idist_new_group_by_members(world, NULL, 1, 0, &g), IDIST_ERR_ARG);
    rank_check(!g, "rank %d: a failed call returns a group", rank);
    rank_is(rank, idist_new_group_by_members(world, all, 0, 0, &g), IDIST_ERR_ARG);
    rank_is(rank, idist_new_group_by_members(world, all, n + 1, 0, &g), IDIST_ERR_ARG);
    rank_is(rank, idist_new_group_by_members(world, twice, 2, 0, &g), IDIST_ERR_ARG);
    rank_is(rank, idist_new_group_by_members(world, outside, 2, 0, &g), IDIST_ERR_ARG);
    rank_is(rank, idist_new_group_by_members(world, others, 1, 0, &g), IDIST_ERR_ARG);
    rank_is(rank, idist_new_group_by_members(world, all, n, -1, &g), IDIST_ERR_ARG);
    idist_group_begin();
    rank_is(rank, idist_new_group_by_members(world, all, n, 0, &g), IDIST_ERR_STATE);
    (void)idist_group_end();
    rank_ok(rank, idist_barrier(&o));
}

// Passes a different list on rank 0 and, if *arg is false, keeps rank 2 out of the call. Only this
// call may time out.
static void by_members_missing(idist_group *world, int rank, int n, void *arg) {
    const int all[3] = {0, 1, 2}, two[2] = {0, 1};
    const bool *comes = (const bool *)arg;
    idist_group *g = NULL;
    idist_status status = IDIST_ERR_TIMEOUT;
    (void)n;
    if (rank == 2 && !*comes) tap_sleep_ms(600);
    else
        status = rank == 0 ? idist_new_group_by_members(world, two, 2, 0, &g)
                           : idist_new_group_by_members(world, all, 3, 0, &g);
    rank_check(status == IDIST_ERR_TIMEOUT, "rank %d: got %s: %s", rank, idist_status_name(status),
               idist_last_error());
    idist_opts o = opts_of(world); // the world stays usable
    o.timeout_ms = RANKS_TIMEOUT_MS;
    rank_ok(rank, idist_barrier(&o));
    rank_check(!g, "rank %d: there is a group", rank);
}

// Starts three splits, with other calls in between, and a blocking split while the three are open.
// Way 0 waits for them in the same order on all ranks, way 1 in an order that differs from rank to
// rank. Ways 2 and 3 wait in the order of completion.
static void split_started(idist_group *world, int rank, int n, void *arg) {
    int way = *(const int *)arg;
    idist_group *g[3], *between = NULL;
    idist_request r[3], *pointers[3] = {&r[(rank + 2) % 3], &r[rank % 3], &r[(rank + 1) % 3]};
    idist_opts o = opts_of(world);
    int32_t x = 1, y = 0;
    for (int i = 0; i < 3; i++) {
        int color = i == 2 && rank == 0 ? -1 : rank % (i + 1);
        rank_ok(rank, idist_split_start(world, color, -rank, &g[i], &r[i]));
        rank_ok(rank, idist_all_reduce(&x, &y, 1, IDIST_I32, IDIST_SUM, &o));
        rank_check(y == n && !g[i], "rank %d: got %d, or a group too early", rank, y);
    }
    rank_ok(rank, idist_split(world, 0, 0, &between));
    rank_is(rank, idist_request_free(&r[1]), IDIST_ERR_ARG);
    if (way == 0) {
        for (int i = 0; i < 3; i++) rank_ok(rank, idist_wait(&r[(i + 1) % 3]));
    } else if (way == 1) {
        rank_ok(rank, idist_wait_all_of(pointers, 3));
    } else if (way == 2) {
        for (size_t i = 0, index; i < 3; i++) rank_ok(rank, idist_wait_any(r, 3, &index));
    } else {
        for (int i = 0, left = 3; left; i++) {
            bool done = false;
            if (!r[i % 3].impl) continue;
            rank_ok(rank, idist_test(&r[i % 3], &done));
            left -= done;
        }
    }
    for (int i = 0; i < 3; i++) {
        int list[RANKS_MAX], count = 0;
        for (int k = n - 1; k >= 0; k--)
            if (k % (i + 1) == rank % (i + 1) && !(i == 2 && k == 0)) list[count++] = k;
        if (i == 2 && rank == 0) rank_check(idist_group_rank(g[2]) == -1, "a member without color");
        else check_members(rank, g[i], list, count);
        rank_ok(rank, idist_free_group(&g[i]));
    }
    rank_ok(rank, idist_free_group(&between));
}

// Waits for a split and three receives with idist_wait_all. One receive waits for a rank that needs
// the split first, so idist_wait_all must make progress on the split. Two receives time out, and
// the result must be the failure with the lower index, although the other one fails first.
static void split_beside_receive(idist_group *world, int rank, int n, void *arg) {
    idist_group *g = NULL;
    idist_request r[4];
    idist_opts o = opts_of(world), brief = opts_async(world, &r[3]);
    idist_opts in_vain = opts_async(world, &r[0]), a = opts_async(world, &r[1]);
    int32_t x = 5, y = 0;
    (void)n;
    (void)arg;
    memset(r, 0, sizeof r);
    brief.timeout_ms = 20;
    in_vain.timeout_ms = 100;

    if (rank == 0) {
        rank_ok(rank, idist_recv(&y, 1, IDIST_I32, 1, 1, NULL, &in_vain));
        rank_ok(rank, idist_recv(&y, 1, IDIST_I32, 1, 2, NULL, &a));
        rank_ok(rank, idist_recv(&y, 1, IDIST_I32, 1, 3, NULL, &brief));
    }

    rank_ok(rank, idist_split_start(world, 0, 0, &g, &r[2]));

    if (rank == 0) {
        rank_is(rank, idist_wait_all(r, 4), IDIST_ERR_TIMEOUT);
        rank_check(strstr(idist_last_error(), "tag 1") != NULL, "got: %s", idist_last_error());
        rank_check(y == 5, "got %d", y);
    } else {
        rank_ok(rank, idist_wait(&r[2]));
        if (rank == 1) rank_ok(rank, idist_send(&x, 1, IDIST_I32, 0, 2, &o));
    }

    o.group = g;
    rank_ok(rank, idist_barrier(&o));
    rank_ok(rank, idist_free_group(&g));
}

static void split_start_misuse(idist_group *world, int rank, int n, void *arg) {
    idist_group *g = NULL;
    idist_request r = {NULL};
    idist_opts o = opts_of(world);
    (void)n;
    (void)arg;
    rank_is(rank, idist_split_start(world, 0, 0, NULL, &r), IDIST_ERR_ARG);
    rank_is(rank, idist_split_start(world, 0, 0, &g, NULL), IDIST_ERR_ARG);
#ifdef RANKS_MPI
    rank_is(rank, idist_split_start(world, 0, 0, &g, &r), IDIST_ERR_UNSUPPORTED);
#endif
    rank_ok(rank, idist_barrier(&o));
}

// Aborts the group while a split is in progress. The request must end, and no group is made.
static void split_aborted(idist_group *world, int rank, int n, void *arg) {
    idist_group *g = NULL;
    idist_request r = {NULL};
    idist_status status;
    (void)n;
    (void)arg;
    if (rank == 2) {
        rank_ok(rank, idist_abort(world));
        return;
    }
    status = idist_split_start(world, 0, 0, &g, &r);
    if (status == IDIST_OK) status = idist_wait(&r);
    rank_check(status == IDIST_ERR_ABORTED && !g, "rank %d: got %s", rank,
               idist_status_name(status));
}

// Sends with the same tag between the same ranks in two groups. Each message must stay in its
// group.
static void messages_stay_inside(idist_group *world, int rank, int n, void *arg) {
    idist_group *g = NULL;
    (void)arg;
    rank_ok(rank, idist_split(world, 0, n - rank, &g)); // reversed order
    idist_opts in_world = opts_of(world), in_group = opts_of(g);
    int32_t a = 1, b = 2, x = 0;
    if (rank == 0) {
        rank_ok(rank, idist_send(&a, 1, IDIST_I32, 1, 0, &in_world));
        rank_ok(rank, idist_send(&b, 1, IDIST_I32, n - 2, 0, &in_group)); // rank 1 of the world
    } else if (rank == 1) {
        idist_recv_info info = {-1, -1, 0, IDIST_I8};
        rank_ok(rank,
                idist_recv(&x, 1, IDIST_I32, IDIST_ANY_SOURCE, IDIST_ANY_TAG, &info, &in_group));
        rank_check(x == 2 && info.source == n - 1, "got %d from %d expected 2 from %d", x,
                   info.source, n - 1);
        rank_ok(rank,
                idist_recv(&x, 1, IDIST_I32, IDIST_ANY_SOURCE, IDIST_ANY_TAG, &info, &in_world));
        rank_check(x == 1 && info.source == 0, "got %d from %d expected 1 from 0", x, info.source);
    }
    rank_ok(rank, idist_barrier(&in_world));
    rank_ok(rank, idist_free_group(&g));
}

static void made_and_freed(idist_group *world, int rank, int n, void *arg) {
    (void)arg;
    for (int i = 0; i < 300; i++) { // more than any fixed table of groups would hold
        idist_group *g = NULL;
        if (!rank_ok(rank, idist_split(world, (rank + i) % 2, rank, &g))) return;
        if (i % 10 == 0)
            rank_check(sum_in(g, rank, 1) == idist_group_size(g), "rank %d: round %d: wrong sum",
                       rank, i);
        rank_ok(rank, idist_free_group(&g));
    }
    idist_group *none = NULL;
    rank_ok(rank, idist_split(world, -1, 0, &none)); // `none` has no members
    rank_check(idist_group_rank(none) == -1, "rank %d: got %d expected -1", rank,
               idist_group_rank(none));
    rank_ok(rank, idist_free_group(&none));
    (void)n;
}

static void free_with_open_request(idist_group *world, int rank, int n, void *arg) {
    idist_group *g = NULL;
    idist_request r = {NULL};
    int32_t x = 0;
    (void)arg;
    (void)n;
    rank_ok(rank, idist_split(world, 0, rank, &g));
    idist_opts o = opts_async(g, &r), w = opts_of(g);
    if (rank == 0) {
        idist_group *same = g;
        rank_ok(rank, idist_recv(&x, 1, IDIST_I32, 1, 0, NULL, &o));
        rank_is(rank, idist_free_group(&g), IDIST_ERR_STATE);
        rank_check(g == same, "a group with open requests is kept");
    }
    rank_ok(rank, idist_barrier(&w));
    if (rank == 1) rank_ok(rank, idist_send(&rank, 1, IDIST_I32, 0, 0, &w));
    if (rank == 0) rank_ok(rank, idist_wait(&r));
    rank_ok(rank, idist_barrier(&w));
    rank_ok(rank, idist_free_group(&g));
}

// Frees groups with messages that no rank has received. The space that these messages occupy must
// be freed as well.
static void freed_with_messages(idist_group *world, int rank, int n, void *arg) {
    enum { NBYTES = 3500 };
    unsigned char *x = (unsigned char *)calloc(NBYTES, 1);
    idist_opts o = opts_of(world), brief = opts_of(world);
    TAP_REQUIRE(x);
    (void)n;
    (void)arg;
    brief.timeout_ms = 2000 * test_slow_factor();
    for (int i = 0; i < 370; i++) {
        idist_group *g = NULL;
        if (!rank_ok(rank, idist_split(world, 0, rank, &g))) break;
        idist_opts og = opts_of(g);
        og.timeout_ms = brief.timeout_ms;
        if (rank == 0) rank_ok(rank, idist_send(x, NBYTES, IDIST_U8, 1, 0, &og));
        rank_ok(rank, idist_barrier(&og)); // the message has arrived
        rank_ok(rank, idist_free_group(&g));
        rank_ok(rank, idist_barrier(&o));
    }
    if (rank == 0) rank_ok(rank, idist_send(x, NBYTES, IDIST_U8, 1, 0, &brief));
    rank_ok(rank, idist_barrier(&o));
    if (rank == 1) rank_ok(rank, idist_recv(x, NBYTES, IDIST_U8, 0, 0, NULL, &brief));
    free(x);
}

// Runs every collective that works in two levels, inside hosts and between them. The group has all
// ranks except the last, usually in an order that differs from the world's. In some groups the
// ranks of each host are consecutive, in others they are not. Sums of small integers are exact.
static void by_host(idist_group *g, int rank, int n) {
    idist_opts o = opts_of(g);
    int r = idist_group_rank(g);
    float x[3 * RANKS_MAX], y[3 * RANKS_MAX], total = (float)(n * (n - 1) / 2);
    for (int i = 0; i < 3 * n; i++) x[i] = (float)(r + i);
    rank_ok(rank, idist_all_reduce(x, y, 3, IDIST_F32, IDIST_SUM, &o));
    for (int i = 0; i < 3; i++)
        rank_check(y[i] == total + (float)(n * i), "rank %d: sum %d: %g", rank, i, (double)y[i]);
    rank_ok(rank, idist_all_reduce(x, y, 3, IDIST_F32, IDIST_MAX, &o));
    for (int i = 0; i < 3; i++)
        rank_check(y[i] == (float)(n - 1 + i), "rank %d: max %d: %g", rank, i, (double)y[i]);
    rank_ok(rank, idist_reduce_scatter(x, y, 3, IDIST_F32, IDIST_SUM, &o));
    for (int i = 0; i < 3; i++)
        rank_check(y[i] == total + (float)(n * (3 * r + i)), "rank %d: part %d: %g", rank, i,
                   (double)y[i]);
    rank_ok(rank, idist_reduce_scatter(x, y, 3, IDIST_F32, IDIST_AVG, &o));
    for (int i = 0; i < 3; i++)
        rank_check(y[i] == (total + (float)(n * (3 * r + i))) / (float)n, "rank %d: mean %d: %g",
                   rank, i, (double)y[i]);
    rank_ok(rank, idist_all_gather(x, y, 3, IDIST_F32, &o));
    for (int i = 0; i < 3 * n; i++)
        rank_check(y[i] == (float)(i / 3 + i % 3), "rank %d: gathered %d: %g", rank, i,
                   (double)y[i]);
    for (int root = 0; root < n; root++) {
        y[0] = y[1] = y[2] = -1;
        rank_ok(rank, idist_reduce(x, y, 3, IDIST_F32, IDIST_AVG, root, &o));
        for (int i = 0; i < 3 && r == root; i++)
            rank_check(y[i] == (total + (float)(n * i)) / (float)n, "rank %d: mean %d at %d: %g",
                       rank, i, root, (double)y[i]);
        for (int i = 0; i < 3 && r != root; i++)
            rank_check(y[i] == -1, "rank %d: written to, root %d", rank, root);
        for (int i = 0; i < 3; i++) y[i] = (float)(r == root ? 100 * root + i : -1);
        rank_ok(rank, idist_broadcast(y, 3, IDIST_F32, root, &o));
        for (int i = 0; i < 3; i++)
            rank_check(y[i] == (float)(100 * root + i), "rank %d: from %d: %g", rank, root,
                       (double)y[i]);
    }
    rank_ok(rank, idist_barrier(&o));
}

static void over_hosts(idist_group *world, int rank, int n, void *arg) {
    idist_group *g = NULL, *h = NULL;
    (void)arg;
    for (int turn = 0; turn < 5; turn++) { // the groups' regions of shared memory are used again
        rank_ok(rank, idist_split(world, rank < n - 1 ? 0 : -1, -rank, &g));
        rank_ok(rank, idist_split(world, rank < n - 1 ? 0 : -1, rank * 5 % n, &h));
        if (rank < n - 1) by_host(g, rank, n - 1);
        if (rank < n - 1) by_host(h, rank, n - 1);
        rank_ok(rank, idist_free_group(&h));
        if (rank < n - 1) by_host(g, rank, n - 1);
        if (turn < 4) rank_ok(rank, idist_free_group(&g)); // the last group ends with the world
    }
    rank_check(sum_in(world, rank, 1) == n, "rank %d: the world works on", rank);
}

#ifndef RANKS_MPI
// Frees groups and makes new ones, which must get shared memory again. The world must not keep the
// old groups.
static void used_again(idist_group *world, int rank, int n, void *arg) {
    idist_group *g = NULL;
    idist_opts o = opts_of(world);
    bool mixed = ((idist__world *)(void *)world)->nnodes > 1;
    (void)arg;
    for (int turn = 0; turn < 100; turn++) { // some groups fail before all members have met
        idist_status s = idist_split(world, 0, rank, &g);
        rank_check(s == IDIST_OK || s == IDIST_ERR_ABORTED, "rank %d: split: got %s", rank,
                   idist_status_name(s));
        if (g && rank == turn % n) rank_ok(rank, idist_abort(g));
        if (g) rank_ok(rank, idist_free_group(&g));
        rank_ok(rank, idist_barrier(&o));
    }
    for (int turn = 0; turn < 100; turn++) {
        rank_ok(rank, idist_split(world, 0, rank, &g));
        const idist__ring_group *rg = idist__ring_group_of(g);
        if (mixed && rg->local) rg = idist__ring_group_of(rg->local);
        rank_check(rg->share != NULL, "rank %d: group %d shares no memory", rank, turn);
        rank_check(sum_in(g, rank, 1) == n, "rank %d: group %d", rank, turn);
        rank_ok(rank, idist_free_group(&g));
    }
    int groups = 0;
    for (g = world; g; g = ((idist_group *)g)->next) groups++;
    rank_check(groups <= 3, "rank %d: %d groups are left", rank, groups);
}

// Calls idist_new_group in separate processes, because it works on the default world.
static int new_group_worker(int local_rank, void *arg) {
    static const int list[3] = {3, 0, 1};
    static const int index_of[4] = {0, 1, -1, 2};
    idist_group *g = NULL;
    int rank = idist_get_rank();
    (void)local_rank;
    (void)arg;
    if (!rank_ok(rank, idist_new_group(list, 3, &g))) return 1;
    rank_check(idist_group_rank(g) == index_of[rank], "rank %d: got %d expected %d", rank,
               idist_group_rank(g), index_of[rank]);
    if (rank != 2) {
        rank_check(idist_group_translate(NULL, 3, g) == 2 && idist_group_translate(g, 2, NULL) == 3,
                   "rank %d: translate", rank);
        rank_check(idist_group_size(g) == 3, "rank %d: size: got %d expected 3", rank,
                   idist_group_size(g));
        rank_check(sum_in(g, rank, rank) == 4, "rank %d: wrong sum", rank);
        int32_t x = rank;
        idist_opts o = opts_of(g);
        rank_ok(rank, idist_broadcast(&x, 1, IDIST_I32, 2, &o)); // world rank 3
        rank_check(x == 3, "rank %d: got %d expected 3", rank, x);
    } else {
        idist_opts o = opts_of(g);
        rank_is(rank, idist_barrier(&o), IDIST_ERR_STATE);
    }
    rank_ok(rank, idist_free_group(&g));
    rank_ok(rank, idist_new_group(&list[0], 1, &g)); // rank 3 alone
    if (rank == 3) rank_check(sum_in(g, rank, 5) == 5, "a group of one");
    rank_ok(rank, idist_free_group(&g));
    rank_check(sum_in(NULL, rank, 1) == 4, "rank %d: the world works on", rank);
    return 0;
}

static void of_the_ring(void) {
    idist_desc spawn = desc_with(NULL, NULL);
    for (int t = 0; t < N_PLACEMENTS; t++) {
        idist_desc d = desc_with(transport_names[t], "auto");
        if (t == 0 || t >= N_TRANSPORTS)
            ranks_case(4, &d, used_again, NULL, "100 groups that share memory, %s", d.transport);
    }
    tap_running("idist_new_group in 4 processes");
    ranks_reset();
    spawn.timeout_ms = RANKS_TIMEOUT_MS;
    rank_ok(-1, idist_spawn(new_group_worker, NULL, 4, &spawn));
    ranks_report("idist_new_group in 4 processes");
}
#endif

int main(void) {
    idist_desc tcp = desc_with("tcp", "auto");
    tap_deadline(200);
    ranks_case(5, NULL, new_group, NULL, "members and others n=5");
    ranks_case(5, &tcp, new_group, NULL, "members and others n=5, tcp");
    for (int n = 1; n <= 7; n += 2)
        ranks_case(n, NULL, split_keys, NULL, "split by colors and keys n=%d", n);
    for (int n = 2; n <= 8; n += 2)
        ranks_case(n, NULL, overlapping, NULL, "rows, columns and world at once n=%d", n);
    ranks_case(6, &tcp, overlapping, NULL, "rows, columns and world at once n=6, tcp");
    for (int t = 0; t < N_PLACEMENTS; t++) {
        idist_desc d = desc_with(transport_names[t], "auto");
        for (int n = 1; n <= 5; n++)
            ranks_case(n, &d, by_members, NULL, "made by its members alone n=%d, %s", n,
                       d.transport);
    }
    ranks_case(2, NULL, split_start_misuse, NULL, "split_start: misuse");
#ifndef RANKS_MPI
    for (int t = 0; t < N_PLACEMENTS; t++)
        for (int way = 0; way < 4; way++) {
            idist_desc d = desc_with(transport_names[t], "auto");
            ranks_case(way + 1 + (way < 2), &d, split_started, &way,
                       "splits that are started, way %d, %s", way, d.transport);
        }
    ranks_case(3, NULL, split_beside_receive, NULL, "a split that is started, beside receives");
    ranks_case_fault(3, NULL, split_aborted, NULL, "a split that is started and aborted");
#endif
    ranks_case(3, NULL, by_members_misuse, NULL, "made by its members alone: misuse");
    for (int comes = 0; comes < 2; comes++) {
        idist_desc d = desc_with("auto", "auto");
        bool third = comes != 0;
        d.timeout_ms = 300 * test_slow_factor();
        ranks_case_fault(3, &d, by_members_missing, &third, "made by its members alone: %s",
                         third ? "another list on one rank" : "one does not come");
    }
#ifndef RANKS_MPI // MPI makes one group at a time
    ranks_case(3, NULL, by_members_in_threads, NULL, "made by its members in two threads");
    ranks_case(3, &tcp, by_members_in_threads, NULL, "made by its members in two threads, tcp");
#endif
    ranks_case(4, NULL, messages_stay_inside, NULL, "messages stay inside their group");
    ranks_case(4, NULL, made_and_freed, NULL, "300 groups made and freed");
    ranks_case(2, NULL, free_with_open_request, NULL, "free with an open request is refused");
    for (int t = 0; t < N_PLACEMENTS; t++) {
        idist_desc d = desc_with(transport_names[t], "auto");
        ranks_case(2, &d, freed_with_messages, NULL, "freed with messages inside, %s", d.transport);
    }
    for (int t = N_TRANSPORTS; t < N_PLACEMENTS; t++)
        for (int n = 4; n <= 8; n += 2) {
            idist_desc d = desc_with(transport_names[t], "auto");
            ranks_case(n, &d, over_hosts, NULL, "groups over several hosts n=%d, %s", n,
                       d.transport);
        }
#ifndef RANKS_MPI
    of_the_ring();
#endif
    return tap_done();
}
