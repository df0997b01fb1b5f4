// ring/msg/message.h: messages that nobody has asked for yet
#pragma once

#include "base/mem.h"
#include "core/world.h"
#include "core/extent.h"
#include "ring/msg/ring_model.h"
#include "ring/msg/transfer.h"
#include "ring/msg/link.h"

static void idist__message_free(idist__ring *ring, idist__link *l, idist__message *m) {
    *m->at = m->next;
    if (m->next) m->next->at = m->at;
    else l->early_end = m->at;
    idist__index_remove(&m->hook);

    if (l->in_message == m) {
        l->in_message = NULL;
        l->target = NULL;
    }

    if (m->unknown) l->unknown_count--;
    idist__mem_free(&ring->w->cfg.mem, m);
}

// Drops the oldest message of a rank for groups that do not exist here. Correct programs leave some
// behind, for groups that were freed before all had arrived; so too many of them are no error.
static void idist__message_drop_unknown(idist__ring *ring, idist__link *l) {
    idist__message *m = l->early;
    bool complete;
    size_t nbytes;

    while (m && (!m->unknown || m == l->in_message)) m = m->next;
    if (!m) return;

    complete = m->frame.type == IDIST__EAGER && m->moved == m->frame.nbytes;
    nbytes = (size_t)m->frame.nbytes;
    idist__message_free(ring, l, m);
    if (complete) idist__link_consumed(ring, l, nbytes);
}

// The group, if it is one of those that were closed last; else NULL.
static const idist__closed *idist__message_find_closed(const idist__ring *ring, uint64_t ctx) {
    uint32_t i;

    for (i = 0; i < IDIST__CLOSED && i < ring->nclosed; i++)
        if (ring->closed[i].ctx == ctx) return &ring->closed[i];

    return NULL;
}

// Allocates a message that begins with this frame, with a buffer of `payload` bytes. NULL: out of
// memory.
static idist__message *idist__message_new(idist__ring *ring, idist__link *l, const idist__frame *f,
                                          size_t payload) {
    idist__message *m = (idist__message *)idist__mem_raw(&ring->w->cfg.mem, sizeof *m + payload);

    if (!m) return NULL;
    idist__mem_clear(m, sizeof *m);
    m->frame = *f;
    m->data = (char *)(m + 1);
    m->stamp = ++ring->stamp;
    m->peer = idist__link_rank(ring, l);

    m->unknown = !idist__world_find_group(ring->w, f->ctx);
    if (m->unknown && ++l->unknown_count > IDIST__UNKNOWN_MAX) idist__message_drop_unknown(ring, l);

    m->at = l->early_end;
    *l->early_end = m;
    l->early_end = &m->next;
    idist__index_insert(&m->hook, ring->messages, idist__index_frame_key(m->peer, f));

    return m;
}

// No receive has taken a message. If a matched probe has found it, its tag is new, and so is its
// key.
static void idist__message_rekey(idist__ring *ring, idist__message *m, uint32_t old_tag) {
    if (m->frame.tag == old_tag) return;
    idist__index_remove(&m->hook);
    idist__index_insert(&m->hook, ring->messages, idist__index_frame_key(m->peer, &m->frame));
}

// Gives a message to a receive. The payload of an eager one may still be arriving.
static void idist__message_give(idist__ring *ring, idist__link *l, int peer, idist__message *m,
                                idist__transfer *v) {
    v->frame = m->frame;

    if (m->self_send) {
        idist__transfer *sender = m->self_send;
        idist__block_copy(v->data, sender->data, sender->nbytes);
        idist__message_free(ring, l, m);
        idist__transfer_done(ring, sender);
        idist__transfer_received(ring, v, peer);
    } else if (m->frame.type == IDIST__RTS) {
        idist__frame f = m->frame;
        idist__message_free(ring, l, m);
        idist__link_answer_rts(ring, l, peer, v, &f);
    } else if (m->moved < m->frame.nbytes) {
        m->claim = v;
    } else {
        size_t nbytes = (size_t)m->frame.nbytes;
        idist__block_copy(v->data, m->data, nbytes);
        idist__message_free(ring, l, m);
        if (peer != ring->w->group.rank) idist__link_consumed(ring, l, nbytes);
        idist__transfer_received(ring, v, peer);
    }
}
