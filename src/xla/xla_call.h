// xla/xla_call.h: the steps of a call on device memory
//
//     idist__xla_call_step    the next step of the call at the head of a lane
//     idist__xla_call_landed  the host's backend has done its part of a call
//     idist__xla_call_worked  the worker has done its part of a call
#pragma once

#include "base/fail.h"
#include "base/mem.h"
#include "base/log.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/task.h"
#include "core/group.h"
#include "core/extent.h"
#include "core/call.h"
#include "xla/pjrt.h"
#include "xla/xla_model.h"
#include "xla/stablehlo.h"
#include "xla/xla_value.h"
#include "xla/xla_program.h"
#include "xla/xla_worker.h"

// Fails the group because this rank's device has failed.
static void idist__xla_call_fail(idist__task *t, const char *why) {
    char cause[IDIST__XLA_REASON + 100];

    snprintf(cause, sizeof cause, "rank %d: the device: %s", t->group->w->group.rank, why);
    idist__group_fail(t->group, IDIST_ERR_DEVICE, cause);
}

// Takes a call out of its lane.
static void idist__xla_call_dequeue(idist__task *t) {
    idist__xla_op *op = idist__xla_op_of(t);
    idist__xla_group *group = idist__xla_group_of(t->group);
    idist__task **at;

    if (op->lane == IDIST__XLA_NO_LANE) return;

    for (at = &group->queue[op->lane]; *at; at = &idist__xla_op_of(*at)->next_queued) {
        if (*at != t) continue;
        if ((*at = op->next_queued) == NULL) group->queue_end[op->lane] = at;
        idist__xla_of(t->group->w)->queue_changed = true; // the next calls may go on
        return;
    }
}

// Ends the device's part of a call. A program on whose place the members have agreed still runs,
// unless a member is lost or its device has failed.
static void idist__xla_call_end(idist__task *t) {
    idist__xla_op *op = idist__xla_op_of(t);
    idist__xla *x = idist__xla_of(t->group->w);
    idist_status status = t->group->status;
    bool may_run = status != IDIST_ERR_PEER_LOST && status != IDIST_ERR_DEVICE;

    idist__xla_call_dequeue(t);
    if (op->job && !(may_run && idist__xla_worker_orphan(x, op->job)))
        idist__xla_worker_release(x, op->job);
    op->job = NULL;
    op->state = IDIST__XLA_ENDED;
}

// Completes a call whose result is in place.
static void idist__xla_call_complete(idist__task *t) {
    idist__xla_call_end(t);
    idist__task_complete(t, IDIST_OK, "");
}

// Gives the host's backend a part of a call. The first part carries the fingerprint of the call,
// which the ranks compare. The part may have ended already on return.
static void idist__xla_call_start_part(idist__task *t, const idist__call *part) {
    idist__xla_op *op = idist__xla_op_of(t);
    const idist_backend_api *host = idist__xla_of(t->group->w)->host_backend;

    t->call = *part;
    t->call.label = op->call.label;
    t->state = IDIST__TASK_ON_HOST;
    t->late.announced = false;
    t->group->w->wait.timers_due_ns = 0; // the timers look at the task again

    if (!idist__kind_is_p2p(part->kind)) {
        t->seq = ++t->group->seq;

        if (t->on_device && !t->whole.kind) {
            t->whole = op->fingerprint;
            t->whole.seq = t->seq;
        }
    }

    memset(t->impl, 0, host->task_nbytes); // to the host's backend the part is a new task
    host->start(t);
}

// Starts an all_reduce that replaces each number with the largest among the members.
static void idist__xla_call_start_max(idist__task *t, uint64_t *numbers, size_t count) {
    idist__call part;

    idist__call_init(&part, IDIST__ALL_REDUCE, numbers, numbers, count, IDIST_U64);
    part.op = IDIST_MAX;
    idist__xla_call_start_part(t, &part);
}

// ---- a call as a program ----

// Returns true if the `count` elements at `p` are exactly a whole buffer of this dtype, or if count
// is 0. Returns false for a buffer of bools, because idist's programs do not have that type.
static bool idist__xla_call_fits(const idist__xla_buffer *buffer, const void *p, size_t count,
                                 idist_dtype dtype) {
    if (!count) return true;
    return buffer && buffer->at == (const char *)p && buffer->count == count &&
           buffer->type == idist__pjrt_type_of(dtype)->number;
}

