/* idist_os.h - v0.2.0 - what idist needs of the operating system - MIT licence

    Part of the implementation of idist; idist.h includes it where IDIST_IMPLEMENTATION is defined.

WHAT IT IS

    System calls and system headers, behind types, constants and functions named idist__os_*. The
    other files include no system header and call nothing else of the system; lint checks that. A
    port to another operating system replaces the types and bodies in this file. Each function says
    whether it may block, what it returns, and who owns what. Where a system lacks a service
    (reading the memory of another process, fencing the others), its function may fail always: the
    callers have another way.

    Errors are numbers of errno.h, as C compilers for all systems have them; a port translates those
    of its system (ETIMEDOUT, EAGAIN, EADDRINUSE, ...). A descriptor is an int, and -1 is none.

HOW IT FITS

    The lowest room: it uses none of the others.

CONTENTS

      [os:system]      the systems that are supported, and their headers
      [os:unwind]      cancellation, exceptions, longjmp
      [os:clock]       monotonic time, deadlines, pauses
      [os:random]      random bytes
      [os:env]         environment variables
      [os:descriptor]  closing descriptors
      [os:limit]       what the system allows this process
      [os:cpu]         processors, and hints to them
      [os:thread]      threads
      [os:mutex]       locks among the threads of a process
      [os:cond]        condition variables
      [os:memory]      pages, aligned memory, memory that processes share
      [os:wake]        sleeping until another process changes a word
      [os:calendar]    the time of day, as a calendar and other hosts have it
      [os:poll]        waiting for descriptors, and waking the thread that waits
      [os:watch]       waiting for descriptors that are watched again and again
      [os:socket]      stream sockets, multicast datagrams, addresses and name lookup
      [os:beacon]      a name that exists as long as its process, and wakes it
      [os:file]        files, and locks on single bytes of them
      [os:window]      a part of a file as memory
      [os:folder]      the names in a folder
      [os:process]     this process, its children, the memory of others
      [os:segment]     passing a file in memory to another process of this host
      [os:terminal]    the terminal
      [os:library]     shared libraries that are loaded at run time
*/
#ifndef IDIST_OS_H
#define IDIST_OS_H

//------------------------------------------------------------------------------
// [os:system]  the systems that are supported, and their headers
// uses -
//------------------------------------------------------------------------------

#if !defined(__linux__)
#error "idist runs on Linux only so far; a port implements the functions of idist_os.h"
#endif

#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>

#if !defined(CLOCK_MONOTONIC) || !defined(SYS_getpid) || !defined(AI_PASSIVE)
#error "include idist.h before every system header (IDIST_IMPLEMENTATION), or -D_DEFAULT_SOURCE"
#endif

//------------------------------------------------------------------------------
// [os:unwind]  what may leave a function without returning: cancellation, exceptions, longjmp
// uses -
//
// A thread that left the implementation in the middle would keep locks for ever. So every system
// call that is a cancellation point (POSIX, pthread_cancel) is an IDIST__OS_CALL, which disables
// cancellation, and [base:callback] calls the functions of the program.
//
// Elsewhere: Windows cancels no threads, and IDIST__OS_CALL is its argument.
//------------------------------------------------------------------------------

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

//------------------------------------------------------------------------------
// [os:clock]  monotonic time, deadlines, pauses
// uses unwind
//
// A deadline is a point of the monotonic clock in nanoseconds.
//------------------------------------------------------------------------------

static const int64_t IDIST__MS = 1000000; // nanoseconds in a millisecond
static const int64_t IDIST__FOREVER = INT64_MAX;

