// spawn/start.h: start workers
//
// Starts the workers of idist_spawn on this host. Each worker is a rank of a new world. watch.h
// watches the workers, and report.h waits for them and reports the first failure.
//
//     idist_spawn_start
//       idist__start_check      arguments
//       idist__start_config     the configuration of worker 0
//       idist__start_all        (in a worker that is executed again: idist__rerun_worker instead)
//         idist__start_prepare    meeting point, shared memory, tables
//         idist__start_fork       each worker
#pragma once

#include "os/clock.h"
#include "os/random.h"
#include "os/process.h"
#include "os/cpu.h"
#include "os/memory.h"
#include "os/poll.h"
#include "os/socket.h"
#include "base/fail.h"
#include "base/mem.h"
#include "base/log.h"
#include "net/address.h"
#include "net/meet.h"
#include "net/connection.h"
#include "launch/env.h"
#include "launch/config.h"
#include "core/model.h"
#include "core/world.h"
#include "calls/life.h"
#include "spawn/worker.h"
#include "spawn/rerun.h"
#include "spawn/watch.h"

// Listens at a TCP port of the loopback interface, for systems without local sockets.
static idist_status idist__start_listen_tcp(idist_workers *spawn) {
    idist__config *cfg = &spawn->cfg;
    idist__os_address addr;
    idist_status status = idist__address_tcp(&addr, "127.0.0.1", 0);

    if (status == IDIST_OK) status = idist__connection_listen(&addr, "127.0.0.1", &cfg->listener);
    if (status != IDIST_OK) return status;
    if (!idist__os_socket_own_address(cfg->listener, &addr))
        return idist__fail_errno("spawn: asking for the port of a listener", errno);
    idist__meet_set_host(&cfg->meet, IDIST__MEET_TCP, "127.0.0.1", idist__os_socket_port(&addr));

    return IDIST_OK;
}

// Listens at a local socket with a random name.
static idist_status idist__start_listen_local(idist_workers *spawn) {
    idist__os_address addr;
    uint64_t id[2];
    char name[64], text[80];
    int count;
    idist_status status;

    idist__os_random(id, sizeof id);
    snprintf(name, sizeof name, "idist-%016llx%016llx", (unsigned long long)id[0],
             (unsigned long long)id[1]);
    idist__meet_set_name(&spawn->cfg.meet, IDIST__MEET_LOCAL, name);
    idist__meet_print(&spawn->cfg.meet, text, sizeof text);
    status = idist__meet_resolve(&spawn->cfg.meet, 0, &count, &addr);
    if (status != IDIST_OK) return status;

    return idist__connection_listen(&addr, text, &spawn->cfg.listener);
}

// Creates the meeting point of the workers: a local socket without a file, which listens before the
// first worker runs. If TCP is requested and local sockets are not allowed, the meeting point is a
// TCP port of the loopback interface. Workers get the secret through memory.
static idist_status idist__start_meeting_point(idist_workers *spawn) {
    bool by_tcp = spawn->cfg.transport == IDIST__TRANSPORT_TCP && idist__os_socket_local_error();
    idist_status status;

    if (spawn->cfg.secret.nbytes == 0) {
        spawn->cfg.secret.nbytes = 32;
        idist__os_random(spawn->cfg.secret.bytes, 32);
    }

    status = by_tcp ? idist__start_listen_tcp(spawn) : idist__start_listen_local(spawn);
    if (status != IDIST_OK) return status;
    if (!idist__os_process_move_fd(&spawn->cfg.listener))
        return idist__fail_errno("spawn: moving a descriptor for the workers", errno);

    return IDIST_OK;
}

// Creates the memory that the workers share with the parent. Forked workers inherit the mapping.
// Executed workers map the file again.
static idist_status idist__start_share(idist_workers *spawn, bool by_exec) {
    if (by_exec) {
        spawn->shared_fd = idist__os_memory_file(spawn->shared_nbytes);
        if (spawn->shared_fd < 0)
            return idist__fail_errno("spawn: creating shared memory for the workers", errno);
        if (!idist__os_process_move_fd(&spawn->shared_fd))
            return idist__fail_errno("spawn: moving a descriptor for the workers", errno);
    }

    spawn->shared =
        (idist__worker_shared *)idist__os_process_share(spawn->shared_fd, spawn->shared_nbytes);

    return IDIST_OK;
}

