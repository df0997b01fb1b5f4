// 10_gpu_all_reduce.c - all_reduce of device memory, on a stream and blocking; plain C, no kernels
//
// build:  cc -O2 -DIDIST_IMPLEMENTATION -include idist_nccl.h -isystem $CUDA_HOME/include
//             examples/10_gpu_all_reduce.c -L$CUDA_HOME/lib64
//             -Wl,-rpath,$CUDA_HOME/lib64 -lcudart -o 10_gpu_all_reduce
// run:    ./10_gpu_all_reduce              starts 2 ranks itself
//         ./10_gpu_all_reduce 8 256        8 ranks, 256 MiB
//         or by hand, with any free MASTER_PORT:
//         (export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29510
//          for r in 0 1; do RANK=$r LOCAL_RANK=$r ./10_gpu_all_reduce & done; wait)
//
// expected output, with a GPU for each rank; dots depend on the machine:
//    world of 2, device cuda:0, device backend nccl, 16 MiB
//    on a stream: right on all ranks, ... ms, bus bandwidth ... GB/s
//    blocking: right on all ranks, ... ms, bus bandwidth ... GB/s
//
// Ranks that share a GPU are served too, by another device backend, and a line says that no link
// between GPUs is measured then. Without a device a line says so, and the same calls run on host
// memory. The build is one line, cut in two; CUDA_HOME is where the toolkit is, mostly
// /usr/local/cuda. NCCL is looked for when the program runs.
//
// Bus bandwidth is what nccl-tests calls so: bytes / time * 2(n-1)/n, that is, the speed of the
// slowest link if every rank sends and receives as little as an all_reduce can. Exit code: 0 when
// every element is right on every rank, 1 when not or when something failed, 2 for bad arguments.
#include "../idist.h"

#include "lib/check.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { RANKS = 2, MIB = 16, REPEAT = 20, PATTERN = 1000 };

