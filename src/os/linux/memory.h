// os/linux/memory.h: pages, memory that processes share, a part of a file as memory
#pragma once

#include "os/memory.h"
#include "os/unwind.h"
#include "os/file.h"

static size_t idist__os_memory_page_nbytes(void) { return (size_t)sysconf(_SC_PAGESIZE); }

IDIST__UNUSED static void *idist__os_memory_aligned(size_t alignment, size_t nbytes) {
    void *p = NULL;
    return posix_memalign(&p, alignment, nbytes) == 0 ? p : NULL;
}

IDIST__UNUSED static void idist__os_memory_free_aligned(void *p) { free(p); }

IDIST__UNUSED static void *idist__os_memory_map(int fd, size_t at, size_t nbytes) {
    int flags = MAP_SHARED | MAP_NORESERVE;
    void *map = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, flags, fd, (off_t)at);

    if (map == MAP_FAILED) return NULL;
    madvise(map, nbytes, MADV_DONTDUMP);
    return map;
}

IDIST__UNUSED static void idist__os_memory_unmap(void *map, size_t nbytes) { munmap(map, nbytes); }

IDIST__UNUSED static char *idist__os_memory_addresses(size_t nbytes) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *map = mmap(NULL, nbytes, PROT_NONE, flags, -1, 0);

    if (map == MAP_FAILED) return NULL;
    madvise(map, nbytes, MADV_DONTDUMP);
    return (char *)map;
}

IDIST__UNUSED static void idist__os_memory_discard(void *pages, size_t nbytes) {
    enum { REMOVE = 9 }; // MADV_REMOVE, which older headers lack
    madvise(pages, nbytes, REMOVE);
}

IDIST__UNUSED static int idist__os_memory_file(size_t nbytes) {
    enum { CLOEXEC_AND_SEALING = 3, ADD_SEALS = 1033, SEAL_SHRINK_GROW = 7 }; // not in all headers
    struct rlimit limit;
    int err, fd;

    // Above the limit ftruncate would raise a signal.
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

static int idist__os_memory_reserve(int fd, size_t at, size_t nbytes) {
    int rc;

    do rc = IDIST__OS_CALL(posix_fallocate(fd, (off_t)at, (off_t)nbytes));
    while (rc == EINTR);

    return rc;
}

static uint32_t *idist__os_memory_fork_word(void) {
    enum { WIPE_ON_FORK = 18 }; // MADV_WIPEONFORK, which older headers lack
    size_t nbytes = idist__os_memory_page_nbytes();
    void *page = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (page == MAP_FAILED) return NULL;
    if (madvise(page, nbytes, WIPE_ON_FORK) == 0) return (uint32_t *)page;
    munmap(page, nbytes);

    return NULL;
}

static void idist__os_memory_fork_word_free(uint32_t *word) {
    if (word) munmap(word, idist__os_memory_page_nbytes());
}

IDIST__UNUSED static size_t idist__os_window_begin(size_t at) {
    size_t page = idist__os_memory_page_nbytes();
    return at / page * page;
}

IDIST__UNUSED static int idist__os_window_map(idist__os_file file, size_t at, size_t nbytes,
                                              char **window) {
    struct rlimit limit;
    void *memory;
    int error;

    *window = NULL;
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
        limit.rlim_cur < at + nbytes)
        return EFBIG; // exceeding the limit would raise a signal

    error = idist__os_memory_reserve(file, at, nbytes);
    if (error) return error;
    memory = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, (off_t)at);
    if (memory == MAP_FAILED) return errno;
    *window = (char *)memory;

    return 0;
}

IDIST__UNUSED static void idist__os_window_unmap(char *window, size_t nbytes) {
    if (window) munmap(window, nbytes);
}
