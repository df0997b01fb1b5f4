// ring/algo/tree.h: barrier; broadcast, reduce, gather and scatter of small messages
//
// Functions: idist__tree_*, idist__dissemination_*.
#pragma once

#include "core/model.h"
#include "core/extent.h"
#include "core/matching.h"
#include "ring/msg/op.h"
#include "ring/msg/combine.h"
#include "ring/msg/send.h"
#include "ring/msg/recv.h"

//------------------------------------------------------------------------------
// barrier
//
// In round k, rank r signals rank r + 2^k and waits for rank r - 2^k (mod n). After log n rounds,
// each rank has learned, directly or through other ranks, that all n ranks have entered (Hensgen,
// Finkel, Manber 1988):
//
// n = 5, ranks that have entered, as known to rank 0 after each round:
//
//   round 0: 0 4     round 1: 0 4 3 2     round 2: 0 4 3 2 1
//
//   bytes sent per rank   none: log n empty messages
//   latency               log n, for any n
//
// This algorithm and the following ones are straight-line code between CO_BEGIN and CO_END; see
// ring/msg/op.h. State that must survive a CO_AWAIT is stored in idist__op. For a barrier, this
// state is 2^k.
//------------------------------------------------------------------------------

static void idist__dissemination_run(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__dissemination_op *state = &op->u.dissemination;
    int n = op->n;
    int rank = op->rank;

    IDIST__CO_BEGIN(op)

    for (state->distance = 1; state->distance < n; state->distance *= 2) {
        idist__recv_step(t, 0, idist__block_wrap(rank - state->distance, n),
                         (uint32_t)state->distance, NULL, 0);
        idist__send_step(t, idist__block_wrap(rank + state->distance, n), (uint32_t)state->distance,
                         NULL, 0);
        IDIST__CO_AWAIT(op, !op->slots_pending);
    }

    IDIST__CO_AWAIT(op, !op->sends_pending);
    idist__op_done(t);
    IDIST__CO_END(op)
}

//------------------------------------------------------------------------------
// broadcast, reduce, gather and scatter of small messages
//
// The ranks form a binomial tree over v, the number of a rank counted from the root. The parent of
// v is v without its lowest set bit. The children of v are v plus each power of two below that bit:
//
//               0
//         ______|______
//        4      2      1        n = 8. The subtree of v is v .. v + (lowest set bit) - 1, a run of
//       / \     |               consecutive ranks. So in a gather or scatter, each rank holds one
//      6   5    3               run of blocks.
//      |
//      7
//
//   bytes sent per rank   broadcast, reduce: B to each child or to the parent; gather, scatter: the
//                         blocks of a whole subtree in one message
//   latency               log n messages in sequence
//
// A broadcast or scatter starts with the child that has the largest subtree. A reduce or gather
// uses the same tree in the other direction.
//
// COSTS in ring/algo/choose.h defines B and log.
//------------------------------------------------------------------------------

// Returns our v. A reduction with an operation that does not commute uses a tree whose root is rank
// 0. Such a tree keeps the order of the ranks.
static int idist__tree_relative_rank(const idist__task *t) {
    const idist__op *op = idist__op_of(t);
    bool commutes = !op->user || op->user->commutative;
    bool from_root = t->call.kind != IDIST__REDUCE || commutes;

    return from_root ? idist__block_wrap(op->rank - op->root, op->n) : op->rank;
}

// Returns the distance from v to its parent, which is the lowest set bit of v. For the root,
// returns the smallest power of two that is not below n.
static int idist__tree_distance(int v, int n) {
    int distance;
    for (distance = 1; distance < n && !(v & distance); distance *= 2) continue;
    return distance;
}

// Returns the number of ranks in the subtree of v, including v.
static int idist__tree_size(int v, int n) {
    int distance = idist__tree_distance(v, n);
    return v + distance < n ? distance : n - v;
}

static void idist__tree_broadcast(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__tree_op *state = &op->u.tree;
    int n = op->n;
    int v = idist__tree_relative_rank(t);

    IDIST__CO_BEGIN(op)
    state->distance = idist__tree_distance(v, n);

    if (v) {
        idist__recv_step(t, 0, idist__block_wrap(v - state->distance + op->root, n), 0, op->out,
                         op->nbytes);
        IDIST__CO_AWAIT(op, !op->slots_pending);
    }

    // A large message is sent to one child after another, starting with the child that has the
    // largest subtree. If it were sent to all children at the same time, even the first child would
    // receive the whole message only at the end.
    for (state->distance /= 2; state->distance; state->distance /= 2) {
        if (v + state->distance >= n) continue;
        idist__send_step(t, idist__block_wrap(v + state->distance + op->root, n), 0, op->out,
                         op->nbytes);
        IDIST__CO_AWAIT(op, !op->sends_pending || op->nbytes <= IDIST__EAGER_BYTES);
    }

    IDIST__CO_AWAIT(op, !op->sends_pending);
    idist__op_done(t);
    IDIST__CO_END(op)
}

