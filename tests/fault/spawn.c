// spawn: what idist_spawn reports, which workers it ends and when, and that it leaves nothing
// behind
#include "idist.h"

#include "ranks.h"

extern char **environ;

// Results that the workers leave for the parent, in shared memory.
typedef struct board {
    pid_t pid[RANKS_MAX]; // atomic
    int status[RANKS_MAX];
    char text[RANKS_MAX][400];
    int reached[RANKS_MAX];
    int n_atexit;
    int go;
} board;

static board *make_board(void) { return (board *)shared_alloc(sizeof(board)); }

static void sign_in(board *b, int rank) {
    __atomic_store_n(&b->pid[rank], getpid(), __ATOMIC_RELEASE);
}

// Waits until all n workers have started, so that the order of failures is known.
static void meet(board *b, int n) {
    for (int tries = 0; tries < 5000; tries++) {
        int there = 0;
        for (int k = 0; k < n; k++) there += __atomic_load_n(&b->pid[k], __ATOMIC_ACQUIRE) != 0;
        if (there == n) return;
        tap_sleep_ms(1);
    }
}

// Checks that no worker is left after idist_spawn, not even as a zombie, which kill() with signal 0
// still finds.
static void check_gone(const board *b, int n) {
    for (int k = 0; k < n; k++) {
        pid_t pid = b->pid[k];
        if (pid == 0) continue;
        rank_check(kill(pid, 0) != 0 && errno == ESRCH, "worker %d (pid %d) is still there", k,
                   (int)pid);
    }
}

static idist_desc quick_desc(idist_report *report) {
    idist_desc d = desc_with(NULL, NULL);
    memset(report, 0x55, sizeof *report);
    report->text[sizeof report->text - 1] = 0;
    d.timeout_ms = RANKS_TIMEOUT_MS;
    d.report = report;
    d.grace_ms = 300;
    return d;
}

static void expect_failure(idist_status status, const idist_report *r, int rank, int exit_code,
                           int signal_number) {
    char text[700];
    copy_text(text, sizeof text, idist_last_error());
    rank_check(status == IDIST_ERR_WORKER_FAILED, "got %s expected IDIST_ERR_WORKER_FAILED: %s",
               idist_status_name(status), text);
    if (status != IDIST_ERR_WORKER_FAILED) return;
    rank_check(r->rank == rank && r->exit_code == exit_code && r->signal == signal_number,
               "report: got rank %d exit code %d signal %d expected %d %d %d; text: %s", r->rank,
               r->exit_code, r->signal, rank, exit_code, signal_number, r->text);
    rank_check(r->text[0] && text_names_rank(r->text, rank),
               "the report's text names rank %d: got \"%s\"", rank, r->text);
    rank_check(text_names_rank(text, rank), "idist_last_error names rank %d: got \"%s\"", rank,
               text);
}

//------------------------------------------------------------------------------
// outcomes
//------------------------------------------------------------------------------

static int works(int local_rank, void *arg) {
    int32_t x = 1, y = 0;
    sign_in((board *)arg, local_rank);
    if (idist_all_reduce(&x, &y, 1, IDIST_I32, IDIST_SUM, NULL) != IDIST_OK) return 1;
    return y == idist_get_world_size() && idist_get_local_rank() == local_rank ? 0 : 2;
}

static void all_well(void) {
    for (int n = 1; n <= 5; n++) {
        board *b = make_board();
        idist_report report;
        idist_desc d = quick_desc(&report);
        tap_running("spawn %d, all well", n);
        ranks_reset();
        rank_ok(-1, idist_spawn(works, b, n, &d));
        rank_check(report.rank == -1, "report.rank: got %d expected -1", report.rank);
        for (int k = 0; k < n; k++)
            rank_check(b->pid[k] != 0 && b->pid[k] != getpid(), "worker %d did not run", k);
        check_gone(b, n);
        ranks_report("%d workers, all well", n);
        munmap(b, sizeof *b);
    }
    board *b = make_board();
    idist_report report;
    idist_desc d = quick_desc(&report);
    d.nproc_per_node = 3;
    ranks_reset();
    tap_running("parallel_run");
    rank_ok(-1, idist_parallel_run(&d, works, b));
    rank_check(b->pid[2] != 0 && b->pid[3] == 0, "three workers");
    ranks_report("idist_parallel_run with nproc_per_node");
    munmap(b, sizeof *b);
}

enum { RETURNS_3, SEGFAULTS, KILLED, EXITS_0, EXITS_9, ABORTS, N_WAYS };
static const char *const way_names[N_WAYS] = {"returns 3",        "segfaults",
                                              "is killed",        "exits 0 half-way",
                                              "exits 9 half-way", "calls abort()"};

typedef struct failing {
    board *b;
    int way, victim, n;
} failing;

