// mpi/control.h: control messages between two ranks
//
// Control messages carry everything between two ranks except bulk data: user messages of up to 3.5
// KiB, the handshake of larger messages, and notices about waiting and failure. One receive from
// any rank is always posted.
//
// The path of a control message:
//
//     idist__control_send        copies the message and posts MPI_Isend
//     idist__control_sweep       reclaims the buffer when the message is sent
//     idist__control_progress    receives the message on the other rank
//     mpi->deliver               idist__mpi_engine_deliver of mpi/mpi_engine.h, which hands
//                                the message to mpi/mpi_p2p.h or mpi/mpi_wait.h
//     idist__control_keep        keeps the message if nobody can use it yet
#pragma once

#include "os/clock.h"
#include "base/mem.h"
#include "core/world.h"
#include "core/group.h"
#include "mpi/mpi_model.h"
#include "mpi/mpi_error.h"

static void idist__control_post_receive(idist__mpi *mpi) {
    int error = MPI_Irecv(mpi->incoming_buffer, (int)sizeof mpi->incoming_buffer, MPI_BYTE,
                          MPI_ANY_SOURCE, IDIST__TAG_CONTROL, mpi->p2p_comm, &mpi->incoming);
    if (error != MPI_SUCCESS) idist__mpi_error_fail_group(mpi, &mpi->w->group, "MPI_Irecv", error);
}

// Returns true if a control message is in the buffer. While a rank is lost, ULFM fails a receive
// from any rank unless it was posted after we acknowledged the loss. So this function posts the
// receive again after a loss.
static bool idist__control_arrived(idist__mpi *mpi, MPI_Status *status) {
    int arrived = 0, cancelled = 0, error = MPI_Test(&mpi->incoming, &arrived, status);

    if (error == MPI_SUCCESS) return arrived;
    idist__mpi_error_fail_group(mpi, &mpi->w->group, "MPI_Test", error);
    if (!idist__mpi_error_is_loss(error)) return false;
    idist__mpi_error_find_lost(mpi);

    if (mpi->incoming != MPI_REQUEST_NULL) {
        MPI_Cancel(&mpi->incoming);
        arrived = MPI_Wait(&mpi->incoming, status) == MPI_SUCCESS;
        if (arrived) MPI_Test_cancelled(status, &cancelled);
    }

    if (!arrived || cancelled) idist__control_post_receive(mpi);

    return arrived && !cancelled;
}

static void idist__control_progress(idist__mpi *mpi) {
    const char *payload = mpi->incoming_buffer + sizeof(idist__mpi_control);
    idist__mpi_control control;
    char cause[sizeof mpi->w->group.cause];
    MPI_Status status;
    int i;

    for (i = 0; i < IDIST__CONTROL_BATCH; i++) {
        if (mpi->incoming == MPI_REQUEST_NULL || !idist__control_arrived(mpi, &status)) break;
        mpi->received_count++;
        memcpy(&control, mpi->incoming_buffer, sizeof control);

        // Handling FAILED receives other messages into the buffer, so copy the text out first.
        if (control.type == IDIST__CONTROL_FAILED) {
            memcpy(cause, payload,
                   control.nbytes < sizeof cause ? (size_t)control.nbytes : sizeof cause);
            idist__control_post_receive(mpi);
            mpi->deliver(mpi, status.MPI_SOURCE, &control, cause);
        } else {
            mpi->deliver(mpi, status.MPI_SOURCE, &control, payload);
            idist__control_post_receive(mpi);
        }
    }
}

// Returns a buffer for a control message, or NULL if memory is exhausted. Only a message that
// announces a failure may use the reserve.
static idist__mpi_outgoing *idist__control_buffer(idist__mpi *mpi, bool announces_failure) {
    idist__mpi_outgoing *o = mpi->free_outgoing;

    if (o) {
        mpi->free_outgoing = o->next;
        return o;
    }

    o = (idist__mpi_outgoing *)idist__mem_raw(&mpi->w->cfg.mem,
                                              sizeof *o + IDIST__CONTROL_MAX_NBYTES);

    if (!o && announces_failure && mpi->reserve) {
        o = mpi->reserve;
        mpi->reserve = o->next;
    }

    return o;
}

// Sends a control message to a rank of the world. Copies the payload. If memory runs out or MPI
// refuses, the group fails.
static void idist__control_send(idist__mpi *mpi, int rank, const idist__mpi_control *control,
                                const void *payload, size_t nbytes) {
    idist__mpi_outgoing *o;
    idist_group *g;
    int error = MPI_SUCCESS;

    if (mpi->peers[rank].lost || mpi->closing) return;

    if (rank == mpi->w->cfg.rank) {
        idist__mpi_control own = *control;
        own.nbytes = nbytes;
        mpi->deliver(mpi, rank, &own, payload);
        return;
    }

    o = idist__control_buffer(mpi, control->type == IDIST__CONTROL_FAILED);

    if (o) {
        o->control = *control;
        o->control.nbytes = nbytes;
        if (nbytes) memcpy(o + 1, payload, nbytes);
        error = MPI_Isend(&o->control, (int)(sizeof o->control + nbytes), MPI_BYTE, rank,
                          IDIST__TAG_CONTROL, mpi->p2p_comm, &o->request);

        if (error == MPI_SUCCESS) {
            o->next = mpi->outgoing;
            mpi->outgoing = o;
            mpi->sent_counts[rank]++;
            return;
        }

        o->next = mpi->free_outgoing;
        mpi->free_outgoing = o;
    }

    g = idist__world_find_group(mpi->w, control->ctx);
    if (!g) return;
    if (o) idist__mpi_error_fail_group(mpi, g, "MPI_Isend", error);
    else idist__group_fail_memory(g);
}

// Reclaims the buffers of messages that were sent or whose receiver is lost.
static void idist__control_sweep(idist__mpi *mpi) {
    idist__mpi_outgoing **at = &mpi->outgoing;

    while (*at) {
        idist__mpi_outgoing *o = *at;
        int done = 0;

        if (MPI_Test(&o->request, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && !done) {
            at = &o->next;
            continue;
        }

        *at = o->next;
        o->next = mpi->free_outgoing;
        mpi->free_outgoing = o;
    }
}

// Keeps a message whose receive or group does not exist yet.
static void idist__control_keep(idist__mpi *mpi, int source, const idist__mpi_control *control,
                                const void *payload) {
    size_t nbytes = (size_t)control->nbytes;
    idist__mpi_unexpected **last,
        *u = (idist__mpi_unexpected *)idist__mem_raw(&mpi->w->cfg.mem, sizeof *u + nbytes);

    if (!u) {
        idist__group_fail_memory(&mpi->w->group);
        return;
    }

    u->next = NULL;
    u->source = source;
    u->control = *control;
    if (nbytes) memcpy(u + 1, payload, nbytes);
    for (last = &mpi->unexpected; *last; last = &(*last)->next) continue;
    *last = u;
}

// Receives the messages that other ranks sent before the last barrier, because MPI frees a
// communicator only when nothing is in flight on it.
static void idist__control_drain(idist__mpi *mpi) {
    int64_t deadline_ns = idist__os_clock_deadline(IDIST__CLOSE_MS);
    uint32_t expected = 0;

    mpi->closing = true;
    MPI_Reduce_scatter_block(mpi->sent_counts, &expected, 1, MPI_UINT32_T, MPI_SUM, mpi->p2p_comm);
    while ((int32_t)(expected - mpi->received_count) > 0 && idist__os_clock_now_ns() < deadline_ns)
        idist__control_progress(mpi);
}
