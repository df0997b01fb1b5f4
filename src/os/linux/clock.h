// os/linux/clock.h: monotonic time, deadlines, pauses, the time of day
#pragma once

#include "os/clock.h"
#include "os/unwind.h"

static int64_t idist__os_clock_now_ns(void) {
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

static int64_t idist__os_clock_deadline(int64_t timeout_ms) {
    return timeout_ms < 0 ? IDIST__FOREVER : idist__os_clock_now_ns() + timeout_ms * IDIST__MS;
}

static int idist__os_clock_ms_until(int64_t deadline_ns) {
    int64_t left;

    if (deadline_ns == IDIST__FOREVER) return -1;
    left = deadline_ns - idist__os_clock_now_ns();
    if (left <= 0) return 0;

    left = (left + IDIST__MS - 1) / IDIST__MS;
    return left > 1000000 ? 1000000 : (int)left;
}

static void idist__os_clock_pause_ns(int64_t ns) {
    struct timespec ts;

    ts.tv_sec = (time_t)(ns / 1000000000);
    ts.tv_nsec = (long)(ns % 1000000000);
    IDIST__OS_CALL(nanosleep(&ts, NULL));
}

static void idist__os_clock_pause_ms(int ms) { idist__os_clock_pause_ns(ms * IDIST__MS); }

IDIST__UNUSED static int64_t idist__os_calendar_ns(void) {
    struct timespec ts;

    clock_gettime(CLOCK_REALTIME, &ts);
    return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

IDIST__UNUSED static void idist__os_calendar_print(int64_t ns, char *text, size_t capacity) {
    time_t seconds = (time_t)(ns / 1000000000);
    struct tm parts;

    text[0] = 0;
    if (!IDIST__OS_CALL(localtime_r(&seconds, &parts))) return;
    if (!strftime(text, capacity, "%Y-%m-%d %H:%M:%S", &parts)) text[0] = 0;
}
