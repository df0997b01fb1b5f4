// ring/algo/host_plan.h: plans the steps of a call inside hosts and between their leaders
//
// Ranks of one host share memory. Hosts are connected by a slower network. So a collective over
// several hosts becomes a sequence of collectives on two smaller groups:
//
//   local     the members on this host
//   leaders   the first member of each host, which is the leader of that host
//
//                    step 1, local         step 2, leaders           step 3, local
//   all_reduce       reduce to leader      all_reduce                broadcast
//   reduce           reduce to leader      reduce to the leader of   the leader sends the result
//                                          the root's host           to the root
//   reduce_scatter   reduce to leader      reduce, one per host      scatter
//   all_gather       gather on leader      all_gatherv               broadcast
//   broadcast        on the root's host    broadcast                 on the other hosts
//   barrier          barrier               barrier                   barrier
//
//   bytes over the network   each host sends what a rank sends in the algorithm of step 2
//   latency                  two local steps, and one step among as many ranks as there are hosts
//
// A large all_reduce, reduce or broadcast is cut into pieces, so that the network is busy from the
// first piece to the last. Step 2 lags one round behind step 1, and step 3 lags two rounds:
//
//   round           0   1   2   3   4
//   step 1, lag 0   a   b   c
//   step 2, lag 1       a   b   c
//   step 3, lag 2           a   b   c
//
// So in round r, a step works on piece r - lag, if there is one.
//
// The plan of a call is the list of the steps that this rank takes, in the order of their rounds.
// All members of an inner group take the steps of this group in the same order.
// ring/algo/host_run.h executes the plan.
//
//   idist__host_plan_serves    returns true if a call can run this way
//   idist__host_plan_make      makes the plan
//
// A plan is used if a group spans several hosts, at least one host has several members, and
// IDIST_ALGO is `auto` or `remote`. The following calls use messages among all ranks instead:
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
#include "core/extent.h"
#include "ring/msg/ring_model.h"
#include "ring/msg/op.h"

typedef struct idist__host_step { // a call on `local` or `leaders`
    idist_group *group;
    idist__kind kind;
    const void *send;
    void *recv;
    size_t count;
    const size_t *recvcounts, *recvdispls; // for an all_gatherv
    int root;
    size_t round;
    bool completes_sum; // recv then holds the sum over all ranks, which AVG divides
} idist__host_step;

enum {
    IDIST__HOST_STEPS = 3,  // steps of a piece; a reduce_scatter has one more for each host
    IDIST__HOST_MAX_LAG = 2 // rounds by which the last step lags behind the first step
};

// Minimum size of a piece, per host. Smaller pieces would cost more in latency than their overlap
// gains. On a network of high latency, a piece is IDIST__HOST_PIECE_NETWORKS times the
// bandwidth-delay product, because the hosts synchronize after each piece.
#define IDIST__HOST_PIECE_BYTES ((size_t)512 * 1024)
#define IDIST__HOST_PIECE_NETWORKS 8

