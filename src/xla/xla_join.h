// xla/xla_join.h: the choice of the device and of the path, agreed by all ranks
#pragma once

#include "os/random.h"
#include "os/process.h"
#include "os/thread.h"
#include "base/fail.h"
#include "base/text.h"
#include "base/mem.h"
#include "base/log.h"
#include "base/hash.h"
#include "launch/env.h"
#include "launch/config.h"
#include "core/model.h"
#include "core/backend.h"
#include "core/world.h"
#include "core/survey.h"
#include "xla/pjrt.h"
#include "xla/tpu.h"
#include "xla/xla_model.h"
#include "xla/xla_home.h"
#include "xla/xla_call.h"
#include "xla/xla_engine.h"

// The names of the paths, which desc.device_backend may have besides "auto".
static const char *const idist__xla_path_names[] = {"auto", "xla", "staged"};

// Returns the path that desc.device_backend names, or -1 if no path has the name.
static int idist__xla_join_path_named(const char *asked) {
    if (!asked[0]) return IDIST__XLA_ANY_PATH;
    if (strcmp(asked, "xla") == 0) return IDIST__XLA_BY_PROGRAM;
    return strcmp(asked, "staged") == 0 ? IDIST__XLA_BY_STAGING : -1;
}

// Returns true if desc.device names a device of this backend. Sets *number to the number of the
// device, or to -1 if the name has none.
static bool idist__xla_join_device_named(const char *asked, int *number) {
    int64_t value;

    *number = -1;
    if (strncmp(asked, "tpu", 3) != 0 && strncmp(asked, "xla", 3) != 0) return false;
    if (!asked[3]) return true;
    if (asked[3] != ':' || !idist__parse_int(asked + 4, 0, 4095, &value)) return false;
    *number = (int)value;

    return true;
}

// Returns a number that is equal for ranks that are threads of one process, and only for those.
static uint64_t idist__xla_join_process(const idist__world *w) {
    idist__config real = w->cfg;

    memset(real.host_id, 0, sizeof real.host_id); // the program's name for the host does not count
    return idist__hash_mix(idist__config_host_key(&real),
                           idist__hash_mix((uint64_t)idist__os_process_id(),
                                           idist__os_process_space()));
}

// Returns true if this rank is the only one of its process.
static bool idist__xla_join_is_alone(const idist__world *w, const idist__xla_rank_info *infos) {
    int i;

    for (i = 0; i < w->group.size; i++)
        if (i != w->group.rank && infos[i].process == infos[w->group.rank].process) return false;
    return true;
}

// Returns true if the user asks for a TPU, and not for any device of XLA.
static bool idist__xla_join_wants_tpu(const idist__world *w) {
    const char *asked = w->cfg.device, *pjrt_device = idist__os_env("PJRT_DEVICE");

    if (asked[0]) return strncmp(asked, "tpu", 3) == 0;
    return pjrt_device && strcmp(pjrt_device, "TPU") == 0;
}

// Opens the client and chooses this rank's device. Returns false with the reason in `why`.
static bool idist__xla_join_open(idist__world *w, bool is_alone, char *why, size_t capacity) {
    idist__xla *x = idist__xla_of(w);
    int local_rank = w->nodes[w->group.rank].local_rank, number, at;

    idist__xla_join_device_named(w->cfg.device, &number);
    if (is_alone && !w->cfg.xla_client && !idist__os_env("IDIST_XLA_LIB") &&
        idist__tpu_has_chip() &&
        !idist__tpu_set_variables(w, number < 0 ? local_rank : number, why, capacity))
        return false;
    if (!idist__xla_home_enter(&idist__xla_home_one, &w->cfg, why, capacity)) return false;

    x->home = &idist__xla_home_one;

    if (idist__xla_join_wants_tpu(w) && strcmp(x->home->platform, "tpu") != 0) {
        snprintf(why, capacity, "the plug-in has devices of platform \"%s\", not TPUs",
                 x->home->platform);
        return false;
    }

    at = number < 0 ? local_rank % x->home->ndevices : number;
    if (is_alone && x->home->ndevices == 1) at = 0; // TPU_VISIBLE_CHIPS has chosen
    if (at < x->home->ndevices) x->device = x->home->devices[at];
    else snprintf(why, capacity, "device %d of %d", at, x->home->ndevices);

    return x->device != NULL;
}

