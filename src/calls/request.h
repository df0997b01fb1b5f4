// calls/request.h: waits for requests, tests, cancels and frees them
//
// The field request->impl points to the task of a request. The field is NULL once the request was
// waited for. If the call completed before it returned, the call has no task, and the field points
// to idist__call_complete.
#pragma once

#include "os/clock.h"
#include "os/thread.h"
#include "base/fail.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/backend.h"
#include "core/world.h"
#include "core/task.h"
#include "core/together.h"
#include "core/timer.h"
#include "core/wait.h"
#include "core/call.h"

// A list of requests: a contiguous array, or an array of pointers.
typedef struct idist__request_list {
    idist_request *requests;
    idist_request *const *pointers;
    size_t n;
    const idist__world *w; // the only world of the requests, for wait_any
    size_t found;          // index of the first complete request
    uint32_t seen_ended;   // w->wait.ended_count at the last look at the requests
} idist__request_list;

static idist__request_list idist__request_list_of(idist_request *requests,
                                                  idist_request *const *pointers, size_t n) {
    idist__request_list list;

    memset(&list, 0, sizeof list);
    list.requests = requests;
    list.pointers = pointers;
    list.n = n;

    return list;
}

// Returns request number i of a list. Empties *empty, and returns `empty` if the pointer to the
// request is NULL.
static idist_request *idist__request_at(const idist__request_list *list, size_t i,
                                        idist_request *empty) {
    empty->impl = NULL;
    if (!list->pointers) return &list->requests[i];
    return list->pointers[i] ? list->pointers[i] : empty;
}

// Empties a request that another thread may be about to cancel.
static void idist__request_empty(idist_request *request) {
    __atomic_store_n(&request->impl, (void *)NULL, __ATOMIC_RELEASE);
}

// Returns the task of a request, with the task's world locked. Returns NULL, with nothing locked,
// if the request has no task or *status is an error.
static idist__task *idist__request_enter(const char *name, idist_request *request,
                                         idist_status *status) {
    idist__task *t;
    idist__world *w;

    *status = IDIST_OK;

    if (!request) {
        *status = idist__fail(IDIST_ERR_ARG, "%s: request is NULL", name);
        return NULL;
    }

    if (idist__call_was_complete(request)) idist__request_empty(request);
    t = (idist__task *)request->impl;
    if (!t) return NULL;
    w = t->group->w;
    *status = idist__world_enter(name, w);
    if (*status != IDIST_OK) return NULL;
    idist__world_lock(w);
    if (idist__together_now.held_world == w) w->device_api->launch(w); // the task may be held back

    return t;
}

// Returns true if a request is complete, including the tasks that follow its first task. Begins the
// next of these tasks when a task is done. Called with the world's lock held.
static bool idist__request_settle(idist_request *request) {
    idist__task *t = (idist__task *)request->impl;

    while (t->state == IDIST__TASK_DONE && t->then) {
        t->then(t, request);
        t = (idist__task *)request->impl;
    }

    return t->state == IDIST__TASK_DONE;
}

// Waits for the task of a request and for the tasks that follow it. Empties the request. Called
// with the world's lock held.
static idist_status idist__request_wait(idist_request *request) {
    idist__task *t;

    do {
        t = (idist__task *)request->impl;
        idist__wait_task(t);
    } while (!idist__request_settle(request));

    t = (idist__task *)request->impl;
    idist__request_empty(request);

    return idist__wait_result(t);
}

static bool idist__request_followed(void *t) {
    return ((idist__task *)t)->state == IDIST__TASK_DONE || ((idist__task *)t)->followed;
}

idist_status idist_wait(idist_request *request) {
    const char *name = "wait";
    idist_status status;
    idist__task *t = idist__request_enter(name, request, &status);
    idist__world *w;

    if (!t) return status;
    w = t->group->w;
    idist__tracer_begin("wait", name, t->group, &t->call);
    status = idist__tracer_end(idist__request_wait(request));
    idist__os_mutex_unlock(&w->lock);

    return status;
}

idist_status idist_wait_stream(idist_request *request, void *stream) {
    const char *name = "wait_stream";
    idist_status status;
    idist__task *t = idist__request_enter(name, request, &status);
    idist__world *w;

    if (!t) return status;
    w = t->group->w;
    idist__tracer_begin("wait", name, t->group, &t->call);

    if (t->then) {
        status = idist__request_wait(request);
    } else {
        idist__wait_until(w, idist__request_followed, t);
        idist__request_empty(request);
        status =
            t->state == IDIST__TASK_DONE ? idist__wait_result(t) : w->device_api->follow(t, stream);
    }

    idist__tracer_end(status);
    idist__os_mutex_unlock(&w->lock);

    return status;
}

