// on_device.c - idist with a device backend, for calls that run on device memory although the test
// passes host memory
//
// Linked instead of idist.o. With ON_XLA, the memory belongs to a PJRT plug-in. Otherwise the
// program is built against a CUDA runtime, either the real one or the stand-in.
#define IDIST_IMPLEMENTATION
#define ON_DEVICE_C
#include "idist.h"

#include "on_device.h"
#ifdef ON_XLA
#include "xla_memory.h"
#else
#include "cuda_memory.h"
#endif

static int n_calls; // atomic

__attribute__((destructor)) static void report(void) {
    fprintf(stderr, "# %d calls on the device\n", __atomic_load_n(&n_calls, __ATOMIC_RELAXED));
}

// A call whose buffers are moved to the device. Buffers that overlap on the host overlap on the
// device, too.
typedef struct moved {
    idist__call c; // the call on the device
    memory_block *device[2];
    char *back_to; // the test's receive buffer
    size_t nrecv;
} moved;

// Moves the buffers of a call to the device. Returns false if the call must be made unchanged,
// because it is wrong or of a kind that is not moved.
static bool begin(moved *m, const idist_opts *opts) {
    idist_group *g = opts && opts->group ? opts->group : (idist_group *)idist__world_default();
    size_t size = idist_dtype_size(m->c.dtype), nsend;
    const char *send = (const char *)m->c.send, *recv = (const char *)m->c.recv;
    idist__extent e;
    m->device[0] = m->device[1] = NULL;
    if (!g || g->freed || !g->w->device ||
        (opts && (opts->request || opts->stream || opts->plan)) || idist__together_now.depth)
        return false;
    if (idist__check_call(g, &m->c) != IDIST_OK || idist__extent_of(g, &m->c, &e) != IDIST_OK)
        return false;
    // A call without elements still passes a pointer to device memory. The pointer shows that the
    // buffers are on the device, as on the other ranks.
    if (!e.send && !e.recv) {
        char *to;
        m->device[0] = memory_put(g, "", 1, IDIST_U8, &to);
        if (m->c.send) m->c.send = to;
        if (m->c.recv) m->c.recv = to;
    }
    nsend = e.send * size;
    m->nrecv = e.recv * size;
    m->back_to = (char *)m->c.recv;
    if (nsend && m->nrecv && send < recv + m->nrecv && recv < send + nsend) {
        const char *low = send < recv ? send : recv, *high = send + nsend;
        if (recv + m->nrecv > high) high = recv + m->nrecv;
        char *to;
        m->device[0] = memory_put(g, low, (size_t)(high - low), m->c.dtype, &to);
        m->c.send = to + (send - low);
        m->c.recv = to + (recv - low);
    } else {
        char *to;
        if (nsend) {
            m->device[0] = memory_put(g, send, nsend, m->c.dtype, &to);
            m->c.send = to;
        }
        if (m->nrecv) {
            m->device[1] = memory_put(g, recv, m->nrecv, m->c.dtype, &to);
            m->c.recv = to;
        }
    }
    if (m->device[0] || m->device[1]) __atomic_add_fetch(&n_calls, 1, __ATOMIC_RELAXED);
    return true;
}

static idist_status run(idist__call *c, const idist_opts *opts) {
    moved m;
    idist_status s;
    memset(&m, 0, sizeof m);
    m.c = *c;
    if (!begin(&m, opts)) return idist__call_run(c, opts);
    s = idist__call_run(&m.c, opts);
    if (m.nrecv) memory_get(m.device[1] ? m.device[1] : m.device[0], m.c.recv, m.back_to, m.nrecv);
    memory_give(m.device[0]);
    memory_give(m.device[1]);
    return s;
}

static idist_status plain(idist__kind kind, const void *send, void *recv, size_t count,
                          idist_dtype dtype, idist_op op, int root, const idist_opts *opts) {
    idist__call c;
    idist__call_init(&c, kind, send, recv, count, dtype);
    c.op = op;
    c.root = root;
    return run(&c, opts);
}

idist_status on_device_all_reduce(const void *send, void *recv, size_t count, idist_dtype dtype,
                                  idist_op op, const idist_opts *opts) {
    return plain(IDIST__ALL_REDUCE, send, recv, count, dtype, op, -1, opts);
}

idist_status on_device_reduce(const void *send, void *recv, size_t count, idist_dtype dtype,
                              idist_op op, int root, const idist_opts *opts) {
    return plain(IDIST__REDUCE, send, recv, count, dtype, op, root, opts);
}

idist_status on_device_broadcast(void *buf, size_t count, idist_dtype dtype, int root,
                                 const idist_opts *opts) {
    return plain(IDIST__BROADCAST, NULL, buf, count, dtype, (idist_op)0, root, opts);
}

idist_status on_device_all_gather(const void *send, void *recv, size_t count, idist_dtype dtype,
                                  const idist_opts *opts) {
    return plain(IDIST__ALL_GATHER, send, recv, count, dtype, (idist_op)0, -1, opts);
}

idist_status on_device_gather(const void *send, void *recv, size_t count, idist_dtype dtype,
                              int root, const idist_opts *opts) {
    return plain(IDIST__GATHER, send, recv, count, dtype, (idist_op)0, root, opts);
}

