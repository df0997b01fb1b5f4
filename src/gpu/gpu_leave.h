// gpu/gpu_leave.h: closing a world waits for the threads that use it
//
// The thread that closes a world calls idist__gpu_leave_wait_unused. A thread that has released the
// lock asks idist__gpu_leave_goes_on when it has it again, and leaves if the world is being closed.
#pragma once

#include "os/clock.h"
#include "os/thread.h"
#include "base/fail.h"
#include "core/model.h"
#include "gpu/gpu_model.h"
#include "gpu/gpu_device.h"
#include "gpu/gpu_agree.h"

// Called when the lock has been released meanwhile: another thread may be closing the world, and
// waits for us to leave it.
static idist_status idist__gpu_leave_goes_on(const idist_group *g, idist_status status) {
    if (status != IDIST_OK || !g->w->progress.stops) return status;
    return idist__fail(IDIST_ERR_STATE, "another thread closes the world");
}

static bool idist__gpu_leave_is_unused(const void *arg) {
    return !idist__gpu_of((const idist__world *)arg)->user_count;
}

// Sets, once, the deadline by which other threads must have left the world.
static void idist__gpu_leave_set_deadline(idist__gpu *gpu) {
    if (!gpu->leave_deadline_ns)
        gpu->leave_deadline_ns = idist__os_clock_deadline(IDIST__GPU_ABORT_MS);
}

// Takes the lock in the thread that closes the world. False: another thread never releases it; the
// world is abandoned.
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

// The world is being closed: waits, once, for the threads that use without the lock what is to be
// freed. If some still do (w->life.abandoned), nothing that they use is freed. Called without the
// lock.
static void idist__gpu_leave_wait_unused(idist__world *w) {
    idist__gpu *gpu = idist__gpu_of(w);

    if (idist__gpu_leave_lock(w)) {
        w->life.abandoned =
            !idist__gpu_agree_wait_until(w, idist__gpu_leave_is_unused, w, gpu->leave_deadline_ns);
        idist__os_mutex_unlock(&w->lock);
    }

    gpu->stuck = gpu->stuck || w->life.abandoned;
}
