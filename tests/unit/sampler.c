// sampler.c - compares idist_sampler with the samplers of PyTorch, Ignite and Horovod. Their values
// are in tests/data (sampler.txt, permutation.txt, proxy.txt, elastic.txt), made by the scripts
// beside these files. Also checks orders supplied by the caller, checkpoints and wrong arguments.
//
// IDIST_TEST_FULL=1 adds permutations of 214,748,363 samples and more, which take minutes and 2
// GiB.
#define IDIST_IMPLEMENTATION
#include "idist.h"

#include "idist_train.h"

#include "tap.h"

// Returns true if a sampler yields the samples that the rest of a line describes by their number, a
// checksum, and the first twelve samples.
static bool yields(const idist_sampler_desc *d, uint64_t epoch, const char *rest) {
    unsigned long long count, check, want;
    size_t index, place = 0;
    uint32_t sum = 0;
    int used = 0;
    idist_sampler *s = NULL;
    TAP_REQUIRE(sscanf(rest, "%llu %llu%n", &count, &check, &used) == 2);
    TAP_REQUIRE(idist_sampler_create(d, &s) == IDIST_OK &&
                idist_sampler_set_epoch(s, epoch) == IDIST_OK);
    bool right = idist_sampler_count(s) == count;
    while (idist_sampler_next(s, &index)) {
        sum += (uint32_t)index * (uint32_t)++place;
        if (place > 12) continue;
        rest += used;
        right = right && sscanf(rest, "%llu%n", &want, &used) == 1 && want == index;
    }
    idist_sampler_free(&s);
    return right && place == count && sum == (uint32_t)check;
}

static void against_torch(void) {
    char line[512];
    int n_lines = 0, n_wrong = 0;
    FILE *f = fopen("tests/data/sampler.txt", "r");
    TAP_REQUIRE(f != NULL);
    while (fgets(line, sizeof line, f)) {
        unsigned long long length, seed, epoch;
        int replicas, drop, shuffle, rank, used = 0;
        idist_sampler_desc d;
        if (line[0] == '#' || line[0] == 'p') continue;
        TAP_REQUIRE(sscanf(line, "%llu %d %d %d %llu %llu %d%n", &length, &replicas, &drop,
                           &shuffle, &seed, &epoch, &rank, &used) == 7);
        memset(&d, 0, sizeof d);
        d.length = (size_t)length;
        d.num_replicas = replicas;
        d.rank = rank;
        d.in_order = !shuffle;
        d.drop_last = drop != 0;
        d.seed = seed;
        if (!yields(&d, epoch, line + used) && n_wrong++ < 5) tap_diag("differs: %s", line);
        n_lines++;
    }
    fclose(f);
    tap_ok(n_lines > 1000 && n_wrong == 0, "the indices of PyTorch, in %d cases", n_lines);
}

// Returns true if a permutation matches the rest of a line, which is a checksum and the first
// twelve elements.
static bool is_permutation(const size_t *order, size_t count, const char *rest) {
    unsigned long long check, wanted;
    uint64_t sum = 0;
    int used = 0;
    TAP_REQUIRE(sscanf(rest, "%llu%n", &check, &used) == 1);
    for (size_t i = 0; i < count; i++)
        sum += (uint64_t)order[i] * ((uint64_t)i * UINT64_C(0x9E3779B97F4A7C15) + 1);
    for (int i = 0; i < 12; i++) {
        rest += used;
        if (sscanf(rest, "%llu%n", &wanted, &used) != 1 || wanted != order[i]) return false;
    }
    return sum == check;
}

// Checks a line of permutation.txt whose count is at the threshold from which torch shuffles by its
// other method, or just below this threshold.
static void large_permutation(size_t count, uint64_t seed, const char *rest) {
    size_t *order, index = 0;
    idist_sampler *s = NULL;
    idist_sampler_desc d;
    const char *full = getenv("IDIST_TEST_FULL");
    if (!full || strcmp(full, "1") != 0) {
        tap_skip("a large permutation", "only with IDIST_TEST_FULL=1");
        return;
    }
    order = (size_t *)malloc(count * sizeof *order);
    TAP_REQUIRE(order != NULL);
    idist__permutation_make(order, count, seed, IDIST__RANDOM_LARGE);
    tap_ok(is_permutation(order, count, rest), "torch's permutation of %zu", count);
    size_t first = order[5];
    free(order);
    if (count != 214748364) return;
    memset(&d, 0, sizeof d);
    d.length = count;
    d.seed = seed;
    d.num_replicas = 64;
    d.rank = 5;
    TAP_REQUIRE(idist_sampler_create(&d, &s) == IDIST_OK);
    tap_ok(idist_sampler_next(s, &index) && index == first, "which the sampler deals out");
    idist_sampler_free(&s);
}

