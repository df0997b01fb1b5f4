// os/unwind.h: what may leave a function without returning: cancellation, exceptions, longjmp
//
// A thread that left the implementation in the middle would keep locks for ever. So every system
// call that is a cancellation point (POSIX, pthread_cancel) is an IDIST__OS_CALL, which disables
// cancellation, and base/fail.h calls the functions of the program.
//
// Elsewhere: Windows cancels no threads, and IDIST__OS_CALL is its argument.
#pragma once

// Evaluates an expression that is a cancellation point, and lets no request to cancel this thread
// interrupt it. Leaves errno as the expression does.
#define IDIST__OS_CALL(expression)                                       \
    __extension__({                                                      \
        int cancel_before_;                                              \
        __typeof__(expression) value_;                                   \
                                                                         \
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel_before_); \
        value_ = (expression);                                           \
        pthread_setcancelstate(cancel_before_, NULL);                    \
        value_;                                                          \
    })

// Disables cancellation of this thread. Returns what idist__os_unwind_allow_cancel needs.
static inline int idist__os_unwind_block_cancel(void) {
    int before;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
    return before;
}

static inline void idist__os_unwind_allow_cancel(int before) {
    pthread_setcancelstate(before, NULL);
}

// Ends the process as std::terminate does, with a core dump where these are made.
IDIST__UNUSED static void idist__os_unwind_terminate(void) { abort(); }

// Calls `left` when longjmp or pthread_exit leaves the function that called idist__os_unwind_watch.
// Only glibc does that. `left` must not return.
typedef struct idist__os_unwind_frame { // glibc's struct _pthread_cleanup_buffer
    void (*left)(void *arg);
    void *arg;
    int cancel_type;
    struct idist__os_unwind_frame *previous;
} idist__os_unwind_frame;

#ifdef __GLIBC__
#ifdef __cplusplus
extern "C" {
#endif
void _pthread_cleanup_push(struct _pthread_cleanup_buffer *, void (*)(void *), void *)
    __attribute__((weak));
void _pthread_cleanup_pop(struct _pthread_cleanup_buffer *, int) __attribute__((weak));
#ifdef __cplusplus
}
#endif
#endif // __GLIBC__

static void idist__os_unwind_watch(idist__os_unwind_frame *frame, void (*left)(void *), void *arg) {
#ifdef __GLIBC__
    if (_pthread_cleanup_push && _pthread_cleanup_pop)
        _pthread_cleanup_push((struct _pthread_cleanup_buffer *)(void *)frame, left, arg);
#else
    (void)frame;
    (void)left;
    (void)arg;
#endif
}

// The function that watched is about to return.
static void idist__os_unwind_unwatch(idist__os_unwind_frame *frame) {
#ifdef __GLIBC__
    if (_pthread_cleanup_push && _pthread_cleanup_pop)
        _pthread_cleanup_pop((struct _pthread_cleanup_buffer *)(void *)frame, 0);
#else
    (void)frame;
#endif
}
