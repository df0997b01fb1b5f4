// gpu/route/gpu_engine.h: the backend functions of a world with a device
//
// A world with a device has a backend that consists of these functions. The functions pass calls on
// host memory to the host's backend.
//
// A group gives calls, and parts of calls, to the host's backend in the program's order, so that
// all ranks number them alike. A call whose next part is not ready holds up all later calls, even
// calls on host memory.
#pragma once

#include "os/clock.h"
#include "os/thread.h"
#include "base/fail.h"
#include "base/text.h"
#include "base/mem.h"
#include "base/log.h"
#include "base/reduce_op.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/world.h"
#include "core/fingerprint.h"
#include "core/task.h"
#include "core/together.h"
#include "core/group.h"
#include "core/wait.h"
#include "core/call.h"
#include "core/matching.h"
#include "gpu/gpu_model.h"
#include "gpu/gpu_device.h"
#include "gpu/pinned.h"
#include "gpu/gpu_task.h"
#include "gpu/gpu_leave.h"
#include "gpu/stage.h"
#include "gpu/ipc/ipc_leave.h"
#include "gpu/ipc/ipc_call.h"
#include "gpu/nccl/nccl_job.h"
#include "gpu/nccl/nccl_abort.h"
#include "gpu/nccl/nccl_launch.h"
#include "gpu/route/gpu_setup.h"
#include "gpu/route/gpu_route.h"

// Passes to the host's backend a call on host memory that had to wait for earlier calls.
static void idist__gpu_engine_host_part(idist__task *t) {
    idist__gpu_op *op = idist__gpu_op_of(t);

    if (op->user.used) t->call.u.user = &op->user;
    t->state = IDIST__TASK_ON_HOST;
    if (!idist__kind_is_p2p(t->call.kind)) t->seq = ++t->group->seq;
    idist__gpu_of(t->group->w)->host_backend->start(t);
}

// Gives to the host's backend the parts that are ready.
static void idist__gpu_engine_run_queue(idist_group *g) {
    idist__gpu *gpu = idist__gpu_of(g->w);
    idist__gpu_group *gg = idist__gpu_group_of(g);
    idist__task *t;
    bool moved = true;

    while (moved && (t = gg->queue) != NULL) {
        idist__gpu_path path = idist__gpu_op_of(t)->path;
        idist__gpu_guard guard;

        if (path == IDIST__BY_IPC || path == IDIST__BY_STAGING) {
            guard = idist__gpu_device_enter(gpu);
            moved = (path == IDIST__BY_IPC ? idist__ipc_call_step(t) : idist__stage_step(t)) ||
                    gg->queue != t;
            idist__gpu_device_leave(gpu, guard);
            continue;
        }

        idist__gpu_task_dequeue(t); // the call has only one part
        if (t->on_device) idist__nccl_launch_start_meeting(t);
        else idist__gpu_engine_host_part(t);
    }
}

// Handles a part of a call that the host's backend has finished. Returns true if the whole call is
// complete, and false if it continues. May be called from within any function of the host's
// backend.
static bool idist__gpu_engine_part_done(idist__task *t, idist_status status) {
    idist__gpu *gpu = idist__gpu_of(t->group->w);
    idist__gpu_op *op = idist__gpu_op_of(t);
    bool nccl = op->path == IDIST__BY_NCCL, over;
    idist__gpu_guard guard;

    op->with_backend = false;
    t->state = IDIST__TASK_ON_DEVICE;

    if (nccl && t->group->status == IDIST_OK && op->state != IDIST__GPU_END) {
        idist__nccl_launch_end_meeting(t, status);
        op->met = true;
        over = op->launched && idist__nccl_launch_set_complete(t);
    } else if (op->state == IDIST__GPU_END || status != IDIST_OK) {
        over = true;
    } else {
        guard = idist__gpu_device_enter(gpu);
        over = op->path == IDIST__BY_STAGING && idist__stage_part_done(t);
        idist__gpu_device_leave(gpu, guard);
        if (!over) idist__gpu_task_set_waiting(t, true);
    }

    if (over) idist__gpu_task_release(t);

    return over;
}

static void idist__gpu_engine_op_free(idist__task *t) {
    idist__gpu_op *op = (idist__gpu_op *)t->device;
    int i;

    if (!op) return;
    if (op->event) cudaEventDestroy(op->event);

    for (i = 0; i < IDIST__GPU_SLOTS; i++) {
        if (op->slots[i].out) cudaEventDestroy(op->slots[i].out);
        if (op->slots[i].in) cudaEventDestroy(op->slots[i].in);
    }

    idist__mem_free(&t->group->w->cfg.mem, op->counts_memory);
    idist__mem_free(&t->group->w->cfg.mem, op);
    t->device = NULL;
}

