/* idist_os.h - v0.1.0 - what idist needs of the operating system - MIT licence

    Part of the implementation of idist; idist.h includes it where IDIST_IMPLEMENTATION is defined.

CONTENTS

      [os:os]  the only place that knows the operating system: time, randomness, memory pages, descriptors
*/
#ifndef IDIST_OS_H
#define IDIST_OS_H

//------------------------------------------------------------------------------
// [os:os]  the only place that knows the operating system: time, randomness, memory pages, descriptors
// uses -
// used by everything below
//------------------------------------------------------------------------------

#if !defined(__linux__)
#error \
    "idist: only Linux so far. A port goes into this file and the socket section of idist_launch.h."
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
#error \
    "where IDIST_IMPLEMENTATION is defined, include idist.h before every system header (or use -D_DEFAULT_SOURCE)"
#endif

static const int64_t IDIST__MS = 1000000; // nanoseconds in a millisecond
static const int64_t IDIST__FOREVER = INT64_MAX;

static int64_t idist__os_now_ns(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

// The moment `timeout_ms` from now; negative means never.
static int64_t idist__os_deadline(int64_t timeout_ms) {
    return timeout_ms < 0 ? IDIST__FOREVER : idist__os_now_ns() + timeout_ms * IDIST__MS;
}

// Milliseconds until a deadline, rounded up, as poll(2) wants them.
static int idist__os_ms_until(int64_t deadline_ns) {
    int64_t left;

    if (deadline_ns == IDIST__FOREVER) return -1;
    left = deadline_ns - idist__os_now_ns();
    if (left <= 0) return 0;
    left = (left + IDIST__MS - 1) / IDIST__MS;
    return left > 1000000 ? 1000000 : (int)left;
}

static void idist__os_pause_ms(int ms) {
    struct timespec ts;
    ts.tv_sec = ms / 1000;
    ts.tv_nsec = (long)(ms % 1000) * 1000000;
    nanosleep(&ts, NULL); // cut short by a signal: the callers loop over deadlines
}

// By number, since glibc before 2.25 has no getrandom(); kernels before 3.17 have none either.
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

static void idist__os_random(void *buf, size_t nbytes) {
    unsigned char *p = (unsigned char *)buf;

    while (nbytes) {
        ssize_t n = idist__os_random_some(p, nbytes);

        if (n > 0) {
            p += n;
            nbytes -= (size_t)n;
        } else if (errno != EINTR) {
            // Neither (an old sandbox). Nonces must differ, so clock and process id are better than
            // nothing.
            int64_t mix = idist__os_now_ns() ^ ((int64_t)getpid() << 32) ^ (int64_t)(uintptr_t)p;
            size_t k = nbytes < sizeof mix ? nbytes : sizeof mix;
            memcpy(p, &mix, k);
            p += k;
            nbytes -= k;
        }
    }
}

// A value of the environment; an empty one counts as not set, as in torch's env://.
static const char *idist__os_env(const char *name) {
    const char *v = getenv(name);
    return v && v[0] ? v : NULL;
}

// The processors a thread may run on, a bit for each.
enum { IDIST__CPU_WORDS = 128 };
typedef struct idist__cpus {
    unsigned long bits[IDIST__CPU_WORDS]; // 8192 processors
} idist__cpus;

static void idist__os_cpus(idist__cpus *cpus) {
    memset(cpus, 0, sizeof *cpus);
    if (syscall(SYS_sched_getaffinity, 0, sizeof *cpus, cpus) <= 0) cpus->bits[0] = 1;
}

static int idist__cpus_count(const idist__cpus *cpus) {
    int i, n = 0;
    for (i = 0; i < IDIST__CPU_WORDS; i++) n += __builtin_popcountl(cpus->bits[i]);
    return n;
}

static int idist__os_ncores(void) {
    idist__cpus cpus;
    idist__os_cpus(&cpus);
    return idist__cpus_count(&cpus);
}

// Moves the calling thread to the k-th of the processors it may use, and, if it is to stay there,
// keeps it from the others.
static bool idist__os_bind(int k, bool stay) {
    idist__cpus cpus, one;
    int i, bit, width = 8 * (int)sizeof cpus.bits[0];

    idist__os_cpus(&cpus);
    memset(&one, 0, sizeof one);

    for (i = 0; i < IDIST__CPU_WORDS * width; i++) {
        bit = (int)(cpus.bits[i / width] >> (i % width) & 1);
        if (bit && k-- == 0) {
            one.bits[i / width] = 1ul << (i % width);
            if (syscall(SYS_sched_setaffinity, 0, sizeof one, &one) != 0) return false;
            return stay || syscall(SYS_sched_setaffinity, 0, sizeof cpus, &cpus) ==
                               0; // by then it is there
        }
    }

    return false;
}

// Threads of this process; a large number when that cannot be told.
IDIST__UNUSED static int idist__os_nthreads(void) {
    char text[512], *at;
    ssize_t n;
    int i, fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);

    if (fd < 0) return 1000;
    do n = read(fd, text, sizeof text - 1);
    while (n < 0 && errno == EINTR);
    close(fd);
    if (n <= 0) return 1000;
    text[n] = 0;
    at = strrchr(text, ')'); // field 2 is the name, which may contain anything; 20 is the number
    for (i = 2; at && i < 20; i++) at = strchr(at + 1, ' ');

    return at ? atoi(at) : 1000;
}

