// calls/new_group.h: makes, frees and shrinks groups
//
// idist_new_group and idist_split take the same steps on every rank of the parent. In
// idist_new_group_by_members only the listed ranks take these steps:
//
//     idist__new_group_reserve   allocates the group before other ranks count on this rank
//     a collective               the ranks agree: a barrier whose fingerprint carries the list, an
//                                all_gather of the colors, or messages between the members
//     idist__new_group_make      puts the group into the world and opens it
//     idist__new_group_meet      the members exchange the offers of the backend
#pragma once

#include "os/thread.h"
#include "base/fail.h"
#include "base/mem.h"
#include "base/hash.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/world.h"
#include "core/group.h"
#include "core/wait.h"
#include "core/extent.h"
#include "core/check.h"
#include "core/call.h"
#include "calls/collective.h"
#include "calls/p2p.h"
#include "calls/several.h"

int idist_group_translate(const idist_group *from, int rank, const idist_group *to) {
    int i, world_rank;

    if (!from && idist__world_default()) from = &idist__world_default()->group;
    if (!to && idist__world_default()) to = &idist__world_default()->group;
    if (!from || !to) return rank == 0 ? 0 : -1;
    if (from->w != to->w || rank < 0 || rank >= from->size) return -1;
    world_rank = from->ranks[rank];
    for (i = 0; i < to->size; i++)
        if (to->ranks[i] == world_rank) return i;

    return -1;
}

// Returns the ctx of a new group. Members agree on ctx without a message, because it follows from
// the parent's ctx, the number of groups made from the parent, and the color.
static uint64_t idist__new_group_ctx(const idist_group *parent, uint32_t child_count,
                                     uint64_t color) {
    uint64_t ctx = idist__hash_mix(idist__hash_mix(parent->ctx, child_count), color);
    return ctx ? ctx : 1;
}

// Allocates a group for up to n ranks. Called with the world's lock held; releases the lock.
//
// A backend without group_meet blocks while it opens a group. Two threads that open one group each,
// in different orders on two ranks, would wait for each other. So only one thread may open a group
// at a time.
static idist_status idist__new_group_reserve(const char *name, idist__world *w, int n,
                                             idist_group **g) {
    bool busy = w->groups.making_count && w->group.size > 1 && !w->backend->group_meet;

    *g = busy ? NULL : idist__group_new(w, n);
    if (*g) w->groups.making_count++;
    idist__os_mutex_unlock(&w->lock);
    if (busy)
        return idist__fail(
            IDIST_ERR_STATE,
            "%s: another thread is creating a group; backend %s creates one at a time", name,
            w->backend->name);

    return *g ? IDIST_OK : IDIST_ERR_NO_MEMORY;
}

// Puts a group into the world and opens it in the backend. From here on the other members count on
// this rank, so a failure fails the parent as well. On failure, frees the group.
static idist_status idist__new_group_make(idist_group *parent, idist_group *g, uint32_t child_count,
                                          uint64_t color, const int *ranks, int n,
                                          idist_group **out) {
    idist__world *w = parent->w;
    idist_status status = IDIST_OK;

    idist__group_set(g, idist__new_group_ctx(parent, child_count, color), ranks, n);
    g->next = w->group.next;
    w->group.next = g;
    g->parent = parent;
    if (g->rank >= 0) status = w->backend->group_open(g);

    if (status != IDIST_OK) {
        g->rank = -1; // never opened, so group_close must not be called
        idist__group_free(g);
        idist__group_fail_self(parent, status, "could not make its part of a new group");
        return status;
    }

    *out = g;

    return IDIST_OK;
}

