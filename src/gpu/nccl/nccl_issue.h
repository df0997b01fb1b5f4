// gpu/nccl/nccl_issue.h: which of NCCL's functions serve a call
#pragma once

#include "base/dtype.h"
#include "base/reduce_op.h"
#include "base/small_float.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/world.h"
#include "core/extent.h"
#include "gpu/gpu_model.h"
#include "gpu/gpu_task.h"
#include "gpu/nccl/nccl_load.h"

static const char *idist__nccl_issue_text(const idist__nccl *nccl, int result, char *text,
                                          size_t capacity) {
    const char *last = result == IDIST__NCCL_OK ? NULL : nccl->GetLastError(NULL);
    snprintf(text, capacity, "%s%s%.160s", nccl->GetErrorString(result), last && *last ? ": " : "",
             last ? last : "");
    return text;
}

// ncclDataType_t of a dtype; -1: NCCL has none.
static int idist__nccl_issue_type(idist_dtype dtype) {
    static const signed char types[] = {0, 1, -1, -1, 2, 3, 4, 5, 6, 9, 7, 8, 10, 11};
    return (size_t)dtype < IDIST__COUNT_OF(types) ? types[dtype] : -1;
}

// Whether NCCL supports the call, which all ranks answer alike. Messages only on a stream: NCCL has
// no tags and matches by order alone. What a probe has matched did not come through NCCL.
static bool idist__nccl_issue_supports(const idist_group *g, const idist__call *c,
                                       const void *stream) {
    if (idist__kind_is_p2p(c->kind)) return stream != NULL && c->label != IDIST__MRECV;
    if (c->kind == IDIST__SCAN || c->kind == IDIST__EXSCAN) return false;
    if (!idist__kind_reduces(c->kind)) return true;
    if ((c->dtype == IDIST_F8E4M3 || c->dtype == IDIST_F8E5M2) &&
        !idist__gpu_of(g->w)->nccl_reduces_f8)
        return false;
    return idist__nccl_issue_type(c->dtype) >= 0 &&
           (idist__reduce_op_is_arithmetic(c->op) || idist__gpu_task_op_is_premul(g, c));
}

// With a non-blocking communicator, IN_PROGRESS is no error of a call in a group.
static bool idist__nccl_issue_is_ok(int result) {
    return result == IDIST__NCCL_OK || result == IDIST__NCCL_IN_PROGRESS;
}

// The result of a group: the first error, otherwise whether it is in progress.
static int idist__nccl_issue_merge_results(int calls, int end) {
    if (!idist__nccl_issue_is_ok(calls)) return calls;
    return end == IDIST__NCCL_OK ? calls : end;
}

// A reduction to each rank.
static int idist__nccl_issue_reduce_scatterv(const idist__nccl *nccl, const idist_group *g,
                                             const idist__call *c, int type, int op, void *comm,
                                             cudaStream_t stream) {
    size_t size = idist_dtype_size(c->dtype);
    int result = nccl->GroupStart(), end;
    int i;

    for (i = 0; i < g->size && idist__nccl_issue_is_ok(result); i++) {
        const char *block = (const char *)c->send + idist__extent_block_at(c, i) * size;
        if (c->sendcounts[i])
            result = nccl->Reduce(block, c->recv, c->sendcounts[i], type, op, i, comm, stream);
    }

    end = nccl->GroupEnd();

    return idist__nccl_issue_merge_results(result, end);
}

static int idist__nccl_issue_reduce(const idist__nccl *nccl, const idist_group *g,
                                    const idist__call *c, void *comm, cudaStream_t stream) {
    static const int ops[] = {IDIST__NCCL_SUM, IDIST__NCCL_PROD, IDIST__NCCL_MIN, IDIST__NCCL_MAX,
                              IDIST__NCCL_AVG};
    int type = idist__nccl_issue_type(c->dtype);
    bool premul = idist__gpu_task_op_is_premul(g, c);
    int op = premul ? IDIST__NCCL_SUM : ops[c->op];
    int result = IDIST__NCCL_OK;
    double factor = premul ? idist__world_user_op(g, c)->factor : 1;
    float narrow = (float)factor;
    void *scalar = c->dtype == IDIST_F64 ? (void *)&factor : &narrow;

    if (idist__dtype_is_narrow(c->dtype))
        idist__small_float_narrow(&narrow, &narrow, 1, c->dtype); // in place: its first bytes
    if (premul) result = nccl->RedOpCreatePreMulSum(&op, scalar, type, 1, comm);
    if (result != IDIST__NCCL_OK) return result;
    if (c->kind == IDIST__ALL_REDUCE)
        result = nccl->AllReduce(c->send, c->recv, c->count, type, op, comm, stream);
    else if (c->kind == IDIST__REDUCE)
        result = nccl->Reduce(c->send, c->recv, c->count, type, op, c->root, comm, stream);
    else if (c->kind == IDIST__REDUCE_SCATTERV)
        result = idist__nccl_issue_reduce_scatterv(nccl, g, c, type, op, comm, stream);
    else result = nccl->ReduceScatter(c->send, c->recv, c->count, type, op, comm, stream);
    if (premul) nccl->RedOpDestroy(op, comm);

    return result;
}

