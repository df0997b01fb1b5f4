// ranks_mpi.h - the ranks of a test are processes that mpirun started
//
// Every process runs the whole test program. A case for n ranks gets a world on a communicator of
// the first n; the others wait for its end. Rank 0 prints, for all. Cases for more ranks than there
// are, and those that differ from another case in settings of the ring only, are left out.
// ranks_mpi.c is compiled once for each MPI, the tests once for all of them.
#ifndef RANKS_MPI_H
#define RANKS_MPI_H

#include <stdbool.h>
#include <stddef.h>

typedef struct ranks_mpi_state {
    int rank, size;   // in MPI_COMM_WORLD
    bool left_out;    // the present case
    const void *comm; // an MPI_Comm *: of the present case; NULL on a process that is not in it
} ranks_mpi_state;

extern ranks_mpi_state ranks_mpi;

void ranks_mpi_meet(void); // a barrier of all processes that leaves the cores to those who work
void ranks_mpi_enter(int n);
void ranks_mpi_leave(void);
// Zeroed memory of all processes. Every one of them calls this, in the same order. NULL when there
// is none.
void *ranks_mpi_shared(size_t nbytes);

#endif // RANKS_MPI_H
