// ring/engine/incoming.h: carries out the frames that arrive
//
// A frame is a header of 64 bytes and, for some types, a payload. ring/msg/ring_model.h lists the
// types. The reader (ring/engine/progress.h) calls idist__incoming_begin when a header is complete.
// Then it writes the payload to link.target, or drops the payload if link.target is NULL. Finally
// it calls idist__incoming_end.
//
// A peer is authenticated but may be faulty. None of its frames can make this rank write out of
// bounds or read a payload that the type does not carry. The function idist__incoming_is_allowed
// checks every header, and the link is closed if one is malformed. Some fields appear in error
// texts: a status, and the kind and root of a call. These fields must have values that a rank of
// this world can send.
#pragma once

#include "os/clock.h"
#include "base/fail.h"
#include "launch/env.h"
#include "core/model.h"
#include "core/world.h"
#include "core/fingerprint.h"
#include "core/group.h"
#include "core/matching.h"
#include "ring/msg/ring_model.h"
#include "ring/msg/transfer.h"
#include "ring/msg/link.h"
#include "ring/msg/message.h"
#include "ring/msg/history.h"
#include "ring/msg/match.h"
#include "ring/share/pool.h"
#include "ring/engine/deadlock.h"
#include "ring/engine/ask.h"

// Writes a default text for a failure whose sender had no memory for a text.
static void idist__incoming_excuse(const idist__ring *ring, idist__link *l, int peer) {
    snprintf(l->text, sizeof l->text, "rank %d on %s reports a failure without its cause", peer,
             ring->w->nodes[peer].hostname);
}

// Handles ABORT: a group has failed on another rank. If the group does not exist here yet, keeps
// the frame until it does.
static void idist__incoming_abort(idist__ring *ring, idist__link *l, int peer) {
    idist_group *g = idist__world_find_group(ring->w, l->in.ctx);
    int status = (int)(int64_t)l->in.aux;
    idist__message *msg;

    l->text[l->in.nbytes] = 0;
    if (!l->in.nbytes) idist__incoming_excuse(ring, l, peer);
    if (l->peer_waits.ctx == l->in.ctx) l->peer_waits.type = 0; // the peer's call has ended

    if (g) {
        idist__group_fail(g, (idist_status)status, l->text);
        return;
    }

    if (idist__message_find_closed(ring, l->in.ctx)) return;
    msg = idist__message_new(ring, l, &l->in, sizeof l->text);
    if (!msg) return;
    msg->frame.aux = (uint64_t)(int64_t)status;
    memcpy(msg->data, l->text, sizeof l->text);
}

// Handles WAITS: the peer waits in a call, perhaps for this rank. Answers that this rank has
// entered the call too, or which call of the group it entered last. If the two ranks' calls do not
// match, both ranks learn of the mismatch.
static void idist__incoming_waits(idist__ring *ring, idist__link *l, int peer) {
    const idist__frame *waits = &l->in;
    idist_group *g = idist__world_find_group(ring->w, waits->ctx);
    const idist__closed *closed = g ? NULL : idist__message_find_closed(ring, waits->ctx);
    bool p2p = waits->fingerprint.kind == IDIST__SEND || waits->fingerprint.kind == IDIST__RECV;
    idist__frame answer;

    l->peer_waits = *waits;

    // The peer may not have been connected when the group failed.
    if (closed && closed->status != IDIST_OK)
        idist__link_abort(ring, l, waits->ctx, closed->status, "the group had already failed");

    if (!p2p && g && g->status == IDIST_OK) {
        if (!idist__history_agrees(ring, g, peer, waits)) return;
        answer = *waits;
        answer.type = IDIST__HERE;
        if ((int32_t)(waits->fingerprint.seq - g->seq) > 0)
            answer.fingerprint = idist__ring_group_of(g)->history[g->seq % IDIST__HISTORY];
        idist__link_control(ring, l, &answer, NULL);
    }

    idist__deadlock_find(ring, peer);
}

