// ring/share/slot.h: announces a call, and compares it with the calls of the other ranks
//
// A rank enters a call by writing its slot. Before a rank enters call k, it compares the slots of
// all ranks up to call k - 16 with its own calls. During call k, it also compares the slots of the
// ranks that it reads from, up to call k. So a rank that has entered call k no longer needs the
// slots of call k - 16. There are 32 slots, used in turn: the slot of call k + 16 overwrites the
// slot of call k - 16.
//
// A rank that waits for no other rank runs ahead. Examples are the root of a broadcast, and all
// ranks of a gather except the root. This matters if ranks share a processor: the further a rank
// runs ahead, the fewer context switches there are.
//
// The contribution to a CHUNKED call is read from one of three places:
//
//   in a buffer       one chunk at a time; the general case
//   in a window       idist_alloc allocated the contribution, so all ranks have mapped it
//   cross-memory      the kernel lets us read the memory of other processes; the slot has the
//                     address. The data is copied only once. But system calls are expensive, the
//                     kernel copies slowly, and a chunk in a buffer that many ranks read stays in
//                     the cache. Not used on processors where such reads are too slow
//                     (ring/join/segment_probe.h), unless IDIST_ALGO is "remote"
//
// A rank whose buffers are read in place does not return from the call until all ranks have read
// them.
#pragma once

#include "os/process.h"
#include "os/cpu.h"
#include "os/thread.h"
#include "base/mem.h"
#include "base/window.h"
#include "base/log.h"
#include "base/reduce.h"
#include "launch/env.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/fingerprint.h"
#include "core/explain.h"
#include "ring/shm/segment.h"
#include "ring/shm/view.h"
#include "ring/msg/ring_model.h"
#include "ring/msg/op.h"
#include "ring/msg/history.h"
#include "ring/share/region.h"
#include "ring/share/flow.h"

// Minimum sizes at which cross-memory reads pay off, as measured. A broadcast also has a maximum.
#define IDIST__REMOTE_BYTES ((size_t)8 * 1024) // size of a block
#define IDIST__REMOTE_OVERSUBSCRIBED ((size_t)64 * 1024)
#define IDIST__REMOTE_BROADCAST_MAX ((size_t)2 << 20)
#define IDIST__REMOTE_REDUCTION ((size_t)2 << 20) // size of a whole contribution

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

// Returns true if a rank has entered the call and has not withdrawn its slots. A rank that leaves a
// call with an error withdraws them. After a normal return, the slot stays current until it is used
// again. A rank that leaves a call with an error withdraws its slots.
static bool idist__slot_is_current(const idist__share *share, int rank, uint32_t call_number) {
    const idist__call_slot *slot = idist__region_slot(share, rank, call_number);
    return __atomic_load_n(&slot->call_number, __ATOMIC_ACQUIRE) == call_number;
}

// Fails the group because the slot of a rank differs from ours.
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

