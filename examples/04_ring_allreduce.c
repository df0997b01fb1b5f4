// 04_ring_allreduce.c - an all-reduce of your own, made of idist_sendrecv
//
// build:  cc -DIDIST_IMPLEMENTATION examples/04_ring_allreduce.c -o 04_ring_allreduce
// run:    ./04_ring_allreduce       starts 3 ranks; under a launcher, joins its ranks
//
// expected output:
//    3 ranks, 100003 numbers: equal to idist_all_reduce
//
// The array is split into n chunks. In each step every rank sends one chunk to its right neighbor
// and receives one from the left. In this picture there are three ranks and chunks a, b, c; a01 is
// the sum of a over ranks 0 and 1:
//
//                             rank 0          rank 1          rank 2
//     start                   a0  b0   c0     a1  b1  c1      a2   b2  c2
//     add received chunk      a0  b0   c02    a01 b1  c1      a2   b12 c2
//                             a0  b012 c02    a01 b1  c012    a012 b12 c2
//     keep received chunk     a012 b012 c02   a01 b012 c012   a012 b12 c012
//                             a012 b012 c012  a012 b012 c012  a012 b012 c012
//
// Each rank sends 2 (n - 1) / n of the array, which is the least possible, in 2 (n - 1) steps.
#include "../idist.h"
#include "lib/check.h"

#include <string.h>

enum { RANKS = 3, COUNT = 100003, TAG = 1 };

static size_t begin(int chunk, int n) { return (size_t)COUNT * (size_t)chunk / (size_t)n; }

// Sends chunk `out` of x to the right and receives chunk `in` from the left into `to`.
static int step(const int64_t *x, int out, int64_t *to, int in) {
    int rank = idist_get_rank(), n = idist_get_world_size();
    size_t nout = begin(out + 1, n) - begin(out, n), nin = begin(in + 1, n) - begin(in, n);

    CHECK(idist_sendrecv(x + begin(out, n), nout, (rank + 1) % n, TAG, to, nin, (rank + n - 1) % n,
                         TAG, IDIST_I64, NULL, NULL));
    return 0;
}

static int ring_all_reduce(int64_t *x) {
    static int64_t received[COUNT];
    int rank = idist_get_rank(), n = idist_get_world_size();

    for (int s = 0; s < n - 1; s++) {
        int out = (rank - s + n) % n, in = (rank - s - 1 + n) % n;

        if (step(x, out, received, in)) return 1;
        for (size_t i = begin(in, n); i < begin(in + 1, n); i++) x[i] += received[i - begin(in, n)];
    }
    for (int s = 0; s < n - 1; s++) {
        int out = (rank + 1 - s + n) % n, in = (rank - s + n) % n;

        if (step(x, out, x + begin(in, n), in)) return 1;
    }
    return 0;
}

static int worker(int local_rank, void *arg) {
    static int64_t x[COUNT], expected[COUNT];
    int rank = idist_get_rank(), n = idist_get_world_size();
    (void)local_rank, (void)arg;

    for (int i = 0; i < COUNT; i++) x[i] = (int64_t)i * 1000003 + (rank + 1) * (i % 17 + 1);
    CHECK(idist_all_reduce(x, expected, COUNT, IDIST_I64, IDIST_SUM, NULL));
    if (ring_all_reduce(x)) return 1;
    EXPECT(memcmp(x, expected, sizeof x) == 0);
    if (rank == 0) printf("%d ranks, %d numbers: equal to idist_all_reduce\n", n, COUNT);
    return 0;
}

int main(void) {
    idist_desc desc = {0};

    desc.nproc_per_node = strcmp(idist_launcher(), "none") == 0 ? RANKS : 0; // 0 to join
    CHECK(idist_parallel_run(&desc, worker, NULL));
    return 0;
}
