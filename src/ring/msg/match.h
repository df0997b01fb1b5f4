// ring/msg/match.h: which receive gets which message
//
// Messages of send / recv match the oldest receive of the group that wants this source and tag.
// Steps of a collective match the receive of the same call and step.
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

// The oldest receive of recv that wants this message, or NULL.
static idist__transfer *idist__match_oldest(idist__ring *ring, const idist_group *g, int peer,
                                            const idist__frame *f) {
    idist__ring_group *rg = idist__ring_group_of(g);
    idist__transfer *wild = rg->wild.first, *exact = NULL;
    idist__index_node *hook = NULL;

    if (rg->recvs.first)
        hook = ring->transfers[idist__index_frame_key(peer, f) % IDIST__BUCKETS].first;

    for (; hook && !exact; hook = hook->next) {
        idist__transfer *v = idist__index_transfer(hook);
        if (v->list == &rg->recvs && idist__matching_matches(v->task, peer, (int)f->tag)) exact = v;
    }

    while (wild && !idist__matching_matches(wild->task, peer, (int)f->tag)) wild = wild->next;

    return !exact || (wild && wild->stamp < exact->stamp) ? wild : exact;
}

// Takes the receive that gets this message out of its list. Receives for which the message is too
// large, or of another dtype, fail; the message stays, perhaps with a new tag.
static idist__transfer *idist__match_recv(idist__ring *ring, idist_group *g, int peer,
                                          idist__frame *f) {
    idist__transfer *v;

    while ((v = idist__match_oldest(ring, g, peer, f)) != NULL) {
        int from = idist__ring_group_of(g)->rank_of[peer], tag = (int)f->tag;
        idist_status status;
        char text[256];

        idist__transfer_take(v);

        if (idist__matching_fits(v->task, &f->fingerprint, from, &tag, &status, text,
                                 sizeof text)) {
            if (f->nbytes <= v->nbytes) return v;
            status = IDIST_ERR_MISMATCH; // two dtypes of the program whose tags happen to be equal
            if (v->task->call.u.message) v->task->call.u.message->group = g; // it keeps the message
            snprintf(text, sizeof text, "rank %d has defined the dtype differently", from);
        }

        f->tag = (uint32_t)tag;
        idist__task_complete(v->task, status, text);
        idist__transfer_free(ring, v);
    }

    return NULL;
}

// Takes the send or receive of a collective that this frame is for out of a list of its link.
static idist__transfer *idist__match_step(idist__ring *ring, const idist__transfer_list *list,
                                          int peer, const idist__frame *f) {
    idist__index_node *hook =
        ring->transfers[idist__index_frame_key(peer, f) % IDIST__BUCKETS].first;

    for (; hook; hook = hook->next) {
        idist__transfer *v = idist__index_transfer(hook);
        if (v->list != list || v->frame.ctx != f->ctx) continue;
        if (v->frame.fingerprint.seq != f->fingerprint.seq || v->frame.tag != f->tag) continue;
        idist__transfer_take(v);
        return v;
    }

    return NULL;
}

// Whether a receive of a collective expects what a frame brings. In all_to_allv every pair of ranks
// may have a dtype of its own.
static bool idist__match_agrees(const idist__transfer *v, const idist__frame *f) {
    bool same_dtype = v->frame.fingerprint.dtype == f->fingerprint.dtype &&
                      v->frame.fingerprint.check == f->fingerprint.check;
    return v->nbytes == f->nbytes && (same_dtype || !v->nbytes);
}

static void idist__match_explain(const idist__transfer *v, int peer, const idist__frame *f,
                                 char *cause, size_t cap) {
    const idist__task *t = v->task;
    const idist__world *w = t->group->w;
    bool same_number = v->frame.fingerprint.dtype == f->fingerprint.dtype;
    bool same_definition = v->frame.fingerprint.check == f->fingerprint.check;
    idist__call theirs = t->call;
    int me = w->group.rank, from = idist__ring_group_of(t->group)->rank_of[peer];
    size_t size;

    theirs.dtype = idist__world_dtype(w, f->fingerprint.dtype);
    size = idist_dtype_size(theirs.dtype);

    if (t->call.kind == IDIST__ALL_TO_ALLV && size && (same_definition || !same_number))
        idist__explain_pair(peer, idist__fingerprint_pair(w, &theirs, f->nbytes / size), me,
                            idist__extent_pair(t->group, &t->call, from, false), t, cause, cap);
    else
        idist__explain_sizes(same_definition ? "count" : "definition of the dtype", peer, f->nbytes,
                             me, v->nbytes, t, cause, cap);
}

// The receive for a frame that begins a message. NULL: none is posted yet, or the group has failed.
static idist__transfer *idist__match_frame(idist__ring *ring, idist__link *l, int peer,
                                           idist__frame *f) {
    idist_group *g = idist__world_find_group(ring->w, f->ctx);
    idist__transfer *v;
    char cause[400];

    if (!g || g->status != IDIST_OK) return NULL;
    if (f->fingerprint.kind == IDIST__SEND) return idist__match_recv(ring, g, peer, f);
    if (!idist__history_agrees(ring, g, peer, f)) return NULL;

    v = idist__match_step(ring, &l->posted, peer, f);
    if (!v || idist__match_agrees(v, f)) return v;

    idist__match_explain(v, peer, f, cause, sizeof cause);
    idist__transfer_put(ring, &l->posted, v, idist__index_frame_key(peer, f));
    idist__ring_fail(ring, g, IDIST_ERR_MISMATCH, cause);

    return NULL;
}

// The receive for the first DATA of a message; the caller checks that it granted this number. NULL:
// none, or the group has failed.
static idist__transfer *idist__match_granted(idist__ring *ring, idist__link *l, int peer,
                                             const idist__frame *f) {
    idist__frame whole = *f;
    idist__transfer *v;

    if (f->fingerprint.kind == IDIST__SEND) return NULL; // its receive was cancelled
    whole.nbytes = f->aux;
    v = idist__match_frame(ring, l, peer, &whole);
    if (v) idist__transfer_put(ring, &l->receiving, v, idist__index_id_key(v->id));

    return v;
}