// Now. Never goes back; only differences between times of one host have a meaning.
static int64_t idist__os_clock_now_ns(void) {
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

// The deadline `timeout_ms` from now; negative: never.
static int64_t idist__os_clock_deadline(int64_t timeout_ms) {
    return timeout_ms < 0 ? IDIST__FOREVER : idist__os_clock_now_ns() + timeout_ms * IDIST__MS;
}

// Milliseconds until a deadline, rounded up, as poll(2) wants them: 0 when it has passed, -1 for
// never. At most 1000 seconds, so callers look again.
static int idist__os_clock_ms_until(int64_t deadline_ns) {
    int64_t left;

    if (deadline_ns == IDIST__FOREVER) return -1;
    left = deadline_ns - idist__os_clock_now_ns();
    if (left <= 0) return 0;

    left = (left + IDIST__MS - 1) / IDIST__MS;
    return left > 1000000 ? 1000000 : (int)left;
}

// Blocks, for longer where the system's timer is coarse. A signal may cut it short: callers loop
// over deadlines.
static void idist__os_clock_pause_ns(int64_t ns) {
    struct timespec ts;

    ts.tv_sec = (time_t)(ns / 1000000000);
    ts.tv_nsec = (long)(ns % 1000000000);
    IDIST__OS_CALL(nanosleep(&ts, NULL));
}

// The same in milliseconds.
static void idist__os_clock_pause_ms(int ms) { idist__os_clock_pause_ns(ms * IDIST__MS); }

//------------------------------------------------------------------------------
// [os:random]  random bytes
// uses unwind clock
//
// Elsewhere: arc4random_buf on macOS, BCryptGenRandom on Windows.
//------------------------------------------------------------------------------

// Some random bytes: how many, or -1 and errno. The system call goes by number, because glibc
// before 2.25 has no getrandom(); kernels before 3.17 have none either.
static ssize_t idist__os_random_some(void *buf, size_t nbytes) {
    ssize_t n = -1;
    int fd;

#ifdef SYS_getrandom
    n = syscall(SYS_getrandom, buf, nbytes, 0);
    if (n >= 0 || errno == EINTR) return n;
#endif
    fd = IDIST__OS_CALL(open("/dev/urandom", O_RDONLY | O_CLOEXEC));
    if (fd < 0) return -1;

    do n = IDIST__OS_CALL(read(fd, buf, nbytes));
    while (n < 0 && errno == EINTR);
    IDIST__OS_CALL(close(fd));

    return n > 0 ? n : -1;
}

// Fills the buffer with random bytes fit for keys. Never fails: in a sandbox with neither source it
// falls back to clock and process id, because nonces must differ at least.
static void idist__os_random(void *buf, size_t nbytes) {
    unsigned char *p = (unsigned char *)buf;

    while (nbytes) {
        ssize_t n = idist__os_random_some(p, nbytes);

        if (n > 0) {
            p += n;
            nbytes -= (size_t)n;
        } else if (errno != EINTR) {
            int64_t mix =
                idist__os_clock_now_ns() ^ ((int64_t)getpid() << 32) ^ (int64_t)(uintptr_t)p;
            size_t k = nbytes < sizeof mix ? nbytes : sizeof mix;
            memcpy(p, &mix, k);
            p += k;
            nbytes -= k;
        }
    }
}

//------------------------------------------------------------------------------
// [os:env]  environment variables
// uses -
//------------------------------------------------------------------------------

// The value of a variable, owned by the environment. NULL when it is not set or empty, as in
// torch's env://.
static const char *idist__os_env(const char *name) {
    const char *value = getenv(name);
    return value && value[0] ? value : NULL;
}

//------------------------------------------------------------------------------
// [os:descriptor]  closing descriptors
// uses unwind
//------------------------------------------------------------------------------

// Closes a descriptor, if it is open (not negative), and sets it to -1.
static void idist__os_descriptor_close(int *fd) {
    if (*fd >= 0) IDIST__OS_CALL(close(*fd));
    *fd = -1;
}

//------------------------------------------------------------------------------
// [os:limit]  what the system allows this process
// uses -
//------------------------------------------------------------------------------

// The soft limit; -1: there is none.
static long long idist__os_limit_get(int resource) {
    struct rlimit limit;

    if (getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return -1;
    return (long long)limit.rlim_cur;
}

static long long idist__os_limit_descriptors(void) { return idist__os_limit_get(RLIMIT_NOFILE); }

// Of all programs of this user together.
static long long idist__os_limit_processes(void) { return idist__os_limit_get(RLIMIT_NPROC); }

// Memory that may be kept from being swapped out, which InfiniBand needs.
static long long idist__os_limit_locked_nbytes(void) { return idist__os_limit_get(RLIMIT_MEMLOCK); }

//------------------------------------------------------------------------------
// [os:cpu]  processors, and hints to them
// uses -
//
// Windows has all of it (SetThreadAffinityMask, FlushProcessWriteBuffers). macOS binds no thread
// and fences no other process: there the set has as many processors as the machine, and the two
// functions that ask for more return false.
//------------------------------------------------------------------------------

enum { IDIST__CPU_WORDS = 128 };
typedef struct idist__os_cpu_set {        // a set of processors
    unsigned long bits[IDIST__CPU_WORDS]; // 8192 on 64-bit systems
} idist__os_cpu_set;

// The processors that the calling thread may run on.
static void idist__os_cpu_usable(idist__os_cpu_set *cpus) {
    memset(cpus, 0, sizeof *cpus);
    if (syscall(SYS_sched_getaffinity, 0, sizeof *cpus, cpus) <= 0) cpus->bits[0] = 1;
}

// How many processors are in the set.
static int idist__os_cpu_set_count(const idist__os_cpu_set *cpus) {
    int i, count = 0;

    for (i = 0; i < IDIST__CPU_WORDS; i++) count += __builtin_popcountl(cpus->bits[i]);
    return count;
}

// How many processors the calling thread may run on.
static int idist__os_cpu_count(void) {
    idist__os_cpu_set cpus;

    idist__os_cpu_usable(&cpus);
    return idist__os_cpu_set_count(&cpus);
}

// Moves the calling thread to one of the processors that it may run on (the index-th). If `stay` is
// set it may run nowhere else from then on. False: the system refused.
static bool idist__os_cpu_bind(int index, bool stay) {
    idist__os_cpu_set all, one;
    int i, width = 8 * (int)sizeof all.bits[0];

    idist__os_cpu_usable(&all);
    memset(&one, 0, sizeof one);

    for (i = 0; i < IDIST__CPU_WORDS * width; i++) {
        if (!(all.bits[i / width] >> (i % width) & 1)) continue;
        if (index-- > 0) continue;

        one.bits[i / width] = 1ul << (i % width);
        if (syscall(SYS_sched_setaffinity, 0, sizeof one, &one) != 0) return false;
        if (stay) return true;
        return syscall(SYS_sched_setaffinity, 0, sizeof all, &all) == 0; // it has moved by now
    }

    return false;
}

// Tells the processor that this is a loop that waits.
IDIST__UNUSED static void idist__os_cpu_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

// Prefetches a cache line for writing, without waiting for it.
IDIST__UNUSED static void idist__os_cpu_prefetch_for_write(const void *p) {
#if defined(__x86_64__)
    // For old targets the builtin would prefetch for reading only.
    __asm__ __volatile__("prefetchw %0" : : "m"(*(const char *)p));
#else
    __builtin_prefetch(p, 1);
#endif
}

// Copies with stores that go to memory past the caches, where the processor has them. A release
// store publishes them as usual. In assembly because reading <emmintrin.h> takes time;
// sanitizers would not see what it reads and writes.
IDIST__UNUSED static void idist__os_cpu_stream(char *to, const char *from, size_t nbytes) {
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    size_t lead = (size_t)(-(uintptr_t)to & 63), at;

    if (lead > nbytes) lead = nbytes;
    memcpy(to, from, lead);

    for (at = lead; at + 64 <= nbytes; at += 64)
        __asm__ __volatile__("movdqu   (%1), %%xmm0\n\t"
                             "movdqu 16(%1), %%xmm1\n\t"
                             "movdqu 32(%1), %%xmm2\n\t"
                             "movdqu 48(%1), %%xmm3\n\t"
                             "movntdq %%xmm0,   (%0)\n\t"
                             "movntdq %%xmm1, 16(%0)\n\t"
                             "movntdq %%xmm2, 32(%0)\n\t"
                             "movntdq %%xmm3, 48(%0)"
                             :
                             : "r"(to + at), "r"(from + at)
                             : "xmm0", "xmm1", "xmm2", "xmm3", "memory");

    __asm__ __volatile__("sfence" : : : "memory");
    memcpy(to + at, from + at, nbytes - at);
#else
    memcpy(to, from, nbytes);
#endif
}

// Makes all other processes that have announced themselves execute a full memory fence before it
// returns (membarrier(2)). `announce` is that announcement, once per process. False: the system has
// no such call.
IDIST__UNUSED static bool idist__os_cpu_fence_others(bool announce) {
#ifdef SYS_membarrier
    enum { GLOBAL_EXPEDITED = 1 << 1, REGISTER_GLOBAL_EXPEDITED = 1 << 2 };
    int command = announce ? REGISTER_GLOBAL_EXPEDITED : GLOBAL_EXPEDITED;
    return syscall(SYS_membarrier, command, 0, 0) == 0;
#else
    (void)announce;
    return false;
#endif
}

//------------------------------------------------------------------------------
// [os:thread]  threads
// uses unwind
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
// [os:mutex]  locks among the threads of a process
// uses -
//
// A mutex is not recursive, belongs to the thread that has locked it, and stays where it is in
// memory. Only lock blocks. None of the functions fails when it is used like that.
//
// One in static memory may begin as IDIST__OS_MUTEX_INIT, in any header: idist_end.h takes the
// macro away, and idist_begin.h brings it back.
//
// Elsewhere: pthreads on macOS; SRWLOCK and CONDITION_VARIABLE on Windows.
//------------------------------------------------------------------------------

typedef pthread_mutex_t idist__os_mutex;

#define IDIST__OS_MUTEX_INIT PTHREAD_MUTEX_INITIALIZER

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
// [os:cond]  condition variables
// uses unwind clock mutex
//
// macOS cannot choose the clock of a condition variable: there a wait takes the time that is left
// (pthread_cond_timedwait_relative_np), as SleepConditionVariableSRW does on Windows.
//------------------------------------------------------------------------------

typedef pthread_cond_t idist__os_cond; // stays where it is in memory

// Makes a condition variable, which the caller destroys. Its deadlines are those of [os:clock].
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

//------------------------------------------------------------------------------
// [os:memory]  pages, aligned memory, memory that processes share
// uses unwind
//
// Elsewhere: a file without a name is shm_open and shm_unlink on macOS, and on Windows
// CreateFileMapping, whose handle stands for the descriptor. Discarding pages may do nothing, and
// the guard against fork may be NULL.
//------------------------------------------------------------------------------

// A number in shared memory that is read and written atomically. i386 would align it to 4 bytes, so
// that it could lie in two cache lines.
typedef uint64_t idist__counter __attribute__((aligned(8)));

// The size of a page: a mapping begins and ends at multiples of it.
static size_t idist__os_memory_page_nbytes(void) { return (size_t)sysconf(_SC_PAGESIZE); }

// Memory at a multiple of `alignment`, a power of two from 64 to 4096, with anything in it. NULL:
// no memory. The caller frees it with idist__os_memory_free_aligned, and with nothing else.
IDIST__UNUSED static void *idist__os_memory_aligned(size_t alignment, size_t nbytes) {
    void *p = NULL;
    return posix_memalign(&p, alignment, nbytes) == 0 ? p : NULL;
}

// NULL is no error.
IDIST__UNUSED static void idist__os_memory_free_aligned(void *p) { free(p); }

// Maps a part of a file, shared with the other processes that map it, without reserving memory.
// `at` and `nbytes` are multiples of the page size. Core dumps leave the mapping out. NULL and
// errno on failure. The caller unmaps it; `fd` stays the caller's.
IDIST__UNUSED static void *idist__os_memory_map(int fd, size_t at, size_t nbytes) {
    int flags = MAP_SHARED | MAP_NORESERVE;
    void *map = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, flags, fd, (off_t)at);

    if (map == MAP_FAILED) return NULL;
    madvise(map, nbytes, MADV_DONTDUMP);
    return map;
}

// Takes such a mapping back, whole.
IDIST__UNUSED static void idist__os_memory_unmap(void *map, size_t nbytes) { munmap(map, nbytes); }

// Gives whole pages of a mapped file back to the system, for all processes: they read as zeros from
// then on.
IDIST__UNUSED static void idist__os_memory_discard(void *pages, size_t nbytes) {
    enum { REMOVE = 9 }; // MADV_REMOVE, which older headers lack
    madvise(pages, nbytes, REMOVE);
}

// A file in memory, without a name, whose size can never change. -1 and errno on failure. The
// caller closes it.
IDIST__UNUSED static int idist__os_memory_file(size_t nbytes) {
    enum { CLOEXEC_AND_SEALING = 3, ADD_SEALS = 1033, SEAL_SHRINK_GROW = 7 }; // not in all headers
    struct rlimit limit;
    int err, fd;

    // Beyond the limit ftruncate would raise a signal.
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
        limit.rlim_cur < nbytes) {
        errno = EFBIG;
        return -1;
    }

    fd = (int)syscall(SYS_memfd_create, "idist", CLOEXEC_AND_SEALING);
    if (fd < 0) return -1;
    if (IDIST__OS_CALL(ftruncate(fd, (off_t)nbytes)) == 0 &&
        IDIST__OS_CALL(fcntl(fd, ADD_SEALS, SEAL_SHRINK_GROW)) == 0)
        return fd;

    err = errno;
    IDIST__OS_CALL(close(fd));
    errno = err;

    return -1;
}

// Says which limit of this process is in the way of nbytes more memory, as "locked memory is
// limited to 8192 KiB (ulimit -l), and the program locks all its memory (mlockall)". "" if none is.
// Elsewhere: always "".
static void idist__os_memory_limit(size_t nbytes, char *text, size_t capacity) {
    struct rlimit limit;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *map = mmap(NULL, nbytes, PROT_NONE, flags, -1, 0);
    int error = errno;

    text[0] = 0;

    if (map != MAP_FAILED) {
        munmap(map, nbytes);
    } else if (error == EAGAIN && getrlimit(RLIMIT_MEMLOCK, &limit) == 0) {
        snprintf(text, capacity,
                 "locked memory is limited to %llu KiB (ulimit -l), and the program locks all its "
                 "memory (mlockall)",
                 (unsigned long long)limit.rlim_cur >> 10);
    } else if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
        snprintf(text, capacity, "the address space is limited to %llu KiB (ulimit -v)",
                 (unsigned long long)limit.rlim_cur >> 10);
    }
}

// Takes memory for a part of such a file now, so that no access to it can fail later. 0, or an
// errno. May take long for large parts.
static int idist__os_memory_reserve(int fd, size_t at, size_t nbytes) {
    int rc;

    do rc = IDIST__OS_CALL(posix_fallocate(fd, (off_t)at, (off_t)nbytes));
    while (rc == EINTR);

    return rc;
}

// A new word, 0, that also reads 0 in a child made by fork until somebody writes to it there. NULL:
// the kernel cannot do that. Freed by idist__os_memory_fork_word_free.
static uint32_t *idist__os_memory_fork_word(void) {
    enum { WIPE_ON_FORK = 18 }; // MADV_WIPEONFORK, which older headers lack
    size_t nbytes = idist__os_memory_page_nbytes();
    void *page = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (page == MAP_FAILED) return NULL;
    if (madvise(page, nbytes, WIPE_ON_FORK) == 0) return (uint32_t *)page;
    munmap(page, nbytes);

    return NULL;
}

// NULL is no error.
static void idist__os_memory_fork_word_free(uint32_t *word) {
    if (word) munmap(word, idist__os_memory_page_nbytes());
}

//------------------------------------------------------------------------------
// [os:wake]  sleeping until another process changes a word
// uses clock
//
// Elsewhere: os_sync_wait_on_address on macOS. Windows has the like within one process only. A port
// may sleep for a moment instead of waiting for the word, because the callers look again.
//------------------------------------------------------------------------------

// The futex system call takes a time of its own, which is not always struct timespec: two longs on
// most architectures, even where time_t has 64 bits and long has 32; two 64-bit numbers on those
// that came later (futex_time64) and in the x32 ABI.
#ifdef SYS_futex
enum { IDIST__OS_FUTEX = SYS_futex };
#else
enum { IDIST__OS_FUTEX = SYS_futex_time64 };
#endif
#if !defined(SYS_futex) || (defined(__x86_64__) && defined(__ILP32__))
typedef int64_t idist__os_futex_part;
#else
typedef long idist__os_futex_part;
#endif

enum { IDIST__OS_FUTEX_WAIT = 0, IDIST__OS_FUTEX_WAKE = 1 };

// Blocks while a word in shared memory has this value, at most until the deadline; may return for
// no reason.
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

