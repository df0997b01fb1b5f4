// gpu/stage.h: calls that go through pinned memory, one chunk at a time
//
// Any call on device memory that no other path supports is staged. The host's backend gets each
// chunk as a call of its own, with pinned memory for its buffers. Meanwhile the next chunk leaves
// the device, and the previous chunk returns to the device:
//
//     out   0  1  2  3        If a buffer has n parts, a chunk is a piece of each part. A chunk of
//     host     0  1  2  3     any collective of k elements per rank is therefore a collective of
//     in          0  1  2  3  fewer elements per rank.
//
// Calls whose parts differ in size (v-forms, send and receive) consist of one chunk.
//
//     idist__stage_step  advances the head of the group's queue: copies chunks out while slots are
//                        free, and gives the next copied chunk to the host's backend
//     idist__stage_part_done  copies a chunk in when the host's backend has finished it
#pragma once

#include "core/kind.h"
#include "core/model.h"
#include "core/group.h"
#include "core/extent.h"
#include "gpu/gpu_model.h"
#include "gpu/pinned.h"
#include "gpu/gpu_task.h"

static bool idist__stage_is_unchunked(const idist__call *call) {
    return idist__kind_is_v(call->kind) || idist__kind_is_p2p(call->kind);
}

static void idist__stage_plan_chunks(idist__task *t, size_t nbytes, size_t parts) {
    idist__gpu_op *op = idist__gpu_op_of(t);
    const idist__call *call = &op->call;

    op->enqueued_count = op->started_count = 0;
    op->nchunks = 1;
    op->chunk_count = call->count;
    if (idist__stage_is_unchunked(call) || call->kind == IDIST__BARRIER) return;
    op->chunk_count = nbytes / parts / op->size;
    if (op->chunk_count > 1024) op->chunk_count &= ~(size_t)1023;
    if (!op->chunk_count) op->chunk_count = 1;
    if (op->chunk_count > call->count) op->chunk_count = call->count;
    if (op->chunk_count) op->nchunks = (call->count + op->chunk_count - 1) / op->chunk_count;
}

// Fills in the host's call for chunk `nth`. The call's buffers are in pinned memory. Except in an
// all_to_all, one buffer is inside the other, as in an in-place call. Returns false if there is no
// pinned memory yet (op->waits_for_memory), or no memory at all.
static bool idist__stage_slot(idist__task *t, size_t nth, idist__call *part) {
    idist_group *g = t->group;
    idist__gpu_op *op = idist__gpu_op_of(t);
    idist__gpu_slot *slot = &op->slots[nth % IDIST__GPU_SLOTS];
    size_t at = nth * op->chunk_count, nsend, nrecv, recv_at = 0;
    idist__extent e;

    *part = op->call;
    if (!idist__stage_is_unchunked(part))
        part->count = part->count - at < op->chunk_count ? part->count - at : op->chunk_count;
    if (part->kind == IDIST__RECV && !part->info) part->info = &op->info;
    if (op->user.used) part->u.user = &op->user;
    if (idist__extent_of(g, part, &e) != IDIST_OK) return false; // the call was checked before
    nsend = e.send * op->size;
    nrecv = e.recv * op->size;
    if (part->kind == IDIST__ALL_TO_ALL || part->kind == IDIST__ALL_TO_ALLV)
        recv_at = (nsend + 63) & ~(size_t)63;
    else if (e.send) recv_at = e.send_at * op->size;
    if (!slot->memory && (slot->memory = idist__pinned_take(g->w, nsend + nrecv + 64,
                                                            &op->waits_for_memory)) == NULL)
        return false;
    op->waits_for_memory = false;
    part->recv = (char *)slot->memory->data + recv_at;
    part->send = (char *)slot->memory->data + (e.recv ? e.recv_at * op->size : 0);
    if (!e.send) part->send = NULL;
    if (!e.recv) part->recv = NULL;

    return true;
}

