// launch/env.h: the configuration, and numbers in environment variables
#pragma once

#include "os/process.h"
#include "base/fail.h"
#include "base/text.h"
#include "net/meet.h"
#include "net/secret.h"

#define IDIST__SHM_MIB 5 // shared memory per rank, unless the user says otherwise

enum { IDIST__RANK_DRAWN = -1 }; // in place of a rank: see launch/draw.h

// The numbers are those of the names in idist__config_choices.
enum { IDIST__TRANSPORT_AUTO, IDIST__TRANSPORT_SOCKET, IDIST__TRANSPORT_TCP };

// How a collective runs. The setting IDIST_ALGO, the fingerprints of calls and the table in
// ring/algo/ (ring/algo/choose.h) all use these numbers. Only those up to REMOTE can be set.
typedef enum idist__algorithm {
    IDIST__ALGO_AUTO,      // chosen by operation and size; of a call: none of those below
    IDIST__ALGO_LATENCY,   // messages, few steps
    IDIST__ALGO_BANDWIDTH, // messages, few bytes
    IDIST__ALGO_CHUNKED,   // shared memory, one chunk at a time
    IDIST__ALGO_REMOTE,    // a setting only: as AUTO, with cross-memory reads even if they are slow
    IDIST__ALGO_FLAT,      // shared memory, small contributions
    IDIST__ALGO_BY_HOST    // calls inside each host, and between hosts
} idist__algorithm;

typedef enum idist__launcher_kind {
    IDIST__LAUNCHER_NONE,
    IDIST__LAUNCHER_IDIST, // idistrun
    IDIST__LAUNCHER_ENV,   // torchrun, and whoever else sets RANK and WORLD_SIZE
    IDIST__LAUNCHER_INDEXED,
    IDIST__LAUNCHER_HOROVODRUN,
    IDIST__LAUNCHER_OPENMPI,
    IDIST__LAUNCHER_MVAPICH2,
    IDIST__LAUNCHER_JSRUN,
    IDIST__LAUNCHER_PALS,
    IDIST__LAUNCHER_FLUX,
    IDIST__LAUNCHER_HYDRA,
    IDIST__LAUNCHER_SLURM,
    IDIST__LAUNCHER_TF_CONFIG,
    IDIST__LAUNCHER_PMIX
} idist__launcher_kind;

typedef struct idist__config {
    int rank, world_size; // rank may be IDIST__RANK_DRAWN until a backend has claimed the world
    int local_rank, local_size; // -1: the launcher does not say
    idist__launcher_kind launcher_kind;
    const char *launcher;            // "none", "spawn", "explicit", "idist", "torchrun", ...
    const char *rank_var, *size_var; // the variables that rank and size came from, or NULL
    const char *job_var;     // the variable that tells apart the jobs of one launcher, or NULL
    idist__meet meet;        // where the ranks meet, see launch/where.h; NONE: not given
    const char *lone_method; // an init method, but nothing says which rank we are; or NULL
    idist_store *store;      // the caller's, instead of `meet`
    idist_store *drawn;      // the rank was drawn from this store at `meet`, which the world owns
    int listener;            // a socket that rank 0 of a spawn inherits and that listens; else -1
    int timeout_ms, init_timeout_ms; // > 0, or -1 for none
    idist__secret secret;
    int transport;      // IDIST__TRANSPORT_*: inside a host shared memory, local sockets, or TCP
    int algorithm;      // an idist__algorithm, up to REMOTE
    int sockets;        // of a link over TCP; 0: automatic
    int bind;           // 1: bind each rank to a processor of its own, if there are enough
    bool may_draw;      // the ranks meet in a file, from which they may be drawn
    bool rank_drawn;    // ours was
    bool shm_asked;     // the user gave shm_nbytes
    bool unchecked;     // a backend with collectives of its own need not compare the ranks' calls
    bool high_priority; // of the device's streams
    bool device_backend_in_desc; // asked for by desc, not by the environment
    bool lone_method_in_desc;    // the same
    size_t shm_nbytes;           // shared memory per rank
    const void *mpi_comm;
    char host_id[128];
    char group_name[64];     // of the worlds that meet in one file, or ""
    char device[32];         // the device the user asked for, or ""
    char device_backend[32]; // the device backend that the user asked for, or ""
    const void *nccl_comm, *nccl_config;
    char backends[128]; // the backends the user asked for, or ""
    // Where a rank says that another one was lost, so that what follows may be only a consequence:
    int *lost;            // in memory, a worker to its parent; or NULL
    char lost_file[1024]; // or else a file that the rank makes, for its launcher; or ""
    idist_allocator mem;
    idist_logger logger;
} idist__config;

enum { IDIST__ENV_RANKS_MAX = 1000000 };

// Leaves *value alone when the variable is not set, or has no name.
static idist_status idist__env_int(const char *name, int64_t lowest, int64_t highest, int *value) {
    const char *text = name ? idist__os_env(name) : NULL;
    int64_t number;

    if (!text) return IDIST_OK;
    if (!idist__parse_int(text, lowest, highest, &number))
        return idist__fail(IDIST_ERR_ENV, "%s=%s: expected a whole number from %lld to %lld", name,
                           text, (long long)lowest, (long long)highest);
    *value = (int)number;

    return IDIST_OK;
}

// A number of ranks or nodes, and the index of one.
static idist_status idist__env_count(const char *name, int *value) {
    return idist__env_int(name, 1, IDIST__ENV_RANKS_MAX, value);
}

static idist_status idist__env_index(const char *name, int *value) {
    return idist__env_int(name, 0, IDIST__ENV_RANKS_MAX, value);
}

// The first of two variables if it is set, otherwise the second.
static const char *idist__env_either(const char *first, const char *second) {
    return idist__os_env(first) ? first : second;
}
