// gpu/route/gpu_setup.h: chooses and sets up the path on which a group moves device memory
#pragma once

#include "os/clock.h"
#include "os/thread.h"
#include "base/fail.h"
#include "base/mem.h"
#include "base/log.h"
#include "core/model.h"
#include "core/world.h"
#include "core/group.h"
#include "core/progress_thread.h"
#include "core/survey.h"
#include "gpu/gpu_model.h"
#include "gpu/gpu_device.h"
#include "gpu/gpu_agree.h"
#include "gpu/gpu_leave.h"
#include "gpu/ipc/ipc_arena.h"
#include "gpu/ipc/ipc_setup.h"
#include "gpu/nccl/nccl_load.h"
#include "gpu/nccl/nccl_job.h"
#include "gpu/nccl/nccl_issue.h"
#include "gpu/nccl/nccl_abort.h"

// Returns true if two members share a GPU.
static bool idist__gpu_setup_is_same_device(const idist_group *g, int a, int b) {
    const idist__gpu *gpu = idist__gpu_of(g->w);
    const idist__gpu_rank_info *x = &gpu->rank_infos[g->ranks[a]];
    const idist__gpu_rank_info *y = &gpu->rank_infos[g->ranks[b]];
    return x->machine_key == y->machine_key && !strcmp(x->bus_id, y->bus_id);
}

// Finds two members that share a GPU. Returns false if no two members do.
static bool idist__gpu_setup_find_shared(const idist_group *g, int *a, int *b) {
    for (*a = 1; *a < g->size; ++*a)
        for (*b = 0; *b < *a; ++*b)
            if (idist__gpu_setup_is_same_device(g, *a, *b)) return true;
    return false;
}

static bool idist__gpu_setup_is_one_host(const idist_group *g) {
    int i;
    for (i = 1; i < g->size && g->w->nodes[g->ranks[i]].host == g->w->nodes[g->ranks[0]].host; i++)
        continue;
    return i >= g->size;
}

// Returns the path that the user asked for. If the user asked for none, returns NCCL if each rank
// has a GPU of its own, otherwise IPC on one host, otherwise staging.
static idist__gpu_path idist__gpu_setup_choose_path(const idist_group *g) {
    const idist__gpu *gpu = idist__gpu_of(g->w);
    const idist__gpu_rank_info *first = &gpu->rank_infos[0];
    int a, b;

    if (first->wanted_backend) return (idist__gpu_path)first->wanted_backend;
    if (gpu->nccl->version && !idist__gpu_setup_find_shared(g, &a, &b)) return IDIST__BY_NCCL;

    return IDIST__IPC_KERNELS && g->size <= IDIST__IPC_RANKS && idist__gpu_setup_is_one_host(g)
               ? IDIST__BY_IPC
               : IDIST__BY_STAGING;
}

// Abandons a communicator that is not yet created or not yet connected. Returns false if the job's
// thread is still running, and keeps its resources for now.
static bool idist__gpu_setup_give_up(idist__nccl_job *job) {
    int phase = __atomic_exchange_n(&job->phase, (int)IDIST__INIT_GIVEN_UP, __ATOMIC_ACQ_REL);
    int ignored;
    bool ours =
        phase == IDIST__INIT_DONE || (phase == IDIST__INIT_CONNECTING && job->nccl.CommRevoke);
    idist__nccl_job *abort =
        ours ? idist__nccl_job_new(&job->nccl, IDIST__JOB_ABORT, job->device, job->comm) : NULL;

    if (abort) abort->init_job = job;
    if (abort && idist__nccl_job_start(abort)) job = abort;

    return idist__nccl_job_join(job, idist__os_clock_deadline(IDIST__GPU_GRACE_MS), &ignored);
}

