// ring/algo/host.h: several hosts: first inside each host, then between their leaders
//
// Ranks of one host share memory, while hosts share a slower network. So a collective over several
// hosts becomes a sequence of collectives on two smaller groups:
//
//   near    the members on this host
//   leads   the first member of each host, its lead
//
//                    step 1                   step 2                     step 3
//   all_reduce       near: reduce to lead     leads: all_reduce          near: broadcast
//   reduce           near: reduce to lead     leads: reduce to the       near: the lead sends it
//                                             lead of the root's host    to the root
//   reduce_scatter   near: reduce to lead     leads: reduce, one per     near: scatter
//                                             host
//   all_gather       near: gather on lead     leads: all_gatherv         near: broadcast
//   broadcast        near, on root's host     leads: broadcast           near, on other hosts
//   barrier          near                     leads                      near
//
//   bytes over the network   what one rank sends, per host instead of per rank
//   latency                  two local steps, and one among as many ranks as there are hosts
//
// A large all_reduce, reduce or broadcast is cut into pieces, so that the network is used from the
// first piece to the last:
//
//   round      0   1   2   3
//   step 1     a   b   c
//   step 2         a   b   c
//   step 3             a   b   c
//
// A call makes a plan, a list of steps in rounds, and carries out one round after the other; each
// step is a task of its own on near or leads. Calls on the same group queue up
// (idist__ring_group.first), so that all ranks take the steps in the same order.
//
//   idist__host_serves      whether a call can go this way
//   idist__host_start       appends it to the queue, and runs it if the queue was empty
//   idist__host_run         makes the plan; then for each round: begin, wait, divide an average
//   idist__host_progress    resumes the first call of each group once its round has completed
//
// Used when a group spans several hosts, at least one of them has several members, and IDIST_ALGO
// is auto. These are made of messages among all ranks instead:
//
//   reductions of narrow floats                they would be rounded twice
//   operations that do not commute             they need the order of the ranks
//   all_gather, reduce_scatter                 only if the ranks of some host are not consecutive
//   gather, scatter, all_to_all, scan, v-forms
#pragma once

#include "base/mem.h"
#include "base/dtype.h"
#include "base/reduce_op.h"
#include "base/reduce.h"
#include "launch/env.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/world.h"
#include "core/fingerprint.h"
#include "core/task.h"
#include "core/extent.h"
#include "ring/msg/ring_model.h"
#include "ring/msg/op.h"

typedef struct idist__host_step { // a call on near or leads
    idist_group *group;
    idist__kind kind;
    const void *send;
    void *recv;
    size_t count;
    const size_t *recvcounts, *recvdispls; // of an all_gatherv
    int root;
    size_t round;
    bool completes_sum; // recv holds the sum over all ranks: divide it for AVG
} idist__host_step;

enum { IDIST__HOST_STEPS = 3 }; // for each piece, without one reduction per host in reduce_scatter
// Size of a piece, per host: smaller pieces cost more in latency than they gain. On a network of
// high latency, so many times the bandwidth-delay product, because the hosts synchronize after each
// piece.
#define IDIST__HOST_PIECE_BYTES ((size_t)512 * 1024)
#define IDIST__HOST_PIECE_NETWORKS 8

static uint64_t idist__host_of(const idist_group *g, int rank) {
    return g->w->nodes[g->ranks[rank]].host;
}

static bool idist__host_serves(const idist_group *g, const idist__call *c) {
    const idist__ring_group *rg = idist__ring_group_of(g);
    int setting = g->w->cfg.algorithm;

    if (!rg->nhosts || (setting != IDIST__ALGO_AUTO && setting != IDIST__ALGO_REMOTE)) return false;

    switch (c->kind) {
    case IDIST__BARRIER:
    case IDIST__BROADCAST: return true;
    case IDIST__ALL_GATHER: return rg->in_order;
    case IDIST__ALL_REDUCE:
    case IDIST__REDUCE: break;
    case IDIST__REDUCE_SCATTER:
        if (!rg->in_order) return false;
        break;
    default: return false;
    }

    if (idist__dtype_is_narrow(c->dtype)) return false;

    return !idist__reduce_op_is_user(c->op) || idist__world_user_op(g, c)->commutative;
}

// ---- the plan of a call ----

typedef struct idist__host_piece { // of a call's elements
    size_t at;                     // in bytes
    size_t count;
} idist__host_piece;