// Handles ASK: a call of the peer is nearly out of time. Answers with the rank that this rank waits
// for, and sets UNANSWERED if that rank does not answer this rank.
static void idist__incoming_ask(idist__ring *ring, idist__link *l) {
    const idist__task *t = idist__ask_call(ring->w);
    int whom = t ? idist__absent_whom(t) : -1;
    bool pass_on = l->in.flags & IDIST__PASS_ON;
    idist__frame answer;

    if (whom == ring->w->group.rank) whom = -1;
    memset(&answer, 0, sizeof answer);
    answer.type = IDIST__ANSWER;
    answer.aux = (uint64_t)whom + 1;
    if (whom >= 0) answer.fingerprint = idist__fingerprint_of_task(t, IDIST__ALGO_AUTO);
    if (whom >= 0 && idist__ask_is_silent(&ring->links[whom])) answer.flags = IDIST__UNANSWERED;
    idist__link_control(ring, l, &answer, NULL);
    if (whom >= 0 && pass_on) idist__ask_rank(ring, whom, 0);
}

// Handles ANSWER, the reply to an ASK from this rank. Then asks the rank that the peer waits for.
static void idist__incoming_answer(idist__ring *ring, idist__link *l) {
    int whom = (int)l->in.aux - 1;

    l->asks = false;
    l->answered_ns = idist__os_clock_now_ns();
    l->answer = l->in;
    if (whom >= 0 && l->asked_ns >= ring->asking_ns && ring->asking_ns) idist__ask_once(ring, whom);
}

// Handles BYE: the peer leaves the world. After a failure the peer sends nothing more, and reads
// nothing.
static void idist__incoming_bye(idist__ring *ring, idist__link *l, int peer) {
    idist__world *w = ring->w;

    l->bye = true;
    l->bye_status = (idist_status)(int)(int64_t)l->in.aux;
    ring->left_count++;
    if (l->bye_status == IDIST_OK) return;

    l->text[l->in.nbytes] = 0;
    if (!l->in.nbytes) idist__incoming_excuse(ring, l, peer);
    if (w->group.rank >= 0) idist__ring_fail(ring, &w->group, l->bye_status, l->text);
    idist__link_close(ring, l);
}

// Handles HERE, the reply to a WAITS from this rank.
static void idist__incoming_here(idist__ring *ring, idist__link *l, int peer) {
    idist_group *g = idist__world_find_group(ring->w, l->in.ctx);

    l->here_ns = idist__os_clock_now_ns();
    if (g && g->status == IDIST_OK) idist__history_agrees(ring, g, peer, &l->in);
}

static void idist__incoming_no_memory(idist__ring *ring, idist_group *g) {
    idist__ring_fail_memory(ring, g ? g : &ring->w->group);
}

// Handles EAGER and RTS, which begin a message. The payload of an EAGER is written to the matching
// receive's buffer, or to newly allocated memory if there is no such receive. An RTS has no
// payload. Returns false if the frame is malformed.
static bool idist__incoming_message(idist__ring *ring, idist__link *l, int peer) {
    idist__frame *frame = &l->in;
    idist_group *g = idist__world_find_group(ring->w, frame->ctx);
    bool p2p = frame->fingerprint.kind == IDIST__SEND;
    bool closed = !g && idist__message_find_closed(ring, frame->ctx);
    idist__transfer *receive;

    if (p2p && !idist__fingerprint_has_nbytes(&frame->fingerprint, frame->nbytes)) return false;

    if (p2p) l->p2p_received++;
    l->peer_waits.type = 0;
    receive = idist__match_frame(ring, l, peer, frame);

    if (frame->type == IDIST__RTS) {
        if (receive) idist__link_answer_rts(ring, l, peer, receive, frame);
        else if (!closed && !idist__message_new(ring, l, frame, 0))
            idist__incoming_no_memory(ring, g);
        l->left = 0;
        return true;
    }

    l->in_transfer = receive;

    if (receive) {
        receive->frame = *frame;
        l->target = receive->data;
    } else if (!closed && (!g || g->status == IDIST_OK)) {
        l->in_message = idist__message_new(ring, l, frame, (size_t)frame->nbytes);
        l->target = l->in_message ? l->in_message->data : NULL;
        if (!l->in_message) idist__incoming_no_memory(ring, g);
    }

    return true;
}

// Finds the send that a CTS or PULLED answers, and takes it out of its list. Returns NULL if the
// send has been cancelled.
static idist__transfer *idist__incoming_answered(idist__ring *ring, const idist__link *l) {
    idist__transfer *xfer = idist__transfer_find(ring, &l->waiting, l->in.id);
    if (xfer) idist__transfer_take(xfer);
    return xfer;
}

