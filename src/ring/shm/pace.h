// ring/shm/pace.h: decides if writes bypass the caches
//
// Before a core writes to a cache line, all other cores must invalidate the line. Cores that share
// a cache do so quickly. Cores with different caches, on one processor or on two, take a long time.
// A store that bypasses the caches does not wait for those cores, and is then several times as
// fast. But the reader then has to fetch the line from memory.
//
// Which way is faster depends on where the two ranks run, and changes when the system moves one of
// them. So some writes are timed, and a few of the timed writes use the way that has been slower so
// far. Only the shortest of the latest times counts, because a rank may be interrupted. All
// functions are called with the world's lock held.
#pragma once

#include "os/clock.h"
#include "os/cpu.h"

enum {
    IDIST__STREAM_BYTES = 4096, // smaller writes are not timed, and go through the caches
    IDIST__PACE_TIMES = 4,      // number of times kept for each way
    // One write in this many is timed. The number is odd, because calls often make groups of 16
    // writes.
    IDIST__PACE_TIMED = 17,
    // One write in this many uses the slower way. The number is a multiple of IDIST__PACE_TIMED, so
    // such a write is timed.
    IDIST__PACE_OTHER = 119
};

// The times of the two ways to write, and the way that is faster. A way is false if writes go
// through the caches, and true if they bypass the caches.
typedef struct idist__pace {
    bool streams;                         // the faster way
    bool way;                             // the way of the current write
    uint32_t count;                       // number of writes so far
    uint32_t turn[2];                     // number of times recorded so far, for each way
    uint32_t times[2][IDIST__PACE_TIMES]; // the latest times in ns per MiB, 0 if none yet
} idist__pace;

// Returns the shortest of the latest times, or 0 if there are fewer than IDIST__PACE_TIMES.
static uint32_t idist__pace_shortest(const idist__pace *p, bool way) {
    uint32_t shortest = p->times[way][0];
    int i;

    for (i = 1; i < IDIST__PACE_TIMES; i++)
        if (p->times[way][i] < shortest) shortest = p->times[way][i];
    return shortest;
}

// Records the time of a write. Chooses to bypass the caches if that takes less than half the time.
// The margin allows for the reader, which then has to fetch the lines from memory.
static void idist__pace_add(idist__pace *p, bool way, int64_t ns, size_t nbytes) {
    int64_t most = INT64_MAX >> 20;
    int64_t time = ((ns < most ? ns : most) << 20) / (int64_t)nbytes;

    time = time < 1 ? 1 : time > UINT32_MAX ? UINT32_MAX : time;
    p->times[way][p->turn[way]++ % IDIST__PACE_TIMES] = (uint32_t)time;
    p->streams = idist__pace_shortest(p, true) &&
                 idist__pace_shortest(p, false) / 2 > idist__pace_shortest(p, true);
}

// Returns true if the next write should bypass the caches. Sets *begin_ns to the current time,
// which the caller passes to idist__pace_end, or to 0 if the write is not timed.
static inline bool idist__pace_begin(idist__pace *p, size_t nbytes, int64_t *begin_ns) {
    uint32_t number;
    bool first;

    *begin_ns = 0;
    if (nbytes < IDIST__STREAM_BYTES) return false;

    number = p->count++;
    first = number < 2 * IDIST__PACE_TIMES;
    p->way = first ? number % 2 == 1 : p->streams != (number % IDIST__PACE_OTHER == 0);
    if (first || number % IDIST__PACE_TIMED == 0) *begin_ns = idist__os_clock_now_ns();

    return p->way;
}

static inline void idist__pace_end(idist__pace *p, int64_t begin_ns, size_t nbytes) {
    if (begin_ns) idist__pace_add(p, p->way, idist__os_clock_now_ns() - begin_ns, nbytes);
}

// Copies nbytes in the way that idist__pace_begin chooses, and times some of the copies.
static inline void idist__pace_copy(idist__pace *p, char *to, const char *from, size_t nbytes) {
    int64_t begin_ns;

    if (idist__pace_begin(p, nbytes, &begin_ns)) idist__os_cpu_stream(to, from, nbytes);
    else memcpy(to, from, nbytes);
    idist__pace_end(p, begin_ns, nbytes);
}
