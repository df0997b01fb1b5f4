// launch/detect.h: which launcher started this process, and as which rank
//
// The table of launchers is in order of precedence, with inner launchers before outer ones. A
// torchrun inside srun or mpirun takes precedence over the variables that it has inherited. In the
// same way, mpirun takes precedence over the Slurm step that runs its daemon. The first row that
// applies decides. IDIST_LAUNCHER narrows the table to the rows with one name. If no row applies,
// the process runs alone.
//
//     idist__detect_launcher -> row.detect (mostly idist__detect_by_variables) -> row.look
#pragma once

#include "os/process.h"
#include "base/fail.h"
#include "base/text.h"
#include "launch/env.h"
#include "launch/slurm.h"
#include "launch/pmi.h"
#include "launch/tf_config.h"

typedef struct idist__launcher idist__launcher;

// The state of one row's variables in the environment.
typedef struct idist__detect_look {
    const char *size_var; // the row's variable, or another one with the same meaning
    bool has_rank, has_size;
    const char *missing; // the variable to name in an error text
    bool skip;           // skip the row: the variables belong to another launcher
} idist__detect_look;

struct idist__launcher {
    idist__launcher_kind kind;
    const char *name; // value of IDIST_LAUNCHER, or NULL if the user cannot select it
    // Variables, or NULL. If `detect` gets rank and size in another way, `rank` and `size` are the
    // variables by which it recognizes the launcher.
    const char *rank, *size, *local_rank, *local_size, *job;
    // Sets *found, rank and size if this launcher started us. `asked` is true if the user named
    // this launcher. Then it is an error if the launcher did not start us.
    idist_status (*detect)(idist__config *config, const idist__launcher *row, bool asked,
                           bool *found);
    // Corrects *look for variables that other launchers also set; or NULL.
    void (*look)(idist__detect_look *look, bool asked);
};

// Skips the row if RANK is not set and Kubernetes has set JOB_COMPLETION_INDEX. WORLD_SIZE, if set,
// then belongs to the next row.
static void idist__detect_look_env(idist__detect_look *look, bool asked) {
    (void)asked;
    if (!look->has_rank && idist__os_env("JOB_COMPLETION_INDEX")) look->skip = true;
}

// Ignores the pods of an indexed job that has no size, because such pods do not form a world.
static void idist__detect_look_indexed(idist__detect_look *look, bool asked) {
    (void)asked;
    if (!(look->has_rank && look->has_size)) look->has_rank = look->has_size = false;
}

// Ignores PMI_SIZE without PALS_RANKID, because other launchers also set PMI_SIZE.
static void idist__detect_look_pals(idist__detect_look *look, bool asked) {
    (void)asked;
    if (!look->has_rank) look->has_size = false;
}

// Skips the row in a Slurm step without hydra's local rank, because srun has then set PMI_RANK and
// PMI_SIZE. Also skips the row if hydra set PMI_PORT instead of these variables. The next row
// handles PMI_PORT.
static void idist__detect_look_hydra(idist__detect_look *look, bool asked) {
    if (!asked && !idist__os_env("MPI_LOCALRANKID") && idist__slurm_in_step()) look->skip = true;
    if (asked && !look->has_rank && !look->has_size && idist__os_env("PMI_PORT")) look->skip = true;
}

static void idist__detect_look_slurm(idist__detect_look *look, bool asked) {
    (void)asked;
    look->size_var = idist__slurm_size_var();
    look->has_size = idist__os_env(look->size_var) != NULL;
    look->missing = look->has_rank ? look->size_var : "SLURM_PROCID";

    if (!idist__slurm_in_step()) {
        look->has_rank = look->has_size = false;
        look->missing = idist__slurm_step_var();
    }
}

// Reads rank, size and their local counterparts, and checks that they are consistent.
static idist_status idist__detect_numbers(idist__config *config, const idist__launcher *row,
                                          const char *size_var) {
    idist_status status = idist__env_count(size_var, &config->world_size);

    if (status == IDIST_OK) status = idist__env_index(row->rank, &config->rank);
    if (status == IDIST_OK) status = idist__env_index(row->local_rank, &config->local_rank);
    if (status == IDIST_OK) status = idist__env_count(row->local_size, &config->local_size);
    if (status != IDIST_OK) return status;
    if (row->kind == IDIST__LAUNCHER_SLURM) idist__slurm_local_size(config);

    if (config->rank >= config->world_size)
        return idist__fail(IDIST_ERR_ENV, "%s=%d is not below %s=%d", row->rank, config->rank,
                           size_var, config->world_size);
    if (config->local_size > 0 && config->local_rank >= config->local_size)
        return idist__fail(IDIST_ERR_ENV, "%s=%d is not below %s=%d", row->local_rank,
                           config->local_rank, row->local_size ? row->local_size : size_var,
                           config->local_size);
    if (config->local_size <= 0 && config->local_rank >= config->world_size)
        return idist__fail(IDIST_ERR_ENV, "%s=%d is not below %s=%d", row->local_rank,
                           config->local_rank, size_var, config->world_size);
    if (config->local_size > config->world_size)
        return idist__fail(IDIST_ERR_ENV, "%s=%d is more than %s=%d",
                           row->local_size ? row->local_size : row->name, config->local_size,
                           size_var, config->world_size);

    return IDIST_OK;
}

