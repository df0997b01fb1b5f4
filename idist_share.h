/* idist_share.h - v0.1.0 - collectives of ranks that share memory - MIT licence

    Part of the implementation of idist; idist.h includes it where IDIST_IMPLEMENTATION is defined.

CONTENTS

      [share:share]  collectives of ranks that share memory
*/
#ifndef IDIST_SHARE_H
#define IDIST_SHARE_H

//------------------------------------------------------------------------------
// [share:share]  collectives of ranks that share memory
// uses os err mem base:type reduce world core:call self segment msg:types op
// uses link match verb
//
// Every rank has a place in memory that all can read: it writes there what the others need, says
// so, reads what it needs from theirs. Nothing is ever written into somebody else's place, so
// nobody waits for a lock.
//
//   place    notice 0 | notice 1 | ... | notice 7 | pace | buffer 0 | buffer 1 | buffer 2
//
// A notice announces a call: its number, its fingerprint, and a small contribution. That is all a
// small collective needs (FLAT): one line written, one line read per rank, and everybody computes
// the result, in the same order of ranks and so with the same bits. Who enters call k has compared
// all notices up to k - 4 with its own calls, and those of the ranks it reads from up to k; so a
// rank that has entered k is through with k - 4, and the notice of k - 4 may be overwritten by that
// of k + 4, eight being there in turn.
//
// Large contributions (CHUNKED) go through the three buffers, a chunk at a time. The pace counts
// chunks, over all calls:
//
//   exposed   my part of the chunk lies in my buffer
//   reduced   my buffer holds the finished sums of my block of it (all_reduce and reduce: each rank
//   adds up one block) freed     I have read what I need of it
//
//   rank 0   expose 0   expose 1   take 0   expose 2   take 1   ...      a rank is at most one
//   chunk ahead, so that rank 1   expose 0   expose 1   take 0   expose 2   take 1 nobody waits
//   while there is something to copy
//
// A contribution that lies in a window (idist_alloc) is not copied: its notice says where it is,
// and the others read it there. When all buffers of an all_reduce are in windows (WHOLE), each rank
// adds up its block of all of them and writes the sums into all of them: every byte is read once
// and written once.
//
// Where the kernel lets us read the memory of the other processes, large contributions are not
// copied either (FAR): the notice has their address. For all_reduce with a core for each rank:
// every rank adds up its block into its own result, and then reads the other blocks in the results
// of the others. Whoever gives something to be read where it is stays until all have read it.
//
// The idea of flat slots is that of Graham and Shipman, "MPI Support for Multi-core Architectures",
// 2008; for the chunks, reduce-scatter and all-gather in one buffer, see Jain et al., "Framework
// for Scalable Intra-Node Collective Operations using Shared Memory", 2018.
//------------------------------------------------------------------------------

#define IDIST__NOTICES 8
#define IDIST__AHEAD 4 // half of them
#define IDIST__CHUNK_MOST ((size_t)384 * 1024)
#define IDIST__CHUNK_CROWDED ((size_t)128 * 1024)
enum { IDIST__BUFFERS = 3 };
#define IDIST__FLAT_BYTES ((size_t)4096)
#define IDIST__LET_GO_MS 100
#define IDIST__INLINE_BYTES ((size_t)32)
#define IDIST__ALONE_BYTES ((size_t)128 * 1024)
#define IDIST__FAR_BYTES \
    ((size_t)8 * 1024) // from how many bytes on, found by measuring: of a block, ...
#define IDIST__FAR_CROWDED ((size_t)64 * 1024)
#define IDIST__FAR_BROADCAST ((size_t)2 << 20) // ... up to here
#define IDIST__FAR_SUMS ((size_t)2 << 20)      // and of all that one gives to be added up
#define IDIST__NOTICE_BYTES \
    (2 * IDIST__LINE +      \
     IDIST__FLAT_BYTES) // the last line: the call before, if that one was made of messages

enum { IDIST__FLAT = 3, IDIST__CHUNKED = 4 }; // algorithms, after those made of messages

typedef struct idist__notice { // one line; room for IDIST__FLAT_BYTES follows
    uint32_t nth;              // number of the shared call, written last
    uint16_t past;             // digest of the calls before it
    uint16_t zero;
    idist__print print;
    union {
        char bytes[IDIST__INLINE_BYTES]; // FLAT: a contribution of at most this size
        struct {                         // CHUNKED
            uint64_t send_at, recv_at;   // where the buffers lie in the file; 0: not in a window
            uint64_t far_send,
                far_recv; // their addresses, to be read through the kernel; 0: not that way
        } where;
        struct {           // the same, v-forms
            uint64_t most; // elements of the largest part. The counts follow the line.
        } parts;
    } u;
} idist__notice;

typedef struct idist__pace { // two lines; only `left` is written by others
    idist__counter exposed, reduced, freed;
    char pad[40];
    uint32_t left; // members that freed the group: then the place can serve another one
    char pad2[60];
} idist__pace;

// Where the contribution and the result of a rank are: at an address here, when they are in a
// window, or at one there, when we may read its memory; else NULL and 0.
typedef struct idist__spot {
    char *send, *recv;
    uint64_t far_send, far_recv;
} idist__spot;

typedef struct idist__share {
    idist__shm *shm;
    char **places;      // by rank in the group
    uint32_t *entered;  // by rank: the last shared call it is known to have entered
    const void **from;  // scratch, one per rank
    idist__spot *spots; // CHUNKED: where the buffers of each rank are

    idist__print prints[IDIST__NOTICES]; // what our own notices say
    uint16_t pasts[IDIST__NOTICES];
    uint32_t nth;     // shared calls entered so far
    uint32_t sure;    // the notices of all ranks up to this call are known and compared
    bool early;       // the quick way has entered the call that comes next
    uint64_t uses;    // chunks so far
    size_t recent[2]; // what the last two calls gave in their notices, in bytes
    size_t chunk_nbytes;
    idist__task *head, *last; // shared calls under way; only the first one runs
    idist__task *quick;       // serves the quick way
} idist__share;

static size_t idist__place_nbytes(size_t chunk_nbytes) {
    size_t n =
        IDIST__NOTICES * IDIST__NOTICE_BYTES + sizeof(idist__pace) + IDIST__BUFFERS * chunk_nbytes;
    return (n + IDIST__PAGE - 1) & ~(IDIST__PAGE - 1);
}

static idist__notice *idist__share_notice(const idist__share *s, int rank, uint32_t nth) {
    return (idist__notice *)(void *)(s->places[rank] +
                                     (nth % IDIST__NOTICES) * IDIST__NOTICE_BYTES);
}

// What that rank called before the call of a notice. It is written only if that was made of
// messages: see its number.
static idist__print *idist__share_before(const idist__share *s, int rank, uint32_t nth) {
    char *notice = (char *)idist__share_notice(s, rank, nth);
    return (idist__print *)(void *)(notice + IDIST__LINE + IDIST__FLAT_BYTES);
}

static idist__pace *idist__share_pace(const idist__share *s, int rank) {
    return (idist__pace *)(void *)(s->places[rank] + IDIST__NOTICES * IDIST__NOTICE_BYTES);
}

