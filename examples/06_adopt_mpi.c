// 06_adopt_mpi.c - an MPI program that uses idist in one part and MPI in the rest
//
// build:  mpicc -DIDIST_IMPLEMENTATION examples/06_adopt_mpi.c -o 06_adopt_mpi
// run:    mpirun -n 4 ./06_adopt_mpi
//
// expected output:
//    MPI counts 4 ranks, idist 4 by mpi
//    the halves have 2 and 2 ranks; their sums of 10 * rank are 10 and 50
//    MPI goes on: 4 ranks at the end
//
// The program owns MPI: it initializes MPI, passes a communicator to idist (or nothing, for
// MPI_COMM_WORLD), and finalizes MPI. Messages of idist use a duplicate of the communicator, so
// they never mix with the program's messages. After idist_finalize nothing is left behind.
//
// Exits with 0 if every number is right, otherwise with 1.
#include "../idist_mpi.h"

#include <mpi.h>
#include <stdio.h>
#include <string.h>

static int failed(int rank, const char *what) {
    fprintf(stderr, "rank %d: %s: %s\n", rank, what, idist_last_error());
    return 1;
}

// Creates a world of the ranks in `half`. Sets *sum to the sum of 10 * rank over these ranks.
static int half_sum(MPI_Comm half, int rank, int *sum) {
    idist_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.mpi_comm = &half;
    *sum = 10 * rank;
    if (idist_initialize(&desc) != IDIST_OK) return failed(rank, "initialize");
    if (idist_all_reduce(sum, sum, 1, IDIST_I32, IDIST_SUM, NULL) != IDIST_OK)
        return failed(rank, "all_reduce");
    return idist_finalize() == IDIST_OK ? 0 : failed(rank, "finalize");
}

int main(int argc, char **argv) {
    int rank, size, sum, total = 1, sizes[2], sums[2];
    MPI_Comm half;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);

    if (idist_initialize(NULL) != IDIST_OK) return failed(rank, "initialize");
    if (rank == 0)
        printf("MPI counts %d ranks, idist %d by %s\n", size, idist_get_world_size(),
               idist_backend());
    if (idist_finalize() != IDIST_OK) return failed(rank, "finalize");

    MPI_Comm_split(MPI_COMM_WORLD, rank < size / 2 ? 0 : 1, rank, &half);
    if (half_sum(half, rank, &sum)) return 1;
    MPI_Comm_free(&half);

    sizes[0] = size / 2;
    sizes[1] = size - size / 2;
    sums[0] = sums[1] = sum;
    MPI_Bcast(&sums[0], 1, MPI_INT, 0, MPI_COMM_WORLD);
    MPI_Bcast(&sums[1], 1, MPI_INT, size - 1, MPI_COMM_WORLD);
    MPI_Allreduce(MPI_IN_PLACE, &total, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    if (rank == 0) {
        printf("the halves have %d and %d ranks; their sums of 10 * rank are %d and %d\n", sizes[0],
               sizes[1], sums[0], sums[1]);
        printf("MPI goes on: %d ranks at the end\n", total);
    }
    MPI_Finalize();
    return sums[0] + sums[1] == 10 * size * (size - 1) / 2 ? 0 : 1;
}
