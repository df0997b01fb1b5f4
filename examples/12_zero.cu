// 12_zero.cu - a sharded optimizer (ZeRO, stage 1)
//
// build:  nvcc -O2 -DIDIST_IMPLEMENTATION examples/12_zero.cu -o 12_zero
// run:    ./12_zero               starts 2 ranks; 12_zero 4 starts 4
//         (export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29512    # by hand; any free port
//          for r in 0 1; do RANK=$r LOCAL_RANK=$r ./12_zero & done; wait)
//
// expected output; dots depend on the machine:
//    world of 2, device cuda:0, device backend nccl: 10001 parameters, padded to 10002
//    unsharded: loss 0.59... -> 0.01..., optimiser state 80016 bytes per rank
//    sharded:   loss 0.59... -> 0.01..., optimiser state 40008 bytes per rank
//    largest difference of a parameter: 0
//
// Without a device the program says so and runs the same functions on the processor.
//
// AdamW keeps two numbers for each parameter. Here each of n ranks keeps and updates one n-th of
// these numbers. The all_reduce is split into its two halves, with the update between them:
//
//     unsharded    all_reduce(g)       update all             the same on every rank
//     sharded      reduce_scatter(g)   update own n-th        all_gather(parameters)
//
// Both ways send the same number of bytes, but sharding divides the optimizer's memory and work by
// n. The parameters are padded to a multiple of the number of ranks. The program trains both ways
// from the same start. With 1 and 2 ranks, both ways end with the same bits. With more ranks,
// additions are done in a different order, and parameters differ by up to 1e-4.
//
// Exits with 0 if the parameters agree to this extent and the loss has fallen to a tenth. Exits
// with 2 for a bad argument, otherwise with 1.
#include "../idist_nccl.h"
#include "lib/arguments.h"
#include "lib/check.h"
#include "lib/gpu.h"
#include "lib/regression.h"

enum { RANKS = 2, STEPS = 100 };

typedef struct trainer {
    model *t, *host;     // t is on the device; without a device it is host
    cudaStream_t stream; // NULL if there is no device
    int rank, ranks, padded;
} trainer;

template <void (*element)(model *, adam, int)> __global__ void kernel(model *t, adam a, int n) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);

    if (i < n) element(t, a, i);
}

// Runs elements 0 .. n-1 on the stream, or on the processor if the stream is NULL.
template <void (*element)(model *, adam, int)>
static void each(model *t, adam a, int n, cudaStream_t stream) {
    if (stream) kernel<element><<<(n + 127) / 128, 128, 0, stream>>>(t, a, n);
    else
        for (int i = 0; i < n; i++) element(t, a, i);
}

// Makes one step. The stream runs the work in this order; with NCCL the host does not wait.
static int step(model *t, adam a, bool sharded, cudaStream_t stream) {
    size_t count = (size_t)a.count;
    idist_opts opts = idist_opts();

    opts.stream = stream;
    each<hidden>(t, a, SAMPLES * HIDDEN, stream);
    each<output>(t, a, SAMPLES, stream);
    each<gradient>(t, a, PARAMS, stream); // the gradients of the padding stay 0
    if (sharded)
        CHECK(idist_reduce_scatter(t->g, t->g + a.first, count, IDIST_F32, IDIST_AVG, &opts));
    else CHECK(idist_all_reduce(t->g, t->g, count, IDIST_F32, IDIST_AVG, &opts));
    each<adamw>(t, a, a.count, stream);
    if (sharded) CHECK(idist_all_gather(t->w + a.first, t->w, count, IDIST_F32, &opts));
    if (stream) CUDA(cudaGetLastError()); // errors of the launches
    return 0;
}

// Sets *loss to the mean loss over the samples of all ranks.
static int mean_loss(const trainer *t, double *loss) {
    if (gpu_copy(t->host->error, t->t->error, sizeof t->t->error, t->stream)) return 1;
    *loss = regression_loss(t->host);
    CHECK(idist_all_reduce(loss, loss, 1, IDIST_F64, IDIST_AVG, NULL)); // in host memory
    return 0;
}

