/* idist_algo.h - v0.2.0 - algorithms of the collectives - MIT licence

    How a collective becomes messages between ranks. Each section holds one family of algorithms and
    can be read by itself; start here to learn how collectives work. No algorithm sees a socket: it
    posts non-blocking sends and receives of idist_msg.h, and runs again ([msg:op]) whenever one of
    them completes.

    Part of the implementation of idist: idist_ring.h includes it. [engine:task] asks [algo:choose]
    for the algorithm of a collective: one over messages; [algo:host], which splits it into calls
    inside hosts and between them; or one of idist_share.h, for ranks that share memory.

CONTENTS

      [algo:stream]         pipelines: chunks that are received, reduced and sent on
      [algo:ring]           all_reduce, reduce_scatter and all_gather of large messages
      [algo:chain]          broadcast, reduce and scan of large messages
      [algo:direct]         one message per pair of ranks: gather, scatter, all_to_all, v-forms
      [algo:dissemination]  barrier
      [algo:tree]           broadcast, reduce, gather and scatter of small messages
      [algo:doubling]       all_reduce, reduce_scatter and scan of small messages
      [algo:bruck]          all_gather and all_to_all of small messages
      [algo:host]           several hosts: first inside each host, then between their leaders
      [algo:choose]         which algorithm a call uses, and its scratch memory

COSTS

    n is the number of ranks, B the bytes that one rank contributes, c the number of chunks; log is
    log2, rounded up. A message takes a latency a, plus b per byte; of the latency, o occupies the
    sender or the receiver, and the rest of several messages overlaps. A reduction also takes a time
    per byte received, so it has the factors of b.

      operation        few steps (latency)                  few bytes (bandwidth)
      barrier          dissemination  a log n               -
      broadcast        binomial tree  (a + bB) log n        chain   (a + bB/c) (n - 2 + c)
      reduce           binomial tree  (a + bB) log n        chain   (a + bB/c) (n - 2 + c)
      all_reduce       doubling       (a + bB) log n        ring    2 (n - 1) (a + bB/n)
      reduce_scatter   doubling       (a + bBn) log n       ring    (n - 1) (a + bB)
      all_gather       Bruck          a log n + bB (n - 1)  ring    (n - 1) (a + bB)
      gather, scatter  binomial tree  a log n + bB (n - 1)  direct  a + (n - 1) (o + bB)
      all_to_all       Bruck          (a + bBn/2) log n     direct  a + (n - 1) (o + bB)
      scan             doubling       (a + bB) log n        chain   (a + bB/c) (n - 2 + c)
      exscan           doubling       (a + bB) (log n + 1)  chain   (a + bB/c) (n - 2 + c)
      v-forms          -                                    direct; all_gatherv as a ring;
                                                            reduce_scatterv as reduce_scatter

    For reduce_scatter, scatter and all_to_all B is one block of n; elsewhere it is the whole
    buffer. Which column a call uses is a table: see idist__choose_table. tests/unit/model.c runs
    these algorithms on a LogGP network (make model); make tune measures where the columns meet.

REPRODUCIBILITY

    Each block of a result is computed in one place, or by ranks that combine the same operands in
    the same order. So all ranks get the same bits, and no order depends on which message arrives
    first.

SOURCES

    Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH",
    2005. Bruck et al., "Efficient Algorithms for All-to-All Communications", 1997. Patarasuk and
    Yuan, "Bandwidth optimal all-reduce", 2009. Hensgen, Finkel, Manber, "Two algorithms for barrier
    synchronization", 1988. Hillis and Steele, "Data parallel algorithms", 1986.
*/
#ifndef IDIST_ALGO_H
#define IDIST_ALGO_H

//------------------------------------------------------------------------------
// [algo:stream]  pipelines: chunks that are received, reduced and sent on
// uses model msg:types msg:op send recv
//
// The bandwidth algorithms cut a block into chunks of IDIST__CHUNK_BYTES, so that a rank can reduce
// and send on one chunk while it receives the next:
//
//   receive   | c0 | c1 | c2 | c3 |
//   take           | c0 | c1 | c2 | c3 |          take: reduce into the result, for example
//   send                | c0 | c1 | c2 | c3 |
//
// An algorithm describes its stream by numbers and three functions:
//
//   recv_at(i)   peer, address and size of the i-th item to receive; address NULL: a scratch slot
//   take(i)      what to do once item i has arrived; NULL: nothing
//   send_at(i)   peer, address and size of the i-th item to send
//   head         items that can be sent before anything has been received
//
// Item i is sent when i < head or item i - head has been taken: a ring sends its own block first
// (head = its chunks) and then forwards what it took; an inner link of a chain only forwards
// (head = 0). Items are taken in order. The tag of a message is the index of its item.
//
// Some receives are posted ahead, each in a slot. The sender may send only what it knows to be
// posted, so on a network of high latency it takes more slots: enough for the data in flight, and a
// few that are being taken.
//------------------------------------------------------------------------------

static size_t idist__stream_slot_count(const idist_group *g) {
    uint64_t under_way = idist__ring_group_of(g)->spans_hosts ? g->w->network_nbytes : 0;
    uint64_t count = (under_way + IDIST__CHUNK_BYTES - 1) / IDIST__CHUNK_BYTES + 2;

    if (count < IDIST__SLOTS) return IDIST__SLOTS;
    return count < IDIST__SLOTS_MOST ? (size_t)count : IDIST__SLOTS_MOST;
}

static char *idist__stream_slot(const idist__op *o, size_t index) {
    const idist__stream_op *stream = &o->u.stream;
    return stream->slots + (index % o->slot_count) * stream->chunk_count * o->size;
}

static void idist__stream_run(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__stream_op *stream = &o->u.stream;

    for (;;) {
        while (stream->posted < stream->recv_total &&
               stream->posted < stream->taken + o->slot_count) {
            size_t index = stream->posted++;
            idist__item item = stream->recv_at(t, index);
            char *data = item.data;

            if (!data && stream->slots) data = idist__stream_slot(o, index);
            idist__recv_step(t, (int)(index % o->slot_count), item.peer, (uint32_t)index, data,
                             item.nbytes);
        }

        while (stream->sent < stream->send_total &&
               (stream->sent < stream->head || stream->sent - stream->head < stream->taken) &&
               o->sends_pending < (int)o->slot_count) {
            size_t index = stream->sent++;
            idist__item item = stream->send_at(t, index);
            idist__send_step(t, item.peer, (uint32_t)index, item.data, item.nbytes);
        }

        if (stream->taken == stream->posted ||
            (o->slots_pending & (1u << (stream->taken % o->slot_count))))
            break;
        if (stream->take) stream->take(t, stream->taken);
        stream->taken++;
    }

    if (stream->taken == stream->recv_total && stream->sent == stream->send_total &&
        !o->sends_pending)
        idist__op_done(t);
}

// Chunk `index` of a block of `count` elements. Chunks beyond the end of the block are empty.
static idist__item idist__stream_chunk(const idist__op *o, char *block, size_t count, size_t index,
                                       int peer) {
    const idist__stream_op *stream = &o->u.stream;
    idist__item item;
    size_t first = index * stream->chunk_count < count ? index * stream->chunk_count : count;
    size_t chunk_count = count - first < stream->chunk_count ? count - first : stream->chunk_count;

    item.peer = peer;
    item.data = block ? block + first * o->size : NULL;
    item.nbytes = chunk_count * o->size;

    return item;
}

// Cuts blocks of at most `count` elements into chunks.
static void idist__stream_cut(idist__op *o, size_t count) {
    idist__stream_op *stream = &o->u.stream;
    size_t chunk_count = IDIST__CHUNK_BYTES / (o->size ? o->size : 1);

    if (!chunk_count) chunk_count = 1; // an element is larger than a chunk
    stream->chunk_count = chunk_count;
    stream->block_chunks = 1;
    if (count) stream->block_chunks = (count - 1) / chunk_count + 1;
    if (stream->block_chunks == 1) stream->chunk_count = count ? count : 1;
}

static void idist__stream_begin(idist__op *o, size_t recv_count, size_t send_count, size_t head,
                                idist__item (*recv_at)(idist__task *, size_t),
                                idist__item (*send_at)(idist__task *, size_t),
                                void (*take)(idist__task *, size_t)) {
    idist__stream_op *stream = &o->u.stream;

    stream->recv_total = recv_count;
    stream->send_total = send_count;
    stream->head = head;
    stream->recv_at = recv_at;
    stream->send_at = send_at;
    stream->take = take;
    o->run = idist__stream_run;
}

//------------------------------------------------------------------------------
// [algo:ring]  all_reduce, reduce_scatter and all_gather of large messages
// uses base:type reduce model block extent msg:op combine stream
//
// The ranks form a ring. Each one sends to its right neighbour (rank + 1) and receives from its
// left one, so all links are busy in both directions all the time.
//
// all_reduce. The buffer is cut into n blocks, and the blocks travel around the ring twice. In step
// s rank r sends block r - s (mod n) and receives block r - s - 1:
//
//            first lap: reduce               second lap: copy
//            step 0   step 1   step 2        step 3   step 4   step 5
//   rank 0   sends 0  sends 3  sends 2  ->1  sends 1  sends 0  sends 3
//   rank 1   sends 1  sends 0  sends 3  ->2  sends 2  sends 1  sends 0      ->b: holds the complete
//   rank 2   sends 2  sends 1  sends 0  ->3  sends 3  sends 2  sends 1           sum of block b
//   rank 3   sends 3  sends 2  sends 1  ->0  sends 0  sends 3  sends 2
//
// In the first lap a rank adds its own part to each block it receives and forwards the sum; after
// n - 1 steps every rank holds the complete sum of one block. The second lap hands those sums to
// everybody.
//
//   bytes sent per rank   2 B (n - 1) / n, the least possible, whatever n is
//   latency               2 (n - 1) messages in sequence: the reason to prefer doubling for small B
//
// Nothing is copied beforehand: the first sends come straight from the send buffer, and sums are
// written straight to the receive buffer. In place is safe because the second lap overwrites a
// block only with data that depends on our first send of it.
//
// reduce_scatter is the first lap alone, begun one block earlier, so that rank r ends up with block
// r: (n - 1) messages of B bytes. Partial sums stay in scratch; the last one goes to the receive
// buffer.
//
// all_gather and all_gatherv are the second lap alone: (n - 1) messages of B bytes.
//
// All three start at a different rank for each block, so a reduction needs an operation that
// commutes.
//------------------------------------------------------------------------------

// The block that item `index` belongs to, `back` ranks further left.
static int idist__ring_algo_block(const idist__op *o, size_t index, int back) {
    return idist__block_wrap(o->rank - (int)(index / o->u.stream.block_chunks) - back, o->n);
}

static int idist__ring_algo_left(const idist__op *o) {
    return idist__block_wrap(o->rank - 1, o->n);
}

static int idist__ring_algo_right(const idist__op *o) {
    return idist__block_wrap(o->rank + 1, o->n);
}

// ---- all_reduce ----

static bool idist__ring_algo_in_first_lap(const idist__op *o, size_t index) {
    return index < (size_t)(o->n - 1) * o->u.stream.block_chunks;
}

