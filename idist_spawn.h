/* idist_spawn.h - v0.2.0 - worker processes - MIT licence

    Part of the implementation of idist; idist.h includes it where IDIST_IMPLEMENTATION is defined.

    idist_spawn starts workers on this host, each a rank of a new world, watches them, and reports
    the first that failed. idist_parallel_run is Ignite's Parallel: it spawns, or joins the world
    that a launcher made. Nothing else in idist uses this file.

CONTENTS

      [spawn:worker]    what a worker shares with its parent, and what it runs
      [spawn:rerun]     workers that execute the program again
      [spawn:watch]     the parent's watch over its workers
      [spawn:start]     start workers
      [spawn:report]    wait for workers, and report
      [spawn:parallel]  Ignite's Parallel
*/
#ifndef IDIST_SPAWN_H
#define IDIST_SPAWN_H

//------------------------------------------------------------------------------
// [spawn:worker]  what a worker shares with its parent, and what it runs
// uses unwind descriptor process fail callback text base:log secret launch:env
// uses model core:world calls:world
//
//     parent                                        worker i
//     ------                                        --------
//     idist_spawn_start: shared memory,
//     a listening socket, the secret
//       fork ------------------------------------>  idist__worker_run
//                        (start_method "exec":         opens the world, runs fn, closes the world
//                         execute the program          result ----> shared->results[i]
//                         again, up to its call)       exits with fn's code
//     idist_spawn_wait: watch, end the others
//     after a failure, report
//
// A worker's exit code alone does not tell everything: the text of its last error, and whether it
// failed only because another rank did, are in its result.
//------------------------------------------------------------------------------

// What a worker leaves for its parent.
typedef struct idist__worker_result {
    int finished;  // it returned from fn, and `code` is its result
    int secondary; // it failed because another rank was lost
    int code;
    int exec_errno; // the program could not be executed again
    int arrived;    // the program, executed again, has come to its call
    char text[400]; // its last error
} idist__worker_result;

// The memory that workers and parent share. A worker that executes the program again knows nothing
// else of its parent.
typedef struct idist__worker_shared {
    char magic[8];
    int first_rank, listener;
    idist__secret secret;
    char where[sizeof((idist__config *)0)->where];
    idist__worker_result results[1]; // n of them
} idist__worker_shared;

static const char idist__worker_magic[8] = {'I', 'D', 'S', 'P', 'A', 'W', 'N', '1'};

typedef struct idist__worker {
    idist__os_process process;
    int watch_fd; // -1: this kernel has none, or the worker was reaped
    bool ended;
    bool lost; // the program reaped it, not we, so how it ended is not known
    bool late; // executed again, it did not come to its call in time
    idist__os_process_end end;
} idist__worker;

// How far the ending of the others is, after a first failure.
typedef enum idist__worker_stage {
    IDIST__WORKER_RUNNING,
    IDIST__WORKER_GRACE,    // they may end by themselves
    IDIST__WORKER_SIGNALLED // SIGTERM was sent, SIGKILL follows
} idist__worker_stage;

struct idist_workers {
    idist__config cfg; // of worker 0
    idist_worker_fn fn;
    void *arg;
    int n, first_rank;
    int call_number; // ordinal of this spawn call in the process
    idist__worker *workers;
    idist__os_process_slot *slots; // for n
    idist__worker_shared *shared;
    size_t shared_nbytes;
    int shared_fd; // -1: workers inherit the mapping itself
    idist__log log;
    int first_failed; // index, -1: none so far
    int running;
    int64_t decide_ns; // when the first failure is decided on
    int64_t signal_ns; // when the next signal is sent
    int64_t arrive_ns; // when all that were executed again must have come to their call
    idist__worker_stage stage;
    int grace_ms;
    bool keep_going;
    idist_report *report; // the caller's, or NULL
};

static bool idist__is_worker; // this process

