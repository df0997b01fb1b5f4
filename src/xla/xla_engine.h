// xla/xla_engine.h: the device's part of a backend
//
// A world with a device has a backend that consists of these functions. Calls on host memory go on
// to the host's backend.
//
// The parts of a call reach the host's backend in the program's order, so that all ranks number
// them alike. A collective waits in its lane (idist__xla_lane) until all earlier collectives of the
// group have begun their last part. This is also true for a collective on host memory. A send waits
// for earlier sends.
#pragma once

#include "os/clock.h"
#include "os/thread.h"
#include "base/fail.h"
#include "base/text.h"
#include "base/mem.h"
#include "base/log.h"
#include "base/reduce_op.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/world.h"
#include "core/fingerprint.h"
#include "core/group.h"
#include "core/extent.h"
#include "xla/xla_model.h"
#include "xla/compile_options.h"
#include "xla/stablehlo.h"
#include "xla/xla_home.h"
#include "xla/xla_value.h"
#include "xla/xla_buffer.h"
#include "xla/xla_worker.h"
#include "xla/xla_call.h"

// Allocates this rank's part of a group.
static idist_status idist__xla_engine_group_make(idist_group *g) {
    const idist_allocator *mem = &g->w->cfg.mem;
    idist__xla_group *group = (idist__xla_group *)idist__mem_alloc(mem, sizeof *group);
    int lane;

    if (!group) return IDIST_ERR_NO_MEMORY;
    group->options_nbytes = idist__proto_write(g, NULL, 0);
    group->options = (char *)idist__mem_alloc(mem, group->options_nbytes);

    if (!group->options) {
        idist__mem_free(mem, group);
        return IDIST_ERR_NO_MEMORY;
    }

    idist__proto_write(g, group->options, group->options_nbytes);
    for (lane = 0; lane < IDIST__XLA_LANES; lane++) group->queue_end[lane] = &group->queue[lane];
    g->device = group;

    return IDIST_OK;
}

// Finds the buffer that has nbytes at an address, and counts one more user of it. Returns NULL if
// there is none on this rank's device.
static idist__xla_buffer *idist__xla_engine_take(idist__xla *x, const void *p, size_t nbytes) {
    idist__xla_buffer *buffer = idist__xla_buffer_take(x->home, p);

    if (!buffer) return NULL;
    if (buffer->device == x->device &&
        buffer->nbytes - (size_t)((const char *)p - buffer->at) >= nbytes)
        return buffer;
    idist__xla_buffer_drop(x->home, buffer);

    return NULL;
}

// Checks that this rank has a buffer with nbytes at an address.
static idist_status idist__xla_engine_check(const idist_group *g, const char *name, const void *p,
                                            size_t nbytes) {
    idist__xla *x = idist__xla_of(g->w);
    idist__xla_buffer *buffer = idist__xla_buffer_take(x->home, p);
    bool is_own = buffer && buffer->device == x->device;
    size_t left = buffer ? buffer->nbytes - (size_t)((const char *)p - buffer->at) : 0;

    idist__xla_buffer_drop(x->home, buffer);
    if (!is_own)
        return idist__fail(IDIST_ERR_ARG,
                           "%s: an address of this rank's call is no idist_xla_buffer of this rank "
                           "(freed already?)",
                           name);
    if (left < nbytes)
        return idist__fail(IDIST_ERR_ARG,
                           "%s: the idist_xla_buffer has %zu bytes from that address on, and the "
                           "call needs %zu",
                           name, left, nbytes);

    return IDIST_OK;
}

// Decides whether a call is for the device, from the addresses of its buffers.
static idist_status idist__xla_engine_route(idist_group *g, const idist__call *call,
                                            const idist_opts *opts, bool *on_device,
                                            bool *detached) {
    const char *name = idist__kind_names[call->label];
    bool send = idist__xla_buffer_is(call->send), recv = idist__xla_buffer_is(call->recv);
    idist_status status = IDIST_OK;
    idist__extent e;
    size_t size;

    (void)detached;
    if (opts->stream)
        return idist__fail(IDIST_ERR_UNSUPPORTED,
                           "%s: XLA has no streams: leave opts.stream NULL, and use a request",
                           name);
    *on_device = send || recv;
    if (!*on_device || idist__extent_of(g, call, &e) != IDIST_OK) return IDIST_OK;
    if ((e.send && !send) || (e.recv && !recv))
        return idist__fail(IDIST_ERR_ARG, "%s: one buffer is an idist_xla_buffer, the other is not",
                           name);
    size = idist_dtype_size(call->dtype);
    if (e.send) status = idist__xla_engine_check(g, name, call->send, e.send * size);
    if (status == IDIST_OK && e.recv)
        status = idist__xla_engine_check(g, name, call->recv, e.recv * size);
    if (status != IDIST_OK) return status;
    if (g->device || g->status != IDIST_OK) return IDIST_OK;

    return idist__xla_engine_group_make(g);
}