// How many pieces a call has: the same on all ranks.
static size_t idist__host_piece_count(const idist__task *t) {
    const idist__op *o = idist__op_of(t);
    uint64_t of_host = IDIST__HOST_PIECE_NETWORKS * t->group->w->network_nbytes, nbytes;
    bool is_cut = t->call.kind == IDIST__ALL_REDUCE || t->call.kind == IDIST__REDUCE ||
                  t->call.kind == IDIST__BROADCAST;

    if (of_host < IDIST__HOST_PIECE_BYTES) of_host = IDIST__HOST_PIECE_BYTES;
    nbytes = of_host * (uint64_t)idist__ring_group_of(t->group)->nhosts;

    return is_cut && o->nbytes > nbytes ? (size_t)(o->nbytes / nbytes) : 1;
}

// Piece number `index` of n. False: there is none.
static bool idist__host_cut(const idist__op *o, size_t n, size_t index, idist__host_piece *piece) {
    size_t count = o->count / n, rest = o->count % n; // the first ones have one element more

    if (index >= n) return false;
    piece->count = count + (index < rest ? 1 : 0);
    piece->at = (count * index + (index < rest ? index : rest)) * o->size;

    return true;
}

static idist__host_step *idist__host_add(idist__op *o, size_t round, idist_group *group,
                                         idist__kind kind, const void *send, void *recv,
                                         size_t count, int root) {
    idist__host_step *step = &o->u.host.steps[o->u.host.step_count++];

    step->round = round;
    step->group = group;
    step->kind = kind;
    step->send = send;
    step->recv = recv;
    step->count = count;
    step->root = root;

    return step;
}

// What a plan needs to know besides the call.
typedef struct idist__host_plan {
    char *collected;         // scratch of a lead: what it collects from its host
    size_t *counts, *displs; // of the blocks of each host, in elements
    int lead_root;           // the root's host, as a rank of leads
    int near_root;           // the root as a rank of near; -1: it is on another host
} idist__host_plan;

// The first step of reductions: the sum over this host, on its lead.
static void idist__host_reduce_near(idist__task *t, size_t round, const void *in, char *sum,
                                    size_t count) {
    idist__op *o = idist__op_of(t);
    idist_group *near = idist__ring_group_of(t->group)->near;

    if (near) {
        idist__host_add(o, round, near, IDIST__REDUCE, in, sum, count, 0);
        return;
    }

    idist__block_copy(sum, in, count * o->size);
    if (o->user && !o->user->fn) idist__reduce_scale(sum, count, t->call.dtype, o->user->factor);
}

static void idist__host_plan_all_reduce(idist__task *t) {
    idist__op *o = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    size_t n = idist__host_piece_count(t), round;
    idist__host_piece piece;
    idist__host_step *step;

    for (round = 0; round < n + 2; round++) {
        if (idist__host_cut(o, n, round, &piece))
            idist__host_reduce_near(t, round, o->in + piece.at, o->out + piece.at, piece.count);

        if (rg->leads && idist__host_cut(o, n, round - 1, &piece)) {
            step = idist__host_add(o, round, rg->leads, IDIST__ALL_REDUCE, o->out + piece.at,
                                   o->out + piece.at, piece.count, -1);
            step->completes_sum = true;
        }

        if (rg->near && idist__host_cut(o, n, round - 2, &piece))
            idist__host_add(o, round, rg->near, IDIST__BROADCAST, NULL, o->out + piece.at,
                            piece.count, 0);
    }
}

// The last step of a reduce, where the root is not the lead of its host.
static void idist__host_reduce_end(idist__task *t, const idist__host_plan *plan, size_t round,
                                   char *sum, size_t count) {
    idist__op *o = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    idist__host_step *step;

    if (rg->leads) {
        idist__host_add(o, round, rg->near, IDIST__SEND, sum, NULL, count, plan->near_root);
    } else if (o->rank == o->root) {
        step = idist__host_add(o, round, rg->near, IDIST__RECV, NULL, sum, count, 0);
        step->completes_sum = true;
    }
}

static void idist__host_plan_reduce(idist__task *t, const idist__host_plan *plan) {
    idist__op *o = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    char *sum = o->rank == o->root ? o->out : plan->collected;
    size_t n = idist__host_piece_count(t), round;
    idist__host_piece piece;
    idist__host_step *step;

    for (round = 0; round < n + 2; round++) {
        if (idist__host_cut(o, n, round, &piece))
            idist__host_reduce_near(t, round, o->in + piece.at, sum + piece.at, piece.count);

        if (rg->leads && idist__host_cut(o, n, round - 1, &piece)) {
            step = idist__host_add(o, round, rg->leads, IDIST__REDUCE, sum + piece.at,
                                   sum + piece.at, piece.count, plan->lead_root);
            step->completes_sum = plan->near_root == 0;
        }

        // near_root <= 0: the root is this host's lead, or on another host
        if (plan->near_root > 0 && idist__host_cut(o, n, round - 2, &piece))
            idist__host_reduce_end(t, plan, round, sum + piece.at, piece.count);
    }
}

