// os/process.h: this process and its children, its environment and limits, the terminal, libraries
#pragma once

#include "os/system.h"

//------------------------------------------------------------------------------
// environment variables
//------------------------------------------------------------------------------

// Returns the value of a variable, which the environment owns, or NULL if the variable is unset or
// empty. Like torch's env://, treats an empty variable as unset.
static const char *idist__os_env(const char *name);

// Sets a variable, for a library that reads the environment. No other thread may read or change the
// environment during the call. Returns false if memory cannot be allocated.
IDIST__UNUSED static bool idist__os_env_set(const char *name, const char *value);

//------------------------------------------------------------------------------
// what the system allows this process
//
// Each function returns the soft limit, or -1 if there is none or if it is unknown.
//------------------------------------------------------------------------------

// Returns the limit on open descriptors of this process.
static long long idist__os_limit_descriptors(void);

// Returns the limit on processes of this user, over all programs.
static long long idist__os_limit_processes(void);

// Returns the limit on memory that is locked against swapping, which InfiniBand needs.
static long long idist__os_limit_locked_nbytes(void);

//------------------------------------------------------------------------------
// this process, its children, the memory of others
//
// Child processes are created by fork. If the kernel has descriptors that become readable when a
// child ends (pidfd, Linux 5.3), such a descriptor watches each child. Otherwise the parent polls.
// A port may use CreateProcess and a job object, or kqueue and a pipe. Without fork,
// idist__os_process_fork always fails, and a launcher starts the workers.
//------------------------------------------------------------------------------

// How a process ended.
typedef struct idist__os_process_end {
    int exit_code; // -1 if a signal ended the process
    int signal;    // 0 if the process exited
} idist__os_process_end;

typedef enum idist__os_process_state {
    IDIST__OS_PROCESS_RUNS,
    IDIST__OS_PROCESS_ENDED,
    IDIST__OS_PROCESS_UNKNOWN // the program has reaped the child itself
} idist__os_process_state;

// Returns the id of this process. Asks the system each time, so the result is right in a forked
// child.
static idist__os_process idist__os_process_id(void);

// Returns the number of the namespace that the process ids of this container belong to. Two
// processes of one host may have the same id in different containers. Returns 0 if the number is
// unknown.
IDIST__UNUSED static uint64_t idist__os_process_space(void);

// Ends this process immediately, without exit handlers and without flushing stdio buffers.
static void idist__os_process_exit(int code);

// Makes this process die with the thread of `parent` that created it, or immediately if the parent
// has ended. The setting is lost when the process executes a program that has more rights than its
// user, so such a program calls this function again.
static void idist__os_process_die_with(idist__os_process parent);

// Returns the process that created this one, or that has adopted it.
static idist__os_process idist__os_process_parent(void);

// Creates a child that dies with the calling thread. Returns the id of the child, 0 in the child,
// or -1 with errno. If the program has threads, only simple system calls are safe in the child.
static idist__os_process idist__os_process_fork(void);

// Registers a function that every forked child of this process calls first. A registration is
// permanent. Returns false if memory cannot be allocated. Does nothing on a system without fork.
IDIST__UNUSED static inline bool idist__os_process_on_fork(void (*in_child)(void));

// Replaces this process with a program. Returns an errno on failure. Safe after fork. If `path`
// fails, tries the file of this process, which may have been replaced or removed since the process
// started.
static int idist__os_process_execute(const char *path, char **argv, char **envp);

// Gets the path of the running program. Returns false with errno if the path is unknown.
static bool idist__os_process_path(char *path, size_t cap);

// Opens the arguments of this process for reading. They follow one another, and each ends in a NUL.
// The caller closes the descriptor. Returns -1 with errno on failure.
static int idist__os_process_open_args(void);

// Reads from a descriptor of idist__os_process_open_args. Returns 0 at the end and on an error.
static size_t idist__os_process_read_args(int fd, char *buf, size_t nbytes);

// Returns the environment of this process: the system's own array, which ends in NULL.
static char **idist__os_process_variables(void);

// Sets whether a descriptor stays open in a program that this process executes. Safe after fork.
static void idist__os_process_pass(int fd, bool pass);

// Moves a descriptor above 2. The descriptor may have the number of stdin, stdout or stderr if that
// stream was closed. Returns false with errno on failure. *fd is valid in both cases.
static bool idist__os_process_move_fd(int *fd);

