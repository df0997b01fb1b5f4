// mpi/mpi_coll.h: a collective, from its header exchange to its result
//
//     QUEUED -> ENTERING -> COMMITTING -> RUNNING, blocking ------> done
//                  |                                                 ^
//                  |--- some rank is BUSY -> RUNNING, requests ------|
//                  |--- all data was in the headers -----------------|
//
// MPI does not match a blocking collective with a non-blocking one, so all ranks must use the same
// kind. Blocking collectives are twice as fast in some MPIs. The ranks block if no header is BUSY
// or LARGE. If none is BUSY with other calls, collectives never wait for each other in a circle.
//
// A rank blocked inside MPI cannot be told of a failure. So no rank blocks before all have
// committed to the call. A rank that has committed does not leave the call, not even at a deadline
// or because of idist_abort. There are two exceptions: another rank fails before committing, or the
// second exchange is still pending IDIST__FIND_LOST_MS after the group failed. If several threads
// of a rank make calls, the rank sets BUSY when it commits, because another thread may make a
// group, and block in MPI, before this call runs.
//
// Calls after which all ranks enter MPI together (idist__mpi_coll_binds) commit even if their data
// was in the headers.
//
// The state of an exchange belongs to the group and not to a task, so a quick call
// (idist__mpi_coll_quick) that returns early loses nothing. The task that follows for the same call
// finds the exchange in progress and continues it. The path of a collective:
//
//     idist__call_locked
//       |
//       | blocking, and no other task
//       +--> idist__mpi_coll_quick
//       |      idist__mpi_coll_exchange     begins; polls a few times
//       |        done, data in the headers -------------------------> result, no task
//       |        otherwise: no result, and ...
//       v
//     idist__mpi_engine_start               queues a task for the call
//       v
//     idist__mpi_coll_step                  first in the queue, at every poll
//       |  QUEUED, ENTERING, COMMITTING:
//       |    idist__mpi_coll_exchange       begins, unless the quick call has; polls once
//       |
//       |  ENTERING is done
//       +--> idist__mpi_coll_entered        compares the headers; then either
//       |      idist__exchange_commit         COMMITTING: the same exchange once more, or
//       |      idist__mpi_coll_run            RUNNING by requests
//       |  COMMITTING is done
//       +--> idist__mpi_coll_run            hands the call to MPI, or takes the result from
//              v                            the headers
//            idist__mpi_coll_done           RUNNING is done: completes the task
#pragma once

#include "os/clock.h"
#include "base/mem.h"
#include "base/dtype.h"
#include "base/reduce_op.h"
#include "launch/env.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/fingerprint.h"
#include "core/explain.h"
#include "core/task.h"
#include "core/together.h"
#include "core/group.h"
#include "core/extent.h"
#include "mpi/mpi_model.h"
#include "mpi/mpi_error.h"
#include "mpi/mpi_type.h"
#include "mpi/native.h"
#include "mpi/exchange.h"
#include "mpi/control.h"

// Returns true if the counts of a v-form agree for all pairs of ranks. Each header carries a hash
// of what its rank sends minus a hash of what its rank expects. The sum is 0 if all pairs agree.
static bool idist__mpi_coll_balanced(const idist_group *g) {
    uint64_t sum = 0, balance;
    int i;

    for (i = 0; i < g->size; i++) {
        memcpy(&balance, idist__mpi_model_group(g)->headers[i].data, sizeof balance);
        sum += balance;
    }

    return sum == 0;
}

// Names the pair of ranks whose counts differ. All ranks know that there is such a pair, so they
// exchange all counts to find it.
static void idist__mpi_coll_find_unbalanced(const idist_group *g, const idist__task *t, char *text,
                                            size_t capacity) {
    const idist_allocator *mem = &g->w->cfg.mem;
    size_t n = (size_t)g->size, i;
    uint64_t *all = (uint64_t *)idist__mem_alloc(mem, sizeof *all * 2 * n * (n + 1)),
             *own = all ? all + 2 * n * n : NULL;
    MPI_Request request;
    int error;

    snprintf(text, capacity, "the counts of two ranks differ in %s #%u",
             idist__kind_names[t->call.label], (unsigned)t->seq);
    if (!all) return;
    for (i = 0; i < n; i++) own[i] = idist__extent_pair(g, &t->call, (int)i, true);
    for (i = 0; i < n; i++) own[n + i] = idist__extent_pair(g, &t->call, (int)i, false);

    error = MPI_Iallgather(own, 2 * g->size, MPI_UINT64_T, all, 2 * g->size, MPI_UINT64_T,
                           idist__mpi_model_group(g)->comm, &request);

    if (error != MPI_SUCCESS ||
        idist__mpi_error_await(&request, IDIST__CLOSE_MS, "MPI_Iallgather") != IDIST_OK) {
        idist__mpi_of(g->w)->abandoned = true; // MPI may still use the memory
        return;
    }

    for (i = 0; i < n * n; i++) {
        size_t from = i / n, to = i % n;
        uint64_t sent = all[from * 2 * n + to], expected = all[to * 2 * n + n + from];

        if (sent == expected) continue;
        idist__explain_pair(g->ranks[from], sent, g->ranks[to], expected, t, text, capacity);
        break;
    }

    idist__mem_free(mem, all);
}