static void permutations(void) {
    static char line[8192];
    unsigned long long count, seed, wanted;
    int n_lines = 0, n_wrong = 0, used = 0;
    FILE *f = fopen("tests/data/permutation.txt", "r");
    TAP_REQUIRE(f != NULL);
    while (fgets(line, sizeof line, f)) {
        if (sscanf(line, "large %llu %llu%n", &count, &seed, &used) == 2)
            large_permutation((size_t)count, seed, line + used);
        if (sscanf(line, "small %llu %llu%n", &count, &seed, &used) != 2) continue;
        size_t order[1000];
        const char *rest = line + used;
        bool right = true;
        TAP_REQUIRE(count <= 1000);
        idist__permutation_make(order, (size_t)count, seed, (size_t)count);
        for (size_t i = 0; i < count && right; i++, rest += used)
            right = sscanf(rest, "%llu%n", &wanted, &used) == 1 && wanted == order[i];
        if (!right && n_wrong++ < 5) tap_diag("differs: %.60s", line);
        n_lines++;
    }
    fclose(f);
    tap_ok(n_lines == 18 && n_wrong == 0, "torch's other method, in %d cases", n_lines);
    tap_is((int)IDIST__RANDOM_LARGE, 214748364, "which begins where torch's does");
}

static void partitions(void) {
    static const double fractions[3] = {0.7, 0.2, 0.1};
    static size_t indices[65537];
    char line[512];
    int n_lines = 0, n_wrong = 0;
    FILE *f = fopen("tests/data/sampler.txt", "r");
    TAP_REQUIRE(f != NULL);
    while (fgets(line, sizeof line, f)) {
        unsigned long long length, seed, count, check, want;
        int part, used = 0;
        size_t n = 0;
        uint32_t sum = 0;
        if (sscanf(line, "partition %llu %llu %d %llu %llu%n", &length, &seed, &part, &count,
                   &check, &used) != 5)
            continue;
        const char *rest = line + used;
        bool right =
            idist_partition((size_t)length, fractions, 3, part, seed, indices, &n) == IDIST_OK &&
            n == count;
        for (size_t i = 0; i < n && right; i++) {
            sum += (uint32_t)indices[i] * (uint32_t)(i + 1);
            if (i >= 12) continue;
            right = sscanf(rest, "%llu%n", &want, &used) == 1 && want == indices[i];
            rest += used;
        }
        right = right && sum == (uint32_t)check;
        if (!right && n_wrong++ < 5) tap_diag("differs: %s", line);
        n_lines++;
    }
    fclose(f);
    tap_ok(n_lines > 100 && n_wrong == 0,
           "the parts of the tutorial's DataPartitioner, in %d cases", n_lines);
    static const double wrong[2] = {0.7, 0.4};
    size_t n;
    tap_is(idist_partition(10, wrong, 2, 0, 0, indices, &n), IDIST_ERR_ARG,
           "fractions of more than 1");
    tap_is(idist_partition(10, fractions, 3, 3, 0, indices, &n), IDIST_ERR_ARG, "part 3 of 3");
#if SIZE_MAX > UINT32_MAX
    tap_is(idist_partition((size_t)1 << 32, fractions, 3, 0, 0, indices, &n), IDIST_ERR_ARG,
           "2^32 samples");
#else
    tap_skip("2^32 samples", "no size_t of 32 bits can say so");
#endif
}

static int scales(int local_rank, void *arg) {
    int n = idist_get_world_size();
    (void)local_rank;
    (void)arg;
    if (n == 4)
        return !(idist_auto_batch_size(512) == 128 && idist_auto_num_workers(8) == 2 &&
                 idist_auto_batch_size(3) == 3 && idist_auto_num_workers(2) == 2);
    return !(n == 3 && idist_auto_batch_size(10) == 3 && idist_auto_num_workers(7) == 3);
}

static void down(size_t *indices, size_t length, uint64_t epoch, int run, void *arg) {
    (void)arg;
    for (size_t i = 0; i < length; i++)
        indices[i] = ((size_t)epoch + 3 * (size_t)run + length - i) % length;
}