// Trains with or without sharding, and leaves the parameters in host->w. Returns 1 if the loss has
// not fallen to a tenth, or after an error.
static int train(const trainer *t, bool sharded) {
    int count = sharded ? t->padded / t->ranks : t->padded;
    adam a = {NULL, NULL, sharded ? t->rank * count : 0, count, 1, 1, 0, 0};
    double first = 0, last = 0;

    regression_begin(t->host, t->rank);
    if (gpu_copy(t->t, t->host, sizeof *t->t, t->stream)) return 1;
    if (gpu_zeros(&a.m, count, t->stream) || gpu_zeros(&a.v, count, t->stream)) return 1;
    for (int i = 0; i < STEPS; i++) {
        adam_next(&a);
        if (step(t->t, a, sharded, t->stream)) return 1;
        if (i == 0 && mean_loss(t, &first)) return 1;
    }
    if (mean_loss(t, &last)) return 1;
    if (gpu_copy(t->host->w, t->t->w, sizeof t->t->w, t->stream)) return 1;
    gpu_free(a.m, t->stream);
    gpu_free(a.v, t->stream);
    if (t->rank == 0)
        printf("%-10s loss %.4f -> %.4f, optimiser state %d bytes per rank\n",
               sharded ? "sharded:" : "unsharded:", first, last, 2 * count * (int)sizeof(float));
    if (last < first / 10) return 0;
    return fprintf(stderr, "rank %d: the loss has not fallen to a tenth\n", t->rank), 1;
}

static int compare(const trainer *t) {
    static float unsharded[PARAMS];
    double difference, tolerance = t->ranks <= 2 ? 0 : 1e-4;

    if (train(t, false)) return 1;
    memcpy(unsharded, t->host->w, sizeof unsharded);
    if (train(t, true)) return 1;
    difference = largest_difference(unsharded, t->host->w, PARAMS);
    CHECK(idist_all_reduce(&difference, &difference, 1, IDIST_F64, IDIST_MAX, NULL));
    if (t->rank == 0) printf("largest difference of a parameter: %g\n", difference);
    fflush(stdout);
    if (difference <= tolerance) return 0;
    return fprintf(stderr, "rank %d: the difference is more than %g\n", t->rank, tolerance), 1;
}

static int worker(int local_rank, void *arg) {
    static model host;
    bool device = strcmp(idist_device(), "cpu") != 0; // the same on all ranks
    int n = idist_get_world_size(), padded = (PARAMS + n - 1) / n * n, code;
    trainer t = {&host, &host, NULL, idist_get_rank(), n, padded};

    (void)local_rank;
    (void)arg;
    if (n > PADDING) return fprintf(stderr, "%d ranks, and there is padding for 64\n", n), 1;
    if (t.rank == 0 && !device) printf("no CUDA device for all ranks: the processor does it\n");
    if (t.rank == 0)
        printf("world of %d, device %s, device backend %s: %d parameters, padded to %d\n", n,
               idist_device(), idist_device_backend(), PARAMS, padded);
    if (!device) return compare(&t);
    CUDA(cudaStreamCreateWithFlags(&t.stream, cudaStreamNonBlocking));
    CUDA(cudaMalloc((void **)&t.t, sizeof *t.t));
    code = compare(&t);
    CUDA(cudaFree(t.t));
    CUDA(cudaStreamDestroy(t.stream));
    return code;
}

int main(int argc, char **argv) {
    int ranks = ranks_argument(argc, argv, RANKS, 1, PADDING);
    idist_desc desc = idist_desc();

    if (!ranks || ranks_contradict(argc > 1, idist_launcher())) return 2;
    desc.timeout_ms = desc.init_timeout_ms = 60000;
    if (strcmp(idist_launcher(), "none") == 0) desc.nproc_per_node = ranks; // before any CUDA call
    CHECK(idist_parallel_run(&desc, worker, NULL));
    return 0;
}