// Finds the device of this rank.
static void idist__xla_join_probe(idist__world *w, bool is_alone, idist__xla_rank_info *info) {
    idist__xla *x = idist__xla_of(w);
    const char *asked = w->cfg.device;
    char version[sizeof x->home->platform + sizeof x->home->version];
    void *description = NULL;
    int number;

    info->named = idist__xla_join_device_named(asked, &number) || w->cfg.xla_client ||
                  idist__xla_join_wants_tpu(w);
    info->wanted = idist__xla_join_path_named(w->cfg.device_backend);
    idist__os_random(&info->launch_base, sizeof info->launch_base);
    snprintf(info->reason, sizeof info->reason, "the requested device is \"cpu\"");
    if (strcmp(asked, "cpu") == 0) return;

    if (!idist__xla_join_open(w, is_alone, info->reason, sizeof info->reason)) return;
    description = idist__pjrt_ask(x->home->api, IDIST__PJRT_DEVICE_DESCRIPTION, x->device,
                                  info->reason, sizeof info->reason);
    if (!description) return;
    info->device_id = idist__pjrt_ask_number(x->home->api, IDIST__PJRT_DEVICE_ID, description,
                                             info->reason, sizeof info->reason);
    info->process_index = x->home->process_index;
    snprintf(version, sizeof version, "%s %s", x->home->platform, x->home->version);
    info->version = idist__hash(version, strlen(version));
    info->found = info->device_id >= 0;
}

// Returns true if the ranks of a pair can be replicas of one program. Otherwise writes the reason.
static bool idist__xla_join_may_pair(const idist__xla_rank_info *a, const idist__xla_rank_info *b,
                                     char *why, size_t capacity) {
    if (a->version != b->version)
        snprintf(why, capacity, "they have plug-ins of different versions");
    else if (a->device_id == b->device_id && a->process == b->process)
        snprintf(why, capacity,
                 "they share a device (IDIST_XLA_CPU_DEVICES makes more devices of a CPU)");
    else if (a->device_id == b->device_id ||
             (a->process_index == b->process_index) != (a->process == b->process))
        snprintf(why, capacity, "their processes do not belong to one world of XLA");
    else return true;

    return false;
}

// Returns true if every two members of a group can be replicas of one program. Otherwise writes the
// reason.
static bool idist__xla_join_may_run(const idist_group *g, char *why, size_t capacity) {
    const idist__xla_rank_info *infos = idist__xla_of(g->w)->infos;
    char reason[160];
    int i, k;

    for (i = 1; i < g->size; i++)
        for (k = 0; k < i; k++) {
            if (idist__xla_join_may_pair(&infos[g->ranks[k]], &infos[g->ranks[i]], reason,
                                         sizeof reason))
                continue;
            snprintf(why, capacity, "rank %d and rank %d: %s", g->ranks[k], g->ranks[i], reason);
            return false;
        }

    return true;
}

// Chooses the path, which is the same on all ranks.
static idist_status idist__xla_join_agree_path(idist__world *w) {
    idist__xla *x = idist__xla_of(w);
    bool may_run;
    char why[240];
    int i;

    for (i = 1; i < w->group.size; i++)
        if (x->infos[i].wanted != x->infos[0].wanted)
            return idist__fail(IDIST_ERR_ENV,
                               "initialize: rank 0 and rank %d differ in IDIST_DEVICE_BACKEND", i);

    x->launch_base = x->infos[0].launch_base;
    x->path = (idist__xla_path)x->infos[0].wanted;
    if (x->path == IDIST__XLA_BY_STAGING) return IDIST_OK;
    may_run = idist__xla_join_may_run(&w->group, why, sizeof why);
    if (!may_run && x->path == IDIST__XLA_BY_PROGRAM)
        return idist__fail(IDIST_ERR_UNSUPPORTED,
                           "initialize: device backend xla cannot be used: %s; "
                           "IDIST_DEVICE_BACKEND=staged can",
                           why);
    if (!may_run)
        idist__log_print(&w->log, IDIST_LOG_INFO, "device memory is staged through the host: %s",
                         why);
    x->path = may_run ? IDIST__XLA_BY_PROGRAM : IDIST__XLA_BY_STAGING;

    return IDIST_OK;
}

