// 12_zero.cu - a sharded optimiser (ZeRO, stage 1)
//
// build:  nvcc -O2 -DIDIST_IMPLEMENTATION examples/12_zero.cu -o 12_zero
// run:    ./12_zero               starts 2 ranks itself
//         ./12_zero 4             starts 4
//         or by hand, with any free MASTER_PORT:
//         (export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29512
//          for r in 0 1; do RANK=$r LOCAL_RANK=$r ./12_zero & done; wait)
//
// expected output; dots depend on the machine:
//    world of 2, device cuda:0, device backend nccl: 10001 parameters, padded to 10002
//    unsharded: loss 0.59... -> 0.01..., optimiser state 80016 bytes per rank
//    sharded:   loss 0.59... -> 0.01..., optimiser state 40008 bytes per rank
//    largest difference of a parameter: 0
//
// Without a device a line says so, and the same functions run on the processor.
//
// AdamW keeps two numbers for each parameter. When all ranks do the same update, all keep all of
// them. Here each rank updates one n-th of the parameters, and an all_reduce falls into its two
// halves, with the update between them:
//
//     unsharded    all_reduce(g)       update all             the same on every rank
//     sharded      reduce_scatter(g)   update own n-th        all_gather(parameters)
//
// The bytes sent are the same, the optimiser's memory and work are one n-th. The parameters are
// padded to a multiple of the number of ranks, and every call works in place. Both ways train here
// from the same start; with 1 and 2 ranks the results are the same bits, with more the order of
// the additions may differ, and the results by 1e-4 at most after these few steps. Exit code: 0
// when it is so and the loss has fallen to a tenth; 1 when not, or when something failed; 2 for a
// bad argument.
#include "../idist_nccl.h"

#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(call)                                                        \
    do {                                                                   \
        if ((call) != IDIST_OK) {                                          \
            fprintf(stderr, "%s failed: %s\n", #call, idist_last_error()); \
            return 1;                                                      \
        }                                                                  \
    } while (0)
#define CUDA(call)                                                                 \
    do {                                                                           \
        cudaError_t error_ = (call);                                               \
        if (error_ != cudaSuccess) {                                               \
            fprintf(stderr, "%s failed: %s\n", #call, cudaGetErrorString(error_)); \
            return 1;                                                              \
        }                                                                          \
    } while (0)

// A regression: INPUTS numbers, HIDDEN units, one output. SAMPLES is what each rank has of its own.
enum { RANKS = 2, MAX_RANKS = 64, INPUTS = 8, HIDDEN = 1000, SAMPLES = 32, STEPS = 100 };
enum { W1 = 0, B1 = W1 + INPUTS * HIDDEN, W2 = B1 + HIDDEN, B2 = W2 + HIDDEN, PARAMS = B2 + 1 };

typedef struct model { // one on the host; another on the device, if there is one
    float x[SAMPLES * INPUTS], y[SAMPLES], hidden[SAMPLES * HIDDEN], error[SAMPLES];
    float w[PARAMS + MAX_RANKS],
        g[PARAMS + MAX_RANKS]; // parameters and gradients, with room for the padding
} model;

typedef struct adam { // the moments of `count` parameters from `first` on
    float *m, *v;     // of the device, if there is one
    int first, count;
    float fix_m, fix_v; // they start at 0 and are too small in the first steps
} adam;

// ---- the work, in elements that do not depend on one another: one thread each, or one turn of a
// loop ----

__host__ __device__ static void hidden(model *t, adam, int i) {
    float sum = t->w[B1 + i % HIDDEN];
    for (int k = 0; k < INPUTS; k++)
        sum += t->x[i / HIDDEN * INPUTS + k] * t->w[W1 + k * HIDDEN + i % HIDDEN];
    t->hidden[i] = tanhf(sum);
}

__host__ __device__ static void output(model *t, adam, int n) {
    float sum = t->w[B2];
    for (int unit = 0; unit < HIDDEN; unit++) sum += t->hidden[n * HIDDEN + unit] * t->w[W2 + unit];
    t->error[n] = sum - t->y[n];
}

// Of half the mean of the squared errors.
__host__ __device__ static void gradient(model *t, adam, int i) {
    float sum = 0;
    for (int n = 0; n < SAMPLES; n++) {
        float h = i < B2 ? t->hidden[n * HIDDEN + i % HIDDEN] : 1, flow = t->error[n];
        if (i < W2) flow *= t->w[W2 + i % HIDDEN] * (1 - h * h);
        sum += flow * (i < B1 ? t->x[n * INPUTS + i / HIDDEN] : i < W2 ? 1 : h);
    }
    t->g[i] = sum / SAMPLES;
}

__host__ __device__ static void adamw(model *t, adam a, int i) {
    float *w = t->w + a.first + i, g = t->g[a.first + i];
    a.m[i] = 0.9f * a.m[i] + 0.1f * g;
    a.v[i] = 0.999f * a.v[i] + 0.001f * g * g;
    *w -= 1e-3f * (a.m[i] * a.fix_m / (sqrtf(a.v[i] * a.fix_v) + 1e-8f) + 0.01f * *w);
}

template <void (*element)(model *, adam, int)> __global__ void kernel(model *t, adam a, int n) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) element(t, a, i);
}

