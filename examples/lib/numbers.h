// numbers.h - random numbers, a hash, the clock, and exp and log that need no -lm
#ifndef EXAMPLES_NUMBERS_H
#define EXAMPLES_NUMBERS_H

#include <stddef.h>
#include <stdint.h>
#include <time.h>

#define FNV_START 0xcbf29ce484222325u

static inline uint64_t random_u64(uint64_t *state) { // splitmix64
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);

    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static inline double random_unit(uint64_t *state) { // 0 <= x < 1
    return (double)(random_u64(state) >> 11) / 9007199254740992.0;
}

// Continues the FNV-1a hash `hash` over more data. The first call passes FNV_START.
static inline uint64_t fnv1a(uint64_t hash, const void *data, size_t nbytes) {
    const unsigned char *p = (const unsigned char *)data;

    while (nbytes--) hash = (hash ^ *p++) * 0x100000001b3u;
    return hash;
}

static inline double now_s(void) {
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline double exp_of(double x) { // x <= 0
    double y = x / 1024, sum = 1;

    if (x < -700) return 0;
    for (int k = 12; k >= 1; k--) sum = 1 + sum * y / k; // Taylor series; |y| < 0.7
    for (int k = 0; k < 10; k++) sum *= sum;

    return sum;
}

static inline double log_of(double x) { // 1 <= x <= 10; Halley's iteration on exp
    double y = 0;

    for (int k = 0; k < 8; k++) {
        double inverse = exp_of(-y);

        y += 2 * (x * inverse - 1) / (x * inverse + 1);
    }
    return y;
}

#endif // EXAMPLES_NUMBERS_H
