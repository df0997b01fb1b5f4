// calls/split.h: a split that begins in one call and completes in a later wait
//
//     idist_split_start        begins the all_gather of colors and keys
//     idist__split_make        after the all_gather: makes the group, begins the exchange of offers
//     idist__split_meet        after the exchange: tells the backend that the members have met
#pragma once

#include "os/thread.h"
#include "base/fail.h"
#include "base/text.h"
#include "base/mem.h"
#include "core/model.h"
#include "core/group.h"
#include "core/wait.h"
#include "core/check.h"
#include "core/call.h"
#include "calls/new_group.h"

typedef struct idist__split {
    idist_group *parent, *made;
    idist_group **group; // where the program wants the group
    uint32_t child_count;
    int mine[2], *all, *ranks;
    uint64_t *offers;
} idist__split;

// Allocates a split with its arrays in one block, and the new group. Returns NULL if there is no
// memory.
static idist__split *idist__split_new(idist_group *parent) {
    size_t n = (size_t)parent->size;
    size_t nbytes = sizeof(idist__split) + sizeof(uint64_t) * (n + 1) + sizeof(int) * 4 * n;
    idist__split *split = (idist__split *)idist__mem_alloc(&parent->w->cfg.mem, nbytes);

    if (!split) return NULL;
    split->parent = parent;
    split->offers = (uint64_t *)(void *)(split + 1);
    split->all = (int *)(void *)(split->offers + n + 1);
    split->ranks = split->all + 2 * n;
    split->made = idist__group_new(parent->w, parent->size);
    if (split->made) return split;
    idist__mem_free(&parent->w->cfg.mem, split);

    return NULL;
}

// Completes the request with `status` and frees the split. If the task itself had not failed, takes
// the text of a failure from the last error text of this thread.
static void idist__split_end(idist__task *t, idist_status status) {
    idist__split *split = (idist__split *)t->then_arg;

    if (status != IDIST_OK && t->status == IDIST_OK)
        idist__text_copy(t->text, sizeof t->text, idist__me.text);
    t->status = status;
    t->then = NULL;
    idist__mem_free(&t->group->w->cfg.mem, split);
}

// Completes a split after the exchange of offers. A group that failed meanwhile still exists, as in
// idist__new_group_meet.
static void idist__split_meet(idist__task *t, idist_request *request) {
    idist__split *split = (idist__split *)t->then_arg;
    idist_group *g = split->made;
    idist__world *w = g->w;
    idist_status status = t->status;

    (void)request;
    if (status == IDIST_OK) status = w->backend->group_meet(g, split->offers);
    if (status != IDIST_OK && t->status == IDIST_OK) idist__group_fail_memory(g);
    g->parent = NULL;
    *split->group = g;
    idist__split_end(t, IDIST_OK);
}

// Begins the exchange of offers in the new group. The task of the exchange takes the place of t in
// the request, and t is freed. If the exchange cannot begin, the split ends here.
static void idist__split_exchange(idist__task *t, idist_request *request) {
    idist__split *split = (idist__split *)t->then_arg;
    idist_group *g = split->made;
    idist__call call;
    idist_opts opts;
    idist_status status;

    split->offers[g->size] = g->w->backend->group_offer(g);
    idist__call_init(&call, IDIST__ALL_GATHER, &split->offers[g->size], split->offers, 1,
                     IDIST_U64);
    call.label = IDIST__SPLIT;
    memset(&opts, 0, sizeof opts);
    opts.group = g;
    opts.request = request;
    if (split->parent->status != IDIST_OK)
        idist__group_fail(g, split->parent->status, split->parent->cause);
    status = idist__call_locked(g, &call, &opts);

    if (status == IDIST_OK) {
        idist__task *next = (idist__task *)request->impl;
        next->then = idist__split_meet;
        next->then_arg = split;
        idist__wait_drop(t);
        return;
    }

    g->parent = NULL; // the group has failed, but exists
    *split->group = g;
    idist__split_end(t, IDIST_OK);
}

static void idist__split_make(idist__task *t, idist_request *request) {
    idist__split *split = (idist__split *)t->then_arg;
    idist_group *g = split->made;
    int n = 0, color = split->mine[0];

    if (t->status != IDIST_OK) {
        idist__group_free(g);
        idist__split_end(t, t->status);
        return;
    }

    n = idist__new_group_of_color(split->parent, split->all, color, split->ranks);
    t->status = idist__new_group_make(split->parent, g, split->child_count,
                                      (uint64_t)(int64_t)color + 1, split->ranks, n, split->group);

    if (t->status != IDIST_OK) { // the group was freed, and the parent has failed
        idist__text_copy(t->text, sizeof t->text, idist__me.text);
        idist__split_end(t, t->status);
    } else if (g->rank < 0 || g->size == 1 || !g->w->backend->group_meet) {
        g->parent = NULL;
        idist__split_end(t, IDIST_OK);
    } else {
        *split->group = NULL; // the group is not ready yet
        idist__split_exchange(t, request);
    }
}

// Begins the exchange of colors and keys. Called with the world's lock held.
static idist_status idist__split_begin(idist_group *p, int color, int key, idist_group **group,
                                       idist_request *request) {
    idist__split *split;
    idist__task *t;
    idist__call call;
    idist_opts opts;
    idist_status status;

    if (p->size > 1 && !p->w->backend->group_meet)
        return idist__fail(
            IDIST_ERR_UNSUPPORTED,
            "split_start: backend %s blocks while it creates a group; use idist_split",
            p->w->backend->name);
    split = idist__split_new(p);
    if (!split) return IDIST_ERR_NO_MEMORY;
    split->group = group;
    split->mine[0] = color < 0 ? -1 : color;
    split->mine[1] = key;

    idist__call_init(&call, IDIST__ALL_GATHER, split->mine, split->all, 2, IDIST_I32);
    call.label = IDIST__SPLIT;
    memset(&opts, 0, sizeof opts);
    opts.group = p;
    opts.request = request;
    status = idist__call_locked(p, &call, &opts);

    if (status != IDIST_OK) {
        idist__group_free(split->made);
        idist__mem_free(&p->w->cfg.mem, split);
        return status;
    }

    t = (idist__task *)request->impl;
    t->then = idist__split_make; // NOLINT(clang-analyzer-core.NullDereference)
    t->then_arg = split;
    split->child_count = ++p->child_count; // all ranks begin splits in the same order

    return IDIST_OK;
}

idist_status idist_split_start(idist_group *parent, int color, int key, idist_group **group,
                               idist_request *request) {
    idist_group *p = NULL;
    idist_status status;

    if (request) request->impl = NULL;
    if (!group || !request)
        return idist__fail(IDIST_ERR_ARG, "split_start: group or request is NULL");
    *group = NULL;
    status = idist__check_blocking("split_start", NULL);
    if (status == IDIST_OK) status = idist__call_enter("split_start", parent, &p);
    if (status != IDIST_OK) return status;
    status = idist__split_begin(p, color, key, group, request);
    idist__os_mutex_unlock(&p->w->lock);

    return status;
}
