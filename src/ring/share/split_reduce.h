// ring/share/split_reduce.h: all_reduce and reduce in which each rank reduces one block
//
// The algorithm is a reduce-scatter followed by an all-gather in the same buffer. Each rank reads
// 1/n of every contribution, and 1/n of the result from every other rank. So the call uses all
// cores and the whole memory bandwidth. There are three variants:
//
//   through buffers   expose a chunk; reduce our block of the chunk into our buffer; copy the other
//                     blocks out of the buffers of the other ranks
//   direct            all buffers of an all_reduce are in windows: reduce our block of all
//                     contributions, write it to the results of all ranks. Every byte is read once
//                     and written once
//   cross-memory      reduce our block into our own result; read the other blocks from the results
//                     of the other ranks
#pragma once

#include "core/model.h"
#include "core/extent.h"
#include "ring/shm/pace.h"
#include "ring/msg/op.h"
#include "ring/share/region.h"
#include "ring/share/flow.h"
#include "ring/share/slot.h"
#include "ring/share/fetch.h"
#include "ring/share/chunk.h"

#define IDIST__DIRECT_PIECE ((size_t)16384) // so that a piece stays in the first-level cache

static bool idist__split_reduce_sum_block(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__share *share = idist__region_share(t);
    size_t at = op->u.shared.chunk * op->u.shared.chunk_count,
           chunk_count = idist__flow_chunk_count(op, op->count, at),
           begin = idist__chunk_block_at(op, chunk_count, op->rank),
           count = idist__chunk_block_at(op, chunk_count, op->rank + 1) - begin;
    char *buffer =
        idist__region_buffer(share, op->rank, op->u.shared.first_chunk + op->u.shared.chunk);
    char *sum = buffer + begin * op->size, *out = op->out + (at + begin) * op->size;
    size_t run;

    if (!count) return true;

    if (t->call.kind == IDIST__REDUCE) // only the root needs the result
        return idist__fetch_sum(t, op->rank == op->root ? out : sum, op->n, 0, at + begin, count);

    for (at += begin; count; at += run, count -= run) {
        out = idist__flow_place(t, op->out, at, count, &run);
        if (!idist__fetch_sum(t, out, op->n, 0, at, run)) return false;
        idist__region_write(share, sum, out, run * op->size);
        sum += run * op->size;
    }

    return true;
}

// Copies elements from a buffer to our result.
static void idist__split_reduce_take(const idist__task *t, const char *from, size_t at,
                                     size_t count) {
    const idist__op *op = idist__op_of(t);
    size_t run;

    for (; count; at += run, count -= run) {
        char *to = idist__flow_place(t, op->out, at, count, &run);
        idist__block_copy(to, from, run * op->size);
        from += run * op->size;
    }
}

// Copies to our result the blocks of a chunk that the other ranks have reduced.
static void idist__split_reduce_take_blocks(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__share *share = idist__region_share(t);
    size_t at = op->u.shared.chunk * op->u.shared.chunk_count,
           count = idist__flow_chunk_count(op, op->count, at);
    int i;

    if (t->call.kind == IDIST__REDUCE && op->rank != op->root) return;

    for (i = 0; i < op->n; i++) {
        size_t begin = idist__chunk_block_at(op, count, i),
               end = idist__chunk_block_at(op, count, i + 1);
        const char *buffer =
            idist__region_buffer(share, i, op->u.shared.first_chunk + op->u.shared.chunk);

        if (i == op->rank) continue;
        idist__split_reduce_take(t, buffer + begin * op->size, at + begin, end - begin);
    }
}

// Returns true if all buffers are in windows.
static bool idist__split_reduce_is_direct(const idist__task *t) {
    const idist__op *op = idist__op_of(t);
    const idist__share *share = idist__region_share(t);
    int i;

    for (i = 0; i < op->n; i++)
        if (!share->locations[i].send || !share->locations[i].recv) return false;
    return true;
}

// Reduces our block of all contributions into the results of all ranks. Before each piece is
// written to the other ranks, checks that all ranks are still in the call, because a rank that has
// left may reuse its buffer.
static bool idist__split_reduce_sum_direct(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__share *share = idist__region_share(t);
    size_t at = idist__chunk_block_at(op, op->count, op->rank),
           end = idist__chunk_block_at(op, op->count, op->rank + 1), k;
    int i;

    for (; at < end; at += k) {
        char *out = op->out + at * op->size;

        k = idist__flow_min(end - at, IDIST__DIRECT_PIECE / op->size);
        if (!idist__fetch_sum(t, out, op->n, 0, at, k)) return false;
        if (!idist__fetch_was_valid(t)) return false;
        for (i = 0; i < op->n; i++)
            if (i != op->rank)
                idist__pace_copy(&share->shm->window_pace, share->locations[i].recv + at * op->size,
                                 out, k * op->size);
    }

    return true;
}

