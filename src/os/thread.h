// os/thread.h: threads, locks, condition variables
#pragma once

#include "os/system.h"

//------------------------------------------------------------------------------
// threads
//
// macOS has pthreads. Windows has _beginthreadex, a handle with the id of the thread, and
// SwitchToThread.
//------------------------------------------------------------------------------

// Starts a thread with all signals blocked: signals belong to the program's own threads. Ignores
// what fn returns. Returns 0 or an errno. The caller joins or detaches the thread, once.
static int idist__os_thread_start(idist__os_thread *thread, void *(*fn)(void *), void *arg);

// Waits until the thread has ended.
IDIST__UNUSED static inline void idist__os_thread_join(idist__os_thread thread);

// Detaches a thread that nobody will join: the system frees it when it ends. Does not block.
IDIST__UNUSED static inline void idist__os_thread_detach(idist__os_thread thread);

// Returns the calling thread, for comparisons only. The result must not be joined.
IDIST__UNUSED static inline idist__os_thread idist__os_thread_self(void);

// Returns true if `a` and `b` are the same thread. Neither thread may have been joined.
IDIST__UNUSED static inline bool idist__os_thread_equal(idist__os_thread a, idist__os_thread b);

// Yields the processor to other threads and processes that are ready to run. Does not block.
IDIST__UNUSED static inline void idist__os_thread_yield(void);

// Returns the number of threads of this process, or a large number if it is unknown.
IDIST__UNUSED static int idist__os_thread_count(void);

// Tells the thread sanitizer that two threads synchronize. A thread calls this function before it
// publishes data through shared memory, and after it has seen such data. Ranks that are threads of
// one process map the memory at different addresses, so the sanitizer cannot see the
// synchronization by itself.
IDIST__UNUSED static void idist__os_thread_handover(void);

//------------------------------------------------------------------------------
// locks among the threads of a process
//
// A mutex is not recursive and does not move in memory. The thread that has locked a mutex unlocks
// it. Only idist__os_mutex_lock blocks. No function fails if these rules are kept. A mutex in
// static memory may be initialized with IDIST__OS_MUTEX_INIT (os/mutex_init.h).
//
// macOS has pthreads; Windows has SRWLOCK and CONDITION_VARIABLE.
//------------------------------------------------------------------------------

// Initializes a mutex in the unlocked state. Also resets a mutex that a child inherited by fork,
// whatever its state.
static inline void idist__os_mutex_init(idist__os_mutex *mutex);

// Destroys a mutex, which must be unlocked.
static inline void idist__os_mutex_destroy(idist__os_mutex *mutex);

// Locks a mutex. Blocks while another thread holds it.
static inline void idist__os_mutex_lock(idist__os_mutex *mutex);

// Locks a mutex if it is free. Returns false if a thread holds it. Does not block.
static inline bool idist__os_mutex_try_lock(idist__os_mutex *mutex);

// Unlocks a mutex that this thread holds. Does not block.
static inline void idist__os_mutex_unlock(idist__os_mutex *mutex);

//------------------------------------------------------------------------------
// condition variables
//
// On macOS the clock of a condition variable cannot be chosen. A wait there takes the remaining
// time (pthread_cond_timedwait_relative_np), as SleepConditionVariableSRW does on Windows.
//------------------------------------------------------------------------------

// Initializes a condition variable, which the caller destroys. Deadlines are times of os/clock.h.
static void idist__os_cond_init(idist__os_cond *cond);

// Destroys a condition variable, on which no thread may be waiting.
static inline void idist__os_cond_destroy(idist__os_cond *cond);

// Wakes one waiting thread, if there is one. Does not block.
static inline void idist__os_cond_signal(idist__os_cond *cond);

// Wakes all waiting threads. Does not block.
static inline void idist__os_cond_broadcast(idist__os_cond *cond);

// Unlocks the mutex, blocks until the condition is signaled or the deadline passes, and locks the
// mutex again. May wake up spuriously.
static void idist__os_cond_wait(idist__os_cond *cond, idist__os_mutex *mutex, int64_t deadline_ns);