// What ends a worker, however its function ended. Does not return.
static void idist__worker_exit(const idist_workers *spawn, idist__worker_result *result, int code) {
    __atomic_store_n(&result->finished, 1, __ATOMIC_RELEASE);

    // Executed again, the program has threads of its own; flushing all streams would wait for one
    // that sits in a read.
    if (spawn->shared_fd < 0) fflush(NULL);
    fflush(stdout);
    fflush(stderr);
    idist__os_process_exit(code);
}

typedef struct idist__worker_frame { // of the function that calls fn
    const idist_workers *spawn;
    idist__worker_result *result;
} idist__worker_frame;

// fn has called longjmp, to a function of the parent's that this process must not go on with, or
// pthread_exit. The world stays open: the other ranks are told that this one is lost.
static void idist__worker_left(void *arg) {
    const idist__worker_frame *frame = (const idist__worker_frame *)arg;

    frame->result->code = 1;
    idist__text_copy(frame->result->text, sizeof frame->result->text,
                     "its function did not return: it was left by longjmp or pthread_exit");
    idist__worker_exit(frame->spawn, frame->result, 1);
}

// Calls fn. Returns its result; 1 if it has thrown an exception, which the text of the last failure
// then says.
IDIST__NOINLINE static int idist__worker_try(const char *name, idist_worker_fn fn, int i,
                                             void *arg) {
    int code = 1;

    IDIST__TRY(code = fn(i, arg));
    return idist__callback_threw(name, "the function") ? 1 : code;
}

// The same in a worker process, which fn must not leave in any other way.
static int idist__worker_call(const idist_workers *spawn, int i, idist__worker_result *result) {
    idist__os_unwind_frame unwind;
    idist__worker_frame frame;
    int code;

    frame.spawn = spawn;
    frame.result = result;
    idist__os_unwind_watch(&unwind, idist__worker_left, &frame);
    code = idist__worker_try("spawn", spawn->fn, i, spawn->arg);
    idist__os_unwind_unwatch(&unwind);

    return code;
}

// Runs fn in a world of its own and leaves the result. Returns the exit code.
static int idist__worker_work(idist_workers *spawn, int i, idist__worker_result *result) {
    idist__world *w = NULL;
    idist_status status = idist__life_open(&spawn->cfg, &w);
    int code;

    if (status != IDIST_OK) {
        result->code = 1;
        result->secondary = status == IDIST_ERR_PEER_LOST || status == IDIST_ERR_TIMEOUT;
        return result->code;
    }

    __atomic_store_n(&idist__default_world, w, __ATOMIC_RELEASE);
    idist__me.text[0] = 0; // the text of a failure is to be fn's own
    code = idist__worker_call(spawn, i, result);
    result->code = code & 255 ? code & 255 : code != 0;
    idist__text_copy(result->text, sizeof result->text, code ? idist__me.text : "");

    w = idist__world_default(); // fn may have finalized by itself
    if (w) status = idist__life_close(w, code != 0);
    if (status != IDIST_OK && status != IDIST_ERR_ABORTED && !code && !result->secondary)
        result->code = 1;

    return result->code;
}

// Does not return.
static void idist__worker_run(idist_workers *spawn, int i) {
    idist__worker_result *result = &spawn->shared->results[i];
    idist__config *cfg = &spawn->cfg;
    int code;

    idist__is_worker = true;
    if (i != 0) idist__os_descriptor_close(&cfg->listener);
    cfg->rank = spawn->first_rank + i;
    cfg->local_rank = i;
    cfg->lost = &result->secondary;

    code = idist__worker_work(spawn, i, result);
    if (code && !result->text[0])
        idist__text_copy(result->text, sizeof result->text, idist__me.text);
    idist__worker_exit(spawn, result, code);
}

//------------------------------------------------------------------------------
// [spawn:rerun]  workers that execute the program again
// uses os:env descriptor process fail mem buffer worker
//
// start_method "exec": a program with threads, or with a device in use, cannot go on in a forked
// child. Such a worker executes the program again, with the same arguments and one more variable,
// IDIST_SPAWN=call,worker,descriptor,pid. The program runs up to the same call of idist_spawn, in
// which it becomes the worker; earlier calls return at once.
//------------------------------------------------------------------------------