// Wakes all who sleep on the word, in all processes.
IDIST__UNUSED static void idist__os_wake_word(uint32_t *word) {
    syscall(IDIST__OS_FUTEX, word, IDIST__OS_FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

//------------------------------------------------------------------------------
// [os:calendar]  the time of day, as a calendar and other hosts have it
// uses unwind
//------------------------------------------------------------------------------

// Nanoseconds since 1970, UTC. Jumps when somebody sets the clock: never wait by it.
IDIST__UNUSED static int64_t idist__os_calendar_ns(void) {
    struct timespec ts;

    clock_gettime(CLOCK_REALTIME, &ts);
    return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

// Prints such a time in the local time zone as "2026-01-30 19:26:12"; "" if that is impossible.
IDIST__UNUSED static void idist__os_calendar_print(int64_t ns, char *text, size_t capacity) {
    time_t seconds = (time_t)(ns / 1000000000);
    struct tm parts;

    text[0] = 0;
    if (!IDIST__OS_CALL(localtime_r(&seconds, &parts))) return;
    if (!strftime(text, capacity, "%Y-%m-%d %H:%M:%S", &parts)) text[0] = 0;
}

//------------------------------------------------------------------------------
// [os:poll]  waiting for descriptors, and waking the thread that waits
// uses unwind clock
//
// A poll set is an array of entries, one per descriptor. Where there is no poll(2), WSAPoll takes
// the same entries. Other files use an entry through these functions only.
//
// A wake-up is a descriptor that one thread watches in its poll set and any thread may signal:
// eventfd on Linux, a kqueue with EVFILT_USER on macOS, a UDP socket connected to itself on
// Windows. It is closed by idist__os_descriptor_close.
//------------------------------------------------------------------------------

typedef struct pollfd idist__os_poll_entry;

enum { IDIST__OS_READABLE = POLLIN, IDIST__OS_WRITABLE = POLLOUT };

// Fills an entry: which events of the descriptor to wait for. The end of a stream and errors are
// always reported. An entry without a descriptor (-1) never becomes ready.
IDIST__UNUSED static void idist__os_poll_watch(idist__os_poll_entry *entry, int fd, int events) {
    entry->fd = fd;
    entry->events = (short)events;
    entry->revents = 0;
}

// Blocks until an entry is ready, for at most timeout_ms: 0 does not block, -1 waits forever.
// Returns the number of entries that are ready, 0 after the time-out, or -1 and errno; EINTR means
// that a signal arrived.
IDIST__UNUSED static int idist__os_poll(idist__os_poll_entry *entries, int count, int timeout_ms) {
    return IDIST__OS_CALL(poll(entries, (nfds_t)count, timeout_ms));
}

// Whether the last idist__os_poll found anything about the descriptor, if only an error.
IDIST__UNUSED static bool idist__os_poll_ready(const idist__os_poll_entry *entry) {
    return entry->revents != 0;
}

// Whether it found that the descriptor takes bytes.
IDIST__UNUSED static bool idist__os_poll_writable(const idist__os_poll_entry *entry) {
    return (entry->revents & POLLOUT) != 0;
}

// Whether it found bytes, the end of the stream, or an error.
IDIST__UNUSED static bool idist__os_poll_readable(const idist__os_poll_entry *entry) {
    return (entry->revents & ~POLLOUT) != 0;
}

// Blocks until one descriptor is ready for `events`, has failed or was closed by the peer. False:
// the deadline has passed, or poll failed.
static bool idist__os_poll_wait(int fd, int events, int64_t deadline_ns) {
    for (;;) {
        idist__os_poll_entry entry;
        int rc;

        idist__os_poll_watch(&entry, fd, events);
        rc = idist__os_poll(&entry, 1, idist__os_clock_ms_until(deadline_ns));
        if (rc > 0) return true;
        if (rc == 0 && idist__os_clock_ms_until(deadline_ns) == 0)
            return false; // poll's own limit may be shorter than the deadline
        if (rc < 0 && errno != EINTR) return false;
    }
}

// A new wake-up, or -1 and errno.
IDIST__UNUSED static int idist__os_poll_wakeup_new(void) {
    return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
}

// Makes the wake-up readable. Does not block; any thread may call it.
IDIST__UNUSED static void idist__os_poll_wakeup_signal(int wakeup) {
    uint64_t one = 1;
    while (IDIST__OS_CALL(write(wakeup, &one, sizeof one)) < 0 && errno == EINTR) continue;
}

// Makes it unreadable again. Does not block.
IDIST__UNUSED static void idist__os_poll_wakeup_clear(int wakeup) {
    uint64_t count;
    while (IDIST__OS_CALL(read(wakeup, &count, sizeof count)) < 0 && errno == EINTR) continue;
}

//------------------------------------------------------------------------------
// [os:watch]  waiting for descriptors that are watched again and again
// uses unwind
//
// The cost of a look does not grow with the number of descriptors: epoll on Linux, a kqueue on
// macOS. A watch is itself a descriptor, readable while one of those is ready, and closed by
// idist__os_descriptor_close. A descriptor is removed before it is closed.
//------------------------------------------------------------------------------

enum { IDIST__OS_WATCH_EVENTS = 32 }; // that are taken at once, at most

typedef struct idist__os_watch_events {
    struct epoll_event event[IDIST__OS_WATCH_EVENTS];
} idist__os_watch_events;

// A new watch, or -1 and errno.
IDIST__UNUSED static int idist__os_watch_new(void) { return epoll_create1(EPOLL_CLOEXEC); }

// Watches a descriptor from now on for bytes and the end of its stream (input), for space (output),
// for both or for neither; its events carry this tag. False: errno says why it cannot.
IDIST__UNUSED static bool idist__os_watch_set(int watch, int fd, int tag, bool input, bool output) {
    struct epoll_event event;

    memset(&event, 0, sizeof event);
    if (input) event.events |= EPOLLIN;
    if (output) event.events |= EPOLLOUT;
    event.data.u32 = (uint32_t)tag;

    if (!event.events) return epoll_ctl(watch, EPOLL_CTL_DEL, fd, &event) == 0;
    if (epoll_ctl(watch, EPOLL_CTL_MOD, fd, &event) == 0) return true;

    return errno == ENOENT && epoll_ctl(watch, EPOLL_CTL_ADD, fd, &event) == 0;
}

// Takes what has happened, without blocking. Returns the number of events, in turns of all
// descriptors that are ready.
IDIST__UNUSED static int idist__os_watch_take(int watch, idist__os_watch_events *events) {
    int n = IDIST__OS_CALL(epoll_wait(watch, events->event, IDIST__OS_WATCH_EVENTS, 0));
    return n < 0 ? 0 : n;
}

IDIST__UNUSED static int idist__os_watch_tag(const idist__os_watch_events *events, int i) {
    return (int)events->event[i].data.u32;
}

// As idist__os_poll_writable and idist__os_poll_readable.
IDIST__UNUSED static bool idist__os_watch_writable(const idist__os_watch_events *events, int i) {
    return (events->event[i].events & EPOLLOUT) != 0;
}

IDIST__UNUSED static bool idist__os_watch_readable(const idist__os_watch_events *events, int i) {
    return (events->event[i].events & ~(uint32_t)EPOLLOUT) != 0;
}

//------------------------------------------------------------------------------
// [os:socket]  stream sockets, multicast datagrams, addresses and name lookup
// uses unwind descriptor poll
//
// Every socket is non-blocking and closed on exec; a descriptor belongs to the caller. A function
// blocks only where it takes a deadline, except for the name lookup. Failures leave the reason in
// errno. Elsewhere: on macOS a local name becomes a path in a private folder, on Windows too; there
// a SOCKET is cast to int, as its values allow.
//------------------------------------------------------------------------------

// Where a socket is or connects to. A local address is a name in the abstract namespace, which
// leaves no file behind and is visible inside one network namespace only, as loopback TCP is.
typedef struct idist__os_address {
    struct sockaddr_storage sa;
    socklen_t nbytes;
} idist__os_address;

enum { IDIST__OS_SOCKET_NAME_MAX = (int)sizeof(((struct sockaddr_un *)0)->sun_path) - 1 };

// False: the name is empty or longer than IDIST__OS_SOCKET_NAME_MAX bytes.
static bool idist__os_socket_local_address(idist__os_address *address, const char *name) {
    struct sockaddr_un *local = (struct sockaddr_un *)&address->sa;
    size_t nbytes = strlen(name);

    memset(address, 0, sizeof *address);
    if (!nbytes || nbytes > IDIST__OS_SOCKET_NAME_MAX) return false;
    local->sun_family = AF_UNIX;
    memcpy(local->sun_path + 1, name, nbytes); // the zero byte before it means abstract
    address->nbytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + nbytes);

    return true;
}

// One of the TCP addresses of a host, which is a name or the text of an IP address: *count gets how
// many it has, and `which`, counted modulo that, chooses. May block for as long as the resolver
// takes. Returns NULL, or why the lookup failed (a static text).
static const char *idist__os_socket_resolve(idist__os_address *address, const char *host, int port,
                                            int which, int *count) {
    struct addrinfo hints, *list = NULL, *at;
    char service[16];
    int error;

    memset(address, 0, sizeof *address);
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    snprintf(service, sizeof service, "%d", port);
    error = IDIST__OS_CALL(getaddrinfo(host, service, &hints, &list));
    if (error != 0 || !list) return gai_strerror(error);

    *count = 0;
    for (at = list; at; at = at->ai_next) ++*count;
    which %= *count;
    for (at = list; which > 0; which--) at = at->ai_next;

    memcpy(&address->sa, at->ai_addr, at->ai_addrlen);
    address->nbytes = at->ai_addrlen;
    freeaddrinfo(list);

    return NULL;
}

// Whether the address is that of a local socket.
static bool idist__os_socket_is_local(const idist__os_address *address) {
    return address->sa.ss_family == AF_UNIX;
}

// Whether it is an IPv4 address.
static bool idist__os_socket_is_ipv4(const idist__os_address *address) {
    // NOLINTNEXTLINE(clang-analyzer-core.UndefinedBinaryOperatorResult)
    return address->sa.ss_family == AF_INET;
}

// Whether only this host can reach the address.
static bool idist__os_socket_is_loopback(const idist__os_address *address) {
    if (idist__os_socket_is_local(address)) return true;

    if (idist__os_socket_is_ipv4(address)) {
        const struct sockaddr_in *v4 = (const struct sockaddr_in *)&address->sa;
        return (ntohl(v4->sin_addr.s_addr) >> 24) == 127;
    }

    return IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)&address->sa)->sin6_addr) != 0;
}

