// core/self.h: the backend of a world of 1
//
// Other backends also use idist__self_collective, for their groups of 1.
#pragma once

#include "os/thread.h"
#include "os/poll.h"
#include "base/fail.h"
#include "base/text.h"
#include "base/mem.h"
#include "base/reduce_op.h"
#include "base/reduce.h"
#include "launch/env.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/backend.h"
#include "core/world.h"
#include "core/fingerprint.h"
#include "core/task.h"
#include "core/extent.h"
#include "core/matching.h"

// A message from this rank to itself. A small message is copied, so that a blocking send returns. A
// large message waits for its receive.
typedef struct idist__parcel {
    struct idist__parcel *next;
    int tag;
    idist__fingerprint sent;
    size_t nbytes;
    const void *data;
    idist__task *sender; // NULL if data is a copy, stored after this struct
} idist__parcel;

typedef struct idist__self_group {
    idist__parcel *parcels; // in the order of their sends
} idist__self_group;

// Performs a collective of one rank: the rank's own contribution is the result.
static void idist__self_collective(idist__task *t) {
    const idist__call *call = &t->call;
    const idist__user_op *op =
        idist__reduce_op_is_user(call->op) ? idist__world_user_op(t->group, call) : NULL;

    if (call->kind != IDIST__BARRIER && call->kind != IDIST__BROADCAST &&
        call->kind != IDIST__EXSCAN) {
        size_t count;
        const char *from =
            idist__extent_part(call, (char *)(uintptr_t)call->send, 0, 0, true, &count);

        idist__block_copy(idist__extent_part(call, (char *)call->recv, 0, 0, false, &count), from,
                          count * idist_dtype_size(call->dtype));
        if (idist__kind_reduces(call->kind) && op && !op->fn)
            idist__reduce_scale(call->recv, count, call->dtype, op->factor);
        if (idist__kind_reduces(call->kind) && !op)
            idist__reduce_finish(call->recv, count, call->dtype, call->op, 1);
    }

    idist__task_complete(t, IDIST_OK, "");
}

static void idist__self_drop(idist_group *g, idist__parcel **at) {
    idist__parcel *p = *at;
    *at = p->next;
    idist__mem_free(&g->w->cfg.mem, p);
}

// Gives a parcel to a receive that matches it, and ends the receive. The parcel stays if it does
// not fit, or if the receive is a probe.
static void idist__self_deliver(idist__task *t, idist__parcel **at) {
    idist__parcel *p = *at;
    idist__task *sender = p->sender;
    size_t count = (size_t)idist__fingerprint_count(&p->sent);
    int tag = p->tag;
    char text[256];
    idist_status status;

    if (!idist__matching_fits(t, &p->sent, 0, &p->tag, &status, text, sizeof text)) {
        idist__task_complete(t, status, text);
        return;
    }

    idist__block_copy(t->call.recv, p->data, p->nbytes);
    idist__self_drop(t->group, at);
    if (sender) idist__task_complete(sender, IDIST_OK, "");
    idist__matching_received(t, 0, tag, count);
}

// Returns the address of the link to the oldest parcel that the receive t can take, or NULL.
static idist__parcel **idist__self_find(const idist__task *t) {
    idist__parcel **at = &((idist__self_group *)t->group->impl)->parcels;

    for (; *at; at = &(*at)->next)
        if (idist__matching_has_tag(&t->call, (*at)->tag)) return at;
    return NULL;
}

// Gives parcels to receives, the oldest receive first, until no receive matches a parcel.
static void idist__self_match(idist_group *g) {
    idist__task *t, *oldest;

    do {
        idist__parcel **found = NULL;
        oldest = NULL;

        for (t = g->w->tasks.running; t; t = t->next) { // newest first
            idist__parcel **at;

            if (t->group != g || t->call.kind != IDIST__RECV || t->state == IDIST__TASK_ON_DEVICE)
                continue;
            at = idist__self_find(t);
            if (!at) continue;
            oldest = t;
            found = at;
        }

        if (oldest) idist__self_deliver(oldest, found);
    } while (oldest);
}

static void idist__self_send(idist__task *t) {
    idist_group *g = t->group;
    idist__self_group *sg = (idist__self_group *)g->impl;
    size_t nbytes = t->call.count * idist_dtype_size(t->call.dtype);
    bool copy = nbytes <= IDIST__EAGER_BYTES;
    size_t parcel_nbytes = sizeof(idist__parcel) + (copy ? nbytes : 0);
    idist__parcel *p = (idist__parcel *)idist__mem_alloc(&g->w->cfg.mem, parcel_nbytes), **last;

    if (!p) {
        idist__task_complete(t, IDIST_ERR_NO_MEMORY, "out of memory");
        return;
    }

    p->tag = t->call.tag;
    p->sent = idist__fingerprint_of_task(t, IDIST__ALGO_AUTO);
    p->nbytes = nbytes;
    p->data = t->call.send;
    p->sender = copy ? NULL : t;

    if (copy) {
        p->data = p + 1;
        idist__block_copy(p + 1, t->call.send, nbytes);
    }

    for (last = &sg->parcels; *last; last = &(*last)->next) continue;
    *last = p;
    if (copy) idist__task_complete(t, IDIST_OK, "");
    idist__self_match(g);
}

