// core/call.h: the path of every communication call
//
// The core owns everything that does not depend on the backend that moves the data. It checks a
// call's arguments, numbers the call within its group, and hands the call to the backend as a task.
// It then waits for the task, watches its deadline, and reports a failure to all members of the
// group. The core depends on no particular backend. The contract with backends is
// idist_backend_api, and the contract with device backends is idist_device_api; both are in
// core/model.h.
//
// A public function in calls/ fills an idist__call and passes it to idist__call_run, or to
// idist__call_message for a send or receive. Backends call back into the core through
// idist__task_complete and idist__group_fail.
//
//     public function         fills an idist__call
//     idist__call_message     only for a send or receive: tries the backend's `quick` or
//                             `quick_message`, then calls idist__call_begin; continues at
//                             idist__call_run if the arguments need the full check
//     idist__call_run         finds the group, locks its world, records the first error of a
//                             group_begin; stores the call if opts.plan is set
//     idist__call_traced      passes the call through the timeline, if there is one
//     idist__call_locked      checks the arguments; idist_plan_start skips this step if the op and
//                             the dtype are built in and there is no timeline
//     idist__call_checked     asks the device backend whether the call is for the device; tries
//                             the backend's `quick` or `quick_message`
//     idist__call_begin       makes a task
//     idist__task_start       numbers the task of a collective, and hands the task to the backend
//     idist__wait_task        waits, unless there is a request or an open group_begin
//     idist__wait_result      returns status and text to the caller
#pragma once

#include "os/thread.h"
#include "base/fail.h"
#include "base/mem.h"
#include "base/dtype.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/backend.h"
#include "core/world.h"
#include "core/fingerprint.h"
#include "core/task.h"
#include "core/together.h"
#include "core/group.h"
#include "core/wait.h"
#include "core/progress_thread.h"
#include "core/extent.h"
#include "core/check.h"

static void idist__call_init(idist__call *call, idist__kind kind, const void *send, void *recv,
                             size_t count, idist_dtype dtype) {
    idist__mem_clear(call, sizeof *call);
    call->kind = kind;
    call->send = send;
    call->recv = recv;
    call->count = count;
    call->label = kind;
    call->check = count;
    call->dtype = dtype;
    call->root = -1;
}

// Finds the group of a call and locks its world. On failure nothing is locked and *out is NULL.
static idist_status idist__call_enter(const char *name, idist_group *group, idist_group **out) {
    idist__world *w = group ? group->w : idist__world_default();

    *out = NULL;
    if (group && !w)
        return idist__fail(IDIST_ERR_STATE, "%s: the world of this group was closed", name);
    if (!w)
        return idist__fail(
            IDIST_ERR_STATE,
            "%s: there is no world: call idist_initialize first (idist_finalize ends the world)",
            name);
    if (idist__world_enter(name, w) != IDIST_OK) return IDIST_ERR_STATE;
    if (group && group->freed) return idist__fail(IDIST_ERR_STATE, "%s: the group was freed", name);
    idist__world_lock(w);
    if (!group) group = &w->group;

    if (!group->w || group->freed) { // while we waited for the lock; the struct remains for a while
        idist__os_mutex_unlock(&w->lock);
        return idist__fail(IDIST_ERR_STATE, "%s: the group was freed, or its world was closed",
                           name);
    }

    *out = group;

    return IDIST_OK;
}

// Returns true if the backend needs a copy of what the call sends: an all_to_allv in place
// overwrites its send buffer.
static bool idist__call_needs_copy(const idist__call *call) {
    return call->kind == IDIST__ALL_TO_ALLV && call->send == call->recv;
}

// Replaces the send buffer of a task with a copy. Returns false if memory cannot be allocated.
static bool idist__call_copy_send(idist__task *t) {
    const idist_group *g = t->group;
    idist__call *call = &t->call;
    size_t nbytes = idist__extent_end(call->sendcounts, call->senddispls, g->size);

    nbytes *= idist_dtype_size(call->dtype);
    t->copy = idist__mem_raw(&g->w->cfg.mem, nbytes ? nbytes : 1);
    if (!t->copy) return false;
    if (nbytes) memcpy(t->copy, call->send, nbytes);
    call->send = t->copy; // even if it is empty: to Open MPI 4, equal addresses mean in place

    return true;
}

