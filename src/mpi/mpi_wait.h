// mpi/mpi_wait.h: waiting ranks, missing ranks, and deadlocks of two ranks
//
// A rank that has waited for a while sends WAITING to the other members of the group. A member
// answers ENTERED if it has entered the same call, and ABSENT otherwise. At the deadline, the
// members that never entered are missing.
//
// Two ranks in calls of different groups compare no fingerprints. Neither do a rank in a receive
// and a rank in a collective. A deadlock of such ranks is detected from what they wait for. Two
// ranks are deadlocked when, on both of them,
//   - the rank has one thread and one call, which blocks without a time-out of its own,
//   - the call needs something that only the other rank can begin to send,
//   - the other rank has not begun to send it.
//
// The path of a wait:
//
//     idist__mpi_wait_announce           sends WAITING
//     idist__mpi_wait_received           answers WAITING on the other rank
//     idist__mpi_wait_find_deadlock      runs on both ranks after WAITING and after ABSENT
//     idist__mpi_wait_missing            names the missing ranks at the deadline
#pragma once

#include "base/text.h"
#include "launch/env.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/world.h"
#include "core/fingerprint.h"
#include "core/explain.h"
#include "core/task.h"
#include "core/group.h"
#include "mpi/mpi_model.h"
#include "mpi/control.h"

// Returns true if t needs something that `rank`, a rank of its group, must begin.
static bool idist__mpi_wait_needs(const idist__task *t, int rank) {
    const idist__mpi_group *mg = idist__mpi_model_group(t->group);
    const idist__mpi_op *op = idist__mpi_op_of(t);
    int size = t->group->size;

    if (idist__kind_is_p2p(t->call.kind))
        return op->phase == IDIST__PHASE_WAITING && t->call.root == rank;
    if (op->phase == IDIST__PHASE_QUEUED) return true;

    return op->phase == IDIST__PHASE_ENTERING &&
           (rank - t->group->rank + size) % size >= mg->header_count;
}

// Returns true if the peer may still get from us what it waits for.
static bool idist__mpi_wait_is_served(const idist__mpi *mpi, int peer) {
    const idist__mpi_control *waiting = &mpi->peers[peer].waiting;
    const idist_group *g = idist__world_find_group(mpi->w, waiting->ctx);
    const idist__mpi_unexpected *u;

    if (waiting->fingerprint.kind == IDIST__RECV) return waiting->received != mpi->peers[peer].sent;
    if (waiting->fingerprint.kind != IDIST__SEND)
        return !g || g->status != IDIST_OK || (int32_t)(waiting->fingerprint.seq - g->seq) <= 0;

    // A send is not served while its READY_TO_SEND is unmatched here.
    for (u = mpi->unexpected; u; u = u->next)
        if (u->source == peer && u->control.type == IDIST__CONTROL_READY_TO_SEND &&
            u->control.id == waiting->id)
            return false;

    return true;
}

// Returns true if the peer has not begun what our call waits for.
static bool idist__mpi_wait_is_unbegun(const idist__mpi *mpi, const idist__task *own, int peer) {
    const idist__mpi_peer *p = &mpi->peers[peer];

    if (own->call.kind == IDIST__RECV) return p->waiting.sent == p->received;
    if (own->call.kind == IDIST__SEND) return true;
    return p->absent_ctx == own->group->ctx && p->absent_seq == own->seq;
}

// Fails both groups if this rank and the peer wait for each other.
static void idist__mpi_wait_find_deadlock(idist__mpi *mpi, int peer) {
    const idist__mpi_control *waiting = &mpi->peers[peer].waiting;
    idist__task *own = idist__task_only_call(mpi->w);
    idist_group *peer_group = idist__world_find_group(mpi->w, waiting->ctx);
    char cause[400];
    bool same_group;
    int rank;

    if (!own || !own->late.announced) return;
    if (waiting->flags != (IDIST__WAITING_FOR_YOU | IDIST__WAITING_ONLY)) return;
    rank = idist__mpi_model_group(own->group)->rank_of[peer];
    if (rank < 0) return;
    same_group = own->group->ctx == waiting->ctx;
    if (same_group && own->seq == waiting->fingerprint.seq && own->seq) return;
    if (!idist__mpi_wait_needs(own, rank) || !idist__mpi_wait_is_unbegun(mpi, own, peer)) return;
    if (idist__mpi_wait_is_served(mpi, peer)) return;

    idist__explain_deadlock(own, peer, &waiting->fingerprint, same_group, cause, sizeof cause);
    idist__group_fail(own->group, IDIST_ERR_MISMATCH, cause);
    if (peer_group) idist__group_fail(peer_group, IDIST_ERR_MISMATCH, cause);
}