// Returns true if this rank can perform a call by a program. Other ranks may differ: see
// idist__xla_call_meet.
static bool idist__xla_call_has_program(const idist__task *t) {
    const idist__xla_op *op = idist__xla_op_of(t);
    const idist__call *call = &op->call;
    idist__extent e;

    if (idist__extent_of(t->group, call, &e) != IDIST_OK) return false;
    return idist__xla_call_fits(op->job->send, call->send, e.send, call->dtype) &&
           idist__xla_call_fits(op->job->recv, call->recv, e.recv, call->dtype);
}

// Writes the source of a call's program. Returns false if memory cannot be allocated.
static bool idist__xla_call_write_source(idist__task *t) {
    idist__xla_op *op = idist__xla_op_of(t);
    idist__xla_job *job = op->job;
    const idist__xla_group *group = idist__xla_group_of(t->group);
    const idist__xla_buffer *in = job->send ? job->send : job->recv;
    const idist__xla_buffer *out = job->recv ? job->recv : job->send;

    job->source.text = idist__hlo_write(t->group, &op->call, in, out);
    job->source.options = (char *)idist__mem_alloc(NULL, group->options_nbytes);
    if (!job->source.text || !job->source.options) return false;
    memcpy(job->source.options, group->options, group->options_nbytes);
    job->source.options_nbytes = group->options_nbytes;

    return true;
}

// Finds the program of a call, or lets the worker compile it. Returns false if the call waits for
// the worker, or has failed.
static bool idist__xla_call_find_program(idist__task *t) {
    idist__xla *x = idist__xla_of(t->group->w);
    idist__xla_op *op = idist__xla_op_of(t);
    idist__xla_job *job = op->job;

    op->state = IDIST__XLA_COMPILED;
    if (!idist__xla_call_has_program(t)) return true; // votes with 0

    if (!idist__xla_call_write_source(t)) {
        idist__group_fail_memory(t->group);
        return false;
    }

    job->program = idist__xla_program_find(x->home, &job->source);
    if (job->program) return true;
    op->state = IDIST__XLA_COMPILING;
    idist__xla_worker_add(x, job, IDIST__XLA_COMPILE);

    return false;
}

// Starts the meeting, in which the members compare their programs. A rank whose buffers do not fit,
// or whose plug-in refuses the program, votes with 0. All members run the program if the largest
// vote equals the smallest vote, which is the complement of the largest complement.
static void idist__xla_call_meet(idist__task *t) {
    idist__xla_op *op = idist__xla_op_of(t);
    const idist__xla_program *program = op->job->program;

    op->state = IDIST__XLA_MEETING;
    op->votes[0] = program && program->loaded ? program->hash : 0;
    op->votes[1] = ~op->votes[0];
    idist__xla_call_start_max(t, op->votes, 2);
}

// Returns true if all members have the same program.
static bool idist__xla_call_is_unanimous(const idist__xla_op *op) {
    return op->votes[0] && op->votes[0] == ~op->votes[1];
}

// Proposes a place for the call among the programs that this rank runs. Two proposals are never
// equal, because a proposal modulo world_size is the rank that made it.
static void idist__xla_call_order(idist__task *t) {
    idist__xla *x = idist__xla_of(t->group->w);
    idist__xla_op *op = idist__xla_op_of(t);
    uint64_t n = (uint64_t)x->w->group.size;

    idist__xla_call_dequeue(t); // this is the last part for the host's backend
    op->state = IDIST__XLA_ORDERING;
    op->ticket = op->job->ticket = ++x->clock * n + (uint64_t)x->w->group.rank;
    idist__xla_worker_order(x, op->job);
    idist__xla_call_start_max(t, &op->ticket, 1);
}

// Records the place that the members agreed on, and lists the program under the final ticket.
static void idist__xla_call_place(idist__task *t) {
    idist__xla *x = idist__xla_of(t->group->w);
    idist__xla_op *op = idist__xla_op_of(t);
    uint64_t clock = op->ticket / (uint64_t)x->w->group.size;

    if (x->clock < clock) x->clock = clock;
    op->state = IDIST__XLA_LAUNCHING;
    idist__xla_worker_remove(x, op->job);
    op->job->ticket = op->ticket;
    op->job->placed = true;
    idist__xla_worker_order(x, op->job);
}

// ---- a staged call ----

