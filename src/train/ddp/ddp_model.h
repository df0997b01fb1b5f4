// train/ddp/ddp_model.h: gradients averaged while the backward pass is still running
//
// Functions: idist__ddp_*.
//
// The backward pass computes gradients from the last parameter to the first. Buckets are formed in
// that order, and a bucket whose gradients are all ready is launched while the gradients of earlier
// layers are still being computed (Li et al., PyTorch Distributed, 2020):
//
//     parameters     0    1    2    3    4    5        in the order of the forward pass
//     buckets      [    2    ][   1   ][   0   ]       0 is closed at 1 MiB, the others at 25 MiB
//     backward                <-- 3 -- 4 -- 5
//     in flight                         |======== 0 ========|
//                                  |============ 1 ============|
//
// The order in which gradients become ready on a rank does not matter: a bucket is launched when it
// is full and the one before it has been launched, so all ranks make the same calls in the same
// order. If the backward pass uses parameters in another order than they are listed in, buckets are
// full late, and all others wait for them; so after the first iteration buckets are formed anew, in
// the order in which gradients became ready on one rank (idist__ddp_finish_follow). Gradients stay
// where they are, and a bucket whose gradients have come apart by this goes in pieces. Where no
// bucket goes in pieces, this would make copies of what is reduced in place; the state of a
// compression belongs to a bucket; and on the device there are no pieces. There buckets stay, and
// are only launched in another order. In each iteration the calls are:
//
//     uneven        all_gather of "I have data", 1 byte; then all know whose buffers count, and by
//                   how many to divide
//     buffers       broadcast of each
//     buckets       in that order: what the hook's `start` does; without a hook an all_reduce in
//                   place, or one per piece
//     find_unused   all_reduce of "I have a gradient", 1 byte per parameter
//     buckets       in that order: what the hook's `finish` does
//     order         the first time only, without a hook and find_unused: broadcast of a number
//                   per gradient; if buckets change, all_reduce of "my gradients lie apart", 1
//                   byte per bucket
//
// A rank in idist_ddp_join makes these calls with zeros until all ranks say that they have no data.
//
// The path of a gradient: idist_ddp_ready -> idist__ddp_launch_gather (copied into its bucket) ->
// idist__ddp_launch_full (the bucket is launched) -> idist_ddp_wait -> idist__ddp_finish_buckets
// (the hook's finish) -> idist__ddp_finish_scatter (copied back).
//
// A bucket holds its gradients one after the other, lower parameters first. If they lie like that
// in the program's memory, this memory is the bucket (a view), and nothing is copied. Others have
// memory of their own, or none if they go in pieces (train/ddp/ddp_piece.h).
#pragma once

#include "base/fail.h"
#include "base/text.h"
#include "core/model.h"
#include "train/agree.h"
#include "train/compress/compress.h"

#define IDIST__DDP_FIRST_NBYTES ((size_t)1 << 20)   // limit of the bucket that is launched first
#define IDIST__DDP_BUCKET_NBYTES ((size_t)25 << 20) // and of the others

typedef struct idist__ddp_param {
    void *gradient; // in the bucket: where the program has it, or a copy
    int bucket;
    uint64_t ready_iteration;   // the last one in which it was ready
    uint64_t no_sync_iteration; // the one that follows a pass with no_sync in which it was ready
} idist__ddp_param;

typedef struct idist__ddp_bucket {
    idist_bucket exposed; // what a hook gets
    int ready_count;
    bool view;      // lies in the program's memory
    bool scattered; // its gradients lie apart, so that it goes in pieces; see train/ddp/ddp_piece.h
    int64_t launched_ns; // for the timeline
    char *end;           // of the gradients placed so far
    idist_request request;
} idist__ddp_bucket;

// A piece of more gradients than this is copied, since that is cheaper than many small parts.
enum { IDIST__DDP_PARTS = 128 };

// A part of a bucket that is reduced by a call of its own.
typedef struct idist__ddp_piece {
    idist_bucket exposed; // what the built-in reduction gets
    const idist__ddp_bucket *bucket;
    size_t first;  // its first element in the bucket, ...
    int gradient;  // ... and the position in bucket_gradients of the gradient which that is of
    bool in_place; // not in a slot
    idist__part parts[IDIST__DDP_PARTS]; // of gradients, if it is reduced where these are
    idist_request request;
} idist__ddp_piece;

