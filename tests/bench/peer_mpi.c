// peer_mpi.c - measures an MPI library by the rule of rule.h, for the comparison with idist
//
//     mpicc -O2 tests/bench/peer_mpi.c -o peer_mpi
//     mpirun -np 2 --bind-to none ./peer_mpi -op all_reduce -s 4,64K,16M
//
// Runs under any MPI. tests/bench/bench_peers.sh shows how to start each MPI. The program pins its
// ranks itself, so the launcher should bind nothing.
#include <mpi.h>

#include "rule.h"

// gcc mistakes MPICH's MPI_STATUSES_IGNORE for an array that is too small.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wstringop-overflow"
#endif

static int failed(const char *what, int rc) {
    if (rc != MPI_SUCCESS) fprintf(stderr, "peer_mpi: %s: error %d\n", what, rc);
    return rc != MPI_SUCCESS;
}

static int call(const rule_library *lib, const rule_call *c) {
    int count = (int)c->count, rc = MPI_SUCCESS;
    const MPI_Comm comm = MPI_COMM_WORLD;
    switch (c->op) {
    case RULE_ALL_REDUCE:
        rc = MPI_Allreduce(MPI_IN_PLACE, c->recv, count, MPI_FLOAT, MPI_SUM, comm);
        break;
    case RULE_BROADCAST: rc = MPI_Bcast(c->recv, count, MPI_FLOAT, 0, comm); break;
    case RULE_ALL_GATHER:
        rc = MPI_Allgather(c->send, count, MPI_FLOAT, c->recv, count, MPI_FLOAT, comm);
        break;
    case RULE_REDUCE_SCATTER:
        rc = MPI_Reduce_scatter_block(c->send, c->recv, count, MPI_FLOAT, MPI_SUM, comm);
        break;
    case RULE_ALL_TO_ALL:
        rc = MPI_Alltoall(c->send, count, MPI_FLOAT, c->recv, count, MPI_FLOAT, comm);
        break;
    case RULE_BARRIER: rc = MPI_Barrier(comm); break;
    default:
        rc = MPI_Sendrecv(c->send, count, MPI_FLOAT, c->next, 0, c->recv, count, MPI_FLOAT,
                          c->previous, 0, comm, MPI_STATUS_IGNORE);
    }
    (void)lib;
    return failed(rule_op_names[c->op], rc);
}

static int window(const rule_library *lib, const rule_call *c) {
    MPI_Request requests[2 * RULE_WINDOW];
    const MPI_Comm comm = MPI_COMM_WORLD;
    int count = (int)c->count, n = 0, rc = MPI_SUCCESS;
    (void)lib;

    for (int i = 0; !rc && c->receives && i < RULE_WINDOW; i++)
        rc = MPI_Irecv(c->recv + c->slot[i], count, MPI_FLOAT, c->partner, 0, comm, &requests[n++]);
    for (int i = 0; !rc && c->sends && i < RULE_WINDOW; i++)
        rc = MPI_Isend(c->send + c->slot[i], count, MPI_FLOAT, c->partner, 0, comm, &requests[n++]);
    if (!rc) rc = MPI_Waitall(n, requests, MPI_STATUSES_IGNORE);

    if (!rc && !c->receives)
        rc = MPI_Recv(c->recv, 1, MPI_FLOAT, c->partner, 1, comm, MPI_STATUS_IGNORE);
    if (!rc && !c->sends) rc = MPI_Send(c->send, 1, MPI_FLOAT, c->partner, 1, comm);
    return failed(rule_op_names[c->op], rc);
}

static int barrier(const rule_library *lib) {
    (void)lib;
    return failed("barrier", MPI_Barrier(MPI_COMM_WORLD));
}

static int max(const rule_library *lib, double *x, size_t n) {
    (void)lib;
    return failed("maximum",
                  MPI_Allreduce(MPI_IN_PLACE, x, (int)n, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD));
}

int main(int argc, char **argv) {
    rule_options options;
    rule_library lib;
    memset(&lib, 0, sizeof lib);
    lib.name = "peer_mpi";
    lib.call = call;
    lib.window = window;
    lib.barrier = barrier;
    lib.max = max;
    if (rule_parse(&options, argc, argv)) return 2;
    if (MPI_Init(&argc, &argv) != MPI_SUCCESS) return 1;
    MPI_Comm_rank(MPI_COMM_WORLD, &lib.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &lib.n);
    int rc = rule_run(&lib, &options);
    if (rc) MPI_Abort(MPI_COMM_WORLD, 1);
    MPI_Finalize();
    return rc != 0;
}