static char *idist__share_buffer(const idist__share *s, int rank, uint64_t use) {
    return s->places[rank] + IDIST__NOTICES * IDIST__NOTICE_BYTES + sizeof(idist__pace) +
           (size_t)(use % IDIST__BUFFERS) * s->chunk_nbytes;
}

// Copies to lines that others have read before: asks for those further on while it writes.
static void idist__share_put(char *to, const char *from, size_t nbytes) {
    size_t at, lines = nbytes & ~(IDIST__LINE - 1);

    for (at = 0; at < lines; at += IDIST__LINE) {
        if (at + IDIST__CLAIM_BYTES < lines) idist__os_claim(to + at + IDIST__CLAIM_BYTES);
        memcpy(to + at, from + at, IDIST__LINE);
    }

    if (nbytes > lines) memcpy(to + lines, from + lines, nbytes - lines);
}

static idist__share *idist__share_of(const idist__task *t) {
    return idist__ring_group_of(t->group)->share;
}

// Wakes the members that sleep, after something was written that they may wait for.
static void idist__share_knock(const idist__share *s, const idist_group *g) {
    int i;
    if (!idist__shm_any_asleep(s->shm)) return;
    for (i = 0; i < g->size; i++)
        if (i != g->rank) idist__shm_wake(s->shm, s->shm->local[g->ranks[i]]);
}

static void idist__share_publish(idist__task *t, idist__counter *counter, uint64_t value) {
    idist__os_handover();
    __atomic_store_n(counter, value, __ATOMIC_RELEASE);
    idist__share_knock(idist__share_of(t), t->group);
    t->group->w->nmoved++;
}

// ---- who gives what to whom ----

// Whether a contribution is one block per rank of the group, or one block for all.
static bool idist__share_many(idist__kind kind) {
    return kind == IDIST__REDUCE_SCATTER || kind == IDIST__SCATTER || kind == IDIST__ALL_TO_ALL ||
           kind == IDIST__SCATTERV || kind == IDIST__ALL_TO_ALLV;
}

static bool idist__share_gives(const idist__op *o, idist__kind kind, int rank) {
    if (kind == IDIST__BROADCAST || kind == IDIST__SCATTER || kind == IDIST__SCATTERV)
        return rank == o->root;
    return kind != IDIST__BARRIER;
}

// Whether this rank reads, or waits for, what another one gives.
static bool idist__share_reads(const idist__task *t, int rank) {
    const idist__op *o = idist__op_of(t);

    switch (t->call.kind) {
    case IDIST__BROADCAST:
    case IDIST__SCATTER:
    case IDIST__SCATTERV: return rank == o->root;
    case IDIST__GATHER:
    case IDIST__GATHERV: return o->r == o->root;
    case IDIST__REDUCE: return o->r == o->root || o->algorithm == IDIST__CHUNKED;
    case IDIST__SCAN:
    case IDIST__EXSCAN: return rank < o->r;
    default: return true;
    }
}

// Whether each rank adds up one block for all; for little data it is quicker when everybody adds up
// all of it.
static bool idist__share_adds_blocks(const idist__op *o, idist__kind kind) {
    return kind == IDIST__REDUCE ||
           (kind == IDIST__ALL_REDUCE && (size_t)(o->n * o->n) * o->nbytes > IDIST__ALONE_BYTES);
}

// Block d of our contribution: elements, and where.
static size_t idist__share_give_count(const idist__task *t, int d) {
    return t->call.sendcounts ? t->call.sendcounts[d] : t->call.count;
}

static const char *idist__share_give_at(const idist__task *t, int d) {
    const idist__op *o = idist__op_of(t);
    if (!idist__share_many(t->call.kind)) return o->in;
    if (t->call.sendcounts)
        return o->in + idist__displ(t->call.sendcounts, t->call.senddispls, d) * o->size;
    return o->in + (size_t)d * o->nbytes;
}

// What comes from a rank, where nothing is added up: elements, and where to.
static size_t idist__share_take_count(const idist__task *t, int rank) {
    return t->call.recvcounts ? t->call.recvcounts[rank] : t->call.count;
}

static char *idist__share_take_at(const idist__task *t, int rank) {
    const idist__op *o = idist__op_of(t);
    const idist__call *c = &t->call;

    if (c->kind == IDIST__BROADCAST || c->kind == IDIST__SCATTER || c->kind == IDIST__SCATTERV)
        return o->out;
    if (c->recvcounts) return o->out + idist__displ(c->recvcounts, c->recvdispls, rank) * o->size;
    return o->out + (size_t)rank * o->nbytes;
}

static size_t idist__share_least(size_t a, size_t b) { return a < b ? a : b; }

// Elements of a block of `count` in the chunk that begins at element `at`.
static size_t idist__share_part(const idist__op *o, size_t count, size_t at) {
    return at < count ? idist__share_least(count - at, o->chunk) : 0;
}

// ---- notices ----

static bool idist__share_has_entered(idist__share *s, int rank, uint32_t nth) {
    uint32_t seen;

    if ((int32_t)(s->entered[rank] - nth) >= 0) return true;
    seen = __atomic_load_n(&idist__share_notice(s, rank, nth)->nth, __ATOMIC_ACQUIRE);
    if ((int32_t)(seen - nth) < 0) return false;
    idist__os_handover();
    s->entered[rank] = seen;
    return true;
}

// The notices of a rank and of ourselves for call nth differ.
static void idist__share_differs(idist__task *t, int rank, uint32_t nth) {
    idist__share *s = idist__share_of(t);
    idist__ring *ring = idist__ring_of(t->group->w);
    const idist__print *ours = &s->prints[nth % IDIST__NOTICES],
                       *before = idist__ring_before(t->group, ours);
    idist__print theirs = idist__share_notice(s, rank, nth)->print;
    int peer = t->group->ranks[rank];
    const char *field = idist__print_difference(&theirs, ours);

    if (field || memcmp(&theirs, ours, sizeof theirs) != 0) {
        idist__ring_mismatch(ring, t->group, peer, &theirs, ours, field ? field : "sequence");
        return;
    }

    theirs = *idist__share_before(s, rank, nth);
    if (!before || theirs.seq != before->seq) theirs.kind = 0;
    idist__ring_past_differs(ring, t->group, peer, ours, &theirs);
}

// Compares what a rank called since we last did with what we called, up to number nth.
static bool idist__share_compare(idist__task *t, int rank, uint32_t nth) {
    idist__share *s = idist__share_of(t);
    uint32_t k = (int32_t)(nth - IDIST__AHEAD - s->sure) > 0 ? nth - IDIST__AHEAD : s->sure + 1;

    for (; (int32_t)(nth - k) >= 0; k++) {
        const idist__print *ours =
            &s->prints[k % IDIST__NOTICES]; // the notice's line is on its way to the others
        const idist__notice *e = idist__share_notice(s, rank, k);

        if (memcmp(&e->print, ours, sizeof *ours) == 0 && e->past == s->pasts[k % IDIST__NOTICES])
            continue;
        idist__share_differs(t, rank, k);
        return false;
    }

    return true;
}

static bool idist__share_may_enter(idist__task *t) {
    idist__share *s = idist__share_of(t);
    uint32_t nth = s->nth + 1 - IDIST__AHEAD;
    int i;

    if ((int32_t)(s->sure - nth) >= 0) return true;
    for (i = 0; i < t->group->size; i++)
        if (i != t->group->rank &&
            (!idist__share_has_entered(s, i, nth) || !idist__share_compare(t, i, nth)))
            return false;
    s->sure = nth;

    return true;
}

