// 10_gpu_all_reduce.c - all_reduce of device memory, on a stream and blocking; plain C, no kernels
//
// build:  cc -O2 -DIDIST_IMPLEMENTATION -include idist_nccl.h -isystem $CUDA_HOME/include
//             examples/10_gpu_all_reduce.c -L$CUDA_HOME/lib64
//             -Wl,-rpath,$CUDA_HOME/lib64 -lcudart -o 10_gpu_all_reduce
// run:    ./10_gpu_all_reduce             starts 2 ranks; 10_gpu_all_reduce 8 256: 8 ranks, 256 MiB
//         (export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29510    # by hand; any free port
//          for r in 0 1; do RANK=$r LOCAL_RANK=$r ./10_gpu_all_reduce & done; wait)
//
// expected output, with a GPU for each rank; dots depend on the machine:
//    world of 2, device cuda:0, device backend nccl, 16 MiB
//    on a stream: right on all ranks, ... ms, bus bandwidth ... GB/s
//    blocking: right on all ranks, ... ms, bus bandwidth ... GB/s
//
// The build command is one line, split here into three. CUDA_HOME is the folder of the CUDA
// toolkit, usually /usr/local/cuda. The program looks for NCCL at run time. Ranks that share a GPU
// use another device backend; the program then prints that it measures no link between GPUs.
// Without a device the program says so and makes the same calls on host memory.
//
// Bus bandwidth is defined as in nccl-tests: bytes / time * 2(n-1)/n. It is the speed of the
// slowest link if every rank sends and receives the minimum that an all_reduce needs.
//
// Exits with 0 if every element is right on every rank. Exits with 2 for bad arguments, otherwise
// with 1.
#include "../idist.h"
#include "lib/addends.h"
#include "lib/arguments.h"
#include "lib/check.h"
#include "lib/numbers.h"

enum { RANKS = 2, MAX_RANKS = 1024, MIB = 16, MAX_MIB = 65536, REPEAT = 20 };

// Copies to the device, sums, and copies back, in this order on the stream. With NCCL the host
// waits only at the end.
static int reduce_on_stream(const addends *a, cudaStream_t stream) {
    idist_opts opts = {0};

    opts.stream = stream;
    addends_fill(a, idist_get_rank());
    CUDA(cudaMemcpyAsync(a->send, a->host, a->nbytes, cudaMemcpyHostToDevice, stream));
    CUDA(cudaMemsetAsync(a->recv, 0xff, a->nbytes, stream)); // NaN until the sums arrive
    CHECK(idist_all_reduce(a->send, a->recv, a->count, IDIST_F32, IDIST_SUM, &opts));
    CUDA(cudaMemcpyAsync(a->host, a->recv, a->nbytes, cudaMemcpyDeviceToHost, stream));
    CUDA(cudaStreamSynchronize(stream));
    return addends_verify(a, idist_get_rank(), idist_get_world_size(), "on a stream");
}

// Sums without a stream. The call begins after the work that is already in the default stream, and
// returns when the result is complete.
static int reduce_blocking(const addends *a) {
    addends_fill(a, idist_get_rank());
    if (addends_copy(a, a->send, a->host)) return 1;
    CHECK(idist_all_reduce(a->send, a->recv, a->count, IDIST_F32, IDIST_SUM, NULL));
    if (addends_copy(a, a->host, a->recv)) return 1;
    return addends_verify(a, idist_get_rank(), idist_get_world_size(), "blocking");
}

