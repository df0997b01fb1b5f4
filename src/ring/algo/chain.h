// ring/algo/chain.h: broadcast, reduce and scan of large messages
//
// The n ranks form a line, and each rank forwards the c chunks of the buffer to the next rank. Once
// the first chunk has reached the end of the line, every link carries data all the time:
//
//   n = 4, c = 3    step 0   step 1   step 2   step 3   step 4
//   link 0 -> 1     chunk 0  chunk 1  chunk 2
//   link 1 -> 2              chunk 0  chunk 1  chunk 2
//   link 2 -> 3                       chunk 0  chunk 1  chunk 2
//
//   bytes sent per rank   B
//   latency               n - 2 + c steps of one chunk each: little more than the time to send B
//                         bytes if c is large
//
// Let v be the number of a rank, counted from the root. A broadcast runs upwards from v = 0. A
// reduction runs from v = n - 1 down to v = 0, and each rank adds its own part. A scan runs in the
// order of the ranks, so it also works for operations that do not commute.
//
// A binomial tree sends B bytes log n times in sequence. The tree is faster while B is small.
//
// COSTS in ring/algo/choose.h defines B and log.
#pragma once

#include "core/model.h"
#include "core/extent.h"
#include "ring/msg/op.h"
#include "ring/msg/combine.h"
#include "ring/algo/stream.h"

static int idist__chain_relative_rank(const idist__op *op) { // returns v
    return idist__block_wrap(op->rank - op->root, op->n);
}

// ---- broadcast ----

static idist__item idist__chain_broadcast_recv(idist__task *t, size_t index) {
    const idist__op *op = idist__op_of(t);
    return idist__stream_chunk(op, op->out, op->count, index,
                               idist__block_wrap(op->rank - 1, op->n));
}

static idist__item idist__chain_broadcast_send(idist__task *t, size_t index) {
    const idist__op *op = idist__op_of(t);
    return idist__stream_chunk(op, op->out, op->count, index,
                               idist__block_wrap(op->rank + 1, op->n));
}

static void idist__chain_broadcast(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__stream_op *stream = &op->u.stream;
    int v = idist__chain_relative_rank(op);
    bool first = v == 0;
    bool last = v == op->n - 1;

    idist__stream_cut(op, op->count);
    idist__stream_begin(op, first ? 0 : stream->block_chunks, last ? 0 : stream->block_chunks,
                        first ? stream->block_chunks : 0, idist__chain_broadcast_recv,
                        idist__chain_broadcast_send, NULL);
}

// ---- reduce ----

static idist__item idist__chain_reduce_recv(idist__task *t, size_t index) {
    const idist__op *op = idist__op_of(t);
    return idist__stream_chunk(op, NULL, op->count, index, idist__block_wrap(op->rank + 1, op->n));
}

static idist__item idist__chain_reduce_send(idist__task *t, size_t index) {
    const idist__op *op = idist__op_of(t);
    const char *from = idist__chain_relative_rank(op) == op->n - 1 ? op->in : op->work;
    return idist__stream_chunk(op, (char *)(uintptr_t)from, op->count, index,
                               idist__block_wrap(op->rank - 1, op->n));
}

static void idist__chain_reduce_take(idist__task *t, size_t index) {
    const idist__op *op = idist__op_of(t);
    idist__item own = idist__stream_chunk(op, (char *)(uintptr_t)op->in, op->count, index, 0);
    char *to = op->rank == op->root ? op->out : op->work;
    idist__item sum = idist__stream_chunk(op, to, op->count, index, 0);

    idist__combine(t, sum.data, own.data, idist__stream_slot(op, index), own.nbytes / op->size,
                   t->call.dtype);
}

static void idist__chain_reduce(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__stream_op *stream = &op->u.stream;
    int v = idist__chain_relative_rank(op);
    bool first = v == op->n - 1;
    bool last = v == 0;

    idist__stream_cut(op, op->count);
    idist__stream_begin(op, first ? 0 : stream->block_chunks, last ? 0 : stream->block_chunks,
                        first ? stream->block_chunks : 0, idist__chain_reduce_recv,
                        idist__chain_reduce_send, idist__chain_reduce_take);
}

// ---- scan, exscan ----
//
// A rank forwards the prefix that includes its own part. The result of a scan is this prefix. The
// result of an exscan is the prefix that the rank received.

static idist__item idist__chain_scan_recv(idist__task *t, size_t index) {
    const idist__op *op = idist__op_of(t);
    return idist__stream_chunk(op, NULL, op->count, index, op->rank - 1);
}

static idist__item idist__chain_scan_send(idist__task *t, size_t index) {
    const idist__op *op = idist__op_of(t);
    const char *from = t->call.kind == IDIST__SCAN ? op->out : op->work;

    if (op->rank == 0) from = op->in;
    return idist__stream_chunk(op, (char *)(uintptr_t)from, op->count, index, op->rank + 1);
}

static void idist__chain_scan_take(idist__task *t, size_t index) {
    const idist__op *op = idist__op_of(t);
    idist__item own = idist__stream_chunk(op, (char *)(uintptr_t)op->in, op->count, index, 0);
    idist__item out = idist__stream_chunk(op, op->out, op->count, index, 0);
    char *received = idist__stream_slot(op, index);
    size_t count = own.nbytes / op->size;

    if (t->call.kind == IDIST__SCAN) {
        idist__combine(t, out.data, received, own.data, count, t->call.dtype);
        return;
    }

    if (op->rank < op->n - 1) {
        idist__item sum = idist__stream_chunk(op, op->work, op->count, index, 0);
        idist__combine(t, sum.data, received, own.data, count, t->call.dtype);
    }

    idist__block_copy(out.data, received, out.nbytes); // last, since in place it overwrites `own`
}

static void idist__chain_scan(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__stream_op *stream = &op->u.stream;
    bool first = op->rank == 0;
    bool last = op->rank == op->n - 1;

    if (first && t->call.kind == IDIST__SCAN) idist__block_copy(op->out, op->in, op->nbytes);
    idist__stream_cut(op, op->count);
    idist__stream_begin(op, first ? 0 : stream->block_chunks, last ? 0 : stream->block_chunks,
                        first ? stream->block_chunks : 0, idist__chain_scan_recv,
                        idist__chain_scan_send, idist__chain_scan_take);
}
