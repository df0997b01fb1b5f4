// ring/msg/message.h: unexpected messages, which arrived before their receives were posted
#pragma once

#include "base/mem.h"
#include "core/world.h"
#include "core/extent.h"
#include "ring/msg/ring_model.h"
#include "ring/msg/transfer.h"
#include "ring/msg/link.h"

static void idist__message_free(idist__ring *ring, idist__link *l, idist__message *msg) {
    *msg->at = msg->next;
    if (msg->next) msg->next->at = msg->at;
    else l->early_end = msg->at;
    idist__index_remove(&msg->hook);

    if (l->in_message == msg) {
        l->in_message = NULL;
        l->target = NULL;
    }

    if (msg->unknown) l->unknown_count--;
    idist__mem_free(&ring->w->cfg.mem, msg);
}

// Drops the oldest message from a rank for a group that does not exist here. Correct programs leave
// such messages behind if they free a group before all of its messages have arrived. So exceeding
// IDIST__UNKNOWN_MAX is not an error.
static void idist__message_drop_unknown(idist__ring *ring, idist__link *l) {
    idist__message *msg = l->early;
    bool complete;
    size_t nbytes;

    while (msg && (!msg->unknown || msg == l->in_message)) msg = msg->next;
    if (!msg) return;

    complete = msg->frame.type == IDIST__EAGER && msg->moved == msg->frame.nbytes;
    nbytes = (size_t)msg->frame.nbytes;
    idist__message_free(ring, l, msg);
    if (complete) idist__link_consumed(ring, l, nbytes);
}

// Returns the entry of a group that is among the last IDIST__CLOSED groups to be closed. Returns
// NULL if the group is not among them.
static const idist__closed *idist__message_find_closed(const idist__ring *ring, uint64_t ctx) {
    uint32_t i;

    for (i = 0; i < IDIST__CLOSED && i < ring->nclosed; i++)
        if (ring->closed[i].ctx == ctx) return &ring->closed[i];

    return NULL;
}

// Allocates a message that begins with this frame and has a buffer of `payload` bytes, and adds the
// message to the list of its link. Returns NULL if memory is exhausted.
static idist__message *idist__message_new(idist__ring *ring, idist__link *l,
                                          const idist__frame *frame, size_t payload) {
    idist__message *msg =
        (idist__message *)idist__mem_raw(&ring->w->cfg.mem, sizeof *msg + payload);

    if (!msg) return NULL;
    idist__mem_clear(msg, sizeof *msg);
    msg->frame = *frame;
    msg->data = (char *)(msg + 1);
    msg->stamp = ++ring->stamp;
    msg->peer = idist__link_rank(ring, l);

    msg->unknown = !idist__world_find_group(ring->w, frame->ctx);
    if (msg->unknown && ++l->unknown_count > IDIST__UNKNOWN_MAX)
        idist__message_drop_unknown(ring, l);

    msg->at = l->early_end;
    *l->early_end = msg;
    l->early_end = &msg->next;
    idist__index_insert(&msg->hook, ring->messages, idist__index_frame_key(msg->peer, frame));

    return msg;
}

// Indexes a message under its new tag if a matched probe has changed the tag. Called when no
// receive has taken the message.
static void idist__message_rekey(idist__ring *ring, idist__message *msg, uint32_t old_tag) {
    if (msg->frame.tag == old_tag) return;
    idist__index_remove(&msg->hook);
    idist__index_insert(&msg->hook, ring->messages, idist__index_frame_key(msg->peer, &msg->frame));
}

// Gives a message to a receive. The payload of an eager message may still be arriving.
static void idist__message_give(idist__ring *ring, idist__link *l, int peer, idist__message *msg,
                                idist__transfer *xfer) {
    xfer->frame = msg->frame;

    if (msg->self_send) {
        idist__transfer *sender = msg->self_send;
        idist__block_copy(xfer->data, sender->data, sender->nbytes);
        idist__message_free(ring, l, msg);
        idist__transfer_done(ring, sender);
        idist__transfer_received(ring, xfer, peer);
    } else if (msg->frame.type == IDIST__RTS) {
        idist__frame frame = msg->frame;
        idist__message_free(ring, l, msg);
        idist__link_answer_rts(ring, l, peer, xfer, &frame);
    } else if (msg->moved < msg->frame.nbytes) {
        msg->claim = xfer;
    } else {
        size_t nbytes = (size_t)msg->frame.nbytes;
        idist__block_copy(xfer->data, msg->data, nbytes);
        idist__message_free(ring, l, msg);
        if (peer != ring->w->group.rank) idist__link_consumed(ring, l, nbytes);
        idist__transfer_received(ring, xfer, peer);
    }
}
