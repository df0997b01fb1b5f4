// train/compress/compress.h: how buckets are reduced; 16-bit compression
//
// Functions: idist__compress_*, idist__half_*.
#pragma once

#include "base/small_float.h"
#include "train/compress/tensor_memory.h"

//------------------------------------------------------------------------------
// a bucket that is sent with fewer bits
//
// A compression is a communication hook, like the program's own hooks. Its arg is the
// idist__reduction of the ddp. With 16-bit compression, the state of a bucket is the memory for its
// 16-bit floats.
//------------------------------------------------------------------------------

// The settings with which the built-in hooks reduce buckets.
typedef struct idist__reduction {
    idist__memory memory;
    int group_size;
    idist_dtype wire;             // dtype sent by 16-bit compression: F16 or BF16
    idist_op op;                  // op of the all_reduce
    double postscale;             // factor for the result of the all_reduce
    idist_powersgd_desc powersgd; // with defaults filled in
} idist__reduction;

// Allocates the state of a bucket: memory for its 16-bit floats.
static idist_status idist__compress_alloc(const idist__reduction *reduction, idist_bucket *b) {
    return idist__tensor_memory_alloc(&reduction->memory, &b->state, (b->count + 1) * 2);
}

// Frees the state of a bucket. This is the free_fn of the hooks for 16-bit compression.
static void idist__compress_free(void *data, void *arg) {
    idist__tensor_memory_free(&((const idist__reduction *)arg)->memory, data);
}

//------------------------------------------------------------------------------
// buckets sent as 16-bit floats
//
// The bucket is rounded to 16 bits, reduced and widened. The reduction adds the numbers as floats
// and rounds once more.
//------------------------------------------------------------------------------

enum { IDIST__HALF_PIECE = 256 }; // elements converted at a time

static void idist__half_pack(const idist_bucket *b, char *to, idist_dtype wire) {
    const double *from = (const double *)b->data;
    float piece[IDIST__HALF_PIECE];
    size_t first, i, count;

    if (b->dtype == IDIST_F32) {
        idist__small_float_narrow(to, (const float *)b->data, b->count, wire);
        return;
    }

    for (first = 0; first < b->count; first += count) {
        count = b->count - first < IDIST__HALF_PIECE ? b->count - first : (size_t)IDIST__HALF_PIECE;
        for (i = 0; i < count; i++) piece[i] = (float)from[first + i];
        idist__small_float_narrow(to + 2 * first, piece, count, wire);
    }
}

static void idist__half_unpack(const idist_bucket *b, const char *from, idist_dtype wire) {
    double *to = (double *)b->data;
    float piece[IDIST__HALF_PIECE];
    size_t first, i, count;

    if (b->dtype == IDIST_F32) {
        idist__small_float_widen((float *)b->data, from, b->count, wire);
        return;
    }

    for (first = 0; first < b->count; first += count) {
        count = b->count - first < IDIST__HALF_PIECE ? b->count - first : (size_t)IDIST__HALF_PIECE;
        idist__small_float_widen(piece, from + 2 * first, count, wire);
        for (i = 0; i < count; i++) to[first + i] = piece[i];
    }
}

static idist_status idist__half_start(idist_bucket *b, void *arg) {
    const idist__reduction *reduction = (const idist__reduction *)arg;
    char *wire = (char *)b->state;

    idist__half_pack(b, wire, reduction->wire);
    return idist_all_reduce(wire, wire, b->count, reduction->wire, reduction->op, &b->opts);
}

static idist_status idist__half_finish(idist_bucket *b, void *arg) {
    const idist__reduction *reduction = (const idist__reduction *)arg;

    idist__half_unpack(b, (const char *)b->state, reduction->wire);
    return idist__tensor_memory_scale(&reduction->memory, b->data, b->count, b->dtype,
                                      reduction->postscale);
}