// Whether it is an IP address that is valid on one link only: 169.254.0.0/16 or fe80::/10.
static bool idist__os_socket_is_link_local(const idist__os_address *address) {
    if (idist__os_socket_is_ipv4(address)) {
        const struct sockaddr_in *v4 = (const struct sockaddr_in *)&address->sa;
        return (ntohl(v4->sin_addr.s_addr) >> 16) == 0xA9FE;
    }

    return IN6_IS_ADDR_LINKLOCAL(&((const struct sockaddr_in6 *)&address->sa)->sin6_addr) != 0;
}

// Whether two IP addresses are equal, whatever their ports.
static bool idist__os_socket_is_same_host(const idist__os_address *a, const idist__os_address *b) {
    if (a->sa.ss_family != b->sa.ss_family) return false;

    if (idist__os_socket_is_ipv4(a))
        return ((const struct sockaddr_in *)&a->sa)->sin_addr.s_addr ==
               ((const struct sockaddr_in *)&b->sa)->sin_addr.s_addr;

    return memcmp(&((const struct sockaddr_in6 *)&a->sa)->sin6_addr,
                  &((const struct sockaddr_in6 *)&b->sa)->sin6_addr, sizeof(struct in6_addr)) == 0;
}

// The text of an IP address, without the port.
static void idist__os_socket_host_text(const idist__os_address *address, char *buf,
                                       size_t capacity) {
    const void *ip = idist__os_socket_is_ipv4(address)
                         ? (const void *)&((const struct sockaddr_in *)&address->sa)->sin_addr
                         : (const void *)&((const struct sockaddr_in6 *)&address->sa)->sin6_addr;
    if (!inet_ntop(address->sa.ss_family, ip, buf, (socklen_t)capacity))
        snprintf(buf, capacity, "?");
}

// The port of a TCP address; 0: it has none.
static int idist__os_socket_port(const idist__os_address *address) {
    if (address->sa.ss_family == AF_INET)
        return ntohs(((const struct sockaddr_in *)&address->sa)->sin_port);
    if (address->sa.ss_family == AF_INET6)
        return ntohs(((const struct sockaddr_in6 *)&address->sa)->sin6_port);
    return 0;
}

// The address to which a socket is bound.
static bool idist__os_socket_own_address(int fd, idist__os_address *address) {
    memset(address, 0, sizeof *address);
    address->nbytes = sizeof address->sa;
    return getsockname(fd, (struct sockaddr *)&address->sa, &address->nbytes) == 0;
}

// The address of the other end of a connection.
static bool idist__os_socket_peer_address(int fd, idist__os_address *address) {
    memset(address, 0, sizeof *address);
    address->nbytes = sizeof address->sa;
    return getpeername(fd, (struct sockaddr *)&address->sa, &address->nbytes) == 0;
}

// The congestion control of a TCP socket. False: the system does not tell.
static bool idist__os_socket_congestion(int fd, char name[16]) {
    socklen_t nbytes = 15;

    memset(name, 0, 16);
    return getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &nbytes) == 0;
}

static bool idist__os_socket_out_of_fds(int error) { return error == EMFILE || error == ENFILE; }

// A stream socket without Nagle's delay, or -1.
//
// BBR sends by a timer, which inside a machine room costs more than half of the bandwidth. Another
// congestion control takes its place until idist__os_socket_measured.
static int idist__os_socket_open(int family) {
    int one = 1, fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    char name[16];

    if (fd < 0 || family == AF_UNIX) return fd;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);

    if (idist__os_socket_congestion(fd, name) && strncmp(name, "bbr", 3) == 0 &&
        setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "cubic", 5) != 0)
        setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4); // every system has it

    return fd;
}

// Why the system refuses local sockets to this process: an errno; 0: it does not refuse them.
static int idist__os_socket_local_error(void) {
    int error = 0, fd = idist__os_socket_open(AF_UNIX);

    if (fd < 0 && !idist__os_socket_out_of_fds(errno)) error = errno;
    idist__os_descriptor_close(&fd);

    return error;
}

// The shortest round trip through a TCP socket so far, in us; 0: not known.
IDIST__UNUSED static uint32_t idist__os_socket_round_trip_us(int fd) {
    enum { MIN_RTT_AT = 148 }; // in struct tcp_info, of which the C library may know the beginning
    unsigned char info[256];
    socklen_t nbytes = sizeof info;
    uint32_t min_rtt_us = 0;

    memset(info, 0, sizeof info);
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, &nbytes) != 0) return 0;
    if (nbytes >= MIN_RTT_AT + sizeof min_rtt_us)
        memcpy(&min_rtt_us, info + MIN_RTT_AT, sizeof min_rtt_us);

    return min_rtt_us != UINT32_MAX ? min_rtt_us : 0; // the kernel has not measured any
}

// The third number in a file of the kernel's settings: the most bytes of a buffer. 0: not known.
static uint64_t idist__os_socket_setting(const char *path) {
    char text[64], *at = text;
    uint64_t number = 0;
    ssize_t n;
    int i, fd = IDIST__OS_CALL(open(path, O_RDONLY | O_CLOEXEC));

    if (fd < 0) return 0;
    n = IDIST__OS_CALL(read(fd, text, sizeof text - 1));
    IDIST__OS_CALL(close(fd));
    if (n <= 0) return 0;
    text[n] = 0;
    for (i = 0; i < 3; i++) number = strtoull(at, &at, 10);

    return number;
}

// How many bytes can be under way in one TCP socket, as far as the system's limits on buffers go,
// of which about half holds data; 0: not known.
IDIST__UNUSED static uint64_t idist__os_socket_window_nbytes(void) {
    uint64_t send = idist__os_socket_setting("/proc/sys/net/ipv4/tcp_wmem");
    uint64_t receive = idist__os_socket_setting("/proc/sys/net/ipv4/tcp_rmem");

    return (send < receive ? send : receive) / 2;
}

// The bandwidth of a network interface in Mbit/s, as its driver gives it; 0: not known.
IDIST__UNUSED static uint32_t idist__os_socket_interface_mbits(const char *name) {
    char path[96], text[16];
    long long mbits = 0;
    ssize_t n;
    int fd;

    snprintf(path, sizeof path, "/sys/class/net/%s/speed", name);
    fd = IDIST__OS_CALL(open(path, O_RDONLY | O_CLOEXEC));
    if (fd < 0) return 0;
    n = IDIST__OS_CALL(read(fd, text, sizeof text - 1));
    IDIST__OS_CALL(close(fd));

    if (n > 0) {
        text[n] = 0;
        mbits = strtoll(text, NULL, 10);
    }

    return mbits > 0 && mbits < UINT32_MAX ? (uint32_t)mbits : 0;
}

// Called when some bytes have gone back and forth through a TCP socket: if the peer is far away,
// the congestion control of the system returns, as BBR is what helps against losses there.
IDIST__UNUSED static void idist__os_socket_measured(int fd) {
    enum { NEAR_US = 2000 };
    char name[16];
    int fresh;

    if (idist__os_socket_round_trip_us(fd) < NEAR_US) return;

    fresh = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0); // has that of the system
    if (fresh < 0) return;
    if (idist__os_socket_congestion(fresh, name))
        setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, (socklen_t)strlen(name));
    IDIST__OS_CALL(close(fresh));
}

// A socket that listens at an address, or -1; errno EADDRINUSE: another socket does.
static int idist__os_socket_listen(const idist__os_address *address) {
    int one = 1, zero = 0, error, fd = idist__os_socket_open(address->sa.ss_family);

    if (fd < 0) return -1;
    if (!idist__os_socket_is_local(address))
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (address->sa.ss_family == AF_INET6) // IPv4 as well, at the wildcard
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &zero, sizeof zero);
    if (bind(fd, (const struct sockaddr *)&address->sa, address->nbytes) == 0 &&
        listen(fd, 4096) == 0)
        return fd;

    error = errno;
    idist__os_descriptor_close(&fd);
    errno = error;

    return -1;
}

// A socket that listens at a port of all addresses of this host, IPv4 and IPv6, or -1 as above.
// Port 0: a free one.
static int idist__os_socket_listen_everywhere(int port) {
    idist__os_address any;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&any.sa;
    struct sockaddr_in *v4 = (struct sockaddr_in *)&any.sa;
    int fd;

    memset(&any, 0, sizeof any);
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons((uint16_t)port);
    any.nbytes = sizeof *v6;
    fd = idist__os_socket_listen(&any);
    if (fd >= 0 || errno == EADDRINUSE) return fd;

    memset(&any, 0, sizeof any); // a system without IPv6
    v4->sin_family = AF_INET;
    v4->sin_port = htons((uint16_t)port);
    any.nbytes = sizeof *v4;

    return idist__os_socket_listen(&any);
}

// An IP address of a network interface that is up.
typedef struct idist__os_interface {
    char name[32];
    idist__os_address address;
} idist__os_interface;

// The addresses of this host, in the order of the system, at most `capacity`. Returns how many are
// in `list`, or -1: they cannot be listed, errno says why.
static int idist__os_socket_interfaces(idist__os_interface *list, int capacity) {
    struct ifaddrs *all = NULL;
    const struct ifaddrs *at;
    int count = 0;

    if (IDIST__OS_CALL(getifaddrs(&all)) != 0) return -1;

    for (at = all; at && count < capacity; at = at->ifa_next) {
        idist__os_interface *to = &list[count];
        int family = at->ifa_addr ? at->ifa_addr->sa_family : AF_UNSPEC;

        if (!(at->ifa_flags & IFF_UP) || (family != AF_INET && family != AF_INET6)) continue;
        memset(to, 0, sizeof *to);
        snprintf(to->name, sizeof to->name, "%s", at->ifa_name);
        to->address.nbytes =
            family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
        memcpy(&to->address.sa, at->ifa_addr, to->address.nbytes);
        count++;
    }

    freeifaddrs(all);

    return count;
}

// Whether the process at the other end of a local socket belongs to our user: abstract sockets have
// no permissions.
static bool idist__os_socket_is_same_user(int fd) {
    struct {
        pid_t pid;
        uid_t uid;
        gid_t gid;
    } peer;
    socklen_t nbytes = sizeof peer;

    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &nbytes) == 0 && peer.uid == geteuid();
}

