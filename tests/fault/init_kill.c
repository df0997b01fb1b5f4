// init_kill: SIGKILL of one rank at one of its system calls on sockets or the store's file while
// the ranks meet; which ones is drawn anew each time, and IDIST_TEST_LONG=1 takes all of them in
// turn
//
// Once the others can know of it, every survivor gets IDIST_ERR_PEER_LOST naming the dead rank
// within a second. Before it has reached the store nobody can; then the time-out names it as the
// one who did not come.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

typedef struct victim {
    int rank, dies_at; // the number of the call
    int n_calls;       // so far; by which thread does not matter
    int known;         // it had told the store who it is
    int64_t killed_ns; // 0: it lives
} victim;

static victim *dying;  // shared by all ranks
static bool is_victim; // this process

static void count_call(void) {
    struct timespec t;
    if (!is_victim || __atomic_add_fetch(&dying->n_calls, 1, __ATOMIC_ACQ_REL) != dying->dies_at)
        return;
    clock_gettime(CLOCK_MONOTONIC, &t);
    dying->killed_ns = (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
    kill(getpid(), SIGKILL);
    for (;;) pause();
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
    bool will = m->msg_iov[0].iov_len > 200 &&
                *(const char *)m->msg_iov[0].iov_base == 100; // IDIST__STORE_SET_WILL
    count_call();
    ssize_t n = sendmsg(fd, m, flags);
    if (is_victim && will) dying->known = 1;
    return n;
}
static ssize_t counted_pread(int fd, void *buf, size_t nbytes, off_t at) {
    count_call();
    return pread(fd, buf, nbytes, at);
}
static ssize_t counted_pwrite(int fd, const void *buf, size_t nbytes, off_t at) {
    static _Thread_local bool will;
    count_call();
    ssize_t n = pwrite(fd, buf, nbytes, at);
    if (nbytes == 9 && !*(const char *)buf) will = true; // its key
    if (at == 8 && is_victim && will) dying->known = 1;  // its record is committed
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

static void one_rank(int rank, const char *url, const char *transport, outcome *out) {
    idist_desc d = desc_with(transport, NULL);
    idist_group *world = NULL;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    alarm((unsigned)(20 * test_slow_factor()));
    is_victim = rank == dying->rank;
    d.init_method = url;
    d.rank = rank;
    d.world_size = RANKS;
    d.init_timeout_ms = INIT_TIMEOUT_MS * test_slow_factor();
    d.timeout_ms = RANKS_TIMEOUT_MS;
    setenv("IDIST_ADDR", "127.0.0.1", 1);
    ranks__place(&d);
    idist_status status = idist_open(&d, &world);
    idist_opts o = opts_of(world);
    for (int i = 0; status == IDIST_OK; i++) {
        if (is_victim && i == 20) _exit(7); // there were fewer calls
        status = idist_barrier(&o);
    }
    copy_text(out->text, sizeof out->text, status ? idist_last_error() : "");
    out->status = (int)status;
    out->when_ns = tap_now_ns();
    if (world) idist_close(&world);
    _exit(0);
}

// False when the victim went through the start with fewer calls than that.
static bool trial(const char *transport, bool by_file, int loser, int at) {
    pid_t pids[RANKS];
    int wait_status = 0;
    char url[64];
    outcome *out = (outcome *)shared_alloc(RANKS * sizeof *out);
    bool killed;
    if (by_file) snprintf(url, sizeof url, "file:///tmp/idist-init-kill-%d", (int)getpid());
    else snprintf(url, sizeof url, "tcp://127.0.0.1:%d", free_port());
    memset(dying, 0, sizeof *dying);
    dying->rank = loser;
    dying->dies_at = at;
    for (int k = 0; k < RANKS; k++) {
        pids[k] = fork();
        TAP_REQUIRE(pids[k] >= 0);
        if (pids[k] == 0) one_rank(k, url, transport, &out[k]);
        tap_register_child(pids[k]);
    }
    for (int k = 0; k < RANKS; k++) {
        waitpid(pids[k], &wait_status, 0);
        tap_forget_child(pids[k]);
        if (k == loser) killed = WIFSIGNALED(wait_status) && WTERMSIG(wait_status) == SIGKILL;
        else
            rank_check(WIFEXITED(wait_status), "call %d: rank %d: wait status 0x%x", at, k,
                       (unsigned)wait_status);
    }
    for (int k = 0; k < RANKS && killed; k++) {
        long long ms = (long long)(out[k].when_ns - dying->killed_ns) / 1000000;
        bool unknown =
            out[k].status == IDIST_ERR_TIMEOUT && // nobody could know of it
            (loser ? !dying->known : text_has_word(out[k].text, "rank 0 has not started"));
        if (k == loser) continue;
        rank_check(out[k].status == IDIST_ERR_PEER_LOST || unknown,
                   "call %d: rank %d got %s after %lld ms: %s", at, k,
                   idist_status_name((idist_status)out[k].status), ms, out[k].text);
        rank_check(text_names_only(out[k].text, loser, k, RANKS),
                   "call %d: rank %d names another rank: %s", at, k, out[k].text);
        rank_check(unknown || ms <= LIMIT_MS * test_slow_factor(),
                   "call %d: rank %d got it after %lld ms, limit %d", at, k, ms, LIMIT_MS);
    }
    if (by_file) unlink(url + strlen("file://")); // rank 0 may have left it
    munmap(out, RANKS * sizeof *out);
    return killed;
}

int main(void) {
    static const struct {
        const char *transport;
        bool by_file; // the ranks meet at a file, else at a port
    } settings[] = {
        {"auto", false}, {"tcp", true}, {"tcp", false}, {"socket", false}, {"2+1", false}};
    tap_deadline(200 * test_slow_factor());
    dying = (victim *)shared_alloc(sizeof *dying);
    (void)ranks__log();
    for (int t = 0; t < (test_quick() ? 2 : 5); t++)
        for (int loser = 0; loser < RANKS; loser++) {
            const char *transport = settings[t].transport,
                       *place = settings[t].by_file ? ", by file" : "";
            uint64_t random_state = tap_seed() + (uint64_t)(3 * t + loser);
            int at = 1, n = 0, last = settings[t].by_file ? 300 : 120;
            tap_running("%s%s, rank %d", transport, place, loser);
            ranks_reset();
            for (; at < last && trial(transport, settings[t].by_file, loser, at); n++)
                at += test_long() ? 1 : last / 15 + (int)(tap_rand(&random_state) % 20);
            rank_check(at > 40, "there were only %d calls", at);
            ranks_report("SIGKILL of rank %d of %d at %d of its calls, %s%s", loser, RANKS, n,
                         transport, place);
        }
    return tap_done();
}
