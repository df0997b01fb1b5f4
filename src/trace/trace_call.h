// trace/trace_call.h: the events of calls, and the events that the program adds
//
// Functions: idist__trace_call_*, idist__trace_mark_*.
#pragma once

#include "os/clock.h"
#include "os/process.h"
#include "os/thread.h"
#include "base/text.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/backend.h"
#include "core/together.h"
#include "core/extent.h"
#include "core/check.h"
#include "core/call.h"
#include "trace/trace_file.h"
#include "trace/trace_track.h"
#include "trace/trace_count.h"

//------------------------------------------------------------------------------
// what the library adds to the timeline
//
// These are the functions of idist__tracer, which core/call.h calls. They also count the calls of
// threads that count (trace/trace_count.h), with or without a timeline. A blocking call becomes a
// begin and an end on its thread's track. A request becomes an event in a lane, which is a track
// for operations in flight (trace_track.h). The function idist__trace_call_record begins the event
// of the request. idist__trace_call_done ends the event, in the thread that completes the request.
//------------------------------------------------------------------------------

// Writes the args of a call's event:
// {"dtype":"F32","count":1024,"bytes":4096,"op":"SUM","ranks":4,"seq":12}. `valid` is true if the
// arguments of the call have passed their checks.
static void idist__trace_call_args(char *out, const idist_group *g, const idist__call *call,
                                   uint32_t seq, bool valid) {
    const size_t capacity = IDIST__TRACE_ARGS_NBYTES;
    bool has_data = call->kind != IDIST__BARRIER, p2p = idist__kind_is_p2p(call->kind);
    idist__extent extent;

    idist__text_append(out, capacity, "{");
    if (has_data)
        idist__text_append(out, capacity, "\"dtype\":\"%s\",\"count\":%zu,",
                           idist_dtype_name(call->dtype), call->count);

    if (has_data && valid && idist__extent_of(g, call, &extent) == IDIST_OK) {
        size_t larger = extent.send > extent.recv ? extent.send : extent.recv;
        idist__text_append(out, capacity, "\"bytes\":%zu,", larger * idist_dtype_size(call->dtype));
    }

    if (idist__kind_reduces(call->kind))
        idist__text_append(out, capacity, "\"op\":\"%s\",", idist_op_name(call->op));
    if (p2p) {
        idist__text_append(out, capacity, "\"peer\":%d,", call->root);
        if (call->label != IDIST__MRECV) // the tag of an mrecv is internal
            idist__text_append(out, capacity, "\"tag\":%d,", call->tag);
    } else if (call->root >= 0) idist__text_append(out, capacity, "\"root\":%d,", call->root);
    if (seq && !p2p) idist__text_append(out, capacity, "\"seq\":%u,", (unsigned)seq);
    idist__text_append(out, capacity, "\"ranks\":%d}", g->size);
}

static void idist__trace_call_joined(const idist__world *w) {
    idist__os_mutex_lock(&idist__trace_lock);
    idist__trace_file_open(w);
    if (idist__trace_file_is_on()) idist__trace_track_this_rank(w);
    idist__os_mutex_unlock(&idist__trace_lock);
}

// Records that a wait begins, for one call or for several calls. For several calls, `g` and `call`
// are NULL.
static void idist__trace_call_wait(const char *category, const char *name, const idist_group *g,
                                   const idist__call *call) {
    char args[IDIST__TRACE_ARGS_NBYTES] = "", of_call[IDIST__TRACE_ARGS_NBYTES] = "";

    idist__trace_count_enter();
    if (call && idist__trace_counter.owner && strcmp(category, "call") == 0)
        idist__trace_count_add(g, call);
    if (!idist__trace_file_is_on()) return;

    if (call) {
        idist__trace_call_args(of_call, g, call, 0, true);
        idist__text_append(args, sizeof args, "{\"call\":\"%s\",%s", idist__kind_names[call->label],
                           of_call + 1);
    }

    idist__trace_track_enter(category, name, args);
}