// Where a buffer lies in the file, when it is in a window.
static uint64_t idist__share_offset(const idist__share *s, const void *p, size_t nbytes) {
    const idist__shm *m = s->shm;
    size_t at = (size_t)((const char *)p - m->base),
           end = m->window_at + (size_t)m->n * m->window_nbytes;
    if ((const char *)p < m->base + m->window_at || at >= end || nbytes > end - at) return 0;
    return at;
}

// The same from another rank, checked.
static char *idist__share_pointer(const idist__share *s, uint64_t at, size_t nbytes) {
    const idist__shm *m = s->shm;
    uint64_t end = m->window_at + (uint64_t)m->n * m->window_nbytes;
    if (at < m->window_at || at >= end || nbytes > end - at) return NULL;
    return m->base + at;
}

static size_t idist__share_given_nbytes(const idist__task *t) {
    const idist__op *o = idist__op_of(t);
    return (idist__share_many(t->call.kind) ? (size_t)o->n : 1) * o->nbytes;
}

// Whether contributions are read in the other process, instead of being copied into a buffer: the
// same on all ranks. It copies once only; but system calls are dear, the kernel copies slowly, and
// a chunk that many read stays in the cache.
static bool idist__share_reads_far(const idist__task *t) {
    const idist__op *o = idist__op_of(t);
    const idist__shm *m = idist__share_of(t)->shm;
    idist__kind kind = t->call.kind;

    if (!m->far || t->group->w->cfg.algorithm == 3) return false;
    if (idist__kind_reduces(kind))
        return !m->crowded && idist__share_given_nbytes(t) >= IDIST__FAR_SUMS;
    if (kind == IDIST__BROADCAST)
        return !m->crowded && o->nbytes >= IDIST__FAR_BYTES && o->nbytes < IDIST__FAR_BROADCAST;
    if (kind == IDIST__ALL_GATHER && m->crowded && o->n > 4) return false;

    return o->nbytes >= (m->crowded ? IDIST__FAR_CROWDED : IDIST__FAR_BYTES);
}

// Where the buffers of a rank are, for a call that goes by chunks.
static void idist__share_locate(idist__task *t, int rank, const idist__notice *e) {
    const idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);
    idist__spot *spot = &s->spots[rank];

    if (o->algorithm == IDIST__FLAT) return;
    spot->send = idist__share_pointer(s, e->u.where.send_at, idist__share_given_nbytes(t));
    spot->recv = idist__share_pointer(s, e->u.where.recv_at, o->nbytes);
    spot->far_send = spot->send ? 0 : e->u.where.far_send;
    spot->far_recv = e->u.where.far_recv;
}

// The contribution of a rank in its notice.
static char *idist__share_payload(const idist__task *t, int rank) {
    const idist__op *o = idist__op_of(t);
    idist__notice *e = idist__share_notice(idist__share_of(t), rank, o->nth);
    return idist__share_given_nbytes(t) <= sizeof e->u.bytes ? e->u.bytes : (char *)(e + 1);
}

static void idist__share_scale(const idist__task *t, char *buf, size_t count) {
    const idist__op *o = idist__op_of(t);
    if (o->user && !o->user->fn) idist__reduce_scale(buf, count, t->call.dtype, o->user->factor);
}

// Says where our buffers are, so that the others read them there; not where they would read what we
// overwrite. False: the group has failed.
static bool idist__share_offer(idist__task *t, idist__notice *e) {
    idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);
    const idist__call *c = &t->call;
    bool scaled = o->user && !o->user->fn, all = c->kind == IDIST__ALL_REDUCE;
    bool overwrites = c->send == c->recv &&
                      (c->kind == IDIST__ALL_TO_ALL || c->kind == IDIST__SCAN ||
                       c->kind == IDIST__EXSCAN || (all && !idist__share_adds_blocks(o, c->kind)));

    memset(&e->u, 0, sizeof e->u);
    memset(s->spots, 0, sizeof *s->spots * (size_t)o->n);
    o->far = !scaled && idist__share_reads_far(t);

    if (o->far && overwrites &&
        c->kind == IDIST__ALL_TO_ALL) { // all go the same way, so this one gives a copy
        o->memory = (char *)idist__mem_raw(&t->group->w->cfg.mem, idist__share_given_nbytes(t));

        if (!o->memory) {
            idist__ring_fail(idist__ring_of(t->group->w), t->group, IDIST_ERR_NO_MEMORY,
                             "a rank is out of memory");
            return false;
        }

        memcpy(o->memory, o->in, idist__share_given_nbytes(t));
        o->in = o->memory;
        overwrites = false;
    }

    if (!idist__share_gives(o, c->kind, o->r) || scaled || overwrites) return true;
    e->u.where.send_at = idist__share_offset(s, o->in, idist__share_given_nbytes(t));
    if (all) e->u.where.recv_at = idist__share_offset(s, o->out, o->nbytes);
    if (o->far) e->u.where.far_send = (uint64_t)(uintptr_t)o->in;
    if (o->far && all) e->u.where.far_recv = (uint64_t)(uintptr_t)o->out;
    idist__share_locate(t, o->r, e);
    o->stays = e->u.where.send_at || e->u.where.far_send;

    return true;
}

// The counts of a v-form, which the others compare with what they expect.
static void idist__share_offer_parts(idist__task *t, idist__notice *e) {
    idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);
    const idist__call *c = &t->call;
    uint64_t *counts = (uint64_t *)(void *)(e + 1);
    int i;

    memset(s->spots, 0, sizeof *s->spots * (size_t)o->n);
    o->most = c->count;

    for (i = 0; i < o->n; i++) {
        counts[i] = idist__share_give_count(t, i);
        if (counts[i] > o->most) o->most = (size_t)counts[i];
        if (c->recvcounts && c->recvcounts[i] > o->most) o->most = c->recvcounts[i];
    }

    e->u.parts.most = o->most;
}

// Takes the lines of the next notice away from those who have read it, while there is nothing to do
// but wait: likely it will be as long as one of the last two.
static void idist__share_claim_next(const idist__task *t) {
    const idist__op *o = idist__op_of(t);
    char *next = (char *)idist__share_notice(idist__share_of(t), o->r, o->nth + 1);
    idist__share *s = idist__share_of(t);
    size_t nbytes, at;

    s->recent[o->nth % 2] = o->algorithm == IDIST__FLAT ? idist__share_given_nbytes(t) : 0;
    nbytes = s->recent[0] > s->recent[1] ? s->recent[0] : s->recent[1];
    if (nbytes <= sizeof(idist__notice) - offsetof(idist__notice, u)) nbytes = 0;
    nbytes = idist__share_least(nbytes, IDIST__CLAIM_BYTES) + IDIST__LINE;
    for (at = 0; at < nbytes; at += IDIST__LINE) idist__os_claim(next + at);
}

// The call before, for the error text of those who called something else before.
static void idist__share_tell_before(const idist__task *t, const idist__print *print) {
    const idist__op *o = idist__op_of(t);
    const idist__print *before = idist__ring_before(t->group, print);

    if (before && (before->algorithm & ~IDIST__ON_DEVICE) < IDIST__FLAT)
        *idist__share_before(idist__share_of(t), o->r, o->nth) = *before;
}