// Exchanges the offers of the members. Fails the group if this rank cannot take part.
static idist_status idist__new_group_exchange(idist_group *g, idist__kind label) {
    idist__world *w = g->w;
    idist_opts opts;
    idist_status status;
    uint64_t *offers =
        (uint64_t *)idist__mem_alloc(&w->cfg.mem, sizeof *offers * (size_t)(g->size + 1));

    if (!offers) {
        idist__world_lock(w);
        idist__group_fail_memory(g);
        idist__os_mutex_unlock(&w->lock);
        return IDIST_ERR_NO_MEMORY;
    }

    memset(&opts, 0, sizeof opts);
    opts.group = g;
    idist__world_lock(w);
    offers[g->size] = w->backend->group_offer(g);
    idist__os_mutex_unlock(&w->lock);

    status = idist__collective_run(IDIST__ALL_GATHER, label, &offers[g->size], offers, 1, IDIST_U64,
                                   IDIST_SUM, -1, &opts);

    if (status == IDIST_OK) {
        idist__world_lock(w);
        status = w->backend->group_meet(g, offers);
        if (status != IDIST_OK) idist__group_fail_memory(g);
        idist__os_mutex_unlock(&w->lock);
    }

    idist__mem_free(&w->cfg.mem, offers);

    return status;
}

// Lets the members of a new group meet. The group may fail meanwhile, because a member has aborted
// it or died. The group then still exists, as it does on members that were further along. Only
// idist_new_group_by_members frees such a group and sets *group to NULL.
static idist_status idist__new_group_meet(idist_group **group, idist__kind label) {
    idist_group *g = *group;
    idist__world *w = g->w;
    idist_status status;

    if (g->rank < 0 || g->size == 1 || !w->backend->group_meet) {
        g->parent = NULL;
        return IDIST_OK;
    }

    // The parent failed meanwhile, perhaps because a member could not make its part.
    if (g->parent->status != IDIST_OK) {
        idist__world_lock(w);
        idist__group_fail(g, g->parent->status, g->parent->cause);
        idist__os_mutex_unlock(&w->lock);
    }

    status = idist__new_group_exchange(g, label);
    g->parent = NULL;
    if (status == IDIST_OK) return IDIST_OK;
    // idist_new_group_by_members must report whether all members have called it.
    if (g->status != IDIST_OK && label != IDIST__NEW_GROUP_BY_MEMBERS) return IDIST_OK;

    idist__world_lock(w);
    idist__group_free(g);
    idist__os_mutex_unlock(&w->lock);
    *group = NULL;

    return status;
}

// Finishes what idist__new_group_reserve began. Opens the group if `status` says that the ranks
// agree, otherwise frees it.
static idist_status idist__new_group_finish(idist_group *parent, idist_group *g,
                                            idist_status status, uint64_t color, const int *ranks,
                                            int n, idist__kind label, idist_group **out) {
    idist__world *w = parent->w;
    uint32_t child_count = 0;

    idist__world_lock(w);

    if (status == IDIST_OK) {
        // Groups made by their members alone are not counted, because the other ranks of the parent
        // do not know of them.
        if (label != IDIST__NEW_GROUP_BY_MEMBERS) child_count = ++parent->child_count;
        status = idist__new_group_make(parent, g, child_count, color, ranks, n, out);
    } else {
        idist__group_free(g);
    }

    idist__os_mutex_unlock(&w->lock);
    if (status == IDIST_OK) status = idist__new_group_meet(out, label);
    idist__world_lock(w);
    w->groups.making_count--;
    idist__os_mutex_unlock(&w->lock);

    return status;
}

static int idist__new_group_compare_ranks(const void *a, const void *b) {
    int x = *(const int *)a, y = *(const int *)b;
    return (x > y) - (x < y);
}

// Runs a barrier whose fingerprint carries the list of ranks, which must be ascending. Duplicates
// and ranks outside the world are errors.
static idist_status idist__new_group_barrier(int world_size, const int *ranks, int n) {
    idist__call call;
    int i;

    for (i = 0; i < n; i++)
        if (ranks[i] < 0 || ranks[i] >= world_size || (i && ranks[i] == ranks[i - 1]))
            return idist__fail(IDIST_ERR_ARG, "new_group: rank %d is listed twice or outside 0..%d",
                               ranks[i], world_size - 1);
    idist__call_init(&call, IDIST__BARRIER, NULL, NULL, 0, IDIST_U8);
    call.label = IDIST__NEW_GROUP;
    call.check = idist__hash(ranks, sizeof(int) * (size_t)n);

    return idist__call_run(&call, NULL);
}