// Returns true if a call can be split into calls inside hosts and between them.
static bool idist__host_plan_serves(const idist_group *g, const idist__call *call) {
    const idist__ring_group *rg = idist__ring_group_of(g);
    int setting = g->w->cfg.algorithm;

    if (!rg->nhosts || (setting != IDIST__ALGO_AUTO && setting != IDIST__ALGO_REMOTE)) return false;

    switch (call->kind) {
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

    if (idist__dtype_is_narrow(call->dtype)) return false;

    return !idist__reduce_op_is_user(call->op) || idist__world_user_op(g, call)->commutative;
}

// ---- pieces and steps ----

typedef struct idist__host_piece { // a piece of a call's elements
    size_t at;                     // offset in bytes
    size_t count;
} idist__host_piece;

// Returns the number of pieces of a call, which is the same on all ranks.
static size_t idist__host_plan_piece_count(const idist__task *t) {
    const idist__op *op = idist__op_of(t);
    uint64_t of_host = IDIST__HOST_PIECE_NETWORKS * t->group->w->machine.network_nbytes, nbytes;
    bool is_cut = t->call.kind == IDIST__ALL_REDUCE || t->call.kind == IDIST__REDUCE ||
                  t->call.kind == IDIST__BROADCAST;

    if (of_host < IDIST__HOST_PIECE_BYTES) of_host = IDIST__HOST_PIECE_BYTES;
    nbytes = of_host * (uint64_t)idist__ring_group_of(t->group)->nhosts;

    return is_cut && op->nbytes > nbytes ? (size_t)(op->nbytes / nbytes) : 1;
}

// Finds the piece, out of n pieces, that a step works on in a round. Returns false if there is no
// such piece. The step takes the first piece in round `lag`, and the last piece in round n - 1 +
// lag.
static bool idist__host_plan_cut(const idist__op *op, size_t n, size_t round, size_t lag,
                                 idist__host_piece *piece) {
    size_t count = op->count / n, rest = op->count % n; // the first `rest` pieces are one larger
    size_t index;

    if (round < lag || round - lag >= n) return false;
    index = round - lag;
    piece->count = count + (index < rest ? 1 : 0);
    piece->at = (count * index + (index < rest ? index : rest)) * op->size;

    return true;
}

// Appends a step to the plan.
static idist__host_step *idist__host_plan_add(idist__op *op, size_t round, idist_group *group,
                                              idist__kind kind, const void *send, void *recv,
                                              size_t count, int root) {
    idist__host_step *step = &op->u.host.steps[op->u.host.step_count++];

    step->round = round;
    step->group = group;
    step->kind = kind;
    step->send = send;
    step->recv = recv;
    step->count = count;
    step->root = root;

    return step;
}

// ---- the plan of each operation ----

typedef struct idist__host_plan_input { // data that a plan needs besides the call
    char *collected;                    // scratch of a leader for the data of its host
    size_t *counts, *displs;            // counts and displs of the hosts' blocks, in elements
    int root_in_leaders;                // rank in `leaders` of the leader of the root's host
    int root_in_local;                  // rank of the root in `local`, -1 if it is on another host
} idist__host_plan_input;

// Adds the first step of a reduction, which computes the sum over this host on its leader. A rank
// that is alone on its host copies its contribution instead.
static void idist__host_plan_reduce_local(idist__task *t, size_t round, const void *in, char *sum,
                                          size_t count) {
    idist__op *op = idist__op_of(t);
    idist_group *local = idist__ring_group_of(t->group)->local;

    if (local) {
        idist__host_plan_add(op, round, local, IDIST__REDUCE, in, sum, count, 0);
        return;
    }

    idist__block_copy(sum, in, count * op->size);
    if (op->user && !op->user->fn) idist__reduce_scale(sum, count, t->call.dtype, op->user->factor);
}

static void idist__host_plan_all_reduce(idist__task *t) {
    idist__op *op = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    size_t n = idist__host_plan_piece_count(t), round;
    idist__host_piece piece;
    idist__host_step *step;

    for (round = 0; round < n + IDIST__HOST_MAX_LAG; round++) {
        if (idist__host_plan_cut(op, n, round, 0, &piece))
            idist__host_plan_reduce_local(t, round, op->in + piece.at, op->out + piece.at,
                                          piece.count);

        if (rg->leaders && idist__host_plan_cut(op, n, round, 1, &piece)) {
            step = idist__host_plan_add(op, round, rg->leaders, IDIST__ALL_REDUCE,
                                        op->out + piece.at, op->out + piece.at, piece.count, -1);
            step->completes_sum = true;
        }

        if (rg->local && idist__host_plan_cut(op, n, round, 2, &piece))
            idist__host_plan_add(op, round, rg->local, IDIST__BROADCAST, NULL, op->out + piece.at,
                                 piece.count, 0);
    }
}

// Adds the last step of a reduce whose root is on this host but is not the leader.
static void idist__host_plan_reduce_last(idist__task *t, const idist__host_plan_input *input,
                                         size_t round, char *sum, size_t count) {
    idist__op *op = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    idist__host_step *step;

    if (rg->leaders) {
        idist__host_plan_add(op, round, rg->local, IDIST__SEND, sum, NULL, count,
                             input->root_in_local);
    } else if (op->rank == op->root) {
        step = idist__host_plan_add(op, round, rg->local, IDIST__RECV, NULL, sum, count, 0);
        step->completes_sum = true;
    }
}

static void idist__host_plan_reduce(idist__task *t, const idist__host_plan_input *input) {
    idist__op *op = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    char *sum = op->rank == op->root ? op->out : input->collected;
    size_t n = idist__host_plan_piece_count(t), round;
    idist__host_piece piece;
    idist__host_step *step;

    for (round = 0; round < n + IDIST__HOST_MAX_LAG; round++) {
        if (idist__host_plan_cut(op, n, round, 0, &piece))
            idist__host_plan_reduce_local(t, round, op->in + piece.at, sum + piece.at, piece.count);

        if (rg->leaders && idist__host_plan_cut(op, n, round, 1, &piece)) {
            step = idist__host_plan_add(op, round, rg->leaders, IDIST__REDUCE, sum + piece.at,
                                        sum + piece.at, piece.count, input->root_in_leaders);
            step->completes_sum = input->root_in_local == 0;
        }

        // If root_in_local <= 0, this host needs no last step, because the root is its leader or is
        // on another host.
        if (input->root_in_local > 0 && idist__host_plan_cut(op, n, round, 2, &piece))
            idist__host_plan_reduce_last(t, input, round, sum + piece.at, piece.count);
    }
}

static void idist__host_plan_reduce_scatter(idist__task *t, const idist__host_plan_input *input) {
    idist__op *op = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    char *sum = input->collected;
    char *own = sum + (size_t)op->rank * op->nbytes; // on a leader: the first block of its host
    idist__host_step *step;
    size_t round = 0;
    int host;

    idist__host_plan_reduce_local(t, round++, op->in, sum, op->count * (size_t)op->n);

    for (host = 0; rg->leaders && host < rg->nhosts; host++) {
        char *blocks = sum + input->displs[host] * op->size;
        bool is_result = host == rg->leaders->rank && !rg->local;

        step = idist__host_plan_add(op, round++, rg->leaders, IDIST__REDUCE, blocks,
                                    is_result ? op->out : blocks, input->counts[host], host);
        step->completes_sum = is_result;
    }

    if (rg->local) {
        step =
            idist__host_plan_add(op, round, rg->local, IDIST__SCATTER, own, op->out, op->count, 0);
        step->completes_sum = true;
    }
}

static void idist__host_plan_all_gather(idist__task *t, const idist__host_plan_input *input) {
    idist__op *op = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    char *own = op->out + (size_t)op->rank * op->nbytes;
    idist__host_step *step;

    if (rg->local) idist__host_plan_add(op, 0, rg->local, IDIST__GATHER, op->in, own, op->count, 0);
    else if (op->in != own) idist__block_copy(own, op->in, op->nbytes);

    if (rg->leaders) {
        step = idist__host_plan_add(op, 1, rg->leaders, IDIST__ALL_GATHERV, own, op->out,
                                    input->counts[rg->leaders->rank], -1);
        step->recvcounts = input->counts;
        step->recvdispls = input->displs;
    }

    if (rg->local)
        idist__host_plan_add(op, 2, rg->local, IDIST__BROADCAST, NULL, op->out,
                             op->count * (size_t)op->n, 0);
}

static void idist__host_plan_broadcast(idist__task *t, const idist__host_plan_input *input) {
    idist__op *op = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    size_t n = idist__host_plan_piece_count(t), round;
    idist__host_piece piece;

    for (round = 0; round < n + IDIST__HOST_MAX_LAG; round++) {
        if (rg->local && input->root_in_local >= 0 && idist__host_plan_cut(op, n, round, 0, &piece))
            idist__host_plan_add(op, round, rg->local, IDIST__BROADCAST, NULL, op->out + piece.at,
                                 piece.count, input->root_in_local);
        if (rg->leaders && idist__host_plan_cut(op, n, round, 1, &piece))
            idist__host_plan_add(op, round, rg->leaders, IDIST__BROADCAST, NULL, op->out + piece.at,
                                 piece.count, input->root_in_leaders);
        if (rg->local && input->root_in_local < 0 && idist__host_plan_cut(op, n, round, 2, &piece))
            idist__host_plan_add(op, round, rg->local, IDIST__BROADCAST, NULL, op->out + piece.at,
                                 piece.count, 0);
    }
}

static void idist__host_plan_barrier(idist__task *t) {
    idist__op *op = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);

    if (rg->local) idist__host_plan_add(op, 0, rg->local, IDIST__BARRIER, NULL, NULL, 0, -1);
    if (rg->leaders) idist__host_plan_add(op, 1, rg->leaders, IDIST__BARRIER, NULL, NULL, 0, -1);
    if (rg->local) idist__host_plan_add(op, 2, rg->local, IDIST__BARRIER, NULL, NULL, 0, -1);
}