// Gives a task an empty op. The memory of the op is kept when the task is used again. Returns false
// if memory cannot be allocated.
static bool idist__xla_engine_op_make(idist__task *t) {
    const idist_allocator *mem = &t->group->w->cfg.mem;

    if (!t->device) t->device = idist__mem_alloc(mem, sizeof(idist__xla_op));
    if (!t->device) return false;
    memset(t->device, 0, sizeof(idist__xla_op));

    return true;
}

// Finds the buffers of a call, and allocates its job. Returns false, with the reason in `why`, if
// memory cannot be allocated, or if this rank has no buffer at an address.
static bool idist__xla_engine_take_buffers(idist__task *t, const char **why) {
    idist__xla *x = idist__xla_of(t->group->w);
    idist__xla_op *op = idist__xla_op_of(t);
    const idist__call *call = &op->call;
    size_t size = idist_dtype_size(call->dtype);
    idist__extent e;

    *why = "is out of memory";
    op->job = (idist__xla_job *)idist__mem_alloc(&x->w->cfg.mem, sizeof *op->job);
    if (!op->job || idist__extent_of(t->group, call, &e) != IDIST_OK) return false;
    op->job->task = t;
    if (e.send) op->job->send = idist__xla_engine_take(x, call->send, e.send * size);
    if (e.recv) op->job->recv = idist__xla_engine_take(x, call->recv, e.recv * size);
    op->job->in_place = !op->job->send || op->job->send == op->job->recv;
    *why = "has freed an idist_xla_buffer while a call with it began";

    return (!e.send || op->job->send) && (!e.recv || op->job->recv);
}

// Fills in what the device needs to know about a call.
static void idist__xla_engine_op_fill(idist__task *t) {
    idist_group *g = t->group;
    idist__xla_op *op = idist__xla_op_of(t);

    op->fingerprint = idist__fingerprint_of_call(g->w, &t->call, 0);
    op->fingerprint.algorithm = IDIST__ON_DEVICE;
    op->may_have_program =
        idist__xla_of(g->w)->path == IDIST__XLA_BY_PROGRAM && idist__hlo_supports(g, &op->call);
}

// Copies the user op of a call that waits for its turn, because the program may free the op.
static void idist__xla_engine_keep_user_op(idist__task *t) {
    if (!t->call.u.user && idist__kind_reduces(t->call.kind) &&
        idist__reduce_op_is_user(t->call.op))
        idist__xla_op_of(t)->user = *idist__world_user_op(t->group, &t->call);
}

// Returns the lane in which a call waits for its turn.
static idist__xla_lane idist__xla_engine_lane_of(const idist__call *call) {
    if (call->kind == IDIST__RECV) return IDIST__XLA_NO_LANE;
    return call->kind == IDIST__SEND ? IDIST__XLA_SENDS : IDIST__XLA_COLLECTIVES;
}

// Appends a call to its lane.
static void idist__xla_engine_enqueue(idist__task *t) {
    idist__xla_group *group = idist__xla_group_of(t->group);
    idist__xla_op *op = idist__xla_op_of(t);

    *group->queue_end[op->lane] = t;
    group->queue_end[op->lane] = &op->next_queued;
}

// Undoes the numbering of a task. Each part of the call gets its own number when the host's backend
// starts it.
static void idist__xla_engine_unstart(idist__task *t) {
    t->state = IDIST__TASK_ON_DEVICE;
    if (t->seq) t->group->seq--;
    t->seq = 0;
    memset(t->impl, 0, idist__xla_of(t->group->w)->host_backend->task_nbytes);
}

// Starts a receive, which waits for no other call.
static void idist__xla_engine_start_receive(idist__task *t) {
    bool fetches = false;

    if (!idist__xla_call_allocate(t, &fetches)) idist__group_fail_memory(t->group);
    else idist__xla_call_start_staged(t);
}

