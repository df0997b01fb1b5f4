/* idist_share.h - v0.2.0 - collectives of ranks that share memory - MIT licence

    Part of the implementation of idist; idist.h includes it where IDIST_IMPLEMENTATION is defined.

WHAT IT IS

    Collectives of a group whose members all run on one host. Each member owns a region of shared
    memory that the others can read. It writes its contribution and its progress there, and reads
    the regions of the others. No member ever writes to another member's region, so there are no
    locks.

HOW IT FITS

    [algo:choose] decides how a call runs. The algorithms FLAT and CHUNKED are served here;
    everything else is made of messages (idist_algo.h).

A SMALL ALL_REDUCE (up to 4 KiB, FLAT)

    idist__share_quick         nothing else is under way: no task, no clock
    idist__slot_may_enter      the slot to be overwritten has been read by all
    idist__slot_enter          write fingerprint and contribution to our slot, publish its number
    idist__slot_all_entered    poll the slots of the others, compare their fingerprints with ours
    idist__fetch_chunk         reduce all slots, in rank order, into the result

A LARGE ALL_REDUCE (CHUNKED)

    idist__share_start         queue the task behind the group's other shared calls
    idist__split_reduce_run           a coroutine, resumed by idist__share_progress:
      idist__slot_enter          publish the slot; it says where our buffers are
      idist__chunk_expose        copy our part of chunk i to buffer i % 3, publish EXPOSED
      idist__split_reduce_sum_block     reduce our block of the chunk over all ranks, publish
REDUCED idist__split_reduce_take_blocks   copy the blocks of the others to our result, publish FREED
    idist__slot_leave          complete the task; the next one is first in line

SOURCES

    Flat slots: Graham and Shipman, "MPI Support for Multi-core Architectures", 2008. Chunks, with
    reduce-scatter and all-gather in one buffer: Jain et al., "Framework for Scalable Intra-Node
    Collective Operations using Shared Memory", 2018.

CONTENTS

      [share:region]  the memory that a rank shows the others
      [share:flow]    which ranks contribute to a call, which read, and how much
      [share:slot]    announcing a call, and comparing it with the calls of the others
      [share:fetch]   reading contributions and reducing them
      [share:flat]    collectives of small contributions
      [share:chunk]   collectives of large contributions, one chunk at a time
      [share:split]   all_reduce and reduce, in which each rank reduces one block
      [share:share]   choosing, starting, progressing and cancelling shared calls
      [share:pool]    lending regions to groups
*/
#ifndef IDIST_SHARE_H
#define IDIST_SHARE_H

//------------------------------------------------------------------------------
// [share:region]  the memory that a rank shows the others
// uses cpu os:thread os:memory model pace shm:segment doorbell msg:types
//
//   head      slot 0 | slot 1 | ... | slot 31 | progress
//   buffers   buffer 0 | buffer 1 | buffer 2
//
// A slot announces one call: its number, its fingerprint and a small contribution. A large
// contribution passes through the three buffers, a chunk at a time. The progress counters count
// chunks over all calls of the group:
//
//   EXPOSED   our part of the chunk is in our buffer
//   REDUCED   our block of the chunk is reduced over all ranks and in our buffer; only in
//             all_reduce and reduce
//   FREED     we have read what we need of the chunk
//------------------------------------------------------------------------------

#define IDIST__REGION_SLOTS 32
#define IDIST__SLOTS_AHEAD 16 // half of them; see [share:slot]
#define IDIST__FLAT_BYTES ((size_t)4096)
#define IDIST__INLINE_BYTES ((size_t)32)
// The last line holds the fingerprint of the previous call if that was made of messages.
#define IDIST__SLOT_BYTES (2 * IDIST__LINE + IDIST__FLAT_BYTES)
#define IDIST__REGION_HEAD_BYTES \
    (IDIST__REGION_SLOTS * IDIST__SLOT_BYTES + sizeof(idist__region_progress))
#define IDIST__CHUNK_MAX ((size_t)384 * 1024)
enum { IDIST__BUFFERS = 3 };

typedef struct idist__call_slot { // one cache line; IDIST__FLAT_BYTES follow
    uint32_t call_number;         // number of the shared call; written last
    uint16_t past;                // digest of the calls before it
    uint16_t zero;
    idist__fingerprint fingerprint;
    union {
        char bytes[IDIST__INLINE_BYTES]; // FLAT: a contribution of at most this size
        struct {                         // CHUNKED
            uint64_t send_at, recv_at;   // offsets of the buffers in the file; 0: not in a window
            uint64_t remote_send;        // their addresses in the rank's own memory;
            uint64_t remote_recv;        // 0: not to be read through the kernel
        } buffers;
        struct {              // CHUNKED, v-forms; the counts follow the line
            uint64_t largest; // elements of the largest part
        } parts;
    } u;
} idist__call_slot;

typedef enum idist__milestone {
    IDIST__EXPOSED,
    IDIST__REDUCED,
    IDIST__FREED,
    IDIST__MILESTONES
} idist__milestone;

typedef struct idist__region_progress { // two cache lines; others write only to members_done
    idist__counter reached[IDIST__MILESTONES];
    char pad[40];
    uint32_t members_done; // members that freed the group: then the region can serve another one
    char pad2[60];
} idist__region_progress;

// Where a rank's contribution and result are: mapped here if they lie in a window (else NULL), or
// at an address in that rank's memory, which the kernel reads for us (else 0).
typedef struct idist__location {
    char *send, *recv;
    uint64_t remote_send, remote_recv;
} idist__location;

typedef struct idist__share { // a group's part, where its members share memory
    idist__segment *shm;
    char **heads, **buffers;    // of the regions, by rank in the group
    uint32_t *entered;          // by rank: the last shared call that it is known to have entered
    const void **operands;      // scratch, one per rank
    idist__location *locations; // CHUNKED: by rank, in the current call
    size_t chunk_nbytes;        // of a buffer

    idist__fingerprint fingerprints[IDIST__REGION_SLOTS]; // a copy of what our own slots say
    uint16_t pasts[IDIST__REGION_SLOTS];
    uint32_t calls_entered;  // shared calls that we have entered
    uint32_t compared_calls; // up to this call, all ranks' slots are known and compared
    uint64_t chunks_done;
    size_t recent_nbytes[2];   // of the contributions in our last two slots
    idist__task *first, *last; // shared calls under way; only the first one runs
    idist__task *quick_task;   // what idist__share_quick works with
    bool entered_early;        // idist__share_quick has entered the call that comes next
    uint32_t extents_open;     // extents of our window that all members here have mapped
} idist__share;

static idist__call_slot *idist__region_slot(const idist__share *share, int rank,
                                            uint32_t call_number) {
    size_t at = (call_number % IDIST__REGION_SLOTS) * IDIST__SLOT_BYTES;
    return (idist__call_slot *)(void *)(share->heads[rank] + at);
}

// The fingerprint of the call that the rank made before this one. Written only if that one was made
// of messages: compare its sequence number before use.
static idist__fingerprint *idist__region_previous_call(const idist__share *share, int rank,
                                                       uint32_t call_number) {
    char *slot = (char *)idist__region_slot(share, rank, call_number);
    return (idist__fingerprint *)(void *)(slot + IDIST__LINE + IDIST__FLAT_BYTES);
}

static idist__region_progress *idist__region_progress_of(const idist__share *share, int rank) {
    size_t at = IDIST__REGION_SLOTS * IDIST__SLOT_BYTES;
    return (idist__region_progress *)(void *)(share->heads[rank] + at);
}

static uint64_t idist__region_reached(const idist__share *share, int rank,
                                      idist__milestone milestone) {
    const idist__region_progress *progress = idist__region_progress_of(share, rank);
    return __atomic_load_n(&progress->reached[milestone], __ATOMIC_ACQUIRE);
}

static char *idist__region_buffer(const idist__share *share, int rank, uint64_t chunk) {
    return share->buffers[rank] + (size_t)(chunk % IDIST__BUFFERS) * share->chunk_nbytes;
}

// Copies to lines that other cores have in their caches: past the caches, or prefetching the lines
// further on while it writes.
static void idist__region_write(const idist__share *share, char *to, const char *from,
                                size_t nbytes) {
    idist__pace *pace = &share->shm->pace;
    size_t at, lines = nbytes & ~(IDIST__LINE - 1);
    int64_t begin_ns;

    if (idist__pace_begin(pace, nbytes, &begin_ns)) {
        idist__os_cpu_stream(to, from, nbytes);
        idist__pace_end(pace, begin_ns, nbytes);
        return;
    }

    for (at = 0; at < lines; at += IDIST__LINE) {
        if (at + IDIST__PREFETCH_BYTES < lines)
            idist__os_cpu_prefetch_for_write(to + at + IDIST__PREFETCH_BYTES);
        memcpy(to + at, from + at, IDIST__LINE);
    }

    if (nbytes > lines) memcpy(to + lines, from + lines, nbytes - lines);
    idist__pace_end(pace, begin_ns, nbytes);
}

static idist__share *idist__region_share(const idist__task *t) {
    return idist__ring_group_of(t->group)->share;
}

// Wakes the members that sleep, after something was written that they may wait for.
static void idist__region_wake_members(const idist__share *share, const idist_group *g) {
    int i;

    if (!idist__doorbell_any_asleep(share->shm)) return;
    for (i = 0; i < g->size; i++)
        if (i != g->rank) idist__doorbell_wake_for_step(share->shm, share->shm->local[g->ranks[i]]);
}

// Says that this rank has reached a milestone in all chunks before number `chunks`.
static void idist__region_publish(idist__task *t, idist__milestone milestone, uint64_t chunks) {
    idist__share *share = idist__region_share(t);
    idist__region_progress *progress = idist__region_progress_of(share, t->group->rank);

    idist__os_thread_handover();
    __atomic_store_n(&progress->reached[milestone], chunks, __ATOMIC_RELEASE);
    idist__region_wake_members(share, t->group);
    t->group->w->moved_count++;
}

//------------------------------------------------------------------------------
// [share:flow]  which ranks contribute to a call, which read, and how much
// uses cpu launch:env kind model extent shm:segment msg:op
//------------------------------------------------------------------------------

// From this size on (times the square of the number of ranks), it is faster for each rank to reduce
// one block for all than for everybody to reduce everything.
#define IDIST__SPLIT_BYTES ((size_t)128 * 1024)

