/* idist_train.h - v0.2.0 - samplers, loaders, DDP and checkpoints for idist - MIT license

DO THIS

    Copy this file beside idist.h and include it wherever you include idist.h. The file that defines
    IDIST_IMPLEMENTATION compiles both headers. Your network stays as it is: arrays of parameters,
    and a function that computes their gradients.

        idist_tensor params[2] = {{weights, 64 * 10, IDIST_F32}, {bias, 10, IDIST_F32}};
        idist_sampler_desc samples = {0};
        idist_ddp_desc model = {0};
        idist_sampler *sampler;
        idist_ddp *ddp;
        size_t index;

        samples.length = 1797; // of the data set
        model.params = params; // every rank starts with those of rank 0
        model.n = 2;
        if (idist_sampler_create(&samples, &sampler) != IDIST_OK) return 1;
        if (idist_ddp_create(&model, &ddp) != IDIST_OK) return 1;
        for (epoch = 0; epoch < 10; epoch++) {
            if (idist_sampler_set_epoch(sampler, epoch) != IDIST_OK) return 1;
            while (idist_sampler_next(sampler, &index)) { // the samples of this rank
                backward(index, idist_ddp_grad(ddp, 0), idist_ddp_grad(ddp, 1));
                if (idist_ddp_wait(ddp) != IDIST_OK) return 1;
                step(); // the gradients are now the average over all ranks
            }
        }
        idist_ddp_free(&ddp);
        idist_sampler_free(&sampler);

    Call idist_ddp_ready(ddp, i) from the backward pass to reduce gradients while the gradients of
    earlier layers are still being computed.

    idist never zeroes gradients between iterations. Either backward() overwrites them, or it adds
    to them and your program zeroes them first.

WHAT IT IS

    sampler     Deals out the same indices as torch.utils.data.DistributedSampler. Every rank makes
                the same permutation (torch.randperm with a generator seeded by seed + epoch) and
                takes every n-th index, starting with its rank. All ranks get the same number of
                samples. Without drop_last, some samples are assigned twice if the number of ranks
                does not divide the length evenly. Duplicates distort validation. From 214,748,364
                samples on, idist uses the method of PyTorch 2.6, which differs from earlier
                versions. Ranks exchange no messages. Ranks with equal length, seed and epoch agree.
                The function idist_partition is the DataPartitioner of PyTorch's tutorial "Writing
                distributed applications".
    loader      Worker threads that call your function for each batch, a few batches before the
                program needs them.
    ddp         Does what DistributedDataParallel and Horovod's DistributedOptimizer do. For a
                picture, see src/train/ddp/ddp_model.h in the repository.
    metrics     Local sums, which are added over all ranks when you read the value. Scores follow
                from a confusion matrix.
    checkpoint  Rank 0 writes and reads; a file is either complete or absent.
    log         Only rank 0 logs.
    summary     Rank 0 writes losses and other scalars for TensorBoard and as CSV.
    run         Rank 0 logs at the end how fast each rank was, and how long it waited.

    Names and rules follow PyTorch, Ignite or Horovod where one of them has an equivalent.
    Everything also works in a world of 1. This header is not a tensor library: it moves arrays and
    never looks at your network.

HOW IT FITS

    This is an optional header on top of idist.h; no other header uses it. This header uses the
    public functions of idist.h. Its implementation also uses parts of idist.h's implementation:
    src/base/ and the timelines. For device memory, include idist_nccl.h first.

CONTENTS

      [train_api:sampler]     which samples a rank gets
      [train_api:loader]      batches, fetched ahead by worker threads
      [train_api:ddp]         gradients averaged while the backward pass is still running
      [train_api:zero]        an optimizer whose state is divided among the ranks
      [train_api:norm]        batch statistics and gradient norms over all ranks
      [train_api:scaler]      mixed precision: a scale for the loss, and conversions between dtypes
      [train_api:schedule]    values that follow the step, such as the learning rate
      [train_api:metric]      numbers over all ranks
      [train_api:checkpoint]  files that are either complete or absent
      [train_api:log]         what a training run prints, on rank 0 only
      [train_api:summary]     scalars over the steps of a training run, for TensorBoard and as CSV
      [train_api:run]         how fast a training run was, and which rank slowed it down

    The implementation follows. Its files are in src/train/.
    Generated from src/ by tools/drop_ins.py: change the files there.
*/
#ifndef IDIST_H
#include "idist.h"
#endif
#if IDIST_VERSION_MAJOR != 0 || IDIST_VERSION_MINOR != 2 || IDIST_VERSION_PATCH != 0
#error "idist_train.h is version 0.2.0, and idist.h another one: copy both from the same release"
#endif
#ifndef IDIST_TRAIN_H
#define IDIST_TRAIN_H

#ifdef __cplusplus
extern "C" {
#endif

//------------------------------------------------------------------------------
// [train_api:sampler]  which samples a rank gets
//------------------------------------------------------------------------------

typedef struct idist_sampler idist_sampler;

// Description of a sampler. A desc that is all zero except length is valid: shuffled with seed 0,
// shared by the ranks of the world.
typedef struct idist_sampler_desc {
    size_t length;      // of the data set, in samples
    idist_group *group; // whose ranks share the data set; NULL means the world
    int num_replicas;   // if > 0, replaces the number of ranks
    int rank;           // index of this rank among num_replicas
    bool in_order;      // do not shuffle
    // Leave out the remainder that does not divide evenly. Otherwise the first samples of the
    // epoch's order are repeated to fill it up.
    bool drop_last;
    uint64_t seed; // the same on all ranks
    // Your own order instead of the permutation, like ignite's DistributedProxySampler. Writes
    // `length` indices for this epoch, the same on all ranks. It is called again (run 1, 2, ...)
    // until there are enough indices. Cannot be combined with drop_last or in_order.
    void (*order_fn)(size_t *indices, size_t length, uint64_t epoch, int run, void *arg);
    void *arg; // passed to order_fn
} idist_sampler_desc;

// Creates a sampler, which starts in epoch 0. Local. The sampler keeps 8 bytes per sample of this
// rank. Dealing out an epoch (here and in set_epoch, set_state and reshard) temporarily takes
// another 8 bytes per sample of all ranks. With an order_fn, it takes 8 bytes per index requested
// from order_fn. The indices of the previous epoch still take memory at that time. Returns
// IDIST_ERR_ARG if there are no samples, more samples than memory can hold, or a rank outside 0 ..
// num_replicas - 1.
IDIST_API idist_status idist_sampler_create(const idist_sampler_desc *desc,
                                            idist_sampler **sampler);
// Frees a sampler and sets the pointer to NULL. Does nothing if it is NULL.
IDIST_API void idist_sampler_free(idist_sampler **sampler);

// Starts an epoch with all of its samples. Without this call every pass has the same order. If
// idist_sampler_set_state has just set this epoch, the epoch continues at that state. So a loop
// over the epochs may call this function in each of them, including the epoch that it resumes.
// Returns IDIST_ERR_NO_MEMORY or IDIST_ERR_CALLBACK (order_fn failed), and then nothing has
// changed.
IDIST_API idist_status idist_sampler_set_epoch(idist_sampler *sampler, uint64_t epoch);
// Returns the number of samples that this rank gets in an epoch; it is the same on all ranks. If
// other ranks have done a part of the epoch (see idist_sampler_set_state and
// idist_sampler_reshard), only the rest of the epoch counts.
IDIST_API size_t idist_sampler_count(const idist_sampler *sampler);
// Gets the next index of this rank and returns true. At the end of the epoch, returns false and
// goes back to the start (position 0). The call after that gets the first index again.
IDIST_API bool idist_sampler_next(idist_sampler *sampler, size_t *index);

// Position of this rank in its epoch, for checkpoints. A different number of ranks may resume from
// it:
//
//     idist_sampler_set_state(sampler, state); // of rank 0, on all ranks
//     for (epoch = state.epoch; epoch < 10; epoch++) {
//         idist_sampler_set_epoch(sampler, epoch);
//         while (idist_sampler_next(sampler, &index)) ...
//     }
typedef struct idist_sampler_state {
    uint64_t epoch, position; // position: samples of this rank done since the last reshard
    uint64_t processed;       // samples of all ranks done before the last reshard
    uint64_t ranks; // how many share the samples; 0: as in the sampler that gets this state
} idist_sampler_state;
// Returns the position of the next index. Once idist_sampler_next has returned false, the state is
// the beginning of the next epoch. So a training run that resumes from the state does not repeat
// the epoch. Before that, but after the last index, the state is the end of the epoch.
IDIST_API idist_sampler_state idist_sampler_get_state(const idist_sampler *sampler);
// Goes to a state. If the number of ranks was different, the rest of the epoch is dealt out among
// the present ranks. Each of the earlier ranks counts as having done `position` samples, so those
// ranks must have been in step. If nothing is left of the epoch, idist_sampler_next returns false
// at once. Returns IDIST_ERR_ARG if the state lies beyond the end of the epoch. Other errors are as
// in idist_sampler_set_epoch.
IDIST_API idist_status idist_sampler_set_state(idist_sampler *sampler, idist_sampler_state state);

// Records that this rank has processed another `count` of the samples it got from
// idist_sampler_next. Call it after each batch, for example. Returns IDIST_ERR_ARG if the total
// would exceed idist_sampler_count. Call idist_sampler_set_epoch before a second pass over the
// epoch; it resets the record.
//
// This is for elastic training by the rule of Horovod's ElasticSampler: ranks work in step, and
// each records what it has processed. When ranks are lost or join, idist_sampler_reshard deals out
// the rest of the epoch again.
IDIST_API idist_status idist_sampler_record(idist_sampler *sampler, size_t count);
// Deals out the rest of the epoch among the ranks of opts->group (after idist_shrink: the
// survivors). Uses the epoch and the record of rank 0 of the group. From then on, the group is the
// sampler's group. Collective over the group. Samples that were handed out but not recorded are
// dealt out again. Returns IDIST_ERR_ARG if the sampler was created with num_replicas.
IDIST_API idist_status idist_sampler_reshard(idist_sampler *sampler, const idist_opts *opts);

// Shuffles 0 .. length - 1 (as Python's random.Random(seed).shuffle does) and cuts the result into
// n parts of fractions[i] * length samples, rounded down. The fractions must not add up to more
// than 1. Writes part number `which` to `indices`, and the size of the part to *count. The array
// must have room for `length` indices. Local. Returns IDIST_ERR_ARG for a negative fraction,
// fractions above 1 in total, an invalid `which`, or more than 2^32 - 1 samples.
IDIST_API idist_status idist_partition(size_t length, const double *fractions, int n, int which,
                                       uint64_t seed, size_t *indices, size_t *count);

// Returns the batch size or the number of workers for one rank's loader. The batch size is
// batch_size divided by the world size, rounded down, or batch_size itself if that is 0. The number
// of workers is num_workers divided by the number of ranks on this host, rounded up. If there are
// fewer workers than ranks, it is num_workers itself.
IDIST_API int idist_auto_batch_size(int batch_size);
IDIST_API int idist_auto_num_workers(int num_workers);

// Returns seed + rank, for everything that must differ between ranks, such as augmentation.
// (Initial weights come from one rank.)
IDIST_API uint64_t idist_auto_seed(uint64_t seed);

//------------------------------------------------------------------------------
// [train_api:loader]  batches, fetched ahead by worker threads
//------------------------------------------------------------------------------

typedef struct idist_loader idist_loader;

// Description of a loader. A desc that is all zero except sampler, batch_size, batch_nbytes and
// fetch is valid.
typedef struct idist_loader_desc {
    // You keep ownership, and the sampler must outlive the loader. The loader advances the sampler:
    // the sampler's state is always the state after the last batch you got. Once a batch of 0
    // samples has ended the epoch, the state is the beginning of the next epoch. If you move or
    // reshard the sampler yourself, the loader drops what it has fetched ahead and continues from
    // there.
    idist_sampler *sampler;
    size_t batch_size;   // samples per batch of this rank
    size_t batch_nbytes; // size of the buffer of one batch
    // Writes the samples `indices[0 .. n-1]` to `batch`, and returns 0 on success. Called by worker
    // threads, several at a time for different batches; must not call idist.
    int (*fetch)(void *batch, const size_t *indices, size_t n, void *arg);
    void *arg;                 // passed to fetch
    int num_workers;           // threads, up to 1,024; 0 means that idist_loader_next calls fetch
    int prefetch;              // batches fetched ahead, per worker; 0 means 2
    bool drop_last;            // leave out a last batch that is not full
    int timeout_ms;            // limit of a wait for a fetch; 0 means 5 minutes, < 0 means none
    idist_allocator allocator; // for batches, for example in pinned memory; all zero means malloc
} idist_loader_desc;

// Creates a loader and starts its workers, which begin to fetch at the sampler's position. Local.
// On failure *loader is NULL. Returns IDIST_ERR_ARG if a field of desc is missing or out of range.
IDIST_API idist_status idist_loader_create(const idist_loader_desc *desc, idist_loader **loader);
// Waits for the running fetches, stops the workers, frees the loader and sets the pointer to NULL.
// Does nothing if it is NULL. Local. If some fetches do not return within desc.timeout_ms, this
// call returns anyway, and the last worker to end frees the batches.
IDIST_API void idist_loader_free(idist_loader **loader);
// Starts an epoch here and in the sampler, and drops what was fetched ahead. A new loader starts
// where its sampler is. Returns IDIST_ERR_TIMEOUT if earlier fetches are still running. Then the
// sampler is in the new epoch, and the next idist_loader_next or idist_loader_set_epoch tries
// again.
IDIST_API idist_status idist_loader_set_epoch(idist_loader *loader, uint64_t epoch);
// Returns the number of batches that this rank gets in an epoch.
IDIST_API size_t idist_loader_count(const idist_loader *loader);
// Returns the sampler, for its state. A sampler that idist_auto_loader created belongs to the
// loader.
IDIST_API idist_sampler *idist_loader_sampler(const idist_loader *loader);

typedef struct idist_batch {
    void *data; // what fetch wrote; you may write to it until the next call on the loader
    const size_t *indices; // of the samples; also valid until that call
    // Number of samples. If it is 0, the epoch is over: data is NULL, and the loader is back at its
    // start.
    size_t n;
} idist_batch;

// Gets the next batch, in the sampler's order whatever the number of workers is; blocks until the
// batch is fetched. Only one thread at a time may call the functions of a loader.
//
// IDIST_ERR_CALLBACK: fetch failed for these samples (data is NULL); the next call returns the
// batch after them.
// IDIST_ERR_TIMEOUT: a fetch did not return in time; nothing is lost, and the next call waits for
// the same batch.
// IDIST_ERR_STATE: this process was forked, and the workers belong to its parent.
IDIST_API idist_status idist_loader_next(idist_loader *loader, idist_batch *batch);

// Creates a loader and its sampler, like Ignite's auto_dataloader. In desc, batch_size and
// batch_nbytes count all ranks of the sampler's group together, and num_workers counts all ranks of
// the world on this host. See idist_auto_batch_size and idist_auto_num_workers. The loader creates
// the sampler from `samples`, so desc.sampler must be NULL. If the rank has a device (idist_nccl.h
// is included before this header) and desc.allocator is not set, batches are in pinned memory. Logs
// the resulting numbers at info level. Warns, as Ignite does, if samples.num_replicas and
// samples.rank do not match the group.
IDIST_API idist_status idist_auto_loader(const idist_loader_desc *desc,
                                         const idist_sampler_desc *samples, idist_loader **loader);

//------------------------------------------------------------------------------
// [train_api:ddp]  gradients averaged while the backward pass is still running
//------------------------------------------------------------------------------

// An array of the program, in host or device memory.
typedef struct idist_tensor {
    void *data;
    size_t count; // elements
    idist_dtype dtype;
} idist_tensor;

// Copies n tensors from root to all ranks of opts->group, in place. Collective; blocking. The ranks
// compare shapes first. If one rank has a different number of tensors, or a different count or
// dtype, all get IDIST_ERR_MISMATCH. The text names the rank and the tensor.
IDIST_API idist_status idist_broadcast_parameters(const idist_tensor *params, int n, int root,
                                                  const idist_opts *opts);
// Copies the state of an optimizer from root to all ranks, as idist_broadcast_parameters does. The
// state has tensors (momentum, for example) and a struct of numbers (rate, step). The struct is
// options_nbytes of host memory; `options` may be NULL if options_nbytes is 0.
IDIST_API idist_status idist_broadcast_optimizer_state(const idist_tensor *state, int n,
                                                       void *options, size_t options_nbytes,
                                                       int root, const idist_opts *opts);

typedef struct idist_ddp idist_ddp;

// How gradients are encoded when they are sent between ranks.
typedef enum idist_compression {
    IDIST_COMPRESS_NONE = 0,
    IDIST_COMPRESS_F16 = 1,  // F32 and F64 gradients are sent as F16 and summed in float
    IDIST_COMPRESS_BF16 = 2, // F32 and F64 gradients are sent as BF16 and summed in float
    // The gradient of a matrix is sent as a product of two thin matrices; see idist_powersgd_desc.
    IDIST_COMPRESS_POWERSGD = 4 // 3 is not used
} idist_compression;

// Parameters of PowerSGD (Vogels, Karimireddy and Jaggi, 2019), as in torch's powerSGD_hook. All
// zero is valid. All ranks must use the same parameters. A gradient of rows x cols elements, row by
// row, is approximated by P * transpose(Q), with `rank` columns in P and Q. So (rows + cols) * rank
// floats are sent instead of rows * cols.
//
// The error of the approximation is added to the gradient of the next iteration, even by a rank in
// idist_ddp_join. A gradient that is far too large on one rank leaves such errors on all ranks. The
// errors cancel out in the sum, but later gradients that are added to them are rounded away. All
// ranks drop the errors of a matrix if the terms of the sum over the ranks nearly cancel (the sum
// is smaller than 2^-16 times the size of the terms). Then rank 0 warns, and all ranks compute the
// iteration again without the errors.
//
// Everything, F64 included, is computed and sent as F32: values too small for F32 become 0, and
// values too large become infinite. Costs up to 8 bytes of memory per gradient, besides P and Q.
// Cannot be combined with find_unused or on_device.
typedef struct idist_powersgd_desc {
    // For gradient i, rows[i] is the number of rows: as many as its parameter has outputs. Its
    // other dimensions form the columns. If rows[i] is 0, the gradient is not a matrix. If rows is
    // NULL, each bucket is one square matrix, padded with zeros, as in torch's
    // batched_powerSGD_hook; that loses more of the gradients.
    const size_t *rows;
    // A gradient is compressed only if it has more elements than this factor times the number of
    // floats that are sent (0 means 2).
    double min_compression_rate;
    // First iteration that is compressed, counted from 0. By default, torch begins after 1,000
    // iterations; it recommends a tenth of the training.
    uint64_t start_iteration;
    uint64_t seed; // of the first Q
    // Added to the norm by which a column is divided. A column of zeros stays zero.
    double epsilon;
    int rank; // columns of P and Q, 1 .. 4; 0 means 1
    bool no_error_feedback;
    bool no_warm_start; // draw a new Q in every iteration instead of using the last one
} idist_powersgd_desc;

// A bucket of gradients, as a communication hook sees it.
typedef struct idist_bucket {
    int index; // 0 is the bucket launched first
    // Gradients of this rank, one after the other, or NULL if the bucket is empty. The function
    // `finish` leaves the result here.
    void *data;
    size_t count; // elements
    idist_dtype dtype;
    // For the hook's communication: group, stream and timeout, and in `start` a request to use.
    idist_opts opts;
    double scale; // the result must be scale * (sum over the ranks)
    void *state;  // the hook's own, one per bucket; initially NULL
    // Gradients in the bucket, in this order: their indices in idist_ddp_desc.grads, and the
    // element of data at which each begins. Both arrays have gradient_count entries.
    const int *gradients;
    const size_t *displs;
    int gradient_count;
} idist_bucket;

// A communication hook. Its `start` begins one call, with opts.request so that the program can
// continue. Its `finish` is called when the request is complete, and leaves the result in data; it
// may communicate too. All ranks call `start` and `finish` for the same buckets in the same order.
// If one of the two fails, the iteration fails. The hook's free_fn (may be NULL) is called with
// each state that is not NULL.
typedef struct idist_ddp_hook {
    idist_status (*start)(idist_bucket *bucket, void *arg);
    idist_status (*finish)(idist_bucket *bucket, void *arg);
    void (*free_fn)(void *state, void *arg);
    void *arg;
} idist_ddp_hook;

// Description of a ddp. A desc that is all zero except params and n is valid.
typedef struct idist_ddp_desc {
    // The n parameters in the order of the forward pass, and their gradients, with the same counts;
    // the dtypes may differ. Gradients must not overlap: list a parameter that is used twice (tied
    // weights) only once.
    //
    // If grads or its data is NULL, ddp allocates and zeroes the memory (idist_alloc, cudaMalloc);
    // see idist_ddp_grad. If grads is NULL, the gradients of a bucket lie together there, so none
    // is copied.
    //
    // A bucket is reduced in place if its gradients follow one another in memory, lower indices
    // first. Otherwise the bucket is reduced in pieces. Pieces are reduced in place where the ranks
    // share memory, and wherever a piece is contiguous. Other pieces are copied to memory that
    // stays in the cache, reduced there and copied back. With a hook, compression, find_unused or
    // on_device, the whole bucket is copied and copied back.
    const idist_tensor *params, *grads;
    int n;
    // Tensors that are not trained, such as running means. idist_ddp_forward copies them from one
    // rank to all.
    const idist_tensor *buffers;
    int n_buffers;
    idist_group *group; // NULL means the world
    // Size at which a bucket is closed. By default (0) it is 25 MiB, but 1 MiB for the first bucket
    // of each dtype.
    size_t bucket_nbytes;
    idist_compression compression;
    const idist_powersgd_desc *powersgd; // for IDIST_COMPRESS_POWERSGD; copied. NULL means all zero
    const idist_ddp_hook *hook;          // used instead of the built-in reduction; copied
    double prescale, postscale;          // factors before and after the sum; 0 means 1
    bool sum;                            // sum over the ranks instead of averaging
    bool keep_params;                    // parameters are equal already: only compare shapes
    // Set this if some parameters get no gradient in some iterations. A parameter that is not ready
    // when idist_ddp_wait is called counts as unused.
    bool find_unused;
    bool uneven; // ranks may run out of data at different times; see idist_ddp_join
    // With uneven: divide by the number of ranks that still have data instead of by all ranks.
    bool divide_by_active;
    bool on_device; // params, grads and buffers are in device memory (idist_nccl.h, not XLA)
    void *stream;   // cudaStream_t that computes the gradients on_device; NULL means the default
    int timeout_ms; // of each call, as in idist_opts
} idist_ddp_desc;

// Creates a ddp. Collective over the group; blocking. Compares shapes, copies the parameters and
// buffers of rank 0 of the group to all ranks, and forms the buckets. A bucket has gradients of one
// dtype, in reverse order, and is closed when it reaches the limit. The lists of tensors are
// copied. The arrays stay yours and must stay valid. A ddp belongs to the world in which it was
// created.
// IDIST_ERR_MISMATCH: as for idist_broadcast_parameters.
// IDIST_ERR_ARG: on any rank, a list or a field is invalid, gradients overlap, or gradients are in
// device memory and on_device is not set.
// IDIST_ERR_DEVICE: compression, factors and divide_by_active on the device need CUDA 12.8.
//
// IDIST_ERR_UNSUPPORTED: one of these:
//
//   - Compression of gradients other than F32 and, on the host, F64.
//   - Factors or divide_by_active with integer gradients.
//   - PowerSGD with find_unused or on_device.
//   - The field on_device, if idist_nccl.h was not included before this header.
//   - Gradients of a pair dtype or a user-defined dtype.
IDIST_API idist_status idist_ddp_create(const idist_ddp_desc *desc, idist_ddp **ddp);
// Frees a ddp and sets the pointer to NULL. Does nothing if it is NULL. Local. Within an iteration,
// it waits for the calls that are in flight and does not end the iteration of the other ranks: call
// idist_abort first.
IDIST_API void idist_ddp_free(idist_ddp **ddp);
// Returns the memory of gradient i. It is never zeroed again; see idist_ddp_wait.
IDIST_API void *idist_ddp_grad(const idist_ddp *ddp, int i);
// Returns the bucket of gradient i. Buckets are launched in the order of their numbers, except as
// follows.
//
// The first idist_ddp_wait that succeeds with no_sync off adopts the order in which gradients
// became ready on rank 0. (With uneven, on the first rank that has data.) Gradients for which
// idist_ddp_ready was not called come last, from the last to the first. If the gradients of some
// bucket lie apart in the memory of some rank, buckets are formed anew in that order, as torch
// does. Their number may change, but gradients stay where they are. Otherwise, and with compression
// or on_device, buckets keep their gradients and numbers and are launched in the order in which
// they became full. With a hook or find_unused, nothing changes.
IDIST_API int idist_ddp_bucket(const idist_ddp *ddp, int i);
IDIST_API int idist_ddp_buckets(const idist_ddp *ddp); // returns the number of buckets

// Copies the buffers of the first rank that still has training data to all ranks. Call it before
// the forward pass if there are buffers or uneven is set; otherwise it is not needed. Collective
// over the group. A forward pass without a backward pass, for validation, may be followed by
// another one. With uneven, each forward pass needs its idist_ddp_wait.
IDIST_API idist_status idist_ddp_forward(idist_ddp *ddp);
// Reports that gradient i is complete. Do not touch the gradient until idist_ddp_wait returns.
// Launches, in order, the buckets that are full, except the last one, and does not wait for them.
// If idist_ddp_forward is needed and was not called, does its work first, which blocks. If a bucket
// is reduced in pieces, at most 1 MiB of it is in flight (4 MiB if there are several hosts). Later
// calls launch the rest. Any thread, one at a time. Make no other call on this group until
// idist_ddp_wait: the moment at which buckets are launched differs from rank to rank. Returns
// IDIST_ERR_STATE if the gradient was ready already.
IDIST_API idist_status idist_ddp_ready(idist_ddp *ddp, int i);
// Ends the backward pass. All gradients count as ready, and on return all are averaged (on the
// device: for whatever is enqueued on desc.stream afterwards). All ranks get the same bits.
//
// With find_unused, a parameter that was ready neither in this pass nor in a preceding pass with
// no_sync contributes zero. If a parameter was ready on no rank, its gradient is left as it is.
//
// The averages stay in the gradients. If the backward pass adds to gradients, the program must zero
// them first, except after a pass with no_sync.
IDIST_API idist_status idist_ddp_wait(idist_ddp *ddp);
// Returns true if any rank had a gradient for parameter i in the last iteration. Without
// find_unused, always returns true.
IDIST_API bool idist_ddp_used(const idist_ddp *ddp, int i);
// Turns no_sync on or off. While it is on, forward, ready and wait send nothing: gradients
// accumulate locally, and the first iteration after it reduces them. Call it between iterations
// (otherwise it returns IDIST_ERR_STATE), with the same value on all ranks.
IDIST_API idist_status idist_ddp_no_sync(idist_ddp *ddp, bool on);

// Takes part in the iterations of the other ranks with zeros until all ranks have called it. For
// uneven inputs (desc.uneven): a rank that has run out of data calls this function instead of its
// next iteration. Its gradients and buffers may be overwritten. At the end, the parameters and
// buffers of the rank that joined last, whose optimizer made every step, are copied to all ranks.
// Sets *last to that rank (last may be NULL). Then iterations start afresh.
//
// Collective over the group; blocking. Ranks in this call do not answer other calls that the
// program makes on the group within an iteration. Gradients that this rank has accumulated with
// no_sync are not sent; turn no_sync off first. Returns IDIST_ERR_STATE if no_sync is on, an
// iteration has not ended, or uneven was not set.
IDIST_API idist_status idist_ddp_join(idist_ddp *ddp, int *last);
// Returns the number of ranks that had data in the last iteration.
IDIST_API int idist_ddp_active(const idist_ddp *ddp);

// Calls idist_ddp_wait and, if that succeeds, step(arg), like Ignite's auto_optim. Returns
// IDIST_ERR_CALLBACK if step returned something other than 0. Does nothing while no_sync is on.
IDIST_API idist_status idist_auto_optim(idist_ddp *ddp, idist_task_fn step, void *arg);

//------------------------------------------------------------------------------
// [train_api:zero]  an optimizer whose state is divided among the ranks
//
// Does what torch's ZeroRedundancyOptimizer and llm.c do (Rajbhandari et al., ZeRO, 2020). AdamW
// keeps two numbers per parameter element, and F16 and BF16 parameters need F32 master weights.
// Each of n ranks keeps one n-th of these numbers, and updates one n-th of the parameters. The
// gradients are averaged by reduce_scatter instead of all_reduce, and the updated parameters are
// sent by all_gather. Together the two calls send as many bytes as an all_reduce.
//
//     while (next_batch()) {
//         backward(idist_zero_grad(zero, 0), ...); // may call idist_zero_ready
//         if (idist_zero_wait(zero) != IDIST_OK) return 1;
//         for (k = 0; k < idist_zero_shards(zero); k++) adamw(idist_zero_shard(zero, k), step);
//         if (idist_zero_gather(zero) != IDIST_OK) return 1;
//     }
//------------------------------------------------------------------------------

typedef struct idist_zero idist_zero;

// Description of an idist_zero. A desc that is all zero except params and n is valid.
typedef struct idist_zero_desc {
    // The n parameters and their gradients, as in idist_ddp_desc. All are F32, F16 or BF16, and a
    // gradient has the dtype of its parameter. If grads or its data is NULL, idist_zero_create
    // allocates and zeroes the memory.
    const idist_tensor *params, *grads;
    int n;
    int states;           // F32 numbers of optimizer state per element: 2 for AdamW; at most 4
    idist_group *group;   // NULL means the world
    size_t bucket_nbytes; // as in idist_ddp_desc
    bool on_device;       // params, grads, shards and states are in device memory (idist_nccl.h)
    void *stream;         // as in idist_ddp_desc
    int timeout_ms;       // of each call, as in idist_opts
} idist_zero_desc;

// A part of one parameter that this rank updates. The arrays have `count` elements.
typedef struct idist_shard {
    int param;    // index in idist_zero_desc.params
    size_t first; // index of the shard's first element in the parameter
    size_t count; // elements
    // The parameter itself, or master weights if the parameter is F16 or BF16. The program can use
    // this pointer only if the F32 parameter is aligned.
    float *weights;
    float *grad;      // the average gradient, after idist_zero_wait
    float *states[4]; // as many as desc.states; zero at first
} idist_shard;

// Creates an idist_zero. Collective over the group; blocking. Copies the parameters of rank 0 of
// the group to all ranks. The lists of tensors are copied; the arrays stay yours and must stay
// valid. Returns the errors of idist_ddp_create, IDIST_ERR_UNSUPPORTED for other dtypes, and
// IDIST_ERR_ARG if parameters overlap in memory: list a parameter that is used twice only once.
IDIST_API idist_status idist_zero_create(const idist_zero_desc *desc, idist_zero **zero);
// Frees an idist_zero and sets the pointer to NULL. Does nothing if it is NULL. Local. Within an
// iteration, it waits for the calls that are in flight.
IDIST_API void idist_zero_free(idist_zero **zero);
// Returns the memory of gradient i. The backward pass writes to it, or adds to it.
IDIST_API void *idist_zero_grad(const idist_zero *zero, int i);

// Reports that gradient i is complete, as idist_ddp_ready does: the reduce_scatter of a full bucket
// starts while the gradients of earlier layers are still being computed.
IDIST_API idist_status idist_zero_ready(idist_zero *zero, int i);
// Ends the backward pass, as idist_ddp_wait does. On return, the shards of this rank have the
// average gradients. The contents of the gradients themselves are undefined. If the backward pass
// adds to gradients, the program must zero them first, except after a pass with no_sync.
IDIST_API idist_status idist_zero_wait(idist_zero *zero);
// Turns no_sync on or off, as idist_ddp_no_sync does, so that gradients accumulate locally. While
// it is on, idist_zero_wait does nothing, and the program must not update the shards.
IDIST_API idist_status idist_zero_no_sync(idist_zero *zero, bool on);

// Returns the number of shards of this rank, which may be 0. The shards and their arrays stay the
// same until idist_zero_free.
IDIST_API int idist_zero_shards(const idist_zero *zero);
// Returns shard k, or NULL if there is no such shard.
IDIST_API const idist_shard *idist_zero_shard(const idist_zero *zero, int k);
// Returns the gradients of all shards: an array of idist_zero_shards elements. In host memory,
// idist_clip_grad_norm and idist_grad_scaler_unscale take them, with `shared` false. If gradients
// overflow, do not update the shards; idist_zero_gather is then not needed.
IDIST_API const idist_tensor *idist_zero_shard_grads(const idist_zero *zero);

// Copies the weights of all shards to the parameters on all ranks, and rounds master weights to the
// dtype of the parameter. Collective over the group; blocking. The contents of the gradients are
// undefined afterwards. Returns IDIST_ERR_STATE between idist_zero_ready and idist_zero_wait.
IDIST_API idist_status idist_zero_gather(idist_zero *zero);

// Returns the number of arrays in which idist_zero_get_state stores the state of a parameter:
// desc.states, and one more for the master weights if any parameter is F16 or BF16.
IDIST_API int idist_zero_state_count(const idist_zero *zero);
// Collects the state of all ranks on root, for a checkpoint. Call it after idist_zero_gather. With
// m = idist_zero_state_count, states has m * n tensors: states[j * n + i] is array j of parameter
// i. The tensors are F32, with as many elements as their parameter, and with on_device in device
// memory. For an F32 parameter, the array of master weights gets a copy of the parameter. Other
// ranks may pass NULL. Collective over the group; blocking. All ranks get IDIST_ERR_ARG if a tensor
// is wrong, and IDIST_ERR_STATE if one of them is between idist_zero_ready and idist_zero_wait.
//
// A checkpoint consists of the parameters and these tensors. Another number of ranks can load it:
// root reads the file in a group of one rank, so that only root needs memory for the whole state.
// Then all ranks call idist_zero_set_state.
IDIST_API idist_status idist_zero_get_state(idist_zero *zero, const idist_tensor *states, int root);
// Distributes the state that idist_zero_get_state has collected from root to all ranks, and copies
// the parameters of root to all ranks. F16 and BF16 parameters become their rounded master weights.
// The contents of the gradients are undefined afterwards. Errors are as in idist_zero_get_state.
IDIST_API idist_status idist_zero_set_state(idist_zero *zero, const idist_tensor *states, int root);

//------------------------------------------------------------------------------
// [train_api:norm]  batch statistics and gradient norms over all ranks
//------------------------------------------------------------------------------

// Combines batch statistics over all ranks, for the forward pass of SyncBatchNorm. On entry,
// mean[channels] and var[channels] (biased) describe the *count values per channel on this rank. On
// return they describe the values of all ranks, and *count is the total. A rank may have *count ==
// 0. Ranks are combined in rank order by the update of Chan, Golub and LeVeque (1983), so all get
// the same bits, without cancellation. Collective over opts->group; host memory. If some rank has
// no memory, all ranks get IDIST_ERR_NO_MEMORY, and the group is unusable from then on.
IDIST_API idist_status idist_sync_batch_norm(float *mean, float *var, int channels, uint64_t *count,
                                             const idist_opts *opts);
// Replaces sum(dy) and sum(dy * (x - mean)), per channel, by the sums over all ranks, for the
// backward pass of SyncBatchNorm. Collective over opts->group; host memory. If some rank has no
// memory, all ranks get IDIST_ERR_NO_MEMORY, and the group is unusable from then on.
IDIST_API idist_status idist_sync_batch_norm_backward(float *sum_dy, float *sum_dy_xmu,
                                                      int channels, const idist_opts *opts);

// Scales gradients (any floating-point dtype, host memory) in place so that their joint 2-norm is
// at most max_norm, like torch's clip_grad_norm_. Sets *norm to the norm before scaling (norm may
// be NULL). With `shared`, every rank has all gradients, the same ones, as after idist_ddp_wait,
// and nothing is sent. Otherwise each rank has its own part, and the norm is the norm of all parts;
// collective over opts->group. If the sum of squares, in double, is not finite, all ranks get
// IDIST_ERR_ARG, and nothing is scaled.
IDIST_API idist_status idist_clip_grad_norm(const idist_tensor *grads, int n, double max_norm,
                                            bool shared, double *norm, const idist_opts *opts);

//------------------------------------------------------------------------------
// [train_api:scaler]  mixed precision: a scale for the loss, and conversions between dtypes
//
// F16 gradients that are too small become 0. Therefore the program multiplies the loss, and so all
// gradients, by a large scale. If a gradient overflows, the scale was too large: all ranks skip the
// step, and the scale is reduced. After many steps without an overflow, the scale grows.
//
//     idist_grad_scaler scaler = {0};
//     ...
//     backward(loss * idist_grad_scaler_scale(&scaler)); // F16 gradients
//     if (idist_ddp_wait(ddp) != IDIST_OK) return 1;
//     if (idist_convert(grads, master_grads, n) != IDIST_OK) return 1; // to F32
//     if (idist_grad_scaler_unscale(&scaler, master_grads, n, true, NULL) != IDIST_OK) return 1;
//     if (!scaler.found_inf) step(); // F32 master weights and their gradients
//     if (idist_grad_scaler_update(&scaler) != IDIST_OK) return 1;
//     if (idist_convert(masters, params, n) != IDIST_OK) return 1; // to F16
//------------------------------------------------------------------------------

// Copies the elements of from[i] to to[i], for n tensors, and converts them to the dtype of to[i].
// Local; host memory. The dtypes are F64, F32, F16, BF16, F8E4M3 and F8E5M2. Numbers pass through
// F32 and are rounded to nearest, unless both dtypes are equal. A number that is too large becomes
// infinite. In F8E4M3 and F8E5M2, such a number and infinity become the largest finite number, so
// an overflow cannot be recognized afterwards. Returns IDIST_ERR_ARG, and converts nothing, if two
// counts differ or a tensor is invalid. Two tensors must not overlap unless they are the same.
IDIST_API idist_status idist_convert(const idist_tensor *from, const idist_tensor *to, int n);

// A scale for the loss, with the rules and defaults of torch.amp.GradScaler. All zero is valid.
// Every rank has a scaler, and the scalers of all ranks stay equal. The struct has no pointers, so
// a program can save the scaler as the info of a checkpoint, or in its own struct there.
typedef struct idist_grad_scaler {
    double growth_factor;  // > 1; 0 means 2
    double backoff_factor; // > 0 and < 1; 0 means 0.5
    int growth_interval;   // steps without overflow until the scale grows; 0 means 2,000
    float scale;           // at least 2^-126; 0 means 65,536
    // Steps without overflow since the scale last changed, or could not grow further.
    int growth_tracker;
    // State of the current iteration, which idist_grad_scaler_update resets. A program that
    // unscales in its own code, for example on a device, sets both fields.
    bool unscaled;  // the gradients are unscaled
    bool found_inf; // a gradient is infinite or NaN, so the step must be skipped
} idist_grad_scaler;

// Returns the factor for the loss.
IDIST_API float idist_grad_scaler_scale(const idist_grad_scaler *scaler);

// Multiplies n gradients by the reciprocal of the scale, rounded to a float as in torch, in place.
// Sets scaler->found_inf if an element was infinite or NaN before. Call it once per iteration, with
// all gradients. Host memory; F32, F64 or BF16.
//
// With `shared`, every rank has all gradients, the same ones, as after idist_ddp_wait. An overflow
// on one rank is then in the sums of all ranks, so all ranks set found_inf, and nothing is sent.
// With find_unused, set the count of a gradient to 0 if idist_ddp_used is false. Without `shared`,
// each rank has its own gradients, and all ranks set found_inf if one of them has an overflow;
// collective over opts->group.
//
// IDIST_ERR_ARG: a gradient is invalid or has another dtype, or a field of the scaler is out of
// range. F16 gradients cannot hold the small quotients: convert them to F32 first.
// IDIST_ERR_STATE: the gradients of this iteration are unscaled already.
IDIST_API idist_status idist_grad_scaler_unscale(idist_grad_scaler *scaler,
                                                 const idist_tensor *grads, int n, bool shared,
                                                 const idist_opts *opts);

// Ends an iteration: adapts the scale to found_inf, and resets found_inf. Local. The scale stays
// finite and does not fall below 2^-126. Returns IDIST_ERR_STATE if no gradients were unscaled.
IDIST_API idist_status idist_grad_scaler_update(idist_grad_scaler *scaler);

//------------------------------------------------------------------------------
// [train_api:schedule]  values that follow the step, such as the learning rate
//
// Local: a value depends on the arguments only. So ranks that pass the same arguments get the same
// bits, and nothing has to be saved. The functions that return a value return NaN for bad
// arguments, and idist_last_error says what is wrong. Only idist_plateau, at the end of this
// section, has state.
//------------------------------------------------------------------------------

typedef struct idist_milestone {
    double step, value;
} idist_milestone;

// Returns the value at `step` of Ignite's PiecewiseLinear. The schedule passes through n milestones
// on straight lines, and is constant before the first one and after the last one. A step may have a
// fraction, for example of an epoch. Returns NaN if there are no milestones, if steps do not
// increase, or if a number is not finite. Also returns NaN if neighbors are so far apart that the
// product of their distances in step and value is not finite.
IDIST_API double idist_piecewise_linear(const idist_milestone *milestones, int n, double step);

// Kind of a schedule: torch's schedulers, as closed formulas. In the formulas, `begin`, `end` and
// `steps` are fields of the schedule, and `left` is the fraction of the steps that remains:
// 1 - step / steps, but at least 0.
typedef enum idist_schedule_kind {
    IDIST_SCHEDULE_CONSTANT = 0,    // begin
    IDIST_SCHEDULE_STEP = 1,        // StepLR: times factor after every `steps` steps
    IDIST_SCHEDULE_EXPONENTIAL = 2, // ExponentialLR: times factor after every step
    // CosineAnnealingLR: from begin to end along half a cosine in `steps` steps (T_max), then back
    // in `steps` steps, and so on.
    IDIST_SCHEDULE_COSINE = 3,
    // end + (begin - end) * left^power. PolynomialLR has end 0. LinearLR has power 1,
    // begin = rate * start_factor and end = rate * end_factor.
    IDIST_SCHEDULE_POLYNOMIAL = 4,
    // OneCycleLR: up from begin to peak at step rise * steps - 1, and down to end at step
    // steps - 1. Both ways are half a cosine unless `linear` is set. See also `three_phase`.
    IDIST_SCHEDULE_ONE_CYCLE = 5,
    // MultiStepLR: begin, times factor at each of `milestones`. ConstantLR with factor f has
    // begin = rate * f, factor = 1 / f, and the milestone total_iters.
    IDIST_SCHEDULE_MULTI_STEP = 6,
    // CosineAnnealingWarmRestarts: from begin to end along half a cosine, then from begin again.
    // The first cycle has `steps` steps. Each later cycle is `multiple` times as long as the cycle
    // before.
    IDIST_SCHEDULE_COSINE_RESTARTS = 7,
    // CyclicLR ("triangular"): on straight lines from begin to peak in `steps` steps, back to begin
    // in `down_steps` steps, and so on. The momentum does not cycle.
    IDIST_SCHEDULE_CYCLIC = 8,
    // CyclicLR ("triangular2"): as CYCLIC, but each cycle is half as high as the cycle before.
    IDIST_SCHEDULE_CYCLIC_HALVED = 9,
    // CyclicLR ("exp_range"): as CYCLIC, but the height above begin is multiplied by factor^step.
    IDIST_SCHEDULE_CYCLIC_EXPONENTIAL = 10
} idist_schedule_kind;

// A schedule. All zero is valid: the constant 0. Every kind uses begin and the warm-up. The
// comments at the kinds and at the fields say which other fields a kind uses.
typedef struct idist_schedule {
    double begin, end;
    double peak;           // of one cycle and of the cyclic kinds
    double rise;           // fraction of `steps` until the peak, below 1; 0 means 0.3
    double factor;         // > 0
    double power;          // > 0; 0 means 1
    double warmup;         // the value at step 0, if there are warm-up steps
    uint64_t warmup_steps; // on a straight line to the first value; the schedule begins after them
    uint64_t steps;
    idist_schedule_kind kind;
    uint64_t down_steps;        // of the cyclic kinds; 0 means `steps`
    uint64_t multiple;          // of a cosine with restarts; 0 means 1
    const uint64_t *milestones; // ascending steps; a step that is listed twice counts twice
    int milestone_count;        // of the array `milestones`, which is yours; may be 0
    // Of one cycle: straight lines instead of half cosines (anneal_strategy "linear").
    bool linear;
    // Of one cycle: three phases. The rate goes up to peak, back to begin in as many steps, and
    // then to end. `rise` is at most 0.5.
    bool three_phase;
} idist_schedule;

// Returns the value at a step; the first step is step 0. The error is at most 1e-12 of the largest
// value in the formula if the values are normal numbers, power is at most 10,000, and steps is at
// most 2^53. A call takes microseconds, however large `step` is; with milestones, its time grows
// with their number. Returns NaN in these cases:
//
//   - The schedule is NULL, or its kind is invalid.
//   - The kind uses `steps`, which is 0.
//   - The milestones decrease.
//   - A field that the kind uses is out of its range or not finite.
//   - Two values that the schedule goes between are so far apart that their difference is not
//     finite.
IDIST_API double idist_schedule_value(const idist_schedule *schedule, uint64_t step);

// Returns the value at a step of n schedules, one after the other (SequentialLR). Schedule 0 begins
// at step 0. Schedule i begins at step milestones[i - 1], which is its own step 0. There are n - 1
// milestones, and each is above the one before. Every schedule has its own `begin`. (In torch, the
// schedulers share the initial rate of the optimizer, which OneCycleLR and CyclicLR change for the
// others.) Returns NaN if n is below 1, a pointer is NULL (milestones may be NULL if n is 1), the
// milestones do not increase, or idist_schedule_value rejects a schedule.
IDIST_API double idist_schedule_sequence(const idist_schedule *schedules,
                                         const uint64_t *milestones, int n, uint64_t step);

// A rate that falls when a metric stops improving (ReduceLROnPlateau). Every field except value may
// be 0. The struct contains no pointers, so it can be part of the info of a checkpoint. The
// program sets the fields up to high_is_best, and the updates change value and the remaining
// fields.
typedef struct idist_plateau {
    double value;     // the rate: set the first rate, and read the rate after every update
    double factor;    // of each decrease, above 0 and below 1; 0 means 0.1
    double min_value; // no decrease ends below this rate
    double eps;       // a decrease by eps or less is not made; 0 means 1e-8, < 0 means 0
    // By how much a metric must be better than the best metric: a fraction of the best metric, or a
    // difference if `absolute` is set. 0 means 1e-4, < 0 means 0. A fraction must be below 1 unless
    // high_is_best is set. If the best metric is negative, metrics that are worse by up to that
    // fraction count as better, as in torch. Set `absolute` for such metrics.
    double threshold;
    int patience;      // bad updates in a row that leave the rate; 0 means 10, < 0 means 0
    int cooldown;      // updates that do not count as bad after a decrease, even one within eps
    bool absolute;     // threshold_mode "abs"
    bool high_is_best; // mode "max": higher metrics are better, as for an accuracy
    bool begun;        // true after the first update
    double best;       // the best metric so far; infinitely bad if all metrics were NaN
    int bad_count;     // bad updates in a row until now
    int cooldown_left; // updates until the end of the cooldown
} idist_plateau;

// Adds a metric, usually once per epoch, and lowers the rate if more than `patience` updates in a
// row were bad. An update is bad if the metric is NaN, or is not better than the best metric by
// more than the threshold. No update is bad during the cooldown.
// Local: the rates of all ranks stay equal if all ranks pass equal metrics, such as the result of
// idist_mean_compute. Returns IDIST_ERR_ARG, and changes nothing, if plateau is NULL or a field
// that the program sets is out of its range or not finite.
IDIST_API idist_status idist_plateau_update(idist_plateau *plateau, double metric);

//------------------------------------------------------------------------------
// [train_api:metric]  numbers over all ranks
//
// A metric is a plain struct, all zero at the start of an epoch. An update function adds what this
// rank saw, and a compute function gives the value over all ranks of opts->group. The compute
// function reduces a copy, so it may be called at any time and repeatedly. It is collective and
// gives the same result on all ranks. A rank that does not want the result passes NULL for value.
// The scores of a confusion matrix are local. idist_epoch_metric and idist_roc_auc take arrays
// instead of a struct.
//------------------------------------------------------------------------------

// Accuracy: the fraction of samples whose highest score is the score of their label.
typedef struct idist_accuracy {
    uint64_t correct, total; // samples
} idist_accuracy;
// Adds n samples. scores: n rows of `classes` scores. labels: n. If several scores are equal, the
// first one counts; a row with a NaN is wrong. Returns IDIST_ERR_ARG if a label is outside 0 ..
// classes - 1.
IDIST_API idist_status idist_accuracy_update(idist_accuracy *m, const float *scores,
                                             const int *labels, size_t n, int classes);
// Adds n samples for top-k accuracy: a sample is correct if fewer than k classes come before its
// label. A class comes before the label if its score is higher, or if its score is equal and its
// number is lower. A row with a NaN is wrong. With k = 1 this is idist_accuracy_update. Returns
// IDIST_ERR_ARG, and counts nothing, if k is outside 1 .. classes or a label is outside 0 ..
// classes - 1.
IDIST_API idist_status idist_accuracy_update_top_k(idist_accuracy *m, const float *scores,
                                                   const int *labels, size_t n, int classes, int k);
// Computes the accuracy over all ranks, which is NaN if no rank has seen a sample.
IDIST_API idist_status idist_accuracy_compute(const idist_accuracy *m, double *value,
                                              const idist_opts *opts);

// A weighted mean, for example of the loss, weighted by samples. A value of weight 0 does not
// count, even if it is NaN or infinite: an empty batch has no loss. The mean is NaN if no rank has
// a value.
typedef struct idist_mean {
    double sum, weight;
} idist_mean;
IDIST_API void idist_mean_update(idist_mean *m, double value, double weight);
IDIST_API idist_status idist_mean_compute(const idist_mean *m, double *value,
                                          const idist_opts *opts);
// Add the squares or the absolute values of the differences between `count` predictions and
// targets. idist_mean_compute then gives the mean squared error or the mean absolute error. NaN and
// infinity propagate into the mean. Each element counts once. Ignite's MeanSquaredError and
// MeanAbsoluteError divide by the number of samples instead. So if a sample is a vector of w
// elements, Ignite's value is w times as large. Differences are computed in double. Return
// IDIST_ERR_ARG, and count nothing, if a pointer is NULL; predicted and targets may be NULL if
// count is 0.
IDIST_API idist_status idist_mean_squared_error_update(idist_mean *m, const float *predicted,
                                                       const float *targets, size_t count);
IDIST_API idist_status idist_mean_absolute_error_update(idist_mean *m, const float *predicted,
                                                        const float *targets, size_t count);

// An exponential moving average: value = alpha * value + (1 - alpha) * new, starting with the first
// value. With alpha 1 the first value stays. compute gives the mean over those ranks that have a
// value, or NaN if no rank has one.
typedef struct idist_running_average {
    double alpha; // 0 means 0.98
    double value;
    bool begun; // true if there is a value
} idist_running_average;
IDIST_API void idist_running_average_update(idist_running_average *m, double value);
IDIST_API idist_status idist_running_average_compute(const idist_running_average *m, double *value,
                                                     const idist_opts *opts);

// A confusion matrix: cells[label * classes + predicted] are classes * classes counts. The memory
// is yours, zero at the start.
typedef struct idist_confusion {
    uint64_t *cells;
    int classes;
} idist_confusion;
IDIST_API idist_status idist_confusion_update(idist_confusion *m, const int *predicted,
                                              const int *labels, size_t n);
// Writes the classes * classes counts of all ranks to cells, which must not be the cells of m. A
// rank that does not want the counts passes NULL for cells.
IDIST_API idist_status idist_confusion_compute(const idist_confusion *m, uint64_t *cells,
                                               const idist_opts *opts);

// How the scores of the classes become one number.
typedef enum idist_average {
    IDIST_AVERAGE_MACRO = 0,    // the mean over all classes, including classes that never occur
    IDIST_AVERAGE_MICRO = 1,    // the score of the counts summed over all classes
    IDIST_AVERAGE_WEIGHTED = 2, // the mean over the classes, weighted by the samples of each class
    IDIST_AVERAGE_NONE = 3      // no average: one number per class
} idist_average;
// Compute scores of a confusion matrix. Local. `cells` are the classes * classes counts that
// idist_confusion_compute gave. `values` gets `classes` numbers with IDIST_AVERAGE_NONE, and
// otherwise one number. The score of a class is computed from three counts: the samples with this
// label, the samples for which the class was predicted, and the samples for which both hold. A
// score of 0 / 0 is 0, as in Ignite. If there are no samples, every average is 0.
//
//     idist_precision   correct / predictions
//     idist_recall      correct / labels
//     idist_f_beta      the weighted harmonic mean of precision and recall:
//                       (1 + beta^2) * correct / (beta^2 * labels + predictions). beta is at least
//                       0; infinity gives the recall.
//     idist_iou         correct / (labels + predictions - correct), the intersection over union;
//                       IDIST_AVERAGE_MACRO gives the mean IoU
//
// A binary classifier passes 2 classes and IDIST_AVERAGE_NONE; its precision is values[1]. A
// multi-label classifier keeps one confusion of 2 classes (absent, present) for each label, and
// values[1] of a confusion is the score of that label. For the micro average, add the cells of all
// confusions element by element, and take values[1] of the result.
//
// Return IDIST_ERR_ARG, and write no value, if a pointer is NULL, classes is below 1, beta is
// negative or NaN, or average is not one of the above.
IDIST_API idist_status idist_precision(const uint64_t *cells, int classes, idist_average average,
                                       double *values);
IDIST_API idist_status idist_recall(const uint64_t *cells, int classes, idist_average average,
                                    double *values);
IDIST_API idist_status idist_f_beta(const uint64_t *cells, int classes, double beta,
                                    idist_average average, double *values);
IDIST_API idist_status idist_iou(const uint64_t *cells, int classes, idist_average average,
                                 double *values);

// Computes a metric that cannot be summed, such as a median. Rank 0 of the group gets the rows of
// all ranks, in rank order, and calls fn(rows, n, arg, &value); its value goes to all ranks.
// rows: n of row_nbytes bytes; n may differ between ranks.
// The function returns 0 on success. If it fails, all ranks get IDIST_ERR_CALLBACK. It must not
// call idist.
typedef int (*idist_epoch_metric_fn)(const void *rows, size_t n, void *arg, double *value);
IDIST_API idist_status idist_epoch_metric(const void *rows, size_t n, size_t row_nbytes,
                                          idist_epoch_metric_fn fn, void *arg, double *value,
                                          const idist_opts *opts);

// Computes the area under the ROC curve of a binary classifier: the fraction of pairs of a sample
// with label 1 and a sample with label 0 in which the former has the higher score. A pair with
// equal scores counts one half. scores, labels: n; n may differ between ranks. The value is NaN if
// the samples of all ranks have the same label, or if there are no samples.
//
// Collective. Rank 0 of the group gets 8 bytes per sample of all ranks, sorts the samples and
// computes the value, which goes to all ranks. Rank 0 counts the pairs exactly; only the last
// divisions round. A rank that does not want the result passes NULL for value.
//
// All ranks get the error of the first rank that failed. On the other ranks, the error text also
// gives the number of that rank. (Wrong opts fail only on their own rank.)
// IDIST_ERR_ARG: a label is neither 0 nor 1, a score is NaN, or a pointer is NULL.
// IDIST_ERR_NO_MEMORY: out of memory.
IDIST_API idist_status idist_roc_auc(const float *scores, const int *labels, size_t n,
                                     double *value, const idist_opts *opts);

//------------------------------------------------------------------------------
// [train_api:checkpoint]  files that are either complete or absent
//
// Host memory only. Collective over opts->group; blocking. Rank 0 of the group reads and writes,
// and all ranks get the status of what happened there.
//------------------------------------------------------------------------------

typedef struct idist_checkpoint_desc {
    const char *folder; // on rank 0; created if it does not exist
    const char *prefix; // of the file names; NULL means "checkpoint"
    int keep;           // how many files to keep, those with the best scores; 0 means 1, < 0 all
    int keep_latest;    // how many more to keep, those with the highest steps; < 0 means all
    bool low_is_best;   // lower scores are better, as for a loss
} idist_checkpoint_desc;

// Writes tensors and a struct of yours (info, for example epoch and rate; may be NULL, and is
// ignored on other ranks) to folder/PREFIX_STEP_score=SCORE.idist. It first writes a temporary file
// in the folder, then calls fsync, rename, and fsync of the folder. SCORE has up to six digits and
// a period in every locale.
//
// A step has one file: the new file replaces an earlier file of the same step, whatever its score.
// Then all but the `keep` best files and the `keep_latest` latest files are removed; a file may be
// both. If scores are equal, the later step is better. A crash at any moment leaves complete files,
// and at most one temporary file, which the next save removes. A crash may also leave an earlier
// file of the same step, which the next save of that step removes.
//
// The file is not written, and nothing changes, if `keep` files of other steps are better and
// `keep_latest` are later. The log says so at info level, or as a warning if the better file has a
// later step, and so comes from another run. Every valid file with the prefix counts, even from
// earlier runs: use a folder per training run. A damaged file does not count, does not cause the
// removal of another file, and is not removed itself; a warning names the file once. To verify the
// files, the first save of a process reads those that it finds. Later saves read only what others
// have written.
//
// If the file system refuses to sync the file or the folder, as network file systems and shared
// folders of virtual machines may, the save still succeeds. The file is complete, but may be lost
// if the machine crashes. A warning says so once per process.
//
// IDIST_ERR_NO_SPACE: the file is not written, and existing files stay.
// IDIST_ERR_SYSTEM: as IDIST_ERR_NO_SPACE; or the file is written, but the folder could not be
// synced, or an earlier file could not be removed. The text says which.
// IDIST_ERR_ARG: the score is NaN.
IDIST_API idist_status idist_checkpoint_save(const idist_checkpoint_desc *desc, uint64_t step,
                                             double score, const idist_tensor *tensors, int n,
                                             const void *info, size_t info_nbytes,
                                             const idist_opts *opts);

// Reads a file into tensors and info on all ranks; path is used on rank 0 only. Before anything is
// written, the whole file is checked: magic, version, counts, dtypes, sizes, and a checksum over
// every byte. All ranks get the status and the reason:
// IDIST_ERR_CORRUPT: the file is empty, truncated, damaged or not a checkpoint.
// IDIST_ERR_UNSUPPORTED: a newer version of idist, or a machine of another byte order, wrote it.
// IDIST_ERR_ARG: the file is valid but has other tensors, or it is not a regular file.
// IDIST_ERR_NOT_FOUND: there is no such file.
// IDIST_ERR_SYSTEM: the file cannot be read. Or the checksum over what arrived on some rank is
// wrong, and the contents of tensors and info are undefined.
IDIST_API idist_status idist_checkpoint_load(const char *path, const idist_tensor *tensors, int n,
                                             void *info, size_t info_nbytes,
                                             const idist_opts *opts);

// Finds the valid file with the best score, or the one with the highest step if latest is set. If a
// crash has left two files of a step, the newer one counts. Rank 0 looks for the file and reads all
// of it to verify its checksum, and all ranks get its path. A damaged file is skipped; a warning
// names the file and says what is wrong.
// IDIST_ERR_NOT_FOUND: there is no folder, or no file in it has the name of a checkpoint: training
// can start afresh.
// IDIST_ERR_CORRUPT: files have such names, but all of them are damaged, or a newer version of
// idist wrote them: an earlier training run left them. The text names them.
// IDIST_ERR_TRUNCATED: capacity is too small.
// IDIST_ERR_SYSTEM: the folder or one of its checkpoints cannot be read, so that another one may be
// the best or the latest.
IDIST_API idist_status idist_checkpoint_find(const idist_checkpoint_desc *desc, bool latest,
                                             char *path, size_t capacity, const idist_opts *opts);

//------------------------------------------------------------------------------
// [train_api:log]  what a training run prints, on rank 0 only
//
// Lines go to desc.logger at info level, whatever IDIST_LOG says, or to stderr: "2026-01-30
// 19:26:12,180 NAME INFO: text". Calls on other ranks and calls from inside a logger do nothing.
//------------------------------------------------------------------------------

#if defined(__GNUC__)
#define IDIST__FORMAT(at, args) __attribute__((format(printf, at, args)))
#else
#define IDIST__FORMAT(at, args)
#endif

// Logs a line of text. `name` is the name of the training run, such as "CIFAR10-Training". Prints
// up to 2,000 bytes of the text; line feeds in it become spaces. Your format prints fractions with
// the decimal point of your program's locale, as with printf. Numbers that idist prints have a
// period in every locale.
IDIST_API void idist_train_log(const char *name, const char *format, ...) IDIST__FORMAT(2, 3);
// Logs version, backend, device, world size and idist_show_config, each on its own line.
IDIST_API void idist_train_log_config(const char *name);
// Logs "Epoch 3 - Evaluation time (seconds): 4.02 - Test metrics:", then a line "    Accuracy: 0.7"
// for each of n metrics.
IDIST_API void idist_train_log_metrics(const char *name, int epoch, double seconds, const char *tag,
                                       const char *const *names, const double *values, int n);

// A progress bar on stderr, if stderr is a terminal: "Epoch [3/24]: [120/391]  30%|###       |
// loss=1.2 [00:12<00:27]". The line ends when done == total. On a narrow terminal, first the
// picture is left out and then the line is cut, so that it stays one line. A terminal of unknown
// width counts as 80 columns.
//
// Title and text are UTF-8, whatever the locale is. Control characters, such as line feeds, become
// spaces. Bytes that are not UTF-8 become question marks. Escape sequences for colors are passed
// on, and colors end with the line; other escape sequences are left out.
typedef struct idist_progress {
    const char *title; // "Epoch [3/24]"
    uint64_t total;
    int64_t started_ns, shown_ns; // private; 0
} idist_progress;
IDIST_API void idist_progress_update(idist_progress *bar, uint64_t done, const char *text);

//------------------------------------------------------------------------------
// [train_api:summary]  scalars over the steps of a training run, for TensorBoard and as CSV
//
// Does what add_scalar of torch.utils.tensorboard's SummaryWriter does. All calls are local, and
// any thread may make them. Rank 0 of the group writes. On other ranks every function returns
// IDIST_OK and does nothing, except that idist_summary_create gives a handle as well. A handle may
// outlive its group and the world. The folder has two kinds of files:
//
//     scalars.csv                 wall_time,step,tag,value: a line per value. wall_time is in
//                                 seconds since 1970. A tag with commas, quotes or line breaks is
//                                 quoted as RFC 4180 says. Values have as many digits as it takes
//                                 to read the same double; nan, inf and -inf.
//     events.out.tfevents.*       what TensorBoard reads; values are rounded to floats
//
// A training run that is resumed appends to scalars.csv and writes another events file; TensorBoard
// joins the events files of a folder. A last line that a crash has cut off is removed first.
//
// In a child made by fork, idist_summary_add and _flush fail with IDIST_ERR_STATE, and
// idist_summary_free writes nothing.
//------------------------------------------------------------------------------

typedef struct idist_summary idist_summary;

// A value of a summary.
typedef struct idist_scalar {
    const char *tag;  // valid until the function returns
    double value;     // may be NaN or infinite
    double wall_time; // in seconds since 1970
    uint64_t step;
} idist_scalar;

typedef struct idist_summary_desc {
    const char *folder; // on rank 0; created with its parents if it does not exist
    // The group whose rank 0 writes. If it is NULL, rank 0 of the world writes, or, before there is
    // a world, every process.
    idist_group *group;
    bool no_csv;
    bool no_tensorboard;
    // Gets every value, on the rank that writes, for example to pass the value to MLflow or another
    // experiment tracker; may be NULL. idist_summary_add calls it after writing the value to the
    // files, even if that failed, one call at a time. Returns 0 on success. It must not use this
    // summary, make communication calls or log. With no_csv and no_tensorboard, the folder may be
    // NULL.
    int (*track)(const idist_scalar *scalar, void *arg);
    void *arg; // passed to track
} idist_summary_desc;

// Opens the files.
// IDIST_ERR_ARG: scalars.csv exists, but is damaged or was not written by idist; it is untouched.
// Or neither a file nor desc.track is wanted.
// IDIST_ERR_STATE: another handle or process is writing scalars.csv.
// IDIST_ERR_NO_MEMORY: out of memory.
// IDIST_ERR_NO_SPACE, IDIST_ERR_SYSTEM: a file or folder cannot be created.
IDIST_API idist_status idist_summary_create(const idist_summary_desc *desc,
                                            idist_summary **summary);

// Writes a value to both files before it returns, so that the value is not lost if the process is
// killed. A tag, such as "train/loss", has up to 1,000 bytes of UTF-8, and at least one.
// TensorBoard groups tags by what precedes the slash. A step is at most INT64_MAX.
//
// IDIST_ERR_NO_SPACE, IDIST_ERR_SYSTEM: the file ends with the previous value. This value is kept
// in memory, and the next call writes it if it can. Up to 64 KiB are kept per file; further values
// are lost.
// IDIST_ERR_CALLBACK: desc.track failed, and the files have the value.
IDIST_API idist_status idist_summary_add(idist_summary *summary, const char *tag, double value,
                                         uint64_t step);

// Returns when the values are on the disk, so that they are not lost if the machine crashes. It is
// no failure if the file system refuses to sync; a warning says so once per process.
IDIST_API idist_status idist_summary_flush(idist_summary *summary);

// Flushes the files and frees the summary in any case; *summary becomes NULL. Returns IDIST_OK if
// all values are in the files, and IDIST_ERR_NO_SPACE if some were lost.
IDIST_API idist_status idist_summary_free(idist_summary **summary);

//------------------------------------------------------------------------------
// [train_api:run]  how fast a training run was, and which rank slowed it down
//
//     idist_run run = {0};
//     if (idist_run_begin(&run) != IDIST_OK) return 1;
//     while (next_batch()) {
//         ...
//         run.examples += batch.n;
//     }
//     if (idist_run_report(&run, "digits", NULL, NULL) != IDIST_OK) return 1;
//
// Rank 0 logs, in the form of idist_train_log:
//
//     Run of 12.3 s on 2 ranks: 4020.6 examples/s
//         rank 0 (node7): 2010.3 examples/s, waited 7.6 % of the time, sent 30.6 MB in 412 calls
//         rank 1 (node7): 2010.3 examples/s, waited 0.4 % of the time, sent 30.6 MB in 412 calls
//         slowest: rank 1, which computed for 12.2 s; the other ranks for 11.4 s on average
//------------------------------------------------------------------------------

// A training run on this rank. All zero at the start.
typedef struct idist_run {
    uint64_t examples;  // the number of examples that this rank has processed
    int64_t started_ns; // private
} idist_run;

// What one rank did between idist_run_begin and idist_run_report.
typedef struct idist_run_rank {
    double seconds;       // from begin to report
    double waited;        // the part of `seconds` in communication calls and waits for requests
    uint64_t examples;    // run.examples
    uint64_t calls;       // communication calls
    uint64_t sent_nbytes; // bytes in the send buffers of these calls, not what an algorithm sends
} idist_run_rank;

// Starts the clock, and begins to count the communication calls of the calling thread. Calls of
// other threads do not count. The time of idist_test does not count as waiting. Local. Counting
// takes about 0.1 us per call. From then on until the process ends, idist_send and idist_recv of
// small messages take longer. A second idist_run_begin in a thread ends the first run of the
// thread. Returns IDIST_ERR_SYSTEM if the system has no memory.
IDIST_API idist_status idist_run_begin(idist_run *run);

// Ends the run, even if this call fails. Sets ranks[r] to the numbers of rank r of the group, on
// all ranks; ranks has one element per rank, or is NULL. If rank 0 of the world is in the group,
// rank 0 logs the summary above, with the ranks of the world. If the group has more than 16 ranks,
// the log lists the 16 that computed longest. `name` is the name of the training run. Collective
// over opts->group; blocking. All ranks get IDIST_ERR_STATE if one of them calls it from another
// thread, or without idist_run_begin.
IDIST_API idist_status idist_run_report(const idist_run *run, const char *name,
                                        idist_run_rank *ranks, const idist_opts *opts);

#ifdef __cplusplus
} // extern "C"
#endif

#undef IDIST__FORMAT

#endif // IDIST_TRAIN_H

// Only here for the API? Stop reading.

#if defined(IDIST_IMPLEMENTATION) && !defined(IDIST_TRAIN_IMPLEMENTATION_DONE)
#define IDIST_TRAIN_IMPLEMENTATION_DONE

// ---- base/begin.h --------------------------------------------------------------------------------

// base/begin.h: macros and compiler settings for the implementation
//
// Included where the implementation of each src/idist*.h begins. base/end.h ends the implementation
// and restores the settings. Has no include guard, so that each drop-in gets a copy.

// System headers may define these words as macros, as windows.h does.
#pragma push_macro("small")
#undef small
#pragma push_macro("lock")
#undef lock
#pragma push_macro("min")
#undef min
#pragma push_macro("max")
#undef max

// C++ programs may enable these warnings, but code that must also compile as C needs the casts and
// the NULLs that they report.
#if defined(__cplusplus) && defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wold-style-cast"
#pragma GCC diagnostic ignored "-Wzero-as-null-pointer-constant"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wuseless-cast"
#endif
#endif

// gcc's thread sanitizer does not support fences, and warns about each fence for shared memory.
#if defined(__SANITIZE_THREAD__) && !defined(__clang__) && __GNUC__ >= 11
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wtsan"
#endif

#if defined(__GNUC__) && !defined(__clang__)
#define IDIST__VECTORIZE __attribute__((optimize("O3")))
#define IDIST__NO_ALIAS _Pragma("GCC ivdep")
#elif defined(__clang__)
#define IDIST__VECTORIZE
#define IDIST__NO_ALIAS _Pragma("clang loop vectorize(assume_safety)")
#else
#define IDIST__VECTORIZE
#define IDIST__NO_ALIAS
#endif
#define IDIST__PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#define IDIST__UNUSED __attribute__((unused))
#define IDIST__NOINLINE __attribute__((noinline))
#define IDIST__INLINE static inline __attribute__((always_inline))
#define IDIST__TLS static __thread

// IDIST__TRY(result = fn(arg)) calls a function of the program. In C++ with exceptions, the macro
// catches every exception and records in idist__me.thrown what was thrown. Otherwise an exception
// ends the process as if fn were noexcept: std::terminate prints the exception. A function that
// uses the macro must be IDIST__NOINLINE.
#if defined(__cplusplus) && defined(__EXCEPTIONS)
#include <exception>
#ifdef __GLIBCXX__
#include <cxxabi.h>
// clang-format off
#define IDIST__CATCH_EXIT catch (abi::__forced_unwind &) { throw; } // pthread_exit
// clang-format on
#else
#define IDIST__CATCH_EXIT
#endif
#define IDIST__TRY(statement)                                                     \
    do {                                                                          \
        try {                                                                     \
            statement;                                                            \
        }                                                                         \
        IDIST__CATCH_EXIT                                                         \
        catch (const std::exception &thrown_) {                                   \
            idist__callback_note(thrown_.what());                                 \
        }                                                                         \
        catch (...) {                                                             \
            idist__callback_note("an exception not derived from std::exception"); \
        }                                                                         \
    } while (0)
#else
// Marks the return address as undefined, which tells the unwinder that the stack ends in this
// function. Without unwind tables the stack ends here anyway.
#if defined(__GCC_HAVE_DWARF2_CFI_ASM) && defined(__x86_64__)
#define IDIST__UNWIND_END __asm__ volatile(".cfi_undefined 16" ::: "memory")
#elif defined(__GCC_HAVE_DWARF2_CFI_ASM) && defined(__i386__)
#define IDIST__UNWIND_END __asm__ volatile(".cfi_undefined 8" ::: "memory")
#elif defined(__GCC_HAVE_DWARF2_CFI_ASM) && defined(__aarch64__)
#define IDIST__UNWIND_END __asm__ volatile(".cfi_undefined 30" ::: "memory")
#else
#define IDIST__UNWIND_END (void)0
#endif
#define IDIST__TRY(statement)                                 \
    do {                                                      \
        IDIST__UNWIND_END;                                    \
        statement;                                            \
        __asm__ volatile("" ::: "memory"); /* no tail call */ \
    } while (0)
#endif

// IDIST__CALLBACK(statement) is IDIST__TRY for a callback, which must not call idist and runs with
// cancellation disabled: see base/fail.h.
#define IDIST__CALLBACK(statement)                           \
    do {                                                     \
        int cancel_state_ = idist__os_unwind_block_cancel(); \
                                                             \
        idist__me.callbacks++;                               \
        IDIST__TRY(statement);                               \
        idist__me.callbacks--;                               \
        idist__os_unwind_allow_cancel(cancel_state_);        \
    } while (0)

// ---- os/mutex_init.h -----------------------------------------------------------------------------

// os/mutex_init.h: the initial value of a lock in static memory
//
// Included by base/begin.h. Neither file has an include guard, because every drop-in contains its
// own copy of both.

#define IDIST__OS_MUTEX_INIT PTHREAD_MUTEX_INITIALIZER

#define IDIST__COUNT_OF(a) (sizeof(a) / sizeof((a)[0]))

// A program may be built with -ffast-math or -Ofast, but idist needs standard arithmetic. A NaN
// that one rank contributes must reach all ranks, the conversions in base/small_float.h rely on the
// order of their steps, and gradient norms check that numbers are finite.
#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__) || \
    defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__)
#define IDIST__FAST_MATH 1
#if defined(__clang__)
#pragma float_control(precise, on, push)
#elif defined(__GNUC__)
// In C, pop_options alone would leave these macros undefined.
#pragma push_macro("__FAST_MATH__")
#pragma push_macro("__FINITE_MATH_ONLY__")
#pragma push_macro("__ASSOCIATIVE_MATH__")
#pragma push_macro("__RECIPROCAL_MATH__")
#pragma push_macro("__NO_SIGNED_ZEROS__")
#pragma push_macro("__NO_TRAPPING_MATH__")
#pragma push_macro("__NO_MATH_ERRNO__")
#pragma GCC push_options
#pragma GCC optimize("no-fast-math")
#endif
#endif

// ---- train/permutation.h -------------------------------------------------------------------------

// train/permutation.h: random numbers and permutations as PyTorch and Python draw them

//------------------------------------------------------------------------------
// the Mersenne Twister
//
// The generator is by Matsumoto and Nishimura (1998) and has 624 words of state. PyTorch seeds it
// from 32 bits with Knuth's recurrence. Python seeds it with the authors' init_by_array (2002),
// from as many words as the seed has.
//------------------------------------------------------------------------------

#define IDIST__TWISTER_WORDS 624

typedef struct idist__twister {
    uint32_t word[IDIST__TWISTER_WORDS];
    int next; // index of the next word to draw; IDIST__TWISTER_WORDS if all are used
} idist__twister;

static void idist__twister_seed(idist__twister *twister, uint32_t seed) {
    uint32_t *word = twister->word, i;

    word[0] = seed;
    for (i = 1; i < IDIST__TWISTER_WORDS; i++)
        word[i] = 1812433253u * (word[i - 1] ^ (word[i - 1] >> 30)) + i;
    twister->next = IDIST__TWISTER_WORDS;
}

// Returns the index after i. After the last word, copies the last word to word 0 and returns 1.
static uint32_t idist__twister_step(uint32_t *word, uint32_t i) {
    if (i + 1 < IDIST__TWISTER_WORDS) return i + 1;
    word[0] = word[IDIST__TWISTER_WORDS - 1];
    return 1;
}

// Seeds the generator as init_by_array does. The key has one word, or two if the seed needs them.
static void idist__twister_seed_array(idist__twister *twister, uint64_t seed) {
    uint32_t key[2], key_words = seed >> 32 ? 2 : 1;
    uint32_t *word = twister->word, i = 1, j = 0, round;

    key[0] = (uint32_t)seed;
    key[1] = (uint32_t)(seed >> 32);
    idist__twister_seed(twister, 19650218u);

    for (round = 0; round < IDIST__TWISTER_WORDS; round++) {
        uint32_t mixed = (word[i - 1] ^ (word[i - 1] >> 30)) * 1664525u;

        word[i] = (word[i] ^ mixed) + key[j] + j;
        i = idist__twister_step(word, i);
        j = (j + 1) % key_words;
    }

    for (round = 1; round < IDIST__TWISTER_WORDS; round++) {
        uint32_t mixed = (word[i - 1] ^ (word[i - 1] >> 30)) * 1566083941u;

        word[i] = (word[i] ^ mixed) - i;
        i = idist__twister_step(word, i);
    }

    word[0] = 0x80000000u;
}

// Replaces all words with new ones.
static void idist__twister_refill(idist__twister *twister) {
    uint32_t *word = twister->word;
    int i;

    for (i = 0; i < IDIST__TWISTER_WORDS; i++) {
        uint32_t low = word[(i + 1) % IDIST__TWISTER_WORDS];
        uint32_t y = (word[i] & 0x80000000u) | (low & 0x7fffffffu);
        uint32_t twist = y & 1 ? 0x9908b0dfu : 0u;

        word[i] = word[(i + 397) % IDIST__TWISTER_WORDS] ^ (y >> 1) ^ twist;
    }

    twister->next = 0;
}

static uint32_t idist__twister_next(idist__twister *twister) {
    uint32_t y;

    if (twister->next == IDIST__TWISTER_WORDS) idist__twister_refill(twister);
    y = twister->word[twister->next++];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;

    return y ^ (y >> 18);
}

//------------------------------------------------------------------------------
// the permutations of PyTorch and Python
//------------------------------------------------------------------------------

static void idist__permutation_swap(size_t *indices, size_t i, size_t k) {
    size_t kept = indices[k];
    indices[k] = indices[i];
    indices[i] = kept;
}

// For this number of indices or more, PyTorch 2.6 draws 64 bits per index, because the remainder of
// a 32-bit number would visibly favor some indices.
static const size_t IDIST__RANDOM_LARGE = UINT32_MAX / 20;

// Makes a permutation by the "inside-out" shuffle, which fills `indices` as it goes. Stores each
// new index i at a random position from 0 to i, and moves the index that was there to position i.
static void idist__permutation_make_large(size_t *indices, size_t count, idist__twister *twister) {
    size_t i;

    for (i = 0; i < count; i++) {
        uint64_t high = idist__twister_next(twister), low = idist__twister_next(twister);
        size_t place = (size_t)((high << 32 | low) % (i + 1));

        indices[i] = indices[place];
        indices[place] = i;
    }
}

// Makes the permutation of torch.randperm on the CPU. Swaps each element, beginning with the first,
// with a random element that is not final yet. For `large` or more indices, uses the inside-out
// shuffle, as PyTorch has done since version 2.6. `large` is IDIST__RANDOM_LARGE except in tests.
static void idist__permutation_make(size_t *indices, size_t count, uint64_t seed, size_t large) {
    idist__twister twister;
    size_t i;

    idist__twister_seed(&twister, (uint32_t)seed);

    if (count >= large) {
        idist__permutation_make_large(indices, count, &twister);
        return;
    }

    for (i = 0; i < count; i++) indices[i] = i;

    for (i = 0; i + 1 < count; i++)
        idist__permutation_swap(indices, i, i + idist__twister_next(&twister) % (count - i));
}

// Returns a random number below `limit`, as Python's random.randrange(limit) does. Draws as many
// bits as the limit has, and draws again until the number is below the limit.
static size_t idist__permutation_below(idist__twister *twister, size_t limit) {
    size_t number;
    int bits = 0;

    while (limit >> bits) bits++;
    do number = idist__twister_next(twister) >> (32 - bits);
    while (number >= limit);

    return number;
}

// Makes the permutation of Python's random.shuffle. Swaps each element, beginning with the last,
// with a random element that is not final yet.
static void idist__permutation_shuffle(size_t *indices, size_t count, uint64_t seed) {
    idist__twister twister;
    size_t i;

    idist__twister_seed_array(&twister, seed);
    for (i = 0; i < count; i++) indices[i] = i;

    for (i = count; i-- > 1;)
        idist__permutation_swap(indices, i, idist__permutation_below(&twister, i + 1));
}

// ---- train/agree.h -------------------------------------------------------------------------------

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

// ---- train/sampler.h -----------------------------------------------------------------------------

// train/sampler.h: which sample goes to which rank
//
// Each rank computes the order of the whole epoch. From the part of the order that is still to be
// processed, each of n ranks takes every n-th index, starting with its rank. For 3 ranks and 10
// samples, without drop_last:
//
//     order      7 2 9 4 0 5 8 1 3 6 | 7 2     padded with the beginning
//     rank 0     7     4     8     6
//     rank 1       2     0     1       7
//     rank 2         9     5     3       2
//
// idist_sampler_reshard skips the first `processed` indices of the order. It deals out the rest
// among the current ranks, and pads the rest with its own beginning.

// The largest data set, in samples. Its indices, including the padding, must fit in memory.
static const size_t IDIST__SAMPLES_MAX = SIZE_MAX / 64;

// The largest list for idist_partition. For longer lists, Python's shuffle draws more than 32 bits
// at a time, which idist__permutation_below cannot do.
static const size_t IDIST__PARTITION_MAX =
    (size_t)(SIZE_MAX / 64 < UINT32_MAX ? SIZE_MAX / 64 : UINT32_MAX);

struct idist_sampler {
    idist_sampler_desc desc; // with num_replicas and rank filled in
    bool fixed_replicas;     // the caller set num_replicas
    uint64_t epoch;
    size_t *indices;     // dealt out to this rank
    size_t count;        // number of indices
    size_t position;     // of the next index
    bool ended;          // the last pass reached the end of the indices; position is 0
    bool resumed;        // the last call was idist_sampler_set_state
    size_t recorded;     // indices counted as done; see idist_sampler_record
    size_t processed;    // samples that all ranks together had done when the indices were dealt out
    uint64_t deal_count; // incremented when indices are dealt out; the loader compares it
};

// Calls order_fn. Returns false if order_fn throws an exception; in that case idist_last_error
// returns the exception's text.
IDIST__NOINLINE static bool idist__sampler_call_order(const idist_sampler_desc *desc,
                                                      size_t *indices, uint64_t epoch, int run) {
    IDIST__TRY(desc->order_fn(indices, desc->length, epoch, run, desc->arg));
    return !idist__callback_threw("sampler", "order_fn");
}

// Returns the order of an epoch, which the caller frees. Pads the order to `total` indices with the
// indices that follow the first `processed`, or with further runs of order_fn. On failure returns
// NULL and sets *status.
static size_t *idist__sampler_order(const idist_sampler_desc *desc, uint64_t epoch,
                                    size_t processed, size_t total, idist_status *status) {
    size_t length = desc->length, runs = (total + length - 1) / length, run, i;
    size_t capacity = total > length ? total : length;
    size_t *order;

    if (desc->order_fn) capacity = runs * length;
    order = (size_t *)malloc((capacity + 1) * sizeof *order);

    if (!order) {
        *status = idist__fail(IDIST_ERR_NO_MEMORY, "sampler: no memory for %zu indices", length);
        return NULL;
    }

    if (desc->order_fn) {
        for (run = 0; run < runs; run++)
            if (!idist__sampler_call_order(desc, order + run * length, epoch, (int)run)) {
                *status = IDIST_ERR_CALLBACK;
                free(order);
                return NULL;
            }
        return order;
    }

    if (desc->in_order)
        for (i = 0; i < length; i++) order[i] = i;
    else idist__permutation_make(order, length, desc->seed + epoch, IDIST__RANDOM_LARGE);
    for (i = length; i < total; i++) order[i] = order[i - (length - processed)];

    return order;
}

// Returns the number of samples that each rank gets when `processed` samples of the epoch are done.
static size_t idist__sampler_share(const idist_sampler_desc *desc, size_t replicas,
                                   size_t processed) {
    size_t left = desc->length - processed;
    return desc->drop_last ? left / replicas : (left + replicas - 1) / replicas;
}

// Returns the number of samples that are done: `processed` samples before the shares were dealt
// out, and `position` samples of each rank's share. A complete share completes the epoch, including
// a remainder that does not divide evenly. The result is limited to the length, because some
// samples may have been dealt out twice.
static size_t idist__sampler_done(const idist_sampler_desc *desc, size_t replicas, size_t processed,
                                  size_t position) {
    size_t done = processed + position * replicas;

    if (position && position >= idist__sampler_share(desc, replicas, processed))
        return desc->length;

    return done < desc->length ? done : desc->length;
}

// Deals out the samples of an epoch that remain after the first `processed`. Changes nothing on
// failure.
static idist_status idist__sampler_deal(idist_sampler *sampler, const idist_sampler_desc *desc,
                                        uint64_t epoch, size_t processed) {
    size_t replicas = (size_t)desc->num_replicas, i;
    size_t count = idist__sampler_share(desc, replicas, processed);
    idist_status status = IDIST_OK;
    size_t *order =
        idist__sampler_order(desc, epoch, processed, processed + count * replicas, &status);
    size_t *indices = order ? (size_t *)malloc((count + 1) * sizeof *indices) : NULL;

    if (!order) return status;

    if (!indices) {
        free(order);
        return idist__fail(IDIST_ERR_NO_MEMORY, "sampler: no memory for %zu indices", desc->length);
    }

    for (i = 0; i < count; i++) indices[i] = order[processed + (size_t)desc->rank + i * replicas];
    free(order);
    free(sampler->indices);

    sampler->indices = indices;
    sampler->count = count;
    sampler->desc = *desc;
    sampler->epoch = epoch;
    sampler->processed = processed;
    sampler->position = 0;
    sampler->ended = false;
    sampler->resumed = false;
    sampler->recorded = 0;
    sampler->deal_count++;

    return IDIST_OK;
}

// Fills in num_replicas and rank from the group unless they are set, and checks the desc.
static idist_status idist__sampler_resolve(idist_sampler_desc *desc) {
    if (!desc->num_replicas && desc->rank)
        return idist__fail(IDIST_ERR_ARG, "sampler_create: rank is %d, but num_replicas is not set",
                           desc->rank);

    if (!desc->num_replicas) {
        desc->num_replicas = idist_group_size(desc->group);
        desc->rank = idist_group_rank(desc->group);
        if (desc->rank < 0)
            return idist__fail(IDIST_ERR_STATE,
                               "sampler_create: this rank is not a member of the group");
    }

    if (!desc->length || desc->length > IDIST__SAMPLES_MAX)
        return idist__fail(IDIST_ERR_ARG,
                           "sampler_create: length must be between 1 and %zu samples, got %zu",
                           IDIST__SAMPLES_MAX, desc->length);
    if (desc->num_replicas < 1)
        return idist__fail(IDIST_ERR_ARG, "sampler_create: num_replicas must be positive, got %d",
                           desc->num_replicas);
    if (desc->rank < 0 || desc->rank >= desc->num_replicas)
        return idist__fail(IDIST_ERR_ARG, "sampler_create: rank %d is not in 0 .. %d", desc->rank,
                           desc->num_replicas - 1);
    if (desc->order_fn && (desc->drop_last || desc->in_order))
        return idist__fail(
            IDIST_ERR_ARG,
            "sampler_create: order_fn cannot be combined with drop_last or in_order");

    return IDIST_OK;
}

idist_status idist_sampler_create(const idist_sampler_desc *desc, idist_sampler **sampler) {
    idist_sampler *created;
    idist_sampler_desc resolved;
    idist_status status;

    if (!sampler || !desc)
        return idist__fail(IDIST_ERR_ARG, "sampler_create: desc or sampler is NULL");
    *sampler = NULL;
    resolved = *desc;
    status = idist__sampler_resolve(&resolved);
    if (status != IDIST_OK) return status;

    created = (idist_sampler *)calloc(1, sizeof *created);
    if (!created)
        return idist__fail(IDIST_ERR_NO_MEMORY, "sampler_create: no memory for %zu samples",
                           resolved.length);
    created->fixed_replicas = desc->num_replicas != 0;
    status = idist__sampler_deal(created, &resolved, 0, 0);
    if (status == IDIST_OK) *sampler = created;
    else idist_sampler_free(&created);

    return status;
}

void idist_sampler_free(idist_sampler **sampler) {
    if (!sampler || !*sampler) return;
    free((*sampler)->indices);
    free(*sampler);
    *sampler = NULL;
}

idist_status idist_sampler_set_epoch(idist_sampler *sampler, uint64_t epoch) {
    if (!sampler) return idist__fail(IDIST_ERR_ARG, "sampler_set_epoch: sampler is NULL");

    if (sampler->resumed && sampler->epoch == epoch) {
        sampler->resumed = false;
        return IDIST_OK;
    }

    return idist__sampler_deal(sampler, &sampler->desc, epoch, 0);
}

size_t idist_sampler_count(const idist_sampler *sampler) { return sampler ? sampler->count : 0; }

// Ends a pass over the indices.
static void idist__sampler_end(idist_sampler *sampler) {
    sampler->position = 0;
    sampler->ended = true;
}

bool idist_sampler_next(idist_sampler *sampler, size_t *index) {
    if (!sampler || !index) return false;

    sampler->resumed = false;

    if (sampler->position == sampler->count) {
        idist__sampler_end(sampler);
        return false;
    }

    *index = sampler->indices[sampler->position++];

    return true;
}

idist_sampler_state idist_sampler_get_state(const idist_sampler *sampler) {
    idist_sampler_state state;

    memset(&state, 0, sizeof state);
    if (!sampler) return state;
    state.epoch = sampler->epoch;
    state.ranks = (uint64_t)sampler->desc.num_replicas;

    if (sampler->ended && sampler->position == 0) {
        state.epoch++;
    } else {
        state.position = sampler->position;
        state.processed = sampler->processed;
    }

    return state;
}

idist_status idist_sampler_set_state(idist_sampler *sampler, idist_sampler_state state) {
    const idist_sampler_desc *desc;
    uint64_t ranks = state.ranks;
    size_t processed;
    idist_status status;

    if (!sampler) return idist__fail(IDIST_ERR_ARG, "sampler_set_state: sampler is NULL");
    desc = &sampler->desc;
    if (!ranks) ranks = (uint64_t)desc->num_replicas;
    if (state.processed > desc->length || ranks > INT32_MAX)
        return idist__fail(IDIST_ERR_ARG,
                           "sampler_set_state: %llu samples processed by %llu ranks, but there are "
                           "only %zu samples",
                           (unsigned long long)state.processed, (unsigned long long)ranks,
                           desc->length);

    processed = (size_t)state.processed;
    if (state.position > idist__sampler_share(desc, (size_t)ranks, processed))
        return idist__fail(
            IDIST_ERR_ARG,
            "sampler_set_state: position %llu is beyond the end: %zu samples for %llu ranks",
            (unsigned long long)state.position, desc->length - processed,
            (unsigned long long)ranks);

    if (ranks != (uint64_t)desc->num_replicas) {
        processed = idist__sampler_done(desc, (size_t)ranks, processed, (size_t)state.position);
        state.position = 0;
    }

    status = idist__sampler_deal(sampler, desc, state.epoch, processed);
    if (status != IDIST_OK) return status;
    sampler->position = (size_t)state.position;
    sampler->recorded = (size_t)state.position;
    sampler->resumed = true;

    return IDIST_OK;
}

idist_status idist_sampler_record(idist_sampler *sampler, size_t count) {
    if (!sampler) return idist__fail(IDIST_ERR_ARG, "sampler_record: sampler is NULL");
    if (count > sampler->count - sampler->recorded)
        return idist__fail(IDIST_ERR_ARG,
                           "sampler_record: %zu more samples after %zu exceed the %zu of this rank",
                           count, sampler->recorded, sampler->count);
    sampler->recorded += count;

    return IDIST_OK;
}

idist_status idist_sampler_reshard(idist_sampler *sampler, const idist_opts *opts) {
    enum { IDIST__ROOT_EPOCH, IDIST__ROOT_PROCESSED, IDIST__ROOT_LENGTH, IDIST__ROOT_WORDS };
    uint64_t root[IDIST__ROOT_WORDS] = {0, 0, 0}; // values of rank 0
    idist_sampler_desc desc;
    idist_opts own_opts;
    idist_status status = idist__agree_enter("sampler_reshard", opts, &own_opts);

    if (status != IDIST_OK) return status;
    if (!sampler) status = idist__fail(IDIST_ERR_ARG, "sampler_reshard: sampler is NULL");
    else if (sampler->fixed_replicas)
        status = idist__fail(IDIST_ERR_ARG,
                             "sampler_reshard: the sampler was created with num_replicas");
    status = idist__agree(status, &own_opts);
    if (status != IDIST_OK) return status;

    desc = sampler->desc;
    root[IDIST__ROOT_EPOCH] = sampler->epoch;
    root[IDIST__ROOT_PROCESSED] = idist__sampler_done(&desc, (size_t)desc.num_replicas,
                                                      sampler->processed, sampler->recorded);
    root[IDIST__ROOT_LENGTH] = desc.length;
    status = idist_broadcast(root, IDIST__ROOT_WORDS, IDIST_U64, 0, &own_opts);
    if (status != IDIST_OK) return status;

    desc.group = own_opts.group;
    desc.num_replicas = idist_group_size(own_opts.group);
    desc.rank = idist_group_rank(own_opts.group);
    if (root[IDIST__ROOT_LENGTH] != desc.length)
        status =
            idist__fail(IDIST_ERR_MISMATCH, "sampler_reshard: %zu samples here, %llu on rank 0",
                        desc.length, (unsigned long long)root[IDIST__ROOT_LENGTH]);
    else
        status = idist__sampler_deal(sampler, &desc, root[IDIST__ROOT_EPOCH],
                                     (size_t)root[IDIST__ROOT_PROCESSED]);

    return idist__agree(status, &own_opts);
}

// Returns the number of samples in a part. Rounds the product to a double and then truncates it, as
// Python does. Without the volatile variable, the x87 unit of i386 would truncate a product of 64
// binary digits.
static size_t idist__sampler_part(double fraction, size_t length) {
    volatile double part = fraction * (double)length;
    return (size_t)part;
}

static idist_status idist__sampler_check_fractions(const double *fractions, int n) {
    char text[IDIST__NUMBER_NBYTES];
    double sum = 0;
    int i;

    for (i = 0; i < n; i++) {
        if (!(fractions[i] >= 0))
            return idist__fail(IDIST_ERR_ARG,
                               "partition: fractions must not be negative; number %d is %s", i,
                               idist__number_print(text, fractions[i], 6));
        sum += fractions[i];
    }

    if (sum > 1 + 1e-9)
        return idist__fail(IDIST_ERR_ARG, "partition: the fractions add up to %s, more than 1",
                           idist__number_print(text, sum, 6));

    return IDIST_OK;
}

idist_status idist_partition(size_t length, const double *fractions, int n, int which,
                             uint64_t seed, size_t *indices, size_t *count) {
    size_t begin = 0, *all;
    int i;
    idist_status status;

    if (!fractions || !indices || !count)
        return idist__fail(IDIST_ERR_ARG, "partition: fractions, indices or count is NULL");
    if (which < 0 || which >= n)
        return idist__fail(IDIST_ERR_ARG, "partition: there is no part %d of %d", which, n);
    if (length > IDIST__PARTITION_MAX)
        return idist__fail(IDIST_ERR_ARG, "partition: %zu samples are more than %zu", length,
                           IDIST__PARTITION_MAX);
    status = idist__sampler_check_fractions(fractions, n);
    if (status != IDIST_OK) return status;

    all = (size_t *)malloc((length + 1) * sizeof *all);
    if (!all)
        return idist__fail(IDIST_ERR_NO_MEMORY, "partition: no memory for %zu indices", length);
    idist__permutation_shuffle(all, length, seed);

    for (i = 0; i < which; i++) begin += idist__sampler_part(fractions[i], length);
    *count = idist__sampler_part(fractions[which], length);
    if (begin > length) begin = length; // the sum of the fractions may be slightly above 1
    if (*count > length - begin) *count = length - begin;
    memcpy(indices, all + begin, *count * sizeof *indices);
    free(all);

    return IDIST_OK;
}

// ---- train/loader.h ------------------------------------------------------------------------------

// train/loader.h: batches, fetched ahead by worker threads
//
// Batches are in a ring of slots. The ring has one slot per batch fetched ahead, and one for the
// batch that the program is using. A worker takes the next batch that no worker has taken, so
// batches start in order. The program waits for each batch in turn:
//
//     slot    0        1        2        3        4         2 workers, 2 batches ahead for each
//     batch   5        6        7        3        4
//             fetching fetching free     program  ready
//
// A batch passes through these functions:
//
//     idist__loader_work    a worker takes the batch and calls fetch
//     idist__loader_take    the program waits for the slot of the batch
//     idist_loader_next     returns the batch to the program and moves the sampler
//
// The loader copies the indices, so the program may move the sampler at any time. The next call
// notices the move, and restarts the loader at the sampler's new position.

typedef struct idist__loader_slot {
    void *data;
    bool ready;       // fetched, and not yet given to the program
    int result;       // returned by fetch
    char thrown[160]; // text of the exception that fetch threw, or ""
} idist__loader_slot;

struct idist_loader {
    idist_loader_desc desc;
    idist_sampler *own_sampler; // created by idist_auto_loader, or NULL
    idist__os_process process;  // the process that has the workers; a forked child has none
    idist__os_thread *threads;
    int thread_count, slot_count;
    idist__loader_slot *slots;

    // The rest of the epoch, from the position where the loader started. Written only while no
    // worker is busy.
    size_t *indices;
    size_t index_count;

    // The state in which the loader left the sampler. If the sampler's state differs, the program
    // has moved the sampler.
    size_t start_position;   // position of the first copied index
    size_t sampler_position; // position after the last call
    uint64_t deal_count;     // deal_count of the sampler when the indices were copied
    bool ended;              // the last call returned the end of the epoch

    idist__os_mutex lock; // protects the fields below and the slots
    idist__os_cond work;  // signaled when there may be a batch to take, or the loader stops
    idist__os_cond done;  // signaled when a batch is fetched
    size_t batch_count;   // batches of the epoch
    size_t taken_count;   // batches taken by workers
    size_t given_count;   // batches given to the program
    int busy_count;       // workers inside fetch
    int stopping_count;   // once `stops` is set: workers that have not ended yet
    bool paused;          // workers must not take a batch
    bool stops;
    bool orphaned; // no thread waits for the workers; the last worker frees the loader
};

static size_t idist__loader_batches(const idist_loader *loader, size_t samples) {
    size_t full = samples / loader->desc.batch_size, rest = samples % loader->desc.batch_size;
    return !loader->desc.drop_last && rest ? full + 1 : full;
}

// Returns the indices of a batch, and sets *count to their number.
static const size_t *idist__loader_indices(const idist_loader *loader, size_t batch,
                                           size_t *count) {
    size_t first = batch * loader->desc.batch_size, rest = loader->index_count - first;
    *count = rest < loader->desc.batch_size ? rest : loader->desc.batch_size;
    return loader->indices + first;
}

static idist__loader_slot *idist__loader_slot_of(const idist_loader *loader, size_t batch) {
    return &loader->slots[batch % (size_t)loader->slot_count];
}

// Fetches a batch. Returns the result of fetch, or 1 if fetch throws an exception. In that case the
// slot contains the exception's text.
IDIST__NOINLINE static int idist__loader_fetch(const idist_loader *loader, size_t batch) {
    size_t count;
    const size_t *indices = idist__loader_indices(loader, batch, &count);
    idist__loader_slot *slot = idist__loader_slot_of(loader, batch);
    int result = 1;

    IDIST__CALLBACK(result = loader->desc.fetch(slot->data, indices, count, loader->desc.arg));
    idist__text_copy(slot->thrown, sizeof slot->thrown, idist__me.thrown);
    idist__me.thrown[0] = 0;

    return result;
}

// Frees the loader. Called when no other thread uses it.
static void idist__loader_destroy(idist_loader *loader) {
    int i;

    if (loader->process == idist__os_process_id()) {
        idist__os_cond_destroy(&loader->work);
        idist__os_cond_destroy(&loader->done);
        idist__os_mutex_destroy(&loader->lock);
    }

    for (i = 0; loader->slots && i < loader->slot_count; i++)
        idist__mem_free(&loader->desc.allocator, loader->slots[i].data);
    idist_sampler_free(&loader->own_sampler);
    free(loader->slots);
    free(loader->threads);
    free(loader->indices);
    free(loader);
}

// Returns true if a worker may take the next batch. Called with the lock held.
static bool idist__loader_has_work(const idist_loader *loader) {
    size_t ahead = loader->taken_count - loader->given_count;

    if (loader->paused || loader->taken_count == loader->batch_count) return false;
    return ahead < (size_t)loader->slot_count - 1;
}

// Runs a worker thread: fetches batches until the loader stops.
static void *idist__loader_work(void *arg) {
    idist_loader *loader = (idist_loader *)arg;
    bool must_free;

    idist__os_mutex_lock(&loader->lock);

    while (!loader->stops) {
        size_t batch = loader->taken_count;
        idist__loader_slot *slot;
        int result;

        if (!idist__loader_has_work(loader)) {
            idist__os_cond_wait(&loader->work, &loader->lock, IDIST__FOREVER);
            continue;
        }

        loader->taken_count++;
        loader->busy_count++;
        idist__os_mutex_unlock(&loader->lock);
        result = idist__loader_fetch(loader, batch);
        idist__os_mutex_lock(&loader->lock);

        slot = idist__loader_slot_of(loader, batch);
        slot->ready = true;
        slot->result = result;
        loader->busy_count--;
        idist__os_cond_signal(&loader->done);
    }

    loader->stopping_count--;
    must_free = loader->stopping_count == 0 && loader->orphaned;
    idist__os_mutex_unlock(&loader->lock);
    if (must_free) idist__loader_destroy(loader);

    return NULL;
}

static int idist__loader_timeout(const idist_loader *loader) {
    return loader->desc.timeout_ms ? loader->desc.timeout_ms : 300000;
}

// Waits until no fetch is running. Returns false if the timeout expires first. Called with the lock
// held.
static bool idist__loader_settle(idist_loader *loader) {
    int64_t deadline_ns = idist__os_clock_deadline(idist__loader_timeout(loader));

    while (loader->busy_count && idist__os_clock_ms_until(deadline_ns) != 0)
        idist__os_cond_wait(&loader->done, &loader->lock, deadline_ns);

    return loader->busy_count == 0;
}

// Waits for the running fetches, drops the batches fetched ahead, and starts at the sampler's
// position.
static idist_status idist__loader_restart(idist_loader *loader) {
    const idist_sampler *sampler = loader->desc.sampler;
    size_t count = sampler->count - sampler->position;
    size_t *indices = (size_t *)malloc((count + 1) * sizeof *indices);
    int i, busy_count;

    if (!indices)
        return idist__fail(IDIST_ERR_NO_MEMORY, "loader: no memory for %zu indices", count);
    memcpy(indices, sampler->indices + sampler->position, count * sizeof *indices);
    idist__os_mutex_lock(&loader->lock);
    loader->paused = true;

    if (!idist__loader_settle(loader)) { // the loader stays paused; the next call tries again
        busy_count = loader->busy_count;
        idist__os_mutex_unlock(&loader->lock);
        free(indices);
        return idist__fail(IDIST_ERR_TIMEOUT,
                           "loader: %d earlier fetches are still running after %d ms", busy_count,
                           idist__loader_timeout(loader));
    }

    free(loader->indices);
    loader->indices = indices;
    loader->index_count = count;
    loader->start_position = sampler->position;
    loader->sampler_position = sampler->position;
    loader->deal_count = sampler->deal_count;
    loader->ended = false;

    loader->batch_count = idist__loader_batches(loader, count);
    loader->taken_count = 0;
    loader->given_count = 0;
    for (i = 0; i < loader->slot_count; i++) loader->slots[i].ready = false;
    loader->paused = false;
    idist__os_cond_broadcast(&loader->work);
    idist__os_mutex_unlock(&loader->lock);

    return IDIST_OK;
}

// Stops the workers. Returns false if some workers are still inside fetch when the timeout expires.
// The last of these workers then frees the loader.
static bool idist__loader_stop(idist_loader *loader) {
    idist__os_thread *threads = loader->threads;
    int i, thread_count = loader->thread_count;
    bool orphaned;

    idist__os_mutex_lock(&loader->lock);
    loader->stops = true;
    loader->stopping_count = thread_count;
    idist__os_cond_broadcast(&loader->work);
    orphaned = !idist__loader_settle(loader);
    loader->orphaned = orphaned;
    if (orphaned) loader->threads = NULL; // freed below, not by the worker that frees the loader
    idist__os_mutex_unlock(&loader->lock);

    for (i = 0; i < thread_count; i++) {
        if (orphaned) idist__os_thread_detach(threads[i]);
        else idist__os_thread_join(threads[i]);
    }

    if (orphaned) free(threads);

    return !orphaned;
}

void idist_loader_free(idist_loader **loader) {
    idist_loader *l = loader ? *loader : NULL;
    bool stopped = true;

    if (!l) return;
    *loader = NULL;

    // A forked child has no workers to stop, and the lock may have been held during the fork.
    if (l->process == idist__os_process_id()) stopped = idist__loader_stop(l);
    if (stopped) idist__loader_destroy(l);
}

static idist_status idist__loader_check(const idist_loader_desc *desc) {
    if (!desc || !desc->sampler || !desc->fetch)
        return idist__fail(IDIST_ERR_ARG, "loader_create: desc, sampler or fetch is NULL");
    if (!desc->batch_size || !desc->batch_nbytes)
        return idist__fail(
            IDIST_ERR_ARG,
            "loader_create: batch_size and batch_nbytes must be positive, got %zu and %zu",
            desc->batch_size, desc->batch_nbytes);
    if (!desc->allocator.alloc_fn != !desc->allocator.free_fn)
        return idist__fail(IDIST_ERR_ARG,
                           "loader_create: allocator: give both alloc_fn and free_fn, or neither");
    if (desc->num_workers < 0 || desc->num_workers > 1024)
        return idist__fail(IDIST_ERR_ARG, "loader_create: num_workers must be 0 to 1,024, got %d",
                           desc->num_workers);
    if (desc->prefetch < 0 || desc->prefetch > 65536)
        return idist__fail(IDIST_ERR_ARG, "loader_create: prefetch must be 0 to 65,536, got %d",
                           desc->prefetch);

    return IDIST_OK;
}

static idist_status idist__loader_alloc(idist_loader *loader) {
    const idist_loader_desc *desc = &loader->desc;
    int i;

    loader->slot_count = 1 + desc->num_workers * (desc->prefetch ? desc->prefetch : 2);
    loader->slots = (idist__loader_slot *)calloc((size_t)loader->slot_count, sizeof *loader->slots);
    loader->threads =
        (idist__os_thread *)calloc((size_t)desc->num_workers + 1, sizeof *loader->threads);
    if (!loader->slots || !loader->threads)
        return idist__fail(IDIST_ERR_NO_MEMORY, "loader_create: no memory for %d slots",
                           loader->slot_count);

    for (i = 0; i < loader->slot_count; i++) {
        void *data = idist__mem_alloc(&desc->allocator, desc->batch_nbytes);

        if (!data)
            return idist__fail(IDIST_ERR_NO_MEMORY,
                               "loader_create: no memory for %d batches of %zu bytes",
                               loader->slot_count, desc->batch_nbytes);
        loader->slots[i].data = data;
    }

    return IDIST_OK;
}

static idist_status idist__loader_start_workers(idist_loader *loader) {
    while (loader->thread_count < loader->desc.num_workers) {
        idist__os_thread *thread = &loader->threads[loader->thread_count];
        int error = idist__os_thread_start(thread, idist__loader_work, loader);

        if (error) return idist__fail_errno("loader_create: cannot start a worker thread", error);
        loader->thread_count++;
    }

    return IDIST_OK;
}

idist_status idist_loader_create(const idist_loader_desc *desc, idist_loader **loader) {
    idist_loader *l;
    idist_status status;

    if (!loader) return idist__fail(IDIST_ERR_ARG, "loader_create: loader is NULL");
    *loader = NULL;
    status = idist__loader_check(desc);
    if (status != IDIST_OK) return status;
    l = (idist_loader *)calloc(1, sizeof *l);
    if (!l) return idist__fail(IDIST_ERR_NO_MEMORY, "loader_create: no memory");

    l->desc = *desc;
    l->process = idist__os_process_id();
    idist__os_mutex_init(&l->lock);
    idist__os_cond_init(&l->work);
    idist__os_cond_init(&l->done);

    status = idist__loader_alloc(l);
    if (status == IDIST_OK) status = idist__loader_restart(l);
    if (status == IDIST_OK) status = idist__loader_start_workers(l);
    if (status == IDIST_OK) *loader = l;
    else idist_loader_free(&l);

    return status;
}

static idist_status idist__loader_enter(const char *name, const idist_loader *loader) {
    if (!loader) return idist__fail(IDIST_ERR_ARG, "%s: loader is NULL", name);
    if (loader->thread_count && loader->process != idist__os_process_id())
        return idist__fail(
            IDIST_ERR_STATE,
            "%s: this process was forked and has no workers; create a new loader in this process",
            name);

    return IDIST_OK;
}

idist_status idist_loader_set_epoch(idist_loader *loader, uint64_t epoch) {
    idist_status status = idist__loader_enter("loader_set_epoch", loader);

    if (status == IDIST_OK) status = idist_sampler_set_epoch(loader->desc.sampler, epoch);
    if (status == IDIST_OK) status = idist__loader_restart(loader);

    return status;
}

size_t idist_loader_count(const idist_loader *loader) {
    return loader ? idist__loader_batches(loader, loader->desc.sampler->count) : 0;
}

idist_sampler *idist_loader_sampler(const idist_loader *loader) {
    return loader ? loader->desc.sampler : NULL;
}

// Waits for the next batch, or fetches it if there are no workers. Returns false if the timeout
// expires.
static bool idist__loader_take(idist_loader *loader, idist__loader_slot *slot) {
    int64_t deadline_ns;
    bool ready;

    if (!loader->thread_count) {
        slot->result = idist__loader_fetch(loader, loader->given_count);
        loader->given_count++;
        return true;
    }

    idist__os_mutex_lock(&loader->lock);
    deadline_ns = idist__os_clock_deadline(idist__loader_timeout(loader));
    while (!slot->ready && idist__os_clock_ms_until(deadline_ns) != 0)
        idist__os_cond_wait(&loader->done, &loader->lock, deadline_ns);
    ready = slot->ready;

    if (ready) {
        slot->ready = false;
        loader->given_count++;
        idist__os_cond_signal(&loader->work); // the slot of the previous batch is free
    }

    idist__os_mutex_unlock(&loader->lock);

    return ready;
}

static bool idist__loader_must_restart(const idist_loader *loader) {
    const idist_sampler *sampler = loader->desc.sampler;

    if (loader->ended || loader->paused) return true;
    return loader->deal_count != sampler->deal_count ||
           loader->sampler_position != sampler->position;
}

idist_status idist_loader_next(idist_loader *loader, idist_batch *batch) {
    idist_sampler *sampler;
    idist__loader_slot *slot;
    size_t number;
    idist_status status = idist__loader_enter("loader_next", loader);

    if (status != IDIST_OK) return status;
    if (!batch) return idist__fail(IDIST_ERR_ARG, "loader_next: batch is NULL");
    memset(batch, 0, sizeof *batch);
    sampler = loader->desc.sampler;
    if (idist__loader_must_restart(loader)) status = idist__loader_restart(loader);
    if (status != IDIST_OK) return status;
    number = loader->given_count; // only this thread writes it

    if (number == loader->batch_count) {
        loader->ended = true; // fetch nothing ahead, because most programs now begin another epoch
        loader->sampler_position = 0;
        idist__sampler_end(sampler);
        return IDIST_OK;
    }

    slot = idist__loader_slot_of(loader, number);
    if (!idist__loader_take(loader, slot))
        return idist__fail(IDIST_ERR_TIMEOUT,
                           "loader_next: the fetch of batch %zu has not returned after %d ms",
                           number, idist__loader_timeout(loader));

    batch->indices = idist__loader_indices(loader, number, &batch->n);
    sampler->position = loader->start_position + number * loader->desc.batch_size + batch->n;
    sampler->resumed = false;
    loader->sampler_position = sampler->position;
    if (slot->thrown[0])
        return idist__fail(IDIST_ERR_CALLBACK,
                           "loader_next: fetch threw an exception for %zu samples from index %zu "
                           "on: %s",
                           batch->n, batch->indices[0], slot->thrown);
    if (slot->result)
        return idist__fail(IDIST_ERR_CALLBACK,
                           "loader_next: fetch failed with %d for %zu samples from index %zu on",
                           slot->result, batch->n, batch->indices[0]);
    batch->data = slot->data;

    return IDIST_OK;
}

// ---- train/auto.h --------------------------------------------------------------------------------

// train/auto.h: sizes, seeds and loaders derived from the world
//
// These are Ignite's auto_* functions. The program passes values for all ranks together, and each
// rank derives its own share.

int idist_auto_batch_size(int batch_size) {
    int ranks = idist_get_world_size();
    return batch_size >= ranks ? batch_size / ranks : batch_size;
}

int idist_auto_num_workers(int num_workers) {
    int ranks = idist_get_nproc_per_node();
    return num_workers >= ranks ? (num_workers - 1) / ranks + 1 : num_workers;
}

uint64_t idist_auto_seed(uint64_t seed) { return seed + (uint64_t)idist_get_rank(); }

// Returns the log of the group's world. Without a world, initializes `own` from the environment and
// returns it, or returns NULL if that fails.
static const idist__log *idist__auto_log_of(const idist_group *group, idist__log *own) {
    const idist__world *world = group ? group->w : idist__world_default();

    if (world) return &world->log;
    return idist__log_init(own, NULL) == IDIST_OK ? own : NULL;
}

static void idist__auto_log(const idist_loader_desc *requested, const idist_loader_desc *desc) {
    const idist_sampler_desc *samples = &desc->sampler->desc;
    int rank = idist_group_rank(samples->group), size = idist_group_size(samples->group);
    idist__log without_world;
    const idist__log *log = idist__auto_log_of(samples->group, &without_world);

    if (!log) return;
    if (samples->num_replicas != size || samples->rank != rank)
        idist__log_print(
            log, IDIST_LOG_WARN,
            "auto_loader: the sampler has rank=%d and num_replicas=%d, but this is rank %d of %d: "
            "some samples may be used twice or not at all",
            samples->rank, samples->num_replicas, rank, size);

    idist__log_print(
        log, IDIST_LOG_INFO,
        "auto_loader: batch_size %zu of %zu, num_workers %d of %d, %zu samples of this rank",
        desc->batch_size, requested->batch_size, desc->num_workers, requested->num_workers,
        idist_sampler_count(desc->sampler));
}

static idist_status idist__auto_check(const idist_loader_desc *desc) {
    if (desc->sampler)
        return idist__fail(
            IDIST_ERR_ARG,
            "auto_loader: desc.sampler must be NULL, because the loader creates its own");
    if (!desc->batch_size || desc->batch_size > INT32_MAX)
        return idist__fail(IDIST_ERR_ARG, "auto_loader: batch_size must be 1 to %d, got %zu",
                           INT32_MAX, desc->batch_size);

    return IDIST_OK;
}

idist_status idist_auto_loader(const idist_loader_desc *desc, const idist_sampler_desc *samples,
                               idist_loader **loader) {
    idist_loader_desc own;
    idist_sampler *sampler = NULL;
    size_t replicas;
    idist_status status;

    if (!desc || !samples || !loader)
        return idist__fail(IDIST_ERR_ARG, "auto_loader: desc, samples or loader is NULL");
    *loader = NULL;
    status = idist__auto_check(desc);
    if (status == IDIST_OK) status = idist_sampler_create(samples, &sampler);
    if (status != IDIST_OK) return status;

    own = *desc;
    own.sampler = sampler;
    replicas = (size_t)sampler->desc.num_replicas;
    if (own.batch_size >= replicas) own.batch_size /= replicas;
    own.batch_nbytes =
        (desc->batch_nbytes + desc->batch_size - 1) / desc->batch_size * own.batch_size;
    own.num_workers = idist_auto_num_workers(desc->num_workers);
#ifdef IDIST_NCCL_H
    if (!own.allocator.alloc_fn && !own.allocator.free_fn &&
        strncmp(idist_device(), "cuda", 4) == 0)
        own.allocator = idist_pinned_allocator();
#endif

    status = idist_loader_create(&own, loader);
    if (status != IDIST_OK) {
        idist_sampler_free(&sampler);
        return status;
    }

    (*loader)->own_sampler = sampler;
    idist__auto_log(desc, &own);

    return IDIST_OK;
}

// ---- train/batch_norm.h --------------------------------------------------------------------------

// train/batch_norm.h: batch statistics over all ranks
//
// One all_gather distributes a row per rank: count | means | variances. Every rank then merges the
// rows in rank order.

// Merges the mean and variance of set b, with nb values, into the mean and variance of set a, with
// na values:
//
//     n = na + nb    d = mean_b - mean_a    mean = mean_a + d nb / n
//     var n = var_a na + var_b nb + d d na nb / n
static void idist__batch_norm_merge(double *mean, double *var, double na, double mean_b,
                                    double var_b, double nb) {
    double n = na + nb, d = mean_b - *mean;

    *mean += d * (nb / n);
    *var = (*var * na + var_b * nb) / n + d * d * (na / n) * (nb / n);
}

// Computes the mean and variance of one channel from the rows of all ranks. Returns the total
// count.
static uint64_t idist__batch_norm_channel(const char *rows, size_t row_nbytes, int ranks,
                                          int channels, int channel, float *mean, float *var) {
    double all_mean = 0, all_var = 0;
    uint64_t total = 0;
    int rank;

    for (rank = 0; rank < ranks; rank++) {
        const char *row = rows + row_nbytes * (size_t)rank;
        const char *means = row + sizeof total, *vars = means + sizeof(float) * (size_t)channels;
        uint64_t count;
        float rank_mean, rank_var;

        memcpy(&count, row, sizeof count);
        memcpy(&rank_mean, means + sizeof(float) * (size_t)channel, sizeof rank_mean);
        memcpy(&rank_var, vars + sizeof(float) * (size_t)channel, sizeof rank_var);
        if (count)
            idist__batch_norm_merge(&all_mean, &all_var, (double)total, (double)rank_mean,
                                    (double)rank_var, (double)count);
        total += count;
    }

    *mean = (float)all_mean;
    *var = (float)all_var;

    return total;
}

idist_status idist_sync_batch_norm(float *mean, float *var, int channels, uint64_t *count,
                                   const idist_opts *opts) {
    size_t values_nbytes, row_nbytes;
    char *rows, *own;
    int ranks, channel;
    uint32_t mode;
    idist_opts own_opts;
    idist_status status = idist__agree_enter("sync_batch_norm", opts, &own_opts);

    if (status != IDIST_OK) return status;
    if (channels < 1 || !mean || !var || !count)
        return idist__fail(IDIST_ERR_ARG, "sync_batch_norm: %d channels, or a pointer is NULL",
                           channels);

    ranks = idist_group_size(own_opts.group);
    values_nbytes = sizeof *mean * (size_t)channels;
    row_nbytes = sizeof *count + 2 * values_nbytes;
    rows = (char *)malloc(row_nbytes * (size_t)ranks);
    if (!rows) return idist__agree_no_memory("sync_batch_norm", own_opts.group);

    own = rows + row_nbytes * (size_t)idist_group_rank(own_opts.group);
    memcpy(own, count, sizeof *count);
    memcpy(own + sizeof *count, mean, values_nbytes);
    memcpy(own + sizeof *count + values_nbytes, var, values_nbytes);
    status = idist_all_gather(own, rows, row_nbytes, IDIST_U8, &own_opts);
    mode = idist__mode_enter(); // so that all ranks get the same bits

    for (channel = 0; channel < channels && status == IDIST_OK; channel++)
        *count = idist__batch_norm_channel(rows, row_nbytes, ranks, channels, channel,
                                           &mean[channel], &var[channel]);
    idist__mode_leave(mode);
    free(rows);

    return status;
}

idist_status idist_sync_batch_norm_backward(float *sum_dy, float *sum_dy_xmu, int channels,
                                            const idist_opts *opts) {
    size_t nbytes = sizeof(float) * (size_t)(channels > 0 ? channels : 0);
    char *both; // both arrays, reduced by one call instead of two
    idist_opts own_opts;
    idist_status status = idist__agree_enter("sync_batch_norm_backward", opts, &own_opts);

    if (status != IDIST_OK) return status;
    if (channels < 1 || !sum_dy || !sum_dy_xmu)
        return idist__fail(IDIST_ERR_ARG,
                           "sync_batch_norm_backward: %d channels, or a pointer is NULL", channels);
    both = (char *)malloc(2 * nbytes);
    if (!both) return idist__agree_no_memory("sync_batch_norm_backward", own_opts.group);

    memcpy(both, sum_dy, nbytes);
    memcpy(both + nbytes, sum_dy_xmu, nbytes);
    status = idist_all_reduce(both, both, 2 * (size_t)channels, IDIST_F32, IDIST_SUM, &own_opts);
    if (status == IDIST_OK) memcpy(sum_dy, both, nbytes);
    if (status == IDIST_OK) memcpy(sum_dy_xmu, both + nbytes, nbytes);
    free(both);

    return status;
}

// ---- train/norm.h --------------------------------------------------------------------------------

// train/norm.h: the norm of gradients, and clipping by it

// Returns the square root of x by Newton's method, starting from half the exponent. The function
// sqrt would need -lm. The last bit may differ from the result of sqrt.
static double idist__norm_root(double x) {
    double root;
    uint64_t bits;
    int i;

    if (!(x > 0)) return 0;
    // A subnormal number has no exponent to halve, so scale it up.
    if (x < 1e-290) return idist__norm_root(x * 1e280) * 1e-140;

    memcpy(&bits, &x, sizeof bits);
    bits = (bits >> 1) + ((uint64_t)1023 << 51);
    memcpy(&root, &bits, sizeof root);
    for (i = 0; i < 5; i++) root = 0.5 * (root + x / root);

    return root;
}

#define IDIST__NORM_PIECE 256 // elements converted to double at a time

// Converts elements first .. first + count - 1 to double.
static void idist__norm_read(const idist_tensor *tensor, size_t first, size_t count, double *x) {
    const char *from = (const char *)tensor->data + first * idist_dtype_size(tensor->dtype);
    float wide[IDIST__NORM_PIECE];
    size_t i;

    if (tensor->dtype == IDIST_F64) {
        memcpy(x, from, count * sizeof *x);
        return;
    }

    if (tensor->dtype == IDIST_F32) memcpy(wide, from, count * sizeof *wide);
    else idist__small_float_widen(wide, from, count, tensor->dtype);
    for (i = 0; i < count; i++) x[i] = (double)wide[i];
}

static double idist__norm_squares(const idist_tensor *tensor) {
    double x[IDIST__NORM_PIECE], sum[4] = {0, 0, 0, 0};
    size_t first, i, count;

    for (first = 0; first < tensor->count; first += count) {
        count = tensor->count - first;
        if (count > IDIST__NORM_PIECE) count = IDIST__NORM_PIECE;
        idist__norm_read(tensor, first, count, x);
        for (i = count; i < IDIST__NORM_PIECE; i++) x[i] = 0;

        for (i = 0; i < IDIST__NORM_PIECE; i += 4) { // four chains, to hide the latency of the adds
            sum[0] += x[i] * x[i];
            sum[1] += x[i + 1] * x[i + 1];
            sum[2] += x[i + 2] * x[i + 2];
            sum[3] += x[i + 3] * x[i + 3];
        }
    }

    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

static idist_status idist__norm_check(const idist_tensor *grads, int n, double max_norm) {
    char text[IDIST__NUMBER_NBYTES];
    int i;

    if (n < 0 || (n && !grads))
        return idist__fail(IDIST_ERR_ARG, "clip_grad_norm: %d gradients, or grads is NULL", n);
    if (!(max_norm >= 0))
        return idist__fail(IDIST_ERR_ARG, "clip_grad_norm: max_norm must not be negative, got %s",
                           idist__number_print(text, max_norm, 6));

    for (i = 0; i < n; i++) {
        if (!idist__dtype_is_float(grads[i].dtype) || !idist_dtype_size(grads[i].dtype))
            return idist__fail(
                IDIST_ERR_ARG,
                "clip_grad_norm: gradients must be of a floating dtype; gradient %d is %s", i,
                idist_dtype_name(grads[i].dtype));
        if (grads[i].count && !grads[i].data)
            return idist__fail(IDIST_ERR_ARG, "clip_grad_norm: gradient %d is NULL", i);
    }

    return IDIST_OK;
}

static idist_status idist__norm_clip(const idist_tensor *grads, int n, double max_norm, bool shared,
                                     double *norm, const idist_opts *opts) {
    double squares = 0, before, factor;
    int i;
    idist_opts own_opts;
    idist_status status = shared ? IDIST_OK : idist__agree_enter("clip_grad_norm", opts, &own_opts);

    if (status != IDIST_OK) return status;
    status = idist__norm_check(grads, n, max_norm);
    if (!shared) status = idist__agree(status, &own_opts);
    if (status != IDIST_OK) return status;

    for (i = 0; i < n; i++) squares += idist__norm_squares(&grads[i]);
    if (!shared) status = idist_all_reduce(&squares, &squares, 1, IDIST_F64, IDIST_SUM, &own_opts);
    if (status != IDIST_OK) return status;
    if (!(squares - squares == 0))
        return idist__fail(
            IDIST_ERR_ARG,
            "clip_grad_norm: the norm of the gradients is not finite; nothing was scaled");

    before = idist__norm_root(squares);
    if (norm) *norm = before;
    factor = max_norm / (before + 1e-6);
    for (i = 0; i < n && factor < 1; i++)
        idist__reduce_scale(grads[i].data, grads[i].count, grads[i].dtype, factor);

    return IDIST_OK;
}

idist_status idist_clip_grad_norm(const idist_tensor *grads, int n, double max_norm, bool shared,
                                  double *norm, const idist_opts *opts) {
    uint32_t mode = idist__mode_enter(); // all ranks scale by the same factor
    idist_status status = idist__norm_clip(grads, n, max_norm, shared, norm, opts);

    idist__mode_leave(mode);
    return status;
}

// ---- train/convert.h -----------------------------------------------------------------------------

// train/convert.h: conversions between floating-point dtypes

enum { IDIST__CONVERT_PIECE = 256 }; // elements converted at a time

// Returns the address of an element of a tensor.
static char *idist__convert_at(const idist_tensor *tensor, size_t first) {
    return (char *)tensor->data + first * idist_dtype_size(tensor->dtype);
}

// Reads elements first .. first + count - 1 of a tensor as floats.
static void idist__convert_read(const idist_tensor *tensor, size_t first, size_t count, float *x) {
    const char *from = idist__convert_at(tensor, first);
    double wide[IDIST__CONVERT_PIECE];
    size_t i;

    if (tensor->dtype == IDIST_F32) {
        memcpy(x, from, count * sizeof *x);
        return;
    }

    if (tensor->dtype != IDIST_F64) {
        idist__small_float_widen(x, from, count, tensor->dtype);
        return;
    }

    memcpy(wide, from, count * sizeof *wide);
    for (i = 0; i < count; i++) x[i] = (float)wide[i];
}

// Writes floats to elements first .. first + count - 1 of a tensor.
static void idist__convert_write(const idist_tensor *tensor, size_t first, size_t count,
                                 const float *x) {
    char *to = idist__convert_at(tensor, first);
    double wide[IDIST__CONVERT_PIECE];
    size_t i;

    if (tensor->dtype == IDIST_F32) {
        memcpy(to, x, count * sizeof *x);
        return;
    }

    if (tensor->dtype != IDIST_F64) {
        idist__small_float_narrow(to, x, count, tensor->dtype);
        return;
    }

    for (i = 0; i < count; i++) wide[i] = (double)x[i];
    memcpy(to, wide, count * sizeof *wide);
}

// Converts the elements of a tensor.
static void idist__convert_tensor(const idist_tensor *from, const idist_tensor *to) {
    float x[IDIST__CONVERT_PIECE];
    size_t first, count;

    if (from->data == to->data || !from->count) return;

    if (from->dtype == to->dtype) {
        memcpy(to->data, from->data, from->count * idist_dtype_size(from->dtype));
        return;
    }

    for (first = 0; first < from->count; first += count) {
        count = from->count - first;
        if (count > IDIST__CONVERT_PIECE) count = IDIST__CONVERT_PIECE;
        idist__convert_read(from, first, count, x);
        idist__convert_write(to, first, count, x);
    }
}

static idist_status idist__convert_check(const idist_tensor *tensors, int n, const char *name) {
    int i;

    for (i = 0; i < n; i++) {
        const idist_tensor *tensor = &tensors[i];

        if (!idist__dtype_is_float(tensor->dtype) || !idist_dtype_size(tensor->dtype))
            return idist__fail(IDIST_ERR_ARG, "convert: %s[%d] must be of a floating dtype, not %s",
                               name, i, idist_dtype_name(tensor->dtype));
        if (tensor->count && !tensor->data)
            return idist__fail(IDIST_ERR_ARG, "convert: %s[%d] is NULL", name, i);
    }

    return IDIST_OK;
}

idist_status idist_convert(const idist_tensor *from, const idist_tensor *to, int n) {
    uint32_t mode;
    int i;
    idist_status status;

    if (n < 0 || (n && (!from || !to)))
        return idist__fail(IDIST_ERR_ARG, "convert: %d tensors, or a list is NULL", n);
    status = idist__convert_check(from, n, "from");
    if (status == IDIST_OK) status = idist__convert_check(to, n, "to");
    if (status != IDIST_OK) return status;

    for (i = 0; i < n; i++) {
        if (from[i].count != to[i].count)
            return idist__fail(IDIST_ERR_ARG, "convert: from[%d] has %zu elements, but to[%d] %zu",
                               i, from[i].count, i, to[i].count);
        if (from[i].data == to[i].data && from[i].count && from[i].dtype != to[i].dtype)
            return idist__fail(IDIST_ERR_ARG,
                               "convert: from[%d] and to[%d] are the same memory, but %s and %s", i,
                               i, idist_dtype_name(from[i].dtype), idist_dtype_name(to[i].dtype));
    }

    mode = idist__mode_enter(); // all ranks round in the same way
    for (i = 0; i < n; i++) idist__convert_tensor(&from[i], &to[i]);
    idist__mode_leave(mode);

    return IDIST_OK;
}

// ---- train/grad_scaler.h -------------------------------------------------------------------------

// train/grad_scaler.h: the scale of the loss, for gradients with few bits
//
// The rules are those of torch.amp.GradScaler. As in torch, the scale and its reciprocal are
// floats. Both are computed in a floating-point mode that is the same on all ranks.

#define IDIST__GRAD_SCALER_LEAST 1.1754943508222875e-38 // 2^-126
#define IDIST__GRAD_SCALER_MOST 3.4028234663852886e38   // the largest float

float idist_grad_scaler_scale(const idist_grad_scaler *scaler) {
    return scaler && scaler->scale != 0 ? scaler->scale : 65536.0f;
}

static double idist__grad_scaler_growth(const idist_grad_scaler *scaler) {
    return scaler->growth_factor != 0 ? scaler->growth_factor : 2;
}

static double idist__grad_scaler_backoff(const idist_grad_scaler *scaler) {
    return scaler->backoff_factor != 0 ? scaler->backoff_factor : 0.5;
}

// Checks the scale and the factors of a scaler.
static idist_status idist__grad_scaler_check(const char *name, const idist_grad_scaler *scaler) {
    char text[IDIST__NUMBER_NBYTES];
    double scale, growth, backoff;

    if (!scaler) return idist__fail(IDIST_ERR_ARG, "%s: scaler is NULL", name);
    scale = (double)idist_grad_scaler_scale(scaler);
    growth = idist__grad_scaler_growth(scaler);
    backoff = idist__grad_scaler_backoff(scaler);

    if (!(scale >= IDIST__GRAD_SCALER_LEAST && scale - scale == 0))
        return idist__fail(IDIST_ERR_ARG, "%s: scale must be finite and at least 2^-126, got %s",
                           name, idist__number_print(text, scale, 6));
    if (!(growth > 1 && growth - growth == 0))
        return idist__fail(IDIST_ERR_ARG, "%s: growth_factor must be finite and above 1, got %s",
                           name, idist__number_print(text, growth, 6));
    if (!(backoff > 0 && backoff < 1))
        return idist__fail(IDIST_ERR_ARG, "%s: backoff_factor must be above 0 and below 1, got %s",
                           name, idist__number_print(text, backoff, 6));
    if (scaler->growth_interval < 0)
        return idist__fail(IDIST_ERR_ARG, "%s: growth_interval must not be negative, got %d", name,
                           scaler->growth_interval);
    if (scaler->growth_tracker < 0)
        return idist__fail(IDIST_ERR_ARG, "%s: growth_tracker must not be negative, got %d", name,
                           scaler->growth_tracker);

    return IDIST_OK;
}

static idist_status idist__grad_scaler_check_grads(const idist_tensor *grads, int n) {
    const char *name = "grad_scaler_unscale";
    int i;

    if (n < 0 || (n && !grads))
        return idist__fail(IDIST_ERR_ARG, "%s: %d gradients, or grads is NULL", name, n);

    for (i = 0; i < n; i++) {
        idist_dtype dtype = grads[i].dtype;

        if (dtype != IDIST_F32 && dtype != IDIST_F64 && dtype != IDIST_BF16)
            return idist__fail(IDIST_ERR_ARG,
                               "%s: gradients must be F32, F64 or BF16, but gradient %d is %s; "
                               "idist_convert makes F32 of F16",
                               name, i, idist_dtype_name(dtype));
        if (grads[i].count && !grads[i].data)
            return idist__fail(IDIST_ERR_ARG, "%s: gradient %d is NULL", name, i);
    }

    return IDIST_OK;
}

// Returns true if one of the elements is infinite or NaN: if all bits of its exponent are set.
static bool idist__grad_scaler_overflows(const char *at, size_t count, idist_dtype dtype) {
    const uint64_t all_f64 = UINT64_C(0x7ff0000000000000);
    const uint32_t all_f32 = 0x7f800000u, all_bf16 = 0x7f80u;
    uint64_t f64;
    uint32_t f32;
    uint16_t bf16;
    bool found = false;
    size_t i;

    for (i = 0; i < count && dtype == IDIST_F32; i++) {
        memcpy(&f32, at + i * sizeof f32, sizeof f32);
        found |= (f32 & all_f32) == all_f32;
    }

    for (i = 0; i < count && dtype == IDIST_F64; i++) {
        memcpy(&f64, at + i * sizeof f64, sizeof f64);
        found |= (f64 & all_f64) == all_f64;
    }

    for (i = 0; i < count && dtype == IDIST_BF16; i++) {
        memcpy(&bf16, at + i * sizeof bf16, sizeof bf16);
        found |= (bf16 & all_bf16) == all_bf16;
    }

    return found;
}

enum { IDIST__GRAD_SCALER_PIECE = 4096 }; // elements that are read twice, while they are cached

// Multiplies a gradient by a factor. Returns true if it had an infinite element or a NaN.
static bool idist__grad_scaler_multiply(const idist_tensor *gradient, double factor) {
    size_t first, count;
    bool found = false;

    for (first = 0; first < gradient->count; first += count) {
        char *at = idist__convert_at(gradient, first);

        count = gradient->count - first;
        if (count > IDIST__GRAD_SCALER_PIECE) count = IDIST__GRAD_SCALER_PIECE;
        if (idist__grad_scaler_overflows(at, count, gradient->dtype)) found = true;
        idist__reduce_scale(at, count, gradient->dtype, factor);
    }

    return found;
}

static double idist__grad_scaler_reciprocal(const idist_grad_scaler *scaler) {
    uint32_t mode = idist__mode_enter();
    float reciprocal = (float)(1 / (double)idist_grad_scaler_scale(scaler));

    idist__mode_leave(mode);
    return (double)reciprocal;
}

idist_status idist_grad_scaler_unscale(idist_grad_scaler *scaler, const idist_tensor *grads, int n,
                                       bool shared, const idist_opts *opts) {
    const char *name = "grad_scaler_unscale";
    uint8_t found = 0;
    double factor;
    int i;
    idist_opts own_opts;
    idist_status status = shared ? IDIST_OK : idist__agree_enter(name, opts, &own_opts);

    if (status != IDIST_OK) return status;
    status = idist__grad_scaler_check(name, scaler);
    if (status == IDIST_OK && scaler->unscaled)
        status = idist__fail(IDIST_ERR_STATE,
                             "%s: the gradients of this iteration are unscaled already; call "
                             "grad_scaler_update before the next",
                             name);
    if (status == IDIST_OK) status = idist__grad_scaler_check_grads(grads, n);
    if (!shared) status = idist__agree(status, &own_opts);
    if (status != IDIST_OK) return status;

    factor = idist__grad_scaler_reciprocal(scaler);
    for (i = 0; i < n; i++)
        if (idist__grad_scaler_multiply(&grads[i], factor)) found = 1;
    if (!shared) status = idist_all_reduce(&found, &found, 1, IDIST_U8, IDIST_MAX, &own_opts);
    if (status != IDIST_OK) return status;

    scaler->unscaled = true;
    scaler->found_inf = found;

    return IDIST_OK;
}

// Sets the scale and the growth tracker at the end of an iteration.
static void idist__grad_scaler_adapt(idist_grad_scaler *scaler) {
    double scale = (double)idist_grad_scaler_scale(scaler), grown;
    int interval = scaler->growth_interval ? scaler->growth_interval : 2000;

    if (scaler->found_inf) {
        scale *= idist__grad_scaler_backoff(scaler);
        scaler->growth_tracker = 0;
    } else if (scaler->growth_tracker < interval - 1) {
        scaler->growth_tracker++;
    } else {
        grown = scale * idist__grad_scaler_growth(scaler);
        if (grown <= IDIST__GRAD_SCALER_MOST) scale = grown;
        scaler->growth_tracker = 0;
    }

    if (scale < IDIST__GRAD_SCALER_LEAST) scale = IDIST__GRAD_SCALER_LEAST;
    scaler->scale = (float)scale;
}

idist_status idist_grad_scaler_update(idist_grad_scaler *scaler) {
    const char *name = "grad_scaler_update";
    uint32_t mode;
    idist_status status = idist__grad_scaler_check(name, scaler);

    if (status != IDIST_OK) return status;
    if (!scaler->unscaled)
        return idist__fail(IDIST_ERR_STATE, "%s: no gradients were unscaled since the last update",
                           name);

    mode = idist__mode_enter();
    idist__grad_scaler_adapt(scaler);
    idist__mode_leave(mode);
    scaler->unscaled = false;
    scaler->found_inf = false;

    return IDIST_OK;
}

// ---- train/schedule.h ----------------------------------------------------------------------------

// train/schedule.h: values that follow the step, such as the learning rate
//
// The functions log, exp and sin would need -lm, so this file sums series instead. The series are
// so long that their next term would be below the last bit of a double.

static const double idist__schedule_ln_2 = 0.69314718055994530942;
static const double idist__schedule_half_pi = 1.57079632679489661923;

// Returns the natural logarithm of x, which is positive. Writes x as m * 2^e with m near 1, and
// ln(m) as 2 * artanh((m - 1) / (m + 1)).
static double idist__schedule_log(double x) {
    double z, sum = 0;
    int k, exponent = 0;

    for (; x > 1.5; x /= 2) exponent++;
    for (; x < 0.75; x *= 2) exponent--;

    z = (x - 1) / (x + 1);
    for (k = 27; k >= 1; k -= 2) sum = sum * z * z + 1.0 / k;

    return exponent * idist__schedule_ln_2 + 2 * z * sum;
}

// Returns e^x. Writes x as a multiple of ln 2 plus a remainder, sums Taylor's series for the
// remainder, and then doubles or halves the sum.
static double idist__schedule_exp(double x) {
    double sum = 1;
    int k, doublings;

    if (x < -746) return 0;
    if (x > 710) x = 710; // the result is infinite

    doublings = (int)(x / idist__schedule_ln_2);
    x -= doublings * idist__schedule_ln_2;
    for (k = 18; k >= 1; k--) sum = 1 + sum * x / k;

    for (; doublings > 0; doublings--) sum *= 2;
    for (; doublings < 0; doublings++) sum /= 2;

    return sum;
}

// Returns value * x^exponent for x >= 0, even if x^exponent alone is too large or too small for a
// double.
static double idist__schedule_scaled(double value, double x, double exponent) {
    double size = value < 0 ? -value : value, scaled;

    if (value == 0 || exponent == 0) return value;
    if (exponent == 1 || x == 0) return value * x;
    scaled = idist__schedule_exp(idist__schedule_log(size) + exponent * idist__schedule_log(x));
    if (x <= 1 && scaled > size) scaled = size; // rounded up, perhaps to infinity

    return value < 0 ? -scaled : scaled;
}

// Returns the value at `left` on half a cosine: `to` at left = 0 and `from` at left = 1, exact at
// both ends. Computes (1 - cos(pi * left)) / 2 as the square of a sine, which keeps all digits
// near `to`.
static double idist__schedule_cosine(double from, double to, double left) {
    double x = left * idist__schedule_half_pi, sine = 1;
    int k;

    if (left > 0.5) return idist__schedule_cosine(to, from, 1 - left);

    for (k = 20; k >= 2; k -= 2) sine = 1 - sine * x * x / (k * (k + 1));
    sine *= x;

    return to + (from - to) * sine * sine;
}

// Returns the value at `left` between two values of a one-cycle schedule, on a straight line or on
// half a cosine: `to` at left = 0 and `from` at left = 1, exact at both ends.
static double idist__schedule_between(const idist_schedule *schedule, double from, double to,
                                      double left) {
    if (!schedule->linear) return idist__schedule_cosine(from, to, left);
    return left > 0.5 ? from + (to - from) * (1 - left) : to + (from - to) * left;
}

// Returns the value of a one-cycle schedule. The phases end where they end in torch: one step
// before rise * steps, two steps before 2 * rise * steps if there are three phases, and one step
// before `steps`.
static double idist__schedule_one_cycle(const idist_schedule *schedule, uint64_t step) {
    double rise = schedule->rise != 0 ? schedule->rise : 0.3;
    double top = rise * (double)schedule->steps - 1, last = (double)schedule->steps - 1;
    double at = (double)step, start = top, from = schedule->peak, left;

    if (step >= schedule->steps - 1) return schedule->end;
    if (at < top)
        return idist__schedule_between(schedule, schedule->begin, schedule->peak, 1 - at / top);

    if (schedule->three_phase) {
        start = 2 * top;
        from = schedule->begin;
        if (at < start)
            return idist__schedule_between(schedule, schedule->peak, from,
                                           (start - at) / (start - top));
    }

    // With very many steps, the rounded numbers of a step and of the last step may be equal.
    left = at < last ? (last - at) / (last - start) : 0;
    return idist__schedule_between(schedule, from, schedule->end, left);
}

// Returns the value of a cosine with restarts. A cycle has length * multiple steps, a product that
// may be above 2^64.
static double idist__schedule_restarts(const idist_schedule *schedule, uint64_t step) {
    uint64_t length = schedule->steps, multiple = 1, done = step;
    double rest;

    if (schedule->multiple <= 1) done %= length;
    while (done / multiple >= length) { // at most 64 times, because the length doubles at least
        length *= multiple;
        done -= length;
        multiple = schedule->multiple;
    }

    // Computes length * multiple - done as a sum of two parts that are not negative.
    rest = (double)(length - done / multiple - 1) * (double)multiple;
    rest += (double)(multiple - done % multiple);

    return idist__schedule_cosine(schedule->begin, schedule->end,
                                  rest / ((double)length * (double)multiple));
}

// Returns the value of a cyclic schedule.
static double idist__schedule_cyclic(const idist_schedule *schedule, uint64_t step) {
    uint64_t up = schedule->steps, down = schedule->down_steps ? schedule->down_steps : up;
    uint64_t cycle = 0, done = step;
    double height = schedule->peak - schedule->begin;

    if (down <= UINT64_MAX - up) { // otherwise the first cycle contains every step
        cycle = step / (up + down);
        done = step % (up + down);
    }

    if (done <= up) height *= (double)done / (double)up;
    else height *= (double)(down - (done - up)) / (double)down;

    if (schedule->kind == IDIST_SCHEDULE_CYCLIC_HALVED)
        height = idist__schedule_scaled(height, 0.5, (double)cycle);
    if (schedule->kind == IDIST_SCHEDULE_CYCLIC_EXPONENTIAL)
        height = idist__schedule_scaled(height, schedule->factor, (double)step);

    return schedule->begin + height;
}

// Returns the value of a multi-step schedule.
static double idist__schedule_multi_step(const idist_schedule *schedule, uint64_t step) {
    int passed = 0;

    while (passed < schedule->milestone_count && step >= schedule->milestones[passed]) passed++;

    return idist__schedule_scaled(schedule->begin, schedule->factor, (double)passed);
}

// Returns the value at a step, counted from the end of the warm-up.
static double idist__schedule_main(const idist_schedule *schedule, uint64_t step) {
    uint64_t steps = schedule->steps, done, rest;
    double range = schedule->begin - schedule->end;
    double power = schedule->power != 0 ? schedule->power : 1;

    switch (schedule->kind) {
    case IDIST_SCHEDULE_STEP:
        return idist__schedule_scaled(schedule->begin, schedule->factor, (double)(step / steps));
    case IDIST_SCHEDULE_EXPONENTIAL:
        return idist__schedule_scaled(schedule->begin, schedule->factor, (double)step);

    case IDIST_SCHEDULE_COSINE:
        done = step % steps;
        rest = step / steps % 2 ? done : steps - done;
        return idist__schedule_cosine(schedule->begin, schedule->end, (double)rest / (double)steps);

    case IDIST_SCHEDULE_POLYNOMIAL:
        rest = step < steps ? steps - step : 0;
        return schedule->end + idist__schedule_scaled(range, (double)rest / (double)steps, power);

    case IDIST_SCHEDULE_ONE_CYCLE: return idist__schedule_one_cycle(schedule, step);
    case IDIST_SCHEDULE_MULTI_STEP: return idist__schedule_multi_step(schedule, step);
    case IDIST_SCHEDULE_COSINE_RESTARTS: return idist__schedule_restarts(schedule, step);

    case IDIST_SCHEDULE_CYCLIC:
    case IDIST_SCHEDULE_CYCLIC_HALVED:
    case IDIST_SCHEDULE_CYCLIC_EXPONENTIAL: return idist__schedule_cyclic(schedule, step);

    default: return schedule->begin;
    }
}

// Returns true if x is finite. Rounds x to a double first, because the x87 unit of i386 also holds
// larger numbers.
static bool idist__schedule_is_finite(double x) {
    volatile double rounded = x;
    return rounded - rounded == 0;
}

// The fields that a kind uses, beside begin and the warm-up.
enum {
    IDIST__SCHEDULE_USES_STEPS = 1,
    IDIST__SCHEDULE_USES_FACTOR = 2,
    IDIST__SCHEDULE_USES_END = 4,
    IDIST__SCHEDULE_USES_PEAK = 8
};

// Returns the fields that a kind uses, or -1 if there is no such kind.
static int idist__schedule_fields(idist_schedule_kind kind) {
    switch (kind) {
    case IDIST_SCHEDULE_CONSTANT: return 0;
    case IDIST_SCHEDULE_STEP: return IDIST__SCHEDULE_USES_STEPS | IDIST__SCHEDULE_USES_FACTOR;

    case IDIST_SCHEDULE_EXPONENTIAL:
    case IDIST_SCHEDULE_MULTI_STEP: return IDIST__SCHEDULE_USES_FACTOR;

    case IDIST_SCHEDULE_COSINE:
    case IDIST_SCHEDULE_POLYNOMIAL:
    case IDIST_SCHEDULE_COSINE_RESTARTS:
        return IDIST__SCHEDULE_USES_STEPS | IDIST__SCHEDULE_USES_END;

    case IDIST_SCHEDULE_ONE_CYCLE:
        return IDIST__SCHEDULE_USES_STEPS | IDIST__SCHEDULE_USES_END | IDIST__SCHEDULE_USES_PEAK;

    case IDIST_SCHEDULE_CYCLIC:
    case IDIST_SCHEDULE_CYCLIC_HALVED:
        return IDIST__SCHEDULE_USES_STEPS | IDIST__SCHEDULE_USES_PEAK;
    case IDIST_SCHEDULE_CYCLIC_EXPONENTIAL:
        return IDIST__SCHEDULE_USES_STEPS | IDIST__SCHEDULE_USES_PEAK | IDIST__SCHEDULE_USES_FACTOR;
    }

    return -1;
}

// Returns true if the values between which a schedule moves, and the differences between these
// values, are finite. A difference with infinity or NaN is not finite, so `end`, `peak` and
// `warmup` need no separate check.
static bool idist__schedule_is_bounded(const idist_schedule *schedule) {
    double begin = schedule->begin, end = schedule->end, peak = schedule->peak;
    int fields = idist__schedule_fields(schedule->kind);
    bool has_end = (fields & IDIST__SCHEDULE_USES_END) != 0;
    bool has_peak = (fields & IDIST__SCHEDULE_USES_PEAK) != 0;

    if (!idist__schedule_is_finite(begin)) return false;
    if (has_end && !idist__schedule_is_finite(begin - end)) return false;
    if (has_peak && !idist__schedule_is_finite(begin - peak)) return false;
    if (has_end && has_peak && !idist__schedule_is_finite(peak - end)) return false;
    if (!schedule->warmup_steps) return true;

    // The warm-up ends at the value of step 0, which is not `begin` if the rise is so short that it
    // ends before step 0, or if a milestone is at step 0.
    return idist__schedule_is_finite(idist__schedule_main(schedule, 0) - schedule->warmup);
}

static idist_status idist__schedule_check_rise(const char *name, const idist_schedule *schedule) {
    char text[IDIST__NUMBER_NBYTES];
    double rise = schedule->rise;

    if (schedule->three_phase && !(rise >= 0 && rise <= 0.5))
        return idist__fail(IDIST_ERR_ARG,
                           "%s: with three phases, rise must be at least 0 and at most 0.5, got %s",
                           name, idist__number_print(text, rise, 6));
    if (!(rise >= 0 && rise < 1))
        return idist__fail(IDIST_ERR_ARG, "%s: rise must be at least 0 and below 1, got %s", name,
                           idist__number_print(text, rise, 6));

    return IDIST_OK;
}

static idist_status idist__schedule_check_multi_step(const char *name,
                                                     const idist_schedule *schedule) {
    const uint64_t *milestones = schedule->milestones;
    int i, n = schedule->milestone_count;

    if (n < 0 || (n > 0 && !milestones))
        return idist__fail(IDIST_ERR_ARG, "%s: %d milestones, or milestones is NULL", name, n);
    for (i = 1; i < n; i++)
        if (milestones[i] < milestones[i - 1])
            return idist__fail(IDIST_ERR_ARG,
                               "%s: milestones must not decrease, but milestone %d is at %llu, "
                               "after %llu",
                               name, i, (unsigned long long)milestones[i],
                               (unsigned long long)milestones[i - 1]);

    return IDIST_OK;
}

// Checks a schedule. `name` begins the text of a failure.
static idist_status idist__schedule_check(const char *name, const idist_schedule *schedule) {
    char text[IDIST__NUMBER_NBYTES];
    idist_status status = IDIST_OK;
    int fields;

    if (!schedule) return idist__fail(IDIST_ERR_ARG, "%s: schedule is NULL", name);
    fields = idist__schedule_fields(schedule->kind);
    if (fields < 0)
        return idist__fail(IDIST_ERR_ARG, "%s: invalid kind %d", name, (int)schedule->kind);
    if ((fields & IDIST__SCHEDULE_USES_STEPS) && !schedule->steps)
        return idist__fail(IDIST_ERR_ARG, "%s: steps must be positive", name);

    if ((fields & IDIST__SCHEDULE_USES_FACTOR) &&
        !(schedule->factor > 0 && idist__schedule_is_finite(schedule->factor)))
        return idist__fail(IDIST_ERR_ARG, "%s: factor must be finite and positive, got %s", name,
                           idist__number_print(text, schedule->factor, 6));
    if (schedule->kind == IDIST_SCHEDULE_POLYNOMIAL &&
        !(schedule->power >= 0 && idist__schedule_is_finite(schedule->power)))
        return idist__fail(IDIST_ERR_ARG, "%s: power must be finite and not negative, got %s", name,
                           idist__number_print(text, schedule->power, 6));

    if (schedule->kind == IDIST_SCHEDULE_ONE_CYCLE)
        status = idist__schedule_check_rise(name, schedule);
    if (schedule->kind == IDIST_SCHEDULE_MULTI_STEP)
        status = idist__schedule_check_multi_step(name, schedule);
    if (status != IDIST_OK) return status;

    if (!idist__schedule_is_bounded(schedule))
        return idist__fail(IDIST_ERR_ARG,
                           "%s: begin, end, peak and warmup, and their differences, must be finite",
                           name);

    return IDIST_OK;
}

static double idist__schedule_nan(void) {
    return (double)idist__small_float_from_bits(0x7fc00000u);
}

// Returns the value of a valid schedule.
static double idist__schedule_at(const idist_schedule *schedule, uint64_t step) {
    double first, part;

    if (step >= schedule->warmup_steps)
        return idist__schedule_main(schedule, step - schedule->warmup_steps);

    first = idist__schedule_main(schedule, 0);
    part = (double)step / (double)schedule->warmup_steps;

    return schedule->warmup + (first - schedule->warmup) * part;
}

double idist_schedule_value(const idist_schedule *schedule, uint64_t step) {
    if (idist__schedule_check("schedule_value", schedule) != IDIST_OK) return idist__schedule_nan();
    return idist__schedule_at(schedule, step);
}

static idist_status idist__schedule_check_sequence(const idist_schedule *schedules,
                                                   const uint64_t *milestones, int n) {
    char name[64];
    idist_status status;
    int i;

    if (n < 1 || !schedules || (n > 1 && !milestones))
        return idist__fail(IDIST_ERR_ARG,
                           "schedule_sequence: %d schedules, or schedules or milestones is NULL",
                           n);

    for (i = 1; i < n - 1; i++)
        if (milestones[i] <= milestones[i - 1])
            return idist__fail(IDIST_ERR_ARG,
                               "schedule_sequence: milestones must increase, but milestone %d is "
                               "at %llu, after %llu",
                               i, (unsigned long long)milestones[i],
                               (unsigned long long)milestones[i - 1]);

    for (i = 0; i < n; i++) {
        snprintf(name, sizeof name, "schedule_sequence: schedule %d", i);
        status = idist__schedule_check(name, &schedules[i]);
        if (status != IDIST_OK) return status;
    }

    return IDIST_OK;
}

double idist_schedule_sequence(const idist_schedule *schedules, const uint64_t *milestones, int n,
                               uint64_t step) {
    int i = 0;

    if (idist__schedule_check_sequence(schedules, milestones, n) != IDIST_OK)
        return idist__schedule_nan();

    while (i < n - 1 && step >= milestones[i]) i++;
    return idist__schedule_at(&schedules[i], i > 0 ? step - milestones[i - 1] : step);
}

static idist_status idist__schedule_check_milestones(const idist_milestone *milestones, int n,
                                                     double step) {
    char a[IDIST__NUMBER_NBYTES], b[IDIST__NUMBER_NBYTES];
    int i;

    if (!milestones || n < 1)
        return idist__fail(IDIST_ERR_ARG, "piecewise_linear: %d milestones, or milestones is NULL",
                           n);
    if (!idist__schedule_is_finite(step))
        return idist__fail(IDIST_ERR_ARG, "piecewise_linear: step is %s",
                           idist__number_print(a, step, 6));

    for (i = 0; i < n; i++) {
        const idist_milestone *at = &milestones[i];

        if (!idist__schedule_is_finite(at->step) || !idist__schedule_is_finite(at->value))
            return idist__fail(IDIST_ERR_ARG, "piecewise_linear: milestone %d is (%s, %s)", i,
                               idist__number_print(a, at->step, 6),
                               idist__number_print(b, at->value, 6));
        if (i > 0 && !(at->step > milestones[i - 1].step))
            return idist__fail(IDIST_ERR_ARG,
                               "piecewise_linear: steps must increase, but milestone %d is at %s, "
                               "after %s",
                               i, idist__number_print(a, at->step, 6),
                               idist__number_print(b, milestones[i - 1].step, 6));
        if (i > 0 && !idist__schedule_is_finite((at->value - milestones[i - 1].value) *
                                                (at->step - milestones[i - 1].step)))
            return idist__fail(IDIST_ERR_ARG,
                               "piecewise_linear: milestones %d and %d are too far apart", i - 1,
                               i);
    }

    return IDIST_OK;
}

double idist_piecewise_linear(const idist_milestone *milestones, int n, double step) {
    const idist_milestone *from, *to;
    int i = 1;

    if (idist__schedule_check_milestones(milestones, n, step) != IDIST_OK)
        return idist__schedule_nan();
    if (step <= milestones[0].step) return milestones[0].value;
    if (step >= milestones[n - 1].step) return milestones[n - 1].value;

    while (milestones[i].step <= step) i++;
    from = &milestones[i - 1];
    to = &milestones[i];

    return from->value + (to->value - from->value) * (step - from->step) / (to->step - from->step);
}

// ---- train/plateau.h -----------------------------------------------------------------------------

// train/plateau.h: a rate that falls when a metric stops improving
//
// Follows torch's ReduceLROnPlateau, with the same formulas, so that the rates are equal bit by bit
// after any number of updates. On i386, the x87 unit rounds differently.

// Replaces fields that are 0 or negative by the values that they mean.
static idist_plateau idist__plateau_resolve(const idist_plateau *plateau) {
    idist_plateau resolved = *plateau;

    if (resolved.factor == 0) resolved.factor = 0.1;
    if (resolved.eps == 0) resolved.eps = 1e-8;
    if (resolved.eps < 0) resolved.eps = 0;
    if (resolved.threshold == 0) resolved.threshold = 1e-4;
    if (resolved.threshold < 0) resolved.threshold = 0;
    if (resolved.patience == 0) resolved.patience = 10;
    if (resolved.patience < 0) resolved.patience = 0;

    return resolved;
}

static idist_status idist__plateau_check_state(const idist_plateau *plateau) {
    char text[IDIST__NUMBER_NBYTES];

    if (plateau->bad_count < 0 || plateau->cooldown_left < 0)
        return idist__fail(IDIST_ERR_ARG,
                           "plateau_update: bad_count and cooldown_left must not be negative, got "
                           "%d and %d",
                           plateau->bad_count, plateau->cooldown_left);
    if (plateau->best != plateau->best)
        return idist__fail(IDIST_ERR_ARG, "plateau_update: best is %s",
                           idist__number_print(text, plateau->best, 6));

    return IDIST_OK;
}

// Checks the fields of the program that idist__plateau_resolve may replace.
static idist_status idist__plateau_check_given(const idist_plateau *plateau) {
    char a[IDIST__NUMBER_NBYTES], b[IDIST__NUMBER_NBYTES];

    if (!(plateau->factor >= 0 && plateau->factor < 1))
        return idist__fail(IDIST_ERR_ARG,
                           "plateau_update: factor must be above 0 and below 1, got %s",
                           idist__number_print(a, plateau->factor, 6));
    if (idist__schedule_is_finite(plateau->eps) && idist__schedule_is_finite(plateau->threshold))
        return IDIST_OK;

    return idist__fail(IDIST_ERR_ARG,
                       "plateau_update: eps and threshold must be finite, got %s and %s",
                       idist__number_print(a, plateau->eps, 6),
                       idist__number_print(b, plateau->threshold, 6));
}

// Checks the fields after idist__plateau_resolve.
static idist_status idist__plateau_check(const idist_plateau *plateau) {
    char text[IDIST__NUMBER_NBYTES];

    if (!(plateau->value >= 0 && idist__schedule_is_finite(plateau->value)))
        return idist__fail(IDIST_ERR_ARG,
                           "plateau_update: value must be finite and not negative, got %s",
                           idist__number_print(text, plateau->value, 6));
    if (!idist__schedule_is_finite(plateau->min_value))
        return idist__fail(IDIST_ERR_ARG, "plateau_update: min_value must be finite, got %s",
                           idist__number_print(text, plateau->min_value, 6));
    if (!plateau->absolute && !plateau->high_is_best && plateau->threshold >= 1)
        return idist__fail(IDIST_ERR_ARG,
                           "plateau_update: a threshold that is a fraction must be below 1, got %s",
                           idist__number_print(text, plateau->threshold, 6));
    if (plateau->cooldown < 0)
        return idist__fail(IDIST_ERR_ARG, "plateau_update: cooldown must not be negative, got %d",
                           plateau->cooldown);

    return idist__plateau_check_state(plateau);
}

// Returns true if a metric is better than the best metric by more than the threshold. Returns false
// for a NaN.
static bool idist__plateau_is_better(const idist_plateau *plateau, double metric) {
    double best = plateau->best, threshold = plateau->threshold;

    if (plateau->high_is_best)
        return metric > (plateau->absolute ? best + threshold : best * (1 + threshold));
    return metric < (plateau->absolute ? best - threshold : best * (1 - threshold));
}

// Lowers the rate, unless the decrease is not larger than eps.
static void idist__plateau_lower(idist_plateau *plateau) {
    double lower = plateau->value * plateau->factor;

    if (lower < plateau->min_value) lower = plateau->min_value;
    if (plateau->value - lower > plateau->eps) plateau->value = lower;
}

idist_status idist_plateau_update(idist_plateau *plateau, double metric) {
    idist_plateau now; // with all fields resolved
    idist_status status;
    bool is_better;

    if (!plateau) return idist__fail(IDIST_ERR_ARG, "plateau_update: plateau is NULL");
    status = idist__plateau_check_given(plateau); // before NaN could pass for 0, with -Ofast
    if (status != IDIST_OK) return status;
    now = idist__plateau_resolve(plateau);
    status = idist__plateau_check(&now);
    if (status != IDIST_OK) return status;

    if (!now.begun) {
        now.best = (double)idist__small_float_from_bits(0x7f800000u); // infinity
        if (now.high_is_best) now.best = -now.best;
    }

    is_better = idist__plateau_is_better(&now, metric);
    if (is_better) now.best = metric;

    if (now.cooldown_left > 0) {
        now.cooldown_left--;
        now.bad_count = 0;
    } else if (is_better) {
        now.bad_count = 0;
    } else if (now.bad_count < now.patience) {
        now.bad_count++;
    } else {
        idist__plateau_lower(&now);
        now.cooldown_left = now.cooldown;
        now.bad_count = 0;
    }

    plateau->value = now.value;
    plateau->best = now.best;
    plateau->bad_count = now.bad_count;
    plateau->cooldown_left = now.cooldown_left;
    plateau->begun = true;

    return IDIST_OK;
}

// ---- train/metric.h ------------------------------------------------------------------------------

// train/metric.h: metrics that are summed over the ranks, or computed on rank 0
//
// Functions: idist__metric_*, idist__epoch_metric_*.

//------------------------------------------------------------------------------
// numbers summed over all ranks
//------------------------------------------------------------------------------

// Computes the ratio of two numbers of a metric, each summed over all ranks. The ratio is NaN if
// the denominator is 0. Collective.
static idist_status idist__metric_ratio(const char *name, const void *metric, double numerator,
                                        double denominator, double *value, const idist_opts *opts) {
    double sums[2];
    idist_opts own_opts;
    idist_status status = idist__agree_enter(name, opts, &own_opts);

    if (status != IDIST_OK) return status;
    if (!metric) return idist__fail(IDIST_ERR_ARG, "%s: the metric is NULL", name);

    sums[0] = numerator;
    sums[1] = denominator;
    status = idist_all_reduce(sums, sums, 2, IDIST_F64, IDIST_SUM, &own_opts);
    if (status == IDIST_OK && value)
        *value =
            sums[1] != 0 ? sums[0] / sums[1] : (double)idist__small_float_from_bits(0x7fc00000u);

    return status;
}

// Returns true if fewer than k classes come before the label in a row. A class comes before the
// label if its score is higher, or if its score is equal and its number is lower. Returns false if
// the row contains a NaN.
static bool idist__metric_is_among(const float *row, int label, int classes, int k) {
    float score = row[label];
    int i, before = 0;

    for (i = 0; i < classes && before < k; i++) {
        if (row[i] != row[i]) return false; // a NaN
        if (row[i] > score || (row[i] == score && i < label)) before++;
    }

    return before < k;
}

// Adds n samples. A sample is correct if its label is among the first k classes of its row.
static idist_status idist__metric_add_rows(const char *name, idist_accuracy *m, const float *scores,
                                           const int *labels, size_t n, int classes, int k) {
    size_t i;

    if (!m || (n && (!scores || !labels)) || classes < 1)
        return idist__fail(IDIST_ERR_ARG, "%s: %d classes, or a pointer is NULL", name, classes);
    if (k < 1 || k > classes)
        return idist__fail(IDIST_ERR_ARG, "%s: k is %d, which is not in 1 .. %d", name, k, classes);
    for (i = 0; i < n; i++)
        if (labels[i] < 0 || labels[i] >= classes)
            return idist__fail(IDIST_ERR_ARG, "%s: label %d of sample %zu is not in 0 .. %d", name,
                               labels[i], i, classes - 1);

    for (i = 0; i < n; i++)
        m->correct += idist__metric_is_among(scores + i * (size_t)classes, labels[i], classes, k);
    m->total += n;

    return IDIST_OK;
}

idist_status idist_accuracy_update(idist_accuracy *m, const float *scores, const int *labels,
                                   size_t n, int classes) {
    return idist__metric_add_rows("accuracy_update", m, scores, labels, n, classes, 1);
}

idist_status idist_accuracy_update_top_k(idist_accuracy *m, const float *scores, const int *labels,
                                         size_t n, int classes, int k) {
    return idist__metric_add_rows("accuracy_update_top_k", m, scores, labels, n, classes, k);
}

idist_status idist_accuracy_compute(const idist_accuracy *m, double *value,
                                    const idist_opts *opts) {
    double correct = m ? (double)m->correct : 0, total = m ? (double)m->total : 0;
    return idist__metric_ratio("accuracy_compute", m, correct, total, value, opts);
}

void idist_mean_update(idist_mean *mean, double value, double weight) {
    if (weight == 0) return; // a NaN times 0 is a NaN
    mean->sum += value * weight;
    mean->weight += weight;
}

idist_status idist_mean_compute(const idist_mean *mean, double *value, const idist_opts *opts) {
    return idist__metric_ratio("mean_compute", mean, mean ? mean->sum : 0, mean ? mean->weight : 0,
                               value, opts);
}

// Adds the squares or the absolute values of the differences between predictions and targets.
static idist_status idist__metric_add_errors(const char *name, idist_mean *mean,
                                             const float *predicted, const float *targets,
                                             size_t count, bool squared) {
    double sum = 0;
    size_t i;

    if (!mean || (count && (!predicted || !targets)))
        return idist__fail(IDIST_ERR_ARG, "%s: a pointer is NULL", name);

    for (i = 0; i < count; i++) {
        double error = (double)predicted[i] - (double)targets[i];

        if (squared) sum += error * error;
        else sum += error < 0 ? -error : error;
    }

    mean->sum += sum;
    mean->weight += (double)count;

    return IDIST_OK;
}

idist_status idist_mean_squared_error_update(idist_mean *mean, const float *predicted,
                                             const float *targets, size_t count) {
    return idist__metric_add_errors("mean_squared_error_update", mean, predicted, targets, count,
                                    true);
}

idist_status idist_mean_absolute_error_update(idist_mean *mean, const float *predicted,
                                              const float *targets, size_t count) {
    return idist__metric_add_errors("mean_absolute_error_update", mean, predicted, targets, count,
                                    false);
}

void idist_running_average_update(idist_running_average *m, double value) {
    double alpha = m->alpha != 0 ? m->alpha : 0.98;

    if (!m->begun) m->value = value;
    else if (alpha != 1) m->value = alpha * m->value + (1 - alpha) * value;
    m->begun = true;
}

idist_status idist_running_average_compute(const idist_running_average *m, double *value,
                                           const idist_opts *opts) {
    bool begun = m && m->begun;
    return idist__metric_ratio("running_average_compute", m, begun ? m->value : 0, begun ? 1 : 0,
                               value, opts);
}

static bool idist__metric_is_class(const idist_confusion *confusion, int number) {
    return number >= 0 && number < confusion->classes;
}

idist_status idist_confusion_update(idist_confusion *confusion, const int *predicted,
                                    const int *labels, size_t n) {
    size_t i;

    if (!confusion || !confusion->cells || confusion->classes < 1 || (n && (!predicted || !labels)))
        return idist__fail(IDIST_ERR_ARG, "confusion_update: no classes, or a pointer is NULL");
    for (i = 0; i < n; i++)
        if (!idist__metric_is_class(confusion, labels[i]) ||
            !idist__metric_is_class(confusion, predicted[i]))
            return idist__fail(
                IDIST_ERR_ARG,
                "confusion_update: label %d or prediction %d of sample %zu is not in 0 .. %d",
                labels[i], predicted[i], i, confusion->classes - 1);

    for (i = 0; i < n; i++)
        confusion->cells[(size_t)labels[i] * (size_t)confusion->classes + (size_t)predicted[i]]++;

    return IDIST_OK;
}

idist_status idist_confusion_compute(const idist_confusion *confusion, uint64_t *cells,
                                     const idist_opts *opts) {
    void *unwanted = NULL;
    size_t count;
    idist_opts own_opts;
    idist_status status = idist__agree_enter("confusion_compute", opts, &own_opts);

    if (status != IDIST_OK) return status;
    if (!confusion || !confusion->cells || confusion->classes < 1)
        return idist__fail(IDIST_ERR_ARG, "confusion_compute: no classes, or a pointer is NULL");
    if (cells == confusion->cells)
        return idist__fail(IDIST_ERR_ARG,
                           "confusion_compute: cells must not be those of the metric");

    count = (size_t)confusion->classes * (size_t)confusion->classes;

    if (!cells) {
        unwanted = malloc(count * sizeof *cells);
        if (!unwanted) return idist__agree_no_memory("confusion_compute", own_opts.group);
    }

    status = idist_all_reduce(confusion->cells, cells ? cells : unwanted, count, IDIST_U64,
                              IDIST_SUM, &own_opts);
    free(unwanted);

    return status;
}

//------------------------------------------------------------------------------
// metrics that rank 0 computes from the rows of all ranks
//
//     gather       rank 0 gets the number and size of each rank's rows, and allocates memory
//     agree        that rank 0 has the memory, and that rows have the same size on all ranks
//     gatherv      the rows
//     agree        that the program's function succeeded on rank 0
//     broadcast    the value
//------------------------------------------------------------------------------

// A metric that rank 0 computes.
typedef struct idist__epoch_metric {
    const char *name; // of the public function, for error texts
    const void *rows; // of this rank
    size_t n, row_nbytes;
    idist_epoch_metric_fn fn;
    void *arg;              // passed to fn
    const idist_opts *opts; // from idist__agree_enter
} idist__epoch_metric;

// The words that rank 0 gathers from each rank.
enum { IDIST__EPOCH_ROWS, IDIST__EPOCH_ROW_NBYTES, IDIST__EPOCH_WORDS };

// Checks the row sizes of all ranks and allocates memory for all rows. Sets counts[rank] to the
// number of bytes from each rank, and *total to the number of rows. Called on rank 0.
static idist_status idist__epoch_metric_alloc(const idist__epoch_metric *metric,
                                              const uint64_t *sizes, size_t *counts, char **rows,
                                              uint64_t *total) {
    size_t row_nbytes = metric->row_nbytes;
    int rank, ranks = idist_group_size(metric->opts->group);

    *rows = NULL;
    *total = 0;

    for (rank = 0; rank < ranks; rank++) {
        const uint64_t *size = sizes + IDIST__EPOCH_WORDS * rank;

        if (size[IDIST__EPOCH_ROW_NBYTES] != row_nbytes)
            return idist__fail(IDIST_ERR_ARG,
                               "%s: a row has %zu bytes here, but %llu on another rank",
                               metric->name, row_nbytes,
                               (unsigned long long)size[IDIST__EPOCH_ROW_NBYTES]);
        if (size[IDIST__EPOCH_ROWS] > (SIZE_MAX / 2 - *total * row_nbytes) / row_nbytes)
            return idist__fail(IDIST_ERR_NO_MEMORY, "%s: no memory for the rows of all ranks",
                               metric->name);
        *total += size[IDIST__EPOCH_ROWS];
        counts[rank] = (size_t)size[IDIST__EPOCH_ROWS] * row_nbytes;
    }

    *rows = (char *)malloc((size_t)*total * row_nbytes + 1);
    if (!*rows)
        return idist__fail(IDIST_ERR_NO_MEMORY, "%s: no memory for %llu rows", metric->name,
                           (unsigned long long)*total);

    return IDIST_OK;
}

// Gathers the rows of all ranks on rank 0. Collective.
static idist_status idist__epoch_metric_gather(const idist__epoch_metric *metric, uint64_t *sizes,
                                               size_t *counts, char **all, uint64_t *total) {
    const idist_opts *opts = metric->opts;
    uint64_t own[IDIST__EPOCH_WORDS];
    idist_status status;

    own[IDIST__EPOCH_ROWS] = metric->n;
    own[IDIST__EPOCH_ROW_NBYTES] = metric->row_nbytes;
    status = idist_gather(own, sizes, IDIST__EPOCH_WORDS, IDIST_U64, 0, opts);
    if (status != IDIST_OK) return status;

    if (idist_group_rank(opts->group) == 0)
        status = idist__epoch_metric_alloc(metric, sizes, counts, all, total);
    status = idist__agree(status, opts);
    if (status != IDIST_OK) return status;

    return idist_gatherv(metric->rows, metric->n * metric->row_nbytes, *all, counts, NULL, IDIST_U8,
                         0, opts);
}

// Calls the function of the metric. Called on rank 0.
IDIST__NOINLINE static idist_status idist__epoch_metric_call(const idist__epoch_metric *metric,
                                                             const void *rows, uint64_t total,
                                                             double *value) {
    int result = 1;

    IDIST__CALLBACK(result = metric->fn(rows, (size_t)total, metric->arg, value));
    if (idist__callback_threw(metric->name, "the function")) return IDIST_ERR_CALLBACK;
    if (!result) return IDIST_OK;

    return idist__fail(IDIST_ERR_CALLBACK, "%s: the function failed with %d", metric->name, result);
}

// Computes a metric on rank 0 and gives its value to all ranks. If `mine` is not IDIST_OK, this
// rank cannot take part, and all ranks get this status. Collective.
static idist_status idist__epoch_metric_run(const idist__epoch_metric *metric, idist_status mine,
                                            double *value) {
    const idist_opts *opts = metric->opts;
    int ranks = idist_group_size(opts->group);
    uint64_t total = 0, *sizes;
    size_t *counts, rank_nbytes = IDIST__EPOCH_WORDS * sizeof *sizes + sizeof *counts;
    char *all = NULL;
    double computed = 0;
    idist_status status = mine;

    sizes = (uint64_t *)malloc((size_t)ranks * rank_nbytes);
    counts = (size_t *)(void *)(sizes ? sizes + IDIST__EPOCH_WORDS * ranks : NULL);
    if (!sizes && status == IDIST_OK)
        status =
            idist__fail(IDIST_ERR_NO_MEMORY, "%s: no memory for %d ranks", metric->name, ranks);

    status = idist__agree(status, opts);
    if (status == IDIST_OK)
        status = idist__epoch_metric_gather(metric, sizes, counts, &all, &total);

    if (status == IDIST_OK) {
        if (idist_group_rank(opts->group) == 0)
            status = idist__epoch_metric_call(metric, all, total, &computed);
        status = idist__agree(status, opts);
    }

    if (status == IDIST_OK) status = idist_broadcast(&computed, 1, IDIST_F64, 0, opts);
    if (status == IDIST_OK && value) *value = computed;
    free(all);
    free(sizes);

    return status;
}

idist_status idist_epoch_metric(const void *rows, size_t n, size_t row_nbytes,
                                idist_epoch_metric_fn fn, void *arg, double *value,
                                const idist_opts *opts) {
    idist_opts own_opts;
    idist__epoch_metric metric = {"epoch_metric", rows, n, row_nbytes, fn, arg, &own_opts};
    idist_status status = idist__agree_enter("epoch_metric", opts, &own_opts);

    if (status != IDIST_OK) return status;
    if (!row_nbytes || !fn || (n && !rows) || n > SIZE_MAX / 2 / row_nbytes)
        status =
            idist__fail(IDIST_ERR_ARG, "epoch_metric: %zu rows of %zu bytes, or a pointer is NULL",
                        n, row_nbytes);

    return idist__epoch_metric_run(&metric, status, value);
}

// ---- train/scores.h ------------------------------------------------------------------------------

// train/scores.h: scores of a confusion matrix
//
// Each score of a class is a fraction of three counts of samples:
//
//                                     correct
//     score = ---------------------------------------------------------
//             a * labels  +  b * predictions  +  c * correct predictions
//
// Precision has the factors 0, 1, 0; recall 1, 0, 0; IoU 1, 1, -1. F-beta divides beta^2 and 1 by
// 1 + beta^2. Counts are added in double, so they do not overflow. Sums are exact up to 2^53.

// Samples of a class, or the factors of these counts in the denominator of a score.
typedef struct idist__scores_terms {
    double labels;    // samples with this label
    double predicted; // samples for which the class was predicted
    double correct;   // samples for which the class was predicted correctly
} idist__scores_terms;

// Returns the counts of a class.
static idist__scores_terms idist__scores_count(const uint64_t *cells, int classes, int which) {
    const uint64_t *row = cells + (size_t)which * (size_t)classes, *column = cells + which;
    idist__scores_terms counts;
    int k;

    counts.labels = counts.predicted = 0;
    counts.correct = (double)row[which];

    for (k = 0; k < classes; k++) {
        counts.labels += (double)row[k];
        counts.predicted += (double)column[(size_t)k * (size_t)classes];
    }

    return counts;
}

// Returns the score of a class, which is 0 if nothing is correct.
static double idist__scores_divide(const idist__scores_terms *counts,
                                   const idist__scores_terms *factors) {
    double whole = counts->labels * factors->labels + counts->predicted * factors->predicted +
                   counts->correct * factors->correct;

    if (counts->correct == 0) return 0;
    if (whole < counts->correct) whole = counts->correct; // a rounding error

    return counts->correct / whole;
}

// Computes the scores of all classes, whose denominators have the given factors, and averages them.
static idist_status idist__scores_compute(const char *name, const uint64_t *cells, int classes,
                                          const idist__scores_terms *factors, idist_average average,
                                          double *values) {
    idist__scores_terms all = {0, 0, 0};
    double sum = 0, weighted = 0;
    int k;

    if (!cells || !values || classes < 1)
        return idist__fail(IDIST_ERR_ARG, "%s: %d classes, or a pointer is NULL", name, classes);
    if ((int)average < IDIST_AVERAGE_MACRO || average > IDIST_AVERAGE_NONE)
        return idist__fail(IDIST_ERR_ARG, "%s: invalid average %d", name, (int)average);

    for (k = 0; k < classes; k++) {
        idist__scores_terms counts = idist__scores_count(cells, classes, k);
        double score = idist__scores_divide(&counts, factors);

        all.labels += counts.labels;
        all.predicted += counts.predicted;
        all.correct += counts.correct;
        sum += score;
        weighted += score * counts.labels;
        if (average == IDIST_AVERAGE_NONE) values[k] = score;
    }

    if (average == IDIST_AVERAGE_MACRO) *values = sum / classes;
    if (average == IDIST_AVERAGE_MICRO) *values = idist__scores_divide(&all, factors);
    if (average == IDIST_AVERAGE_WEIGHTED) *values = all.labels > 0 ? weighted / all.labels : 0;

    return IDIST_OK;
}

idist_status idist_precision(const uint64_t *cells, int classes, idist_average average,
                             double *values) {
    static const idist__scores_terms factors = {0, 1, 0};
    return idist__scores_compute("precision", cells, classes, &factors, average, values);
}

idist_status idist_recall(const uint64_t *cells, int classes, idist_average average,
                          double *values) {
    static const idist__scores_terms factors = {1, 0, 0};
    return idist__scores_compute("recall", cells, classes, &factors, average, values);
}

idist_status idist_f_beta(const uint64_t *cells, int classes, double beta, idist_average average,
                          double *values) {
    char text[IDIST__NUMBER_NBYTES];
    idist__scores_terms factors = {0, 0, 0};
    // The square of a large beta could be infinite, so for a beta above 1 this function uses the
    // square of 1 / beta.
    double inverse = beta > 1 ? 1 / beta : 1, square = beta > 1 ? 1 : beta * beta;

    if (!(beta >= 0))
        return idist__fail(IDIST_ERR_ARG, "f_beta: beta must be at least 0, got %s",
                           idist__number_print(text, beta, 6));

    factors.labels = square / (square + inverse * inverse);
    factors.predicted = inverse * inverse / (square + inverse * inverse);

    return idist__scores_compute("f_beta", cells, classes, &factors, average, values);
}

idist_status idist_iou(const uint64_t *cells, int classes, idist_average average, double *values) {
    static const idist__scores_terms factors = {1, 1, -1};
    return idist__scores_compute("iou", cells, classes, &factors, average, values);
}

// ---- train/roc_auc.h -----------------------------------------------------------------------------

// train/roc_auc.h: the area under the ROC curve
//
// The area is the fraction of pairs of a positive and a negative sample in which the positive one
// has the higher score (the statistic U of Mann and Whitney, divided by the number of pairs). A
// pair with equal scores counts one half. Rank 0 sorts the samples of all ranks by their scores:
//
//     score         0.1   0.3   0.3   0.8
//     label          0     0     1     1
//     half pairs                 3     4     of 4, for two negative samples
//
// A positive sample gets 2 half pairs for each negative sample with a lower score, and 1 half pair
// for each negative sample with the same score. Here the area is (3 + 4) / (2 * 4).
//
// The sum of the half pairs may exceed 64 bits. So rank 0 divides the sum by twice the number of
// negative samples while it adds, and keeps the quotient and the remainder, two integers. The
// quotient is at most the number of positive samples.

// A sample, as rank 0 gets it.
typedef struct idist__roc_auc_row {
    float score;
    int32_t label;
} idist__roc_auc_row;

// Compares the scores of two rows, for qsort.
static int idist__roc_auc_compare(const void *a, const void *b) {
    float x = ((const idist__roc_auc_row *)a)->score, y = ((const idist__roc_auc_row *)b)->score;
    return (x > y) - (x < y);
}

// Returns the area of sorted rows, or NaN if all labels are equal.
static double idist__roc_auc_area(const idist__roc_auc_row *rows, size_t n) {
    uint64_t positives = 0, negatives, below = 0, quotient = 0, remainder = 0, i;
    size_t first, end;

    for (first = 0; first < n; first++) positives += (uint64_t)rows[first].label;
    negatives = n - positives;
    if (!positives || !negatives) return (double)idist__small_float_from_bits(0x7fc00000u);

    for (first = 0; first < n; first = end) {
        uint64_t equal[2] = {0, 0}; // negative and positive samples of this score

        for (end = first; end < n && rows[end].score == rows[first].score; end++)
            equal[rows[end].label]++;

        for (i = 0; i < equal[1]; i++) {
            remainder += 2 * below + equal[0]; // adds at most the divisor
            if (remainder < 2 * negatives) continue;
            remainder -= 2 * negatives;
            quotient++;
        }

        below += equal[0];
    }

    return ((double)quotient + (double)remainder / (2 * (double)negatives)) / (double)positives;
}

// Computes the area. Called on rank 0 with the rows of all ranks, in memory that
// idist__epoch_metric_run has allocated.
static int idist__roc_auc_compute(const void *rows, size_t n, void *arg, double *value) {
    idist__roc_auc_row *sorted = (idist__roc_auc_row *)rows;

    (void)arg;
    qsort(sorted, n, sizeof *sorted, idist__roc_auc_compare);
    *value = idist__roc_auc_area(sorted, n);

    return 0;
}

// Checks the samples of this rank, and copies them to rows that the caller frees.
static idist_status idist__roc_auc_pack(const float *scores, const int *labels, size_t n,
                                        idist__roc_auc_row **rows) {
    size_t i;

    if ((n && (!scores || !labels)) || n > SIZE_MAX / 2 / sizeof **rows)
        return idist__fail(IDIST_ERR_ARG, "roc_auc: %zu samples, or a pointer is NULL", n);
    for (i = 0; i < n; i++) {
        if (labels[i] != 0 && labels[i] != 1)
            return idist__fail(IDIST_ERR_ARG, "roc_auc: label %d of sample %zu is neither 0 nor 1",
                               labels[i], i);
        if (scores[i] != scores[i])
            return idist__fail(IDIST_ERR_ARG, "roc_auc: the score of sample %zu is NaN", i);
    }

    *rows = (idist__roc_auc_row *)malloc(n * sizeof **rows + 1);
    if (!*rows) return idist__fail(IDIST_ERR_NO_MEMORY, "roc_auc: no memory for %zu samples", n);

    for (i = 0; i < n; i++) {
        (*rows)[i].score = scores[i];
        (*rows)[i].label = labels[i];
    }

    return IDIST_OK;
}

idist_status idist_roc_auc(const float *scores, const int *labels, size_t n, double *value,
                           const idist_opts *opts) {
    idist__roc_auc_row *rows = NULL;
    idist__epoch_metric metric;
    idist_opts own_opts;
    idist_status status = idist__agree_enter("roc_auc", opts, &own_opts);

    if (status != IDIST_OK) return status;

    status = idist__roc_auc_pack(scores, labels, n, &rows);
    metric.name = "roc_auc";
    metric.rows = rows;
    metric.n = n;
    metric.row_nbytes = sizeof *rows;
    metric.fn = idist__roc_auc_compute;
    metric.arg = NULL;
    metric.opts = &own_opts;
    status = idist__epoch_metric_run(&metric, status, value);
    free(rows);

    return status;
}

// ---- train/checkpoint/checkpoint.h ---------------------------------------------------------------

// train/checkpoint/checkpoint.h: the format of a checkpoint file, and its checksum

//------------------------------------------------------------------------------
// the checksum of a checkpoint
//
// The checksum has four lanes, each a chain of x = rotate((x ^ word) * odd). A processor computes
// the lanes side by side. Every step is invertible: two inputs that differ in one lane only, for
// example in a single word, never have the same checksum.
//------------------------------------------------------------------------------

typedef struct idist__checksum {
    uint64_t lane[4];
} idist__checksum;

#define IDIST__CHECKSUM_BLOCK sizeof(idist__checksum)
#define IDIST__CHECKSUM_ODD 0x9fb21c651e98df25u

static idist__checksum idist__checksum_begin(void) {
    idist__checksum sum;
    int i;

    for (i = 0; i < 4; i++) sum.lane[i] = IDIST__CHECKSUM_ODD * (uint64_t)(i + 1);
    return sum;
}

// Adds bytes to a checksum. A last block that is not full counts as if it were padded with zeros.
static void idist__checksum_add(idist__checksum *sum, const void *data, size_t nbytes) {
    const char *from = (const char *)data;

    while (nbytes) {
        uint64_t word[4] = {0, 0, 0, 0};
        size_t n = nbytes < sizeof word ? nbytes : sizeof word;
        int i;

        if (n == sizeof word) memcpy(word, from, sizeof word);
        else memcpy(word, from, n);

        for (i = 0; i < 4; i++) {
            uint64_t x = (sum->lane[i] ^ word[i]) * IDIST__CHECKSUM_ODD;
            sum->lane[i] = x << 29 | x >> 35;
        }

        from += n;
        nbytes -= n;
    }
}

static uint64_t idist__checksum_end(const idist__checksum *sum) {
    uint64_t hash = 0;
    int i;

    for (i = 0; i < 4; i++) {
        hash = (hash ^ sum->lane[i]) * IDIST__CHECKSUM_ODD;
        hash ^= hash >> 32;
    }

    return hash;
}

//------------------------------------------------------------------------------
// the format of a checkpoint file
//
// Numbers have 64 bits and the byte order of the machine. Each part except the last is padded with
// zeros to a multiple of 32 bytes:
//
//     header      "idistckp" | version | tensors n | step | score | bytes of info |
//                 bytes of the file | checksum of these seven words
//     table       for each of n tensors: count | dtype
//     info
//     tensor 0, tensor 1, ...
//     checksum of everything before it
//
// A program allocates its tensors before it loads a file, so it knows every size. No allocation and
// no offset depends on a value read from a file. Later versions of the format keep the first two
// words, and the checksum of the first seven words in the eighth word.
//------------------------------------------------------------------------------

#define IDIST__CHECKPOINT_VERSION 1
#define IDIST__CHECKPOINT_PIECE ((size_t)1 << 18) // bytes read at a time to verify a file

static const char idist__checkpoint_magic[8] = {'i', 'd', 'i', 's', 't', 'c', 'k', 'p'};

// The words of a header.
enum {
    IDIST__HEADER_MAGIC,
    IDIST__HEADER_VERSION,
    IDIST__HEADER_TENSORS, // number of tensors
    IDIST__HEADER_STEP,
    IDIST__HEADER_SCORE, // the bits of a double
    IDIST__HEADER_INFO,  // bytes of info
    IDIST__HEADER_FILE,  // bytes of the file
    IDIST__HEADER_CHECKSUM,
    IDIST__HEADER_WORDS
};

// The words of a table entry. There is one entry per tensor.
enum { IDIST__TABLE_COUNT, IDIST__TABLE_DTYPE, IDIST__TABLE_WORDS };

// The parts of a file. Tensor i is part IDIST__PART_TENSORS + i.
enum { IDIST__PART_HEADER, IDIST__PART_TABLE, IDIST__PART_INFO, IDIST__PART_TENSORS };

// A checkpoint in memory.
typedef struct idist__checkpoint {
    uint64_t header[IDIST__HEADER_WORDS];
    uint64_t *table;
    const void *info;
    const idist_tensor *tensors;
    int part_count; // not counting the checksum at the end
} idist__checkpoint;

static uint64_t idist__checkpoint_header_checksum(const uint64_t *header) {
    idist__checksum sum = idist__checksum_begin();

    idist__checksum_add(&sum, header, IDIST__HEADER_CHECKSUM * sizeof *header);
    return idist__checksum_end(&sum);
}

static size_t idist__checkpoint_table_nbytes(uint64_t tensors) {
    return (size_t)tensors * IDIST__TABLE_WORDS * sizeof(uint64_t);
}

// Returns the data of a part, and sets *nbytes to the size without padding.
static const void *idist__checkpoint_part(const idist__checkpoint *checkpoint, int part,
                                          size_t *nbytes) {
    const idist_tensor *tensor;

    switch (part) {
    case IDIST__PART_HEADER: *nbytes = sizeof checkpoint->header; return checkpoint->header;
    case IDIST__PART_TABLE:
        *nbytes = idist__checkpoint_table_nbytes(checkpoint->header[IDIST__HEADER_TENSORS]);
        return checkpoint->table;
    case IDIST__PART_INFO:
        *nbytes = (size_t)checkpoint->header[IDIST__HEADER_INFO];
        return checkpoint->info;
    default: break;
    }

    tensor = &checkpoint->tensors[part - IDIST__PART_TENSORS];
    *nbytes = tensor->count * idist_dtype_size(tensor->dtype);

    return tensor->data;
}

// Returns the size of a part with its padding.
static size_t idist__checkpoint_padded(size_t nbytes) {
    return (nbytes + IDIST__CHECKSUM_BLOCK - 1) / IDIST__CHECKSUM_BLOCK * IDIST__CHECKSUM_BLOCK;
}

// Computes the checksum at the end of the file from the parts in memory.
static uint64_t idist__checkpoint_sum(const idist__checkpoint *checkpoint) {
    idist__checksum sum = idist__checksum_begin();
    int part;

    for (part = 0; part < checkpoint->part_count; part++) {
        size_t nbytes;
        const void *data = idist__checkpoint_part(checkpoint, part, &nbytes);

        idist__checksum_add(&sum, data, nbytes);
    }

    return idist__checksum_end(&sum);
}

static idist_status idist__checkpoint_check_tensor(const char *name, int i,
                                                   const idist_tensor *tensor, uint64_t limit) {
    size_t size = idist_dtype_size(tensor->dtype);

    if (!size)
        return idist__fail(IDIST_ERR_ARG, "%s: tensor %d: invalid dtype %d", name, i,
                           (int)tensor->dtype);
    if (tensor->count && !tensor->data)
        return idist__fail(IDIST_ERR_ARG, "%s: tensor %d is NULL", name, i);
    if (tensor->count > limit / size)
        return idist__fail(IDIST_ERR_ARG, "%s: tensor %d has more bytes than a file can have", name,
                           i);

    return IDIST_OK;
}

// Checks the arguments of a call and fills in the checkpoint. The caller frees checkpoint->table,
// even after a failure.
static idist_status idist__checkpoint_init(const char *name, idist__checkpoint *checkpoint,
                                           const idist_tensor *tensors, int n, const void *info,
                                           size_t info_nbytes) {
    const uint64_t limit = (uint64_t)(SIZE_MAX < INT64_MAX ? SIZE_MAX : INT64_MAX) / 4;
    uint64_t total = info_nbytes;
    int i;

    memset(checkpoint, 0, sizeof *checkpoint);
    if (n < 0 || (n && !tensors))
        return idist__fail(IDIST_ERR_ARG, "%s: %d tensors, or tensors is NULL", name, n);
    if (info_nbytes && !info)
        return idist__fail(IDIST_ERR_ARG, "%s: %zu bytes of info, but info is NULL", name,
                           info_nbytes);
    checkpoint->table = (uint64_t *)malloc(idist__checkpoint_table_nbytes((uint64_t)n + 1));
    if (!checkpoint->table)
        return idist__fail(IDIST_ERR_NO_MEMORY, "%s: no memory for a table of %d tensors", name, n);

    for (i = 0; i < n; i++) {
        uint64_t *entry = checkpoint->table + IDIST__TABLE_WORDS * i;
        idist_status status = idist__checkpoint_check_tensor(name, i, &tensors[i], limit);

        if (status != IDIST_OK) return status;
        if (total > limit) break;
        entry[IDIST__TABLE_COUNT] = tensors[i].count;
        entry[IDIST__TABLE_DTYPE] = (uint64_t)tensors[i].dtype;
        total += idist__checkpoint_padded(tensors[i].count * idist_dtype_size(tensors[i].dtype));
    }

    if (total > limit)
        return idist__fail(IDIST_ERR_ARG, "%s: more bytes than a file can have", name);
    total += idist__checkpoint_padded(info_nbytes) - info_nbytes;
    total += sizeof checkpoint->header +
             idist__checkpoint_padded(idist__checkpoint_table_nbytes((uint64_t)n));
    total += sizeof(uint64_t); // the checksum

    checkpoint->info = info;
    checkpoint->tensors = tensors;
    checkpoint->part_count = IDIST__PART_TENSORS + n;
    memcpy(&checkpoint->header[IDIST__HEADER_MAGIC], idist__checkpoint_magic,
           sizeof idist__checkpoint_magic);
    checkpoint->header[IDIST__HEADER_VERSION] = IDIST__CHECKPOINT_VERSION;
    checkpoint->header[IDIST__HEADER_TENSORS] = (uint64_t)n;
    checkpoint->header[IDIST__HEADER_INFO] = info_nbytes;
    checkpoint->header[IDIST__HEADER_FILE] = total;

    return IDIST_OK;
}

// Fails with the text of an errno. `file` is a name within the folder, or "" for the folder itself.
static idist_status idist__checkpoint_fail(const char *name, const char *folder, const char *file,
                                           int error) {
    char what[700];

    snprintf(what, sizeof what, "%s: %.400s%s%.250s", name, folder, file[0] ? "/" : "", file);
    return idist__fail_errno(what, idist__os_file_no_space(error) ? ENOSPC : error);
}

enum { IDIST__CHECKPOINT_ENDS = -1 }; // returned instead of an errno; an errno is never negative

// Reads nbytes from position `at`. Returns 0, an errno, or IDIST__CHECKPOINT_ENDS if the file ends
// too early.
static int idist__checkpoint_read(idist__os_file file, uint64_t at, void *data, size_t nbytes) {
    if (idist__os_file_read_at(file, data, nbytes, at)) return 0;
    return errno ? errno : IDIST__CHECKPOINT_ENDS;
}

// ---- train/checkpoint/flaw.h ---------------------------------------------------------------------

// train/checkpoint/flaw.h: the flaws of checkpoint files, and the files verified so far
//
// Functions: idist__flaw_*, idist__seen_*, idist__sync_*.

//------------------------------------------------------------------------------
// the flaws of a checkpoint file
//------------------------------------------------------------------------------

// The flaws. Each row contains a name, the status that idist_checkpoint_load returns, and the
// wording for error texts.
#define IDIST__FLAW_MAP(X)                                                             \
    X(NONE, OK, "is valid")                                                            \
    X(UNREADABLE, ERR_SYSTEM, "cannot be read")                                        \
    X(IRREGULAR, ERR_ARG, "is not a regular file")                                     \
    X(EMPTY, ERR_CORRUPT, "is empty")                                                  \
    X(FOREIGN, ERR_CORRUPT, "is not a checkpoint, or its first bytes are damaged")     \
    X(NEWER, ERR_UNSUPPORTED, "was written by a newer version of idist")               \
    X(BYTE_ORDER, ERR_UNSUPPORTED, "was written by a machine with another byte order") \
    X(HEADER, ERR_CORRUPT, "is damaged: the checksum of its header is wrong")          \
    X(SHORT, ERR_CORRUPT, "is truncated")                                              \
    X(LONG, ERR_CORRUPT, "is damaged: it is longer than its header says")              \
    X(CONTENTS, ERR_CORRUPT, "is damaged: its checksum is wrong")                      \
    X(PADDING, ERR_CORRUPT, "is damaged: its padding is not zero")

typedef enum idist__flaw {
#define IDIST__X(name, status, text) IDIST__FLAW_##name,
    IDIST__FLAW_MAP(IDIST__X)
#undef IDIST__X
} idist__flaw;

static const char *idist__flaw_text(idist__flaw flaw) {
    static const char *const texts[] = {
#define IDIST__X(name, status, text) text,
        IDIST__FLAW_MAP(IDIST__X)
#undef IDIST__X
    };

    return texts[flaw];
}

static idist_status idist__flaw_status(idist__flaw flaw) {
    static const idist_status statuses[] = {
#define IDIST__X(name, status, text) IDIST_##status,
        IDIST__FLAW_MAP(IDIST__X)
#undef IDIST__X
    };

    return statuses[flaw];
}

// Returns the flaw of a header whose magic is right. `nbytes` is the size of the file.
static idist__flaw idist__flaw_of_header(const uint64_t *header, uint64_t nbytes) {
    uint64_t version = header[IDIST__HEADER_VERSION], double_bits = header[IDIST__HEADER_SCORE];
    bool sound = header[IDIST__HEADER_CHECKSUM] == idist__checkpoint_header_checksum(header);
    double score;

    memcpy(&score, &double_bits, sizeof score);
    if (version && !(version << 8)) return IDIST__FLAW_BYTE_ORDER;
    if (!sound || version < IDIST__CHECKPOINT_VERSION) return IDIST__FLAW_HEADER;
    if (version > IDIST__CHECKPOINT_VERSION) return IDIST__FLAW_NEWER;
    if (score != score) return IDIST__FLAW_HEADER;
    if (header[IDIST__HEADER_FILE] > nbytes) return IDIST__FLAW_SHORT;
    if (header[IDIST__HEADER_FILE] < nbytes) return IDIST__FLAW_LONG;

    return IDIST__FLAW_NONE;
}

// Reads and checks the header of a file, which need not be a checkpoint. If the result is
// IDIST__FLAW_UNREADABLE, *error is the errno.
static idist__flaw idist__flaw_read_header(idist__os_file file, uint64_t *header, int *error) {
    int64_t nbytes = idist__os_file_size(file);
    size_t magic_nbytes = sizeof idist__checkpoint_magic, header_nbytes, some;

    header_nbytes = IDIST__HEADER_WORDS * sizeof *header;
    memset(header, 0, header_nbytes);
    *error = nbytes < 0 ? errno : 0;
    if (*error) return IDIST__FLAW_UNREADABLE;
    if (nbytes < 0) return IDIST__FLAW_IRREGULAR;
    if (!nbytes) return IDIST__FLAW_EMPTY;

    some = (uint64_t)nbytes < header_nbytes ? (size_t)nbytes : header_nbytes;
    *error = idist__checkpoint_read(file, 0, header, some);
    if (*error == IDIST__CHECKPOINT_ENDS) *error = EIO; // the file was longer a moment ago
    if (*error) return IDIST__FLAW_UNREADABLE;

    if (memcmp(header, idist__checkpoint_magic, some < magic_nbytes ? some : magic_nbytes) != 0)
        return IDIST__FLAW_FOREIGN;
    if (some < header_nbytes) return IDIST__FLAW_SHORT;

    return idist__flaw_of_header(header, (uint64_t)nbytes);
}

// Reads a whole file whose header is valid. Sets *sum to the last word of the file, which must be
// the checksum over everything before it. If the result is IDIST__FLAW_UNREADABLE, *error is the
// errno.
static idist__flaw idist__flaw_read_all(idist__os_file file, const uint64_t *header, uint64_t *sum,
                                        int *error) {
    char *piece = (char *)malloc(IDIST__CHECKPOINT_PIECE);
    uint64_t at = 0, end = header[IDIST__HEADER_FILE] - sizeof *sum;
    idist__checksum computed = idist__checksum_begin();

    *error = piece ? 0 : ENOMEM;

    while (at < end && !*error) {
        uint64_t rest = end - at;
        size_t n = rest < IDIST__CHECKPOINT_PIECE ? (size_t)rest : IDIST__CHECKPOINT_PIECE;

        *error = idist__checkpoint_read(file, at, piece, n);
        if (!*error) idist__checksum_add(&computed, piece, n);
        at += n;
    }

    free(piece);
    if (!*error) *error = idist__checkpoint_read(file, end, sum, sizeof *sum);
    if (*error == IDIST__CHECKPOINT_ENDS) *error = EIO; // the file was longer a moment ago
    if (*error) return IDIST__FLAW_UNREADABLE;

    return *sum == idist__checksum_end(&computed) ? IDIST__FLAW_NONE : IDIST__FLAW_CONTENTS;
}

//------------------------------------------------------------------------------
// files that this process has verified or written
//
// idist_checkpoint_save must know which files are valid before it removes other files in favor of
// them. It reads each file for this purpose only once, unless the file changes.
//------------------------------------------------------------------------------

enum { IDIST__SEEN_FILES = 1024 }; // a new entry replaces the oldest one

typedef struct idist__seen_file {
    idist__os_file_version version;
    idist__flaw flaw;
} idist__seen_file;

static idist__os_mutex idist__seen_lock = IDIST__OS_MUTEX_INIT; // protects the variables below
static idist__seen_file idist__seen_files[IDIST__SEEN_FILES];
static unsigned idist__seen_count; // number of files added so far

// Returns true if this version of a file was seen before, and sets *flaw to its flaw.
static bool idist__seen_find(const idist__os_file_version *version, idist__flaw *flaw) {
    bool found = false;
    unsigned i;

    idist__os_mutex_lock(&idist__seen_lock);

    for (i = 0; i < IDIST__SEEN_FILES && i < idist__seen_count && !found; i++) {
        const idist__seen_file *file = &idist__seen_files[i];

        found = memcmp(&file->version, version, sizeof *version) == 0;
        if (found) *flaw = file->flaw;
    }

    idist__os_mutex_unlock(&idist__seen_lock);

    return found;
}

static void idist__seen_add(const idist__os_file_version *version, idist__flaw flaw) {
    idist__seen_file *file;

    idist__os_mutex_lock(&idist__seen_lock);
    file = &idist__seen_files[idist__seen_count++ % IDIST__SEEN_FILES];
    file->version = *version;
    file->flaw = flaw;
    idist__os_mutex_unlock(&idist__seen_lock);
}

//------------------------------------------------------------------------------
// file systems that do not sync
//
// A sync can fail because the file system does not support it. In that case only the protection
// against a crash is missing, and the training need not stop. A sync can also fail because data did
// not reach the disk (EIO, ENOSPC, EDQUOT), which is a real error.
//------------------------------------------------------------------------------

static idist__os_mutex idist__sync_lock = IDIST__OS_MUTEX_INIT; // protects the variable below
static bool idist__sync_has_warned;

// Decides whether the error of a sync matters. If the file system refuses to sync, returns 0, and
// warns the first time in this process. Returns any other error unchanged. The caller holds no
// lock, because a logger may call idist.
static int idist__sync_judge(int error, const char *name, const char *folder,
                             const idist__log *log) {
    bool warns;

    if (!error || !idist__os_file_refuses_sync(error)) return error;

    idist__os_mutex_lock(&idist__sync_lock);
    warns = log && !idist__sync_has_warned;
    if (warns) idist__sync_has_warned = true;
    idist__os_mutex_unlock(&idist__sync_lock);

    if (warns)
        idist__log_print(
            log, IDIST_LOG_WARN,
            "%s: %s: the file system does not sync (%s): the file is complete, but may be lost if "
            "this machine crashes",
            name, folder, strerror(error));

    return 0;
}

// ---- train/checkpoint/load.h ---------------------------------------------------------------------

// train/checkpoint/load.h: reads a checkpoint on rank 0 and copies it to all ranks
//
//     idist__load_open      rank 0: opens the file, verifies the checksum of the whole file, and
//                           compares header and table with the tensors; writes nothing
//     idist__load_compare   all ranks: get the header from rank 0, and check that every rank passed
//                           the same tensors
//     idist__load_copy      all ranks: rank 0 reads each part into its memory and broadcasts it; at
//                           the end each rank verifies the checksum over its memory

static idist_status idist__load_fail(const char *path, int error) {
    if (error == IDIST__CHECKPOINT_ENDS) error = EIO; // the file was longer when it was opened
    return idist__checkpoint_fail("checkpoint_load", path, "", error);
}

// Checks that entry i of a file's table describes tensor i.
static idist_status idist__load_match_entry(const idist__checkpoint *checkpoint, int i,
                                            idist__os_file file, const char *path) {
    const idist_tensor *tensor = &checkpoint->tensors[i];
    uint64_t entry[IDIST__TABLE_WORDS], dtype;
    uint64_t at = sizeof checkpoint->header + (uint64_t)i * sizeof entry;
    int error = idist__checkpoint_read(file, at, entry, sizeof entry);

    if (error) return idist__load_fail(path, error);
    if (entry[IDIST__TABLE_COUNT] == tensor->count &&
        entry[IDIST__TABLE_DTYPE] == (uint64_t)tensor->dtype)
        return IDIST_OK;

    dtype = entry[IDIST__TABLE_DTYPE];
    if (dtype > IDIST_DTYPE_COUNT) dtype = IDIST_DTYPE_COUNT; // printed as an invalid dtype

    return idist__fail(
        IDIST_ERR_ARG,
        "checkpoint_load: %s: tensor %d is %s x %llu in the file, but %s x %zu in this call", path,
        i, idist_dtype_name((idist_dtype)dtype), (unsigned long long)entry[IDIST__TABLE_COUNT],
        idist_dtype_name(tensor->dtype), tensor->count);
}

// Checks that a valid file has the tensors of this call. Copies its header, which contains the step
// and the score.
static idist_status idist__load_match(idist__checkpoint *checkpoint, const uint64_t *header,
                                      idist__os_file file, const char *path) {
    int i, n = checkpoint->part_count - IDIST__PART_TENSORS;

    if (header[IDIST__HEADER_TENSORS] != (uint64_t)n)
        return idist__fail(IDIST_ERR_ARG, "checkpoint_load: %s has %llu tensors, expected %d", path,
                           (unsigned long long)header[IDIST__HEADER_TENSORS], n);
    if (header[IDIST__HEADER_INFO] != checkpoint->header[IDIST__HEADER_INFO])
        return idist__fail(IDIST_ERR_ARG,
                           "checkpoint_load: %s has %llu bytes of info, expected %llu", path,
                           (unsigned long long)header[IDIST__HEADER_INFO],
                           (unsigned long long)checkpoint->header[IDIST__HEADER_INFO]);

    for (i = 0; i < n; i++) {
        idist_status status = idist__load_match_entry(checkpoint, i, file, path);
        if (status != IDIST_OK) return status;
    }

    if (header[IDIST__HEADER_FILE] != checkpoint->header[IDIST__HEADER_FILE])
        return idist__fail(IDIST_ERR_ARG,
                           "checkpoint_load: the size of %s does not match its tensors", path);
    memcpy(checkpoint->header, header, sizeof checkpoint->header);

    return IDIST_OK;
}

static idist_status idist__load_fail_flaw(const char *path, idist__flaw flaw) {
    bool is_corrupt = idist__flaw_status(flaw) == IDIST_ERR_CORRUPT;

    return idist__fail(idist__flaw_status(flaw), "checkpoint_load: %s %s%s", path,
                       idist__flaw_text(flaw),
                       is_corrupt ? "; idist_checkpoint_find finds the valid files" : "");
}

// Checks that the padding is zero. Otherwise the checksum over the file could be right although the
// checksum over a rank's memory is wrong.
static idist_status idist__load_check_padding(const idist__checkpoint *checkpoint,
                                              idist__os_file file, const char *path) {
    char padding[IDIST__CHECKSUM_BLOCK];
    uint64_t at = 0;
    int part, error;

    for (part = 0; part < checkpoint->part_count; part++) {
        size_t nbytes, padded, i;

        idist__checkpoint_part(checkpoint, part, &nbytes);
        padded = idist__checkpoint_padded(nbytes);
        error = idist__checkpoint_read(file, at + nbytes, padding, padded - nbytes);
        if (error) return idist__load_fail(path, error);

        for (i = 0; i < padded - nbytes; i++)
            if (padding[i]) return idist__load_fail_flaw(path, IDIST__FLAW_PADDING);
        at += padded;
    }

    return IDIST_OK;
}

// Opens the file and checks all of it. The caller closes *file, even after a failure. Called on
// rank 0.
static idist_status idist__load_open(idist__checkpoint *checkpoint, const char *path,
                                     idist__os_file *file, uint64_t *sum) {
    uint64_t header[IDIST__HEADER_WORDS];
    int error;
    idist__flaw flaw;
    idist_status status;

    *file = IDIST__OS_NO_FILE;
    if (!path) return idist__fail(IDIST_ERR_ARG, "checkpoint_load: path is NULL");
    error = idist__os_folder_read_file(IDIST__OS_HERE, path, file);
    if (error == ENOENT)
        return idist__fail(IDIST_ERR_NOT_FOUND, "checkpoint_load: %s does not exist", path);
    if (error) return idist__load_fail(path, error);

    flaw = idist__flaw_read_header(*file, header, &error);
    if (!flaw) flaw = idist__flaw_read_all(*file, header, sum, &error);
    if (flaw == IDIST__FLAW_UNREADABLE) return idist__load_fail(path, error);
    if (flaw) return idist__load_fail_flaw(path, flaw);

    status = idist__load_match(checkpoint, header, *file, path);
    if (status != IDIST_OK) return status;

    return idist__load_check_padding(checkpoint, *file, path);
}

// Gets the header from rank 0, and checks that this rank has the same tensors as rank 0. Broadcasts
// with different counts would break the group. Collective.
static idist_status idist__load_compare(idist__checkpoint *checkpoint, uint64_t *sum,
                                        const idist_opts *opts) {
    enum { IDIST__ROOT_SUM = IDIST__HEADER_WORDS, IDIST__ROOT_TABLE_SUM, IDIST__ROOT_WORDS };
    uint64_t root[IDIST__ROOT_WORDS], own_table_sum;
    idist__checksum table_sum = idist__checksum_begin();
    idist_status status;

    idist__checksum_add(&table_sum, checkpoint->table,
                        idist__checkpoint_table_nbytes(checkpoint->header[IDIST__HEADER_TENSORS]));
    own_table_sum = idist__checksum_end(&table_sum);
    memcpy(root, checkpoint->header, sizeof checkpoint->header);
    root[IDIST__ROOT_SUM] = *sum;
    root[IDIST__ROOT_TABLE_SUM] = own_table_sum;
    status = idist_broadcast(root, IDIST__ROOT_WORDS, IDIST_U64, 0, opts);
    if (status != IDIST_OK) return status;

    if (root[IDIST__HEADER_TENSORS] != checkpoint->header[IDIST__HEADER_TENSORS] ||
        root[IDIST__HEADER_INFO] != checkpoint->header[IDIST__HEADER_INFO] ||
        root[IDIST__ROOT_TABLE_SUM] != own_table_sum)
        status = idist__fail(IDIST_ERR_ARG,
                             "checkpoint_load: tensors or info differ from those on rank 0");
    memcpy(checkpoint->header, root, sizeof checkpoint->header);
    *sum = root[IDIST__ROOT_SUM];

    return idist__agree(status, opts);
}

// Reads each part on rank 0 and broadcasts it to all ranks. If rank 0 cannot read a part, it still
// makes the remaining broadcasts, so that the other ranks do not hang. Collective.
static idist_status idist__load_copy(idist__checkpoint *checkpoint, void *info, idist__os_file file,
                                     const char *path, uint64_t sum, const idist_opts *opts) {
    uint64_t at = idist__checkpoint_padded(sizeof checkpoint->header);
    size_t nbytes;
    int part, error = 0;
    idist_status status = IDIST_OK;

    idist__checkpoint_part(checkpoint, IDIST__PART_TABLE, &nbytes);
    at += idist__checkpoint_padded(nbytes);

    for (part = IDIST__PART_INFO; part < checkpoint->part_count; part++) {
        void *data =
            part == IDIST__PART_INFO ? info : checkpoint->tensors[part - IDIST__PART_TENSORS].data;

        idist__checkpoint_part(checkpoint, part, &nbytes);
        if (file != IDIST__OS_NO_FILE && !error)
            error = idist__checkpoint_read(file, at, data, nbytes);
        at += idist__checkpoint_padded(nbytes);
        if (nbytes) status = idist_broadcast(data, nbytes, IDIST_U8, 0, opts);
        if (status != IDIST_OK) return status;
    }

    if (error) status = idist__load_fail(path, error);
    else if (idist__checkpoint_sum(checkpoint) != sum)
        status = idist__fail(IDIST_ERR_SYSTEM,
                             "checkpoint_load: the data received differ from the data in the file");

    return idist__agree(status, opts);
}

idist_status idist_checkpoint_load(const char *path, const idist_tensor *tensors, int n, void *info,
                                   size_t info_nbytes, const idist_opts *opts) {
    idist__checkpoint checkpoint;
    idist_opts own_opts;
    uint64_t sum = 0;
    idist__os_file file = IDIST__OS_NO_FILE;
    idist_status status = idist__agree_enter("checkpoint_load", opts, &own_opts);

    if (status != IDIST_OK) return status;
    status = idist__checkpoint_init("checkpoint_load", &checkpoint, tensors, n, info, info_nbytes);
    if (status == IDIST_OK && idist_group_rank(own_opts.group) == 0)
        status = idist__load_open(&checkpoint, path, &file, &sum);
    status = idist__agree(status, &own_opts);

    if (status == IDIST_OK) status = idist__load_compare(&checkpoint, &sum, &own_opts);
    if (status == IDIST_OK)
        status = idist__load_copy(&checkpoint, info, file, path, sum, &own_opts);
    idist__os_file_close(&file);
    free(checkpoint.table);

    return status;
}

// ---- train/checkpoint/checkpoint_folder.h --------------------------------------------------------

// train/checkpoint/checkpoint_folder.h: the checkpoints in a folder, and the best of them
//
// Functions: idist__folder_*.

// A file with the name of a checkpoint.
typedef struct idist__folder_entry {
    uint64_t step; // step and score are from the header
    double score;
    idist__flaw flaw; // found in the header, or in the whole file if `verified`
    int error;        // for IDIST__FLAW_UNREADABLE: the errno
    bool verified;    // the whole file was read
    idist__os_file_version version;
    char name[256];
} idist__folder_entry;

// The files in a folder that have names of checkpoints. The caller frees `entries`.
typedef struct idist__folder_list {
    idist__folder_entry *entries;
    int count, capacity;
} idist__folder_list;

// Returns true if a name has the form PREFIX_STEP_score=SCORE.idist.
static bool idist__folder_is_checkpoint(const char *name, const char *prefix) {
    size_t prefix_length = strlen(prefix), length = strlen(name);
    const char *step = name + prefix_length + 1;

    if (strncmp(name, prefix, prefix_length) != 0 || name[prefix_length] != '_') return false;
    if (*step < '0' || *step > '9') return false;
    while (*step >= '0' && *step <= '9') step++;

    return strncmp(step, "_score=", 7) == 0 && length > 6 &&
           strcmp(name + length - 6, ".idist") == 0;
}

// Returns true if a name has the form .NAME.tmp, where NAME is the name of a checkpoint. A crash
// may leave such a file behind.
static bool idist__folder_is_temporary(const char *name, const char *prefix) {
    char inner[256];
    size_t length = strlen(name);

    if (name[0] != '.' || length < 6 || length - 5 >= sizeof inner) return false;
    if (strcmp(name + length - 4, ".tmp") != 0) return false;
    memcpy(inner, name + 1, length - 5);
    inner[length - 5] = 0;

    return idist__folder_is_checkpoint(inner, prefix);
}

static bool idist__folder_is_better(const idist__folder_entry *a, const idist__folder_entry *b,
                                    bool low_is_best) {
    if (a->score != b->score) return low_is_best ? a->score < b->score : a->score > b->score;
    return a->step > b->step;
}

static bool idist__folder_is_later(const idist__folder_entry *a, const idist__folder_entry *b,
                                   bool low_is_best) {
    if (a->step != b->step) return a->step > b->step;
    if (a->version.modified_ns != b->version.modified_ns)
        return a->version.modified_ns > b->version.modified_ns; // the newer file replaces the other
    return idist__folder_is_better(a, b, low_is_best);
}

// Reads the header of a file, or the whole file if `all` is set. Returns false if the file no
// longer exists, or if the name is a dangling link.
static bool idist__folder_read_entry(idist__os_folder folder, idist__folder_entry *entry,
                                     bool all) {
    uint64_t header[IDIST__HEADER_WORDS], sum;
    idist__os_file file;
    int error = idist__os_folder_read_file(folder, entry->name, &file);

    memset(&entry->version, 0, sizeof entry->version);
    entry->flaw = IDIST__FLAW_UNREADABLE;
    entry->error = error;
    entry->verified = all;
    if (error == ENOENT) return false;
    if (error == ELOOP || error == ENXIO) entry->flaw = IDIST__FLAW_IRREGULAR; // link loop, socket
    if (error) return true;

    idist__os_file_version_of(file, &entry->version);
    entry->flaw = idist__flaw_read_header(file, header, &entry->error);
    entry->step = header[IDIST__HEADER_STEP];
    memcpy(&entry->score, &header[IDIST__HEADER_SCORE], sizeof entry->score);
    if (all && !entry->flaw) entry->flaw = idist__flaw_read_all(file, header, &sum, &entry->error);
    idist__os_file_close(&file);

    return true;
}

// Checks that a file with a valid header is valid as a whole. Reads all of the file unless this
// version of it was seen before.
static void idist__folder_verify(idist__os_folder folder, idist__folder_entry *entry) {
    if (entry->flaw || entry->verified) return;

    entry->verified = idist__seen_find(&entry->version, &entry->flaw);
    if (entry->verified) return;

    if (!idist__folder_read_entry(folder, entry, true)) entry->flaw = IDIST__FLAW_UNREADABLE;
    if (entry->flaw != IDIST__FLAW_UNREADABLE) idist__seen_add(&entry->version, entry->flaw);
}

// Adds a file to the list. Returns false if there is no memory.
static bool idist__folder_add(idist__folder_list *list, idist__os_folder folder, const char *name) {
    idist__folder_entry *entry;

    if (list->count == list->capacity) {
        size_t nbytes = sizeof *list->entries * ((size_t)list->capacity + 64);
        void *entries = realloc(list->entries, nbytes);

        if (!entries) return false;
        list->entries = (idist__folder_entry *)entries;
        list->capacity += 64;
    }

    entry = &list->entries[list->count];
    idist__text_copy(entry->name, sizeof entry->name, name);
    if (idist__folder_read_entry(folder, entry, false)) list->count++;

    return true;
}

// Lists the checkpoints of an open folder. If `tidy` is set, also removes temporary files left by
// crashes. Fails if the folder cannot be read, because a folder that seems empty would make any
// score the best.
static idist_status idist__folder_list_all(const char *path, const char *prefix,
                                           idist__os_folder folder, bool tidy,
                                           idist__folder_list *list) {
    idist__os_folder_walk walk;
    const char *name;
    bool has_memory = true;
    int error = idist__os_folder_begin(&walk, folder);

    memset(list, 0, sizeof *list);
    if (error) return idist__checkpoint_fail("checkpoint", path, "", error);

    while (has_memory) {
        name = idist__os_folder_next(&walk, &error);
        if (!name) break;
        if (tidy && idist__folder_is_temporary(name, prefix)) idist__os_folder_remove(folder, name);
        if (idist__folder_is_checkpoint(name, prefix))
            has_memory = idist__folder_add(list, folder, name);
    }

    idist__os_folder_end(&walk);
    if (!has_memory)
        return idist__fail(IDIST_ERR_NO_MEMORY, "checkpoint: no memory to list the files of %s",
                           path);
    if (error) return idist__checkpoint_fail("checkpoint", path, "", error);

    return IDIST_OK;
}

// Returns true if a file must be kept: fewer than `keep` valid files of other steps are better, or
// fewer than `keep_latest` are later.
static bool idist__folder_keeps(const idist_checkpoint_desc *desc, const idist__folder_list *list,
                                const idist__folder_entry *entry) {
    int i, keep = desc->keep ? desc->keep : 1, better_count = 0, later_count = 0;

    if (keep < 0 || desc->keep_latest < 0) return true;

    for (i = 0; i < list->count; i++) {
        const idist__folder_entry *other = &list->entries[i];

        if (other->flaw || other->step == entry->step) continue;
        better_count += idist__folder_is_better(other, entry, desc->low_is_best);
        later_count += idist__folder_is_later(other, entry, desc->low_is_best);
    }

    return better_count < keep || later_count < desc->keep_latest;
}

// Opens the folder of a desc. The caller closes *folder, even after a failure.
static idist_status idist__folder_open(const char *name, const idist_checkpoint_desc *desc,
                                       bool create, const char **prefix, idist__os_folder *folder) {
    int error = 0;

    *folder = IDIST__OS_NO_FOLDER;
    if (!desc || !desc->folder || !desc->folder[0])
        return idist__fail(IDIST_ERR_ARG, "%s: desc or its folder is NULL or empty", name);
    *prefix = desc->prefix ? desc->prefix : "checkpoint";
    if (!(*prefix)[0] || strchr(*prefix, '/') || strlen(*prefix) > 180)
        return idist__fail(IDIST_ERR_ARG, "%s: \"%.200s\" cannot be the prefix of a file name",
                           name, *prefix);

    if (create) error = idist__os_folder_make(desc->folder);
    if (!error) error = idist__os_folder_open(desc->folder, folder);
    if (!error) return IDIST_OK;
    if (!create && error == ENOENT)
        return idist__fail(IDIST_ERR_NOT_FOUND, "%s: there is no folder %s", name, desc->folder);

    return idist__checkpoint_fail(name, desc->folder, "", error);
}

// Returns the best valid file, or the latest one if `latest` is set. A crash may leave several
// files of a step; the newest of them is the latest. Returns NULL if no file is valid.
static idist__folder_entry *idist__folder_pick(const idist__folder_list *list, bool low_is_best,
                                               bool latest) {
    idist__folder_entry *picked = NULL;
    int i;

    for (i = 0; i < list->count; i++) {
        idist__folder_entry *entry = &list->entries[i];

        if (entry->flaw) continue;
        if (!picked || (latest ? idist__folder_is_later(entry, picked, low_is_best)
                               : idist__folder_is_better(entry, picked, low_is_best)))
            picked = entry;
    }

    return picked;
}

// Fails if a file cannot be read. That file may be the right one, and a training run must not start
// over because the file was skipped.
static idist_status idist__folder_check_readable(const idist_checkpoint_desc *desc,
                                                 const idist__folder_list *list) {
    int i;

    for (i = 0; i < list->count; i++) {
        const idist__folder_entry *entry = &list->entries[i];

        if (entry->flaw == IDIST__FLAW_UNREADABLE)
            return idist__checkpoint_fail("checkpoint_find", desc->folder, entry->name,
                                          entry->error);
    }

    return IDIST_OK;
}

// Warns about the files that are not valid.
static void idist__folder_warn(const idist_checkpoint_desc *desc, const idist__folder_list *list,
                               const idist__log *log) {
    int i;

    for (i = 0; i < list->count; i++) {
        const idist__folder_entry *entry = &list->entries[i];

        if (entry->flaw)
            idist__log_print(log, IDIST_LOG_WARN, "checkpoint_find: %s/%s %s; it is skipped",
                             desc->folder, entry->name, idist__flaw_text(entry->flaw));
    }
}

// Fails because no file is valid.
static idist_status idist__folder_fail(const idist_checkpoint_desc *desc, const char *prefix,
                                       const idist__folder_list *list) {
    char names[600] = "";
    int i;

    if (!list->count)
        return idist__fail(IDIST_ERR_NOT_FOUND, "checkpoint_find: there is no %s_*.idist in %s",
                           prefix, desc->folder);

    for (i = 0; i < list->count && strlen(names) < 250; i++)
        idist__text_append(names, sizeof names, "%s%s %s", i ? "; " : "", list->entries[i].name,
                           idist__flaw_text(list->entries[i].flaw));
    if (i < list->count) idist__text_append(names, sizeof names, "; and %d more", list->count - i);

    return idist__fail(IDIST_ERR_CORRUPT,
                       "checkpoint_find: there is no valid %s_*.idist in %s: %s. Restore one, or "
                       "move them away to begin a new training",
                       prefix, desc->folder, names);
}

// Finds the best or latest file and writes its path. Called on rank 0.
static idist_status idist__folder_find(const idist_checkpoint_desc *desc, bool latest, char *path,
                                       size_t capacity, const idist__log *log) {
    idist__folder_list list = {NULL, 0, 0};
    idist__folder_entry *picked = NULL;
    const char *prefix = NULL;
    idist__os_folder folder;
    idist_status status = idist__folder_open("checkpoint_find", desc, false, &prefix, &folder);

    if (status == IDIST_OK)
        status = idist__folder_list_all(desc->folder, prefix, folder, false, &list);

    do {
        if (status == IDIST_OK) picked = idist__folder_pick(&list, desc->low_is_best, latest);
        if (picked) idist__folder_verify(folder, picked);
    } while (picked && picked->flaw);

    if (status == IDIST_OK) idist__folder_warn(desc, &list, log);
    if (status == IDIST_OK) status = idist__folder_check_readable(desc, &list);
    if (status == IDIST_OK && !picked) status = idist__folder_fail(desc, prefix, &list);
    if (status == IDIST_OK &&
        (size_t)snprintf(path, capacity, "%s/%s", desc->folder, picked->name) >= capacity)
        status = idist__fail(IDIST_ERR_TRUNCATED,
                             "checkpoint_find: the path is longer than %zu bytes", capacity);

    free(list.entries);
    idist__os_folder_close(&folder);

    return status;
}

idist_status idist_checkpoint_find(const idist_checkpoint_desc *desc, bool latest, char *path,
                                   size_t capacity, const idist_opts *opts) {
    char found[4096];
    const idist__world *world;
    idist_opts own_opts;
    idist_status status = idist__agree_enter("checkpoint_find", opts, &own_opts);

    if (status != IDIST_OK) return status;
    world = own_opts.group ? own_opts.group->w : idist__world_default();
    memset(found, 0, sizeof found);
    if (idist_group_rank(own_opts.group) == 0)
        status = idist__folder_find(desc, latest, found, sizeof found, &world->log);
    status = idist__agree(status, &own_opts);
    if (status == IDIST_OK) status = idist_broadcast(found, sizeof found, IDIST_U8, 0, &own_opts);
    if (status != IDIST_OK) return status;

    if (!path) status = idist__fail(IDIST_ERR_ARG, "checkpoint_find: path is NULL");
    else if (strlen(found) >= capacity)
        status = idist__fail(IDIST_ERR_TRUNCATED, "checkpoint_find: %s does not fit into %zu bytes",
                             found, capacity);
    status = idist__agree(status, &own_opts);
    if (status == IDIST_OK) memcpy(path, found, strlen(found) + 1);

    return status;
}

// ---- train/checkpoint/save.h ---------------------------------------------------------------------

// train/checkpoint/save.h: writes a checkpoint atomically and removes files that are not kept
//
// Rank 0 does all the work, and the other ranks wait for its status. Rank 0 takes these steps:
//
//     1. list the folder and remove temporary files left by crashes
//     2. verify the files in the folder
//     3. decide whether the new file is wanted
//     4. write a temporary file, sync it, rename it, and sync the folder
//     5. list the folder again and remove all valid files but the best and the latest

// Writes all parts of a checkpoint and its checksum. Returns 0 or an errno.
static int idist__save_write_parts(const idist__checkpoint *checkpoint, idist__os_file file) {
    static const char zeros[IDIST__CHECKSUM_BLOCK] = {0};
    uint64_t at = 0, sum = idist__checkpoint_sum(checkpoint);
    int part;

    for (part = 0; part < checkpoint->part_count; part++) {
        size_t nbytes, padded;
        const void *data = idist__checkpoint_part(checkpoint, part, &nbytes);

        padded = idist__checkpoint_padded(nbytes);
        if (!idist__os_file_write_at(file, data, nbytes, at) ||
            !idist__os_file_write_at(file, zeros, padded - nbytes, at + nbytes))
            return errno;
        at += padded;
    }

    return idist__os_file_write_at(file, &sum, sizeof sum, at) ? 0 : errno;
}

// Records that a file that was just written is valid.
static void idist__save_remember(idist__os_folder folder, const char *name) {
    idist__os_file_version version;
    idist__os_file file;

    if (idist__os_folder_read_file(folder, name, &file) != 0) return;
    idist__os_file_version_of(file, &version);
    idist__os_file_close(&file);
    idist__seen_add(&version, IDIST__FLAW_NONE);
}

// Writes a file. The file gets its final name only when all its bytes are on the disk. Returns 0 or
// an errno.
static int idist__save_write(const idist__checkpoint *checkpoint, const idist_checkpoint_desc *desc,
                             idist__os_folder folder, const char *temporary, const char *name,
                             const idist__log *log) {
    idist__os_file file;
    int error = idist__os_folder_new_file(folder, temporary, &file);

    if (error) return error;
    error = idist__save_write_parts(checkpoint, file);
    if (!error && !idist__os_file_sync(file))
        error = idist__sync_judge(errno, "checkpoint_save", desc->folder, log);
    if (!idist__os_file_close(&file) && !error) error = errno;
    if (!error) error = idist__os_folder_rename(folder, temporary, name);

    if (error) {
        idist__os_folder_remove(folder, temporary);
        return error;
    }

    idist__save_remember(folder, name);
    error = idist__os_folder_sync(folder);

    return idist__sync_judge(error, "checkpoint_save", desc->folder, log);
}

// Returns a better file of another step, which makes the new file unwanted. If better files have
// later steps, returns the best of these, and otherwise the best file of an earlier step. Returns
// NULL if the new file is wanted.
static const idist__folder_entry *idist__save_find_better(const idist_checkpoint_desc *desc,
                                                          const idist__folder_list *list,
                                                          const idist__folder_entry *entry) {
    const idist__folder_entry *picked = NULL;
    int i;

    if (idist__folder_keeps(desc, list, entry)) return NULL;

    for (i = 0; i < list->count; i++) {
        const idist__folder_entry *other = &list->entries[i];
        bool later = other->step > entry->step, picked_later;

        if (other->flaw || other->step == entry->step) continue;
        if (!idist__folder_is_better(other, entry, desc->low_is_best)) continue;

        picked_later = picked && picked->step > entry->step;
        if (!picked || later > picked_later) picked = other;
        else if (later == picked_later && idist__folder_is_better(other, picked, desc->low_is_best))
            picked = other;
    }

    return picked;
}

static void idist__save_log_better(const idist_checkpoint_desc *desc,
                                   const idist__folder_entry *entry,
                                   const idist__folder_entry *better, const idist__log *log) {
    bool later = better->step > entry->step;

    idist__log_print(
        log, later ? IDIST_LOG_WARN : IDIST_LOG_INFO,
        "checkpoint_save: %s is not written to %s, because %s in that folder is better%s",
        entry->name, desc->folder, better->name,
        later ? " and has a later step: files of an earlier run count as well" : "");
}

// Verifies the files of a list, unless all files are kept. Warns about a damaged file the first
// time it is seen.
static void idist__save_verify(const idist_checkpoint_desc *desc, idist__os_folder folder,
                               idist__folder_list *list, const idist__log *log) {
    bool keeps_all = desc->keep < 0 || desc->keep_latest < 0;
    int i;

    for (i = 0; i < list->count; i++) {
        idist__folder_entry *entry = &list->entries[i];
        idist__flaw flaw;
        bool seen = idist__seen_find(&entry->version, &flaw);

        if (!keeps_all) idist__folder_verify(folder, entry);
        if (seen || !entry->flaw || entry->flaw == IDIST__FLAW_UNREADABLE) continue;

        idist__seen_add(&entry->version, entry->flaw);
        idist__log_print(log, IDIST_LOG_WARN,
                         "checkpoint_save: %s/%s %s; it does not count, and is not removed",
                         desc->folder, entry->name, idist__flaw_text(entry->flaw));
    }
}

static idist_status idist__save_remove(const idist_checkpoint_desc *desc, idist__os_folder folder,
                                       const char *name) {
    int error = idist__os_folder_remove(folder, name);

    if (!error || error == ENOENT) return IDIST_OK;
    return idist__checkpoint_fail("checkpoint_save: cannot remove", desc->folder, name, error);
}

// Removes the files that the saved file replaces, from the folder and from the list. These are the
// other valid files of its step.
static idist_status idist__save_remove_replaced(const idist_checkpoint_desc *desc,
                                                idist__os_folder folder, idist__folder_list *list,
                                                const idist__folder_entry *saved) {
    int i, kept_count = 0;
    idist_status status = IDIST_OK;

    for (i = 0; i < list->count; i++) {
        const idist__folder_entry *entry = &list->entries[i];
        bool replaced =
            !entry->flaw && entry->step == saved->step && strcmp(entry->name, saved->name) != 0;

        if (replaced && status == IDIST_OK) status = idist__save_remove(desc, folder, entry->name);
        if (!replaced) list->entries[kept_count++] = *entry;
    }

    list->count = kept_count;

    return status;
}

// Removes the files that the saved file replaces, and all other valid files but the best and the
// latest.
static idist_status idist__save_remove_rest(const idist_checkpoint_desc *desc, const char *prefix,
                                            idist__os_folder folder,
                                            const idist__folder_entry *saved,
                                            const idist__log *log) {
    idist__folder_list list;
    int i;
    idist_status status = idist__folder_list_all(desc->folder, prefix, folder, false, &list);

    if (status == IDIST_OK) idist__save_verify(desc, folder, &list, log);
    if (status == IDIST_OK) status = idist__save_remove_replaced(desc, folder, &list, saved);

    for (i = 0; i < list.count && status == IDIST_OK; i++) {
        const idist__folder_entry *entry = &list.entries[i];

        if (!entry->flaw && !idist__folder_keeps(desc, &list, entry))
            status = idist__save_remove(desc, folder, entry->name);
    }

    free(list.entries);

    return status;
}

// Saves a checkpoint to an open folder.
static idist_status idist__save_to_folder(const idist_checkpoint_desc *desc,
                                          idist__os_folder folder, const char *prefix,
                                          const idist__checkpoint *checkpoint,
                                          const idist__folder_entry *entry, const idist__log *log) {
    idist__folder_list list;
    const idist__folder_entry *better = NULL;
    char temporary[300];
    int error;
    idist_status status = idist__folder_list_all(desc->folder, prefix, folder, true, &list);

    if (status == IDIST_OK) idist__save_verify(desc, folder, &list, log);
    if (status == IDIST_OK) better = idist__save_find_better(desc, &list, entry);
    if (better) idist__save_log_better(desc, entry, better, log);
    free(list.entries);
    if (status != IDIST_OK || better) return status;

    snprintf(temporary, sizeof temporary, ".%s.tmp", entry->name);
    error = idist__save_write(checkpoint, desc, folder, temporary, entry->name, log);
    if (error)
        return idist__checkpoint_fail("checkpoint_save", desc->folder,
                                      error == EEXIST ? temporary : entry->name, error);

    return idist__save_remove_rest(desc, prefix, folder, entry, log);
}

// Completes the header and saves the checkpoint to the folder of the desc. Called on rank 0.
static idist_status idist__save_on_root(const idist_checkpoint_desc *desc, uint64_t step,
                                        double score, idist__checkpoint *checkpoint,
                                        const idist__log *log) {
    idist__folder_entry entry;
    char text[IDIST__NUMBER_NBYTES];
    const char *prefix = NULL;
    idist__os_folder folder;
    idist_status status;

    memset(&entry, 0, sizeof entry);
    if (score != score) return idist__fail(IDIST_ERR_ARG, "checkpoint_save: the score is NaN");
    status = idist__folder_open("checkpoint_save", desc, true, &prefix, &folder);

    if (status == IDIST_OK) {
        entry.step = step;
        entry.score = score;
        snprintf(entry.name, sizeof entry.name, "%s_%llu_score=%s.idist", prefix,
                 (unsigned long long)step, idist__number_print(text, score, 6));
        checkpoint->header[IDIST__HEADER_STEP] = step;
        memcpy(&checkpoint->header[IDIST__HEADER_SCORE], &score, sizeof score);
        checkpoint->header[IDIST__HEADER_CHECKSUM] =
            idist__checkpoint_header_checksum(checkpoint->header);
        status = idist__save_to_folder(desc, folder, prefix, checkpoint, &entry, log);
    }

    idist__os_folder_close(&folder);

    return status;
}

idist_status idist_checkpoint_save(const idist_checkpoint_desc *desc, uint64_t step, double score,
                                   const idist_tensor *tensors, int n, const void *info,
                                   size_t info_nbytes, const idist_opts *opts) {
    idist__checkpoint checkpoint;
    const idist__world *world;
    idist_opts own_opts;
    idist_status status = idist__agree_enter("checkpoint_save", opts, &own_opts);

    if (status != IDIST_OK) return status;
    if (idist_group_rank(own_opts.group) != 0) return idist__agree(IDIST_OK, &own_opts);

    world = own_opts.group ? own_opts.group->w : idist__world_default();
    status = idist__checkpoint_init("checkpoint_save", &checkpoint, tensors, n, info, info_nbytes);
    if (status == IDIST_OK)
        status = idist__save_on_root(desc, step, score, &checkpoint, &world->log);
    free(checkpoint.table);

    return idist__agree(status, &own_opts);
}

// ---- train/tensor.h ------------------------------------------------------------------------------

// train/tensor.h: broadcasts tensors, and compares shapes and options between ranks

//------------------------------------------------------------------------------
// shapes and options that must be equal on all ranks
//------------------------------------------------------------------------------

// Values of `dtype` in a shape that stands for an option. The value of the option is in `count`.
enum { IDIST__SHAPE_INTEGER = -1, IDIST__SHAPE_REAL = -2 };

// The shape of a tensor, or the value of an option.
typedef struct idist__shape {
    const char *what; // "parameter", or the name of the option
    int index;        // of the tensor, or -1 for an option
    int64_t count;    // elements; for an option, its integer or the bits of its double
    int64_t dtype;
} idist__shape;

// The words that are broadcast for each shape.
enum { IDIST__SHAPE_COUNT, IDIST__SHAPE_DTYPE, IDIST__SHAPE_WORDS };

static idist__shape idist__shape_of_option(const char *what, int64_t value) {
    idist__shape shape;

    shape.what = what;
    shape.index = -1;
    shape.count = value;
    shape.dtype = IDIST__SHAPE_INTEGER;

    return shape;
}

static void idist__shape_of_tensors(idist__shape *shapes, const char *what,
                                    const idist_tensor *tensors, int n) {
    int i;

    for (i = 0; i < n; i++) {
        shapes[i].what = what;
        shapes[i].index = i;
        shapes[i].count = (int64_t)tensors[i].count;
        shapes[i].dtype = (int64_t)tensors[i].dtype;
    }
}

// Prints a shape in the form "F32 x 1024", or the value of an option.
static void idist__shape_print(char *text, size_t capacity, int64_t count, int64_t dtype) {
    char number[IDIST__NUMBER_NBYTES];
    double real;

    memcpy(&real, &count, sizeof real);
    if (dtype == IDIST__SHAPE_REAL)
        idist__text_copy(text, capacity, idist__number_print(number, real, 6));
    else if (dtype == IDIST__SHAPE_INTEGER) snprintf(text, capacity, "%lld", (long long)count);
    else
        snprintf(text, capacity, "%s x %lld", idist_dtype_name((idist_dtype)dtype),
                 (long long)count);
}

static idist_status idist__shape_mismatch(const char *name, const idist__shape *shape,
                                          const int64_t *of_root, int root) {
    char here[64], there[64], index[16] = "";

    idist__shape_print(here, sizeof here, shape->count, shape->dtype);
    idist__shape_print(there, sizeof there, of_root[IDIST__SHAPE_COUNT],
                       of_root[IDIST__SHAPE_DTYPE]);
    if (shape->index >= 0) snprintf(index, sizeof index, " %d", shape->index);

    return idist__fail(IDIST_ERR_MISMATCH, "%s: %s%s is %s here, and %s on rank %d", name,
                       shape->what, index, here, there, root);
}

// Checks that all ranks have the root's shapes[first .. end-1]. `words` has space for all shapes.
// Collective.
static idist_status idist__shape_compare(const char *name, const idist__shape *shapes, int first,
                                         int end, int64_t *words, int root,
                                         const idist_opts *opts) {
    size_t word_count = IDIST__SHAPE_WORDS * (size_t)(end - first);
    int i;
    idist_status status;

    for (i = first; i < end; i++) {
        words[IDIST__SHAPE_WORDS * i + IDIST__SHAPE_COUNT] = shapes[i].count;
        words[IDIST__SHAPE_WORDS * i + IDIST__SHAPE_DTYPE] = shapes[i].dtype;
    }

    status = idist_broadcast(words + IDIST__SHAPE_WORDS * first, word_count, IDIST_I64, root, opts);
    if (status != IDIST_OK) return status;

    for (i = first; i < end && status == IDIST_OK; i++) {
        const int64_t *of_root = words + IDIST__SHAPE_WORDS * i;

        if (of_root[IDIST__SHAPE_COUNT] != shapes[i].count ||
            of_root[IDIST__SHAPE_DTYPE] != shapes[i].dtype)
            status = idist__shape_mismatch(name, &shapes[i], of_root, root);
    }

    return idist__agree(status, opts);
}

// Checks that all ranks have the root's shapes. Succeeds on all ranks or on none, and fails if
// `mine` is not IDIST_OK on some rank. On that rank shapes may be NULL. The first option_count
// shapes are compared first, because they include the number of the other shapes; option_count is
// the same on all ranks. Collective.
static idist_status idist__shape_agree(const char *name, const idist__shape *shapes,
                                       int option_count, int count, idist_status mine, int root,
                                       const idist_opts *opts) {
    size_t word_count = IDIST__SHAPE_WORDS * ((size_t)count + 1);
    int64_t *words = (int64_t *)malloc(word_count * sizeof *words);
    idist_status status = mine;

    if (status == IDIST_OK && !words)
        status =
            idist__fail(IDIST_ERR_NO_MEMORY, "%s: no memory to compare %d tensors", name, count);
    status = idist__agree(status, opts);
    if (status == IDIST_OK)
        status = idist__shape_compare(name, shapes, 0, option_count, words, root, opts);
    if (status == IDIST_OK)
        status = idist__shape_compare(name, shapes, option_count, count, words, root, opts);
    free(words);

    return status;
}

//------------------------------------------------------------------------------
// arrays copied from one rank to all
//------------------------------------------------------------------------------

// Checks a list of tensors. If data_too is set, every tensor with elements must have memory. Local.
static idist_status idist__tensor_check(const char *name, const char *what,
                                        const idist_tensor *tensors, int n, bool data_too) {
    int i;

    if (n < 0)
        return idist__fail(IDIST_ERR_ARG, "%s: the number of %ss must not be negative, got %d",
                           name, what, n);
    if (n && !tensors)
        return idist__fail(IDIST_ERR_ARG, "%s: %d %ss, but the list is NULL", name, n, what);

    for (i = 0; i < n; i++) {
        if (!idist_dtype_size(tensors[i].dtype))
            return idist__fail(IDIST_ERR_ARG, "%s: %s %d: invalid dtype %d", name, what, i,
                               (int)tensors[i].dtype);
        if (tensors[i].count > SIZE_MAX / 64)
            return idist__fail(IDIST_ERR_ARG, "%s: %s %d has too many elements: %zu", name, what, i,
                               tensors[i].count);
        if (data_too && tensors[i].count && !tensors[i].data)
            return idist__fail(IDIST_ERR_ARG, "%s: %s %d is NULL", name, what, i);
    }

    return IDIST_OK;
}

// Compares two pointers to tensors by the addresses of the tensors' memory, for qsort.
static int idist__tensor_compare(const void *a, const void *b) {
    uintptr_t x = (uintptr_t)(*(const idist_tensor *const *)a)->data;
    uintptr_t y = (uintptr_t)(*(const idist_tensor *const *)b)->data;

    return (x > y) - (x < y);
}

// Finds two tensors that overlap in memory, and sets *first < *second to their indices. Sets both
// to -1 if no tensors overlap. Ignores tensors without memory.
static idist_status idist__tensor_find_overlap(const char *name, const idist_tensor *tensors, int n,
                                               int *first, int *second) {
    const idist_tensor **sorted;
    size_t count = 0, k;
    int i;

    *first = *second = -1;
    sorted = (const idist_tensor **)malloc(((size_t)n + 1) * sizeof *sorted);
    if (!sorted)
        return idist__fail(IDIST_ERR_NO_MEMORY, "%s: no memory to compare %d tensors", name, n);

    for (i = 0; i < n; i++)
        if (tensors[i].data && tensors[i].count) sorted[count++] = &tensors[i];
    qsort(sorted, count, sizeof *sorted, idist__tensor_compare);

    for (k = 1; k < count && *first < 0; k++) {
        const idist_tensor *below = sorted[k - 1], *above = sorted[k];
        size_t nbytes = below->count * idist_dtype_size(below->dtype);

        if ((uintptr_t)above->data - (uintptr_t)below->data >= nbytes) continue;
        *first = (int)((below < above ? below : above) - tensors);
        *second = (int)((below < above ? above : below) - tensors);
    }

    free(sorted);

    return IDIST_OK;
}

#define IDIST__TENSORS_AT_ONCE 64

// Adds a broadcast per tensor to the group of calls that idist_group_begin has started, and ends
// the group.
static idist_status idist__tensor_broadcast_group(const idist_tensor *tensors, int n, int root,
                                                  const idist_opts *opts) {
    int i;
    idist_status status = IDIST_OK, end_status;

    for (i = 0; i < n && status == IDIST_OK; i++)
        status = idist_broadcast(tensors[i].data, tensors[i].count, tensors[i].dtype, root, opts);
    end_status = idist_group_end();

    return status == IDIST_OK ? end_status : status;
}

// Broadcasts all tensors, many at a time, so that small tensors do not wait for one another.
// Collective.
static idist_status idist__tensor_broadcast(const idist_tensor *tensors, int n, int root,
                                            const idist_opts *opts) {
    int i, count;
    idist_status status;

    for (i = 0; i < n; i += count) {
        count = n - i < IDIST__TENSORS_AT_ONCE ? n - i : IDIST__TENSORS_AT_ONCE;
        status = idist_group_begin();
        if (status != IDIST_OK) return status;
        status = idist__tensor_broadcast_group(tensors + i, count, root, opts);
        if (status != IDIST_OK)
            return idist__agree_break("broadcast of tensors", opts->group, status);
    }

    return IDIST_OK;
}

// Returns the options and shapes that must be equal on all ranks, or NULL if there is no memory.
// The caller frees them.
static idist__shape *idist__tensor_shapes(const char *what, const char *number,
                                          const idist_tensor *tensors, int n, size_t options_nbytes,
                                          int *option_count) {
    idist__shape *shapes;

    *option_count = 2;
    shapes = (idist__shape *)malloc(((size_t)n + (size_t)*option_count) * sizeof *shapes);
    if (!shapes) return NULL;
    shapes[0] = idist__shape_of_option(number, n);
    shapes[1] = idist__shape_of_option("options_nbytes", (int64_t)options_nbytes);
    idist__shape_of_tensors(shapes + *option_count, what, tensors, n);

    return shapes;
}

// Compares and broadcasts tensors and options, for idist_broadcast_parameters and
// idist_broadcast_optimizer_state. Collective.
static idist_status idist__tensor_share(const char *name, const char *what,
                                        const idist_tensor *tensors, int n, void *options,
                                        size_t options_nbytes, int root, const idist_opts *opts) {
    char number[48];
    int group_size, option_count = 0;
    idist__shape *shapes = NULL;
    idist_opts own_opts;
    idist_status status = idist__agree_enter(name, opts, &own_opts);

    if (status != IDIST_OK) return status;
    group_size = idist_group_size(own_opts.group);
    status = idist__tensor_check(name, what, tensors, n, true);
    if (status == IDIST_OK && (root < 0 || root >= group_size))
        status = idist__fail(IDIST_ERR_ARG, "%s: root %d is not a rank of a group of %d", name,
                             root, group_size);
    if (status == IDIST_OK && options_nbytes && !options)
        status = idist__fail(IDIST_ERR_ARG, "%s: options is NULL", name);

    if (status == IDIST_OK) {
        snprintf(number, sizeof number, "number of %ss", what);
        shapes = idist__tensor_shapes(what, number, tensors, n, options_nbytes, &option_count);
        if (!shapes)
            status = idist__fail(IDIST_ERR_NO_MEMORY, "%s: no memory for %d tensors", name, n);
    }

    status = idist__shape_agree(name, shapes, option_count, shapes ? option_count + n : 0, status,
                                root, &own_opts);
    free(shapes);

    if (status == IDIST_OK) status = idist__tensor_broadcast(tensors, n, root, &own_opts);
    if (status == IDIST_OK && options_nbytes)
        status = idist_broadcast(options, options_nbytes, IDIST_U8, root, &own_opts);
    if (status != IDIST_OK) return status;

    return idist__agree(status, &own_opts);
}

idist_status idist_broadcast_parameters(const idist_tensor *params, int n, int root,
                                        const idist_opts *opts) {
    return idist__tensor_share("broadcast_parameters", "parameter", params, n, NULL, 0, root, opts);
}

idist_status idist_broadcast_optimizer_state(const idist_tensor *state, int n, void *options,
                                             size_t options_nbytes, int root,
                                             const idist_opts *opts) {
    return idist__tensor_share("broadcast_optimizer_state", "tensor", state, n, options,
                               options_nbytes, root, opts);
}

// ---- train/compress/tensor_memory.h --------------------------------------------------------------

// train/compress/tensor_memory.h: operations on host or device memory
//
// On the device, gpu/ipc/own.h enqueues the operations on opts.stream.

#ifdef IDIST_NCCL_H
#define IDIST__OWN(call) call
#else
static idist_status idist__tensor_memory_no_device(void) {
    return idist__fail(IDIST_ERR_UNSUPPORTED,
                       "ddp: device memory needs idist_nccl.h, included before idist_train.h");
}
#define IDIST__OWN(call) idist__tensor_memory_no_device()
#endif

typedef struct idist__memory {
    bool on_device;
    idist_opts opts; // group and stream
} idist__memory;

// Copies nbytes, or writes zeros if `from` is NULL.
static idist_status idist__tensor_memory_copy(const idist__memory *memory, void *to,
                                              const void *from, size_t nbytes) {
    if (!nbytes || to == from) return IDIST_OK;
    if (memory->on_device)
        return IDIST__OWN(idist__own_copy("ddp", &memory->opts, to, from, nbytes));
    if (from) memcpy(to, from, nbytes);
    else memset(to, 0, nbytes);

    return IDIST_OK;
}

static idist_status idist__tensor_memory_scale(const idist__memory *memory, void *data,
                                               size_t count, idist_dtype dtype, double factor) {
    if (!count || factor == 1) return IDIST_OK;
    if (memory->on_device)
        return IDIST__OWN(idist__own_scale("ddp", &memory->opts, data, count, dtype, factor));
    idist__reduce_scale(data, count, dtype, factor);

    return IDIST_OK;
}

// Sets *on_device to true if data is in device memory. Without idist_nccl.h, always sets it to
// false. Returns IDIST_ERR_UNSUPPORTED for an idist_xla_buffer.
static idist_status idist__tensor_memory_on_device(const idist__memory *memory, const void *data,
                                                   bool *on_device) {
    *on_device = false;
#ifdef IDIST_XLA_H
    if (data && idist__xla_buffer_is(data))
        return idist__fail(IDIST_ERR_UNSUPPORTED, "ddp: a tensor is an idist_xla_buffer; "
                                                  "all_reduce such gradients yourself");
#endif
#ifdef IDIST_NCCL_H
    if (data) return idist__own_holds("ddp", &memory->opts, data, on_device);
#else
    (void)memory;
    (void)data;
#endif
    return IDIST_OK;
}

// Allocates zeroed memory, which the caller frees with idist__tensor_memory_free.
static idist_status idist__tensor_memory_alloc(const idist__memory *memory, void **data,
                                               size_t nbytes) {
    if (memory->on_device) return IDIST__OWN(idist__own_alloc("ddp", &memory->opts, data, nbytes));
    *data = idist_alloc(nbytes, &memory->opts);
    return *data ? IDIST_OK : IDIST_ERR_NO_MEMORY;
}

static void idist__tensor_memory_free(const idist__memory *memory, void *data) {
    if (!memory->on_device) {
        idist_free(data);
        return;
    }
#ifdef IDIST_NCCL_H
    idist__own_free(data);
#endif
}

// ---- train/compress/compress.h -------------------------------------------------------------------

// train/compress/compress.h: how buckets are reduced; 16-bit compression
//
// Functions: idist__compress_*, idist__half_*.

//------------------------------------------------------------------------------
// a bucket that is sent with fewer bits
//
// A compression is a communication hook, like the program's own hooks. Its arg is the
// idist__reduction of the ddp. With 16-bit compression, the state of a bucket is the memory for its
// 16-bit floats.
//------------------------------------------------------------------------------

// The settings with which the built-in hooks reduce buckets.
typedef struct idist__reduction {
    idist__memory memory;
    int group_size;
    idist_dtype wire;             // dtype sent by 16-bit compression: F16 or BF16
    idist_op op;                  // op of the all_reduce
    double postscale;             // factor for the result of the all_reduce
    idist_powersgd_desc powersgd; // with defaults filled in
} idist__reduction;

// Allocates the state of a bucket: memory for its 16-bit floats.
static idist_status idist__compress_alloc(const idist__reduction *reduction, idist_bucket *b) {
    return idist__tensor_memory_alloc(&reduction->memory, &b->state, (b->count + 1) * 2);
}

// Frees the state of a bucket. This is the free_fn of the hooks for 16-bit compression.
static void idist__compress_free(void *data, void *arg) {
    idist__tensor_memory_free(&((const idist__reduction *)arg)->memory, data);
}

//------------------------------------------------------------------------------
// buckets sent as 16-bit floats
//
// The bucket is rounded to 16 bits, reduced and widened. The reduction adds the numbers as floats
// and rounds once more.
//------------------------------------------------------------------------------

enum { IDIST__HALF_PIECE = 256 }; // elements converted at a time

static void idist__half_pack(const idist_bucket *b, char *to, idist_dtype wire) {
    const double *from = (const double *)b->data;
    float piece[IDIST__HALF_PIECE];
    size_t first, i, count;

    if (b->dtype == IDIST_F32) {
        idist__small_float_narrow(to, (const float *)b->data, b->count, wire);
        return;
    }

    for (first = 0; first < b->count; first += count) {
        count = b->count - first < IDIST__HALF_PIECE ? b->count - first : (size_t)IDIST__HALF_PIECE;
        for (i = 0; i < count; i++) piece[i] = (float)from[first + i];
        idist__small_float_narrow(to + 2 * first, piece, count, wire);
    }
}

static void idist__half_unpack(const idist_bucket *b, const char *from, idist_dtype wire) {
    double *to = (double *)b->data;
    float piece[IDIST__HALF_PIECE];
    size_t first, i, count;

    if (b->dtype == IDIST_F32) {
        idist__small_float_widen((float *)b->data, from, b->count, wire);
        return;
    }

    for (first = 0; first < b->count; first += count) {
        count = b->count - first < IDIST__HALF_PIECE ? b->count - first : (size_t)IDIST__HALF_PIECE;
        idist__small_float_widen(piece, from + 2 * first, count, wire);
        for (i = 0; i < count; i++) to[first + i] = piece[i];
    }
}

static idist_status idist__half_start(idist_bucket *b, void *arg) {
    const idist__reduction *reduction = (const idist__reduction *)arg;
    char *wire = (char *)b->state;

    idist__half_pack(b, wire, reduction->wire);
    return idist_all_reduce(wire, wire, b->count, reduction->wire, reduction->op, &b->opts);
}

static idist_status idist__half_finish(idist_bucket *b, void *arg) {
    const idist__reduction *reduction = (const idist__reduction *)arg;

    idist__half_unpack(b, (const char *)b->state, reduction->wire);
    return idist__tensor_memory_scale(&reduction->memory, b->data, b->count, b->dtype,
                                      reduction->postscale);
}

// ---- train/compress/powersgd.h -------------------------------------------------------------------

// train/compress/powersgd.h: buckets sent as products of two thin matrices
//
// The algorithm is from Vogels, Karimireddy and Jaggi, PowerSGD (2019), and torch's powerSGD_hook.
// Each iteration makes one step of a power iteration. The power iteration finds the singular
// vectors with the largest singular values of the mean of M over the ranks.
//
//     M  += error                             rows x cols, of this rank
//     P   = M * Q                             rows x rank
//     all_reduce of P                         together with the gradients that are not compressed
//     P   = P with orthonormal columns        equal on all ranks, because P is
//     Q   = transpose(M) * P                  cols x rank
//     all_reduce of Q                         then divided by the number of ranks
//     result = P * transpose(Q)
//     error  = M - result
//
// A rank's error has two parts: the error of the mean, and the difference between the rank's
// gradient and the mean. The second parts of all ranks add up to zero. For example, a gradient of
// 1e20 on one of two ranks leaves 5e19 on that rank and -5e19 on the other. Gradients that are
// added to such errors are lost in rounding. So every rank also sends the size of its P. All ranks
// begin again with M = gradient if the sum of the Ps is much smaller than the sum of their sizes,
// and if M is much larger than the gradient on some rank (idist__powersgd_recover).
//
// The next iteration starts with Q. The two all_reduces send (rows + cols) * rank floats per
// matrix, times 2 (n-1)/n. The first all_reduce runs during the backward pass, the second one in
// idist_ddp_wait.
//
// P and Q are stored by columns. Values that must be equal on all ranks are computed from the
// results of an all_reduce, or drawn from generators with the same seed.

enum { IDIST__POWERSGD_RANK_MAX = 4 };

typedef struct idist__powersgd_matrix {
    size_t first; // index of its first element in the bucket
    size_t count; // elements in the bucket; the rest of rows * cols are zeros
    size_t rows, cols;
    int rank;
    float *p, *q; // point into the state's p and q
} idist__powersgd_matrix;

typedef struct idist__powersgd_state {
    idist__powersgd_matrix *matrices; // in the order of the bucket
    int matrix_count;
    float *error; // per element of the bucket; between start and finish this is M
    float *p;     // P of all matrices, then the gradients that are not compressed, then sizes
    float *sizes; // in p, by matrix: largest absolute value in P, later summed over the ranks
    float *q;     // Q of all matrices
    size_t p_count, q_count, plain_count;
    uint64_t iteration;
    uint64_t recovery_count;
    bool warm; // the next iteration starts with q; otherwise it draws a new q
    idist__twister twister;
} idist__powersgd_state;

static idist_powersgd_desc idist__powersgd_resolve(const idist_powersgd_desc *desc) {
    idist_powersgd_desc resolved;

    memset(&resolved, 0, sizeof resolved);
    if (desc) resolved = *desc;
    if (!resolved.rank) resolved.rank = 1;
    if (resolved.min_compression_rate == 0) resolved.min_compression_rate = 2;

    return resolved;
}

static idist_status idist__powersgd_check(const idist_powersgd_desc *desc) {
    char a[IDIST__NUMBER_NBYTES], b[IDIST__NUMBER_NBYTES];
    double rate = desc->min_compression_rate, epsilon = desc->epsilon;

    if (desc->rank < 0 || desc->rank > IDIST__POWERSGD_RANK_MAX)
        return idist__fail(IDIST_ERR_ARG, "ddp_create: powersgd: rank must be 1 .. %d, got %d",
                           (int)IDIST__POWERSGD_RANK_MAX, desc->rank);
    if (!(rate >= 0 && rate - rate == 0) || !(epsilon >= 0 && epsilon - epsilon == 0))
        return idist__fail(IDIST_ERR_ARG,
                           "ddp_create: powersgd: min_compression_rate and epsilon must not be "
                           "negative, got %s and %s",
                           idist__number_print(a, rate, 6), idist__number_print(b, epsilon, 6));

    return IDIST_OK;
}

// Returns a checksum over the options that must be equal on all ranks.
static int64_t idist__powersgd_digest(const idist_powersgd_desc *desc, int n) {
    idist_powersgd_desc resolved = idist__powersgd_resolve(desc);
    idist__checksum sum = idist__checksum_begin();
    uint64_t words[8];
    int i;

    words[0] = (uint64_t)resolved.rank;
    words[1] = resolved.start_iteration;
    words[2] = resolved.seed;
    memcpy(&words[3], &resolved.min_compression_rate, sizeof words[3]);
    memcpy(&words[4], &resolved.epsilon, sizeof words[4]);
    words[5] = resolved.no_error_feedback;
    words[6] = resolved.no_warm_start;
    words[7] = resolved.rows != NULL;
    idist__checksum_add(&sum, words, sizeof words);

    for (i = 0; i < n && resolved.rows; i++) {
        words[0] = resolved.rows[i];
        idist__checksum_add(&sum, words, sizeof words[0]);
    }

    return (int64_t)idist__checksum_end(&sum);
}

// Frees the state of a bucket. This is the free_fn of the hook.
static void idist__powersgd_free(void *data, void *arg) {
    idist__powersgd_state *state = (idist__powersgd_state *)data;

    (void)arg;
    free(state->matrices);
    free(state->error);
    free(state->p);
    free(state->q);
    free(state);
}

// Adds a matrix to the state of a bucket, unless compressing it would save too little according to
// min_compression_rate.
static void idist__powersgd_add(idist__powersgd_state *state, const idist_powersgd_desc *desc,
                                size_t first, size_t count, size_t rows, size_t cols) {
    idist__powersgd_matrix *matrix = &state->matrices[state->matrix_count];
    size_t least = rows < cols ? rows : cols;
    double sent = ((double)rows + (double)cols) * desc->rank;

    if (!(sent * desc->min_compression_rate < (double)rows * (double)cols)) return;

    matrix->first = first;
    matrix->count = count;
    matrix->rows = rows;
    matrix->cols = cols;
    matrix->rank = (size_t)desc->rank < least ? desc->rank : (int)least;

    state->p_count += rows * (size_t)matrix->rank;
    state->q_count += cols * (size_t)matrix->rank;
    state->plain_count -= count;
    state->matrix_count++;
}

static void idist__powersgd_add_all(idist__powersgd_state *state, const idist_powersgd_desc *desc,
                                    const idist_bucket *b) {
    size_t side = 0;
    int i;

    state->plain_count = b->count;

    if (!desc->rows) {
        while (side * side < b->count) side++;
        idist__powersgd_add(state, desc, 0, b->count, side, side);
        return;
    }

    for (i = 0; i < b->gradient_count; i++) {
        size_t end = i + 1 < b->gradient_count ? b->displs[i + 1] : b->count;
        size_t count = end - b->displs[i], rows = desc->rows[b->gradients[i]];

        if (rows && count)
            idist__powersgd_add(state, desc, b->displs[i], count, rows, count / rows);
    }
}

// Allocates the state of a bucket. After a failure the bucket may have an incomplete state, which
// idist__powersgd_free frees.
static idist_status idist__powersgd_alloc(const idist__reduction *reduction, idist_bucket *b) {
    idist__powersgd_state *state = (idist__powersgd_state *)calloc(1, sizeof *state);
    size_t gradients = (size_t)b->gradient_count, floats;
    float *p, *q;
    int i;

    b->state = state;
    if (state)
        state->matrices = (idist__powersgd_matrix *)calloc(gradients + 1, sizeof *state->matrices);

    if (state && state->matrices) {
        idist__powersgd_add_all(state, &reduction->powersgd, b);
        state->error = (float *)calloc(b->count + 1, sizeof *state->error);
        floats = state->p_count + state->plain_count + (size_t)state->matrix_count + 1;
        state->p = (float *)calloc(floats, sizeof *state->p);
        state->q = (float *)calloc(state->q_count + 1, sizeof *state->q);
    }

    if (!state || !state->error || !state->p || !state->q)
        return idist__fail(IDIST_ERR_NO_MEMORY, "ddp_create: no memory to compress a bucket");

    state->sizes = state->p + state->p_count + state->plain_count;

    for (i = 0, p = state->p, q = state->q; i < state->matrix_count; i++) {
        idist__powersgd_matrix *matrix = &state->matrices[i];

        matrix->p = p;
        matrix->q = q;
        p += matrix->rows * (size_t)matrix->rank;
        q += matrix->cols * (size_t)matrix->rank;
    }

    idist__twister_seed_array(&state->twister, reduction->powersgd.seed + (uint64_t)b->index);

    return IDIST_OK;
}

// Returns the dot product of a and b. Keeps eight sums, which a compiler may hold in a vector.
IDIST__VECTORIZE static float idist__powersgd_dot(const float *a, const float *b, size_t count) {
    float sums[8] = {0, 0, 0, 0, 0, 0, 0, 0}, rest = 0;
    size_t i;
    int k;

    for (i = 0; i + 8 <= count; i += 8)
        for (k = 0; k < 8; k++) sums[k] += a[i + (size_t)k] * b[i + (size_t)k];
    for (; i < count; i++) rest += a[i] * b[i];

    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) +
           ((sums[4] + sums[5]) + (sums[6] + sums[7])) + rest;
}

// Computes to += factor * from.
IDIST__VECTORIZE static void idist__powersgd_add_scaled(float *to, const float *from, size_t count,
                                                        float factor) {
    size_t i;

    for (i = 0; i < count; i++) to[i] += factor * from[i];
}

// Fills a column with random numbers. Each number is a sum of twelve uniform numbers, so its
// distribution is nearly normal. That is sufficient, because the columns are made orthogonal.
static void idist__powersgd_draw(idist__twister *twister, float *column, size_t count) {
    size_t i;

    for (i = 0; i < count; i++) {
        double sum = -6;
        int k;

        for (k = 0; k < 12; k++) sum += idist__twister_next(twister) / 4294967296.0;
        column[i] = (float)sum;
    }
}

static double idist__powersgd_norm(const float *column, size_t count) {
    double squares = 0;
    size_t i;

    for (i = 0; i < count; i++) squares += (double)column[i] * (double)column[i];
    return idist__norm_root(squares);
}

// Makes column k orthogonal to the columns before it, and normalizes it. Subtracts the projections
// twice, because the rounding errors of the first pass are not small if little of the column is
// left. Returns false if nothing but rounding errors is left.
static bool idist__powersgd_separate(float *columns, size_t count, int k, double epsilon) {
    float *column = columns + (size_t)k * count;
    double before = idist__powersgd_norm(column, count), norm, inverse;
    size_t i;
    int turn;

    for (turn = 0; turn < 2 * k; turn++) {
        const float *base = columns + (size_t)(turn % k) * count;

        idist__powersgd_add_scaled(column, base, count, -idist__powersgd_dot(base, column, count));
    }

    norm = idist__powersgd_norm(column, count);
    if (!(norm > 1e-6 * before)) return false;
    inverse = 1 / (norm + epsilon);
    for (i = 0; i < count; i++) column[i] = (float)(column[i] * inverse);

    return true;
}

// Orthogonalizes columns by modified Gram-Schmidt. If a column depends linearly on the columns
// before it, replaces it with a random column. If `twister` is NULL, or if the random column
// depends on these columns too, sets the column to zero.
static void idist__powersgd_orthogonalize(float *columns, size_t count, int rank, double epsilon,
                                          idist__twister *twister) {
    int k;

    for (k = 0; k < rank; k++) {
        float *column = columns + (size_t)k * count;

        if (idist__powersgd_separate(columns, count, k, epsilon)) continue;
        if (twister) idist__powersgd_draw(twister, column, count);
        if (twister && idist__powersgd_separate(columns, count, k, epsilon)) continue;
        memset(column, 0, count * sizeof *column);
    }
}

// Returns the number of elements of row i that are in the bucket, and sets *first to the index of
// the first one.
static size_t idist__powersgd_row(const idist__powersgd_matrix *matrix, size_t i, size_t *first) {
    size_t before = i * matrix->cols;

    *first = matrix->first + before;
    if (before >= matrix->count) return 0;

    return matrix->count - before < matrix->cols ? matrix->count - before : matrix->cols;
}

// Computes P = M * Q.
static void idist__powersgd_project(const idist__powersgd_matrix *matrix, const float *m) {
    size_t i, first;
    int k;

    for (i = 0; i < matrix->rows; i++) {
        size_t count = idist__powersgd_row(matrix, i, &first);

        for (k = 0; k < matrix->rank; k++)
            matrix->p[(size_t)k * matrix->rows + i] =
                idist__powersgd_dot(m + first, matrix->q + (size_t)k * matrix->cols, count);
    }
}

// Computes Q = transpose(M) * P.
static void idist__powersgd_project_back(const idist__powersgd_matrix *matrix, const float *m) {
    size_t i, first;
    int k;

    memset(matrix->q, 0, matrix->cols * (size_t)matrix->rank * sizeof *matrix->q);

    for (i = 0; i < matrix->rows; i++) {
        size_t count = idist__powersgd_row(matrix, i, &first);

        for (k = 0; k < matrix->rank; k++)
            idist__powersgd_add_scaled(matrix->q + (size_t)k * matrix->cols, m + first, count,
                                       matrix->p[(size_t)k * matrix->rows + i]);
    }
}

static bool idist__powersgd_is_finite(const float *x, size_t count) {
    float sum = 0;
    size_t i;

    for (i = 0; i < count; i++) sum += x[i] - x[i]; // NaN for NaN and infinity, otherwise 0

    return sum == 0;
}

// Returns the largest absolute value in x, ignoring NaN.
IDIST__VECTORIZE static float idist__powersgd_size(const float *x, size_t count) {
    float largest = 0;
    size_t i;

    for (i = 0; i < count; i++) {
        float size = x[i] < 0 ? -x[i] : x[i];

        largest = size > largest ? size : largest;
    }

    return largest;
}

// Returns the largest absolute value of `count` elements of a bucket, beginning at `first`.
static float idist__powersgd_size_of_gradient(const idist_bucket *b, size_t first, size_t count) {
    const double *doubles = (const double *)b->data + first;
    double largest = 0;
    size_t i;

    if (b->dtype == IDIST_F32) return idist__powersgd_size((const float *)b->data + first, count);

    for (i = 0; i < count; i++) {
        double size = doubles[i] < 0 ? -doubles[i] : doubles[i];

        largest = size > largest ? size : largest;
    }

    return (float)largest;
}

// Adds `count` elements of a bucket, beginning at `first`, to `to`.
IDIST__VECTORIZE static void idist__powersgd_get(const idist_bucket *b, size_t first, float *to,
                                                 size_t count) {
    const float *floats = (const float *)b->data + first;
    const double *doubles = (const double *)b->data + first;
    size_t i;

    if (b->dtype == IDIST_F32)
        for (i = 0; i < count; i++) to[i] += floats[i];
    else
        for (i = 0; i < count; i++) to[i] += (float)doubles[i];
}

IDIST__VECTORIZE static void idist__powersgd_set(const idist_bucket *b, size_t first,
                                                 const float *from, size_t count, float factor) {
    float *floats = (float *)b->data + first;
    double *doubles = (double *)b->data + first;
    size_t i;

    if (b->dtype == IDIST_F32)
        for (i = 0; i < count; i++) floats[i] = factor * from[i];
    else
        for (i = 0; i < count; i++) doubles[i] = (double)(factor * from[i]);
}

enum { IDIST__POWERSGD_PIECE = 256 }; // elements of a row computed at a time

// Computes product = P * transpose(Q), writes factor * product to the bucket, and subtracts product
// from M. If Q is not finite, all results of the matrix are NaN, and Q and the errors of the matrix
// become zero.
static void idist__powersgd_expand(const idist_bucket *b, const idist__powersgd_matrix *matrix,
                                   float *m, float factor) {
    size_t i, j, first, count, q_count = matrix->cols * (size_t)matrix->rank;
    bool finite = idist__powersgd_is_finite(matrix->q, q_count);
    float product[IDIST__POWERSGD_PIECE];
    int k;

    if (!finite) factor = idist__small_float_from_bits(0x7fc00000u);

    for (i = 0; i < matrix->rows; i++) {
        size_t rest = idist__powersgd_row(matrix, i, &first);

        for (j = 0; rest; j += count, first += count, rest -= count) {
            count = rest < IDIST__POWERSGD_PIECE ? rest : (size_t)IDIST__POWERSGD_PIECE;
            memset(product, 0, sizeof product);

            for (k = 0; k < matrix->rank && finite; k++)
                idist__powersgd_add_scaled(product, matrix->q + (size_t)k * matrix->cols + j, count,
                                           matrix->p[(size_t)k * matrix->rows + i]);

            idist__powersgd_set(b, first, product, count, factor);
            idist__powersgd_add_scaled(m + first, product, count, -1);
            if (!finite) memset(m + first, 0, count * sizeof *m);
        }
    }

    if (!finite) memset(matrix->q, 0, q_count * sizeof *matrix->q);
}

// Copies the gradients that are not compressed to the memory after the Ps. If `back` is set, scales
// them and copies them back instead.
static void idist__powersgd_copy_plain(const idist_bucket *b, const idist__powersgd_state *state,
                                       bool back) {
    float *plain = state->p + state->p_count;
    size_t at = 0, count;
    int i;

    if (!back) memset(plain, 0, state->plain_count * sizeof *plain);

    for (i = 0; i <= state->matrix_count; i++) {
        count = (i < state->matrix_count ? state->matrices[i].first : b->count) - at;
        if (back) idist__powersgd_set(b, at, plain, count, (float)b->scale);
        else idist__powersgd_get(b, at, plain, count);
        plain += count;
        at += count;
        if (i < state->matrix_count) at += state->matrices[i].count;
    }
}

static idist_status idist__powersgd_start(idist_bucket *b, void *arg) {
    const idist__reduction *reduction = (const idist__reduction *)arg;
    const idist_powersgd_desc *desc = &reduction->powersgd;
    idist__powersgd_state *state = (idist__powersgd_state *)b->state;
    int k;

    if (state->iteration < desc->start_iteration)
        return idist_all_reduce(b->data, b->data, b->count, b->dtype, reduction->op, &b->opts);

    if (!state->warm) memset(state->q, 0, state->q_count * sizeof *state->q);
    state->warm = !desc->no_warm_start;

    for (k = 0; k < state->matrix_count; k++) {
        const idist__powersgd_matrix *matrix = &state->matrices[k];
        float *m = state->error + matrix->first;

        if (desc->no_error_feedback) memset(m, 0, matrix->count * sizeof *m);
        idist__powersgd_get(b, matrix->first, m, matrix->count);
        idist__powersgd_orthogonalize(matrix->q, matrix->cols, matrix->rank, desc->epsilon,
                                      &state->twister);
        idist__powersgd_project(matrix, state->error);
        state->sizes[k] = idist__powersgd_size(matrix->p, matrix->rows * (size_t)matrix->rank);
    }

    idist__powersgd_copy_plain(b, state, false);

    return idist_all_reduce(state->p, state->p,
                            state->p_count + state->plain_count + (size_t)state->matrix_count,
                            IDIST_F32, IDIST_SUM, &b->opts);
}

// Warns on the first rank of the group, and only if the count is a power of 2, so that warnings
// become rare.
static void idist__powersgd_warn(const idist_bucket *b, const idist__powersgd_matrix *matrix,
                                 uint64_t count) {
    idist__log without_world;
    const idist__log *log = idist__auto_log_of(b->opts.group, &without_world);
    int i = 0;

    if (!log || idist_group_rank(b->opts.group) != 0 || (count & (count - 1)) != 0) return;
    while (i + 1 < b->gradient_count && b->displs[i + 1] <= matrix->first) i++;
    idist__log_print(
        log, IDIST_LOG_WARN,
        "ddp: PowerSGD: bucket %d: the error feedback from gradient %d on was so large "
        "that gradients were lost in rounding, as after a gradient that is far too "
        "large on one rank; all ranks dropped it (%llu times so far)",
        b->index, b->gradients[i], (unsigned long long)count);
}

// Checks whether the errors of some rank have made the sum of the Ps worthless. If so, all ranks
// drop the errors of the matrix and compute P again without them. All ranks make the same decision,
// because it depends only on sums over the ranks. Collective.
static idist_status idist__powersgd_recover(const idist_bucket *b,
                                            const idist__reduction *reduction,
                                            idist__powersgd_state *state, int k) {
    const idist__powersgd_matrix *matrix = &state->matrices[k];
    size_t p_count = matrix->rows * (size_t)matrix->rank;
    float *m = state->error + matrix->first, own, sum = 0;
    idist_status status;

    if (!idist__powersgd_is_finite(matrix->p, p_count)) return IDIST_OK;
    if (!(idist__powersgd_size(matrix->p, p_count) < state->sizes[k] / 65536)) return IDIST_OK;

    // The sum may also be small because the gradients cancel out. In that case M is not much larger
    // than the gradient on any rank.
    own = idist__powersgd_size_of_gradient(b, matrix->first, matrix->count);
    own = idist__powersgd_size(m, matrix->count) / 4096 > own ? 1.0f : 0.0f;
    status = idist_all_reduce(&own, &sum, 1, IDIST_F32, IDIST_SUM, &b->opts);
    if (status != IDIST_OK || sum == 0) return status;

    memset(m, 0, matrix->count * sizeof *m);
    idist__powersgd_get(b, matrix->first, m, matrix->count);
    memset(matrix->q, 0, matrix->cols * (size_t)matrix->rank * sizeof *matrix->q);
    idist__powersgd_orthogonalize(matrix->q, matrix->cols, matrix->rank,
                                  reduction->powersgd.epsilon, &state->twister);
    idist__powersgd_project(matrix, state->error);
    idist__powersgd_warn(b, matrix, ++state->recovery_count);

    return idist_all_reduce(matrix->p, matrix->p, p_count, IDIST_F32, IDIST_SUM, &b->opts);
}

static idist_status idist__powersgd_finish(idist_bucket *b, void *arg) {
    const idist__reduction *reduction = (const idist__reduction *)arg;
    const idist_powersgd_desc *desc = &reduction->powersgd;
    idist__powersgd_state *state = (idist__powersgd_state *)b->state;
    double ranks = reduction->group_size;
    idist_status status = IDIST_OK;
    int k;

    if (state->iteration++ < desc->start_iteration)
        return idist__tensor_memory_scale(&reduction->memory, b->data, b->count, b->dtype,
                                          reduction->postscale);

    for (k = 0; k < state->matrix_count && status == IDIST_OK; k++)
        status = idist__powersgd_recover(b, reduction, state, k);
    if (status != IDIST_OK) return status;

    for (k = 0; k < state->matrix_count; k++) {
        const idist__powersgd_matrix *matrix = &state->matrices[k];
        bool finite = idist__powersgd_is_finite(matrix->p, matrix->rows * (size_t)matrix->rank);

        idist__powersgd_orthogonalize(matrix->p, matrix->rows, matrix->rank, desc->epsilon, NULL);
        idist__powersgd_project_back(matrix, state->error);
        if (!finite) matrix->q[0] = idist__small_float_from_bits(0x7fc00000u);
    }

    if (state->q_count)
        status =
            idist_all_reduce(state->q, state->q, state->q_count, IDIST_F32, IDIST_SUM, &b->opts);
    if (status != IDIST_OK) return status;
    idist__reduce_scale(state->q, state->q_count, IDIST_F32, 1 / ranks);

    for (k = 0; k < state->matrix_count; k++)
        idist__powersgd_expand(b, &state->matrices[k], state->error, (float)(b->scale * ranks));
    idist__powersgd_copy_plain(b, state, true);

    return IDIST_OK;
}

// ---- train/compress/on_device.h ------------------------------------------------------------------

// train/compress/on_device.h: compressed buckets, by kernels on the device
//
// The kernels of gpu/ipc/ compress F32 buckets. They give the same bits as the host.

#ifdef IDIST_NCCL_H
static idist_status idist__on_device_convert(const idist_bucket *b, int kernel_op, const void *in,
                                             void *out) {
    idist__pack_args args;

    memset(&args, 0, sizeof args);
    args.in = in;
    args.out = out;
    args.count = b->count;
    args.op = kernel_op;

    return idist__own_pack("ddp", &b->opts, &args);
}

static idist_status idist__on_device_half_start(idist_bucket *b, void *arg) {
    const idist__reduction *reduction = (const idist__reduction *)arg;
    void *wire = b->state;
    int kernel_op = reduction->wire == IDIST_F16 ? IDIST__PACK_F16 : IDIST__PACK_BF16;
    idist_status status = idist__on_device_convert(b, kernel_op, b->data, wire);

    if (status != IDIST_OK) return status;
    return idist_all_reduce(wire, wire, b->count, reduction->wire, reduction->op, &b->opts);
}

static idist_status idist__on_device_half_finish(idist_bucket *b, void *arg) {
    const idist__reduction *reduction = (const idist__reduction *)arg;
    int kernel_op = reduction->wire == IDIST_F16 ? IDIST__UNPACK_F16 : IDIST__UNPACK_BF16;
    idist_status status = idist__on_device_convert(b, kernel_op, b->state, b->data);

    if (status != IDIST_OK) return status;
    return idist__tensor_memory_scale(&reduction->memory, b->data, b->count, b->dtype,
                                      reduction->postscale);
}
#endif

// ---- train/ddp/ddp_model.h -----------------------------------------------------------------------

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

// ---- train/ddp/ddp_bucket.h ----------------------------------------------------------------------

// train/ddp/ddp_bucket.h: which gradients share a bucket, where buckets lie, and calls of hooks
//
// Functions: idist__ddp_bucket_*, idist__ddp_hook_*.

//------------------------------------------------------------------------------
// which gradients share a bucket, and where the bucket is in memory
//------------------------------------------------------------------------------

// Assigns gradients to buckets in the given order, or from the last to the first if `order` is
// NULL. Sets bucket_of[i] to the bucket of gradient i. Each dtype has one open bucket. The gradient
// that reaches the limit closes the bucket. Buckets are numbered in the order in which they are
// opened. Returns the number of buckets.
static int idist__ddp_bucket_assign(const idist_ddp *d, const int32_t *order, int *bucket_of) {
    size_t limit = d->desc.bucket_nbytes, nbytes[IDIST_DTYPE_COUNT], limits[IDIST_DTYPE_COUNT];
    int open[IDIST_DTYPE_COUNT], i, k, count = 0;

    for (i = 0; i < IDIST_DTYPE_COUNT; i++) {
        open[i] = -1;
        nbytes[i] = 0;
        limits[i] = limit ? limit : IDIST__DDP_FIRST_NBYTES;
    }

    for (k = 0; k < d->desc.n; k++) {
        int dtype;

        i = order ? order[k] : d->desc.n - 1 - k;
        dtype = (int)d->grads[i].dtype;
        if (open[dtype] < 0) open[dtype] = count++;
        bucket_of[i] = open[dtype];
        nbytes[dtype] += idist__ddp_nbytes(&d->grads[i]);
        if (nbytes[dtype] < limits[dtype]) continue;

        open[dtype] = -1;
        nbytes[dtype] = 0;
        limits[dtype] = limit ? limit : IDIST__DDP_BUCKET_NBYTES;
    }

    return count;
}

// Returns true if a gradient can be reduced where it is. Compression and kernels need an aligned
// gradient.
static bool idist__ddp_bucket_can_view(const idist_ddp *d, const idist_tensor *gradient) {
    if (!gradient->data) return false;
    if (!d->desc.compression && !d->desc.on_device) return true;
    return (uintptr_t)gradient->data % idist_dtype_size(gradient->dtype) == 0;
}

// Returns true if buckets may be reduced in pieces (train/ddp/ddp_piece.h). The result is the same
// on all ranks.
static bool idist__ddp_bucket_may_split(const idist_ddp *d) {
    return !d->desc.hook && !d->desc.compression && !d->desc.find_unused && !d->desc.on_device;
}

// Finds the buckets whose gradients are contiguous in the program's memory, and the buckets whose
// gradients are scattered. Sets exposed.data to the memory of the first gradient.
static void idist__ddp_bucket_find_views(idist_ddp *d) {
    int b, i;

    for (b = 0; b < d->bucket_count; b++) {
        d->buckets[b].view = true;
        d->buckets[b].scattered = false;
        d->buckets[b].end = NULL;
    }

    for (i = 0; i < d->desc.n; i++) {
        const idist_tensor *gradient = &d->grads[i];
        idist__ddp_bucket *bucket = &d->buckets[d->param_states[i].bucket];
        char *data = (char *)gradient->data;

        if (!gradient->count) continue;
        if (!idist__ddp_bucket_can_view(d, gradient)) bucket->view = false;
        if (bucket->end && bucket->end != data) bucket->view = false;
        if (!data) continue;
        if (!bucket->end) bucket->exposed.data = data;
        bucket->end = data + idist__ddp_nbytes(gradient);
    }

    for (b = 0; b < d->bucket_count && idist__ddp_bucket_may_split(d); b++)
        d->buckets[b].scattered = !d->buckets[b].view && d->buckets[b].end;
}

// Returns true if a bucket needs a part of bucket_memory. A scattered bucket needs memory only for
// gradients for which the program provides none.
static bool idist__ddp_bucket_needs_memory(const idist_ddp *d, const idist__ddp_bucket *bucket) {
    int k;

    if (bucket->view || !bucket->scattered) return !bucket->view;

    for (k = 0; k < bucket->exposed.gradient_count; k++) {
        const idist_tensor *gradient = &d->grads[bucket->exposed.gradients[k]];

        if (gradient->count && !gradient->data) return true;
    }

    return false;
}

// Sets the place of each gradient in its bucket: in the program's memory, or in bucket_memory once
// bucket_memory is allocated. Returns the size that bucket_memory needs.
static size_t idist__ddp_bucket_place(idist_ddp *d) {
    size_t total = 0;
    int b, i;

    idist__ddp_bucket_find_views(d);

    for (b = 0; b < d->bucket_count; b++) {
        idist__ddp_bucket *bucket = &d->buckets[b];

        if (!bucket->view) bucket->exposed.data = NULL;

        if (idist__ddp_bucket_needs_memory(d, bucket)) {
            if (d->bucket_memory) bucket->exposed.data = (char *)d->bucket_memory + total;
            total += (idist__ddp_model_nbytes(bucket) + 63) / 64 * 64; // whole cache lines
        }

        bucket->end = (char *)bucket->exposed.data;
    }

    for (i = 0; i < d->desc.n; i++) {
        idist__ddp_param *param = &d->param_states[i];
        idist__ddp_bucket *bucket = &d->buckets[param->bucket];

        param->gradient = bucket->end;
        if (bucket->scattered && d->grads[i].data) param->gradient = d->grads[i].data;
        if (bucket->end) bucket->end += idist__ddp_nbytes(&d->grads[i]);
    }

    return total;
}

// Lists the gradients of each bucket.
static void idist__ddp_bucket_list(idist_ddp *d) {
    int b, i, k, listed = 0;

    for (b = 0; b < d->bucket_count; b++) {
        idist_bucket *exposed = &d->buckets[b].exposed;

        exposed->gradients = &d->bucket_gradients[listed];
        exposed->displs = &d->bucket_displs[listed];
        listed += exposed->gradient_count;
        exposed->gradient_count = 0; // counted again below
        exposed->count = 0;
    }

    for (i = 0; i < d->desc.n; i++) {
        idist_bucket *exposed = &d->buckets[d->param_states[i].bucket].exposed;

        k = (int)(exposed->gradients - d->bucket_gradients) + exposed->gradient_count++;
        d->bucket_gradients[k] = i;
        d->bucket_displs[k] = exposed->count;
        exposed->count += d->grads[i].count;
    }
}

// Makes bucket_count buckets, without memory. bucket_of[i] is the bucket of gradient i.
static void idist__ddp_bucket_group(idist_ddp *d, const int *bucket_of, int bucket_count) {
    int b, i;

    memset(d->buckets, 0, (size_t)bucket_count * sizeof *d->buckets);
    d->bucket_count = bucket_count;

    for (b = 0; b < bucket_count; b++) {
        d->buckets[b].exposed.index = b;
        d->launch_order[b] = b;
    }

    for (i = 0; i < d->desc.n; i++) {
        idist__ddp_bucket *bucket = &d->buckets[bucket_of[i]];

        d->param_states[i].bucket = bucket_of[i];
        bucket->exposed.dtype = d->grads[i].dtype;
        bucket->exposed.gradient_count++;
    }

    idist__ddp_bucket_list(d);
}

// Allocates the arrays that are kept per bucket or gradient, large enough for any grouping.
static idist_status idist__ddp_bucket_alloc(idist_ddp *d) {
    size_t n = (size_t)d->desc.n + 1;

    d->buckets = (idist__ddp_bucket *)calloc(n, sizeof *d->buckets);
    d->bucket_of = (int *)malloc(n * sizeof *d->bucket_of);
    d->bucket_gradients = (int *)malloc(n * sizeof *d->bucket_gradients);
    d->bucket_displs = (size_t *)malloc(n * sizeof *d->bucket_displs);
    d->launch_order = (int32_t *)malloc(n * sizeof *d->launch_order);
    d->arrival_order = (int32_t *)malloc(n * sizeof *d->arrival_order);
    d->in_pieces = (uint8_t *)calloc(n, 1);
    if (d->buckets && d->bucket_of && d->bucket_gradients && d->bucket_displs && d->launch_order &&
        d->arrival_order && d->in_pieces)
        return IDIST_OK;

    return idist__ddp_no_memory();
}

// Allocates one slot for each piece that can be in flight. A bucket that is contiguous on this rank
// may also be reduced in pieces, because it is scattered on another rank. Its pieces are counted
// too, because each takes an entry of d->slots, although it needs no memory. Sets in_pieces for the
// buckets that are scattered on this rank.
static idist_status idist__ddp_bucket_alloc_slots(idist_ddp *d) {
    size_t count = 0;
    bool any = false;
    void *memory = NULL;
    int b;
    idist_status status;

    for (b = 0; b < d->bucket_count; b++) {
        d->in_pieces[b] = d->buckets[b].scattered;
        any = any || d->buckets[b].scattered;
        count += idist__ddp_model_nbytes(&d->buckets[b]) / d->piece_nbytes + 1;
    }

    if (count > d->slot_limit) count = d->slot_limit;
    if (!any || count <= d->slot_count) return IDIST_OK;
    status = idist__tensor_memory_alloc(&d->reduction.memory, &memory, count * d->piece_nbytes);
    if (status != IDIST_OK) return status;

    idist__tensor_memory_free(&d->reduction.memory, d->slot_memory);
    d->slot_memory = (char *)memory;
    d->slot_count = count;

    return IDIST_OK;
}

// Forms the buckets and gives each gradient its place. Local.
static idist_status idist__ddp_bucket_form(idist_ddp *d) {
    size_t total;
    int i;
    idist_status status = idist__ddp_bucket_alloc(d);

    if (status != IDIST_OK) return status;
    idist__ddp_bucket_group(d, d->bucket_of, idist__ddp_bucket_assign(d, NULL, d->bucket_of));
    total = idist__ddp_bucket_place(d);

    if (total) {
        status = idist__tensor_memory_alloc(&d->reduction.memory, &d->bucket_memory, total);
        if (status != IDIST_OK) return status;
        idist__ddp_bucket_place(d);
    }

    for (i = 0; i < d->desc.n; i++) {
        const idist__ddp_param *param = &d->param_states[i];

        if (!d->grads[i].data) d->grads[i].data = param->gradient;
        if (d->grads[i].count && d->grads[i].data != param->gradient) d->copies = true;
    }

    return idist__ddp_bucket_alloc_slots(d);
}

// Returns true if gradients may move to other buckets. They may if any bucket is reduced in pieces.
// Otherwise gradients that are reduced in place would have to be copied. The result is the same on
// all ranks.
static bool idist__ddp_bucket_may_regroup(const idist_ddp *d) {
    int b;

    for (b = 0; b < d->bucket_count; b++)
        if (d->in_pieces[b]) return true;

    return false;
}

// Sets in_pieces on all ranks for the buckets that are scattered on any rank. Collective.
static idist_status idist__ddp_bucket_agree(idist_ddp *d) {
    idist_opts opts = idist__ddp_opts(d, false);

    if (!idist__ddp_bucket_may_split(d)) return IDIST_OK;
    return idist_all_reduce(d->in_pieces, d->in_pieces, (size_t)d->bucket_count, IDIST_U8,
                            IDIST_MAX, &opts);
}

// Forms buckets from gradients in the order of arrival, unless the buckets would stay the same.
// Gradients stay where they are. Called between iterations. Collective.
static idist_status idist__ddp_bucket_regroup(idist_ddp *d) {
    int i, count = idist__ddp_bucket_assign(d, d->arrival_order, d->bucket_of);
    bool changes = false;
    idist_status status;

    for (i = 0; i < d->desc.n; i++)
        changes = changes || d->bucket_of[i] != d->param_states[i].bucket;
    if (!changes) return IDIST_OK;

    idist__ddp_bucket_group(d, d->bucket_of, count);
    idist__ddp_bucket_place(d);
    status = idist__ddp_bucket_alloc_slots(d);

    return status == IDIST_OK ? idist__ddp_bucket_agree(d) : status;
}

//------------------------------------------------------------------------------
// calling the communication hook
//
// A hook computes with gradients, so it runs in a floating-point mode that is the same on all
// ranks. A hook of the program may throw an exception if the implementation is compiled as C++.
//------------------------------------------------------------------------------

typedef enum idist__ddp_stage { IDIST__DDP_START, IDIST__DDP_FINISH } idist__ddp_stage;

IDIST__NOINLINE static idist_status idist__ddp_hook_start(const idist_ddp *d,
                                                          idist_bucket *bucket) {
    uint32_t mode = idist__mode_enter();
    idist_status status = IDIST_ERR_CALLBACK;

    IDIST__TRY(status = d->hook.start(bucket, d->hook.arg));
    idist__mode_leave(mode);
    return idist__callback_threw("ddp", "the hook's start") ? IDIST_ERR_CALLBACK : status;
}

IDIST__NOINLINE static idist_status idist__ddp_hook_finish(const idist_ddp *d,
                                                           idist_bucket *bucket) {
    uint32_t mode = idist__mode_enter();
    idist_status status = IDIST_ERR_CALLBACK;

    IDIST__TRY(status = d->hook.finish(bucket, d->hook.arg));
    idist__mode_leave(mode);
    return idist__callback_threw("ddp", "the hook's finish") ? IDIST_ERR_CALLBACK : status;
}

// Frees a state of the hook. Ignores an exception that free_fn throws, because the state is no
// longer needed.
IDIST__NOINLINE static void idist__ddp_hook_free(const idist_ddp *d, void *state) {
    IDIST__TRY(d->hook.free_fn(state, d->hook.arg));
    idist__me.thrown[0] = 0;
}

// ---- train/ddp/ddp_piece.h -----------------------------------------------------------------------

// train/ddp/ddp_piece.h: buckets whose gradients are scattered in memory
//
// If such a bucket were copied as a whole, it would leave the caches before it is reduced, and
// again before it is copied back. The data would pass through memory three times instead of once.
// Therefore the bucket is reduced in pieces. If the group shares memory, a piece is reduced where
// its gradients are, unless these gradients are very small. Otherwise pieces are copied to a few
// slots that stay in the cache. A piece is copied into its slot when it is launched:
//
//     gradients    [    0    ]     [1]  [2]    [     3     ]
//     pieces       [  a  |  b        |  c        |    d    ]
//     slots        [ a ][ b ][ c ]     d is launched when a has been reduced and copied back
//
// idist_ddp_ready launches pieces while slots are free, and idist_ddp_wait launches the rest.
// Between hosts, idist_ddp_wait keeps several pieces in flight. Within a host it launches one piece
// after the other, because collectives in shared memory do not overlap, and requests would only
// cost time.
//
// A bucket that is scattered on one rank is reduced in pieces on all ranks, because all ranks make
// the same calls. A piece may be contiguous on a rank, for example because it is part of a single
// gradient. In that case the rank reduces the piece where it is, without a slot.
//
// Buckets are copied as a whole in these cases:
//
//     hook           it must see whole buckets
//     compression    its state belongs to a whole bucket
//     find_unused    only the end of the iteration tells whether a gradient changes
//     on_device      there are no pieces in device memory

// Copies the gradients of a piece to its slot, or from its slot if `back` is set. A rank without
// data writes zeros to the slot.
static void idist__ddp_piece_copy(const idist_ddp *d, const idist__ddp_piece *piece, bool back) {
    const idist_bucket *exposed = &piece->bucket->exposed;
    size_t first = piece->first, end = first + piece->exposed.count;
    size_t size = idist_dtype_size(exposed->dtype);
    char *slot = (char *)piece->exposed.data;
    int k;

    if (piece->in_place) return;

    for (k = piece->gradient; first < end; k++) {
        const idist_tensor *gradient = &d->grads[exposed->gradients[k]];
        size_t skipped = first - exposed->displs[k], count = gradient->count - skipped;
        char *data;

        if (!count) continue;
        if (count > end - first) count = end - first;
        data = (char *)gradient->data + skipped * size;

        if (back) memcpy(data, slot, count * size);
        else if (d->joining) memset(slot, 0, count * size);
        else memcpy(slot, data, count * size);

        first += count;
        slot += count * size;
    }
}

// Returns the address of a piece if its elements are contiguous in memory, or NULL otherwise. Also
// returns NULL for a scattered bucket on a rank without data, which needs memory for its zeros.
static void *idist__ddp_piece_find(const idist_ddp *d, const idist__ddp_piece *piece) {
    const idist_bucket *bucket = &piece->bucket->exposed;
    size_t size = idist_dtype_size(bucket->dtype), skipped, count;
    const idist_tensor *gradient;
    char *data, *end;
    int k = piece->gradient;

    if (!piece->bucket->scattered) return (char *)bucket->data + piece->first * size;
    if (d->joining) return NULL;

    while (!d->grads[bucket->gradients[k]].count) k++;
    gradient = &d->grads[bucket->gradients[k]];
    skipped = piece->first - bucket->displs[k];
    data = (char *)gradient->data + skipped * size;
    count = gradient->count - skipped;
    end = data + count * size;

    while (count < piece->exposed.count) {
        gradient = &d->grads[bucket->gradients[++k]];
        if (gradient->count && gradient->data != end) return NULL;
        count += gradient->count;
        end += gradient->count * size;
    }

    return data;
}

// Lists the parts of gradients in a piece. Returns the number of parts, or 0 if there are too many.
static int idist__ddp_piece_list(const idist_ddp *d, idist__ddp_piece *piece) {
    const idist_bucket *bucket = &piece->bucket->exposed;
    size_t size = idist_dtype_size(bucket->dtype), total = 0;
    int k, n = 0;

    for (k = piece->gradient; total < piece->exposed.count; k++) {
        const idist_tensor *gradient = &d->grads[bucket->gradients[k]];
        size_t skipped = n ? 0 : piece->first - bucket->displs[k],
               count = gradient->count - skipped;

        if (!count) continue;
        if (n == IDIST__DDP_PARTS) return 0;
        if (count > piece->exposed.count - total) count = piece->exposed.count - total;
        total += count;
        piece->parts[n].data = (char *)gradient->data + skipped * size;
        piece->parts[n++].end = total;
    }

    return n;
}

// If possible, starts to reduce a piece where its gradients are, and sets piece->in_place.
static idist_status idist__ddp_piece_start_parts(const idist_ddp *d, idist__ddp_piece *piece) {
    const idist_bucket *exposed = &piece->exposed;
    double prescale = d->desc.prescale != 0 ? d->desc.prescale : 1;
    int n;

    if (d->joining || prescale != 1 || d->reduction.postscale != 1) return IDIST_OK;
    n = idist__ddp_piece_list(d, piece);
    if (!n) return IDIST_OK;

    return idist__collective_all_reduce_parts(piece->parts, n, exposed->dtype, d->reduction.op,
                                              &exposed->opts, &piece->in_place);
}

// Launches the next piece of a bucket. If `alone` is set, no piece is in flight. In that case the
// call blocks, unless pieces overlap and another piece follows.
static idist_status idist__ddp_piece_start(idist_ddp *d, const idist__ddp_bucket *bucket,
                                           bool alone) {
    const idist_bucket *all = &bucket->exposed;
    size_t slot = d->started_pieces % d->slot_limit, left = all->count - d->next_first;
    size_t most = d->piece_nbytes / idist_dtype_size(all->dtype);
    double prescale = d->desc.prescale != 0 ? d->desc.prescale : 1;
    idist__ddp_piece *piece = &d->slots[slot];
    idist_bucket *exposed = &piece->exposed;
    idist_status status;

    piece->bucket = bucket;
    piece->first = d->next_first;
    piece->gradient = d->next_gradient;
    exposed->dtype = all->dtype;
    exposed->count = left < most ? left : most;
    exposed->opts = d->reduction.memory.opts;
    if (!alone || (d->pieces_overlap && left > most)) exposed->opts.request = &piece->request;
    exposed->data = idist__ddp_piece_find(d, piece);
    piece->in_place = exposed->data != NULL;
    status = piece->in_place ? IDIST_OK : idist__ddp_piece_start_parts(d, piece);

    if (exposed->data || !piece->in_place) {
        if (!exposed->data) exposed->data = d->slot_memory + slot * d->piece_nbytes;
        idist__ddp_piece_copy(d, piece, false);
        status = idist__tensor_memory_scale(&d->reduction.memory, exposed->data, exposed->count,
                                            exposed->dtype, prescale);
        if (status == IDIST_OK) status = idist__ddp_hook_start(d, exposed);
    }

    if (status != IDIST_OK) return status;

    d->started_pieces++;
    d->next_first += exposed->count;
    while (d->next_gradient < all->gradient_count - 1 &&
           all->displs[d->next_gradient + 1] <= d->next_first)
        d->next_gradient++;

    return IDIST_OK;
}

// Waits for the oldest piece in flight, finishes it and copies it back.
static idist_status idist__ddp_piece_finish(idist_ddp *d) {
    idist__ddp_piece *piece = &d->slots[d->finished_pieces++ % d->slot_limit];
    idist_status status = idist_wait(&piece->request);

    if (status == IDIST_OK) status = idist__ddp_hook_finish(d, &piece->exposed);
    if (status == IDIST_OK && !d->joining) idist__ddp_piece_copy(d, piece, true);

    return status;
}

// Finishes all pieces in flight.
static idist_status idist__ddp_piece_settle(idist_ddp *d) {
    idist_status status = IDIST_OK, piece_status;

    while (d->finished_pieces < d->started_pieces) {
        piece_status = idist__ddp_piece_finish(d);
        if (status == IDIST_OK) status = piece_status;
    }

    return status;
}

// Launches the remaining pieces of a bucket while slots are free. If `ending` is set, waits for
// slots to become free. In that case, if pieces do not overlap (d->pieces_overlap), launches one
// piece at a time, without a request.
static idist_status idist__ddp_piece_launch(idist_ddp *d, const idist__ddp_bucket *bucket,
                                            bool ending) {
    idist_status status = IDIST_OK;

    while (status == IDIST_OK && d->next_first < bucket->exposed.count) {
        size_t in_flight = d->started_pieces - d->finished_pieces;
        size_t limit = ending && !d->pieces_overlap ? 1 : d->slot_limit;
        idist_request *oldest = &d->slots[d->finished_pieces % d->slot_limit].request;
        bool done = ending;

        if (in_flight < limit) {
            status = idist__ddp_piece_start(d, bucket, ending && !in_flight);
            continue;
        }

        if (!ending) status = idist_test(oldest, &done);
        if (status != IDIST_OK) d->finished_pieces++; // there is nothing to copy back
        if (status != IDIST_OK || !done) return status;
        status = idist__ddp_piece_finish(d);
    }

    if (status != IDIST_OK) return status;
    d->next_first = 0;
    d->next_gradient = 0;
    d->launched_count++;

    return IDIST_OK;
}

// ---- train/ddp/ddp_launch.h ----------------------------------------------------------------------

// train/ddp/ddp_launch.h: from a ready gradient to a launched bucket

// Determines which ranks have data, and sets the factors that depend on their number. Collective.
static idist_status idist__ddp_launch_count_active(idist_ddp *d) {
    idist_opts opts = idist__ddp_opts(d, false);
    uint8_t mine = !d->joining;
    int rank;
    idist_status status = idist_all_gather(&mine, d->has_data, 1, IDIST_U8, &opts);

    if (status != IDIST_OK) return status;
    d->active_count = 0;

    for (rank = d->group_size; rank-- > 0;) {
        if (!d->has_data[rank]) continue;
        if (!d->active_count) d->last_active = rank;
        d->first_active = rank;
        d->active_count++;
    }

    if (d->active_count) idist__ddp_set_scale(d);

    return IDIST_OK;
}

// Makes the first calls of an iteration.
static idist_status idist__ddp_launch_first_calls(idist_ddp *d) {
    idist_opts opts = idist__ddp_opts(d, d->desc.on_device);
    idist_status status = IDIST_OK;

    status = idist__ddp_check_size(d);
    if (status == IDIST_OK && d->group_size == 1) status = idist__ddp_check_group(d);
    if (status != IDIST_OK) return status;

    d->begun = true;
    if (d->desc.uneven) status = idist__ddp_launch_count_active(d);
    if (status == IDIST_OK && d->active_count)
        status = idist__tensor_broadcast(d->buffers, d->desc.n_buffers, d->first_active, &opts);

    return idist__ddp_fail(d, status);
}

// Begins an iteration unless it has begun already.
static idist_status idist__ddp_launch_begin(idist_ddp *d) {
    if (idist__together_now.depth)
        return idist__fail(IDIST_ERR_STATE,
                           "%s: must not be called between group_begin and group_end", d->name);
    if (!d->begun) return idist__ddp_launch_first_calls(d);
    return d->status != IDIST_OK ? idist__fail(d->status, "%s", d->error) : IDIST_OK;
}

// Finishes all pieces in flight, and waits for the requests of all launched buckets.
static idist_status idist__ddp_launch_settle(idist_ddp *d) {
    idist_status status = idist__ddp_piece_settle(d), request_status;
    int b;

    for (b = 0; b < d->launched_count; b++) {
        idist_request *request = &idist__ddp_model_bucket(d, b)->request;

        if (!request->impl) continue;
        if (d->desc.on_device) request_status = idist_wait_stream(request, d->desc.stream);
        else request_status = idist_wait(request);
        if (status == IDIST_OK) status = request_status;
    }

    return status;
}

// Calls the hook's start or finish. A hook of the program may fail without setting an error text.
// Therefore this function first clears the text of any earlier failure.
static idist_status idist__ddp_launch_call_hook(idist_ddp *d, idist__ddp_stage stage,
                                                idist__ddp_bucket *bucket) {
    idist_status status;

    if (d->desc.hook) idist__me.text[0] = 0;
    if (stage == IDIST__DDP_START) status = idist__ddp_hook_start(d, &bucket->exposed);
    else status = idist__ddp_hook_finish(d, &bucket->exposed);
    if (status == IDIST_OK || idist__me.text[0]) return status;

    return idist__fail(status, "the hook's %s failed for bucket %d: %s",
                       stage == IDIST__DDP_START ? "start" : "finish", bucket->exposed.index,
                       idist_status_string(status));
}

// Launches one bucket as a whole.
static idist_status idist__ddp_launch_bucket(idist_ddp *d, idist__ddp_bucket *bucket,
                                             bool blocking) {
    double prescale = d->desc.prescale != 0 ? d->desc.prescale : 1;
    idist_bucket *exposed = &bucket->exposed;
    idist_status status = idist__tensor_memory_scale(&d->reduction.memory, exposed->data,
                                                     exposed->count, exposed->dtype, prescale);

    if (status != IDIST_OK) return status;
    exposed->scale = d->scale;
    exposed->opts = d->reduction.memory.opts;
    if (!blocking) exposed->opts.request = &bucket->request;
    d->launched_count++;

    return idist__ddp_launch_call_hook(d, IDIST__DDP_START, bucket);
}

// Launches the buckets that are full. Only idist_ddp_wait sets `ending`. Without `ending`, leaves
// the last bucket to idist_ddp_wait, because nothing is computed while that bucket is in flight. In
// idist_ddp_wait the rank has nothing else to do, so the built-in reduction makes blocking calls.
static idist_status idist__ddp_launch_full(idist_ddp *d, bool ending) {
    bool blocking = ending && !d->desc.hook && !d->desc.on_device;
    int limit = ending ? d->bucket_count : d->bucket_count - 1;
    idist_status status = d->status;

    if (status == IDIST_OK && blocking) status = idist__ddp_launch_settle(d);

    while (status == IDIST_OK && d->launched_count < limit) {
        int position = d->launched_count;
        idist__ddp_bucket *bucket = idist__ddp_model_bucket(d, position);

        if (!idist__ddp_is_full(bucket)) break;
        if (!d->next_first) bucket->launched_ns = idist_trace_on() ? idist__os_clock_now_ns() : 0;

        if (d->in_pieces[bucket->exposed.index])
            status = idist__ddp_piece_launch(d, bucket, ending);
        else status = idist__ddp_launch_bucket(d, bucket, blocking);
        if (d->launched_count == position) break; // no slot is free
    }

    return idist__ddp_fail(d, status);
}

// Marks a gradient as ready and copies it into its bucket.
static idist_status idist__ddp_launch_gather(idist_ddp *d, int i) {
    const idist_tensor *gradient = &d->grads[i];
    idist__ddp_param *param = &d->param_states[i];
    idist_status status;

    param->ready_iteration = d->iteration;
    if (!d->learnt) d->arrival_order[d->ready_count] = i;
    d->ready_count++;
    d->buckets[param->bucket].ready_count++;
    if (param->gradient == gradient->data) return IDIST_OK;
    status = idist__tensor_memory_copy(&d->reduction.memory, param->gradient, gradient->data,
                                       idist__ddp_nbytes(gradient));

    return idist__ddp_fail(d, status);
}

// ---- train/ddp/ddp_finish.h ----------------------------------------------------------------------

// train/ddp/ddp_finish.h: the end of an iteration
//
// idist_ddp_wait ends an iteration in three steps. First, gradients that are not ready become zeros
// or count as ready. Then the remaining buckets are launched. Finally, each result is finished and
// copied back.

// Sets d->used for the gradients that this rank has. Allocates memory for copies of the other
// gradients, if zeros will overwrite them in the program's memory.
static idist_status idist__ddp_finish_alloc_saved(idist_ddp *d) {
    const idist__memory *memory = &d->reduction.memory;
    size_t nbytes = 0;
    idist_status status;
    int i;

    for (i = 0; i < d->desc.n; i++) {
        d->used[i] = idist__ddp_is_ready(d, i);
        if (!d->used[i] && d->param_states[i].gradient == d->grads[i].data)
            nbytes += idist__ddp_nbytes(&d->grads[i]);
    }

    if (nbytes <= d->saved_nbytes) return IDIST_OK;
    idist__tensor_memory_free(memory, d->saved_grads);
    d->saved_nbytes = 0;
    status = idist__tensor_memory_alloc(memory, &d->saved_grads, nbytes);
    if (status == IDIST_OK) d->saved_nbytes = nbytes;

    return status;
}

// Overwrites the gradients that this rank does not have with zeros. Saves the gradients that are
// overwritten in the program's memory. Called with find_unused.
static idist_status idist__ddp_finish_fill(idist_ddp *d) {
    const idist__memory *memory = &d->reduction.memory;
    idist_status status = idist__ddp_finish_alloc_saved(d);
    char *saved = (char *)d->saved_grads;
    int i;

    if (status != IDIST_OK) return status;
    d->filled_with_zeros = true;

    for (i = 0; i < d->desc.n && status == IDIST_OK; i++) {
        void *gradient = d->param_states[i].gradient;
        size_t nbytes = idist__ddp_nbytes(&d->grads[i]);

        if (d->used[i] || !nbytes) continue;

        if (gradient == d->grads[i].data) {
            status = idist__tensor_memory_copy(memory, saved, gradient, nbytes);
            saved += nbytes;
        }

        if (status == IDIST_OK) status = idist__tensor_memory_copy(memory, gradient, NULL, nbytes);
    }

    return status;
}

// Copies the results to the program's gradients. Restores the old contents of a gradient that no
// rank had.
static idist_status idist__ddp_finish_scatter(idist_ddp *d) {
    const idist__memory *memory = &d->reduction.memory;
    const char *saved = (const char *)d->saved_grads;
    idist_status status = IDIST_OK;
    int i;

    if (d->results_stay || (!d->copies && !d->filled_with_zeros)) return IDIST_OK;

    for (i = 0; i < d->desc.n && status == IDIST_OK; i++) {
        const idist_tensor *gradient = &d->grads[i];
        const void *result = d->param_states[i].gradient;
        size_t nbytes = idist__ddp_nbytes(gradient);
        bool in_place = result == gradient->data;
        bool was_saved = d->filled_with_zeros && in_place && !idist__ddp_is_ready(d, i);

        if (!nbytes || (in_place && !was_saved)) continue;
        if (d->used[i]) status = idist__tensor_memory_copy(memory, gradient->data, result, nbytes);
        else if (was_saved)
            status = idist__tensor_memory_copy(memory, gradient->data, saved, nbytes);
        if (was_saved) saved += nbytes;
    }

    return status;
}

// Adds a bucket to the timeline, from its launch to its result.
static void idist__ddp_finish_trace(const idist__ddp_bucket *bucket) {
    char name[32], args[96];

    if (!idist_trace_on()) return;
    snprintf(name, sizeof name, "bucket %d", bucket->exposed.index);
    snprintf(args, sizeof args, "{\"gradients\":%d,\"bytes\":%zu}", bucket->exposed.gradient_count,
             idist__ddp_model_nbytes(bucket));
    idist_trace_span(name, "bucket", bucket->launched_ns, idist__os_clock_now_ns(), args);
}

// Waits for the launched buckets and finishes them. After a failure, only waits for them.
static idist_status idist__ddp_finish_buckets(idist_ddp *d) {
    idist_status settled = idist__ddp_launch_settle(d);
    idist_status status = d->status != IDIST_OK ? d->status : settled;
    int b;

    for (b = 0; b < d->launched_count && status == IDIST_OK; b++) {
        idist__ddp_bucket *bucket = idist__ddp_model_bucket(d, b);

        if (d->in_pieces[bucket->exposed.index]) { // finished piece by piece
            idist__ddp_finish_trace(bucket);
            continue;
        }

        bucket->exposed.opts.request = NULL;
        status = idist__ddp_launch_call_hook(d, IDIST__DDP_FINISH, bucket);
        idist__ddp_finish_trace(bucket);
    }

    return idist__ddp_fail(d, status);
}

static void idist__ddp_finish_reset(idist_ddp *d) {
    int b;

    for (b = 0; b < d->bucket_count; b++) d->buckets[b].ready_count = 0;
    d->iteration++;
    d->ready_count = 0;
    d->launched_count = 0;
    d->next_gradient = 0;
    d->next_first = 0;
    d->started_pieces = 0;
    d->finished_pieces = 0;
    d->filled_with_zeros = false;
    d->status = IDIST_OK;
    d->begun = false;
}

// Treats the gradients that are not ready as ready. With find_unused, these gradients contribute
// zero instead, unless they were ready in a pass with no_sync.
static idist_status idist__ddp_finish_gather(idist_ddp *d) {
    idist_status status = d->status;
    int i;

    if (d->joining) return status; // the buckets are zeroed already

    for (i = d->desc.n; i-- > 0 && status == IDIST_OK;) {
        bool counts = d->copies;

        if (d->desc.find_unused) counts = d->param_states[i].no_sync_iteration == d->iteration;
        if (counts && !idist__ddp_is_ready(d, i)) status = idist__ddp_launch_gather(d, i);
    }

    if (status == IDIST_OK && d->desc.find_unused)
        status = idist__ddp_fail(d, idist__ddp_finish_fill(d));

    return status;
}

// Sets launch_order to the order in which buckets became full.
static void idist__ddp_finish_reorder(idist_ddp *d) {
    int b, k, full = 0;

    for (b = 0; b < d->bucket_count; b++) d->buckets[b].ready_count = 0;

    for (k = 0; k < d->desc.n; k++) {
        idist__ddp_bucket *bucket = &d->buckets[d->param_states[d->arrival_order[k]].bucket];

        bucket->ready_count++;
        if (idist__ddp_is_full(bucket)) d->launch_order[full++] = bucket->exposed.index;
    }
}

// Sets arrival_order on all ranks to the order in which gradients became ready on the first rank
// with data. Gradients that became ready in idist_ddp_wait come last, in descending order.
// Collective.
static idist_status idist__ddp_finish_learn(idist_ddp *d) {
    idist_opts opts = idist__ddp_opts(d, false);
    int i, count = d->ready_count;

    for (i = 0; i < d->desc.n; i++) d->bucket_of[i] = -1; // not in arrival_order
    for (i = 0; i < d->ready_count; i++) d->bucket_of[d->arrival_order[i]] = 0;

    for (i = d->desc.n; i-- > 0;)
        if (d->bucket_of[i] < 0) d->arrival_order[count++] = i;

    return idist_broadcast(d->arrival_order, (size_t)d->desc.n, IDIST_I32, d->first_active, &opts);
}

// Makes buckets follow the order of arrival after the first iteration. With a hook, nothing
// changes, because the hook relies on bucket 0 being launched first. With find_unused, nothing
// changes, because the next iteration may use other parameters. Collective.
static idist_status idist__ddp_finish_follow(idist_ddp *d) {
    idist_status status;

    if (d->learnt || d->desc.hook || d->desc.find_unused || d->desc.n < 2) return IDIST_OK;
    d->learnt = true;
    status = idist__ddp_finish_learn(d);
    if (status != IDIST_OK) return status;
    if (idist__ddp_bucket_may_regroup(d)) return idist__ddp_bucket_regroup(d);
    idist__ddp_finish_reorder(d);

    return IDIST_OK;
}

// Ends an iteration.
static idist_status idist__ddp_finish(idist_ddp *d) {
    idist_opts opts = idist__ddp_opts(d, false);
    idist_status status = idist__ddp_finish_gather(d);
    int b;

    for (b = 0; b < d->bucket_count; b++)
        d->buckets[b].ready_count = d->buckets[b].exposed.gradient_count;
    if (status == IDIST_OK && d->group_size == 1)
        status = idist__ddp_fail(d, idist__ddp_check_group(d));
    if (status == IDIST_OK) status = idist__ddp_launch_full(d, true);

    if (status == IDIST_OK && d->desc.find_unused) {
        status = idist_all_reduce(d->used, d->used, (size_t)d->desc.n, IDIST_U8, IDIST_MAX, &opts);
        idist__ddp_fail(d, status);
    }

    status = idist__ddp_finish_buckets(d); // even after a failure, because it waits for requests
    if (status == IDIST_OK && !d->joining)
        status = idist__ddp_fail(d, idist__ddp_finish_scatter(d));
    if (status == IDIST_OK) status = idist__ddp_fail(d, idist__ddp_finish_follow(d));
    idist__ddp_finish_reset(d);

    return status;
}

// ---- train/ddp/ddp_step.h ------------------------------------------------------------------------

// train/ddp/ddp_step.h: the public functions of an iteration, and uneven inputs
//
// Functions: idist__ddp_step_*, idist__ddp_join_*.

//------------------------------------------------------------------------------
// the public functions of an iteration
//------------------------------------------------------------------------------

// Returns true if an iteration has begun that idist_ddp_wait must end. Without `uneven`, a forward
// pass alone, for example for validation, needs no idist_ddp_wait.
static bool idist__ddp_step_is_open(const idist_ddp *d) {
    return d->begun && (d->desc.uneven || d->ready_count);
}

idist_status idist_ddp_forward(idist_ddp *d) {
    if (!d) return idist__fail(IDIST_ERR_ARG, "ddp_forward: ddp is NULL");
    if (idist__ddp_step_is_open(d))
        return idist__fail(
            IDIST_ERR_STATE,
            "ddp_forward: the last iteration has not ended; call ddp_wait before this");
    if (d->begun && d->status != IDIST_OK) return idist__fail(d->status, "%s", d->error);

    d->begun = false;

    return d->no_sync ? IDIST_OK : idist__ddp_launch_begin(d);
}

idist_status idist_ddp_ready(idist_ddp *d, int i) {
    idist__ddp_bucket *bucket;
    idist_status status;

    if (!d) return idist__fail(IDIST_ERR_ARG, "ddp_ready: ddp is NULL");
    if (i < 0 || i >= d->desc.n)
        return idist__fail(IDIST_ERR_ARG, "%s_ready: there is no parameter %d of %d", d->name, i,
                           d->desc.n);

    if (d->no_sync) {
        d->param_states[i].no_sync_iteration = d->iteration;
        return IDIST_OK;
    }

    if (idist__ddp_is_ready(d, i))
        return idist__fail(
            IDIST_ERR_STATE,
            "%s_ready: gradient %d is ready already; call %s_wait to end the iteration", d->name, i,
            d->name);
    status = idist__ddp_launch_begin(d);
    if (status != IDIST_OK) return status;
    status = idist__ddp_launch_gather(d, i);
    if (status != IDIST_OK) return status;

    bucket = idist__ddp_model_bucket(d, d->launched_count);

    return idist__ddp_is_full(bucket) ? idist__ddp_launch_full(d, false) : IDIST_OK;
}

idist_status idist_ddp_wait(idist_ddp *d) {
    idist_status status;

    if (!d) return idist__fail(IDIST_ERR_ARG, "ddp_wait: ddp is NULL");
    if (d->no_sync) return IDIST_OK;
    status = idist__ddp_launch_begin(d);
    if (status != IDIST_OK && (!d->begun || idist__together_now.depth)) return status;

    // End the iteration even if it has failed.
    idist__tracer_begin("wait", d->results_stay ? "zero_wait" : "ddp_wait", NULL, NULL);

    return idist__tracer_end(idist__ddp_finish(d));
}

idist_status idist_ddp_no_sync(idist_ddp *d, bool on) {
    if (!d) return idist__fail(IDIST_ERR_ARG, "ddp_no_sync: ddp is NULL");
    if (idist__ddp_step_is_open(d))
        return idist__fail(IDIST_ERR_STATE,
                           "%s_no_sync: the last iteration has not ended; call %s_wait before this",
                           d->name, d->name);

    d->begun = false;
    d->no_sync = on;

    return IDIST_OK;
}

idist_status idist_auto_optim(idist_ddp *d, idist_task_fn step, void *arg) {
    idist_status status;
    int result;

    if (!d || !step) return idist__fail(IDIST_ERR_ARG, "auto_optim: ddp or step is NULL");
    if (d->no_sync) return IDIST_OK;
    status = idist_ddp_wait(d);
    if (status != IDIST_OK) return status;
    result = step(arg);
    if (result == 0) return IDIST_OK;

    return idist__fail(IDIST_ERR_CALLBACK, "auto_optim: the step of the optimizer failed with %d",
                       result);
}

//------------------------------------------------------------------------------
// ranks that have run out of data
//------------------------------------------------------------------------------

// Takes part in an iteration of the other ranks, with zeros.
static idist_status idist__ddp_join_iteration(idist_ddp *d) {
    idist_status status = IDIST_OK, finish_status;
    int b;

    for (b = 0; b < d->bucket_count && status == IDIST_OK; b++)
        status = idist__tensor_memory_copy(&d->reduction.memory, d->buckets[b].exposed.data, NULL,
                                           idist__ddp_model_nbytes(&d->buckets[b]));
    idist__ddp_fail(d, status);
    if (d->desc.find_unused) memset(d->used, 0, (size_t)d->desc.n);
    finish_status = idist__ddp_finish(d);

    return status == IDIST_OK ? finish_status : status;
}

// Takes part in the iterations of the other ranks until no rank has data.
static idist_status idist__ddp_join_others(idist_ddp *d) {
    idist_status status;

    d->joining = true;

    for (;;) {
        status = idist__ddp_launch_begin(d);
        if (status != IDIST_OK || !d->active_count) break;
        status = idist__ddp_join_iteration(d);
        if (status != IDIST_OK) break;
    }

    idist__ddp_finish_reset(d);
    d->joining = false;

    return status;
}

idist_status idist_ddp_join(idist_ddp *d, int *last) {
    idist_opts opts;
    idist_status status;

    if (!d) return idist__fail(IDIST_ERR_ARG, "ddp_join: ddp is NULL");
    if (!d->desc.uneven)
        return idist__fail(IDIST_ERR_STATE,
                           "ddp_join: uneven was not set in the desc of ddp_create");
    if (d->no_sync) return idist__fail(IDIST_ERR_STATE, "ddp_join: no_sync is on");
    if (d->begun)
        return idist__fail(IDIST_ERR_STATE,
                           "ddp_join: the last iteration has not ended; call ddp_wait before this");

    status = idist__ddp_join_others(d);
    d->active_count = d->group_size;
    d->first_active = 0;
    idist__ddp_set_scale(d);

    opts = idist__ddp_opts(d, d->desc.on_device);
    if (status == IDIST_OK)
        status = idist__tensor_broadcast(d->params, d->desc.n, d->last_active, &opts);
    if (status == IDIST_OK)
        status = idist__tensor_broadcast(d->buffers, d->desc.n_buffers, d->last_active, &opts);
    if (last) *last = d->last_active;
    if (status != IDIST_OK) return status;
    opts.stream = NULL;

    return idist__agree(status, &opts);
}

// ---- train/zero/zero_model.h ---------------------------------------------------------------------

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

// ---- train/zero/zero_create.h --------------------------------------------------------------------

// train/zero/zero_create.h: creates an idist_zero from a desc, and frees it

//------------------------------------------------------------------------------
// the communication hook of the ddp
//------------------------------------------------------------------------------

// Starts to average a bucket. Afterwards the range of this rank has the result.
static idist_status idist__zero_create_start(idist_bucket *bucket, void *arg) {
    const idist_zero *z = (const idist_zero *)arg;
    const idist__zero_bucket *own = &z->buckets[bucket->index];
    char *range = idist__zero_at(bucket, bucket->data, own->first);

    if (z->group_size == 1) return IDIST_OK; // the average over one rank is the bucket itself
    if (bucket->count % (size_t)z->group_size == 0) // NCCL has no reduce_scatterv
        return idist_reduce_scatter(bucket->data, range, own->counts[0], bucket->dtype, IDIST_AVG,
                                    &bucket->opts);

    return idist_reduce_scatterv(bucket->data, range, own->counts, bucket->dtype, IDIST_AVG,
                                 &bucket->opts);
}

// Converts the average of F16 and BF16 gradients to F32.
static idist_status idist__zero_create_finish(idist_bucket *bucket, void *arg) {
    const idist_zero *z = (const idist_zero *)arg;
    const idist__zero_bucket *own = &z->buckets[bucket->index];

    if (!idist__zero_is_narrow(bucket)) return IDIST_OK;

    return idist__zero_convert(z, bucket, idist__zero_at(bucket, bucket->data, own->first),
                               z->grads + own->offset, own->counts[z->rank], false);
}

//------------------------------------------------------------------------------
// creating
//------------------------------------------------------------------------------

// Checks that no parameter overlaps another one or a gradient in memory. Otherwise two ranks could
// update the same elements.
static idist_status idist__zero_create_check_overlap(const idist_zero_desc *desc) {
    int n = desc->n, count = desc->grads ? 2 * n : n, first, second;
    idist_tensor *all = (idist_tensor *)malloc(((size_t)count + 1) * sizeof *all);
    idist_status status;

    if (!all) return idist__fail(IDIST_ERR_NO_MEMORY, "zero_create: no memory");
    if (n) memcpy(all, desc->params, (size_t)n * sizeof *all);
    if (n && desc->grads) memcpy(all + n, desc->grads, (size_t)n * sizeof *all);
    status = idist__tensor_find_overlap("zero_create", all, count, &first, &second);
    free(all);

    if (status != IDIST_OK || first < 0) return status;
    if (first >= n)
        return idist__fail(IDIST_ERR_ARG, "zero_create: gradients %d and %d overlap in memory",
                           first - n, second - n);
    if (second >= n)
        return idist__fail(IDIST_ERR_ARG,
                           "zero_create: parameter %d and gradient %d overlap in memory", first,
                           second - n);

    return idist__fail(IDIST_ERR_ARG,
                       "zero_create: parameters %d and %d overlap in memory; list a parameter that "
                       "is used twice only once",
                       first, second);
}

static idist_status idist__zero_create_check(const idist_zero_desc *desc) {
    const char *name = "zero_create";
    int i;
    idist_status status = idist__tensor_check(name, "parameter", desc->params, desc->n, true);

    if (status == IDIST_OK && desc->grads)
        status = idist__tensor_check(name, "gradient", desc->grads, desc->n, false);
    if (status != IDIST_OK) return status;
    if (desc->n < 1)
        return idist__fail(IDIST_ERR_ARG, "%s: n must be positive, got %d parameters", name,
                           desc->n);
    if (desc->states < 0 || desc->states > IDIST__ZERO_STATES)
        return idist__fail(IDIST_ERR_ARG, "%s: states must be from 0 to %d, got %d", name,
                           IDIST__ZERO_STATES, desc->states);

    for (i = 0; i < desc->n; i++) {
        idist_dtype dtype = desc->params[i].dtype;

        if (dtype != IDIST_F32 && dtype != IDIST_F16 && dtype != IDIST_BF16)
            return idist__fail(IDIST_ERR_UNSUPPORTED,
                               "%s: parameters must be F32, F16 or BF16; parameter %d is %s", name,
                               i, idist_dtype_name(dtype));
        if (desc->grads && desc->grads[i].dtype != dtype)
            return idist__fail(IDIST_ERR_UNSUPPORTED,
                               "%s: parameter %d is %s, but its gradient is %s", name, i,
                               idist_dtype_name(dtype), idist_dtype_name(desc->grads[i].dtype));
        if (desc->grads && desc->grads[i].count != desc->params[i].count)
            return idist__fail(IDIST_ERR_ARG,
                               "%s: parameter %d has %zu elements, but its gradient has %zu", name,
                               i, desc->params[i].count, desc->grads[i].count);
    }

    return idist__zero_create_check_overlap(desc);
}

// Creates the ddp, whose hook uses `z` from the first iteration on. Collective.
static idist_status idist__zero_create_ddp(idist_zero *z, const idist_zero_desc *desc) {
    idist_ddp_hook hook;
    idist_ddp_desc ddp;
    idist_status status;

    memset(&hook, 0, sizeof hook);
    hook.start = idist__zero_create_start;
    hook.finish = idist__zero_create_finish;
    hook.arg = z;

    memset(&ddp, 0, sizeof ddp);
    ddp.params = desc->params;
    ddp.grads = desc->grads;
    ddp.n = desc->n;
    ddp.group = desc->group;
    ddp.bucket_nbytes = desc->bucket_nbytes;
    ddp.hook = &hook;
    ddp.on_device = desc->on_device;
    ddp.stream = desc->stream;
    ddp.timeout_ms = desc->timeout_ms;
    status = idist_ddp_create(&ddp, &z->ddp);
    if (status != IDIST_OK) return status;
    z->ddp->name = "zero";
    z->ddp->results_stay = true;

    return IDIST_OK;
}

// Returns the memory of a bucket's parameters if they lie there one after the other. Otherwise
// returns NULL.
static char *idist__zero_create_find_params(const idist_zero *z, const idist_bucket *bucket) {
    char *begin = NULL, *end = NULL;
    int k;

    for (k = 0; k < bucket->gradient_count; k++) {
        const idist_tensor *param = &z->ddp->params[bucket->gradients[k]];

        if (!param->count) continue;
        if (end && end != (char *)param->data) return NULL;
        if (!begin) begin = (char *)param->data;
        end = (char *)param->data + idist__ddp_nbytes(param);
    }

    return begin;
}

// Cuts a bucket into ranges, and counts the shards in the range of this rank.
static void idist__zero_create_ranges(idist_zero *z, int b) {
    const idist_bucket *bucket = idist__zero_exposed(z, b);
    idist__zero_bucket *own = &z->buckets[b];
    size_t end;
    int rank, k;

    own->counts = z->bucket_counts + (size_t)b * (size_t)z->group_size;
    for (rank = 0; rank < z->group_size; rank++)
        own->counts[rank] =
            idist__zero_begin(z, bucket, rank + 1) - idist__zero_begin(z, bucket, rank);

    own->param_memory = idist__zero_create_find_params(z, bucket);
    own->first = idist__zero_begin(z, bucket, z->rank);
    own->offset = z->shard_elements;
    own->first_shard = z->shard_count;
    end = own->first + own->counts[z->rank];
    if (idist__zero_is_narrow(bucket)) z->has_masters = true;

    for (k = 0; k < bucket->gradient_count; k++) {
        int param = bucket->gradients[k];
        size_t begin_k = bucket->displs[k], end_k = begin_k + z->ddp->params[param].count;

        z->shard_of[param] = -1;
        if (begin_k < own->first) begin_k = own->first;
        if (end_k > end) end_k = end;
        if (begin_k >= end_k) continue;

        z->shard_of[param] = z->shard_count;
        z->shards[z->shard_count].param = param;
        z->shards[z->shard_count].first = begin_k - bucket->displs[k];
        z->shards[z->shard_count++].count = end_k - begin_k;
    }

    own->shard_count = z->shard_count - own->first_shard;
    z->shard_elements += own->counts[z->rank];
}

// Sets the arrays of the shards of a bucket.
static void idist__zero_create_place(idist_zero *z, int b) {
    const idist_bucket *bucket = idist__zero_exposed(z, b);
    const idist__zero_bucket *own = &z->buckets[b];
    size_t offset = own->offset, total = z->shard_elements;
    float *states = z->memory + (z->has_masters ? 2 * total : 0);
    int s, j;

    for (s = own->first_shard; s < own->first_shard + own->shard_count; s++) {
        idist_shard *shard = &z->shards[s];
        size_t in_bucket = own->first + offset - own->offset;

        if (idist__zero_is_narrow(bucket)) {
            shard->weights = z->masters + offset;
            shard->grad = z->grads + offset;
        } else {
            shard->weights = (float *)z->ddp->params[shard->param].data + shard->first;
            shard->grad = (float *)bucket->data + in_bucket;
        }

        for (j = 0; j < z->states; j++) shard->states[j] = states + (size_t)j * total + offset;
        z->shard_grads[s].data = shard->grad;
        z->shard_grads[s].count = shard->count;
        z->shard_grads[s].dtype = IDIST_F32;
        offset += shard->count;
    }
}

// Sets the master weights of this rank to its parameters.
static idist_status idist__zero_create_masters(const idist_zero *z) {
    idist_status status = IDIST_OK;
    int s;

    for (s = 0; s < z->shard_count && status == IDIST_OK; s++) {
        const idist_shard *shard = &z->shards[s];
        const idist_tensor *param = &z->ddp->params[shard->param];
        const idist_bucket *bucket =
            idist__zero_exposed(z, z->ddp->param_states[shard->param].bucket);

        if (!idist__zero_is_narrow(bucket)) continue;
        status = idist__zero_convert(z, bucket, idist__zero_at(bucket, param->data, shard->first),
                                     shard->weights, shard->count, false);
    }

    return status;
}

// Allocates zeroed memory for the arrays of all shards.
static idist_status idist__zero_create_memory(idist_zero *z, size_t count) {
    const idist__memory *memory = &z->ddp->reduction.memory;
    void *data = NULL;
    idist_status status = IDIST_OK;

    if (memory->on_device)
        status = idist__tensor_memory_alloc(memory, &data, count * sizeof(float));
    else data = calloc(count, sizeof(float));
    z->memory = (float *)data;
    if (status != IDIST_OK || z->memory) return status;

    return idist__fail(IDIST_ERR_NO_MEMORY, "zero_create: no memory for %zu floats of state",
                       count);
}

static void idist__zero_create_free_memory(idist_zero *z) {
    if (!z->memory) return;
    if (z->ddp->desc.on_device) idist__tensor_memory_free(&z->ddp->reduction.memory, z->memory);
    else free(z->memory);
}

// Allocates the shards and their memory. Local.
static idist_status idist__zero_create_shards(idist_zero *z) {
    size_t ranks = (size_t)z->group_size, n = (size_t)z->ddp->desc.n, arrays;
    size_t bucket_count = (size_t)z->ddp->bucket_count;
    int b;
    idist_status status = IDIST_OK;

    z->buckets = (idist__zero_bucket *)calloc(bucket_count, sizeof *z->buckets);
    z->bucket_counts = (size_t *)malloc(bucket_count * ranks * sizeof *z->bucket_counts);
    z->param_counts = (size_t *)malloc(ranks * sizeof *z->param_counts);
    z->shards = (idist_shard *)calloc(n, sizeof *z->shards); // at most one per parameter
    z->shard_grads = (idist_tensor *)calloc(n, sizeof *z->shard_grads);
    z->shard_of = (int *)malloc(n * sizeof *z->shard_of);
    if (!z->buckets || !z->bucket_counts || !z->param_counts || !z->shards || !z->shard_grads ||
        !z->shard_of)
        return idist__fail(IDIST_ERR_NO_MEMORY, "zero_create: no memory");

    for (b = 0; b < z->ddp->bucket_count; b++) idist__zero_create_ranges(z, b);
    arrays = (size_t)z->states + (z->has_masters ? 2 : 0);
    if (z->shard_elements && arrays)
        status = idist__zero_create_memory(z, arrays * z->shard_elements);
    if (status != IDIST_OK) return status;

    if (z->has_masters) z->masters = z->memory;
    if (z->has_masters) z->grads = z->memory + z->shard_elements;
    for (b = 0; b < z->ddp->bucket_count; b++) idist__zero_create_place(z, b);

    return idist__zero_create_masters(z);
}

void idist_zero_free(idist_zero **zero) {
    idist_zero *z = zero ? *zero : NULL;

    if (!z) return;
    *zero = NULL;
    idist__zero_create_free_memory(z);
    idist_ddp_free(&z->ddp);
    free(z->buckets);
    free(z->bucket_counts);
    free(z->param_counts);
    free(z->shards);
    free(z->shard_grads);
    free(z->shard_of);
    free(z);
}

idist_status idist_zero_create(const idist_zero_desc *desc, idist_zero **zero) {
    idist__shape states;
    idist_opts opts, own_opts;
    idist_zero *z;
    idist_status status;

    if (zero) *zero = NULL;
    if (!desc || !zero) return idist__fail(IDIST_ERR_ARG, "zero_create: desc or zero is NULL");
    memset(&opts, 0, sizeof opts);
    opts.group = desc->group;
    opts.timeout_ms = desc->timeout_ms;
    status = idist__agree_enter("zero_create", &opts, &own_opts);
    if (status != IDIST_OK) return status;

    z = (idist_zero *)calloc(1, sizeof *z);
    status = z ? idist__zero_create_check(desc)
               : idist__fail(IDIST_ERR_NO_MEMORY, "zero_create: no memory");
    states = idist__shape_of_option("states", desc->states);
    status = idist__shape_agree("zero_create", &states, 1, 1, status, 0, &own_opts);

    if (status == IDIST_OK) {
        z->states = desc->states;
        z->group_size = idist_group_size(desc->group);
        z->rank = idist_group_rank(desc->group);
        status = idist__zero_create_ddp(z, desc);
        if (status == IDIST_OK) status = idist__agree(idist__zero_create_shards(z), &own_opts);
    }

    if (status != IDIST_OK) idist_zero_free(&z);
    *zero = z;

    return status;
}

// ---- train/zero/zero_step.h ----------------------------------------------------------------------

// train/zero/zero_step.h: the public functions of an iteration

void *idist_zero_grad(const idist_zero *z, int i) { return z ? idist_ddp_grad(z->ddp, i) : NULL; }

int idist_zero_shards(const idist_zero *z) { return z ? z->shard_count : 0; }

const idist_shard *idist_zero_shard(const idist_zero *z, int k) {
    return z && k >= 0 && k < z->shard_count ? &z->shards[k] : NULL;
}

const idist_tensor *idist_zero_shard_grads(const idist_zero *z) {
    return z ? z->shard_grads : NULL;
}

idist_status idist_zero_ready(idist_zero *z, int i) {
    if (!z) return idist__fail(IDIST_ERR_ARG, "zero_ready: zero is NULL");
    return idist_ddp_ready(z->ddp, i);
}

idist_status idist_zero_wait(idist_zero *z) {
    if (!z) return idist__fail(IDIST_ERR_ARG, "zero_wait: zero is NULL");
    return idist_ddp_wait(z->ddp);
}

idist_status idist_zero_no_sync(idist_zero *z, bool on) {
    if (!z) return idist__fail(IDIST_ERR_ARG, "zero_no_sync: zero is NULL");
    return idist_ddp_no_sync(z->ddp, on);
}

//------------------------------------------------------------------------------
// sending the updated parameters
//------------------------------------------------------------------------------

// Copies the weights of a shard to its place in `to`, the memory for all parameters of the bucket,
// and rounds master weights.
static idist_status idist__zero_step_pack(const idist_zero *z, const idist_bucket *bucket,
                                          const idist_shard *shard, size_t in_bucket, char *to) {
    char *at = idist__zero_at(bucket, to, in_bucket);

    if (idist__zero_is_narrow(bucket))
        return idist__zero_convert(z, bucket, at, shard->weights, shard->count, true);

    return idist__tensor_memory_copy(&z->ddp->reduction.memory, at, shard->weights,
                                     shard->count * sizeof(float));
}

// Copies all parameters of a bucket from the memory of their gradients to their own memory.
static idist_status idist__zero_step_unpack(const idist_zero *z, const idist_bucket *bucket) {
    idist_status status = IDIST_OK;
    int k;

    for (k = 0; k < bucket->gradient_count && status == IDIST_OK; k++) {
        const idist_tensor *param = &z->ddp->params[bucket->gradients[k]];

        status = idist__tensor_memory_copy(&z->ddp->reduction.memory, param->data,
                                           idist__zero_at(bucket, bucket->data, bucket->displs[k]),
                                           idist__ddp_nbytes(param));
    }

    return status;
}

// Copies the weights of a bucket's shards to the parameters of all ranks. Collective.
static idist_status idist__zero_step_gather(const idist_zero *z, int b, const idist_opts *opts) {
    const idist_bucket *bucket = idist__zero_exposed(z, b);
    const idist__zero_bucket *own = &z->buckets[b];
    char *to = own->param_memory ? own->param_memory : (char *)bucket->data;
    char *range = idist__zero_at(bucket, to, own->first);
    size_t in_bucket = own->first;
    int s;
    idist_status status = IDIST_OK;

    for (s = own->first_shard; s < own->first_shard + own->shard_count; s++) {
        if (status == IDIST_OK)
            status = idist__zero_step_pack(z, bucket, &z->shards[s], in_bucket, to);
        in_bucket += z->shards[s].count;
    }

    if (status != IDIST_OK) return idist__agree_break("zero_gather", z->ddp->desc.group, status);
    if (z->group_size == 1) status = IDIST_OK; // all weights are there already
    else if (bucket->count % (size_t)z->group_size == 0)
        status = idist_all_gather(range, to, own->counts[0], bucket->dtype, opts);
    else
        status = idist_all_gatherv(range, own->counts[z->rank], to, own->counts, NULL,
                                   bucket->dtype, opts);

    if (status != IDIST_OK || own->param_memory) return status;
    return idist__zero_step_unpack(z, bucket);
}

idist_status idist_zero_gather(idist_zero *z) {
    idist_opts opts;
    int b;
    idist_status status;

    if (!z) return idist__fail(IDIST_ERR_ARG, "zero_gather: zero is NULL");
    if (idist__ddp_step_is_open(z->ddp))
        return idist__fail(IDIST_ERR_STATE,
                           "zero_gather: gradients are ready; call zero_wait before this");
    opts = idist__ddp_opts(z->ddp, z->ddp->desc.on_device);
    status = idist__ddp_check_size(z->ddp);
    if (status == IDIST_OK) status = idist__ddp_check_group(z->ddp);

    for (b = 0; b < z->ddp->bucket_count && status == IDIST_OK; b++)
        status = idist__zero_step_gather(z, b, &opts);

    return status;
}

// ---- train/zero/zero_state.h ---------------------------------------------------------------------

// train/zero/zero_state.h: the state of all ranks on one rank, for checkpoints
//
// Functions: idist__zero_state_*.

int idist_zero_state_count(const idist_zero *z) {
    return z ? z->states + (z->has_masters ? 1 : 0) : 0;
}

// Checks the tensors on root, and that this rank can make the calls. All ranks get the same status.
// Collective.
static idist_status idist__zero_state_check(const idist_zero *z, const char *name,
                                            const idist_tensor *states, int root,
                                            idist_opts *opts) {
    int count = idist_zero_state_count(z), k;
    idist_opts given;
    idist_status status;

    if (!z) return idist__fail(IDIST_ERR_ARG, "%s: zero is NULL", name);
    given = idist__ddp_opts(z->ddp, false);
    status = idist__agree_enter(name, &given, opts);
    if (status != IDIST_OK) return status;

    status = idist__ddp_check_size(z->ddp);
    if (status != IDIST_OK) return idist__agree(status, opts);
    if (idist__ddp_step_is_open(z->ddp))
        status = idist__fail(IDIST_ERR_STATE, "%s: gradients are ready; call zero_wait before this",
                             name);
    else if (root < 0 || root >= z->group_size)
        status = idist__fail(IDIST_ERR_ARG, "%s: root %d is not a rank of a group of %d", name,
                             root, z->group_size);
    else if (z->rank == root && count)
        status = idist__tensor_check(name, "state", states, count * z->ddp->desc.n, true);

    for (k = 0; z->rank == root && status == IDIST_OK && k < count * z->ddp->desc.n; k++) {
        size_t wanted = z->ddp->params[k % z->ddp->desc.n].count;

        if (states[k].dtype != IDIST_F32 || states[k].count != wanted)
            status = idist__fail(IDIST_ERR_ARG, "%s: state %d is %s x %zu, not F32 x %zu", name, k,
                                 idist_dtype_name(states[k].dtype), states[k].count, wanted);
    }

    return idist__agree(status, opts);
}

// Returns array j of a shard: state j, or the weights after the last state.
static float *idist__zero_state_of(const idist_zero *z, int j, int param) {
    int s = z->shard_of[param];

    if (s < 0) return NULL;
    return j < z->states ? z->shards[s].states[j] : z->shards[s].weights;
}

// Sets z->param_counts to the number of elements of a parameter in the shard of each rank.
static void idist__zero_state_count_elements(const idist_zero *z, int param) {
    const idist_bucket *bucket = idist__zero_exposed(z, z->ddp->param_states[param].bucket);
    size_t first = 0, end;
    int rank, k = 0;

    while (bucket->gradients[k] != param) k++;
    first = bucket->displs[k];
    end = first + z->ddp->params[param].count;

    for (rank = 0; rank < z->group_size; rank++) {
        size_t from = idist__zero_begin(z, bucket, rank);
        size_t to = idist__zero_begin(z, bucket, rank + 1);

        if (from < first) from = first;
        if (to > end) to = end;
        z->param_counts[rank] = from < to ? to - from : 0;
    }
}

// Returns true if array j of a parameter has values that only the shards have. The last array of an
// F32 parameter, which has no master weights, has not: it is a copy of the parameter.
static bool idist__zero_state_is_own(const idist_zero *z, int j, int param) {
    return j < z->states || z->ddp->params[param].dtype != IDIST_F32;
}

// Gathers array j of a parameter on root, or scatters the array from root. Collective.
static idist_status idist__zero_state_move(const idist_zero *z, const idist_tensor *states, int j,
                                           int param, int root, bool gather) {
    idist_opts opts = idist__ddp_opts(z->ddp, z->ddp->desc.on_device);
    float *own = idist__zero_state_of(z, j, param);
    void *all = z->rank == root ? states[j * z->ddp->desc.n + param].data : NULL;
    size_t count;

    idist__zero_state_count_elements(z, param);
    count = z->param_counts[z->rank];
    if (gather)
        return idist_gatherv(own, count, all, z->param_counts, NULL, IDIST_F32, root, &opts);

    return idist_scatterv(all, z->param_counts, NULL, own, count, IDIST_F32, root, &opts);
}

static idist_status idist__zero_state_move_all(const idist_zero *z, const idist_tensor *states,
                                               int root, bool gather) {
    int j, param;
    idist_status status = IDIST_OK;

    for (j = 0; j < idist_zero_state_count(z); j++)
        for (param = 0; param < z->ddp->desc.n && status == IDIST_OK; param++)
            if (gather || idist__zero_state_is_own(z, j, param))
                status = idist__zero_state_move(z, states, j, param, root, gather);
    if (status == IDIST_OK) return IDIST_OK;

    return idist__agree_break("zero", z->ddp->desc.group, status); // other ranks may wait
}

idist_status idist_zero_get_state(idist_zero *z, const idist_tensor *states, int root) {
    idist_opts opts;
    idist_status status = idist__zero_state_check(z, "zero_get_state", states, root, &opts);

    return status == IDIST_OK ? idist__zero_state_move_all(z, states, root, true) : status;
}

idist_status idist_zero_set_state(idist_zero *z, const idist_tensor *states, int root) {
    idist_opts opts;
    idist_status status = idist__zero_state_check(z, "zero_set_state", states, root, &opts);

    if (status != IDIST_OK) return status;
    opts = idist__ddp_opts(z->ddp, z->ddp->desc.on_device);
    status = idist__tensor_broadcast(z->ddp->params, z->ddp->desc.n, root, &opts);
    if (status == IDIST_OK) status = idist__zero_state_move_all(z, states, root, false);
    if (status != IDIST_OK || !z->has_masters) return status;

    return idist_zero_gather(z); // the parameters become the rounded master weights
}

// ---- train/ddp/ddp_create.h ----------------------------------------------------------------------

// train/ddp/ddp_create.h: creates a ddp from a desc, and frees it
//
//     idist__ddp_create_copy         copies the caller's lists
//     idist__ddp_create_check        checks the lists and the desc
//     idist__ddp_bucket_form         forms the buckets
//     idist__ddp_create_set_hook     chooses the hook, and allocates the state of a compression
//     idist__ddp_create_agree        collective: compares arguments, and fails if any rank failed
//     idist__ddp_bucket_agree        collective: agrees on the buckets that are reduced in pieces
//     idist__ddp_create_broadcast    collective: copies rank 0's parameters and buffers to all

// Starts the built-in reduction of a bucket. This is the `start` function of the hook that does not
// compress.
static idist_status idist__ddp_create_start(idist_bucket *b, void *arg) {
    const idist__reduction *reduction = (const idist__reduction *)arg;

    if (reduction->group_size == 1) return IDIST_OK; // the sum over one rank is the bucket itself
    return idist_all_reduce(b->data, b->data, b->count, b->dtype, reduction->op, &b->opts);
}

static idist_status idist__ddp_create_finish(idist_bucket *b, void *arg) {
    const idist__reduction *reduction = (const idist__reduction *)arg;

    return idist__tensor_memory_scale(&reduction->memory, b->data, b->count, b->dtype,
                                      reduction->postscale);
}

// The hooks on the host, indexed by idist_compression. An entry without functions is not a valid
// compression.
static const idist_ddp_hook idist__ddp_host_hooks[] = {
    {idist__ddp_create_start, idist__ddp_create_finish, NULL, NULL},
    {idist__half_start, idist__half_finish, idist__compress_free, NULL},
    {idist__half_start, idist__half_finish, idist__compress_free, NULL},
    {NULL, NULL, NULL, NULL},
    {idist__powersgd_start, idist__powersgd_finish, idist__powersgd_free, NULL},
};

#ifdef IDIST_NCCL_H
static const idist_ddp_hook idist__ddp_device_hooks[] = {
    {idist__ddp_create_start, idist__ddp_create_finish, NULL, NULL},
    {idist__on_device_half_start, idist__on_device_half_finish, idist__compress_free, NULL},
    {idist__on_device_half_start, idist__on_device_half_finish, idist__compress_free, NULL},
};
#endif

static bool idist__ddp_create_has_factors(const idist_ddp_desc *desc) {
    if (desc->prescale != 0 && desc->prescale != 1) return true;
    if (desc->postscale != 0 && desc->postscale != 1) return true;
    return desc->divide_by_active;
}

// Allocates the state that a compression needs for each bucket. Local.
static idist_status idist__ddp_create_compression(idist_ddp *d) {
    idist_status status = IDIST_OK;
    int b;

    for (b = 0; b < d->bucket_count && status == IDIST_OK; b++) {
        idist_bucket *exposed = &d->buckets[b].exposed;

        if (d->desc.compression == IDIST_COMPRESS_POWERSGD)
            status = idist__powersgd_alloc(&d->reduction, exposed);
        else status = idist__compress_alloc(&d->reduction, exposed);
    }

    return status;
}

// Chooses the hook and allocates the state of a compression. Local.
static idist_status idist__ddp_create_set_hook(idist_ddp *d) {
    const idist_ddp_desc *desc = &d->desc;
    idist_status status = IDIST_OK;

    if (desc->on_device) // kernels compress and scale
        status =
            IDIST__OWN(idist__own_ready("ddp_create", &d->reduction.memory.opts,
                                        desc->compression || idist__ddp_create_has_factors(desc)));

    d->reduction.wire = desc->compression == IDIST_COMPRESS_F16 ? IDIST_F16 : IDIST_BF16;
    d->hook = idist__ddp_host_hooks[desc->compression];
#ifdef IDIST_NCCL_H
    if (desc->on_device) d->hook = idist__ddp_device_hooks[desc->compression];
#endif
    d->hook.arg = &d->reduction;
    if (desc->hook) d->hook = *desc->hook;
    if (status == IDIST_OK && desc->compression) status = idist__ddp_create_compression(d);

    return status;
}

static idist_status idist__ddp_create_check_gradient(const idist_ddp_desc *desc,
                                                     const idist_tensor *gradient, int i) {
    bool float_or_double = gradient->dtype == IDIST_F32 || gradient->dtype == IDIST_F64;
    bool can_scale = idist__dtype_is_float(gradient->dtype);

    if (!idist__dtype_is_builtin(gradient->dtype) || idist__dtype_is_pair(gradient->dtype))
        return idist__fail(IDIST_ERR_UNSUPPORTED,
                           "ddp_create: gradient %d is %s, which cannot be summed", i,
                           idist_dtype_name(gradient->dtype));
    if (gradient->count != desc->params[i].count)
        return idist__fail(IDIST_ERR_ARG,
                           "ddp_create: parameter %d has %zu elements, but its gradient has %zu", i,
                           desc->params[i].count, gradient->count);

    if (desc->on_device) {
        float_or_double = gradient->dtype == IDIST_F32;
        if (idist__dtype_is_narrow(gradient->dtype) && idist_dtype_size(gradient->dtype) == 1)
            can_scale = false;
    }

    if (desc->compression && !float_or_double)
        return idist__fail(IDIST_ERR_UNSUPPORTED,
                           "ddp_create: compression needs %s; gradient %d is %s",
                           desc->on_device ? "F32 on the device" : "F32 or F64", i,
                           idist_dtype_name(gradient->dtype));
    if (idist__ddp_create_has_factors(desc) && !can_scale)
        return idist__fail(IDIST_ERR_UNSUPPORTED,
                           "ddp_create: factors need F16, BF16, F32 or F64%s; gradient %d is %s",
                           desc->on_device ? " on the device" : " or 8-bit floats", i,
                           idist_dtype_name(gradient->dtype));

    return IDIST_OK;
}

static idist_status idist__ddp_create_check_lists(const idist_ddp_desc *desc) {
    const char *name = "ddp_create";
    char a[IDIST__NUMBER_NBYTES], b[IDIST__NUMBER_NBYTES];
    idist_status status;

    if (desc->n < 1)
        return idist__fail(IDIST_ERR_ARG, "ddp_create: n must be positive, got %d parameters",
                           desc->n);
    if (desc->prescale - desc->prescale != 0 || desc->postscale - desc->postscale != 0)
        return idist__fail(IDIST_ERR_ARG,
                           "ddp_create: prescale and postscale must be finite, got %s and %s",
                           idist__number_print(a, desc->prescale, 6),
                           idist__number_print(b, desc->postscale, 6));

    status = idist__tensor_check(name, "parameter", desc->params, desc->n, true);
    if (status == IDIST_OK && desc->grads)
        status = idist__tensor_check(name, "gradient", desc->grads, desc->n, false);
    if (status == IDIST_OK)
        status = idist__tensor_check(name, "buffer", desc->buffers, desc->n_buffers, true);

    return status;
}

static idist_status idist__ddp_create_check_powersgd(const idist_ddp_desc *desc) {
    int i;
    idist_status status;

    if (desc->compression != IDIST_COMPRESS_POWERSGD) {
        if (!desc->powersgd) return IDIST_OK;
        return idist__fail(IDIST_ERR_ARG, "ddp_create: powersgd is set, but compression is not "
                                          "IDIST_COMPRESS_POWERSGD");
    }

    if (desc->find_unused || desc->on_device)
        return idist__fail(IDIST_ERR_UNSUPPORTED, "ddp_create: PowerSGD cannot be combined with %s",
                           desc->find_unused ? "find_unused" : "on_device");
    if (!desc->powersgd) return IDIST_OK;
    status = idist__powersgd_check(desc->powersgd);

    for (i = 0; i < desc->n && desc->powersgd->rows && status == IDIST_OK; i++) {
        size_t rows = desc->powersgd->rows[i], count = desc->params[i].count;

        if (rows && count % rows)
            status = idist__fail(
                IDIST_ERR_ARG,
                "ddp_create: the %zu elements of gradient %d do not divide into %zu rows", count, i,
                rows);
    }

    return status;
}

// Checks that gradients do not overlap in memory. Overlapping gradients, for example of tied
// weights, would be summed more than once.
static idist_status idist__ddp_create_check_overlap(const idist_ddp *d) {
    int first, second;
    idist_status status =
        idist__tensor_find_overlap("ddp_create", d->grads, d->desc.n, &first, &second);

    if (status != IDIST_OK || first < 0) return status;

    return idist__fail(
        IDIST_ERR_ARG,
        "ddp_create: gradients %d and %d overlap in memory; list a parameter that is "
        "used twice only once",
        first, second);
}

// Checks that no gradient is in device memory unless on_device is set. Without on_device, the host
// itself copies gradients that are not contiguous, so they must be in host memory. The check works
// only if idist_nccl.h was included before idist_train.h.
static idist_status idist__ddp_create_check_device(const idist_ddp *d) {
    int i;

    for (i = 0; i < d->desc.n && !d->desc.on_device; i++) {
        bool on_device;
        idist_status status =
            idist__tensor_memory_on_device(&d->reduction.memory, d->grads[i].data, &on_device);

        if (status != IDIST_OK) return status;
        if (!on_device) continue;
        return idist__fail(IDIST_ERR_ARG,
                           "ddp_create: gradient %d is in device memory: set on_device, or give "
                           "host memory",
                           i);
    }

    return IDIST_OK;
}

// Checks the desc and its lists. Local.
static idist_status idist__ddp_create_check(const idist_ddp *d) {
    const idist_ddp_desc *desc = &d->desc;
    size_t total = 0;
    int i;
    idist_status status = idist__ddp_create_check_lists(desc);

    if (status != IDIST_OK) return status;
    if (desc->compression && desc->hook)
        return idist__fail(IDIST_ERR_ARG, "ddp_create: compression and a hook cannot be combined");
    if ((unsigned)desc->compression > IDIST_COMPRESS_POWERSGD ||
        !idist__ddp_host_hooks[desc->compression].start)
        return idist__fail(IDIST_ERR_ARG, "ddp_create: invalid compression %d",
                           (int)desc->compression);
    status = idist__ddp_create_check_powersgd(desc);
    if (status != IDIST_OK) return status;
    if (desc->hook && (!desc->hook->start || !desc->hook->finish))
        return idist__fail(IDIST_ERR_ARG, "ddp_create: the hook's start or finish is NULL");

    for (i = 0; i < desc->n; i++) {
        total += idist__ddp_nbytes(&d->grads[i]);
        if (total > SIZE_MAX / 4)
            return idist__fail(IDIST_ERR_ARG,
                               "ddp_create: gradients 0 to %d together exceed the address space",
                               i);
        status = idist__ddp_create_check_gradient(desc, &d->grads[i], i);
        if (status != IDIST_OK) return status;
    }

    status = idist__ddp_create_check_overlap(d);
    return status == IDIST_OK ? idist__ddp_create_check_device(d) : status;
}

// Copies the caller's lists, which have not been checked yet. Allocates the arrays that have one
// element per list entry, and has_data, which has one per rank.
static idist_status idist__ddp_create_copy(idist_ddp *d) {
    const idist_ddp_desc *desc = &d->desc;
    size_t n = desc->n > 0 ? (size_t)desc->n : 0, i;
    size_t buffer_count = desc->n_buffers > 0 ? (size_t)desc->n_buffers : 0;

    d->params = (idist_tensor *)calloc(n + 1, sizeof *d->params);
    d->grads = (idist_tensor *)calloc(n + 1, sizeof *d->grads);
    d->buffers = (idist_tensor *)calloc(buffer_count + 1, sizeof *d->buffers);
    d->param_states = (idist__ddp_param *)calloc(n + 1, sizeof *d->param_states);
    d->used = (uint8_t *)malloc(n + 1);
    d->has_data = (uint8_t *)calloc((size_t)d->group_size, 1);
    if (!d->params || !d->grads || !d->buffers || !d->param_states || !d->used || !d->has_data)
        return idist__ddp_no_memory();
    memset(d->used, 1, n + 1);

    for (i = 0; i < n && desc->params; i++) {
        d->params[i] = desc->params[i];
        d->grads[i] = desc->params[i];
        d->grads[i].data = NULL;
        if (desc->grads) d->grads[i] = desc->grads[i];
    }

    for (i = 0; i < buffer_count && desc->buffers; i++) d->buffers[i] = desc->buffers[i];

    return IDIST_OK;
}

// Chooses the number and size of pieces in flight. The choice is the same on all ranks.
static void idist__ddp_create_set_pieces(idist_ddp *d) {
    const idist_group *group = d->desc.group;
    const idist__world *world = group ? group->w : idist__world_default();
    bool one_host = !world || world->nnodes == 1;

    d->slot_limit = one_host ? IDIST__DDP_SLOTS_NEAR : IDIST__DDP_SLOTS;
    d->pieces_overlap = !one_host || !world || !world->backend->takes_parts;
    d->piece_nbytes = one_host ? IDIST__DDP_PIECE_NEAR_NBYTES : IDIST__DDP_PIECE_NBYTES;
}

// Number of options that must be equal on all ranks.
enum { IDIST__DDP_OPTIONS = 13 };

static void idist__ddp_create_options(const idist_ddp_desc *desc, idist__shape *shapes) {
    double postscale = desc->postscale != 0 ? desc->postscale : 1;
    int64_t bits;
    int i = 0;

    memcpy(&bits, &postscale, sizeof bits);
    shapes[i++] = idist__shape_of_option("number of parameters", desc->n);
    shapes[i++] = idist__shape_of_option("number of buffers", desc->n_buffers);
    shapes[i++] = idist__shape_of_option("bucket_nbytes", (int64_t)desc->bucket_nbytes);
    shapes[i++] = idist__shape_of_option("compression", desc->compression);
    shapes[i] = idist__shape_of_option("postscale", bits);
    shapes[i++].dtype = IDIST__SHAPE_REAL;
    shapes[i++] = idist__shape_of_option("sum", desc->sum);
    shapes[i++] = idist__shape_of_option("keep_params", desc->keep_params);
    shapes[i++] = idist__shape_of_option("find_unused", desc->find_unused);
    shapes[i++] = idist__shape_of_option("uneven", desc->uneven);
    shapes[i++] = idist__shape_of_option("divide_by_active", desc->divide_by_active);
    shapes[i++] = idist__shape_of_option("on_device", desc->on_device);
    shapes[i++] = idist__shape_of_option("powersgd (a checksum over its options)",
                                         idist__powersgd_digest(desc->powersgd, desc->n));
    shapes[i] = idist__shape_of_option("hook", desc->hook != NULL);
}

// Checks that all ranks have the same arguments, and that no rank has failed so far. Collective.
static idist_status idist__ddp_create_agree(const idist_ddp *d, idist_status mine) {
    int n = d->desc.n, buffer_count = d->desc.n_buffers, count = 0;
    idist_opts opts = idist__ddp_opts(d, false);
    idist__shape *shapes = NULL, *next;
    idist_status status;

    if (mine == IDIST_OK) {
        count = IDIST__DDP_OPTIONS + 2 * n + buffer_count;
        shapes = (idist__shape *)calloc((size_t)count, sizeof *shapes);
        if (!shapes) mine = idist__ddp_no_memory();
    }

    if (shapes) {
        idist__ddp_create_options(&d->desc, shapes);
        next = shapes + IDIST__DDP_OPTIONS;
        idist__shape_of_tensors(next, "parameter", d->params, n);
        idist__shape_of_tensors(next + n, "gradient", d->grads, n);
        idist__shape_of_tensors(next + 2 * n, "buffer", d->buffers, buffer_count);
    }

    status = idist__shape_agree("ddp_create", shapes, IDIST__DDP_OPTIONS, count, mine, 0, &opts);
    free(shapes);

    return status;
}

// Copies the parameters and buffers of rank 0 to all ranks. Collective.
static idist_status idist__ddp_create_broadcast(const idist_ddp *d) {
    idist_opts opts = idist__ddp_opts(d, d->desc.on_device);
    idist_status status = IDIST_OK;

    if (!d->desc.keep_params) status = idist__tensor_broadcast(d->params, d->desc.n, 0, &opts);
    if (status == IDIST_OK && !d->desc.keep_params)
        status = idist__tensor_broadcast(d->buffers, d->desc.n_buffers, 0, &opts);
    if (status != IDIST_OK) return status;
    opts.stream = NULL;

    return idist__agree(status, &opts);
}

// Returns true if this rank copies no gradient of a bucket.
static bool idist__ddp_create_in_place(const idist_ddp *d, const idist__ddp_bucket *bucket) {
    int k;

    if (bucket->scattered) return false;

    for (k = 0; k < bucket->exposed.gradient_count; k++) {
        int i = bucket->exposed.gradients[k];

        if (d->grads[i].count && d->grads[i].data != d->param_states[i].gradient) return false;
    }

    return true;
}

// Logs what was created, as Ignite's auto_model does. Only the first rank of the group logs.
static void idist__ddp_create_log(const idist_ddp *d) {
    static const char *const encodings[] = {"as they are", "as F16", "as BF16", NULL,
                                            "by PowerSGD"};
    const char *encoding = d->desc.hook ? "by a hook" : encodings[d->desc.compression];
    int b, in_place = 0;
    size_t nbytes = 0;
    idist__log without_world;
    const idist__log *log = idist__auto_log_of(d->desc.group, &without_world);

    if (!log || idist_group_rank(d->desc.group) > 0) return;

    for (b = 0; b < d->bucket_count; b++) {
        in_place += idist__ddp_create_in_place(d, &d->buckets[b]);
        nbytes += idist__ddp_model_nbytes(&d->buckets[b]);
    }

    idist__log_print(log, IDIST_LOG_INFO,
                     "ddp_create: %d gradients, %zu bytes in %d buckets, %d of them in place; "
                     "%s over %d ranks, sent %s%s%s",
                     d->desc.n, nbytes, d->bucket_count, in_place,
                     d->desc.sum ? "summed" : "averaged", d->group_size, encoding,
                     d->desc.find_unused ? ", find_unused" : "", d->desc.uneven ? ", uneven" : "");
}

idist_status idist_ddp_create(const idist_ddp_desc *desc, idist_ddp **ddp) {
    idist_ddp *d;
    idist_opts own, opts;
    idist_status status;

    if (!desc || !ddp) return idist__fail(IDIST_ERR_ARG, "ddp_create: desc or ddp is NULL");
    *ddp = NULL;
    memset(&own, 0, sizeof own);
    own.group = desc->group;
    own.timeout_ms = desc->timeout_ms;
    status = idist__agree_enter("ddp_create", &own, &opts);
    if (status != IDIST_OK) return status;
    d = (idist_ddp *)calloc(1, sizeof *d);
    if (!d) return idist__agree(idist__ddp_no_memory(), &opts);

    d->name = "ddp";
    d->desc = *desc;
    d->group_size = idist_group_size(desc->group);
    d->rank = idist_group_rank(desc->group);
    d->active_count = d->group_size;
    d->last_active = d->group_size - 1;
    d->iteration = 1;
    idist__ddp_create_set_pieces(d);
    d->reduction.group_size = d->group_size;
    d->reduction.memory.on_device = desc->on_device;
    d->reduction.memory.opts = idist__ddp_opts(d, desc->on_device);
    d->reduction.powersgd = idist__powersgd_resolve(desc->powersgd);
    idist__ddp_set_scale(d);

    status = idist__ddp_create_copy(d);
    if (status == IDIST_OK) status = idist__ddp_create_check(d);
    if (status == IDIST_OK) status = idist__ddp_bucket_form(d);
    if (status == IDIST_OK) status = idist__ddp_create_set_hook(d);
    status = idist__ddp_create_agree(d, status);
    if (status == IDIST_OK) status = idist__ddp_bucket_agree(d);
    if (status == IDIST_OK) status = idist__ddp_create_broadcast(d);

    if (status == IDIST_OK) {
        idist__ddp_create_log(d);
        *ddp = d;
    } else {
        idist_ddp_free(&d);
    }

    return status;
}

void idist_ddp_free(idist_ddp **ddp) {
    idist_ddp *d = ddp ? *ddp : NULL;
    const idist__memory *memory;
    int b, k;

    if (!d) return;
    *ddp = NULL;

    for (k = 0; k < IDIST__DDP_SLOTS; k++) idist_wait(&d->slots[k].request);

    for (b = 0; b < d->bucket_count && d->buckets; b++) {
        idist__ddp_bucket *bucket = &d->buckets[b];

        idist_wait(&bucket->request);
        if (bucket->exposed.state && d->hook.free_fn)
            idist__ddp_hook_free(d, bucket->exposed.state);
    }

    memory = &d->reduction.memory;
    idist__tensor_memory_free(memory, d->bucket_memory);
    idist__tensor_memory_free(memory, d->slot_memory);
    idist__tensor_memory_free(memory, d->saved_grads);
    free(d->buckets);
    free(d->bucket_of);
    free(d->launch_order);
    free(d->arrival_order);
    free(d->in_pieces);
    free(d->bucket_gradients);
    free(d->bucket_displs);
    free(d->params);
    free(d->grads);
    free(d->buffers);
    free(d->param_states);
    free(d->used);
    free(d->has_data);
    free(d);
}

void *idist_ddp_grad(const idist_ddp *d, int i) {
    return d && i >= 0 && i < d->desc.n ? d->grads[i].data : NULL;
}

int idist_ddp_bucket(const idist_ddp *d, int i) {
    return d && i >= 0 && i < d->desc.n ? d->param_states[i].bucket : -1;
}

int idist_ddp_buckets(const idist_ddp *d) { return d ? d->bucket_count : 0; }

bool idist_ddp_used(const idist_ddp *d, int i) {
    return d && i >= 0 && i < d->desc.n && d->used[i];
}

int idist_ddp_active(const idist_ddp *d) { return d ? d->active_count : 0; }

// ---- train/report/train_log.h --------------------------------------------------------------------

// train/report/train_log.h: what a training run prints, on rank 0 only

// Removes a progress bar, so that a line can take its place. Called with idist__log_lock held.
static void idist__train_log_clear_bar(void) {
    fputs(idist__log_before, stderr);
    idist__log_before = "";
}

static void idist__train_log_line(const char *line) {
    const idist__world *world = idist__world_default();
    const idist_logger *logger = world ? &world->log.logger : NULL;
    int cancel_state = idist__os_unwind_block_cancel();

    idist__os_mutex_lock(&idist__log_lock);
    idist__train_log_clear_bar();
    if (!logger || !logger->log_fn || !idist__log_call(logger, IDIST_LOG_INFO, line))
        idist__log_to_stderr(line);
    idist__os_mutex_unlock(&idist__log_lock);
    idist__os_unwind_allow_cancel(cancel_state);
}

void idist_train_log(const char *name, const char *format, ...) {
    char line[2048], when[32], *at;
    int64_t now_ns;
    va_list args;

    if (idist_get_rank() != 0 || idist__me.callbacks) return; // a logger must not log

    now_ns = idist__os_calendar_ns();
    idist__os_calendar_print(now_ns, when, sizeof when);
    snprintf(line, sizeof line, "%s,%03d %s INFO: ", when, (int)(now_ns / 1000000 % 1000),
             name ? name : "training");
    va_start(args, format);
    vsnprintf(line + strlen(line), sizeof line - strlen(line), format, args);
    va_end(args);

    for (at = line; *at; at++)
        if (*at == '\n') *at = ' ';
    idist__train_log_line(line);
}

void idist_train_log_config(const char *name) {
    char text[sizeof idist__get_own.config], *line, *end;

    if (idist_get_rank() != 0) return;
    idist_train_log(name, "- idist version: %s", IDIST_VERSION);
    idist_train_log(name, "- backend: %s", idist_backend());
    idist_train_log(name, "- device: %s", idist_device());
    idist_train_log(name, "- world size: %d", idist_get_world_size());
    idist_train_log(name, "Distributed setting:");
    idist__text_copy(text, sizeof text, idist_show_config());

    for (line = text; *line; line = end) {
        end = line + strcspn(line, "\n");
        if (*end) *end++ = 0;
        idist_train_log(name, "    %s", line);
    }
}

void idist_train_log_metrics(const char *name, int epoch, double seconds, const char *tag,
                             const char *const *names, const double *values, int n) {
    char text[IDIST__NUMBER_NBYTES];
    int i;

    idist_train_log(name, "Epoch %d - Evaluation time (seconds): %s - %s metrics:", epoch,
                    idist__number_print_fixed(text, seconds, 2), tag ? tag : "");
    for (i = 0; i < n && names && values; i++)
        idist_train_log(name, "    %s: %s", names[i], idist__number_print(text, values[i], 6));
}

// ---- train/report/run_report.h -------------------------------------------------------------------

// train/report/run_report.h: how fast a training run was, and which rank slowed it down
//
// In data-parallel training all ranks wait for the slowest one. So ranks have about the same number
// of examples per second, and the slowest rank is the rank that waits least.

enum { IDIST__RUN_REPORT_RANKS = 16 }; // largest number of ranks in the log

// What the ranks exchange.
typedef struct idist__run_report {
    idist_run_rank numbers;
    int64_t world_rank;
    char host[64];
} idist__run_report;

idist_status idist_run_begin(idist_run *run) {
    if (!run) return idist__fail(IDIST_ERR_ARG, "run_begin: run is NULL");
    if (!idist__trace_call_install())
        return idist__fail(IDIST_ERR_SYSTEM, "run_begin: the system registers no function that "
                                             "runs after a fork");
    idist__trace_count_from_zero(run);
    run->started_ns = idist__os_clock_now_ns();

    return IDIST_OK;
}

// Returns the time that a rank did not spend in communication calls.
static double idist__run_report_computed(const idist__run_report *rank) {
    return rank->numbers.seconds - rank->numbers.waited;
}

// Returns the rank that computed longest among those that are not listed yet.
static int idist__run_report_next(const idist__run_report *ranks, const bool *listed, int n) {
    int r, longest = -1;

    for (r = 0; r < n; r++) {
        if (listed[r]) continue;
        if (longest < 0 ||
            idist__run_report_computed(&ranks[r]) > idist__run_report_computed(&ranks[longest]))
            longest = r;
    }

    return longest;
}

// Sets listed[r] for the ranks in the log: all ranks, or those that computed longest. Returns the
// rank that computed longest.
static int idist__run_report_list(const idist__run_report *ranks, bool *listed, int n) {
    int k, rank, slowest = 0, limit = n < IDIST__RUN_REPORT_RANKS ? n : IDIST__RUN_REPORT_RANKS;

    for (k = 0; k < limit; k++) {
        rank = idist__run_report_next(ranks, listed, n);
        listed[rank] = true;
        if (k == 0) slowest = rank;
    }

    return slowest;
}

// Appends "2010 examples/s, " to a text if there are examples.
static void idist__run_report_add_speed(char *text, size_t capacity, double examples,
                                        double seconds) {
    char number[IDIST__NUMBER_NBYTES];

    if (examples == 0 || !(seconds > 0)) return;
    idist__text_append(text, capacity, "%s examples/s, ",
                       idist__number_print_fixed(number, examples / seconds, 1));
}

static void idist__run_report_log_rank(const char *name, const idist__run_report *rank) {
    const idist_run_rank *numbers = &rank->numbers;
    double share = numbers->seconds > 0 ? 100 * numbers->waited / numbers->seconds : 0;
    char speed[64] = "", waited[IDIST__NUMBER_NBYTES], sent[IDIST__NUMBER_NBYTES];

    idist__run_report_add_speed(speed, sizeof speed, (double)numbers->examples, numbers->seconds);
    idist_train_log(name, "    rank %d (%s): %swaited %s %% of the time, sent %s MB in %llu calls",
                    (int)rank->world_rank, rank->host, speed,
                    idist__number_print_fixed(waited, share, 1),
                    idist__number_print_fixed(sent, (double)numbers->sent_nbytes / 1e6, 1),
                    (unsigned long long)numbers->calls);
}

// Logs the summary of n ranks. `listed` has n elements, all false.
static void idist__run_report_log(const char *name, const idist__run_report *ranks, bool *listed,
                                  int n) {
    int r, slowest = idist__run_report_list(ranks, listed, n);
    double examples = 0, seconds = 0, others = 0;
    char speed[64] = "", a[IDIST__NUMBER_NBYTES], b[IDIST__NUMBER_NBYTES];

    for (r = 0; r < n; r++) {
        examples += (double)ranks[r].numbers.examples;
        if (ranks[r].numbers.seconds > seconds) seconds = ranks[r].numbers.seconds;
        if (r != slowest) others += idist__run_report_computed(&ranks[r]);
    }

    idist__run_report_add_speed(speed, sizeof speed, examples, seconds);
    if (speed[0]) speed[strlen(speed) - 2] = 0; // the comma
    idist_train_log(name, "Run of %s s on %d rank%s%s%s", idist__number_print_fixed(a, seconds, 1),
                    n, n == 1 ? "" : "s", speed[0] ? ": " : "", speed);

    for (r = 0; r < n; r++)
        if (listed[r]) idist__run_report_log_rank(name, &ranks[r]);
    if (n > IDIST__RUN_REPORT_RANKS)
        idist_train_log(name, "    and %d ranks that computed for a shorter time",
                        n - IDIST__RUN_REPORT_RANKS);
    if (n > 1)
        idist_train_log(
            name,
            "    slowest: rank %d, which computed for %s s; the other ranks for %s s on average",
            (int)ranks[slowest].world_rank,
            idist__number_print_fixed(a, idist__run_report_computed(&ranks[slowest]), 1),
            idist__number_print_fixed(b, others / (n - 1), 1));
}

// Fills the numbers of this rank, and ends the count of this thread.
static void idist__run_report_own(const idist_run *run, idist__run_report *own) {
    own->numbers.seconds = (double)(idist__os_clock_now_ns() - run->started_ns) / 1e9;
    own->numbers.waited = (double)idist__trace_counter.waited_ns / 1e9;
    own->numbers.examples = run->examples;
    own->numbers.calls = idist__trace_counter.calls;
    own->numbers.sent_nbytes = idist__trace_counter.sent_nbytes;
    idist__text_copy(own->host, sizeof own->host, idist_hostname());
    idist__trace_count_from_zero(NULL);
}

idist_status idist_run_report(const idist_run *run, const char *name, idist_run_rank *ranks,
                              const idist_opts *opts) {
    idist__run_report own, *all;
    bool *listed;
    int n, r;
    idist_opts own_opts;
    idist_status status = IDIST_OK, entered;

    memset(&own, 0, sizeof own);
    if (!run) status = idist__fail(IDIST_ERR_ARG, "run_report: run is NULL");
    else if (idist__trace_counter.owner != run)
        status = idist__fail(IDIST_ERR_STATE,
                             "run_report: this thread has not called run_begin for this run");
    else idist__run_report_own(run, &own); // before the calls below, which must not count

    entered = idist__agree_enter("run_report", opts, &own_opts);
    if (entered != IDIST_OK) return entered;
    n = idist_group_size(own_opts.group);
    own.world_rank = own_opts.group ? own_opts.group->w->group.rank : idist_get_rank();
    all = (idist__run_report *)calloc((size_t)n, sizeof *all + sizeof *listed);
    listed = (bool *)(void *)(all ? all + n : NULL);
    if (!all && status == IDIST_OK)
        status = idist__fail(IDIST_ERR_NO_MEMORY, "run_report: no memory for %d ranks", n);
    status = idist__agree(status, &own_opts);
    if (status == IDIST_OK) status = idist_all_gather(&own, all, sizeof own, IDIST_U8, &own_opts);

    if (status == IDIST_OK) {
        for (r = 0; r < n && ranks; r++) ranks[r] = all[r].numbers;
        if (!own.world_rank) idist__run_report_log(name, all, listed, n);
    }

    free(all);

    return status;
}

// ---- train/report/columns.h ----------------------------------------------------------------------

// train/report/columns.h: how many columns of a terminal a text takes
//
// The function wcwidth depends on the locale, which a program may not have set. The tables below
// are from Unicode 14 (general category and East_Asian_Width, UAX #11). They err on the side of
// more columns. Marks of rare scripts count as one column, and whole blocks of emoji and ideographs
// count as wide. A line may then end early, but it does not wrap.

typedef struct idist__columns_range {
    uint32_t first, last;
} idist__columns_range;

// Characters that take no column: combining marks, vowels of Hangul, format characters.
static const idist__columns_range idist__columns_none[] = {
    {0x300, 0x36f},   {0x483, 0x489},     {0x591, 0x5bd},    {0x5bf, 0x5bf},   {0x5c1, 0x5c2},
    {0x5c4, 0x5c5},   {0x5c7, 0x5c7},     {0x610, 0x61a},    {0x61c, 0x61c},   {0x64b, 0x65f},
    {0x670, 0x670},   {0x6d6, 0x6dc},     {0x6df, 0x6e4},    {0x6e7, 0x6e8},   {0x6ea, 0x6ed},
    {0x711, 0x711},   {0x730, 0x74a},     {0x7a6, 0x7b0},    {0x7eb, 0x7f3},   {0x7fd, 0x7fd},
    {0x816, 0x819},   {0x81b, 0x823},     {0x825, 0x827},    {0x829, 0x82d},   {0x859, 0x85b},
    {0x898, 0x89f},   {0x8ca, 0x8e1},     {0x8e3, 0x902},    {0x93a, 0x93a},   {0x93c, 0x93c},
    {0x941, 0x948},   {0x94d, 0x94d},     {0x951, 0x957},    {0x962, 0x963},   {0x981, 0x981},
    {0x9bc, 0x9bc},   {0x9c1, 0x9c4},     {0x9cd, 0x9cd},    {0x9e2, 0x9e3},   {0x9fe, 0xa02},
    {0xa3c, 0xa3c},   {0xa41, 0xa51},     {0xa70, 0xa71},    {0xa75, 0xa75},   {0xa81, 0xa82},
    {0xabc, 0xabc},   {0xac1, 0xac8},     {0xacd, 0xacd},    {0xae2, 0xae3},   {0xafa, 0xb01},
    {0xb3c, 0xb3c},   {0xb3f, 0xb3f},     {0xb41, 0xb44},    {0xb4d, 0xb56},   {0xb62, 0xb63},
    {0xb82, 0xb82},   {0xbc0, 0xbc0},     {0xbcd, 0xbcd},    {0xc00, 0xc00},   {0xc04, 0xc04},
    {0xc3c, 0xc3c},   {0xc3e, 0xc40},     {0xc46, 0xc56},    {0xc62, 0xc63},   {0xc81, 0xc81},
    {0xcbc, 0xcbc},   {0xcbf, 0xcbf},     {0xcc6, 0xcc6},    {0xccc, 0xccd},   {0xce2, 0xce3},
    {0xd00, 0xd01},   {0xd3b, 0xd3c},     {0xd41, 0xd44},    {0xd4d, 0xd4d},   {0xd62, 0xd63},
    {0xd81, 0xd81},   {0xdca, 0xdca},     {0xdd2, 0xdd6},    {0xe31, 0xe31},   {0xe34, 0xe3a},
    {0xe47, 0xe4e},   {0xeb1, 0xeb1},     {0xeb4, 0xebc},    {0xec8, 0xecd},   {0xf18, 0xf19},
    {0xf35, 0xf35},   {0xf37, 0xf37},     {0xf39, 0xf39},    {0xf71, 0xf7e},   {0xf80, 0xf84},
    {0xf86, 0xf87},   {0xf8d, 0xfbc},     {0xfc6, 0xfc6},    {0x102d, 0x1030}, {0x1032, 0x1037},
    {0x1039, 0x103a}, {0x103d, 0x103e},   {0x1058, 0x1059},  {0x105e, 0x1060}, {0x1071, 0x1074},
    {0x1082, 0x1082}, {0x1085, 0x1086},   {0x108d, 0x108d},  {0x109d, 0x109d}, {0x1160, 0x11ff},
    {0x135d, 0x135f}, {0x1712, 0x1714},   {0x17b4, 0x17b5},  {0x17b7, 0x17bd}, {0x17c6, 0x17c6},
    {0x17c9, 0x17d3}, {0x180b, 0x180f},   {0x1ab0, 0x1ace},  {0x1dc0, 0x1dff}, {0x200b, 0x200f},
    {0x202a, 0x202e}, {0x2060, 0x206f},   {0x20d0, 0x20f0},  {0x2de0, 0x2dff}, {0x302a, 0x302d},
    {0x3099, 0x309a}, {0xd7b0, 0xd7ff},   {0xfb1e, 0xfb1e},  {0xfe00, 0xfe0e}, {0xfe20, 0xfe2f},
    {0xfeff, 0xfeff}, {0xe0001, 0xe007f}, {0xe0100, 0xe01ef}};

// Characters that take two columns: ideographs, Hangul, full-width forms, emoji.
static const idist__columns_range idist__columns_two[] = {
    {0x1100, 0x115f},   {0x231a, 0x231b},   {0x2329, 0x232a},   {0x23e9, 0x23ec},
    {0x23f0, 0x23f0},   {0x23f3, 0x23f3},   {0x25fd, 0x25fe},   {0x2614, 0x2615},
    {0x2648, 0x2653},   {0x267f, 0x267f},   {0x2693, 0x2693},   {0x26a1, 0x26a1},
    {0x26aa, 0x26ab},   {0x26bd, 0x26be},   {0x26c4, 0x26c5},   {0x26ce, 0x26ce},
    {0x26d4, 0x26d4},   {0x26ea, 0x26ea},   {0x26f2, 0x26f3},   {0x26f5, 0x26f5},
    {0x26fa, 0x26fa},   {0x26fd, 0x26fd},   {0x2705, 0x2705},   {0x270a, 0x270b},
    {0x2728, 0x2728},   {0x274c, 0x274c},   {0x274e, 0x274e},   {0x2753, 0x2755},
    {0x2757, 0x2757},   {0x2795, 0x2797},   {0x27b0, 0x27b0},   {0x27bf, 0x27bf},
    {0x2b1b, 0x2b1c},   {0x2b50, 0x2b50},   {0x2b55, 0x2b55},   {0x2e80, 0x303e},
    {0x3041, 0xa4cf},   {0xa960, 0xa97f},   {0xac00, 0xd7a3},   {0xf900, 0xfaff},
    {0xfe10, 0xfe19},   {0xfe30, 0xfe6f},   {0xff01, 0xff60},   {0xffe0, 0xffe6},
    {0x16fe0, 0x1b2ff}, {0x1f004, 0x1f004}, {0x1f0cf, 0x1f0cf}, {0x1f18e, 0x1f18e},
    {0x1f191, 0x1f19a}, {0x1f200, 0x1f64f}, {0x1f680, 0x1f6ff}, {0x1f7e0, 0x1f7f0},
    {0x1f900, 0x1faff}, {0x20000, 0x3fffd}};

// A line for a terminal.
typedef struct idist__columns_line {
    char text[1024];
    size_t nbytes, columns;
    size_t limit; // in columns
    bool cut;     // something did not fit
    bool colored; // the line must end with the default color
} idist__columns_line;

static bool idist__columns_has(const idist__columns_range *ranges, size_t n, uint32_t code) {
    size_t low = 0, high = n;

    while (low < high) {
        size_t middle = (low + high) / 2;

        if (code > ranges[middle].last) low = middle + 1;
        else high = middle;
    }

    return low < n && code >= ranges[low].first;
}

// Returns the number of columns that a character takes. The character must not be a control
// character. The selector U+FE0F counts as one column, because some terminals widen the character
// before it.
static size_t idist__columns_of(uint32_t code) {
    const size_t none_count = sizeof idist__columns_none / sizeof *idist__columns_none;
    const size_t two_count = sizeof idist__columns_two / sizeof *idist__columns_two;

    if (code < 0x300) return 1;
    if (idist__columns_has(idist__columns_none, none_count, code)) return 0;

    return idist__columns_has(idist__columns_two, two_count, code) ? 2 : 1;
}

// Returns the end of an escape sequence (ECMA-48) that begins with ESC. Sets *is_color to true if
// the sequence is complete and sets a color or another rendition.
static const char *idist__columns_skip(const char *text, bool *is_color) {
    const char *at = text + 1, *parameters;

    *is_color = false;

    if (*at && strchr("]PX^_", *at)) { // a string, up to BEL or ESC and backslash
        while (*at && *at != 7 && *at != 27) at++;
        if (*at == 27 && at[1] == 92) at++;
        return *at && *at != 27 ? at + 1 : at;
    }

    if (*at == '[') {
        parameters = ++at;
        at += strspn(at, "0123456789:;");
        *is_color = *at == 'm';
        if (at == parameters || !*is_color) at += strspn(at, "0123456789:;<=>?");
    }

    while (*at >= ' ' && *at <= '/') at++; // intermediate bytes

    return *at >= '0' && *at <= '~' ? at + 1 : at;
}

// Adds bytes that take `columns` columns, if they fit. After the first bytes that do not fit, adds
// nothing more.
static void idist__columns_put(idist__columns_line *line, const char *bytes, size_t nbytes,
                               size_t columns) {
    if (line->columns + columns > line->limit || line->nbytes + nbytes >= sizeof line->text)
        line->cut = true;
    if (line->cut) return;

    memcpy(line->text + line->nbytes, bytes, nbytes);
    line->nbytes += nbytes;
    line->columns += columns;
    line->text[line->nbytes] = 0;
}

static void idist__columns_begin(idist__columns_line *line, size_t limit) {
    memset(line, 0, sizeof *line);
    line->limit = limit;
}

// Adds a text. Replaces control characters with spaces, and bytes that are not UTF-8 with question
// marks. Keeps escape sequences for colors, and drops other escape sequences.
static void idist__columns_add(idist__columns_line *line, const char *text) {
    while (*text && !line->cut) {
        uint32_t code;
        int nbytes = idist__text_decode(text, &code);
        const char *end = text + (nbytes > 0 ? nbytes : 1);
        bool is_color;

        if (code == 27) {
            end = idist__columns_skip(text, &is_color);
            if (is_color) idist__columns_put(line, text, (size_t)(end - text), 0);
            if (is_color) line->colored = true;
        } else if (nbytes < 0) {
            idist__columns_put(line, "?", 1, 1);
        } else if (code < ' ' || (code >= 0x7f && code < 0xa0) || code == 0x2028 ||
                   code == 0x2029) {
            idist__columns_put(line, " ", 1, 1);
        } else {
            idist__columns_put(line, text, (size_t)(end - text), idist__columns_of(code));
        }

        text = end;
    }
}

// ---- train/report/progress_bar.h -----------------------------------------------------------------

// train/report/progress_bar.h: a progress bar on a terminal

#define IDIST__BAR_NS (100 * IDIST__MS) // least time between two updates of a progress bar

// Prints a duration, for example "02:07" or "1:02:07".
static void idist__progress_bar_print_time(char *text, size_t capacity, int64_t ns) {
    int64_t seconds = ns / 1000000000;
    int h = (int)(seconds / 3600), m = (int)(seconds / 60 % 60), s = (int)(seconds % 60);

    if (ns < 0 || seconds > 99 * 3600) snprintf(text, capacity, "?");
    else if (seconds >= 3600) snprintf(text, capacity, "%d:%02d:%02d", h, m, s);
    else snprintf(text, capacity, "%02d:%02d", m, s);
}

// Writes one line that the terminal does not wrap. After a wrap, the next update would start in the
// middle of the line. The last column stays free, because some terminals wrap as soon as it is
// written.
static void idist__progress_bar_draw(const char *title, const char *numbers, const char *picture,
                                     const char *text, const char *times, const char *end) {
    const char *parts[5];
    idist__columns_line line;
    size_t columns = idist__os_terminal_columns();
    int i, attempt;

    if (!columns) columns = 80;
    parts[0] = title;
    parts[1] = numbers;
    parts[2] = picture;
    parts[3] = text;
    parts[4] = times;

    for (attempt = 0; attempt < 2; attempt++) {
        idist__columns_begin(&line, columns - 1);
        for (i = 0; i < 5; i++) idist__columns_add(&line, parts[i]);
        if (!line.cut) break;
        parts[2] = " "; // without the picture
    }

    fprintf(stderr, "%s%s%s", line.text, line.colored ? "\033[m" : "", end);
}

static void idist__progress_bar_print_remaining(char *text, size_t capacity, int64_t elapsed_ns,
                                                uint64_t done, uint64_t total) {
    double remaining_ns = done ? (double)elapsed_ns / (double)done * (double)(total - done) : -1;

    if (remaining_ns > 9e18) remaining_ns = -1; // does not fit in 64 bits
    idist__progress_bar_print_time(text, capacity, (int64_t)remaining_ns);
}

void idist_progress_update(idist_progress *bar, uint64_t done, const char *text) {
    static const char cells[] = "##########          ";
    char elapsed[32], remaining[32], numbers[80], picture[16], times[80];
    const char *title = bar && bar->title ? bar->title : "";
    int64_t now_ns = idist__os_clock_now_ns();
    double fraction;
    int cancel_state;
    bool last;

    if (!bar || idist_get_rank() != 0 || idist__me.callbacks) return; // a logger must not draw
    if (!bar->started_ns) bar->started_ns = now_ns;
    last = done >= bar->total;
    if (!last && bar->shown_ns && now_ns - bar->shown_ns < IDIST__BAR_NS) return;
    bar->shown_ns = now_ns;
    if (!idist__os_terminal_has_stderr()) return;
    if (done > bar->total) done = bar->total;

    idist__progress_bar_print_time(elapsed, sizeof elapsed, now_ns - bar->started_ns);
    idist__progress_bar_print_remaining(remaining, sizeof remaining, now_ns - bar->started_ns, done,
                                        bar->total);

    cancel_state = idist__os_unwind_block_cancel();
    idist__os_mutex_lock(&idist__log_lock);
    idist__train_log_clear_bar();
    snprintf(numbers, sizeof numbers, "%s[%llu/%llu] %3d%%", title[0] ? ": " : "",
             (unsigned long long)done, (unsigned long long)bar->total,
             bar->total ? (int)(100.0 * (double)done / (double)bar->total) : 100);
    fraction = bar->total ? 10.0 * (double)done / (double)bar->total : 10;
    snprintf(picture, sizeof picture, "|%.10s| ", cells + 10 - (int)fraction);
    snprintf(times, sizeof times, " [%s<%s]", elapsed, remaining);
    idist__progress_bar_draw(title, numbers, picture, text ? text : "", times, last ? "\n" : "");
    fflush(stderr);
    if (!last) idist__log_before = "\r\033[K"; // clears the line
    idist__os_mutex_unlock(&idist__log_lock);
    idist__os_unwind_allow_cancel(cancel_state);

    if (last) bar->started_ns = bar->shown_ns = 0; // the struct can be used for another bar
}

// ---- train/report/event.h ------------------------------------------------------------------------

// train/report/event.h: scalars in the format that TensorBoard reads
//
// An events file is a TFRecord file, which is a sequence of these records:
//
//     size of the data     8 bytes
//     masked CRC-32C       4 bytes, over the size
//     data                 an Event in the format of protocol buffers
//     masked CRC-32C       4 bytes, over the data
//
// Numbers have the lowest byte first. The Event in the first record contains the version of the
// file. A field begins with a varint that contains its number and type; the field's content
// follows. The fields in use are:
//
//     Event      1 wall_time (double)  2 step (varint)  3 file_version  5 summary (Summary)
//     Summary    1 value (Value)
//     Value      1 tag  2 simple_value (float)
//
// Sources: record_writer.cc, event.proto and summary.proto of TensorFlow; RFC 3720, appendix B.4.

#define IDIST__TAG_NBYTES 1000                        // largest tag, without the terminating 0
#define IDIST__EVENT_NBYTES (IDIST__TAG_NBYTES + 100) // largest record

// The types of fields ("wire types").
enum { IDIST__EVENT_VARINT = 0, IDIST__EVENT_64 = 1, IDIST__EVENT_SIZED = 2, IDIST__EVENT_32 = 5 };

// The bytes of a message or of a record.
typedef struct idist__event {
    size_t nbytes;
    unsigned char bytes[IDIST__EVENT_NBYTES];
} idist__event;

static void idist__event_bytes(idist__event *event, const void *bytes, size_t nbytes) {
    memcpy(event->bytes + event->nbytes, bytes, nbytes);
    event->nbytes += nbytes;
}

// Appends a number as nbytes bytes, the lowest byte first.
static void idist__event_number(idist__event *event, uint64_t number, int nbytes) {
    int i;

    for (i = 0; i < nbytes; i++)
        event->bytes[event->nbytes++] = (unsigned char)(number >> (8 * i) & 0xff);
}

// Appends a number with seven bits per byte, the lowest bits first. The eighth bit says that
// another byte follows.
static void idist__event_varint(idist__event *event, uint64_t number) {
    for (; number >= 0x80; number >>= 7)
        event->bytes[event->nbytes++] = (unsigned char)(number & 0x7f) | 0x80;
    event->bytes[event->nbytes++] = (unsigned char)number;
}

static void idist__event_field(idist__event *event, int field, int type) {
    idist__event_varint(event, (uint64_t)(field << 3 | type));
}

static void idist__event_sized(idist__event *event, int field, const void *bytes, size_t nbytes) {
    idist__event_field(event, field, IDIST__EVENT_SIZED);
    idist__event_varint(event, nbytes);
    idist__event_bytes(event, bytes, nbytes);
}

static void idist__event_double(idist__event *event, int field, double value) {
    uint64_t bits;

    memcpy(&bits, &value, sizeof bits);
    idist__event_field(event, field, IDIST__EVENT_64);
    idist__event_number(event, bits, 8);
}

static void idist__event_float(idist__event *event, int field, double value) {
    float rounded = (float)value;
    uint32_t bits;

    memcpy(&bits, &rounded, sizeof bits);
    idist__event_field(event, field, IDIST__EVENT_32);
    idist__event_number(event, bits, 4);
}

// Computes CRC-32C bit by bit, which is fast enough for short records.
static uint32_t idist__event_crc(const unsigned char *bytes, size_t nbytes) {
    uint32_t crc = 0xffffffffu;
    size_t i;
    int bit;

    for (i = 0; i < nbytes; i++) {
        crc ^= bytes[i];
        for (bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    }

    return ~crc;
}

// Appends a masked CRC-32C, because a plain CRC over data that contains CRCs is weak.
static void idist__event_masked_crc(idist__event *record, const unsigned char *bytes,
                                    size_t nbytes) {
    uint32_t crc = idist__event_crc(bytes, nbytes);

    idist__event_number(record, (crc >> 15 | crc << 17) + 0xa282ead8u, 4);
}

// Makes a record from an Event.
static void idist__event_frame(idist__event *record, const idist__event *event) {
    record->nbytes = 0;
    idist__event_number(record, event->nbytes, 8);
    idist__event_masked_crc(record, record->bytes, 8);
    idist__event_bytes(record, event->bytes, event->nbytes);
    idist__event_masked_crc(record, event->bytes, event->nbytes);
}

// Makes the first record of a file. wall_time is in seconds since 1970.
static void idist__event_version(idist__event *record, double wall_time) {
    idist__event event;

    event.nbytes = 0;
    idist__event_double(&event, 1, wall_time);
    idist__event_sized(&event, 3, "brain.Event:2", 13);
    idist__event_frame(record, &event);
}

// Makes the record of a scalar. Leaves out a step of 0, as every writer of this format does.
static void idist__event_scalar(idist__event *record, double wall_time, uint64_t step,
                                const char *tag, double scalar) {
    idist__event event, summary, value;

    value.nbytes = 0;
    idist__event_sized(&value, 1, tag, strlen(tag));
    idist__event_float(&value, 2, scalar);

    summary.nbytes = 0;
    idist__event_sized(&summary, 1, value.bytes, value.nbytes);

    event.nbytes = 0;
    idist__event_double(&event, 1, wall_time);
    if (step) {
        idist__event_field(&event, 2, IDIST__EVENT_VARINT);
        idist__event_varint(&event, step);
    }

    idist__event_sized(&event, 5, summary.bytes, summary.nbytes);
    idist__event_frame(record, &event);
}

// ---- train/report/summary.h ----------------------------------------------------------------------

// train/report/summary.h: scalars in CSV and TensorBoard files
//
// Functions: idist__summary_*, idist__csv_*.

//------------------------------------------------------------------------------
// a scalar as a line of scalars.csv
//------------------------------------------------------------------------------

#define IDIST__CSV_HEADER "wall_time,step,tag,value\n"
#define IDIST__CSV_NBYTES (2 * IDIST__TAG_NBYTES + 100) // longest line; a quote counts twice

// Writes a tag, in quotes if it needs them. Returns the end of the written text.
static char *idist__csv_tag(char *to, const char *tag) {
    bool quoted = tag[strcspn(tag, ",\"\r\n")] != 0;

    if (quoted) *to++ = '"';
    for (; *tag; tag++) {
        if (*tag == '"') *to++ = '"';
        *to++ = *tag;
    }

    if (quoted) *to++ = '"';

    return to;
}

// Writes a line and returns its number of bytes. wall_us is in microseconds since 1970.
static size_t idist__csv_line(char line[IDIST__CSV_NBYTES], int64_t wall_us, uint64_t step,
                              const char *tag, double value) {
    char *at = line, number[IDIST__NUMBER_NBYTES];

    at += snprintf(at, 64, "%lld.%06d,%llu,", (long long)(wall_us / 1000000),
                   (int)(wall_us % 1000000), (unsigned long long)step);
    at = idist__csv_tag(at, tag);
    *at++ = ',';
    at += snprintf(at, sizeof number, "%s\n", idist__number_print_exact(number, value));

    return (size_t)(at - line);
}

// Reads a file of nbytes bytes through a buffer, and sets *end to the end of its last complete
// line. A line feed within quotes does not end a line. Returns 0, an errno, or
// IDIST__CHECKPOINT_ENDS.
static int idist__csv_find_end(idist__os_file file, uint64_t nbytes, char *buffer, size_t capacity,
                               uint64_t *end) {
    uint64_t at, i;
    bool in_quotes = false;

    *end = 0;

    for (at = 0; at < nbytes; at += capacity) {
        uint64_t n = nbytes - at < capacity ? nbytes - at : capacity;
        int error = idist__checkpoint_read(file, at, buffer, (size_t)n);

        if (error) return error;

        for (i = 0; i < n; i++) {
            if (buffer[i] == '"') in_quotes = !in_quotes;
            if (buffer[i] == '\n' && !in_quotes) *end = at + i + 1;
        }
    }

    return 0;
}

//------------------------------------------------------------------------------
// scalars over the steps of a training run, for TensorBoard and as CSV
//
// A value is written immediately, with one pwrite per file. If the write fails, the value stays in
// `pending`, ahead of later values. The file is then cut back to its last whole line or record. The
// summary itself keeps the position in the file, because another attempt must begin at the same
// position.
//------------------------------------------------------------------------------

#define IDIST__SUMMARY_PENDING_NBYTES ((size_t)1 << 16)

static const char idist__summary_csv_name[] = "scalars.csv";

typedef struct idist__summary_file {
    idist__os_file file; // IDIST__OS_NO_FILE if not wanted
    char name[364];
    uint64_t nbytes;      // size of the file, where `pending` will be written
    size_t pending_count; // bytes in `pending`
    char pending[IDIST__SUMMARY_PENDING_NBYTES];
} idist__summary_file;

struct idist_summary {
    idist__os_mutex lock; // protects the fields below
    bool writes;          // this is rank 0
    idist__os_process process;
    uint64_t refused; // values missing from at least one file
    char *folder;
    idist__summary_file csv, events;
    idist__os_mutex track_lock; // held while `track` runs
    int (*track)(const idist_scalar *scalar, void *arg);
    void *arg;
};

// Writes the pending bytes of a file.
static idist_status idist__summary_write(idist_summary *summary, idist__summary_file *file,
                                         const char *name) {
    int error;

    if (!file->pending_count) return IDIST_OK;

    if (idist__os_file_write_at(file->file, file->pending, file->pending_count, file->nbytes)) {
        file->nbytes += file->pending_count;
        file->pending_count = 0;
        return IDIST_OK;
    }

    error = errno;
    // If this fails as well, the next attempt overwrites the bytes that the failed write has left.
    idist__os_file_resize(file->file, file->nbytes);

    return idist__checkpoint_fail(name, summary->folder, file->name, error);
}

// Adds bytes to `pending`. Returns false if they do not fit.
static bool idist__summary_append(idist__summary_file *file, const void *bytes, size_t nbytes) {
    if (nbytes > IDIST__SUMMARY_PENDING_NBYTES - file->pending_count) return false;
    memcpy(file->pending + file->pending_count, bytes, nbytes);
    file->pending_count += nbytes;

    return true;
}

// Adds a line or record to a file. If `pending` is full, writes `pending` first. Sets *refused to
// true if there is still no space.
static idist_status idist__summary_put(idist_summary *summary, idist__summary_file *file,
                                       const void *bytes, size_t nbytes, bool *refused) {
    idist_status status;

    if (file->file == IDIST__OS_NO_FILE) return IDIST_OK;
    if (idist__summary_append(file, bytes, nbytes))
        return idist__summary_write(summary, file, "summary_add");

    status = idist__summary_write(summary, file, "summary_add");
    if (status == IDIST_OK && idist__summary_append(file, bytes, nbytes))
        return idist__summary_write(summary, file, "summary_add");
    *refused = true;

    return status;
}

// Creates a folder and its parents. Returns 0, or the errno for the folder itself.
static int idist__summary_make_folder(char *path) {
    char *at;

    for (at = path + 1; *at; at++) {
        if (*at != '/') continue;
        *at = 0;
        idist__os_folder_make(path);
        *at = '/';
    }

    return idist__os_folder_make(path);
}

// Checks the contents of scalars.csv. Sets file->nbytes to the end of the last whole line, or to 0
// if the file ends within its header.
static idist_status idist__summary_check_csv(idist_summary *summary, uint64_t nbytes) {
    static const char header[] = IDIST__CSV_HEADER;
    idist__summary_file *file = &summary->csv;
    size_t n = nbytes < sizeof header - 1 ? (size_t)nbytes : sizeof header - 1;
    int error = idist__checkpoint_read(file->file, 0, file->pending, n);

    if (!error && memcmp(file->pending, header, n) != 0)
        return idist__fail(
            IDIST_ERR_ARG,
            "summary_create: %s/%s does not begin with \"%.24s\": idist did not write this file; "
            "use another folder",
            summary->folder, file->name, header);
    if (!error)
        error = idist__csv_find_end(file->file, nbytes, file->pending, sizeof file->pending,
                                    &file->nbytes);
    if (error == IDIST__CHECKPOINT_ENDS) error = EIO; // the file was longer a moment ago
    if (error) return idist__checkpoint_fail("summary_create", summary->folder, file->name, error);

    if (nbytes - file->nbytes > IDIST__CSV_NBYTES)
        return idist__fail(
            IDIST_ERR_ARG,
            "summary_create: %s/%s is damaged: a line or quote that begins at byte %llu has no "
            "end; repair the file or use another folder",
            summary->folder, file->name, (unsigned long long)file->nbytes);

    return IDIST_OK;
}

// Removes an incomplete last line that a crash has left, and writes the header of a new file.
static idist_status idist__summary_mend_csv(idist_summary *summary, uint64_t nbytes) {
    static const char header[] = IDIST__CSV_HEADER;
    idist__summary_file *file = &summary->csv;
    const idist__world *world = idist__world_default();

    if (nbytes > file->nbytes && !idist__os_file_resize(file->file, file->nbytes))
        return idist__checkpoint_fail("summary_create", summary->folder, file->name, errno);
    if (nbytes > file->nbytes && world)
        idist__log_print(
            &world->log, IDIST_LOG_WARN,
            "summary_create: %s/%s: removed an incomplete last line that a crash had left",
            summary->folder, file->name);
    if (file->nbytes) return IDIST_OK;
    idist__summary_append(file, header, sizeof header - 1);

    return idist__summary_write(summary, file, "summary_create");
}

static idist_status idist__summary_open_csv(idist_summary *summary) {
    idist__summary_file *file = &summary->csv;
    char path[4096];
    int64_t nbytes;
    idist_status status;

    idist__text_copy(file->name, sizeof file->name, idist__summary_csv_name);
    if ((size_t)snprintf(path, sizeof path, "%s/%s", summary->folder, file->name) >= sizeof path)
        return idist__fail(IDIST_ERR_ARG, "summary_create: the path of the folder is too long");
    file->file = idist__os_file_open(path, IDIST__OS_FILE_OUTPUT);
    if (file->file == IDIST__OS_NO_FILE)
        return idist__checkpoint_fail("summary_create", summary->folder, file->name, errno);

    // Continue if the file system has no locks.
    if (!idist__os_file_try_lock(file->file, 0) && errno == EAGAIN)
        return idist__fail(IDIST_ERR_STATE,
                           "summary_create: another process or handle is writing %s; use a folder "
                           "per training run",
                           path);
    // Get the size only now, because the last holder of the lock may just have added to the file.
    nbytes = idist__os_file_size(file->file);
    if (nbytes < 0 && errno)
        return idist__checkpoint_fail("summary_create", summary->folder, file->name, errno);
    if (nbytes < 0)
        return idist__fail(IDIST_ERR_ARG, "summary_create: %s is not a regular file", path);

    status = idist__summary_check_csv(summary, (uint64_t)nbytes);
    if (status != IDIST_OK) return status;

    return idist__summary_mend_csv(summary, (uint64_t)nbytes);
}

// Creates an events file. The number at the end of its name distinguishes files that a process
// creates in the same second. It is found by trying names, so the folder need not be readable.
static idist_status idist__summary_open_events(idist_summary *summary) {
    idist__summary_file *file = &summary->events;
    int64_t now_us = idist__os_calendar_ns() / 1000;
    char host[256], path[4096];
    idist__event record;
    int number = 0, error;
    idist_status status;

    if (!idist__os_socket_host_name(host, sizeof host)) idist__text_copy(host, sizeof host, "host");

    do {
        snprintf(file->name, sizeof file->name, "events.out.tfevents.%lld.%s.%lld.%d",
                 (long long)(now_us / 1000000), host, (long long)summary->process, number++);
        if ((size_t)snprintf(path, sizeof path, "%s/%s", summary->folder, file->name) >=
            sizeof path)
            return idist__fail(IDIST_ERR_ARG, "summary_create: the path of the folder is too long");
        error = idist__os_folder_new_file(IDIST__OS_HERE, path, &file->file);
    } while (error == EEXIST);

    if (error) return idist__checkpoint_fail("summary_create", summary->folder, file->name, error);

    idist__event_version(&record, (double)now_us / 1e6);
    idist__summary_append(file, record.bytes, record.nbytes);
    status = idist__summary_write(summary, file, "summary_create");
    if (status != IDIST_OK) idist__os_folder_remove(IDIST__OS_HERE, path);

    return status;
}

static idist_status idist__summary_open(idist_summary *summary, const idist_summary_desc *desc) {
    idist_status status = IDIST_OK;
    size_t nbytes;
    int error;

    if (desc->no_csv && desc->no_tensorboard) return IDIST_OK;
    if (!desc->folder || !desc->folder[0])
        return idist__fail(IDIST_ERR_ARG, "summary_create: the folder is NULL or empty");
    nbytes = strlen(desc->folder) + 1;
    summary->folder = (char *)malloc(nbytes);
    if (!summary->folder)
        return idist__fail(IDIST_ERR_NO_MEMORY, "summary_create: no memory for a path");

    memcpy(summary->folder, desc->folder, nbytes);
    error = idist__summary_make_folder(summary->folder);
    if (error) return idist__checkpoint_fail("summary_create", summary->folder, "", error);
    if (!desc->no_csv) status = idist__summary_open_csv(summary);
    if (status == IDIST_OK && !desc->no_tensorboard) status = idist__summary_open_events(summary);

    return status;
}

// Closes a file. A child made by fork does not unlock it, because the lock belongs to the parent.
static idist_status idist__summary_close(idist_summary *summary, idist__summary_file *file,
                                         bool is_owner) {
    if (file->file == IDIST__OS_NO_FILE) return IDIST_OK;
    if (is_owner) idist__os_file_unlock(file->file, 0);
    if (idist__os_file_close(&file->file) || !is_owner) return IDIST_OK;

    return idist__checkpoint_fail("summary_free", summary->folder, file->name, errno);
}

static void idist__summary_delete(idist_summary *summary) {
    idist__os_mutex_destroy(&summary->lock);
    idist__os_mutex_destroy(&summary->track_lock);
    free(summary->folder);
    free(summary);
}

idist_status idist_summary_create(const idist_summary_desc *desc, idist_summary **summary) {
    idist_summary *created;
    idist_status status = IDIST_OK;

    if (!summary) return idist__fail(IDIST_ERR_ARG, "summary_create: summary is NULL");
    *summary = NULL;
    if (!desc) return idist__fail(IDIST_ERR_ARG, "summary_create: desc is NULL");
    if (desc->no_csv && desc->no_tensorboard && !desc->track)
        return idist__fail(IDIST_ERR_ARG,
                           "summary_create: neither CSV nor TensorBoard nor a tracker is wanted");
    created = (idist_summary *)calloc(1, sizeof *created);
    if (!created)
        return idist__fail(IDIST_ERR_NO_MEMORY, "summary_create: no memory for a summary");

    idist__os_mutex_init(&created->lock);
    idist__os_mutex_init(&created->track_lock);
    created->track = desc->track;
    created->arg = desc->arg;
    created->writes = idist_group_rank(desc->group) == 0;
    created->process = idist__os_process_id();
    created->csv.file = created->events.file = IDIST__OS_NO_FILE;
    if (created->writes) status = idist__summary_open(created, desc);

    if (status != IDIST_OK) {
        idist__summary_close(created, &created->csv, true);
        idist__summary_close(created, &created->events, true);
        idist__summary_delete(created);
        return status;
    }

    *summary = created;

    return IDIST_OK;
}

// Checks that a call can be made. Takes no lock, because another thread may have held the lock
// during a fork.
static idist_status idist__summary_enter(const char *name, const idist_summary *summary) {
    if (!summary) return idist__fail(IDIST_ERR_ARG, "%s: summary is NULL", name);
    if (!summary->writes) return IDIST_OK;
    if (summary->process != idist__os_process_id())
        return idist__fail(IDIST_ERR_STATE,
                           "%s: a child made by fork cannot write to a summary of its parent",
                           name);
    return IDIST_OK;
}

// Returns true if a text is UTF-8. TensorBoard stops reading a file at a text that is not UTF-8.
static bool idist__summary_is_utf8(const char *text) {
    uint32_t code;
    int nbytes;

    for (nbytes = idist__text_decode(text, &code); nbytes > 0;) {
        text += nbytes;
        nbytes = idist__text_decode(text, &code);
    }

    return nbytes == 0;
}

// Passes a value to the program's tracker.
IDIST__NOINLINE static idist_status idist__summary_track(idist_summary *summary, const char *tag,
                                                         double value, uint64_t step,
                                                         int64_t wall_us) {
    idist_scalar scalar;
    int result = 1;
    bool threw;

    scalar.tag = tag;
    scalar.value = value;
    scalar.wall_time = (double)wall_us / 1e6;
    scalar.step = step;

    idist__os_mutex_lock(&summary->track_lock);
    IDIST__CALLBACK(result = summary->track(&scalar, summary->arg));
    threw = idist__callback_threw("summary_add", "the tracker");
    idist__os_mutex_unlock(&summary->track_lock);

    if (threw) return IDIST_ERR_CALLBACK;
    if (!result) return IDIST_OK;

    return idist__fail(IDIST_ERR_CALLBACK, "summary_add: the tracker failed with %d for \"%.60s\"",
                       result, tag);
}

idist_status idist_summary_add(idist_summary *summary, const char *tag, double value,
                               uint64_t step) {
    char line[IDIST__CSV_NBYTES];
    idist__event record;
    int64_t now_us;
    size_t nbytes;
    bool refused = false;
    idist_status csv, events, status = idist__summary_enter("summary_add", summary);

    if (status != IDIST_OK || !summary->writes) return status;
    if (!tag || !tag[0] || strlen(tag) > IDIST__TAG_NBYTES || !idist__summary_is_utf8(tag))
        return idist__fail(IDIST_ERR_ARG,
                           "summary_add: the tag \"%.60s\" is not 1 to %d bytes of UTF-8",
                           tag ? tag : "", IDIST__TAG_NBYTES);
    if (step > INT64_MAX)
        return idist__fail(IDIST_ERR_ARG, "summary_add: step %llu is above INT64_MAX",
                           (unsigned long long)step);

    idist__os_mutex_lock(&summary->lock);
    now_us = idist__os_calendar_ns() / 1000;
    nbytes = idist__csv_line(line, now_us, step, tag, value);
    idist__event_scalar(&record, (double)now_us / 1e6, step, tag, value);
    csv = idist__summary_put(summary, &summary->csv, line, nbytes, &refused);
    events = idist__summary_put(summary, &summary->events, record.bytes, record.nbytes, &refused);
    summary->refused += refused;
    idist__os_mutex_unlock(&summary->lock);

    if (summary->track) status = idist__summary_track(summary, tag, value, step, now_us);
    if (csv != IDIST_OK) status = csv;

    return events != IDIST_OK ? events : status;
}

// Writes the pending bytes, and waits until the whole file is on the disk. If the file system
// refuses to sync, this is not a failure, and *refusal is set to the errno.
static idist_status idist__summary_sync(idist_summary *summary, idist__summary_file *file,
                                        const char *name, int *refusal) {
    idist_status status;
    int error;

    if (file->file == IDIST__OS_NO_FILE) return IDIST_OK;
    status = idist__summary_write(summary, file, name);
    if (status != IDIST_OK || idist__os_file_sync(file->file)) return status;

    error = errno;
    if (!idist__os_file_refuses_sync(error))
        return idist__checkpoint_fail(name, summary->folder, file->name, error);
    *refusal = error;

    return IDIST_OK;
}

static idist_status idist__summary_sync_both(idist_summary *summary, const char *name) {
    int refusal = 0;
    idist__log without_world;
    idist_status csv, events;

    idist__os_mutex_lock(&summary->lock);
    csv = idist__summary_sync(summary, &summary->csv, name, &refusal);
    events = idist__summary_sync(summary, &summary->events, name, &refusal);
    idist__os_mutex_unlock(&summary->lock);

    if (refusal)
        idist__sync_judge(refusal, name, summary->folder, idist__auto_log_of(NULL, &without_world));

    return events != IDIST_OK ? events : csv;
}

idist_status idist_summary_flush(idist_summary *summary) {
    idist_status status = idist__summary_enter("summary_flush", summary);

    if (status != IDIST_OK || !summary->writes) return status;

    return idist__summary_sync_both(summary, "summary_flush");
}

idist_status idist_summary_free(idist_summary **summary) {
    idist_summary *s = summary ? *summary : NULL;
    idist_status csv, events, status = IDIST_OK;
    bool is_owner;

    if (!s) return IDIST_OK;
    *summary = NULL;
    is_owner = s->process == idist__os_process_id();
    if (s->writes && is_owner) status = idist__summary_sync_both(s, "summary_free");
    csv = idist__summary_close(s, &s->csv, is_owner);
    events = idist__summary_close(s, &s->events, is_owner);

    if (status == IDIST_OK) status = events != IDIST_OK ? events : csv;
    if (status == IDIST_OK && is_owner && s->refused)
        status = idist__fail(
            IDIST_ERR_NO_SPACE,
            "summary_free: %llu values were not written to %s: earlier calls failed, and the "
            "buffer for pending values was full",
            (unsigned long long)s->refused, s->folder);
    idist__summary_delete(s);

    return status;
}

// ---- base/end.h ----------------------------------------------------------------------------------

// base/end.h: undoes the settings of base/begin.h
//
// In a drop-in, tools/drop_ins.py adds an #undef for each macro of the implementation here, so that
// no macro reaches the program. Has no include guard, because each drop-in includes this file.

#ifdef IDIST__FAST_MATH
#if defined(__clang__)
#pragma float_control(pop)
#elif defined(__GNUC__)
#pragma GCC pop_options
#pragma pop_macro("__NO_MATH_ERRNO__")
#pragma pop_macro("__NO_TRAPPING_MATH__")
#pragma pop_macro("__NO_SIGNED_ZEROS__")
#pragma pop_macro("__RECIPROCAL_MATH__")
#pragma pop_macro("__ASSOCIATIVE_MATH__")
#pragma pop_macro("__FINITE_MATH_ONLY__")
#pragma pop_macro("__FAST_MATH__")
#endif
#undef IDIST__FAST_MATH
#endif

#pragma pop_macro("max")
#pragma pop_macro("min")
#pragma pop_macro("lock")
#pragma pop_macro("small")
#if defined(__SANITIZE_THREAD__) && !defined(__clang__) && __GNUC__ >= 11
#pragma GCC diagnostic pop
#endif
#if defined(__cplusplus) && defined(__GNUC__)
#pragma GCC diagnostic pop
#endif

#undef IDIST__BAR_NS
#undef IDIST__CALLBACK
#undef IDIST__CATCH_EXIT
#undef IDIST__CHECKPOINT_PIECE
#undef IDIST__CHECKPOINT_VERSION
#undef IDIST__CHECKSUM_BLOCK
#undef IDIST__CHECKSUM_ODD
#undef IDIST__COUNT_OF
#undef IDIST__CSV_HEADER
#undef IDIST__CSV_NBYTES
#undef IDIST__DDP_BUCKET_NBYTES
#undef IDIST__DDP_FIRST_NBYTES
#undef IDIST__DDP_PIECE_NBYTES
#undef IDIST__DDP_PIECE_NEAR_NBYTES
#undef IDIST__EVENT_NBYTES
#undef IDIST__FLAW_MAP
#undef IDIST__GRAD_SCALER_LEAST
#undef IDIST__GRAD_SCALER_MOST
#undef IDIST__INLINE
#undef IDIST__NOINLINE
#undef IDIST__NORM_PIECE
#undef IDIST__NO_ALIAS
#undef IDIST__OS_MUTEX_INIT
#undef IDIST__OWN
#undef IDIST__PRINTF
#undef IDIST__SUMMARY_PENDING_NBYTES
#undef IDIST__TAG_NBYTES
#undef IDIST__TENSORS_AT_ONCE
#undef IDIST__TLS
#undef IDIST__TRY
#undef IDIST__TWISTER_WORDS
#undef IDIST__UNUSED
#undef IDIST__UNWIND_END
#undef IDIST__VECTORIZE

#endif // IDIST_IMPLEMENTATION
