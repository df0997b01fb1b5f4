// trace/trace_track.h: the rank and the thread that an event belongs to
//
// Track 0 of a rank is the thread that joined the world. Other threads get the next tracks with
// their first event. Tracks from IDIST__TRACE_FIRST_LANE on are lanes, which show operations in
// flight. All functions here are called with the lock held, unless a comment says otherwise.
#pragma once

#include "os/clock.h"
#include "os/thread.h"
#include "os/file.h"
#include "base/text.h"
#include "base/mem.h"
#include "core/model.h"
#include "trace/trace_file.h"

#define IDIST__TRACE_FIRST_LANE 1000

// A track for operations that run alongside the threads, one at a time.
typedef struct idist__lane {
    struct idist__lane *next;
    int pid, tid;
    char kind[IDIST__TRACE_KIND_NBYTES]; // "request", or a category
    int64_t until_ns;                    // when the lane becomes free
} idist__lane;

// A rank of this process. A process whose threads are ranks has several ranks.
typedef struct idist__trace_rank {
    struct idist__trace_rank *next;
    int pid, thread_count, lane_count;
    idist__lane *lanes;
} idist__trace_rank;

static __thread struct idist__trace_thread {
    idist__trace_rank *rank;
    int tid;
    int depth; // number of begins without an end
} idist__trace_me;

// Returns the rank of this process in the world `w`, or the first rank if `w` is NULL. Creates the
// rank of `w` if it does not exist. Returns NULL if memory is exhausted or there is no rank.
static idist__trace_rank *idist__trace_track_find_rank(const idist__world *w) {
    idist__trace_rank **at = &idist__trace.ranks, *created;
    char text[128];

    while (w && *at && (*at)->pid != w->group.rank) at = &(*at)->next;
    if (*at || !w) return *at;

    created = (idist__trace_rank *)calloc(1, sizeof *created);
    if (!created) return NULL;
    created->pid = w->group.rank;
    *at = created;
    snprintf(text, sizeof text, "rank %d on %s", w->group.rank, w->about.hostname);
    idist__trace_event_label(created->pid, 0, "process_name", text);

    return created;
}

// Returns the rank of this thread, or NULL if memory is exhausted or there is no rank. A thread
// without a rank gets the rank of this process in the world `w`, or the first rank if `w` is NULL.
// The thread also gets a track of this rank.
static idist__trace_rank *idist__trace_track_this_rank(const idist__world *w) {
    struct idist__trace_thread *me = &idist__trace_me;
    char text[128];

    if (me->rank) return me->rank;
    me->rank = idist__trace_track_find_rank(w);
    if (!me->rank) return NULL;

    me->tid = me->rank->thread_count++;
    snprintf(text, sizeof text, me->tid ? "thread %d" : "program", me->tid);
    idist__trace_event_label(me->rank->pid, me->tid, "thread_name", text);

    return me->rank;
}

// Returns a lane of this kind that is free from start_ns on. Returns NULL if memory for a new lane
// cannot be allocated.
static idist__lane *idist__trace_track_lane(idist__trace_rank *rank, const char *kind,
                                            int64_t start_ns) {
    idist__lane **at = &rank->lanes, *created;
    int number = 1; // number of the lane among the lanes of this kind
    char text[80];

    for (; *at; at = &(*at)->next) {
        if (strcmp((*at)->kind, kind) != 0) continue;
        if ((*at)->until_ns <= start_ns) return *at;
        number++;
    }

    created = (idist__lane *)calloc(1, sizeof *created);
    if (!created) return NULL;
    created->pid = rank->pid;
    created->tid = IDIST__TRACE_FIRST_LANE + rank->lane_count++;
    idist__text_copy(created->kind, sizeof created->kind, kind);
    *at = created;
    snprintf(text, sizeof text, number > 1 ? "%s %d" : "%s", created->kind, number);
    idist__trace_event_label(created->pid, created->tid, "thread_name", text);

    return created;
}

// Resets everything in a child process after fork. The child has neither a file nor tracks until it
// joins a world itself. Takes no lock, because another thread may have held the lock during the
// fork.
static void idist__trace_track_forked(void) {
    while (idist__trace.ranks) {
        idist__trace_rank *rank = idist__trace.ranks;

        idist__trace.ranks = rank->next;
        idist__mem_free_list(NULL, rank->lanes);
        free(rank);
    }

    idist__trace_file_unmap();
    if (idist__trace.on) idist__os_file_close(&idist__trace.file);
    memset(&idist__trace, 0, sizeof idist__trace);
    memset(&idist__trace_me, 0, sizeof idist__trace_me);
    idist__os_mutex_init(&idist__trace_lock);
}

// Records a begin event on the track of this thread. Takes the lock.
static void idist__trace_track_enter(const char *category, const char *name, const char *args) {
    char event[IDIST__TRACE_EVENT_NBYTES];
    int64_t now_ns = idist__os_clock_now_ns();
    const idist__trace_rank *rank;

    idist__os_mutex_lock(&idist__trace_lock);
    rank = idist__trace_track_this_rank(NULL);

    if (rank) {
        idist__trace_event_head(event, "B", rank->pid, idist__trace_me.tid, now_ns);
        idist__trace_event_tail(event, category, name, args);
        idist__trace_file_put(event);
        idist__trace_me.depth++;
    }

    idist__os_mutex_unlock(&idist__trace_lock);
}

// Records an end event for the last begin of this thread, or for the operation in `lane` if `lane`
// is not NULL. `status` is "" for the events that the program adds, which have no status.
static void idist__trace_track_leave(const idist__lane *lane, const char *status) {
    struct idist__trace_thread *me = &idist__trace_me;
    int pid = lane ? lane->pid : me->rank->pid, tid = lane ? lane->tid : me->tid;
    char event[IDIST__TRACE_EVENT_NBYTES];

    idist__trace_event_head(event, "E", pid, tid, idist__os_clock_now_ns());
    if (status[0]) idist__text_append(event, sizeof event, ",\"args\":{\"status\":\"%s\"}", status);
    idist__text_append(event, sizeof event, "}");
    if (!lane) me->depth--;
    idist__trace_file_put(event);
}
