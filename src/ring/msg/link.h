// ring/msg/link.h: writes frames to one link; credits, rendezvous
//
// WHAT IT IS
//
// Sends non-blocking messages to one rank, over any transport. The functions idist_send and
// idist_recv exchange such messages directly. Most collectives are algorithms made of such messages
// (ring/algo/).
//
//   transfer   one send or receive in progress, posted by this rank
//   message    a message that arrived before its receive was posted (unexpected)
//   frame      the 64-byte header of everything that goes through a link
//   link       the connection to one rank: its output, its input, and its credits
//
// HOW IT FITS
//
// Algorithms and calls post transfers. ring/engine/progress.h reads the links, and
// ring/engine/incoming.h handles the frames that arrive, with the functions of this file. This file
// does not depend on the transport of a link, except that a link may have no connection. Each
// transport states what it can do (idist__transport in ring/shm/).
//
// A SMALL MESSAGE (eager)
//
// sender     idist__send_post -> idist__link_push -> idist__link_flush -> transport->write
// receiver   idist__progress_read (engine) -> idist__match_frame -> payload is stored in the
//            receive's buffer, or in a message if no receive is posted -> idist__transfer_received
// sender     gets CREDIT back when the receiver has consumed half of the window
//
// A LARGE MESSAGE (rendezvous)
//
// sender     RTS                      a message is ready at this address
// receiver   PULLED                   has read the message in the sender's memory, or
//            CTS                      has a buffer for the message
// sender     DATA, DATA, ...          pieces of 1 MiB; other frames may be sent in between
//
// If the receiver can read the sender's memory, idist__link_wants_data chooses between PULLED and
// CTS.
//
// A LARGE MESSAGE OF A COLLECTIVE, WHERE THE RECEIVER CANNOT READ THE SENDER'S MEMORY (granted)
//
// Both ranks expect the message before it is sent, so the sender need not ask the receiver.
//
// receiver   CTS                      when the receive is posted
// sender     DATA, DATA, ...          when the send is posted and the CTS has arrived
//
// Each such message takes one CTS. A sender that has to wait for the CTS sends an RTS, unless an
// earlier message of the same call already waits. The fingerprint of the RTS tells the receiver
// which call the sender is in; the RTS needs no answer.
#pragma once

#include "os/poll.h"
#include "os/socket.h"
#include "base/mem.h"
#include "core/model.h"
#include "core/world.h"
#include "core/task.h"
#include "core/together.h"
#include "core/matching.h"
#include "ring/shm/transport.h"
#include "ring/msg/ring_model.h"
#include "ring/msg/sockets.h"
#include "ring/msg/transfer.h"

static int idist__link_rank(const idist__ring *ring, const idist__link *l) {
    return (int)(l - ring->links);
}

// Watches descriptor `in` for input and `out` for space, and stops watching the previous
// descriptors. -1 stands for no descriptor. Returns false with errno set if the system cannot watch
// a descriptor.
static bool idist__link_watch(const idist__ring *ring, idist__link *l, int in, int out) {
    int rank = idist__link_rank(ring, l), was[2], i;
    bool ok = true;

    if (l->watched_in == in && l->watched_out == out) return true;
    was[0] = l->watched_in;
    was[1] = l->watched_out != l->watched_in ? l->watched_out : -1;
    l->watched_in = in;
    l->watched_out = out;

    for (i = 0; i < 2; i++)
        if (was[i] >= 0 && was[i] != in && was[i] != out)
            idist__os_watch_set(ring->watch, was[i], rank, false, false);

    if (in >= 0) ok = idist__os_watch_set(ring->watch, in, rank, true, in == out);
    if (ok && out >= 0 && out != in) ok = idist__os_watch_set(ring->watch, out, rank, false, true);

    return ok;
}

