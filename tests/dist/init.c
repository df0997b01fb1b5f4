// How ranks find each other: every init method between real processes, and the host table with
// uneven and cyclic placements. The ranks share one machine, and desc.host_id tells the simulated
// hosts apart.
#include "idist.h"

#include <sys/wait.h>
#include <unistd.h>

#include "ranks.h"

typedef struct placement {
    int n;
    const char *host[8];
    int local_rank[8], local_size[8], node_rank[8], nnodes;
} placement;

static int fail(const char *what, int rank) {
    fprintf(stderr, "# rank %d: %s: %s\n", rank, what, idist_last_error());
    return 1;
}

// Returns true if idist_show_config lists the backends of this program and the limits and
// interfaces of this host.
static bool shows_host(void) {
    static const char *const names[] = {"available backends: ", "cores: ",         "descriptors: ",
                                        "processes: ",          "locked memory: ", "interfaces: "};
    char config[2048], line[40];

    snprintf(config, sizeof config, "%s", idist_show_config());
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        snprintf(line, sizeof line, "\n%s", names[i]);
        if (!strstr(config, line)) return false;
    }
    return strstr(config, "\navailable backends: ring,self\n") && strstr(config, "lo 127.0.0.1");
}

// Runs one rank. Joins, opens two more worlds at the same address with no call in between, computes
// a sum in each world, and checks its placement. Returns 0 on success.
static int run_rank(idist_desc d, const placement *p) {
    int64_t sum = 0, mine = 1 << d.rank;
    idist_group *more[2] = {NULL, NULL};
    if (idist_initialize(&d) != IDIST_OK) return fail("initialize", d.rank);
    for (int i = 0; i < 2; i++)
        if (idist_open(&d, &more[i]) != IDIST_OK) return fail("open", d.rank);
    for (int i = 0; i < 2; i++) {
        idist_opts o = opts_of(more[i]);
        if (idist_all_reduce(&mine, &sum, 1, IDIST_I64, IDIST_SUM, &o) != IDIST_OK)
            return fail("all_reduce in another world", d.rank);
        if (idist_close(&more[i]) != IDIST_OK) return fail("close", d.rank);
    }
    if (idist_all_reduce(&mine, &sum, 1, IDIST_I64, IDIST_SUM, NULL) != IDIST_OK)
        return fail("all_reduce", d.rank);
    if (sum != (1 << d.world_size) - 1 || idist_get_world_size() != d.world_size)
        return fail("wrong sum", d.rank);
    if (p && (idist_get_local_rank() != p->local_rank[d.rank] ||
              idist_get_nproc_per_node() != p->local_size[d.rank] ||
              idist_get_node_rank() != p->node_rank[d.rank] || idist_get_nnodes() != p->nnodes)) {
        fprintf(stderr, "# rank %d: local %d of %d, node %d of %d\n", d.rank,
                idist_get_local_rank(), idist_get_nproc_per_node(), idist_get_node_rank(),
                idist_get_nnodes());
        return 1;
    }
    bool tcp = d.transport && strcmp(d.transport, "tcp") == 0;
    bool shares = strstr(idist_show_config(), "\non this host: shared memory, 5120 KiB") != NULL;
    if (shares != (!tcp && idist_get_nproc_per_node() > 1) || !shows_host())
        return fail(idist_show_config(), d.rank);
    return idist_finalize() == IDIST_OK ? 0 : fail("finalize", d.rank);
}

// Runs n processes and returns true if all of them succeed. Rank 0 starts last, so that the other
// ranks must wait for it.
static bool run_all(const idist_desc *base, int n, const placement *p) {
    pid_t pid[8];
    bool good = true;
    fflush(NULL);
    for (int r = n - 1; r >= 0; r--) {
        idist_desc d = *base;
        d.rank = r;
        d.world_size = n;
        d.init_timeout_ms = 20000;
        d.timeout_ms = 20000;
        if (p) d.host_id = p->host[r];
        pid[r] = fork();
        if (pid[r] == 0) _exit(run_rank(d, p));
        if (r == 1) tap_sleep_ms(30);
    }
    for (int r = 0; r < n; r++) {
        int status = -1;
        if (waitpid(pid[r], &status, 0) != pid[r] || status != 0) good = false;
    }
    return good;
}

