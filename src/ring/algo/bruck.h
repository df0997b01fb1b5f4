// ring/algo/bruck.h: all_gather and all_to_all of small messages
//
// Both algorithms (Bruck et al. 1997) need log n rounds for any n; a power of two is not special.
//
// all_gather. After round k rank r holds the blocks r, r + 1, ... r + 2^(k+1) - 1 (mod n) in
// scratch, in this order; the last round fetches only what is missing. At the end the run is
// rotated into place:
//
//   n = 5, rank 3    start: 3     round 0: 3 4     round 1: 3 4 0 1     round 2: 3 4 0 1 2
//
//   bytes sent per rank   B (n - 1), as in a ring
//   latency               log n messages instead of n - 1
//
// all_to_all. Number the blocks by the distance they have to travel: block i is for the rank i
// further on. In round k all blocks whose number has bit k travel 2^k ranks in one message, so each
// block arrives after the rounds of its bits:
//
//   n = 8            round 0: 1 rank     round 1: 2 ranks     round 2: 4 ranks
//   blocks sent      1 3 5 7             2 3 6 7              4 5 6 7
//
//   bytes sent per rank   B n/2 log n: blocks travel up to log n times
//   latency               log n messages instead of n - 1
#pragma once

#include "core/model.h"
#include "core/extent.h"
#include "ring/msg/op.h"
#include "ring/msg/send.h"
#include "ring/msg/recv.h"

static void idist__bruck_all_gather(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__bruck_op *state = &o->u.bruck;
    int n = o->n;
    int rank = o->rank;
    int blocks;

    IDIST__CO_BEGIN(o)
    idist__block_copy(o->work, o->in, o->nbytes);

    for (state->distance = 1; state->distance < n; state->distance *= 2) {
        blocks = state->distance < n - state->distance ? state->distance : n - state->distance;
        idist__recv_step(t, 0, idist__block_wrap(rank + state->distance, n),
                         (uint32_t)state->distance, o->work + (size_t)state->distance * o->nbytes,
                         (size_t)blocks * o->nbytes);
        idist__send_step(t, idist__block_wrap(rank - state->distance, n), (uint32_t)state->distance,
                         o->work, (size_t)blocks * o->nbytes);
        IDIST__CO_AWAIT(o, !o->slots_pending && !o->sends_pending);
    }

    idist__block_copy(o->out + (size_t)rank * o->nbytes, o->work, (size_t)(n - rank) * o->nbytes);
    idist__block_copy(o->out, o->work + (size_t)(n - rank) * o->nbytes, (size_t)rank * o->nbytes);
    idist__op_done(t);
    IDIST__CO_END(o)
}

// Copies the blocks that travel over this distance into `packed`, or back. Returns how many there
// are.
static size_t idist__bruck_pack(const idist__op *o, int distance, char *packed, bool unpack) {
    size_t blocks = 0;
    int i;

    for (i = 0; i < o->n; i++) {
        char *block = o->work + (size_t)i * o->nbytes;
        char *in_pack = packed + blocks * o->nbytes;

        if (!(i & distance)) continue;
        if (unpack) idist__block_copy(block, in_pack, o->nbytes);
        else idist__block_copy(in_pack, block, o->nbytes);
        blocks++;
    }

    return blocks;
}

// Scratch: n blocks, the blocks to send, the blocks received.
static void idist__bruck_all_to_all(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__bruck_op *state = &o->u.bruck;
    int n = o->n;
    int rank = o->rank;
    int i;
    char *packed = o->work + (size_t)n * o->nbytes;
    char *received = packed + (size_t)n * o->nbytes;

    IDIST__CO_BEGIN(o)

    for (i = 0; i < n; i++)
        idist__block_copy(o->work + (size_t)i * o->nbytes,
                          o->in + (size_t)idist__block_wrap(rank + i, n) * o->nbytes, o->nbytes);

    for (state->distance = 1; state->distance < n; state->distance *= 2) {
        state->packed_blocks = idist__bruck_pack(o, state->distance, packed, false);
        idist__recv_step(t, 0, idist__block_wrap(rank - state->distance, n),
                         (uint32_t)state->distance, received, state->packed_blocks * o->nbytes);
        idist__send_step(t, idist__block_wrap(rank + state->distance, n), (uint32_t)state->distance,
                         packed, state->packed_blocks * o->nbytes);
        IDIST__CO_AWAIT(o, !o->slots_pending && !o->sends_pending);
        idist__bruck_pack(o, state->distance, received, true);
    }

    // Block i has come from the rank i before us.
    for (i = 0; i < n; i++)
        idist__block_copy(o->out + (size_t)idist__block_wrap(rank - i, n) * o->nbytes,
                          o->work + (size_t)i * o->nbytes, o->nbytes);

    idist__op_done(t);
    IDIST__CO_END(o)
}
