// ring/share/share.h: chooses, starts, progresses and cancels shared calls
//
// WHAT IT IS
//
// Shared calls are collectives of a group whose members all run on one host. Each member owns a
// region of shared memory that the other members can read. A member writes its contribution and its
// progress to its own region, and reads the regions of the other members. Members do not write to
// the regions of other members during calls, so there are no locks.
//
// HOW IT FITS
//
// ring/algo/choose.h decides how a call runs. The algorithms FLAT and CHUNKED are implemented here.
// All other algorithms are in ring/algo/.
//
// A SMALL ALL_REDUCE (up to 4 KiB, FLAT)
//
// idist__share_quick         runs the call at once if no other call is running
// idist__slot_may_enter      checks that all ranks have read the slot to be overwritten
// idist__slot_enter          writes fingerprint and contribution to our slot, publishes its number
// idist__slot_all_entered    polls the slots of the other ranks, compares their fingerprints
// idist__fetch_chunk         reduces all slots, in rank order, into the result
//
// A LARGE ALL_REDUCE (CHUNKED)
//
// idist__share_start         queues the task behind the group's other shared calls
// idist__split_reduce_run    a coroutine, resumed by idist__share_progress:
//   idist__slot_enter                publishes the slot, which has the locations of our buffers
//   idist__chunk_expose              copies our part of chunk i to buffer i % 3, publishes EXPOSED
//   idist__split_reduce_sum_block    reduces our block of the chunk over all ranks; then REDUCED
//   idist__split_reduce_take_blocks  copies the other ranks' blocks to our result; then FREED
// idist__slot_leave          completes the task; the next shared call becomes the first
//
// SOURCES
//
// Flat slots: Graham and Shipman, "MPI Support for Multi-core Architectures", 2008. Chunks, with
// reduce-scatter and all-gather in one buffer: Jain et al., "Framework for Scalable Intra-Node
// Collective Operations using Shared Memory", 2018.
#pragma once

#include "os/clock.h"
#include "os/thread.h"
#include "base/mem.h"
#include "base/dtype.h"
#include "base/reduce_op.h"
#include "launch/env.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/world.h"
#include "core/extent.h"
#include "ring/shm/segment.h"
#include "ring/shm/pipe.h"
#include "ring/msg/ring_model.h"
#include "ring/msg/op.h"
#include "ring/msg/history.h"
#include "ring/msg/send.h"
#include "ring/share/region.h"
#include "ring/share/flow.h"
#include "ring/share/slot.h"
#include "ring/share/fetch.h"
#include "ring/share/chunk.h"
#include "ring/share/split_reduce.h"

#define IDIST__WRITERS_MS 100

static bool idist__share_serves(idist__algorithm algorithm) {
    return algorithm == IDIST__ALGO_FLAT || algorithm == IDIST__ALGO_CHUNKED;
}

// Returns FLAT or CHUNKED, or AUTO if the call does not use shared memory. The result is the same
// on all members.
static idist__algorithm idist__share_choose(const idist_group *g, const idist__call *call) {
    const idist__share *share = idist__ring_group_of(g)->share;
    int setting = g->w->cfg.algorithm;
    size_t nbytes;
    bool scaled = idist__reduce_op_is_user(call->op) && idist__kind_reduces(call->kind) &&
                  !idist__world_user_op(g, call)->fn;

    if (!share || setting == IDIST__ALGO_LATENCY || setting == IDIST__ALGO_BANDWIDTH)
        return IDIST__ALGO_AUTO;
    if (scaled && idist__dtype_is_narrow(call->dtype)) return IDIST__ALGO_AUTO;
    if (call->kind != IDIST__ALL_TO_ALLV && call->kind != IDIST__BARRIER &&
        !idist__chunk_takes(g, share, idist_dtype_size(call->dtype)))
        return IDIST__ALGO_AUTO;
    if (idist__kind_is_v(call->kind))
        return (size_t)g->size * sizeof(uint64_t) <= IDIST__FLAT_BYTES ? IDIST__ALGO_CHUNKED
                                                                       : IDIST__ALGO_AUTO;

    if (setting == IDIST__ALGO_CHUNKED && call->count) return IDIST__ALGO_CHUNKED;
    if (!call->count) return IDIST__ALGO_FLAT;
    if (call->count > IDIST__FLAT_BYTES)
        return IDIST__ALGO_CHUNKED; // before the product can overflow
    nbytes = call->count * idist_dtype_size(call->dtype);
    if (idist__kind_gives_blocks(call->kind)) nbytes *= (size_t)g->size;

    return nbytes <= IDIST__FLAT_BYTES ? IDIST__ALGO_FLAT : IDIST__ALGO_CHUNKED;
}