// False: it could not, and the group has failed.
static bool idist__share_enter(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);
    idist__notice *e;
    idist__print print;

    o->nth = ++s->nth;
    e = idist__share_notice(s, o->r, o->nth);

    if (o->algorithm == IDIST__CHUNKED) {
        if (idist__kind_is_v(t->call.kind)) idist__share_offer_parts(t, e);
        else if (!idist__share_offer(t, e)) return false;
    } else if (idist__share_gives(o, t->call.kind, o->r)) {
        char *payload = idist__share_payload(t, o->r);
        size_t nbytes = idist__share_given_nbytes(t);
        idist__share_put(payload, o->in, nbytes);
        idist__share_scale(t, payload,
                           nbytes /
                               (o->size ? o->size : 1)); // NOLINT(clang-analyzer-core.DivideZero)
    }

    print = idist__task_print(t, o->algorithm);
    idist__share_tell_before(t, &print);
    // The first line at the end, in one go: the others poll it, and take it away between two
    // writes.
    s->prints[o->nth % IDIST__NOTICES] = print;
    s->pasts[o->nth % IDIST__NOTICES] = o->past;
    e->print = print;
    e->past = o->past;
    idist__os_handover();
    __atomic_store_n(&e->nth, o->nth, __ATOMIC_RELEASE);
    idist__share_knock(s, t->group);
    idist__share_claim_next(t);
    o->entered = true;
    o->who = 0;

    return true;
}

// Compares the call of another rank with ours, and what it says about counts that only the two of
// us know.
static bool idist__share_agree(idist__task *t, int rank) {
    idist__op *o = idist__op_of(t);
    idist__ring *ring = idist__ring_of(t->group->w);
    const idist__notice *e = idist__share_notice(idist__share_of(t), rank, o->nth);
    uint64_t given;

    if (!idist__share_compare(t, rank, o->nth)) return false;

    if (!idist__kind_is_v(t->call.kind)) {
        idist__share_locate(t, rank, e);
        return true;
    }

    o->most = e->u.parts.most > o->most ? (size_t)e->u.parts.most : o->most;
    given = ((const uint64_t *)(const void *)(e + 1))[o->r];
    if (!idist__share_gives(o, t->call.kind, rank) || !idist__share_reads(t, rank) ||
        given == idist__share_take_count(t, rank))
        return true;

    {
        char cause[400];
        idist__counts_text(t->group->ranks[rank], given, t->group->ranks[o->r],
                           idist__share_take_count(t, rank), "elements", t, cause, sizeof cause);
        idist__ring_fail(ring, t->group, IDIST_ERR_MISMATCH, cause);
    }

    return false;
}

// Whether those whose data we need, or all, are in this call too.
static bool idist__share_entered(idist__task *t, bool all) {
    idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);
    bool everybody = true;
    int i;

    for (; o->who < o->n; o->who++) {
        if (o->who == o->r) continue;
        if (!all && !idist__share_reads(t, o->who)) continue;
        if (!idist__share_has_entered(s, o->who, o->nth) || !idist__share_agree(t, o->who))
            return false;
    }

    o->who = 0;
    for (i = 0; i < o->n && everybody; i++)
        everybody = all || i == o->r || idist__share_reads(t, i);
    if (everybody) s->sure = o->nth;

    return true;
}

// ---- taking ----

// Block d of what a rank gives, from element `at` on.
static const char *idist__share_source(const idist__task *t, int rank, int d, size_t at) {
    const idist__op *o = idist__op_of(t);
    const idist__share *s = idist__share_of(t);
    bool many = idist__share_many(t->call.kind);

    if (rank == o->r && !(o->user && !o->user->fn))
        return idist__share_give_at(t, d) + at * o->size;
    if (o->algorithm == IDIST__FLAT)
        return idist__share_payload(t, rank) + (many ? (size_t)d * o->nbytes : 0);
    if (s->spots[rank].send)
        return s->spots[rank].send + (many ? (size_t)d * o->nbytes : 0) + at * o->size;

    return idist__share_buffer(s, rank, o->use + o->j) +
           ((many ? (size_t)d * o->chunk : 0) + at - o->j * o->chunk) * o->size;
}

// out = from[0] (op) ... (op) from[n - 1]; out may be one of them. User ops work on their second
// operand: it is folded from the right, a piece at a time.
static void idist__share_reduce(const idist__task *t, void *out, const void *const *from, int n,
                                size_t count) {
    const idist__op *o = idist__op_of(t);
    uint64_t piece[512];
    size_t at, k, most;
    int i;

    if (!o->user || !o->user->fn) {
        idist__reduce_many(out, from, n, count, t->call.dtype, o->user ? IDIST_SUM : t->call.op,
                           t->call.op == IDIST_AVG ? o->n : 0);
        return;
    }

    most = sizeof piece / o->size; // NOLINT(clang-analyzer-core.DivideZero)
    idist__me.callbacks++;

    for (at = 0; at < count; at += k) {
        k = idist__share_least(count - at, most);
        memcpy(piece, (const char *)from[n - 1] + at * o->size, k * o->size);
        for (i = n - 2; i >= 0; i--)
            o->user->fn((const char *)from[i] + at * o->size, piece, k, t->call.dtype,
                        o->user->arg);
        memcpy((char *)out + at * o->size, piece, k * o->size);
    }

    idist__me.callbacks--;
}

// Reads nbytes at an address of another process. On failure the group fails.
static bool idist__share_pull(idist__task *t, int rank, uint64_t at, char *buf, size_t nbytes) {
    const idist__op *o = idist__op_of(t);
    const idist__share *s = idist__share_of(t);
    int world_rank = t->group->ranks[rank],
        err = idist__shm_pull(s->shm, s->shm->local[world_rank], at, buf, nbytes);
    char cause[300];

    if (!err) return true;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (__atomic_load_n(&idist__share_notice(s, rank, o->nth)->nth, __ATOMIC_ACQUIRE) != o->nth)
        return false; // it left
    snprintf(cause, sizeof cause,
             err == ESRCH ? "rank %d on %s was lost: its process ended"
                          : "the buffer of rank %d on %s cannot be read: %s",
             world_rank, t->group->w->nodes[world_rank].hostname, strerror(err));
    idist__ring_fail(idist__ring_of(t->group->w), t->group,
                     err == ESRCH ? IDIST_ERR_PEER_LOST : IDIST_ERR_SYSTEM, cause);

    return false;
}

// out = the sum, in the wider sense, over ranks 0 .. n - 1, of `count` elements at `at` of block d
// of what they give. What is far is read piece by piece.
static bool idist__share_add(idist__task *t, char *out, int n, int d, size_t at, size_t count) {
    const idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);
    size_t done, k,
        most =
            o->far ? IDIST__FAR_PIECE / o->size : count; // NOLINT(clang-analyzer-core.DivideZero)
    int i;

    for (done = 0; done < count; done += k) {
        k = idist__share_least(count - done, most);

        for (i = 0; i < n; i++) {
            char *piece = s->shm->pieces + (size_t)i * IDIST__FAR_PIECE;
            uint64_t there = o->far && i != o->r ? s->spots[i].far_send : 0;
            if (there)
                there += (idist__share_many(t->call.kind) ? (size_t)d * o->nbytes : 0) +
                         (at + done) * o->size;
            if (there && !idist__share_pull(t, i, there, piece, k * o->size)) return false;
            s->from[i] = there ? piece : idist__share_source(t, i, d, at + done);
        }

        idist__share_reduce(t, out + done * o->size, s->from, n, k);
    }

    return true;
}

