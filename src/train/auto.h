// train/auto.h: sizes, seeds and loaders derived from the world
//
// These are Ignite's auto_* functions. The program passes values for all ranks together, and each
// rank derives its own share.
#pragma once

#include "base/fail.h"
#include "base/log.h"
#include "core/model.h"
#include "core/world.h"

int idist_auto_batch_size(int batch_size) {
    int ranks = idist_get_world_size();
    return batch_size >= ranks ? batch_size / ranks : batch_size;
}

int idist_auto_num_workers(int num_workers) {
    int ranks = idist_get_nproc_per_node();
    return num_workers >= ranks ? (num_workers - 1) / ranks + 1 : num_workers;
}

uint64_t idist_auto_seed(uint64_t seed) { return seed + (uint64_t)idist_get_rank(); }

// Returns the log of the group's world. Without a world, initializes `own` from the environment and
// returns it, or returns NULL if that fails.
static const idist__log *idist__auto_log_of(const idist_group *group, idist__log *own) {
    const idist__world *world = group ? group->w : idist__world_default();

    if (world) return &world->log;
    return idist__log_init(own, NULL) == IDIST_OK ? own : NULL;
}

static void idist__auto_log(const idist_loader_desc *requested, const idist_loader_desc *desc) {
    const idist_sampler_desc *samples = &desc->sampler->desc;
    int rank = idist_group_rank(samples->group), size = idist_group_size(samples->group);
    idist__log without_world;
    const idist__log *log = idist__auto_log_of(samples->group, &without_world);

    if (!log) return;
    if (samples->num_replicas != size || samples->rank != rank)
        idist__log_print(
            log, IDIST_LOG_WARN,
            "auto_loader: the sampler has rank=%d and num_replicas=%d, but this is rank %d of %d: "
            "some samples may be used twice or not at all",
            samples->rank, samples->num_replicas, rank, size);

    idist__log_print(
        log, IDIST_LOG_INFO,
        "auto_loader: batch_size %zu of %zu, num_workers %d of %d, %zu samples of this rank",
        desc->batch_size, requested->batch_size, desc->num_workers, requested->num_workers,
        idist_sampler_count(desc->sampler));
}

static idist_status idist__auto_check(const idist_loader_desc *desc) {
    if (desc->sampler)
        return idist__fail(
            IDIST_ERR_ARG,
            "auto_loader: desc.sampler must be NULL, because the loader creates its own");
    if (!desc->batch_size || desc->batch_size > INT32_MAX)
        return idist__fail(IDIST_ERR_ARG, "auto_loader: batch_size must be 1 to %d, got %zu",
                           INT32_MAX, desc->batch_size);

    return IDIST_OK;
}

idist_status idist_auto_loader(const idist_loader_desc *desc, const idist_sampler_desc *samples,
                               idist_loader **loader) {
    idist_loader_desc own;
    idist_sampler *sampler = NULL;
    size_t replicas;
    idist_status status;

    if (!desc || !samples || !loader)
        return idist__fail(IDIST_ERR_ARG, "auto_loader: desc, samples or loader is NULL");
    *loader = NULL;
    status = idist__auto_check(desc);
    if (status == IDIST_OK) status = idist_sampler_create(samples, &sampler);
    if (status != IDIST_OK) return status;

    own = *desc;
    own.sampler = sampler;
    replicas = (size_t)sampler->desc.num_replicas;
    if (own.batch_size >= replicas) own.batch_size /= replicas;
    own.batch_nbytes =
        (desc->batch_nbytes + desc->batch_size - 1) / desc->batch_size * own.batch_size;
    own.num_workers = idist_auto_num_workers(desc->num_workers);
#ifdef IDIST_NCCL_H
    if (!own.allocator.alloc_fn && !own.allocator.free_fn &&
        strncmp(idist_device(), "cuda", 4) == 0)
        own.allocator = idist_pinned_allocator();
#endif

    status = idist_loader_create(&own, loader);
    if (status != IDIST_OK) {
        idist_sampler_free(&sampler);
        return status;
    }

    (*loader)->own_sampler = sampler;
    idist__auto_log(desc, &own);

    return IDIST_OK;
}