static void idist__os_close(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

// A word that reads 1 in this process and 0 in a child made by fork, without a system call per
// look.
static int *idist__os_fork_guard(void) {
    long page = sysconf(_SC_PAGESIZE);
    void *p = mmap(NULL, (size_t)page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (p == MAP_FAILED) return NULL;

    if (madvise(p, (size_t)page, 18 /* MADV_WIPEONFORK */) != 0) {
        munmap(p, (size_t)page);
        return NULL;
    }

    *(int *)p = 1;

    return (int *)p;
}

static void idist__os_fork_guard_free(int *guard) {
    if (guard) munmap(guard, (size_t)sysconf(_SC_PAGESIZE));
}

static void idist__os_cond_init(pthread_cond_t *cond) {
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attr);
    pthread_condattr_destroy(&attr);
}

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

// Tells the processor that this is a loop that waits.
IDIST__UNUSED static void idist__os_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

// A number in shared memory that is read and written atomically. i386 would align it to 4 bytes,
// which can lie in two cache lines.
typedef uint64_t idist__counter __attribute__((aligned(8)));

// Before something is said through shared memory, and after it was heard. Ranks that are threads of
// one process have it mapped at different addresses, so the thread sanitizer cannot see what one
// says to the other.
IDIST__UNUSED static void idist__os_handover(void) {
#if defined(__SANITIZE_THREAD__)
    static uint32_t word;
    __atomic_fetch_add(&word, 1u, __ATOMIC_ACQ_REL);
#endif
}

// Asks for a cache line that will be written soon, without waiting for it.
IDIST__UNUSED static void idist__os_claim(const void *p) {
#if defined(__x86_64__)
    __asm__ __volatile__("prefetchw %0"
                         :
                         : "m"(*(const char *)p)); // the builtin only reads where the target is old
#else
    __builtin_prefetch(p, 1);
#endif
}

// The system call takes a time of its own: two longs also where time_t has 64 bits and a long 32.
// Architectures that began with such a time_t have another call instead.
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

// Sleeps while a word that processes share has this value; may wake up for no reason.
IDIST__UNUSED static void idist__os_futex_wait(uint32_t *word, uint32_t value, int64_t until_ns) {
    struct {
        idist__os_futex_part seconds, nanoseconds;
    } ts;
    int64_t left = until_ns - idist__os_now_ns(), seconds = left / 1000000000;

    if (left <= 0) return;
    ts.seconds = (idist__os_futex_part)(seconds < INT32_MAX ? seconds : INT32_MAX);
    ts.nanoseconds = (idist__os_futex_part)(left % 1000000000);
    syscall(IDIST__OS_FUTEX, word, 0 /* FUTEX_WAIT */, value,
            until_ns == IDIST__FOREVER ? NULL : &ts, NULL, 0);
}

IDIST__UNUSED static void idist__os_futex_wake(uint32_t *word) {
    syscall(IDIST__OS_FUTEX, word, 1 /* FUTEX_WAKE */, INT32_MAX, NULL, NULL, 0);
}

// Lets all other processes that have announced themselves here (announce) pass a full memory fence
// before it returns.
IDIST__UNUSED static bool idist__os_fence_others(bool announce) {
#ifdef SYS_membarrier
    return syscall(SYS_membarrier, announce ? 1 << 2 : 1 << 1 /* (REGISTER_)GLOBAL_EXPEDITED */, 0,
                   0) == 0;
#else
    (void)announce;
    return false;
#endif
}

// A file in memory without a name, of a size that can never change again; -1 and errno.
IDIST__UNUSED static int idist__os_memfd(size_t nbytes) {
    struct rlimit limit;
    int err, fd;

    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
        limit.rlim_cur < nbytes) {
        errno = EFBIG; // found out by trying, it would be a signal
        return -1;
    }

    fd = (int)syscall(SYS_memfd_create, "idist", 3 /* MFD_CLOEXEC | MFD_ALLOW_SEALING */);
    if (fd < 0) return -1;
    if (ftruncate(fd, (off_t)nbytes) == 0 &&
        fcntl(fd, 1033 /* F_ADD_SEALS */, 7 /* SEAL | SHRINK | GROW */) == 0)
        return fd;
    err = errno;
    close(fd);
    errno = err;

    return -1;
}