// Runs one rank of three. IDIST_HOSTID tells the hosts of the ranks apart.
static int of_host_id(int rank, void *arg) {
    static const placement p = {3, {NULL}, {0, 1, 0}, {2, 2, 1}, {0, 0, 1}, 2};
    idist_desc d = desc_with("auto", "auto");
    setenv("IDIST_HOSTID", rank < 2 ? "a" : "b", 1);
    d.init_method = (const char *)arg;
    d.rank = rank;
    d.world_size = 3;
    d.timeout_ms = d.init_timeout_ms = 20000;
    return run_rank(d, &p);
}

// Runs one rank of three on two hosts. The ids of the hosts have 150 characters and differ only in
// the last character.
static int of_long_host_id(int rank, void *arg) {
    static const placement p = {3, {NULL}, {0, 1, 0}, {2, 2, 1}, {0, 0, 1}, 2};
    idist_desc d = desc_with("auto", "auto");
    char id[151];
    snprintf(id, sizeof id, "%0150d", rank / 2);
    d.host_id = id;
    d.init_method = (const char *)arg;
    d.rank = rank;
    d.world_size = 3;
    d.timeout_ms = d.init_timeout_ms = 20000;
    return run_rank(d, &p);
}

// Runs one rank of three. The first character of `arg` is the rank that uses only TCP.
static int of_transports(int rank, void *arg) {
    static const placement p = {3, {NULL}, {0, 1, 2}, {3, 3, 3}, {0, 0, 0}, 1};
    const char *text = (const char *)arg;
    idist_desc d = desc_with(rank == text[0] - '0' ? "tcp" : "auto", "auto");
    d.init_method = text + 1;
    d.rank = rank;
    d.world_size = 3;
    d.timeout_ms = d.init_timeout_ms = 20000;
    return run_rank(d, &p);
}

// Runs one rank of three. Rank 2 starts after the other ranks have timed out once, and all ranks
// retry until they meet. No rank may mistake its own earlier attempt for another process.
static int tries_again(int rank, void *arg) {
    idist_desc d = desc_with("auto", "auto");
    idist_status status = IDIST_ERR_TIMEOUT;
    d.init_method = (const char *)arg;
    d.rank = rank;
    d.world_size = 3;
    d.init_timeout_ms = 600 * test_slow_factor();
    if (rank == 2) tap_sleep_ms(900 * test_slow_factor());
    for (int i = 0; i < 8 && status != IDIST_OK; i++) {
        status = idist_initialize(&d);
        if (status != IDIST_OK && status != IDIST_ERR_TIMEOUT && status != IDIST_ERR_PEER_LOST)
            return fail("another try", rank);
    }
    if (status != IDIST_OK) return fail("the last try", rank);
    return idist_finalize() == IDIST_OK ? 0 : fail("finalize", rank);
}

static void try_again(char *url) {
    tap_running("ranks try again at %s", url);
    ranks_reset();
    procs_run(3, 20000 * test_slow_factor(), tries_again, url);
    ranks_report("ranks try again after a time-out, %.4s", url);
}

// A case in which processes 1 and 2 are both rank 1. At least one of them must get
// IDIST_ERR_RANK_TAKEN, and no process may join.
typedef struct takers {
    const char *url;
    int n_told; // processes that got IDIST_ERR_RANK_TAKEN; atomic
} takers;

static int takes_rank(int number, void *arg) {
    takers *t = (takers *)arg;
    idist_desc d = desc_with("auto", "auto");
    d.init_method = t->url;
    d.rank = number ? 1 : 0;
    d.world_size = 3;
    d.init_timeout_ms = 1000 * test_slow_factor();
    idist_status status = idist_initialize(&d);
    if (status == IDIST_ERR_RANK_TAKEN && number)
        __atomic_add_fetch(&t->n_told, 1, __ATOMIC_ACQ_REL);
    return status == IDIST_OK;
}