// Records the latest call that a rank is known to have entered.
static void idist__mpi_wait_seen(idist_group *g, int source,
                                 const idist__fingerprint *fingerprint) {
    idist__mpi_group *mg = idist__mpi_model_group(g);
    idist__fingerprint *last_seen = &mg->last_seen[mg->rank_of[source]];

    if ((int32_t)(fingerprint->seq - last_seen->seq) >= 0) *last_seen = *fingerprint;
}

// Handles WAITING. If the peer waits in a collective, answers whether we have entered the call too.
static void idist__mpi_wait_received(idist__mpi *mpi, int source,
                                     const idist__mpi_control *waiting) {
    idist_group *g = idist__world_find_group(mpi->w, waiting->ctx);
    idist__mpi_control answer = *waiting;

    mpi->peers[source].waiting = *waiting;
    mpi->peers[source].absent_ctx = UINT64_MAX; // an earlier ABSENT may be out of date

    if (!idist__kind_is_p2p((idist__kind)waiting->fingerprint.kind)) {
        answer.type = IDIST__CONTROL_ABSENT;
        if (g) idist__mpi_wait_seen(g, source, &waiting->fingerprint);

        if (g && (int32_t)(waiting->fingerprint.seq - g->seq) <= 0) {
            answer.type = IDIST__CONTROL_ENTERED;
            answer.fingerprint = idist__mpi_model_group(g)->entered;
        }

        idist__control_send(mpi, source, &answer, NULL, 0);
    }

    idist__mpi_wait_find_deadlock(mpi, source);
}

// Sends WAITING for t to one rank of its group.
static void idist__mpi_wait_send(const idist__task *t, int rank, int flags) {
    idist__mpi *mpi = idist__mpi_of(t->group->w);
    int peer = t->group->ranks[rank];
    idist__mpi_control waiting;

    memset(&waiting, 0, sizeof waiting);
    waiting.type = IDIST__CONTROL_WAITING;
    waiting.flags = (uint8_t)flags;
    waiting.ctx = t->group->ctx;
    waiting.fingerprint = idist__fingerprint_of_task(t, IDIST__ALGO_AUTO);
    waiting.id = idist__mpi_op_of(t)->send_id;
    waiting.sent = mpi->peers[peer].sent;
    waiting.received = mpi->peers[peer].received;
    idist__control_send(mpi, peer, &waiting, NULL, 0);
}

static void idist__mpi_wait_announce(idist__task *t) {
    idist_group *g = t->group;
    bool p2p = idist__kind_is_p2p(t->call.kind), only = idist__task_only_call(g->w) == t;
    int i, flags;

    if (t->late.asked || (!p2p && g->w->cfg.unchecked)) return;

    for (i = 0; i < g->size && t->state != IDIST__TASK_DONE; i++) {
        if (i == g->rank || (p2p && t->call.root != i)) continue;
        flags = only ? IDIST__WAITING_ONLY : 0;
        if (idist__mpi_wait_needs(t, i)) flags |= IDIST__WAITING_FOR_YOU;
        idist__mpi_wait_send(t, i, flags);
        if (t->state != IDIST__TASK_DONE)
            idist__mpi_wait_find_deadlock(idist__mpi_of(g->w), g->ranks[i]);
    }
}

static int idist__mpi_wait_missing(idist__task *t, char *text, size_t capacity) {
    const idist_group *g = t->group;
    const idist__fingerprint *last_seen = idist__mpi_model_group(g)->last_seen;
    int i, missing_count = 0;

    if (t->call.kind == IDIST__RECV && idist__mpi_op_of(t)->phase == IDIST__PHASE_TRANSFERRING)
        return 0;
    if (idist__kind_is_p2p(t->call.kind)) return idist__explain_missing_peer(t, text, capacity);

    for (i = 0; i < g->size; i++) {
        if (i == g->rank || !idist__mpi_wait_needs(t, i)) continue;
        if ((int32_t)(last_seen[i].seq - t->seq) >= 0) continue;
        idist__explain_missing_rank(g, i, &last_seen[i], missing_count, text, capacity);
        missing_count++;
    }

    if (missing_count > 8) idist__text_append(text, capacity, " and %d more", missing_count - 8);

    return missing_count;
}