// Returns true if a copy between the device and this memory may be enqueued. If the memory is not
// pinned, the copy blocks this thread until the stream reaches it, so the group's streams must be
// idle.
static bool idist__stage_may_copy(const idist__task *t, const idist__pinned *memory) {
    const idist__gpu_group *gg = idist__gpu_group_of(t->group);
    int i;

    for (i = IDIST__STREAM_OUT; i <= IDIST__STREAM_IN && !memory->is_pinned; i++) {
        if (cudaStreamQuery(gg->stream[i]) != cudaErrorNotReady) continue;
        cudaGetLastError();
        return false;
    }

    return true;
}

// Copies the next chunk from the device. Returns false if there is no pinned memory for the chunk
// (yet), or if the copy would block.
static bool idist__stage_out(idist__task *t) {
    idist_group *g = t->group;
    idist__gpu_group *gg = idist__gpu_group_of(g);
    idist__gpu_op *op = idist__gpu_op_of(t);
    const idist__call *call = &op->call;
    idist__gpu_slot *slot = &op->slots[op->enqueued_count % IDIST__GPU_SLOTS];
    size_t at = op->enqueued_count * op->chunk_count * op->size;
    cudaError_t error = cudaSuccess;
    idist__call part;
    idist__extent e;

    if (!idist__stage_slot(t, op->enqueued_count, &part)) {
        if (op->waits_for_memory) return false;
        idist__group_fail_self(g, IDIST_ERR_NO_MEMORY, "has no memory to stage a device buffer in");
        return false;
    }

    if (!idist__stage_may_copy(t, slot->memory)) return false;
    if (op->enqueued_count >= IDIST__GPU_SLOTS)
        error = cudaStreamWaitEvent(gg->stream[IDIST__STREAM_OUT], slot->in, 0);
    if (error == cudaSuccess && idist__stage_is_unchunked(call) && part.send &&
        idist__extent_of(g, &part, &e) == IDIST_OK)
        error = idist__gpu_task_copy((void *)(uintptr_t)part.send, 0, call->send, 0, e.send, 1,
                                     op->size, gg->stream[IDIST__STREAM_OUT]);
    else if (error == cudaSuccess && call->kind == IDIST__BROADCAST && call->root == g->rank)
        error = idist__gpu_task_copy(part.recv, 0, (char *)call->recv + at, 0, part.count, 1,
                                     op->size, gg->stream[IDIST__STREAM_OUT]);
    else if (error == cudaSuccess && !idist__stage_is_unchunked(call) && part.send)
        error = idist__gpu_task_copy((void *)(uintptr_t)part.send, part.count,
                                     (const char *)call->send + at, call->count, part.count,
                                     idist__gpu_task_shape_of(g, call).send, op->size,
                                     gg->stream[IDIST__STREAM_OUT]);
    if (op->error == cudaSuccess) op->error = error; // the first error is reported
    if (op->error == cudaSuccess)
        op->error = cudaEventRecord(slot->out, gg->stream[IDIST__STREAM_OUT]);
    op->enqueued_count++;

    return true;
}

// Copies to the device the data that a call of one chunk has received: the parts of a v-form, or a
// message.
static cudaError_t idist__stage_in_whole(idist__task *t, const idist__call *part,
                                         cudaStream_t stream) {
    const idist_group *g = t->group;
    idist__gpu_op *op = idist__gpu_op_of(t);
    const idist__call *call = &op->call;
    cudaError_t error = cudaSuccess;
    size_t count;
    int i;

    if (call->kind == IDIST__RECV || call->kind == IDIST__SCATTERV ||
        call->kind == IDIST__REDUCE_SCATTERV) {
        count = call->kind == IDIST__RECV ? part->info->count : call->count;
        return idist__gpu_task_copy(call->recv, 0, part->recv, 0, count, 1, op->size, stream);
    }

    for (i = 0; i < g->size && error == cudaSuccess; i++) {
        char *to = idist__extent_part(call, (char *)call->recv, i, g->rank, false, &count);
        error = idist__gpu_task_copy(to, 0, (char *)part->recv + (to - (char *)call->recv), 0,
                                     count, 1, op->size, stream);
    }

    return error;
}

