// os/clock.h: monotonic time, deadlines, pauses, the time of day
#pragma once

#include "os/system.h"

//------------------------------------------------------------------------------
// monotonic time, deadlines, pauses
//
// A deadline is a point of the monotonic clock in nanoseconds.
//------------------------------------------------------------------------------

static const int64_t IDIST__MS = 1000000; // nanoseconds in a millisecond
static const int64_t IDIST__FOREVER = INT64_MAX;

// Now. Never goes back; only differences between times of one host have a meaning.
static int64_t idist__os_clock_now_ns(void);

// The deadline `timeout_ms` from now; negative: never.
static int64_t idist__os_clock_deadline(int64_t timeout_ms);

// Milliseconds until a deadline, rounded up, as poll(2) wants them: 0 when it has passed, -1 for
// never. At most 1000 seconds, so callers look again.
static int idist__os_clock_ms_until(int64_t deadline_ns);

// Blocks, for longer where the system's timer is coarse. A signal may cut it short: callers loop
// over deadlines.
static void idist__os_clock_pause_ns(int64_t ns);

// The same in milliseconds.
static void idist__os_clock_pause_ms(int ms);

//------------------------------------------------------------------------------
// the time of day, as a calendar and other hosts have it
//------------------------------------------------------------------------------

// Nanoseconds since 1970, UTC. Jumps when somebody sets the clock: never wait by it.
IDIST__UNUSED static int64_t idist__os_calendar_ns(void);

// Prints such a time in the local time zone as "2026-01-30 19:26:12"; "" if that is impossible.
IDIST__UNUSED static void idist__os_calendar_print(int64_t ns, char *text, size_t capacity);