// Watches the descriptor that is read next. While queued output waits for space, also watches the
// descriptor that is written next.
static void idist__link_watch_next(idist__ring *ring, idist__link *l, bool awaits_space) {
    int in = l->transport->descriptor(l->port, false);
    int out = awaits_space ? l->transport->descriptor(l->port, true) : -1;

    if (!idist__link_watch(ring, l, in, out))
        idist__ring_fail(ring, &ring->w->group, IDIST_ERR_NO_MEMORY,
                         "a rank cannot watch the descriptors of its connections");
}

static void idist__link_leave_transport(idist__ring *ring, idist__link *l) {
    l->transport->close(l->port);
    if (l->polled) ring->polled_link_count--;
}

static void idist__link_close(idist__ring *ring, idist__link *l) {
    if (!l->open) return;
    l->open = false;
    if (l->corked) ring->corked_count--;
    l->corked = false;
    idist__link_watch(ring, l, -1, -1);
    idist__link_leave_transport(ring, l);
}

// Sets the transport that moves the bytes of a link from now on. On failure, returns false with
// errno set, and leaves the link unchanged.
static bool idist__link_open(idist__ring *ring, idist__link *l, const idist__transport *transport,
                             void *port) {
    if (!idist__link_watch(ring, l, transport->descriptor(port, false), -1)) {
        l->watched_in = -1;
        return false;
    }

    if (l->open) idist__link_leave_transport(ring, l);
    l->transport = transport;
    l->port = port;
    l->open = true;
    l->polled = transport->polled;
    if (l->polled) ring->polled_link_count++;

    return true;
}

static bool idist__link_is_connected(const idist__link *l) {
    return l->open && l->transport != &idist__transport_none;
}

// Requests a connection for a link that has none, because this rank sends or receives a message
// over the link. A receiver also needs the connection, because otherwise it would not learn that
// its peer has died.
static void idist__link_want(idist__ring *ring, idist__link *l) {
    if (l->wanted || !l->open || l->transport != &idist__transport_none) return;
    l->wanted = true;
    l->next_wanted = ring->wanted;
    ring->wanted = l;
}

static void idist__link_push(idist__link *l, idist__transfer *xfer) {
    xfer->next = NULL;
    xfer->frame_moved = xfer->piece_moved = 0;
    *l->out_end = xfer;
    l->out_end = &xfer->next;
}

static void idist__link_pop(idist__link *l) {
    l->out = l->out->next;
    if (!l->out) l->out_end = &l->out;
}

// Handles a failed write. Drops the queued control frames, because the peer no longer reads. Keeps
// the transfers that tasks wait for. The read path finds out whether the peer was lost or has left,
// and the tasks then end with their group.
static void idist__link_write_failed(idist__ring *ring, idist__link *l) {
    idist__transfer **at = &l->out;

    l->write_dead = true;

    while (*at) {
        idist__transfer *xfer = *at;

        if (xfer->task) {
            at = &xfer->next;
            continue;
        }

        *at = xfer->next;
        idist__transfer_free(ring, xfer);
    }

    l->out_end = at;
}

// Handles a transfer whose frame and payload have been written. The transfer then waits for an
// answer, is complete, or queues its next piece.
static void idist__link_sent(idist__ring *ring, idist__link *l, idist__transfer *xfer) {
    size_t left;

    idist__link_pop(l);

    if (xfer->frame.type == IDIST__RTS && xfer->id) { // this RTS needs an answer
        idist__transfer_put(ring, &l->waiting, xfer, idist__index_id_key(xfer->id));
        return;
    }

    if (xfer->frame.type == IDIST__DATA) xfer->moved += xfer->piece;

    if (xfer->frame.type != IDIST__DATA || xfer->moved >= xfer->nbytes) {
        idist__transfer_done(ring, xfer);
        return;
    }

    left = xfer->nbytes - xfer->moved;
    xfer->piece = left < IDIST__PIECE_BYTES ? left : IDIST__PIECE_BYTES;
    xfer->frame.nbytes = xfer->piece;
    idist__link_push(l, xfer); // at the end: a large message must not hold up small ones
}

static bool idist__link_is_out(const idist__transfer *xfer) {
    return xfer->frame_moved == IDIST__FRAME_BYTES && xfer->piece_moved == xfer->piece;
}

