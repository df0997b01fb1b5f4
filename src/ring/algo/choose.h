// ring/algo/choose.h: chooses the algorithm of a collective, and allocates its scratch memory
//
// Each other file of ring/algo holds one family of algorithms and can be read by itself. No
// algorithm uses a socket directly. An algorithm posts non-blocking sends and receives of ring/msg,
// and runs again (ring/msg/op.h) when one of them completes. The engine (ring/engine/start_task.h)
// calls this file to choose the algorithm of a collective. There are three kinds of algorithms:
//
//   over messages   the algorithms of this folder
//   host_plan.h     splits a collective into calls inside hosts and calls between hosts
//   ring/share      for ranks that share memory
//
// COSTS
//
// n is the number of ranks, B the number of bytes that one rank contributes, and c the number of
// chunks. log is log2, rounded up. A message takes a latency a, plus b per byte. A part o of the
// latency occupies the sender or the receiver. The rest of the latency overlaps if there are
// several messages. A reduction also takes time for each byte received, so its time has the same
// factors as b.
//
//   operation        few steps (latency)                  few bytes (bandwidth)
//   barrier          dissemination  a log n               -
//   broadcast        binomial tree  (a + bB) log n        chain   (a + bB/c) (n - 2 + c)
//   reduce           binomial tree  (a + bB) log n        chain   (a + bB/c) (n - 2 + c)
//   all_reduce       doubling       (a + bB) log n        ring    2 (n - 1) (a + bB/n)
//   reduce_scatter   doubling       (a + bBn) log n       ring    (n - 1) (a + bB)
//   all_gather       Bruck          a log n + bB (n - 1)  ring    (n - 1) (a + bB)
//   gather, scatter  binomial tree  a log n + bB (n - 1)  direct  a + (n - 1) (o + bB)
//   all_to_all       Bruck          (a + bBn/2) log n     direct  a + (n - 1) (o + bB)
//   scan             doubling       (a + bB) log n        chain   (a + bB/c) (n - 2 + c)
//   exscan           doubling       (a + bB) (log n + 1)  chain   (a + bB/c) (n - 2 + c)
//   v-forms          -                                    direct; all_gatherv as a ring;
//                                                         reduce_scatterv as reduce_scatter
//
// For reduce_scatter, scatter and all_to_all, B is one of n blocks. For the other operations, B is
// the whole contribution. idist__choose_table determines which column a call uses.
// tests/unit/model.c runs these algorithms on a LogGP network (make model). `make tune` measures
// the sizes at which the two columns take the same time.
//
// REPRODUCIBILITY
//
// Each block of a result is computed by one rank, or by several ranks that combine the same
// operands in the same order. So all ranks get the same bits. The order does not depend on which
// message arrives first.
//
// SOURCES
//
// Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH",
// 2005. Bruck et al., "Efficient Algorithms for All-to-All Communications", 1997. Patarasuk and
// Yuan, "Bandwidth optimal all-reduce", 2009. Hensgen, Finkel, Manber, "Two algorithms for barrier
// synchronization", 1988. Hillis and Steele, "Data parallel algorithms", 1986.
//
// THE CHOICE
//
// idist__choose_algorithm takes the first algorithm in this table that can run the call:
//
//   group                                      algorithm
//   on several hosts, with several members     BY_HOST   the operations that host_plan.h lists
//   on some of them
//   whose members share memory                 FLAT      up to 4 KiB in the slot of a rank
//                                              CHUNKED   more, and v-forms
//   any                                        LATENCY   as idist__choose_table says
//                                              BANDWIDTH
//
// A setting of IDIST_ALGO may rule out rows. Every setting but `auto` and `remote` rules out
// BY_HOST. `latency` and `bandwidth` rule out shared memory. `chunked` rules out FLAT, except for
// calls without elements.
//
// All members of a group make the same choice, because the choice depends only on values that are
// equal on all members. The choice is part of the fingerprint. tests/unit/algo.c prints the choice
// for every operation.
//
// THE PATH OF A COLLECTIVE OVER MESSAGES
//
// ring/engine/start_task.h begins the call:
//
//   idist__choose_begin     fills in idist__op from the call: ranks, operands, reduction; allocates
//                           scratch memory; widens or scales the input of a reduction
//   idist__history_add      records the fingerprint, which includes the algorithm (ring/msg/)
//   idist__choose_run       starts the algorithm
//   idist__choose_finish    ends a reduction: divides an average, unless a ring has done so, and
//                           narrows to the dtype of the call
//
// Floats of 16 and 8 bits are widened to F32 for a reduction, so that they are rounded only once.
#pragma once

