// cuda_memory.h - device memory for on_device.c: CUDA's
#ifndef CUDA_MEMORY_H
#define CUDA_MEMORY_H

// A block of device memory. Blocks are kept for reuse, because allocating a block takes longer than
// everything else.
typedef struct memory_block {
    struct memory_block *next;
    char *at;
    size_t nbytes;
} memory_block;

static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;
static memory_block *memory_spare;

// Copies nbytes to the device. Sets *to to the address of the copy, which is aligned no better than
// `from`.
static memory_block *memory_put(idist_group *g, const char *from, size_t nbytes, idist_dtype dtype,
                                char **to) {
    memory_block **at, *b;
    size_t shift = (uintptr_t)from & 15, want = nbytes + shift + 1;
    (void)g;
    (void)dtype;
    pthread_mutex_lock(&memory_lock);
    for (at = &memory_spare; *at && (*at)->nbytes < want; at = &(*at)->next) continue;
    if ((b = *at) != NULL) *at = b->next;
    pthread_mutex_unlock(&memory_lock);
    if (!b) {
        if ((b = (memory_block *)calloc(1, sizeof *b)) == NULL) abort();
        b->nbytes = want < 65536 ? 65536 : 2 * want;
        if (cudaMalloc((void **)&b->at, b->nbytes) != cudaSuccess) abort();
    }
    *to = b->at + shift;
    if (cudaMemcpy(*to, from, nbytes, cudaMemcpyHostToDevice) != cudaSuccess) abort();
    return b;
}

// Copies nbytes from the device.
static void memory_get(memory_block *b, const char *from, char *to, size_t nbytes) {
    (void)b;
    if (cudaMemcpy(to, from, nbytes, cudaMemcpyDeviceToHost) != cudaSuccess) abort();
}

static void memory_give(memory_block *b) {
    if (!b) return;
    pthread_mutex_lock(&memory_lock);
    b->next = memory_spare;
    memory_spare = b;
    pthread_mutex_unlock(&memory_lock);
}
#endif