idist_status idist_new_group(const int *ranks, int n, idist_group **group) {
    idist_group *world = NULL, *g;
    idist_status status;

    if (!group) return idist__fail(IDIST_ERR_ARG, "new_group: group is NULL");
    *group = NULL;
    status = idist__check_blocking("new_group", NULL);
    if (status == IDIST_OK) status = idist__call_enter("new_group", NULL, &world);
    if (status != IDIST_OK) return status;

    if (!ranks || n < 1 || n > world->size) {
        idist__os_mutex_unlock(&world->w->lock);
        return idist__fail(IDIST_ERR_ARG, "new_group: needs 1 to %d ranks, got %d", world->size,
                           ranks ? n : 0);
    }

    status = idist__new_group_reserve("new_group", world->w, n, &g);
    if (!g) return status;
    memcpy(g->ranks, ranks, sizeof(int) * (size_t)n);
    qsort(g->ranks, (size_t)n, sizeof(int), idist__new_group_compare_ranks);
    status = idist__new_group_barrier(world->size, g->ranks, n);

    return idist__new_group_finish(world, g, status, 0, g->ranks, n, IDIST__NEW_GROUP, group);
}

// Lets the members find the largest of their serials, so that no two groups of the same members
// have the same serial. The members exchange messages as in a dissemination barrier (see
// ring/algo/). The list `ranks` has ranks of the parent, and `me` is the index of this rank in the
// list.
static idist_status idist__new_group_agree(idist_group *parent, const int *ranks, int n, int me,
                                           uint64_t key, uint64_t *serial) {
    int tag = -2 - (int)(key % 0x40000000u), distance;
    idist__several_pair pair;
    idist_opts opts;
    idist_status status = IDIST_OK;

    memset(&opts, 0, sizeof opts);
    opts.group = parent;

    for (distance = 1; distance < n && status == IDIST_OK; distance *= 2) {
        uint64_t sent = *serial, received = 0;

        idist__p2p_init(&pair.recv, IDIST__RECV, NULL, &received, 1, IDIST_U64,
                        ranks[idist__block_wrap(me - distance, n)], tag, NULL);
        idist__p2p_init(&pair.send, IDIST__SEND, &sent, NULL, 1, IDIST_U64,
                        ranks[idist__block_wrap(me + distance, n)], tag, NULL);
        pair.recv.label = pair.send.label = IDIST__NEW_GROUP_BY_MEMBERS;
        status = idist__several_exchange(&pair, "new_group_by_members", &opts);
        if (received > *serial) *serial = received;
    }

    return status;
}

// Checks the list of members and sets *me to the index of this rank in the list.
static idist_status idist__new_group_check_members(const idist_group *parent, const int *ranks,
                                                   int n, int tag, int *me) {
    const char *name = "new_group_by_members";
    int i, k;

    *me = -1;
    if (parent->rank < 0)
        return idist__fail(IDIST_ERR_STATE, "%s: this rank is not a member of the parent", name);
    if (!ranks || n < 1 || n > parent->size)
        return idist__fail(IDIST_ERR_ARG, "%s: needs 1 to %d ranks, got %d", name, parent->size,
                           ranks ? n : 0);
    if (tag < 0) return idist__fail(IDIST_ERR_ARG, "%s: tag %d is negative", name, tag);

    for (i = 0; i < n; i++) {
        for (k = 0; k < i && ranks[k] != ranks[i]; k++) continue;
        if (ranks[i] < 0 || ranks[i] >= parent->size || k < i)
            return idist__fail(IDIST_ERR_ARG, "%s: rank %d is listed twice or outside 0..%d", name,
                               ranks[i], parent->size - 1);
        if (ranks[i] == parent->rank) *me = i;
    }

    if (*me >= 0) return IDIST_OK;

    return idist__fail(IDIST_ERR_ARG, "%s: this rank, %d, is not listed", name, parent->rank);
}

