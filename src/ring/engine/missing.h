// ring/engine/missing.h: names the ranks that a call waits for
//
// A warning or an error about a late call names the ranks that hold it up. The text also names the
// rank that got no answer, because after a partial network failure, a rank that is alive may find
// itself in the list.
#pragma once

#include "base/text.h"
#include "base/dtype.h"
#include "launch/env.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/explain.h"
#include "ring/msg/ring_model.h"
#include "ring/msg/op.h"
#include "ring/share/share.h"
#include "ring/algo/host_run.h"
#include "ring/engine/deadlock.h"
#include "ring/engine/ask.h"

// Appends a note to a text if this rank ran out of descriptors during the call. In that case this
// rank could not connect to the ranks that the text names.
static void idist__missing_fds(const idist__task *t, char *text, size_t capacity) {
    if (idist__ring_of(t->group->w)->no_fds_ns > t->started_ns)
        idist__text_append(text, capacity,
                           "; this rank is out of file descriptors: raise ulimit -n");
}

static bool idist__missing_is_running(const idist_group *g, uint32_t seq) {
    const idist__task *t = g->w->tasks.running;

    while (t && (t->group != g || t->seq != seq)) t = t->next;

    return t != NULL;
}

// Returns the last call before t that this rank has completed and that depends on every member. All
// members have entered such a call. Returns NULL if the history contains no such call.
static const idist__fingerprint *idist__missing_common(const idist__task *t) {
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    uint32_t back;

    for (back = 1; back < IDIST__HISTORY; back++) {
        const idist__fingerprint *past = &rg->history[(t->seq - back) % IDIST__HISTORY];
        bool sums = past->kind == IDIST__ALL_REDUCE &&
                    idist__dtype_is_builtin((idist_dtype)past->dtype) &&
                    past->check; // with 0 elements no rank waits

        if (past->seq != t->seq - back) return NULL;
        if (past->algorithm & IDIST__ON_DEVICE || !(sums || past->kind == IDIST__BARRIER)) continue;
        if (!idist__missing_is_running(t->group, past->seq)) return past;
    }

    return NULL;
}

// Returns the last call in which this rank saw a member take part. If the member must have entered
// a later call, returns that call instead, because in many algorithms a rank receives from only a
// few others.
static const idist__fingerprint *idist__missing_last_seen(const idist__task *t, int rank) {
    const idist__seen *seen = &idist__ring_group_of(t->group)->seen[rank];
    const idist__fingerprint *common = idist__missing_common(t);

    if (common && (int32_t)(common->seq - seen->seq) > 0) return common;

    return &seen->fingerprint;
}

// Names the peer of a message, and the rank that the peer waits for. Returns the number of ranks
// that hold up the call.
static int idist__missing_peer(const idist__task *t, char *text, size_t capacity) {
    const idist_group *g = t->group;
    int whom = idist__absent_whom(t), count = 1;

    if (t->call.kind == IDIST__RECV && !idist__deadlock_is_unmatched(t)) {
        if (!t->patient || whom < 0) return 0; // the receive gets more time
        idist__text_append(text, capacity, "rank %d on %s, whose message has begun to arrive", whom,
                           g->w->nodes[whom].hostname);
    } else {
        count = idist__explain_missing_peer(t, text, capacity);
    }

    if (whom >= 0) idist__ask_explain(idist__ring_of(g->w), whom, text, capacity);
    idist__missing_fds(t, text, capacity);

    return count;
}

// Names the member that this rank needs, if that member has said which rank it waits for. Called
// when every member has entered the call and answers, but the data does not arrive. Returns the
// number of ranks named.
static int idist__missing_needed(const idist__task *t, char *text, size_t capacity) {
    const idist_group *g = t->group;
    char chain[300] = "";
    int rank = idist__absent_next(t, 0, IDIST__NEEDED);

    if (rank == g->size) return 0;
    if (!idist__ask_explain(idist__ring_of(g->w), g->ranks[rank], chain, sizeof chain)) return 0;
    idist__explain_missing_rank(g, rank, idist__missing_last_seen(t, rank), 0, text, capacity);
    idist__text_append(text, capacity, "%s", chain);

    return 1;
}

// Names the members that hold up a call, and returns their number. These are the members that match
// the first row of order[] that any member matches. A rank that has not entered the call may itself
// be waiting in an earlier call; in that case it answers. A rank that has entered the call may have
// been stopped since, or may have finished the call and be computing. In the latter case, this rank
// needs nothing from it.
static int idist__missing_name(idist__task *t, char *text, size_t capacity) {
    static const int order[] = {IDIST__ABSENT | IDIST__SILENT, IDIST__SILENT | IDIST__NEEDED,
                                IDIST__ABSENT, IDIST__SILENT};
    idist_group *g = t->group;
    const idist__ring *ring = idist__ring_of(g->w);
    idist__task *step;
    int i, row, first = 0, count = 0;

    if (idist__kind_is_p2p(t->call.kind)) return idist__missing_peer(t, text, capacity);

    step =
        idist__op_of(t)->algorithm == IDIST__ALGO_BY_HOST ? idist__host_run_awaited_step(t) : NULL;

    if (step && !t->late.announced) { // no member has been asked yet
        if (!idist__missing_name(step, text, capacity))
            idist__text_append(text, capacity, "ranks of another host");
        return 1;
    }

    idist__share_update_seen(t);

    for (row = 0; row < (int)IDIST__COUNT_OF(order) && !count; row++) {
        first = i = idist__absent_next(t, 0, order[row]);
        for (; i < g->size; i = idist__absent_next(t, i + 1, order[row]))
            idist__explain_missing_rank(g, i, idist__missing_last_seen(t, i), count++, text,
                                        capacity);
    }

    if (count > 8) idist__text_append(text, capacity, " and %d more", count - 8);
    if (!count) count = idist__missing_needed(t, text, capacity);
    else if (order[row - 1] & IDIST__SILENT)
        idist__text_append(text, capacity, ", which %s not answer rank %d",
                           count > 1 ? "do" : "does", g->w->group.rank);
    else idist__ask_explain(ring, g->ranks[first], text, capacity);
    idist__missing_fds(t, text, capacity);

    return count;
}
