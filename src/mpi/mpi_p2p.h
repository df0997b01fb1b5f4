// mpi/mpi_p2p.h: sends and receives
//
// A message of up to 3.5 KiB is the payload of an EAGER control message. A larger message goes from
// buffer to buffer (rendezvous protocol):
//
//     sender                                receiver
//     READY_TO_SEND (fingerprint, id) --->  matches a receive, posts MPI_Irecv
//                                     <---  CLEAR_TO_SEND (id, tag)
//     MPI_Isend with this tag         --->  data
//
// The path of a send:
//
//     idist__mpi_p2p_send         sends EAGER, which completes the send, or READY_TO_SEND
//     idist__mpi_p2p_cleared      WAITING is done: posts the data
//     idist__mpi_p2p_done         TRANSFERRING is done: completes the send
//
// The path of a receive:
//
//     idist__mpi_p2p_receive      looks for an unexpected message, or waits for a message
//     idist__mpi_p2p_match        EAGER: copies the payload, which completes the receive
//     idist__mpi_p2p_clear        READY_TO_SEND: posts MPI_Irecv, sends CLEAR_TO_SEND
//     idist__mpi_p2p_done         TRANSFERRING is done: completes the receive
#pragma once

#include "base/mem.h"
#include "launch/env.h"
#include "core/model.h"
#include "core/fingerprint.h"
#include "core/task.h"
#include "core/extent.h"
#include "core/matching.h"
#include "mpi/mpi_model.h"
#include "mpi/mpi_error.h"
#include "mpi/native.h"
#include "mpi/control.h"

// Posts the data of a large message, in pieces whose sizes fit into MPI's int.
static void idist__mpi_p2p_transfer(idist__task *t, int rank, int tag, size_t nbytes) {
    idist__mpi *mpi = idist__mpi_of(t->group->w);
    idist__native *nat = &idist__mpi_op_of(t)->native;
    bool sends = t->call.kind == IDIST__SEND;
    size_t at, n, max = IDIST__PIECE_MAX_NBYTES;

    if (IDIST__MPI_COUNT < max) max = IDIST__MPI_COUNT;
    idist__native_init(nat, t->group, &t->call, 0);
    idist__mpi_op_of(t)->phase = IDIST__PHASE_TRANSFERRING;

    for (at = 0; at < nbytes; at += n) {
        n = nbytes - at < max ? nbytes - at : max;
        if (sends)
            IDIST__NATIVE_REQUEST(nat, MPI_Isend, (const char *)t->call.send + at, (int)n, MPI_BYTE,
                                  rank, tag, mpi->p2p_comm);
        else
            IDIST__NATIVE_REQUEST(nat, MPI_Irecv, (char *)t->call.recv + at, (int)n, MPI_BYTE, rank,
                                  tag, mpi->p2p_comm);
    }
}

// Returns the next MPI tag for data. Skips the tags of canceled receives, whose data may still
// arrive.
static int idist__mpi_p2p_next_tag(idist__mpi *mpi) {
    int i;

    for (i = 0; i < IDIST__TAG_RANGE; i++) {
        mpi->next_tag = (mpi->next_tag + 1) % IDIST__TAG_RANGE;
        if (!(mpi->retired_tags[mpi->next_tag / 8] >> mpi->next_tag % 8 & 1)) break;
    }

    return mpi->next_tag;
}

// Receives the large message that READY_TO_SEND announces.
static void idist__mpi_p2p_clear(idist__mpi *mpi, idist__task *t, int source,
                                 const idist__mpi_control *ready) {
    idist__mpi_op *op = idist__mpi_op_of(t);
    idist__mpi_control clear;

    op->data_tag = idist__mpi_p2p_next_tag(mpi);
    op->source = source;
    op->control = *ready;

    memset(&clear, 0, sizeof clear);
    clear.type = IDIST__CONTROL_CLEAR_TO_SEND;
    clear.ctx = ready->ctx;
    clear.id = ready->id;
    clear.tag = IDIST__TAG_DATA + op->data_tag;
    idist__mpi_p2p_transfer(t, source, clear.tag,
                            (size_t)idist__fingerprint_count(&ready->fingerprint) *
                                idist_dtype_size(t->call.dtype));
    idist__control_send(mpi, source, &clear, NULL, 0);
}

