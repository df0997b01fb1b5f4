// ring/shm/doorbell.h: lets a rank sleep until another rank writes something
//
// After a rank has written data, it wakes the ranks that may wait for the data and are asleep. A
// rank that is about to sleep marks its doorbell and then checks once more for new data. At least
// one of the two ranks sees what the other wrote, provided that no load overtakes the store of the
// same rank:
//
//   writer    write data     fence   load asleep: wake the sleeper
//   sleeper   store asleep   fence   load data: do not sleep
//
// A fence in the writer waits until the cache line of its store arrives from the other core, which
// takes as long as a small collective. So where the kernel can execute a fence in other processes
// (membarrier), the sleeper requests that fence, and the writers need none. If there are more ranks
// than cores, ranks sleep often, so each writer executes its own fence (`fenced`).
//
// In a collective, a rank usually waits for the next step of one particular member. The rank's
// doorbell names that member (`awaited`). If each of n members woke every rank that waits, a
// barrier would take n * n wake-ups.
#pragma once

#include "os/cpu.h"
#include "os/wake.h"
#include "os/beacon.h"
#include "ring/shm/segment.h"

typedef enum idist__sleep_place {
    IDIST__AWAKE = 0,
    IDIST__ASLEEP_ON_WORD = 1, // in a futex on the doorbell
    IDIST__ASLEEP_IN_POLL = 2  // in poll; the rank's beacon wakes it
} idist__sleep_place;

// Wakes a rank that sleeps or is about to sleep. The caller has called idist__doorbell_any_asleep
// since its write.
static void idist__doorbell_wake(const idist__segment *seg, int rank) {
    idist__doorbell *bell = idist__segment_doorbell(seg, rank);
    uint32_t place = __atomic_load_n(&bell->asleep, __ATOMIC_RELAXED);

    if (place) place = __atomic_exchange_n(&bell->asleep, IDIST__AWAKE, __ATOMIC_ACQ_REL);
    if (place == IDIST__ASLEEP_ON_WORD) idist__os_wake_word(&bell->asleep);
    if (place == IDIST__ASLEEP_IN_POLL)
        idist__os_beacon_wake(seg->observer, &seg->ports[rank].beacon);
}

// Wakes a rank after we have made a step in a collective, unless the rank waits for a step of
// another member. The caller has called idist__doorbell_any_asleep since the step.
static void idist__doorbell_wake_for_step(const idist__segment *seg, int rank) {
    const idist__doorbell *bell = idist__segment_doorbell(seg, rank);
    uint32_t awaited = __atomic_load_n(&bell->awaited, __ATOMIC_RELAXED);

    if (!awaited || awaited == 1 + (uint32_t)seg->me) idist__doorbell_wake(seg, rank);
}

// Returns true if any rank sleeps. The caller has just written something. Executes the writer's
// fence if seg->fenced is set.
static bool idist__doorbell_any_asleep(const idist__segment *seg) {
    if (seg->fenced) __atomic_thread_fence(__ATOMIC_SEQ_CST);
    else __atomic_signal_fence(__ATOMIC_SEQ_CST);
    return __atomic_load_n(&idist__segment_header_of(seg)->sleeper_count, __ATOMIC_RELAXED) != 0;
}

// Marks our doorbell before we sleep. `awaited` is the rank of this host whose step we wait for, or
// -1 for any rank. The caller then checks for new data, sleeps if there is none, and calls
// idist__doorbell_disarm.
static void idist__doorbell_arm(const idist__segment *seg, uint32_t place, int awaited) {
    idist__doorbell *bell = idist__segment_doorbell(seg, seg->me);

    __atomic_fetch_add(&idist__segment_header_of(seg)->sleeper_count, 1u, __ATOMIC_RELAXED);
    __atomic_store_n(&bell->awaited, (uint32_t)(awaited + 1), __ATOMIC_RELAXED);
    __atomic_store_n(&bell->asleep, place, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (!seg->fenced) idist__os_cpu_fence_others(false);
}

// Lets a step of any rank wake the sleeping thread of this process. Called when another thread of
// this process is about to begin a call.
static void idist__doorbell_widen(const idist__segment *seg) {
    idist__doorbell *bell = idist__segment_doorbell(seg, seg->me);

    if (!__atomic_load_n(&bell->asleep, __ATOMIC_RELAXED)) return;
    __atomic_store_n(&bell->awaited, 0u, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (!seg->fenced) idist__os_cpu_fence_others(false);
}

// Returns true if another rank has woken us since idist__doorbell_arm.
static bool idist__doorbell_was_rung(const idist__segment *seg) {
    return __atomic_load_n(&idist__segment_doorbell(seg, seg->me)->asleep, __ATOMIC_RELAXED) ==
           IDIST__AWAKE;
}

static void idist__doorbell_disarm(const idist__segment *seg) {
    __atomic_store_n(&idist__segment_doorbell(seg, seg->me)->asleep, IDIST__AWAKE,
                     __ATOMIC_RELAXED);
    __atomic_fetch_sub(&idist__segment_header_of(seg)->sleeper_count, 1u, __ATOMIC_RELAXED);
}

// Records in our doorbell whether this rank waits in a call.
static void idist__doorbell_attend(const idist__segment *seg, bool waits) {
    __atomic_store_n(&idist__segment_doorbell(seg, seg->me)->attends, waits ? 1u : 0u,
                     __ATOMIC_RELAXED);
}

// Returns true if a rank waits in a call and does not sleep.
static bool idist__doorbell_attends(const idist__segment *seg, int rank) {
    const idist__doorbell *bell = idist__segment_doorbell(seg, rank);

    return __atomic_load_n(&bell->attends, __ATOMIC_RELAXED) &&
           !__atomic_load_n(&bell->asleep, __ATOMIC_RELAXED);
}