// Tries a call without a task. Returns true if the backend has completed the call. If the call has
// a request or is inside idist_group_begin, or if other tasks are running, only a send or receive
// can complete here.
static bool idist__call_quick(idist_group *g, const idist__call *call, const idist_opts *opts) {
    const idist_backend_api *backend = g->w->backend;
    bool blocks = !opts->request && !idist__together_now.depth;

    if (g->status != IDIST_OK || call->peeks || idist__call_needs_copy(call)) return false;
    if (blocks && !g->w->tasks.running) return backend->quick && backend->quick(g, call);
    if (!backend->quick_message || !idist__kind_is_p2p(call->kind) || idist__tracer_now())
        return false;

    return backend->quick_message(g, call);
}

// Value of request->impl for a call that completed before it returned. Such a call has no task.
static char idist__call_complete;

static bool idist__call_was_complete(const idist_request *request) {
    return request->impl == &idist__call_complete;
}

// Asks the device backend whether it takes part in a call, and whether anybody waits for the call's
// task. Fails if the call has a stream and the world has no device.
static idist_status idist__call_route(idist_group *g, const idist__call *call,
                                      const idist_opts *opts, bool *on_device, bool *detached) {
    idist__world *w = g->w;

    *on_device = *detached = false;
    if (w->device_api) return w->device_api->route(g, call, opts, on_device, detached);
    if (!opts->stream) return IDIST_OK;

    return idist__fail(w->device_backend_count ? IDIST_ERR_NO_DEVICE : IDIST_ERR_UNSUPPORTED,
                       "%s: opts.stream needs device memory: %s", idist__kind_names[call->label],
                       w->about.no_device);
}

static void idist__call_task_init(idist__task *t, const idist__call *call, const idist_opts *opts,
                                  bool on_device) {
    t->call = *call;
    t->call.dtype_tag = idist__fingerprint_tag(t->group->w, call);
    t->waiter = opts->request ? IDIST__WAITER_REQUEST : IDIST__WAITER_CALLER;
    t->on_device = on_device;
    t->stream = opts->stream;
    t->patient = opts->timeout_ms == 0;
    t->timeout_ms = opts->timeout_ms ? opts->timeout_ms : t->group->w->cfg.timeout_ms;
}

// Checks that no thread is closing the world. Needed for a task that outlasts the function that
// begins it: a closing world would free the task before anybody waits for it.
static idist_status idist__call_check_open(const idist__world *w, const char *name) {
    if (!w->life.closing) return IDIST_OK;
    return idist__fail(IDIST_ERR_STATE, "%s: another thread is closing the world", name);
}

// Keeps a task for idist_group_end, which waits for the task. The world cannot be closed while it
// has deferred tasks.
static void idist__call_defer(idist__task *t) {
    idist__together *now = &idist__together_now;

    t->group->w->tasks.deferred_count++;
    if (now->first) now->last->list_next = t;
    else now->first = t;
    now->last = t;
}

// Subtracts from the world's deferred count the tasks at the front of this thread's list that
// belong to `w`. These tasks no longer keep the world open, so the caller waits for all of them
// before it releases the world's lock.
static void idist__call_undefer(idist__world *w) {
    const idist__task *t;
    for (t = idist__together_now.first; t && t->group->w == w; t = t->list_next)
        w->tasks.deferred_count--;
}

// Ends this thread's idist_group_begin without waiting, before this thread closes a world. Called
// with no world locked.
static void idist__call_forget(idist__world *closed) {
    idist__together *now = &idist__together_now;

    if (now->held_world == closed) {
        idist__world_lock(closed);
        closed->tasks.deferred_count--;
        idist__os_mutex_unlock(&closed->lock);
        now->held_world = NULL;
    }

    now->depth = 0;

    while (now->first) {
        idist__task *t = now->first;
        idist__world *w = t->group->w;

        idist__world_lock(w);
        now->first = t->list_next;
        w->tasks.deferred_count--;
        if (t->state == IDIST__TASK_DONE) idist__task_free(t);
        else idist__task_detach(t);
        idist__os_mutex_unlock(&w->lock);
    }
}

