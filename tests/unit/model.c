// model.c - runs the message schedules of all collectives on the simulated network of
// tests/lib/model.h. Checks their results, how rounds, bytes and times grow with the number of
// ranks, and which algorithm is chosen.
#define IDIST_IMPLEMENTATION
#include "model.h"

//---- the schedules compute the right results ----

// Returns element i of the result on rank r. The root is rank 0.
static int64_t expected(idist__kind kind, int n, int r, size_t count, size_t i) {
    int64_t sum = 0;
    int first = 0, end = n;
    size_t at = kind == IDIST__REDUCE_SCATTER ? (size_t)r * count + i : i;
    switch (kind) {
    case IDIST__BROADCAST: return value_of(0, i);
    case IDIST__ALL_GATHER:
    case IDIST__GATHER: return value_of((int)(i / count), i % count);
    case IDIST__SCATTER: return value_of(0, (size_t)r * count + i);
    case IDIST__ALL_TO_ALL: return value_of((int)(i / count), (size_t)r * count + i % count);
    case IDIST__SCAN: end = r + 1; break;
    case IDIST__EXSCAN: end = r; break;
    default: break;
    }
    for (int k = first; k < end; k++) sum += value_of(k, at);
    return sum;
}

static bool has_result(idist__kind kind, int r) {
    if (kind == IDIST__REDUCE || kind == IDIST__GATHER) return r == 0;
    return kind != IDIST__EXSCAN || r != 0;
}

static int wrong_values(idist__kind kind, int n, size_t count) {
    int wrong = 0;
    for (int r = 0; r < n; r++) {
        const int64_t *out = (const int64_t *)(const void *)members[r].out;
        for (size_t i = 0; has_result(kind, r) && i < count * (size_t)blocks_out(kind, n); i++)
            wrong += out[i] != expected(kind, n, r, count, i);
    }
    return wrong;
}

static const idist__kind kinds[] = {IDIST__BROADCAST,      IDIST__REDUCE,     IDIST__ALL_REDUCE,
                                    IDIST__REDUCE_SCATTER, IDIST__ALL_GATHER, IDIST__GATHER,
                                    IDIST__SCATTER,        IDIST__ALL_TO_ALL, IDIST__SCAN,
                                    IDIST__EXSCAN};

static void check_values(void) {
    static const int sizes[] = {2, 3, 4, 5, 7, 8, 12, 17};
    static const size_t counts[] = {1, 5, 40000};
    has_data = true;
    for (size_t k = 0; k < IDIST__COUNT_OF(kinds); k++) {
        int wrong = 0, not_done = 0;
        for (size_t s = 0; s < 3 * IDIST__COUNT_OF(sizes) * IDIST__COUNT_OF(counts); s++) {
            static const idist__algorithm settings[] = {IDIST__ALGO_AUTO, IDIST__ALGO_LATENCY,
                                                        IDIST__ALGO_BANDWIDTH};
            int n = sizes[s / 3 % IDIST__COUNT_OF(sizes)];
            size_t count = counts[s / 3 / IDIST__COUNT_OF(sizes)];
            not_done += !run(n, kinds[k], count, settings[s % 3]).done;
            wrong += wrong_values(kinds[k], n, count);
            members_free();
        }
        tap_is(not_done, 0, "%s ends on all ranks", idist__kind_names[kinds[k]]);
        tap_is(wrong, 0, "%s: values", idist__kind_names[kinds[k]]);
    }
    has_data = false;
}

//---- how they grow ----

static int log2_up(int n) {
    int log = 0;
    while (1 << log < n) log++;
    return log;
}

// Returns the number of rounds that a collective of 8 bytes may take beyond log2(n) rounded up.
static int rounds_beyond_log(idist__kind kind) {
    switch (kind) {
    case IDIST__ALL_REDUCE: // ranks beyond a power of two add rounds before and after
    case IDIST__REDUCE_SCATTER:
    case IDIST__EXSCAN: return 1;
    default: return 0;
    }
}

static const idist__kind small_kinds[] = {IDIST__BARRIER,        IDIST__BROADCAST,
                                          IDIST__REDUCE,         IDIST__ALL_REDUCE,
                                          IDIST__REDUCE_SCATTER, IDIST__ALL_GATHER,
                                          IDIST__GATHER,         IDIST__SCATTER,
                                          IDIST__ALL_TO_ALL,     IDIST__SCAN,
                                          IDIST__EXSCAN};

