// mpi_overhead.c - measures what idist adds to an MPI call. MPI and idist run in one process and
// take turns (make bench-mpi).
//
// There are three ways to call: MPI_Allreduce; idist_all_reduce in a world with IDIST_CHECK=0,
// which makes the same MPI call; and idist_all_reduce in a world that compares every call. All
// calls are in place, F32, SUM. A round is a block of calls of each way. A point is the median over
// the rounds of the time per call on the slowest rank. Each round checks the values.
#include "idist_mpi.h"

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { WAYS = 3, ROUNDS = 41, MOST = 1 << 18 };
static const char *const names[WAYS] = {"MPI", "idist, unchecked", "idist"};
static float buffer[MOST];
static idist_opts worlds[WAYS];

static double now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void call(int way, size_t count) {
    if (way == 0)
        MPI_Allreduce(MPI_IN_PLACE, buffer, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    else if (idist_all_reduce(buffer, buffer, count, IDIST_F32, IDIST_SUM, &worlds[way]) !=
             IDIST_OK) {
        fprintf(stderr, "%s: %s\n", names[way], idist_last_error());
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// Runs a block of calls. Returns the time per call on the slowest rank.
static double block(int way, size_t count, int calls, int rank, int n) {
    double start, mine, slowest;
    size_t i;
    for (i = 0; i < count; i++) buffer[i] = (float)(rank + 1);
    call(way, count);
    for (i = 0; i < count; i++)
        if (buffer[i] != (float)(n * (n + 1) / 2)) {
            fprintf(stderr, "%s: a wrong value\n", names[way]);
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
    for (i = 0; i < count; i++) buffer[i] = 0;
    MPI_Barrier(MPI_COMM_WORLD);
    start = now_ns();
    for (int k = 0; k < calls; k++) call(way, count);
    mine = (now_ns() - start) / calls;
    MPI_Allreduce(&mine, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return slowest;
}

int main(int argc, char **argv) {
    static const size_t bytes[] = {4, 8, 64, 256, 4096, 65536, 1 << 20};
    static double times[WAYS][ROUNDS];
    int level, rank, n;
    idist_group *groups[WAYS];
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &n);
    for (int way = 1; way < WAYS; way++) {
        setenv("IDIST_CHECK", way == 1 ? "0" : "1", 1);
        if (idist_open(NULL, &groups[way]) != IDIST_OK) {
            fprintf(stderr, "%s\n", idist_last_error());
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
        worlds[way].group = groups[way];
    }
    for (size_t s = 0; s < sizeof bytes / sizeof bytes[0]; s++) {
        size_t count = bytes[s] / 4;
        int calls = (int)(bytes[s] <= 4096 ? (n > 2 ? 200 : 2000) : bytes[s] <= 65536 ? 200 : 20);
        for (int r = 0; r < ROUNDS; r++)
            for (int way = 0; way < WAYS; way++) times[way][r] = block(way, count, calls, rank, n);
        for (int way = 0; way < WAYS; way++) qsort(times[way], ROUNDS, sizeof(double), compare);
        double mpi = times[0][ROUNDS / 2], bare = times[1][ROUNDS / 2],
               checked = times[2][ROUNDS / 2];
        if (rank == 0)
            printf("%2d ranks %8zu B   MPI %10.0f ns   unchecked %+6.0f ns (%+5.1f %%)   checked "
                   "%10.0f ns (x %.2f)\n",
                   n, bytes[s], mpi, bare - mpi, (bare / mpi - 1) * 100, checked, checked / mpi);
    }
    for (int way = WAYS - 1; way > 0; way--) idist_close(&groups[way]);
    MPI_Finalize();
    return 0;
}