// Creates the meeting point, the shared memory and the table of workers.
static idist_status idist__start_prepare(idist_workers *spawn, bool by_exec) {
    const idist_allocator *mem = &spawn->cfg.mem;
    size_t n = (size_t)spawn->n;
    idist_status status = IDIST_OK;
    int i;

    if (spawn->cfg.world_size == spawn->n && spawn->n > 1)
        status = idist__start_meeting_point(spawn);
    if (status == IDIST_OK) status = idist__start_share(spawn, by_exec);
    if (status != IDIST_OK) return status;

    spawn->workers = (idist__worker *)idist__mem_alloc(mem, sizeof *spawn->workers * n);
    spawn->slots = (idist__os_process_slot *)idist__mem_alloc(mem, sizeof *spawn->slots * n);
    if (!spawn->shared || !spawn->workers || !spawn->slots)
        return idist__fail(IDIST_ERR_NO_MEMORY, "spawn: no memory for the table of workers");

    for (i = 0; i < spawn->n; i++) spawn->workers[i].watch_fd = -1;
    memcpy(spawn->shared->magic, idist__worker_magic, sizeof spawn->shared->magic);
    spawn->shared->first_rank = spawn->first_rank;
    spawn->shared->listener = spawn->cfg.listener;
    spawn->shared->secret = spawn->cfg.secret;
    spawn->shared->meet = spawn->cfg.meet;

    return IDIST_OK;
}

// Starts worker i. If rerun is NULL, the forked child runs the worker itself.
static idist_status idist__start_fork(idist_workers *spawn, idist__rerun *rerun, int i) {
    idist__os_process child;

    if (rerun)
        snprintf(rerun->variable, sizeof rerun->variable, "IDIST_SPAWN=%d,%d,%d,",
                 spawn->call_number, i, spawn->shared_fd);
    child = idist__os_process_fork();
    if (child < 0) return idist__fail_errno("fork", errno);

    if (child == 0) {
        if (rerun) idist__rerun_execute(spawn, rerun, i);

        idist__life_after_fork();
        memset(&idist__me, 0, sizeof idist__me);
        __atomic_store_n(&idist__default_world, (idist__world *)NULL, __ATOMIC_RELEASE);
        idist__worker_run(spawn, i);
    }

    spawn->workers[i].process = child;
    spawn->running++;

    return IDIST_OK;
}

// Starts all workers. On failure, kills the workers that are already running and waits until they
// end.
static idist_status idist__start_all(idist_workers *spawn, bool by_exec) {
    idist__rerun rerun;
    idist_status status = idist__start_prepare(spawn, by_exec);
    int i;

    memset(&rerun, 0, sizeof rerun);
    if (status == IDIST_OK && by_exec) status = idist__rerun_make(&rerun, &spawn->cfg.mem);
    if (!by_exec) fflush(NULL); // otherwise each worker would print the buffered output again
    for (i = 0; i < spawn->n && status == IDIST_OK; i++)
        status = idist__start_fork(spawn, by_exec ? &rerun : NULL, i);
    idist__rerun_free(&rerun, &spawn->cfg.mem);
    if (by_exec && spawn->cfg.init_timeout_ms > 0)
        spawn->arrive_ns = idist__os_clock_deadline(spawn->cfg.init_timeout_ms);
    idist__os_descriptor_close(&spawn->cfg.listener);
    idist__os_descriptor_close(&spawn->shared_fd);

    for (i = 0; spawn->running && i < spawn->n; i++)
        if (spawn->workers[i].process > 0)
            spawn->workers[i].watch_fd = idist__os_process_watch(spawn->workers[i].process);
    if (status == IDIST_OK) return IDIST_OK;

    if (spawn->running) idist__watch_signal(spawn, IDIST__OS_PROCESS_KILL);
    for (; spawn->running; idist__os_clock_pause_ms(1)) idist__watch_reap(spawn);

    return status;
}

static void idist__start_free(idist_workers *spawn) {
    idist_allocator mem = spawn->cfg.mem;

    idist__os_descriptor_close(&spawn->cfg.listener);
    idist__os_descriptor_close(&spawn->shared_fd);
    idist__os_process_unshare(spawn->shared, spawn->shared_nbytes);
    idist__mem_free(&mem, spawn->workers);
    idist__mem_free(&mem, spawn->slots);
    memset(&spawn->cfg.secret, 0, sizeof spawn->cfg.secret);
    idist__mem_free(&mem, spawn);
}

