// spawn/rerun.h: workers that execute the program again
//
// A program that has threads or uses a device cannot continue in a forked child. With start_method
// "exec", a worker executes the program again, with unchanged arguments and one more variable,
// IDIST_SPAWN=call,worker,descriptor,pid. The program runs up to the call of idist_spawn with the
// number `call`, and becomes the worker there. Earlier calls of idist_spawn return immediately.
#pragma once

#include "os/process.h"
#include "os/poll.h"
#include "base/fail.h"
#include "base/mem.h"
#include "store/table.h"
#include "spawn/worker.h"

static int idist__rerun_call_count; // calls of idist_spawn_start in this process, atomic

// The data that a worker needs to execute the program again. The parent prepares the data before
// the fork. After the fork only simple system calls are allowed, because another thread may have
// held a lock, such as malloc's, during the fork.
typedef struct idist__rerun {
    char path[4096];
    char variable[80]; // IDIST_SPAWN=..., see idist__rerun_find
    char *args;        // arguments of this process, one after another
    size_t args_nbytes;
    char **argv, **envp;
} idist__rerun;

static void idist__rerun_free(idist__rerun *r, const idist_allocator *mem) {
    idist__mem_free(mem, r->args);
    idist__mem_free(mem, r->argv);
    idist__mem_free(mem, r->envp);
}

// Reads the arguments of this process. Returns false if memory cannot be allocated.
static bool idist__rerun_read_args(idist__rerun *r, const idist_allocator *mem, int fd) {
    size_t cap = 0, got;

    do {
        size_t used = r->args_nbytes;

        if (!idist__buffer_reserve(mem, &r->args, &cap, used, used + 4096)) return false;
        got = idist__os_process_read_args(fd, r->args + used, cap - used - 1);
        r->args_nbytes += got;
    } while (got);

    return true;
}

// Prepares the path, arguments and environment of the workers.
static idist_status idist__rerun_make(idist__rerun *r, const idist_allocator *mem) {
    char **variables = idist__os_process_variables();
    size_t argc = 0, envc = 0, i, n;
    int fd = idist__os_process_path(r->path, sizeof r->path) ? idist__os_process_open_args() : -1;
    bool has_args;

    if (fd < 0)
        return idist__fail(
            IDIST_ERR_SYSTEM,
            "spawn: start_method \"exec\" cannot read /proc/self/exe and /proc/self/cmdline: %s. "
            "Mount /proc, or use start_method \"fork\" or a launcher",
            strerror(errno));
    has_args = idist__rerun_read_args(r, mem, fd);
    idist__os_descriptor_close(&fd);
    if (!has_args) return IDIST_ERR_NO_MEMORY;

    for (i = 0; i < r->args_nbytes; i++) argc += !r->args[i];
    while (variables && variables[envc]) envc++;
    r->argv = (char **)idist__mem_alloc(mem, (argc + 1) * sizeof *r->argv);
    r->envp = (char **)idist__mem_alloc(mem, (envc + 2) * sizeof *r->envp);
    if (!r->argv || !r->envp) return IDIST_ERR_NO_MEMORY;

    for (i = n = 0; n < argc; i += strlen(r->args + i) + 1) r->argv[n++] = r->args + i;
    r->envp[0] = r->variable;
    for (i = 0, n = 1; i < envc; i++)
        if (strncmp(variables[i], "IDIST_SPAWN=", 12) != 0) r->envp[n++] = variables[i];

    return IDIST_OK;
}

// Executes the program again, in the child. The descriptor of the shared memory stays open in every
// worker, and the listener stays open in worker 0. Appends the process id to the variable, without
// snprintf, which may take a lock.
static void idist__rerun_execute(idist_workers *spawn, idist__rerun *r, int i) {
    char *at = r->variable + strlen(r->variable), digits[16];
    int pid = (int)idist__os_process_id(), n = 0;

    for (; pid; pid /= 10) digits[n++] = (char)('0' + pid % 10);
    while (n) *at++ = digits[--n];
    idist__os_process_pass(spawn->shared_fd, true);
    if (i == 0 && spawn->cfg.listener >= 0) idist__os_process_pass(spawn->cfg.listener, true);
    spawn->shared->results[i].exec_errno = idist__os_process_execute(r->path, r->argv, r->envp);
    idist__os_process_exit(127);
}

// Returns true if this process was executed again as a worker. Sets the number of the call of
// idist_spawn, the index of the worker, and the descriptor of the shared memory. Programs that a
// worker starts inherit the variable, so the process id in the variable must be the id of this
// process.
static bool idist__rerun_find(int *call, int *worker, int *fd) {
    const char *text = idist__os_env("IDIST_SPAWN");
    int pid = 0, end = 0;

    return text && sscanf(text, "%d,%d,%d,%d%n", call, worker, fd, &pid, &end) == 4 && !text[end] &&
           pid == (int)idist__os_process_id();
}

// Turns this process into worker i of the current call of idist_spawn. Returns only on failure,
// because a worker must never continue as if it were the parent.
static idist_status idist__rerun_worker(idist_workers *spawn, int i, int fd) {
    idist__worker_shared *shared = NULL;

    idist__os_process_die_with(idist__os_process_parent());
    idist__os_process_pass(fd, false);
    if (!idist__os_process_file_begins(fd, idist__worker_magic, sizeof idist__worker_magic))
        return idist__fail(
            IDIST_ERR_STATE,
            "spawn: the program, executed again as worker %d, has closed descriptors that it did "
            "not open; it must leave such descriptors open",
            i);
    if (idist__os_process_file_has(fd, spawn->shared_nbytes))
        shared = (idist__worker_shared *)idist__os_process_share(fd, spawn->shared_nbytes);
    if (!shared || i < 0 || i >= spawn->n)
        return idist__fail(
            IDIST_ERR_STATE,
            "spawn: the program, executed again as worker %d, requests a different number of "
            "workers than its parent",
            i);

    __atomic_store_n(&shared->results[i].arrived, 1, __ATOMIC_RELEASE);
    spawn->shared_fd = fd;
    spawn->shared = shared;
    spawn->first_rank = shared->first_rank;
    spawn->cfg.secret = shared->secret;
    spawn->cfg.listener = i == 0 ? shared->listener : -1;
    if (spawn->cfg.listener >= 0) idist__os_process_pass(spawn->cfg.listener, false);
    spawn->cfg.meet = shared->meet;
    idist__worker_run(spawn, i);

    return IDIST_OK; // not reached
}
