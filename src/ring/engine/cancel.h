// ring/engine/cancel.h: cancels a call, and tells other ranks that a group failed
//
// After idist__cancel_task, the call's buffers are not accessed again, whatever still arrives. A
// task's transfers in the links are handled according to their state:
//
//   receives posted, or matched    removed; payloads that still arrive for them are dropped
//   sends not begun                removed; the credit of an eager send is returned
//   sends partly written           completed from a copy, to keep the stream valid
//   sends that wait for CTS        removed; the answer is ignored
//
// If no other rank has seen the call, cancelling it has no consequences. If a peer has already seen
// it, the group fails too. The return values tell which is the case.
#pragma once

#include "base/mem.h"
#include "launch/env.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/group.h"
#include "ring/shm/segment.h"
#include "ring/msg/ring_model.h"
#include "ring/msg/op.h"
#include "ring/msg/transfer.h"
#include "ring/msg/link.h"
#include "ring/msg/message.h"
#include "ring/share/share.h"
#include "ring/algo/host_run.h"
#include "ring/engine/deadlock.h"

// Invalidates the addresses that this rank has announced in RTS frames. From now on, peers on this
// host discard what they read at these addresses.
static void idist__cancel_withdraw(const idist__ring *ring) {
    if (!ring->shm) return;
    __atomic_fetch_add(&idist__segment_doorbell(ring->shm, ring->shm->me)->withdrawn, 1u,
                       __ATOMIC_SEQ_CST);
}

// Removes the transfers of a task from a list. Returns true if there were any.
static bool idist__cancel_list(idist__ring *ring, const idist__transfer_list *list,
                               const idist__task *t) {
    idist__transfer *xfer, *next;
    bool any = false;

    for (xfer = list->first; xfer; xfer = next) {
        next = xfer->next;
        if (xfer->task != t) continue;
        idist__transfer_take(xfer);
        idist__transfer_free(ring, xfer);
        any = true;
    }

    return any;
}

// Completes a frame that is partly written. Copies the payload, because the buffer belongs to the
// caller again.
static void idist__cancel_written(idist__ring *ring, idist__link *l, idist__transfer *xfer) {
    size_t unwritten = xfer->piece - xfer->piece_moved;

    if (idist__kind_is_p2p(xfer->task->call.kind)) idist__op_of(xfer->task)->transfer = NULL;
    xfer->task = NULL;
    if (xfer->frame.type == IDIST__RTS) idist__cancel_withdraw(ring);

    if (!unwritten) {
        // Once written, an RTS would wait for its CTS. Changing its type here, after the type was
        // written, prevents that.
        if (xfer->frame.type == IDIST__RTS) xfer->frame.type = IDIST__CREDIT;
        xfer->nbytes = xfer->piece = xfer->piece_moved = xfer->moved = 0;
        return;
    }

    xfer->owned = (char *)idist__mem_raw(&ring->w->cfg.mem, unwritten);

    if (!xfer->owned) {
        idist__link_write_failed(ring, l);
        return;
    }

    memcpy(xfer->owned, xfer->data + xfer->moved + xfer->piece_moved, unwritten);
    xfer->data = xfer->owned;
    xfer->moved = xfer->piece_moved = 0;
    xfer->nbytes = xfer->piece = unwritten;
}

// Removes a task's transfers from the output queue. Returns true if the peer may have seen any of
// them.
static bool idist__cancel_queue(idist__ring *ring, idist__link *l, const idist__task *t) {
    idist__transfer **at = &l->out;
    bool known = false;

    if (l->out && l->out->task == t && l->out->frame_moved + l->out->piece_moved > 0) {
        known = true;
        idist__cancel_written(ring, l, l->out);
    }

    while (*at) {
        idist__transfer *xfer = *at;

        if (xfer->task != t) {
            at = &xfer->next;
            continue;
        }

        known = known || xfer->started;
        if (xfer->frame.type == IDIST__EAGER) l->window += xfer->nbytes + IDIST__FRAME_BYTES;
        *at = xfer->next;
        idist__transfer_free(ring, xfer);
    }

    l->out_end = at;

    return known;
}

