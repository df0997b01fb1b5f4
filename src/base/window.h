// base/window.h: memory that all ranks of the host have mapped, for idist_alloc
//
// A window is this rank's part of a file that the ranks of the host share. The other ranks read the
// contents of the window without a copy. The window is usually at least as large as the host's
// memory, but takes neither memory nor addresses until idist_alloc needs them. The window grows by
// extents. The owner maps a new extent immediately. The other ranks map the extent when they first
// look for new extents (ring/shm/view.h).
//
//   | extent 0 | extent 1 | extent 2      | hole ...
//
// idist_alloc takes pages from the first gap that is large enough. Blocks may outlive the world;
// freeing the last block unmaps the extents. To find the window of an address, idist_free searches
// a list of all windows.
#pragma once

#include "os/process.h"
#include "os/thread.h"
#include "os/memory.h"

// Maximum number of extents of a window. Few are needed, because a new extent is usually at least
// half as large as all previous extents together.
enum { IDIST__EXTENTS = 40 };
#define IDIST__EXTENT_MIN ((size_t)1 << 20)

typedef struct idist__block {
    struct idist__block *next; // in order of address
    size_t at, nbytes;         // within the extent
} idist__block;

typedef struct idist__window_extent {
    char *map;
    size_t at, nbytes; // within the window
    idist__block *blocks;
} idist__window_extent;

typedef struct idist__window {
    struct idist__window *next;
    int fd;                    // the file, owned by the caller; -1 if somebody else owns the memory
    idist__os_process process; // the creator: a forked child must not discard its parent's pages
    size_t at, nbytes;         // our part of the file
    idist__window_extent extents[IDIST__EXTENTS];
    uint32_t extent_count; // written last; the extents below this index never move
    size_t block_count;
    bool closed; // the world is gone; the last block unmaps the window
} idist__window;

static idist__os_mutex idist__windows_lock = IDIST__OS_MUTEX_INIT;
static idist__window *idist__windows;

// Unmaps and frees a window. Called with the lock held.
static void idist__window_unmap(idist__window *window) {
    idist__window **at;
    uint32_t i;

    for (at = &idist__windows; *at != window; at = &(*at)->next) continue;
    *at = window->next;
    for (i = 0; i < window->extent_count && window->fd >= 0; i++)
        idist__os_memory_unmap(window->extents[i].map, window->extents[i].nbytes);
    free(window);
}

// Creates a window over nbytes of a file, starting at `at`. The file must stay open until the
// window is closed. Returns NULL if memory cannot be allocated.
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

// Creates a window in memory that somebody else has mapped, and will unmap after the window is
// closed. Returns NULL if memory cannot be allocated.
IDIST__UNUSED static idist__window *idist__window_adopt(char *memory, size_t nbytes) {
    idist__window *window = idist__window_open(-1, 0, nbytes);

    if (!window) return NULL;
    window->extents[0].map = memory;
    window->extents[0].nbytes = nbytes;
    __atomic_store_n(&window->extent_count, 1, __ATOMIC_RELEASE);

    return window;
}

// Closes a window. Its memory stays mapped until its last block is freed.
IDIST__UNUSED static void idist__window_close(idist__window *window) {
    idist__os_mutex_lock(&idist__windows_lock);
    window->closed = true;
    if (!window->block_count) idist__window_unmap(window);
    idist__os_mutex_unlock(&idist__windows_lock);
}

// Adds an extent that can hold nbytes. Returns NULL if the window is full or adopted, or if the
// extent cannot be mapped. Called with the lock held.
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

    if (!extent->map) { // a limit may still allow the size that is needed now
        size = nbytes;
        extent->map = (char *)idist__os_memory_map(window->fd, window->at + at, size);
    }

    if (!extent->map) return NULL;
    extent->at = at;
    extent->nbytes = size;
    __atomic_store_n(&window->extent_count, count + 1, __ATOMIC_RELEASE);

    return extent;
}

// Finds a gap of nbytes among the blocks of an extent. Returns the link at which to insert the new
// block, and stores the block's offset in *at. Returns NULL if no gap is large enough. Called with
// the lock held.
static idist__block **idist__window_gap(idist__window_extent *extent, size_t nbytes, size_t *at) {
    idist__block **link;

    *at = 0;
    for (link = &extent->blocks; *link && (*link)->at - *at < nbytes; link = &(*link)->next)
        *at = (*link)->at + (*link)->nbytes;

    return extent->nbytes - *at < nbytes ? NULL : link;
}

// Finds space for a block in the window, which grows if needed, and allocates the block's memory.
// Returns NULL if there is no space or if memory cannot be allocated. Called with the lock held.
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

// Allocates zeroed pages. Returns NULL if no gap is large enough, or if memory cannot be allocated.
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

// Returns the extent that contains p, or NULL. The caller holds the lock, or owns p, which keeps
// the extent mapped.
static idist__window_extent *idist__window_extent_of(idist__window *window, const void *p) {
    uint32_t count = __atomic_load_n(&window->extent_count, __ATOMIC_ACQUIRE), i;

    for (i = 0; i < count; i++) {
        idist__window_extent *extent = &window->extents[i];
        if ((const char *)p >= extent->map && (const char *)p < extent->map + extent->nbytes)
            return extent;
    }

    return NULL;
}

// Frees the block that begins at p. Does nothing if the block was already freed. Returns false if
// no window contains p.
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