// The elements 0 .. n-1: on the stream, or here and now.
template <void (*element)(model *, adam, int)>
static void each(model *t, adam a, int n, cudaStream_t stream) {
    if (stream) kernel<element><<<(n + 127) / 128, 128, 0, stream>>>(t, a, n);
    else
        for (int i = 0; i < n; i++) element(t, a, i);
}

// ---- memory ----

// Between host and device. Without a device the two are the same memory.
static int copy(void *to, const void *from, size_t nbytes, cudaStream_t stream) {
    if (!stream) return 0;
    CUDA(cudaMemcpyAsync(to, from, nbytes, cudaMemcpyDefault, stream));
    CUDA(cudaStreamSynchronize(stream));
    return 0;
}

static int make_moments(float **at, int count, cudaStream_t stream) { // all 0
    size_t nbytes = (size_t)count * sizeof(float);
    if (!stream) return (*at = (float *)calloc(1, nbytes)) == NULL;
    CUDA(cudaMalloc((void **)at, nbytes));
    CUDA(cudaMemsetAsync(*at, 0, nbytes, stream));
    return 0;
}

static void free_moments(float *at, cudaStream_t stream) {
    if (stream) cudaFree(at);
    else free(at);
}

static float random_number(uint32_t *state) { // -1 .. 1
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) / 8388608 - 1;
}

// The same first parameters on every rank, and samples of its own.
static void begin(model *host) {
    uint32_t same = 1, own = 1000u + (uint32_t)idist_get_rank();
    memset(host, 0, sizeof *host);
    for (int i = 0; i < PARAMS; i++) host->w[i] = (i < W2 ? 0.5f : 0.05f) * random_number(&same);
    for (int i = 0; i < SAMPLES * INPUTS; i++) host->x[i] = random_number(&own);
    for (int n = 0; n < SAMPLES; n++) {
        const float *x = host->x + n * INPUTS;
        host->y[n] = x[0] * x[1] + x[2];
    }
}

// ---- training ----

// What is enqueued on the stream runs in this order; where NCCL serves, the host waits for nothing.
static int step(model *t, adam a, bool sharded, cudaStream_t stream) {
    size_t count = (size_t)a.count;
    idist_opts opts;
    memset(&opts, 0, sizeof opts);
    opts.stream = stream;
    each<hidden>(t, a, SAMPLES * HIDDEN, stream);
    each<output>(t, a, SAMPLES, stream);
    each<gradient>(t, a, PARAMS, stream); // those of the padding stay 0
    if (sharded)
        CHECK(idist_reduce_scatter(t->g, t->g + a.first, count, IDIST_F32, IDIST_AVG, &opts));
    else CHECK(idist_all_reduce(t->g, t->g, count, IDIST_F32, IDIST_AVG, &opts));
    each<adamw>(t, a, a.count, stream);
    if (sharded) CHECK(idist_all_gather(t->w + a.first, t->w, count, IDIST_F32, &opts));
    if (stream) CUDA(cudaGetLastError()); // of the launches
    return 0;
}

// The mean square over the samples of all ranks.
static int mean_loss(model *t, model *host, cudaStream_t stream, double *loss) {
    if (copy(host->error, t->error, sizeof t->error, stream)) return 1;
    *loss = 0;
    for (int n = 0; n < SAMPLES; n++)
        *loss += (double)host->error[n] * (double)host->error[n] / SAMPLES;
    CHECK(idist_all_reduce(loss, loss, 1, IDIST_F64, IDIST_AVG, NULL)); // host memory
    return 0;
}