// Copies from the memory of another process of this user. 0, or an errno: ESRCH, EPERM, EFAULT.
IDIST__UNUSED static int idist__os_read_other(pid_t pid, uint64_t at, void *buf, size_t nbytes) {
    char *to = (char *)buf;

    while (nbytes) {
        struct iovec here, there;
        long n;
        here.iov_base = to;
        there.iov_base = (void *)(uintptr_t)at;
        here.iov_len = there.iov_len = nbytes;
        n = syscall(SYS_process_vm_readv, (long)pid, &here, 1L, &there, 1L, 0L);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return n < 0 ? errno : EFAULT;
        to += n;
        at += (uint64_t)n;
        nbytes -= (size_t)n;
    }

    return 0;
}

// Takes memory for a part of such a file now, so that no access to it can fail later. 0 or an
// errno.
static int idist__os_reserve(int fd, size_t at, size_t nbytes) {
    int rc;
    do rc = posix_fallocate(fd, (off_t)at, (off_t)nbytes);
    while (rc == EINTR);
    return rc;
}

// A thread that takes no signals: they belong to the program's own threads.
static int idist__os_thread(pthread_t *thread, void *(*fn)(void *), void *arg) {
    sigset_t all, before;
    int rc;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    rc = pthread_create(thread, NULL, fn, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return rc;
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

//------------------------------------------------------------------------------
// [os:library]  shared libraries that are loaded at run time
// uses -
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
static inline void *idist__os_library_open(const char *path) {
    return dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

// A library that is loaded already; otherwise NULL.
static inline void *idist__os_library_loaded(const char *path) {
    return dlopen(path, RTLD_NOW | RTLD_NOLOAD);
}

// Loads the first file that a pattern of the shell (with *) matches and that can be loaded.
static inline void *idist__os_library_match(const char *pattern) {
    void *library = NULL;
    glob_t found;
    size_t i;

    if (glob(pattern, 0, NULL, &found) != 0) return NULL;
    for (i = 0; i < found.gl_pathc && !library; i++)
        library = idist__os_library_open(found.gl_pathv[i]);
    globfree(&found);

    return library;
}

// The address of a function or variable; NULL: the library does not have it.
static inline void *idist__os_library_find(void *library, const char *name) {
    return dlsym(library, name);
}

// Why the last of these functions failed, in this thread. The text is valid until the next call.
static inline const char *idist__os_library_error(void) {
    const char *text = dlerror();
    return text ? text : "no reason given";
}

#endif // IDIST_OS_H
