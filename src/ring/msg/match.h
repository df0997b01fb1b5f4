// ring/msg/match.h: matches messages with receives
//
// A message of idist_send matches the oldest receive of the group that accepts its source and tag.
// A step of a collective matches the receive of the same call and step.
#pragma once

#include "core/model.h"
#include "core/world.h"
#include "core/fingerprint.h"
#include "core/explain.h"
#include "core/task.h"
#include "core/extent.h"
#include "core/matching.h"
#include "ring/msg/ring_model.h"
#include "ring/msg/transfer.h"
#include "ring/msg/history.h"

// Returns the oldest receive of idist_recv that accepts this message, or NULL.
static idist__transfer *idist__match_oldest(idist__ring *ring, const idist_group *g, int peer,
                                            const idist__frame *frame) {
    idist__ring_group *rg = idist__ring_group_of(g);
    idist__transfer *wild = rg->wild.first, *exact = NULL;
    idist__index_node *hook = NULL;

    if (rg->recvs.first)
        hook = ring->transfers[idist__index_frame_key(peer, frame) % IDIST__BUCKETS].first;

    for (; hook && !exact; hook = hook->next) {
        idist__transfer *xfer = idist__index_transfer(hook);
        if (xfer->list == &rg->recvs && idist__matching_matches(xfer->task, peer, (int)frame->tag))
            exact = xfer;
    }

    while (wild && !idist__matching_matches(wild->task, peer, (int)frame->tag)) wild = wild->next;

    return !exact || (wild && wild->stamp < exact->stamp) ? wild : exact;
}

// Finds the receive that gets this message, and removes the receive from its list. Returns NULL if
// there is none. A receive fails if the message is too large for it or has another dtype, and a
// probe ends without the message. The message then remains; a matched probe gives it a new tag.
static idist__transfer *idist__match_recv(idist__ring *ring, idist_group *g, int peer,
                                          idist__frame *frame) {
    idist__transfer *xfer;

    while ((xfer = idist__match_oldest(ring, g, peer, frame)) != NULL) {
        int from = idist__ring_group_of(g)->rank_of[peer], tag = (int)frame->tag;
        idist_status status;
        char text[256];

        idist__transfer_take(xfer);

        if (idist__matching_fits(xfer->task, &frame->fingerprint, from, &tag, &status, text,
                                 sizeof text)) {
            if (frame->nbytes <= xfer->nbytes) return xfer;
            status = IDIST_ERR_MISMATCH; // two user dtypes that have equal tags by chance
            if (xfer->task->call.u.message)
                xfer->task->call.u.message->group = g; // the group keeps the message
            snprintf(text, sizeof text, "rank %d defined this dtype differently", from);
        }

        frame->tag = (uint32_t)tag;
        idist__task_complete(xfer->task, status, text);
        idist__transfer_free(ring, xfer);
    }

    return NULL;
}

// Finds the send or receive of a collective to which this frame belongs, in a list of the link, and
// removes it from the list. Returns NULL if the list has none.
static idist__transfer *idist__match_step(idist__ring *ring, const idist__transfer_list *list,
                                          int peer, const idist__frame *frame) {
    idist__index_node *hook =
        ring->transfers[idist__index_frame_key(peer, frame) % IDIST__BUCKETS].first;

    for (; hook; hook = hook->next) {
        idist__transfer *xfer = idist__index_transfer(hook);
        if (xfer->list != list || xfer->frame.ctx != frame->ctx) continue;
        if (xfer->frame.fingerprint.seq != frame->fingerprint.seq || xfer->frame.tag != frame->tag)
            continue;
        idist__transfer_take(xfer);
        return xfer;
    }

    return NULL;
}

// Returns true if a frame has the size and dtype that a receive of a collective expects. The dtype
// of an empty message does not matter, because in all_to_allv two ranks that exchange no data may
// use different dtypes.
static bool idist__match_agrees(const idist__transfer *xfer, const idist__frame *frame) {
    bool same_dtype = xfer->frame.fingerprint.dtype == frame->fingerprint.dtype &&
                      xfer->frame.fingerprint.check == frame->fingerprint.check;
    return xfer->nbytes == frame->nbytes && (same_dtype || !xfer->nbytes);
}

static void idist__match_explain(const idist__transfer *xfer, int peer, const idist__frame *frame,
                                 char *cause, size_t cap) {
    const idist__task *t = xfer->task;
    const idist__world *w = t->group->w;
    bool same_number = xfer->frame.fingerprint.dtype == frame->fingerprint.dtype;
    bool same_definition = xfer->frame.fingerprint.check == frame->fingerprint.check;
    idist__call theirs = t->call;
    int me = w->group.rank, from = idist__ring_group_of(t->group)->rank_of[peer];
    size_t size;

    theirs.dtype = idist__world_dtype(w, frame->fingerprint.dtype);
    size = idist_dtype_size(theirs.dtype);

    if (t->call.kind == IDIST__ALL_TO_ALLV && size && (same_definition || !same_number))
        idist__explain_pair(peer, idist__fingerprint_pair(w, &theirs, frame->nbytes / size), me,
                            idist__extent_pair(t->group, &t->call, from, false), t, cause, cap);
    else
        idist__explain_sizes(same_definition ? "count" : "definition of the dtype", peer,
                             frame->nbytes, me, xfer->nbytes, t, cause, cap);
}

// Returns the receive for a frame that begins a message, or NULL if no receive is posted yet or the
// group has failed.
static idist__transfer *idist__match_frame(idist__ring *ring, idist__link *l, int peer,
                                           idist__frame *frame) {
    idist_group *g = idist__world_find_group(ring->w, frame->ctx);
    idist__transfer *xfer;
    char cause[400];

    if (!g || g->status != IDIST_OK) return NULL;
    if (frame->fingerprint.kind == IDIST__SEND) return idist__match_recv(ring, g, peer, frame);
    if (!idist__history_agrees(ring, g, peer, frame)) return NULL;

    xfer = idist__match_step(ring, &l->posted, peer, frame);
    if (!xfer || idist__match_agrees(xfer, frame)) return xfer;

    idist__match_explain(xfer, peer, frame, cause, sizeof cause);
    idist__transfer_put(ring, &l->posted, xfer, idist__index_frame_key(peer, frame));
    idist__ring_fail(ring, g, IDIST_ERR_MISMATCH, cause);

    return NULL;
}

// Returns the receive for the first DATA of a message, or NULL if there is none or the group has
// failed. The caller checks that the receive was granted with the id in the frame.
static idist__transfer *idist__match_granted(idist__ring *ring, idist__link *l, int peer,
                                             const idist__frame *frame) {
    idist__frame whole = *frame;
    idist__transfer *xfer;

    if (frame->fingerprint.kind == IDIST__SEND) return NULL; // its receive was cancelled
    whole.nbytes = frame->aux;
    xfer = idist__match_frame(ring, l, peer, &whole);
    if (xfer) idist__transfer_put(ring, &l->receiving, xfer, idist__index_id_key(xfer->id));

    return xfer;
}
