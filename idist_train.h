/* idist_train.h - v0.1.0 - data-parallel training for idist: samplers, loaders, gradients, checkpoints - MIT licence

DO THIS

    Lay it beside idist.h and include it where that is included; IDIST_IMPLEMENTATION compiles both. Your network stays as
    it is: arrays of parameters, and a function that computes their gradients.

        idist_tensor params[2] = {{weights, 64 * 10, IDIST_F32}, {bias, 10, IDIST_F32}};
        idist_sampler_desc samples = {0};
        idist_ddp_desc model = {0};
        idist_sampler *sampler;
        idist_ddp *ddp;
        size_t index;

        samples.length = 1797; // in the data set
        model.params = params; // rank 0's become everybody's
        model.n = 2;
        if (idist_sampler_create(&samples, &sampler) != IDIST_OK || idist_ddp_create(&model, &ddp) != IDIST_OK) return 1;
        for (epoch = 0; epoch < 10; epoch++) {
            if (idist_sampler_set_epoch(sampler, epoch) != IDIST_OK) return 1;
            while (idist_sampler_next(sampler, &index)) {     // the samples of this rank
                backward(index, idist_ddp_grad(ddp, 0), idist_ddp_grad(ddp, 1));
                if (idist_ddp_wait(ddp) != IDIST_OK) return 1; // gradients are the average of all ranks now
                step();
            }
        }
        idist_ddp_free(&ddp);
        idist_sampler_free(&sampler);

    With idist_ddp_ready(ddp, i) in the backward pass, gradients travel while those before them are computed.

WHAT IT IS

    sampler     The indices of torch.utils.data.DistributedSampler, one for one: every rank makes the same permutation
                (torch.randperm with a generator seeded by seed + epoch), and takes each n-th of it from its rank on. All
                ranks get the same number of samples; without drop_last some come twice for that, which a validation has to
                know. (Newer PyTorch shuffles 2^32 / 20 samples and more in another way.) It sends nothing: ranks agree
                because they were given the same length, seed and epoch. idist_partition is the DataPartitioner of PyTorch's
                tutorial "Writing distributed applications".
    loader      Threads that call your function for one batch after the other, some batches ahead of you.
    ddp         What DistributedDataParallel and Horovod's DistributedOptimizer do: see the picture in [train:ddp].
    metrics     Sums that are added up over the ranks when you ask, and stay what they were.
    checkpoint  Rank 0 writes and reads; a file is whole or not there.
    log         Rank 0 speaks.

    Names and rules are those of PyTorch, Ignite and Horovod where they have one. A world of 1 does everything as well.
    Nothing here is a tensor library: it moves arrays, and never looks at your network.

CONTENTS

    declarations
      [train_api:sampler]     which samples a rank takes
      [train_api:loader]      batches, fetched ahead by worker threads
      [train_api:ddp]         gradients averaged while the backward pass still runs
      [train_api:norm]        batch statistics and gradient norms over all ranks
      [train_api:metric]      numbers over all ranks
      [train_api:checkpoint]  files that are whole or not there
      [train_api:log]         what a training says, on rank 0 only
    implementation
      [train:random]          the random numbers of PyTorch and Python
      [train:agree]           the same status on all ranks
      [train:sampler]         which sample goes to which rank
      [train:loader]          batches, fetched ahead by worker threads
      [train:norm]            batch statistics and gradient norms over all ranks
      [train:metric]          numbers over all ranks
      [train:checkpoint]      files that are whole or not there
      [train:tensor]          arrays that all ranks have: compared, then copied from one of them
      [train:memory]          the same on the host and on the device
      [train:compress]        buckets that travel with fewer bits
      [train:ddp]             gradients averaged while the backward pass still runs
      [train:log]             what a training says, on rank 0 only
*/
#ifndef IDIST_H
#include "idist.h"
#endif
#include "idist_trace.h"
#ifndef IDIST_TRAIN_H
#define IDIST_TRAIN_H

#ifdef __cplusplus
extern "C" {
#endif

//------------------------------------------------------------------------------
// [train_api:sampler]  which samples a rank takes
//------------------------------------------------------------------------------

typedef struct idist_sampler idist_sampler;

// All zero but length is valid: the ranks of the world, shuffled with seed 0.
typedef struct idist_sampler_desc {
    size_t length;      // of the data set, in samples
    idist_group *group; // whose ranks share it; NULL: the world
    int num_replicas;   // > 0: so many instead, and this is the one of ...
    int rank;           // ... this number
    bool in_order;      // not shuffled
    bool
        drop_last; // leaves out what does not divide evenly; otherwise the first samples come twice
    uint64_t seed; // the same on all ranks
    // An order of your own instead of the permutation, as ignite's DistributedProxySampler takes
    // it: writes `length` indices for this epoch, the same on all ranks; it is called again (run 1,
    // 2, ...) until there are enough. Neither drop_last nor in_order then.
    void (*order_fn)(size_t *indices, size_t length, uint64_t epoch, int run, void *arg);
    void *arg;
} idist_sampler_desc;

// Local. The sampler starts in epoch 0, and keeps 8 bytes per sample of a rank. While it deals out
// an epoch (here, in set_epoch, set_state, reshard) it takes 8 per sample of the whole data set
// besides, and those of the last epoch are still there; with an order_fn 8 for each index that is
// asked of it. IDIST_ERR_ARG: no samples, or more than 2^32 - 1 of them to shuffle; a rank outside
// 0 .. num_replicas - 1.
IDIST_API idist_status idist_sampler_create(const idist_sampler_desc *desc,
                                            idist_sampler **sampler);
IDIST_API void idist_sampler_free(idist_sampler **sampler);

// Begins an epoch, with all samples: without it every pass has the same order. IDIST_ERR_NO_MEMORY:
// nothing has changed.
IDIST_API idist_status idist_sampler_set_epoch(idist_sampler *sampler, uint64_t epoch);
// Samples of this rank in an epoch; the same on all ranks.
IDIST_API size_t idist_sampler_count(const idist_sampler *sampler);
// The next index of this rank, or false at the end of the epoch; the call after that begins it anew
// (position 0).
IDIST_API bool idist_sampler_next(idist_sampler *sampler, size_t *index);

// For checkpoints: where in which epoch this rank is, and back there. IDIST_ERR_ARG: that is beyond
// the end. To go on with another number of ranks: processed + position * (ranks before), or length
// if that is less, and position 0.
typedef struct idist_sampler_state {
    uint64_t epoch, position; // samples of this rank that are through, ...
    uint64_t processed; // ... not counting those of all ranks before the last idist_sampler_reshard
} idist_sampler_state;
IDIST_API idist_sampler_state idist_sampler_get_state(const idist_sampler *sampler);
IDIST_API idist_status idist_sampler_set_state(idist_sampler *sampler, idist_sampler_state state);

// The elastic form, by the rule of Horovod's ElasticSampler: ranks work in step, each records what
// it has processed, and when ranks were lost or have come, the rest of the epoch is dealt out anew.
//
// Another `count` samples of this rank are processed, of those that idist_sampler_next gives; after
// a batch, say. IDIST_ERR_ARG: there are not so many in an epoch. A second pass over it needs an
// idist_sampler_set_epoch, which begins the record anew.
IDIST_API idist_status idist_sampler_record(idist_sampler *sampler, size_t count);
// Collective over opts->group (after idist_shrink, the survivors): takes epoch and record of rank 0
// of the group, and deals out what is left of the epoch's order among the ranks of the group, which
// is the sampler's from then on, also in later epochs. What was handed out and not recorded comes
// again. IDIST_ERR_ARG: the sampler was made with num_replicas.
IDIST_API idist_status idist_sampler_reshard(idist_sampler *sampler, const idist_opts *opts);

// Shuffles 0 .. length - 1 (random.Random(seed).shuffle of Python) and cuts it into parts of
// fractions[i] * length samples, rounded down; the fractions add up to 1 at most. Writes part
// `which`, and to *count how long it is; indices has room for `length`. IDIST_ERR_ARG: fractions
// below 0 or above 1 together, or no such part.
IDIST_API idist_status idist_partition(size_t length, const double *fractions, int n, int which,
                                       uint64_t seed, size_t *indices, size_t *count);

// What one rank gives its loader, for a batch of all ranks together: batch_size / ranks, rounded
// down, unless that is 0; and for all workers of a host: num_workers / ranks on this host, rounded
// up, unless there are fewer workers than ranks.
IDIST_API int idist_auto_batch_size(int batch_size);
IDIST_API int idist_auto_num_workers(int num_workers);

// seed + rank: the seed of what has to differ from rank to rank, augmentation say. (First weights
// come from one rank.)
IDIST_API uint64_t idist_auto_seed(uint64_t seed);

//------------------------------------------------------------------------------
// [train_api:loader]  batches, fetched ahead by worker threads
//------------------------------------------------------------------------------

typedef struct idist_loader idist_loader;

// All zero but sampler, batch_size, batch_nbytes and fetch is valid.
typedef struct idist_loader_desc {
    // Yours, to outlive the loader, which moves it: its state is always that after the last batch
    // you got. When you move it, or reshard it, the loader drops what it fetched ahead and goes on
    // from there.
    idist_sampler *sampler;
    size_t batch_size;   // samples per batch of this rank
    size_t batch_nbytes; // room for one batch
    // Writes the samples `indices[0 .. n-1]` to `batch`. 0 is success. Runs in worker threads,
    // several at a time, for different batches; must not call idist.
    int (*fetch)(void *batch, const size_t *indices, size_t n, void *arg);
    void *arg;
    int num_workers; // threads, up to 1,024; 0: fetch runs inside idist_loader_next
    int prefetch;    // batches ahead of the consumer, per worker; 0: 2
    bool drop_last;  // leaves out a last batch that is not full
    int timeout_ms;  // how long a call waits for the workers' fetches; 0: 5 minutes, < 0: for ever
    idist_allocator allocator; // of the batches: pinned memory, say. All zero: malloc.
} idist_loader_desc;

IDIST_API idist_status idist_loader_create(const idist_loader_desc *desc, idist_loader **loader);
// Stops the workers, after the fetches that run. Local. When some do not end within desc.timeout_ms
// it returns, and the last of them frees the batches.
IDIST_API void idist_loader_free(idist_loader **loader);
// Begins an epoch, here and in the sampler; what was fetched ahead is dropped. A new loader begins
// where its sampler is. IDIST_ERR_TIMEOUT: fetches from before still run. The sampler is in the new
// epoch, and the next call tries again.
IDIST_API idist_status idist_loader_set_epoch(idist_loader *loader, uint64_t epoch);
// Batches of this rank in an epoch.
IDIST_API size_t idist_loader_count(const idist_loader *loader);
// The sampler, for its state; that of idist_auto_loader belongs to the loader.
IDIST_API idist_sampler *idist_loader_sampler(const idist_loader *loader);

typedef struct idist_batch {
    void *data;            // what fetch wrote; yours to write to until the next call on the loader
    const size_t *indices; // the samples, until then
    size_t n; // so many; 0: the epoch has ended (data is NULL). The call after that begins it anew.
} idist_batch;

// The next batch in the sampler's order, whatever the number of workers. Waits for the workers.
// IDIST_ERR_CALLBACK: fetch failed for these samples (data is NULL); the batch after it is the
// next. IDIST_ERR_TIMEOUT: a worker's fetch does not return; nothing is lost, and the next call
// waits for the same batch. IDIST_ERR_STATE: the workers belong to the process that this one was
// forked from. One thread at a time calls the functions of a loader.
IDIST_API idist_status idist_loader_next(idist_loader *loader, idist_batch *batch);

// Ignite's auto_dataloader: desc says batch_size, batch_nbytes and num_workers of all ranks
// together (of the sampler's group; see idist_auto_batch_size), and the loader makes its own
// sampler, of `samples` (desc.sampler is NULL). Where the rank has a device (idist_nccl.h is
// included before this header) and desc.allocator is not set, batches lie in pinned memory. Logs
// what came of it at info level, and warns, as Ignite does, when samples.num_replicas and
// samples.rank are not those of the group.
IDIST_API idist_status idist_auto_loader(const idist_loader_desc *desc,
                                         const idist_sampler_desc *samples, idist_loader **loader);

//------------------------------------------------------------------------------
// [train_api:ddp]  gradients averaged while the backward pass still runs
//------------------------------------------------------------------------------

// An array of the program, on the host or on the device.
typedef struct idist_tensor {
    void *data;
    size_t count; // elements
    idist_dtype dtype;
} idist_tensor;

// Copies n tensors of root to all ranks of opts->group. Collective; blocking. Before that the ranks
// compare shapes: when one has another number of tensors, or another count or dtype, all get
// IDIST_ERR_MISMATCH, which names the rank and the tensor.
IDIST_API idist_status idist_broadcast_parameters(const idist_tensor *params, int n, int root,
                                                  const idist_opts *opts);
// The same for what an optimizer keeps: its tensors (momentum and the like), and a struct of its
// numbers (rate, step), options_nbytes of host memory, which may be NULL.
IDIST_API idist_status idist_broadcast_optimizer_state(const idist_tensor *state, int n,
                                                       void *options, size_t options_nbytes,
                                                       int root, const idist_opts *opts);

typedef struct idist_ddp idist_ddp;

// What the gradients are on the way from rank to rank.
typedef enum idist_compression {
    IDIST_COMPRESS_NONE = 0,
    IDIST_COMPRESS_F16 = 1,  // halves: F32 and F64 gradients, sums carried in float
    IDIST_COMPRESS_BF16 = 2, // bfloats: the same
    IDIST_COMPRESS_I8 =
        3 // a byte each and a scale per 1,024; what rounding took is added to the next gradient
} idist_compression;

// A bucket on its way, as a hook of yours gets it.
typedef struct idist_bucket {
    int index;  // 0: the first one launched
    void *data; // this rank's gradients, one after the other; `finish` leaves the result here.
                // NULL: there are none
    size_t count;
    idist_dtype dtype;
    idist_opts opts; // for the hook's communication: group, stream, time-out, and a request to use
                     // in `start`
    double scale;    // the result is to be scale * sum over the ranks
    void *state;     // the hook's own, one per bucket; NULL at first
} idist_bucket;

// A communication hook: start begins one call (with opts.request, so that the program can go on),
// and finish, after the request is complete, leaves the result in data. Both are called for the
// same buckets in the same order on all ranks; finish may communicate too. free_fn (may be NULL)
// gets each state that is not NULL. A failure is one of the iteration.
typedef struct idist_ddp_hook {
    idist_status (*start)(idist_bucket *bucket, void *arg);
    idist_status (*finish)(idist_bucket *bucket, void *arg);
    void (*free_fn)(void *state, void *arg);
    void *arg;
} idist_ddp_hook;

// All zero but params and n is valid.
typedef struct idist_ddp_desc {
    // n parameters in the order of the forward pass, and their gradients, of the same counts. The
    // two may differ in dtype. Gradients that lie one after the other in memory are reduced where
    // they are; others are copied together and back. grads NULL, or with data NULL: memory that is
    // laid out for it (idist_alloc, cudaMalloc), zeroed; see idist_ddp_grad.
    const idist_tensor *params, *grads;
    int n;
    const idist_tensor
        *buffers; // not trained, running means say: idist_ddp_forward copies them from one rank
    int n_buffers;
    idist_group *group;   // NULL: the world
    size_t bucket_nbytes; // 0: 25 MiB, and 1 MiB for the first
    idist_compression compression;
    const idist_ddp_hook *hook; // instead; copied
    double prescale, postscale; // factors before and after the sum; 0: 1
    bool sum;                   // the sum over the ranks instead of the average
    bool keep_params;           // they are equal already: compare the shapes only
    bool find_unused; // parameters that are not ready when idist_ddp_wait comes have no gradient:
                      // see there
    bool uneven;      // ranks may run out of data before others: see idist_ddp_join
    bool divide_by_active; // uneven: average over the ranks that still have data, instead of over
                           // all
    bool on_device;        // params, grads and buffers are device memory (idist_nccl.h)
    void *
        stream; // on_device: the cudaStream_t that computes the gradients; NULL: the default stream
    int timeout_ms; // of each call; as in idist_opts
} idist_ddp_desc;

// Collective over the group; blocking. Compares shapes, copies parameters and buffers of rank 0 of
// the group to all, and forms the buckets: gradients of one dtype in reverse order, closed when
// they reach the limit. IDIST_ERR_MISMATCH as for idist_broadcast_parameters.
// IDIST_ERR_UNSUPPORTED: compression of other gradients than F32 and, on the host, F64. On the
// device compression, factors and divide_by_active take CUDA 12.8 (else IDIST_ERR_DEVICE), and
// idist_nccl.h is included before this file. The arrays of tensors are copied; what they point to
// stays yours, and has to stay. A ddp is for the world it was made in.
IDIST_API idist_status idist_ddp_create(const idist_ddp_desc *desc, idist_ddp **ddp);
// Local. In the middle of an iteration it waits for what was begun.
IDIST_API void idist_ddp_free(idist_ddp **ddp);
IDIST_API void *idist_ddp_grad(const idist_ddp *ddp, int i); // where gradient i lies
IDIST_API int idist_ddp_bucket(const idist_ddp *ddp,
                               int i);                 // the bucket it is in; 0 is launched first
IDIST_API int idist_ddp_buckets(const idist_ddp *ddp); // how many there are

// Before the forward pass, where there are buffers or uneven is set; otherwise not needed. Copies
// the buffers of the first rank that has data. Collective over the group. A forward pass without a
// backward one, to validate, may follow or be followed by another; with uneven each has its
// idist_ddp_wait.
IDIST_API idist_status idist_ddp_forward(idist_ddp *ddp);
// Gradient i is complete: until idist_ddp_wait nobody touches it. Starts what can start, and does
// not wait for it (but makes up for an idist_ddp_forward that was needed). Any thread, one at a
// time. Between the first one and idist_ddp_wait nothing else goes on this group: when buckets
// start differs from rank to rank. IDIST_ERR_STATE: it was ready already.
IDIST_API idist_status idist_ddp_ready(idist_ddp *ddp, int i);
// The end of the backward pass: all gradients count as ready, and on return all are averaged (on
// the device: what comes to desc.stream from now on sees it). The same on all ranks, bit for bit.
// find_unused: a parameter that was not ready, here or in a pass with no_sync before, adds nothing,
// and one that no rank had ready keeps its gradient as it is.
IDIST_API idist_status idist_ddp_wait(idist_ddp *ddp);
// find_unused: whether any rank had a gradient for parameter i in the last iteration; otherwise
// true.
IDIST_API bool idist_ddp_used(const idist_ddp *ddp, int i);
// While on, forward, ready and wait send nothing: gradients add up here, and go out with the first
// iteration after it. The same on all ranks, between iterations only (else IDIST_ERR_STATE).
IDIST_API idist_status idist_ddp_no_sync(idist_ddp *ddp, bool on);

// Uneven inputs (desc.uneven): a rank without further data calls this instead of its next
// iteration. It adds zeros to the iterations of the others (its gradients and buffers are
// overwritten) until all have come here. Then the parameters and buffers of the rank that came
// last, the one whose optimizer made all the steps, are copied to all; *last is that rank (may be
// NULL). After it the iterations begin anew. Collective over the group; blocks. What else the
// program communicates on this group in an iteration, ranks in here do not answer.
IDIST_API idist_status idist_ddp_join(idist_ddp *ddp, int *last);
// Ranks that had data in the last iteration.
IDIST_API int idist_ddp_active(const idist_ddp *ddp);

// Ignite's auto_optim: idist_ddp_wait, and when that went well, step(arg), whose failure (not 0) is
// IDIST_ERR_CALLBACK. While no_sync is on it does neither.
IDIST_API idist_status idist_auto_optim(idist_ddp *ddp, idist_task_fn step, void *arg);

//------------------------------------------------------------------------------
// [train_api:norm]  batch statistics and gradient norms over all ranks
//------------------------------------------------------------------------------

// SyncBatchNorm, forward: mean and var (biased) of `channels` channels over the *count values per
// channel that this rank has become those over all ranks, *count their number. Combined in rank
// order by the update of Chan, Golub and LeVeque (1983): the same bits everywhere, and no
// cancellation. A rank may have *count == 0. Collective over opts->group. When one rank has no
// memory for it, all get IDIST_ERR_NO_MEMORY, here and backward, and the group is unusable from
// then on.
IDIST_API idist_status idist_sync_batch_norm(float *mean, float *var, int channels, uint64_t *count,
                                             const idist_opts *opts);
// Backward: sums over all ranks of sum(dy) and sum(dy * (x - mean)), per channel.
IDIST_API idist_status idist_sync_batch_norm_backward(float *sum_dy, float *sum_dy_xmu,
                                                      int channels, const idist_opts *opts);

// Scales gradients (any floating dtype; host memory) so that their 2-norm, all together, is
// max_norm at most; *norm (may be NULL) is what it was: torch's clip_grad_norm_. shared: every rank
// has all of the gradients, the same, as after idist_ddp_wait; nothing is sent. Otherwise each rank
// has a part of its own, and the norm is that of all parts: collective. A norm that is not finite,
// as a double adds up squares, is IDIST_ERR_ARG on all ranks, and nothing is scaled.
IDIST_API idist_status idist_clip_grad_norm(const idist_tensor *grads, int n, double max_norm,
                                            bool shared, double *norm, const idist_opts *opts);

//------------------------------------------------------------------------------
// [train_api:metric]  numbers over all ranks
//
// Plain structs, all zero at the start of an epoch: update adds what this rank saw, compute tells
// the value over all ranks of opts->group. compute reduces a copy: it may be called at any time,
// and again. Collective, the same result everywhere; a rank that does not want it passes NULL for
// value.
//------------------------------------------------------------------------------

// The share of samples whose highest score is that of their label.
typedef struct idist_accuracy {
    uint64_t correct, total;
} idist_accuracy;
// scores: n * classes, a row per sample; labels: n. IDIST_ERR_ARG: a label is not in 0 .. classes
// - 1.
IDIST_API idist_status idist_accuracy_update(idist_accuracy *m, const float *scores,
                                             const int *labels, size_t n, int classes);
// NaN when no rank has seen a sample; the same for the mean. Of equal scores the first counts; a
// row with a NaN is wrong.
IDIST_API idist_status idist_accuracy_compute(const idist_accuracy *m, double *value,
                                              const idist_opts *opts);

// A weighted mean: of the loss, by samples.
typedef struct idist_mean {
    double sum, weight;
} idist_mean;
IDIST_API void idist_mean_update(idist_mean *m, double value, double weight);
IDIST_API idist_status idist_mean_compute(const idist_mean *m, double *value,
                                          const idist_opts *opts);

// An exponential one, value = alpha * value + (1 - alpha) * new, begun with the first; computed as
// the mean over the ranks that have begun.
typedef struct idist_running_average {
    double alpha; // 0: 0.98
    double value;
    bool begun;
} idist_running_average;
IDIST_API void idist_running_average_update(idist_running_average *m, double value);
IDIST_API idist_status idist_running_average_compute(const idist_running_average *m, double *value,
                                                     const idist_opts *opts);

// cells[label * classes + predicted]: classes * classes counts, yours, zero at the start.
typedef struct idist_confusion {
    uint64_t *cells;
    int classes;
} idist_confusion;
IDIST_API idist_status idist_confusion_update(idist_confusion *m, const int *predicted,
                                              const int *labels, size_t n);
// cells: classes * classes; those of all ranks. Not the cells of m. NULL: not wanted on this rank.
IDIST_API idist_status idist_confusion_compute(const idist_confusion *m, uint64_t *cells,
                                               const idist_opts *opts);

// What cannot be added up, the area under a curve say: rank 0 of the group gets the rows of all
// ranks, in rank order, and calls fn(rows, n, arg, &value); its value goes to all. rows: n of
// row_nbytes bytes, n may differ from rank to rank. fn returns 0 on success; its failure is
// IDIST_ERR_CALLBACK on all ranks.
typedef int (*idist_epoch_metric_fn)(const void *rows, size_t n, void *arg, double *value);
IDIST_API idist_status idist_epoch_metric(const void *rows, size_t n, size_t row_nbytes,
                                          idist_epoch_metric_fn fn, void *arg, double *value,
                                          const idist_opts *opts);

//------------------------------------------------------------------------------
// [train_api:checkpoint]  files that are whole or not there
//
// Host memory only. Collective over opts->group, rank 0 of which reads and writes: what it meets
// with is the status of all.
//------------------------------------------------------------------------------

typedef struct idist_checkpoint_desc {
    const char *folder; // made when it is not there; on rank 0
    const char *prefix; // of the file names; NULL: "checkpoint"
    int keep;           // the files with the best scores; 0: 1. < 0: all
    bool low_is_best;   // scores that are better when lower: a loss
} idist_checkpoint_desc;

// Writes tensors and a struct of yours (info: what epoch, what rate; may be NULL, and may differ on
// other ranks, where it is not looked at) as folder/PREFIX_STEP_score=SCORE.idist: to a temporary
// file in the folder, fsync, rename, fsync of the folder. Then removes those beyond the `keep`
// best; of equal scores the later one is better. A file that is not among the best is not written
// at all, and none whose name (SCORE is %.6g) a file with a better score has. All files of that
// prefix count, also those of earlier runs and what is damaged behind its head: give each training
// a folder of its own. What is not written the log tells, at info level; as a warning when the
// better file is of a later step, so that another run wrote it. A crash at any moment leaves whole
// files, and at most a temporary one, which the next removes. IDIST_ERR_NO_SPACE, IDIST_ERR_SYSTEM:
// nothing was lost that was there before. IDIST_ERR_ARG: a score that is not a number.
IDIST_API idist_status idist_checkpoint_save(const idist_checkpoint_desc *desc, uint64_t step,
                                             double score, const idist_tensor *tensors, int n,
                                             const void *info, size_t info_nbytes,
                                             const idist_opts *opts);

// Reads a file into tensors and info on all ranks; path is looked at on rank 0. Checked whole
// before anything is written to: magic, version, counts, dtypes, sizes, and a checksum over every
// byte. A file of other tensors, a torn or a foreign one is IDIST_ERR_ARG with what is wrong, on
// all ranks. IDIST_ERR_NOT_FOUND: there is no such file. The checksum is verified again on each
// rank, over what has arrived there: IDIST_ERR_SYSTEM, and what tensors and info hold is undefined.
IDIST_API idist_status idist_checkpoint_load(const char *path, const idist_tensor *tensors, int n,
                                             void *info, size_t info_nbytes,
                                             const idist_opts *opts);

// The file with the best score, or with latest the one with the highest step; rank 0 looks, all get
// the name. IDIST_ERR_NOT_FOUND: none is there. IDIST_ERR_TRUNCATED: capacity is too small.
IDIST_API idist_status idist_checkpoint_find(const idist_checkpoint_desc *desc, bool latest,
                                             char *path, size_t capacity, const idist_opts *opts);

//------------------------------------------------------------------------------
// [train_api:log]  what a training says, on rank 0 only
//
// Lines go to desc.logger at info level, whatever IDIST_LOG says, or to stderr: "2026-01-30
// 19:26:12,180 NAME INFO: text". Calls on other ranks do nothing, nor do those inside a logger.
//------------------------------------------------------------------------------

#if defined(__GNUC__)
#define IDIST__FORMAT(at, args) __attribute__((format(printf, at, args)))
#else
#define IDIST__FORMAT(at, args)
#endif

// name: of the training, "CIFAR10-Training". Of a long text the first 2,000 bytes; new lines in it
// become spaces.
IDIST_API void idist_train_log(const char *name, const char *format, ...) IDIST__FORMAT(2, 3);
// Versions, backend, world size, and idist_show_config, a line each.
IDIST_API void idist_train_log_config(const char *name);
// "Epoch 3 - Evaluation time (seconds): 4.02 - Test metrics:", then a line "    Accuracy: 0.7" for
// each of n metrics.
IDIST_API void idist_train_log_metrics(const char *name, int epoch, double seconds, const char *tag,
                                       const char *const *names, const double *values, int n);

// A bar on stderr, if that is a terminal: "Epoch [3/24]: [120/391]  30%|###       | loss=1.2
// [00:12<00:27]". done == total ends the line. On a narrow terminal it goes without the picture,
// and then without its end, to stay one line.
typedef struct idist_progress {
    const char *title; // "Epoch [3/24]"
    uint64_t total;
    int64_t started_ns, shown_ns; // private; 0
} idist_progress;
IDIST_API void idist_progress_update(idist_progress *bar, uint64_t done, const char *text);

#ifdef __cplusplus
} // extern "C"
#endif

