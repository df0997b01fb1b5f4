// mpi/comms.h: the communicators of groups, until all members have freed them
//
// MPI_Comm_free is collective, and MPICH 5 ends the program if a message is left that nobody has
// received. idist_free_group waits for nobody, and a member may fail the group at the same time. So
// every member tells the others with FREED that it has freed a sound group, and frees the
// communicator when it has heard that from all of them. The communicator of a group that failed on
// any member stays until the program ends, and its entry until the world closes, for what the
// others still say about the group.
#pragma once

#include "base/mem.h"
#include "mpi/mpi_model.h"
#include "mpi/control.h"

static idist__mpi_comm **idist__comms_find(idist__mpi *mpi, uint64_t ctx) {
    idist__mpi_comm **at = &mpi->comms;

    while (*at && (*at)->ctx != ctx) at = &(*at)->next;
    return at;
}

// A member has freed the group. False: the group does not exist here yet.
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

// The group has failed on a member. False: it does not exist here yet.
static bool idist__comms_keep(idist__mpi *mpi, uint64_t ctx) {
    idist__mpi_comm *c = *idist__comms_find(mpi, ctx);

    if (c) c->failed = true;
    return c != NULL;
}
