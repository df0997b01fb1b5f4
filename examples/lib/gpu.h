// gpu.h - device memory, or host memory without a device; the macro CUDA checks a call
#ifndef EXAMPLES_GPU_H
#define EXAMPLES_GPU_H

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>

#define CUDA(call)                                                                 \
    do {                                                                           \
        cudaError_t error_ = (call);                                               \
        if (error_ != cudaSuccess) {                                               \
            fprintf(stderr, "%s failed: %s\n", #call, cudaGetErrorString(error_)); \
            return 1;                                                              \
        }                                                                          \
    } while (0)

// The stream is NULL in all functions below if there is no device.

// Copies between host and device, and waits for the copy. Without a device both are the same
// memory.
static inline int gpu_copy(void *to, const void *from, size_t nbytes, cudaStream_t stream) {
    if (!stream) return 0;
    CUDA(cudaMemcpyAsync(to, from, nbytes, cudaMemcpyDefault, stream));
    CUDA(cudaStreamSynchronize(stream));
    return 0;
}

// Allocates `count` floats, all 0.
static inline int gpu_zeros(float **at, int count, cudaStream_t stream) {
    size_t nbytes = (size_t)count * sizeof **at;

    if (!stream) return (*at = (float *)calloc(1, nbytes)) == NULL;
    CUDA(cudaMalloc((void **)at, nbytes));
    CUDA(cudaMemsetAsync(*at, 0, nbytes, stream));
    return 0;
}

static inline void gpu_free(float *at, cudaStream_t stream) {
    if (stream) cudaFree(at);
    else free(at);
}

#endif // EXAMPLES_GPU_H