// Whether a contribution is one block per rank of the group, rather than one block for all.
static bool idist__flow_is_per_rank(idist__kind kind) {
    return kind == IDIST__REDUCE_SCATTER || kind == IDIST__SCATTER || kind == IDIST__ALL_TO_ALL ||
           kind == IDIST__SCATTERV || kind == IDIST__ALL_TO_ALLV || kind == IDIST__REDUCE_SCATTERV;
}

static bool idist__flow_contributes(const idist__op *o, idist__kind kind, int rank) {
    if (kind == IDIST__BROADCAST || kind == IDIST__SCATTER || kind == IDIST__SCATTERV)
        return rank == o->root;
    return kind != IDIST__BARRIER;
}

// Whether this rank reads, or waits for, what another one contributes.
static bool idist__flow_reads(const idist__task *t, int rank) {
    const idist__op *o = idist__op_of(t);

    switch (t->call.kind) {
    case IDIST__BROADCAST:
    case IDIST__SCATTER:
    case IDIST__SCATTERV: return rank == o->root;
    case IDIST__GATHER:
    case IDIST__GATHERV: return o->rank == o->root;
    case IDIST__REDUCE: return o->rank == o->root || o->algorithm == IDIST__ALGO_CHUNKED;
    case IDIST__SCAN:
    case IDIST__EXSCAN: return rank < o->rank;
    default: return true;
    }
}

// Whether each rank reduces one block for all.
static bool idist__flow_is_split(const idist__op *o, idist__kind kind) {
    return kind == IDIST__REDUCE ||
           (kind == IDIST__ALL_REDUCE && (size_t)(o->n * o->n) * o->nbytes > IDIST__SPLIT_BYTES);
}

// Whether contributions are multiplied by a factor before the sum (idist_op_create_premul_sum).
static bool idist__flow_is_scaled(const idist__op *o) { return o->user && !o->user->fn; }

// Block `to` of our contribution.
static size_t idist__flow_send_count(const idist__task *t, int to) {
    return t->call.sendcounts ? t->call.sendcounts[to] : t->call.count;
}

static const char *idist__flow_send_at(const idist__task *t, int to) {
    const idist__op *o = idist__op_of(t);

    if (!idist__flow_is_per_rank(t->call.kind)) return o->in;
    if (t->call.sendcounts)
        return o->in + idist__extent_displ(t->call.sendcounts, t->call.senddispls, to) * o->size;
    return o->in + (size_t)to * o->nbytes;
}

static size_t idist__flow_min(size_t a, size_t b) { return a < b ? a : b; }

#define IDIST__PART_PREFETCH_BYTES ((size_t)512)

// The processor foresees what comes next within a part, but not where the next one begins.
static void idist__flow_prefetch_part(const idist__task *t, int k) {
    const idist__part *part = &t->call.parts[k];
    size_t count, nbytes, at;

    if (k >= t->call.part_count) return;
    count = part->end - part[-1].end;
    nbytes = idist__flow_min(count * idist__op_of(t)->size, IDIST__PART_PREFETCH_BYTES);
    for (at = 0; at < nbytes; at += IDIST__LINE) idist__os_cpu_prefetch_for_write(part->data + at);
}

// Where element `at` of a buffer of ours is that begins at `base` or is in parts, and how many
// elements lie there in a row, at most `count`.
static char *idist__flow_place(const idist__task *t, char *base, size_t at, size_t count,
                               size_t *run) {
    const idist__part *parts = t->call.parts;
    size_t size = idist__op_of(t)->size, first;
    int low = 0, high = t->call.part_count - 1; // the part with this element is among them

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
    const idist__op *o = idist__op_of(t);
    return (idist__flow_is_per_rank(t->call.kind) ? (size_t)o->n : 1) * o->nbytes;
}

// What comes from a rank in calls that do not reduce.
static size_t idist__flow_recv_count(const idist__task *t, int from) {
    return t->call.recvcounts ? t->call.recvcounts[from] : t->call.count;
}

static char *idist__flow_recv_at(const idist__task *t, int from) {
    const idist__op *o = idist__op_of(t);
    const idist__call *c = &t->call;

    if (c->kind == IDIST__BROADCAST || c->kind == IDIST__SCATTER || c->kind == IDIST__SCATTERV)
        return o->out;
    if (c->recvcounts)
        return o->out + idist__extent_displ(c->recvcounts, c->recvdispls, from) * o->size;
    return o->out + (size_t)from * o->nbytes;
}

// Elements of a block of `count` in the chunk that begins at element `at`.
static size_t idist__flow_chunk_count(const idist__op *o, size_t count, size_t at) {
    return at < count ? idist__flow_min(count - at, o->u.shared.chunk_count) : 0;
}

//------------------------------------------------------------------------------
// [share:slot]  announcing a call, and comparing it with the calls of the others
// uses cpu os:thread process mem base:window base:log base:type reduce
// uses launch:env kind model fingerprint explain shm:segment shm:window
// uses msg:types msg:op msg:failure history region flow
//
// A rank enters a call by writing its slot. A rank that enters call k has compared the slots of all
// ranks up to call k - 16 with its own calls, and, of the ranks it reads from, up to k. So a rank
// that has entered call k no longer needs the slots of k - 16. There are 32 in turn: the slot of
// k - 16 may be overwritten by that of k + 16.
//
// Ranks that wait for nobody get ahead: the root of a broadcast, all but the root of a gather. That
// matters where ranks share a processor: the further they get, the fewer switches.
//
// Where a contribution of a CHUNKED call is read:
//
//   in a buffer       a chunk at a time; the general case
//   in a window       the buffer was allocated by idist_alloc: all ranks have it mapped
//   cross-memory      the kernel lets us read the memory of the other processes; the slot has the
//                     address. Copies once only, but system calls are expensive, the kernel copies
//                     slowly, and a chunk in a buffer that many ranks read stays in the cache. Not
//                     on processors where it is too slow (idist__join_share_reads_fast), unless
//                     IDIST_ALGO is "remote"
//
// A rank whose buffers are read in place does not return from the call until all have read them.
//------------------------------------------------------------------------------

// Cross-memory reads pay from these sizes on, by measurement.
#define IDIST__REMOTE_BYTES ((size_t)8 * 1024) // of a block
#define IDIST__REMOTE_OVERSUBSCRIBED ((size_t)64 * 1024)
#define IDIST__REMOTE_BROADCAST_MAX ((size_t)2 << 20)
#define IDIST__REMOTE_REDUCTION ((size_t)2 << 20) // of a whole contribution

static bool idist__slot_has_entered(idist__share *share, int rank, uint32_t call_number) {
    uint32_t seen;

    if ((int32_t)(share->entered[rank] - call_number) >= 0) return true;
    seen = __atomic_load_n(&idist__region_slot(share, rank, call_number)->call_number,
                           __ATOMIC_ACQUIRE);
    if ((int32_t)(seen - call_number) < 0) return false;

    idist__os_thread_handover();
    share->entered[rank] = seen;
    return true;
}

// Whether a rank is still in the call: a rank that leaves a call with an error withdraws its slots.
static bool idist__slot_is_current(const idist__share *share, int rank, uint32_t call_number) {
    const idist__call_slot *slot = idist__region_slot(share, rank, call_number);
    return __atomic_load_n(&slot->call_number, __ATOMIC_ACQUIRE) == call_number;
}

// The slots of a rank and of ourselves differ: the group fails.
static void idist__slot_mismatch(idist__task *t, int rank, uint32_t call_number) {
    idist__share *share = idist__region_share(t);
    idist__ring *ring = idist__ring_of(t->group->w);
    const idist__fingerprint *ours = &share->fingerprints[call_number % IDIST__REGION_SLOTS],
                             *before = idist__history_before(t->group, ours);
    idist__fingerprint theirs = idist__region_slot(share, rank, call_number)->fingerprint;
    int peer = t->group->ranks[rank];
    const char *field = idist__fingerprint_difference(&theirs, ours);

    if (field || !idist__fingerprint_equal(&theirs, ours)) {
        idist__history_mismatch(ring, t->group, peer, &theirs, ours, field ? field : "sequence");
        return;
    }

    theirs = *idist__region_previous_call(share, rank, call_number);
    if (!before || theirs.seq != before->seq) theirs.kind = 0;
    idist__history_differs_before(ring, t->group, peer, ours, &theirs);
}

// Compares the calls of a rank with ours, from the last comparison up to this call.
static bool idist__slot_compare(idist__task *t, int rank, uint32_t call_number) {
    idist__share *share = idist__region_share(t);
    uint32_t oldest = call_number - IDIST__SLOTS_AHEAD, number = share->compared_calls + 1;

    if ((int32_t)(oldest - share->compared_calls) > 0) number = oldest;

    for (; (int32_t)(call_number - number) >= 0; number++) {
        // Our own slot is not read: its line is on its way to the other cores.
        uint32_t index = number % IDIST__REGION_SLOTS;
        const idist__call_slot *slot = idist__region_slot(share, rank, number);

        if (idist__fingerprint_equal(&slot->fingerprint, &share->fingerprints[index]) &&
            slot->past == share->pasts[index])
            continue;
        idist__slot_mismatch(t, rank, number);
        return false;
    }

    return true;
}

// Whether all other ranks have entered this call; if so, compares the calls up to it with ours.
static bool idist__slot_compare_all(idist__task *t, uint32_t call_number) {
    idist__share *share = idist__region_share(t);
    int i;

    for (i = 0; i < t->group->size; i++) {
        if (i == t->group->rank) continue;
        idist__op_of(t)->u.shared.awaited = i;
        if (!idist__slot_has_entered(share, i, call_number)) return false;
    }

    for (i = 0; i < t->group->size; i++)
        if (i != t->group->rank && !idist__slot_compare(t, i, call_number)) return false;

    share->compared_calls = call_number;
    return true;
}

// Whether all ranks have read the slot that the next call overwrites. Looks further at first, so as
// not to look in every call.
static bool idist__slot_may_enter(idist__task *t) {
    const idist__share *share = idist__region_share(t);
    uint32_t call_number = share->calls_entered + 1 - IDIST__SLOTS_AHEAD;

    if ((int32_t)(share->compared_calls - call_number) >= 0) return true;
    if (idist__slot_compare_all(t, call_number + IDIST__SLOTS_AHEAD / 2)) return true;
    if (idist__ring_of(t->group->w)->failed) return false; // the calls differ

    return idist__slot_compare_all(t, call_number);
}

// Maps the windows of other ranks as far as they have grown.
static void idist__slot_look_at_windows(const idist__task *t) {
    idist__world *w = t->group->w;
    idist__segment *m = idist__region_share(t)->shm;

    if (!m->window || !idist__view_is_news(m) || idist__view_look(m)) return;
    idist__log_print(
        &w->log, IDIST_LOG_INFO,
        "memory that another rank has from idist_alloc cannot be mapped: buffers in it "
        "are copied");
}

