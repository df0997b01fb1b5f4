// mpi/mpi_backend.h: the table of functions that the core calls
#pragma once

#include "base/isa.h"
#include "core/model.h"
#include "core/backend.h"
#include "mpi/mpi_model.h"
#include "mpi/mpi_coll.h"
#include "mpi/mpi_wait.h"
#include "mpi/mpi_engine.h"
#include "mpi/mpi_life.h"
#include "mpi/mpi_world.h"
#include "mpi/mpi_group.h"

// Runs idist__mpi_coll_quick in the default floating-point mode, because MPI reduces in the mode of
// the calling thread.
static bool idist__mpi_backend_quick_in_mode(idist_group *g, const idist__call *call) {
    uint32_t mode = idist__mode_enter();
    bool done = idist__mpi_coll_quick(g, call);

    idist__mode_leave(mode);
    return done;
}

static void idist__mpi_backend_start_in_mode(idist__task *t) {
    uint32_t mode = idist__mode_enter();

    idist__mpi_engine_start(t);
    idist__mode_leave(mode);
}

static void idist__mpi_backend_progress_in_mode(idist__world *w) {
    uint32_t mode = idist__mode_enter();

    idist__mpi_engine_progress(w);
    idist__mode_leave(mode);
}

static void idist__mpi_backend_fill(idist_backend_api *api) {
    api->name = "mpi";
    api->task_nbytes = sizeof(idist__mpi_op);
    api->group_nbytes = sizeof(idist__mpi_group);

    api->claim = idist__mpi_life_claim;
    api->open = idist__mpi_world_open;
    api->close = idist__mpi_world_close;

    api->group_open = idist__mpi_group_open;
    api->group_close = idist__mpi_group_close;

    api->quick = idist__mpi_backend_quick_in_mode;
    api->start = idist__mpi_backend_start_in_mode;
    api->progress = idist__mpi_backend_progress_in_mode;
    api->sleep = idist__mpi_engine_sleep;
    api->wake = idist__mpi_engine_wake;
    api->cancel = idist__mpi_engine_cancel;
    api->retract = idist__mpi_engine_retract;

    api->tell = idist__mpi_engine_tell;
    api->flush = idist__mpi_engine_flush;
    api->announce = idist__mpi_wait_announce;
    api->missing = idist__mpi_wait_missing;

    api->alloc = idist__mpi_world_alloc;
#ifdef IDIST__ULFM
    api->shrink = idist__mpi_group_shrink;
    api->agree = idist__mpi_group_agree;
#endif
}

const idist_backend_api *idist_mpi_backend(void) {
    static idist_backend_api api;
    return idist__backend_fill(&api, idist__mpi_backend_fill);
}

__attribute__((constructor(IDIST__REGISTER_SPECIAL))) static void
idist__mpi_backend_register(void) {
    (void)idist_register_backend(idist_mpi_backend());
}