static bool idist__gpu_engine_op_make(idist__task *t) {
    idist__gpu *gpu = idist__gpu_of(t->group->w);
    const idist_allocator *mem = &t->group->w->cfg.mem;
    idist__gpu_op *op = (idist__gpu_op *)t->device;
    idist__gpu_guard guard;
    cudaError_t error;
    int i;

    if (op) return true;

    op = (idist__gpu_op *)idist__mem_alloc(mem, sizeof *op);

    if (!op) {
        idist__group_fail_memory(t->group);
        return false;
    }

    t->device = op; // freed with the world
    guard = idist__gpu_device_enter(gpu);
    error = cudaEventCreateWithFlags(&op->event, cudaEventDisableTiming);

    for (i = 0; i < IDIST__GPU_SLOTS && error == cudaSuccess; i++) {
        error = cudaEventCreateWithFlags(&op->slots[i].out, cudaEventDisableTiming);
        if (error == cudaSuccess)
            error = cudaEventCreateWithFlags(&op->slots[i].in, cudaEventDisableTiming);
    }

    idist__gpu_device_leave(gpu, guard);
    if (error == cudaSuccess) return true;
    idist__gpu_engine_op_free(t);
    idist__gpu_device_fail_group(t->group, idist__gpu_device_fail("cudaEventCreate", error));

    return false;
}

static void idist__gpu_engine_enqueue(idist__task *t) {
    idist__gpu_group *gg = idist__gpu_group_of(t->group);
    *gg->queue_end = t;
    gg->queue_end = &idist__gpu_op_of(t)->next_queued;
}

// Gives a call to NCCL: now, or at idist_group_end with the other calls that are held back.
static void idist__gpu_engine_start_nccl(idist__task *t) {
    idist__world *w = t->group->w;
    idist__gpu_op *op = idist__gpu_op_of(t);
    idist__task **last = &idist__gpu_of(w)->held_calls;

    if (!idist__nccl_launch_save_counts(t)) return;
    t->pin = IDIST__PIN_PINNED; // until the call is launched
    t->group->detached_count++;
    idist__gpu_engine_enqueue(t);
    idist__gpu_engine_run_queue(t->group);

    if (!idist__together_now.depth) {
        idist__nccl_launch_call(t);
        return;
    }

    op->holding_thread = &idist__me;
    while (*last) last = &idist__gpu_op_of(*last)->next_held;
    *last = t;
    if (!idist__together_now.held_world) w->tasks.deferred_count++;
    idist__together_now.held_world = w;
}

// Releases the lock until idist__gpu_engine_relock is called, for a CUDA call that enqueues work on
// one of the program's streams. The CUDA call blocks if the stream's queue is full, perhaps behind
// an NCCL kernel that waits for a lost rank. The thread that aborts the kernel needs the lock.
static idist__gpu_guard idist__gpu_engine_unlock(idist__world *w) {
    idist__gpu *gpu = idist__gpu_of(w);
    idist__gpu_guard guard = idist__gpu_device_enter(gpu);

    gpu->user_count++; // closing the world waits for us
    idist__os_mutex_unlock(&w->lock);

    return guard;
}

static void idist__gpu_engine_relock(idist__world *w, idist__gpu_guard guard) {
    idist__gpu *gpu = idist__gpu_of(w);

    idist__gpu_device_leave(gpu, guard);
    idist__world_lock(w);
    gpu->user_count--;
}

// Records the point in the program's stream after which the call begins. Returns false if the call
// was canceled meanwhile. Releases the lock, because the stream's queue may be full.
static bool idist__gpu_engine_record_begin(idist__task *t) {
    idist__world *w = t->group->w;
    idist__gpu_op *op = idist__gpu_op_of(t);
    cudaStream_t stream = t->stream ? (cudaStream_t)t->stream : cudaStreamLegacy;
    idist__gpu_guard guard = idist__gpu_engine_unlock(w);
    cudaError_t error = cudaEventRecord(op->event, stream);

    idist__gpu_engine_relock(w, guard);
    if (t->state != IDIST__TASK_DONE) op->error = error;

    return t->state != IDIST__TASK_DONE;
}

