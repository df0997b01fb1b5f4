// 12_zero.cu - a sharded optimizer (ZeRO, stage 1)
//
// build:  nvcc -O2 -DIDIST_IMPLEMENTATION examples/12_zero.cu -o 12_zero
// run:    ./12_zero               starts 2 ranks; 12_zero 4 starts 4
//         (export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29512    # by hand; any free port
//          for r in 0 1; do RANK=$r LOCAL_RANK=$r ./12_zero & done; wait)
//
// expected output; dots depend on the machine:
//    world of 2, device cuda:0, device backend nccl: 10001 parameters
//    ddp:  loss 0.59... -> 0.01..., optimizer state 80008 bytes per rank
//    zero: loss 0.59... -> 0.01..., optimizer state 40008 bytes per rank
//    largest difference of a parameter: 0
//
// Without a device the program says so and runs the same functions on the processor.
//
// AdamW keeps two numbers for each parameter. With idist_ddp, every rank keeps and updates all of
// them. With idist_zero, each of n ranks keeps and updates one n-th:
//
//     idist_ddp     all_reduce(g)       update all             the same on every rank
//     idist_zero    reduce_scatter(g)   update own n-th        all_gather(parameters)
//
// Both ways send the same number of bytes, but idist_zero divides the optimizer's memory and work
// by n. The program trains both ways from the same start. With 1 and 2 ranks, both ways end with
// the same bits. With more ranks, additions are done in a different order, and parameters differ by
// up to 1e-4.
//
// Exits with 0 if the parameters agree to this extent and the loss has fallen to a tenth. Exits
// with 2 for a bad argument, otherwise with 1.
#include "../idist_nccl.h"
#include "../idist_train.h"
#include "lib/arguments.h"
#include "lib/check.h"
#include "lib/gpu.h"
#include "lib/regression.h"

enum { RANKS = 2, MAX_RANKS = 64, STEPS = 100 };

