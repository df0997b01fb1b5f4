// ring/algo/host_run.h: executes the plan of a call over several hosts
//
// A call over several hosts has a plan, which is a list of steps in rounds (ring/algo/host_plan.h).
// The call executes one round after another. Each step of a round is a separate task. The group of
// the task consists of the members on this host, or of the leaders of all hosts. The steps of a
// round run at the same time.
//
// Calls on the same group queue up (idist__ring_group.first), and only the first call runs. So all
// ranks take the steps in the same order. The steps of two calls never mix on the inner groups.
//
//   idist__host_run_start      appends a call to the queue, and runs it if the queue was empty
//   idist__host_run_call       makes the plan; in each round, begins steps, waits, divides averages
//   idist__host_run_progress   resumes the first call of each group once its round has completed
//   idist__host_run_cancel     removes a call from the queue once no step uses the call's memory
//
// A call owns the tasks of its steps (idist__host_op.running). The tasks are freed when their round
// has completed or the call is cancelled. If a step fails, the call fails with the same status and
// text.
#pragma once

#include "base/reduce.h"
#include "launch/env.h"
#include "core/model.h"
#include "core/fingerprint.h"
#include "core/task.h"
#include "ring/msg/ring_model.h"
#include "ring/msg/op.h"
#include "ring/algo/host_plan.h"

static void idist__host_run_no_memory(const idist__task *t) {
    idist__ring_fail_memory(idist__ring_of(t->group->w), t->group);
}

// Begins a step, and stores the task of the step in *begun. The call owns the task, which may end
// before this function returns. If the task fails, the call also fails. If the step cannot begin,
// *begun stays NULL, and the call fails.
static void idist__host_run_begin_step(idist__task *t, const idist__host_step *step,
                                       idist__task **begun) {
    idist__op *op = idist__op_of(t);
    idist_group *group = step->group;
    bool on_leaders = group == idist__ring_group_of(t->group)->leaders;
    bool scales = op->user && !op->user->fn;
    idist__task *child;

    if (group->status != IDIST_OK) { // NOLINT(clang-analyzer-core.NullDereference)
        idist__ring_fail(idist__ring_of(t->group->w), t->group, group->status, group->cause);
        return;
    }

    child = idist__task_new(group);
    if (!child) {
        idist__host_run_no_memory(t);
        return;
    }

    child->call = t->call;
    child->call.kind = step->kind;
    child->call.send = step->send;
    child->call.recv = step->recv;
    child->call.count = step->count;
    child->call.recvcounts = step->recvcounts;
    child->call.recvdispls = step->recvdispls;
    child->call.root = step->root;
    child->call.u.user = op->user;
    if (t->call.op == IDIST_AVG || (scales && on_leaders)) child->call.op = IDIST_SUM;

    child->whole = idist__fingerprint_of_task(t, IDIST__ALGO_BY_HOST);
    child->parent_past = op->past;
    child->timeout_ms = -1; // the parent has a deadline, and says what it waits for
    child->late.announced = true;
    child->late.warned = true;
    *begun = child;
    idist__task_start(child);
}

// Begins all steps of the current round.
static void idist__host_run_begin_round(idist__task *t) {
    idist__host_op *host = &idist__op_of(t)->u.host;
    const idist__host_step *first = &host->steps[host->current];
    size_t i, left = host->step_count - host->current;

    for (i = 0; i < left && first[i].round == first->round; i++) {
        host->running_count = i + 1;
        idist__host_run_begin_step(t, &first[i], &host->running[i]);
        if (t->group->status != IDIST_OK || !host->running[i]) return; // the plan may be freed
    }
}

// Returns true if all steps of the current round have ended, or one of them has failed, and
// idist__host_run_round_done has not freed the tasks yet.
static bool idist__host_run_round_ended(const idist__host_op *host) {
    size_t i, done_count = 0;

    for (i = 0; i < host->running_count && host->running[i]; i++) {
        if (host->running[i]->state != IDIST__TASK_DONE) continue;
        if (host->running[i]->status != IDIST_OK) return true;
        done_count++;
    }

    return done_count && done_count == host->running_count;
}

// Returns the task of a step that a call waits for, or NULL if there is none.
IDIST__UNUSED static idist__task *idist__host_run_awaited_step(const idist__task *t) {
    const idist__host_op *host = &idist__op_of(t)->u.host;
    size_t i;

    for (i = 0; i < host->running_count; i++)
        if (host->running[i] && host->running[i]->state != IDIST__TASK_DONE)
            return host->running[i];

    return NULL;
}

