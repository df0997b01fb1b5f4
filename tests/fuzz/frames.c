// frames.c - fuzzes the ring's reader. Rank 1 of a world of 2 sends arbitrary bytes to rank 0,
// which is in a call.
//
// The first byte of the input chooses the call. The remaining bytes arrive over the link, in reads
// whose sizes depend on the bytes themselves, and then the stream ends. Every call must end with a
// status.
#define IDIST_IMPLEMENTATION
#include "idist.h"

typedef struct source {
    const uint8_t *at, *end;
} source;

static ptrdiff_t source_read(void *port, void *buf, size_t nbytes) {
    source *s = (source *)port;
    size_t n = (size_t)(s->end - s->at);
    if (!n) {
        errno = 0;
        return -1;
    }
    if (n > nbytes) n = nbytes;
    if (n > 1 && (s->at[0] & 7) == 0) n = 1 + s->at[0] / 8u < n ? 1 + s->at[0] / 8u : n;
    memcpy(buf, s->at, n);
    s->at += n;
    return (ptrdiff_t)n;
}

static ptrdiff_t source_write(void *port, const idist__os_part *parts, int nparts) {
    size_t n = 0;
    (void)port;
    for (int i = 0; i < nparts; i++) n += parts[i].nbytes;
    return (ptrdiff_t)n;
}

static int source_descriptor(void *port, bool output) {
    (void)port;
    (void)output;
    return -1;
}

static void source_close(void *port) { (void)port; }

static void drop_log(idist_log_level level, const char *line, void *user) {
    (void)level;
    (void)line;
    (void)user;
}

static void call(uint8_t which, idist_opts *o) {
    static float x[100000], y[200000];
    idist_request r = {NULL};
    idist_recv_info info;
    switch (which % 6) {
    case 0: idist_all_reduce(x, y, 4, IDIST_F32, IDIST_SUM, o); break;
    case 1: idist_all_reduce(x, y, 100000, IDIST_F32, IDIST_SUM, o); break;
    case 2: idist_recv(x, 16, IDIST_F32, IDIST_ANY_SOURCE, IDIST_ANY_TAG, &info, o); break;
    case 3: idist_send(x, 50000, IDIST_F32, 1, 3, o); break;
    case 4: idist_barrier(o); break;
    default:
        o->request = &r;
        idist_all_gather(x, y, 10, IDIST_F32, o);
        o->request = NULL;
        idist_recv(x + 1000, 16, IDIST_F32, 1, 7, NULL, o);
        idist_wait(&r);
        break;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes) {
    static const idist__transport transport = {.name = "fuzz",
                                               .read = source_read,
                                               .write = source_write,
                                               .close = source_close,
                                               .descriptor = source_descriptor};
    idist_desc d;
    idist__config cfg;
    idist__world *w = NULL;
    idist__ring *ring = NULL;
    source s = {data + 1, data + nbytes};
    idist_opts o;
    if (!nbytes) return 0;
    memset(&d, 0, sizeof d);
    memset(&o, 0, sizeof o);
    d.logger.log_fn = drop_log;
    d.timeout_ms = 2000;
    if (idist__config_fill(&cfg, &d) != IDIST_OK) abort();
    cfg.world_size = 2;
    if (idist__life_new(&cfg, &w) != IDIST_OK || idist__join_new(w, &ring) != IDIST_OK) abort();
    w->impl = ring;
    // The call must poll until the stream ends, however small the reads are, because the stream
    // cannot wake a sleeping thread. The progress thread of a request may sleep.
    w->wait.spin_ns = w->wait.spin_budget_ns = 1000 * IDIST__MS;
    if (idist__join_polls(ring) != IDIST_OK) abort();
    ring->links[1].transport = &transport;
    ring->links[1].port = &s;
    ring->links[1].open = true;
    if (idist__members_open(&w->group) != IDIST_OK) abort();
    o.group = &w->group;
    call(data[0], &o);
    idist__life_close(w, true);
    return 0;
}
