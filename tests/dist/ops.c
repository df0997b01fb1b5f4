// operations: all ops x all dtypes compared with a serial reference, user functions, premultiplied
// sums, reduce_local.
#include "idist.h"

#include "grid.h"

enum { COUNT = 501 };

// Runs every op on every dtype through four collectives.
static void all_combinations(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    grid_case c;
    (void)arg;
    memset(&c, 0, sizeof c);
    c.world = world;
    c.n = n;
    c.rank = rank;
    c.count = COUNT;
    for (int d = 0; d < IDIST_DTYPE_COUNT; d++) {
        for (int op = 0; op < IDIST_OP_COUNT; op++) {
            c.dtype = (idist_dtype)d;
            c.op = (idist_op)op;
            c.salt = (uint64_t)(d * 100 + op);
            c.where = "all_reduce";
            size_t nbytes = COUNT * idist_dtype_size(c.dtype);
            guarded_buffer s = guarded_buffer_make(nbytes * (size_t)n, 0),
                           r = guarded_buffer_make(nbytes, 0);
            reduced_fill(s.p, c.dtype, c.op, n, 0, COUNT * (size_t)n, rank, c.salt);
            if (!op_allowed(c.op, c.dtype)) {
                rank_is(rank, idist_all_reduce(s.p, r.p, COUNT, c.dtype, c.op, &o), IDIST_ERR_ARG);
                rank_is(rank, idist_reduce_scatter(s.p, r.p, COUNT, c.dtype, c.op, &o),
                        IDIST_ERR_ARG);
                guarded_buffer_free(&s);
                guarded_buffer_free(&r);
                continue;
            }
            rank_ok(rank, idist_all_reduce(s.p, r.p, COUNT, c.dtype, c.op, &o));
            grid_check_reduced(&c, r.p, 0, n, 0, COUNT);
            c.where = "reduce_scatter";
            rank_ok(rank, idist_reduce_scatter(s.p, r.p, COUNT, c.dtype, c.op, &o));
            grid_check_reduced(&c, r.p, 0, n, COUNT * (size_t)rank, COUNT);
            c.where = "reduce";
            rank_ok(rank, idist_reduce(s.p, r.p, COUNT, c.dtype, c.op, n - 1, &o));
            if (rank == n - 1) grid_check_reduced(&c, r.p, 0, n, 0, COUNT);
            c.where = "scan";
            if (c.op != IDIST_AVG) {
                rank_ok(rank, idist_scan(s.p, r.p, COUNT, c.dtype, c.op, &o));
                grid_check_reduced(&c, r.p, 0, rank + 1, 0, COUNT);
            }
            guarded_buffer_free(&s);
            guarded_buffer_free(&r);
        }
    }
}

static void local_combinations(void) {
    for (int d = 0; d < IDIST_DTYPE_COUNT; d++) {
        for (int op = 0; op < IDIST_OP_COUNT; op++) {
            idist_dtype dtype = (idist_dtype)d;
            size_t nbytes = COUNT * idist_dtype_size(dtype);
            guarded_buffer in = guarded_buffer_make(nbytes, 1),
                           inout = guarded_buffer_make(nbytes, 1);
            reduced_fill(in.p, dtype, (idist_op)op, 2, 0, COUNT, 0, 3);
            reduced_fill(inout.p, dtype, (idist_op)op, 2, 0, COUNT, 1, 3);
            idist_status status = idist_reduce_local(in.p, inout.p, COUNT, dtype, (idist_op)op);
            if (op == IDIST_AVG || !op_allowed((idist_op)op, dtype)) {
                rank_check(status == IDIST_ERR_ARG, "%s %s: got %s", idist_dtype_name(dtype),
                           idist_op_name((idist_op)op), idist_status_name(status));
            } else {
                size_t i = reduced_find_wrong(inout.p, dtype, (idist_op)op, 2, 0, 2, 0, COUNT, 3);
                rank_check(status == IDIST_OK && i == COUNT, "%s %s: element %zu",
                           idist_dtype_name(dtype), idist_op_name((idist_op)op), i);
            }
            rank_check(guarded_buffer_guards_hold(&in) && guarded_buffer_guards_hold(&inout),
                       "%s: written outside", idist_dtype_name(dtype));
            guarded_buffer_free(&in);
            guarded_buffer_free(&inout);
        }
    }
}

