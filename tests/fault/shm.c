// shm: what can go wrong where ranks share memory: limits, calls the kernel refuses, ranks that
// disagree; ranks that die, stop or sleep while others spin, sleep, or read their memory
//
// Where there is no shared memory the ranks fall back, to sockets or to copying less directly, and
// nobody notices. What a world got is seen in its address space: the file appears there as
// "memfd:idist".
#include <fcntl.h>
static int reserve_in_file(int fd, off_t at, off_t nbytes);
#define IDIST_IMPLEMENTATION
#define posix_fallocate reserve_in_file
#include "idist.h"
#undef posix_fallocate

#include "ranks.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/resource.h>

enum { LOST_LIMIT_MS = 50, PERIOD = 1021 };
#define MIB ((size_t)1 << 20)

// ---- values that repeat with a period that divides nothing ----

static int32_t value_of(int rank, int step, size_t i) {
    return (rank + 1) * 1000 + step * 17 + (int32_t)(i % PERIOD);
}

static void fill(int32_t *x, size_t count, int rank, int step) {
    for (size_t i = 0; i < count && i < PERIOD; i++) x[i] = value_of(rank, step, i);
    for (size_t have = PERIOD; have < count; have *= 2)
        memcpy(x + have, x, 4 * (count - have < have ? count - have : have));
}

// Index of the first element that is not the sum over ranks lo .. hi - 1; count when all are right.
static size_t find_wrong(const int32_t *x, size_t count, int lo, int hi, int step) {
    for (size_t i = 0; i < count && i < PERIOD; i++) {
        int32_t want = 0;
        for (int k = lo; k < hi; k++) want += value_of(k, step, i);
        if (x[i] != want) return i;
    }
    if (count <= PERIOD || memcmp(x + PERIOD, x, 4 * (count - PERIOD)) == 0) return count;
    for (size_t i = PERIOD; i < count; i++)
        if (x[i] != x[i - PERIOD]) return i;
    return count;
}

// ---- a world that must work, whatever it has to do without ----

static void all_sorts(idist_group *world, int rank, int n) {
    static const size_t counts[5] = {1, 9, 1024, 40000, 700001};
    idist_opts o = opts_of(world);
    int right = (rank + 1) % n, left = (rank + n - 1) % n;
    for (int i = 0; i < 10; i++) {
        size_t count = counts[i % 5], bytes = 4 * count;
        bool own = i >= 5;
        int32_t *x = (int32_t *)(own ? idist_alloc(bytes, &o) : malloc(bytes));
        int32_t *y = (int32_t *)(own ? idist_alloc(bytes, &o) : malloc(bytes));
        int32_t *all = (int32_t *)malloc(bytes * (size_t)n);
        if (!x || !y || !all) {
            rank_fail("rank %d: no memory: %s", rank, idist_last_error());
            return;
        }
        fill(x, count, rank, i);
        rank_ok(rank, idist_all_reduce(x, y, count, IDIST_I32, IDIST_SUM, &o));
        rank_check(find_wrong(y, count, 0, n, i) == count, "rank %d: all_reduce of %zu is wrong",
                   rank, count);
        rank_ok(rank, idist_all_gather(x, all, count, IDIST_I32, &o));
        for (int k = 0; k < n; k++)
            rank_check(find_wrong(all + (size_t)k * count, count, k, k + 1, i) == count,
                       "rank %d: all_gather of %zu is wrong", rank, count);
        rank_ok(rank, idist_sendrecv(x, count, right, 0, y, count, left, 0, IDIST_I32, NULL, &o));
        rank_check(find_wrong(y, count, left, left + 1, i) == count,
                   "rank %d: sendrecv of %zu is wrong", rank, count);
        rank_ok(rank, idist_broadcast(y, count, IDIST_I32, 0, &o));
        rank_check(find_wrong(y, count, n - 1, n, i) == count, "rank %d: broadcast of %zu is wrong",
                   rank, count);
        free(all);
        if (own) idist_free(x);
        else free(x);
        if (own) idist_free(y);
        else free(y);
    }
    rank_ok(rank, idist_barrier(&o));
}

// Bytes of the shared file in our address space; *inode says which file (may be NULL).
static size_t shared_bytes(pid_t pid, unsigned long *inode) {
    char path[64], line[600];
    size_t total = 0;
    snprintf(path, sizeof path, "/proc/%d/maps", (int)pid);
    FILE *f = fopen(path, "r");
    if (!f) return 0;
    while (fgets(line, sizeof line, f)) {
        unsigned long from, to, node;
        if (!strstr(line, "memfd:idist")) continue;
        if (sscanf(line, "%lx-%lx %*s %*s %*s %lu", &from, &to, &node) != 3) continue;
        total += to - from;
        if (inode) *inode = node;
    }
    fclose(f);
    return total;
}

// A number of KiB from /proc/self/status, such as "VmLck:"; -1: it is not there.
static long status_kib(const char *field) {
    char line[200];
    long kib = -1;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof line, f))
        if (strncmp(line, field, strlen(field)) == 0) kib = atol(line + strlen(field));
    if (f) fclose(f);
    return kib;
}

// ---- what is taken away ----

typedef enum {
    NOTHING,
    ADDRESS_SPACE,
    LOCKED_MEMORY, // the rank locks all its memory; no limit: amount 0
    FILE_SIZE,
    RESERVATIONS,
    SYSCALL,
    UNDUMPABLE,
    MIB_VARIABLE
} loss;

