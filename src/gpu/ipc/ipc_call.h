// gpu/ipc/ipc_call.h: calls of ranks that read each other's device memory
//
// idist uses CUDA IPC by itself
// where NCCL does not go: for ranks of one host that share a GPU. It takes CUDA 12.8 or later;
// with an older one, and wherever IPC does not work, the group is staged through host memory.
//
// The device backend "ipc" supports all collectives except barriers, prefix sums and v-forms; of
// reductions, SUM, PROD, MIN, MAX and AVG of F16, BF16, F32 and F64, and premultiplied sums of F32
// and F64. The rest is staged. The operands are combined in the order of the ranks, so the results
// have the same bits as those of host memory that the ranks share.
//
// WHAT IT COSTS
//
// 64 MiB of device memory for each rank of each group that makes such calls, kept for the next
// group. Each call first copies its data into that memory.
//
// The kernels are compiled once per world, in its first such call. The first call of each group
// also reads the memory of every rank once. If the driver is too old for them, or the machine
// corrupts what one GPU reads from another (an IOMMU, or PCIe ACS; boot with iommu=pt, or disable
// ACS), the group is staged, with a warning.
//
// All ranks of a host that share a GPU can read each other's device memory. Each rank has an arena
// that the others map. A chunk of a call is given, and then taken:
//
//     give      own contribution -> own arena      (device)
//     take      others' arenas -> receive buffer   (device: a reduction kernel, or copies)
//
// A large all_reduce is taken in two steps. First each rank takes the slice that it reduces for
// all:
//
//     give      all but the own slice -> own arena
//     take      own slice from the send buffer, the others' from their arenas
//                   -> own arena and receive buffer
//     collect   the slices that the others have reduced -> receive buffer
//
// For each byte of the message the device then reads and writes 2 (n - 1) / n, 1 + 2 / n and
// 2 (n - 1) / n bytes: 5 - 2 / n in all, of which 2 are unavoidable. Reaching 2 would take mapping
// the program's own buffers. But mapped memory must not be freed, and nobody tells idist when the
// program frees its own.
//
// The device's work for a call is cut into phases. A rank that has finished a phase meets the
// others (on the host, where the first meeting compares the call), so that what is given in one
// phase can be taken `depth` phases later:
//
//     phase      0      1      2      3      4      5      6         three chunks, depth 2
//     give       0      1      2
//     take                     0      1      2
//     collect                                0      1      2
//     met            0      1      2      3      4      5      6     the device has the next one
//
// Phase p begins when all ranks have met for phase p - depth. Chunk c is in slot c % 4 of the
// arena. A rank that gives chunk c + 4 there, in phase c + 4, knows that all ranks have finished at
// least phase c + 2, in which they took chunk c. A rank's own slice of the slot holds what it has
// reduced; that was collected in phase c + 4, before the rank reduces there again in phase c + 6. A
// single chunk needs no pipeline: its depth is 1. After the last phase the ranks meet as well, so
// that nobody reads an arena whose owner has finished the call.
//
// No kernel waits for another rank, so processes that share a GPU may take turns on it.
//
//     idist__gpu_engine_start      the call gets its fingerprint and enters the group's queue
//     idist__ipc_call_step         enqueues the next phases; starts a meeting when one has finished
//     idist__gpu_engine_part_done  the ranks have met; then the next idist__ipc_call_step
#pragma once

#include "base/dtype.h"
#include "base/reduce_op.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/world.h"
#include "gpu/gpu_model.h"
#include "gpu/gpu_task.h"
#include "gpu/ipc/ptx.h"
#include "gpu/ipc/ipc_kernel.h"

enum { IDIST__IPC_ELEMENT = 256 }; // bytes

