// calls/one_rank.h: runs a function on one rank first, or on one rank only
#pragma once

#include "os/thread.h"
#include "base/fail.h"
#include "base/text.h"
#include "core/kind.h"
#include "core/check.h"
#include "core/call.h"
#include "calls/collective.h"

enum { IDIST__ONE_THREW = INT32_MIN }; // the result of a function that threw an exception

typedef struct idist__one_result { // the result of a function
    int32_t code;                  // return value, or IDIST__ONE_THREW after an exception
    char thrown[256];              // text of the exception
} idist__one_result;

// Runs the program's function, which may call idist, and fills *result.
IDIST__NOINLINE static void idist__one_rank_run(idist_task_fn fn, void *arg,
                                                idist__one_result *result) {
    int code = 0;

    IDIST__TRY(code = fn(arg));
    idist__text_copy(result->thrown, sizeof result->thrown, idist__me.thrown);
    idist__me.thrown[0] = 0;
    result->code = result->thrown[0] ? IDIST__ONE_THREW : code;
}

static idist_status idist__one_rank_own_result(idist__kind label, const idist__one_result *result) {
    if (!result->code) return IDIST_OK;
    if (result->code == IDIST__ONE_THREW)
        return idist__fail(IDIST_ERR_CALLBACK, "%s: the function threw an exception: %s",
                           idist__kind_names[label], result->thrown);

    return idist__fail(IDIST_ERR_CALLBACK, "%s: the function failed on this rank with %d",
                       idist__kind_names[label], (int)result->code);
}

// Broadcasts the function's result from `rank`, so that a failure ends the wait of the other ranks
// instead of prolonging it.
static idist_status idist__one_rank_share_result(idist__kind label, int rank, bool mine,
                                                 const idist__one_result *own,
                                                 const idist_opts *opts) {
    int32_t shared = mine ? own->code : 0;
    idist_status status = idist__collective_run(IDIST__BROADCAST, label, NULL, &shared, 1,
                                                IDIST_I32, IDIST_SUM, rank, opts);

    if (status != IDIST_OK || !shared) return status;
    if (mine && own->code == IDIST__ONE_THREW) return idist__one_rank_own_result(label, own);
    if (shared == IDIST__ONE_THREW)
        return idist__fail(IDIST_ERR_CALLBACK, "%s: the function threw an exception on rank %d",
                           idist__kind_names[label], rank);

    return idist__fail(IDIST_ERR_CALLBACK, "%s: the function failed on rank %d with %d",
                       idist__kind_names[label], rank, (int)shared);
}

static idist_status idist__one_rank_check_rank(idist__kind label, int rank, int size) {
    if (rank >= 0 && rank < size) return IDIST_OK;
    return idist__fail(IDIST_ERR_ARG, "%s: rank must be between 0 and %d, got %d",
                       idist__kind_names[label], size - 1, rank);
}

// Makes the group of the members on this host, unless the group exists already. Collective.
static idist_status idist__one_rank_make_host_group(idist_group *g) {
    idist_group *made = NULL;
    idist_status status;

    if (g->host_group || g->rank < 0) return IDIST_OK;
    status = idist_split(g, g->w->nodes[g->w->group.rank].node_rank, 0, &made);
    if (status == IDIST_OK) g->host_group = made;

    return status;
}

idist_status idist_one_rank_first(idist_task_fn fn, void *arg, int rank, bool local,
                                  const idist_opts *opts) {
    idist_opts own_opts;
    idist_status status;
    idist_group *g, *among;
    idist__one_result result;
    bool first;

    memset(&result, 0, sizeof result);
    memset(&own_opts, 0, sizeof own_opts);
    if (opts) own_opts = *opts;
    if (!fn) return idist__fail(IDIST_ERR_ARG, "one_rank_first: fn is NULL");
    status = idist__check_blocking("one_rank_first", opts);
    if (status == IDIST_OK) status = idist__call_enter("one_rank_first", own_opts.group, &g);
    if (status != IDIST_OK) return status;
    if (g->rank < 0)
        status =
            idist__fail(IDIST_ERR_STATE, "one_rank_first: this rank is not a member of the group");
    else if (g->status != IDIST_OK)
        status = idist__fail(g->status, "one_rank_first: the group failed earlier: %s", g->cause);
    idist__os_mutex_unlock(&g->w->lock);

    if (status == IDIST_OK && local) status = idist__one_rank_make_host_group(g);
    if (status != IDIST_OK) return status;
    if (local) own_opts.group = g->host_group;
    among = local ? g->host_group : g;
    status = idist__one_rank_check_rank(IDIST__ONE_RANK_FIRST, rank, idist_group_size(among));
    if (status != IDIST_OK) return status;

    first = idist_group_rank(among) == rank;
    if (first) idist__one_rank_run(fn, arg, &result);
    status = idist__one_rank_share_result(IDIST__ONE_RANK_FIRST, rank, first, &result, &own_opts);
    if (status != IDIST_OK || first) return status;
    idist__one_rank_run(fn, arg, &result);

    return idist__one_rank_own_result(IDIST__ONE_RANK_FIRST, &result);
}

idist_status idist_one_rank_only(idist_task_fn fn, void *arg, int rank, bool barrier,
                                 const idist_opts *opts) {
    idist_group *g = NULL;
    idist_status status;
    bool mine = false;
    idist__one_result result;

    memset(&result, 0, sizeof result);
    if (!fn) return idist__fail(IDIST_ERR_ARG, "one_rank_only: fn is NULL");
    status = idist__check_blocking("one_rank_only", opts);
    if (status == IDIST_OK)
        status = idist__call_enter("one_rank_only", opts ? opts->group : NULL, &g);

    if (g) {
        status = idist__one_rank_check_rank(IDIST__ONE_RANK_ONLY, rank, g->size);
        mine = g->rank == rank;
        idist__os_mutex_unlock(&g->w->lock);
    }

    if (status != IDIST_OK) return status;

    if (mine) idist__one_rank_run(fn, arg, &result);
    if (barrier)
        return idist__one_rank_share_result(IDIST__ONE_RANK_ONLY, rank, mine, &result, opts);

    return idist__one_rank_own_result(IDIST__ONE_RANK_ONLY, &result);
}