// Collects the frames and payloads that are written next. Returns the number of parts.
static int idist__link_gather(const idist__link *l, idist__os_part *parts) {
    idist__transfer *xfer;
    int n = 0;

    for (xfer = l->out; xfer && n + 2 <= IDIST__PARTS; xfer = xfer->next) {
        size_t frame_left = IDIST__FRAME_BYTES - xfer->frame_moved;

        if (frame_left) {
            parts[n].data = (char *)&xfer->frame + xfer->frame_moved;
            parts[n++].nbytes = frame_left;
        }

        if (xfer->piece_moved < xfer->piece) {
            parts[n].data = xfer->data + xfer->moved + xfer->piece_moved;
            parts[n++].nbytes = xfer->piece - xfer->piece_moved;
        }
    }

    return n;
}

// Marks n bytes of the parts from idist__link_gather as written.
static void idist__link_account(const idist__link *l, size_t n) {
    idist__transfer *xfer;

    for (xfer = l->out; n; xfer = xfer->next) {
        size_t left = IDIST__FRAME_BYTES - xfer->frame_moved, k = n < left ? n : left;

        xfer->started = true;
        xfer->frame_moved += k;
        n -= k;
        left = xfer->piece - xfer->piece_moved;
        k = n < left ? n : left;
        xfer->piece_moved += k;
        n -= k;
    }
}

// Writes as much as the transport accepts. Completing a transfer may end its task, which may send
// more and call this function again. So all bytes of a write are accounted for before any transfer
// is completed.
static void idist__link_flush(idist__ring *ring, idist__link *l) {
    bool full = false;

    if (l->corked) ring->corked_count--;
    l->corked = false;
    l->corked_nbytes = 0;

    while (l->out && !l->write_dead && !full) {
        idist__os_part parts[IDIST__PARTS];
        ptrdiff_t n;

        if (idist__link_is_out(l->out)) {
            idist__link_sent(ring, l, l->out);
            continue;
        }

        n = l->transport->write(l->port, parts, idist__link_gather(l, parts));
        if (n < 0) idist__link_write_failed(ring, l);
        else idist__link_account(l, (size_t)n);
        full = n == 0;
    }

    if (l->polled) idist__link_watch_next(ring, l, full);
}

// Returns true if a small send may be held back until the next send, so that one system call writes
// both. The program must not be waiting for the send. Only later sends of a burst are held back;
// the first send is written immediately. Sends that are held back are written when the program next
// waits or the progress thread next polls.
static bool idist__link_may_cork(const idist__link *l, const idist__task *t, size_t nbytes) {
    bool in_burst = t->started_ns - l->sent_ns < IDIST__CORK_NS;
    bool waits = !idist__task_is_async(t) && !idist__together_now.depth;

    return l->polled && in_burst && !waits && nbytes <= IDIST__CORK_MESSAGE &&
           l->corked_nbytes + nbytes <= IDIST__CORK_BYTES && idist__link_is_connected(l);
}

static void idist__link_cork(idist__ring *ring, idist__link *l, size_t nbytes) {
    if (!l->corked) ring->corked_count++;
    l->corked = true;
    l->corked_nbytes += nbytes + IDIST__FRAME_BYTES;
}

// Appends a text to the frame of an ABORT or BYE. If memory for the text cannot be allocated, the
// frame is sent without the text.
static void idist__link_add_text(idist__ring *ring, idist__transfer *xfer, const char *text) {
    size_t nbytes = strlen(text);

    xfer->owned = (char *)idist__mem_alloc(&ring->w->cfg.mem, nbytes + 1);

    if (xfer->owned) {
        memcpy(xfer->owned, text, nbytes);
        xfer->data = xfer->owned;
        xfer->nbytes = xfer->piece = nbytes;
    }

    xfer->frame.nbytes = xfer->nbytes;
}

