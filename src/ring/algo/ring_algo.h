// ring/algo/ring_algo.h: all_reduce, reduce_scatter and all_gather of large messages
//
// The n ranks form a ring. Each rank sends to its right neighbor (rank + 1) and receives from its
// left neighbor (rank - 1). So every rank sends and receives all the time.
//
// all_reduce. The buffer is cut into n blocks, which travel around the ring twice. In step s, rank
// r sends block r - s (mod n) and receives block r - s - 1 (mod n):
//
//            first lap: reduce               second lap: copy
//            step 0   step 1   step 2        step 3   step 4   step 5
//   rank 0   sends 0  sends 3  sends 2  ->1  sends 1  sends 0  sends 3
//   rank 1   sends 1  sends 0  sends 3  ->2  sends 2  sends 1  sends 0      ->b: holds the complete
//   rank 2   sends 2  sends 1  sends 0  ->3  sends 3  sends 2  sends 1           sum of block b
//   rank 3   sends 3  sends 2  sends 1  ->0  sends 0  sends 3  sends 2
//
// In the first lap, a rank adds its own part to each block that it receives, and forwards the sum.
// After n - 1 steps, every rank holds the complete sum of one block. The second lap distributes
// these sums to all ranks.
//
//   bytes sent per rank   2 B (n - 1) / n, the least possible for any n
//   latency               2 (n - 1) messages in sequence, so doubling is faster for small B
//
// No data is copied beforehand. The first sends read the send buffer directly, and sums are written
// directly to the receive buffer. Working in place is safe, because the second lap overwrites a
// block only with data that depends on our first send of this block.
//
// reduce_scatter is the first lap alone, in (n - 1) messages of B bytes. Each rank begins one block
// earlier, so that rank r ends up with block r. Partial sums stay in scratch memory. The last sum
// is written to the receive buffer.
//
// all_gather and all_gatherv are the second lap alone, in (n - 1) messages of B bytes.
//
// A reduction starts at a different rank for each block, so the operation must commute.
//
// COSTS in ring/algo/choose.h defines B.
#pragma once

#include "base/dtype.h"
#include "base/reduce.h"
#include "core/model.h"
#include "core/extent.h"
#include "ring/msg/op.h"
#include "ring/msg/combine.h"
#include "ring/algo/stream.h"

// Returns the block that item `index` belongs to: our rank, minus the step of the item, minus
// `back` (mod n).
static int idist__ring_algo_block(const idist__op *op, size_t index, int back) {
    return idist__block_wrap(op->rank - (int)(index / op->u.stream.block_chunks) - back, op->n);
}

static int idist__ring_algo_left(const idist__op *op) {
    return idist__block_wrap(op->rank - 1, op->n);
}

static int idist__ring_algo_right(const idist__op *op) {
    return idist__block_wrap(op->rank + 1, op->n);
}

// ---- all_reduce ----

static bool idist__ring_algo_in_first_lap(const idist__op *op, size_t index) {
    return index < (size_t)(op->n - 1) * op->u.stream.block_chunks;
}

// Returns the chunk of item `index` in a block of a buffer. The address is NULL if `buffer` is
// NULL.
static idist__item idist__ring_algo_all_reduce_item(const idist__op *op, const char *buffer,
                                                    size_t index, int block, int peer) {
    size_t at = idist__block_at(op->count, op->n, block) * op->size;
    char *data = buffer ? (char *)(uintptr_t)buffer + at : NULL;

    return idist__stream_chunk(op, data, idist__block_count(op->count, op->n, block),
                               index % op->u.stream.block_chunks, peer);
}

static idist__item idist__ring_algo_all_reduce_recv(idist__task *t, size_t index) {
    const idist__op *op = idist__op_of(t);
    const char *to = idist__ring_algo_in_first_lap(op, index) ? NULL : op->out;
    return idist__ring_algo_all_reduce_item(op, to, index, idist__ring_algo_block(op, index, 1),
                                            idist__ring_algo_left(op));
}

static idist__item idist__ring_algo_all_reduce_send(idist__task *t, size_t index) {
    const idist__op *op = idist__op_of(t);
    const char *from = index < op->u.stream.block_chunks ? op->in : op->out;
    return idist__ring_algo_all_reduce_item(op, from, index, idist__ring_algo_block(op, index, 0),
                                            idist__ring_algo_right(op));
}

// Returns true if an item of the first lap completes the sum of its chunk. This is the case in the
// last step of the lap.
static bool idist__ring_algo_completes_sum(const idist__op *op, size_t index) {
    return index >= (size_t)(op->n - 2) * op->u.stream.block_chunks;
}

// Adds our part to a chunk that arrives in the first lap. For AVG, also divides a complete sum
// here: once for all ranks, and while the chunk is in the cache.
static void idist__ring_algo_all_reduce_take(idist__task *t, size_t index) {
    const idist__op *op = idist__op_of(t);
    idist_dtype dtype = idist__dtype_is_narrow(t->call.dtype) ? IDIST_F32 : t->call.dtype;
    int block = idist__ring_algo_block(op, index, 1);
    idist__item own, sum;
    const void *both[2];
    size_t count;

    if (!idist__ring_algo_in_first_lap(op, index)) return; // already received into the result
    own = idist__ring_algo_all_reduce_item(op, op->in, index, block, 0);
    sum = idist__ring_algo_all_reduce_item(op, op->out, index, block, 0);
    count = own.nbytes / op->size;
    both[0] = idist__stream_slot(op, index);
    both[1] = own.data;

    if (t->call.op == IDIST_AVG && idist__ring_algo_completes_sum(op, index))
        idist__reduce_many(sum.data, both, 2, count, dtype, IDIST_AVG, op->n);
    else idist__combine(t, sum.data, (const char *)both[0], own.data, count, t->call.dtype);
}

