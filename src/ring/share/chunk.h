// ring/share/chunk.h: runs shared calls, small ones at once and large ones in chunks
//
// Functions: idist__chunk_*, idist__flat_*.
#pragma once

#include "os/thread.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/extent.h"
#include "ring/shm/segment.h"
#include "ring/msg/op.h"
#include "ring/msg/combine.h"
#include "ring/share/region.h"
#include "ring/share/flow.h"
#include "ring/share/slot.h"
#include "ring/share/fetch.h"

//------------------------------------------------------------------------------
// collectives of small contributions
//
// Every rank writes its contribution to its slot. A contribution of at most 32 bytes fits into the
// slot's first cache line. Then the rank reads the slots of all other ranks and computes the result
// itself. All ranks reduce in the order of the ranks, so all get the same bits. Reading the slots
// takes one round of n - 1 cache misses. There is no synchronization at the end, because a slot is
// not reused before all ranks have read it.
//------------------------------------------------------------------------------

static void idist__flat_run(idist__task *t) {
    idist__op *op = idist__op_of(t);

    IDIST__CO_BEGIN(op)

    if (!op->u.shared.entered) {
        IDIST__CO_AWAIT(op, idist__slot_may_enter(t));
        idist__slot_enter(t);
    }

    IDIST__CO_AWAIT(op, idist__slot_all_entered(t, false));
    if (idist__fetch_chunk(t, 0)) idist__slot_leave(t);
    IDIST__CO_END(op)
}

//------------------------------------------------------------------------------
// collectives of large contributions, one chunk at a time
//
//   rank 0   expose 0   expose 1   take 0   expose 2   take 1   ...
//   rank 1   expose 0   expose 1   take 0   expose 2   take 1   ...
//
// A rank that exposes a chunk lets the other ranks read its part (EXPOSED in ring/share/region.h).
// A rank exposes up to one chunk ahead, so that no rank waits while there is something to copy. A
// rank writes to a buffer again only when all ranks have freed the chunk in that buffer.
//------------------------------------------------------------------------------

#define IDIST__CHUNK_OVERSUBSCRIBED ((size_t)128 * 1024)

// Returns true if all members have reached a milestone in all chunks before number `chunks`. If
// `only_sources` is true, checks only the members that we read from.
static bool idist__chunk_all_reached(idist__task *t, idist__milestone milestone, uint64_t chunks,
                                     bool only_sources) {
    idist__op *op = idist__op_of(t);
    idist__share *share = idist__region_share(t);

    for (; op->u.shared.next_rank < op->n; op->u.shared.next_rank++) {
        int rank = op->u.shared.next_rank;
        if (rank == op->rank || (only_sources && !idist__flow_reads(t, rank))) continue;
        op->u.shared.awaited = rank;
        if (idist__region_reached(share, rank, milestone) < chunks) return false;
    }

    idist__os_thread_handover();
    op->u.shared.next_rank = 0;

    return true;
}

static bool idist__chunk_all(idist__task *t, idist__milestone milestone, uint64_t chunks) {
    return idist__chunk_all_reached(t, milestone, chunks, false);
}

static bool idist__chunk_sources(idist__task *t, idist__milestone milestone, uint64_t chunks) {
    return idist__chunk_all_reached(t, milestone, chunks, true);
}

// Returns the number of elements in a cache line, or 1 if an element is larger than a line.
static size_t idist__chunk_line(const idist__op *op) {
    return op->size < IDIST__LINE ? IDIST__LINE / op->size
                                  : 1; // NOLINT(clang-analyzer-core.DivideZero)
}

// Returns the element at which block `b` of a chunk of `count` elements begins. Blocks consist of
// whole lines, so that no two ranks write to the same line.
static size_t idist__chunk_block_at(const idist__op *op, size_t count, int b) {
    size_t line = idist__chunk_line(op);
    size_t nlines = (count + line - 1) / line;

    return idist__flow_min(idist__block_at(nlines, op->n, b) * line, count);
}

// Copies elements of our contribution to a buffer.
static void idist__chunk_write(const idist__task *t, char *to, size_t at, size_t count) {
    const idist__op *op = idist__op_of(t);
    size_t run;

    for (; count; at += run, count -= run) {
        const char *from = idist__flow_place(t, (char *)op->in, at, count, &run);
        idist__region_write(idist__region_share(t), to, from, run * op->size);
        to += run * op->size;
    }
}

