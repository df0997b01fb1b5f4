// train/ddp/ddp_model.h: gradients averaged while the backward pass is still running
//
// Functions: idist__ddp_*.
//
// The backward pass computes gradients from the last parameter to the first. Buckets are formed in
// that order. A bucket whose gradients are all ready is launched while the gradients of earlier
// layers are still being computed (Li et al., PyTorch Distributed, 2020):
//
//     parameters     0    1    2    3    4    5        in the order of the forward pass
//     buckets      [    2    ][   1   ][   0   ]       0 is closed at 1 MiB, the others at 25 MiB
//     backward                <-- 3 -- 4 -- 5
//     in flight                         |======== 0 ========|
//                                  |============ 1 ============|
//
// The order in which gradients become ready on a rank does not matter. A bucket is full when all of
// its gradients are ready. It is launched when it is full and the bucket before it has been
// launched. In this way all ranks make the same calls in the same order.
//
// The backward pass may use parameters in an order other than the listed one. In that case some
// buckets become full late, and all later buckets wait for them. Therefore, after the first
// iteration, buckets are formed again in the order in which gradients became ready on one rank
// (idist__ddp_finish_follow). Gradients stay where they are. A bucket whose gradients are no longer
// contiguous is reduced in pieces.
//
// In these cases, buckets keep their gradients and are only launched in another order:
//
//     no pieces      forming buckets anew would copy gradients that are reduced in place
//     compression    its state belongs to a bucket
//     on_device      there are no pieces in device memory
//
// Each iteration makes these calls:
//
//     uneven        all_gather of "I have data", 1 byte; tells all ranks whose buffers to copy and
//                   by how many ranks to divide
//     buffers       a broadcast of each buffer
//     buckets       in launch order: the calls of the hook's `start`; without a hook, an all_reduce
//                   in place, or one per piece
//     find_unused   all_reduce of "I have a gradient", 1 byte per parameter
//     buckets       in launch order: the calls of the hook's `finish`
//     order         only once, and not with a hook or find_unused: broadcast of a number
//                   per gradient; if buckets change, all_reduce of "my gradients lie apart", 1
//                   byte per bucket
//
// A rank in idist_ddp_join makes these calls with zeros until no rank has data.
//
// A gradient passes through these functions:
//
//     idist_ddp_ready              the program says that the gradient is complete
//     idist__ddp_launch_gather     copies the gradient into its bucket
//     idist__ddp_launch_full       launches the bucket when it is full
//     idist_ddp_wait               the program ends the backward pass
//     idist__ddp_finish_buckets    calls the hook's finish
//     idist__ddp_finish_scatter    copies the result back
//
// A bucket holds its gradients one after the other, lower parameters first. If the gradients are
// arranged in this way in the program's memory, this memory is the bucket (a view), and nothing is
// copied. Other buckets have their own memory, or none if they are reduced in pieces
// (train/ddp/ddp_piece.h).
#pragma once

#include "base/fail.h"
#include "base/text.h"
#include "core/model.h"
#include "train/agree.h"
#include "train/compress/compress.h"

#define IDIST__DDP_FIRST_NBYTES ((size_t)1 << 20)   // limit of the first bucket of a dtype
#define IDIST__DDP_BUCKET_NBYTES ((size_t)25 << 20) // limit of the other buckets

typedef struct idist__ddp_param {
    void *gradient; // its place in the bucket: in the program's memory, or a copy
    int bucket;
    uint64_t ready_iteration;   // the last iteration in which it was ready
    uint64_t no_sync_iteration; // the iteration after the last no_sync pass with it ready
} idist__ddp_param;

typedef struct idist__ddp_bucket {
    idist_bucket exposed; // the part that is passed to a hook
    int ready_count;
    bool view;           // uses the program's memory
    bool scattered;      // its gradients are not contiguous; it is reduced in pieces
    int64_t launched_ns; // for the timeline
    char *end;           // end of the gradients placed so far
    idist_request request;
} idist__ddp_bucket;

// Largest number of parts of a piece. A piece of more gradients is copied, which is cheaper than
// many small parts.
enum { IDIST__DDP_PARTS = 128 };

// A part of a bucket that is reduced by its own call.
typedef struct idist__ddp_piece {
    idist_bucket exposed; // the part that is passed to the built-in reduction
    const idist__ddp_bucket *bucket;
    size_t first;  // index of its first element in the bucket
    int gradient;  // index of the gradient with that element, in the bucket's exposed.gradients
    bool in_place; // reduced where it is, not in a slot of slot_memory
    // The gradients of the piece, if they are reduced where they are.
    idist__part parts[IDIST__DDP_PARTS];
    idist_request request;
} idist__ddp_piece;

// Largest number of pieces in flight, and largest size of a piece, on one host (NEAR) and between
// hosts. Within a host, all slots together fit into the cache of one core. Between hosts, the
// pieces in flight keep a network busy.
enum { IDIST__DDP_SLOTS_NEAR = 4, IDIST__DDP_SLOTS = 8 };
#define IDIST__DDP_PIECE_NEAR_NBYTES ((size_t)256 << 10)
#define IDIST__DDP_PIECE_NBYTES ((size_t)512 << 10)

