// spawn/report.h: wait for workers and report the first failure
#pragma once

#include "os/clock.h"
#include "os/process.h"
#include "base/fail.h"
#include "base/text.h"
#include "spawn/worker.h"
#include "spawn/watch.h"
#include "spawn/start.h"

// Writes a text that says how a worker failed.
static void idist__report_text(const idist_workers *spawn, int i, const idist_report *r, char *text,
                               size_t cap) {
    const idist__worker *worker = &spawn->workers[i];
    const idist__worker_result *result = &spawn->shared->results[i];

    if (result->exec_errno)
        snprintf(text, cap, "rank %d: the program could not be executed again: %s", r->rank,
                 strerror(result->exec_errno));
    else if (worker->late)
        snprintf(
            text, cap,
            "rank %d: the program, executed again, did not reach its call of idist_spawn within "
            "%d ms",
            r->rank, spawn->cfg.init_timeout_ms);
    else if (worker->lost)
        snprintf(text, cap,
                 "rank %d ended before its function returned; the cause is unknown, because the "
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

// Fills in the caller's report. Returns IDIST_ERR_WORKER_FAILED if a worker failed.
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