// Begins a call that the backend's `quick` has not completed, and waits for its task. Does not wait
// if the task is detached, has a request, or belongs to an open idist_group_begin.
static idist_status idist__call_begin(idist_group *g, const idist__call *call,
                                      const idist_opts *opts, bool on_device, bool detached) {
    const char *name = idist__kind_names[call->label];
    idist_status status = IDIST_OK;
    idist__task *t;

    // Data that has just arrived may have failed the group.
    if (g->status != IDIST_OK && idist__kind_is_p2p(call->kind))
        return idist__fail(g->status, "%s: %s", name, g->cause);

    if (opts->request || idist__together_now.depth) status = idist__call_check_open(g->w, name);
    if (opts->request && status == IDIST_OK) status = idist__progress_thread_need(g->w);
    if (status != IDIST_OK) return status;

    t = idist__task_new(g);
    if (t) idist__call_task_init(t, call, opts, on_device);

    if (!t || (!on_device && idist__call_needs_copy(call) && !idist__call_copy_send(t))) {
        if (t) idist__task_free(t);
        idist__group_fail_memory(g); // the other members count on this call
        return IDIST_ERR_NO_MEMORY;
    }

    if (detached) idist__task_detach(t);
    idist__task_start(t);
    if (detached)
        return g->status == IDIST_OK ? IDIST_OK : idist__fail(g->status, "%s: %s", name, g->cause);

    if (opts->request) {
        opts->request->impl = t;
        return IDIST_OK;
    }

    if (idist__together_now.depth) {
        idist__call_defer(t);
        return IDIST_OK;
    }

    idist__wait_task(t);

    return idist__wait_result(t);
}

// Performs a call whose arguments have passed the check.
static idist_status idist__call_checked(idist_group *g, const idist__call *call,
                                        const idist_opts *opts) {
    const char *name = idist__kind_names[call->label];
    bool on_device = false, detached = false;
    idist_status status = idist__call_route(g, call, opts, &on_device, &detached);

    if (status != IDIST_OK) return status;
    if (g->status != IDIST_OK)
        return idist__fail(g->status, "%s: the group failed earlier: %s", name, g->cause);
    if (g->w->progress.stops) // another thread has ended all calls and would miss this call
        return idist__fail(IDIST_ERR_ABORTED, "%s: another thread is closing the world", name);

    if (!on_device && idist__call_quick(g, call, opts)) {
        if (opts->request) opts->request->impl = &idist__call_complete;
        return IDIST_OK;
    }

    return idist__call_begin(g, call, opts, on_device, detached);
}

static idist_status idist__call_locked(idist_group *g, const idist__call *call,
                                       const idist_opts *opts) {
    idist_status status = idist__check_call(g, call);
    return status == IDIST_OK ? idist__call_checked(g, call, opts) : status;
}

static idist_status idist__call_traced(idist_group *g, const idist__call *call,
                                       const idist_opts *opts) {
    return idist__tracer_now() ? idist__tracer_now()->call(g, call, opts)
                               : idist__call_locked(g, call, opts);
}

// Returns true if a plan already keeps this call of this group.
static bool idist__call_is_kept(const idist_group *g, const idist_plan *plan,
                                const idist__fingerprint *call) {
    idist__fingerprint kept;

    if (!plan->call.kind || plan->world_serial != g->w->groups.serial || plan->ctx != g->ctx)
        return false;
    kept = idist__fingerprint_of_call(g->w, &plan->call, 0);

    return idist__fingerprint_equal(&kept, call);
}

// Sets *number to the number of a plan that is filled with this call, or to 0 for a message, which
// needs no number. If the plan already keeps an equal call, the plan's number stays.
static idist_status idist__call_number_plan(idist_group *g, const idist_plan *plan,
                                            const idist__call *c, uint32_t *number) {
    idist__fingerprint call = idist__fingerprint_of_call(g->w, c, 0);
    idist__planned *p = g->planned;

    *number = idist__kind_is_p2p(c->kind) ? 0 : plan->call.plan;
    if (idist__kind_is_p2p(c->kind) || idist__call_is_kept(g, plan, &call)) return IDIST_OK;
    while (p && memcmp(&p->call, &call, sizeof call) != 0) p = p->next;

    if (!p) {
        p = (idist__planned *)idist__mem_alloc(&g->w->cfg.mem, sizeof *p);
        if (!p) return IDIST_ERR_NO_MEMORY;
        p->call = call;
        p->next = g->planned;
        g->planned = p;
    }

    *number = p->count++ % IDIST__PLAN_MAX + 1;

    return IDIST_OK;
}

