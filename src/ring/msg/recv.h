// ring/msg/recv.h: posting receives
#pragma once

#include "core/model.h"
#include "core/task.h"
#include "core/group.h"
#include "core/matching.h"
#include "ring/msg/ring_model.h"
#include "ring/msg/op.h"
#include "ring/msg/transfer.h"
#include "ring/msg/link.h"
#include "ring/msg/message.h"
#include "ring/msg/match.h"
#include "ring/msg/send.h"

// A step of a collective: nbytes come from a rank of the group, into slot 0 .. 31 (-1: only
// counted).
static void idist__recv_step(idist__task *t, int slot, int from, uint32_t step, void *data,
                             size_t nbytes) {
    idist__op *o = idist__op_of(t);
    idist__ring *ring = idist__ring_of(t->group->w);
    int peer = idist__group_world_rank(t->group, from);
    idist__link *l = &ring->links[peer];
    idist__transfer *v = idist__transfer_new(ring);
    idist__index_node *hook;
    uint64_t key;

    o->recvs_pending++;
    if (slot >= 0) o->slots_pending |= 1u << slot;

    if (!v) {
        idist__ring_fail_memory(ring, t->group);
        return;
    }

    v->task = t;
    v->slot = slot;
    v->data = (char *)data;
    v->nbytes = nbytes;
    v->frame.ctx = t->group->ctx;
    v->frame.tag = step;
    v->frame.fingerprint = idist__op_fingerprint(t);
    key = idist__index_key(v->frame.ctx, peer, false, t->seq);
    idist__transfer_put(ring, &l->posted, v, key);
    idist__link_want(ring, l);
    if (idist__link_grants(l, nbytes)) idist__link_grant(ring, l, v);

    for (hook = ring->messages[key % IDIST__BUCKETS].first; hook; hook = hook->next) {
        idist__message *m = idist__index_message(hook);

        if (m->peer != peer || m->claim || m->frame.ctx != v->frame.ctx) continue;
        if (m->frame.fingerprint.kind == IDIST__SEND || m->frame.type > IDIST__RTS) continue;
        if (m->frame.fingerprint.seq != t->seq || m->frame.tag != step) continue;
        v = idist__match_frame(ring, l, peer, &m->frame);
        if (v) idist__message_give(ring, l, peer, m, v);
        return;
    }
}

// The link from which a receive may take the next message itself. NULL: there is none.
static idist__link *idist__recv_link(const idist_group *g, const idist__call *c) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__link *l = c->root >= 0 ? &ring->links[idist__group_world_rank(g, c->root)] : NULL;

    if (!l || !l->open || !l->transport->peek_header) return NULL;

    return l->early || l->in_moved || l->ended || ring->failed ? NULL : l;
}

// Whether a receive takes the message that begins with this frame, as it is. Otherwise it has to go
// on as a task.
static bool idist__recv_wants(const idist_group *g, const idist__call *c, const idist__link *l,
                              const idist__frame *f) {
    if (f->type != IDIST__EAGER || f->ctx != g->ctx || f->fingerprint.kind != IDIST__SEND)
        return false;
    if (f->fingerprint.dtype != (int)c->dtype || f->fingerprint.check > c->count) return false;
    if (!idist__matching_has_tag(c, (int)f->tag)) return false;
    if (f->nbytes > IDIST__EAGER_BYTES || f->nbytes + sizeof *f > l->their_window) return false;

    return f->nbytes == f->fingerprint.check * idist_dtype_size(c->dtype);
}

// Accounts for a message that a receive has taken.
static void idist__recv_taken(idist__ring *ring, const idist__call *c, idist__link *l,
                              const idist__frame *f) {
    l->p2p_received++;
    l->peer_waits.type = 0;
    l->their_window -= (size_t)f->nbytes + sizeof *f;
    idist__link_consumed(ring, l, (size_t)f->nbytes);
    idist__matching_describe(c, c->root, (int)f->tag, c->dtype, (size_t)f->fingerprint.check);
}

