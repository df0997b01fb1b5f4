// tap.h - writes TAP, the Test Anything Protocol, for tests that fork, use threads, and may hang
//
// Do this:
//     tap_deadline(30);                                 // before any thread is started
//     tap_running("all_reduce n=%d", n);                // text that the watchdog prints
//     tap_ok(x == 3, "x is three");                     // ok 1 - x is three
//     tap_is(got, expected, "number of ranks");         // not ok 2 - ..., then both values
//     return tap_done();                                // 1..2, exit status
//
// Each line of output is one write(2). So there is no stdio buffer that a forked child could print
// again, and lines of different threads do not mix. The watchdog is a process. A thread or a signal
// would not work, because tests count threads, compare signal handlers, and flood the process with
// SIGALRM. tap_deadline starts the watchdog, which ends with the test.
#ifndef TAP_H
#define TAP_H

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define TAP_PRINTF(fmt_arg, first_arg) __attribute__((format(printf, fmt_arg, first_arg)))
#define TAP_MAX_CHILDREN 512

// State that the watchdog process shares with the test, and can still read when the test is stuck.
typedef struct tap_shared {
    int64_t deadline_ns;
    char running[400];
    pid_t children[TAP_MAX_CHILDREN];
} tap_shared;

typedef struct tap_state {
    pthread_mutex_t lock;
    int n_run, n_failed, n_planned;
    uint64_t seed;
    bool seed_known;
    pid_t owner, watchdog;
    tap_shared *shared;
} tap_state;

static inline tap_state *tap__state(void) {
    static tap_state state = {PTHREAD_MUTEX_INITIALIZER, 0, 0, 0, 0, false, 0, 0, NULL};
    return &state;
}

// Returns true if this machine is big-endian.
static inline bool tap__big_endian(void) {
    const uint16_t one = 1;
    unsigned char first;
    memcpy(&first, &one, 1);
    return first == 0;
}
// Loads an integer of nbytes bytes at `from`, in the byte order of this machine.
static inline uint64_t tap_load_bits(const void *from, size_t nbytes) {
    uint64_t bits = 0;
    memcpy((unsigned char *)&bits + (tap__big_endian() ? sizeof bits - nbytes : 0), from, nbytes);
    return bits;
}
// Stores the low nbytes bytes of an integer to `to`, in the byte order of this machine.
static inline void tap_store_bits(void *to, uint64_t bits, size_t nbytes) {
    memcpy(to, (const unsigned char *)&bits + (tap__big_endian() ? sizeof bits - nbytes : 0),
           nbytes);
}

static inline int64_t tap_now_ns(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

static inline int64_t tap_now_ms(void) { return tap_now_ns() / 1000000; }

// Returns the time in ns for which the main thread of a process was ready to run but waited for a
// processor. Returns 0 if the kernel does not count that time. A test extends its time limits by
// the increase of this value.
static inline int64_t tap_waited_ns(pid_t pid) {
    char path[64];
    long long waited_ns = 0;
    FILE *f;
    snprintf(path, sizeof path, "/proc/%d/schedstat", (int)pid);
    f = fopen(path, "r");
    if (f && fscanf(f, "%*u %lld", &waited_ns) != 1) waited_ns = 0;
    if (f) fclose(f);
    return (int64_t)waited_ns;
}

// Returns the total time in ns for which the threads of this process have waited for a processor.
static inline int64_t tap_all_waited_ns(void) {
    int64_t sum_ns = 0;
    DIR *threads = opendir("/proc/self/task");
    for (struct dirent *e; threads && (e = readdir(threads)) != NULL;)
        if (e->d_name[0] != '.') sum_ns += tap_waited_ns((pid_t)atoi(e->d_name));
    if (threads) closedir(threads);
    return sum_ns;
}

// Returns the time in ns for which this machine has waited for its processors. It is 0 unless this
// is a virtual machine.
static inline int64_t tap_stolen_ns(void) {
    unsigned long long ticks = 0;
    FILE *f = fopen("/proc/stat", "r");
    if (f && fscanf(f, "cpu %*u %*u %*u %*u %*u %*u %*u %llu", &ticks) != 1) ticks = 0;
    if (f) fclose(f);
    return (int64_t)(ticks * (1000000000ull / (unsigned long)sysconf(_SC_CLK_TCK)));
}

static inline void tap_sleep_ms(int ms) {
    struct timespec ts = {ms / 1000, (long)(ms % 1000) * 1000000};
    while (nanosleep(&ts, &ts) != 0 && errno == EINTR) {}
}

static inline void tap__write(const char *text, size_t nbytes) {
    while (nbytes > 0) {
        ssize_t k = write(STDOUT_FILENO, text, nbytes);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) return;
        text += k;
        nbytes -= (size_t)k;
    }
}

