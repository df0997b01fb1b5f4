// gpu/route/gpu_join.h: how all ranks agree on their devices and on a device backend
#pragma once

#include "os/process.h"
#include "os/thread.h"
#include "base/fail.h"
#include "base/text.h"
#include "base/mem.h"
#include "base/log.h"
#include "launch/env.h"
#include "launch/config.h"
#include "core/model.h"
#include "core/backend.h"
#include "core/world.h"
#include "core/survey.h"
#include "gpu/gpu_model.h"
#include "gpu/gpu_device.h"
#include "gpu/ipc/ipc_arena.h"
#include "gpu/nccl/nccl_load.h"
#include "gpu/nccl/nccl_job.h"
#include "gpu/route/gpu_setup.h"
#include "gpu/route/gpu_route.h"
#include "gpu/route/gpu_engine.h"

// Returns true if the user lets NCCL run several ranks on one GPU. From 2.30.3 on, NCCL does so
// with NCCL_MULTI_RANK_GPU_ENABLE=1. Tests set NCCL_HOSTID instead.
static bool idist__gpu_join_allows_shared_gpu(int version) {
    const char *enable = idist__os_env("NCCL_MULTI_RANK_GPU_ENABLE");
    return idist__os_env("NCCL_HOSTID") || (enable && strcmp(enable, "1") == 0 && version >= 23003);
}

// Returns true if a CUDA error means more than "this machine has no GPU". Error 35
// (cudaErrorInsufficientDriver) means either no driver or a driver that is too old.
static bool idist__gpu_join_is_fault(cudaError_t error) {
    int driver = 0;

    if (error == cudaSuccess || error == cudaErrorNoDevice || error == cudaErrorStubLibrary)
        return false;
    return error != cudaErrorInsufficientDriver ||
           (cudaDriverGetVersion(&driver) == cudaSuccess && driver > 0);
}