static int one_fails(int local_rank, void *arg) {
    failing *f = (failing *)arg;
    sign_in(f->b, local_rank);
    meet(f->b, f->n);
    if (local_rank == f->victim) {
        signal(SIGSEGV, SIG_DFL); // a sanitizer may have installed its own handler
        signal(SIGABRT, SIG_DFL);
        if (f->way == RETURNS_3) return 3;
        if (f->way == SEGFAULTS) raise(SIGSEGV);
        if (f->way == KILLED) raise(SIGKILL);
        if (f->way == EXITS_0) _exit(0);
        if (f->way == EXITS_9) exit(9);
        abort();
    }
    idist_status status = idist_barrier(NULL);
    f->b->status[local_rank] = status;
    copy_text(f->b->text[local_rank], sizeof f->b->text[0], idist_last_error());
    f->b->reached[local_rank] = 1;
    return status ? 40 + local_rank : 0;
}

static void failures(uint64_t *random_state) {
    static const int exit_codes[N_WAYS] = {3, -1, -1, 0, 9, -1};
    static const int signals[N_WAYS] = {0, SIGSEGV, SIGKILL, 0, 0, SIGABRT};
    for (int way = 0; way < N_WAYS; way++) {
        idist_report report;
        idist_desc d = quick_desc(&report);
        failing f;
        f.b = make_board();
        f.way = way;
        f.n = 2 + way % 3;
        f.victim = (int)(tap_rand(random_state) % (uint64_t)f.n);
        d.grace_ms = 5000; // enough for the other workers to end by themselves
        tap_running("worker %d of %d %s", f.victim, f.n, way_names[way]);
        ranks_reset();
        int64_t start = tap_now_ms();
        idist_status status = idist_spawn(one_fails, &f, f.n, &d);
        int64_t took = tap_now_ms() - start;
        expect_failure(status, &report, f.victim, exit_codes[way], signals[way]);
        rank_check(took < 3000 * test_slow_factor(),
                   "took %lld ms: the others should have ended by themselves", (long long)took);
        for (int k = 0; k < f.n; k++) {
            if (k == f.victim) continue;
            rank_check(f.b->reached[k] && f.b->status[k] == IDIST_ERR_PEER_LOST &&
                           text_names_rank(f.b->text[k], f.victim),
                       "worker %d: got %s \"%s\" expected IDIST_ERR_PEER_LOST of rank %d", k,
                       idist_status_name((idist_status)f.b->status[k]), f.b->text[k], f.victim);
        }
        check_gone(f.b, f.n);
        ranks_report("worker %d of %d %s: reported, the others learn of it", f.victim, f.n,
                     way_names[way]);
        munmap(f.b, sizeof *f.b);
    }
}

// Rank 0 fails. Rank 1 sleeps and dies of SIGTERM. Rank 2 ignores SIGTERM and needs SIGKILL.
static int stubborn(int local_rank, void *arg) {
    failing *f = (failing *)arg;
    if (local_rank == 2) signal(SIGTERM, SIG_IGN);
    sign_in(f->b, local_rank);
    meet(f->b, f->n);
    if (local_rank == 0) return 7;
    for (int i = 0; i < 600; i++) tap_sleep_ms(50);
    return 0;
}

static void grace(void) {
    idist_report report;
    idist_desc d = quick_desc(&report);
    failing f = {NULL, 0, 0, 3};
    f.b = make_board();
    tap_running("workers that do not end by themselves");
    ranks_reset();
    int64_t start = tap_now_ms();
    idist_status status = idist_spawn(stubborn, &f, 3, &d);
    int64_t took = tap_now_ms() - start;
    expect_failure(status, &report, 0, 7, 0);
    rank_check(took >= 290, "the others must get their grace of 300 ms: took %lld ms",
               (long long)took);
    rank_check(took < 300 + 5000 * test_slow_factor(),
               "SIGKILL must follow SIGTERM soon: took %lld ms", (long long)took);
    check_gone(f.b, 3);
    ranks_report("after the grace time SIGTERM, then SIGKILL for one that ignores it (%lld ms)",
                 (long long)took);
    munmap(f.b, sizeof *f.b);
}

// The board of a test in which a worker is stopped. The worker must receive SIGTERM before SIGKILL.
static board *stopped_board;

static void hears(int number) {
    (void)number;
    stopped_board->reached[1] = 1;
    _exit(5);
}

static int stops(int local_rank, void *arg) {
    board *b = (board *)arg;
    if (local_rank == 1) {
        signal(SIGTERM, hears);
        sign_in(b, 1);
        raise(SIGSTOP);
        for (;;) pause();
    }
    sign_in(b, 0);
    meet(b, 2);
    tap_sleep_ms(30); // time for rank 1 to stop; the test does not need it
    return 3;
}

static void stopped(void) {
    idist_report report;
    idist_desc d = quick_desc(&report);
    board *b = stopped_board = make_board();
    d.grace_ms = 50;
    tap_running("a worker that is stopped");
    ranks_reset();
    expect_failure(idist_spawn(stops, b, 2, &d), &report, 0, 3, 0);
    rank_check(b->reached[1], "it did not hear SIGTERM");
    check_gone(b, 2);
    ranks_report("a worker that is stopped hears SIGTERM");
    munmap(b, sizeof *b);
}

