// train/compress/compress.h: state of a compressed bucket; 16-bit compression
//
// Functions: idist__compress_*, idist__half_*.
#pragma once

#include "base/fail.h"
#include "base/small_float.h"
#include "train/compress/tensor_memory.h"

//------------------------------------------------------------------------------
// the state of a bucket that is sent with fewer bits
//
// A compression is a communication hook like one of the program's. Its arg is the idist__reduction
// of the ddp, and the state of a bucket an idist__compress_state.
//------------------------------------------------------------------------------

// How the buckets of an iteration are reduced.
typedef struct idist__reduction {
    idist__memory memory;
    int group_size;
    idist_dtype wire;             // what is sent: F16, BF16, I8 or, by PowerSGD, F32
    idist_op op;                  // of the call, ...
    double postscale;             // ... and the factor for its result
    idist_powersgd_desc powersgd; // with defaults filled in
} idist__reduction;

// Gradients that share a scale when they are sent as bytes.
enum { IDIST__INT8_CHUNK = 1024 };
enum { IDIST__INT8_CHUNK_NBYTES = sizeof(float) + IDIST__INT8_CHUNK }; // the scale, then the bytes

// The members other than `send` are used for bytes only.
typedef struct idist__compress_state {
    void *send, *recv;
    void *error;       // floats: what the first rounding took from each gradient of the bucket
    void *block_error; // floats: what the second rounding took, in the block of this rank
    size_t block;      // gradients in a block, a multiple of IDIST__INT8_CHUNK
} idist__compress_state;

static size_t idist__compress_block_nbytes(const idist__compress_state *state) {
    return state->block / IDIST__INT8_CHUNK * IDIST__INT8_CHUNK_NBYTES;
}

// free_fn of the hooks.
static void idist__compress_free(void *data, void *arg) {
    const idist__memory *memory = &((const idist__reduction *)arg)->memory;
    idist__compress_state *state = (idist__compress_state *)data;

    idist__tensor_memory_free(memory, state->send);
    idist__tensor_memory_free(memory, state->recv);
    idist__tensor_memory_free(memory, state->error);
    idist__tensor_memory_free(memory, state->block_error);
    free(state);
}

// If this fails half-way, the bucket has a state nevertheless, and idist__compress_free frees it.
static idist_status idist__compress_alloc(const idist__reduction *reduction, idist_bucket *b) {
    idist__compress_state *state = (idist__compress_state *)calloc(1, sizeof *state);
    const idist__memory *memory = &reduction->memory;
    size_t ranks = (size_t)reduction->group_size, nbytes, granule = ranks * IDIST__INT8_CHUNK;
    idist_status status = IDIST_OK;

    if (!state)
        return idist__fail(IDIST_ERR_NO_MEMORY, "ddp_create: no memory to compress a bucket");
    b->state = state;

    if (reduction->wire != IDIST_I8) {
        nbytes = (b->count + 1) * 2;
        return idist__tensor_memory_alloc(memory, &state->send, nbytes);
    }

    state->block = (b->count + granule - 1) / granule * IDIST__INT8_CHUNK;
    nbytes = ranks * idist__compress_block_nbytes(state);
    status =
        idist__tensor_memory_alloc(memory, &state->error, ranks * state->block * sizeof(float));
    if (status == IDIST_OK)
        status =
            idist__tensor_memory_alloc(memory, &state->block_error, state->block * sizeof(float));
    if (status == IDIST_OK) status = idist__tensor_memory_alloc(memory, &state->recv, nbytes);
    if (status == IDIST_OK) status = idist__tensor_memory_alloc(memory, &state->send, nbytes);

    return status;
}

//------------------------------------------------------------------------------
// buckets sent as 16-bit floats
//
// The bucket is rounded to 16 bits, reduced (in float, rounded once more) and widened.
//------------------------------------------------------------------------------

enum { IDIST__HALF_PIECE = 256 }; // elements converted at once

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
    char *wire = (char *)((idist__compress_state *)b->state)->send;

    idist__half_pack(b, wire, reduction->wire);
    return idist_all_reduce(wire, wire, b->count, reduction->wire, reduction->op, &b->opts);
}

static idist_status idist__half_finish(idist_bucket *b, void *arg) {
    const idist__reduction *reduction = (const idist__reduction *)arg;
    const char *wire = (const char *)((const idist__compress_state *)b->state)->send;

    idist__half_unpack(b, wire, reduction->wire);
    return idist__tensor_memory_scale(&reduction->memory, b->data, b->count, b->dtype,
                                      reduction->postscale);
}