#include "base/mem.h"
#include "base/dtype.h"
#include "base/reduce_op.h"
#include "base/small_float.h"
#include "base/reduce.h"
#include "launch/env.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/world.h"
#include "core/extent.h"
#include "ring/msg/ring_model.h"
#include "ring/msg/op.h"
#include "ring/msg/combine.h"
#include "ring/share/share.h"
#include "ring/algo/stream.h"
#include "ring/algo/ring_algo.h"
#include "ring/algo/chain.h"
#include "ring/algo/direct.h"
#include "ring/algo/tree.h"
#include "ring/algo/doubling.h"
#include "ring/algo/bruck.h"
#include "ring/algo/host_plan.h"

typedef struct idist__choice { // NOLINT(clang-analyzer-optin.performance.Padding)
    idist__kind kind;
    // Runs the algorithm of few steps, or is NULL if the call always uses `bandwidth`.
    void (*latency)(idist__task *t);
    // Contribution of one rank up to which `latency` is faster, in KiB.
    size_t latency_kib;
    // Begins the algorithm of few bytes, or is NULL if the call always uses `latency`.
    void (*bandwidth)(idist__task *t);
    // True if `bandwidth` also works for operations that do not commute.
    bool keeps_order;
} idist__choice;

// Read a row as follows: all_reduce uses recursive doubling up to 64 KiB per rank, and a ring for
// larger contributions. The limits hold for up to IDIST__CHOICE_RANKS ranks. They were measured
// with idist_perf over unix sockets and loopback TCP at 2 to 8 ranks, and `make tune` measures them
// on other machines. A limit is low where the latency algorithm forwards blocks through several
// ranks. For reduce_scatter, scatter and all_to_all, the limit is for one block.
// idist__choose_limit computes the limits for more ranks, and for networks between hosts.
static const idist__choice idist__choose_table[] = {
    // clang-format off
    // operation             few steps                 KiB  few bytes                        order
    {IDIST__BARRIER,         idist__dissemination_run, 0,   NULL,                            true},
    {IDIST__BROADCAST,       idist__tree_broadcast,    256, idist__chain_broadcast,          true},
    {IDIST__REDUCE,          idist__tree_reduce,       256, idist__chain_reduce,             false},
    {IDIST__ALL_REDUCE,      idist__doubling_reduce,   64,  idist__ring_algo_all_reduce,     false},
    {IDIST__REDUCE_SCATTER,  idist__doubling_reduce,   16,  idist__ring_algo_reduce_scatter, false},
    {IDIST__ALL_GATHER,      idist__bruck_all_gather,  16,  idist__ring_algo_all_gather,     true},
    {IDIST__GATHER,          idist__tree_gather,       2,   idist__direct_begin,             true},
    {IDIST__SCATTER,         idist__tree_scatter,      2,   idist__direct_begin,             true},
    {IDIST__ALL_TO_ALL,      idist__bruck_all_to_all,  2,   idist__direct_all_to_all,        true},
    {IDIST__SCAN,            idist__doubling_scan,     128, idist__chain_scan,               true},
    {IDIST__EXSCAN,          idist__doubling_scan,     128, idist__chain_scan,               true},
    {IDIST__ALL_GATHERV,     NULL,                     0,   idist__ring_algo_all_gather,     true},
    {IDIST__GATHERV,         NULL,                     0,   idist__direct_begin,             true},
    {IDIST__SCATTERV,        NULL,                     0,   idist__direct_begin,             true},
    {IDIST__ALL_TO_ALLV,     NULL,                     0,   idist__direct_begin,             true},
    {IDIST__REDUCE_SCATTERV, idist__doubling_reduce,   16,  idist__ring_algo_reduce_scatter, false},
    // clang-format on
};

