// demand: in a world of many ranks, connections are made when they are needed
//
// In these tests 12 ranks count as many. In most cases no rank connects before it needs to.
static int near_links;
#define IDIST__LINKS_MANY 0
#define IDIST__LINKS_NEAR near_links
#define IDIST_IMPLEMENTATION
#include "idist.h"

#include "ranks.h"

#include <sys/resource.h>
#include <sys/socket.h>

enum { N = 12, LOG_N = 4, N_STRANGERS = 300 };

// ---- number of connections ----

// Returns the number of descriptors of this rank after a call. Collective.
static int fds_after(idist_group *world, int rank, idist_status status) {
    idist_opts o = opts_of(world);
    int fds;
    rank_is(rank, status, IDIST_OK);
    fds = count_fds();
    rank_ok(rank, idist_barrier(&o)); // no rank leaves while another one counts
    return fds;
}

static void count_connections(idist_group *world, int rank, int n, void *arg) {
    enum { COUNT = 20000 };
    idist_opts o = opts_of(world);
    int32_t *mine = (int32_t *)calloc(N * COUNT, sizeof *mine);
    int32_t *all = (int32_t *)calloc(N * COUNT, sizeof *all);
    int begun = count_fds(), after;
    (void)arg;
    for (int i = 0; i < n; i++) mine[i * COUNT] = 100 * rank + i;
    after = fds_after(world, rank, idist_barrier(&o)) - begun;
    rank_check(after >= 1 && after <= 2 * LOG_N, "rank %d: %d connections after a barrier", rank,
               after);
    for (int k = 0; k < 2; k++) {
        after = fds_after(world, rank, idist_all_to_all(mine, all, COUNT, IDIST_I32, &o)) - begun;
        rank_check(after == n - 1, "rank %d: %d connections after all_to_all", rank, after);
        for (int i = 0; i < n; i++)
            rank_check(all[i * COUNT] == 100 * i + rank, "rank %d: block %d: got %d", rank, i,
                       all[i * COUNT]);
    }
    free(mine);
    free(all);
}

// ---- both ranks connect at the same time ----

// Exchanges small and large messages between all pairs. Both ranks of a pair begin at the same
// moment.
static void all_at_once(idist_group *world, int rank, int n, void *arg) {
    enum { COUNT = 40000 };
    idist_opts o = opts_of(world);
    idist_request requests[2 * N];
    int32_t *in = (int32_t *)malloc(sizeof(int32_t) * N * COUNT);
    int32_t *out = (int32_t *)malloc(sizeof(int32_t) * COUNT);
    int count = rank % 2 ? COUNT : 100, made = 0;
    (void)arg;
    for (int i = 0; i < COUNT; i++) out[i] = rank * COUNT + i;
    for (int k = 1; k < n; k++) {
        int peer = (rank + k) % n;
        o.request = &requests[made++];
        rank_ok(rank, idist_send(out, (size_t)count, IDIST_I32, peer, 7, &o));
        o.request = &requests[made++];
        rank_ok(rank, idist_recv(in + peer * COUNT, COUNT, IDIST_I32, peer, 7, NULL, &o));
    }
    for (int i = 0; i < made; i++) rank_ok(rank, idist_wait(&requests[i]));
    for (int peer = 0; peer < n; peer++)
        for (int i = 0; i < (peer % 2 ? COUNT : 100) && peer != rank; i += 99)
            rank_check(in[peer * COUNT + i] == peer * COUNT + i, "rank %d: element %d of %d: %d",
                       rank, i, peer, in[peer * COUNT + i]);
    free(in);
    free(out);
}

// ---- the other rank is absent ----

// Becomes 1 at the event for which the ranks of a case wait outside any call.
static int *event; // shared, atomic

// Waits for the event. Returns false after a time-out.
static bool await_event(void) {
    int64_t end_ms = tap_now_ms() + 3000 * test_slow_factor();
    while (!__atomic_load_n(event, __ATOMIC_ACQUIRE)) {
        if (tap_now_ms() > end_ms) return false;
        tap_sleep_ms(1);
    }
    return true;
}

// Starts sends whose connections are made while the program computes. All messages must arrive
// before a sender calls the library again.
static void sends_and_computes(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    idist_request request;
    int32_t x[2] = {40 + rank, 0};
    (void)arg;
    for (int i = 0; i < n - 1 && rank == n - 1; i++) {
        rank_ok(rank, idist_recv(x, 2, IDIST_I32, i, 3, NULL, &o));
        rank_check(x[0] == 40 + i && x[1] == 0, "from %d: got %d, %d", i, x[0], x[1]);
    }
    if (rank == n - 1) {
        __atomic_store_n(event, 1, __ATOMIC_RELEASE);
        return;
    }
    o.request = &request;
    rank_ok(rank, idist_send(x, 2, IDIST_I32, n - 1, 3, &o));
    rank_check(await_event(), "rank %d: not all arrives while it computes", rank);
    rank_ok(rank, idist_wait(&request));
}

