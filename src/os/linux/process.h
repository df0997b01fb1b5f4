// os/linux/process.h: this process and its children, its environment and limits, the terminal,
// libraries
#pragma once

#include "os/unwind.h"
#include "os/process.h"
#include "os/poll.h"

static const char *idist__os_env(const char *name) {
    const char *value = getenv(name);
    return value && value[0] ? value : NULL;
}

IDIST__UNUSED static bool idist__os_env_set(const char *name, const char *value) {
    return setenv(name, value, 1) == 0;
}

// Returns the soft limit, or -1 if there is none.
static long long idist__os_limit_get(int resource) {
    struct rlimit limit;

    if (getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return -1;
    return (long long)limit.rlim_cur;
}

static long long idist__os_limit_descriptors(void) { return idist__os_limit_get(RLIMIT_NOFILE); }

static long long idist__os_limit_processes(void) { return idist__os_limit_get(RLIMIT_NPROC); }

static long long idist__os_limit_locked_nbytes(void) { return idist__os_limit_get(RLIMIT_MEMLOCK); }

static idist__os_process idist__os_process_id(void) { return getpid(); }

IDIST__UNUSED static uint64_t idist__os_process_space(void) {
    struct stat about;
    return stat("/proc/self/ns/pid", &about) == 0 ? (uint64_t)about.st_ino : 0;
}

static void idist__os_process_exit(int code) { _exit(code); }

static void idist__os_process_die_with(idist__os_process parent) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
}

static idist__os_process idist__os_process_parent(void) { return getppid(); }

static idist__os_process idist__os_process_fork(void) {
    pid_t parent = getpid(), pid = fork();
    if (pid == 0) idist__os_process_die_with(parent);
    return pid;
}

IDIST__UNUSED static inline bool idist__os_process_on_fork(void (*in_child)(void)) {
    return pthread_atfork(NULL, NULL, in_child) == 0;
}

static int idist__os_process_execute(const char *path, char **argv, char **envp) {
    execve(path, argv, envp);
    execve("/proc/self/exe", argv, envp);
    return errno;
}

static bool idist__os_process_path(char *path, size_t cap) {
    ssize_t n = readlink("/proc/self/exe", path, cap - 1);

    if (n <= 0) return false;
    path[n] = 0;
    return true;
}

static int idist__os_process_open_args(void) {
    return IDIST__OS_CALL(open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC));
}

static size_t idist__os_process_read_args(int fd, char *buf, size_t nbytes) {
    ssize_t n;
    do n = IDIST__OS_CALL(read(fd, buf, nbytes));
    while (n < 0 && errno == EINTR);
    return n > 0 ? (size_t)n : 0;
}

static char **idist__os_process_variables(void) {
    extern char **environ;
    return environ;
}

static void idist__os_process_pass(int fd, bool pass) {
    IDIST__OS_CALL(fcntl(fd, F_SETFD, pass ? 0 : FD_CLOEXEC));
}

static bool idist__os_process_move_fd(int *fd) {
    int higher = IDIST__OS_CALL(fcntl(*fd, F_DUPFD_CLOEXEC, 3));

    if (higher < 0) return false;
    IDIST__OS_CALL(close(*fd));
    *fd = higher;
    return true;
}

static void *idist__os_process_share(int fd, size_t nbytes) {
    void *p = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | (fd < 0 ? MAP_ANONYMOUS : 0),
                   fd, 0);
    return p == MAP_FAILED ? NULL : p;
}

static void idist__os_process_unshare(void *p, size_t nbytes) {
    if (p) munmap(p, nbytes);
}

static bool idist__os_process_file_begins(int fd, const char *bytes, size_t nbytes) {
    char head[64];
    return nbytes <= sizeof head && IDIST__OS_CALL(pread(fd, head, nbytes, 0)) == (ssize_t)nbytes &&
           memcmp(head, bytes, nbytes) == 0;
}

static bool idist__os_process_file_has(int fd, size_t nbytes) {
    struct stat st;
    return fstat(fd, &st) == 0 && (size_t)st.st_size == nbytes;
}

static int idist__os_process_watch(idist__os_process child) {
    return (int)syscall(434 /* pidfd_open */, child, 0);
}

static void idist__os_process_signal(idist__os_process child, int fd, int signal_number) {
    if (syscall(424 /* pidfd_send_signal */, fd, signal_number, NULL, 0) != 0 && errno != ESRCH)
        kill(child, signal_number);
}

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

static void idist__os_process_slot_set(idist__os_process_slot *slot, int fd) {
    slot->fd = fd;
    slot->events = POLLIN;
}

static void idist__os_process_sleep(idist__os_process_slot *slots, int n, int ms) {
    IDIST__OS_CALL(poll(slots, (nfds_t)n, ms));
}

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

static const char *idist__os_process_signal_name(int signal_number) {
    return strsignal(signal_number);
}

IDIST__UNUSED static bool idist__os_terminal_has_stderr(void) { return isatty(STDERR_FILENO) != 0; }

IDIST__UNUSED static size_t idist__os_terminal_columns(void) {
    struct winsize size;

    memset(&size, 0, sizeof size);
    if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0) return 0;
    return size.ws_col;
}

IDIST__UNUSED static inline void *idist__os_library_open(const char *path) {
    return IDIST__OS_CALL(dlopen(path, RTLD_NOW | RTLD_LOCAL));
}

IDIST__UNUSED static inline void *idist__os_library_loaded(const char *path) {
    return IDIST__OS_CALL(dlopen(path, RTLD_NOW | RTLD_NOLOAD));
}

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

IDIST__UNUSED static inline void *idist__os_library_find(void *library, const char *name) {
    return dlsym(library, name);
}

IDIST__UNUSED static inline const char *idist__os_library_error(void) {
    const char *text = dlerror();
    return text ? text : "no reason given";
}

//------------------------------------------------------------------------------
// devices on the PCI bus
//------------------------------------------------------------------------------

IDIST__UNUSED static bool idist__os_pci_has_vendor(unsigned vendor) {
    char found[16], wanted[16];
    glob_t files;
    bool has = false;
    size_t i;

    snprintf(wanted, sizeof wanted, "0x%04x", vendor);
    if (IDIST__OS_CALL(glob("/sys/bus/pci/devices/*/vendor", GLOB_NOSORT, NULL, &files)) != 0)
        return false;

    for (i = 0; i < files.gl_pathc && !has; i++) {
        int fd = IDIST__OS_CALL(open(files.gl_pathv[i], O_RDONLY | O_CLOEXEC));

        memset(found, 0, sizeof found);
        if (fd < 0) continue;
        has = IDIST__OS_CALL(read(fd, found, 6)) == 6 && strcmp(found, wanted) == 0;
        idist__os_descriptor_close(&fd);
    }

    globfree(&files);

    return has;
}
