// grants.c - the frames of large messages of a collective over sockets
//
// Both ranks know of such a message before it is sent. The receiver therefore grants each message
// with one CTS as soon as it posts the receive. A sender that enters the call first sends one RTS,
// which tells the receiver of the call. The test counts the frames of a broadcast to one other
// rank. One rank enters the call after the first frames of the other rank have arrived.
#include <stdatomic.h>
#include <stdbool.h>

#define IDIST_IMPLEMENTATION
#include "idist.h"

#include "ranks.h"

enum { N_CHUNKS = 4, N_TYPES = IDIST__BYE + 1 };
static const size_t COUNT = (size_t)N_CHUNKS * 65536; // elements of F32, in chunks of 256 KiB

// Follows the bytes that arrive at a rank.
typedef struct reader {
    idist__frame frame;
    size_t frame_moved, left;
    int counts[N_TYPES];
} reader;

typedef struct plan {
    bool sender_first;
    idist__transport counting[2];
    reader readers[2];
    _Atomic int n_ready;
} plan;

static plan *running;

static void follow(reader *r, const char *data, size_t nbytes) {
    while (nbytes) {
        bool in_frame = r->frame_moved < sizeof r->frame;
        size_t wanted = in_frame ? sizeof r->frame - r->frame_moved : r->left;
        size_t k = wanted < nbytes ? wanted : nbytes;

        if (in_frame) {
            memcpy((char *)&r->frame + r->frame_moved, data, k);
            r->frame_moved += k;
        } else {
            r->left -= k;
        }
        data += k;
        nbytes -= k;

        if (in_frame && r->frame_moved == sizeof r->frame) {
            uint8_t type = r->frame.type;
            bool has_payload = type == IDIST__EAGER || type == IDIST__DATA || type == IDIST__ABORT;
            r->left = has_payload ? (size_t)r->frame.nbytes : 0;
            if (type < N_TYPES) r->counts[type]++;
        }
        if (r->frame_moved == sizeof r->frame && !r->left) r->frame_moved = 0;
    }
}

static ptrdiff_t read_by(int rank, void *port, void *buf, size_t nbytes) {
    ptrdiff_t n = idist__sockets_read(port, buf, nbytes);
    if (n > 0) follow(&running->readers[rank], (const char *)buf, (size_t)n);
    return n;
}

static ptrdiff_t read_by_0(void *port, void *buf, size_t n) { return read_by(0, port, buf, n); }
static ptrdiff_t read_by_1(void *port, void *buf, size_t n) { return read_by(1, port, buf, n); }

// Reads until the wanted number of frames of a type have arrived. Returns false after a time-out.
static bool await_frames(idist_group *world, int rank, int type, int wanted) {
    int64_t end_ns = tap_now_ns() + (int64_t)5000000000 * test_slow_factor();
    bool come = false;

    while (!come && tap_now_ns() < end_ns) {
        pthread_mutex_lock(&world->w->lock);
        idist__progress_run(world->w);
        come = running->readers[rank].counts[type] >= wanted;
        pthread_mutex_unlock(&world->w->lock);
    }

    return come;
}

static void body(idist_group *world, int rank, int n, void *arg) {
    plan *p = (plan *)arg;
    idist__link *link = &idist__ring_of(world->w)->links[1 - rank];
    const idist__transport *original = link->transport;
    const int *got = p->readers[rank].counts;
    idist_opts o = opts_of(world);
    float *x = (float *)calloc(COUNT, sizeof *x);
    idist_status status;
    size_t wrong = 0;
    (void)n;

    if (!x) return;
    for (size_t i = 0; i < COUNT && rank == 0; i++) x[i] = (float)(i % 9973);
    if (!rank_ok(rank, idist_barrier(&o))) return;

    p->counting[rank] = *original;
    p->counting[rank].read = rank ? read_by_1 : read_by_0;
    link->transport = &p->counting[rank];
    p->n_ready++;
    while (p->n_ready < 2) tap_sleep_ms(1);

    if (p->sender_first && rank == 1) rank_check(await_frames(world, 1, IDIST__RTS, 1), "no RTS");
    if (!p->sender_first && rank == 0)
        rank_check(await_frames(world, 0, IDIST__CTS, N_CHUNKS),
                   "not a CTS for every chunk: got %d", got[IDIST__CTS]);

    status = idist_broadcast(x, COUNT, IDIST_F32, 0, &o);
    rank_is(rank, status, IDIST_OK);
    for (size_t i = 0; i < COUNT; i++) wrong += x[i] != (float)(i % 9973);
    rank_check(wrong == 0, "rank %d: %zu elements are wrong", rank, wrong);

    if (rank == 0)
        rank_check(got[IDIST__CTS] == N_CHUNKS && got[IDIST__RTS] + got[IDIST__DATA] == 0,
                   "rank 0 got %d CTS, %d RTS, %d DATA", got[IDIST__CTS], got[IDIST__RTS],
                   got[IDIST__DATA]);
    else
        rank_check(got[IDIST__RTS] == p->sender_first && got[IDIST__DATA] == N_CHUNKS &&
                       got[IDIST__CTS] == 0,
                   "rank 1 got %d CTS, %d RTS, %d DATA", got[IDIST__CTS], got[IDIST__RTS],
                   got[IDIST__DATA]);

    p->n_ready++;
    while (p->n_ready < 4) tap_sleep_ms(1);
    link->transport = original;
    free(x);
}

// Sends a message from rank 1 whose size differs from the size that rank 0 expects. Whichever of
// the two sizes is larger, both ranks must report the mismatch.
static void differing_counts(idist_group *world, int rank, int n, void *arg) {
    const size_t *kib = (const size_t *)arg; // KiB that are sent, KiB that are expected
    idist_opts o = opts_of(world);
    size_t count = kib[rank == 0] * 1024, counts[2] = {0, kib[1] * 1024};
    char *x = (char *)calloc(kib[0] + kib[1], 1024);
    idist_status status;
    (void)n;

    if (!x) return;
    status = idist_gatherv(x, rank ? count : 0, x, counts, NULL, IDIST_U8, 0, &o);
    if (status == IDIST_OK) status = idist_barrier(&o); // the sender's call may succeed
    rank_is(rank, status, IDIST_ERR_MISMATCH);
    rank_check(text_has_word(idist_last_error(), "bytes"), "rank %d: %s", rank, idist_last_error());
    free(x);
}

int main(void) {
    static size_t sizes[][2] = {{3000, 2000}, {2000, 3000}, {300, 200},  {200, 300},
                                {1, 300},     {300, 1},     {3000, 200}, {200, 3000}};
    static const char *const transports[2] = {"tcp", "socket"};

    tap_deadline(60);

    for (int i = 0; i < 4; i++) {
        plan p;
        idist_desc d = desc_with(transports[i / 2], "bandwidth");

        memset(&p, 0, sizeof p);
        p.sender_first = i % 2;
        d.timeout_ms = 10000 * test_slow_factor();
        running = &p;
        ranks_case_fault(2, &d, body, &p, "a broadcast over %s, the %s enters first",
                         transports[i / 2], p.sender_first ? "sender" : "receiver");
    }

    for (size_t i = 0; i < 2 * sizeof sizes / sizeof *sizes; i++) {
        idist_desc d = desc_with(transports[i % 2], "bandwidth");

        d.timeout_ms = 10000 * test_slow_factor();
        ranks_case_fault(2, &d, differing_counts, sizes[i / 2],
                         "gatherv over %s: %zu KiB are sent, %zu KiB expected", transports[i % 2],
                         sizes[i / 2][0], sizes[i / 2][1]);
    }

    return tap_done();
}
