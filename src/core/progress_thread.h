// core/progress_thread.h: the progress thread
//
// The progress thread drives the backend while there are requests and no caller is blocked. The
// thread stops driving as soon as a caller blocks. The first request, or a device backend that
// needs the connections watched, starts the thread.
//
// A program that starts requests usually waits for them soon, and then drives the backend itself.
// Waking this thread and taking over from it often takes longer than a small message. So the thread
// naps when requests have started. After a nap, it naps again, for longer, only if the program has
// started more requests and has driven the backend. After IDIST__NAP_MOST_NS at the latest, the
// thread drives.
#pragma once

#include "os/clock.h"
#include "os/thread.h"
#include "base/fail.h"
#include "core/model.h"
#include "core/timer.h"
#include "core/wait.h"

#define IDIST__WATCH_NS (10 * IDIST__MS)
#define IDIST__NAP_NS 200000
#define IDIST__NAP_MOST_NS (1400 * (int64_t)1000) // three naps

// Counters of the program when the progress thread last looked, and the thread's naps since it last
// drove.
typedef struct idist__thread_nap {
    uint32_t request_count, drive_count;
    int64_t next_ns, napped_ns; // 0 if it has not napped since it last drove
} idist__thread_nap;

// Naps and returns true if the program is likely to drive the backend itself. Otherwise returns
// false.
static bool idist__progress_thread_may_nap(idist__world *w, idist__thread_nap *nap) {
    bool begins = w->tasks.request_count != nap->request_count;
    bool drives = w->wait.drive_count != nap->drive_count;

    nap->request_count = w->tasks.request_count;
    nap->drive_count = w->wait.drive_count;

    if (!begins || (nap->napped_ns && !drives) || nap->napped_ns >= IDIST__NAP_MOST_NS) {
        nap->napped_ns = 0;
        return false;
    }

    nap->next_ns = nap->napped_ns ? 2 * nap->next_ns : IDIST__NAP_NS;
    nap->napped_ns += nap->next_ns;
    w->progress.naps = true;
    idist__os_cond_wait(&w->work, &w->lock, idist__os_clock_now_ns() + nap->next_ns);
    w->progress.naps = false;

    return true;
}

// Handles the data that has arrived on the connections, without sleeping, so that the loss of a
// rank is noticed. Called while the device waits for other ranks and no caller does.
static void idist__progress_thread_look(idist__world *w) {
    w->wait.driver = IDIST__DRIVER_THREAD;
    w->backend->sleep(w, idist__os_clock_now_ns());
    w->wait.driver = IDIST__DRIVER_NONE;
    w->backend->progress(w);
    if (w->wait.blocked_count) idist__os_cond_broadcast(&w->changed); // callers blocked meanwhile
    idist__timer_run(w);
}

static void *idist__progress_thread_main(void *arg) {
    idist__world *w = (idist__world *)arg;
    idist__thread_nap nap;

    memset(&nap, 0, sizeof nap);
    idist__os_mutex_lock(&w->lock);
    nap.request_count = w->tasks.request_count;

    while (!w->progress.stops) {
        bool idle;

        if (idist__progress_thread_may_nap(w, &nap)) continue;
        idle = !w->wait.blocked_count && w->wait.driver == IDIST__DRIVER_NONE;

        if (w->tasks.async_count && idle) {
            idist__wait_turn(w, IDIST__DRIVER_THREAD);
            continue;
        }

        idist__os_cond_wait(&w->work, &w->lock,
                            w->progress.watched ? idist__os_clock_now_ns() + IDIST__WATCH_NS
                                                : IDIST__FOREVER);
        idle = !w->wait.blocked_count && w->wait.driver == IDIST__DRIVER_NONE;
        if (w->progress.watched && !w->tasks.async_count && idle && !w->progress.stops)
            idist__progress_thread_look(w);
    }

    idist__os_mutex_unlock(&w->lock);

    return NULL;
}

static idist_status idist__progress_thread_need(idist__world *w) {
    if (w->progress.running || w->machine.single_threaded) return IDIST_OK;
    if (w->progress.stops)
        return idist__fail(IDIST_ERR_STATE, "another thread is closing the world");
    if (idist__os_thread_start(&w->progress.thread, idist__progress_thread_main, w) != 0)
        return idist__fail(IDIST_ERR_SYSTEM,
                           "could not start the thread that advances requests; is a limit on "
                           "processes (ulimit -u) or memory reached?");
    w->progress.running = true;

    return IDIST_OK;
}
