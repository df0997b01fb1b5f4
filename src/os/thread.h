// os/thread.h: threads, locks, condition variables
#pragma once

#include "os/system.h"

//------------------------------------------------------------------------------
// threads
//
// Elsewhere: pthreads on macOS; on Windows _beginthreadex, a handle with the id of the thread, and
// SwitchToThread.
//------------------------------------------------------------------------------

// Starts a thread that takes no signals, because they belong to the program's own threads. What fn
// returns is dropped. 0, or an errno. The caller joins or detaches the thread, once.
static int idist__os_thread_start(idist__os_thread *thread, void *(*fn)(void *), void *arg);

// Blocks until the thread has ended.
IDIST__UNUSED static inline void idist__os_thread_join(idist__os_thread thread);

// Nobody will join the thread: the system frees it when it ends. Does not block.
IDIST__UNUSED static inline void idist__os_thread_detach(idist__os_thread thread);

// The calling thread, for comparisons only: it must not be joined through this.
IDIST__UNUSED static inline idist__os_thread idist__os_thread_self(void);

// Whether both are the same thread, which has not been joined yet.
IDIST__UNUSED static inline bool idist__os_thread_equal(idist__os_thread a, idist__os_thread b);

// Offers the processor to other threads and processes that are ready to run. Does not block.
IDIST__UNUSED static inline void idist__os_thread_yield(void);

// Threads of this process; a large number if the system does not tell.
IDIST__UNUSED static int idist__os_thread_count(void);

// To be called before something is published through shared memory, and after it was seen. Only for
// the thread sanitizer: ranks that are threads of one process map the memory at different
// addresses, so it cannot see that one synchronizes with the other.
IDIST__UNUSED static void idist__os_thread_handover(void);

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

// Makes an unlocked mutex. Also of one that a child made by fork has inherited, whatever state it
// was in.
static inline void idist__os_mutex_init(idist__os_mutex *mutex);

// Of an unlocked mutex that nobody will use again.
static inline void idist__os_mutex_destroy(idist__os_mutex *mutex);

// Blocks until this thread has the mutex.
static inline void idist__os_mutex_lock(idist__os_mutex *mutex);

// False: somebody has locked it.
static inline bool idist__os_mutex_try_lock(idist__os_mutex *mutex);

// Of a mutex that this thread has locked. Does not block.
static inline void idist__os_mutex_unlock(idist__os_mutex *mutex);

//------------------------------------------------------------------------------
// condition variables
//
// macOS cannot choose the clock of a condition variable: there a wait takes the time that is left
// (pthread_cond_timedwait_relative_np), as SleepConditionVariableSRW does on Windows.
//------------------------------------------------------------------------------

// Makes a condition variable, which the caller destroys. Its deadlines are those of os/clock.h.
static void idist__os_cond_init(idist__os_cond *cond);

// Nobody waits for it any more.
static inline void idist__os_cond_destroy(idist__os_cond *cond);

// Wakes one of the threads that wait, if any. Does not block.
static inline void idist__os_cond_signal(idist__os_cond *cond);

// Wakes all of them.
static inline void idist__os_cond_broadcast(idist__os_cond *cond);

// Unlocks the mutex, blocks until the condition is signalled or the deadline passes, and locks the
// mutex again; may return for no reason.
static void idist__os_cond_wait(idist__os_cond *cond, idist__os_mutex *mutex, int64_t deadline_ns);
