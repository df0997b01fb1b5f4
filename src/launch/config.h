// launch/config.h: settings from explicit fields, then the environment, then built-in defaults
//
// Turns the caller's idist_desc and the environment into one idist__config. The result contains our
// rank and world size (from the launcher that started us), the place where the ranks meet, and
// every other setting. Code that starts a world (calls/, spawn/) calls idist__config_fill once.
// Outside of launch/, only a few variables are read, each by the file that needs it.
//
// Only idist__config_fill fills in defaults.
#pragma once

#include "os/process.h"
#include "os/cpu.h"
#include "os/file.h"
#include "os/socket.h"
#include "base/fail.h"
#include "base/text.h"
#include "base/hash.h"
#include "net/secret.h"
#include "launch/env.h"
#include "launch/detect.h"
#include "launch/where.h"

// Sets *choice to the index of a word among `names` ("a, b, c"). The word is `field`, or the value
// of the variable `var` if `field` is NULL. Index 0 is the default.
static idist_status idist__config_choice(const char *field, const char *var, const char *names,
                                         int *choice) {
    const char *text = field ? field : idist__os_env(var), *at = names;
    size_t nbytes = text ? strlen(text) : 0;

    *choice = 0;
    if (!text) return IDIST_OK;

    for (; at; ++*choice) {
        if (strncmp(at, text, nbytes) == 0 && (at[nbytes] == ',' || !at[nbytes])) return IDIST_OK;
        at = strchr(at, ',');
        if (at) at += 2;
    }

    *choice = 0;
    if (field)
        return idist__fail(IDIST_ERR_ARG, "desc: \"%s\" (%s) is not one of %s", text, var, names);

    return idist__fail(IDIST_ERR_ENV, "%s=%s: use one of %s", var, text, names);
}

// Reads a time-out from the desc or the environment. Zero means the default. A negative number
// means no time-out and is stored as -1.
static idist_status idist__config_timeout(int field, const char *var, int fallback, int *value) {
    idist_status status = IDIST_OK;

    *value = field;
    if (!field) status = idist__env_int(var, -1, INT32_MAX, value);
    if (status != IDIST_OK) return status;
    if (!*value) *value = fallback;
    if (*value < 0) *value = -1;
    return IDIST_OK;
}

static idist_status idist__config_choices(idist__config *config, const idist_desc *desc) {
    struct {
        const char *field, *var, *names;
        int *choice;
    } choices[3] = {{desc->transport, "IDIST_TRANSPORT", "auto, socket, tcp", &config->transport},
                    {desc->algorithm, "IDIST_ALGO", "auto, latency, bandwidth, chunked, remote",
                     &config->algorithm},
                    {desc->bind, "IDIST_BIND", "none, core", &config->bind}};
    idist_status status = IDIST_OK;
    size_t i;

    for (i = 0; i < IDIST__COUNT_OF(choices) && status == IDIST_OK; i++)
        status = idist__config_choice(choices[i].field, choices[i].var, choices[i].names,
                                      choices[i].choice);
    return status;
}

enum { IDIST__CONFIG_SOCKETS_MAX = 8 };

static idist_status idist__config_sockets(int field, int *sockets) {
    *sockets = field;
    if (!field) return idist__env_int("IDIST_SOCKETS", 0, IDIST__CONFIG_SOCKETS_MAX, sockets);
    if (field > 0 && field <= IDIST__CONFIG_SOCKETS_MAX) return IDIST_OK;

    return idist__fail(IDIST_ERR_ARG, "desc.sockets is %d, and must be from 0 to %d", field,
                       (int)IDIST__CONFIG_SOCKETS_MAX);
}

