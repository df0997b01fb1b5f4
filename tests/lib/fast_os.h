// fast_os.h: the bodies of src/os/linux with a clock that runs a hundred times as fast. To use it,
// define IDIST__OS_BODIES as "fast_os.h" before including idist.h.
#ifndef FAST_OS_H
#define FAST_OS_H

#include "os/linux/unwind.h"

enum { FAST_OS_FACTOR = 100 };

static int64_t fast_os_real_ns(void) {
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int64_t idist__os_clock_now_ns(void) { return FAST_OS_FACTOR * fast_os_real_ns(); }

static int64_t idist__os_clock_deadline(int64_t timeout_ms) {
    return timeout_ms < 0 ? IDIST__FOREVER : idist__os_clock_now_ns() + timeout_ms * IDIST__MS;
}

// Returns real milliseconds, for poll.
static int idist__os_clock_ms_until(int64_t deadline_ns) {
    int64_t left_ms = (deadline_ns - idist__os_clock_now_ns()) / FAST_OS_FACTOR / IDIST__MS;

    if (deadline_ns == IDIST__FOREVER) return -1;
    return left_ms < 0 ? 0 : left_ms > 1000000 ? 1000000 : (int)left_ms;
}

static void idist__os_clock_pause_ns(int64_t ns) {
    struct timespec pause;

    pause.tv_sec = 0;
    pause.tv_nsec = (long)(ns / FAST_OS_FACTOR % 1000000000);
    nanosleep(&pause, NULL);
}

static void idist__os_clock_pause_ms(int ms) { idist__os_clock_pause_ns(ms * IDIST__MS); }

static int64_t idist__os_calendar_ns(void) { return 0; }

static void idist__os_calendar_print(int64_t ns, char *text, size_t capacity) {
    (void)ns;
    if (capacity) text[0] = 0;
}

#include "os/linux/random.h"

#include "os/linux/beacon.h"
#include "os/linux/cpu.h"
#include "os/linux/file.h"
#include "os/linux/memory.h"
#include "os/linux/poll.h"
#include "os/linux/process.h"
#include "os/linux/segment.h"
#include "os/linux/socket.h"
#include "os/linux/thread.h"
#include "os/linux/wake.h"

#endif // FAST_OS_H