static void idist__host_plan_reduce_scatter(idist__task *t, const idist__host_plan *plan) {
    idist__op *o = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    char *sum = plan->collected;
    char *own = sum + (size_t)o->rank * o->nbytes; // of a lead: where the blocks of its host begin
    idist__host_step *step;
    size_t round = 0;
    int host;

    idist__host_reduce_near(t, round++, o->in, sum, o->count * (size_t)o->n);

    for (host = 0; rg->leads && host < rg->nhosts; host++) {
        char *blocks = sum + plan->displs[host] * o->size;
        bool is_result = host == rg->leads->rank && !rg->near;

        step = idist__host_add(o, round++, rg->leads, IDIST__REDUCE, blocks,
                               is_result ? o->out : blocks, plan->counts[host], host);
        step->completes_sum = is_result;
    }

    if (rg->near) {
        step = idist__host_add(o, round, rg->near, IDIST__SCATTER, own, o->out, o->count, 0);
        step->completes_sum = true;
    }
}

static void idist__host_plan_all_gather(idist__task *t, const idist__host_plan *plan) {
    idist__op *o = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    char *own = o->out + (size_t)o->rank * o->nbytes;
    idist__host_step *step;

    if (rg->near) idist__host_add(o, 0, rg->near, IDIST__GATHER, o->in, own, o->count, 0);
    else if (o->in != own) idist__block_copy(own, o->in, o->nbytes);

    if (rg->leads) {
        step = idist__host_add(o, 1, rg->leads, IDIST__ALL_GATHERV, own, o->out,
                               plan->counts[rg->leads->rank], -1);
        step->recvcounts = plan->counts;
        step->recvdispls = plan->displs;
    }

    if (rg->near)
        idist__host_add(o, 2, rg->near, IDIST__BROADCAST, NULL, o->out, o->count * (size_t)o->n, 0);
}

static void idist__host_plan_broadcast(idist__task *t, const idist__host_plan *plan) {
    idist__op *o = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    size_t n = idist__host_piece_count(t), round;
    idist__host_piece piece;

    for (round = 0; round < n + 2; round++) {
        if (rg->near && plan->near_root >= 0 && idist__host_cut(o, n, round, &piece))
            idist__host_add(o, round, rg->near, IDIST__BROADCAST, NULL, o->out + piece.at,
                            piece.count, plan->near_root);
        if (rg->leads && idist__host_cut(o, n, round - 1, &piece))
            idist__host_add(o, round, rg->leads, IDIST__BROADCAST, NULL, o->out + piece.at,
                            piece.count, plan->lead_root);
        if (rg->near && plan->near_root < 0 && idist__host_cut(o, n, round - 2, &piece))
            idist__host_add(o, round, rg->near, IDIST__BROADCAST, NULL, o->out + piece.at,
                            piece.count, 0);
    }
}

static void idist__host_plan_barrier(idist__task *t) {
    idist__op *o = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);

    if (rg->near) idist__host_add(o, 0, rg->near, IDIST__BARRIER, NULL, NULL, 0, -1);
    if (rg->leads) idist__host_add(o, 1, rg->leads, IDIST__BARRIER, NULL, NULL, 0, -1);
    if (rg->near) idist__host_add(o, 2, rg->near, IDIST__BARRIER, NULL, NULL, 0, -1);
}

static void idist__host_find_root(const idist__task *t, idist__host_plan *plan) {
    const idist__op *o = idist__op_of(t);
    const idist_group *g = t->group;
    const idist__ring_group *rg = idist__ring_group_of(g);
    int i;

    plan->lead_root = 0;
    plan->near_root = o->root == o->rank ? 0 : -1;
    if (o->root < 0) return;

    for (i = 0; rg->leads && i < rg->nhosts; i++)
        if (idist__host_of(rg->leads, i) == idist__host_of(g, o->root)) plan->lead_root = i;
    for (i = 0; rg->near && i < rg->near->size; i++)
        if (rg->near->ranks[i] == g->ranks[o->root]) plan->near_root = i;
}

// Finds the blocks of each host; the ranks of a host are consecutive.
static void idist__host_count_blocks(const idist__task *t, const idist__host_plan *plan) {
    const idist__op *o = idist__op_of(t);
    const idist_group *g = t->group;
    int i, host = -1;

    for (i = 0; i < o->n; i++) {
        if (i == 0 || idist__host_of(g, i) != idist__host_of(g, i - 1))
            plan->displs[++host] = (size_t)i * o->count;
        plan->counts[host] += o->count;
    }
}