// Queues a control frame, for which no task waits. `text`, if not NULL, follows the frame. While
// the link has no connection, RTS and CTS stay queued, and all other frames are dropped. When the
// connection is made, idist__announce_late tells the peer what it has missed.
static void idist__link_control(idist__ring *ring, idist__link *l, const idist__frame *frame,
                                const char *text) {
    bool waits = frame->type == IDIST__RTS || frame->type == IDIST__CTS;
    idist__transfer *xfer;

    if (!l->open || l->write_dead || !(waits || idist__link_is_connected(l))) return;
    xfer = idist__transfer_new(ring);

    if (!xfer) { // the peer would wait for this frame
        idist_group *g = idist__world_find_group(ring->w, frame->ctx);
        idist__ring_fail_memory(ring, g ? g : &ring->w->group);
        return;
    }

    xfer->send = true;
    xfer->frame = *frame;
    if (text) idist__link_add_text(ring, xfer, text);

    idist__link_push(l, xfer);
    idist__link_flush(ring, l);
}

// Tells a peer that this rank leaves the world and, if the world has failed, with which status and
// text.
static void idist__link_bye(idist__ring *ring, idist__link *l) {
    bool failed = ring->bye_status != IDIST_OK;
    idist__frame frame;

    memset(&frame, 0, sizeof frame);
    frame.type = IDIST__BYE;
    frame.aux = (uint64_t)(int64_t)ring->bye_status;
    idist__link_control(ring, l, &frame, failed ? ring->w->group.cause : NULL);
}

// Tells a peer that a group has failed.
static void idist__link_abort(idist__ring *ring, idist__link *l, uint64_t ctx, idist_status status,
                              const char *cause) {
    idist__frame frame;

    memset(&frame, 0, sizeof frame);
    frame.type = IDIST__ABORT;
    frame.ctx = ctx;
    frame.aux = (uint64_t)(int64_t)status;
    idist__link_control(ring, l, &frame, cause);
}

// Counts eager bytes that were consumed. Returns these bytes to the sender as credit once they
// amount to half of the window.
static void idist__link_consumed(idist__ring *ring, idist__link *l, size_t nbytes) {
    idist__frame frame;

    l->owed += nbytes + IDIST__FRAME_BYTES;
    if (l->owed < IDIST__WINDOW_BYTES / 2) return;

    memset(&frame, 0, sizeof frame);
    frame.type = IDIST__CREDIT;
    frame.nbytes = l->owed;
    l->their_window += l->owed;
    l->owed = 0;
    idist__link_control(ring, l, &frame, NULL);
}

// Returns true if the peer may read messages directly in our memory. If so, and if `withdrawn` is
// not NULL, sets *withdrawn to the number of our withdrawn sends, which our RTS must contain.
static bool idist__link_exposes_memory(const idist__link *l, uint8_t *withdrawn) {
    return l->transport->exposes_memory && l->transport->exposes_memory(l->port, withdrawn);
}

// Returns true if reading a message in the sender's memory is slower than a copy through the link.
static bool idist__link_reads_slowly(const idist__link *l) {
    return l->transport->reads_slowly && l->transport->reads_slowly(l->port);
}

// Returns true if a message of this size is sent without waiting for the receiver, provided that
// there is enough credit.
static bool idist__link_is_eager(const idist__link *l, size_t nbytes) {
    if (nbytes <= IDIST__EAGER_EXPOSED_BYTES) return true;
    if (nbytes > IDIST__EAGER_BYTES) return false;
    return !idist__link_exposes_memory(l, NULL) || idist__link_reads_slowly(l);
}

// Returns true if a message of a collective is sent by grant. The result is the same at both ends
// of the link.
static bool idist__link_grants(const idist__link *l, size_t nbytes) {
    return nbytes > IDIST__EAGER_BYTES && !idist__link_exposes_memory(l, NULL);
}

// Sends the CTS for a receive that was just posted, so that the peer need not send an RTS first.
static void idist__link_grant(idist__ring *ring, idist__link *l, idist__transfer *xfer) {
    idist__frame cts = xfer->frame;

    xfer->granted = true;
    xfer->id = ++ring->next_id;
    cts.type = IDIST__CTS;
    cts.aux = xfer->id;
    idist__link_control(ring, l, &cts, NULL);
}