// Counts the extents of our window that all members of the group on this host have mapped.
static uint32_t idist__slot_count_open(const idist__task *t) {
    const idist__segment *m = idist__region_share(t)->shm;
    uint32_t open = IDIST__EXTENTS;
    int i;

    for (i = 0; i < t->group->size; i++) {
        int rank = m->local[t->group->ranks[i]];
        uint32_t count = rank == m->me ? open : idist__view_mapped_by(m, rank);
        if (count < open) open = count;
    }

    return open;
}

// Returns the offset in the file of a buffer of ours that all members can read in place, or 0.
static uint64_t idist__slot_window_offset(const idist__task *t, const void *p, size_t nbytes) {
    idist__share *share = idist__region_share(t);
    uint64_t offset;
    uint32_t extent = 0;

    if (!share->shm->window) return 0;
    offset = idist__view_offset(share->shm, p, nbytes, &extent);
    if (!offset || extent < share->extents_open) return offset;
    share->extents_open = idist__slot_count_open(t);

    return extent < share->extents_open ? offset : 0;
}

// Whether contributions are read across memories. The same on all ranks.
static bool idist__slot_is_remote(const idist__task *t) {
    const idist__op *o = idist__op_of(t);
    const idist__segment *m = idist__region_share(t)->shm;
    idist__kind kind = t->call.kind;
    int setting = t->group->w->cfg.algorithm;

    if (!m->reads_remote || setting == IDIST__ALGO_CHUNKED) return false;
    if (!m->reads_fast && setting != IDIST__ALGO_REMOTE) return false;
    if (idist__kind_reduces(kind))
        return !m->oversubscribed && idist__flow_send_nbytes(t) >= IDIST__REMOTE_REDUCTION;
    if (kind == IDIST__BROADCAST)
        return !m->oversubscribed && o->nbytes >= IDIST__REMOTE_BYTES &&
               o->nbytes < IDIST__REMOTE_BROADCAST_MAX;
    if (kind == IDIST__ALL_GATHER && m->oversubscribed && o->n > 4) return false;

    return o->nbytes >= (m->oversubscribed ? IDIST__REMOTE_OVERSUBSCRIBED : IDIST__REMOTE_BYTES);
}

// Notes where the buffers of a rank are in a CHUNKED call.
static void idist__slot_locate(idist__task *t, int rank, const idist__call_slot *slot) {
    const idist__op *o = idist__op_of(t);
    idist__share *share = idist__region_share(t);
    idist__location *location = &share->locations[rank];

    if (o->algorithm == IDIST__ALGO_FLAT) return;
    location->send =
        idist__view_pointer(share->shm, slot->u.buffers.send_at, idist__flow_send_nbytes(t));
    location->recv = idist__view_pointer(share->shm, slot->u.buffers.recv_at, o->nbytes);
    location->remote_send = location->send ? 0 : slot->u.buffers.remote_send;
    location->remote_recv = slot->u.buffers.remote_recv;
}

// FLAT: the contribution of a rank.
static char *idist__slot_payload(const idist__task *t, int rank) {
    const idist__op *o = idist__op_of(t);
    idist__call_slot *slot =
        idist__region_slot(idist__region_share(t), rank, o->u.shared.call_number);

    return idist__flow_send_nbytes(t) <= sizeof slot->u.bytes ? slot->u.bytes : (char *)(slot + 1);
}

static void idist__slot_scale(const idist__task *t, char *buf, size_t count) {
    const idist__op *o = idist__op_of(t);
    if (idist__flow_is_scaled(o)) idist__reduce_scale(buf, count, t->call.dtype, o->user->factor);
}

// all_to_all in place would overwrite what others read: contributes a copy instead. (It cannot use
// buffers instead, because all ranks must go the same way.) False: the group has failed.
static bool idist__slot_copy_contribution(idist__task *t) {
    idist__op *o = idist__op_of(t);
    size_t nbytes = idist__flow_send_nbytes(t);

    o->memory = (char *)idist__mem_raw(&t->group->w->cfg.mem, nbytes);

    if (!o->memory) {
        idist__ring_fail_memory(idist__ring_of(t->group->w), t->group);
        return false;
    }

    memcpy(o->memory, o->in, nbytes);
    o->in = o->memory;

    return true;
}

// Writes to the slot where the others find our buffers in our memory, if the kernel lets them read
// these. Otherwise a contribution to a reduction goes through shared memory, and another one is
// copied. False: the group has failed.
static bool idist__slot_offer_remote(idist__task *t, idist__call_slot *slot) {
    idist__op *o = idist__op_of(t);
    size_t nbytes = idist__flow_send_nbytes(t);
    bool is_open = slot->u.buffers.send_at || idist__os_process_memory_is_open(o->in, nbytes);

    if (!is_open && !idist__kind_reduces(t->call.kind)) {
        if (!o->memory && !idist__slot_copy_contribution(t)) return false;
        is_open = true; // a copy is
    }

    if (!is_open) return true;
    slot->u.buffers.remote_send = (uint64_t)(uintptr_t)o->in;
    if (t->call.kind == IDIST__ALL_REDUCE && idist__os_process_memory_is_open(o->out, o->nbytes))
        slot->u.buffers.remote_recv = (uint64_t)(uintptr_t)o->out;

    return true;
}

// Writes to the slot where our buffers are, so that the others read them in place, unless we would
// overwrite what they read. False: the group has failed.
static bool idist__slot_offer_buffers(idist__task *t, idist__call_slot *slot) {
    idist__op *o = idist__op_of(t);
    idist__share *share = idist__region_share(t);
    const idist__call *c = &t->call;
    bool scaled = idist__flow_is_scaled(o), all = c->kind == IDIST__ALL_REDUCE;
    bool overwrites = c->send == c->recv &&
                      (c->kind == IDIST__ALL_TO_ALL || c->kind == IDIST__SCAN ||
                       c->kind == IDIST__EXSCAN || (all && !idist__flow_is_split(o, c->kind)));

    idist__slot_look_at_windows(t);
    memset(&slot->u, 0, sizeof slot->u);
    memset(share->locations, 0, sizeof *share->locations * (size_t)o->n);
    o->u.shared.remote = !scaled && idist__slot_is_remote(t);

    if (o->u.shared.remote && overwrites && c->kind == IDIST__ALL_TO_ALL) {
        if (!idist__slot_copy_contribution(t)) return false;
        overwrites = false;
    }

    if (!idist__flow_contributes(o, c->kind, o->rank) || scaled || overwrites) return true;
    if (c->part_count) return true;

    slot->u.buffers.send_at = idist__slot_window_offset(t, o->in, idist__flow_send_nbytes(t));
    if (all) slot->u.buffers.recv_at = idist__slot_window_offset(t, o->out, o->nbytes);
    if (o->u.shared.remote && !idist__slot_offer_remote(t, slot)) return false;
    idist__slot_locate(t, o->rank, slot);
    o->u.shared.in_place = slot->u.buffers.send_at || slot->u.buffers.remote_send;

    return true;
}

// What two ranks of a v-form compare. An all_to_allv counts bytes here, because each pair of ranks
// may have a dtype of its own (idist__share_count_bytes).
static uint64_t idist__slot_pair(const idist__task *t, size_t count) {
    const idist__call *c = &t->call;
    size_t size = c->kind == IDIST__ALL_TO_ALLV ? idist_dtype_size(c->dtype) : 1;

    if (!count || !size) return 0;
    return idist__fingerprint_pair(t->group->w, c, count / size);
}

// Writes to the slot the counts of a v-form, which the others compare with what they expect.
static void idist__slot_offer_counts(idist__task *t, idist__call_slot *slot) {
    idist__op *o = idist__op_of(t);
    idist__share *share = idist__region_share(t);
    const idist__call *c = &t->call;
    uint64_t *counts = (uint64_t *)(void *)(slot + 1);
    size_t largest = c->count;
    int i;

    memset(share->locations, 0, sizeof *share->locations * (size_t)o->n);

    for (i = 0; i < o->n; i++) {
        size_t count = idist__flow_send_count(t, i);

        counts[i] = idist__slot_pair(t, count);
        if (count > largest) largest = count;
        if (c->recvcounts && c->recvcounts[i] > largest) largest = c->recvcounts[i];
    }

    o->u.shared.largest_count = largest;
    slot->u.parts.largest = largest;
}

// Writes a small contribution to the slot.
static void idist__slot_write_payload(const idist__task *t) {
    const idist__op *o = idist__op_of(t);
    char *payload = idist__slot_payload(t, o->rank);
    size_t nbytes = idist__flow_send_nbytes(t);
    size_t count = nbytes / (o->size ? o->size : 1); // NOLINT(clang-analyzer-core.DivideZero)

    idist__region_write(idist__region_share(t), payload, o->in, nbytes);
    idist__slot_scale(t, payload, count);
}

// Prefetches the lines of our next slot for writing while there is nothing to do but wait. Its size
// is likely to be that of one of the last two.
static void idist__slot_prefetch_next(const idist__task *t) {
    const idist__op *o = idist__op_of(t);
    idist__share *share = idist__region_share(t);
    char *next = (char *)idist__region_slot(share, o->rank, o->u.shared.call_number + 1);
    size_t *recent = share->recent_nbytes, nbytes, at;

    recent[o->u.shared.call_number % 2] =
        o->algorithm == IDIST__ALGO_FLAT ? idist__flow_send_nbytes(t) : 0;
    nbytes = recent[0] > recent[1] ? recent[0] : recent[1];
    if (nbytes <= sizeof(idist__call_slot) - offsetof(idist__call_slot, u)) nbytes = 0;
    nbytes = idist__flow_min(nbytes, IDIST__PREFETCH_BYTES) + IDIST__LINE;
    for (at = 0; at < nbytes; at += IDIST__LINE) idist__os_cpu_prefetch_for_write(next + at);
}

// Writes the call before this one to the slot, for the error text of a rank that made another call
// before.
static void idist__slot_tell_previous(const idist__task *t, const idist__fingerprint *fingerprint) {
    const idist__op *o = idist__op_of(t);
    const idist__fingerprint *before = idist__history_before(t->group, fingerprint);

    if (before && (before->algorithm & ~IDIST__ON_DEVICE) <= IDIST__ALGO_BANDWIDTH)
        *idist__region_previous_call(idist__region_share(t), o->rank, o->u.shared.call_number) =
            *before;
}