static const idist__choice *idist__choose_row(idist__kind kind) {
    const idist__choice *row = idist__choose_table;
    while (row->kind != kind) row++;
    return row;
}

enum {
    IDIST__CHOICE_RANKS = 8,
    IDIST__CHOICE_RANKS_MOST = 65536, // for more ranks, limits stay the same
    IDIST__CHOICE_LATENCY = 8 * 1024, // a / b where the limits of the table were measured
    IDIST__CHOICE_COPY = 4,           // bytes that memory copies in the time b
    IDIST__CHOICE_OVERHEAD = 12,      // approximate a / o between hosts
    // Maximum of a / b. This maximum and the next one are needed because an interface may report a
    // wrong bandwidth.
    IDIST__CHOICE_LATENCY_MOST = 512 * 1024,
    // Maximum of the limits that follow from a / b, for each IDIST__CHOICE_RANKS ranks.
    IDIST__CHOICE_MOST = 512 * 1024
};

// Returns the contribution of a rank, in bytes, for which both algorithms take the same time. The
// result follows from COSTS at the top of this file, but does not include the time that reductions
// take. `latency` is a / b, the number of bytes that the network transfers in the time of an empty
// message. Returns UINT64_MAX if the algorithm of few steps is never slower.
static uint64_t idist__choose_break_even(idist__kind kind, uint64_t n, uint64_t latency) {
    uint64_t log = 0, direct;
    // Number of steps of doubling. If n is not a power of two, the excess ranks need one step
    // before the rounds and one step after them.
    uint64_t folded_log;

    while ((uint64_t)1 << log < n) log++;
    folded_log = (n & (n - 1)) ? log + 1 : log;

    switch (kind) {
    case IDIST__ALL_REDUCE:
        if (folded_log * n == 2 * (n - 1)) return UINT64_MAX;
        return (2 * (n - 1) - folded_log) * n * latency / (folded_log * n - 2 * (n - 1));
    case IDIST__REDUCE_SCATTER:
    case IDIST__REDUCE_SCATTERV:
        if (folded_log * n == n - 1 || n - 1 < folded_log) return 0;
        return (n - 1 - folded_log) * latency / (folded_log * n - (n - 1));
    case IDIST__ALL_GATHER:                                      // Bruck copies n blocks once more
        return IDIST__CHOICE_COPY * (n - 1 - log) * latency / n; // NOLINT(*-core.DivideZero)
    case IDIST__GATHER:
    case IDIST__SCATTER: // in a tree, half of the blocks wait for the other half
    case IDIST__ALL_TO_ALL:
        direct = latency + (n - 1) * latency / IDIST__CHOICE_OVERHEAD;
        if (direct <= log * latency || n < 4) return 0;
        return (direct - log * latency) /
               (kind == IDIST__ALL_TO_ALL ? n * log / 2 - (n - 1) : n / 2);
    default: break;
    }

    if (kind == IDIST__EXSCAN) log++;
    if (n - 1 < log) return 0;
    if (log == 1) return kind == IDIST__BROADCAST ? UINT64_MAX : IDIST__CHUNK_BYTES;

    // A chain takes (n - 2) steps of one chunk, plus a, plus b for each byte.
    return ((n - 2) * (latency + IDIST__CHUNK_BYTES) + latency - log * latency) / (log - 1);
}

// Returns true if the bandwidth algorithm is `direct`. Its messages overlap, which helps little on
// one host.
static bool idist__choose_is_direct(idist__kind kind) {
    return kind == IDIST__GATHER || kind == IDIST__SCATTER || kind == IDIST__ALL_TO_ALL;
}

