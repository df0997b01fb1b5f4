// train/compress/on_device.h: compressed buckets, by kernels on the device
//
// For F32, by kernels of gpu/ipc/. They give the same bits as the host, provided the host's
// compiler does not contract products and sums into fused multiply-adds.
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

    return idist__own_pack("ddp", &b->opts, IDIST__PACK_HALVES, &args);
}

static idist_status idist__on_device_half_start(idist_bucket *b, void *arg) {
    const idist__reduction *reduction = (const idist__reduction *)arg;
    void *wire = ((idist__compress_state *)b->state)->send;
    int kernel_op = reduction->wire == IDIST_F16 ? IDIST__PACK_F16 : IDIST__PACK_BF16;
    idist_status status = idist__on_device_convert(b, kernel_op, b->data, wire);

    if (status != IDIST_OK) return status;
    return idist_all_reduce(wire, wire, b->count, reduction->wire, reduction->op, &b->opts);
}

static idist_status idist__on_device_half_finish(idist_bucket *b, void *arg) {
    const idist__reduction *reduction = (const idist__reduction *)arg;
    const void *wire = ((const idist__compress_state *)b->state)->send;
    int kernel_op = reduction->wire == IDIST_F16 ? IDIST__UNPACK_F16 : IDIST__UNPACK_BF16;
    idist_status status = idist__on_device_convert(b, kernel_op, wire, b->data);

    if (status != IDIST_OK) return status;
    return idist__tensor_memory_scale(&reduction->memory, b->data, b->count, b->dtype,
                                      reduction->postscale);
}

static idist_status idist__on_device_int8_start(idist_bucket *b, void *arg) {
    const idist__reduction *reduction = (const idist__reduction *)arg;
    idist__compress_state *state = (idist__compress_state *)b->state;
    idist__pack_args args;
    idist_status status;

    memset(&args, 0, sizeof args);
    args.op = IDIST__PACK_GIVE;
    args.in = b->data;
    args.residual = (float *)state->error;
    args.out = state->send;
    args.count = b->count;
    args.padded_count = (size_t)reduction->group_size * state->block;
    status = idist__own_pack("ddp", &b->opts, IDIST__PACK_BYTES, &args);
    if (status != IDIST_OK) return status;

    return idist_all_to_all(state->send, state->recv, idist__compress_block_nbytes(state), IDIST_U8,
                            &b->opts);
}

static idist_status idist__on_device_int8_finish(idist_bucket *b, void *arg) {
    const idist__reduction *reduction = (const idist__reduction *)arg;
    idist__compress_state *state = (idist__compress_state *)b->state;
    idist__pack_args args;
    idist_status status;

    memset(&args, 0, sizeof args);
    args.op = IDIST__PACK_ADD;
    args.in = state->recv;
    args.residual = (float *)state->block_error;
    args.out = state->send;
    args.padded_count = state->block;
    args.factor = (float)b->scale;
    args.n = reduction->group_size;
    status = idist__own_pack("ddp", &b->opts, IDIST__PACK_BYTES, &args);
    if (status == IDIST_OK)
        status = idist_all_gather(state->send, state->recv, idist__compress_block_nbytes(state),
                                  IDIST_U8, &b->opts);
    if (status != IDIST_OK) return status;

    args.out = b->data;
    args.count = b->count;

    return idist__own_pack("ddp", &b->opts, IDIST__UNPACK_BYTES, &args);
}
#endif