// Sends to a rank that enters a call later. The sends must wait for that rank.
static void sends_to_absent(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    int32_t x = 40 + rank;
    (void)arg;
    if (rank == n - 1) tap_sleep_ms(300);
    for (int i = 0; i < n - 1 && rank == n - 1; i++) {
        rank_ok(rank, idist_recv(&x, 1, IDIST_I32, i, 3, NULL, &o));
        rank_check(x == 40 + i, "from %d: got %d", i, x);
    }
    if (rank < n - 1) rank_ok(rank, idist_send(&x, 1, IDIST_I32, n - 1, 3, &o));
}

// Receives from any source. The sender makes the connection.
static void from_any(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    int32_t x = rank, sum = 0;
    (void)arg;
    for (int i = 1; i < n && rank == 0; i++) {
        rank_ok(rank, idist_recv(&x, 1, IDIST_I32, IDIST_ANY_SOURCE, 1, NULL, &o));
        sum += x;
    }
    if (rank) rank_ok(rank, idist_send(&x, 1, IDIST_I32, 0, 1, &o));
    else rank_check(sum == n * (n - 1) / 2, "got %d", sum);
}

// Sends from each rank to every other rank. No rank receives, and all ranks leave. No rank may
// wait.
static void not_received(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    (void)arg;
    for (int i = 0; i < n; i++)
        if (i != rank) rank_ok(rank, idist_send(&rank, 1, IDIST_I32, i, 1, &o));
}

// ---- failures ----

// Two ranks whose distance is not a power of two, so that they are not connected early.
enum { VICTIM = N - 1, FAR = 5 };

// Kills the victim while only FAR waits for it. All other ranks enter a call after FAR has reported
// the loss.
static int dies_far_away(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    idist_opts o = opts_of(world);
    int32_t x = 0;
    (void)arg;
    (void)n;
    proc_phase(slot, 1);
    if (rank == VICTIM) pause();
    if (rank == FAR) {
        proc_result(slot, idist_recv(&x, 1, IDIST_I32, VICTIM, 0, NULL, &o));
    } else {
        rank_check(proc_await_result(&slot[FAR - rank], 3000), "rank %d waits for FAR", rank);
        proc_result(slot, idist_barrier(&o));
    }
    return idist_close(&world) != IDIST_OK && world == NULL ? 0 : 92;
}

static void killed(void) {
    procs p;
    idist_desc d = desc_with("tcp", "auto");
    tap_running("SIGKILL of a rank without a connection");
    ranks_reset();
    near_links = 1;
    procs_start(&p, N, &d, dies_far_away, NULL);
    near_links = 0;
    rank_check(procs_await_phase(&p, 1, 10000), "the ranks did not start");
    tap_sleep_ms(100);
    int64_t killed_ns = tap_now_ns();
    kill(p.pid[VICTIM], SIGKILL);
    rank_check(procs_wait(&p, 5000) == 0, "a rank hangs");
    for (int k = 0; k < N; k++) {
        const proc_slot *slot = &p.slot[k];
        long long ms = (long long)((slot->when_ns - killed_ns) / 1000000);
        if (k == VICTIM) continue;
        rank_check(slot->has_result && slot->status == IDIST_ERR_PEER_LOST &&
                       text_names_only(slot->text, VICTIM, k, N),
                   "rank %d: %s", k, slot->text);
        rank_check(ms < (k == FAR ? 100 : 500) * test_slow_factor(), "rank %d: after %lld ms", k,
                   ms);
    }
    procs_free(&p);
    ranks_report("SIGKILL of a rank to which the one that waits is not connected before");
}