// Waits for the communicator until the init time-out, while the backend watches the other ranks.
// Returns false and stores the reason if the communicator cannot be used. Releases the lock between
// checks.
static bool idist__gpu_setup_init_wait(idist_group *g, idist__nccl_job *job, char *reason,
                                       size_t capacity) {
    idist__world *w = g->w;
    int64_t deadline = w->cfg.init_timeout_ms < 0
                           ? IDIST__FOREVER
                           : idist__os_clock_deadline(w->cfg.init_timeout_ms);
    idist__gpu_group *gg = idist__gpu_group_of(g);
    int phase, result;
    bool ended;
    char text[200];

    while (!idist__nccl_job_done(job) && g->status == IDIST_OK && !w->progress.stops &&
           idist__os_clock_now_ns() < deadline) {
        idist__os_mutex_unlock(&w->lock);
        idist__os_clock_pause_ms(1);
        idist__world_lock(w);
        if (w->wait.driver == IDIST__DRIVER_NONE) w->backend->progress(w);
    }

    if (!idist__nccl_job_done(job)) {
        phase = __atomic_load_n(&job->phase, __ATOMIC_ACQUIRE);
        snprintf(reason, capacity, "%s has not returned after %d ms%s",
                 phase == IDIST__INIT_CREATING ? "ncclCommInitRank" : "NCCL's first call",
                 w->cfg.init_timeout_ms, w->progress.stops ? ", and the world is closed" : "");
        idist__os_mutex_unlock(&w->lock);
        ended = idist__gpu_setup_give_up(job);
        idist__world_lock(w);
        if (!ended)
            idist__log_print(&w->log, IDIST_LOG_WARN,
                             "%s; its thread and device memory stay in use until it returns",
                             reason);
        return false;
    }

    gg->comm = job->comm;
    idist__nccl_job_join(job, 0, &result);
    if (result == IDIST__NCCL_OK) return true;
    idist__nccl_abort_group(g); // NCCL may have partly created the communicator
    snprintf(reason, capacity, "ncclCommInitRank: %s",
             idist__nccl_issue_text(idist__gpu_of(w)->nccl, result, text, sizeof text));

    return false;
}

// Returns the user's own communicator, for the world's group. Returns NULL and stores the reason if
// the communicator does not match the world.
static void *idist__gpu_setup_adopt(idist_group *g, char *reason, size_t capacity) {
    const idist__gpu *gpu = idist__gpu_of(g->w);
    void *comm = *(void *const *)g->w->cfg.nccl_comm;
    int n = 0, rank = -1, device = -1;

    if (gpu->nccl->CommCount(comm, &n) != IDIST__NCCL_OK ||
        gpu->nccl->CommUserRank(comm, &rank) != IDIST__NCCL_OK ||
        gpu->nccl->CommCuDevice(comm, &device) != IDIST__NCCL_OK)
        snprintf(reason, capacity, "desc.nccl_comm is not a valid communicator");
    else if (n != g->size || rank != g->rank || device != gpu->device)
        snprintf(reason, capacity,
                 "desc.nccl_comm has rank %d of %d on device %d, idist rank %d of %d on device %d",
                 rank, n, device, g->rank, g->size, gpu->device);
    else {
        idist__gpu_group_of(g)->adopted = true;
        return comm;
    }

    return NULL;
}

// Returns the size in bytes of a configuration that NCCL_CONFIG_INITIALIZER has initialized. NCCL
// refuses any other configuration because of its first members.
static size_t idist__gpu_setup_config_nbytes(const idist__nccl_config *config) {
    return config->magic == IDIST__NCCL_CONFIG_MAGIC && config->nbytes > sizeof *config
               ? config->nbytes
               : sizeof *config;
}

// Creates a communicator, or takes the user's, and connects the ranks. Returns false and stores the
// reason on failure. The job gets a copy of the configuration, because the job may outlive the
// world.
static bool idist__gpu_setup_init(idist_group *g, const idist__nccl_id *id, idist__nccl_job *job,
                                  char *reason, size_t capacity) {
    static const idist__nccl_config patient = {sizeof patient, IDIST__NCCL_CONFIG_MAGIC, 21400, 0};
    const idist__nccl_config *config = (const idist__nccl_config *)g->w->cfg.nccl_config;

    if (!config && !job->nccl.CommRevoke) config = &patient;
    if (config) job->config = malloc(idist__gpu_setup_config_nbytes(config));
    if (job->config) memcpy(job->config, config, idist__gpu_setup_config_nbytes(config));
    job->id = *id;
    job->rank = g->rank;
    job->size = g->size;

    if (config && !job->config) {
        idist__nccl_job_discard(job);
        snprintf(reason, capacity, "out of memory");
        return false;
    }

    if (idist__nccl_job_start(job)) return idist__gpu_setup_init_wait(g, job, reason, capacity);

    snprintf(reason, capacity, "cannot start a thread for NCCL");

    return false;
}

// The information that each member sends to all members before the communicator is created.
typedef struct idist__nccl_rank_info {
    int32_t failed;
    idist__nccl_id id;
} idist__nccl_rank_info;