// FLAT: the sum of what lies in the notices.
static void idist__share_add_flat(const idist__task *t, int n) {
    const idist__op *o = idist__op_of(t);
    const idist__share *s = idist__share_of(t);
    size_t given = idist__share_given_nbytes(t),
           at = given <= IDIST__INLINE_BYTES ? offsetof(idist__notice, u) : IDIST__LINE;
    int i;

    if (given > o->nbytes) at += (size_t)o->r * o->nbytes; // our block of theirs
    for (i = 0; i < n; i++) s->from[i] = (const char *)idist__share_notice(s, i, o->nth) + at;
    if (o->r < n && !(o->user && !o->user->fn)) s->from[o->r] = idist__share_give_at(t, o->r);
    idist__share_reduce(t, o->out, s->from, n, o->count);
}

// Everything this rank takes of one chunk, where no blocks are added up by others. FLAT: of the
// whole call.
static bool idist__share_take(idist__task *t, size_t at) {
    idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);
    idist__kind kind = t->call.kind;
    int i, n = kind == IDIST__SCAN ? o->r + 1 : kind == IDIST__EXSCAN ? o->r : o->n;

    if (kind == IDIST__BARRIER) return true;

    if (idist__kind_reduces(kind)) {
        size_t k = idist__share_part(o, o->count, at);
        if ((kind == IDIST__REDUCE && o->r != o->root) || !n || !k) return true;
        if (o->algorithm != IDIST__FLAT)
            return idist__share_add(t, o->out + at * o->size, n, o->r, at, k);
        idist__share_add_flat(t, n);
        return true;
    }

    for (i = 0; i < o->n; i++) {
        int from = idist__wrap(o->r + i, o->n); // not all from the same one at the same time
        size_t k = idist__share_reads(t, from)
                       ? idist__share_part(o, idist__share_take_count(t, from), at)
                       : 0;
        char *to = k ? idist__share_take_at(t, from) + at * o->size : NULL;
        uint64_t there = o->far && from != o->r ? s->spots[from].far_send : 0;
        if (there) there += (idist__share_many(kind) ? (size_t)o->r * o->nbytes : 0) + at * o->size;
        if (k && there && !idist__share_pull(t, from, there, to, k * o->size)) return false;
        if (k && !there) idist__copy(to, idist__share_source(t, from, o->r, at), k * o->size);
    }

    return true;
}

// Whether what we have just read in the buffers of others was theirs to give: who has left the call
// with an error may have used them for something else since, but took its notice back before. If
// so, the reason is on its way.
static bool idist__share_still_there(idist__task *t) {
    const idist__op *o = idist__op_of(t);
    const idist__share *s = idist__share_of(t);
    int i;

    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    for (i = 0; i < o->n; i++)
        if (i != o->r && idist__share_reads(t, i) &&
            __atomic_load_n(&idist__share_notice(s, i, o->nth)->nth, __ATOMIC_ACQUIRE) != o->nth)
            return false;

    return true;
}

static void idist__share_done(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);
    s->head = o->after;
    if (!s->head) s->last = NULL;
    idist__op_done(t);
}

static void idist__share_flat(idist__task *t) {
    idist__op *o = idist__op_of(t);

    IDIST__CO_BEGIN(o)

    if (!o->entered) {
        IDIST__CO_AWAIT(o, idist__share_may_enter(t));
        idist__share_enter(t);
    }

    IDIST__CO_AWAIT(o, idist__share_entered(t, false));
    idist__share_take(t, 0);
    idist__share_done(t);
    IDIST__CO_END(o)
}

// ---- chunks ----

// Whether all members, or those we read from, have come this far.
static bool idist__share_all(idist__task *t, size_t counter, uint64_t value, bool readers) {
    idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);

    for (; o->who < o->n; o->who++) {
        const idist__counter *at;
        if (o->who == o->r || (readers && !idist__share_reads(t, o->who))) continue;
        at = (const idist__counter *)(const void *)((const char *)idist__share_pace(s, o->who) +
                                                    counter);
        if (__atomic_load_n(at, __ATOMIC_ACQUIRE) < value) return false;
    }

    idist__os_handover();
    o->who = 0;

    return true;
}

#define IDIST__ALL_HAVE(t, counter, value) \
    idist__share_all(t, offsetof(idist__pace, counter), value, false)
#define IDIST__SOURCES_HAVE(t, counter, value) \
    idist__share_all(t, offsetof(idist__pace, counter), value, true)

// Where rank b's block of a chunk of k elements begins: whole lines, so that no two ranks write to
// one.
static size_t idist__share_block_at(const idist__op *o, size_t k, int b) {
    size_t line = IDIST__LINE / o->size,
           nlines = (k + line - 1) / line; // NOLINT(clang-analyzer-core.DivideZero)
    return idist__share_least(idist__block_at(nlines, o->n, b) * line, k);
}

// Copies our part of chunk i into a buffer; of a sum to be built in blocks, all but the block that
// we add up ourselves.
static void idist__share_expose_chunk(idist__task *t, size_t i) {
    idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);
    char *buffer = idist__share_buffer(s, o->r, o->use + i);
    bool many = idist__share_many(t->call.kind), scaled = o->user && !o->user->fn;
    size_t at = i * o->chunk;
    int d;

    if (idist__share_adds_blocks(o, t->call.kind) && !scaled) {
        size_t k = idist__share_part(o, o->count, at), from = idist__share_block_at(o, k, o->r),
               to = idist__share_block_at(o, k, o->r + 1);
        idist__share_put(buffer, o->in + at * o->size, from * o->size);
        idist__share_put(buffer + to * o->size, o->in + (at + to) * o->size, (k - to) * o->size);
        return;
    }

    for (d = 0; d < (many ? o->n : 1); d++) {
        size_t k = idist__share_part(o, idist__share_give_count(t, d), at);
        char *to = buffer + (size_t)d * o->chunk * o->size;
        if (many && d == o->r && !scaled) continue;
        idist__share_put(to, idist__share_give_at(t, d) + at * o->size, k * o->size);
        idist__share_scale(t, to, k);
    }
}

// Exposes up to one chunk ahead. Returns whether the present one is exposed.
static bool idist__share_expose(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);
    idist__pace *pace = idist__share_pace(s, o->r);
    bool copies = idist__share_gives(o, t->call.kind, o->r) && !o->stays;

    while (o->i < o->chunks && o->i < o->j + 2) {
        uint64_t use = o->use + o->i;
        if (copies && use >= IDIST__BUFFERS && !IDIST__ALL_HAVE(t, freed, use - IDIST__BUFFERS + 1))
            break;
        if (copies) idist__share_expose_chunk(t, o->i);
        o->i++;
        idist__share_publish(t, &pace->exposed, o->use + o->i);
    }

    return o->i > o->j;
}

