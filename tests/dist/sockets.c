// sockets: links of several sockets, with stripes of 1,000 bytes that cut frames and payloads at
// all offsets
static int few_are_many; // 1 if connections are made on demand
#define IDIST__STRIPE_BYTES ((size_t)1000)
#define IDIST__LINKS_MANY (few_are_many ? 0 : 64)
#define IDIST__LINKS_NEAR 0
#define IDIST_IMPLEMENTATION
#include "idist.h"

#include "ranks.h"

#include <sys/socket.h>

enum { N = 4, LARGEST = 300000, TIMEOUT_MS = 20000 };

static int32_t value_of(int from, int to, int message, size_t i) {
    return (int32_t)(from * 1000003 + to * 10007 + message * 101 + (int)i);
}

// ---- values ----

// Exchanges messages of many sizes between all pairs, in both directions at the same time.
static void exchange(idist_group *world, int rank, int n) {
    static const size_t counts[] = {0, 1, 7, 234, 250, 251, 1000, 20000, LARGEST};
    enum { MESSAGES = (int)(sizeof counts / sizeof counts[0]) };
    idist_opts o = opts_of(world);
    idist_request requests[2 * MESSAGES * N];
    int32_t *in = (int32_t *)calloc((size_t)n * MESSAGES * LARGEST, sizeof *in);
    int32_t *out = (int32_t *)calloc((size_t)n * MESSAGES * LARGEST, sizeof *out);
    int made = 0;
    TAP_REQUIRE(in && out);
    for (int peer = 0; peer < n; peer++) {
        for (int m = 0; m < MESSAGES && peer != rank; m++) {
            size_t at = (size_t)(peer * MESSAGES + m) * LARGEST;
            for (size_t i = 0; i < counts[m]; i++) out[at + i] = value_of(rank, peer, m, i);
            o.request = &requests[made++];
            rank_ok(rank, idist_send(out + at, counts[m], IDIST_I32, peer, m, &o));
            o.request = &requests[made++];
            rank_ok(rank, idist_recv(in + at, counts[m], IDIST_I32, peer, m, NULL, &o));
        }
    }
    for (int k = 0; k < made; k++) rank_ok(rank, idist_wait(&requests[k]));
    for (int peer = 0; peer < n; peer++) {
        for (int m = 0; m < MESSAGES && peer != rank; m++) {
            size_t at = (size_t)(peer * MESSAGES + m) * LARGEST, wrong = 0;
            for (size_t i = 0; i < counts[m]; i++)
                wrong += in[at + i] != value_of(peer, rank, m, i);
            rank_check(wrong == 0, "rank %d: %zu elements of message %d from %d are wrong", rank,
                       wrong, m, peer);
        }
    }
    free(in);
    free(out);
}

// Runs all_reduces. Large ones go in chunks around a ring, small ones take few steps.
static void collectives(idist_group *world, int rank, int n) {
    static const size_t counts[] = {1, 999, LARGEST};
    idist_opts o = opts_of(world);
    int32_t *x = (int32_t *)calloc(LARGEST, sizeof *x);
    TAP_REQUIRE(x);
    for (int c = 0; c < 3; c++) {
        size_t wrong = 0;
        for (size_t i = 0; i < counts[c]; i++) x[i] = value_of(rank, 0, 0, i);
        rank_ok(rank, idist_all_reduce(x, x, counts[c], IDIST_I32, IDIST_SUM, &o));
        for (size_t i = 0; i < counts[c]; i++) {
            int32_t sum = 0;
            for (int r = 0; r < n; r++) sum += value_of(r, 0, 0, i);
            wrong += x[i] != sum;
        }
        rank_check(wrong == 0, "rank %d: %zu sums of %zu are wrong", rank, wrong, counts[c]);
    }
    free(x);
}

typedef struct plan {
    int sockets; // sockets per link
} plan;