static int reservations_left = -1; // that succeed; -1: all

static int reserve_in_file(int fd, off_t at, off_t nbytes) {
    if (reservations_left == 0) return ENOSPC;
    if (reservations_left > 0) reservations_left--;
    return posix_fallocate(fd, at, nbytes);
}

// What a world must have got.
typedef enum { ANY, SHARED, NO_WINDOWS, NOT_SHARED } outcome;

typedef struct without {
    const char *name;
    loss what;
    long amount;      // bytes, MiB, reservations, or the number of a system call
    int who;          // rank, -1: all
    outcome expected; // of all ranks
    int n, port;
    const char *transport; // of rank 1
    size_t shm_nbytes;
} without;

static size_t address_space(void) {
    unsigned long pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (!f) return 0;
    if (fscanf(f, "%lu", &pages) != 1) pages = 0;
    fclose(f);
    return pages * (size_t)sysconf(_SC_PAGESIZE);
}

static bool forbid(long number) {
    struct sock_filter code[4] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS,
                                           offsetof(struct seccomp_data, nr)),
                                  BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)number, 0, 1),
                                  BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
                                  BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    struct sock_fprog program = {4, code};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return false;
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

static bool take_away(const without *w) {
    struct rlimit limit;
    char text[32];
    switch (w->what) {
    case ADDRESS_SPACE:
        limit.rlim_cur = limit.rlim_max = address_space() + (size_t)w->amount;
        return setrlimit(RLIMIT_AS, &limit) == 0;
    case LOCKED_MEMORY:
        // Who may lock memory without a limit is not held to this one.
        limit.rlim_cur = limit.rlim_max = w->amount ? address_space() + (rlim_t)w->amount : 0;
        if (setrlimit(RLIMIT_MEMLOCK, &limit) != 0) return false;
        return mlockall(MCL_CURRENT | MCL_FUTURE) == 0;
    case FILE_SIZE:
        limit.rlim_cur = limit.rlim_max = (rlim_t)w->amount;
        return setrlimit(RLIMIT_FSIZE, &limit) == 0;
    case SYSCALL: return forbid(w->amount);
    case RESERVATIONS: reservations_left = (int)w->amount; return true;
    case UNDUMPABLE: return prctl(PR_SET_DUMPABLE, 0) == 0;
    case MIB_VARIABLE:
        snprintf(text, sizeof text, "%ld", w->amount);
        return setenv("IDIST_SHM_MIB", text, 1) == 0;
    default: return true;
    }
}

// Root reads all memory, and may lock all of it. Makes every rank another user for that.
static bool becomes_a_user(const without *w) {
    if (w->what != UNDUMPABLE && !(w->what == LOCKED_MEMORY && w->amount)) return true;
    if (geteuid() == 0 && setuid(65534) != 0) return false;
    prctl(PR_SET_DUMPABLE, 1); // lost with the user
    return true;
}

// Returns true if a process may take it away from itself. A rank that found out when the others
// have begun to join would leave them waiting for it.
static bool may_live_without(const without *w) {
    int status = -1;
    pid_t pid = fork();
    TAP_REQUIRE(pid >= 0);
    if (pid == 0) _exit(becomes_a_user(w) && take_away(w) ? 0 : 1);
    TAP_REQUIRE(waitpid(pid, &status, 0) == pid);
    return status == 0;
}

enum { CANNOT = 77 };

static int works_without(int number, void *arg) {
    const without *w = (const without *)arg;
    idist_desc d = desc_with(number == 1 ? w->transport : "auto", "auto");
    idist_group *world = NULL;
    char url[64];
    alarm((unsigned)(60 * test_slow_factor()));
    TAP_REQUIRE(becomes_a_user(w));
    if (w->who < 0 || w->who == number) TAP_REQUIRE(take_away(w));
    snprintf(url, sizeof url, "tcp://127.0.0.1:%d", w->port);
    d.init_method = url;
    d.rank = number;
    d.world_size = w->n;
    d.shm_nbytes = w->shm_nbytes;
    d.timeout_ms = d.init_timeout_ms = RANKS_TIMEOUT_MS;
    if (!rank_ok(number, idist_open(&d, &world))) return 1;
    const idist__segment *m = idist__ring_of(world->w)->shm;
    size_t shared = shared_bytes(getpid(), NULL);
    if (w->expected == SHARED || w->expected == NO_WINDOWS) {
        rank_check(m && shared == m->window_at, "rank %d: %zu bytes are shared", number, shared);
        rank_check(m && !m->window == (w->expected == NO_WINDOWS), "rank %d: %s", number,
                   m && m->window ? "there is a window" : "there is no window");
    }
    if (w->expected == NOT_SHARED)
        rank_check(!m && shared == 0, "rank %d: %zu bytes are shared", number, shared);
    if (w->expected == NOT_SHARED && (w->what == ADDRESS_SPACE || w->what == LOCKED_MEMORY))
        rank_check(strstr(world->w->about.sharing, "limited to") != NULL, "rank %d: \"%s\"", number,
                   world->w->about.sharing);
    if (w->what == LOCKED_MEMORY && !w->amount)
        rank_check(status_kib("VmLck:") < 512 << 10, "rank %d: %ld KiB are locked", number,
                   status_kib("VmLck:"));
    all_sorts(world, number, w->n);
    idist_group *group = NULL;
    if (!rank_ok(number, idist_split(world, 0, number, &group))) return 1;
    all_sorts(group, number, w->n);
    all_sorts(world, number, w->n);
    idist_free_group(&group);
    rank_ok(number, idist_close(&world));
    rank_check(shared_bytes(getpid(), NULL) == 0, "rank %d: something is still mapped", number);
    return 0;
}

