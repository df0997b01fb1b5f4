// ring/share/fetch.h: reads contributions and reduces them
#pragma once

#include "base/reduce.h"
#include "launch/env.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/extent.h"
#include "ring/shm/segment.h"
#include "ring/msg/ring_model.h"
#include "ring/msg/op.h"
#include "ring/msg/combine.h"
#include "ring/share/region.h"
#include "ring/share/flow.h"
#include "ring/share/slot.h"

// Returns the address from which we read block `to` of a rank's contribution, from element `at` on.
static const char *idist__fetch_source(const idist__task *t, int rank, int to, size_t at) {
    const idist__op *op = idist__op_of(t);
    const idist__share *share = idist__region_share(t);
    bool per_rank = idist__kind_gives_blocks(t->call.kind);
    size_t block = per_rank ? (size_t)to : 0, within;

    if (rank == op->rank && t->call.part_count) return idist__flow_place(t, NULL, at, 1, &within);
    if (rank == op->rank && !idist__flow_is_scaled(op))
        return idist__flow_send_at(t, to) + at * op->size;
    if (op->algorithm == IDIST__ALGO_FLAT) return idist__slot_payload(t, rank) + block * op->nbytes;
    if (share->locations[rank].send)
        return share->locations[rank].send + block * op->nbytes + at * op->size;

    within = at - op->u.shared.chunk * op->u.shared.chunk_count;
    return idist__region_buffer(share, rank, op->u.shared.first_chunk + op->u.shared.chunk) +
           (block * op->u.shared.chunk_count + within) * op->size;
}

// Computes out = in[0] (op) ... (op) in[n - 1] with the user's function. `out` may be one of the
// operands. The function overwrites its second operand, so we reduce into a copy of the last
// operand, from right to left and in pieces. Returns false if the function threw an exception; the
// group has then failed.
static bool idist__fetch_reduce_user(const idist__task *t, void *out, const void *const *in, int n,
                                     size_t count) {
    const idist__op *op = idist__op_of(t);
    uint64_t piece[IDIST__OP_PIECE / sizeof(uint64_t)];
    size_t at, k, most = sizeof piece / op->size; // NOLINT(clang-analyzer-core.DivideZero)
    int i;

    for (at = 0; at < count; at += k) {
        k = idist__flow_min(count - at, most);
        memcpy(piece, (const char *)in[n - 1] + at * op->size, k * op->size);
        for (i = n - 2; i >= 0; i--)
            if (!idist__combine_by_user(t, (const char *)in[i] + at * op->size, piece, k,
                                        t->call.dtype))
                return false;
        memcpy((char *)out + at * op->size, piece, k * op->size);
    }

    return true;
}

// Reduces n operands into `out`. Returns false if the group has failed.
static bool idist__fetch_reduce(const idist__task *t, void *out, const void *const *in, int n,
                                size_t count) {
    const idist__op *op = idist__op_of(t);

    if (op->user && op->user->fn) return idist__fetch_reduce_user(t, out, in, n, count);

    idist__reduce_many(out, in, n, count, t->call.dtype, op->user ? IDIST_SUM : t->call.op,
                       t->call.op == IDIST_AVG ? op->n : 0);
    return true;
}

// Copies from an address in another rank's memory. Returns false if the group has failed. Also
// returns false if that rank has left the call; an ABORT from that rank, with the reason, will then
// arrive.
static bool idist__fetch_remote(idist__task *t, int rank, uint64_t address, char *buf,
                                size_t nbytes) {
    const idist__op *op = idist__op_of(t);
    const idist__share *share = idist__region_share(t);
    int world_rank = t->group->ranks[rank];
    int err =
        idist__segment_read_remote(share->shm, share->shm->local[world_rank], address, buf, nbytes);
    char cause[300];

    if (!err) return true;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (!idist__slot_is_current(share, rank, op->u.shared.call_number)) return false;

    snprintf(cause, sizeof cause,
             err == ESRCH ? "rank %d on %s was lost: its process ended"
                          : "the buffer of rank %d on %s cannot be read: %s",
             world_rank, t->group->w->nodes[world_rank].hostname, strerror(err));
    idist__ring_fail(idist__ring_of(t->group->w), t->group,
                     err == ESRCH ? IDIST_ERR_PEER_LOST : IDIST_ERR_SYSTEM, cause);

    return false;
}

// Returns the address of block `to` of a rank's contribution, from element `at` on, in the memory
// of that rank. Returns 0 if we do not read the contribution from that memory.
static uint64_t idist__fetch_remote_source(const idist__task *t, int rank, int to, size_t at) {
    const idist__op *op = idist__op_of(t);
    uint64_t address;

    if (!op->u.shared.remote || rank == op->rank) return 0;
    address = idist__region_share(t)->locations[rank].remote_send;
    if (!address) return 0;

    return address + (idist__kind_gives_blocks(t->call.kind) ? (size_t)to * op->nbytes : 0) +
           at * op->size;
}

