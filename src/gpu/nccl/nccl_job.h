// gpu/nccl/nccl_job.h: NCCL calls that may never return, each in a thread of its own
//
// Creating, aborting or finalizing a communicator may wait for other ranks forever. A job makes
// such a call in a thread of its own. The thread that started the job waits until a deadline, and
// then leaves the job to itself:
//
//     group set up   init job      idist__gpu_setup_init_wait, up to the init time-out
//     group failed   abort job     idist__nccl_abort_wait for a moment, then idist__nccl_abort_reap
//     group closed   finalize job  idist__nccl_abort_reap, when the world is closed
//
// A communicator must not be aborted while a thread uses the communicator inside NCCL. From NCCL
// 2.28.7 on, the abort first calls ncclCommRevoke, which makes every such call return. With earlier
// versions, idist makes communicators non-blocking, so that calls return at once. In all versions,
// the abort then waits at the gate until no thread is inside.
#pragma once

#include "os/clock.h"
#include "os/thread.h"
#include "gpu/gpu_model.h"
#include "gpu/gpu_device.h"
#include "gpu/nccl/nccl_load.h"

#define IDIST__NCCL_CONFIG_MAGIC 0xcafebeef

// ncclConfig_t as of NCCL 2.14. Later versions accept this structure, too.
typedef struct idist__nccl_config {
    size_t nbytes;
    unsigned magic, version;
    int blocking;
} idist__nccl_config;

typedef enum idist__nccl_job_kind {
    IDIST__JOB_INIT,    // creates a communicator and connects its ranks
    IDIST__JOB_ABORT,   // ends the calls inside NCCL, and frees the communicator
    IDIST__JOB_FINALIZE // ends the communicator together with the other ranks
} idist__nccl_job_kind;

// A flag that is set while a thread is inside an NCCL call with a communicator. Allocated on the
// heap, because a job that never ends outlives the world.
typedef struct idist__nccl_gate {
    int inside; // atomic: 1 or 0
} idist__nccl_gate;

// The phases of an init job.
typedef enum idist__nccl_phase {
    IDIST__INIT_CREATING,
    IDIST__INIT_CONNECTING, // the communicator exists
    IDIST__INIT_DONE,       // the job no longer owns the communicator
    IDIST__INIT_GIVEN_UP    // no thread waits for the job any more
} idist__nccl_phase;
typedef struct idist__nccl_job {
    idist__nccl nccl; // a copy: the job may outlive the world
    idist__nccl_job_kind kind;
    int device, rank, size;
    int result;
    int state; // atomic: IDIST__JOB_STATE_*
    void *comm;
    idist__os_thread thread;
    struct idist__nccl_job *next; // in gpu->ending_jobs
    // Init jobs only:
    int phase; // atomic: idist__nccl_phase
    idist__nccl_id id;
    void *config;        // a copy
    cudaStream_t stream; // stream on which the job connects the ranks
    char *buffer;        // memory for connecting; the job's thread frees both
    // Abort jobs only:
    idist__nccl_gate *gate;           // the job waits until no thread is inside
    struct idist__nccl_job *init_job; // the job waits for this init job, and frees it
    int64_t deadline_ns;              // deadline of both waits
    bool keep_memory; // a CUDA graph holds calls: do not free a revoked communicator
} idist__nccl_job;

#ifndef IDIST_NCCL_CONNECT_BYTES
#define IDIST_NCCL_CONNECT_BYTES (16 << 20)
#endif
#define IDIST__NCCL_LEAVE_MS 4000 // how long an abort waits for a thread to leave NCCL

static bool idist__nccl_job_is_given_up(const idist__nccl_job *job) {
    return __atomic_load_n(&job->phase, __ATOMIC_ACQUIRE) == IDIST__INIT_GIVEN_UP;
}

// Returns true if a job must stop waiting. A finalize job waits for the other ranks until the
// closing world leaves the job to itself.
static bool idist__nccl_job_must_stop(const idist__nccl_job *job) {
    if (job->kind == IDIST__JOB_INIT) return idist__nccl_job_is_given_up(job);
    if (job->kind == IDIST__JOB_ABORT) return idist__os_clock_now_ns() > job->deadline_ns;
    return __atomic_load_n(&job->state, __ATOMIC_ACQUIRE) == IDIST__JOB_STATE_LEFT;
}

// Waits for the final result of a call with a non-blocking communicator. Returns
// IDIST__NCCL_IN_PROGRESS if the job must stop waiting first.
static int idist__nccl_job_wait_result(const idist__nccl_job *job, int result) {
    int turns = 0;

    while (result == IDIST__NCCL_IN_PROGRESS && !idist__nccl_job_must_stop(job)) {
        idist__gpu_device_nap(&turns);
        if (job->nccl.CommGetAsyncError(job->comm, &result) != IDIST__NCCL_OK)
            return IDIST__NCCL_INTERNAL_ERROR;
    }

    return result;
}