// The chunk of item `index` in a block of a buffer; no address when there is no buffer.
static idist__item idist__ring_algo_all_reduce_item(const idist__op *o, const char *buffer,
                                                    size_t index, int block, int peer) {
    size_t at = idist__block_at(o->count, o->n, block) * o->size;
    char *data = buffer ? (char *)(uintptr_t)buffer + at : NULL;

    return idist__stream_chunk(o, data, idist__block_count(o->count, o->n, block),
                               index % o->u.stream.block_chunks, peer);
}

static idist__item idist__ring_algo_all_reduce_recv(idist__task *t, size_t index) {
    const idist__op *o = idist__op_of(t);
    const char *to = idist__ring_algo_in_first_lap(o, index) ? NULL : o->out;
    return idist__ring_algo_all_reduce_item(o, to, index, idist__ring_algo_block(o, index, 1),
                                            idist__ring_algo_left(o));
}

static idist__item idist__ring_algo_all_reduce_send(idist__task *t, size_t index) {
    const idist__op *o = idist__op_of(t);
    const char *from = index < o->u.stream.block_chunks ? o->in : o->out;
    return idist__ring_algo_all_reduce_item(o, from, index, idist__ring_algo_block(o, index, 0),
                                            idist__ring_algo_right(o));
}

// Whether the item completes the sum of its chunk: it is in the last step of the first lap.
static bool idist__ring_algo_completes_sum(const idist__op *o, size_t index) {
    return index >= (size_t)(o->n - 2) * o->u.stream.block_chunks;
}

// AVG divides a chunk here, once for all ranks and while it is in the cache.
static void idist__ring_algo_all_reduce_take(idist__task *t, size_t index) {
    const idist__op *o = idist__op_of(t);
    idist_dtype dtype = idist__dtype_is_narrow(t->call.dtype) ? IDIST_F32 : t->call.dtype;
    int block = idist__ring_algo_block(o, index, 1);
    idist__item own, sum;
    const void *both[2];
    size_t count;

    if (!idist__ring_algo_in_first_lap(o, index)) return; // it was received where it belongs
    own = idist__ring_algo_all_reduce_item(o, o->in, index, block, 0);
    sum = idist__ring_algo_all_reduce_item(o, o->out, index, block, 0);
    count = own.nbytes / o->size;
    both[0] = idist__stream_slot(o, index);
    both[1] = own.data;

    if (t->call.op == IDIST_AVG && idist__ring_algo_completes_sum(o, index))
        idist__reduce_many(sum.data, both, 2, count, dtype, IDIST_AVG, o->n);
    else idist__combine(t, sum.data, (const char *)both[0], own.data, count, t->call.dtype);
}

static void idist__ring_algo_all_reduce(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__stream_op *stream = &o->u.stream;
    size_t steps = 2 * (size_t)(o->n - 1);

    idist__stream_cut(o, idist__block_count(o->count, o->n, 0));
    idist__stream_begin(o, steps * stream->block_chunks, steps * stream->block_chunks,
                        stream->block_chunks, idist__ring_algo_all_reduce_recv,
                        idist__ring_algo_all_reduce_send, idist__ring_algo_all_reduce_take);
}

// ---- reduce_scatter, reduce_scatterv ----

// The elements of the largest block.
static size_t idist__ring_algo_largest_block(const idist__op *o, const idist__call *c) {
    size_t largest = 0;
    int i;

    for (i = 0; i < o->n; i++)
        if (idist__extent_block_count(c, i) > largest) largest = idist__extent_block_count(c, i);
    return largest;
}

// The chunk of item `index` in a block of a buffer of n blocks; no address when there is no buffer.
static idist__item idist__ring_algo_reduce_scatter_item(const idist__task *t, const char *buffer,
                                                        size_t index, int block, int peer) {
    const idist__op *o = idist__op_of(t);
    size_t at = idist__extent_block_at(&t->call, block) * o->size;
    char *data = buffer ? (char *)(uintptr_t)buffer + at : NULL;

    return idist__stream_chunk(o, data, idist__extent_block_count(&t->call, block),
                               index % o->u.stream.block_chunks, peer);
}

static idist__item idist__ring_algo_reduce_scatter_recv(idist__task *t, size_t index) {
    const idist__op *o = idist__op_of(t);
    return idist__ring_algo_reduce_scatter_item(t, NULL, index, idist__ring_algo_block(o, index, 2),
                                                idist__ring_algo_left(o));
}

static idist__item idist__ring_algo_reduce_scatter_send(idist__task *t, size_t index) {
    const idist__op *o = idist__op_of(t);
    const idist__stream_op *stream = &o->u.stream;
    const char *from = index < stream->block_chunks ? o->in : o->work;

    return idist__ring_algo_reduce_scatter_item(t, from, index, idist__ring_algo_block(o, index, 1),
                                                idist__ring_algo_right(o));
}

static void idist__ring_algo_reduce_scatter_take(idist__task *t, size_t index) {
    const idist__op *o = idist__op_of(t);
    const idist__stream_op *stream = &o->u.stream;
    int block = idist__ring_algo_block(o, index, 2);
    idist__item own, sum;

    own = idist__ring_algo_reduce_scatter_item(t, o->in, index, block, 0);
    if (idist__ring_algo_completes_sum(o, index))
        sum = idist__stream_chunk(o, o->out, o->count, index % stream->block_chunks, 0);
    else sum = idist__ring_algo_reduce_scatter_item(t, o->work, index, block, 0);
    idist__combine(t, sum.data, idist__stream_slot(o, index), own.data, own.nbytes / o->size,
                   t->call.dtype);
}

static void idist__ring_algo_reduce_scatter(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__stream_op *stream = &o->u.stream;
    size_t items;

    idist__stream_cut(o, idist__ring_algo_largest_block(o, &t->call));
    items = (size_t)(o->n - 1) * stream->block_chunks;
    idist__stream_begin(o, items, items, stream->block_chunks, idist__ring_algo_reduce_scatter_recv,
                        idist__ring_algo_reduce_scatter_send, idist__ring_algo_reduce_scatter_take);
}

// ---- all_gather, all_gatherv ----

static size_t idist__ring_algo_all_gather_at(const idist__task *t, int block) {
    const idist__call *c = &t->call;
    if (c->recvcounts) return idist__extent_displ(c->recvcounts, c->recvdispls, block);
    return (size_t)block * idist__op_of(t)->count;
}

static idist__item idist__ring_algo_all_gather_item(const idist__task *t, size_t index, int block,
                                                    int peer) {
    const idist__op *o = idist__op_of(t);
    size_t count = t->call.recvcounts ? t->call.recvcounts[block] : o->count;
    char *data = o->out + idist__ring_algo_all_gather_at(t, block) * o->size;
    return idist__stream_chunk(o, data, count, index % o->u.stream.block_chunks, peer);
}

static idist__item idist__ring_algo_all_gather_recv(idist__task *t, size_t index) {
    const idist__op *o = idist__op_of(t);
    return idist__ring_algo_all_gather_item(t, index, idist__ring_algo_block(o, index, 1),
                                            idist__ring_algo_left(o));
}

static idist__item idist__ring_algo_all_gather_send(idist__task *t, size_t index) {
    const idist__op *o = idist__op_of(t);
    return idist__ring_algo_all_gather_item(t, index, idist__ring_algo_block(o, index, 0),
                                            idist__ring_algo_right(o));
}

static void idist__ring_algo_all_gather(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__stream_op *stream = &o->u.stream;
    const size_t *counts = t->call.recvcounts;
    size_t largest = o->count;
    size_t items;
    int i;

    for (i = 0; counts && i < o->n; i++)
        if (counts[i] > largest) largest = counts[i];

    idist__block_copy(o->out + idist__ring_algo_all_gather_at(t, o->rank) * o->size, o->in,
                      o->nbytes);
    idist__stream_cut(o, largest);
    items = (size_t)(o->n - 1) * stream->block_chunks;
    idist__stream_begin(o, items, items, stream->block_chunks, idist__ring_algo_all_gather_recv,
                        idist__ring_algo_all_gather_send, NULL);
}

//------------------------------------------------------------------------------
// [algo:chain]  broadcast, reduce and scan of large messages
// uses kind model block msg:op combine stream
//
// The ranks stand in a line, and chunks travel along it like buckets in a bucket brigade. Once the
// first chunk has reached the end, every link carries data all the time:
//
//   n = 4, c = 3    step 0   step 1   step 2   step 3   step 4
//   link 0 -> 1     chunk 0  chunk 1  chunk 2
//   link 1 -> 2              chunk 0  chunk 1  chunk 2
//   link 2 -> 3                       chunk 0  chunk 1  chunk 2
//
//   bytes sent per rank   B
//   latency               n - 2 + c steps of one chunk each: hardly more than B when c is large
//
// v numbers the ranks from the root. A broadcast runs upwards from v = 0; a reduction runs from the
// last rank down to v = 0, each rank adding its own part. A scan runs along the ranks themselves
// and keeps their order, so it also serves operations that do not commute.
//
// A binomial tree sends B bytes log n times in sequence; it is faster while B is small.
//------------------------------------------------------------------------------

static int idist__chain_relative_rank(const idist__op *o) { // v
    return idist__block_wrap(o->rank - o->root, o->n);
}

// ---- broadcast ----

static idist__item idist__chain_broadcast_recv(idist__task *t, size_t index) {
    const idist__op *o = idist__op_of(t);
    return idist__stream_chunk(o, o->out, o->count, index, idist__block_wrap(o->rank - 1, o->n));
}

static idist__item idist__chain_broadcast_send(idist__task *t, size_t index) {
    const idist__op *o = idist__op_of(t);
    return idist__stream_chunk(o, o->out, o->count, index, idist__block_wrap(o->rank + 1, o->n));
}

static void idist__chain_broadcast(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__stream_op *stream = &o->u.stream;
    int v = idist__chain_relative_rank(o);
    bool first = v == 0;
    bool last = v == o->n - 1;

    idist__stream_cut(o, o->count);
    idist__stream_begin(o, first ? 0 : stream->block_chunks, last ? 0 : stream->block_chunks,
                        first ? stream->block_chunks : 0, idist__chain_broadcast_recv,
                        idist__chain_broadcast_send, NULL);
}

// ---- reduce ----

static idist__item idist__chain_reduce_recv(idist__task *t, size_t index) {
    const idist__op *o = idist__op_of(t);
    return idist__stream_chunk(o, NULL, o->count, index, idist__block_wrap(o->rank + 1, o->n));
}

static idist__item idist__chain_reduce_send(idist__task *t, size_t index) {
    const idist__op *o = idist__op_of(t);
    const char *from = idist__chain_relative_rank(o) == o->n - 1 ? o->in : o->work;
    return idist__stream_chunk(o, (char *)(uintptr_t)from, o->count, index,
                               idist__block_wrap(o->rank - 1, o->n));
}

static void idist__chain_reduce_take(idist__task *t, size_t index) {
    const idist__op *o = idist__op_of(t);
    idist__item own = idist__stream_chunk(o, (char *)(uintptr_t)o->in, o->count, index, 0);
    char *to = o->rank == o->root ? o->out : o->work;
    idist__item sum = idist__stream_chunk(o, to, o->count, index, 0);

    idist__combine(t, sum.data, own.data, idist__stream_slot(o, index), own.nbytes / o->size,
                   t->call.dtype);
}

static void idist__chain_reduce(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__stream_op *stream = &o->u.stream;
    int v = idist__chain_relative_rank(o);
    bool first = v == o->n - 1;
    bool last = v == 0;

    idist__stream_cut(o, o->count);
    idist__stream_begin(o, first ? 0 : stream->block_chunks, last ? 0 : stream->block_chunks,
                        first ? stream->block_chunks : 0, idist__chain_reduce_recv,
                        idist__chain_reduce_send, idist__chain_reduce_take);
}