// Finds one outcome for all ranks: a device each, no device at all, or one error.
static idist_status idist__xla_join_agree(idist__world *w, bool *all) {
    const idist__xla_rank_info *infos = idist__xla_of(w)->infos;
    bool is_named = false;
    int i, without = -1;

    for (i = w->group.size - 1; i >= 0; i--) {
        if (!infos[i].found) without = i;
        if (infos[i].named) is_named = true;
    }

    *all = without < 0;
    if (*all) return idist__xla_join_agree_path(w);
    if (is_named)
        return idist__fail(IDIST_ERR_NO_DEVICE, "initialize: rank %d has no device: %s", without,
                           infos[without].reason);
    snprintf(w->about.no_device, sizeof w->about.no_device, "rank %d has none: %.160s", without,
             infos[without].reason);
    idist__log_print(&w->log, IDIST_LOG_INFO, "no device: %s", w->about.no_device);

    return IDIST_OK;
}

// Installs the device backend in front of the host's backend.
static void idist__xla_join_install(idist__world *w) {
    static const idist_device_api device_api = {idist__xla_engine_route, idist__xla_engine_launch,
                                                idist__xla_call_landed, idist__xla_engine_follow,
                                                idist__xla_engine_end_calls};
    idist__xla *x = idist__xla_of(w);
    bool is_tpu = strncmp(x->home->platform, "tpu", 3) == 0;

    x->host_backend = w->backend;
    x->api = *w->backend;
    x->api.start = idist__xla_engine_start;
    x->api.progress = idist__xla_engine_progress;
    x->api.sleep = idist__xla_engine_sleep;
    x->api.cancel = idist__xla_engine_cancel;
    x->api.announce = idist__xla_engine_announce;
    x->api.missing = idist__xla_engine_missing;
    x->api.group_close = idist__xla_engine_group_close;
    x->api.close = idist__xla_engine_close;
    if (x->api.quick_message) x->api.quick_message = idist__xla_engine_quick_message;
    snprintf(w->about.device_name, sizeof w->about.device_name, "%s:%d", is_tpu ? "tpu" : "xla",
             x->infos[w->group.rank].device_id);
    w->about.device_backend = idist__xla_path_names[x->path];
    w->backend = &x->api;
    w->device_api = &device_api;
}

// Starts the worker and installs the device backend. Called with the world's lock held.
static idist_status idist__xla_join_begin(idist__world *w) {
    idist__xla *x = idist__xla_of(w);
    int err = idist__os_thread_start(&x->worker, idist__xla_engine_work, x);

    if (err) return idist__fail_errno("initialize: starting a thread for XLA", err);
    x->has_worker = true;
    w->machine.foreign_thread_count++;
    idist__xla_join_install(w);

    return IDIST_OK;
}

// Allocates what the device backend keeps for a world.
static idist_status idist__xla_join_allocate(idist__world *w) {
    const idist_allocator *mem = &w->cfg.mem;
    idist__xla *x = (idist__xla *)idist__mem_alloc(mem, sizeof *x);

    if (!x) return IDIST_ERR_NO_MEMORY;
    w->device = x;
    x->w = w;
    x->jobs_end = &x->jobs;
    idist__os_cond_init(&x->work);
    idist__os_cond_init(&x->left);
    x->infos =
        (idist__xla_rank_info *)idist__mem_alloc(mem, sizeof *x->infos * (size_t)w->group.size);

    return x->infos ? IDIST_OK : IDIST_ERR_NO_MEMORY;
}

