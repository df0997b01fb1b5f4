// hosts: every operation on 32 MiB over several simulated hosts, with every element checked.
//
// Ranks on one host communicate through shared memory, and hosts communicate over TCP. Every rank
// has more TCP links than the library reads one by one (IDIST__PROGRESS_FEW). Normally a waiting
// rank announces itself after 20 ms, and the announcement wakes the other ranks. Here the
// announcement never comes, so a lost wake-up becomes a hang and ends in a time-out.
//
// Runs 3 rounds over 2+2+2+2 (1 in the quick form, 30 if IDIST_TEST_FULL=1), and fewer over three
// other placements. Then makes calls with sizes around the size of a piece, and frees groups while
// another thread receives.
//
//     hosts MIB PLACEMENT...    runs only the operations, on MIB MiB, over these placements
#ifndef RANKS_MPI
#define IDIST__ANNOUNCE_NS ((int64_t)3600 * 1000000000)
#define IDIST_IMPLEMENTATION
#endif
#include "idist.h"

#include <math.h>

#include "ranks.h"

enum { N_OPERATIONS = 17, BLOCKS = 16 };

typedef struct large {
    size_t nbytes; // size of the larger buffer of each rank
    int rounds;
} large;

typedef struct buffers {
    idist_group *world, *half; // half: the even ranks on an even rank, otherwise the odd ones
    int rank, n;
    size_t count, block; // elements in a whole buffer, and in one of its n blocks
    uint32_t *send, *recv;
    size_t counts[BLOCKS], displs[BLOCKS];
} buffers;

// Returns element i of the input of `rank`.
static uint32_t value_of(int rank, size_t i) {
    return (uint32_t)i * 0x27D4EB2Fu + (uint32_t)(rank + 1) * 0x9E3779B9u;
}

// Returns element i of the sum over ranks lo, lo + step, ... below hi.
static uint32_t sum_of(int lo, int hi, int step, size_t i) {
    uint32_t sum = 0;
    for (int k = lo; k < hi; k += step) sum += value_of(k, i);
    return sum;
}

static void check_sum(const buffers *b, const char *what, const uint32_t *got, size_t first,
                      size_t count, int lo, int hi, int step) {
    uint32_t at_zero = sum_of(lo, hi, step, 0), slope = sum_of(lo, hi, step, 1) - at_zero;
    for (size_t i = 0; i < count; i++) {
        uint32_t want = at_zero + (uint32_t)(first + i) * slope;
        if (got[i] == want) continue;
        rank_fail("%s: rank %d: element %zu of %zu: got %u expected %u", what, b->rank, i, count,
                  got[i], want);
        return;
    }
}

// Checks that the receive buffer holds block number `block` of each rank, in rank order.
static void check_blocks(const buffers *b, const char *what, int block) {
    for (int k = 0; k < b->n; k++)
        check_sum(b, what, b->recv + (size_t)k * b->block, (size_t)block * b->block, b->block, k,
                  k + 1, 1);
}

static void group_calls(const buffers *b) {
    idist_opts world = opts_of(b->world), half = opts_of(b->half);
    size_t quarter = b->count / 4;
    idist_group_begin();
    idist_all_reduce(b->send, b->recv, quarter, IDIST_U32, IDIST_SUM, &world);
    idist_all_reduce(b->send, b->recv + quarter, quarter, IDIST_U32, IDIST_SUM, &half);
    idist_reduce(b->send, b->recv + 2 * quarter, quarter, IDIST_U32, IDIST_SUM, 0, &world);
    rank_ok(b->rank, idist_group_end());
    check_sum(b, "group all_reduce", b->recv, 0, quarter, 0, b->n, 1);
    check_sum(b, "group all_reduce of a half", b->recv + quarter, 0, quarter, b->rank % 2, b->n, 2);
    if (b->rank == 0) check_sum(b, "group reduce", b->recv + 2 * quarter, 0, quarter, 0, b->n, 1);
}

