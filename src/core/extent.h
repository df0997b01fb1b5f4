// core/extent.h: ranks modulo n, blocks of a buffer, and the positions of a call's elements
//
// Functions: idist__extent_*, idist__block_*.
#pragma once

#include "base/hash.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/fingerprint.h"

//------------------------------------------------------------------------------
// ranks modulo n, and blocks of a buffer
//------------------------------------------------------------------------------

IDIST__UNUSED static int idist__block_wrap(int rank, int n) { return ((rank % n) + n) % n; }

// Returns the index of the first element of block b when `count` elements are divided into n nearly
// equal blocks. Each of the first count % n blocks has one element more than the rest.
static size_t idist__block_at(size_t count, int n, int b) {
    size_t quotient = count / (size_t)n, rest = count % (size_t)n;
    return (size_t)b * quotient + ((size_t)b < rest ? (size_t)b : rest);
}

IDIST__UNUSED static size_t idist__block_count(size_t count, int n, int b) {
    return idist__block_at(count, n, b + 1) - idist__block_at(count, n, b);
}

static void idist__block_copy(void *dst, const void *src, size_t nbytes) {
    if (nbytes && dst != src) memmove(dst, src, nbytes);
}

//------------------------------------------------------------------------------
// the positions of a call's elements
//------------------------------------------------------------------------------

// Number of elements in the send and receive buffers of a call. For an in-place call, also the
// position at which one buffer starts inside the other.
typedef struct idist__extent {
    size_t send, recv; // number of elements
    size_t send_at;    // in place: recv starts at this element of send
    size_t recv_at;    // in place: send starts at this element of recv
} idist__extent;

static size_t idist__extent_displ(const size_t *counts, const size_t *displs, int k) {
    size_t at = 0;
    int i;

    if (displs) return displs[k];
    for (i = 0; i < k; i++) at += counts[i];
    return at;
}

// Returns the number of elements up to the end of the part that ends last, or SIZE_MAX if a
// position exceeds SIZE_MAX / 16.
static size_t idist__extent_end(const size_t *counts, const size_t *displs, int n) {
    size_t total = 0, end;
    int i;

    for (i = 0; i < n; i++) {
        size_t at = displs ? displs[i] : total;

        if (counts[i] > SIZE_MAX / 16 || at > SIZE_MAX / 16) return SIZE_MAX;
        end = at + counts[i];
        if (!displs || (counts[i] && end > total)) total = end;
        if (total > SIZE_MAX / 16) return SIZE_MAX;
    }

    return total;
}

static void idist__extent_of_v(const idist_group *g, const idist__call *call, idist__extent *e) {
    bool root = call->root == g->rank;

    switch (call->kind) {
    case IDIST__ALL_GATHERV:
    case IDIST__GATHERV:
        e->send = call->count;
        if (call->kind == IDIST__GATHERV && !root) break;
        e->recv = idist__extent_end(call->recvcounts, call->recvdispls, g->size);
        e->recv_at = idist__extent_displ(call->recvcounts, call->recvdispls, g->rank);
        break;
    case IDIST__SCATTERV:
        e->recv = call->count;
        if (!root) break;
        e->send = idist__extent_end(call->sendcounts, call->senddispls, g->size);
        e->send_at = idist__extent_displ(call->sendcounts, call->senddispls, g->rank);
        break;
    case IDIST__ALL_TO_ALLV:
        e->send = idist__extent_end(call->sendcounts, call->senddispls, g->size);
        e->recv = idist__extent_end(call->recvcounts, call->recvdispls, g->size);
        break;
    case IDIST__REDUCE_SCATTERV:
        e->send = idist__extent_end(call->sendcounts, NULL, g->size);
        e->recv = call->count;
        e->send_at = idist__extent_displ(call->sendcounts, NULL, g->rank);
        break;
    default: break;
    }
}

static idist_status idist__extent_of(const idist_group *g, const idist__call *call,
                                     idist__extent *e) {
    size_t n = (size_t)g->size, r = (size_t)g->rank, count = call->count, all;
    bool root = call->root == g->rank;

    memset(e, 0, sizeof *e);
    if (count > SIZE_MAX / 16 / n) return IDIST_ERR_ARG;
    all = n * count;

    switch (call->kind) {
    case IDIST__ALL_REDUCE:
    case IDIST__SCAN:
    case IDIST__EXSCAN: e->send = e->recv = count; break;
    case IDIST__REDUCE:
        e->send = count;
        e->recv = root ? count : 0;
        break;
    case IDIST__BROADCAST: e->recv = count; break;
    case IDIST__ALL_GATHER:
    case IDIST__GATHER:
        e->send = count;
        e->recv = call->kind == IDIST__ALL_GATHER || root ? all : 0;
        e->recv_at = r * count;
        break;
    case IDIST__SCATTER:
    case IDIST__REDUCE_SCATTER:
        e->send = call->kind == IDIST__REDUCE_SCATTER || root ? all : 0;
        e->recv = count;
        e->send_at = r * count;
        break;
    case IDIST__ALL_TO_ALL: e->send = e->recv = all; break;
    case IDIST__SEND: e->send = count; break;
    case IDIST__RECV: e->recv = count; break;
    default: idist__extent_of_v(g, call, e); break;
    }

    return e->send == SIZE_MAX || e->recv == SIZE_MAX ? IDIST_ERR_ARG : IDIST_OK;
}

