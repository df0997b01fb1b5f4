// ring/msg/op.h: a running collective, and the macros that let an algorithm wait
//
// An algorithm is a function that is called again whenever one of its sends or receives completes.
// Some algorithms store their own position (ring/algo/stream.h, ring/algo/direct.h); the others are
// coroutines. A coroutine is straight-line code between CO_BEGIN and CO_END. CO_AWAIT leaves the
// function unless its condition holds. The next call resumes there and checks the condition again.
// Local variables do not keep their values across a CO_AWAIT, so all state is in idist__op.
#pragma once

#include "base/mem.h"
#include "base/reduce_op.h"
#include "base/reduce.h"
#include "launch/env.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/world.h"
#include "core/fingerprint.h"
#include "core/task.h"
#include "ring/msg/ring_model.h"

// Minimum and maximum number of receives of a stream that are posted ahead. The peer may send the
// messages for all of them without waiting. Twice the minimum is slower on one host, because the
// caches cannot hold 2 MiB in flight.
#define IDIST__SLOTS 4
#define IDIST__SLOTS_MOST 32
#define IDIST__CHUNK_BYTES ((size_t)256 * 1024) // unit of a stream

typedef struct idist__op idist__op;

typedef struct idist__item { // a message of a stream
    int peer;                // rank in the group
    char *data;
    size_t nbytes;
} idist__item;

// ---- state of an algorithm, one struct per family ----

// State of ring/algo/stream.h, which ring_algo.h and chain.h use.
typedef struct idist__stream_op {
    size_t recv_total, send_total; // items
    size_t head;                   // items that can be sent before anything has been received
    size_t posted, taken, sent;    // items so far: receives posted, items taken, sends posted
    size_t chunk_count;            // elements in a chunk
    size_t block_chunks;           // chunks in a block
    char *slots;                   // scratch for receives that have no address
    idist__item (*recv_at)(idist__task *t, size_t index);
    idist__item (*send_at)(idist__task *t, size_t index);
    void (*take)(idist__task *t, size_t index);
} idist__stream_op;

typedef struct idist__direct_op {  // ring/algo/direct.h
    size_t recv_total, send_total; // messages
    size_t posted, sent;           // messages so far
} idist__direct_op;

typedef struct idist__dissemination_op { // ring/algo/tree.h
    int distance;                        // distance in the current round, a power of two
} idist__dissemination_op;

typedef struct idist__tree_op { // ring/algo/tree.h
    int distance;               // distance to the parent, or to the child of the current step
} idist__tree_op;

typedef struct idist__doubling_op { // ring/algo/doubling.h
    int distance;                   // distance to the partner of the current round, a power of two
    int active_ranks; // number of ranks that exchange: the largest power of two up to n
} idist__doubling_op;

typedef struct idist__bruck_op { // ring/algo/bruck.h
    int distance;                // distance in the current round, a power of two
    size_t packed_blocks;        // all_to_all: blocks sent in this round
} idist__bruck_op;

enum { IDIST__HOST_ROUND = 3 }; // maximum steps of a plan that run at the same time

typedef struct idist__host_op {     // ring/algo/host_run.h
    struct idist__host_step *steps; // the plan, or NULL if not made yet
    size_t step_count;
    size_t current;                          // the first step of the current round
    size_t running_count;                    // number of steps of the current round
    idist__task *running[IDIST__HOST_ROUND]; // tasks of these steps; freed after all have ended
    idist__task *next;                       // the next call in the queue of the group
} idist__host_op;

typedef struct idist__shared_op { // ring/share/
    uint32_t call_number;         // number among the shared calls of the group
    int next_rank;                // rank at which the check of the other members continues
    int awaited;                  // the member whose next step this rank waits for
    bool entered;                 // our slot announces the call
    bool remote;          // we may read contributions from other processes, through the kernel
    bool in_place;        // other ranks read our contribution directly from its buffer
    bool direct;          // other ranks write directly to our result
    uint64_t first_chunk; // number of the call's first chunk, counted over all calls of the group
    size_t nchunks;
    size_t chunk_count;   // elements of a block that each chunk holds
    size_t chunk;         // the current chunk
    size_t exposed;       // number of chunks that we have exposed
    size_t largest_count; // v-forms: elements of the largest part
    idist__task *next;    // the next call in the queue of the group
} idist__shared_op;

