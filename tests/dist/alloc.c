// alloc: the contents, alignment and lifetime of memory that a host's ranks share. Collectives must
// use this memory in place.
//
// To prove that a collective copies nothing, the tests paint the buffers that copies would pass
// through. The paint must still be intact after the call.
#define IDIST_IMPLEMENTATION
#include "idist.h"

#include "grid.h"

#include <sys/resource.h>
#include <sys/stat.h>

static bool all_are(const unsigned char *p, size_t nbytes, unsigned char value) {
    return nbytes == 0 || (p[0] == value && memcmp(p, p + 1, nbytes - 1) == 0);
}

// Allocates large and small blocks, several at a time, frees them in a different order and
// allocates again. Runs with ranks that are processes and with ranks that are threads.
static void blocks(idist_group *world, int rank, int n, void *arg) {
    enum { K = 12 };
    static const size_t sizes[K] = {
        0, 1, 63, 64, 65, 4095, 4096, 4097, 100000, 1 << 20, (3 << 20) + 5, 7};
    idist_opts o = opts_of(world);
    (void)n;
    (void)arg;
    for (int round = 0; round < 4; round++) {
        unsigned char *p[K];
        for (int i = 0; i < K; i++) {
            p[i] = (unsigned char *)idist_alloc(sizes[i], &o);
            if (!p[i]) {
                rank_fail("rank %d: %zu bytes: %s", rank, sizes[i], idist_last_error());
                return;
            }
            rank_check((uintptr_t)p[i] % 64 == 0, "rank %d: %zu bytes at %p", rank, sizes[i],
                       (void *)p[i]);
            rank_check(all_are(p[i], sizes[i], 0), "rank %d round %d: %zu bytes are not zero", rank,
                       round, sizes[i]);
            memset(p[i], 16 * rank + i, sizes[i]);
        }
        rank_ok(rank, idist_barrier(&o));
        for (int i = 0; i < K; i++)
            rank_check(all_are(p[i], sizes[i], (unsigned char)(16 * rank + i)),
                       "rank %d: block %d was written by another", rank, i);
        for (int i = 0; i < K; i++) idist_free(p[(i * 5 + round) % K]);
    }
}

//------------------------------------------------------------------------------
// shared
//------------------------------------------------------------------------------

static idist__segment *shm_of(idist_group *world) { return idist__ring_of(world->w)->shm; }

// Returns the offset of p in the shared file, or 0 if p is not in the file.
static uint64_t place_of(idist_group *world, const void *p) {
    uint32_t extent;
    idist__view_look(shm_of(world));
    return idist__view_offset(shm_of(world), p, 1, &extent);
}

// Returns when every rank has mapped all memory that the ranks have allocated so far. Collective.
static void all_look(idist_group *world, int rank) {
    idist_opts o = opts_of(world);
    rank_ok(rank, idist_barrier(&o));
    rank_check(idist__view_look(shm_of(world)), "rank %d: a window cannot be mapped", rank);
    rank_ok(rank, idist_barrier(&o));
}

// Checks that all ranks see what a rank writes to its block, and that the rank sees what another
// rank writes there.
static void seen_by_all(idist_group *world, int rank, int n, void *arg) {
    enum { NBYTES = 70000 };
    idist_opts o = opts_of(world);
    uint64_t at[RANKS_MAX], mine;
    unsigned char *p = (unsigned char *)idist_alloc(NBYTES, &o);
    (void)arg;
    if (!p || !shm_of(world) || (mine = place_of(world, p)) == 0) {
        rank_fail("rank %d: %p is not shared", rank, (void *)p);
        return;
    }
    memset(p, rank + 1, NBYTES / 2);
    rank_ok(rank, idist_all_gather(&mine, at, 1, IDIST_U64, &o));
    all_look(world, rank);
    for (int k = 0; k < n; k++) {
        unsigned char *theirs = (unsigned char *)idist__view_pointer(shm_of(world), at[k], NBYTES);
        if (!theirs) {
            rank_fail("rank %d: the memory of rank %d is not mapped", rank, k);
            return;
        }
        rank_check(all_are(theirs, NBYTES / 2, (unsigned char)(k + 1)),
                   "rank %d does not see what rank %d wrote", rank, k);
        if ((k + 1) % n == rank) memset(theirs + NBYTES / 2, rank + 100, NBYTES / 2);
    }
    rank_ok(rank, idist_barrier(&o));
    rank_check(all_are(p + NBYTES / 2, NBYTES / 2, (unsigned char)((rank + 1) % n + 100)),
               "rank %d sees nothing", rank);
    idist_free(p);
}