// Starts a task. A call on host memory with nothing before it in its lane goes to the host's
// backend at once.
static void idist__xla_engine_start(idist__task *t) {
    idist__xla *x = idist__xla_of(t->group->w);
    const idist__xla_group *group = idist__xla_group_of(t->group);
    idist__xla_lane lane = idist__xla_engine_lane_of(&t->call);
    bool on_device = t->on_device;
    const char *why = "is out of memory";
    idist__xla_op *op;

    if (!on_device && (!group || lane == IDIST__XLA_NO_LANE || !group->queue[lane])) {
        x->host_backend->start(t);
        return;
    }

    t->on_device = false; // until there is something to undo
    idist__xla_engine_unstart(t);

    if (!idist__xla_engine_op_make(t)) {
        idist__group_fail_memory(t->group);
        return;
    }

    op = idist__xla_op_of(t);
    op->call = t->call;
    op->lane = lane;
    idist__xla_engine_keep_user_op(t);
    t->on_device = on_device;

    if (on_device && !idist__xla_engine_take_buffers(t, &why)) {
        idist__group_fail_self(t->group, IDIST_ERR_ARG, why);
        return;
    }

    if (on_device) idist__xla_engine_op_fill(t);

    if (lane == IDIST__XLA_NO_LANE) {
        idist__xla_engine_start_receive(t);
        return;
    }

    idist__xla_engine_enqueue(t);
    idist__xla_call_run(t->group);
}

// Sends or receives a message without a task. Returns false if the host's backend cannot do so at
// once. Also returns false while earlier sends wait in the lane, because the message would overtake
// them.
static bool idist__xla_engine_quick_message(idist_group *g, const idist__call *call) {
    const idist__xla_group *group = idist__xla_group_of(g);

    if (group && call->kind == IDIST__SEND && group->queue[IDIST__XLA_SENDS]) return false;
    return idist__xla_of(g->w)->host_backend->quick_message(g, call);
}

// Continues the calls whose jobs the worker has finished.
static void idist__xla_engine_continue(idist__world *w) {
    idist__task *t, *next;

    for (t = w->tasks.running; t; t = next) {
        idist__xla_op *op = t->on_device ? idist__xla_op_of(t) : NULL;

        next = t->next;
        if (!op || !op->worked) continue;
        op->worked = false;
        idist__xla_call_worked(t);
        next = w->tasks.running; // a task is gone, perhaps the next one
    }
}

// Progresses the host's backend, then performs the steps of calls that can continue.
static void idist__xla_engine_progress(idist__world *w) {
    idist__xla *x = idist__xla_of(w);
    idist_group *g;

    x->host_backend->progress(w);
    if (!x->queue_changed) return;
    x->queue_changed = false;
    if (w->machine.single_threaded) idist__xla_engine_continue(w);

    for (g = &w->group; g; g = g->next)
        if (g->device) idist__xla_call_run(g);
}

// Sleeps in the host's backend, unless a call can continue.
static void idist__xla_engine_sleep(idist__world *w, int64_t until_ns) {
    const idist__xla *x = idist__xla_of(w);

    x->host_backend->sleep(w, x->queue_changed ? 0 : until_ns);
}

// Cancels a task. A program that is already running continues in the worker, and
// idist__xla_engine_finish handles its result.
static bool idist__xla_engine_cancel(idist__task *t) {
    idist__xla *x = idist__xla_of(t->group->w);
    bool done = true;

    if (!t->on_device && t->state != IDIST__TASK_ON_DEVICE) return x->host_backend->cancel(t);
    if (!t->device) return true; // there was no memory for it
    if (t->state == IDIST__TASK_ON_HOST) done = x->host_backend->cancel(t);

    switch (idist__xla_op_of(t)->state) {
    case IDIST__XLA_MET:
    case IDIST__XLA_LAUNCHING:
    case IDIST__XLA_STORING: done = false; break; // other ranks have done their part
    default: break;
    }

    t->state = IDIST__TASK_ON_HOST;
    idist__xla_call_end(t);

    return done;
}

static void idist__xla_engine_announce(idist__task *t) {
    if (t->state != IDIST__TASK_ON_DEVICE) idist__xla_of(t->group->w)->host_backend->announce(t);
}

// Returns what this rank waits for inside the plug-in, for an error text.
static const char *idist__xla_engine_unfinished(const idist__xla_op *op) {
    if (op->job && !op->job->running) return "has not finished earlier work";
    if (op->state == IDIST__XLA_COMPILING) return "has not finished compiling the program";
    return op->state == IDIST__XLA_LAUNCHING ? "has not finished" : "has not finished a copy";
}

static int idist__xla_engine_missing(idist__task *t, char *text, size_t capacity) {
    const idist__xla_group *group = idist__xla_group_of(t->group);
    const idist__xla_op *op = idist__xla_op_of(t);
    const idist__world *w = t->group->w;
    const idist__xla_job *first = idist__xla_of(w)->ordered;

    if (t->state != IDIST__TASK_ON_DEVICE)
        return idist__xla_of(w)->host_backend->missing(t, text, capacity);
    if (op->state == IDIST__XLA_QUEUED && op->lane != IDIST__XLA_NO_LANE &&
        group->queue[op->lane] != t) // waits for the call at the head of the lane
        return idist__xla_engine_missing(group->queue[op->lane], text, capacity);
    if (op->state == IDIST__XLA_LAUNCHING && !op->job->running && first && first != op->job &&
        first->task)
        return idist__xla_engine_missing(first->task, text, capacity); // waits for its turn
    idist__text_append(text, capacity, "rank %d on %s itself, whose device %s", w->group.rank,
                       w->about.hostname, idist__xla_engine_unfinished(op));

    return 1;
}

