/* idist_ring.h - v0.1.0 - the ring backend of idist: ranks on one host or many - MIT licence

DO THIS

    Nothing: idist.h includes this header at its end. Define IDIST_NO_RING to leave it out.

WHAT IT IS

    Every rank has one stream to every other: a pipe in shared memory inside a host (or a local
socket), TCP between hosts. Messages up to 64 KiB (8 KiB through shared memory) go out at once
(eager) within a window of 1 MiB that the receiver has to keep; larger ones are announced and sent
when the receiver has named a place for them, or read by it in the sender's memory (rendezvous), so
nothing is ever buffered without bound. Every message carries the fingerprint of the call it belongs
to.

    A collective of ranks that share memory goes through places where all can read ([ring:share]).
Otherwise it is an algorithm over non-blocking sends and receives of the group's ranks
([ring:algo]); it never sees a socket, and it is called again whenever one of them is through.

CONTENTS

      [ring:api]     the backend's entry in IDIST_BACKENDS
      [ring:algo]    the collectives, in two kinds: few steps for small messages, few bytes for
large ones [ring:choose]  which algorithm, with which scratch [ring:host]    a group over several
hosts: inside each host first, then between one rank of each [ring:engine]  frames arrive, tasks
start and end, waits are announced [ring:join]    how the ranks meet, connect to each other, and
part

    The algorithms can be read by themselves; begin there to learn how collectives work.

LIMITS

    n ranks need n descriptors each, and rank 0 about 2n + 8 while they meet. A dead machine (as
opposed to a dead process) is noticed by the time-out only. Over several hosts gather, scatter,
all_to_all, scan, the v-forms, and reductions of floats of 16 and 8 bits or in a fixed order, are
made of messages among all.

    Licence: MIT, as idist.h.
*/
#ifndef IDIST_H
#include "idist.h"
#endif
#ifndef IDIST_RING_H
#define IDIST_RING_H

#ifdef __cplusplus
extern "C" {
#endif

//------------------------------------------------------------------------------
// [ring:api]  the backend's entry in IDIST_BACKENDS
//------------------------------------------------------------------------------

// Any number of ranks, on one host or several; CPU memory.
IDIST_API const idist_backend_api *idist_ring_backend(void);

#undef IDIST__ENTRY_RING
#define IDIST__ENTRY_RING idist_ring_backend()

#ifdef __cplusplus
} // extern "C"
#endif

#endif // IDIST_RING_H

// Only here for the API? Stop reading.

#if defined(IDIST_IMPLEMENTATION) && !defined(IDIST_RING_IMPLEMENTATION_DONE)
#define IDIST_RING_IMPLEMENTATION_DONE

#include "idist_begin.h"
#include "idist_shm.h"
#include "idist_msg.h"
#include "idist_share.h"

//------------------------------------------------------------------------------
// [ring:algo]  the collectives, in two kinds: few steps for small messages, few bytes for large ones
// uses world core:call self op verb
//
// n ranks, B bytes per rank, a start-up time per message and a time per byte.
//
//   operation       small ("latency")                     large ("bandwidth")
//   barrier         dissemination, log n steps            -
//   broadcast       binomial tree, log n                  chain, B + (n-2) chunks
//   reduce          binomial tree, log n                  chain
//   all_reduce      recursive doubling, B log n bytes     ring, 2 B (n-1)/n bytes
//   all_gather      Bruck, log n steps                    ring, B (n-1) bytes
//   reduce_scatter  recursive doubling of all n blocks    ring, B (n-1) bytes
//   gather, scatter binomial tree, log n                  direct
//   all_to_all      Bruck, log n steps, B n/2 log n bytes pairwise, B (n-1) bytes
//   scan, exscan    recursive doubling, log n             chain
//   v-forms         -                                     direct or pairwise; all_gatherv as ring
//
// Sources: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
// MPICH", 2005; Bruck et al., "Efficient Algorithms for All-to-All Communications", 1997; Patarasuk
// and Yuan, "Bandwidth optimal all-reduce", 2009.
//
// Every block of a result is computed in one place, or by ranks that combine the same operands in
// the same order; so all ranks end with the same bits, and no order depends on who came first.
//------------------------------------------------------------------------------

// ---- streams ----
//
// Item k goes out when k < head, or when item k - head has been taken: so a ring sends its own
// block first (head = its chunks) and then passes on what it took, and a link of a chain passes on
// at once (head = 0). Some receives are posted ahead; they land where recv_at says, or in a slot of
// scratch when it says NULL. The tag is the number of the item.

static char *idist__stream_slot(const idist__op *o, size_t k) {
    return o->slots + (k % IDIST__SLOTS) * o->chunk * o->size;
}

static void idist__stream_run(idist__task *t) {
    idist__op *o = idist__op_of(t);

    for (;;) {
        while (o->posted < o->nrecv && o->posted < o->taken + IDIST__SLOTS) {
            idist__item item = o->recv_at(t, o->posted);
            char *at = item.data || !o->slots ? item.data : idist__stream_slot(o, o->posted);
            size_t k = o->posted++;
            idist__recv_step(t, (int)(k % IDIST__SLOTS), item.peer, (uint32_t)k, at, item.nbytes);
        }

        while (o->sent < o->nsend && (o->sent < o->head || o->sent - o->head < o->taken) &&
               o->nsends < IDIST__SLOTS) {
            idist__item item = o->send_at(t, o->sent);
            idist__send_step(t, item.peer, (uint32_t)o->sent++, item.data, item.nbytes);
        }

        if (o->taken == o->posted || (o->rx & (1u << (o->taken % IDIST__SLOTS)))) break;
        if (o->take) o->take(t, o->taken);
        o->taken++;
    }

    if (o->taken == o->nrecv && o->sent == o->nsend && !o->nsends) idist__op_done(t);
}

// Chunk j of a block of `count` elements, as bytes from the block's start. Chunks beyond its end
// are empty.
static idist__item idist__chunk_of(const idist__op *o, char *block, size_t count, size_t j,
                                   int peer) {
    idist__item item;
    size_t at = j * o->chunk < count ? j * o->chunk : count;
    size_t k = count - at < o->chunk ? count - at : o->chunk;

    item.peer = peer;
    item.data = block ? block + at * o->size : NULL;
    item.nbytes = k * o->size;
    return item;
}

static void idist__stream_begin(idist__op *o, size_t nrecv, size_t nsend, size_t head,
                                idist__item (*recv_at)(idist__task *, size_t),
                                idist__item (*send_at)(idist__task *, size_t),
                                void (*take)(idist__task *, size_t)) {
    o->nrecv = nrecv;
    o->nsend = nsend;
    o->head = head;
    o->recv_at = recv_at;
    o->send_at = send_at;
    o->take = take;
    o->run = idist__stream_run;
}

// Cuts blocks of at most `count` elements into chunks.
static void idist__stream_chunks(idist__op *o, size_t count) {
    o->chunk = IDIST__CHUNK_BYTES / (o->size ? o->size : 1); // an element has 1 to 8 bytes
    o->chunks = count ? (count - 1) / o->chunk + 1 : 1; // NOLINT(clang-analyzer-core.DivideZero)
    if (o->chunks == 1) o->chunk = count ? count : 1;
}

// ---- ring: all_reduce, reduce_scatter, all_gather ----
//
// The ranks form a ring; everybody sends to the right and receives from the left, all links busy at
// once. With n = 4, rank r starts with block r. In step s it sends block r - s and receives block r
// - s - 1, to which it adds its own part:
//
//        step 0     step 1     step 2                    and then the same walk again, without
//        adding,
//   r=0  sends 0    3          2      -> holds sum of 1   hands the finished sums to everybody:
//   steps r=1  sends 1    0          3      -> holds sum of 2   3 .. 5 send 1, 0, 3 from rank 0.
//   r=2  sends 2    1          0      -> holds sum of 3
//   r=3  sends 3    2          1      -> holds sum of 0   2 (n-1)/n of the bytes per rank in all.
//
// Blocks are cut into chunks so that adding one overlaps with receiving the next. The first sends
// come straight from the send buffer and the sums go straight to the receive buffer: nothing is
// copied beforehand. A block is overwritten in the second walk only by data that depends on our
// first send of it, so in place is safe.

static int idist__ring_block(const idist__op *o, size_t k, int back) {
    return idist__wrap(o->r - (int)(k / o->chunks) - back, o->n);
}

static bool idist__ring_adds(const idist__op *o, size_t k) {
    return k < (size_t)(o->n - 1) * o->chunks;
}

static idist__item idist__all_reduce_item(const idist__op *o, const char *base, size_t k, int block,
                                          int peer) {
    size_t at = idist__block_at(o->count, o->n, block) * o->size;
    return idist__chunk_of(o, base ? (char *)(uintptr_t)base + at : NULL,
                           idist__block_count(o->count, o->n, block), k % o->chunks, peer);
}

static idist__item idist__all_reduce_recv(idist__task *t, size_t k) {
    idist__op *o = idist__op_of(t);
    return idist__all_reduce_item(o, idist__ring_adds(o, k) ? NULL : o->out, k,
                                  idist__ring_block(o, k, 1), idist__wrap(o->r - 1, o->n));
}

static idist__item idist__all_reduce_send(idist__task *t, size_t k) {
    idist__op *o = idist__op_of(t);
    return idist__all_reduce_item(o, k < o->chunks ? o->in : o->out, k, idist__ring_block(o, k, 0),
                                  idist__wrap(o->r + 1, o->n));
}

static void idist__all_reduce_take(idist__task *t, size_t k) {
    idist__op *o = idist__op_of(t);
    int b = idist__ring_block(o, k, 1);
    idist__item own = idist__all_reduce_item(o, o->in, k, b, 0),
                sum = idist__all_reduce_item(o, o->out, k, b, 0);

    if (idist__ring_adds(o, k))
        idist__op_reduce(o, sum.data, idist__stream_slot(o, k), own.data, own.nbytes / o->size,
                         t->call.dtype);
}

static void idist__all_reduce_ring(idist__op *o) {
    size_t steps = 2 * (size_t)(o->n - 1);
    idist__stream_chunks(o, idist__block_count(o->count, o->n, 0));
    idist__stream_begin(o, steps * o->chunks, steps * o->chunks, o->chunks, idist__all_reduce_recv,
                        idist__all_reduce_send, idist__all_reduce_take);
}

// reduce_scatter: the first walk alone, begun one block earlier so that rank r ends with block r.
// Sums on their way are kept in scratch; the last one goes to the receive buffer.
static idist__item idist__reduce_scatter_recv(idist__task *t, size_t k) {
    idist__op *o = idist__op_of(t);
    return idist__chunk_of(o, NULL, o->count, k % o->chunks, idist__wrap(o->r - 1, o->n));
}

static idist__item idist__reduce_scatter_send(idist__task *t, size_t k) {
    idist__op *o = idist__op_of(t);
    const char *base = k < o->chunks ? o->in : o->work;
    size_t at = (size_t)idist__ring_block(o, k, 1) * o->nbytes;
    return idist__chunk_of(o, (char *)(uintptr_t)base + at, o->count, k % o->chunks,
                           idist__wrap(o->r + 1, o->n));
}

static void idist__reduce_scatter_take(idist__task *t, size_t k) {
    idist__op *o = idist__op_of(t);
    int b = idist__ring_block(o, k, 2);
    bool last = k >= (size_t)(o->n - 2) * o->chunks;
    idist__item own = idist__chunk_of(o, (char *)(uintptr_t)o->in + (size_t)b * o->nbytes, o->count,
                                      k % o->chunks, 0);
    idist__item sum = idist__chunk_of(o, last ? o->out : o->work + (size_t)b * o->nbytes, o->count,
                                      k % o->chunks, 0);

    idist__op_reduce(o, sum.data, idist__stream_slot(o, k), own.data, own.nbytes / o->size,
                     t->call.dtype);
}

static void idist__reduce_scatter_ring(idist__op *o) {
    size_t items;
    idist__stream_chunks(o, o->count);
    items = (size_t)(o->n - 1) * o->chunks;
    idist__stream_begin(o, items, items, o->chunks, idist__reduce_scatter_recv,
                        idist__reduce_scatter_send, idist__reduce_scatter_take);
}

// all_gather and all_gatherv: the second walk alone.
static idist__item idist__all_gather_item(idist__task *t, size_t k, int block, int peer) {
    idist__op *o = idist__op_of(t);
    const idist__call *c = &t->call;
    size_t count = c->recvcounts ? c->recvcounts[block] : o->count;
    size_t at = c->recvcounts ? idist__displ(c->recvcounts, c->recvdispls, block)
                              : (size_t)block * o->count;

    return idist__chunk_of(o, o->out + at * o->size, count, k % o->chunks, peer);
}

static idist__item idist__all_gather_recv(idist__task *t, size_t k) {
    idist__op *o = idist__op_of(t);
    return idist__all_gather_item(t, k, idist__ring_block(o, k, 1), idist__wrap(o->r - 1, o->n));
}

static idist__item idist__all_gather_send(idist__task *t, size_t k) {
    idist__op *o = idist__op_of(t);
    return idist__all_gather_item(t, k, idist__ring_block(o, k, 0), idist__wrap(o->r + 1, o->n));
}

static void idist__all_gather_ring(idist__task *t) {
    idist__op *o = idist__op_of(t);
    const idist__call *c = &t->call;
    size_t most = o->count, items, at = (size_t)o->r * o->count;
    int i;

    for (i = 0; c->recvcounts && i < o->n; i++)
        if (c->recvcounts[i] > most) most = c->recvcounts[i];
    if (c->recvcounts) at = idist__displ(c->recvcounts, c->recvdispls, o->r);
    idist__copy(o->out + at * o->size, o->in, o->nbytes);
    idist__stream_chunks(o, most);
    items = (size_t)(o->n - 1) * o->chunks;
    idist__stream_begin(o, items, items, o->chunks, idist__all_gather_recv, idist__all_gather_send,
                        NULL);
}

// ---- chain: broadcast, reduce, scan, exscan ----
//
// Chunks travel along the ranks like a bucket brigade; after n - 2 chunks of delay every link
// carries data all the time. v numbers the ranks from the root; the broadcast runs upwards from v =
// 0, the reduction down to it, the scan along the ranks themselves.

static idist__item idist__broadcast_recv(idist__task *t, size_t k) {
    idist__op *o = idist__op_of(t);
    return idist__chunk_of(o, o->out, o->count, k, idist__wrap(o->r - 1, o->n));
}

static idist__item idist__broadcast_send(idist__task *t, size_t k) {
    idist__op *o = idist__op_of(t);
    return idist__chunk_of(o, o->out, o->count, k, idist__wrap(o->r + 1, o->n));
}

static void idist__broadcast_chain(idist__op *o) {
    idist__stream_chunks(o, o->count);
    idist__stream_begin(o, o->v ? o->chunks : 0, o->v < o->n - 1 ? o->chunks : 0,
                        o->v ? 0 : o->chunks, idist__broadcast_recv, idist__broadcast_send, NULL);
}

static idist__item idist__reduce_recv(idist__task *t, size_t k) {
    idist__op *o = idist__op_of(t);
    return idist__chunk_of(o, NULL, o->count, k, idist__wrap(o->r + 1, o->n));
}

static idist__item idist__reduce_send(idist__task *t, size_t k) {
    idist__op *o = idist__op_of(t);
    const char *base = o->v == o->n - 1 ? o->in : o->work;
    return idist__chunk_of(o, (char *)(uintptr_t)base, o->count, k, idist__wrap(o->r - 1, o->n));
}

static void idist__reduce_take(idist__task *t, size_t k) {
    idist__op *o = idist__op_of(t);
    idist__item own = idist__chunk_of(o, (char *)(uintptr_t)o->in, o->count, k, 0);
    idist__item sum = idist__chunk_of(o, o->v ? o->work : o->out, o->count, k, 0);
    idist__op_reduce(o, sum.data, own.data, idist__stream_slot(o, k), own.nbytes / o->size,
                     t->call.dtype);
}

static void idist__reduce_chain(idist__op *o) {
    idist__stream_chunks(o, o->count);
    idist__stream_begin(o, o->v < o->n - 1 ? o->chunks : 0, o->v ? o->chunks : 0,
                        o->v < o->n - 1 ? 0 : o->chunks, idist__reduce_recv, idist__reduce_send,
                        idist__reduce_take);
}

// What a rank sends on is the prefix with its own part; what it keeps is that (scan) or what came
// in (exscan).
static idist__item idist__scan_recv(idist__task *t, size_t k) {
    idist__op *o = idist__op_of(t);
    return idist__chunk_of(o, NULL, o->count, k, o->r - 1);
}

static idist__item idist__scan_send(idist__task *t, size_t k) {
    idist__op *o = idist__op_of(t);
    const char *base = o->r == 0 ? o->in : t->call.kind == IDIST__SCAN ? o->out : o->work;
    return idist__chunk_of(o, (char *)(uintptr_t)base, o->count, k, o->r + 1);
}

static void idist__scan_take(idist__task *t, size_t k) {
    idist__op *o = idist__op_of(t);
    idist__item own = idist__chunk_of(o, (char *)(uintptr_t)o->in, o->count, k, 0);
    idist__item out = idist__chunk_of(o, o->out, o->count, k, 0);
    char *came = idist__stream_slot(o, k);

    if (t->call.kind == IDIST__SCAN) {
        idist__op_reduce(o, out.data, came, own.data, own.nbytes / o->size, t->call.dtype);
    } else {
        idist__item sum = idist__chunk_of(o, o->work, o->count, k, 0);
        if (o->r < o->n - 1)
            idist__op_reduce(o, sum.data, came, own.data, own.nbytes / o->size, t->call.dtype);
        idist__copy(out.data, came, out.nbytes); // after: in place, `own` lies here too
    }
}

static void idist__scan_chain(idist__task *t) {
    idist__op *o = idist__op_of(t);
    if (o->r == 0 && t->call.kind == IDIST__SCAN) idist__copy(o->out, o->in, o->nbytes);
    idist__stream_chunks(o, o->count);
    idist__stream_begin(o, o->r ? o->chunks : 0, o->r < o->n - 1 ? o->chunks : 0,
                        o->r ? 0 : o->chunks, idist__scan_recv, idist__scan_send, idist__scan_take);
}

// ---- direct: gather, scatter, all_to_all and their v-forms ----
//
// Every pair exchanges its own message. In item k a rank sends to r + 1 + k and receives from r - 1
// - k, so that nobody is everybody's first target. The tag is the distance, which both ends know.
// Only some are under way at a time.

static idist__item idist__direct_item(idist__task *t, int peer, bool receives) {
    idist__op *o = idist__op_of(t);
    const idist__call *c = &t->call;
    const size_t *counts = receives ? c->recvcounts : c->sendcounts,
                 *displs = receives ? c->recvdispls : c->senddispls;
    const char *base = receives ? o->out : o->in;
    bool many = receives ? c->kind != IDIST__SCATTER && c->kind != IDIST__SCATTERV
                         : c->kind != IDIST__GATHER && c->kind != IDIST__GATHERV;
    size_t count = counts ? counts[peer] : o->count;
    idist__item item;

    item.peer = peer;
    item.nbytes = count * o->size;
    item.data = (char *)(uintptr_t)base;
    if (many)
        item.data +=
            (counts ? idist__displ(counts, displs, peer) : (size_t)peer * o->count) * o->size;

    return item;
}