// The next connection, or -1; errno EAGAIN: none is pending. A local connection of another user is
// closed at once and reported as EAGAIN.
static int idist__os_socket_accept(int listener) {
    struct sockaddr_storage peer;
    socklen_t nbytes = sizeof peer;
    int one = 1, fd = IDIST__OS_CALL(accept(listener, (struct sockaddr *)&peer, &nbytes));

    if (fd < 0) return -1;
    IDIST__OS_CALL(fcntl(fd, F_SETFD, FD_CLOEXEC));
    IDIST__OS_CALL(fcntl(fd, F_SETFL, O_NONBLOCK));
    if (peer.ss_family != AF_UNIX) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (peer.ss_family != AF_UNIX || idist__os_socket_is_same_user(fd)) return fd;

    IDIST__OS_CALL(close(fd));
    errno = EAGAIN;

    return -1;
}

// Begins to connect. The socket is writable once the attempt has ended; see below. -1: errno says
// why.
static int idist__os_socket_connect_begin(const idist__os_address *address) {
    int error, fd = idist__os_socket_open(address->sa.ss_family);

    if (fd < 0) return -1;
    if (IDIST__OS_CALL(connect(fd, (const struct sockaddr *)&address->sa, address->nbytes)) == 0)
        return fd;
    if (errno == EINPROGRESS || errno == EINTR) return fd;

    error = errno;
    IDIST__OS_CALL(close(fd));
    errno = error;

    return -1;
}

// The attempt has ended: 0, or why it failed; then the socket is closed. EPERM: another user
// listens at the local address.
static int idist__os_socket_connect_end(int *fd, bool local) {
    int error = 0;
    socklen_t nbytes = sizeof error;

    if (getsockopt(*fd, SOL_SOCKET, SO_ERROR, &error, &nbytes) != 0) error = errno;
    if (!error && local && !idist__os_socket_is_same_user(*fd)) error = EPERM;
    if (error) idist__os_descriptor_close(fd);

    return error;
}

// One attempt to connect; blocks until the deadline at the latest. -1: errno says why, and the
// caller decides whether to try again. ETIMEDOUT: the deadline has passed.
static int idist__os_socket_connect(const idist__os_address *address, int64_t deadline_ns) {
    int error, fd = idist__os_socket_connect_begin(address);

    if (fd < 0) return -1;

    if (idist__os_poll_wait(fd, IDIST__OS_WRITABLE, deadline_ns)) {
        error = idist__os_socket_connect_end(&fd, idist__os_socket_is_local(address));
    } else {
        error = ETIMEDOUT;
        idist__os_descriptor_close(&fd);
    }

    errno = error;

    return fd;
}

// Whether an error of connect means that the network is down, or that this host has no address of
// that kind (IPv4, IPv6), rather than that the peer is gone.
static bool idist__os_socket_is_unreachable(int error) {
    return error == ENETUNREACH || error == ENETDOWN || error == EHOSTUNREACH ||
           error == EHOSTDOWN || error == EADDRNOTAVAIL || error == EAFNOSUPPORT;
}

// Whether an error means that this process or the system has no descriptor left.
// Reads what has arrived. > 0: bytes; 0: it would block; -1: the end of the stream (errno 0) or an
// error.
static ptrdiff_t idist__os_socket_read(int fd, void *buf, size_t nbytes) {
    for (;;) {
        ssize_t n = IDIST__OS_CALL(recv(fd, buf, nbytes, 0));

        if (n > 0) return n;

        if (n == 0) {
            errno = 0;
            return -1;
        }

        if (errno == EINTR) continue;
        return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : -1;
    }
}

// A piece of memory that is sent from. Laid out as struct iovec, so that a send copies no list.
typedef struct idist__os_part {
    const void *data;
    size_t nbytes;
} idist__os_part;

typedef char idist__os_part_is_iovec[sizeof(idist__os_part) == sizeof(struct iovec) &&
                                             offsetof(idist__os_part, nbytes) ==
                                                 offsetof(struct iovec, iov_len)
                                         ? 1
                                         : -1];

// Writes as much of several pieces as the socket takes now. > 0: bytes; 0: it would block; -1: an
// error. Never raises SIGPIPE.
static ptrdiff_t idist__os_socket_write(int fd, const idist__os_part *parts, int nparts) {
    struct msghdr message;

    memset(&message, 0, sizeof message);
    message.msg_iov = (struct iovec *)(uintptr_t)parts;
    message.msg_iovlen = (size_t)nparts;

    for (;;) {
        ssize_t n = IDIST__OS_CALL(sendmsg(fd, &message, MSG_NOSIGNAL));

        if (n >= 0) return n;
        if (errno == EINTR) continue;
        return errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS ? 0 : -1;
    }
}

// Tells the peer that nothing more will be sent: it reads the end of the stream after what was sent
// before. This side may still read. Does not block.
IDIST__UNUSED static void idist__os_socket_end_stream(int fd) { shutdown(fd, SHUT_WR); }

// Ends both directions: what has arrived can still be read, and then the end.
IDIST__UNUSED static void idist__os_socket_end(int fd) { shutdown(fd, SHUT_RDWR); }

// Whether the peer has closed the connection and everything it sent has been read.
IDIST__UNUSED static bool idist__os_socket_at_end(int fd) {
    char byte;
    ssize_t n;

    do n = IDIST__OS_CALL(recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT));
    while (n < 0 && errno == EINTR);
    return n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK);
}

// The address of the interface through which datagrams to an IPv4 address leave this host.
static bool idist__os_socket_route(const idist__os_address *to, idist__os_address *own) {
    int error, fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    bool found;

    if (fd < 0) return false;
    found = IDIST__OS_CALL(connect(fd, (const struct sockaddr *)&to->sa, to->nbytes)) ==
                0 && // sends nothing
            idist__os_socket_own_address(fd, own);
    error = errno;
    IDIST__OS_CALL(close(fd));
    errno = error;

    return found;
}

// A datagram socket that sends to an IPv4 multicast group through the interface of `own`, and as a
// member receives what is sent to the group. -1 on failure.
static int idist__os_socket_multicast(const idist__os_address *group, const idist__os_address *own,
                                      bool member) {
    int one = 1, error, fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    struct ip_mreq membership;
    bool ready;

    if (fd < 0) return -1;
    memset(&membership, 0, sizeof membership);
    membership.imr_multiaddr = ((const struct sockaddr_in *)&group->sa)->sin_addr;
    membership.imr_interface = ((const struct sockaddr_in *)&own->sa)->sin_addr;

    ready = setsockopt(fd, IPPROTO_IP, IP_MULTICAST_IF, &membership.imr_interface,
                       sizeof membership.imr_interface) == 0;
    if (ready && member)
        ready = setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0 &&
                bind(fd, (const struct sockaddr *)&group->sa, group->nbytes) == 0 &&
                setsockopt(fd, IPPROTO_IP, IP_ADD_MEMBERSHIP, &membership, sizeof membership) == 0;
    if (ready) return fd;

    error = errno;
    IDIST__OS_CALL(close(fd));
    errno = error;

    return -1;
}

// Sends one datagram. It may be lost without notice, so there is no result.
static void idist__os_socket_send_datagram(int fd, const void *data, size_t nbytes,
                                           const idist__os_address *to) {
    IDIST__OS_CALL(
        sendto(fd, data, nbytes, MSG_NOSIGNAL, (const struct sockaddr *)&to->sa, to->nbytes));
}

// Takes the next datagram: returns its whole size, of which at most `capacity` bytes are in buf, or
// -1 when none is pending.
static ptrdiff_t idist__os_socket_receive_datagram(int fd, void *buf, size_t capacity,
                                                   idist__os_address *from) {
    from->nbytes = sizeof from->sa;
    return IDIST__OS_CALL(
        recvfrom(fd, buf, capacity, MSG_TRUNC, (struct sockaddr *)&from->sa, &from->nbytes));
}

// The user whose processes may share local sockets, as a number for their names.
static unsigned long idist__os_socket_user(void) { return (unsigned long)geteuid(); }

// The name of this host; false when it has none that fits.
static bool idist__os_socket_host_name(char *buf, size_t capacity) {
    memset(buf, 0, capacity);
    return gethostname(buf, capacity - 1) == 0;
}

// A text that the processes of one machine have in common, whatever containers they are in: that of
// the boot, or else the host name.
static void idist__os_socket_machine(char *text, size_t capacity) {
    ssize_t n;
    int fd = IDIST__OS_CALL(open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));

    memset(text, 0, capacity);

    if (fd >= 0) {
        do n = IDIST__OS_CALL(read(fd, text, capacity - 1));
        while (n < 0 && errno == EINTR);
        IDIST__OS_CALL(close(fd));
    }

    if (!text[0] && !idist__os_socket_host_name(text, capacity)) text[0] = '?';
}

// A text that exactly those processes have in common which can connect through local sockets: the
// machine, the network namespace and the user.
IDIST__UNUSED static void idist__os_socket_reach(char *text, size_t capacity) {
    struct stat name_space;
    char boot[65];

    idist__os_socket_machine(boot, sizeof boot);
    if (stat("/proc/self/ns/net", &name_space) == 0)
        snprintf(text, capacity, "%s/%llu/%lu", boot, (unsigned long long)name_space.st_ino,
                 idist__os_socket_user());
    else snprintf(text, capacity, "%s/%lu", boot, idist__os_socket_user());
}

//------------------------------------------------------------------------------
// [os:beacon]  a name that exists as long as its process, and wakes it
// uses unwind descriptor socket
//
// A process lights a beacon under a local name. The kernel takes the name away when the process
// ends, however it ends. Others need no connection to see that, or to wake the process while it
// watches its beacon in poll: one socket of their own serves for any number of beacons.
//
// Here a beacon is a datagram socket. On macOS its name is a path, and one on which no socket is
// open gives ECONNREFUSED, too. On Windows the same takes a named mutex, which tells that its owner
// has ended, and an event.
//------------------------------------------------------------------------------

// A beacon under a local address, or -1 and errno. Watch it for IDIST__OS_READABLE.
IDIST__UNUSED static int idist__os_beacon_light(const idist__os_address *address) {
    int error, fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    if (fd < 0) return -1;
    if (bind(fd, (const struct sockaddr *)&address->sa, address->nbytes) == 0) return fd;

    error = errno;
    idist__os_descriptor_close(&fd);
    errno = error;

    return -1;
}

// The socket that the next two functions take, or -1 and errno.
IDIST__UNUSED static int idist__os_beacon_observer(void) {
    return socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
}

