// gpu_ranks.h - shared parts of the tests of idist_nccl.h on the stand-ins for libcudart and
// libnccl
#ifndef GPU_RANKS_H
#define GPU_RANKS_H

#include "idist_nccl.h"

#include <cuda_runtime_api.h>
#include <nccl.h>

#include "fake.h"
#include "ranks.h"

#define CUDA(call) rank_check((call) == cudaSuccess, "%s", #call)

static inline int32_t *device_of(int32_t value, size_t count) {
    int32_t *p = NULL, *host = (int32_t *)malloc(count * sizeof *host);
    for (size_t i = 0; i < count; i++) host[i] = value;
    CUDA(cudaMalloc((void **)&p, count * sizeof *p));
    CUDA(cudaMemcpy(p, host, count * sizeof *p, cudaMemcpyHostToDevice));
    CUDA(cudaStreamSynchronize(cudaStreamLegacy));
    free(host);
    return p;
}

static inline int32_t first_of(const int32_t *device) {
    int32_t x = -1;
    CUDA(cudaMemcpy(&x, device, sizeof x, cudaMemcpyDeviceToHost));
    return x;
}

static inline cudaStream_t new_stream(void) {
    cudaStream_t s = NULL;
    CUDA(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    return s;
}

static inline idist_opts on_stream(idist_group *g, cudaStream_t stream) {
    idist_opts o = opts_of(g);
    o.stream = stream;
    return o;
}

// Warnings and errors that idist_desc.logger has received.
static char said[4000];
static inline void keep_said(idist_log_level level, const char *line, void *user) {
    size_t used = strlen(said);
    (void)user;
    if (level <= IDIST_LOG_WARN) snprintf(said + used, sizeof said - used, "%s\n", line);
}

#endif // GPU_RANKS_H
