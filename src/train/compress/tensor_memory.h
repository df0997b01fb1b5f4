// train/compress/tensor_memory.h: operations on host or device memory
//
// On the device, gpu/ipc/own.h enqueues the operations on opts.stream.
#pragma once

#include "base/fail.h"
#include "base/reduce.h"

#ifdef IDIST_NCCL_H
#define IDIST__OWN(call) call
#else
static idist_status idist__tensor_memory_no_device(void) {
    return idist__fail(IDIST_ERR_UNSUPPORTED,
                       "ddp: device memory needs idist_nccl.h, included before idist_train.h");
}
#define IDIST__OWN(call) idist__tensor_memory_no_device()
#endif

typedef struct idist__memory {
    bool on_device;
    idist_opts opts; // group and stream
} idist__memory;

// Copies nbytes, or writes zeros if `from` is NULL.
static idist_status idist__tensor_memory_copy(const idist__memory *memory, void *to,
                                              const void *from, size_t nbytes) {
    if (!nbytes || to == from) return IDIST_OK;
    if (memory->on_device)
        return IDIST__OWN(idist__own_copy("ddp", &memory->opts, to, from, nbytes));
    if (from) memcpy(to, from, nbytes);
    else memset(to, 0, nbytes);

    return IDIST_OK;
}

static idist_status idist__tensor_memory_scale(const idist__memory *memory, void *data,
                                               size_t count, idist_dtype dtype, double factor) {
    if (!count || factor == 1) return IDIST_OK;
    if (memory->on_device)
        return IDIST__OWN(idist__own_scale("ddp", &memory->opts, data, count, dtype, factor));
    idist__reduce_scale(data, count, dtype, factor);

    return IDIST_OK;
}

// Sets *on_device to true if data is in device memory. Without idist_nccl.h, always sets it to
// false. Returns IDIST_ERR_UNSUPPORTED for an idist_xla_buffer.
static idist_status idist__tensor_memory_on_device(const idist__memory *memory, const void *data,
                                                   bool *on_device) {
    *on_device = false;
#ifdef IDIST_XLA_H
    if (data && idist__xla_buffer_is(data))
        return idist__fail(IDIST_ERR_UNSUPPORTED, "ddp: a tensor is an idist_xla_buffer; "
                                                  "all_reduce such gradients yourself");
#endif
#ifdef IDIST_NCCL_H
    if (data) return idist__own_holds("ddp", &memory->opts, data, on_device);
#else
    (void)memory;
    (void)data;
#endif
    return IDIST_OK;
}

// Allocates zeroed memory, which the caller frees with idist__tensor_memory_free.
static idist_status idist__tensor_memory_alloc(const idist__memory *memory, void **data,
                                               size_t nbytes) {
    if (memory->on_device) return IDIST__OWN(idist__own_alloc("ddp", &memory->opts, data, nbytes));
    *data = idist_alloc(nbytes, &memory->opts);
    return *data ? IDIST_OK : IDIST_ERR_NO_MEMORY;
}

static void idist__tensor_memory_free(const idist__memory *memory, void *data) {
    if (!memory->on_device) {
        idist_free(data);
        return;
    }
#ifdef IDIST_NCCL_H
    idist__own_free(data);
#endif
}
