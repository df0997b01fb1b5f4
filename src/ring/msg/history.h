// ring/msg/history.h: checks that two ranks make the same calls
//
// Every frame and slot of a collective carries the fingerprint of its call. The receiver compares
// it with the fingerprint of its own call. This check alone is not enough. A rank may complete a
// call in which it only sends, and the next call too, before it reads the frame that differs. So
// frames and slots also carry a digest of all earlier calls (`past`), and a rank that receives a
// later frame detects the difference.
#pragma once

#include "launch/env.h"
#include "core/model.h"
#include "core/fingerprint.h"
#include "core/explain.h"
#include "ring/msg/ring_model.h"
#include "ring/msg/op.h"

// Fails a group on all of its members, because two ranks are in different calls.
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

// Returns the digest of the calls before a new call. If the call is a step of a larger call, the
// digest also covers the calls before the larger call.
static uint16_t idist__history_past(const idist__task *t) {
    return (uint16_t)(idist__ring_group_of(t->group)->digest ^ t->parent_past);
}

// Adds a call to the history. `past` is the digest of the calls before it.
static void idist__history_append(idist__ring_group *rg, const idist__fingerprint *fingerprint,
                                  uint16_t past) {
    uint32_t index = fingerprint->seq % IDIST__HISTORY;
    uint32_t words[2]; // the start of a fingerprint: kind, dtype, op and algorithm; root
    uint64_t what;

    memcpy(words, fingerprint, sizeof words);
    words[1] &= IDIST__ROOT_MASK; // ranks may differ in whether they use a plan
    memcpy(&what, words, sizeof what);
    what = (what ^ rg->digest) * 0x9e3779b97f4a7c15u;

    rg->past[index] = past;
    rg->history[index] = *fingerprint;
    rg->digest = (uint16_t)(((what ^ what >> 32) + fingerprint->check) * 0xd6e8feb86659fd93u >> 48);
}

// Adds a new call to the history.
static void idist__history_add(idist__task *t, idist__op *op, idist__algorithm algorithm) {
    idist__fingerprint fingerprint = idist__fingerprint_of_task(t, algorithm);

    op->past = idist__history_past(t);
    idist__history_append(idist__ring_group_of(t->group), &fingerprint, op->past);
}

// Returns the fingerprint of the call that this rank made before the call with this fingerprint.
// For a step of a larger call, this is the call before the larger call, on the user's group.
// Returns NULL if the earlier call is no longer in the history.
static const idist__fingerprint *idist__history_before(const idist_group *g,
                                                       const idist__fingerprint *fingerprint) {
    uint32_t seq = (fingerprint->whole ? fingerprint->whole : fingerprint->seq) - 1;
    const idist__fingerprint *before;

    if (fingerprint->whole) g = idist__ring_group_of(g)->whole;
    if (!g) return NULL;
    before = &idist__ring_group_of(g)->history[seq % IDIST__HISTORY];
    return before->seq == seq ? before : NULL;
}

// Writes the digest of the earlier calls to a frame. An EAGER frame does not otherwise use id and
// aux. So these fields carry the previous call, if it is known, for the receiver's error text.
static void idist__history_tell_past(const idist__task *t, idist__frame *frame) {
    const idist__fingerprint *before;

    frame->past = idist__op_of(t)->past;
    if (frame->type != IDIST__EAGER) return;
    before = idist__history_before(t->group, &frame->fingerprint);
    if (!before) return;

    memcpy(&frame->id, before, sizeof frame->id);
    frame->aux = before->check;
}

// Fails a group whose members are in the same call but made different calls before. If the peer's
// previous call is known, it is in `theirs`. Otherwise `theirs` has kind 0.
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

// Fails a group because a frame shows that the peer made different calls before this one. See
// idist__history_tell_past.
static void idist__history_past_differs(idist__ring *ring, idist_group *g, int peer,
                                        const idist__frame *frame) {
    const idist__fingerprint *before = idist__history_before(g, &frame->fingerprint);
    idist__fingerprint theirs;

    memset(&theirs, 0, sizeof theirs);

    if (before && frame->type == IDIST__EAGER) {
        theirs = *before; // for the sequence number
        memcpy(&theirs, &frame->id, sizeof frame->id);
        theirs.check = frame->aux;
    }

    idist__history_differs_before(ring, g, peer, &frame->fingerprint, &theirs);
}

// Compares a frame of a collective with our call of the same number, running or finished. On a
// mismatch, fails the group and returns false. Returns true if we have not entered the call yet, or
// if it is no longer in the history.
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

    // A message that is left over from a finished call shows that the calls differ, even if their
    // fingerprints are the same.
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
