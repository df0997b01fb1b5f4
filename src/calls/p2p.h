// calls/p2p.h: send, receive and probe
#pragma once

#include "os/thread.h"
#include "base/fail.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/task.h"
#include "core/wait.h"
#include "core/check.h"
#include "core/call.h"

static void idist__p2p_init(idist__call *call, idist__kind kind, const void *send, void *recv,
                            size_t count, idist_dtype dtype, int peer, int tag,
                            idist_recv_info *info) {
    idist__call_init(call, kind, send, recv, count, dtype);
    call->root = peer;
    call->tag = tag;
    call->info = info;
}

idist_status idist_send(const void *buf, size_t count, idist_dtype dtype, int dst, int tag,
                        const idist_opts *opts) {
    idist__call call;
    idist__p2p_init(&call, IDIST__SEND, buf, NULL, count, dtype, dst, tag, NULL);
    return idist__call_message(&call, opts);
}

idist_status idist_recv(void *buf, size_t count, idist_dtype dtype, int src, int tag,
                        idist_recv_info *info, const idist_opts *opts) {
    idist__call call;
    idist__p2p_init(&call, IDIST__RECV, NULL, buf, count, dtype, src, tag, info);
    return idist__call_message(&call, opts);
}

// Fails a call with IDIST_ERR_ARG before it has begun, and empties its request.
static idist_status idist__p2p_refuse(const char *why, const idist_opts *opts) {
    return idist__call_ended(idist__fail(IDIST_ERR_ARG, "%s", why), opts ? opts->request : NULL);
}

// Fills the call of a probe, which is a receive that leaves the message in place. A matched probe
// stores the message in *message. Any other probe passes NULL.
static void idist__p2p_init_probe(idist__call *call, idist__kind label, int src, int tag,
                                  idist_recv_info *info, idist_message *message) {
    idist__p2p_init(call, IDIST__RECV, NULL, NULL, 0, IDIST_U8, src, tag, info);
    call->label = label;
    call->peeks = true;
    call->u.message = message;
}

idist_status idist_probe(int src, int tag, idist_recv_info *info, const idist_opts *opts) {
    idist__call call;

    if (!info) return idist__p2p_refuse("probe: info is NULL", opts);
    idist__p2p_init_probe(&call, IDIST__PROBE, src, tag, info, NULL);

    return idist__call_run(&call, opts);
}

idist_status idist_mprobe(int src, int tag, idist_message *message, const idist_opts *opts) {
    idist__call call;

    if (!message) return idist__p2p_refuse("mprobe: message is NULL", opts);
    message->group = NULL;
    idist__p2p_init_probe(&call, IDIST__MPROBE, src, tag, &message->info, message);

    return idist__call_run(&call, opts);
}

// Begins a probe and lets the backend make progress without waiting. Cancels the probe if it has
// found no message. Called with the world's lock held.
static idist_status idist__p2p_probe_now(idist_group *g, const idist__call *call, bool *found) {
    const char *name = idist__kind_names[call->label];
    idist__world *w = g->w;
    idist_opts none;
    idist__task *t;

    if (g->status != IDIST_OK)
        return idist__fail(g->status, "%s: the group failed earlier: %s", name, g->cause);
    if (w->progress.stops)
        return idist__fail(IDIST_ERR_ABORTED, "%s: another thread is closing the world", name);
    t = idist__task_new(g);
    if (!t) return idist__fail(IDIST_ERR_NO_MEMORY, "%s: out of memory", name);

    memset(&none, 0, sizeof none);
    idist__call_task_init(t, call, &none, false);
    idist__task_start(t);
    idist__fail_begin();
    if (t->state != IDIST__TASK_DONE && w->wait.driver == IDIST__DRIVER_NONE)
        w->backend->progress(w);
    idist__fail_end(IDIST_OK);
    *found = t->state == IDIST__TASK_DONE && t->status == IDIST_OK;

    if (t->state != IDIST__TASK_DONE) {
        w->backend->cancel(t);
        idist__task_complete(t, IDIST_OK, "");
    }

    return idist__wait_result(t);
}

// Runs a probe that does not wait for a message.
static idist_status idist__p2p_probe_try(const idist__call *call, bool *found,
                                         const idist_opts *opts) {
    const char *name = idist__kind_names[call->label];
    idist_group *g = NULL;
    idist_status status;

    if (!found) return idist__fail(IDIST_ERR_ARG, "%s: found is NULL", name);
    *found = false;
    status = idist__check_blocking(name, opts);
    if (status != IDIST_OK) return status;
    status = idist__call_enter(name, opts ? opts->group : NULL, &g);
    if (status != IDIST_OK) return status;

    status = idist__check_call(g, call);
    if (status == IDIST_OK) status = idist__p2p_probe_now(g, call, found);
    idist__os_mutex_unlock(&g->w->lock);

    return status;
}

idist_status idist_iprobe(int src, int tag, bool *found, idist_recv_info *info,
                          const idist_opts *opts) {
    idist_recv_info unused;
    idist__call call;

    idist__p2p_init_probe(&call, IDIST__IPROBE, src, tag, info ? info : &unused, NULL);

    return idist__p2p_probe_try(&call, found, opts);
}

idist_status idist_improbe(int src, int tag, bool *found, idist_message *message,
                           const idist_opts *opts) {
    idist__call call;

    if (!message) return idist__fail(IDIST_ERR_ARG, "improbe: message is NULL");
    message->group = NULL;
    idist__p2p_init_probe(&call, IDIST__IMPROBE, src, tag, &message->info, message);

    return idist__p2p_probe_try(&call, found, opts);
}

idist_status idist_mrecv(void *buf, size_t count, idist_dtype dtype, idist_message *message,
                         const idist_opts *opts) {
    idist_opts own_opts;
    idist__call call;

    if (!message || !message->group)
        return idist__p2p_refuse("mrecv: the message is empty: no probe has matched it", opts);
    if (opts && opts->plan) return idist__p2p_refuse("mrecv: opts.plan must be NULL", opts);

    memset(&own_opts, 0, sizeof own_opts);
    if (opts) own_opts = *opts;
    own_opts.group = message->group;
    idist__p2p_init(&call, IDIST__RECV, NULL, buf, count, dtype, message->info.source,
                    (int)message->number, NULL);
    call.label = IDIST__MRECV;
    call.u.message = message;

    return idist__call_run(&call, &own_opts);
}
