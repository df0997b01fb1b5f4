// launch/where.h: where the ranks meet
//
// The result is config->meet, which idist__store_open takes. Ranks of one host meet at a local
// socket, whose name is derived from values that the ranks share. Other ranks meet at a TCP port of
// rank 0, in a file, or through a multicast group.
//
//     init_method (or IDIST_INIT_METHOD)   ->  config->meet
//     file:///path                             FILE, the path or path.GROUP
//     tcp://239.x.y.z:port                     MULTICAST, named after world size, run and restart
//     tcp://host:port                          LOCAL for loopback or one host, otherwise TCP
//     env:// or none, MASTER_ADDR and _PORT    as for tcp://; TORCH if torchrun's agent serves
//     none of these, one host                  LOCAL, named after the launcher's job
//     none of these, hydra                     PMI
//     none of these, Slurm                     TCP, at the first host of the step
#pragma once

#include "os/process.h"
#include "os/socket.h"
#include "base/fail.h"
#include "base/text.h"
#include "base/hash.h"
#include "net/address.h"
#include "net/meet.h"
#include "launch/env.h"
#include "launch/slurm.h"
#include "launch/pmi.h"

enum { IDIST__WHERE_MASTER_PORT = 29500, IDIST__WHERE_JOB_PORT = 15000 };

// The address of rank 0, from the desc or the environment.
typedef struct idist__where_master {
    const char *host; // or NULL
    int port;
    bool has_port; // the port was given and is not the default
} idist__where_master;

// Sets config->meet to LOCAL with a formatted name, which begins with "idist-".
IDIST__PRINTF(2, 3)
static void idist__where_local(idist__config *config, const char *format, ...) {
    char name[256];
    va_list args;

    va_start(args, format);
    vsnprintf(name, sizeof name, format, args);
    va_end(args);
    idist__meet_set_name(&config->meet, IDIST__MEET_LOCAL, name);
}

static bool idist__where_is_one_host(const idist__config *config) {
    return config->local_size == config->world_size;
}

// Sets config->meet to a host and a port. Ranks that share a loopback address share a host and need
// no TCP, so they meet at a local socket. No rank listens at the port, so two jobs may have the
// same port. Therefore the socket's name also contains the run and the restart count.
static void idist__where_tcp(idist__config *config, const char *host, int port) {
    const char *restart = idist__os_env("TORCHELASTIC_RESTART_COUNT");
    const char *run = idist__os_env("TORCHELASTIC_RUN_ID");
    bool is_local = idist__address_host_is_loopback(host) || idist__where_is_one_host(config);

    if (config->transport == IDIST__TRANSPORT_TCP || !is_local) {
        idist__meet_set_host(&config->meet, IDIST__MEET_TCP, host, port);
        return;
    }

    idist__where_local(config, "idist-%lu-%d-%s-%08x", idist__os_socket_user(), port,
                       restart ? restart : "0", run ? (unsigned)idist__hash(run, strlen(run)) : 0u);
}

// Sets config->meet if all ranks are on this host and no address is given. The meeting place is
// derived from the job, or from the launcher's process on this host.
static void idist__where_job(idist__config *config) {
    const char *job = config->job_var ? idist__os_env(config->job_var) : NULL;
    const char *step = "";
    char text[600];
    uint64_t name;

    if (config->launcher_kind == IDIST__LAUNCHER_SLURM)
        step = idist__os_env(idist__slurm_step_var());
    if (job) snprintf(text, sizeof text, "%s %.300s %s", config->launcher, job, step);
    else snprintf(text, sizeof text, "%s %ld", config->launcher, (long)idist__os_process_parent());
    name = idist__hash(text, strlen(text));

    if (config->transport == IDIST__TRANSPORT_TCP)
        idist__meet_set_host(&config->meet, IDIST__MEET_TCP, "127.0.0.1",
                             IDIST__WHERE_JOB_PORT + (int)(name % 10000));
    else
        idist__where_local(config, "idist-%lu-%016llx", idist__os_socket_user(),
                           (unsigned long long)name);
}

// Sets config->meet to the first host of the step and a port that is derived from job and step. The
// first host has rank 0, unless the user has ordered the ranks differently. In that case
// config->meet stays unset.
static idist_status idist__where_slurm(idist__config *config) {
    const char *var = idist__env_either("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST");
    const char *list = idist__os_env(var), *order = idist__os_env("SLURM_DISTRIBUTION");
    char host[IDIST__SLURM_HOST_NBYTES] = "";
    int job = 0, step = 0;

    if (!list ||
        (order && (strncmp(order, "arbitrary", 9) == 0 || strncmp(order, "plane", 5) == 0)))
        return IDIST_OK;
    if (!idist__slurm_each_host(list, idist__slurm_first_host, host) || !host[0])
        return idist__fail(IDIST_ERR_ENV, "%s=%s is not a list of hosts", var, list);
    idist__env_int("SLURM_JOB_ID", 0, INT32_MAX, &job);
    idist__env_int(idist__slurm_step_var(), 0, INT32_MAX, &step);
    idist__where_tcp(config, host, IDIST__WHERE_JOB_PORT + (job % 10000 + step % 10000) % 10000);

    return IDIST_OK;
}

