// 02_collectives.c - all_reduce, all_gather, broadcast, barrier, as in Ignite's tutorial
//
// build:  cc -DIDIST_IMPLEMENTATION examples/02_collectives.c -o 02_collectives
// run:    ./02_collectives          starts 3 ranks
//         (export WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=29502    # by hand; any free port
//          for r in 0 1 2; do RANK=$r LOCAL_RANK=$r ./02_collectives & done; wait)
//
// expected output:
//    rank 0: all_reduce SUM of [1, 2] -> [9, 12]
//    rank 1: all_reduce SUM of [3, 4] -> [9, 12]
//    rank 2: all_reduce SUM of [5, 6] -> [9, 12]
//    rank 0: all_gather of 0.0 -> [0.0, 2.0, 4.0]
//    rank 1: all_gather of 2.0 -> [0.0, 2.0, 4.0]
//    rank 2: all_gather of 4.0 -> [0.0, 2.0, 4.0]
//    rank 0: strings gathered: "i am 0" "i am 1, a bit longer" "i am 2, a bit longer, a bit longer"
//    rank 0: broadcast of "hello from rank 0" -> "hello from rank 0"
//    rank 1: broadcast of "hello from rank 1" -> "hello from rank 0"
//    rank 2: broadcast of "hello from rank 2" -> "hello from rank 0"
//    rank 0: downloads the data
//    rank 1: finds the data
//    rank 2: finds the data
//
// Every rank makes the same calls in the same order. Exit code: 0 if all results are right, else 1.
#include "../idist.h"
#include "lib/check.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { RANKS = 3, TEXT = 256 };

// Prints in the order of the ranks: rank k does between the k-th barrier and the next.
static int print_in_turn(const char *line) {
    for (int turn = 0; turn < idist_get_world_size(); turn++) {
        if (turn == idist_get_rank()) {
            printf("rank %d: %s\n", turn, line);
            fflush(stdout);
        }
        CHECK(idist_barrier(NULL));
    }
    return 0;
}

static int all_reduce_example(int rank) {
    char line[TEXT];
    int64_t mine[2] = {1 + 2 * rank, 2 + 2 * rank}, sum[2];

    CHECK(idist_all_reduce(mine, sum, 2, IDIST_I64, IDIST_SUM, NULL)); // or in place: sum, sum
    snprintf(line, sizeof line, "all_reduce SUM of [%lld, %lld] -> [%lld, %lld]",
             (long long)mine[0], (long long)mine[1], (long long)sum[0], (long long)sum[1]);
    if (print_in_turn(line)) return 1;
    EXPECT(sum[0] == 9 && sum[1] == 12);
    return 0;
}

static int all_gather_example(int rank) {
    char line[TEXT];
    double number = 2.0 * rank, all[RANKS];
    CHECK(idist_all_gather(&number, all, 1, IDIST_F64, NULL)); // all: count elements per rank
    snprintf(line, sizeof line, "all_gather of %.1f -> [%.1f, %.1f, %.1f]", number, all[0], all[1],
             all[2]);
    if (print_in_turn(line)) return 1;
    for (int r = 0; r < RANKS; r++) EXPECT(all[r] == 2.0 * r);
    return 0;
}

// Strings differ in length. The bytes arrive in the order of the ranks; sizes has each rank's.
static int gather_strings_example(int rank) {
    static const char *const words[RANKS] = {"i am 0", "i am 1, a bit longer",
                                             "i am 2, a bit longer, a bit longer"};
    char all[TEXT];
    size_t sizes[RANKS], at = 0;
    CHECK(idist_all_gather_bytes(words[rank], strlen(words[rank]), all, sizeof all, sizes, NULL));
    if (rank == 0) printf("rank 0: strings gathered:");
    for (int r = 0; r < RANKS; at += sizes[r], r++) {
        if (rank == 0) printf(" \"%.*s\"", (int)sizes[r], all + at);
        EXPECT(sizes[r] == strlen(words[r]) && memcmp(all + at, words[r], sizes[r]) == 0);
    }
    if (rank == 0) printf("\n");
    fflush(stdout);
    CHECK(idist_barrier(NULL)); // nobody prints the next line before rank 0 has printed this one
    return 0;
}

// Only rank 0 knows the message and its size; the others say how much room they have.
static int broadcast_example(int rank) {
    char message[TEXT], before[TEXT], line[3 * TEXT];
    snprintf(before, sizeof before, "hello from rank %d", rank);
    memcpy(message, before, sizeof message);
    size_t nbytes = strlen(message) + 1; // with the terminating zero; looked at on rank 0 only
    CHECK(idist_broadcast_bytes(message, sizeof message, &nbytes, 0, NULL));
    snprintf(line, sizeof line, "broadcast of \"%s\" -> \"%s\"", before, message);
    if (print_in_turn(line)) return 1;
    EXPECT(nbytes == sizeof "hello from rank 0" && strcmp(message, "hello from rank 0") == 0);
    return 0;
}

typedef struct data {
    char path[TEXT];
    bool downloaded;
    int value;
} data;

static int get_data(void *arg) {
    data *d = (data *)arg;
    FILE *f = fopen(d->path, "r");
    bool ok;

    d->downloaded = f == NULL;        // not there yet: "download" it, that is, make it
    if (!f) f = fopen(d->path, "wx"); // x: fails if somebody else made it
    if (!f) return 1;
    if (d->downloaded) ok = fprintf(f, "%d\n", d->value = 42) > 0;
    else ok = fscanf(f, "%d", &d->value) == 1;
    return fclose(f) == 0 && ok ? 0 : 1;
}

// One rank of each host runs get_data first; the others run it when that is done, and not at all if
// it failed: a barrier with the error handling that one forgets to write.
static int barrier_example(void) {
    data d = {"", false, 0};
    int64_t id = (int64_t)getpid();

    CHECK(idist_broadcast(&id, 1, IDIST_I64, 0, NULL)); // so that all ranks mean the same file
    snprintf(d.path, sizeof d.path, "/tmp/idist_02_collectives.%lld", (long long)id);
    CHECK(idist_one_rank_first(get_data, &d, 0, true, NULL));
    CHECK(idist_barrier(NULL)); // all have read it
    if (idist_get_local_rank() == 0) remove(d.path);
    if (print_in_turn(d.downloaded ? "downloads the data" : "finds the data")) return 1;
    EXPECT(d.value == 42 && d.downloaded == (idist_get_local_rank() == 0));
    return 0;
}

static int worker(int local_rank, void *arg) {
    int rank = idist_get_rank();
    (void)local_rank;
    (void)arg;
    EXPECT(idist_get_world_size() == RANKS); // the values are the tutorial's, for 3 ranks
    if (all_reduce_example(rank) || all_gather_example(rank)) return 1;
    return gather_strings_example(rank) || broadcast_example(rank) || barrier_example();
}

int main(void) {
    idist_desc desc = {0};

    desc.timeout_ms = desc.init_timeout_ms = 60000;
    if (strcmp(idist_launcher(), "none") == 0) desc.nproc_per_node = RANKS; // else join its world
    CHECK(idist_parallel_run(&desc, worker, NULL));
    return 0;
}
