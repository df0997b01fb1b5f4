// dtypes of the program: creating and freeing, misuse, names in error texts, large elements, and
// ranks that disagree on the definition of a dtype. The grid of each operation checks that these
// dtypes are moved and reduced correctly.
#include "idist.h"

#include "grid.h"

typedef struct particle {
    double position[3];
    float mass;
    int32_t id;
} particle;

static void create_and_free(idist_group *world, int rank, int n, void *arg) {
    idist_dtype dtypes[129], again = IDIST_DTYPE_COUNT;
    idist_opts o = opts_of(world);
    char element[4000] = {0};
    (void)n;
    (void)arg;
    for (int i = 0; i < 128; i++) {
        rank_ok(rank, idist_dtype_create((size_t)i + 1, "one of many", world, &dtypes[i]));
        rank_check(idist_dtype_size(dtypes[i]) == (size_t)i + 1, "the size of dtype %d is %zu", i,
                   idist_dtype_size(dtypes[i]));
        rank_check(strcmp(idist_dtype_name(dtypes[i]), "user dtype") == 0, "its name is %s",
                   idist_dtype_name(dtypes[i]));
        for (int k = 0; k < i; k++) rank_check(dtypes[k] != dtypes[i], "%d and %d are equal", k, i);
    }
    rank_is(rank, idist_dtype_create(4, "one too many", world, &dtypes[128]), IDIST_ERR_NO_SPACE);
    rank_check(dtypes[128] == IDIST_DTYPE_COUNT, "a failed call returns a dtype");
    rank_ok(rank, idist_dtype_free(dtypes[77], world));
    rank_is(rank, idist_dtype_free(dtypes[77], world), IDIST_ERR_ARG);
    rank_ok(rank, idist_dtype_create(4000, "in its place", world, &again));
    rank_check(idist_dtype_size(again) == 4000, "the new one has %zu bytes",
               idist_dtype_size(again));
    // The new dtype has the same number and a different size.
    rank_is(rank, idist_dtype_free(dtypes[77], world), IDIST_ERR_ARG);
    rank_is(rank, idist_broadcast(element, 1, dtypes[77], 0, &o), IDIST_ERR_ARG);
    rank_ok(rank, idist_broadcast(element, 1, again, 0, &o));
}

static void misuse(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    idist_dtype dtype = IDIST_DTYPE_COUNT, gone;
    particle p;
    (void)n;
    (void)arg;
    memset(&p, 0, sizeof p);
    rank_is(rank, idist_dtype_create(0, "empty", world, &dtype), IDIST_ERR_ARG);
    rank_is(rank, idist_dtype_create(((size_t)1 << 22) + 1, "huge", world, &dtype), IDIST_ERR_ARG);
    rank_is(rank, idist_dtype_create(8, NULL, world, &dtype), IDIST_ERR_ARG);
    rank_is(rank, idist_dtype_create(8, "", world, &dtype), IDIST_ERR_ARG);
    rank_is(rank, idist_dtype_create(8, "nowhere", world, NULL), IDIST_ERR_ARG);
    rank_is(rank, idist_dtype_free(IDIST_F32, world), IDIST_ERR_ARG);
    rank_ok(rank, idist_dtype_create(sizeof p, "particle", world, &dtype));
    rank_is(rank, idist_all_reduce(&p, &p, 1, dtype, IDIST_SUM, &o), IDIST_ERR_ARG);
    rank_check(strstr(idist_last_error(), "idist_op_create") != NULL, "the text is: %s",
               idist_last_error());
    rank_is(rank, idist_reduce_local(&p, &p, 1, dtype, IDIST_SUM), IDIST_ERR_ARG);
    rank_is(rank, idist_broadcast(&p, (size_t)1 << 40, dtype, 0, &o), IDIST_ERR_ARG);
    gone = dtype;
    rank_ok(rank, idist_dtype_free(dtype, world));
    rank_is(rank, idist_broadcast(&p, 1, gone, 0, &o), IDIST_ERR_ARG);
    rank_is(rank, idist_broadcast(&p, 1, (idist_dtype)(IDIST_DTYPE_USER | 8 << 8), 0, &o),
            IDIST_ERR_ARG);
    rank_ok(rank, idist_barrier(&o)); // the group stays usable
}

// Keeps the heavier of two particles.
static void heaviest(const void *in, void *inout, size_t count, idist_dtype dtype, void *arg) {
    const particle *a = (const particle *)in;
    particle *b = (particle *)inout;
    (void)dtype;
    (void)arg;
    for (size_t i = 0; i < count; i++)
        if (a[i].mass >= b[i].mass) b[i] = a[i];
}

