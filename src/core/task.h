// core/task.h: tasks: allocate, start, complete, free; handles that outlive their groups
#pragma once

#include "os/clock.h"
#include "os/thread.h"
#include "base/fail.h"
#include "base/text.h"
#include "base/mem.h"
#include "base/log.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/backend.h"
#include "core/world.h"
#include "core/explain.h"

//------------------------------------------------------------------------------
// tasks: allocate, start, complete, free
//
// A task is in w->tasks.running from idist__task_start until idist__task_complete. The memory of a
// finished task is reused through w->tasks.idle, and is freed with the world.
//------------------------------------------------------------------------------

// Returns true if the task has a request, or had a request that the program has freed. A task that
// was left to a stream does not count.
static bool idist__task_is_async(const idist__task *t) {
    return t->waiter == IDIST__WAITER_REQUEST || t->waiter == IDIST__WAITER_NOBODY;
}

// Returns true if neither a caller nor the holder of a request waits for the task. Such a task is
// in the world's list of detached tasks, and is freed after it is done.
static bool idist__task_is_detached(const idist__task *t) {
    return t->waiter == IDIST__WAITER_NOBODY || t->waiter == IDIST__WAITER_STREAM;
}

// Decrements the count of freed requests. Called when a task ends and its request was freed. Logs a
// failure of the task if the group itself has not failed, because nothing else reports the failure.
static void idist__task_report(const idist__task *t) {
    idist__world *w = t->group->w;

    w->tasks.freed_request_count--;
    if (t->status != IDIST_OK && t->group->status == IDIST_OK)
        idist__log_print(&w->log, IDIST_LOG_WARN,
                         "a call failed after idist_request_free freed its request: %s", t->text);
}

// Completes a task. `text` says why the task failed, without the name of the operation.
static void idist__task_complete(idist__task *t, idist_status status, const char *text) {
    idist__world *w = t->group->w;

    if (t->state == IDIST__TASK_DONE) return;
    if (t->on_device && !w->device_api->landed(t, status)) return;
    t->status = status;

    if (status != IDIST_OK) {
        idist__explain_task(t, t->text, sizeof t->text);
        idist__text_append(t->text, sizeof t->text, ": %s", text);
    }

    if (t->prev) t->prev->next = t->next;
    else w->tasks.running = t->next;
    if (t->next) t->next->prev = t->prev;
    t->next = t->prev = NULL;
    idist__mem_free(&w->cfg.mem, t->copy);
    t->copy = NULL;
    t->state = IDIST__TASK_DONE;
    w->wait.ended_count++;
    t->group->running_count--;

    if (idist__task_is_detached(t)) {
        t->group->detached_count--;
        w->tasks.detached_done_count++;
    }

    if (t->waiter == IDIST__WAITER_NOBODY) idist__task_report(t);
    if (idist__task_is_async(t)) w->tasks.async_count--;
    if (t->lane) idist__tracer_now()->done(t);
    if (w->wait.blocked_count) idist__os_cond_broadcast(&w->changed);
}

// Puts a task on the idle list. If the task is pinned, only marks it as left; the thread that
// pinned the task then calls this function again.
static void idist__task_free(idist__task *t) {
    idist__world *w = t->group->w;

    if (t->pin != IDIST__PIN_FREE) {
        t->pin = IDIST__PIN_LEFT;
        return;
    }

    t->next = w->tasks.idle;
    w->tasks.idle = t;
}

// Frees the detached tasks that are done.
static void idist__task_sweep(idist__world *w) {
    idist__task **at = &w->tasks.detached;

    w->tasks.detached_done_count = 0;

    while (*at) {
        idist__task *t = *at;

        if (t->state != IDIST__TASK_DONE) {
            at = &t->list_next;
            continue;
        }

        *at = t->list_next;
        idist__task_free(t);
    }
}

static idist__task *idist__task_new(idist_group *g) {
    idist__world *w = g->w;
    size_t nbytes = sizeof(idist__task) + w->backend->task_nbytes;
    idist__task *t;

    if (w->tasks.detached_done_count >= 64) idist__task_sweep(w);
    t = w->tasks.idle;

    if (t) {
        idist__task *older = t->older;
        w->tasks.idle = t->next;
        idist__mem_clear(t, offsetof(idist__task, text));
        t->older = older;
    } else {
        t = (idist__task *)idist__mem_alloc(&w->cfg.mem, nbytes);
        if (!t) return NULL;
        t->older = w->tasks.all;
        w->tasks.all = t;
        t->w = w;
    }

    t->impl = t + 1;
    t->group = g;

    return t;
}

// Returns the call in which this rank is blocked, if the rank does nothing else. Tasks of groups
// that a backend made for itself do not count. Returns NULL if the rank has a request, or if the
// call has its own time-out or waits for the device. Also returns NULL if another thread could
// still make the call that the other ranks wait for.
IDIST__UNUSED static idist__task *idist__task_only_call(const idist__world *w) {
    idist__task *t, *only = NULL;
    int own_threads = w->progress.running ? 2 : 1;

    for (t = w->tasks.running; t; t = t->next) {
        if (t->group->inner) continue;
        if (only || idist__task_is_async(t) || !t->patient || t->state == IDIST__TASK_ON_DEVICE)
            return NULL;
        only = t;
    }

    if (!only || w->machine.one_thread_calls) return only;

    return idist__os_thread_count() - w->machine.foreign_thread_count <= own_threads ? only : NULL;
}