// Makes LATE connect to a rank that is leaving the world after a failure. LATE has not been told of
// the failure and must report its true cause.
static int connects_to_leaver(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    enum { LEAVER = 0, LATE = 6 };
    volatile int *has_failed = (volatile int *)arg;
    idist_opts o = opts_of(world);
    idist_status status;
    int32_t x = 0;
    (void)n;
    proc_phase(slot, 1);
    if (rank == VICTIM) pause();
    if (rank == LEAVER) {
        status = idist_recv(&x, 1, IDIST_I32, VICTIM, 0, NULL, &o);
        *has_failed = 1;
    } else if (rank == LATE) {
        while (!*has_failed) tap_sleep_ms(1);
        tap_sleep_ms(20);
        status = idist_recv(&x, 1, IDIST_I32, LEAVER, 0, NULL, &o);
    } else {
        tap_sleep_ms(1000);
        status = idist_barrier(&o);
    }
    proc_result(slot, status);
    return idist_close(&world) != IDIST_OK && world == NULL ? 0 : 92;
}

static void blamed(void) {
    procs p;
    idist_desc d = desc_with("tcp", "auto");
    int *has_failed = (int *)shared_alloc(sizeof *has_failed);
    tap_running("a rank connects to one that leaves after a failure");
    ranks_reset();
    near_links = 1;
    procs_start(&p, N, &d, connects_to_leaver, has_failed);
    near_links = 0;
    rank_check(procs_await_phase(&p, 1, 10000), "the ranks did not start");
    tap_sleep_ms(100);
    kill(p.pid[VICTIM], SIGKILL);
    rank_check(procs_wait(&p, 8000) == 0, "a rank hangs");
    for (int k = 0; k < N; k++)
        rank_check(k == VICTIM || (p.slot[k].status == IDIST_ERR_PEER_LOST &&
                                   strstr(p.slot[k].text, "rank 11 on")),
                   "rank %d: %s", k, p.slot[k].text);
    procs_free(&p);
    munmap(has_failed, sizeof *has_failed);
    ranks_report("a rank that leaves after a failure tells one that connects to it why");
}

// Aborts a group while two of its members are not connected. All other members stay out of calls
// until SECOND, which enters its call later than FIRST, has reported the abort.
static void late_to_failure(idist_group *world, int rank, int n, void *arg) {
    enum { FIRST = 1, SECOND = 7 };
    idist_group *all = NULL;
    idist_opts o = opts_of(world), of_all;
    int32_t x = 0;
    (void)arg;
    (void)n;
    rank_ok(rank, idist_split(world, 0, rank, &all));
    of_all = opts_of(all);
    if (rank == FIRST) {
        rank_check(!idist__link_is_connected(&idist__ring_of(world->w)->links[SECOND]),
                   "there is a connection");
        rank_ok(rank, idist_abort(all));
        rank_ok(rank, idist_recv(&x, 1, IDIST_I32, SECOND, 0, NULL, &o));
    } else if (rank == SECOND) {
        tap_sleep_ms(200); // time for FIRST to abort; the test does not need this
        rank_is(rank, idist_recv(&x, 1, IDIST_I32, FIRST, 0, NULL, &of_all), IDIST_ERR_ABORTED);
        __atomic_store_n(event, 1, __ATOMIC_RELEASE);
        rank_ok(rank, idist_send(&x, 1, IDIST_I32, FIRST, 0, &o));
    } else {
        rank_check(await_event(), "rank %d: SECOND was not told of the abort", rank);
    }
    rank_ok(rank, idist_barrier(&o));
    if (all) idist_free_group(&all);
}

// Keeps FAR out of the barrier until all other ranks have timed out. They must name FAR and no
// other rank.
static int waits_for_late(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    idist_opts o = opts_of(world);
    (void)arg;
    o.timeout_ms = 1500;
    for (int k = 0; k < n && rank == FAR; k++)
        rank_check(k == FAR || proc_await_result(&slot[k - FAR], 6000), "rank %d waits on", k);
    proc_result(slot, rank == FAR ? IDIST_OK : idist_barrier(&o));
    return idist_close(&world) != IDIST_OK && world == NULL ? 0 : 92;
}

static void late(void) {
    procs p;
    idist_desc d = desc_with("tcp", "auto");
    tap_running("a rank is late");
    ranks_reset();
    procs_start(&p, N, &d, waits_for_late, NULL);
    rank_check(procs_wait(&p, 8000) == 0, "a rank hangs");
    for (int k = 0; k < N; k++)
        rank_check(k == FAR || (p.slot[k].status == IDIST_ERR_TIMEOUT &&
                                text_names_only(p.slot[k].text, FAR, k, N)),
                   "rank %d: %s", k, p.slot[k].text);
    procs_free(&p);
    ranks_report("a time-out names the rank that did not come, and nobody else");
}

// ---- strangers ----

