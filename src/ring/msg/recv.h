// ring/msg/recv.h: posts receives
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

// Posts a receive of nbytes from a rank of the group, for a step of a collective, in slot 0 to 31.
// Also sets the bit of the slot in slots_pending. A receive in slot -1 is only counted.
static void idist__recv_step(idist__task *t, int slot, int from, uint32_t step, void *data,
                             size_t nbytes) {
    idist__op *op = idist__op_of(t);
    idist__ring *ring = idist__ring_of(t->group->w);
    int peer = idist__group_world_rank(t->group, from);
    idist__link *l = &ring->links[peer];
    idist__transfer *xfer = idist__transfer_new(ring);
    idist__index_node *hook;
    uint64_t key;

    op->recvs_pending++;
    if (slot >= 0) op->slots_pending |= 1u << slot;

    if (!xfer) {
        idist__ring_fail_memory(ring, t->group);
        return;
    }

    xfer->task = t;
    xfer->slot = slot;
    xfer->data = (char *)data;
    xfer->nbytes = nbytes;
    xfer->frame.ctx = t->group->ctx;
    xfer->frame.tag = step;
    xfer->frame.fingerprint = idist__op_fingerprint(t);
    key = idist__index_key(xfer->frame.ctx, peer, false, t->seq);
    idist__transfer_put(ring, &l->posted, xfer, key);
    idist__link_want(ring, l);
    if (idist__link_grants(l, nbytes)) idist__link_grant(ring, l, xfer);

    for (hook = ring->messages[key % IDIST__BUCKETS].first; hook; hook = hook->next) {
        idist__message *msg = idist__index_message(hook);

        if (msg->peer != peer || msg->claim || msg->frame.ctx != xfer->frame.ctx) continue;
        if (msg->frame.fingerprint.kind == IDIST__SEND || msg->frame.type > IDIST__RTS) continue;
        if (msg->frame.fingerprint.seq != t->seq || msg->frame.tag != step) continue;
        xfer = idist__match_frame(ring, l, peer, &msg->frame);
        if (xfer) idist__message_give(ring, l, peer, msg, xfer);
        return;
    }
}

// Returns the link from which a receive may take its next message directly, or NULL if there is
// none.
static idist__link *idist__recv_link(const idist_group *g, const idist__call *call) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__link *l = call->root >= 0 ? &ring->links[idist__group_world_rank(g, call->root)] : NULL;

    if (!l || !l->open || !l->transport->peek_header) return NULL;

    return l->early || l->in_moved || l->ended || ring->failed ? NULL : l;
}

// Returns true if a receive can directly take the message that begins with this frame. Otherwise
// the receive must become a task.
static bool idist__recv_wants(const idist_group *g, const idist__call *call, const idist__link *l,
                              const idist__frame *frame) {
    if (frame->type != IDIST__EAGER || frame->ctx != g->ctx ||
        frame->fingerprint.kind != IDIST__SEND)
        return false;
    if (frame->fingerprint.dtype != (int)call->dtype || frame->fingerprint.check > call->count)
        return false;
    if (!idist__matching_has_tag(call, (int)frame->tag)) return false;
    if (frame->nbytes > IDIST__EAGER_BYTES || frame->nbytes + sizeof *frame > l->their_window)
        return false;

    return frame->nbytes == frame->fingerprint.check * idist_dtype_size(call->dtype);
}

// Accounts for a message that a receive has taken from the link.
static void idist__recv_taken(idist__ring *ring, const idist__call *call, idist__link *l,
                              const idist__frame *frame) {
    l->p2p_received++;
    l->peer_waits.type = 0;
    l->their_window -= (size_t)frame->nbytes + sizeof *frame;
    idist__link_consumed(ring, l, (size_t)frame->nbytes);
    idist__matching_describe(call, call->root, (int)frame->tag, call->dtype,
                             (size_t)frame->fingerprint.check);
}

// Takes the message with this header out of the link, if the receive accepts the message and the
// whole message has arrived.
static bool idist__recv_take(const idist_group *g, const idist__call *call, idist__link *l,
                             const idist__frame *frame) {
    if (!idist__recv_wants(g, call, l, frame)) return false;
    if (!l->transport->read_message(l->port, call->recv, (size_t)frame->nbytes)) return false;
    idist__recv_taken(idist__ring_of(g->w), call, l, frame);

    return true;
}

