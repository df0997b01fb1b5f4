// digits_gpu.h - a network with one hidden layer for the digits; a function computes one element,
// in a GPU thread or in a loop; for CUDA
#ifndef EXAMPLES_DIGITS_GPU_H
#define EXAMPLES_DIGITS_GPU_H

#include "digits.h"
#include "numbers.h"

#include <cuda_runtime.h>
#include <math.h>

// W1 to B2 are the offsets of the parameters of each layer. The gradients have the same offsets in
// an array with two more elements: loss and hits are sent with the gradient of the last layer.
enum {
    PIXELS = DIGITS_PIXELS,
    HIDDEN = 64,
    CLASSES = DIGITS_CLASSES,
    IMAGES = DIGITS_COUNT,
    TEST = IMAGES / 5,
    TRAIN = IMAGES - TEST,
    W1 = 0,
    B1 = W1 + PIXELS * HIDDEN,
    W2 = B1 + HIDDEN,
    B2 = W2 + HIDDEN * CLASSES,
    PARAMS = B2 + CLASSES,
    LOSS = PARAMS,
    HITS,
    SUMS
};

typedef struct net { // one on the host, and one on the device if there is one
    float images[IMAGES * PIXELS];
    int labels[IMAGES], order[IMAGES]; // the first TRAIN entries of order are for training
    float w[PARAMS], speed[PARAMS], g[SUMS];
    float total[SUMS - LOSS]; // sums of loss and hits over an epoch
    // For each image of a batch:
    float hidden[TEST * HIDDEN], dhidden[TEST * HIDDEN], dout[TEST * CLASSES];
    float loss[TEST], hit[TEST];
} net;

typedef struct batch { // one rank's share: images order[first] ...
    int first, count;
    float rate;
} batch;

// ---- elements: each is one GPU thread or one iteration of a loop ----

__host__ __device__ static inline void forward1(net *t, batch b, int i) {
    const float *x = t->images + t->order[b.first + i / HIDDEN] * PIXELS;
    float sum = t->w[B1 + i % HIDDEN];

    for (int p = 0; p < PIXELS; p++) sum += x[p] * t->w[W1 + p * HIDDEN + i % HIDDEN];
    t->hidden[i] = sum > 0 ? sum : 0;
}

// Computes the loss of image n (softmax and cross entropy), whether the image is a hit, and the
// gradient of the logits.
__host__ __device__ static inline void forward2(net *t, batch b, int n) {
    int label = t->labels[t->order[b.first + n]], best = 0;
    float logit[CLASSES], sum = 0;

    for (int k = 0; k < CLASSES; k++) {
        logit[k] = t->w[B2 + k];
        for (int h = 0; h < HIDDEN; h++)
            logit[k] += t->hidden[n * HIDDEN + h] * t->w[W2 + h * CLASSES + k];
        if (logit[k] > logit[best]) best = k;
    }
    for (int k = 0; k < CLASSES; k++) sum += expf(logit[k] - logit[best]);
    for (int k = 0; k < CLASSES; k++)
        t->dout[n * CLASSES + k] =
            (expf(logit[k] - logit[best]) / sum - (float)(k == label)) / (float)b.count;
    t->loss[n] = logf(sum) + logit[best] - logit[label];
    t->hit[n] = (float)(best == label);
}

__host__ __device__ static inline void gradient2(net *t, batch b, int i) {
    float sum = 0;

    for (int n = 0, at = W2 + i; n < b.count; n++) {
        if (at < B2)
            sum += t->hidden[n * HIDDEN + i / CLASSES] * t->dout[n * CLASSES + i % CLASSES];
        else if (at < LOSS) sum += t->dout[n * CLASSES + (at - B2)];
        else sum += (at == LOSS ? t->loss[n] : t->hit[n]) / (float)b.count;
    }
    t->g[W2 + i] = sum;
}