static int idist__rerun_call_count; // calls of idist_spawn_start in this process, atomic

// Everything such a worker is made of, prepared before the fork: after it only simple system calls
// are allowed, since other threads may have held any lock.
typedef struct idist__rerun {
    char path[4096];
    char variable[80]; // IDIST_SPAWN=..., see idist__rerun_find
    char *args;        // of this process, one after the other
    size_t args_nbytes;
    char **argv, **envp;
} idist__rerun;

static void idist__rerun_free(idist__rerun *r, const idist_allocator *mem) {
    idist__mem_free(mem, r->args);
    idist__mem_free(mem, r->argv);
    idist__mem_free(mem, r->envp);
}

// Reads the arguments of this process; args NULL: no memory.
static void idist__rerun_read_args(idist__rerun *r, const idist_allocator *mem, int fd) {
    size_t cap = 0, got;

    do {
        size_t used = r->args_nbytes;

        if (!idist__buffer_reserve(mem, &r->args, &cap, used, used + 4096)) break;
        got = idist__os_process_read_args(fd, r->args + used, cap - used - 1);
        r->args_nbytes += got;
    } while (got);
}

static idist_status idist__rerun_make(idist__rerun *r, const idist_allocator *mem) {
    char **variables = idist__os_process_variables();
    size_t argc = 0, envc = 0, i, n;
    int fd = idist__os_process_path(r->path, sizeof r->path) ? idist__os_process_open_args() : -1;

    if (fd < 0)
        return idist__fail(
            IDIST_ERR_SYSTEM,
            "spawn: start_method \"exec\" finds the program in /proc (self/exe and self/cmdline), "
            "which cannot be read: %s. Mount /proc, or use start_method \"fork\" or a launcher",
            strerror(errno));
    idist__rerun_read_args(r, mem, fd);
    idist__os_descriptor_close(&fd);

    for (i = 0; r->args && i < r->args_nbytes; i++) argc += !r->args[i];
    while (variables && variables[envc]) envc++;
    r->argv = (char **)idist__mem_alloc(mem, (argc + 1) * sizeof *r->argv);
    r->envp = (char **)idist__mem_alloc(mem, (envc + 2) * sizeof *r->envp);
    if (!r->args || !r->argv || !r->envp) return IDIST_ERR_NO_MEMORY;

    for (i = n = 0; n < argc; i += strlen(r->args + i) + 1) r->argv[n++] = r->args + i;
    r->envp[0] = r->variable;
    for (i = 0, n = 1; i < envc; i++)
        if (strncmp(variables[i], "IDIST_SPAWN=", 12) != 0) r->envp[n++] = variables[i];

    return IDIST_OK;
}

// In the child. Its descriptors of the shared memory and, for worker 0, of the listener stay open.
// The last number of the variable is its own process id, written without snprintf, which may take a
// lock.
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

// Whether this process was made to run one call of idist_spawn, and which. What a worker starts
// inherits the variable, hence the process id in it.
static bool idist__rerun_find(int *call, int *worker, int *fd) {
    const char *text = idist__os_env("IDIST_SPAWN");
    int pid = 0, end = 0;

    return text && sscanf(text, "%d,%d,%d,%d%n", call, worker, fd, &pid, &end) == 4 && !text[end] &&
           pid == (int)idist__os_process_id();
}