// Checks that collectives of small messages take about log2(n) rounds and that each rank
// communicates with at most 2 log2(n) peers.
static void check_small(int n) {
    int log = log2_up(n);
    for (size_t k = 0; k < IDIST__COUNT_OF(small_kinds); k++) {
        idist__kind kind = small_kinds[k];
        const char *name = idist__kind_names[kind];
        outcome all = run(n, kind, kind == IDIST__BARRIER ? 0 : 1, IDIST__ALGO_LATENCY);
        int rounds = log + rounds_beyond_log(kind);
        members_free();
        tap_ok(all.done && all.rounds <= rounds,
               "%s of 8 bytes, %d ranks: at most %d rounds, got %d", name, n, rounds, all.rounds);
        tap_ok(all.peer_count <= 2 * log, "%s of 8 bytes, %d ranks: at most %d peers, got %d", name,
               n, 2 * log, all.peer_count);
    }
}

// Checks that with large messages no rank sends more than (n - 1) / n of the whole, or twice that
// amount for all_reduce. Up to 64 ranks, a collective must use more than 80 % of the bandwidth. The
// limits assume the larger block size, because some blocks are one element larger than others.
static void check_large(int n) {
    static const struct {
        idist__kind kind;
        // How many times a rank sends (n - 1) / n of the whole.
        int times;
        bool per_rank;
    } rows[] = {{IDIST__ALL_REDUCE, 2, false},
                {IDIST__REDUCE_SCATTER, 1, true},
                {IDIST__ALL_GATHER, 1, true}};
    const size_t whole = (size_t)8 << 20; // elements
    double reduction = reduction_per_byte;
    // Reducing overlaps with the transfers as far as the chunks allow, so its time does not count
    // here.
    reduction_per_byte = 0;
    for (size_t k = 0; k < IDIST__COUNT_OF(rows); k++) {
        size_t block = (whole + (size_t)n - 1) / (size_t)n, nbytes = block * sizeof(int64_t);
        size_t most = (size_t)rows[k].times * (size_t)(n - 1) * nbytes;
        outcome all = run(n, rows[k].kind, rows[k].per_rank ? block : whole, IDIST__ALGO_BANDWIDTH);
        double bound = gap_per_byte * (double)most, share = bound / all.seconds;
        members_free();
        tap_ok(all.done && all.sent_nbytes <= most,
               "%s of 64 MiB, %d ranks: a rank sends %zu bytes", idist__kind_names[rows[k].kind], n,
               all.sent_nbytes);
        tap_is(all.peer_count, n == 2 ? 1 : 2, "%s of 64 MiB, %d ranks: peers",
               idist__kind_names[rows[k].kind], n);
        tap_ok(share > 0.8 || n > 64, "%s of 64 MiB, %d ranks: %.0f %% of the bandwidth",
               idist__kind_names[rows[k].kind], n, 100 * share);
    }
    reduction_per_byte = reduction;
}

// Checks that a large broadcast is pipelined, so that its time hardly depends on the number of
// ranks.
static void check_pipeline(void) {
    const size_t count = (size_t)8 << 20;
    double few = run(4, IDIST__BROADCAST, count, IDIST__ALGO_BANDWIDTH).seconds, many;
    members_free();
    many = run(64, IDIST__BROADCAST, count, IDIST__ALGO_BANDWIDTH).seconds;
    members_free();
    tap_ok(many < 1.5 * few, "broadcast of 64 MiB: %.1f ms on 4 ranks, %.1f ms on 64", 1e3 * few,
           1e3 * many);
}

// Compares the algorithm that the library chooses with the better of the algorithms latency and
// bandwidth. Returns the ratio of their times at the size where the choice is worst.
static double worst_choice(idist__kind kind, int n, size_t *nbytes) {
    static const idist__algorithm settings[] = {IDIST__ALGO_AUTO, IDIST__ALGO_LATENCY,
                                                IDIST__ALGO_BANDWIDTH};
    size_t blocks = (size_t)(blocks_in(kind, n) * blocks_out(kind, n));
    double worst = 0;
    for (size_t count = 1; count * blocks <= (size_t)1 << 20; count *= 4) {
        double seconds[3];
        for (int a = 0; a < 3; a++) {
            seconds[a] = run(n, kind, count, settings[a]).seconds;
            members_free();
        }
        double best = seconds[1] < seconds[2] ? seconds[1] : seconds[2];
        if (seconds[0] / best <= worst) continue;
        worst = seconds[0] / best;
        *nbytes = count * sizeof(int64_t);
    }
    return worst;
}

typedef struct choice_row {
    idist__kind kind;
    // Largest allowed ratio of the time of the chosen algorithm to the time of the better one.
    double most;
} choice_row;

static void check_choice(const choice_row *rows, size_t row_count, const char *where) {
    static const int sizes[] = {2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 64, 200};
    for (size_t k = 0; k < row_count * IDIST__COUNT_OF(sizes); k++) {
        const choice_row *row = &rows[k / IDIST__COUNT_OF(sizes)];
        int n = sizes[k % IDIST__COUNT_OF(sizes)];
        size_t nbytes = 0;
        double worst = worst_choice(row->kind, n, &nbytes);
        tap_ok(worst <= row->most, "%s, %d ranks, %s: the choice takes at most %.2f times the best",
               idist__kind_names[row->kind], n, where, worst);
        if (worst > 1.3) tap_diag("at %zu bytes of each rank", nbytes);
    }
}

