// os/linux/wake.h: sleeping until another process changes a word
#pragma once

#include "os/wake.h"
#include "os/clock.h"

// A timeout of the futex system call is not always a struct timespec. It is two longs on most
// architectures, even if time_t has 64 bits and long has 32. On newer 32-bit architectures, which
// have only futex_time64, the timeout is two 64-bit numbers.
#ifdef SYS_futex
enum { IDIST__OS_FUTEX = SYS_futex };
typedef long idist__os_futex_part;
#else
enum { IDIST__OS_FUTEX = SYS_futex_time64 };
typedef int64_t idist__os_futex_part;
#endif

enum { IDIST__OS_FUTEX_WAIT = 0, IDIST__OS_FUTEX_WAKE = 1 };

IDIST__UNUSED static void idist__os_wake_await_word(uint32_t *word, uint32_t value,
                                                    int64_t deadline_ns) {
    struct {
        idist__os_futex_part seconds, nanoseconds;
    } timeout;
    int64_t left = deadline_ns - idist__os_clock_now_ns(), seconds = left / 1000000000;

    if (left <= 0) return;
    timeout.seconds = (idist__os_futex_part)(seconds < INT32_MAX ? seconds : INT32_MAX);
    timeout.nanoseconds = (idist__os_futex_part)(left % 1000000000);
    syscall(IDIST__OS_FUTEX, word, IDIST__OS_FUTEX_WAIT, value,
            deadline_ns == IDIST__FOREVER ? NULL : &timeout, NULL, 0);
}

IDIST__UNUSED static void idist__os_wake_word(uint32_t *word) {
    syscall(IDIST__OS_FUTEX, word, IDIST__OS_FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}