static idist__item idist__direct_recv(idist__task *t, size_t k) {
    idist__op *o = idist__op_of(t);
    bool rooted = idist__has_root(t->call.kind);

    return idist__direct_item(t,
                              rooted && o->r != o->root ? o->root
                                                        : idist__wrap(o->r - 1 - (int)k, o->n),
                              true);
}

static idist__item idist__direct_send(idist__task *t, size_t k) {
    idist__op *o = idist__op_of(t);
    bool rooted = idist__has_root(t->call.kind);

    return idist__direct_item(t,
                              rooted && o->r != o->root ? o->root
                                                        : idist__wrap(o->r + 1 + (int)k, o->n),
                              false);
}

// A stream whose items all go at once; the tag of an item is the distance between its two ends.
static void idist__direct_run(idist__task *t) {
    idist__op *o = idist__op_of(t);

    for (;;) {
        while (o->posted < o->nrecv && o->nrecvs < IDIST__SLOTS) {
            idist__item item = o->recv_at(t, o->posted++);
            idist__recv_step(t, -1, item.peer, (uint32_t)idist__wrap(o->r - item.peer, o->n),
                             item.data, item.nbytes);
        }

        if (o->sent == o->nsend || o->nsends >= IDIST__SLOTS) break;

        {
            idist__item item = o->send_at(t, o->sent++);
            idist__send_step(t, item.peer, (uint32_t)idist__wrap(item.peer - o->r, o->n), item.data,
                             item.nbytes);
        }
    }

    if (o->posted == o->nrecv && !o->nrecvs && o->sent == o->nsend && !o->nsends) idist__op_done(t);
}

static void idist__direct_begin(idist__task *t) {
    idist__op *o = idist__op_of(t);
    const idist__call *c = &t->call;
    bool gathers = c->kind == IDIST__GATHER || c->kind == IDIST__GATHERV,
         scatters = c->kind == IDIST__SCATTER || c->kind == IDIST__SCATTERV;
    bool root = o->r == o->root;
    size_t others = (size_t)(o->n - 1);
    size_t nrecv = gathers ? (root ? others : 0) : scatters ? (root ? 0 : 1) : others;
    size_t nsend = gathers ? (root ? 0 : 1) : scatters ? (root ? others : 0) : others;

    if (!idist__has_root(c->kind) || root) { // the own part
        idist__item from = idist__direct_item(t, o->r, false),
                    to = idist__direct_item(t, o->r, true);
        idist__copy(to.data, from.data, to.nbytes);
    }

    idist__stream_begin(o, nrecv, nsend, 0, idist__direct_recv, idist__direct_send, NULL);
    o->run = idist__direct_run;
}

// ---- straight code: the small-message algorithms ----

// In round k everybody tells the rank k further on; after log n rounds everybody has heard of all
// (Hensgen, Finkel, Manber 1988).
static void idist__barrier_dissemination(idist__task *t) {
    idist__op *o = idist__op_of(t);
    int n = o->n, r = o->r;

    IDIST__CO_BEGIN(o)

    for (o->mask = 1; o->mask < n; o->mask *= 2) {
        idist__recv_step(t, 0, idist__wrap(r - o->mask, n), (uint32_t)o->mask, NULL, 0);
        idist__send_step(t, idist__wrap(r + o->mask, n), (uint32_t)o->mask, NULL, 0);
        IDIST__CO_AWAIT(o, !o->rx);
    }

    IDIST__CO_AWAIT(o, !o->nsends);
    idist__op_done(t);
    IDIST__CO_END(o)
}

// v receives from v without its lowest set bit, then serves the bits below: 0 -> 4, 2, 1; 4 -> 6,
// 5; 6 -> 7.
static void idist__broadcast_tree(idist__task *t) {
    idist__op *o = idist__op_of(t);
    int n = o->n, v = o->v;

    IDIST__CO_BEGIN(o)
    for (o->mask = 1; o->mask < n && !(v & o->mask); o->mask *= 2) continue;

    if (v) {
        idist__recv_step(t, 0, idist__wrap(v - o->mask + o->root, n), 0, o->out, o->nbytes);
        IDIST__CO_AWAIT(o, !o->rx);
    }

    for (o->mask /= 2; o->mask; o->mask /= 2)
        if (v + o->mask < n)
            idist__send_step(t, idist__wrap(v + o->mask + o->root, n), 0, o->out, o->nbytes);
    IDIST__CO_AWAIT(o, !o->nsends);
    idist__op_done(t);
    IDIST__CO_END(o)
}

// The same tree upwards. acc covers the ranks v .. v + mask - 1, what comes in the next `mask`. For
// an op that does not commute the tree stands on rank 0 (v = r), and rank 0 passes the result on to
// the root. work: the sum, then room for one message.
static void idist__reduce_tree(idist__task *t) {
    idist__op *o = idist__op_of(t);
    int n = o->n, v = o->v, base = idist__wrap(o->r - v, n);
    char *came = o->work + o->nbytes;

    IDIST__CO_BEGIN(o)
    idist__copy(o->work, o->in, o->nbytes);

    for (o->mask = 1; o->mask < n && !(v & o->mask); o->mask *= 2) {
        if (v + o->mask >= n) continue;
        idist__recv_step(t, 0, idist__wrap(v + o->mask + base, n), 0, came, o->nbytes);
        IDIST__CO_AWAIT(o, !o->rx);
        idist__op_reduce(o, o->work, o->work, came, o->count, t->call.dtype);
    }

    if (v) idist__send_step(t, idist__wrap(v - o->mask + base, n), 0, o->work, o->nbytes);
    else if (o->r != o->root) idist__send_step(t, o->root, 1, o->work, o->nbytes);

    if (o->r == o->root && v) {
        idist__recv_step(t, 0, base, 1, o->out, o->nbytes);
        IDIST__CO_AWAIT(o, !o->rx);
    } else if (o->r == o->root) {
        idist__copy(o->out, o->work, o->nbytes);
    }

    IDIST__CO_AWAIT(o, !o->nsends);
    idist__op_done(t);
    IDIST__CO_END(o)
}

// In round k partners at distance 2^k exchange what they have and add it: log n rounds. When n is
// no power of two, the first 2 (n - p2) ranks pair up first, and the odd one of a pair gets the
// result at the end. A partner's sum covers the ranks just below or just above ours, so the order
// of the ranks is kept. acc is o->out for all_reduce, o->work for reduce_scatter; `came` one
// message of scratch behind. o->i counts elements.
static void idist__doubling(idist__task *t) {
    idist__op *o = idist__op_of(t);
    int r = o->r, rest = o->n - o->p2, partner, rank;
    bool scatter = t->call.kind == IDIST__REDUCE_SCATTER;
    size_t count = scatter ? o->count * (size_t)o->n : o->count, nbytes = count * o->size;
    char *acc = scatter ? o->work : o->out, *came = scatter ? o->work + nbytes : o->work;

    IDIST__CO_BEGIN(o)
    idist__copy(acc, o->in, nbytes);
    o->nr = r < 2 * rest ? (r % 2 ? -1 : r / 2) : r - rest;

    if (r < 2 * rest && r % 2) {
        idist__send_step(t, r - 1, 0, acc, nbytes);
    } else if (r < 2 * rest) {
        idist__recv_step(t, 0, r + 1, 0, came, nbytes);
        IDIST__CO_AWAIT(o, !o->rx);
        idist__op_reduce(o, acc, acc, came, count, t->call.dtype);
    }

    for (o->mask = 1; o->mask < o->p2 && o->nr >= 0; o->mask *= 2) {
        partner = o->nr ^ o->mask;
        rank = partner < rest ? 2 * partner : partner + rest;
        idist__recv_step(t, 0, rank, (uint32_t)o->mask, came, nbytes);
        idist__send_step(t, rank, (uint32_t)o->mask, acc, nbytes);
        IDIST__CO_AWAIT(o, !o->rx && !o->nsends);
        if ((o->nr ^ o->mask) < o->nr) idist__op_reduce(o, acc, came, acc, count, t->call.dtype);
        else idist__op_reduce(o, acc, acc, came, count, t->call.dtype);
    }

    if (r < 2 * rest && r % 2) {
        IDIST__CO_AWAIT(o, !o->nsends);
        idist__recv_step(t, 0, r - 1, 1u << 30, acc, nbytes);
    } else if (r < 2 * rest) {
        idist__send_step(t, r + 1, 1u << 30, acc, nbytes);
    }

    IDIST__CO_AWAIT(o, !o->rx && !o->nsends);
    if (scatter) idist__copy(o->out, acc + (size_t)r * o->nbytes, o->nbytes);
    idist__op_done(t);
    IDIST__CO_END(o)
}

// After round k we hold the blocks r .. r + 2^(k+1) - 1, in this order, from the start of work; at
// the end they are turned into place.
static void idist__all_gather_bruck(idist__task *t) {
    idist__op *o = idist__op_of(t);
    int n = o->n, r = o->r, part;

    IDIST__CO_BEGIN(o)
    idist__copy(o->work, o->in, o->nbytes);

    for (o->mask = 1; o->mask < n; o->mask *= 2) {
        part = o->mask < n - o->mask ? o->mask : n - o->mask;
        idist__recv_step(t, 0, idist__wrap(r + o->mask, n), (uint32_t)o->mask,
                         o->work + (size_t)o->mask * o->nbytes, (size_t)part * o->nbytes);
        idist__send_step(t, idist__wrap(r - o->mask, n), (uint32_t)o->mask, o->work,
                         (size_t)part * o->nbytes);
        IDIST__CO_AWAIT(o, !o->rx && !o->nsends);
    }

    idist__copy(o->out + (size_t)r * o->nbytes, o->work, (size_t)(n - r) * o->nbytes);
    idist__copy(o->out, o->work + (size_t)(n - r) * o->nbytes, (size_t)r * o->nbytes);
    idist__op_done(t);
    IDIST__CO_END(o)
}

// Ranks below v in the binomial tree: how many blocks v holds once its children have sent.
static int idist__subtree(int v, int n) {
    int mask;
    for (mask = 1; mask < n && !(v & mask); mask *= 2) continue;
    return v + mask < n ? mask : n - v;
}

// work: the blocks of v, v + 1, ... in this order. The root puts them where they belong.
static void idist__gather_tree(idist__task *t) {
    idist__op *o = idist__op_of(t);
    int n = o->n, v = o->v, i;

    IDIST__CO_BEGIN(o)
    idist__copy(o->work, o->in, o->nbytes);
    for (o->mask = 1; o->mask < n && !(v & o->mask); o->mask *= 2)
        if (v + o->mask < n)
            idist__recv_step(t, -1, idist__wrap(v + o->mask + o->root, n), 0,
                             o->work + (size_t)o->mask * o->nbytes,
                             (size_t)idist__subtree(v + o->mask, n) * o->nbytes);
    IDIST__CO_AWAIT(o, !o->nrecvs);
    if (v)
        idist__send_step(t, idist__wrap(v - o->mask + o->root, n), 0, o->work,
                         (size_t)idist__subtree(v, n) * o->nbytes);
    else
        for (i = 0; i < n; i++)
            idist__copy(o->out + (size_t)idist__wrap(i + o->root, n) * o->nbytes,
                        o->work + (size_t)i * o->nbytes, o->nbytes);
    IDIST__CO_AWAIT(o, !o->nsends);
    idist__op_done(t);
    IDIST__CO_END(o)
}

static void idist__scatter_tree(idist__task *t) {
    idist__op *o = idist__op_of(t);
    int n = o->n, v = o->v, i;

    IDIST__CO_BEGIN(o)
    for (o->mask = 1; o->mask < n && !(v & o->mask); o->mask *= 2) continue;

    if (v) {
        idist__recv_step(t, 0, idist__wrap(v - o->mask + o->root, n), 0, o->work,
                         (size_t)idist__subtree(v, n) * o->nbytes);
        IDIST__CO_AWAIT(o, !o->rx);
    } else {
        for (i = 0; i < n; i++)
            idist__copy(o->work + (size_t)i * o->nbytes,
                        o->in + (size_t)idist__wrap(i + o->root, n) * o->nbytes, o->nbytes);
    }

    for (o->mask /= 2; o->mask; o->mask /= 2)
        if (v + o->mask < n)
            idist__send_step(t, idist__wrap(v + o->mask + o->root, n), 0,
                             o->work + (size_t)o->mask * o->nbytes,
                             (size_t)idist__subtree(v + o->mask, n) * o->nbytes);
    IDIST__CO_AWAIT(o, !o->nsends);
    idist__copy(o->out, o->work, o->nbytes);
    idist__op_done(t);
    IDIST__CO_END(o)
}

// Block i of work is for the rank i further on. In round k all blocks whose number has bit k travel
// 2^k ranks; a block arrives after the rounds of its bits. Then block i came from the rank i before
// us. work: n blocks, a pack of blocks to send, one that comes.
static void idist__all_to_all_bruck(idist__task *t) {
    idist__op *o = idist__op_of(t);
    int n = o->n, r = o->r, i;
    char *pack = o->work + (size_t)n * o->nbytes, *came = pack + (size_t)n * o->nbytes;

    IDIST__CO_BEGIN(o)
    for (i = 0; i < n; i++)
        idist__copy(o->work + (size_t)i * o->nbytes,
                    o->in + (size_t)idist__wrap(r + i, n) * o->nbytes, o->nbytes);

    for (o->mask = 1; o->mask < n; o->mask *= 2) {
        for (i = 0, o->k = 0; i < n; i++)
            if (i & o->mask)
                idist__copy(pack + o->k++ * o->nbytes, o->work + (size_t)i * o->nbytes, o->nbytes);
        idist__recv_step(t, 0, idist__wrap(r - o->mask, n), (uint32_t)o->mask, came,
                         o->k * o->nbytes);
        idist__send_step(t, idist__wrap(r + o->mask, n), (uint32_t)o->mask, pack, o->k * o->nbytes);
        IDIST__CO_AWAIT(o, !o->rx && !o->nsends);
        for (i = 0, o->k = 0; i < n; i++)
            if (i & o->mask)
                idist__copy(o->work + (size_t)i * o->nbytes, came + o->k++ * o->nbytes, o->nbytes);
    }

    for (i = 0; i < n; i++)
        idist__copy(o->out + (size_t)idist__wrap(r - i, n) * o->nbytes,
                    o->work + (size_t)i * o->nbytes, o->nbytes);
    idist__op_done(t);
    IDIST__CO_END(o)
}

// Hillis and Steele: after round k acc covers the 2^(k+1) ranks up to ours. exscan hands the
// finished prefix to the next rank. work: acc, then room for one message.
static void idist__scan_doubling(idist__task *t) {
    idist__op *o = idist__op_of(t);
    int n = o->n, r = o->r;
    char *acc = o->work, *came = o->work + o->nbytes;

    IDIST__CO_BEGIN(o)
    idist__copy(acc, o->in, o->nbytes);

    for (o->mask = 1; o->mask < n; o->mask *= 2) {
        if (r >= o->mask) idist__recv_step(t, 0, r - o->mask, (uint32_t)o->mask, came, o->nbytes);
        if (r + o->mask < n) idist__send_step(t, r + o->mask, (uint32_t)o->mask, acc, o->nbytes);
        IDIST__CO_AWAIT(o, !o->rx && !o->nsends);
        if (r >= o->mask) idist__op_reduce(o, acc, came, acc, o->count, t->call.dtype);
    }

    if (t->call.kind == IDIST__SCAN) {
        idist__copy(o->out, acc, o->nbytes);
    } else {
        if (r) idist__recv_step(t, 0, r - 1, 1u << 30, o->out, o->nbytes);
        if (r + 1 < n) idist__send_step(t, r + 1, 1u << 30, acc, o->nbytes);
    }

    IDIST__CO_AWAIT(o, !o->rx && !o->nsends);
    idist__op_done(t);
    IDIST__CO_END(o)
}

//------------------------------------------------------------------------------
// [ring:choose]  which algorithm, with which scratch
// uses mem base:type reduce world core:call self op algo
//------------------------------------------------------------------------------

// The end of a reduction: average, and back to narrow floats. o->out holds `count` elements on the
// ranks that get a result.
static void idist__reduction_finish(idist__task *t) {
    idist__op *o = idist__op_of(t);
    const idist__call *c = &t->call;
    idist_dtype dtype = c->dtype;
    bool narrow = idist__type_is_narrow(dtype) && !(o->user && o->user->fn);

    if ((c->kind == IDIST__REDUCE && o->r != o->root) || (c->kind == IDIST__EXSCAN && o->r == 0))
        return;
    if (!o->user) idist__reduce_finish(o->out, o->count, narrow ? IDIST_F32 : dtype, c->op, o->n);
    if (narrow) idist__type_narrow(c->recv, (const float *)(const void *)o->out, o->count, dtype);
}

// Where the large algorithm begins to win, in bytes of one rank's contribution. Measured with
// idist_perf over unix sockets and loopback TCP at 2 to 8 ranks.
static size_t idist__switch_bytes(idist__kind kind) {
    switch (kind) {
    case IDIST__ALL_REDUCE: return (size_t)64 * 1024;
    case IDIST__BROADCAST:
    case IDIST__REDUCE: return (size_t)256 * 1024;
    case IDIST__SCAN:
    case IDIST__EXSCAN: return (size_t)128 * 1024;
    case IDIST__ALL_GATHER:
    case IDIST__REDUCE_SCATTER: return (size_t)16 * 1024;
    default:
        return (size_t)2 * 1024; // gather, scatter, all_to_all: trees carry blocks several times
    }
}

static int idist__choose(const idist__task *t) {
    const idist__op *o = idist__op_of(t);
    idist__kind kind = t->call.kind;
    int forced = t->group->w->cfg.algorithm;
    bool commutes = !o->user || o->user->commutative;

    if (kind == IDIST__BARRIER) return 1;
    if (idist__kind_is_v(kind)) return 2;
    if (!o->count) return 1;
    // Chains and rings start at different ranks for different blocks, so they need an op that
    // commutes; a scan keeps the order.
    if (!commutes && kind != IDIST__SCAN && kind != IDIST__EXSCAN) return 1;
    if (forced == 1 || forced == 2) return forced;

    return o->nbytes <= idist__switch_bytes(kind) ? 1 : 2;
}

// Scratch in bytes: what the algorithm itself works in.
static size_t idist__work_nbytes(const idist__task *t) {
    const idist__op *o = idist__op_of(t);
    size_t n = (size_t)o->n, b = o->nbytes;
    bool small = o->algorithm == 1;

    switch (t->call.kind) {
    case IDIST__ALL_REDUCE: return small ? b : 0;
    case IDIST__REDUCE: return small ? 2 * b : o->v ? b : 0;
    case IDIST__SCAN: return small ? 2 * b : 0;
    case IDIST__EXSCAN: return small ? 2 * b : b;
    case IDIST__REDUCE_SCATTER: return small ? 2 * n * b : n * b;
    case IDIST__ALL_GATHER: return small ? n * b : 0;
    case IDIST__GATHER:
    case IDIST__SCATTER: return small ? (size_t)idist__subtree(o->v, o->n) * b : 0;
    case IDIST__ALL_TO_ALL: return small ? 3 * n * b : t->call.send == t->call.recv ? n * b : 0;
    default: return 0;
    }
}