// Finds out which device each rank has, and whether all of them have one. The first exchange tells
// which ranks share a process. This must be known before libtpu is loaded, because it decides
// whether idist sets the variables of xla/tpu.h. Called with the world's lock held.
static idist_status idist__xla_join_meet(idist__world *w, bool *all) {
    idist__xla *x = idist__xla_of(w);
    int nthreads = idist__os_thread_count();
    idist__xla_rank_info mine;
    idist_status status;

    memset(&mine, 0, sizeof mine);
    mine.process = idist__xla_join_process(w);
    status = idist__survey(&w->group, &mine, x->infos, sizeof mine);
    if (status != IDIST_OK) return status;
    idist__xla_join_probe(w, idist__xla_join_is_alone(w, x->infos), &mine);
    w->machine.foreign_thread_count += idist__os_thread_count() - nthreads;
    status = idist__survey(&w->group, &mine, x->infos, sizeof mine);
    if (status != IDIST_OK) return status;

    return idist__xla_join_agree(w, all);
}

// Looks for a device on each rank of a new world. If all ranks have one, puts the device backend in
// front of the host's backend. Collective.
static idist_status idist__xla_join_wrap(idist__world *w) {
    idist_status status = idist__xla_join_allocate(w);
    bool all = false;

    idist__world_lock(w);
    if (status == IDIST_OK) status = idist__xla_join_meet(w, &all);
    if (status == IDIST_OK && all) status = idist__xla_join_begin(w);
    // If the world has failed, this rank reports the failure in its next call, as do ranks that
    // returned from this function earlier.
    if (w->group.status == IDIST_ERR_ABORTED || w->group.status == IDIST_ERR_MISMATCH)
        status = IDIST_OK;
    if (!w->device_api && !w->about.no_device[0])
        snprintf(w->about.no_device, sizeof w->about.no_device,
                 "the world failed before it had one");
    idist__os_mutex_unlock(&w->lock);

    if (w->device_api)
        idist__log_print(&w->log, IDIST_LOG_INFO, "device %s, device backend %s",
                         w->about.device_name, w->about.device_backend);
    else if (w->device) idist__xla_engine_free(w);

    return status;
}

static idist_status idist__xla_join_claim(idist__config *cfg, const char **why) {
    const char *path = cfg->device_backend, *device = cfg->device;
    int number;

    if (!cfg->xla_api != !cfg->xla_client)
        return idist__fail(IDIST_ERR_ARG,
                           "initialize: set both of desc.xla_api and desc.xla_client, or neither");
    *why = "desc.device or desc.device_backend names a device or a path of idist_nccl.h";
    if (strcmp(path, "nccl") == 0 || strcmp(path, "ipc") == 0) return IDIST_ERR_NO_BACKEND;
    if (strncmp(device, "cuda", 4) == 0) return IDIST_ERR_NO_BACKEND;
    if (device[0] && strcmp(device, "cpu") != 0 && !idist__xla_join_device_named(device, &number))
        return idist__fail(IDIST_ERR_ENV,
                           "initialize: device \"%.40s\" is none of cpu, tpu, tpu:0, "
                           "xla, xla:0, ...",
                           device);
    if (idist__xla_join_path_named(path) >= 0) return IDIST_OK;

    return idist__fail(cfg->device_backend_in_desc ? IDIST_ERR_ARG : IDIST_ERR_ENV,
                       "initialize: device backend \"%.40s\" (IDIST_DEVICE_BACKEND) is none of "
                       "auto, xla, staged",
                       path);
}

static void idist__xla_join_fill(idist_backend_api *api) {
    api->name = "xla";
    api->claim = idist__xla_join_claim;
    api->wrap = idist__xla_join_wrap;
}

const idist_backend_api *idist_xla_backend(void) {
    static idist_backend_api api;
    return idist__backend_fill(&api, idist__xla_join_fill);
}

__attribute__((constructor(IDIST__REGISTER_XLA))) static void idist__xla_join_register(void) {
    (void)idist_register_backend(idist_xla_backend());
}
