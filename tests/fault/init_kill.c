// init_kill: SIGKILL of one rank at one of its system calls while the ranks meet.
//
// These system calls use sockets or the store's file. The test kills the rank at a random selection
// of calls, or at every call in turn if IDIST_TEST_LONG=1. The first trial of each setting kills
// the rank right after the request that tells the store which rank it is.
//
// If the rank dies after that request, every survivor must get IDIST_ERR_PEER_LOST within a second,
// with a text that names the dead rank. If the rank dies earlier, no other rank can know about it.
// The error text of the time-out must then say that the dead rank did not come.
//
// The test also sends SIGSTOP to rank 0, which serves the store at a port. The other ranks must end
// soon after their time-out and name rank 0.
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

typedef enum meeting { // place where the ranks meet
    AT_PORT,
    IN_FILE,
    DRAWN,  // in a file, with assigned ranks
    IN_VIEW // a view of a store that the test serves
} meeting;

typedef struct victim {
    int rank, dies_at; // number of the call; 0 for the moment after it has told the store its rank
    int signal;        // SIGKILL or SIGSTOP
    int n_calls;       // number of calls so far, of all threads
    int known;         // the victim has told the store its rank
    int served;        // the victim created the file
    int64_t killed_ns; // time of death, or 0 while the victim lives
} victim;

static victim *dying;  // shared by all ranks
static bool is_victim; // true in the victim's process