// Returns true if the two buffers overlap in the way that the call's in-place rule requires.
static bool idist__extent_in_place(const idist__extent *e, const idist__call *call) {
    const char *send = (const char *)call->send, *recv = (const char *)call->recv;
    size_t size = idist_dtype_size(call->dtype);

    if (!e->send || !e->recv) return false;
    return (recv == send + e->send_at * size && !e->recv_at) ||
           (send == recv + e->recv_at * size && !e->send_at);
}

IDIST__UNUSED static bool idist__extent_call_in_place(const idist_group *g,
                                                      const idist__call *call) {
    idist__extent e;
    return idist__extent_of(g, call, &e) == IDIST_OK && idist__extent_in_place(&e, call);
}

// Returns the address of the elements that rank `from` sends to rank `to`, and sets *count to their
// number. The buffer at `base` is the sender's send buffer if at_sender is true, and otherwise the
// receiver's receive buffer.
static char *idist__extent_part(const idist__call *call, char *base, int from, int to,
                                bool at_sender, size_t *count) {
    const size_t *counts = at_sender ? call->sendcounts : call->recvcounts;
    const size_t *displs = at_sender ? call->senddispls : call->recvdispls;
    size_t size = idist_dtype_size(call->dtype);
    bool gather = call->kind == IDIST__GATHER || call->kind == IDIST__GATHERV;
    bool scatter = call->kind == IDIST__SCATTER || call->kind == IDIST__SCATTERV;
    bool all_to_allv = counts && call->sendcounts && call->recvcounts;
    int k = at_sender ? to : from; // index of the part, if the buffer has several parts

    *count = 0;
    if ((gather && to != call->root) || (scatter && from != call->root)) return base;
    *count = call->count;
    if (call->kind != IDIST__ALL_TO_ALL && !all_to_allv && at_sender != scatter)
        return base; // the buffer is a single part
    if (!idist__kind_is_v(call->kind) || !counts) return base + (size_t)k * call->count * size;
    *count = counts[k];

    return base + idist__extent_displ(counts, displs, k) * size;
}

// Returns the index of the first element of block b in the send buffer of a reduce_scatter or
// reduce_scatterv.
IDIST__UNUSED static size_t idist__extent_block_at(const idist__call *call, int b) {
    return call->sendcounts ? idist__extent_displ(call->sendcounts, NULL, b)
                            : (size_t)b * call->count;
}

IDIST__UNUSED static size_t idist__extent_block_count(const idist__call *call, int b) {
    return call->sendcounts ? call->sendcounts[b] : call->count;
}

// Returns the number of elements that this rank sends to a peer (if `sends`) or expects from the
// peer. Used only for gatherv, scatterv and all_to_allv, in which only the two ranks of a pair know
// this number.
static size_t idist__extent_pair_count(const idist_group *g, const idist__call *call, int peer,
                                       bool sends) {
    int root = call->root, me = g->rank;

    if (call->kind == IDIST__ALL_TO_ALLV)
        return sends ? call->sendcounts[peer] : call->recvcounts[peer];

    if (call->kind == IDIST__GATHERV) {
        if (sends) return peer == root ? call->count : 0;
        return me == root ? call->recvcounts[peer] : 0;
    }

    if (sends) return me == root ? call->sendcounts[peer] : 0;
    return peer == root ? call->count : 0;
}

// Returns the value of idist__fingerprint_pair for the elements that this rank sends to a peer (if
// `sends`) or expects from the peer.
IDIST__UNUSED static uint64_t idist__extent_pair(const idist_group *g, const idist__call *call,
                                                 int peer, bool sends) {
    return idist__fingerprint_pair(g->w, call, idist__extent_pair_count(g, call, peer, sends));
}

// Returns this rank's term of a sum that checks the counts. For each pair of ranks, the sender adds
// a hash of what it sends and the receiver subtracts a hash of what it expects. The sum over all
// ranks is 0 if all pairs agree. Otherwise the sum is non-zero with overwhelming probability.
IDIST__UNUSED static uint64_t idist__extent_balance(const idist_group *g, const idist__call *call) {
    uint64_t sum = 0, me = (uint64_t)g->rank, n = (uint64_t)g->size;
    int i;

    if (!idist__kind_is_by_pair(call->kind)) return 0; // the fingerprint contains the counts

    for (i = 0; i < g->size; i++) {
        sum += idist__hash_mix(me * n + (uint64_t)i, idist__extent_pair(g, call, i, true));
        sum -= idist__hash_mix((uint64_t)i * n + me, idist__extent_pair(g, call, i, false));
    }

    return sum;
}