// Makes this process worker i of the call it has come to. Returns only on failure; it must never go
// on as if it were the parent.
static idist_status idist__rerun_worker(idist_workers *spawn, int i, int fd) {
    idist__worker_shared *shared = NULL;

    idist__os_process_die_with(idist__os_process_parent());
    idist__os_process_pass(fd, false);
    if (!idist__os_process_file_begins(fd, idist__worker_magic, sizeof idist__worker_magic))
        return idist__fail(IDIST_ERR_STATE,
                           "spawn: the program, executed again as worker %d, has closed "
                           "descriptors that it did not open; it must leave those open",
                           i);
    if (idist__os_process_file_has(fd, spawn->shared_nbytes))
        shared = (idist__worker_shared *)idist__os_process_share(fd, spawn->shared_nbytes);
    if (!shared || i < 0 || i >= spawn->n)
        return idist__fail(IDIST_ERR_STATE,
                           "spawn: the program, executed again as worker %d, asks for another "
                           "number of workers than before",
                           i);

    __atomic_store_n(&shared->results[i].arrived, 1, __ATOMIC_RELEASE);
    spawn->shared_fd = fd;
    spawn->shared = shared;
    spawn->first_rank = shared->first_rank;
    spawn->cfg.secret = shared->secret;
    spawn->cfg.listener = i == 0 ? shared->listener : -1;
    if (spawn->cfg.listener >= 0) idist__os_process_pass(spawn->cfg.listener, false);
    memcpy(spawn->cfg.where, shared->where, sizeof shared->where);
    idist__worker_run(spawn, i);

    return IDIST_OK; // not reached
}

//------------------------------------------------------------------------------
// [spawn:watch]  the parent's watch over its workers
// uses clock descriptor process base:log worker
//
//     idist__watch_turn
//       idist__watch_reap     who has ended?
//       idist__watch_judge    which failure was the first?
//       idist__watch_expect   who has not come to its call in time?
//       idist__watch_end      after a failure: grace, SIGTERM, 400 ms, SIGKILL
//------------------------------------------------------------------------------

static bool idist__watch_has_failed(const idist_workers *spawn, int i) {
    const idist__worker *worker = &spawn->workers[i];
    bool finished = __atomic_load_n(&spawn->shared->results[i].finished, __ATOMIC_ACQUIRE);

    return worker->ended && !(worker->end.exit_code == 0 && finished);
}

// Collects the workers that ended. Returns whether one did.
static bool idist__watch_reap(idist_workers *spawn) {
    bool any = false;
    int i;

    for (i = 0; i < spawn->n; i++) {
        idist__worker *worker = &spawn->workers[i];
        idist__worker_result *result = &spawn->shared->results[i];
        idist__os_process_state state;

        if (worker->ended || worker->process <= 0) continue;
        state = idist__os_process_reap(worker->process, &worker->end);
        if (state == IDIST__OS_PROCESS_RUNS) continue;

        if (state == IDIST__OS_PROCESS_UNKNOWN) { // its result tells, if it has left one
            worker->lost = !__atomic_load_n(&result->finished, __ATOMIC_ACQUIRE);
            worker->end.exit_code = worker->lost ? 127 : result->code;
        }

        worker->ended = any = true;
        spawn->running--;
        idist__os_descriptor_close(&worker->watch_fd);
    }

    return any;
}

// The first failure is the first that did not follow from another: a rank that ends because its
// peer was killed may well be reaped before that peer. While only such are known the decision waits
// a little.
static void idist__watch_judge(idist_workers *spawn) {
    int i, secondary = -1;

    for (i = 0; i < spawn->n && spawn->first_failed < 0; i++) {
        if (!idist__watch_has_failed(spawn, i)) continue;
        if (!__atomic_load_n(&spawn->shared->results[i].secondary, __ATOMIC_ACQUIRE))
            spawn->first_failed = i;
        else if (secondary < 0) secondary = i;
    }

    if (spawn->first_failed >= 0 || secondary < 0) return;
    if (spawn->decide_ns == IDIST__FOREVER) spawn->decide_ns = idist__os_clock_deadline(500);
    if (!spawn->running || idist__os_clock_ms_until(spawn->decide_ns) == 0)
        spawn->first_failed = secondary;
}

static void idist__watch_signal_one(const idist__worker *worker, int signal_number) {
    if (worker->ended || worker->process <= 0) return;
    idist__os_process_signal(worker->process, worker->watch_fd, signal_number);
}

static void idist__watch_signal(idist_workers *spawn, int signal_number) {
    int i;
    for (i = 0; i < spawn->n; i++) idist__watch_signal_one(&spawn->workers[i], signal_number);
}

