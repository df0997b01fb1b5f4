// ring/algo/bruck.h: all_gather and all_to_all of small messages
//
// Both algorithms (Bruck et al. 1997) need log n rounds for any n, which need not be a power of
// two.
//
// all_gather. After round k, rank r holds the blocks r, r + 1, ... r + 2^(k+1) - 1 (mod n) in
// scratch memory, in this order. The last round fetches only the blocks that are missing. At the
// end, the blocks are rotated into place:
//
//   n = 5, rank 3    start: 3     round 0: 3 4     round 1: 3 4 0 1     round 2: 3 4 0 1 2
//
//   bytes sent per rank   B (n - 1), as in a ring
//   latency               log n messages instead of n - 1
//
// all_to_all. The blocks of rank r are numbered by the distance that they have to travel: block i
// is for rank r + i (mod n). In round k, all blocks whose number has bit k set travel 2^k ranks in
// one message. So each block arrives in the round of its highest set bit:
//
//   n = 8            round 0: 1 rank     round 1: 2 ranks     round 2: 4 ranks
//   blocks sent      1 3 5 7             2 3 6 7              4 5 6 7
//
//   bytes sent per rank   B n/2 log n: blocks travel up to log n times
//   latency               log n messages instead of n - 1
//
// COSTS in ring/algo/choose.h defines B and log.
#pragma once

#include "core/model.h"
#include "core/extent.h"
#include "ring/msg/op.h"
#include "ring/msg/send.h"
#include "ring/msg/recv.h"

static void idist__bruck_all_gather(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__bruck_op *state = &op->u.bruck;
    int n = op->n;
    int rank = op->rank;
    int blocks;

    IDIST__CO_BEGIN(op)
    idist__block_copy(op->work, op->in, op->nbytes);

    for (state->distance = 1; state->distance < n; state->distance *= 2) {
        blocks = state->distance < n - state->distance ? state->distance : n - state->distance;
        idist__recv_step(t, 0, idist__block_wrap(rank + state->distance, n),
                         (uint32_t)state->distance, op->work + (size_t)state->distance * op->nbytes,
                         (size_t)blocks * op->nbytes);
        idist__send_step(t, idist__block_wrap(rank - state->distance, n), (uint32_t)state->distance,
                         op->work, (size_t)blocks * op->nbytes);
        IDIST__CO_AWAIT(op, !op->slots_pending && !op->sends_pending);
    }

    idist__block_copy(op->out + (size_t)rank * op->nbytes, op->work,
                      (size_t)(n - rank) * op->nbytes);
    idist__block_copy(op->out, op->work + (size_t)(n - rank) * op->nbytes,
                      (size_t)rank * op->nbytes);
    idist__op_done(t);
    IDIST__CO_END(op)
}

// Copies the blocks that travel over this distance to `packed`, or back from `packed` if `unpack`
// is true. Returns the number of these blocks.
static size_t idist__bruck_pack(const idist__op *op, int distance, char *packed, bool unpack) {
    size_t blocks = 0;
    int i;

    for (i = 0; i < op->n; i++) {
        char *block = op->work + (size_t)i * op->nbytes;
        char *in_pack = packed + blocks * op->nbytes;

        if (!(i & distance)) continue;
        if (unpack) idist__block_copy(block, in_pack, op->nbytes);
        else idist__block_copy(in_pack, block, op->nbytes);
        blocks++;
    }

    return blocks;
}

// Runs an all_to_all. The scratch memory holds n blocks, the blocks to send, and the blocks
// received.
static void idist__bruck_all_to_all(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__bruck_op *state = &op->u.bruck;
    int n = op->n;
    int rank = op->rank;
    int i;
    char *packed = op->work + (size_t)n * op->nbytes;
    char *received = packed + (size_t)n * op->nbytes;

    IDIST__CO_BEGIN(op)

    for (i = 0; i < n; i++)
        idist__block_copy(op->work + (size_t)i * op->nbytes,
                          op->in + (size_t)idist__block_wrap(rank + i, n) * op->nbytes, op->nbytes);

    for (state->distance = 1; state->distance < n; state->distance *= 2) {
        state->packed_blocks = idist__bruck_pack(op, state->distance, packed, false);
        idist__recv_step(t, 0, idist__block_wrap(rank - state->distance, n),
                         (uint32_t)state->distance, received, state->packed_blocks * op->nbytes);
        idist__send_step(t, idist__block_wrap(rank + state->distance, n), (uint32_t)state->distance,
                         packed, state->packed_blocks * op->nbytes);
        IDIST__CO_AWAIT(op, !op->slots_pending && !op->sends_pending);
        idist__bruck_pack(op, state->distance, received, true);
    }

    // Block i came from the rank that is i ranks before us.
    for (i = 0; i < n; i++)
        idist__block_copy(op->out + (size_t)idist__block_wrap(rank - i, n) * op->nbytes,
                          op->work + (size_t)i * op->nbytes, op->nbytes);

    idist__op_done(t);
    IDIST__CO_END(op)
}
