// ring/shm/doorbell.h: sleeping until another rank writes something
//
// A rank that writes something that another one may wait for looks afterwards whether that one
// sleeps, and wakes it. A rank that is about to sleep says so in its doorbell, and then looks once
// more for what was written. One of the two always sees the other, provided that neither's look can
// overtake its own write:
//
//   writer    write data     fence   load asleep: wake it
//   sleeper   store asleep   fence   load data: do not sleep
//
// The writer's fence would wait until the line that it wrote has come over from the other core,
// which takes as long as a small collective. So where the kernel can make the other processes fence
// (membarrier), the sleeper asks for that and the writers have no fence of their own. When cores
// are oversubscribed, sleep is common and each writer has its own (`fenced`).
//
// In a collective a rank usually waits for the next step of one certain member, and says that too:
// if each of n members woke all who wait, a barrier would take n * n wake-ups.
#pragma once

#include "os/cpu.h"
#include "os/wake.h"
#include "os/beacon.h"
#include "ring/shm/segment.h"

typedef enum idist__sleep_place {
    IDIST__AWAKE = 0,
    IDIST__ASLEEP_ON_WORD = 1, // in a futex, on the doorbell
    IDIST__ASLEEP_IN_POLL = 2  // its beacon ends it
} idist__sleep_place;

// Wakes a rank if it sleeps or is about to. The caller has called idist__doorbell_any_asleep since
// it wrote.
static void idist__doorbell_wake(const idist__segment *seg, int rank) {
    idist__doorbell *bell = idist__segment_doorbell(seg, rank);
    uint32_t place = __atomic_load_n(&bell->asleep, __ATOMIC_RELAXED);

    if (place) place = __atomic_exchange_n(&bell->asleep, IDIST__AWAKE, __ATOMIC_ACQ_REL);
    if (place == IDIST__ASLEEP_ON_WORD) idist__os_wake_word(&bell->asleep);
    if (place == IDIST__ASLEEP_IN_POLL)
        idist__os_beacon_wake(seg->observer, &seg->ports[rank].beacon);
}

// The same after a step in a collective, which concerns a rank only if it waits for our steps.
static void idist__doorbell_wake_for_step(const idist__segment *seg, int rank) {
    const idist__doorbell *bell = idist__segment_doorbell(seg, rank);
    uint32_t awaited = __atomic_load_n(&bell->awaited, __ATOMIC_RELAXED);

    if (!awaited || awaited == 1 + (uint32_t)seg->me) idist__doorbell_wake(seg, rank);
}

// Whether any rank sleeps, after something was written.
static bool idist__doorbell_any_asleep(const idist__segment *seg) {
    if (seg->fenced) __atomic_thread_fence(__ATOMIC_SEQ_CST);
    else __atomic_signal_fence(__ATOMIC_SEQ_CST);
    return __atomic_load_n(&idist__segment_header_of(seg)->sleeper_count, __ATOMIC_RELAXED) != 0;
}

// Says that we are about to sleep, and of which rank of this host we await a step (-1: of any). The
// caller looks for what was written, sleeps if there is nothing, and calls idist__doorbell_disarm.
static void idist__doorbell_arm(const idist__segment *seg, uint32_t place, int awaited) {
    idist__doorbell *bell = idist__segment_doorbell(seg, seg->me);

    __atomic_fetch_add(&idist__segment_header_of(seg)->sleeper_count, 1u, __ATOMIC_RELAXED);
    __atomic_store_n(&bell->awaited, (uint32_t)(awaited + 1), __ATOMIC_RELAXED);
    __atomic_store_n(&bell->asleep, place, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (!seg->fenced) idist__os_cpu_fence_others(false);
}

// Another thread of this process is about to begin a call: the one that sleeps must be woken by any
// rank's step from now on.
static void idist__doorbell_widen(const idist__segment *seg) {
    idist__doorbell *bell = idist__segment_doorbell(seg, seg->me);

    if (!__atomic_load_n(&bell->asleep, __ATOMIC_RELAXED)) return;
    __atomic_store_n(&bell->awaited, 0u, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (!seg->fenced) idist__os_cpu_fence_others(false);
}

// Whether another rank has woken us since idist__doorbell_arm.
static bool idist__doorbell_was_rung(const idist__segment *seg) {
    return __atomic_load_n(&idist__segment_doorbell(seg, seg->me)->asleep, __ATOMIC_RELAXED) ==
           IDIST__AWAKE;
}

static void idist__doorbell_disarm(const idist__segment *seg) {
    __atomic_store_n(&idist__segment_doorbell(seg, seg->me)->asleep, IDIST__AWAKE,
                     __ATOMIC_RELAXED);
    __atomic_fetch_sub(&idist__segment_header_of(seg)->sleeper_count, 1u, __ATOMIC_RELAXED);
}

// This rank begins or ends to wait in calls.
static void idist__doorbell_attend(const idist__segment *seg, bool waits) {
    __atomic_store_n(&idist__segment_doorbell(seg, seg->me)->attends, waits ? 1u : 0u,
                     __ATOMIC_RELAXED);
}

// Whether a rank waits in a call, and does not sleep.
static bool idist__doorbell_attends(const idist__segment *seg, int rank) {
    const idist__doorbell *bell = idist__segment_doorbell(seg, rank);

    return __atomic_load_n(&bell->attends, __ATOMIC_RELAXED) &&
           !__atomic_load_n(&bell->asleep, __ATOMIC_RELAXED);
}