// Undoes what the core did when it numbered and started a task. The task gets its number when the
// host's backend starts it.
static void idist__gpu_engine_unstart(idist__task *t) {
    t->state = IDIST__TASK_ON_DEVICE;
    if (t->seq) t->group->seq--;
    t->seq = 0;
    memset(t->impl, 0, idist__gpu_of(t->group->w)->host_backend->task_nbytes);
}

// Fills in the device backend's data for a call.
static void idist__gpu_engine_op_fill(idist__task *t) {
    idist_group *g = t->group;
    idist__gpu_op *op = idist__gpu_op_of(t);

    op->path = idist__gpu_route_path_of(g, &t->call, idist__task_is_async(t) ? NULL : t->stream);
    op->fingerprint = idist__fingerprint_of_call(g->w, &t->call, 0);
    op->fingerprint.algorithm = IDIST__ON_DEVICE;
}

// Copies the user op of a call, because the program may free the op while the call waits.
static void idist__gpu_engine_keep_user_op(idist__task *t) {
    idist__gpu_op *op = idist__gpu_op_of(t);

    if (t->call.u.user || !idist__kind_reduces(t->call.kind) ||
        !idist__reduce_op_is_user(t->call.op))
        return;
    op->user = *idist__world_user_op(t->group, &t->call);
    op->call.u.user = &op->user;
}

// Starts a call that moves its data in chunks, through CUDA IPC or pinned memory.
static void idist__gpu_engine_start_chunks(idist__task *t) {
    idist__gpu_op *op = idist__gpu_op_of(t);
    idist__gpu_shape shape = idist__gpu_task_shape_of(t->group, &op->call);

    if (op->path == IDIST__BY_IPC)
        idist__stage_plan_chunks(t, IDIST__IPC_CHUNK, shape.contribution);
    else idist__stage_plan_chunks(t, IDIST__GPU_CHUNK, shape.most);
    if (!idist__gpu_engine_record_begin(t)) return;
    idist__gpu_engine_enqueue(t);
    idist__gpu_engine_run_queue(t->group);
}

// Starts a task. If the task is on host memory and the group's queue is empty, passes the task
// directly to the host's backend.
static void idist__gpu_engine_start(idist__task *t) {
    idist__gpu_group *gg = idist__gpu_group_of(t->group);
    bool on_device = t->on_device;
    idist__gpu_op *op;

    if (!on_device && (!gg || !gg->queue)) {
        idist__gpu_of(t->group->w)->host_backend->start(t);
        return;
    }

    t->on_device = false; // until there is something to undo on the device
    idist__gpu_engine_unstart(t);
    if (!idist__gpu_engine_op_make(t)) return;
    op = idist__gpu_op_of(t);
    memset(op, 0, offsetof(idist__gpu_op, event));
    op->call = t->call;
    op->size = idist_dtype_size(t->call.dtype);
    idist__gpu_engine_keep_user_op(t);
    t->on_device = on_device;

    if (!on_device) { // the host's backend gets the call after all earlier calls
        idist__gpu_engine_enqueue(t);
        return;
    }

    idist__gpu_engine_op_fill(t);

    if (op->path != IDIST__BY_NCCL) {
        idist__gpu_engine_start_chunks(t);
        return;
    }

    if (t->call.info)
        idist__matching_describe(&t->call, t->call.root, t->call.tag, t->call.dtype, t->call.count);
    idist__gpu_engine_start_nccl(t);
}

// Sends or receives a message without a task. Returns false if a call waits in the group's queue,
// for the device or for pinned memory, because the message would overtake that call.
static bool idist__gpu_engine_quick_message(idist_group *g, const idist__call *call) {
    const idist__gpu_group *gg = idist__gpu_group_of(g);

    if (gg && gg->queue) return false;
    return idist__gpu_of(g->w)->host_backend->quick_message(g, call);
}

// Launches the calls that this thread's idist_group_begin has held back.
static void idist__gpu_engine_launch_held(idist__world *w) {
    idist__task **at = &idist__gpu_of(w)->held_calls, *first = NULL, **last = &first, *t;

    if (idist__together_now.held_world == w) w->tasks.deferred_count--;
    idist__together_now.held_world = NULL;

    while ((t = *at) != NULL) {
        idist__gpu_op *op = idist__gpu_op_of(t);

        if (op->holding_thread != &idist__me) {
            at = &op->next_held;
            continue;
        }

        *at = op->next_held;
        op->next_held = NULL;
        *last = t;
        last = &op->next_held;
    }

    if (first) idist__nccl_launch_call(first);
}