// Returns the limit for a group over several hosts.
static uint64_t idist__choose_between_hosts(const idist__choice *row, uint64_t n,
                                            uint64_t latency) {
    uint64_t groups = (n + IDIST__CHOICE_RANKS - 1) / IDIST__CHOICE_RANKS;
    uint64_t most = groups * IDIST__CHOICE_MOST;
    uint64_t even;

    if (idist__choose_is_direct(row->kind)) most = (uint64_t)row->latency_kib * 1024;
    if (latency > IDIST__CHOICE_LATENCY_MOST) latency = IDIST__CHOICE_LATENCY_MOST;
    even = idist__choose_break_even(row->kind, n, latency);

    return even < most ? even : most;
}

// Returns the limit for a group on one host, which is the limit in the table. For more than
// IDIST__CHOICE_RANKS ranks, the limit changes in proportion to the break-even.
static uint64_t idist__choose_inside_host(const idist__choice *row, uint64_t n) {
    uint64_t limit = (uint64_t)row->latency_kib * 1024;
    uint64_t at_table, at_n;

    if (n <= IDIST__CHOICE_RANKS || idist__choose_is_direct(row->kind)) return limit;
    at_table = idist__choose_break_even(row->kind, IDIST__CHOICE_RANKS, IDIST__CHOICE_LATENCY);
    at_n = idist__choose_break_even(row->kind, n, IDIST__CHOICE_LATENCY);

    return at_table ? limit * at_n / at_table : limit;
}

// Returns the contribution of a rank up to which the latency algorithm is used. Uses integer
// arithmetic, so that every rank computes the same limit.
static size_t idist__choose_limit(const idist_group *g, const idist__choice *row) {
    int n = g->size < IDIST__CHOICE_RANKS_MOST ? g->size : IDIST__CHOICE_RANKS_MOST;
    uint64_t latency = idist__ring_group_of(g)->spans_hosts ? g->w->machine.latency_nbytes : 0;
    uint64_t limit = latency && n > 1 ? idist__choose_between_hosts(row, (uint64_t)n, latency)
                                      : idist__choose_inside_host(row, (uint64_t)n);

    return limit < SIZE_MAX ? (size_t)limit : SIZE_MAX;
}

// Returns true if elements are widened to F32 for the reduction.
static bool idist__choose_widens(const idist__call *call, const idist__user_op *user) {
    bool is_function = user && user->fn;
    return idist__kind_reduces(call->kind) && idist__dtype_is_narrow(call->dtype) && !is_function;
}

// Returns true if the operation multiplies each contribution by a factor and then sums.
static bool idist__choose_scales(const idist__call *call, const idist__user_op *user) {
    return idist__kind_reduces(call->kind) && user && !user->fn;
}

// Chooses between LATENCY and BANDWIDTH for a collective over messages.
static idist__algorithm idist__choose_over_messages(const idist_group *g, const idist__call *call) {
    const idist__choice *row = idist__choose_row(call->kind);
    bool has_user_op = idist__kind_reduces(call->kind) && idist__reduce_op_is_user(call->op);
    const idist__user_op *user = has_user_op ? idist__world_user_op(g, call) : NULL;
    bool commutes = !has_user_op || user->commutative;
    size_t size = idist__choose_widens(call, user) ? sizeof(float) : idist_dtype_size(call->dtype);
    size_t count = call->count;

    if (call->kind == IDIST__REDUCE_SCATTERV) // the same on all ranks: a block of average size
        count = idist__block_at(idist__extent_block_at(call, g->size), g->size, 1);
    if (!row->bandwidth) return IDIST__ALGO_LATENCY;
    if (!row->latency) return IDIST__ALGO_BANDWIDTH;
    if (!count || (!commutes && !row->keeps_order)) return IDIST__ALGO_LATENCY;
    if (idist__kind_reduces(call->kind) && size > IDIST__CHUNK_BYTES) // no slot holds an element
        return IDIST__ALGO_LATENCY;
    if (g->w->cfg.algorithm == IDIST__ALGO_LATENCY) return IDIST__ALGO_LATENCY;
    if (g->w->cfg.algorithm == IDIST__ALGO_BANDWIDTH) return IDIST__ALGO_BANDWIDTH;

    return count * size <= idist__choose_limit(g, row) ? IDIST__ALGO_LATENCY
                                                       : IDIST__ALGO_BANDWIDTH;
}