static int returns_4(int local_rank, void *arg) {
    sign_in((board *)arg, local_rank);
    return local_rank == 1 ? 4 : 0;
}

static int returns_256(int local_rank, void *arg) {
    sign_in((board *)arg, local_rank);
    return local_rank == 1 ? 256 : 0;
}

static int rank_1_is_killed(int local_rank, void *arg) {
    (void)arg;
    if (local_rank == 1) raise(SIGKILL);
    return 0;
}

// Checks exit codes, with SIGCHLD at its default and ignored. If SIGCHLD is ignored, the kernel
// reaps the workers and their wait status is lost.
static void exit_codes(void) {
    idist_report report;
    idist_desc d = quick_desc(&report);
    board *b = make_board();
    tap_running("exit codes");
    ranks_reset();
    expect_failure(idist_spawn(returns_256, b, 2, &d), &report, 1, 1, 0);
    ranks_report("a worker that returns 256 has failed");
    ranks_reset();
    signal(SIGCHLD, SIG_IGN);
    rank_ok(-1, idist_spawn(works, b, 3, &d));
    expect_failure(idist_spawn(returns_4, b, 3, &d), &report, 1, 4, 0);
    expect_failure(idist_spawn(rank_1_is_killed, b, 3, &d), &report, 1, -1,
                   0); // no process knows how the worker ended
    rank_check(strstr(report.text, "SIGCHLD") != NULL, "got \"%s\"", report.text);
    signal(SIGCHLD, SIG_DFL);
    ranks_report("exit codes with SIGCHLD ignored");
    munmap(b, sizeof *b);
}

// Aborts a group of all ranks. The world must stay usable.
static void survive_an_abort(void) {
    idist_group *group = NULL;
    idist_opts opts = {0};
    rank_ok(-1, idist_split(NULL, 0, 0, &group));
    opts.group = group;
    if (idist_get_rank() == 0) rank_ok(0, idist_abort(group));
    rank_is(-1, idist_barrier(&opts), IDIST_ERR_ABORTED);
    rank_ok(-1, idist_free_group(&group));
}

static int returns_5_after_an_abort(int local_rank, void *arg) {
    int i, through = 1;
    (void)arg;
    survive_an_abort();
    if (local_rank == 2) { // after the other ranks have sent
        for (i = 0; i < 2; i++) rank_ok(2, idist_recv(&through, 1, IDIST_I32, i, 0, NULL, NULL));
        return 5;
    }
    (void)idist_send(&through, 1, IDIST_I32, 2, 0, NULL);
    return idist_barrier(NULL) != IDIST_OK;
}

// Returns 0 on every rank, but idist_finalize fails, because rank 0 is in idist_finalize while all
// other ranks are in a barrier.
static int ends_badly_after_an_abort(int local_rank, void *arg) {
    (void)arg;
    survive_an_abort();
    if (local_rank != 0) rank_is(local_rank, idist_barrier(NULL), IDIST_ERR_MISMATCH);
    return 0;
}

// Aborts the world on the last rank, so the calls of all other ranks fail and those ranks end
// before the last rank.
static int aborts_the_world(int local_rank, void *arg) {
    (void)arg;
    if (local_rank != 2) return idist_barrier(NULL) != IDIST_OK;
    rank_ok(2, idist_abort(NULL));
    idist_set_last_error("the disk is full");
    return 6;
}

static int all_return_0(int local_rank, void *arg) {
    (void)arg;
    if (local_rank == 2) rank_ok(2, idist_abort(NULL));
    rank_is(local_rank, idist_barrier(NULL), IDIST_ERR_ABORTED);
    return 0;
}

static void world_aborted(void) {
    idist_report report;
    idist_desc d = quick_desc(&report);
    tap_running("a worker that aborts the world");
    ranks_reset();
    expect_failure(idist_spawn(aborts_the_world, NULL, 3, &d), &report, 2, 6, 0);
    rank_check(strstr(report.text, "the disk is full") != NULL, "the report: %s", report.text);
    ranks_report("the first failure is that of the worker that aborted, with the text that it set");
    ranks_reset();
    rank_ok(-1, idist_spawn(all_return_0, NULL, 3, &d));
    ranks_report("workers of an aborted world may succeed, also the one that aborted it");
}

// Checks that the abort of a group does not hide a failure. A worker counts as failed because of
// another worker only if the world is lost or aborted.
static void group_aborted_before(void) {
    idist_report report;
    idist_desc d = quick_desc(&report);
    idist_status status;
    tap_running("failures after the abort of a group");
    ranks_reset();
    expect_failure(idist_spawn(returns_5_after_an_abort, NULL, 3, &d), &report, 2, 5, 0);
    ranks_report("the first failure is found after the abort of a group");
    ranks_reset();
    status = idist_spawn(ends_badly_after_an_abort, NULL, 3, &d);
    rank_is(-1, status, IDIST_ERR_WORKER_FAILED);
    ranks_report("a finalize that fails is noticed after the abort of a group");
}