// Makes a stream wait for a call that is complete except for its event (t->followed), and detaches
// the task. Releases the lock, because the stream's queue may be full. The event may complete
// meanwhile.
static idist_status idist__gpu_engine_follow(idist__task *t, void *stream) {
    idist__world *w = t->group->w;
    idist_status status = IDIST_OK;
    idist__gpu_guard guard = idist__gpu_engine_unlock(w);
    cudaError_t error = cudaStreamWaitEvent((cudaStream_t)stream, idist__gpu_op_of(t)->event, 0);

    idist__gpu_engine_relock(w, guard);
    if (t->state == IDIST__TASK_DONE) status = idist__wait_result(t);
    else idist__task_detach(t);

    return error == cudaSuccess ? status : idist__gpu_device_fail("wait_stream", error);
}

static void idist__gpu_engine_fail_mismatch(idist__task *t) {
    char text[400] = "a send and its receive differ in size, or only one of them is on a stream";
    if (idist__gpu_op_of(t)->meeting_status == IDIST_ERR_MISMATCH)
        idist__nccl_launch_check_counts(t, text, sizeof text);
    idist__group_fail(t->group, idist__gpu_op_of(t)->meeting_status, text);
}

// Completes each call that waits only for an event of the device, if the event is complete.
static void idist__gpu_engine_complete_calls(idist__world *w) {
    idist__task *t, *next;

    for (t = w->tasks.running; t; t = next) {
        const idist__gpu_op *op = t->on_device ? idist__gpu_op_of(t) : NULL;
        uint32_t ended = w->wait.ended_count;
        next = t->next;

        if (op && op->waits_for_device && op->state == IDIST__GPU_END) {
            if (op->meeting_status) idist__gpu_engine_fail_mismatch(t);
            else if (op->path == IDIST__BY_NCCL && idist__gpu_group_of(t->group)->fault) continue;
            else if (idist__gpu_task_event_done(t, op->event)) idist__gpu_task_complete(t);
        }

        if (w->wait.ended_count != ended)
            next = w->tasks.running; // a task is gone, perhaps the next task
    }
}

static void idist__gpu_engine_progress(idist__world *w) {
    idist__gpu *gpu = idist__gpu_of(w);
    idist__gpu_guard guard;
    idist_group *g;
    int64_t now;

    gpu->host_backend->progress(w);

    if (gpu->waiting_call_count || gpu->queue_changed) {
        gpu->queue_changed = false;
        guard = idist__gpu_device_enter(gpu);
        for (g = &w->group; g; g = g->next)
            if (g->device && idist__gpu_group_of(g)->queue) idist__gpu_engine_run_queue(g);
        idist__gpu_engine_complete_calls(w);
        idist__gpu_device_leave(gpu, guard);
    }

    if (!w->progress.watched ||
        (now = idist__os_clock_now_ns()) < gpu->checked_nccl_ns + IDIST__GPU_SLEEP_LONG_NS)
        return;
    gpu->checked_nccl_ns = now;

    for (g = &w->group; g; g = g->next) {
        idist__nccl_abort_check_errors(g);
        if (g->status != IDIST_OK) idist__nccl_abort_group(g);
    }
}

static void idist__gpu_engine_sleep(idist__world *w, int64_t until_ns) {
    idist__gpu *gpu = idist__gpu_of(w);
    int64_t now = idist__os_clock_now_ns(), soon = now + gpu->sleep_ns;

    // Polls at first, because sleeping and waking up take longer than most small calls take on the
    // device. With fewer cores than ranks, spin_ns is 0: another rank needs the core.
    if (gpu->waiting_call_count && w->wait.spin_ns && now < gpu->spin_until_ns) {
        idist__world_give_way(w);
        return;
    }

    if (gpu->waiting_call_count && soon < until_ns) {
        until_ns = soon;
        if (gpu->sleep_ns < IDIST__GPU_SLEEP_LONG_NS) gpu->sleep_ns += gpu->sleep_ns / 4;
    }

    gpu->host_backend->sleep(w, until_ns);
}