static void against_ignite(void) {
    char line[512];
    int n_lines = 0, n_wrong = 0;
    FILE *f = fopen("tests/data/proxy.txt", "r");
    TAP_REQUIRE(f != NULL);
    while (fgets(line, sizeof line, f)) {
        unsigned long long length, epoch;
        int replicas, rank, used = 0;
        idist_sampler_desc d;
        if (line[0] == '#') continue;
        TAP_REQUIRE(sscanf(line, "%llu %d %llu %d%n", &length, &replicas, &epoch, &rank, &used) ==
                    4);
        memset(&d, 0, sizeof d);
        d.length = (size_t)length;
        d.num_replicas = replicas;
        d.rank = rank;
        d.order_fn = down;
        if (!yields(&d, epoch, line + used) && n_wrong++ < 5) tap_diag("differs: %s", line);
        n_lines++;
    }
    fclose(f);
    tap_ok(n_lines > 300 && n_wrong == 0,
           "the indices of Ignite's DistributedProxySampler, in %d cases", n_lines);
}

// Fills the order that ignite's DistributedProxySampler gets from the sampler inside it.
static void backwards(size_t *indices, size_t length, uint64_t epoch, int run, void *arg) {
    for (size_t i = 0; i < length; i++)
        indices[i] = 1000 * (size_t)epoch + 100 * (size_t)run + length - 1 - i;
    ++*(int *)arg;
}

static void own_order(void) {
    static const size_t want[2][3] = {{2002, 2000, 2101}, {2001, 2102, 2100}};
    int n_runs = 0;
    for (int rank = 0; rank < 2; rank++) {
        idist_sampler_desc d;
        idist_sampler *s = NULL;
        size_t index, n = 0, n_right = 0;
        memset(&d, 0, sizeof d);
        d.length = 3;
        d.num_replicas = 2;
        d.rank = rank;
        d.order_fn = backwards;
        d.arg = &n_runs;
        TAP_REQUIRE(idist_sampler_create(&d, &s) == IDIST_OK &&
                    idist_sampler_set_epoch(s, 2) == IDIST_OK);
        for (; idist_sampler_next(s, &index); n++) n_right += n < 2 && index == want[rank][n];
        tap_ok(n == 2 && n_right == 2, "an order of the caller's, rank %d", rank);
        idist_sampler_free(&s);
    }
    tap_is(n_runs, 8, "which is asked for as often as it takes");
}

// Checks the rest of an epoch after the number of ranks changed twice. The lines of elastic.txt
// hold places in the epoch's order. The shuffled sampler must yield the samples at these places.
static void against_horovod(void) {
    char line[512];
    int n_lines = 0, n_wrong = 0;
    FILE *f = fopen("tests/data/elastic.txt", "r");
    TAP_REQUIRE(f != NULL);
    while (fgets(line, sizeof line, f)) {
        unsigned long long length, one, other, count, check, want;
        int first, second, third, rank, used = 0;
        size_t order[2000], index, place = 0;
        uint32_t sum = 0;
        bool right = true;
        idist_sampler *whole = NULL, *plain = NULL, *s = NULL;
        idist_sampler_desc d;
        idist_sampler_state state = {3, 0, 0, 0};
        if (line[0] == '#') continue;
        TAP_REQUIRE(sscanf(line, "%llu %d %llu %d %llu %d %d %llu %llu%n", &length, &first, &one,
                           &second, &other, &third, &rank, &count, &check, &used) == 9);
        const char *rest = line + used;
        memset(&d, 0, sizeof d);
        d.length = (size_t)length;
        d.num_replicas = 1;
        TAP_REQUIRE(idist_sampler_create(&d, &whole) == IDIST_OK &&
                    idist_sampler_set_epoch(whole, 3) == IDIST_OK);
        while (idist_sampler_next(whole, &index)) order[place++] = index;
        d.num_replicas = third;
        d.rank = rank;
        // This product can exceed the length, but at most `length` samples can have been processed.
        state.processed = one * (unsigned long long)first;
        state.processed = state.processed < length
                              ? state.processed + other * (unsigned long long)second
                              : length;
        state.processed = state.processed < length ? state.processed : length;
        TAP_REQUIRE(idist_sampler_create(&d, &s) == IDIST_OK &&
                    idist_sampler_set_state(s, state) == IDIST_OK);
        d.in_order = true;
        TAP_REQUIRE(idist_sampler_create(&d, &plain) == IDIST_OK &&
                    idist_sampler_set_state(plain, state) == IDIST_OK);
        for (place = 0; idist_sampler_next(plain, &index);) {
            size_t shuffled;
            right = right && idist_sampler_next(s, &shuffled) && shuffled == order[index];
            sum += (uint32_t)index * (uint32_t)++place;
            if (place > 12) continue;
            right = right && sscanf(rest, "%llu%n", &want, &used) == 1 && want == index;
            rest += used;
        }
        right = right && place == count && sum == (uint32_t)check && !idist_sampler_next(s, &index);
        if (!right && n_wrong++ < 5) tap_diag("differs: %s", line);
        idist_sampler_free(&whole);
        idist_sampler_free(&plain);
        idist_sampler_free(&s);
        n_lines++;
    }
    fclose(f);
    tap_ok(n_lines > 200 && n_wrong == 0, "the indices of Horovod's elastic sampler, in %d cases",
           n_lines);
}