static void requests(const buffers *b) {
    idist_request r[2];
    idist_opts world = opts_async(b->world, &r[0]), half = opts_async(b->half, &r[1]);
    size_t quarter = b->count / 2;
    rank_ok(b->rank, idist_all_reduce(b->send, b->recv, quarter, IDIST_U32, IDIST_SUM, &world));
    rank_ok(b->rank,
            idist_all_reduce(b->send, b->recv + quarter, quarter, IDIST_U32, IDIST_SUM, &half));
    rank_ok(b->rank, idist_wait_all(r, 2));
    check_sum(b, "all_reduce by request", b->recv, 0, quarter, 0, b->n, 1);
    check_sum(b, "all_reduce by request of a half", b->recv + quarter, 0, quarter, b->rank % 2,
              b->n, 2);
}

// Runs one operation on whole buffers. Each element of the result is a sum over ranks or comes from
// one rank.
static void whole_operation(const buffers *b, int which, int root) {
    idist_opts o = opts_of(b->world);
    const int r = b->rank, n = b->n, next = (r + 1) % n, before = (r + n - 1) % n;
    switch (which) {
    case 0:
        rank_ok(r, idist_all_reduce(b->send, b->recv, b->count, IDIST_U32, IDIST_SUM, &o));
        check_sum(b, "all_reduce", b->recv, 0, b->count, 0, n, 1);
        break;
    case 1:
        rank_ok(r, idist_reduce(b->send, b->recv, b->count, IDIST_U32, IDIST_SUM, root, &o));
        if (r == root) check_sum(b, "reduce", b->recv, 0, b->count, 0, n, 1);
        break;
    case 2:
        if (r == root) memcpy(b->recv, b->send, b->count * 4);
        rank_ok(r, idist_broadcast(b->recv, b->count, IDIST_U32, root, &o));
        check_sum(b, "broadcast", b->recv, 0, b->count, root, root + 1, 1);
        break;
    case 3:
        rank_ok(r, idist_scan(b->send, b->recv, b->count, IDIST_U32, IDIST_SUM, &o));
        check_sum(b, "scan", b->recv, 0, b->count, 0, r + 1, 1);
        break;
    case 4:
        rank_ok(r, idist_exscan(b->send, b->recv, b->count, IDIST_U32, IDIST_SUM, &o));
        if (r) check_sum(b, "exscan", b->recv, 0, b->count, 0, r, 1);
        break;
    default:
        rank_ok(r, idist_sendrecv(b->send, b->count, next, 7, b->recv, b->count, before, 7,
                                  IDIST_U32, NULL, &o));
        check_sum(b, "sendrecv", b->recv, 0, b->count, before, before + 1, 1);
        break;
    }
}

// Runs one operation on buffers of one block per rank.
static void block_operation(const buffers *b, int which, int root) {
    idist_opts o = opts_of(b->world);
    const int r = b->rank, n = b->n;
    switch (which) {
    case 5:
        rank_ok(r, idist_reduce_scatter(b->send, b->recv, b->block, IDIST_U32, IDIST_SUM, &o));
        check_sum(b, "reduce_scatter", b->recv, (size_t)r * b->block, b->block, 0, n, 1);
        break;
    case 6:
        rank_ok(r, idist_all_gather(b->send, b->recv, b->block, IDIST_U32, &o));
        check_blocks(b, "all_gather", 0);
        break;
    case 7:
        rank_ok(r, idist_gather(b->send, b->recv, b->block, IDIST_U32, root, &o));
        if (r == root) check_blocks(b, "gather", 0);
        break;
    case 8:
        rank_ok(r, idist_scatter(b->send, b->recv, b->block, IDIST_U32, root, &o));
        check_sum(b, "scatter", b->recv, (size_t)r * b->block, b->block, root, root + 1, 1);
        break;
    case 9:
        rank_ok(r, idist_all_to_all(b->send, b->recv, b->block, IDIST_U32, &o));
        check_blocks(b, "all_to_all", r);
        break;
    case 10:
        rank_ok(r,
                idist_all_gatherv(b->send, b->block, b->recv, b->counts, b->displs, IDIST_U32, &o));
        check_blocks(b, "all_gatherv", 0);
        break;
    case 11:
        rank_ok(r, idist_gatherv(b->send, b->block, b->recv, b->counts, b->displs, IDIST_U32, root,
                                 &o));
        if (r == root) check_blocks(b, "gatherv", 0);
        break;
    case 12:
        rank_ok(r, idist_scatterv(b->send, b->counts, b->displs, b->recv, b->block, IDIST_U32, root,
                                  &o));
        check_sum(b, "scatterv", b->recv, (size_t)r * b->block, b->block, root, root + 1, 1);
        break;
    default:
        rank_ok(r, idist_all_to_allv(b->send, b->counts, b->displs, b->recv, b->counts, b->displs,
                                     IDIST_U32, &o));
        check_blocks(b, "all_to_allv", r);
        break;
    }
}

