// ring/algo/direct.h: one message per pair of ranks: gather, scatter, all_to_all, v-forms
//
// A rank sends all data for another rank in one message. In step s, a rank sends to rank + 1 + s
// and receives from rank - 1 - s (mod n). So no two ranks send to the same rank in the same step:
//
//   n = 4    step 0   step 1   step 2
//   rank 0   -> 1     -> 2     -> 3
//   rank 1   -> 2     -> 3     -> 0
//   rank 2   -> 3     -> 0     -> 1
//   rank 3   -> 0     -> 1     -> 2
//
//   bytes sent per rank   B (n - 1) for all_to_all; B to or from the root for gather and scatter
//   latency               n - 1 messages, up to 8 at a time in each direction
//
// Each byte is sent only once. Trees and Bruck's algorithm forward blocks through other ranks. The
// v-forms gatherv, scatterv and all_to_allv always work this way, because only the two ends of a
// message know its size.
//
// The tag of a message is the distance between its two ranks, which both ends know.
//
// COSTS in ring/algo/choose.h defines B.
#pragma once

#include "core/kind.h"
#include "core/model.h"
#include "core/extent.h"
#include "ring/msg/op.h"
#include "ring/msg/send.h"
#include "ring/msg/recv.h"

enum { IDIST__DIRECT_MESSAGES = 8 }; // maximum messages in progress in each direction

// Returns the message to or from a peer. If the peer is our own rank, returns our block for
// ourselves, or the place of this block in the result.
static idist__item idist__direct_item(const idist__task *t, int peer, bool receives) {
    const idist__op *op = idist__op_of(t);
    const idist__call *call = &t->call;
    const size_t *counts = receives ? call->recvcounts : call->sendcounts;
    const size_t *displs = receives ? call->recvdispls : call->senddispls;
    const char *buffer = receives ? op->out : op->in;
    size_t count = counts ? counts[peer] : op->count;
    size_t at = 0;
    bool has_block_per_rank;
    idist__item item;

    if (receives)
        has_block_per_rank = call->kind != IDIST__SCATTER && call->kind != IDIST__SCATTERV;
    else has_block_per_rank = call->kind != IDIST__GATHER && call->kind != IDIST__GATHERV;
    if (has_block_per_rank)
        at = counts ? idist__extent_displ(counts, displs, peer) : (size_t)peer * op->count;

    item.peer = peer;
    item.nbytes = count * op->size;
    item.data = (char *)(uintptr_t)buffer + at * op->size;

    return item;
}

// Returns the peer at this distance. On a rank other than the root of a gather or scatter, returns
// the root.
static int idist__direct_peer(const idist__task *t, int distance) {
    const idist__op *op = idist__op_of(t);
    if (idist__kind_has_root(t->call.kind) && op->rank != op->root) return op->root;
    return idist__block_wrap(op->rank + distance, op->n);
}

static idist__item idist__direct_recv(idist__task *t, size_t index) {
    return idist__direct_item(t, idist__direct_peer(t, -1 - (int)index), true);
}

static idist__item idist__direct_send(idist__task *t, size_t index) {
    return idist__direct_item(t, idist__direct_peer(t, 1 + (int)index), false);
}

// Posts as many receives and sends as the limit on messages in progress allows. Unlike in
// idist__stream_run, no send waits for a receive.
static void idist__direct_run(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__direct_op *state = &op->u.direct;

    for (;;) {
        while (state->posted < state->recv_total && op->recvs_pending < IDIST__DIRECT_MESSAGES) {
            idist__item item = idist__direct_recv(t, state->posted++);
            idist__recv_step(t, -1, item.peer,
                             (uint32_t)idist__block_wrap(op->rank - item.peer, op->n), item.data,
                             item.nbytes);
        }

        if (state->sent == state->send_total || op->sends_pending >= IDIST__DIRECT_MESSAGES) break;

        {
            idist__item item = idist__direct_send(t, state->sent++);
            idist__send_step(t, item.peer, (uint32_t)idist__block_wrap(item.peer - op->rank, op->n),
                             item.data, item.nbytes);
        }
    }

    if (state->posted == state->recv_total && !op->recvs_pending &&
        state->sent == state->send_total && !op->sends_pending)
        idist__op_done(t);
}

static void idist__direct_begin(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__kind kind = t->call.kind;
    bool scatters = kind == IDIST__SCATTER || kind == IDIST__SCATTERV;
    bool is_root = op->rank == op->root;
    size_t recv_count = (size_t)(op->n - 1);
    size_t send_count = (size_t)(op->n - 1);

    if (idist__kind_has_root(kind)) {
        size_t peers = is_root ? (size_t)(op->n - 1) : 1;
        bool sends = scatters == is_root;
        send_count = sends ? peers : 0;
        recv_count = sends ? 0 : peers;
    }

    if (!idist__kind_has_root(kind) || is_root) { // our own part
        idist__item from = idist__direct_item(t, op->rank, false);
        idist__item to = idist__direct_item(t, op->rank, true);
        idist__block_copy(to.data, from.data, to.nbytes);
    }

    op->u.direct.recv_total = recv_count;
    op->u.direct.send_total = send_count;
    op->run = idist__direct_run;
}

// Begins an all_to_all. In place, received messages would overwrite blocks that are not sent yet,
// so the contribution is first copied to scratch memory.
static void idist__direct_all_to_all(idist__task *t) {
    idist__op *op = idist__op_of(t);

    if (t->call.send == t->call.recv && op->nbytes) {
        idist__block_copy(op->work, op->in, (size_t)op->n * op->nbytes);
        op->in = op->work;
    }

    idist__direct_begin(t);
}
