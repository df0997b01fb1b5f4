// gpu/nccl/nccl_issue.h: the NCCL functions that serve a call
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

// Returns the ncclDataType_t of a dtype, or -1 if NCCL has none.
static int idist__nccl_issue_type(idist_dtype dtype) {
    switch ((int)dtype) {
    case IDIST_I8: return IDIST__NCCL_I8;
    case IDIST_U8: return IDIST__NCCL_U8;
    case IDIST_I32: return IDIST__NCCL_I32;
    case IDIST_U32: return IDIST__NCCL_U32;
    case IDIST_I64: return IDIST__NCCL_I64;
    case IDIST_U64: return IDIST__NCCL_U64;
    case IDIST_F16: return IDIST__NCCL_F16;
    case IDIST_BF16: return IDIST__NCCL_BF16;
    case IDIST_F32: return IDIST__NCCL_F32;
    case IDIST_F64: return IDIST__NCCL_F64;
    case IDIST_F8E4M3: return IDIST__NCCL_F8E4M3;
    case IDIST_F8E5M2: return IDIST__NCCL_F8E5M2;
    default: return -1;
    }
}

// Returns the ncclRedOp_t of an op that NCCL supports.
static int idist__nccl_issue_op(idist_op op) {
    switch ((int)op) {
    case IDIST_PROD: return IDIST__NCCL_PROD;
    case IDIST_MIN: return IDIST__NCCL_MIN;
    case IDIST_MAX: return IDIST__NCCL_MAX;
    case IDIST_AVG: return IDIST__NCCL_AVG;
    default: return IDIST__NCCL_SUM;
    }
}

// Returns true if NCCL supports the call. All ranks get the same answer. NCCL has no tags and
// matches messages by order alone, so messages are supported only on a stream. A message that a
// probe has matched (IDIST__MRECV) was not sent through NCCL.
static bool idist__nccl_issue_supports(const idist_group *g, const idist__call *call,
                                       const void *stream) {
    if (idist__kind_is_p2p(call->kind)) return stream != NULL && call->label != IDIST__MRECV;
    if (call->kind == IDIST__SCAN || call->kind == IDIST__EXSCAN) return false;
    if (!idist__kind_reduces(call->kind)) return true;
    if ((call->dtype == IDIST_F8E4M3 || call->dtype == IDIST_F8E5M2) &&
        !idist__gpu_of(g->w)->nccl_reduces_f8)
        return false;
    return idist__nccl_issue_type(call->dtype) >= 0 &&
           (idist__reduce_op_is_arithmetic(call->op) || idist__gpu_task_op_is_premul(g, call));
}

// Returns true if NCCL reports no error. In an NCCL group, a call with a non-blocking communicator
// may return IDIST__NCCL_IN_PROGRESS, which is not an error.
static bool idist__nccl_issue_is_ok(int result) {
    return result == IDIST__NCCL_OK || result == IDIST__NCCL_IN_PROGRESS;
}

// Returns the result of an NCCL group: the first error, or otherwise IDIST__NCCL_IN_PROGRESS if
// NCCL is still working on the group.
static int idist__nccl_issue_merge_results(int calls, int end) {
    if (!idist__nccl_issue_is_ok(calls)) return calls;
    return end == IDIST__NCCL_OK ? calls : end;
}

// Performs a reduce_scatterv as one reduction to each rank.
static int idist__nccl_issue_reduce_scatterv(const idist__nccl *nccl, const idist_group *g,
                                             const idist__call *call, int type, int op, void *comm,
                                             cudaStream_t stream) {
    size_t size = idist_dtype_size(call->dtype);
    int result = nccl->GroupStart(), end;
    int i;

    for (i = 0; i < g->size && idist__nccl_issue_is_ok(result); i++) {
        const char *block = (const char *)call->send + idist__extent_block_at(call, i) * size;
        if (call->sendcounts[i])
            result =
                nccl->Reduce(block, call->recv, call->sendcounts[i], type, op, i, comm, stream);
    }

    end = nccl->GroupEnd();

    return idist__nccl_issue_merge_results(result, end);
}

static int idist__nccl_issue_reduce(const idist__nccl *nccl, const idist_group *g,
                                    const idist__call *call, void *comm, cudaStream_t stream) {
    int type = idist__nccl_issue_type(call->dtype);
    bool premul = idist__gpu_task_op_is_premul(g, call);
    int op = premul ? IDIST__NCCL_SUM : idist__nccl_issue_op(call->op);
    int result = IDIST__NCCL_OK;
    double factor = premul ? idist__world_user_op(g, call)->factor : 1;
    float narrow = (float)factor;
    void *scalar = call->dtype == IDIST_F64 ? (void *)&factor : &narrow;

    if (idist__dtype_is_narrow(call->dtype))
        idist__small_float_narrow(&narrow, &narrow, 1, call->dtype); // into its first bytes
    if (premul) result = nccl->RedOpCreatePreMulSum(&op, scalar, type, 1, comm);
    if (result != IDIST__NCCL_OK) return result;
    if (call->kind == IDIST__ALL_REDUCE)
        result = nccl->AllReduce(call->send, call->recv, call->count, type, op, comm, stream);
    else if (call->kind == IDIST__REDUCE)
        result =
            nccl->Reduce(call->send, call->recv, call->count, type, op, call->root, comm, stream);
    else if (call->kind == IDIST__REDUCE_SCATTERV)
        result = idist__nccl_issue_reduce_scatterv(nccl, g, call, type, op, comm, stream);
    else result = nccl->ReduceScatter(call->send, call->recv, call->count, type, op, comm, stream);
    if (premul) nccl->RedOpDestroy(op, comm);

    return result;
}

