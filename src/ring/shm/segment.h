// ring/shm/segment.h: the layout of the shared file, and reads from the memory of other processes
//
// WHAT IT IS
//
// The segment is a file in memory that all ranks of a host have mapped. It contains a doorbell for
// each rank, on which the rank sleeps until another rank wakes it. It also contains a pipe from
// each rank to each other rank. The two pipes between two ranks carry their link. The rest of the
// file is for collectives (ring/share/) and for idist_alloc. The ranks need no connections to each
// other, so a rank uses as many descriptors on a host with 1,000 ranks as on a host with two.
//
// HOW IT FITS
//
// ring/join/segment_map.h creates and maps the file. ring/join/segment_layout.h determines the
// offsets in the file. When all ranks of the host agree (ring/join/segment_agree.h), the links
// inside the host use idist__pipe_transport. ring/engine/sleep.h sleeps on the doorbell.
//
// A MESSAGE THROUGH A PIPE
//
// idist__pipe_write            copies to the ring buffer, publishes the new tail
// idist__doorbell_any_asleep   takes one load in the common case, when no rank sleeps
// idist__doorbell_wake         wakes the rank through its futex or its beacon
// idist__pipe_read             loads the tail, copies the bytes out, publishes the new head
//
// LAYOUT
//
// The file has no name. Ranks are numbered from 0 in the order of their world ranks.
//
//   | header | front 0 | front 1 | ... | part 0 | part 1 | ... | window 0 | window 1 | ...
//
//   front    doorbell | head of region 0, for the collectives of the world (ring/share/region.h)
//   part     catalog | a pipe from each rank | buffers of region 0 | head, buffers of region 1 ...
//   window   a hole until idist_alloc allocates pages in it (base/window.h); mapped only then
//
// Each rank has one front, one part and one window. The fronts hold the data that all ranks of the
// host read often. Keeping that data together saves page tables, because each process has its own.
// If each of 512 processes read one word in each of 512 parts of 4 MiB, the tables would take
// 1 GiB.
//
// Memory is reserved before any rank uses it, so that no access to it can fail. The memory of
// doorbells, pipes and the world's region is reserved when the file is mapped. The memory of any
// other region is reserved when the region is first offered to a group (ring/share/pool.h).
#pragma once

#include "os/process.h"
#include "os/cpu.h"
#include "os/memory.h"
#include "os/socket.h"
#include "base/window.h"
#include "ring/shm/pace.h"

#define IDIST__LINE ((size_t)64)   // size of a cache line
#define IDIST__PAGE ((size_t)4096) // unit of the layout
// Offset of our buffers from the start of a page. Programs often align their buffers to pages. If
// the low 12 bits of two addresses are equal, a copy between them takes several times as long. The
// processor then assumes that the loads depend on the stores.
#define IDIST__BUFFERS_SKEW ((size_t)1152)
#define IDIST__REMOTE_PIECE ((size_t)128 * 1024) // unit of cross-memory reads that feed a reduction
#define IDIST__SAMPLE_BYTES ((size_t)64 * 1024)  // size of the sample for timing such reads
#define IDIST__SAMPLE_PIECE ((size_t)16 * 1024)  // unit in which the sample is read
// Number of bytes after which a write to a pipe, or a read from it, lets the peer continue. So the
// reader copies out of the pipe while the writer still copies into it.
#define IDIST__SLICE_BYTES ((size_t)32 * 1024)
// Maximum size of a pipe. Two ranks that send to each other both write until the pipes are full,
// then both read. The larger the pipes, the less often the ranks wait for each other.
#define IDIST__PIPE_MAX ((size_t)512 * 1024)
#define IDIST__PREFETCH_BYTES ((size_t)1024) // maximum to prefetch for writing

typedef struct idist__doorbell {
    uint32_t asleep;  // an idist__sleep_place
    uint32_t awaited; // 1 + the rank of this host whose step the sleeper awaits; 0 for any rank
    uint32_t attends; // 1 while the rank is in a call that waits
    char pad[52];
    int64_t pid; // the process of this rank, whose memory other ranks read
    // A random number in that process, and its address. A rank that can read the number can read
    // all memory of the process.
    uint64_t proof, proof_address;
    idist__counter withdrawn; // number of sends that ended early; reads of their buffers are void
    uint64_t sample_address;  // address of a sample of memory; see ring/join/segment_probe.h
    uint32_t ended;           // an idist__ended_how
    char pad2[20];
} idist__doorbell;

