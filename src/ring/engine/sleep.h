// ring/engine/sleep.h: sleeps, wakes, and waits until everything is written
//
// A rank sleeps in one of three ways:
//
//   no shared memory             in poll, on ring->watch (all connections), the connector's
//                                sockets, and this process's wake-up descriptor
//   shared memory and sockets    in poll as well, with its beacon in the set; its doorbell says
//                                ASLEEP_IN_POLL, so ranks of this host wake it through the beacon
//   shared memory only           on its doorbell, a futex (ASLEEP_ON_WORD)
//
// With shared memory the rank also checks for processes that have ended. It does so every
// IDIST__LOOK_NS (10 ms), in a long wait every 30 ms, and less often while many ranks sleep. See
// ring/shm/liveness.h.
//
// A rank marks its doorbell before it sleeps and then checks everything once more, so no wake-up is
// lost between the check and the sleep. A doorbell that has been rung is not rung again. The last
// check may itself consume a wake-up (it polls when there are many sockets), so we sleep only while
// the doorbell is still marked. Another thread that reads the links while we sleep may also consume
// a wake-up; that thread must call `wake` afterwards.
#pragma once

#include "os/clock.h"
#include "os/thread.h"
#include "os/wake.h"
#include "os/poll.h"
#include "core/model.h"
#include "ring/shm/segment.h"
#include "ring/shm/doorbell.h"
#include "ring/msg/ring_model.h"
#include "ring/msg/link.h"
#include "ring/share/share.h"
#include "ring/connect/connector.h"
#include "ring/engine/progress.h"

// Sleeps beside the other ranks of this host, in poll or on the doorbell. Returns when something
// happens or it is time to look for processes that have ended. Each sleep that nothing interrupts
// makes the next one a little longer.
static void idist__sleep_near_others(idist__ring *ring, int64_t now_ns, int64_t until_ns) {
    idist__world *w = ring->w;
    const idist__segment *seg = ring->shm;
    int64_t look_ns = now_ns + idist__progress_look_ns(seg) + ring->extra_sleep_ns;
    int64_t wake_ns = look_ns < until_ns ? look_ns : until_ns;

    if (ring->polled_link_count) {
        idist__progress_sleep(ring, wake_ns);
    } else {
        idist__os_mutex_unlock(&w->lock);
        idist__os_wake_await_word(&idist__segment_doorbell(seg, seg->me)->asleep,
                                  IDIST__ASLEEP_ON_WORD, wake_ns);
        idist__os_mutex_lock(&w->lock);
    }

    if (idist__os_clock_now_ns() < look_ns) ring->extra_sleep_ns = 0;
    else if (ring->extra_sleep_ns < 2 * IDIST__LOOK_NS) ring->extra_sleep_ns += IDIST__MS;
}

// Sleeps until input arrives, `wake` is called or the deadline passes. Handles what has arrived.
static void idist__sleep_begin(idist__world *w, int64_t until_ns) {
    idist__ring *ring = idist__ring_of(w);
    const idist__segment *seg = ring->shm;
    uint32_t ended = w->wait.ended_count;
    int64_t now_ns = idist__os_clock_now_ns();
    uint32_t place = ring->polled_link_count ? IDIST__ASLEEP_IN_POLL : IDIST__ASLEEP_ON_WORD;
    int awaited;

    idist__progress_uncork(ring);
    if (ring->ask_again_ns && ring->ask_again_ns < until_ns) until_ns = ring->ask_again_ns;

    if (!seg) {
        idist__progress_sleep(ring, until_ns);
        idist__ring_settle(ring);
        return;
    }

    idist__progress_look(ring, now_ns, true);
    awaited = idist__share_awaited(ring);
    idist__doorbell_arm(seg, place, awaited);
    idist__progress_move_all(ring);

    if (w->wait.ended_count == ended && !ring->failed && !idist__doorbell_was_rung(seg) &&
        idist__share_awaited(ring) == awaited)
        idist__sleep_near_others(ring, now_ns, until_ns);

    idist__doorbell_disarm(seg);
    idist__ring_settle(ring);
}

// Tells the other ranks of the host whether this rank is in a call that waits.
static void idist__sleep_attend(idist__world *w, bool waits) {
    const idist__ring *ring = idist__ring_of(w);
    if (ring->shm) idist__doorbell_attend(ring->shm, waits);
}

// Ends the sleep of a thread of this process. The caller holds the world's lock.
static void idist__sleep_wake(idist__world *w) {
    const idist__ring *ring = idist__ring_of(w);
    const idist__segment *seg = ring->shm;

    if (seg && __atomic_load_n(&idist__segment_doorbell(seg, seg->me)->asleep, __ATOMIC_RELAXED) ==
                   IDIST__ASLEEP_ON_WORD)
        idist__doorbell_wake(seg, seg->me);
    else idist__os_poll_wakeup_signal(ring->wake);
}

// Returns true if frames are waiting to be written. When all ranks leave cleanly, also returns true
// while a BYE has yet to arrive or an attempt to connect continues.
static bool idist__sleep_is_busy(const idist__ring *ring, bool clean) {
    int i;

    for (i = 0; i < ring->w->group.size; i++) {
        const idist__link *l = &ring->links[i];
        if (!idist__link_is_connected(l)) continue;
        if (l->out && !l->write_dead) return true;
        if (clean && !l->bye && l->transport->lossy_close) return true;
    }

    return clean && ring->connector && idist__connector_leave(ring->connector);
}

static void idist__sleep_drain(idist__ring *ring, bool clean, int64_t until_ns) {
    while (idist__sleep_is_busy(ring, clean) && idist__os_clock_ms_until(until_ns) != 0) {
        // Our doorbell is not marked, so no rank wakes us when a pipe has space again.
        int64_t soon_ns = idist__os_clock_now_ns() + IDIST__MS;

        idist__progress_sleep(ring, soon_ns < until_ns && ring->shm ? soon_ns : until_ns);
        idist__progress_look(ring, idist__os_clock_now_ns(), true);
        idist__progress_move_all(ring);
    }
}

static void idist__sleep_flush(idist__world *w, int64_t until_ns) {
    idist__sleep_drain(idist__ring_of(w), false, until_ns);
    idist__ring_settle(idist__ring_of(w));
}