static void idist__task_list_detached(idist__task *t) {
    idist__world *w = t->group->w;

    t->list_next = w->tasks.detached;
    w->tasks.detached = t;
    t->group->detached_count++;
    if (t->waiter == IDIST__WAITER_REQUEST) t->group->open_request_count--;
}

// Detaches a task, and leaves it to the stream of the device on which the task runs.
static void idist__task_detach(idist__task *t) {
    idist__task_list_detached(t);
    if (t->waiter == IDIST__WAITER_REQUEST) t->group->w->tasks.async_count--;
    t->waiter = IDIST__WAITER_STREAM;
}

IDIST__UNUSED static bool idist__task_on_stream(const idist__task *t) {
    return t->waiter == IDIST__WAITER_STREAM;
}

// Detaches a task whose request the program has freed, and leaves the task to the progress thread.
static void idist__task_free_request(idist__task *t) {
    idist__task_list_detached(t);
    t->waiter = IDIST__WAITER_NOBODY;
    t->group->w->tasks.freed_request_count++;
}

#ifndef IDIST__ANNOUNCE_NS // a test sets this so high that an announcement never wakes a rank
#define IDIST__ANNOUNCE_NS (20 * IDIST__MS)
#endif

// Starts a task: numbers it if it is a collective, adds it to the running tasks, and hands it to
// the backend.
static void idist__task_start(idist__task *t) {
    idist_group *g = t->group;
    idist__world *w = g->w;

    t->started_ns = idist__os_clock_now_ns();
    t->deadline_ns = t->timeout_ms < 0 ? IDIST__FOREVER : t->started_ns + t->timeout_ms * IDIST__MS;
    if (!idist__kind_is_p2p(t->call.kind)) t->seq = ++g->seq;
    if (t->started_ns + IDIST__ANNOUNCE_NS < w->wait.timers_due_ns)
        w->wait.timers_due_ns = t->started_ns + IDIST__ANNOUNCE_NS;
    if (t->deadline_ns < w->wait.timers_due_ns) w->wait.timers_due_ns = t->deadline_ns;

    t->next = w->tasks.running;
    if (w->tasks.running) w->tasks.running->prev = t;
    w->tasks.running = t;
    g->running_count++;

    if (idist__task_is_async(t)) {
        w->tasks.request_count++;
        w->tasks.async_count++;
        g->open_request_count++;
    }

    idist__fail_begin();
    w->backend->start(t);
    idist__fail_end(IDIST_OK);   // each task records its failure
    idist__world_wake_driver(w); // also when t is done: start may have read from the connections
    if (w->wait.driver == IDIST__DRIVER_NONE && t->state != IDIST__TASK_DONE &&
        idist__task_is_async(t) && w->progress.running && !w->progress.naps &&
        !w->wait.blocked_count)
        idist__os_cond_signal(&w->work);
}

//------------------------------------------------------------------------------
// handles that outlive their groups and worlds
//
// A program may keep the handle of a group or of a world after the world is closed, and still pass
// it to calls. Such a call must fail with IDIST_ERR_STATE, so the struct must still exist. The
// struct stays in one of the lists below, marked as freed. It is reused for a new handle when
// enough later structs have joined the list. The struct comes from malloc, because the world's
// allocator may be gone.
//------------------------------------------------------------------------------

typedef struct idist__ended {
    idist_group *first, *last; // the oldest and the newest handle
    int n;
} idist__ended;

enum { IDIST__ENDED_GROUPS = 256, IDIST__ENDED_WORLDS = 16 };

static idist__os_mutex idist__ended_lock = IDIST__OS_MUTEX_INIT;
static idist__ended idist__ended_groups, idist__ended_worlds; // worlds are listed by `group`

static void idist__ended_keep(idist__ended *list, idist_group *g) {
    g->w = NULL;
    g->rank = -1;
    g->freed = true;
    g->next = NULL;

    idist__os_mutex_lock(&idist__ended_lock);
    if (list->last) list->last->next = g;
    else list->first = g;
    list->last = g;
    list->n++;
    idist__os_mutex_unlock(&idist__ended_lock);
}

// Returns zeroed memory for a handle. Takes the oldest handle of the list if the list holds at
// least `limit` handles, and allocates a new one otherwise. Returns NULL if memory cannot be
// allocated.
static idist_group *idist__ended_reuse(idist__ended *list, int limit, size_t nbytes) {
    idist_group *g = NULL;

    idist__os_mutex_lock(&idist__ended_lock);

    if (list->n >= limit) {
        g = list->first;
        list->first = g->next;
        if (!list->first) list->last = NULL;
        list->n--;
    }

    idist__os_mutex_unlock(&idist__ended_lock);

    if (!g) return (idist_group *)idist__mem_alloc(NULL, nbytes);
    memset(g, 0, nbytes);

    return g;
}

#if defined(__PIC__) && !defined(__PIE__)
// Frees the handles of a list. Only a shared library needs this code: the program may unload the
// library, and uses no handle after that. The destructor below runs after all other destructors,
// because these may still close worlds. The destructor only tries the lock: in a forked child, the
// lock may be held by a thread that exists only in the parent.
static void idist__ended_free(idist__ended *list) {
    while (list->first) {
        idist_group *g = list->first;
        list->first = g->next;
        idist__mem_free(NULL, g);
    }

    list->last = NULL;
    list->n = 0;
}

__attribute__((destructor(101))) static void idist__ended_unload(void) {
    if (!idist__os_mutex_try_lock(&idist__ended_lock)) return;
    idist__ended_free(&idist__ended_groups);
    idist__ended_free(&idist__ended_worlds);
    idist__os_mutex_unlock(&idist__ended_lock);
}
#endif
