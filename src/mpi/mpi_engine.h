// mpi/mpi_engine.h: progress, sleep, cancellation, failure
//
// These are the functions that the core calls while a world is open. MPI offers no way to sleep
// until something happens. So a rank that has nothing to do polls. Between two polls the rank
// sleeps outside MPI, longer each time. A call by another thread wakes the rank through a futex.
//
// When a group fails on one rank, that rank sends FAILED to all other members. Under ULFM the rank
// also revokes the communicator, which releases ranks that are blocked in MPI.
#pragma once

#include "os/clock.h"
#include "os/thread.h"
#include "os/wake.h"
#include "base/reduce_op.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/world.h"
#include "core/task.h"
#include "core/group.h"
#include "core/self.h"
#include "mpi/mpi_model.h"
#include "mpi/native.h"
#include "mpi/exchange.h"
#include "mpi/control.h"
#include "mpi/comms.h"
#include "mpi/mpi_coll.h"
#include "mpi/mpi_p2p.h"
#include "mpi/mpi_wait.h"

// Handles one control message.
static void idist__mpi_engine_deliver(idist__mpi *mpi, int source, idist__mpi_control *control,
                                      const void *payload) {
    idist_group *g = idist__world_find_group(mpi->w, control->ctx);

    mpi->poll_ns = 0;

    switch (control->type) {
    case IDIST__CONTROL_EAGER:
    case IDIST__CONTROL_READY_TO_SEND:
        mpi->peers[source].received++;
        mpi->w->wait.moved_count++;
        if (g && g->status != IDIST_OK) break;
        if (!g || !idist__mpi_p2p_match(mpi, g, source, control, payload))
            idist__control_keep(mpi, source, control, payload);
        break;
    case IDIST__CONTROL_CLEAR_TO_SEND: idist__mpi_p2p_cleared(mpi, source, control); break;
    case IDIST__CONTROL_WAITING: idist__mpi_wait_received(mpi, source, control); break;
    case IDIST__CONTROL_ENTERED:
        if (g) idist__mpi_wait_seen(g, source, &control->fingerprint);
        break;
    case IDIST__CONTROL_ABSENT:
        mpi->peers[source].absent_ctx = control->ctx;
        mpi->peers[source].absent_seq = control->fingerprint.seq;
        idist__mpi_wait_find_deadlock(mpi, source);
        break;
    case IDIST__CONTROL_FREED:
        // the group may not exist here yet
        if (!idist__comms_leave(mpi, control->ctx))
            idist__control_keep(mpi, source, control, payload);
        break;
    case IDIST__CONTROL_FAILED:
        if (!g) { // the group does not exist yet, or no longer exists
            if (!idist__comms_keep(mpi, control->ctx))
                idist__control_keep(mpi, source, control, payload);
            break;
        }

        if ((int32_t)(control->sent - idist__mpi_model_group(g)->committed_seq) < 0)
            idist__mpi_model_group(g)->commit_refused = true;
        idist__group_fail(g, (idist_status)control->tag, (const char *)payload);
        break;
    default: break;
    }
}

static void idist__mpi_engine_progress(idist__world *w) {
    idist__mpi *mpi = idist__mpi_of(w);
    idist_group *g;
    idist__task *t;
    uint32_t ended;

    if (mpi->finalized) return;
    idist__control_progress(mpi);
    if (mpi->outgoing) idist__control_sweep(mpi);
    for (g = &w->group; g; g = g->next)
        if (g->rank >= 0) idist__mpi_coll_progress(mpi, g);

    // The list changes whenever a task ends; then start over.
    do {
        ended = w->wait.ended_count;

        for (t = w->tasks.running; t && ended == w->wait.ended_count; t = t->next) {
            idist__mpi_op *op = idist__mpi_op_of(t);
            bool running = op->phase == IDIST__PHASE_RUNNING;

            if (!running && op->phase != IDIST__PHASE_TRANSFERRING) continue;
            if (!idist__native_done(&op->native)) continue;
            if (running) idist__mpi_coll_done(mpi, t);
            else idist__mpi_p2p_done(mpi, t);
        }
    } while (ended != w->wait.ended_count);
}