static void operation(const buffers *b, int which, int root) {
    memset(b->recv, 0x5A, b->count * 4);
    if (which < 5 || which == 14) whole_operation(b, which, root);
    else if (which < 14) block_operation(b, which, root);
    else if (which == 15) group_calls(b);
    else requests(b);
}

static void all_operations(idist_group *world, int rank, int n, void *arg) {
    const large *l = (const large *)arg;
    idist_opts o = opts_of(world);
    buffers b;
    memset(&b, 0, sizeof b);
    b.world = world;
    b.rank = rank;
    b.n = n;
    b.block = l->nbytes / 4 / (size_t)n;
    b.count = b.block * (size_t)n;
    b.send = (uint32_t *)malloc(b.count * 4);
    b.recv = (uint32_t *)malloc(b.count * 4);
    TAP_REQUIRE(b.send && b.recv && n <= BLOCKS);
    for (size_t i = 0; i < b.count; i++) b.send[i] = value_of(rank, i);
    for (int k = 0; k < n; k++) {
        b.counts[k] = b.block;
        b.displs[k] = (size_t)k * b.block;
    }
    if (!rank_ok(rank, idist_split(world, rank % 2, rank, &b.half))) return;
    for (int round = 0; round < l->rounds; round++) {
        alarm((unsigned)(60 * test_slow_factor())); // restarts the alarm of this process
        for (int which = 0; which < N_OPERATIONS; which++)
            operation(&b, which, (round + which) % n);
        if (!rank_ok(rank, idist_barrier(&o))) break;
    }
    rank_ok(rank, idist_free_group(&b.half));
    free(b.send);
    free(b.recv);
}

//------------------------------------------------------------------------------
// calls that are cut into pieces of 512 KiB per host
//------------------------------------------------------------------------------

enum { PIECE = 512 * 1024 / 8 }; // doubles per host

static void fill(double *x, size_t count, int rank) {
    for (size_t i = 0; i < count; i++) x[i] = (double)((i * 7 + (size_t)rank * 13) % 1009);
}

// Checks that each element is the sum over ranks lo .. hi - 1, divided by `divided`.
static void check_parts(const char *what, int rank, const double *x, size_t count, int lo, int hi,
                        double divided) {
    for (size_t i = 0; i < count; i++) {
        double want = 0;
        for (int k = lo; k < hi; k++) want += (double)((i * 7 + (size_t)k * 13) % 1009);
        if (fabs(x[i] - want / divided) < 1e-9) continue;
        rank_fail("%s of %zu: rank %d: element %zu: got %g expected %g", what, count, rank, i, x[i],
                  want / divided);
        return;
    }
}