// Returns this rank's buffers through which copies pass.
static unsigned char *buffers_of(idist_group *world, size_t *nbytes) {
    const idist__share *s = idist__ring_group_of(world)->share;
    *nbytes = IDIST__BUFFERS * s->chunk_nbytes;
    return (unsigned char *)idist__region_buffer(s, idist_group_rank(world), 0);
}

enum { KINDS = 8, BLOCK = 30000 };
static const char *const kind_names[KINDS] = {"all_reduce", "broadcast", "all_gather",
                                              "gather",     "scatter",   "reduce_scatter",
                                              "all_to_all", "scan"};

static idist_status one_kind(int kind, const int32_t *send, int32_t *recv, const idist_opts *o) {
    switch (kind) {
    case 0: return idist_all_reduce(send, recv, BLOCK, IDIST_I32, IDIST_SUM, o);
    case 1: return idist_broadcast(recv, BLOCK, IDIST_I32, 0, o);
    case 2: return idist_all_gather(send, recv, BLOCK, IDIST_I32, o);
    case 3: return idist_gather(send, recv, BLOCK, IDIST_I32, 0, o);
    case 4: return idist_scatter(send, recv, BLOCK, IDIST_I32, 0, o);
    case 5: return idist_reduce_scatter(send, recv, BLOCK, IDIST_I32, IDIST_SUM, o);
    case 6: return idist_all_to_all(send, recv, BLOCK, IDIST_I32, o);
    default: return idist_scan(send, recv, BLOCK, IDIST_I32, IDIST_SUM, o);
    }
}

// Returns element i of block b that rank k sends.
static int32_t gives(int k, int b, int i) { return k * 1000 + b * 100 + i % 97; }

// Returns element i of block b that arrives on rank r.
static int32_t arrives(int kind, int n, int r, int b, int i) {
    int32_t sum = 0;
    if (kind == 1) return gives(0, 7, i);
    if (kind == 2 || kind == 3) return gives(b, 0, i);
    if (kind == 4) return gives(0, r, i);
    if (kind == 6) return gives(b, r, i);
    for (int k = 0; k < (kind == 7 ? r + 1 : n); k++) sum += gives(k, kind == 5 ? r : 0, i);
    return sum;
}

static void check_kind(int kind, int n, int rank, const int32_t *recv) {
    int nblocks = kind == 2 || kind == 6 ? n : kind == 3 ? (rank == 0 ? n : 0) : 1;
    for (int b = 0; b < nblocks; b++)
        for (int i = 0; i < BLOCK; i++) {
            int32_t want = arrives(kind, n, rank, b, i), got = recv[b * BLOCK + i];
            if (got == want) continue;
            rank_fail("rank %d %s: block %d element %d: got %d expected %d", rank, kind_names[kind],
                      b, i, got, want);
            return;
        }
}

