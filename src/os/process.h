// os/process.h: this process and its children, its environment and limits, the terminal, libraries
#pragma once

#include "os/system.h"

//------------------------------------------------------------------------------
// environment variables
//------------------------------------------------------------------------------

// The value of a variable, owned by the environment. NULL when it is not set or empty, as in
// torch's env://.
static const char *idist__os_env(const char *name);

//------------------------------------------------------------------------------
// what the system allows this process
//------------------------------------------------------------------------------

static long long idist__os_limit_descriptors(void);

// Of all programs of this user together.
static long long idist__os_limit_processes(void);

// Memory that may be kept from being swapped out, which InfiniBand needs.
static long long idist__os_limit_locked_nbytes(void);

//------------------------------------------------------------------------------
// this process, its children, the memory of others
//
// Child processes are created by fork. They are watched through a descriptor that becomes readable
// when they end, where the kernel has such (pidfd, Linux 5.3); elsewhere by looking often. A port
// may implement the group with CreateProcess and a job object, or with kqueue and a pipe; without
// fork, idist__os_process_fork fails always, and workers are started by a launcher.
//------------------------------------------------------------------------------

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
static idist__os_process idist__os_process_id(void);

// Tells apart, on one host, processes that may have the same id because they are in different
// containers. 0: the system does not say.
IDIST__UNUSED static uint64_t idist__os_process_space(void);

// Ends this process immediately, without exit handlers and without flushing stdio buffers.
static void idist__os_process_exit(int code);

// From here on this process dies with `parent`, or rather with the thread of it that made this
// process; at once if the parent is gone already. A process with more rights than its user loses
// this when it executes a program, so the program asks for it again.
static void idist__os_process_die_with(idist__os_process parent);

// The process that made this one, or that has adopted it.
static idist__os_process idist__os_process_parent(void);

// Makes a child that dies with the calling thread. Returns its id; 0 in the child; -1 and errno. In
// a child of a program with threads only simple system calls are safe.
static idist__os_process idist__os_process_fork(void);

// From here on, every child that this process makes by fork, however it does, calls the function
// first. Cannot be taken back. False: no memory. A system without fork has nothing to do.
IDIST__UNUSED static inline bool idist__os_process_on_fork(void (*in_child)(void));

// Replaces this process by a program; returns errno if that fails. Safe after fork. The second try
// is for the file of this very process, which may have been replaced or removed since it started.
static int idist__os_process_execute(const char *path, char **argv, char **envp);

// The path of the running program. False and errno if the system does not tell.
static bool idist__os_process_path(char *path, size_t cap);

// A descriptor to read the arguments of this process from, one after the other, each ending in a
// NUL; the caller closes it. -1 and errno.
static int idist__os_process_open_args(void);

// Reads from such a descriptor; 0 at the end and after an error.
static size_t idist__os_process_read_args(int fd, char *buf, size_t nbytes);

// The variables of this process, ended by NULL; the system's own array.
static char **idist__os_process_variables(void);

// Whether a descriptor stays open in a program that this process executes. Safe after fork.
static void idist__os_process_pass(int fd, bool pass);

// Moves a descriptor beyond stdin, stdout and stderr, which may be closed. False and errno; *fd is
// valid either way.
static bool idist__os_process_move_fd(int *fd);

// Memory that this process shares with its children: that of a file, or if fd is -1, memory that
// only forked children have. NULL and errno.
static void *idist__os_process_share(int fd, size_t nbytes);

// Takes such memory back from this process only. NULL is no error.
static void idist__os_process_unshare(void *p, size_t nbytes);

// Whether a descriptor is a file that begins with these bytes.
static bool idist__os_process_file_begins(int fd, const char *bytes, size_t nbytes);

// Whether a descriptor is a file of exactly this size.
static bool idist__os_process_file_has(int fd, size_t nbytes);

// A descriptor to watch a child by; -1 where the kernel has none. The caller closes it.
static int idist__os_process_watch(idist__os_process child);

// Sends a signal to a child that was not reaped by us. Through the descriptor, where there is one,
// no other process is hit that got the same id.
static void idist__os_process_signal(idist__os_process child, int fd, int signal_number);

// Reaps a child if it has ended; *end says how. Does not block.
static idist__os_process_state idist__os_process_reap(idist__os_process child,
                                                      idist__os_process_end *end);

// Fills a slot with what idist__os_process_watch has returned.
static void idist__os_process_slot_set(idist__os_process_slot *slot, int fd);

// Sleeps until a watched child ends, a signal arrives or the time is over; ms < 0: no limit. Slots
// with fd -1 are skipped.
static void idist__os_process_sleep(idist__os_process_slot *slots, int n, int ms);

// Copies from the memory of another process of this user. 0, or an errno: ESRCH (it has ended),
// EPERM (not allowed), EFAULT (not mapped there), ENOSYS (the system cannot do it).
IDIST__UNUSED static int idist__os_process_read_memory(idist__os_process process, uint64_t address,
                                                       void *buf, size_t nbytes);

// Returns whether another process could read nbytes (not 0) of this process's memory with
// idist__os_process_read_memory, as far as eight samples tell. Memory of memfd_secret and of
// devices cannot be read. Takes a microsecond.
IDIST__UNUSED static bool idist__os_process_memory_is_open(const void *memory, size_t nbytes);

// Valid until the next call.
static const char *idist__os_process_signal_name(int signal_number);

//------------------------------------------------------------------------------
// the terminal
//------------------------------------------------------------------------------

// Whether stderr is a terminal.
IDIST__UNUSED static bool idist__os_terminal_has_stderr(void);

// Columns of the terminal that stderr is connected to; 0 when it is no terminal or does not say.
IDIST__UNUSED static size_t idist__os_terminal_columns(void);

//------------------------------------------------------------------------------
// shared libraries that are loaded at run time
//
// Only idist_nccl.h uses it. The functions are inline so that programs without GPUs need no -ldl,
// even where nothing is optimized. None of them blocks for longer than reading a file takes.
// Libraries are never unloaded, because they may have threads.
//------------------------------------------------------------------------------

// Loads a library, from where the loader looks if `path` is a plain name. path NULL: the program
// and the libraries it is linked with. Returns NULL if it cannot be loaded;
// idist__os_library_error says why.
IDIST__UNUSED static inline void *idist__os_library_open(const char *path);

// A library that is loaded already; otherwise NULL.
IDIST__UNUSED static inline void *idist__os_library_loaded(const char *path);

// Loads the first file that a pattern of the shell (with *) matches and that can be loaded.
IDIST__UNUSED static inline void *idist__os_library_match(const char *pattern);

// The address of a function or variable; NULL: the library does not have it.
IDIST__UNUSED static inline void *idist__os_library_find(void *library, const char *name);

// Why the last of these functions failed, in this thread. The text is valid until the next call.
IDIST__UNUSED static inline const char *idist__os_library_error(void);
