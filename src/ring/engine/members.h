// ring/engine/members.h: opens and closes a group, and its groups by host
//
// Frames for a group may arrive before the group exists on this rank. The links keep these frames
// until the group is opened. Closing a group drops the frames that are left. The ring remembers the
// contexts of the IDIST__CLOSED groups that were closed last, and drops frames that arrive for
// these groups.
//
// Once a group is open, its members meet. If they all share memory, each member has offered a
// region of shared memory, and collectives use these regions. If the members are on several hosts,
// the group gets two inner groups for collectives by host (`local` and `leaders`, see
// ring/algo/host_plan.h).
#pragma once

#include "base/mem.h"
#include "base/window.h"
#include "base/hash.h"
#include "core/model.h"
#include "core/group.h"
#include "ring/shm/segment.h"
#include "ring/shm/view.h"
#include "ring/msg/ring_model.h"
#include "ring/msg/link.h"
#include "ring/msg/message.h"
#include "ring/share/pool.h"

enum { IDIST__GROUP_LOCAL = 1, IDIST__GROUP_LEADERS = 2 }; // mixed into the parent's context

// Drops the frames that have arrived for a context, and marks the context as closed so that later
// frames are dropped too.
static void idist__members_drop(idist__ring *ring, uint64_t ctx, idist_status status) {
    idist__closed *closed = &ring->closed[ring->nclosed++ % IDIST__CLOSED];
    int i;

    closed->ctx = ctx;
    closed->status = status;

    for (i = 0; i < ring->w->group.size; i++) {
        idist__link *l = &ring->links[i];
        idist__message *msg, *next;

        for (msg = l->early; msg; msg = next) {
            bool complete = msg->frame.type == IDIST__EAGER && msg->moved == msg->frame.nbytes;
            size_t nbytes = (size_t)msg->frame.nbytes;

            next = msg->next;
            if (msg->frame.ctx != ctx) continue;
            idist__message_free(ring, l, msg);
            if (complete && i != ring->w->group.rank) idist__link_consumed(ring, l, nbytes);
        }
    }
}

static bool idist__members_spans_hosts(const idist_group *g) {
    const idist__rank_info *nodes = g->w->nodes;
    int i;

    for (i = 1; i < g->size; i++)
        if (nodes[g->ranks[i]].host != nodes[g->ranks[0]].host) return true;

    return false;
}

static void idist__members_close(idist_group *g) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__ring_group *rg = idist__ring_group_of(g);
    bool has_failed = g->status != IDIST_OK && !g->inner && rg->spans_hosts;
    bool drops_local = has_failed && !rg->local, drops_leaders = has_failed && !rg->leaders;
    const idist_group *parent;

    idist__members_drop(ring, g->ctx, g->status);
    if (rg->local) idist__group_free(rg->local);
    if (rg->leaders) idist__group_free(rg->leaders);

    // If the group failed before this rank made the groups by host, other ranks may already have
    // sent frames for those groups.
    if (drops_local)
        idist__members_drop(ring, idist__hash_mix(g->ctx, IDIST__GROUP_LOCAL), g->status);
    if (drops_leaders)
        idist__members_drop(ring, idist__hash_mix(g->ctx, IDIST__GROUP_LEADERS), g->status);

    for (parent = &g->w->group; g->inner && parent; parent = parent->next) {
        idist__ring_group *of =
            parent->rank >= 0 && parent->impl ? idist__ring_group_of(parent) : NULL;
        if (of && of->local == g) of->local = NULL;
        if (of && of->leaders == g) of->leaders = NULL;
    }

    idist__pool_leave(g);
    idist__mem_free(&g->w->cfg.mem, rg->rank_of);
    idist__mem_free(&g->w->cfg.mem, rg->seen);
}

// Handles the frames that a rank sent for this group before the group existed here.
static void idist__members_hear(idist_group *g, idist__link *l) {
    idist__message *msg;

    for (msg = l->early; msg; msg = msg->next) {
        if (msg->frame.ctx != g->ctx || !msg->unknown) continue;
        msg->unknown = false;
        l->unknown_count--;
    }

    for (msg = l->early; msg; msg = msg->next)
        if (msg->frame.ctx == g->ctx && msg->frame.type == IDIST__ABORT)
            idist__group_fail(g, (idist_status)(int)(int64_t)msg->frame.aux, msg->data);
}

// Initializes the ring's part of a group.
static idist_status idist__members_init(idist_group *g) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__ring_group *rg = idist__ring_group_of(g);
    const idist_allocator *mem = &g->w->cfg.mem;
    int i;

    rg->rank_of = (int *)idist__mem_alloc(mem, sizeof(int) * (size_t)g->w->group.size);
    rg->seen = (idist__seen *)idist__mem_alloc(mem, sizeof *rg->seen * (size_t)g->size);

    if (!rg->rank_of || !rg->seen) {
        idist__mem_free(mem, rg->rank_of);
        idist__mem_free(mem, rg->seen);
        return IDIST_ERR_NO_MEMORY;
    }

    rg->spans_hosts = idist__members_spans_hosts(g);
    for (i = 0; i < g->w->group.size; i++) rg->rank_of[i] = -1;
    for (i = 0; i < g->size; i++) rg->rank_of[g->ranks[i]] = i;

    for (i = 0; i < g->size; i++) {
        idist__link *l = &ring->links[g->ranks[i]];

        idist__members_hear(g, l);

        if (i != g->rank && !l->open && !l->bye) {
            char cause[200];
            snprintf(cause, sizeof cause, "rank %d on %s was lost", g->ranks[i],
                     g->w->nodes[g->ranks[i]].hostname);
            idist__group_fail(g, IDIST_ERR_PEER_LOST, cause);
        }
    }

    return IDIST_OK;
}

