// ring/shm/segment.h: layout of the shared file, and reading the memory of other processes
//
// WHAT IT IS
//
// A file in memory that all ranks of a host have mapped, and two things made of it: a doorbell for
// each rank, on which it sleeps until another one wakes it, and a pipe for each pair of ranks, the
// transport of their link. The rest of the file is for collectives (ring/share/) and for
// idist_alloc. The ranks need no connection to each other, and a rank has as many descriptors on a
// host of 1,000 ranks as on one of two.
//
// HOW IT FITS
//
// ring/join/segment_map.h creates and maps the file, where its parts are as
// ring/join/segment_layout.h says. When all ranks of the host agree (ring/join/segment_agree.h),
// the links inside the host use idist__pipe_transport. ring/engine/sleep.h sleeps on the doorbell.
//
// A MESSAGE THROUGH A PIPE
//
// idist__pipe_write            copy to the ring buffer, publish the new tail
// idist__doorbell_any_asleep   one load in the common case: nobody sleeps
// idist__doorbell_wake         futex, or the beacon of the rank
// idist__pipe_read             load the tail, copy out, publish the new head
//
// One file in memory, without a name, mapped by all ranks of the host. Ranks are numbered from 0 in
// the order of their world ranks.
//
//   | header | front 0 | front 1 | ... | part 0 | part 1 | ... | window 0 | window 1 | ...
//
//   front    doorbell | head of region 0, for the collectives of the world (ring/share/region.h)
//   part     catalog | a pipe from each rank | buffers of region 0 | head, buffers of region 1 ...
//   window   a hole, until idist_alloc fills pages of it (base/window.h); not mapped before that
//
// Each rank has one of each. What all ranks of the world look at often is in the fronts, to need
// fewer page tables, which every process has for itself: with parts of 4 MiB and one look at each,
// 512 processes would have 1 GiB of them.
//
// Memory is reserved before anybody uses it, so that no access to it can fail: for doorbells, pipes
// and the world's region when the file is mapped, for another region when it is first lent to a
// group (ring/share/pool.h).
#pragma once

#include "os/process.h"
#include "os/cpu.h"
#include "os/memory.h"
#include "os/socket.h"
#include "base/window.h"
#include "ring/shm/pace.h"

#define IDIST__LINE ((size_t)64)   // of a cache
#define IDIST__PAGE ((size_t)4096) // the layout's unit
// Programs align buffers to pages. Ours are not: copies between addresses that agree in their low
// 12 bits are several times as slow, because the processor takes loads and stores for dependent.
#define IDIST__BUFFERS_SKEW ((size_t)1152)
#define IDIST__REMOTE_PIECE ((size_t)128 * 1024) // of a cross-memory read that is reduced at once
#define IDIST__SAMPLE_BYTES ((size_t)64 * 1024)  // read to find out how fast that is, ...
#define IDIST__SAMPLE_PIECE ((size_t)16 * 1024)  // ... in such pieces
// A write or read of a pipe lets the other side go on after so many bytes: while one copies in, the
// other copies out.
#define IDIST__SLICE_BYTES ((size_t)32 * 1024)
// Two ranks that send to each other both write until the pipes are full, then both read. The larger
// the pipe, the less often they wait for each other in between.
#define IDIST__PIPE_MAX ((size_t)512 * 1024)
#define IDIST__PREFETCH_BYTES ((size_t)1024) // to prefetch for writing, at most

typedef struct idist__doorbell {
    uint32_t asleep;  // an idist__sleep_place
    uint32_t awaited; // 1 + the rank of this host of which the sleeper awaits a step; 0: of any
    uint32_t attends; // 1 while it is in a call that waits
    char pad[52];
    int64_t pid; // of the process whose memory this rank is in, ...
    uint64_t proof,
        proof_address;        // ... a random number in it, and where: who reads that can read all
    idist__counter withdrawn; // sends that ended early: what was read in their buffers is invalid
    uint64_t sample_address;  // and of a block in it, for idist__segment_probe_reads_fast
    uint32_t ended;           // an idist__ended_how
    char pad2[20];
} idist__doorbell;

typedef struct idist__segment_header {
    uint32_t sleeper_count; // ranks that sleep or are about to; spares the others a look at each
                            // doorbell
    char pad[60];
    uint32_t fenced;        // set once by the lowest rank, for all; see idist__doorbell_any_asleep
    uint32_t ncores;        // processors that all ranks together may use, ...
    idist__os_cpu_set cpus; // ... and which
    uint32_t ended_count;   // goes up with each doorbell that says `ended`, and each closed pipe
    uint32_t extent_count;  // of all windows together
} idist__segment_header;

// The window of a rank as the others see it; written by that rank only. Behind the catalog each
// rank has an array with an entry for each rank k: the number of extents of k that it has mapped.
typedef struct idist__catalog {
    uint32_t extent_count; // written last
    uint32_t pad;
    struct {
        uint64_t at, nbytes; // within the window
    } extents[IDIST__EXTENTS];
} idist__catalog;