// Maps memory that this process shares with its children: the memory of a file or, if fd is -1,
// memory that only forked children inherit. Returns NULL with errno on failure.
static void *idist__os_process_share(int fd, size_t nbytes);

// Unmaps memory of idist__os_process_share in this process only. Accepts NULL.
static void idist__os_process_unshare(void *p, size_t nbytes);

// Returns true if a descriptor refers to a file that begins with these bytes.
static bool idist__os_process_file_begins(int fd, const char *bytes, size_t nbytes);

// Returns true if a descriptor refers to a file of exactly this size.
static bool idist__os_process_file_has(int fd, size_t nbytes);

// Returns a descriptor that watches a child, or -1 if the kernel has no such descriptors. The
// caller closes the descriptor.
static int idist__os_process_watch(idist__os_process child);

// Sends a signal to a child that we have not reaped. With a watch descriptor the signal cannot
// reach another process that got the same id.
static void idist__os_process_signal(idist__os_process child, int fd, int signal_number);

// Reaps a child if it has ended, and sets *end. Does not block.
static idist__os_process_state idist__os_process_reap(idist__os_process child,
                                                      idist__os_process_end *end);

// Fills a slot with a descriptor of idist__os_process_watch.
static void idist__os_process_slot_set(idist__os_process_slot *slot, int fd);

// Sleeps until a watched child ends, a signal arrives, or `ms` milliseconds have passed; a negative
// `ms` means no limit. Skips slots with fd -1.
static void idist__os_process_sleep(idist__os_process_slot *slots, int n, int ms);

// Copies from the memory of another process of this user. Returns 0 or an errno: ESRCH (the process
// has ended), EPERM (not allowed), EFAULT (not mapped there), ENOSYS (the system cannot do this).
IDIST__UNUSED static int idist__os_process_read_memory(idist__os_process process, uint64_t address,
                                                       void *buf, size_t nbytes);

// Returns true if another process can read nbytes (not 0) of this process's memory with
// idist__os_process_read_memory, as far as eight samples tell. Memory of memfd_secret and of
// devices cannot be read. Takes about a microsecond.
IDIST__UNUSED static bool idist__os_process_memory_is_open(const void *memory, size_t nbytes);

// Returns the name of a signal. The text is valid until the next call.
static const char *idist__os_process_signal_name(int signal_number);

//------------------------------------------------------------------------------
// the terminal
//------------------------------------------------------------------------------

// Returns true if stderr is a terminal.
IDIST__UNUSED static bool idist__os_terminal_has_stderr(void);

// Returns the number of columns of the terminal at stderr, or 0 if stderr is no terminal or does
// not report its size.
IDIST__UNUSED static size_t idist__os_terminal_columns(void);

//------------------------------------------------------------------------------
// shared libraries that are loaded at run time
//
// Only idist_nccl.h and idist_xla.h use these functions. The functions are inline so that programs
// without devices need no -ldl, even without optimization. No function blocks for longer than
// reading a file takes. Libraries are never unloaded, because they may have threads.
//------------------------------------------------------------------------------

// Loads a library. The loader searches its folders if `path` is a plain name. If `path` is NULL,
// returns the program with the libraries it is linked with. Returns NULL on failure;
// idist__os_library_error says why.
IDIST__UNUSED static inline void *idist__os_library_open(const char *path);

// Returns a library that is already loaded, or NULL.
IDIST__UNUSED static inline void *idist__os_library_loaded(const char *path);

// Loads the first loadable file that matches a shell pattern (with *).
IDIST__UNUSED static inline void *idist__os_library_match(const char *pattern);

// Returns the address of a function or variable, or NULL if the library does not have it.
IDIST__UNUSED static inline void *idist__os_library_find(void *library, const char *name);

// Returns the reason why one of these functions last failed in this thread. The text is valid until
// the next call.
IDIST__UNUSED static inline const char *idist__os_library_error(void);

//------------------------------------------------------------------------------
// devices on the PCI bus
//------------------------------------------------------------------------------

// Returns true if the bus has a device of this vendor (0x1ae0 is Google). Returns false if the
// system does not list the bus's devices.
IDIST__UNUSED static bool idist__os_pci_has_vendor(unsigned vendor);