// Makes a beacon readable. Never blocks.
//
// EAGAIN has two reasons. The queue of the beacon may be full; then it is readable already. Or the
// bytes that we have sent to all beacons, and that nobody has read yet, fill the send buffer of our
// socket (about 280 of them); then another socket can send.
IDIST__UNUSED static void idist__os_beacon_wake(int observer, const idist__os_address *address) {
    const struct sockaddr *to = (const struct sockaddr *)&address->sa;
    int fresh;

    if (IDIST__OS_CALL(sendto(observer, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL, to, address->nbytes)) >=
        0)
        return;
    if (errno != EAGAIN) return;
    fresh = idist__os_beacon_observer();
    if (fresh < 0) return;
    IDIST__OS_CALL(sendto(fresh, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL, to, address->nbytes));
    idist__os_descriptor_close(&fresh);
}

// Looks at a beacon, without waking its process. 0: it is lit; ECONNREFUSED: it has gone out;
// another errno: the system does not let us see it.
IDIST__UNUSED static int idist__os_beacon_look(int observer, const idist__os_address *address) {
    return IDIST__OS_CALL(
               connect(observer, (const struct sockaddr *)&address->sa, address->nbytes)) == 0
               ? 0
               : errno;
}

// Makes our own beacon unreadable again.
IDIST__UNUSED static void idist__os_beacon_clear(int beacon) {
    char bytes[8];
    while (IDIST__OS_CALL(recv(beacon, bytes, sizeof bytes, MSG_DONTWAIT)) >= 0 || errno == EINTR)
        continue;
}

//------------------------------------------------------------------------------
// [os:file]  files, and locks on single bytes of them
// uses unwind
//
// Transfers block as long as the file system takes; locks are only tried. Failures leave the reason
// in errno. Open files are closed on exec and belong to the caller, who closes them with
// idist__os_file_close.
//
// A lock belongs to the open file, not to the process, so the ranks of one process can exclude each
// other; it ends when the last descriptor of that open file is closed, at the latest when the
// process dies. The locked byte need not exist. macOS and Windows have the same in flock and
// LockFileEx.
//------------------------------------------------------------------------------

typedef int idist__os_file; // an open file

enum { IDIST__OS_NO_FILE = -1 };

typedef enum idist__os_file_mode {
    IDIST__OS_FILE_READ,   // an existing file
    IDIST__OS_FILE_UPDATE, // an existing file, to read and write; no symbolic link
    IDIST__OS_FILE_CREATE, // the same; a missing file is made, for this user only
    IDIST__OS_FILE_OUTPUT  // to read and write, perhaps through a link; made as other programs do
} idist__os_file_mode;

typedef enum idist__os_file_lock {
    IDIST__OS_FILE_UNKNOWN, // the file system cannot tell
    IDIST__OS_FILE_FREE,
    IDIST__OS_FILE_LOCKED // by another open file
} idist__os_file_lock;

// IDIST__OS_NO_FILE on failure. Blocks where the path is a pipe, until it has a writer.
static idist__os_file idist__os_file_open(const char *path, idist__os_file_mode mode) {
    static const int flags[] = {O_RDONLY, O_RDWR | O_NOFOLLOW, O_RDWR | O_NOFOLLOW | O_CREAT,
                                O_RDWR | O_CREAT};
    return IDIST__OS_CALL(
        open(path, flags[mode] | O_CLOEXEC, mode == IDIST__OS_FILE_OUTPUT ? 0666 : 0600));
}

// Closes a file, if it is open, and sets it to IDIST__OS_NO_FILE. False: an earlier write failed.
static bool idist__os_file_close(idist__os_file *file) {
    bool good = *file < 0 || IDIST__OS_CALL(close(*file)) == 0;

    *file = IDIST__OS_NO_FILE;
    return good;
}

// Reads from the start of a file or from where the last call ended. Returns bytes, 0 at the end of
// the file, or -1.
static ptrdiff_t idist__os_file_read(idist__os_file file, void *buf, size_t capacity) {
    ssize_t n;
    do n = IDIST__OS_CALL(read(file, buf, capacity));
    while (n < 0 && errno == EINTR);
    return n;
}

static const size_t IDIST__OS_FILE_AT_ONCE = (size_t)1 << 30; // bytes, per system call

// All bytes or none. False: errno is 0 where the file ends before.
static bool idist__os_file_read_at(idist__os_file file, void *buf, size_t nbytes, uint64_t at) {
    char *to = (char *)buf;

    while (nbytes) {
        size_t wanted = nbytes < IDIST__OS_FILE_AT_ONCE ? nbytes : IDIST__OS_FILE_AT_ONCE;
        ssize_t n = IDIST__OS_CALL(pread(file, to, wanted, (off_t)at));

        if (n < 0 && errno == EINTR) continue;
        if (n == 0) errno = 0;
        if (n <= 0) return false;

        to += n;
        at += (uint64_t)n;
        nbytes -= (size_t)n;
    }

    return true;
}

// After a failure some of the bytes may be written.
static bool idist__os_file_write_at(idist__os_file file, const void *buf, size_t nbytes,
                                    uint64_t at) {
    const char *from = (const char *)buf;

    while (nbytes) {
        size_t wanted = nbytes < IDIST__OS_FILE_AT_ONCE ? nbytes : IDIST__OS_FILE_AT_ONCE;
        ssize_t n = IDIST__OS_CALL(pwrite(file, from, wanted, (off_t)at));

        if (n < 0 && errno == EINTR) continue;
        if (n == 0) errno = ENOSPC;
        if (n <= 0) return false;

        from += n;
        at += (uint64_t)n;
        nbytes -= (size_t)n;
    }

    return true;
}

// Returns when the bytes of a file are on the disk. False: errno.
IDIST__UNUSED static bool idist__os_file_sync(idist__os_file file) {
    int rc;

    do rc = IDIST__OS_CALL(fsync(file));
    while (rc != 0 && errno == EINTR);

    return rc == 0;
}

// Returns true if an error of a sync means that the file system, or a sandbox, does not sync such a
// file or folder. Other errors mean that something may be lost. The manual of fsync names EINVAL
// and EROFS for this; file systems of networks and of user space, and sandboxes, use the others.
IDIST__UNUSED static bool idist__os_file_refuses_sync(int error) {
    return error == EINVAL || error == ENOTSUP || error == EOPNOTSUPP || error == ENOSYS ||
           error == EBADF || error == EISDIR || error == EPERM || error == EACCES || error == EROFS;
}

// Cuts a file off, or prolongs it with zeros.
static bool idist__os_file_resize(idist__os_file file, uint64_t nbytes) {
    return IDIST__OS_CALL(ftruncate(file, (off_t)nbytes)) == 0;
}

// The size of a regular file; -1 for a folder, a pipe or a device (errno 0), and on failure.
static int64_t idist__os_file_size(idist__os_file file) {
    struct stat about;

    if (fstat(file, &about) != 0) return -1;
    errno = 0;
    return S_ISREG(about.st_mode) ? (int64_t)about.st_size : -1;
}

// What tells the present contents of a file from those of other files and other times.
typedef struct idist__os_file_version {
    uint64_t device, number, nbytes, modified_ns, changed_ns;
} idist__os_file_version;

// Gets the version of an open file. All zero: it is not known.
IDIST__UNUSED static void idist__os_file_version_of(idist__os_file file,
                                                    idist__os_file_version *version) {
    struct stat about;

    memset(version, 0, sizeof *version);
    if (fstat(file, &about) != 0) return;
    version->device = (uint64_t)about.st_dev;
    version->number = (uint64_t)about.st_ino;
    version->nbytes = (uint64_t)about.st_size;
    version->modified_ns = (uint64_t)about.st_mtim.tv_sec * 1000000000;
    version->modified_ns += (uint64_t)about.st_mtim.tv_nsec;
    version->changed_ns = (uint64_t)about.st_ctim.tv_sec * 1000000000;
    version->changed_ns += (uint64_t)about.st_ctim.tv_nsec;
}

// Whether an error of a write means that there is no space left, for anybody or for this user.
IDIST__UNUSED static bool idist__os_file_no_space(int error) {
    return error == ENOSPC || error == EDQUOT;
}

// Whether the file is ours and nobody else may read or write it.
static bool idist__os_file_is_private(idist__os_file file) {
    struct stat about;
    return fstat(file, &about) == 0 && !(about.st_mode & 077) && about.st_uid == geteuid();
}

// Whether a path still leads to an open file.
static bool idist__os_file_is_at(idist__os_file file, const char *path) {
    struct stat open_file, at_path;
    return fstat(file, &open_file) == 0 && stat(path, &at_path) == 0 &&
           open_file.st_dev == at_path.st_dev && open_file.st_ino == at_path.st_ino;
}

// Removes the name; those who have the file open keep it. Fails silently.
static void idist__os_file_remove(const char *path) { unlink(path); }

// Whether the folder exists in which a file at this path lies.
static bool idist__os_file_has_folder(const char *path) {
    const char *slash = strrchr(path, '/');
    char folder[4096];

    if (!slash || slash == path) return true;
    if ((size_t)(slash - path) >= sizeof folder) return false;
    memcpy(folder, path, (size_t)(slash - path));
    folder[slash - path] = 0;

    return access(folder, F_OK) == 0;
}

// The fcntl command of a lock; headers hide its name in strict modes.
enum { IDIST__OS_FILE_GETLK = 36 /* F_OFD_GETLK */, IDIST__OS_FILE_SETLK = 37 /* F_OFD_SETLK */ };

// Asks for a lock on one byte, or about it: 0, or -1 and errno.
static int idist__os_file_fcntl(idist__os_file file, int command, uint64_t byte,
                                struct flock *lock_at) {
    lock_at->l_whence = SEEK_SET;
    lock_at->l_start = (off_t)byte;
    lock_at->l_len = 1;
    lock_at->l_pid = 0;
    return IDIST__OS_CALL(fcntl(file, command, lock_at));
}

// Tries to lock one byte against all other open files. False: errno EAGAIN when another has it.
static bool idist__os_file_try_lock(idist__os_file file, uint64_t byte) {
    struct flock lock_at;
    int rc;

    memset(&lock_at, 0, sizeof lock_at);
    lock_at.l_type = F_WRLCK;
    do rc = idist__os_file_fcntl(file, IDIST__OS_FILE_SETLK, byte, &lock_at);
    while (rc != 0 && errno == EINTR);
    if (rc != 0 && errno == EACCES) errno = EAGAIN;
    return rc == 0;
}

