// base/window.h: memory that all ranks of the host have mapped, for idist_alloc
//
// A window is this rank's part of a file that the ranks of the host share; the others read what
// lies in the window without a copy. The window is as large as the memory of the host, but takes
// neither memory nor addresses until idist_alloc needs them: the window grows by extents, which the
// owner maps at once and the others when they first look for new ones (ring/shm/view.h).
//
//   | extent 0 | extent 1 | extent 2      | hole ...
//
// idist_alloc takes pages from the first gap that is large enough. Blocks may outlive the world,
// and the mappings go with the last of them. idist_free finds the window by the address, hence the
// list of all windows.
#pragma once

#include "os/process.h"
#include "os/thread.h"
#include "os/memory.h"

enum { IDIST__EXTENTS = 40 }; // of a window; each is larger than half of those before it together
#define IDIST__EXTENT_MIN ((size_t)1 << 20)

typedef struct idist__block {
    struct idist__block *next; // by address
    size_t at, nbytes;         // within the extent
} idist__block;

typedef struct idist__window_extent {
    char *map;
    size_t at, nbytes; // within the window
    idist__block *blocks;
} idist__window_extent;

typedef struct idist__window {
    struct idist__window *next;
    int fd;                    // the file, not ours; -1: the memory is somebody else's
    idist__os_process process; // a child made by fork must not discard pages that its parent uses
    size_t at, nbytes;         // our part of the file
    idist__window_extent extents[IDIST__EXTENTS];
    uint32_t extent_count; // written last: an extent below it never changes its place
    size_t block_count;
    bool closed; // the world is gone; unmapped with the last block
} idist__window;

static idist__os_mutex idist__windows_lock = IDIST__OS_MUTEX_INIT;
static idist__window *idist__windows;

// Unmaps and frees a window, under the lock.
static void idist__window_unmap(idist__window *window) {
    idist__window **at;
    uint32_t i;

    for (at = &idist__windows; *at != window; at = &(*at)->next) continue;
    *at = window->next;
    for (i = 0; i < window->extent_count && window->fd >= 0; i++)
        idist__os_memory_unmap(window->extents[i].map, window->extents[i].nbytes);
    free(window);
}

// Makes a window of nbytes bytes of a file, from `at` on. The file must stay open until the window
// is closed. NULL: out of memory.
IDIST__UNUSED static idist__window *idist__window_open(int fd, size_t at, size_t nbytes) {
    idist__window *window = (idist__window *)calloc(1, sizeof *window);

    if (!window) return NULL;
    window->fd = fd;
    window->process = idist__os_process_id();
    window->at = at;
    window->nbytes = nbytes;

    idist__os_mutex_lock(&idist__windows_lock);
    window->next = idist__windows;
    idist__windows = window;
    idist__os_mutex_unlock(&idist__windows_lock);

    return window;
}

// Makes a window of memory that somebody else has mapped, and unmaps after the window is closed.
// NULL: out of memory.
IDIST__UNUSED static idist__window *idist__window_adopt(char *memory, size_t nbytes) {
    idist__window *window = idist__window_open(-1, 0, nbytes);

    if (!window) return NULL;
    window->extents[0].map = memory;
    window->extents[0].nbytes = nbytes;
    __atomic_store_n(&window->extent_count, 1, __ATOMIC_RELEASE);

    return window;
}

IDIST__UNUSED static void idist__window_close(idist__window *window) {
    idist__os_mutex_lock(&idist__windows_lock);
    window->closed = true;
    if (!window->block_count) idist__window_unmap(window);
    idist__os_mutex_unlock(&idist__windows_lock);
}

// Adds an extent with room for nbytes, under the lock. NULL: the window is full, or there are no
// addresses for the extent.
static idist__window_extent *idist__window_grow(idist__window *window, size_t nbytes) {
    size_t page = idist__os_memory_page_nbytes(), at = 0, size;
    uint32_t count = window->extent_count;
    idist__window_extent *extent = &window->extents[count];

    if (window->fd < 0 || count == IDIST__EXTENTS) return NULL;
    if (count) at = extent[-1].at + extent[-1].nbytes;
    if (nbytes > window->nbytes - at) return NULL;

    size = at / 2 / page * page;
    if (size < IDIST__EXTENT_MIN) size = IDIST__EXTENT_MIN;
    if (size < nbytes || size > window->nbytes - at) size = nbytes;
    extent->map = (char *)idist__os_memory_map(window->fd, window->at + at, size);

    if (!extent->map) { // a limit, which may leave room for what is needed now
        size = nbytes;
        extent->map = (char *)idist__os_memory_map(window->fd, window->at + at, size);
    }

    if (!extent->map) return NULL;
    extent->at = at;
    extent->nbytes = size;
    __atomic_store_n(&window->extent_count, count + 1, __ATOMIC_RELEASE);

    return extent;
}

