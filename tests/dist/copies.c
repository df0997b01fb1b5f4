// copies.c - checks which rank copies a large message between two ranks that share memory.
//
// If the sender waits in a call, the sender writes the message to the pipe and the receiver reads
// it from there. Otherwise the receiver reads the message directly from the sender's memory, which
// is called a pull. Where pulls are fast, the receiver also pulls a message above 1 MiB, or while a
// large send of its own waits. A receive with its own time-out always pulls. The tests count the
// receiver's pulls. Where pulls are slow, a message of up to 64 KiB does not wait for its receive.
#include <stdatomic.h>
#include <stdbool.h>

#define IDIST_IMPLEMENTATION
#include "idist.h"

#include "ranks.h"

typedef struct way {
    const char *name;
    size_t nbytes;
    bool slow, sender_waits, receiver_waits, receiver_sends;
    int timeout_ms; // of the receive
    int pulls;      // expected of the receiver
} way;

static const way ways[] = {
    {"both wait, the smallest one that is not eager", 8193, false, true, true, false, 0, 0},
    {"both wait, 300,000 bytes", 300000, false, true, true, false, 0, 0},
    {"both wait, 1 MiB", 1 << 20, false, true, true, false, 0, 0},
    {"both wait, but it is larger than 1 MiB", (1 << 20) + 1, false, true, true, false, 0, 1},
    {"the sender does not wait, 8,193 bytes", 8193, false, false, true, false, 0, 1},
    {"the sender does not wait, 300,000 bytes", 300000, false, false, true, false, 0, 1},
    {"the receiver does not wait", 300000, false, true, false, false, 0, 0},
    {"both wait, but a send of the receiver waits as well", 300000, false, true, true, true, 0, 1},
    {"both wait, the receive with a time-out of its own", 300000, false, true, true, false, 9000,
     1},
    {"pulls are slow, 64 KiB", 65536, true, false, true, false, 0, 0},
    {"pulls are slow, one byte more", 65537, true, false, true, false, 0, 1},
    {"pulls are slow, both wait, 9 MiB", 9 << 20, true, true, true, false, 0, 0},
    {"pulls are slow, 9 MiB, the sender does not wait", 9 << 20, true, false, true, false, 0, 1},
    {"pulls are slow, both wait, and so does a send of the receiver", 9 << 20, true, true, true,
     true, 0, 0},
};

typedef struct plan {
    way way;
    idist__transport counting;
    int pulls;
    _Atomic int n_ready;
    _Atomic bool sent, received;
} plan;

static plan *running;

static bool counted_pull(void *port, uint64_t address, uint8_t withdrawn, void *buf,
                         size_t nbytes) {
    running->pulls++;
    return idist__pipe_pull(port, address, withdrawn, buf, nbytes);
}

// Waits until the other rank waits in a call. Here a waiting rank polls for longer than this test
// takes, so it does not fall asleep. Returns false after a time-out.
static bool other_attends(const idist_group *world, int rank) {
    int64_t end_ns = tap_now_ns() + (int64_t)5000000000 * test_slow_factor();
    const idist__segment *shm = idist__ring_of(world->w)->shm;

    while (tap_now_ns() < end_ns)
        if (idist__doorbell_attends(shm, shm->local[1 - rank])) return true;
    return false;
}

static idist_status send_to_1(idist_group *world, plan *p, char *x) {
    idist_opts o = opts_of(world);
    idist_request request = {0};
    idist_status status;

    if (!p->way.sender_waits) o.request = &request;
    status = idist_send(x, p->way.nbytes, IDIST_U8, 1, 7, &o);
    p->sent = true;
    while (!p->received) tap_sleep_ms(1); // outside of any call
    if (status == IDIST_OK) status = idist_wait(&request);
    o.request = NULL;
    if (status == IDIST_OK && p->way.receiver_sends)
        status = idist_recv(x, p->way.nbytes, IDIST_U8, 1, 8, NULL, &o);

    return status;
}