// Tries a blocking receive while no other call is in progress. Waits briefly for the next message,
// and takes it if the receive accepts the message and the whole message has arrived.
static bool idist__recv_quick(const idist_group *g, const idist__call *call) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__link *l = idist__recv_link(g, call);
    idist__frame frame;
    int turns;

    if (!l) return false;
    for (turns = 0; !l->transport->peek_header(l->port, &frame); turns++)
        if (!idist__send_quick_wait(ring, turns)) return false;

    return idist__recv_take(g, call, l, &frame);
}

// Returns true if a receive of idist_recv accepts this message from world rank `from`.
static bool idist__recv_takes(const idist__task *t, const idist__message *msg, int from) {
    if (msg->peer != from || msg->claim || msg->frame.type > IDIST__RTS) return false;
    if (msg->frame.fingerprint.kind != IDIST__SEND || msg->frame.ctx != t->group->ctx) return false;
    return idist__matching_matches(t, from, (int)msg->frame.tag);
}

// Returns the first message from world rank `from` that a receive accepts, or NULL. Messages from
// one rank keep their order.
static idist__message *idist__recv_first(idist__ring *ring, const idist__task *t, int from) {
    idist__message *msg = ring->links[from].early;
    idist__index_node *hook;
    uint64_t key = idist__index_key(t->group->ctx, from, true, (uint32_t)t->call.tag);

    if (!msg || t->call.tag == IDIST_ANY_TAG) {
        while (msg && !idist__recv_takes(t, msg, from)) msg = msg->next;
        return msg;
    }

    hook = ring->messages[key % IDIST__BUCKETS].first;
    while (hook && !idist__recv_takes(t, idist__index_message(hook), from)) hook = hook->next;

    return hook ? idist__index_message(hook) : NULL;
}

// Adds a receive of idist_recv to the list for its kind.
static void idist__recv_post(idist__ring *ring, idist__task *t, idist__transfer *xfer) {
    idist__ring_group *rg = idist__ring_group_of(t->group);
    int root = t->call.root;
    uint64_t key;

    if (root >= 0) idist__link_want(ring, &ring->links[t->group->ranks[root]]);

    if (root == IDIST_ANY_SOURCE || t->call.tag == IDIST_ANY_TAG) {
        idist__transfer_append(&rg->wild, xfer);
        return;
    }

    key = idist__index_key(t->group->ctx, t->group->ranks[root], true, (uint32_t)t->call.tag);
    idist__transfer_put(ring, &rg->recvs, xfer, key);
}

// Posts a receive of idist_recv. If a message that the receive accepts has already arrived from any
// possible source, gives the earliest such message to the receive.
static void idist__recv_start(idist__task *t) {
    idist__ring *ring = idist__ring_of(t->group->w);
    idist__transfer *xfer = idist__transfer_new(ring);
    idist__message *msg, *earliest = NULL;
    int from = t->call.root, end = from + 1;
    uint32_t tag;

    if (!xfer) {
        idist__task_complete(t, IDIST_ERR_NO_MEMORY, "out of memory");
        return;
    }

    xfer->task = t;
    xfer->data = (char *)t->call.recv;
    xfer->nbytes = t->call.count * idist_dtype_size(t->call.dtype);
    idist__op_of(t)->transfer = xfer;
    idist__recv_post(ring, t, xfer);

    if (from == IDIST_ANY_SOURCE) {
        from = 0;
        end = t->group->size;
    }

    for (; from < end; from++) {
        msg = idist__recv_first(ring, t, t->group->ranks[from]);
        if (msg && (!earliest || msg->stamp < earliest->stamp)) earliest = msg;
    }

    if (!earliest) return;
    // No older receive accepts the message, so this receive gets the message or fails.
    tag = earliest->frame.tag;
    xfer = idist__match_recv(ring, t->group, earliest->peer, &earliest->frame);
    if (xfer)
        idist__message_give(ring, &ring->links[earliest->peer], earliest->peer, earliest, xfer);
    else idist__message_rekey(ring, earliest, tag);
}
