// gpu/ipc/ipc_kernel.h: loading the kernels, and launching them
#pragma once

#include "os/clock.h"
#include "os/thread.h"
#include "base/reduce_op.h"
#include "core/model.h"
#include "core/world.h"
#include "gpu/gpu_model.h"
#include "gpu/gpu_agree.h"
#include "gpu/ipc/ptx.h"

#if IDIST__IPC_KERNELS
static bool idist__ipc_kernel_is_loaded(const idist__gpu *gpu) { return gpu->library != NULL; }

static void idist__ipc_kernel_unload(idist__gpu *gpu) {
    if (gpu->library) cudaLibraryUnload(gpu->library);
    gpu->library = NULL;
}

// Loads the kernels. The driver compiles a kernel when the kernel is first needed. Querying the
// kernel's attributes makes the driver compile it now. PTX that the driver cannot compile is
// therefore found before a call needs the kernels, and no launch waits for the compiler.
static cudaError_t idist__ipc_kernel_load(idist__gpu *gpu) {
    static const char *const names[] = {"idist_reduce_f16", "idist_reduce_bf16", "idist_reduce_f32",
                                        "idist_reduce_f64", "idist_pack_halves"};
    struct cudaFuncAttributes attributes;
    size_t i, nbytes = 1, at = 0;
    cudaError_t error;
    char *text;

    for (i = 0; i < IDIST__COUNT_OF(idist__ptx); i++) nbytes += strlen(idist__ptx[i]);
    if ((text = (char *)malloc(nbytes)) == NULL) return cudaErrorMemoryAllocation;
    for (i = 0; i < IDIST__COUNT_OF(idist__ptx); at += strlen(idist__ptx[i++]))
        memcpy(text + at, idist__ptx[i], strlen(idist__ptx[i]) + 1);
    error = cudaLibraryLoadData(&gpu->library, text, NULL, NULL, 0, NULL, NULL, 0);
    free(text);

    for (i = 0; i < IDIST__COUNT_OF(names) && error == cudaSuccess; i++) {
        error = cudaLibraryGetKernel(&gpu->kernels[i], gpu->library, names[i]);
        if (error != cudaSuccess) break;
        error = cudaFuncGetAttributes(&attributes, (const void *)gpu->kernels[i]);
    }

    if (error != cudaSuccess) idist__ipc_kernel_unload(gpu);

    return error;
}

// Launches a kernel with one thread for each of `count` items, or with fewer threads that each
// handle several items.
static cudaError_t idist__ipc_kernel_launch(const idist__gpu *gpu, int kernel, const void *args,
                                            size_t count, cudaStream_t stream) {
    void *params[1];
    dim3 grid, block;

    params[0] = (void *)(uintptr_t)args;
    block.x = IDIST__PTX_THREADS;
    grid.x = (unsigned)(count / IDIST__PTX_THREADS < 1024 ? count / IDIST__PTX_THREADS + 1 : 1024);
    grid.y = grid.z = block.y = block.z = 1;
    return cudaLaunchKernel((const void *)gpu->kernels[kernel], grid, block, params, 0, stream);
}

// Reduces on the device. The caller sets args->out, args->also and args->count. Each operand in[i]
// that is NULL is read from offset `at` of rank i's arena.
static cudaError_t idist__ipc_kernel_reduce(const idist__task *t, char *const *arena, size_t at,
                                            idist__ptx_args *args) {
    const idist_group *g = t->group;
    const idist__call *call = &idist__gpu_op_of(t)->call;
    const idist__gpu *gpu = idist__gpu_of(g->w);
    size_t size = idist_dtype_size(call->dtype), nbytes = args->count * size;
    cudaStream_t stream = idist__gpu_group_of(g)->stream[IDIST__STREAM_OUT];
    cudaError_t error = cudaSuccess;
    void *out = args->out, *away = NULL;
    int i;

    if (!args->count) return cudaSuccess;

    for (i = 0; i < g->size; i++)
        if (!args->in[i]) args->in[i] = arena[i] + at;
    args->n = g->size;
    args->op = idist__reduce_op_is_arithmetic(call->op) ? (int)call->op : IDIST_SUM;

    // The kernel needs output that is aligned to an element.
    if ((uintptr_t)out % size) error = cudaMallocAsync(&away, nbytes, stream);
    if (away) args->out = away;
    if (error == cudaSuccess)
        error = idist__ipc_kernel_launch(gpu, (int)call->dtype - IDIST_F16, args, args->count / 4,
                                         stream);
    if (error == cudaSuccess && away)
        error = cudaMemcpyAsync(out, away, nbytes, cudaMemcpyDefault, stream);
    if (away) cudaFreeAsync(away, stream);

    return error;
}

