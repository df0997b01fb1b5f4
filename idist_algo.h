/* idist_algo.h - v0.1.0 - collectives made of messages - MIT licence

    Part of the implementation of idist; idist.h includes it where IDIST_IMPLEMENTATION is defined.

CONTENTS

      [algo:algo]    the collectives, in two kinds: few steps for small messages, few bytes for large ones
      [algo:choose]  which algorithm, with which scratch
      [algo:host]    a group over several hosts: inside each host first, then between one rank of each
*/
#ifndef IDIST_ALGO_H
#define IDIST_ALGO_H

//------------------------------------------------------------------------------
// [algo:algo]  the collectives, in two kinds: few steps for small messages, few bytes for large ones
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
// [algo:choose]  which algorithm, with which scratch
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
// [algo:host]  a group over several hosts: inside each host first, then between one rank of each
// uses mem base:type reduce hash world self msg:types op link share
// uses engine:engine
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

#endif // IDIST_ALGO_H