idist_status idist_new_group_by_members(idist_group *parent, const int *ranks, int n, int tag,
                                        idist_group **group) {
    const idist__kind label = IDIST__NEW_GROUP_BY_MEMBERS;
    idist_group *p, *g;
    idist_allocator mem;
    idist_status status;
    uint64_t key, serial;
    int *members, i, me;

    if (!group) return idist__fail(IDIST_ERR_ARG, "new_group_by_members: group is NULL");
    *group = NULL;
    status = idist__check_blocking("new_group_by_members", NULL);
    if (status == IDIST_OK) status = idist__call_enter("new_group_by_members", parent, &p);
    if (status != IDIST_OK) return status;
    status = idist__new_group_check_members(p, ranks, n, tag, &me);

    if (status != IDIST_OK) {
        idist__os_mutex_unlock(&p->w->lock);
        return status;
    }

    mem = p->w->cfg.mem;
    serial = p->w->groups.member_groups;
    status = idist__new_group_reserve("new_group_by_members", p->w, n, &g);
    if (!g) return status;
    members = (int *)idist__mem_alloc(&mem, sizeof(int) * (size_t)n);
    if (!members) status = IDIST_ERR_NO_MEMORY;
    for (i = 0; members && i < n; i++) members[i] = p->ranks[ranks[i]];

    key = idist__hash_mix(idist__hash(ranks, sizeof(int) * (size_t)n), (uint64_t)tag);
    if (status == IDIST_OK) status = idist__new_group_agree(p, ranks, n, me, key, &serial);

    if (status == IDIST_OK) {
        idist__world_lock(p->w);
        if (p->w->groups.member_groups <= serial) p->w->groups.member_groups = serial + 1;
        idist__os_mutex_unlock(&p->w->lock);
    }

    status = idist__new_group_finish(p, g, status, idist__hash_mix(key, serial), members, n, label,
                                     group);
    idist__mem_free(&mem, members);

    return status;
}

// Lists the world ranks of one color, ordered by key, then by rank in the parent. Returns their
// number. The array `all` has the color and the key of each rank. The array `ranks` has twice the
// size of the parent.
static int idist__new_group_of_color(const idist_group *parent, const int *all, int color,
                                     int *ranks) {
    int i, k, n = 0;
    int *order = ranks + parent->size;

    if (color < 0) return 0;

    for (i = 0; i < parent->size; i++) {
        if (all[2 * i] != color) continue;
        for (k = n++; k > 0 && all[2 * order[k - 1] + 1] > all[2 * i + 1]; k--)
            order[k] = order[k - 1];
        order[k] = i;
    }

    for (i = 0; i < n; i++) ranks[i] = parent->ranks[order[i]];

    return n;
}

idist_status idist_split(idist_group *parent, int color, int key, idist_group **group) {
    idist_group *p, *g;
    idist_opts opts;
    idist_status status;
    idist_allocator mem;
    int mine[2], *all, *ranks, n = 0;

    if (!group) return idist__fail(IDIST_ERR_ARG, "split: group is NULL");
    *group = NULL;
    status = idist__check_blocking("split", NULL);
    if (status == IDIST_OK) status = idist__call_enter("split", parent, &p);
    if (status != IDIST_OK) return status;
    status = idist__new_group_reserve("split", p->w, p->size, &g);
    if (!g) return status;

    mem = p->w->cfg.mem; // a copy: another thread may close the world once the group is finished
    all = (int *)idist__mem_alloc(&mem, sizeof(int) * 4 * (size_t)p->size);
    ranks = all ? all + 2 * p->size : NULL;
    memset(&opts, 0, sizeof opts);
    opts.group = p;
    mine[0] = color < 0 ? -1 : color;
    mine[1] = key;
    status = all ? idist__collective_run(IDIST__ALL_GATHER, IDIST__SPLIT, mine, all, 2, IDIST_I32,
                                         IDIST_SUM, -1, &opts)
                 : IDIST_ERR_NO_MEMORY;
    if (status == IDIST_OK) n = idist__new_group_of_color(p, all, mine[0], ranks);
    status = idist__new_group_finish(p, g, status, (uint64_t)(int64_t)mine[0] + 1, ranks, n,
                                     IDIST__SPLIT, group);
    idist__mem_free(&mem, all);

    return status;
}

static bool idist__new_group_is_settled(void *arg) {
    return !((const idist_group *)arg)->detached_count;
}

