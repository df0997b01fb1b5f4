// calls/collective.h: the public collectives; each fills one call
//
// Each public collective fills one idist__call and passes the call to idist__call_run
// (core/call.h). The functions for bytes, and those that allocate their result, make several calls.
// No code in calls/ touches a connection.
#pragma once

#include "os/thread.h"
#include "os/memory.h"
#include "base/fail.h"
#include "base/hash.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/fingerprint.h"
#include "core/group.h"
#include "core/check.h"
#include "core/call.h"
#include "core/matching.h"

// Runs any collective that is not a v-form. Pass IDIST_SUM as `op` if nothing is reduced, and -1 as
// `root` if there is no root. Pass the public call that this call is part of as `label`, or `kind`
// itself.
static idist_status idist__collective_run(idist__kind kind, idist__kind label, const void *send,
                                          void *recv, size_t count, idist_dtype dtype, idist_op op,
                                          int root, const idist_opts *opts) {
    idist__call call;

    idist__call_init(&call, kind, send, recv, count, dtype);
    call.label = label;
    call.op = op;
    call.root = root;
    return idist__call_run(&call, opts);
}

idist_status idist_all_reduce(const void *send, void *recv, size_t count, idist_dtype dtype,
                              idist_op op, const idist_opts *opts) {
    return idist__collective_run(IDIST__ALL_REDUCE, IDIST__ALL_REDUCE, send, recv, count, dtype, op,
                                 -1, opts);
}

idist_status idist_reduce(const void *send, void *recv, size_t count, idist_dtype dtype,
                          idist_op op, int root, const idist_opts *opts) {
    return idist__collective_run(IDIST__REDUCE, IDIST__REDUCE, send, recv, count, dtype, op, root,
                                 opts);
}

idist_status idist_reduce_scatter(const void *send, void *recv, size_t count, idist_dtype dtype,
                                  idist_op op, const idist_opts *opts) {
    return idist__collective_run(IDIST__REDUCE_SCATTER, IDIST__REDUCE_SCATTER, send, recv, count,
                                 dtype, op, -1, opts);
}

idist_status idist_scan(const void *send, void *recv, size_t count, idist_dtype dtype, idist_op op,
                        const idist_opts *opts) {
    return idist__collective_run(IDIST__SCAN, IDIST__SCAN, send, recv, count, dtype, op, -1, opts);
}

idist_status idist_exscan(const void *send, void *recv, size_t count, idist_dtype dtype,
                          idist_op op, const idist_opts *opts) {
    return idist__collective_run(IDIST__EXSCAN, IDIST__EXSCAN, send, recv, count, dtype, op, -1,
                                 opts);
}

idist_status idist_broadcast(void *buf, size_t count, idist_dtype dtype, int root,
                             const idist_opts *opts) {
    return idist__collective_run(IDIST__BROADCAST, IDIST__BROADCAST, NULL, buf, count, dtype,
                                 IDIST_SUM, root, opts);
}

idist_status idist_barrier(const idist_opts *opts) {
    return idist__collective_run(IDIST__BARRIER, IDIST__BARRIER, NULL, NULL, 0, IDIST_U8, IDIST_SUM,
                                 -1, opts);
}

idist_status idist_all_gather(const void *send, void *recv, size_t count, idist_dtype dtype,
                              const idist_opts *opts) {
    return idist__collective_run(IDIST__ALL_GATHER, IDIST__ALL_GATHER, send, recv, count, dtype,
                                 IDIST_SUM, -1, opts);
}

idist_status idist_gather(const void *send, void *recv, size_t count, idist_dtype dtype, int root,
                          const idist_opts *opts) {
    return idist__collective_run(IDIST__GATHER, IDIST__GATHER, send, recv, count, dtype, IDIST_SUM,
                                 root, opts);
}

idist_status idist_scatter(const void *send, void *recv, size_t count, idist_dtype dtype, int root,
                           const idist_opts *opts) {
    return idist__collective_run(IDIST__SCATTER, IDIST__SCATTER, send, recv, count, dtype,
                                 IDIST_SUM, root, opts);
}

