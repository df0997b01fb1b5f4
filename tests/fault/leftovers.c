// leftovers: a job leaves nothing behind and survives signals. A job on one host opens no TCP
// listener, SIGKILL of all ranks leaves no file, and frequent signals cause no error.
#include "idist.h"

#include "ranks.h"

#include <net/if.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/time.h>

#ifndef CLONE_NEWNET
#define CLONE_NEWNET 0x40000000
#endif

//------------------------------------------------------------------------------
// listeners, in a network namespace of our own, so that every listener found is ours
//------------------------------------------------------------------------------

static long enter_new_namespace(void) { return syscall(SYS_unshare, CLONE_NEWNET); }

static bool loopback_up(void) {
    struct ifreq request;
    int fd = socket(AF_INET, SOCK_DGRAM, 0);
    memset(&request, 0, sizeof request);
    strcpy(request.ifr_name, "lo");
    request.ifr_flags = IFF_UP | IFF_RUNNING;
    bool ok = fd >= 0 && ioctl(fd, SIOCSIFFLAGS, &request) == 0;
    if (fd >= 0) close(fd);
    return ok;
}

// Returns the number of sockets in state LISTEN (0A). With beyond_loopback, sockets that are bound
// to 127.0.0.1 or ::1 do not count.
static int count_listeners(const char *path, bool beyond_loopback) {
    char line[512], local[128], state[8];
    int n = 0;
    FILE *f = fopen(path, "r");
    if (!f) return 0;
    while (fgets(line, sizeof line, f)) {
        if (sscanf(line, " %*d: %127s %*s %7s", local, state) != 2 || strcmp(state, "0A") != 0)
            continue;
        bool loopback = strncmp(local, "0100007F:", 9) == 0 ||
                        strncmp(local, "00000000000000000000000001000000:", 33) == 0;
        if (!beyond_loopback || !loopback) n++;
    }
    fclose(f);
    return n;
}

static void check_listeners(int rank, bool beyond_loopback, const char *what) {
    int v4 = count_listeners("/proc/net/tcp", beyond_loopback),
        v6 = count_listeners("/proc/net/tcp6", beyond_loopback);
    rank_check(v4 == 0 && v6 == 0, "rank %d: %s: %d TCP listeners and %d TCP6 listeners", rank,
               what, v4, v6);
}

static int look_around(int local_rank, void *arg) {
    const char *what = (const char *)arg;
    int32_t x = 1;
    check_listeners(local_rank, false, what);
    for (int i = 0; i < 50; i++) {
        if (!rank_ok(local_rank, idist_all_reduce(&x, &x, 1, IDIST_I32, IDIST_MAX, NULL))) return 1;
        if (i % 10 == local_rank) check_listeners(local_rank, false, what);
    }
    return 0;
}

static void look_around_threads(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    (void)n;
    check_listeners(rank, false, (const char *)arg);
    rank_ok(rank, idist_barrier(&o));
}

// Checks the listeners of a job whose caller asked for TCP. Such a job may listen, but only on the
// loopback interface.
static int look_around_process(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    idist_opts o = opts_of(world);
    (void)n;
    (void)slot;
    for (int i = 0; i < 5; i++) {
        check_listeners(rank, true, (const char *)arg);
        rank_ok(rank, idist_barrier(&o));
    }
    rank_ok(rank, idist_close(&world));
    return 0;
}

// Runs rank 0 at a loopback address while it waits for a rank that never joins.
static void *joins_alone(void *arg) {
    idist_desc d = desc_with("auto", "auto");
    idist_group *w = NULL;
    d.init_method = "tcp://127.0.0.1:29511";
    d.world_size = 2;
    d.init_timeout_ms = 200;
    rank_is(0, idist_open(&d, &w), IDIST_ERR_TIMEOUT);
    __atomic_store_n((int *)arg, 1, __ATOMIC_RELEASE);
    return NULL;
}