#undef IDIST__FORMAT

#endif // IDIST_TRAIN_H

// Only here for the API? Stop reading.

#if defined(IDIST_IMPLEMENTATION) && !defined(IDIST_TRAIN_IMPLEMENTATION_DONE)
#define IDIST_TRAIN_IMPLEMENTATION_DONE

#include <dirent.h>
#include <sys/ioctl.h>

#include "idist_begin.h"

//------------------------------------------------------------------------------
// [train:random]  the random numbers of PyTorch and Python
// uses -
//
// The Mersenne Twister of Matsumoto and Nishimura (1998) with 624 words; PyTorch seeds it by
// Knuth's recurrence from 32 bits, Python by their init_by_array (2002) from as many as the seed
// has.
//------------------------------------------------------------------------------

#define IDIST__TWISTER_WORDS 624

typedef struct idist__twister {
    uint32_t word[IDIST__TWISTER_WORDS];
    int at;
} idist__twister;

static void idist__twister_seed(idist__twister *r, uint32_t seed) {
    uint32_t i;
    r->word[0] = seed;
    for (i = 1; i < IDIST__TWISTER_WORDS; i++)
        r->word[i] = 1812433253u * (r->word[i - 1] ^ (r->word[i - 1] >> 30)) + i;
    r->at = IDIST__TWISTER_WORDS;
}

static void idist__twister_seed_array(idist__twister *r, uint64_t seed) {
    uint32_t key[2], n = seed >> 32 ? 2 : 1, i, j = 0, k;

    key[0] = (uint32_t)seed;
    key[1] = (uint32_t)(seed >> 32);
    idist__twister_seed(r, 19650218u);

    for (i = 1, k = 0; k < IDIST__TWISTER_WORDS; k++, j = (j + 1) % n) {
        r->word[i] =
            (r->word[i] ^ ((r->word[i - 1] ^ (r->word[i - 1] >> 30)) * 1664525u)) + key[j] + j;
        if (++i < IDIST__TWISTER_WORDS) continue;
        r->word[0] = r->word[IDIST__TWISTER_WORDS - 1];
        i = 1;
    }

    for (k = 1; k < IDIST__TWISTER_WORDS; k++) {
        r->word[i] = (r->word[i] ^ ((r->word[i - 1] ^ (r->word[i - 1] >> 30)) * 1566083941u)) - i;
        if (++i < IDIST__TWISTER_WORDS) continue;
        r->word[0] = r->word[IDIST__TWISTER_WORDS - 1];
        i = 1;
    }

    r->word[0] = 0x80000000u;
}

static void idist__twister_turn(idist__twister *r) {
    int i;

    for (i = 0; i < IDIST__TWISTER_WORDS; i++) {
        uint32_t next = r->word[(i + 1) % IDIST__TWISTER_WORDS],
                 y = (r->word[i] & 0x80000000u) | (next & 0x7fffffffu);
        r->word[i] =
            r->word[(i + 397) % IDIST__TWISTER_WORDS] ^ (y >> 1) ^ (y & 1 ? 0x9908b0dfu : 0u);
    }

    r->at = 0;
}

static uint32_t idist__twister_next(idist__twister *r) {
    uint32_t y;

    if (r->at == IDIST__TWISTER_WORDS) idist__twister_turn(r);
    y = r->word[r->at++];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
}

// torch.randperm on the CPU: each place in turn is exchanged with one that is not settled yet.
static void idist__random_permutation(size_t *p, size_t n, uint64_t seed) {
    idist__twister r;
    size_t i;

    idist__twister_seed(&r, (uint32_t)seed);
    for (i = 0; i < n; i++) p[i] = i;

    for (i = 0; i + 1 < n; i++) {
        size_t k = i + idist__twister_next(&r) % (n - i), settled = p[k];
        p[k] = p[i];
        p[i] = settled;
    }
}

// random.shuffle of Python: numbers below a limit by rejection.
static void idist__random_shuffle(size_t *p, size_t n, uint64_t seed) {
    idist__twister r;
    size_t i;

    idist__twister_seed_array(&r, seed);
    for (i = 0; i < n; i++) p[i] = i;

    for (i = n; i-- > 1;) {
        size_t k, other;
        int bits = 0;
        while ((i + 1) >> bits) bits++;
        do k = idist__twister_next(&r) >> (32 - bits);
        while (k > i);
        other = p[k];
        p[k] = p[i];
        p[i] = other;
    }
}

//------------------------------------------------------------------------------
// [train:agree]  the same status on all ranks
// uses err world core:call life calls:coll
//
// What is made of several calls fails on all ranks or on none: each says how its part went, and all
// return what the first rank that failed has to say. A success costs one all_reduce of 4 bytes.
//------------------------------------------------------------------------------

typedef struct idist__verdict {
    int32_t status;
    char text[900];
} idist__verdict;

// Before anything is done: whether calls on this group can succeed. *out: the options for host
// memory.
static idist_status idist__agree_enter(const char *name, const idist_opts *opts, idist_opts *out) {
    idist_group *g = NULL;
    idist_status s = idist__check_blocking(name, opts);

    memset(out, 0, sizeof *out);
    if (s != IDIST_OK) return s;
    if (opts) *out = *opts;
    out->stream = NULL;
    if ((s = idist__call_enter(name, out->group, &g)) != IDIST_OK) return s;
    if (g->rank < 0)
        s = idist__fail(IDIST_ERR_STATE, "%s: this rank is not a member of the group", name);
    else if (g->status != IDIST_OK)
        s = idist__fail(g->status, "%s: the group failed earlier: %s", name, g->cause);
    pthread_mutex_unlock(&g->w->lock);

    return s;
}

static idist_status idist__agree(idist_status mine, const idist_opts *o) {
    idist__verdict v;
    int rank = idist_group_rank(o->group);
    int32_t first = mine == IDIST_OK ? INT32_MAX : rank;
    idist_status s;

    memset(&v, 0, sizeof v);
    v.status = mine;
    if (mine != IDIST_OK) idist__copy_text(v.text, sizeof v.text, idist__me.text);
    s = idist_all_reduce(&first, &first, 1, IDIST_I32, IDIST_MIN, o);
    if (s != IDIST_OK || first == INT32_MAX) return s;
    if ((s = idist_broadcast(&v, sizeof v, IDIST_U8, first, o)) != IDIST_OK) return s;
    if (first == rank) return idist__fail((idist_status)v.status, "%s", v.text);

    return idist__fail((idist_status)v.status, "%s (on rank %d)", v.text,
                       o->group ? o->group->ranks[first] : first);
}

// This rank cannot go on in the middle of what all do: without this the others would wait for it.
static idist_status idist__agree_break(const char *name, idist_group *group, idist_status status) {
    char text[400];
    idist_group *g = NULL;
    bool failed;

    snprintf(text, sizeof text, "%s: rank %d cannot go on: %.300s", name, idist_group_rank(group),
             idist_last_error());
    if (idist__call_enter(name, group, &g) != IDIST_OK) return status;
    failed = g->status != IDIST_OK; // then all know already
    idist__group_fail(g, status, text);
    idist__group_flush(g);
    pthread_mutex_unlock(&g->w->lock);

    return failed ? status : idist__fail(status, "%s", text);
}

static idist_status idist__agree_no_memory(const char *name, idist_group *group) {
    return idist__agree_break(name, group, idist__fail(IDIST_ERR_NO_MEMORY, "no memory"));
}

//------------------------------------------------------------------------------
// [train:sampler]  which sample goes to which rank
// uses err life calls:coll random agree
//------------------------------------------------------------------------------

// PyTorch and Python draw with 32 bits. Indices, some for padding among them, have to fit into
// memory as well.
static const size_t IDIST__SHUFFLED_MOST =
    (size_t)(SIZE_MAX / 64 < UINT32_MAX ? SIZE_MAX / 64 : UINT32_MAX);

struct idist_sampler {
    idist_sampler_desc desc;
    bool fixed;      // by num_replicas
    size_t count;    // samples per rank
    size_t *indices; // of this rank, of what is left of this epoch
    uint64_t epoch;
    size_t processed; // samples of all ranks, before these
    size_t recorded;  // of this rank, of these
    size_t at;
    uint64_t n_deals; // how often the indices have changed
};

// The epoch's order, `total` long; when it is through, it goes on with what comes after
// `processed`.
static size_t *idist__sampler_order(const idist_sampler_desc *d, uint64_t epoch, size_t processed,
                                    size_t total) {
    size_t runs = (total + d->length - 1) / d->length, run, i;
    size_t room = d->order_fn ? runs * d->length : total > d->length ? total : d->length;
    size_t *order = (size_t *)malloc((room + 1) * sizeof *order);

    if (!order) return NULL;
    for (run = 0; run < runs && d->order_fn; run++)
        d->order_fn(order + run * d->length, d->length, epoch, (int)run, d->arg);
    if (d->order_fn) return order;
    if (d->in_order)
        for (i = 0; i < d->length; i++) order[i] = i;
    else idist__random_permutation(order, d->length, d->seed + epoch);
    for (i = d->length; i < total; i++) order[i] = order[i - (d->length - processed)];

    return order;
}

// Deals out what is left of an epoch. On failure nothing has changed.
static idist_status idist__sampler_deal(idist_sampler *s, const idist_sampler_desc *d,
                                        uint64_t epoch, size_t processed) {
    size_t n = (size_t)d->num_replicas, left = d->length - processed, i;
    size_t count = d->drop_last ? left / n : (left + n - 1) / n;
    size_t *order = idist__sampler_order(d, epoch, processed, processed + count * n);
    size_t *indices = (size_t *)malloc((count + 1) * sizeof *indices);

    if (!order || !indices) {
        free(order);
        free(indices);
        return idist__fail(IDIST_ERR_NO_MEMORY, "sampler: no memory for %zu indices", d->length);
    }

    for (i = 0; i < count; i++) indices[i] = order[processed + (size_t)d->rank + i * n];
    free(order);
    free(s->indices);
    s->indices = indices;
    s->count = count;
    s->desc = *d;
    s->epoch = epoch;
    s->processed = processed;
    s->at = s->recorded = 0;
    s->n_deals++;

    return IDIST_OK;
}

idist_status idist_sampler_set_epoch(idist_sampler *s, uint64_t epoch) {
    if (!s) return idist__fail(IDIST_ERR_ARG, "sampler_set_epoch: sampler is NULL");
    return idist__sampler_deal(s, &s->desc, epoch, 0);
}

idist_status idist_sampler_create(const idist_sampler_desc *desc, idist_sampler **sampler) {
    idist_sampler *s;
    idist_sampler_desc d;
    idist_status status;

    if (!sampler || !desc)
        return idist__fail(IDIST_ERR_ARG, "sampler_create: desc or sampler is NULL");
    *sampler = NULL;
    d = *desc;
    if (!d.num_replicas && d.rank)
        return idist__fail(IDIST_ERR_ARG, "sampler_create: rank %d, of no num_replicas", d.rank);

    if (!d.num_replicas) {
        d.num_replicas = idist_group_size(d.group);
        d.rank = idist_group_rank(d.group);
        if (d.rank < 0)
            return idist__fail(IDIST_ERR_STATE,
                               "sampler_create: this rank is not a member of the group");
    }

    if (!d.length || d.length > (d.in_order || d.order_fn ? SIZE_MAX / 64 : IDIST__SHUFFLED_MOST))
        return idist__fail(IDIST_ERR_ARG, "sampler_create: a data set of %zu samples", d.length);
    if (d.num_replicas < 1)
        return idist__fail(IDIST_ERR_ARG, "sampler_create: num_replicas is %d", d.num_replicas);
    if (d.rank < 0 || d.rank >= d.num_replicas)
        return idist__fail(IDIST_ERR_ARG, "sampler_create: rank %d is not in 0 .. %d", d.rank,
                           d.num_replicas - 1);
    if (d.order_fn && (d.drop_last || d.in_order))
        return idist__fail(IDIST_ERR_ARG,
                           "sampler_create: an order_fn, and drop_last or in_order as well");
    if ((s = (idist_sampler *)calloc(1, sizeof *s)) == NULL)
        return idist__fail(IDIST_ERR_NO_MEMORY, "sampler_create: no memory for %zu samples",
                           d.length);
    s->fixed = desc->num_replicas != 0;
    status = idist__sampler_deal(s, &d, 0, 0);
    *sampler = s;
    if (status != IDIST_OK) idist_sampler_free(sampler);

    return status;
}

void idist_sampler_free(idist_sampler **sampler) {
    if (!sampler || !*sampler) return;
    free((*sampler)->indices);
    free(*sampler);
    *sampler = NULL;
}

size_t idist_sampler_count(const idist_sampler *s) { return s ? s->count : 0; }

bool idist_sampler_next(idist_sampler *s, size_t *index) {
    if (!s || !index) return false;

    if (s->at == s->count) {
        s->at = 0;
        return false;
    }

    *index = s->indices[s->at++];
    return true;
}

idist_sampler_state idist_sampler_get_state(const idist_sampler *s) {
    idist_sampler_state state;

    memset(&state, 0, sizeof state);
    if (!s) return state;
    state.epoch = s->epoch;
    state.position = s->at;
    state.processed = s->processed;
    return state;
}

idist_status idist_sampler_set_state(idist_sampler *s, idist_sampler_state state) {
    size_t n, left;
    idist_status status;

    if (!s) return idist__fail(IDIST_ERR_ARG, "sampler_set_state: sampler is NULL");
    if (state.processed > s->desc.length)
        return idist__fail(IDIST_ERR_ARG, "sampler_set_state: %llu processed, of %zu samples",
                           (unsigned long long)state.processed, s->desc.length);
    n = (size_t)s->desc.num_replicas;
    left = s->desc.length - (size_t)state.processed;
    if (state.position > (s->desc.drop_last ? left / n : (left + n - 1) / n))
        return idist__fail(IDIST_ERR_ARG,
                           "sampler_set_state: position %llu, of %zu samples for %zu ranks",
                           (unsigned long long)state.position, left, n);
    status = idist__sampler_deal(s, &s->desc, state.epoch, (size_t)state.processed);
    if (status == IDIST_OK) s->at = s->recorded = (size_t)state.position;

    return status;
}

idist_status idist_sampler_record(idist_sampler *s, size_t count) {
    if (!s) return idist__fail(IDIST_ERR_ARG, "sampler_record: sampler is NULL");
    if (count > s->count - s->recorded)
        return idist__fail(IDIST_ERR_ARG,
                           "sampler_record: %zu samples more than the %zu before, of %zu", count,
                           s->recorded, s->count);
    s->recorded += count;
    return IDIST_OK;
}

idist_status idist_sampler_reshard(idist_sampler *s, const idist_opts *opts) {
    idist_sampler_desc d;
    idist_opts o;
    uint64_t state[3] = {0, 0, 0}; // of rank 0: epoch, processed by all ranks, length
    size_t processed;
    idist_status status = idist__agree_enter("sampler_reshard", opts, &o);

    if (status != IDIST_OK) return status;
    if (!s) status = idist__fail(IDIST_ERR_ARG, "sampler_reshard: sampler is NULL");
    else if (s->fixed)
        status =
            idist__fail(IDIST_ERR_ARG, "sampler_reshard: the sampler was made with num_replicas");
    if ((status = idist__agree(status, &o)) != IDIST_OK) return status;
    d = s->desc;
    processed = s->processed + s->recorded * (size_t)d.num_replicas;
    state[0] = s->epoch;
    state[1] = processed < d.length ? processed : d.length; // some came twice
    state[2] = d.length;
    if ((status = idist_broadcast(state, 3, IDIST_U64, 0, &o)) != IDIST_OK) return status;
    d.group = o.group;
    d.num_replicas = idist_group_size(o.group);
    d.rank = idist_group_rank(o.group);
    if (state[2] != d.length)
        status =
            idist__fail(IDIST_ERR_MISMATCH, "sampler_reshard: %zu samples here, and %llu on rank 0",
                        d.length, (unsigned long long)state[2]);
    if (status == IDIST_OK) status = idist__sampler_deal(s, &d, state[0], (size_t)state[1]);

    return idist__agree(status, &o);
}

// As Python has it: rounded to a double, then cut off. The x87 of i386 would cut off a product of
// 64 digits.
static size_t idist__sampler_part(double fraction, size_t length) {
    volatile double part = fraction * (double)length;
    return (size_t)part;
}