static void pieces(idist_group *world, int rank, int n, void *arg) {
    const size_t piece = PIECE * *(const size_t *)arg;
    const size_t counts[] = {piece - 1, piece, 2 * piece - 1, 2 * piece + 1, 5 * piece + 7};
    double *x = (double *)malloc((5 * piece + 7) * 8), *y = (double *)malloc((5 * piece + 7) * 8);
    idist_opts o = opts_of(world);
    TAP_REQUIRE(x && y);
    for (size_t k = 0; k < sizeof counts / sizeof counts[0]; k++) {
        const size_t count = counts[k];
        idist_request r[2];
        idist_opts first = opts_async(world, &r[0]), second = opts_async(world, &r[1]);
        int root = (int)k % n;
        fill(x, count, rank);
        rank_ok(rank, idist_all_reduce(x, x, count, IDIST_F64, IDIST_AVG, &o));
        check_parts("average", rank, x, count, 0, n, n);
        fill(x, count, rank);
        rank_ok(rank, idist_reduce(x, y, count, IDIST_F64, IDIST_AVG, root, &o));
        if (rank == root) check_parts("average on a rank", rank, y, count, 0, n, n);
        fill(x, count, rank);
        if (rank == root) fill(y, count, rank);
        rank_ok(rank, idist_broadcast(y, count, IDIST_F64, root, &first));
        rank_ok(rank, idist_all_reduce(x, x, count, IDIST_F64, IDIST_SUM, &second));
        rank_ok(rank, idist_wait_all(r, 2));
        check_parts("broadcast beside a sum", rank, y, count, root, root + 1, 1);
        check_parts("sum beside a broadcast", rank, x, count, 0, n, 1);
    }
    free(x);
    free(y);
}

//------------------------------------------------------------------------------
// idist_free_group reads from the links, perhaps a message that another thread is waiting for
//------------------------------------------------------------------------------

enum { N_FREED = 400 };

typedef struct freeing {
    int turn; // number of the message that is about to be sent; atomic
    idist_group *groups[N_FREED];
    int rank;
} freeing;

static void spin_randomly(uint64_t h) {
    int64_t until = tap_now_ns() + (int64_t)(h % 60000);
    while (tap_now_ns() < until) continue;
}

// Frees group k at about the moment when message k arrives.
static void *free_groups(void *arg) {
    freeing *f = (freeing *)arg;
    for (int k = 0; k < N_FREED; k++) {
        while (__atomic_load_n(&f->turn, __ATOMIC_ACQUIRE) < k + 1) sched_yield();
        spin_randomly(tap_mix(tap_seed() + (uint64_t)k));
        if (!rank_ok(f->rank, idist_free_group(&f->groups[k]))) break;
    }
    return NULL;
}

// Receives in one thread of rank 0 and frees groups in another. The two threads do nothing else
// that would wake each other. A receive that takes 5 seconds has missed its wake-up.
static void free_beside_receive(idist_group *world, int rank, int n, void *arg) {
    freeing *f = (freeing *)arg, mine;
    idist_opts o = opts_of(world);
    pthread_t thread;
    (void)n;
    memset(&mine, 0, sizeof mine);
    for (int k = 0; k < N_FREED; k++)
        if (!rank_ok(rank, idist_split(world, rank, 0, rank ? &mine.groups[k] : &f->groups[k])))
            return;
    if (rank == 0) TAP_REQUIRE(pthread_create(&thread, NULL, free_groups, f) == 0);
    for (int k = 0; k < N_FREED; k++) {
        int got = -1;
        if (rank == 0) {
            int64_t begun = tap_now_ns();
            rank_ok(rank, idist_recv(&got, 1, IDIST_I32, 1, 0, NULL, &o));
            rank_check(got == k, "got %d expected %d", got, k);
            rank_check(tap_now_ns() - begun < 5000000000 * test_slow_factor(),
                       "message %d: the receiver overslept", k);
            rank_ok(rank, idist_send(&k, 1, IDIST_I32, 1, 1, &o));
        } else {
            tap_sleep_ms(1 + k % 2); // so that the receiver falls asleep
            __atomic_store_n(&f->turn, k + 1, __ATOMIC_RELEASE);
            spin_randomly(tap_mix(tap_seed() + 7u * (uint64_t)k));
            rank_ok(rank, idist_send(&k, 1, IDIST_I32, 0, 0, &o));
            rank_ok(rank, idist_recv(&got, 1, IDIST_I32, 0, 1, NULL, &o));
        }
    }
    if (rank == 0) TAP_REQUIRE(pthread_join(thread, NULL) == 0);
    for (int k = 0; k < N_FREED && rank; k++) rank_ok(rank, idist_free_group(&mine.groups[k]));
}