// Runs every collective and checks the paint afterwards. If `shared` is true, all user buffers are
// in shared memory and the paint must stay intact. Otherwise the paint must change, or this test
// would prove nothing.
static void nothing_is_copied(idist_group *world, int rank, int n, void *arg) {
    bool shared = *(const bool *)arg;
    size_t nbytes = sizeof(int32_t) * (size_t)(n * BLOCK), npaint;
    idist_opts o = opts_of(world);
    int32_t *send = (int32_t *)(shared ? idist_alloc(nbytes, &o) : malloc(nbytes));
    int32_t *recv = (int32_t *)(shared ? idist_alloc(nbytes, &o) : malloc(nbytes));
    if (!send || !recv || !shm_of(world) || (shared && !place_of(world, send))) {
        rank_fail("rank %d: no shared memory", rank);
        return;
    }
    all_look(world, rank);
    unsigned char *paint = buffers_of(world, &npaint);
    for (int kind = 0; kind < KINDS; kind++) {
        for (int b = 0; b < n; b++)
            for (int i = 0; i < BLOCK; i++) send[b * BLOCK + i] = gives(rank, b, i);
        for (int i = 0; i < BLOCK && kind == 1 && rank == 0; i++) recv[i] = gives(0, 7, i);
        memset(paint, 0xC3, npaint);
        rank_ok(rank, idist_barrier(&o)); // all ranks have painted
        rank_ok(rank, one_kind(kind, send, recv, &o));
        check_kind(kind, n, rank, recv);
        rank_ok(rank, idist_barrier(&o));
        bool untouched = all_are(paint, npaint, 0xC3),
             sends = rank == 0 || (kind != 1 && kind != 4);
        if (shared) rank_check(untouched, "rank %d: %s copied something", rank, kind_names[kind]);
        else if (sends)
            rank_check(!untouched, "rank %d: %s did not go through the buffers", rank,
                       kind_names[kind]);
    }
    if (shared) idist_free(send);
    else free(send);
    if (shared) idist_free(recv);
    else free(recv);
}

// Places each rank's send and receive buffers in shared or in private memory, in all combinations.
static void some_of_them(idist_group *world, int rank, int n, void *arg) {
    static const size_t counts[3] = {5, 5000, 300001};
    idist_opts o = opts_of(world);
    grid_case c;
    (void)arg;
    memset(&c, 0, sizeof c);
    c.world = world;
    c.n = n;
    c.rank = rank;
    c.dtype = IDIST_I32;
    c.op = IDIST_SUM;
    for (unsigned mask = 0; mask < 1u << (2 * n); mask++) {
        bool own_send = mask >> (2 * rank) & 1, own_recv = mask >> (2 * rank) & 2,
             small = mask % 4 != 0;
        c.count = small ? counts[mask % 2] : counts[2];
        c.salt = mask;
        c.where = "some ranks";
        size_t nbytes = c.count * 4;
        void *send = own_send ? idist_alloc(nbytes, &o) : malloc(nbytes);
        void *recv = own_recv ? idist_alloc(nbytes, &o) : malloc(nbytes);
        TAP_REQUIRE(send && recv);
        reduced_fill(send, c.dtype, c.op, n, 0, c.count, rank, c.salt);
        rank_ok(rank, idist_all_reduce(send, recv, c.count, c.dtype, c.op, &o));
        grid_check_reduced(&c, recv, 0, n, 0, c.count);
        rank_ok(rank,
                idist_reduce(send, recv, c.count, c.dtype, c.op, (int)(mask % (unsigned)n), &o));
        if ((int)(mask % (unsigned)n) == rank) grid_check_reduced(&c, recv, 0, n, 0, c.count);
        rank_ok(rank, idist_all_reduce(send, send, c.count, c.dtype, c.op, &o));
        grid_check_reduced(&c, send, 0, n, 0, c.count);
        if (own_send) idist_free(send);
        else free(send);
        if (own_recv) idist_free(recv);
        else free(recv);
    }
}

// Checks that freed memory is returned to the system.
static void pages_go_back(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    struct stat before, after;
    (void)n;
    (void)arg;
    rank_ok(rank, idist_barrier(&o));
    TAP_REQUIRE(fstat(shm_of(world)->fd, &before) == 0);
    rank_ok(rank, idist_barrier(&o));
    for (int i = 0; i < 200; i++) {
        unsigned char *p = (unsigned char *)idist_alloc(1 << 20, &o);
        if (!p) {
            rank_fail("rank %d: block %d: %s", rank, i, idist_last_error());
            return;
        }
        p[i * 5000] = 1;
        idist_free(p);
    }
    rank_ok(rank, idist_barrier(&o));
    TAP_REQUIRE(fstat(shm_of(world)->fd, &after) == 0);
    rank_check(after.st_blocks <= before.st_blocks,
               "rank %d: %lld blocks of 512 bytes, before %lld", rank, (long long)after.st_blocks,
               (long long)before.st_blocks);
    rank_ok(rank, idist_barrier(&o));
}

