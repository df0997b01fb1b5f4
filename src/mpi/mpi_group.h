// mpi/mpi_group.h: opens and closes groups; shrink and agree
#pragma once

#include "base/fail.h"
#include "base/mem.h"
#include "core/model.h"
#include "core/world.h"
#include "core/group.h"
#include "calls/new_group.h"
#include "mpi/mpi_model.h"
#include "mpi/mpi_error.h"
#include "mpi/exchange.h"
#include "mpi/control.h"
#include "mpi/comms.h"

// Finds or makes the communicator of a group. The communicators of the world and of a shrunk group
// exist already; any other is made by its members alone. ULFM cannot make a communicator from one
// that contains a lost rank. So under ULFM the new communicator is made from the parent's, which
// has no lost rank unless the parent has failed. Without ULFM it is made from a communicator of all
// ranks, because MPICH 4.0 may crash in MPI_Comm_create_group on any other.
static int idist__mpi_group_comm(idist__mpi *mpi, const idist_group *g, MPI_Comm *comm) {
    MPI_Comm from;
    MPI_Group all, members;
    int error;

    if (mpi->shrunk_comm != MPI_COMM_NULL && mpi->shrunk_ctx == g->ctx) {
        *comm = mpi->shrunk_comm;
        mpi->shrunk_comm = MPI_COMM_NULL;
        return MPI_SUCCESS;
    }

    if (g == &mpi->w->group) {
        *comm = mpi->world_comm;
        return MPI_SUCCESS;
    }

    MPI_Comm_group(mpi->p2p_comm, &all);
    MPI_Group_incl(all, g->size, g->ranks, &members);
    from = mpi->fault_tolerant ? idist__mpi_model_group(g->parent)->comm : mpi->p2p_comm;
    error = MPI_Comm_create_group(from, members, (int)(g->ctx % IDIST__TAG_RANGE), comm);
    MPI_Group_free(&members);
    MPI_Group_free(&all);

    return error;
}

static void idist__mpi_group_free(idist_group *g) {
    idist__mpi_group *mg = idist__mpi_model_group(g);

    idist__mem_free(&g->w->cfg.mem, mg->rank_of);
    idist__mem_free(&g->w->cfg.mem, mg->last_seen);
    idist__mem_free(&g->w->cfg.mem, mg->headers);
}

// Reports that MPI could not make the communicator of a group. If a rank was lost, first fails the
// parent with a cause that names the rank.
static idist_status idist__mpi_group_comm_fail(idist__mpi *mpi, const idist_group *g, int error) {
    idist_group *parent = idist__world_find_group(mpi->w, g->parent->ctx);

    if (!parent || !idist__mpi_error_is_loss(error))
        return idist__mpi_error_fail("MPI_Comm_create_group", error);
    idist__mpi_error_fail_group(mpi, parent, "MPI_Comm_create_group", error);

    return idist__fail(parent->status, "%s", parent->cause);
}

static idist_status idist__mpi_group_open(idist_group *g) {
    idist__mpi *mpi = idist__mpi_of(g->w);
    idist__mpi_group *mg = idist__mpi_model_group(g);
    const idist_allocator *mem = &g->w->cfg.mem;
    size_t world_size = (size_t)g->w->group.size, size = (size_t)g->size;
    const idist__mpi_unexpected *u;
    idist__mpi_comm *c;
    int i, error;

    mg->comm = MPI_COMM_NULL;
    mg->requests[0] = mg->requests[1] = MPI_REQUEST_NULL;
    if (mpi->comms)
        idist__control_progress(mpi); // FREED may free communicators; MPI has few of them

    // Do this first: the other members are in this collective call whatever happens here.
    error = idist__mpi_group_comm(mpi, g, &mg->comm);
    if (error != MPI_SUCCESS) return idist__mpi_group_comm_fail(mpi, g, error);
    mg->rank_of = (int *)idist__mem_alloc(mem, sizeof(int) * world_size);
    mg->last_seen = (idist__fingerprint *)idist__mem_alloc(mem, sizeof *mg->last_seen * size);
    mg->headers = (idist__mpi_header *)idist__mem_alloc(mem, sizeof *mg->headers * size);
    c = (idist__mpi_comm *)idist__mem_alloc(mem, sizeof *c);

    if (!mg->rank_of || !mg->last_seen || !mg->headers || !c) {
        idist__group_fail_memory(g);
        idist__mpi_group_free(g);
        idist__mem_free(mem, c);
        return IDIST_ERR_NO_MEMORY;
    }

    c->comm = mg->comm;
    c->ctx = g->ctx;
    c->user_count = g->size;
    c->failed = false;
    c->next = mpi->comms;
    mpi->comms = c;

    MPI_Comm_set_errhandler(mg->comm, MPI_ERRORS_RETURN);
    memset(mg->rank_of, -1, sizeof(int) * world_size);
    for (i = 0; i < g->size; i++) mg->rank_of[g->ranks[i]] = i;

    // Handle the messages that arrived before the group existed here.
    for (u = mpi->unexpected; u; u = u->next) {
        if (u->control.ctx != g->ctx) continue;
        if (u->control.type == IDIST__CONTROL_FREED) idist__comms_leave(mpi, g->ctx);
        if (u->control.type == IDIST__CONTROL_FAILED)
            idist__group_fail(g, (idist_status)u->control.tag, (const char *)(u + 1));
    }

    for (i = 0; i < g->size; i++)
        if (mpi->peers[g->ranks[i]].lost)
            idist__group_lose_rank(mpi->w, g->ranks[i], "its process ended");

    return IDIST_OK;
}

