// mpi/mpi_life.h: finds out whether MPI started us, and initializes MPI
//
// MPI is initialized and finalized at most once in a process, so this state belongs to the process
// and not to a world.
#pragma once

#include "os/process.h"
#include "os/thread.h"
#include "base/fail.h"
#include "launch/env.h"
#include "calls/choose_backend.h"
#include "mpi/mpi_error.h"

static idist__os_mutex idist__mpi_lock = IDIST__OS_MUTEX_INIT;
static int idist__mpi_world_count;     // open worlds
static bool idist__mpi_initialized;    // by us
static int idist__mpi_thread_count;    // threads that MPI_Init_thread started
static bool idist__mpi_never_finalize; // MPI_Finalize would block, or was called

static MPI_Comm idist__mpi_life_base_comm(const idist__config *cfg) {
    return cfg->mpi_comm ? *(const MPI_Comm *)cfg->mpi_comm : MPI_COMM_WORLD;
}

static bool idist__mpi_life_is_one_of(const char *name, const char *const *names, size_t count) {
    size_t i;

    for (i = 0; i < count; i++)
        if (strcmp(name, names[i]) == 0) return true;
    return false;
}

// Returns true if the user asked for this backend by name.
static bool idist__mpi_life_is_asked(const idist__config *cfg) {
    const char *at = cfg->backends;

    for (; *at; at += strcspn(at, ","), at += *at == ',')
        if (idist__choose_backend_is(at, strcspn(at, ","), "mpi")) return true;
    return false;
}

// Returns true if the user asked for MPI, a launcher of MPI started us, or the program uses MPI
// itself. The last does not count if the rank and size come from elsewhere, for example from the
// user or torchrun: then they belong to another world.
static bool idist__mpi_life_is_meant(const idist__config *cfg, bool initialized) {
    static const char *const mpi_launchers[] = {"openmpi", "mvapich2", "hydra", "jsrun", "pals"};
    // These have started MPI programs only if there are PMI variables.
    static const char *const pmi_launchers[] = {"slurm", "flux", "none"};
    bool pmi = idist__os_env("PMI_RANK") || idist__os_env("PMIX_RANK") || idist__os_env("PMI_PORT");

    if (idist__mpi_life_is_asked(cfg) || cfg->mpi_comm) return true;
    if (idist__mpi_life_is_one_of(cfg->launcher, mpi_launchers, IDIST__COUNT_OF(mpi_launchers)))
        return true;
    if (pmi &&
        idist__mpi_life_is_one_of(cfg->launcher, pmi_launchers, IDIST__COUNT_OF(pmi_launchers)))
        return true;

    return initialized && strcmp(cfg->launcher, "none") == 0;
}

static idist_status idist__mpi_life_sizes_differ(const idist__config *cfg, int rank, int size) {
    char library[MPI_MAX_LIBRARY_VERSION_STRING + 1] = "";
    int length = 0;

    MPI_Get_library_version(library, &length);
    library[strcspn(library, "\n,")] = 0;

    return idist__fail(
        IDIST_ERR_ENV,
        "initialize: the launcher (%s%s%s) says rank %d of %d, but the MPI that this "
        "program is linked with (%s) says rank %d of %d; start it with the mpirun "
        "or mpiexec of that MPI, or set IDIST_BACKEND=ring",
        cfg->launcher, cfg->rank_var ? " by " : "", cfg->rank_var ? cfg->rank_var : "", cfg->rank,
        cfg->world_size, library, rank, size);
}

static idist_status idist__mpi_life_initialize(void) {
    int level, error;

    idist__mpi_thread_count = -idist__os_thread_count();
    error = MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &level);
    if (error != MPI_SUCCESS) return idist__mpi_error_fail("initialize: MPI_Init_thread", error);
    idist__mpi_thread_count += idist__os_thread_count();
    idist__mpi_initialized = true;

    return IDIST_OK;
}

// Rejects MPI_COMM_NULL and intercommunicators, for which MPI itself would end the job, or fail
// later without a reason.
static idist_status idist__mpi_life_check_comm(MPI_Comm comm) {
    int inter = 0;

    if (comm == MPI_COMM_NULL)
        return idist__fail(IDIST_ERR_ARG,
                           "initialize: *desc.mpi_comm is MPI_COMM_NULL: this process is not in "
                           "the communicator, so it must not join the world");

    MPI_Comm_test_inter(comm, &inter);
    if (!inter) return IDIST_OK;
    return idist__fail(
        IDIST_ERR_ARG,
        "initialize: *desc.mpi_comm is an intercommunicator; merge its two groups with "
        "MPI_Intercomm_merge");
}

static idist_status idist__mpi_life_claim(idist__config *cfg, const char **why) {
    int initialized = 0, finalized = 0, rank, size;
    bool explicit_rank = strcmp(cfg->launcher, "explicit") == 0, size_known;
    idist_status status;

    MPI_Initialized(&initialized);
    MPI_Finalized(&finalized);
    *why = "no launcher of MPI started this process";
    if (!idist__mpi_life_is_meant(cfg, initialized && !finalized)) return IDIST_ERR_NO_BACKEND;
    if (finalized)
        return idist__fail(IDIST_ERR_STATE,
                           "initialize: MPI was finalized in this process and cannot be "
                           "initialized again; to open several worlds one after the other, "
                           "initialize MPI yourself");

    if (!initialized) {
        status = idist__mpi_life_initialize();
        if (status != IDIST_OK) return status;
    }

    status = idist__mpi_life_check_comm(idist__mpi_life_base_comm(cfg));
    if (status != IDIST_OK) return status;
    MPI_Comm_rank(idist__mpi_life_base_comm(cfg), &rank);
    MPI_Comm_size(idist__mpi_life_base_comm(cfg), &size);

    if (strcmp(cfg->launcher, "none") == 0) {
        cfg->launcher = "mpi";
    } else {
        size_known = explicit_rank || !cfg->mpi_comm;
        if (size_known && (size != cfg->world_size || (explicit_rank && rank != cfg->rank)))
            return idist__mpi_life_sizes_differ(cfg, rank, size);
    }

    cfg->rank = rank;
    cfg->world_size = size;

    return IDIST_OK;
}