// Queues the first DATA frame of a message. `id` is the peer's number for the receive.
static void idist__link_send_data(idist__ring *ring, idist__link *l, idist__transfer *xfer,
                                  uint64_t id) {
    xfer->frame.type = IDIST__DATA;
    xfer->frame.id = id;
    xfer->frame.aux = xfer->nbytes;
    xfer->piece = xfer->nbytes < IDIST__PIECE_BYTES ? xfer->nbytes : IDIST__PIECE_BYTES;
    xfer->frame.nbytes = xfer->piece;
    idist__link_push(l, xfer);
    idist__link_flush(ring, l);
}

// Returns true if this rank has announced a send that its peer has not answered yet.
static bool idist__link_any_waits(const idist__ring *ring) {
    int i;

    for (i = 0; i < ring->w->group.size; i++)
        if (ring->links[i].waiting.first) return true;
    return false;
}

// Returns true if an announced message should be sent as DATA instead of being read in the sender's
// memory. Two processors then copy at the same time, one into the pipe and one out of it, which
// takes as little as half the time. The sender must be waiting in a call. This rank need not be
// waiting, because its progress thread also reads the pipe. Where reads are fast, the message must
// be small enough for the caches, and this rank must not have an announced send itself. A receive
// with its own time-out is excluded, because DATA arrives only while the sender or its progress
// thread keeps running.
static bool idist__link_wants_data(const idist__ring *ring, const idist__link *l,
                                   const idist__transfer *receive, const idist__frame *frame) {
    if (frame->fingerprint.kind != IDIST__SEND || !receive->task->patient) return false;
    if (!l->transport->attends || !l->transport->attends(l->port)) return false;
    if (idist__link_reads_slowly(l)) return true;
    return frame->nbytes <= IDIST__COPIED_BYTES && !idist__link_any_waits(ring);
}

// Reads an announced message in the memory of its sender. Returns false if that is not possible, or
// if the sender may have cancelled the message in the meantime and reused the memory.
static bool idist__link_pull(idist__ring *ring, idist__link *l, int peer, idist__transfer *xfer,
                             const idist__frame *frame) {
    idist__frame pulled;

    if (!frame->aux || !l->transport->pull) return false;
    if (!l->transport->pull(l->port, frame->aux, frame->flags, xfer->data, (size_t)frame->nbytes))
        return false;

    memset(&pulled, 0, sizeof pulled);
    pulled.type = IDIST__PULLED;
    pulled.ctx = frame->ctx;
    pulled.id = frame->id;
    xfer->frame = *frame;
    idist__link_control(ring, l, &pulled, NULL);
    idist__transfer_received(ring, xfer, peer);

    return true;
}

// Answers an RTS that was matched to a receive. The receive is in no list. Reads the message from
// the sender's memory, or sends CTS. A granted receive has already sent its CTS, and is put back
// into `posted`.
static void idist__link_answer_rts(idist__ring *ring, idist__link *l, int peer,
                                   idist__transfer *xfer, const idist__frame *frame) {
    idist__frame cts;

    if (xfer->granted) {
        idist__transfer_put(ring, &l->posted, xfer, idist__index_frame_key(peer, frame));
        return;
    }

    if (!idist__link_wants_data(ring, l, xfer, frame) &&
        idist__link_pull(ring, l, peer, xfer, frame))
        return;

    xfer->id = ++ring->next_id;
    xfer->nbytes = (size_t)frame->nbytes;
    xfer->moved = 0;
    xfer->frame = *frame;
    xfer->started = true;
    idist__transfer_put(ring, &l->receiving, xfer, idist__index_id_key(xfer->id));

    memset(&cts, 0, sizeof cts);
    cts.type = IDIST__CTS;
    cts.ctx = frame->ctx;
    cts.id = frame->id;
    cts.aux = xfer->id;
    idist__link_control(ring, l, &cts, NULL);
}