static void idist__share_plan(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);
    size_t blocks = idist__share_many(t->call.kind) ? (size_t)o->n : 1;
    size_t count = idist__kind_is_v(t->call.kind) ? o->most : o->count, nbytes = s->chunk_nbytes;
    size_t line = IDIST__LINE / o->size; // NOLINT(clang-analyzer-core.DivideZero)

    if (s->shm->crowded && nbytes > IDIST__CHUNK_CROWDED)
        nbytes = IDIST__CHUNK_CROWDED; // all ranks share the caches
    o->chunk = nbytes / blocks / o->size;
    if (o->chunk > line) o->chunk -= o->chunk % line;
    if (o->far && !idist__kind_reduces(t->call.kind)) o->chunk = count; // no buffer is used
    o->chunks = count ? (count - 1) / o->chunk + 1 : 1;
    o->use = s->uses;
    o->who = 0;
}

static void idist__share_chunked(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);
    idist__pace *pace = idist__share_pace(s, o->r);

    IDIST__CO_BEGIN(o)
    IDIST__CO_AWAIT(o, idist__share_may_enter(t));
    if (!idist__share_enter(t)) return;

    if (idist__kind_is_v(t->call.kind)) {
        IDIST__CO_AWAIT(o, idist__share_entered(t, true));
        idist__share_plan(t);
    } else {
        idist__share_plan(t);
        idist__share_expose(t);
        o->who = 0;
        IDIST__CO_AWAIT(o, idist__share_entered(t, false));
    }

    for (o->j = 0; o->j < o->chunks; o->j++) {
        IDIST__CO_AWAIT(o, idist__share_expose(t));
        o->who = 0;
        IDIST__CO_AWAIT(o, IDIST__SOURCES_HAVE(t, exposed, o->use + o->j + 1));
        if (!idist__share_take(t, o->j * o->chunk) || !idist__share_still_there(t)) return;
        idist__share_publish(t, &pace->freed, o->use + o->j + 1);
    }

    if (o->stays) // the caller may change it when we return
        IDIST__CO_AWAIT(o, IDIST__ALL_HAVE(t, freed, o->use + o->chunks));
    s->uses = o->use + o->chunks;
    idist__share_done(t);
    IDIST__CO_END(o)
}

// ---- all_reduce and reduce: each rank adds up one block of every chunk ----

static bool idist__share_add_block(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);
    size_t at = o->j * o->chunk, k = idist__share_part(o, o->count, at),
           from = idist__share_block_at(o, k, o->r);
    size_t count = idist__share_block_at(o, k, o->r + 1) - from;
    char *sum = idist__share_buffer(s, o->r, o->use + o->j) + from * o->size,
         *out = o->out + (at + from) * o->size;

    if (!count) return true;
    if (t->call.kind == IDIST__REDUCE) // only the root wants it
        return idist__share_add(t, o->r == o->root ? out : sum, o->n, 0, at + from, count);
    if (!idist__share_add(t, out, o->n, 0, at + from, count)) return false;
    idist__share_put(sum, out, count * o->size);

    return true;
}

static void idist__share_take_blocks(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);
    size_t at = o->j * o->chunk, k = idist__share_part(o, o->count, at);
    int i;

    if (t->call.kind == IDIST__REDUCE && o->r != o->root) return;

    for (i = 0; i < o->n; i++) {
        size_t from = idist__share_block_at(o, k, i), to = idist__share_block_at(o, k, i + 1);
        if (i != o->r)
            idist__copy(o->out + (at + from) * o->size,
                        idist__share_buffer(s, i, o->use + o->j) + from * o->size,
                        (to - from) * o->size);
    }
}

// Whether all buffers are in windows.
static bool idist__share_all_near(const idist__task *t) {
    const idist__op *o = idist__op_of(t);
    const idist__share *s = idist__share_of(t);
    int i;

    for (i = 0; i < o->n; i++)
        if (!s->spots[i].send || !s->spots[i].recv) return false;
    return true;
}

// WHOLE: our block of all contributions, into all results.
static bool idist__share_add_whole(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);
    size_t at = idist__share_block_at(o, o->count, o->r),
           end = idist__share_block_at(o, o->count, o->r + 1), k;
    int i;

    for (; at < end; at += k) {
        char *out = o->out + at * o->size;
        k = idist__share_least(end - at, 16384 / o->size); // stays in the nearest cache
        if (!idist__share_add(t, out, o->n, 0, at, k)) return false;
        if (!idist__share_still_there(t))
            return false; // whoever has left wants nothing written any more
        for (i = 0; i < o->n; i++)
            if (i != o->r) memcpy(s->spots[i].recv + at * o->size, out, k * o->size);
    }

    return true;
}

// FAR: our block of all contributions, into our own result; then the blocks of the others, out of
// theirs.
static bool idist__share_add_far(idist__task *t) {
    idist__op *o = idist__op_of(t);
    size_t at = idist__share_block_at(o, o->count, o->r),
           end = idist__share_block_at(o, o->count, o->r + 1);
    return idist__share_add(t, o->out + at * o->size, o->n, 0, at, end - at);
}

static bool idist__share_take_far(idist__task *t) {
    idist__op *o = idist__op_of(t);
    const idist__share *s = idist__share_of(t);
    int i;

    for (i = 1; i < o->n; i++) {
        int from = idist__wrap(o->r + i, o->n);
        size_t at = idist__share_block_at(o, o->count, from) * o->size;
        size_t end = idist__share_block_at(o, o->count, from + 1) * o->size;
        if (end > at &&
            !idist__share_pull(t, from, s->spots[from].far_recv + at, o->out + at, end - at))
            return false;
    }

    return true;
}

static void idist__share_blocks(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);
    idist__pace *pace = idist__share_pace(s, o->r);

    IDIST__CO_BEGIN(o)
    IDIST__CO_AWAIT(o, idist__share_may_enter(t));
    if (!idist__share_enter(t)) return;
    idist__share_plan(t);
    if (!o->stays) idist__share_expose(t); // whoever the others are, it is our buffer
    o->who = 0;
    IDIST__CO_AWAIT(o, idist__share_entered(t, false));

    if (t->call.kind == IDIST__ALL_REDUCE && (o->far || idist__share_all_near(t))) {
        o->far = o->far && !idist__share_all_near(t);
        o->whole = !o->far;
        if (o->far ? !idist__share_add_far(t) : !idist__share_add_whole(t)) return;
        if (!idist__share_still_there(t)) return;
        o->chunks = 1;
        idist__share_publish(t, &pace->reduced, o->use + 1);
        IDIST__CO_AWAIT(o, IDIST__ALL_HAVE(t, reduced, o->use + 1));
        if (o->far && (!idist__share_take_far(t) || !idist__share_still_there(t))) return;
        idist__share_publish(t, &pace->freed, o->use + 1);
        if (o->far) IDIST__CO_AWAIT(o, IDIST__ALL_HAVE(t, freed, o->use + 1));
    } else {
        for (o->j = 0; o->j < o->chunks; o->j++) {
            IDIST__CO_AWAIT(o, idist__share_expose(t));
            o->who = 0;
            IDIST__CO_AWAIT(o, IDIST__ALL_HAVE(t, exposed, o->use + o->j + 1));
            if (!idist__share_add_block(t) || !idist__share_still_there(t)) return;
            idist__share_publish(t, &pace->reduced, o->use + o->j + 1);
            if (t->call.kind == IDIST__ALL_REDUCE || o->r == o->root)
                IDIST__CO_AWAIT(o, IDIST__ALL_HAVE(t, reduced, o->use + o->j + 1));
            idist__share_take_blocks(t);
            idist__share_publish(t, &pace->freed, o->use + o->j + 1);
        }

        if (o->stays) IDIST__CO_AWAIT(o, IDIST__ALL_HAVE(t, reduced, o->use + o->chunks));
    }

    s->uses = o->use + o->chunks;
    idist__share_done(t);
    IDIST__CO_END(o)
}