static void values(idist_group *world, int rank, int n, void *arg) {
    const plan *p = (const plan *)arg;
    idist__ring *ring = idist__ring_of(world->w);
    idist_opts o = opts_of(world);
    for (int round = 0; round < 2; round++) {
        exchange(world, rank, n);
        collectives(world, rank, n);
    }
    rank_ok(rank, idist_barrier(&o));
    for (int k = 0; k < n; k++) {
        const idist__sockets *s = &ring->links[k].sockets;
        if (k == rank || ring->links[k].transport != &idist__transport_tcp) continue;
        rank_check(s->count == p->sockets && idist__sockets_is_complete(s),
                   "rank %d: the link to %d has %d sockets", rank, k, s->count);
    }
    rank_ok(rank, idist_barrier(&o)); // no rank leaves while another rank checks its links
}

static void one_count(const char *transport, int sockets) {
    plan p = {sockets};
    idist_desc d = desc_with(transport, "auto");
    d.sockets = sockets;
    tap_running("%d sockets, %s", sockets, transport);
    ranks_reset();
    ranks_processes(N, &d, values, &p, TIMEOUT_MS * test_slow_factor());
    ranks_report("values through links of %d sockets, %s%s", sockets, transport,
                 few_are_many ? ", on demand" : "");
}

// ---- the ranks request different numbers of sockets ----

static int asks(int number, void *arg) {
    idist_group *world = NULL;
    idist_desc d = desc_with("tcp", "auto");
    char text[16];
    snprintf(text, sizeof text, "%d", number == 1 ? 5 : number);
    if (number != 2) setenv("IDIST_SOCKETS", text, 1);
    else d.sockets = 2;
    d.rank = number;
    d.world_size = 3;
    d.master_addr = "127.0.0.1";
    d.master_port = *(int *)arg;
    if (!rank_ok(number, idist_open(&d, &world))) return 1;
    for (int k = 0; k < 3; k++) {
        int count = idist__ring_of(world->w)->links[k].sockets.count;
        rank_check(count == 5 || k == number, "rank %d: %d sockets to %d", number, count, k);
    }
    collectives(world, number, 3);
    rank_ok(number, idist_close(&world));
    return 0;
}

// Checks the automatic number of sockets. Their windows must hold all data that is in flight when
// the network is fully used.
static void automatic(void) {
    static const struct {
        uint32_t round_trip_us, mbits;
        uint64_t window_nbytes;
        int sockets;
    } rows[] = {{0, 0, 0, 1},           {50, 100000, 2 << 20, 1},  {200, 100000, 2 << 20, 2},
                {40000, 0, 2 << 20, 1}, {40000, 10, 2 << 20, 1},   {40000, 1000, 2 << 20, 3},
                {40000, 1000, 0, 1},    {80000, 10000, 2 << 20, 8}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        idist__tcp_record network;
        memset(&network, 0, sizeof network);
        network.round_trip_us = rows[i].round_trip_us;
        network.mbits = rows[i].mbits;
        network.window_nbytes = rows[i].window_nbytes;
        tap_is(idist__records_fill_sockets(&network), rows[i].sockets,
               "%u us round trip, %u Mbit/s", rows[i].round_trip_us, rows[i].mbits);
    }
}

// Checks that invalid values of desc.sockets are refused.
static void bad_numbers(void) {
    static const int bad[] = {-1, 9};
    for (int i = 0; i < 2; i++) {
        idist_group *world = NULL;
        idist_desc d = desc_with("tcp", "auto");
        d.sockets = bad[i];
        tap_is(idist_open(&d, &world), IDIST_ERR_ARG, "desc.sockets = %d", bad[i]);
        tap_like(idist_last_error(), "desc.sockets", "the text names it");
    }
}

// ---- failures ----