// Returns true if the row has a size but no rank, and the rank can be assigned.
static bool idist__detect_draws(const idist__config *config, const idist__launcher *row,
                                const idist__detect_look *look) {
    bool is_plain = row->kind == IDIST__LAUNCHER_IDIST || row->kind == IDIST__LAUNCHER_ENV;
    return config->may_draw && is_plain && look->has_size && !look->has_rank;
}

// Sets *found if both variables of a row are set, or if the rank can be assigned. A single variable
// is an error, because guessing the missing one would start N worlds of one rank each.
static idist_status idist__detect_check(idist__config *config, const idist__launcher *row,
                                        idist__detect_look *look, bool asked, bool *found) {
    look->size_var = row->size;
    look->has_rank = idist__os_env(row->rank) != NULL;
    look->has_size = idist__os_env(row->size) != NULL;
    look->missing = look->has_rank ? row->size : row->rank;
    look->skip = false;
    if (row->look) row->look(look, asked);
    *found = false;
    if (look->skip) return IDIST_OK;

    if (idist__detect_draws(config, row, look)) {
        *found = true;
        return IDIST_OK;
    }

    if (asked && !(look->has_rank && look->has_size))
        return idist__fail(
            IDIST_ERR_ENV,
            "IDIST_LAUNCHER=%s, but %s is not set: this launcher did not start this process",
            idist__os_env("IDIST_LAUNCHER"), look->missing);
    if (look->has_rank != look->has_size)
        return idist__fail(IDIST_ERR_ENV,
                           "%s is set but %s is not: a launcher sets both; unset it to run alone",
                           look->has_rank ? row->rank : look->size_var, look->missing);
    *found = look->has_rank;
    if (*found && !asked && row->kind == IDIST__LAUNCHER_ENV) return idist__slurm_check_env(found);

    return IDIST_OK;
}

static idist_status idist__detect_by_variables(idist__config *config, const idist__launcher *row,
                                               bool asked, bool *found) {
    bool is_torchrun = row->kind == IDIST__LAUNCHER_ENV && idist__os_env("TORCHELASTIC_RUN_ID");
    idist__detect_look look;
    idist_status status = idist__detect_check(config, row, &look, asked, found);

    if (status == IDIST_OK && !*found) return IDIST_OK;
    config->launcher_kind = row->kind;
    config->launcher = is_torchrun ? "torchrun" : row->name;
    config->rank_var = look.has_rank ? row->rank : NULL;
    config->size_var = look.size_var;
    config->job_var = row->job;
    if (idist__detect_draws(config, row, &look)) config->rank = IDIST__RANK_DRAWN;

    return status == IDIST_OK ? idist__detect_numbers(config, row, look.size_var) : status;
}

// Detects MPICH's mpiexec -pmi-port.
static idist_status idist__detect_pmi_port(idist__config *config, const idist__launcher *row,
                                           bool asked, bool *found) {
    const char *port = idist__os_env("PMI_PORT"), *id = idist__os_env("PMI_ID");

    (void)row;
    (void)asked;
    *found = port && id && !idist__pmi_is_taken();
    return *found ? idist__pmi_introduce(config, port, id) : IDIST_OK;
}

static idist_status idist__detect_tf(idist__config *config, const idist__launcher *row, bool asked,
                                     bool *found) {
    const char *text = idist__os_env("TF_CONFIG");
    idist_status status = text ? idist__tf_config_check(text) : IDIST_OK;

    (void)row;
    if (status != IDIST_OK) return status;
    *found = text && (asked || strstr(text, "\"cluster\""));
    if (*found) return idist__tf_config_read(config, text);
    if (!asked) return IDIST_OK;

    return idist__fail(IDIST_ERR_ENV, "IDIST_LAUNCHER=tf_config, but TF_CONFIG is not set");
}

// Fails if a PMIx launcher started us, because only a PMIx client can learn the size.
static idist_status idist__detect_pmix(idist__config *config, const idist__launcher *row,
                                       bool asked, bool *found) {
    (void)config;
    (void)row;
    (void)asked;
    *found = idist__os_env("PMIX_RANK") && idist__os_env("PMIX_NAMESPACE");
    if (!*found) return IDIST_OK;

    return idist__fail(IDIST_ERR_ENV,
                       "PMIX_RANK is set, but nothing in the environment says how many ranks there "
                       "are: set IDIST_RANK and IDIST_WORLD_SIZE, or IDIST_LAUNCHER=none to run "
                       "alone");
}