static void idist__op_choose_run(idist__task *t) {
    idist__op *o = idist__op_of(t);
    bool small = o->algorithm == 1;

    switch (t->call.kind) {
    case IDIST__BARRIER: o->run = idist__barrier_dissemination; break;
    case IDIST__BROADCAST:
        o->run = idist__broadcast_tree;
        if (!small) idist__broadcast_chain(o);
        break;
    case IDIST__REDUCE:
        o->run = idist__reduce_tree;
        if (!small) idist__reduce_chain(o);
        break;
    case IDIST__ALL_REDUCE:
        o->run = idist__doubling;
        if (!small) idist__all_reduce_ring(o);
        break;
    case IDIST__REDUCE_SCATTER:
        o->run = idist__doubling;
        if (!small) idist__reduce_scatter_ring(o);
        break;
    case IDIST__SCAN:
    case IDIST__EXSCAN:
        o->run = idist__scan_doubling;
        if (!small) idist__scan_chain(t);
        break;
    case IDIST__ALL_GATHER:
    case IDIST__ALL_GATHERV:
        o->run = idist__all_gather_bruck;
        if (!small) idist__all_gather_ring(t);
        break;
    case IDIST__GATHER:
        o->run = idist__gather_tree;
        if (!small) idist__direct_begin(t);
        break;
    case IDIST__SCATTER:
        o->run = idist__scatter_tree;
        if (!small) idist__direct_begin(t);
        break;
    case IDIST__ALL_TO_ALL:
        o->run = idist__all_to_all_bruck;
        if (small) break;

        if (t->call.send == t->call.recv &&
            o->nbytes) { // in place: the pairs would overwrite each other
            idist__copy(o->work, o->in, (size_t)o->n * o->nbytes);
            o->in = o->work;
        }

        idist__direct_begin(t);
        break;
    default: idist__direct_begin(t); break;
    }
}

static size_t idist__align(size_t nbytes) { return (nbytes + 63) & ~(size_t)63; }

// Sets a collective up: what it works on, in which type, by which algorithm. False when memory is
// short.
static bool idist__op_begin(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__call *c = &t->call;
    idist__world *w = t->group->w;
    bool reduces = idist__kind_reduces(c->kind), narrow, scaled;
    size_t nin, nwork, nslots, nout;

    o->n = t->group->size;
    o->r = t->group->rank;
    o->root = c->root;

    if ((int)c->op >= IDIST_OP_USER) {
        o->user_op = *idist__call_user_op(t->group, c);
        o->user = &o->user_op;
    }

    narrow = reduces && idist__type_is_narrow(c->dtype) && !(o->user && o->user->fn);
    scaled = reduces && o->user && !o->user->fn;
    o->size = narrow ? sizeof(float) : idist_dtype_size(c->dtype);
    o->count = c->count;
    o->nbytes = o->count * o->size;
    o->in = idist__op_buffer(c->send);
    o->out = idist__op_buffer(c->recv);
    for (o->p2 = 1; o->p2 * 2 <= o->n; o->p2 *= 2) continue;
    o->v = idist__has_root(c->kind) ? idist__wrap(o->r - o->root, o->n) : o->r;
    if (c->kind == IDIST__REDUCE && o->user && !o->user->commutative) o->v = o->r;
    if (reduces && !(o->user && o->user->fn))
        o->reduce = idist__reduce_table[(unsigned)c->dtype]
                                       [o->user ? (unsigned)IDIST_SUM : (unsigned)c->op];
    o->algorithm = idist__choose(t);
    nin = narrow || scaled
              ? idist__align((c->kind == IDIST__REDUCE_SCATTER ? (size_t)o->n : 1) * o->nbytes)
              : 0;
    nout = narrow ? idist__align(o->nbytes) : 0;
    nwork = idist__align(idist__work_nbytes(t));
    nslots = reduces && o->algorithm == 2
                 ? IDIST__SLOTS * (o->nbytes < IDIST__CHUNK_BYTES ? idist__align(o->nbytes)
                                                                  : IDIST__CHUNK_BYTES)
                 : 0;
    if (nin + nout + nwork + nslots) {
        o->memory = (char *)idist__mem_raw(&w->cfg.mem, nin + nout + nwork + nslots);
        if (!o->memory) return false;
    }

    o->work = o->memory ? o->memory + nin + nout : idist__op_buffer(NULL);
    if (nslots) o->slots = o->work + nwork;

    if (nin) {
        size_t count = o->count * (c->kind == IDIST__REDUCE_SCATTER ? (size_t)o->n : 1);
        if (narrow) idist__type_widen((float *)(void *)o->memory, o->in, count, c->dtype);
        else idist__copy(o->memory, o->in, count * o->size);
        o->in = o->memory;
        if (scaled)
            idist__reduce_scale(o->memory, count, narrow ? IDIST_F32 : c->dtype, o->user->factor);
    }

    if (narrow && o->memory) o->out = o->memory + nin;
    if (reduces) o->finish = idist__reduction_finish;

    return true;
}

//------------------------------------------------------------------------------
// [ring:host]  a group over several hosts: inside each host first, then between one rank of each
// uses mem base:type reduce hash world self msg:types op link share engine
//
// near: the members on this host, who share memory; leads: the first member on each host.
//
//   all_reduce       near: reduce to the lead        leads: all_reduce               near:
//   broadcast from the lead reduce           near: reduce to the lead        leads: reduce to the
//   root's     near: the lead sends it to the root reduce_scatter   near: reduce to the lead leads:
//   reduce, block by block   near: scatter from the lead all_gather       near: gather on the lead
//   leads: all_gatherv              near: broadcast from the lead broadcast        near, on the
//   root's host        leads: broadcast                near, on the other hosts barrier near leads
//   near
//
// Each step is a call of its own on one of these groups, started by the call that it is a part of;
// calls take their steps one after the other, so that the steps have the same order on all ranks.
// The network carries the data once per host. Narrow floats would be rounded twice that way, an op
// that does not commute needs the order of the ranks, and blocks in the order of the ranks must be
// in the order of the hosts as well; all else goes by messages among all.
//------------------------------------------------------------------------------

enum { IDIST__BY_HOST = 5 }; // algorithm

typedef struct idist__host_step { // a call on near or leads
    idist_group *g;
    idist__kind kind;
    const void *send;
    void *recv;
    size_t count;
    const size_t *counts, *displs; // of an all_gatherv
    int root;
    bool divide; // what was received, after it, for AVG
} idist__host_step;

static bool idist__host_serves(const idist_group *g, const idist__call *c) {
    const idist__ring_group *rg = idist__ring_group_of(g);

    if (!rg->nhosts || g->w->cfg.algorithm) return false;
    if (c->kind == IDIST__BARRIER || c->kind == IDIST__BROADCAST) return true;
    if (c->kind == IDIST__ALL_GATHER) return rg->in_order;
    if (c->kind != IDIST__ALL_REDUCE && c->kind != IDIST__REDUCE &&
        !(c->kind == IDIST__REDUCE_SCATTER && rg->in_order))
        return false;
    if (idist__type_is_narrow(c->dtype)) return false;

    return (int)c->op < IDIST_OP_USER || idist__call_user_op(g, c)->commutative;
}

static uint64_t idist__host_of(const idist_group *g, int rank) {
    return g->w->nodes[g->ranks[rank]].host;
}

// ---- the plan of a call ----

static idist__host_step *idist__host_add(idist__op *o, idist_group *g, idist__kind kind,
                                         const void *send, void *recv, size_t count, int root) {
    idist__host_step *step = (idist__host_step *)(void *)o->memory + o->k++;

    step->g = g;
    step->kind = kind;
    step->send = send;
    step->recv = recv;
    step->count = count;
    step->root = root;

    return step;
}

// The first step of reductions: what this host contributes, on its lead.
static void idist__host_reduce_near(idist__task *t, char *sum, size_t count) {
    idist__op *o = idist__op_of(t);
    idist_group *near = idist__ring_group_of(t->group)->near;

    if (near) {
        idist__host_add(o, near, IDIST__REDUCE, o->in, sum, count, 0);
    } else {
        idist__copy(sum, o->in, count * o->size);
        if (o->user && !o->user->fn)
            idist__reduce_scale(sum, count, t->call.dtype, o->user->factor);
    }
}

// lead_root, near_root: the root's host among the leads; the root among this host's members, -1
// when it is on another.
static void idist__host_plan_reduce(idist__task *t, char *memory, int lead_root, int near_root) {
    idist__op *o = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    char *sum = o->r == o->root ? o->out : memory;

    idist__host_reduce_near(t, sum, o->count);
    if (rg->leads)
        idist__host_add(o, rg->leads, IDIST__REDUCE, sum, sum, o->count, lead_root)->divide =
            near_root == 0;
    if (near_root <= 0) return;
    if (rg->leads) idist__host_add(o, rg->near, IDIST__SEND, sum, NULL, o->count, near_root);
    else if (o->r == o->root)
        idist__host_add(o, rg->near, IDIST__RECV, NULL, o->out, o->count, 0)->divide = true;
}

// counts, displs: of each host's blocks, in elements.
static void idist__host_plan_reduce_scatter(idist__task *t, char *sum, const size_t *counts,
                                            const size_t *displs) {
    idist__op *o = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    size_t own = (size_t)o->r * o->nbytes; // of a lead: where its host's blocks begin
    int h;

    idist__host_reduce_near(t, sum, o->count * (size_t)o->n);

    for (h = 0; rg->leads && h < rg->nhosts; h++) {
        char *block = sum + displs[h] * o->size,
             *to = h == rg->leads->rank && !rg->near ? o->out : block;
        idist__host_add(o, rg->leads, IDIST__REDUCE, block, to, counts[h], h)->divide =
            to == o->out;
    }

    if (rg->near)
        idist__host_add(o, rg->near, IDIST__SCATTER, sum + own, o->out, o->count, 0)->divide = true;
}

static void idist__host_plan_all_gather(idist__task *t, const size_t *counts,
                                        const size_t *displs) {
    idist__op *o = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    char *own = o->out + (size_t)o->r * o->nbytes;

    if (rg->near) idist__host_add(o, rg->near, IDIST__GATHER, o->in, own, o->count, 0);
    else if (o->in != own) idist__copy(own, o->in, o->nbytes);

    if (rg->leads) {
        idist__host_step *step = idist__host_add(o, rg->leads, IDIST__ALL_GATHERV, own, o->out,
                                                 counts[rg->leads->rank], -1);
        step->counts = counts;
        step->displs = displs;
    }

    if (rg->near)
        idist__host_add(o, rg->near, IDIST__BROADCAST, NULL, o->out, o->count * (size_t)o->n, 0);
}

// Fills o->memory: steps | counts and displs of the hosts | room for what a lead collects. NULL
// without memory.
static void idist__host_plan(idist__task *t) {
    idist__op *o = idist__op_of(t);
    const idist_group *g = t->group;
    const idist__ring_group *rg = idist__ring_group_of(g);
    idist__kind kind = t->call.kind;
    size_t nhosts = (size_t)rg->nhosts,
           table = (3 + nhosts) * sizeof(idist__host_step) + 2 * nhosts * sizeof(size_t);
    size_t collected = kind == IDIST__REDUCE           ? o->nbytes
                       : kind == IDIST__REDUCE_SCATTER ? o->nbytes * (size_t)o->n
                                                       : 0;
    int i, h = -1, lead_root = 0, near_root = -1;
    char *room;
    size_t *counts, *displs;

    o->memory = (char *)idist__mem_raw(&g->w->cfg.mem, table + (rg->leads ? collected : 0));
    if (!o->memory) return;
    memset(o->memory, 0, table);
    room = o->memory + table;
    displs = (size_t *)(void *)room - nhosts;
    counts = displs - nhosts;

    for (i = 0; i < o->n && rg->in_order; i++) {
        if (i == 0 || idist__host_of(g, i) != idist__host_of(g, i - 1))
            displs[++h] = (size_t)i * o->count;
        counts[h] += o->count;
    }

    for (i = 0; rg->leads && o->root >= 0 && i < rg->nhosts; i++)
        if (idist__host_of(rg->leads, i) == idist__host_of(g, o->root)) lead_root = i;
    if (o->root == o->r) near_root = 0;
    for (i = 0; rg->near && o->root >= 0 && i < rg->near->size; i++)
        if (rg->near->ranks[i] == g->ranks[o->root]) near_root = i;

    switch (kind) {
    case IDIST__ALL_REDUCE:
        idist__host_reduce_near(t, o->out, o->count);
        if (rg->leads)
            idist__host_add(o, rg->leads, kind, o->out, o->out, o->count, -1)->divide = true;
        if (rg->near) idist__host_add(o, rg->near, IDIST__BROADCAST, NULL, o->out, o->count, 0);
        break;
    case IDIST__REDUCE: idist__host_plan_reduce(t, room, lead_root, near_root); break;
    case IDIST__REDUCE_SCATTER: idist__host_plan_reduce_scatter(t, room, counts, displs); break;
    case IDIST__ALL_GATHER: idist__host_plan_all_gather(t, counts, displs); break;
    case IDIST__BROADCAST:
        if (rg->near && near_root >= 0)
            idist__host_add(o, rg->near, kind, NULL, o->out, o->count, near_root);
        if (rg->leads) idist__host_add(o, rg->leads, kind, NULL, o->out, o->count, lead_root);
        if (rg->near && near_root < 0)
            idist__host_add(o, rg->near, kind, NULL, o->out, o->count, 0);
        break;
    default: // barrier
        if (rg->near) idist__host_add(o, rg->near, kind, NULL, NULL, 0, -1);
        if (rg->leads) idist__host_add(o, rg->leads, kind, NULL, NULL, 0, -1);
        if (rg->near) idist__host_add(o, rg->near, kind, NULL, NULL, 0, -1);
    }
}

// ---- carrying it out ----

// Begins a step. The task is ours until idist__host_through has seen it end.
static void idist__host_begin(idist__task *t, const idist__host_step *step) {
    idist__op *o = idist__op_of(t);
    bool leads = step->g == idist__ring_group_of(t->group)->leads, scaled = o->user && !o->user->fn;
    idist__ring *ring = idist__ring_of(t->group->w);
    idist__task *part = step->g->status == IDIST_OK ? idist__task_new(step->g) : NULL;

    if (!part && step->g->status != IDIST_OK)
        idist__ring_fail(ring, t->group, step->g->status, step->g->cause);
    else if (!part)
        idist__ring_fail(ring, t->group, IDIST_ERR_NO_MEMORY, "a rank is out of memory");
    if (!part) return;
    part->call = t->call;
    part->call.kind = step->kind;
    part->call.send = step->send;
    part->call.recv = step->recv;
    part->call.count = step->count;
    part->call.recvcounts = step->counts;
    part->call.recvdispls = step->displs;
    part->call.root = step->root;
    if (t->call.op == IDIST_AVG || (scaled && leads)) part->call.op = IDIST_SUM;
    part->call.user = o->user;
    part->whole = idist__task_print(t, IDIST__BY_HOST);
    part->whole_past = o->past;
    part->timeout_ms = -1; // the whole call has a deadline, and says where it waits
    part->announced = part->warned = true;
    o->step = part;
    idist__task_start(part);
}

static bool idist__host_through(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__task *part = o->step;
    bool ok;

    if (!part || !part->done) return false;
    ok = part->status == IDIST_OK;
    if (!ok)
        idist__ring_fail(idist__ring_of(t->group->w), t->group, part->status, part->group->cause);
    idist__task_free(part);
    o->step = NULL;

    return ok;
}

static void idist__host_remove(idist__task *t) {
    idist__ring_group *rg = idist__ring_group_of(t->group);
    idist__task **at, *last = NULL;
    for (at = &rg->head; *at && *at != t; at = &idist__op_of(*at)->after) last = *at;
    if (*at) *at = idist__op_of(t)->after;
    if (rg->last == t) rg->last = last;
}

static void idist__host_run(idist__task *t) {
    idist__op *o = idist__op_of(t);
    const idist__host_step *steps;

    if (!o->memory) idist__host_plan(t);

    if (!o->memory) {
        idist__ring_fail(idist__ring_of(t->group->w), t->group, IDIST_ERR_NO_MEMORY,
                         "a rank is out of memory");
        return;
    }

    steps = (const idist__host_step *)(const void *)o->memory;
    IDIST__CO_BEGIN(o)

    for (o->i = 0; o->i < o->k; o->i++) {
        idist__host_begin(t, &steps[o->i]);
        IDIST__CO_AWAIT(o, idist__host_through(t));
        if (steps[o->i].divide && t->call.op == IDIST_AVG)
            idist__reduce_divide(steps[o->i].recv, steps[o->i].count, t->call.dtype, o->n);
    }

    idist__host_remove(t);
    idist__op_done(t);
    IDIST__CO_END(o)
}

static void idist__host_start(idist__task *t) {
    idist__ring_group *rg = idist__ring_group_of(t->group);

    idist__op_of(t)->run = idist__host_run;
    if (rg->last) idist__op_of(rg->last)->after = t;
    else rg->head = t;
    rg->last = t;
    if (rg->head == t) idist__op_run(t);
}

// Moves the first call of each group on, when its step is through, and then the next.
static void idist__host_progress(idist__ring *ring) {
    const idist_group *g;

    for (g = &ring->w->group; g; g = g->next) {
        idist__ring_group *rg = g->rank >= 0 && g->impl ? idist__ring_group_of(g) : NULL;

        while (rg && rg->head && !ring->failed) {
            const idist__task *t = rg->head, *step = idist__op_of(t)->step;
            if ((step && !step->done) || idist__op_of(t)->running) break;
            idist__op_run(rg->head);
            if (rg->head == t && (!idist__op_of(t)->step || !idist__op_of(t)->step->done)) break;
        }
    }
}

static idist_status idist__ring_group_open(idist_group *g);

static idist_status idist__host_group(idist_group *whole, uint64_t salt, const int *ranks, int n,
                                      idist_group **out) {
    idist__world *w = whole->w;
    idist_group *g = idist__group_new(w, n);
    idist_status s;

    if (!g) return IDIST_ERR_NO_MEMORY;
    idist__group_set(g, idist__mix(whole->ctx, salt), ranks, n);
    g->inner = true;
    s = idist__ring_group_open(g);
    if (s != IDIST_OK) {
        g->rank = -1;
        idist__group_free(g);
        return s;
    }

    idist__ring_group_of(g)->whole = whole;
    g->next = w->group.next;
    w->group.next = g;
    *out = g;

    return IDIST_OK;
}