static idist_status receive_from_0(idist_group *world, plan *p, const char *x, char *got) {
    idist_opts o = opts_of(world);
    idist_request request = {0}, own_send = {0};
    idist_status status = IDIST_OK;
    bool done = p->way.receiver_waits;

    o.request = &own_send;
    if (p->way.receiver_sends) status = idist_send(x, p->way.nbytes, IDIST_U8, 0, 8, &o);
    if (status != IDIST_OK) return status;
    if (p->way.sender_waits) rank_check(other_attends(world, 1), "rank 0 does not wait");
    while (!p->way.sender_waits && !p->sent) tap_sleep_ms(1);

    o.request = p->way.receiver_waits ? NULL : &request;
    o.timeout_ms = p->way.timeout_ms;
    status = idist_recv(got, p->way.nbytes, IDIST_U8, 0, 7, NULL, &o);
    while (status == IDIST_OK && !done) status = idist_test(&request, &done);
    p->received = true;

    return status == IDIST_OK ? idist_wait(&own_send) : status;
}

static void body(idist_group *world, int rank, int n, void *arg) {
    plan *p = (plan *)arg;
    size_t nbytes = p->way.nbytes, wrong = 0;
    idist__link *link = &idist__ring_of(world->w)->links[1 - rank];
    const idist__transport *original = link->transport;
    idist_opts o = opts_of(world);
    char *x = (char *)malloc(nbytes), *got = (char *)calloc(nbytes, 1);
    idist_status status;
    (void)n;

    if (!x || !got) return;
    for (size_t i = 0; i < nbytes; i++) x[i] = (char)(i % 251);
    if (!rank_ok(rank, idist_barrier(&o))) return;
    idist__ring_of(world->w)->shm->reads_fast = !p->way.slow;
    world->w->wait.spin_ns = world->w->wait.spin_budget_ns = (int64_t)60000000000;

    if (rank == 1) {
        p->counting = *original;
        p->counting.pull = counted_pull;
        link->transport = &p->counting;
    }

    p->n_ready++;
    while (p->n_ready < 2) tap_sleep_ms(1);

    status = rank ? receive_from_0(world, p, x, got) : send_to_1(world, p, x);
    rank_is(rank, status, IDIST_OK);

    if (rank == 1) {
        for (size_t i = 0; i < nbytes; i++) wrong += got[i] != x[i];
        rank_check(wrong == 0, "%zu bytes are wrong", wrong);
        rank_check(p->pulls == p->way.pulls, "%d pulls", p->pulls);
    }

    rank_ok(rank, idist_barrier(&o));
    link->transport = original;
    free(x);
    free(got);
}

// Posts a second receive after two messages have arrived. The first receive must keep the first
// message, whichever way messages are copied.
static void in_order(idist_group *world, int rank, int n, void *arg) {
    plan *p = (plan *)arg;
    size_t nbytes = p->way.nbytes;
    idist_opts o = opts_of(world);
    idist_request requests[2] = {{0}, {0}};
    char *x = (char *)malloc(2 * nbytes);
    idist_status status = IDIST_OK;
    (void)n;

    if (!x) return;
    memset(x, rank == 0 ? 1 : 0, nbytes);
    memset(x + nbytes, rank == 0 ? 2 : 0, nbytes);
    idist__ring_of(world->w)->shm->reads_fast = false;
    if (!rank_ok(rank, idist_barrier(&o))) return;

    for (int i = 0; i < 2 && status == IDIST_OK; i++) {
        o.request = &requests[i];
        while (rank == 0 && !p->n_ready) tap_sleep_ms(1);
        status = rank == 0 ? idist_send(x + nbytes * (size_t)i, nbytes, IDIST_U8, 1, 7, &o)
                           : idist_recv(x + nbytes * (size_t)i, nbytes, IDIST_U8, 0, 7, NULL, &o);
        p->n_ready = 1;
        while (rank == 1 && !p->sent) tap_sleep_ms(1);
    }

    p->sent = true;
    if (status == IDIST_OK) status = idist_wait_all(requests, 2);
    rank_is(rank, status, IDIST_OK);
    rank_check(x[0] == 1 && x[nbytes - 1] == 1 && x[nbytes] == 2 && x[2 * nbytes - 1] == 2,
               "the messages came as %d and %d", x[0], x[nbytes]);
    free(x);
}

