// barrier: no rank leaves before all ranks have entered
#include "idist.h"

#include "grid.h"

typedef struct counters {
    int entered; // atomic
} counters;

static void nobody_early(idist_group *world, int rank, int n, void *arg) {
    counters *shared = (counters *)arg;
    idist_opts o = opts_of(world);
    for (int i = 0; i < 200; i++) {
        if (i % 20 == 0 && i / 20 % n == rank) tap_sleep_ms(2); // one rank comes late
        __atomic_add_fetch(&shared->entered, 1, __ATOMIC_ACQ_REL);
        if (!rank_ok(rank, idist_barrier(&o))) return;
        int seen = __atomic_load_n(&shared->entered, __ATOMIC_ACQUIRE);
        rank_check(seen >= n * (i + 1), "rank %d left barrier %d when %d of %d had entered", rank,
                   i, seen, n * (i + 1));
    }
}

static void async_barrier(idist_group *world, int rank, int n, void *arg) {
    counters *shared = (counters *)arg;
    for (int i = 0; i < 50; i++) {
        idist_request request = {NULL};
        idist_opts o = opts_async(world, &request);
        bool done = false;
        __atomic_add_fetch(&shared->entered, 1, __ATOMIC_ACQ_REL);
        if (!rank_ok(rank, idist_barrier(&o))) return;
        while (!done)
            if (!rank_ok(rank, idist_test(&request, &done))) return;
        int seen = __atomic_load_n(&shared->entered, __ATOMIC_ACQUIRE);
        rank_check(seen >= n * (i + 1), "rank %d left barrier %d when %d of %d had entered", rank,
                   i, seen, n * (i + 1));
        rank_check(request.impl == NULL, "rank %d: a completed request is empty", rank);
    }
}

// Resets the counters for the next case. If the ranks are processes of an MPI job, ranks_reset
// synchronizes them first.
static counters *zero(counters *c) {
    ranks_reset();
    memset(c, 0, sizeof *c);
    return c;
}

int main(void) {
    static const int sizes[7] = {1, 2, 3, 4, 5, 7, 8};
    tap_deadline(200);
    counters *shared = (counters *)shared_alloc(2 * sizeof *shared);
    for (int i = 0; i < 7; i++) {
        if (test_quick() && (sizes[i] == 4 || sizes[i] > 5)) continue;
        for (int a = 0; a < N_ALGORITHMS + N_TRANSPORTS - 1; a++) {
            if (a >= N_ALGORITHMS && sizes[i] != 2 && sizes[i] != 5) continue;
            const char *transport = transport_names[a < N_ALGORITHMS ? 0 : a - N_ALGORITHMS + 1];
            idist_desc desc = desc_with(transport, algorithm_names[a % N_ALGORITHMS]);
            ranks_case(sizes[i], &desc, nobody_early, zero(&shared[0]),
                       "barrier n=%d algorithm=%s transport=%s", sizes[i],
                       algorithm_names[a % N_ALGORITHMS], transport);
        }
        idist_desc hosts = desc_with("hosts", "auto");
        ranks_case(sizes[i], NULL, async_barrier, zero(&shared[0]), "barrier n=%d by idist_test",
                   sizes[i]);
        ranks_case(sizes[i], &hosts, nobody_early, zero(&shared[1]), "barrier n=%d over two hosts",
                   sizes[i]);
    }
    return tap_done();
}
