// gpu/ipc/ipc_setup.h: what the members of a group set up in the group's first call
//
//     own     load the kernels; take an arena, and write a pattern into it
//     others  exchange the handles; map the other ranks' arenas, and read the patterns
//     agree   if any rank has failed, the group is staged
#pragma once

#include "os/thread.h"
#include "base/fail.h"
#include "base/text.h"
#include "base/mem.h"
#include "base/log.h"
#include "core/model.h"
#include "core/world.h"
#include "core/survey.h"
#include "gpu/gpu_model.h"
#include "gpu/gpu_agree.h"
#include "gpu/gpu_leave.h"
#include "gpu/ipc/ipc_kernel.h"
#include "gpu/ipc/ipc_arena.h"
#include "gpu/ipc/ipc_probe.h"

// Handles a group in which a rank cannot use IPC. Fails if the user requires IPC. Otherwise warns,
// and stages the group from now on.
static idist_status idist__ipc_setup_without(idist_group *g, const char *reason) {
    idist__ipc_arena_release(g); // a later call of the group may set up an arena again
    if (idist__gpu_of(g->w)->rank_infos[0].wanted_backend == IDIST__BY_IPC)
        return idist__fail(IDIST_ERR_UNSUPPORTED,
                           "CUDA IPC cannot be used: %s; IDIST_DEVICE_BACKEND=staged needs no IPC",
                           reason);
    idist__log_print(&g->w->log, IDIST_LOG_WARN,
                     "CUDA IPC cannot be used (%s): device memory is staged", reason);
    idist__gpu_group_of(g)->path = IDIST__BY_STAGING;

    return IDIST_OK;
}

typedef struct idist__ipc_setup {
    idist__ipc_rank_info mine, *infos; // of this rank, and of all ranks
    idist__ipc_probe probe;
    bool stuck;        // true if the probe never ends
    cudaError_t error; // the first error of this rank
} idist__ipc_setup;

// Sets up this rank's part: loads the kernels, takes an arena and writes a pattern into the arena.
// Releases the lock meanwhile.
static void idist__ipc_setup_own(idist_group *g, idist__ipc_setup *setup) {
    idist__world *w = g->w;
    const idist__gpu *gpu = idist__gpu_of(w);

    setup->mine.process = idist__ipc_arena_process();
    setup->error = gpu->stuck || gpu->closed ? cudaErrorNotReady : idist__ipc_kernel_need(w);
    if (setup->error == cudaSuccess) setup->error = idist__ipc_arena_take(g, &setup->mine);
    idist__os_mutex_unlock(&w->lock);
    if (setup->error == cudaSuccess && g->size > 1)
        setup->error = idist__ipc_probe_write(g, &setup->probe);
    idist__world_lock(w);
    setup->mine.failed = setup->error != cudaSuccess;
}

// Maps the arenas of the other ranks and reads each arena once. Releases the lock meanwhile.
static idist_status idist__ipc_setup_others(idist_group *g, idist__ipc_setup *setup) {
    idist__world *w = g->w;
    idist_status status = idist__survey(g, &setup->mine, setup->infos, sizeof setup->mine);
    bool all_have_arenas = status == IDIST_OK && g->size > 1;
    int i;

    if (status == IDIST_OK && setup->error == cudaSuccess)
        setup->error = idist__ipc_arena_map_all(g, setup->infos);
    for (i = 0; i < g->size && all_have_arenas; i++) all_have_arenas = !setup->infos[i].failed;
    if (!all_have_arenas || setup->error != cudaSuccess) return status;

    idist__os_mutex_unlock(&w->lock);
    setup->error = idist__ipc_probe_read(g, &setup->probe);
    idist__world_lock(w);

    return status;
}

// Abandons the arenas of all ranks if any rank's probe never ends. Such a probe may read the arena
// of any other rank.
static idist_status idist__ipc_setup_strand_all(idist_group *g, idist__ipc_setup *setup) {
    idist_status status;
    bool any = false;
    int i;

    setup->mine.failed = setup->stuck;
    status = idist__survey(g, &setup->mine, setup->infos, sizeof setup->mine);
    for (i = 0; i < g->size && status == IDIST_OK; i++) any = any || setup->infos[i].failed;
    if (any) idist__ipc_arena_abandon(g);

    return status;
}

// Agrees on the outcome, which is the same for all members: the group uses IPC, is staged, or
// fails.
static idist_status idist__ipc_setup_agree(idist_group *g, idist__ipc_setup *setup) {
    bool failed = setup->error != cudaSuccess, all = false;
    char reason[256] = "";
    idist_status status;

    if (failed) idist__text_copy(reason, sizeof reason, cudaGetErrorString(setup->error));
    if (setup->probe.text[0]) idist__text_copy(reason, sizeof reason, setup->probe.text);
    status = idist__gpu_agree_all_succeeded(g, failed, reason, sizeof reason, &all);
    if (status == IDIST_OK && !all) status = idist__ipc_setup_strand_all(g, setup);

    return status == IDIST_OK && !all ? idist__ipc_setup_without(g, reason) : status;
}

// Sets up the arenas of a group. If a rank cannot set up its arena, the group is staged, or the
// call fails if the user requires IPC. All members call this function. Releases the lock meanwhile.
static idist_status idist__ipc_setup_prepare(idist_group *g) {
    idist__world *w = g->w;
    idist__gpu *gpu = idist__gpu_of(w);
    idist__ipc_setup setup;
    idist_status status = IDIST_ERR_NO_MEMORY;

    memset(&setup, 0, sizeof setup);
    setup.infos = (idist__ipc_rank_info *)idist__mem_alloc(&w->cfg.mem,
                                                           sizeof *setup.infos * (size_t)g->size);
    if (setup.infos) status = IDIST_OK;
    gpu->user_count++;
    idist__ipc_setup_own(g, &setup);
    status = idist__gpu_leave_goes_on(g, status);
    if (status == IDIST_OK) status = idist__ipc_setup_others(g, &setup);

    idist__os_mutex_unlock(&w->lock);
    setup.stuck = !idist__ipc_probe_free(&setup.probe);
    idist__world_lock(w);

    if (setup.stuck) {
        gpu->stuck = true;
        idist__ipc_arena_abandon(g);
    }

    status = idist__gpu_leave_goes_on(g, status);
    if (status == IDIST_OK) status = idist__ipc_setup_agree(g, &setup);
    idist__mem_free(&w->cfg.mem, setup.infos);
    gpu->user_count--;

    return status;
}