// Gives a message to the oldest receive that matches it. Returns false if there is none. A receive
// that matches fails if the message does not fit.
static bool idist__mpi_p2p_match(idist__mpi *mpi, idist_group *g, int source,
                                 idist__mpi_control *control, const void *payload) {
    idist__task **at = &idist__mpi_model_group(g)->receives;
    int from = idist__mpi_model_group(g)->rank_of[source];
    size_t count = (size_t)idist__fingerprint_count(&control->fingerprint);

    while (*at) {
        idist__task *t = *at;
        idist_status status;
        char text[256];

        if (!idist__matching_matches(t, source, control->tag)) {
            at = &idist__mpi_op_of(t)->next;
            continue;
        }

        *at = idist__mpi_op_of(t)->next;

        if (!idist__matching_fits(t, &control->fingerprint, from, &control->tag, &status, text,
                                  sizeof text)) {
            idist__task_complete(t, status, text);
            continue;
        }

        if (control->type == IDIST__CONTROL_READY_TO_SEND) {
            idist__mpi_p2p_clear(mpi, t, source, control);
        } else {
            idist__block_copy(t->call.recv, payload, (size_t)control->nbytes);
            idist__matching_received(t, from, control->tag, count);
        }

        return true;
    }

    return false;
}

static void idist__mpi_p2p_send(idist__mpi *mpi, idist__task *t) {
    idist_group *g = t->group;
    const idist__call *call = &t->call;
    size_t nbytes = call->count * idist_dtype_size(call->dtype);
    int rank = g->ranks[call->root];
    bool eager = nbytes <= IDIST__CONTROL_MAX_NBYTES || rank == mpi->w->cfg.rank;
    idist__mpi_control control;

    idist__mpi_op_of(t)->send_id = ++mpi->next_send_id;
    mpi->peers[rank].sent++;

    memset(&control, 0, sizeof control);
    control.type = eager ? IDIST__CONTROL_EAGER : IDIST__CONTROL_READY_TO_SEND;
    control.ctx = g->ctx;
    control.tag = call->tag;
    control.fingerprint = idist__fingerprint_of_task(t, IDIST__ALGO_AUTO);
    control.id = idist__mpi_op_of(t)->send_id;
    idist__control_send(mpi, rank, &control, call->send, eager ? nbytes : 0);
    if (eager) idist__task_complete(t, IDIST_OK, "");
}

static void idist__mpi_p2p_receive(idist__mpi *mpi, idist__task *t) {
    idist_group *g = t->group;
    idist__task **last;
    idist__mpi_unexpected **at;

    idist__mpi_op_of(t)->next = NULL;
    for (last = &idist__mpi_model_group(g)->receives; *last; last = &idist__mpi_op_of(*last)->next)
        continue;
    *last = t;

    for (at = &mpi->unexpected; *at; at = &(*at)->next) {
        idist__mpi_unexpected *u = *at;
        if (u->control.ctx != g->ctx || u->control.type > IDIST__CONTROL_READY_TO_SEND ||
            !idist__matching_matches(t, u->source, u->control.tag))
            continue;

        // If the message does not fit, the receive fails and the message stays.
        if (idist__mpi_p2p_match(mpi, g, u->source, &u->control, u + 1)) {
            *at = u->next;
            idist__mem_free(&mpi->w->cfg.mem, u);
        }

        return;
    }
}

// Handles CLEAR_TO_SEND: sends the data of the send that the message names.
static void idist__mpi_p2p_cleared(idist__mpi *mpi, int source, const idist__mpi_control *clear) {
    idist__task *t;

    for (t = mpi->w->tasks.running; t; t = t->next) {
        const idist__mpi_op *op = idist__mpi_op_of(t);

        if (t->call.kind != IDIST__SEND || op->phase != IDIST__PHASE_WAITING) continue;
        if (op->send_id != clear->id) continue;
        idist__mpi_p2p_transfer(t, source, clear->tag,
                                t->call.count * idist_dtype_size(t->call.dtype));
        return;
    }
}

// Completes a send or receive after MPI has moved all data of a large message.
static void idist__mpi_p2p_done(idist__mpi *mpi, idist__task *t) {
    idist__mpi_op *op = idist__mpi_op_of(t);
    bool sends = t->call.kind == IDIST__SEND;
    int error;

    op->phase = IDIST__PHASE_WAITING;
    mpi->poll_ns = 0;
    mpi->w->wait.moved_count++;
    error = idist__native_end(&op->native);

    if (error != MPI_SUCCESS)
        idist__mpi_error_fail_group(mpi, t->group, sends ? "MPI_Isend" : "MPI_Irecv", error);
    else if (sends) idist__task_complete(t, IDIST_OK, "");
    else
        idist__matching_received(t, idist__mpi_model_group(t->group)->rank_of[op->source],
                                 op->control.tag,
                                 (size_t)idist__fingerprint_count(&op->control.fingerprint));
}