// Checks a call and stores it in opts->plan, for idist_plan_start.
static idist_status idist__call_plan(idist_group *g, const idist__call *call,
                                     const idist_opts *opts) {
    idist_plan *plan = opts->plan;
    uint32_t number;
    idist_status status = idist__check_call(g, call);

    if (status != IDIST_OK) return status;
    if (opts->request)
        return idist__fail(
            IDIST_ERR_ARG,
            "%s: with opts.plan, opts.request must be NULL; pass the request to idist_plan_start",
            idist__kind_names[call->label]);
    status = idist__call_number_plan(g, plan, call, &number);
    if (status != IDIST_OK) return status;

    plan->call = *call;
    plan->call.plan = number;
    plan->opts = *opts;
    plan->opts.plan = NULL;
    plan->opts.group = g;
    plan->world_serial = g->w->groups.serial;
    plan->ctx = g->ctx;
    plan->rank = g->rank;
    plan->size = g->size;

    return IDIST_OK;
}

// Ends a call with this status, and returns the status. A failed call leaves an empty request, and
// waiting for an empty request is allowed. Between idist_group_begin and idist_group_end, records
// the first failure, which idist_group_end returns.
static idist_status idist__call_ended(idist_status status, idist_request *request) {
    if (status == IDIST_OK) return IDIST_OK;
    if (request) request->impl = NULL;

    if (idist__together_now.depth && idist__together_now.status == IDIST_OK) {
        idist__together_now.status = status;
        memcpy(idist__together_now.text, idist__me.text, sizeof idist__together_now.text);
    }

    return status;
}

// Returns true if the arguments of a send or receive, other than the peer, need no further check.
// This is so if the call has a buffer, a built-in dtype, a valid tag and a count that cannot
// overflow, but no stream and no plan. Also, the world must have no device, and no timeline may be
// recorded.
static bool idist__call_is_plain(const idist__world *w, const idist__call *call,
                                 const idist_opts *opts) {
    if (w->device_api || idist__tracer_now() || opts->stream || opts->plan) return false;
    if (!idist__dtype_is_builtin(call->dtype) || call->count > SIZE_MAX / 16) return false;
    return call->tag >= 0 && (call->send || call->recv);
}

// Returns true if the group is usable, this rank and the peer are members, and the backend has
// quick_message. Called with the world's lock held. If another thread has closed the world, g->w is
// NULL.
static bool idist__call_is_ready(const idist_group *g, const idist__call *call) {
    if (!g->w || g->status != IDIST_OK || g->w->progress.stops || g->rank < 0) return false;
    return g->w->backend->quick_message && call->root >= 0 && call->root < g->size;
}

static idist_opts idist__call_defaults; // all zero; never written

static idist_status idist__call_run(const idist__call *call, const idist_opts *opts) {
    const idist_opts *own_opts = opts ? opts : &idist__call_defaults;
    idist_group *g = NULL;
    idist_status status = idist__call_enter(idist__kind_names[call->label], own_opts->group, &g);

    if (g) {
        status = own_opts->plan ? idist__call_plan(g, call, own_opts)
                                : idist__call_traced(g, call, own_opts);
        idist__os_mutex_unlock(&g->w->lock);
    }

    return idist__call_ended(status, own_opts->request);
}

// Sends or receives a message. Skips the full check of the arguments if idist__call_is_ready and
// idist__call_is_plain return true. Otherwise, or if another thread holds the lock, calls
// idist__call_run.
static idist_status idist__call_message(const idist__call *call, const idist_opts *opts) {
    const idist_opts *own_opts = opts ? opts : &idist__call_defaults;
    idist_group *g = own_opts->group;
    idist__world *w = g ? g->w : __atomic_load_n(&idist__default_world, __ATOMIC_ACQUIRE);
    bool blocks = !own_opts->request && !idist__together_now.depth, done;
    idist_status status = IDIST_OK;

    if (!w || idist__world_forked(w) || idist__me.callbacks || (g && g->freed) ||
        !idist__os_mutex_try_lock(&w->lock))
        return idist__call_run(call, opts);

    if (!g) g = &w->group;

    if (!idist__call_is_ready(g, call) || !idist__call_is_plain(w, call, own_opts)) {
        idist__os_mutex_unlock(&w->lock);
        return idist__call_run(call, opts);
    }

    done = blocks && !w->tasks.running ? w->backend->quick(g, call)
                                       : w->backend->quick_message(g, call);
    if (!done) status = idist__call_begin(g, call, own_opts, false, false);
    else if (own_opts->request) own_opts->request->impl = &idist__call_complete;
    idist__os_mutex_unlock(&w->lock);

    return done ? IDIST_OK : idist__call_ended(status, own_opts->request);
}