// Waits until the copies of a call no longer use the caller's buffers. The copies wait for no other
// rank, but the device may never run them. If the copies do not end, the call's pinned memory is
// never used again.
static void idist__gpu_engine_end_copies(idist__task *t) {
    idist__gpu *gpu = idist__gpu_of(t->group->w);
    idist__gpu_group *gg = idist__gpu_group_of(t->group);
    int64_t deadline = idist__os_clock_deadline(IDIST__GPU_ABORT_MS);
    int i, turns = 0;

    for (i = IDIST__STREAM_OUT; i <= IDIST__STREAM_IN; i++)
        while (!gg->stuck && cudaStreamQuery(gg->stream[i]) == cudaErrorNotReady) {
            cudaGetLastError();
            gg->stuck = idist__os_clock_now_ns() > deadline;
            idist__gpu_device_nap(&turns);
        }

    if (!gg->stuck) return;
    gpu->stuck = true;
    for (i = 0; i < IDIST__GPU_SLOTS; i++)
        idist__pinned_abandon(gpu, &idist__gpu_op_of(t)->slots[i].memory);
}

static bool idist__gpu_engine_cancel(idist__task *t) {
    idist_group *g = t->group;
    idist__gpu *gpu = idist__gpu_of(g->w);
    idist__gpu_op *op = idist__gpu_op_of(t);
    idist__gpu_guard guard;
    bool done = true;

    if (!t->on_device) {
        if (t->state != IDIST__TASK_ON_DEVICE) return gpu->host_backend->cancel(t);
        if (op) idist__gpu_task_dequeue(t);
        t->state = IDIST__TASK_ON_HOST;
        return true;
    }

    if (op->with_backend) done = gpu->host_backend->cancel(t);
    // It is too late to cancel a call that already involves other ranks, or that NCCL has received.
    // If the group has failed or the world ends, this does not matter.
    if (g->status == IDIST_OK && !g->w->progress.stops && (!done || op->path == IDIST__BY_NCCL))
        return false;
    op->with_backend = false;
    t->state = IDIST__TASK_ON_HOST;
    op->state = IDIST__GPU_END; // no more data is moved
    guard = idist__gpu_device_enter(gpu);

    if (op->path == IDIST__BY_NCCL) idist__nccl_abort_wait(g);
    else if (g->device) idist__gpu_engine_end_copies(t);

    cudaGetLastError();
    idist__gpu_device_leave(gpu, guard);
    idist__gpu_task_release(t);

    return done;
}

// Retracts a receive. A receive into host memory may still be queued behind calls on the device.
static bool idist__gpu_engine_retract(idist__task *t) {
    if (t->state == IDIST__TASK_ON_DEVICE) return idist__gpu_engine_cancel(t);
    return idist__gpu_of(t->group->w)->host_backend->retract(t);
}

static void idist__gpu_engine_tell(idist_group *g) {
    idist__gpu_of(g->w)->host_backend->tell(g);
    idist__nccl_abort_group(g);
}

static void idist__gpu_engine_announce(idist__task *t) {
    if (t->state != IDIST__TASK_ON_DEVICE) idist__gpu_of(t->group->w)->host_backend->announce(t);
}

static int idist__gpu_engine_missing(idist__task *t, char *text, size_t capacity) {
    const idist__world *w = t->group->w;

    if (t->state != IDIST__TASK_ON_DEVICE)
        return idist__gpu_of(w)->host_backend->missing(t, text, capacity);
    if (idist__gpu_op_of(t)->holding_thread && !idist__gpu_op_of(t)->launched)
        idist__text_append(text, capacity,
                           "rank %d on %s itself, which has not called idist_group_end",
                           w->group.rank, w->about.hostname);
    else if (idist__gpu_op_of(t)->path == IDIST__BY_NCCL)
        idist__text_append(
            text, capacity,
            "the device: earlier work on a stream of rank %d on %s itself, or of another rank",
            w->group.rank, w->about.hostname);
    else
        idist__text_append(text, capacity, "rank %d on %s itself, whose device has not finished",
                           w->group.rank, w->about.hostname);

    return 1;
}

// Finalizes a communicator in a thread of its own. NCCL finalizes a communicator only when all of
// its ranks ask for this, and does not say which rank waits for which.
static void idist__gpu_engine_finalize(idist_group *g) {
    idist__gpu *gpu = idist__gpu_of(g->w);
    idist__gpu_group *gg = idist__gpu_group_of(g);
    idist__nccl_job *job;

    if (!gg->comm || gg->adopted) return;
    job = idist__nccl_job_new(gpu->nccl, IDIST__JOB_FINALIZE, gpu->device, gg->comm);

    if (!idist__nccl_job_start(job)) {
        idist__log_print(&g->w->log, IDIST_LOG_WARN,
                         "cannot start a thread to end NCCL's communicator: it stays in memory");
        return;
    }

    job->next = gpu->ending_jobs;
    gpu->ending_jobs = job;
}