idist_status idist_partition(size_t length, const double *fractions, int n, int which,
                             uint64_t seed, size_t *indices, size_t *count) {
    double sum = 0;
    size_t at = 0, *all;
    int i;

    if (!fractions || !indices || !count)
        return idist__fail(IDIST_ERR_ARG, "partition: a pointer is NULL");
    if (which < 0 || which >= n)
        return idist__fail(IDIST_ERR_ARG, "partition: part %d of %d", which, n);
    if (length > IDIST__SHUFFLED_MOST)
        return idist__fail(
            IDIST_ERR_ARG,
            "partition: %zu samples are more than 2^32 - 1, or than memory has room for", length);

    for (i = 0; i < n; i++) {
        if (!(fractions[i] >= 0))
            return idist__fail(IDIST_ERR_ARG, "partition: fraction %d is %g", i, fractions[i]);
        sum += fractions[i];
    }

    if (sum > 1 + 1e-9)
        return idist__fail(IDIST_ERR_ARG, "partition: the fractions add up to %g, more than 1",
                           sum);
    if ((all = (size_t *)malloc((length + 1) * sizeof *all)) == NULL)
        return idist__fail(IDIST_ERR_NO_MEMORY, "partition: no memory for %zu indices", length);
    idist__random_shuffle(all, length, seed);
    for (i = 0; i < which; i++) at += idist__sampler_part(fractions[i], length);
    *count = idist__sampler_part(fractions[which], length);
    if (at > length) at = length; // sums of fractions that are a little above 1
    if (*count > length - at) *count = length - at;
    memcpy(indices, all + at, *count * sizeof *indices);
    free(all);

    return IDIST_OK;
}

int idist_auto_batch_size(int batch_size) {
    int n = idist_get_world_size();
    return batch_size >= n ? batch_size / n : batch_size;
}

int idist_auto_num_workers(int num_workers) {
    int n = idist_get_nproc_per_node();
    return num_workers >= n ? (num_workers - 1) / n + 1 : num_workers;
}

uint64_t idist_auto_seed(uint64_t seed) { return seed + (uint64_t)idist_get_rank(); }

//------------------------------------------------------------------------------
// [train:loader]  batches, fetched ahead by worker threads
// uses os err mem base:log world life pinned sampler
//
// Batches lie in a ring of slots, one more than are fetched ahead: the one that the program has. A
// worker takes the next batch that nobody has taken, so they begin in order, and the program waits
// for each in turn:
//
//     slot    0        1        2        3        4         2 workers, 2 batches ahead for each
//     batch   5        6        7        3        4
//             fetched  fetched  (free)   program  ready
//
// The indices are a copy, so that the program may move the sampler at any time. That it did is
// noticed by the next call.
//------------------------------------------------------------------------------

typedef struct idist__slot {
    void *data;
    bool ready;
    int result; // of fetch
} idist__slot;

struct idist_loader {
    idist_loader_desc desc;
    idist_sampler *own; // of idist_auto_loader
    pid_t pid;          // a child made by fork has none of the workers
    pthread_t *threads;
    int n_threads, n_slots;
    idist__slot *slots;
    size_t *indices; // the rest of the epoch, from where the loader began; written while no worker
                     // is busy
    size_t n_indices, begun_at;
    uint64_t n_deals; // of the sampler when they were copied
    size_t at;        // where the sampler stood after the last call
    bool ended;
    pthread_mutex_t lock; // of what follows, and of the slots
    pthread_cond_t work, done;
    size_t n_batches, taken,
        given; // all of them; the workers have taken so many; the program has been given so many
    int n_busy, n_left;           // workers: that fetch; that have not ended since it stops
    bool paused, stops, orphaned; // the last: the last worker frees it
};

static size_t idist__loader_batches(const idist_loader *l, size_t n) {
    return l->desc.drop_last ? n / l->desc.batch_size
                             : n / l->desc.batch_size + (n % l->desc.batch_size != 0);
}

// The samples of a batch.
static const size_t *idist__loader_indices(const idist_loader *l, size_t batch, size_t *n) {
    size_t from = batch * l->desc.batch_size, left = l->n_indices - from;
    *n = left < l->desc.batch_size ? left : l->desc.batch_size;
    return l->indices + from;
}

static int idist__loader_fetch(idist_loader *l, size_t batch) {
    size_t n;
    const size_t *indices = idist__loader_indices(l, batch, &n);
    int result;

    idist__me.callbacks++;
    result = l->desc.fetch(l->slots[batch % (size_t)l->n_slots].data, indices, n, l->desc.arg);
    idist__me.callbacks--;
    return result;
}

// When nobody else uses it.
static void idist__loader_destroy(idist_loader *l) {
    int i;

    if (l->pid == getpid()) {
        pthread_cond_destroy(&l->work);
        pthread_cond_destroy(&l->done);
        pthread_mutex_destroy(&l->lock);
    }

    for (i = 0; l->slots && i < l->n_slots; i++)
        idist__mem_free(&l->desc.allocator, l->slots[i].data);
    idist_sampler_free(&l->own);
    free(l->slots);
    free(l->threads);
    free(l->indices);
    free(l);
}

static void *idist__loader_work(void *arg) {
    idist_loader *l = (idist_loader *)arg;
    bool last;

    pthread_mutex_lock(&l->lock);

    while (!l->stops) {
        size_t batch = l->taken;
        int result;

        if (l->paused || batch == l->n_batches || batch - l->given >= (size_t)l->n_slots - 1) {
            pthread_cond_wait(&l->work, &l->lock);
            continue;
        }

        l->taken++;
        l->n_busy++;
        pthread_mutex_unlock(&l->lock);
        result = idist__loader_fetch(l, batch);
        pthread_mutex_lock(&l->lock);
        l->slots[batch % (size_t)l->n_slots].ready = true;
        l->slots[batch % (size_t)l->n_slots].result = result;
        l->n_busy--;
        pthread_cond_signal(&l->done);
    }

    last = --l->n_left == 0 && l->orphaned;
    pthread_mutex_unlock(&l->lock);
    if (last) idist__loader_destroy(l);

    return NULL;
}

static int idist__loader_timeout(const idist_loader *l) {
    return l->desc.timeout_ms ? l->desc.timeout_ms : 300000;
}

// Waits, holding the lock, until no fetch runs. False: the time is up.
static bool idist__loader_settles(idist_loader *l) {
    int64_t until_ns = idist__os_deadline(idist__loader_timeout(l));
    while (l->n_busy && idist__os_ms_until(until_ns) != 0)
        idist__os_cond_wait(&l->done, &l->lock, until_ns);
    return l->n_busy == 0;
}

// Drops what was fetched ahead, after the fetches that run, and begins where the sampler is.
static idist_status idist__loader_restart(idist_loader *l) {
    const idist_sampler *s = l->desc.sampler;
    size_t n = s->count - s->at, *indices = (size_t *)malloc((n + 1) * sizeof *indices);
    int i;

    if (!indices) return idist__fail(IDIST_ERR_NO_MEMORY, "loader: no memory for %zu indices", n);
    memcpy(indices, s->indices + s->at, n * sizeof *indices);
    pthread_mutex_lock(&l->lock);
    l->paused = true;

    if (!idist__loader_settles(l)) { // the next call tries again; no fetch begins until then
        i = l->n_busy;
        pthread_mutex_unlock(&l->lock);
        free(indices);
        return idist__fail(IDIST_ERR_TIMEOUT,
                           "loader: %d of the fetches from before still run after %d ms", i,
                           idist__loader_timeout(l));
    }

    free(l->indices);
    l->indices = indices;
    l->n_indices = n;
    l->begun_at = l->at = s->at;
    l->n_deals = s->n_deals;
    l->ended = false;
    l->n_batches = idist__loader_batches(l, n);
    l->taken = l->given = 0;
    for (i = 0; i < l->n_slots; i++) l->slots[i].ready = false;
    l->paused = false;
    pthread_cond_broadcast(&l->work);
    pthread_mutex_unlock(&l->lock);

    return IDIST_OK;
}

void idist_loader_free(idist_loader **loader) {
    idist_loader *l = loader ? *loader : NULL;
    bool orphaned = false;
    int i;

    if (!l) return;
    *loader = NULL;

    if (l->pid == getpid()) { // after fork the lock may be one that nobody will give back
        pthread_t *threads = l->threads;
        int n = l->n_threads;
        pthread_mutex_lock(&l->lock);
        l->stops = true;
        l->n_left = n;
        pthread_cond_broadcast(&l->work);
        orphaned = l->orphaned = !idist__loader_settles(l);
        if (orphaned) l->threads = NULL; // they may free the loader from here on
        pthread_mutex_unlock(&l->lock);
        for (i = 0; i < n; i++)
            if (orphaned) pthread_detach(threads[i]);
            else pthread_join(threads[i], NULL);
        if (orphaned) free(threads);
    }

    if (!orphaned) idist__loader_destroy(l);
}

static idist_status idist__loader_check(const idist_loader_desc *d) {
    if (!d || !d->sampler || !d->fetch)
        return idist__fail(IDIST_ERR_ARG, "loader_create: desc, sampler or fetch is NULL");
    if (!d->batch_size || !d->batch_nbytes)
        return idist__fail(IDIST_ERR_ARG, "loader_create: batches of %zu samples in %zu bytes",
                           d->batch_size, d->batch_nbytes);
    if (d->num_workers < 0 || d->num_workers > 1024 || d->prefetch < 0 || d->prefetch > 65536)
        return idist__fail(
            IDIST_ERR_ARG,
            "loader_create: %d workers (1,024 at most), %d batches ahead (65,536 at most)",
            d->num_workers, d->prefetch);

    return IDIST_OK;
}

idist_status idist_loader_create(const idist_loader_desc *desc, idist_loader **loader) {
    idist_loader *l;
    idist_status s;
    int i, err = 0;

    if (!loader) return idist__fail(IDIST_ERR_ARG, "loader_create: loader is NULL");
    *loader = NULL;
    if ((s = idist__loader_check(desc)) != IDIST_OK) return s;
    l = (idist_loader *)calloc(1, sizeof *l);
    if (!l) return idist__fail(IDIST_ERR_NO_MEMORY, "loader_create: no memory");
    l->desc = *desc;
    l->pid = getpid();
    l->n_slots = 1 + desc->num_workers * (desc->prefetch ? desc->prefetch : 2);
    pthread_mutex_init(&l->lock, NULL);
    pthread_cond_init(&l->work, NULL);
    idist__os_cond_init(&l->done);
    l->slots = (idist__slot *)calloc((size_t)l->n_slots, sizeof *l->slots);
    l->threads = (pthread_t *)calloc((size_t)desc->num_workers + 1, sizeof *l->threads);
    if (!l->slots || !l->threads)
        s = idist__fail(IDIST_ERR_NO_MEMORY, "loader_create: no memory for %d slots", l->n_slots);
    for (i = 0; i < l->n_slots && s == IDIST_OK; i++)
        if ((l->slots[i].data = idist__mem_alloc(&desc->allocator, desc->batch_nbytes)) == NULL)
            s = idist__fail(IDIST_ERR_NO_MEMORY,
                            "loader_create: no memory for %d batches of %zu bytes", l->n_slots,
                            desc->batch_nbytes);
    if (s == IDIST_OK) s = idist__loader_restart(l);
    while (s == IDIST_OK && !err && l->n_threads < desc->num_workers)
        if ((err = idist__os_thread(&l->threads[l->n_threads], idist__loader_work, l)) == 0)
            l->n_threads++;
    if (err) s = idist__fail_errno("loader_create: to start a worker thread", err);
    if (s == IDIST_OK) *loader = l;
    else idist_loader_free(&l);

    return s;
}

static idist_status idist__loader_enter(const char *name, const idist_loader *l) {
    if (!l) return idist__fail(IDIST_ERR_ARG, "%s: loader is NULL", name);
    if (l->n_threads && l->pid != getpid())
        return idist__fail(IDIST_ERR_STATE,
                           "%s: this process was forked, and has no workers; create a loader in it",
                           name);
    return IDIST_OK;
}

idist_status idist_loader_set_epoch(idist_loader *l, uint64_t epoch) {
    idist_status s = idist__loader_enter("loader_set_epoch", l);
    if (s == IDIST_OK) s = idist_sampler_set_epoch(l->desc.sampler, epoch);
    return s == IDIST_OK ? idist__loader_restart(l) : s;
}

size_t idist_loader_count(const idist_loader *l) {
    return l ? idist__loader_batches(l, l->desc.sampler->count) : 0;
}

idist_sampler *idist_loader_sampler(const idist_loader *l) { return l ? l->desc.sampler : NULL; }

// The next batch is in its slot, with what fetch returned. False: it did not come.
static bool idist__loader_take(idist_loader *l, idist__slot *slot) {
    int64_t until_ns;
    bool ready = true;

    if (!l->n_threads) {
        slot->result = idist__loader_fetch(l, l->given);
        l->given++;
        return true;
    }

    pthread_mutex_lock(&l->lock);
    for (until_ns = idist__os_deadline(idist__loader_timeout(l));
         !slot->ready && idist__os_ms_until(until_ns) != 0;)
        idist__os_cond_wait(&l->done, &l->lock, until_ns);

    if ((ready = slot->ready) == true) {
        slot->ready = false;
        l->given++;
        pthread_cond_signal(&l->work); // the batch before this one has left its slot
    }

    pthread_mutex_unlock(&l->lock);

    return ready;
}

idist_status idist_loader_next(idist_loader *l, idist_batch *batch) {
    idist_sampler *sampler;
    idist__slot *slot;
    size_t number;
    idist_status s = idist__loader_enter("loader_next", l);

    if (s != IDIST_OK) return s;
    if (!batch) return idist__fail(IDIST_ERR_ARG, "loader_next: batch is NULL");
    memset(batch, 0, sizeof *batch);
    sampler = l->desc.sampler;
    if (l->ended || l->paused || l->n_deals != sampler->n_deals || l->at != sampler->at)
        s = idist__loader_restart(l);
    if (s != IDIST_OK) return s;
    number = l->given; // only this thread writes it
    if (number == l->n_batches) {
        l->ended = true; // nothing is fetched ahead now: most programs begin another epoch
        l->at = sampler->at = 0;
        return IDIST_OK;
    }

    slot = &l->slots[number % (size_t)l->n_slots];
    if (!idist__loader_take(l, slot))
        return idist__fail(IDIST_ERR_TIMEOUT,
                           "loader_next: the fetch of batch %zu has not ended after %d ms", number,
                           idist__loader_timeout(l));
    batch->indices = idist__loader_indices(l, number, &batch->n);
    l->at = sampler->at = l->begun_at + number * l->desc.batch_size + batch->n;
    if (slot->result)
        return idist__fail(IDIST_ERR_CALLBACK,
                           "loader_next: fetch failed with %d for %zu samples from %zu on",
                           slot->result, batch->n, batch->indices[0]);
    batch->data = slot->data;

    return IDIST_OK;
}

static void idist__loader_log(const idist_loader_desc *asked, const idist_loader_desc *d) {
    const idist_sampler_desc *samples = &d->sampler->desc;
    int rank = idist_group_rank(samples->group), size = idist_group_size(samples->group);
    idist__world *w = idist__world_default();
    idist__log log;

    if (!w && idist__log_init(&log, NULL) != IDIST_OK) return;
    if (samples->num_replicas != size || samples->rank != rank)
        idist__log_print(w ? &w->log : &log, IDIST_LOG_WARN,
                         "auto_loader: the sampler is number %d of num_replicas=%d, but this is "
                         "rank %d of %d: some "
                         "samples may come twice, or never",
                         samples->rank, samples->num_replicas, rank, size);
    idist__log_print(
        w ? &w->log : &log, IDIST_LOG_INFO,
        "auto_loader: batch_size %zu of %zu, num_workers %d of %d, %zu samples of this rank",
        d->batch_size, asked->batch_size, d->num_workers, asked->num_workers,
        idist_sampler_count(d->sampler));
}

idist_status idist_auto_loader(const idist_loader_desc *desc, const idist_sampler_desc *samples,
                               idist_loader **loader) {
    idist_loader_desc d;
    idist_sampler *sampler = NULL;
    size_t n;
    idist_status s;

    if (!desc || !samples || !loader)
        return idist__fail(IDIST_ERR_ARG, "auto_loader: a pointer is NULL");
    *loader = NULL;
    if (desc->sampler)
        return idist__fail(IDIST_ERR_ARG,
                           "auto_loader: makes its own sampler; desc.sampler must be NULL");
    if (!desc->batch_size || desc->batch_size > INT32_MAX)
        return idist__fail(IDIST_ERR_ARG, "auto_loader: batches of %zu samples", desc->batch_size);
    if ((s = idist_sampler_create(samples, &sampler)) != IDIST_OK) return s;
    d = *desc;
    d.sampler = sampler;
    n = (size_t)sampler->desc.num_replicas;
    d.batch_size = desc->batch_size >= n ? desc->batch_size / n : desc->batch_size;
    d.batch_nbytes = (desc->batch_nbytes + desc->batch_size - 1) / desc->batch_size * d.batch_size;
    d.num_workers = idist_auto_num_workers(desc->num_workers);
#ifdef IDIST_NCCL_H
    if (!d.allocator.alloc_fn && strncmp(idist_device(), "cuda", 4) == 0)
        d.allocator = idist_pinned_allocator();
#endif
    if ((s = idist_loader_create(&d, loader)) != IDIST_OK) {
        idist_sampler_free(&sampler);
        return s;
    }

    (*loader)->own = sampler;
    idist__loader_log(desc, &d);

    return IDIST_OK;
}

//------------------------------------------------------------------------------
// [train:norm]  batch statistics and gradient norms over all ranks
// uses err base:type reduce life calls:coll agree
//------------------------------------------------------------------------------

// Two sets of values with their counts, means and variances become one:
//
//     n = na + nb    d = mean_b - mean_a    mean = mean_a + d nb / n    var n = var_a na + var_b nb
//     + d d na nb / n
static void idist__norm_merge(double *mean, double *var, double na, double mean_b, double var_b,
                              double nb) {
    double n = na + nb, d = mean_b - *mean;
    *mean += d * (nb / n);
    *var = (*var * na + var_b * nb) / n + d * d * (na / n) * (nb / n);
}

idist_status idist_sync_batch_norm(float *mean, float *var, int channels, uint64_t *count,
                                   const idist_opts *opts) {
    int n, k, ch;
    size_t row;
    char *all, *own;
    idist_opts o;
    idist_status s = idist__agree_enter("sync_batch_norm", opts, &o);

    if (s != IDIST_OK) return s;
    if (channels < 1 || !mean || !var || !count)
        return idist__fail(IDIST_ERR_ARG, "sync_batch_norm: %d channels, or a pointer is NULL",
                           channels);
    n = idist_group_size(o.group);
    row = sizeof *count +
          2 * sizeof *mean * (size_t)channels; // count | means | variances, of one rank
    if ((all = (char *)malloc(row * (size_t)n)) == NULL)
        return idist__agree_no_memory("sync_batch_norm", o.group);
    own = all + row * (size_t)idist_group_rank(o.group);
    memcpy(own, count, sizeof *count);
    memcpy(own + sizeof *count, mean, sizeof *mean * (size_t)channels);
    memcpy(own + sizeof *count + sizeof *mean * (size_t)channels, var,
           sizeof *var * (size_t)channels);
    s = idist_all_gather(own, all, row, IDIST_U8, &o);

    for (ch = 0; ch < channels && s == IDIST_OK; ch++) {
        double m = 0, v = 0;
        uint64_t total = 0, rows;

        for (k = 0; k < n; k++) {
            const char *at = all + row * (size_t)k;
            float m_k, v_k;
            memcpy(&rows, at, sizeof rows);
            memcpy(&m_k, at + sizeof rows + sizeof m_k * (size_t)ch, sizeof m_k);
            memcpy(&v_k, at + sizeof rows + sizeof m_k * (size_t)(channels + ch), sizeof v_k);
            if (rows)
                idist__norm_merge(&m, &v, (double)total, (double)m_k, (double)v_k, (double)rows);
            total += rows;
        }

        mean[ch] = (float)m;
        var[ch] = (float)v;
        *count = total;
    }

    free(all);

    return s;
}

idist_status idist_sync_batch_norm_backward(float *sum_dy, float *sum_dy_xmu, int channels,
                                            const idist_opts *opts) {
    size_t nbytes = sizeof(float) * (size_t)(channels > 0 ? channels : 0);
    char *both; // one message instead of two
    idist_opts o;
    idist_status s = idist__agree_enter("sync_batch_norm_backward", opts, &o);

    if (s != IDIST_OK) return s;
    if (channels < 1 || !sum_dy || !sum_dy_xmu)
        return idist__fail(IDIST_ERR_ARG,
                           "sync_batch_norm_backward: %d channels, or a pointer is NULL", channels);
    if ((both = (char *)malloc(2 * nbytes)) == NULL)
        return idist__agree_no_memory("sync_batch_norm_backward", o.group);
    memcpy(both, sum_dy, nbytes);
    memcpy(both + nbytes, sum_dy_xmu, nbytes);
    s = idist_all_reduce(both, both, 2 * (size_t)channels, IDIST_F32, IDIST_SUM, &o);
    if (s == IDIST_OK) memcpy(sum_dy, both, nbytes);
    if (s == IDIST_OK) memcpy(sum_dy_xmu, both + nbytes, nbytes);
    free(both);

    return s;
}

// Newton's method from half the exponent: the last bit may differ from the one of sqrt, which would
// need -lm.
static double idist__norm_root(double x) {
    double r;
    uint64_t bits;
    int i;

    if (!(x > 0)) return 0;
    if (x < 1e-290)
        return idist__norm_root(x * 1e280) * 1e-140; // subnormal numbers have no exponent to halve
    memcpy(&bits, &x, sizeof bits);
    bits = (bits >> 1) + ((uint64_t)1023 << 51);
    memcpy(&r, &bits, sizeof r);
    for (i = 0; i < 5; i++) r = 0.5 * (r + x / r);

    return r;
}

#define IDIST__NORM_PIECE 256 // elements that are doubles at a time