idist_status idist_test(idist_request *request, bool *done) {
    idist_status status;
    idist__task *t;
    idist__world *w;

    if (!done) return idist__fail(IDIST_ERR_ARG, "test: done is NULL");
    *done = true;
    t = idist__request_enter("test", request, &status);
    if (!t) return status;
    w = t->group->w;

    if (t->state != IDIST__TASK_DONE && w->wait.driver == IDIST__DRIVER_NONE) {
        w->wait.drive_count++;
        idist__fail_begin();
        w->backend->progress(w);
        if (t->state != IDIST__TASK_DONE) idist__timer_run(w);
        idist__fail_end(IDIST_OK);
    }

    *done = idist__request_settle(request);

    if (*done) {
        t = (idist__task *)request->impl;
        idist__request_empty(request);
        status = idist__wait_result(t);
    }

    idist__os_mutex_unlock(&w->lock);

    return status;
}

idist_status idist_request_free(idist_request *request) {
    idist_status status;
    idist__task *t = idist__request_enter("request_free", request, &status);
    idist__world *w;

    if (!t) return status;
    w = t->group->w;

    if (t->then) {
        status = idist__fail(IDIST_ERR_ARG,
                             "request_free: the request of a split cannot be freed; wait for it");
    } else {
        idist__request_empty(request);
        if (t->state == IDIST__TASK_DONE) status = idist__wait_result(t);
        else idist__task_free_request(t);
    }

    idist__os_mutex_unlock(&w->lock);

    return status;
}

// Returns the task of a request that another thread may be waiting for, with the task's world
// locked. Returns NULL, with nothing locked, if the request is empty or complete, or if *status is
// an error. While this thread waits for the lock, another thread may complete the request, and the
// task may be used again; the request is then empty.
static idist__task *idist__request_find(const idist_request *request, idist_status *status) {
    void *impl = __atomic_load_n(&request->impl, __ATOMIC_ACQUIRE);
    idist__task *t = impl == &idist__call_complete ? NULL : (idist__task *)impl;

    *status = IDIST_OK;
    if (!t) return NULL;
    *status = idist__world_enter("cancel", t->w);
    if (*status != IDIST_OK) return NULL;
    idist__world_lock(t->w);
    if (__atomic_load_n(&request->impl, __ATOMIC_RELAXED) == impl) return t;
    idist__os_mutex_unlock(&t->w->lock);

    return NULL;
}

// Cancels a task if it is a receive that no message has reached. Returns true if the task was
// cancelled in time. Otherwise returns false, and sets *status if tasks of this kind cannot be
// cancelled.
static bool idist__request_retract(idist__task *t, idist_status *status) {
    idist__world *w = t->group->w;
    const char *name = idist__kind_names[t->call.label];

    if (t->state == IDIST__TASK_DONE && !t->then) return false;

    if (t->call.kind != IDIST__RECV || t->then) {
        *status = idist__fail(
            IDIST_ERR_ARG,
            "cancel: other ranks already rely on this %s; only a receive can be cancelled", name);
        return false;
    }

    if (t->on_device || !w->backend->retract) {
        *status = idist__fail(IDIST_ERR_UNSUPPORTED,
                              t->on_device
                                  ? "cancel: a %s into device memory cannot be cancelled"
                                  : "cancel: this backend cannot cancel a %s; wait for the request",
                              name);
        return false;
    }

    if (!w->backend->retract(t)) return false;
    idist__task_complete(t, IDIST_ERR_CANCELLED,
                         "cancelled by idist_cancel before a message arrived");
    idist__world_wake_driver(w); // the driver may be the thread that waits for this request

    return true;
}

idist_status idist_cancel(idist_request *request, bool *cancelled) {
    idist_status status;
    idist__task *t;

    if (cancelled) *cancelled = false;
    if (!request || !cancelled)
        return idist__fail(IDIST_ERR_ARG, "cancel: request or cancelled is NULL");
    t = idist__request_find(request, &status);
    if (!t) return status;
    *cancelled = idist__request_retract(t, &status);
    idist__os_mutex_unlock(&t->w->lock);

    return status;
}

static void idist__request_leave(idist__world *w) {
    idist__wait_leave(w);
    idist__os_mutex_unlock(&w->lock);
}

