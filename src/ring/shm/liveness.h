// ring/shm/liveness.h: notices that a process has ended
//
// Shared memory does not show that a process has ended, but the beacon of the process does
// (os/beacon.h). From time to time, mostly before it sleeps, a rank checks the beacons of a few
// other ranks. Over several such checks, it covers all beacons. A rank that finds a beacon gone
// records the end of the process in shared memory and wakes all ranks. Shared memory has these
// fields for the ends of processes and pipes:
//
//   doorbell.ended   the process of this rank has died, or has left the world
//   pipe.closed      the writer of this pipe writes nothing more to it
//   ended_count      incremented whenever `ended` or `closed` is set
//
// A rank that sees ended_count increase checks all of its pipes.
#pragma once

#include "os/beacon.h"
#include "ring/shm/segment.h"
#include "ring/shm/doorbell.h"

typedef enum idist__ended_how {
    IDIST__ENDED_NOT = 0,
    IDIST__ENDED_LEFT = 1, // the process itself reported that it left
    IDIST__ENDED_DIED = 2  // another rank found that its beacon is gone
} idist__ended_how;

// Maximum number of sleeping ranks that divide the beacons among themselves, and minimum number of
// beacons that a rank checks each time. If more ranks sleep, each of them sleeps longer between two
// checks.
enum { IDIST__ENDED_SHARERS = 32, IDIST__ENDED_LOOKS_LEAST = 8 };

// Makes all other ranks check their pipes.
static void idist__liveness_wake_all(const idist__segment *seg) {
    int i;

    __atomic_fetch_add(&idist__segment_header_of(seg)->ended_count, 1u, __ATOMIC_RELEASE);
    if (!idist__doorbell_any_asleep(seg)) return;
    for (i = 0; i < seg->n; i++)
        if (i != seg->me) idist__doorbell_wake(seg, i);
}

// Records how the process of a rank ended, and wakes all ranks. The first report wins.
static void idist__liveness_tell(const idist__segment *seg, int rank, idist__ended_how how) {
    uint32_t *ended = &idist__segment_doorbell(seg, rank)->ended, not_yet = IDIST__ENDED_NOT;

    if (__atomic_compare_exchange_n(ended, &not_yet, (uint32_t)how, false, __ATOMIC_ACQ_REL,
                                    __ATOMIC_ACQUIRE))
        idist__liveness_wake_all(seg);
}

static idist__ended_how idist__liveness_get(const idist__segment *seg, int rank) {
    return (idist__ended_how)__atomic_load_n(&idist__segment_doorbell(seg, rank)->ended,
                                             __ATOMIC_ACQUIRE);
}

// Checks the beacon of a rank. If the beacon is gone, reports to all ranks that the process died.
// Returns true if the process has ended.
static bool idist__liveness_look_at(idist__segment *seg, int rank) {
    int error;

    if (rank == seg->me) return false;
    if (idist__liveness_get(seg, rank) != IDIST__ENDED_NOT) return true;
    error = idist__os_beacon_look(seg->observer, &seg->ports[rank].beacon);
    if (error && error != ECONNREFUSED) seg->blind_error = error;
    if (error != ECONNREFUSED) return false;

    idist__liveness_tell(seg, rank, IDIST__ENDED_DIED);

    return true;
}

// Returns the number of ranks on this host that sleep, but at least 1.
static int idist__liveness_sleepers(const idist__segment *seg) {
    uint32_t count =
        __atomic_load_n(&idist__segment_header_of(seg)->sleeper_count, __ATOMIC_RELAXED);
    if (count > (uint32_t)seg->n) count = (uint32_t)seg->n;
    return count ? (int)count : 1;
}

// Returns the factor by which this rank sleeps longer between two checks than a rank that sleeps
// alone.
static int idist__liveness_patience(const idist__segment *seg) {
    int sleepers = idist__liveness_sleepers(seg);
    return sleepers > IDIST__ENDED_SHARERS ? sleepers / IDIST__ENDED_SHARERS : 1;
}

// Returns the number of beacons that a sleeping rank checks each time. A rank that sleeps alone
// checks all beacons. Several sleeping ranks divide the beacons, so that together they check all of
// them about as often.
static int idist__liveness_share(const idist__segment *seg) {
    int sleepers = idist__liveness_sleepers(seg), share;

    if (sleepers > IDIST__ENDED_SHARERS) sleepers = IDIST__ENDED_SHARERS;
    share = seg->n / sleepers;

    return share > IDIST__ENDED_LOOKS_LEAST ? share : IDIST__ENDED_LOOKS_LEAST;
}

// Checks the next `looks` beacons; each check takes about 1 us. Sets `look` in the port of each
// rank that has ended, so that the next read checks the pipe. This includes ends that another rank
// has recorded, because that rank may have been killed before it incremented ended_count.
static void idist__liveness_look(idist__segment *seg, int looks) {
    int i;

    for (i = 0; i < looks && i < seg->n; i++) {
        if (idist__liveness_look_at(seg, seg->next_look)) seg->ports[seg->next_look].look = true;
        seg->next_look = (seg->next_look + 1) % seg->n;
    }
}

// Returns true if any process or pipe has ended since the last call. In that case sets `look` in
// all ports, so that the next reads find out which one.
static bool idist__liveness_any(idist__segment *seg) {
    uint32_t count = __atomic_load_n(&idist__segment_header_of(seg)->ended_count, __ATOMIC_ACQUIRE);
    int i;

    if (count == seg->ended_seen) return false;
    seg->ended_seen = count;
    for (i = 0; i < seg->n; i++) seg->ports[i].look = true;

    return true;
}
