// ring/msg/send.h: posting sends
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

// The CTS for a message of a collective that came before its send was posted, or NULL.
static idist__message *idist__send_find_grant(idist__ring *ring, int peer, const idist__frame *f) {
    idist__index_node *hook =
        ring->messages[idist__index_frame_key(peer, f) % IDIST__BUCKETS].first;

    for (; hook; hook = hook->next) {
        idist__message *m = idist__index_message(hook);

        if (m->frame.type != IDIST__CTS || m->peer != peer || m->frame.ctx != f->ctx) continue;
        if (m->frame.fingerprint.seq == f->fingerprint.seq && m->frame.tag == f->tag) return m;
    }

    return NULL;
}

// Sends a large message of a collective once the receiver has granted it.
static void idist__send_by_grant(idist__task *t, int peer, idist__transfer *v) {
    idist__ring *ring = idist__ring_of(t->group->w);
    idist__link *l = &ring->links[peer];
    idist__message *grant = idist__send_find_grant(ring, peer, &v->frame);
    const idist__transfer *oldest = l->waiting.first;
    idist__frame rts = v->frame;

    if (grant) {
        uint64_t id = grant->frame.aux;
        idist__message_free(ring, l, grant);
        idist__link_send_data(ring, l, v, id);
        return;
    }

    idist__transfer_put(ring, &l->waiting, v, idist__index_frame_key(peer, &v->frame));
    if (oldest && oldest->task == t) return; // whose RTS has told the peer of this call
    rts.type = IDIST__RTS;
    idist__link_control(ring, l, &rts, NULL);
}

// How a message goes: at once, once it is granted, or once it is asked for.
static void idist__send_choose(idist__ring *ring, idist__link *l, idist__transfer *v) {
    size_t nbytes = v->nbytes;

    if (v->frame.fingerprint.kind != IDIST__SEND && idist__link_grants(l, nbytes)) {
        v->frame.type = IDIST__DATA;
    } else if (idist__link_is_eager(l, nbytes) && l->window >= nbytes + IDIST__FRAME_BYTES) {
        v->frame.type = IDIST__EAGER;
        v->piece = nbytes;
        l->window -= nbytes + IDIST__FRAME_BYTES;
    } else {
        v->frame.type = IDIST__RTS;
        v->id = v->frame.id = ++ring->next_id;
        if (idist__link_exposes_memory(l, &v->frame.flags))
            v->frame.aux = (uint64_t)(uintptr_t)v->data;
    }
}

static void idist__send_post(idist__task *t, int world_rank, uint32_t tag, const void *data,
                             size_t nbytes, const idist__fingerprint *fingerprint) {
    idist__ring *ring = idist__ring_of(t->group->w);
    idist__link *l = &ring->links[world_rank];
    idist__transfer *v;

    if (ring->failed == t->group) return; // what there is to send may be wrong

    v = idist__transfer_new(ring);

    if (!v) {
        idist__ring_fail_memory(ring, t->group);
        return;
    }

    v->task = t;
    v->send = true;
    v->data = (char *)(uintptr_t)data;
    v->nbytes = nbytes;
    v->frame.ctx = t->group->ctx;
    v->frame.tag = tag;
    v->frame.fingerprint = *fingerprint;
    v->frame.nbytes = nbytes;

    if (fingerprint->kind == IDIST__SEND) {
        l->p2p_sent++;
        idist__op_of(t)->transfer = v;
    }

    idist__send_choose(ring, l, v);
    if (fingerprint->kind != IDIST__SEND) idist__history_tell_past(t, &v->frame);

    if (!l->open || l->write_dead) {
        idist__link_push(l, v); // its task ends with its group: that rank was lost, or has left
        return;
    }

    idist__link_want(ring, l);

    if (v->frame.type == IDIST__DATA) {
        idist__send_by_grant(t, world_rank, v);
        return;
    }

    idist__link_push(l, v);

    if (fingerprint->kind == IDIST__SEND) {
        bool may_wait = v->frame.type == IDIST__EAGER && idist__link_may_cork(l, t, nbytes);

        l->sent_ns = t->started_ns;

        if (may_wait) {
            idist__link_cork(ring, l, nbytes);
            return;
        }
    }

    idist__link_flush(ring, l);
}

// A step of a collective: nbytes go to a rank of the group.
static void idist__send_step(idist__task *t, int to, uint32_t step, const void *data,
                             size_t nbytes) {
    idist__op *o = idist__op_of(t);
    idist__fingerprint fingerprint = idist__op_fingerprint(t);

    o->sends_pending++;
    idist__send_post(t, idist__group_world_rank(t->group, to), step, data, nbytes, &fingerprint);
}