// Enters the call: fills our slot and publishes it. False: it could not, and the group has failed.
static bool idist__slot_enter(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__share *share = idist__region_share(t);
    idist__call_slot *slot;
    idist__fingerprint fingerprint;
    uint32_t number = ++share->calls_entered;

    o->u.shared.call_number = number;
    slot = idist__region_slot(share, o->rank, number);

    if (o->algorithm == IDIST__ALGO_CHUNKED) {
        if (idist__kind_is_v(t->call.kind)) idist__slot_offer_counts(t, slot);
        else if (!idist__slot_offer_buffers(t, slot)) return false;
    } else if (idist__flow_contributes(o, t->call.kind, o->rank)) {
        idist__slot_write_payload(t);
    }

    fingerprint = idist__fingerprint_of_task(t, o->algorithm);
    idist__slot_tell_previous(t, &fingerprint);
    share->fingerprints[number % IDIST__REGION_SLOTS] = fingerprint;
    share->pasts[number % IDIST__REGION_SLOTS] = o->past;

    // The first line comes last, in one go: the others poll it, and would take it from our cache
    // between two writes.
    slot->fingerprint = fingerprint;
    slot->past = o->past;
    idist__os_thread_handover();
    __atomic_store_n(&slot->call_number, number, __ATOMIC_RELEASE);
    idist__region_wake_members(share, t->group);

    idist__slot_prefetch_next(t);
    o->u.shared.entered = true;
    o->u.shared.next_rank = 0;

    return true;
}

// Compares the call of a rank with ours. In v-forms also the count that only the two of us know.
static bool idist__slot_agree(idist__task *t, int rank) {
    idist__op *o = idist__op_of(t);
    const idist__call_slot *slot =
        idist__region_slot(idist__region_share(t), rank, o->u.shared.call_number);
    uint64_t given, expected;
    char cause[400];

    if (!idist__slot_compare(t, rank, o->u.shared.call_number)) return false;

    if (!idist__kind_is_v(t->call.kind)) {
        idist__slot_locate(t, rank, slot);
        return true;
    }

    if (slot->u.parts.largest > o->u.shared.largest_count)
        o->u.shared.largest_count = (size_t)slot->u.parts.largest;
    if (!idist__flow_contributes(o, t->call.kind, rank) || !idist__flow_reads(t, rank)) return true;

    given = ((const uint64_t *)(const void *)(slot + 1))[o->rank];
    expected = idist__slot_pair(t, idist__flow_recv_count(t, rank));
    if (given == expected) return true;

    idist__explain_pair(t->group->ranks[rank], given, t->group->ranks[o->rank], expected, t, cause,
                        sizeof cause);
    idist__ring_fail(idist__ring_of(t->group->w), t->group, IDIST_ERR_MISMATCH, cause);

    return false;
}

// Whether the ranks that we read from, or all, have entered this call as well.
static bool idist__slot_all_entered(idist__task *t, bool all) {
    idist__op *o = idist__op_of(t);
    idist__share *share = idist__region_share(t);
    bool compared_all = true;
    int i;

    for (; o->u.shared.next_rank < o->n; o->u.shared.next_rank++) {
        int rank = o->u.shared.next_rank;
        if (rank == o->rank) continue;
        if (!all && !idist__flow_reads(t, rank)) continue;
        o->u.shared.awaited = rank;
        if (!idist__slot_has_entered(share, rank, o->u.shared.call_number)) return false;
        if (!idist__slot_agree(t, rank)) return false;
    }

    o->u.shared.next_rank = 0;
    for (i = 0; i < o->n && compared_all; i++)
        compared_all = all || i == o->rank || idist__flow_reads(t, i);
    if (compared_all) share->compared_calls = o->u.shared.call_number;

    return true;
}

// The call is complete: the group's next shared call is first in line.
static void idist__slot_leave(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__share *share = idist__region_share(t);

    share->first = o->u.shared.next;
    if (!share->first) share->last = NULL;
    idist__op_done(t);
}

//------------------------------------------------------------------------------
// [share:fetch]  reading contributions and reducing them
// uses reduce launch:env kind model block shm:segment msg:types msg:op
// uses msg:failure combine region flow slot
//------------------------------------------------------------------------------

// Where block `to` of what a rank contributes can be read, from element `at` on.
static const char *idist__fetch_source(const idist__task *t, int rank, int to, size_t at) {
    const idist__op *o = idist__op_of(t);
    const idist__share *share = idist__region_share(t);
    bool per_rank = idist__flow_is_per_rank(t->call.kind);
    size_t block = per_rank ? (size_t)to : 0, within;

    if (rank == o->rank && t->call.part_count) return idist__flow_place(t, NULL, at, 1, &within);
    if (rank == o->rank && !idist__flow_is_scaled(o))
        return idist__flow_send_at(t, to) + at * o->size;
    if (o->algorithm == IDIST__ALGO_FLAT) return idist__slot_payload(t, rank) + block * o->nbytes;
    if (share->locations[rank].send)
        return share->locations[rank].send + block * o->nbytes + at * o->size;

    within = at - o->u.shared.chunk * o->u.shared.chunk_count;
    return idist__region_buffer(share, rank, o->u.shared.first_chunk + o->u.shared.chunk) +
           (block * o->u.shared.chunk_count + within) * o->size;
}

// out = in[0] (op) ... (op) in[n - 1] with the user's function; out may be one of them. The
// function works on its second operand, so a copy of that is folded from the right, in pieces.
// False: the function has thrown an exception, and the group has failed.
static bool idist__fetch_reduce_user(const idist__task *t, void *out, const void *const *in, int n,
                                     size_t count) {
    const idist__op *o = idist__op_of(t);
    uint64_t piece[IDIST__OP_PIECE / sizeof(uint64_t)];
    size_t at, k, most = sizeof piece / o->size; // NOLINT(clang-analyzer-core.DivideZero)
    int i;

    for (at = 0; at < count; at += k) {
        k = idist__flow_min(count - at, most);
        memcpy(piece, (const char *)in[n - 1] + at * o->size, k * o->size);
        for (i = n - 2; i >= 0; i--)
            if (!idist__combine_by_user(t, (const char *)in[i] + at * o->size, piece, k,
                                        t->call.dtype))
                return false;
        memcpy((char *)out + at * o->size, piece, k * o->size);
    }

    return true;
}

// False: the group has failed.
static bool idist__fetch_reduce(const idist__task *t, void *out, const void *const *in, int n,
                                size_t count) {
    const idist__op *o = idist__op_of(t);

    if (o->user && o->user->fn) return idist__fetch_reduce_user(t, out, in, n, count);

    idist__reduce_many(out, in, n, count, t->call.dtype, o->user ? IDIST_SUM : t->call.op,
                       t->call.op == IDIST_AVG ? o->n : 0);
    return true;
}

// Copies from an address in another rank's memory. False: the group has failed, or that rank has
// left the call, and the reason is on its way.
static bool idist__fetch_remote(idist__task *t, int rank, uint64_t address, char *buf,
                                size_t nbytes) {
    const idist__op *o = idist__op_of(t);
    const idist__share *share = idist__region_share(t);
    int world_rank = t->group->ranks[rank];
    int err =
        idist__segment_read_remote(share->shm, share->shm->local[world_rank], address, buf, nbytes);
    char cause[300];

    if (!err) return true;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (!idist__slot_is_current(share, rank, o->u.shared.call_number)) return false;

    snprintf(cause, sizeof cause,
             err == ESRCH ? "rank %d on %s was lost: its process ended"
                          : "the buffer of rank %d on %s cannot be read: %s",
             world_rank, t->group->w->nodes[world_rank].hostname, strerror(err));
    idist__ring_fail(idist__ring_of(t->group->w), t->group,
                     err == ESRCH ? IDIST_ERR_PEER_LOST : IDIST_ERR_SYSTEM, cause);

    return false;
}

// The address, in its own memory, of block `to` of what a rank contributes, from element `at` on; 0
// if it is not to be read there.
static uint64_t idist__fetch_remote_source(const idist__task *t, int rank, int to, size_t at) {
    const idist__op *o = idist__op_of(t);
    uint64_t address;

    if (!o->u.shared.remote || rank == o->rank) return 0;
    address = idist__region_share(t)->locations[rank].remote_send;
    if (!address) return 0;

    return address + (idist__flow_is_per_rank(t->call.kind) ? (size_t)to * o->nbytes : 0) +
           at * o->size;
}

// Reduces `count` elements, from element `at` of block `to` on, over the contributions of ranks
// 0 .. n - 1. What is in other memories is copied here first, in pieces.
static bool idist__fetch_sum(idist__task *t, char *out, int n, int to, size_t at, size_t count) {
    const idist__op *o = idist__op_of(t);
    idist__share *share = idist__region_share(t);
    size_t done, k, most = count;
    int i;

    if (o->u.shared.remote)
        most = IDIST__REMOTE_PIECE / o->size; // NOLINT(clang-analyzer-core.DivideZero)

    for (done = 0; done < count; done += k) {
        k = idist__flow_min(count - done, most);

        for (i = 0; i < n; i++) {
            char *piece = share->shm->remote_pieces + (size_t)i * IDIST__REMOTE_PIECE;
            uint64_t address = idist__fetch_remote_source(t, i, to, at + done);

            if (address && !idist__fetch_remote(t, i, address, piece, k * o->size)) return false;
            share->operands[i] = address ? piece : idist__fetch_source(t, i, to, at + done);
        }

        if (!idist__fetch_reduce(t, out + done * o->size, share->operands, n, k)) return false;
    }

    return true;
}

// FLAT: the same, over the contributions in the slots.
static bool idist__fetch_sum_flat(const idist__task *t, int n) {
    const idist__op *o = idist__op_of(t);
    const idist__share *share = idist__region_share(t);
    size_t given = idist__flow_send_nbytes(t);
    size_t at = given <= IDIST__INLINE_BYTES ? offsetof(idist__call_slot, u) : IDIST__LINE;
    int i;

    if (given > o->nbytes) at += (size_t)o->rank * o->nbytes; // our block of theirs
    for (i = 0; i < n; i++)
        share->operands[i] =
            (const char *)idist__region_slot(share, i, o->u.shared.call_number) + at;
    if (o->rank < n && !idist__flow_is_scaled(o))
        share->operands[o->rank] = idist__flow_send_at(t, o->rank);
    return idist__fetch_reduce(t, o->out, share->operands, n, o->count);
}