static idist_status idist__config_numbers(idist__config *config, const idist_desc *desc) {
    int shm_mib = 0, check = 1, high_priority = 0;
    idist_status status = idist__config_timeout(desc->timeout_ms, "IDIST_TIMEOUT_MS",
                                                30 * 60 * 1000, &config->timeout_ms);

    if (status == IDIST_OK)
        status = idist__config_timeout(desc->init_timeout_ms, "IDIST_INIT_TIMEOUT_MS",
                                       5 * 60 * 1000, &config->init_timeout_ms);
    if (status == IDIST_OK) status = idist__env_int("IDIST_SHM_MIB", 0, 1024, &shm_mib);
    if (status == IDIST_OK) status = idist__config_sockets(desc->sockets, &config->sockets);
    if (status == IDIST_OK) status = idist__env_int("IDIST_CHECK", 0, 1, &check);
    if (status == IDIST_OK)
        status = idist__env_int("IDIST_HIGH_PRIORITY_STREAM", 0, 1, &high_priority);
    if (status != IDIST_OK) return status;

    config->unchecked = !check;
    config->high_priority = desc->high_priority_stream || high_priority;
    config->shm_asked = desc->shm_nbytes || shm_mib;
    config->shm_nbytes = desc->shm_nbytes;
    if (!config->shm_nbytes)
        config->shm_nbytes = (size_t)(shm_mib ? shm_mib : IDIST__SHM_MIB) << 20;

    return IDIST_OK;
}

static void idist__config_text(const char *field, const char *var, char *text, size_t capacity) {
    const char *value = field ? field : idist__os_env(var);
    if (value) idist__text_copy(text, capacity, value);
}

// Sets config->host_id. Truncates an id that is too long and appends a hash of the whole id, so
// that different ids stay different.
static void idist__config_host_id(idist__config *config, const char *field) {
    const char *value = field ? field : idist__os_env("IDIST_HOSTID");
    size_t nbytes = value ? strlen(value) : 0, end = sizeof config->host_id - 17;

    idist__config_text(field, "IDIST_HOSTID", config->host_id, sizeof config->host_id);
    if (nbytes >= sizeof config->host_id)
        snprintf(config->host_id + end, 17, "%016llx",
                 (unsigned long long)idist__hash(value, nbytes));
}

// Prepares for a rank that will be assigned, because desc.rank is IDIST__RANK_DRAWN. Ignores all
// launchers.
static idist_status idist__config_draws(idist__config *config, const idist_desc *desc) {
    const char *var = idist__env_either("IDIST_WORLD_SIZE", "WORLD_SIZE");

    if (desc->world_size < 0 || (!desc->world_size && !idist__os_env(var)))
        return idist__fail(
            IDIST_ERR_ARG,
            "rank %d asks for an assigned rank, which needs the world size: set desc.world_size, "
            "IDIST_WORLD_SIZE or WORLD_SIZE",
            desc->rank);
    if (!config->may_draw)
        return idist__fail(
            IDIST_ERR_ARG,
            "rank %d asks for an assigned rank, so the ranks must meet in a file: set "
            "desc.init_method or IDIST_INIT_METHOD to file:///path",
            desc->rank);

    config->launcher = "explicit";
    config->rank = IDIST__RANK_DRAWN;
    config->world_size = desc->world_size;

    return desc->world_size ? IDIST_OK : idist__env_count(var, &config->world_size);
}

// Sets rank and world size from the desc, or from the launcher if the desc has neither.
static idist_status idist__config_rank(idist__config *config, const idist_desc *desc) {
    config->rank = 0;
    config->world_size = 1;
    config->local_rank = config->local_size = -1;
    config->launcher = "none";
    config->may_draw = idist__where_is_file(desc);
    if (desc->world_size == 0 && desc->rank == 0) return idist__detect_launcher(config);
    if (desc->rank == IDIST__RANK_DRAWN) return idist__config_draws(config, desc);

    if (desc->world_size < 1 || desc->rank < 0 || desc->rank >= desc->world_size)
        return idist__fail(IDIST_ERR_ARG,
                           "rank %d of world_size %d: both are needed, and 0 <= rank < world_size",
                           desc->rank, desc->world_size);
    config->launcher = "explicit";
    config->rank = desc->rank;
    config->world_size = desc->world_size;

    return IDIST_OK;
}

