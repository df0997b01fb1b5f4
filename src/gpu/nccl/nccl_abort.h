// gpu/nccl/nccl_abort.h: aborting communicators, and handling NCCL errors
#pragma once

#include "os/clock.h"
#include "base/fail.h"
#include "base/log.h"
#include "core/model.h"
#include "gpu/gpu_model.h"
#include "gpu/gpu_device.h"
#include "gpu/nccl/nccl_load.h"
#include "gpu/nccl/nccl_job.h"
#include "gpu/nccl/nccl_issue.h"

// Returns true if a thread is inside an NCCL call with the group's communicator.
static bool idist__nccl_abort_is_inside(const idist__gpu_group *gg) {
    return gg->gate && __atomic_load_n(&gg->gate->inside, __ATOMIC_SEQ_CST);
}

// Starts to abort the communicator, which ends the group's work on the device. Without
// ncclCommRevoke, a thread that is inside NCCL starts the abort when its call returns. That call
// returns at once, unless the user supplied a blocking communicator.
static void idist__nccl_abort_group(idist_group *g) {
    idist__gpu *gpu = idist__gpu_of(g->w);
    idist__gpu_group *gg = idist__gpu_group_of(g);

    if (!gg || !gg->comm) return;
    gg->must_abort = true;
    if (!gpu->nccl->CommRevoke && idist__nccl_abort_is_inside(gg)) return;

    gg->abort_job = idist__nccl_job_new(gpu->nccl, IDIST__JOB_ABORT, gpu->device, gg->comm);
    gg->comm = NULL;

    if (gg->abort_job) {
        gg->abort_job->gate = gg->gate;
        gg->abort_job->keep_memory = gg->captured;
    }

    if (gg->captured)
        idist__log_print(&g->w->log, IDIST_LOG_WARN,
                         "a CUDA graph may hold calls of the group that failed: do not launch it "
                         "again; %s",
                         gpu->nccl->CommRevoke
                             ? "the communicator stays in memory"
                             : "a thread waits in NCCL until the graph is destroyed");
    if (idist__nccl_job_start(gg->abort_job)) return;

    gg->abort_job = NULL;
    idist__log_print(&g->w->log, IDIST_LOG_ERROR,
                     "cannot start a thread to abort NCCL: the device may stay busy");
}

// Starts the abort, and waits up to IDIST__GPU_GRACE_MS for the device to stop using the caller's
// buffers. The rest of the abort proceeds by itself, because NCCL also waits for the program's own
// work on the streams.
static void idist__nccl_abort_wait(idist_group *g) {
    idist__gpu_group *gg = idist__gpu_group_of(g);
    int64_t deadline = idist__os_clock_deadline(IDIST__GPU_GRACE_MS);
    int turns = 0;

    idist__nccl_abort_group(g);
    if (!gg || !gg->abort_job || gg->waited_for_abort) return;
    gg->waited_for_abort = true;
    while (!idist__nccl_job_done(gg->abort_job) && idist__os_clock_now_ns() < deadline)
        idist__gpu_device_nap(&turns);
}

// Leaves the rest of an abort to its thread, which idist__nccl_abort_reap collects later. The gate
// then belongs to the job.
static void idist__nccl_abort_leave(idist_group *g) {
    idist__gpu *gpu = idist__gpu_of(g->w);
    idist__gpu_group *gg = idist__gpu_group_of(g);

    if (!gg) return;
    gg->must_abort = gg->waited_for_abort = false;
    if (!gg->abort_job) return;
    gg->abort_job->next = gpu->ending_jobs;
    gpu->ending_jobs = gg->abort_job;
    gg->abort_job = NULL;
    if (!idist__nccl_abort_is_inside(gg)) gg->gate = NULL; // else gg is not freed
}

static void idist__nccl_abort_log_stays(const idist__world *w) {
    idist__log_print(
        &w->log, IDIST_LOG_WARN,
        "a call of NCCL, or ncclCommRevoke, has not returned: the communicator of the group stays "
        "in memory, and the device may stay busy");
}

// Starts the abort of a group that is about to be freed, and leaves the abort to its thread. Warns
// if a thread inside NCCL prevents the abort: the communicator then stays in memory.
static void idist__nccl_abort_end(idist_group *g) {
    idist__gpu_group *gg = idist__gpu_group_of(g);

    idist__nccl_abort_group(g);
    if (gg->comm) idist__nccl_abort_log_stays(g->w);
    gg->comm = NULL;
    idist__nccl_abort_leave(g);
}

