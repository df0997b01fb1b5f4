// os/linux/types.h: the headers of the system, and the types that depend on it
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <float.h>
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
#include <dirent.h>
#include <dlfcn.h>
#include <glob.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
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

// ---- for unwind.h ----

// Evaluates an expression that is a cancellation point, and postpones any request to cancel this
// thread. Leaves errno as the expression sets it.
#define IDIST__OS_CALL(expression)                                       \
    __extension__({                                                      \
        int cancel_before_;                                              \
        __typeof__(expression) value_;                                   \
                                                                         \
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel_before_); \
        value_ = (expression);                                           \
        pthread_setcancelstate(cancel_before_, NULL);                    \
        value_;                                                          \
    })

// The frame of a watch. Has the layout of glibc's struct _pthread_cleanup_buffer, whose members
// _pthread_cleanup_push sets.
typedef struct idist__os_unwind_frame {
    void (*left)(void *arg);
    void *arg;
    int cancel_type;
    struct idist__os_unwind_frame *previous;
} idist__os_unwind_frame;

// ---- for thread.h ----

typedef pthread_t idist__os_thread; // a thread of this process
typedef pthread_mutex_t idist__os_mutex;
typedef pthread_cond_t idist__os_cond; // must not move in memory

// ---- for process.h ----

typedef pid_t idist__os_process;              // the id of a process, a signed integer; 0 if none
typedef struct pollfd idist__os_process_slot; // one process in idist__os_process_sleep

// Signals that idist itself sends. A system without signals ends the process on the first two.
enum {
    IDIST__OS_PROCESS_TERMINATE = SIGTERM, // the process may clean up
    IDIST__OS_PROCESS_KILL = SIGKILL,
    IDIST__OS_PROCESS_CONTINUE = SIGCONT // continues a stopped process
};

// ---- for poll.h ----

typedef struct pollfd idist__os_poll_entry;

enum { IDIST__OS_READABLE = POLLIN, IDIST__OS_WRITABLE = POLLOUT };

enum { IDIST__OS_WATCH_EVENTS = 32 }; // maximum number of events per idist__os_watch_take

typedef struct idist__os_watch_events {
    struct epoll_event event[IDIST__OS_WATCH_EVENTS];
} idist__os_watch_events;

// ---- for file.h ----

typedef int idist__os_file; // an open file

enum { IDIST__OS_NO_FILE = -1 };

typedef int idist__os_folder; // an open folder

enum {
    IDIST__OS_NO_FOLDER = -1,
    IDIST__OS_HERE = AT_FDCWD // the current folder, where paths begin; needs no closing
};

// A walk over the names in a folder. The caller ends the walk, unless idist__os_folder_begin
// failed.
typedef struct idist__os_folder_walk {
    DIR *dir;
} idist__os_folder_walk;

// ---- for socket.h ----

// The address to which a socket is bound or connects. A local address is a name in the abstract
// namespace. Such a name leaves no file behind, and is visible only inside one network namespace,
// like loopback TCP.
typedef struct idist__os_address {
    struct sockaddr_storage sa;
    socklen_t nbytes;
} idist__os_address;

enum { IDIST__OS_SOCKET_NAME_MAX = (int)sizeof(((struct sockaddr_un *)0)->sun_path) - 1 };