static void one_loss(without w) {
    procs p;
    tap_running("%s", w.name);
    if (!may_live_without(&w)) {
        tap_skip(w.name, "this process cannot do that to itself");
        return;
    }
    ranks_reset();
    memset(&p, 0, sizeof p);
    p.n = w.n;
    w.port = free_port();
    if (!w.transport) w.transport = "auto";
    fflush(NULL);
    for (int k = 0; k < w.n; k++) {
        p.pid[k] = fork();
        TAP_REQUIRE(p.pid[k] >= 0);
        if (p.pid[k] == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            _exit(works_without(k, &w));
        }
        tap_register_child(p.pid[k]);
    }
    int n_hung = procs_wait(&p, 30000);
    rank_check(n_hung == 0, "%d ranks hang", n_hung);
    for (int k = 0; k < w.n; k++)
        rank_check(p.wait_status[k] == 0, "rank %d: wait status 0x%x", k,
                   (unsigned)p.wait_status[k]);
    ranks_report("%s", w.name);
}

static void losses(void) {
    static const without all[] = {
        {"nothing is missing", NOTHING, 0, -1, SHARED, 3, 0, NULL, 0},
        {"file sizes limited to 64 KiB", FILE_SIZE, 65536, -1, NOT_SHARED, 3, 0, NULL, 0},
        {"file sizes limited, on the lowest rank", FILE_SIZE, 65536, 0, NOT_SHARED, 3, 0, NULL, 0},
        {"file sizes limited, on another rank", FILE_SIZE, 65536, 1, ANY, 3, 0, NULL, 0},
        {"file sizes limited to 64 MiB", FILE_SIZE, 64 << 20, -1, NO_WINDOWS, 3, 0, NULL, 0},
        {"memfd_create is forbidden", SYSCALL, SYS_memfd_create, -1, NOT_SHARED, 3, 0, NULL, 0},
        {"memfd_create is forbidden on the lowest rank", SYSCALL, SYS_memfd_create, 0, NOT_SHARED,
         3, 0, NULL, 0},
        {"fallocate is forbidden on one rank", SYSCALL, SYS_fallocate, 1, ANY, 3, 0, NULL, 0},
        {"memory for the pipes of one rank only", RESERVATIONS, 2, 1, NOT_SHARED, 3, 0, NULL, 0},
        {"memory for half a region of one rank", RESERVATIONS, 3, 1, NOT_SHARED, 3, 0, NULL, 0},
        {"memory for the world's region of one rank only", RESERVATIONS, 4, 1, SHARED, 3, 0, NULL,
         0},
        {"process_vm_readv is forbidden", SYSCALL, SYS_process_vm_readv, -1, SHARED, 3, 0, NULL, 0},
        {"process_vm_readv is forbidden, 2 ranks", SYSCALL, SYS_process_vm_readv, -1, SHARED, 2, 0,
         NULL, 0},
        {"process_vm_readv is forbidden on one rank", SYSCALL, SYS_process_vm_readv, 1, SHARED, 2,
         0, NULL, 0},
        {"membarrier is forbidden", SYSCALL, SYS_membarrier, -1, SHARED, 2, 0, NULL, 0},
        {"membarrier is forbidden on one rank", SYSCALL, SYS_membarrier, 1, SHARED, 2, 0, NULL, 0},
        {"memory cannot be read by others", UNDUMPABLE, 0, -1, SHARED, 2, 0, NULL, 0},
        {"memory of one rank cannot be read by others", UNDUMPABLE, 0, 1, SHARED, 2, 0, NULL, 0},
        {"IDIST_SHM_MIB=1", MIB_VARIABLE, 1, -1, SHARED, 3, 0, NULL, 0},
        {"IDIST_SHM_MIB=2", MIB_VARIABLE, 2, -1, SHARED, 8, 0, NULL, 0},
        {"IDIST_SHM_MIB=64", MIB_VARIABLE, 64, -1, SHARED, 2, 0, NULL, 0},
        {"IDIST_SHM_MIB=1 on one rank", MIB_VARIABLE, 1, 1, SHARED, 3, 0, NULL, 0},
        {"rank 1 of 2 wants sockets", NOTHING, 0, -1, NOT_SHARED, 2, 0, "socket", 0},
        {"rank 1 of 3 wants sockets", NOTHING, 0, -1, ANY, 3, 0, "socket", 0},
        {"rank 1 of 4 wants sockets", NOTHING, 0, -1, ANY, 4, 0, "socket", 0},
    };
    static const without limited[] = {
        {"an address space with room for shares only", ADDRESS_SPACE, 256 << 20, -1, SHARED, 3, 0,
         NULL, 0},
        {"an address space without room", ADDRESS_SPACE, 40 << 20, -1, NOT_SHARED, 3, 0, NULL,
         16 << 20},
        {"an address space without room, on one rank", ADDRESS_SPACE, 40 << 20, 1, NOT_SHARED, 3, 0,
         NULL, 16 << 20},
        {"all memory is locked", LOCKED_MEMORY, 0, -1, SHARED, 3, 0, NULL, 0},
        {"all memory is locked, on one rank", LOCKED_MEMORY, 0, 1, SHARED, 3, 0, NULL, 0},
        {"all memory is locked, up to a limit", LOCKED_MEMORY, 40 << 20, -1, NOT_SHARED, 3, 0, NULL,
         16 << 20},
        {"all memory is locked, up to a limit, on one rank", LOCKED_MEMORY, 40 << 20, 1, NOT_SHARED,
         3, 0, NULL, 16 << 20},
    };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) one_loss(all[i]);
    for (size_t i = 0; i < sizeof limited / sizeof limited[0]; i++) {
        if (test_sanitized()) tap_skip(limited[i].name, "a sanitizer needs the address space");
        else one_loss(limited[i]);
    }
}