// Fills o->memory: steps | counts and displs of the hosts | what a lead collects. False when memory
// is short.
static bool idist__host_make_plan(idist__task *t) {
    idist__op *o = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    size_t nhosts = (size_t)rg->nhosts;
    size_t max_steps = IDIST__HOST_STEPS * idist__host_piece_count(t) + nhosts;
    size_t steps_nbytes = max_steps * sizeof(idist__host_step);
    size_t table_nbytes = steps_nbytes + 2 * nhosts * sizeof(size_t);
    size_t collected_nbytes = 0;
    idist__host_plan plan;

    if (rg->leads && t->call.kind == IDIST__REDUCE) collected_nbytes = o->nbytes;
    if (rg->leads && t->call.kind == IDIST__REDUCE_SCATTER)
        collected_nbytes = o->nbytes * (size_t)o->n;

    o->memory = (char *)idist__mem_raw(&t->group->w->cfg.mem, table_nbytes + collected_nbytes);
    if (!o->memory) return false;
    memset(o->memory, 0, table_nbytes);
    o->u.host.steps = (idist__host_step *)(void *)o->memory;

    plan.counts = (size_t *)(void *)(o->memory + steps_nbytes);
    plan.displs = plan.counts + nhosts;
    plan.collected = o->memory + table_nbytes;
    if (rg->in_order) idist__host_count_blocks(t, &plan);
    idist__host_find_root(t, &plan);

    switch (t->call.kind) {
    case IDIST__ALL_REDUCE: idist__host_plan_all_reduce(t); break;
    case IDIST__REDUCE: idist__host_plan_reduce(t, &plan); break;
    case IDIST__REDUCE_SCATTER: idist__host_plan_reduce_scatter(t, &plan); break;
    case IDIST__ALL_GATHER: idist__host_plan_all_gather(t, &plan); break;
    case IDIST__BROADCAST: idist__host_plan_broadcast(t, &plan); break;
    default: idist__host_plan_barrier(t); break;
    }

    return true;
}

// ---- carrying it out ----

static void idist__host_no_memory(const idist__task *t) {
    idist__ring_fail_memory(idist__ring_of(t->group->w), t->group);
}

// Begins a step. We own its task, *begun, until idist__host_round_done has seen it end. It may end
// at once, and the call with it, if it fails; NULL: it could not begin, and the call fails.
static void idist__host_step_begin(idist__task *t, const idist__host_step *step,
                                   idist__task **begun) {
    idist__op *o = idist__op_of(t);
    idist_group *group = step->group;
    bool on_leads = group == idist__ring_group_of(t->group)->leads;
    bool scales = o->user && !o->user->fn;
    idist__task *child;

    if (group->status != IDIST_OK) { // NOLINT(clang-analyzer-core.NullDereference)
        idist__ring_fail(idist__ring_of(t->group->w), t->group, group->status, group->cause);
        return;
    }

    child = idist__task_new(group);
    if (!child) {
        idist__host_no_memory(t);
        return;
    }

    child->call = t->call;
    child->call.kind = step->kind;
    child->call.send = step->send;
    child->call.recv = step->recv;
    child->call.count = step->count;
    child->call.recvcounts = step->recvcounts;
    child->call.recvdispls = step->recvdispls;
    child->call.root = step->root;
    child->call.u.user = o->user;
    if (t->call.op == IDIST_AVG || (scales && on_leads)) child->call.op = IDIST_SUM;

    child->whole = idist__fingerprint_of_task(t, IDIST__ALGO_BY_HOST);
    child->parent_past = o->past;
    child->timeout_ms = -1; // the parent has a deadline, and says what it waits for
    child->announced = true;
    child->warned = true;
    *begun = child;
    idist__task_start(child);
}

// Begins all steps of the current round.
static void idist__host_round_begin(idist__task *t) {
    idist__host_op *host = &idist__op_of(t)->u.host;
    const idist__host_step *first = &host->steps[host->current];
    size_t i, left = host->step_count - host->current;

    for (i = 0; i < left && first[i].round == first->round; i++) {
        host->running_count = i + 1;
        idist__host_step_begin(t, &first[i], &host->running[i]);
        if (t->group->status != IDIST_OK || !host->running[i]) return; // the plan may be gone
    }
}

// Whether all steps under way have ended, or one has failed, and nobody has looked at them yet.
static bool idist__host_round_ended(const idist__host_op *host) {
    size_t i, done_count = 0;

    for (i = 0; i < host->running_count && host->running[i]; i++) {
        if (!host->running[i]->done) continue;
        if (host->running[i]->status != IDIST_OK) return true;
        done_count++;
    }

    return done_count && done_count == host->running_count;
}