// Computes (a + b) modulo *arg on U32. The op is commutative, and its result shows that the library
// calls fn with its arg.
static void add_mod(const void *in, void *inout, size_t count, idist_dtype dtype, void *arg) {
    const unsigned char *a = (const unsigned char *)in;
    unsigned char *b = (unsigned char *)inout;
    uint32_t x, y, modulus = *(const uint32_t *)arg;
    if (dtype != IDIST_U32) return;
    for (size_t i = 0; i < count; i++) {
        memcpy(&x, a + 4 * i, 4);
        memcpy(&y, b + 4 * i, 4);
        y = (uint32_t)(((uint64_t)x + y) % modulus);
        memcpy(b + 4 * i, &y, 4);
    }
}

// Composes two affine maps x -> p x + q modulo 2^16, each packed as p << 16 | q in a U32. The
// operation is associative but not commutative.
static uint32_t compose(uint32_t first, uint32_t second) {
    uint32_t p = (first >> 16) * (second >> 16) & 0xFFFF,
             q = ((first & 0xFFFF) * (second >> 16) + (second & 0xFFFF)) & 0xFFFF;
    return p << 16 | q;
}

static void affine(const void *in, void *inout, size_t count, idist_dtype dtype, void *arg) {
    const unsigned char *a = (const unsigned char *)in;
    unsigned char *b = (unsigned char *)inout;
    uint32_t x, y;
    (void)dtype;
    (void)arg;
    for (size_t i = 0; i < count; i++) {
        memcpy(&x, a + 4 * i, 4);
        memcpy(&y, b + 4 * i, 4);
        y = compose(x, y);
        memcpy(b + 4 * i, &y, 4);
    }
}

static uint32_t user_value(int rank, size_t i) {
    return (uint32_t)pattern_bits(rank, i, 17) % 0xFFFF0000u | 0x10001u;
}

static uint32_t user_expected(int which, int lo, int hi, size_t i) {
    uint32_t acc = user_value(lo, i);
    for (int k = lo + 1; k < hi; k++)
        acc = which == 0 ? (uint32_t)(((uint64_t)acc + user_value(k, i)) % 1000003u)
                         : compose(acc, user_value(k, i));
    return acc;
}

static void check_user(const uint32_t *got, const char *what, int which, int rank, int lo, int hi,
                       size_t first, size_t count) {
    for (size_t i = 0; i < count; i++) {
        uint32_t want = user_expected(which, lo, hi, first + i);
        if (got[i] == want) continue;
        rank_fail("%s %s: rank %d element %zu of %zu: got %08x expected %08x", what,
                  which ? "affine" : "add_mod", rank, i, count, got[i], want);
        return;
    }
}

static void user_collectives(idist_group *world, int rank, int n, idist_op op, int which,
                             size_t count) {
    idist_opts o = opts_of(world);
    uint32_t *s = (uint32_t *)malloc(count * (size_t)n * 4), *r = (uint32_t *)malloc(count * 4);
    TAP_REQUIRE(s && r);
    for (size_t i = 0; i < count * (size_t)n; i++) s[i] = user_value(rank, i);
    rank_ok(rank, idist_all_reduce(s, r, count, IDIST_U32, op, &o));
    check_user(r, "all_reduce", which, rank, 0, n, 0, count);
    rank_ok(rank, idist_reduce_scatter(s, r, count, IDIST_U32, op, &o));
    check_user(r, "reduce_scatter", which, rank, 0, n, count * (size_t)rank, count);
    for (int root = 0; root < n; root++) {
        rank_ok(rank, idist_reduce(s, r, count, IDIST_U32, op, root, &o));
        if (rank == root) check_user(r, "reduce", which, rank, 0, n, 0, count);
    }
    rank_ok(rank, idist_scan(s, r, count, IDIST_U32, op, &o));
    check_user(r, "scan", which, rank, 0, rank + 1, 0, count);
    rank_ok(rank, idist_exscan(s, r, count, IDIST_U32, op, &o));
    if (rank > 0) check_user(r, "exscan", which, rank, 0, rank, 0, count);
    free(s);
    free(r);
}