// Waits for a request. Between requests of one world, this thread keeps the lock and counts as
// blocked, so that the progress thread does not drive. The caller's *held is the locked world, or
// NULL.
static idist_status idist__request_wait_next(idist_request *request, idist__world **held) {
    idist_status status = IDIST_OK;
    idist__task *t = (idist__task *)request->impl;

    if (t->group->w != *held) {
        if (*held) idist__request_leave(*held);
        *held = NULL;
        t = idist__request_enter("wait_all", request, &status);
        if (!t) return status;
        *held = t->group->w;
        idist__wait_enter(*held);
    }

    return idist__request_wait(request);
}

// The failure that a wait for several requests returns: the failure with the lowest index.
typedef struct idist__request_failure {
    idist_status status;
    size_t index;
    char text[sizeof idist__me.text];
} idist__request_failure;

static void idist__request_note(idist__request_failure *failure, idist_status status,
                                size_t index) {
    if (status == IDIST_OK || (failure->status != IDIST_OK && failure->index < index)) return;
    failure->status = status;
    failure->index = index;
    memcpy(failure->text, idist__me.text, sizeof failure->text);
}

// Waits for the requests of a list in turn and notes failures.
static void idist__request_wait_each(const idist__request_list *list,
                                     idist__request_failure *failure) {
    idist__world *held = NULL;
    idist_request empty;
    size_t i;

    for (i = 0; i < list->n; i++) {
        idist_request *request = idist__request_at(list, i, &empty);
        idist_status status;

        if (!request->impl) continue;

        if (idist__call_was_complete(request)) {
            idist__request_empty(request);
            continue;
        }

        status =
            idist__tracer_now() ? idist_wait(request) : idist__request_wait_next(request, &held);
        idist__request_note(failure, status, i);
    }

    if (held) idist__request_leave(held);
}

// Returns true if a request of the list is complete, and sets list->found to its index. There may
// be thousands of requests, so this function looks at them only after a task has ended.
static bool idist__request_any_ready(void *arg) {
    idist__request_list *list = (idist__request_list *)arg;
    idist_request empty;

    if (list->w->wait.ended_count == list->seen_ended) return false;

    for (list->found = 0; list->found < list->n; list->found++) {
        idist_request *request = idist__request_at(list, list->found, &empty);
        if (request->impl && idist__request_settle(request)) return true;
    }

    list->seen_ended = list->w->wait.ended_count;

    return false;
}

// Waits for any request of a list whose requests all belong to world w.
static idist_status idist__request_wait_in(idist__request_list *list, idist__world *w) {
    idist_request empty, *request;
    idist__task *t;
    idist_status status = IDIST_OK;

    if (idist__world_enter("wait_any", w) != IDIST_OK) return IDIST_ERR_STATE;
    list->w = w;
    idist__world_lock(w);
    if (idist__together_now.held_world == w) w->device_api->launch(w);
    list->seen_ended = w->wait.ended_count - 1;
    idist__tracer_begin("wait", "wait_any", NULL, NULL);
    idist__wait_until(w, idist__request_any_ready, list);
    request = idist__request_at(list, list->found, &empty);
    t = (idist__task *)request->impl;
    if (t) status = idist__wait_result(t);
    idist__tracer_end(status);
    idist__request_empty(request);
    idist__os_mutex_unlock(&w->lock);

    return status;
}

// Waits for any request of a list whose requests belong to several worlds. Tests the requests in
// turn. Yields after each of the first 49 rounds, then pauses for 1 ms after each round.
static idist_status idist__request_wait_among(idist__request_list *list) {
    int64_t pause_ns = 0;
    idist_request empty;
    bool done = false;
    idist_status status;

    for (;;) {
        for (list->found = 0; list->found < list->n; list->found++) {
            idist_request *request = idist__request_at(list, list->found, &empty);

            if (!request->impl) continue;
            status = idist_test(request, &done);
            if (done || status != IDIST_OK) return status;
        }

        if (pause_ns < IDIST__MS) pause_ns += 1000;
        if (pause_ns < 50000) idist__os_thread_yield();
        else idist__os_clock_pause_ms(1);
    }
}

static idist_status idist__request_wait_any(idist__request_list *list, size_t *index) {
    idist__world *w = NULL;
    idist_request empty;
    idist_status status;
    bool one_world = true;
    size_t i;

    *index = list->n;

    for (i = 0; i < list->n; i++) {
        idist_request *request = idist__request_at(list, i, &empty);
        const idist__task *t;

        if (idist__call_was_complete(request)) {
            idist__request_empty(request);
            *index = i;
            return IDIST_OK;
        }

        t = (const idist__task *)request->impl;
        if (t && w && t->group->w != w) one_world = false;
        if (t) w = t->group->w;
    }

    if (!w) return IDIST_OK;
    list->found = list->n;
    status = one_world ? idist__request_wait_in(list, w) : idist__request_wait_among(list);
    *index = list->found;

    return status;
}