// The backend's part of a task. Sends and receives of the program use only `transfer`; the other
// fields are not cleared for them.
struct idist__op {
    idist__transfer *transfer; // of a send or receive of the program; NULL once it has ended

    // Fields of every collective.
    void (*run)(idist__task *t);
    void (*finish)(idist__task *t);   // called after the last step, e.g. to narrow the result
    idist__algorithm algorithm;       // part of the fingerprint
    int line;                         // line where the coroutine resumes
    bool running;                     // `run` is on the stack
    uint16_t past;                    // digest of the earlier calls
    uint32_t slots_pending;           // bit k is set while the receive in slot k is not complete
    size_t slot_count;                // number of receives of a stream that are posted ahead
    int sends_pending, recvs_pending; // transfers that are not complete

    // The operands of the collective.
    int n, rank, root; // size of the group, our rank, the root
    size_t size;       // size of an element as it is reduced; messages carry F16 as F32
    size_t count;
    size_t nbytes; // count * size
    idist__reduce_fn reduce;
    const idist__user_op *user; // &user_op, or NULL
    idist__user_op user_op;     // a copy, because the program may free the op during the call
    const char *in;             // our contribution
    char *out;                  // our result
    char *work;                 // scratch of the algorithm
    char *element;              // scratch for one element that is larger than IDIST__OP_PIECE
    char *memory;               // all scratch, in one allocation

    union { // which member is valid depends on `algorithm` and the kind of the call
        idist__stream_op stream;
        idist__direct_op direct;
        idist__dissemination_op dissemination;
        idist__tree_op tree;
        idist__doubling_op doubling;
        idist__bruck_op bruck;
        idist__host_op host;
        idist__shared_op shared;
    } u;
};

static idist__op *idist__op_of(const idist__task *t) { return (idist__op *)t->impl; }

#define IDIST__CO_BEGIN(o) \
    switch ((o)->line) {   \
    case 0:
#define IDIST__CO_AWAIT(o, condition) \
    do {                              \
        (o)->line = __LINE__;         \
        __attribute__((fallthrough)); \
    case __LINE__:                    \
        if (!(condition)) return;     \
    } while (0)
#define IDIST__CO_END(o) \
    default: break;      \
        }

// Returns `buffer`, or another valid address if it is NULL. A buffer that no rank reads or writes
// may be NULL. But algorithms add offsets to it, which C does not allow for null pointers.
static char *idist__op_buffer(const void *buffer) {
    static const char nothing[1] = {0};
    return (char *)(uintptr_t)(buffer ? buffer : nothing);
}

// Sets the operands of a collective from its call.
static void idist__op_prepare(idist__task *t) {
    idist__op *op = idist__op_of(t);
    const idist__call *call = &t->call;

    op->n = t->group->size;
    op->rank = t->group->rank;
    op->root = call->root;
    op->user = NULL;

    if (idist__kind_reduces(call->kind) && idist__reduce_op_is_user(call->op)) {
        op->user_op = *idist__world_user_op(t->group, call);
        op->user = &op->user_op;
    }

    op->size = idist_dtype_size(call->dtype);
    op->count = call->count;
    op->nbytes = op->count * op->size;
    op->in = idist__op_buffer(call->send);
    op->out = idist__op_buffer(call->recv);
}

// Returns the fingerprint that the messages of a collective carry. In all_to_allv each pair of
// ranks compares its own dtype.
static idist__fingerprint idist__op_fingerprint(const idist__task *t) {
    idist__fingerprint print = idist__fingerprint_of_task(t, idist__op_of(t)->algorithm);

    if (t->call.kind == IDIST__ALL_TO_ALLV) {
        print.dtype = (uint8_t)t->call.dtype;
        print.check = idist__fingerprint_tagged(t->group->w, &t->call, 0);
    }

    return print;
}

static void idist__op_done(idist__task *t) {
    idist__op *op = idist__op_of(t);

    if (t->state == IDIST__TASK_DONE || idist__ring_of(t->group->w)->failed == t->group) return;
    if (op->finish) op->finish(t);
    idist__mem_free(&t->group->w->cfg.mem, op->memory);
    op->memory = NULL;
    idist__task_complete(t, IDIST_OK, "");
}

static void idist__op_run(idist__task *t) {
    idist__op *op = idist__op_of(t);

    if (op->running || t->state == IDIST__TASK_DONE) return;
    op->running = true; // a transfer that completes at once must not call the algorithm recursively
    op->run(t);
    op->running = false;
}