// If the current round has completed, frees its tasks and returns true. If a step has failed, fails
// the call and returns false; the tasks are freed when the call is cancelled.
static bool idist__host_run_round_done(idist__task *t) {
    idist__host_op *host = &idist__op_of(t)->u.host;
    size_t i;

    if (!idist__host_run_round_ended(host)) return false;

    for (i = 0; i < host->running_count; i++) {
        const idist__task *child = host->running[i];

        if (!child || child->state != IDIST__TASK_DONE || child->status == IDIST_OK) continue;
        // The step failed by itself or with its group.
        idist__ring_fail(idist__ring_of(t->group->w), t->group, child->status,
                         child->group->status == IDIST_OK ? child->text : child->group->cause);
        return false;
    }

    for (i = 0; i < host->running_count; i++) {
        if (host->running[i]) idist__task_free(host->running[i]);
        host->running[i] = NULL;
    }

    return true;
}

// Divides the sums that the current round has completed if the operation is AVG, and advances to
// the next round.
static void idist__host_run_next_round(idist__task *t) {
    const idist__op *op = idist__op_of(t);
    idist__host_op *host = &idist__op_of(t)->u.host;
    size_t end = host->current + host->running_count;

    for (; host->current < end; host->current++) {
        const idist__host_step *step = &host->steps[host->current];
        if (step->completes_sum && t->call.op == IDIST_AVG)
            idist__reduce_divide(step->recv, step->count, t->call.dtype, op->n);
    }

    host->running_count = 0;
}

// Removes a call from the queue of its group.
static void idist__host_run_leave_queue(idist__task *t) {
    idist__ring_group *rg = idist__ring_group_of(t->group);
    idist__task **at, *before = NULL;

    for (at = &rg->first; *at && *at != t; at = &idist__op_of(*at)->u.host.next) before = *at;

    if (*at) *at = idist__op_of(t)->u.host.next;
    if (rg->last == t) rg->last = before;
}

// Runs a call until it must wait or has completed.
static void idist__host_run_call(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__host_op *host = &op->u.host;

    if (!host->steps && !idist__host_plan_make(t)) {
        idist__host_run_no_memory(t);
        return;
    }

    IDIST__CO_BEGIN(op)

    while (host->current < host->step_count) {
        idist__host_run_begin_round(t);
        IDIST__CO_AWAIT(op, idist__host_run_round_done(t));
        idist__host_run_next_round(t);
    }

    idist__host_run_leave_queue(t);
    idist__op_done(t);
    IDIST__CO_END(op)
}

// Fills in the backend's part of a task for a call over several hosts.
static void idist__host_run_prepare(idist__task *t) {
    idist__op_prepare(t);
    idist__op_of(t)->algorithm = IDIST__ALGO_BY_HOST;
    idist__op_of(t)->run = idist__host_run_call;
}

// Appends a call to the queue of its group, and runs the call if it is the first in the queue.
static void idist__host_run_start(idist__task *t) {
    idist__ring_group *rg = idist__ring_group_of(t->group);

    if (rg->last) idist__op_of(rg->last)->u.host.next = t;
    else rg->first = t;
    rg->last = t;
    if (rg->first == t) idist__op_run(t);
}

// Removes a call from the queue and frees the tasks of its steps. Returns false if a step is still
// running, because the step uses the memory of the call. Normally no step is running, because the
// two inner groups fail before the group to which they belong.
static bool idist__host_run_cancel(idist__task *t) {
    idist__host_op *host = &idist__op_of(t)->u.host;
    size_t i;

    for (i = 0; i < host->running_count; i++)
        if (host->running[i] && host->running[i]->state != IDIST__TASK_DONE) return false;

    idist__host_run_leave_queue(t);

    for (i = 0; i < host->running_count; i++) {
        if (host->running[i]) idist__task_free(host->running[i]);
        host->running[i] = NULL;
    }

    return true;
}

// Resumes the first call of each group once its round has completed, and the next call once the
// first call is done.
static void idist__host_run_progress(idist__ring *ring) {
    const idist_group *g;

    for (g = &ring->w->group; g; g = g->next) {
        idist__ring_group *rg = g->rank >= 0 && g->impl ? idist__ring_group_of(g) : NULL;

        while (rg && rg->first && !ring->failed) {
            const idist__task *t = rg->first;
            const idist__op *op = idist__op_of(t);
            const idist__host_op *host = &op->u.host;

            if ((host->running_count && !idist__host_run_round_ended(host)) || op->running) break;
            idist__op_run(rg->first);
            if (rg->first == t && !idist__host_run_round_ended(host)) break;
        }
    }
}