// Whether IPC supports a call; the same on all ranks.
static bool idist__ipc_call_supports(const idist_group *g, const idist__call *call) {
    if (idist__kind_is_p2p(call->kind) || idist__kind_is_v(call->kind)) return false;
    if (call->kind == IDIST__SCAN || call->kind == IDIST__EXSCAN || call->kind == IDIST__BARRIER)
        return false;
    if (idist_dtype_size(call->dtype) > IDIST__IPC_ELEMENT) return false; // an arena holds many
    if (!idist__kind_reduces(call->kind)) return true;
    if (!idist__dtype_is_float(call->dtype) || idist_dtype_size(call->dtype) < 2) return false;
    if (idist__gpu_task_op_is_premul(g, call))
        return !idist__dtype_is_narrow(call->dtype); // 16 bits would be rounded twice

    return idist__reduce_op_is_arithmetic(call->op);
}

static bool idist__ipc_call_is_large(const idist__task *t) {
    const idist__gpu_op *op = idist__gpu_op_of(t);
    if (op->call.kind != IDIST__ALL_REDUCE || t->group->size == 1) return false;
    return op->call.count * op->size > IDIST__IPC_SMALL;
}

// Where the slice begins that a rank reduces in a chunk of k elements. Slices are whole cache
// lines, and at the same place in all chunks of a call: a slice is given while that of the slot's
// previous chunk is collected.
static size_t idist__ipc_call_slice_begin(const idist__task *t, size_t k, int rank) {
    const idist__gpu_op *op = idist__gpu_op_of(t);
    size_t line = 128 / op->size, n = (size_t)t->group->size;
    size_t at = ((op->chunk_count + n - 1) / n + line - 1) / line * line * (size_t)rank;
    return at < k ? at : k;
}

// The first step of a premultiplied sum: each rank has a factor of its own.
static cudaError_t idist__ipc_call_premultiply(const idist__task *t, void *data, size_t count) {
    const idist_group *g = t->group;
    const idist__call *call = &idist__gpu_op_of(t)->call;

    if (!idist__kind_reduces(call->kind) || !idist__gpu_task_op_is_premul(g, call))
        return cudaSuccess;
    return idist__ipc_kernel_scale(idist__gpu_of(g->w), data, count, call->dtype,
                                   idist__world_user_op(g, call)->factor,
                                   idist__gpu_group_of(g)->stream[IDIST__STREAM_OUT]);
}

// Gives a part of a large all_reduce: from the send buffer to the same place in the arena.
static cudaError_t idist__ipc_call_give_part(const idist__task *t, char *arena, const char *send,
                                             size_t begin, size_t end) {
    size_t size = idist__gpu_op_of(t)->size, count = end - begin;
    cudaStream_t stream = idist__gpu_group_of(t->group)->stream[IDIST__STREAM_OUT];
    char *to = arena + begin * size;
    cudaError_t error;

    if (!count) return cudaSuccess;
    error = idist__gpu_task_copy(to, 0, send + begin * size, 0, count, 1, size, stream);
    return error == cudaSuccess ? idist__ipc_call_premultiply(t, to, count) : error;
}

// Gives this rank's contribution to the chunk of k elements that begins at element `at`.
static cudaError_t idist__ipc_call_give(const idist__task *t, char *arena, size_t at, size_t k) {
    const idist_group *g = t->group;
    const idist__gpu_op *op = idist__gpu_op_of(t);
    const idist__call *call = &op->call;
    idist__gpu_shape shape = idist__gpu_task_shape_of(g, call);
    const void *buffer = call->kind == IDIST__BROADCAST ? call->recv : call->send;
    const char *from = (const char *)buffer + at * op->size;
    cudaStream_t stream = idist__gpu_group_of(g)->stream[IDIST__STREAM_OUT];
    cudaError_t error;

    if (idist__ipc_call_is_large(t)) {
        error = idist__ipc_call_give_part(t, arena, from, 0,
                                          idist__ipc_call_slice_begin(t, k, g->rank));
        if (error != cudaSuccess) return error;
        return idist__ipc_call_give_part(t, arena, from,
                                         idist__ipc_call_slice_begin(t, k, g->rank + 1), k);
    }

    if (call->kind == IDIST__BROADCAST) shape.send = call->root == g->rank;
    error = idist__gpu_task_copy(arena, k, from, call->count, k, shape.send, op->size, stream);

    return error == cudaSuccess ? idist__ipc_call_premultiply(t, arena, k * shape.send) : error;
}