// What a group can use: places in memory that all members share, or near and leads, where there are
// several hosts and one of them has several members. offers: the members' places; NULL: the first
// of each. So no word is needed for the world: everybody knows the table of hosts, and everybody's
// first place is free.
static idist_status idist__host_open(idist_group *g, const uint64_t *offers) {
    idist__ring_group *rg = idist__ring_group_of(g);
    const idist_allocator *mem = &g->w->cfg.mem;
    size_t n = (size_t)g->size;
    uint64_t *places = (uint64_t *)idist__mem_alloc(mem, n * (sizeof *places + 2 * sizeof(int)));
    int *ranks = (int *)(void *)(places + n), *leads = ranks + n;
    int i, k, nnear = 0, nleads = 0, changes = 1;
    idist_status s = places ? IDIST_OK : IDIST_ERR_NO_MEMORY;

    for (i = 0; places && i < g->size; i++) {
        for (k = 0; k < i && idist__host_of(g, k) != idist__host_of(g, i); k++) continue;
        if (k == i) leads[nleads++] = g->ranks[i];
        if (i && idist__host_of(g, i) != idist__host_of(g, i - 1)) changes++;
        if (idist__host_of(g, i) != idist__host_of(g, g->rank)) continue;
        ranks[nnear] = g->ranks[i];
        places[nnear++] = offers ? offers[i] : 1;
    }

    rg->met = true;
    if (s == IDIST_OK && nleads == 1) s = idist__share_meet(g, places);

    if (s == IDIST_OK && nleads > 1 && nleads < g->size) {
        rg->nhosts = nleads;
        rg->in_order = changes == nleads;
        if (nnear > 1) s = idist__host_group(g, 1, ranks, nnear, &rg->near);
        if (s == IDIST_OK && rg->near) s = idist__share_meet(rg->near, places);
        if (s == IDIST_OK && ranks[0] == g->w->group.rank)
            s = idist__host_group(g, 2, leads, nleads, &rg->leads);
    }

    idist__mem_free(mem, places);

    return s;
}

//------------------------------------------------------------------------------
// [ring:engine]  frames arrive, tasks start and end, waits are announced
// uses os err mem base:type world self segment msg:types op link match verb
// uses share choose host
//------------------------------------------------------------------------------

static void idist__link_lost(idist__ring *ring, int peer, const char *how) {
    idist__link *l = &ring->links[peer];

    if (!l->open) return;
    l->open = false;
    l->transport->close(l->port);
    if (!l->transport->polled) ring->nstreams--;
    if (!l->bye) idist__world_lost(ring->w, peer, how);
}

// A frame of another rank failed a group. The group may not exist here yet: then the frame waits
// for it.
static void idist__ring_aborted(idist__ring *ring, idist__link *l) {
    idist_group *g = idist__world_find_group(ring->w, l->in.ctx);
    int status = (int)(int64_t)l->in.aux;

    l->text[l->in.nbytes] = 0;
    if (status >= 0 || status < IDIST_ERR_DEVICE) status = IDIST_ERR_INTERNAL;

    if (g) {
        idist__group_fail(g, (idist_status)status, l->text);
    } else if (!idist__ring_has_closed(ring, l->in.ctx)) {
        idist__message *m = idist__message_new(ring, l, &l->in, sizeof l->text);
        if (!m) return;
        m->frame.aux = (uint64_t)(int64_t)status;
        memcpy(m->data, l->text, sizeof l->text);
    }
}

static bool idist__verb_in(const idist__verbs *list, const idist__task *t) {
    const idist__verb *v;
    for (v = list->first; v; v = v->next)
        if (v->task == t) return true;
    return false;
}

// Whether a receive has found no message yet.
static bool idist__recv_unmatched(const idist__task *t) {
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    const idist__verb *v = idist__op_of(t)->verb;
    return v && (v->list == &rg->recvs || v->list == &rg->wild);
}

// ---- two ranks that wait for each other, in different calls ----
//
// Calls on different groups, or a receive against a collective, exchange nothing by which they
// could be compared. They are found by WAITS, which a rank sends when it has waited for a while. It
// is certain that neither will ever go on when all of this holds, on both sides:
//   - the rank has one thread and one call under way, which blocks without a time-out of its own:
//   it can do nothing else;
//   - that call lacks something that only the other rank can begin to send;
//   - and the other rank has not begun it: nothing of the kind is on its way.
// Any doubt (another thread, a request, a group we no longer know) means: say nothing, the deadline
// will.

// Whether t lacks something that the rank of this link has to begin.
static bool idist__ring_needs(const idist__link *l, const idist__task *t, int group_rank) {
    if (t->call.kind == IDIST__RECV) return t->call.root == group_rank && idist__recv_unmatched(t);

    if (t->call.kind != IDIST__SEND &&
        idist__op_of(t)->algorithm == IDIST__BY_HOST) { // then its part does
        const idist__task *part = idist__op_of(t)->step;
        int rank = part && !part->done
                       ? idist__ring_group_of(part->group)->rank_of[t->group->ranks[group_rank]]
                       : -1;
        return rank >= 0 && idist__ring_needs(l, part, rank);
    }

    if (t->call.kind != IDIST__SEND && idist__op_of(t)->algorithm >= IDIST__FLAT)
        return idist__share_needs(t, group_rank);

    return idist__verb_in(&l->posted, t) || idist__verb_in(&l->waiting, t);
}

// Whether what the other rank waits for may still come from us.
static bool idist__ring_answered(idist__ring *ring, idist__link *l, const idist__frame *waits) {
    idist_group *g = idist__world_find_group(ring->w, waits->ctx);
    idist__message *m;

    if (waits->print.kind == IDIST__RECV)
        return waits->aux != l->p2p_sent; // aux: how many messages it had got from us
    if (waits->print.kind != IDIST__SEND)
        return !g || (int32_t)(waits->print.seq - g->seq) <= 0; // we are, or were, in that call
    for (m = l->early; m; m = m->next) // its message lies here, and nobody wants it
        if (m->frame.type == IDIST__RTS && m->frame.id == waits->id) return false;

    return true;
}

static void idist__ring_find_deadlock(idist__ring *ring, int peer) {
    idist__link *l = &ring->links[peer];
    const idist__frame *waits = &l->peer_waits;
    idist__task *ours;
    idist_group *theirs;
    char cause[400];
    int rank;

    if (waits->type != IDIST__WAITS || waits->flags != (IDIST__NEEDS_YOU | IDIST__ONLY_CALL))
        return;
    ours = idist__world_only_call(ring->w);
    if (!ours || !ours->announced) return;
    rank = idist__ring_group_of(ours->group)->rank_of[peer];
    if (rank < 0 || (ours->group->ctx == waits->ctx && ours->seq == waits->print.seq && ours->seq))
        return;
    if (!idist__ring_needs(l, ours, rank) || idist__ring_answered(ring, l, waits)) return;
    theirs = idist__world_find_group(ring->w, waits->ctx);
    idist__deadlock_text(ours, peer, &waits->print, ours->group->ctx == waits->ctx, cause,
                         sizeof cause);
    idist__ring_fail(ring, ours->group, IDIST_ERR_MISMATCH, cause);
    idist__ring_settle(ring);
    if (theirs) idist__ring_fail(ring, theirs, IDIST_ERR_MISMATCH, cause);
}

// The other rank waits in a call. It learns that we are there, or else which call of the group was
// our last, since we may be what it waits for; if we are in a different one, both learn that.
static void idist__ring_waits(idist__ring *ring, idist__link *l, int peer) {
    idist_group *g = idist__world_find_group(ring->w, l->in.ctx);
    idist__frame f;

    l->peer_waits = l->in;

    if (l->in.print.kind != IDIST__SEND && l->in.print.kind != IDIST__RECV && g &&
        g->status == IDIST_OK) {
        if (!idist__ring_agree(ring, g, peer, &l->in)) return;
        f = l->in;
        f.type = IDIST__HERE;
        if ((int32_t)(l->in.print.seq - g->seq) > 0)
            f.print = idist__ring_group_of(g)->history[g->seq % IDIST__HISTORY];
        idist__link_control(ring, l, &f, NULL);
    }

    idist__ring_find_deadlock(ring, peer);
}

// A message begins: all of it (EAGER), or the announcement (RTS), after which nothing follows. Sets
// where the payload goes. False when the frame is malformed.
static bool idist__link_begins(idist__ring *ring, idist__link *l, int peer) {
    idist_group *g = idist__world_find_group(ring->w, l->in.ctx);
    bool p2p = l->in.print.kind == IDIST__SEND,
         gone = !g && idist__ring_has_closed(ring, l->in.ctx);

    if (p2p &&
        (l->in.print.check > SIZE_MAX / 16 ||
         l->in.nbytes != l->in.print.check * idist_dtype_size((idist_dtype)l->in.print.dtype)))
        return false;
    if (p2p) l->p2p_got++;
    l->peer_waits.type = 0;
    l->in_verb = idist__match_frame(ring, l, peer, &l->in);

    if (l->in.type == IDIST__RTS) {
        idist__verb *v = l->in_verb;
        l->in_verb = NULL;
        if (v) idist__link_clear_to_send(ring, l, peer, v, &l->in);
        else if (!gone && !idist__message_new(ring, l, &l->in, 0))
            idist__ring_fail(ring, g ? g : &ring->w->group, IDIST_ERR_NO_MEMORY,
                             "a rank is out of memory");
        l->left = 0;
        return true;
    }

    if (l->in_verb) {
        l->in_verb->frame = l->in;
        l->target = l->in_verb->data;
    } else if (!gone && (!g || g->status == IDIST_OK)) {
        l->in_message = idist__message_new(ring, l, &l->in, (size_t)l->in.nbytes);
        l->target = l->in_message ? l->in_message->data : NULL;
        if (!l->in_message)
            idist__ring_fail(ring, g ? g : &ring->w->group, IDIST_ERR_NO_MEMORY,
                             "a rank is out of memory");
    }

    return true;
}

// Takes out the send that the frame answers; NULL: it was cancelled meanwhile.
static idist__verb *idist__link_answered(idist__ring *ring, const idist__link *l) {
    idist__verb *v = idist__verb_named(ring, &l->waiting, l->in.id);
    if (v) idist__verb_take(v);
    return v;
}

static void idist__link_cts(idist__ring *ring, idist__link *l) {
    idist__verb *v = idist__link_answered(ring, l);

    if (!v) return;
    v->frame.type = IDIST__DATA;
    v->frame.id = l->in.aux;
    v->piece = v->nbytes < IDIST__PIECE_BYTES ? v->nbytes : IDIST__PIECE_BYTES;
    v->frame.nbytes = v->piece;
    idist__link_push(l, v);
    idist__link_flush(ring, l);
}

static void idist__link_pulled(idist__ring *ring, const idist__link *l) {
    idist__verb *v = idist__link_answered(ring, l);
    if (v) idist__verb_done(ring, v);
}

static bool idist__link_data(idist__ring *ring, idist__link *l) {
    idist__verb *v = idist__verb_named(ring, &l->receiving, l->in.id);
    if (v && l->in.nbytes > v->nbytes - v->moved) return false;
    l->in_verb = v; // NULL: the receive was cancelled meanwhile
    l->target = v ? v->data + v->moved : NULL;
    return true;
}

// Whether the peer may send the frame that has arrived. It is authenticated but may be faulty. No
// frame from it can make this rank write out of bounds, or read a payload that its type does not
// carry. What came early is bounded by the eager window, and by IDIST__UNKNOWN_MOST messages for
// groups that do not exist here. Announcements (RTS) for groups that do are not bounded: an honest
// rank may have any number of sends under way.
static bool idist__link_allows(const idist__ring *ring, const idist__link *l, int peer) {
    const idist__frame *f = &l->in;
    const idist_group *g = idist__world_find_group(ring->w, f->ctx);
    bool of_group = f->type <= IDIST__RTS || (f->type >= IDIST__WAITS && f->type <= IDIST__LEFT);

    if (of_group && g && idist__ring_group_of(g)->rank_of[peer] < 0) return false;

    switch (f->type) {
    case IDIST__EAGER:
        if (f->nbytes > IDIST__EAGER_BYTES || f->nbytes + IDIST__FRAME_BYTES > l->their_window)
            return false;
        return true;
    case IDIST__RTS: return true;
    case IDIST__ABORT: return f->nbytes <= IDIST__TEXT_BYTES;
    case IDIST__DATA: return f->nbytes <= IDIST__PIECE_BYTES;
    case IDIST__CREDIT: return f->nbytes <= IDIST__WINDOW_BYTES - l->window;
    case IDIST__CTS:
    case IDIST__PULLED:
    case IDIST__WAITS:
    case IDIST__HERE:
    case IDIST__LEFT:
    case IDIST__BYE: return f->nbytes == 0;
    default: return false;
    }
}

// A frame's 64 bytes are here. False when they make no sense.
static bool idist__link_frame(idist__ring *ring, idist__link *l, int peer) {
    bool ok = true;

    l->in_verb = NULL;
    l->in_message = NULL;
    l->target = NULL;
    if (!idist__link_allows(ring, l, peer)) return false;

    l->left = (size_t)l->in.nbytes;

    switch (l->in.type) {
    case IDIST__EAGER:
        l->their_window -= (size_t)l->in.nbytes + IDIST__FRAME_BYTES;
        ok = idist__link_begins(ring, l, peer);
        break;
    case IDIST__RTS: ok = idist__link_begins(ring, l, peer); break;
    case IDIST__CTS: idist__link_cts(ring, l); break;
    case IDIST__DATA: ok = idist__link_data(ring, l); break;
    case IDIST__PULLED: idist__link_pulled(ring, l); break;
    case IDIST__CREDIT:
        l->window += (size_t)l->in.nbytes;
        l->left = 0;
        break;
    case IDIST__WAITS: idist__ring_waits(ring, l, peer); break;
    case IDIST__HERE: {
        idist_group *g = idist__world_find_group(ring->w, l->in.ctx);
        l->here_ns = idist__os_now_ns();
        if (g && g->status == IDIST_OK) idist__ring_agree(ring, g, peer, &l->in);
        break;
    }
    case IDIST__ABORT: l->target = l->text; break;
    case IDIST__LEFT: idist__share_left(ring, l->in.ctx); break;
    default: l->bye = true; break; // IDIST__BYE
    }

    return ok;
}

// A frame and its payload are complete.
static void idist__link_payload(idist__ring *ring, idist__link *l, int peer) {
    idist__verb *v = l->in_verb;
    idist__message *m = l->in_message;

    l->in_verb = NULL;
    l->in_message = NULL;

    if (l->in.type == IDIST__EAGER) {
        if (m) {
            m->moved = (size_t)l->in.nbytes;
            if (m->claim) idist__message_give(ring, l, peer, m, m->claim);
            return;
        }

        idist__link_consumed(ring, l, (size_t)l->in.nbytes);
        if (v) idist__verb_received(ring, v, peer);
    } else if (l->in.type == IDIST__DATA && v) {
        v->moved += (size_t)l->in.nbytes;
        if (v->moved < v->nbytes) return;
        idist__verb_take(v);
        idist__verb_received(ring, v, peer);
    } else if (l->in.type == IDIST__ABORT) {
        idist__ring_aborted(ring, l);
    }
}

// Takes what lies in the stage apart. False when it makes no sense.
static bool idist__link_parse(idist__ring *ring, idist__link *l, int peer) {
    while (l->open && l->at < l->end) {
        size_t have = l->end - l->at;

        if (l->in_moved < IDIST__FRAME_BYTES) {
            size_t k =
                IDIST__FRAME_BYTES - l->in_moved < have ? IDIST__FRAME_BYTES - l->in_moved : have;
            memcpy((char *)&l->in + l->in_moved, l->stage + l->at, k);
            l->in_moved += k;
            l->at += k;
            if (l->in_moved < IDIST__FRAME_BYTES) break;
            if (!idist__link_frame(ring, l, peer)) return false;
            idist__ring_settle(ring); // before a later frame ends the call that went wrong
        } else {
            size_t k = l->left < have ? l->left : have;

            if (l->target) {
                memcpy(l->target, l->stage + l->at, k);
                l->target += k;
            }

            l->left -= k;
            l->at += k;
        }

        if (l->in_moved == IDIST__FRAME_BYTES && !l->left) {
            l->in_moved = 0;
            idist__link_payload(ring, l, peer);
        }
    }

    if (l->at == l->end) l->at = l->end = 0;

    return true;
}

static void idist__link_read(idist__ring *ring, int peer);

// The stream of a rank ended. When one rank dies, others that heard of it may end as well, and
// their streams with them; those have told the reason before. So all others are read first, and
// then the ends are judged.
static void idist__link_ended(idist__ring *ring, int peer, int err) {
    int i;

    ring->links[peer].ended = true;
    ring->links[peer].ended_errno = err;
    if (ring->judging) return;
    ring->judging = true;
    for (i = 0; i < ring->w->group.size; i++)
        if (ring->links[i].open && !ring->links[i].ended) idist__link_read(ring, i);
    ring->judging = false;

    for (i = 0; i < ring->w->group.size; i++) {
        idist__link *l = &ring->links[i];
        char how[160];
        if (!l->open || !l->ended) continue;
        if (l->ended_errno)
            snprintf(how, sizeof how, "its connection broke: %s", strerror(l->ended_errno));
        else
            snprintf(how, sizeof how,
                     "its process ended, or closed the connection without idist_finalize");
        idist__link_lost(ring, i, how);
    }
}

// Reads what is there, up to a bound so that other links get their turn. Large payloads go straight
// to their place.
static void idist__link_read(idist__ring *ring, int peer) {
    idist__link *l = &ring->links[peer];
    int turns;

    for (turns = 0; turns < 16 && l->open && !l->ended; turns++) {
        bool direct = l->in_moved == IDIST__FRAME_BYTES && l->left >= 4096 && l->target;
        size_t room = direct ? l->left : IDIST__STAGE_BYTES;
        ptrdiff_t n = l->transport->read(l->port, direct ? l->target : l->stage, room);
        if (n == 0) return;

        if (n < 0) {
            idist__link_ended(ring, peer, errno);
            return;
        }

        if (direct) {
            l->target += n;
            l->left -= (size_t)n;
            if (l->left) continue;
            l->in_moved = 0;
            idist__link_payload(ring, l, peer);
        } else {
            l->at = 0;
            l->end = (size_t)n;

            if (!idist__link_parse(ring, l, peer)) {
                idist__link_lost(ring, peer, "it sent a malformed frame");
                return;
            }

            if ((size_t)n < room) return; // that was all, most likely
        }
    }
}

// Looks after all links that poll says something about.
static void idist__ring_poll(idist__ring *ring, int64_t until_ns, bool sleep) {
    idist__world *w = ring->w;
    // One thread may sleep over the first half of the table while another has a quick look with the
    // second.
    struct pollfd *polls = ring->polls + (sleep ? 0 : w->group.size + 1);
    int *ranks = ring->poll_ranks + (sleep ? 0 : w->group.size + 1);
    int i, n = 1;
    uint64_t count;

    polls[0].fd = ring->wake;
    polls[0].events = POLLIN;

    for (i = 0; i < w->group.size; i++) {
        idist__link *l = &ring->links[i];
        if (!l->open || l->transport->poll_fd(l->port) < 0) continue;
        polls[n].fd = l->transport->poll_fd(l->port);
        polls[n].events =
            (short)(POLLIN | (l->out && !l->write_dead && !l->transport->polled ? POLLOUT : 0));
        ranks[n++] = i;
    }

    if (sleep) pthread_mutex_unlock(&w->lock);
    i = poll(polls, (nfds_t)n, sleep ? idist__os_ms_until(until_ns) : 0);
    if (sleep) pthread_mutex_lock(&w->lock);
    if (i <= 0) return;
    if (sleep && polls[0].revents) // a quick look leaves it for the sleeper
        while (read(ring->wake, &count, sizeof count) < 0 && errno == EINTR) continue;

    for (i = 1; i < n; i++) {
        idist__link *l = &ring->links[ranks[i]];
        if (polls[i].revents & POLLOUT) idist__link_flush(ring, l);
        if (!l->open || !(polls[i].revents & ~POLLOUT)) continue;
        if (l->transport->polled) l->transport->polled(l->port);
        idist__link_read(ring, ranks[i]);
    }
}

