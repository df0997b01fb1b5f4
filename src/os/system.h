// os/system.h: the operating system as idist sees it
//
// The files of this folder are an interface: types, constants and functions named idist__os_*, with
// the contract of each function above its declaration. It says whether the function may block, what
// it returns, and who owns what. The bodies for one system are in a folder of their own; os/linux
// is the only one so far. The rest of idist includes no system header and calls nothing else of the
// system; lint checks that.
//
// A port adds a folder with types.h, which has the system headers and the types that depend on the
// system, and with a body for every function. Where a system lacks a service (reading the memory of
// another process, fencing the others), its function may fail always: the callers have another way.
// IDIST__OS_TYPES and IDIST__OS_BODIES name two headers that take the place of both, for tests.
//
// Errors are numbers of errno.h, as C compilers for all systems have them; a port translates those
// of its system (ETIMEDOUT, EAGAIN, EADDRINUSE, ...). A descriptor is an int, and -1 is none.
#pragma once

#if defined(IDIST__OS_TYPES)
#include IDIST__OS_TYPES
#elif defined(__linux__)
#include "os/linux/types.h"
#else
#error "idist runs on Linux only so far; a port implements the functions of src/os"
#endif