// Compares the calls of a rank with ours, from the last comparison up to this call. Returns false
// if a call differs; the group has then failed.
static bool idist__slot_compare(idist__task *t, int rank, uint32_t call_number) {
    idist__share *share = idist__region_share(t);
    uint32_t oldest = call_number - IDIST__SLOTS_AHEAD, number = share->compared_calls + 1;

    if ((int32_t)(oldest - share->compared_calls) > 0) number = oldest;

    for (; (int32_t)(call_number - number) >= 0; number++) {
        // Reads the copy of our fingerprint, because other cores are fetching the cache line of our
        // slot.
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

// Returns true if all other ranks have entered this call, and their calls up to this call are the
// same as ours. Fails the group if a call differs.
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

// Returns true if all ranks have read the slot that the next call overwrites. First tries to
// compare IDIST__SLOTS_AHEAD / 2 more calls, so that the next calls need no check.
static bool idist__slot_may_enter(idist__task *t) {
    const idist__share *share = idist__region_share(t);
    uint32_t call_number = share->calls_entered + 1 - IDIST__SLOTS_AHEAD;

    if ((int32_t)(share->compared_calls - call_number) >= 0) return true;
    if (idist__slot_compare_all(t, call_number + IDIST__SLOTS_AHEAD / 2)) return true;
    if (idist__ring_of(t->group->w)->failed) return false; // the calls differ

    return idist__slot_compare_all(t, call_number);
}

// Maps the extents that other ranks have added to their windows since the last call.
static void idist__slot_look_at_windows(const idist__task *t) {
    idist__world *w = t->group->w;
    idist__segment *seg = idist__region_share(t)->shm;

    if (!seg->window || !idist__view_is_news(seg) || idist__view_look(seg)) return;
    idist__log_print(
        &w->log, IDIST_LOG_INFO,
        "cannot map memory that another rank allocated with idist_alloc; buffers in that memory "
        "are copied");
}

// Returns the number of extents of our window that all members of the group have mapped.
static uint32_t idist__slot_count_open(const idist__task *t) {
    const idist__segment *seg = idist__region_share(t)->shm;
    uint32_t open = IDIST__EXTENTS;
    int i;

    for (i = 0; i < t->group->size; i++) {
        int rank = seg->local[t->group->ranks[i]];
        uint32_t count = rank == seg->me ? open : idist__view_mapped_by(seg, rank);
        if (count < open) open = count;
    }

    return open;
}

// Returns the file offset of one of our buffers, or 0 if not all members can read it in place.
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

// Returns true if contributions are read from the memory of other processes. The result is the same
// on all ranks.
static bool idist__slot_is_remote(const idist__task *t) {
    const idist__op *op = idist__op_of(t);
    const idist__segment *seg = idist__region_share(t)->shm;
    idist__kind kind = t->call.kind;
    int setting = t->group->w->cfg.algorithm;

    if (!seg->reads_remote || setting == IDIST__ALGO_CHUNKED) return false;
    if (!seg->reads_fast && setting != IDIST__ALGO_REMOTE) return false;
    if (idist__kind_reduces(kind))
        return !seg->oversubscribed && idist__flow_send_nbytes(t) >= IDIST__REMOTE_REDUCTION;
    if (kind == IDIST__BROADCAST)
        return !seg->oversubscribed && op->nbytes >= IDIST__REMOTE_BYTES &&
               op->nbytes < IDIST__REMOTE_BROADCAST_MAX;
    if (kind == IDIST__ALL_GATHER && seg->oversubscribed && op->n > 4) return false;

    return op->nbytes >= (seg->oversubscribed ? IDIST__REMOTE_OVERSUBSCRIBED : IDIST__REMOTE_BYTES);
}

// Records the locations of a rank's buffers in a CHUNKED call.
static void idist__slot_locate(idist__task *t, int rank, const idist__call_slot *slot) {
    const idist__op *op = idist__op_of(t);
    idist__share *share = idist__region_share(t);
    idist__location *location = &share->locations[rank];

    if (op->algorithm == IDIST__ALGO_FLAT) return;
    location->send =
        idist__view_pointer(share->shm, slot->u.buffers.send_at, idist__flow_send_nbytes(t));
    location->recv = idist__view_pointer(share->shm, slot->u.buffers.recv_at, op->nbytes);
    location->remote_send = location->send ? 0 : slot->u.buffers.remote_send;
    location->remote_recv = slot->u.buffers.remote_recv;
}

// Returns the address of a rank's contribution to a FLAT call.
static char *idist__slot_payload(const idist__task *t, int rank) {
    const idist__op *op = idist__op_of(t);
    idist__call_slot *slot =
        idist__region_slot(idist__region_share(t), rank, op->u.shared.call_number);

    return idist__flow_send_nbytes(t) <= sizeof slot->u.bytes ? slot->u.bytes : (char *)(slot + 1);
}

static void idist__slot_scale(const idist__task *t, char *buf, size_t count) {
    const idist__op *op = idist__op_of(t);
    if (idist__flow_is_scaled(op)) idist__reduce_scale(buf, count, t->call.dtype, op->user->factor);
}

// Replaces our contribution by a copy that other ranks can read. Used for memory that the kernel
// does not let them read, and for an all_to_all in place, which would overwrite the data that they
// read. The shared buffers cannot be used instead, because all ranks must read contributions in the
// same way. Returns false if the group has failed.
static bool idist__slot_copy_contribution(idist__task *t) {
    idist__op *op = idist__op_of(t);
    size_t nbytes = idist__flow_send_nbytes(t);

    op->memory = (char *)idist__mem_raw(&t->group->w->cfg.mem, nbytes);

    if (!op->memory) {
        idist__ring_fail_memory(idist__ring_of(t->group->w), t->group);
        return false;
    }

    memcpy(op->memory, op->in, nbytes);
    op->in = op->memory;

    return true;
}

// Writes the addresses of our buffers to the slot, if the kernel lets other ranks read the buffers.
// If not, a contribution to a reduction goes through shared memory, and any other contribution is
// first copied to memory that can be read. Returns false if the group has failed.
static bool idist__slot_offer_remote(idist__task *t, idist__call_slot *slot) {
    idist__op *op = idist__op_of(t);
    size_t nbytes = idist__flow_send_nbytes(t);
    bool is_open = slot->u.buffers.send_at || idist__os_process_memory_is_open(op->in, nbytes);

    if (!is_open && !idist__kind_reduces(t->call.kind)) {
        if (!op->memory && !idist__slot_copy_contribution(t)) return false;
        is_open = true; // other ranks can read the copy
    }

    if (!is_open) return true;
    slot->u.buffers.remote_send = (uint64_t)(uintptr_t)op->in;
    if (t->call.kind == IDIST__ALL_REDUCE && idist__os_process_memory_is_open(op->out, op->nbytes))
        slot->u.buffers.remote_recv = (uint64_t)(uintptr_t)op->out;

    return true;
}

// Writes the locations of our buffers to the slot, so that other ranks read the buffers in place.
// Offers no buffer if the call would overwrite the data that other ranks read. Returns false if the
// group has failed.
static bool idist__slot_offer_buffers(idist__task *t, idist__call_slot *slot) {
    idist__op *op = idist__op_of(t);
    idist__share *share = idist__region_share(t);
    const idist__call *call = &t->call;
    bool scaled = idist__flow_is_scaled(op), all = call->kind == IDIST__ALL_REDUCE;
    bool overwrites =
        call->send == call->recv &&
        (call->kind == IDIST__ALL_TO_ALL || call->kind == IDIST__SCAN ||
         call->kind == IDIST__EXSCAN || (all && !idist__flow_is_split(op, call->kind)));

    idist__slot_look_at_windows(t);
    memset(&slot->u, 0, sizeof slot->u);
    memset(share->locations, 0, sizeof *share->locations * (size_t)op->n);
    op->u.shared.remote = !scaled && idist__slot_is_remote(t);

    if (op->u.shared.remote && overwrites && call->kind == IDIST__ALL_TO_ALL) {
        if (!idist__slot_copy_contribution(t)) return false;
        overwrites = false;
    }

    if (!idist__flow_contributes(op, call->kind, op->rank) || scaled || overwrites) return true;
    if (call->part_count) return true;

    slot->u.buffers.send_at = idist__slot_window_offset(t, op->in, idist__flow_send_nbytes(t));
    if (all) slot->u.buffers.recv_at = idist__slot_window_offset(t, op->out, op->nbytes);
    if (op->u.shared.remote && !idist__slot_offer_remote(t, slot)) return false;
    idist__slot_locate(t, op->rank, slot);
    op->u.shared.in_place = slot->u.buffers.send_at || slot->u.buffers.remote_send;

    return true;
}

// Returns the value that two ranks of a v-form compare for a count. The count of an all_to_allv is
// in bytes, and is converted to elements here, because each pair of ranks may use a different
// dtype. See idist__share_count_bytes.
static uint64_t idist__slot_pair(const idist__task *t, size_t count) {
    const idist__call *call = &t->call;
    size_t size = call->kind == IDIST__ALL_TO_ALLV ? idist_dtype_size(call->dtype) : 1;

    if (!count || !size) return 0;
    return idist__fingerprint_pair(t->group->w, call, count / size);
}

// Writes the counts of a v-form to the slot. Each other rank compares the count for itself with the
// count that it expects.
static void idist__slot_offer_counts(idist__task *t, idist__call_slot *slot) {
    idist__op *op = idist__op_of(t);
    idist__share *share = idist__region_share(t);
    const idist__call *call = &t->call;
    uint64_t *counts = (uint64_t *)(void *)(slot + 1);
    size_t largest = call->count;
    int i;

    memset(share->locations, 0, sizeof *share->locations * (size_t)op->n);

    for (i = 0; i < op->n; i++) {
        size_t count = idist__flow_send_count(t, i);

        counts[i] = idist__slot_pair(t, count);
        if (count > largest) largest = count;
        if (call->recvcounts && call->recvcounts[i] > largest) largest = call->recvcounts[i];
    }

    op->u.shared.largest_count = largest;
    slot->u.parts.largest = largest;
}

// Writes our contribution to the slot of a FLAT call.
static void idist__slot_write_payload(const idist__task *t) {
    const idist__op *op = idist__op_of(t);
    char *payload = idist__slot_payload(t, op->rank);
    size_t nbytes = idist__flow_send_nbytes(t);
    size_t count = nbytes / (op->size ? op->size : 1); // NOLINT(clang-analyzer-core.DivideZero)

    idist__region_write(idist__region_share(t), payload, op->in, nbytes);
    idist__slot_scale(t, payload, count);
}

// Prefetches the cache lines of our next slot for writing, while the call can only wait. Assumes
// that the next contribution is as large as the larger of the last two.
static void idist__slot_prefetch_next(const idist__task *t) {
    const idist__op *op = idist__op_of(t);
    idist__share *share = idist__region_share(t);
    char *next = (char *)idist__region_slot(share, op->rank, op->u.shared.call_number + 1);
    size_t *recent = share->recent_nbytes, nbytes, at;

    recent[op->u.shared.call_number % 2] =
        op->algorithm == IDIST__ALGO_FLAT ? idist__flow_send_nbytes(t) : 0;
    nbytes = recent[0] > recent[1] ? recent[0] : recent[1];
    if (nbytes <= sizeof(idist__call_slot) - offsetof(idist__call_slot, u)) nbytes = 0;
    nbytes = idist__flow_min(nbytes, IDIST__PREFETCH_BYTES) + IDIST__LINE;
    for (at = 0; at < nbytes; at += IDIST__LINE) idist__os_cpu_prefetch_for_write(next + at);
}

// Writes our previous call to the slot, if that call used messages. A rank that made a different
// previous call needs our previous call for its error text.
static void idist__slot_tell_previous(const idist__task *t, const idist__fingerprint *fingerprint) {
    const idist__op *op = idist__op_of(t);
    const idist__fingerprint *before = idist__history_before(t->group, fingerprint);

    if (before && (before->algorithm & ~IDIST__ON_DEVICE) <= IDIST__ALGO_BANDWIDTH)
        *idist__region_previous_call(idist__region_share(t), op->rank, op->u.shared.call_number) =
            *before;
}

// Enters the call: fills in our slot and publishes it. Returns false if that was not possible; the
// group has then failed.
static bool idist__slot_enter(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__share *share = idist__region_share(t);
    idist__call_slot *slot;
    idist__fingerprint fingerprint;
    uint32_t number = ++share->calls_entered;

    op->u.shared.call_number = number;
    slot = idist__region_slot(share, op->rank, number);

    if (op->algorithm == IDIST__ALGO_CHUNKED) {
        if (idist__kind_is_v(t->call.kind)) idist__slot_offer_counts(t, slot);
        else if (!idist__slot_offer_buffers(t, slot)) return false;
    } else if (idist__flow_contributes(op, t->call.kind, op->rank)) {
        idist__slot_write_payload(t);
    }

    fingerprint = idist__fingerprint_of_task(t, op->algorithm);
    idist__slot_tell_previous(t, &fingerprint);
    share->fingerprints[number % IDIST__REGION_SLOTS] = fingerprint;
    share->pasts[number % IDIST__REGION_SLOTS] = op->past;

    // Writes the fields before `u` last, and without a pause. The other ranks poll this line, and
    // would otherwise fetch it from our cache between two writes.
    slot->fingerprint = fingerprint;
    slot->past = op->past;
    idist__os_thread_handover();
    __atomic_store_n(&slot->call_number, number, __ATOMIC_RELEASE);
    idist__region_wake_members(share, t->group);

    idist__slot_prefetch_next(t);
    op->u.shared.entered = true;
    op->u.shared.next_rank = 0;

    return true;
}

// Compares the call of a rank with ours. In v-forms, also compares the count that only the two
// ranks know. Returns false if something differs; the group has then failed.
static bool idist__slot_agree(idist__task *t, int rank) {
    idist__op *op = idist__op_of(t);
    const idist__call_slot *slot =
        idist__region_slot(idist__region_share(t), rank, op->u.shared.call_number);
    uint64_t given, expected;
    char cause[400];

    if (!idist__slot_compare(t, rank, op->u.shared.call_number)) return false;

    if (!idist__kind_is_v(t->call.kind)) {
        idist__slot_locate(t, rank, slot);
        return true;
    }

    if (slot->u.parts.largest > op->u.shared.largest_count)
        op->u.shared.largest_count = (size_t)slot->u.parts.largest;
    if (!idist__flow_contributes(op, t->call.kind, rank) || !idist__flow_reads(t, rank))
        return true;

    given = ((const uint64_t *)(const void *)(slot + 1))[op->rank];
    expected = idist__slot_pair(t, idist__flow_recv_count(t, rank));
    if (given == expected) return true;

    idist__explain_pair(t->group->ranks[rank], given, t->group->ranks[op->rank], expected, t, cause,
                        sizeof cause);
    idist__ring_fail(idist__ring_of(t->group->w), t->group, IDIST_ERR_MISMATCH, cause);

    return false;
}

// Returns true if the ranks that we read from have entered this call, or all ranks if `all` is
// true. Also returns false if a rank's call differs from ours; the group has then failed.
static bool idist__slot_all_entered(idist__task *t, bool all) {
    idist__op *op = idist__op_of(t);
    idist__share *share = idist__region_share(t);
    bool compared_all = true;
    int i;

    for (; op->u.shared.next_rank < op->n; op->u.shared.next_rank++) {
        int rank = op->u.shared.next_rank;
        if (rank == op->rank) continue;
        if (!all && !idist__flow_reads(t, rank)) continue;
        op->u.shared.awaited = rank;
        if (!idist__slot_has_entered(share, rank, op->u.shared.call_number)) return false;
        if (!idist__slot_agree(t, rank)) return false;
    }

    op->u.shared.next_rank = 0;
    for (i = 0; i < op->n && compared_all; i++)
        compared_all = all || i == op->rank || idist__flow_reads(t, i);
    if (compared_all) share->compared_calls = op->u.shared.call_number;

    return true;
}

// Completes the call. The group's next shared call becomes the first in the queue.
static void idist__slot_leave(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__share *share = idist__region_share(t);

    share->first = op->u.shared.next;
    if (!share->first) share->last = NULL;
    idist__op_done(t);
}
