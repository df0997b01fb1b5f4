// os/thread.h: threads, locks, condition variables
#pragma once

#include "os/unwind.h"
#include "os/clock.h"

//------------------------------------------------------------------------------
// threads
//
// Elsewhere: pthreads on macOS; on Windows _beginthreadex, a handle with the id of the thread, and
// SwitchToThread.
//------------------------------------------------------------------------------

typedef pthread_t idist__os_thread; // a thread of this process

// Starts a thread that takes no signals, because they belong to the program's own threads. What fn
// returns is dropped. 0, or an errno. The caller joins or detaches the thread, once.
static int idist__os_thread_start(idist__os_thread *thread, void *(*fn)(void *), void *arg) {
    sigset_t all, before;
    int rc;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    rc = pthread_create(thread, NULL, fn, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);

    return rc;
}

// Blocks until the thread has ended.
IDIST__UNUSED static inline void idist__os_thread_join(idist__os_thread thread) {
    IDIST__OS_CALL(pthread_join(thread, NULL));
}

// Nobody will join the thread: the system frees it when it ends. Does not block.
IDIST__UNUSED static inline void idist__os_thread_detach(idist__os_thread thread) {
    pthread_detach(thread);
}

// The calling thread, for comparisons only: it must not be joined through this.
IDIST__UNUSED static inline idist__os_thread idist__os_thread_self(void) { return pthread_self(); }

// Whether both are the same thread, which has not been joined yet.
IDIST__UNUSED static inline bool idist__os_thread_equal(idist__os_thread a, idist__os_thread b) {
    return pthread_equal(a, b) != 0;
}

// Offers the processor to other threads and processes that are ready to run. Does not block.
IDIST__UNUSED static inline void idist__os_thread_yield(void) { sched_yield(); }

// Threads of this process; a large number if the system does not tell.
IDIST__UNUSED static int idist__os_thread_count(void) {
    enum { UNKNOWN = 1000, FIELD = 20 }; // of /proc/self/stat
    char text[512], *at;
    ssize_t n;
    int i, fd = IDIST__OS_CALL(open("/proc/self/stat", O_RDONLY | O_CLOEXEC));

    if (fd < 0) return UNKNOWN;

    do n = IDIST__OS_CALL(read(fd, text, sizeof text - 1));
    while (n < 0 && errno == EINTR);
    IDIST__OS_CALL(close(fd));
    if (n <= 0) return UNKNOWN;

    text[n] = 0;
    at = strrchr(text, ')'); // field 2 is the program's name, which may contain anything
    for (i = 2; at && i < FIELD; i++) at = strchr(at + 1, ' ');

    return at ? atoi(at) : UNKNOWN;
}

// To be called before something is published through shared memory, and after it was seen. Only for
// the thread sanitizer: ranks that are threads of one process map the memory at different
// addresses, so it cannot see that one synchronizes with the other.
IDIST__UNUSED static void idist__os_thread_handover(void) {
#if defined(__SANITIZE_THREAD__)
    static uint32_t word;
    __atomic_fetch_add(&word, 1u, __ATOMIC_ACQ_REL);
#endif
}

//------------------------------------------------------------------------------
// locks among the threads of a process
//
// A mutex is not recursive, belongs to the thread that has locked it, and stays where it is in
// memory. Only lock blocks. None of the functions fails when it is used like that.
//
// One in static memory may begin as IDIST__OS_MUTEX_INIT (os/mutex_init.h).
//
// Elsewhere: pthreads on macOS; SRWLOCK and CONDITION_VARIABLE on Windows.
//------------------------------------------------------------------------------

typedef pthread_mutex_t idist__os_mutex;

// Makes an unlocked mutex. Also of one that a child made by fork has inherited, whatever state it
// was in.
static inline void idist__os_mutex_init(idist__os_mutex *mutex) { pthread_mutex_init(mutex, NULL); }

// Of an unlocked mutex that nobody will use again.
static inline void idist__os_mutex_destroy(idist__os_mutex *mutex) { pthread_mutex_destroy(mutex); }

// Blocks until this thread has the mutex.
static inline void idist__os_mutex_lock(idist__os_mutex *mutex) { pthread_mutex_lock(mutex); }

// False: somebody has locked it.
static inline bool idist__os_mutex_try_lock(idist__os_mutex *mutex) {
    return pthread_mutex_trylock(mutex) == 0;
}

// Of a mutex that this thread has locked. Does not block.
static inline void idist__os_mutex_unlock(idist__os_mutex *mutex) { pthread_mutex_unlock(mutex); }

//------------------------------------------------------------------------------
// condition variables
//
// macOS cannot choose the clock of a condition variable: there a wait takes the time that is left
// (pthread_cond_timedwait_relative_np), as SleepConditionVariableSRW does on Windows.
//------------------------------------------------------------------------------

typedef pthread_cond_t idist__os_cond; // stays where it is in memory

// Makes a condition variable, which the caller destroys. Its deadlines are those of os/clock.h.
static void idist__os_cond_init(idist__os_cond *cond) {
    pthread_condattr_t attr;

    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attr);
    pthread_condattr_destroy(&attr);
}

// Nobody waits for it any more.
static inline void idist__os_cond_destroy(idist__os_cond *cond) { pthread_cond_destroy(cond); }

// Wakes one of the threads that wait, if any. Does not block.
static inline void idist__os_cond_signal(idist__os_cond *cond) { pthread_cond_signal(cond); }

// Wakes all of them.
static inline void idist__os_cond_broadcast(idist__os_cond *cond) { pthread_cond_broadcast(cond); }

// Unlocks the mutex, blocks until the condition is signalled or the deadline passes, and locks the
// mutex again; may return for no reason.
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