idist_status idist_all_to_all(const void *send, void *recv, size_t count, idist_dtype dtype,
                              const idist_opts *opts) {
    return idist__collective_run(IDIST__ALL_TO_ALL, IDIST__ALL_TO_ALL, send, recv, count, dtype,
                                 IDIST_SUM, -1, opts);
}

// Runs an in-place all_reduce of a buffer that consists of several parts. Sets *taken to false, and
// does not begin the call, if this rank cannot reduce a buffer in parts.
IDIST__UNUSED static idist_status
idist__collective_all_reduce_parts(const idist__part *parts, int part_count, idist_dtype dtype,
                                   idist_op op, const idist_opts *opts, bool *taken) {
    idist_group *g;
    idist__call call;

    *taken = false;
    if (idist__call_enter("all_reduce", opts->group, &g) != IDIST_OK) return IDIST_OK;

    idist__call_init(&call, IDIST__ALL_REDUCE, parts[0].data, parts[0].data,
                     parts[part_count - 1].end, dtype);
    call.op = op;
    call.parts = parts;
    call.part_count = part_count;
    if (g->rank >= 0 && g->status == IDIST_OK && g->w->backend->takes_parts)
        *taken = g->w->backend->takes_parts(g, &call);
    idist__os_mutex_unlock(&g->w->lock);

    return *taken ? idist__call_run(&call, opts) : IDIST_OK;
}

// The v-forms hash the counts that must agree on all ranks, and put the hash into the fingerprint.
// The backend compares the counts that concern only two ranks (idist__extent_pair).
idist_status idist_all_gatherv(const void *send, size_t sendcount, void *recv,
                               const size_t *recvcounts, const size_t *recvdispls,
                               idist_dtype dtype, const idist_opts *opts) {
    idist__call call;
    int n = idist_group_size(opts ? opts->group : NULL);

    idist__call_init(&call, IDIST__ALL_GATHERV, send, recv, sendcount, dtype);
    call.recvcounts = recvcounts;
    call.recvdispls = recvdispls;
    call.check = recvcounts ? idist__hash(recvcounts, sizeof *recvcounts * (size_t)n) : 0;
    return idist__call_run(&call, opts);
}

idist_status idist_gatherv(const void *send, size_t sendcount, void *recv, const size_t *recvcounts,
                           const size_t *recvdispls, idist_dtype dtype, int root,
                           const idist_opts *opts) {
    idist__call call;

    idist__call_init(&call, IDIST__GATHERV, send, recv, sendcount, dtype);
    call.recvcounts = recvcounts;
    call.recvdispls = recvdispls;
    call.root = root;
    call.check = 0;
    return idist__call_run(&call, opts);
}

idist_status idist_scatterv(const void *send, const size_t *sendcounts, const size_t *senddispls,
                            void *recv, size_t recvcount, idist_dtype dtype, int root,
                            const idist_opts *opts) {
    idist__call call;

    idist__call_init(&call, IDIST__SCATTERV, send, recv, recvcount, dtype);
    call.sendcounts = sendcounts;
    call.senddispls = senddispls;
    call.root = root;
    call.check = 0;
    return idist__call_run(&call, opts);
}

idist_status idist_all_to_allv(const void *send, const size_t *sendcounts, const size_t *senddispls,
                               void *recv, const size_t *recvcounts, const size_t *recvdispls,
                               idist_dtype dtype, const idist_opts *opts) {
    idist__call call;

    bool in_place = send == recv && (send || !sendcounts);

    idist__call_init(&call, IDIST__ALL_TO_ALLV, send, recv, 0, dtype);
    call.sendcounts = in_place ? recvcounts : sendcounts;
    call.senddispls = in_place ? recvdispls : senddispls;
    call.recvcounts = recvcounts;
    call.recvdispls = recvdispls;
    return idist__call_run(&call, opts);
}