// Returns true if all ranks enter MPI together right after this call, so that no rank may be
// missing.
static bool idist__mpi_coll_binds(const idist__call *call) {
    return call->label == IDIST__NEW_GROUP || call->label == IDIST__SPLIT ||
           call->label == IDIST__FINALIZE;
}

// Begins the header exchange.
static void idist__mpi_coll_enter(idist_group *g, const idist__call *call,
                                  const idist__fingerprint *fingerprint, bool busy) {
    int contribution = idist__exchange_contribution(g, call);
    const void *data = call->kind == IDIST__BROADCAST ? call->recv : call->send;
    size_t nbytes = contribution > 0 ? (size_t)contribution : 0;
    uint32_t flags = busy ? IDIST__HEADER_BUSY : 0;
    uint64_t balance;

    if (!idist__native_fits(g, call)) flags |= IDIST__HEADER_LARGE;
    if (idist__extent_call_in_place(g, call)) flags |= IDIST__HEADER_IN_PLACE;

    if (idist__kind_is_v(call->kind)) {
        balance = idist__extent_balance(g, call);
        data = &balance;
        nbytes = sizeof balance;
    }

    idist__exchange_begin(g, fingerprint, flags, data, nbytes);
}

// Begins the header exchange of this call unless it is in progress already, then polls it up to
// `polls` times. On FAILED, *error is the error code of MPI.
static idist__exchange_state idist__mpi_coll_exchange(idist_group *g, const idist__call *call,
                                                      const idist__fingerprint *fingerprint,
                                                      bool busy, int polls, int *error) {
    idist__exchange_state state = IDIST__EXCHANGE_PENDING;
    int i;

    if (idist__mpi_model_group(g)->exchange_seq != fingerprint->seq)
        idist__mpi_coll_enter(g, call, fingerprint, busy);
    for (i = 0; i < polls && state == IDIST__EXCHANGE_PENDING; i++)
        state = idist__exchange_step(g, error);

    return state;
}

static void idist__mpi_coll_done(idist__mpi *mpi, idist__task *t) {
    idist__mpi_op *op = idist__mpi_op_of(t);
    const char *function = op->native.function;
    int error;

    op->phase = IDIST__PHASE_WAITING;
    mpi->poll_ns = 0;
    mpi->w->wait.moved_count++;
    error = idist__native_end(&op->native);

    if (error == MPI_SUCCESS) idist__task_complete(t, IDIST_OK, "");
    else idist__mpi_error_fail_group(mpi, t->group, function, error);
}

// Takes the first collective from its queue. Hands it to MPI, or completes it if all data was in
// the headers.
static void idist__mpi_coll_run(idist__mpi *mpi, idist__task *t, bool blocking) {
    idist__mpi_op *op = idist__mpi_op_of(t);

    idist__mpi_model_group(t->group)->queue_head = op->next;
    op->next = NULL;

    if (!op->native.group) {
        idist__exchange_result(t->group, &t->call);
        idist__task_complete(t, IDIST_OK, "");
        return;
    }

    op->phase = IDIST__PHASE_RUNNING;
    idist__native_begin(&op->native, blocking);
    if (blocking || op->native.error != MPI_SUCCESS) idist__mpi_coll_done(mpi, t);
}

