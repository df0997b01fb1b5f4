// base/mem.h: memory through the caller's allocator
#pragma once

#include "os/memory.h"
#include "base/fail.h"

// Records that nbytes could not be allocated, and names the limit that was reached, if any.
static void idist__mem_refused(size_t nbytes) {
    char limit[160];

    idist__os_memory_limit(nbytes, limit, sizeof limit);
    idist__fail(IDIST_ERR_NO_MEMORY, "out of memory: cannot allocate %zu bytes%s%s", nbytes,
                *limit ? ": " : "", limit);
}

// Calls alloc_fn. An exception, such as std::bad_alloc, counts as NULL.
IDIST__NOINLINE static void *idist__mem_ask(const idist_allocator *a, size_t nbytes) {
    void *p = NULL;

    IDIST__CALLBACK(p = a->alloc_fn(nbytes, a->user));
    idist__me.thrown[0] = 0;
    return p;
}

// Calls free_fn. Ignores an exception, because the caller can do nothing about it.
IDIST__NOINLINE static void idist__mem_give_back(const idist_allocator *a, void *p) {
    IDIST__CALLBACK(a->free_fn(p, a->user));
    idist__me.thrown[0] = 0;
}

// Allocates memory without zeroing it, for large buffers that are written before they are read. If
// memory cannot be allocated, returns NULL and sets idist_last_error.
static void *idist__mem_raw(const idist_allocator *a, size_t nbytes) {
    void *p;

    if (!nbytes) nbytes = 1;
    p = a && a->alloc_fn ? idist__mem_ask(a, nbytes) : malloc(nbytes);
    if (!p) idist__mem_refused(nbytes);
    return p;
}

// Allocates zeroed memory. If memory cannot be allocated, returns NULL and sets idist_last_error.
static void *idist__mem_alloc(const idist_allocator *a, size_t nbytes) {
    void *p = idist__mem_raw(a, nbytes);

    if (p) memset(p, 0, nbytes ? nbytes : 1);
    return p;
}

// Zeroes an object of 128 bytes or more on a hot path. Hides the size from gcc, which would
// otherwise emit `rep stos`. Starting `rep stos` takes longer than the whole memset.
static inline void idist__mem_clear(void *p, size_t nbytes) {
    __asm__("" : "+r"(nbytes));
    memset(p, 0, nbytes);
}

// Frees memory from idist__mem_raw or idist__mem_alloc. Accepts NULL.
static void idist__mem_free(const idist_allocator *a, void *p) {
    if (!p) return;
    if (a && a->free_fn) idist__mem_give_back(a, p);
    else free(p);
}

// Frees a list whose entries begin with the pointer to the next entry.
IDIST__UNUSED static void idist__mem_free_list(const idist_allocator *mem, void *first) {
    while (first) {
        void *next = *(void **)first;
        idist__mem_free(mem, first);
        first = next;
    }
}
