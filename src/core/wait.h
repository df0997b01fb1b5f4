// core/wait.h: waiting for a task: poll, drive or follow
//
// If no thread drives the backend, a caller polls the backend for a short time, and then drives it:
// the caller runs the timers and sleeps in the backend. If a thread drives already, the caller
// follows without polling: it sleeps on w->changed until the driver has completed the caller's task
// or stops driving. The lock is held throughout, except while the thread sleeps or yields.
//
//     idist__wait_task -> idist__wait_until -> idist__wait_polls ... idist__wait_turn
//                                                                       -> idist__timer_run
//                                                                       -> sleep of the backend
#pragma once

#include "os/clock.h"
#include "os/cpu.h"
#include "os/thread.h"
#include "base/fail.h"
#include "core/model.h"
#include "core/world.h"
#include "core/task.h"
#include "core/group.h"
#include "core/timer.h"

#define IDIST__SPIN_NS 500000
#define IDIST__YIELD_NS 5000000 // longest time for which a caller yields instead of sleeping

// Counters of a caller's polling.
typedef struct idist__waiter {
    uint32_t turns;     // since the last step forward
    uint32_t all_turns; // since the wait began
    int64_t begun_ns;   // when the turns began, 0 if not known yet
    bool slept;         // since the last step forward
} idist__waiter;

// Sleeps in the backend until an event or the next timer, then calls the backend's `progress`. Does
// not sleep if the timers have just ended a task, because the caller may be waiting for that task.
static void idist__wait_turn(idist__world *w, idist__driver driver) {
    uint32_t ended = w->wait.ended_count;
    int64_t until = idist__timer_run(w);
    int own = driver == IDIST__DRIVER_CALLER ? 1 : 0;

    if (w->wait.ended_count != ended) return;

    if (!w->tasks.running) { // another thread does what we wait for, and may need the lock
        idist__world_give_way(w);
        return;
    }

    w->wait.driver = driver;
    w->backend->sleep(w, until);
    w->wait.driver = IDIST__DRIVER_NONE;
    w->backend->progress(w);
    if (w->wait.blocked_count > own) idist__os_cond_broadcast(&w->changed);
}

// Returns true if the caller should poll once more, after a short break, or false if it should
// sleep.
//
// With a core for each rank, the caller polls for at most w->wait.spin_budget_ns. Of the waits that
// take at least 16 turns, one that ends in sleep halves this budget, and any other doubles it,
// within w->wait.spin_ns / 32 and w->wait.spin_ns. With fewer cores, the caller yields its core to
// the other ranks a bounded number of times before it sleeps. Yielding comes first because a
// wake-up costs as much as dozens of yields.
static bool idist__wait_polls(idist__waiter *waiter, idist__world *w) {
    int64_t now;

    waiter->turns++;
    waiter->all_turns++;
    if (w->wait.spin_ns) idist__os_cpu_relax();
    if (w->wait.spin_ns && waiter->all_turns % 16) return true;
    now = idist__os_clock_now_ns();
    if (!waiter->begun_ns) waiter->begun_ns = now;

    if (now >= w->wait.next_look_ns) { // also for tasks that stall while other tasks move
        int64_t next = idist__timer_run(w);
        w->wait.next_look_ns = next < now + IDIST__TIMERS_NS ? next : now + IDIST__TIMERS_NS;
    }

    if (w->wait.spin_ns) {
        if (now - waiter->begun_ns >= w->wait.spin_budget_ns) return false;
        if (__atomic_load_n(&w->wait.lock_waiter_count, __ATOMIC_RELAXED)) idist__world_give_way(w);
        return true;
    }

    // Stop yielding after a while, because the other ranks may be computing for a long time.
    if (waiter->turns > IDIST__YIELDS || now - waiter->begun_ns > IDIST__YIELD_NS) return false;
    idist__world_give_way(w);

    return true;
}

static void idist__wait_learn(const idist__waiter *waiter, idist__world *w) {
    if (waiter->turns < 16 || !w->wait.spin_ns) return;
    w->wait.spin_budget_ns =
        waiter->slept ? w->wait.spin_budget_ns / 2 : w->wait.spin_budget_ns * 2;
    if (w->wait.spin_budget_ns > w->wait.spin_ns) w->wait.spin_budget_ns = w->wait.spin_ns;
    if (w->wait.spin_budget_ns < w->wait.spin_ns / 32)
        w->wait.spin_budget_ns = w->wait.spin_ns / 32;
}

static void idist__wait_enter(idist__world *w) {
    w->wait.blocked_count++;
    if (w->wait.blocked_count == 1 && w->backend->attend) w->backend->attend(w, true);
}

// Ends a caller's wait. Another caller or the progress thread drives from now on. A progress thread
// that naps needs no signal, because it looks again soon.
static void idist__wait_leave(idist__world *w) {
    w->wait.blocked_count--;
    if (!w->wait.blocked_count && w->backend->attend) w->backend->attend(w, false);
    if (w->wait.blocked_count) idist__os_cond_broadcast(&w->changed);
    else if (w->tasks.async_count && w->progress.running && !w->progress.naps)
        idist__os_cond_signal(&w->work);
}

// Waits until ready(arg) returns true. Called with the world's lock held.
static void idist__wait_until(idist__world *w, bool (*ready)(void *arg), void *arg) {
    idist__waiter waiter;
    uint32_t moved = w->wait.moved_count;

    if (ready(arg)) return;
    w->wait.drive_count++;
    memset(&waiter, 0, sizeof waiter);
    idist__fail_begin();
    idist__wait_enter(w);

    while (!ready(arg)) {
        if (w->wait.moved_count != moved) { // one wait is over, the next one begins
            idist__wait_learn(&waiter, w);
            moved = w->wait.moved_count;
            waiter.turns = 0;
            waiter.begun_ns = 0;
            waiter.slept = false;
        }

        if (w->wait.driver == IDIST__DRIVER_NONE) {
            w->backend->progress(w);
            if (ready(arg) || idist__wait_polls(&waiter, w) || ready(arg))
                continue; // polling runs the timers, too
            idist__wait_turn(w, IDIST__DRIVER_CALLER);
            waiter.slept = true;
        } else {
            if (w->wait.driver == IDIST__DRIVER_THREAD)
                w->backend->wake(w); // makes the progress thread stop driving, so that we can
            idist__os_cond_wait(&w->changed, &w->lock, IDIST__FOREVER);
        }
    }

    idist__wait_learn(&waiter, w);
    idist__wait_leave(w);
    idist__fail_end(IDIST_OK); // each task holds its own failure
}

static bool idist__wait_task_ready(void *arg) {
    return ((const idist__task *)arg)->state == IDIST__TASK_DONE;
}

static void idist__wait_task(idist__task *t) {
    idist__wait_until(t->group->w, idist__wait_task_ready, t);
}

// Frees a finished task and ignores its status.
static void idist__wait_drop(idist__task *t) {
    if (idist__task_is_async(t)) t->group->open_request_count--;
    idist__task_free(t);
}

// Returns the status of a finished task, sets the caller's error text if the task has failed, and
// frees the task.
static idist_status idist__wait_result(idist__task *t) {
    idist_status status = t->status;

    if (status != IDIST_OK) {
        idist__group_flush(t->group);
        idist__fail(status, "%s", t->text);
    }

    idist__wait_drop(t);

    return status;
}