static void resumes(void) {
    idist_sampler_desc d;
    idist_sampler *s = NULL, *other = NULL;
    idist_sampler_state state;
    size_t a = 0, b = 1, n_same = 0, n = 0;
    memset(&d, 0, sizeof d);
    d.length = 101;
    d.num_replicas = 4;
    d.rank = 3;
    d.seed = 9;
    TAP_REQUIRE(idist_sampler_create(&d, &s) == IDIST_OK &&
                idist_sampler_create(&d, &other) == IDIST_OK);
    TAP_REQUIRE(idist_sampler_set_epoch(s, 5) == IDIST_OK);
    for (int i = 0; i < 10; i++) idist_sampler_next(s, &a);
    state = idist_sampler_get_state(s);
    tap_is(idist_sampler_set_state(other, state), IDIST_OK, "a state is taken");
    for (; idist_sampler_next(s, &a) && idist_sampler_next(other, &b); n++) n_same += a == b;
    tap_ok(n == 16 && n_same == 16, "and goes on with the same indices");
    tap_ok(idist_sampler_next(other, &b) == false, "to the same end");
    state.position = 27;
    tap_is(idist_sampler_set_state(other, state), IDIST_ERR_ARG, "a position beyond the end");
    state.position = 0;
    state.processed = 102;
    tap_is(idist_sampler_set_state(other, state), IDIST_ERR_ARG, "more processed than there are");
    n = 0;
    while (idist_sampler_next(other, &b)) n++;
    tap_is(n, 26, "is refused, and the next pass is whole");
    idist_sampler_free(&s);
    idist_sampler_free(&other);
    tap_ok(!other, "freeing leaves NULL");
    idist_sampler_free(&other);
}

// A training run of three epochs that is stopped and resumed. The run starts on `before` ranks. It
// stops in epoch 1 after `stop` samples of each rank, or after idist_sampler_next has reported the
// end of the epoch. The run resumes with `after` ranks. The resumed loop is the one in the header,
// or a loop that does not call idist_sampler_set_epoch for the resumed epoch.
typedef struct stopped {
    size_t length;
    int before, after;
    bool drop_last, at_end, plain_loop;
    size_t stop;
} stopped;

enum { MOST = 40, EPOCHS = 3 };

static idist_sampler *sampler_of(const stopped *how, int ranks, int rank) {
    idist_sampler_desc d;
    idist_sampler *s = NULL;
    memset(&d, 0, sizeof d);
    d.length = how->length;
    d.num_replicas = ranks;
    d.rank = rank;
    d.drop_last = how->drop_last;
    TAP_REQUIRE(idist_sampler_create(&d, &s) == IDIST_OK);
    return s;
}

// Counts the samples of each epoch that the ranks process after the restart.
static void go_on(const stopped *how, idist_sampler_state state, int seen[EPOCHS][MOST]) {
    for (int rank = 0; rank < how->after; rank++) {
        idist_sampler *s = sampler_of(how, how->after, rank);
        size_t index;
        TAP_REQUIRE(idist_sampler_set_state(s, state) == IDIST_OK);
        for (uint64_t epoch = state.epoch; epoch < EPOCHS; epoch++) {
            if (!how->plain_loop || epoch != state.epoch)
                TAP_REQUIRE(idist_sampler_set_epoch(s, epoch) == IDIST_OK);
            while (idist_sampler_next(s, &index)) seen[epoch][index]++;
        }
        idist_sampler_free(&s);
    }
}