static void idist__ring_move(idist__ring *ring) {
    bool few =
        ring->nstreams <= 4; // then asking each link is cheaper than asking poll which one to ask
    int i;

    for (i = 0; i < ring->w->group.size; i++) {
        idist__link *l = &ring->links[i];
        if (!l->open || !(few || l->transport->polled)) continue;
        if (l->out) idist__link_flush(ring, l);
        idist__link_read(ring, i);
    }

    if (!few) idist__ring_poll(ring, 0, false);
    if (ring->shm) idist__share_progress(ring);
    if (ring->w->nnodes > 1) idist__host_progress(ring);
}

static void idist__ring_progress(idist__world *w) {
    idist__ring_move(idist__ring_of(w));
    idist__ring_settle(idist__ring_of(w));
}

// Where all links go through memory we sleep on our bell, and look at the sockets, whose end is
// that of the other rank, every 10 ms, in a long wait every 30; otherwise in poll. Looks at
// everything once more after having said that we sleep.
//
// Nobody knocks at a bell that was rung already. A knock that arrives during that last look may be
// read by the look itself (it polls when there are many streams), so we sleep only while the bell
// is still set. Another thread that reads from the links while we sleep may take a knock away as
// well; it has to call `wake` afterwards.
static void idist__ring_sleep(idist__world *w, int64_t until_ns) {
    idist__ring *ring = idist__ring_of(w);
    idist__shm *m = ring->shm;
    uint32_t ended = w->nended;
    int64_t now = idist__os_now_ns();

    if (!m) {
        idist__ring_poll(ring, until_ns, true);
        idist__ring_settle(ring);
        return;
    }

    if (now - ring->polled_ns > IDIST__LOOK_NS) {
        ring->polled_ns = now;
        idist__ring_poll(ring, 0, false);
    }

    idist__shm_falls_asleep(m, ring->nstreams ? 2 : 1);
    idist__ring_move(ring);

    if (w->nended == ended && !ring->failed && !idist__shm_was_woken(m)) {
        if (ring->nstreams) {
            idist__ring_poll(ring, until_ns, true);
        } else {
            int64_t look_ns = now + IDIST__LOOK_NS + ring->drowsy_ns;
            pthread_mutex_unlock(&w->lock);
            idist__os_futex_wait(&idist__shm_bell(m, m->me)->asleep, 1,
                                 look_ns < until_ns ? look_ns : until_ns);
            pthread_mutex_lock(&w->lock);
            if (idist__os_now_ns() < look_ns) ring->drowsy_ns = 0;
            else if (ring->drowsy_ns < 2 * IDIST__LOOK_NS) ring->drowsy_ns += IDIST__MS;
        }
    }

    idist__shm_awake(m);
    idist__ring_settle(ring);
}

// Whether something that others must still get, or say, is under way.
static bool idist__ring_busy(idist__ring *ring, bool clean) {
    int i;

    for (i = 0; i < ring->w->group.size; i++) {
        idist__link *l = &ring->links[i];
        if (!l->open) continue;
        if (l->out && !l->write_dead) return true;
        if (clean && !l->bye && l->transport->lossy_close) return true;
    }

    return false;
}

// Until everything is out, or the moment is there.
static void idist__ring_drain(idist__ring *ring, bool clean, int64_t until_ns) {
    while (idist__ring_busy(ring, clean) && idist__os_ms_until(until_ns) != 0) {
        int64_t soon = idist__os_now_ns() + IDIST__MS; // nobody knocks for room in a pipe here
        idist__ring_poll(ring, soon < until_ns && ring->shm ? soon : until_ns, true);
        idist__ring_move(ring);
    }
}

static void idist__ring_flush(idist__world *w, int64_t until_ns) {
    idist__ring_drain(idist__ring_of(w), false, until_ns);
    idist__ring_settle(idist__ring_of(w));
}

static void idist__ring_wake(idist__world *w) {
    const idist__shm *m = idist__ring_of(w)->shm;
    uint64_t one = 1;

    if (m && __atomic_load_n(&idist__shm_bell(m, m->me)->asleep, __ATOMIC_RELAXED) == 1) {
        idist__shm_wake(m, m->me);
        return;
    }

    while (write(idist__ring_of(w)->wake, &one, sizeof one) < 0 && errno == EINTR) continue;
}

// Compares the new call with what others already said about the call of this number.
static void idist__ring_check_start(idist__ring *ring, idist__task *t) {
    idist_group *g = t->group;
    idist__ring_group *rg = idist__ring_group_of(g);
    const idist__print *ours = &rg->history[t->seq % IDIST__HISTORY];
    int i;

    for (i = 0; i < g->size; i++) {
        uint64_t key = idist__ring_key(g->ctx, g->ranks[i], false, t->seq);
        idist__hook *hook = ring->messages[key % IDIST__BUCKETS].first;
        const char *field = NULL;
        if (i == g->rank) continue;
        if (rg->seen[i].seq == t->seq && rg->seen[i].print.seq == t->seq)
            field = idist__print_difference(&rg->seen[i].print, ours);
        if (field) idist__ring_mismatch(ring, g, g->ranks[i], &rg->seen[i].print, ours, field);

        for (; hook && !ring->failed; hook = hook->next) {
            const idist__message *m = idist__hook_message(hook);
            if (m->peer == g->ranks[i] && m->frame.ctx == g->ctx && m->frame.print.seq == t->seq &&
                m->frame.print.kind != IDIST__SEND && m->frame.type <= IDIST__RTS)
                idist__ring_agree(ring, g, g->ranks[i], &m->frame);
        }
    }
}

static bool idist__ring_quick(idist_group *g, const idist__call *c) {
    return c->kind == IDIST__SEND   ? idist__send_quick(g, c)
           : c->kind == IDIST__RECV ? idist__recv_quick(g, c)
                                    : idist__share_quick(g, c);
}

static void idist__ring_start(idist__task *t) {
    idist__ring *ring = idist__ring_of(t->group->w);
    int shared = 0;

    memset(t->impl, 0, t->call.kind < IDIST__SEND ? sizeof(idist__op) : offsetof(idist__op, n));
    if (t->call.kind < IDIST__SEND) shared = idist__share_choose(t->group, &t->call);
    if (t->call.kind < IDIST__SEND && idist__host_serves(t->group, &t->call))
        shared = IDIST__BY_HOST;

    // After a while outside the library, hear first what the others have said: perhaps the group
    // has failed.
    if (t->started_ns - ring->looked_ns > IDIST__MS && !t->group->inner) {
        idist__ring_progress(t->group->w);
        if (t->done) return;
    }

    ring->looked_ns = t->started_ns;

    // The end of a process shows at its socket only, which otherwise is looked at by who sleeps:
    // perhaps nobody does.
    if (ring->shm && t->started_ns - ring->polled_ns > IDIST__LOOK_NS && !t->group->inner) {
        ring->polled_ns = t->started_ns;
        idist__ring_poll(ring, 0, false);
        idist__ring_settle(ring);
        if (t->done) return;
    }

    if (t->call.kind == IDIST__SEND) idist__send_start(t);
    else if (t->call.kind == IDIST__RECV) idist__recv_start(t);
    else if (t->group->size == 1) idist__self_collective(t);
    else if (shared) {
        idist__share_prepare(t, shared);
        idist__ring_note(t, idist__op_of(t), shared);
        idist__ring_check_start(ring, t);
        if (shared == IDIST__BY_HOST) idist__host_start(t);
        else idist__share_start(t);
    } else if (!idist__op_begin(t))
        idist__ring_fail(ring, t->group, IDIST_ERR_NO_MEMORY, "a rank is out of memory");
    else {
        idist__ring_note(t, idist__op_of(t), idist__op_of(t)->algorithm);
        idist__ring_check_start(ring, t);
        idist__op_choose_run(t);
        if (!ring->failed) idist__op_run(t);
    }

    idist__ring_settle(ring);
}

// Takes the verbs of a task out of a list. Returns whether there were any.
static bool idist__verbs_purge(idist__ring *ring, const idist__verbs *list, const idist__task *t) {
    idist__verb *v, *next;
    bool any = false;

    for (v = list->first; v; v = next) {
        next = v->next;
        if (v->task != t) continue;
        idist__verb_take(v);
        idist__verb_free(ring, v);
        any = true;
    }

    return any;
}

// A frame that has partly gone out must go out to its end, or the stream is useless; its payload is
// copied, since the buffer belongs to the caller again.
static void idist__verb_orphan(idist__ring *ring, idist__link *l, idist__verb *v) {
    size_t left = v->piece - v->piece_moved;

    v->task = NULL;
    if (v->frame.type == IDIST__RTS && ring->shm)
        __atomic_fetch_add(&idist__shm_bell(ring->shm, ring->shm->me)->withdrawn, 1u,
                           __ATOMIC_SEQ_CST);

    if (!left) {
        if (v->frame.type == IDIST__RTS)
            v->frame.type = IDIST__CREDIT; // already written: only keeps it from waiting for CTS
        v->nbytes = v->piece = v->piece_moved = v->moved = 0;
        return;
    }

    v->owned = (char *)idist__mem_raw(&ring->w->cfg.mem, left);

    if (!v->owned) {
        idist__link_write_failed(ring, l);
        return;
    }

    memcpy(v->owned, v->data + v->moved + v->piece_moved, left);
    v->data = v->owned;
    v->moved = v->piece_moved = 0;
    v->nbytes = v->piece = left;
}

// The same for what waits to go out. Returns whether the other side has heard of any of it.
static bool idist__link_purge_out(idist__ring *ring, idist__link *l, const idist__task *t) {
    idist__verb **at = &l->out;
    bool heard = false;

    if (l->out && l->out->task == t && l->out->frame_moved + l->out->piece_moved > 0) {
        heard = true;
        idist__verb_orphan(ring, l, l->out);
    }

    while (*at) {
        idist__verb *v = *at;

        if (v->task != t) {
            at = &v->next;
            continue;
        }

        heard = heard || v->started;
        if (v->frame.type == IDIST__EAGER)
            l->window += v->nbytes + IDIST__FRAME_BYTES; // it will not arrive
        *at = v->next;
        idist__verb_free(ring, v);
    }

    l->out_end = at;

    return heard;
}

// Forgets what a task has among the links. Returns whether the other side has heard of any of it.
static bool idist__links_purge(idist__ring *ring, const idist__task *t) {
    bool heard = false;
    int i;

    for (i = 0; i < ring->w->group.size; i++) {
        idist__link *l = &ring->links[i];
        idist__message *m, *next;

        if (l->in_verb && l->in_verb->task == t) {
            idist__verb *v = l->in_verb;
            if (l->in.type == IDIST__EAGER) idist__verb_free(ring, v); // it is in no list
            l->in_verb = NULL;
            l->target = NULL;
            heard = true;
        }

        for (m = l->early; m; m = next) {
            next = m->next;

            if (m->claim && m->claim->task == t) {
                idist__verb_free(ring, m->claim);
                m->claim = NULL;
                heard = true;
            }

            if (m->self_send && m->self_send->task == t) {
                idist__verb_free(ring, m->self_send);
                idist__message_free(ring, l, m);
            }
        }

        heard = idist__link_purge_out(ring, l, t) || heard;
        if (ring->shm && idist__verb_in(&l->waiting, t))
            __atomic_fetch_add(&idist__shm_bell(ring->shm, ring->shm->me)->withdrawn, 1u,
                               __ATOMIC_SEQ_CST);
        heard = idist__verbs_purge(ring, &l->waiting, t) || heard;
        heard = idist__verbs_purge(ring, &l->receiving, t) || heard;
        idist__verbs_purge(ring, &l->posted, t);
    }

    return heard;
}

// The same for a send or receive that waits for the other side: it has one verb, and thousands may
// be cancelled at once. False when it is not like that.
static bool idist__verb_purge(idist__ring *ring, const idist__task *t) {
    idist__verb *v = idist__kind_is_p2p(t->call.kind) ? idist__op_of(t)->verb : NULL;

    if (!v || !v->list || (t->call.kind == IDIST__RECV && !idist__recv_unmatched(t))) return false;
    if (t->call.kind == IDIST__SEND && ring->shm)
        __atomic_fetch_add(&idist__shm_bell(ring->shm, ring->shm->me)->withdrawn, 1u,
                           __ATOMIC_SEQ_CST);
    idist__verb_take(v);
    idist__verb_free(ring, v);

    return true;
}

static bool idist__ring_cancel(idist__task *t) {
    idist__ring *ring = idist__ring_of(t->group->w);
    idist__frame f;
    idist__op *o;
    bool waited = idist__verb_purge(ring, t), unmatched = waited && t->call.kind == IDIST__RECV;
    bool heard = waited || idist__links_purge(ring, t); // a send waits when its RTS is out

    if (t->call.kind == IDIST__RECV && t->announced &&
        t->call.root >= 0) { // it does not wait any more
        memset(&f, 0, sizeof f);
        f.type = IDIST__WAITS;
        f.print.kind = IDIST__RECV;
        idist__link_control(ring, &ring->links[idist__world_rank(t->group, t->call.root)], &f,
                            NULL);
    }

    if (t->call.kind == IDIST__RECV) return unmatched;
    if (t->call.kind == IDIST__SEND) return !heard;
    o = idist__op_of(t);
    if (o->step && !o->step->done)
        return false; // near and leads fail before the group that they are parts of
    if (o->algorithm == IDIST__BY_HOST) idist__host_remove(t);
    else if (o->algorithm >= IDIST__FLAT) idist__share_cancel(t);
    if (o->step) idist__task_free(o->step);
    o->step = NULL;
    idist__mem_free(&ring->w->cfg.mem, o->memory);
    o->memory = NULL;

    return false;
}

static void idist__ring_tell(idist_group *g) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__frame f;
    int i;

    memset(&f, 0, sizeof f);
    f.type = IDIST__ABORT;
    f.ctx = g->ctx;
    f.aux = (uint64_t)(int64_t)g->status;
    idist__share_withdraw(g);
    for (i = 0; i < g->size; i++)
        if (i != g->rank) idist__link_control(ring, &ring->links[g->ranks[i]], &f, g->cause);
    if (idist__ring_group_of(g)->near)
        idist__group_fail(idist__ring_group_of(g)->near, g->status, g->cause);
    if (idist__ring_group_of(g)->leads)
        idist__group_fail(idist__ring_group_of(g)->leads, g->status, g->cause);
    idist__share_let_go(g);
}

static void idist__ring_announce(idist__task *t) {
    idist__ring *ring = idist__ring_of(t->group->w);
    idist__ring_group *rg = idist__ring_group_of(t->group);
    idist__frame f;
    int i;
    bool p2p = t->call.kind == IDIST__SEND || t->call.kind == IDIST__RECV, blocked;

    memset(&f, 0, sizeof f);
    f.type = IDIST__WAITS;
    f.ctx = t->group->ctx;
    f.print = idist__task_print(t, 0);
    if (t->group->size == 1) return;
    blocked = idist__world_only_call(ring->w) == t;
    if (!p2p) f.print = rg->history[t->seq % IDIST__HISTORY];

    for (i = 0; i < t->group->size; i++) {
        idist__link *l = &ring->links[t->group->ranks[i]];
        idist__verb *v;
        if (i == t->group->rank || (p2p && t->call.root != i)) continue;
        // Only a deadlock asks for these, and there is none while this rank can do something else.
        f.flags = (uint8_t)(blocked ? (idist__ring_needs(l, t, i) ? IDIST__NEEDS_YOU : 0) |
                                          IDIST__ONLY_CALL
                                    : 0);
        f.aux = l->p2p_got;
        for (v = l->waiting.first; v && p2p && blocked; v = v->next)
            if (v->task == t) f.id = v->id;
        idist__link_control(ring, l, &f, NULL);
        idist__ring_find_deadlock(ring, t->group->ranks[i]);
    }

    idist__ring_settle(ring);
}

// A receive whose message has begun to come: from whom.
static int idist__recv_missing(const idist__task *t, char *text, size_t cap) {
    const idist_group *g = t->group;
    const idist__ring *ring = idist__ring_of(g->w);
    int i;

    if (!t->patient) return 0; // it gets more time

    for (i = 0; i < g->size; i++) {
        const idist__link *l = &ring->links[g->ranks[i]];
        bool here = l->in_verb && l->in_verb->task == t;
        if (!here && !idist__verb_in(&l->receiving, t)) continue;
        idist__append(text, cap, "rank %d on %s, whose message has begun to come", g->ranks[i],
                      g->w->nodes[g->ranks[i]].hostname);
        return 1;
    }

    return 0;
}

typedef enum idist__absence { // of a member that the end of a call may wait for
    IDIST__ABSENT = 1,        // it has not entered the call
    IDIST__SILENT = 2,        // it has not answered when it was asked
    IDIST__NEEDED = 4         // this rank waits for something that only that one can send
} idist__absence;

static int idist__ring_absence(const idist__task *t, int rank) {
    const idist_group *g = t->group;
    const idist__seen *seen = &idist__ring_group_of(g)->seen[rank];
    const idist__link *l = &idist__ring_of(g->w)->links[g->ranks[rank]];
    bool entered = (int32_t)(seen->seq - t->seq) >= 0;

    if (t->whole.kind && seen->print.whole == t->whole.seq)
        entered = true; // or an earlier part of it

    return (entered ? 0 : IDIST__ABSENT) |
           (g->asked_ns && l->here_ns < g->asked_ns ? IDIST__SILENT : 0) |
           (idist__ring_needs(l, t, rank) ? IDIST__NEEDED : 0);
}

// Whom to name. Whoever has not entered the call may wait for somebody else in an earlier one; then
// it answers when asked. A rank that entered the call may since have been stopped, or may have
// finished it and be computing. In the second case this rank needs nothing from it.
static int idist__ring_missing(idist__task *t, char *text, size_t cap) {
    static const int order[4] = {IDIST__ABSENT | IDIST__SILENT, IDIST__SILENT | IDIST__NEEDED,
                                 IDIST__ABSENT, IDIST__SILENT};
    idist_group *g = t->group;
    idist__ring_group *rg = idist__ring_group_of(g);
    int i, k, n = 0;

    if (t->call.kind == IDIST__RECV && !idist__recv_unmatched(t))
        return idist__recv_missing(t, text, cap);
    if (idist__kind_is_p2p(t->call.kind)) return idist__missing_peer(t, text, cap);

    if (!t->announced && idist__op_of(t)->algorithm == IDIST__BY_HOST &&
        idist__op_of(t)->step) { // nobody was asked yet
        if (!idist__ring_missing(idist__op_of(t)->step, text, cap))
            idist__append(text, cap, "ranks of another host");
        return 1;
    }

    idist__share_look(t);
    for (k = 0; k < 4 && !n; k++)
        for (i = 0; i < g->size; i++)
            if (i != g->rank && (idist__ring_absence(t, i) & order[k]) == order[k])
                idist__missing_rank(g, i, &rg->seen[i].print, n++, text, cap);
    if (n > 8) idist__append(text, cap, " and %d more", n - 8);
    if (n && (order[k - 1] & IDIST__SILENT)) idist__append(text, cap, ", which does not answer");

    return n;
}

