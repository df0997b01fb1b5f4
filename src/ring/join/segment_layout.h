// ring/join/segment_layout.h: where things lie in the memory that the ranks of a host share
//
// ring/shm/segment.h has the picture of the file. All offsets and sizes follow from three numbers:
// the ranks on this host, the shared memory of each rank (desc.shm_nbytes of the root), and the
// size of a window. So the ranks need to send each other no more than these.
//
//   pipes      a rank has one from each rank: as large as possible, at most IDIST__PIPE_MAX, and in
//              all at most a quarter of its memory
//   region 0   half of what is left goes to its buffers, up to IDIST__CHUNK_MAX each
//   others     as many as fit, with buffers of a quarter of the size
//   window     a hole that costs nothing until idist_alloc fills it: as large as the memory of the
//              host, because a program may allocate all of it
//
// Where memory is too short for region 0, there are no regions, and collectives are messages.
#pragma once

#include "os/memory.h"
#include "os/segment.h"
#include "ring/shm/segment.h"
#include "ring/share/region.h"

// Returns the size of the file.
static size_t idist__segment_layout_file_nbytes(const idist__segment *m) {
    return m->window_at + (size_t)m->n * m->window_nbytes;
}

static size_t idist__segment_layout_round_up(size_t nbytes) {
    return (nbytes + IDIST__PAGE - 1) & ~(IDIST__PAGE - 1);
}

// Sets the offsets and sizes in *m, of which n is known.
static void idist__segment_layout_set(idist__segment *m, size_t shm_nbytes, size_t window_nbytes) {
    size_t used, room, first, other, chunk, page = idist__os_memory_page_nbytes();

    m->pipe_nbytes = IDIST__PIPE_MAX;
    while (m->pipe_nbytes > IDIST__PAGE && (size_t)m->n * m->pipe_nbytes > shm_nbytes / 4)
        m->pipe_nbytes /= 2;

    m->pipes_at = sizeof(idist__catalog) + (size_t)m->n * sizeof(uint32_t);
    m->pipes_at = (m->pipes_at + IDIST__LINE - 1) & ~(IDIST__LINE - 1);
    m->buffers_at = m->pipes_at + (size_t)m->n * (sizeof(idist__pipe) + m->pipe_nbytes);
    m->buffers_at = idist__segment_layout_round_up(m->buffers_at) + IDIST__BUFFERS_SKEW;
    used = sizeof(idist__doorbell) + m->buffers_at;
    room = shm_nbytes > used ? shm_nbytes - used : 0;

    chunk = room / (2 * IDIST__BUFFERS);
    if (chunk > IDIST__CHUNK_MAX) chunk = IDIST__CHUNK_MAX;
    m->chunk_nbytes[0] = chunk & ~(IDIST__LINE - 1);
    m->chunk_nbytes[1] = (chunk / 4) & ~(IDIST__LINE - 1);
    first = IDIST__REGION_HEAD_BYTES + IDIST__BUFFERS * m->chunk_nbytes[0];
    other = IDIST__REGION_HEAD_BYTES + IDIST__BUFFERS * m->chunk_nbytes[1];

    m->region_count = room < first ? 0 : 1 + (int)((room - first) / other);
    if (m->region_count > (int)IDIST__COUNT_OF(m->taken))
        m->region_count = (int)IDIST__COUNT_OF(m->taken);

    m->front_nbytes = sizeof(idist__doorbell);
    m->part_nbytes = m->buffers_at;

    if (m->region_count) {
        m->front_nbytes += IDIST__REGION_HEAD_BYTES;
        m->part_nbytes += IDIST__BUFFERS * m->chunk_nbytes[0];
        m->part_nbytes += (size_t)(m->region_count - 1) * other;
    }

    m->front_nbytes = idist__segment_layout_round_up(m->front_nbytes);
    m->part_nbytes = idist__segment_layout_round_up(m->part_nbytes);
    m->parts_at = IDIST__PAGE + (size_t)m->n * m->front_nbytes;
    m->window_at = m->parts_at + (size_t)m->n * m->part_nbytes;
    m->window_at = (m->window_at + page - 1) / page * page; // mapped by itself
    m->window_nbytes = window_nbytes;
    m->reserved_count = 0;
}

// Returns the size of a window: at least the memory of the host, a power of two. Returns 0 where
// addresses have 32 bits.
static size_t idist__segment_layout_window_nbytes(int n) {
    uint64_t ram = idist__os_segment_ram();
    uint64_t nbytes = (uint64_t)1 << 30;

    if (sizeof(void *) < 8) return 0;
    while (nbytes < ram && nbytes * (uint64_t)n < (uint64_t)1 << 42) nbytes *= 2;

    return (size_t)nbytes;
}