// The smallest shares that can be asked for.
static void small_share(idist_group *world, int rank, int n, void *arg) {
    bool told = strstr(world->w->about.sharing, "too little for collectives") != NULL;
    (void)arg;
    rank_check(told == !idist__ring_group_of(world)->share, "rank %d: \"%s\"", rank,
               world->w->about.sharing);
    all_sorts(world, rank, n);
}

static void small_shares(void) {
    static const size_t sizes[7] = {1, 4096, 20000, 65536, 150000, 300000, 1000000};
    for (int i = 0; i < 7; i++) {
        idist_desc d = desc_with("auto", i % 2 ? "chunked" : "auto");
        d.shm_nbytes = sizes[i];
        ranks_case(2 + i % 3, &d, small_share, NULL, "shares of %zu bytes, n=%d", sizes[i],
                   2 + i % 3);
    }
}

// Bytes that the shared file of a world takes.
static size_t file_bytes(const idist_group *world) {
    struct stat st;
    return fstat(idist__ring_of(world->w)->shm->fd, &st) == 0 ? (size_t)st.st_blocks * 512 : 0;
}

// The first group of the world takes memory for its regions, the next one of the same size finds
// it. Rank 1 gets no more then: a second group at the same time does without.
static int regions_late(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    idist_group *g = NULL, *h = NULL;
    idist_opts o = opts_of(world);
    size_t before = file_bytes(world), with_one, again;
    (void)slot, (void)arg;
    // "About half" of 5 MiB, says idist.h.
    rank_check(before < (size_t)n * 11 * MIB / 4, "rank %d: %zu bytes at the start", rank, before);
    rank_ok(rank, idist_barrier(&o));
    rank_ok(rank, idist_split(world, 0, rank, &g));
    rank_ok(rank, idist_barrier(&o));
    with_one = file_bytes(world);
    rank_check(with_one > before, "rank %d: %zu bytes, with a group %zu", rank, before, with_one);
    rank_ok(rank, idist_free_group(&g));
    rank_ok(rank, idist_barrier(&o));

    if (rank == 1 && !forbid(SYS_fallocate)) return CANNOT;
    rank_ok(rank, idist_split(world, 0, rank, &g));
    rank_ok(rank, idist_barrier(&o));
    again = file_bytes(world);
    rank_check(again == with_one, "rank %d: %zu bytes, and with a group after it %zu", rank,
               with_one, again);
    rank_ok(rank, idist_split(world, 0, rank, &h));
    rank_check(idist__ring_group_of(g)->share && !idist__ring_group_of(h)->share,
               "rank %d: the first group has regions, and the second one has none", rank);
    all_sorts(g, rank, n);
    all_sorts(h, rank, n);
    rank_ok(rank, idist_free_group(&h));
    rank_ok(rank, idist_free_group(&g));
    rank_ok(rank, idist_close(&world));
    return 0;
}

static void memory_for_groups(int n) {
    procs p;
    bool cannot = false;
    tap_running("memory for groups n=%d", n);
    ranks_reset();
    procs_start(&p, n, NULL, regions_late, NULL);
    int n_hung = procs_wait(&p, 30000);
    rank_check(n_hung == 0, "%d ranks hang", n_hung);
    for (int k = 0; k < n; k++) {
        cannot = cannot || p.wait_status[k] == CANNOT << 8;
        rank_check(p.wait_status[k] == 0, "rank %d: wait status 0x%x", k,
                   (unsigned)p.wait_status[k]);
    }
    if (cannot) tap_skip("memory for groups", "this process cannot forbid itself a system call");
    else ranks_report("groups take memory when they need it, or do without n=%d", n);
    procs_free(&p);
}

//------------------------------------------------------------------------------
// ranks that die
//------------------------------------------------------------------------------