static void idist__ring_group_close(idist_group *g);

static idist_status idist__ring_group_open(idist_group *g) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__ring_group *rg = idist__ring_group_of(g);
    idist_status s;
    int i;

    rg->rank_of = (int *)idist__mem_alloc(&g->w->cfg.mem, sizeof(int) * (size_t)g->w->group.size);
    rg->seen = (idist__seen *)idist__mem_alloc(&g->w->cfg.mem, sizeof *rg->seen * (size_t)g->size);

    if (!rg->rank_of || !rg->seen) {
        idist__mem_free(&g->w->cfg.mem, rg->rank_of);
        idist__mem_free(&g->w->cfg.mem, rg->seen);
        return IDIST_ERR_NO_MEMORY;
    }

    for (i = 0; i < g->w->group.size; i++) rg->rank_of[i] = -1;
    for (i = 0; i < g->size; i++) rg->rank_of[g->ranks[i]] = i;

    for (i = 0; i < g->size; i++) {
        idist__link *l = &ring->links[g->ranks[i]];
        idist__message *m;

        for (m = l->early; m; m = m->next) {
            if (m->frame.ctx != g->ctx || !m->unknown) continue;
            m->unknown = false;
            l->nunknown--;
        }

        for (m = l->early; m; m = m->next)
            if (m->frame.ctx == g->ctx && m->frame.type == IDIST__ABORT)
                idist__group_fail(g, (idist_status)(int)(int64_t)m->frame.aux, m->data);

        if (i != g->rank && !l->open) {
            char cause[200];
            snprintf(cause, sizeof cause, "rank %d on %s was lost", g->ranks[i],
                     g->w->nodes[g->ranks[i]].hostname);
            idist__group_fail(g, IDIST_ERR_PEER_LOST, cause);
        }
    }

    if (g != &g->w->group) return IDIST_OK;
    idist__share_offer_place(g);
    s = idist__host_open(g, NULL);
    if (s != IDIST_OK) idist__ring_group_close(g);

    return s;
}

static void idist__ring_group_close(idist_group *g) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__ring_group *rg = idist__ring_group_of(g);
    idist_group *other;
    int i;

    for (i = 0; i < g->w->group.size; i++) {
        idist__message *m, *next;

        for (m = ring->links[i].early; m; m = next) {
            bool whole = m->frame.type == IDIST__EAGER && m->moved == m->frame.nbytes;
            size_t nbytes = (size_t)m->frame.nbytes;
            next = m->next;
            if (m->frame.ctx != g->ctx) continue;
            idist__message_free(ring, &ring->links[i], m);
            if (whole && i != g->w->group.rank) idist__link_consumed(ring, &ring->links[i], nbytes);
        }
    }

    ring->closed[ring->nclosed++ % IDIST__CLOSED] = g->ctx;
    if (rg->near) idist__group_free(rg->near);
    if (rg->leads) idist__group_free(rg->leads);

    for (other = &g->w->group; g->inner && other; other = other->next) {
        idist__ring_group *of =
            other->rank >= 0 && other->impl ? idist__ring_group_of(other) : NULL;
        if (of && of->near == g) of->near = NULL;
        if (of && of->leads == g) of->leads = NULL;
    }

    idist__share_free(g);
    idist__mem_free(&g->w->cfg.mem, rg->rank_of);
    idist__mem_free(&g->w->cfg.mem, rg->seen);
}

static void *idist__ring_alloc(idist__world *w, size_t nbytes) {
    const idist__shm *m = idist__ring_of(w)->shm;
    return m && m->window_nbytes ? idist__window_alloc(m->window, nbytes) : NULL;
}

//------------------------------------------------------------------------------
// [ring:join]  how the ranks meet, connect to each other, and part
// uses os err mem base:log hash sock auth store config world segment msg:types
// uses msg:transport op link share host engine
//
// Through the store everybody learns the job's number, each rank's host, and where each rank
// listens: a local socket for ranks of one host, TCP for the others. Then every rank connects to
// the lower ones and accepts the higher ones; each connection is authenticated. Once all are there
// nobody needs the store or listens any more.
//------------------------------------------------------------------------------

typedef struct idist__record { // what a rank says about itself
    char hostname[64];
    uint64_t host;
    char local[64];     // address of its local socket, or ""
    uint32_t shm;       // whether it takes part in shared memory
    uint32_t algorithm; // what it was told to use
} idist__record;

typedef struct idist__join {
    idist__world *w;
    idist__ring *ring;
    idist_store *store; // opened by us, or the user's
    bool own_store;
    bool told; // the others know that a rank gave up
    bool told_by_will;
    char prefix[64];
    uint64_t job;
    uint8_t key[32];
    int listeners[2]; // local, tcp; -1
    char tcp[128];    // where our TCP socket listens
    bool need_tcp;
    const idist__record *records; // by rank
    idist__handshake *shakes;     // outgoing, by rank; only to lower ranks
    int64_t
        *again_ns; // when to connect to a lower rank once more; 0: it is connecting, or connected
    idist__porch *porch; // incoming
    int nlinks;          // connected
    int64_t deadline_ns;
} idist__join;

static void idist__join_key(const idist__join *j, char *key, size_t cap, const char *what,
                            int rank) {
    if (rank < 0) snprintf(key, cap, "%s%s", j->prefix, what);
    else snprintf(key, cap, "%s%s/%d", j->prefix, what, rank);
}

static int idist__join_ms_left(const idist__join *j) {
    int64_t left =
        j->deadline_ns == IDIST__FOREVER ? -1 : (j->deadline_ns - idist__os_now_ns()) / IDIST__MS;

    return j->deadline_ns == IDIST__FOREVER ? -1
           : left < 1                       ? 1
           : left > INT32_MAX               ? INT32_MAX
                                            : (int)left;
}

typedef struct idist__join_failure { // why a rank could not join: the others need not wait for it
    int32_t status, rank;
    int32_t by_will; // it ended without a word; the store says so for it
    char text[400];
} idist__join_failure;

enum { IDIST__JOIN_STAY_MS = 500 };

static idist_status idist__join_no_fds(const idist__join *j) {
    return idist__fail(
        IDIST_ERR_NO_FDS,
        "initialize: out of file descriptors; a world of %d needs about %d: raise ulimit -n",
        j->w->group.size, 2 * j->w->group.size + 8);
}

// The server of our own store, in the process that has it.
static const idist__server *idist__join_server(const idist__join *j) {
    return j->own_store && j->store->run == idist__tcp_store_run
               ? ((idist__tcp_store *)j->store->impl)->server
               : NULL;
}

// What rank 0 knows beyond the names of those who are late.
static idist_status idist__join_hint(const idist__join *j) {
    const idist__server *sv = idist__join_server(j);
    int refused = sv ? __atomic_load_n(&sv->nrefused, __ATOMIC_RELAXED) : 0;

    if (sv && __atomic_load_n(&sv->other_order, __ATOMIC_RELAXED))
        idist__append(
            idist__me.text, sizeof idist__me.text,
            ". Some rank runs on a machine of another byte order; mixed worlds are not supported");
    else if (refused)
        idist__append(idist__me.text, sizeof idist__me.text,
                      ". %d connections were refused or broke off: another secret, another build, "
                      "strangers, or a rank that died",
                      refused);

    return IDIST_ERR_TIMEOUT;
}

// When the store's server ended, says who that was.
static void idist__join_store_lost(const idist__join *j, idist_status status) {
    bool by_rank_0 = j->w->cfg.store == NULL && strncmp(j->w->cfg.where, "torch:", 6) != 0;
    char text[sizeof idist__me.text];
    const char *cause = text;

    memcpy(text, idist__me.text, sizeof text);
    if (strncmp(cause, "initialize: ", 12) == 0) cause += 12;
    if (status != IDIST_ERR_PEER_LOST || strncmp(cause, "store: ", 7) != 0) return;
    idist__fail(status, "initialize: %s: %s",
                by_rank_0 ? "rank 0 was lost, or gave up" : "the store's server was lost",
                cause + 7);
}

// Whether a rank has given up; then so do we, with its reason.
static idist_status idist__join_failed(idist__join *j) {
    const idist__server *sv = idist__join_server(j);
    idist__join_failure f;
    char key[128];
    const char *keys[1];
    bool there = false;
    size_t n = 0;
    idist_status s;

    keys[0] = key;
    if (sv && __atomic_load_n(&sv->no_fds, __ATOMIC_RELAXED)) return idist__join_no_fds(j);
    idist__join_key(j, key, sizeof key, "failed", -1);
    s = idist_store_check(j->store, keys, 1, &there);
    if (s == IDIST_ERR_PEER_LOST) return s;
    if (s != IDIST_OK || !there) return IDIST_OK;
    if (idist_store_get(j->store, key, &f, sizeof f, &n, 1000) != IDIST_OK || n != sizeof f)
        return IDIST_OK;
    f.text[sizeof f.text - 1] = 0;
    j->told = true;
    j->told_by_will = f.by_will != 0;

    if (f.status == IDIST_ERR_TIMEOUT) { // it names who is late
        idist__fail(IDIST_ERR_TIMEOUT, "initialize: %s", f.text);
        return idist__join_hint(j);
    }

    return idist__fail((idist_status)f.status, "initialize: rank %d could not join: %s",
                       (int)f.rank, f.text);
}

// How often a rank that waits asks whether another one has given up. Hundreds of them ask one
// server.
static int idist__join_slice_ms(const idist__join *j) {
    return j->w->group.size < 800 ? 100 + j->w->group.size / 2 : 500;
}

// What the store's server is to tell the others when our process ends before all have met. NULL
// takes that back.
static void idist__join_will(idist__join *j, const idist__join_failure *failure) {
    idist__req r;
    char key[128] = "";

    if (j->store->run != idist__tcp_store_run && j->store->run != idist__file_store_run) return;
    if (strncmp(j->w->cfg.where, "torch:", 6) == 0) return; // a server that does not know of wills
    memset(&r, 0, sizeof r);
    if (failure) idist__join_key(j, key, sizeof key, "failed", -1);
    r.op = IDIST__REQ_WILL;
    r.key.data = key;
    r.key.nbytes = strlen(key);
    r.a.data = (const char *)failure;
    r.a.nbytes = failure ? sizeof *failure : 0;
    r.deadline_ns = j->deadline_ns;
    j->store->run(j->store, &r); // if the connection is gone, the next request says so
}

// The owner of the store stays until all others have read why, or for a moment.
static void idist__join_stay(idist__join *j) {
    int64_t until_ns = idist__os_deadline(IDIST__JOIN_STAY_MS), there = 0;
    int others = j->w->group.size - 1 - (j->told_by_will ? 1 : 0);
    char key[128];

    idist__join_key(j, key, sizeof key, "heard", -1);

    while (idist_store_add(j->store, key, 0, &there) == IDIST_OK && there < others) {
        if (idist__os_now_ns() >= until_ns) break;
        idist__os_pause_ms(5);
    }
}

// Tells the others why we give up, unless we have it from them.
static void idist__join_tell(idist__join *j, idist_status status) {
    idist__join_failure f;
    char key[128], text[sizeof idist__me.text];
    int64_t there;

    if (!j->store || !j->prefix[0]) return;
    memset(&f, 0, sizeof f);
    memcpy(text, idist__me.text, sizeof text);
    f.status = (int32_t)status;
    f.rank = j->w->group.rank;
    idist__copy_text(f.text, sizeof f.text,
                     strncmp(text, "initialize: ", 12) == 0 ? text + 12 : text);

    idist__join_key(j, key, sizeof key, "failed", -1);
    if (!j->told)
        idist_store_set(j->store, key, &f,
                        sizeof f); // if that fails they learn it from the store's end
    idist__join_will(j, NULL);
    idist__join_key(j, key, sizeof key, "heard", -1);
    if (f.rank > 0) idist_store_add(j->store, key, 1, &there);
    else if (j->own_store) idist__join_stay(j);
    memcpy(idist__me.text, text, sizeof text);
}

// Which ranks, from `rank` on, have not put this value there.
static idist_status idist__join_missing(idist__join *j, const char *what, int rank) {
    char key[128], text[300] = "";
    int i, missing = 0;

    for (i = rank; i < j->w->group.size; i++) {
        const char *keys[1];
        bool there = true;
        keys[0] = key;
        idist__join_key(j, key, sizeof key, what, i);
        if (idist_store_check(j->store, keys, 1, &there) != IDIST_OK || there) continue;
        if (missing++ < 16) idist__append(text, sizeof text, "%s%d", missing > 1 ? ", " : "", i);
    }

    if (!missing)
        return idist__fail(IDIST_ERR_TIMEOUT, "initialize: rank %d showed up too late, after %d ms",
                           rank, j->w->cfg.init_timeout_ms);
    idist__fail(IDIST_ERR_TIMEOUT,
                "initialize: %d of %d ranks did not show up within %d ms: rank %s%s", missing,
                j->w->group.size, j->w->cfg.init_timeout_ms, text, missing > 16 ? ", ..." : "");
    if (!j->w->cfg.store && strncmp(j->w->cfg.where, "unix:", 5) == 0)
        idist__append(idist__me.text, sizeof idist__me.text,
                      ". The ranks meet at a local socket, which those of another user, network "
                      "namespace (container) or "
                      "host cannot reach");

    return idist__join_hint(j);
}

// Gets a value that a rank puts there when it starts; the time-out names the ranks that did not, or
// those without `cause` if it is made of what these put there.
static idist_status idist__join_get(idist__join *j, const char *what, int rank, const char *cause,
                                    void *value, size_t nbytes) {
    char key[128];
    size_t n = 0;
    idist_status s;
    int slice_ms = idist__join_slice_ms(j);

    idist__join_key(j, key, sizeof key, what, rank);

    do {
        int ms = idist__join_ms_left(j);
        s = idist_store_get(j->store, key, value, nbytes, &n,
                            ms < 0 || ms > slice_ms ? slice_ms : ms);
        if (s == IDIST_OK && n != nbytes)
            return idist__fail(IDIST_ERR_UNSUPPORTED,
                               "rank %d was built from another version of idist.h", rank);
        if (s != IDIST_ERR_TIMEOUT) return s;
        if ((s = idist__join_failed(j)) != IDIST_OK) return s;
    } while (idist__os_ms_until(j->deadline_ns) != 0);

    return idist__join_missing(j, cause ? cause : what, rank < 0 ? 0 : rank);
}

static idist_status idist__join_set(idist__join *j, const char *what, int rank, const void *value,
                                    size_t nbytes) {
    char key[128];
    idist__join_key(j, key, sizeof key, what, rank);
    return idist_store_set(j->store, key, value, nbytes);
}

// Opens the store. Worlds made one after the other through one store must not see each other's
// keys: each rank counts its worlds there. In a store of our own the count can only be 1; more
// means that two processes have the same rank.
static idist_status idist__join_store(idist__join *j) {
    idist__config *cfg = &j->w->cfg;
    idist_store_desc d;
    bool torch = strncmp(cfg->where, "torch:", 6) == 0, pmi = strcmp(cfg->where, "pmi:") == 0;
    const char *restart = idist__os_env("TORCHELASTIC_RESTART_COUNT");
    char base[40] = "idist", key[64];
    int64_t nth = 0;
    idist__join_failure will;
    idist_status s;

    j->store = cfg->store;

    if (!j->store) {
        if (!cfg->where[0])
            return idist__fail(IDIST_ERR_ENV,
                               "rank %d of %d (%s): MASTER_ADDR is not set, so the ranks cannot "
                               "find each other. Set "
                               "MASTER_ADDR and MASTER_PORT to rank 0's host and a free port there "
                               "(127.0.0.1 when all "
                               "ranks are on this host)",
                               cfg->rank, cfg->world_size,
                               cfg->rank_var ? cfg->rank_var : cfg->launcher);
        if (pmi && (s = idist__pmi_meet(cfg)) != IDIST_OK) return s;
        memset(&d, 0, sizeof d);
        d.server = cfg->rank == 0;
        d.timeout_ms = cfg->init_timeout_ms;
        d.secret = cfg->secret.nbytes ? cfg->secret.bytes : NULL;
        d.secret_nbytes = cfg->secret.nbytes;
        d.allocator = cfg->mem;
        s = idist__store_open(cfg->where, &d, cfg->listener, &j->store);
        cfg->listener = -1; // the store owns it now
        if (s != IDIST_OK) return idist__fail(s, "initialize: %s", idist__me.text);
        j->own_store = true;
    }

    if (torch)
        snprintf(base, sizeof base, "idist-%.20s",
                 restart ? restart : "0"); // the agent keeps it over restarts
    snprintf(key, sizeof key, "%s/%d", base, cfg->rank);
    if ((s = idist_store_add(j->store, key, 1, &nth)) != IDIST_OK) return s;
    if (j->own_store && nth != 1 && !torch)
        return idist__fail(IDIST_ERR_RANK_TAKEN,
                           "initialize: another process already is rank %d of this job (%s)",
                           cfg->rank, cfg->rank_var ? cfg->rank_var : "desc.rank");
    snprintf(j->prefix, sizeof j->prefix, "%s/%lld/", base, (long long)nth);
    memset(&will, 0, sizeof will);
    will.status = (int32_t)IDIST_ERR_PEER_LOST;
    will.rank = cfg->rank;
    will.by_will = 1;
    snprintf(will.text, sizeof will.text, "its process on %s ended during idist_initialize",
             j->w->hostname);
    if (cfg->rank > 0) idist__join_will(j, &will); // that of rank 0 takes the store with it

    return IDIST_OK;
}

// Rank 0 names the job; everybody else compares the size of the world with what rank 0 thinks.
static idist_status idist__join_job(idist__join *j) {
    uint64_t job[2] = {0, 0}; // its number, and the number of ranks
    idist_status s;
    uint8_t key[32];

    if (j->w->group.rank == 0) {
        idist__os_random(job, sizeof job);
        job[1] = (uint64_t)j->w->group.size;
        s = idist__join_set(j, "job", -1, job, sizeof job);
    } else {
        s = idist__join_get(j, "job", -1, NULL, job, sizeof job);
    }

    if (s != IDIST_OK) return s;
    if (job[1] != (uint64_t)j->w->group.size)
        return idist__fail(IDIST_ERR_ENV,
                           "initialize: rank 0 says the world has %llu ranks, this rank says %d",
                           (unsigned long long)job[1], j->w->group.size);
    j->job = job[0];
    idist__auth_key(&j->w->cfg.secret, key);
    idist__hmac(key, "links", &j->job, sizeof j->job, NULL, 0, j->key);

    return IDIST_OK;
}

static idist_status idist__join_listen_local(idist__join *j, idist__record *me) {
    idist__addr addr;
    uint64_t id[2];
    idist_status s;

    idist__os_random(id, sizeof id);
    snprintf(me->local, sizeof me->local, "unix:idist-%016llx%016llx", (unsigned long long)id[0],
             (unsigned long long)id[1]);
    if ((s = idist__addr_parse(&addr, me->local)) != IDIST_OK) return s;

    return idist__sock_listen(&addr, me->local, &j->listeners[0]);
}

