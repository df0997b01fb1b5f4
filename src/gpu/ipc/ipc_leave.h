// gpu/ipc/ipc_leave.h: how the end of a world frees device memory
//
//     idist_finalize      idist__ipc_leave_unmap_arenas   this rank no longer maps any arena
//                         the ranks meet                  no rank still maps our arenas
//     groups are closed   gpu/gpu_leave.h                 other threads leave the world
//     world is freed      idist__ipc_leave_free_all       frees all memory that the device uses
#pragma once

#include "os/clock.h"
#include "os/thread.h"
#include "base/mem.h"
#include "base/log.h"
#include "core/model.h"
#include "core/world.h"
#include "gpu/gpu_model.h"
#include "gpu/gpu_device.h"
#include "gpu/pinned.h"
#include "gpu/gpu_agree.h"
#include "gpu/ipc/ipc_kernel.h"

// A clean-up job, which frees the device's memory in a thread of its own. The thread is needed
// because each CUDA call that frees memory may wait for all work on the device.
typedef struct idist__ipc_cleanup {
    idist__gpu gpu; // only the device, and what the thread frees: imports, arenas, library,
                    // free_pinned, barrier_word, pool
    int state;      // atomic: IDIST__JOB_STATE_*
} idist__ipc_cleanup;

static void *idist__ipc_leave_cleanup_run(void *arg) {
    idist__ipc_cleanup *job = (idist__ipc_cleanup *)arg;
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    const idist__ipc_arena *a;
    const idist__pinned *p;

    cudaSetDevice(job->gpu.device);
    cudaThreadExchangeStreamCaptureMode(&mode);
    for (a = job->gpu.imports; a; a = a->next) cudaIpcCloseMemHandle(a->data);
    for (a = job->gpu.arenas; a; a = a->next) cudaFree(a->data);
    for (p = job->gpu.free_pinned; p; p = p->next)
        if (p->is_pinned) cudaHostUnregister(p->data);
    cudaFree(job->gpu.barrier_word);
    if (job->gpu.pool) cudaMemPoolDestroy(job->gpu.pool);
    idist__ipc_kernel_unload(&job->gpu);

    if (__atomic_exchange_n(&job->state, IDIST__JOB_STATE_DONE, __ATOMIC_ACQ_REL) ==
        IDIST__JOB_STATE_LEFT)
        free(job);

    return NULL;
}

// Frees the memory that `what` lists, in a thread of its own, and waits up to IDIST__GPU_ABORT_MS
// for the thread. Returns false if the thread has not finished by this deadline, because the device
// is busy. The thread then continues by itself. Also returns false if the thread cannot be started.
// Called without the lock.
static bool idist__ipc_leave_clean_up(const idist__gpu *what) {
    idist__ipc_cleanup *job = (idist__ipc_cleanup *)calloc(1, sizeof *job);
    int64_t deadline = idist__os_clock_deadline(IDIST__GPU_ABORT_MS);
    idist__os_thread thread;
    int turns = 0;

    if (!job) return false;
    job->gpu = *what;

    if (idist__os_thread_start(&thread, idist__ipc_leave_cleanup_run, job) != 0) {
        free(job);
        return false;
    }

    while (!__atomic_load_n(&job->state, __ATOMIC_ACQUIRE) && idist__os_clock_now_ns() < deadline)
        idist__gpu_device_nap(&turns);

    if (__atomic_exchange_n(&job->state, IDIST__JOB_STATE_LEFT, __ATOMIC_ACQ_REL) !=
        IDIST__JOB_STATE_DONE) {
        idist__os_thread_detach(thread); // the thread frees the job
        return false;
    }

    idist__os_thread_join(thread);
    free(job);

    return true;
}

static void idist__ipc_leave_free_list(const idist__world *w, idist__ipc_arena *list) {
    idist__ipc_arena *a;

    while ((a = list) != NULL) {
        list = a->next;
        idist__mem_free(&w->cfg.mem, a);
    }
}

// Returns true if no thread of this rank reads, or is about to read, the memory of other ranks.
static bool idist__ipc_leave_is_idle(const void *arg) {
    const idist__world *w = (const idist__world *)arg;
    const idist_group *g;
    const idist__task *t;

    for (t = w->tasks.running; t; t = t->next)
        if (t->on_device && idist__gpu_op_of(t)->path == IDIST__BY_IPC) return false;

    for (g = &w->group; g; g = g->next) {
        const idist__gpu_group *gg = idist__gpu_group_of(g);
        if (gg && gg->preparing && gg->path == IDIST__BY_IPC) return false;
    }

    return true;
}

// Unmaps the arenas of the other ranks. A rank frees its arenas only when all ranks have unmapped
// them. Waits for the calls of other threads to end.
static void idist__ipc_leave_unmap_arenas(idist__world *w) {
    idist__gpu *gpu = idist__gpu_of(w);
    idist__gpu what;
    bool closed;

    if (!idist__gpu_agree_wait_until(w, idist__ipc_leave_is_idle, w,
                                     idist__os_clock_deadline(IDIST__GPU_ABORT_MS))) {
        idist__log_print(
            &w->log, IDIST_LOG_WARN,
            "finalize: a call in another thread still reads the memory of other ranks");
        return;
    }

    gpu->closed = true;
    if (!gpu->imports || gpu->stuck) return;
    memset(&what, 0, sizeof what);
    what.device = gpu->device;
    what.imports = gpu->imports;
    gpu->imports = NULL;

    idist__os_mutex_unlock(&w->lock);
    closed = idist__ipc_leave_clean_up(&what);
    idist__world_lock(w);
    if (closed) idist__ipc_leave_free_list(w, what.imports);
    else gpu->stuck = true;
}

// Frees all of this rank's memory that the device uses. Each of these CUDA calls may wait for the
// device, on which an NCCL kernel that could not be aborted may still run.
static void idist__ipc_leave_free_all(idist__world *w) {
    idist__gpu *gpu = idist__gpu_of(w);
    // If the device is stuck, a thread may still be loading the kernels.
    bool any = !gpu->stuck && (gpu->imports || gpu->arenas || gpu->free_pinned ||
                               gpu->barrier_word || gpu->pool || idist__ipc_kernel_is_loaded(gpu));
    bool busy = any && !idist__ipc_leave_clean_up(gpu);

    if (!busy && !w->life.abandoned) { // otherwise, a thread may still read the lists
        idist__ipc_leave_free_list(w, gpu->imports);
        idist__ipc_leave_free_list(w, gpu->arenas);
        idist__pinned_free_list(w, gpu->free_pinned);
        idist__pinned_free_list(w, gpu->abandoned_pinned);
    }

    gpu->stuck = gpu->stuck || busy;
    if (!gpu->stuck) return;
    idist__log_print(
        &w->log, IDIST_LOG_WARN,
        "GPU %d has not finished its work: its memory stays allocated until the process ends",
        gpu->device);
}
