// ring/engine/start_task.h: starts calls, and checks them against other ranks
//
// idist__start_task_start runs a call in one of five ways:
//
//   send, recv                 ring/msg/
//   a group of one rank        core/, a copy
//   members share memory       ring/share/
//   members on several hosts   ring/algo/host_run.h
//   otherwise                  ring/algo/choose.h, messages between ranks
//
// A collective of several ranks first records its fingerprint. Then it compares this fingerprint
// with those that other ranks have already sent for the call with the same number.
#pragma once

#include "os/clock.h"
#include "base/mem.h"
#include "launch/env.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/fingerprint.h"
#include "core/self.h"
#include "ring/shm/doorbell.h"
#include "ring/msg/ring_model.h"
#include "ring/msg/op.h"
#include "ring/msg/transfer.h"
#include "ring/msg/history.h"
#include "ring/msg/send.h"
#include "ring/msg/recv.h"
#include "ring/share/share.h"
#include "ring/algo/host_run.h"
#include "ring/algo/choose.h"
#include "ring/engine/progress.h"

static void idist__start_task_compare(idist__ring *ring, const idist__task *t) {
    idist_group *g = t->group;
    const idist__ring_group *rg = idist__ring_group_of(g);
    const idist__fingerprint *ours = &rg->history[t->seq % IDIST__HISTORY];
    int i;

    for (i = 0; i < g->size; i++) {
        uint64_t key = idist__index_key(g->ctx, g->ranks[i], false, t->seq);
        idist__index_node *hook = ring->messages[key % IDIST__BUCKETS].first;
        const char *field = NULL;

        if (i == g->rank) continue;
        if (rg->seen[i].seq == t->seq && rg->seen[i].fingerprint.seq == t->seq)
            field = idist__fingerprint_difference(&rg->seen[i].fingerprint, ours);
        if (field)
            idist__history_mismatch(ring, g, g->ranks[i], &rg->seen[i].fingerprint, ours, field);

        for (; hook && !ring->failed; hook = hook->next) {
            const idist__message *msg = idist__index_message(hook);

            if (msg->peer != g->ranks[i] || msg->frame.ctx != g->ctx ||
                msg->frame.fingerprint.seq != t->seq)
                continue;
            if (msg->frame.fingerprint.kind == IDIST__SEND || msg->frame.type > IDIST__CTS)
                continue;
            idist__history_agrees(ring, g, g->ranks[i], &msg->frame);
        }
    }
}

// Tries to complete a blocking call without creating a task, while no task is running. Returns
// false if the call needs a task.
static bool idist__start_task_quick(idist_group *g, const idist__call *call) {
    const idist__link *l;

    if (call->kind == IDIST__SEND) return idist__send_quick(g, call);
    if (call->kind != IDIST__RECV) return idist__share_quick(g, call);
    l = idist__recv_link(g, call);
    if (!l) return false;

    return l->at < l->end ? idist__progress_take(g, call) : idist__recv_quick(g, call);
}

static bool idist__start_task_quick_message(idist_group *g, const idist__call *call) {
    return call->kind == IDIST__SEND ? idist__send_quick(g, call) : idist__progress_take(g, call);
}

// Before a call starts, reads the frames that have arrived, because they may report that the call's
// group has failed.
static void idist__start_task_listen(idist__ring *ring, const idist__task *t) {
    if (t->started_ns - ring->last_start_ns > IDIST__MS && !t->group->inner) {
        idist__progress_move_all(ring);
        idist__ring_settle(ring);
        if (t->state == IDIST__TASK_DONE) return;
    }

    ring->last_start_ns = t->started_ns;

    // A sleeping rank looks for processes that have ended, but this rank may never sleep.
    if (!t->group->inner) {
        idist__progress_look(ring, t->started_ns, false);
        idist__ring_settle(ring);
    }
}

static void idist__start_task_start_collective(idist__ring *ring, idist__task *t,
                                               idist__algorithm algorithm) {
    bool shared = idist__share_serves(algorithm);
    bool by_host = algorithm == IDIST__ALGO_BY_HOST, prepared = true;

    if (shared) prepared = idist__share_prepare(t, algorithm);
    else if (by_host) idist__host_run_prepare(t);
    else prepared = idist__choose_begin(t, algorithm);

    if (!prepared) {
        idist__ring_fail_memory(ring, t->group);
        return;
    }

    idist__history_add(t, idist__op_of(t), algorithm);
    idist__start_task_compare(ring, t);

    if (shared) {
        idist__share_start(t);
    } else if (by_host) {
        idist__host_run_start(t);
    } else {
        idist__choose_run(t);
        if (!ring->failed) idist__op_run(t);
    }
}

static void idist__start_task_start(idist__task *t) {
    idist__ring *ring = idist__ring_of(t->group->w);
    bool collective = idist__kind_is_collective(t->call.kind);
    idist__algorithm algorithm = IDIST__ALGO_AUTO;

    if (ring->shm) idist__doorbell_widen(ring->shm);
    if (collective) idist__mem_clear(t->impl, sizeof(idist__op));
    else idist__op_of(t)->transfer = NULL;

    if (collective && t->group->size > 1) algorithm = idist__choose_algorithm(t->group, &t->call);

    idist__start_task_listen(ring, t);
    if (t->state == IDIST__TASK_DONE) return;

    if (t->call.kind == IDIST__SEND) idist__send_start(t);
    else if (t->call.kind == IDIST__RECV) idist__recv_start(t);
    else if (t->group->size == 1) idist__self_collective(t);
    else idist__start_task_start_collective(ring, t, algorithm);

    idist__ring_settle(ring);
}
