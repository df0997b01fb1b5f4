/* idist_os.h - v0.1.0 - what idist needs of the operating system - MIT licence

    Part of the implementation of idist; idist.h includes it where IDIST_IMPLEMENTATION is defined.

WHAT IT IS

    All system calls and system headers, behind functions named idist__os_*. A port to another
    operating system replaces the bodies in this file. Each function says whether it may block, what
    it returns, and who owns what. Where a system lacks a service (reading the memory of another
    process, fencing the others), its function may fail always: the callers have another way.

HOW IT FITS

    The lowest room: it uses none of the others.

CONTENTS

      [os:system]      the systems that are supported, and their headers
      [os:clock]       monotonic time, deadlines, pauses
      [os:random]      random bytes
      [os:env]         environment variables
      [os:descriptor]  closing descriptors
      [os:cpu]         processors, and hints to them
      [os:thread]      threads and condition variables
      [os:memory]      pages, memory that processes share, the memory of other processes
      [os:wake]        sleeping until another process changes a word
      [os:socket]      stream sockets and name lookup
      [os:file]        files, locks on them, and folders
      [os:process]     child processes and the end of others
      [os:poll]        waiting for descriptors, and waking who waits
      [os:terminal]    the terminal
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
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
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
// [os:clock]  monotonic time, deadlines, pauses
// uses -
//
// A deadline is a point of the monotonic clock in nanoseconds.
//------------------------------------------------------------------------------

static const int64_t IDIST__MS = 1000000; // nanoseconds in a millisecond
static const int64_t IDIST__FOREVER = INT64_MAX;

static int64_t idist__os_now_ns(void) {
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

// The deadline `timeout_ms` from now; negative: never.
static int64_t idist__os_deadline(int64_t timeout_ms) {
    return timeout_ms < 0 ? IDIST__FOREVER : idist__os_now_ns() + timeout_ms * IDIST__MS;
}

// Milliseconds until a deadline, rounded up, as poll(2) wants them: 0 when it has passed, -1 for
// never. At most 1000 seconds, so callers look again.
static int idist__os_ms_until(int64_t deadline_ns) {
    int64_t left;

    if (deadline_ns == IDIST__FOREVER) return -1;
    left = deadline_ns - idist__os_now_ns();
    if (left <= 0) return 0;

    left = (left + IDIST__MS - 1) / IDIST__MS;
    return left > 1000000 ? 1000000 : (int)left;
}

// Blocks. A signal may cut it short: callers loop over deadlines.
static void idist__os_pause_ms(int ms) {
    struct timespec ts;

    ts.tv_sec = ms / 1000;
    ts.tv_nsec = (long)(ms % 1000) * 1000000;
    nanosleep(&ts, NULL);
}

//------------------------------------------------------------------------------
// [os:random]  random bytes
// uses clock
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
    fd = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;

    do n = read(fd, buf, nbytes);
    while (n < 0 && errno == EINTR);
    close(fd);

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
            int64_t mix = idist__os_now_ns() ^ ((int64_t)getpid() << 32) ^ (int64_t)(uintptr_t)p;
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
// uses -
//------------------------------------------------------------------------------

// Closes a descriptor, if it is open (not negative), and sets it to -1.
static void idist__os_close(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

//------------------------------------------------------------------------------
// [os:cpu]  processors, and hints to them
// uses -
//------------------------------------------------------------------------------

enum { IDIST__CPU_WORDS = 128 };
typedef struct idist__cpus {              // a set of processors
    unsigned long bits[IDIST__CPU_WORDS]; // 8192 on 64-bit systems
} idist__cpus;

// The processors that the calling thread may run on.
static void idist__os_cpus(idist__cpus *cpus) {
    memset(cpus, 0, sizeof *cpus);
    if (syscall(SYS_sched_getaffinity, 0, sizeof *cpus, cpus) <= 0) cpus->bits[0] = 1;
}

static int idist__cpus_count(const idist__cpus *cpus) {
    int i, count = 0;

    for (i = 0; i < IDIST__CPU_WORDS; i++) count += __builtin_popcountl(cpus->bits[i]);
    return count;
}

// How many processors the calling thread may run on.
static int idist__os_ncores(void) {
    idist__cpus cpus;

    idist__os_cpus(&cpus);
    return idist__cpus_count(&cpus);
}

// Moves the calling thread to one of the processors that it may run on (the index-th). If `stay` is
// set it may run nowhere else from then on. False: the system refused.
static bool idist__os_bind(int index, bool stay) {
    idist__cpus all, one;
    int i, width = 8 * (int)sizeof all.bits[0];

    idist__os_cpus(&all);
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

// Lets other threads run on this processor.
IDIST__UNUSED static void idist__os_yield(void) { sched_yield(); }

// Tells the processor that this is a loop that waits.
IDIST__UNUSED static void idist__os_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

// Prefetches a cache line for writing, without waiting for it.
IDIST__UNUSED static void idist__os_claim(const void *p) {
#if defined(__x86_64__)
    // For old targets the builtin would prefetch for reading only.
    __asm__ __volatile__("prefetchw %0" : : "m"(*(const char *)p));
#else
    __builtin_prefetch(p, 1);
#endif
}

// Makes all other processes that have announced themselves execute a full memory fence before it
// returns (membarrier(2)). `announce` is that announcement, once per process. False: the system has
// no such call.
IDIST__UNUSED static bool idist__os_fence_others(bool announce) {
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
// [os:thread]  threads and condition variables
// uses clock
//------------------------------------------------------------------------------

// Starts a thread that takes no signals, because they belong to the program's own threads. 0, or an
// errno. The caller joins or detaches it.
static int idist__os_thread(pthread_t *thread, void *(*fn)(void *), void *arg) {
    sigset_t all, before;
    int rc;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    rc = pthread_create(thread, NULL, fn, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);

    return rc;
}

// Threads of this process; a large number if the system does not tell.
IDIST__UNUSED static int idist__os_nthreads(void) {
    enum { UNKNOWN = 1000, FIELD = 20 }; // of /proc/self/stat
    char text[512], *at;
    ssize_t n;
    int i, fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);

    if (fd < 0) return UNKNOWN;

    do n = read(fd, text, sizeof text - 1);
    while (n < 0 && errno == EINTR);
    close(fd);
    if (n <= 0) return UNKNOWN;

    text[n] = 0;
    at = strrchr(text, ')'); // field 2 is the program's name, which may contain anything
    for (i = 2; at && i < FIELD; i++) at = strchr(at + 1, ' ');

    return at ? atoi(at) : UNKNOWN;
}

// A condition variable whose deadlines are those of [os:clock].
static void idist__os_cond_init(pthread_cond_t *cond) {
    pthread_condattr_t attr;

    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attr);
    pthread_condattr_destroy(&attr);
}

// Blocks until the condition is signalled or the deadline passes; may return for no reason.
static void idist__os_cond_wait(pthread_cond_t *cond, pthread_mutex_t *lock, int64_t deadline_ns) {
    struct timespec ts;

    if (deadline_ns == IDIST__FOREVER) {
        pthread_cond_wait(cond, lock);
        return;
    }

    ts.tv_sec = (time_t)(deadline_ns / 1000000000);
    ts.tv_nsec = (long)(deadline_ns % 1000000000);
    pthread_cond_timedwait(cond, lock, &ts);
}

// To be called before something is published through shared memory, and after it was seen. Only for
// the thread sanitizer: ranks that are threads of one process map the memory at different
// addresses, so it cannot see that one synchronizes with the other.
IDIST__UNUSED static void idist__os_handover(void) {
#if defined(__SANITIZE_THREAD__)
    static uint32_t word;
    __atomic_fetch_add(&word, 1u, __ATOMIC_ACQ_REL);
#endif
}

//------------------------------------------------------------------------------
// [os:memory]  pages, memory that processes share, the memory of other processes
// uses -
//------------------------------------------------------------------------------

// A number in shared memory that is read and written atomically. i386 would align it to 4 bytes, so
// that it could lie in two cache lines.
typedef uint64_t idist__counter __attribute__((aligned(8)));

static size_t idist__os_memory_page_nbytes(void) { return (size_t)sysconf(_SC_PAGESIZE); }

// Maps all of a file, shared with the other processes that map it, without reserving memory. Core
// dumps leave it out. NULL and errno on failure. The caller unmaps it; `fd` stays the caller's.
IDIST__UNUSED static void *idist__os_memory_map(int fd, size_t nbytes) {
    void *map = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);

    if (map == MAP_FAILED) return NULL;
    madvise(map, nbytes, MADV_DONTDUMP);
    return map;
}

IDIST__UNUSED static void idist__os_memory_unmap(void *map, size_t nbytes) { munmap(map, nbytes); }

// Gives whole pages of a mapped file back to the system, for all processes: they read as zeros from
// then on.
IDIST__UNUSED static void idist__os_memory_discard(void *pages, size_t nbytes) {
    enum { REMOVE = 9 }; // MADV_REMOVE, which older headers lack
    madvise(pages, nbytes, REMOVE);
}

// A file in memory, without a name, whose size can never change. -1 and errno on failure. The
// caller closes it.
IDIST__UNUSED static int idist__os_memfd(size_t nbytes) {
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
    if (ftruncate(fd, (off_t)nbytes) == 0 && fcntl(fd, ADD_SEALS, SEAL_SHRINK_GROW) == 0) return fd;

    err = errno;
    close(fd);
    errno = err;

    return -1;
}

// Takes memory for a part of such a file now, so that no access to it can fail later. 0, or an
// errno. May take long for large parts.
static int idist__os_reserve(int fd, size_t at, size_t nbytes) {
    int rc;

    do rc = posix_fallocate(fd, (off_t)at, (off_t)nbytes);
    while (rc == EINTR);

    return rc;
}

// Copies from the memory of another process of this user. 0, or an errno: ESRCH (it has ended),
// EPERM (not allowed), EFAULT (not mapped there).
IDIST__UNUSED static int idist__os_read_other(pid_t pid, uint64_t address, void *buf,
                                              size_t nbytes) {
    char *to = (char *)buf;

    while (nbytes) {
        struct iovec here, there;
        long n;

        here.iov_base = to;
        there.iov_base = (void *)(uintptr_t)address;
        here.iov_len = there.iov_len = nbytes;
        n = syscall(SYS_process_vm_readv, (long)pid, &here, 1L, &there, 1L, 0L);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return n < 0 ? errno : EFAULT;
        to += n;
        address += (uint64_t)n;
        nbytes -= (size_t)n;
    }

    return 0;
}

// A word that reads 1 in this process and 0 in a child made by fork, so that a check costs no
// system call. NULL: the kernel cannot do that. Freed by idist__os_fork_guard_free.
static int *idist__os_fork_guard(void) {
    enum { WIPE_ON_FORK = 18 }; // MADV_WIPEONFORK, which older headers lack
    size_t nbytes = idist__os_memory_page_nbytes();
    void *page = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (page == MAP_FAILED) return NULL;

    if (madvise(page, nbytes, WIPE_ON_FORK) != 0) {
        munmap(page, nbytes);
        return NULL;
    }

    *(int *)page = 1;

    return (int *)page;
}

static void idist__os_fork_guard_free(int *guard) {
    if (guard) munmap(guard, idist__os_memory_page_nbytes());
}

//------------------------------------------------------------------------------
// [os:wake]  sleeping until another process changes a word
// uses clock
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
IDIST__UNUSED static void idist__os_futex_wait(uint32_t *word, uint32_t value,
                                               int64_t deadline_ns) {
    struct {
        idist__os_futex_part seconds, nanoseconds;
    } timeout;
    int64_t left = deadline_ns - idist__os_now_ns(), seconds = left / 1000000000;

    if (left <= 0) return;
    timeout.seconds = (idist__os_futex_part)(seconds < INT32_MAX ? seconds : INT32_MAX);
    timeout.nanoseconds = (idist__os_futex_part)(left % 1000000000);
    syscall(IDIST__OS_FUTEX, word, IDIST__OS_FUTEX_WAIT, value,
            deadline_ns == IDIST__FOREVER ? NULL : &timeout, NULL, 0);
}

// Wakes all who sleep on the word, in all processes.
IDIST__UNUSED static void idist__os_futex_wake(uint32_t *word) {
    syscall(IDIST__OS_FUTEX, word, IDIST__OS_FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

// Sends one byte through a socket, so that a peer that sleeps in poll on it wakes up. Never blocks:
// when the socket is full, the peer has enough to read.
IDIST__UNUSED static void idist__os_wake_peer(int fd) {
    send(fd, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

//------------------------------------------------------------------------------
// [os:socket]  stream sockets and name lookup
// uses -
//------------------------------------------------------------------------------



//------------------------------------------------------------------------------
// [os:file]  files, locks on them, and folders
// uses -
//------------------------------------------------------------------------------



//------------------------------------------------------------------------------
// [os:process]  child processes and the end of others
// uses -
//------------------------------------------------------------------------------



//------------------------------------------------------------------------------
// [os:poll]  waiting for descriptors, and waking who waits
// uses -
//------------------------------------------------------------------------------



//------------------------------------------------------------------------------
// [os:terminal]  the terminal
// uses -
//------------------------------------------------------------------------------



#endif // IDIST_OS_H