// Takes the message with this header out of the link, if the receive wants it and it is there
// completely.
static bool idist__recv_take(const idist_group *g, const idist__call *c, idist__link *l,
                             const idist__frame *f) {
    if (!idist__recv_wants(g, c, l, f)) return false;
    if (!l->transport->read_message(l->port, c->recv, (size_t)f->nbytes)) return false;
    idist__recv_taken(idist__ring_of(g->w), c, l, f);

    return true;
}

// A blocking receive while nothing else is under way: waits a moment for its message, and takes it
// if it is the next one and there completely.
static bool idist__recv_quick(const idist_group *g, const idist__call *c) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__link *l = idist__recv_link(g, c);
    idist__frame f;
    int turns;

    if (!l) return false;
    for (turns = 0; !l->transport->peek_header(l->port, &f); turns++)
        if (!idist__send_quick_wait(ring, turns)) return false;

    return idist__recv_take(g, c, l, &f);
}

// Whether a receive of recv wants this message, as one from world rank `from`.
static bool idist__recv_takes(const idist__task *t, const idist__message *m, int from) {
    if (m->peer != from || m->claim || m->frame.type > IDIST__RTS) return false;
    if (m->frame.fingerprint.kind != IDIST__SEND || m->frame.ctx != t->group->ctx) return false;
    return idist__matching_matches(t, from, (int)m->frame.tag);
}

// The first message of a rank that a receive wants: messages of one rank keep their order.
static idist__message *idist__recv_first(idist__ring *ring, const idist__task *t, int from) {
    idist__message *m = ring->links[from].early;
    idist__index_node *hook;
    uint64_t key = idist__index_key(t->group->ctx, from, true, (uint32_t)t->call.tag);

    if (!m || t->call.tag == IDIST_ANY_TAG) {
        while (m && !idist__recv_takes(t, m, from)) m = m->next;
        return m;
    }

    hook = ring->messages[key % IDIST__BUCKETS].first;
    while (hook && !idist__recv_takes(t, idist__index_message(hook), from)) hook = hook->next;

    return hook ? idist__index_message(hook) : NULL;
}

// Puts a receive of recv into the list for its kind.
static void idist__recv_post(idist__ring *ring, idist__task *t, idist__transfer *v) {
    idist__ring_group *rg = idist__ring_group_of(t->group);
    int root = t->call.root;
    uint64_t key;

    if (root >= 0) idist__link_want(ring, &ring->links[t->group->ranks[root]]);

    if (root == IDIST_ANY_SOURCE || t->call.tag == IDIST_ANY_TAG) {
        idist__transfer_append(&rg->wild, v);
        return;
    }

    key = idist__index_key(t->group->ctx, t->group->ranks[root], true, (uint32_t)t->call.tag);
    idist__transfer_put(ring, &rg->recvs, v, key);
}

// Posts a receive of recv, and gives it the earliest message that it wants, over all links that one
// may come from.
static void idist__recv_start(idist__task *t) {
    idist__ring *ring = idist__ring_of(t->group->w);
    idist__transfer *v = idist__transfer_new(ring);
    idist__message *m, *earliest = NULL;
    int from = t->call.root, end = from + 1;
    uint32_t tag;

    if (!v) {
        idist__task_complete(t, IDIST_ERR_NO_MEMORY, "out of memory");
        return;
    }

    v->task = t;
    v->data = (char *)t->call.recv;
    v->nbytes = t->call.count * idist_dtype_size(t->call.dtype);
    idist__op_of(t)->transfer = v;
    idist__recv_post(ring, t, v);

    if (from == IDIST_ANY_SOURCE) {
        from = 0;
        end = t->group->size;
    }

    for (; from < end; from++) {
        m = idist__recv_first(ring, t, t->group->ranks[from]);
        if (m && (!earliest || m->stamp < earliest->stamp)) earliest = m;
    }

    if (!earliest) return;
    // Older receives did not want it, so it goes to this one, or this one fails.
    tag = earliest->frame.tag;
    v = idist__match_recv(ring, t->group, earliest->peer, &earliest->frame);
    if (v) idist__message_give(ring, &ring->links[earliest->peer], earliest->peer, earliest, v);
    else idist__message_rekey(ring, earliest, tag);
}
