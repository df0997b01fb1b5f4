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

#include "base/begin.h"

#include "train/permutation.h"
#include "train/agree.h"
#include "train/sampler.h"
#include "train/loader.h"
#include "train/auto.h"
#include "train/batch_norm.h"
#include "train/norm.h"
#include "train/convert.h"
#include "train/grad_scaler.h"
#include "train/schedule.h"
#include "train/plateau.h"
#include "train/metric.h"
#include "train/scores.h"
#include "train/roc_auc.h"

#include "train/checkpoint/checkpoint.h"
#include "train/checkpoint/flaw.h"
#include "train/checkpoint/load.h"
#include "train/checkpoint/checkpoint_folder.h"
#include "train/checkpoint/save.h"

#include "train/tensor.h"

#include "train/compress/tensor_memory.h"
#include "train/compress/compress.h"
#include "train/compress/powersgd.h"
#include "train/compress/on_device.h"

#include "train/ddp/ddp_model.h"
#include "train/ddp/ddp_bucket.h"
#include "train/ddp/ddp_piece.h"
#include "train/ddp/ddp_launch.h"
#include "train/ddp/ddp_finish.h"
#include "train/ddp/ddp_step.h"

#include "train/zero/zero_model.h"
#include "train/zero/zero_create.h"
#include "train/zero/zero_step.h"
#include "train/zero/zero_state.h"
#include "train/ddp/ddp_create.h"

#include "train/report/train_log.h"
#include "train/report/run_report.h"
#include "train/report/columns.h"
#include "train/report/progress_bar.h"
#include "train/report/event.h"
#include "train/report/summary.h"

#include "base/end.h"

#endif // IDIST_IMPLEMENTATION