// Ranks 0 .. n - 1 are reduced into the result of this rank.
static int idist__fetch_operand_count(const idist__task *t) {
    const idist__op *o = idist__op_of(t);

    if (t->call.kind == IDIST__SCAN) return o->rank + 1;
    if (t->call.kind == IDIST__EXSCAN) return o->rank;
    return o->n;
}

// Copies our block of what each rank contributes, from element `at` on.
static bool idist__fetch_blocks(idist__task *t, size_t at) {
    const idist__op *o = idist__op_of(t);
    int i;

    for (i = 0; i < o->n; i++) {
        int from = idist__block_wrap(o->rank + i, o->n); // each rank begins with another one
        uint64_t address;
        size_t count;
        char *to;

        if (!idist__flow_reads(t, from)) continue;
        count = idist__flow_chunk_count(o, idist__flow_recv_count(t, from), at);
        if (!count) continue;

        to = idist__flow_recv_at(t, from) + at * o->size;
        address = idist__fetch_remote_source(t, from, o->rank, at);
        if (address && !idist__fetch_remote(t, from, address, to, count * o->size)) return false;
        if (!address)
            idist__block_copy(to, idist__fetch_source(t, from, o->rank, at), count * o->size);
    }

    return true;
}

// All that this rank needs of the chunk at element `at` (FLAT: of the call), in calls that are not
// split.
static bool idist__fetch_chunk(idist__task *t, size_t at) {
    const idist__op *o = idist__op_of(t);
    int n = idist__fetch_operand_count(t);
    size_t count;

    if (t->call.kind == IDIST__BARRIER) return true;
    if (!idist__kind_reduces(t->call.kind)) return idist__fetch_blocks(t, at);

    count = idist__flow_chunk_count(o, o->count, at); // of a reduce_scatterv, our own block
    if ((t->call.kind == IDIST__REDUCE && o->rank != o->root) || !n || !count) return true;
    if (o->algorithm != IDIST__ALGO_FLAT)
        return idist__fetch_sum(t, o->out + at * o->size, n, o->rank, at, count);

    return idist__fetch_sum_flat(t, n);
}

// Whether what we have just read in the buffers of others was valid. A rank that leaves the call
// with an error may reuse its buffers, but withdraws its slots first. In that case the reason is on
// its way.
static bool idist__fetch_was_valid(idist__task *t) {
    const idist__op *o = idist__op_of(t);
    const idist__share *share = idist__region_share(t);
    int i;

    __atomic_thread_fence(__ATOMIC_ACQUIRE);

    for (i = 0; i < o->n; i++) {
        if (i == o->rank || !idist__flow_reads(t, i)) continue;
        if (!idist__slot_is_current(share, i, o->u.shared.call_number)) return false;
    }

    return true;
}

//------------------------------------------------------------------------------
// [share:flat]  collectives of small contributions
// uses model msg:op slot fetch
//
// Every rank writes its contribution to its slot (one line, if it has at most 32 bytes), reads the
// slots of all others, and computes the result by itself. All reduce in the order of the ranks, so
// all get the same bits. One round of n - 1 cache misses, no synchronization at the end: the slots
// are not reused before all have read them.
//------------------------------------------------------------------------------

static void idist__flat_run(idist__task *t) {
    idist__op *o = idist__op_of(t);

    IDIST__CO_BEGIN(o)

    if (!o->u.shared.entered) {
        IDIST__CO_AWAIT(o, idist__slot_may_enter(t));
        idist__slot_enter(t);
    }

    IDIST__CO_AWAIT(o, idist__slot_all_entered(t, false));
    if (idist__fetch_chunk(t, 0)) idist__slot_leave(t);
    IDIST__CO_END(o)
}

//------------------------------------------------------------------------------
// [share:chunk]  collectives of large contributions, one chunk at a time
// uses os:thread kind model block shm:segment msg:op combine region flow slot
// uses fetch
//
//   rank 0   expose 0   expose 1   take 0   expose 2   take 1   ...
//   rank 1   expose 0   expose 1   take 0   expose 2   take 1   ...
//
// A rank exposes up to one chunk ahead, so that nobody waits while there is something to copy. It
// writes to a buffer again when all have freed the chunk that is in it.
//------------------------------------------------------------------------------

#define IDIST__CHUNK_OVERSUBSCRIBED ((size_t)128 * 1024)

// Whether all members, or those that we read from, have reached a milestone in all chunks before
// number `chunks`.
static bool idist__chunk_all_reached(idist__task *t, idist__milestone milestone, uint64_t chunks,
                                     bool only_sources) {
    idist__op *o = idist__op_of(t);
    idist__share *share = idist__region_share(t);

    for (; o->u.shared.next_rank < o->n; o->u.shared.next_rank++) {
        int rank = o->u.shared.next_rank;
        if (rank == o->rank || (only_sources && !idist__flow_reads(t, rank))) continue;
        o->u.shared.awaited = rank;
        if (idist__region_reached(share, rank, milestone) < chunks) return false;
    }

    idist__os_thread_handover();
    o->u.shared.next_rank = 0;

    return true;
}

static bool idist__chunk_all(idist__task *t, idist__milestone milestone, uint64_t chunks) {
    return idist__chunk_all_reached(t, milestone, chunks, false);
}

static bool idist__chunk_sources(idist__task *t, idist__milestone milestone, uint64_t chunks) {
    return idist__chunk_all_reached(t, milestone, chunks, true);
}

// The elements of a cache line, or one element that is larger.
static size_t idist__chunk_line(const idist__op *o) {
    return o->size < IDIST__LINE ? IDIST__LINE / o->size
                                 : 1; // NOLINT(clang-analyzer-core.DivideZero)
}

// Where block `b` of a chunk of `count` elements begins. Blocks are whole lines, so that no two
// ranks write to the same one.
static size_t idist__chunk_block_at(const idist__op *o, size_t count, int b) {
    size_t line = idist__chunk_line(o);
    size_t nlines = (count + line - 1) / line;

    return idist__flow_min(idist__block_at(nlines, o->n, b) * line, count);
}

// Copies elements of ours to a buffer.
static void idist__chunk_write(const idist__task *t, char *to, size_t at, size_t count) {
    const idist__op *o = idist__op_of(t);
    size_t run;

    for (; count; at += run, count -= run) {
        const char *from = idist__flow_place(t, (char *)o->in, at, count, &run);
        idist__region_write(idist__region_share(t), to, from, run * o->size);
        to += run * o->size;
    }
}

// Copies our part of a chunk to a buffer; in a split reduction all but the block that we reduce
// ourselves.
static void idist__chunk_copy(idist__task *t, size_t chunk) {
    idist__op *o = idist__op_of(t);
    idist__share *share = idist__region_share(t);
    char *buffer = idist__region_buffer(share, o->rank, o->u.shared.first_chunk + chunk);
    bool per_rank = idist__flow_is_per_rank(t->call.kind), scaled = idist__flow_is_scaled(o);
    size_t at = chunk * o->u.shared.chunk_count;
    int to;

    if (idist__flow_is_split(o, t->call.kind) && !scaled) {
        size_t count = idist__flow_chunk_count(o, o->count, at);
        size_t begin = idist__chunk_block_at(o, count, o->rank),
               end = idist__chunk_block_at(o, count, o->rank + 1);
        idist__chunk_write(t, buffer, at, begin);
        idist__chunk_write(t, buffer + end * o->size, at + end, count - end);
        return;
    }

    for (to = 0; to < (per_rank ? o->n : 1); to++) {
        size_t count = idist__flow_chunk_count(o, idist__flow_send_count(t, to), at);
        char *block = buffer + (size_t)to * o->u.shared.chunk_count * o->size;

        if (per_rank && to == o->rank && !scaled) continue;
        idist__region_write(share, block, idist__flow_send_at(t, to) + at * o->size,
                            count * o->size);
        idist__slot_scale(t, block, count);
    }
}

// Exposes the current chunk and, if a buffer is free, the next one. Returns whether the current one
// is exposed.
static bool idist__chunk_expose(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__shared_op *shared = &o->u.shared;
    bool copies = idist__flow_contributes(o, t->call.kind, o->rank) && !shared->in_place;

    while (shared->exposed < shared->nchunks && shared->exposed < shared->chunk + 2) {
        uint64_t number = shared->first_chunk + shared->exposed;

        if (copies && number >= IDIST__BUFFERS &&
            !idist__chunk_all(t, IDIST__FREED, number - IDIST__BUFFERS + 1))
            break;
        if (copies) idist__chunk_copy(t, shared->exposed);
        shared->exposed++;
        idist__region_publish(t, IDIST__EXPOSED, number + 1);
    }

    return shared->exposed > shared->chunk;
}

// Of a chunk; all ranks of an oversubscribed host share the caches.
static size_t idist__chunk_nbytes(const idist__share *share) {
    return share->shm->oversubscribed
               ? idist__flow_min(share->chunk_nbytes, IDIST__CHUNK_OVERSUBSCRIBED)
               : share->chunk_nbytes;
}

// Whether elements of this size go through chunks, and through the pieces in which they are
// reduced.
static bool idist__chunk_takes(const idist_group *g, const idist__share *share, size_t size) {
    return size <= IDIST__OP_PIECE && size <= idist__chunk_nbytes(share) / (size_t)g->size;
}

// Determines the chunks of a call.
static void idist__chunk_plan(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__share *share = idist__region_share(t);
    size_t nblocks = idist__flow_is_per_rank(t->call.kind) ? (size_t)o->n : 1;
    size_t count = idist__kind_is_v(t->call.kind) ? o->u.shared.largest_count : o->count;
    size_t line = idist__chunk_line(o);
    size_t nbytes = idist__chunk_nbytes(share), chunk_count;

    chunk_count = nbytes / nblocks / o->size;
    if (chunk_count > line) chunk_count -= chunk_count % line;
    if (o->u.shared.remote && !idist__kind_reduces(t->call.kind)) chunk_count = count; // no buffers

    o->u.shared.chunk_count = chunk_count;
    o->u.shared.nchunks = count ? (count - 1) / chunk_count + 1 : 1;
    o->u.shared.first_chunk = share->chunks_done;
    o->u.shared.next_rank = 0;
}

