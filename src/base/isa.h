// base/isa.h: the instruction set and the floating-point mode in which numbers are reduced
//
// Functions: idist__isa_*, idist__mode_*.
#pragma once

//------------------------------------------------------------------------------
// the instruction set that loops over elements use
//
// The hot loops over elements, in base/small_float.h and base/reduce.h, are compiled for several
// instruction sets. `base` is the compiler's target. The other instruction sets are used on
// processors that have them. All instruction sets produce the same bits, so the machines of a world
// may differ.
//------------------------------------------------------------------------------

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <cpuid.h>
#define IDIST__X86 1
#define IDIST__ISA_avx2 __attribute__((target("avx2,f16c")))
#define IDIST__ISA_avx512 __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512vl,avx512dq")))
#endif
#define IDIST__ISA_base

typedef enum idist__isa { IDIST__BASE, IDIST__AVX2, IDIST__AVX512, IDIST__ISA_COUNT } idist__isa;

static idist__isa idist__isa_used; // set once, before main, by idist__reduce_start

// Returns the best instruction set that this processor has and its operating system allows.
static idist__isa idist__isa_best(void) {
#ifdef IDIST__X86
    unsigned a, b, c, d;

    __builtin_cpu_init();
    // Asks cpuid, because not all compilers know the name f16c.
    if (!__builtin_cpu_supports("avx2") || !__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_F16C))
        return IDIST__BASE;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
        return IDIST__AVX2;
    return IDIST__AVX512;
#else
    return IDIST__BASE;
#endif
}

//------------------------------------------------------------------------------
// the floating-point mode in which numbers are reduced and converted
//
// A library built with -ffast-math sets flush-to-zero in the thread that loads it, and a program
// may round upward in one of its threads. A sum would then have different bits in the progress
// thread, or on another rank. So numbers are reduced and converted in the mode in which a C program
// starts (round to nearest, keep subnormals, no traps), whatever the thread's mode is. Reading the
// mode takes two nanoseconds.
//
//     uint32_t mode = idist__mode_enter();
//     ...
//     idist__mode_leave(mode);
//------------------------------------------------------------------------------

#if defined(__SSE__)
#define IDIST__MODE_BITS 0xffc0u  // MXCSR: DAZ, exception masks, rounding, FTZ
#define IDIST__MODE_PLAIN 0x1f80u // all exceptions masked
IDIST__INLINE uint32_t idist__mode_read(void) { return __builtin_ia32_stmxcsr(); }
IDIST__INLINE void idist__mode_write(uint32_t mode) { __builtin_ia32_ldmxcsr(mode); }
#elif defined(__aarch64__)
#define IDIST__MODE_BITS 0xffffffffu // FPCR
#define IDIST__MODE_PLAIN 0u
IDIST__INLINE uint32_t idist__mode_read(void) {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return (uint32_t)mode;
}
IDIST__INLINE void idist__mode_write(uint32_t mode) {
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)mode));
}
#else // other processors: the thread keeps its mode
#define IDIST__MODE_BITS 0u
#define IDIST__MODE_PLAIN 0u
IDIST__INLINE uint32_t idist__mode_read(void) { return 0; }
IDIST__INLINE void idist__mode_write(uint32_t mode) { (void)mode; }
#endif

// Enters the mode in which a C program starts. Returns the previous mode of the thread, for
// idist__mode_leave.
IDIST__INLINE uint32_t idist__mode_enter(void) {
    uint32_t mode = idist__mode_read();

    if ((mode & IDIST__MODE_BITS) != IDIST__MODE_PLAIN) idist__mode_write(IDIST__MODE_PLAIN);
    __asm__ volatile("" : : : "memory"); // loads of operands stay below
    return mode;
}

IDIST__INLINE void idist__mode_leave(uint32_t mode) {
    __asm__ volatile("" : : : "memory"); // stores of results stay above
    if ((mode & IDIST__MODE_BITS) != IDIST__MODE_PLAIN) idist__mode_write(mode);
}