static idist__algorithm idist__choose_algorithm(const idist_group *g, const idist__call *call) {
    idist__algorithm algorithm = idist__share_choose(g, call);

    if (idist__host_plan_serves(g, call)) return IDIST__ALGO_BY_HOST;
    return algorithm != IDIST__ALGO_AUTO ? algorithm : idist__choose_over_messages(g, call);
}

// ---- operands ----

static void idist__choose_operands(idist__task *t) {
    idist__op *op = idist__op_of(t);
    const idist__call *call = &t->call;

    idist__op_prepare(t);

    if (idist__choose_widens(&t->call, op->user)) {
        op->size = sizeof(float);
        op->nbytes = op->count * op->size;
    }

    if (idist__kind_reduces(call->kind) && !(op->user && op->user->fn))
        op->reduce = idist__reduce_table[(unsigned)call->dtype]
                                        [op->user ? (unsigned)IDIST_SUM : (unsigned)call->op];
}

// Returns the number of elements that this rank contributes.
static size_t idist__choose_input_count(const idist__task *t) {
    const idist__op *op = idist__op_of(t);
    return idist__kind_scatters_sum(t->call.kind) ? idist__extent_block_at(&t->call, op->n)
                                                  : op->count;
}

// ---- scratch memory ----
//
//   | widened or scaled input | widened result | memory of the algorithm | slots of a stream |
//   | one element, if it is larger than IDIST__OP_PIECE |
//
// Each part begins at a multiple of 64 bytes, and may be empty.

static size_t idist__choose_align(size_t nbytes) { return (nbytes + 63) & ~(size_t)63; }

static size_t idist__choose_latency_nbytes(const idist__task *t) {
    const idist__op *op = idist__op_of(t);
    size_t n = (size_t)op->n;

    switch (t->call.kind) {
    case IDIST__ALL_REDUCE: return op->nbytes;
    case IDIST__REDUCE:
    case IDIST__SCAN:
    case IDIST__EXSCAN: return 2 * op->nbytes;
    case IDIST__REDUCE_SCATTER:
    case IDIST__REDUCE_SCATTERV: return 2 * idist__choose_input_count(t) * op->size;
    case IDIST__ALL_GATHER: return n * op->nbytes;
    case IDIST__GATHER:
    case IDIST__SCATTER:
        return (size_t)idist__tree_size(idist__tree_relative_rank(t), op->n) * op->nbytes;
    case IDIST__ALL_TO_ALL: return 3 * n * op->nbytes;
    default: return 0;
    }
}

static size_t idist__choose_bandwidth_nbytes(const idist__task *t) {
    const idist__op *op = idist__op_of(t);
    size_t n = (size_t)op->n;

    switch (t->call.kind) {
    case IDIST__REDUCE: return op->rank != op->root ? op->nbytes : 0;
    case IDIST__EXSCAN: return op->nbytes;
    case IDIST__REDUCE_SCATTER:
    case IDIST__REDUCE_SCATTERV: return idist__choose_input_count(t) * op->size;
    case IDIST__ALL_TO_ALL: return t->call.send == t->call.recv ? n * op->nbytes : 0;
    default: return 0;
    }
}

static size_t idist__choose_slots_nbytes(const idist__task *t) {
    const idist__op *op = idist__op_of(t);

    size_t nbytes = op->nbytes;

    if (!idist__kind_reduces(t->call.kind) || op->algorithm != IDIST__ALGO_BANDWIDTH) return 0;

    if (idist__kind_scatters_sum(t->call.kind))
        nbytes = idist__ring_algo_largest_block(op, &t->call) * op->size;
    if (nbytes >= IDIST__CHUNK_BYTES) return op->slot_count * IDIST__CHUNK_BYTES;
    return op->slot_count * idist__choose_align(nbytes);
}