// Writes one line of output. Replaces newlines in the text by spaces, because they would break the
// protocol.
static inline void tap__vline(const char *head, const char *fmt, va_list args) {
    char line[2048];
    size_t n = (size_t)snprintf(line, sizeof line - 1, "%s", head);
    size_t start = n;
    int k = vsnprintf(line + n, sizeof line - 1 - n, fmt, args);
    if (k > 0) n += (size_t)k < sizeof line - 2 - n ? (size_t)k : sizeof line - 2 - n;
    for (size_t i = start; i < n; i++)
        if (line[i] == '\n' || line[i] == '\r') line[i] = ' ';
    line[n++] = '\n';
    tap__write(line, n);
}

static inline void tap_diag(const char *fmt, ...) TAP_PRINTF(1, 2);
static inline void tap_diag(const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    tap__vline("#   ", fmt, args);
    va_end(args);
}

// Returns the seed of all random numbers in this test. Failures print the seed. To repeat a run,
// set IDIST_TEST_SEED to its seed.
static inline uint64_t tap_seed(void) {
    tap_state *t = tap__state();
    pthread_mutex_lock(&t->lock);
    if (!t->seed_known) {
        const char *text = getenv("IDIST_TEST_SEED");
        t->seed = text && *text ? strtoull(text, NULL, 0)
                                : (uint64_t)tap_now_ns() % 1000000007u + (uint64_t)getpid();
        t->seed_known = true;
    }
    pthread_mutex_unlock(&t->lock);
    return t->seed;
}

