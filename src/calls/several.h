// calls/several.h: plans; calls that progress together: sendrecv, group_begin and group_end
//
// Functions: idist__several_*, idist__plan_*.
#pragma once

#include "os/thread.h"
#include "base/fail.h"
#include "base/mem.h"
#include "base/dtype.h"
#include "base/reduce_op.h"
#include "core/model.h"
#include "core/backend.h"
#include "core/world.h"
#include "core/together.h"
#include "core/wait.h"
#include "core/check.h"
#include "core/call.h"
#include "calls/p2p.h"

//------------------------------------------------------------------------------
// calls that are prepared once and made often
//
// A plan keeps a checked idist__call, including the call's hash of counts. Starting a plan checks
// again what may have changed since: the group, and the ops and dtypes of the program.
//------------------------------------------------------------------------------

idist_status idist_plan_create(idist_plan **plan) {
    if (!plan) return idist__fail(IDIST_ERR_ARG, "plan_create: plan is NULL");
    *plan = (idist_plan *)idist__mem_alloc(NULL, sizeof **plan); // a plan may outlive its world
    return *plan ? IDIST_OK : IDIST_ERR_NO_MEMORY;
}

static idist_status idist__plan_run(idist_group *g, const idist_plan *plan,
                                    const idist_opts *opts) {
    const idist__call *call = &plan->call;
    bool may_differ = idist__reduce_op_is_user(call->op) || !idist__dtype_is_builtin(call->dtype) ||
                      idist__tracer_now();

    if (g->w->groups.serial != plan->world_serial || g->ctx != plan->ctx || g->rank != plan->rank ||
        g->size != plan->size)
        return idist__fail(IDIST_ERR_STATE, "plan_start: the group of this plan was freed");
    return may_differ ? idist__call_traced(g, call, opts) : idist__call_checked(g, call, opts);
}

idist_status idist_plan_start(const idist_plan *plan, idist_request *request) {
    idist_group *g = NULL;
    idist_opts opts;
    idist_status status = IDIST_OK;

    if (!plan) status = idist__fail(IDIST_ERR_ARG, "plan_start: plan is NULL");
    else if (!plan->call.kind)
        status = idist__fail(IDIST_ERR_STATE,
                             "plan_start: the plan is empty: make a call with opts.plan first");
    else status = idist__call_enter("plan_start", plan->opts.group, &g);

    if (g) {
        opts = plan->opts;
        opts.request = request;
        status = idist__plan_run(g, plan, &opts);
        idist__os_mutex_unlock(&g->w->lock);
    }

    return idist__call_ended(status, request);
}

idist_status idist_plan_free(idist_plan **plan) {
    if (!plan) return idist__fail(IDIST_ERR_ARG, "plan_free: plan is NULL");
    idist__mem_free(NULL, *plan);
    *plan = NULL;

    return IDIST_OK;
}

//------------------------------------------------------------------------------
// calls that progress together: sendrecv, group_begin and group_end
//
// Between group_begin and group_end, a blocking call starts its task and returns. The list
// idist__together_now.first keeps the tasks (see idist__call_defer), and group_end waits for them.
// The function sendrecv starts two tasks in this way, without releasing the lock in between.
//------------------------------------------------------------------------------

typedef struct idist__several_pair {
    idist__call send, recv;
} idist__several_pair;

// Checks both calls of a pair before either begins. Sets *host to true if neither call is for the
// device.
static idist_status idist__several_check(idist_group *g, const idist__several_pair *pair,
                                         const idist_opts *opts, bool *host) {
    bool send_on_device = false, recv_on_device = false, detached;
    idist_status status = idist__check_call(g, &pair->send);

    if (status == IDIST_OK) status = idist__check_call(g, &pair->recv);
    if (status == IDIST_OK)
        status = idist__call_route(g, &pair->send, opts, &send_on_device, &detached);
    if (status == IDIST_OK)
        status = idist__call_route(g, &pair->recv, opts, &recv_on_device, &detached);
    *host = !send_on_device && !recv_on_device;

    return status;
}