// Gives the byte back.
static void idist__os_file_unlock(idist__os_file file, uint64_t byte) {
    struct flock lock_at;

    memset(&lock_at, 0, sizeof lock_at);
    lock_at.l_type = F_UNLCK;
    while (idist__os_file_fcntl(file, IDIST__OS_FILE_SETLK, byte, &lock_at) != 0 && errno == EINTR)
        continue;
}

// Whether another open file has locked a byte.
static idist__os_file_lock idist__os_file_locked(idist__os_file file, uint64_t byte) {
    struct flock lock_at;

    memset(&lock_at, 0, sizeof lock_at);
    lock_at.l_type = F_WRLCK;
    if (idist__os_file_fcntl(file, IDIST__OS_FILE_GETLK, byte, &lock_at) != 0)
        return IDIST__OS_FILE_UNKNOWN;
    return lock_at.l_type == F_UNLCK ? IDIST__OS_FILE_FREE : IDIST__OS_FILE_LOCKED;
}

//------------------------------------------------------------------------------
// [os:window]  a part of a file as memory
// uses memory file
//------------------------------------------------------------------------------

// Where a window may begin: at, rounded down.
IDIST__UNUSED static size_t idist__os_window_begin(size_t at) {
    size_t page = idist__os_memory_page_nbytes();
    return at / page * page;
}

// Maps nbytes of a file from a position that idist__os_window_begin gave, and makes the file that
// long, with space on the disk, so that no access to the window can fail. What is written to the
// window is in the file even if the process is killed. 0 or an errno. The caller unmaps it.
IDIST__UNUSED static int idist__os_window_map(idist__os_file file, size_t at, size_t nbytes,
                                              char **window) {
    struct rlimit limit;
    void *memory;
    int error;

    *window = NULL;
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
        limit.rlim_cur < at + nbytes)
        return EFBIG; // to exceed the limit would raise a signal

    error = idist__os_memory_reserve(file, at, nbytes);
    if (error) return error;
    memory = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, (off_t)at);
    if (memory == MAP_FAILED) return errno;
    *window = (char *)memory;

    return 0;
}

// NULL is no error.
IDIST__UNUSED static void idist__os_window_unmap(char *window, size_t nbytes) {
    if (window) munmap(window, nbytes);
}

//------------------------------------------------------------------------------
// [os:folder]  the names in a folder
// uses unwind file
//
// Calls return 0 or an errno, and may block for as long as the disk takes. A name is looked up in
// the open folder, even if that has been moved. The caller closes what it has opened.
//------------------------------------------------------------------------------

#include <dirent.h>

typedef int idist__os_folder; // an open folder

enum {
    IDIST__OS_NO_FOLDER = -1,
    IDIST__OS_HERE = AT_FDCWD // the current folder, where paths begin; needs no closing
};

// Creates a folder. It is no error if there is one already.
IDIST__UNUSED static int idist__os_folder_make(const char *path) {
    return mkdir(path, 0777) != 0 && errno != EEXIST ? errno : 0;
}