static void expect_lost(const procs *p, int victim, int64_t killed_ns, const char *what,
                        int64_t *worst_ns) {
    for (int k = 0; k < p->n; k++) {
        const proc_slot *s = &p->slot[k];
        if (k == victim) continue;
        if (!__atomic_load_n(&s->has_result, __ATOMIC_ACQUIRE)) {
            rank_fail("%s: hang: rank %d has no result", what, k);
            continue;
        }
        rank_check(s->status == IDIST_ERR_PEER_LOST,
                   "%s: rank %d: got %s expected IDIST_ERR_PEER_LOST: %s", what, k,
                   idist_status_name((idist_status)s->status), s->text);
        rank_check(text_names_only(s->text, victim, k, p->n),
                   "%s: rank %d names the wrong rank: got \"%s\"", what, k, s->text);
        rank_check(WIFEXITED(p->wait_status[k]) && WEXITSTATUS(p->wait_status[k]) == 0,
                   "%s: rank %d: wait status 0x%x", what, k, (unsigned)p->wait_status[k]);
        if (s->when_ns - killed_ns > *worst_ns) *worst_ns = s->when_ns - killed_ns;
    }
}

static int end_of_rank(idist_group **world) {
    return idist_close(world) != IDIST_OK && *world == NULL ? 0 : 92;
}

// Barriers as fast as they go: the survivor spins. Or one that the last rank never enters: the
// others sleep.
static int in_barriers(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    bool sleeps = *(const bool *)arg;
    idist_opts o = opts_of(world);
    idist_status s = IDIST_OK;
    for (int i = 0; i < 20 && s == IDIST_OK; i++) s = idist_barrier(&o);
    proc_phase(slot, 1);
    if (sleeps && rank == n - 1)
        for (;;) pause();
    while (s == IDIST_OK) s = idist_barrier(&o);
    proc_result(slot, s);
    return end_of_rank(&world);
}

static void lost_in_barriers(int n, bool sleeps, uint64_t *random_state) {
    int64_t worst_ns = 0; // without the time in which survivors waited for a processor
    int trials = test_quick() ? 3 : 5;
    const char *how = sleeps ? "sleep" : "spin";
    ranks_reset();
    for (int i = 0; i < trials; i++) {
        procs p;
        char what[100];
        idist_desc d = desc_with("auto", "auto");
        d.timeout_ms = 5000 * test_slow_factor();
        int others = sleeps ? n - 1 : n, victim = (int)(tap_rand(random_state) % (uint64_t)others);
        if (sleeps && (n == 2 || i % 2 == 0)) victim = n - 1;
        snprintf(what, sizeof what, "trial %d: n=%d, others %s, victim %d", i, n, how, victim);
        tap_running("%s", what);
        procs_start(&p, n, &d, in_barriers, &sleeps);
        if (!procs_await_phase(&p, 1, 10000)) rank_fail("%s: the ranks did not start", what);
        tap_sleep_ms((sleeps ? 200 : 5) + (int)(tap_rand(random_state) % 60));
        int64_t took_ns = 0, waited_ns = tap_stolen_ns(), killed_ns;
        for (int k = 0; k < n; k++) waited_ns += k == victim ? 0 : tap_waited_ns(p.pid[k]);
        killed_ns = tap_now_ns();
        kill(p.pid[victim], SIGKILL);
        if (sleeps && victim != n - 1) { // the one that never enters would never hear of it
            for (int k = 0; k < n - 1; k++)
                rank_check(k == victim || proc_await_result(&p.slot[k], 5000),
                           "%s: rank %d heard nothing", what, k);
            kill(p.pid[n - 1], SIGKILL);
            p.slot[n - 1].has_result = 1;
            p.slot[n - 1].status = IDIST_ERR_PEER_LOST;
            snprintf(p.slot[n - 1].text, sizeof p.slot[n - 1].text, "rank %d", victim);
        }
        procs_wait(&p, 10000);
        if (sleeps && victim != n - 1) p.wait_status[n - 1] = 0;
        expect_lost(&p, victim, killed_ns, what, &took_ns);
        waited_ns -= tap_stolen_ns();
        for (int k = 0; k < n; k++) waited_ns -= k == victim ? 0 : p.slot[k].waited_ns;
        took_ns += waited_ns; // which is negative, or 0
        if (took_ns > worst_ns) worst_ns = took_ns;
        procs_free(&p);
    }
    rank_check(worst_ns <= (int64_t)LOST_LIMIT_MS * 1000000 * test_slow_factor(),
               "noticed after %.1f ms, limit %d ms", (double)worst_ns / 1e6,
               LOST_LIMIT_MS * test_slow_factor());
    ranks_report("SIGKILL of one of %d ranks while the others %s", n, how);
    tap_diag("n=%d, others %s: slowest survivor after %.2f ms", n, how, (double)worst_ns / 1e6);
}

// Large contributions, which the others read where they are. Values change with every step, so that
// no old data pass.
typedef enum { SUMS, MESSAGES, PARTS, COPIES } reading;
static const char *const reading_names[4] = {"all_reduce", "sendrecv", "scatter", "broadcast"};

typedef struct readers {
    reading what;
    size_t count;
} readers;

// The contribution of a rank; to a scatter, the same for everybody.
static void contribute(const readers *how, int rank, int n, int32_t *x, int32_t *y, int step) {
    for (int k = 0; k < (how->what == PARTS ? n : 1); k++)
        fill(x + (size_t)k * how->count, how->count, rank, step);
    if (how->what == COPIES && step % n == rank) fill(y, how->count, rank, step);
}

