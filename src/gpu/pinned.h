// gpu/pinned.h: pinned host memory, which the device copies to and from
#pragma once

#include "os/clock.h"
#include "os/thread.h"
#include "os/memory.h"
#include "base/mem.h"
#include "base/log.h"
#include "core/model.h"
#include "gpu/gpu_model.h"
#include "gpu/gpu_device.h"

// A job that pins memory in a thread of its own. Pinning may wait for all work on the device, for
// example for an NCCL kernel that waits for a lost rank. The thread that would abort the kernel
// needs the world's lock, so no thread that holds the lock may wait for the pinning.
typedef struct idist__pinning {
    idist__pinned *memory;
    int device;
    cudaError_t error;
    int state; // atomic: IDIST__JOB_STATE_RUNS or IDIST__JOB_STATE_DONE; the waiter frees the job
    idist__os_thread thread;
} idist__pinning;

// Pins the memory of a job. Memory that cannot be pinned is used as well, but staging is slower
// (idist__stage_may_copy).
static void *idist__pinned_work(void *arg) {
    idist__pinning *job = (idist__pinning *)arg;
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;

    cudaSetDevice(job->device);
    cudaThreadExchangeStreamCaptureMode(&mode);
    job->error = cudaHostRegister(job->memory->data, job->memory->nbytes, cudaHostRegisterPortable);
    __atomic_store_n(&job->state, IDIST__JOB_STATE_DONE, __ATOMIC_RELEASE);
    return NULL;
}

// Allocates memory that the ranks on a host share, if the backend provides such memory. Otherwise
// allocates plain memory. Memory is reused, and not freed before the world ends, so sizes are
// rounded up to powers of two.
static idist__pinned *idist__pinned_make(const idist__world *w, size_t nbytes) {
    const idist_backend_api *under = idist__gpu_of(w)->host_backend;
    idist__pinned *p = (idist__pinned *)idist__mem_alloc(&w->cfg.mem, sizeof *p);

    if (!p) return NULL;
    for (p->nbytes = 65536; p->nbytes < nbytes && p->nbytes < SIZE_MAX / 2;) p->nbytes *= 2;
    p->data = under->alloc ? under->alloc((idist__world *)(uintptr_t)w, p->nbytes) : NULL;
    if (!p->data) p->data = idist__os_memory_aligned(4096, p->nbytes);
    if (p->data) return p;

    idist__mem_free(&w->cfg.mem, p);

    return NULL;
}

// If the pinning thread has finished, moves its memory to the list of free memory. Returns false if
// the thread is still pinning.
static bool idist__pinned_finish(const idist__world *w) {
    idist__gpu *gpu = idist__gpu_of(w);
    idist__pinning *job = gpu->pinning_job;

    if (!job) return true;
    if (!__atomic_load_n(&job->state, __ATOMIC_ACQUIRE)) return false;
    idist__os_thread_join(job->thread);
    job->memory->is_pinned = job->error == cudaSuccess;
    if (!job->memory->is_pinned)
        idist__log_print(&w->log, IDIST_LOG_WARN,
                         "cudaHostRegister: %s: device memory is staged without pinned memory, "
                         "which is slower",
                         cudaGetErrorString(job->error));
    job->memory->next = gpu->free_pinned;
    gpu->free_pinned = job->memory;
    gpu->pinning_job = NULL;
    free(job);

    return true;
}

// Takes at least nbytes of memory, pinned if possible: the smallest free block that fits, or a new
// block. Returns NULL and sets *later if a thread is pinning memory; the caller tries again later.
// Returns NULL and clears *later if memory cannot be allocated.
static idist__pinned *idist__pinned_take(const idist__world *w, size_t nbytes, bool *later) {
    idist__gpu *gpu = idist__gpu_of(w);
    idist__pinned **at, **best = NULL, *p;
    idist__pinning *job;

    *later = !idist__pinned_finish(w);
    for (at = &gpu->free_pinned; *at; at = &(*at)->next)
        if ((*at)->nbytes >= nbytes && (!best || (*at)->nbytes < (*best)->nbytes)) best = at;

    if (best) {
        p = *best;
        *best = p->next;
        return p;
    }

    if (*later || (p = idist__pinned_make(w, nbytes)) == NULL) return NULL;

    job = gpu->stuck ? NULL : (idist__pinning *)calloc(1, sizeof *job);
    if (job) {
        job->memory = p;
        job->device = gpu->device;
    }

    if (!job || idist__os_thread_start(&job->thread, idist__pinned_work, job) != 0) {
        free(job);
        return p;
    }

    gpu->pinning_job = job;
    *later = true;

    return NULL;
}

static void idist__pinned_give(idist__gpu *gpu, idist__pinned **p) {
    if (!*p) return;
    (*p)->next = gpu->free_pinned;
    gpu->free_pinned = *p;
    *p = NULL;
}

// Moves memory to the list of abandoned memory, because a copy may still use the memory. Sets *p to
// NULL.
static void idist__pinned_abandon(idist__gpu *gpu, idist__pinned **p) {
    if (!*p) return;
    (*p)->next = gpu->abandoned_pinned;
    gpu->abandoned_pinned = *p;
    *p = NULL;
}

// When the world ends, waits for the thread that pins memory. If the thread does not return within
// IDIST__GPU_ABORT_MS, the device is busy: the thread is detached, and gpu->stuck is set.
static void idist__pinned_end(const idist__world *w) {
    idist__gpu *gpu = idist__gpu_of(w);
    int64_t deadline = idist__os_clock_deadline(IDIST__GPU_ABORT_MS);
    int turns = 0;

    while (!idist__pinned_finish(w)) {
        idist__gpu_device_nap(&turns);
        if (idist__os_clock_now_ns() < deadline) continue;
        idist__log_print(&w->log, IDIST_LOG_ERROR,
                         "cudaHostRegister has not returned: the device is busy");
        idist__os_thread_detach(gpu->pinning_job->thread);
        gpu->stuck = true;
        return;
    }
}

// Frees a list of memory that is no longer pinned. If the device is stuck, the memory is still
// pinned and stays allocated.
static void idist__pinned_free_list(const idist__world *w, idist__pinned *list) {
    idist__pinned *p;

    while ((p = list) != NULL) {
        list = p->next;
        if (!idist__gpu_of(w)->stuck) idist_free(p->data);
        idist__mem_free(&w->cfg.mem, p);
    }
}

static void *idist__pinned_alloc(size_t nbytes, void *user) {
    void *p = NULL;
    idist__gpu_home home;

    (void)user;
    idist__gpu_device_home_enter(&home);

    if (cudaMallocHost(&p, nbytes ? nbytes : 1) != cudaSuccess) {
        cudaGetLastError(); // the caller reports the error
        p = NULL;
    }

    idist__gpu_device_home_leave(&home);

    return p;
}

static void idist__pinned_free(void *p, void *user) {
    idist__gpu_home home;
    (void)user;
    idist__gpu_device_home_enter(&home);
    cudaFreeHost(p);
    idist__gpu_device_home_leave(&home);
}

idist_allocator idist_pinned_allocator(void) {
    idist_allocator a;
    a.alloc_fn = idist__pinned_alloc;
    a.free_fn = idist__pinned_free;
    a.user = NULL;
    return a;
}
