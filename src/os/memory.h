// os/memory.h: pages, memory that processes share, a part of a file as memory
#pragma once

#include "os/file.h"
#include "os/system.h"

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
static size_t idist__os_memory_page_nbytes(void);

// Memory at a multiple of `alignment`, a power of two from 64 to 4096, with anything in it. NULL:
// no memory. The caller frees it with idist__os_memory_free_aligned, and with nothing else.
IDIST__UNUSED static void *idist__os_memory_aligned(size_t alignment, size_t nbytes);

// NULL is no error.
IDIST__UNUSED static void idist__os_memory_free_aligned(void *p);

// Maps a part of a file, shared with the other processes that map it, without reserving memory.
// `at` and `nbytes` are multiples of the page size. Core dumps leave the mapping out. NULL and
// errno on failure. The caller unmaps it; `fd` stays the caller's.
IDIST__UNUSED static void *idist__os_memory_map(int fd, size_t at, size_t nbytes);

// Takes such a mapping back, whole.
IDIST__UNUSED static void idist__os_memory_unmap(void *map, size_t nbytes);

// Gives whole pages of a mapped file back to the system, for all processes: they read as zeros from
// then on.
IDIST__UNUSED static void idist__os_memory_discard(void *pages, size_t nbytes);

// A file in memory, without a name, whose size can never change. -1 and errno on failure. The
// caller closes it.
IDIST__UNUSED static int idist__os_memory_file(size_t nbytes);

// Says which limit of this process is in the way of nbytes more memory, as "locked memory is
// limited to 8192 KiB (ulimit -l), and the program locks all its memory (mlockall)". "" if none is.
// Elsewhere: always "".
static void idist__os_memory_limit(size_t nbytes, char *text, size_t capacity);

// Takes memory for a part of such a file now, so that no access to it can fail later. 0, or an
// errno. May take long for large parts.
static int idist__os_memory_reserve(int fd, size_t at, size_t nbytes);

// A new word, 0, that also reads 0 in a child made by fork until somebody writes to it there. NULL:
// the kernel cannot do that. Freed by idist__os_memory_fork_word_free.
static uint32_t *idist__os_memory_fork_word(void);

// NULL is no error.
static void idist__os_memory_fork_word_free(uint32_t *word);

//------------------------------------------------------------------------------
// a part of a file as memory
//------------------------------------------------------------------------------

// Where a window may begin: at, rounded down.
IDIST__UNUSED static size_t idist__os_window_begin(size_t at);

// Maps nbytes of a file from a position that idist__os_window_begin gave, and makes the file that
// long, with space on the disk, so that no access to the window can fail. What is written to the
// window is in the file even if the process is killed. 0 or an errno. The caller unmaps it.
IDIST__UNUSED static int idist__os_window_map(idist__os_file file, size_t at, size_t nbytes,
                                              char **window);

// NULL is no error.
IDIST__UNUSED static void idist__os_window_unmap(char *window, size_t nbytes);
