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
//     idist_spawn_wait: watch, end all
//     workers after a failure, report
//
// A worker's exit code alone is not enough. The worker's result adds the text of its last error,
// and says whether the worker failed only because another rank failed.
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

// The result that a worker leaves for its parent.
typedef struct idist__worker_result {
    int finished;  // fn has returned, and `code` is its result
    int secondary; // the worker failed because another rank was lost
    int code;
    int exec_errno; // the program could not be executed again
    int arrived;    // the executed program has reached its call of idist_spawn
    char text[400]; // the worker's last error
} idist__worker_result;

// The memory that workers and parent share. A worker that executes the program again gets no other
// information from its parent.
typedef struct idist__worker_shared {
    char magic[8];
    int first_rank, listener;
    idist__secret secret;
    idist__meet meet;
    idist__worker_result results[1]; // n results
} idist__worker_shared;

static const char idist__worker_magic[8] = {'I', 'D', 'S', 'P', 'A', 'W', 'N', '1'};

typedef struct idist__worker {
    idist__os_process process;
    int watch_fd; // from idist__os_process_watch; -1 if there is none, or the worker was reaped
    bool ended;
    bool lost; // the program itself reaped the worker, so it is unknown how the worker ended
    bool late; // the executed program did not reach its call of idist_spawn in time
    idist__os_process_end end;
} idist__worker;

// The stages in which the parent ends all workers after the first failure.
typedef enum idist__worker_stage {
    IDIST__WORKER_RUNNING,
    IDIST__WORKER_GRACE,    // workers may end by themselves
    IDIST__WORKER_SIGNALLED // SIGTERM was sent, SIGKILL follows
} idist__worker_stage;

struct idist_workers {
    idist__config cfg; // configuration of worker 0
    idist_worker_fn fn;
    void *arg;
    int n, first_rank;
    int call_number; // ordinal of this spawn call in the process
    idist__worker *workers;
    idist__os_process_slot *slots; // space for n slots
    idist__worker_shared *shared;
    size_t shared_nbytes;
    int shared_fd; // -1 if workers inherit the mapping
    idist__log log;
    int first_failed; // index of the worker that failed first, -1 if none failed
    int running;
    int64_t decide_ns; // time by which the first failure is decided
    int64_t signal_ns; // time of the next signal
    int64_t arrive_ns; // time by which every worker started by exec must have arrived
    idist__worker_stage stage;
    int grace_ms;
    bool keep_going;
    idist_report *report; // the caller's, or NULL
};

static bool idist__is_worker; // true in a worker process

// Ends this worker process. Does not return.
static void idist__worker_exit(const idist_workers *spawn, idist__worker_result *result, int code) {
    __atomic_store_n(&result->finished, 1, __ATOMIC_RELEASE);

    // An executed program may have its own threads. Flushing all streams would wait for a thread
    // that blocks in a read.
    if (spawn->shared_fd < 0) fflush(NULL);
    fflush(stdout);
    fflush(stderr);
    idist__os_process_exit(code);
}

typedef struct idist__worker_frame { // frame of the function that calls fn
    const idist_workers *spawn;
    idist__worker_result *result;
} idist__worker_frame;

// Ends a worker whose fn has called longjmp or pthread_exit. A worker must not continue in a
// function of the parent. The world stays open, so that the other ranks see this rank as lost.
static void idist__worker_left(void *arg) {
    const idist__worker_frame *frame = (const idist__worker_frame *)arg;

    frame->result->code = 1;
    idist__text_copy(frame->result->text, sizeof frame->result->text,
                     "its function did not return: it was left by longjmp or pthread_exit");
    idist__worker_exit(frame->spawn, frame->result, 1);
}

// Calls fn. Returns the result of fn, or 1 if fn has thrown an exception. Records the exception as
// the last error.
IDIST__NOINLINE static int idist__worker_try(const char *name, idist_worker_fn fn, int i,
                                             void *arg) {
    int code = 1;

    IDIST__TRY(code = fn(i, arg));
    return idist__callback_threw(name, "the function") ? 1 : code;
}

// Calls fn in a worker process, and ends the process if fn is left by longjmp or pthread_exit.
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

// Opens the worker's world, runs fn and records the result. Returns the exit code.
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
    idist__me.text[0] = 0; // only failures inside fn may leave a text
    code = idist__worker_call(spawn, i, result);
    result->code = code & 255 ? code & 255 : code != 0;
    idist__text_copy(result->text, sizeof result->text, code ? idist__me.text : "");

    w = idist__world_default(); // NULL if fn has called idist_finalize
    if (w) status = idist__life_close(w, code != 0);
    if (status != IDIST_OK && status != IDIST_ERR_ABORTED && !code && !result->secondary)
        result->code = 1;

    return result->code;
}

// Runs worker i and ends the process. Does not return.
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
