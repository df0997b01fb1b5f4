// ring/join/segment_layout.h: the layout of the memory that the ranks of a host share
//
// ring/shm/segment.h has a picture of the file. Three numbers determine all offsets and sizes.
// These are the number of ranks on this host, the shared memory per rank (the root's
// desc.shm_nbytes), and the window size. All ranks know the first number, so only the other two are
// sent down the tree.
//
//   pipes      a rank has one pipe from each rank: as large as possible, at most IDIST__PIPE_MAX,
//              and all pipes together at most a quarter of the rank's memory
//   region 0   half of the remaining memory is for its buffers, up to IDIST__CHUNK_MAX each
//   others     as many regions as fit, with buffers of a quarter of the size
//   window     a hole that costs nothing until idist_alloc fills it: as large as the host's
//              memory, because a program may allocate all of it
//
// If the memory is too small for region 0, there are no regions, and collectives use messages.
#pragma once

#include "os/memory.h"
#include "os/segment.h"
#include "ring/shm/segment.h"
#include "ring/share/region.h"

// Returns the size of the file.
static size_t idist__segment_layout_file_nbytes(const idist__segment *seg) {
    return seg->window_at + (size_t)seg->n * seg->window_nbytes;
}

static size_t idist__segment_layout_round_up(size_t nbytes) {
    return (nbytes + IDIST__PAGE - 1) & ~(IDIST__PAGE - 1);
}

// Sets the offsets and sizes in *seg. The caller has set seg->n.
static void idist__segment_layout_set(idist__segment *seg, size_t shm_nbytes,
                                      size_t window_nbytes) {
    size_t used, room, first, other, chunk, page = idist__os_memory_page_nbytes();

    seg->pipe_nbytes = IDIST__PIPE_MAX;
    while (seg->pipe_nbytes > IDIST__PAGE && (size_t)seg->n * seg->pipe_nbytes > shm_nbytes / 4)
        seg->pipe_nbytes /= 2;

    seg->pipes_at = sizeof(idist__catalog) + (size_t)seg->n * sizeof(uint32_t);
    seg->pipes_at = (seg->pipes_at + IDIST__LINE - 1) & ~(IDIST__LINE - 1);
    seg->buffers_at = seg->pipes_at + (size_t)seg->n * (sizeof(idist__pipe) + seg->pipe_nbytes);
    seg->buffers_at = idist__segment_layout_round_up(seg->buffers_at) + IDIST__BUFFERS_SKEW;
    used = sizeof(idist__doorbell) + seg->buffers_at;
    room = shm_nbytes > used ? shm_nbytes - used : 0;

    chunk = room / (2 * IDIST__BUFFERS);
    if (chunk > IDIST__CHUNK_MAX) chunk = IDIST__CHUNK_MAX;
    seg->chunk_nbytes[0] = chunk & ~(IDIST__LINE - 1);
    seg->chunk_nbytes[1] = (chunk / 4) & ~(IDIST__LINE - 1);
    first = IDIST__REGION_HEAD_BYTES + IDIST__BUFFERS * seg->chunk_nbytes[0];
    other = IDIST__REGION_HEAD_BYTES + IDIST__BUFFERS * seg->chunk_nbytes[1];

    seg->region_count = room < first ? 0 : 1 + (int)((room - first) / other);
    if (seg->region_count > (int)IDIST__COUNT_OF(seg->taken))
        seg->region_count = (int)IDIST__COUNT_OF(seg->taken);

    seg->front_nbytes = sizeof(idist__doorbell);
    seg->part_nbytes = seg->buffers_at;

    if (seg->region_count) {
        seg->front_nbytes += IDIST__REGION_HEAD_BYTES;
        seg->part_nbytes += IDIST__BUFFERS * seg->chunk_nbytes[0];
        seg->part_nbytes += (size_t)(seg->region_count - 1) * other;
    }

    seg->front_nbytes = idist__segment_layout_round_up(seg->front_nbytes);
    seg->part_nbytes = idist__segment_layout_round_up(seg->part_nbytes);
    seg->parts_at = IDIST__PAGE + (size_t)seg->n * seg->front_nbytes;
    seg->window_at = seg->parts_at + (size_t)seg->n * seg->part_nbytes;
    seg->window_at = (seg->window_at + page - 1) / page * page; // mapped separately
    seg->window_nbytes = window_nbytes;
    seg->reserved_count = 0;
}

// Returns the size of a window: a power of two of at least 1 GiB. The window covers the host's
// memory, unless all windows together reach 4 TiB first. Returns 0 if addresses have 32 bits.
static size_t idist__segment_layout_window_nbytes(int n) {
    uint64_t ram = idist__os_segment_ram();
    uint64_t nbytes = (uint64_t)1 << 30;

    if (sizeof(void *) < 8) return 0;
    while (nbytes < ram && nbytes * (uint64_t)n < (uint64_t)1 << 42) nbytes *= 2;

    return (size_t)nbytes;
}