// Makes the rank's window of shared memory (base/window.h) grow by allocating blocks of many sizes.
// Runs collectives in the world's group, then in a group of half of the ranks. After these calls,
// all extents (parts) of the window must be open to this group, so that its members read the blocks
// in place.
static void grows(idist_group *world, int rank, int n, void *arg) {
    static const size_t counts[5] = {1000, 300000, 40000, 3000000, 2000000};
    idist_opts o = opts_of(world), in_half = o;
    idist_group *half = NULL;
    int32_t *x[5];
    (void)arg;
    rank_ok(rank, idist_split(world, rank % 2, rank, &half));
    in_half.group = half;
    for (int i = 0; i < 5; i++) {
        x[i] = (int32_t *)idist_alloc(4 * counts[i], &o);
        TAP_REQUIRE(x[i]);
        for (size_t k = 0; k < counts[i]; k++) x[i][k] = rank + (int)(k % 89);
        rank_ok(rank, idist_all_reduce(x[i], x[i], counts[i], IDIST_I32, IDIST_SUM, &o));
        for (size_t k = 0; k < counts[i]; k++) {
            if (x[i][k] == n * (n - 1) / 2 + n * (int)(k % 89)) continue;
            rank_fail("rank %d: block %d element %zu: got %d", rank, i, k, x[i][k]);
            break;
        }
    }
    rank_check(shm_of(world)->window->extent_count > 2, "rank %d: %u extents", rank,
               shm_of(world)->window->extent_count);
    // By the third call all members have mapped each other's memory.
    for (int i = 0; i < 3; i++)
        rank_ok(rank, idist_all_reduce(x[4], x[4], counts[4], IDIST_I32, IDIST_MAX, &in_half));
    if (idist_group_size(half) > 1)
        rank_check(idist__ring_group_of(half)->share->extents_open ==
                       shm_of(world)->window->extent_count,
                   "rank %d: %u of %u extents are open", rank,
                   idist__ring_group_of(half)->share->extents_open,
                   shm_of(world)->window->extent_count);
    for (int i = 0; i < 5; i++) idist_free(x[i]);
    rank_ok(rank, idist_free_group(&half));
}

// Limits the address space of one rank so that it cannot map the memory of the other ranks. The
// ranks must copy instead, and no call may fail.
static int cannot_map(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    enum { COUNT = 5000000 };
    idist_opts o = opts_of(world);
    struct rlimit limit = {(rlim_t)1 << 27, (rlim_t)1 << 27};
    int32_t *x = (int32_t *)(rank == 1 ? malloc(4 * COUNT) : idist_alloc(4 * COUNT, &o));
    int32_t *y = (int32_t *)malloc(4 * COUNT);
    (void)slot;
    (void)arg;
    if (!x || !y || (rank == 1 && setrlimit(RLIMIT_AS, &limit) != 0)) return 91;
    for (int i = 0; i < 4; i++) {
        for (int k = 0; k < COUNT; k++) x[k] = rank + k % 101;
        rank_ok(rank, idist_all_reduce(x, y, COUNT, IDIST_I32, IDIST_SUM, &o));
        for (int k = 0; k < COUNT; k++) {
            if (y[k] == n * (n - 1) / 2 + n * (k % 101)) continue;
            rank_fail("rank %d: call %d element %d: got %d", rank, i, k, y[k]);
            break;
        }
    }
    if (rank == 1) rank_check(shm_of(world)->maps_no_more, "rank 1 has mapped everything");
    else
        rank_check(idist__ring_group_of(world)->share->extents_open == 0,
                   "rank %d: its window is open", rank);
    return idist_close(&world) == IDIST_OK ? 0 : 1;
}

static void without_addresses(void) {
    const char *name = "a rank that cannot map the memory of another one costs a copy";
    procs p;
    if (test_sanitized()) {
        tap_skip(name, "a sanitizer needs the address space");
        return;
    }
    tap_running("%s", name);
    ranks_reset();
    procs_start(&p, 8, NULL, cannot_map, NULL);
    rank_check(procs_wait(&p, 20000) == 0, "hang");
    for (int k = 0; k < 8; k++)
        rank_check(p.wait_status[k] == 0, "rank %d: wait status 0x%x", k,
                   (unsigned)p.wait_status[k]);
    ranks_report("%s", name);
    procs_free(&p);
}

