// gpu/gpu_leave.h: how closing a world waits for the threads that use the world
//
// The thread that closes a world calls idist__gpu_leave_wait_unused. A thread that has released the
// lock calls idist__gpu_leave_goes_on when it holds the lock again. If the world is being closed,
// the thread returns from its call.
#pragma once

#include "os/clock.h"
#include "os/thread.h"
#include "base/fail.h"
#include "core/model.h"
#include "gpu/gpu_model.h"
#include "gpu/gpu_device.h"
#include "gpu/gpu_agree.h"

// Returns `status`, or IDIST_ERR_STATE instead of IDIST_OK if another thread is closing the world
// and waits for this thread to leave. Called when this thread has reacquired the lock.
static idist_status idist__gpu_leave_goes_on(const idist_group *g, idist_status status) {
    if (status != IDIST_OK || !g->w->progress.stops) return status;
    return idist__fail(IDIST_ERR_STATE, "another thread is closing the world");
}

static bool idist__gpu_leave_is_unused(const void *arg) {
    return !idist__gpu_of((const idist__world *)arg)->user_count;
}

// Sets the deadline by which other threads must have left the world, unless the deadline is already
// set.
static void idist__gpu_leave_set_deadline(idist__gpu *gpu) {
    if (!gpu->leave_deadline_ns)
        gpu->leave_deadline_ns = idist__os_clock_deadline(IDIST__GPU_ABORT_MS);
}

// Locks the world in the thread that closes it. Returns false if another thread still holds the
// lock at the deadline; the world is then abandoned.
static bool idist__gpu_leave_lock(idist__world *w) {
    idist__gpu *gpu = idist__gpu_of(w);
    int turns = 0;

    idist__gpu_leave_set_deadline(gpu);

    while (!w->life.abandoned && !idist__os_mutex_try_lock(&w->lock)) {
        w->life.abandoned = idist__os_clock_now_ns() > gpu->leave_deadline_ns;
        idist__gpu_device_nap(&turns);
    }

    return !w->life.abandoned;
}

// Waits for the threads that use the world without holding the lock. Called before closing the
// world frees the memory that these threads use. If a thread has not left by the deadline, the
// world is abandoned (w->life.abandoned), and nothing that such a thread uses is freed. Called once
// per world, without the lock.
static void idist__gpu_leave_wait_unused(idist__world *w) {
    idist__gpu *gpu = idist__gpu_of(w);

    if (idist__gpu_leave_lock(w)) {
        w->life.abandoned =
            !idist__gpu_agree_wait_until(w, idist__gpu_leave_is_unused, w, gpu->leave_deadline_ns);
        idist__os_mutex_unlock(&w->lock);
    }

    gpu->stuck = gpu->stuck || w->life.abandoned;
}