// Records the end of a blocking call or a wait.
static void idist__trace_call_leave(idist_status status) {
    if (!idist__trace_me.depth) return;
    idist__os_mutex_lock(&idist__trace_lock);
    idist__trace_track_leave(NULL, idist_status_name(status));
    idist__os_mutex_unlock(&idist__trace_lock);
}

static void idist__trace_call_waited(idist_status status) {
    idist__trace_count_leave();
    idist__trace_call_leave(status);
}

// Records the end of a task that is in a lane.
static void idist__trace_call_done(const idist__task *t) {
    idist__lane *lane = (idist__lane *)t->lane;

    idist__os_mutex_lock(&idist__trace_lock);
    idist__trace_track_leave(lane, idist_status_name(t->status));
    lane->until_ns = idist__os_clock_now_ns();
    idist__os_mutex_unlock(&idist__trace_lock);
}

// Puts a task into a lane. The task is in flight or already complete.
static void idist__trace_call_start(idist__task *t) {
    char event[IDIST__TRACE_EVENT_NBYTES], args[IDIST__TRACE_ARGS_NBYTES] = "";
    idist__trace_rank *rank;
    idist__lane *lane = NULL;

    idist__trace_call_args(args, t->group, &t->call, t->seq, true);
    idist__os_mutex_lock(&idist__trace_lock);
    rank = idist__trace_track_this_rank(NULL);
    if (rank) lane = idist__trace_track_lane(rank, "request", t->started_ns);

    if (lane) {
        idist__trace_event_head(event, "B", lane->pid, lane->tid, t->started_ns);
        idist__trace_event_tail(event, "call", idist__kind_names[t->call.label], args);
        idist__trace_file_put(event);
        lane->until_ns = IDIST__FOREVER;
    }

    t->lane = lane;
    idist__os_mutex_unlock(&idist__trace_lock);
    if (lane && t->state == IDIST__TASK_DONE) idist__trace_call_done(t);
}

static idist_status idist__trace_call_blocking_call(idist_group *g, const idist__call *call,
                                                    const idist_opts *opts) {
    char args[IDIST__TRACE_ARGS_NBYTES] = "";
    bool valid = idist__check_call(g, call) == IDIST_OK;
    idist_status status;

    idist__trace_call_args(args, g, call, g->seq + 1, valid);
    idist__trace_track_enter("call", idist__kind_names[call->label], args);
    status = idist__call_locked(g, call, opts);
    idist__trace_call_leave(status);

    return status;
}

// Runs a communication call and records it in the timeline, if there is one. A call on a device
// stream without a request has no lane, because no thread waits for its end.
static idist_status idist__trace_call_in_file(idist_group *g, const idist__call *call,
                                              const idist_opts *opts) {
    idist__task *t;
    idist_status status;

    if (!idist__trace_file_is_on()) return idist__call_locked(g, call, opts);
    if (!opts->request && !idist__together_now.depth)
        return idist__trace_call_blocking_call(g, call, opts);

    if (opts->request) opts->request->impl = NULL;
    status = idist__call_locked(g, call, opts);
    if (status != IDIST_OK) return status;

    t = idist__together_now.first ? idist__together_now.last : NULL; // the task that has just begun
    if (opts->request) t = (idist__task *)opts->request->impl;
    if (t && !t->lane) idist__trace_call_start(t);

    return status;
}

// Runs a communication call, counts it and records it. Used for every communication call except
// sendrecv.
static idist_status idist__trace_call_record(idist_group *g, const idist__call *call,
                                             const idist_opts *opts) {
    idist_status status;

    if (!idist__trace_counter.owner) return idist__trace_call_in_file(g, call, opts);
    idist__trace_count_enter();
    idist__trace_count_add(g, call);
    status = idist__trace_call_in_file(g, call, opts);
    idist__trace_count_leave();

    return status;
}

// Sets the tracer, so that calls are recorded and counted from now on. Returns false if the system
// cannot run a function after a fork.
static bool idist__trace_call_install(void) {
    static const idist__tracer tracer = {idist__trace_call_joined, idist__trace_file_trim,
                                         idist__trace_call_record, idist__trace_call_wait,
                                         idist__trace_call_waited, idist__trace_call_done};
    bool installed;

    idist__os_mutex_lock(&idist__trace_lock);
    if (!idist__tracer_now() && idist__os_process_on_fork(idist__trace_track_forked))
        __atomic_store_n(&idist__tracer_set, &tracer, __ATOMIC_RELEASE);
    installed = idist__tracer_now() != NULL;
    idist__os_mutex_unlock(&idist__trace_lock);

    return installed;
}