// Copies our part of a chunk to a buffer. If contributions are not scaled, leaves out the block
// that only we read. In a split reduction (ring/share/split_reduce.h), this is the block that we
// reduce. In other calls, it is the block for ourselves.
static void idist__chunk_copy(idist__task *t, size_t chunk) {
    idist__op *op = idist__op_of(t);
    idist__share *share = idist__region_share(t);
    char *buffer = idist__region_buffer(share, op->rank, op->u.shared.first_chunk + chunk);
    bool per_rank = idist__kind_gives_blocks(t->call.kind), scaled = idist__flow_is_scaled(op);
    size_t at = chunk * op->u.shared.chunk_count;
    int to;

    if (idist__flow_is_split(op, t->call.kind) && !scaled) {
        size_t count = idist__flow_chunk_count(op, op->count, at);
        size_t begin = idist__chunk_block_at(op, count, op->rank),
               end = idist__chunk_block_at(op, count, op->rank + 1);
        idist__chunk_write(t, buffer, at, begin);
        idist__chunk_write(t, buffer + end * op->size, at + end, count - end);
        return;
    }

    for (to = 0; to < (per_rank ? op->n : 1); to++) {
        size_t count = idist__flow_chunk_count(op, idist__flow_send_count(t, to), at);
        char *block = buffer + (size_t)to * op->u.shared.chunk_count * op->size;

        if (per_rank && to == op->rank && !scaled) continue;
        idist__region_write(share, block, idist__flow_send_at(t, to) + at * op->size,
                            count * op->size);
        idist__slot_scale(t, block, count);
    }
}

// Exposes the current chunk and, if a buffer is free, the next chunk. Returns true if the current
// chunk is exposed.
static bool idist__chunk_expose(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__shared_op *shared = &op->u.shared;
    bool copies = idist__flow_contributes(op, t->call.kind, op->rank) && !shared->in_place;

    while (shared->exposed < shared->nchunks && shared->exposed < shared->chunk + 2) {
        uint64_t number = shared->first_chunk + shared->exposed;

        if (copies && number >= IDIST__BUFFERS &&
            !idist__chunk_all(t, IDIST__FREED, number - IDIST__BUFFERS + 1))
            break;
        if (copies) idist__chunk_copy(t, shared->exposed);
        shared->exposed++;
        idist__region_publish(t, IDIST__EXPOSED, number + 1);
    }

    return shared->exposed > shared->chunk;
}

// Returns the size of a chunk. Chunks are smaller on an oversubscribed host, whose ranks share the
// caches.
static size_t idist__chunk_nbytes(const idist__share *share) {
    return share->shm->oversubscribed
               ? idist__flow_min(share->chunk_nbytes, IDIST__CHUNK_OVERSUBSCRIBED)
               : share->chunk_nbytes;
}

// Returns true if elements of this size fit into chunks, and into the pieces in which they are
// reduced.
static bool idist__chunk_takes(const idist_group *g, const idist__share *share, size_t size) {
    return size <= IDIST__OP_PIECE && size <= idist__chunk_nbytes(share) / (size_t)g->size;
}

// Determines the size and number of the chunks of a call.
static void idist__chunk_plan(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__share *share = idist__region_share(t);
    size_t nblocks = idist__kind_gives_blocks(t->call.kind) ? (size_t)op->n : 1;
    size_t count = idist__kind_is_v(t->call.kind) ? op->u.shared.largest_count : op->count;
    size_t line = idist__chunk_line(op);
    size_t nbytes = idist__chunk_nbytes(share), chunk_count;

    chunk_count = nbytes / nblocks / op->size;
    if (chunk_count > line) chunk_count -= chunk_count % line;
    if (op->u.shared.remote && !idist__kind_reduces(t->call.kind))
        chunk_count = count; // one chunk, because no buffers are used

    op->u.shared.chunk_count = chunk_count;
    op->u.shared.nchunks = count ? (count - 1) / chunk_count + 1 : 1;
    op->u.shared.first_chunk = share->chunks_done;
    op->u.shared.next_rank = 0;
}

static void idist__chunk_run(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__shared_op *shared = &op->u.shared;

    IDIST__CO_BEGIN(op)
    IDIST__CO_AWAIT(op, idist__slot_may_enter(t));
    if (!idist__slot_enter(t)) return;

    if (idist__kind_is_v(t->call.kind)) {
        IDIST__CO_AWAIT(op, idist__slot_all_entered(t, true));
        idist__chunk_plan(t);
    } else {
        idist__chunk_plan(t);
        idist__chunk_expose(t);
        shared->next_rank = 0;
        IDIST__CO_AWAIT(op, idist__slot_all_entered(t, false));
    }

    for (shared->chunk = 0; shared->chunk < shared->nchunks; shared->chunk++) {
        IDIST__CO_AWAIT(op, idist__chunk_expose(t));
        shared->next_rank = 0;
        IDIST__CO_AWAIT(op, idist__chunk_sources(t, IDIST__EXPOSED,
                                                 shared->first_chunk + shared->chunk + 1));
        if (!idist__fetch_chunk(t, shared->chunk * shared->chunk_count)) return;
        if (!idist__fetch_was_valid(t)) return;
        idist__region_publish(t, IDIST__FREED, shared->first_chunk + shared->chunk + 1);
    }

    if (shared->in_place) // the caller may change its buffer once we return
        IDIST__CO_AWAIT(op,
                        idist__chunk_all(t, IDIST__FREED, shared->first_chunk + shared->nchunks));

    idist__region_share(t)->chunks_done = shared->first_chunk + shared->nchunks;
    idist__slot_leave(t);
    IDIST__CO_END(op)
}
