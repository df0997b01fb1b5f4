// gpu/ipc/own.h: device memory of this rank alone, for idist_train.h
//
// All work is enqueued on the program's stream (opts->stream).
#pragma once

#include "os/thread.h"
#include "base/fail.h"
#include "core/model.h"
#include "core/world.h"
#include "core/call.h"
#include "gpu/gpu_model.h"
#include "gpu/gpu_device.h"
#include "gpu/ipc/ptx.h"
#include "gpu/ipc/ipc_kernel.h"

typedef struct idist__own {
    idist__world *w;
    idist__gpu *gpu;
    idist__gpu_guard guard;
    cudaStream_t stream;
    cudaError_t error;
} idist__own;

// Makes the device of the group's world the current device until idist__own_end. Loads the kernels
// if `kernels` is true. The lock is not held meanwhile, because allocating memory, or enqueuing on
// a full queue, may wait for the device. Closing the world waits for us.
static idist_status idist__own_begin(idist__own *own, const char *name, const idist_opts *opts,
                                     bool kernels) {
    idist_group *g;
    idist_status status;

    memset(own, 0, sizeof *own);
    status = idist__call_enter(name, opts->group, &g);
    if (status != IDIST_OK) return status;
    own->w = g->w;
    own->gpu = idist__gpu_of(g->w);
    own->stream = (cudaStream_t)opts->stream;
    if (!own->gpu || !own->gpu->host_backend)
        status = idist__fail(IDIST_ERR_NO_DEVICE, "%s: %s", name, g->w->about.no_device);
    else if (g->w->progress.stops)
        status = idist__fail(IDIST_ERR_STATE, "%s: another thread is closing the world", name);

    if (status == IDIST_OK) {
        own->gpu->user_count++;
        own->guard = idist__gpu_device_enter(own->gpu);
        if (kernels) own->error = idist__ipc_kernel_need(g->w);
    }

    idist__os_mutex_unlock(&own->w->lock);

    return status;
}

static idist_status idist__own_end(const idist__own *own, const char *name) {
    idist__gpu_device_leave(own->gpu, own->guard);
    idist__world_lock(own->w);
    own->gpu->user_count--;
    idist__os_mutex_unlock(&own->w->lock);
    return own->error == cudaSuccess ? IDIST_OK : idist__gpu_device_fail(name, own->error);
}

// Copies nbytes of device memory, or zeroes the memory at `to` if `from` is NULL.
IDIST__UNUSED static idist_status idist__own_copy(const char *name, const idist_opts *opts,
                                                  void *to, const void *from, size_t nbytes) {
    idist__own own;
    idist_status status = idist__own_begin(&own, name, opts, false);

    if (status != IDIST_OK) return status;
    own.error = from ? cudaMemcpyAsync(to, from, nbytes, cudaMemcpyDeviceToDevice, own.stream)
                     : cudaMemsetAsync(to, 0, nbytes, own.stream);
    return idist__own_end(&own, name);
}

// Allocates zeroed memory. The caller frees the memory with idist__own_free.
IDIST__UNUSED static idist_status idist__own_alloc(const char *name, const idist_opts *opts,
                                                   void **p, size_t nbytes) {
    idist__own own;
    idist_status status = idist__own_begin(&own, name, opts, false);

    *p = NULL;
    if (status != IDIST_OK) return status;
    own.error = cudaMalloc(p, nbytes ? nbytes : 1);
    if (own.error == cudaSuccess) own.error = cudaMemsetAsync(*p, 0, nbytes, own.stream);
    return idist__own_end(&own, name);
}

IDIST__UNUSED static void idist__own_free(void *p) {
    idist__gpu_home home;

    if (!p) return;
    idist__gpu_device_home_enter(&home);
    cudaFree(p);
    cudaGetLastError();
    idist__gpu_device_home_leave(&home);
}

// Checks that the rank has a device and, if `kernels` is true, that the kernels can be loaded.
IDIST__UNUSED static idist_status idist__own_ready(const char *name, const idist_opts *opts,
                                                   bool kernels) {
    idist__own own;
    idist_status status = idist__own_begin(&own, name, opts, kernels);
    return status == IDIST_OK ? idist__own_end(&own, name) : status;
}

// Sets *holds to true if p is in device memory. On a rank without a device, *holds is always false.
IDIST__UNUSED static idist_status idist__own_holds(const char *name, const idist_opts *opts,
                                                   const void *p, bool *holds) {
    idist__own own;
    idist_status status = idist__own_begin(&own, name, opts, false);

    *holds = false;
    if (status != IDIST_OK) return status == IDIST_ERR_NO_DEVICE ? IDIST_OK : status;
    own.error = idist__gpu_device_owns_pointer(p, holds);
    return idist__own_end(&own, name);
}

// Multiplies elements of type F16, BF16, F32 or F64 by a factor. The data must be aligned to an
// element.
IDIST__UNUSED static idist_status idist__own_scale(const char *name, const idist_opts *opts,
                                                   void *data, size_t count, idist_dtype dtype,
                                                   double factor) {
    idist__own own;
    idist_status status = idist__own_begin(&own, name, opts, true);

    if (status != IDIST_OK) return status;
    if (own.error == cudaSuccess)
        own.error = idist__ipc_kernel_scale(own.gpu, data, count, dtype, factor, own.stream);
    return idist__own_end(&own, name);
}

// Converts floats to 16-bit floats, or 16-bit floats to floats.
IDIST__UNUSED static idist_status idist__own_pack(const char *name, const idist_opts *opts,
                                                  const idist__pack_args *args) {
    idist__own own;
    idist_status status = idist__own_begin(&own, name, opts, true);

    if (status != IDIST_OK) return status;
    if (own.error == cudaSuccess && args->count)
        own.error =
            idist__ipc_kernel_launch(own.gpu, IDIST__PACK_HALVES, args, args->count, own.stream);

    return idist__own_end(&own, name);
}
