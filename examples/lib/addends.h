// addends.h - arrays of floats that 10_gpu_all_reduce sums, in device memory, or in host memory
// without a device; include idist.h first
#ifndef EXAMPLES_ADDENDS_H
#define EXAMPLES_ADDENDS_H

#include "gpu.h"

#include <stdbool.h>
#include <string.h>

enum { ADDENDS_PERIOD = 1000 }; // elements after which the numbers repeat

typedef struct addends {
    bool device;
    size_t count, nbytes; // of each array
    float *host;          // data for the device, then the sums
    float *send, *recv;   // on the device, or on the host without a device
} addends;

// Allocates the arrays. With a device, `host` is pinned, because copies to or from other host
// memory make the host wait.
static inline int addends_create(addends *a, bool device, size_t count) {
    a->device = device;
    a->count = count;
    a->nbytes = count * sizeof *a->host;
    if (device) {
        CUDA(cudaMallocHost((void **)&a->host, a->nbytes));
        CUDA(cudaMalloc((void **)&a->send, a->nbytes));
        CUDA(cudaMalloc((void **)&a->recv, a->nbytes));
        return 0;
    }
    a->host = (float *)malloc(a->nbytes);
    a->send = (float *)idist_alloc(a->nbytes, NULL); // other ranks read it without a copy
    a->recv = (float *)idist_alloc(a->nbytes, NULL);
    if (a->host && a->send && a->recv) return 0;
    return fprintf(stderr, "no memory for 3 arrays of %zu bytes\n", a->nbytes), 1;
}

static inline int addends_free(addends *a) {
    if (a->device) {
        CUDA(cudaFree(a->send));
        CUDA(cudaFree(a->recv));
        CUDA(cudaFreeHost(a->host));
        return 0;
    }
    free(a->host);
    idist_free(a->send);
    idist_free(a->recv);
    return 0;
}

// Copies one array to another. Returns when the copy is complete.
static inline int addends_copy(const addends *a, float *to, const float *from) {
    if (a->device) CUDA(cudaMemcpy(to, from, a->nbytes, cudaMemcpyDefault));
    else memcpy(to, from, a->nbytes);
    return 0;
}

// Fills `host` with this rank's numbers. The numbers are small integers, so every sum is exact.
static inline void addends_fill(const addends *a, int rank) {
    for (size_t i = 0; i < a->count; i++) a->host[i] = (float)(i % ADDENDS_PERIOD + (size_t)rank);
}

// Returns 0 if `host` holds the sums over all ranks. Otherwise prints the first wrong element and
// returns 1.
static inline int addends_verify(const addends *a, int rank, int ranks, const char *how) {
    size_t n = (size_t)ranks;

    for (size_t i = 0; i < a->count; i++) {
        size_t expected = n * (i % ADDENDS_PERIOD) + n * (n - 1) / 2;

        if (a->host[i] == (float)expected) continue;
        fprintf(stderr, "rank %d, %s: element %zu is %g, expected %zu\n", rank, how, i,
                (double)a->host[i], expected);
        return 1;
    }
    return 0;
}

#endif // EXAMPLES_ADDENDS_H