// Sets the tracer if the environment asks for a timeline. Called before a world is joined.
static void idist__trace_call_prepare(void) {
    if (idist__os_env("IDIST_TRACE")) idist__trace_call_install();
}

__attribute__((constructor)) static void idist__trace_call_register(void) {
    idist__tracer_prepare = idist__trace_call_prepare;
}

//------------------------------------------------------------------------------
// what the program adds to the timeline
//------------------------------------------------------------------------------

bool idist_trace_on(void) { return idist__trace_file_is_on(); }

void idist_trace_begin(const char *name) {
    if (idist__trace_file_is_on()) idist__trace_track_enter("compute", name, NULL);
}

void idist_trace_end(void) {
    if (!idist__trace_file_is_on() || !idist__trace_me.depth) return;
    idist__os_mutex_lock(&idist__trace_lock);
    idist__trace_track_leave(NULL, "");
    idist__os_mutex_unlock(&idist__trace_lock);
}

static int64_t idist__trace_mark_clamp(int64_t ns) {
    if (ns > IDIST__TRACE_TIME_LIMIT_NS) return IDIST__TRACE_TIME_LIMIT_NS;
    if (ns < -IDIST__TRACE_TIME_LIMIT_NS) return -IDIST__TRACE_TIME_LIMIT_NS;
    return ns;
}

// Copies the args of a span with spaces instead of line breaks, because an event must be one line.
// In JSON, line breaks occur only between tokens. Writes "" if the args do not fit.
static void idist__trace_mark_one_line(char *out, size_t capacity, const char *args) {
    size_t i;

    out[0] = 0;
    if (!args || strlen(args) >= capacity) return;
    idist__text_copy(out, capacity, args);
    for (i = 0; out[i]; i++)
        if (out[i] == '\n' || out[i] == '\r') out[i] = ' ';
}

// Returns true if events of a category belong on the thread's track, not in a lane.
static bool idist__trace_mark_is_of_thread(const char *category) {
    return strcmp(category, "compute") == 0 || strcmp(category, "call") == 0 ||
           strcmp(category, "wait") == 0;
}

void idist_trace_span(const char *name, const char *category, int64_t start_ns, int64_t end_ns,
                      const char *args) {
    char event[IDIST__TRACE_EVENT_NBYTES], line[IDIST__TRACE_ARGS_NBYTES],
        kind[IDIST__TRACE_KIND_NBYTES];
    idist__trace_rank *rank;
    idist__lane *lane = NULL;
    int64_t duration_ns;
    bool of_thread;

    if (!idist__trace_file_is_on()) return;
    idist__trace_event_cut(kind, sizeof kind, category ? category : "compute");
    idist__trace_mark_one_line(line, sizeof line, args);
    of_thread = idist__trace_mark_is_of_thread(kind);
    start_ns = idist__trace_mark_clamp(start_ns);
    end_ns = idist__trace_mark_clamp(end_ns);
    duration_ns = end_ns > start_ns ? end_ns - start_ns : 0;

    idist__os_mutex_lock(&idist__trace_lock);
    rank = idist__trace_track_this_rank(NULL);
    if (rank && !of_thread) lane = idist__trace_track_lane(rank, kind, start_ns);

    if (rank && (of_thread || lane)) {
        idist__trace_event_head(event, "X", rank->pid, lane ? lane->tid : idist__trace_me.tid,
                                start_ns);
        idist__text_append(event, sizeof event, ",\"dur\":%lld.%03d",
                           (long long)(duration_ns / 1000), (int)(duration_ns % 1000));
        idist__trace_event_tail(event, kind, name, line);
        idist__trace_file_put(event);
        if (lane) lane->until_ns = start_ns + duration_ns;
    }

    idist__os_mutex_unlock(&idist__trace_lock);
}