static void die(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    dying->killed_ns = (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
    kill(getpid(), dying->signal);
    for (;;) pause();
}

static void count_call(void) {
    if (is_victim && __atomic_add_fetch(&dying->n_calls, 1, __ATOMIC_ACQ_REL) == dying->dies_at)
        die();
}

// Called after the request that tells the store the victim's rank.
static void now_known(void) {
    if (!is_victim || dying->known) return;
    dying->known = 1;
    if (!dying->dies_at) die();
}

// Returns true if a message, or a key in the store's file, tells the store which rank the process
// is. Examples of such keys are "idist/3" and "idist/drawn".
static bool says_who(const void *bytes, size_t nbytes) {
    const char *at = (const char *)memmem(bytes, nbytes, "idist/", 6);
    return at && at + 6 < (const char *)bytes + nbytes &&
           ((at[6] >= '0' && at[6] <= '9') || at[6] == 'd');
}

static int counted_bind(int fd, const struct sockaddr *a, socklen_t n) {
    count_call();
    return bind(fd, a, n);
}
static int counted_connect(int fd, const struct sockaddr *a, socklen_t n) {
    count_call();
    return connect(fd, a, n);
}
static int counted_accept(int fd, struct sockaddr *a, socklen_t *n) {
    count_call();
    return accept(fd, a, n);
}
static ssize_t counted_recv(int fd, void *buf, size_t nbytes, int flags) {
    count_call();
    return recv(fd, buf, nbytes, flags);
}
static ssize_t counted_sendmsg(int fd, const struct msghdr *m, int flags) {
    bool says = says_who(m->msg_iov[0].iov_base, m->msg_iov[0].iov_len);
    count_call();
    ssize_t n = sendmsg(fd, m, flags);
    if (n > 0 && says) now_known();
    return n;
}
static ssize_t counted_pread(int fd, void *buf, size_t nbytes, off_t at) {
    count_call();
    return pread(fd, buf, nbytes, at);
}
static ssize_t counted_pwrite(int fd, const void *buf, size_t nbytes, off_t at) {
    static _Thread_local bool says;
    count_call();
    ssize_t n = pwrite(fd, buf, nbytes, at);
    if (nbytes < 20 && says_who(buf, nbytes)) says = true; // the key of the record
    if (at == 0 && is_victim) dying->served = 1;
    if (at == 8 && says) now_known(); // the record is committed
    return n;
}

#define bind counted_bind
#define connect counted_connect
#define accept counted_accept
#define recv counted_recv
#define sendmsg counted_sendmsg
#define pread counted_pread
#define pwrite counted_pwrite
#define IDIST_IMPLEMENTATION
#include "idist.h"
#undef bind
#undef connect
#undef accept
#undef recv
#undef sendmsg
#undef pread
#undef pwrite

#include "ranks.h"

enum { INIT_TIMEOUT_MS = 2000, LIMIT_MS = 1000, RANKS = 3 };

typedef struct outcome {
    int status;
    int64_t when_ns;
    char text[600];
} outcome;

static void one_rank(int rank, meeting where, const char *url, const char *transport,
                     outcome *out) {
    idist_desc d = desc_with(transport, NULL);
    idist_store *store = NULL, *view = NULL;
    idist_group *world = NULL;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    alarm((unsigned)(20 * test_slow_factor()));
    is_victim = rank == dying->rank;
    d.init_method = url;
    d.rank = where == DRAWN ? -1 : rank;
    d.world_size = RANKS;
    d.init_timeout_ms = INIT_TIMEOUT_MS * test_slow_factor();
    d.timeout_ms = RANKS_TIMEOUT_MS;
    if (dying->signal == SIGSTOP) // so that a rank that is still joining times out first
        d.timeout_ms = d.init_timeout_ms + 500 * test_slow_factor();
    setenv("IDIST_ADDR", "127.0.0.1", 1);
    if (where != DRAWN) ranks__place(&d);
    if (where == IN_VIEW) {
        idist_store_desc s;
        memset(&s, 0, sizeof s);
        TAP_REQUIRE(idist_store_open(url, &s, &store) == IDIST_OK &&
                    idist_store_prefix(store, "a%view/", &view) == IDIST_OK);
        d.store = view;
        d.init_method = NULL;
    }
    idist_status status = idist_open(&d, &world);
    idist_opts o = opts_of(world);
    for (int i = 0; status == IDIST_OK; i++) {
        if (is_victim && i == 20) _exit(7); // the victim made fewer calls
        status = idist_barrier(&o);
    }
    copy_text(out->text, sizeof out->text, status ? idist_last_error() : "");
    out->status = (int)status;
    out->when_ns = tap_now_ns();
    if (world) idist_close(&world);
    idist_store_close(&view);
    idist_store_close(&store);
    _exit(0);
}

// Checks the result of a rank that was not killed or stopped. The rank got the result `ms`
// milliseconds after the victim died or stopped.
static void check_outcome(const outcome *out, meeting where, int k, long long ms) {
    int loser = dying->rank, at = dying->dies_at;
    bool stopped = dying->signal == SIGSTOP, serves = loser == 0 && where != IN_VIEW;
    int limit_ms = stopped ? INIT_TIMEOUT_MS + 3 * LIMIT_MS : LIMIT_MS;
    bool unknown = !dying->known; // no rank could know about the victim
    if (where == DRAWN) unknown = unknown || dying->served;
    else if (serves) unknown = text_has_word(out->text, "rank 0 has not started");
    unknown = unknown && out->status == IDIST_ERR_TIMEOUT;
    bool late = stopped && out->status == IDIST_ERR_TIMEOUT;
    rank_check(out->status == IDIST_ERR_PEER_LOST || unknown || late,
               "call %d: rank %d got %s after %lld ms: %s", at, k,
               idist_status_name((idist_status)out->status), ms, out->text);
    // If a connection is missing, the text names both ends, and the reporting rank first.
    const char *blamed = strstr(out->text, " was not connected within ");
    rank_check(where == DRAWN || text_names_only(blamed ? blamed : out->text, loser, k, RANKS),
               "call %d: rank %d names another rank: %s", at, k, out->text);
    rank_check(unknown || ms <= limit_ms * test_slow_factor(),
               "call %d: rank %d got it after %lld ms, limit %d", at, k, ms, limit_ms);
}

// Runs one trial. Returns false if the victim finished the start with fewer calls than `at`.
static bool trial(const char *transport, meeting where, int loser, int at, int signal) {
    pid_t pids[RANKS];
    int wait_status = 0;
    char url[64];
    bool by_file = where == IN_FILE || where == DRAWN;
    outcome *out = (outcome *)shared_alloc(RANKS * sizeof *out);
    idist_store *server = NULL;
    idist_store_desc serves;
    if (by_file) snprintf(url, sizeof url, "file:///tmp/idist-init-kill-%d", (int)getpid());
    else snprintf(url, sizeof url, "tcp://127.0.0.1:%d", free_port());
    memset(&serves, 0, sizeof serves);
    serves.server = true;
    if (where == IN_VIEW) TAP_REQUIRE(idist_store_open(url, &serves, &server) == IDIST_OK);
    memset(dying, 0, sizeof *dying);
    dying->rank = loser;
    dying->dies_at = at;
    dying->signal = signal;
    for (int k = 0; k < RANKS; k++) {
        pids[k] = fork();
        TAP_REQUIRE(pids[k] >= 0);
        if (pids[k] == 0) one_rank(k, where, url, transport, &out[k]);
        tap_register_child(pids[k]);
    }
    for (int i = 1; i <= RANKS; i++) { // waits for the victim last
        int k = (loser + i) % RANKS;
        if (k == loser && signal == SIGSTOP) kill(pids[k], SIGKILL);
        waitpid(pids[k], &wait_status, 0);
        tap_forget_child(pids[k]);
        if (k != loser)
            rank_check(WIFEXITED(wait_status), "call %d: rank %d: wait status 0x%x", at, k,
                       (unsigned)wait_status);
    }
    bool killed = dying->killed_ns != 0;
    for (int k = 0; k < RANKS && killed; k++)
        if (k != loser)
            check_outcome(&out[k], where, k,
                          (long long)(out[k].when_ns - dying->killed_ns) / 1000000);
    if (by_file) unlink(url + strlen("file://")); // rank 0 may have left the file behind
    idist_store_close(&server);
    munmap(out, RANKS * sizeof *out);
    return killed;
}

// Stops rank 0 at some of its calls, or at every call if IDIST_TEST_LONG is set.
static void stops_of_rank_0(const char *transport) {
    uint64_t random_state = tap_seed();
    int at = 3, n = 0;
    tap_running("%s, rank 0 is stopped", transport);
    ranks_reset();
    for (; at < 120 && trial(transport, AT_PORT, 0, at, SIGSTOP); n++)
        at += test_long() ? 1 : 17 + (int)(tap_rand(&random_state) % 17);
    rank_check(n > 0, "it had fewer than 4 calls");
    ranks_report("SIGSTOP of rank 0 of %d at %d of its calls, %s", RANKS, n, transport);
}

// Kills a rank at several of its calls. Runs only the first trial if `once` is true.
static void kills_of(int loser, const char *transport, meeting where, bool once,
                     uint64_t random_state) {
    static const char *const places[] = {"", ", by file", ", drawn", ", in a view"};
    bool by_file = where == IN_FILE || where == DRAWN;
    int at = 0, n = 0, last = once ? 1 : by_file ? 300 : 120;
    tap_running("%s%s, rank %d", transport, places[where], loser);
    ranks_reset();
    for (; at < last && trial(transport, where, loser, at, SIGKILL); n++)
        at += test_long() || !at ? 1 : last / 15 + (int)(tap_rand(&random_state) % 20);
    rank_check(once || at > 30, "there were only %d calls", at);
    ranks_report("SIGKILL of rank %d of %d at %d of its calls, %s%s", loser, RANKS, n, transport,
                 places[where]);
}

int main(void) {
    static const struct {
        const char *transport;
        meeting where;
    } settings[] = {{"auto", AT_PORT},   {"tcp", IN_FILE}, {"tcp", IN_VIEW}, {"tcp", DRAWN},
                    {"socket", AT_PORT}, {"2+1", AT_PORT}, {"tcp", AT_PORT}, {"auto", DRAWN}};
    tap_deadline(400 * test_slow_factor());
    dying = (victim *)shared_alloc(sizeof *dying);
    (void)ranks__log();
    for (int t = 0; t < 8; t++)
        for (int loser = 0; loser < RANKS; loser++)
            kills_of(loser, settings[t].transport, settings[t].where, test_quick() && t > 1,
                     tap_seed() + (uint64_t)(3 * t + loser));
    stops_of_rank_0("auto");
    if (!test_quick()) stops_of_rank_0("tcp");
    return tap_done();
}