// Returns true if the buffer of a call may be in parts. This requires that the call goes through
// our shared buffers, block by block.
static bool idist__share_takes_parts(const idist_group *g, const idist__call *call) {
    size_t n = (size_t)g->size, nbytes = call->count * idist_dtype_size(call->dtype);

    if (call->kind != IDIST__ALL_REDUCE || idist__reduce_op_is_user(call->op)) return false;
    if (n * n * nbytes <= IDIST__SPLIT_BYTES || nbytes >= IDIST__REMOTE_REDUCTION) return false;

    return idist__share_choose(g, call) == IDIST__ALGO_CHUNKED;
}

// Converts the counts and displacements of an all_to_allv to bytes, because each pair of ranks may
// use a different dtype. Returns false if memory is exhausted.
static bool idist__share_count_bytes(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__call *call = &t->call;
    size_t n = (size_t)op->n, *counts, i;

    counts = (size_t *)idist__mem_raw(&t->group->w->cfg.mem, 4 * n * sizeof *counts);
    if (!counts) return false;

    for (i = 0; i < n; i++) {
        counts[i] = call->sendcounts[i] * op->size;
        counts[n + i] = idist__extent_displ(call->sendcounts, call->senddispls, (int)i) * op->size;
        counts[2 * n + i] = call->recvcounts[i] * op->size;
        counts[3 * n + i] =
            idist__extent_displ(call->recvcounts, call->recvdispls, (int)i) * op->size;
    }

    op->memory = (char *)counts;
    op->size = 1;
    call->sendcounts = counts;
    call->senddispls = counts + n;
    call->recvcounts = counts + 2 * n;
    call->recvdispls = counts + 3 * n;

    return true;
}

// Sets up the operands of a shared call. Shared calls do not widen narrow floats, unlike the
// algorithms over messages. Returns false if memory is exhausted.
static bool idist__share_prepare(idist__task *t, idist__algorithm algorithm) {
    idist__op *op = idist__op_of(t);
    idist__kind kind = t->call.kind;

    idist__op_prepare(t);
    op->algorithm = algorithm;
    op->u.shared.chunk_count = op->count;
    if (kind == IDIST__BROADCAST) op->in = op->out;

    if ((kind == IDIST__GATHERV || kind == IDIST__SCATTERV) && op->rank != op->root) {
        // Counts and displacements are valid only on the root.
        t->call.sendcounts = t->call.senddispls = NULL;
        t->call.recvcounts = t->call.recvdispls = NULL;
    }

    return kind != IDIST__ALL_TO_ALLV || idist__share_count_bytes(t);
}

// Queues a call behind the group's other shared calls. Starts the call if it is the first one.
static void idist__share_start(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__share *share = idist__region_share(t);

    if (op->algorithm == IDIST__ALGO_FLAT) op->run = idist__flat_run;
    else if (idist__flow_is_split(op, t->call.kind)) op->run = idist__split_reduce_run;
    else op->run = idist__chunk_run;

    if (share->entered_early) {
        op->u.shared.call_number = share->calls_entered;
        op->u.shared.entered = true;
        share->entered_early = false;
    }

    if (share->last) idist__op_of(share->last)->u.shared.next = t;
    else share->first = t;
    share->last = t;
    if (share->first == t) idist__op_run(t);
}

// Discards the failure that idist__share_quick records if our slot differs from another rank's
// slot. That function has not read the links. Another rank may have aborted the group, and this
// rank may not know that yet. So the call starts as usual: it first reads the links, and then
// compares again.
static void idist__share_reconsider(idist__ring *ring) {
    if (!ring->failed) return;
    ring->failed = NULL;
    ring->last_start_ns = 0;
}

// Runs a small blocking collective in a preallocated task, without queuing the task or reading the
// clock, if no other shared call of the group is running. Returns false if the call must start as
// usual. We may then already have entered the call (entered_early).
static bool idist__share_quick(idist_group *g, const idist__call *call) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__share *share = idist__ring_group_of(g)->share;
    idist__task *t;
    const idist__fingerprint *fingerprint;
    int turns;

    if (!share || share->first || ring->failed) return false;
    if (idist__share_choose(g, call) != IDIST__ALGO_FLAT) return false;
    if (idist__reduce_op_is_user(call->op) && idist__kind_reduces(call->kind))
        return false; // the user's function may throw

    t = share->quick_task;
    t->call = *call;
    t->seq = g->seq + 1;
    (void)idist__share_prepare(t, IDIST__ALGO_FLAT); // cannot fail: only a v-form needs memory
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

    (void)idist__fetch_chunk(t, 0); // fails only if the user's op fails
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

