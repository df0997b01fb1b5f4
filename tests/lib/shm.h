// shm.h: helpers for tests of ranks that share memory. Arrays repeat with a period that divides no
// size, so that stale or misplaced data is detected. Another helper measures the shared file in an
// address space.
#ifndef TESTS_SHM_H
#define TESTS_SHM_H

#include "ranks.h"

enum { PERIOD = 1021 };
#define MIB ((size_t)1 << 20)

static int32_t value_of(int rank, int step, size_t i) {
    return (rank + 1) * 1000 + step * 17 + (int32_t)(i % PERIOD);
}

static void fill(int32_t *x, size_t count, int rank, int step) {
    for (size_t i = 0; i < count && i < PERIOD; i++) x[i] = value_of(rank, step, i);
    for (size_t have = PERIOD; have < count; have *= 2)
        memcpy(x + have, x, 4 * (count - have < have ? count - have : have));
}

// Returns the index of the first element that is not the sum over ranks lo .. hi - 1. Returns count
// if all elements are right.
static size_t find_wrong(const int32_t *x, size_t count, int lo, int hi, int step) {
    for (size_t i = 0; i < count && i < PERIOD; i++) {
        int32_t want = 0;
        for (int k = lo; k < hi; k++) want += value_of(k, step, i);
        if (x[i] != want) return i;
    }
    if (count <= PERIOD || memcmp(x + PERIOD, x, 4 * (count - PERIOD)) == 0) return count;
    for (size_t i = PERIOD; i < count; i++)
        if (x[i] != x[i - PERIOD]) return i;
    return count;
}

// Returns the number of bytes of the shared file that process `pid` has mapped. Stores the inode of
// the file in *inode, which may be NULL.
static size_t shared_bytes(pid_t pid, unsigned long *inode) {
    char path[64], line[600];
    size_t total = 0;
    snprintf(path, sizeof path, "/proc/%d/maps", (int)pid);
    FILE *f = fopen(path, "r");
    if (!f) return 0;
    while (fgets(line, sizeof line, f)) {
        unsigned long from, to, node;
        if (!strstr(line, "memfd:idist")) continue;
        if (sscanf(line, "%lx-%lx %*s %*s %*s %lu", &from, &to, &node) != 3) continue;
        total += to - from;
        if (inode) *inode = node;
    }
    fclose(f);
    return total;
}

#endif // TESTS_SHM_H
