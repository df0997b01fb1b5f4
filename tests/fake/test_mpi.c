// test_mpi: tests device memory over idist_mpi.h, with two ranks that mpirun started. Contains the
// implementation and runs on the stand-ins for libcudart and libnccl. The exit status is the
// result.
#define IDIST_IMPLEMENTATION
#include "idist_mpi.h"

#include "idist_nccl.h"

#include <stdio.h>

static int n_failed;

static void check(bool good, const char *what) {
    if (good) return;
    printf("rank %d: %s: %s\n", idist_get_rank(), what, idist_last_error());
    n_failed++;
}

#define CHECK_OK(call) check((call) == IDIST_OK, #call)

static idist__world *enter_world(void) {
    idist_group *g = NULL;
    check(idist__call_enter("test", NULL, &g) == IDIST_OK, "no world");
    return g->w;
}

// Raises the count of foreign threads. The threads of the stand-in start later than a driver's
// threads, so the program would otherwise seem to have more than one thread.
static void count_streams(void) {
    idist__world *w = enter_world();
    w->machine.foreign_thread_count += 50;
    idist__os_mutex_unlock(&w->lock);
}

// Waits until rank 0 has announced that it waits in a receive.
static void await_announcement(void) {
    int64_t deadline = idist__os_clock_deadline(10000);
    bool said = false;
    while (!said && idist__os_clock_now_ns() < deadline) {
        idist__world *w = enter_world();
        idist__gpu_of(w)->host_backend->progress(w);
        said = idist__mpi_of(w)->peers[0].waiting.fingerprint.kind == IDIST__RECV;
        idist__os_mutex_unlock(&w->lock);
        idist__os_clock_pause_ms(1);
    }
    check(said, "rank 0 does not say that it waits");
}

// Receives a message whose copy to the device takes a long time. Rank 0 has the message, and rank 1
// waits for rank 0 so long that rank 1 announces its wait. Both ranks must complete, because this
// is not a deadlock.
static void copies_for_long(int rank, int32_t *device) {
    int32_t word = 7;
    if (rank == 0) CHECK_OK(idist_recv(device, 1, IDIST_I32, 1, 3, NULL, NULL));
    if (rank == 1) await_announcement();
    if (rank == 1) CHECK_OK(idist_send(&word, 1, IDIST_I32, 0, 3, NULL));
    CHECK_OK(idist_barrier(NULL));
    if (rank == 0) cudaMemcpy(&word, device, sizeof word, cudaMemcpyDeviceToHost);
    check(word == 7, "another word");
}

int main(void) {
    int32_t *device = NULL, word = 1;
    int rank;
    if (idist_initialize(NULL) != IDIST_OK) return printf("%s\n", idist_last_error()), 1;
    rank = idist_get_rank();
    count_streams();
    check(strcmp(idist_backend(), "mpi") == 0, "not MPI");
    check(cudaMalloc((void **)&device, sizeof *device) == cudaSuccess, "no device memory");
    cudaMemcpy(device, &word, sizeof word, cudaMemcpyHostToDevice);
    CHECK_OK(idist_all_reduce(device, device, 1, IDIST_I32, IDIST_SUM, NULL));
    cudaMemcpy(&word, device, sizeof word, cudaMemcpyDeviceToHost);
    check(word == 2, "another sum");
    copies_for_long(rank, device);
    cudaFree(device);
    CHECK_OK(idist_finalize());
    return n_failed != 0;
}
