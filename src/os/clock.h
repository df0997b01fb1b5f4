// os/clock.h: monotonic time, deadlines, pauses, the time of day
#pragma once

#include "os/system.h"

//------------------------------------------------------------------------------
// monotonic time, deadlines, pauses
//
// A deadline is a time of the monotonic clock, in nanoseconds.
//------------------------------------------------------------------------------

static const int64_t IDIST__MS = 1000000; // nanoseconds in a millisecond
static const int64_t IDIST__FOREVER = INT64_MAX;

// Returns the current time. The clock never goes back. Only differences between times of one host
// are meaningful.
static int64_t idist__os_clock_now_ns(void);

// Returns the deadline that is `timeout_ms` from now, or IDIST__FOREVER if `timeout_ms` is
// negative.
static int64_t idist__os_clock_deadline(int64_t timeout_ms);

// Returns the milliseconds until a deadline, rounded up, as poll(2) expects them: 0 if the deadline
// has passed, -1 for IDIST__FOREVER. Returns at most 1000 seconds, so callers check again.
static int idist__os_clock_ms_until(int64_t deadline_ns);

// Blocks for `ns` nanoseconds, or longer if the system's timer is coarse. A signal may end the
// pause early, so callers loop until a deadline.
static void idist__os_clock_pause_ns(int64_t ns);

// Blocks for `ms` milliseconds. A signal may end the pause early.
static void idist__os_clock_pause_ms(int ms);

//------------------------------------------------------------------------------
// the time of day, as calendars and other hosts show it
//------------------------------------------------------------------------------

// Returns the nanoseconds since 1970, UTC. The time jumps when somebody sets the clock, so never
// use it for a wait.
IDIST__UNUSED static int64_t idist__os_calendar_ns(void);

// Writes a time of idist__os_calendar_ns in the local time zone as "2026-01-30 19:26:12", or "" if
// that is impossible.
IDIST__UNUSED static void idist__os_calendar_print(int64_t ns, char *text, size_t capacity);