// ---- scan, exscan ----
//
// A rank sends on the prefix that includes its own part. Its result is that prefix (scan) or the
// one it received (exscan).

static idist__item idist__chain_scan_recv(idist__task *t, size_t index) {
    const idist__op *o = idist__op_of(t);
    return idist__stream_chunk(o, NULL, o->count, index, o->rank - 1);
}

static idist__item idist__chain_scan_send(idist__task *t, size_t index) {
    const idist__op *o = idist__op_of(t);
    const char *from = t->call.kind == IDIST__SCAN ? o->out : o->work;

    if (o->rank == 0) from = o->in;
    return idist__stream_chunk(o, (char *)(uintptr_t)from, o->count, index, o->rank + 1);
}

static void idist__chain_scan_take(idist__task *t, size_t index) {
    const idist__op *o = idist__op_of(t);
    idist__item own = idist__stream_chunk(o, (char *)(uintptr_t)o->in, o->count, index, 0);
    idist__item out = idist__stream_chunk(o, o->out, o->count, index, 0);
    char *received = idist__stream_slot(o, index);
    size_t count = own.nbytes / o->size;

    if (t->call.kind == IDIST__SCAN) {
        idist__combine(t, out.data, received, own.data, count, t->call.dtype);
        return;
    }

    if (o->rank < o->n - 1) {
        idist__item sum = idist__stream_chunk(o, o->work, o->count, index, 0);
        idist__combine(t, sum.data, received, own.data, count, t->call.dtype);
    }

    idist__block_copy(out.data, received, out.nbytes); // last: in place, this overwrites `own`
}

static void idist__chain_scan(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__stream_op *stream = &o->u.stream;
    bool first = o->rank == 0;
    bool last = o->rank == o->n - 1;

    if (first && t->call.kind == IDIST__SCAN) idist__block_copy(o->out, o->in, o->nbytes);
    idist__stream_cut(o, o->count);
    idist__stream_begin(o, first ? 0 : stream->block_chunks, last ? 0 : stream->block_chunks,
                        first ? stream->block_chunks : 0, idist__chain_scan_recv,
                        idist__chain_scan_send, idist__chain_scan_take);
}

//------------------------------------------------------------------------------
// [algo:direct]  one message per pair of ranks: gather, scatter, all_to_all, v-forms
// uses kind model block extent msg:op send recv
//
// Every pair of ranks that has something to exchange does so in one message. In step s a rank sends
// to rank + 1 + s and receives from rank - 1 - s, so that no rank is everybody's first target:
//
//   n = 4    step 0   step 1   step 2
//   rank 0   -> 1     -> 2     -> 3
//   rank 1   -> 2     -> 3     -> 0
//   rank 2   -> 3     -> 0     -> 1
//   rank 3   -> 0     -> 1     -> 2
//
//   bytes sent per rank   B (n - 1) for all_to_all; B to or from the root for gather and scatter
//   latency               n - 1 messages, of which 8 each way are under way at a time
//
// Each byte travels once, where trees and Bruck's algorithm carry blocks through other ranks. The
// v-forms always work this way, because only the two ends of a message know its size.
//
// The tag of a message is the distance between its two ranks, which both ends know.
//------------------------------------------------------------------------------

enum { IDIST__DIRECT_MESSAGES = 8 }; // under way at a time, each way

// The message to or from a peer; for the own rank, what it contributes and where that goes.
static idist__item idist__direct_item(const idist__task *t, int peer, bool receives) {
    const idist__op *o = idist__op_of(t);
    const idist__call *c = &t->call;
    const size_t *counts = receives ? c->recvcounts : c->sendcounts;
    const size_t *displs = receives ? c->recvdispls : c->senddispls;
    const char *buffer = receives ? o->out : o->in;
    size_t count = counts ? counts[peer] : o->count;
    size_t at = 0;
    bool has_block_per_rank;
    idist__item item;

    if (receives) has_block_per_rank = c->kind != IDIST__SCATTER && c->kind != IDIST__SCATTERV;
    else has_block_per_rank = c->kind != IDIST__GATHER && c->kind != IDIST__GATHERV;
    if (has_block_per_rank)
        at = counts ? idist__extent_displ(counts, displs, peer) : (size_t)peer * o->count;

    item.peer = peer;
    item.nbytes = count * o->size;
    item.data = (char *)(uintptr_t)buffer + at * o->size;

    return item;
}

// The peer at this distance; for a rank other than the root of a gather or scatter, the root.
static int idist__direct_peer(const idist__task *t, int distance) {
    const idist__op *o = idist__op_of(t);
    if (idist__kind_has_root(t->call.kind) && o->rank != o->root) return o->root;
    return idist__block_wrap(o->rank + distance, o->n);
}

static idist__item idist__direct_recv(idist__task *t, size_t index) {
    return idist__direct_item(t, idist__direct_peer(t, -1 - (int)index), true);
}

static idist__item idist__direct_send(idist__task *t, size_t index) {
    return idist__direct_item(t, idist__direct_peer(t, 1 + (int)index), false);
}

// Like idist__stream_run, but no send waits for a receive.
static void idist__direct_run(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__direct_op *state = &o->u.direct;

    for (;;) {
        while (state->posted < state->recv_total && o->recvs_pending < IDIST__DIRECT_MESSAGES) {
            idist__item item = idist__direct_recv(t, state->posted++);
            idist__recv_step(t, -1, item.peer,
                             (uint32_t)idist__block_wrap(o->rank - item.peer, o->n), item.data,
                             item.nbytes);
        }

        if (state->sent == state->send_total || o->sends_pending >= IDIST__DIRECT_MESSAGES) break;

        {
            idist__item item = idist__direct_send(t, state->sent++);
            idist__send_step(t, item.peer, (uint32_t)idist__block_wrap(item.peer - o->rank, o->n),
                             item.data, item.nbytes);
        }
    }

    if (state->posted == state->recv_total && !o->recvs_pending &&
        state->sent == state->send_total && !o->sends_pending)
        idist__op_done(t);
}

static void idist__direct_begin(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__kind kind = t->call.kind;
    bool scatters = kind == IDIST__SCATTER || kind == IDIST__SCATTERV;
    bool is_root = o->rank == o->root;
    size_t recv_count = (size_t)(o->n - 1);
    size_t send_count = (size_t)(o->n - 1);

    if (idist__kind_has_root(kind)) {
        size_t peers = is_root ? (size_t)(o->n - 1) : 1;
        bool sends = scatters == is_root;
        send_count = sends ? peers : 0;
        recv_count = sends ? 0 : peers;
    }

    if (!idist__kind_has_root(kind) || is_root) { // our own part
        idist__item from = idist__direct_item(t, o->rank, false);
        idist__item to = idist__direct_item(t, o->rank, true);
        idist__block_copy(to.data, from.data, to.nbytes);
    }

    o->u.direct.recv_total = recv_count;
    o->u.direct.send_total = send_count;
    o->run = idist__direct_run;
}

// In place the messages would overwrite each other, so the contribution moves to scratch first.
static void idist__direct_all_to_all(idist__task *t) {
    idist__op *o = idist__op_of(t);

    if (t->call.send == t->call.recv && o->nbytes) {
        idist__block_copy(o->work, o->in, (size_t)o->n * o->nbytes);
        o->in = o->work;
    }

    idist__direct_begin(t);
}

//------------------------------------------------------------------------------
// [algo:dissemination]  barrier
// uses model block msg:op send recv
//
// In round k every rank signals the rank 2^k further on and waits for the one 2^k before it. After
// log n rounds each rank has heard, directly or through others, from all n (Hensgen, Finkel, Manber
// 1988):
//
//   n = 5, what rank 0 knows of    round 0: 0 4     round 1: 0 4 3 2     round 2: 0 4 3 2 1
//
//   bytes sent per rank   none: log n empty messages
//   latency               log n, for any n
//
// From here on algorithms are written as straight code between CO_BEGIN and CO_END; see [msg:op].
// State that must survive an AWAIT lives in idist__op; for a barrier that is 2^k.
//------------------------------------------------------------------------------

static void idist__dissemination_run(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__dissemination_op *state = &o->u.dissemination;
    int n = o->n;
    int rank = o->rank;

    IDIST__CO_BEGIN(o)

    for (state->distance = 1; state->distance < n; state->distance *= 2) {
        idist__recv_step(t, 0, idist__block_wrap(rank - state->distance, n),
                         (uint32_t)state->distance, NULL, 0);
        idist__send_step(t, idist__block_wrap(rank + state->distance, n), (uint32_t)state->distance,
                         NULL, 0);
        IDIST__CO_AWAIT(o, !o->slots_pending);
    }

    IDIST__CO_AWAIT(o, !o->sends_pending);
    idist__op_done(t);
    IDIST__CO_END(o)
}

//------------------------------------------------------------------------------
// [algo:tree]  broadcast, reduce, gather and scatter of small messages
// uses kind model block core:message msg:op combine send recv
//
// A binomial tree over v, the rank counted from the root. The parent of v is v without its lowest
// set bit; its children are v plus each power of two below that bit:
//
//               0
//         ______|______
//        4      2      1        n = 8. The subtree of v is v .. v + (lowest set bit) - 1, a run of
//       / \     |               consecutive ranks: a rank of gather or scatter holds one run of
//      6   5    3               blocks.
//      |
//      7
//
//   bytes sent per rank   broadcast, reduce: B to each child or to the parent; gather, scatter: the
//                         blocks of a whole subtree at once
//   latency               log n messages in sequence
//
// broadcast and scatter start with the child that has the largest subtree; reduce and gather are
// the same trees in the other direction.
//------------------------------------------------------------------------------

// Our v. A reduction with an operation that does not commute uses a tree on rank 0, so that it
// keeps the order of the ranks.
static int idist__tree_relative_rank(const idist__task *t) {
    const idist__op *o = idist__op_of(t);
    bool commutes = !o->user || o->user->commutative;
    bool from_root = t->call.kind != IDIST__REDUCE || commutes;

    return from_root ? idist__block_wrap(o->rank - o->root, o->n) : o->rank;
}

// The distance from v to its parent: its lowest set bit. Of the root: a power of two that is not
// below n.
static int idist__tree_distance(int v, int n) {
    int distance;
    for (distance = 1; distance < n && !(v & distance); distance *= 2) continue;
    return distance;
}

// The number of ranks in the subtree of v, v included.
static int idist__tree_size(int v, int n) {
    int distance = idist__tree_distance(v, n);
    return v + distance < n ? distance : n - v;
}

static void idist__tree_broadcast(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__tree_op *state = &o->u.tree;
    int n = o->n;
    int v = idist__tree_relative_rank(t);

    IDIST__CO_BEGIN(o)
    state->distance = idist__tree_distance(v, n);

    if (v) {
        idist__recv_step(t, 0, idist__block_wrap(v - state->distance + o->root, n), 0, o->out,
                         o->nbytes);
        IDIST__CO_AWAIT(o, !o->slots_pending);
    }

    // A large message goes to one child after the other, the one with the largest subtree first:
    // were they sent at once, all children would have it only when the last one has.
    for (state->distance /= 2; state->distance; state->distance /= 2) {
        if (v + state->distance >= n) continue;
        idist__send_step(t, idist__block_wrap(v + state->distance + o->root, n), 0, o->out,
                         o->nbytes);
        IDIST__CO_AWAIT(o, !o->sends_pending || o->nbytes <= IDIST__EAGER_BYTES);
    }

    IDIST__CO_AWAIT(o, !o->sends_pending);
    idist__op_done(t);
    IDIST__CO_END(o)
}