// Passes recvcounts as the sendcounts of the call, because recvcounts describes the blocks of the
// send buffer.
idist_status idist_reduce_scatterv(const void *send, void *recv, const size_t *recvcounts,
                                   idist_dtype dtype, idist_op op, const idist_opts *opts) {
    idist__call call;
    int n = idist_group_size(opts ? opts->group : NULL);
    int rank = idist_group_rank(opts ? opts->group : NULL);
    size_t count = recvcounts && rank >= 0 ? recvcounts[rank] : 0;

    idist__call_init(&call, IDIST__REDUCE_SCATTERV, send, recv, count, dtype);
    call.sendcounts = recvcounts;
    call.op = op;
    call.check = recvcounts ? idist__hash(recvcounts, sizeof *recvcounts * (size_t)n) : 0;
    return idist__call_run(&call, opts);
}

// Allocates a buffer for a rank whose own buffer is too small. The rank can then take part, so that
// the other ranks are not held up. Aborts the group if there is no memory. Sets *spare to NULL if
// the buffer of the program is large enough. The caller frees *spare.
static idist_status idist__collective_spare(const char *name, uint64_t nbytes, size_t capacity,
                                            const idist_opts *opts, void **spare) {
    *spare = NULL;
    if (nbytes <= capacity) return IDIST_OK;
    *spare = malloc((size_t)nbytes);
    if (*spare) return IDIST_OK;
    idist_abort(opts ? opts->group : NULL);

    return idist__fail(IDIST_ERR_NO_MEMORY, "%s: no memory for %llu bytes", name,
                       (unsigned long long)nbytes);
}

static idist_status idist__collective_fits(const char *name, uint64_t nbytes, size_t capacity) {
    if (nbytes <= capacity) return IDIST_OK;
    return idist__fail(IDIST_ERR_TRUNCATED, "%s: %llu bytes arrived, but the buffer holds only %zu",
                       name, (unsigned long long)nbytes, capacity);
}

idist_status idist_broadcast_bytes(void *buf, size_t capacity, size_t *nbytes, int root,
                                   const idist_opts *opts) {
    const char *name = "broadcast_bytes";
    bool is_root = idist_group_rank(opts ? opts->group : NULL) == root;
    uint64_t n = 0;
    void *spare;
    idist_status status = idist__check_blocking(name, opts);

    if (status != IDIST_OK) return status;
    if (!nbytes || (capacity && !buf))
        return idist__fail(IDIST_ERR_ARG, "%s: buf or nbytes is NULL", name);
    if (is_root && *nbytes > capacity)
        return idist__fail(IDIST_ERR_ARG, "%s: root's *nbytes is %zu, but its capacity is %zu",
                           name, *nbytes, capacity);

    if (is_root) n = *nbytes;
    status = idist__collective_run(IDIST__BROADCAST, IDIST__BROADCAST_BYTES, NULL, &n, 1, IDIST_U64,
                                   IDIST_SUM, root, opts);
    if (status == IDIST_OK) status = idist__collective_spare(name, n, capacity, opts, &spare);
    if (status != IDIST_OK) return status;

    status = idist__collective_run(IDIST__BROADCAST, IDIST__BROADCAST_BYTES, NULL,
                                   spare ? spare : buf, (size_t)n, IDIST_U8, IDIST_SUM, root, opts);
    free(spare);
    if (status != IDIST_OK) return status;
    *nbytes = (size_t)n;

    return idist__collective_fits(name, n, capacity);
}