static idist_status read_once(const readers *how, int rank, int n, const int32_t *x, int32_t *y,
                              int step, const idist_opts *o) {
    int right = (rank + 1) % n, left = (rank + n - 1) % n;
    if (how->what == SUMS) return idist_all_reduce(x, y, how->count, IDIST_I32, IDIST_SUM, o);
    if (how->what == PARTS) return idist_scatter(x, y, how->count, IDIST_I32, step % n, o);
    if (how->what == COPIES) return idist_broadcast(y, how->count, IDIST_I32, step % n, o);
    return idist_sendrecv(x, how->count, right, 1, y, how->count, left, 1, IDIST_I32, NULL, o);
}

static int reads_others(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    const readers *how = (const readers *)arg;
    idist_opts o = opts_of(world);
    size_t nbytes = 4 * how->count * (how->what == PARTS ? (size_t)n : 1);
    int32_t *x = (int32_t *)malloc(nbytes), *y = (int32_t *)malloc(4 * how->count);
    idist_status s = IDIST_OK;
    if (!x || !y) return 91;
    memset(y, 0, 4 * how->count);
    for (int step = 0; s == IDIST_OK; step++) {
        int from = how->what == SUMS ? 0 : how->what == MESSAGES ? (rank + n - 1) % n : step % n;
        contribute(how, rank, n, x, y, step);
        s = read_once(how, rank, n, x, y, step, &o);
        if (s != IDIST_OK) break;
        size_t wrong = find_wrong(y, how->count, from, how->what == SUMS ? n : from + 1, step);
        rank_check(wrong == how->count, "rank %d step %d: IDIST_OK and wrong data, element %zu: %d",
                   rank, step, wrong, wrong < how->count ? y[wrong] : 0);
        if (wrong != how->count) return 93;
        __atomic_store_n(&slot->iterations, step, __ATOMIC_RELAXED);
        proc_phase(slot, 1);
    }
    memset(x, 0x5A, nbytes); // ours again: who still reads there must not take it for data
    memset(y, 0x5A, 4 * how->count);
    proc_result(slot, s);
    free(x);
    free(y);
    return end_of_rank(&world);
}

static void lost_while_read(int n, reading what_for, size_t nbytes, uint64_t *random_state) {
    int64_t worst_ns = 0;
    readers how = {what_for, nbytes / 4};
    const char *call = reading_names[what_for];
    ranks_reset();
    for (int i = 0; i < (test_quick() ? 2 : 5); i++) {
        procs p;
        char what[100];
        idist_desc d = desc_with("auto", "auto");
        int victim = (int)(tap_rand(random_state) % (uint64_t)n);
        struct timespec ts = {0, (long)(tap_rand(random_state) % 60000000)};
        snprintf(what, sizeof what, "trial %d: %s n=%d victim %d", i, call, n, victim);
        tap_running("%s", what);
        procs_start(&p, n, &d, reads_others, &how);
        if (!procs_await_phase(&p, 1, 20000)) rank_fail("%s: the ranks did not start", what);
        nanosleep(&ts, NULL);
        int64_t killed_ns = tap_now_ns();
        kill(p.pid[victim], SIGKILL);
        procs_wait(&p, 10000);
        expect_lost(&p, victim, killed_ns, what, &worst_ns);
        procs_free(&p);
    }
    ranks_report("SIGKILL of a rank whose memory is read: %s of %zu MiB n=%d", call, nbytes / MIB,
                 n);
    tap_diag("%s n=%d: slowest survivor after %.1f ms", call, n, (double)worst_ns / 1e6);
}

// The last rank stays away, and the root gives up while rank 1 reads its memory: what it then
// writes there is no result.
typedef enum { PRIVATE, FREED, SHARED_MEMORY, N_OWNERS } owner;
static const char *const owner_names[N_OWNERS] = {"private memory", "memory, which it frees",
                                                  "shared memory"};

static int gives_up(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    enum { COUNT = 20 << 20 };
    owner memory = *(const owner *)arg;
    bool shared = memory == SHARED_MEMORY;
    idist_opts o = opts_of(world);
    size_t nbytes = sizeof(int32_t) * COUNT * (size_t)(rank == 0 ? n : 1);
    int32_t *x = (int32_t *)(shared ? idist_alloc(nbytes, &o) : malloc(nbytes));
    if (!x) return 91;
    memset(x, 0, nbytes);
    for (int k = 0; rank == 0 && k < n; k++) fill(x + (size_t)k * COUNT, COUNT, 0, 1);
    rank_ok(rank, idist_barrier(&o));
    proc_phase(slot, 1); // the root does not give up before all saw the end of this
    for (int k = 0; k < n && rank == 0; k++) proc_await_phase(&slot[k], 1);
    if (rank == n - 1)
        rank_check(proc_await_result(slot - rank, 8000), "the root does not give up");
    o.timeout_ms = rank == 0 ? 3 : 5000 * test_slow_factor();
    idist_status s = idist_scatter(x, x, COUNT, IDIST_I32, 0, &o);
    if (rank == 0) {
        memset(x, 0x5A, nbytes);
        rank_check(s == IDIST_ERR_TIMEOUT, "the root: got %s", idist_status_name(s));
    } else if (s == IDIST_OK) {
        size_t wrong = find_wrong(x, COUNT, 0, 1, 1);
        rank_check(wrong == COUNT, "rank %d: IDIST_OK and wrong data, element %zu: 0x%x", rank,
                   wrong, (unsigned)x[wrong]);
    } else {
        rank_check(s == IDIST_ERR_TIMEOUT, "rank %d: got %s: %s", rank, idist_status_name(s),
                   idist_last_error());
    }
    proc_result(slot, s);
    if (memory != FREED) tap_sleep_ms(300);
    if (shared) idist_free(x);
    else free(x);
    idist_close(&world);
    return 0;
}

