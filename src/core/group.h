// core/group.h: makes, frees and fails groups
#pragma once

#include "os/clock.h"
#include "os/thread.h"
#include "base/text.h"
#include "base/mem.h"
#include "base/log.h"
#include "launch/config.h"
#include "core/model.h"
#include "core/world.h"
#include "core/task.h"

IDIST__UNUSED static int idist__group_world_rank(const idist_group *g, int rank) {
    return g->ranks[rank];
}

static void idist__group_set(idist_group *g, uint64_t ctx, const int *ranks, int n) {
    int i;

    g->ctx = ctx;
    g->size = n;
    g->rank = -1;

    for (i = 0; i < n; i++) {
        g->ranks[i] = ranks[i];
        if (ranks[i] == g->w->group.rank) g->rank = i;
    }
}

// Returns a new group with space for n ranks, or NULL if memory cannot be allocated. The group is
// in no list yet. A freed group keeps its struct, marked as freed, until a new group reuses the
// struct. So a call with a stale handle gets an error.
static idist_group *idist__group_new(idist__world *w, int n) {
    idist_group *g = w->groups.freed;

    if (g) {
        w->groups.freed = g->next;
        memset(g, 0, sizeof *g);
    } else {
        g = idist__ended_reuse(&idist__ended_groups, IDIST__ENDED_GROUPS, sizeof *g);
    }

    if (!g) return NULL;
    g->w = w;
    g->rank = -1;
    g->ranks = (int *)idist__mem_alloc(&w->cfg.mem, sizeof(int) * (size_t)(n + 1));
    g->impl = idist__mem_alloc(&w->cfg.mem, w->backend->group_nbytes);
    if (g->ranks && g->impl) return g;

    idist__mem_free(&w->cfg.mem, g->ranks);
    idist__mem_free(&w->cfg.mem, g->impl);
    memset(g, 0, sizeof *g);
    idist__ended_keep(&idist__ended_groups, g);

    return NULL;
}

// Ends a group while a thread is still inside a call. That thread can still read the struct, and
// sees that the group has failed. The thread does not wait until the failure has been sent to the
// other members.
static void idist__group_abandon(idist_group *g) {
    if (g->status == IDIST_OK) {
        g->status = IDIST_ERR_STATE;
        idist__text_copy(g->cause, sizeof g->cause, "the world was closed");
    }

    g->failure_flushed = true;
    g->freed = true;
}

static void idist__group_free(idist_group *g) {
    idist_group **at;
    idist__world *w = g->w;

    for (at = &w->group.next; *at && *at != g; at = &(*at)->next) continue;

    if (*at) {
        *at = g->next;
        if (g->rank >= 0) w->backend->group_close(g);
    }

    idist__mem_free_list(&w->cfg.mem, g->planned);
    g->planned = NULL;

    if (w->life.abandoned) {
        idist__group_abandon(g);
        return;
    }

    idist__mem_free(&w->cfg.mem, g->ranks);
    idist__mem_free(&w->cfg.mem, g->impl);
    memset(g, 0, sizeof *g);
    g->w = w;
    g->rank = -1;
    g->freed = true;
    g->next = w->groups.freed;
    w->groups.freed = g;
}

// Fails a group, unless it has failed already. Ends its tasks, and tells the other members, even if
// this rank learned of the failure from one of them. Otherwise a member that sees our connection
// end before it receives the reason from us would report us as the cause. Later calls on the group
// fail.
static void idist__group_fail(idist_group *g, idist_status status, const char *cause) {
    idist__world *w = g->w;
    idist_group *child;
    idist__task *t, *next;

    if (g->status != IDIST_OK) return;
    g->status = status;
    idist__text_copy(g->cause, sizeof g->cause, cause);
    if (!g->inner)
        idist__log_print(&w->log, IDIST_LOG_INFO, "%s: %s", idist_status_name(status), cause);
    // idist__config_tell_lost marks a failure of this rank as a consequence of another rank's
    // failure. An abort of a smaller group does not count: this rank may continue, and fail by
    // itself later.
    if (!w->life.is_cause &&
        (status == IDIST_ERR_PEER_LOST || (status == IDIST_ERR_ABORTED && g == &w->group)))
        idist__config_tell_lost(&w->cfg);
    w->backend->tell(g);

    for (t = w->tasks.running; t; t = next) {
        next = t->next;
        if (t->group != g) continue;
        w->backend->cancel(t);
        idist__task_complete(t, status, g->cause);
        next = w->tasks.running; // the backend may have ended other tasks
    }

    for (child = w->group.next; child; child = child->next)
        if (child->parent == g) idist__group_fail(child, status, cause);
    idist__world_wake_driver(w); // another thread may wait for a task that has ended
}

// Fails a group because this rank lacks something or could not do something. The text names this
// rank and its host to the other members.
static void idist__group_fail_self(idist_group *g, idist_status status, const char *what) {
    char cause[400];

    snprintf(cause, sizeof cause, "rank %d on %s %s", g->w->group.rank, g->w->about.hostname, what);
    idist__group_fail(g, status, cause);
}

static void idist__group_fail_memory(idist_group *g) {
    idist__group_fail_self(g, IDIST_ERR_NO_MEMORY, "is out of memory");
}

// Fails every group of a lost rank. If the world has already failed, the rank may have ended
// because of that failure. Then the status and the first part of the text come from the world's
// failure.
IDIST__UNUSED static void idist__group_lose_rank(idist__world *w, int rank, const char *how) {
    idist_status first = w->group.status, status = first != IDIST_OK ? first : IDIST_ERR_PEER_LOST;
    idist_group *g;
    char cause[400];
    int i;

    cause[0] = 0;
    if (first != IDIST_OK)
        idist__text_append(cause, sizeof cause, "%.*s; after that ", (int)(sizeof cause / 2),
                           w->group.cause);
    idist__text_append(cause, sizeof cause, "rank %d on %s was lost: %s", rank,
                       w->nodes[rank].hostname, how);

    for (g = &w->group; g; g = g->next)
        for (i = 0; i < g->size && g->rank >= 0; i++)
            if (g->ranks[i] == rank) idist__group_fail(g, status, cause);
}

enum { IDIST__FLUSH_MS = 100 };

// Waits up to IDIST__FLUSH_MS until the reason of a failure has been sent to the other members.
// This is needed because a caller that gets an error may exit at once, and its connections end with
// it.
static void idist__group_flush(idist_group *g) {
    idist__world *w = g->w;

    if (g->status == IDIST_OK || g->failure_flushed || w->wait.driver != IDIST__DRIVER_NONE) return;
    if (w->progress.stops) return; // the closing thread delivers the reason
    g->failure_flushed = true;
    w->wait.driver = IDIST__DRIVER_CALLER;
    w->backend->flush(w, idist__os_clock_deadline(IDIST__FLUSH_MS));
    w->wait.driver = IDIST__DRIVER_NONE;
    if (w->wait.blocked_count) idist__os_cond_broadcast(&w->changed);
}