// Handles a CTS that answers no RTS: the peer has posted a receive of a collective. If this rank
// has not posted the send yet, keeps the frame until it does.
static void idist__incoming_granted(idist__ring *ring, idist__link *l, int peer) {
    idist_group *g = idist__world_find_group(ring->w, l->in.ctx);
    idist__transfer *xfer;

    if (g ? g->status != IDIST_OK : idist__message_find_closed(ring, l->in.ctx) != NULL) return;
    if (g && !idist__history_agrees(ring, g, peer, &l->in)) return;

    xfer = idist__match_step(ring, &l->waiting, peer, &l->in);
    if (xfer) idist__link_send_data(ring, l, xfer, l->in.aux);
    else if (!idist__message_new(ring, l, &l->in, 0)) idist__incoming_no_memory(ring, g);
}

// Handles CTS: the peer has a buffer for a message.
static void idist__incoming_clear_to_send(idist__ring *ring, idist__link *l, int peer) {
    idist__transfer *xfer;

    if (!l->in.id) {
        idist__incoming_granted(ring, l, peer);
        return;
    }

    xfer = idist__incoming_answered(ring, l);
    if (xfer) idist__link_send_data(ring, l, xfer, l->in.aux);
}

// Handles PULLED: the peer has read a message directly from this rank's memory.
static void idist__incoming_pulled(idist__ring *ring, const idist__link *l) {
    idist__transfer *xfer = idist__incoming_answered(ring, l);
    if (xfer) idist__transfer_done(ring, xfer);
}

// Handles DATA, a piece of a message that this rank has asked for. Returns false if the piece is
// longer than the rest of the message, or carries a number that this rank did not assign.
static bool idist__incoming_data(idist__ring *ring, idist__link *l, int peer) {
    idist__transfer *xfer = idist__transfer_find(ring, &l->receiving, l->in.id);

    if (!xfer) {
        xfer = idist__match_granted(ring, l, peer, &l->in);
        if (xfer && (!xfer->granted || xfer->id != l->in.id)) return false;
    }

    if (xfer && l->in.nbytes > xfer->nbytes - xfer->moved) return false;
    l->in_transfer = xfer; // NULL if the receive has been cancelled
    l->target = xfer ? xfer->data + xfer->moved : NULL;

    return true;
}

// Returns true if the frame carries the status of a failure.
static bool idist__incoming_has_failure(const idist__frame *frame) {
    int64_t status = (int64_t)frame->aux;
    return status < 0 && status >= INT32_MIN && idist__fail_is_failure((int)status);
}

// Returns true if a rank of this world can be in the call that the frame names.
static bool idist__incoming_names_call(const idist__ring *ring, const idist__frame *frame) {
    const idist__fingerprint *print = &frame->fingerprint;

    if (frame->type == IDIST__HERE && !print->kind && !print->seq)
        return true; // the peer has entered no call yet
    if (frame->type == IDIST__ANSWER && !frame->aux) return true;
    if (frame->type < IDIST__WAITS && print->kind == IDIST__RECV) return false;

    return print->kind > IDIST__NONE && print->kind < IDIST__KIND_COUNT && print->root >= -1 &&
           idist__fingerprint_root(print) < ring->w->group.size;
}

// Returns true if the peer may send this header. Called for frames that carry no message.
static bool idist__incoming_is_control(const idist__ring *ring, const idist__link *l, int peer) {
    const idist__frame *frame = &l->in;
    bool has_text = frame->type == IDIST__ABORT || (frame->type == IDIST__BYE && frame->aux);

    if (has_text) return frame->nbytes <= IDIST__TEXT_BYTES && idist__incoming_has_failure(frame);
    if (frame->type == IDIST__CREDIT) return frame->nbytes <= IDIST__WINDOW_BYTES - l->window;
    if (frame->nbytes) return false;

    switch (frame->type) {
    case IDIST__CTS: return frame->id || idist__incoming_names_call(ring, frame);
    case IDIST__WAITS:
    case IDIST__HERE: return idist__incoming_names_call(ring, frame);
    case IDIST__LEFT: return ring->shm && ring->shm->local[peer] >= 0;
    case IDIST__ANSWER:
        if (frame->aux > (uint64_t)ring->w->group.size || !l->asks) return false;
        return idist__incoming_names_call(ring, frame);
    case IDIST__PULLED:
    case IDIST__BYE:
    case IDIST__ASK: return true;
    default: return false;
    }
}

