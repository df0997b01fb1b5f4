// ring/join/segment_map.h: making, mapping and freeing the memory that the ranks of a host share
//
// The file has no name. The root of the host makes it and hands its descriptor to the other ranks
// (ring/join/segment_agree.h); every rank maps it.
//
//   idist__segment_map_new       allocates what a rank keeps about the segment
//   idist__segment_map_create    makes the file; on the root only
//   idist__segment_map_open      maps the file, and reserves what others write to in our part
//   idist__segment_map_free      undoes all of that, as far as it was done
//
// A file in memory has pages only where somebody has written. If the memory of the host or of a
// container is used up, such a write ends the process (SIGBUS). So each rank reserves its part of
// the file before anybody uses it, and a rank that cannot is no more than a rank that votes against
// the segment.
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

static void idist__segment_map_free(const idist_allocator *mem, idist__segment *m) {
    if (!m) return;
    idist__view_unmap_all(m);
    if (m->base) idist__os_memory_unmap(m->base, m->window_at);
    idist__os_descriptor_close(&m->fd);
    idist__os_descriptor_close(&m->beacon);
    idist__os_descriptor_close(&m->observer);
    idist__mem_free(mem, m->views);
    idist__mem_free(mem, m->local);
    idist__mem_free(mem, m->processes);
    idist__mem_free(mem, m->remote_pieces);
    idist__mem_free(mem, m->ports);
    idist__mem_free(mem, m);
}

// Returns NULL when memory is short. m->local has room for twice as many ranks as it needs: the
// caller keeps a second table there.
static idist__segment *idist__segment_map_new(const idist_allocator *mem, size_t world_size) {
    idist__segment *m = (idist__segment *)idist__mem_alloc(mem, sizeof *m);

    if (!m) return NULL;
    m->fd = -1;
    m->beacon = -1;
    m->observer = -1;
    m->local = (int *)idist__mem_alloc(mem, sizeof *m->local * 2 * world_size);
    m->ports = (idist__pipe_port *)idist__mem_alloc(mem, sizeof *m->ports * world_size);
    m->processes = (idist__os_process *)idist__mem_alloc(mem, sizeof *m->processes * world_size);
    m->remote_pieces = (char *)idist__mem_raw(mem, IDIST__REMOTE_PIECE * world_size);
    m->views = (idist__view *)idist__mem_alloc(mem, sizeof *m->views * world_size);
    if (m->local && m->ports && m->processes && m->remote_pieces && m->views) return m;

    idist__segment_map_free(mem, m);

    return NULL;
}

// Makes the file, and sets the layout. The file has no windows if a limit on the size of files does
// not leave room for them. Returns 0, or an errno.
static int idist__segment_map_create(idist__segment *m, size_t shm_nbytes) {
    idist__segment_layout_set(m, shm_nbytes, idist__segment_layout_window_nbytes(m->n));
    m->fd = idist__os_memory_file(idist__segment_layout_file_nbytes(m));
    if (m->fd >= 0) return 0;

    idist__segment_layout_set(m, shm_nbytes, 0);
    m->fd = idist__os_memory_file(idist__segment_layout_file_nbytes(m));

    return m->fd < 0 ? errno : 0;
}

// Reserves memory for our doorbell, our catalog and the pipes to us. Returns 0, or an errno.
static int idist__segment_map_reserve(const idist__segment *m) {
    size_t me = (size_t)m->me;
    int fd = m->fd, error = 0;

    if (idist__os_segment_nbytes(fd) < idist__segment_layout_file_nbytes(m)) return EINVAL;
    if (!me) error = idist__os_memory_reserve(fd, 0, IDIST__PAGE);
    if (!error)
        error = idist__os_memory_reserve(fd, IDIST__PAGE + me * m->front_nbytes,
                                         sizeof(idist__doorbell));
    if (!error)
        error = idist__os_memory_reserve(fd, m->parts_at + me * m->part_nbytes, m->buffers_at);

    return error;
}

// Maps the file, reserves our memory in it, and adds our processors to those of the host. Returns
// 0, or an errno.
static int idist__segment_map_open(idist__segment *m) {
    idist__os_cpu_set cpus;
    int i, error = idist__segment_map_reserve(m);

    if (error) return error;
    m->base = (char *)idist__os_memory_map(m->fd, 0, m->window_at);
    if (!m->base) return errno;

    if (m->window_nbytes) {
        size_t at = m->window_at + (size_t)m->me * m->window_nbytes;
        m->window = idist__window_open(m->fd, at, m->window_nbytes);
        if (!m->window) return ENOMEM;
    }

    idist__os_cpu_usable(&cpus);
    for (i = 0; i < IDIST__CPU_WORDS; i++)
        __atomic_fetch_or(&idist__segment_header_of(m)->cpus.bits[i], cpus.bits[i],
                          __ATOMIC_RELAXED);

    // The world's region: its members take for granted that all of them have it.
    return m->region_count ? idist__pool_reserve(m, 0) : 0;
}
