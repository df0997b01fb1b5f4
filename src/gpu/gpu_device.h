// gpu/gpu_device.h: CUDA errors and the current device
#pragma once

#include "os/clock.h"
#include "os/process.h"
#include "os/thread.h"
#include "base/fail.h"
#include "core/group.h"
#include "gpu/gpu_model.h"

// Waits briefly: yields in turns 1 to 50, sleeps 50 us in turns 51 to 100, and then sleeps 1 ms per
// turn.
static void idist__gpu_device_nap(int *turns) {
    if (++*turns <= 50) idist__os_thread_yield();
    else idist__os_clock_pause_ns(*turns <= 100 ? 50000 : 1000000);
}

static idist_status idist__gpu_device_fail(const char *what, cudaError_t error) {
    cudaGetLastError(); // clears the error, which is reported here
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
    // Old runtimes return cudaErrorInvalidValue for plain host memory.
    return error == cudaErrorInvalidValue ? cudaSuccess : error;
}

// Fails the group with this rank as the cause. The reason is the text of idist_last_error.
static void idist__gpu_device_fail_group(idist_group *g, idist_status status) {
    char cause[300];
    snprintf(cause, sizeof cause, "rank %d: %.250s", g->w->cfg.rank, idist__me.text);
    idist__group_fail(g, status, cause);
}

// Finds cuDevicePrimaryCtxGetState. Searches the program first, which may be linked with the
// driver's library. Then searches libcuda.so.1, which the runtime has already loaded.
static void idist__gpu_device_find_context_state(idist__gpu *gpu) {
    static const char name[] = "cuDevicePrimaryCtxGetState";
    void *library = idist__os_library_open(NULL),
         *at = library ? idist__os_library_find(library, name) : NULL;

    if (!at) library = idist__os_library_loaded("libcuda.so.1");
    if (!at && library) at = idist__os_library_find(library, name);
    memcpy(&gpu->context_state, &at, sizeof at);
}

// Returns true if cudaSetDevice(device) would create a context on a device that has none, as CUDA
// does from version 12 on. A context takes hundreds of MB of memory on a GPU that may belong to
// another rank. (Restoring device 0 may do this in a thread that has never chosen a device, where
// cudaGetDevice returns 0.)
static bool idist__gpu_device_lacks_context(const idist__gpu *gpu, int device) {
    unsigned flags = 0;
    int active = 1;

    if (CUDART_VERSION < 12000 || !gpu->context_state) return false;
    return gpu->context_state(device, &flags, &active) == 0 && !active;
}

// Makes our device the current one. Returns the previous device, for idist__gpu_device_restore.
static int idist__gpu_device_set(const idist__gpu *gpu) {
    int device = gpu->device;

    cudaGetDevice(&device);
    if (device != gpu->device) cudaSetDevice(gpu->device);
    return device;
}

// Makes the previous device the current one again. A thread that had not chosen a device keeps our
// device, and so does our progress thread.
static void idist__gpu_device_restore(const idist__gpu *gpu, int device) {
    if (device == gpu->device || idist__gpu_device_lacks_context(gpu, device)) return;
    if (gpu->thread && idist__os_thread_equal(*gpu->thread, idist__os_thread_self())) return;
    cudaSetDevice(device);
}

// The state that idist__gpu_device_enter saves for idist__gpu_device_leave. Between these two calls
// our device is the current one, and a stream capture in another thread does not make CUDA calls
// fail.
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

// The device that the most recent world chose, plus 1, or 0 if no world has chosen a device.
// Atomic. The value outlives the world, as does the device's context.
static int idist__gpu_home_device;

// The state between idist__gpu_device_home_enter and idist__gpu_device_home_leave. The two
// functions act like idist__gpu_device_enter and idist__gpu_device_leave, but for memory that
// belongs to no world. They do nothing if no world has ever had a device.
typedef struct idist__gpu_home {
    idist__gpu gpu; // only the members that the guard needs
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
