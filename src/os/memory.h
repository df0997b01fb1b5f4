// os/memory.h: pages, memory that processes share, a part of a file as memory
#pragma once

#include "os/file.h"
#include "os/system.h"

//------------------------------------------------------------------------------
// pages, aligned memory, memory that processes share
//
// For a file without a name, macOS has shm_open and shm_unlink. Windows has CreateFileMapping,
// whose handle serves as the descriptor. On other systems idist__os_memory_discard may do nothing,
// and idist__os_memory_fork_word may return NULL.
//------------------------------------------------------------------------------

// A number in shared memory that is read and written atomically. Without the attribute, i386 would
// align the number to 4 bytes, and it could span two cache lines.
typedef uint64_t idist__counter __attribute__((aligned(8)));

// Returns the size of a page. A mapping begins and ends at a multiple of the page size.
static size_t idist__os_memory_page_nbytes(void);

// Allocates memory at a multiple of `alignment`, a power of two from 64 to 4096. The contents are
// undefined. Returns NULL if memory cannot be allocated. The caller frees the memory with
// idist__os_memory_free_aligned, and with no other function.
IDIST__UNUSED static void *idist__os_memory_aligned(size_t alignment, size_t nbytes);

// Frees memory of idist__os_memory_aligned. Accepts NULL.
IDIST__UNUSED static void idist__os_memory_free_aligned(void *p);

// Maps a part of a file, shared with other processes that map it, without reserving memory. `at`
// and `nbytes` are multiples of the page size. Core dumps exclude the mapping. Returns NULL with
// errno on failure. The caller unmaps the memory and keeps `fd`.
IDIST__UNUSED static void *idist__os_memory_map(int fd, size_t at, size_t nbytes);

// Unmaps a whole mapping of idist__os_memory_map.
IDIST__UNUSED static void idist__os_memory_unmap(void *map, size_t nbytes);

// Returns whole pages of a mapped file to the system. The pages then read as zeros in all
// processes.
IDIST__UNUSED static void idist__os_memory_discard(void *pages, size_t nbytes);

// Reserves a range of addresses, which takes no memory and cannot be read or written. Returns NULL
// if the address space of the process is too small. The range is never released.
IDIST__UNUSED static char *idist__os_memory_addresses(size_t nbytes);

// Creates a file in memory, without a name, whose size can never change. Returns its descriptor, or
// -1 with errno. The caller closes the descriptor.
IDIST__UNUSED static int idist__os_memory_file(size_t nbytes);

// Writes a text that names the limit of this process that prevents an allocation of nbytes, or ""
// if no limit does. For example: "locked memory is limited to 8192 KiB (ulimit -l), and the program
// locks all its memory (mlockall)". On systems other than Linux the text is always "".
static void idist__os_memory_limit(size_t nbytes, char *text, size_t capacity);

// Allocates memory now for a part of a file of idist__os_memory_file, so that no later access to
// the part can fail. Returns 0 or an errno. May take a long time for a large part.
static int idist__os_memory_reserve(int fd, size_t at, size_t nbytes);

// Allocates a word that is 0, and reads as 0 in a forked child until the child writes to it.
// Returns NULL if the kernel cannot do this. The caller frees the word with
// idist__os_memory_fork_word_free.
static uint32_t *idist__os_memory_fork_word(void);

// Frees a word of idist__os_memory_fork_word. Accepts NULL.
static void idist__os_memory_fork_word_free(uint32_t *word);

//------------------------------------------------------------------------------
// a part of a file as memory
//------------------------------------------------------------------------------

// Returns `at` rounded down to a position where a window may begin.
IDIST__UNUSED static size_t idist__os_window_begin(size_t at);

// Maps nbytes of a file from a position that idist__os_window_begin returned. Extends the file to
// the end of the window and reserves the disk space, so that no access to the window can fail.
// Bytes written to the window are in the file even if the process is killed. Returns 0 or an errno.
// The caller unmaps the window.
IDIST__UNUSED static int idist__os_window_map(idist__os_file file, size_t at, size_t nbytes,
                                              char **window);

// Unmaps a window of idist__os_window_map. Accepts NULL.
IDIST__UNUSED static void idist__os_window_unmap(char *window, size_t nbytes);