// Fills in the configuration of worker 0. On one host the configuration is first filled in as for a
// world of one rank, which needs no meeting place. idist__start_meeting_point creates the meeting
// point of the workers.
static idist_status idist__start_config(idist_workers *spawn, const idist_desc *d) {
    idist_desc alone = *d;
    int nnodes = d->nnodes > 1 ? d->nnodes : 1;
    idist_status status;

    alone.world_size = nnodes > 1 ? nnodes * spawn->n : 1;
    alone.rank = nnodes > 1 ? d->node_rank * spawn->n : 0;
    alone.store = NULL;
    status = idist__config_fill(&spawn->cfg, &alone);
    if (status != IDIST_OK) return status;

    spawn->first_rank = alone.rank;
    spawn->cfg.launcher = "spawn";
    spawn->cfg.world_size = nnodes * spawn->n;
    if (nnodes == 1) spawn->cfg.local_size = spawn->n;

    return IDIST_OK;
}

// Checks the arguments, and sets *by_exec if the program asks for start_method "exec".
static idist_status idist__start_check(const idist_desc *d, int nproc_per_node, bool *by_exec) {
    int method = 0;
    idist_status status;

    if (d->nnodes < 0 || d->nnodes > 65536 || d->node_rank < 0 ||
        (d->node_rank && d->node_rank >= d->nnodes))
        return idist__fail(IDIST_ERR_ARG,
                           "spawn: node_rank %d of nnodes %d: nnodes must be at most 65536, and "
                           "node_rank less than nnodes",
                           d->node_rank, d->nnodes);
    if (nproc_per_node < 0 || nproc_per_node > 4096)
        return idist__fail(IDIST_ERR_ARG,
                           "spawn: nproc_per_node must be between 1 and 4096, or 0 for the number "
                           "of cores, got %d",
                           nproc_per_node);

    status = idist__config_choice(d->start_method, "IDIST_START_METHOD", "fork, exec", &method);
    *by_exec = method == 1;

    return status;
}

// Refuses start_method "exec" inside a worker.
static idist_status idist__start_check_worker(bool by_exec) {
    if (!by_exec || !idist__is_worker) return IDIST_OK;
    return idist__fail(IDIST_ERR_UNSUPPORTED,
                       "spawn: a worker can start other workers only with start_method \"fork\"");
}

static void idist__start_fill(idist_workers *spawn, const idist_desc *d, int nproc_per_node) {
    spawn->n = nproc_per_node ? nproc_per_node : idist__os_cpu_count();
    spawn->first_failed = -1;
    spawn->shared_fd = -1;
    spawn->decide_ns = IDIST__FOREVER;
    spawn->signal_ns = IDIST__FOREVER;
    spawn->arrive_ns = IDIST__FOREVER;
    spawn->grace_ms = d->grace_ms > 0 ? d->grace_ms : 2000;
    spawn->keep_going = d->keep_going;
    spawn->report = d->report;
    spawn->shared_nbytes =
        offsetof(idist__worker_shared, results) + sizeof(idist__worker_result) * (size_t)spawn->n;
}

static void idist__start_clear_report(idist_report *report) {
    if (!report) return;
    memset(report, 0, sizeof *report);
    report->rank = -1;
}

idist_status idist_spawn_start(idist_worker_fn fn, void *arg, int nproc_per_node,
                               const idist_desc *desc, idist_workers **workers) {
    int number = __atomic_add_fetch(&idist__rerun_call_count, 1, __ATOMIC_RELAXED);
    int call = 0, worker = 0, fd = -1;
    bool executed = idist__rerun_find(&call, &worker, &fd), by_exec = false;
    idist_workers own, *spawn;
    idist_desc d;
    idist_status status;

    memset(&own, 0, sizeof own);
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (workers) *workers = NULL;
    idist__start_clear_report(d.report);
    if (!fn || !workers)
        return idist__fail(IDIST_ERR_ARG, "spawn: %s is NULL", fn ? "workers" : "fn");
    status = idist__start_check(&d, nproc_per_node, &by_exec);
    if (status != IDIST_OK) return status;
    if (executed && number < call) return IDIST_OK; // the parent has finished this call
    status = idist__start_check_worker(by_exec);
    if (status != IDIST_OK) return status;

    own.call_number = number;
    own.fn = fn;
    own.arg = arg;
    idist__start_fill(&own, &d, nproc_per_node);
    status = idist__log_init(&own.log, &d.logger);
    idist__fail_begin();
    if (status == IDIST_OK) status = idist__start_config(&own, &d);
    if (idist__fail_end(status) != IDIST_OK) return status;

    spawn = (idist_workers *)idist__mem_alloc(&own.cfg.mem, sizeof *spawn);
    if (!spawn) return IDIST_ERR_NO_MEMORY;
    *spawn = own;
    if (executed && number == call) status = idist__rerun_worker(spawn, worker, fd);
    else status = idist__start_all(spawn, by_exec);
    if (status == IDIST_OK) *workers = spawn;
    else idist__start_free(spawn);

    return status;
}