//------------------------------------------------------------------------------
// life
//------------------------------------------------------------------------------

static int count_mappings(void) {
    char line[600];
    int n = 0;
    FILE *f = fopen("/proc/self/maps", "r");
    TAP_REQUIRE(f != NULL);
    while (fgets(line, sizeof line, f)) n += strstr(line, "memfd:idist") != NULL;
    fclose(f);
    return n;
}

// Frees blocks after the world is closed. Freeing the last block must release the shared memory.
static int outlives(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    idist_opts o = opts_of(world);
    unsigned char *p = (unsigned char *)idist_alloc(10000, &o),
                  *q = (unsigned char *)idist_alloc(50, &o);
    (void)n;
    (void)slot;
    (void)arg;
    if (!p || !q) return 91;
    int fds = count_fds();
    memset(p, rank + 1, 10000);
    rank_ok(rank, idist_close(&world));
    rank_check(all_are(p, 10000, (unsigned char)(rank + 1)), "rank %d: the block changed", rank);
    memset(p, 0x77, 10000);
    idist_free(q);
    rank_check(count_mappings() > 0 && all_are(p, 10000, 0x77), "rank %d: the other block changed",
               rank);
    idist_free(p);
    rank_check(count_mappings() == 0, "rank %d: something is still mapped", rank);
    rank_check(count_fds() < fds, "rank %d: %d descriptors, before %d", rank, count_fds(), fds);
    unsigned char *plain = (unsigned char *)idist_alloc(100, NULL); // without a world
    rank_check(plain && all_are(plain, 100, 0), "rank %d: plain memory", rank);
    idist_free(plain);
    return 0;
}

static void after_the_end(void) {
    for (int n = 2; n <= 4; n += 2) {
        procs p;
        tap_running("free after the end of the world, n=%d", n);
        ranks_reset();
        procs_start(&p, n, NULL, outlives, NULL);
        rank_check(procs_wait(&p, 10000) == 0, "hang");
        for (int k = 0; k < n; k++)
            rank_check(p.wait_status[k] == 0, "rank %d: wait status 0x%x", k,
                       (unsigned)p.wait_status[k]);
        ranks_report("blocks outlive their world, n=%d", n);
        procs_free(&p);
    }
}

// Frees the parent's blocks in a child made by fork. The blocks must remain the parent's, and a
// block that the child allocates must belong to the child.
static int forks(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    idist_opts o = opts_of(world);
    unsigned char *p = (unsigned char *)idist_alloc(100000, &o);
    int wait_status = 1;
    (void)n;
    (void)slot;
    (void)arg;
    if (!p) return 91;
    memset(p, rank + 1, 100000);
    pid_t pid = fork();
    if (pid == 0) {
        unsigned char *own = (unsigned char *)idist_alloc(4096, &o);
        bool ok = own && all_are(own, 4096, 0) && all_are(p, 100000, (unsigned char)(rank + 1));
        if (own) memset(own, 0xEE, 4096);
        idist_free(p);
        idist_free(own);
        _exit(ok ? 0 : 1);
    }
    TAP_REQUIRE(pid > 0 && waitpid(pid, &wait_status, 0) == pid);
    rank_check(wait_status == 0, "rank %d: the child: wait status 0x%x", rank,
               (unsigned)wait_status);
    rank_check(all_are(p, 100000, (unsigned char)(rank + 1)),
               "rank %d: the child's free took the parent's data", rank);
    unsigned char *q = (unsigned char *)idist_alloc(100000, &o);
    rank_check(q && q != p && all_are(q, 100000, 0), "rank %d: the block was given away", rank);
    rank_ok(rank, idist_all_reduce(p, p, 100000, IDIST_U8, IDIST_MAX, &o));
    rank_check(all_are(p, 100000, (unsigned char)n), "rank %d: wrong maximum", rank);
    idist_free(p);
    idist_free(q);
    return idist_close(&world) == IDIST_OK ? 0 : 1;
}