static void idist__chunk_run(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__shared_op *shared = &o->u.shared;

    IDIST__CO_BEGIN(o)
    IDIST__CO_AWAIT(o, idist__slot_may_enter(t));
    if (!idist__slot_enter(t)) return;

    if (idist__kind_is_v(t->call.kind)) {
        IDIST__CO_AWAIT(o, idist__slot_all_entered(t, true));
        idist__chunk_plan(t);
    } else {
        idist__chunk_plan(t);
        idist__chunk_expose(t);
        shared->next_rank = 0;
        IDIST__CO_AWAIT(o, idist__slot_all_entered(t, false));
    }

    for (shared->chunk = 0; shared->chunk < shared->nchunks; shared->chunk++) {
        IDIST__CO_AWAIT(o, idist__chunk_expose(t));
        shared->next_rank = 0;
        IDIST__CO_AWAIT(o, idist__chunk_sources(t, IDIST__EXPOSED,
                                                shared->first_chunk + shared->chunk + 1));
        if (!idist__fetch_chunk(t, shared->chunk * shared->chunk_count)) return;
        if (!idist__fetch_was_valid(t)) return;
        idist__region_publish(t, IDIST__FREED, shared->first_chunk + shared->chunk + 1);
    }

    if (shared->in_place) // the caller may change its buffer when we return
        IDIST__CO_AWAIT(o,
                        idist__chunk_all(t, IDIST__FREED, shared->first_chunk + shared->nchunks));

    idist__region_share(t)->chunks_done = shared->first_chunk + shared->nchunks;
    idist__slot_leave(t);
    IDIST__CO_END(o)
}

//------------------------------------------------------------------------------
// [share:split]  all_reduce and reduce, in which each rank reduces one block
// uses kind model block pace msg:op region flow slot fetch chunk
//
// A reduce-scatter and an all-gather in one buffer. Each rank reads 1/n of every contribution and
// 1/n of the result from every other rank, so all cores and the whole memory bandwidth are used:
//
//   through buffers   expose a chunk; reduce our block of it into our buffer; copy the other blocks
//                     out of the buffers of the others
//   direct            all buffers of an all_reduce are in windows: reduce our block of all of them,
//                     write it to the results of all. Every byte is read once and written once
//   cross-memory      reduce our block into our own result; read the others out of their results
//------------------------------------------------------------------------------

#define IDIST__DIRECT_PIECE ((size_t)16384) // stays in the first-level cache

static bool idist__split_reduce_sum_block(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__share *share = idist__region_share(t);
    size_t at = o->u.shared.chunk * o->u.shared.chunk_count,
           chunk_count = idist__flow_chunk_count(o, o->count, at),
           begin = idist__chunk_block_at(o, chunk_count, o->rank),
           count = idist__chunk_block_at(o, chunk_count, o->rank + 1) - begin;
    char *buffer =
        idist__region_buffer(share, o->rank, o->u.shared.first_chunk + o->u.shared.chunk);
    char *sum = buffer + begin * o->size, *out = o->out + (at + begin) * o->size;
    size_t run;

    if (!count) return true;

    if (t->call.kind == IDIST__REDUCE) // only the root wants it
        return idist__fetch_sum(t, o->rank == o->root ? out : sum, o->n, 0, at + begin, count);

    for (at += begin; count; at += run, count -= run) {
        out = idist__flow_place(t, o->out, at, count, &run);
        if (!idist__fetch_sum(t, out, o->n, 0, at, run)) return false;
        idist__region_write(share, sum, out, run * o->size);
        sum += run * o->size;
    }

    return true;
}

// Copies elements from a buffer to our result.
static void idist__split_reduce_take(const idist__task *t, const char *from, size_t at,
                                     size_t count) {
    const idist__op *o = idist__op_of(t);
    size_t run;

    for (; count; at += run, count -= run) {
        char *to = idist__flow_place(t, o->out, at, count, &run);
        idist__block_copy(to, from, run * o->size);
        from += run * o->size;
    }
}

// Copies the blocks of a chunk that the others have reduced.
static void idist__split_reduce_take_blocks(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__share *share = idist__region_share(t);
    size_t at = o->u.shared.chunk * o->u.shared.chunk_count,
           count = idist__flow_chunk_count(o, o->count, at);
    int i;

    if (t->call.kind == IDIST__REDUCE && o->rank != o->root) return;

    for (i = 0; i < o->n; i++) {
        size_t begin = idist__chunk_block_at(o, count, i),
               end = idist__chunk_block_at(o, count, i + 1);
        const char *buffer =
            idist__region_buffer(share, i, o->u.shared.first_chunk + o->u.shared.chunk);

        if (i == o->rank) continue;
        idist__split_reduce_take(t, buffer + begin * o->size, at + begin, end - begin);
    }
}

// Whether all buffers are in windows.
static bool idist__split_reduce_is_direct(const idist__task *t) {
    const idist__op *o = idist__op_of(t);
    const idist__share *share = idist__region_share(t);
    int i;

    for (i = 0; i < o->n; i++)
        if (!share->locations[i].send || !share->locations[i].recv) return false;
    return true;
}

// Reduces our block of all contributions into the results of all ranks. Checks before each piece
// that all ranks are still in the call, because a rank that has left it may reuse its buffer.
static bool idist__split_reduce_sum_direct(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__share *share = idist__region_share(t);
    size_t at = idist__chunk_block_at(o, o->count, o->rank),
           end = idist__chunk_block_at(o, o->count, o->rank + 1), k;
    int i;

    for (; at < end; at += k) {
        char *out = o->out + at * o->size;

        k = idist__flow_min(end - at, IDIST__DIRECT_PIECE / o->size);
        if (!idist__fetch_sum(t, out, o->n, 0, at, k)) return false;
        if (!idist__fetch_was_valid(t)) return false;
        for (i = 0; i < o->n; i++)
            if (i != o->rank)
                idist__pace_copy(&share->shm->window_pace, share->locations[i].recv + at * o->size,
                                 out, k * o->size);
    }

    return true;
}

// Reduces our block of all contributions into our own result.
static bool idist__split_reduce_sum_remote(idist__task *t) {
    idist__op *o = idist__op_of(t);
    size_t at = idist__chunk_block_at(o, o->count, o->rank),
           end = idist__chunk_block_at(o, o->count, o->rank + 1);

    return idist__fetch_sum(t, o->out + at * o->size, o->n, 0, at, end - at);
}

// Reads the blocks that the others have reduced, out of their results.
static bool idist__split_reduce_take_remote(idist__task *t) {
    idist__op *o = idist__op_of(t);
    const idist__share *share = idist__region_share(t);
    int i;

    for (i = 1; i < o->n; i++) {
        int from = idist__block_wrap(o->rank + i, o->n);
        size_t at = idist__chunk_block_at(o, o->count, from) * o->size,
               end = idist__chunk_block_at(o, o->count, from + 1) * o->size;

        if (end > at && !idist__fetch_remote(t, from, share->locations[from].remote_recv + at,
                                             o->out + at, end - at))
            return false;
    }

    return true;
}

static bool idist__split_reduce_sum_in_place(idist__task *t) {
    bool summed = idist__op_of(t)->u.shared.remote ? idist__split_reduce_sum_remote(t)
                                                   : idist__split_reduce_sum_direct(t);

    return summed && idist__fetch_was_valid(t);
}

// Whether each rank can read the results of all others through the kernel. The same on all ranks.
static bool idist__split_reduce_is_remote(const idist__task *t) {
    const idist__share *share = idist__region_share(t);
    int i;

    if (!idist__op_of(t)->u.shared.remote) return false;
    for (i = 0; i < t->group->size; i++)
        if (!share->locations[i].remote_recv) return false;

    return true;
}

// Chooses between direct and cross-memory; false: through buffers.
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
    idist__op *o = idist__op_of(t);
    idist__shared_op *shared = &o->u.shared;
    uint64_t next = shared->first_chunk + shared->chunk + 1; // of the chunk under way

    IDIST__CO_BEGIN(o)
    IDIST__CO_AWAIT(o, idist__slot_may_enter(t));
    if (!idist__slot_enter(t)) return;
    idist__chunk_plan(t);
    if (!shared->in_place) idist__chunk_expose(t); // whatever the others do, the buffer is ours
    shared->next_rank = 0;
    IDIST__CO_AWAIT(o, idist__slot_all_entered(t, false));

    if (idist__split_reduce_skips_buffers(t)) {
        if (!idist__split_reduce_sum_in_place(t)) return;
        idist__region_publish(t, IDIST__REDUCED, shared->first_chunk + 1);
        IDIST__CO_AWAIT(o, idist__chunk_all(t, IDIST__REDUCED, shared->first_chunk + 1));
        if (shared->remote && !idist__split_reduce_take_remote(t)) return;
        if (shared->remote && !idist__fetch_was_valid(t)) return;
        idist__region_publish(t, IDIST__FREED, shared->first_chunk + 1);
        if (shared->remote)
            IDIST__CO_AWAIT(o, idist__chunk_all(t, IDIST__FREED, shared->first_chunk + 1));
    } else {
        for (shared->chunk = 0; shared->chunk < shared->nchunks; shared->chunk++) {
            IDIST__CO_AWAIT(o, idist__chunk_expose(t));
            shared->next_rank = 0;
            next = shared->first_chunk + shared->chunk + 1;
            IDIST__CO_AWAIT(o, idist__chunk_all(t, IDIST__EXPOSED, next));
            if (!idist__split_reduce_sum_block(t) || !idist__fetch_was_valid(t)) return;
            idist__region_publish(t, IDIST__REDUCED, next);
            if (t->call.kind == IDIST__ALL_REDUCE || o->rank == o->root)
                IDIST__CO_AWAIT(o, idist__chunk_all(t, IDIST__REDUCED, next));
            idist__split_reduce_take_blocks(t);
            idist__region_publish(t, IDIST__FREED, next);
        }

        if (shared->in_place)
            IDIST__CO_AWAIT(o, idist__chunk_all(t, IDIST__REDUCED,
                                                shared->first_chunk + shared->nchunks));
    }

    idist__region_share(t)->chunks_done = shared->first_chunk + shared->nchunks;
    idist__slot_leave(t);
    IDIST__CO_END(o)
}

//------------------------------------------------------------------------------
// [share:share]  choosing, starting, progressing and cancelling shared calls
// uses clock os:thread mem base:type launch:env kind model core:world extent
// uses shm:segment pipe msg:types msg:op history send region flow slot fetch
// uses flat chunk split
//------------------------------------------------------------------------------

#define IDIST__WRITERS_MS 100

static bool idist__share_serves(idist__algorithm algorithm) {
    return algorithm == IDIST__ALGO_FLAT || algorithm == IDIST__ALGO_CHUNKED;
}

