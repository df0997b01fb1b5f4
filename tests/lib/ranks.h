// ranks.h - runs n ranks, as threads of this process or as separate processes
//
// Include after idist.h. Ranks report failures with rank_fail. The first RANKS_MESSAGES failures
// become diagnostics of the one TAP line that the run prints. The log is in shared memory, so that
// forked ranks can write to it, too.
//
//     static void body(idist_group *world, int rank, int n, void *arg) { ... }
//
//     ranks_case(3, NULL, body, NULL, "body with 3 ranks");
//
// With RANKS_MPI, the ranks are the processes of the mpirun that started the test. See ranks_mpi.h.
#ifndef RANKS_H
#define RANKS_H

#include "tap.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <strings.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#define RANKS_MAX 48
#define RANKS_MESSAGES 10
// Time-out for calls. It is longer than any call in these tests takes, so that only a deadlock
// becomes IDIST_ERR_TIMEOUT.
#define RANKS_TIMEOUT_MS 20000

typedef void (*ranks_fn)(idist_group *world, int rank, int n, void *arg);

typedef struct ranks_log {
    int n_failures;
    int n_messages;
    char message[RANKS_MESSAGES][600];
} ranks_log;

#ifdef RANKS_MPI
#include "ranks_mpi.h"
#endif

// Returns zeroed memory that forked processes share. The caller frees it with munmap.
static inline void *shared_alloc(size_t nbytes) {
#ifdef RANKS_MPI
    void *p = ranks_mpi_shared(nbytes);
    TAP_REQUIRE(p);
    return p;
#else
    void *p = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    TAP_REQUIRE(p != MAP_FAILED);
    return p;
#endif
}

static inline ranks_log *ranks__log(void) {
    static ranks_log *log_area = NULL;
    if (!log_area)
        log_area =
            (ranks_log *)shared_alloc(sizeof(ranks_log)); // called by main before it starts threads
    return log_area;
}

static inline void rank_fail(const char *fmt, ...) TAP_PRINTF(1, 2);
static inline void rank_fail(const char *fmt, ...) {
    ranks_log *log_area = ranks__log();
    __atomic_add_fetch(&log_area->n_failures, 1, __ATOMIC_ACQ_REL);
    int slot = __atomic_fetch_add(&log_area->n_messages, 1, __ATOMIC_ACQ_REL);
    if (slot >= RANKS_MESSAGES) return;
    va_list args;
    va_start(args, fmt);
    vsnprintf(log_area->message[slot], sizeof log_area->message[slot], fmt, args);
    va_end(args);
}

static inline void ranks_reset(void) {
#ifdef RANKS_MPI
    ranks_log *log_area = ranks__log(); // the first call creates the log on all ranks
    ranks_mpi_meet();
    if (!ranks_mpi.rank) memset(log_area, 0, sizeof *log_area);
    ranks_mpi_meet();
#else
    memset(ranks__log(), 0, sizeof(ranks_log));
#endif
}

// Prints one TAP line for the failures that the ranks have reported since ranks_reset.
static inline bool ranks_report(const char *fmt, ...) TAP_PRINTF(1, 2);
static inline bool ranks_report(const char *fmt, ...) {
    ranks_log *log_area = ranks__log();
#ifdef RANKS_MPI
    if (ranks_mpi.left_out) return true;
    ranks_mpi_meet();
#endif
    int n = __atomic_load_n(&log_area->n_failures, __ATOMIC_ACQUIRE);
    va_list args;
    va_start(args, fmt);
    tap__vresult(n == 0, "", fmt, args);
    va_end(args);
    for (int i = 0; i < log_area->n_messages && i < RANKS_MESSAGES; i++)
        tap_diag("%s", log_area->message[i]);
    if (n > RANKS_MESSAGES) tap_diag("... and %d more failures", n - RANKS_MESSAGES);
    return n == 0;
}

static inline void rank_fail_at(const char *file, int line, const char *condition, const char *fmt,
                                ...) TAP_PRINTF(4, 5);
static inline void rank_fail_at(const char *file, int line, const char *condition, const char *fmt,
                                ...) {
    char text[1200];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    rank_fail("%s:%d: expected %s: %s", file, line, condition, text);
}

