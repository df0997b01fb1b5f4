// float_mode: threads and ranks whose floating-point modes differ (flush-to-zero,
// denormals-are-zero, rounding, traps) get the same bits and keep their modes
#include "idist.h"

#include "grid.h"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

enum { MODES = 5, COUNT_MAX = 70000 };

static const char *const mode_names[MODES] = {"as the program began", "FTZ and DAZ", "upwards",
                                              "towards zero, FTZ", "all traps"};

// Sets the mode of this thread. Returns false if the test does not know the modes of this
// processor.
static bool set_mode(int mode) {
#if defined(__SSE__)
    static const unsigned csr[MODES] = {0x1f80, 0x1f80 | 0x8040, 0x1f80 | 0x4000, 0x1f80 | 0xe000,
                                        0};
    _mm_setcsr(csr[mode]);
    return true;
#elif defined(__aarch64__)
    static const uint64_t fpcr[MODES] = {0, 1 << 24, 1 << 22, 7 << 22, 0x9f00};
    __asm__ volatile("msr fpcr, %0" : : "r"(fpcr[mode]));
    return true;
#else
    return mode == 0;
#endif
}

static uint64_t get_mode(void) {
#if defined(__SSE__)
    return _mm_getcsr() & 0xffc0u; // without the flags
#elif defined(__aarch64__)
    uint64_t fpcr;
    __asm__ volatile("mrs %0, fpcr" : "=r"(fpcr));
    return fpcr;
#else
    return 0;
#endif
}

typedef struct modes {
    int of_thread; // mode of the calling thread on the ranks that `who` selects
    int who;       // rank with that mode, or -1 for all ranks
} modes;

// Fills x with values whose sums are subnormal, must be rounded, or are infinity minus infinity.
// Writes the bits of the floats.
static void fill(uint32_t *x, size_t count, int rank) {
    for (size_t i = 0; i < count; i++) {
        x[i] = 0x00400000u | (uint32_t)(i * 31 + (size_t)rank);
        if (i % 5 == 1) x[i] = 0x3f800001u + (uint32_t)rank * 7;
        if (i % 5 == 2) x[i] = 0x33000000u + (uint32_t)i % 64 + (uint32_t)rank;
        if (i % 97 == 4) x[i] = rank ? 0xff800000u : 0x7f800000u;
    }
}

static void multiply(const void *in, void *inout, size_t count, idist_dtype dtype, void *arg) {
    (void)dtype;
    (void)arg;
    for (size_t i = 0; i < count; i++) ((float *)inout)[i] *= 0.75f * ((const float *)in)[i];
}

static idist_status reduce(int kind, const void *x, void *y, size_t count, const idist_op *ops,
                           const idist_opts *o) {
    static const idist_dtype dtypes[4] = {IDIST_F32, IDIST_F64, IDIST_BF16, IDIST_F16};
    static const idist_op builtin[4] = {IDIST_SUM, IDIST_AVG, IDIST_PROD, IDIST_MIN};
    if (kind < 16) {
        idist_dtype dtype = dtypes[kind / 4];
        return idist_all_reduce(x, y, count * 4 / idist_dtype_size(dtype), dtype, builtin[kind % 4],
                                o);
    }
    return idist_all_reduce(x, y, count, IDIST_F32, ops[kind - 16], o);
}

enum { KINDS = 18 };

// Compares results in the mode of the case, blocking and with a request, with results in the mode
// in which the program began.
static void one_count(idist_group *world, int rank, const modes *m, size_t count,
                      const idist_op *ops) {
    static const size_t size = 4 * COUNT_MAX;
    char *x = (char *)calloc(3, size), *first = x + size, *y = first + size;
    bool mine = m->who < 0 || m->who == rank;
    TAP_REQUIRE(x);
    fill((uint32_t *)(void *)x, count, rank);

    for (int kind = 0; kind < KINDS; kind++) {
        for (int turn = 0; turn < 3; turn++) { // 0: in mode 0; 1: blocking; 2: with a request
            idist_request request;
            idist_opts o = turn == 2 ? opts_async(world, &request) : opts_of(world);
            void *to = turn ? y : first;
            uint64_t before, after;
            idist_status status;
            TAP_REQUIRE(set_mode(turn && mine ? m->of_thread : 0));
            before = get_mode();
            status = reduce(kind, x, to, count, ops, &o);
            if (status == IDIST_OK && turn == 2) status = idist_wait(&request);
            after = get_mode();
            set_mode(0);
            rank_ok(rank, status);
            rank_check(before == after, "rank %d kind %d: the mode was %llx and is %llx", rank,
                       kind, (unsigned long long)before, (unsigned long long)after);
            if (turn)
                rank_check(memcmp(first, y, 4 * count) == 0,
                           "rank %d kind %d count %zu turn %d: the bits differ", rank, kind, count,
                           turn);
        }
    }

    free(x);
}

static void same_bits(idist_group *world, int rank, int n, void *arg) {
    static const size_t counts[4] = {3, 100, 3000, COUNT_MAX};
    const modes *m = (const modes *)arg;
    idist_op ops[2];
    (void)n;
    rank_ok(rank, idist_op_create(multiply, NULL, true, world, &ops[0]));
    rank_ok(rank, idist_op_create_premul_sum(1 / 3.0, world, &ops[1]));
    for (int i = 0; i < 4; i++) one_count(world, rank, m, counts[i], ops);
}

int main(void) {
    tap_deadline(120);
    (void)ranks__log();
    for (int t = 0; t < N_TRANSPORTS; t++)
        for (int mode = 1; mode < MODES; mode++)
            for (int who = -1; who < 2; who++) {
                idist_desc d = desc_with(transport_names[t], "auto");
                modes m = {mode, who};
                if (test_quick() && (mode + who + t) % 2 == 0) continue;
                if (!set_mode(mode)) {
                    tap_skip(mode_names[mode], "this processor does not have the mode");
                    continue;
                }
                set_mode(0);
                procs_case(2 + mode % 2, &d, same_bits, &m, "%s on %s, %s, n=%d", mode_names[mode],
                           who < 0 ? "all ranks"
                           : who   ? "rank 1"
                                   : "rank 0",
                           transport_names[t], 2 + mode % 2);
            }
    return tap_done();
}
