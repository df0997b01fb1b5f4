// os/linux/thread.h: threads, locks, condition variables
#pragma once

#include "os/thread.h"
#include "os/unwind.h"
#include "os/clock.h"

static int idist__os_thread_start(idist__os_thread *thread, void *(*fn)(void *), void *arg) {
    sigset_t all, before;
    int rc;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    rc = pthread_create(thread, NULL, fn, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);

    return rc;
}

IDIST__UNUSED static inline void idist__os_thread_join(idist__os_thread thread) {
    IDIST__OS_CALL(pthread_join(thread, NULL));
}

IDIST__UNUSED static inline void idist__os_thread_detach(idist__os_thread thread) {
    pthread_detach(thread);
}

IDIST__UNUSED static inline idist__os_thread idist__os_thread_self(void) { return pthread_self(); }

IDIST__UNUSED static inline bool idist__os_thread_equal(idist__os_thread a, idist__os_thread b) {
    return pthread_equal(a, b) != 0;
}

IDIST__UNUSED static inline void idist__os_thread_yield(void) { sched_yield(); }

IDIST__UNUSED static int idist__os_thread_count(void) {
    enum { UNKNOWN = 1000, FIELD = 20 }; // FIELD of /proc/self/stat
    char text[512], *at;
    ssize_t n;
    int i, fd = IDIST__OS_CALL(open("/proc/self/stat", O_RDONLY | O_CLOEXEC));

    if (fd < 0) return UNKNOWN;

    do n = IDIST__OS_CALL(read(fd, text, sizeof text - 1));
    while (n < 0 && errno == EINTR);
    IDIST__OS_CALL(close(fd));
    if (n <= 0) return UNKNOWN;

    text[n] = 0;
    at = strrchr(text, ')'); // field 2 is the program's name, which may contain any character
    for (i = 2; at && i < FIELD; i++) at = strchr(at + 1, ' ');

    return at ? atoi(at) : UNKNOWN;
}

IDIST__UNUSED static void idist__os_thread_handover(void) {
#if defined(__SANITIZE_THREAD__)
    static uint32_t word;
    __atomic_fetch_add(&word, 1u, __ATOMIC_ACQ_REL);
#endif
}

static inline void idist__os_mutex_init(idist__os_mutex *mutex) { pthread_mutex_init(mutex, NULL); }

static inline void idist__os_mutex_destroy(idist__os_mutex *mutex) { pthread_mutex_destroy(mutex); }

static inline void idist__os_mutex_lock(idist__os_mutex *mutex) { pthread_mutex_lock(mutex); }

static inline bool idist__os_mutex_try_lock(idist__os_mutex *mutex) {
    return pthread_mutex_trylock(mutex) == 0;
}

static inline void idist__os_mutex_unlock(idist__os_mutex *mutex) { pthread_mutex_unlock(mutex); }

static void idist__os_cond_init(idist__os_cond *cond) {
    pthread_condattr_t attr;

    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attr);
    pthread_condattr_destroy(&attr);
}

static inline void idist__os_cond_destroy(idist__os_cond *cond) { pthread_cond_destroy(cond); }

static inline void idist__os_cond_signal(idist__os_cond *cond) { pthread_cond_signal(cond); }

static inline void idist__os_cond_broadcast(idist__os_cond *cond) { pthread_cond_broadcast(cond); }

static void idist__os_cond_wait(idist__os_cond *cond, idist__os_mutex *mutex, int64_t deadline_ns) {
    struct timespec ts;

    if (deadline_ns == IDIST__FOREVER) {
        IDIST__OS_CALL(pthread_cond_wait(cond, mutex));
        return;
    }

    ts.tv_sec = (time_t)(deadline_ns / 1000000000);
    ts.tv_nsec = (long)(deadline_ns % 1000000000);
    IDIST__OS_CALL(pthread_cond_timedwait(cond, mutex, &ts));
}