// Allocates the scratch memory. Returns false if memory is exhausted.
static bool idist__choose_allocate(idist__task *t) {
    idist__op *op = idist__op_of(t);
    bool widens = idist__choose_widens(&t->call, op->user);
    size_t input = 0;
    size_t result = widens ? idist__choose_align(op->nbytes) : 0;
    size_t work = op->algorithm == IDIST__ALGO_LATENCY ? idist__choose_latency_nbytes(t)
                                                       : idist__choose_bandwidth_nbytes(t);
    size_t slots = idist__choose_slots_nbytes(t), element = 0;

    work = idist__choose_align(work);
    if (op->user && op->user->fn && op->size > IDIST__OP_PIECE) element = op->size;
    if (widens || idist__choose_scales(&t->call, op->user))
        input = idist__choose_align(idist__choose_input_count(t) * op->size);

    if (input + result + work + slots + element) {
        op->memory =
            (char *)idist__mem_raw(&t->group->w->cfg.mem, input + result + work + slots + element);
        if (!op->memory) return false;
    }

    op->work = op->memory ? op->memory + input + result : idist__op_buffer(NULL);
    if (slots) op->u.stream.slots = op->work + work;
    if (element) op->element = op->work + work + slots;
    if (widens && op->memory) op->out = op->memory + input;

    return true;
}

// Copies the input of a reduction to scratch memory if the reduction widens or scales.
static void idist__choose_convert_input(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist_dtype dtype = t->call.dtype;
    size_t count = idist__choose_input_count(t);
    bool widens = idist__choose_widens(&t->call, op->user);
    bool scales = idist__choose_scales(&t->call, op->user);

    if (!count || (!widens && !scales)) return;
    if (widens) idist__small_float_widen((float *)(void *)op->memory, op->in, count, dtype);
    else idist__block_copy(op->memory, op->in, count * op->size);

    op->in = op->memory;
    if (scales)
        idist__reduce_scale(op->memory, count, widens ? IDIST_F32 : dtype, op->user->factor);
}

// ---- begin, run, finish ----

// Ends a reduction: divides an average, and narrows a widened result. On ranks that get a result,
// op->out holds the result before these steps.
static void idist__choose_finish(idist__task *t) {
    idist__op *op = idist__op_of(t);
    const idist__call *call = &t->call;
    bool widens = idist__choose_widens(&t->call, op->user);
    bool has_result = (call->kind != IDIST__REDUCE || op->rank == op->root) &&
                      (call->kind != IDIST__EXSCAN || op->rank != 0);
    bool is_finished =
        call->kind == IDIST__ALL_REDUCE && op->algorithm != IDIST__ALGO_LATENCY; // by a ring

    if (!has_result) return;
    if (!op->user && !is_finished)
        idist__reduce_finish(op->out, op->count, widens ? IDIST_F32 : call->dtype, call->op, op->n);
    if (widens)
        idist__small_float_narrow(call->recv, (const float *)(const void *)op->out, op->count,
                                  call->dtype);
}

// Prepares a collective. Returns false if memory is exhausted.
static bool idist__choose_begin(idist__task *t, idist__algorithm algorithm) {
    idist__op *op = idist__op_of(t);

    idist__choose_operands(t);
    op->algorithm = algorithm;
    op->slot_count = idist__stream_slot_count(t->group);
    if (!idist__choose_allocate(t)) return false;
    idist__choose_convert_input(t);
    if (idist__kind_reduces(t->call.kind)) op->finish = idist__choose_finish;

    return true;
}

static void idist__choose_run(idist__task *t) {
    idist__op *op = idist__op_of(t);
    const idist__choice *row = idist__choose_row(t->call.kind);

    if (op->algorithm == IDIST__ALGO_LATENCY) op->run = row->latency;
    else row->bandwidth(t);
}