static void forked(void) {
    procs p;
    tap_running("free in a child made by fork");
    ranks_reset();
    procs_start(&p, 2, NULL, forks, NULL);
    rank_check(procs_wait(&p, 10000) == 0, "hang");
    for (int k = 0; k < 2; k++)
        rank_check(p.wait_status[k] == 0, "rank %d: wait status 0x%x", k,
                   (unsigned)p.wait_status[k]);
    ranks_report("free in a child made by fork leaves the parent's data alone");
    procs_free(&p);
}

static void exhausted(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    (void)arg;
    // Sets an error text that does not mention an allocation, so that the checks below recognize a
    // new text.
    rank_is(rank, idist_send(&n, 1, IDIST_I32, n, 0, &o), IDIST_ERR_ARG);
    if (!test_sanitized()) // a sanitizer ends the program instead
        rank_check(idist_alloc(SIZE_MAX / 4, &o) == NULL, "rank %d: there is that much memory",
                   rank);
    rank_check(idist_alloc(SIZE_MAX, &o) == NULL && strstr(idist_last_error(), "alloc"),
               "rank %d: got \"%s\"", rank, idist_last_error());
    void *p = idist_alloc(1000, &o);
    rank_check(p != NULL, "rank %d: nothing is left", rank);
    idist_free(p);
    idist_free(NULL);
}

// Allocates under a limit until no memory is left, frees everything and starts again.
static int runs_out(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    enum { MOST = 100 };
    static void *p[MOST];
    struct rlimit limit = {(rlim_t)64 << 20, (rlim_t)64 << 20};
    (void)n;
    (void)slot;
    (void)arg;
    // The world has no shared memory, so idist_alloc returns plain memory.
    if (setrlimit(RLIMIT_AS, &limit) != 0) return 91;
    idist_opts o = opts_of(world);
    for (int round = 0; round < 3; round++) {
        int k = 0;
        while (k < MOST && (p[k] = idist_alloc(2 << 20, &o)) != NULL) k++;
        rank_check(k > 0 && k < MOST && strstr(idist_last_error(), "alloc"),
                   "rank %d: after %d blocks: \"%s\"", rank, k, idist_last_error());
        while (k > 0) idist_free(p[--k]);
    }
    return idist_close(&world) == IDIST_OK ? 0 : 1;
}

static void at_a_limit(void) {
    procs p;
    idist_desc d = desc_with("socket", "auto");
    const char *name = "at a limit idist_alloc gives NULL, and memory again after idist_free";
    if (test_sanitized()) {
        tap_skip(name, "a sanitizer needs the address space");
        return;
    }
    tap_running("%s", name);
    ranks_reset();
    procs_start(&p, 2, &d, runs_out, NULL);
    rank_check(procs_wait(&p, 10000) == 0, "hang");
    for (int k = 0; k < 2; k++)
        rank_check(p.wait_status[k] == 0, "rank %d: wait status 0x%x", k,
                   (unsigned)p.wait_status[k]);
    ranks_report("%s", name);
    procs_free(&p);
}

