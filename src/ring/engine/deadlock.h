// ring/engine/deadlock.h: finds two ranks that wait for each other in different calls
//
// Ranks compare the fingerprints of their calls. But calls on different groups, or a receive and a
// collective, exchange no fingerprints. Therefore a rank that has waited for a while sends a WAITS
// frame. Two ranks can never proceed if all of the following is true of each of them:
//
//   - the rank has one thread and one call in progress, which blocks without its own time-out, so
//     it can do nothing else;
//   - the call needs a transfer that only the other rank can begin; or it is a collective that no
//     rank completes before all have entered it, and the other rank waits in a send or receive
//     instead;
//   - the other rank has not begun the missing transfer, and nothing in transit can replace it.
//
// In case of doubt, no deadlock is reported, and the call fails at its deadline. Another thread, a
// request, or a group that no longer exists here is a reason for doubt.
#pragma once

#include "launch/env.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/world.h"
#include "core/explain.h"
#include "core/task.h"
#include "ring/msg/ring_model.h"
#include "ring/msg/op.h"
#include "ring/share/share.h"
#include "ring/algo/host_run.h"

static bool idist__deadlock_has_transfer(const idist__transfer_list *list, const idist__task *t) {
    const idist__transfer *xfer;

    for (xfer = list->first; xfer; xfer = xfer->next)
        if (xfer->task == t) return true;

    return false;
}

// Returns true if a receive has found no message yet.
static bool idist__deadlock_is_unmatched(const idist__task *t) {
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    const idist__transfer *xfer = idist__op_of(t)->transfer;
    return xfer && (xfer->list == &rg->recvs || xfer->list == &rg->wild);
}

// Returns true if t needs a transfer that only this link's peer can begin.
static bool idist__deadlock_needs(const idist__link *l, const idist__task *t, int group_rank) {
    const idist__op *op = idist__op_of(t);

    if (t->call.kind == IDIST__RECV)
        return t->call.root == group_rank && idist__deadlock_is_unmatched(t);

    if (t->call.kind != IDIST__SEND &&
        op->algorithm == IDIST__ALGO_BY_HOST) { // check the step under way
        const idist__task *step = idist__host_run_awaited_step(t);
        int rank = -1;

        if (step) rank = idist__ring_group_of(step->group)->rank_of[t->group->ranks[group_rank]];
        return rank >= 0 && idist__deadlock_needs(l, step, rank);
    }

    if (t->call.kind != IDIST__SEND && idist__share_serves(op->algorithm))
        return idist__share_needs(t, group_rank);

    return idist__deadlock_has_transfer(&l->posted, t) ||
           idist__deadlock_has_transfer(&l->waiting, t);
}

// Returns true if t is a collective that needs all members, and the peer waits in a send or receive
// before it has entered t. The peer's contribution may arrive through other ranks, so there may be
// no transfer that shows this.
static bool idist__deadlock_needs_entry(const idist__task *t, const idist__frame *waits) {
    if (!idist__kind_is_p2p((idist__kind)waits->fingerprint.kind)) return false;
    if ((int32_t)(t->seq - waits->tag) <= 0) return false; // tag: the last call that it has entered

    switch (t->call.kind) {
    case IDIST__BARRIER: return true;
    case IDIST__ALL_REDUCE:
    case IDIST__ALL_GATHER:
    case IDIST__REDUCE_SCATTER:
    case IDIST__ALL_TO_ALL: return t->call.count > 0;
    default: return false;
    }
}

// Returns true if the message or answer that the peer waits for may still come from this rank.
static bool idist__deadlock_may_answer(idist__ring *ring, const idist__link *l,
                                       const idist__frame *waits) {
    const idist_group *g = idist__world_find_group(ring->w, waits->ctx);
    const idist__message *msg;

    if (waits->fingerprint.kind == IDIST__RECV)
        return waits->aux != l->p2p_sent; // aux: our messages that the peer had received
    if (waits->fingerprint.kind != IDIST__SEND)
        return !g || (int32_t)(waits->fingerprint.seq - g->seq) <= 0; // we have entered it too

    for (msg = l->early; msg; msg = msg->next)
        if (msg->frame.type == IDIST__RTS && msg->frame.id == waits->id)
            return false; // the message is here, and no receive wants it

    return true;
}

static void idist__deadlock_find(idist__ring *ring, int peer) {
    idist__link *l = &ring->links[peer];
    const idist__frame *waits = &l->peer_waits;
    idist__task *ours;
    idist_group *theirs;
    char cause[400];
    bool same_group;
    int rank;

    if (waits->type != IDIST__WAITS || waits->flags != (IDIST__NEEDS_YOU | IDIST__ONLY_CALL))
        return;
    ours = idist__task_only_call(ring->w);
    if (!ours || !ours->late.announced) return;
    rank = idist__ring_group_of(ours->group)->rank_of[peer];
    same_group = ours->group->ctx == waits->ctx;
    if (rank < 0 || (same_group && ours->seq == waits->fingerprint.seq && ours->seq)) return;
    if (!idist__deadlock_needs(l, ours, rank) &&
        !(same_group && idist__deadlock_needs_entry(ours, waits)))
        return;
    if (idist__deadlock_may_answer(ring, l, waits)) return;

    theirs = idist__world_find_group(ring->w, waits->ctx);
    idist__explain_deadlock(ours, peer, &waits->fingerprint, same_group, cause, sizeof cause);
    idist__ring_fail(ring, ours->group, IDIST_ERR_MISMATCH, cause);
    idist__ring_settle(ring);
    if (theirs) idist__ring_fail(ring, theirs, IDIST_ERR_MISMATCH, cause);
}