// Creates a memory pool that the other GPUs of this process can access. If ranks of this process
// have other GPUs, NCCL reads and writes this rank's buffers from these GPUs (unless
// NCCL_P2P_DIRECT_DISABLE=1). The default pool belongs to the program, and its addresses are
// illegal on other GPUs. Leaves *pool NULL if no other GPU accesses our memory.
static cudaError_t idist__gpu_setup_make_pool(const idist__world *w, cudaMemPool_t *pool) {
    const idist__gpu *gpu = idist__gpu_of(w);
    const idist__gpu_rank_info *infos = gpu->rank_infos, *mine = &infos[w->group.rank];
    cudaError_t error = cudaSuccess;
    struct cudaMemPoolProps props;
    struct cudaMemAccessDesc access;
    int i, can;

    memset(&props, 0, sizeof props);
    props.allocType = cudaMemAllocationTypePinned;
    props.location.type = cudaMemLocationTypeDevice;
    props.location.id = gpu->device;
    memset(&access, 0, sizeof access);
    access.location.type = cudaMemLocationTypeDevice;
    access.flags = cudaMemAccessFlagsProtReadWrite;

    for (i = 0; i < w->group.size && error == cudaSuccess; i++) {
        if (infos[i].process != mine->process || infos[i].device == gpu->device) continue;
        error = cudaDeviceCanAccessPeer(&can, infos[i].device, gpu->device);
        if (error != cudaSuccess || !can) continue; // NCCL cannot access our memory directly either
        if (!*pool) error = cudaMemPoolCreate(pool, &props);
        access.location.id = infos[i].device;
        if (error == cudaSuccess) error = cudaMemPoolSetAccess(*pool, &access, 1);
    }

    return error;
}

// Allocates what all communicators share: the word that barriers on streams reduce, and a pool.
// Called once, before a second thread can use the world. If two threads each allocated a word,
// freeing the spare word would wait for the device. Releases the lock meanwhile.
static void idist__gpu_setup_alloc_shared(idist__world *w) {
    idist__gpu *gpu = idist__gpu_of(w);
    cudaMemPool_t pool = NULL;
    void *word = NULL;
    cudaError_t error;
    idist__gpu_guard guard;

    if (!gpu->nccl->version) return;
    gpu->user_count++;
    idist__os_mutex_unlock(&w->lock);
    guard = idist__gpu_device_enter(gpu);
    error = cudaMalloc(&word, sizeof *gpu->barrier_word);
    if (error == cudaSuccess) error = idist__gpu_setup_make_pool(w, &pool);
    if (error != cudaSuccess) cudaGetLastError();
    idist__gpu_device_leave(gpu, guard);
    idist__world_lock(w);
    gpu->user_count--;
    gpu->barrier_word = (int *)word;
    gpu->pool = pool;
    gpu->nccl_error = error;
}

// Creates the stream and allocates the device memory that an init job needs. The job owns them,
// because the job may outlive the group. The function uses cudaMallocAsync, because cudaMalloc may
// wait for all work on the device. This work may include a call that ends only when another rank
// makes it, after this group is set up. Releases the lock meanwhile.
static cudaError_t idist__gpu_setup_alloc_buffer(idist_group *g, idist__nccl_job *job) {
    size_t nbytes = (size_t)IDIST_NCCL_CONNECT_BYTES + 8 * (size_t)g->size; // space to round up
    cudaError_t error = cudaSuccess;

    if (g->size == 1) return cudaSuccess;
    idist__os_mutex_unlock(&g->w->lock);
    error = cudaStreamCreateWithFlags(&job->stream, cudaStreamNonBlocking);
    if (error == cudaSuccess)
        error = idist__nccl_issue_alloc(idist__gpu_of(g->w), (void **)&job->buffer, nbytes,
                                        job->stream);
    idist__world_lock(g->w);

    return error;
}