// Exchanges data between all pairs of ranks, as sends and receives of bytes. Each rank copies its
// own part.
static int idist__nccl_issue_exchange(const idist__nccl *nccl, const idist_group *g,
                                      const idist__call *call, const void *send, void *comm,
                                      cudaStream_t stream) {
    size_t size = idist_dtype_size(call->dtype), sent, got;
    int result = nccl->GroupStart(), end;
    int i, me = g->rank;

    for (i = 0; i < g->size && idist__nccl_issue_is_ok(result); i++) {
        const char *from = idist__extent_part(call, (char *)(uintptr_t)send, me, i, true, &sent);
        char *to = idist__extent_part(call, (char *)call->recv, i, me, false, &got);
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

// Allocates memory for NCCL in stream order. The caller frees the memory with cudaFreeAsync.
static cudaError_t idist__nccl_issue_alloc(const idist__gpu *gpu, void **p, size_t nbytes,
                                           cudaStream_t stream) {
    return gpu->pool ? cudaMallocFromPoolAsync(p, nbytes, gpu->pool, stream)
                     : cudaMallocAsync(p, nbytes, stream);
}

// Performs an in-place all_to_all or all_to_allv by sending a copy of the buffer. Stores the copy's
// address in *away; the caller frees the copy in stream order.
static int idist__nccl_issue_all_to_all_in_place(const idist__nccl *nccl, const idist_group *g,
                                                 const idist__call *call, void *comm,
                                                 cudaStream_t stream, void **away) {
    const idist__gpu *gpu = idist__gpu_of(g->w);
    size_t count = (size_t)g->size * call->count, nbytes;

    if (call->kind == IDIST__ALL_TO_ALLV)
        count = idist__extent_end(call->sendcounts, call->senddispls, g->size);
    nbytes = count * idist_dtype_size(call->dtype);
    if (!nbytes) return IDIST__NCCL_OK;
    if (idist__nccl_issue_alloc(gpu, away, nbytes, stream) != cudaSuccess ||
        cudaMemcpyAsync(*away, call->send, nbytes, cudaMemcpyDefault, stream) != cudaSuccess)
        return IDIST__NCCL_CUDA_ERROR;
    return idist__nccl_issue_exchange(nccl, g, call, *away, comm, stream);
}

static int idist__nccl_issue_all_gatherv(const idist__nccl *nccl, const idist_group *g,
                                         const idist__call *call, void *comm, cudaStream_t stream) {
    size_t size = idist_dtype_size(call->dtype);
    int result = nccl->GroupStart(), end;
    int i;

    for (i = 0; i < g->size && idist__nccl_issue_is_ok(result); i++) {
        char *to =
            (char *)call->recv + idist__extent_displ(call->recvcounts, call->recvdispls, i) * size;
        if (call->recvcounts[i])
            result = nccl->Broadcast(i == g->rank ? call->send : to, to, call->recvcounts[i] * size,
                                     IDIST__NCCL_U8, i, comm, stream);
    }

    end = nccl->GroupEnd();

    return idist__nccl_issue_merge_results(result, end);
}

static int idist__nccl_issue_call(const idist__gpu *gpu, const idist_group *g, idist__gpu_op *op,
                                  cudaStream_t stream) {
    const idist__nccl *nccl = gpu->nccl;
    const idist__call *call = &op->call;
    void *comm = op->comm;
    size_t nbytes = call->count * idist_dtype_size(call->dtype);

    if (!comm) return IDIST__NCCL_OK; // the group has failed
    if (call->kind == IDIST__BARRIER)
        return nccl->AllReduce(gpu->barrier_word, gpu->barrier_word, 1, IDIST__NCCL_I32,
                               IDIST__NCCL_MAX, comm, stream);
    if (call->kind == IDIST__ALL_GATHERV)
        return idist__nccl_issue_all_gatherv(nccl, g, call, comm, stream);
    if (call->kind == IDIST__REDUCE_SCATTERV)
        return idist__nccl_issue_reduce(nccl, g, call, comm, stream);
    if ((call->kind == IDIST__ALL_TO_ALL || call->kind == IDIST__ALL_TO_ALLV) &&
        call->send == call->recv)
        return idist__nccl_issue_all_to_all_in_place(nccl, g, call, comm, stream, &op->send_copy);
    if (idist__kind_is_v(call->kind) || call->kind == IDIST__ALL_TO_ALL ||
        call->kind == IDIST__GATHER || call->kind == IDIST__SCATTER)
        return idist__nccl_issue_exchange(nccl, g, call, call->send, comm, stream);
    if (!nbytes) return IDIST__NCCL_OK;
    if (call->kind == IDIST__BROADCAST)
        return nccl->Broadcast(call->recv, call->recv, nbytes, IDIST__NCCL_U8, call->root, comm,
                               stream);
    if (call->kind == IDIST__ALL_GATHER)
        return nccl->AllGather(call->send, call->recv, nbytes, IDIST__NCCL_U8, comm, stream);
    if (call->kind == IDIST__SEND)
        return nccl->Send(call->send, nbytes, IDIST__NCCL_U8, call->root, comm, stream);
    if (call->kind == IDIST__RECV)
        return nccl->Recv(call->recv, nbytes, IDIST__NCCL_U8, call->root, comm, stream);

    return idist__nccl_issue_reduce(nccl, g, call, comm, stream);
}