// Finds the leader of the root's host among the leaders, and the root among the local members.
static void idist__host_plan_find_root(const idist__task *t, idist__host_plan_input *input) {
    const idist__op *op = idist__op_of(t);
    const idist_group *g = t->group;
    const idist__ring_group *rg = idist__ring_group_of(g);
    int i;

    input->root_in_leaders = 0;
    input->root_in_local = op->root == op->rank ? 0 : -1;
    if (op->root < 0) return;

    for (i = 0; rg->leaders && i < rg->nhosts; i++)
        if (idist__ring_group_host(rg->leaders, i) == idist__ring_group_host(g, op->root))
            input->root_in_leaders = i;
    for (i = 0; rg->local && i < rg->local->size; i++)
        if (rg->local->ranks[i] == g->ranks[op->root]) input->root_in_local = i;
}

// Counts the elements in the blocks of each host. The ranks of a host are consecutive.
static void idist__host_plan_count_blocks(const idist__task *t,
                                          const idist__host_plan_input *input) {
    const idist__op *op = idist__op_of(t);
    const idist_group *g = t->group;
    int i, host = -1;

    for (i = 0; i < op->n; i++) {
        if (i == 0 || idist__ring_group_host(g, i) != idist__ring_group_host(g, i - 1))
            input->displs[++host] = (size_t)i * op->count;
        input->counts[host] += op->count;
    }
}