static void gives_up_while_read(owner memory) {
    procs p;
    tap_running("a root gives up while others read its %s", owner_names[memory]);
    ranks_reset();
    procs_start(&p, 3, NULL, gives_up, &memory);
    rank_check(procs_wait(&p, 10000) == 0, "hang");
    for (int k = 0; k < 3; k++)
        rank_check(p.wait_status[k] == 0, "rank %d: wait status 0x%x", k,
                   (unsigned)p.wait_status[k]);
    procs_free(&p);
    ranks_report("a root gives up while others read its %s", owner_names[memory]);
}

// ---- all at once ----

static int goes_on(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    idist_opts o = opts_of(world);
    unsigned char *shared = (unsigned char *)idist_alloc(MIB, &o);
    float *x = (float *)calloc(MIB, 1);
    (void)n;
    (void)rank;
    (void)arg;
    if (!shared || !x) return 91;
    memset(shared, 1, MIB);
    while (idist_all_reduce(x, x, MIB / 4, IDIST_F32, IDIST_MAX, &o) == IDIST_OK)
        proc_phase(slot, 1);
    return 0;
}

// Who has the file open or mapped, of all processes that we can look into.
static int count_holders(unsigned long inode) {
    int n = 0;
    DIR *dir = opendir("/proc");
    TAP_REQUIRE(dir != NULL);
    for (struct dirent *e = readdir(dir); e; e = readdir(dir)) {
        unsigned long node = 0;
        if (!isdigit((unsigned char)e->d_name[0])) continue;
        if (shared_bytes((pid_t)atoi(e->d_name), &node) > 0 && node == inode) n++;
    }
    closedir(dir);
    return n;
}

static void massacre(void) {
    tap_running("SIGKILL of all ranks");
    ranks_reset();
    int files = count_entries("/dev/shm", ""), mounts = count_entries("/tmp", "idist");
    for (int i = 0; i < 4; i++) {
        procs p;
        unsigned long inode = 0;
        procs_start(&p, 4, NULL, goes_on, NULL);
        rank_check(procs_await_phase(&p, 1, 10000), "trial %d: the ranks did not start", i);
        rank_check(shared_bytes(p.pid[0], &inode) > 0, "trial %d: nothing is shared", i);
        rank_check(count_holders(inode) == 4, "trial %d: %d processes have the memory", i,
                   count_holders(inode));
        for (int k = 0; k < 4; k++) kill(p.pid[k], SIGKILL);
        rank_check(procs_wait(&p, 5000) == 0, "trial %d: a process is left", i);
        rank_check(count_holders(inode) == 0, "trial %d: %d processes still have the memory", i,
                   count_holders(inode));
        rank_check(count_entries("/dev/shm", "") == files,
                   "trial %d: /dev/shm: %d files, before %d", i, count_entries("/dev/shm", ""),
                   files);
        rank_check(count_entries("/tmp", "idist") == mounts, "trial %d: files in /tmp", i);
        procs_free(&p);
    }
    ranks_report("SIGKILL of all ranks leaves no memory, no file and no process");
}

//------------------------------------------------------------------------------
// ranks that stop, and ranks that sleep
//------------------------------------------------------------------------------

static int waits_for_stopped(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    idist_opts o = opts_of(world);
    idist_status s = IDIST_OK;
    const int *large = (const int *)arg;
    int32_t *x = (int32_t *)calloc(MIB, 1);
    (void)n;
    if (!x) return 91;
    for (int i = 0; i < 5 && s == IDIST_OK; i++) s = idist_barrier(&o);
    proc_phase(slot, 1);
    if (rank == 1)
        while (__atomic_load_n(&slot->phase, __ATOMIC_ACQUIRE) == 1)
            tap_sleep_ms(1); // is stopped here
    tap_sleep_ms(50);
    o.timeout_ms = 300 * test_slow_factor();
    if (s == IDIST_OK && *large) s = idist_all_reduce(x, x, MIB / 4, IDIST_I32, IDIST_SUM, &o);
    else if (s == IDIST_OK) s = idist_barrier(&o);
    proc_result(slot, s);
    free(x);
    return end_of_rank(&world);
}

static void stopped(int n, int large) {
    procs p;
    tap_running("SIGSTOP, n=%d", n);
    ranks_reset();
    procs_start(&p, n, NULL, waits_for_stopped, &large);
    rank_check(procs_await_phase(&p, 1, 10000), "the ranks did not start");
    kill(p.pid[1], SIGSTOP);
    int64_t end_ms = tap_now_ms() + 5000 * test_slow_factor();
    for (int k = 0; k < n; k++)
        while (k != 1 && !__atomic_load_n(&p.slot[k].has_result, __ATOMIC_ACQUIRE) &&
               tap_now_ms() < end_ms)
            tap_sleep_ms(2);
    kill(p.pid[1], SIGKILL);
    procs_wait(&p, 10000);
    for (int k = 0; k < n; k++) {
        const proc_slot *s = &p.slot[k];
        if (k == 1) continue;
        rank_check(s->has_result && s->status == IDIST_ERR_TIMEOUT,
                   "rank %d: got %s expected IDIST_ERR_TIMEOUT: %s", k,
                   s->has_result ? idist_status_name((idist_status)s->status) : "nothing", s->text);
        rank_check(text_names_only(s->text, 1, k, n), "rank %d names the wrong rank: got \"%s\"", k,
                   s->text);
        rank_check(WIFEXITED(p.wait_status[k]) && WEXITSTATUS(p.wait_status[k]) == 0,
                   "rank %d: wait status 0x%x", k, (unsigned)p.wait_status[k]);
    }
    ranks_report("SIGSTOP of a rank, n=%d, %s: the time-out names it", n,
                 large ? "all_reduce" : "barrier");
    procs_free(&p);
}

