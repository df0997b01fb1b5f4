// os/unwind.h: what may leave a function without returning: cancellation, exceptions, longjmp
//
// A thread that left the implementation in the middle would keep locks for ever. So every system
// call that is a cancellation point (POSIX, pthread_cancel) is an IDIST__OS_CALL, which disables
// cancellation, and base/fail.h calls the functions of the program.
//
// IDIST__OS_CALL(expression) evaluates an expression that is a cancellation point, and lets no
// request to cancel this thread interrupt it. It leaves errno as the expression does. types.h of a
// system defines it; Windows cancels no threads, and there the macro is its argument.
#pragma once

#include "os/system.h"

// Disables cancellation of this thread. Returns what idist__os_unwind_allow_cancel needs.
static inline int idist__os_unwind_block_cancel(void);

static inline void idist__os_unwind_allow_cancel(int before);

// Ends the process as std::terminate does, with a core dump where these are made.
IDIST__UNUSED static void idist__os_unwind_terminate(void);

// Calls `left` when longjmp or pthread_exit leaves the function that called idist__os_unwind_watch.
// Only glibc does that. `left` must not return.
static void idist__os_unwind_watch(idist__os_unwind_frame *frame, void (*left)(void *), void *arg);

// The function that watched is about to return.
static void idist__os_unwind_unwatch(idist__os_unwind_frame *frame);
