// ring/algo/doubling.h: all_reduce, reduce_scatter, scan and exscan of small messages
//
// Recursive doubling. In round k, partners at distance 2^k exchange their sums and add them. After
// log n rounds, every rank has the sum over all ranks:
//
//   n = 4     rank 0      rank 1      rank 2      rank 3
//   start     0           1           2           3
//   round 0   0 1 <-----> 0 1         2 3 <-----> 2 3
//   round 1   0 1 2 3     0 1 2 3     0 1 2 3     0 1 2 3      0 <-> 2, 1 <-> 3
//
//   bytes sent per rank   B log n (for reduce_scatter, B is all n blocks)
//   latency               log n messages, the least possible
//
// The sum of a partner covers the ranks just below or just above the ranks of our sum. So the order
// of the ranks is kept, and all ranks combine the same operands in the same order.
//
// If n is not a power of two, let p be the largest power of two below n. The first 2 (n - p) ranks
// form pairs. The odd rank of a pair sends its contribution to the even rank, sits out the rounds,
// and receives the result at the end:
//
//   n = 6, p = 4    1 -> 0, 3 -> 2;   0, 2, 4, 5 act as ranks 0, 1, 2, 3;   0 -> 1, 2 -> 3
//
// Scans (Hillis and Steele). In round k, rank r sends its sum to rank r + 2^k, and adds the sum
// that it receives from rank r - 2^k. The sum then covers the 2^(k+1) ranks up to r. At the end of
// an exscan, each rank sends its prefix to the next rank.
//
// COSTS in ring/algo/choose.h defines B and log.
#pragma once

#include "core/kind.h"
#include "core/model.h"
#include "core/extent.h"
#include "ring/msg/op.h"
#include "ring/msg/combine.h"
#include "ring/msg/send.h"
#include "ring/msg/recv.h"

enum { IDIST__DOUBLING_RESULT = 1 << 30 }; // tag of a finished result

// Returns p, or n if n is a power of two. Computes the value once per call.
static int idist__doubling_active_ranks(idist__doubling_op *state, int n) {
    if (!state->active_ranks) state->active_ranks = 1;
    while (state->active_ranks * 2 <= n) state->active_ranks *= 2;
    return state->active_ranks;
}

// Runs an all_reduce or a reduce_scatter. An all_reduce builds the sum in the receive buffer; a
// reduce_scatter builds the sum in scratch memory. The rest of the scratch memory holds one
// received message.
static void idist__doubling_reduce(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__doubling_op *state = &op->u.doubling;
    int rank = op->rank;
    int excess = op->n - idist__doubling_active_ranks(state, op->n);
    int partner;
    bool is_paired = rank < 2 * excess;
    bool sits_out = is_paired && rank % 2;
    int number = is_paired ? rank / 2 : rank - excess; // our number among the p ranks that exchange
    bool scatter = idist__kind_scatters_sum(t->call.kind);
    size_t count = scatter ? idist__extent_block_at(&t->call, op->n) : op->count;
    size_t nbytes = count * op->size;
    char *sum = scatter ? op->work : op->out;
    char *received = scatter ? op->work + nbytes : op->work;

    IDIST__CO_BEGIN(op)
    idist__block_copy(sum, op->in, nbytes);

    if (sits_out) {
        idist__send_step(t, rank - 1, 0, sum, nbytes);
    } else if (is_paired) {
        idist__recv_step(t, 0, rank + 1, 0, received, nbytes);
        IDIST__CO_AWAIT(op, !op->slots_pending);
        idist__combine(t, sum, sum, received, count, t->call.dtype);
    }

    for (state->distance = 1; state->distance < state->active_ranks && !sits_out;
         state->distance *= 2) {
        partner = number ^ state->distance;
        partner = partner < excess ? 2 * partner : partner + excess;
        idist__recv_step(t, 0, partner, (uint32_t)state->distance, received, nbytes);
        idist__send_step(t, partner, (uint32_t)state->distance, sum, nbytes);
        IDIST__CO_AWAIT(op, !op->slots_pending && !op->sends_pending);
        if (number & state->distance) idist__combine(t, sum, received, sum, count, t->call.dtype);
        else idist__combine(t, sum, sum, received, count, t->call.dtype);
    }

    if (sits_out) {
        IDIST__CO_AWAIT(op, !op->sends_pending);
        idist__recv_step(t, 0, rank - 1, IDIST__DOUBLING_RESULT, sum, nbytes);
    } else if (is_paired) {
        idist__send_step(t, rank + 1, IDIST__DOUBLING_RESULT, sum, nbytes);
    }

    IDIST__CO_AWAIT(op, !op->slots_pending && !op->sends_pending);
    if (scatter)
        idist__block_copy(op->out, sum + idist__extent_block_at(&t->call, rank) * op->size,
                          op->nbytes);
    idist__op_done(t);
    IDIST__CO_END(op)
}

// Runs a scan or an exscan. The scratch memory holds the sum, followed by one received message.
static void idist__doubling_scan(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__doubling_op *state = &op->u.doubling;
    int n = op->n;
    int rank = op->rank;
    char *sum = op->work;
    char *received = op->work + op->nbytes;

    IDIST__CO_BEGIN(op)
    idist__block_copy(sum, op->in, op->nbytes);

    for (state->distance = 1; state->distance < n; state->distance *= 2) {
        if (rank >= state->distance)
            idist__recv_step(t, 0, rank - state->distance, (uint32_t)state->distance, received,
                             op->nbytes);
        if (rank + state->distance < n)
            idist__send_step(t, rank + state->distance, (uint32_t)state->distance, sum, op->nbytes);
        IDIST__CO_AWAIT(op, !op->slots_pending && !op->sends_pending);
        if (rank >= state->distance)
            idist__combine(t, sum, received, sum, op->count, t->call.dtype);
    }

    if (t->call.kind == IDIST__SCAN) {
        idist__block_copy(op->out, sum, op->nbytes);
    } else {
        if (rank) idist__recv_step(t, 0, rank - 1, IDIST__DOUBLING_RESULT, op->out, op->nbytes);
        if (rank + 1 < n) idist__send_step(t, rank + 1, IDIST__DOUBLING_RESULT, sum, op->nbytes);
    }

    IDIST__CO_AWAIT(op, !op->slots_pending && !op->sends_pending);
    idist__op_done(t);
    IDIST__CO_END(op)
}