static int counts(int local_rank, void *arg) {
    (void)local_rank;
    __atomic_add_fetch(&((board *)arg)->go, 1, __ATOMIC_ACQ_REL);
    return 0;
}

// Restricts the calling process to the first n cores of the mask. Returns the number of cores that
// are left, which is lower if the mask has fewer cores.
static int use_cores(const unsigned long *mask, int n) {
    unsigned long some[64] = {0};
    int got = 0;
    for (int i = 0; i < 64 * 64 && got < n; i++) {
        if (!(mask[i / 64] >> (i % 64) & 1)) continue;
        some[i / 64] |= 1ul << (i % 64);
        got++;
    }
    TAP_REQUIRE(syscall(SYS_sched_setaffinity, 0, sizeof some, some) == 0);
    return got;
}

static void one_per_core(void) {
    unsigned long mask[64] = {0};
    board *b = make_board();
    tap_running("a worker per core");
    ranks_reset();
    TAP_REQUIRE(syscall(SYS_sched_getaffinity, 0, sizeof mask, mask) > 0);
    for (int n = 1; n <= 3; n++) {
        int n_cores = use_cores(mask, n);
        b->go = 0;
        rank_ok(-1, idist_spawn(counts, b, 0, NULL));
        rank_check(b->go == n_cores, "got %d workers on %d cores", b->go, n_cores);
    }
    use_cores(mask, 64 * 64);
    ranks_report("spawn of 0 starts one worker per core that this process may use");
    munmap(b, sizeof *b);
}

// The cores that a worker may use: all cores of its parent, or with desc.bind one core, assigned
// round-robin.
typedef struct cores {
    unsigned long mask[64];
    int n; // number of bits in the mask
    bool bound;
} cores;

static int looks_at_cores(int local_rank, void *arg) {
    const cores *all = (const cores *)arg;
    unsigned long mask[64] = {0};
    int k = 0;
    TAP_REQUIRE(syscall(SYS_sched_getaffinity, 0, sizeof mask, mask) > 0);
    for (int i = 0; i < 64 * 64; i++) {
        bool allowed = all->mask[i / 64] >> (i % 64) & 1, used = mask[i / 64] >> (i % 64) & 1;
        bool expected = allowed && (!all->bound || k == local_rank % all->n);
        rank_check(used == expected, "rank %d, processor %d: %s", local_rank, i,
                   used ? "may be used" : "may not be used");
        k += allowed;
    }
    return 0;
}

static void cores_of_workers(void) {
    cores all;
    idist_report report;
    idist_desc d = quick_desc(&report);
    memset(&all, 0, sizeof all);
    TAP_REQUIRE(syscall(SYS_sched_getaffinity, 0, sizeof all.mask, all.mask) > 0);
    for (int i = 0; i < 64 * 64; i++) all.n += (int)(all.mask[i / 64] >> (i % 64) & 1);
    for (int bound = 0; bound < 2; bound++) {
        all.bound = bound && all.n > 1;
        d.bind = bound ? "core" : "none";
        for (int n = 2; n <= all.n + 2 && n <= 8; n++) {
            tap_running("%d workers, bind=%s", n, d.bind);
            ranks_reset();
            rank_ok(-1, idist_spawn(looks_at_cores, &all, n, &d));
            ranks_report("%d workers, bind=%s: the cores that each may use", n, d.bind);
        }
    }
}

static int survivor(int local_rank, void *arg) {
    failing *f = (failing *)arg;
    sign_in(f->b, local_rank);
    meet(f->b, f->n);
    if (local_rank == 1) return 3;
    tap_sleep_ms(500); // far longer than the grace time
    f->b->reached[local_rank] = 1;
    return 0;
}

static void keep_going(void) {
    idist_report report;
    idist_desc d = quick_desc(&report);
    failing f = {NULL, 0, 1, 3};
    f.b = make_board();
    d.grace_ms = 50;
    d.keep_going = true;
    tap_running("keep_going");
    ranks_reset();
    expect_failure(idist_spawn(survivor, &f, 3, &d), &report, 1, 3, 0);
    rank_check(f.b->reached[0] && f.b->reached[2], "the survivors must run to their end");
    check_gone(f.b, 3);
    ranks_report("keep_going leaves the survivors alone");
    munmap(f.b, sizeof *f.b);
}

//------------------------------------------------------------------------------
// idist_parallel_run
//------------------------------------------------------------------------------

typedef struct nodes {
    int port;
    board b;
} nodes;