static void idist__norm_read(const idist_tensor *t, size_t at, size_t n, double *x) {
    const char *from = (const char *)t->data + at * idist_dtype_size(t->dtype);
    float wide[IDIST__NORM_PIECE];
    size_t i;

    if (t->dtype == IDIST_F64) {
        memcpy(x, from, n * sizeof *x);
        return;
    }

    if (t->dtype == IDIST_F32) memcpy(wide, from, n * sizeof *wide);
    else idist__type_widen(wide, from, n, t->dtype);
    for (i = 0; i < n; i++) x[i] = (double)wide[i];
}

static double idist__norm_squares(const idist_tensor *t) {
    double x[IDIST__NORM_PIECE], sum[4] = {0, 0, 0, 0};
    size_t at, i, n;

    for (at = 0; at < t->count; at += n) {
        n = t->count - at < IDIST__NORM_PIECE ? t->count - at : IDIST__NORM_PIECE;
        idist__norm_read(t, at, n, x);
        for (i = n; i < IDIST__NORM_PIECE; i++) x[i] = 0;

        for (i = 0; i < IDIST__NORM_PIECE; i += 4) { // four chains, because one waits for itself
            sum[0] += x[i] * x[i];
            sum[1] += x[i + 1] * x[i + 1];
            sum[2] += x[i + 2] * x[i + 2];
            sum[3] += x[i + 3] * x[i + 3];
        }
    }

    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

static idist_status idist__norm_check(const idist_tensor *grads, int n, double max_norm) {
    int i;

    if (n < 0 || (n && !grads))
        return idist__fail(IDIST_ERR_ARG, "clip_grad_norm: %d gradients at NULL", n);
    if (!(max_norm >= 0))
        return idist__fail(IDIST_ERR_ARG, "clip_grad_norm: max_norm is %g", max_norm);

    for (i = 0; i < n; i++) {
        if (!idist__type_is_float(grads[i].dtype) || !idist_dtype_size(grads[i].dtype))
            return idist__fail(IDIST_ERR_ARG, "clip_grad_norm: gradient %d is %s", i,
                               idist_dtype_name(grads[i].dtype));
        if (grads[i].count && !grads[i].data)
            return idist__fail(IDIST_ERR_ARG, "clip_grad_norm: gradient %d is NULL", i);
    }

    return IDIST_OK;
}

idist_status idist_clip_grad_norm(const idist_tensor *grads, int n, double max_norm, bool shared,
                                  double *norm, const idist_opts *opts) {
    double squares = 0, own, factor;
    int i;
    idist_opts o;
    idist_status s = shared ? IDIST_OK : idist__agree_enter("clip_grad_norm", opts, &o);

    if (s != IDIST_OK) return s;
    s = idist__norm_check(grads, n, max_norm);
    if (!shared) s = idist__agree(s, &o);
    if (s != IDIST_OK) return s;
    for (i = 0; i < n; i++) squares += idist__norm_squares(&grads[i]);
    if (!shared &&
        (s = idist_all_reduce(&squares, &squares, 1, IDIST_F64, IDIST_SUM, &o)) != IDIST_OK)
        return s;
    if (!(squares - squares == 0))
        return idist__fail(
            IDIST_ERR_ARG,
            "clip_grad_norm: the norm of the gradients is not finite; nothing was scaled");
    own = idist__norm_root(squares);
    if (norm) *norm = own;
    factor = max_norm / (own + 1e-6);
    for (i = 0; i < n && factor < 1; i++)
        idist__reduce_scale(grads[i].data, grads[i].count, grads[i].dtype, factor);

    return IDIST_OK;
}

//------------------------------------------------------------------------------
// [train:metric]  numbers over all ranks
// uses err base:type life calls:coll agree
//------------------------------------------------------------------------------

// The sums of two numbers of m over all ranks, and their ratio: 0 / 0 is no number.
static idist_status idist__metric_ratio(const char *name, const void *m, double a, double b,
                                        double *value, const idist_opts *opts) {
    double sums[2];
    idist_opts o;
    idist_status s = idist__agree_enter(name, opts, &o);

    if (s != IDIST_OK) return s;
    if (!m) return idist__fail(IDIST_ERR_ARG, "%s: the metric is NULL", name);
    sums[0] = a;
    sums[1] = b;
    s = idist_all_reduce(sums, sums, 2, IDIST_F64, IDIST_SUM, &o);
    if (s == IDIST_OK && value)
        *value = sums[1] != 0 ? sums[0] / sums[1] : (double)idist__bits_to_float(0x7fc00000u);

    return s;
}

idist_status idist_accuracy_update(idist_accuracy *m, const float *scores, const int *labels,
                                   size_t n, int classes) {
    size_t i;
    int k;

    if (!m || (n && (!scores || !labels)) || classes < 1)
        return idist__fail(IDIST_ERR_ARG, "accuracy_update: %d classes, or a pointer is NULL",
                           classes);
    for (i = 0; i < n; i++)
        if (labels[i] < 0 || labels[i] >= classes)
            return idist__fail(IDIST_ERR_ARG,
                               "accuracy_update: label %d of sample %zu is not in 0 .. %d",
                               labels[i], i, classes - 1);

    for (i = 0; i < n; i++) {
        const float *row = scores + i * (size_t)classes;
        bool right = row[labels[i]] == row[labels[i]];
        for (k = 0; k < classes && right; k++)
            right = k == labels[i] ||
                    (k < labels[i] ? row[labels[i]] > row[k] : row[labels[i]] >= row[k]);
        m->correct += right;
    }

    m->total += n;

    return IDIST_OK;
}

idist_status idist_accuracy_compute(const idist_accuracy *m, double *value,
                                    const idist_opts *opts) {
    double correct = m ? (double)m->correct : 0, total = m ? (double)m->total : 0;
    return idist__metric_ratio("accuracy_compute", m, correct, total, value, opts);
}

void idist_mean_update(idist_mean *m, double value, double weight) {
    m->sum += value * weight;
    m->weight += weight;
}

idist_status idist_mean_compute(const idist_mean *m, double *value, const idist_opts *opts) {
    return idist__metric_ratio("mean_compute", m, m ? m->sum : 0, m ? m->weight : 0, value, opts);
}

void idist_running_average_update(idist_running_average *m, double value) {
    double alpha = m->alpha != 0 ? m->alpha : 0.98;
    m->value = m->begun ? alpha * m->value + (1 - alpha) * value : value;
    m->begun = true;
}

idist_status idist_running_average_compute(const idist_running_average *m, double *value,
                                           const idist_opts *opts) {
    bool begun = m && m->begun;
    return idist__metric_ratio("running_average_compute", m, begun ? m->value : 0, begun ? 1 : 0,
                               value, opts);
}

idist_status idist_confusion_update(idist_confusion *m, const int *predicted, const int *labels,
                                    size_t n) {
    size_t i;

    if (!m || !m->cells || m->classes < 1 || (n && (!predicted || !labels)))
        return idist__fail(IDIST_ERR_ARG, "confusion_update: no classes, or a pointer is NULL");
    for (i = 0; i < n; i++)
        if (labels[i] < 0 || labels[i] >= m->classes || predicted[i] < 0 ||
            predicted[i] >= m->classes)
            return idist__fail(
                IDIST_ERR_ARG,
                "confusion_update: label %d, predicted %d of sample %zu: not in 0 .. %d", labels[i],
                predicted[i], i, m->classes - 1);
    for (i = 0; i < n; i++)
        m->cells[(size_t)labels[i] * (size_t)m->classes + (size_t)predicted[i]]++;

    return IDIST_OK;
}

idist_status idist_confusion_compute(const idist_confusion *m, uint64_t *cells,
                                     const idist_opts *opts) {
    void *waste = NULL;
    size_t n;
    idist_opts o;
    idist_status s = idist__agree_enter("confusion_compute", opts, &o);

    if (s != IDIST_OK) return s;
    if (!m || !m->cells || m->classes < 1 || cells == m->cells)
        return idist__fail(
            IDIST_ERR_ARG,
            "confusion_compute: no classes, a pointer is NULL, or cells are the metric's own");
    n = (size_t)m->classes * (size_t)m->classes;
    if (!cells && (waste = malloc(n * sizeof *cells)) == NULL)
        return idist__agree_no_memory("confusion_compute", o.group);
    s = idist_all_reduce(m->cells, cells ? cells : waste, n, IDIST_U64, IDIST_SUM, &o);
    free(waste);

    return s;
}

// Rank 0 knows how many bytes come from whom. NULL: the total is in *total, and s says what is
// wrong.
static char *idist__metric_room(const uint64_t *sizes, int n, size_t row_nbytes, size_t *counts,
                                uint64_t *total, idist_status *s) {
    char *rows = NULL;
    int k;

    *total = 0;

    for (k = 0; k < n && *s == IDIST_OK; k++) {
        if (sizes[2 * k + 1] != row_nbytes)
            *s = idist__fail(IDIST_ERR_ARG,
                             "epoch_metric: a row has %zu bytes here and %llu on another rank",
                             row_nbytes, (unsigned long long)sizes[2 * k + 1]);
        else if (sizes[2 * k] > (SIZE_MAX / 2 - *total * row_nbytes) / row_nbytes)
            *s = idist__fail(IDIST_ERR_NO_MEMORY,
                             "epoch_metric: more rows than memory has addresses");
        else *total += sizes[2 * k];
        counts[k] = (size_t)sizes[2 * k] * row_nbytes;
    }

    if (*s == IDIST_OK && (rows = (char *)malloc((size_t)*total * row_nbytes + 1)) == NULL)
        *s = idist__fail(IDIST_ERR_NO_MEMORY, "epoch_metric: no memory for %llu rows",
                         (unsigned long long)*total);

    return rows;
}

// The rows of all ranks in *all of rank 0; own: rows and bytes of one.
static idist_status idist__metric_collect(const void *rows, const uint64_t *own, uint64_t *sizes,
                                          size_t *counts, char **all, uint64_t *total,
                                          const idist_opts *o) {
    size_t row_nbytes = (size_t)own[1];
    idist_status s = idist_gather(own, sizes, 2, IDIST_U64, 0, o);

    if (s != IDIST_OK) return s;
    if (idist_group_rank(o->group) == 0)
        *all = idist__metric_room(sizes, idist_group_size(o->group), row_nbytes, counts, total, &s);
    if ((s = idist__agree(s, o)) != IDIST_OK) return s;
    return idist_gatherv(rows, (size_t)own[0] * row_nbytes, *all, counts, NULL, IDIST_U8, 0, o);
}

idist_status idist_epoch_metric(const void *rows, size_t n, size_t row_nbytes,
                                idist_epoch_metric_fn fn, void *arg, double *value,
                                const idist_opts *opts) {
    idist_opts o;
    uint64_t own[2], total = 0, *sizes;
    size_t *counts;
    char *all = NULL;
    int size, failed = 0;
    double computed = 0;
    idist_status s = idist__agree_enter("epoch_metric", opts, &o);

    if (s != IDIST_OK) return s;
    size = idist_group_size(o.group);
    sizes = (uint64_t *)malloc((size_t)size * (2 * sizeof *sizes + sizeof *counts));
    counts = (size_t *)(void *)(sizes ? sizes + 2 * size : NULL);
    if (!sizes) s = idist__fail(IDIST_ERR_NO_MEMORY, "epoch_metric: no memory for %d ranks", size);
    else if (!row_nbytes || !fn || (n && !rows) || n > SIZE_MAX / 2 / row_nbytes)
        s = idist__fail(IDIST_ERR_ARG, "epoch_metric: %zu rows of %zu bytes, or a pointer is NULL",
                        n, row_nbytes);
    own[0] = n;
    own[1] = row_nbytes;
    s = idist__agree(s, &o);
    if (s == IDIST_OK) s = idist__metric_collect(rows, own, sizes, counts, &all, &total, &o);

    if (s == IDIST_OK) {
        if (idist_group_rank(o.group) == 0) {
            idist__me.callbacks++;
            failed = fn(all, (size_t)total, arg, &computed);
            idist__me.callbacks--;
            if (failed)
                s = idist__fail(IDIST_ERR_CALLBACK, "epoch_metric: the function failed with %d",
                                failed);
        }

        s = idist__agree(s, &o);
    }

    if (s == IDIST_OK) s = idist_broadcast(&computed, 1, IDIST_F64, 0, &o);
    if (s == IDIST_OK && value) *value = computed;
    free(all);
    free(sizes);

    return s;
}

//------------------------------------------------------------------------------
// [train:checkpoint]  files that are whole or not there
// uses os err base:log base:type world life calls:coll agree
//
// Numbers are 64 bits wide, in the byte order of the machine. Each part but the last is filled up
// with zeros to 32 bytes.
//
//     head      "idistckp" | version | n | step | score | bytes of info | bytes of the file |
//     checksum of these seven table     n times: count | dtype info tensor 0, tensor 1, ...
//     checksum of all that is before it
//
// Who loads a file has the tensors, and so knows all sizes beforehand: nothing is allocated or
// placed by what a file says.
//------------------------------------------------------------------------------

#define IDIST__CHECKPOINT_VERSION 1
#define IDIST__CHECKPOINT_PIECE ((size_t)1 << 18)

// Four lanes, each a chain of x = rotate((x ^ word) * odd), so that a processor computes them side
// by side. Every step can be undone: two files that differ in one lane only, in one word say, never
// have the same sum.
typedef struct idist__sum {
    uint64_t lane[4];
} idist__sum;

#define IDIST__SUM_BLOCK sizeof(idist__sum)
#define IDIST__SUM_ODD 0x9fb21c651e98df25u

static idist__sum idist__sum_begin(void) {
    idist__sum s;
    int i;
    for (i = 0; i < 4; i++) s.lane[i] = IDIST__SUM_ODD * (uint64_t)(i + 1);
    return s;
}

// A last block that is not full counts as filled up with zeros.
static void idist__sum_add(idist__sum *s, const void *data, size_t nbytes) {
    const char *p = (const char *)data;

    while (nbytes) {
        uint64_t word[4] = {0, 0, 0, 0};
        size_t n = nbytes < sizeof word ? nbytes : sizeof word;
        int i;
        if (n == sizeof word) memcpy(word, p, sizeof word);
        else memcpy(word, p, n);

        for (i = 0; i < 4; i++) {
            uint64_t x = (s->lane[i] ^ word[i]) * IDIST__SUM_ODD;
            s->lane[i] = x << 29 | x >> 35;
        }

        p += n;
        nbytes -= n;
    }
}

static uint64_t idist__sum_end(const idist__sum *s) {
    uint64_t h = 0;
    int i;

    for (i = 0; i < 4; i++) {
        h = (h ^ s->lane[i]) * IDIST__SUM_ODD;
        h ^= h >> 32;
    }

    return h;
}

enum { // the words of a head
    IDIST__HEAD_MAGIC,
    IDIST__HEAD_VERSION,
    IDIST__HEAD_N,
    IDIST__HEAD_STEP,
    IDIST__HEAD_SCORE,
    IDIST__HEAD_INFO,
    IDIST__HEAD_FILE,
    IDIST__HEAD_SUM,
    IDIST__HEAD_WORDS
};

// A checkpoint as its parts lie in memory: 0 is the head, 1 the table, 2 the info, the tensors
// follow.
typedef struct idist__checkpoint {
    uint64_t head[IDIST__HEAD_WORDS];
    uint64_t *table;
    const void *info;
    const idist_tensor *tensors;
    int nparts;
} idist__checkpoint;

static uint64_t idist__checkpoint_head_sum(const uint64_t *head) {
    idist__sum sum = idist__sum_begin();
    idist__sum_add(&sum, head, IDIST__HEAD_SUM * sizeof *head);
    return idist__sum_end(&sum);
}

static const void *idist__checkpoint_part(const idist__checkpoint *c, int i, size_t *nbytes) {
    const idist_tensor *t = i < 3 ? NULL : &c->tensors[i - 3];

    if (t) *nbytes = t->count * idist_dtype_size(t->dtype);
    else if (i == 0) *nbytes = sizeof c->head;
    else
        *nbytes = i == 1 ? (size_t)c->head[IDIST__HEAD_N] * 2 * sizeof *c->table
                         : (size_t)c->head[IDIST__HEAD_INFO];
    if (t) return t->data;

    return i == 0 ? (const void *)c->head : i == 1 ? (const void *)c->table : c->info;
}

static size_t idist__checkpoint_filled(size_t nbytes) {
    return (nbytes + IDIST__SUM_BLOCK - 1) / IDIST__SUM_BLOCK * IDIST__SUM_BLOCK;
}

static uint64_t idist__checkpoint_sum(const idist__checkpoint *c) {
    idist__sum sum = idist__sum_begin();
    int i;

    for (i = 0; i < c->nparts; i++) {
        size_t nbytes;
        const void *part = idist__checkpoint_part(c, i, &nbytes);
        idist__sum_add(&sum, part, nbytes);
    }

    return idist__sum_end(&sum);
}

// From the arguments of a call; c->table is to be freed, also after a failure.
static idist_status idist__checkpoint_make(const char *name, idist__checkpoint *c,
                                           const idist_tensor *tensors, int n, const void *info,
                                           size_t info_nbytes) {
    const uint64_t limit = (uint64_t)(SIZE_MAX < INT64_MAX ? SIZE_MAX : INT64_MAX) / 4;
    uint64_t total = info_nbytes;
    int i;

    memset(c, 0, sizeof *c);
    if (n < 0 || (n && !tensors))
        return idist__fail(IDIST_ERR_ARG, "%s: %d tensors at NULL", name, n);
    if (info_nbytes && !info)
        return idist__fail(IDIST_ERR_ARG, "%s: %zu bytes of info at NULL", name, info_nbytes);
    c->table = (uint64_t *)malloc(((size_t)n + 1) * 2 * sizeof *c->table);
    if (!c->table)
        return idist__fail(IDIST_ERR_NO_MEMORY, "%s: no memory for a table of %d tensors", name, n);

    for (i = 0; i < n; i++) {
        size_t size = idist_dtype_size(tensors[i].dtype);
        if (!size)
            return idist__fail(IDIST_ERR_ARG, "%s: tensor %d: %d is no dtype", name, i,
                               (int)tensors[i].dtype);
        if (tensors[i].count && !tensors[i].data)
            return idist__fail(IDIST_ERR_ARG, "%s: tensor %d is NULL", name, i);
        if (tensors[i].count > limit / size || total > limit)
            return idist__fail(IDIST_ERR_ARG, "%s: tensor %d: more bytes than a file can have",
                               name, i);
        c->table[2 * i] = tensors[i].count;
        c->table[2 * i + 1] = (uint64_t)tensors[i].dtype;
        total += idist__checkpoint_filled(tensors[i].count * size);
    }

    if (total > limit)
        return idist__fail(IDIST_ERR_ARG, "%s: more bytes than a file can have", name);
    c->info = info;
    c->tensors = tensors;
    c->nparts = n + 3;
    memcpy(&c->head[IDIST__HEAD_MAGIC], "idistckp", 8);
    c->head[IDIST__HEAD_VERSION] = IDIST__CHECKPOINT_VERSION;
    c->head[IDIST__HEAD_N] = (uint64_t)n;
    c->head[IDIST__HEAD_INFO] = info_nbytes;
    total +=
        idist__checkpoint_filled(info_nbytes) - info_nbytes + sizeof c->head + sizeof(uint64_t);
    c->head[IDIST__HEAD_FILE] = total + idist__checkpoint_filled((size_t)n * 2 * sizeof *c->table);

    return IDIST_OK;
}

static idist_status idist__checkpoint_fail(const char *name, const char *folder, const char *file,
                                           int err) {
    char what[700];
    snprintf(what, sizeof what, "%s: %.400s%s%.250s", name, folder, file[0] ? "/" : "", file);
    return idist__fail_errno(what, err == EDQUOT ? ENOSPC : err);
}

static int idist__checkpoint_put(int fd, const void *data, size_t nbytes) {
    const char *p = (const char *)data;

    while (nbytes) {
        ssize_t n = write(fd, p, nbytes < (size_t)1 << 30 ? nbytes : (size_t)1 << 30);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return n < 0 ? errno : ENOSPC;
        p += n;
        nbytes -= (size_t)n;
    }

    return 0;
}

static int idist__checkpoint_put_all(int fd, const idist__checkpoint *c) {
    static const char zeros[IDIST__SUM_BLOCK] = {0};
    uint64_t sum = idist__checkpoint_sum(c);
    size_t nbytes;
    int i, err = 0;

    for (i = 0; i < c->nparts && !err; i++) {
        const void *part = idist__checkpoint_part(c, i, &nbytes);
        err = idist__checkpoint_put(fd, part, nbytes);
        if (!err) err = idist__checkpoint_put(fd, zeros, idist__checkpoint_filled(nbytes) - nbytes);
    }

    return err ? err : idist__checkpoint_put(fd, &sum, sizeof sum);
}

// 0, an errno, or EPIPE: the file ends before that.
static int idist__checkpoint_get(int fd, uint64_t at, void *buf, size_t nbytes) {
    char *p = (char *)buf;

    while (nbytes) {
        ssize_t n = pread(fd, p, nbytes < (size_t)1 << 30 ? nbytes : (size_t)1 << 30, (off_t)at);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return n < 0 ? errno : EPIPE;
        p += n;
        at += (uint64_t)n;
        nbytes -= (size_t)n;
    }

    return 0;
}

// The head of what may be anything. NULL, or what is wrong with it; *err is an errno or 0.
static const char *idist__checkpoint_get_head(int fd, uint64_t *head, int *err) {
    struct stat st;

    *err = 0;
    memset(head, 0, IDIST__HEAD_WORDS * sizeof *head);
    if (fstat(fd, &st) != 0) *err = errno;
    else if (!S_ISREG(st.st_mode)) return "is not a regular file";
    else *err = idist__checkpoint_get(fd, 0, head, IDIST__HEAD_WORDS * sizeof *head);

    if (*err == EPIPE) *err = 0;
    else if (!*err && memcmp(head, "idistckp", 8) == 0) {
        if (head[IDIST__HEAD_VERSION] != IDIST__CHECKPOINT_VERSION)
            return "has another version, or comes from a machine of another byte order";
        if (head[IDIST__HEAD_SUM] != idist__checkpoint_head_sum(head))
            return "is damaged: the checksum of its head differs";
        if (head[IDIST__HEAD_FILE] != (uint64_t)st.st_size)
            return "is torn: its head says another length";
        return NULL;
    }

    return *err ? "cannot be read" : "is no checkpoint";
}

// Whether the head and table of a file are those of these tensors; step and score are taken from
// it.
static idist_status idist__checkpoint_match(idist__checkpoint *c, int fd, const char *path) {
    uint64_t head[IDIST__HEAD_WORDS], entry[2];
    int err, i, n = c->nparts - 3;
    const char *wrong = idist__checkpoint_get_head(fd, head, &err);

    if (err) return idist__checkpoint_fail("checkpoint_load", path, "", err);
    if (wrong) return idist__fail(IDIST_ERR_ARG, "checkpoint_load: %s %s", path, wrong);
    if (head[IDIST__HEAD_N] != (uint64_t)n)
        return idist__fail(IDIST_ERR_ARG,
                           "checkpoint_load: %s has %llu tensors, and %d are to be read", path,
                           (unsigned long long)head[IDIST__HEAD_N], n);
    if (head[IDIST__HEAD_INFO] != c->head[IDIST__HEAD_INFO])
        return idist__fail(IDIST_ERR_ARG,
                           "checkpoint_load: %s has %llu bytes of info, and %llu are to be read",
                           path, (unsigned long long)head[IDIST__HEAD_INFO],
                           (unsigned long long)c->head[IDIST__HEAD_INFO]);

    for (i = 0; i < n; i++) {
        err = idist__checkpoint_get(fd, sizeof head + (uint64_t)i * sizeof entry, entry,
                                    sizeof entry);
        if (err == EPIPE)
            return idist__fail(IDIST_ERR_ARG, "checkpoint_load: %s ends in the middle of its table",
                               path);
        if (err) return idist__checkpoint_fail("checkpoint_load", path, "", err);
        if (entry[0] == c->table[2 * i] && entry[1] == c->table[2 * i + 1]) continue;
        return idist__fail(
            IDIST_ERR_ARG,
            "checkpoint_load: %s: tensor %d is %s x %llu there, and %s x %zu is to be read", path,
            i,
            idist_dtype_name(entry[1] < IDIST_DTYPE_COUNT ? (idist_dtype)entry[1]
                                                          : IDIST_DTYPE_COUNT),
            (unsigned long long)entry[0], idist_dtype_name(c->tensors[i].dtype),
            c->tensors[i].count);
    }

    if (head[IDIST__HEAD_FILE] != c->head[IDIST__HEAD_FILE])
        return idist__fail(IDIST_ERR_ARG,
                           "checkpoint_load: %s: its length does not fit its tensors", path);
    memcpy(c->head, head, sizeof head);

    return IDIST_OK;
}

// Between the parts there are zeros, or the sum over the memory of a rank could not be that of the
// file.
static idist_status idist__checkpoint_zeros(const idist__checkpoint *c, int fd, const char *path) {
    char fill[IDIST__SUM_BLOCK];
    uint64_t at = 0;
    int i, err;

    for (i = 0; i < c->nparts; i++) {
        size_t nbytes, k, filled;
        idist__checkpoint_part(c, i, &nbytes);
        filled = idist__checkpoint_filled(nbytes);
        err = idist__checkpoint_get(fd, at + nbytes, fill, filled - nbytes);
        if (err)
            return idist__checkpoint_fail("checkpoint_load", path, "", err == EPIPE ? EIO : err);
        for (k = 0; k < filled - nbytes; k++)
            if (fill[k])
                return idist__fail(IDIST_ERR_ARG,
                                   "checkpoint_load: %s has something between its parts", path);
        at += filled;
    }

    return IDIST_OK;
}

// Reads all of a file, and writes nowhere: the checksum over it must be the last word of it. *sum
// is that word.
static idist_status idist__checkpoint_verify(const idist__checkpoint *c, int fd, const char *path,
                                             uint64_t *sum) {
    char *piece = (char *)malloc(IDIST__CHECKPOINT_PIECE);
    uint64_t at = 0, end = c->head[IDIST__HEAD_FILE] - sizeof *sum;
    idist__sum own = idist__sum_begin();
    int err = 0;

    if (!piece) return idist__fail(IDIST_ERR_NO_MEMORY, "checkpoint_load: no memory to read with");

    while (at < end && !err) {
        size_t n =
            end - at < IDIST__CHECKPOINT_PIECE ? (size_t)(end - at) : IDIST__CHECKPOINT_PIECE;
        err = idist__checkpoint_get(fd, at, piece, n);
        if (!err) idist__sum_add(&own, piece, n);
        at += n;
    }

    free(piece);
    if (!err) err = idist__checkpoint_get(fd, end, sum, sizeof *sum);
    if (!err && *sum == idist__sum_end(&own)) return idist__checkpoint_zeros(c, fd, path);
    if (err) return idist__checkpoint_fail("checkpoint_load", path, "", err == EPIPE ? EIO : err);

    return idist__fail(IDIST_ERR_ARG, "checkpoint_load: %s is damaged: its checksum differs", path);
}

// Rank 0: the file is open and whole, or the status says why not.
static idist_status idist__checkpoint_open(idist__checkpoint *c, const char *path, int *fd,
                                           uint64_t *sum) {
    idist_status s;

    *fd = path ? open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK)
               : -1; // does not wait for the writer of a pipe
    if (!path) return idist__fail(IDIST_ERR_ARG, "checkpoint_load: path is NULL");
    if (*fd < 0 && errno == ENOENT)
        return idist__fail(IDIST_ERR_NOT_FOUND, "checkpoint_load: there is no %s", path);
    if (*fd < 0) return idist__checkpoint_fail("checkpoint_load", path, "", errno);
    if ((s = idist__checkpoint_match(c, *fd, path)) != IDIST_OK) return s;

    return idist__checkpoint_verify(c, *fd, path, sum);
}