typedef struct idist__segment_header {
    // Number of ranks that sleep or are about to sleep. If the number is 0, a writer need not check
    // any doorbell.
    uint32_t sleeper_count;
    char pad[60];
    uint32_t fenced; // set once by the lowest rank for all ranks; see idist__doorbell_any_asleep
    uint32_t ncores; // number of processors that all ranks together may use
    idist__os_cpu_set cpus; // the processors that all ranks together may use
    uint32_t ended_count;   // incremented whenever `ended` or `closed` is set
    uint32_t extent_count;  // number of extents in all windows
} idist__segment_header;

// Describes the window of a rank to the other ranks. Only the rank that owns the window writes to
// the catalog. An array follows the catalog of each rank. Entry k of the array is the number of
// extents of rank k that the owner of the array has mapped.
typedef struct idist__catalog {
    uint32_t extent_count; // stored after the extent that it counts
    uint32_t pad;
    struct {
        uint64_t at, nbytes; // offset in the window, and size
    } extents[IDIST__EXTENTS];
} idist__catalog;

// A ring buffer from one rank to another. The data follows this struct. The counters never
// decrease. Only the writer stores to `tail` and `closed`, and only the reader stores to `head`.
typedef struct idist__pipe {
    idist__counter tail; // number of bytes written so far
    uint32_t closed;     // 1 once nothing more will be written
    char pad[52];
    idist__counter head; // number of bytes read so far
    char pad2[56];
} idist__pipe;

typedef struct idist__pipe_port { // our end of a link through two pipes
    struct idist__segment *shm;
    idist__pipe *in, *out;
    uint64_t head, tail;      // our private counters, which the peer cannot change
    uint64_t out_head;        // out->head as of our last load
    idist__pace pace;         // times of our writes
    int peer;                 // rank of the peer on this host
    bool look;                // some process or pipe has ended; the next read checks this one
    idist__os_address beacon; // beacon of the peer
} idist__pipe_port;

typedef struct idist__view { // the extents of a rank's window that are mapped here
    uint32_t extent_count;
    struct {
        char *map;
        size_t at, nbytes; // offset in the window, and size
    } extents[IDIST__EXTENTS];
} idist__view;

typedef struct idist__segment {
    int fd;                       // descriptor of the file
    char *base;                   // mapping of everything except the windows
    idist__window *window;        // our window, or NULL if there are no windows
    idist__view *views;           // views of the windows, by rank on this host
    uint32_t extents_seen;        // header->extent_count when the views were last updated
    bool maps_no_more;            // true once mapping an extent of another rank has failed
    int n, me;                    // number of ranks on this host, and our rank among them
    bool oversubscribed;          // there are more ranks than cores
    bool fenced;                  // see idist__doorbell_any_asleep
    bool reads_remote;            // each rank can read the memory of all other ranks
    bool reads_fast;              // such a read takes at most as long as two copies
    idist__pace pace;             // times of our writes to the buffers of collectives
    idist__pace window_pace;      // times of our writes to the windows of other ranks
    uint64_t proof;               // random number that other ranks read as a test
    idist__os_process *processes; // processes by rank on this host
    // Scratch for cross-memory reads that feed a reduction: IDIST__REMOTE_PIECE for each rank.
    char *remote_pieces;
    int *local; // rank on this host by world rank, -1 if on another host

    size_t pipe_nbytes;              // capacity of a pipe
    size_t front_nbytes;             // size of a front; the fronts follow the first page
    size_t parts_at, part_nbytes;    // offset of the first part, size of each part
    size_t window_at, window_nbytes; // offset of the first window, size of each window
    size_t pipes_at;                 // offset of the pipes in a part
    size_t buffers_at;      // offset in a part of region 0's buffers; the other regions follow
    size_t chunk_nbytes[2]; // size of a buffer in region 0, and in other regions

    int region_count;            // number of regions of each rank
    int reserved_count;          // number of our regions that have memory; they come first
    bool taken[64];              // true if a group uses this region of ours
    uint32_t region_members[64]; // number of members of that group on this host
    uint64_t region_groups[64];  // ctx of that group

    idist__pipe_port *ports; // ports by rank on this host

    // Our beacon, and the descriptor with which we check the beacons of other ranks.
    int beacon, observer;
    int next_look;       // rank whose beacon we check next
    uint32_t ended_seen; // ended_count when `look` was last set in all ports
    int blind_error;     // errno of the last failed check of a beacon, or 0
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

// Returns the numbers of extents that a rank has mapped: one number for each rank of the host.
static uint32_t *idist__segment_mapped(const idist__segment *seg, int rank) {
    return (uint32_t *)(void *)(idist__segment_catalog(seg, rank) + 1);
}

// Copies from the memory of another rank's process. Returns 0 or an errno.
static int idist__segment_read_remote(const idist__segment *seg, int rank, uint64_t address,
                                      void *buf, size_t nbytes) {
    return idist__os_process_read_memory(seg->processes[rank], address, buf, nbytes);
}
