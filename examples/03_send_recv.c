// 03_send_recv.c - messages from one rank to another: blocking, immediate, and from any source
//
// build:  cc -DIDIST_IMPLEMENTATION examples/03_send_recv.c -o 03_send_recv
// run:    ./03_send_recv            starts 3 ranks
//         ./03_send_recv 5          starts 5; any number from 2 on
//         (export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29503    # by hand; any free port
//          for r in 0 1; do RANK=$r LOCAL_RANK=$r ./03_send_recv & done; wait)
//
// expected output:
//    blocking: the token came back as 0 1 2
//    immediate: 4 rounds round the ring, 262144 numbers each, all right
//    any source: rank 0 heard from 2 others, tags as promised
//
// The rule about buffers. When a blocking idist_send returns, its buffer may be written again; when
// a blocking idist_recv returns, its buffer is full. With opts.request set, both return at once,
// and until idist_wait (or idist_test with *done) says that it is complete:
//
//     the buffer of a send must not be written      it may not have left yet
//     the buffer of a receive must not be read      it may not be there yet
//     buffers and the idist_request must stay       no free, no return from the function that has
//     where they are                                them on its stack
//
// Meanwhile the program may compute. Exit code: 0 if everything arrived as it was sent, 1 if not, 2
// for a bad argument.
#include "../idist.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lib/check.h"

enum { MAX_RANKS = 64, COUNT = 1 << 18, ROUNDS = 4, TAG_TOKEN = 7, TAG_RING = 8, TAG_REPORT = 100 };

// Rank 0 -> 1 -> ... -> n-1 -> 0. Each rank adds its number, so the token grows: the receiver has
// room for the largest, and idist_recv_info says how much arrived. Rank 0 sends first and receives
// last, the others receive first. If all sent first, the program would hang as soon as messages are
// too large to be buffered: use idist_sendrecv then.
static int blocking(int rank, int n) {
    int32_t token[MAX_RANKS];
    idist_recv_info info;
    int next = (rank + 1) % n, previous = (rank + n - 1) % n;
    token[0] = 0;
    if (rank == 0) CHECK(idist_send(token, 1, IDIST_I32, next, TAG_TOKEN, NULL));
    CHECK(idist_recv(token, MAX_RANKS, IDIST_I32, previous, TAG_TOKEN, &info, NULL));
    EXPECT(info.source == previous && info.tag == TAG_TOKEN);
    EXPECT(info.count == (size_t)(rank ? rank : n));
    for (size_t i = 0; i < info.count; i++) EXPECT(token[i] == (int32_t)i);
    if (rank != 0) {
        token[rank] = rank;
        CHECK(idist_send(token, (size_t)rank + 1, IDIST_I32, next, TAG_TOKEN, NULL));
        return 0;
    }
    printf("blocking: the token came back as");
    for (int i = 0; i < n; i++) printf(" %d", (int)token[i]);
    printf("\n");
    fflush(stdout);
    return 0;
}

// Each rank sends to the right and receives from the left at the same time. The receive starts
// first: a message that finds its receiver waiting goes straight into the buffer.
static int immediate_with(int rank, int n, float *out, float *in) {
    int next = (rank + 1) % n, previous = (rank + n - 1) % n;
    for (int round = 0; round < ROUNDS; round++) {
        idist_request requests[2];
        idist_opts receive, send;
        double meanwhile = 0;
        memset(&receive, 0, sizeof receive);
        memset(&send, 0, sizeof send);
        receive.request = &requests[0];
        send.request = &requests[1];
        for (int i = 0; i < COUNT; i++)
            out[i] = (float)(i % 1000 + rank + round); // ours: the last round is complete
        CHECK(idist_recv(in, COUNT, IDIST_F32, previous, TAG_RING, NULL, &receive));
        CHECK(idist_send(out, COUNT, IDIST_F32, next, TAG_RING, &send));
        for (int i = 1; i < 100000; i++)
            meanwhile += 1.0 / i;           // work that touches neither out nor in
        CHECK(idist_wait_all(requests, 2)); // from here on both buffers are ours again
        for (int i = 0; i < COUNT; i++) EXPECT(in[i] == (float)(i % 1000 + previous + round));
        EXPECT(meanwhile > 12 && meanwhile < 13);
    }
    if (rank == 0)
        printf("immediate: %d rounds round the ring, %d numbers each, all right\n", ROUNDS, COUNT);
    fflush(stdout);
    return 0;
}

static int immediate(int rank, int n) {
    float *out = (float *)malloc(COUNT * sizeof *out), *in = (float *)malloc(COUNT * sizeof *in);
    int failed = 1;
    if (out && in) failed = immediate_with(rank, n, out, in);
    free(out); // after idist_wait_all only. (When it failed, the process ends anyway.)
    free(in);
    return failed;
}

// Rank 0 takes the reports in the order of their arrival; info says whose it is. Tags tell messages
// of one sender apart.
static int any_source(int rank, int n) {
    bool heard[MAX_RANKS] = {false};
    int64_t report = 1000 + rank;
    if (rank != 0) {
        CHECK(idist_send(&report, 1, IDIST_I64, 0, TAG_REPORT + rank, NULL));
        return 0;
    }
    for (int k = 1; k < n; k++) {
        idist_recv_info info;
        CHECK(idist_recv(&report, 1, IDIST_I64, IDIST_ANY_SOURCE, IDIST_ANY_TAG, &info, NULL));
        EXPECT(info.source > 0 && info.source < n && !heard[info.source]);
        EXPECT(info.tag == TAG_REPORT + info.source && report == 1000 + info.source &&
               info.count == 1);
        heard[info.source] = true;
    }
    printf("any source: rank 0 heard from %d others, tags as promised\n", n - 1);
    fflush(stdout);
    return 0;
}

static int worker(int local_rank, void *arg) {
    int rank = idist_get_rank(), n = idist_get_world_size();
    (void)local_rank;
    (void)arg;
    EXPECT(n >= 2 && n <= MAX_RANKS);
    return blocking(rank, n) || immediate(rank, n) || any_source(rank, n);
}

int main(int argc, char **argv) {
    idist_desc desc;
    int ranks = argc > 1 ? atoi(argv[1]) : 3;
    if (argc > 2 || ranks < 2 || ranks > MAX_RANKS) {
        fprintf(stderr, "usage: 03_send_recv [number of ranks, 2 to %d]\n", MAX_RANKS);
        return 2;
    }
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = desc.init_timeout_ms = 60000;
    if (argc > 1 || strcmp(idist_launcher(), "none") == 0) desc.nproc_per_node = ranks;
    CHECK(idist_parallel_run(&desc, worker, NULL));
    return 0;
}