static int ranks_of(const char *placement) {
    int n = 0;
    for (char *end; *placement; placement = *end ? end + 1 : end)
        n += (int)strtol(placement, &end, 10);
    return n;
}

static int run_placements(const char *mib, char **placements, int count) {
    large l = {(size_t)atoi(mib) << 20, 1};
    int slow = test_slow_factor();
    idist_desc d = desc_with("2+2", "auto");
    TAP_REQUIRE(l.nbytes);
    tap_deadline(280 * slow);
    d.timeout_ms = RANKS_TIMEOUT_MS * slow;
    for (int i = 0; i < count; i++) {
        int n = ranks_of(placements[i]);
        TAP_REQUIRE(n > 1 && n <= BLOCKS);
        d.transport = placements[i];
        tap_running("%s", d.transport);
        ranks_reset();
        ranks_processes(n, &d, all_operations, &l, 120000 * slow);
        ranks_report("every operation on %s MiB over %s", mib, d.transport);
    }
    return tap_done();
}

int main(int argc, char **argv) {
    static const struct {
        int n;
        const char *hosts;
    } others[3] = {{9, "3+3+3"}, {10, "5+5"}, {9, "1+6+2"}};
    const char *full = getenv("IDIST_TEST_FULL");
    bool all = full && strcmp(full, "1") == 0;
    large l = {(size_t)32 << 20, all ? 30 : test_quick() ? 1 : 3};
    int slow = test_slow_factor();
    idist_desc d = desc_with("2+2+2+2", "auto");
    if (argc > 2) return run_placements(argv[1], argv + 2, argc - 2);
    tap_deadline((all ? 900 : 150) * slow);
    d.timeout_ms = RANKS_TIMEOUT_MS * slow;
    ranks_reset();
    tap_running("2+2+2+2");
    ranks_processes(8, &d, all_operations, &l, (all ? 600000 : 100000) * slow);
    ranks_report("every operation on 32 MiB, %d times, over 2+2+2+2", l.rounds);
    for (int i = 0; i < 3; i++) {
        d.transport = others[i].hosts;
        l.nbytes = (size_t)(test_quick() ? 8 : 16) << 20;
        l.rounds = all ? 5 : 1;
        tap_running("%s", d.transport);
        ranks_reset();
        ranks_processes(others[i].n, &d, all_operations, &l, 100000 * slow);
        ranks_report("every operation on %zu MiB over %s", l.nbytes >> 20, d.transport);
    }
    for (int i = 0; i < 3; i++) {
        static const struct {
            int n;
            const char *hosts;
            size_t nhosts;
        } cut[3] = {{4, "2+2", 2}, {6, "1+3+2", 3}, {5, "1+1+1+2", 4}};
        size_t nhosts = cut[i].nhosts;
        d.transport = cut[i].hosts;
        ranks_case(cut[i].n, &d, pieces, &nhosts, "calls in pieces over %s", d.transport);
    }
    for (int i = 0; i < N_TRANSPORTS; i++) {
        freeing f;
        memset(&f, 0, sizeof f);
        d.transport = transport_names[i];
        ranks_case(2, &d, free_beside_receive, &f,
                   "groups are freed while another thread sleeps in a receive, %s", d.transport);
    }
    return tap_done();
}
