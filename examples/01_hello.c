// 01_hello.c - every rank says who it is
//
// build:  cc -DIDIST_IMPLEMENTATION examples/01_hello.c -o 01_hello
// run:    ./01_hello              no launcher: a world of 1
//         ./01_hello 3            starts 3 ranks itself (idist_spawn)
//         or by hand, with any free MASTER_PORT:
//         (export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29501
//          for r in 0 1; do RANK=$r LOCAL_RANK=$r ./01_hello & done; wait)
//
// expected output of ./01_hello 3, on a machine called box:
//    hello from rank 0 of 3: local rank 0 of 3, node 0 of 1, host box, backend ring, launcher spawn
//    hello from rank 1 of 3: local rank 1 of 3, node 0 of 1, host box, backend ring, launcher spawn
//    hello from rank 2 of 3: local rank 2 of 3, node 0 of 1, host box, backend ring, launcher spawn
//
// One file of a program defines IDIST_IMPLEMENTATION (here: the build line does) and includes
// idist.h before anything else. Exit code: 0 when the ranks agree on who is there, 1 when
// something failed, 2 for a bad argument.
#include "../idist.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Everything that can fail returns an idist_status; idist_last_error() is the sentence that belongs
// to it.
#define CHECK(call)                                                        \
    do {                                                                   \
        if ((call) != IDIST_OK) {                                          \
            fprintf(stderr, "%s failed: %s\n", #call, idist_last_error()); \
            return 1;                                                      \
        }                                                                  \
    } while (0)

static int hello(int local_rank, void *arg) {
    int rank = idist_get_rank(), size = idist_get_world_size();
    int64_t sum = rank + 1;
    (void)local_rank; // the same as idist_get_local_rank()
    (void)arg;
    for (int turn = 0; turn < size;
         turn++) { // one after the other, so that the lines come in order
        if (turn == rank) {
            printf("hello from rank %d of %d: local rank %d of %d, node %d of %d, host %s, backend "
                   "%s, launcher %s\n",
                   rank, size, idist_get_local_rank(), idist_get_nproc_per_node(),
                   idist_get_node_rank(), idist_get_nnodes(), idist_hostname(), idist_backend(),
                   idist_launcher());
            fflush(stdout); // before the barrier, else the order is lost in stdio's buffer
        }
        CHECK(idist_barrier(NULL));
    }
    CHECK(idist_all_reduce(&sum, &sum, 1, IDIST_I64, IDIST_SUM,
                           NULL)); // 1 + 2 + ... + size, if everybody is there
    if (sum != (int64_t)size * (size + 1) / 2) {
        fprintf(stderr, "rank %d: the ranks add up to %lld\n", rank, (long long)sum);
        return 1;
    }
    return 0;
}

int main(int argc, char **argv) {
    idist_desc desc; // all zero: the environment decides; where it is silent, a world of 1
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = desc.init_timeout_ms = 60000; // nothing here should take a minute

    if (argc > 1) {
        char *end = NULL;
        long n = strtol(argv[1], &end, 10);
        if (argc > 2 || end == argv[1] || *end || n < 1 || n > 1024) {
            fprintf(stderr, "usage: 01_hello [number of ranks, 1 to 1024]\n");
            return 2;
        }
        CHECK(idist_spawn(hello, NULL, (int)n,
                          &desc)); // n processes; OK only if hello returned 0 in each of them
        return 0;
    }
    CHECK(idist_initialize(&desc));
    int code = hello(idist_get_local_rank(), NULL);
    CHECK(idist_finalize());
    return code;
}
