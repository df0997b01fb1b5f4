// many: hundreds of ranks on this machine, a start among thousands of silent connections, and
// overlapping groups with little shared memory.
//
// Runs 512 ranks over shared memory and 256 over TCP, or 64 and 96 in the quick form. MANY_RANKS
// sets another number for both.
#include "idist.h"

#include "ranks.h"

#include <dirent.h>
#include <sys/resource.h>
#include <sys/un.h>

enum { N_SILENT = 2000, LIMIT_MS = 2000, DESCRIPTORS = 12 };

// Returns the number of open descriptors of this process.
static int count_descriptors(void) {
    DIR *d = opendir("/proc/self/fd");
    int n = 0;
    while (d && readdir(d)) n++;
    if (d) closedir(d);
    return n - 3; // ".", ".." and d itself
}

typedef struct hundred {
    int n;
    int inherited; // descriptors before the start
    int most;      // descriptors that a rank may open
} hundred;

static int one_barrier(int local_rank, void *arg) {
    const hundred *h = (const hundred *)arg;
    int32_t x = 1, sum = 0;
    int own;
    (void)local_rank;
    if (idist_get_world_size() != h->n || idist_barrier(NULL) != IDIST_OK) return 1;
    if (idist_all_reduce(&x, &sum, 1, IDIST_I32, IDIST_SUM, NULL) != IDIST_OK) return 1;
    own = count_descriptors() - h->inherited;
    if (own > h->most) {
        fprintf(stderr, "# %d descriptors for a world of %d, at most %d\n", own, h->n, h->most);
        return 1;
    }
    // No rank leaves while another rank counts.
    return sum == h->n && idist_barrier(NULL) == IDIST_OK ? 0 : 1;
}

// Starts n ranks. Each rank may open at most `most` descriptors.
static void hundreds(const char *transport, int n, int most) {
    int64_t begun = tap_now_ms();
    idist_desc d;
    memset(&d, 0, sizeof d);
    d.timeout_ms = d.init_timeout_ms = 150000;
    d.transport = transport;
    tap_running("%d ranks, %s", n, transport);
    hundred h = {n, count_descriptors(), most};
    idist_status status = idist_spawn(one_barrier, &h, n, &d);
    tap_is(status, IDIST_OK, "%d ranks start and meet, each with at most %d descriptors, %s", n,
           most, transport);
    if (status) tap_diag("%s", idist_last_error());
    tap_diag("after %.1f s", (double)(tap_now_ms() - begun) / 1000);
}

// Runs an all_reduce in overlapping groups. Shared memory is so small that the world's collectives
// use messages, while groups of half of the ranks fit into regions that their members lend them
// (ring/share/pool.h). Even ranks lend their first region to the group of even ranks. So they lend
// the second group their second region, which is smaller than the first region that odd ranks lend.
static int sum_in_overlapping_groups(int rank, void *arg) {
    enum { COUNT = 20000 };
    idist_group *even = NULL, *lower = NULL;
    int32_t *x = (int32_t *)malloc(COUNT * sizeof *x);
    idist_status status = IDIST_ERR_NO_MEMORY;
    int n = *(int *)arg, half = n / 2, wrong = 0;
    for (int i = 0; x && i < COUNT; i++) x[i] = rank + i;
    if (x) status = idist_split(NULL, rank % 2 ? -1 : 0, rank, &even);
    if (status == IDIST_OK) status = idist_split(NULL, rank < half ? 0 : -1, rank, &lower);
    if (status == IDIST_OK && rank < half) {
        idist_opts o = {.group = lower};
        status = idist_all_reduce(x, x, COUNT, IDIST_I32, IDIST_SUM, &o);
        for (int i = 0; i < COUNT; i++) wrong += x[i] != half * (half - 1) / 2 + half * i;
    }
    idist_free_group(&lower);
    idist_free_group(&even);
    free(x);
    return status != IDIST_OK || wrong ? 1 : 0;
}

static void small_shares(void) {
    enum { N = 160, SHARE_NBYTES = 880000 };
    int n = N;
    idist_desc d;
    memset(&d, 0, sizeof d);
    d.timeout_ms = d.init_timeout_ms = 60000;
    d.shm_nbytes = SHARE_NBYTES;
    tap_running("overlapping groups");
    idist_status status = idist_spawn(sum_in_overlapping_groups, &n, n, &d);
    tap_is(status, IDIST_OK, "overlapping groups of %d ranks in shares of %d bytes", N,
           SHARE_NBYTES);
    if (status) tap_diag("%s", idist_last_error());
}