idist_status idist_all_gather_bytes(const void *send, size_t nbytes, void *buf, size_t capacity,
                                    size_t *sizes, const idist_opts *opts) {
    const char *name = "all_gather_bytes";
    const char *from = (const char *)send, *to = (const char *)buf;
    int i, n = idist_group_size(opts ? opts->group : NULL);
    size_t total = 0, own = nbytes;
    void *spare;
    idist__call call;
    idist_status status = idist__check_blocking(name, opts);

    if (status != IDIST_OK) return status;
    if (!sizes || (capacity && !buf) || (nbytes && !send))
        return idist__fail(IDIST_ERR_ARG, "%s: send, buf or sizes is NULL", name);
    if (nbytes && capacity && from < to + capacity && to < from + nbytes)
        return idist__fail(IDIST_ERR_ARG, "%s: send and buf overlap; there is no in-place form",
                           name);

    status = idist__collective_run(IDIST__ALL_GATHER, IDIST__ALL_GATHER_BYTES, &own, sizes,
                                   sizeof own, IDIST_U8, IDIST_SUM, -1, opts);
    if (status != IDIST_OK) return status;
    for (i = 0; i < n; i++) total += sizes[i];
    status = idist__collective_spare(name, total, capacity, opts, &spare);
    if (status != IDIST_OK) return status;

    idist__call_init(&call, IDIST__ALL_GATHERV, send, spare ? spare : buf, nbytes, IDIST_U8);
    call.label = IDIST__ALL_GATHER_BYTES;
    call.recvcounts = sizes;
    call.check = idist__hash(sizes, sizeof *sizes * (size_t)n);
    status = idist__call_run(&call, opts);
    free(spare);
    if (status != IDIST_OK) return status;

    return idist__collective_fits(name, total, capacity);
}

// Allocates the result of a call that the other ranks have already entered. Fails the group if
// there is no memory.
static idist_status idist__collective_alloc(const char *name, uint64_t nbytes,
                                            const idist_opts *opts, void **recv) {
    idist_group *g = NULL;
    size_t padded = nbytes < SIZE_MAX / 2 ? (size_t)((nbytes + 1 + 63) & ~(uint64_t)63) : 0;

    *recv = padded ? idist__os_memory_aligned(64, padded) : NULL;

    if (*recv) {
        ((char *)*recv)[nbytes] = 0;
        return IDIST_OK;
    }

    if (idist__call_enter(name, opts ? opts->group : NULL, &g) == IDIST_OK) {
        idist__group_fail_memory(g);
        idist__os_mutex_unlock(&g->w->lock);
    }

    return idist__fail(IDIST_ERR_NO_MEMORY, "%s: no memory for %llu bytes", name,
                       (unsigned long long)nbytes);
}

// Frees the result and sets *recv to NULL if `status` is an error. Returns `status`.
static idist_status idist__collective_alloc_end(idist_status status, void **recv) {
    if (status == IDIST_OK) return IDIST_OK;
    idist__os_memory_free_aligned(*recv);
    *recv = NULL;

    return status;
}

// A description of the root's buffer. Other ranks recognize a built-in dtype, or a user dtype that
// they have created as well.
typedef struct idist__collective_head {
    uint64_t count, nbytes, check;
    uint64_t dtype;
} idist__collective_head;

// Checks the data that this rank sends in a call that allocates its result, and describes the data
// in *head.
static idist_status idist__collective_head_of(idist__kind label, const void *send, size_t count,
                                              idist_dtype dtype, const idist_opts *opts,
                                              idist__collective_head *head) {
    const char *name = idist__kind_names[label];
    idist_group *g = NULL;
    idist__call call;
    idist_status status;

    if (count && !send)
        return idist__fail(IDIST_ERR_ARG, "%s: send is NULL and count is not 0", name);
    status = idist__call_enter(name, opts ? opts->group : NULL, &g);

    if (status != IDIST_OK) return status;
    idist__call_init(&call, IDIST__BROADCAST, send, NULL, count, dtype);
    call.label = label;
    call.root = g->rank;
    call.recv = (void *)(uintptr_t)send; // a broadcast has only one buffer
    status = idist__check_call(g, &call);
    head->count = count;
    head->nbytes = count * idist_dtype_size(dtype);
    head->dtype = (uint8_t)dtype;
    head->check = idist__fingerprint_tagged(g->w, &call, count);
    idist__os_mutex_unlock(&g->w->lock);

    return status;
}