// Returns true if the host is a link-local address (fe80::/10) without an interface. Nobody can
// connect to such an address.
static bool idist__where_lacks_scope(const char *host) {
    bool is_link_local = (host[0] == 'f' || host[0] == 'F') && (host[1] == 'e' || host[1] == 'E') &&
                         host[2] && strchr("89abAB", host[2]) && host[3] && host[4] == ':';

    return is_link_local && !strchr(host, '%');
}

static idist_status idist__where_no_scope(bool in_desc, const char *host) {
    return idist__fail(
        in_desc ? IDIST_ERR_ARG : IDIST_ERR_ENV,
        "the address of rank 0, \"%s\", is link-local, so it needs the interface of this host: "
        "%s%%eth0, for example; or give an address that all hosts can reach",
        host, host);
}

static idist_status idist__where_read_master(const idist_desc *desc, idist__where_master *master) {
    idist_status status;

    master->host = desc->master_addr ? desc->master_addr : idist__os_env("MASTER_ADDR");
    master->has_port = desc->master_port || idist__os_env("MASTER_PORT");
    master->port = IDIST__WHERE_MASTER_PORT;

    if (desc->master_port) {
        if (desc->master_port < 0 || desc->master_port > 65535)
            return idist__fail(IDIST_ERR_ARG, "master_port %d is not between 1 and 65535",
                               desc->master_port);
        master->port = desc->master_port;
    } else {
        status = idist__env_int("MASTER_PORT", 1, 65535, &master->port);
        if (status != IDIST_OK) return status;
    }

    if (master->host && !idist__address_host_is_possible(master->host))
        return idist__fail(desc->master_addr ? IDIST_ERR_ARG : IDIST_ERR_ENV,
                           "MASTER_ADDR (desc.master_addr) is \"%s\": give only the name or the "
                           "address of rank 0's host, without a port, brackets or \"://\"",
                           master->host);
    if (master->host && idist__where_lacks_scope(master->host))
        return idist__where_no_scope(desc->master_addr != NULL, master->host);
    if (master->host && !master->has_port)
        return idist__fail(desc->master_addr ? IDIST_ERR_ARG : IDIST_ERR_ENV,
                           "MASTER_ADDR (desc.master_addr) is set but MASTER_PORT "
                           "(desc.master_port) is not: give rank 0's port as well");

    return IDIST_OK;
}

// Returns true if torchrun's agent serves a TCPStore at MASTER_ADDR and MASTER_PORT. Then nobody
// else can listen there.
static bool idist__where_has_agent(const idist__config *config, const idist_desc *desc) {
    const char *agent = idist__os_env("TORCHELASTIC_USE_AGENT_STORE");

    if (desc->master_addr || desc->master_port || idist__where_is_one_host(config)) return false;
    return agent && strcmp(agent, "True") == 0;
}

// Returns true if hydra started us and can pass rank 0's address to the other ranks.
static bool idist__where_has_pmi(const idist__config *config) {
    if (config->launcher_kind != IDIST__LAUNCHER_HYDRA || idist__pmi_is_taken()) return false;
    return idist__os_env("PMI_FD") || idist__os_env("PMI_PORT");
}

// Sets config->meet from the environment or the launcher. Called if there is no init_method or if
// it is env://.
static idist_status idist__where_env(idist__config *config, const idist_desc *desc) {
    bool is_one_host = idist__where_is_one_host(config);
    bool has_job = config->job_var || config->launcher_kind == IDIST__LAUNCHER_HYDRA;
    idist__where_master master;
    idist_status status = idist__where_read_master(desc, &master);

    if (status != IDIST_OK) return status;

    if (master.host) {
        if (idist__where_has_agent(config, desc))
            idist__meet_set_host(&config->meet, IDIST__MEET_TORCH, master.host, master.port);
        else idist__where_tcp(config, master.host, master.port);
        return IDIST_OK;
    }

    if (!master.has_port && idist__where_has_pmi(config)) {
        idist__meet_set_name(&config->meet, IDIST__MEET_PMI, "");
        return IDIST_OK;
    }

    if (!is_one_host) // a backend that needs an address reports that there is none
        return config->launcher_kind == IDIST__LAUNCHER_SLURM ? idist__where_slurm(config)
                                                              : IDIST_OK;
    if (!master.has_port && has_job) idist__where_job(config);
    else idist__where_tcp(config, "127.0.0.1", master.port);

    return IDIST_OK;
}

// Sets config->meet to a multicast group. Ranks that use the group belong together if their world
// size, run and restart count are equal.
static void idist__where_multicast(idist__config *config, const char *host, int port) {
    const char *run = idist__os_env("TORCHELASTIC_RUN_ID");
    const char *restart = idist__os_env("TORCHELASTIC_RESTART_COUNT");

    idist__meet_set_host(&config->meet, IDIST__MEET_MULTICAST, host, port);
    snprintf(config->meet.name, sizeof config->meet.name, "%d %.200s %.20s", config->world_size,
             run ? run : "", restart ? restart : "0");
}

