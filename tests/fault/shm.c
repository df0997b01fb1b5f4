// shm: ranks that share memory. Ranks die, stop, or sleep while other ranks spin, sleep, or read
// their memory, and groups are created and freed.
#define IDIST_IMPLEMENTATION
#include "idist.h"

#include "shm.h"

enum { LOST_LIMIT_MS = 50 };

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

// Calls barriers in a loop, so that the survivors spin. If *arg is true, the last rank stops
// calling, so that all other ranks sleep in a barrier that it never enters.
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
    int64_t worst_ns = 0; // does not count the time in which survivors waited for a processor
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
        if (sleeps && victim != n - 1) { // a rank that never enters would never notice the loss
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
        took_ns += waited_ns; // adds a value that is negative or 0
        if (took_ns > worst_ns) worst_ns = took_ns;
        procs_free(&p);
    }
    rank_check(worst_ns <= (int64_t)LOST_LIMIT_MS * 1000000 * test_slow_factor(),
               "noticed after %.1f ms, limit %d ms", (double)worst_ns / 1e6,
               LOST_LIMIT_MS * test_slow_factor());
    ranks_report("SIGKILL of one of %d ranks while the others %s", n, how);
    tap_diag("n=%d, others %s: slowest survivor after %.2f ms", n, how, (double)worst_ns / 1e6);
}

// Operations in which a rank reads a large contribution in place, from the memory of another rank.
// The values change with every step, so that stale data cannot pass the check.
typedef enum { SUMS, MESSAGES, PARTS, COPIES } reading;
static const char *const reading_names[4] = {"all_reduce", "sendrecv", "scatter", "broadcast"};

typedef struct readers {
    reading what;
    size_t count;
} readers;

// Fills a rank's contribution. All parts of a scatter get the same values.
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
    // The call has ended, so this rank may overwrite the memory. A rank that still reads the memory
    // must not mistake the new values for data.
    memset(x, 0x5A, nbytes);
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

// Kinds of memory in a test where the root of a scatter times out. The last rank stays away, so the
// root times out while rank 1 reads the root's memory. The root then overwrites the memory, and
// rank 1 must not return the new bytes as a result.
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
    proc_phase(slot, 1); // the root must not time out before all ranks have left the barrier
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
    tap_running("a root times out while other ranks read its %s", owner_names[memory]);
    ranks_reset();
    procs_start(&p, 3, NULL, gives_up, &memory);
    rank_check(procs_wait(&p, 10000) == 0, "hang");
    for (int k = 0; k < 3; k++)
        rank_check(p.wait_status[k] == 0, "rank %d: wait status 0x%x", k,
                   (unsigned)p.wait_status[k]);
    procs_free(&p);
    ranks_report("a root gives up while others read its %s", owner_names[memory]);
}

// ---- all ranks die at the same time ----

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

// Returns the number of processes that have the file open or mapped, as far as this process may
// inspect them.
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

// Waits in a barrier for a rank that sleeps. Stores the processor time of the wait in `when_ns`.
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
// groups that are created and freed
//------------------------------------------------------------------------------

// Creates and frees 200 groups. The world has only a few regions of shared memory for groups, so it
// must reuse each region after its group is freed.
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
