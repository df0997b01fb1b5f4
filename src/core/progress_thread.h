// core/progress_thread.h: the progress thread
//
// Drives the backend while there are requests and no caller is blocked; as soon as one blocks, it
// stops driving. It exists from the first request on.
//
// A program that begins requests mostly waits for them soon, and then drives by itself. Waking this
// thread and taking over from it again costs more than many messages. So when requests have begun
// the thread naps. When it wakes up, it naps again, longer, only if meanwhile more requests have
// begun and the program has driven; and at the latest after IDIST__NAP_MOST_NS it drives in any
// case.
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

// What the progress thread has seen of the program when it last looked.
typedef struct idist__thread_nap {
    uint32_t request_count, drive_count;
    int64_t next_ns, napped_ns; // 0: it has not napped since it last drove
} idist__thread_nap;

// Naps, if the program is likely to drive by itself.
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

// While the device waits for other ranks and no thread does: handles what has arrived on the
// connections, without sleeping, so that the loss of a rank is noticed.
static void idist__progress_thread_look(idist__world *w) {
    w->wait.driver = IDIST__DRIVER_THREAD;
    w->backend->sleep(w, idist__os_clock_now_ns());
    w->wait.driver = IDIST__DRIVER_NONE;
    w->backend->progress(w);
    if (w->wait.blocked_count) idist__os_cond_broadcast(&w->changed); // callers that came meanwhile
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
    if (w->progress.stops) return idist__fail(IDIST_ERR_STATE, "another thread closes the world");
    if (idist__os_thread_start(&w->progress.thread, idist__progress_thread_main, w) != 0)
        return idist__fail(IDIST_ERR_SYSTEM,
                           "could not start the thread that advances requests; is a limit on "
                           "processes (ulimit -u) or memory reached?");
    w->progress.running = true;

    return IDIST_OK;
}