// Allocates host memory for the buffers of a staged call. Sets *fetches if the worker has to fill
// some of it. Returns false if memory cannot be allocated.
static bool idist__xla_call_allocate(idist__task *t, bool *fetches) {
    const idist_allocator *mem = &t->group->w->cfg.mem;
    idist__xla_op *op = idist__xla_op_of(t);
    idist__xla_job *job = op->job;
    bool is_one = job->send && job->send == job->recv;

    // An all_to_allv in place would overwrite data that is still to be sent.
    if (op->call.kind == IDIST__ALL_TO_ALLV) is_one = false;

    job->fetches_recv =
        job->recv && op->call.kind == IDIST__BROADCAST && op->call.root == t->group->rank;
    *fetches = job->send || job->fetches_recv;
    if (job->send) job->send_copy = (char *)idist__mem_raw(mem, job->send->nbytes);
    if (is_one) job->recv_copy = job->send_copy;
    else if (job->recv) job->recv_copy = (char *)idist__mem_raw(mem, job->recv->nbytes);

    return (!job->send || job->send_copy) && (!job->recv || job->recv_copy);
}

// Begins to stage a call. Returns false if the call waits for the worker, or has failed.
static bool idist__xla_call_stage(idist__task *t) {
    idist__xla_op *op = idist__xla_op_of(t);
    bool fetches = false;

    if (!idist__xla_call_allocate(t, &fetches)) {
        idist__group_fail_memory(t->group);
        return false;
    }

    op->state = IDIST__XLA_FETCHED;
    if (!fetches) return true;
    op->state = IDIST__XLA_FETCHING;
    idist__xla_worker_add(idist__xla_of(t->group->w), op->job, IDIST__XLA_FETCH);

    return false;
}

// Starts a staged call on the host's backend, with the host copies of the buffers.
static void idist__xla_call_start_staged(idist__task *t) {
    idist__xla_op *op = idist__xla_op_of(t);
    idist__xla_job *job = op->job;
    idist__call part = op->call;

    idist__xla_call_dequeue(t);
    op->state = IDIST__XLA_ON_HOST;
    if (job->send) part.send = job->send_copy + ((const char *)op->call.send - job->send->at);
    if (job->recv) part.recv = job->recv_copy + ((char *)op->call.recv - job->recv->at);
    if (part.kind == IDIST__RECV && !part.info) part.info = &op->info;
    if (op->user.used) part.u.user = &op->user;
    idist__xla_call_start_part(t, &part);
}

// Adds a part of the receive buffer to the list of parts that the call has written.
static void idist__xla_call_add_range(idist__xla_job *job, const char *p, size_t nbytes) {
    if (!nbytes) return;
    job->ranges[job->range_count].at = (size_t)(p - job->recv->at);
    job->ranges[job->range_count].nbytes = nbytes;
    job->range_count++;
}

// Lists the parts of the receive buffer that a staged call has written on this rank. Returns false
// if memory cannot be allocated.
static bool idist__xla_call_find_ranges(idist__task *t) {
    const idist_group *g = t->group;
    const idist__call *call = &idist__xla_op_of(t)->call;
    const idist_recv_info *info = call->info ? call->info : &idist__xla_op_of(t)->info;
    idist__xla_job *job = idist__xla_op_of(t)->job;
    size_t size = idist_dtype_size(call->dtype), count;
    char *recv = (char *)call->recv;
    idist__extent e;
    int i;

    job->ranges = (idist__xla_range *)idist__mem_alloc(&g->w->cfg.mem,
                                                       sizeof *job->ranges * (size_t)(g->size + 1));
    if (!job->ranges || idist__extent_of(g, call, &e) != IDIST_OK) return false;
    if (call->kind == IDIST__BROADCAST && call->root == g->rank) return true;
    if (call->kind == IDIST__EXSCAN && g->rank == 0) return true;

    if (call->recvcounts && idist__kind_takes_blocks(call->kind)) {
        for (i = 0; i < g->size; i++) {
            char *at = idist__extent_part(call, recv, i, g->rank, false, &count);
            idist__xla_call_add_range(job, at, count * size);
        }
        return true;
    }

    count = call->kind == IDIST__RECV ? info->count : e.recv;
    idist__xla_call_add_range(job, recv, count * size);

    return true;
}

// Begins to store the result of a staged call. Returns true if there is nothing to store. Returns
// false if the worker copies the result to the device first, or if the group has failed.
static bool idist__xla_call_store(idist__task *t) {
    idist__xla_op *op = idist__xla_op_of(t);
    idist__xla_job *job = op->job;

    if (!job->recv || op->call.peeks) return true;

    if (!idist__xla_call_find_ranges(t)) {
        op->state = IDIST__XLA_STORING;
        idist__group_fail_memory(t->group);
        return false;
    }

    if (!job->range_count) return true;
    op->state = IDIST__XLA_STORING;
    idist__xla_worker_add(idist__xla_of(t->group->w), job, IDIST__XLA_STORE);

    return false;
}