// Returns the port on which this process listens, or 0 if there is none.
static int own_port(void) {
    for (int fd = 0; fd < 1024; fd++) {
        struct sockaddr_in a;
        socklen_t len = sizeof a;
        int listens = 0;
        socklen_t n = sizeof listens;
        if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &n) != 0 || !listens) continue;
        if (getsockname(fd, (struct sockaddr *)&a, &len) == 0 && a.sin_family == AF_INET)
            return ntohs(a.sin_port);
    }
    return 0;
}

// Opens `count` connections to this process, as strangers would. Sends nothing on them, or nonsense
// on half of them if `silent` is false.
static void add_strangers(int rank, int *fds, int count, bool silent) {
    static const char nonsense[100] = "GET / HTTP/1.1\r\n\r\n";
    struct sockaddr_in a;
    memset(&a, 0, sizeof a);
    a.sin_family = AF_INET;
    a.sin_port = htons((uint16_t)own_port());
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    rank_check(a.sin_port != 0, "rank %d does not listen", rank);
    for (int i = 0; i < count; i++) {
        fds[i] = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
        if (connect(fds[i], (struct sockaddr *)&a, sizeof a) == 0 || errno != EINPROGRESS) continue;
        if (i % 2 && !silent) (void)!send(fds[i], nonsense, sizeof nonsense, MSG_NOSIGNAL);
    }
}

// Reduces while strangers hold more connections than there are slots for strangers.
static void among_strangers(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    int fds[N_STRANGERS], sum = 0, x = rank;
    (void)arg;
    if (rank == 0) add_strangers(rank, fds, N_STRANGERS, false);
    rank_ok(rank, idist_all_reduce(&x, &sum, 1, IDIST_I32, IDIST_SUM, &o));
    rank_check(sum == n * (n - 1) / 2, "rank %d: got %d", rank, sum);
    for (int i = 0; i < N_STRANGERS && rank == 0; i++) close(fds[i]);
}

// Receives a message from FAR while strangers stay silent. Only this message can wake rank 0.
static void among_silent(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    int fds[N_STRANGERS], x = 0;
    int64_t begun = tap_now_ms();
    (void)arg;
    (void)n;
    if (rank == 0) {
        add_strangers(rank, fds, N_STRANGERS, true);
        rank_ok(rank, idist_recv(&x, 1, IDIST_I32, IDIST_ANY_SOURCE, 1, NULL, &o));
        rank_check(tap_now_ms() - begun < 1500 * test_slow_factor(), "after %d ms",
                   (int)(tap_now_ms() - begun));
        for (int i = 0; i < N_STRANGERS; i++) close(fds[i]);
    }
    if (rank == FAR) {
        tap_sleep_ms(400);
        rank_ok(rank, idist_send(&x, 1, IDIST_I32, 0, 1, &o));
    }
}

// ---- calls that cannot connect ----

// Sends messages back and forth between ranks 0 and 1. Returns the time in ms.
static int64_t exchange(idist_group *world, int rank) {
    enum { TRIPS = 1000 };
    idist_opts o = opts_of(world);
    int64_t begun = tap_now_ms();
    int x = 0;
    for (int i = 0; i < TRIPS && rank < 2; i++) {
        if (rank == 0) rank_ok(rank, idist_send(&x, 1, IDIST_I32, 1, 1, &o));
        rank_ok(rank, idist_recv(&x, 1, IDIST_I32, 1 - rank, 1, NULL, &o));
        if (rank == 1) rank_ok(rank, idist_send(&x, 1, IDIST_I32, 0, 1, &o));
    }
    return tap_now_ms() - begun;
}