// The address under which other hosts reach this one: what the user says, or that of the connection
// to the store.
static idist_status idist__join_own_ip(idist__join *j, bool one_host, char *ip, size_t cap) {
    const char *env = idist__os_env("IDIST_ADDR");
    idist__addr a;

    memset(&a, 0, sizeof a);
    a.nbytes = sizeof a.sa;
    if (env) idist__copy_text(ip, cap, env);
    else if (one_host) idist__copy_text(ip, cap, "127.0.0.1");
    else if (j->own_store && strncmp(j->w->cfg.where, "file:", 5) != 0 &&
             getsockname(((idist__tcp_store *)j->store->impl)->fd, (struct sockaddr *)&a.sa,
                         &a.nbytes) == 0 &&
             a.sa.ss_family != AF_UNIX)
        idist__addr_host_text(&a, ip, cap);
    else
        return idist__fail(IDIST_ERR_ENV, "initialize: which address do other hosts reach this one "
                                          "at? Set IDIST_ADDR, or use tcp://");

    return IDIST_OK;
}

static idist_status idist__join_listen_tcp(idist__join *j, bool one_host) {
    idist__addr addr;
    char ip[64];
    idist_status s = idist__join_own_ip(j, one_host, ip, sizeof ip);

    if (s != IDIST_OK || (s = idist__addr_tcp(&addr, ip, 0)) != IDIST_OK) return s;
    if (!idist__addr_is_loopback(&addr) && !j->w->cfg.secret.nbytes && !j->w->cfg.secret.insecure)
        return idist__fail(
            IDIST_ERR_NO_SECRET,
            "initialize: listening at %s, beyond this host, needs a shared secret: set "
            "IDIST_SECRET or "
            "IDIST_SECRET_FILE on all ranks, or IDIST_INSECURE=1 to trust the network",
            ip);
    if ((s = idist__sock_listen(&addr, ip, &j->listeners[1])) != IDIST_OK) return s;
    addr.nbytes = sizeof addr.sa;
    if (getsockname(j->listeners[1], (struct sockaddr *)&addr.sa, &addr.nbytes) != 0)
        return idist__fail_errno("getsockname", errno);
    snprintf(j->tcp, sizeof j->tcp, "tcp:[%s]:%d", ip, idist__addr_port(&addr));

    return idist__join_set(j, "tcp", j->w->group.rank, j->tcp, sizeof j->tcp);
}

// What every rank says about itself, on all of them. Rank 0 collects it: n requests and as many
// answers.
static idist_status idist__join_records(idist__join *j, idist__record *records) {
    int i, n = j->w->group.size, me = j->w->group.rank;
    idist_status s = idist__join_set(j, "node", me, &records[me], sizeof *records);

    if (s != IDIST_OK) return s;
    if (me) return idist__join_get(j, "nodes", -1, "node", records, sizeof *records * (size_t)n);
    for (i = 1; i < n && s == IDIST_OK; i++)
        s = idist__join_get(j, "node", i, NULL, &records[i], sizeof *records);

    return s == IDIST_OK ? idist__join_set(j, "nodes", -1, records, sizeof *records * (size_t)n)
                         : s;
}

// Everybody's host; afterwards it is known whether TCP is needed at all.
static idist_status idist__join_table(idist__join *j, idist__record *records) {
    idist__world *w = j->w;
    idist__record *me = &records[w->group.rank];
    uint64_t host = idist__host_key(&w->cfg);
    uint32_t algorithm = (uint32_t)w->cfg.algorithm;
    bool one_host = true;
    idist_status s = IDIST_OK;
    int i;

    idist__copy_text(me->hostname, sizeof me->hostname, w->hostname);
    me->host = host;
    me->shm = w->cfg.transport == 0;
    me->algorithm = algorithm;
    if (w->cfg.transport != 2) s = idist__join_listen_local(j, me);
    if (s == IDIST_OK) s = idist__join_records(j, records);

    for (i = 0; i < w->group.size && s == IDIST_OK; i++) {
        records[i].hostname[sizeof records[i].hostname - 1] = 0;
        records[i].local[sizeof records[i].local - 1] = 0;
        idist__copy_text(w->nodes[i].hostname, sizeof w->nodes[i].hostname, records[i].hostname);
        w->nodes[i].host = records[i].host;
        if (records[i].host != host) one_host = false;
        if (records[i].algorithm != algorithm)
            s = idist__fail(
                IDIST_ERR_ENV,
                "initialize: IDIST_ALGO (desc.algorithm) differs between rank %d and rank %d", i,
                w->group.rank);
    }

    j->records = records;
    if (s == IDIST_OK && (w->cfg.transport == 2 || !one_host))
        s = idist__join_listen_tcp(j, one_host);

    return s;
}

static void idist__join_linked(idist__join *j, int rank, int fd, bool local) {
    idist__link *l = &j->ring->links[rank];

    l->transport = local ? &idist__transport_unix : &idist__transport_tcp;
    l->fd = fd;
    l->port = &l->fd;
    l->open = true;
    j->ring->nstreams++;
    j->nlinks++;
}

// A rank is gone. It may have given up and said why, or the store's server is about to say that it
// died.
static idist_status idist__join_lost(idist__join *j, int rank, const char *how) {
    int64_t soon = idist__os_deadline(300);
    char text[300];

    idist__copy_text(text, sizeof text, how); // may lie where a failure writes its text

    do {
        idist_status s = idist__join_failed(j);
        if (s != IDIST_OK) return s;
        idist__os_pause_ms(10);
    } while (idist__os_ms_until(soon) != 0);

    return idist__fail(IDIST_ERR_PEER_LOST, "initialize: rank %d on %s was lost: %s", rank,
                       j->w->nodes[rank].hostname, text);
}

static bool idist__join_is_local(const idist__join *j, int rank) {
    const idist__record *me = &j->records[j->w->group.rank], *other = &j->records[rank];
    return j->w->cfg.transport != 2 && other->host == me->host && other->local[0];
}

// Begins the connection to a lower rank, or says when to try again: its queue of newcomers may be
// full.
static idist_status idist__join_connect(idist__join *j, int rank) {
    idist__addr addr;
    char where[128], how[200];
    int64_t soon = idist__os_deadline(3000);
    idist_status s;
    int fd;

    j->again_ns[rank] = 0;
    idist__copy_text(where, sizeof where, j->records[rank].local);
    if (!idist__join_is_local(j, rank) &&
        (s = idist__join_get(j, "tcp", rank, NULL, where, sizeof where)) != IDIST_OK)
        return s;
    where[sizeof where - 1] = 0;
    if ((s = idist__addr_parse(&addr, where)) != IDIST_OK) return s;

    fd = idist__sock_connect(&addr, soon < j->deadline_ns ? soon : j->deadline_ns);
    if (fd < 0 && (errno == EMFILE || errno == ENFILE)) return idist__join_no_fds(j);

    if (fd < 0 && (errno == EAGAIN || errno == ETIMEDOUT || errno == EINTR)) {
        j->again_ns[rank] = idist__os_deadline(20);
        return idist__join_failed(j);
    }

    if (fd < 0 && idist__sock_cut_off(errno))
        return idist__fail(IDIST_ERR_SYSTEM,
                           "initialize: rank %d on %s cannot be reached at %s (%s): the network "
                           "interface is down, or no "
                           "route leads there",
                           rank, j->w->nodes[rank].hostname, where, strerror(errno));

    if (fd < 0) {
        snprintf(how, sizeof how, "no connection to %s: %s", where, strerror(errno));
        return idist__join_lost(j, rank, how);
    }

    idist__auth_begin(&j->shakes[rank], fd, false, j->key, IDIST__ROLE_LINK, j->job,
                      j->w->group.rank, j->w->group.size, j->deadline_ns);
    j->shakes[rank].ready = true;

    return IDIST_OK;
}

static idist_status idist__join_accept(idist__join *j, int listener) {
    idist__handshake *h;

    while ((h = idist__porch_place(j->porch)) != NULL) {
        int fd = idist__sock_accept(listener);

        if (fd < 0 && (errno == EMFILE || errno == ENFILE)) {
            if (!idist__porch_make_way(j->porch)) return idist__join_no_fds(j);
            idist__os_pause_ms(1); // no spin while descriptors are short
            return IDIST_OK;
        }

        if (fd < 0) return IDIST_OK;
        idist__os_close(&h->fd);
        idist__auth_begin(h, fd, true, j->key, IDIST__ROLE_LINK, j->job, j->w->group.rank,
                          j->w->group.size, idist__os_deadline(IDIST__PORCH_MS));
        h->ready = true;
    }

    return IDIST_OK;
}

// Moves a handshake on; a finished one becomes a link. An incoming one that fails is somebody
// else's problem; an outgoing one that broke off is tried again, and any other failure of it is
// fatal.
static idist_status idist__join_step(idist__join *j, idist__handshake *h, int to) {
    bool done = false, incoming = to < 0, local;
    idist_status s;
    struct sockaddr_storage sa;
    socklen_t n = sizeof sa;
    int rank;

    h->ready = false;
    s = idist__auth_step(h, &done);
    if (s == IDIST_OK && !done) return IDIST_OK;
    rank = s == IDIST_OK ? (int)h->theirs.rank : -1;
    if (s == IDIST_OK &&
        (incoming ? rank <= j->w->group.rank || rank >= j->w->group.size : rank != to))
        s = IDIST_ERR_AUTH;
    if (s == IDIST_OK && j->ring->links[rank].open) s = IDIST_ERR_RANK_TAKEN;

    if (s != IDIST_OK) {
        if (incoming)
            idist__log_print(&j->w->log, IDIST_LOG_DEBUG, "a connection was refused: %s",
                             idist__me.text);
        idist__os_close(&h->fd);
        if (incoming) return IDIST_OK;

        if (h->broke) {
            j->again_ns[to] = idist__os_deadline(5 + to % 16); // not all at the same moment
            return IDIST_OK;
        }

        return idist__fail(s, "initialize: connecting to rank %d on %s: %s", to,
                           j->w->nodes[to].hostname, idist__me.text);
    }

    local = getsockname(h->fd, (struct sockaddr *)&sa, &n) == 0 && sa.ss_family == AF_UNIX;
    idist__join_linked(j, rank, h->fd, local);
    h->fd = -1;

    return IDIST_OK;
}

static idist_status idist__join_late(const idist__join *j) {
    char text[300] = "";
    int i, missing = 0;

    for (i = 0; i < j->w->group.size; i++)
        if (i != j->w->group.rank && !j->ring->links[i].open && missing++ < 16)
            idist__append(text, sizeof text, "%s%d", missing > 1 ? ", " : "", i);
    return idist__fail(IDIST_ERR_TIMEOUT, "initialize: not connected within %d ms to rank %s%s",
                       j->w->cfg.init_timeout_ms, text, missing > 16 ? ", ..." : "");
}

// What poll should look at: the listeners while there is room for newcomers, then the outgoing
// handshakes in the order of ranks, then the incoming ones. Returns how many.
static int idist__join_poll_set(const idist__join *j, bool room, struct pollfd *fds) {
    int i, n = 0;

    for (i = 0; i < 2; i++) {
        if (j->listeners[i] < 0 || !room) continue;
        fds[n].fd = j->listeners[i];
        fds[n++].events = POLLIN;
    }

    for (i = 0; i < j->w->group.rank; i++) {
        if (j->shakes[i].fd < 0) continue;
        fds[n].fd = j->shakes[i].fd;
        fds[n++].events = idist__auth_writes(&j->shakes[i]) ? POLLOUT : POLLIN;
    }

    return n + idist__porch_poll(j->porch, fds + n);
}

// Goes on with what poll has seen.
static idist_status idist__join_polled(idist__join *j, bool room, const struct pollfd *fds) {
    int i, n = 0, me = j->w->group.rank;
    idist_status s = IDIST_OK;

    for (i = 0; i < 2; i++) n += room && j->listeners[i] >= 0;
    for (i = 0; i < me; i++)
        if (j->shakes[i].fd >= 0) j->shakes[i].ready = fds[n++].revents != 0;
    idist__porch_polled(j->porch, fds + n);

    for (i = 0; i < 2 && s == IDIST_OK; i++)
        if (j->listeners[i] >= 0) s = idist__join_accept(j, j->listeners[i]);

    for (i = 0; i < me && s == IDIST_OK; i++) {
        if (j->shakes[i].fd >= 0 && j->shakes[i].ready) s = idist__join_step(j, &j->shakes[i], i);
        else if (j->again_ns[i] && idist__os_now_ns() >= j->again_ns[i])
            s = idist__join_connect(j, i);
    }

    for (i = 0; i < IDIST__PORCH && s == IDIST_OK; i++)
        if (j->porch->place[i].fd >= 0 && j->porch->place[i].ready)
            s = idist__join_step(j, &j->porch->place[i], -1);

    return s;
}

// All handshakes at once, so that no order of ranks can block another.
static idist_status idist__join_links(idist__join *j) {
    int i, n, size = j->w->group.size;
    size_t room_for = (size_t)size + IDIST__PORCH + 2;
    struct pollfd *fds = (struct pollfd *)idist__mem_alloc(&j->w->cfg.mem, sizeof *fds * room_for);
    int64_t asked_ns = idist__os_now_ns();
    idist_status s = fds ? IDIST_OK : IDIST_ERR_NO_MEMORY;

    for (i = 0; i < j->w->group.rank && s == IDIST_OK; i++) s = idist__join_connect(j, i);

    while (s == IDIST_OK && j->nlinks < size - 1) {
        bool room = idist__porch_place(j->porch) != NULL;
        n = idist__join_poll_set(j, room, fds);
        i = idist__os_ms_until(j->deadline_ns);
        if (i == 0) {
            s = idist__join_late(j);
            break;
        }

        i = poll(fds, (nfds_t)n, i < 0 || i > 20 ? 20 : i);
        if (i < 0 && errno != EINTR) s = idist__fail_errno("poll", errno);
        if (s == IDIST_OK) s = idist__join_polled(j, room, fds);

        if (s == IDIST_OK && idist__os_now_ns() - asked_ns > idist__join_slice_ms(j) * IDIST__MS) {
            s = idist__join_failed(j);
            asked_ns = idist__os_now_ns();
        }
    }

    idist__mem_free(&j->w->cfg.mem, fds);

    return s;
}

// ---- shared memory ----
//
// Once the links of a host are there, its lowest rank makes the file and passes it to the others
// through them; each maps it, reserves its own share, and says whether that went well. Only when it
// did for all is it used; if not, once more without windows (a limit on address space, say), and
// then the links stay what they are.

enum {
    IDIST__SHM_NO,
    IDIST__SHM_OK_FENCED,
    IDIST__SHM_OK
}; // votes of a rank; fenced: its kernel has no membarrier

typedef struct idist__shm_hello {
    uint64_t shm_nbytes, window_nbytes;
} idist__shm_hello;

static size_t idist__shm_nbytes(const idist__shm *m) {
    return m->window_at + (size_t)m->n * m->window_nbytes;
}

static void idist__shm_layout(idist__shm *m, size_t shm_nbytes, size_t window_nbytes) {
    size_t room, big;

    m->pipe_nbytes = 128 * 1024;
    while (m->pipe_nbytes > IDIST__PAGE && (size_t)m->n * m->pipe_nbytes > shm_nbytes / 4)
        m->pipe_nbytes /= 2;
    m->places_at = sizeof(idist__bell) + (size_t)m->n * (sizeof(idist__pipe) + m->pipe_nbytes);
    m->places_at = (m->places_at + IDIST__PAGE - 1) & ~(IDIST__PAGE - 1);
    room = shm_nbytes > m->places_at ? shm_nbytes - m->places_at : 0;
    m->chunk_nbytes[0] = room / (2 * IDIST__BUFFERS) < IDIST__CHUNK_MOST
                             ? room / (2 * IDIST__BUFFERS)
                             : IDIST__CHUNK_MOST;
    m->chunk_nbytes[1] = m->chunk_nbytes[0] / 4;
    m->chunk_nbytes[0] &= ~(IDIST__LINE - 1);
    m->chunk_nbytes[1] &= ~(IDIST__LINE - 1);
    big = idist__place_nbytes(m->chunk_nbytes[0]);
    m->nplaces = room < big ? 0 : 1 + (int)((room - big) / idist__place_nbytes(m->chunk_nbytes[1]));
    if (m->nplaces > (int)IDIST__COUNT_OF(m->taken)) m->nplaces = (int)IDIST__COUNT_OF(m->taken);
    m->share_nbytes = m->places_at;
    if (m->nplaces)
        m->share_nbytes += big + (size_t)(m->nplaces - 1) * idist__place_nbytes(m->chunk_nbytes[1]);
    m->window_at = IDIST__PAGE + (size_t)m->n * m->share_nbytes;
    m->window_nbytes = window_nbytes;
}

// As much as the host has memory, a power of two: only addresses are taken.
static size_t idist__shm_window_nbytes(int n) {
    uint64_t ram = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE),
             nbytes = (uint64_t)1 << 30;
    if (sizeof(void *) < 8) return 0;
    while (nbytes < ram && nbytes * (uint64_t)n < (uint64_t)1 << 42) nbytes *= 2;
    return (size_t)nbytes;
}

// Maps the file and reserves our share. Takes fd. 0, or an errno.
static int idist__shm_map(idist__shm *m, int fd) {
    struct stat st;
    idist__cpus cpus;
    int i, err = 0;

    if (fstat(fd, &st) != 0 || (uint64_t)st.st_size < idist__shm_nbytes(m)) err = EINVAL;
    if (!err)
        err = idist__os_reserve(fd, IDIST__PAGE + (size_t)m->me * m->share_nbytes, m->share_nbytes);
    if (!err && m->me == 0) err = idist__os_reserve(fd, 0, IDIST__PAGE);

    if (err) {
        close(fd);
        return err;
    }

    m->window =
        idist__window_open(fd, idist__shm_nbytes(m),
                           m->window_at + (size_t)m->me * m->window_nbytes, m->window_nbytes);
    if (!m->window) return ENOMEM;
    m->base = m->window->map;
    idist__os_cpus(&cpus);
    for (i = 0; i < IDIST__CPU_WORDS; i++)
        __atomic_fetch_or(&idist__shm_head_of(m)->cpus.bits[i], cpus.bits[i], __ATOMIC_RELAXED);
    idist__os_random(&m->proof, sizeof m->proof);
    idist__shm_bell(m, m->me)->pid = getpid();
    idist__shm_bell(m, m->me)->proof = m->proof;
    idist__shm_bell(m, m->me)->proof_at = (uint64_t)(uintptr_t)&m->proof;

    return 0;
}

// Whether we can read the memory of all others, and they are who we think.
static bool idist__shm_sees_all(idist__shm *m) {
    int i;

    for (i = 0; i < m->n; i++) {
        const idist__bell *b = idist__shm_bell(m, i);
        uint64_t proof = 0, at = b->proof_at;
        m->pids[i] = (pid_t)b->pid;
        if (m->pids[i] <= 0 || idist__shm_pull(m, i, at, &proof, sizeof proof) != 0 ||
            proof != b->proof)
            return false;
    }

    return true;
}

