// 11_gpu_train.cu - data-parallel training on GPUs; all_reduce during the backward pass
//
// build:  nvcc -O2 -DIDIST_IMPLEMENTATION examples/11_gpu_train.cu -o 11_gpu_train
// run:    ./11_gpu_train          starts 2 ranks itself
//         ./11_gpu_train 4        starts 4; the number divides 64, the size of a batch
//         or by hand, with any free MASTER_PORT:
//         (export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29511
//          for r in 0 1; do RANK=$r LOCAL_RANK=$r ./11_gpu_train & done; wait)
//
// expected output; dots depend on the machine:
//    world of 2, device cuda:0, device backend nccl: 1438 images to train, ... 4810 parameters
//    epoch  5: loss 0.1..., ... % right
//    epoch 10: loss 0.0..., ... % right
//    epoch 15: loss 0.0..., ... % right
//    epoch 20: loss 0.0..., ... % right
//    accuracy 9... % (... of 359 test images), ... s
//    checksum 0x... on all ranks
//
// Without a device a line says so, and the same functions run on the processor (05_train_digits.c
// is better at that).
//
// Every rank computes the gradient of its share of each batch; an all_reduce with AVG makes it
// that of the batch. The last layer's gradient is there first, and crosses to the other ranks
// while that of the first layer is still being computed:
//
//     stream    forward | gradient 2 | back | gradient 1 | sum 1 | wait for sum 2 | step |
//     beside                          | sum 2 ....... |
//
// That is stream and request together: begin after what the stream holds now, go on beside it;
// idist_wait_stream joins the two again. Where NCCL serves, the host never waits within an epoch.
// Exit code: 0 when the parameters are the same on all ranks and 95 % or more of the test images
// are recognised; 1 when not, or when something failed; 2 for a bad argument.
#include "../idist_nccl.h"

#include "lib/check.h"