// Rank r of 4 must be local rank r % 2 of node r / 2.
static int node_worker(int local_rank, void *arg) {
    nodes *s = (nodes *)arg;
    int32_t x = 1, y = 0;
    int rank = idist_get_rank();
    rank_ok(rank, idist_all_reduce(&x, &y, 1, IDIST_I32, IDIST_SUM, NULL));
    rank_check(y == 4 && rank % 2 == local_rank, "rank %d: sum %d, local rank %d", rank, y,
               local_rank);
    __atomic_add_fetch(&s->b.reached[rank], 1, __ATOMIC_ACQ_REL);
    return 0;
}

static int node(int number, void *arg) {
    nodes *s = (nodes *)arg;
    idist_desc d = desc_with("auto", "auto");
    d.nnodes = 2;
    d.node_rank = number;
    d.nproc_per_node = 2;
    d.master_addr = "127.0.0.1";
    d.master_port = s->port;
    d.timeout_ms = d.init_timeout_ms = RANKS_TIMEOUT_MS;
    return rank_ok(-1, idist_parallel_run(&d, node_worker, s)) ? 0 : 1;
}

static int waits_for_go(int local_rank, void *arg) {
    board *b = (board *)arg;
    sign_in(b, local_rank);
    while (!__atomic_load_n(&b->go, __ATOMIC_ACQUIRE)) tap_sleep_ms(5);
    return 0;
}

static int waits_for_ever_but_1(int local_rank, void *arg) {
    board *b = (board *)arg;
    if (local_rank == 1) {
        meet(b, 1);
        return 6;
    }
    return waits_for_go(local_rank, arg);
}

// Starts workers that run beside the caller, and polls, waits for, and kills them.
static void beside_the_caller(void) {
    board *b = make_board();
    idist_report report;
    idist_desc d = quick_desc(&report);
    idist_workers *w = NULL;
    bool done = true;
    int64_t start;
    ranks_reset();
    tap_running("spawn_start, poll, wait, kill");
    rank_ok(-1, idist_spawn_start(waits_for_go, b, 3, &d, &w));
    meet(b, 3);
    rank_ok(-1, idist_spawn_poll(w, &done));
    rank_check(!done, "they still run");
    start = tap_now_ms();
    rank_is(-1, idist_spawn_wait(w, 150), IDIST_ERR_TIMEOUT);
    rank_check(tap_now_ms() - start >= 150, "waited %d ms only", (int)(tap_now_ms() - start));
    rank_ok(-1, idist_spawn_kill(w, 0));
    rank_is(-1, idist_spawn_kill(w, 1000), IDIST_ERR_ARG);
    __atomic_store_n(&b->go, 1, __ATOMIC_RELEASE);
    for (start = tap_now_ms(); !done && tap_now_ms() - start < 5000 * test_slow_factor();
         tap_sleep_ms(1))
        rank_ok(-1, idist_spawn_poll(w, &done));
    rank_check(done, "they have ended");
    rank_ok(-1, idist_spawn_wait(w, -1));
    check_gone(b, 3);

    memset(b, 0, sizeof *b);
    rank_ok(-1, idist_spawn_start(waits_for_go, b, 2, &d, &w));
    meet(b, 2);
    rank_ok(-1, idist_spawn_kill(w, SIGTERM));
    rank_is(-1, idist_spawn_wait(w, 5000 * test_slow_factor()), IDIST_ERR_WORKER_FAILED);
    rank_check(report.signal == SIGTERM, "signal %d", report.signal);
    check_gone(b, 2);

    // One worker fails, and polling alone ends all other workers.
    memset(b, 0, sizeof *b);
    rank_ok(-1, idist_spawn_start(waits_for_ever_but_1, b, 3, &d, &w));
    for (start = tap_now_ms(), done = false;
         !done && tap_now_ms() - start < 5000 * test_slow_factor(); tap_sleep_ms(5))
        rank_ok(-1, idist_spawn_poll(w, &done));
    rank_check(done, "polling ends those that are left");
    rank_is(-1, idist_spawn_wait(w, 0), IDIST_ERR_WORKER_FAILED);
    rank_check(report.rank == 1 && report.exit_code == 6, "rank %d, code %d", report.rank,
               report.exit_code);
    check_gone(b, 3);

    rank_ok(-1, idist_spawn_wait(NULL, 0));
    rank_ok(-1, idist_spawn_kill(NULL, SIGTERM));
    rank_is(-1, idist_spawn_start(waits_for_go, b, 2, &d, NULL), IDIST_ERR_ARG);
    ranks_report("workers beside the caller: poll, wait with a time-out, kill");
    munmap(b, sizeof *b);
}

static void keep_lines(idist_log_level level, const char *line, void *user) {
    char *kept = (char *)user;
    size_t n = strlen(kept);
    if (level == IDIST_LOG_INFO) snprintf(kept + n, 2000 - n, "%s\n", line);
}