// Returns the rank of this host whose next step we wait for, or -1 if we may also wait for anything
// else.
static int idist__share_awaited(const idist__ring *ring) {
    const idist__task *t = ring->w->tasks.running;
    const idist__share *share;

    if (!t || t->next || !idist__kind_is_collective(t->call.kind) || t->group->size == 1) return -1;
    if (!idist__share_serves(idist__op_of(t)->algorithm)) return -1;
    share = idist__region_share(t);
    if (!share || share->first != t) return -1;

    return ring->shm->local[t->group->ranks[idist__op_of(t)->u.shared.awaited]];
}

// Withdraws our slots after the group has failed here. A rank that is late must not continue with
// the contents of our slots. Instead, the rank reads its links and learns of the failure.
static void idist__share_withdraw(idist_group *g) {
    idist__share *share = idist__ring_group_of(g)->share;
    uint32_t i;

    for (i = 0; share && i < IDIST__REGION_SLOTS; i++)
        __atomic_store_n(&idist__region_slot(share, g->rank, i)->call_number,
                         share->calls_entered - ((uint32_t)1 << 30), __ATOMIC_RELEASE);

    __atomic_thread_fence(__ATOMIC_SEQ_CST); // before the caller may reuse its buffers
}

// Returns true if a member may still write to our result. A member checks our slot before it writes
// each piece.
static bool idist__share_may_write(const idist_group *g, const idist__op *op, int rank) {
    const idist__ring *ring = idist__ring_of(g->w);
    const idist__share *share = idist__ring_group_of(g)->share;

    return rank != g->rank && ring->links[g->ranks[rank]].open &&
           idist__region_reached(share, rank, IDIST__REDUCED) <= op->u.shared.first_chunk &&
           idist__slot_is_current(share, rank, op->u.shared.call_number);
}

// Waits until no other member can write to our result. Called when a call in which other ranks
// write to our result (`direct`) ends early. The wait for a member ends when the member has written
// everything, has left the call itself, or is dead. This function checks for a death itself,
// because another rank may have reported the failure. A stopped rank would never finish, so all
// waits end after IDIST__WRITERS_MS.
static void idist__share_await_writers(const idist_group *g) {
    const idist__ring *ring = idist__ring_of(g->w);
    const idist__share *share = idist__ring_group_of(g)->share;
    const idist__op *op = share && share->first ? idist__op_of(share->first) : NULL;
    int64_t until_ns = idist__os_clock_deadline(IDIST__WRITERS_MS);
    int i;

    if (!op || !op->u.shared.direct) return;

    for (i = 0; i < g->size; i++) {
        const idist__pipe_port *port = &ring->shm->ports[ring->shm->local[g->ranks[i]]];

        while (idist__share_may_write(g, op, i) && !idist__pipe_peer_gone(port) &&
               idist__os_clock_now_ns() < until_ns)
            idist__os_thread_yield();
    }
}

// Removes a call from the queue of its group.
static void idist__share_cancel(idist__task *t) {
    idist__share *share = idist__region_share(t);
    idist__task **at, *last = NULL;

    if (!share) return;
    for (at = &share->first; *at && *at != t; at = &idist__op_of(*at)->u.shared.next) last = *at;
    if (*at) *at = idist__op_of(t)->u.shared.next;
    if (share->last == t) share->last = last;
}

// Returns true if a call cannot complete before rank `rank` of the group enters the call, or an
// earlier call.
static bool idist__share_needs(const idist__task *t, int rank) {
    const idist__op *op = idist__op_of(t);
    const idist__shared_op *shared = &op->u.shared;
    idist__share *share = idist__region_share(t);
    uint64_t number = shared->first_chunk + shared->exposed; // number of the next chunk to expose

    if (!share || share->first != t) return false;
    if (!shared->entered) // see idist__slot_may_enter
        return !idist__slot_has_entered(share, rank, share->calls_entered + 1 - IDIST__SLOTS_AHEAD);
    if (idist__slot_has_entered(share, rank, shared->call_number)) return false;
    if (idist__flow_reads(t, rank)) return true;
    if (op->algorithm != IDIST__ALGO_CHUNKED) return false;
    if (!idist__flow_contributes(op, t->call.kind, op->rank)) return false;

    // We can continue only when the rank has read our contribution. If the contribution is read in
    // place, the rank must have read all of it. Otherwise it must have read the chunk whose buffer
    // we need next.
    if (shared->in_place) return true;
    if (shared->exposed >= shared->nchunks || number < IDIST__BUFFERS) return false;
    return idist__region_reached(share, rank, IDIST__FREED) < number - IDIST__BUFFERS + 1;
}

// Records, for error texts, the last call that every other rank has reached, as its slot shows.
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