// A program that never comes to its call, executed again, would be waited for without an end.
static void idist__watch_expect(idist_workers *spawn) {
    int i;

    if (spawn->arrive_ns == IDIST__FOREVER || idist__os_clock_ms_until(spawn->arrive_ns) != 0)
        return;
    spawn->arrive_ns = IDIST__FOREVER;

    for (i = 0; i < spawn->n; i++) {
        if (spawn->workers[i].ended ||
            __atomic_load_n(&spawn->shared->results[i].arrived, __ATOMIC_ACQUIRE))
            continue;
        spawn->workers[i].late = true;
        idist__watch_signal_one(&spawn->workers[i], IDIST__OS_PROCESS_KILL);
    }
}

static void idist__watch_end(idist_workers *spawn) {
    bool term = spawn->stage == IDIST__WORKER_GRACE;

    if (spawn->stage == IDIST__WORKER_RUNNING) {
        if (spawn->first_failed < 0 || spawn->keep_going) return;
        spawn->stage = IDIST__WORKER_GRACE;
        spawn->signal_ns = idist__os_clock_deadline(spawn->grace_ms);
        return;
    }

    if (idist__os_clock_ms_until(spawn->signal_ns) != 0) return;
    idist__log_print(&spawn->log, IDIST_LOG_INFO, "spawn: %d workers still run: %s", spawn->running,
                     term ? "SIGTERM" : "SIGKILL");
    idist__watch_signal(spawn, term ? IDIST__OS_PROCESS_TERMINATE : IDIST__OS_PROCESS_KILL);
    if (term) idist__watch_signal(spawn, IDIST__OS_PROCESS_CONTINUE); // a stopped one must get it
    spawn->signal_ns = idist__os_clock_deadline(term ? 400 : 1000);
    spawn->stage = IDIST__WORKER_SIGNALLED;
}

// Looks after the workers, once. Does not block.
static void idist__watch_turn(idist_workers *spawn) {
    bool any = idist__watch_reap(spawn);

    if (any || spawn->decide_ns != IDIST__FOREVER) idist__watch_judge(spawn);
    if (!spawn->running) return;
    idist__watch_expect(spawn);
    idist__watch_end(spawn);
}

// When the next turn is needed even if no worker ends.
static int64_t idist__watch_next(const idist_workers *spawn, int64_t deadline_ns) {
    int64_t until_ns = spawn->signal_ns < deadline_ns ? spawn->signal_ns : deadline_ns;

    if (spawn->first_failed < 0 && spawn->decide_ns < until_ns) until_ns = spawn->decide_ns;
    return spawn->arrive_ns < until_ns ? spawn->arrive_ns : until_ns;
}

static void idist__watch_sleep(idist_workers *spawn, int64_t until_ns) {
    int i, n = 0, ms = idist__os_clock_ms_until(until_ns);
    bool blind = false;

    for (i = 0; i < spawn->n; i++) {
        if (spawn->workers[i].ended) continue;
        if (spawn->workers[i].watch_fd < 0) blind = true;
        idist__os_process_slot_set(&spawn->slots[n++], spawn->workers[i].watch_fd);
    }

    if (blind && (ms < 0 || ms > 5)) ms = 5; // look often
    idist__os_process_sleep(spawn->slots, n, ms);
}

//------------------------------------------------------------------------------
// [spawn:start]  start workers
// uses clock os:random descriptor cpu os:memory socket process fail mem
// uses base:log address connection launch:env config model core:world
// uses calls:world worker rerun watch
//
//     idist_spawn_start
//       idist__start_check      arguments
//       idist__start_config     the configuration of worker 0
//       idist__start_all        (in an executed worker: idist__rerun_worker, which ends there)
//         idist__start_prepare    meeting point, shared memory, tables
//         idist__start_fork       each worker
//------------------------------------------------------------------------------

