// gpu/gpu_device.h: CUDA errors, and whose device is the current one
#pragma once

#include "os/clock.h"
#include "os/process.h"
#include "os/thread.h"
#include "base/fail.h"
#include "core/group.h"
#include "gpu/gpu_model.h"

// Waits a little, longer from turn to turn: yields at first, later sleeps up to 1 ms.
static void idist__gpu_device_nap(int *turns) {
    if (++*turns <= 50) idist__os_thread_yield();
    else idist__os_clock_pause_ns(*turns <= 100 ? 50000 : 1000000);
}

static idist_status idist__gpu_device_fail(const char *what, cudaError_t error) {
    cudaGetLastError(); // reported here: nobody else should get it again
    if (error == cudaErrorMemoryAllocation)
        return idist__fail(IDIST_ERR_NO_MEMORY, "%s: %s", what, cudaGetErrorString(error));

    return idist__fail(
        IDIST_ERR_DEVICE, "%s: %s (%s)%s", what, cudaGetErrorString(error), cudaGetErrorName(error),
        error == cudaErrorInvalidResourceHandle
            ? "; was the stream created on idist_device()? cudaSetDevice applies to one thread"
            : "");
}

static cudaError_t idist__gpu_device_owns_pointer(const void *p, bool *holds) {
    struct cudaPointerAttributes a;
    cudaError_t error = p ? cudaPointerGetAttributes(&a, p) : cudaErrorInvalidValue;

    *holds = error == cudaSuccess && a.type == cudaMemoryTypeDevice;
    if (error == cudaSuccess || !p) return cudaSuccess;
    cudaGetLastError();
    // Old runtimes call plain memory invalid.
    return error == cudaErrorInvalidValue ? cudaSuccess : error;
}

// Fails the group because of this rank, for the reason in idist_last_error.
static void idist__gpu_device_fail_group(idist_group *g, idist_status status) {
    char cause[300];
    snprintf(cause, sizeof cause, "rank %d: %.250s", g->w->cfg.rank, idist__me.text);
    idist__group_fail(g, status, cause);
}

// Looks in the program, if it is linked with the driver's library, or in that library, which the
// runtime has loaded by now.
static void idist__gpu_device_find_context_state(idist__gpu *gpu) {
    static const char name[] = "cuDevicePrimaryCtxGetState";
    void *library = idist__os_library_open(NULL),
         *at = library ? idist__os_library_find(library, name) : NULL;

    if (!at) library = idist__os_library_loaded("libcuda.so.1");
    if (!at && library) at = idist__os_library_find(library, name);
    memcpy(&gpu->context_state, &at, sizeof at);
}

// Whether cudaSetDevice(device) would create a context there, as it does from CUDA 12 on where none
// exists. A context takes hundreds of MB of a GPU that is another rank's. (cudaGetDevice is 0 in a
// thread that never chose a device.)
static bool idist__gpu_device_lacks_context(const idist__gpu *gpu, int device) {
    unsigned flags = 0;
    int active = 1;

    if (CUDART_VERSION < 12000 || !gpu->context_state) return false;
    return gpu->context_state(device, &flags, &active) == 0 && !active;
}

// Makes our device the current one. Returns the one before, for idist__gpu_device_restore.
static int idist__gpu_device_set(const idist__gpu *gpu) {
    int device = gpu->device;

    cudaGetDevice(&device);
    if (device != gpu->device) cudaSetDevice(gpu->device);
    return device;
}

// A thread that had not chosen a device keeps ours, and so does our own thread.
static void idist__gpu_device_restore(const idist__gpu *gpu, int device) {
    if (device == gpu->device || idist__gpu_device_lacks_context(gpu, device)) return;
    if (gpu->thread && idist__os_thread_equal(*gpu->thread, idist__os_thread_self())) return;
    cudaSetDevice(device);
}

// From idist__gpu_device_enter to idist__gpu_device_leave our device is the current one, and a
// stream capture of another thread does not make CUDA calls fail.
typedef struct idist__gpu_guard {
    int device;
    enum cudaStreamCaptureMode mode;
} idist__gpu_guard;

static idist__gpu_guard idist__gpu_device_enter(const idist__gpu *gpu) {
    idist__gpu_guard guard;

    guard.device = idist__gpu_device_set(gpu);
    guard.mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&guard.mode);
    return guard;
}

static void idist__gpu_device_leave(const idist__gpu *gpu, idist__gpu_guard guard) {
    cudaThreadExchangeStreamCaptureMode(&guard.mode);
    idist__gpu_device_restore(gpu, guard.device);
}

// The device that a world chose last, plus 1; 0: none ever did. Atomic. It outlives the world, as
// its context does.
static int idist__gpu_home_device;

// The same as idist__gpu_device_enter and idist__gpu_device_leave, for memory that belongs to no
// world. Does nothing if no world ever had a device.
typedef struct idist__gpu_home {
    idist__gpu gpu; // only what the guard needs
    idist__gpu_guard guard;
} idist__gpu_home;

static void idist__gpu_device_home_enter(idist__gpu_home *home) {
    memset(home, 0, sizeof *home);
    home->gpu.device = __atomic_load_n(&idist__gpu_home_device, __ATOMIC_ACQUIRE) - 1;
    if (home->gpu.device < 0) return;
    idist__gpu_device_find_context_state(&home->gpu);
    home->guard = idist__gpu_device_enter(&home->gpu);
}

static void idist__gpu_device_home_leave(const idist__gpu_home *home) {
    if (home->gpu.device >= 0) idist__gpu_device_leave(&home->gpu, home->guard);
}