static void user_ops(idist_group *world, int rank, int n, void *arg) {
    static const size_t counts[4] = {1, 7, 1000, 30000};
    uint32_t modulus = 1000003;
    idist_op sum_op, affine_op, again;
    idist_opts o = opts_of(world);
    (void)arg;
    rank_ok(rank, idist_op_create(add_mod, &modulus, true, world, &sum_op));
    rank_ok(rank, idist_op_create(affine, NULL, false, world, &affine_op));
    rank_check(sum_op >= IDIST_OP_USER && sum_op <= IDIST_OP_LAST && sum_op != affine_op,
               "got %d and %d", (int)sum_op, (int)affine_op);
    for (int i = 0; i < 4; i++) {
        user_collectives(world, rank, n, sum_op, 0, counts[i]);
        user_collectives(world, rank, n, affine_op, 1, counts[i]);
    }
    rank_ok(rank, idist_op_free(sum_op, world));
    uint32_t x = 1;
    // A freed op is refused.
    rank_is(rank, idist_all_reduce(&x, &x, 1, IDIST_U32, sum_op, &o), IDIST_ERR_ARG);
    rank_is(rank, idist_op_free(sum_op, world), IDIST_ERR_ARG);
    rank_ok(rank, idist_op_create(add_mod, &modulus, true, world, &again));
    rank_ok(rank, idist_all_reduce(&x, &x, 1, IDIST_U32, again, &o));
    rank_check(x == (uint32_t)n, "rank %d: got %u expected %d", rank, x, n);
    rank_ok(rank, idist_op_free(again, world));
    rank_ok(rank, idist_op_free(affine_op, world));
}

static void many_user_ops(idist_group *world, int rank, int n, void *arg) {
    uint32_t modulus = 1000;
    idist_op op[224], extra;
    (void)arg;
    for (int i = 0; i < 224; i++)
        if (!rank_ok(rank, idist_op_create(add_mod, &modulus, true, world, &op[i]))) return;
    idist_status status = idist_op_create(add_mod, &modulus, true, world, &extra);
    rank_check(status != IDIST_OK && idist_last_error()[0], "the 225th op: got %s",
               idist_status_name(status));
    for (int i = 0; i < 224; i++) rank_ok(rank, idist_op_free(op[i], world));
    (void)n;
}

// Checks the sum of factor_k * x_k over the ranks k. The factors are powers of two, so the results
// are exact.
static void premul(idist_group *world, int rank, int n, void *arg) {
    static const idist_dtype dtypes[] = {IDIST_F32,  IDIST_F64,    IDIST_F16,
                                         IDIST_BF16, IDIST_F8E4M3, IDIST_F8E5M2};
    idist_opts o = opts_of(world);
    idist_op op;
    (void)arg;
    rank_ok(rank, idist_op_create_premul_sum(rank % 2 ? 0.5 : 2.0, world, &op));
    for (int d = 0; d < 6; d++) {
        size_t esize = idist_dtype_size(dtypes[d]);
        // `once` holds a value rounded to the dtype.
        unsigned char s[COUNT * 8], r[COUNT * 8], copy[COUNT * 8], once[8];
        for (size_t i = 0; i < COUNT; i++)
            store_double(s + i * esize, dtypes[d], (double)((int)(i % 7) - 3 + rank) * 2);
        memcpy(copy, s, sizeof s);
        rank_ok(rank, idist_all_reduce(s, r, COUNT, dtypes[d], op, &o));
        rank_check(memcmp(copy, s, COUNT * esize) == 0, "rank %d: the send buffer was modified",
                   rank);
        for (size_t i = 0; i < COUNT; i++) {
            double want = 0, got = load_double(r + i * esize, dtypes[d]);
            for (int k = 0; k < n; k++) {
                store_double(once, dtypes[d], (double)((int)(i % 7) - 3 + k) * 2);
                want += load_double(once, dtypes[d]) * (k % 2 ? 0.5 : 2.0);
            }
            store_double(once, dtypes[d], want);
            want = load_double(once, dtypes[d]);
            rank_check(got == want, "rank %d: %s element %zu: got %g expected %g", rank,
                       idist_dtype_name(dtypes[d]), i, got, want);
            if (got != want) break;
        }
    }
    int32_t x = 1;
    rank_is(rank, idist_all_reduce(&x, &x, 1, IDIST_I32, op, &o), IDIST_ERR_ARG);
    rank_ok(rank, idist_op_free(op, world));
}

// A user function that calls back into the library, which must be refused.
typedef struct inside {
    idist_group *world;
    idist_status status;
    bool called;
} inside;

