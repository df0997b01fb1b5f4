// ring/share/region.h: the memory that a rank shows to the other ranks
//
//   head      slot 0 | slot 1 | ... | slot 31 | progress
//   buffers   buffer 0 | buffer 1 | buffer 2
//
// A slot announces one call. It holds the call's number, its fingerprint and a small contribution.
// A large contribution passes through the three buffers, one chunk at a time. The progress counters
// count chunks over all calls of the group:
//
//   EXPOSED   our part of the chunk is in our buffer
//   REDUCED   our block of the chunk is reduced over all ranks and is in our buffer; only in
//             all_reduce and reduce
//   FREED     we have read all data that we need from the chunk
#pragma once

#include "os/cpu.h"
#include "os/thread.h"
#include "os/memory.h"
#include "core/model.h"
#include "ring/shm/pace.h"
#include "ring/shm/segment.h"
#include "ring/shm/doorbell.h"
#include "ring/msg/ring_model.h"

#define IDIST__REGION_SLOTS 32
#define IDIST__SLOTS_AHEAD 16 // half of the slots; see ring/share/slot.h
#define IDIST__FLAT_BYTES ((size_t)4096)
#define IDIST__INLINE_BYTES ((size_t)32)
// Size of a slot. The last line holds the fingerprint of the previous call if that call used
// messages.
#define IDIST__SLOT_BYTES (2 * IDIST__LINE + IDIST__FLAT_BYTES)
#define IDIST__REGION_HEAD_BYTES \
    (IDIST__REGION_SLOTS * IDIST__SLOT_BYTES + sizeof(idist__region_progress))
#define IDIST__CHUNK_MAX ((size_t)384 * 1024)
enum { IDIST__BUFFERS = 3 };

typedef struct idist__call_slot { // one cache line; IDIST__FLAT_BYTES of payload follow
    uint32_t call_number;         // number among the shared calls; written last
    uint16_t past;                // digest of the earlier calls
    uint16_t zero;
    idist__fingerprint fingerprint;
    union {
        char bytes[IDIST__INLINE_BYTES]; // FLAT: a contribution of at most this size
        struct {                         // CHUNKED
            uint64_t send_at, recv_at;   // offsets of the buffers in the file; 0 if in no window
            // Addresses of the buffers in the rank's memory, or 0 if other ranks do not read these
            // buffers through the kernel.
            uint64_t remote_send;
            uint64_t remote_recv;
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

typedef struct idist__region_progress { // two cache lines; other ranks write only to members_done
    idist__counter reached[IDIST__MILESTONES];
    char pad[40];
    // Number of members that have freed the group. Once all members have done so, another group can
    // use the region.
    uint32_t members_done;
    char pad2[60];
} idist__region_progress;

// Locations of a rank's contribution and result. The fields `send` and `recv` are addresses in this
// process, or NULL if the buffer is in no window. The fields `remote_send` and `remote_recv` are
// addresses in that rank's memory, or 0. The kernel reads from these addresses for us.
typedef struct idist__location {
    char *send, *recv;
    uint64_t remote_send, remote_recv;
} idist__location;

typedef struct idist__share { // the state of a group whose members share memory
    idist__segment *shm;
    char **heads, **buffers; // heads and buffers of the regions, by rank in the group
    uint32_t *entered;       // by rank: the last shared call that the rank is known to have entered
    const void **operands;   // scratch: one operand per rank
    idist__location *locations; // CHUNKED: locations by rank, in the current call
    size_t chunk_nbytes;        // size of a buffer

    idist__fingerprint fingerprints[IDIST__REGION_SLOTS]; // copies of the fingerprints in our slots
    uint16_t pasts[IDIST__REGION_SLOTS];
    uint32_t calls_entered;  // number of shared calls that we have entered
    uint32_t compared_calls; // the slots of all ranks have been compared up to this call
    uint64_t chunks_done;
    size_t recent_nbytes[2];   // sizes of the contributions in our last two slots
    idist__task *first, *last; // queue of shared calls; only the first call runs
    idist__task *quick_task;   // the task that idist__share_quick uses
    bool entered_early;        // idist__share_quick has already entered the next call
    uint32_t extents_open;     // number of extents of our window that all members have mapped
} idist__share;

static idist__call_slot *idist__region_slot(const idist__share *share, int rank,
                                            uint32_t call_number) {
    size_t at = (call_number % IDIST__REGION_SLOTS) * IDIST__SLOT_BYTES;
    return (idist__call_slot *)(void *)(share->heads[rank] + at);
}

// Returns the fingerprint of the call that the rank made before this call. The rank writes the
// fingerprint only if that earlier call used messages, so the caller must first compare its
// sequence number.
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

// Copies to cache lines that other cores have in their caches. Bypasses the caches, or prefetches
// the next lines while it writes.
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

// Wakes the members that sleep. Called after a write that the members may wait for.
static void idist__region_wake_members(const idist__share *share, const idist_group *g) {
    int i;

    if (!idist__doorbell_any_asleep(share->shm)) return;
    for (i = 0; i < g->size; i++)
        if (i != g->rank) idist__doorbell_wake_for_step(share->shm, share->shm->local[g->ranks[i]]);
}

// Publishes that this rank has reached a milestone in all chunks before number `chunks`.
static void idist__region_publish(idist__task *t, idist__milestone milestone, uint64_t chunks) {
    idist__share *share = idist__region_share(t);
    idist__region_progress *progress = idist__region_progress_of(share, t->group->rank);

    idist__os_thread_handover();
    __atomic_store_n(&progress->reached[milestone], chunks, __ATOMIC_RELEASE);
    idist__region_wake_members(share, t->group);
    t->group->w->wait.moved_count++;
}
