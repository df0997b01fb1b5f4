// os/linux/unwind.h: what may leave a function without returning: cancellation, exceptions, longjmp
#pragma once

#include "os/unwind.h"

static inline int idist__os_unwind_block_cancel(void) {
    int before;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
    return before;
}

static inline void idist__os_unwind_allow_cancel(int before) {
    pthread_setcancelstate(before, NULL);
}

IDIST__UNUSED static void idist__os_unwind_terminate(void) { abort(); }

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

static void idist__os_unwind_unwatch(idist__os_unwind_frame *frame) {
#ifdef __GLIBC__
    if (_pthread_cleanup_push && _pthread_cleanup_pop)
        _pthread_cleanup_pop((struct _pthread_cleanup_buffer *)(void *)frame, 0);
#else
    (void)frame;
#endif
}
