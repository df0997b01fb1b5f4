// train/compress/int8.h: buckets sent as bytes with error feedback
//
// After Seide et al., 1-bit SGD (2014), who used one bit. 1,024 gradients share a scale by which
// the largest of them becomes 127. What rounding takes from each is added to the same gradient in
// the next iteration, so that nothing is lost over time. Bytes cannot be summed on the way, so a
// bucket is reduced in two steps, each block of it by a rank of its own. The second rounding has an
// error and a feedback as well:
//
//     rank 0   [block 0 | block 1 | block 2]     all_to_all: block k of every rank to rank k
//     rank 1   [block 0 | block 1 | block 2]     rank k: to float, sum, scale, round again
//     rank 2   [block 0 | block 1 | block 2]     all_gather: every rank gets the same bytes
//
// Bytes sent per gradient: 2 (n-1)/n * 1.004, compared with 8 (n-1)/n of an all_reduce of floats.
#pragma once

#include "train/compress/compress.h"

// Rounds x to bytes and leaves in x what that took. A chunk with a value that is not finite becomes
// all NaN.
static void idist__int8_pack(float *x, size_t count, char *to) {
    size_t first, i;

    for (first = 0; first < count; first += IDIST__INT8_CHUNK, to += IDIST__INT8_CHUNK_NBYTES) {
        signed char *bytes = (signed char *)to + sizeof(float);
        float *chunk = x + first;
        float largest = 0, not_finite = 0, scale, inverse;

        for (i = 0; i < IDIST__INT8_CHUNK; i++) {
            float size = chunk[i] < 0 ? -chunk[i] : chunk[i];

            largest = size > largest ? size : largest;
            not_finite += chunk[i] - chunk[i]; // NaN for NaN and infinity, otherwise 0
        }

        scale = largest / 127 + not_finite;
        inverse = scale > 0 ? 1 / scale : 0;
        if (!(inverse <= 3.4e38f)) inverse = 0; // gradients so small that they do not matter

        for (i = 0; i < IDIST__INT8_CHUNK; i++) {
            float v = chunk[i] * inverse;
            int byte = not_finite == 0 ? (int)(v < 0 ? v - 0.5f : v + 0.5f) : 0;

            bytes[i] = (signed char)byte;
            chunk[i] = not_finite == 0 ? chunk[i] - (float)byte * scale : 0;
        }

        memcpy(to, &scale, sizeof scale);
    }
}

static float idist__int8_scale(const char *chunk) {
    float scale;

    memcpy(&scale, chunk, sizeof scale);
    return scale;
}

static idist_status idist__int8_start(idist_bucket *b, void *arg) {
    const idist__reduction *reduction = (const idist__reduction *)arg;
    idist__compress_state *state = (idist__compress_state *)b->state;
    float *error = (float *)state->error;
    size_t i;

    if (b->dtype == IDIST_F32)
        for (i = 0; i < b->count; i++) error[i] += ((const float *)b->data)[i];
    else
        for (i = 0; i < b->count; i++) error[i] += (float)((const double *)b->data)[i];
    idist__int8_pack(error, (size_t)reduction->group_size * state->block, (char *)state->send);

    return idist_all_to_all(state->send, state->recv, idist__compress_block_nbytes(state), IDIST_U8,
                            &b->opts);
}

// Adds the scaled bytes of one rank to the block's sum. Returns the address behind these bytes.
static const char *idist__int8_add(float *sum, size_t block, const char *from, float factor) {
    size_t first, i;

    for (first = 0; first < block; first += IDIST__INT8_CHUNK, from += IDIST__INT8_CHUNK_NBYTES) {
        const signed char *bytes = (const signed char *)from + sizeof(float);
        float scale = idist__int8_scale(from) * factor;

        for (i = 0; i < IDIST__INT8_CHUNK; i++) sum[first + i] += (float)bytes[i] * scale;
    }

    return from;
}

static void idist__int8_unpack(const idist_bucket *b, const char *from) {
    size_t first, i;

    for (first = 0; first < b->count;
         first += IDIST__INT8_CHUNK, from += IDIST__INT8_CHUNK_NBYTES) {
        const signed char *bytes = (const signed char *)from + sizeof(float);
        float scale = idist__int8_scale(from);
        size_t count = b->count - first;

        if (count > IDIST__INT8_CHUNK) count = IDIST__INT8_CHUNK;
        if (b->dtype == IDIST_F32)
            for (i = 0; i < count; i++) ((float *)b->data)[first + i] = (float)bytes[i] * scale;
        else
            for (i = 0; i < count; i++) ((double *)b->data)[first + i] = (float)bytes[i] * scale;
    }
}

static idist_status idist__int8_finish(idist_bucket *b, void *arg) {
    const idist__reduction *reduction = (const idist__reduction *)arg;
    idist__compress_state *state = (idist__compress_state *)b->state;
    float *sum = (float *)state->block_error; // starts with the error of the last rounding
    const char *from = (const char *)state->recv;
    int rank;
    idist_status status;

    for (rank = 0; rank < reduction->group_size; rank++)
        from = idist__int8_add(sum, state->block, from, (float)b->scale);
    idist__int8_pack(sum, state->block, (char *)state->send);
    status = idist_all_gather(state->send, state->recv, idist__compress_block_nbytes(state),
                              IDIST_U8, &b->opts);
    if (status == IDIST_OK) idist__int8_unpack(b, (const char *)state->recv);

    return status;
}
