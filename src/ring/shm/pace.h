// ring/shm/pace.h: whether to write past the caches
//
// Before a core writes to a line, all others have to give it up. Cores that share a cache are quick
// about that. Others, on a processor with several of them or on two, take so long that a store to
// memory past the caches, which does not wait for them, is several times as fast, although the
// reader then finds the line in no cache.
//
// Which it is depends on where the two ranks run, and changes when the system moves one of them. So
// some writes are timed, and a few of those are made in the other way. The shortest of the latest
// times count, because a rank may be interrupted. All this under the lock of the world.
#pragma once

#include "os/clock.h"
#include "os/cpu.h"

enum {
    IDIST__STREAM_BYTES = 4096, // smaller writes are neither timed nor made past the caches
    IDIST__PACE_TIMES = 4,      // kept for each way
    IDIST__PACE_TIMED = 17,     // one write in so many is timed; odd, since calls often write by 16
    IDIST__PACE_OTHER = 119     // one in so many is made in the other way; a multiple of TIMED
};

// There are two ways to write: false is into the caches, true past them.
typedef struct idist__pace {
    bool streams;                         // the way that is faster
    bool way;                             // of the timed write under way
    uint32_t count;                       // writes so far
    uint32_t turn[2];                     // times so far, of each way
    uint32_t times[2][IDIST__PACE_TIMES]; // the latest, ns per MiB; 0: none yet
} idist__pace;

// The shortest of the latest times, or 0 as long as there are too few.
static uint32_t idist__pace_shortest(const idist__pace *p, bool way) {
    uint32_t shortest = p->times[way][0];
    int i;

    for (i = 1; i < IDIST__PACE_TIMES; i++)
        if (p->times[way][i] < shortest) shortest = p->times[way][i];
    return shortest;
}

// A write took so long. The way past the caches is chosen if it takes less than half the time: the
// reader has to get the line from memory afterwards.
static void idist__pace_add(idist__pace *p, bool way, int64_t ns, size_t nbytes) {
    int64_t most = INT64_MAX >> 20;
    int64_t time = ((ns < most ? ns : most) << 20) / (int64_t)nbytes;

    time = time < 1 ? 1 : time > UINT32_MAX ? UINT32_MAX : time;
    p->times[way][p->turn[way]++ % IDIST__PACE_TIMES] = (uint32_t)time;
    p->streams = idist__pace_shortest(p, true) &&
                 idist__pace_shortest(p, false) / 2 > idist__pace_shortest(p, true);
}

// Before a write: whether to make it past the caches. *begin_ns is for idist__pace_end; 0: the
// write is not timed.
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

// Copies in the way that is faster.
static inline void idist__pace_copy(idist__pace *p, char *to, const char *from, size_t nbytes) {
    int64_t begin_ns;

    if (idist__pace_begin(p, nbytes, &begin_ns)) idist__os_cpu_stream(to, from, nbytes);
    else memcpy(to, from, nbytes);
    idist__pace_end(p, begin_ns, nbytes);
}
