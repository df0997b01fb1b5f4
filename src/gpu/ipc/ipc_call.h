// gpu/ipc/ipc_call.h: calls of ranks that read each other's device memory
//
// On one host, idist uses CUDA IPC if NCCL cannot be used: because ranks share a GPU, or because
// NCCL is missing. IPC needs CUDA 12.8 or later. With an older CUDA, and wherever IPC does not
// work, the group is staged through host memory.
//
// The device backend "ipc" supports all collectives except barriers, prefix sums and v-forms. The
// backend reduces F16, BF16, F32 and F64 by SUM, PROD, MIN, MAX and AVG, and F32 and F64 also by
// premultiplied sums. All other calls are staged. Operands are combined in rank order, so the
// results have the same bits as a reduction in host memory that the ranks share.
//
// WHAT IT COSTS
//
// In each group that makes IPC calls, every rank allocates 64 MiB of device memory. When the group
// is closed, the memory is kept for the next group. Each call first copies its data into this
// memory.
//
// The kernels are compiled once per world, in the world's first IPC call. The first call of each
// group also reads the memory of every rank once. If the driver is too old for the kernels, the
// group is staged, with a warning. The group is also staged, with a warning, if the machine
// corrupts the data that one GPU reads from another. An IOMMU or PCIe ACS may cause such errors:
// boot with iommu=pt, or disable ACS.
//
// The ranks of a host can read each other's device memory, even if they share a GPU. Each rank has
// an arena that the other ranks map. A chunk of a call is first given and then taken:
//
//     give      own contribution -> own arena      (device)
//     take      others' arenas -> receive buffer   (device: a reduction kernel, or copies)
//
// In a large all_reduce, each rank takes and reduces only its own slice, and then collects the
// slices that other ranks reduced:
//
//     give      all but the own slice -> own arena
//     take      own slice, from the send buffer and from the others' arenas
//                   -> own arena and receive buffer
//     collect   the slices that the others have reduced -> receive buffer
//
// For each byte of the message, the device reads and writes 2 (n - 1) / n bytes in `give` and as
// many in `collect`, and 1 + 2 / n bytes in `take`. The sum is 5 - 2 / n bytes. Two bytes are
// unavoidable. To reach two, the ranks would have to map the program's own buffers. But mapped
// memory must not be freed, and idist cannot know when the program frees a buffer.
//
// The device's work for a call is divided into phases. A rank that has finished a phase meets the
// other ranks on the host, where the first meeting compares the ranks' calls. Data that is given in
// one phase can therefore be taken `depth` phases later:
//
//     phase      0      1      2      3      4      5      6         three chunks, depth 2
//     give       0      1      2
//     take                     0      1      2
//     collect                                0      1      2
//     met            0      1      2      3      4      5      6     the device runs the next phase
//
// Phase p begins when all ranks have met for phase p - depth. Chunk c is in slot c % 4 of the
// arena. In phase c + 4 a rank gives chunk c + 4 into the same slot. Before phase c + 4 begins, all
// ranks have finished phase c + 2, in which they took chunk c. A rank's own slice of the slot holds
// the result of the reduction. The other ranks collect this result in phase c + 4, and the rank
// overwrites it only in phase c + 6. A single chunk needs no pipeline: its depth is 1. The ranks
// also meet after the last phase, so that no rank reads an arena whose owner has finished the call.
//
// No kernel waits for another rank, so processes that share a GPU may take turns on the GPU.
//
//     idist__gpu_engine_start      the call gets its fingerprint and enters the group's queue
//     idist__ipc_call_step         enqueues the next phases; starts a meeting when a phase ends
//     idist__gpu_engine_part_done  the ranks have met; idist__ipc_call_step is called again
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

enum { IDIST__IPC_ELEMENT = 256 }; // largest element, in bytes

// Returns true if IPC supports a call. All ranks get the same answer.
static bool idist__ipc_call_supports(const idist_group *g, const idist__call *call) {
    if (idist__kind_is_p2p(call->kind) || idist__kind_is_v(call->kind)) return false;
    if (call->kind == IDIST__SCAN || call->kind == IDIST__EXSCAN || call->kind == IDIST__BARRIER)
        return false;
    if (idist_dtype_size(call->dtype) > IDIST__IPC_ELEMENT) return false; // a chunk must hold many
    if (!idist__kind_reduces(call->kind)) return true;
    if (!idist__dtype_is_float(call->dtype) || idist_dtype_size(call->dtype) < 2) return false;
    if (idist__gpu_task_op_is_premul(g, call))
        return !idist__dtype_is_narrow(call->dtype); // a 16-bit float would be rounded twice

    return idist__reduce_op_is_arithmetic(call->op);
}

static bool idist__ipc_call_is_large(const idist__task *t) {
    const idist__gpu_op *op = idist__gpu_op_of(t);
    if (op->call.kind != IDIST__ALL_REDUCE || t->group->size == 1) return false;
    return op->call.count * op->size > IDIST__IPC_SMALL;
}

// Returns the index of the first element of the slice of `rank` in a chunk of k elements. Slices
// consist of whole cache lines and are at the same place in all chunks of a call. So a rank can
// give the other slices of a new chunk while the other ranks collect its own slice of the slot's
// previous chunk.
static size_t idist__ipc_call_slice_begin(const idist__task *t, size_t k, int rank) {
    const idist__gpu_op *op = idist__gpu_op_of(t);
    size_t line = 128 / op->size, n = (size_t)t->group->size;
    size_t at = ((op->chunk_count + n - 1) / n + line - 1) / line * line * (size_t)rank;
    return at < k ? at : k;
}

// Multiplies this rank's contribution to a premultiplied sum by the rank's own factor. Does nothing
// for other calls.
static cudaError_t idist__ipc_call_premultiply(const idist__task *t, void *data, size_t count) {
    const idist_group *g = t->group;
    const idist__call *call = &idist__gpu_op_of(t)->call;

    if (!idist__kind_reduces(call->kind) || !idist__gpu_task_op_is_premul(g, call))
        return cudaSuccess;
    return idist__ipc_kernel_scale(idist__gpu_of(g->w), data, count, call->dtype,
                                   idist__world_user_op(g, call)->factor,
                                   idist__gpu_group_of(g)->stream[IDIST__STREAM_OUT]);
}

// Gives the elements from `begin` up to `end` of a large all_reduce: copies them from the send
// buffer to the same place in the arena.
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

// Reduces this rank's slice of a large all_reduce into the rank's arena and receive buffer. If one
// of the program's buffers is not aligned to 16 bytes, a separate copy is faster than a kernel that
// accesses unaligned data.
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

// Reads this rank's part of a chunk from the arenas of all ranks, and reduces or copies the part to
// the receive buffer.
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

// Collects the slices of a large all_reduce that the other ranks have reduced.
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

// Enqueues one step of the next phase, if there is a chunk for the step.
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

// Performs one step of the call at the head of its group's queue. op->enqueued_count is the number
// of phases that are enqueued. For op->started_count of these phases, the ranks have met or are
// about to meet. Returns false if the call waits or has failed.
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