// Records the calling thread, and whether several threads have called.
static void idist__mpi_engine_count_threads(idist__mpi *mpi) {
    idist__os_thread self = idist__os_thread_self();

    if (mpi->called && !idist__os_thread_equal(mpi->last_caller, self)) mpi->multithreaded = true;
    mpi->last_caller = self;
    mpi->called = true;
}

static void idist__mpi_engine_start(idist__task *t) {
    idist_group *g = t->group;
    idist__mpi *mpi = idist__mpi_of(g->w);
    idist__mpi_group *mg = idist__mpi_model_group(g);
    idist__mpi_op *op = idist__mpi_op_of(t);

    idist__mpi_engine_count_threads(mpi);
    memset(op, 0, sizeof *op);
    op->phase = IDIST__PHASE_WAITING;

    if (idist__kind_reduces(t->call.kind) && idist__reduce_op_is_user(t->call.op)) {
        op->user = *idist__world_user_op(g, &t->call);
        t->call.u.user = &op->user;
    }

    if (g->status != IDIST_OK)
        idist__task_complete(t, g->status, g->cause); // idist__mpi_coll_quick has failed the group
    else if (t->call.kind == IDIST__SEND) idist__mpi_p2p_send(mpi, t);
    else if (t->call.kind == IDIST__RECV) idist__mpi_p2p_receive(mpi, t);
    else if (g->size == 1) idist__self_collective(t);
    else {
        op->phase = IDIST__PHASE_QUEUED;
        if (mg->queue_head) idist__mpi_op_of(mg->queue_tail)->next = t;
        else mg->queue_head = t;
        mg->queue_tail = t;
        idist__mpi_coll_progress(mpi, g);
    }
}

// Returns true if MPI is moving the data of some task.
static bool idist__mpi_engine_has_data_in_flight(const idist__world *w) {
    const idist__task *t;

    for (t = w->tasks.running; t; t = t->next) {
        idist__mpi_phase phase = idist__mpi_op_of(t)->phase;
        if (phase == IDIST__PHASE_RUNNING || phase == IDIST__PHASE_TRANSFERRING) return true;
    }

    return false;
}

// Returns the next pause between polls, at most max_ns.
static int64_t idist__mpi_engine_next_pause(int64_t pause_ns, int64_t max_ns) {
    if (!pause_ns) pause_ns = IDIST__POLL_FIRST_NS;
    else if (pause_ns < IDIST__POLL_RAMP_NS) pause_ns *= 2;
    else pause_ns += pause_ns / 64;

    return pause_ns < max_ns ? pause_ns : max_ns;
}

static void idist__mpi_engine_sleep(idist__world *w, int64_t until_ns) {
    idist__mpi *mpi = idist__mpi_of(w);
    bool in_flight = idist__mpi_engine_has_data_in_flight(w);
    uint32_t wake_count = mpi->wake_count;
    int64_t wake_ns;

    // Keep polling, as a blocking call of MPI would: only our polling moves the data.
    if (in_flight && w->wait.driver == IDIST__DRIVER_CALLER) {
        idist__os_mutex_unlock(&w->lock);
        idist__os_thread_yield();
        idist__os_mutex_lock(&w->lock);
        return;
    }

    mpi->poll_ns = idist__mpi_engine_next_pause(mpi->poll_ns, in_flight || mpi->outgoing
                                                                  ? IDIST__POLL_TRANSFER_NS
                                                                  : IDIST__POLL_MAX_NS);
    wake_ns = idist__os_clock_now_ns() + mpi->poll_ns;
    idist__os_mutex_unlock(&w->lock);
    idist__os_wake_await_word(&mpi->wake_count, wake_count,
                              wake_ns < until_ns ? wake_ns : until_ns);
    idist__os_mutex_lock(&w->lock);
}

static void idist__mpi_engine_wake(idist__world *w) {
    __atomic_fetch_add(&idist__mpi_of(w)->wake_count, 1u, __ATOMIC_SEQ_CST);
    idist__os_wake_word(&idist__mpi_of(w)->wake_count);
}