// Checks what idist_parallel_run logs at info level. Ignite's Parallel logs the same lines.
static void parallel_log(void) {
    static const char *const spawned[] = {
        "Initialized distributed launcher with backend: 'ring'",
        "- Parameters to spawn processes: nproc_per_node: 2, nnodes: 1, node_rank: 0",
        "Spawn function 'works' in 2 processes", "End of run"};
    static const char *const joined[] = {"Initialized processing group with backend: 'self'",
                                         "- Run 'works' in 1 processes", "End of run",
                                         "Finalized processing group with backend: 'self'"};
    char kept[2000], before[20];
    board *b = make_board();
    idist_report report;
    idist_desc d = quick_desc(&report);
    ranks_reset();
    tap_running("the log of parallel_run");
    snprintf(before, sizeof before, "%s", getenv("IDIST_LOG") ? getenv("IDIST_LOG") : "warn");
    setenv("IDIST_LOG", "info", 1);
    d.logger.log_fn = keep_lines;
    d.logger.user = kept;
    for (int turn = 0; turn < 2; turn++) {
        const char *at = kept;
        memset(kept, 0, sizeof kept);
        d.nproc_per_node = turn ? 0 : 2;
        d.backend = turn ? NULL : "ring";
        rank_ok(-1, idist_parallel_run(&d, works, b));
        for (int i = 0; i < 4 && at; i++)
            if ((at = strstr(at, turn ? joined[i] : spawned[i])) == NULL)
                rank_fail("not in the log, or not in order: %s; the log: %s",
                          turn ? joined[i] : spawned[i], kept);
    }
    d.backend = "self";
    rank_ok(-1, idist_parallel_run(&d, works, b));
    d.backend = "ring,horovod";
    rank_is(-1, idist_parallel_run(&d, works, b), IDIST_ERR_NO_BACKEND);
    rank_check(strstr(idist_last_error(),
                      "Unknown backend 'horovod'. Available backends: ring,self") != NULL,
               "got \"%s\"", idist_last_error());
    setenv("IDIST_LOG", before, 1);
    ranks_report("idist_parallel_run logs what Ignite's Parallel does");
    munmap(b, sizeof *b);
}

static int rank_1_fails(int local_rank, void *arg) {
    (void)local_rank;
    (void)arg;
    if (idist_get_rank() == 1) return 3;
    rank_is(0, idist_barrier(NULL), IDIST_ERR_PEER_LOST);
    return 0;
}

// Joins the world of a launcher. Rank 1 of the world fails while rank 0 waits for it.
static int under_a_launcher(int rank, void *arg) {
    nodes *s = (nodes *)arg;
    idist_desc d = desc_with(NULL, NULL);
    char port[20];
    snprintf(port, sizeof port, "%d", s->port);
    setenv("RANK", rank ? "1" : "0", 1);
    setenv("WORLD_SIZE", "2", 1);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    setenv("MASTER_PORT", port, 1);
    d.timeout_ms = 5000 * test_slow_factor();
    int64_t start = tap_now_ms();
    rank_is(rank, idist_parallel_run(&d, rank_1_fails, NULL),
            rank ? IDIST_ERR_WORKER_FAILED : IDIST_ERR_PEER_LOST);
    rank_check(tap_now_ms() - start < 2000 * test_slow_factor(), "rank %d: %d ms", rank,
               (int)(tap_now_ms() - start));
    return 0;
}

static int signs_in(int local_rank, void *arg) {
    sign_in((board *)arg, local_rank);
    return 0;
}

static void parallel_run(void) {
    nodes *s = (nodes *)shared_alloc(sizeof *s);
    idist_desc d = desc_with(NULL, NULL);
    tap_running("parallel_run");
    ranks_reset();
    d.nproc_per_node = 1;
    rank_ok(-1, idist_parallel_run(&d, signs_in, &s->b));
    rank_check(s->b.pid[0] != 0 && s->b.pid[0] != getpid(), "one worker is a process of its own");
    rank_ok(-1, idist_parallel_run(NULL, signs_in, &s->b));
    rank_check(s->b.pid[0] == getpid() && !idist_is_initialized(),
               "without a number it runs here, and leaves no world");
    ranks_report("idist_parallel_run here, and in one worker");
    s->port = free_port();
    tap_running("parallel_run on two nodes");
    ranks_reset();
    procs_run(2, 15000, node, s);
    for (int k = 0; k < 4; k++)
        rank_check(s->b.reached[k] == 1, "rank %d ran %d times", k, s->b.reached[k]);
    ranks_report("idist_parallel_run on two nodes of two workers");
    tap_running("parallel_run under a launcher");
    ranks_reset();
    procs_run(2, 15000, under_a_launcher, s);
    ranks_report(
        "idist_parallel_run under a launcher: a rank that fails does not hold up the others");
    munmap(s, sizeof *s);
}

//------------------------------------------------------------------------------
// nothing changes in the parent
//------------------------------------------------------------------------------

typedef struct snapshot {
    struct sigaction action[65];
    sigset_t mask;
    char *env;
    int fds, threads, shm, tmp;
} snapshot;

static void handler(int number) { (void)number; }

