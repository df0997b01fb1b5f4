// 11_gpu_train.cu - data-parallel training on GPUs; all_reduce during the backward pass
//
// build:  nvcc -O2 -DIDIST_IMPLEMENTATION examples/11_gpu_train.cu -o 11_gpu_train
// run:    ./11_gpu_train          starts 2 ranks; 11_gpu_train 4 starts 4; the number divides 64
//         (export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29511    # by hand; any free port
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
// Without a device the program says so and runs the same functions on the processor.
//
// Every rank computes the gradient of its share of each batch of 64 images. An all_reduce with AVG
// turns these gradients into the gradient of the batch. The gradient of the last layer is ready
// first. Its all_reduce runs while the gradient of the first layer is still being computed:
//
//     stream    forward | gradient 2 | back | gradient 1 | sum 1 | wait for sum 2 | step |
//     beside                         | sum 2 ....... |
//
// Sum 2 has a stream and a request. Sum 2 begins after the work that is already in the stream, and
// runs at the same time as later work. A call of idist_wait_stream makes the stream wait for sum 2.
// With NCCL the host never waits within an epoch.
//
// Exits with 0 if all ranks have the same parameters and recognize 95 % of the test images or more.
// Exits with 2 for a bad argument, otherwise with 1.
#include "../idist_nccl.h"
#include "lib/arguments.h"
#include "lib/check.h"
#include "lib/digits_gpu.h"
#include "lib/gpu.h"

enum { RANKS = 2, EPOCHS = 20, BATCH = 64, BATCHES = TRAIN / BATCH };

typedef struct trainer {
    net *t, *host;       // t is on the device; without a device it is host
    cudaStream_t stream; // NULL if there is no device
    int rank, ranks;
} trainer;

// Trains one batch. A call of `each` runs a kernel on the stream, or a loop if there is no stream.
// The stream keeps running while sum 2 is in flight. All ranks make these calls in this order.
static int train_batch(net *t, batch b, cudaStream_t stream) {
    idist_request request;
    idist_opts beside = idist_opts(), in_order = idist_opts();

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
    if (stream) CUDA(cudaGetLastError()); // errors of the launches
    return 0;
}

// Trains for all epochs and copies the weights to the host. All ranks draw the same random numbers,
// so they begin with the same parameters and shuffle the same way.
static int train(const trainer *t) {
    batch b = {0, BATCH / t->ranks, 0};
    net *host = t->host;
    uint64_t state = 1;

    net_begin(host, &state);
    if (gpu_copy(t->t, host, sizeof *host, t->stream)) return 1;
    for (int epoch = 1; epoch <= EPOCHS; epoch++) {
        net_begin_epoch(host, &state);
        if (gpu_copy(t->t->order, host->order, sizeof host->order, t->stream)) return 1;
        if (gpu_copy(t->t->total, host->total, sizeof host->total, t->stream)) return 1;
        b.rate = epoch <= EPOCHS / 2 ? 0.1f : 0.02f;
        for (int i = 0; i < BATCHES; i++) {
            b.first = i * BATCH + t->rank * b.count;
            if (train_batch(t->t, b, t->stream)) return 1;
        }
        if (gpu_copy(host->total, t->t->total, sizeof host->total, t->stream)) return 1;
        if (t->rank == 0 && epoch % 5 == 0) net_print_epoch(host, epoch, BATCHES);
    }
    return gpu_copy(host->w, t->t->w, sizeof host->w, t->stream);
}

// Sets *hits to the number of recognized test images. Each rank classifies its share of the images.
static int test(const trainer *t, int64_t *hits) {
    int from = TEST * t->rank / t->ranks, to = TEST * (t->rank + 1) / t->ranks;
    batch b = {TRAIN + from, to - from, 0};

    each<forward1>(t->t, b, b.count * HIDDEN, t->stream);
    each<forward2>(t->t, b, b.count, t->stream);
    if (gpu_copy(t->host->hit, t->t->hit, sizeof t->t->hit, t->stream)) return 1;
    *hits = net_hits(t->host, b.count);
    CHECK(idist_all_reduce(hits, hits, 1, IDIST_I64, IDIST_SUM, NULL)); // in host memory
    return 0;
}

static int run(const trainer *t) {
    double seconds = now_s();
    uint64_t checksum, least, most;
    int64_t hits;

    if (train(t)) return 1;
    seconds = now_s() - seconds;
    if (test(t, &hits)) return 1;
    checksum = fnv1a(FNV_START, t->host->w, sizeof t->host->w);
    CHECK(idist_all_reduce(&checksum, &least, 1, IDIST_U64, IDIST_MIN, NULL));
    CHECK(idist_all_reduce(&checksum, &most, 1, IDIST_U64, IDIST_MAX, NULL));
    if (t->rank == 0) net_print_result(hits, seconds, checksum, least == most);
    return least == most && hits * 100 >= TEST * 95 ? 0 : 1;
}

static int worker(int local_rank, void *arg) {
    bool device = strcmp(idist_device(), "cpu") != 0; // the same on all ranks
    net *host = (net *)arg;
    trainer t = {host, host, NULL, idist_get_rank(), idist_get_world_size()};
    int code;

    (void)local_rank;
    if (t.rank == 0 && !device) printf("no CUDA device for all ranks: the processor does it\n");
    if (t.rank == 0)
        printf("world of %d, device %s, device backend %s: %d images to train, %d to test, %d "
               "parameters\n",
               t.ranks, idist_device(), idist_device_backend(), TRAIN, TEST, PARAMS);
    if (BATCH % t.ranks) // with unequal shares, AVG is not the mean over the images
        return fprintf(stderr, "%d ranks cannot share a batch of %d evenly\n", t.ranks, BATCH), 1;
    if (!device) return run(&t);
    CUDA(cudaStreamCreateWithFlags(&t.stream, cudaStreamNonBlocking));
    CUDA(cudaMalloc((void **)&t.t, sizeof *t.t));
    code = run(&t);
    CUDA(cudaFree(t.t));
    CUDA(cudaStreamDestroy(t.stream));
    return code;
}

int main(int argc, char **argv) {
    static net host;
    int ranks = ranks_argument(argc, argv, RANKS, 1, BATCH);
    idist_desc desc = idist_desc();

    if (!ranks || ranks_contradict(argc > 1, idist_launcher())) return 2;
    if (!net_load(&host)) return 1;
    desc.timeout_ms = desc.init_timeout_ms = 60000;
    if (strcmp(idist_launcher(), "none") == 0) desc.nproc_per_node = ranks; // before any CUDA call
    CHECK(idist_parallel_run(&desc, worker, &host));
    return 0;
}