typedef struct trainer {
    model *t, *host;     // t is on the device; without a device it is host
    cudaStream_t stream; // NULL if there is no device
    int rank;
    idist_ddp *ddp; // one of the two is not NULL
    idist_zero *zero;
    float *m, *v; // all moments, for ddp
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

// Creates the ddp, or the idist_zero if `sharded` is set. Both average the gradients in t->g.
static int begin(trainer *r, bool sharded) {
    idist_tensor param = {r->t->w, PARAMS, IDIST_F32}, grad = {r->t->g, PARAMS, IDIST_F32};
    idist_ddp_desc ddp = idist_ddp_desc();
    idist_zero_desc zero = idist_zero_desc();

    zero.params = ddp.params = &param;
    zero.grads = ddp.grads = &grad;
    zero.n = ddp.n = 1;
    zero.on_device = ddp.on_device = r->stream != NULL;
    zero.stream = ddp.stream = r->stream;
    zero.states = 2; // the two moments of AdamW
    regression_begin(r->host, r->rank);
    if (gpu_copy(r->t, r->host, sizeof *r->t, r->stream)) return 1;
    if (sharded) CHECK(idist_zero_create(&zero, &r->zero));
    else CHECK(idist_ddp_create(&ddp, &r->ddp));
    return !sharded && (gpu_zeros(&r->m, PARAMS, r->stream) || gpu_zeros(&r->v, PARAMS, r->stream));
}

static void end(trainer *r) {
    gpu_free(r->m, r->stream);
    gpu_free(r->v, r->stream);
    r->m = r->v = NULL;
    idist_ddp_free(&r->ddp);
    idist_zero_free(&r->zero);
}

// Makes one step. The stream runs the work in this order; with NCCL the host does not wait.
static int step(const trainer *r, adam a) {
    model *t = r->t;

    each<hidden>(t, a, SAMPLES * HIDDEN, r->stream);
    each<output>(t, a, SAMPLES, r->stream);
    each<gradient>(t, a, PARAMS, r->stream);
    if (r->ddp) {
        CHECK(idist_ddp_wait(r->ddp));
        a.w = t->w, a.g = t->g, a.m = r->m, a.v = r->v;
        each<adamw>(t, a, PARAMS, r->stream);
    } else {
        CHECK(idist_zero_wait(r->zero));
        for (int k = 0; k < idist_zero_shards(r->zero); k++) {
            const idist_shard *s = idist_zero_shard(r->zero, k);

            a.w = s->weights, a.g = s->grad, a.m = s->states[0], a.v = s->states[1];
            each<adamw>(t, a, (int)s->count, r->stream);
        }
        CHECK(idist_zero_gather(r->zero));
    }
    if (r->stream) CUDA(cudaGetLastError()); // errors of the launches
    return 0;
}

// Sets *loss to the mean loss over the samples of all ranks.
static int mean_loss(const trainer *r, double *loss) {
    if (gpu_copy(r->host->error, r->t->error, sizeof r->t->error, r->stream)) return 1;
    *loss = regression_loss(r->host);
    CHECK(idist_all_reduce(loss, loss, 1, IDIST_F64, IDIST_AVG, NULL)); // in host memory
    return 0;
}

// Trains with or without sharding, and leaves the parameters in host->w. Returns 1 if the loss has
// not fallen to a tenth, or after an error.
static int train(trainer *r, bool sharded) {
    adam a = {NULL, NULL, NULL, NULL, 1, 1, 0, 0};
    size_t state = PARAMS;
    double first = 0, last = 0;

    if (begin(r, sharded)) return 1;
    for (int i = 0; i < STEPS; i++) {
        adam_next(&a);
        if (step(r, a)) return 1;
        if (i == 0 && mean_loss(r, &first)) return 1;
    }
    if (mean_loss(r, &last)) return 1;
    if (gpu_copy(r->host->w, r->t->w, sizeof r->t->w, r->stream)) return 1;
    if (sharded) state = idist_zero_shards(r->zero) ? idist_zero_shard(r->zero, 0)->count : 0;
    if (r->rank == 0)
        printf("%-5s loss %.4f -> %.4f, optimizer state %d bytes per rank\n",
               sharded ? "zero:" : "ddp:", first, last, (int)(2 * state * sizeof(float)));
    end(r);
    if (last < first / 10) return 0;
    return fprintf(stderr, "rank %d: the loss has not fallen to a tenth\n", r->rank), 1;
}

static int compare(trainer *r, int ranks) {
    static float unsharded[PARAMS];
    double difference, tolerance = ranks <= 2 ? 0 : 1e-4;

    if (train(r, false)) return 1;
    memcpy(unsharded, r->host->w, sizeof unsharded);
    if (train(r, true)) return 1;
    difference = largest_difference(unsharded, r->host->w, PARAMS);
    CHECK(idist_all_reduce(&difference, &difference, 1, IDIST_F64, IDIST_MAX, NULL));
    if (r->rank == 0) printf("largest difference of a parameter: %g\n", difference);
    fflush(stdout);
    if (difference <= tolerance) return 0;
    return fprintf(stderr, "rank %d: the difference is more than %g\n", r->rank, tolerance), 1;
}

static int worker(int local_rank, void *arg) {
    static model host;
    bool device = strcmp(idist_device(), "cpu") != 0; // the same on all ranks
    int n = idist_get_world_size(), code;
    trainer r = {&host, &host, NULL, idist_get_rank(), NULL, NULL, NULL, NULL};

    (void)local_rank;
    (void)arg;
    if (r.rank == 0 && !device) printf("no CUDA device for all ranks: the processor does it\n");
    if (r.rank == 0)
        printf("world of %d, device %s, device backend %s: %d parameters\n", n, idist_device(),
               idist_device_backend(), PARAMS);
    if (!device) return compare(&r, n);
    CUDA(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking));
    CUDA(cudaMalloc((void **)&r.t, sizeof *r.t));
    code = compare(&r, n);
    CUDA(cudaFree(r.t));
    CUDA(cudaStreamDestroy(r.stream));
    return code;
}

int main(int argc, char **argv) {
    int ranks = ranks_argument(argc, argv, RANKS, 1, MAX_RANKS);
    idist_desc desc = idist_desc();

    if (!ranks || ranks_contradict(argc > 1, idist_launcher())) return 2;
    desc.timeout_ms = desc.init_timeout_ms = 60000;
    if (strcmp(idist_launcher(), "none") == 0) desc.nproc_per_node = ranks; // before any CUDA call
    CHECK(idist_parallel_run(&desc, worker, NULL));
    return 0;
}
