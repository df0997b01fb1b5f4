// ring/join/segment_map.h: makes, maps and frees the memory that the ranks of a host share
//
// The file has no name. The host's root makes the file, and sends the descriptor down the tree to
// the other ranks (ring/join/segment_agree.h). Every rank maps the file.
//
//   idist__segment_map_new       allocates this rank's own state of the segment
//   idist__segment_map_create    makes the file; on the root only
//   idist__segment_map_open      maps the file, and reserves our memory that other ranks write to
//   idist__segment_map_free      undoes whichever of these steps were done
//
// A file in memory has pages only where a process has written. If the memory of the host or
// container is exhausted, the first write to a page ends the process (SIGBUS). So each rank
// reserves its part of the file before any rank uses it. A rank that cannot reserve its part merely
// votes against the segment.
#pragma once

#include "os/cpu.h"
#include "os/memory.h"
#include "os/poll.h"
#include "os/process.h"
#include "os/segment.h"
#include "base/mem.h"
#include "base/window.h"
#include "ring/shm/segment.h"
#include "ring/shm/view.h"
#include "ring/share/pool.h"
#include "ring/join/segment_layout.h"

static void idist__segment_map_free(const idist_allocator *mem, idist__segment *seg) {
    if (!seg) return;
    idist__view_unmap_all(seg);
    if (seg->base) idist__os_memory_unmap(seg->base, seg->window_at);
    idist__os_descriptor_close(&seg->fd);
    idist__os_descriptor_close(&seg->beacon);
    idist__os_descriptor_close(&seg->observer);
    idist__mem_free(mem, seg->views);
    idist__mem_free(mem, seg->local);
    idist__mem_free(mem, seg->processes);
    idist__mem_free(mem, seg->remote_pieces);
    idist__mem_free(mem, seg->ports);
    idist__mem_free(mem, seg);
}

// Allocates a segment that is not mapped yet. Returns NULL if out of memory. The array seg->local
// has space for 2 * world_size ranks, because the caller keeps a second table there.
static idist__segment *idist__segment_map_new(const idist_allocator *mem, size_t world_size) {
    idist__segment *seg = (idist__segment *)idist__mem_alloc(mem, sizeof *seg);

    if (!seg) return NULL;
    seg->fd = -1;
    seg->beacon = -1;
    seg->observer = -1;
    seg->local = (int *)idist__mem_alloc(mem, sizeof *seg->local * 2 * world_size);
    seg->ports = (idist__pipe_port *)idist__mem_alloc(mem, sizeof *seg->ports * world_size);
    seg->processes =
        (idist__os_process *)idist__mem_alloc(mem, sizeof *seg->processes * world_size);
    seg->remote_pieces = (char *)idist__mem_raw(mem, IDIST__REMOTE_PIECE * world_size);
    seg->views = (idist__view *)idist__mem_alloc(mem, sizeof *seg->views * world_size);
    if (seg->local && seg->ports && seg->processes && seg->remote_pieces && seg->views) return seg;

    idist__segment_map_free(mem, seg);

    return NULL;
}

// Makes the file, and sets the layout. The file has no windows if a limit on the size of files
// leaves no space for them. Returns 0, or an errno.
static int idist__segment_map_create(idist__segment *seg, size_t shm_nbytes) {
    idist__segment_layout_set(seg, shm_nbytes, idist__segment_layout_window_nbytes(seg->n));
    seg->fd = idist__os_memory_file(idist__segment_layout_file_nbytes(seg));
    if (seg->fd >= 0) return 0;

    idist__segment_layout_set(seg, shm_nbytes, 0);
    seg->fd = idist__os_memory_file(idist__segment_layout_file_nbytes(seg));

    return seg->fd < 0 ? errno : 0;
}

// Reserves memory for our doorbell, our catalog and the pipes to us. Returns 0, or an errno.
static int idist__segment_map_reserve(const idist__segment *seg) {
    size_t me = (size_t)seg->me;
    int fd = seg->fd, error = 0;

    if (idist__os_segment_nbytes(fd) < idist__segment_layout_file_nbytes(seg)) return EINVAL;
    if (!me) error = idist__os_memory_reserve(fd, 0, IDIST__PAGE);
    if (!error)
        error = idist__os_memory_reserve(fd, IDIST__PAGE + me * seg->front_nbytes,
                                         sizeof(idist__doorbell));
    if (!error)
        error =
            idist__os_memory_reserve(fd, seg->parts_at + me * seg->part_nbytes, seg->buffers_at);

    return error;
}

// Maps the file, reserves our memory in it, and adds our processors to the host's set. Returns 0,
// or an errno.
static int idist__segment_map_open(idist__segment *seg) {
    idist__os_cpu_set cpus;
    int i, error = idist__segment_map_reserve(seg);

    if (error) return error;
    seg->base = (char *)idist__os_memory_map(seg->fd, 0, seg->window_at);
    if (!seg->base) return errno;

    if (seg->window_nbytes) {
        size_t at = seg->window_at + (size_t)seg->me * seg->window_nbytes;
        seg->window = idist__window_open(seg->fd, at, seg->window_nbytes);
        if (!seg->window) return ENOMEM;
    }

    idist__os_cpu_usable(&cpus);
    for (i = 0; i < IDIST__CPU_WORDS; i++)
        __atomic_fetch_or(&idist__segment_header_of(seg)->cpus.bits[i], cpus.bits[i],
                          __ATOMIC_RELAXED);

    // Reserves the world's region: every member assumes that all members have it.
    return seg->region_count ? idist__pool_reserve(seg, 0) : 0;
}
