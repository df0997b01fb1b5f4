// 03_send_recv.c - messages from one rank to another: blocking, from any source, and immediate
//
// build:  cc -DIDIST_IMPLEMENTATION examples/03_send_recv.c -o 03_send_recv
// run:    ./03_send_recv            starts 3 ranks; under a launcher, joins its ranks
//
// expected output:
//    blocking: rank 0 received 2 reports
//    immediate: 262144 numbers came from the left while others went to the right
//
// Do not touch the buffer or the request between an immediate call (opts.request) and idist_wait.
#include "../idist.h"
#include "lib/check.h"

#include <string.h>

enum { RANKS = 3, COUNT = 1 << 18, TAG_REPORT = 1, TAG_RING = 2 };

// Every other rank sends a report to rank 0, which receives the reports in the order of their
// arrival. The tag distinguishes the reports from the messages of immediate(), which a fast rank
// may already have sent.
static int blocking(int rank, int n) {
    int32_t report = 1000 + rank;
    idist_recv_info info;

    if (rank != 0) {
        CHECK(idist_send(&report, 1, IDIST_I32, 0, TAG_REPORT, NULL));
        return 0;
    }
    for (int k = 1; k < n; k++) {
        CHECK(idist_recv(&report, 1, IDIST_I32, IDIST_ANY_SOURCE, TAG_REPORT, &info, NULL));
        EXPECT(report == 1000 + info.source && info.count == 1);
    }
    printf("blocking: rank 0 received %d reports\n", n - 1);
    return 0;
}

// Every rank sends to the right and receives from the left at the same time.
static int immediate(int rank, int n) {
    static float out[COUNT], in[COUNT];
    int left = (rank + n - 1) % n, right = (rank + 1) % n;
    idist_request requests[2];
    idist_opts receive = {0}, send = {0};

    receive.request = &requests[0];
    send.request = &requests[1];
    for (int i = 0; i < COUNT; i++) out[i] = (float)(i % 1000 + rank);
    CHECK(idist_recv(in, COUNT, IDIST_F32, left, TAG_RING, NULL, &receive));
    CHECK(idist_send(out, COUNT, IDIST_F32, right, TAG_RING, &send));
    // The program may compute here.
    CHECK(idist_wait_all(requests, 2));
    for (int i = 0; i < COUNT; i++) EXPECT(in[i] == (float)(i % 1000 + left));
    if (rank == 0)
        printf("immediate: %d numbers came from the left while others went to the right\n", COUNT);
    return 0;
}

static int worker(int local_rank, void *arg) {
    int rank = idist_get_rank(), n = idist_get_world_size();
    (void)local_rank, (void)arg;
    return blocking(rank, n) || immediate(rank, n);
}

int main(void) {
    idist_desc desc = {0};

    desc.nproc_per_node = strcmp(idist_launcher(), "none") == 0 ? RANKS : 0; // 0 to join
    CHECK(idist_parallel_run(&desc, worker, NULL));
    return 0;
}