// Reduces our block of all contributions into our own result.
static bool idist__split_reduce_sum_remote(idist__task *t) {
    idist__op *op = idist__op_of(t);
    size_t at = idist__chunk_block_at(op, op->count, op->rank),
           end = idist__chunk_block_at(op, op->count, op->rank + 1);

    return idist__fetch_sum(t, op->out + at * op->size, op->n, 0, at, end - at);
}

// Reads, from the results of the other ranks, the blocks that those ranks have reduced.
static bool idist__split_reduce_take_remote(idist__task *t) {
    idist__op *op = idist__op_of(t);
    const idist__share *share = idist__region_share(t);
    int i;

    for (i = 1; i < op->n; i++) {
        int from = idist__block_wrap(op->rank + i, op->n);
        size_t at = idist__chunk_block_at(op, op->count, from) * op->size,
               end = idist__chunk_block_at(op, op->count, from + 1) * op->size;

        if (end > at && !idist__fetch_remote(t, from, share->locations[from].remote_recv + at,
                                             op->out + at, end - at))
            return false;
    }

    return true;
}

static bool idist__split_reduce_sum_in_place(idist__task *t) {
    bool summed = idist__op_of(t)->u.shared.remote ? idist__split_reduce_sum_remote(t)
                                                   : idist__split_reduce_sum_direct(t);

    return summed && idist__fetch_was_valid(t);
}

// Returns true if each rank can read the results of all other ranks through the kernel. The result
// is the same on all ranks.
static bool idist__split_reduce_is_remote(const idist__task *t) {
    const idist__share *share = idist__region_share(t);
    int i;

    if (!idist__op_of(t)->u.shared.remote) return false;
    for (i = 0; i < t->group->size; i++)
        if (!share->locations[i].remote_recv) return false;

    return true;
}

// Chooses between direct and cross-memory. Returns false if the call goes through buffers.
static bool idist__split_reduce_skips_buffers(idist__task *t) {
    idist__shared_op *shared = &idist__op_of(t)->u.shared;
    bool direct;

    if (t->call.kind != IDIST__ALL_REDUCE) return false;
    direct = idist__split_reduce_is_direct(t);
    if (!direct && !idist__split_reduce_is_remote(t)) return false;

    shared->remote = !direct;
    shared->direct = direct;
    shared->nchunks = 1;

    return true;
}

static void idist__split_reduce_run(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__shared_op *shared = &op->u.shared;
    // Value that the progress counters reach with the current chunk.
    uint64_t next = shared->first_chunk + shared->chunk + 1;

    IDIST__CO_BEGIN(op)
    IDIST__CO_AWAIT(op, idist__slot_may_enter(t));
    if (!idist__slot_enter(t)) return;
    idist__chunk_plan(t);
    // If our contribution is not read in place, the call goes through buffers on all ranks.
    if (!shared->in_place) idist__chunk_expose(t);
    shared->next_rank = 0;
    IDIST__CO_AWAIT(op, idist__slot_all_entered(t, false));

    if (idist__split_reduce_skips_buffers(t)) {
        if (!idist__split_reduce_sum_in_place(t)) return;
        idist__region_publish(t, IDIST__REDUCED, shared->first_chunk + 1);
        IDIST__CO_AWAIT(op, idist__chunk_all(t, IDIST__REDUCED, shared->first_chunk + 1));
        if (shared->remote && !idist__split_reduce_take_remote(t)) return;
        if (shared->remote && !idist__fetch_was_valid(t)) return;
        idist__region_publish(t, IDIST__FREED, shared->first_chunk + 1);
        if (shared->remote)
            IDIST__CO_AWAIT(op, idist__chunk_all(t, IDIST__FREED, shared->first_chunk + 1));
    } else {
        for (shared->chunk = 0; shared->chunk < shared->nchunks; shared->chunk++) {
            IDIST__CO_AWAIT(op, idist__chunk_expose(t));
            shared->next_rank = 0;
            next = shared->first_chunk + shared->chunk + 1;
            IDIST__CO_AWAIT(op, idist__chunk_all(t, IDIST__EXPOSED, next));
            if (!idist__split_reduce_sum_block(t) || !idist__fetch_was_valid(t)) return;
            idist__region_publish(t, IDIST__REDUCED, next);
            if (t->call.kind == IDIST__ALL_REDUCE || op->rank == op->root)
                IDIST__CO_AWAIT(op, idist__chunk_all(t, IDIST__REDUCED, next));
            idist__split_reduce_take_blocks(t);
            idist__region_publish(t, IDIST__FREED, next);
        }

        if (shared->in_place)
            IDIST__CO_AWAIT(op, idist__chunk_all(t, IDIST__REDUCED,
                                                 shared->first_chunk + shared->nchunks));
    }

    idist__region_share(t)->chunks_done = shared->first_chunk + shared->nchunks;
    idist__slot_leave(t);
    IDIST__CO_END(op)
}