// Cancels a send or receive. Returns true only for a receive that has matched no message; in all
// other cases the peer is involved.
static bool idist__mpi_engine_cancel_p2p(idist__task *t) {
    idist__mpi *mpi = idist__mpi_of(t->group->w);
    idist__mpi_op *op = idist__mpi_op_of(t);
    idist__task **at = &idist__mpi_model_group(t->group)->receives;
    bool receives = t->call.kind == IDIST__RECV;
    int i;

    while (*at && *at != t) at = &idist__mpi_op_of(*at)->next;
    if (*at) *at = op->next;

    // Replace the announced WAITING with a WAITING that has no flags.
    if (receives && t->late.announced && t->call.root >= 0)
        idist__mpi_wait_send(t, t->call.root, 0);
    if (op->phase == IDIST__PHASE_WAITING) return receives;

    if (receives) {
        for (i = 0; i < op->native.request_count; i++)
            if (op->native.requests[i] != MPI_REQUEST_NULL) MPI_Cancel(&op->native.requests[i]);
        mpi->retired_tags[op->data_tag / 8] |= (unsigned char)(1u << op->data_tag % 8);
    }

    idist__native_abandon(&op->native);
    op->phase = IDIST__PHASE_WAITING;

    return false;
}

// Cancels a receive that has matched no message. After a match the receive cannot be cancelled,
// because MPI may be writing to the buffer. Returns true if the receive was cancelled.
static bool idist__mpi_engine_retract(idist__task *t) {
    return idist__mpi_op_of(t)->phase == IDIST__PHASE_WAITING && idist__mpi_engine_cancel_p2p(t);
}

static bool idist__mpi_engine_cancel(idist__task *t) {
    idist_group *g = t->group;
    idist__mpi_group *mg = idist__mpi_model_group(g);
    idist__mpi_op *op = idist__mpi_op_of(t);
    idist__task **at = &mg->queue_head, *before = NULL;

    if (idist__kind_is_p2p(t->call.kind)) return idist__mpi_engine_cancel_p2p(t);
    if (op->native.group) idist__native_abandon(&op->native);

    while (*at && *at != t) {
        before = *at;
        at = &idist__mpi_op_of(before)->next;
    }

    if (*at) *at = op->next;
    if (mg->queue_tail == t) mg->queue_tail = before;
    op->phase = IDIST__PHASE_WAITING;

    return false;
}

static void idist__mpi_engine_tell(idist_group *g) {
    idist__mpi *mpi = idist__mpi_of(g->w);
    idist__mpi_group *mg = idist__mpi_model_group(g);
    idist__task *first = mg->queue_head;
    idist__mpi_control failed;
    int i;

    if (first && idist__mpi_op_of(first)->phase == IDIST__PHASE_COMMITTING)
        idist__mpi_coll_keep_commitment(mpi, first);
    idist__exchange_cancel(g);
    if (mg->failure_known) return;
    mg->failure_known = true;

    memset(&failed, 0, sizeof failed);
    failed.type = IDIST__CONTROL_FAILED;
    failed.ctx = g->ctx;
    failed.tag = (int32_t)g->status;
    failed.sent = mg->committed_seq;
    for (i = 0; i < g->size; i++)
        if (i != g->rank)
            idist__control_send(mpi, g->ranks[i], &failed, g->cause, strlen(g->cause) + 1);

#ifdef IDIST__ULFM
    // Revoke after the messages were queued. This releases ranks that are blocked in MPI.
    if (mpi->fault_tolerant && mg->comm != MPI_COMM_NULL) MPIX_Comm_revoke(mg->comm);
#endif
}

static void idist__mpi_engine_flush(idist__world *w, int64_t until_ns) {
    const idist__mpi *mpi = idist__mpi_of(w);

    while (mpi->outgoing && !mpi->finalized && idist__os_clock_now_ns() < until_ns) {
        idist__mpi_engine_progress(w);
        idist__os_mutex_unlock(&w->lock);
        idist__os_thread_yield();
        idist__os_mutex_lock(&w->lock);
    }
}