// What rank 0 knows of the file, and that all ranks have given the same tensors: other counts would
// break the group.
static idist_status idist__checkpoint_share(idist__checkpoint *c, uint64_t *sum,
                                            const idist_opts *o) {
    uint64_t word[IDIST__HEAD_WORDS + 2];
    idist__sum table = idist__sum_begin();
    uint64_t own, own_info = c->head[IDIST__HEAD_INFO];
    idist_status s;

    idist__sum_add(&table, c->table, (size_t)c->head[IDIST__HEAD_N] * 2 * sizeof *c->table);
    own = idist__sum_end(&table);
    memcpy(word, c->head, sizeof c->head);
    word[IDIST__HEAD_WORDS] = *sum;
    word[IDIST__HEAD_WORDS + 1] = own;
    s = idist_broadcast(word, IDIST__COUNT_OF(word), IDIST_U64, 0, o);
    if (s != IDIST_OK) return s;
    if (word[IDIST__HEAD_N] != c->head[IDIST__HEAD_N] || word[IDIST__HEAD_INFO] != own_info ||
        word[IDIST__HEAD_WORDS + 1] != own)
        s = idist__fail(IDIST_ERR_ARG,
                        "checkpoint_load: tensors or info are others than on rank 0");
    memcpy(c->head, word, sizeof c->head);
    *sum = word[IDIST__HEAD_WORDS];

    return idist__agree(s, o);
}

// Part by part from the file of rank 0 into the memory of all. A failure to read must not keep the
// others waiting.
static idist_status idist__checkpoint_spread(idist__checkpoint *c, void *info, int fd,
                                             const char *path, uint64_t sum, const idist_opts *o) {
    uint64_t at = idist__checkpoint_filled(sizeof c->head);
    size_t nbytes;
    int i, err = 0;
    idist_status s;

    idist__checkpoint_part(c, 1, &nbytes);
    at += idist__checkpoint_filled(nbytes);

    for (i = 2; i < c->nparts; i++) {
        void *part = i == 2 ? info : c->tensors[i - 3].data;
        idist__checkpoint_part(c, i, &nbytes);
        if (fd >= 0 && !err) err = idist__checkpoint_get(fd, at, part, nbytes);
        at += idist__checkpoint_filled(nbytes);
        if (nbytes && (s = idist_broadcast(part, nbytes, IDIST_U8, 0, o)) != IDIST_OK) return s;
    }

    s = err ? idist__checkpoint_fail("checkpoint_load", path, "", err == EPIPE ? EIO : err)
            : IDIST_OK;
    if (s == IDIST_OK && idist__checkpoint_sum(c) != sum)
        s = idist__fail(IDIST_ERR_SYSTEM,
                        "checkpoint_load: what has arrived is not what was in the file");

    return idist__agree(s, o);
}

idist_status idist_checkpoint_load(const char *path, const idist_tensor *tensors, int n, void *info,
                                   size_t info_nbytes, const idist_opts *opts) {
    idist__checkpoint c;
    idist_opts o;
    uint64_t sum = 0;
    int fd = -1;
    idist_status s = idist__agree_enter("checkpoint_load", opts, &o);

    if (s != IDIST_OK) return s;
    s = idist__checkpoint_make("checkpoint_load", &c, tensors, n, info, info_nbytes);
    if (s == IDIST_OK && idist_group_rank(o.group) == 0)
        s = idist__checkpoint_open(&c, path, &fd, &sum);
    s = idist__agree(s, &o);
    if (s == IDIST_OK) s = idist__checkpoint_share(&c, &sum, &o);
    if (s == IDIST_OK) s = idist__checkpoint_spread(&c, info, fd, path, sum, &o);
    idist__os_close(&fd);
    free(c.table);

    return s;
}

// A file of the folder, as its head describes it.
typedef struct idist__checkpoint_file {
    uint64_t step;
    double score;
    char name[256];
} idist__checkpoint_file;

// PREFIX_STEP_score=SCORE.idist
static bool idist__checkpoint_named(const char *name, const char *prefix) {
    size_t n = strlen(prefix), all = strlen(name);
    const char *at = name + n + 1;
    if (strncmp(name, prefix, n) != 0 || name[n] != '_' || *at < '0' || *at > '9') return false;
    while (*at >= '0' && *at <= '9') at++;
    return strncmp(at, "_score=", 7) == 0 && all > 6 && strcmp(name + all - 6, ".idist") == 0;
}

// .NAME.tmp: what a crash left behind.
static bool idist__checkpoint_is_temporary(const char *name, const char *prefix) {
    char inner[256];
    size_t n = strlen(name);

    if (name[0] != '.' || n < 6 || n - 5 >= sizeof inner || strcmp(name + n - 4, ".tmp") != 0)
        return false;
    memcpy(inner, name + 1, n - 5);
    inner[n - 5] = 0;
    return idist__checkpoint_named(inner, prefix);
}

static bool idist__checkpoint_better(const idist__checkpoint_file *a,
                                     const idist__checkpoint_file *b, bool low) {
    if (a->score != b->score) return low ? a->score < b->score : a->score > b->score;
    return a->step > b->step;
}

static bool idist__checkpoint_look(int folder, const char *name, idist__checkpoint_file *file) {
    uint64_t head[IDIST__HEAD_WORDS];
    int err, fd = openat(folder, name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    bool good = fd >= 0 && !idist__checkpoint_get_head(fd, head, &err);

    idist__os_close(&fd);
    if (!good) return false;
    file->step = head[IDIST__HEAD_STEP];
    memcpy(&file->score, &head[IDIST__HEAD_SCORE], sizeof file->score);
    idist__copy_text(file->name, sizeof file->name, name);

    return file->score == file->score;
}

// The checkpoints of a folder; foreign and torn files are none. tidy: removes what crashes left.
// *files is to be freed.
static idist_status idist__checkpoint_list(const char *path, const char *prefix, int folder,
                                           bool tidy, idist__checkpoint_file **files, int *n) {
    int fd = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), room = 0;
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    struct dirent *e;
    int err = errno;

    *n = 0;
    *files = NULL;

    if (!dir) {
        idist__os_close(&fd);
        return idist__checkpoint_fail("checkpoint", path, "", err);
    }

    for (;;) {
        errno = 0; // NULL is the end, or an error: of a file system, or of a number that 32 bits
                   // cannot hold
        if ((e = readdir(dir)) == NULL) break;
        if (tidy && idist__checkpoint_is_temporary(e->d_name, prefix))
            unlinkat(folder, e->d_name, 0);
        if (!idist__checkpoint_named(e->d_name, prefix)) continue;

        if (*n == room) {
            void *more = realloc(*files, sizeof **files * (size_t)(room += 64));
            if (!more) break;
            *files = (idist__checkpoint_file *)more;
        }

        if (idist__checkpoint_look(folder, e->d_name, *files + *n)) ++*n;
    }

    err = e ? 0 : errno;
    closedir(dir);
    if (err)
        return idist__checkpoint_fail("checkpoint", path, "",
                                      err); // nobody shall take this for an empty folder

    return e ? idist__fail(IDIST_ERR_NO_MEMORY, "checkpoint: no memory for the files of %s", path)
             : IDIST_OK;
}

static int idist__checkpoint_n_better(const idist__checkpoint_file *files, int n,
                                      const idist__checkpoint_file *than, bool low) {
    int i, n_better = 0;
    for (i = 0; i < n; i++)
        n_better += strcmp(files[i].name, than->name) != 0 &&
                    idist__checkpoint_better(&files[i], than, low);
    return n_better;
}

static int idist__checkpoint_sync(int fd) {
    if (fsync(fd) == 0 || errno == EINVAL) return 0; // EINVAL: nothing to sync on this file system
    return errno;
}

// The name appears when all bytes are on the disk, and never again without them.
static int idist__checkpoint_write(int folder, const char *temporary, const char *name,
                                   const idist__checkpoint *c) {
    int err, fd = openat(folder, temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);

    if (fd < 0) return errno;
    err = idist__checkpoint_put_all(fd, c);
    if (!err) err = idist__checkpoint_sync(fd);
    if (close(fd) != 0 && !err) err = errno;
    if (!err && renameat(folder, temporary, folder, name) != 0) err = errno;
    if (!err) return idist__checkpoint_sync(folder);
    unlinkat(folder, temporary, 0);

    return err;
}

// The file that keeps this one from being written: one of its name with a better score, or, when
// `keep` are better, the best of those, of a later step if there is such a one. NULL: nothing does.
static const idist__checkpoint_file *idist__checkpoint_rival(const idist_checkpoint_desc *d,
                                                             const idist__checkpoint_file *files,
                                                             int n,
                                                             const idist__checkpoint_file *file) {
    const idist__checkpoint_file *pick = NULL;
    int i, keep = d->keep ? d->keep : 1;
    bool full = keep > 0 && idist__checkpoint_n_better(files, n, file, d->low_is_best) >= keep;

    for (i = 0; i < n; i++) {
        bool later = files[i].step > file->step, picked = pick && pick->step > file->step;
        if (!idist__checkpoint_better(&files[i], file, d->low_is_best)) continue;
        if (strcmp(files[i].name, file->name) == 0) return &files[i];
        if (!full || (pick && later < picked)) continue;
        if (!pick || later > picked || idist__checkpoint_better(&files[i], pick, d->low_is_best))
            pick = &files[i];
    }

    return pick;
}

static idist_status idist__checkpoint_save_in(const idist_checkpoint_desc *d, int folder,
                                              const char *prefix, const idist__checkpoint *c,
                                              const idist__checkpoint_file *file,
                                              const idist__log *log) {
    idist__checkpoint_file *files;
    const idist__checkpoint_file *rival;
    char temporary[300];
    int n, i, err = 0, keep = d->keep ? d->keep : 1;
    idist_status s = idist__checkpoint_list(d->folder, prefix, folder, true, &files, &n);

    rival = s == IDIST_OK ? idist__checkpoint_rival(d, files, n, file) : NULL;
    if (rival) {
        bool later = rival->step > file->step;
        idist__log_print(log, later ? IDIST_LOG_WARN : IDIST_LOG_INFO,
                         "checkpoint_save: %s is not written to %s: %s there is better%s",
                         file->name, d->folder, rival->name,
                         later ? ", and of a later step: files of an earlier run count" : "");
    }

    snprintf(temporary, sizeof temporary, ".%s.tmp", file->name);
    free(files);
    if (s != IDIST_OK || rival) return s;
    err = idist__checkpoint_write(folder, temporary, file->name, c);
    if (err)
        return idist__checkpoint_fail("checkpoint_save", d->folder,
                                      err == EEXIST ? temporary : file->name, err);
    if (keep < 0) return IDIST_OK;
    s = idist__checkpoint_list(d->folder, prefix, folder, false, &files, &n);

    for (i = 0; i < n && s == IDIST_OK; i++) {
        if (idist__checkpoint_n_better(files, n, &files[i], d->low_is_best) < keep) continue;
        if (unlinkat(folder, files[i].name, 0) != 0 && errno != ENOENT)
            s = idist__checkpoint_fail("checkpoint_save: to remove", d->folder, files[i].name,
                                       errno);
    }

    free(files);

    return s;
}

