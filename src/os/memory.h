// os/memory.h: pages, memory that processes share, a part of a file as memory
#pragma once

#include "os/unwind.h"
#include "os/file.h"

//------------------------------------------------------------------------------
// pages, aligned memory, memory that processes share
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
// a part of a file as memory
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