// A ring buffer from one rank to another; the bytes follow. The counters never go back, and each is
// written by one side only.
typedef struct idist__pipe {
    idist__counter tail; // bytes written so far
    uint32_t closed;     // nothing more will be written
    char pad[52];
    idist__counter head; // bytes read so far
    char pad2[56];
} idist__pipe;

typedef struct idist__pipe_port { // our end of a link through two pipes
    struct idist__segment *shm;
    idist__pipe *in, *out;
    uint64_t head, tail;      // our own counters, kept where the peer cannot change them
    uint64_t out_head;        // how far the peer had read when we last had to look
    idist__pace pace;         // of our writes
    int peer;                 // its rank on this host
    bool look;                // some process or pipe has ended; it may be this one
    idist__os_address beacon; // of the peer
} idist__pipe_port;

typedef struct idist__view { // of the window of a rank: what is mapped here
    uint32_t extent_count;
    struct {
        char *map;
        size_t at, nbytes; // within the window
    } extents[IDIST__EXTENTS];
} idist__view;

typedef struct idist__segment {
    int fd;                       // of the file
    char *base;                   // everything but the windows
    idist__window *window;        // ours; NULL: there are no windows
    idist__view *views;           // of the windows, by rank on this host
    uint32_t extents_seen;        // how much of header->extent_count the views show
    bool maps_no_more;            // an extent of another rank could not be mapped
    int n, me;                    // ranks on this host, and ours
    bool oversubscribed;          // there are more ranks than cores
    bool fenced;                  // see idist__doorbell_any_asleep
    bool reads_remote;            // each rank can read the memory of all others, ...
    bool reads_fast;              // ... and it takes no longer than two copies
    idist__pace pace;             // of our writes to the buffers of collectives, ...
    idist__pace window_pace;      // ... and to the windows of other ranks
    uint64_t proof;               // the others read it to find that out
    idist__os_process *processes; // by rank on this host
    char *remote_pieces; // cross-memory reads to be reduced: IDIST__REMOTE_PIECE for each rank
    int *local;          // rank on this host by world rank; -1: on another one

    size_t pipe_nbytes;              // of the bytes in one
    size_t front_nbytes;             // the fronts come behind the first page
    size_t parts_at, part_nbytes;    // offset of the first part; of each part
    size_t window_at, window_nbytes; // the same for the windows, which are not mapped
    size_t pipes_at;                 // offset in a part: the pipes
    size_t buffers_at;               // offset in a part: the buffers of region 0, then the others
    size_t chunk_nbytes[2];          // of a buffer in region 0, and in the others

    int region_count;            // regions of each rank
    int reserved_count;          // how many of ours have memory: the first ones
    bool taken[64];              // ours: whether a group has it, ...
    uint32_t region_members[64]; // ... how many members of it are on this host, ...
    uint64_t region_groups[64];  // ... and its ctx

    idist__pipe_port *ports; // by rank on this host

    int beacon, observer; // ours, and the descriptor with which we look at those of the others
    int next_look;        // the rank whose beacon we look at next
    uint32_t ended_seen;  // how much of ended_count has reached our ports
    int blind_error;      // the errno with which a look at a beacon failed; 0: none did
} idist__segment;

static char *idist__segment_front(const idist__segment *seg, int rank) {
    return seg->base + IDIST__PAGE + (size_t)rank * seg->front_nbytes;
}

static char *idist__segment_part(const idist__segment *seg, int rank) {
    return seg->base + seg->parts_at + (size_t)rank * seg->part_nbytes;
}

static idist__segment_header *idist__segment_header_of(const idist__segment *seg) {
    return (idist__segment_header *)(void *)seg->base;
}

static idist__doorbell *idist__segment_doorbell(const idist__segment *seg, int rank) {
    return (idist__doorbell *)(void *)idist__segment_front(seg, rank);
}

static idist__pipe *idist__segment_pipe(const idist__segment *seg, int from, int to) {
    size_t pipe_nbytes = sizeof(idist__pipe) + seg->pipe_nbytes;
    char *part = idist__segment_part(seg, to);

    return (idist__pipe *)(void *)(part + seg->pipes_at + (size_t)from * pipe_nbytes);
}

static idist__catalog *idist__segment_catalog(const idist__segment *seg, int rank) {
    return (idist__catalog *)(void *)idist__segment_part(seg, rank);
}

// How many extents of other ranks a rank has mapped: one number for each rank.
static uint32_t *idist__segment_mapped(const idist__segment *seg, int rank) {
    return (uint32_t *)(void *)(idist__segment_catalog(seg, rank) + 1);
}

// Copies from the memory of another rank's process. 0, or an errno.
static int idist__segment_read_remote(const idist__segment *seg, int rank, uint64_t address,
                                      void *buf, size_t nbytes) {
    return idist__os_process_read_memory(seg->processes[rank], address, buf, nbytes);
}
