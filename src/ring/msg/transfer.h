// ring/msg/transfer.h: sends and receives in progress, and tables to find them by what frames say
//
// Functions: idist__transfer_*, idist__index_*.
#pragma once

#include "base/mem.h"
#include "base/hash.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/fingerprint.h"
#include "core/task.h"
#include "core/matching.h"
#include "ring/msg/ring_model.h"
#include "ring/msg/op.h"

//------------------------------------------------------------------------------
// finding transfers and messages by what frames say
//
// Thousands of sends and receives may be in progress at the same time. Every frame of a message
// belongs to one of them. So the ring has two hash tables: ring->transfers for the transfers, and
// ring->messages for the unexpected messages.
//
//     what a frame asks for                          its key
//     a posted receive                               group, peer, and tag or number of the call
//     an unexpected message                          group, peer, and tag or number of the call
//     a send that waits for a grant                  group, peer, and number of the call
//     a send that waits for the answer to its RTS    the id in the frame
//     a receive that waits for DATA                  the id in the frame
//
// The key contains the tag for send / recv, and the sequence number of the call for a collective.
// In a bucket, and so among equal keys, the oldest entry comes first.
//------------------------------------------------------------------------------

static void idist__index_insert(idist__index_node *hook, idist__index_bucket *table, uint64_t key) {
    idist__index_bucket *bucket = &table[key % IDIST__BUCKETS];

    hook->next = NULL;
    hook->at = bucket->first ? bucket->end : &bucket->first;
    hook->bucket = bucket;
    *hook->at = hook;
    bucket->end = &hook->next;
}

static void idist__index_remove(idist__index_node *hook) {
    *hook->at = hook->next;
    if (hook->next) hook->next->at = hook->at;
    else hook->bucket->end = hook->at;
    hook->bucket = NULL;
}

static idist__transfer *idist__index_transfer(idist__index_node *hook) {
    return (idist__transfer *)(void *)((char *)hook - offsetof(idist__transfer, hook));
}

static idist__message *idist__index_message(idist__index_node *hook) {
    return (idist__message *)(void *)((char *)hook - offsetof(idist__message, hook));
}

// Returns the key of a message that a rank sends in a group. If `p2p` is true, it is a message of
// send / recv with this tag. Otherwise it is a step of the collective with this sequence number.
static uint64_t idist__index_key(uint64_t ctx, int peer, bool p2p, uint32_t tag_or_seq) {
    return idist__hash_mix(ctx + ((uint64_t)(uint32_t)peer << 33),
                           ((uint64_t)p2p << 32) | tag_or_seq);
}

static uint64_t idist__index_frame_key(int peer, const idist__frame *frame) {
    bool p2p = frame->fingerprint.kind == IDIST__SEND;
    return idist__index_key(frame->ctx, peer, p2p, p2p ? frame->tag : frame->fingerprint.seq);
}

static uint64_t idist__index_id_key(uint64_t id) { return idist__hash_mix(id, 0); }

//------------------------------------------------------------------------------
// the life of a send or receive
//------------------------------------------------------------------------------

static idist__transfer *idist__transfer_new(idist__ring *ring) {
    idist__transfer *xfer = ring->idle;

    if (xfer) {
        ring->idle = xfer->next;
        idist__mem_clear(xfer, sizeof *xfer);
    } else {
        xfer = (idist__transfer *)idist__mem_alloc(&ring->w->cfg.mem, sizeof *xfer);
    }

    if (xfer) {
        xfer->slot = -1;
        xfer->stamp = ++ring->stamp;
    }

    return xfer;
}

static void idist__transfer_append(idist__transfer_list *list, idist__transfer *xfer) {
    xfer->next = NULL;
    xfer->at = list->first ? list->end : &list->first;
    xfer->list = list;
    *xfer->at = xfer;
    list->end = &xfer->next;
}

// Appends a transfer to a list, and adds it to the index under `key` so that frames find it.
static void idist__transfer_put(idist__ring *ring, idist__transfer_list *list,
                                idist__transfer *xfer, uint64_t key) {
    idist__transfer_append(list, xfer);
    idist__index_insert(&xfer->hook, ring->transfers, key);
}

// Removes a transfer from its list and from the index.
static void idist__transfer_take(idist__transfer *xfer) {
    *xfer->at = xfer->next;
    if (xfer->next) xfer->next->at = xfer->at;
    else xfer->list->end = xfer->at; // NOLINT(clang-analyzer-core.NullDereference): it is in one
    xfer->list = NULL;
    if (xfer->hook.bucket) idist__index_remove(&xfer->hook);
}

// Returns the transfer with this number in a list of transfers that wait for CTS, PULLED or DATA,
// or NULL.
static idist__transfer *idist__transfer_find(idist__ring *ring, const idist__transfer_list *list,
                                             uint64_t id) {
    idist__index_node *hook = ring->transfers[idist__index_id_key(id) % IDIST__BUCKETS].first;

    for (; hook; hook = hook->next) {
        idist__transfer *xfer = idist__index_transfer(hook);
        if (xfer->list == list && xfer->id == id) return xfer;
    }

    return NULL;
}

static void idist__transfer_free(idist__ring *ring, idist__transfer *xfer) {
    idist__mem_free(&ring->w->cfg.mem, xfer->owned);
    if (xfer->task && idist__kind_is_p2p(xfer->task->call.kind))
        idist__op_of(xfer->task)->transfer = NULL;
    xfer->next = ring->idle;
    ring->idle = xfer;
}

// Frees a transfer that is complete, and completes its task or resumes the algorithm.
static void idist__transfer_done(idist__ring *ring, idist__transfer *xfer) {
    idist__task *t = xfer->task;
    bool send = xfer->send;
    int slot = xfer->slot;
    idist__op *op;

    idist__transfer_free(ring, xfer);
    if (!t || t->state == IDIST__TASK_DONE) return;
    ring->w->wait.moved_count++;

    if (t->call.kind == IDIST__SEND) {
        idist__task_complete(t, IDIST_OK, "");
        return;
    }

    op = idist__op_of(t);
    if (send) op->sends_pending--;
    else op->recvs_pending--;
    if (slot >= 0) op->slots_pending &= ~(1u << slot);
    idist__op_run(t);
}

// Completes a receive, of idist_recv or of a collective.
static void idist__transfer_received(idist__ring *ring, idist__transfer *xfer, int peer) {
    idist__task *t = xfer->task;
    int tag = (int)xfer->frame.tag;
    size_t count = (size_t)idist__fingerprint_count(&xfer->frame.fingerprint);

    if (!t || t->call.kind != IDIST__RECV) {
        idist__transfer_done(ring, xfer);
        return;
    }

    idist__transfer_free(ring, xfer);
    idist__matching_received(t, idist__ring_group_of(t->group)->rank_of[peer], tag, count);
}
