// os/cpu.h: processors, and hints to them
//
// Windows has all these services (SetThreadAffinityMask, FlushProcessWriteBuffers). macOS cannot
// bind a thread or fence other processes. There the set has as many processors as the machine, and
// idist__os_cpu_bind and idist__os_cpu_fence_others return false.
#pragma once

#include "os/system.h"

enum { IDIST__CPU_WORDS = 128 };
typedef struct idist__os_cpu_set {        // a set of processors
    unsigned long bits[IDIST__CPU_WORDS]; // 8192 processors on 64-bit systems
} idist__os_cpu_set;

// Gets the processors that the calling thread may run on.
static void idist__os_cpu_usable(idist__os_cpu_set *cpus);

// Returns the number of processors in the set.
static int idist__os_cpu_set_count(const idist__os_cpu_set *cpus);

// Returns the number of processors that the calling thread may run on.
static int idist__os_cpu_count(void);

// Moves the calling thread to the index-th processor that it may run on. If `stay` is set, the
// thread may run nowhere else from then on. Returns false if the system refuses.
static bool idist__os_cpu_bind(int index, bool stay);

// Tells the processor that the caller spins in a loop.
IDIST__UNUSED static void idist__os_cpu_relax(void);

// Prefetches a cache line for writing. Does not wait for the line.
IDIST__UNUSED static void idist__os_cpu_prefetch_for_write(const void *p);

// Copies with non-temporal stores, which bypass the caches, if the processor has them. A release
// store publishes the copied bytes as usual. The stores are written in assembly because
// <emmintrin.h> takes a long time to compile. Sanitizers would not see the accesses, so builds with
// a sanitizer use memcpy.
IDIST__UNUSED static void idist__os_cpu_stream(char *to, const char *from, size_t nbytes);

// Makes every other registered process execute a full memory fence before this function returns
// (membarrier(2)). If `announce` is set, registers this process instead, which is needed once per
// process. Returns false if the system has no such call.
IDIST__UNUSED static bool idist__os_cpu_fence_others(bool announce);