// Makes the plan of a call in op->memory, which holds the steps, the counts and displs of the
// hosts, and the data that a leader collects, in this order. Returns false if memory is exhausted.
static bool idist__host_plan_make(idist__task *t) {
    idist__op *op = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    size_t nhosts = (size_t)rg->nhosts;
    size_t max_steps = IDIST__HOST_STEPS * idist__host_plan_piece_count(t) + nhosts;
    size_t steps_nbytes = max_steps * sizeof(idist__host_step);
    size_t table_nbytes = steps_nbytes + 2 * nhosts * sizeof(size_t);
    size_t collected_nbytes = 0;
    idist__host_plan_input input;

    if (rg->leaders && t->call.kind == IDIST__REDUCE) collected_nbytes = op->nbytes;
    if (rg->leaders && t->call.kind == IDIST__REDUCE_SCATTER)
        collected_nbytes = op->nbytes * (size_t)op->n;

    op->memory = (char *)idist__mem_raw(&t->group->w->cfg.mem, table_nbytes + collected_nbytes);
    if (!op->memory) return false;
    memset(op->memory, 0, table_nbytes);
    op->u.host.steps = (idist__host_step *)(void *)op->memory;

    input.counts = (size_t *)(void *)(op->memory + steps_nbytes);
    input.displs = input.counts + nhosts;
    input.collected = op->memory + table_nbytes;
    if (rg->in_order) idist__host_plan_count_blocks(t, &input);
    idist__host_plan_find_root(t, &input);

    switch (t->call.kind) {
    case IDIST__ALL_REDUCE: idist__host_plan_all_reduce(t); break;
    case IDIST__REDUCE: idist__host_plan_reduce(t, &input); break;
    case IDIST__REDUCE_SCATTER: idist__host_plan_reduce_scatter(t, &input); break;
    case IDIST__ALL_GATHER: idist__host_plan_all_gather(t, &input); break;
    case IDIST__BROADCAST: idist__host_plan_broadcast(t, &input); break;
    default: idist__host_plan_barrier(t); break;
    }

    return true;
}