// Takes this rank's slice of a large all_reduce, to its arena and its receive buffer. If the
// program's buffers are not aligned to 16 bytes, copying them first is faster.
static cudaError_t idist__ipc_call_take_slice(const idist__task *t, char *const *arena, size_t at,
                                              size_t k) {
    const idist_group *g = t->group;
    const idist__gpu_op *op = idist__gpu_op_of(t);
    const idist__call *call = &op->call;
    size_t begin = idist__ipc_call_slice_begin(t, k, g->rank);
    size_t count = idist__ipc_call_slice_begin(t, k, g->rank + 1) - begin;
    size_t offset = begin * op->size;
    const char *send = (const char *)call->send + at * op->size;
    char *out = arena[g->rank] + offset, *to = (char *)call->recv + at * op->size + offset;
    bool premul = idist__gpu_task_op_is_premul(g, call),
         aligned = (uintptr_t)to % IDIST__PTX_NBYTES == 0;
    cudaError_t error = cudaSuccess;
    idist__ptx_args args;

    memset(&args, 0, sizeof args);
    args.out = out;
    args.also = aligned ? to : NULL;
    args.count = count;
    if (premul || (uintptr_t)(send + offset) % IDIST__PTX_NBYTES)
        error = idist__ipc_call_give_part(t, arena[g->rank], send, begin, begin + count);
    else args.in[g->rank] = send + offset;

    if (error == cudaSuccess) error = idist__ipc_kernel_reduce(t, arena, offset, &args);
    if (error != cudaSuccess || aligned) return error;

    return idist__gpu_task_copy(to, 0, out, 0, count, 1, op->size,
                                idist__gpu_group_of(g)->stream[IDIST__STREAM_OUT]);
}

// Takes what this rank receives from the arenas of all ranks.
static cudaError_t idist__ipc_call_take(const idist__task *t, char *const *arena, size_t at,
                                        size_t k) {
    const idist_group *g = t->group;
    const idist__gpu_op *op = idist__gpu_op_of(t);
    const idist__call *call = &op->call;
    cudaStream_t stream = idist__gpu_group_of(g)->stream[IDIST__STREAM_OUT];
    char *to = (char *)call->recv + at * op->size;
    size_t row = (size_t)g->rank * k * op->size;
    bool root = call->root == g->rank;
    cudaError_t error = cudaSuccess;
    idist__ptx_args args;
    int i;

    if (idist__ipc_call_is_large(t)) return idist__ipc_call_take_slice(t, arena, at, k);
    memset(&args, 0, sizeof args);
    args.out = to;
    args.count = k;

    switch (call->kind) {
    case IDIST__ALL_REDUCE: return idist__ipc_kernel_reduce(t, arena, 0, &args);
    case IDIST__REDUCE: return root ? idist__ipc_kernel_reduce(t, arena, 0, &args) : cudaSuccess;
    case IDIST__REDUCE_SCATTER: return idist__ipc_kernel_reduce(t, arena, row, &args);
    case IDIST__BROADCAST:
        return root ? cudaSuccess
                    : idist__gpu_task_copy(to, k, arena[call->root], k, k, 1, op->size, stream);
    case IDIST__SCATTER:
        return idist__gpu_task_copy(to, k, arena[call->root] + row, k, k, 1, op->size, stream);
    case IDIST__GATHER:
        if (!root) return cudaSuccess;
        break;
    default: break;
    }

    if (call->kind != IDIST__ALL_TO_ALL) row = 0;
    for (i = 0; i < g->size && error == cudaSuccess; i++) // gather, all_gather, all_to_all
        error = idist__gpu_task_copy(to + (size_t)i * call->count * op->size, k, arena[i] + row, k,
                                     k, 1, op->size, stream);

    return error;
}