// Our sum covers the ranks v .. v + distance - 1; what arrives covers the next `distance` ranks, so
// the order of the ranks is kept. If the operation does not commute, v is the rank, and rank 0
// passes the result on to the root.
//
// Scratch: the sum, then one message.
static void idist__tree_reduce(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__tree_op *state = &o->u.tree;
    int n = o->n;
    int v = idist__tree_relative_rank(t);
    int base = idist__block_wrap(o->rank - v, n); // the rank with v = 0
    char *received = o->work + o->nbytes;

    IDIST__CO_BEGIN(o)
    idist__block_copy(o->work, o->in, o->nbytes);

    for (state->distance = 1; state->distance < n && !(v & state->distance); state->distance *= 2) {
        if (v + state->distance >= n) continue;
        idist__recv_step(t, 0, idist__block_wrap(v + state->distance + base, n), 0, received,
                         o->nbytes);
        IDIST__CO_AWAIT(o, !o->slots_pending);
        idist__combine(t, o->work, o->work, received, o->count, t->call.dtype);
    }

    if (v)
        idist__send_step(t, idist__block_wrap(v - state->distance + base, n), 0, o->work,
                         o->nbytes);
    else if (o->rank != o->root) idist__send_step(t, o->root, 1, o->work, o->nbytes);

    if (o->rank == o->root && v) {
        idist__recv_step(t, 0, base, 1, o->out, o->nbytes);
        IDIST__CO_AWAIT(o, !o->slots_pending);
    } else if (o->rank == o->root) {
        idist__block_copy(o->out, o->work, o->nbytes);
    }

    IDIST__CO_AWAIT(o, !o->sends_pending);
    idist__op_done(t);
    IDIST__CO_END(o)
}

// Scratch: the blocks of v, v + 1, ... in this order. The root puts them where they belong.
static void idist__tree_gather(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__tree_op *state = &o->u.tree;
    int n = o->n;
    int v = idist__tree_relative_rank(t);
    int i;

    IDIST__CO_BEGIN(o)
    idist__block_copy(o->work, o->in, o->nbytes);

    for (state->distance = 1; state->distance < n && !(v & state->distance); state->distance *= 2)
        if (v + state->distance < n)
            idist__recv_step(t, -1, idist__block_wrap(v + state->distance + o->root, n), 0,
                             o->work + (size_t)state->distance * o->nbytes,
                             (size_t)idist__tree_size(v + state->distance, n) * o->nbytes);

    IDIST__CO_AWAIT(o, !o->recvs_pending);

    if (v)
        idist__send_step(t, idist__block_wrap(v - state->distance + o->root, n), 0, o->work,
                         (size_t)idist__tree_size(v, n) * o->nbytes);
    else
        for (i = 0; i < n; i++)
            idist__block_copy(o->out + (size_t)idist__block_wrap(i + o->root, n) * o->nbytes,
                              o->work + (size_t)i * o->nbytes, o->nbytes);

    IDIST__CO_AWAIT(o, !o->sends_pending);
    idist__op_done(t);
    IDIST__CO_END(o)
}

// Scratch: as for gather.
static void idist__tree_scatter(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__tree_op *state = &o->u.tree;
    int n = o->n;
    int v = idist__tree_relative_rank(t);
    int i;

    IDIST__CO_BEGIN(o)
    state->distance = idist__tree_distance(v, n);

    if (v) {
        idist__recv_step(t, 0, idist__block_wrap(v - state->distance + o->root, n), 0, o->work,
                         (size_t)idist__tree_size(v, n) * o->nbytes);
        IDIST__CO_AWAIT(o, !o->slots_pending);
    } else {
        for (i = 0; i < n; i++)
            idist__block_copy(o->work + (size_t)i * o->nbytes,
                              o->in + (size_t)idist__block_wrap(i + o->root, n) * o->nbytes,
                              o->nbytes);
    }

    for (state->distance /= 2; state->distance; state->distance /= 2)
        if (v + state->distance < n)
            idist__send_step(t, idist__block_wrap(v + state->distance + o->root, n), 0,
                             o->work + (size_t)state->distance * o->nbytes,
                             (size_t)idist__tree_size(v + state->distance, n) * o->nbytes);

    IDIST__CO_AWAIT(o, !o->sends_pending);
    idist__block_copy(o->out, o->work, o->nbytes);
    idist__op_done(t);
    IDIST__CO_END(o)
}

//------------------------------------------------------------------------------
// [algo:doubling]  all_reduce, reduce_scatter and scan of small messages
// uses kind model block extent msg:op combine send recv
//
// Recursive doubling. In round k partners at distance 2^k exchange their sums and add them; after
// log n rounds every rank has the sum of all:
//
//   n = 4     rank 0      rank 1      rank 2      rank 3
//   start     0           1           2           3
//   round 0   0 1 <-----> 0 1         2 3 <-----> 2 3
//   round 1   0 1 2 3     0 1 2 3     0 1 2 3     0 1 2 3      0 <-> 2, 1 <-> 3
//
//   bytes sent per rank   B log n (reduce_scatter: of all n blocks)
//   latency               log n messages, the least possible
//
// The sum of a partner covers the ranks just below or just above ours, so the order of the ranks is
// kept, and all ranks combine the same operands in the same order.
//
// When n is not a power of two, let p be the largest one below it. The first 2 (n - p) ranks form
// pairs; the odd rank of a pair gives its contribution to the even one, sits out, and gets the
// result at the end:
//
//   n = 6, p = 4    1 -> 0, 3 -> 2;   0, 2, 4, 5 act as ranks 0, 1, 2, 3;   0 -> 1, 2 -> 3
//
// scan (Hillis and Steele): in round k a rank sends its sum to the rank 2^k above and adds what it
// gets from the one 2^k below; then its sum covers the 2^(k+1) ranks up to itself. exscan hands the
// finished prefix to the next rank.
//------------------------------------------------------------------------------

enum { IDIST__DOUBLING_RESULT = 1 << 30 }; // tag of a finished result

// p, computed once for a call.
static int idist__doubling_active_ranks(idist__doubling_op *state, int n) {
    if (!state->active_ranks) state->active_ranks = 1;
    while (state->active_ranks * 2 <= n) state->active_ranks *= 2;
    return state->active_ranks;
}

// all_reduce and reduce_scatter. The sum is built in the result of all_reduce, in scratch for
// reduce_scatter; one received message follows in scratch.
static void idist__doubling_reduce(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__doubling_op *state = &o->u.doubling;
    int rank = o->rank;
    int excess = o->n - idist__doubling_active_ranks(state, o->n);
    int partner;
    bool is_paired = rank < 2 * excess;
    bool sits_out = is_paired && rank % 2;
    int number = is_paired ? rank / 2 : rank - excess; // among the p ranks that exchange
    bool scatter = idist__kind_scatters_sum(t->call.kind);
    size_t count = scatter ? idist__extent_block_at(&t->call, o->n) : o->count;
    size_t nbytes = count * o->size;
    char *sum = scatter ? o->work : o->out;
    char *received = scatter ? o->work + nbytes : o->work;

    IDIST__CO_BEGIN(o)
    idist__block_copy(sum, o->in, nbytes);

    if (sits_out) {
        idist__send_step(t, rank - 1, 0, sum, nbytes);
    } else if (is_paired) {
        idist__recv_step(t, 0, rank + 1, 0, received, nbytes);
        IDIST__CO_AWAIT(o, !o->slots_pending);
        idist__combine(t, sum, sum, received, count, t->call.dtype);
    }

    for (state->distance = 1; state->distance < state->active_ranks && !sits_out;
         state->distance *= 2) {
        partner = number ^ state->distance;
        partner = partner < excess ? 2 * partner : partner + excess;
        idist__recv_step(t, 0, partner, (uint32_t)state->distance, received, nbytes);
        idist__send_step(t, partner, (uint32_t)state->distance, sum, nbytes);
        IDIST__CO_AWAIT(o, !o->slots_pending && !o->sends_pending);
        if (number & state->distance) idist__combine(t, sum, received, sum, count, t->call.dtype);
        else idist__combine(t, sum, sum, received, count, t->call.dtype);
    }

    if (sits_out) {
        IDIST__CO_AWAIT(o, !o->sends_pending);
        idist__recv_step(t, 0, rank - 1, IDIST__DOUBLING_RESULT, sum, nbytes);
    } else if (is_paired) {
        idist__send_step(t, rank + 1, IDIST__DOUBLING_RESULT, sum, nbytes);
    }

    IDIST__CO_AWAIT(o, !o->slots_pending && !o->sends_pending);
    if (scatter)
        idist__block_copy(o->out, sum + idist__extent_block_at(&t->call, rank) * o->size,
                          o->nbytes);
    idist__op_done(t);
    IDIST__CO_END(o)
}

// Scratch: the sum, then one message.
static void idist__doubling_scan(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__doubling_op *state = &o->u.doubling;
    int n = o->n;
    int rank = o->rank;
    char *sum = o->work;
    char *received = o->work + o->nbytes;

    IDIST__CO_BEGIN(o)
    idist__block_copy(sum, o->in, o->nbytes);

    for (state->distance = 1; state->distance < n; state->distance *= 2) {
        if (rank >= state->distance)
            idist__recv_step(t, 0, rank - state->distance, (uint32_t)state->distance, received,
                             o->nbytes);
        if (rank + state->distance < n)
            idist__send_step(t, rank + state->distance, (uint32_t)state->distance, sum, o->nbytes);
        IDIST__CO_AWAIT(o, !o->slots_pending && !o->sends_pending);
        if (rank >= state->distance) idist__combine(t, sum, received, sum, o->count, t->call.dtype);
    }

    if (t->call.kind == IDIST__SCAN) {
        idist__block_copy(o->out, sum, o->nbytes);
    } else {
        if (rank) idist__recv_step(t, 0, rank - 1, IDIST__DOUBLING_RESULT, o->out, o->nbytes);
        if (rank + 1 < n) idist__send_step(t, rank + 1, IDIST__DOUBLING_RESULT, sum, o->nbytes);
    }

    IDIST__CO_AWAIT(o, !o->slots_pending && !o->sends_pending);
    idist__op_done(t);
    IDIST__CO_END(o)
}

//------------------------------------------------------------------------------
// [algo:bruck]  all_gather and all_to_all of small messages
// uses model block msg:op send recv
//
// Both algorithms (Bruck et al. 1997) need log n rounds for any n; a power of two is not special.
//
// all_gather. After round k rank r holds the blocks r, r + 1, ... r + 2^(k+1) - 1 (mod n) in
// scratch, in this order; the last round fetches only what is missing. At the end the run is
// rotated into place:
//
//   n = 5, rank 3    start: 3     round 0: 3 4     round 1: 3 4 0 1     round 2: 3 4 0 1 2
//
//   bytes sent per rank   B (n - 1), as in a ring
//   latency               log n messages instead of n - 1
//
// all_to_all. Number the blocks by the distance they have to travel: block i is for the rank i
// further on. In round k all blocks whose number has bit k travel 2^k ranks in one message, so each
// block arrives after the rounds of its bits:
//
//   n = 8            round 0: 1 rank     round 1: 2 ranks     round 2: 4 ranks
//   blocks sent      1 3 5 7             2 3 6 7              4 5 6 7
//
//   bytes sent per rank   B n/2 log n: blocks travel up to log n times
//   latency               log n messages instead of n - 1
//------------------------------------------------------------------------------

