// ring/msg/history.h: whether two ranks make the same calls
//
// Every frame and every slot of a collective carries the fingerprint of its call, which is compared
// with ours. That alone is not enough: a rank may complete a call in which it only sends, and the
// next one too, before it has read the frame that differs. So frames and slots also carry a digest
// of all calls before (`past`): any rank that gets a later one can tell.
#pragma once

#include "launch/env.h"
#include "core/model.h"
#include "core/fingerprint.h"
#include "core/explain.h"
#include "ring/msg/ring_model.h"
#include "ring/msg/op.h"

// Two ranks are in different calls: the group fails on all of them.
static void idist__history_mismatch(idist__ring *ring, idist_group *g, int peer,
                                    const idist__fingerprint *theirs,
                                    const idist__fingerprint *ours, const char *field) {
    char cause[400];
    int me = ring->w->group.rank;

    if (me < peer)
        idist__explain_mismatch(ring->w, field, me, ours, peer, theirs, cause, sizeof cause);
    else idist__explain_mismatch(ring->w, field, peer, theirs, me, ours, cause, sizeof cause);
    idist__ring_fail(ring, g, IDIST_ERR_MISMATCH, cause);
}

// The digest of the calls before a new one. That of a part also covers the calls before its parent.
static uint16_t idist__history_past(const idist__task *t) {
    return (uint16_t)(idist__ring_group_of(t->group)->digest ^ t->parent_past);
}

// Adds a call to the history; `past` is the digest of those before it.
static void idist__history_append(idist__ring_group *rg, const idist__fingerprint *fingerprint,
                                  uint16_t past) {
    uint32_t index = fingerprint->seq % IDIST__HISTORY;
    uint32_t words[2]; // kind, dtype, op and algorithm; root: with these a fingerprint begins
    uint64_t what;

    memcpy(words, fingerprint, sizeof words);
    words[1] &= IDIST__ROOT_MASK; // whether a rank uses a plan is no difference
    memcpy(&what, words, sizeof what);
    what = (what ^ rg->digest) * 0x9e3779b97f4a7c15u;

    rg->past[index] = past;
    rg->history[index] = *fingerprint;
    rg->digest = (uint16_t)(((what ^ what >> 32) + fingerprint->check) * 0xd6e8feb86659fd93u >> 48);
}

// A call begins: adds it to the history.
static void idist__history_add(idist__task *t, idist__op *op, idist__algorithm algorithm) {
    idist__fingerprint fingerprint = idist__fingerprint_of_task(t, algorithm);

    op->past = idist__history_past(t);
    idist__history_append(idist__ring_group_of(t->group), &fingerprint, op->past);
}

// What this rank called before the call with this fingerprint, on the group that the user knows.
// NULL: that is forgotten.
static const idist__fingerprint *idist__history_before(const idist_group *g,
                                                       const idist__fingerprint *fingerprint) {
    uint32_t seq = (fingerprint->whole ? fingerprint->whole : fingerprint->seq) - 1;
    const idist__fingerprint *before;

    if (fingerprint->whole) g = idist__ring_group_of(g)->whole;
    if (!g) return NULL;
    before = &idist__ring_group_of(g)->history[seq % IDIST__HISTORY];
    return before->seq == seq ? before : NULL;
}

// Writes the digest to a frame. id and aux are free in EAGER: there they tell the previous call, if
// it is still known, for the error text of the receiver.
static void idist__history_tell_past(const idist__task *t, idist__frame *frame) {
    const idist__fingerprint *before;

    frame->past = idist__op_of(t)->past;
    if (frame->type != IDIST__EAGER) return;
    before = idist__history_before(t->group, &frame->fingerprint);
    if (!before) return;

    memcpy(&frame->id, before, sizeof frame->id);
    frame->aux = before->check;
}

// Two ranks are in the same call, and made different calls before. `theirs` is the peer's previous
// call, if its kind is not 0.
static void idist__history_differs_before(idist__ring *ring, idist_group *g, int peer,
                                          const idist__fingerprint *fingerprint,
                                          const idist__fingerprint *theirs) {
    const idist__fingerprint *before = idist__history_before(g, fingerprint);
    const char *field =
        before && theirs->kind ? idist__fingerprint_difference(theirs, before) : NULL;

    if (field) {
        idist__history_mismatch(ring, g, peer, theirs, before, field);
        return;
    }

    idist__history_mismatch(ring, g, peer, fingerprint, fingerprint, "sequence of calls before it");
}

// The same, found out from a frame. See idist__history_tell_past.
static void idist__history_past_differs(idist__ring *ring, idist_group *g, int peer,
                                        const idist__frame *frame) {
    const idist__fingerprint *before = idist__history_before(g, &frame->fingerprint);
    idist__fingerprint theirs;

    memset(&theirs, 0, sizeof theirs);

    if (before && frame->type == IDIST__EAGER) {
        theirs = *before; // for its sequence number
        memcpy(&theirs, &frame->id, sizeof frame->id);
        theirs.check = frame->aux;
    }

    idist__history_differs_before(ring, g, peer, &frame->fingerprint, &theirs);
}

// Compares a frame of a collective with our call of the same number, running or finished. False: a
// mismatch. A frame for a call that we have not entered tells nothing yet.
static bool idist__history_agrees(idist__ring *ring, idist_group *g, int peer,
                                  const idist__frame *frame) {
    idist__ring_group *rg = idist__ring_group_of(g);
    idist__seen *seen = &rg->seen[rg->rank_of[peer]];
    const idist__fingerprint *ours = &rg->history[frame->fingerprint.seq % IDIST__HISTORY];
    const idist__task *t = ring->w->tasks.running;
    bool is_message = frame->type <= IDIST__RTS || frame->type == IDIST__DATA;
    const char *field;

    if ((int32_t)(frame->fingerprint.seq - seen->seq) >= 0) {
        seen->seq = frame->fingerprint.seq;
        seen->fingerprint = frame->fingerprint;
    }

    if ((int32_t)(frame->fingerprint.seq - g->seq) > 0 || ours->seq != frame->fingerprint.seq)
        return true;

    // A message is left over from a finished call that looked the same: the calls were not the same
    // after all.
    field = idist__fingerprint_difference(&frame->fingerprint, ours);
    while (t && (t->group != g || t->seq != frame->fingerprint.seq)) t = t->next;
    if (!field && is_message && !t) field = "sequence";

    if (field) {
        idist__history_mismatch(ring, g, peer, &frame->fingerprint, ours, field);
        return false;
    }

    if (is_message && frame->past != rg->past[ours->seq % IDIST__HISTORY]) {
        idist__history_past_differs(ring, g, peer, frame);
        return false;
    }

    return true;
}