static void calls_back(const void *in, void *inout, size_t count, idist_dtype dtype, void *arg) {
    inside *i = (inside *)arg;
    idist_opts o = opts_of(i->world);
    int32_t x = 0;
    (void)in;
    (void)inout;
    (void)count;
    (void)dtype;
    o.timeout_ms = 1000;
    i->called = true;
    i->status = idist_all_reduce(&x, &x, 1, IDIST_I32, IDIST_SUM, &o);
}

static void call_from_an_op(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    inside i = {world, IDIST_OK, false};
    idist_op op;
    int32_t x = rank;
    (void)n;
    (void)arg;
    o.timeout_ms = 3000 * test_slow_factor();
    rank_ok(rank, idist_op_create(calls_back, &i, true, world, &op));
    rank_ok(rank, idist_all_reduce(&x, &x, 1, IDIST_I32, op, &o));
    // An MPI may call the op on one rank only.
    if (i.called) rank_is(rank, i.status, IDIST_ERR_STATE);
    rank_ok(rank, idist_op_free(op, world));
    rank_ok(rank, idist_barrier(&o));
}

// Frees an op while several calls that use it run or wait for their turn. A new op then gets the
// same number. Each call must keep the function with which it was made.
static void freed_while_used(idist_group *world, int rank, int n, void *arg) {
    enum { MANY = 5000, CALLS = 6 };
    uint32_t all = UINT32_MAX, tiny = 1; // modulo 1 everything is 0
    uint32_t *x = (uint32_t *)malloc(CALLS * MANY * sizeof *x);
    idist_op op, other;
    idist_request r[CALLS];
    idist_opts o = opts_of(world);
    TAP_REQUIRE(x);
    (void)arg;
    for (uint32_t k = 0; k < CALLS * MANY; k++) x[k] = k + 1;
    rank_ok(rank, idist_op_create(add_mod, &all, true, world, &op));
    // During the sleep, the other ranks start their calls and free the op. The results must also be
    // right without the sleep.
    if (rank == 0) tap_sleep_ms(50);
    for (int c = 0; c < CALLS; c++) {
        idist_opts a = opts_async(world, &r[c]);
        rank_ok(rank, idist_all_reduce(x + c * MANY, x + c * MANY, MANY, IDIST_U32, op, &a));
    }
    rank_ok(rank, idist_op_free(op, world));
    rank_ok(rank, idist_op_create(add_mod, &tiny, true, world, &other));
    rank_check(op == other, "rank %d: the number is used again: got %d and %d", rank, (int)op,
               (int)other);
    rank_ok(rank, idist_wait_all(r, CALLS));
    size_t i = 0;
    while (i < CALLS * MANY && x[i] == (i + 1) * (uint32_t)n) i++;
    rank_check(i == CALLS * MANY, "rank %d: element %zu: got %u expected %zu", rank, i,
               x[i % (CALLS * MANY)], (i + 1) * (size_t)n);
    rank_ok(rank, idist_op_free(other, world));
    rank_ok(rank, idist_barrier(&o));
    free(x);
}

int main(void) {
    static const int sizes[5] = {1, 2, 3, 4, 7};
    tap_deadline(60);
    tap_running("reduce_local");
    ranks_reset();
    local_combinations();
    ranks_report("reduce_local, all ops x all dtypes");
    for (int i = 0; i < 5; i++) {
        for (int a = 0; a < (sizes[i] == 1 ? 1 : N_ALGORITHMS); a++) {
            idist_desc d = desc_with("auto", algorithm_names[a]);
            ranks_case(sizes[i], &d, all_combinations, NULL, "all ops x all dtypes n=%d %s",
                       sizes[i], algorithm_names[a]);
            ranks_case(sizes[i], &d, user_ops, NULL, "user functions n=%d %s", sizes[i],
                       algorithm_names[a]);
            ranks_case(sizes[i], &d, premul, NULL, "premultiplied sum n=%d %s", sizes[i],
                       algorithm_names[a]);
        }
    }
    ranks_case(2, NULL, many_user_ops, NULL, "224 user ops, and no more");
    for (int t = 0; t < N_PLACEMENTS; t++) {
        idist_desc d = desc_with(transport_names[t], "auto");
        ranks_case(2, &d, call_from_an_op, NULL, "a call from a user function is refused, %s",
                   d.transport);
        for (int n = 2; n <= 3; n++)
            ranks_case(n, &d, freed_while_used, NULL, "an op freed while a call runs n=%d, %s", n,
                       d.transport);
    }
    return tap_done();
}