// Returns true if the list has a split. A split makes progress only while a thread waits for its
// request.
static bool idist__request_any_follows(const idist__request_list *list) {
    idist_request empty;
    size_t i;

    for (i = 0; i < list->n; i++) {
        idist_request *request = idist__request_at(list, i, &empty);
        if (request->impl && !idist__call_was_complete(request) &&
            ((const idist__task *)request->impl)->then)
            return true;
    }

    return false;
}

// Waits for all requests of a list. While the list has splits, waits for whichever request
// completes next. If two ranks waited for their splits one by one in different orders, they would
// wait for each other.
static idist_status idist__request_wait_all(idist__request_list *list) {
    idist__request_failure failure;
    idist_request empty;
    size_t i;

    failure.status = IDIST_OK;
    failure.index = 0;

    while (idist__request_any_follows(list)) {
        idist_status status = idist__request_wait_any(list, &i);

        // The request is still open if this thread may not wait, for example inside a callback.
        if (i == list->n || idist__request_at(list, i, &empty)->impl) break;
        idist__request_note(&failure, status, i);
    }

    idist__request_wait_each(list, &failure);
    if (failure.status != IDIST_OK) memcpy(idist__me.text, failure.text, sizeof failure.text);

    return failure.status;
}

idist_status idist_wait_all(idist_request *requests, size_t n) {
    idist__request_list list = idist__request_list_of(requests, NULL, n);

    if (n && !requests) return idist__fail(IDIST_ERR_ARG, "wait_all: requests is NULL");

    return idist__request_wait_all(&list);
}

idist_status idist_wait_all_of(idist_request *const *requests, size_t n) {
    idist__request_list list = idist__request_list_of(NULL, requests, n);

    if (n && !requests) return idist__fail(IDIST_ERR_ARG, "wait_all_of: requests is NULL");

    return idist__request_wait_all(&list);
}

idist_status idist_wait_any(idist_request *requests, size_t n, size_t *index) {
    idist__request_list list = idist__request_list_of(requests, NULL, n);

    if ((n && !requests) || !index)
        return idist__fail(IDIST_ERR_ARG, "wait_any: requests or index is NULL");

    return idist__request_wait_any(&list, index);
}

idist_status idist_wait_any_of(idist_request *const *requests, size_t n, size_t *index) {
    idist__request_list list = idist__request_list_of(NULL, requests, n);

    if ((n && !requests) || !index)
        return idist__fail(IDIST_ERR_ARG, "wait_any_of: requests or index is NULL");

    return idist__request_wait_any(&list, index);
}

idist_status idist_wait_some(idist_request *requests, size_t n, size_t *indices, size_t *count) {
    idist__request_list list = idist__request_list_of(requests, NULL, n);
    idist__request_failure failure;
    idist_status status;
    size_t first = n, i;
    bool done;

    if (count) *count = 0;
    if ((n && (!requests || !indices)) || !count)
        return idist__fail(IDIST_ERR_ARG, "wait_some: requests, indices or count is NULL");

    status = idist__request_wait_any(&list, &first);
    if (first == n || requests[first].impl) return status; // all are empty, or none is complete
    failure.status = IDIST_OK;
    failure.index = 0;
    idist__request_note(&failure, status, first);

    for (i = 0; i < n; i++) {
        done = i == first;
        if (requests[i].impl) {
            status = idist_test(&requests[i], &done);
            if (done) idist__request_note(&failure, status, i);
        }
        if (done) indices[(*count)++] = i;
    }

    if (failure.status != IDIST_OK) memcpy(idist__me.text, failure.text, sizeof failure.text);

    return failure.status;
}

idist_status idist_test_all(idist_request *requests, size_t n, bool *done) {
    idist__request_failure failure;
    size_t i;
    bool one;

    if ((n && !requests) || !done)
        return idist__fail(IDIST_ERR_ARG, "test_all: requests or done is NULL");

    *done = true;
    failure.status = IDIST_OK;
    failure.index = 0;

    for (i = 0; i < n; i++) {
        idist_status status = idist_test(&requests[i], &one);
        idist__request_note(&failure, status, i);
        *done = *done && one;
    }

    if (failure.status != IDIST_OK) memcpy(idist__me.text, failure.text, sizeof failure.text);

    return failure.status;
}
