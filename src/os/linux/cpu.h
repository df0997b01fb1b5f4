// os/linux/cpu.h: processors, and hints to them
#pragma once

#include "os/cpu.h"

static void idist__os_cpu_usable(idist__os_cpu_set *cpus) {
    memset(cpus, 0, sizeof *cpus);
    if (syscall(SYS_sched_getaffinity, 0, sizeof *cpus, cpus) <= 0) cpus->bits[0] = 1;
}

static int idist__os_cpu_set_count(const idist__os_cpu_set *cpus) {
    int i, count = 0;

    for (i = 0; i < IDIST__CPU_WORDS; i++) count += __builtin_popcountl(cpus->bits[i]);
    return count;
}

static int idist__os_cpu_count(void) {
    idist__os_cpu_set cpus;

    idist__os_cpu_usable(&cpus);
    return idist__os_cpu_set_count(&cpus);
}

static bool idist__os_cpu_bind(int index, bool stay) {
    idist__os_cpu_set all, one;
    int i, width = 8 * (int)sizeof all.bits[0];

    idist__os_cpu_usable(&all);
    memset(&one, 0, sizeof one);

    for (i = 0; i < IDIST__CPU_WORDS * width; i++) {
        if (!(all.bits[i / width] >> (i % width) & 1)) continue;
        if (index-- > 0) continue;

        one.bits[i / width] = 1ul << (i % width);
        if (syscall(SYS_sched_setaffinity, 0, sizeof one, &one) != 0) return false;
        if (stay) return true;
        // The thread now runs on that processor, so its former set can be restored.
        return syscall(SYS_sched_setaffinity, 0, sizeof all, &all) == 0;
    }

    return false;
}

IDIST__UNUSED static void idist__os_cpu_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

IDIST__UNUSED static void idist__os_cpu_prefetch_for_write(const void *p) {
#if defined(__x86_64__)
    // For old targets the builtin would only prefetch for reading.
    __asm__ __volatile__("prefetchw %0" : : "m"(*(const char *)p));
#else
    __builtin_prefetch(p, 1);
#endif
}

IDIST__UNUSED static void idist__os_cpu_stream(char *to, const char *from, size_t nbytes) {
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    size_t lead = (size_t)(-(uintptr_t)to & 63), at;

    if (lead > nbytes) lead = nbytes;
    memcpy(to, from, lead);

    for (at = lead; at + 64 <= nbytes; at += 64)
        __asm__ __volatile__("movdqu   (%1), %%xmm0\n\t"
                             "movdqu 16(%1), %%xmm1\n\t"
                             "movdqu 32(%1), %%xmm2\n\t"
                             "movdqu 48(%1), %%xmm3\n\t"
                             "movntdq %%xmm0,   (%0)\n\t"
                             "movntdq %%xmm1, 16(%0)\n\t"
                             "movntdq %%xmm2, 32(%0)\n\t"
                             "movntdq %%xmm3, 48(%0)"
                             :
                             : "r"(to + at), "r"(from + at)
                             : "xmm0", "xmm1", "xmm2", "xmm3", "memory");

    __asm__ __volatile__("sfence" : : : "memory");
    memcpy(to + at, from + at, nbytes - at);
#else
    memcpy(to, from, nbytes);
#endif
}

IDIST__UNUSED static bool idist__os_cpu_fence_others(bool announce) {
#ifdef SYS_membarrier
    enum { GLOBAL_EXPEDITED = 1 << 1, REGISTER_GLOBAL_EXPEDITED = 1 << 2 };
    int command = announce ? REGISTER_GLOBAL_EXPEDITED : GLOBAL_EXPEDITED;
    return syscall(SYS_membarrier, command, 0, 0) == 0;
#else
    (void)announce;
    return false;
#endif
}