static void look_around_while_joining(void) {
    pthread_t thread;
    int is_over = 0;
    TAP_REQUIRE(pthread_create(&thread, NULL, joins_alone, &is_over) == 0);
    for (; !__atomic_load_n(&is_over, __ATOMIC_ACQUIRE); tap_sleep_ms(5))
        check_listeners(0, false, "rank 0 waits for rank 1");
    TAP_REQUIRE(pthread_join(thread, NULL) == 0);
}

static void in_namespace(void) {
    static char spawned[] = "idist_spawn", threads[] = "mem://", processes[] = "tcp://127.0.0.1";
    idist_desc d = desc_with("auto", "auto"), tcp = desc_with("tcp", "auto");
    procs p;
    d.timeout_ms = RANKS_TIMEOUT_MS;
    rank_ok(-1, idist_spawn(look_around, spawned, 3, &d));
    ranks_threads(3, NULL, look_around_threads, threads);
    if (!loopback_up()) return;
    rank_ok(-1, idist_spawn(look_around, spawned, 2, &d));
    for (int i = 0; i < 2; i++) {
        procs_start(&p, 3, i ? &tcp : &d, look_around_process, processes);
        int n_hung = procs_wait(&p, 10000);
        rank_check(n_hung == 0, "%d ranks hang", n_hung);
        procs_free(&p);
    }
    look_around_while_joining();
}

static void listeners(void) {
    int wait_status = 0;
    tap_running("TCP listeners of a job on one host");
    ranks_reset();
    pid_t pid = fork();
    TAP_REQUIRE(pid >= 0);
    if (pid == 0) {
        alarm((unsigned)(30 * test_slow_factor()));
        if (enter_new_namespace() != 0) _exit(77);
        in_namespace();
        _exit(0);
    }
    tap_register_child(pid);
    TAP_REQUIRE(waitpid(pid, &wait_status, 0) == pid);
    tap_forget_child(pid);
    if (WIFEXITED(wait_status) && WEXITSTATUS(wait_status) == 77) {
        tap_skip("no TCP listener in a job of one host", "a network namespace needs more rights");
        return;
    }
    rank_check(WIFEXITED(wait_status) && WEXITSTATUS(wait_status) == 0, "wait status 0x%x",
               (unsigned)wait_status);
    ranks_report("no TCP listener in a job of one host");
}

//------------------------------------------------------------------------------
// files after SIGKILL of all ranks
//------------------------------------------------------------------------------

static int runs_until_killed(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    idist_opts o = opts_of(world);
    (void)rank;
    (void)n;
    (void)arg;
    proc_phase(slot, 1);
    while (idist_barrier(&o) == IDIST_OK) {}
    tap_sleep_ms(5000);
    return 0;
}

static int count_files(void) {
    const char *run = getenv("XDG_RUNTIME_DIR");
    int n = count_entries("/tmp", "idist") + count_entries("/dev/shm", "");
    return run ? n + count_entries(run, "idist") : n;
}

static void massacre(uint64_t *random_state) {
    int files = count_files();
    tap_running("SIGKILL of all ranks");
    ranks_reset();
    for (int i = 0; i < 8; i++) {
        procs p;
        int delay_us = (int)(tap_rand(random_state) % 30000);
        procs_start(&p, 3, NULL, runs_until_killed, NULL);
        if (i % 2 == 0) { // otherwise at any moment, perhaps in the middle of joining
            rank_check(procs_await_phase(&p, 1, 10000), "trial %d: the ranks did not start", i);
        }
        struct timespec ts = {0, delay_us * 1000L};
        nanosleep(&ts, NULL);
        // so that no rank can detect the loss of another rank
        for (int k = 0; k < 3; k++) kill(p.pid[k], SIGSTOP);
        for (int k = 0; k < 3; k++) kill(p.pid[k], SIGKILL);
        procs_wait(&p, 2000);
        rank_check(count_files() == files, "trial %d, after %d us: %d files, before %d", i,
                   delay_us, count_files(), files);
        procs_free(&p);
    }
    ranks_report("SIGKILL of all ranks at random moments leaves no file");
}

//------------------------------------------------------------------------------
// descriptors and signals that the program, or programs that ranks start, would notice
//------------------------------------------------------------------------------