// Waits for the group's detached tasks, then frees the group.
static idist_status idist__new_group_release(idist_group *g) {
    idist__world *w = g->w;
    idist_status status = IDIST_OK;

    idist__world_lock(w);
    idist__wait_until(w, idist__new_group_is_settled, g);

    if (w->progress.stops) {
        status = idist__fail(IDIST_ERR_STATE, "free_group: another thread is closing the world");
    } else if (g->running_count || g->open_request_count) {
        status = idist__fail(
            IDIST_ERR_STATE,
            "free_group: calls or requests of the group are still running; wait for them first");
    } else {
        // Read the messages for the group that have already arrived. Once the group is freed, they
        // match no group.
        w->backend->progress(w);
        if (g->host_group) idist__group_free(g->host_group);
        idist__group_free(g);
        idist__world_wake_driver(w);
    }

    idist__os_mutex_unlock(&w->lock);

    return status;
}

idist_status idist_free_group(idist_group **group) {
    idist_group *g;
    idist_status status;

    if (!group || !*group)
        return idist__fail(IDIST_ERR_ARG, "free_group: the group is NULL (freed already?)");
    g = *group;

    if (!g->w || g->w->life.abandoned) { // the group was freed with its world
        *group = NULL;
        return IDIST_OK;
    }

    if (g->freed) return idist__fail(IDIST_ERR_STATE, "free_group: the group was freed already");
    if (idist__world_enter("free_group", g->w) || idist__check_blocking("free_group", NULL))
        return IDIST_ERR_STATE;
    if (g == &g->w->group)
        return idist__fail(IDIST_ERR_ARG,
                           "free_group: this group is a world; use idist_finalize or idist_close");
    status = idist__new_group_release(g);
    if (status == IDIST_OK) *group = NULL;

    return status;
}

static idist_status idist__new_group_needs_ulfm(const char *name) {
    return idist__fail(
        IDIST_ERR_UNSUPPORTED,
        "%s: only backend mpi supports this, with Open MPI 5 under mpirun --with-ft ulfm", name);
}

idist_status idist_shrink(idist_group *group, idist_group **survivors) {
    idist_group *g, *made;
    idist__world *w;
    idist_status status;
    uint32_t serial;
    int *ranks, n = 0;

    if (!survivors) return idist__fail(IDIST_ERR_ARG, "shrink: survivors is NULL");
    *survivors = NULL;
    status = idist__check_blocking("shrink", NULL);
    if (status == IDIST_OK) status = idist__call_enter("shrink", group, &g);
    if (status != IDIST_OK) return status;

    w = g->w;
    made = idist__group_new(w, g->size);
    ranks = made ? (int *)idist__mem_alloc(&w->cfg.mem, sizeof(int) * (size_t)g->size) : NULL;
    serial = g->child_count + 1;
    if (g->rank < 0)
        status = idist__fail(IDIST_ERR_STATE, "shrink: this rank is not a member of the group");
    else if (!w->backend->shrink) status = idist__new_group_needs_ulfm("shrink");
    else status = ranks ? w->backend->shrink(g, ranks, &n, &serial) : IDIST_ERR_NO_MEMORY;

    if (status == IDIST_OK) {
        // Members may have made different numbers of groups before they lost a rank.
        g->child_count = serial;
        status = idist__new_group_make(g, made, serial, 0, ranks, n, survivors);
        if (status == IDIST_OK) (*survivors)->parent = NULL; // complete: the members need not meet
    } else if (made) {
        idist__group_free(made);
    }

    idist__os_mutex_unlock(&w->lock);
    idist__mem_free(&w->cfg.mem, ranks);

    return status;
}

idist_status idist_agree(idist_group *group, int *flag) {
    idist_group *g;
    idist_status status;

    if (!flag) return idist__fail(IDIST_ERR_ARG, "agree: flag is NULL");
    status = idist__check_blocking("agree", NULL);
    if (status == IDIST_OK) status = idist__call_enter("agree", group, &g);
    if (status != IDIST_OK) return status;

    if (g->rank < 0)
        status = idist__fail(IDIST_ERR_STATE, "agree: this rank is not a member of the group");
    else if (g->size > 1 && !g->w->backend->agree) status = idist__new_group_needs_ulfm("agree");
    else if (g->size > 1) status = g->w->backend->agree(g, flag);
    idist__os_mutex_unlock(&g->w->lock);

    return status;
}