// The launchers, in order of precedence. The lint checks compare their names and variables with the
// lists in idist.h.
//
// The launcher hydra has two rows, because it passes rank and size in two ways. Hydra sets
// variables or, with mpiexec -pmi-port, sends rank and size over a connection to the port in
// PMI_PORT.
//
// clang-format off
static const idist__launcher idist__launchers[] = {
    {IDIST__LAUNCHER_IDIST, "idist", "IDIST_RANK", "IDIST_WORLD_SIZE", "IDIST_LOCAL_RANK",
     "IDIST_LOCAL_WORLD_SIZE", NULL, idist__detect_by_variables, NULL},
    {IDIST__LAUNCHER_ENV, "env", "RANK", "WORLD_SIZE", "LOCAL_RANK",
     "LOCAL_WORLD_SIZE", NULL, idist__detect_by_variables, idist__detect_look_env},
    {IDIST__LAUNCHER_INDEXED, "indexed", "JOB_COMPLETION_INDEX", "WORLD_SIZE", NULL,
     NULL, NULL, idist__detect_by_variables, idist__detect_look_indexed},
    {IDIST__LAUNCHER_HOROVODRUN, "horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK",
     "HOROVOD_LOCAL_SIZE", "HOROVOD_GLOO_RENDEZVOUS_PORT", idist__detect_by_variables, NULL},
    {IDIST__LAUNCHER_OPENMPI, "openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE",
     idist__detect_by_variables, NULL},
    {IDIST__LAUNCHER_MVAPICH2, "mvapich2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
     "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE", "MPIRUN_ID",
     idist__detect_by_variables, NULL},
    {IDIST__LAUNCHER_JSRUN, "jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE",
     "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE", "PMIX_NAMESPACE",
     idist__detect_by_variables, NULL},
    {IDIST__LAUNCHER_PALS, "pals", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID",
     "PALS_LOCAL_SIZE", "PALS_APID", idist__detect_by_variables, idist__detect_look_pals},
    {IDIST__LAUNCHER_FLUX, "flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID",
     NULL, "FLUX_JOB_ID", idist__detect_by_variables, NULL},
    {IDIST__LAUNCHER_HYDRA, "hydra", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID",
     "MPI_LOCALNRANKS", NULL, idist__detect_by_variables, idist__detect_look_hydra},
    {IDIST__LAUNCHER_HYDRA, "hydra", "PMI_ID", "PMI_PORT", NULL,
     NULL, NULL, idist__detect_pmi_port, NULL},
    {IDIST__LAUNCHER_SLURM, "slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID",
     NULL, "SLURM_JOB_ID", idist__detect_by_variables, idist__detect_look_slurm},
    {IDIST__LAUNCHER_TF_CONFIG, "tf_config", "TF_CONFIG", "TF_CONFIG", NULL,
     NULL, NULL, idist__detect_tf, NULL},
    {IDIST__LAUNCHER_PMIX, NULL, "PMIX_RANK", "PMIX_NAMESPACE", NULL,
     NULL, NULL, idist__detect_pmix, NULL}};
// clang-format on

// Returns another name of a launcher, or NULL.
static const char *idist__detect_alias(const idist__launcher *row) {
    return row->kind == IDIST__LAUNCHER_ENV ? "torchrun" : NULL;
}

static bool idist__detect_is_named(const idist__launcher *row, const char *name) {
    const char *alias = idist__detect_alias(row);
    return row->name && (strcmp(name, row->name) == 0 || (alias && strcmp(name, alias) == 0));
}

// Writes the list of the values that IDIST_LAUNCHER can have: "none, idist, env, torchrun, ...".
static void idist__detect_names(char *names, size_t cap) {
    size_t i;

    snprintf(names, cap, "none");

    for (i = 0; i < IDIST__COUNT_OF(idist__launchers); i++) {
        const idist__launcher *row = &idist__launchers[i];
        const char *alias = idist__detect_alias(row);

        if (!row->name || (i && row->kind == row[-1].kind)) continue;
        idist__text_append(names, cap, ", %s", row->name);
        if (alias) idist__text_append(names, cap, ", %s", alias);
    }
}

// Sets rank and size from the first launcher that applies, or from the launcher that IDIST_LAUNCHER
// names.
static idist_status idist__detect_launcher(idist__config *config) {
    const char *asked = idist__os_env("IDIST_LAUNCHER");
    bool found = false, is_known = !asked || strcmp(asked, "none") == 0;
    char names[300];
    size_t i;

    for (i = 0; i < IDIST__COUNT_OF(idist__launchers); i++) {
        const idist__launcher *row = &idist__launchers[i];
        idist_status status;

        if (asked && !idist__detect_is_named(row, asked)) continue;
        is_known = true;
        status = row->detect(config, row, asked != NULL, &found);
        if (status != IDIST_OK || found) return status;
    }

    if (is_known) return IDIST_OK;

    idist__detect_names(names, sizeof names);
    return idist__fail(IDIST_ERR_ENV, "IDIST_LAUNCHER=%s: use one of %s", asked, names);
}