// Returns true if no sample of epoch 1 is lost or repeated more often than even shares require, and
// if epoch 2 is complete.
static bool is_right(const stopped *how) {
    int seen[EPOCHS][MOST] = {{0}}, lost[EPOCHS] = {0}, twice[EPOCHS] = {0};
    idist_sampler_state state = {0, 0, 0, 0};
    size_t index;
    for (int rank = 0; rank < how->before; rank++) {
        idist_sampler *s = sampler_of(how, how->before, rank);
        TAP_REQUIRE(idist_sampler_set_epoch(s, 1) == IDIST_OK);
        for (size_t i = 0; i < how->stop; i++) {
            TAP_REQUIRE(idist_sampler_next(s, &index));
            seen[1][index]++;
        }
        if (how->at_end) TAP_REQUIRE(!idist_sampler_next(s, &index));
        state = idist_sampler_get_state(s);
        idist_sampler_free(&s);
    }
    go_on(how, state, seen);
    for (int epoch = 1; epoch < EPOCHS; epoch++) {
        for (size_t i = 0; i < how->length; i++) {
            lost[epoch] += !seen[epoch][i];
            twice[epoch] += seen[epoch][i] ? seen[epoch][i] - 1 : 0;
        }
    }
    bool right = true;
    for (int epoch = 1; epoch < EPOCHS; epoch++) {
        int most = (epoch == 1 ? how->before : 0) + how->after - 1;
        right = right && (how->drop_last ? !twice[epoch] && lost[epoch] < most + 1
                                         : !lost[epoch] && twice[epoch] < most + 1);
    }
    if (!right)
        tap_diag("%zu samples, %d to %d ranks, stop %zu, drop %d, end %d, plain %d: lost %d %d, "
                 "twice %d %d",
                 how->length, how->before, how->after, how->stop, how->drop_last, how->at_end,
                 how->plain_loop, lost[1], lost[2], twice[1], twice[2]);
    return right;
}

static void resumes_elsewhere(void) {
    static const size_t lengths[] = {1, 2, 7, 12, 40};
    int n = 0, n_wrong = 0;
    stopped how;
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        for (int ranks = 0; ranks < 25; ranks++) {
            for (int flags = 0; flags < 4; flags++) {
                memset(&how, 0, sizeof how);
                how.length = lengths[i];
                how.before = ranks % 5 + 1;
                how.after = ranks / 5 + 1;
                how.drop_last = flags & 1;
                how.plain_loop = flags & 2;
                idist_sampler *s = sampler_of(&how, how.before, 0);
                size_t count = idist_sampler_count(s);
                idist_sampler_free(&s);
                for (how.stop = 0; how.stop <= count; how.stop++, n++) n_wrong += !is_right(&how);
                how.stop = count;
                how.at_end = true;
                n_wrong += !is_right(&how);
            }
        }
    }
    tap_ok(!n_wrong && n > 3000, "any other number of ranks goes on, in %d cases", n);
}

// Resumes with the same number of ranks. The samples must be the ones that would have followed
// without the stop.
static void resumes_exactly(void) {
    static const stopped how = {23, 4, 4, false, false, false, 0};
    size_t index = 0, other = 0;
    for (int k = 0; k <= 7; k++) { // all samples, and then the end
        idist_sampler *s = sampler_of(&how, 4, 2), *t = sampler_of(&how, 4, 2);
        TAP_REQUIRE(idist_sampler_set_epoch(s, 5) == IDIST_OK);
        for (int i = 0; i < k; i++) idist_sampler_next(s, &index);
        idist_sampler_state state = idist_sampler_get_state(s);
        tap_ok(state.ranks == 4 && state.epoch == (k < 7 ? 5u : 6u) &&
                   state.position == (k < 7 ? (uint64_t)k : 0),
               "the state after %d of 6 samples", k);
        TAP_REQUIRE(idist_sampler_set_state(t, state) == IDIST_OK);
        if (k == 7) TAP_REQUIRE(idist_sampler_set_epoch(s, 6) == IDIST_OK);
        TAP_REQUIRE(idist_sampler_set_epoch(t, state.epoch) == IDIST_OK);
        bool more, same = true;
        do {
            more = idist_sampler_next(s, &index);
            same = same && idist_sampler_next(t, &other) == more && (!more || other == index);
        } while (more);
        tap_ok(same, "leads to the samples after it");
        // The resumed epoch can be started again from its beginning after it has made progress.
        TAP_REQUIRE(idist_sampler_set_epoch(t, state.epoch) == IDIST_OK);
        size_t n = 0;
        while (idist_sampler_next(t, &other)) n++;
        tap_is(n, 6, "the epoch from its beginning is whole");
        idist_sampler_free(&s);
        idist_sampler_free(&t);
    }
    idist_sampler *s = sampler_of(&how, 4, 2);
    while (idist_sampler_next(s, &index)) {}
    idist_sampler_next(s, &index);
    tap_ok(idist_sampler_get_state(s).epoch == 0 && idist_sampler_get_state(s).position == 1,
           "a second pass without another epoch is in its epoch");
    idist_sampler_state state = {0, 7, 0, 4};
    tap_is(idist_sampler_set_state(s, state), IDIST_ERR_ARG, "7 of 6 samples");
    state.ranks = 3;
    tap_is(idist_sampler_set_state(s, state), IDIST_OK, "7 of 8 samples on three ranks");
    tap_is(idist_sampler_count(s), 1, "leave two for four ranks");
    state.ranks = UINT64_MAX;
    tap_is(idist_sampler_set_state(s, state), IDIST_ERR_ARG, "too many ranks");
    idist_sampler_free(&s);
}