// Makes the next writes bypass the caches until the library has timed some of them.
static void stream(idist_group *world, int rank) {
    idist__segment *shm = idist__ring_of(world->w)->shm;

    idist__pace *paces[] = {&shm->pace, &shm->window_pace, &shm->ports[1 - rank].pace};

    for (size_t i = 0; i < sizeof paces / sizeof *paces; i++) {
        paces[i]->streams = true;
        paces[i]->count = 2 * IDIST__PACE_TIMES + 1;
    }
}

// Runs collectives and messages whose writes bypass the caches.
static void streams(idist_group *world, int rank, int n, void *arg) {
    size_t count = ((const plan *)arg)->way.nbytes / sizeof(int32_t);
    idist_opts o = opts_of(world);
    int32_t *x = (int32_t *)malloc(2 * count * sizeof *x + 4), *got, *window;
    size_t wrong = 0;

    got = (int32_t *)malloc(2 * count * sizeof *x + 4);
    window = (int32_t *)idist_alloc(count * sizeof *x, &o);
    if (!x || !got || !window) return;
    idist__ring_of(world->w)->shm->reads_fast = false;
    for (size_t i = 0; i < 2 * count; i++) x[i] = (int32_t)(i % 1000003) + rank;

    stream(world, rank);
    rank_ok(rank, idist_all_reduce(x, got, count, IDIST_I32, IDIST_SUM, &o));
    for (size_t i = 0; i < count; i++) wrong += got[i] != n * (x[i] - rank) + 1;
    stream(world, rank);
    memcpy(window, x, count * sizeof *x);
    rank_ok(rank, idist_all_reduce(window, window, count, IDIST_I32, IDIST_SUM, &o));
    for (size_t i = 0; i < count; i++) wrong += window[i] != got[i];
    stream(world, rank);
    rank_ok(rank, idist_all_gather(x, got, count, IDIST_I32, &o));
    for (size_t i = 0; i < 2 * count; i++) wrong += got[i] != x[i % count] - rank + (i >= count);
    stream(world, rank);
    rank_ok(rank, idist_all_to_all(x, got, count, IDIST_I32, &o));
    for (size_t i = 0; i < 2 * count; i++)
        wrong += got[i] != x[(size_t)rank * count + i % count] - rank + (i >= count);
    stream(world, rank);
    rank_ok(rank,
            idist_sendrecv(x, count, 1 - rank, 5, got, count, 1 - rank, 5, IDIST_I32, NULL, &o));
    for (size_t i = 0; i < count; i++) wrong += got[i] != x[i] - rank + (1 - rank);
    stream(world, rank);
    rank_ok(rank, idist_broadcast(x, count, IDIST_I32, 0, &o));
    for (size_t i = 0; i < count; i++) wrong += x[i] != (int32_t)(i % 1000003);

    rank_check(wrong == 0, "%zu elements are wrong", wrong);
    idist_free(window);
    free(x);
    free(got);
}

int main(void) {
    static const size_t lengths[] = {8, 4095, 4096, 20000, 65536, 70000};
    static const size_t streamed[] = {4096, 8196, 20004, 65540, 400004, 3000004};

    tap_deadline(60);
    if (idist__os_cpu_count() < 2) return tap_skip_all("ranks share a core");

    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        plan p;
        idist_desc d = desc_with("auto", NULL);

        memset(&p, 0, sizeof p);
        p.way = ways[i];
        d.timeout_ms = 20000 * test_slow_factor();
        running = &p;
        ranks_case_fault(2, &d, body, &p, "%s", ways[i].name);
    }

    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        plan p;
        idist_desc d = desc_with("auto", NULL);

        memset(&p, 0, sizeof p);
        p.way.nbytes = lengths[i];
        d.timeout_ms = 20000 * test_slow_factor();
        ranks_case_fault(2, &d, in_order, &p, "two messages of %zu bytes in order", lengths[i]);
    }

    for (size_t i = 0; i < sizeof streamed / sizeof *streamed; i++) {
        plan p;
        idist_desc d = desc_with("auto", NULL);

        memset(&p, 0, sizeof p);
        p.way.nbytes = streamed[i];
        d.timeout_ms = 20000 * test_slow_factor();
        ranks_case(2, &d, streams, &p, "past the caches, %zu bytes", streamed[i]);
    }

    return tap_done();
}