// rank_check(cond, "x is %d", x): checks a condition inside a rank.
#define rank_check(cond, ...)                                              \
    do {                                                                   \
        if (!(cond)) rank_fail_at(__FILE__, __LINE__, #cond, __VA_ARGS__); \
    } while (0)

// Copies as much of a text as fits.
static inline void copy_text(char *dst, size_t cap, const char *src) {
    size_t n = strlen(src) < cap ? strlen(src) : cap - 1;
    memcpy(dst, src, n);
    dst[n] = 0;
}

static inline bool rank_is_status_at(const char *file, int line, int rank, idist_status got,
                                     idist_status expected, const char *what) {
    if (got == expected) return true;
    rank_fail("%s:%d: rank %d: %s: got %s expected %s; last error: %s", file, line, rank, what,
              idist_status_name(got), idist_status_name(expected), got ? idist_last_error() : "");
    return false;
}
// rank_is(rank, idist_barrier(&o), IDIST_OK): evaluates the call once and uses its text as the
// description.
#define rank_is(rank, call, expected) \
    rank_is_status_at(__FILE__, __LINE__, (rank), (call), (expected), #call)
#define rank_ok(rank, call) rank_is_status_at(__FILE__, __LINE__, (rank), (call), IDIST_OK, #call)

//------------------------------------------------------------------------------
// names in error texts
//------------------------------------------------------------------------------

// Returns true if the words before p show that the rank named at p only reports a failure and is
// not to blame.
static inline bool text_names_witness(const char *text, const char *p) {
    static const char *const before[] = {"not answer ", "connection to ", "to it from ",
                                         "the message of ", "did not reach "};
    for (size_t i = 0; i < sizeof before / sizeof *before; i++) {
        size_t n = strlen(before[i]);
        if ((size_t)(p - text) >= n && strncmp(p - n, before[i], n) == 0) return true;
    }
    return false;
}

// Returns true if the text blames "rank R". Does not match "rank R0".
static inline bool text_names_rank(const char *text, int rank) {
    char word[32];
    size_t n = (size_t)snprintf(word, sizeof word, "rank %d", rank);
    for (const char *p = strstr(text, word); p; p = strstr(p + 1, word))
        if (!isdigit((unsigned char)p[n]) && !text_names_witness(text, p)) return true;
    return false;
}

// Returns true if the text names `rank` and no other rank except perhaps the caller, `self`.
static inline bool text_names_only(const char *text, int rank, int self, int n) {
    for (int k = 0; k < n; k++)
        if (k != rank && k != self && text_names_rank(text, k)) return false;
    return text_names_rank(text, rank);
}

static inline bool text_has_word(const char *text, const char *word) {
    size_t n = strlen(word);
    for (; *text; text++)
        if (strncasecmp(text, word, n) == 0) return true;
    return false;
}

//------------------------------------------------------------------------------
// ranks as threads
//------------------------------------------------------------------------------

typedef struct ranks__thread {
    pthread_t id;
    const idist_desc *base;
    idist_store *store;
    int rank, n;
    bool close_may_fail;
    ranks_fn fn;
    void *arg;
} ranks__thread;

static inline idist_opts opts_of(idist_group *group) {
    idist_opts o;
    memset(&o, 0, sizeof o);
    o.group = group;
    return o;
}

static inline idist_opts opts_async(idist_group *group, idist_request *request) {
    idist_opts o = opts_of(group);
    o.request = request;
    return o;
}

// Returns true if desc->transport makes the ranks believe that they are on several hosts. These
// values are not transports of the library.
//
// * "hosts" puts even and odd ranks on one host each
// * "blocks" puts consecutive ranks on each host, and uses three hosts from 7 ranks on
// * "3+3+2" gives the number of ranks on each host
static inline bool ranks__placed(const idist_desc *desc) {
    const char *transport = desc && desc->transport ? desc->transport : "";
    return isdigit((unsigned char)*transport) || strcmp(transport, "hosts") == 0 ||
           strcmp(transport, "blocks") == 0;
}

static inline int ranks__host_of(const char *transport, int rank, int n) {
    int host = 0, each = n < 7 ? (n + 1) / 2 : 3;

    if (*transport == 'h') return rank % 2;
    if (*transport == 'b') return rank / each;
    for (;; host++) {
        char *end = NULL;
        rank -= (int)strtol(transport, &end, 10);
        if (rank < 0 || *end != '+') return host;
        transport = end + 1;
    }
}

// Returns the path of the network namespaces without their numbers, or NULL. If IDIST_TEST_NETWORK
// is set, the hosts are namespaces that tests/lib/net.sh has created. IDIST_TEST_MASTER is the
// address of the first host.
static inline const char *ranks__network(const idist_desc *desc) {
    return ranks__placed(desc) ? getenv("IDIST_TEST_NETWORK") : NULL;
}

// Moves this thread, and the threads that it starts from now on, to a host.
static inline void ranks__enter(const char *network, int host) {
    char path[200];
    snprintf(path, sizeof path, "%s%d", network, host);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    TAP_REQUIRE(fd >= 0 && syscall(SYS_setns, fd, 0) == 0);
    close(fd);
}

static inline void ranks__place(idist_desc *desc) {
    static const char *const ids[] = {"a", "b", "c", "d", "e", "f", "g", "h"};
    const char *network = ranks__network(desc);
    if (!ranks__placed(desc)) return;
    int host = ranks__host_of(desc->transport, desc->rank, desc->world_size);
    if (network) ranks__enter(network, host);
    desc->host_id = ids[host];
    desc->transport = "auto";
}

static inline void *ranks__thread_main(void *p) {
    ranks__thread *t = (ranks__thread *)p;
    idist_desc desc;
    memset(&desc, 0, sizeof desc);
    if (t->base) desc = *t->base;
    desc.rank = t->rank;
    desc.world_size = t->n;
    desc.store = t->store;
    ranks__place(&desc);
#ifdef RANKS_MPI
    desc.mpi_comm = ranks_mpi.comm;
#endif
    if (desc.timeout_ms == 0) desc.timeout_ms = RANKS_TIMEOUT_MS;
    if (desc.init_timeout_ms == 0) desc.init_timeout_ms = RANKS_TIMEOUT_MS;
    idist_group *world = NULL;
    if (!rank_ok(t->rank, idist_open(&desc, &world))) return NULL;
    t->fn(world, t->rank, t->n, t->arg);
    idist_status status = idist_close(&world);
    if (!t->close_may_fail)
        rank_is_status_at(__FILE__, __LINE__, t->rank, status, IDIST_OK, "idist_close");
    rank_check(world == NULL, "rank %d: idist_close leaves the pointer", t->rank);
    return NULL;
}

#ifdef RANKS_MPI
static inline bool ranks__one_of(const char *text, const char *a, const char *b, const char *c) {
    return !text || strcmp(text, a) == 0 || strcmp(text, b) == 0 || strcmp(text, c) == 0;
}

static inline void ranks__run_threads(int n, const idist_desc *base, ranks_fn fn, void *arg,
                                      bool close_may_fail) {
    ranks__thread self;
    memset(&self, 0, sizeof self);
    self.base = base;
    self.rank = ranks_mpi.rank;
    self.n = n;
    self.close_may_fail = close_may_fail;
    self.fn = fn;
    self.arg = arg;
    ranks_mpi.left_out = n > ranks_mpi.size ||
                         (base && !(ranks__one_of(base->transport, "auto", "hosts", "blocks") &&
                                    ranks__one_of(base->algorithm, "auto", "auto", "auto")));
    if (ranks_mpi.left_out) return;
    ranks_mpi_enter(n);
    if (ranks_mpi.comm) ranks__thread_main(&self);
    ranks_mpi_leave();
}
#else
static inline void ranks__run_threads(int n, const idist_desc *base, ranks_fn fn, void *arg,
                                      bool close_may_fail) {
    ranks__thread threads[RANKS_MAX];
    idist_store *store = NULL;
    TAP_REQUIRE(n >= 1 && n <= RANKS_MAX);
    (void)ranks__log();
    if (ranks__placed(base) && !ranks__network(base)) setenv("IDIST_ADDR", "127.0.0.1", 1);
    if (!rank_ok(-1, idist_store_open("mem://", NULL, &store))) return;
    for (int k = 0; k < n; k++) {
        threads[k].base = base;
        threads[k].store = store;
        threads[k].rank = k;
        threads[k].n = n;
        threads[k].close_may_fail = close_may_fail;
        threads[k].fn = fn;
        threads[k].arg = arg;
        TAP_REQUIRE(pthread_create(&threads[k].id, NULL, ranks__thread_main, &threads[k]) == 0);
    }
    for (int k = 0; k < n; k++) TAP_REQUIRE(pthread_join(threads[k].id, NULL) == 0);
    rank_ok(-1, idist_store_close(&store));
}
#endif

// Runs fn on n ranks of one world. Failures go to the log.
static inline void ranks_threads(int n, const idist_desc *base, ranks_fn fn, void *arg) {
    ranks__run_threads(n, base, fn, arg, false);
}

// Runs fn on n ranks of a world that fn breaks on purpose. idist_close may report the failure.
static inline void ranks_threads_fault(int n, const idist_desc *base, ranks_fn fn, void *arg) {
    ranks__run_threads(n, base, fn, arg, true);
}

static inline bool ranks_case(int n, const idist_desc *base, ranks_fn fn, void *arg,
                              const char *fmt, ...) TAP_PRINTF(5, 6);
static inline bool ranks_case(int n, const idist_desc *base, ranks_fn fn, void *arg,
                              const char *fmt, ...) {
    char name[400];
    va_list args;
    va_start(args, fmt);
    vsnprintf(name, sizeof name, fmt, args);
    va_end(args);
    tap_running("%s", name);
    ranks_reset();
    ranks_threads(n, base, fn, arg);
    return ranks_report("%s", name);
}

static inline bool ranks_case_fault(int n, const idist_desc *base, ranks_fn fn, void *arg,
                                    const char *fmt, ...) TAP_PRINTF(5, 6);
static inline bool ranks_case_fault(int n, const idist_desc *base, ranks_fn fn, void *arg,
                                    const char *fmt, ...) {
    char name[400];
    va_list args;
    va_start(args, fmt);
    vsnprintf(name, sizeof name, fmt, args);
    va_end(args);
    tap_running("%s", name);
    ranks_reset();
    ranks_threads_fault(n, base, fn, arg);
    return ranks_report("%s", name);
}

// The transports between the ranks of one host: shared memory, local sockets, TCP. Two placements
// on several hosts follow. See ranks__placed.
enum { N_TRANSPORTS = 3, N_PLACEMENTS = 5 };
static const char *const transport_names[N_PLACEMENTS] = {"auto", "socket", "tcp", "hosts",
                                                          "blocks"};

// The algorithms of a collective: the automatic choice, shared memory without its shortcuts, and
// two algorithms that use messages.
enum { N_ALGORITHMS = 4 };
static const char *const algorithm_names[N_ALGORITHMS] = {"auto", "chunked", "latency",
                                                          "bandwidth"};

static inline idist_desc desc_with(const char *transport, const char *algorithm) {
    idist_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.transport = transport;
    desc.algorithm = algorithm;
    return desc;
}

// Returns true if IDIST_TEST_QUICK is set, as sanitizer runs do. Tests then run fewer combinations
// through the same code paths.
static inline bool test_quick(void) {
    const char *text = getenv("IDIST_TEST_QUICK");
    return text && *text && strcmp(text, "0") != 0;
}

// Returns true if the test should run cases that take seconds because they wait for a limit of the
// library.
static inline bool test_long(void) {
    const char *text = getenv("IDIST_TEST_LONG");
    return text && *text && strcmp(text, "0") != 0;
}

// Returns true under the address or the thread sanitizer. The sanitizers cannot allocate their
// memory if the address space is limited.
static inline bool test_sanitized(void) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return true;
#else
    return false;
#endif
}

static inline int test_slow_factor(void) {
    const char *text = getenv("IDIST_TEST_SLOW");
    return text && atoi(text) > 0 ? atoi(text) : 1;
}

//------------------------------------------------------------------------------
// ranks as processes
//------------------------------------------------------------------------------

// Results that a rank stores for the parent, in shared memory.
typedef struct proc_slot {
    int phase;         // the body increments it; the parent waits for values
    int iterations;    // number of steps so far, if the body counts them
    int status;        // an idist_status
    int has_result;    // 1 once the rank has a result; atomic
    int exit_code;     // return value of the body, if mpirun started the ranks
    int64_t when_ns;   // CLOCK_MONOTONIC, the same in all processes of a machine
    int64_t waited_ns; // tap_waited_ns at that time
    char text[600];
} proc_slot;

typedef struct procs procs;
// The body of a rank. `world` is open, and the body may close it or not. Returns the exit code.
typedef int (*proc_fn)(idist_group *world, int rank, int n, proc_slot *slot, void *arg);

struct procs {
    int n;
    pid_t pid[RANKS_MAX]; // 0 after the process is reaped
    int wait_status[RANKS_MAX];
    proc_slot *slot; // array of RANKS_MAX slots, of which the first n are in use
};

// Returns the next number of a counter that all tests share if they run from this folder on this
// machine.
static inline unsigned next_port(void) {
    static unsigned tries;
    unsigned n = 0;
    int fd = open("build/test_port", O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) return (unsigned)getpid() * 97u + tries++; // not run from the source folder
    TAP_REQUIRE(flock(fd, LOCK_EX) == 0);
    if (pread(fd, &n, sizeof n, 0) != (ssize_t)sizeof n) n = 0;
    n++;
    TAP_REQUIRE(pwrite(fd, &n, sizeof n, 0) == (ssize_t)sizeof n);
    close(fd);
    return n;
}

// Returns a free port that no other test gets, even if it runs at the same time. The port is below
// the range from which the kernel takes ports for connections.
static inline int free_port(void) {
    enum { FIRST = 20000, COUNT = 12000 };
    struct sockaddr_in a;
    memset(&a, 0, sizeof a);
    a.sin_family = AF_INET;
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (int k = 0; k < COUNT; k++) {
        int port = FIRST + (int)(next_port() % COUNT);
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        TAP_REQUIRE(fd >= 0);
        a.sin_port = htons((uint16_t)port);
        bool is_free = bind(fd, (struct sockaddr *)&a, sizeof a) == 0;
        close(fd);
        if (is_free) return port;
    }
    TAP_REQUIRE(!"a free port");
    return -1;
}

// Records the end of a rank's work, with the text of its last failure.
static inline void proc_result(proc_slot *slot, idist_status status) {
    slot->when_ns = tap_now_ns();
    slot->waited_ns = tap_waited_ns(getpid());
    slot->status = status;
    copy_text(slot->text, sizeof slot->text, status ? idist_last_error() : "");
    __atomic_store_n(&slot->has_result, 1, __ATOMIC_RELEASE);
}

static inline void proc_phase(proc_slot *slot, int phase) {
    __atomic_store_n(&slot->phase, phase, __ATOMIC_RELEASE);
}

// Waits, in a rank, until another rank has reached the phase. Needs no time-out, because the parent
// has a deadline.
static inline void proc_await_phase(const proc_slot *slot, int phase) {
    while (__atomic_load_n(&slot->phase, __ATOMIC_ACQUIRE) < phase) tap_sleep_ms(1);
}

// Waits until a rank has a result. Returns false if the time-out ends first.
static inline bool proc_await_result(const proc_slot *slot, int timeout_ms) {
    int64_t end_ms = tap_now_ms() + (int64_t)timeout_ms * test_slow_factor();
    while (!__atomic_load_n(&slot->has_result, __ATOMIC_ACQUIRE)) {
        if (tap_now_ms() > end_ms) return false;
        tap_sleep_ms(1);
    }
    return true;
}

#ifdef RANKS_MPI
// Runs the body on ranks that mpirun has already started. Returns when all ranks are done.
static inline void procs_start_each(procs *p, int n, const idist_desc *bases, proc_fn fn,
                                    void *arg) {
    idist_group *world = NULL;
    idist_desc desc = bases[ranks_mpi.rank < n ? ranks_mpi.rank : 0];
    memset(p, 0, sizeof *p);
    desc.rank = ranks_mpi.rank;
    desc.world_size = n;
    ranks__place(&desc);
    p->n = n;
    p->slot = (proc_slot *)shared_alloc(sizeof(proc_slot) * RANKS_MAX);
    ranks_mpi.left_out = n > ranks_mpi.size;
    if (ranks_mpi.left_out) return;
    ranks_mpi_enter(n);
    desc.mpi_comm = ranks_mpi.comm;
    if (desc.timeout_ms == 0) desc.timeout_ms = RANKS_TIMEOUT_MS;
    if (desc.mpi_comm && rank_ok(ranks_mpi.rank, idist_open(&desc, &world)))
        p->slot[ranks_mpi.rank].exit_code =
            fn(world, ranks_mpi.rank, n, &p->slot[ranks_mpi.rank], arg);
    ranks_mpi_leave();
}

static inline int procs_wait(procs *p, int timeout_ms) {
    (void)timeout_ms;
    for (int k = 0; k < p->n; k++) p->wait_status[k] = p->slot[k].exit_code << 8;
    return 0;
}
#else
static inline void procs__child_main(procs *p, int rank, int port, const idist_desc *base,
                                     proc_fn fn, void *arg) {
    char url[64];
    idist_desc desc = *base;
    idist_group *world = NULL;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    alarm((unsigned)(60 * test_slow_factor())); // SIGALRM ends a rank that outlives every deadline
    const char *network = ranks__network(&desc), *master = getenv("IDIST_TEST_MASTER");
    snprintf(url, sizeof url, "tcp://%s:%d", network && master ? master : "127.0.0.1", port);
    desc.init_method = url;
    desc.rank = rank;
    desc.world_size = p->n;
    if (ranks__placed(&desc) && !network) setenv("IDIST_ADDR", "127.0.0.1", 1);
    ranks__place(&desc);
    if (desc.timeout_ms == 0) desc.timeout_ms = RANKS_TIMEOUT_MS;
    if (desc.init_timeout_ms == 0) desc.init_timeout_ms = RANKS_TIMEOUT_MS;
    idist_status status = idist_open(&desc, &world);
    if (status) {
        rank_fail("rank %d: idist_open: got %s expected IDIST_OK; last error: %s", rank,
                  idist_status_name(status), idist_last_error());
        _exit(90);
    }
    _exit(fn(world, rank, p->n, &p->slot[rank], arg));
}

static inline void procs_start_each(procs *p, int n, const idist_desc *bases, proc_fn fn,
                                    void *arg) {
    memset(p, 0, sizeof *p);
    TAP_REQUIRE(n <= RANKS_MAX);
    p->n = n;
    p->slot = (proc_slot *)shared_alloc(sizeof(proc_slot) * RANKS_MAX);
    int port = free_port();
    (void)ranks__log();
    for (int k = 0; k < n; k++) {
        pid_t pid = fork();
        TAP_REQUIRE(pid >= 0);
        if (pid == 0) procs__child_main(p, k, port, &bases[k], fn, arg);
        p->pid[k] = pid;
        tap_register_child(pid);
    }
}

// Waits until every rank has reached the phase. Returns false if a rank does not reach it in time.
static inline bool procs_await_phase(const procs *p, int phase, int timeout_ms) {
    int64_t end_ms = tap_now_ms() + (int64_t)timeout_ms * test_slow_factor();
    for (;;) {
        int n_there = 0;
        for (int k = 0; k < p->n; k++)
            n_there += __atomic_load_n(&p->slot[k].phase, __ATOMIC_ACQUIRE) >= phase;
        if (n_there == p->n) return true;
        if (tap_now_ms() > end_ms) return false;
        tap_sleep_ms(1);
    }
}

// Reaps all ranks, and kills those that are still running after timeout_ms. Returns the number of
// killed ranks, which count as hangs.
static inline int procs_wait(procs *p, int timeout_ms) {
    int64_t begin_ms = tap_now_ms(), end_ms = begin_ms + (int64_t)timeout_ms * test_slow_factor();
    int n_hung = 0, n_left = 0;
    for (int k = 0; k < p->n; k++) n_left += p->pid[k] != 0;
    while (n_left > 0) {
        bool late = tap_now_ms() > end_ms;
        for (int k = 0; k < p->n; k++) {
            if (p->pid[k] == 0) continue;
            if (late) {
                kill(p->pid[k], SIGKILL);
                n_hung++;
            }
            pid_t pid = waitpid(p->pid[k], &p->wait_status[k], late ? 0 : WNOHANG);
            if (pid == 0) continue;
            tap_forget_child(p->pid[k]);
            p->pid[k] = 0;
            n_left--;
        }
        if (n_left > 0) tap_sleep_ms(tap_now_ms() - begin_ms < 50 ? 1 : 5);
    }
    return n_hung;
}

#endif

// Starts n ranks with equal descriptions. procs_start_each gives each rank its own description.
static inline void procs_start(procs *p, int n, const idist_desc *base, proc_fn fn, void *arg) {
    idist_desc bases[RANKS_MAX];
    TAP_REQUIRE(n <= RANKS_MAX);
    memset(bases, 0, sizeof bases);
    for (int k = 0; k < n && base; k++) bases[k] = *base;
    procs_start_each(p, n, bases, fn, arg);
}

static inline void procs_free(procs *p) {
    munmap(p->slot, sizeof(proc_slot) * RANKS_MAX);
    p->slot = NULL;
}

typedef struct procs__body {
    ranks_fn fn;
    void *arg;
} procs__body;

static inline int procs__run_body(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    const procs__body *body = (const procs__body *)arg;
    (void)slot;
    body->fn(world, rank, n, body->arg);
    return rank_ok(rank, idist_close(&world)) ? 0 : 1;
}

// Runs fn like ranks_threads, but in processes. Results for the parent must lie in shared memory.
static inline void ranks_processes(int n, const idist_desc *base, ranks_fn fn, void *arg,
                                   int timeout_ms) {
#ifdef RANKS_MPI
    (void)timeout_ms;
    ranks_threads(n, base, fn, arg);
#else
    procs p;
    procs__body body = {fn, arg};
    procs_start(&p, n, base, procs__run_body, &body);
    int n_hung = procs_wait(&p, timeout_ms);
    rank_check(n_hung == 0, "%d ranks hang", n_hung);
    for (int k = 0; k < n; k++)
        rank_check(p.wait_status[k] == 0, "rank %d: wait status 0x%x", k,
                   (unsigned)p.wait_status[k]);
    procs_free(&p);
#endif
}

static inline bool procs_case(int n, const idist_desc *base, ranks_fn fn, void *arg,
                              const char *fmt, ...) TAP_PRINTF(5, 6);
static inline bool procs_case(int n, const idist_desc *base, ranks_fn fn, void *arg,
                              const char *fmt, ...) {
    char name[400];
    va_list args;
    va_start(args, fmt);
    vsnprintf(name, sizeof name, fmt, args);
    va_end(args);
    tap_running("%s", name);
    ranks_reset();
    ranks_processes(n, base, fn, arg, RANKS_TIMEOUT_MS + 5000);
    return ranks_report("%s", name);
}

// Forks n processes that start their worlds themselves. Reports each process that hangs, or whose
// fn does not return 0.
static inline void procs_run(int n, int timeout_ms, int (*fn)(int number, void *arg), void *arg) {
    procs p;
    memset(&p, 0, sizeof p);
    TAP_REQUIRE(n <= RANKS_MAX);
    p.n = n;
    (void)ranks__log();
    fflush(NULL);
    for (int k = 0; k < n; k++) {
        p.pid[k] = fork();
        TAP_REQUIRE(p.pid[k] >= 0);
        if (p.pid[k] == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            _exit(fn(k, arg));
        }
        tap_register_child(p.pid[k]);
    }
    int n_hung = procs_wait(&p, timeout_ms);
    rank_check(n_hung == 0, "%d processes hang", n_hung);
    for (int k = 0; k < n; k++)
        rank_check(p.wait_status[k] == 0, "process %d: wait status 0x%x", k,
                   (unsigned)p.wait_status[k]);
}

//------------------------------------------------------------------------------
// resources of a process
//------------------------------------------------------------------------------

// Returns the number of entries of a folder whose names contain `part` ("" counts all), or -1 if
// the folder cannot be read.
static inline int count_entries(const char *folder, const char *part) {
    DIR *dir = opendir(folder);
    if (!dir) return -1;
    int n = 0;
    for (struct dirent *e = readdir(dir); e; e = readdir(dir))
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0 && strstr(e->d_name, part))
            n++;
    closedir(dir);
    return n;
}

// Gives this process and its children a private /tmp and /dev/shm, so that all entries there are
// their own. If that is not allowed, or would hide the test itself, the test counts the entries of
// the shared folders. Then other programs that write there can disturb the test.
static inline void private_folders(void) {
    const long new_mounts = 0x00020000; // CLONE_NEWNS
    char here[512];
    if (!getcwd(here, sizeof here) || strncmp(here, "/tmp/", 5) == 0) return;
    if (syscall(SYS_unshare, new_mounts) != 0) return;
    if (mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0) return;
    if (mount("none", "/tmp", "tmpfs", 0, NULL) == 0) mount("none", "/dev/shm", "tmpfs", 0, NULL);
}

static inline int count_fds(void) {
    return count_entries("/proc/self/fd", "") - 1; // without the descriptor that reads the folder
}

static inline int count_threads(void) { return count_entries("/proc/self/task", ""); }

#endif // RANKS_H
