#define _DEFAULT_SOURCE
#include "ranks_mpi.h"

#include <fcntl.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

ranks_mpi_state ranks_mpi;
static MPI_Comm of_case;

static void end(void) { MPI_Finalize(); }

__attribute__((constructor)) static void begin(void) {
    int level = 0;
    const char *single = getenv("RANKS_MPI_SINGLE"); // like a program that calls MPI_Init
    if (single && *single) MPI_Init(NULL, NULL);
    else MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &level);
    atexit(end); // a destructor would run after MPICH 5 has released some of its state
    MPI_Comm_rank(MPI_COMM_WORLD, &ranks_mpi.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks_mpi.size);
    if (ranks_mpi.rank && !freopen("/dev/null", "w", stdout)) abort();
}

void ranks_mpi_meet(void) {
    MPI_Request request;
    int done = 0;
    MPI_Ibarrier(MPI_COMM_WORLD, &request);
    for (int turns = 0; !done; turns++) {
        MPI_Test(&request, &done, MPI_STATUS_IGNORE);
        if (!done) usleep(turns < 100 ? 10 : 500);
    }
}

void ranks_mpi_enter(int n) {
    MPI_Comm_split(MPI_COMM_WORLD, ranks_mpi.rank < n ? 0 : MPI_UNDEFINED, 0, &of_case);
    ranks_mpi.comm = of_case == MPI_COMM_NULL ? NULL : &of_case;
}

void ranks_mpi_leave(void) {
    ranks_mpi_meet();
    if (of_case != MPI_COMM_NULL) MPI_Comm_free(&of_case);
    ranks_mpi.comm = NULL;
}

void *ranks_mpi_shared(size_t nbytes) {
    static int count;
    char name[64];
    void *p = MAP_FAILED;
    int fd = -1;
    snprintf(name, sizeof name, "/dev/shm/idist-test-%d-%d", (int)getpid(), count++);
    MPI_Bcast(name, sizeof name, MPI_BYTE, 0, MPI_COMM_WORLD);
    if (!ranks_mpi.rank) fd = open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
    if (fd >= 0 && ftruncate(fd, (off_t)nbytes) != 0) abort();
    ranks_mpi_meet();
    if (ranks_mpi.rank) fd = open(name, O_RDWR);
    if (fd >= 0) p = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0) close(fd);
    ranks_mpi_meet();
    if (!ranks_mpi.rank) unlink(name);
    return p == MAP_FAILED ? NULL : p;
}
