// xla_memory.h - device memory for on_device.c: that of a PJRT plug-in
#ifndef XLA_MEMORY_H
#define XLA_MEMORY_H

typedef struct memory_block {
    idist_xla_buffer *buffer;
    char *data; // host memory of the buffer's size
    size_t nbytes;
} memory_block;

// Copies nbytes to a new buffer of this dtype, or of bytes if XLA does not have the dtype. Sets *to
// to the buffer's address.
static memory_block *memory_put(idist_group *g, const char *from, size_t nbytes, idist_dtype dtype,
                                char **to) {
    memory_block *b = (memory_block *)calloc(1, sizeof *b);
    if (!b || (b->data = (char *)malloc(nbytes)) == NULL) abort();
    if (!idist__pjrt_type_of(dtype) || nbytes % idist_dtype_size(dtype)) dtype = IDIST_U8;
    if (idist_xla_buffer_put(from, nbytes / idist_dtype_size(dtype), dtype, g, &b->buffer) !=
        IDIST_OK) {
        fprintf(stderr, "put: %s\n", idist_last_error());
        abort();
    }
    b->nbytes = nbytes;
    *to = (char *)b->buffer;
    return b;
}

// Copies nbytes from a buffer. The offset in the buffer is `from` minus the buffer's address.
static void memory_get(memory_block *b, const char *from, char *to, size_t nbytes) {
    if (idist_xla_buffer_get(b->buffer, b->data, b->nbytes, -1) != IDIST_OK) {
        fprintf(stderr, "get: %s\n", idist_last_error());
        abort();
    }
    memcpy(to, b->data + (from - (const char *)b->buffer), nbytes);
}

static void memory_give(memory_block *b) {
    if (!b) return;
    idist_xla_buffer_free(&b->buffer);
    free(b->data);
    free(b);
}
#endif