static cudaError_t idist__ipc_kernel_scale(const idist__gpu *gpu, void *data, size_t count,
                                           idist_dtype dtype, double factor, cudaStream_t stream) {
    idist__ptx_args args;

    memset(&args, 0, sizeof args);
    args.in[0] = args.out = data;
    args.count = count;
    args.n = 1;
    args.op = IDIST__PTX_SCALED;
    args.factor = factor;

    return count ? idist__ipc_kernel_launch(gpu, (int)dtype - IDIST_F16, &args, count / 4, stream)
                 : cudaSuccess;
}
#else
static bool idist__ipc_kernel_is_loaded(const idist__gpu *gpu) {
    (void)gpu;
    return false;
}
static cudaError_t idist__ipc_kernel_load(idist__gpu *gpu) {
    (void)gpu;
    return cudaErrorNotSupported;
}
static void idist__ipc_kernel_unload(idist__gpu *gpu) { (void)gpu; }
static cudaError_t idist__ipc_kernel_reduce(const idist__task *t, char *const *arena, size_t at,
                                            idist__ptx_args *args) {
    (void)t;
    (void)arena;
    (void)at;
    (void)args;
    return cudaErrorNotSupported;
}
static cudaError_t idist__ipc_kernel_scale(const idist__gpu *gpu, void *data, size_t count,
                                           idist_dtype dtype, double factor, cudaStream_t stream) {
    (void)gpu;
    (void)data;
    (void)count;
    (void)dtype;
    (void)factor;
    (void)stream;
    return cudaErrorNotSupported;
}
static cudaError_t idist__ipc_kernel_launch(const idist__gpu *gpu, int kernel, const void *args,
                                            size_t count, cudaStream_t stream) {
    (void)gpu;
    (void)kernel;
    (void)args;
    (void)count;
    (void)stream;
    return cudaErrorNotSupported;
}
#endif

static bool idist__ipc_kernel_has_loaded(const void *arg) {
    const idist__world *w = (const idist__world *)arg;
    return !idist__gpu_of(w)->loading || w->progress.stops;
}

// Loads the kernels once per world. Called with the lock held. Releases the lock meanwhile, because
// loading may wait for the device. On the device, an NCCL kernel may be waiting for a lost rank,
// and the thread that aborts this kernel needs the lock. The caller is counted in gpu->user_count.
static cudaError_t idist__ipc_kernel_need(idist__world *w) {
    idist__gpu *gpu = idist__gpu_of(w);
    int most_ms = w->cfg.init_timeout_ms > 0 ? w->cfg.init_timeout_ms : IDIST__IPC_LOAD_MS;
    cudaError_t error;

    if (!idist__gpu_agree_wait_until(w, idist__ipc_kernel_has_loaded, w,
                                     idist__os_clock_deadline(most_ms)))
        return cudaErrorNotReady;
    if (gpu->loading) return cudaErrorNotReady;
    if (idist__ipc_kernel_is_loaded(gpu)) return cudaSuccess;

    gpu->loading = true;
    idist__os_mutex_unlock(&w->lock);
    error = idist__ipc_kernel_load(gpu);
    idist__world_lock(w);
    gpu->loading = false;

    return error;
}
