// xla_mpi.c - tests device memory over idist_mpi.h, on the stand-in for PJRT (tests/fake/pjrt.c).
// MPI allows only one thread here, so the worker thread of idist_xla.h must call no function of
// MPI. The test defines functions with the names of MPI's functions. They count all calls and the
// calls by other threads, and call the real functions through MPI's profiling interface.
#define IDIST_IMPLEMENTATION
#include "idist.h"
#include "idist_mpi.h"
#include "idist_xla.h"

#include <mpi.h>
#include <pthread.h>
#include <stdio.h>

static pthread_t main_thread;
static int calls, foreign_calls; // atomic

static void count_call(const char *name) {
    __atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED);
    if (pthread_equal(main_thread, pthread_self())) return;
    if (__atomic_fetch_add(&foreign_calls, 1, __ATOMIC_RELAXED) == 0)
        printf("%s was called by another thread\n", name);
}

#define COUNTED(name, parameters, arguments) \
    int MPI_##name parameters {              \
        count_call("MPI_" #name);            \
        return PMPI_##name arguments;        \
    }
COUNTED(Isend, (const void *p, int n, MPI_Datatype t, int to, int tag, MPI_Comm c, MPI_Request *r),
        (p, n, t, to, tag, c, r))
COUNTED(Irecv, (void *p, int n, MPI_Datatype t, int from, int tag, MPI_Comm c, MPI_Request *r),
        (p, n, t, from, tag, c, r))
COUNTED(Test, (MPI_Request * r, int *flag, MPI_Status *status), (r, flag, status))
COUNTED(Wait, (MPI_Request * r, MPI_Status *status), (r, status))
COUNTED(Cancel, (MPI_Request * r), (r))

// Makes 21 calls that run as programs, and 20 calls on a part of the buffer, which are staged.
// Returns true if all succeed with the right values.
static bool use_device(idist_xla_buffer *x, int n) {
    float got[4] = {0}, want = 1;
    int i;
    for (i = 0; i < 20; i++) {
        if (idist_all_reduce(x, x, 4, IDIST_F32, IDIST_AVG, NULL) != IDIST_OK ||
            idist_all_reduce(x, x, 3, IDIST_F32, IDIST_MAX, NULL) != IDIST_OK)
            return false;
    }
    if (idist_all_reduce(x, x, 4, IDIST_F32, IDIST_SUM, NULL) != IDIST_OK ||
        idist_xla_buffer_get(x, got, sizeof got, 10000) != IDIST_OK)
        return false;
    want *= (float)n;
    if (got[0] != want || got[3] != want) printf("got %g %g\n", (double)got[0], (double)got[3]);
    return got[0] == want && got[3] == want;
}

int main(int argc, char **argv) {
    const float ones[4] = {1, 1, 1, 1};
    idist_xla_buffer *x = NULL;
    int level, n, failed = 1;
    main_thread = pthread_self();
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SINGLE, &level);
    MPI_Query_thread(&level);
    if (idist_initialize(NULL) != IDIST_OK ||
        idist_xla_buffer_put(ones, 4, IDIST_F32, NULL, &x) != IDIST_OK ||
        !use_device(x, n = idist_get_world_size()))
        printf("%s\n", idist_last_error());
    else if (level < MPI_THREAD_SERIALIZED && calls > 0 && foreign_calls == 0) failed = 0;
    printf("level %d, backend %s, device backend %s: %d calls of MPI, %d of another thread\n",
           level, idist_backend(), idist_device_backend(), calls, foreign_calls);
    idist_xla_buffer_free(&x);
    idist_finalize();
    MPI_Finalize();
    return failed;
}
