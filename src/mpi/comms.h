// mpi/comms.h: the communicators of groups, until all members have freed them
//
// MPI_Comm_free is collective, and MPICH 5 ends the program if the communicator still holds a
// message that no rank has received. idist_free_group waits for nobody, and a member may fail the
// group at the same time. So a member that frees a group that has not failed sends FREED to the
// others. The member frees the communicator when it has received FREED from all of them.
//
// If a group failed on any member, its communicator stays until the program ends. The
// communicator's entry in mpi->comms stays until the world closes, because other members may still
// send messages about the group.
#pragma once

#include "base/mem.h"
#include "mpi/mpi_model.h"
#include "mpi/control.h"

static idist__mpi_comm **idist__comms_find(idist__mpi *mpi, uint64_t ctx) {
    idist__mpi_comm **at = &mpi->comms;

    while (*at && (*at)->ctx != ctx) at = &(*at)->next;
    return at;
}

// Counts a member that has freed the group. After the last one, frees the communicator. Returns
// false if the group does not exist here yet.
static bool idist__comms_leave(idist__mpi *mpi, uint64_t ctx) {
    idist__mpi_comm **at = idist__comms_find(mpi, ctx), *c = *at;

    if (!c) return false;

    if (!c->failed && --c->user_count == 0) {
        MPI_Comm_free(&c->comm);
        *at = c->next;
        idist__mem_free(&mpi->w->cfg.mem, c);
    }

    return true;
}

static void idist__comms_tell_freed(idist__mpi *mpi, const idist_group *g) {
    idist__mpi_control freed;
    int i;

    memset(&freed, 0, sizeof freed);
    freed.type = IDIST__CONTROL_FREED;
    freed.ctx = g->ctx;
    for (i = 0; i < g->size; i++)
        if (i != g->rank) idist__control_send(mpi, g->ranks[i], &freed, NULL, 0);
}

// Keeps the communicator of a group that has failed on a member. Returns false if the group does
// not exist here yet.
static bool idist__comms_keep(idist__mpi *mpi, uint64_t ctx) {
    idist__mpi_comm *c = *idist__comms_find(mpi, ctx);

    if (c) c->failed = true;
    return c != NULL;
}
