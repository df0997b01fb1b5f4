// 04_ring_allreduce.c - an all-reduce of one's own, written with immediate sends and receives
//
// build:  cc -DIDIST_IMPLEMENTATION examples/04_ring_allreduce.c -o 04_ring_allreduce
// run:    ./04_ring_allreduce       starts 3 ranks itself
//         ./04_ring_allreduce 4     starts 4
//         or by hand, with any free MASTER_PORT:
//         (export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29504
//          for r in 0 1; do RANK=$r LOCAL_RANK=$r ./04_ring_allreduce & done; wait)
//
// expected output:
//    3 ranks,       0 numbers: same as idist_all_reduce
//    3 ranks,       1 numbers: same as idist_all_reduce
//    3 ranks,       2 numbers: same as idist_all_reduce
//    3 ranks,       3 numbers: same as idist_all_reduce
//    3 ranks,       4 numbers: same as idist_all_reduce
//    3 ranks,    1000 numbers: same as idist_all_reduce
//    3 ranks,  100003 numbers: same as idist_all_reduce
//
// The ranks stand in a ring, and everybody talks to its neighbours only: it sends to the right and
// receives from the left. The array is cut into n chunks. Three ranks with the chunks a, b, c;
// "a01" is the sum of a over the ranks 0 and 1:
//
//                       rank 0             rank 1             rank 2
//     start             a0   b0   c0       a1   b1   c1       a2   b2   c2
//     reduce-scatter: n-1 steps; what comes in is added
//       step 0   sends  a0                      b1                      c2
//                has    a0   b0   c02      a01  b1   c1       a2   b12  c2
//       step 1   sends            c02      a01                     b12
//                has    a0   b012 c02      a01  b1   c012     a012 b12  c2      one chunk complete
//     all-gather: n-1 steps; what comes in is kept
//       step 0   sends       b012                    c012     a012
//                has    a012 b012 c02      a01  b012 c012     a012 b12  c012
//       step 1   sends  a012                    b012                    c012
//                has    a012 b012 c012     a012 b012 c012     a012 b012 c012
//
// In every step all links are busy, and each rank sends 2 (n-1)/n of the array in all, nearly
// independent of n: no algorithm sends less. The price is 2 (n-1) steps one after the other, which
// is much for small messages: there idist_all_reduce takes another algorithm. Exit code: 0 when
// all elements are equal, else 1; 2 for a bad argument.
#include "../idist.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_RANKS = 64, TAG = 1 };

#define CHECK(call)                                                        \
    do {                                                                   \
        if ((call) != IDIST_OK) {                                          \
            fprintf(stderr, "%s failed: %s\n", #call, idist_last_error()); \
            return 1;                                                      \
        }                                                                  \
    } while (0)

// Chunk k is [begin(k), begin(k + 1)). They differ by one at most, so n need not divide count; some
// may be empty.
static size_t begin(size_t count, int k, int n) {
    size_t parts = (size_t)n, part = (size_t)k;
    return count / parts * part + count % parts * part / parts; // count * k / n without overflow
}

// Sends chunk `out` of x to the right and receives chunk `in`, into `to`, from the left, both at
// once. If every rank sent first and received then, all of them might wait for a receiver for ever.
static int step(const int64_t *x, size_t count, int out, int64_t *to, int in) {
    int rank = idist_get_rank(), n = idist_get_world_size();
    size_t first = begin(count, out, n), nout = begin(count, out + 1, n) - first;
    size_t nin = begin(count, in + 1, n) - begin(count, in, n);
    idist_request requests[2];
    idist_opts receive, send;
    memset(&receive, 0, sizeof receive);
    memset(&send, 0, sizeof send);
    receive.request = &requests[0];
    send.request = &requests[1];
    CHECK(idist_recv(to, nin, IDIST_I64, (rank + n - 1) % n, TAG, NULL, &receive));
    CHECK(idist_send(x + first, nout, IDIST_I64, (rank + 1) % n, TAG, &send));
    CHECK(idist_wait_all(requests, 2)); // only now may `to` be read and the chunk sent be written
    return 0;
}

// x becomes the sum of x over all ranks. scratch: room for the largest chunk, count / n + 1.
static int ring_all_reduce(int64_t *x, size_t count, int64_t *scratch) {
    int rank = idist_get_rank(), n = idist_get_world_size();
    for (int s = 0; s < n - 1; s++) { // reduce-scatter
        int out = (rank + n - s) % n, in = (rank + 2 * n - s - 1) % n;
        size_t first = begin(count, in, n), nin = begin(count, in + 1, n) - first;
        if (step(x, count, out, scratch, in)) return 1;
        for (size_t i = 0; i < nin; i++) x[first + i] += scratch[i];
    }
    for (int s = 0; s < n - 1; s++) { // all-gather: straight into place
        int out = (rank + n + 1 - s) % n, in = (rank + n - s) % n;
        if (step(x, count, out, x + begin(count, in, n), in)) return 1;
    }
    return 0;
}

// Fills x from (rank, index), sums it both ways, compares element by element.
static int compare(int64_t *x, int64_t *expected, int64_t *scratch, size_t count) {
    int rank = idist_get_rank(), n = idist_get_world_size();
    for (size_t i = 0; i < count; i++)
        x[i] = (int64_t)i * 1000003 + (rank + 1) * (int64_t)(i % 17 + 1);
    CHECK(idist_all_reduce(x, expected, count, IDIST_I64, IDIST_SUM, NULL));
    if (ring_all_reduce(x, count, scratch)) return 1;
    for (size_t i = 0; i < count; i++) {
        if (x[i] != expected[i]) {
            fprintf(stderr, "rank %d: element %zu of %zu is %lld, idist_all_reduce says %lld\n",
                    rank, i, count, (long long)x[i], (long long)expected[i]);
            return 1;
        }
    }
    CHECK(idist_barrier(NULL)); // every rank has compared
    if (rank == 0) printf("%d ranks, %7zu numbers: same as idist_all_reduce\n", n, count);
    fflush(stdout);
    return 0;
}

static int worker(int local_rank, void *arg) {
    static const size_t extra[] = {1000, 100003};
    size_t n = (size_t)idist_get_world_size(), largest = 100003 + n;
    int64_t *x = (int64_t *)malloc(3 * largest * sizeof *x);
    int failed = x == NULL;
    (void)local_rank;
    (void)arg;
    for (size_t count = 0; count <= n + 1 && !failed; count++)
        failed = compare(x, x + largest, x + 2 * largest, count);
    for (size_t k = 0; k < 2 && !failed; k++)
        failed = compare(x, x + largest, x + 2 * largest, extra[k]);
    free(x);
    return failed;
}

int main(int argc, char **argv) {
    idist_desc desc;
    int ranks = argc > 1 ? atoi(argv[1]) : 3;
    if (argc > 2 || ranks < 1 || ranks > MAX_RANKS) {
        fprintf(stderr, "usage: 04_ring_allreduce [number of ranks, 1 to %d]\n", MAX_RANKS);
        return 2;
    }
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = desc.init_timeout_ms = 60000;
    if (argc > 1 || strcmp(idist_launcher(), "none") == 0) desc.nproc_per_node = ranks;
    CHECK(idist_parallel_run(&desc, worker, NULL));
    return 0;
}
