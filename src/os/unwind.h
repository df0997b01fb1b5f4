// os/unwind.h: what may leave a function without returning: cancellation, exceptions, longjmp
//
// A thread that left the implementation halfway would hold its locks forever. Two rules prevent
// this. Every system call that is a cancellation point (POSIX, pthread_cancel) is wrapped in
// IDIST__OS_CALL, which disables cancellation. All functions of the program are called through
// base/fail.h.
//
// IDIST__OS_CALL(expression) evaluates an expression that is a cancellation point, and postpones
// any request to cancel this thread. The macro leaves errno as the expression sets it. Each
// system's types.h defines the macro. Windows cancels no threads, so there the macro only evaluates
// its argument.
#pragma once

#include "os/system.h"

// Disables cancellation of this thread. Returns the value that idist__os_unwind_allow_cancel takes.
static inline int idist__os_unwind_block_cancel(void);

// Restores the cancellation state that idist__os_unwind_block_cancel returned.
static inline void idist__os_unwind_allow_cancel(int before);

// Ends the process as std::terminate does, with a core dump if core dumps are enabled.
IDIST__UNUSED static void idist__os_unwind_terminate(void);

// Calls `left` if longjmp or pthread_exit leaves the function that called idist__os_unwind_watch.
// Works with glibc only. `left` must not return.
static void idist__os_unwind_watch(idist__os_unwind_frame *frame, void (*left)(void *), void *arg);

// Ends the watch. Called when the watching function is about to return.
static void idist__os_unwind_unwatch(idist__os_unwind_frame *frame);
