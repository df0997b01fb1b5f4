// rerun: workers that execute the program again (start_method "exec"), started by a program with
// threads
#include "idist.h"

#include "ranks.h"

// This flag is set in a worker. A worker runs the main of this file up to its call, and must not
// print or start anything before that call.
static bool in_worker;
static char first_argument[100];
static int go_on = 1; // atomic; while it is 1, a thread holds malloc's locks most of the time

static void *busy(void *arg) {
    (void)arg;
    while (__atomic_load_n(&go_on, __ATOMIC_ACQUIRE)) free(malloc(100 + (size_t)getpid() % 7));
    return NULL;
}

// Holds the lock of stdin until input arrives.
static void *reader(void *arg) {
    char line[10];
    (void)arg;
    while (fgets(line, (int)sizeof line, stdin)) {}
    return NULL;
}

// Replaces stdin with a pipe to which no process writes. Returns the other end of the pipe.
static int silent_stdin(void) {
    int ends[2];
    TAP_REQUIRE(pipe(ends) == 0 && dup2(ends[0], 0) == 0);
    close(ends[0]);
    fcntl(ends[1], F_SETFD, FD_CLOEXEC); // otherwise workers would keep each other's readers alive
    return ends[1];
}

static idist_desc exec_desc(idist_report *report) {
    idist_desc d;
    memset(&d, 0, sizeof d);
    memset(report, 0, sizeof *report);
    d.start_method = "exec";
    d.timeout_ms = d.init_timeout_ms = 10000 * test_slow_factor();
    d.report = report;
    d.grace_ms = 300;
    return d;
}

static int n_children(void) {
    char path[64], line[4096];
    int n = 0;
    snprintf(path, sizeof path, "/proc/self/task/%d/children", (int)getpid());
    FILE *f = fopen(path, "r");
    if (!f) return -1;
    if (fgets(line, sizeof line, f))
        for (const char *at = line; (at = strchr(at, ' ')) != NULL; at++) n++;
    fclose(f);
    return n;
}