// Exchanges between all pairs of ranks, as sends and receives of bytes. A rank copies its own part.
static int idist__nccl_issue_exchange(const idist__nccl *nccl, const idist_group *g,
                                      const idist__call *c, const void *send, void *comm,
                                      cudaStream_t stream) {
    size_t size = idist_dtype_size(c->dtype), sent, got;
    int result = nccl->GroupStart(), end;
    int i, me = g->rank;

    for (i = 0; i < g->size && idist__nccl_issue_is_ok(result); i++) {
        const char *from = idist__extent_part(c, (char *)(uintptr_t)send, me, i, true, &sent);
        char *to = idist__extent_part(c, (char *)c->recv, i, me, false, &got);
        if (i == me && sent && from != to &&
            cudaMemcpyAsync(to, from, sent * size, cudaMemcpyDefault, stream) != cudaSuccess)
            result = IDIST__NCCL_CUDA_ERROR;
        if (i != me && sent)
            result = nccl->Send(from, sent * size, IDIST__NCCL_U8, i, comm, stream);
        if (i != me && got && idist__nccl_issue_is_ok(result))
            result = nccl->Recv(to, got * size, IDIST__NCCL_U8, i, comm, stream);
    }

    end = nccl->GroupEnd();

    return idist__nccl_issue_merge_results(result, end);
}

// Allocates memory for NCCL in the order of a stream; cudaFreeAsync frees it.
static cudaError_t idist__nccl_issue_alloc(const idist__gpu *gpu, void **p, size_t nbytes,
                                           cudaStream_t stream) {
    return gpu->pool ? cudaMallocFromPoolAsync(p, nbytes, gpu->pool, stream)
                     : cudaMallocAsync(p, nbytes, stream);
}

// An all_to_all or all_to_allv in place sends a copy of its buffer, which the caller frees in
// stream order.
static int idist__nccl_issue_all_to_all_in_place(const idist__nccl *nccl, const idist_group *g,
                                                 const idist__call *c, void *comm,
                                                 cudaStream_t stream, void **away) {
    const idist__gpu *gpu = idist__gpu_of(g->w);
    size_t count = (size_t)g->size * c->count, nbytes;

    if (c->kind == IDIST__ALL_TO_ALLV)
        count = idist__extent_end(c->sendcounts, c->senddispls, g->size);
    nbytes = count * idist_dtype_size(c->dtype);
    if (!nbytes) return IDIST__NCCL_OK;
    if (idist__nccl_issue_alloc(gpu, away, nbytes, stream) != cudaSuccess ||
        cudaMemcpyAsync(*away, c->send, nbytes, cudaMemcpyDefault, stream) != cudaSuccess)
        return IDIST__NCCL_CUDA_ERROR;
    return idist__nccl_issue_exchange(nccl, g, c, *away, comm, stream);
}

static int idist__nccl_issue_all_gatherv(const idist__nccl *nccl, const idist_group *g,
                                         const idist__call *c, void *comm, cudaStream_t stream) {
    size_t size = idist_dtype_size(c->dtype);
    int result = nccl->GroupStart(), end;
    int i;

    for (i = 0; i < g->size && idist__nccl_issue_is_ok(result); i++) {
        char *to = (char *)c->recv + idist__extent_displ(c->recvcounts, c->recvdispls, i) * size;
        if (c->recvcounts[i])
            result = nccl->Broadcast(i == g->rank ? c->send : to, to, c->recvcounts[i] * size,
                                     IDIST__NCCL_U8, i, comm, stream);
    }

    end = nccl->GroupEnd();

    return idist__nccl_issue_merge_results(result, end);
}

static int idist__nccl_issue_call(const idist__gpu *gpu, const idist_group *g, idist__gpu_op *op,
                                  cudaStream_t stream) {
    const idist__nccl *nccl = gpu->nccl;
    const idist__call *c = &op->call;
    void *comm = op->comm;
    size_t nbytes = c->count * idist_dtype_size(c->dtype);

    if (!comm) return IDIST__NCCL_OK; // the group has failed
    if (c->kind == IDIST__BARRIER)
        return nccl->AllReduce(gpu->barrier_word, gpu->barrier_word, 1, IDIST__NCCL_I32,
                               IDIST__NCCL_MAX, comm, stream);
    if (c->kind == IDIST__ALL_GATHERV)
        return idist__nccl_issue_all_gatherv(nccl, g, c, comm, stream);
    if (c->kind == IDIST__REDUCE_SCATTERV)
        return idist__nccl_issue_reduce(nccl, g, c, comm, stream);
    if ((c->kind == IDIST__ALL_TO_ALL || c->kind == IDIST__ALL_TO_ALLV) && c->send == c->recv)
        return idist__nccl_issue_all_to_all_in_place(nccl, g, c, comm, stream, &op->send_copy);
    if (idist__kind_is_v(c->kind) || c->kind == IDIST__ALL_TO_ALL || c->kind == IDIST__GATHER ||
        c->kind == IDIST__SCATTER)
        return idist__nccl_issue_exchange(nccl, g, c, c->send, comm, stream);
    if (!nbytes) return IDIST__NCCL_OK;
    if (c->kind == IDIST__BROADCAST)
        return nccl->Broadcast(c->recv, c->recv, nbytes, IDIST__NCCL_U8, c->root, comm, stream);
    if (c->kind == IDIST__ALL_GATHER)
        return nccl->AllGather(c->send, c->recv, nbytes, IDIST__NCCL_U8, comm, stream);
    if (c->kind == IDIST__SEND)
        return nccl->Send(c->send, nbytes, IDIST__NCCL_U8, c->root, comm, stream);
    if (c->kind == IDIST__RECV)
        return nccl->Recv(c->recv, nbytes, IDIST__NCCL_U8, c->root, comm, stream);

    return idist__nccl_issue_reduce(nccl, g, c, comm, stream);
}