// Allocates memory in one world and uses it in collectives of another world and of a group of that
// world, even after the first world is closed. Frees memory after its own world is closed.
static void two_worlds(idist_group *world, int rank, int n, void *arg) {
    enum { COUNT = 50000 };
    idist_group *w[2] = {NULL, NULL}, *half = NULL;
    idist_opts o[2], main_o = opts_of(world);
    int32_t *x[2];
    for (int i = 0; i < 2; i++) {
        idist_desc d = desc_with("auto", "auto");
        d.store = ((idist_store **)arg)[i];
        d.world_size = n;
        d.rank = i ? n - 1 - rank : rank;
        d.timeout_ms = d.init_timeout_ms = RANKS_TIMEOUT_MS;
        if (!rank_ok(rank, idist_open(&d, &w[i]))) return;
        o[i] = opts_of(w[i]);
        x[i] = (int32_t *)idist_alloc(4 * COUNT, &o[i]);
        TAP_REQUIRE(x[i]);
        rank_check(place_of(w[i], x[i]) && !place_of(w[1 - i] ? w[1 - i] : world, x[i]),
                   "rank %d: block %d", rank, i);
    }
    for (int i = 0; i < 4; i++) {
        int32_t *from = x[i & 1], *to = x[1 - (i & 1)];
        for (int k = 0; k < COUNT; k++) from[k] = rank + k % 101;
        rank_ok(rank, idist_all_reduce(from, to, COUNT, IDIST_I32, IDIST_SUM, &o[i >> 1]));
        for (int k = 0; k < COUNT; k++) {
            if (to[k] == n * (n - 1) / 2 + n * (k % 101)) continue;
            rank_fail("rank %d: call %d element %d: got %d", rank, i, k, to[k]);
            break;
        }
    }
    rank_ok(rank, idist_split(w[1], rank % 2, rank, &half));
    rank_ok(rank, idist_close(&w[0]));
    idist_opts in_half = opts_of(half);
    for (int k = 0; k < COUNT; k++) x[0][k] = x[1][k] = 1;
    // The world that x[0] belongs to is closed.
    rank_ok(rank, idist_all_reduce(x[0], x[0], COUNT, IDIST_I32, IDIST_SUM, &in_half));
    rank_ok(rank, idist_all_reduce(x[1], x[1], COUNT, IDIST_I32, IDIST_SUM, &in_half));
    rank_check(x[0][COUNT - 1] == idist_group_size(half) && x[1][0] == idist_group_size(half),
               "rank %d: wrong sum", rank);
    idist_free(x[0]);
    rank_ok(rank, idist_free_group(&half));
    rank_ok(rank, idist_barrier(&main_o));
    rank_ok(rank, idist_close(&w[1]));
    idist_free(x[1]);
}

int main(void) {
    bool yes = true, no = false;
    idist_desc chunked = desc_with("auto", "chunked"), automatic = desc_with("auto", "auto");
    tap_deadline(60);
    (void)ranks__log();
    for (int n = 1; n <= 4; n++) {
        ranks_case(n, NULL, blocks, NULL, "blocks are aligned, zeroed, apart n=%d", n);
        if (n > 1)
            procs_case(n, NULL, blocks, NULL, "blocks are aligned, zeroed, apart n=%d, processes",
                       n);
    }
    for (int t = 1; t < N_TRANSPORTS; t++) {
        idist_desc d = desc_with(transport_names[t], "auto");
        ranks_case(2, &d, blocks, NULL, "plain memory, %s", d.transport);
    }
    for (int n = 2; n <= 5; n++) {
        ranks_case(n, NULL, seen_by_all, NULL, "all ranks see it n=%d", n);
        procs_case(n, NULL, seen_by_all, NULL, "all ranks see it n=%d, processes", n);
        procs_case(n, &automatic, nothing_is_copied, &yes, "collectives copy nothing n=%d", n);
        procs_case(n, &chunked, nothing_is_copied, &yes, "collectives copy nothing n=%d, chunked",
                   n);
        procs_case(n, &chunked, nothing_is_copied, &no,
                   "collectives copy private memory n=%d, chunked", n);
    }
    for (int n = 2; n <= 3; n++) {
        ranks_case(n, &automatic, some_of_them, NULL, "some buffers of some ranks n=%d", n);
        ranks_case(n, &chunked, some_of_them, NULL, "some buffers of some ranks n=%d, chunked", n);
        procs_case(n, &automatic, some_of_them, NULL, "some buffers of some ranks n=%d, processes",
                   n);
    }
    ranks_case(2, NULL, pages_go_back, NULL, "pages go back n=2");
    procs_case(3, NULL, pages_go_back, NULL, "pages go back n=3, processes");
    for (int n = 2; n <= 4; n++)
        procs_case(n, NULL, grows, NULL, "windows grow n=%d, processes", n);
    ranks_case(2, NULL, grows, NULL, "windows grow n=2");
    without_addresses();
    after_the_end();
    forked();
    ranks_case(2, NULL, exhausted, NULL, "more than there is");
    at_a_limit();
    for (int n = 2; n <= 4; n += 2) {
        idist_store *store[2] = {NULL, NULL};
        for (int i = 0; i < 2; i++)
            TAP_REQUIRE(idist_store_open("mem://", NULL, &store[i]) == IDIST_OK);
        ranks_case(n, NULL, two_worlds, store, "memory of another world n=%d", n);
        for (int i = 0; i < 2; i++) idist_store_close(&store[i]);
    }
    return tap_done();
}
