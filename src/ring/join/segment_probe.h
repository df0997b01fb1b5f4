// ring/join/segment_probe.h: tests if ranks of a host can read each other's memory, and how fast
//
// A rank can read another process's memory through the kernel (os/process.h). That saves a copy.
// There may be three obstacles. A container or a security module may forbid such reads. If two
// ranks are in different containers, the pid of one rank may belong to another process in the other
// container. Finally, the processor may take several times as long to read data in another core's
// cache.
//
//   idist__segment_probe_prepare    each rank stores in its doorbell the addresses of a random
//                                   number and of a sample of its memory
//   -                               the ranks vote, so all of them have prepared
//   idist__segment_probe_reads      each rank reads the number of every other rank, and times
//                                   reading the sample of the rank before it
//
// The result is a vote: all ranks of a host use the fastest way that all of them can use. Each rank
// writes its sample twice: to its private memory, and to the pipe from the rank that will read it.
// The reader compares the time of a read through the kernel with the time of a copy from the pipe.
#pragma once

#include "os/clock.h"
#include "os/cpu.h"
#include "os/process.h"
#include "os/random.h"
#include "ring/shm/segment.h"

enum { // votes; the lowest vote decides
    IDIST__READS_NOT,
    IDIST__READS_SLOWLY,
    IDIST__READS_FAST
};

// Prepares the speed test that the next rank runs. Writes to a block of our private memory and to a
// block of the pipe from that rank, which is still unused. Both blocks are then in our cache, as
// contributions usually are.
static void idist__segment_probe_leave_sample(const idist__segment *seg) {
    if (seg->n == 1 || seg->pipe_nbytes < IDIST__SAMPLE_BYTES) return;
    memset(seg->remote_pieces, 1, IDIST__SAMPLE_BYTES);
    memset(idist__segment_pipe(seg, (seg->me + 1) % seg->n, seg->me) + 1, 1, IDIST__SAMPLE_BYTES);
}

// Publishes the addresses that the other ranks need to read our memory. The segment is mapped
// already.
static void idist__segment_probe_prepare(idist__segment *seg) {
    idist__doorbell *bell = idist__segment_doorbell(seg, seg->me);

    idist__os_random(&seg->proof, sizeof seg->proof);
    bell->pid = idist__os_process_id();
    bell->proof = seg->proof;
    bell->proof_address = (uint64_t)(uintptr_t)&seg->proof;
    bell->sample_address = (uint64_t)(uintptr_t)seg->remote_pieces;
    idist__segment_probe_leave_sample(seg);
}

// Returns true if we can read the memory of all other ranks, and each pid belongs to the right
// process.
static bool idist__segment_probe_reads_all(idist__segment *seg) {
    int i;

    for (i = 0; i < seg->n; i++) {
        const idist__doorbell *bell = idist__segment_doorbell(seg, i);
        uint64_t proof = 0;
        uint64_t proof_address = bell->proof_address;

        seg->processes[i] = (idist__os_process)bell->pid;
        if (seg->processes[i] <= 0) return false;
        if (idist__segment_read_remote(seg, i, proof_address, &proof, sizeof proof) != 0)
            return false;
        if (proof != bell->proof) return false;
    }

    return true;
}

// Returns true if the kernel reads the memory of another process at least half as fast as we read
// memory shared with it. Some processors need five times as long for data in the other process's
// cache. The sample is read in small pieces, and the fastest piece counts, because interrupts may
// have slowed down the others.
static bool idist__segment_probe_reads_fast(const idist__segment *seg) {
    int from = (seg->me + seg->n - 1) % seg->n;
    const char *shared = (const char *)(idist__segment_pipe(seg, seg->me, from) + 1);
    uint64_t address = idist__segment_doorbell(seg, from)->sample_address;
    char *to = seg->remote_pieces + IDIST__SAMPLE_BYTES;
    int64_t remote_ns = IDIST__FOREVER, shared_ns = IDIST__FOREVER;
    size_t at;

    for (at = 0; at < IDIST__SAMPLE_BYTES; at += IDIST__PAGE) to[at] = shared[at]; // maps the pages

    for (at = 0; at < IDIST__SAMPLE_BYTES; at += IDIST__SAMPLE_PIECE) {
        int64_t begin_ns = idist__os_clock_now_ns(), between_ns, end_ns;

        if (idist__segment_read_remote(seg, from, address + at, to, IDIST__SAMPLE_PIECE) != 0)
            return false;
        between_ns = idist__os_clock_now_ns();
        memcpy(to, shared + at, IDIST__SAMPLE_PIECE);
        end_ns = idist__os_clock_now_ns();
        if (between_ns - begin_ns < remote_ns) remote_ns = between_ns - begin_ns;
        if (end_ns - between_ns < shared_ns) shared_ns = end_ns - between_ns;
    }

    return remote_ns <= 2 * shared_ns;
}

// Returns this rank's vote on how to read the memory of other ranks. Called when all ranks have
// prepared. Ranks that share cores cannot measure the speed, and vote IDIST__READS_FAST. Uses
// head->cpus, because rank 0 may not have written head->ncores yet.
static char idist__segment_probe_reads(idist__segment *seg) {
    const idist__segment_header *head = idist__segment_header_of(seg);

    if (!idist__segment_probe_reads_all(seg)) return IDIST__READS_NOT;
    if (seg->n == 1 || seg->n > idist__os_cpu_set_count(&head->cpus)) return IDIST__READS_FAST;
    if (seg->pipe_nbytes < IDIST__SAMPLE_BYTES) return IDIST__READS_FAST;
    return idist__segment_probe_reads_fast(seg) ? IDIST__READS_FAST : IDIST__READS_SLOWLY;
}