// Starts the receive, then the send, and waits for both. If `quick` is true, the send is already
// complete, and only the receive starts. Starts nothing if `status`, the result of the check, is an
// error.
static idist_status idist__several_run(idist_group *g, const idist__several_pair *pair,
                                       const idist_opts *opts, bool quick, idist_status status) {
    idist__together *now = &idist__together_now;
    idist__task *first, *t, *next;

    now->depth = quick ? 0 : 1;
    now->status = IDIST_OK;
    if (status == IDIST_OK) status = idist__call_locked(g, &pair->recv, opts);
    if (status == IDIST_OK && !quick) status = idist__call_locked(g, &pair->send, opts);
    now->depth = 0;
    if (g->w->device_api) g->w->device_api->launch(g->w);

    idist__call_undefer(g->w);
    first = now->first; // both tasks, or fewer after a failure
    now->first = NULL;
    for (t = first; t; t = t->list_next) idist__wait_task(t);

    for (t = first; t; t = next) {
        next = t->list_next;
        if (status == IDIST_OK) status = idist__wait_result(t);
        else idist__wait_drop(t);
    }

    return status;
}

// Runs both calls of a pair in the group of `opts`. Blocks until both calls are complete.
static idist_status idist__several_exchange(const idist__several_pair *pair, const char *name,
                                            const idist_opts *opts) {
    idist_group *g = NULL;
    bool quick, host;
    idist_status status = idist__call_enter(name, opts->group, &g);

    if (status != IDIST_OK) return status;
    status = idist__several_check(g, pair, opts, &host);
    idist__tracer_begin("call", name, g, status == IDIST_OK ? &pair->send : NULL);
    quick = status == IDIST_OK && host && idist__call_quick(g, &pair->send, opts);
    status = idist__several_run(g, pair, opts, quick, status);
    idist__os_mutex_unlock(&g->w->lock);

    return idist__tracer_end(status);
}

idist_status idist_sendrecv(const void *send, size_t sendcount, int dst, int sendtag, void *recv,
                            size_t recvcount, int src, int recvtag, idist_dtype dtype,
                            idist_recv_info *info, const idist_opts *opts) {
    idist__several_pair pair;
    idist_opts own_opts;
    size_t size = idist_dtype_size(dtype);
    const char *from = (const char *)send, *to = (const char *)recv;
    idist_status status = idist__check_blocking("sendrecv", opts);

    if (status != IDIST_OK) return status;
    if (size && sendcount && recvcount && from && to && from < to + recvcount * size &&
        to < from + sendcount * size)
        return idist__fail(IDIST_ERR_ARG, "sendrecv: send and receive buffers overlap");
    memset(&own_opts, 0, sizeof own_opts);
    if (opts) own_opts = *opts;
    idist__p2p_init(&pair.recv, IDIST__RECV, NULL, recv, recvcount, dtype, src, recvtag, info);
    idist__p2p_init(&pair.send, IDIST__SEND, send, NULL, sendcount, dtype, dst, sendtag, NULL);

    return idist__several_exchange(&pair, "sendrecv", &own_opts);
}

idist_status idist_group_begin(void) {
    if (!idist__together_now.depth++) idist__together_now.status = IDIST_OK;
    return IDIST_OK;
}

idist_status idist_group_end(void) {
    idist__together *now = &idist__together_now;
    idist__world *held = now->held_world, *w = NULL;
    char text[sizeof idist__me.text];
    idist_status first;

    if (!now->depth) return idist__fail(IDIST_ERR_STATE, "group_end: no idist_group_begin is open");
    if (--now->depth) return IDIST_OK;
    idist__tracer_begin("wait", "group_end", NULL, NULL);

    if (held) {
        idist__world_lock(held);
        held->device_api->launch(held);
        idist__os_mutex_unlock(&held->lock);
    }

    first = now->status;
    memcpy(text, now->text, sizeof text);

    while (now->first) {
        idist__task *t = now->first;
        idist_status status;

        // Keeps the world locked between two tasks of the world, because another thread might close
        // the world.
        if (!w || t->group->w != w) {
            if (w) idist__os_mutex_unlock(&w->lock);
            w = t->group->w;
            idist__world_lock(w);
            idist__call_undefer(w);
        }

        now->first = t->list_next;
        idist__wait_task(t);
        status = idist__wait_result(t);
        if (status == IDIST_OK || first != IDIST_OK) continue;
        first = status;
        memcpy(text, idist__me.text, sizeof text);
    }

    if (w) idist__os_mutex_unlock(&w->lock);
    if (first != IDIST_OK) memcpy(idist__me.text, text, sizeof text);

    return idist__tracer_end(first);
}