static void idist__bruck_all_gather(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__bruck_op *state = &o->u.bruck;
    int n = o->n;
    int rank = o->rank;
    int blocks;

    IDIST__CO_BEGIN(o)
    idist__block_copy(o->work, o->in, o->nbytes);

    for (state->distance = 1; state->distance < n; state->distance *= 2) {
        blocks = state->distance < n - state->distance ? state->distance : n - state->distance;
        idist__recv_step(t, 0, idist__block_wrap(rank + state->distance, n),
                         (uint32_t)state->distance, o->work + (size_t)state->distance * o->nbytes,
                         (size_t)blocks * o->nbytes);
        idist__send_step(t, idist__block_wrap(rank - state->distance, n), (uint32_t)state->distance,
                         o->work, (size_t)blocks * o->nbytes);
        IDIST__CO_AWAIT(o, !o->slots_pending && !o->sends_pending);
    }

    idist__block_copy(o->out + (size_t)rank * o->nbytes, o->work, (size_t)(n - rank) * o->nbytes);
    idist__block_copy(o->out, o->work + (size_t)(n - rank) * o->nbytes, (size_t)rank * o->nbytes);
    idist__op_done(t);
    IDIST__CO_END(o)
}

// Copies the blocks that travel over this distance into `packed`, or back. Returns how many there
// are.
static size_t idist__bruck_pack(const idist__op *o, int distance, char *packed, bool unpack) {
    size_t blocks = 0;
    int i;

    for (i = 0; i < o->n; i++) {
        char *block = o->work + (size_t)i * o->nbytes;
        char *in_pack = packed + blocks * o->nbytes;

        if (!(i & distance)) continue;
        if (unpack) idist__block_copy(block, in_pack, o->nbytes);
        else idist__block_copy(in_pack, block, o->nbytes);
        blocks++;
    }

    return blocks;
}

// Scratch: n blocks, the blocks to send, the blocks received.
static void idist__bruck_all_to_all(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__bruck_op *state = &o->u.bruck;
    int n = o->n;
    int rank = o->rank;
    int i;
    char *packed = o->work + (size_t)n * o->nbytes;
    char *received = packed + (size_t)n * o->nbytes;

    IDIST__CO_BEGIN(o)

    for (i = 0; i < n; i++)
        idist__block_copy(o->work + (size_t)i * o->nbytes,
                          o->in + (size_t)idist__block_wrap(rank + i, n) * o->nbytes, o->nbytes);

    for (state->distance = 1; state->distance < n; state->distance *= 2) {
        state->packed_blocks = idist__bruck_pack(o, state->distance, packed, false);
        idist__recv_step(t, 0, idist__block_wrap(rank - state->distance, n),
                         (uint32_t)state->distance, received, state->packed_blocks * o->nbytes);
        idist__send_step(t, idist__block_wrap(rank + state->distance, n), (uint32_t)state->distance,
                         packed, state->packed_blocks * o->nbytes);
        IDIST__CO_AWAIT(o, !o->slots_pending && !o->sends_pending);
        idist__bruck_pack(o, state->distance, received, true);
    }

    // Block i has come from the rank i before us.
    for (i = 0; i < n; i++)
        idist__block_copy(o->out + (size_t)idist__block_wrap(rank - i, n) * o->nbytes,
                          o->work + (size_t)i * o->nbytes, o->nbytes);

    idist__op_done(t);
    IDIST__CO_END(o)
}

//------------------------------------------------------------------------------
// [algo:host]  several hosts: first inside each host, then between their leaders
// uses mem base:type reduce launch:env kind model core:world fingerprint
// uses core:task block msg:types msg:op msg:failure
//
// Ranks of one host share memory, while hosts share a slower network. So a collective over several
// hosts becomes a sequence of collectives on two smaller groups:
//
//   near    the members on this host
//   leads   the first member of each host, its lead
//
//                    step 1                   step 2                     step 3
//   all_reduce       near: reduce to lead     leads: all_reduce          near: broadcast
//   reduce           near: reduce to lead     leads: reduce to the       near: the lead sends it
//                                             lead of the root's host    to the root
//   reduce_scatter   near: reduce to lead     leads: reduce, one per     near: scatter
//                                             host
//   all_gather       near: gather on lead     leads: all_gatherv         near: broadcast
//   broadcast        near, on root's host     leads: broadcast           near, on other hosts
//   barrier          near                     leads                      near
//
//   bytes over the network   what one rank sends, per host instead of per rank
//   latency                  two local steps, and one among as many ranks as there are hosts
//
// A large all_reduce, reduce or broadcast is cut into pieces, so that the network is used from the
// first piece to the last:
//
//   round      0   1   2   3
//   step 1     a   b   c
//   step 2         a   b   c
//   step 3             a   b   c
//
// A call makes a plan, a list of steps in rounds, and carries out one round after the other; each
// step is a task of its own on near or leads. Calls on the same group queue up
// (idist__ring_group.first), so that all ranks take the steps in the same order.
//
//   idist__host_serves      whether a call can go this way
//   idist__host_start       appends it to the queue, and runs it if the queue was empty
//   idist__host_run         makes the plan; then for each round: begin, wait, divide an average
//   idist__host_progress    resumes the first call of each group once its round has completed
//
// Used when a group spans several hosts, at least one of them has several members, and IDIST_ALGO
// is auto. These are made of messages among all ranks instead:
//
//   reductions of narrow floats                they would be rounded twice
//   operations that do not commute             they need the order of the ranks
//   all_gather, reduce_scatter                 only if the ranks of some host are not consecutive
//   gather, scatter, all_to_all, scan, v-forms
//------------------------------------------------------------------------------

typedef struct idist__host_step { // a call on near or leads
    idist_group *group;
    idist__kind kind;
    const void *send;
    void *recv;
    size_t count;
    const size_t *recvcounts, *recvdispls; // of an all_gatherv
    int root;
    size_t round;
    bool completes_sum; // recv holds the sum over all ranks: divide it for AVG
} idist__host_step;

enum { IDIST__HOST_STEPS = 3 }; // for each piece, without one reduction per host in reduce_scatter
// Size of a piece, per host: smaller pieces cost more in latency than they gain. On a network of
// high latency, so many times the bandwidth-delay product, because the hosts synchronize after each
// piece.
#define IDIST__HOST_PIECE_BYTES ((size_t)512 * 1024)
#define IDIST__HOST_PIECE_NETWORKS 8

static uint64_t idist__host_of(const idist_group *g, int rank) {
    return g->w->nodes[g->ranks[rank]].host;
}

static bool idist__host_serves(const idist_group *g, const idist__call *c) {
    const idist__ring_group *rg = idist__ring_group_of(g);
    int setting = g->w->cfg.algorithm;

    if (!rg->nhosts || (setting != IDIST__ALGO_AUTO && setting != IDIST__ALGO_REMOTE)) return false;

    switch (c->kind) {
    case IDIST__BARRIER:
    case IDIST__BROADCAST: return true;
    case IDIST__ALL_GATHER: return rg->in_order;
    case IDIST__ALL_REDUCE:
    case IDIST__REDUCE: break;
    case IDIST__REDUCE_SCATTER:
        if (!rg->in_order) return false;
        break;
    default: return false;
    }

    if (idist__dtype_is_narrow(c->dtype)) return false;

    return (int)c->op < IDIST_OP_USER || idist__world_user_op(g, c)->commutative;
}

// ---- the plan of a call ----

typedef struct idist__host_piece { // of a call's elements
    size_t at;                     // in bytes
    size_t count;
} idist__host_piece;

// How many pieces a call has: the same on all ranks.
static size_t idist__host_piece_count(const idist__task *t) {
    const idist__op *o = idist__op_of(t);
    uint64_t of_host = IDIST__HOST_PIECE_NETWORKS * t->group->w->network_nbytes, nbytes;
    bool is_cut = t->call.kind == IDIST__ALL_REDUCE || t->call.kind == IDIST__REDUCE ||
                  t->call.kind == IDIST__BROADCAST;

    if (of_host < IDIST__HOST_PIECE_BYTES) of_host = IDIST__HOST_PIECE_BYTES;
    nbytes = of_host * (uint64_t)idist__ring_group_of(t->group)->nhosts;

    return is_cut && o->nbytes > nbytes ? (size_t)(o->nbytes / nbytes) : 1;
}

// Piece number `index` of n. False: there is none.
static bool idist__host_cut(const idist__op *o, size_t n, size_t index, idist__host_piece *piece) {
    size_t count = o->count / n, rest = o->count % n; // the first ones have one element more

    if (index >= n) return false;
    piece->count = count + (index < rest ? 1 : 0);
    piece->at = (count * index + (index < rest ? index : rest)) * o->size;

    return true;
}

static idist__host_step *idist__host_add(idist__op *o, size_t round, idist_group *group,
                                         idist__kind kind, const void *send, void *recv,
                                         size_t count, int root) {
    idist__host_step *step = &o->u.host.steps[o->u.host.step_count++];

    step->round = round;
    step->group = group;
    step->kind = kind;
    step->send = send;
    step->recv = recv;
    step->count = count;
    step->root = root;

    return step;
}

// What a plan needs to know besides the call.
typedef struct idist__host_plan {
    char *collected;         // scratch of a lead: what it collects from its host
    size_t *counts, *displs; // of the blocks of each host, in elements
    int lead_root;           // the root's host, as a rank of leads
    int near_root;           // the root as a rank of near; -1: it is on another host
} idist__host_plan;

// The first step of reductions: the sum over this host, on its lead.
static void idist__host_reduce_near(idist__task *t, size_t round, const void *in, char *sum,
                                    size_t count) {
    idist__op *o = idist__op_of(t);
    idist_group *near = idist__ring_group_of(t->group)->near;

    if (near) {
        idist__host_add(o, round, near, IDIST__REDUCE, in, sum, count, 0);
        return;
    }

    idist__block_copy(sum, in, count * o->size);
    if (o->user && !o->user->fn) idist__reduce_scale(sum, count, t->call.dtype, o->user->factor);
}

static void idist__host_plan_all_reduce(idist__task *t) {
    idist__op *o = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    size_t n = idist__host_piece_count(t), round;
    idist__host_piece piece;
    idist__host_step *step;

    for (round = 0; round < n + 2; round++) {
        if (idist__host_cut(o, n, round, &piece))
            idist__host_reduce_near(t, round, o->in + piece.at, o->out + piece.at, piece.count);

        if (rg->leads && idist__host_cut(o, n, round - 1, &piece)) {
            step = idist__host_add(o, round, rg->leads, IDIST__ALL_REDUCE, o->out + piece.at,
                                   o->out + piece.at, piece.count, -1);
            step->completes_sum = true;
        }

        if (rg->near && idist__host_cut(o, n, round - 2, &piece))
            idist__host_add(o, round, rg->near, IDIST__BROADCAST, NULL, o->out + piece.at,
                            piece.count, 0);
    }
}