// Returns true if the peer may send this header. Unexpected messages are limited by the eager
// window and, for groups that do not exist here, by IDIST__UNKNOWN_MAX. Frames without payload
// (RTS, CTS) for groups that exist are not limited, because a correct rank may have any number of
// calls in progress.
static bool idist__incoming_is_allowed(const idist__ring *ring, const idist__link *l, int peer) {
    const idist__frame *frame = &l->in;
    const idist_group *g = idist__world_find_group(ring->w, frame->ctx);
    bool names_group =
        frame->type <= IDIST__DATA || (frame->type >= IDIST__WAITS && frame->type <= IDIST__LEFT);

    if (names_group && g && idist__ring_group_of(g)->rank_of[peer] < 0) return false;

    switch (frame->type) {
    case IDIST__EAGER:
        if (frame->nbytes > IDIST__EAGER_BYTES || !idist__incoming_names_call(ring, frame))
            return false;
        return frame->nbytes + IDIST__FRAME_BYTES <= l->their_window;
    case IDIST__RTS: return idist__incoming_names_call(ring, frame);
    case IDIST__DATA:
        return frame->nbytes <= IDIST__PIECE_BYTES && idist__incoming_names_call(ring, frame);
    default: return idist__incoming_is_control(ring, l, peer);
    }
}

// Handles a complete header. Returns false if it is malformed.
static bool idist__incoming_begin(idist__ring *ring, idist__link *l, int peer) {
    bool ok = true;

    l->in_transfer = NULL;
    l->in_message = NULL;
    l->target = NULL;
    if (!idist__incoming_is_allowed(ring, l, peer)) return false;

    l->left = (size_t)l->in.nbytes;

    switch (l->in.type) {
    case IDIST__EAGER:
        l->their_window -= (size_t)l->in.nbytes + IDIST__FRAME_BYTES;
        ok = idist__incoming_message(ring, l, peer);
        break;
    case IDIST__RTS: ok = idist__incoming_message(ring, l, peer); break;
    case IDIST__CTS: idist__incoming_clear_to_send(ring, l, peer); break;
    case IDIST__DATA: ok = idist__incoming_data(ring, l, peer); break;
    case IDIST__PULLED: idist__incoming_pulled(ring, l); break;
    case IDIST__CREDIT:
        l->window += (size_t)l->in.nbytes;
        l->left = 0; // nbytes is the credit; no payload follows
        break;
    case IDIST__WAITS: idist__incoming_waits(ring, l, peer); break;
    case IDIST__HERE: idist__incoming_here(ring, l, peer); break;
    case IDIST__ABORT: l->target = l->text; break;
    case IDIST__LEFT: idist__pool_member_left(ring, l->in.ctx); break;
    case IDIST__ASK: idist__incoming_ask(ring, l); break;
    case IDIST__ANSWER: idist__incoming_answer(ring, l); break;
    default: l->target = l->text; break; // IDIST__BYE
    }

    return ok;
}

// Finishes a frame whose payload is complete.
static void idist__incoming_end(idist__ring *ring, idist__link *l, int peer) {
    idist__transfer *xfer = l->in_transfer;
    idist__message *msg = l->in_message;

    l->in_transfer = NULL;
    l->in_message = NULL;

    if (l->in.type == IDIST__EAGER) {
        if (msg) {
            msg->moved = (size_t)l->in.nbytes;
            if (msg->claim) idist__message_give(ring, l, peer, msg, msg->claim);
            return;
        }

        idist__link_consumed(ring, l, (size_t)l->in.nbytes);
        if (xfer) idist__transfer_received(ring, xfer, peer);
    } else if (l->in.type == IDIST__DATA && xfer) {
        xfer->moved += (size_t)l->in.nbytes;
        if (xfer->moved < xfer->nbytes) return;
        idist__transfer_take(xfer);
        idist__transfer_received(ring, xfer, peer);
    } else if (l->in.type == IDIST__ABORT) {
        idist__incoming_abort(ring, l, peer);
    } else if (l->in.type == IDIST__BYE) {
        idist__incoming_bye(ring, l, peer);
    }
}