static void structs(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    idist_dtype dtype = IDIST_DTYPE_COUNT;
    idist_op op = IDIST_OP_COUNT;
    idist_recv_info info = {-1, -1, 0, IDIST_I8};
    particle p[3], q[3];
    (void)arg;
    rank_ok(rank, idist_dtype_create(sizeof *p, "particle", world, &dtype));
    rank_ok(rank, idist_op_create(heaviest, NULL, true, world, &op));
    memset(p, 0, sizeof p);
    for (int i = 0; i < 3; i++) {
        p[i].id = 10 * rank + i;
        p[i].mass = (float)((rank + i) % n);
    }
    rank_ok(rank, idist_all_reduce(p, q, 3, dtype, op, &o));
    for (int i = 0; i < 3; i++) {
        int heavy = ((n - 1 - i) % n + n) % n;
        rank_check(q[i].id == 10 * heavy + i, "rank %d: particle %d is that of id %d", rank, i,
                   q[i].id);
    }
    if (n == 1) return;
    if (rank == 0) {
        rank_ok(rank, idist_send(p, 3, dtype, 1, 5, &o));
    } else if (rank == 1) { // a receive as U8 leaves the message queued
        rank_is(rank, idist_recv(q, sizeof q, IDIST_U8, 0, 5, &info, &o), IDIST_ERR_MISMATCH);
        rank_check(strstr(idist_last_error(), "particle x 3") != NULL, "the text is: %s",
                   idist_last_error());
        rank_check(info.dtype == dtype && info.count == 3, "the message is described as %zu of %d",
                   info.count, (int)info.dtype);
        rank_ok(rank, idist_recv(q, info.count, info.dtype, 0, 5, &info, &o));
        rank_check(q[2].id == 2, "got id %d", q[2].id);
    }
}

// Receives messages of a dtype that the receiver does not know when they arrive. The receiver has
// another dtype under the same number, and creates the right one later.
static void unknown_to_the_receiver(idist_group *world, int rank, int n, void *arg) {
    static const size_t counts[2] = {2, 50000};
    idist_opts o = opts_of(world);
    idist_recv_info info = {-1, -1, 0, IDIST_I8};
    idist_dtype dtype = IDIST_DTYPE_COUNT;
    idist_message m;
    (void)n;
    (void)arg;
    for (int i = 0; i < 2; i++) {
        guarded_buffer b = guarded_buffer_make(counts[i] * 24, 0);
        if (rank == 0) {
            if (i == 0) rank_ok(rank, idist_dtype_create(24, "triple", world, &dtype));
            pattern_fill(b.p, 0, counts[i], 24, 0, 3);
            rank_ok(rank, idist_send(b.p, counts[i], dtype, 1, i, &o));
        } else {
            if (i == 0) {
                rank_ok(rank, idist_dtype_create(24, "another", world, &dtype));
                rank_ok(rank, idist_probe(0, 0, &info, &o));
                rank_check(info.dtype == IDIST_DTYPE_COUNT && info.count == 2,
                           "the probe says %zu of %d", info.count, (int)info.dtype);
                rank_is(rank, idist_recv(b.p, 48, IDIST_U8, 0, 0, NULL, &o), IDIST_ERR_MISMATCH);
                rank_ok(rank, idist_mprobe(0, 1, &m, &o));
                rank_check(m.info.dtype == IDIST_DTYPE_COUNT && m.info.count == counts[1],
                           "the matched one is %zu of %d", m.info.count, (int)m.info.dtype);
                rank_is(rank, idist_mrecv(b.p, 2, dtype, &m, &o), IDIST_ERR_MISMATCH);
                rank_ok(rank, idist_dtype_free(dtype, world));
                rank_ok(rank, idist_dtype_create(24, "triple", world, &dtype));
            }
            if (i == 0) rank_ok(rank, idist_recv(b.p, counts[i], dtype, 0, i, &info, &o));
            else rank_ok(rank, idist_mrecv(b.p, counts[i], dtype, &m, &o));
            rank_check(pattern_find_wrong(b.p, 0, counts[i], 24, 0, 3) == counts[i] &&
                           guarded_buffer_guards_hold(&b),
                       "wrong data");
        }
        guarded_buffer_free(&b);
    }
}

