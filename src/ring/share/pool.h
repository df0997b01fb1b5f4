// ring/share/pool.h: lends regions to groups
//
// Every rank has a few regions in the shared file. The world gets the first region of each rank
// without an exchange. Memory for this region is reserved from the start. Memory for the other
// regions is reserved when they are first needed, in the order of their numbers.
//
// A new group gets one region of each member. The members exchange the numbers of the regions that
// they offer (idist__pool_offer_region). If every member offers one, the group's collectives use
// these regions (idist__pool_meet). Otherwise the group's collectives use messages. A member that
// frees the group increments members_done in each of these regions. A region is free again when all
// members have done so. A member that never learned the numbers of the regions sends LEFT instead.
#pragma once

#include "os/memory.h"
#include "base/mem.h"
#include "core/model.h"
#include "ring/shm/segment.h"
#include "ring/msg/ring_model.h"
#include "ring/msg/op.h"
#include "ring/msg/link.h"
#include "ring/share/region.h"

// Returns the head of a region. The first region of a rank has larger buffers than the other
// regions, and its head is in the front.
static char *idist__pool_head(const idist__segment *seg, int rank, int index) {
    char *second = idist__segment_part(seg, rank) + seg->buffers_at;
    size_t nbytes = IDIST__REGION_HEAD_BYTES + IDIST__BUFFERS * seg->chunk_nbytes[1];

    if (index == 0) return idist__segment_front(seg, rank) + sizeof(idist__doorbell);
    second += IDIST__BUFFERS * seg->chunk_nbytes[0];
    return second + (size_t)(index - 1) * nbytes;
}

static char *idist__pool_buffers(const idist__segment *seg, int rank, int index) {
    if (index == 0) return idist__segment_part(seg, rank) + seg->buffers_at;
    return idist__pool_head(seg, rank, index) + IDIST__REGION_HEAD_BYTES;
}

static idist__region_progress *idist__pool_progress(const idist__segment *seg, int rank,
                                                    int index) {
    size_t at = IDIST__REGION_SLOTS * IDIST__SLOT_BYTES;
    return (idist__region_progress *)(void *)(idist__pool_head(seg, rank, index) + at);
}

// Reserves memory for one of our regions, if that has not been done before. Returns 0 or an errno.
static int idist__pool_reserve(idist__segment *seg, int index) {
    int error;
    const char *head = idist__pool_head(seg, seg->me, index);
    const char *buffers = idist__pool_buffers(seg, seg->me, index);
    size_t nbytes = IDIST__BUFFERS * seg->chunk_nbytes[index > 0];

    if (index < seg->reserved_count) return 0;
    error = idist__os_memory_reserve(seg->fd, (size_t)(head - seg->base), IDIST__REGION_HEAD_BYTES);
    if (!error) error = idist__os_memory_reserve(seg->fd, (size_t)(buffers - seg->base), nbytes);
    if (!error) seg->reserved_count = index + 1;

    return error;
}

// Clears the calls of the group that used this region of ours before. Contributions may stay in the
// slots, because ranks read them only in calls that have been entered.
static void idist__pool_clear(const idist__segment *seg, int index) {
    char *head = idist__pool_head(seg, seg->me, index);
    size_t at;

    for (at = 0; at < IDIST__REGION_SLOTS * IDIST__SLOT_BYTES; at += IDIST__SLOT_BYTES) {
        memset(head + at, 0, IDIST__LINE);
        memset(head + at + IDIST__LINE + IDIST__FLAT_BYTES, 0, IDIST__LINE);
    }

    memset(idist__pool_progress(seg, seg->me, index), 0, sizeof(idist__region_progress));
}

// Chooses the region that we offer to the other members of a new group. Returns 1 plus its number,
// or 0 if we offer none.
static uint64_t idist__pool_offer_region(idist_group *g) {
    idist__segment *seg = idist__ring_of(g->w)->shm;
    uint32_t nmembers = 0;
    int i;

    for (i = 0; seg && i < g->size; i++) nmembers += seg->local[g->ranks[i]] >= 0;
    if (nmembers < 2) return 0;
    if (g->status != IDIST_OK) return 0; // a member that knows of the failure may already have left

    for (i = 0; i < seg->region_count; i++) {
        if (seg->taken[i]) {
            const idist__region_progress *progress = idist__pool_progress(seg, seg->me, i);
            uint32_t done = __atomic_load_n(&progress->members_done, __ATOMIC_ACQUIRE);
            if (done < seg->region_members[i]) continue;
        }

        if (idist__pool_reserve(seg, i)) return 0;
        idist__pool_clear(seg, i);
        seg->taken[i] = true;
        seg->region_members[i] = nmembers;
        seg->region_groups[i] = g->ctx;
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

// Counts a member that has freed the group without using the region that we offered for it.
static void idist__pool_member_left(const idist__ring *ring, uint64_t ctx) {
    idist__segment *seg = ring->shm;
    int i;

    for (i = 0; seg && i < seg->region_count; i++) {
        if (!seg->taken[i] || seg->region_groups[i] != ctx) continue;
        __atomic_fetch_add(&idist__pool_progress(seg, seg->me, i)->members_done, 1u,
                           __ATOMIC_RELEASE);
    }
}

// Sends LEFT to the other members on this host, because we no longer need their regions. We do not
// know the numbers of these regions, because the exchange of the numbers failed.
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

// Releases the regions of the members when the group is freed.
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

// Sets up the shared calls of a group. `offers` contains 1 plus the number of the region that each
// member offers, or 0 if it offers none. If a member offers none, or the group is too large for the
// buffers, the group's collectives use messages.
static idist_status idist__pool_meet(idist_group *g, const uint64_t *offers) {
    idist__segment *seg = idist__ring_of(g->w)->shm;
    idist__share *share;
    int i;

    for (i = 0; i < g->size; i++) {
        if (!seg || seg->local[g->ranks[i]] < 0) break;
        if (!offers[i] || offers[i] > (uint64_t)seg->region_count) break;
    }

    if (i < g->size || (size_t)g->size * IDIST__LINE > seg->chunk_nbytes[1]) {
        if (seg && offers[g->rank]) seg->region_members[offers[g->rank] - 1] = 0; // free again
        return IDIST_OK;
    }

    share = idist__pool_new_share(&g->w->cfg.mem, (size_t)g->size);
    if (!share) return IDIST_ERR_NO_MEMORY;

    idist__ring_group_of(g)->share = share;
    share->shm = seg;
    share->chunk_nbytes = seg->chunk_nbytes[0];
    share->quick_task->group = g;
    share->quick_task->impl = share->quick_task + 1;

    for (i = 0; i < g->size; i++) {
        share->heads[i] = idist__pool_head(seg, seg->local[g->ranks[i]], (int)offers[i] - 1);
        share->buffers[i] = idist__pool_buffers(seg, seg->local[g->ranks[i]], (int)offers[i] - 1);
        // All members cut a call into the same chunks, which must fit into the buffers of the
        // smallest region.
        if (offers[i] > 1) share->chunk_nbytes = seg->chunk_nbytes[1];
    }

    return IDIST_OK;
}