// The last step of a reduce, where the root is not the lead of its host.
static void idist__host_reduce_end(idist__task *t, const idist__host_plan *plan, size_t round,
                                   char *sum, size_t count) {
    idist__op *o = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    idist__host_step *step;

    if (rg->leads) {
        idist__host_add(o, round, rg->near, IDIST__SEND, sum, NULL, count, plan->near_root);
    } else if (o->rank == o->root) {
        step = idist__host_add(o, round, rg->near, IDIST__RECV, NULL, sum, count, 0);
        step->completes_sum = true;
    }
}

static void idist__host_plan_reduce(idist__task *t, const idist__host_plan *plan) {
    idist__op *o = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    char *sum = o->rank == o->root ? o->out : plan->collected;
    size_t n = idist__host_piece_count(t), round;
    idist__host_piece piece;
    idist__host_step *step;

    for (round = 0; round < n + 2; round++) {
        if (idist__host_cut(o, n, round, &piece))
            idist__host_reduce_near(t, round, o->in + piece.at, sum + piece.at, piece.count);

        if (rg->leads && idist__host_cut(o, n, round - 1, &piece)) {
            step = idist__host_add(o, round, rg->leads, IDIST__REDUCE, sum + piece.at,
                                   sum + piece.at, piece.count, plan->lead_root);
            step->completes_sum = plan->near_root == 0;
        }

        // near_root <= 0: the root is this host's lead, or on another host
        if (plan->near_root > 0 && idist__host_cut(o, n, round - 2, &piece))
            idist__host_reduce_end(t, plan, round, sum + piece.at, piece.count);
    }
}

static void idist__host_plan_reduce_scatter(idist__task *t, const idist__host_plan *plan) {
    idist__op *o = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    char *sum = plan->collected;
    char *own = sum + (size_t)o->rank * o->nbytes; // of a lead: where the blocks of its host begin
    idist__host_step *step;
    size_t round = 0;
    int host;

    idist__host_reduce_near(t, round++, o->in, sum, o->count * (size_t)o->n);

    for (host = 0; rg->leads && host < rg->nhosts; host++) {
        char *blocks = sum + plan->displs[host] * o->size;
        bool is_result = host == rg->leads->rank && !rg->near;

        step = idist__host_add(o, round++, rg->leads, IDIST__REDUCE, blocks,
                               is_result ? o->out : blocks, plan->counts[host], host);
        step->completes_sum = is_result;
    }

    if (rg->near) {
        step = idist__host_add(o, round, rg->near, IDIST__SCATTER, own, o->out, o->count, 0);
        step->completes_sum = true;
    }
}

static void idist__host_plan_all_gather(idist__task *t, const idist__host_plan *plan) {
    idist__op *o = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    char *own = o->out + (size_t)o->rank * o->nbytes;
    idist__host_step *step;

    if (rg->near) idist__host_add(o, 0, rg->near, IDIST__GATHER, o->in, own, o->count, 0);
    else if (o->in != own) idist__block_copy(own, o->in, o->nbytes);

    if (rg->leads) {
        step = idist__host_add(o, 1, rg->leads, IDIST__ALL_GATHERV, own, o->out,
                               plan->counts[rg->leads->rank], -1);
        step->recvcounts = plan->counts;
        step->recvdispls = plan->displs;
    }

    if (rg->near)
        idist__host_add(o, 2, rg->near, IDIST__BROADCAST, NULL, o->out, o->count * (size_t)o->n, 0);
}

static void idist__host_plan_broadcast(idist__task *t, const idist__host_plan *plan) {
    idist__op *o = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    size_t n = idist__host_piece_count(t), round;
    idist__host_piece piece;

    for (round = 0; round < n + 2; round++) {
        if (rg->near && plan->near_root >= 0 && idist__host_cut(o, n, round, &piece))
            idist__host_add(o, round, rg->near, IDIST__BROADCAST, NULL, o->out + piece.at,
                            piece.count, plan->near_root);
        if (rg->leads && idist__host_cut(o, n, round - 1, &piece))
            idist__host_add(o, round, rg->leads, IDIST__BROADCAST, NULL, o->out + piece.at,
                            piece.count, plan->lead_root);
        if (rg->near && plan->near_root < 0 && idist__host_cut(o, n, round - 2, &piece))
            idist__host_add(o, round, rg->near, IDIST__BROADCAST, NULL, o->out + piece.at,
                            piece.count, 0);
    }
}

static void idist__host_plan_barrier(idist__task *t) {
    idist__op *o = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);

    if (rg->near) idist__host_add(o, 0, rg->near, IDIST__BARRIER, NULL, NULL, 0, -1);
    if (rg->leads) idist__host_add(o, 1, rg->leads, IDIST__BARRIER, NULL, NULL, 0, -1);
    if (rg->near) idist__host_add(o, 2, rg->near, IDIST__BARRIER, NULL, NULL, 0, -1);
}

static void idist__host_find_root(const idist__task *t, idist__host_plan *plan) {
    const idist__op *o = idist__op_of(t);
    const idist_group *g = t->group;
    const idist__ring_group *rg = idist__ring_group_of(g);
    int i;

    plan->lead_root = 0;
    plan->near_root = o->root == o->rank ? 0 : -1;
    if (o->root < 0) return;

    for (i = 0; rg->leads && i < rg->nhosts; i++)
        if (idist__host_of(rg->leads, i) == idist__host_of(g, o->root)) plan->lead_root = i;
    for (i = 0; rg->near && i < rg->near->size; i++)
        if (rg->near->ranks[i] == g->ranks[o->root]) plan->near_root = i;
}

// Finds the blocks of each host; the ranks of a host are consecutive.
static void idist__host_count_blocks(const idist__task *t, const idist__host_plan *plan) {
    const idist__op *o = idist__op_of(t);
    const idist_group *g = t->group;
    int i, host = -1;

    for (i = 0; i < o->n; i++) {
        if (i == 0 || idist__host_of(g, i) != idist__host_of(g, i - 1))
            plan->displs[++host] = (size_t)i * o->count;
        plan->counts[host] += o->count;
    }
}

// Fills o->memory: steps | counts and displs of the hosts | what a lead collects. False when memory
// is short.
static bool idist__host_make_plan(idist__task *t) {
    idist__op *o = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    size_t nhosts = (size_t)rg->nhosts;
    size_t max_steps = IDIST__HOST_STEPS * idist__host_piece_count(t) + nhosts;
    size_t steps_nbytes = max_steps * sizeof(idist__host_step);
    size_t table_nbytes = steps_nbytes + 2 * nhosts * sizeof(size_t);
    size_t collected_nbytes = 0;
    idist__host_plan plan;

    if (rg->leads && t->call.kind == IDIST__REDUCE) collected_nbytes = o->nbytes;
    if (rg->leads && t->call.kind == IDIST__REDUCE_SCATTER)
        collected_nbytes = o->nbytes * (size_t)o->n;

    o->memory = (char *)idist__mem_raw(&t->group->w->cfg.mem, table_nbytes + collected_nbytes);
    if (!o->memory) return false;
    memset(o->memory, 0, table_nbytes);
    o->u.host.steps = (idist__host_step *)(void *)o->memory;

    plan.counts = (size_t *)(void *)(o->memory + steps_nbytes);
    plan.displs = plan.counts + nhosts;
    plan.collected = o->memory + table_nbytes;
    if (rg->in_order) idist__host_count_blocks(t, &plan);
    idist__host_find_root(t, &plan);

    switch (t->call.kind) {
    case IDIST__ALL_REDUCE: idist__host_plan_all_reduce(t); break;
    case IDIST__REDUCE: idist__host_plan_reduce(t, &plan); break;
    case IDIST__REDUCE_SCATTER: idist__host_plan_reduce_scatter(t, &plan); break;
    case IDIST__ALL_GATHER: idist__host_plan_all_gather(t, &plan); break;
    case IDIST__BROADCAST: idist__host_plan_broadcast(t, &plan); break;
    default: idist__host_plan_barrier(t); break;
    }

    return true;
}

// ---- carrying it out ----

static void idist__host_no_memory(const idist__task *t) {
    idist__ring_fail_memory(idist__ring_of(t->group->w), t->group);
}

// Begins a step. We own its task, *begun, until idist__host_round_done has seen it end. It may end
// at once, and the call with it, if it fails; NULL: it could not begin, and the call fails.
static void idist__host_step_begin(idist__task *t, const idist__host_step *step,
                                   idist__task **begun) {
    idist__op *o = idist__op_of(t);
    idist_group *group = step->group;
    bool on_leads = group == idist__ring_group_of(t->group)->leads;
    bool scales = o->user && !o->user->fn;
    idist__task *child;

    if (group->status != IDIST_OK) { // NOLINT(clang-analyzer-core.NullDereference)
        idist__ring_fail(idist__ring_of(t->group->w), t->group, group->status, group->cause);
        return;
    }

    child = idist__task_new(group);
    if (!child) {
        idist__host_no_memory(t);
        return;
    }

    child->call = t->call;
    child->call.kind = step->kind;
    child->call.send = step->send;
    child->call.recv = step->recv;
    child->call.count = step->count;
    child->call.recvcounts = step->recvcounts;
    child->call.recvdispls = step->recvdispls;
    child->call.root = step->root;
    child->call.u.user = o->user;
    if (t->call.op == IDIST_AVG || (scales && on_leads)) child->call.op = IDIST_SUM;

    child->whole = idist__fingerprint_of_task(t, IDIST__ALGO_BY_HOST);
    child->parent_past = o->past;
    child->timeout_ms = -1; // the parent has a deadline, and says what it waits for
    child->announced = true;
    child->warned = true;
    *begun = child;
    idist__task_start(child);
}

// Begins all steps of the current round.
static void idist__host_round_begin(idist__task *t) {
    idist__host_op *host = &idist__op_of(t)->u.host;
    const idist__host_step *first = &host->steps[host->current];
    size_t i, left = host->step_count - host->current;

    for (i = 0; i < left && first[i].round == first->round; i++) {
        host->running_count = i + 1;
        idist__host_step_begin(t, &first[i], &host->running[i]);
        if (t->group->status != IDIST_OK || !host->running[i]) return; // the plan may be gone
    }
}

// Whether all steps under way have ended, or one has failed, and nobody has looked at them yet.
static bool idist__host_round_ended(const idist__host_op *host) {
    size_t i, done_count = 0;

    for (i = 0; i < host->running_count && host->running[i]; i++) {
        if (!host->running[i]->done) continue;
        if (host->running[i]->status != IDIST_OK) return true;
        done_count++;
    }

    return done_count && done_count == host->running_count;
}

// The step that a call waits for. NULL: none.
IDIST__UNUSED static idist__task *idist__host_step_of(const idist__task *t) {
    const idist__host_op *host = &idist__op_of(t)->u.host;
    size_t i;

    for (i = 0; i < host->running_count; i++)
        if (host->running[i] && !host->running[i]->done) return host->running[i];

    return NULL;
}

// Whether the round under way has completed. If a step failed, so does the call, which then forgets
// them all.
static bool idist__host_round_done(idist__task *t) {
    idist__host_op *host = &idist__op_of(t)->u.host;
    size_t i;

    if (!idist__host_round_ended(host)) return false;

    for (i = 0; i < host->running_count; i++) {
        const idist__task *child = host->running[i];

        if (!child || !child->done || child->status == IDIST_OK) continue;
        idist__ring_fail(idist__ring_of(t->group->w), t->group, child->status, // or with its group
                         child->group->status == IDIST_OK ? child->text : child->group->cause);
        return false;
    }

    for (i = 0; i < host->running_count; i++) {
        if (host->running[i]) idist__task_free(host->running[i]);
        host->running[i] = NULL;
    }

    return true;
}