// Measures the time of an all_reduce. May print "right on all ranks", because a rank with a wrong
// result has exited, and the other ranks then fail.
static int measure(const addends *a, const char *how, cudaStream_t stream) {
    int n = idist_get_world_size();
    idist_opts opts = {0};
    double seconds;

    opts.stream = stream;
    CHECK(idist_barrier(NULL));
    seconds = now_s();
    for (int i = 0; i < REPEAT; i++)
        CHECK(idist_all_reduce(a->send, a->recv, a->count, IDIST_F32, IDIST_SUM, &opts));
    if (stream) CUDA(cudaStreamSynchronize(stream));
    seconds = (now_s() - seconds) / REPEAT;
    CHECK(idist_all_reduce(&seconds, &seconds, 1, IDIST_F64, IDIST_MAX, NULL)); // the slowest rank
    if (idist_get_rank() == 0)
        printf("%s: right on all ranks, %.3f ms, bus bandwidth %.2f GB/s\n", how, 1e3 * seconds,
               1e-9 * (double)a->nbytes / seconds * 2 * (n - 1) / n);
    fflush(stdout);
    return 0;
}

typedef struct place { // where a GPU is
    int node;
    char bus[28];
} place;

// Sets *shared to true if two ranks use the same GPU. Compares the addresses on the PCI bus, which
// are unique on a host. A GPU's number can differ between ranks (CUDA_VISIBLE_DEVICES).
static int ranks_share_a_gpu(bool *shared) {
    int device, n = idist_get_world_size();
    place mine = {idist_get_node_rank(), ""}, *all = (place *)malloc((size_t)n * sizeof *all);

    if (!all) return fprintf(stderr, "no memory for %d places\n", n), 1;
    CUDA(cudaGetDevice(&device)); // chosen by idist
    CUDA(cudaDeviceGetPCIBusId(mine.bus, (int)sizeof mine.bus, device));
    CHECK(idist_all_gather(&mine, all, sizeof mine, IDIST_U8, NULL));
    *shared = false;
    for (int i = 0; i < n; i++)
        for (int k = 0; k < i; k++)
            if (memcmp(&all[i], &all[k], sizeof mine) == 0) *shared = true;
    free(all);
    return 0;
}

typedef struct job {
    size_t count;
    int wanted_ranks; // 0 if not given
    bool refused;     // set for main if the worker runs in this process
} job;

static int worker(int local_rank, void *arg) {
    job *j = (job *)arg;
    size_t count = j->count;
    bool device = strcmp(idist_device(), "cpu") != 0, shared = false; // device: same on all ranks
    cudaStream_t stream = NULL;
    addends a;

    (void)local_rank;
    j->refused = world_contradicts(j->wanted_ranks, idist_get_world_size());
    if (j->refused) return 2;
    if (idist_get_rank() == 0 && !device)
        printf("no CUDA device for all ranks: this runs on memory of the host\n");
    if (idist_get_rank() == 0)
        printf("world of %d, device %s, device backend %s, %zu MiB\n", idist_get_world_size(),
               idist_device(), idist_device_backend(), count * sizeof(float) >> 20);
    if (device && ranks_share_a_gpu(&shared)) return 1;
    if (shared && idist_get_rank() == 0)
        printf("ranks share a GPU: this measures no link between GPUs\n");

    if (addends_create(&a, device, count)) return 1;
    if (device) CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    if (device && (reduce_on_stream(&a, stream) || measure(&a, "on a stream", stream))) return 1;
    if (reduce_blocking(&a) || measure(&a, "blocking", NULL)) return 1;
    if (device) CUDA(cudaStreamDestroy(stream));
    return addends_free(&a);
}

int main(int argc, char **argv) {
    int ranks = argument(argc, argv, 1, RANKS, 1, MAX_RANKS);
    int mib = argument(argc, argv, 2, MIB, 1, MAX_MIB);
    job j = {((size_t)mib << 20) / sizeof(float), argc > 1 ? ranks : 0, false};
    idist_desc desc = {0};

    if (!ranks || !mib || argc > 3)
        return fprintf(stderr, "usage: %s [number of ranks [MiB]]\n", argv[0]), 2;
    desc.timeout_ms = desc.init_timeout_ms = 60000;
    if (strcmp(idist_launcher(), "none") == 0) desc.nproc_per_node = ranks; // before any CUDA call
    if (idist_parallel_run(&desc, worker, &j) == IDIST_OK || j.refused) return j.refused ? 2 : 0;
    fprintf(stderr, "%s: %s\n", argv[0], idist_last_error());
    return 1;
}
