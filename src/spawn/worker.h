// spawn/worker.h: what a worker shares with its parent, and what it runs
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
#pragma once

#include "os/unwind.h"
#include "os/process.h"
#include "os/poll.h"
#include "base/fail.h"
#include "base/text.h"
#include "base/log.h"
#include "net/meet.h"
#include "net/secret.h"
#include "launch/env.h"
#include "core/model.h"
#include "core/world.h"
#include "calls/life.h"

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
    idist__meet meet;
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