// Sets the network that the later checks use. Latency and overhead are in us.
static void choose_for(double us, double overhead_us, double bytes_per_s) {
    latency = us * 1e-6;
    overhead = overhead_us * 1e-6;
    gap_per_byte = 1 / bytes_per_s;
    latency_nbytes = (size_t)((latency + 2 * overhead) / gap_per_byte);
}

static void check_choices(void) {
    static const choice_row rows[] = {{IDIST__BROADCAST, 1.15},     {IDIST__REDUCE, 1.1},
                                      {IDIST__ALL_REDUCE, 1.3},     {IDIST__ALL_GATHER, 1.25},
                                      {IDIST__REDUCE_SCATTER, 1.4}, {IDIST__SCAN, 1.1},
                                      {IDIST__EXSCAN, 1.2},         {IDIST__GATHER, 1.5},
                                      {IDIST__SCATTER, 1.9},        {IDIST__ALL_TO_ALL, 1.9}};
    static const choice_row fast[] = {{IDIST__BROADCAST, 1.15},     {IDIST__REDUCE, 1.25},
                                      {IDIST__ALL_REDUCE, 1.45},    {IDIST__ALL_GATHER, 1.3},
                                      {IDIST__REDUCE_SCATTER, 2.0}, {IDIST__SCAN, 1.25},
                                      {IDIST__EXSCAN, 1.3},         {IDIST__GATHER, 1.9},
                                      {IDIST__SCATTER, 1.8},        {IDIST__ALL_TO_ALL, 1.5}};
    choose_for(8, 1, 1e9);
    check_choice(rows, IDIST__COUNT_OF(rows), "10 us and 1 GB/s");
    choose_for(20, 2, 25e9 / 8);
    check_choice(rows, IDIST__COUNT_OF(rows), "24 us and 25 Gbit/s");
    choose_for(46, 2, 1e9 / 8);
    check_choice(rows, IDIST__COUNT_OF(rows), "50 us and 1 Gbit/s");
    // On these networks reducing takes a large part of the time. The choice of the algorithm does
    // not take this into account.
    choose_for(46, 2, 25e9 / 8);
    check_choice(fast, IDIST__COUNT_OF(fast), "50 us and 25 Gbit/s");
    choose_for(20, 2, 100e9 / 8);
    check_choice(fast, IDIST__COUNT_OF(fast), "24 us and 100 Gbit/s");
}

// Checks the sizes up to which the latency algorithm is used on one host, for numbers of ranks that
// the table in ring/algo/choose.h covers and for larger ones. A group on one host of a world with
// several hosts has the same limits.
static void check_limits(void) {
    static const struct {
        idist__kind kind;
        int n;
        size_t limit;
    } rows[] = {{IDIST__BROADCAST, 2, 262144},   {IDIST__BROADCAST, 64, 1091909},
                {IDIST__ALL_REDUCE, 8, 65536},   {IDIST__ALL_REDUCE, 9, 25422},
                {IDIST__ALL_REDUCE, 64, 221687}, {IDIST__REDUCE_SCATTER, 64, 12362},
                {IDIST__ALL_GATHER, 64, 29184},  {IDIST__ALL_TO_ALL, 64, 2048},
                {IDIST__GATHER, 1000, 2048},     {IDIST__EXSCAN, 64, 685607}};
    for (size_t k = 0; k < IDIST__COUNT_OF(rows); k++) {
        const idist__choice *row = idist__choose_row(rows[k].kind);
        member *self;
        members_new(rows[k].n);
        self = &members[0];
        self->w.machine.latency_nbytes = 0;
        tap_is((long long)idist__choose_limit(&self->g, row), (long long)rows[k].limit,
               "%s on one host, %d ranks: the limit", idist__kind_names[rows[k].kind], rows[k].n);
        self->w.machine.latency_nbytes = 75000;
        tap_is((long long)idist__choose_limit(&self->g, row), (long long)rows[k].limit,
               "the same, one of several hosts");
        members_free();
    }
}

int main(void) {
    static const int sizes[] = {2, 3, 4, 5, 7, 8, 12, 16, 17, 31, 32, 33, 64, 100, 256, 511, 1000};
    model_init();
    tap_deadline(200);
    check_values();
    for (size_t i = 0; i < IDIST__COUNT_OF(sizes); i++) check_small(sizes[i]);
    for (int n = 2; n <= 256; n = 2 * n + (n == 8)) check_large(n);
    check_pipeline();
    check_limits();
    check_choices();
    return tap_done();
}