// FLAT, CHUNKED, or AUTO if the call does not go through shared memory. The same on all members.
static idist__algorithm idist__share_choose(const idist_group *g, const idist__call *c) {
    const idist__share *share = idist__ring_group_of(g)->share;
    int setting = g->w->cfg.algorithm;
    size_t nbytes;
    bool scaled = (int)c->op >= IDIST_OP_USER && idist__kind_reduces(c->kind) &&
                  !idist__world_user_op(g, c)->fn;

    if (!share || setting == IDIST__ALGO_LATENCY || setting == IDIST__ALGO_BANDWIDTH)
        return IDIST__ALGO_AUTO;
    if (scaled && idist__dtype_is_narrow(c->dtype)) return IDIST__ALGO_AUTO;
    if (c->kind != IDIST__ALL_TO_ALLV && c->kind != IDIST__BARRIER &&
        !idist__chunk_takes(g, share, idist_dtype_size(c->dtype)))
        return IDIST__ALGO_AUTO;
    if (idist__kind_is_v(c->kind))
        return (size_t)g->size * sizeof(uint64_t) <= IDIST__FLAT_BYTES ? IDIST__ALGO_CHUNKED
                                                                       : IDIST__ALGO_AUTO;

    if (setting == IDIST__ALGO_CHUNKED && c->count) return IDIST__ALGO_CHUNKED;
    if (!c->count) return IDIST__ALGO_FLAT;
    if (c->count > IDIST__FLAT_BYTES) return IDIST__ALGO_CHUNKED; // before the product can overflow
    nbytes = c->count * idist_dtype_size(c->dtype);
    if (idist__flow_is_per_rank(c->kind)) nbytes *= (size_t)g->size;

    return nbytes <= IDIST__FLAT_BYTES ? IDIST__ALGO_FLAT : IDIST__ALGO_CHUNKED;
}

// Whether a call of ours may have its buffer in parts: if it goes through buffers, block by block.
static bool idist__share_takes_parts(const idist_group *g, const idist__call *c) {
    size_t n = (size_t)g->size, nbytes = c->count * idist_dtype_size(c->dtype);

    if (c->kind != IDIST__ALL_REDUCE || (int)c->op >= IDIST_OP_USER) return false;
    if (n * n * nbytes <= IDIST__SPLIT_BYTES || nbytes >= IDIST__REMOTE_REDUCTION) return false;

    return idist__share_choose(g, c) == IDIST__ALGO_CHUNKED;
}

// An all_to_allv counts bytes, because each pair of ranks may have a dtype of its own. False: no
// memory for the counts.
static bool idist__share_count_bytes(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__call *c = &t->call;
    size_t n = (size_t)o->n, *counts, i;

    counts = (size_t *)idist__mem_raw(&t->group->w->cfg.mem, 4 * n * sizeof *counts);
    if (!counts) return false;

    for (i = 0; i < n; i++) {
        counts[i] = c->sendcounts[i] * o->size;
        counts[n + i] = idist__extent_displ(c->sendcounts, c->senddispls, (int)i) * o->size;
        counts[2 * n + i] = c->recvcounts[i] * o->size;
        counts[3 * n + i] = idist__extent_displ(c->recvcounts, c->recvdispls, (int)i) * o->size;
    }

    o->memory = (char *)counts;
    o->size = 1;
    c->sendcounts = counts;
    c->senddispls = counts + n;
    c->recvcounts = counts + 2 * n;
    c->recvdispls = counts + 3 * n;

    return true;
}

// Sets up what a shared call works on. Unlike the algorithms over messages, it takes narrow floats
// as they are. False: no memory.
static bool idist__share_prepare(idist__task *t, idist__algorithm algorithm) {
    idist__op *o = idist__op_of(t);
    idist__kind kind = t->call.kind;

    idist__op_prepare(t);
    o->algorithm = algorithm;
    o->u.shared.chunk_count = o->count;
    if (kind == IDIST__BROADCAST) o->in = o->out;

    if ((kind == IDIST__GATHERV || kind == IDIST__SCATTERV) && o->rank != o->root) {
        // Only the root's are valid.
        t->call.sendcounts = t->call.senddispls = NULL;
        t->call.recvcounts = t->call.recvdispls = NULL;
    }

    return kind != IDIST__ALL_TO_ALLV || idist__share_count_bytes(t);
}

// Queues a call behind the group's other shared calls; starts it if it is the first one.
static void idist__share_start(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__share *share = idist__region_share(t);

    if (o->algorithm == IDIST__ALGO_FLAT) o->run = idist__flat_run;
    else if (idist__flow_is_split(o, t->call.kind)) o->run = idist__split_reduce_run;
    else o->run = idist__chunk_run;

    if (share->entered_early) {
        o->u.shared.call_number = share->calls_entered;
        o->u.shared.entered = true;
        share->entered_early = false;
    }

    if (share->last) idist__op_of(share->last)->u.shared.next = t;
    else share->first = t;
    share->last = t;
    if (share->first == t) idist__op_run(t);
}

// In a quick call, which has not read the links, the calls differ. Perhaps another rank has aborted
// the group, and the rank that we differ from has not heard of it: the call is started as usual,
// which reads the links first and then compares again.
static void idist__share_reconsider(idist__ring *ring) {
    if (!ring->failed) return;
    ring->failed = NULL;
    ring->last_start_ns = 0;
}

// A small blocking collective while nothing else is under way: needs no task and no clock. False:
// the call has to be started as usual. It may have been entered by then.
static bool idist__share_quick(idist_group *g, const idist__call *c) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__share *share = idist__ring_group_of(g)->share;
    idist__task *t;
    const idist__fingerprint *fingerprint;
    int turns;

    if (!share || share->first || ring->failed) return false;
    if (idist__share_choose(g, c) != IDIST__ALGO_FLAT) return false;
    if ((int)c->op >= IDIST_OP_USER && idist__kind_reduces(c->kind)) return false; // it may throw

    t = share->quick_task;
    t->call = *c;
    t->seq = g->seq + 1;
    (void)idist__share_prepare(t, IDIST__ALGO_FLAT); // only a v-form needs memory
    idist__op_of(t)->past = idist__history_past(t);

    if (!idist__slot_may_enter(t)) {
        idist__share_reconsider(ring);
        return false;
    }

    idist__slot_enter(t);

    for (turns = 0; !idist__slot_all_entered(t, false); turns++) {
        if (idist__send_quick_wait(ring, turns)) continue;
        idist__share_reconsider(ring);
        share->entered_early = true;
        return false;
    }

    (void)idist__fetch_chunk(t, 0); // fails only if an op of the program does
    g->seq++;
    fingerprint = &share->fingerprints[share->calls_entered % IDIST__REGION_SLOTS];
    idist__history_append(idist__ring_group_of(g), fingerprint, idist__op_of(t)->past);

    return true;
}

// Resumes the first shared call of each group.
static void idist__share_progress(idist__ring *ring) {
    idist_group *g;

    for (g = &ring->w->group; g; g = g->next) {
        idist__share *share = g->rank >= 0 && g->impl ? idist__ring_group_of(g)->share : NULL;

        while (share && share->first) {
            const idist__task *t = share->first;
            idist__op_run(share->first);
            if (share->first == t || ring->failed) break;
        }

        if (ring->failed) break;
    }
}

// The rank of this host whose next step is all that we wait for, or -1.
static int idist__share_awaited(const idist__ring *ring) {
    const idist__task *t = ring->w->tasks;
    const idist__share *share;

    if (!t || t->next || t->call.kind >= IDIST__SEND || t->group->size == 1) return -1;
    if (!idist__share_serves(idist__op_of(t)->algorithm)) return -1;
    share = idist__region_share(t);
    if (!share || share->first != t) return -1;

    return ring->shm->local[t->group->ranks[idist__op_of(t)->u.shared.awaited]];
}

// The group has failed here. A rank that comes late must not go on with what our slots say; it
// reads its links instead, and learns of the failure there.
static void idist__share_withdraw(idist_group *g) {
    idist__share *share = idist__ring_group_of(g)->share;
    uint32_t i;

    for (i = 0; share && i < IDIST__REGION_SLOTS; i++)
        __atomic_store_n(&idist__region_slot(share, g->rank, i)->call_number,
                         share->calls_entered - ((uint32_t)1 << 30), __ATOMIC_RELEASE);

    __atomic_thread_fence(__ATOMIC_SEQ_CST); // before the caller has its buffers back
}

// Whether a member may still write to our result. It checks our slot before every piece that it
// writes.
static bool idist__share_may_write(const idist_group *g, const idist__op *o, int rank) {
    const idist__ring *ring = idist__ring_of(g->w);
    const idist__share *share = idist__ring_group_of(g)->share;

    return rank != g->rank && ring->links[g->ranks[rank]].open &&
           idist__region_reached(share, rank, IDIST__REDUCED) <= o->u.shared.first_chunk &&
           idist__slot_is_current(share, rank, o->u.shared.call_number);
}

// A call in which the others write to our result (direct) ends early: waits until each of them has
// done that, has left the call as well, or is dead. We may not know of a death yet, because the
// failure may come from another rank; and a rank that is stopped would never answer, hence the
// deadline.
static void idist__share_await_writers(const idist_group *g) {
    const idist__ring *ring = idist__ring_of(g->w);
    const idist__share *share = idist__ring_group_of(g)->share;
    const idist__op *o = share && share->first ? idist__op_of(share->first) : NULL;
    int64_t until_ns = idist__os_clock_deadline(IDIST__WRITERS_MS);
    int i;

    if (!o || !o->u.shared.direct) return;

    for (i = 0; i < g->size; i++) {
        const idist__pipe_port *port = &ring->shm->ports[ring->shm->local[g->ranks[i]]];

        while (idist__share_may_write(g, o, i) && !idist__pipe_peer_gone(port) &&
               idist__os_clock_now_ns() < until_ns)
            idist__os_thread_yield();
    }
}

// Takes a call out of the queue.
static void idist__share_cancel(idist__task *t) {
    idist__share *share = idist__region_share(t);
    idist__task **at, *last = NULL;

    if (!share) return;
    for (at = &share->first; *at && *at != t; at = &idist__op_of(*at)->u.shared.next) last = *at;
    if (*at) *at = idist__op_of(t)->u.shared.next;
    if (share->last == t) share->last = last;
}

