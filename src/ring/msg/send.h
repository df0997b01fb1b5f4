// ring/msg/send.h: posts sends
#pragma once

#include "os/cpu.h"
#include "os/thread.h"
#include "core/model.h"
#include "core/fingerprint.h"
#include "core/task.h"
#include "core/group.h"
#include "core/extent.h"
#include "core/matching.h"
#include "ring/msg/ring_model.h"
#include "ring/msg/op.h"
#include "ring/msg/transfer.h"
#include "ring/msg/link.h"
#include "ring/msg/message.h"
#include "ring/msg/history.h"
#include "ring/msg/match.h"

// Returns the CTS that arrived for a message of a collective before its send was posted, or NULL.
static idist__message *idist__send_find_grant(idist__ring *ring, int peer,
                                              const idist__frame *frame) {
    idist__index_node *hook =
        ring->messages[idist__index_frame_key(peer, frame) % IDIST__BUCKETS].first;

    for (; hook; hook = hook->next) {
        idist__message *msg = idist__index_message(hook);

        if (msg->frame.type != IDIST__CTS || msg->peer != peer || msg->frame.ctx != frame->ctx)
            continue;
        if (msg->frame.fingerprint.seq == frame->fingerprint.seq && msg->frame.tag == frame->tag)
            return msg;
    }

    return NULL;
}

// Sends a large message of a collective once the receiver has granted it.
static void idist__send_by_grant(idist__task *t, int peer, idist__transfer *xfer) {
    idist__ring *ring = idist__ring_of(t->group->w);
    idist__link *l = &ring->links[peer];
    idist__message *grant = idist__send_find_grant(ring, peer, &xfer->frame);
    const idist__transfer *oldest = l->waiting.first;
    idist__frame rts = xfer->frame;

    if (grant) {
        uint64_t id = grant->frame.aux;
        idist__message_free(ring, l, grant);
        idist__link_send_data(ring, l, xfer, id);
        return;
    }

    idist__transfer_put(ring, &l->waiting, xfer, idist__index_frame_key(peer, &xfer->frame));
    if (oldest && oldest->task == t) return; // the peer already has an RTS of this call
    rts.type = IDIST__RTS;
    idist__link_control(ring, l, &rts, NULL);
}

// Chooses how to send a message: eagerly, after the receiver has granted it, or after an RTS.
static void idist__send_choose(idist__ring *ring, idist__link *l, idist__transfer *xfer) {
    size_t nbytes = xfer->nbytes;

    if (xfer->frame.fingerprint.kind != IDIST__SEND && idist__link_grants(l, nbytes)) {
        xfer->frame.type = IDIST__DATA;
    } else if (idist__link_is_eager(l, nbytes) && l->window >= nbytes + IDIST__FRAME_BYTES) {
        xfer->frame.type = IDIST__EAGER;
        xfer->piece = nbytes;
        l->window -= nbytes + IDIST__FRAME_BYTES;
    } else {
        xfer->frame.type = IDIST__RTS;
        xfer->id = xfer->frame.id = ++ring->next_id;
        if (idist__link_exposes_memory(l, &xfer->frame.flags))
            xfer->frame.aux = (uint64_t)(uintptr_t)xfer->data;
    }
}

static void idist__send_post(idist__task *t, int world_rank, uint32_t tag, const void *data,
                             size_t nbytes, const idist__fingerprint *fingerprint) {
    idist__ring *ring = idist__ring_of(t->group->w);
    idist__link *l = &ring->links[world_rank];
    idist__transfer *xfer;

    if (ring->failed == t->group) return; // the data to send may be wrong

    xfer = idist__transfer_new(ring);

    if (!xfer) {
        idist__ring_fail_memory(ring, t->group);
        return;
    }

    xfer->task = t;
    xfer->send = true;
    xfer->data = (char *)(uintptr_t)data;
    xfer->nbytes = nbytes;
    xfer->frame.ctx = t->group->ctx;
    xfer->frame.tag = tag;
    xfer->frame.fingerprint = *fingerprint;
    xfer->frame.nbytes = nbytes;

    if (fingerprint->kind == IDIST__SEND) {
        l->p2p_sent++;
        idist__op_of(t)->transfer = xfer;
    }

    idist__send_choose(ring, l, xfer);
    if (fingerprint->kind != IDIST__SEND) idist__history_tell_past(t, &xfer->frame);

    if (!l->open || l->write_dead) {
        idist__link_push(l, xfer); // the peer is gone: the task ends when the group fails
        return;
    }

    idist__link_want(ring, l);

    if (xfer->frame.type == IDIST__DATA) {
        idist__send_by_grant(t, world_rank, xfer);
        return;
    }

    idist__link_push(l, xfer);

    if (fingerprint->kind == IDIST__SEND) {
        bool may_wait = xfer->frame.type == IDIST__EAGER && idist__link_may_cork(l, t, nbytes);

        l->sent_ns = t->started_ns;

        if (may_wait) {
            idist__link_cork(ring, l, nbytes);
            return;
        }
    }

    idist__link_flush(ring, l);
}