// Performs all steps of the set-up that need no other rank. Returns NULL if memory cannot be
// allocated. Otherwise info->failed is true if this rank failed, and `reason` says why.
static idist__nccl_job *idist__gpu_setup_prepare_local(idist_group *g, idist__nccl_rank_info *info,
                                                       char *reason, size_t capacity) {
    idist__gpu *gpu = idist__gpu_of(g->w);
    idist__gpu_group *gg = idist__gpu_group_of(g);
    idist__nccl_job *job = idist__nccl_job_new(gpu->nccl, IDIST__JOB_INIT, gpu->device, NULL);
    bool adopt = g == &g->w->group && g->w->cfg.nccl_comm;
    cudaError_t error;

    if (!gg->gate) gg->gate = (idist__nccl_gate *)calloc(1, sizeof *gg->gate);

    if (!job || !gg->gate) {
        free(job);
        return NULL;
    }

    memset(info, 0, sizeof *info);
    snprintf(reason, capacity, "ncclGetUniqueId failed");
    if (g->rank == 0 && !adopt) info->failed = gpu->nccl->GetUniqueId(&info->id) != IDIST__NCCL_OK;
    if (adopt && (job->comm = idist__gpu_setup_adopt(g, reason, capacity)) == NULL)
        info->failed = true;

    error = gpu->nccl_error;
    if (error == cudaSuccess) error = idist__gpu_setup_alloc_buffer(g, job);
    if (error == cudaSuccess || info->failed) return job;
    info->failed = true;
    snprintf(reason, capacity, "cudaMalloc: %s", cudaGetErrorString(error));
    cudaGetLastError();

    return job;
}

// Creates the communicator if `infos` shows that no member failed. Otherwise frees the job. Returns
// false if this rank failed.
static bool idist__gpu_setup_create(idist_group *g, const idist__nccl_rank_info *infos,
                                    idist__nccl_job *job, char *reason, size_t capacity) {
    bool own_failed = infos[g->rank].failed;
    int i;

    for (i = 0; i < g->size && !infos[i].failed; i++) continue;
    if (i == g->size) return idist__gpu_setup_init(g, &infos[0].id, job, reason, capacity);

    idist__nccl_job_discard(job);

    return !own_failed;
}

// Exchanges the members' information and creates the communicator. All members get the same
// outcome.
static idist_status idist__gpu_setup_agree(idist_group *g, bool has_thread) {
    const idist_allocator *mem = &g->w->cfg.mem;
    size_t nbytes = sizeof(idist__nccl_rank_info) * (size_t)g->size;
    idist__nccl_rank_info mine, *infos = (idist__nccl_rank_info *)idist__mem_alloc(mem, nbytes);
    idist__nccl_job *job = NULL;
    idist_status status = IDIST_ERR_NO_MEMORY;
    bool ok = false, all = false;
    char reason[256] = "";

    if (infos) job = idist__gpu_setup_prepare_local(g, &mine, reason, sizeof reason);
    if (job) status = idist__gpu_leave_goes_on(g, IDIST_OK);
    if (status == IDIST_OK) status = idist__survey(g, &mine, infos, sizeof mine);

    if (status == IDIST_OK) {
        ok = idist__gpu_setup_create(g, infos, job, reason, sizeof reason);
    } else {
        idist__nccl_job_discard(job);
    }

    status = idist__gpu_leave_goes_on(g, status);
    if (ok && !has_thread)
        snprintf(reason, sizeof reason, "cannot start a thread to watch the other ranks");
    if (status == IDIST_OK)
        status = idist__gpu_agree_all_succeeded(g, !ok || !has_thread, reason, sizeof reason, &all);
    if (status == IDIST_OK && !all)
        status =
            idist__fail(IDIST_ERR_DEVICE, "%s; IDIST_DEVICE_BACKEND=staged needs no NCCL", reason);
    idist__mem_free(mem, infos);

    return status;
}

// Makes NCCL ready for a group. From now on the progress thread watches the other ranks. Without
// this thread, a lost rank would go unnoticed, even while NCCL connects the ranks. If the thread
// cannot be started, or if the set-up fails, the next call may try again.
static idist_status idist__gpu_setup_prepare_comm(idist_group *g) {
    idist__world *w = g->w;
    bool has_thread = idist__progress_thread_need(w) == IDIST_OK;
    int nthreads = idist__os_thread_count();
    idist_status status;

    w->progress.watched = true;
    idist__os_cond_signal(&w->work); // the progress thread sleeps until it has something to watch
    status = idist__gpu_setup_agree(g, has_thread);

    if (status != IDIST_OK) {
        idist__nccl_abort_wait(g);
        idist__nccl_abort_leave(g);
    }

    if (idist__os_thread_count() > nthreads)
        w->machine.foreign_thread_count += idist__os_thread_count() - nthreads; // NCCL's own

    return status;
}

