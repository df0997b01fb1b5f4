// spawn/watch.h: the parent's watch over its workers
//
//     idist__watch_turn
//       idist__watch_reap     reaps workers that have ended
//       idist__watch_judge    decides which failure came first
//       idist__watch_expect   kills workers started by exec that do not arrive in time
//       idist__watch_end      after a failure: grace, SIGTERM, 400 ms, SIGKILL
#pragma once

#include "os/clock.h"
#include "os/process.h"
#include "os/poll.h"
#include "base/log.h"
#include "spawn/worker.h"

static bool idist__watch_has_failed(const idist_workers *spawn, int i) {
    const idist__worker *worker = &spawn->workers[i];
    bool finished = __atomic_load_n(&spawn->shared->results[i].finished, __ATOMIC_ACQUIRE);

    return worker->ended && !(worker->end.exit_code == 0 && finished);
}

// Reaps the workers that have ended. Returns true if there was at least one.
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

        if (state == IDIST__OS_PROCESS_UNKNOWN) { // uses the worker's result, if it left one
            worker->lost = !__atomic_load_n(&result->finished, __ATOMIC_ACQUIRE);
            worker->end.exit_code = worker->lost ? 127 : result->code;
        }

        worker->ended = any = true;
        spawn->running--;
        idist__os_descriptor_close(&worker->watch_fd);
    }

    return any;
}

// Decides which failure came first. A rank that failed because its peer was killed may be reaped
// before that peer; its failure is then secondary. While all known failures are secondary, the
// decision is postponed for at most 500 ms.
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

// Kills the workers that execute the program again (start_method "exec") and have not reached their
// call of idist_spawn in time. Otherwise the parent would wait forever.
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

// Ends the other workers after a failure, step by step: grace period, SIGTERM, SIGKILL.
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
    // A stopped worker handles SIGTERM only after it continues.
    if (term) idist__watch_signal(spawn, IDIST__OS_PROCESS_CONTINUE);
    spawn->signal_ns = idist__os_clock_deadline(term ? 400 : 1000);
    spawn->stage = IDIST__WORKER_SIGNALLED;
}

// Performs all due steps of the watch. Does not block.
static void idist__watch_turn(idist_workers *spawn) {
    bool any = idist__watch_reap(spawn);

    if (any || spawn->decide_ns != IDIST__FOREVER) idist__watch_judge(spawn);
    if (!spawn->running) return;
    idist__watch_expect(spawn);
    idist__watch_end(spawn);
}

// Returns the time of the next turn if no worker ends earlier.
static int64_t idist__watch_next(const idist_workers *spawn, int64_t deadline_ns) {
    int64_t until_ns = spawn->signal_ns < deadline_ns ? spawn->signal_ns : deadline_ns;

    if (spawn->first_failed < 0 && spawn->decide_ns < until_ns) until_ns = spawn->decide_ns;
    return spawn->arrive_ns < until_ns ? spawn->arrive_ns : until_ns;
}

// Sleeps until a worker ends or the time is reached.
static void idist__watch_sleep(idist_workers *spawn, int64_t until_ns) {
    int i, n = 0, ms = idist__os_clock_ms_until(until_ns);
    bool blind = false;

    for (i = 0; i < spawn->n; i++) {
        if (spawn->workers[i].ended) continue;
        if (spawn->workers[i].watch_fd < 0) blind = true;
        idist__os_process_slot_set(&spawn->slots[n++], spawn->workers[i].watch_fd);
    }

    if (blind && (ms < 0 || ms > 5)) ms = 5; // polls, because the end of a worker does not wake us
    idist__os_process_sleep(spawn->slots, n, ms);
}
