// 02_collectives.c - all_reduce, all_gather, broadcast, and one rank before the others
//
// build:  cc -DIDIST_IMPLEMENTATION examples/02_collectives.c -o 02_collectives
// run:    ./02_collectives          starts 3 ranks; under a launcher, joins its ranks
//
// expected output, in any order of the ranks:
//    rank 0: all_reduce SUM of [1, 2] -> [9, 12]
//    rank 1: all_reduce SUM of [3, 4] -> [9, 12]
//    rank 2: all_reduce SUM of [5, 6] -> [9, 12]
//    rank 0: all_gather of 0.0 -> [0.0, 2.0, 4.0]
//    rank 1: all_gather of 2.0 -> [0.0, 2.0, 4.0]
//    rank 2: all_gather of 4.0 -> [0.0, 2.0, 4.0]
//    rank 0: broadcast of "hello from rank 0" -> "hello from rank 0"
//    rank 1: broadcast of "hello from rank 1" -> "hello from rank 0"
//    rank 2: broadcast of "hello from rank 2" -> "hello from rank 0"
//    rank 0: prepares the data first
//    rank 1: finds the data
//    rank 2: finds the data
#include "../idist.h"
#include "lib/check.h"

#include <string.h>

enum { RANKS = 3, TEXT = 32 };

static int all_reduce(int rank) {
    int32_t mine[2] = {1 + 2 * rank, 2 + 2 * rank}, sum[2];

    CHECK(idist_all_reduce(mine, sum, 2, IDIST_I32, IDIST_SUM, NULL));
    printf("rank %d: all_reduce SUM of [%d, %d] -> [%d, %d]\n", rank, (int)mine[0], (int)mine[1],
           (int)sum[0], (int)sum[1]);
    return 0;
}

static int all_gather(int rank) {
    double mine = 2.0 * rank, all[RANKS]; // one element from each rank, in rank order

    CHECK(idist_all_gather(&mine, all, 1, IDIST_F64, NULL));
    printf("rank %d: all_gather of %.1f -> [%.1f, %.1f, %.1f]\n", rank, mine, all[0], all[1],
           all[2]);
    return 0;
}

static int broadcast(int rank) {
    char text[TEXT], before[TEXT];

    snprintf(text, sizeof text, "hello from rank %d", rank);
    memcpy(before, text, sizeof text);
    CHECK(idist_broadcast(text, TEXT, IDIST_I8, 0, NULL)); // rank 0 is the root
    printf("rank %d: broadcast of \"%s\" -> \"%s\"\n", rank, before, text);
    return 0;
}

static int prepare(void *arg) { // for example: downloads a data set, unless the file is there
    (void)arg;
    printf("rank %d: %s the data%s\n", idist_get_rank(),
           idist_get_local_rank() == 0 ? "prepares" : "finds",
           idist_get_local_rank() == 0 ? " first" : "");
    return 0;
}

static int worker(int local_rank, void *arg) {
    int rank = idist_get_rank();
    (void)local_rank, (void)arg;

    EXPECT(idist_get_world_size() == RANKS);
    if (all_reduce(rank) || all_gather(rank) || broadcast(rank)) return 1;
    CHECK(idist_one_rank_first(prepare, NULL, 0, true, NULL)); // local rank 0 of each host first
    return 0;
}

int main(void) {
    idist_desc desc = {0};

    desc.nproc_per_node = strcmp(idist_launcher(), "none") == 0 ? RANKS : 0; // 0 to join
    CHECK(idist_parallel_run(&desc, worker, NULL));
    return 0;
}