// Copies to the device the chunk that the host's backend has just finished.
static cudaError_t idist__stage_in(idist__task *t) {
    idist_group *g = t->group;
    idist__gpu_group *gg = idist__gpu_group_of(g);
    idist__gpu_op *op = idist__gpu_op_of(t);
    const idist__call *call = &op->call;
    size_t nth = op->started_count - 1, at = nth * op->chunk_count * op->size;
    idist__gpu_slot *slot = &op->slots[nth % IDIST__GPU_SLOTS];
    bool keeps = (call->kind == IDIST__BROADCAST && call->root == g->rank) ||
                 (call->kind == IDIST__EXSCAN && g->rank == 0);
    cudaError_t error = cudaSuccess;
    idist__call part;

    if (!idist__stage_slot(t, nth, &part)) return cudaErrorMemoryAllocation;
    if (idist__stage_is_unchunked(call) && part.recv)
        error = idist__stage_in_whole(t, &part, gg->stream[IDIST__STREAM_IN]);
    else if (part.recv && !keeps)
        error = idist__gpu_task_copy((char *)call->recv + at, call->count, part.recv, part.count,
                                     part.count, idist__gpu_task_shape_of(g, call).recv, op->size,
                                     gg->stream[IDIST__STREAM_IN]);
    if (error == cudaSuccess) error = cudaEventRecord(slot->in, gg->stream[IDIST__STREAM_IN]);

    return error;
}

// Advances the call at the head of its group's queue by one step. Returns false if the call waits
// or has failed.
static bool idist__stage_step(idist__task *t) {
    idist__gpu_op *op = idist__gpu_op_of(t);
    const idist__gpu_slot *slot = &op->slots[op->started_count % IDIST__GPU_SLOTS];
    idist__call part;

    if (op->with_backend) return false;
    idist__gpu_task_set_waiting(t, true);

    if (op->state == IDIST__GPU_WAIT) {
        if (!idist__gpu_task_event_done(t, op->event)) return false;
        op->state = IDIST__GPU_MOVE;
    }

    while (op->enqueued_count < op->nchunks &&
           op->enqueued_count < op->started_count + IDIST__GPU_SLOTS && op->error == cudaSuccess)
        if (!idist__stage_out(t)) {
            if (t->group->status != IDIST_OK || op->enqueued_count == op->started_count)
                return false;
            break; // the chunks that are already out proceed
        }

    if (!idist__gpu_task_event_done(t, slot->out)) return false;
    // When the part is done, idist__stage_in copies to the device and must not block.
    if (!idist__stage_may_copy(t, slot->memory)) return false;
    idist__stage_slot(t, op->started_count++, &part);
    if (op->started_count == op->nchunks)
        idist__gpu_task_dequeue(t); // the next call in the queue may use the backend now
    idist__gpu_task_start_part(t, &part);

    return true;
}

// Handles a chunk that the host's backend has finished. Returns true if the call is complete. After
// the last chunk, the call completes when op->event does. The caller's stream therefore need not
// wait for the event. With idist_wait_stream, a stream waits for the event instead (t->followed).
static bool idist__stage_part_done(idist__task *t) {
    idist__gpu_op *op = idist__gpu_op_of(t);
    cudaError_t error = idist__stage_in(t);

    if (op->error == cudaSuccess) op->error = error;
    if (op->started_count < op->nchunks) return false;
    op->state = IDIST__GPU_END;
    if (op->error == cudaSuccess && !idist__gpu_task_shape_of(t->group, &op->call).recv)
        return true;
    if (op->error == cudaSuccess)
        op->error =
            cudaEventRecord(op->event, idist__gpu_group_of(t->group)->stream[IDIST__STREAM_IN]);
    t->followed = op->error == cudaSuccess;

    return false;
}