// Logs how an abort ended, unless it succeeded. `left` is true if ncclCommAbort has not returned.
// If `left` is false and the result is IDIST__NCCL_IN_PROGRESS, the communicator stays in memory.
static void idist__nccl_abort_log(const idist__world *w, int result, bool left) {
    char text[256];

    if (left)
        idist__log_print(&w->log, IDIST_LOG_ERROR,
                         "ncclCommAbort has not returned: the device may stay busy");
    else if (result == IDIST__NCCL_IN_PROGRESS) idist__nccl_abort_log_stays(w);
    else if (result != IDIST__NCCL_OK)
        idist__log_print(&w->log, IDIST_LOG_WARN, "ncclCommAbort: %s",
                         idist__nccl_issue_text(idist__gpu_of(w)->nccl, result, text, sizeof text));
}

// Waits until the deadline for a thread that ends a communicator. Returns false if the thread
// finalizes a communicator and has not returned. If a CUDA graph holds calls, an NCCL without
// ncclCommRevoke stays in the abort until the graph is destroyed. The wait for such an abort takes
// at most IDIST__GPU_GRACE_MS. If the abort has still not returned, this is not an error.
static bool idist__nccl_abort_reap_job(const idist__world *w, idist__nccl_job *job,
                                       int64_t deadline_ns) {
    bool aborts = job->kind == IDIST__JOB_ABORT;
    bool stays = aborts && job->keep_memory && !job->nccl.CommRevoke;
    int64_t soon_ns = idist__os_clock_deadline(IDIST__GPU_GRACE_MS);
    int result;
    bool ended;

    if (stays && soon_ns < deadline_ns) deadline_ns = soon_ns;
    ended = idist__nccl_job_join(job, deadline_ns, &result);
    if (aborts && (ended || !stays)) idist__nccl_abort_log(w, result, !ended);

    return ended || aborts;
}

// Collects the threads that end communicators. If deadline_ns is 0, collects only jobs that have
// finished. Otherwise waits for all threads until the deadline. Returns false if a thread that
// finalizes a communicator has not returned.
static bool idist__nccl_abort_reap(const idist__world *w, int64_t deadline_ns) {
    idist__nccl_job **at = &idist__gpu_of(w)->ending_jobs, *job;
    bool all = true;

    while ((job = *at) != NULL) {
        if (!deadline_ns && !idist__nccl_job_done(job)) {
            at = &job->next;
            continue;
        }

        *at = job->next;
        all = idist__nccl_abort_reap_job(w, job, deadline_ns) && all;
    }

    return all;
}

// Handles an error that NCCL reports. If another rank is the cause, NCCL does not say which rank.
// The host's backend knows the rank, or finds out within IDIST__GPU_FAULT_MS. During this time no
// call of the group completes, even if the call's event is complete.
static void idist__nccl_abort_report_error(idist_group *g, int result) {
    idist__gpu_group *gg = idist__gpu_group_of(g);
    char text[256];

    if (g->status != IDIST_OK || gg->fault) return;

    if (result == IDIST__NCCL_REMOTE_ERROR || result == IDIST__NCCL_TIMEOUT) {
        gg->fault = result;
        gg->fault_deadline_ns = idist__os_clock_deadline(IDIST__GPU_FAULT_MS);
        return;
    }

    idist__nccl_issue_text(idist__gpu_of(g->w)->nccl, result, text, sizeof text);
    idist__gpu_device_fail_group(g, idist__fail(IDIST_ERR_DEVICE, "NCCL: %s", text));
}

static void idist__nccl_abort_check_errors(idist_group *g) {
    const idist__nccl *nccl = idist__gpu_of(g->w)->nccl;
    idist__gpu_group *gg = idist__gpu_group_of(g);
    int state = IDIST__NCCL_OK;
    char text[256];

    if (!gg || !gg->comm || g->status != IDIST_OK) return;

    if (gg->fault) {
        if (idist__os_clock_now_ns() < gg->fault_deadline_ns) return;
        idist__nccl_issue_text(nccl, gg->fault, text, sizeof text);
        idist__gpu_device_fail_group(
            g,
            idist__fail(gg->fault == IDIST__NCCL_TIMEOUT ? IDIST_ERR_TIMEOUT : IDIST_ERR_PEER_LOST,
                        "NCCL: %s; no rank is lost, so check the network between the GPUs", text));
        return;
    }

    if (nccl->CommGetAsyncError(gg->comm, &state) == IDIST__NCCL_OK &&
        (state == IDIST__NCCL_OK || state == IDIST__NCCL_IN_PROGRESS))
        return;
    idist__nccl_abort_report_error(g, state);
}