// Whether a call cannot complete before this rank of the group enters it, or an earlier one.
static bool idist__share_needs(const idist__task *t, int rank) {
    const idist__op *o = idist__op_of(t);
    const idist__shared_op *shared = &o->u.shared;
    idist__share *share = idist__region_share(t);
    uint64_t number = shared->first_chunk + shared->exposed; // of the next chunk to expose

    if (!share || share->first != t) return false;
    if (!shared->entered) // see idist__slot_may_enter
        return !idist__slot_has_entered(share, rank, share->calls_entered + 1 - IDIST__SLOTS_AHEAD);
    if (idist__slot_has_entered(share, rank, shared->call_number)) return false;
    if (idist__flow_reads(t, rank)) return true;
    if (o->algorithm != IDIST__ALGO_CHUNKED) return false;
    if (!idist__flow_contributes(o, t->call.kind, o->rank)) return false;

    // It has to read what we contribute: all of it, if that is read in place; else the chunk whose
    // buffer we need next.
    if (shared->in_place) return true;
    if (shared->exposed >= shared->nchunks || number < IDIST__BUFFERS) return false;
    return idist__region_reached(share, rank, IDIST__FREED) < number - IDIST__BUFFERS + 1;
}

// For error texts: reads in the slots how far the others are.
static void idist__share_update_seen(const idist__task *t) {
    idist__ring_group *rg = idist__ring_group_of(t->group);
    int i, index;

    for (i = 0; rg->share && i < t->group->size; i++) {
        for (index = 0; index < IDIST__REGION_SLOTS; index++) {
            idist__call_slot *slot = idist__region_slot(rg->share, i, (uint32_t)index);
            uint32_t number = __atomic_load_n(&slot->call_number, __ATOMIC_ACQUIRE);
            idist__fingerprint fingerprint = slot->fingerprint;

            __atomic_thread_fence(__ATOMIC_ACQUIRE);
            if (!number || __atomic_load_n(&slot->call_number, __ATOMIC_RELAXED) != number)
                continue; // its owner is writing
            if ((int32_t)(fingerprint.seq - rg->seen[i].seq) <= 0) continue;
            rg->seen[i].seq = fingerprint.seq;
            rg->seen[i].fingerprint = fingerprint;
        }
    }
}

//------------------------------------------------------------------------------
// [share:pool]  lending regions to groups
// uses os:memory mem model shm:segment msg:types msg:op link region
//
// Every rank has a few regions in the shared file. The first one, which the world gets without an
// exchange, has memory from the start; the others get it when they are first needed, in their
// order. A new group gets one of each member: the members exchange the numbers of the regions
// that they offer (idist__pool_offer_region), and if everybody has one, the group's collectives run
// in them (idist__pool_meet). Otherwise they are made of messages. A region is free again when all
// members have freed the group. They count themselves in the region (members_done), or, if they
// never learnt its number, send LEFT.
//------------------------------------------------------------------------------

// The first region of a rank has larger buffers than the others, and its head is in the front.
static char *idist__pool_head(const idist__segment *m, int rank, int index) {
    char *second = idist__segment_part(m, rank) + m->buffers_at;
    size_t nbytes = IDIST__REGION_HEAD_BYTES + IDIST__BUFFERS * m->chunk_nbytes[1];

    if (index == 0) return idist__segment_front(m, rank) + sizeof(idist__doorbell);
    second += IDIST__BUFFERS * m->chunk_nbytes[0];
    return second + (size_t)(index - 1) * nbytes;
}

static char *idist__pool_buffers(const idist__segment *m, int rank, int index) {
    if (index == 0) return idist__segment_part(m, rank) + m->buffers_at;
    return idist__pool_head(m, rank, index) + IDIST__REGION_HEAD_BYTES;
}

static idist__region_progress *idist__pool_progress(const idist__segment *m, int rank, int index) {
    size_t at = IDIST__REGION_SLOTS * IDIST__SLOT_BYTES;
    return (idist__region_progress *)(void *)(idist__pool_head(m, rank, index) + at);
}

// Takes memory for one of our regions, once. 0, or an errno.
static int idist__pool_reserve(idist__segment *m, int index) {
    int error;
    const char *head = idist__pool_head(m, m->me, index);
    const char *buffers = idist__pool_buffers(m, m->me, index);
    size_t nbytes = IDIST__BUFFERS * m->chunk_nbytes[index > 0];

    if (index < m->reserved_count) return 0;
    error = idist__os_memory_reserve(m->fd, (size_t)(head - m->base), IDIST__REGION_HEAD_BYTES);
    if (!error) error = idist__os_memory_reserve(m->fd, (size_t)(buffers - m->base), nbytes);
    if (!error) m->reserved_count = index + 1;

    return error;
}

// Forgets the calls of the group that had this region of ours before. Contributions may stay: they
// are read only in calls that have been entered.
static void idist__pool_clear(const idist__segment *m, int index) {
    char *head = idist__pool_head(m, m->me, index);
    size_t at;

    for (at = 0; at < IDIST__REGION_SLOTS * IDIST__SLOT_BYTES; at += IDIST__SLOT_BYTES) {
        memset(head + at, 0, IDIST__LINE);
        memset(head + at + IDIST__LINE + IDIST__FLAT_BYTES, 0, IDIST__LINE);
    }

    memset(idist__pool_progress(m, m->me, index), 0, sizeof(idist__region_progress));
}

// What we offer the other members of a new group: the number of a region, from 1 on; 0 for none.
static uint64_t idist__pool_offer_region(idist_group *g) {
    idist__segment *m = idist__ring_of(g->w)->shm;
    uint32_t nmembers = 0;
    int i;

    for (i = 0; m && i < g->size; i++) nmembers += m->local[g->ranks[i]] >= 0;
    if (nmembers < 2) return 0;
    if (g->status != IDIST_OK) return 0; // a member that knows of the failure may have left

    for (i = 0; i < m->region_count; i++) {
        if (m->taken[i]) {
            const idist__region_progress *progress = idist__pool_progress(m, m->me, i);
            uint32_t done = __atomic_load_n(&progress->members_done, __ATOMIC_ACQUIRE);
            if (done < m->region_members[i]) continue;
        }

        if (idist__pool_reserve(m, i)) return 0;
        idist__pool_clear(m, i);
        m->taken[i] = true;
        m->region_members[i] = nmembers;
        m->region_groups[i] = g->ctx;
        return (uint64_t)i + 1;
    }

    return 0;
}

static void idist__pool_discard(const idist_allocator *mem, idist__share *share) {
    idist__mem_free(mem, share->quick_task);
    idist__mem_free(mem, share->heads);
    idist__mem_free(mem, share->buffers);
    idist__mem_free(mem, share->entered);
    idist__mem_free(mem, share->operands);
    idist__mem_free(mem, share->locations);
    idist__mem_free(mem, share);
}

// A member has freed the group for which we offered a region, without having used it.
static void idist__pool_member_left(const idist__ring *ring, uint64_t ctx) {
    idist__segment *m = ring->shm;
    int i;

    for (i = 0; m && i < m->region_count; i++) {
        if (!m->taken[i] || m->region_groups[i] != ctx) continue;
        __atomic_fetch_add(&idist__pool_progress(m, m->me, i)->members_done, 1u, __ATOMIC_RELEASE);
    }
}

// The exchange of region numbers failed, so we do not know the regions of the others: tells them by
// a message that we are done with them.
static void idist__pool_decline(const idist_group *g) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__frame frame;
    int i;

    memset(&frame, 0, sizeof frame);
    frame.type = IDIST__LEFT;
    frame.ctx = g->ctx;

    for (i = 0; i < g->size; i++) {
        if (i == g->rank) idist__pool_member_left(ring, g->ctx);
        else if (ring->shm->local[g->ranks[i]] >= 0)
            idist__link_control(ring, &ring->links[g->ranks[i]], &frame, NULL);
    }
}

// The group is freed: gives the regions of its members back.
static void idist__pool_leave(idist_group *g) {
    idist__ring_group *rg = idist__ring_group_of(g);
    idist__share *share = rg->share;
    int i;

    if (!rg->met && !g->inner && idist__ring_of(g->w)->shm) idist__pool_decline(g);
    if (!share) return;

    for (i = 0; i < g->size; i++) {
        if (!share->heads[i]) continue;
        __atomic_fetch_add(&idist__region_progress_of(share, i)->members_done, 1u,
                           __ATOMIC_RELEASE);
    }

    idist__pool_discard(&g->w->cfg.mem, share);
    rg->share = NULL;
}

static idist__share *idist__pool_new_share(const idist_allocator *mem, size_t size) {
    idist__share *share = (idist__share *)idist__mem_alloc(mem, sizeof *share);

    if (!share) return NULL;
    share->heads = (char **)idist__mem_alloc(mem, sizeof *share->heads * size);
    share->buffers = (char **)idist__mem_alloc(mem, sizeof *share->buffers * size);
    share->entered = (uint32_t *)idist__mem_alloc(mem, sizeof *share->entered * size);
    share->operands = (const void **)idist__mem_alloc(mem, sizeof *share->operands * size);
    share->locations = (idist__location *)idist__mem_alloc(mem, sizeof *share->locations * size);
    share->quick_task =
        (idist__task *)idist__mem_alloc(mem, sizeof(idist__task) + sizeof(idist__op));

    if (!share->heads || !share->buffers || !share->entered || !share->operands ||
        !share->locations || !share->quick_task) {
        idist__pool_discard(mem, share);
        return NULL;
    }

    return share;
}

// All members have told which regions they offer. If one offers none, the group's collectives are
// made of messages.
static idist_status idist__pool_meet(idist_group *g, const uint64_t *offers) {
    idist__segment *m = idist__ring_of(g->w)->shm;
    idist__share *share;
    int i;

    for (i = 0; i < g->size; i++) {
        if (!m || m->local[g->ranks[i]] < 0) break;
        if (!offers[i] || offers[i] > (uint64_t)m->region_count) break;
    }

    if (i < g->size || (size_t)g->size * IDIST__LINE > m->chunk_nbytes[1]) {
        if (m && offers[g->rank]) m->region_members[offers[g->rank] - 1] = 0; // free at once
        return IDIST_OK;
    }

    share = idist__pool_new_share(&g->w->cfg.mem, (size_t)g->size);
    if (!share) return IDIST_ERR_NO_MEMORY;

    idist__ring_group_of(g)->share = share;
    share->shm = m;
    share->chunk_nbytes = m->chunk_nbytes[0];
    share->quick_task->group = g;
    share->quick_task->impl = share->quick_task + 1;

    for (i = 0; i < g->size; i++) {
        share->heads[i] = idist__pool_head(m, m->local[g->ranks[i]], (int)offers[i] - 1);
        share->buffers[i] = idist__pool_buffers(m, m->local[g->ranks[i]], (int)offers[i] - 1);
        // All members cut a call into the same chunks: those of the smallest region.
        if (offers[i] > 1) share->chunk_nbytes = m->chunk_nbytes[1];
    }

    return IDIST_OK;
}

#endif // IDIST_SHARE_H
