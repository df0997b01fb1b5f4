// train/agree.h: gives all ranks the same status
//
// A function that makes several collective calls must fail on all ranks or on none. Such a function
// takes these steps:
//
//     idist__agree_enter     local: checks that calls on this group can succeed
//     local work             ends with a status that may differ between ranks
//     idist__agree           collective: all ranks get the status of the first rank that failed
//     collective calls       a rank that cannot make its next call uses idist__agree_break
//
// Agreeing on success costs one all_reduce of 4 bytes. Agreeing on a failure costs a broadcast as
// well.
#pragma once

#include "os/thread.h"
#include "base/fail.h"
#include "base/text.h"
#include "core/group.h"
#include "core/check.h"
#include "core/call.h"

// The message that a failed rank broadcasts.
typedef struct idist__agree_failure {
    int32_t status;
    char text[900];
} idist__agree_failure;

// Checks that calls on this group can succeed, and sets *out to the options for calls on host
// memory. Local.
static idist_status idist__agree_enter(const char *name, const idist_opts *opts, idist_opts *out) {
    idist_group *group = NULL;
    idist_status status = idist__check_blocking(name, opts);

    memset(out, 0, sizeof *out);
    if (status != IDIST_OK) return status;
    if (opts) *out = *opts;
    out->stream = NULL;

    status = idist__call_enter(name, out->group, &group); // locks the world
    if (status != IDIST_OK) return status;
    if (group->rank < 0)
        status = idist__fail(IDIST_ERR_STATE, "%s: this rank is not a member of the group", name);
    else if (group->status != IDIST_OK)
        status = idist__fail(group->status, "%s: the group failed earlier: %s", name, group->cause);
    idist__os_mutex_unlock(&group->w->lock);

    return status;
}

// Returns the status of the first rank whose `mine` is not IDIST_OK, and sets the error text to
// that rank's. Returns IDIST_OK if there is no such rank. Collective.
static idist_status idist__agree(idist_status mine, const idist_opts *opts) {
    idist__agree_failure failure;
    int rank = idist_group_rank(opts->group);
    int32_t first_failed = mine == IDIST_OK ? INT32_MAX : rank;
    idist_status status;

    memset(&failure, 0, sizeof failure);
    failure.status = mine;
    if (mine != IDIST_OK) idist__text_copy(failure.text, sizeof failure.text, idist__me.text);

    status = idist_all_reduce(&first_failed, &first_failed, 1, IDIST_I32, IDIST_MIN, opts);
    if (status != IDIST_OK || first_failed == INT32_MAX) return status;
    status = idist_broadcast(&failure, sizeof failure, IDIST_U8, first_failed, opts);
    if (status != IDIST_OK) return status;

    status = (idist_status)failure.status;
    if (first_failed == rank) return idist__fail(status, "%s", failure.text);

    return idist__fail(status, "%s (on rank %d)", failure.text,
                       opts->group ? opts->group->ranks[first_failed] : first_failed);
}

// Fails the group, because this rank cannot make a call that the other ranks wait for. Otherwise
// the other ranks would hang. Returns `status`.
static idist_status idist__agree_break(const char *name, idist_group *group, idist_status status) {
    char text[400];
    idist_group *g = NULL;
    bool failed_before;

    snprintf(text, sizeof text, "%s: rank %d cannot continue: %.300s", name,
             idist_group_rank(group), idist_last_error());
    if (idist__call_enter(name, group, &g) != IDIST_OK) return status;

    failed_before = g->status != IDIST_OK; // if so, all ranks know already
    idist__group_fail(g, status, text);
    idist__group_flush(g);
    idist__os_mutex_unlock(&g->w->lock);

    return failed_before ? status : idist__fail(status, "%s", text);
}

static idist_status idist__agree_no_memory(const char *name, idist_group *group) {
    return idist__agree_break(name, group, idist__fail(IDIST_ERR_NO_MEMORY, "no memory"));
}