// ---- groups by host ----

// Creates an inner group of another group. The members are given as world ranks.
static idist_status idist__members_new_inner(idist_group *parent, uint64_t salt, const int *ranks,
                                             int n, idist_group **out) {
    idist__world *w = parent->w;
    idist_group *g = idist__group_new(w, n);
    idist_status status;

    if (!g) return IDIST_ERR_NO_MEMORY;
    idist__group_set(g, idist__hash_mix(parent->ctx, salt), ranks, n);
    g->inner = true;
    status = idist__members_init(g);

    if (status != IDIST_OK) {
        g->rank = -1; // the group is not open
        idist__group_free(g);
        return status;
    }

    idist__ring_group_of(g)->whole = parent;
    g->next = w->group.next;
    w->group.next = g;
    *out = g;

    return IDIST_OK;
}

typedef struct idist__group_hosts { // the members of a group by host
    uint64_t *local_offers;         // regions that the members on this host offer
    int *local, *leaders; // world ranks: the members on this host, the first member of each host
    int local_count, leader_count;
    bool in_order; // the members of each host are consecutive
} idist__group_hosts;

static void idist__members_find_hosts(const idist_group *g, const uint64_t *offers,
                                      idist__group_hosts *hosts) {
    int i, k, changes = 1;

    for (i = 0; i < g->size; i++) {
        uint64_t host = idist__ring_group_host(g, i);

        for (k = 0; k < i && idist__ring_group_host(g, k) != host; k++) continue;

        if (k == i) hosts->leaders[hosts->leader_count++] = g->ranks[i];
        if (i && host != idist__ring_group_host(g, i - 1)) changes++;
        if (host != idist__ring_group_host(g, g->rank)) continue;
        hosts->local_offers[hosts->local_count] = offers ? offers[i] : 1;
        hosts->local[hosts->local_count++] = g->ranks[i];
    }

    hosts->in_order = changes == hosts->leader_count;
}

static idist_status idist__members_split_by_host(idist_group *g, const idist__group_hosts *hosts) {
    idist__ring_group *rg = idist__ring_group_of(g);
    idist_status status = IDIST_OK;

    rg->nhosts = hosts->leader_count;
    rg->in_order = hosts->in_order;

    if (hosts->local_count > 1)
        status = idist__members_new_inner(g, IDIST__GROUP_LOCAL, hosts->local, hosts->local_count,
                                          &rg->local);
    if (status == IDIST_OK && rg->local) status = idist__pool_meet(rg->local, hosts->local_offers);
    if (status == IDIST_OK && hosts->local[0] == g->w->group.rank)
        status = idist__members_new_inner(g, IDIST__GROUP_LEADERS, hosts->leaders,
                                          hosts->leader_count, &rg->leaders);

    return status;
}

// Sets up a group's shared-memory regions, or its groups by host. The array `offers` contains the
// region that each member offers. For the world `offers` is NULL: each member offers its first
// region. The world needs no exchange, because all ranks know the table of hosts and all first
// regions are free.
static idist_status idist__members_meet(idist_group *g, const uint64_t *offers) {
    const idist_allocator *mem = &g->w->cfg.mem;
    size_t n = (size_t)g->size;
    idist__group_hosts hosts;
    idist_status status = IDIST_OK;

    idist__ring_group_of(g)->met = true;
    memset(&hosts, 0, sizeof hosts);
    hosts.local_offers =
        (uint64_t *)idist__mem_alloc(mem, n * (sizeof *hosts.local_offers + 2 * sizeof(int)));
    if (!hosts.local_offers) return IDIST_ERR_NO_MEMORY;
    hosts.local = (int *)(void *)(hosts.local_offers + n);
    hosts.leaders = hosts.local + n;
    idist__members_find_hosts(g, offers, &hosts);

    if (hosts.leader_count == 1) status = idist__pool_meet(g, hosts.local_offers);
    else if (hosts.leader_count < g->size) status = idist__members_split_by_host(g, &hosts);

    idist__mem_free(mem, hosts.local_offers);

    return status;
}

static idist_status idist__members_open(idist_group *g) {
    idist_status status = idist__members_init(g);

    if (status != IDIST_OK || g != &g->w->group) return status;
    idist__pool_offer_region(g);
    status = idist__members_meet(g, NULL);
    if (status != IDIST_OK) idist__members_close(g);

    return status;
}

// ---- memory that other ranks can reach ----

static void *idist__members_alloc(idist__world *w, size_t nbytes) {
    idist__segment *seg = idist__ring_of(w)->shm;
    void *p = seg && seg->window ? idist__window_alloc(seg->window, nbytes) : NULL;

    if (p) idist__view_publish(seg);
    return p;
}