__host__ __device__ static inline void back(net *t, batch b, int i) {
    float sum = 0;

    (void)b;
    for (int k = 0; k < CLASSES; k++)
        sum += t->w[W2 + i % HIDDEN * CLASSES + k] * t->dout[i / HIDDEN * CLASSES + k];
    t->dhidden[i] = t->hidden[i] > 0 ? sum : 0;
}

__host__ __device__ static inline void gradient1(net *t, batch b, int i) {
    float sum = 0;

    for (int n = 0; n < b.count; n++)
        sum += (i < B1 ? t->images[t->order[b.first + n] * PIXELS + i / HIDDEN] : 1) *
               t->dhidden[n * HIDDEN + i % HIDDEN];
    t->g[i] = sum;
}

// Makes a step of SGD with momentum 0.9. The elements after the parameters add up loss and hits.
__host__ __device__ static inline void step(net *t, batch b, int i) {
    if (i >= PARAMS) {
        t->total[i - PARAMS] += t->g[i];
    } else {
        t->speed[i] = 0.9f * t->speed[i] + t->g[i];
        t->w[i] -= b.rate * t->speed[i];
    }
}

template <void (*element)(net *, batch, int)> __global__ void kernel(net *t, batch b, int n) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);

    if (i < n) element(t, b, i);
}

// Runs elements 0 .. n - 1 on the stream, or on the processor if the stream is NULL.
template <void (*element)(net *, batch, int)>
static inline void each(net *t, batch b, int n, cudaStream_t stream) {
    if (stream) kernel<element><<<(n + 127) / 128, 128, 0, stream>>>(t, b, n);
    else
        for (int i = 0; i < n; i++) element(t, b, i);
}

// ---- on the host ----

// Loads the images; every fifth image is for the test. Prints an error and returns false on
// failure.
static inline bool net_load(net *host) {
    static digits all;
    int ntrain = 0, ntest = 0;

    if (!digits_load(&all)) return false;
    for (int n = 0; n < IMAGES; n++) {
        for (int i = 0; i < PIXELS; i++) host->images[n * PIXELS + i] = (float)all.pixels[n][i];
        host->labels[n] = all.label[n];
        host->order[n % 5 == 4 ? TRAIN + ntest++ : ntrain++] = n;
    }
    return true;
}

// Draws the initial weights. The biases, and the speed of every parameter, stay 0.
static inline void net_begin(net *host, uint64_t *state) {
    for (int i = 0; i < B2; i++) {
        float bound = i < B1 ? 0.3f : i < W2 ? 0 : 0.2f;

        host->w[i] = bound * ((float)(random_u64(state) >> 40) / 8388608 - 1);
    }
}

// Shuffles the training images, and sets the totals to 0.
static inline void net_begin_epoch(net *host, uint64_t *state) {
    for (int i = TRAIN - 1; i > 0; i--) {
        int k = (int)(random_u64(state) % (uint64_t)(i + 1)), swap = host->order[i];

        host->order[i] = host->order[k];
        host->order[k] = swap;
    }
    memset(host->total, 0, sizeof host->total);
}

static inline void net_print_epoch(const net *host, int epoch, int batches) {
    float loss = host->total[0] / (float)batches;
    float hits = host->total[1] / (float)batches;

    printf("epoch %2d: loss %.4f, %.1f %% right\n", epoch, (double)loss, (double)(100 * hits));
}

// Returns how many of the first `count` images were recognized by the last forward2.
static inline int64_t net_hits(const net *host, int count) {
    int64_t hits = 0;

    for (int i = 0; i < count; i++) hits += host->hit[i] > 0;
    return hits;
}

// Prints the result. `same` is true if all ranks have this checksum.
static inline void net_print_result(int64_t hits, double seconds, uint64_t checksum, bool same) {
    printf("accuracy %.1f %% (%d of %d test images), %.2f s\n", 100.0 * (double)hits / TEST,
           (int)hits, TEST, seconds);
    if (same) printf("checksum 0x%016llx on all ranks\n", (unsigned long long)checksum);
    else fprintf(stderr, "the ranks ended with different parameters\n");
    fflush(stdout);
}

#endif // EXAMPLES_DIGITS_GPU_H
