// gpu/nccl/nccl_launch.h: calls that NCCL serves
//
// NCCL gets a call at once, on the caller's stream or on the group's own stream. At the same time
// the ranks meet through the host's backend. The host's backend detects calls that differ, late
// ranks and lost ranks, as it does for host memory. In these cases, NCCL alone would hang. When a
// group fails, its communicator is aborted, which ends the group's work on the device.
//
//     idist__gpu_engine_start           the call gets its fingerprint, and enters the group's queue
//     idist__nccl_launch_start_meeting  the host's backend sends the fingerprint, and any counts
//     idist__nccl_launch_call           NCCL gets the call: now, or at idist_group_end
//     idist__gpu_engine_part_done       the ranks have met
//     idist__gpu_engine_complete_calls  the event after the call is complete: completes the call
#pragma once

#include "os/thread.h"
#include "base/mem.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/world.h"
#include "core/explain.h"
#include "core/task.h"
#include "core/group.h"
#include "core/wait.h"
#include "core/extent.h"
#include "core/call.h"
#include "gpu/gpu_model.h"
#include "gpu/gpu_device.h"
#include "gpu/gpu_task.h"
#include "gpu/nccl/nccl_load.h"
#include "gpu/nccl/nccl_job.h"
#include "gpu/nccl/nccl_issue.h"
#include "gpu/nccl/nccl_abort.h"

// Returns the stream that a call is enqueued on.
static cudaStream_t idist__nccl_launch_stream(const idist__task *t) {
    return idist__task_on_stream(t) ? (cudaStream_t)t->stream
                                    : idist__gpu_group_of(t->group)->stream[IDIST__STREAM_NCCL];
}

// Returns true if a call was ended before NCCL received the call.
static bool idist__nccl_launch_is_ended(const idist__task *t) {
    return t->group->status != IDIST_OK || t->group->w->progress.stops;
}

// Returns true if it is the turn of these calls in all their groups. A thread with an earlier turn
// may be stuck inside an old version of NCCL. Calls that were ended therefore do not wait for their
// turn.
static bool idist__nccl_launch_can_launch(void *arg) {
    const idist__task *t;

    for (t = (const idist__task *)arg; t; t = idist__gpu_op_of(t)->next_held)
        if (idist__gpu_op_of(t)->ticket != idist__gpu_group_of(t->group)->turn &&
            !idist__nccl_launch_is_ended(t))
            return false;

    return true;
}

// Saves the counts of a call, because the caller's counts may be gone when the other ranks answer.
// In most v-forms, only the two ranks of a pair know how much one sends to the other. Stores what
// this rank sends to each rank and what it expects from each rank. Between the two arrays is space
// for the counts that the other ranks report. Returns false if memory cannot be allocated; the
// group has then failed.
static bool idist__nccl_launch_save_counts(idist__task *t) {
    const idist_group *g = t->group;
    idist__gpu_op *op = idist__gpu_op_of(t);
    int i, n = g->size;

    if (!idist__kind_is_by_pair(op->call.kind)) return true; // the fingerprint holds the counts
    if (!op->counts_memory)
        op->counts_memory =
            (uint64_t *)idist__mem_alloc(&g->w->cfg.mem,
                                         3 * sizeof *op->counts_memory * (size_t)g->w->group.size);

    if ((op->counts = op->counts_memory) == NULL) {
        idist__group_fail_memory(t->group);
        return false;
    }

    for (i = 0; i < n; i++) {
        op->counts[i] = idist__extent_pair(g, &op->call, i, true);
        op->counts[2 * n + i] = idist__extent_pair(g, &op->call, i, false);
    }

    return true;
}

// Starts the meeting on the host: with all ranks, or with the peer of a message.
static void idist__nccl_launch_start_meeting(idist__task *t) {
    idist__gpu_op *op = idist__gpu_op_of(t);
    const idist__call *call = &op->call;
    idist__call part;

    idist__call_init(&part, IDIST__BARRIER, NULL, NULL, 0, IDIST_U8);
    if (op->counts)
        idist__call_init(&part, IDIST__ALL_TO_ALL, op->counts, op->counts + t->group->size, 1,
                         IDIST_U64);

    if (idist__kind_is_p2p(call->kind)) {
        idist__call_init(&part, call->kind, &op->message_nbytes, &op->message_nbytes, 1, IDIST_U64);
        part.root = call->root;
        part.tag = call->tag;
        op->message_nbytes = call->kind == IDIST__SEND ? call->count * op->size : 0;
    }

    idist__gpu_task_start_part(t, &part);
}