// Compares the headers after the first exchange, then commits to the call or runs it.
static void idist__mpi_coll_entered(idist__mpi *mpi, idist__task *t) {
    idist_group *g = t->group;
    idist__native *nat = &idist__mpi_op_of(t)->native;
    uint32_t flags = idist__exchange_flags(g);
    char text[400];
    bool small = idist__exchange_contribution(g, &t->call) >= 0,
         agree = idist__exchange_agree(g, text, sizeof text), commits;

    if (agree && idist__kind_is_v(t->call.kind) && !idist__mpi_coll_balanced(g)) {
        idist__mpi_coll_find_unbalanced(g, t, text, sizeof text);
        agree = false;
    }

    if (!agree) {
        idist__mpi_model_group(g)->failure_known = true;
        idist__group_fail(g, IDIST_ERR_MISMATCH, text);
        return;
    }

    if (!small) idist__native_init(nat, g, &t->call, flags);

    if (nat->error != MPI_SUCCESS) {
        idist__mpi_error_fail_group(mpi, g, nat->function, nat->error);
        return;
    }

    if (small) commits = idist__mpi_coll_binds(&t->call);
    else commits = !(flags & (IDIST__HEADER_BUSY | IDIST__HEADER_LARGE));

    if (commits) {
        idist__mpi_op_of(t)->phase = IDIST__PHASE_COMMITTING;
        idist__exchange_commit(g);
    } else {
        idist__mpi_coll_run(mpi, t, false);
    }
}

// Returns the union of all ranks' flags as far as one rank can tell without an exchange. In v-forms
// this rank does not know whether the counts of the other ranks fit, so it sets LARGE.
static uint32_t idist__mpi_coll_unchecked_flags(const idist_group *g, const idist__call *call) {
    uint32_t flags = idist__extent_call_in_place(g, call) ? IDIST__HEADER_IN_PLACE : 0;

    if (idist__kind_is_v(call->kind) || !idist__native_fits(g, call)) flags |= IDIST__HEADER_LARGE;
    return flags;
}

// Returns true if t binds (idist__mpi_coll_binds) and another collective of this rank has
// committed. Other ranks may block in that collective before they enter t.
static bool idist__mpi_coll_must_wait(const idist__mpi *mpi, const idist__task *t) {
    const idist__task *other;

    if (!idist__mpi_coll_binds(&t->call)) return false;

    for (other = mpi->w->tasks.running; other; other = other->next)
        if (idist__mpi_op_of(other)->phase == IDIST__PHASE_COMMITTING) return true;

    return false;
}

// Runs one step of the first collective of a group. Returns false if it has to wait.
static bool idist__mpi_coll_step(idist__mpi *mpi, idist__task *t) {
    idist_group *g = t->group;
    idist__mpi_op *op = idist__mpi_op_of(t);
    idist__fingerprint fingerprint;
    idist__exchange_state state;
    bool busy = idist__task_is_async(t) || t->next || t->prev || idist__together_now.depth;
    int error = MPI_SUCCESS;

    if (op->phase == IDIST__PHASE_QUEUED && mpi->w->cfg.unchecked) {
        idist__native_init(&op->native, g, &t->call, idist__mpi_coll_unchecked_flags(g, &t->call));
        idist__mpi_coll_run(mpi, t, !idist__task_is_async(t));
        return true;
    }

    if (op->phase == IDIST__PHASE_QUEUED) {
        if (idist__mpi_coll_must_wait(mpi, t)) return false;
        op->phase = IDIST__PHASE_ENTERING;
    }

    fingerprint = idist__fingerprint_of_task(t, IDIST__ALGO_AUTO);
    state = idist__mpi_coll_exchange(g, &t->call, &fingerprint, busy, 1, &error);
    if (state == IDIST__EXCHANGE_PENDING) return false;

    if (state == IDIST__EXCHANGE_FAILED)
        idist__mpi_error_fail_group(mpi, g, "the header exchange", error);
    else if (op->phase == IDIST__PHASE_ENTERING) idist__mpi_coll_entered(mpi, t);
    else idist__mpi_coll_run(mpi, t, !(idist__exchange_flags(g) & IDIST__HEADER_BUSY));

    return true;
}

static void idist__mpi_coll_progress(idist__mpi *mpi, idist_group *g) {
    idist__mpi_group *mg = idist__mpi_model_group(g);
    while (mg->queue_head && g->status == IDIST_OK && idist__mpi_coll_step(mpi, mg->queue_head))
        continue;
}