static inline uint64_t tap_mix(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

static inline uint64_t tap_rand(uint64_t *state) {
    *state += 0x9E3779B97F4A7C15u;
    return tap_mix(*state);
}

static inline tap_shared *tap__shared(void) {
    tap_state *t = tap__state();
    if (!t->shared) {
        void *p = mmap(NULL, sizeof(tap_shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                       -1, 0);
        if (p == MAP_FAILED) {
            tap__write("Bail out! mmap failed\n", 22);
            _exit(99);
        }
        t->shared = (tap_shared *)p;
        t->owner = getpid();
    }
    return t->shared;
}

// Registers a child that is killed if the test bails out or hangs.
static inline void tap_register_child(pid_t pid) {
    tap_shared *s = tap__shared();
    for (int i = 0; i < TAP_MAX_CHILDREN; i++) {
        pid_t expected = 0;
        if (__atomic_compare_exchange_n(&s->children[i], &expected, pid, false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_ACQUIRE))
            return;
    }
}

static inline void tap_forget_child(pid_t pid) {
    tap_shared *s = tap__shared();
    for (int i = 0; i < TAP_MAX_CHILDREN; i++)
        if (__atomic_load_n(&s->children[i], __ATOMIC_ACQUIRE) == pid)
            __atomic_store_n(&s->children[i], 0, __ATOMIC_RELEASE);
}

static inline void tap_kill_children(void) {
    tap_shared *s = tap__shared();
    for (int i = 0; i < TAP_MAX_CHILDREN; i++) {
        pid_t pid = __atomic_exchange_n(&s->children[i], 0, __ATOMIC_ACQ_REL);
        if (pid > 1) kill(pid, SIGKILL);
    }
}

static inline void tap_bail(const char *fmt, ...) TAP_PRINTF(1, 2) __attribute__((noreturn));
static inline void tap_bail(const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    tap__vline("Bail out! ", fmt, args);
    va_end(args);
    tap_diag("seed: %llu (repeat with IDIST_TEST_SEED)", (unsigned long long)tap_seed());
    tap_kill_children();
    if (tap__state()->watchdog > 0) kill(tap__state()->watchdog, SIGKILL);
    _exit(99);
}

// Asserts a condition that the test itself needs (memory, fork, ...). NDEBUG does not remove the
// check.
#define TAP_REQUIRE(cond)                                                                       \
    do {                                                                                        \
        if (!(cond)) tap_bail("%s:%d: %s failed (errno %d)", __FILE__, __LINE__, #cond, errno); \
    } while (0)

// Records what the test is doing. The watchdog prints the text if the test hangs.
static inline void tap_running(const char *fmt, ...) TAP_PRINTF(1, 2);
static inline void tap_running(const char *fmt, ...) {
    tap_shared *s = tap__shared();
    va_list args;
    va_start(args, fmt);
    pthread_mutex_lock(&tap__state()->lock);
    vsnprintf(s->running, sizeof s->running, fmt, args);
    pthread_mutex_unlock(&tap__state()->lock);
    va_end(args);
}

static inline void tap__hang(pid_t test) {
    char line[600];
    tap_shared *s = tap__shared();
    s->running[sizeof s->running - 1] = 0;
    int k = snprintf(line, sizeof line, "Bail out! hang: %s (seed %llu)\n",
                     s->running[0] ? s->running : "test", (unsigned long long)tap__state()->seed);
    if (k > 0) tap__write(line, (size_t)k < sizeof line ? (size_t)k : sizeof line - 1);
    tap_kill_children();
    kill(test, SIGKILL);
    _exit(98);
}

static inline void tap__watch(pid_t test) {
    prctl(PR_SET_NAME, "tap-watchdog");
    signal(SIGPIPE, SIG_IGN);
    signal(SIGINT, SIG_DFL);
    while (getppid() == test) {
        if (tap_now_ns() > __atomic_load_n(&tap__shared()->deadline_ns, __ATOMIC_ACQUIRE))
            tap__hang(test);
        tap_sleep_ms(50);
    }
    tap_kill_children(); // the test was killed, and its ranks must not survive it
    _exit(0);
}

// Gives the test this many seconds from now on. A later call sets a new deadline. IDIST_TEST_SLOW
// multiplies the time (sanitizers, valgrind, a loaded machine).
static inline void tap_deadline(int seconds) {
    tap_state *t = tap__state();
    tap_shared *s = tap__shared();
    const char *slow = getenv("IDIST_TEST_SLOW");
    int64_t factor = slow && atoi(slow) > 0 ? atoi(slow) : 1;
    (void)tap_seed();
    __atomic_store_n(&s->deadline_ns, tap_now_ns() + factor * seconds * 1000000000,
                     __ATOMIC_RELEASE);
    if (t->watchdog != 0) return;
    pid_t test = getpid();
    pid_t pid = fork();
    TAP_REQUIRE(pid >= 0);
    if (pid == 0) tap__watch(test);
    t->watchdog = pid;
}

static inline void tap_plan(int n) {
    char line[32];
    tap__state()->n_planned = n;
    tap__write(line, (size_t)snprintf(line, sizeof line, "1..%d\n", n));
}

static inline bool tap__vresult(bool ok, const char *directive, const char *fmt, va_list args) {
    tap_state *t = tap__state();
    char text[1024], head[64];
    vsnprintf(text, sizeof text, fmt, args);
    for (char *c = text; *c; c++)
        if (*c == '#') *c = '/'; // '#' starts a directive
    pthread_mutex_lock(&t->lock);
    t->n_run++;
    if (!ok) t->n_failed++;
    snprintf(head, sizeof head, "%sok %d - ", ok ? "" : "not ", t->n_run);
    char line[1400];
    int k = snprintf(line, sizeof line - 1, "%s%s%s", head, text, directive);
    size_t n = (size_t)k < sizeof line - 2 ? (size_t)k : sizeof line - 2;
    for (size_t i = 0; i < n; i++)
        if (line[i] == '\n' || line[i] == '\r') line[i] = ' ';
    line[n++] = '\n';
    tap__write(line, n);
    pthread_mutex_unlock(&t->lock);
    if (!ok) tap_diag("seed: %llu (repeat with IDIST_TEST_SEED)", (unsigned long long)tap_seed());
    return ok;
}

static inline bool tap_ok_at(const char *file, int line, bool ok, const char *expr, const char *fmt,
                             ...) TAP_PRINTF(5, 6);
static inline bool tap_ok_at(const char *file, int line, bool ok, const char *expr, const char *fmt,
                             ...) {
    va_list args;
    va_start(args, fmt);
    tap__vresult(ok, "", fmt, args);
    va_end(args);
    if (!ok) tap_diag("at %s:%d: expected: %s", file, line, expr);
    return ok;
}
#define tap_ok(cond, ...) tap_ok_at(__FILE__, __LINE__, (cond) ? true : false, #cond, __VA_ARGS__)

static inline bool tap_is_at(const char *file, int line, long long got, long long expected,
                             const char *fmt, ...) TAP_PRINTF(5, 6);
static inline bool tap_is_at(const char *file, int line, long long got, long long expected,
                             const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    tap__vresult(got == expected, "", fmt, args);
    va_end(args);
    if (got != expected) tap_diag("at %s:%d: got: %lld expected: %lld", file, line, got, expected);
    return got == expected;
}
#define tap_is(got, expected, ...) \
    tap_is_at(__FILE__, __LINE__, (long long)(got), (long long)(expected), __VA_ARGS__)

static inline bool tap_like_at(const char *file, int line, const char *got, const char *part,
                               const char *fmt, ...) TAP_PRINTF(5, 6);
static inline bool tap_like_at(const char *file, int line, const char *got, const char *part,
                               const char *fmt, ...) {
    bool ok = got != NULL && strstr(got, part) != NULL;
    va_list args;
    va_start(args, fmt);
    tap__vresult(ok, "", fmt, args);
    va_end(args);
    if (!ok)
        tap_diag("at %s:%d: got: \"%s\" expected to contain: \"%s\"", file, line,
                 got ? got : "(null)", part);
    return ok;
}
#define tap_like(got, part, ...) tap_like_at(__FILE__, __LINE__, (got), (part), __VA_ARGS__)

// Reports one test that could not run, with the reason. The harness counts it as a skip, never as a
// pass.
static inline void tap_skip(const char *name, const char *fmt, ...) TAP_PRINTF(2, 3);
static inline void tap_skip(const char *name, const char *fmt, ...) {
    tap_state *t = tap__state();
    char reason[600];
    va_list args;
    va_start(args, fmt);
    vsnprintf(reason, sizeof reason, fmt, args);
    va_end(args);
    char line[1200];
    pthread_mutex_lock(&t->lock);
    t->n_run++;
    int k = snprintf(line, sizeof line, "ok %d - %s # SKIP %s\n", t->n_run, name, reason);
    tap__write(line, (size_t)k < sizeof line ? (size_t)k : sizeof line - 1);
    pthread_mutex_unlock(&t->lock);
}

static inline int tap__end(void) {
    tap_state *t = tap__state();
    if (t->watchdog > 0) {
        kill(t->watchdog, SIGKILL);
        while (waitpid(t->watchdog, NULL, 0) < 0 && errno == EINTR) {}
        t->watchdog = 0;
    }
    tap_kill_children();
    return 0;
}

static inline int tap_skip_all(const char *reason) {
    char line[600];
    int k = snprintf(line, sizeof line, "1..0 # SKIP %s\n", reason);
    tap__write(line, (size_t)k < sizeof line ? (size_t)k : sizeof line - 1);
    return tap__end();
}

// Prints the plan, unless tap_plan has done so. Returns the exit status for main.
static inline int tap_done(void) {
    tap_state *t = tap__state();
    bool wrong_plan = t->n_planned != 0 && t->n_planned != t->n_run;
    if (t->n_planned == 0) tap_plan(t->n_run);
    if (t->n_failed) tap_diag("%d of %d failed", t->n_failed, t->n_run);
    tap__end();
    return t->n_failed != 0 || wrong_plan || t->n_run == 0;
}

#endif // TAP_H