static char *copy_environ(void) {
    size_t nbytes = 1;
    for (char **e = environ; *e; e++) nbytes += strlen(*e) + 1;
    char *text = (char *)calloc(nbytes, 1), *p = text;
    TAP_REQUIRE(text);
    for (char **e = environ; *e; e++) p += snprintf(p, nbytes - (size_t)(p - text), "%s\n", *e);
    return text;
}

static void take(snapshot *s) {
    memset(s, 0, sizeof *s);
    for (int i = 1; i <= 64; i++) sigaction(i, NULL, &s->action[i]);
    sigprocmask(SIG_SETMASK, NULL, &s->mask);
    s->env = copy_environ();
    s->fds = count_fds();
    s->threads = count_threads();
    s->shm = count_entries("/dev/shm", "");
    s->tmp = count_entries("/tmp", "idist");
}

// Returns true if two actions are equal. Ignores the padding and the address of libc's return stub.
static bool same_action(const struct sigaction *a, const struct sigaction *b) {
    const int restorer = 0x04000000;
    for (int i = 1; i <= 64; i++)
        if (sigismember(&a->sa_mask, i) != sigismember(&b->sa_mask, i)) return false;
    return a->sa_handler == b->sa_handler && (a->sa_flags & ~restorer) == (b->sa_flags & ~restorer);
}

static void compare(const snapshot *a, const snapshot *b) {
    for (int i = 1; i <= 64; i++)
        rank_check(same_action(&a->action[i], &b->action[i]), "the handler of signal %d changed",
                   i);
    for (int i = 1; i <= 64; i++)
        rank_check(sigismember(&a->mask, i) == sigismember(&b->mask, i),
                   "the mask of signal %d changed", i);
    rank_check(strcmp(a->env, b->env) == 0, "the environment changed");
    rank_check(a->fds == b->fds, "open fds: got %d expected %d", b->fds, a->fds);
    rank_check(a->threads == b->threads, "threads: got %d expected %d", b->threads, a->threads);
    rank_check(a->shm == b->shm, "files in /dev/shm: got %d expected %d", b->shm, a->shm);
    rank_check(a->tmp == b->tmp, "files of idist in /tmp: got %d expected %d", b->tmp, a->tmp);
}

static board *atexit_board;

static void count_atexit(void) {
    if (atexit_board) __atomic_add_fetch(&atexit_board->n_atexit, 1, __ATOMIC_ACQ_REL);
}

static int child_of_the_program(void) {
    pid_t pid = fork();
    TAP_REQUIRE(pid >= 0);
    if (pid == 0) _exit(33);
    return (int)pid;
}

static void parent_unchanged(void) {
    snapshot before, after;
    idist_report report;
    idist_desc d = quick_desc(&report);
    failing f = {NULL, KILLED, 1, 3};
    board *b = make_board();
    int wait_status = 0;
    tap_running("what idist_spawn changes in the parent");
    ranks_reset();
    struct sigaction sa;
    memset(&sa, 0, sizeof sa);
    sa.sa_handler = handler;
    sigaction(SIGCHLD, &sa, NULL);
    sigaction(SIGTERM, &sa, NULL);
    signal(SIGPIPE, SIG_DFL);
    atexit_board = b;
    atexit(count_atexit);
    int own_child = child_of_the_program();    // the library must not reap it
    rank_ok(-1, idist_spawn(works, b, 2, &d)); // creates objects that are never freed
    take(&before);
    rank_ok(-1, idist_spawn(works, b, 3, &d));
    f.b = make_board();
    idist_status status = idist_spawn(one_fails, &f, 3, &d);
    rank_check(status == IDIST_ERR_WORKER_FAILED, "got %s", idist_status_name(status));
    take(&after);
    compare(&before, &after);
    rank_check(b->n_atexit == 0, "%d workers ran the program's atexit handlers", b->n_atexit);
    atexit_board = NULL;
    rank_check(waitpid(own_child, &wait_status, 0) == own_child && WEXITSTATUS(wait_status) == 33,
               "the program's own child was reaped by somebody else");
    signal(SIGCHLD, SIG_DFL);
    signal(SIGTERM, SIG_DFL);
    ranks_report("signal handlers, mask, environment, fds, threads and files are as before");
    free(before.env);
    free(after.env);
    munmap(b, sizeof *b);
    munmap(f.b, sizeof *f.b);
}

static FILE *shared_file;

static int writes(int local_rank, void *arg) {
    (void)arg;
    fprintf(shared_file, "[worker %d]\n", local_rank);
    return 0;
}

static int count_text(const char *text, const char *part) {
    int n = 0;
    for (const char *p = strstr(text, part); p; p = strstr(p + 1, part)) n++;
    return n;
}