static void wrong(void) {
    idist_sampler_desc d;
    idist_sampler *s = NULL;
    memset(&d, 0, sizeof d);
    tap_is(idist_sampler_create(&d, &s), IDIST_ERR_ARG, "no samples");
    d.length = 5;
    tap_is(idist_sampler_create(&d, &s), IDIST_OK, "outside a world: one rank has them all");
    tap_is(idist_sampler_count(s), 5, "five");
    tap_is(idist_sampler_record(s, 6), IDIST_ERR_ARG, "which cannot have been six");
    tap_is(idist_sampler_record(s, 5), IDIST_OK, "but five");
    tap_is(idist_sampler_record(s, 1), IDIST_ERR_ARG, "and none after that");
    tap_is(idist_sampler_reshard(s, NULL), IDIST_ERR_STATE,
           "without a world nothing is dealt out anew");
    idist_sampler_free(&s);
    d.num_replicas = 2;
    d.rank = 2;
    tap_is(idist_sampler_create(&d, &s), IDIST_ERR_ARG, "rank 2 of 2");
    tap_ok(s == NULL, "leaves NULL");
    tap_like(idist_last_error(), "rank 2 is not in 0 .. 1", "and says why");
    d.rank = 0;
    d.drop_last = true;
    d.order_fn = backwards;
    tap_is(idist_sampler_create(&d, &s), IDIST_ERR_ARG, "drop_last with an order of the caller's");
    d.drop_last = false;
    d.in_order = true;
    tap_is(idist_sampler_create(&d, &s), IDIST_ERR_ARG, "in_order with an order of the caller's");
    d.in_order = false;
    d.num_replicas = -3;
    tap_is(idist_sampler_create(&d, &s), IDIST_ERR_ARG, "-3 ranks");
    d.num_replicas = 0;
    d.rank = 1;
    tap_is(idist_sampler_create(&d, &s), IDIST_ERR_ARG, "a rank without num_replicas");
    d.rank = 0;
    d.order_fn = NULL;
    d.length = SIZE_MAX;
    tap_is(idist_sampler_create(&d, &s), IDIST_ERR_ARG, "SIZE_MAX samples to shuffle");
    tap_is(idist_sampler_create(NULL, &s), IDIST_ERR_ARG, "no desc");
    tap_is(idist_sampler_create(&d, NULL), IDIST_ERR_ARG, "nowhere to put it");
    tap_ok(!idist_sampler_next(NULL, NULL), "nothing comes of no sampler");
    tap_is(idist_sampler_record(NULL, 0), IDIST_ERR_ARG, "nor is it recorded");
    tap_is(idist_sampler_set_epoch(NULL, 0), IDIST_ERR_ARG, "no sampler");
    tap_is(idist_auto_num_workers(INT32_MAX), INT32_MAX, "any number of workers");
    tap_is(idist_sampler_count(NULL), 0, "has no samples");
}

int main(void) {
    const char *full = getenv("IDIST_TEST_FULL");
    tap_deadline(full && strcmp(full, "1") == 0 ? 1200 : 60);
    tap_is(idist_spawn(scales, NULL, 4, NULL), IDIST_OK, "batch size and workers, 4 ranks");
    tap_is(idist_spawn(scales, NULL, 3, NULL), IDIST_OK, "batch size and workers, 3 ranks");
    tap_is(idist_auto_batch_size(7), 7, "and alone");
    against_torch();
    against_ignite();
    permutations();
    partitions();
    own_order();
    against_horovod();
    resumes();
    resumes_exactly();
    resumes_elsewhere();
    wrong();
    return tap_done();
}