// Opens an existing folder. *folder is IDIST__OS_NO_FOLDER on failure.
IDIST__UNUSED static int idist__os_folder_open(const char *path, idist__os_folder *folder) {
    *folder = IDIST__OS_CALL(open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    return *folder < 0 ? errno : 0;
}

// Closes a folder, if it is open, and sets it to IDIST__OS_NO_FOLDER.
IDIST__UNUSED static void idist__os_folder_close(idist__os_folder *folder) {
    if (*folder >= 0) IDIST__OS_CALL(close(*folder));
    *folder = IDIST__OS_NO_FOLDER;
}

// Returns when the names in a folder are on the disk.
IDIST__UNUSED static int idist__os_folder_sync(idist__os_folder folder) {
    return idist__os_file_sync(folder) ? 0 : errno;
}

// Opens a file for reading. If it is a pipe, does not wait for its writer.
IDIST__UNUSED static int idist__os_folder_read_file(idist__os_folder folder, const char *name,
                                                    idist__os_file *file) {
    *file = IDIST__OS_CALL(openat(folder, name, O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    return *file < 0 ? errno : 0;
}

// Creates a file for writing. EEXIST: the name is taken.
IDIST__UNUSED static int idist__os_folder_new_file(idist__os_folder folder, const char *name,
                                                   idist__os_file *file) {
    *file = IDIST__OS_CALL(openat(folder, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    return *file < 0 ? errno : 0;
}

// Renames a file within the folder, atomically. It replaces a file that has the new name.
IDIST__UNUSED static int idist__os_folder_rename(idist__os_folder folder, const char *from,
                                                 const char *to) {
    return renameat(folder, from, folder, to) != 0 ? errno : 0;
}

// Removes a file. ENOENT: there is none of this name.
IDIST__UNUSED static int idist__os_folder_remove(idist__os_folder folder, const char *name) {
    return unlinkat(folder, name, 0) != 0 ? errno : 0;
}

// A walk over the names in a folder. The caller ends it, unless idist__os_folder_begin has failed.
typedef struct idist__os_folder_walk {
    DIR *dir;
} idist__os_folder_walk;

// Begins a walk at the first name. Names that come or go meanwhile may be missed or seen.
IDIST__UNUSED static int idist__os_folder_begin(idist__os_folder_walk *walk,
                                                idist__os_folder folder) {
    // A handle of its own: two that are duplicates would share the position in the folder.
    idist__os_folder own = IDIST__OS_CALL(openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    int error;

    walk->dir = own < 0 ? NULL : IDIST__OS_CALL(fdopendir(own));
    if (walk->dir) return 0;
    error = errno;
    idist__os_folder_close(&own);

    return error;
}

// The next name, valid until the next call. NULL: the end, or *error is not 0.
IDIST__UNUSED static const char *idist__os_folder_next(const idist__os_folder_walk *walk,
                                                       int *error) {
    struct dirent *entry;

    errno = 0; // readdir returns NULL at the end, and when it fails: on a number that 32 bits
               // cannot hold, for example
    entry = IDIST__OS_CALL(readdir(walk->dir));
    *error = entry ? 0 : errno;

    return entry ? entry->d_name : NULL;
}

// Ends a walk and frees what it has used.
IDIST__UNUSED static void idist__os_folder_end(const idist__os_folder_walk *walk) {
    IDIST__OS_CALL(closedir(walk->dir));
}

//------------------------------------------------------------------------------
// [os:process]  this process, its children, the memory of others
// uses unwind
//
// Child processes are created by fork. They are watched through a descriptor that becomes readable
// when they end, where the kernel has such (pidfd, Linux 5.3); elsewhere by looking often. A port
// may implement the group with CreateProcess and a job object, or with kqueue and a pipe; without
// fork, idist__os_process_fork fails always, and workers are started by a launcher.
//------------------------------------------------------------------------------

typedef pid_t idist__os_process;              // the id of a process, a signed integer; 0: none
typedef struct pollfd idist__os_process_slot; // one process in idist__os_process_sleep

// Signals that idist sends itself. A system without signals ends the process on the first two.
enum {
    IDIST__OS_PROCESS_TERMINATE = SIGTERM, // it may clean up
    IDIST__OS_PROCESS_KILL = SIGKILL,
    IDIST__OS_PROCESS_CONTINUE = SIGCONT // if it is stopped
};

// How a process ended.
typedef struct idist__os_process_end {
    int exit_code; // -1: a signal ended it
    int signal;    // 0: it exited
} idist__os_process_end;

typedef enum idist__os_process_state {
    IDIST__OS_PROCESS_RUNS,
    IDIST__OS_PROCESS_ENDED,
    IDIST__OS_PROCESS_UNKNOWN // not our child any more: the program has reaped it
} idist__os_process_state;

// This process. Asks the system each time, so it is right in a child made by fork.
static idist__os_process idist__os_process_id(void) { return getpid(); }

// Tells apart, on one host, processes that may have the same id because they are in different
// containers. 0: the system does not say.
IDIST__UNUSED static uint64_t idist__os_process_space(void) {
    struct stat about;
    return stat("/proc/self/ns/pid", &about) == 0 ? (uint64_t)about.st_ino : 0;
}

// Ends this process immediately, without exit handlers and without flushing stdio buffers.
static void idist__os_process_exit(int code) { _exit(code); }

// From here on this process dies with `parent`, or rather with the thread of it that made this
// process; at once if the parent is gone already. A process with more rights than its user loses
// this when it executes a program, so the program asks for it again.
static void idist__os_process_die_with(idist__os_process parent) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
}

// The process that made this one, or that has adopted it.
static idist__os_process idist__os_process_parent(void) { return getppid(); }

// Makes a child that dies with the calling thread. Returns its id; 0 in the child; -1 and errno. In
// a child of a program with threads only simple system calls are safe.
static idist__os_process idist__os_process_fork(void) {
    pid_t parent = getpid(), pid = fork();
    if (pid == 0) idist__os_process_die_with(parent);
    return pid;
}

// From here on, every child that this process makes by fork, however it does, calls the function
// first. Cannot be taken back. False: no memory. A system without fork has nothing to do.
IDIST__UNUSED static inline bool idist__os_process_on_fork(void (*in_child)(void)) {
    return pthread_atfork(NULL, NULL, in_child) == 0;
}

// Replaces this process by a program; returns errno if that fails. Safe after fork. The second try
// is for the file of this very process, which may have been replaced or removed since it started.
static int idist__os_process_execute(const char *path, char **argv, char **envp) {
    execve(path, argv, envp);
    execve("/proc/self/exe", argv, envp);
    return errno;
}

// The path of the running program. False and errno if the system does not tell.
static bool idist__os_process_path(char *path, size_t cap) {
    ssize_t n = readlink("/proc/self/exe", path, cap - 1);

    if (n <= 0) return false;
    path[n] = 0;
    return true;
}

// A descriptor to read the arguments of this process from, one after the other, each ending in a
// NUL; the caller closes it. -1 and errno.
static int idist__os_process_open_args(void) {
    return IDIST__OS_CALL(open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC));
}

// Reads from such a descriptor; 0 at the end and after an error.
static size_t idist__os_process_read_args(int fd, char *buf, size_t nbytes) {
    ssize_t n;
    do n = IDIST__OS_CALL(read(fd, buf, nbytes));
    while (n < 0 && errno == EINTR);
    return n > 0 ? (size_t)n : 0;
}

// The variables of this process, ended by NULL; the system's own array.
static char **idist__os_process_variables(void) {
    extern char **environ;
    return environ;
}

// Whether a descriptor stays open in a program that this process executes. Safe after fork.
static void idist__os_process_pass(int fd, bool pass) {
    IDIST__OS_CALL(fcntl(fd, F_SETFD, pass ? 0 : FD_CLOEXEC));
}

// Moves a descriptor beyond stdin, stdout and stderr, which may be closed. False and errno; *fd is
// valid either way.
static bool idist__os_process_move_fd(int *fd) {
    int higher = IDIST__OS_CALL(fcntl(*fd, F_DUPFD_CLOEXEC, 3));

    if (higher < 0) return false;
    IDIST__OS_CALL(close(*fd));
    *fd = higher;
    return true;
}

// Memory that this process shares with its children: that of a file, or if fd is -1, memory that
// only forked children have. NULL and errno.
static void *idist__os_process_share(int fd, size_t nbytes) {
    void *p = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | (fd < 0 ? MAP_ANONYMOUS : 0),
                   fd, 0);
    return p == MAP_FAILED ? NULL : p;
}

// Takes such memory back from this process only. NULL is no error.
static void idist__os_process_unshare(void *p, size_t nbytes) {
    if (p) munmap(p, nbytes);
}

// Whether a descriptor is a file that begins with these bytes.
static bool idist__os_process_file_begins(int fd, const char *bytes, size_t nbytes) {
    char head[64];
    return nbytes <= sizeof head && IDIST__OS_CALL(pread(fd, head, nbytes, 0)) == (ssize_t)nbytes &&
           memcmp(head, bytes, nbytes) == 0;
}

// Whether a descriptor is a file of exactly this size.
static bool idist__os_process_file_has(int fd, size_t nbytes) {
    struct stat st;
    return fstat(fd, &st) == 0 && (size_t)st.st_size == nbytes;
}

// A descriptor to watch a child by; -1 where the kernel has none. The caller closes it.
static int idist__os_process_watch(idist__os_process child) {
    return (int)syscall(434 /* pidfd_open */, child, 0);
}

// Sends a signal to a child that was not reaped by us. Through the descriptor, where there is one,
// no other process is hit that got the same id.
static void idist__os_process_signal(idist__os_process child, int fd, int signal_number) {
    if (syscall(424 /* pidfd_send_signal */, fd, signal_number, NULL, 0) != 0 && errno != ESRCH)
        kill(child, signal_number);
}

// Reaps a child if it has ended; *end says how. Does not block.
static idist__os_process_state idist__os_process_reap(idist__os_process child,
                                                      idist__os_process_end *end) {
    int status = 0;
    pid_t rc;

    do rc = IDIST__OS_CALL(waitpid(child, &status, WNOHANG));
    while (rc < 0 && errno == EINTR);
    if (rc == 0) return IDIST__OS_PROCESS_RUNS;
    if (rc < 0) return IDIST__OS_PROCESS_UNKNOWN;

    end->exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    end->signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;

    return IDIST__OS_PROCESS_ENDED;
}

// Fills a slot with what idist__os_process_watch has returned.
static void idist__os_process_slot_set(idist__os_process_slot *slot, int fd) {
    slot->fd = fd;
    slot->events = POLLIN;
}

// Sleeps until a watched child ends, a signal arrives or the time is over; ms < 0: no limit. Slots
// with fd -1 are skipped.
static void idist__os_process_sleep(idist__os_process_slot *slots, int n, int ms) {
    IDIST__OS_CALL(poll(slots, (nfds_t)n, ms));
}

// Copies from the memory of another process of this user. 0, or an errno: ESRCH (it has ended),
// EPERM (not allowed), EFAULT (not mapped there), ENOSYS (the system cannot do it).
IDIST__UNUSED static int idist__os_process_read_memory(idist__os_process process, uint64_t address,
                                                       void *buf, size_t nbytes) {
    char *to = (char *)buf;

    while (nbytes) {
        struct iovec here, there;
        long n;

        here.iov_base = to;
        there.iov_base = (void *)(uintptr_t)address;
        here.iov_len = there.iov_len = nbytes;
        n = syscall(SYS_process_vm_readv, (long)process, &here, 1L, &there, 1L, 0L);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return n < 0 ? errno : EFAULT;
        to += n;
        address += (uint64_t)n;
        nbytes -= (size_t)n;
    }

    return 0;
}

// Returns whether another process could read nbytes (not 0) of this process's memory with
// idist__os_process_read_memory, as far as eight samples tell. Memory of memfd_secret and of
// devices cannot be read. Takes a microsecond.
IDIST__UNUSED static bool idist__os_process_memory_is_open(const void *memory, size_t nbytes) {
    enum { SAMPLES = 8 };
    struct iovec here, there[SAMPLES];
    char bytes[SAMPLES];
    size_t i, step = (nbytes - 1) / (SAMPLES - 1);

    here.iov_base = bytes;
    here.iov_len = sizeof bytes;

    for (i = 0; i < SAMPLES; i++) {
        size_t at = i == SAMPLES - 1 ? nbytes - 1 : i * step;
        there[i].iov_base = (char *)(uintptr_t)memory + at;
        there[i].iov_len = 1;
    }

    return syscall(SYS_process_vm_readv, (long)getpid(), &here, 1L, there, (long)SAMPLES, 0L) ==
           (long)SAMPLES;
}

// Valid until the next call.
static const char *idist__os_process_signal_name(int signal_number) {
    return strsignal(signal_number);
}

//------------------------------------------------------------------------------
// [os:segment]  passing a file in memory to another process of this host
// uses unwind
//
// A descriptor travels with a short message over a local socket. Where sockets cannot carry one, a
// port uses a name instead (shm_open, CreateFileMapping) and passes that.
//------------------------------------------------------------------------------

// Sends a message, with a descriptor unless fd is -1. Does not block. Returns the bytes sent, or -1
// and errno; EAGAIN: the socket is full.
IDIST__UNUSED static ptrdiff_t idist__os_segment_send(int sock, const void *buf, size_t nbytes,
                                                      int fd) {
    struct msghdr message;
    struct iovec part;
    ptrdiff_t sent;
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;

    memset(&message, 0, sizeof message);
    memset(&control, 0, sizeof control);
    part.iov_base = (void *)(uintptr_t)buf;
    part.iov_len = nbytes;
    message.msg_iov = &part;
    message.msg_iovlen = 1;

    if (fd >= 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
        control.head.cmsg_level = SOL_SOCKET;
        control.head.cmsg_type = SCM_RIGHTS;
        control.head.cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(&control.head), &fd, sizeof fd);
    }

    do sent = IDIST__OS_CALL(sendmsg(sock, &message, MSG_NOSIGNAL));
    while (sent < 0 && errno == EINTR);

    return sent;
}

// Receives a message; *fd becomes its descriptor, which the caller closes, or -1. Does not block.
// Returns the bytes received, 0 at the end of the stream, or -1 and errno.
IDIST__UNUSED static ptrdiff_t idist__os_segment_receive(int sock, void *buf, size_t nbytes,
                                                         int *fd) {
    struct msghdr message;
    struct iovec part;
    ptrdiff_t received;
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;

    *fd = -1;
    memset(&message, 0, sizeof message);
    part.iov_base = buf;
    part.iov_len = nbytes;
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.bytes;
    message.msg_controllen = sizeof control.bytes;

    do received = IDIST__OS_CALL(recvmsg(sock, &message, MSG_CMSG_CLOEXEC));
    while (received < 0 && errno == EINTR);
    if (received > 0 && message.msg_controllen >= CMSG_LEN(sizeof(int)) &&
        control.head.cmsg_level == SOL_SOCKET && control.head.cmsg_type == SCM_RIGHTS)
        memcpy(fd, CMSG_DATA(&control.head), sizeof *fd);

    return received;
}

// The size of such a file; 0 when it cannot be told.
IDIST__UNUSED static size_t idist__os_segment_nbytes(int fd) {
    struct stat info;
    return fstat(fd, &info) == 0 && info.st_size > 0 ? (size_t)info.st_size : 0;
}

// The memory of this host in bytes.
IDIST__UNUSED static uint64_t idist__os_segment_ram(void) {
    return (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
}

//------------------------------------------------------------------------------
// [os:terminal]  the terminal
// uses -
//------------------------------------------------------------------------------

#include <sys/ioctl.h>

// Whether stderr is a terminal.
IDIST__UNUSED static bool idist__os_terminal_has_stderr(void) { return isatty(STDERR_FILENO) != 0; }

// Columns of the terminal that stderr is connected to; 0 when it is no terminal or does not say.
IDIST__UNUSED static size_t idist__os_terminal_columns(void) {
    struct winsize size;

    memset(&size, 0, sizeof size);
    if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0) return 0;
    return size.ws_col;
}

//------------------------------------------------------------------------------
// [os:library]  shared libraries that are loaded at run time
// uses unwind
//
// Only idist_nccl.h uses it. The functions are inline so that programs without GPUs need no -ldl,
// even where nothing is optimized. None of them blocks for longer than reading a file takes.
// Libraries are never unloaded, because they may have threads.
//------------------------------------------------------------------------------

#include <dlfcn.h>
#include <glob.h>

// Loads a library, from where the loader looks if `path` is a plain name. path NULL: the program
// and the libraries it is linked with. Returns NULL if it cannot be loaded;
// idist__os_library_error says why.
IDIST__UNUSED static inline void *idist__os_library_open(const char *path) {
    return IDIST__OS_CALL(dlopen(path, RTLD_NOW | RTLD_LOCAL));
}

// A library that is loaded already; otherwise NULL.
IDIST__UNUSED static inline void *idist__os_library_loaded(const char *path) {
    return IDIST__OS_CALL(dlopen(path, RTLD_NOW | RTLD_NOLOAD));
}

// Loads the first file that a pattern of the shell (with *) matches and that can be loaded.
IDIST__UNUSED static inline void *idist__os_library_match(const char *pattern) {
    void *library = NULL;
    glob_t found;
    size_t i;

    if (IDIST__OS_CALL(glob(pattern, 0, NULL, &found)) != 0) return NULL;
    for (i = 0; i < found.gl_pathc && !library; i++)
        library = idist__os_library_open(found.gl_pathv[i]);
    globfree(&found);

    return library;
}

// The address of a function or variable; NULL: the library does not have it.
IDIST__UNUSED static inline void *idist__os_library_find(void *library, const char *name) {
    return dlsym(library, name);
}

// Why the last of these functions failed, in this thread. The text is valid until the next call.
IDIST__UNUSED static inline const char *idist__os_library_error(void) {
    const char *text = dlerror();
    return text ? text : "no reason given";
}

#endif // IDIST_OS_H