// ---- starting and ending ----

// Which way a call goes in this group: FLAT, CHUNKED, or 0 for messages. The same on all members.
static int idist__share_choose(const idist_group *g, const idist__call *c) {
    const idist__share *s = idist__ring_group_of(g)->share;
    int forced = g->w->cfg.algorithm;
    size_t nbytes;
    bool scaled = (int)c->op >= IDIST_OP_USER && idist__kind_reduces(c->kind) &&
                  !idist__call_user_op(g, c)->fn;

    if (!s || forced == 1 || forced == 2 || (scaled && idist__type_is_narrow(c->dtype))) return 0;
    if (idist__kind_is_v(c->kind))
        return (size_t)g->size * sizeof(uint64_t) <= IDIST__FLAT_BYTES ? IDIST__CHUNKED : 0;
    if (forced == 3 && c->count) return IDIST__CHUNKED;
    if (!c->count) return IDIST__FLAT;
    if (c->count > IDIST__FLAT_BYTES) return IDIST__CHUNKED;
    nbytes =
        c->count * idist_dtype_size(c->dtype) * (idist__share_many(c->kind) ? (size_t)g->size : 1);

    return nbytes <= IDIST__FLAT_BYTES ? IDIST__FLAT : IDIST__CHUNKED;
}

// What a shared call works on. Unlike message algorithms it takes narrow floats as they are.
static void idist__share_prepare(idist__task *t, int algorithm) {
    idist__op *o = idist__op_of(t);
    const idist__call *c = &t->call;

    o->n = t->group->size;
    o->r = t->group->rank;
    o->root = c->root;
    o->user = NULL;

    if (idist__kind_reduces(c->kind) && (int)c->op >= IDIST_OP_USER) {
        o->user_op = *idist__call_user_op(t->group, c);
        o->user = &o->user_op;
    }

    o->size = idist_dtype_size(c->dtype);
    o->count = o->chunk = c->count;
    o->nbytes = o->count * o->size;
    o->in = idist__op_buffer(c->send);
    o->out = idist__op_buffer(c->recv);
    if (c->kind == IDIST__BROADCAST) o->in = o->out;
    o->algorithm = algorithm;

    if ((c->kind == IDIST__GATHERV || c->kind == IDIST__SCATTERV) &&
        o->r != o->root) { // looked at on the root only
        t->call.sendcounts = t->call.senddispls = NULL;
        t->call.recvcounts = t->call.recvdispls = NULL;
    }
}

static void idist__share_start(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);

    o->run = o->algorithm == IDIST__FLAT                 ? idist__share_flat
             : idist__share_adds_blocks(o, t->call.kind) ? idist__share_blocks
                                                         : idist__share_chunked;

    if (s->early) { // the quick way wrote the notice
        o->nth = s->nth;
        o->entered = true;
        s->early = false;
    }

    if (s->last) idist__op_of(s->last)->after = t;
    else s->head = t;
    s->last = t;
    if (s->head == t) idist__op_run(t);
}

// A small blocking collective while nothing else is under way: no task, no clock.
static bool idist__share_quick(idist_group *g, const idist__call *c) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__share *s = idist__ring_group_of(g)->share;
    idist__task *t;
    int turns;

    if (!s || s->head || idist__share_choose(g, c) != IDIST__FLAT || ring->failed) return false;
    t = s->quick;
    t->call = *c;
    t->seq = g->seq + 1;
    idist__share_prepare(t, IDIST__FLAT);
    idist__op_of(t)->past = idist__ring_past(t);
    if (!idist__share_may_enter(t)) return false;
    idist__share_enter(t);

    for (turns = 0; !idist__share_entered(t, false); turns++) {
        if (idist__quick_waits(ring, turns)) continue;
        s->early = true;
        return false;
    }

    idist__share_take(t, 0);
    g->seq++;
    idist__ring_note(t, idist__op_of(t), IDIST__FLAT);

    return true;
}

// Moves the first shared call of each group on.
static void idist__share_progress(idist__ring *ring) {
    idist_group *g;

    for (g = &ring->w->group; g; g = g->next) {
        idist__share *s = g->rank >= 0 && g->impl ? idist__ring_group_of(g)->share : NULL;

        while (s && s->head) {
            const idist__task *t = s->head;
            idist__op_run(s->head);
            if (s->head == t || ring->failed) break;
        }

        if (ring->failed) break;
    }
}

// The group failed here. Whoever comes late must not go on with what we have left there: it looks
// into its links instead, and learns of it.
static void idist__share_withdraw(idist_group *g) {
    idist__share *s = idist__ring_group_of(g)->share;
    uint32_t k;

    for (k = 0; s && k < IDIST__NOTICES; k++)
        __atomic_store_n(&idist__share_notice(s, g->rank, k)->nth, s->nth - ((uint32_t)1 << 30),
                         __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST); // before the caller has its buffers back
}

// Whether this member may still write into our result. It looks before every piece that it writes.
static bool idist__share_may_write(const idist_group *g, const idist__op *o, int rank) {
    const idist__ring *ring = idist__ring_of(g->w);
    const idist__share *s = idist__ring_group_of(g)->share;

    return rank != g->rank && ring->links[g->ranks[rank]].open &&
           __atomic_load_n(&idist__share_pace(s, rank)->reduced, __ATOMIC_ACQUIRE) <= o->use &&
           __atomic_load_n(&idist__share_notice(s, rank, o->nth)->nth, __ATOMIC_ACQUIRE) == o->nth;
}

// When a call ends too early in which the others write into our result (WHOLE): until each of them
// is through with it, has left the call too, or is dead, which we may not have noticed yet: the
// failure may have come from another rank.
static void idist__share_let_go(const idist_group *g) {
    const idist__ring *ring = idist__ring_of(g->w);
    const idist__share *s = idist__ring_group_of(g)->share;
    const idist__op *o = s && s->head ? idist__op_of(s->head) : NULL;
    int64_t until_ns = idist__os_deadline(IDIST__LET_GO_MS); // for those who are stopped
    int i;

    if (!o || !o->whole) return;

    for (i = 0; i < g->size; i++) {
        const idist__shm_port *port = &ring->shm->ports[ring->shm->local[g->ranks[i]]];
        while (idist__share_may_write(g, o, i) && !idist__shm_gone(port) &&
               idist__os_now_ns() < until_ns)
            sched_yield();
    }
}

static void idist__share_cancel(idist__task *t) {
    idist__share *s = idist__share_of(t);
    idist__task **at, *last = NULL;

    if (!s) return;
    for (at = &s->head; *at && *at != t; at = &idist__op_of(*at)->after) last = *at;
    if (*at) *at = idist__op_of(t)->after;
    if (s->last == t) s->last = last;
}