// Returns the dtype of this rank that corresponds to the root's dtype, or IDIST_DTYPE_COUNT if this
// rank has no such dtype.
static idist_dtype idist__collective_dtype(const idist__collective_head *head,
                                           const idist_opts *opts) {
    idist_dtype dtype = IDIST_DTYPE_COUNT;
    idist_group *g = NULL;
    idist__fingerprint sent;

    memset(&sent, 0, sizeof sent);
    sent.dtype = (uint8_t)head->dtype;
    sent.check = head->check;
    if (idist__call_enter("broadcast_alloc", opts ? opts->group : NULL, &g) != IDIST_OK)
        return dtype;
    dtype = idist__matching_dtype(g->w, &sent);
    idist__os_mutex_unlock(&g->w->lock);

    return dtype;
}

idist_status idist_broadcast_alloc(const void *send, size_t count, idist_dtype dtype, int root,
                                   void **recv, size_t *recvcount, idist_dtype *recvdtype,
                                   const idist_opts *opts) {
    const idist__kind label = IDIST__BROADCAST_ALLOC;
    bool is_root = idist_group_rank(opts ? opts->group : NULL) == root;
    idist__collective_head head;
    idist_status status;

    if (recv) *recv = NULL;
    if (!recv || !recvcount)
        return idist__fail(IDIST_ERR_ARG, "broadcast_alloc: recv or recvcount is NULL");
    *recvcount = 0;
    memset(&head, 0, sizeof head);
    status = idist__check_blocking("broadcast_alloc", opts);
    if (status == IDIST_OK && is_root)
        status = idist__collective_head_of(label, send, count, dtype, opts, &head);
    if (status == IDIST_OK)
        status = idist__collective_run(IDIST__BROADCAST, label, NULL, &head, 4, IDIST_U64,
                                       IDIST_SUM, root, opts);
    if (status == IDIST_OK)
        status = idist__collective_alloc("broadcast_alloc", head.nbytes, opts, recv);
    if (status != IDIST_OK) return status;

    if (is_root && head.nbytes) memcpy(*recv, send, (size_t)head.nbytes);
    status = idist__collective_run(IDIST__BROADCAST, label, NULL, *recv, (size_t)head.nbytes,
                                   IDIST_U8, IDIST_SUM, root, opts);
    if (status != IDIST_OK) return idist__collective_alloc_end(status, recv);
    *recvcount = (size_t)head.count;
    if (recvdtype) *recvdtype = idist__collective_dtype(&head, opts);

    return IDIST_OK;
}

idist_status idist_all_gather_alloc(const void *send, size_t count, idist_dtype dtype, void **recv,
                                    size_t *recvcounts, const idist_opts *opts) {
    const char *name = "all_gather_alloc";
    int i, n = idist_group_size(opts ? opts->group : NULL);
    size_t total = 0, own = count, size = idist_dtype_size(dtype);
    idist__collective_head unused;
    idist__call call;
    idist_status status;

    if (recv) *recv = NULL;
    if (!recv || !recvcounts)
        return idist__fail(IDIST_ERR_ARG, "%s: recv or recvcounts is NULL", name);
    status = idist__check_blocking(name, opts);
    if (status == IDIST_OK)
        status =
            idist__collective_head_of(IDIST__ALL_GATHER_ALLOC, send, count, dtype, opts, &unused);
    if (status != IDIST_OK) return status;

    status = idist__collective_run(IDIST__ALL_GATHER, IDIST__ALL_GATHER_ALLOC, &own, recvcounts,
                                   sizeof own, IDIST_U8, IDIST_SUM, -1, opts);
    if (status != IDIST_OK) return status;
    for (i = 0; i < n; i++) total += recvcounts[i];
    status = idist__collective_alloc(name, (uint64_t)total * size, opts, recv);
    if (status != IDIST_OK) return status;

    idist__call_init(&call, IDIST__ALL_GATHERV, send, *recv, count, dtype);
    call.label = IDIST__ALL_GATHER_ALLOC;
    call.recvcounts = recvcounts;
    call.check = idist__hash(recvcounts, sizeof *recvcounts * (size_t)n);

    return idist__collective_alloc_end(idist__call_run(&call, opts), recv);
}
