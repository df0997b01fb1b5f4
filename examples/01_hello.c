// 01_hello.c - every rank says who it is
//
// build:  cc -DIDIST_IMPLEMENTATION examples/01_hello.c -o 01_hello
// run:    ./01_hello              one rank
//         ./01_hello 3            three ranks, which the program starts itself
//         or under a launcher, for example: idistrun -n 3 ./01_hello
//
// expected output of ./01_hello 3, on a machine called box:
//    hello from rank 0 of 3: local rank 0 of 3, node 0 of 1, host box, backend ring, launcher spawn
//    hello from rank 1 of 3: local rank 1 of 3, node 0 of 1, host box, backend ring, launcher spawn
//    hello from rank 2 of 3: local rank 2 of 3, node 0 of 1, host box, backend ring, launcher spawn
#include "../idist.h"
#include "lib/arguments.h"
#include "lib/check.h"

static int hello(int local_rank, void *arg) {
    int rank = idist_get_rank(), size = idist_get_world_size();
    (void)local_rank; // equals idist_get_local_rank()
    (void)arg;

    for (int turn = 0; turn < size; turn++) { // in rank order
        if (turn == rank) {
            printf("hello from rank %d of %d: local rank %d of %d, node %d of %d, ", rank, size,
                   idist_get_local_rank(), idist_get_nproc_per_node(), idist_get_node_rank(),
                   idist_get_nnodes());
            printf("host %s, backend %s, launcher %s\n", idist_hostname(), idist_backend(),
                   idist_launcher());
            fflush(stdout);
        }
        CHECK(idist_barrier(NULL)); // prints the error and returns 1 if it fails
    }

    int64_t sum = rank + 1;
    CHECK(idist_all_reduce(&sum, &sum, 1, IDIST_I64, IDIST_SUM, NULL));
    EXPECT(sum == (int64_t)size * (size + 1) / 2);
    return 0;
}

int main(int argc, char **argv) {
    idist_desc desc = {0}; // all zeros: the environment decides; without a launcher, one rank

    desc.timeout_ms = desc.init_timeout_ms = 60000; // no call takes longer than a minute
    if (argc > 1) desc.nproc_per_node = ranks_argument(argc, argv, 1, 1, 1024);
    if (argc > 1 && !desc.nproc_per_node) return 2;
    CHECK(idist_parallel_run(&desc, hello, NULL)); // runs hello on every rank
    return 0;
}