// A message to ourselves waits among the unexpected ones of our own link. A small one is copied; of
// a large one the receive copies from the sender's buffer.
static void idist__send_to_self(idist__task *t, const idist__fingerprint *fingerprint) {
    idist__ring *ring = idist__ring_of(t->group->w);
    int me = ring->w->group.rank;
    idist__link *l = &ring->links[me];
    size_t nbytes = t->call.count * idist_dtype_size(t->call.dtype);
    bool eager = nbytes <= IDIST__EAGER_BYTES;
    idist__transfer *sender = eager ? NULL : idist__transfer_new(ring), *v;
    idist__message *m;
    idist__frame f;

    memset(&f, 0, sizeof f);
    f.type = IDIST__EAGER;
    f.ctx = t->group->ctx;
    f.tag = (uint32_t)t->call.tag;
    f.fingerprint = *fingerprint;
    f.nbytes = nbytes;
    m = idist__message_new(ring, l, &f, eager ? nbytes : 0);

    if (!m || (!eager && !sender)) {
        if (m) idist__message_free(ring, l, m);
        if (sender) idist__transfer_free(ring, sender);
        idist__task_complete(t, IDIST_ERR_NO_MEMORY, "out of memory");
        return;
    }

    m->moved = nbytes;

    if (eager) {
        idist__block_copy(m->data, t->call.send, nbytes);
        idist__task_complete(t, IDIST_OK, "");
    } else {
        sender->task = t;
        sender->send = true;
        sender->data = (char *)(uintptr_t)t->call.send;
        sender->nbytes = nbytes;
        m->self_send = sender;
    }

    v = idist__match_recv(ring, t->group, me, &m->frame);
    if (v) idist__message_give(ring, l, me, m, v);
    else idist__message_rekey(ring, m, f.tag);
}

static idist__fingerprint idist__send_fingerprint(const idist_group *g, const idist__call *c) {
    idist__fingerprint fingerprint;

    memset(&fingerprint, 0, sizeof fingerprint);
    fingerprint.kind = IDIST__SEND;
    fingerprint.dtype = (uint8_t)c->dtype;
    fingerprint.check = idist__fingerprint_tagged(g->w, c, c->count);
    fingerprint.root = g->rank;

    return fingerprint;
}

static void idist__send_start(idist__task *t) {
    const idist__call *c = &t->call;
    idist__fingerprint fingerprint = idist__send_fingerprint(t->group, c);

    if (c->root == t->group->rank) {
        idist__send_to_self(t, &fingerprint);
        return;
    }

    idist__send_post(t, idist__group_world_rank(t->group, c->root), (uint32_t)c->tag, c->send,
                     c->count * idist_dtype_size(c->dtype), &fingerprint);
}

// Waits a moment for another rank, in a call that needs nothing but that rank. False: it has waited
// long enough, or others need the lock; the call has to go on as a task.
static bool idist__send_quick_wait(const idist__ring *ring, int turns) {
    const idist__world *w = ring->w;
    int most = w->spin_ns ? (int)(w->spin_budget_ns / IDIST__TURN_NS) : IDIST__QUICK_YIELDS;

    if (ring->failed || __atomic_load_n(&w->lock_waiter_count, __ATOMIC_RELAXED)) return false;
    if (turns >= most) return false;
    if (w->spin_ns) idist__os_cpu_relax();
    else idist__os_thread_yield();

    return true;
}

// A send goes out at once if the transport takes all of it, and no earlier one waits for space.
// Needs no task, transfer or clock.
static bool idist__send_quick(idist_group *g, const idist__call *c) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__link *l = &ring->links[idist__group_world_rank(g, c->root)];
    idist__frame f;

    if (!l->open || !l->transport->write_message || l->out || l->write_dead) return false;
    if (ring->failed || c->count > IDIST__EAGER_BYTES) return false;

    memset(&f, 0, sizeof f);
    f.type = IDIST__EAGER;
    f.ctx = g->ctx;
    f.tag = (uint32_t)c->tag;
    f.fingerprint = idist__send_fingerprint(g, c);
    f.nbytes = c->count * idist_dtype_size(c->dtype);

    if (!idist__link_is_eager(l, (size_t)f.nbytes)) return false;
    if (l->window < f.nbytes + sizeof f) return false;

    if (!l->transport->write_message(l->port, &f, c->send, (size_t)f.nbytes)) return false;

    l->window -= (size_t)f.nbytes + sizeof f;
    l->p2p_sent++;

    return true;
}