static void idist__gpu_join_describe_error(const char *what, cudaError_t error,
                                           idist__gpu_rank_info *info) {
    int driver = 0, runtime = 0;

    info->cuda_error = idist__gpu_join_is_fault(error) ? (int32_t)error : 0;
    if (info->cuda_error && error == cudaErrorInsufficientDriver &&
        cudaDriverGetVersion(&driver) == cudaSuccess &&
        cudaRuntimeGetVersion(&runtime) == cudaSuccess)
        snprintf(info->reason, sizeof info->reason,
                 "%s: the driver supports CUDA %d.%d, but the program needs %d.%d", what,
                 driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    else
        snprintf(info->reason, sizeof info->reason, "%s: %s (%s, %d)", what,
                 cudaGetErrorString(error), cudaGetErrorName(error), (int)error);
}

// Returns a text that tells the user what to do about an error.
static const char *idist__gpu_join_remedy(cudaError_t error) {
    switch ((int)error) {
    case cudaErrorInsufficientDriver: return "update the driver, or build with an older toolkit";
    case cudaErrorInitializationError:
        return "CUDA does not work in a child forked by a process that has used it: call "
               "idist_spawn with start_method \"exec\"";
    case cudaErrorDevicesUnavailable:
        return "another process uses the GPU exclusively: nvidia-smi -c 0 lets several use it";
    case cudaErrorMemoryAllocation: return "the GPU is out of memory: see nvidia-smi";
    case cudaErrorSystemNotReady:
        return "the fabric manager is not running: systemctl start nvidia-fabricmanager";
    case cudaErrorSystemDriverMismatch:
        return "libcuda.so.1 does not match the driver: reboot after a driver update";
    case cudaErrorCompatNotSupportedOnDevice:
        return "the GPU does not support cuda-compat: remove it from LD_LIBRARY_PATH";
    default: return "see nvidia-smi and the kernel's log";
    }
}

// Parses desc.device, and sets *number if the name contains a number. Returns false if no device is
// wanted, or if the name is invalid; info gives the reason.
static bool idist__gpu_join_parse_device(const char *asked, idist__gpu_rank_info *info,
                                         int *number) {
    int64_t value;

    if (strcmp(asked, "cpu") == 0) {
        info->presence = IDIST__GPU_NONE;
        snprintf(info->reason, sizeof info->reason, "the requested device is \"cpu\"");
        return false;
    }

    if (!asked[0] || strcmp(asked, "cuda") == 0) return true;

    if (strncmp(asked, "cuda:", 5) != 0 || !idist__parse_int(asked + 5, 0, 4095, &value)) {
        info->presence = IDIST__GPU_BAD_NAME;
        snprintf(info->reason, sizeof info->reason,
                 "invalid device \"%.40s\": use cpu, cuda, cuda:0, cuda:1, ...", asked);
        return false;
    }

    *number = (int)value;

    return true;
}

// Makes device `number` the current one. If the user gave no number, `number` is taken modulo the
// number of devices. Sets *what to the name of the CUDA function that failed.
static cudaError_t idist__gpu_join_open_device(idist__gpu *gpu, idist__gpu_rank_info *info,
                                               int number, bool numbered, const char **what) {
    int n = 0;
    cudaError_t error = cudaGetDeviceCount(&n);

    *what = "cudaGetDeviceCount";
    if (error != cudaSuccess) return error;
    if (n == 0) return cudaErrorNoDevice;
    if (numbered && number >= n) return cudaErrorInvalidDevice;
    gpu->device = number % n;
    info->device = gpu->device;

    *what = "cudaSetDevice";
    error = cudaSetDevice(gpu->device);
    if (error != cudaSuccess) return error;

    *what = "cudaDeviceGetPCIBusId";
    error = cudaDeviceGetPCIBusId(info->bus_id, (int)sizeof info->bus_id, gpu->device);
    if (error != cudaSuccess) return error;

    *what = "cudaDeviceGetAttribute";
    return cudaDeviceGetAttribute(&info->major, cudaDevAttrComputeCapabilityMajor, gpu->device);
}

// Finds and opens the device of this rank, or records in `info` why there is none.
static void idist__gpu_join_probe_device(const idist__world *w, idist__gpu *gpu,
                                         idist__gpu_rank_info *info) {
    const char *asked = w->cfg.device, *what;
    int number = w->nodes[w->group.rank].local_rank;
    cudaError_t error;

    if (!idist__gpu_join_parse_device(asked, info, &number)) return;

    error = idist__gpu_join_open_device(gpu, info, number, asked[0] && asked[4] == ':', &what);

    if (error != cudaSuccess) {
        info->presence = info->named ? IDIST__GPU_MISSING : IDIST__GPU_NONE;
        idist__gpu_join_describe_error(what, error, info);
        cudaGetLastError();
        return;
    }

    idist__gpu_device_find_context_state(gpu);
}

// The names of the paths. desc.device_backend is "auto", or one of these names except "none".
static const char *const idist__gpu_path_names[] = {"none", "nccl", "ipc", "staged"};

// Returns the path that desc.device_backend asks for, IDIST__BY_HOST_MEMORY for any path, or -1 if
// no path has this name.
static int idist__gpu_join_path_named(const char *asked) {
    int i;

    if (!asked[0]) return IDIST__BY_HOST_MEMORY;
    for (i = IDIST__BY_NCCL; i <= IDIST__BY_STAGING; i++)
        if (strcmp(asked, idist__gpu_path_names[i]) == 0) return i;
    return -1;
}

// Fills in what this rank tells the other ranks about its device and its NCCL version.
static void idist__gpu_join_probe(idist__world *w, idist__gpu *gpu, idist__gpu_rank_info *info) {
    idist__config real = w->cfg;

    memset(info, 0, sizeof *info);
    info->named = strncmp(w->cfg.device, "cuda", 4) == 0;
    info->wanted_backend = idist__gpu_join_path_named(w->cfg.device_backend);
    info->has_user_comm = w->cfg.nccl_comm != NULL;
    memset(real.host_id, 0, sizeof real.host_id);
    info->machine_key = idist__config_host_key(&real);
    info->process = idist__ipc_arena_process();
    snprintf(info->no_nccl_reason, sizeof info->no_nccl_reason, "not asked for");
    idist__gpu_join_probe_device(w, gpu, info);

    if (info->presence == IDIST__GPU_FOUND && info->wanted_backend <= IDIST__BY_NCCL) {
        idist__nccl_load_once(gpu->nccl, info->no_nccl_reason, sizeof info->no_nccl_reason);
        info->nccl = gpu->nccl->version;
        info->allows_shared_gpu = idist__gpu_join_allows_shared_gpu(info->nccl);
    }
}

// The ranks that prevent the world from using NCCL. A member is -1 if there is no such rank.
typedef struct idist__nccl_obstacles {
    int without; // the first rank without NCCL
    int other;   // the first rank whose version differs from the version of rank 0
} idist__nccl_obstacles;

// Compares the information of all ranks. Disables NCCL if a rank lacks it or has a different
// version, and sets gpu->nccl_reduces_f8.
static idist_status idist__gpu_join_compare_infos(idist__world *w, idist__nccl_obstacles *nccl) {
    idist__gpu *gpu = idist__gpu_of(w);
    const idist__gpu_rank_info *infos = gpu->rank_infos;
    int i;

    nccl->without = nccl->other = -1;
    gpu->nccl_reduces_f8 = true;

    for (i = 0; i < w->group.size; i++) {
        if (infos[i].has_user_comm != infos[0].has_user_comm)
            return idist__fail(IDIST_ERR_ENV,
                               "initialize: rank 0 and rank %d differ in desc.nccl_comm", i);
        if (infos[i].wanted_backend != infos[0].wanted_backend)
            return idist__fail(IDIST_ERR_ENV,
                               "initialize: rank 0 and rank %d differ in IDIST_DEVICE_BACKEND", i);
        if (!infos[i].nccl && nccl->without < 0) nccl->without = i;
        if (infos[i].nccl != infos[0].nccl && nccl->other < 0) nccl->other = i;
        if (infos[i].nccl < 22400 || infos[i].major < 9) gpu->nccl_reduces_f8 = false;
    }

    if (nccl->without >= 0 || nccl->other >= 0) gpu->nccl->version = 0;

    return IDIST_OK;
}

// Returns an error if NCCL cannot be used. Called if the user asked for NCCL.
static idist_status idist__gpu_join_check_wanted(const idist__world *w,
                                                 const idist__nccl_obstacles *nccl) {
    const idist__gpu_rank_info *infos = idist__gpu_of(w)->rank_infos;
    int a, b;

    if (nccl->without >= 0)
        return idist__fail(IDIST_ERR_NO_DEVICE, "initialize: rank %d: %s", nccl->without,
                           infos[nccl->without].no_nccl_reason);
    if (nccl->other >= 0)
        return idist__fail(IDIST_ERR_NO_DEVICE,
                           "initialize: rank 0 has NCCL %d, rank %d has NCCL %d", infos[0].nccl,
                           nccl->other, infos[nccl->other].nccl);
    if (!idist__gpu_setup_find_shared(&w->group, &a, &b)) return IDIST_OK;
    if (infos[a].allows_shared_gpu && infos[b].allows_shared_gpu) return IDIST_OK;

    return idist__fail(
        IDIST_ERR_UNSUPPORTED,
        "initialize: rank %d and rank %d share the GPU %s, which NCCL %d refuses; NCCL 2.30.3 and "
        "later allow this with NCCL_MULTI_RANK_GPU_ENABLE=1",
        b, a, infos[a].bus_id, infos[a].nccl);
}

// Logs why NCCL, the best backend for GPUs, is not used. Called if the user did not ask for a
// particular device backend.
static void idist__gpu_join_log_obstacles(const idist__world *w,
                                          const idist__nccl_obstacles *nccl) {
    const idist__gpu_rank_info *infos = idist__gpu_of(w)->rank_infos;
    const idist_group *g = &w->group;
    int a, b;
    bool useful = g->size > 1 && !idist__gpu_setup_find_shared(g, &a, &b); // NCCL could serve them

    if (nccl->without >= 0)
        idist__log_print(
            &w->log, useful && nccl->without == g->rank ? IDIST_LOG_WARN : IDIST_LOG_INFO,
            "no NCCL, without which GPUs communicate at a fraction of their speed: %s; install it "
            "(pip install nvidia-nccl-cu%d), or set its path in IDIST_NCCL_LIB",
            infos[nccl->without].no_nccl_reason, CUDART_VERSION / 1000);
    else if (nccl->other >= 0)
        idist__log_print(&w->log, IDIST_LOG_WARN,
                         "no NCCL: rank 0 has version %d, rank %d has version %d", infos[0].nccl,
                         nccl->other, infos[nccl->other].nccl);
}

// Agrees on one device backend for all ranks. NCCL is used only if all ranks have the same version.
static idist_status idist__gpu_join_agree_backend(idist__world *w) {
    const idist__gpu_rank_info *infos = idist__gpu_of(w)->rank_infos;
    const idist_group *g = &w->group;
    idist__nccl_obstacles nccl;
    int a, b;
    idist_status status = idist__gpu_join_compare_infos(w, &nccl);

    if (status == IDIST_OK && infos[0].wanted_backend == IDIST__BY_NCCL)
        status = idist__gpu_join_check_wanted(w, &nccl);
    if (status != IDIST_OK) return status;

    if (infos[0].wanted_backend == IDIST__BY_IPC &&
        (!idist__gpu_setup_is_one_host(g) || g->size > IDIST__IPC_RANKS || !IDIST__IPC_KERNELS))
        return idist__fail(
            IDIST_ERR_UNSUPPORTED,
            "initialize: ipc needs at most %d ranks, all on one host, and CUDA 12.8 or later",
            IDIST__IPC_RANKS);

    if (!infos[0].wanted_backend) idist__gpu_join_log_obstacles(w, &nccl);
    if (idist__gpu_setup_find_shared(g, &a, &b))
        idist__log_print(&w->log, IDIST_LOG_INFO, "rank %d and rank %d share the GPU %s", b, a,
                         infos[a].bus_id);

    return IDIST_OK;
}

// Logs that no rank uses a device. If GPUs stay idle, the rank that causes this logs a warning.
static void idist__gpu_join_log_no_device(const idist__world *w, int n_with) {
    const idist__gpu_rank_info *mine = &idist__gpu_of(w)->rank_infos[w->group.rank];

    if (mine->cuda_error)
        idist__log_print(&w->log, IDIST_LOG_WARN,
                         "no rank uses a GPU: %s; %s. (Set IDIST_DEVICE=cpu if that is intended)",
                         mine->reason, idist__gpu_join_remedy((cudaError_t)mine->cuda_error));
    else if (n_with && mine->presence == IDIST__GPU_NONE && strcmp(w->cfg.device, "cpu") != 0)
        idist__log_print(&w->log, IDIST_LOG_WARN,
                         "no rank uses a GPU, though %d have one: %s. (Set IDIST_DEVICE=cpu if "
                         "that is intended)",
                         n_with, mine->reason);
    else idist__log_print(&w->log, IDIST_LOG_INFO, "no device: %s", w->about.no_device);
}

// Decides on the same outcome for all ranks: a device for each rank, no device at all, or an error.
static idist_status idist__gpu_join_agree_device(idist__world *w, bool *all) {
    const idist__gpu_rank_info *infos = idist__gpu_of(w)->rank_infos;
    int i, n = w->group.size, worst = 0, named = 0, n_with = 0;

    for (i = 0; i < n; i++) {
        if (infos[i].presence > infos[worst].presence ||
            (infos[i].presence == infos[worst].presence && infos[i].cuda_error &&
             !infos[worst].cuda_error))
            worst = i;
        n_with += infos[i].presence == IDIST__GPU_FOUND;
        named |= infos[i].named;
    }

    *all = infos[worst].presence == IDIST__GPU_FOUND;
    if (*all) return idist__gpu_join_agree_backend(w);
    if (infos[worst].presence == IDIST__GPU_BAD_NAME)
        return idist__fail(IDIST_ERR_ENV, "initialize: rank %d: %s", worst, infos[worst].reason);
    if (named)
        return idist__fail(IDIST_ERR_NO_DEVICE, "initialize: rank %d has no device: %s", worst,
                           infos[worst].reason);
    snprintf(w->about.no_device, sizeof w->about.no_device, "rank %d has none: %.160s", worst,
             infos[worst].reason);
    idist__gpu_join_log_no_device(w, n_with);

    return IDIST_OK;
}

static void idist__gpu_join_install(idist__world *w) {
    static const idist_device_api device_api = {idist__gpu_route_find,
                                                idist__gpu_engine_launch_held,
                                                idist__gpu_engine_part_done,
                                                idist__gpu_engine_follow,
                                                idist__gpu_engine_end_calls};
    idist__gpu *gpu = idist__gpu_of(w);

    gpu->host_backend = w->backend;
    gpu->thread = &w->progress.thread;
    gpu->sleep_ns = IDIST__GPU_SLEEP_NS;
    gpu->api = *w->backend;
    gpu->api.start = idist__gpu_engine_start;
    gpu->api.progress = idist__gpu_engine_progress;
    gpu->api.sleep = idist__gpu_engine_sleep;
    gpu->api.cancel = idist__gpu_engine_cancel;
    if (gpu->api.retract) gpu->api.retract = idist__gpu_engine_retract;
    if (gpu->api.quick_message) gpu->api.quick_message = idist__gpu_engine_quick_message;
    gpu->api.tell = idist__gpu_engine_tell;
    gpu->api.announce = idist__gpu_engine_announce;
    gpu->api.missing = idist__gpu_engine_missing;
    gpu->api.group_close = idist__gpu_engine_group_close;
    gpu->api.close = idist__gpu_engine_close;
    __atomic_store_n(&idist__gpu_home_device, gpu->device + 1, __ATOMIC_RELEASE);
    snprintf(w->about.device_name, sizeof w->about.device_name, "cuda:%d", gpu->device);
    w->backend = &gpu->api;
    w->device_api = &device_api;
}

// The memory that a world's `device` points to.
typedef struct idist__nccl_world {
    idist__gpu gpu; // must be first, because its address is passed to free
    idist__nccl nccl;
} idist__nccl_world;

// Copies desc.nccl_config, which the program may free before a group uses it.
static idist_status idist__gpu_join_copy_config(idist__world *w) {
    const idist__nccl_config *theirs = (const idist__nccl_config *)w->cfg.nccl_config;
    size_t nbytes = theirs ? idist__gpu_setup_config_nbytes(theirs) : 0;

    if (!theirs) return IDIST_OK;
    w->cfg.nccl_config = idist__gpu_of(w)->nccl_config = idist__mem_alloc(&w->cfg.mem, nbytes);
    if (!w->cfg.nccl_config) return IDIST_ERR_NO_MEMORY;
    memcpy(idist__gpu_of(w)->nccl_config, theirs, nbytes);

    return IDIST_OK;
}

// Allocates the device backend's data for a world.
static idist_status idist__gpu_join_allocate(idist__world *w) {
    const idist_allocator *mem = &w->cfg.mem;
    idist__nccl_world *device = (idist__nccl_world *)idist__mem_alloc(mem, sizeof *device);
    size_t nbytes = sizeof(idist__gpu_rank_info) * (size_t)w->group.size;

    w->device = device ? &device->gpu : NULL; // an idist__gpu
    if (!device) return IDIST_ERR_NO_MEMORY;
    device->gpu.nccl = &device->nccl;
    device->gpu.rank_infos = (idist__gpu_rank_info *)idist__mem_alloc(mem, nbytes);
    if (!device->gpu.rank_infos) return IDIST_ERR_NO_MEMORY;

    return idist__gpu_join_copy_config(w);
}

// Finds out which device each rank has. Sets *all if every rank has one. `nthreads` is the number
// of threads of this process before CUDA starts its own threads. Called with the world's lock held.
static idist_status idist__gpu_join_meet(idist__world *w, int nthreads, bool *all) {
    idist__gpu *gpu = idist__gpu_of(w);
    idist__gpu_rank_info mine;
    idist_status status;

    idist__gpu_join_probe(w, gpu, &mine);
    w->machine.foreign_thread_count += idist__os_thread_count() - nthreads;
    status = idist__survey(&w->group, &mine, gpu->rank_infos, sizeof mine);
    if (status != IDIST_OK) return status;

    return idist__gpu_join_agree_device(w, all);
}

// Puts the device backend in front of the host's backend. Called with the world's lock held.
static idist_status idist__gpu_join_begin(idist__world *w) {
    idist__gpu_path path = IDIST__BY_HOST_MEMORY;
    idist_status status;

    idist__gpu_join_install(w);
    idist__gpu_setup_alloc_shared(w);
    status = idist__gpu_setup_group_make(&w->group);
    if (status == IDIST_OK) status = idist__gpu_setup_prepare(&w->group);
    if (w->group.device) path = idist__gpu_group_of(&w->group)->path;
    w->about.device_backend = idist__gpu_path_names[path];

    return status;
}

// Looks for a device on each rank of a new world. If all ranks have a device, puts the device
// backend in front of the host's backend. Collective.
static idist_status idist__gpu_join_wrap(idist__world *w) {
    int nthreads = idist__os_thread_count();
    idist_status status = idist__gpu_join_allocate(w);
    idist__gpu *gpu = idist__gpu_of(w);
    bool all = false;

    idist__world_lock(w);
    if (status == IDIST_OK) status = idist__gpu_join_meet(w, nthreads, &all);
    if (status == IDIST_OK && all) status = idist__gpu_join_begin(w);
    // If the world has failed, this rank reports the failure in its next call, as do ranks that
    // returned from this function earlier.
    if (w->group.status == IDIST_ERR_ABORTED || w->group.status == IDIST_ERR_MISMATCH)
        status = IDIST_OK;
    if (!all && !w->about.no_device[0])
        snprintf(w->about.no_device, sizeof w->about.no_device,
                 "the world failed before it had one");
    idist__os_mutex_unlock(&w->lock);

    if (status == IDIST_OK && all)
        idist__log_print(&w->log, IDIST_LOG_INFO, "device %s, device backend %s",
                         w->about.device_name, w->about.device_backend);
    else if (gpu && !gpu->host_backend) idist__gpu_engine_free(w); // otherwise, closing frees it

    return status;
}

static idist_status idist__gpu_join_claim(idist__config *config, const char **reason) {
    const char *asked = config->device_backend, *device = config->device;

    *reason = "desc.device or desc.device_backend names a device or a path of idist_xla.h";
    if (strcmp(asked, "xla") == 0) return IDIST_ERR_NO_BACKEND;
    if (strncmp(device, "xla", 3) == 0 || strncmp(device, "tpu", 3) == 0)
        return IDIST_ERR_NO_BACKEND;
    if (idist__gpu_join_path_named(asked) >= 0) return IDIST_OK;
    if (config->device_backend_in_desc)
        return idist__fail(IDIST_ERR_ARG,
                           "desc: \"%s\" (IDIST_DEVICE_BACKEND) is not one of auto, nccl, ipc, "
                           "staged",
                           asked);

    return idist__fail(IDIST_ERR_ENV, "IDIST_DEVICE_BACKEND=%s: use one of auto, nccl, ipc, staged",
                       asked);
}

static void idist__gpu_join_fill(idist_backend_api *api) {
    api->name = "nccl";
    api->claim = idist__gpu_join_claim;
    api->wrap = idist__gpu_join_wrap;
}

const idist_backend_api *idist_nccl_backend(void) {
    static idist_backend_api api;
    return idist__backend_fill(&api, idist__gpu_join_fill);
}

__attribute__((constructor(IDIST__REGISTER_DEVICE))) static void idist__gpu_join_register(void) {
    (void)idist_register_backend(idist_nccl_backend());
}