static void idist__gpu_setup_group_free(idist_group *g) {
    idist__gpu_group *gg = idist__gpu_group_of(g);
    int i;

    if (!gg) return;
    if (gg->path == IDIST__BY_IPC) idist__ipc_arena_release(g);
    for (i = 0; i < IDIST__STREAM_COUNT; i++)
        if (gg->stream[i]) cudaStreamDestroy(gg->stream[i]);
    cudaGetLastError();
    free(gg->gate);
    g->device = NULL;
    idist__mem_free(&g->w->cfg.mem, gg);
}

// Creates the streams that this rank uses for the group, and chooses the group's path.
static idist_status idist__gpu_setup_group_make(idist_group *g) {
    idist__gpu_group *gg = (idist__gpu_group *)idist__mem_alloc(&g->w->cfg.mem, sizeof *gg);
    idist__gpu_guard guard = idist__gpu_device_enter(idist__gpu_of(g->w));
    cudaError_t error = cudaSuccess;
    int i, least = 0, greatest = 0, priority = 0; // 0 is the default and the lowest priority

    if (g->w->cfg.high_priority) {
        error = cudaDeviceGetStreamPriorityRange(&least, &greatest);
        priority = greatest;
    }

    for (i = 0; i < IDIST__STREAM_COUNT && gg && error == cudaSuccess; i++)
        error = cudaStreamCreateWithPriority(&gg->stream[i], cudaStreamNonBlocking, priority);

    if (gg) {
        gg->queue_end = &gg->queue;
        g->device = gg;
        gg->path = idist__gpu_setup_choose_path(g);
    }

    if (error != cudaSuccess) idist__gpu_setup_group_free(g);
    idist__gpu_device_leave(idist__gpu_of(g->w), guard);
    if (gg && error == cudaSuccess) return IDIST_OK;
    idist__gpu_device_fail_group(g, gg ? idist__gpu_device_fail("cudaStreamCreate", error)
                                       : IDIST_ERR_NO_MEMORY);

    return g->status;
}

static bool idist__gpu_setup_is_prepared(const void *arg) {
    const idist_group *g = (const idist_group *)arg;
    return !idist__gpu_group_of(g)->preparing || g->w->progress.stops;
}

// Returns the time until which a thread waits for another thread to prepare the group. This allows
// for the time-outs of two exchanges and of the set-up.
static int64_t idist__gpu_setup_prepare_deadline(const idist__world *w) {
    int64_t call_ms = w->cfg.timeout_ms, init_ms = w->cfg.init_timeout_ms;

    if (call_ms <= 0 || init_ms <= 0) return IDIST__FOREVER;
    return idist__os_clock_deadline(2 * call_ms + init_ms);
}

// Sets up what the members of a group share on the group's path.
static idist_status idist__gpu_setup_prepare_path(idist_group *g) {
    const idist__gpu *gpu = idist__gpu_of(g->w);
    idist__gpu_group *gg = idist__gpu_group_of(g);
    idist__gpu_guard guard = idist__gpu_device_enter(gpu);
    idist_status status = IDIST_OK;

    gg->preparing = true;
    if (gg->path == IDIST__BY_NCCL) status = idist__gpu_setup_prepare_comm(g);
    if (gg->path == IDIST__BY_IPC) status = idist__ipc_setup_prepare(g);
    idist__gpu_device_leave(gpu, guard);
    if (status == IDIST_ERR_NO_MEMORY && !g->w->progress.stops)
        idist__group_fail_memory(g); // the other members are waiting for this rank
    gg->preparing = false;
    gg->ready = status == IDIST_OK;

    return status;
}

// Prepares a group, or waits for the thread that prepares the group. Releases the lock meanwhile.
// All members call this function, in their first call on device memory.
static idist_status idist__gpu_setup_prepare(idist_group *g) {
    idist__world *w = g->w;
    idist__gpu *gpu = idist__gpu_of(w);
    idist_status status;

    gpu->user_count++;  // closing the world waits for us
    g->running_count++; // keeps other threads from freeing the group
    if (!idist__gpu_agree_wait_until(w, idist__gpu_setup_is_prepared, g,
                                     idist__gpu_setup_prepare_deadline(w)))
        status = idist__fail(IDIST_ERR_TIMEOUT,
                             "another thread's first call of the group on device memory has not "
                             "returned: is the device busy?");
    else status = idist__gpu_leave_goes_on(g, IDIST_OK);
    if (status == IDIST_OK && !idist__gpu_group_of(g)->ready)
        status = idist__gpu_setup_prepare_path(g);
    gpu->user_count--;
    g->running_count--;
    if (w->wait.blocked_count) idist__os_cond_broadcast(&w->changed); // wakes threads that wait

    return status;
}