// Runs a reduce. Our sum covers the ranks v .. v + distance - 1. The sum that arrives covers the
// next `distance` ranks, so the order of the ranks is kept. If the operation does not commute, v is
// the rank, and rank 0 sends the result to the root.
//
// The scratch memory holds the sum, followed by one received message.
static void idist__tree_reduce(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__tree_op *state = &op->u.tree;
    int n = op->n;
    int v = idist__tree_relative_rank(t);
    int base = idist__block_wrap(op->rank - v, n); // the rank with v = 0
    char *received = op->work + op->nbytes;

    IDIST__CO_BEGIN(op)
    idist__block_copy(op->work, op->in, op->nbytes);

    for (state->distance = 1; state->distance < n && !(v & state->distance); state->distance *= 2) {
        if (v + state->distance >= n) continue;
        idist__recv_step(t, 0, idist__block_wrap(v + state->distance + base, n), 0, received,
                         op->nbytes);
        IDIST__CO_AWAIT(op, !op->slots_pending);
        idist__combine(t, op->work, op->work, received, op->count, t->call.dtype);
    }

    if (v)
        idist__send_step(t, idist__block_wrap(v - state->distance + base, n), 0, op->work,
                         op->nbytes);
    else if (op->rank != op->root) idist__send_step(t, op->root, 1, op->work, op->nbytes);

    if (op->rank == op->root && v) {
        idist__recv_step(t, 0, base, 1, op->out, op->nbytes);
        IDIST__CO_AWAIT(op, !op->slots_pending);
    } else if (op->rank == op->root) {
        idist__block_copy(op->out, op->work, op->nbytes);
    }

    IDIST__CO_AWAIT(op, !op->sends_pending);
    idist__op_done(t);
    IDIST__CO_END(op)
}

// Runs a gather. The scratch memory holds the blocks of v, v + 1, ... in this order. The root
// copies the blocks to their places in the result.
static void idist__tree_gather(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__tree_op *state = &op->u.tree;
    int n = op->n;
    int v = idist__tree_relative_rank(t);
    int i;

    IDIST__CO_BEGIN(op)
    idist__block_copy(op->work, op->in, op->nbytes);

    for (state->distance = 1; state->distance < n && !(v & state->distance); state->distance *= 2)
        if (v + state->distance < n)
            idist__recv_step(t, -1, idist__block_wrap(v + state->distance + op->root, n), 0,
                             op->work + (size_t)state->distance * op->nbytes,
                             (size_t)idist__tree_size(v + state->distance, n) * op->nbytes);

    IDIST__CO_AWAIT(op, !op->recvs_pending);

    if (v)
        idist__send_step(t, idist__block_wrap(v - state->distance + op->root, n), 0, op->work,
                         (size_t)idist__tree_size(v, n) * op->nbytes);
    else
        for (i = 0; i < n; i++)
            idist__block_copy(op->out + (size_t)idist__block_wrap(i + op->root, n) * op->nbytes,
                              op->work + (size_t)i * op->nbytes, op->nbytes);

    IDIST__CO_AWAIT(op, !op->sends_pending);
    idist__op_done(t);
    IDIST__CO_END(op)
}

// Runs a scatter. The scratch memory holds the blocks of v, v + 1, ... in this order.
static void idist__tree_scatter(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__tree_op *state = &op->u.tree;
    int n = op->n;
    int v = idist__tree_relative_rank(t);
    int i;

    IDIST__CO_BEGIN(op)
    state->distance = idist__tree_distance(v, n);

    if (v) {
        idist__recv_step(t, 0, idist__block_wrap(v - state->distance + op->root, n), 0, op->work,
                         (size_t)idist__tree_size(v, n) * op->nbytes);
        IDIST__CO_AWAIT(op, !op->slots_pending);
    } else {
        for (i = 0; i < n; i++)
            idist__block_copy(op->work + (size_t)i * op->nbytes,
                              op->in + (size_t)idist__block_wrap(i + op->root, n) * op->nbytes,
                              op->nbytes);
    }

    for (state->distance /= 2; state->distance; state->distance /= 2)
        if (v + state->distance < n)
            idist__send_step(t, idist__block_wrap(v + state->distance + op->root, n), 0,
                             op->work + (size_t)state->distance * op->nbytes,
                             (size_t)idist__tree_size(v + state->distance, n) * op->nbytes);

    IDIST__CO_AWAIT(op, !op->sends_pending);
    idist__block_copy(op->out, op->work, op->nbytes);
    idist__op_done(t);
    IDIST__CO_END(op)
}
