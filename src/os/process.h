// os/process.h: this process and its children, its environment and limits, the terminal, libraries
#pragma once

#include "os/unwind.h"

//------------------------------------------------------------------------------
// environment variables
//------------------------------------------------------------------------------

// The value of a variable, owned by the environment. NULL when it is not set or empty, as in
// torch's env://.
static const char *idist__os_env(const char *name) {
    const char *value = getenv(name);
    return value && value[0] ? value : NULL;
}

//------------------------------------------------------------------------------
// what the system allows this process
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
// this process, its children, the memory of others
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
// the terminal
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
// shared libraries that are loaded at run time
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