static int connect_to(const struct sockaddr *a, socklen_t size) {
    int fd = socket(a->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return -1;
    if (connect(fd, a, size) == 0 || errno == EINPROGRESS) return fd;
    close(fd);
    return -1;
}

// Opens up to `most` connections to rank 0 that send nothing, and returns how many it opened. The
// connections go to the TCP port or to the local sockets, whose names any process can read.
static int open_silent(int port, bool local, int *fds, int most) {
    char line[300], name[200];
    int n = 0;
    if (local) {
        FILE *f = fopen("/proc/net/unix", "r");
        struct sockaddr_un names[8];
        socklen_t sizes[8];
        int n_names = 0;
        while (f && fgets(line, sizeof line, f) && n_names < 8) {
            char *at = strstr(line, "@idist-");
            if (!at || !strstr(line, "00010000") || sscanf(at + 1, "%190s", name) != 1) continue;
            memset(&names[n_names], 0, sizeof names[0]);
            names[n_names].sun_family = AF_UNIX;
            memcpy(names[n_names].sun_path + 1, name, strlen(name));
            sizes[n_names++] =
                (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name));
        }
        if (f) fclose(f);
        for (int i = 0; i < 4 * most && n < most && n_names; i++) {
            fds[n] = connect_to((struct sockaddr *)&names[i % n_names], sizes[i % n_names]);
            if (fds[n] >= 0) n++;
            else tap_sleep_ms(1); // the queue of the listener is full
        }
        return n;
    }
    struct sockaddr_in a;
    memset(&a, 0, sizeof a);
    a.sin_family = AF_INET;
    a.sin_port = htons((uint16_t)port);
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (int i = 0; i < most; i++) {
        fds[n] = connect_to((struct sockaddr *)&a, sizeof a);
        n += fds[n] >= 0;
    }
    return n;
}

typedef struct start {
    int64_t up_ns[4];
    int status[4];
} start;

static void one_rank(int rank, int port, const char *transport, start *out) {
    char url[64];
    idist_desc d = desc_with(transport, NULL);
    idist_group *world = NULL;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    alarm((unsigned)(60 * test_slow_factor()));
    snprintf(url, sizeof url, "tcp://127.0.0.1:%d", port);
    d.init_method = url;
    d.rank = rank;
    d.world_size = 4;
    d.init_timeout_ms = 40000;
    idist_status status = idist_open(&d, &world);
    out->status[rank] = (int)status;
    out->up_ns[rank] = tap_now_ns();
    if (status) fprintf(stderr, "# rank %d: %s\n", rank, idist_last_error());
    if (world) idist_close(&world);
    _exit(0);
}

// Starts rank 0, opens n_silent connections to it, and starts the other ranks. Returns the time in
// ms from the start of the other ranks until rank 3 has joined.
static long long start_among(int n_silent, const char *transport, bool local) {
    start *out = (start *)shared_alloc(sizeof *out);
    int port = free_port(), n = 0, *fds = (int *)calloc(N_SILENT, sizeof(int));
    pid_t pids[4];
    long long ms = 0;
    TAP_REQUIRE(fds);
    for (int k = 0; k < 4; k++) {
        if (k == 1) {
            for (int i = 0; i < 200 && n_silent && !n; i++) {
                tap_sleep_ms(5); // until rank 0 listens
                n = open_silent(port, local, fds, n_silent);
            }
            rank_check(n == n_silent, "only %d of %d connections could be made", n, n_silent);
            ms = (long long)tap_now_ms();
        }
        pids[k] = fork();
        TAP_REQUIRE(pids[k] >= 0);
        if (pids[k] == 0) one_rank(k, port, transport, out);
        tap_register_child(pids[k]);
    }
    for (int k = 0; k < 4; k++) {
        waitpid(pids[k], NULL, 0);
        tap_forget_child(pids[k]);
        rank_check(out->status[k] == IDIST_OK, "rank %d: got %s", k,
                   idist_status_name((idist_status)out->status[k]));
        if (out->up_ns[k] / 1000000 - ms > 0 && k == 3) ms = out->up_ns[k] / 1000000 - ms;
    }
    for (int i = 0; i < n; i++) close(fds[i]);
    free(fds);
    munmap(out, sizeof *out);
    return ms;
}

int main(void) {
    static const struct {
        const char *transport;
        bool local;
    } ways[2] = {{"tcp", false}, {"auto", true}};
    struct rlimit limit;
    tap_deadline(200 * test_slow_factor());
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
    (void)ranks__log();
    if (limit.rlim_cur < N_SILENT + 100) {
        tap_skip("2000 silent connections", "too few file descriptors: ulimit -n");
    } else {
        for (int i = 0; i < 2; i++) {
            tap_running("silent connections, %s", ways[i].transport);
            ranks_reset();
            long long alone = start_among(0, ways[i].transport, ways[i].local);
            long long among = start_among(N_SILENT, ways[i].transport, ways[i].local);
            rank_check(among - alone < LIMIT_MS * test_slow_factor(), "they add %lld ms, limit %d",
                       among - alone, LIMIT_MS);
            ranks_report("%d silent connections do not hold up a start, %s", N_SILENT,
                         ways[i].transport);
            tap_diag("alone %lld ms, among them %lld ms", alone, among);
        }
    }
    if (test_sanitized()) {
        tap_skip("hundreds of ranks", "a sanitizer takes too much memory for each");
    } else {
        int n = getenv("MANY_RANKS") ? atoi(getenv("MANY_RANKS")) : 0;
        int sockets = n ? n : test_quick() ? 96 : 256, near_count = 0;
        for (int k = 1; k < sockets; k *= 2) near_count += 2;
        hundreds("auto", n ? n : test_quick() ? 64 : 512, DESCRIPTORS);
        hundreds("tcp", sockets, DESCRIPTORS + near_count);
        small_shares();
    }
    return tap_done();
}