// Posts a send of nbytes to a rank of the group, for a step of a collective.
static void idist__send_step(idist__task *t, int to, uint32_t step, const void *data,
                             size_t nbytes) {
    idist__op *op = idist__op_of(t);
    idist__fingerprint fingerprint = idist__op_fingerprint(t);

    op->sends_pending++;
    idist__send_post(t, idist__group_world_rank(t->group, to), step, data, nbytes, &fingerprint);
}

// Sends a message to ourselves. Until a receive takes the message, it is one of the unexpected
// messages of our own link. A small message is copied there. A large message stays in the sender's
// buffer, and the receive copies it from that buffer.
static void idist__send_to_self(idist__task *t, const idist__fingerprint *fingerprint) {
    idist__ring *ring = idist__ring_of(t->group->w);
    int me = ring->w->group.rank;
    idist__link *l = &ring->links[me];
    size_t nbytes = t->call.count * idist_dtype_size(t->call.dtype);
    bool eager = nbytes <= IDIST__EAGER_BYTES;
    idist__transfer *sender = eager ? NULL : idist__transfer_new(ring), *v;
    idist__message *msg;
    idist__frame frame;

    memset(&frame, 0, sizeof frame);
    frame.type = IDIST__EAGER;
    frame.ctx = t->group->ctx;
    frame.tag = (uint32_t)t->call.tag;
    frame.fingerprint = *fingerprint;
    frame.nbytes = nbytes;
    msg = idist__message_new(ring, l, &frame, eager ? nbytes : 0);

    if (!msg || (!eager && !sender)) {
        if (msg) idist__message_free(ring, l, msg);
        if (sender) idist__transfer_free(ring, sender);
        idist__task_complete(t, IDIST_ERR_NO_MEMORY, "out of memory");
        return;
    }

    msg->moved = nbytes;

    if (eager) {
        idist__block_copy(msg->data, t->call.send, nbytes);
        idist__task_complete(t, IDIST_OK, "");
    } else {
        sender->task = t;
        sender->send = true;
        sender->data = (char *)(uintptr_t)t->call.send;
        sender->nbytes = nbytes;
        msg->self_send = sender;
    }

    v = idist__match_recv(ring, t->group, me, &msg->frame);
    if (v) idist__message_give(ring, l, me, msg, v);
    else idist__message_rekey(ring, msg, frame.tag);
}

static idist__fingerprint idist__send_fingerprint(const idist_group *g, const idist__call *call) {
    idist__fingerprint fingerprint;

    memset(&fingerprint, 0, sizeof fingerprint);
    fingerprint.kind = IDIST__SEND;
    fingerprint.dtype = (uint8_t)call->dtype;
    fingerprint.check = idist__fingerprint_tagged(g->w, call, call->count);
    fingerprint.root = g->rank;

    return fingerprint;
}

static void idist__send_start(idist__task *t) {
    const idist__call *call = &t->call;
    idist__fingerprint fingerprint = idist__send_fingerprint(t->group, call);

    if (call->root == t->group->rank) {
        idist__send_to_self(t, &fingerprint);
        return;
    }

    idist__send_post(t, idist__group_world_rank(t->group, call->root), (uint32_t)call->tag,
                     call->send, call->count * idist_dtype_size(call->dtype), &fingerprint);
}

// Waits briefly for another rank in a call that runs without a task (`quick` in core/model.h).
// Returns false if the call has waited long enough, if another thread needs the lock, or if a
// failure is recorded. The call must then become a task.
static bool idist__send_quick_wait(const idist__ring *ring, int turns) {
    const idist__world *w = ring->w;
    int most =
        w->wait.spin_ns ? (int)(w->wait.spin_budget_ns / IDIST__TURN_NS) : IDIST__QUICK_YIELDS;

    if (ring->failed || __atomic_load_n(&w->wait.lock_waiter_count, __ATOMIC_RELAXED)) return false;
    if (turns >= most) return false;
    if (w->wait.spin_ns) idist__os_cpu_relax();
    else idist__os_thread_yield();

    return true;
}

// Tries to send a message immediately, without a task, a transfer or the clock. Returns true if the
// transport accepted the whole message. Otherwise returns false, for example if an earlier send
// still waits for space.
static bool idist__send_quick(idist_group *g, const idist__call *call) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__link *l = &ring->links[idist__group_world_rank(g, call->root)];
    idist__frame frame;

    if (!l->open || !l->transport->write_message || l->out || l->write_dead) return false;
    if (ring->failed || call->count > IDIST__EAGER_BYTES) return false;

    memset(&frame, 0, sizeof frame);
    frame.type = IDIST__EAGER;
    frame.ctx = g->ctx;
    frame.tag = (uint32_t)call->tag;
    frame.fingerprint = idist__send_fingerprint(g, call);
    frame.nbytes = call->count * idist_dtype_size(call->dtype);

    if (!idist__link_is_eager(l, (size_t)frame.nbytes)) return false;
    if (l->window < frame.nbytes + sizeof frame) return false;

    if (!l->transport->write_message(l->port, &frame, call->send, (size_t)frame.nbytes))
        return false;

    l->window -= (size_t)frame.nbytes + sizeof frame;
    l->p2p_sent++;

    return true;
}
