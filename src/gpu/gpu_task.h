// gpu/gpu_task.h: calls on device memory, and the parts that the host's backend gets
#pragma once

#include "os/clock.h"
#include "base/reduce_op.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/world.h"
#include "core/task.h"
#include "core/call.h"
#include "gpu/gpu_model.h"
#include "gpu/gpu_device.h"
#include "gpu/pinned.h"

static void idist__gpu_task_set_waiting(idist__task *t, bool waits) {
    idist__gpu *gpu = idist__gpu_of(t->group->w);
    idist__gpu_op *op = idist__gpu_op_of(t);

    if (op->waits_for_device == waits) return;
    op->waits_for_device = waits;
    gpu->waiting_call_count += waits ? 1 : -1;
    if (waits) gpu->sleep_ns = IDIST__GPU_SLEEP_NS;
    if (waits) gpu->spin_until_ns = idist__os_clock_now_ns() + IDIST__GPU_SPIN_NS;
    if (waits && t->group->w->wait.driver != IDIST__DRIVER_NONE)
        gpu->host_backend->wake(t->group->w); // a driver that sleeps must poll the device now
}

// Returns true if the event that a call waits for has completed. After a CUDA error, fails the
// group and returns false; the task must not be used any more.
static bool idist__gpu_task_event_done(idist__task *t, cudaEvent_t event) {
    idist__gpu_op *op = idist__gpu_op_of(t);

    if (op->error == cudaSuccess) op->error = cudaEventQuery(event);

    if (op->error == cudaSuccess) {
        idist__gpu_of(t->group->w)->sleep_ns = IDIST__GPU_SLEEP_NS;
        return true;
    }

    if (op->error != cudaErrorNotReady) {
        idist__gpu_device_fail_group(t->group, idist__gpu_device_fail("the device", op->error));
        return false;
    }

    op->error = cudaSuccess;
    cudaGetLastError();

    return false;
}

// Gives a part of a call to the host's backend. The first part of a collective call carries the
// fingerprint that the ranks compare. The part may be complete on return.
static void idist__gpu_task_start_part(idist__task *t, const idist__call *part) {
    idist__gpu *gpu = idist__gpu_of(t->group->w);
    idist__gpu_op *op = idist__gpu_op_of(t);

    t->call = *part;
    t->call.label = op->call.label;
    t->state = IDIST__TASK_ON_HOST;
    t->late.announced = false;
    t->group->w->wait.timers_due_ns = 0; // timers check the task again
    op->with_backend = true;
    idist__gpu_task_set_waiting(t, false);

    if (!idist__kind_is_p2p(part->kind)) {
        t->seq = ++t->group->seq;

        if (!t->whole.kind) {
            t->whole = op->fingerprint;
            t->whole.seq = t->seq;
        }
    }

    memset(t->impl, 0, gpu->host_backend->task_nbytes); // to the backend this is a new task
    gpu->host_backend->start(t);
}

// Starts a part that moves no data, in which the ranks meet and compare fingerprints.
static void idist__gpu_task_start_barrier(idist__task *t) {
    idist__call part;
    idist__call_init(&part, IDIST__BARRIER, NULL, NULL, 0, IDIST_U8);
    idist__gpu_task_start_part(t, &part);
}

// The number of parts of `count` elements in each buffer of a call.
typedef struct idist__gpu_shape {
    size_t send, recv;   // on this rank; 0 if there is no such buffer
    size_t most;         // largest number on any rank
    size_t contribution; // largest number that other ranks read from a rank
} idist__gpu_shape;

static idist__gpu_shape idist__gpu_task_shape_of(const idist_group *g, const idist__call *call) {
    size_t n = (size_t)g->size;
    bool root = call->root == g->rank;
    idist__gpu_shape shape;

    shape.send = shape.recv = shape.most = shape.contribution = 1;

    switch (call->kind) {
    case IDIST__REDUCE: shape.recv = root; break;
    case IDIST__BROADCAST: shape.send = 0; break;
    case IDIST__ALL_GATHER: shape.recv = shape.most = n; break;
    case IDIST__GATHER:
        shape.recv = root ? n : 0;
        shape.most = n;
        break;
    case IDIST__SCATTER:
        shape.send = root ? n : 0;
        shape.most = shape.contribution = n;
        break;
    case IDIST__REDUCE_SCATTER: shape.send = shape.most = shape.contribution = n; break;
    case IDIST__ALL_TO_ALL: shape.send = shape.recv = shape.most = shape.contribution = n; break;
    case IDIST__BARRIER: shape.send = shape.recv = 0; break;
    default: break;
    }

    return shape;
}

// Copies k elements of each of `parts` parts. Parts are to_count elements apart in `to`, and
// from_count elements apart in `from`.
static cudaError_t idist__gpu_task_copy(void *to, size_t to_count, const void *from,
                                        size_t from_count, size_t k, size_t parts, size_t size,
                                        cudaStream_t stream) {
    cudaError_t error = cudaSuccess;
    size_t i;

    for (i = 0; i < parts && k && to != from && error == cudaSuccess; i++)
        error = cudaMemcpyAsync((char *)to + i * to_count * size,
                                (const char *)from + i * from_count * size, k * size,
                                cudaMemcpyDefault, stream);
    return error;
}

static void idist__gpu_task_dequeue(idist__task *t) {
    idist__gpu_group *gg = idist__gpu_group_of(t->group);
    idist__task **at;

    for (at = &gg->queue; *at; at = &idist__gpu_op_of(*at)->next_queued) {
        if (*at != t) continue;
        if ((*at = idist__gpu_op_of(t)->next_queued) == NULL) gg->queue_end = at;
        idist__gpu_of(t->group->w)->queue_changed = true;
        return;
    }
}

static void idist__gpu_task_release(idist__task *t) {
    idist__gpu_op *op = idist__gpu_op_of(t);
    int i;

    idist__gpu_task_set_waiting(t, false);
    idist__gpu_task_dequeue(t);
    // The copies are done, or the device runs them before the copies of the next call.
    for (i = 0; i < IDIST__GPU_SLOTS; i++)
        idist__pinned_give(idist__gpu_of(t->group->w), &op->slots[i].memory);
}

static void idist__gpu_task_complete(idist__task *t) {
    idist__gpu_op_of(t)->state = IDIST__GPU_END;
    idist__task_complete(t, IDIST_OK, "");
}

static bool idist__gpu_task_op_is_premul(const idist_group *g, const idist__call *call) {
    return idist__reduce_op_is_user(call->op) && !idist__world_user_op(g, call)->fn;
}