enum { MOST_FDS = 1024 };

static int fds_are_closed_on_exec(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    const bool *was_open = (const bool *)arg;
    idist_opts o = opts_of(world);
    (void)n;
    (void)slot;
    rank_ok(rank, idist_barrier(&o));
    for (int fd = 3; fd < MOST_FDS; fd++) {
        int flags = fcntl(fd, F_GETFD);
        rank_check(flags < 0 || was_open[fd] || (flags & FD_CLOEXEC),
                   "rank %d: descriptor %d would survive exec", rank, fd);
    }
    return idist_close(&world) == IDIST_OK ? 0 : 1;
}

static void closed_on_exec(const char *transport) {
    static bool was_open[MOST_FDS];
    procs p;
    idist_desc d = desc_with(transport, "auto");
    tap_running("descriptors and exec, %s", transport);
    ranks_reset();
    for (int fd = 3; fd < MOST_FDS; fd++) was_open[fd] = fcntl(fd, F_GETFD) >= 0;
    procs_start(&p, 3, &d, fds_are_closed_on_exec, was_open);
    int n_hung = procs_wait(&p, 10000);
    rank_check(n_hung == 0, "%d ranks hang", n_hung);
    ranks_report("all descriptors are closed on exec, %s", transport);
    procs_free(&p);
}

// Blocks a signal after the library has started its thread. The signal must stay pending, because
// no thread of the library may receive it.
static int blocks_a_signal(int local_rank, void *arg) {
    sigset_t set, pending;
    idist_request r = {NULL};
    idist_opts o = opts_async(NULL, &r);
    int32_t x = 1, y;
    (void)arg;
    rank_ok(local_rank, idist_all_reduce(&x, &y, 1, IDIST_I32, IDIST_SUM, &o));
    rank_ok(local_rank, idist_wait(&r));
    rank_check(count_threads() > 1, "rank %d: there is no thread of the library", local_rank);
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    sigprocmask(SIG_BLOCK, &set, NULL);
    kill(getpid(), SIGUSR1); // ends the process if a thread receives it
    tap_sleep_ms(50);
    sigpending(&pending);
    rank_check(sigismember(&pending, SIGUSR1) == 1, "rank %d: the signal is gone", local_rank);
    signal(SIGUSR1, SIG_IGN);
    sigprocmask(SIG_UNBLOCK, &set, NULL);
    return 0;
}

static void threads_take_no_signals(void) {
    tap_running("signals and threads of the library");
    ranks_reset();
    rank_ok(-1, idist_spawn(blocks_a_signal, NULL, 2, NULL));
    ranks_report("threads of the library take no signals");
}

//------------------------------------------------------------------------------
// EINTR
//------------------------------------------------------------------------------

static int n_signals; // atomic

static void on_alarm(int number) {
    (void)number;
    __atomic_add_fetch(&n_signals, 1, __ATOMIC_RELAXED);
}

static void storm(int interval_us) {
    struct sigaction sa;
    struct itimerval timer;
    memset(&sa, 0, sizeof sa);
    sa.sa_handler = interval_us ? on_alarm : SIG_DFL; // no SA_RESTART
    timer.it_interval.tv_sec = timer.it_value.tv_sec = 0;
    timer.it_interval.tv_usec = timer.it_value.tv_usec = interval_us;
    if (interval_us) sigaction(SIGALRM, &sa, NULL);
    setitimer(ITIMER_REAL, &timer, NULL);
    if (!interval_us) sigaction(SIGALRM, &sa, NULL);
}

static void many_reduces(idist_group *world, int rank, int n, int total) {
    enum { MOST = 40000 };
    idist_opts o = opts_of(world);
    int32_t *x = (int32_t *)malloc(MOST * sizeof *x), *y = (int32_t *)malloc(MOST * sizeof *y);
    TAP_REQUIRE(x && y);
    for (int i = 0; i < total; i++) {
        size_t count = i % 50 == 0 ? MOST : (size_t)(i % 17);
        for (size_t j = 0; j < count; j++) x[j] = rank + i + (int)j;
        if (!rank_ok(rank, idist_all_reduce(x, y, count, IDIST_I32, IDIST_SUM, &o))) break;
        for (size_t j = 0; j < count; j++) {
            int32_t want = n * (i + (int)j) + n * (n - 1) / 2;
            if (y[j] == want) continue;
            rank_fail("rank %d all_reduce %d element %zu: got %d expected %d", rank, i, j, y[j],
                      want);
            break;
        }
    }
    free(x);
    free(y);
}