// Compares the counts that pairs of ranks have exchanged in the meeting on the host. NCCL does not
// compare counts. Returns false and explains the difference in `text` if counts differ.
static bool idist__nccl_launch_check_counts(const idist__task *t, char *text, size_t capacity) {
    const idist_group *g = t->group;
    const idist__gpu_op *op = idist__gpu_op_of(t);
    int i;

    if (op->call.kind == IDIST__RECV && op->message_nbytes != op->call.count * op->size) {
        idist__explain_sizes("count", g->ranks[op->call.root], op->message_nbytes,
                             g->ranks[g->rank], op->call.count * op->size, t, text, capacity);
        return false;
    }

    for (i = 0; op->counts && i < g->size; i++) {
        const uint64_t *sent = op->counts + g->size, *expected = sent + g->size;
        if (sent[i] == expected[i]) continue;
        idist__explain_pair(g->ranks[i], sent[i], g->ranks[g->rank], expected[i], t, text,
                            capacity);
        return false;
    }

    return true;
}

// Stores in op->meeting_status that a message failed on the host, or that counts differ. The device
// would wait forever for such a call.
static void idist__nccl_launch_end_meeting(idist__task *t, idist_status status) {
    idist__gpu_op *op = idist__gpu_op_of(t);
    char text[300];
    if (status != IDIST_OK) op->meeting_status = status; // a message failed
    else if (!idist__nccl_launch_check_counts(t, text, sizeof text))
        op->meeting_status = IDIST_ERR_MISMATCH;
}

// Moves a call that all ranks have made, and that NCCL has accepted, to its final state. Returns
// true if there is nothing left to wait for.
static bool idist__nccl_launch_set_complete(idist__task *t) {
    idist__gpu_op *op = idist__gpu_op_of(t);
    op->state = IDIST__GPU_END;
    if (!idist__task_on_stream(t) || op->meeting_status) idist__gpu_task_set_waiting(t, true);
    return !op->waits_for_device;
}

// Records in the gates, where an abort looks, whether this thread is inside NCCL with the
// communicators of these calls.
static void idist__nccl_launch_set_inside(const idist__task *first, int inside) {
    const idist__task *t;

    for (t = first; t; t = idist__gpu_op_of(t)->next_held) {
        idist__nccl_gate *gate = idist__gpu_group_of(t->group)->gate;
        if (gate && idist__gpu_op_of(t)->comm)
            __atomic_store_n(&gate->inside, inside, __ATOMIC_SEQ_CST);
    }
}

// Waits until non-blocking communicators have begun these calls. Called without the lock; takes the
// lock for each check. Another thread may abort the communicators meanwhile, for example to close
// the world.
static int idist__nccl_launch_wait_begun(const idist__task *first) {
    idist__world *w = first->group->w;
    const idist__nccl *nccl = idist__gpu_of(w)->nccl;
    int turns = 0, result = IDIST__NCCL_OK;
    const idist__task *t = first;

    while (t) {
        void *comm;

        idist__world_lock(w);
        comm = idist__gpu_group_of(t->group)->comm;
        if (!comm || w->progress.stops) result = IDIST__NCCL_INTERNAL_ERROR; // it was aborted
        else if (nccl->CommGetAsyncError(comm, &result) != IDIST__NCCL_OK)
            result = IDIST__NCCL_INTERNAL_ERROR;
        idist__os_mutex_unlock(&w->lock);

        if (result == IDIST__NCCL_IN_PROGRESS) idist__gpu_device_nap(&turns);
        else if (result == IDIST__NCCL_OK) t = idist__gpu_op_of(t)->next_held;
        else return result;
    }

    return result;
}

// Hands calls to NCCL, as one NCCL group if there are several calls. On the device, the calls run
// after the earlier work in the callers' streams. Runs without the lock, because NCCL may wait for
// other ranks here.
static int idist__nccl_launch_hand_over(idist__task *first, cudaError_t *error) {
    idist__world *w = first->group->w;
    idist__gpu *gpu = idist__gpu_of(w);
    bool several = idist__gpu_op_of(first)->next_held != NULL;
    int result = IDIST__NCCL_OK;
    idist__task *t;

    for (t = first; t && *error == cudaSuccess; t = idist__gpu_op_of(t)->next_held) {
        if (idist__task_on_stream(t)) continue;
        *error = cudaEventRecord(idist__gpu_op_of(t)->event,
                                 t->stream ? (cudaStream_t)t->stream : cudaStreamLegacy);
        if (*error == cudaSuccess)
            *error =
                cudaStreamWaitEvent(idist__nccl_launch_stream(t), idist__gpu_op_of(t)->event, 0);
    }

    if (several) result = gpu->nccl->GroupStart();
    for (t = first; t && *error == cudaSuccess && idist__nccl_issue_is_ok(result);
         t = idist__gpu_op_of(t)->next_held)
        result =
            idist__nccl_issue_merge_results(idist__nccl_issue_call(gpu, t->group,
                                                                   idist__gpu_op_of(t),
                                                                   idist__nccl_launch_stream(t)),
                                            result);
    if (several) result = idist__nccl_issue_merge_results(result, gpu->nccl->GroupEnd());
    idist__nccl_launch_set_inside(first, 0);
    if (result == IDIST__NCCL_IN_PROGRESS) result = idist__nccl_launch_wait_begun(first);

    for (t = first; t && *error == cudaSuccess; t = idist__gpu_op_of(t)->next_held) {
        idist__gpu_op *op = idist__gpu_op_of(t);
        if (op->send_copy) *error = cudaFreeAsync(op->send_copy, idist__nccl_launch_stream(t));
        if (idist__task_on_stream(t) || result != IDIST__NCCL_OK || *error != cudaSuccess) continue;
        *error = cudaEventRecord(op->event, idist__nccl_launch_stream(t));
    }

    return result;
}