struct idist_ddp {
    const char *name; // "ddp", or "zero" for the ddp of an idist_zero; for error texts
    idist_ddp_desc desc;
    idist_ddp_hook hook;
    int group_size, rank;
    idist_tensor *params, *grads, *buffers;
    idist__ddp_param *param_states;
    idist__ddp_bucket *buckets; // space for one per gradient
    int bucket_count;
    int *bucket_of;             // by gradient: its bucket in the next grouping
    int *bucket_gradients;      // by bucket: indices of its gradients
    size_t *bucket_displs;      // by bucket: where each of its gradients begins, in elements
    void *bucket_memory;        // memory of buckets that are not views
    bool copies;                // some gradients are copied to their buckets
    bool results_stay;          // results stay in the buckets (train/zero/zero_create.h)
    bool learnt;                // the order of arrival is known
    bool pieces_overlap;        // several pieces in flight finish sooner than one at a time
    int32_t *launch_order;      // buckets, in the order in which they are launched
    int32_t *arrival_order;     // gradients, in the order in which they became ready
    uint8_t *in_pieces;         // by bucket: scattered on some rank
    char *slot_memory;          // memory of pieces in flight
    size_t slot_count;          // slots in slot_memory
    size_t slot_limit;          // pieces that may be in flight
    size_t piece_nbytes;        // largest size of a piece
    idist__reduction reduction; // how the built-in hooks reduce
    double scale;               // result = scale * (sum over the ranks)

    // The ranks with data, for uneven. first_active and last_active refer to the last iteration in
    // which some rank had data.
    uint8_t *has_data; // by rank: true if it has data
    int active_count;  // ranks with data
    int first_active, last_active;

    // For find_unused.
    uint8_t *used;          // by parameter: this rank had a gradient; later, any rank had one
    void *saved_grads;      // contiguous copies of gradients that zeros have overwritten
    size_t saved_nbytes;    // size of saved_grads, which is kept between iterations
    bool filled_with_zeros; // missing gradients were set to zeros in this iteration

    // The state of the current iteration.
    uint64_t iteration; // from 1 on
    int ready_count;    // gradients that are ready; until `learnt`, the first ones of arrival_order
    int launched_count; // launched buckets
    // Where the next piece begins in the bucket that is being launched: `gradient` and `first` of
    // its idist__ddp_piece.
    int next_gradient;
    size_t next_first;
    size_t started_pieces, finished_pieces;
    idist__ddp_piece slots[IDIST__DDP_SLOTS];
    bool begun; // the first calls of the iteration have been made
    bool no_sync;
    bool joining;        // this rank is in idist_ddp_join
    idist_status status; // of the first failure in this iteration
    char error[512];     // text of the first failure
};

static idist_opts idist__ddp_opts(const idist_ddp *d, bool on_device) {
    idist_opts opts;

    memset(&opts, 0, sizeof opts);
    opts.group = d->desc.group;
    opts.timeout_ms = d->desc.timeout_ms;
    if (on_device) opts.stream = d->desc.stream;

    return opts;
}

static size_t idist__ddp_nbytes(const idist_tensor *tensor) {
    return tensor->count * idist_dtype_size(tensor->dtype);
}

static size_t idist__ddp_model_nbytes(const idist__ddp_bucket *bucket) {
    return bucket->exposed.count * idist_dtype_size(bucket->exposed.dtype);
}

static idist_status idist__ddp_no_memory(void) {
    return idist__fail(IDIST_ERR_NO_MEMORY, "ddp_create: no memory");
}

// Returns the bucket that is launched at a position.
static idist__ddp_bucket *idist__ddp_model_bucket(const idist_ddp *d, int position) {
    return &d->buckets[d->launch_order[position]];
}

static bool idist__ddp_is_full(const idist__ddp_bucket *bucket) {
    return bucket->ready_count == bucket->exposed.gradient_count;
}

static bool idist__ddp_is_ready(const idist_ddp *d, int i) {
    return d->param_states[i].ready_iteration == d->iteration;
}

// Fails the iteration unless the status is IDIST_OK. All further calls in the iteration then fail
// too. Returns the status of the first failure.
static idist_status idist__ddp_fail(idist_ddp *d, idist_status status) {
    if (status == IDIST_OK) return IDIST_OK;
    if (d->status != IDIST_OK) return idist__fail(d->status, "%s", d->error);

    d->status = idist__agree_break(d->name, d->desc.group, status);
    idist__text_copy(d->error, sizeof d->error, idist_last_error());

    return status;
}

// Checks that the world still exists. A ddp of one rank makes no call that would otherwise detect
// that the world was closed.
static idist_status idist__ddp_check_group(const idist_ddp *d) {
    idist_opts opts = idist__ddp_opts(d, false), unused;
    return idist__agree_enter(d->name, &opts, &unused);
}

// Checks that the group still has the ranks for which the ddp was created. A group of NULL is the
// world, which may have been closed and opened again. Local.
static idist_status idist__ddp_check_size(const idist_ddp *d) {
    int size = idist_group_size(d->desc.group), rank = idist_group_rank(d->desc.group);

    if (size != d->group_size)
        return idist__fail(IDIST_ERR_STATE,
                           "%s: created for %d ranks, but the group has %d now: create a %s in "
                           "each world",
                           d->name, d->group_size, size, d->name);
    if (rank != d->rank)
        return idist__fail(IDIST_ERR_STATE,
                           "%s: created on rank %d, which is rank %d now: create a %s in each "
                           "world",
                           d->name, d->rank, rank, d->name);

    return IDIST_OK;
}

// Sets the factors that turn the sum into the result. With divide_by_active, they depend on the
// number of ranks with data.
static void idist__ddp_set_scale(idist_ddp *d) {
    const idist_ddp_desc *desc = &d->desc;
    double postscale = desc->postscale != 0 ? desc->postscale : 1, divisor = d->group_size;

    if (desc->sum) divisor = 1;
    else if (desc->divide_by_active) divisor = d->active_count;
    d->scale = postscale / divisor;

    d->reduction.op = desc->sum ? IDIST_SUM : IDIST_AVG;
    d->reduction.postscale = postscale * (desc->sum ? 1 : d->group_size / divisor);
}
