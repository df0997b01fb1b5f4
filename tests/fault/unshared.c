// unshared: worlds whose ranks may share no memory or only part of it. The causes are limits,
// system calls that the kernel refuses, and ranks that disagree.
//
// The ranks fall back to sockets, or copy data more often, and the results stay right. The address
// space shows what memory a world shares, because the shared file appears there as "memfd:idist".
#include <fcntl.h>
static int reserve_in_file(int fd, off_t at, off_t nbytes);
#define IDIST_IMPLEMENTATION
#define posix_fallocate reserve_in_file
#include "idist.h"
#undef posix_fallocate

#include "shm.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/resource.h>

// ---- a world that must work without some resource ----

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

// Returns a field in KiB of /proc/self/status, such as "VmLck:", or -1 if the field is missing.
static long status_kib(const char *field) {
    char line[200];
    long kib = -1;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof line, f))
        if (strncmp(line, field, strlen(field)) == 0) kib = atol(line + strlen(field));
    if (f) fclose(f);
    return kib;
}

// ---- resources that are taken away ----

typedef enum {
    NOTHING,
    ADDRESS_SPACE,
    LOCKED_MEMORY, // the rank locks all its memory; amount 0 needs the right to ignore the limit
    FILE_SIZE,
    RESERVATIONS,
    SYSCALL,
    UNDUMPABLE,
    MIB_VARIABLE
} loss;

static int reservations_left = -1; // number of reservations that succeed, or -1 for all

static int reserve_in_file(int fd, off_t at, off_t nbytes) {
    if (reservations_left == 0) return ENOSPC;
    if (reservations_left > 0) reservations_left--;
    return posix_fallocate(fd, at, nbytes);
}

// The kind of shared memory that a world must have obtained.
typedef enum { ANY, SHARED, NO_WINDOWS, NOT_SHARED } outcome;

typedef struct without {
    const char *name;
    loss what;
    long amount;      // bytes, MiB, reservations, or the number of a system call
    int who;          // rank, or -1 for all
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
        // This limit does not apply to a process that may lock memory without a limit.
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

// Makes every rank an ordinary user if the test needs that, because the user root may read and lock
// all memory.
static bool becomes_a_user(const without *w) {
    if (w->what != UNDUMPABLE && !(w->what == LOCKED_MEMORY && w->amount)) return true;
    if (geteuid() == 0 && setuid(65534) != 0) return false;
    prctl(PR_SET_DUMPABLE, 1); // the change of user cleared it
    return true;
}

// Returns true if a process can take the resource away from itself. Tries this in a child process,
// because a rank that failed while joining would leave all other ranks waiting.
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

// Checks a world in which the rank's shares of the shared file (desc.shm_nbytes) are small. The
// world's description must say if a share is too small for collectives.
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

// Returns the number of bytes that the shared file of a world occupies.
static size_t file_bytes(const idist_group *world) {
    struct stat st;
    return fstat(idist__ring_of(world->w)->shm->fd, &st) == 0 ? (size_t)st.st_blocks * 512 : 0;
}

// Checks the memory of groups. The first group of the world allocates memory for its regions of the
// shared file (ring/share/pool.h). After it is freed, rank 1 can allocate no more memory. The next
// group of the same size must reuse the first group's memory, and another group beside it must do
// without regions.
static int regions_late(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    idist_group *g = NULL, *h = NULL;
    idist_opts o = opts_of(world);
    size_t before = file_bytes(world), with_one, again;
    (void)slot, (void)arg;
    // idist.h promises "about half" of 5 MiB.
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

int main(void) {
    private_folders();
    tap_deadline(100);
    (void)ranks__log();
    losses();
    small_shares();
    memory_for_groups(2);
    memory_for_groups(5);
    return tap_done();
}