// Ends a call to which this rank committed before the group failed. Other ranks may wait for us
// inside MPI; if so, the call succeeds here as it does there.
static void idist__mpi_coll_keep_commitment(idist__mpi *mpi, idist__task *t) {
    idist__mpi_group *mg = idist__mpi_model_group(t->group);
    idist__exchange_state state = IDIST__EXCHANGE_PENDING;
    int64_t deadline_ns = idist__os_clock_deadline(IDIST__FIND_LOST_MS);
    bool late = false;
    int error;

    while (!mg->commit_refused && state == IDIST__EXCHANGE_PENDING && !late) {
        state = idist__exchange_step(t->group, &error);
        idist__control_progress(mpi);
        late = idist__os_clock_now_ns() > deadline_ns;
    }

    if (late && state == IDIST__EXCHANGE_PENDING) {
        mg->committed_seq--; // ranks that learn of our failure will not wait for us
        mpi->abandoned = true;
    }

    if (state == IDIST__EXCHANGE_DONE && !mg->commit_refused)
        idist__mpi_coll_run(mpi, t, !(idist__exchange_flags(t->group) & IDIST__HEADER_BUSY));
}

// Runs a blocking call without an exchange (IDIST_CHECK=0). The most common calls, plain
// all_reduces, go to MPI directly.
static bool idist__mpi_coll_direct(idist__mpi *mpi, idist_group *g, const idist__call *call) {
    const void *in = call->send == call->recv ? MPI_IN_PLACE : call->send;
    idist__native nat;
    int error;

    if (call->kind == IDIST__ALL_REDUCE && call->count && call->count <= IDIST__MPI_COUNT &&
        !idist__reduce_op_is_user(call->op) && call->op != IDIST_AVG &&
        !idist__dtype_is_narrow(call->dtype) && idist__mpi_type_exists(call->dtype)) {
        error = MPI_Allreduce(in, call->recv, (int)call->count, idist__mpi_type_of(call->dtype),
                              idist__mpi_type_builtin_op(mpi, call->op, call->dtype),
                              idist__mpi_model_group(g)->comm);
    } else {
        idist__native_init(&nat, g, call, idist__mpi_coll_unchecked_flags(g, call));
        idist__native_begin(&nat, true);
        error = idist__native_end(&nat);
    }

    if (error == MPI_SUCCESS) g->seq++;
    else idist__mpi_error_fail_group(mpi, g, "a collective of MPI", error);

    return error == MPI_SUCCESS;
}

// Polls for control messages if no quick call has done so for a millisecond, because the group may
// have failed meanwhile.
static void idist__mpi_coll_poll_control(idist__mpi *mpi) {
    int64_t now_ns = idist__os_clock_now_ns();
    int i;

    if (now_ns - mpi->polled_ns <= IDIST__MS) return;
    for (i = 0; i < IDIST__QUICK_CONTROL_POLLS; i++) idist__control_progress(mpi);
    mpi->polled_ns = now_ns;
}

// Runs a blocking collective without a task if all data fits into headers and the other ranks enter
// it soon. Otherwise, and after any error, returns false; the task that follows continues the
// exchange. With IDIST_CHECK=0, hands the call to MPI.
static bool idist__mpi_coll_quick(idist_group *g, const idist__call *call) {
    idist__mpi *mpi = idist__mpi_of(g->w);
    idist__exchange_state state;
    idist__fingerprint fingerprint;
    char text[400];
    int error,
        polls = mpi->w->wait.spin_ns ? IDIST__QUICK_POLLS : IDIST__QUICK_POLLS_OVERSUBSCRIBED;

    if (!idist__kind_is_collective(call->kind) || g->size == 1) return false;
    if (mpi->w->cfg.unchecked) return idist__mpi_coll_direct(mpi, g, call);
    idist__mpi_coll_poll_control(mpi);
    if (g->status != IDIST_OK) return false;

    // A call that binds, or that needs MPI, only begins here, so that its headers are sent early.
    if (idist__exchange_contribution(g, call) < 0 || idist__mpi_coll_binds(call)) polls = 0;
    fingerprint = idist__fingerprint_of_call(g->w, call, g->seq + 1);
    state = idist__mpi_coll_exchange(g, call, &fingerprint, false, polls, &error);
    if (state == IDIST__EXCHANGE_FAILED)
        idist__mpi_error_fail_group(mpi, g, "the header exchange", error);
    if (state != IDIST__EXCHANGE_DONE || !idist__exchange_agree(g, text, sizeof text)) return false;

    idist__exchange_result(g, call);
    g->seq++;

    return true;
}