// The averages that the current round has completed. Goes on to the next round.
static void idist__host_round_end(idist__task *t) {
    const idist__op *o = idist__op_of(t);
    idist__host_op *host = &idist__op_of(t)->u.host;
    size_t end = host->current + host->running_count;

    for (; host->current < end; host->current++) {
        const idist__host_step *step = &host->steps[host->current];
        if (step->completes_sum && t->call.op == IDIST_AVG)
            idist__reduce_divide(step->recv, step->count, t->call.dtype, o->n);
    }

    host->running_count = 0;
}

// Takes a call out of the queue of its group.
static void idist__host_remove(idist__task *t) {
    idist__ring_group *rg = idist__ring_group_of(t->group);
    idist__task **at, *before = NULL;

    for (at = &rg->first; *at && *at != t; at = &idist__op_of(*at)->u.host.next) before = *at;

    if (*at) *at = idist__op_of(t)->u.host.next;
    if (rg->last == t) rg->last = before;
}

static void idist__host_run(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__host_op *host = &o->u.host;

    if (!host->steps && !idist__host_make_plan(t)) {
        idist__host_no_memory(t);
        return;
    }

    IDIST__CO_BEGIN(o)

    while (host->current < host->step_count) {
        idist__host_round_begin(t);
        IDIST__CO_AWAIT(o, idist__host_round_done(t));
        idist__host_round_end(t);
    }

    idist__host_remove(t);
    idist__op_done(t);
    IDIST__CO_END(o)
}

static void idist__host_prepare(idist__task *t) {
    idist__op_prepare(t);
    idist__op_of(t)->algorithm = IDIST__ALGO_BY_HOST;
    idist__op_of(t)->run = idist__host_run;
}

static void idist__host_start(idist__task *t) {
    idist__ring_group *rg = idist__ring_group_of(t->group);

    if (rg->last) idist__op_of(rg->last)->u.host.next = t;
    else rg->first = t;
    rg->last = t;
    if (rg->first == t) idist__op_run(t);
}

// Forgets a call. near and leads fail before the group that they belong to, so no step is under way
// any more. False: one is, and it uses the memory of the call.
static bool idist__host_cancel(idist__task *t) {
    idist__host_op *host = &idist__op_of(t)->u.host;
    size_t i;

    for (i = 0; i < host->running_count; i++)
        if (host->running[i] && !host->running[i]->done) return false;

    idist__host_remove(t);

    for (i = 0; i < host->running_count; i++) {
        if (host->running[i]) idist__task_free(host->running[i]);
        host->running[i] = NULL;
    }

    return true;
}

// Resumes the first call of each group once its round has completed, and the next call once that
// one is done.
static void idist__host_progress(idist__ring *ring) {
    const idist_group *g;

    for (g = &ring->w->group; g; g = g->next) {
        idist__ring_group *rg = g->rank >= 0 && g->impl ? idist__ring_group_of(g) : NULL;

        while (rg && rg->first && !ring->failed) {
            const idist__task *t = rg->first;
            const idist__op *o = idist__op_of(t);
            const idist__host_op *host = &o->u.host;

            if ((host->running_count && !idist__host_round_ended(host)) || o->running) break;
            idist__op_run(rg->first);
            if (rg->first == t && !idist__host_round_ended(host)) break;
        }
    }
}

//------------------------------------------------------------------------------
// [algo:choose]  which algorithm a call uses, and its scratch memory
// uses mem base:type float reduce launch:env kind model core:world block extent
// uses msg:types msg:op combine share:share stream ring chain direct
// uses dissemination tree doubling bruck host
//
// idist__choose_algorithm takes the first that can serve the call:
//
//   group                                      algorithm
//   on several hosts, with several members     BY_HOST   the operations that [algo:host] lists
//   on some of them
//   whose members share memory                 FLAT      up to 4 KiB in the slot of a rank
//                                              CHUNKED   more, and v-forms
//   any                                        LATENCY   as the table below says
//                                              BANDWIDTH
//
// The setting IDIST_ALGO rules out BY_HOST; LATENCY and BANDWIDTH rule out shared memory; CHUNKED
// rules out FLAT. All members of a group choose the same, so the choice rests on what is the same
// on all of them, and is part of the fingerprint. tests/unit/algo.c prints it for every operation.
//
// Path of a collective made of messages, called by [engine:task]:
//
//   idist__choose_begin     fills idist__op from the call: ranks, operands, reduction; allocates
//                           scratch; widens or scales the input of a reduction
//   idist__history_add      records the fingerprint, which includes the algorithm (idist_msg.h)
//   idist__choose_run       hands the call over to its algorithm
//   idist__choose_finish    ends a reduction: divides an average, unless a ring has done so, and
//                           narrows to the dtype of the call
//
// Floats of 16 and 8 bits are widened to F32 for a reduction, so that they are rounded only once.
//------------------------------------------------------------------------------

typedef struct idist__choice { // NOLINT(clang-analyzer-optin.performance.Padding)
    idist__kind kind;
    void (*latency)(idist__task *t);   // the algorithm itself; NULL: always use the other one
    size_t latency_kib;                // up to this contribution of one rank it is faster
    void (*bandwidth)(idist__task *t); // begins the stream; NULL: always use the other one
    bool keeps_order;                  // `bandwidth` also serves operations that do not commute
} idist__choice;

// Read a row as: all_reduce uses recursive doubling up to 64 KiB per rank, and a ring beyond. The
// limits hold for up to IDIST__CHOICE_RANKS ranks; they were measured with idist_perf over unix
// sockets and loopback TCP at 2 to 8 ranks, and `make tune` measures them on other machines. A
// limit is low where the latency algorithm carries blocks through several ranks. Of reduce_scatter,
// scatter and all_to_all it is that of one block. See idist__choose_limit for more ranks, and for
// networks between hosts.
static const idist__choice idist__choose_table[] = {
    // clang-format off
    // operation             few steps                 KiB  few bytes                        order
    {IDIST__BARRIER,         idist__dissemination_run, 0,   NULL,                            true},
    {IDIST__BROADCAST,       idist__tree_broadcast,    256, idist__chain_broadcast,          true},
    {IDIST__REDUCE,          idist__tree_reduce,       256, idist__chain_reduce,             false},
    {IDIST__ALL_REDUCE,      idist__doubling_reduce,   64,  idist__ring_algo_all_reduce,     false},
    {IDIST__REDUCE_SCATTER,  idist__doubling_reduce,   16,  idist__ring_algo_reduce_scatter, false},
    {IDIST__ALL_GATHER,      idist__bruck_all_gather,  16,  idist__ring_algo_all_gather,     true},
    {IDIST__GATHER,          idist__tree_gather,       2,   idist__direct_begin,             true},
    {IDIST__SCATTER,         idist__tree_scatter,      2,   idist__direct_begin,             true},
    {IDIST__ALL_TO_ALL,      idist__bruck_all_to_all,  2,   idist__direct_all_to_all,        true},
    {IDIST__SCAN,            idist__doubling_scan,     128, idist__chain_scan,               true},
    {IDIST__EXSCAN,          idist__doubling_scan,     128, idist__chain_scan,               true},
    {IDIST__ALL_GATHERV,     NULL,                     0,   idist__ring_algo_all_gather,     true},
    {IDIST__GATHERV,         NULL,                     0,   idist__direct_begin,             true},
    {IDIST__SCATTERV,        NULL,                     0,   idist__direct_begin,             true},
    {IDIST__ALL_TO_ALLV,     NULL,                     0,   idist__direct_begin,             true},
    {IDIST__REDUCE_SCATTERV, idist__doubling_reduce,   16,  idist__ring_algo_reduce_scatter, false},
    // clang-format on
};

static const idist__choice *idist__choose_row(idist__kind kind) {
    const idist__choice *row = idist__choose_table;
    while (row->kind != kind) row++;
    return row;
}

enum {
    IDIST__CHOICE_RANKS = 8,
    IDIST__CHOICE_RANKS_MOST = 65536, // beyond, limits stay
    IDIST__CHOICE_LATENCY = 8 * 1024, // a / b where the limits of the table were measured
    IDIST__CHOICE_COPY = 4,           // bytes that memory copies in the time in which one is sent
    IDIST__CHOICE_OVERHEAD = 12,      // a / o between hosts, roughly
    // The bandwidth that an interface reports may be wrong, so a / b has a bound, and so have the
    // limits that follow from it, for each IDIST__CHOICE_RANKS ranks.
    IDIST__CHOICE_LATENCY_MOST = 512 * 1024,
    IDIST__CHOICE_MOST = 512 * 1024
};

// The two algorithms take the same time when a rank contributes this many bytes. It follows from
// COSTS at the top of this file; the time that reductions take is left out. latency: a / b, the
// bytes that the network moves in the time of an empty message. UINT64_MAX: the one of few steps
// is never slower.
static uint64_t idist__choose_break_even(idist__kind kind, uint64_t n, uint64_t latency) {
    uint64_t log = 0, direct;
    uint64_t folded_log; // of doubling: ranks beyond a power of two join before and after

    while ((uint64_t)1 << log < n) log++;
    folded_log = (n & (n - 1)) ? log + 1 : log;

    switch (kind) {
    case IDIST__ALL_REDUCE:
        if (folded_log * n == 2 * (n - 1)) return UINT64_MAX;
        return (2 * (n - 1) - folded_log) * n * latency / (folded_log * n - 2 * (n - 1));
    case IDIST__REDUCE_SCATTER:
    case IDIST__REDUCE_SCATTERV:
        if (folded_log * n == n - 1 || n - 1 < folded_log) return 0;
        return (n - 1 - folded_log) * latency / (folded_log * n - (n - 1));
    case IDIST__ALL_GATHER:                                      // Bruck copies n blocks once more
        return IDIST__CHOICE_COPY * (n - 1 - log) * latency / n; // NOLINT(*-core.DivideZero)
    case IDIST__GATHER:
    case IDIST__SCATTER: // in a tree, half of the blocks wait for the other half
    case IDIST__ALL_TO_ALL:
        direct = latency + (n - 1) * latency / IDIST__CHOICE_OVERHEAD;
        if (direct <= log * latency || n < 4) return 0;
        return (direct - log * latency) /
               (kind == IDIST__ALL_TO_ALL ? n * log / 2 - (n - 1) : n / 2);
    default: break;
    }

    if (kind == IDIST__EXSCAN) log++;
    if (n - 1 < log) return 0;
    if (log == 1) return kind == IDIST__BROADCAST ? UINT64_MAX : IDIST__CHUNK_BYTES;

    // A chain of chunks takes (n - 2) steps of one chunk, a, and b for each byte.
    return ((n - 2) * (latency + IDIST__CHUNK_BYTES) + latency - log * latency) / (log - 1);
}

// Whether the other algorithm is direct, whose messages overlap. What that gains on one host is
// little.
static bool idist__choose_is_direct(idist__kind kind) {
    return kind == IDIST__GATHER || kind == IDIST__SCATTER || kind == IDIST__ALL_TO_ALL;
}