// A TCP port of the loopback interface, for the workers of a system without local sockets.
static idist_status idist__start_listen_tcp(idist_workers *spawn) {
    idist__config *cfg = &spawn->cfg;
    idist__os_address addr;
    idist_status status = idist__address_tcp(&addr, "127.0.0.1", 0);

    if (status == IDIST_OK) status = idist__connection_listen(&addr, "127.0.0.1", &cfg->listener);
    if (status != IDIST_OK) return status;
    if (!idist__os_socket_own_address(cfg->listener, &addr))
        return idist__fail_errno("spawn: asking for the port of a listener", errno);
    snprintf(cfg->where, sizeof cfg->where, "tcp:127.0.0.1:%d", idist__os_socket_port(&addr));

    return IDIST_OK;
}

static idist_status idist__start_listen_local(idist_workers *spawn) {
    idist__os_address addr;
    uint64_t id[2];
    idist_status status;

    idist__os_random(id, sizeof id);
    snprintf(spawn->cfg.where, sizeof spawn->cfg.where, "unix:idist-%016llx%016llx",
             (unsigned long long)id[0], (unsigned long long)id[1]);
    status = idist__address_parse(&addr, spawn->cfg.where);
    if (status != IDIST_OK) return status;

    return idist__connection_listen(&addr, spawn->cfg.where, &spawn->cfg.listener);
}

// Where the workers meet: a local socket without a file, which listens before the first of them
// runs. Their secret is in their memory.
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

// Memory that workers and parent share: a file that an executed worker can map again, or for forked
// workers the mapping itself.
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
    memcpy(spawn->shared->where, spawn->cfg.where, sizeof spawn->shared->where);

    return IDIST_OK;
}

// Makes one worker. rerun NULL: it runs in the forked child itself.
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