// Makes NCCL connect the ranks, by using every algorithm once. NCCL connects ranks when it first
// uses an algorithm (NCCL_RUNTIME_CONNECT), and that call waits on the host until all ranks make
// the call. A program whose ranks run ahead of each other would hang there. Here, all ranks make
// the calls together.
//
// The algorithm that NCCL chooses depends on the operation, the size, and whether a switch can
// perform the reduction (sums of floats, yes; products, no). Broadcast and reduce use the ring, as
// do products of some sizes. On large clusters, calls larger than IDIST_NCCL_CONNECT_BYTES may get
// an algorithm that no smaller size gets. Pairs of ranks are connected only by their first message.
// Connecting all pairs here would take hundreds of MB of memory that a program without messages
// never needs.
static int idist__nccl_job_connect(idist__nccl_job *job) {
    const idist__nccl *nccl = &job->nccl;
    char *at = job->buffer;
    size_t nbytes;
    int step, result = IDIST__NCCL_OK;

    for (nbytes = 8; nbytes <= (size_t)IDIST_NCCL_CONNECT_BYTES; nbytes *= 8) {
        size_t n = nbytes / 4, each = n / (size_t)job->size ? n / (size_t)job->size : 1;
        char *mine = at + (size_t)job->rank * each * 4;

        for (step = 0; step < 5 && result == IDIST__NCCL_OK; step++) {
            int type = step % 2 ? IDIST__NCCL_I32 : IDIST__NCCL_F32;
            int op = step % 2 ? IDIST__NCCL_PROD : IDIST__NCCL_SUM;

            if (idist__nccl_job_is_given_up(job)) result = IDIST__NCCL_INTERNAL_ERROR;
            else if (step < 2)
                result = nccl->AllReduce(at, at, n, type, op, job->comm, job->stream);
            else if (step < 4)
                result = nccl->ReduceScatter(at, mine, each, type, op, job->comm, job->stream);
            else result = nccl->AllGather(mine, at, each, type, job->comm, job->stream);
            result = idist__nccl_job_wait_result(job, result);
        }
    }

    return result;
}

// Waits until the device has finished the calls of idist__nccl_job_connect.
static int idist__nccl_job_connected(idist__nccl_job *job) {
    int turns = 0, result = IDIST__NCCL_OK;
    cudaError_t error;

    while ((error = cudaStreamQuery(job->stream)) == cudaErrorNotReady &&
           result == IDIST__NCCL_OK) {
        cudaGetLastError();
        if (idist__nccl_job_is_given_up(job)) return IDIST__NCCL_INTERNAL_ERROR;
        idist__gpu_device_nap(&turns);
        if (job->nccl.CommGetAsyncError(job->comm, &result) != IDIST__NCCL_OK)
            result = IDIST__NCCL_INTERNAL_ERROR;
    }

    if (result == IDIST__NCCL_OK && error != cudaSuccess) result = IDIST__NCCL_CUDA_ERROR;

    return result;
}

// Moves an init job to its next phase. Returns false if the job was given up.
static bool idist__nccl_job_enter_phase(idist__nccl_job *job, idist__nccl_phase to) {
    int from = (int)to - 1;

    return __atomic_compare_exchange_n(&job->phase, &from, (int)to, false, __ATOMIC_ACQ_REL,
                                       __ATOMIC_ACQUIRE);
}

// Runs an init job. If the job is given up, its thread aborts the communicator, unless another job
// does so (idist__gpu_setup_give_up).
static void idist__nccl_job_run_init(idist__nccl_job *job) {
    const idist__nccl *nccl = &job->nccl;

    if (!job->comm)
        job->result =
            nccl->CommInitRankConfig(&job->comm, job->size, job->id, job->rank, job->config);
    if (job->comm) job->result = idist__nccl_job_wait_result(job, job->result);

    if (!idist__nccl_job_enter_phase(job, IDIST__INIT_CONNECTING)) {
        if (job->comm) nccl->CommAbort(job->comm);
        return;
    }

    if (job->result == IDIST__NCCL_OK && job->size > 1) {
        job->result = idist__nccl_job_connect(job);
        if (job->result == IDIST__NCCL_OK) job->result = idist__nccl_job_connected(job);
    }

    if (!idist__nccl_job_enter_phase(job, IDIST__INIT_DONE) && !nccl->CommRevoke)
        nccl->CommAbort(job->comm);
}

// Frees an init job's stream and device memory. Neither CUDA call waits for work on the device.
static void idist__nccl_job_free_buffer(idist__nccl_job *job) {
    if (job->buffer) cudaFreeAsync(job->buffer, job->stream);
    if (job->stream) cudaStreamDestroy(job->stream);
    job->buffer = NULL;
    job->stream = NULL;
}

static bool idist__nccl_job_done(const idist__nccl_job *job) {
    return __atomic_load_n(&job->state, __ATOMIC_ACQUIRE) != 0;
}

