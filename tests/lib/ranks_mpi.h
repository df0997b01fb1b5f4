// ranks_mpi.h - the ranks of a test are processes that mpirun started
//
// Every process runs the whole test program. A case for n ranks gets a world on a communicator of
// the first n processes. All other processes wait until the case ends. Rank 0 prints for all ranks.
// Two kinds of cases are left out: cases for more ranks than there are, and cases that differ from
// another case only in settings of the ring. ranks_mpi.c is compiled once for each MPI, and the
// tests are compiled once for all MPIs.
#ifndef RANKS_MPI_H
#define RANKS_MPI_H

#include <stdbool.h>
#include <stddef.h>

typedef struct ranks_mpi_state {
    int rank, size;   // in MPI_COMM_WORLD
    bool left_out;    // the current case is left out
    const void *comm; // an MPI_Comm * for the current case, or NULL on a process outside the case
} ranks_mpi_state;

extern ranks_mpi_state ranks_mpi;

void ranks_mpi_meet(void); // a barrier of all processes that leaves the cores to busy processes
void ranks_mpi_enter(int n);
void ranks_mpi_leave(void);
// Returns zeroed memory that all processes share, or NULL if there is none. All processes must call
// the function in the same order.
void *ranks_mpi_shared(size_t nbytes);

#endif // RANKS_MPI_H
