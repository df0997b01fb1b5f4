// ring/share/flow.h: tells which ranks contribute to a call, which ranks read, and how much
#pragma once

#include "os/cpu.h"
#include "launch/env.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/extent.h"
#include "ring/shm/segment.h"
#include "ring/msg/op.h"

// Limit on n * n * nbytes, where each of n ranks contributes nbytes. Beyond the limit, it is faster
// if each rank reduces one block for all ranks than if every rank reduces everything.
#define IDIST__SPLIT_BYTES ((size_t)128 * 1024)

static bool idist__flow_contributes(const idist__op *op, idist__kind kind, int rank) {
    if (kind == IDIST__BROADCAST || kind == IDIST__SCATTER || kind == IDIST__SCATTERV)
        return rank == op->root;
    return kind != IDIST__BARRIER;
}

// Returns true if this rank reads, or waits for, the contribution of another rank.
static bool idist__flow_reads(const idist__task *t, int rank) {
    const idist__op *op = idist__op_of(t);

    switch (t->call.kind) {
    case IDIST__BROADCAST:
    case IDIST__SCATTER:
    case IDIST__SCATTERV: return rank == op->root;
    case IDIST__GATHER:
    case IDIST__GATHERV: return op->rank == op->root;
    case IDIST__REDUCE: return op->rank == op->root || op->algorithm == IDIST__ALGO_CHUNKED;
    case IDIST__SCAN:
    case IDIST__EXSCAN: return rank < op->rank;
    default: return true;
    }
}

// Returns true if each rank reduces one block for all ranks.
static bool idist__flow_is_split(const idist__op *op, idist__kind kind) {
    return kind == IDIST__REDUCE ||
           (kind == IDIST__ALL_REDUCE && (size_t)(op->n * op->n) * op->nbytes > IDIST__SPLIT_BYTES);
}

// Returns true if contributions are multiplied by a factor before the sum
// (idist_op_create_premul_sum).
static bool idist__flow_is_scaled(const idist__op *op) { return op->user && !op->user->fn; }

// Returns the number of elements in block `to` of our contribution.
static size_t idist__flow_send_count(const idist__task *t, int to) {
    return t->call.sendcounts ? t->call.sendcounts[to] : t->call.count;
}

// Returns the address of block `to` of our contribution.
static const char *idist__flow_send_at(const idist__task *t, int to) {
    const idist__op *op = idist__op_of(t);

    if (!idist__kind_gives_blocks(t->call.kind)) return op->in;
    if (t->call.sendcounts)
        return op->in + idist__extent_displ(t->call.sendcounts, t->call.senddispls, to) * op->size;
    return op->in + (size_t)to * op->nbytes;
}

static size_t idist__flow_min(size_t a, size_t b) { return a < b ? a : b; }

#define IDIST__PART_PREFETCH_BYTES ((size_t)512)

// Prefetches the start of a part. The processor predicts the next access inside a part, but not
// where the next part begins.
static void idist__flow_prefetch_part(const idist__task *t, int k) {
    const idist__part *part = &t->call.parts[k];
    size_t count, nbytes, at;

    if (k >= t->call.part_count) return;
    count = part->end - part[-1].end;
    nbytes = idist__flow_min(count * idist__op_of(t)->size, IDIST__PART_PREFETCH_BYTES);
    for (at = 0; at < nbytes; at += IDIST__LINE) idist__os_cpu_prefetch_for_write(part->data + at);
}

// Returns the address of element `at` of our buffer, which begins at `base` or is in parts. Sets
// *run to the number of contiguous elements there, at most `count`.
static char *idist__flow_place(const idist__task *t, char *base, size_t at, size_t count,
                               size_t *run) {
    const idist__part *parts = t->call.parts;
    size_t size = idist__op_of(t)->size, first;
    int low = 0, high = t->call.part_count - 1; // the part with element `at` is in low .. high

    *run = count;
    if (!t->call.part_count) return base + at * size;

    while (low < high) {
        int middle = (low + high) / 2;
        if (parts[middle].end <= at) low = middle + 1;
        else high = middle;
    }

    idist__flow_prefetch_part(t, low + 1);
    first = low ? parts[low - 1].end : 0;
    if (*run > parts[low].end - at) *run = parts[low].end - at;

    return parts[low].data + (at - first) * size;
}

static size_t idist__flow_send_nbytes(const idist__task *t) {
    const idist__op *op = idist__op_of(t);
    return (idist__kind_gives_blocks(t->call.kind) ? (size_t)op->n : 1) * op->nbytes;
}

// Returns the number of elements that we receive from a rank in calls that do not reduce.
static size_t idist__flow_recv_count(const idist__task *t, int from) {
    return t->call.recvcounts ? t->call.recvcounts[from] : t->call.count;
}

// Returns the address for the elements that we receive from a rank in calls that do not reduce.
static char *idist__flow_recv_at(const idist__task *t, int from) {
    const idist__op *op = idist__op_of(t);
    const idist__call *call = &t->call;

    if (!idist__kind_takes_blocks(call->kind)) return op->out;
    if (call->recvcounts)
        return op->out + idist__extent_displ(call->recvcounts, call->recvdispls, from) * op->size;
    return op->out + (size_t)from * op->nbytes;
}

// Returns how many elements of a block of `count` elements are in the chunk that begins at element
// `at`.
static size_t idist__flow_chunk_count(const idist__op *op, size_t count, size_t at) {
    return at < count ? idist__flow_min(count - at, op->u.shared.chunk_count) : 0;
}