// The folder of a desc, open; -1 and a status.
static idist_status idist__checkpoint_folder(const char *name, const idist_checkpoint_desc *d,
                                             bool make, const char **prefix, int *folder) {
    *folder = -1;
    if (!d || !d->folder || !d->folder[0])
        return idist__fail(IDIST_ERR_ARG, "%s: desc or its folder is NULL", name);
    *prefix = d->prefix ? d->prefix : "checkpoint";
    if (!(*prefix)[0] || strchr(*prefix, '/') || strlen(*prefix) > 180)
        return idist__fail(IDIST_ERR_ARG, "%s: \"%.200s\" cannot begin the name of a file", name,
                           *prefix);
    if (make && mkdir(d->folder, 0777) != 0 && errno != EEXIST)
        return idist__checkpoint_fail(name, d->folder, "", errno);
    *folder = open(d->folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (*folder >= 0) return IDIST_OK;
    if (!make && errno == ENOENT)
        return idist__fail(IDIST_ERR_NOT_FOUND, "%s: there is no folder %s", name, d->folder);

    return idist__checkpoint_fail(name, d->folder, "", errno);
}

idist_status idist_checkpoint_save(const idist_checkpoint_desc *desc, uint64_t step, double score,
                                   const idist_tensor *tensors, int n, const void *info,
                                   size_t info_nbytes, const idist_opts *opts) {
    idist__checkpoint c;
    idist__checkpoint_file file;
    idist_opts o;
    const char *prefix = NULL;
    int folder = -1;
    idist_status s = idist__agree_enter("checkpoint_save", opts, &o);
    const idist__world *w = o.group ? o.group->w : idist__world_default();

    if (s != IDIST_OK || idist_group_rank(o.group) != 0)
        return s == IDIST_OK ? idist__agree(s, &o) : s;
    s = idist__checkpoint_make("checkpoint_save", &c, tensors, n, info, info_nbytes);
    if (s == IDIST_OK && score != score)
        s = idist__fail(IDIST_ERR_ARG, "checkpoint_save: the score is not a number");
    if (s == IDIST_OK)
        s = idist__checkpoint_folder("checkpoint_save", desc, true, &prefix, &folder);

    if (s == IDIST_OK) {
        c.head[IDIST__HEAD_STEP] = file.step = step;
        file.score = score;
        memcpy(&c.head[IDIST__HEAD_SCORE], &score, sizeof score);
        c.head[IDIST__HEAD_SUM] = idist__checkpoint_head_sum(c.head);
        snprintf(file.name, sizeof file.name, "%s_%llu_score=%.6g.idist", prefix,
                 (unsigned long long)step, score);
        s = idist__checkpoint_save_in(desc, folder, prefix, &c, &file, &w->log);
    }

    idist__os_close(&folder);
    free(c.table);

    return idist__agree(s, &o);
}

// Rank 0: the path of the file that is looked for.
static idist_status idist__checkpoint_pick(const idist_checkpoint_desc *d, bool latest, char *path,
                                           size_t capacity) {
    idist__checkpoint_file *files = NULL, *pick = NULL;
    const char *prefix = NULL;
    int n = 0, i, folder = -1;
    idist_status s = idist__checkpoint_folder("checkpoint_find", d, false, &prefix, &folder);

    if (s == IDIST_OK) s = idist__checkpoint_list(d->folder, prefix, folder, false, &files, &n);

    for (i = 0; i < n && s == IDIST_OK; i++) {
        bool better = pick && idist__checkpoint_better(&files[i], pick, d->low_is_best);
        if (pick && latest && files[i].step != pick->step) better = files[i].step > pick->step;
        if (!pick || better) pick = &files[i];
    }

    if (s == IDIST_OK && !pick)
        s = idist__fail(IDIST_ERR_NOT_FOUND, "checkpoint_find: no file %s_*.idist in %s", prefix,
                        d->folder);
    if (s == IDIST_OK && strlen(d->folder) + strlen(pick->name) + 2 > capacity)
        s = idist__fail(IDIST_ERR_TRUNCATED, "checkpoint_find: the path has more than %zu bytes",
                        capacity);
    if (s == IDIST_OK) snprintf(path, capacity, "%s/%s", d->folder, pick->name);
    free(files);
    idist__os_close(&folder);

    return s;
}

idist_status idist_checkpoint_find(const idist_checkpoint_desc *desc, bool latest, char *path,
                                   size_t capacity, const idist_opts *opts) {
    char found[4096];
    idist_opts o;
    idist_status s = idist__agree_enter("checkpoint_find", opts, &o);

    if (s != IDIST_OK) return s;
    memset(found, 0, sizeof found);
    if (idist_group_rank(o.group) == 0)
        s = idist__checkpoint_pick(desc, latest, found, sizeof found);
    if ((s = idist__agree(s, &o)) != IDIST_OK) return s;
    if ((s = idist_broadcast(found, sizeof found, IDIST_U8, 0, &o)) != IDIST_OK) return s;
    if (!path) s = idist__fail(IDIST_ERR_ARG, "checkpoint_find: path is NULL");
    else if (strlen(found) >= capacity)
        s = idist__fail(IDIST_ERR_TRUNCATED, "checkpoint_find: %s does not fit into %zu bytes",
                        found, capacity);
    if ((s = idist__agree(s, &o)) == IDIST_OK) memcpy(path, found, strlen(found) + 1);

    return s;
}

//------------------------------------------------------------------------------
// [train:tensor]  arrays that all ranks have: compared, then copied from one of them
// uses err base:type life calls:coll p2p agree
//------------------------------------------------------------------------------

// What is compared of a tensor, or of an option: then dtype is one of these, and count its value.
enum { IDIST__SHAPE_WHOLE = -1, IDIST__SHAPE_REAL = -2 }; // the bits of a double
typedef struct idist__shape {
    const char *what; // "parameter"
    int index;        // -1: of an option
    int64_t count, dtype;
} idist__shape;

static idist__shape idist__shape_option(const char *what, int64_t value) {
    idist__shape s;

    s.what = what;
    s.index = -1;
    s.count = value;
    s.dtype = IDIST__SHAPE_WHOLE;
    return s;
}

static void idist__shape_say(char *text, size_t cap, int64_t count, int64_t dtype) {
    double real;
    memcpy(&real, &count, sizeof real);
    if (dtype == IDIST__SHAPE_REAL) snprintf(text, cap, "%g", real);
    else if (dtype < 0) snprintf(text, cap, "%lld", (long long)count);
    else snprintf(text, cap, "%s x %lld", idist_dtype_name((idist_dtype)dtype), (long long)count);
}

static void idist__shape_of(idist__shape *shapes, const char *what, const idist_tensor *tensors,
                            int n) {
    int i;

    for (i = 0; i < n; i++) {
        shapes[i].what = what;
        shapes[i].index = i;
        shapes[i].count = (int64_t)tensors[i].count;
        shapes[i].dtype = (int64_t)tensors[i].dtype;
    }
}

// Collective: root's shapes[from .. to-1] are those of all. words: room for 2 numbers each.
static idist_status idist__shapes_compare(const char *name, const idist__shape *shapes, int from,
                                          int to, int64_t *words, int root, const idist_opts *o) {
    char here[64], there[64], number[16] = "";
    int i;
    idist_status s;

    for (i = from; i < to; i++) {
        words[2 * i] = shapes[i].count;
        words[2 * i + 1] = shapes[i].dtype;
    }

    s = idist_broadcast(words + 2 * from, 2 * (size_t)(to - from), IDIST_I64, root, o);
    if (s != IDIST_OK) return s;
    for (i = from;
         i < to && words[2 * i] == shapes[i].count && words[2 * i + 1] == shapes[i].dtype;)
        i++;

    if (i < to) {
        idist__shape_say(here, sizeof here, shapes[i].count, shapes[i].dtype);
        idist__shape_say(there, sizeof there, words[2 * i], words[2 * i + 1]);
        if (shapes[i].index >= 0) snprintf(number, sizeof number, " %d", shapes[i].index);
        s = idist__fail(IDIST_ERR_MISMATCH, "%s: %s%s is %s here, and %s on rank %d", name,
                        shapes[i].what, number, here, there, root);
    }

    return idist__agree(s, o);
}

// Collective: the same status on all ranks, and not OK when `mine` of any is not. shapes may be
// NULL then. The first n_options, as many on all ranks, say how many there are of the others, and
// are compared before those.
static idist_status idist__shapes_agree(const char *name, const idist__shape *shapes, int n_options,
                                        int n, idist_status mine, int root, const idist_opts *o) {
    int64_t *words = (int64_t *)malloc(2 * ((size_t)n + 1) * sizeof *words);
    idist_status s = mine;

    if (s == IDIST_OK && !words)
        s = idist__fail(IDIST_ERR_NO_MEMORY, "%s: no memory to compare %d tensors", name, n);
    if ((s = idist__agree(s, o)) == IDIST_OK)
        s = idist__shapes_compare(name, shapes, 0, n_options, words, root, o);
    if (s == IDIST_OK) s = idist__shapes_compare(name, shapes, n_options, n, words, root, o);
    free(words);

    return s;
}

static idist_status idist__tensors_check(const char *name, const char *what,
                                         const idist_tensor *tensors, int n, bool data_too) {
    int i;

    if (n < 0) return idist__fail(IDIST_ERR_ARG, "%s: %d %ss", name, n, what);
    if (n && !tensors)
        return idist__fail(IDIST_ERR_ARG, "%s: %d %ss, and NULL for them", name, n, what);

    for (i = 0; i < n; i++) {
        if (!idist_dtype_size(tensors[i].dtype))
            return idist__fail(IDIST_ERR_ARG, "%s: %s %d: %d is no dtype", name, what, i,
                               (int)tensors[i].dtype);
        if (tensors[i].count > SIZE_MAX / 64)
            return idist__fail(IDIST_ERR_ARG, "%s: %s %d has %zu elements", name, what, i,
                               tensors[i].count);
        if (data_too && tensors[i].count && !tensors[i].data)
            return idist__fail(IDIST_ERR_ARG, "%s: %s %d is NULL", name, what, i);
    }

    return IDIST_OK;
}

#define IDIST__TENSORS_AT_ONCE 64

// The messages go side by side, so that small tensors do not wait for one another.
static idist_status idist__tensors_broadcast(const idist_tensor *tensors, int n, int root,
                                             const idist_opts *o) {
    idist_status s = IDIST_OK, ended;
    int i;

    for (i = 0; i < n && s == IDIST_OK; i++) {
        if (i % IDIST__TENSORS_AT_ONCE == 0 && (s = idist_group_begin()) != IDIST_OK) return s;
        s = idist_broadcast(tensors[i].data, tensors[i].count, tensors[i].dtype, root, o);
        if (i + 1 < n && (i + 1) % IDIST__TENSORS_AT_ONCE && s == IDIST_OK) continue;
        ended = idist_group_end();
        if (s == IDIST_OK) s = ended;
    }

    return s == IDIST_OK ? IDIST_OK : idist__agree_break("broadcast of tensors", o->group, s);
}

static idist_status idist__tensors_share(const char *name, const char *what,
                                         const idist_tensor *tensors, int n, void *options,
                                         size_t nbytes, int root, const idist_opts *opts) {
    enum { IDIST__TENSORS_OPTIONS = 2 };
    char number[48];
    idist_opts o;
    idist__shape *shapes = NULL;
    idist_status s = idist__agree_enter(name, opts, &o);

    if (s != IDIST_OK) return s;
    s = idist__tensors_check(name, what, tensors, n, true);
    if (s == IDIST_OK && (root < 0 || root >= idist_group_size(o.group)))
        s = idist__fail(IDIST_ERR_ARG, "%s: root %d is not in a group of %d", name, root,
                        idist_group_size(o.group));
    if (s == IDIST_OK && nbytes && !options)
        s = idist__fail(IDIST_ERR_ARG, "%s: options is NULL", name);
    if (s == IDIST_OK)
        shapes = (idist__shape *)malloc(((size_t)n + IDIST__TENSORS_OPTIONS) * sizeof *shapes);
    if (s == IDIST_OK && !shapes)
        s = idist__fail(IDIST_ERR_NO_MEMORY, "%s: no memory for %d tensors", name, n);

    if (shapes) {
        snprintf(number, sizeof number, "number of %ss", what);
        shapes[0] = idist__shape_option(number, n);
        shapes[1] = idist__shape_option("options_nbytes", (int64_t)nbytes);
        idist__shape_of(shapes + IDIST__TENSORS_OPTIONS, what, tensors, n);
    }

    s = idist__shapes_agree(name, shapes, IDIST__TENSORS_OPTIONS,
                            shapes ? IDIST__TENSORS_OPTIONS + n : 0, s, root, &o);
    free(shapes);
    if (s == IDIST_OK) s = idist__tensors_broadcast(tensors, n, root, &o);
    if (s == IDIST_OK && nbytes) s = idist_broadcast(options, nbytes, IDIST_U8, root, &o);

    return s == IDIST_OK ? idist__agree(s, &o) : s;
}

idist_status idist_broadcast_parameters(const idist_tensor *params, int n, int root,
                                        const idist_opts *opts) {
    return idist__tensors_share("broadcast_parameters", "parameter", params, n, NULL, 0, root,
                                opts);
}

idist_status idist_broadcast_optimizer_state(const idist_tensor *state, int n, void *options,
                                             size_t options_nbytes, int root,
                                             const idist_opts *opts) {
    return idist__tensors_share("broadcast_optimizer_state", "tensor", state, n, options,
                                options_nbytes, root, opts);
}

//------------------------------------------------------------------------------
// [train:memory]  the same on the host and on the device
// uses err reduce group own
//
// What is done on the device is enqueued on opts.stream, by [ipc:own] of idist_ipc.h.
//------------------------------------------------------------------------------

#ifdef IDIST_NCCL_H
#define IDIST__OWN(call) call
#else
static idist_status idist__own_none(void) {
    return idist__fail(IDIST_ERR_UNSUPPORTED,
                       "ddp: device memory takes idist_nccl.h, included before idist_train.h");
}
#define IDIST__OWN(call) idist__own_none()
#endif

typedef struct idist__memory {
    bool on_device;
    idist_opts opts; // group and stream
} idist__memory;

// from NULL: zeros.
static idist_status idist__memory_copy(const idist__memory *m, void *to, const void *from,
                                       size_t nbytes) {
    if (!nbytes || to == from) return IDIST_OK;
    if (m->on_device) return IDIST__OWN(idist__own_copy("ddp", &m->opts, to, from, nbytes));
    if (from) memcpy(to, from, nbytes);
    else memset(to, 0, nbytes);
    return IDIST_OK;
}

static idist_status idist__memory_scale(const idist__memory *m, void *data, size_t count,
                                        idist_dtype dtype, double factor) {
    if (!count || factor == 1) return IDIST_OK;
    if (m->on_device)
        return IDIST__OWN(idist__own_scale("ddp", &m->opts, data, count, dtype, factor));
    idist__reduce_scale(data, count, dtype, factor);
    return IDIST_OK;
}

// Zeroed.
static idist_status idist__memory_alloc(const idist__memory *m, void **p, size_t nbytes) {
    if (m->on_device) return IDIST__OWN(idist__own_alloc("ddp", &m->opts, p, nbytes));
    return (*p = idist_alloc(nbytes, &m->opts)) != NULL ? IDIST_OK : IDIST_ERR_NO_MEMORY;
}

static void idist__memory_free(const idist__memory *m, void *p) {
#ifdef IDIST_NCCL_H
    if (m->on_device) idist__own_free(p);
#endif
    if (!m->on_device) idist_free(p);
}

//------------------------------------------------------------------------------
// [train:compress]  buckets that travel with fewer bits
// uses err base:type calls:coll ptx own memory
//
// Halves: the bucket is rounded to 16 bits, averaged (in float, rounded once more), and widened.
//
// Bytes with error feedback (Seide et al., 1-bit SGD, 2014, who did it with one bit): 1,024
// gradients share a scale, the largest of them becomes 127, and what rounding takes from each is
// added to the next iteration's, so that over time nothing is lost. Bytes cannot be added up on the
// way, so the bucket goes in two steps, each block of it through a rank of its own; the second
// rounding has an error, and a feedback, too:
//
//     rank 0   [block 0 | block 1 | block 2]          all_to_all: block k of all ranks to rank k
//     rank 1   [block 0 | block 1 | block 2]          rank k: float, add up, scale, round again
//     rank 2   [block 0 | block 1 | block 2]          all_gather: to all; every rank has the same
//     bytes
//
// Bytes sent: 2 (n-1)/n * 1.004 per gradient, as against 8 (n-1)/n of an all_reduce of floats. On
// the device kernels of idist_ipc.h do the same, with the same bits where the compiler does not
// fuse the host's products into its sums.
//------------------------------------------------------------------------------

enum { IDIST__CHUNK = 1024 };
enum { IDIST__CHUNK_NBYTES = sizeof(float) + IDIST__CHUNK }; // the scale, then the bytes

// How the buckets of an iteration are added up.
typedef struct idist__summing {
    idist__memory memory;
    int size;         // of the group
    idist_dtype wire; // F16, BF16 or I8
    idist_op op;      // the result comes about by this, ...
    double post;      // ... and this factor afterwards
} idist__summing;

// What a bucket needs for it; halves only `send`.
typedef struct idist__packed {
    void *send, *recv;
    void *error,
        *own_error; // floats: of the first rounding, and of the second, in this rank's block
    size_t block;   // gradients in a block, a multiple of IDIST__CHUNK
} idist__packed;

static size_t idist__packed_nbytes(const idist__packed *p) {
    return p->block / IDIST__CHUNK * IDIST__CHUNK_NBYTES;
}

static void idist__packed_free(void *state, void *arg) {
    const idist__memory *m = &((const idist__summing *)arg)->memory;
    idist__packed *p = (idist__packed *)state;

    idist__memory_free(m, p->send);
    idist__memory_free(m, p->recv);
    idist__memory_free(m, p->error);
    idist__memory_free(m, p->own_error);
    free(p);
}

static idist_status idist__packed_create(const idist__summing *c, idist_bucket *b) {
    idist__packed *p = (idist__packed *)calloc(1, sizeof *p);
    size_t n = (size_t)c->size, nbytes = (b->count + 1) * 2;
    idist_status s = IDIST_OK;

    if (!p) return idist__fail(IDIST_ERR_NO_MEMORY, "ddp_create: no memory to compress in");
    b->state = p;

    if (c->wire == IDIST_I8) {
        p->block = (b->count + n * IDIST__CHUNK - 1) / (n * IDIST__CHUNK) * IDIST__CHUNK;
        nbytes = n * idist__packed_nbytes(p);
        s = idist__memory_alloc(&c->memory, &p->error, n * p->block * sizeof(float));
        if (s == IDIST_OK)
            s = idist__memory_alloc(&c->memory, &p->own_error, p->block * sizeof(float));
        if (s == IDIST_OK) s = idist__memory_alloc(&c->memory, &p->recv, nbytes);
    }

    return s == IDIST_OK ? idist__memory_alloc(&c->memory, &p->send, nbytes) : s;
}

static void idist__half_pack(const idist_bucket *b, char *to, idist_dtype wire) {
    float some[256];
    size_t at, i, k;

    if (b->dtype == IDIST_F32) {
        idist__type_narrow(to, (const float *)b->data, b->count, wire);
        return;
    }

    for (at = 0; at < b->count; at += k) {
        k = b->count - at < 256 ? b->count - at : 256;
        for (i = 0; i < k; i++) some[i] = (float)((const double *)b->data)[at + i];
        idist__type_narrow(to + 2 * at, some, k, wire);
    }
}

static void idist__half_unpack(const idist_bucket *b, const char *from, idist_dtype wire) {
    float some[256];
    size_t at, i, k;

    if (b->dtype == IDIST_F32) {
        idist__type_widen((float *)b->data, from, b->count, wire);
        return;
    }

    for (at = 0; at < b->count; at += k) {
        k = b->count - at < 256 ? b->count - at : 256;
        idist__type_widen(some, from + 2 * at, k, wire);
        for (i = 0; i < k; i++) ((double *)b->data)[at + i] = some[i];
    }
}

static idist_status idist__half_start(idist_bucket *b, void *arg) {
    const idist__summing *c = (const idist__summing *)arg;
    char *wire = (char *)((idist__packed *)b->state)->send;
    idist__half_pack(b, wire, c->wire);
    return idist_all_reduce(wire, wire, b->count, c->wire, c->op, &b->opts);
}

static idist_status idist__half_finish(idist_bucket *b, void *arg) {
    const idist__summing *c = (const idist__summing *)arg;
    idist__half_unpack(b, (const char *)((idist__packed *)b->state)->send, c->wire);
    return idist__memory_scale(&c->memory, b->data, b->count, b->dtype, c->post);
}

// Rounds x to bytes; x becomes what that took. A chunk with a value that is not finite becomes NaN
// as a whole.
static void idist__byte_pack(float *x, size_t count, char *to) {
    size_t at, i;

    for (at = 0; at < count; at += IDIST__CHUNK, to += IDIST__CHUNK_NBYTES) {
        signed char *bytes = (signed char *)to + sizeof(float);
        float largest = 0, sum = 0, scale, inverse;

        for (i = 0; i < IDIST__CHUNK; i++) {
            float size = x[at + i] < 0 ? -x[at + i] : x[at + i];
            largest = size > largest ? size : largest;
            sum += x[at + i] - x[at + i]; // NaN for NaN and infinity
        }

        scale = largest / 127 + sum;
        inverse = scale > 0 ? 1 / scale : 0;
        if (!(inverse <= 3.4e38f)) inverse = 0; // so small that it does not matter

        for (i = 0; i < IDIST__CHUNK; i++) {
            float v = x[at + i] * inverse;
            int byte = sum == 0 ? (int)(v < 0 ? v - 0.5f : v + 0.5f) : 0;
            bytes[i] = (signed char)byte;
            x[at + i] = sum == 0 ? x[at + i] - (float)byte * scale : 0;
        }

        memcpy(to, &scale, sizeof scale);
    }
}

static float idist__byte_scale(const char *chunk) {
    float scale;
    memcpy(&scale, chunk, sizeof scale);
    return scale;
}

static idist_status idist__byte_start(idist_bucket *b, void *arg) {
    const idist__summing *c = (const idist__summing *)arg;
    idist__packed *p = (idist__packed *)b->state;
    float *error = (float *)p->error;
    size_t i;

    if (b->dtype == IDIST_F32)
        for (i = 0; i < b->count; i++) error[i] += ((const float *)b->data)[i];
    else
        for (i = 0; i < b->count; i++) error[i] += (float)((const double *)b->data)[i];
    idist__byte_pack(error, (size_t)c->size * p->block, (char *)p->send);

    return idist_all_to_all(p->send, p->recv, idist__packed_nbytes(p), IDIST_U8, &b->opts);
}

static idist_status idist__byte_finish(idist_bucket *b, void *arg) {
    const idist__summing *c = (const idist__summing *)arg;
    idist__packed *p = (idist__packed *)b->state;
    float *sum = (float *)p->own_error;
    const char *from = (const char *)p->recv;
    size_t i, at;
    idist_status s;
    int r;

    for (r = 0; r < c->size; r++)
        for (at = 0; at < p->block; at += IDIST__CHUNK, from += IDIST__CHUNK_NBYTES) {
            float scale = idist__byte_scale(from) * (float)b->scale;
            for (i = 0; i < IDIST__CHUNK; i++)
                sum[at + i] += (float)((const signed char *)from)[sizeof(float) + i] * scale;
        }

    idist__byte_pack(sum, p->block, (char *)p->send);
    s = idist_all_gather(p->send, p->recv, idist__packed_nbytes(p), IDIST_U8, &b->opts);
    if (s != IDIST_OK) return s;
    from = (const char *)p->recv;

    for (at = 0; at < b->count; at += IDIST__CHUNK, from += IDIST__CHUNK_NBYTES) {
        float scale = idist__byte_scale(from);
        const signed char *bytes = (const signed char *)from + sizeof(float);
        size_t k = b->count - at < IDIST__CHUNK ? b->count - at : (size_t)IDIST__CHUNK;
        if (b->dtype == IDIST_F32)
            for (i = 0; i < k; i++) ((float *)b->data)[at + i] = (float)bytes[i] * scale;
        else
            for (i = 0; i < k; i++) ((double *)b->data)[at + i] = (float)bytes[i] * scale;
    }

    return IDIST_OK;
}

// ---- the same on the device, for F32 ----

#ifdef IDIST_NCCL_H
static idist_status idist__half_move_device(const idist_bucket *b, int kernel_op, const void *in,
                                            void *out) {
    idist__pack_args a;

    memset(&a, 0, sizeof a);
    a.in = in;
    a.out = out;
    a.count = b->count;
    a.op = kernel_op;
    return idist__own_pack("ddp", &b->opts, IDIST__PACK_HALVES, &a);
}

static idist_status idist__half_start_device(idist_bucket *b, void *arg) {
    const idist__summing *c = (const idist__summing *)arg;
    void *wire = ((idist__packed *)b->state)->send;
    int op = c->wire == IDIST_F16 ? IDIST__PACK_F16 : IDIST__PACK_BF16;
    idist_status s = idist__half_move_device(b, op, b->data, wire);
    return s == IDIST_OK ? idist_all_reduce(wire, wire, b->count, c->wire, c->op, &b->opts) : s;
}

static idist_status idist__half_finish_device(idist_bucket *b, void *arg) {
    const idist__summing *c = (const idist__summing *)arg;
    int op = c->wire == IDIST_F16 ? IDIST__UNPACK_F16 : IDIST__UNPACK_BF16;
    idist_status s = idist__half_move_device(b, op, ((idist__packed *)b->state)->send, b->data);
    return s == IDIST_OK ? idist__memory_scale(&c->memory, b->data, b->count, b->dtype, c->post)
                         : s;
}

static idist_status idist__byte_start_device(idist_bucket *b, void *arg) {
    const idist__summing *c = (const idist__summing *)arg;
    idist__packed *p = (idist__packed *)b->state;
    idist__pack_args a;
    idist_status s;

    memset(&a, 0, sizeof a);
    a.op = IDIST__PACK_GIVE;
    a.in = b->data;
    a.error = (float *)p->error;
    a.out = p->send;
    a.count = b->count;
    a.padded = (size_t)c->size * p->block;
    s = idist__own_pack("ddp", &b->opts, IDIST__PACK_BYTES, &a);

    return s == IDIST_OK
               ? idist_all_to_all(p->send, p->recv, idist__packed_nbytes(p), IDIST_U8, &b->opts)
               : s;
}

static idist_status idist__byte_finish_device(idist_bucket *b, void *arg) {
    const idist__summing *c = (const idist__summing *)arg;
    idist__packed *p = (idist__packed *)b->state;
    idist__pack_args a;
    idist_status s;

    memset(&a, 0, sizeof a);
    a.op = IDIST__PACK_ADD;
    a.in = p->recv;
    a.error = (float *)p->own_error;
    a.out = p->send;
    a.padded = p->block;
    a.factor = (float)b->scale;
    a.n = c->size;
    s = idist__own_pack("ddp", &b->opts, IDIST__PACK_BYTES, &a);
    if (s == IDIST_OK)
        s = idist_all_gather(p->send, p->recv, idist__packed_nbytes(p), IDIST_U8, &b->opts);
    a.out = b->data;
    a.count = b->count;

    return s == IDIST_OK ? idist__own_pack("ddp", &b->opts, IDIST__UNPACK_BYTES, &a) : s;
}
#endif

//------------------------------------------------------------------------------
// [train:ddp]  gradients averaged while the backward pass still runs
// uses os err base:type world life calls:coll p2p own mark agree tensor memory
// uses compress
//
// Gradients come into being from the last parameter to the first, so buckets are formed in that
// order, and a bucket whose gradients are all ready goes out while those of the layers before are
// computed (Li et al., PyTorch Distributed, 2020):
//
//     parameters     0    1    2    3    4    5        in the order of the forward pass
//     buckets      [    2    ][   1   ][   0   ]       0 is closed at 1 MiB, the others at 25 MiB
//     backward                <-- 3 -- 4 -- 5
//     on the way                        |======== 0 ========|
//                                  |============ 1 ============|
//
// In what order ranks have their gradients ready does not matter: bucket k is launched when it is
// full and k-1 is out, so that all ranks make the same calls in the same order. These are, in each
// iteration:
//
//     uneven        all_gather of "I have data", 1 byte; then all know whose buffers count, and how
//     many to divide by buffers       broadcast of each buckets       0, 1, ...: what the hook's
//     `start` does; by itself one all_reduce in place find_unused   all_reduce of "I have a
//     gradient", 1 byte per parameter buckets       0, 1, ...: what the hook's `finish` does
//
// A rank in idist_ddp_join makes these calls with zeros until all say that they have no data.
//
// A bucket holds its gradients one after the other, those of lower parameters first. If they lie so
// in the program's memory, that is the bucket, and nothing is copied.
//------------------------------------------------------------------------------

#define IDIST__DDP_FIRST_NBYTES ((size_t)1 << 20)
#define IDIST__DDP_BUCKET_NBYTES ((size_t)25 << 20)

typedef struct idist__ddp_param {
    void *at; // its gradient in the bucket: where the program has it, or a copy
    int bucket;
    uint64_t ready; // the last iteration in which it was, ...
    uint64_t added; // ... or before which, in a pass with no_sync
} idist__ddp_param;

typedef struct idist__ddp_bucket {
    idist_bucket pub;
    int n, nready; // gradients
    int64_t launched_ns;
    bool view; // it lies in the program's memory
    char *at;  // while it is laid out
    idist_request request;
} idist__ddp_bucket;

struct idist_ddp {
    idist_ddp_desc desc;
    idist_ddp_hook hook;
    idist_tensor *params, *grads, *buffers;
    idist__ddp_param *state;
    idist__ddp_bucket *buckets;
    int n_buckets, n_launched;
    void *memory;  // of buckets that are not views
    uint8_t *used; // per parameter: whether any rank had a gradient
    void *saved;   // gradients of this rank that zeros took the place of, one after the other, ...
    size_t saved_nbytes; // ... and the room for them, which is kept
    float *held;         // I8 and find_unused: see idist__ddp_hold
    bool filled;         // in this iteration
    uint8_t *has_data;
    int size;            // of the group
    int active;          // ranks with data
    int root, last_root; // the first of those; the last of those in the last iteration that had any
    double scale;        // result = scale * sum of what the ranks hand in
    idist__summing how;  // and how that comes about
    uint64_t iteration;  // from 1 on
    int n_ready;         // gradients, in this one
    bool copies;         // some gradients are copied to their buckets
    bool begun, quiet, joined; // quiet: no_sync is on
    idist_status status;       // the first failure of this iteration
    char text[512];
};

static idist_opts idist__ddp_opts(const idist_ddp *d, bool on_device) {
    idist_opts o;

    memset(&o, 0, sizeof o);
    o.group = d->desc.group;
    o.timeout_ms = d->desc.timeout_ms;
    if (on_device) o.stream = d->desc.stream;
    return o;
}

static size_t idist__ddp_nbytes(const idist_tensor *t) {
    return t->count * idist_dtype_size(t->dtype);
}

// ---- buckets ----

// Gives parameter i its bucket, from the last to the first: bucket_of[i], and how many there are.
// Each dtype has an open one, which is closed by the gradient that brings it to the limit. They are
// numbered as they were opened.
static int idist__ddp_assign(const idist_tensor *grads, int n, size_t first_limit, size_t limit,
                             int *bucket_of) {
    size_t nbytes[IDIST_DTYPE_COUNT], limits[IDIST_DTYPE_COUNT];
    int open[IDIST_DTYPE_COUNT], i, count = 0;

    for (i = 0; i < IDIST_DTYPE_COUNT; i++) {
        open[i] = -1;
        nbytes[i] = 0;
        limits[i] = first_limit;
    }

    for (i = n; i-- > 0;) {
        int k = (int)grads[i].dtype;
        if (open[k] < 0) open[k] = count++;
        bucket_of[i] = open[k];
        nbytes[k] += idist__ddp_nbytes(&grads[i]);
        if (nbytes[k] < limits[k]) continue;
        open[k] = -1;
        nbytes[k] = 0;
        limits[k] = limit;
    }

    return count;
}

// Which buckets lie in the program's memory, as their gradients follow one another there: those
// begin at b->pub.data.
static void idist__ddp_find_views(idist_ddp *d) {
    int b, i;

    for (b = 0; b < d->n_buckets; b++) {
        d->buckets[b].view = true;
        d->buckets[b].at = NULL;
    }

    for (i = 0; i < d->desc.n; i++) {
        const idist_tensor *g = &d->grads[i];
        idist__ddp_bucket *bucket = &d->buckets[d->state[i].bucket];
        if (!g->count) continue;
        if (!g->data || (bucket->at && bucket->at != (char *)g->data)) bucket->view = false;
        if (!g->data) continue;
        // What compresses, and the device's kernels, want elements aligned.
        if ((d->desc.compression || d->desc.on_device) &&
            (uintptr_t)g->data % idist_dtype_size(g->dtype))
            bucket->view = false;
        if (!bucket->at) bucket->pub.data = g->data;
        bucket->at = (char *)g->data + idist__ddp_nbytes(g);
    }
}

// Where each gradient lies: in the program's memory, or in d->memory once that is there. Returns
// how large it has to be.
static size_t idist__ddp_place(idist_ddp *d) {
    size_t total = 0;
    int b, i;

    idist__ddp_find_views(d);

    for (b = 0; b < d->n_buckets; b++) {
        idist__ddp_bucket *bucket = &d->buckets[b];

        if (!bucket->view) {
            bucket->pub.data = d->memory ? (char *)d->memory + total : NULL;
            total += (bucket->pub.count * idist_dtype_size(bucket->pub.dtype) + 63) / 64 * 64;
        }

        bucket->at = (char *)bucket->pub.data;
    }

    for (i = 0; i < d->desc.n; i++) {
        idist__ddp_bucket *bucket = &d->buckets[d->state[i].bucket];
        if (!bucket->at) continue;
        d->state[i].at = bucket->at;
        bucket->at += idist__ddp_nbytes(&d->grads[i]);
    }

    return total;
}

static idist_status idist__ddp_no_memory(void) {
    return idist__fail(IDIST_ERR_NO_MEMORY, "ddp_create: no memory");
}

// Forms the buckets. Local.
static idist_status idist__ddp_make_buckets(idist_ddp *d) {
    size_t limit = d->desc.bucket_nbytes, total;
    int *bucket_of = (int *)malloc(((size_t)d->desc.n + 1) * sizeof *bucket_of), b, i;
    idist_status s;

    if (!bucket_of) return idist__ddp_no_memory();
    d->n_buckets = idist__ddp_assign(d->grads, d->desc.n, limit ? limit : IDIST__DDP_FIRST_NBYTES,
                                     limit ? limit : IDIST__DDP_BUCKET_NBYTES, bucket_of);
    d->buckets = (idist__ddp_bucket *)calloc((size_t)d->n_buckets + 1, sizeof *d->buckets);

    for (i = 0; i < d->desc.n && d->buckets; i++) {
        idist__ddp_bucket *bucket = &d->buckets[bucket_of[i]];
        d->state[i].bucket = bucket_of[i];
        bucket->pub.dtype = d->grads[i].dtype;
        bucket->pub.count += d->grads[i].count;
        bucket->n++;
    }

    free(bucket_of);
    if (!d->buckets) return idist__ddp_no_memory();

    if ((total = idist__ddp_place(d)) != 0) {
        if ((s = idist__memory_alloc(&d->how.memory, &d->memory, total)) != IDIST_OK) return s;
        idist__ddp_place(d);
    }

    for (i = 0; i < d->desc.n; i++) {
        if (!d->grads[i].data) d->grads[i].data = d->state[i].at;
        d->copies = d->copies || (d->grads[i].count && d->grads[i].data != d->state[i].at);
    }

    for (b = 0; b < d->n_buckets; b++) d->buckets[b].pub.index = b;

    return IDIST_OK;
}

// ---- one iteration ----

// The failure is that of the iteration, and of every call in it.
static idist_status idist__ddp_fail(idist_ddp *d, idist_status status) {
    if (status == IDIST_OK) return IDIST_OK;
    if (d->status != IDIST_OK) return idist__fail(d->status, "%s", d->text);
    d->status = idist__agree_break("ddp", d->desc.group, status);
    idist__copy_text(d->text, sizeof d->text, idist_last_error());
    return status;
}

// How the result comes about from the sum, now that so many ranks have data.
static void idist__ddp_set_scale(idist_ddp *d) {
    const idist_ddp_desc *c = &d->desc;
    double post = c->postscale != 0 ? c->postscale : 1, divisor = c->sum                ? 1
                                                                  : c->divide_by_active ? d->active
                                                                                        : d->size;

    d->how.op = c->sum ? IDIST_SUM : IDIST_AVG;
    d->scale = post / divisor;
    d->how.post = post * (c->sum ? 1 : d->size / divisor);
}

// Who has data, and what follows from that.
static idist_status idist__ddp_count_active(idist_ddp *d) {
    idist_opts o = idist__ddp_opts(d, false);
    uint8_t mine = !d->joined;
    int r;
    idist_status s = idist_all_gather(&mine, d->has_data, 1, IDIST_U8, &o);

    if (s != IDIST_OK) return s;
    d->active = 0;

    for (r = d->size; r-- > 0;) {
        if (!d->has_data[r]) continue;
        if (!d->active++) d->last_root = r;
        d->root = r;
    }

    if (d->active) idist__ddp_set_scale(d);

    return IDIST_OK;
}

// Whether the world is still there: a ddp of one rank makes no call that would notice.
static idist_status idist__ddp_enter(const idist_ddp *d) {
    idist_opts own = idist__ddp_opts(d, false), o;
    return idist__agree_enter("ddp", &own, &o);
}

static idist_status idist__ddp_begin_iteration(idist_ddp *d) {
    idist_opts o = idist__ddp_opts(d, d->desc.on_device);
    idist_status s;

    if (idist_group_size(d->desc.group) != d->size)
        return idist__fail(
            IDIST_ERR_STATE,
            "ddp: made for %d ranks, and now there are %d: create it in each world anew", d->size,
            idist_group_size(d->desc.group));
    s = d->size == 1 ? idist__ddp_enter(d) : IDIST_OK;
    if (s != IDIST_OK) return s;
    d->begun = true;
    if (d->desc.uneven) s = idist__ddp_count_active(d);
    if (s == IDIST_OK && d->active)
        s = idist__tensors_broadcast(d->buffers, d->desc.n_buffers, d->root, &o);

    return idist__ddp_fail(d, s);
}

static idist_status idist__ddp_begin(idist_ddp *d) {
    if (idist__me.group_depth)
        return idist__fail(IDIST_ERR_STATE, "ddp: not between group_begin and group_end");
    if (!d->begun) return idist__ddp_begin_iteration(d);
    return d->status != IDIST_OK ? idist__fail(d->status, "%s", d->text) : IDIST_OK;
}

// Waits for what is on its way.
static idist_status idist__ddp_settle(idist_ddp *d) {
    idist_status s = IDIST_OK, ended;
    int b;

    for (b = 0; b < d->n_launched; b++) {
        idist_request *r = &d->buckets[b].request;
        ended = !r->impl            ? IDIST_OK
                : d->desc.on_device ? idist_wait_stream(r, d->desc.stream)
                                    : idist_wait(r);
        if (s == IDIST_OK) s = ended;
    }

    return s;
}

// A hook of the program's may fail without a text, and then an older one must not stand for it.
static idist_status idist__ddp_call_hook(idist_ddp *d,
                                         idist_status (*fn)(idist_bucket *bucket, void *arg),
                                         const char *what, idist__ddp_bucket *b) {
    idist_status s;

    if (d->desc.hook) idist__me.text[0] = 0;
    s = fn(&b->pub, d->hook.arg);
    if (s == IDIST_OK || idist__me.text[0]) return s;
    return idist__fail(s, "the hook's %s failed for bucket %d: %s", what, b->pub.index,
                       idist_status_string(s));
}

// For the timeline: a bucket from its launch to its result.
static void idist__ddp_trace(const idist__ddp_bucket *b) {
    char name[32], args[96];

    if (!idist_trace_on()) return;
    snprintf(name, sizeof name, "bucket %d", b->pub.index);
    snprintf(args, sizeof args, "{\"gradients\":%d,\"bytes\":%zu}", b->n,
             b->pub.count * idist_dtype_size(b->pub.dtype));
    idist_trace_span(name, "bucket", b->launched_ns, idist__os_now_ns(), args);
}

// What rounding took of gradients that are not there waits until they are, and zeros go out: before
// a call of the hook that rounds it is set aside, and zeroed, after that put back. In `start` that
// are the gradients that this rank has not, in `finish`, where a block of the sum is rounded, those
// that no rank has. (d->used knows either.)
static idist_status idist__ddp_hold(idist_ddp *d, const idist__ddp_bucket *b, bool of_sum,
                                    bool back) {
    const idist__packed *p = (const idist__packed *)b->pub.state;
    const idist__memory *m = &d->how.memory;
    size_t first = of_sum ? (size_t)idist_group_rank(d->desc.group) * p->block : 0; // in the bucket
    size_t end = of_sum ? first + p->block : b->pub.count;
    float *error = (float *)(of_sum ? p->own_error : p->error);
    idist_status s = IDIST_OK;
    int i;

    for (i = 0; i < d->desc.n && s == IDIST_OK; i++) {
        size_t from, to;
        if (d->used[i] || !d->grads[i].count || &d->buckets[d->state[i].bucket] != b) continue;
        from =
            (size_t)((char *)d->state[i].at - (char *)b->pub.data) / idist_dtype_size(b->pub.dtype);
        to = from + d->grads[i].count < end ? from + d->grads[i].count : end;
        from = from > first ? from : first;
        if (from >= to) continue;

        if (back) {
            s = idist__memory_copy(m, error + (from - first), d->held + (from - first),
                                   (to - from) * sizeof *error);
            continue;
        }

        s = idist__memory_copy(m, d->held + (from - first), error + (from - first),
                               (to - from) * sizeof *error);
        if (s == IDIST_OK)
            s = idist__memory_copy(m, error + (from - first), NULL, (to - from) * sizeof *error);
    }

    return s;
}

// Launches what is full. Nothing is computed beside the last one, so it waits for idist_ddp_wait
// (ending). What is launched there are plain calls, one after the other: nobody has anything else
// to do.
static idist_status idist__ddp_launch(idist_ddp *d, bool ending) {
    bool plain = ending && !d->desc.hook && !d->desc.on_device;
    int limit = ending ? d->n_buckets : d->n_buckets - 1;
    idist_status s = d->status == IDIST_OK && plain ? idist__ddp_settle(d) : d->status;

    while (s == IDIST_OK && d->n_launched < limit) {
        idist__ddp_bucket *b = &d->buckets[d->n_launched];
        double pre = d->desc.prescale != 0 ? d->desc.prescale : 1;
        if (b->nready < b->n) break;
        s = idist__memory_scale(&d->how.memory, b->pub.data, b->pub.count, b->pub.dtype, pre);
        if (s != IDIST_OK) break;
        b->pub.scale = d->scale;
        b->pub.opts = d->how.memory.opts;
        if (!plain) b->pub.opts.request = &b->request;
        b->launched_ns = idist_trace_on() ? idist__os_now_ns() : 0;
        d->n_launched++;
        if (d->held && ending) s = idist__ddp_hold(d, b, false, false);
        if (s == IDIST_OK) s = idist__ddp_call_hook(d, d->hook.start, "start", b);
        if (d->held && ending && s == IDIST_OK) s = idist__ddp_hold(d, b, false, true);
    }

    return idist__ddp_fail(d, s);
}

static bool idist__ddp_is_ready(const idist_ddp *d, int i) {
    return d->state[i].ready == d->iteration;
}

static idist_status idist__ddp_gather(idist_ddp *d, int i) {
    const idist_tensor *g = &d->grads[i];

    d->state[i].ready = d->iteration;
    d->n_ready++;
    d->buckets[d->state[i].bucket].nready++;
    if (d->state[i].at == g->data) return IDIST_OK;
    return idist__ddp_fail(d, idist__memory_copy(&d->how.memory, d->state[i].at, g->data,
                                                 idist__ddp_nbytes(g)));
}

// Gradients that are not there add zeros. Where these have to lie in the program's memory, what is
// there is saved.
static idist_status idist__ddp_fill(idist_ddp *d) {
    const idist__memory *m = &d->how.memory;
    size_t nbytes = 0;
    idist_status s = IDIST_OK;
    char *to;
    int i;

    for (i = 0; i < d->desc.n; i++) {
        d->used[i] = idist__ddp_is_ready(d, i);
        if (!d->used[i] && d->state[i].at == d->grads[i].data)
            nbytes += idist__ddp_nbytes(&d->grads[i]);
    }

    if (nbytes > d->saved_nbytes) {
        idist__memory_free(m, d->saved);
        d->saved_nbytes = 0;
        if ((s = idist__memory_alloc(m, &d->saved, nbytes)) != IDIST_OK) return s;
        d->saved_nbytes = nbytes;
    }

    d->filled = true;

    for (i = 0, to = (char *)d->saved; i < d->desc.n && s == IDIST_OK; i++) {
        nbytes = idist__ddp_nbytes(&d->grads[i]);
        if (d->used[i] || !nbytes) continue;

        if (d->state[i].at == d->grads[i].data) {
            s = idist__memory_copy(m, to, d->state[i].at, nbytes);
            to += nbytes;
        }

        if (s == IDIST_OK) s = idist__memory_copy(m, d->state[i].at, NULL, nbytes);
    }

    return s;
}

// Brings the results to where the program has its gradients, but for those that no rank had.
static idist_status idist__ddp_scatter(idist_ddp *d) {
    const idist__memory *m = &d->how.memory;
    const char *from = (const char *)d->saved;
    idist_status s = IDIST_OK;
    int i;

    for (i = 0; i < d->desc.n && s == IDIST_OK && (d->copies || d->filled); i++) {
        const idist_tensor *g = &d->grads[i];
        bool in_place = d->state[i].at == g->data,
             kept = d->filled && in_place && !idist__ddp_is_ready(d, i);
        size_t nbytes = in_place && !kept ? 0 : idist__ddp_nbytes(g);
        if (!nbytes) continue;
        if (d->used[i]) s = idist__memory_copy(m, g->data, d->state[i].at, nbytes);
        else if (kept) s = idist__memory_copy(m, g->data, from, nbytes);
        if (kept) from += nbytes;
    }

    return s;
}

// Brings the results of what was launched; after a failure only the requests are waited for.
static idist_status idist__ddp_finish(idist_ddp *d) {
    idist_status settled = idist__ddp_settle(d), s = d->status != IDIST_OK ? d->status : settled;
    int b;

    for (b = 0; b < d->n_launched && s == IDIST_OK; b++) {
        d->buckets[b].pub.opts.request = NULL;
        if (d->held) s = idist__ddp_hold(d, &d->buckets[b], true, false);
        if (s == IDIST_OK) s = idist__ddp_call_hook(d, d->hook.finish, "finish", &d->buckets[b]);
        if (d->held && s == IDIST_OK) s = idist__ddp_hold(d, &d->buckets[b], true, true);
        idist__ddp_trace(&d->buckets[b]);
    }

    return idist__ddp_fail(d, s);
}

static void idist__ddp_reset(idist_ddp *d) {
    int i;

    for (i = 0; i < d->n_buckets; i++) d->buckets[i].nready = 0;
    d->iteration++;
    d->n_ready = 0;
    d->filled = false;
    d->n_launched = 0;
    d->status = IDIST_OK;
    d->begun = false;
}

// The end of an iteration: what is not ready is either zero or as good as ready.
static idist_status idist__ddp_end(idist_ddp *d) {
    bool find_unused = d->desc.find_unused && !d->joined;
    idist_opts o = idist__ddp_opts(d, false);
    idist_status s = d->status;
    int i;

    for (i = 0; i < d->desc.n && s == IDIST_OK && find_unused; i++)
        if (d->state[i].added == d->iteration && !idist__ddp_is_ready(d, i))
            s = idist__ddp_gather(d, i);
    if (s == IDIST_OK && find_unused) s = idist__ddp_fail(d, idist__ddp_fill(d));
    for (i = 0; i < d->desc.n && s == IDIST_OK && d->copies && !find_unused && !d->joined; i++)
        if (!idist__ddp_is_ready(d, i)) s = idist__ddp_gather(d, i);
    for (i = 0; i < d->n_buckets; i++) d->buckets[i].nready = d->buckets[i].n;
    if (s == IDIST_OK && d->size == 1) s = idist__ddp_fail(d, idist__ddp_enter(d));
    if (s == IDIST_OK) s = idist__ddp_launch(d, true);
    if (s == IDIST_OK && d->desc.find_unused)
        s = idist__ddp_fail(d, idist_all_reduce(d->used, d->used, (size_t)d->desc.n, IDIST_U8,
                                                IDIST_MAX, &o));
    s = idist__ddp_finish(d);
    if (s == IDIST_OK && !d->joined) s = idist__ddp_fail(d, idist__ddp_scatter(d));
    idist__ddp_reset(d);

    return s;
}

// Whether an iteration has begun that idist_ddp_wait has to end: not by a forward pass alone, to
// validate.
static bool idist__ddp_is_open(const idist_ddp *d) {
    return d->begun && (d->desc.uneven || d->n_ready);
}

idist_status idist_ddp_forward(idist_ddp *d) {
    if (!d) return idist__fail(IDIST_ERR_ARG, "ddp_forward: ddp is NULL");
    if (idist__ddp_is_open(d))
        return idist__fail(IDIST_ERR_STATE,
                           "ddp_forward: the last iteration has not ended: ddp_wait does that");
    if (d->begun && d->status != IDIST_OK) return idist__fail(d->status, "%s", d->text);
    d->begun = false;
    return d->quiet ? IDIST_OK : idist__ddp_begin(d);
}

idist_status idist_ddp_ready(idist_ddp *d, int i) {
    idist_status s;

    if (!d) return idist__fail(IDIST_ERR_ARG, "ddp_ready: ddp is NULL");
    if (i < 0 || i >= d->desc.n)
        return idist__fail(IDIST_ERR_ARG, "ddp_ready: parameter %d, of %d", i, d->desc.n);

    if (d->quiet) {
        d->state[i].added = d->iteration;
        return IDIST_OK;
    }

    if (idist__ddp_is_ready(d, i))
        return idist__fail(IDIST_ERR_STATE,
                           "ddp_ready: gradient %d was ready already; ddp_wait ends an iteration",
                           i);
    if ((s = idist__ddp_begin(d)) != IDIST_OK) return s;
    s = idist__ddp_gather(d, i);
    if (s != IDIST_OK || d->buckets[d->n_launched].nready < d->buckets[d->n_launched].n)
        return s; // nothing is full

    return idist__ddp_launch(d, false);
}

idist_status idist_ddp_wait(idist_ddp *d) {
    idist_status s;

    if (!d) return idist__fail(IDIST_ERR_ARG, "ddp_wait: ddp is NULL");
    if (d->quiet) return IDIST_OK;
    if ((s = idist__ddp_begin(d)) != IDIST_OK && (!d->begun || idist__me.group_depth)) return s;
    idist__trace_begin("wait", "ddp_wait", NULL, NULL);
    return idist__trace_end(idist__ddp_end(d));
}

idist_status idist_ddp_no_sync(idist_ddp *d, bool on) {
    if (!d) return idist__fail(IDIST_ERR_ARG, "ddp_no_sync: ddp is NULL");
    if (idist__ddp_is_open(d))
        return idist__fail(IDIST_ERR_STATE,
                           "ddp_no_sync: in the middle of an iteration; ddp_wait ends it");
    d->begun = false;
    d->quiet = on;
    return IDIST_OK;
}

// An iteration of a rank without data.
static idist_status idist__ddp_shadow(idist_ddp *d) {
    idist_status s = IDIST_OK, ended;
    int b;

    for (b = 0; b < d->n_buckets && s == IDIST_OK; b++)
        s = idist__memory_copy(&d->how.memory, d->buckets[b].pub.data, NULL,
                               d->buckets[b].pub.count * idist_dtype_size(d->buckets[b].pub.dtype));
    idist__ddp_fail(d, s);
    if (d->desc.find_unused) memset(d->used, 0, (size_t)d->desc.n);
    ended = idist__ddp_end(d);

    return s == IDIST_OK ? ended : s;
}

idist_status idist_ddp_join(idist_ddp *d, int *last) {
    idist_opts o;
    idist_status s = IDIST_OK;

    if (!d) return idist__fail(IDIST_ERR_ARG, "ddp_join: ddp is NULL");
    if (!d->desc.uneven)
        return idist__fail(IDIST_ERR_STATE,
                           "ddp_join: uneven was not set in the desc of ddp_create");
    if (d->begun || d->quiet)
        return idist__fail(IDIST_ERR_STATE, "ddp_join: %s",
                           d->quiet ? "no_sync is on" : "the last iteration has not ended");
    d->joined = true;
    while ((s = idist__ddp_begin(d)) == IDIST_OK && d->active)
        if ((s = idist__ddp_shadow(d)) != IDIST_OK) break;
    idist__ddp_reset(d);
    d->joined = false;
    d->active = d->size;
    d->root = 0;
    o = idist__ddp_opts(d, d->desc.on_device);
    idist__ddp_set_scale(d);
    if (s == IDIST_OK) s = idist__tensors_broadcast(d->params, d->desc.n, d->last_root, &o);
    if (s == IDIST_OK)
        s = idist__tensors_broadcast(d->buffers, d->desc.n_buffers, d->last_root, &o);
    o.stream = NULL;
    if (last) *last = d->last_root;

    return s == IDIST_OK ? idist__agree(s, &o) : s;
}

// ---- a ddp's beginning and end ----

static idist_status idist__ddp_plain_start(idist_bucket *b, void *arg) {
    const idist__summing *c = (const idist__summing *)arg;
    if (c->size == 1) return IDIST_OK; // nothing would change
    return idist_all_reduce(b->data, b->data, b->count, b->dtype, c->op, &b->opts);
}

static idist_status idist__ddp_plain_finish(idist_bucket *b, void *arg) {
    const idist__summing *c = (const idist__summing *)arg;
    return idist__memory_scale(&c->memory, b->data, b->count, b->dtype, c->post);
}

static bool idist__ddp_is_scaled(const idist_ddp_desc *c) {
    return (c->prescale != 0 && c->prescale != 1) || (c->postscale != 0 && c->postscale != 1) ||
           c->divide_by_active;
}

static idist_status idist__ddp_choose_hook(idist_ddp *d) {
    static const idist_dtype wires[4] = {IDIST_F32, IDIST_F16, IDIST_BF16, IDIST_I8};
    static const idist_ddp_hook hooks[3] = {
        {idist__ddp_plain_start, idist__ddp_plain_finish, NULL, NULL},
        {idist__half_start, idist__half_finish, idist__packed_free, NULL},
        {idist__byte_start, idist__byte_finish, idist__packed_free, NULL}};
    int way = d->desc.compression == IDIST_COMPRESS_I8 ? 2 : d->desc.compression ? 1 : 0, b;
    size_t largest = 0;
    idist_status s = IDIST_OK;

    if (d->desc.on_device)
        s = IDIST__OWN(idist__own_ready("ddp_create", &d->how.memory.opts,
                                        way || idist__ddp_is_scaled(&d->desc)));
    d->how.wire = wires[d->desc.compression];
    d->hook = d->desc.hook ? *d->desc.hook : hooks[way];
    if (!d->desc.hook) d->hook.arg = &d->how;
#ifdef IDIST_NCCL_H
    if (way && d->desc.on_device) {
        d->hook.start = way == 1 ? idist__half_start_device : idist__byte_start_device;
        d->hook.finish = way == 1 ? idist__half_finish_device : idist__byte_finish_device;
    }
#endif
    for (b = 0; b < d->n_buckets && way && s == IDIST_OK; b++) {
        s = idist__packed_create(&d->how, &d->buckets[b].pub);
        largest = d->buckets[b].pub.count > largest ? d->buckets[b].pub.count : largest;
    }

    if (way == 2 && d->desc.find_unused && s == IDIST_OK) {
        void *held = NULL;
        s = idist__memory_alloc(&d->how.memory, &held, largest * sizeof *d->held);
        d->held = (float *)held;
    }

    return s;
}

// What is wrong with a desc. Local; a part of what all then agree on.
static idist_status idist__ddp_check(const idist_ddp_desc *c, const idist_ddp *d) {
    static const char *const name = "ddp_create";
    bool scaled = idist__ddp_is_scaled(c);
    size_t total = 0;
    idist_status s;
    int i;

    if (c->n < 1)
        return idist__fail(IDIST_ERR_ARG, "ddp_create: %d parameters: there is nothing to average",
                           c->n);
    if (c->prescale - c->prescale != 0 || c->postscale - c->postscale != 0)
        return idist__fail(IDIST_ERR_ARG, "ddp_create: prescale is %g and postscale %g",
                           c->prescale, c->postscale);
    if ((s = idist__tensors_check(name, "parameter", c->params, c->n, true)) != IDIST_OK) return s;
    if (c->grads && (s = idist__tensors_check(name, "gradient", c->grads, c->n, false)) != IDIST_OK)
        return s;
    if ((s = idist__tensors_check(name, "buffer", c->buffers, c->n_buffers, true)) != IDIST_OK)
        return s;
    if ((unsigned)c->compression > IDIST_COMPRESS_I8 || (c->compression && c->hook))
        return idist__fail(IDIST_ERR_ARG, "ddp_create: %s",
                           c->hook ? "compression and a hook" : "no such compression");
    if (c->hook && (!c->hook->start || !c->hook->finish))
        return idist__fail(IDIST_ERR_ARG, "ddp_create: the hook's start or finish is NULL");

    for (i = 0; i < c->n; i++) {
        idist_dtype dtype = d->grads[i].dtype;
        total += idist__ddp_nbytes(&d->grads[i]);
        if (total > SIZE_MAX / 4)
            return idist__fail(IDIST_ERR_ARG,
                               "ddp_create: gradients 0 to %d are larger than memory can be", i);
        if (d->grads[i].count != c->params[i].count)
            return idist__fail(IDIST_ERR_ARG,
                               "ddp_create: parameter %d has %zu elements, and its gradient %zu", i,
                               c->params[i].count, d->grads[i].count);
        if (c->compression && dtype != IDIST_F32 && (dtype != IDIST_F64 || c->on_device))
            return idist__fail(IDIST_ERR_UNSUPPORTED,
                               "ddp_create: compression is for %s, not %s (gradient %d)",
                               c->on_device ? "F32 on the device" : "F32 and F64",
                               idist_dtype_name(dtype), i);
        if (scaled && (!idist__type_is_float(dtype) || (c->on_device && dtype > IDIST_F64)))
            return idist__fail(
                IDIST_ERR_UNSUPPORTED,
                "ddp_create: factors are for F16, BF16, F32 and F64%s, not %s (gradient %d)",
                c->on_device ? " on the device" : " and 8-bit floats", idist_dtype_name(dtype), i);
    }

    return IDIST_OK;
}

// Copies of the caller's lists, and what is kept of each.
static idist_status idist__ddp_copy(idist_ddp *d, const idist_ddp_desc *c) {
    size_t n = c->n > 0 ? (size_t)c->n : 0, m = c->n_buffers > 0 ? (size_t)c->n_buffers : 0, i;

    d->params = (idist_tensor *)calloc(n + 1, sizeof *d->params);
    d->grads = (idist_tensor *)calloc(n + 1, sizeof *d->grads);
    d->buffers = (idist_tensor *)calloc(m + 1, sizeof *d->buffers);
    d->state = (idist__ddp_param *)calloc(n + 1, sizeof *d->state);
    d->used = (uint8_t *)malloc(n + 1);
    d->has_data = (uint8_t *)calloc((size_t)d->size, 1);
    if (!d->params || !d->grads || !d->buffers || !d->state || !d->used || !d->has_data)
        return idist__ddp_no_memory();
    memset(d->used, 1, n + 1);

    for (i = 0; i < n && c->params; i++) {
        d->params[i] = d->grads[i] = c->params[i];
        d->grads[i].data = NULL;
        if (c->grads) d->grads[i] = c->grads[i];
    }

    for (i = 0; i < m && c->buffers; i++) d->buffers[i] = c->buffers[i];

    return IDIST_OK;
}

// Everything that has to be equal on all ranks.
static idist_status idist__ddp_agree(const idist_ddp *d, idist_status mine) {
    const idist_ddp_desc *c = &d->desc;
    int n = c->n > 0 ? c->n : 0, m = c->n_buffers > 0 ? c->n_buffers : 0, at = 0;
    int64_t bits;
    double post = c->postscale != 0 ? c->postscale : 1;
    idist_opts o = idist__ddp_opts(d, false);
    enum { IDIST__DDP_OPTIONS = 12 };
    idist__shape *shapes =
        (idist__shape *)calloc(2 * (size_t)n + (size_t)m + IDIST__DDP_OPTIONS, sizeof *shapes);
    idist_status s;

    memcpy(&bits, &post, sizeof bits);
    if (mine == IDIST_OK && !shapes) mine = idist__ddp_no_memory();

    if (mine == IDIST_OK) {
        shapes[at++] = idist__shape_option("number of parameters", n);
        shapes[at++] = idist__shape_option("number of buffers", m);
        shapes[at++] = idist__shape_option("bucket_nbytes", (int64_t)c->bucket_nbytes);
        shapes[at++] = idist__shape_option("compression", c->compression);
        shapes[at] = idist__shape_option("postscale", bits);
        shapes[at++].dtype = IDIST__SHAPE_REAL;
        shapes[at++] = idist__shape_option("sum", c->sum);
        shapes[at++] = idist__shape_option("keep_params", c->keep_params);
        shapes[at++] = idist__shape_option("find_unused", c->find_unused);
        shapes[at++] = idist__shape_option("uneven", c->uneven);
        shapes[at++] = idist__shape_option("divide_by_active", c->divide_by_active);
        shapes[at++] = idist__shape_option("on_device", c->on_device);
        shapes[at++] = idist__shape_option("hook", c->hook != NULL);
        idist__shape_of(shapes + at, "parameter", d->params, n);
        idist__shape_of(shapes + at + n, "gradient", d->grads, n);
        idist__shape_of(shapes + at + 2 * n, "buffer", d->buffers, m);
        at += 2 * n + m;
    }

    s = idist__shapes_agree("ddp_create", shapes, IDIST__DDP_OPTIONS, at, mine, 0, &o);
    free(shapes);

    return s;
}

idist_status idist_ddp_create(const idist_ddp_desc *desc, idist_ddp **ddp) {
    idist_ddp *d;
    idist_opts own, o;
    idist_status s;

    if (!desc || !ddp) return idist__fail(IDIST_ERR_ARG, "ddp_create: desc or ddp is NULL");
    *ddp = NULL;
    memset(&own, 0, sizeof own);
    own.group = desc->group;
    own.timeout_ms = desc->timeout_ms;
    if ((s = idist__agree_enter("ddp_create", &own, &o)) != IDIST_OK) return s;
    if ((d = (idist_ddp *)calloc(1, sizeof *d)) == NULL)
        return idist__agree(idist__ddp_no_memory(), &o);
    d->desc = *desc;
    d->how.size = d->size = d->active = idist_group_size(desc->group);
    d->how.memory.on_device = desc->on_device;
    d->how.memory.opts = idist__ddp_opts(d, desc->on_device);
    d->last_root = d->size - 1;
    d->iteration = 1;
    s = idist__ddp_copy(d, desc);
    if (s == IDIST_OK) s = idist__ddp_check(desc, d);
    if (s == IDIST_OK) s = idist__ddp_make_buckets(d);
    if (s == IDIST_OK) s = idist__ddp_choose_hook(d);
    s = idist__ddp_agree(d, s);
    o = idist__ddp_opts(d, desc->on_device);
    idist__ddp_set_scale(d);
    if (s == IDIST_OK && !desc->keep_params)
        s = idist__tensors_broadcast(d->params, desc->n, 0, &o);
    if (s == IDIST_OK && !desc->keep_params)
        s = idist__tensors_broadcast(d->buffers, desc->n_buffers, 0, &o);
    o.stream = NULL;
    if (s == IDIST_OK) s = idist__agree(s, &o);
    *ddp = d;
    if (s != IDIST_OK) idist_ddp_free(ddp);

    return s;
}

void idist_ddp_free(idist_ddp **ddp) {
    idist_ddp *d = ddp ? *ddp : NULL;
    int b;

    if (!d) return;
    *ddp = NULL;

    for (b = 0; b < d->n_buckets && d->buckets; b++) {
        idist__ddp_bucket *bucket = &d->buckets[b];
        idist_wait(&bucket->request);
        if (bucket->pub.state && d->hook.free_fn) d->hook.free_fn(bucket->pub.state, d->hook.arg);
    }

    idist__memory_free(&d->how.memory, d->memory);
    idist__memory_free(&d->how.memory, d->saved);
    idist__memory_free(&d->how.memory, d->held);
    free(d->buckets);
    free(d->params);
    free(d->grads);
    free(d->buffers);
    free(d->state);
    free(d->used);
    free(d->has_data);
    free(d);
}

void *idist_ddp_grad(const idist_ddp *d, int i) {
    return d && i >= 0 && i < d->desc.n ? d->grads[i].data : NULL;
}

int idist_ddp_bucket(const idist_ddp *d, int i) {
    return d && i >= 0 && i < d->desc.n ? d->state[i].bucket : -1;
}

int idist_ddp_buckets(const idist_ddp *d) { return d ? d->n_buckets : 0; }

bool idist_ddp_used(const idist_ddp *d, int i) {
    return d && i >= 0 && i < d->desc.n && d->used[i];
}

int idist_ddp_active(const idist_ddp *d) { return d ? d->active : 0; }

idist_status idist_auto_optim(idist_ddp *d, idist_task_fn step, void *arg) {
    idist_status s;
    int code;

    if (!d || !step) return idist__fail(IDIST_ERR_ARG, "auto_optim: ddp or step is NULL");
    if (d->quiet) return IDIST_OK;
    if ((s = idist_ddp_wait(d)) != IDIST_OK) return s;
    if ((code = step(arg)) == 0) return IDIST_OK;

    return idist__fail(IDIST_ERR_CALLBACK, "auto_optim: the step of the optimizer failed with %d",
                       code);
}

//------------------------------------------------------------------------------
// [train:log]  what a training says, on rank 0 only
// uses os err base:log world life
//------------------------------------------------------------------------------

#define IDIST__BAR_NS (100 * IDIST__MS) // between two pictures of a progress bar

// Takes away a bar, so that a line can stand in its place.
static void idist__log_clear_bar(void) {
    fputs(idist__log_before, stderr);
    idist__log_before = "";
}

static void idist__log_say(const char *line) {
    const idist__world *w = idist__world_default();
    const idist_logger *logger = w ? &w->log.logger : NULL;

    pthread_mutex_lock(&idist__log_lock);
    idist__me.callbacks++;
    idist__log_clear_bar();
    if (logger && logger->log_fn) logger->log_fn(IDIST_LOG_INFO, line, logger->user);
    else fprintf(stderr, "%s\n", line);
    idist__me.callbacks--;
    pthread_mutex_unlock(&idist__log_lock);
}

void idist_train_log(const char *name, const char *format, ...) {
    char line[2048], when[32], *at;
    struct timespec now;
    struct tm tm;
    va_list args;

    if (idist_get_rank() != 0 || idist__me.callbacks) return; // a logger must not log
    clock_gettime(CLOCK_REALTIME, &now);
    if (!localtime_r(&now.tv_sec, &tm) || !strftime(when, sizeof when, "%Y-%m-%d %H:%M:%S", &tm))
        when[0] = 0;
    snprintf(line, sizeof line, "%s,%03d %s INFO: ", when, (int)(now.tv_nsec / 1000000),
             name ? name : "training");
    va_start(args, format);
    vsnprintf(line + strlen(line), sizeof line - strlen(line), format, args);
    va_end(args);
    for (at = line; *at; at++)
        if (*at == '\n') *at = ' ';
    idist__log_say(line);
}

void idist_train_log_config(const char *name) {
    char text[sizeof idist__me.config], *line, *end;

    if (idist_get_rank() != 0) return;
    idist_train_log(name, "- idist version: %s", IDIST_VERSION);
    idist_train_log(name, "- backend: %s", idist_backend());
    idist_train_log(name, "- device: %s", idist_device());
    idist_train_log(name, "- world size: %d", idist_get_world_size());
    idist_train_log(name, "Distributed setting:");
    idist__copy_text(text, sizeof text, idist_show_config());

    for (line = text; *line; line = end) {
        end = line + strcspn(line, "\n");
        if (*end) *end++ = 0;
        idist_train_log(name, "    %s", line);
    }
}

void idist_train_log_metrics(const char *name, int epoch, double seconds, const char *tag,
                             const char *const *names, const double *values, int n) {
    int i;
    idist_train_log(name, "Epoch %d - Evaluation time (seconds): %.2f - %s metrics:", epoch,
                    seconds, tag ? tag : "");
    for (i = 0; i < n && names && values; i++)
        idist_train_log(name, "    %s: %.6g", names[i], values[i]);
}

// "02:07", or "1:02:07"
static void idist__progress_time(char *text, size_t cap, int64_t ns) {
    int64_t s = ns / 1000000000;
    if (s < 0 || s > 99 * 3600) snprintf(text, cap, "?");
    else if (s >= 3600)
        snprintf(text, cap, "%d:%02d:%02d", (int)(s / 3600), (int)(s / 60 % 60), (int)(s % 60));
    else snprintf(text, cap, "%02d:%02d", (int)(s / 60), (int)(s % 60));
}

// How many bytes of a text of UTF-8 are its first `most` characters, each of which is taken for one
// column.
static size_t idist__progress_cut(const char *text, size_t most) {
    size_t i, n = 0;
    for (i = 0; text[i]; i++)
        if (((unsigned char)text[i] & 0xC0) != 0x80 && n++ == most) break;
    return i;
}

// Writes one line that no terminal has to break: the next picture would begin in the middle of it.
// The last column stays free, because some terminals go on in the next line as soon as it is
// written.
static void idist__progress_draw(const char *before, const char *picture, const char *behind,
                                 const char *end) {
    struct winsize size;
    char line[1024];
    size_t columns = sizeof line;

    memset(&size, 0, sizeof size);
    if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) columns = size.ws_col - 1u;

    snprintf(line, sizeof line, "%s%s %s", before, picture, behind);
    if (line[idist__progress_cut(line, columns)])
        snprintf(line, sizeof line, "%s %s", before, behind);
    fprintf(stderr, "%.*s%s", (int)idist__progress_cut(line, columns), line, end);
}