// The step that a call waits for. NULL: none.
IDIST__UNUSED static idist__task *idist__host_step_of(const idist__task *t) {
    const idist__host_op *host = &idist__op_of(t)->u.host;
    size_t i;

    for (i = 0; i < host->running_count; i++)
        if (host->running[i] && !host->running[i]->done) return host->running[i];

    return NULL;
}

// Whether the round under way has completed. If a step failed, so does the call, which then forgets
// them all.
static bool idist__host_round_done(idist__task *t) {
    idist__host_op *host = &idist__op_of(t)->u.host;
    size_t i;

    if (!idist__host_round_ended(host)) return false;

    for (i = 0; i < host->running_count; i++) {
        const idist__task *child = host->running[i];

        if (!child || !child->done || child->status == IDIST_OK) continue;
        idist__ring_fail(idist__ring_of(t->group->w), t->group, child->status, // or with its group
                         child->group->status == IDIST_OK ? child->text : child->group->cause);
        return false;
    }

    for (i = 0; i < host->running_count; i++) {
        if (host->running[i]) idist__task_free(host->running[i]);
        host->running[i] = NULL;
    }

    return true;
}

// The averages that the current round has completed. Goes on to the next round.
static void idist__host_round_end(idist__task *t) {
    const idist__op *o = idist__op_of(t);
    idist__host_op *host = &idist__op_of(t)->u.host;
    size_t end = host->current + host->running_count;

    for (; host->current < end; host->current++) {
        const idist__host_step *step = &host->steps[host->current];
        if (step->completes_sum && t->call.op == IDIST_AVG)
            idist__reduce_divide(step->recv, step->count, t->call.dtype, o->n);
    }

    host->running_count = 0;
}

// Takes a call out of the queue of its group.
static void idist__host_remove(idist__task *t) {
    idist__ring_group *rg = idist__ring_group_of(t->group);
    idist__task **at, *before = NULL;

    for (at = &rg->first; *at && *at != t; at = &idist__op_of(*at)->u.host.next) before = *at;

    if (*at) *at = idist__op_of(t)->u.host.next;
    if (rg->last == t) rg->last = before;
}

static void idist__host_run(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__host_op *host = &o->u.host;

    if (!host->steps && !idist__host_make_plan(t)) {
        idist__host_no_memory(t);
        return;
    }

    IDIST__CO_BEGIN(o)

    while (host->current < host->step_count) {
        idist__host_round_begin(t);
        IDIST__CO_AWAIT(o, idist__host_round_done(t));
        idist__host_round_end(t);
    }

    idist__host_remove(t);
    idist__op_done(t);
    IDIST__CO_END(o)
}

static void idist__host_prepare(idist__task *t) {
    idist__op_prepare(t);
    idist__op_of(t)->algorithm = IDIST__ALGO_BY_HOST;
    idist__op_of(t)->run = idist__host_run;
}

static void idist__host_start(idist__task *t) {
    idist__ring_group *rg = idist__ring_group_of(t->group);

    if (rg->last) idist__op_of(rg->last)->u.host.next = t;
    else rg->first = t;
    rg->last = t;
    if (rg->first == t) idist__op_run(t);
}

// Forgets a call. near and leads fail before the group that they belong to, so no step is under way
// any more. False: one is, and it uses the memory of the call.
static bool idist__host_cancel(idist__task *t) {
    idist__host_op *host = &idist__op_of(t)->u.host;
    size_t i;

    for (i = 0; i < host->running_count; i++)
        if (host->running[i] && !host->running[i]->done) return false;

    idist__host_remove(t);

    for (i = 0; i < host->running_count; i++) {
        if (host->running[i]) idist__task_free(host->running[i]);
        host->running[i] = NULL;
    }

    return true;
}

// Resumes the first call of each group once its round has completed, and the next call once that
// one is done.
static void idist__host_progress(idist__ring *ring) {
    const idist_group *g;

    for (g = &ring->w->group; g; g = g->next) {
        idist__ring_group *rg = g->rank >= 0 && g->impl ? idist__ring_group_of(g) : NULL;

        while (rg && rg->first && !ring->failed) {
            const idist__task *t = rg->first;
            const idist__op *o = idist__op_of(t);
            const idist__host_op *host = &o->u.host;

            if ((host->running_count && !idist__host_round_ended(host)) || o->running) break;
            idist__op_run(rg->first);
            if (rg->first == t && !idist__host_round_ended(host)) break;
        }
    }
}