static void idist__self_start(idist__task *t) {
    if (t->call.kind == IDIST__SEND) idist__self_send(t);
    else if (t->call.kind == IDIST__RECV) idist__self_match(t->group);
    else idist__self_collective(t);
}

static bool idist__self_cancel(idist__task *t) {
    idist__self_group *sg = (idist__self_group *)t->group->impl;
    idist__parcel **p;

    for (p = &sg->parcels; *p; p = &(*p)->next)
        if ((*p)->sender == t) {
            idist__self_drop(t->group, p);
            break;
        }

    return true;
}

// Returns true, because a receive that is still running has matched no message: a receive takes a
// matching parcel at once.
static bool idist__self_retract(idist__task *t) {
    (void)t;
    return true;
}

// Sleeps until `wake` is called or until_ns passes. Nothing else can end the sleep, because nothing
// arrives from outside a world of 1.
static void idist__self_sleep(idist__world *w, int64_t until_ns) {
    int wake = *(int *)w->impl;
    bool woken;

    idist__os_mutex_unlock(&w->lock);
    woken = idist__os_poll_wait(wake, IDIST__OS_READABLE, until_ns);
    idist__os_mutex_lock(&w->lock);
    if (woken) idist__os_poll_wakeup_clear(wake);
}

static void idist__self_wake(idist__world *w) { idist__os_poll_wakeup_signal(*(int *)w->impl); }

static idist_status idist__self_open(idist__world *w) {
    int *wake = (int *)idist__mem_alloc(&w->cfg.mem, sizeof *wake);

    if (!wake) return IDIST_ERR_NO_MEMORY;
    *wake = idist__os_poll_wakeup_new();

    if (*wake < 0) {
        idist__mem_free(&w->cfg.mem, wake);
        return idist__fail_errno("initialize: cannot create a wake-up descriptor", errno);
    }

    w->impl = wake;
    idist__text_copy(w->nodes[0].hostname, sizeof w->nodes[0].hostname, w->about.hostname);

    return IDIST_OK;
}

static void idist__self_close(idist__world *w, bool clean) {
    (void)clean;
    idist__os_descriptor_close((int *)w->impl);
    idist__mem_free(&w->cfg.mem, w->impl);
}

static idist_status idist__self_group_open(idist_group *g) {
    (void)g;
    return IDIST_OK;
}

static void idist__self_group_close(idist_group *g) {
    idist__self_group *sg = (idist__self_group *)g->impl;
    while (sg->parcels) idist__self_drop(g, &sg->parcels);
}

static void idist__self_progress(idist__world *w) { (void)w; }
static void idist__self_tell(idist_group *g) { (void)g; }

static void idist__self_flush(idist__world *w, int64_t until_ns) {
    (void)w;
    (void)until_ns;
}

static void idist__self_announce(idist__task *t) { (void)t; }

static int idist__self_missing(idist__task *t, char *text, size_t cap) {
    idist__text_append(text, cap,
                       t->call.kind == IDIST__SEND ? "a receive on this rank"
                                                   : "a send on this rank");
    return 1;
}

static idist_status idist__self_claim(idist__config *cfg, const char **why) {
    *why = "it serves only a world of one rank";
    return cfg->world_size > 1 ? IDIST_ERR_NO_BACKEND : IDIST_OK;
}

static void idist__self_fill(idist_backend_api *api) {
    api->name = "self";
    api->group_nbytes = sizeof(idist__self_group);
    api->claim = idist__self_claim;
    api->open = idist__self_open;
    api->close = idist__self_close;
    api->group_open = idist__self_group_open;
    api->group_close = idist__self_group_close;
    api->start = idist__self_start;
    api->progress = idist__self_progress;
    api->sleep = idist__self_sleep;
    api->wake = idist__self_wake;
    api->cancel = idist__self_cancel;
    api->retract = idist__self_retract;
    api->tell = idist__self_tell;
    api->flush = idist__self_flush;
    api->announce = idist__self_announce;
    api->missing = idist__self_missing;
}

const idist_backend_api *idist_self_backend(void) {
    static idist_backend_api api;
    return idist__backend_fill(&api, idist__self_fill);
}

__attribute__((constructor(IDIST__REGISTER_LAST_RESORT))) static void idist__self_register(void) {
    (void)idist_register_backend(idist_self_backend());
}
