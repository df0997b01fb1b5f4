// os/system.h: the operating system as idist sees it
//
// The files of this folder declare the interface: types, constants and functions named idist__os_*.
// The comment above a function is its contract: whether the function may block, what it returns,
// and who owns what. The bodies for each system are in a separate folder; os/linux is the only one
// so far. The rest of idist includes no system header and makes no system calls itself; lint checks
// this rule.
//
// A port adds a folder with a body for every function. The folder's types.h includes the system
// headers and defines the types that depend on the system. If a system lacks a service (reading the
// memory of another process, fencing other processes), the function for the service may always
// fail; its callers have a fallback. For tests, IDIST__OS_TYPES and IDIST__OS_BODIES name two
// headers that replace types.h and the bodies.
//
// Errors are the numbers of errno.h, which every system's C compiler provides. A port translates
// the errors of its system (ETIMEDOUT, EAGAIN, EADDRINUSE, ...). A descriptor is an int; -1 means
// that there is none.
#pragma once

#if defined(IDIST__OS_TYPES)
#include IDIST__OS_TYPES
#elif defined(__linux__)
#include "os/linux/types.h"
#else
#error "idist runs on Linux only so far; a port implements the functions of src/os"
#endif