static void idist__mpi_group_close(idist_group *g) {
    idist__mpi *mpi = idist__mpi_of(g->w);
    idist__mpi_unexpected **at = &mpi->unexpected;
    char cause[200];

    snprintf(cause, sizeof cause, "rank %d on %s left without idist_finalize", g->w->cfg.rank,
             g->w->about.hostname);
    if (g->w->life.leaves && g->w->group.status != IDIST_OK)
        idist__group_fail(g, g->w->group.status, g->w->group.cause);
    if (g->w->life.leaves) idist__group_fail(g, IDIST_ERR_PEER_LOST, cause);
    if (!mpi->finalized) idist__exchange_cancel(g);

    while (*at) {
        idist__mpi_unexpected *u = *at;

        if (u->control.ctx != g->ctx) {
            at = &u->next;
            continue;
        }

        *at = u->next;
        idist__mem_free(&g->w->cfg.mem, u);
    }

    // No FREED is needed in a failed world without fault tolerance: it ends soon, and its
    // communicators with it.
    if (g->status == IDIST_OK && g != &mpi->w->group &&
        (mpi->w->group.status == IDIST_OK || mpi->fault_tolerant)) {
        idist__comms_tell_freed(mpi, g);
        idist__comms_leave(mpi, g->ctx);
    } else {
        idist__comms_keep(mpi, g->ctx);
    }

    idist__mpi_group_free(g);
}

#ifdef IDIST__ULFM
// Makes the communicator of the survivors, agrees with them on *serial, and keeps the communicator
// for the group_open that follows.
static idist_status idist__mpi_group_shrink(idist_group *g, int *ranks, int *count,
                                            uint32_t *serial) {
    idist__mpi *mpi = idist__mpi_of(g->w);
    MPI_Comm from = idist__mpi_model_group(g)->comm, to = MPI_COMM_NULL;
    MPI_Group all, members;
    int error, attempt, i;

    if (!mpi->fault_tolerant) return idist__new_group_needs_ulfm("shrink");
    MPIX_Comm_revoke(from);
    error = MPIX_Comm_shrink(from, &to);

    for (attempt = 0; attempt < g->size && error == MPI_SUCCESS; attempt++) {
        uint32_t own = *serial;
        MPI_Comm again = MPI_COMM_NULL;
        int agreed;

        MPI_Comm_set_errhandler(to, MPI_ERRORS_RETURN);
        agreed = MPI_Allreduce(&own, serial, 1, MPI_UINT32_T, MPI_MAX, to) == MPI_SUCCESS;
        MPIX_Comm_agree(to, &agreed);
        if (agreed) break;

        // Another rank was lost meanwhile.
        *serial = own;
        error = MPIX_Comm_shrink(to, &again);
        MPI_Comm_free(&to);
        to = again;
    }

    if (error != MPI_SUCCESS) return idist__mpi_error_fail("shrink: MPIX_Comm_shrink", error);
    MPI_Comm_group(mpi->p2p_comm, &all);
    MPI_Comm_group(to, &members);
    MPI_Group_size(members, count);
    for (i = 0; i < *count; i++) MPI_Group_translate_ranks(members, 1, &i, all, &ranks[i]);
    MPI_Group_free(&members);
    MPI_Group_free(&all);
    mpi->shrunk_comm = to;
    mpi->shrunk_ctx = idist__new_group_ctx(g, *serial, 0);

    return IDIST_OK;
}

static idist_status idist__mpi_group_agree(idist_group *g, int *flag) {
    MPI_Comm comm = idist__mpi_model_group(g)->comm;
    int error;

    if (!idist__mpi_of(g->w)->fault_tolerant) return idist__new_group_needs_ulfm("agree");
    MPIX_Comm_failure_ack(comm);
    error = MPIX_Comm_agree(comm, flag);
    if (error == MPI_SUCCESS || idist__mpi_error_is_loss(error)) return IDIST_OK;

    return idist__mpi_error_fail("agree: MPIX_Comm_agree", error);
}
#endif