static bool idist__where_is_multicast(const char *host) {
    int first = atoi(host); // multicast groups begin with 224 to 239
    return first >= 224 && first < 240 && strspn(host, "0123456789.") == strlen(host);
}

static const char *idist__where_method(const idist_desc *desc) {
    return desc->init_method ? desc->init_method : idist__os_env("IDIST_INIT_METHOD");
}

// Returns true if the ranks meet in a file. Does not check the path.
static bool idist__where_is_file(const idist_desc *desc) {
    const char *method = idist__where_method(desc);
    return !desc->store && method && strncmp(method, "file:", 5) == 0;
}

// Sets config->meet to a file. Each group of ranks has its own file: PATH, or PATH.NAME.
static idist_status idist__where_file(idist__config *config, const idist_desc *desc,
                                      const char *path) {
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                  "0123456789._-";
    const char *name = desc->group_name ? desc->group_name : idist__os_env("IDIST_GROUP_NAME");

    if (!name) name = "";
    if (strlen(name) >= sizeof config->group_name || name[strspn(name, letters)])
        return idist__fail(desc->group_name ? IDIST_ERR_ARG : IDIST_ERR_ENV,
                           "%s \"%.80s\": the name of a group has up to %d letters, digits and ._-",
                           desc->group_name ? "group_name" : "IDIST_GROUP_NAME", name,
                           (int)sizeof config->group_name - 1);

    idist__text_copy(config->group_name, sizeof config->group_name, name);
    idist__meet_set_name(&config->meet, IDIST__MEET_FILE, path);
    if (name[0]) idist__text_append(config->meet.name, sizeof config->meet.name, ".%s", name);

    return IDIST_OK;
}

static idist_status idist__where_unknown(const idist_desc *desc, const char *method) {
    const char *hint = "";

    if (strncmp(method, "file:", 5) == 0)
        hint = ". The path of a file begins with a slash, so the method has three";
    return idist__fail(desc->init_method ? IDIST_ERR_ARG : IDIST_ERR_ENV,
                       "%s \"%s\" is not one of env://, tcp://host:port (a port from 1 to 65535), "
                       "tcp://239.x.y.z:port, file:///path%s",
                       desc->init_method ? "init_method" : "IDIST_INIT_METHOD", method, hint);
}

static idist_status idist__where_read_method(idist__config *config, const idist_desc *desc,
                                             const char *method) {
    char host[256];
    int port;

    if (strncmp(method, "file:///", 8) == 0 &&
        strlen(method) + sizeof config->group_name < sizeof config->meet.name)
        return idist__where_file(config, desc, method + 7);

    if (strncmp(method, "tcp://", 6) == 0 &&
        idist__parse_host_port(method + 6, host, sizeof host, &port) && port > 0) {
        if (idist__where_lacks_scope(host))
            return idist__where_no_scope(desc->init_method != NULL, host);
        if (idist__where_is_multicast(host)) idist__where_multicast(config, host, port);
        else idist__where_tcp(config, host, port);
        return IDIST_OK;
    }

    return idist__where_unknown(desc, method);
}

// Sets config->meet or config->store. Checks an init method even if there is only one rank, which
// does not need it.
static idist_status idist__where_find(idist__config *config, const idist_desc *desc) {
    const char *method = idist__where_method(desc);
    bool is_none = strcmp(config->launcher, "none") == 0 && !idist__os_env("IDIST_LAUNCHER");
    bool is_env = !method || strcmp(method, "env://") == 0;
    idist_status status = IDIST_OK;

    config->store = desc->store;
    if (config->store) return IDIST_OK;
    if (!is_env) status = idist__where_read_method(config, desc, method);

    if (!is_env && config->world_size == 1) {
        config->meet.kind = IDIST__MEET_NONE;
        config->lone_method = is_none ? method : NULL;
        config->lone_method_in_desc = desc->init_method != NULL;
    }

    if (!is_env || config->world_size == 1) return status;
    if (config->meet.kind && !method) return IDIST_OK; // from TF_CONFIG

    return idist__where_env(config, desc);
}

// Fails if an init method is given but nothing says which rank this process is. Such a process must
// not run alone only because its rank was forgotten. Called after a backend has claimed the
// configuration, because the backend may have determined the rank itself.
static idist_status idist__where_check_lone(const idist__config *config) {
    const char *method = config->lone_method;
    bool in_desc = config->lone_method_in_desc;

    if (!method || strcmp(config->launcher, "none") != 0) return IDIST_OK;

    return idist__fail(
        in_desc ? IDIST_ERR_ARG : IDIST_ERR_ENV,
        "initialize: %s %s says where ranks meet, but nothing says which of them this process is: "
        "%s%s, or start it with a launcher; IDIST_LAUNCHER=none runs it alone",
        in_desc ? "init_method" : "IDIST_INIT_METHOD", method,
        in_desc ? "give desc.rank and desc.world_size, or set RANK and WORLD_SIZE"
                : "set RANK and WORLD_SIZE",
        strncmp(method, "file:", 5) == 0 ? " (alone: the rank is assigned)" : "");
}