// Leaves the parameters in host->w.
static int train(model *t, model *host, bool sharded, cudaStream_t stream) {
    int n = idist_get_world_size(), padded = (PARAMS + n - 1) / n * n;
    float power_m = 1, power_v = 1;
    double first = 0, last = 0;
    adam a;
    memset(&a, 0, sizeof a);
    a.count = sharded ? padded / n : padded;
    a.first = sharded ? idist_get_rank() * a.count : 0;
    begin(host);
    if (copy(t, host, sizeof *t, stream)) return 1;
    if (make_moments(&a.m, a.count, stream) || make_moments(&a.v, a.count, stream)) return 1;
    for (int i = 0; i < STEPS; i++) {
        a.fix_m = 1 / (1 - (power_m *= 0.9f));
        a.fix_v = 1 / (1 - (power_v *= 0.999f));
        if (step(t, a, sharded, stream)) return 1;
        if (i == 0 && mean_loss(t, host, stream, &first)) return 1;
    }
    if (mean_loss(t, host, stream, &last) || copy(host->w, t->w, sizeof t->w, stream)) return 1;
    free_moments(a.m, stream);
    free_moments(a.v, stream);
    if (idist_get_rank() == 0)
        printf("%-10s loss %.4f -> %.4f, optimiser state %zu bytes per rank\n",
               sharded ? "sharded:" : "unsharded:", first, last,
               2 * (size_t)a.count * sizeof(float));
    if (last < first / 10) return 0;
    fprintf(stderr, "rank %d: the loss has not fallen to a tenth\n", idist_get_rank());
    return 1;
}

static int compare(model *t, model *host, cudaStream_t stream) {
    static float unsharded[PARAMS];
    double difference = 0, tolerance = idist_get_world_size() <= 2 ? 0 : 1e-4;
    if (train(t, host, false, stream)) return 1;
    memcpy(unsharded, host->w, sizeof unsharded);
    if (train(t, host, true, stream)) return 1;
    for (int i = 0; i < PARAMS; i++) {
        double d = fabs((double)unsharded[i] - (double)host->w[i]);
        if (d > difference || d != d) difference = d; // also when it is not a number
    }
    CHECK(idist_all_reduce(&difference, &difference, 1, IDIST_F64, IDIST_MAX, NULL));
    if (idist_get_rank() == 0) printf("largest difference of a parameter: %g\n", difference);
    fflush(stdout);
    if (difference <= tolerance) return 0;
    fprintf(stderr, "rank %d: the difference is more than %g\n", idist_get_rank(), tolerance);
    return 1;
}

static int worker(int local_rank, void *arg) {
    static model host;
    bool device = strcmp(idist_device(), "cpu") != 0; // the same on all ranks
    int n = idist_get_world_size();
    model *t = &host;
    cudaStream_t stream = NULL; // NULL: there is no device
    (void)local_rank;
    (void)arg;
    if (n > MAX_RANKS)
        return fprintf(stderr, "%d ranks, and there is padding for %d\n", n, MAX_RANKS), 1;
    if (idist_get_rank() == 0) {
        if (!device) printf("no CUDA device for all ranks: the processor does it\n");
        printf("world of %d, device %s, device backend %s: %d parameters, padded to %d\n", n,
               idist_device(), idist_device_backend(), PARAMS, (PARAMS + n - 1) / n * n);
    }
    if (!device) return compare(t, &host, stream);
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA(cudaMalloc((void **)&t, sizeof *t));
    int code = compare(t, &host, stream);
    CUDA(cudaFree(t));
    CUDA(cudaStreamDestroy(stream));
    return code;
}

int main(int argc, char **argv) {
    int ranks = argc > 1 ? atoi(argv[1]) : RANKS;
    idist_desc desc;
    if (argc > 2 || ranks < 1 || ranks > MAX_RANKS) {
        fprintf(stderr, "usage: 12_zero [ranks, 1 to %d]\n", MAX_RANKS);
        return 2;
    }
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = desc.init_timeout_ms = 60000;
    // Set: start that many processes. Nothing has called CUDA until here, so that they may be
    // forked.
    if (strcmp(idist_launcher(), "none") == 0) desc.nproc_per_node = ranks;
    CHECK(idist_parallel_run(&desc, worker, NULL));
    return 0;
}