static void rank_taken(const char *url) {
    takers *t = (takers *)shared_alloc(sizeof *t);
    tap_running("two processes that are rank 1");
    ranks_reset();
    t->url = url;
    procs_run(3, 10000, takes_rank, t);
    rank_check(t->n_told >= 1, "nobody got IDIST_ERR_RANK_TAKEN");
    ranks_report("two processes that are rank 1");
    munmap(t, sizeof *t);
}

// Joins through a store that already holds `job` as the record of a job. Checks that the error text
// contains `word`, and returns the status.
static idist_status join_after(const void *job, size_t nbytes, int rank, int world_size,
                               const char *word) {
    idist_store *store = NULL;
    idist_group *world = NULL;
    idist_desc d = desc_with("auto", "auto");
    if (idist_store_open("mem://", NULL, &store) ||
        idist_store_set(store, "idist/1/job", job, nbytes))
        tap_bail("store");
    d.store = store;
    d.rank = rank;
    d.world_size = world_size;
    d.init_timeout_ms = 5000;
    idist_status status = idist_open(&d, &world);
    tap_like(idist_last_error(), word, "the text says: %s", word);
    idist_store_close(&store);
    return status;
}

static void used_stores(void) {
    static const uint64_t job[2] = {12345678, 2};
    tap_is(join_after("12345678", 8, 1, 2, "another version"), IDIST_ERR_UNSUPPORTED,
           "a record of another size: rank 0 has another version");
    tap_is(join_after(job, sizeof job, 2, 3, "idist_store_prefix"), IDIST_ERR_ENV,
           "an earlier world of another size, in which this rank had no part");
}

// Asks by multicast for a rank 0 that never starts. idist_open must time out within the limit and
// say why.
static void nobody_answers(const char *url) {
    idist_group *world = NULL;
    idist_desc d = desc_with("auto", "auto");
    d.init_method = url;
    d.rank = 1;
    d.world_size = 2;
    d.init_timeout_ms = 400;
    int64_t start = tap_now_ms();
    tap_is(idist_open(&d, &world), IDIST_ERR_TIMEOUT, "multicast, and nobody answers");
    tap_like(idist_last_error(), "rank 0 has not started", "says so");
    tap_ok(tap_now_ms() - start < 400 + 1000 * test_slow_factor(), "and in time");
}

// Answers the first three questions to the multicast group with a port where nobody listens, and
// with a datagram that is too short. Runs until it is killed.
static void lies(int port) {
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0), yes = 1;
    struct sockaddr_in a;
    struct ip_mreq member;
    alarm(100);
    memset(&a, 0, sizeof a);
    a.sin_family = AF_INET;
    a.sin_port = htons((uint16_t)port);
    inet_pton(AF_INET, "239.1.2.3", &a.sin_addr);
    member.imr_multiaddr = a.sin_addr;
    inet_pton(AF_INET, "127.0.0.1", &member.imr_interface);
    TAP_REQUIRE(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) == 0);
    TAP_REQUIRE(bind(fd, (struct sockaddr *)&a, sizeof a) == 0);
    TAP_REQUIRE(setsockopt(fd, IPPROTO_IP, IP_ADD_MEMBERSHIP, &member, sizeof member) == 0);
    for (int n = 0;;) {
        unsigned char msg[64];
        socklen_t size = sizeof a;
        ssize_t got = recvfrom(fd, msg, sizeof msg, 0, (struct sockaddr *)&a, &size);
        if (got != 18 || n++ >= 3) continue; // answers three times, then only reads
        msg[17] = 9;
        sendto(fd, msg, 18, 0, (struct sockaddr *)&a, size);
        sendto(fd, msg, 5, 0, (struct sockaddr *)&a, size);
    }
}

// Joins while another process sends wrong answers to the multicast group. The ranks must keep
// asking until they meet.
static void wrong_answers(const char *url, int port) {
    idist_desc d = desc_with("auto", "auto");
    // The liar is a process, because the thread sanitizer does not support a fork beside a second
    // thread.
    pid_t liar = fork();
    int status = 0;
    if (liar == 0) lies(port);
    d.init_method = url;
    tap_sleep_ms(50);
    tap_ok(run_all(&d, 3, NULL), "multicast, with wrong answers in the group");
    kill(liar, SIGKILL);
    tap_ok(waitpid(liar, &status, 0) == liar && WIFSIGNALED(status), "who lied to the end");
}

