// spawn/parallel.h: Ignite's Parallel
//
// With nproc_per_node, idist_parallel_run spawns workers. Without nproc_per_node,
// idist_parallel_run joins the world that a launcher started and runs fn in this process. Ignite's
// Parallel makes the same checks in the same order, and prints the same log lines.
#pragma once

#include "os/process.h"
#include "base/fail.h"
#include "base/text.h"
#include "base/log.h"
#include "core/world.h"
#include "calls/choose_backend.h"
#include "calls/life.h"
#include "spawn/worker.h"

// Checks that every backend in a comma-separated list is available.
static idist_status idist__parallel_check_backend(const char *names) {
    const char *at = names;
    const idist_backend_api *host;

    while (at && *at) {
        size_t n = strcspn(at, ",");

        if (!idist__choose_backend_resolve(at, n, &host))
            return idist__fail(IDIST_ERR_NO_BACKEND,
                               "Unknown backend '%.*s'. Available backends: %s", (int)n, at,
                               idist_available_backends());
        at += n + (at[n] == ',');
    }

    return IDIST_OK;
}

// Checks that the program says where the nodes meet, if there is more than one node.
static idist_status idist__parallel_check_master(const idist_desc *d) {
    const char *init = d->init_method ? d->init_method : idist__os_env("IDIST_INIT_METHOD");
    const char *addr = d->master_addr ? d->master_addr : idist__os_env("MASTER_ADDR");
    const char *text = idist__os_env("MASTER_PORT");
    int port = d->master_port;

    if (!port && text) port = atoi(text);
    if (d->nnodes <= 1 || init || (addr && port)) return IDIST_OK;

    return idist__fail(IDIST_ERR_ARG,
                       "If number of nodes larger than one, arguments master_addr and master_port "
                       "or init_method should be specified, but given master_addr=%s, "
                       "master_port=%d and init_method=NULL",
                       addr ? addr : "NULL", port);
}

static idist_status idist__parallel_check(const idist_desc *d) {
    int nnodes = d->nnodes ? d->nnodes : 1;
    idist_status status = idist__parallel_check_backend(d->backend);

    if (status != IDIST_OK) return status;
    if (d->nproc_per_node < 0)
        return idist__fail(IDIST_ERR_ARG, "parallel_run: nproc_per_node must be positive, got %d",
                           d->nproc_per_node);
    if (d->nnodes < 0)
        return idist__fail(IDIST_ERR_ARG, "parallel_run: nnodes must be positive, got %d",
                           d->nnodes);
    if (!d->nproc_per_node) return IDIST_OK;
    if (d->node_rank < 0 || (d->node_rank > 0 && d->node_rank >= nnodes))
        return idist__fail(IDIST_ERR_ARG,
                           "parallel_run: node_rank must be between 0 and %d, got %d", nnodes - 1,
                           d->node_rank);

    return idist__parallel_check_master(d);
}

// Joins the world that a launcher started, and runs fn in this process.
static idist_status idist__parallel_join(const idist_desc *d, idist_worker_fn fn, void *arg,
                                         const char *name, const idist__log *log) {
    idist_status status;
    char backend[32], text[sizeof idist__me.text];
    bool logs;
    int code;

    if (d->nnodes || d->node_rank)
        idist__log_print(log, IDIST_LOG_WARN,
                         "parallel_run: nnodes and node_rank are ignored without nproc_per_node: "
                         "the launcher decides");
    status = idist_initialize(d);
    if (status != IDIST_OK) return status;

    logs = idist_get_rank() == 0;
    idist__text_copy(backend, sizeof backend, idist_backend());
    if (logs)
        idist__log_print(log, IDIST_LOG_INFO, "Initialized processing group with backend: '%s'",
                         backend);
    if (logs)
        idist__log_print(log, IDIST_LOG_INFO, "- Run '%s' in %d processes", name,
                         idist_get_world_size());
    memcpy(text, idist__me.text, sizeof text);
    idist__me.text[0] = 0; // only failures inside fn may leave a text
    code = idist__worker_try("parallel_run", fn, idist_get_local_rank(), arg);
    if (!code && !idist__me.text[0]) memcpy(idist__me.text, text, sizeof text);
    if (logs) idist__log_print(log, IDIST_LOG_INFO, "End of run");

    if (code && idist__world_default()) idist__life_close(idist__world_default(), true);
    else if (idist_is_initialized()) status = idist_finalize();
    if (logs)
        idist__log_print(log, IDIST_LOG_INFO, "Finalized processing group with backend: '%s'",
                         backend);
    if (code)
        return idist__fail(IDIST_ERR_WORKER_FAILED, "the function returned %d%s%.800s", code,
                           idist__me.text[0] ? ": " : "", idist__me.text);

    return status;
}

idist_status idist_parallel_run_named(const idist_desc *desc, idist_worker_fn fn, void *arg,
                                      const char *name) {
    idist__log log;
    idist_desc d;
    idist_status status;

    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (!fn) return idist__fail(IDIST_ERR_ARG, "parallel_run: fn is NULL");
    status = idist__log_init(&log, &d.logger);
    if (status == IDIST_OK) status = idist__parallel_check(&d);
    if (status != IDIST_OK) return status;
    if (!d.nproc_per_node) return idist__parallel_join(&d, fn, arg, name, &log);

    idist__log_print(&log, IDIST_LOG_INFO, "Initialized distributed launcher with backend: '%s'",
                     d.backend ? d.backend : "auto");
    idist__log_print(
        &log, IDIST_LOG_INFO,
        "- Parameters to spawn processes: nproc_per_node: %d, nnodes: %d, node_rank: %d",
        d.nproc_per_node, d.nnodes ? d.nnodes : 1, d.node_rank);
    idist__log_print(&log, IDIST_LOG_INFO, "Spawn function '%s' in %d processes", name,
                     d.nproc_per_node);
    status = idist_spawn(fn, arg, d.nproc_per_node, &d);
    idist__log_print(&log, IDIST_LOG_INFO, "End of run");

    return status;
}