// Frees a job and, after a completed abort, the gate. If the result is IDIST__NCCL_IN_PROGRESS, a
// thread is still inside NCCL and clears the gate when its call returns.
static void idist__nccl_job_free(idist__nccl_job *job) {
    if (job->kind == IDIST__JOB_ABORT && job->result != IDIST__NCCL_IN_PROGRESS) free(job->gate);
    free(job->config);
    free(job);
}

// Waits for a job until the deadline, then frees the job. Returns false if the job has not ended.
// The job is then left to itself, and *result is IDIST__NCCL_IN_PROGRESS.
static bool idist__nccl_job_join(idist__nccl_job *job, int64_t deadline_ns, int *result) {
    idist__os_thread thread;

    while (!idist__nccl_job_done(job) && idist__os_clock_now_ns() < deadline_ns)
        idist__os_clock_pause_ns(100000);

    thread = job->thread;
    *result = IDIST__NCCL_IN_PROGRESS;

    if (__atomic_exchange_n(&job->state, IDIST__JOB_STATE_LEFT, __ATOMIC_ACQ_REL) !=
        IDIST__JOB_STATE_DONE) {
        idist__os_thread_detach(thread); // the job frees itself
        return false;
    }

    idist__os_thread_join(thread);
    *result = job->result;
    idist__nccl_job_free(job);

    return true;
}

// Aborts a communicator. NCCL frees what other threads may still use, so the abort has four steps:
//
//     1. Revoke the communicator, if NCCL can. Every call inside NCCL then returns.
//     2. Wait until the thread that creates the communicator ends.
//     3. Wait until the threads behind the gate have left NCCL.
//     4. Free the communicator, unless it was revoked and keep_memory is set.
//
// If a thread stays inside NCCL beyond the deadline, the communicator stays in memory and the
// result is IDIST__NCCL_IN_PROGRESS.
static void idist__nccl_job_run_abort(idist__nccl_job *job) {
    const idist__nccl *nccl = &job->nccl;
    int turns = 0, revoked = IDIST__NCCL_OK, ignored;

    job->deadline_ns = idist__os_clock_deadline(IDIST__NCCL_LEAVE_MS);
    job->result = IDIST__NCCL_IN_PROGRESS;
    if (nccl->CommRevoke)
        revoked = idist__nccl_job_wait_result(job, nccl->CommRevoke(job->comm, 0));
    if (job->init_job && !idist__nccl_job_join(job->init_job, job->deadline_ns, &ignored)) return;
    if (revoked == IDIST__NCCL_IN_PROGRESS) return;

    while (job->gate && __atomic_load_n(&job->gate->inside, __ATOMIC_SEQ_CST)) {
        if (idist__nccl_job_must_stop(job)) return;
        idist__gpu_device_nap(&turns);
    }

    job->result =
        job->keep_memory && nccl->CommRevoke ? IDIST__NCCL_OK : nccl->CommAbort(job->comm);
}

static void *idist__nccl_job_run(void *arg) {
    idist__nccl_job *job = (idist__nccl_job *)arg;
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;

    cudaSetDevice(job->device);
    cudaThreadExchangeStreamCaptureMode(&mode);

    if (job->kind == IDIST__JOB_INIT) {
        idist__nccl_job_run_init(job);
        idist__nccl_job_free_buffer(job);
    } else if (job->kind == IDIST__JOB_ABORT) {
        idist__nccl_job_run_abort(job);
    } else {
        job->result = idist__nccl_job_wait_result(job, job->nccl.CommFinalize(job->comm));
        if (job->result == IDIST__NCCL_OK) job->result = job->nccl.CommDestroy(job->comm);
    }

    if (__atomic_exchange_n(&job->state, IDIST__JOB_STATE_DONE, __ATOMIC_ACQ_REL) ==
        IDIST__JOB_STATE_LEFT)
        idist__nccl_job_free(job);

    return NULL;
}

static idist__nccl_job *idist__nccl_job_new(const idist__nccl *nccl, idist__nccl_job_kind what,
                                            int device, void *comm) {
    idist__nccl_job *job = (idist__nccl_job *)calloc(1, sizeof *job);

    if (!job) return NULL;
    job->nccl = *nccl;
    job->kind = what;
    job->device = device;
    job->comm = comm;
    return job;
}

// Frees a job that has no thread. Does nothing if `job` is NULL.
static void idist__nccl_job_discard(idist__nccl_job *job) {
    if (!job) return;
    idist__nccl_job_free_buffer(job);
    free(job->config);
    free(job);
}

// Starts the thread of a job. If the thread cannot be started, frees the job and returns false.
// Also returns false if `job` is NULL.
static bool idist__nccl_job_start(idist__nccl_job *job) {
    if (job && idist__os_thread_start(&job->thread, idist__nccl_job_run, job) == 0) return true;
    idist__nccl_job_discard(job);
    return false;
}