static int n_descriptors(void) {
    int n = 0;
    for (int fd = 0; fd < 1024; fd++) n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

static int forked(int local_rank, void *arg) {
    (void)local_rank;
    return in_worker || arg ? 9 : 0; // must never run in a worker of another call
}

typedef struct told {
    int number;
    int way;
} told;

enum { SUMS, RETURNS_5, IS_KILLED, STARTS_MORE, NESTS };

static int works(int local_rank, void *arg) {
    const told *t = (const told *)arg;
    int32_t x = t->number, y = 0;
    if (!in_worker || strcmp(first_argument, "an argument, with a space") != 0) return 20;
    if (idist_get_local_rank() != local_rank || strcmp(idist_launcher(), "spawn") != 0) return 21;
    if (idist_all_reduce(&x, &y, 1, IDIST_I32, IDIST_SUM, NULL) != IDIST_OK) return 22;
    if (y != t->number * idist_get_world_size()) return 23;
    if (t->way == RETURNS_5 && local_rank == 1) return 5;
    if (t->way == IS_KILLED && local_rank == 1) kill(getpid(), SIGKILL);
    if (t->way == STARTS_MORE) {
        // The programs inherit this worker's environment variable, although it is not meant for
        // them.
        char command[600];
        snprintf(command, sizeof command, "exec '/proc/%d/exe' inner >/dev/null", (int)getpid());
        return system(command) == 0 ? 0 : 24;
    }
    if (t->way == NESTS) {
        idist_desc d;
        memset(&d, 0, sizeof d);
        d.start_method = "exec";
        return idist_spawn(works, arg, 2, &d) == IDIST_ERR_UNSUPPORTED ? 0 : 26;
    }
    return idist_barrier(NULL) == IDIST_OK ? 0 : 25;
}

static int nothing(int local_rank, void *arg) {
    (void)local_rank;
    (void)arg;
    return 0;
}

// Runs as a separate program. Closes the standard descriptors or all other descriptors, or deletes
// the program's file. The workers of the program run this function, too.
static int odd(const char *how) {
    idist_report report;
    idist_desc d = exec_desc(&report);
    char path[300];
    ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
    if (strcmp(how, "closed") == 0) {
        for (int fd = 0; fd < 3; fd++) close(fd);
    } else if (strcmp(how, "closes") == 0) {
        for (int fd = 3; fd < 64; fd++) close(fd);
        if (getenv("IDIST_SPAWN"))
            return idist_spawn(nothing, NULL, 2, &d) == IDIST_ERR_STATE ? 44 : 1;
        return idist_spawn(nothing, NULL, 2, &d) == IDIST_ERR_WORKER_FAILED &&
                       report.exit_code == 44
                   ? 0
                   : 1;
    } else if (n > 0 && !getenv("IDIST_SPAWN")) {
        path[n] = 0;
        unlink(path);
    }
    return idist_spawn(nothing, NULL, 2, &d) == IDIST_OK ? 0 : 1;
}

// An allocator whose allocation number `scarce_fails` fails.
static int scarce_count, scarce_fails;

static void *scarce_alloc(size_t nbytes, void *user) {
    (void)user;
    return scarce_count++ == scarce_fails ? NULL : malloc(nbytes);
}

static void scarce_free(void *p, void *user) {
    (void)user;
    free(p);
}

enum { LONG_NBYTES = 6000 }; // one read of the arguments returns less

// Runs as a separate program with a long second argument. Makes each allocation of the call fail
// once. A worker that starts must get the whole argument.
static int scarce(int argc, char **argv) {
    idist_report report;
    idist_desc d = exec_desc(&report);
    if (getenv("IDIST_SPAWN")) {
        if (argc != 3 || strlen(argv[2]) != LONG_NBYTES) return 1;
        for (int i = 0; i < 100; i++) (void)idist_spawn(nothing, NULL, 1, &d); // one is its call
        return 1;
    }
    d.allocator.alloc_fn = scarce_alloc;
    d.allocator.free_fn = scarce_free;
    for (scarce_fails = 0; scarce_fails < 100; scarce_fails++) {
        idist_status s;
        scarce_count = 0;
        s = idist_spawn(nothing, NULL, 1, &d);
        if (s == IDIST_OK) return scarce_fails >= 4 ? 0 : 2;
        if (s != IDIST_ERR_NO_MEMORY) return 3;
    }
    return 4;
}

static int run_odd(const char *how) {
    char command[600], path[100];
    snprintf(path, sizeof path, "/tmp/rerun-%d", (int)getpid());
    snprintf(command, sizeof command,
             "cp /proc/%d/exe %s && %s %s $(printf %%0%dd 0); rc=$?; rm -f %s; exit $rc",
             (int)getpid(), path, path, how, LONG_NBYTES, path);
    return system(command);
}

// Makes one call of idist_spawn with "exec". The parent checks the result. A worker ends in its
// call or proceeds to a later one.
static void rerun_case(int n, int way, int rank, int exit_code, int signal_number,
                       const char *name) {
    idist_report report;
    idist_desc d = exec_desc(&report);
    told t = {40 + way, way};
    int before = n_descriptors();
    tap_running("%s", name);
    idist_status s = idist_spawn(works, &t, n, &d);
    tap_ok(s == (rank < 0 ? IDIST_OK : IDIST_ERR_WORKER_FAILED) && report.rank == rank &&
               report.exit_code == exit_code && report.signal == signal_number,
           "%s: %s, rank %d, code %d, signal %d: %s", name, idist_status_name(s), report.rank,
           report.exit_code, report.signal, report.text);
    tap_is(n_descriptors(), before, "%s: open descriptors", name);
}

// Calls idist_spawn in a process that a worker started. The call must create a separate world.
static int inner(void) {
    idist_report report;
    idist_desc d = exec_desc(&report);
    d.start_method = NULL;
    return idist_spawn(forked, &d, 2, &d) == IDIST_ERR_WORKER_FAILED && report.exit_code == 9
               ? 0
               : 1; // the function has run
}

// Tests workers that never reach their call. First the re-executed program requests a different
// number of workers. Then its workers end before their call. Returns a worker's exit code, or -1 in
// the caller.
static int never_come(void) {
    idist_report report;
    idist_workers *workers;
    told t = {7, SUMS};
    idist_desc d = exec_desc(&report);
    idist_status s = idist_spawn(works, &t, in_worker ? 3 : 2, &d);
    if (in_worker && s != IDIST_OK) return s == IDIST_ERR_STATE ? 33 : 34;
    tap_ok(s == IDIST_ERR_WORKER_FAILED && report.exit_code == 33, "another number of workers: %s",
           report.text);
    d = exec_desc(&report);
    if (in_worker) return 0;
    tap_is(idist_spawn_start(works, &t, 2, &d, &workers), IDIST_OK, "beside the caller");
    tap_is(idist_spawn_wait(workers, 20000), IDIST_ERR_WORKER_FAILED,
           "a worker that never comes to its call");
    tap_like(report.text, "exited with code 0 before its function returned",
             "and what is said of it");
    return -1;
}

static void odd_programs(void) {
    idist_report report;
    told t = {7, SUMS};
    idist_desc d = exec_desc(&report);
    tap_is(run_odd("closed"), 0, "a program without stdin, stdout and stderr");
    tap_is(run_odd("closes"), 0, "a program that closes all other descriptors: its workers say so");
    tap_is(run_odd("deleted"), 0, "a program whose file is gone");
    tap_is(run_odd("scarce"), 0, "a parent whose memory runs out");
    d.init_timeout_ms = 300 * test_slow_factor();
    int64_t start = tap_now_ms();
    setenv("RERUN_STUCK", "1", 1); // read by the main of the workers
    tap_is(idist_spawn(works, &t, 2, &d), IDIST_ERR_WORKER_FAILED,
           "workers that hang before their call");
    unsetenv("RERUN_STUCK");
    tap_ok(tap_now_ms() - start < 3000 * test_slow_factor(),
           "are waited for as long as the start may take");
    tap_like(report.text, "did not reach its call", "and it is said");
    d.start_method = "thread";
    tap_is(idist_spawn(works, &t, 2, &d), IDIST_ERR_ARG, "no such start method");
}

int main(int argc, char **argv) {
    pthread_t thread;
    idist_report report;
    char *again[3];
    if (argc > 1 && strcmp(argv[1], "inner") == 0) return inner();
    if (argc > 1 &&
        (!strcmp(argv[1], "closed") || !strcmp(argv[1], "closes") || !strcmp(argv[1], "deleted")))
        return odd(argv[1]);
    if (argc > 1 && strcmp(argv[1], "scarce") == 0) return scarce(argc, argv);
    in_worker = getenv("IDIST_SPAWN") != NULL && argc > 1;
    if (argc == 1) { // so that the workers have arguments
        again[0] = argv[0];
        again[1] = (char *)(uintptr_t) "an argument, with a space";
        again[2] = NULL;
        execv("/proc/self/exe", again);
        return 1;
    }
    snprintf(first_argument, sizeof first_argument, "%s", argv[1]);
    if (in_worker && getenv("RERUN_STUCK")) pause();
    if (in_worker && !freopen("/dev/null", "w", stdout)) return 1;
    if (!in_worker) tap_deadline(60);
    pthread_t blocked;
    int end = silent_stdin();
    bool beside = true;
// The thread sanitizer's runtime cannot start a thread in a process that was forked while another
// thread ran.
#ifdef __SANITIZE_THREAD__
    beside = false;
#endif
// The address sanitizer's allocator does not release its locks in a forked process.
#ifdef __SANITIZE_ADDRESS__
    beside = false;
#endif
    TAP_REQUIRE(!beside || pthread_create(&thread, NULL, busy, NULL) == 0);

    idist_desc d = exec_desc(&report);
    d.start_method = NULL;
    tap_is(idist_spawn(forked, in_worker ? &thread : NULL, 2, &d), IDIST_OK,
           "a call before: forked");
    TAP_REQUIRE(beside || pthread_create(&thread, NULL, busy, NULL) == 0);
    TAP_REQUIRE(pthread_create(&blocked, NULL, reader, NULL) == 0);
    rerun_case(3, SUMS, -1, 0, 0, "three workers run the program anew");
    rerun_case(1, SUMS, -1, 0, 0, "one worker");
    rerun_case(3, RETURNS_5, 1, 5, 0, "rank 1 returns 5");
    rerun_case(3, IS_KILLED, 1, -1, SIGKILL, "rank 1 is killed");
    rerun_case(2, NESTS, -1, 0, 0, "a worker that would run it anew once more is told no");
    rerun_case(2, STARTS_MORE, -1, 0, 0, "workers start programs that spawn");
    int code = never_come();
    if (code >= 0) return code;
    odd_programs();
    tap_is(n_children(), 1, "children left, besides the watchdog");
    __atomic_store_n(&go_on, 0, __ATOMIC_RELEASE);
    pthread_join(thread, NULL);
    close(end);
    pthread_join(blocked, NULL);
    return tap_done();
}