// Sends a message with a descriptor, which may be -1.
static bool idist__shm_send_fd(int sock, const void *buf, size_t nbytes, int fd,
                               int64_t deadline_ns) {
    struct msghdr msg;
    struct iovec part;
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;

    memset(&msg, 0, sizeof msg);
    memset(&control, 0, sizeof control);
    part.iov_base = (void *)(uintptr_t)buf;
    part.iov_len = nbytes;
    msg.msg_iov = &part;
    msg.msg_iovlen = 1;

    if (fd >= 0) {
        msg.msg_control = control.bytes;
        msg.msg_controllen = sizeof control.bytes;
        control.head.cmsg_level = SOL_SOCKET;
        control.head.cmsg_type = SCM_RIGHTS;
        control.head.cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(&control.head), &fd, sizeof fd);
    }

    for (;;) {
        ssize_t n = sendmsg(sock, &msg, MSG_NOSIGNAL);
        if (n == (ssize_t)nbytes) return true;
        if (n >= 0 || (errno != EINTR && errno != EAGAIN))
            return false; // a short message of a new socket is never cut
        if (errno == EAGAIN && !idist__sock_wait(sock, POLLOUT, deadline_ns)) return false;
    }
}

static bool idist__shm_recv_fd(int sock, void *buf, size_t nbytes, int *fd, int64_t deadline_ns) {
    struct msghdr msg;
    struct iovec part;
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    ssize_t n;

    *fd = -1;
    memset(&msg, 0, sizeof msg);
    part.iov_base = buf;
    part.iov_len = nbytes;
    msg.msg_iov = &part;
    msg.msg_iovlen = 1;
    msg.msg_control = control.bytes;
    msg.msg_controllen = sizeof control.bytes;
    errno = ETIMEDOUT;
    if (!idist__sock_wait(sock, POLLIN, deadline_ns)) return false;
    do n = recvmsg(sock, &msg, MSG_CMSG_CLOEXEC);
    while (n < 0 && errno == EINTR);
    if (n > 0 && msg.msg_controllen >= CMSG_LEN(sizeof(int)) &&
        control.head.cmsg_level == SOL_SOCKET && control.head.cmsg_type == SCM_RIGHTS)
        memcpy(fd, CMSG_DATA(&control.head), sizeof *fd);
    if (n == 0) errno = 0;

    return n > 0 && idist__sock_read_all(sock, (char *)buf + n, nbytes - (size_t)n, deadline_ns);
}

static idist_status idist__join_broken(idist__join *j, int rank) {
    if (errno == ETIMEDOUT)
        return idist__fail(
            IDIST_ERR_TIMEOUT,
            "initialize: rank %d on %s did not come to the vote of this host on shared memory",
            rank, j->w->nodes[rank].hostname);
    return idist__join_lost(
        j, rank, "its connection ended while the ranks of this host agreed on shared memory");
}

// Waits until a link has something to read. Asks now and then whether somebody else has given up:
// this rank may be waiting just because of that.
static idist_status idist__join_await(idist__join *j, int rank) {
    idist_status s;

    for (;;) {
        int64_t slice = idist__os_deadline(idist__join_slice_ms(j));
        if (idist__sock_wait(j->ring->links[rank].fd, POLLIN,
                             slice < j->deadline_ns ? slice : j->deadline_ns))
            return IDIST_OK;
        s = idist__join_failed(j);
        if (s != IDIST_OK) return s;
        errno = ETIMEDOUT;
        if (idist__os_ms_until(j->deadline_ns) == 0) return idist__join_broken(j, rank);
    }
}

// The least of what the ranks of this host say, on all of them. The lowest one collects.
static idist_status idist__shm_vote(idist__join *j, const idist__shm *m, const int *ranks,
                                    char *vote) {
    const idist__link *links = j->ring->links;
    int i, n = m->me == 0 ? m->n : 1, lead = ranks[0];
    idist_status s;

    for (i = 1; i < n; i++) {
        char other = 0;
        s = idist__join_await(j, ranks[i]);
        if (s != IDIST_OK) return s;
        if (!idist__sock_read_all(links[ranks[i]].fd, &other, 1, j->deadline_ns))
            return idist__join_broken(j, ranks[i]);
        if (other < *vote) *vote = other;
    }

    for (i = 1; i < n; i++)
        if (!idist__sock_write_all(links[ranks[i]].fd, vote, 1, j->deadline_ns))
            return idist__join_broken(j, ranks[i]);
    if (!m->me) return IDIST_OK;

    if (!idist__sock_write_all(links[lead].fd, vote, 1, j->deadline_ns))
        return idist__join_broken(j, lead);
    s = idist__join_await(j, lead);
    if (s != IDIST_OK) return s;

    return idist__sock_read_all(links[lead].fd, vote, 1, j->deadline_ns)
               ? IDIST_OK
               : idist__join_broken(j, lead);
}

// Makes the file and passes it on, or receives it. all: everybody has mapped it.
static idist_status idist__shm_open(idist__join *j, idist__shm *m, const int *ranks, bool *all) {
    idist__shm_hello hello;
    int i, fd = -1, err = EINVAL;
    char vote;
    idist_status s = IDIST_OK;

    hello.shm_nbytes = j->w->cfg.shm_nbytes;
    hello.window_nbytes = m->window_nbytes;
    if (m->me) s = idist__join_await(j, ranks[0]);
    if (s != IDIST_OK) return s;
    if (m->me &&
        !idist__shm_recv_fd(j->ring->links[ranks[0]].fd, &hello, sizeof hello, &fd, j->deadline_ns))
        return idist__join_broken(j, ranks[0]);
    idist__shm_layout(m, (size_t)hello.shm_nbytes, (size_t)hello.window_nbytes);
    if (m->me == 0 && (fd = idist__os_memfd(idist__shm_nbytes(m))) < 0) err = errno;

    for (i = 1; i < m->n && m->me == 0; i++)
        if (!idist__shm_send_fd(j->ring->links[ranks[i]].fd, &hello, sizeof hello, fd,
                                j->deadline_ns)) {
            idist__os_close(&fd);
            return idist__join_broken(j, ranks[i]);
        }

    if (fd >= 0) err = idist__shm_map(m, fd);
    if (err) idist__log_print(&j->w->log, IDIST_LOG_INFO, "no shared memory: %s", strerror(err));
    vote = err                            ? IDIST__SHM_NO
           : idist__os_fence_others(true) ? IDIST__SHM_OK
                                          : IDIST__SHM_OK_FENCED;
    s = idist__shm_vote(j, m, ranks, &vote);
    *all = s == IDIST_OK && vote != IDIST__SHM_NO;
    if (!*all) return s;

    if (m->me == 0) {
        idist__shm_head *head = idist__shm_head_of(m);
        head->ncores = (uint32_t)idist__cpus_count(&head->cpus);
        head->fenced = vote == IDIST__SHM_OK_FENCED || m->n > (int)head->ncores;
    }

    vote = idist__shm_sees_all(m); // everybody has mapped it by now, and left its proof
    s = idist__shm_vote(j, m, ranks, &vote);
    m->far = vote != 0;

    return s;
}

static void idist__shm_free(const idist_allocator *mem, idist__shm *m) {
    if (!m) return;
    if (m->window) idist__window_close(m->window);
    idist__mem_free(mem, m->local);
    idist__mem_free(mem, m->pids);
    idist__mem_free(mem, m->pieces);
    idist__mem_free(mem, m->ports);
    idist__mem_free(mem, m);
}

// From here on the links inside this host go through pipes.
static void idist__shm_take_over(idist__join *j, idist__shm *m, const int *ranks) {
    const idist__shm_head *head = idist__shm_head_of(m);
    int i;

    m->fenced = head->fenced != 0;
    m->crowded = m->n > (int)head->ncores;
    j->w->ncores = (int)head->ncores;

    for (i = 0; i < m->n; i++) {
        idist__link *l = &j->ring->links[ranks[i]];
        idist__shm_port *p = &m->ports[i];
        m->local[ranks[i]] = i;
        p->fd = -1;
        if (i == m->me) continue;
        p->shm = m;
        p->peer = i;
        p->in = idist__shm_pipe(m, i, m->me);
        p->out = idist__shm_pipe(m, m->me, i);
        p->fd = l->fd;
        l->fd = -1;
        l->port = p;
        l->transport = &idist__transport_shm;
        j->ring->nstreams--;
    }

    j->ring->shm = m;
}

static idist_status idist__join_share(idist__join *j, const idist__record *records) {
    const idist_allocator *mem = &j->w->cfg.mem;
    int i, me = j->w->group.rank, n = 0, attempt, *ranks;
    idist__shm *m;
    bool all = false;
    idist_status s = IDIST_OK;

    if (!records[me].shm) return IDIST_OK;
    m = (idist__shm *)idist__mem_alloc(mem, sizeof *m);
    if (!m) return IDIST_ERR_NO_MEMORY;
    m->local = ranks = (int *)idist__mem_alloc(mem, sizeof(int) * 2 * (size_t)j->w->group.size);
    m->ports =
        (idist__shm_port *)idist__mem_alloc(mem, sizeof *m->ports * (size_t)j->w->group.size);
    m->pids = (pid_t *)idist__mem_alloc(mem, sizeof *m->pids * (size_t)j->w->group.size);
    m->pieces = (char *)idist__mem_raw(mem, IDIST__FAR_PIECE * (size_t)j->w->group.size);

    if (!m->local || !m->ports || !m->pids || !m->pieces) {
        idist__shm_free(mem, m);
        return IDIST_ERR_NO_MEMORY;
    }

    ranks += j->w->group.size;

    for (i = 0; i < j->w->group.size; i++) {
        m->local[i] = -1;
        if (!records[i].shm || records[i].host != records[me].host || !records[i].local[0])
            continue;
        if (i == me) m->me = n;
        ranks[n++] = i;
    }

    m->n = n;
    m->window_nbytes = idist__shm_window_nbytes(n);

    for (attempt = 0; attempt < 2 && n > 1 && s == IDIST_OK && !all; attempt++) {
        if (attempt) m->window_nbytes = 0;
        s = idist__shm_open(j, m, ranks, &all);
        if (m->window && !all) idist__window_close(m->window);
        if (!all) m->window = NULL;
    }

    if (s == IDIST_OK && all) idist__shm_take_over(j, m, ranks);
    else idist__shm_free(mem, m);

    return s;
}

// Everything is there. Rank 0 closes the store when that is so on all ranks: until then a death is
// told through it. Rank 0 may do so before it has answered whoever told it.
static idist_status idist__join_leave(idist__join *j) {
    int64_t there = 0;
    char key[128], one = 1;
    idist_status s;

    idist__join_key(j, key, sizeof key, "njoined", -1);
    s = idist__join_set(j, "joined", j->w->group.rank, &one, sizeof one);
    if (s == IDIST_OK) s = idist_store_add(j->store, key, 1, &there);
    if (s != IDIST_OK) return s;
    if (there == j->w->group.size) idist__join_set(j, "all", -1, &one, sizeof one);
    idist__join_will(j, NULL);

    return j->own_store && j->w->group.rank == 0
               ? idist__join_get(j, "all", -1, "joined", &one, sizeof one)
               : IDIST_OK;
}

static idist_status idist__join_run(idist__join *j) {
    idist__world *w = j->w;
    int i, n = w->group.size;
    idist__record *records =
        (idist__record *)idist__mem_alloc(&w->cfg.mem, sizeof *records * (size_t)n);
    idist_status s = IDIST_OK;

    j->shakes = (idist__handshake *)idist__mem_alloc(&w->cfg.mem, sizeof *j->shakes * (size_t)n);
    j->again_ns = (int64_t *)idist__mem_alloc(&w->cfg.mem, sizeof *j->again_ns * (size_t)n);
    j->porch = (idist__porch *)idist__mem_raw(&w->cfg.mem, sizeof *j->porch);
    if (j->porch) idist__porch_init(j->porch);

    if (!records || !j->shakes || !j->again_ns || !j->porch) {
        idist__mem_free(&w->cfg.mem, records);
        idist__mem_free(&w->cfg.mem, j->shakes);
        j->shakes = NULL;
        return IDIST_ERR_NO_MEMORY;
    }

    for (i = 0; i < n; i++) j->shakes[i].fd = -1;
    if (s == IDIST_OK) s = idist__join_job(j);
    if (s == IDIST_OK) s = idist__join_table(j, records);
    if (s == IDIST_OK) s = idist__join_links(j);
    if (s == IDIST_OK) s = idist__join_share(j, records);
    if (s == IDIST_OK) s = idist__join_leave(j);
    j->records = NULL;
    idist__mem_free(&w->cfg.mem, records);

    return s;
}

static void idist__ring_free(idist__ring *ring) {
    idist_allocator *mem = &ring->w->cfg.mem;
    int i;

    for (i = 0; ring->links && i < ring->w->group.size; i++) {
        idist__link *l = &ring->links[i];
        idist__message *m, *next;

        if (l->open) l->transport->close(l->port);
        idist__link_write_failed(ring, l); // frees what did not go out

        for (m = l->early; m; m = next) {
            next = m->next;
            idist__message_free(ring, l, m);
        }

        idist__mem_free(mem, l->stage);
    }

    while (ring->idle) {
        idist__verb *v = ring->idle;
        ring->idle = v->next;
        idist__mem_free(mem, v);
    }

    idist__os_close(&ring->wake);
    idist__shm_free(mem, ring->shm);
    idist__mem_free(mem, ring->links);
    idist__mem_free(mem, ring->polls);
    idist__mem_free(mem, ring->poll_ranks);
    idist__mem_free(mem, ring);
}

static idist_status idist__ring_new(idist__world *w, idist__ring **out) {
    idist__ring *ring = (idist__ring *)idist__mem_alloc(&w->cfg.mem, sizeof *ring);
    size_t n = (size_t)w->group.size, i;

    *out = ring;
    if (!ring) return IDIST_ERR_NO_MEMORY;
    ring->w = w;
    ring->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    ring->links = (idist__link *)idist__mem_alloc(&w->cfg.mem, sizeof *ring->links * n);
    ring->polls = (struct pollfd *)idist__mem_alloc(&w->cfg.mem, sizeof *ring->polls * 2 * (n + 1));
    ring->poll_ranks = (int *)idist__mem_alloc(&w->cfg.mem, sizeof(int) * 2 * (n + 1));
    if (!ring->links || !ring->polls || !ring->poll_ranks) return IDIST_ERR_NO_MEMORY;

    for (i = 0; i < n; i++) {
        idist__link *l = &ring->links[i];
        l->out_end = &l->out;
        l->early_end = &l->early;
        l->window = l->their_window = IDIST__WINDOW_BYTES;
        l->fd = -1;
        if ((l->stage = (char *)idist__mem_raw(&w->cfg.mem, IDIST__STAGE_BYTES)) == NULL)
            return IDIST_ERR_NO_MEMORY;
    }

    return ring->wake < 0 ? idist__fail_errno("eventfd", errno) : IDIST_OK;
}

static idist_status idist__ring_open(idist__world *w) {
    idist__join j;
    idist_status s = IDIST_OK;
    int i;

    memset(&j, 0, sizeof j);
    j.w = w;
    j.listeners[0] = j.listeners[1] = -1;
    j.deadline_ns = idist__os_deadline(w->cfg.init_timeout_ms);
    // Now, and not when it is needed: with a second thread, such as the server of the store, the
    // kernel takes 15 ms for it.
    if (w->cfg.transport == 0 && w->group.size > 1) idist__os_fence_others(true);
    if (w->group.size == 1)
        idist__copy_text(w->nodes[0].hostname, sizeof w->nodes[0].hostname, w->hostname);
    else
        s = idist__join_store(
            &j); // first, so that the others hear of everything that goes wrong here
    if (s == IDIST_OK) s = idist__ring_new(w, &j.ring);
    if (s == IDIST_OK && w->group.size > 1) s = idist__join_run(&j);
    idist__join_store_lost(&j, s);
    if (s != IDIST_OK) idist__join_tell(&j, s);
    idist__os_close(&w->cfg.listener);
    idist__os_close(&j.listeners[0]);
    idist__os_close(&j.listeners[1]);
    for (i = 0; j.shakes && i < w->group.size; i++) idist__os_close(&j.shakes[i].fd);
    if (j.porch) idist__porch_close(j.porch);
    idist__mem_free(&w->cfg.mem, j.porch);
    idist__mem_free(&w->cfg.mem, j.again_ns);
    idist__mem_free(&w->cfg.mem, j.shakes);

    if (j.own_store) {
        char text[sizeof idist__me.text];
        memcpy(text, idist__me.text, sizeof text);
        idist_store_close(&j.store);
        memcpy(idist__me.text, text, sizeof text);
    }

    w->impl = j.ring;
    if (s != IDIST_OK && j.ring) idist__ring_free(j.ring);

    return s;
}

// A connection that is closed with bytes in it that we have not read takes with it what the other
// side has not read. So we say that nothing more comes, and throw away what still does until the
// other side ends too, or for a moment.
static void idist__ring_linger(idist__ring *ring, int64_t until_ns) {
    char waste[4096];
    int i, left;

    do {
        struct pollfd *p = ring->polls;

        for (i = left = 0; i < ring->w->group.size; i++) {
            idist__link *l = &ring->links[i];
            if (!l->open || !l->transport->lossy_close) continue;
            shutdown(l->fd, SHUT_WR);
            while (l->transport->read(l->port, waste, sizeof waste) > 0) continue;
            p[left].fd = l->fd;
            p[left].events = POLLIN;
            if (idist__sock_at_end(l->fd)) continue;
            left++;
        }

        if (left) poll(p, (nfds_t)left, idist__os_ms_until(until_ns));
    } while (left && idist__os_ms_until(until_ns) != 0);
}

// After the last barrier everybody says BYE. Where closing a connection with unread bytes in it
// could destroy the other side's, we wait for its BYE. A rank that leaves otherwise only lets its
// last words (ABORT) go out.
static void idist__ring_close(idist__world *w, bool clean) {
    idist__ring *ring = idist__ring_of(w);
    int64_t deadline_ns = idist__os_deadline(clean ? 5000 : 200);
    idist__frame f;
    int i;

    memset(&f, 0, sizeof f);
    f.type = IDIST__BYE;
    pthread_mutex_lock(&w->lock);
    w->group.rank = -1; // frames that still come concern nobody
    for (i = 0; i < w->group.size && clean; i++)
        idist__link_control(ring, &ring->links[i], &f, NULL);
    idist__ring_drain(ring, clean, deadline_ns);
    if (!clean) idist__ring_linger(ring, deadline_ns);
    idist__share_free(&w->group);
    pthread_mutex_unlock(&w->lock);
    idist__ring_free(ring);
}

static idist_status idist__ring_claim(idist__config *config, const char **why) {
    *why = "a world of 1 needs no backend";
    return config->world_size == 1 && !config->backends[0] ? IDIST_ERR_NO_BACKEND : IDIST_OK;
}

const idist_backend_api *idist_ring_backend(void) {
    // clang-format off
    static const idist_backend_api api = {
        IDIST__BACKEND_ABI, sizeof(idist_backend_api), "ring", sizeof(idist__op), sizeof(idist__ring_group),
        idist__ring_claim, idist__ring_open, idist__ring_close,
        idist__ring_group_open, idist__ring_group_close, idist__share_offer_place, idist__host_open,
        idist__ring_quick, idist__ring_start, idist__ring_progress, idist__ring_sleep, idist__ring_wake,
        idist__ring_cancel, idist__ring_tell, idist__ring_flush, idist__ring_announce, idist__ring_missing,
        idist__ring_alloc, NULL, NULL, NULL};

    // clang-format on
    return &api;
}

#include "idist_end.h"

#endif // IDIST_IMPLEMENTATION