// Detaches a task from the unexpected messages of a link. Returns true if the task had claimed one.
static bool idist__cancel_early(idist__ring *ring, idist__link *l, const idist__task *t) {
    idist__message *msg, *next;
    bool claimed = false;

    for (msg = l->early; msg; msg = next) {
        next = msg->next;

        if (msg->claim && msg->claim->task == t) {
            idist__transfer_free(ring, msg->claim);
            msg->claim = NULL;
            claimed = true;
        }

        if (msg->self_send && msg->self_send->task == t) {
            idist__transfer_free(ring, msg->self_send);
            idist__message_free(ring, l, msg);
        }
    }

    return claimed;
}

// Removes a task's transfers from all links. Returns true if a peer may have seen any of them.
static bool idist__cancel_links(idist__ring *ring, const idist__task *t) {
    bool known = false;
    int i;

    for (i = 0; i < ring->w->group.size; i++) {
        idist__link *l = &ring->links[i];

        if (l->in_transfer && l->in_transfer->task == t) {
            idist__transfer *xfer = l->in_transfer;
            if (l->in.type == IDIST__EAGER) idist__transfer_free(ring, xfer); // in no list
            l->in_transfer = NULL;
            l->target = NULL;
            known = true;
        }

        known |= idist__cancel_early(ring, l, t);
        known |= idist__cancel_queue(ring, l, t);
        if (ring->shm && idist__deadlock_has_transfer(&l->waiting, t)) idist__cancel_withdraw(ring);
        known |= idist__cancel_list(ring, &l->waiting, t);
        known |= idist__cancel_list(ring, &l->receiving, t);
        idist__cancel_list(ring, &l->posted, t);
    }

    return known;
}

// Cancels a send that waits for CTS, or a receive that has found no message. This is a fast path:
// such a task has one transfer, and thousands of tasks may be cancelled at the same time. Returns
// false for any other task.
static bool idist__cancel_waiting(idist__ring *ring, const idist__task *t) {
    idist__transfer *xfer = idist__kind_is_p2p(t->call.kind) ? idist__op_of(t)->transfer : NULL;

    if (!xfer || !xfer->list) return false;
    if (t->call.kind == IDIST__RECV && !idist__deadlock_is_unmatched(t)) return false;
    if (t->call.kind == IDIST__SEND) idist__cancel_withdraw(ring);
    idist__transfer_take(xfer);
    idist__transfer_free(ring, xfer);

    return true;
}

// Withdraws the announcement that this rank waits in a receive.
static void idist__cancel_announced(idist__ring *ring, const idist__task *t) {
    idist__frame frame;

    if (!t->late.announced || t->call.root < 0) return;
    memset(&frame, 0, sizeof frame);
    frame.type = IDIST__WAITS;
    frame.fingerprint.kind = IDIST__RECV;
    idist__link_control(ring, &ring->links[idist__group_world_rank(t->group, t->call.root)], &frame,
                        NULL);
}

static void idist__cancel_collective(idist__ring *ring, idist__task *t) {
    idist__op *op = idist__op_of(t);

    if (op->algorithm == IDIST__ALGO_BY_HOST && !idist__host_run_cancel(t)) return;
    if (idist__share_serves(op->algorithm)) idist__share_cancel(t);

    idist__mem_free(&ring->w->cfg.mem, op->memory);
    op->memory = NULL;
}

static bool idist__cancel_task(idist__task *t) {
    idist__ring *ring = idist__ring_of(t->group->w);
    bool was_waiting = idist__cancel_waiting(ring, t);
    bool known = was_waiting || idist__cancel_links(ring, t); // the peer knows of a waiting send

    if (t->call.kind == IDIST__SEND) return !known;

    if (t->call.kind == IDIST__RECV) {
        idist__cancel_announced(ring, t);
        return was_waiting;
    }

    idist__cancel_collective(ring, t);

    return false;
}

// Cancels a receive if it has found no message. Such a receive is in a list of its group, and in no
// link's list.
static bool idist__cancel_retract(idist__task *t) {
    return idist__deadlock_is_unmatched(t) && idist__cancel_task(t);
}

// Tells the other members that a group failed.
static void idist__cancel_tell(idist_group *g) {
    idist__ring *ring = idist__ring_of(g->w);
    const idist__ring_group *rg = idist__ring_group_of(g);
    int i;

    idist__share_withdraw(g);

    for (i = 0; i < g->size; i++)
        if (i != g->rank)
            idist__link_abort(ring, &ring->links[g->ranks[i]], g->ctx, g->status, g->cause);

    if (rg->local) idist__group_fail(rg->local, g->status, g->cause);
    if (rg->leaders) idist__group_fail(rg->leaders, g->status, g->cause);
    idist__share_await_writers(g);
}