static void storm_threads(idist_group *world, int rank, int n, void *arg) {
    many_reduces(world, rank, n, *(const int *)arg);
}

static int storm_worker(int local_rank, void *arg) {
    storm(100);
    many_reduces(NULL, local_rank, idist_get_world_size(), *(const int *)arg);
    int seen = __atomic_load_n(&n_signals, __ATOMIC_RELAXED);
    storm(0);
    rank_check(seen > 50, "worker %d: only %d signals came: the test tests nothing", local_rank,
               seen);
    return 0;
}

static int quiet_worker(int local_rank, void *arg) {
    many_reduces(NULL, local_rank, idist_get_world_size(), *(const int *)arg);
    return 0;
}

// A world that three processes join while signals keep arriving. Rank 0, which runs the store,
// joins last, so signals interrupt the other ranks while they wait for it.
typedef struct stormy {
    const char *transport;
    int port;
} stormy;

static int joins_under_fire(int number, void *arg) {
    const stormy *s = (const stormy *)arg;
    idist_desc d = desc_with(s->transport, "auto");
    d.rank = 2 - number;
    d.world_size = 3;
    d.master_addr = "127.0.0.1";
    d.master_port = s->port;
    d.timeout_ms = d.init_timeout_ms = RANKS_TIMEOUT_MS;
    if (d.rank == 0) tap_sleep_ms(150);
    storm(100);
    if (!rank_ok(d.rank, idist_initialize(&d))) return 1;
    for (int i = 0; i < 20; i++) rank_ok(d.rank, idist_barrier(NULL));
    rank_ok(d.rank, idist_finalize());
    storm(0);
    return 0;
}

static void storms(void) {
    int total = test_quick() ? 400 : 2000;
    for (int t = 0; t < N_TRANSPORTS; t++) {
        const char *name = transport_names[t];
        idist_desc d = desc_with(name, "auto");
        stormy s = {name, free_port()};
        d.timeout_ms = RANKS_TIMEOUT_MS;
        tap_running("signals every 100 us, joining, %s", name);
        ranks_reset();
        procs_run(3, 15000, joins_under_fire, &s);
        ranks_report("a signal every 100 us while 3 processes join, %s", name);
        tap_running("signals every 100 us, threads, %s", name);
        ranks_reset();
        n_signals = 0;
        storm(100);
        // Signals also arrive while ranks join and leave the world.
        ranks_threads(3, &d, storm_threads, &total);
        storm(0);
        rank_check(n_signals > 50, "only %d signals came: the test tests nothing", n_signals);
        ranks_report("a signal every 100 us during %d all_reduces of 3 threads, %s", total, name);
        tap_running("signals every 100 us, processes, %s", name);
        ranks_reset();
        rank_ok(-1, idist_spawn(storm_worker, &total, 3, &d));
        ranks_report("a signal every 100 us during %d all_reduces of 3 processes, %s", total, name);
    }
    tap_running("idist_spawn under signals");
    ranks_reset();
    storm(200);
    idist_desc d = desc_with(NULL, NULL);
    int few = 50;
    rank_ok(-1, idist_spawn(quiet_worker, &few, 2, &d));
    storm(0);
    ranks_report("idist_spawn itself under signals");
}

int main(void) {
    uint64_t random_state = tap_seed();
    private_folders();
    tap_deadline(90);
    (void)ranks__log();
    listeners();
    massacre(&random_state);
    for (int t = 0; t < N_TRANSPORTS; t++) closed_on_exec(transport_names[t]);
    threads_take_no_signals();
    storms();
    return tap_done();
}
