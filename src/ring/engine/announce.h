// ring/engine/announce.h: announces the calls in which this rank waits
//
// A rank announces the call in which it waits to connected members, and to each other member once
// it connects. Before the call fails, the rank announces it a second time (g->asked_ns), and
// connects to all members. The error text then names the members that do not answer.
#pragma once

#include "launch/env.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/fingerprint.h"
#include "core/task.h"
#include "ring/msg/ring_model.h"
#include "ring/msg/link.h"
#include "ring/engine/deadlock.h"
#include "ring/engine/ask.h"

// Tells a member, given by its rank in the group, that this rank waits in t.
static void idist__announce_to(idist__ring *ring, const idist__task *t, bool only_call, int rank) {
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    idist__link *l = &ring->links[t->group->ranks[rank]];
    bool p2p = idist__kind_is_p2p(t->call.kind);
    const idist__transfer *xfer;
    idist__frame frame;

    if (rank == t->group->rank || (p2p && t->call.root != rank)) return;
    memset(&frame, 0, sizeof frame);
    frame.type = IDIST__WAITS;
    frame.ctx = t->group->ctx;
    frame.fingerprint = p2p ? idist__fingerprint_of_task(t, IDIST__ALGO_AUTO)
                            : rg->history[t->seq % IDIST__HISTORY];
    frame.aux = l->p2p_received;
    frame.tag = t->group->seq;

    // Only the search for deadlocks needs these flags and this id. While this rank can do something
    // else, there is no deadlock.
    if (only_call) frame.flags = IDIST__ONLY_CALL;
    if (only_call && idist__deadlock_needs(l, t, rank)) frame.flags |= IDIST__NEEDS_YOU;
    for (xfer = l->waiting.first; xfer && p2p && only_call; xfer = xfer->next)
        if (xfer->task == t) frame.id = xfer->id;

    idist__link_control(ring, l, &frame, NULL);
    idist__deadlock_find(ring, t->group->ranks[rank]);
}

// Tells the other members of the group that this rank waits in t. They can then report a mismatch,
// or answer that they are alive.
static void idist__announce_wait(idist__task *t) {
    idist__ring *ring = idist__ring_of(t->group->w);
    bool asks_all = t->group->asked_ns > t->started_ns;
    bool only_call = idist__task_only_call(ring->w) == t;
    int i;

    if (!t->group->inner && t->state != IDIST__TASK_ON_DEVICE && (t->late.asked || asks_all))
        idist__ask_begin(ring, t);
    if (t->late.asked) return; // the peer of the message has been told already

    for (i = 0; i < t->group->size && t->group->size > 1; i++) {
        idist__announce_to(ring, t, only_call, i);
        if (asks_all) idist__link_want(ring, &ring->links[t->group->ranks[i]]);
    }

    idist__ring_settle(ring);
}

// Tells a rank that has just connected what the other ranks have already been told.
static void idist__announce_late(idist__ring *ring, int peer) {
    idist__world *w = ring->w;
    idist__link *l = &ring->links[peer];
    const idist__task *t, *only = idist__task_only_call(w);
    const idist_group *g;

    // While the world is being closed, the rank_of table of its group no longer exists, but peers
    // must still learn that the world failed.
    for (g = &w->group; g; g = g->next)
        if (g->status != IDIST_OK &&
            (g == &w->group || (g->rank >= 0 && idist__ring_group_of(g)->rank_of[peer] >= 0)))
            idist__link_abort(ring, l, g->ctx, g->status, g->cause);

    // NOLINTNEXTLINE(clang-analyzer-*NullDereference)
    for (t = w->tasks.running; t && !ring->failed; t = t->next) {
        int rank = idist__ring_group_of(t->group)->rank_of[peer];
        if (t->late.announced && t->state != IDIST__TASK_DONE && !t->group->inner && rank >= 0)
            idist__announce_to(ring, t, t == only, rank);
    }

    if (ring->said_bye) idist__link_bye(ring, l);
    idist__link_flush(ring, l);
}
