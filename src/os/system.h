// os/system.h: the systems that are supported, and their headers
//
// WHAT IT IS
//
// System calls and system headers, behind types, constants and functions named idist__os_*. The
// other files include no system header and call nothing else of the system; lint checks that. A
// port to another operating system replaces the types and bodies in this file. Each function says
// whether it may block, what it returns, and who owns what. Where a system lacks a service
// (reading the memory of another process, fencing the others), its function may fail always: the
// callers have another way.
//
// Errors are numbers of errno.h, as C compilers for all systems have them; a port translates those
// of its system (ETIMEDOUT, EAGAIN, EADDRINUSE, ...). A descriptor is an int, and -1 is none.
//
// HOW IT FITS
//
// The lowest room: it uses none of the others.
#pragma once

#if !defined(__linux__)
#error "idist runs on Linux only so far; a port implements the functions of src/os"
#endif

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
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/epoll.h>
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
#error "include idist.h before every system header (IDIST_IMPLEMENTATION), or -D_DEFAULT_SOURCE"
#endif
