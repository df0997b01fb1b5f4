// gpu/ipc/ipc_arena.h: device memory that other ranks map
//
// Each rank of a group has an arena: IDIST__IPC_SLOTS chunks of device memory, which the other
// members map once. Allocating and mapping device memory may wait for all work on the device, so
// these CUDA calls are made without the lock.
#pragma once

#include "os/process.h"
#include "os/thread.h"
#include "base/mem.h"
#include "base/hash.h"
#include "core/model.h"
#include "core/world.h"
#include "gpu/gpu_model.h"

// The information that each member sends to the other members about its arena.
typedef struct idist__ipc_rank_info {
    cudaIpcMemHandle_t handle;
    char *data; // for ranks of the same process, which cannot open the handle
    uint64_t process;
    int32_t device;
    uint32_t serial;
    int32_t failed; // true if there is nothing to map; the reason follows later
} idist__ipc_rank_info;

// Returns a number that identifies this process. The number depends on the container, because
// processes in different containers may have the same process id.
static uint64_t idist__ipc_arena_process(void) {
    return idist__hash_mix((uint64_t)idist__os_process_id(), idist__os_process_space());
}

// Takes an arena for this rank: the arena of a closed group, or a new arena. Releases the lock
// while it allocates.
static cudaError_t idist__ipc_arena_take(idist_group *g, idist__ipc_rank_info *info) {
    idist__gpu *gpu = idist__gpu_of(g->w);
    idist__ipc_arena *a = gpu->arenas;
    cudaError_t error = cudaSuccess;

    if (a) {
        gpu->arenas = a->next;
    } else {
        a = (idist__ipc_arena *)idist__mem_alloc(&g->w->cfg.mem, sizeof *a);
        if (!a) return cudaErrorMemoryAllocation;
        idist__os_mutex_unlock(&g->w->lock);
        error = cudaMalloc((void **)&a->data, IDIST__IPC_SLOTS * IDIST__IPC_CHUNK);
        idist__world_lock(g->w);
        if (error == cudaSuccess) a->serial = ++gpu->arena_count;
    }

    if (error != cudaSuccess) {
        idist__mem_free(&g->w->cfg.mem, a);
        return error;
    }

    idist__gpu_group_of(g)->own_arena = a;
    info->data = a->data;
    info->device = gpu->device;
    info->serial = a->serial;

    return g->size > 1 ? cudaIpcGetMemHandle(&info->handle, a->data) : cudaSuccess;
}

// Maps an arena of another rank, unless the arena is already mapped. Releases the lock meanwhile.
static cudaError_t idist__ipc_arena_map(idist__world *w, int rank, const idist__ipc_rank_info *info,
                                        char **at) {
    idist__gpu *gpu = idist__gpu_of(w);
    idist__ipc_arena *a;
    cudaError_t error;

    for (a = gpu->imports; a && (a->rank != rank || a->serial != info->serial); a = a->next)
        continue;

    if (a) {
        *at = a->data;
        return cudaSuccess;
    }

    a = (idist__ipc_arena *)idist__mem_alloc(&w->cfg.mem, sizeof *a);
    if (!a) return cudaErrorMemoryAllocation;
    idist__os_mutex_unlock(&w->lock);
    error = cudaIpcOpenMemHandle((void **)&a->data, info->handle, cudaIpcMemLazyEnablePeerAccess);
    idist__world_lock(w);

    if (error != cudaSuccess) {
        idist__mem_free(&w->cfg.mem, a);
        return error;
    }

    a->rank = rank;
    a->serial = info->serial;
    a->next = gpu->imports;
    gpu->imports = a;
    *at = a->data;

    return cudaSuccess;
}

// Maps the arenas of all other ranks of the group. Releases the lock meanwhile.
static cudaError_t idist__ipc_arena_map_all(idist_group *g, const idist__ipc_rank_info *infos) {
    idist__gpu_group *gg = idist__gpu_group_of(g);
    cudaError_t error = cudaSuccess;
    int i;

    for (i = 0; i < g->size && error == cudaSuccess; i++) {
        gg->arena[i] = infos[i].data;
        if (infos[i].failed) return cudaSuccess;

        if (infos[i].process != infos[g->rank].process) {
            error = idist__ipc_arena_map(g->w, g->ranks[i], &infos[i], &gg->arena[i]);
        } else if (infos[i].device != infos[g->rank].device) {
            idist__os_mutex_unlock(&g->w->lock);
            error = cudaDeviceEnablePeerAccess(infos[i].device, 0);
            idist__world_lock(g->w);
        }

        if (error == cudaErrorPeerAccessAlreadyEnabled) error = cudaSuccess;
    }

    return error;
}

static void idist__ipc_arena_release(idist_group *g) {
    idist__gpu *gpu = idist__gpu_of(g->w);
    idist__gpu_group *gg = idist__gpu_group_of(g);

    if (!gg->own_arena) return;
    gg->own_arena->next = gpu->arenas;
    gpu->arenas = gg->own_arena;
    gg->own_arena = NULL;
}

// Abandons this rank's arena in a group in which some rank's copy never ends. No other group gets
// the arena, and the arena is never freed.
static void idist__ipc_arena_abandon(idist_group *g) {
    idist__gpu_group *gg = idist__gpu_group_of(g);

    idist__mem_free(&g->w->cfg.mem, gg->own_arena);
    gg->own_arena = NULL;
}