void idist_progress_update(idist_progress *bar, uint64_t done, const char *text) {
    static const char cells[] = "##########          ";
    char gone[32], left[32], before[400], picture[16], behind[600];
    int64_t now = idist__os_now_ns();
    bool last;

    if (!bar || idist_get_rank() != 0) return;
    if (!bar->started_ns) bar->started_ns = now;
    last = done >= bar->total;
    if (!last && bar->shown_ns && now - bar->shown_ns < IDIST__BAR_NS) return;
    bar->shown_ns = now;
    if (!isatty(STDERR_FILENO)) return;
    if (done > bar->total) done = bar->total;
    idist__progress_time(gone, sizeof gone, now - bar->started_ns);
    if (done)
        idist__progress_time(left, sizeof left,
                             (int64_t)((double)(now - bar->started_ns) / (double)done *
                                       (double)(bar->total - done)));
    else idist__copy_text(left, sizeof left, "?");
    pthread_mutex_lock(&idist__log_lock);
    idist__log_clear_bar();
    snprintf(before, sizeof before, "%s: [%llu/%llu] %3d%%", bar->title ? bar->title : "",
             (unsigned long long)done, (unsigned long long)bar->total,
             bar->total ? (int)(100.0 * (double)done / (double)bar->total) : 100);
    snprintf(picture, sizeof picture, "|%.10s|",
             cells + 10 - (bar->total ? (int)(10.0 * (double)done / (double)bar->total) : 10));
    snprintf(behind, sizeof behind, "%s [%s<%s]", text ? text : "", gone, left);
    idist__progress_draw(before, picture, behind, last ? "\n" : "");
    fflush(stderr);
    if (!last) idist__log_before = "\r\033[K";
    pthread_mutex_unlock(&idist__log_lock);
    if (last) bar->started_ns = bar->shown_ns = 0; // the next one
}

#include "idist_end.h"

#endif // IDIST_IMPLEMENTATION