// Returns where a block of nbytes fits into the blocks of an extent, and its offset in *at. NULL:
// no gap is large enough. Under the lock.
static idist__block **idist__window_gap(idist__window_extent *extent, size_t nbytes, size_t *at) {
    idist__block **link;

    *at = 0;
    for (link = &extent->blocks; *link && (*link)->at - *at < nbytes; link = &(*link)->next)
        *at = (*link)->at + (*link)->nbytes;

    return extent->nbytes - *at < nbytes ? NULL : link;
}

// Finds a place for a block in the window, which grows if need be, and takes memory for the block.
// NULL: there is no place, or no memory. Under the lock.
static char *idist__window_place(idist__window *window, idist__block *block) {
    idist__window_extent *extent = NULL;
    idist__block **link = NULL;
    uint32_t i;

    for (i = 0; i < window->extent_count && !link; i++) {
        extent = &window->extents[i];
        link = idist__window_gap(extent, block->nbytes, &block->at);
    }

    if (!link) {
        extent = idist__window_grow(window, block->nbytes);
        if (extent) link = idist__window_gap(extent, block->nbytes, &block->at);
    }

    if (!link) return NULL;
    if (window->fd >= 0 && idist__os_memory_reserve(window->fd, window->at + extent->at + block->at,
                                                    block->nbytes) != 0)
        return NULL;

    block->next = *link;
    *link = block;
    window->block_count++;

    return extent->map + block->at;
}

// Allocates zeroed pages. NULL: no gap is large enough, or out of memory.
IDIST__UNUSED static void *idist__window_alloc(idist__window *window, size_t nbytes) {
    size_t page = idist__os_memory_page_nbytes();
    idist__block *block = NULL;
    char *memory;

    if (nbytes <= window->nbytes) block = (idist__block *)malloc(sizeof *block);
    if (!block) return NULL;
    block->nbytes = (nbytes + page - 1) / page * page + (nbytes ? 0 : page);

    idist__os_mutex_lock(&idist__windows_lock);
    memory = idist__window_place(window, block);
    if (memory && window->fd < 0) memset(memory, 0, nbytes);
    idist__os_mutex_unlock(&idist__windows_lock);
    if (!memory) free(block);

    return memory;
}

// Returns the extent that p lies in, or NULL. The caller holds the lock, or owns p, which keeps the
// extent.
static idist__window_extent *idist__window_extent_of(idist__window *window, const void *p) {
    uint32_t count = __atomic_load_n(&window->extent_count, __ATOMIC_ACQUIRE), i;

    for (i = 0; i < count; i++) {
        idist__window_extent *extent = &window->extents[i];
        if ((const char *)p >= extent->map && (const char *)p < extent->map + extent->nbytes)
            return extent;
    }

    return NULL;
}

// Frees the block that begins at p; nothing, if that was freed before. False: p lies in no window.
static bool idist__window_free(void *p) {
    idist__window_extent *extent = NULL;
    idist__window *window;
    idist__block **link, *block = NULL;

    idist__os_mutex_lock(&idist__windows_lock);
    for (window = idist__windows; window; window = window->next) {
        extent = idist__window_extent_of(window, p);
        if (extent) break;
    }

    if (extent) {
        for (link = &extent->blocks; *link && (char *)p != extent->map + (*link)->at;)
            link = &(*link)->next;
        block = *link;
        if (block) *link = block->next;
    }

    if (block) {
        if (window->fd >= 0 && window->process == idist__os_process_id())
            idist__os_memory_discard(p, block->nbytes);
        window->block_count--;
        if (window->closed && !window->block_count) idist__window_unmap(window);
    }

    idist__os_mutex_unlock(&idist__windows_lock);
    free(block);

    return extent != NULL;
}