// Starts them all, or none.
static idist_status idist__start_all(idist_workers *spawn, bool by_exec) {
    idist__rerun rerun;
    idist_status status = idist__start_prepare(spawn, by_exec);
    int i;

    memset(&rerun, 0, sizeof rerun);
    if (status == IDIST_OK && by_exec) status = idist__rerun_make(&rerun, &spawn->cfg.mem);
    if (!by_exec) fflush(NULL); // or each worker would print again what is in the buffers
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

// The configuration of worker 0. On one host it is made as for a world of 1, because the workers
// meet at a place of our own.
static idist_status idist__start_config(idist_workers *spawn, const idist_desc *d) {
    idist_desc alone = *d;
    int nnodes = d->nnodes > 1 ? d->nnodes : 1;
    idist_status status;

    alone.world_size = nnodes > 1 ? nnodes * spawn->n : 1;
    alone.rank = nnodes > 1 ? d->node_rank * spawn->n : 0;
    alone.store = NULL;
    status = idist__launch_config(&spawn->cfg, &alone);
    if (status != IDIST_OK) return status;

    spawn->first_rank = alone.rank;
    spawn->cfg.launcher = "spawn";
    spawn->cfg.world_size = nnodes * spawn->n;
    if (nnodes == 1) spawn->cfg.local_size = spawn->n;

    return IDIST_OK;
}

// by_exec: start_method "exec" was asked for.
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

static idist_status idist__start_check_worker(bool by_exec) {
    if (!by_exec || !idist__is_worker) return IDIST_OK;
    return idist__fail(IDIST_ERR_UNSUPPORTED,
                       "spawn: a worker can start others with start_method \"fork\" only");
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
    if (executed && number < call) return IDIST_OK; // the parent is past this one
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

//------------------------------------------------------------------------------
// [spawn:report]  wait for workers, and report
// uses clock process fail text worker watch start
//------------------------------------------------------------------------------

// How a worker failed, in words.
static void idist__report_text(const idist_workers *spawn, int i, const idist_report *r, char *text,
                               size_t cap) {
    const idist__worker *worker = &spawn->workers[i];
    const idist__worker_result *result = &spawn->shared->results[i];

    if (result->exec_errno)
        snprintf(text, cap, "rank %d: the program could not be executed again: %s", r->rank,
                 strerror(result->exec_errno));
    else if (worker->late)
        snprintf(text, cap,
                 "rank %d: the program, executed again, has not come to its call of idist_spawn "
                 "in %d ms",
                 r->rank, spawn->cfg.init_timeout_ms);
    else if (worker->lost)
        snprintf(text, cap,
                 "rank %d ended before its function returned; how is not known, because the "
                 "program ignores or reaps SIGCHLD",
                 r->rank);
    else if (r->signal)
        snprintf(text, cap, "rank %d was killed by signal %d (%s)", r->rank, r->signal,
                 idist__os_process_signal_name(r->signal));
    else if (r->exit_code == 0)
        snprintf(text, cap,
                 "rank %d exited with code 0 before its function returned; a worker must return "
                 "from its function, not exit",
                 r->rank);
    else snprintf(text, cap, "rank %d ended with code %d", r->rank, r->exit_code);
    if (result->text[0] && !r->signal) idist__text_append(text, cap, ": %s", result->text);
}

static idist_status idist__report_make(idist_workers *spawn) {
    idist_report r;
    int i = spawn->first_failed;

    memset(&r, 0, sizeof r);
    r.rank = -1;

    if (i >= 0) {
        const idist__worker *worker = &spawn->workers[i];
        r.rank = spawn->first_rank + i;
        r.exit_code = worker->lost ? -1 : worker->end.exit_code;
        r.signal = worker->end.signal;
        idist__report_text(spawn, i, &r, r.text, sizeof r.text);
    }

    if (spawn->report) *spawn->report = r;

    return r.rank < 0 ? IDIST_OK : idist__fail(IDIST_ERR_WORKER_FAILED, "%s", r.text);
}

idist_status idist_spawn_poll(idist_workers *workers, bool *done) {
    if (!done) return idist__fail(IDIST_ERR_ARG, "spawn_poll: done is NULL");
    *done = true;
    if (!workers) return IDIST_OK;
    idist__watch_turn(workers);
    *done = !workers->running;
    return IDIST_OK;
}

idist_status idist_spawn_wait(idist_workers *workers, int timeout_ms) {
    int64_t deadline_ns = timeout_ms < 0 ? IDIST__FOREVER : idist__os_clock_deadline(timeout_ms);
    idist_status status;

    if (!workers) return IDIST_OK;

    for (;;) {
        idist__watch_turn(workers);
        if (!workers->running) break;
        if (idist__os_clock_ms_until(deadline_ns) == 0)
            return idist__fail(IDIST_ERR_TIMEOUT, "spawn_wait: %d workers still run after %d ms",
                               workers->running, timeout_ms);
        idist__watch_sleep(workers, idist__watch_next(workers, deadline_ns));
    }

    status = idist__report_make(workers);
    idist__start_free(workers);

    return status;
}

idist_status idist_spawn_kill(idist_workers *workers, int signal_number) {
    if (signal_number < 0 || signal_number > 64)
        return idist__fail(IDIST_ERR_ARG, "spawn_kill: there is no signal %d", signal_number);
    if (workers) idist__watch_signal(workers, signal_number);
    return IDIST_OK;
}

idist_status idist_spawn(idist_worker_fn fn, void *arg, int nproc_per_node,
                         const idist_desc *desc) {
    idist_workers *workers;
    idist_status status = idist_spawn_start(fn, arg, nproc_per_node, desc, &workers);

    return status == IDIST_OK ? idist_spawn_wait(workers, -1) : status;
}

//------------------------------------------------------------------------------
// [spawn:parallel]  Ignite's Parallel
// uses os:env fail text base:log model core:world calls:backend calls:world get
// uses worker report
//
// With nproc_per_node it spawns; without, it joins the world that a launcher made and runs fn in
// this process. Checks, their order and the log lines are those of Ignite.
//------------------------------------------------------------------------------

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

// Several nodes have to know where to meet.
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

// Joins the world that a launcher made, and runs fn in this process.
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
    idist__me.text[0] = 0; // the text of a failure is to be fn's own
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

#endif // IDIST_SPAWN_H
