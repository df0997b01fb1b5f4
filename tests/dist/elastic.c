// elastic: sharing the rest of an epoch among fewer and among more ranks; records and wrong calls
#include "idist.h"

#include "idist_train.h"

#include "grid.h"

enum { LENGTH = 203, BATCH = 4 };

static unsigned char *seen; // number of times that each sample was processed; shared

static int to_compare(const void *a, const void *b) {
    size_t x = *(const size_t *)a, y = *(const size_t *)b;
    return (x > y) - (x < y);
}

// Processes batches of this rank, in step with the group. Returns false at the end of the epoch.
static bool process(int rank, idist_sampler *s, int batches) {
    size_t index = 0;
    for (int b = 0; b < batches; b++) {
        size_t n = 0, in_batch[BATCH];
        while (n < BATCH && idist_sampler_next(s, &index)) in_batch[n++] = index;
        for (size_t k = 0; k < n; k++) __atomic_add_fetch(&seen[in_batch[k]], 1, __ATOMIC_RELAXED);
        rank_ok(rank, idist_sampler_record(s, n));
        if (n < BATCH) return false;
    }
    return true;
}

// Processes an epoch with all ranks, then with the even ranks as if the odd ones were lost, then
// with all ranks again. The odd ranks come back without a record. Every sample must be processed,
// and only the samples that even out the shares may be processed twice.
static void comes_and_goes(idist_group *world, int rank, int n, void *arg) {
    idist_sampler_desc d;
    idist_sampler *s = NULL;
    idist_group *left = NULL;
    idist_opts all = opts_of(world), some;
    size_t index, before = 0;
    memset(&d, 0, sizeof d);
    d.length = LENGTH;
    d.group = world;
    d.seed = *(const uint64_t *)arg;
    rank_ok(rank, idist_sampler_create(&d, &s));
    rank_ok(rank, idist_sampler_set_epoch(s, 2));
    rank_check(process(rank, s, 2), "two batches for each");
    for (int k = 0; k < 3; k++)
        rank_check(idist_sampler_next(s, &index), "handed out, not recorded");
    rank_ok(rank, idist_split(world, rank % 2 ? -1 : 0, rank, &left));
    some = opts_of(left);
    if (rank % 2 == 0) {
        rank_ok(rank, idist_sampler_reshard(s, &some));
        before = (size_t)(2 * BATCH * n);
        size_t m = (size_t)idist_group_size(left), want = (LENGTH - before + m - 1) / m;
        rank_check(idist_sampler_count(s) == want, "%zu are left for each, not %zu", want,
                   idist_sampler_count(s));
        rank_check(process(rank, s, 1), "one more batch for some");
    } else {
        idist_sampler_free(&s); // a restarted rank has no record
        rank_ok(rank, idist_sampler_create(&d, &s));
    }
    rank_ok(rank, idist_sampler_reshard(s, &all));
    idist_sampler_state state = idist_sampler_get_state(s);
    rank_check(state.epoch == 2 &&
                   state.processed == (uint64_t)(2 * BATCH * n + BATCH * ((n + 1) / 2)),
               "rank %d: epoch %d, %d processed", rank, (int)state.epoch, (int)state.processed);
    while (process(rank, s, 1)) {}
    rank_ok(rank, idist_barrier(&all));
    int twice = 0, wrong = 0;
    for (int i = 0; i < LENGTH; i++) {
        twice += seen[i] == 2;
        wrong += seen[i] < 1 || seen[i] > 2;
    }
    rank_check(!wrong && twice < n,
               "%d of %d samples were processed more than twice or never, %d twice", wrong, LENGTH,
               twice);
    rank_ok(rank, idist_sampler_set_epoch(s, 3));
    rank_check(idist_sampler_count(s) == (size_t)(LENGTH + n - 1) / (size_t)n,
               "the next epoch has all samples");
    idist_sampler_free(&s);
    rank_ok(rank, idist_free_group(&left));
}

// Reshards after the end of an epoch. No sample may be left to process, not even one that drop_last
// left out.
static void at_the_end(idist_group *world, int rank, int n, void *arg) {
    idist_sampler_desc d;
    idist_sampler *s = NULL;
    idist_group *left = NULL;
    size_t index;
    (void)arg;
    memset(&d, 0, sizeof d);
    d.length = (size_t)(10 * n + n - 1);
    d.group = world;
    d.drop_last = true;
    rank_ok(rank, idist_sampler_create(&d, &s));
    while (idist_sampler_next(s, &index)) rank_ok(rank, idist_sampler_record(s, 1));
    rank_ok(rank, idist_split(world, rank ? -1 : 0, rank, &left));
    idist_opts some = opts_of(left);
    if (rank == 0) rank_ok(rank, idist_sampler_reshard(s, &some));
    if (rank == 0) rank_check(!idist_sampler_next(s, &index), "sample %zu is left", index);
    idist_sampler_free(&s);
    rank_ok(rank, idist_free_group(&left));
}

static void wrong_calls(idist_group *world, int rank, int n, void *arg) {
    idist_sampler_desc d;
    idist_sampler *s = NULL;
    idist_opts o = opts_of(world);
    (void)arg;
    memset(&d, 0, sizeof d);
    d.length = (size_t)(50 + (n > 1 && rank == n - 1));
    d.group = world;
    rank_ok(rank, idist_sampler_create(&d, &s));
    rank_is(rank, idist_sampler_record(s, 60), IDIST_ERR_ARG);
    if (n > 1) rank_is(rank, idist_sampler_reshard(s, &o), IDIST_ERR_MISMATCH);
    // The call is wrong on one rank only, and all ranks must report this.
    rank_is(rank, idist_sampler_reshard(rank ? s : NULL, &o), IDIST_ERR_ARG);
    idist_sampler_free(&s);
    d.num_replicas = 3;
    rank_ok(rank, idist_sampler_create(&d, &s));
    rank_is(rank, idist_sampler_reshard(s, &o), IDIST_ERR_ARG);
    idist_sampler_free(&s);
    // After the failed reshard, the ranks still share the same 50 samples.
    size_t all[50], index, k = 0;
    d.num_replicas = 0;
    d.length = 50;
    rank_ok(rank, idist_sampler_create(&d, &s));
    rank_is(rank, idist_sampler_reshard(rank ? s : NULL, &o), IDIST_ERR_ARG);
    while (k < 50 && idist_sampler_next(s, &index)) all[k++] = index;
    qsort(all, k, sizeof *all, to_compare);
    for (size_t i = 1; i < k && n == 1; i++) rank_check(all[i] == i, "every sample once");
    rank_check(k == (size_t)(50 + n - 1) / (size_t)n, "rank %d: %zu samples", rank, k);
    idist_sampler_free(&s);
}

int main(void) {
    tap_deadline(60);
    seen = (unsigned char *)shared_alloc(LENGTH);
    for (int n = 1; n <= 5; n++)
        for (uint64_t seed = 0; seed < 3; seed++) {
            memset(seen, 0, LENGTH);
            ranks_case(n, NULL, comes_and_goes, &seed, "%d ranks, fewer, and %d again, seed %d", n,
                       n, (int)seed);
        }
    for (int n = 1; n <= 3; n++)
        ranks_case(n, NULL, at_the_end, NULL, "the end of an epoch, %d ranks", n);
    for (int n = 1; n <= 3; n++)
        ranks_case(n, NULL, wrong_calls, NULL, "wrong calls with %d ranks", n);
    return tap_done();
}
