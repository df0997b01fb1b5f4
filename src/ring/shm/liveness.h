// ring/shm/liveness.h: noticing that a process has ended
//
// Memory does not tell when the process that writes to it ends; its beacon does. Each rank that
// sleeps looks now and then at the beacons of some others, at all of them in turn. Whoever finds
// that one has gone out writes that down for all, and wakes them:
//
//   doorbell.ended   the process of this rank has died, or has left the world
//   pipe.closed      the rank writes nothing more to this pipe
//   ended_count      incremented whenever one of the two is set
//
// A rank that sees the count go up looks at all of its pipes.
#pragma once

#include "os/beacon.h"
#include "ring/shm/segment.h"
#include "ring/shm/doorbell.h"

typedef enum idist__ended_how {
    IDIST__ENDED_NOT = 0,
    IDIST__ENDED_LEFT = 1, // it says so itself
    IDIST__ENDED_DIED = 2  // somebody has found that its beacon had gone out
} idist__ended_how;

// Up to this many sleepers share the work; if there are more, each sleeps longer.
enum { IDIST__ENDED_SHARERS = 32, IDIST__ENDED_LOOKS_LEAST = 8 };

// Makes all others look at their pipes.
static void idist__liveness_wake_all(const idist__segment *seg) {
    int i;

    __atomic_fetch_add(&idist__segment_header_of(seg)->ended_count, 1u, __ATOMIC_RELEASE);
    if (!idist__doorbell_any_asleep(seg)) return;
    for (i = 0; i < seg->n; i++)
        if (i != seg->me) idist__doorbell_wake(seg, i);
}

// The process of a rank has ended in this way. The first report wins.
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

// Looks at the beacon of a rank, and tells all if it has gone out. Returns whether the process has
// ended.
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

// Ranks of this host that sleep, ourselves included.
static int idist__liveness_sleepers(const idist__segment *seg) {
    uint32_t count =
        __atomic_load_n(&idist__segment_header_of(seg)->sleeper_count, __ATOMIC_RELAXED);
    if (count > (uint32_t)seg->n) count = (uint32_t)seg->n;
    return count ? (int)count : 1;
}

// How many times longer than alone a rank sleeps between two looks.
static int idist__liveness_patience(const idist__segment *seg) {
    int sleepers = idist__liveness_sleepers(seg);
    return sleepers > IDIST__ENDED_SHARERS ? sleepers / IDIST__ENDED_SHARERS : 1;
}

// At how many beacons a rank that sleeps looks at a time. Alone it looks at all; with others that
// sleep, all of them together do, in about the same time.
static int idist__liveness_share(const idist__segment *seg) {
    int sleepers = idist__liveness_sleepers(seg), share;

    if (sleepers > IDIST__ENDED_SHARERS) sleepers = IDIST__ENDED_SHARERS;
    share = seg->n / sleepers;

    return share > IDIST__ENDED_LOOKS_LEAST ? share : IDIST__ENDED_LOOKS_LEAST;
}

// Looks at the next beacons, about 1 us each. The rank that noticed an end may itself have been
// killed before it told the others, so we read the pipe of a rank that has ended in any case.
static void idist__liveness_look(idist__segment *seg, int looks) {
    int i;

    for (i = 0; i < looks && i < seg->n; i++) {
        if (idist__liveness_look_at(seg, seg->next_look)) seg->ports[seg->next_look].look = true;
        seg->next_look = (seg->next_look + 1) % seg->n;
    }
}

// Whether any process or pipe has ended since the last call; then reading will find out which one.
static bool idist__liveness_any(idist__segment *seg) {
    uint32_t count = __atomic_load_n(&idist__segment_header_of(seg)->ended_count, __ATOMIC_ACQUIRE);
    int i;

    if (count == seg->ended_seen) return false;
    seg->ended_seen = count;
    for (i = 0; i < seg->n; i++) seg->ports[i].look = true;

    return true;
}