#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CUDA(call)                                                                 \
    do {                                                                           \
        cudaError_t error_ = (call);                                               \
        if (error_ != cudaSuccess) {                                               \
            fprintf(stderr, "%s failed: %s\n", #call, cudaGetErrorString(error_)); \
            return 1;                                                              \
        }                                                                          \
    } while (0)

enum {
    PIXELS = 64,
    HIDDEN = 64,
    CLASSES = 10,
    IMAGES = 1797,
    TEST = IMAGES / 5,
    TRAIN = IMAGES - TEST
};
enum { RANKS = 2, EPOCHS = 20, BATCH = 64 };
// Where the parameters of each layer begin. Their gradients lie the same way; the loss and the hits
// ride along with those of the last layer.
enum {
    W1 = 0,
    B1 = W1 + PIXELS * HIDDEN,
    W2 = B1 + HIDDEN,
    B2 = W2 + HIDDEN * CLASSES,
    PARAMS = B2 + CLASSES
};
enum { LOSS = PARAMS, HITS, SUMS };

typedef struct net { // one on the host; another on the device, if there is one
    float images[IMAGES * PIXELS];
    int labels[IMAGES], order[IMAGES]; // the order has those to train with first
    float w[PARAMS], speed[PARAMS], g[SUMS], total[SUMS - LOSS];
    float hidden[TEST * HIDDEN], dhidden[TEST * HIDDEN], dout[TEST * CLASSES], loss[TEST],
        hit[TEST]; // per image
} net;

typedef struct batch { // the own share of it: images order[first] ...
    int first, count;
    float rate;
} batch;

// ---- the network, in elements that do not depend on one another: one thread each, or one turn of
// a loop ----

__host__ __device__ static void forward1(net *t, batch b, int i) {
    const float *x = t->images + t->order[b.first + i / HIDDEN] * PIXELS;
    float sum = t->w[B1 + i % HIDDEN];
    for (int p = 0; p < PIXELS; p++) sum += x[p] * t->w[W1 + p * HIDDEN + i % HIDDEN];
    t->hidden[i] = sum > 0 ? sum : 0;
}

__host__ __device__ static void forward2(net *t, batch b, int n) { // with softmax and cross entropy
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
        t->dout[n * CLASSES + k] = (expf(logit[k] - logit[best]) / sum - (k == label)) / b.count;
    t->loss[n] = logf(sum) + logit[best] - logit[label];
    t->hit[n] = best == label;
}

__host__ __device__ static void gradient2(net *t, batch b, int i) {
    float sum = 0;
    for (int n = 0, at = W2 + i; n < b.count; n++) {
        if (at < B2)
            sum += t->hidden[n * HIDDEN + i / CLASSES] * t->dout[n * CLASSES + i % CLASSES];
        else if (at < LOSS) sum += t->dout[n * CLASSES + (at - B2)];
        else sum += (at == LOSS ? t->loss[n] : t->hit[n]) / b.count;
    }
    t->g[W2 + i] = sum;
}

__host__ __device__ static void back(net *t, batch, int i) {
    float sum = 0;
    for (int k = 0; k < CLASSES; k++)
        sum += t->w[W2 + i % HIDDEN * CLASSES + k] * t->dout[i / HIDDEN * CLASSES + k];
    t->dhidden[i] = t->hidden[i] > 0 ? sum : 0;
}

__host__ __device__ static void gradient1(net *t, batch b, int i) {
    float sum = 0;
    for (int n = 0; n < b.count; n++)
        sum += (i < B1 ? t->images[t->order[b.first + n] * PIXELS + i / HIDDEN] : 1) *
               t->dhidden[n * HIDDEN + i % HIDDEN];
    t->g[i] = sum;
}

__host__ __device__ static void step(net *t, batch b, int i) {
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

// The elements 0 .. n-1: on the stream, or here and now.
template <void (*element)(net *, batch, int)>
static void each(net *t, batch b, int n, cudaStream_t stream) {
    if (stream) kernel<element><<<(n + 127) / 128, 128, 0, stream>>>(t, b, n);
    else
        for (int i = 0; i < n; i++) element(t, b, i);
}

// ---- training ----

// Between host and device. Without a device the two are the same memory.
static int copy(void *to, const void *from, size_t nbytes, cudaStream_t stream) {
    if (!stream) return 0;
    CUDA(cudaMemcpyAsync(to, from, nbytes, cudaMemcpyDefault, stream));
    CUDA(cudaStreamSynchronize(stream));
    return 0;
}

// The request is on its way while the stream goes on. All ranks make these calls in this order, as
// ever.
static int train_batch(net *t, batch b, cudaStream_t stream) {
    idist_request request;
    idist_opts beside, in_order;
    memset(&beside, 0, sizeof beside);
    memset(&in_order, 0, sizeof in_order);
    beside.request = &request;
    beside.stream = in_order.stream = stream;
    each<forward1>(t, b, b.count * HIDDEN, stream);
    each<forward2>(t, b, b.count, stream);
    each<gradient2>(t, b, SUMS - W2, stream);
    CHECK(idist_all_reduce(t->g + W2, t->g + W2, SUMS - W2, IDIST_F32, IDIST_AVG, &beside));
    each<back>(t, b, b.count * HIDDEN, stream);
    each<gradient1>(t, b, W2, stream);
    CHECK(idist_all_reduce(t->g, t->g, W2, IDIST_F32, IDIST_AVG, &in_order));
    CHECK(stream ? idist_wait_stream(&request, stream) : idist_wait(&request));
    each<step>(t, b, SUMS, stream);
    if (stream) CUDA(cudaGetLastError()); // of the launches
    return 0;
}

static uint64_t random_u64(uint64_t *state) { // splitmix64
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

// All ranks draw the same numbers: they begin with the same parameters and shuffle alike. Each
// takes its share of a batch.
static int train(net *t, net *host, cudaStream_t stream) {
    int rank = idist_get_rank(), batches = TRAIN / BATCH;
    uint64_t state = 1;
    batch b;
    b.count = BATCH / idist_get_world_size();
    for (int i = 0; i < B2; i++) // biases begin at 0
        host->w[i] = (i < B1   ? 0.3f
                      : i < W2 ? 0
                               : 0.2f) *
                     ((float)(random_u64(&state) >> 40) / 8388608 - 1);
    if (copy(t, host, sizeof *t, stream)) return 1;
    for (int epoch = 1; epoch <= EPOCHS; epoch++) {
        for (int i = TRAIN - 1; i > 0; i--) {
            int k = (int)(random_u64(&state) % (uint64_t)(i + 1)), swap = host->order[i];
            host->order[i] = host->order[k];
            host->order[k] = swap;
        }
        memset(host->total, 0, sizeof host->total);
        if (copy(t->order, host->order, sizeof t->order, stream)) return 1;
        if (copy(t->total, host->total, sizeof t->total, stream)) return 1;
        b.rate = epoch <= EPOCHS / 2 ? 0.1f : 0.02f;
        for (int i = 0; i < batches; i++) {
            b.first = i * BATCH + rank * b.count;
            if (train_batch(t, b, stream)) return 1;
        }
        if (copy(host->total, t->total, sizeof t->total, stream)) return 1;
        if (rank == 0 && epoch % 5 == 0)
            printf("epoch %2d: loss %.4f, %.1f %% right\n", epoch, host->total[0] / batches,
                   100 * host->total[1] / batches);
    }
    return copy(host->w, t->w, sizeof t->w, stream);
}

// Each rank recognises its share of the test images. The sum is one of host memory, beside those of
// device memory.
static int test(net *t, net *host, cudaStream_t stream, int64_t *hits) {
    int rank = idist_get_rank(), n = idist_get_world_size(), from = TEST * rank / n;
    batch b;
    memset(&b, 0, sizeof b);
    b.first = TRAIN + from;
    b.count = TEST * (rank + 1) / n - from;
    each<forward1>(t, b, b.count * HIDDEN, stream);
    each<forward2>(t, b, b.count, stream);
    if (copy(host->hit, t->hit, sizeof t->hit, stream)) return 1;
    *hits = 0;
    for (int i = 0; i < b.count; i++) *hits += host->hit[i] > 0;
    CHECK(idist_all_reduce(hits, hits, 1, IDIST_I64, IDIST_SUM, NULL));
    return 0;
}

static int run(net *t, net *host, cudaStream_t stream) {
    uint64_t checksum = 0xcbf29ce484222325u, least, most; // FNV-1a of the parameters
    struct timespec begin, end;
    int64_t hits;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    if (train(t, host, stream)) return 1;
    clock_gettime(CLOCK_MONOTONIC, &end);
    if (test(t, host, stream, &hits)) return 1;
    for (size_t i = 0; i < sizeof host->w; i++)
        checksum = (checksum ^ ((unsigned char *)host->w)[i]) * 0x100000001b3u;
    CHECK(idist_all_reduce(&checksum, &least, 1, IDIST_U64, IDIST_MIN, NULL));
    CHECK(idist_all_reduce(&checksum, &most, 1, IDIST_U64, IDIST_MAX, NULL));
    if (idist_get_rank() == 0) {
        printf("accuracy %.1f %% (%d of %d test images), %.2f s\n", 100.0 * (double)hits / TEST,
               (int)hits, TEST,
               (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec));
        if (least == most)
            printf("checksum 0x%016llx on all ranks\n", (unsigned long long)checksum);
        else fprintf(stderr, "the ranks ended with different parameters\n");
        fflush(stdout);
    }
    return least == most && hits * 100 >= TEST * 95 ? 0 : 1;
}

static int worker(int local_rank, void *arg) {
    bool device = strcmp(idist_device(), "cpu") != 0; // the same on all ranks
    int n = idist_get_world_size();
    net *host = (net *)arg, *t = host;
    cudaStream_t stream = NULL; // NULL: there is no device
    (void)local_rank;
    if (idist_get_rank() == 0) {
        if (!device) printf("no CUDA device for all ranks: the processor does it\n");
        printf("world of %d, device %s, device backend %s: %d images to train, %d to test, %d "
               "parameters\n",
               n, idist_device(), idist_device_backend(), TRAIN, TEST, PARAMS);
        if (BATCH % n) fprintf(stderr, "%d ranks cannot share a batch of %d evenly\n", n, BATCH);
    }
    if (BATCH % n)
        return 1; // AVG is the mean over ranks; that of the images only where all have as many
    if (!device) return run(t, host, stream);
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA(cudaMalloc((void **)&t, sizeof *t));
    int code = run(t, host, stream);
    CUDA(cudaFree(t));
    CUDA(cudaStreamDestroy(stream));
    return code;
}

// 64 pixels from 0 to 16 and the label, divided by commas. Every fifth image is for the test.
static int read_data(net *host) {
    FILE *f = fopen("examples/data/digits.csv", "r");
    int n = 0, column = 0, ntrain = 0, ntest = 0;
    for (int value; f && n < IMAGES && fscanf(f, "%d%*[,\r\n]", &value) == 1; column++) {
        if (value < 0 || value > (column < PIXELS ? 16 : CLASSES - 1)) break;
        if (column < PIXELS) host->images[n * PIXELS + column] = (float)value / 16;
        else host->labels[n++] = value, column = -1;
    }
    if (f) fclose(f);
    for (int i = 0; i < n; i++) host->order[i % 5 == 4 ? TRAIN + ntest++ : ntrain++] = i;
    if (n < IMAGES)
        fprintf(stderr,
                "examples/data/digits.csv: %d images, expected %d; run this above examples/\n", n,
                IMAGES);
    return n < IMAGES;
}

int main(int argc, char **argv) {
    static net host;
    int ranks = argc > 1 ? atoi(argv[1]) : RANKS;
    idist_desc desc;
    if (argc > 2 || ranks < 1 || ranks > BATCH) {
        fprintf(stderr, "usage: 11_gpu_train [ranks, 1 to %d]\n", BATCH);
        return 2;
    }
    if (read_data(&host)) return 1;
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = desc.init_timeout_ms = 60000;
    // Set: start that many processes. Nothing has called CUDA until here, so that they may be
    // forked.
    if (strcmp(idist_launcher(), "none") == 0) desc.nproc_per_node = ranks;
    CHECK(idist_parallel_run(&desc, worker, &host));
    return 0;
}