// Leaves rank 0 without a descriptor when FAR connects. Its other connections must be as fast as
// before, and the text of a time-out must say why rank 0 could not connect.
static void without_descriptors(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    struct rlimit limit;
    int64_t before_ms, ms;
    int x = 0;
    (void)arg;
    (void)n;
    rank_ok(rank, idist_barrier(&o));
    before_ms = exchange(world, rank);
    if (rank == 0) {
        getrlimit(RLIMIT_NOFILE, &limit);
        limit.rlim_cur = (rlim_t)dup(0); // the lowest free descriptor
        setrlimit(RLIMIT_NOFILE, &limit);
        close((int)limit.rlim_cur);
        o.timeout_ms = 300;
        rank_is(rank, idist_recv(&x, 1, IDIST_I32, 7, 9, NULL, &o), IDIST_ERR_TIMEOUT);
        rank_check(strstr(idist_last_error(), "out of file descriptors") != NULL, "%s",
                   idist_last_error());
        o.timeout_ms = 0;
    }
    if (rank == FAR) {
        o.timeout_ms = 1500;
        rank_is(rank, idist_recv(&x, 1, IDIST_I32, 0, 9, NULL, &o), IDIST_ERR_TIMEOUT);
        o.timeout_ms = 0;
    }
    ms = exchange(world, rank);
    rank_check(rank != 0 || ms < 300 + 10 * before_ms, "it takes %d ms, before %d ms", (int)ms,
               (int)before_ms);
    if (rank == 0) {
        limit.rlim_cur = 1000;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
    rank_ok(rank, idist_barrier(&o));
}

// Makes two ranks connect to each other at the same time when each has only one descriptor left.
static void last_descriptors(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    struct rlimit old, limit;
    int32_t x = rank, y = -1;
    (void)arg;
    (void)n;
    rank_ok(rank, idist_barrier(&o));
    if (rank == 0 || rank == FAR) {
        int lowest = dup(0), next = dup(0);
        getrlimit(RLIMIT_NOFILE, &old);
        limit = old;
        limit.rlim_cur = (rlim_t)next; // `lowest` will be free, `next` is not allowed
        setrlimit(RLIMIT_NOFILE, &limit);
        close(lowest);
        close(next);
        o.timeout_ms = 4000 * test_slow_factor();
        rank_ok(rank,
                idist_sendrecv(&x, 1, FAR - rank, 2, &y, 1, FAR - rank, 2, IDIST_I32, NULL, &o));
        rank_check(y == FAR - rank, "rank %d: got %d", rank, y);
        setrlimit(RLIMIT_NOFILE, &old);
        o.timeout_ms = 0;
    }
    rank_ok(rank, idist_barrier(&o));
}

// Gives a rank an address that refuses connections. The rank counts as lost only if a call needs
// it, because otherwise it may have left normally.
static void refused_in_vain(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    idist__ring *ring = idist__ring_of(world->w);
    (void)arg;
    (void)n;
    rank_ok(rank, idist_barrier(&o));
    if (rank == 0) {
        pthread_mutex_lock(&world->w->lock);
        snprintf(ring->connector->where[FAR].text, sizeof ring->connector->where->text,
                 "tcp:[127.0.0.1]:1");
        idist__link_want(ring, &ring->links[FAR]);
        rank_check(ring->wanted != NULL, "there is a connection");
        pthread_mutex_unlock(&world->w->lock);
    }
    for (int i = 0; i < 20; i++) rank_ok(rank, idist_barrier(&o));
    rank_check(!ring->wanted && !ring->connector->attempts, "rank %d still tries to connect", rank);
}

// ----

static void one_case(const char *transport, ranks_fn fn, const char *what) {
    idist_desc d = desc_with(transport, "auto");
    int64_t begun;
    tap_running("%s, %s", what, transport);
    ranks_reset();
    *event = 0;
    begun = tap_now_ms();
    ranks_processes(N, &d, fn, NULL, 20000 * test_slow_factor());
    // Ranks that leave must not wait.
    rank_check(tap_now_ms() - begun < 4500 * test_slow_factor(), "it took %d ms",
               (int)(tap_now_ms() - begun));
    ranks_report("%s, %s", what, transport);
}

int main(void) {
    static const char *const transports[] = {"tcp", "socket", "6+6"};
    tap_deadline(200 * test_slow_factor());
    event = (int *)shared_alloc(sizeof *event);
    one_case("tcp", count_connections, "log n connections after a barrier");
    one_case("socket", count_connections, "log n connections after a barrier");
    for (int k = 0; k < 3; k++) {
        for (int i = 0; i < (test_quick() ? 3 : 30); i++)
            one_case(transports[k], all_at_once, "all pairs connect at once");
        one_case(transports[k], sends_and_computes, "sends go out while the sender computes");
        one_case(transports[k], sends_to_absent, "sends to a rank that is not in a call");
        one_case(transports[k], from_any, "receives from any rank");
        one_case(transports[k], not_received, "messages that nobody receives");
        if (k < 2)
            one_case(transports[k], late_to_failure, "a group has failed before a member connects");
    }
    killed();
    blamed();
    one_case("tcp", among_strangers, "strangers connect meanwhile");
    near_links = 1;
    one_case("tcp", among_silent, "silent strangers connect meanwhile");
    one_case("tcp", without_descriptors, "no descriptor is left");
    for (int i = 0; i < (test_quick() ? 3 : 10); i++)
        one_case("tcp", last_descriptors, "two ranks connect at once by their last descriptors");
    one_case("tcp", refused_in_vain, "a rank refuses that nobody needs");
    near_links = 0;
    late();
    return tap_done();
}
