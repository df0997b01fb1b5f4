// train/compress/on_device.h: compressed buckets, by kernels on the device
//
// The kernels of gpu/ipc/ compress F32 buckets. They give the same bits as the host.
#pragma once

#include "train/compress/tensor_memory.h"
#include "train/compress/compress.h"

#ifdef IDIST_NCCL_H
static idist_status idist__on_device_convert(const idist_bucket *b, int kernel_op, const void *in,
                                             void *out) {
    idist__pack_args args;

    memset(&args, 0, sizeof args);
    args.in = in;
    args.out = out;
    args.count = b->count;
    args.op = kernel_op;

    return idist__own_pack("ddp", &b->opts, &args);
}

static idist_status idist__on_device_half_start(idist_bucket *b, void *arg) {
    const idist__reduction *reduction = (const idist__reduction *)arg;
    void *wire = b->state;
    int kernel_op = reduction->wire == IDIST_F16 ? IDIST__PACK_F16 : IDIST__PACK_BF16;
    idist_status status = idist__on_device_convert(b, kernel_op, b->data, wire);

    if (status != IDIST_OK) return status;
    return idist_all_reduce(wire, wire, b->count, reduction->wire, reduction->op, &b->opts);
}

static idist_status idist__on_device_half_finish(idist_bucket *b, void *arg) {
    const idist__reduction *reduction = (const idist__reduction *)arg;
    int kernel_op = reduction->wire == IDIST_F16 ? IDIST__UNPACK_F16 : IDIST__UNPACK_BF16;
    idist_status status = idist__on_device_convert(b, kernel_op, b->state, b->data);

    if (status != IDIST_OK) return status;
    return idist__tensor_memory_scale(&reduction->memory, b->data, b->count, b->dtype,
                                      reduction->postscale);
}
#endif