// Pieces in flight, and the limit of each. Inside a host all slots together fit into the cache of
// one core; between hosts there is as much in flight as a network needs.
enum { IDIST__DDP_SLOTS_NEAR = 4, IDIST__DDP_SLOTS = 8 };
#define IDIST__DDP_PIECE_NEAR_NBYTES ((size_t)256 << 10)
#define IDIST__DDP_PIECE_NBYTES ((size_t)512 << 10)

struct idist_ddp {
    idist_ddp_desc desc;
    idist_ddp_hook hook;
    int group_size;
    idist_tensor *params, *grads, *buffers;
    idist__ddp_param *param_states;
    idist__ddp_bucket *buckets; // room for one per gradient
    int bucket_count;
    int *bucket_of;             // by gradient: its bucket in the next grouping
    int *bucket_gradients;      // by bucket: indices of its gradients, ...
    size_t *bucket_displs;      // ... and where they begin
    void *bucket_memory;        // of buckets that are not views
    bool copies;                // some gradients are copied to their buckets
    bool learnt;                // the order of arrival is known
    bool pieces_overlap;        // pieces in flight end sooner than one after the other
    int32_t *launch_order;      // buckets, in the order in which they are launched
    int32_t *arrival_order;     // gradients, in the order in which they became ready
    uint8_t *in_pieces;         // by bucket: scattered on some rank
    char *slot_memory;          // of pieces in flight, ...
    size_t slot_count;          // ... for so many
    size_t slot_limit;          // pieces that may be in flight
    size_t piece_nbytes;        // limit of a piece
    idist__reduction reduction; // how the built-in hooks reduce
    double scale;               // result = scale * sum of what the ranks contribute

    // uneven: who had data in the last iteration that had any
    uint8_t *has_data; // by rank
    int active_count;  // ranks with data
    int first_active, last_active;

    // find_unused
    uint8_t *used;          // by parameter: this rank had a gradient; later: any rank had one
    void *saved_grads;      // copies of gradients that zeros have overwritten, contiguous
    size_t saved_nbytes;    // size of that memory, which is kept
    bool filled_with_zeros; // in this iteration

    // The iteration.
    uint64_t iteration; // from 1 on
    int ready_count;    // gradients, which are the first ones of arrival_order
    int launched_count; // buckets
    int next_gradient;  // of the bucket that is being launched in pieces, as in idist__ddp_piece
    size_t next_first;
    size_t started_pieces, finished_pieces;
    idist__ddp_piece slots[IDIST__DDP_SLOTS];
    bool begun; // its first calls have been made
    bool no_sync;
    bool joining;        // this rank is in idist_ddp_join
    idist_status status; // of the first failure in this iteration
    char error[512];     // and its text
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

// The bucket that is launched at a position.
static idist__ddp_bucket *idist__ddp_model_bucket(const idist_ddp *d, int position) {
    return &d->buckets[d->launch_order[position]];
}

static bool idist__ddp_is_full(const idist__ddp_bucket *bucket) {
    return bucket->ready_count == bucket->exposed.gradient_count;
}

static bool idist__ddp_is_ready(const idist_ddp *d, int i) {
    return d->param_states[i].ready_iteration == d->iteration;
}

// Fails the iteration, and with it every further call in it. Returns the status.
static idist_status idist__ddp_fail(idist_ddp *d, idist_status status) {
    if (status == IDIST_OK) return IDIST_OK;
    if (d->status != IDIST_OK) return idist__fail(d->status, "%s", d->error);

    d->status = idist__agree_break("ddp", d->desc.group, status);
    idist__text_copy(d->error, sizeof d->error, idist_last_error());

    return status;
}

// Whether the world is still there. A ddp of one rank makes no call that would notice.
static idist_status idist__ddp_check_group(const idist_ddp *d) {
    idist_opts opts = idist__ddp_opts(d, false), unused;
    return idist__agree_enter("ddp", &opts, &unused);
}

// Sets the factors by which the sum becomes the result. They depend on the ranks with data.
static void idist__ddp_set_scale(idist_ddp *d) {
    const idist_ddp_desc *desc = &d->desc;
    double postscale = desc->postscale != 0 ? desc->postscale : 1, divisor = d->group_size;

    if (desc->sum) divisor = 1;
    else if (desc->divide_by_active) divisor = d->active_count;
    d->scale = postscale / divisor;

    d->reduction.op = desc->sum ? IDIST_SUM : IDIST_AVG;
    d->reduction.postscale = postscale * (desc->sum ? 1 : d->group_size / divisor);
}
