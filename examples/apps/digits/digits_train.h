// digits_train.h - the steps of the training that need no communication
#ifndef EXAMPLES_DIGITS_TRAIN_H
#define EXAMPLES_DIGITS_TRAIN_H

#include "digits_job.h"

// Starts an epoch and shuffles the images. The order depends only on seed and epoch, so all ranks
// shuffle the same way.
static inline void job_begin_epoch(job *j, int epoch) {
    uint64_t state = j->seed * 1000003u + (uint64_t)epoch;

    j->loss = j->hits = 0;
    j->epoch_start_s = now_s();
    for (int i = 0; i < j->train.count; i++) j->order[i] = i;
    for (int i = j->train.count - 1; i > 0; i--) {
        int k = (int)(random_u64(&state) % (uint64_t)(i + 1)), swap = j->order[i];

        j->order[i] = j->order[k];
        j->order[k] = swap;
    }
}

// Returns the offset by which an image is moved. Half of the images move by up to one pixel, so
// that the network learns shapes and not positions. The offset depends only on seed, epoch and
// image, not on the rank that has the image.
static inline int job_shift(const job *j, int epoch, int image) {
    uint64_t state = j->seed * 7919u + (uint64_t)epoch * 1000003u + (uint64_t)image;
    uint64_t r = random_u64(&state);

    return r % 2 ? 0 : ((int)(r / 2 % 3) - 1) * PAD + (int)(r / 6 % 3) - 1;
}

// Sets j->sums to the sums of gradient, loss and hits over the images begin .. end - 1 of the
// shuffled order.
static inline void job_gradient(job *j, int epoch, int begin, int end) {
    static convnet_layers layers;

    memset(j->sums, 0, sizeof j->sums);
    for (int i = begin; i < end; i++) {
        int image = j->order[i];

        convnet_gradient(j->state.w, &j->train.at[image], job_shift(j, epoch, image), &layers,
                         j->sums);
    }
}

// Makes a step along j->sums, the sums of a whole batch. The batch begins with image `first` of the
// epoch. The learning rate falls to zero over the training. Small batches are noisy and get smaller
// steps.
static inline void job_step(job *j, int epoch, int first, int size) {
    double base = 0.1 * (j->batch < 64 ? j->batch / 64.0 : 1);
    double progress = (epoch - 1 + (double)first / j->train.count) / j->epochs;

    convnet_step(j->state.w, j->state.speed, j->sums, size, base * (1 - progress));
    j->loss += j->sums[LOSS];
    j->hits += j->sums[HITS];
}

// Returns how many test images of this rank's share are recognized. Each of n ranks has every n-th
// test image.
static inline int job_test(const job *j) {
    static convnet_layers layers;
    double loss;
    int hits = 0;

    for (int i = j->rank; i < j->test.count; i += j->ranks)
        hits +=
            convnet_forward(j->state.w, &j->test.at[i], 0, &layers, &loss) == j->test.at[i].label;
    return hits;
}

// Returns true, and prints an error, if the loss of the epoch is NaN or huge.
static inline bool job_diverged(const job *j) {
    if (j->loss < 1e100) return false; // NaN < 1e100 is false
    fprintf(stderr, "rank %d: the training diverged\n", j->rank);
    return true;
}

// Returns true if 97 % of the test images or more are recognized. If epochs or batch differ from
// the defaults, any accuracy is accepted.
static inline bool job_is_accurate(const job *j, int hits) {
    return j->epochs != DEFAULT_EPOCHS || j->batch != DEFAULT_BATCH ||
           100LL * hits >= 97LL * j->test.count;
}

#endif // EXAMPLES_DIGITS_TRAIN_H