// Reads IDIST_LOST_FILE. Ignores a path that is too long, because part of the path would name
// another file.
static void idist__config_lost_file(idist__config *config) {
    const char *path = idist__os_env("IDIST_LOST_FILE");

    if (path && strlen(path) < sizeof config->lost_file)
        idist__text_copy(config->lost_file, sizeof config->lost_file, path);
}

// Tells the process that started this rank that this rank has lost another rank.
static void idist__config_tell_lost(const idist__config *config) {
    idist__os_file file;

    if (config->lost) {
        __atomic_store_n(config->lost, 1, __ATOMIC_RELEASE);
    } else if (config->lost_file[0]) {
        file = idist__os_file_open(config->lost_file, IDIST__OS_FILE_CREATE);
        idist__os_file_close(&file);
    }
}

// Fills in all of *config. `desc` may be NULL.
static idist_status idist__config_fill(idist__config *config, const idist_desc *desc) {
    idist_desc d;
    idist_status status;

    memset(config, 0, sizeof *config);
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    config->listener = -1;
    config->mem = d.allocator;
    config->logger = d.logger;
    if (!config->mem.alloc_fn != !config->mem.free_fn)
        return idist__fail(IDIST_ERR_ARG, "allocator: give both alloc_fn and free_fn, or neither");

    status = idist__config_choices(config, &d);
    if (status == IDIST_OK) status = idist__config_numbers(config, &d);
    if (status != IDIST_OK) return status;

    config->mpi_comm = d.mpi_comm;
    config->nccl_comm = d.nccl_comm;
    config->nccl_config = d.nccl_config;
    config->xla_api = d.xla_api;
    config->xla_client = d.xla_client;
    idist__config_host_id(config, d.host_id);
    idist__config_text(d.device, "IDIST_DEVICE", config->device, sizeof config->device);
    idist__config_text(d.backend, "IDIST_BACKEND", config->backends, sizeof config->backends);
    idist__config_text(d.device_backend, "IDIST_DEVICE_BACKEND", config->device_backend,
                       sizeof config->device_backend);
    if (strcmp(config->device_backend, "auto") == 0) config->device_backend[0] = 0;
    config->device_backend_in_desc = d.device_backend != NULL;
    idist__config_lost_file(config);

    status = idist__secret_find(&config->secret, d.secret, d.secret_nbytes);
    if (status == IDIST_OK) status = idist__config_rank(config, &d);
    if (status == IDIST_OK) status = idist__where_find(config, &d);
    if (config->world_size == 1 && config->rank == IDIST__RANK_DRAWN) config->rank = 0;

    return status;
}

// Returns a number that is equal in all processes that can reach each other through local sockets,
// and therefore through loopback.
IDIST__UNUSED static uint64_t idist__config_reach_key(void) {
    char text[256];

    idist__os_socket_reach(text, sizeof text);
    return idist__hash(text, strlen(text));
}

// Returns a number that is equal on all ranks that can share memory and local sockets, and
// different on other ranks. The number is derived from host_id, or from the operating system if
// there is no host_id.
IDIST__UNUSED static uint64_t idist__config_host_key(const idist__config *config) {
    if (config->host_id[0]) return idist__hash(config->host_id, strlen(config->host_id));
    return idist__config_reach_key();
}

// Returns a number that is equal on all ranks that use the same processors of one machine. The
// ranks may see this machine as several hosts.
IDIST__UNUSED static uint64_t idist__config_processor_key(void) {
    char machine[65];
    idist__os_cpu_set cpus;

    idist__os_socket_machine(machine, sizeof machine);
    idist__os_cpu_usable(&cpus);

    return idist__hash_mix(idist__hash(machine, strlen(machine)), idist__hash(&cpus, sizeof cpus));
}
