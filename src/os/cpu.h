// os/cpu.h: processors, and hints to them
//
// Windows has all of it (SetThreadAffinityMask, FlushProcessWriteBuffers). macOS binds no thread
// and fences no other process: there the set has as many processors as the machine, and the two
// functions that ask for more return false.
#pragma once

#include "os/system.h"

enum { IDIST__CPU_WORDS = 128 };
typedef struct idist__os_cpu_set {        // a set of processors
    unsigned long bits[IDIST__CPU_WORDS]; // 8192 on 64-bit systems
} idist__os_cpu_set;

// The processors that the calling thread may run on.
static void idist__os_cpu_usable(idist__os_cpu_set *cpus);

// How many processors are in the set.
static int idist__os_cpu_set_count(const idist__os_cpu_set *cpus);

// How many processors the calling thread may run on.
static int idist__os_cpu_count(void);

// Moves the calling thread to one of the processors that it may run on (the index-th). If `stay` is
// set it may run nowhere else from then on. False: the system refused.
static bool idist__os_cpu_bind(int index, bool stay);

// Tells the processor that this is a loop that waits.
IDIST__UNUSED static void idist__os_cpu_relax(void);

// Prefetches a cache line for writing, without waiting for it.
IDIST__UNUSED static void idist__os_cpu_prefetch_for_write(const void *p);

// Copies with stores that go to memory past the caches, where the processor has them. A release
// store publishes them as usual. In assembly because reading <emmintrin.h> takes time;
// sanitizers would not see what it reads and writes.
IDIST__UNUSED static void idist__os_cpu_stream(char *to, const char *from, size_t nbytes);

// Makes all other processes that have announced themselves execute a full memory fence before it
// returns (membarrier(2)). `announce` is that announcement, once per process. False: the system has
// no such call.
IDIST__UNUSED static bool idist__os_cpu_fence_others(bool announce);
