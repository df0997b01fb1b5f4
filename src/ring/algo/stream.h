// ring/algo/stream.h: pipelines that receive, reduce and forward chunks
//
// The bandwidth algorithms cut a block into chunks of IDIST__CHUNK_BYTES. So a rank can reduce and
// forward one chunk while it receives the next chunk:
//
//   receive   | c0 | c1 | c2 | c3 |
//   take           | c0 | c1 | c2 | c3 |          take: reduce into the result, for example
//   send                | c0 | c1 | c2 | c3 |
//
// Apart from the numbers of items, a stream is described by:
//
//   recv_at(i)   peer, address and size of item i to receive; address NULL for a scratch slot
//   take(i)      processes item i once it has arrived; NULL if there is nothing to do
//   send_at(i)   peer, address and size of item i to send
//   head         number of items that can be sent before anything has been received
//
// Item i is sent when i < head or item i - head has been taken. A rank in a ring first sends its
// own block, then forwards the items that it took. So head is the number of chunks in a block. An
// inner rank of a chain only forwards items, so head is 0. Items are taken in order. The tag of a
// message is the index of its item.
//
// Several receives are posted ahead, each in a slot. The sender may send a large chunk only when it
// knows that the receive is posted. So a network of high latency needs more slots: enough for the
// data in flight, plus two for the chunks that are being taken.
#pragma once

#include "core/model.h"
#include "ring/msg/ring_model.h"
#include "ring/msg/op.h"
#include "ring/msg/send.h"
#include "ring/msg/recv.h"

static size_t idist__stream_slot_count(const idist_group *g) {
    uint64_t under_way = idist__ring_group_of(g)->spans_hosts ? g->w->machine.network_nbytes : 0;
    uint64_t count = (under_way + IDIST__CHUNK_BYTES - 1) / IDIST__CHUNK_BYTES + 2;

    if (count < IDIST__SLOTS) return IDIST__SLOTS;
    return count < IDIST__SLOTS_MOST ? (size_t)count : IDIST__SLOTS_MOST;
}

static char *idist__stream_slot(const idist__op *op, size_t index) {
    const idist__stream_op *stream = &op->u.stream;
    return stream->slots + (index % op->slot_count) * stream->chunk_count * op->size;
}

static void idist__stream_run(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__stream_op *stream = &op->u.stream;

    for (;;) {
        while (stream->posted < stream->recv_total &&
               stream->posted < stream->taken + op->slot_count) {
            size_t index = stream->posted++;
            idist__item item = stream->recv_at(t, index);
            char *data = item.data;

            if (!data && stream->slots) data = idist__stream_slot(op, index);
            idist__recv_step(t, (int)(index % op->slot_count), item.peer, (uint32_t)index, data,
                             item.nbytes);
        }

        while (stream->sent < stream->send_total &&
               (stream->sent < stream->head || stream->sent - stream->head < stream->taken) &&
               op->sends_pending < (int)op->slot_count) {
            size_t index = stream->sent++;
            idist__item item = stream->send_at(t, index);
            idist__send_step(t, item.peer, (uint32_t)index, item.data, item.nbytes);
        }

        if (stream->taken == stream->posted ||
            (op->slots_pending & (1u << (stream->taken % op->slot_count))))
            break;
        if (stream->take) stream->take(t, stream->taken);
        stream->taken++;
    }

    if (stream->taken == stream->recv_total && stream->sent == stream->send_total &&
        !op->sends_pending)
        idist__op_done(t);
}

// Returns chunk `index` of a block of `count` elements. Chunks beyond the end of the block are
// empty.
static idist__item idist__stream_chunk(const idist__op *op, char *block, size_t count, size_t index,
                                       int peer) {
    const idist__stream_op *stream = &op->u.stream;
    idist__item item;
    size_t first = index * stream->chunk_count < count ? index * stream->chunk_count : count;
    size_t chunk_count = count - first < stream->chunk_count ? count - first : stream->chunk_count;

    item.peer = peer;
    item.data = block ? block + first * op->size : NULL;
    item.nbytes = chunk_count * op->size;

    return item;
}

// Cuts blocks of at most `count` elements into chunks.
static void idist__stream_cut(idist__op *op, size_t count) {
    idist__stream_op *stream = &op->u.stream;
    size_t chunk_count = IDIST__CHUNK_BYTES / (op->size ? op->size : 1);

    if (!chunk_count) chunk_count = 1; // an element is larger than a chunk
    stream->chunk_count = chunk_count;
    stream->block_chunks = 1;
    if (count) stream->block_chunks = (count - 1) / chunk_count + 1;
    if (stream->block_chunks == 1) stream->chunk_count = count ? count : 1;
}

static void idist__stream_begin(idist__op *op, size_t recv_count, size_t send_count, size_t head,
                                idist__item (*recv_at)(idist__task *, size_t),
                                idist__item (*send_at)(idist__task *, size_t),
                                void (*take)(idist__task *, size_t)) {
    idist__stream_op *stream = &op->u.stream;

    stream->recv_total = recv_count;
    stream->send_total = send_count;
    stream->head = head;
    stream->recv_at = recv_at;
    stream->send_at = send_at;
    stream->take = take;
    op->run = idist__stream_run;
}