// Appends the decimal digits of the operands in rank order, an op that does not commute. The digits
// are in the first bytes of elements, some of which are larger than a chunk of the library (256
// KiB).
static void append_digit(const void *in, void *inout, size_t count, idist_dtype dtype, void *arg) {
    size_t esize = idist_dtype_size(dtype);
    (void)arg;
    for (size_t i = 0; i < count; i++) {
        const unsigned char *a = (const unsigned char *)in + i * esize;
        unsigned char *b = (unsigned char *)inout + i * esize;
        uint64_t x, y, power = 10;
        memcpy(&x, a, 8);
        memcpy(&y, b, 8);
        while (power <= y) power *= 10;
        x = x * power + y;
        memcpy(b, &x, 8);
        if (a[esize - 1] != b[esize - 1]) b[esize - 1] = 0; // 7 on all ranks
    }
}

static void large_elements(idist_group *world, int rank, int n, void *arg) {
    static const size_t sizes[3] = {4097, 70001, 300001};
    idist_opts o = opts_of(world);
    uint64_t want = 0;
    (void)arg;
    for (int k = 0; k < n; k++) want = want * 10 + (uint64_t)k + 1;
    for (int i = 0; i < 3; i++) {
        idist_dtype dtype = IDIST_DTYPE_COUNT;
        idist_op op = IDIST_OP_COUNT;
        guarded_buffer s = guarded_buffer_make(3 * sizes[i], 0),
                       r = guarded_buffer_make(3 * sizes[i], 0);
        uint64_t digit = (uint64_t)rank + 1, got;
        for (int k = 0; k < 3; k++) {
            memset(s.p + (size_t)k * sizes[i], 7, sizes[i]);
            memcpy(s.p + (size_t)k * sizes[i], &digit, 8);
        }
        rank_ok(rank, idist_dtype_create(sizes[i], "large", world, &dtype));
        rank_ok(rank, idist_op_create(append_digit, NULL, false, world, &op));
        rank_ok(rank, idist_all_reduce(s.p, r.p, 3, dtype, op, &o));
        for (int k = 0; k < 3; k++) {
            memcpy(&got, r.p + (size_t)k * sizes[i], 8);
            rank_check(got == want && r.p[(size_t)(k + 1) * sizes[i] - 1] == 7,
                       "rank %d: element %d of %zu bytes: got %llu", rank, k, sizes[i],
                       (unsigned long long)got);
        }
        rank_ok(rank, idist_scan(s.p, r.p, 3, dtype, op, &o));
        memcpy(&got, r.p + sizes[i], 8);
        uint64_t part = want;
        for (int k = rank + 1; k < n; k++) part /= 10;
        rank_check(got == part, "rank %d: scan of %zu bytes: got %llu expected %llu", rank,
                   sizes[i], (unsigned long long)got, (unsigned long long)part);
        rank_ok(rank, idist_op_free(op, world));
        rank_ok(rank, idist_dtype_free(dtype, world));
        guarded_buffer_free(&s);
        guarded_buffer_free(&r);
    }
}

// Frees the dtype while calls with it run. Another dtype then gets its number.
static void freed_while_running(idist_group *world, int rank, int n, void *arg) {
    enum { COUNT = 200000 };
    idist_dtype first = IDIST_DTYPE_COUNT, second = IDIST_DTYPE_COUNT;
    idist_request r[3] = {{NULL}, {NULL}, {NULL}};
    idist_opts all = opts_async(world, &r[0]), in = opts_async(world, &r[1]),
               out = opts_async(world, &r[2]);
    guarded_buffer s = guarded_buffer_make(COUNT * 8, 0),
                   g = guarded_buffer_make(COUNT * 8 * (size_t)n, 0),
                   m = guarded_buffer_make(COUNT * 8, 0);
    int left = (rank + n - 1) % n;
    (void)arg;
    pattern_fill(s.p, 0, COUNT, 8, rank, 4);
    rank_ok(rank, idist_dtype_create(8, "first", world, &first));
    rank_ok(rank, idist_all_gather(s.p, g.p, COUNT, first, &all));
    rank_ok(rank, idist_recv(m.p, COUNT, first, left, 1, NULL, &in));
    rank_ok(rank, idist_send(s.p, COUNT, first, (rank + 1) % n, 1, &out));
    rank_ok(rank, idist_dtype_free(first, world));
    rank_ok(rank, idist_dtype_create(8, "second", world, &second));
    rank_check(first == second, "rank %d: the value is not used again", rank);
    rank_ok(rank, idist_wait_all(r, 3));
    for (int k = 0; k < n; k++)
        rank_check(pattern_find_wrong(g.p + (size_t)k * COUNT * 8, 0, COUNT, 8, k, 4) == COUNT,
                   "rank %d: wrong data from rank %d", rank, k);
    rank_check(pattern_find_wrong(m.p, 0, COUNT, 8, left, 4) == COUNT, "rank %d: wrong message",
               rank);
    guarded_buffer_free(&s);
    guarded_buffer_free(&g);
    guarded_buffer_free(&m);
}