// Ends the calls of other threads, as idist_device_api requires. Such a call may wait for work on
// the device, of its own group or of another group.
static void idist__gpu_engine_end_calls(idist__world *w) {
    idist_group *g;

    if (w->life.leaves && idist__gpu_leave_lock(w)) {
        for (g = &w->group; g; g = g->next)
            if (g->device && !idist__gpu_group_of(g)->adopted) idist__nccl_abort_group(g);
        idist__os_mutex_unlock(&w->lock);
    }

    idist__gpu_leave_wait_unused(w);
}

static void idist__gpu_engine_group_close(idist_group *g) {
    idist__world *w = g->w;
    idist__gpu *gpu = idist__gpu_of(w);
    idist__gpu_group *gg = idist__gpu_group_of(g);
    idist__gpu_guard guard;

    if (gg) {
        guard = idist__gpu_device_enter(gpu);

        if (w->life.leaves && !w->life.abandoned && !gg->adopted)
            idist__nccl_abort_group(g); // a thread may have created comm meanwhile
        if (g->status != IDIST_OK || gg->must_abort) idist__nccl_abort_end(g);
        else if (!idist__nccl_abort_is_inside(gg)) idist__gpu_engine_finalize(g);
        idist__nccl_abort_reap(w, 0);
        if (!w->life.abandoned) idist__gpu_setup_group_free(g);
        idist__gpu_device_leave(gpu, guard);
    }

    gpu->host_backend->group_close(g);
}

// Frees the device backend's data for a world. If a thread is still inside a call
// (w->life.abandoned), everything that the thread may use stays in memory.
static void idist__gpu_engine_free(idist__world *w) {
    idist__gpu *gpu = idist__gpu_of(w);
    const idist_allocator *mem = &w->cfg.mem;
    idist__task *t;
    int device = gpu->host_backend ? idist__gpu_device_set(gpu) : -1; // -1 if not installed
    bool left = !w->life.abandoned;

    if (!idist__nccl_abort_reap(w, idist__os_clock_deadline(IDIST__GPU_ABORT_MS)))
        idist__log_print(&w->log, IDIST_LOG_WARN,
                         "ncclCommDestroy has not returned: another rank has not called it, or a "
                         "graph still holds calls");
    for (t = w->tasks.all; t && left; t = t->older) idist__gpu_engine_op_free(t);
    if (left) idist__pinned_end(w);
    idist__ipc_leave_free_all(w);

    cudaGetLastError();
    if (gpu->host_backend) w->backend = gpu->host_backend;
    if (idist__together_now.held_world == w) idist__together_now.held_world = NULL;
    if (device >= 0) idist__gpu_device_restore(gpu, device);
    if (!left) return;
    w->device = NULL;
    w->device_api = NULL;
    idist__mem_free(mem, gpu->nccl_config);
    idist__mem_free(mem, gpu->rank_infos);
    idist__mem_free(mem, gpu);
}

static void idist__gpu_engine_close(idist__world *w, bool clean) {
    idist__gpu_engine_free(w);
    w->backend->close(w, clean);
}

static void *idist__gpu_engine_comm_of(idist_group *g) {
    idist_status status = g->device ? IDIST_OK : idist__gpu_setup_group_make(g);
    void *comm;

    if (status == IDIST_OK) status = idist__gpu_setup_prepare(g);
    if (status != IDIST_OK) return NULL;
    comm = idist__gpu_group_of(g)->comm;
    if (!comm) idist__fail(IDIST_ERR_UNSUPPORTED, "nccl_comm: the group does not use NCCL");

    return comm;
}

void *idist_nccl_comm(idist_group *group) {
    idist_group *g = NULL;
    idist_status status;
    void *comm = NULL;

    status = idist__call_enter("nccl_comm", group, &g);
    if (status != IDIST_OK) return NULL;
    if (!g->w->device)
        idist__fail(IDIST_ERR_NO_DEVICE, "nccl_comm: the world has no device: %s",
                    g->w->about.no_device);
    else if (g->rank < 0)
        idist__fail(IDIST_ERR_STATE, "nccl_comm: this rank is not a member of the group");
    else if (g->status != IDIST_OK)
        idist__fail(g->status, "nccl_comm: the group failed earlier: %s", g->cause);
    else comm = idist__gpu_engine_comm_of(g);
    idist__os_mutex_unlock(&g->w->lock);

    return comm;
}