// Whether t lacks something that only this rank of the group can begin.
static bool idist__share_needs(const idist__task *t, int rank) {
    const idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);

    if (!s || s->head != t || !o->entered || idist__share_has_entered(s, rank, o->nth))
        return false;
    if (idist__share_reads(t, rank)) return true;
    if (o->algorithm != IDIST__CHUNKED || !idist__share_gives(o, t->call.kind, o->r)) return false;

    // It has to read what we give: all of it where that stays in our buffer, else what was in the
    // place of the next chunk.
    return (o->stays || (o->i < o->chunks && o->use + o->i >= IDIST__BUFFERS &&
                         __atomic_load_n(&idist__share_pace(s, rank)->freed, __ATOMIC_ACQUIRE) <
                             o->use + o->i - IDIST__BUFFERS + 1));
}

// For error texts: what the notices say about how far the others are.
static void idist__share_look(const idist__task *t) {
    idist__ring_group *rg = idist__ring_group_of(t->group);
    int i, k;

    for (i = 0; rg->share && i < t->group->size; i++) {
        for (k = 0; k < IDIST__NOTICES; k++) {
            idist__notice *e = idist__share_notice(rg->share, i, (uint32_t)k);
            idist__print p = e->print;
            if (!__atomic_load_n(&e->nth, __ATOMIC_ACQUIRE) ||
                (int32_t)(p.seq - rg->seen[i].seq) <= 0)
                continue;
            rg->seen[i].seq = p.seq;
            rg->seen[i].print = p;
        }
    }
}

// ---- places ----

static char *idist__share_place(const idist__shm *m, int rank, int index) {
    char *first = idist__shm_share(m, rank) + m->places_at;
    size_t big = idist__place_nbytes(m->chunk_nbytes[0]),
           small = idist__place_nbytes(m->chunk_nbytes[1]);
    return index == 0 ? first : first + big + (size_t)(index - 1) * small;
}

static idist__pace *idist__share_place_pace(const idist__shm *m, int rank, int index) {
    return (idist__pace *)(void *)(idist__share_place(m, rank, index) +
                                   IDIST__NOTICES * IDIST__NOTICE_BYTES);
}

// What we offer the other members: the number of a place of ours, from 1 on; 0 for none. A place is
// free when it never served, or when all members of its group are through with it.
static uint64_t idist__share_offer_place(idist_group *g) {
    idist__shm *m = idist__ring_of(g->w)->shm;
    uint32_t nmembers = 0;
    int i;

    for (i = 0; m && i < g->size; i++) nmembers += m->local[g->ranks[i]] >= 0;
    if (nmembers < 2 || g->status != IDIST_OK)
        return 0; // who heard of a failure before this may have left

    for (i = 0; i < m->nplaces; i++) {
        if (m->taken[i]) {
            if (__atomic_load_n(&idist__share_place_pace(m, m->me, i)->left, __ATOMIC_ACQUIRE) <
                m->members[i])
                continue;
        }

        memset(idist__share_place(m, m->me, i), 0,
               IDIST__NOTICES * IDIST__NOTICE_BYTES + sizeof(idist__pace));
        m->taken[i] = true;
        m->members[i] = nmembers;
        m->groups[i] = g->ctx;
        return (uint64_t)i + 1;
    }

    return 0;
}

static void idist__share_discard(const idist_allocator *mem, idist__share *s) {
    idist__mem_free(mem, s->quick);
    idist__mem_free(mem, s->places);
    idist__mem_free(mem, s->entered);
    idist__mem_free(mem, s->from);
    idist__mem_free(mem, s->spots);
    idist__mem_free(mem, s);
}

// A member is through with the group for which we offered a place, without having used it.
static void idist__share_left(const idist__ring *ring, uint64_t ctx) {
    idist__shm *m = ring->shm;
    int i;
    for (i = 0; m && i < m->nplaces; i++)
        if (m->taken[i] && m->groups[i] == ctx)
            __atomic_fetch_add(&idist__share_place_pace(m, m->me, i)->left, 1u, __ATOMIC_RELEASE);
}

// The members did not meet: we do not know their places, and say so with a message.
static void idist__share_decline(const idist_group *g) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__frame f;
    int i;

    memset(&f, 0, sizeof f);
    f.type = IDIST__LEFT;
    f.ctx = g->ctx;

    for (i = 0; i < g->size; i++) {
        if (i == g->rank) idist__share_left(ring, g->ctx);
        else if (ring->shm->local[g->ranks[i]] >= 0)
            idist__link_control(ring, &ring->links[g->ranks[i]], &f, NULL);
    }
}

static void idist__share_free(idist_group *g) {
    idist__ring_group *rg = idist__ring_group_of(g);
    idist__share *s = rg->share;
    const idist_allocator *mem = &g->w->cfg.mem;
    int i;

    if (!rg->met && !g->inner && idist__ring_of(g->w)->shm) idist__share_decline(g);
    if (!s) return;
    for (i = 0; i < g->size; i++)
        if (s->places[i]) __atomic_fetch_add(&idist__share_pace(s, i)->left, 1u, __ATOMIC_RELEASE);
    idist__share_discard(mem, s);
    rg->share = NULL;
}

// Everybody has a place, or the group goes by messages.
static idist_status idist__share_meet(idist_group *g, const uint64_t *offers) {
    idist__shm *m = idist__ring_of(g->w)->shm;
    const idist_allocator *mem = &g->w->cfg.mem;
    idist__share *s;
    int i;

    for (i = 0; i < g->size; i++)
        if (!m || m->local[g->ranks[i]] < 0 || !offers[i] || offers[i] > (uint64_t)m->nplaces)
            break;

    if (i < g->size || (size_t)g->size * IDIST__LINE > m->chunk_nbytes[1]) {
        if (m && offers[g->rank]) m->members[offers[g->rank] - 1] = 0; // free at once
        return IDIST_OK;
    }

    s = (idist__share *)idist__mem_alloc(mem, sizeof *s);
    if (!s) return IDIST_ERR_NO_MEMORY;
    s->places = (char **)idist__mem_alloc(mem, sizeof *s->places * (size_t)g->size);
    s->entered = (uint32_t *)idist__mem_alloc(mem, sizeof *s->entered * (size_t)g->size);
    s->from = (const void **)idist__mem_alloc(mem, sizeof *s->from * (size_t)g->size);
    s->spots = (idist__spot *)idist__mem_alloc(mem, sizeof *s->spots * (size_t)g->size);
    s->quick = (idist__task *)idist__mem_alloc(mem, sizeof(idist__task) + sizeof(idist__op));

    if (!s->places || !s->entered || !s->from || !s->spots || !s->quick) {
        idist__share_discard(mem, s);
        return IDIST_ERR_NO_MEMORY;
    }

    idist__ring_group_of(g)->share = s;
    s->shm = m;
    s->chunk_nbytes = m->chunk_nbytes[offers[g->rank] > 1];
    s->quick->group = g;
    s->quick->impl = s->quick + 1;
    for (i = 0; i < g->size; i++)
        s->places[i] = idist__share_place(m, m->local[g->ranks[i]], (int)offers[i] - 1);

    return IDIST_OK;
}

#endif // IDIST_SHARE_H
