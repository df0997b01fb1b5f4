// train/zero/zero_model.h: an optimizer whose state is divided among the ranks
//
// Functions: idist__zero_*.
//
// Each rank keeps one part of the optimizer's state, and updates the same part of the parameters
// (Rajbhandari et al., ZeRO, 2020, stage 1). The gradients use the buckets of a ddp
// (train/ddp/ddp_model.h), with a communication hook that calls reduce_scatter:
//
//     bucket      [ gradient 3 |   gradient 4   |      gradient 5      ]
//     ranges      [     rank 0     |     rank 1     |     rank 2       ]   equal, up to one element
//     shards      [     3      | 4 |     4      | 5 |        5         ]
//
// A bucket is cut into one range per rank. The part of a gradient in a range is a shard. An element
// passes through these functions:
//
//     idist_zero_ready             the program says that the gradient is complete
//     idist__zero_create_start     reduce_scatter of its bucket, in place
//     idist__zero_create_finish    converts the range of this rank to F32, unless it is F32
//     (the program)                updates the weights of the shard
//     idist__zero_step_pack        rounds master weights to the dtype of the parameters
//     idist_zero_gather            all_gather of the parameters of the bucket
//
// The all_gather needs the parameters of a bucket one after the other. If they are arranged in this
// way in the program's memory, the all_gather works there. Otherwise the parameters are copied to
// the memory of the bucket, whose gradients are no longer needed, and back.
//
// The arrays of all shards of a rank lie one after the other:
//
//     masters     only if some parameter is F16 or BF16; F32 parameters leave their part unused
//     grads       likewise
//     states[j]   for each state of the optimizer
#pragma once

#include "base/small_float.h"
#include "train/ddp/ddp_model.h"

enum { IDIST__ZERO_STATES = 4 }; // the size of idist_shard.states

typedef struct idist__zero_bucket {
    size_t *counts;     // by rank: elements in its range
    size_t first;       // index of the first element in this rank's range
    size_t offset;      // index of that element in the arrays of all shards
    int first_shard;    // of this rank
    int shard_count;    // of this rank
    char *param_memory; // the parameters, if they lie one after the other; otherwise NULL
} idist__zero_bucket;

struct idist_zero {
    idist_ddp *ddp;
    int states; // per element
    int group_size, rank;
    bool has_masters;            // some parameter is F16 or BF16
    size_t shard_elements;       // in all shards of this rank
    float *memory;               // masters, grads and states
    float *masters, *grads;      // parts of memory, or NULL
    idist__zero_bucket *buckets; // one per bucket of the ddp
    size_t *bucket_counts;       // memory of the buckets' counts
    size_t *param_counts;        // by rank: elements of the parameter that is collected
    idist_shard *shards;         // of this rank
    idist_tensor *shard_grads;   // their gradients
    int shard_count;
    int *shard_of; // by parameter: its shard on this rank, or -1
};

static bool idist__zero_is_narrow(const idist_bucket *bucket) { return bucket->dtype != IDIST_F32; }

// Returns where the range of a rank begins in a bucket. The range of rank group_size begins at the
// end.
static size_t idist__zero_begin(const idist_zero *z, const idist_bucket *bucket, int rank) {
    size_t ranks = (size_t)z->group_size, each = bucket->count / ranks;
    size_t rest = bucket->count % ranks, before = (size_t)rank;

    return each * before + (before < rest ? before : rest);
}

// Returns the bucket of the ddp.
static idist_bucket *idist__zero_exposed(const idist_zero *z, int b) {
    return &z->ddp->buckets[b].exposed;
}

// Returns the address of an element of a bucket.
static char *idist__zero_at(const idist_bucket *bucket, void *memory, size_t element) {
    return (char *)memory + element * idist_dtype_size(bucket->dtype);
}

// Converts `count` elements of 16-bit floats to F32, or F32 to 16-bit floats if `narrow` is set.
static idist_status idist__zero_convert(const idist_zero *z, const idist_bucket *bucket,
                                        void *halves, float *floats, size_t count, bool narrow) {
    if (!count) return IDIST_OK;

    if (z->ddp->desc.on_device) {
#ifdef IDIST_NCCL_H
        idist_opts opts = idist__ddp_opts(z->ddp, true);
        bool f16 = bucket->dtype == IDIST_F16;
        idist__pack_args args;

        memset(&args, 0, sizeof args);
        args.in = narrow ? (const void *)floats : halves;
        args.out = narrow ? halves : (void *)floats;
        args.count = count;
        if (narrow) args.op = f16 ? IDIST__PACK_F16 : IDIST__PACK_BF16;
        else args.op = f16 ? IDIST__UNPACK_F16 : IDIST__UNPACK_BF16;
        return idist__own_pack("zero", &opts, &args);
#endif
    }

    if (narrow) idist__small_float_narrow(halves, floats, count, bucket->dtype);
    else idist__small_float_widen(floats, halves, count, bucket->dtype);

    return IDIST_OK;
}