// The limit for a group over several hosts.
static uint64_t idist__choose_between_hosts(const idist__choice *row, uint64_t n,
                                            uint64_t latency) {
    uint64_t groups = (n + IDIST__CHOICE_RANKS - 1) / IDIST__CHOICE_RANKS;
    uint64_t most = groups * IDIST__CHOICE_MOST;
    uint64_t even;

    if (idist__choose_is_direct(row->kind)) most = (uint64_t)row->latency_kib * 1024;
    if (latency > IDIST__CHOICE_LATENCY_MOST) latency = IDIST__CHOICE_LATENCY_MOST;
    even = idist__choose_break_even(row->kind, n, latency);

    return even < most ? even : most;
}

// The limit for a group on one host: that of the table. For more ranks it changes as the break-even
// does.
static uint64_t idist__choose_inside_host(const idist__choice *row, uint64_t n) {
    uint64_t limit = (uint64_t)row->latency_kib * 1024;
    uint64_t at_table, at_n;

    if (n <= IDIST__CHOICE_RANKS || idist__choose_is_direct(row->kind)) return limit;
    at_table = idist__choose_break_even(row->kind, IDIST__CHOICE_RANKS, IDIST__CHOICE_LATENCY);
    at_n = idist__choose_break_even(row->kind, n, IDIST__CHOICE_LATENCY);

    return at_table ? limit * at_n / at_table : limit;
}

// Up to which contribution of a rank the latency algorithm is used. Integer arithmetic, so that
// every rank computes the same.
static size_t idist__choose_limit(const idist_group *g, const idist__choice *row) {
    int n = g->size < IDIST__CHOICE_RANKS_MOST ? g->size : IDIST__CHOICE_RANKS_MOST;
    uint64_t latency = idist__ring_group_of(g)->spans_hosts ? g->w->latency_nbytes : 0;
    uint64_t limit = latency && n > 1 ? idist__choose_between_hosts(row, (uint64_t)n, latency)
                                      : idist__choose_inside_host(row, (uint64_t)n);

    return limit < SIZE_MAX ? (size_t)limit : SIZE_MAX;
}

// Whether elements are widened to F32 for the reduction.
static bool idist__choose_widens(const idist__call *c, const idist__user_op *user) {
    bool is_function = user && user->fn;
    return idist__kind_reduces(c->kind) && idist__dtype_is_narrow(c->dtype) && !is_function;
}

// Whether the operation multiplies each contribution by a factor and then sums.
static bool idist__choose_scales(const idist__call *c, const idist__user_op *user) {
    return idist__kind_reduces(c->kind) && user && !user->fn;
}

// Over messages.
static idist__algorithm idist__choose_over_messages(const idist_group *g, const idist__call *c) {
    const idist__choice *row = idist__choose_row(c->kind);
    bool has_user_op = idist__kind_reduces(c->kind) && (int)c->op >= IDIST_OP_USER;
    const idist__user_op *user = has_user_op ? idist__world_user_op(g, c) : NULL;
    bool commutes = !has_user_op || user->commutative;
    size_t size = idist__choose_widens(c, user) ? sizeof(float) : idist_dtype_size(c->dtype);
    size_t count = c->count;

    if (c->kind == IDIST__REDUCE_SCATTERV) // the same on all ranks: a block of average size
        count = idist__block_at(idist__extent_block_at(c, g->size), g->size, 1);
    if (!row->bandwidth) return IDIST__ALGO_LATENCY;
    if (!row->latency) return IDIST__ALGO_BANDWIDTH;
    if (!count || (!commutes && !row->keeps_order)) return IDIST__ALGO_LATENCY;
    if (idist__kind_reduces(c->kind) && size > IDIST__CHUNK_BYTES) // no slot holds an element
        return IDIST__ALGO_LATENCY;
    if (g->w->cfg.algorithm == IDIST__ALGO_LATENCY) return IDIST__ALGO_LATENCY;
    if (g->w->cfg.algorithm == IDIST__ALGO_BANDWIDTH) return IDIST__ALGO_BANDWIDTH;

    return count * size <= idist__choose_limit(g, row) ? IDIST__ALGO_LATENCY
                                                       : IDIST__ALGO_BANDWIDTH;
}

static idist__algorithm idist__choose_algorithm(const idist_group *g, const idist__call *c) {
    idist__algorithm algorithm = idist__share_choose(g, c);

    if (idist__host_serves(g, c)) return IDIST__ALGO_BY_HOST;
    return algorithm != IDIST__ALGO_AUTO ? algorithm : idist__choose_over_messages(g, c);
}

// ---- operands ----

static void idist__choose_operands(idist__task *t) {
    idist__op *o = idist__op_of(t);
    const idist__call *c = &t->call;

    idist__op_prepare(t);

    if (idist__choose_widens(&t->call, o->user)) {
        o->size = sizeof(float);
        o->nbytes = o->count * o->size;
    }

    if (idist__kind_reduces(c->kind) && !(o->user && o->user->fn))
        o->reduce = idist__reduce_table[(unsigned)c->dtype]
                                       [o->user ? (unsigned)IDIST_SUM : (unsigned)c->op];
}

// How many elements this rank contributes.
static size_t idist__choose_input_count(const idist__task *t) {
    const idist__op *o = idist__op_of(t);
    return idist__kind_scatters_sum(t->call.kind) ? idist__extent_block_at(&t->call, o->n)
                                                  : o->count;
}

// ---- scratch memory ----
//
//   | widened or scaled input | widened result | what the algorithm works in | slots of a stream |
//   | one element, if it is larger than IDIST__OP_PIECE |
//
// Each part begins at a multiple of 64 bytes, and may be empty.

static size_t idist__choose_align(size_t nbytes) { return (nbytes + 63) & ~(size_t)63; }

static size_t idist__choose_latency_nbytes(const idist__task *t) {
    const idist__op *o = idist__op_of(t);
    size_t n = (size_t)o->n;

    switch (t->call.kind) {
    case IDIST__ALL_REDUCE: return o->nbytes;
    case IDIST__REDUCE:
    case IDIST__SCAN:
    case IDIST__EXSCAN: return 2 * o->nbytes;
    case IDIST__REDUCE_SCATTER:
    case IDIST__REDUCE_SCATTERV: return 2 * idist__choose_input_count(t) * o->size;
    case IDIST__ALL_GATHER: return n * o->nbytes;
    case IDIST__GATHER:
    case IDIST__SCATTER:
        return (size_t)idist__tree_size(idist__tree_relative_rank(t), o->n) * o->nbytes;
    case IDIST__ALL_TO_ALL: return 3 * n * o->nbytes;
    default: return 0;
    }
}

static size_t idist__choose_bandwidth_nbytes(const idist__task *t) {
    const idist__op *o = idist__op_of(t);
    size_t n = (size_t)o->n;

    switch (t->call.kind) {
    case IDIST__REDUCE: return o->rank != o->root ? o->nbytes : 0;
    case IDIST__EXSCAN: return o->nbytes;
    case IDIST__REDUCE_SCATTER:
    case IDIST__REDUCE_SCATTERV: return idist__choose_input_count(t) * o->size;
    case IDIST__ALL_TO_ALL: return t->call.send == t->call.recv ? n * o->nbytes : 0;
    default: return 0;
    }
}

static size_t idist__choose_slots_nbytes(const idist__task *t) {
    const idist__op *o = idist__op_of(t);

    size_t nbytes = o->nbytes;

    if (!idist__kind_reduces(t->call.kind) || o->algorithm != IDIST__ALGO_BANDWIDTH) return 0;

    if (idist__kind_scatters_sum(t->call.kind))
        nbytes = idist__ring_algo_largest_block(o, &t->call) * o->size;
    if (nbytes >= IDIST__CHUNK_BYTES) return o->slot_count * IDIST__CHUNK_BYTES;
    return o->slot_count * idist__choose_align(nbytes);
}

// False when memory is short.
static bool idist__choose_allocate(idist__task *t) {
    idist__op *o = idist__op_of(t);
    bool widens = idist__choose_widens(&t->call, o->user);
    size_t input = 0;
    size_t result = widens ? idist__choose_align(o->nbytes) : 0;
    size_t work = o->algorithm == IDIST__ALGO_LATENCY ? idist__choose_latency_nbytes(t)
                                                      : idist__choose_bandwidth_nbytes(t);
    size_t slots = idist__choose_slots_nbytes(t), element = 0;

    work = idist__choose_align(work);
    if (o->user && o->user->fn && o->size > IDIST__OP_PIECE) element = o->size;
    if (widens || idist__choose_scales(&t->call, o->user))
        input = idist__choose_align(idist__choose_input_count(t) * o->size);

    if (input + result + work + slots + element) {
        o->memory =
            (char *)idist__mem_raw(&t->group->w->cfg.mem, input + result + work + slots + element);
        if (!o->memory) return false;
    }

    o->work = o->memory ? o->memory + input + result : idist__op_buffer(NULL);
    if (slots) o->u.stream.slots = o->work + work;
    if (element) o->element = o->work + work + slots;
    if (widens && o->memory) o->out = o->memory + input;

    return true;
}

// Puts the input of a reduction that widens or scales into scratch.
static void idist__choose_convert_input(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist_dtype dtype = t->call.dtype;
    size_t count = idist__choose_input_count(t);
    bool widens = idist__choose_widens(&t->call, o->user);
    bool scales = idist__choose_scales(&t->call, o->user);

    if (!count || (!widens && !scales)) return;
    if (widens) idist__small_float_widen((float *)(void *)o->memory, o->in, count, dtype);
    else idist__block_copy(o->memory, o->in, count * o->size);

    o->in = o->memory;
    if (scales) idist__reduce_scale(o->memory, count, widens ? IDIST_F32 : dtype, o->user->factor);
}

// ---- begin, run, finish ----

// o->out holds the result as it was reduced, on the ranks that get one.
static void idist__choose_finish(idist__task *t) {
    idist__op *o = idist__op_of(t);
    const idist__call *c = &t->call;
    bool widens = idist__choose_widens(&t->call, o->user);
    bool has_result = (c->kind != IDIST__REDUCE || o->rank == o->root) &&
                      (c->kind != IDIST__EXSCAN || o->rank != 0);
    bool is_finished =
        c->kind == IDIST__ALL_REDUCE && o->algorithm != IDIST__ALGO_LATENCY; // a ring

    if (!has_result) return;
    if (!o->user && !is_finished)
        idist__reduce_finish(o->out, o->count, widens ? IDIST_F32 : c->dtype, c->op, o->n);
    if (widens)
        idist__small_float_narrow(c->recv, (const float *)(const void *)o->out, o->count, c->dtype);
}

// Prepares a collective. False when memory is short.
static bool idist__choose_begin(idist__task *t, idist__algorithm algorithm) {
    idist__op *o = idist__op_of(t);

    idist__choose_operands(t);
    o->algorithm = algorithm;
    o->slot_count = idist__stream_slot_count(t->group);
    if (!idist__choose_allocate(t)) return false;
    idist__choose_convert_input(t);
    if (idist__kind_reduces(t->call.kind)) o->finish = idist__choose_finish;

    return true;
}

static void idist__choose_run(idist__task *t) {
    idist__op *o = idist__op_of(t);
    const idist__choice *row = idist__choose_row(t->call.kind);

    if (o->algorithm == IDIST__ALGO_LATENCY) o->run = row->latency;
    else row->bandwidth(t);
}

#endif // IDIST_ALGO_H