// Collects the slices of a large all_reduce that the others have reduced.
static cudaError_t idist__ipc_call_collect(const idist__task *t, char *const *arena, size_t at,
                                           size_t k) {
    const idist__gpu_op *op = idist__gpu_op_of(t);
    char *to = (char *)op->call.recv + at * op->size;
    cudaStream_t stream = idist__gpu_group_of(t->group)->stream[IDIST__STREAM_OUT];
    cudaError_t error = cudaSuccess;
    int i;

    for (i = 0; i < t->group->size && error == cudaSuccess; i++) {
        size_t offset = idist__ipc_call_slice_begin(t, k, i) * op->size;
        size_t count =
            idist__ipc_call_slice_begin(t, k, i + 1) - idist__ipc_call_slice_begin(t, k, i);
        const char *from = arena[i] + offset;
        if (i == t->group->rank) continue;
        error = idist__gpu_task_copy(to + offset, 0, from, 0, count, 1, op->size, stream);
    }

    return error;
}

typedef enum idist__ipc_phase_step {
    IDIST__IPC_GIVE,
    IDIST__IPC_TAKE,
    IDIST__IPC_COLLECT
} idist__ipc_phase_step;

static size_t idist__ipc_call_depth(const idist__gpu_op *op) { return op->nchunks > 1 ? 2 : 1; }

// Enqueues one step of the next phase, if there is a chunk for it.
static cudaError_t idist__ipc_call_enqueue_step(const idist__task *t, idist__ipc_phase_step step) {
    const idist__gpu_group *gg = idist__gpu_group_of(t->group);
    const idist__gpu_op *op = idist__gpu_op_of(t);
    size_t behind = (size_t)step * idist__ipc_call_depth(op), nth = op->enqueued_count - behind;
    size_t at = nth * op->chunk_count, k, slot;
    char *arena[IDIST__IPC_RANKS];
    int i;

    if (op->enqueued_count < behind || nth >= op->nchunks) return cudaSuccess;
    if (idist__gpu_of(t->group->w)->closed) return cudaErrorNotPermitted;

    k = op->call.count - at < op->chunk_count ? op->call.count - at : op->chunk_count;
    slot = nth % IDIST__IPC_SLOTS * IDIST__IPC_CHUNK;
    for (i = 0; i < t->group->size; i++) arena[i] = gg->arena[i] + slot;
    if (step == IDIST__IPC_GIVE) return idist__ipc_call_give(t, arena[t->group->rank], at, k);
    if (step == IDIST__IPC_TAKE) return idist__ipc_call_take(t, arena, at, k);

    return idist__ipc_call_collect(t, arena, at, k);
}

// One step of the call at the head of its group's queue. enqueued_count phases are enqueued; for
// started_count of them the ranks have met, or are about to. False: it waits, or has failed.
static bool idist__ipc_call_step(idist__task *t) {
    idist__gpu_op *op = idist__gpu_op_of(t);
    size_t depth = idist__ipc_call_depth(op), lag = idist__ipc_call_is_large(t) ? 2 : 1;
    size_t nphases = op->nchunks + lag * depth, ahead;
    int step, last_step = idist__ipc_call_is_large(t) ? IDIST__IPC_COLLECT : IDIST__IPC_TAKE;
    cudaStream_t stream = idist__gpu_group_of(t->group)->stream[IDIST__STREAM_OUT];

    if (op->with_backend) return false;
    idist__gpu_task_set_waiting(t, true);

    if (op->state == IDIST__GPU_WAIT) {
        if (!idist__gpu_task_event_done(t, op->event)) return false;
        op->state = IDIST__GPU_MOVE;
    }

    ahead = op->started_count + depth < nphases ? op->started_count + depth : nphases;

    for (; op->enqueued_count < ahead && op->error == cudaSuccess; op->enqueued_count++) {
        for (step = IDIST__IPC_GIVE; step <= last_step && op->error == cudaSuccess; step++)
            op->error = idist__ipc_call_enqueue_step(t, (idist__ipc_phase_step)step);
        if (op->error == cudaSuccess)
            op->error = cudaEventRecord(op->slots[op->enqueued_count % 2].out, stream);
    }

    if (op->started_count == nphases) {
        idist__gpu_task_complete(t);
        return true;
    }

    if (!idist__gpu_task_event_done(t, op->slots[op->started_count % 2].out)) return false;
    op->started_count++;
    idist__gpu_task_start_barrier(t);

    return true;
}