static void idist__ring_algo_all_reduce(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__stream_op *stream = &op->u.stream;
    size_t steps = 2 * (size_t)(op->n - 1);

    idist__stream_cut(op, idist__block_count(op->count, op->n, 0));
    idist__stream_begin(op, steps * stream->block_chunks, steps * stream->block_chunks,
                        stream->block_chunks, idist__ring_algo_all_reduce_recv,
                        idist__ring_algo_all_reduce_send, idist__ring_algo_all_reduce_take);
}

// ---- reduce_scatter, reduce_scatterv ----

// Returns the number of elements in the largest block.
static size_t idist__ring_algo_largest_block(const idist__op *op, const idist__call *call) {
    size_t largest = 0;
    int i;

    for (i = 0; i < op->n; i++)
        if (idist__extent_block_count(call, i) > largest)
            largest = idist__extent_block_count(call, i);
    return largest;
}

// Returns the chunk of item `index` in a block of a buffer of n blocks. The address is NULL if
// `buffer` is NULL.
static idist__item idist__ring_algo_reduce_scatter_item(const idist__task *t, const char *buffer,
                                                        size_t index, int block, int peer) {
    const idist__op *op = idist__op_of(t);
    size_t at = idist__extent_block_at(&t->call, block) * op->size;
    char *data = buffer ? (char *)(uintptr_t)buffer + at : NULL;

    return idist__stream_chunk(op, data, idist__extent_block_count(&t->call, block),
                               index % op->u.stream.block_chunks, peer);
}

static idist__item idist__ring_algo_reduce_scatter_recv(idist__task *t, size_t index) {
    const idist__op *op = idist__op_of(t);
    return idist__ring_algo_reduce_scatter_item(t, NULL, index,
                                                idist__ring_algo_block(op, index, 2),
                                                idist__ring_algo_left(op));
}

static idist__item idist__ring_algo_reduce_scatter_send(idist__task *t, size_t index) {
    const idist__op *op = idist__op_of(t);
    const idist__stream_op *stream = &op->u.stream;
    const char *from = index < stream->block_chunks ? op->in : op->work;

    return idist__ring_algo_reduce_scatter_item(t, from, index,
                                                idist__ring_algo_block(op, index, 1),
                                                idist__ring_algo_right(op));
}

static void idist__ring_algo_reduce_scatter_take(idist__task *t, size_t index) {
    const idist__op *op = idist__op_of(t);
    const idist__stream_op *stream = &op->u.stream;
    int block = idist__ring_algo_block(op, index, 2);
    idist__item own, sum;

    own = idist__ring_algo_reduce_scatter_item(t, op->in, index, block, 0);
    if (idist__ring_algo_completes_sum(op, index))
        sum = idist__stream_chunk(op, op->out, op->count, index % stream->block_chunks, 0);
    else sum = idist__ring_algo_reduce_scatter_item(t, op->work, index, block, 0);
    idist__combine(t, sum.data, idist__stream_slot(op, index), own.data, own.nbytes / op->size,
                   t->call.dtype);
}

static void idist__ring_algo_reduce_scatter(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__stream_op *stream = &op->u.stream;
    size_t items;

    idist__stream_cut(op, idist__ring_algo_largest_block(op, &t->call));
    items = (size_t)(op->n - 1) * stream->block_chunks;
    idist__stream_begin(op, items, items, stream->block_chunks,
                        idist__ring_algo_reduce_scatter_recv, idist__ring_algo_reduce_scatter_send,
                        idist__ring_algo_reduce_scatter_take);
}

// ---- all_gather, all_gatherv ----

static size_t idist__ring_algo_all_gather_at(const idist__task *t, int block) {
    const idist__call *call = &t->call;
    if (call->recvcounts) return idist__extent_displ(call->recvcounts, call->recvdispls, block);
    return (size_t)block * idist__op_of(t)->count;
}

static idist__item idist__ring_algo_all_gather_item(const idist__task *t, size_t index, int block,
                                                    int peer) {
    const idist__op *op = idist__op_of(t);
    size_t count = t->call.recvcounts ? t->call.recvcounts[block] : op->count;
    char *data = op->out + idist__ring_algo_all_gather_at(t, block) * op->size;
    return idist__stream_chunk(op, data, count, index % op->u.stream.block_chunks, peer);
}

static idist__item idist__ring_algo_all_gather_recv(idist__task *t, size_t index) {
    const idist__op *op = idist__op_of(t);
    return idist__ring_algo_all_gather_item(t, index, idist__ring_algo_block(op, index, 1),
                                            idist__ring_algo_left(op));
}

static idist__item idist__ring_algo_all_gather_send(idist__task *t, size_t index) {
    const idist__op *op = idist__op_of(t);
    return idist__ring_algo_all_gather_item(t, index, idist__ring_algo_block(op, index, 0),
                                            idist__ring_algo_right(op));
}

static void idist__ring_algo_all_gather(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__stream_op *stream = &op->u.stream;
    const size_t *counts = t->call.recvcounts;
    size_t largest = op->count;
    size_t items;
    int i;

    for (i = 0; counts && i < op->n; i++)
        if (counts[i] > largest) largest = counts[i];

    idist__block_copy(op->out + idist__ring_algo_all_gather_at(t, op->rank) * op->size, op->in,
                      op->nbytes);
    idist__stream_cut(op, largest);
    items = (size_t)(op->n - 1) * stream->block_chunks;
    idist__stream_begin(op, items, items, stream->block_chunks, idist__ring_algo_all_gather_recv,
                        idist__ring_algo_all_gather_send, NULL);
}