// Reduces `count` elements of block `to`, from element `at` on, over the contributions of the first
// n ranks. Contributions in the memory of other processes are first copied to our memory, in
// pieces.
static bool idist__fetch_sum(idist__task *t, char *out, int n, int to, size_t at, size_t count) {
    const idist__op *op = idist__op_of(t);
    idist__share *share = idist__region_share(t);
    size_t done, k, most = count;
    int i;

    if (op->u.shared.remote)
        most = IDIST__REMOTE_PIECE / op->size; // NOLINT(clang-analyzer-core.DivideZero)

    for (done = 0; done < count; done += k) {
        k = idist__flow_min(count - done, most);

        for (i = 0; i < n; i++) {
            char *piece = share->shm->remote_pieces + (size_t)i * IDIST__REMOTE_PIECE;
            uint64_t address = idist__fetch_remote_source(t, i, to, at + done);

            if (address && !idist__fetch_remote(t, i, address, piece, k * op->size)) return false;
            share->operands[i] = address ? piece : idist__fetch_source(t, i, to, at + done);
        }

        if (!idist__fetch_reduce(t, out + done * op->size, share->operands, n, k)) return false;
    }

    return true;
}

// Reduces the contributions of the first n ranks in the slots of a FLAT call.
static bool idist__fetch_sum_flat(const idist__task *t, int n) {
    const idist__op *op = idist__op_of(t);
    const idist__share *share = idist__region_share(t);
    size_t given = idist__flow_send_nbytes(t);
    size_t at = given <= IDIST__INLINE_BYTES ? offsetof(idist__call_slot, u) : IDIST__LINE;
    int i;

    if (given > op->nbytes) at += (size_t)op->rank * op->nbytes; // our block of each contribution
    for (i = 0; i < n; i++)
        share->operands[i] =
            (const char *)idist__region_slot(share, i, op->u.shared.call_number) + at;
    if (op->rank < n && !idist__flow_is_scaled(op))
        share->operands[op->rank] = idist__flow_send_at(t, op->rank);
    return idist__fetch_reduce(t, op->out, share->operands, n, op->count);
}

// Returns the number of contributions, from rank 0 on, that are reduced into our result.
static int idist__fetch_operand_count(const idist__task *t) {
    const idist__op *op = idist__op_of(t);

    if (t->call.kind == IDIST__SCAN) return op->rank + 1;
    if (t->call.kind == IDIST__EXSCAN) return op->rank;
    return op->n;
}

// Copies our block of each rank's contribution, from element `at` on.
static bool idist__fetch_blocks(idist__task *t, size_t at) {
    const idist__op *op = idist__op_of(t);
    int i;

    for (i = 0; i < op->n; i++) {
        int from = idist__block_wrap(op->rank + i, op->n); // a different start for each rank
        uint64_t address;
        size_t count;
        char *to;

        if (!idist__flow_reads(t, from)) continue;
        count = idist__flow_chunk_count(op, idist__flow_recv_count(t, from), at);
        if (!count) continue;

        to = idist__flow_recv_at(t, from) + at * op->size;
        address = idist__fetch_remote_source(t, from, op->rank, at);
        if (address && !idist__fetch_remote(t, from, address, to, count * op->size)) return false;
        if (!address)
            idist__block_copy(to, idist__fetch_source(t, from, op->rank, at), count * op->size);
    }

    return true;
}

// Copies or reduces the data that this rank needs from the chunk at element `at`, or from a FLAT
// call. idist__split_reduce_run does not use this function.
static bool idist__fetch_chunk(idist__task *t, size_t at) {
    const idist__op *op = idist__op_of(t);
    int n = idist__fetch_operand_count(t);
    size_t count;

    if (t->call.kind == IDIST__BARRIER) return true;
    if (!idist__kind_reduces(t->call.kind)) return idist__fetch_blocks(t, at);

    count = idist__flow_chunk_count(op, op->count, at); // reduce_scatterv: of our own block
    if ((t->call.kind == IDIST__REDUCE && op->rank != op->root) || !n || !count) return true;
    if (op->algorithm != IDIST__ALGO_FLAT)
        return idist__fetch_sum(t, op->out + at * op->size, n, op->rank, at, count);

    return idist__fetch_sum_flat(t, n);
}

// Returns true if the data that we have just read from the buffers of other ranks was valid. A rank
// that leaves the call with an error may reuse its buffers, but withdraws its slots first. An ABORT
// from that rank, with the reason, will then arrive.
static bool idist__fetch_was_valid(idist__task *t) {
    const idist__op *op = idist__op_of(t);
    const idist__share *share = idist__region_share(t);
    int i;

    __atomic_thread_fence(__ATOMIC_ACQUIRE);

    for (i = 0; i < op->n; i++) {
        if (i == op->rank || !idist__flow_reads(t, i)) continue;
        if (!idist__slot_is_current(share, i, op->u.shared.call_number)) return false;
    }

    return true;
}