static void transports_differ(const char *file) {
    char url[200];
    for (int k = 0; k < 3; k++) {
        snprintf(url, sizeof url, "%dfile://%s", k, file);
        tap_running("rank %d uses TCP only", k);
        ranks_reset();
        procs_run(3, 20000, of_transports, url);
        ranks_report("rank %d alone uses TCP only", k);
    }
}

static void every_method(const char *file, int port) {
    static const char *const transports[2] = {"auto", "tcp"};
    char url[96];
    for (int t = 0; t < 2; t++) {
        for (int n = 1; n <= 4; n++) {
            idist_desc d;
            memset(&d, 0, sizeof d);
            d.transport = transports[t];
            snprintf(url, sizeof url, "tcp://127.0.0.1:%d", port);
            d.init_method = url;
            tap_ok(run_all(&d, n, NULL), "tcp://, %d ranks, transport %s", n, transports[t]);
            snprintf(url, sizeof url, "file://%s", file);
            tap_ok(run_all(&d, n, NULL), "file://, %d ranks, transport %s", n, transports[t]);
            tap_ok(access(file, F_OK) != 0, "the file is gone");
            d.init_method = NULL;
            d.master_addr = "localhost";
            d.master_port = port;
            tap_ok(run_all(&d, n, NULL), "env://, %d ranks, transport %s", n, transports[t]);
        }
    }
}

int main(void) {
    static const placement placements[] = {
        {4, {"a", "a", "a", "b"}, {0, 1, 2, 0}, {3, 3, 3, 1}, {0, 0, 0, 1}, 2}, // uneven
        {5,
         {"a", "b", "a", "b", "a"},
         {0, 0, 1, 1, 2},
         {3, 2, 3, 2, 3},
         {0, 1, 0, 1, 0},
         2}, // cyclic
        {3, {"c", "b", "a"}, {0, 0, 0}, {1, 1, 1}, {0, 1, 2}, 3}};
    char file[64], url[96];
    int port = 20000 + (int)(getpid() % 12000); // below the ports of outgoing connections
    tap_deadline(100);
    snprintf(file, sizeof file, "/tmp/init_test_%d", (int)getpid());
    every_method(file, port);
    setenv("IDIST_ADDR", "127.0.0.1", 1); // otherwise the ranks find their own addresses
    snprintf(url, sizeof url, "tcp://239.1.2.3:%d", port);
    nobody_answers(url);
    wrong_answers(url, port);
    for (int n = 2; n <= 4; n++) {
        idist_desc d;
        memset(&d, 0, sizeof d);
        d.init_method = url;
        tap_ok(run_all(&d, n, NULL), "multicast, %d ranks", n);
    }
    for (size_t i = 0; i < sizeof placements / sizeof placements[0]; i++) {
        idist_desc d;
        memset(&d, 0, sizeof d);
        d.master_addr = "127.0.0.1";
        d.master_port = port;
        tap_ok(run_all(&d, placements[i].n, &placements[i]),
               "hosts and local ranks of placement %d", (int)i);
    }
    snprintf(url, sizeof url, "tcp://127.0.0.1:%d", port);
    tap_running("IDIST_HOSTID");
    ranks_reset();
    procs_run(3, 20000, of_host_id, url);
    ranks_report("IDIST_HOSTID tells hosts apart");
    tap_running("long host_id");
    ranks_reset();
    procs_run(3, 20000, of_long_host_id, url);
    ranks_report("desc.host_id tells hosts apart however long it is");
    try_again(url);
    snprintf(url, sizeof url, "file://%s", file);
    try_again(url);
    transports_differ(file);
    snprintf(url, sizeof url, "tcp://127.0.0.1:%d", port);
    rank_taken(url);
    used_stores();
    return tap_done();
}