// Checks stdio buffers. Text that is in a buffer at the time of the fork must appear once, and the
// output of workers must not be lost.
static void buffered_output(void) {
    char text[4096] = "";
    tap_running("stdio buffers");
    ranks_reset();
    shared_file = tmpfile();
    TAP_REQUIRE(shared_file);
    TAP_REQUIRE(fcntl(fileno(shared_file), F_SETFL, O_APPEND) == 0);
    fprintf(shared_file, "[parent]\n");
    rank_ok(-1, idist_spawn(writes, NULL, 2, NULL));
    fflush(shared_file);
    rewind(shared_file);
    size_t n = fread(text, 1, sizeof text - 1, shared_file);
    text[n] = 0;
    rank_check(count_text(text, "[parent]") == 1, "the parent's text appears %d times",
               count_text(text, "[parent]"));
    rank_check(count_text(text, "[worker 0]") == 1 && count_text(text, "[worker 1]") == 1,
               "got \"%s\"", text);
    fclose(shared_file);
    ranks_report("buffered output appears once");
}

//------------------------------------------------------------------------------
// the parent dies
//------------------------------------------------------------------------------

static int runs_for_ever(int local_rank, void *arg) {
    failing *f = (failing *)arg;
    if (local_rank == 1) signal(SIGTERM, SIG_IGN);
    sign_in(f->b, local_rank);
    if (f->way == 1)
        idist_recv(f->b->text[0], 1, IDIST_U8, local_rank, 0, NULL, NULL); // blocks in the call
    for (int i = 0; i < 300; i++) tap_sleep_ms(100); // longer than any deadline of this test
    return 0;
}

// Runs in a separate process. Starts the process that calls idist_spawn, kills it, and waits until
// no worker is left. The supervisor is a subreaper, so that init cannot inherit an orphaned worker.
// Returns the exit code.
static int supervise(failing *f, int delay_us) {
    alarm(30);
    if (prctl(PR_SET_CHILD_SUBREAPER, 1) != 0) return 50;
    pid_t parent = fork();
    if (parent < 0) return 51;
    if (parent == 0) {
        idist_desc d = desc_with(NULL, NULL);
        d.timeout_ms = RANKS_TIMEOUT_MS;
        idist_spawn(runs_for_ever, f, f->n, &d);
        _exit(52);
    }
    if (delay_us < 0) {
        meet(f->b, f->n);
        tap_sleep_ms(20);
    } else {
        struct timespec ts = {0, delay_us * 1000L};
        nanosleep(&ts, NULL);
    }
    kill(parent, SIGKILL);
    int64_t end_ms = tap_now_ms() + 1000 * test_slow_factor();
    for (;;) {
        pid_t pid = waitpid(-1, NULL, WNOHANG);
        if (pid < 0 && errno == ECHILD) return 0;
        if (tap_now_ms() > end_ms) break;
        if (pid == 0) tap_sleep_ms(1);
    }
    for (int k = 0; k < f->n; k++)
        if (f->b->pid[k]) kill(f->b->pid[k], SIGKILL);
    return 53;
}

static void parent_dies(uint64_t *random_state) {
    int tmp = count_entries("/tmp", "idist"), shm = count_entries("/dev/shm", "");
    int trials = test_quick() ? 4 : 14;
    ranks_reset();
    for (int i = 0; i < trials; i++) {
        failing f;
        int wait_status = 0, delay_us = i < 3 ? -1 : (int)(tap_rand(random_state) % 20000);
        f.b = make_board();
        f.way = i % 2;
        f.victim = 0;
        f.n = 2 + i % 3;
        tap_running("the parent of %d workers is killed (delay %d us)", f.n, delay_us);
        pid_t pid = fork();
        TAP_REQUIRE(pid >= 0);
        if (pid == 0) _exit(supervise(&f, delay_us));
        tap_register_child(pid);
        TAP_REQUIRE(waitpid(pid, &wait_status, 0) == pid);
        tap_forget_child(pid);
        rank_check(WIFEXITED(wait_status) && WEXITSTATUS(wait_status) == 0,
                   "trial %d, %d workers, delay %d us: wait status 0x%x (exit code 53: workers "
                   "were left after 1 s)",
                   i, f.n, delay_us, (unsigned)wait_status);
        munmap(f.b, sizeof *f.b);
    }
    rank_check(count_entries("/tmp", "idist") == tmp, "files in /tmp: got %d expected %d",
               count_entries("/tmp", "idist"), tmp);
    rank_check(count_entries("/dev/shm", "") == shm, "files in /dev/shm: got %d expected %d",
               count_entries("/dev/shm", ""), shm);
    ranks_report("SIGKILL of the parent ends all workers within 1 s, and leaves no file");
}

int main(void) {
    uint64_t random_state = tap_seed();
    private_folders();
    tap_deadline(90);
    (void)ranks__log();
    all_well();
    beside_the_caller();
    failures(&random_state);
    grace();
    stopped();
    exit_codes();
    world_aborted();
    group_aborted_before();
    one_per_core();
    cores_of_workers();
    keep_going();
    parallel_run();
    parallel_log();
    parent_unchanged();
    buffered_output();
    parent_dies(&random_state);
    return tap_done();
}
