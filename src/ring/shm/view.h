// ring/shm/view.h: maps the memory that other ranks got from idist_alloc
//
// A window (base/window.h) is the memory of a rank for idist_alloc, and grows by extents. When
// idist_alloc adds an extent to a rank's window, the rank records the extent in its catalog. The
// other ranks map the extent when they next read the catalog, and then store how many extents they
// have mapped. The owner offers a buffer in the extent to a group only after all members of the
// group have mapped the extent:
//
//   owner     maps extent 3, catalog.extent_count = 4   ...   reads mapped[owner] == 4 everywhere
//   others    see header.extent_count, map extent 3, mapped[owner] = 4
//
// If a rank cannot map more extents because of a limit, calls make an additional copy and do not
// fail. Timing decides whether a buffer is offered, but does not change the result, because ranks
// reduce in the same order in both cases.
#pragma once

#include "os/thread.h"
#include "os/memory.h"
#include "base/window.h"
#include "ring/shm/segment.h"

// Publishes the new extents of our window. Any thread may call this function.
static void idist__view_publish(idist__segment *seg) {
    idist__catalog *catalog = idist__segment_catalog(seg, seg->me);
    uint32_t i, count;

    idist__os_mutex_lock(&idist__windows_lock);
    count = seg->window->extent_count;

    for (i = catalog->extent_count; i < count; i++) {
        catalog->extents[i].at = seg->window->extents[i].at;
        catalog->extents[i].nbytes = seg->window->extents[i].nbytes;
        __atomic_store_n(&catalog->extent_count, i + 1, __ATOMIC_RELEASE);
        __atomic_fetch_add(&idist__segment_header_of(seg)->extent_count, 1, __ATOMIC_RELEASE);
    }

    idist__os_mutex_unlock(&idist__windows_lock);
}

// Maps one more extent of another rank. Returns false if the system cannot map the extent, or if
// the rank's catalog describes an impossible extent.
static bool idist__view_map_next(const idist__segment *seg, int rank, idist__view *view) {
    const idist__catalog *catalog = idist__segment_catalog(seg, rank);
    uint32_t i = view->extent_count;
    size_t at = (size_t)catalog->extents[i].at, nbytes = (size_t)catalog->extents[i].nbytes;
    size_t expected = i ? view->extents[i - 1].at + view->extents[i - 1].nbytes : 0;
    size_t begin = seg->window_at + (size_t)rank * seg->window_nbytes;
    char *map;

    if (at != expected || !nbytes || nbytes > seg->window_nbytes - at) return false;
    map = (char *)idist__os_memory_map(seg->fd, begin + at, nbytes);
    if (!map) return false;

    view->extents[i].map = map;
    view->extents[i].at = at;
    view->extents[i].nbytes = nbytes;
    view->extent_count++;

    return true;
}

// Returns true if any window has a new extent since the views were last updated.
static inline bool idist__view_is_news(const idist__segment *seg) {
    uint32_t *count = &idist__segment_header_of(seg)->extent_count;
    return __atomic_load_n(count, __ATOMIC_RELAXED) != seg->extents_seen;
}

// Adds the extents of our own window to its view.
static void idist__view_map_own(const idist__segment *seg) {
    uint32_t count = __atomic_load_n(&seg->window->extent_count, __ATOMIC_ACQUIRE);
    idist__view *view = &seg->views[seg->me];

    for (; view->extent_count < count; view->extent_count++) {
        const idist__window_extent *extent = &seg->window->extents[view->extent_count];

        view->extents[view->extent_count].map = extent->map;
        view->extents[view->extent_count].at = extent->at;
        view->extents[view->extent_count].nbytes = extent->nbytes;
    }
}

// Maps the extents that were added to the windows since the last call. Returns false if an extent
// could not be mapped. Later calls do not try again, and return true. Called with the world's lock
// held.
static bool idist__view_look(idist__segment *seg) {
    uint32_t seen = __atomic_load_n(&idist__segment_header_of(seg)->extent_count, __ATOMIC_ACQUIRE);
    uint32_t *mapped = idist__segment_mapped(seg, seg->me);
    int i;

    seg->extents_seen = seen;
    idist__view_map_own(seg);
    if (seg->maps_no_more) return true;

    for (i = 0; i < seg->n; i++) {
        const idist__catalog *catalog = idist__segment_catalog(seg, i);
        uint32_t count = __atomic_load_n(&catalog->extent_count, __ATOMIC_ACQUIRE);
        idist__view *view = &seg->views[i];

        if (i == seg->me) continue;
        while (view->extent_count < count && view->extent_count < IDIST__EXTENTS &&
               !seg->maps_no_more)
            seg->maps_no_more = !idist__view_map_next(seg, i, view);
        __atomic_store_n(&mapped[i], view->extent_count, __ATOMIC_RELEASE);
    }

    return !seg->maps_no_more;
}

// Returns the number of extents of our window that a rank of this host has mapped.
static uint32_t idist__view_mapped_by(const idist__segment *seg, int rank) {
    return __atomic_load_n(&idist__segment_mapped(seg, rank)[seg->me], __ATOMIC_ACQUIRE);
}

// Returns the file offset of a buffer in our window, and sets *extent to the index of its extent.
// Returns 0 if no extent contains the whole buffer. Called with the world's lock held.
static uint64_t idist__view_offset(const idist__segment *seg, const void *p, size_t nbytes,
                                   uint32_t *extent) {
    const idist__view *view = &seg->views[seg->me];
    uint32_t i;

    for (i = 0; i < view->extent_count; i++) {
        const char *map = view->extents[i].map;
        size_t at = (size_t)((const char *)p - map);

        if ((const char *)p < map || at >= view->extents[i].nbytes) continue;
        if (nbytes > view->extents[i].nbytes - at) return 0;
        *extent = i;
        return seg->window->at + view->extents[i].at + at;
    }

    return 0;
}

// Returns the local address of the file offset that another rank published. Returns NULL if no
// extent mapped here contains all nbytes at that offset.
static char *idist__view_pointer(const idist__segment *seg, uint64_t offset, size_t nbytes) {
    const idist__view *view;
    uint64_t rank, at;
    uint32_t i;

    if (offset < seg->window_at || !seg->window) return NULL;
    rank = (offset - seg->window_at) / seg->window_nbytes;
    at = (offset - seg->window_at) % seg->window_nbytes;
    if (rank >= (uint64_t)seg->n) return NULL;

    view = &seg->views[rank];
    for (i = 0; i < view->extent_count; i++) {
        uint64_t begin = view->extents[i].at, size = view->extents[i].nbytes;
        if (at >= begin && at - begin < size)
            return nbytes > size - (at - begin) ? NULL : view->extents[i].map + (at - begin);
    }

    return NULL;
}

// Unmaps the windows of the other ranks, and closes our window.
static void idist__view_unmap_all(idist__segment *seg) {
    uint32_t k;
    int i;

    for (i = 0; i < seg->n && seg->views; i++)
        for (k = 0; k < seg->views[i].extent_count && i != seg->me; k++)
            idist__os_memory_unmap(seg->views[i].extents[k].map, seg->views[i].extents[k].nbytes);
    if (seg->window) idist__window_close(seg->window);
}