#define CUDA(call)                                                                 \
    do {                                                                           \
        cudaError_t error_ = (call);                                               \
        if (error_ != cudaSuccess) {                                               \
            fprintf(stderr, "%s failed: %s\n", #call, cudaGetErrorString(error_)); \
            return 1;                                                              \
        }                                                                          \
    } while (0)

typedef struct job {
    size_t count;       // floats
    float *host;        // what goes to the device, and what comes back
    float *send, *recv; // on the device; without one, memory of the host
    bool device;
} job;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Small whole numbers, so that every sum is exact. Each rank has others.
static void fill(const job *j) {
    for (size_t i = 0; i < j->count; i++)
        j->host[i] = (float)(i % PATTERN + (size_t)idist_get_rank());
}

static int verify(const job *j, const char *how) {
    size_t n = (size_t)idist_get_world_size();
    for (size_t i = 0; i < j->count; i++) {
        size_t expected = n * (i % PATTERN) + n * (n - 1) / 2;
        if (j->host[i] == (float)expected) continue;
        fprintf(stderr, "rank %d, %s: element %zu is %g, expected %zu\n", idist_get_rank(), how, i,
                (double)j->host[i], expected);
        return 1;
    }
    return 0;
}

// Copy, sum and copy back follow one another on the stream. Where NCCL serves, the host waits only
// at the end.
static int reduce_on_stream(const job *j, cudaStream_t stream) {
    size_t nbytes = j->count * sizeof(float);
    idist_opts opts;
    memset(&opts, 0, sizeof opts);
    opts.stream = stream;
    fill(j);
    CUDA(cudaMemcpyAsync(j->send, j->host, nbytes, cudaMemcpyHostToDevice, stream));
    CUDA(cudaMemsetAsync(j->recv, 0xff, nbytes, stream));
    CHECK(idist_all_reduce(j->send, j->recv, j->count, IDIST_F32, IDIST_SUM, &opts));
    CUDA(cudaMemcpyAsync(j->host, j->recv, nbytes, cudaMemcpyDeviceToHost, stream));
    CUDA(cudaStreamSynchronize(stream));
    return verify(j, "on a stream");
}

// Without a stream the call begins after what the default stream holds, and its result is there
// when it returns.
static int reduce_blocking(const job *j) {
    size_t nbytes = j->count * sizeof(float);
    fill(j);
    if (j->device) CUDA(cudaMemcpy(j->send, j->host, nbytes, cudaMemcpyHostToDevice));
    else memcpy(j->send, j->host, nbytes);
    CHECK(idist_all_reduce(j->send, j->recv, j->count, IDIST_F32, IDIST_SUM, NULL));
    if (j->device) CUDA(cudaMemcpy(j->host, j->recv, nbytes, cudaMemcpyDeviceToHost));
    else memcpy(j->host, j->recv, nbytes);
    return verify(j, "blocking");
}

// All ranks are right when they come here; a rank that was not has ended, and the others with it.
static int measure(const job *j, const char *how, cudaStream_t stream) {
    int n = idist_get_world_size();
    idist_opts opts;
    memset(&opts, 0, sizeof opts);
    opts.stream = stream;
    CHECK(idist_barrier(NULL));
    double seconds = now_s();
    for (int i = 0; i < REPEAT; i++)
        CHECK(idist_all_reduce(j->send, j->recv, j->count, IDIST_F32, IDIST_SUM, &opts));
    if (stream) CUDA(cudaStreamSynchronize(stream));
    seconds = (now_s() - seconds) / (double)REPEAT;
    CHECK(idist_all_reduce(&seconds, &seconds, 1, IDIST_F64, IDIST_MAX,
                           NULL)); // of the slowest rank; host memory
    if (idist_get_rank() == 0)
        printf("%s: right on all ranks, %.3f ms, bus bandwidth %.2f GB/s\n", how, 1e3 * seconds,
               1e-9 * (double)(j->count * sizeof(float)) / seconds * 2 * (n - 1) / n);
    fflush(stdout);
    return 0;
}

typedef struct place { // of a GPU
    int node;
    char bus[28];
} place;

// Two ranks may call one GPU by different numbers (CUDA_VISIBLE_DEVICES); its place on the bus of
// its host is its own.
static int ranks_share_a_gpu(bool *shared) {
    int device, n = idist_get_world_size();
    place mine, *all = (place *)malloc((size_t)n * sizeof *all);
    memset(&mine, 0, sizeof mine);
    mine.node = idist_get_node_rank();
    CUDA(cudaGetDevice(&device)); // the one that idist has chosen
    CUDA(cudaDeviceGetPCIBusId(mine.bus, (int)sizeof mine.bus, device));
    CHECK(all ? idist_all_gather(&mine, all, sizeof mine, IDIST_U8, NULL) : IDIST_ERR_NO_MEMORY);
    *shared = false;
    for (int i = 0; i < n; i++)
        for (int k = 0; k < i; k++) *shared |= memcmp(&all[i], &all[k], sizeof mine) == 0;
    free(all);
    return 0;
}

static int run_on_device(job *j) {
    size_t nbytes = j->count * sizeof(float);
    cudaStream_t stream;
    bool shared;
    if (ranks_share_a_gpu(&shared)) return 1;
    if (shared && idist_get_rank() == 0)
        printf("ranks share a GPU: this measures no link between GPUs\n");
    CUDA(cudaMallocHost((void **)&j->host,
                        nbytes)); // pinned: copies of other memory make the host wait
    CUDA(cudaMalloc((void **)&j->send, nbytes));
    CUDA(cudaMalloc((void **)&j->recv, nbytes));
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    if (reduce_on_stream(j, stream) || measure(j, "on a stream", stream)) return 1;
    if (reduce_blocking(j) || measure(j, "blocking", NULL)) return 1;
    CUDA(cudaStreamDestroy(stream));
    CUDA(cudaFree(j->send));
    CUDA(cudaFree(j->recv));
    CUDA(cudaFreeHost(j->host));
    return 0;
}

static int run_on_host(job *j) {
    size_t nbytes = j->count * sizeof(float);
    j->host = (float *)malloc(nbytes);
    j->send = (float *)idist_alloc(nbytes, NULL);
    j->recv = (float *)idist_alloc(nbytes, NULL);
    int code =
        !j->host || !j->send || !j->recv || reduce_blocking(j) || measure(j, "blocking", NULL);
    free(j->host);
    idist_free(j->send);
    idist_free(j->recv);
    return code;
}

static int worker(int local_rank, void *arg) {
    job j = *(job *)arg;
    (void)local_rank;
    j.device = strcmp(idist_device(), "cpu") != 0;
    if (idist_get_rank() == 0) {
        if (!j.device) printf("no CUDA device for all ranks: this runs on memory of the host\n");
        printf("world of %d, device %s, device backend %s, %zu MiB\n", idist_get_world_size(),
               idist_device(), idist_device_backend(), j.count * sizeof(float) >> 20);
    }
    return j.device ? run_on_device(&j) : run_on_host(&j);
}

// The whole text is a number from 1 to max; otherwise 0.
static int parse(const char *text, int max) {
    char *end = NULL;
    long n = strtol(text, &end, 10);
    return end == text || *end || n < 1 || n > max ? 0 : (int)n;
}

int main(int argc, char **argv) {
    int ranks = argc > 1 ? parse(argv[1], 1024) : RANKS,
        mib = argc > 2 ? parse(argv[2], 65536) : MIB;
    idist_desc desc;
    job j;
    if (!ranks || !mib || argc > 3) {
        fprintf(stderr, "usage: 10_gpu_all_reduce [ranks [MiB]]\n");
        return 2;
    }
    memset(&j, 0, sizeof j);
    j.count = ((size_t)mib << 20) / sizeof(float);
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = desc.init_timeout_ms = 60000;
    // Set: start that many processes. Nothing has called CUDA until here, so that they may be
    // forked.
    if (strcmp(idist_launcher(), "none") == 0) desc.nproc_per_node = ranks;
    CHECK(idist_parallel_run(&desc, worker, &j));
    return 0;
}