static void idist__xla_engine_launch(idist__world *w) { (void)w; }

static idist_status idist__xla_engine_follow(idist__task *t, void *stream) {
    (void)t;
    (void)stream;
    return idist__fail(IDIST_ERR_UNSUPPORTED, "wait_stream: XLA has no streams: use idist_wait");
}

// Continues the call whose job has ended. If the host's backend allows one thread only, leaves this
// to a thread of the program. If the call was cancelled, frees the job. If the result took the
// memory of the input, first makes the result the contents of the buffer.
static void idist__xla_engine_finish(idist__xla *x, idist__xla_job *job) {
    void *output = job->output;

    if (job->task && !x->w->machine.single_threaded) {
        idist__xla_call_worked(job->task);
        return;
    }

    if (job->task) {
        idist__xla_op_of(job->task)->worked = true;
        x->queue_changed = true;
        return;
    }

    if (x->w->life.abandoned) return; // the program's allocator may be gone

    if (job->donated && job->ok) {
        job->output = NULL;
        idist__xla_value_replace(x->home, job->recv, output);
    }

    idist__xla_worker_free(x, job);
}

// Takes jobs until the world ends. Then runs only programs for which other ranks wait.
static void *idist__xla_engine_work(void *arg) {
    idist__xla *x = (idist__xla *)arg;
    idist__world *w = x->w;
    idist__xla_job *job;

    idist__world_lock(w);

    while (!x->stops || (x->ordered && x->ordered->placed)) {
        job = idist__xla_worker_next(x);

        if (!job) {
            idist__os_cond_wait(&x->work, &w->lock, IDIST__FOREVER);
            continue;
        }

        job->running = true;
        idist__os_mutex_unlock(&w->lock);
        job->ok = idist__xla_worker_perform(x, job);
        idist__world_lock(w);
        job->running = false;

        idist__xla_engine_finish(x, job);
        idist__world_wake_driver(w);
    }

    x->has_left = true;
    idist__os_cond_signal(&x->left);
    idist__os_mutex_unlock(&w->lock);

    return NULL;
}

// Ends the worker, as idist_device_api demands of threads that have released the lock. A worker
// stays in a program forever if another rank never runs that program. Then the world is abandoned.
static void idist__xla_engine_end_calls(idist__world *w) {
    idist__xla *x = idist__xla_of(w);
    int64_t deadline_ns = idist__os_clock_deadline(IDIST__XLA_LEAVE_MS);

    if (!x->has_worker) return;
    idist__world_lock(w);
    x->stops = true;
    idist__os_cond_signal(&x->work);
    while (!x->has_left && idist__os_clock_now_ns() < deadline_ns)
        idist__os_cond_wait(&x->left, &w->lock, deadline_ns);
    if (!x->has_left) w->life.abandoned = true;
    idist__os_mutex_unlock(&w->lock);
    x->has_worker = false;

    if (x->has_left) {
        idist__os_thread_join(x->worker);
        return;
    }

    idist__os_thread_detach(x->worker);
    idist__log_print(&w->log, IDIST_LOG_WARN,
                     "a program of XLA has not finished: its thread and the client stay until the "
                     "process ends");
}

static void idist__xla_engine_group_close(idist_group *g) {
    const idist_allocator *mem = &g->w->cfg.mem;
    idist__xla_group *group = idist__xla_group_of(g);

    idist__xla_of(g->w)->host_backend->group_close(g);
    if (!group || g->w->life.abandoned) return;
    idist__mem_free(mem, group->options);
    idist__mem_free(mem, group);
    g->device = NULL;
}

// Frees the device of a world, except what an abandoned worker may touch.
static void idist__xla_engine_free(idist__world *w) {
    idist__xla *x = idist__xla_of(w);
    const idist_allocator *mem = &w->cfg.mem;
    idist__task *t;

    if (x->host_backend) w->backend = x->host_backend;
    if (w->life.abandoned) return;

    for (t = w->tasks.all; t; t = t->older) {
        idist__mem_free(mem, t->device);
        t->device = NULL;
    }

    w->device = NULL;
    w->device_api = NULL;
    idist__os_cond_destroy(&x->work);
    idist__os_cond_destroy(&x->left);
    if (x->home) idist__xla_home_leave(x->home);
    idist__mem_free(mem, x->infos);
    idist__mem_free(mem, x);
}

static void idist__xla_engine_close(idist__world *w, bool clean) {
    idist__xla_engine_free(w);
    w->backend->close(w, clean);
}