idist_status on_device_scatter(const void *send, void *recv, size_t count, idist_dtype dtype,
                               int root, const idist_opts *opts) {
    return plain(IDIST__SCATTER, send, recv, count, dtype, (idist_op)0, root, opts);
}

idist_status on_device_reduce_scatter(const void *send, void *recv, size_t count, idist_dtype dtype,
                                      idist_op op, const idist_opts *opts) {
    return plain(IDIST__REDUCE_SCATTER, send, recv, count, dtype, op, -1, opts);
}

idist_status on_device_all_to_all(const void *send, void *recv, size_t count, idist_dtype dtype,
                                  const idist_opts *opts) {
    return plain(IDIST__ALL_TO_ALL, send, recv, count, dtype, (idist_op)0, -1, opts);
}

idist_status on_device_scan(const void *send, void *recv, size_t count, idist_dtype dtype,
                            idist_op op, const idist_opts *opts) {
    return plain(IDIST__SCAN, send, recv, count, dtype, op, -1, opts);
}

idist_status on_device_exscan(const void *send, void *recv, size_t count, idist_dtype dtype,
                              idist_op op, const idist_opts *opts) {
    return plain(IDIST__EXSCAN, send, recv, count, dtype, op, -1, opts);
}

static idist_status v_form(idist__kind kind, const void *send, void *recv, size_t count,
                           const size_t *const counts[4], idist_dtype dtype, int root,
                           uint64_t check, const idist_opts *opts) {
    idist__call c;
    idist__call_init(&c, kind, send, recv, count, dtype);
    c.sendcounts = counts[0];
    c.senddispls = counts[1];
    c.recvcounts = counts[2];
    c.recvdispls = counts[3];
    c.root = root;
    c.check = check;
    return run(&c, opts);
}

idist_status on_device_all_gatherv(const void *send, size_t sendcount, void *recv,
                                   const size_t *recvcounts, const size_t *recvdispls,
                                   idist_dtype dtype, const idist_opts *opts) {
    const size_t *const counts[4] = {NULL, NULL, recvcounts, recvdispls};
    size_t n = (size_t)idist_group_size(opts ? opts->group : NULL);
    uint64_t check = recvcounts ? idist__hash(recvcounts, sizeof *recvcounts * n) : 0;
    return v_form(IDIST__ALL_GATHERV, send, recv, sendcount, counts, dtype, -1, check, opts);
}

idist_status on_device_gatherv(const void *send, size_t sendcount, void *recv,
                               const size_t *recvcounts, const size_t *recvdispls,
                               idist_dtype dtype, int root, const idist_opts *opts) {
    const size_t *const counts[4] = {NULL, NULL, recvcounts, recvdispls};
    return v_form(IDIST__GATHERV, send, recv, sendcount, counts, dtype, root, 0, opts);
}

idist_status on_device_scatterv(const void *send, const size_t *sendcounts,
                                const size_t *senddispls, void *recv, size_t recvcount,
                                idist_dtype dtype, int root, const idist_opts *opts) {
    const size_t *const counts[4] = {sendcounts, senddispls, NULL, NULL};
    return v_form(IDIST__SCATTERV, send, recv, recvcount, counts, dtype, root, 0, opts);
}

idist_status on_device_all_to_allv(const void *send, const size_t *sendcounts,
                                   const size_t *senddispls, void *recv, const size_t *recvcounts,
                                   const size_t *recvdispls, idist_dtype dtype,
                                   const idist_opts *opts) {
    bool in_place = send == recv && (send || !sendcounts);
    const size_t *const counts[4] = {in_place ? recvcounts : sendcounts,
                                     in_place ? recvdispls : senddispls, recvcounts, recvdispls};
    return v_form(IDIST__ALL_TO_ALLV, send, recv, 0, counts, dtype, -1, 0, opts);
}

idist_status on_device_reduce_scatterv(const void *send, void *recv, const size_t *recvcounts,
                                       idist_dtype dtype, idist_op op, const idist_opts *opts) {
    size_t n = (size_t)idist_group_size(opts ? opts->group : NULL);
    int rank = idist_group_rank(opts ? opts->group : NULL);
    idist__call c;
    idist__call_init(&c, IDIST__REDUCE_SCATTERV, send, recv, rank < 0 ? 0 : recvcounts[rank],
                     dtype);
    c.sendcounts = recvcounts;
    c.op = op;
    c.check = idist__hash(recvcounts, sizeof *recvcounts * n);
    return run(&c, opts);
}

idist_status on_device_send(const void *buf, size_t count, idist_dtype dtype, int dst, int tag,
                            const idist_opts *opts) {
    idist__call c;
    idist__call_init(&c, IDIST__SEND, buf, NULL, count, dtype);
    c.root = dst;
    c.tag = tag;
    return run(&c, opts);
}

idist_status on_device_recv(void *buf, size_t count, idist_dtype dtype, int src, int tag,
                            idist_recv_info *info, const idist_opts *opts) {
    idist__call c;
    idist__call_init(&c, IDIST__RECV, NULL, buf, count, dtype);
    c.root = src;
    c.tag = tag;
    c.info = info;
    return run(&c, opts);
}