// Fails the call's group if handing the call to NCCL failed. Aborts the communicator if the group
// failed meanwhile. If the world is being closed, the closing thread has ended the call, and aborts
// the communicator if necessary.
static void idist__nccl_launch_end(const idist__task *t, int result, cudaError_t error) {
    idist_group *g = t->group;

    if (g->w->progress.stops) return;
    if (g->status != IDIST_OK && idist__task_on_stream(t)) idist__nccl_abort_group(g);
    else if (g->status != IDIST_OK) idist__nccl_abort_wait(g);
    if (g->status == IDIST_OK && error != cudaSuccess)
        idist__gpu_device_fail_group(g, idist__gpu_device_fail("handing a call to NCCL", error));
    else if (result != IDIST__NCCL_OK) idist__nccl_abort_report_error(g, result);
}

// Assigns tickets to the calls of this thread. NCCL gets the calls of a group in ticket order. This
// thread's calls on the same group share a ticket. Tickets follow the numbers of the calls, because
// the lock has not been released since the calls were numbered. Calls that idist_group_begin holds
// back are in order, too: no other thread may use their groups before idist_group_end.
static void idist__nccl_launch_draw_tickets(idist__task *first) {
    idist__task *t;

    for (t = first; t; t = idist__gpu_op_of(t)->next_held)
        idist__gpu_op_of(t)->ticket = idist__gpu_group_of(t->group)->ticket_count;
    for (t = first; t; t = idist__gpu_op_of(t)->next_held)
        idist__gpu_group_of(t->group)->ticket_count = idist__gpu_op_of(t)->ticket + 1;
}

// Hands this thread's calls to NCCL when it is their turn. Their groups launch no other call
// meanwhile. Completes each call that all ranks have already made and that need not wait for the
// device. Releases the lock while it waits for its turn and while it is inside NCCL.
static void idist__nccl_launch_call(idist__task *first) {
    idist__world *w = first->group->w;
    idist__gpu *gpu = idist__gpu_of(w);
    bool alone = idist__task_on_stream(first) &&
                 !idist__gpu_op_of(first)->next_held; // NCCL handles stream captures itself
    int result, device = gpu->device;
    cudaError_t error = cudaSuccess;
    idist__task *t, *next;
    idist__gpu_guard guard;

    idist__nccl_launch_draw_tickets(first);
    idist__wait_until(w, idist__nccl_launch_can_launch, first);

    for (t = first; t; t = idist__gpu_op_of(t)->next_held)
        idist__gpu_op_of(t)->comm = // not freed while we are inside
            idist__nccl_launch_is_ended(t) ? NULL : idist__gpu_group_of(t->group)->comm;

    idist__nccl_launch_set_inside(first, 1);
    gpu->user_count++; // closing the world waits for us
    idist__os_mutex_unlock(&w->lock);
    if (alone) device = idist__gpu_device_set(gpu);
    else guard = idist__gpu_device_enter(gpu);
    result = idist__nccl_launch_hand_over(first, &error);
    if (alone) idist__gpu_device_restore(gpu, device);
    else idist__gpu_device_leave(gpu, guard);
    idist__world_lock(w);
    gpu->user_count--;

    for (t = first; t; t = next) {
        idist__gpu_op *op = idist__gpu_op_of(t);
        bool left;

        next = op->next_held;
        op->next_held = NULL;
        op->launched = true;
        t->followed = !idist__task_on_stream(t) && result == IDIST__NCCL_OK && error == cudaSuccess;
        idist__gpu_group_of(t->group)->turn = op->ticket + 1;
        idist__nccl_launch_end(t, result, error);
        if (op->met && t->state != IDIST__TASK_DONE && idist__nccl_launch_set_complete(t))
            idist__task_complete(t, IDIST_OK, "");
        left = t->pin == IDIST__PIN_LEFT;
        t->pin = IDIST__PIN_FREE;
        t->group->detached_count--;
        if (left) idist__task_free(t);
    }

    // Other threads may be waiting for their turn, and the driver may be one of them.
    if (w->wait.blocked_count) idist__os_cond_broadcast(&w->changed);
    idist__world_wake_driver(w);
}