typedef struct disagreement {
    const char *name;       // name on rank 0; "vector" on all other ranks
    size_t nbytes;          // size on rank 0; 16 on all other ranks
    const char *collective; // name of the collective
    size_t count;
} disagreement;

static void other_definition(idist_group *world, int rank, int n, void *arg) {
    const disagreement *d = (const disagreement *)arg;
    idist_opts o = opts_of(world);
    idist_dtype dtype = IDIST_DTYPE_COUNT;
    guarded_buffer s = guarded_buffer_make(d->count * 64, 0),
                   r = guarded_buffer_make(d->count * 64 * (size_t)n, 0),
                   t = guarded_buffer_make(d->count * 64 * (size_t)n, 0);
    idist_status status;
    memset(s.p, 1, s.nbytes);
    rank_ok(rank,
            idist_dtype_create(rank ? 16 : d->nbytes, rank ? "vector" : d->name, world, &dtype));
    size_t counts[RANKS_MAX] = {0};
    for (int k = 0; k < n; k++) counts[k] = d->count;
    if (strcmp(d->collective, "broadcast") == 0)
        status = idist_broadcast(s.p, d->count, dtype, 0, &o);
    else if (strcmp(d->collective, "all_to_allv") == 0)
        status = idist_all_to_allv(r.p, counts, NULL, t.p, counts, NULL, dtype, &o);
    else status = idist_all_gather(s.p, r.p, d->count, dtype, &o);
    if (status == IDIST_OK) status = idist_barrier(&o);
    rank_check(status == IDIST_ERR_MISMATCH, "rank %d: got %s: %s", rank, idist_status_name(status),
               idist_last_error());
    rank_check(strstr(idist_last_error(), "definition of the dtype differs") != NULL,
               "rank %d: the text is: %s", rank, idist_last_error());
    rank_check(guarded_buffer_guards_hold(&r) && guarded_buffer_guards_hold(&s) &&
                   guarded_buffer_guards_hold(&t),
               "rank %d: written outside", rank);
    guarded_buffer_free(&s);
    guarded_buffer_free(&r);
    guarded_buffer_free(&t);
}

int main(void) {
    tap_deadline(90);
    for (int t = 0; t < N_PLACEMENTS; t++) {
        idist_desc d = desc_with(transport_names[t], "auto");
        ranks_case(3, &d, structs, NULL, "structs, %s", d.transport);
        ranks_case(3, &d, freed_while_running, NULL, "freed while calls run, %s", d.transport);
        ranks_case(2, &d, unknown_to_the_receiver, NULL, "unknown to the receiver, %s",
                   d.transport);
    }
    for (int a = 0; a < N_ALGORITHMS; a++) {
        idist_desc d = desc_with("auto", algorithm_names[a]);
        ranks_case(3, &d, large_elements, NULL, "large elements, %s", algorithm_names[a]);
        disagreement cases[] = {
            {"vector", 8, "broadcast", 3},        {"vector", 8, "all_gather", 3},
            {"complex", 16, "all_gather", 3},     {"vector", 64, "broadcast", 70001},
            {"complex", 16, "all_gather", 70001}, {"vector", 24, "all_to_allv", 4},
            {"complex", 16, "all_to_allv", 4},    {"vector", 8, "all_to_allv", 7000}};
        for (int i = 0; i < 8; i++)
            ranks_case_fault(3, &d, other_definition, &cases[i],
                             "%s of %zu \"%s\" of %zu bytes among others, %s", cases[i].collective,
                             cases[i].count, cases[i].name, cases[i].nbytes, algorithm_names[a]);
    }
    ranks_case(1, NULL, structs, NULL, "structs, alone");
    ranks_case(1, NULL, large_elements, NULL, "large elements, alone");
    ranks_case(2, NULL, create_and_free, NULL, "create and free");
    ranks_case(2, NULL, misuse, NULL, "misuse");
    return tap_done();
}
