// launch/env.h: the configuration, and numbers in environment variables
#pragma once

#include "os/process.h"
#include "base/fail.h"
#include "base/text.h"
#include "net/meet.h"
#include "net/secret.h"

#define IDIST__SHM_MIB 5 // default size of the shared memory per rank

enum { IDIST__RANK_DRAWN = -1 }; // stands for a rank to be assigned, see launch/draw.h

// Values of IDIST_TRANSPORT, in the order of the names in idist__config_choices.
enum { IDIST__TRANSPORT_AUTO, IDIST__TRANSPORT_SOCKET, IDIST__TRANSPORT_TCP };

// The algorithm of a collective. The setting IDIST_ALGO (in the order of the names in
// idist__config_choices), the fingerprints of calls, and the functions that choose an algorithm
// (ring/algo/choose.h) use these numbers. Only the algorithms up to REMOTE can be set.
typedef enum idist__algorithm {
    // The default setting: choose by operation and size. In a call: none of the algorithms below.
    IDIST__ALGO_AUTO,
    IDIST__ALGO_LATENCY,   // messages, few steps
    IDIST__ALGO_BANDWIDTH, // messages, few bytes
    IDIST__ALGO_CHUNKED,   // shared memory, one chunk at a time
    IDIST__ALGO_REMOTE,    // only a setting: AUTO, with cross-memory reads even where they are slow
    IDIST__ALGO_FLAT,      // shared memory, small contributions
    IDIST__ALGO_BY_HOST    // calls inside each host and between hosts
} idist__algorithm;

typedef enum idist__launcher_kind {
    IDIST__LAUNCHER_NONE,
    IDIST__LAUNCHER_IDIST, // idistrun
    IDIST__LAUNCHER_ENV,   // torchrun and other launchers that set RANK and WORLD_SIZE
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
    int local_rank, local_size; // -1 if unknown
    idist__launcher_kind launcher_kind;
    const char *launcher;            // "none", "spawn", "explicit", "idist", "torchrun", ...
    const char *rank_var, *size_var; // the variables that gave rank and size, or NULL
    const char *job_var;             // the variable that identifies a job of the launcher, or NULL
    idist__meet meet;                // where the ranks meet, see launch/where.h; NONE if not given
    const char *lone_method; // init method of a process that does not know its rank, or NULL
    idist_store *store;      // the caller's store, used instead of `meet`
    idist_store *drawn;      // the store at `meet` that assigned our rank; owned by the world
    int listener;            // rank 0's socket that already listens (spawn, PMI), or -1
    int timeout_ms, init_timeout_ms; // > 0, or -1 for none
    idist__secret secret;
    int transport;      // IDIST__TRANSPORT_*: inside a host shared memory, local sockets, or TCP
    int algorithm;      // an idist__algorithm, up to REMOTE
    int sockets;        // number of sockets of a TCP link, 0 for automatic
    int bind;           // 1 to bind each rank to its own processor, if there are enough
    bool may_draw;      // the ranks meet in a file, so ranks can be assigned
    bool rank_drawn;    // our rank was assigned
    bool shm_asked;     // the user set the size of the shared memory
    bool unchecked;     // backends with their own collectives need not compare the ranks' calls
    bool high_priority; // give the streams of the device high priority
    bool device_backend_in_desc; // `device_backend` is from desc, not from the environment
    bool lone_method_in_desc;    // `lone_method` is from desc, not from the environment
    size_t shm_nbytes;           // shared memory per rank
    const void *mpi_comm;
    char host_id[128];
    char group_name[64];     // name of the group whose ranks meet in one file, or ""
    char device[32];         // the device that the user asked for, or ""
    char device_backend[32]; // the device backend that the user asked for, or ""
    const void *nccl_comm, *nccl_config, *xla_api;
    void *xla_client;
    char backends[128]; // the backends that the user asked for, or ""
    // Where a rank reports that it has lost another rank. A later failure of this rank may be only
    // a consequence.
    int *lost;            // memory that a worker shares with its parent, or NULL
    char lost_file[1024]; // otherwise a file that the rank creates for its launcher, or ""
    idist_allocator mem;
    idist_logger logger;
} idist__config;

enum { IDIST__ENV_RANKS_MAX = 1000000 };

// Reads a whole number from a variable. Leaves *value unchanged if the variable is not set or
// `name` is NULL.
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

// Reads a number of ranks or nodes.
static idist_status idist__env_count(const char *name, int *value) {
    return idist__env_int(name, 1, IDIST__ENV_RANKS_MAX, value);
}

// Reads the index of a rank or a node.
static idist_status idist__env_index(const char *name, int *value) {
    return idist__env_int(name, 0, IDIST__ENV_RANKS_MAX, value);
}

// Returns `first` if a variable of that name is set, and `second` otherwise.
static const char *idist__env_either(const char *first, const char *second) {
    return idist__os_env(first) ? first : second;
}