static int64_t cpu_ns(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return ((int64_t)u.ru_utime.tv_sec + u.ru_stime.tv_sec) * 1000000000 +
           ((int64_t)u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1000;
}

// when_ns is the processor time that the wait took.
static int waits_long(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    idist_opts o = opts_of(world);
    int ms = *(const int *)arg;
    for (int i = 0; i < 10; i++) rank_ok(rank, idist_barrier(&o));
    int64_t before = cpu_ns();
    if (rank == n - 1) tap_sleep_ms(ms);
    rank_ok(rank, idist_barrier(&o));
    slot->when_ns = cpu_ns() - before;
    return idist_close(&world) == IDIST_OK ? 0 : 92;
}

static void sleeps_in_barrier(int n) {
    procs p;
    int ms = test_quick() ? 1000 : 3000;
    int64_t worst_ns = 0, limit_ns = (int64_t)ms * 10000 * test_slow_factor();
    tap_running("processor time in a barrier, n=%d", n);
    ranks_reset();
    procs_start(&p, n, NULL, waits_long, &ms);
    int n_hung = procs_wait(&p, ms + 10000);
    rank_check(n_hung == 0, "%d ranks hang", n_hung);
    for (int k = 0; k < n; k++) {
        if (p.slot[k].when_ns > worst_ns) worst_ns = p.slot[k].when_ns;
        rank_check(p.slot[k].when_ns < limit_ns,
                   "rank %d took %.1f ms of processor time, limit %.1f", k,
                   (double)p.slot[k].when_ns / 1e6, (double)limit_ns / 1e6);
        rank_check(p.wait_status[k] == 0, "rank %d: wait status 0x%x", k,
                   (unsigned)p.wait_status[k]);
    }
    ranks_report("%d ranks blocked for %d ms in a barrier take no processor time", n, ms);
    tap_diag("n=%d: at most %.2f ms of %d", n, (double)worst_ns / 1e6, ms);
    procs_free(&p);
}

//------------------------------------------------------------------------------
// groups that come and go
//------------------------------------------------------------------------------

// Their places in shared memory are few and serve again and again.
static void made_and_freed(idist_group *world, int rank, int n, void *arg) {
    enum { COUNT = 60000 };
    int32_t *x = (int32_t *)malloc(4 * COUNT), *y = (int32_t *)malloc(4 * COUNT);
    int without_place = 0;
    TAP_REQUIRE(x && y);
    (void)arg;
    for (int i = 0; i < 200; i++) {
        idist_group *g = NULL;
        size_t count = i % 5 == 0 ? COUNT : (size_t)(i % 7);
        if (!rank_ok(rank, idist_split(world, 0, i % 2 ? -rank : rank, &g))) break;
        without_place += idist__ring_group_of(g)->share == NULL;
        idist_opts o = opts_of(g);
        fill(x, count, rank, i);
        rank_ok(rank, idist_all_reduce(x, y, count, IDIST_I32, IDIST_SUM, &o));
        rank_check(find_wrong(y, count, 0, n, i) == count,
                   "rank %d: all_reduce in group %d is wrong", rank, i);
        rank_ok(rank, idist_free_group(&g));
    }
    rank_check(without_place == 0, "rank %d: %d groups of 200 had no place", rank, without_place);
    free(x);
    free(y);
}

int main(void) {
    uint64_t random_state = tap_seed();
    private_folders();
    tap_deadline(100);
    (void)ranks__log();
    losses();
    small_shares();
    memory_for_groups(2);
    memory_for_groups(5);
    lost_in_barriers(2, false, &random_state);
    lost_in_barriers(2, true, &random_state);
    lost_in_barriers(4, true, &random_state);
    lost_while_read(2, SUMS, 16 * MIB, &random_state);
    lost_while_read(3, SUMS, 16 * MIB, &random_state);
    lost_while_read(2, MESSAGES, 64 * MIB, &random_state);
    lost_while_read(2, COPIES, 32 * MIB, &random_state);
    lost_while_read(4, COPIES, 32 * MIB, &random_state);
    lost_while_read(2, PARTS, 32 * MIB, &random_state);
    lost_while_read(4, PARTS, 16 * MIB, &random_state);
    for (int k = 0; k < N_OWNERS; k++) gives_up_while_read((owner)k);
    massacre();
    for (int large = 0; large < 2; large++) {
        stopped(2, large);
        stopped(4, large);
    }
    sleeps_in_barrier(2);
    sleeps_in_barrier(4);
    for (int n = 2; n <= 5; n += test_quick() ? 2 : 1)
        ranks_case(n, NULL, made_and_freed, NULL, "200 groups made and freed n=%d", n);
    return tap_done();
}