// Shuts down one socket of the link between ranks 0 and 1 after 20 all_reduces. Each rank must
// report the other as lost.
static int breaks(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    idist_opts o = opts_of(world);
    idist__ring *ring = idist__ring_of(world->w);
    int32_t *x = (int32_t *)calloc(LARGEST, sizeof *x);
    idist_status status = IDIST_OK;
    (void)n;
    TAP_REQUIRE(x);
    for (int i = 0; i < 1000 && status == IDIST_OK; i++) {
        if (i == 20 && rank == 0) shutdown(ring->links[1].sockets.fds[*(int *)arg], SHUT_RDWR);
        status = idist_all_reduce(x, x, LARGEST, IDIST_I32, IDIST_SUM, &o);
    }
    proc_result(slot, status);
    free(x);
    return idist_close(&world) != IDIST_OK && world == NULL ? 0 : 92;
}

static void broken(int which) {
    procs p;
    idist_desc d = desc_with("tcp", "auto");
    d.sockets = 3;
    tap_running("socket %d breaks", which);
    ranks_reset();
    procs_start(&p, 2, &d, breaks, &which);
    rank_check(procs_wait(&p, TIMEOUT_MS) == 0, "a rank hangs");
    for (int k = 0; k < 2; k++)
        rank_check(p.slot[k].status == IDIST_ERR_PEER_LOST &&
                       text_names_only(p.slot[k].text, 1 - k, k, 2),
                   "rank %d: %s", k, p.slot[k].text);
    procs_free(&p);
    ranks_report("one of three sockets breaks: number %d", which);
}

// Runs all_reduces until one fails because another rank was killed.
static int streams(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    idist_opts o = opts_of(world);
    int32_t *x = (int32_t *)calloc(LARGEST, sizeof *x);
    idist_status status = IDIST_OK;
    (void)n;
    (void)arg;
    TAP_REQUIRE(x);
    for (int i = 0; status == IDIST_OK; i++) {
        if (i == 3) proc_phase(slot, 1);
        status = idist_all_reduce(x, x, LARGEST, IDIST_I32, IDIST_SUM, &o);
    }
    proc_result(slot, status);
    free(x);
    (void)rank;
    return idist_close(&world) != IDIST_OK && world == NULL ? 0 : 92;
}

static void killed(void) {
    int trials = test_quick() ? 5 : 40;
    uint64_t random_state = tap_seed();
    idist_desc d = desc_with("tcp", "auto");
    d.sockets = 4;
    ranks_reset();
    for (int i = 0; i < trials; i++) {
        procs p;
        int victim = i % N;
        tap_running("SIGKILL of rank %d", victim);
        procs_start(&p, N, &d, streams, NULL);
        rank_check(procs_await_phase(&p, 1, 10000 * test_slow_factor()), "they did not start");
        tap_sleep_ms((int)(tap_rand(&random_state) % 20));
        int64_t killed_ns = tap_now_ns();
        kill(p.pid[victim], SIGKILL);
        rank_check(procs_wait(&p, 5000 * test_slow_factor()) == 0, "a rank hangs");
        for (int k = 0; k < N; k++) {
            const proc_slot *slot = &p.slot[k];
            long long ms = (long long)((slot->when_ns - killed_ns) / 1000000);
            if (k == victim) continue;
            rank_check(slot->status == IDIST_ERR_PEER_LOST &&
                           text_names_only(slot->text, victim, k, N),
                       "rank %d: %s", k, slot->text);
            rank_check(ms < 500 * test_slow_factor(), "rank %d: after %lld ms", k, ms);
        }
        procs_free(&p);
    }
    ranks_report("SIGKILL of a rank whose links have four sockets");
}

int main(void) {
    int port = free_port();
    tap_deadline(200 * test_slow_factor());
    for (int sockets = 1; sockets <= 8; sockets += test_quick() ? 3 : 1) one_count("tcp", sockets);
    one_count("2+2", 3);
    few_are_many = 1;
    for (int sockets = 1; sockets <= 8; sockets += test_quick() ? 7 : 1) one_count("tcp", sockets);
    one_count("2+2", 3);
    few_are_many = 0;
    ranks_reset();
    procs_run(3, 20000, asks, &port);
    ranks_report("the highest number that a rank asks for counts");
    automatic();
    bad_numbers();
    for (int which = 0; which < 3; which++) broken(which);
    killed();
    return tap_done();
}