// ---- entry points ----

// Performs the next step of the call at the head of a lane. Returns false if the call waits, or has
// failed.
static bool idist__xla_call_step(idist__task *t) {
    idist__xla_op *op = idist__xla_op_of(t);

    switch (op->state) {
    case IDIST__XLA_QUEUED:
        if (!op->job) { // a call on host memory that came after calls on device memory
            idist__xla_call_dequeue(t);
            op->state = IDIST__XLA_ON_HOST;
            if (op->user.used) op->call.u.user = &op->user;
            idist__xla_call_start_part(t, &op->call);
            return true;
        }

        return op->may_have_program ? idist__xla_call_find_program(t) : idist__xla_call_stage(t);

    case IDIST__XLA_COMPILED: idist__xla_call_meet(t); return true;

    case IDIST__XLA_MET:
        if (!idist__xla_call_is_unanimous(op)) return idist__xla_call_stage(t);
        idist__xla_call_order(t);
        return true;

    case IDIST__XLA_FETCHED: idist__xla_call_start_staged(t); return true;
    default: return false;
    }
}

// Performs the steps of all calls that can go on. Called with the world's lock held.
static void idist__xla_call_run(idist_group *g) {
    idist__xla_group *group = idist__xla_group_of(g);
    idist__task *t;
    int lane;

    if (!group) return;
    idist__fail_begin();

    for (lane = 0; lane < IDIST__XLA_LANES; lane++)
        while ((t = group->queue[lane]) != NULL)
            if (!idist__xla_call_step(t) && group->queue[lane] == t) break;

    idist__fail_end(IDIST_OK); // failures are stored in the tasks
}

// Handles the end of a part on the host. Returns true if the call is over. May be called in the
// middle of any function of the host's backend, so the next step is left to idist__xla_call_run.
static bool idist__xla_call_landed(idist__task *t, idist_status status) {
    idist__xla_op *op = idist__xla_op_of(t);
    idist__xla *x = idist__xla_of(t->group->w);
    bool over = false;

    if (op->state == IDIST__XLA_ENDED) return true;

    if (status != IDIST_OK) {
        idist__xla_call_end(t);
        return true;
    }

    t->state = IDIST__TASK_ON_DEVICE;

    switch (op->state) {
    case IDIST__XLA_MEETING: op->state = IDIST__XLA_MET; break;
    case IDIST__XLA_ORDERING: idist__xla_call_place(t); break;
    case IDIST__XLA_ON_HOST: over = idist__xla_call_store(t); break;
    default: break;
    }

    if (over) idist__xla_call_end(t);
    x->queue_changed = true;
    if (!over && x->w->wait.driver != IDIST__DRIVER_NONE) x->host_backend->wake(x->w);

    return over;
}

// Logs, once per program, that the plug-in refuses the program of a call.
static void idist__xla_call_log_refusal(const idist__task *t) {
    const idist__xla_op *op = idist__xla_op_of(t);

    if (op->job->why[0])
        idist__log_print(&t->group->w->log, IDIST_LOG_INFO,
                         "XLA refuses a program for %s, which is staged through the host: %s",
                         idist__kind_names[op->call.label], op->job->why);
}

// Continues a call after the worker has done its part.
static void idist__xla_call_worked(idist__task *t) {
    idist__xla_op *op = idist__xla_op_of(t);
    idist__xla_job *job = op->job;

    if (!job->ok) {
        if (job->lacks_memory) idist__group_fail_memory(t->group);
        else idist__xla_call_fail(t, job->why);
        return;
    }

    switch (op->state) {
    case IDIST__XLA_COMPILING:
        idist__xla_call_log_refusal(t);
        op->state = IDIST__XLA_COMPILED;
        idist__xla_call_run(t->group);
        return;
    case IDIST__XLA_FETCHING:
        op->state = IDIST__XLA_FETCHED;
        idist__xla_call_run(t->group);
        return;
    default: break;
    }

    // The result of a reduce belongs to the root alone.
    if (job->recv && job->output) {
        void *output = job->output;

        job->output = NULL;

        if (!idist__xla_value_replace(idist__xla_of(t->group->w)->home, job->recv, output)) {
            idist__group_fail_memory(t->group);
            return;
        }
    }

    idist__xla_call_complete(t);
}
