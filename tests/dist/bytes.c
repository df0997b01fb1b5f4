// broadcast_bytes and all_gather_bytes: sizes that the receivers do not know, and calls that
// allocate their results
#include "idist.h"

#include "grid.h"

static void broadcast_sizes(idist_group *world, int rank, int n, void *arg) {
    static const size_t sizes[8] = {0, 1, 7, 64, 4096, 65536, 65537, 1000003};
    idist_opts o = opts_of(world);
    (void)arg;
    for (int i = 0; i < 8; i++) {
        for (int root = 0; root<n; root += n> 4 ? 3 : 1) {
            guarded_buffer b = guarded_buffer_make(sizes[i] + 5, (size_t)(i % 2));
            size_t nbytes = rank == root ? sizes[i] : 12345;
            if (rank == root) pattern_fill(b.p, 0, sizes[i], 1, root, 3);
            rank_ok(rank, idist_broadcast_bytes(b.p, b.nbytes, &nbytes, root, &o));
            rank_check(nbytes == sizes[i], "rank %d root %d: got %zu bytes expected %zu", rank,
                       root, nbytes, sizes[i]);
            rank_check(pattern_find_wrong(b.p, 0, sizes[i], 1, root, 3) == sizes[i],
                       "rank %d root %d: wrong byte", rank, root);
            for (size_t j = 0; j < 5; j++)
                rank_check(b.p[sizes[i] + j] == 0x5A, "rank %d: written past the message", rank);
            rank_check(guarded_buffer_guards_hold(&b), "rank %d: written past the buffer", rank);
            guarded_buffer_free(&b);
        }
    }
}

// Gives the odd ranks a buffer that is too small. Only these ranks fail. They learn the size, and
// the group stays usable.
static void broadcast_no_room(idist_group *world, int rank, int n, void *arg) {
    static const size_t sizes[3] = {10, 5000, 300000};
    idist_opts o = opts_of(world);
    (void)arg;
    for (int i = 0; i < 3; i++) {
        bool small = rank % 2 == 1;
        guarded_buffer b = guarded_buffer_make(small ? sizes[i] - 1 : sizes[i], 0);
        size_t nbytes = rank == 0 ? sizes[i] : 0;
        if (rank == 0) pattern_fill(b.p, 0, sizes[i], 1, 0, 4);
        rank_is(rank, idist_broadcast_bytes(b.p, b.nbytes, &nbytes, 0, &o),
                small ? IDIST_ERR_TRUNCATED : IDIST_OK);
        rank_check(nbytes == sizes[i], "rank %d: got %zu bytes expected %zu", rank, nbytes,
                   sizes[i]);
        if (small)
            rank_check(guarded_buffer_untouched(&b),
                       "rank %d: a buffer that is too small stays untouched", rank);
        if (!small)
            rank_check(pattern_find_wrong(b.p, 0, sizes[i], 1, 0, 4) == sizes[i],
                       "rank %d: wrong byte", rank);
        guarded_buffer_free(&b);
        int32_t x = 1, y = 0;
        rank_ok(rank, idist_all_reduce(&x, &y, 1, IDIST_I32, IDIST_SUM, &o));
        rank_check(y == n, "rank %d: after it, got %d expected %d", rank, y, n);
    }
}

static size_t gather_size(int rank, int round) {
    static const size_t sizes[6] = {5, 0, 1, 70001, 300, 65536};
    return round == 0 ? 0 : sizes[(rank * 5 + round) % 6];
}

static void gather_sizes(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    (void)arg;
    for (int round = 0; round < 7; round++) {
        size_t sizes[RANKS_MAX], total = 0, own = gather_size(rank, round), at = 0;
        for (int k = 0; k < n; k++) total += gather_size(k, round);
        guarded_buffer send = guarded_buffer_make(own, 1), recv = guarded_buffer_make(total, 0);
        pattern_fill(send.p, 0, own, 1, rank, (uint64_t)round);
        memset(sizes, 0xFF, sizeof sizes);
        rank_ok(rank,
                idist_all_gather_bytes(own ? send.p : NULL, own, recv.p, recv.nbytes, sizes, &o));
        for (int k = 0; k < n; k++) {
            size_t want = gather_size(k, round);
            rank_check(sizes[k] == want, "rank %d round %d: size of rank %d: got %zu expected %zu",
                       rank, round, k, sizes[k], want);
            rank_check(pattern_find_wrong(recv.p + at, 0, want, 1, k, (uint64_t)round) == want,
                       "rank %d round %d: wrong byte from rank %d", rank, round, k);
            at += want;
        }
        rank_check(guarded_buffer_guards_hold(&recv) && guarded_buffer_guards_hold(&send),
                   "rank %d: written outside", rank);
        guarded_buffer_free(&send);
        guarded_buffer_free(&recv);
    }
}

static void gather_no_room(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    char text[16];
    size_t sizes[RANKS_MAX] = {0}, total = 0;
    (void)arg;
    for (int k = 0; k < n; k++) total += (size_t)k + 1;
    memset(text, 'a' + rank, sizeof text);
    bool small = rank == n - 1;
    guarded_buffer recv = guarded_buffer_make(small ? total - 1 : total, 0);
    rank_is(rank, idist_all_gather_bytes(text, (size_t)rank + 1, recv.p, recv.nbytes, sizes, &o),
            small ? IDIST_ERR_TRUNCATED : IDIST_OK);
    for (int k = 0; k < n; k++)
        rank_check(sizes[k] == (size_t)k + 1, "rank %d: size of rank %d: got %zu expected %d", rank,
                   k, sizes[k], k + 1);
    if (small)
        rank_check(guarded_buffer_untouched(&recv),
                   "rank %d: a buffer that is too small stays untouched", rank);
    if (!small)
        rank_check(recv.p[0] == 'a' && recv.p[total - 1] == 'a' + n - 1, "rank %d: wrong bytes",
                   rank);
    guarded_buffer_free(&recv);
    rank_ok(rank, idist_barrier(&o));
}

static void strings(idist_group *world, int rank, int n, void *arg) {
    static const char *words[4] = {"zero", "", "a longer second word", "three"};
    idist_opts o = opts_of(world);
    char all[64] = "", want[64] = "";
    size_t sizes[4];
    (void)arg;
    for (int k = 0; k < n; k++) strcat(want, words[k]);
    rank_ok(rank, idist_all_gather_bytes(words[rank], strlen(words[rank]), all, sizeof all - 1,
                                         sizes, &o));
    rank_check(strcmp(all, want) == 0, "rank %d: got \"%s\" expected \"%s\"", rank, all, want);
}

// Calls broadcast_alloc and all_gather_alloc. Only the sender knows the sizes and the dtype.
static void alloc_sizes(idist_group *world, int rank, int n, void *arg) {
    static const size_t sizes[6] = {0, 1, 7, 1000, 70001, 300000};
    idist_opts o = opts_of(world);
    (void)arg;
    for (int i = 0; i < 6; i++) {
        size_t got = 1, counts[RANKS_MAX], own = sizes[i] / (size_t)(rank + 1), at = 0;
        int root = i % n;
        idist_dtype dtype = IDIST_I8;
        void *p = &o;
        guarded_buffer send = guarded_buffer_make(sizes[i] * 8, 0);
        pattern_fill(send.p, 0, sizes[i], 8, rank, 2);
        if (rank == root)
            rank_ok(rank, idist_broadcast_alloc(send.p, sizes[i], IDIST_F64, root, &p, &got,
                                                rank % 2 ? NULL : &dtype, &o));
        else // send, count and dtype are ignored
            rank_ok(rank, idist_broadcast_alloc(NULL, 77, IDIST_I8, root, &p, &got,
                                                rank % 2 ? NULL : &dtype, &o));
        rank_check(p && got == sizes[i] && (rank % 2 || dtype == IDIST_F64) &&
                       pattern_find_wrong(p, 0, sizes[i], 8, root, 2) == sizes[i] &&
                       !((char *)p)[8 * sizes[i]],
                   "rank %d: broadcast_alloc of %zu: got %zu of %d", rank, sizes[i], got,
                   (int)dtype);
        idist_free(p);
        rank_ok(rank, idist_all_gather_alloc(send.p, own, IDIST_U64, &p, counts, &o));
        for (int k = 0; k < n; k++) {
            size_t want = sizes[i] / (size_t)(k + 1);
            rank_check(counts[k] == want &&
                           pattern_find_wrong((char *)p + at * 8, 0, want, 8, k, 2) == want,
                       "rank %d: all_gather_alloc: wrong data from rank %d", rank, k);
            at += want;
        }
        rank_check(!((char *)p)[8 * at], "rank %d: no zero follows", rank);
        idist_free(p);
        guarded_buffer_free(&send);
    }
}

static void alloc_strings(idist_group *world, int rank, int n, void *arg) {
    static const char *words[3] = {"first", "", "a longer third word"};
    idist_opts o = opts_of(world);
    size_t nbytes, counts[3];
    void *text = NULL;
    (void)n;
    (void)arg;
    rank_ok(rank, idist_broadcast_alloc("from rank 2", 11, IDIST_U8, 2, &text, &nbytes, NULL, &o));
    rank_check(text && strcmp((char *)text, "from rank 2") == 0, "rank %d: got \"%s\"", rank,
               (char *)text);
    idist_free(text);
    rank_ok(rank,
            idist_all_gather_alloc(words[rank], strlen(words[rank]), IDIST_U8, &text, counts, &o));
    rank_check(text && strcmp((char *)text, "firsta longer third word") == 0, "rank %d: got \"%s\"",
               rank, (char *)text);
    idist_free(text);
}

static void alloc_user_dtype(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    idist_dtype dtype = IDIST_DTYPE_COUNT, got = IDIST_I8;
    unsigned char element[100];
    size_t count = 0;
    void *p = NULL;
    (void)n;
    (void)arg;
    pattern_element(element, sizeof element, 0, 0, 9);
    if (rank < 2) rank_ok(rank, idist_dtype_create(sizeof element, "hundred", world, &dtype));
    rank_ok(rank, idist_broadcast_alloc(element, 1, dtype, 0, &p, &count, &got, &o));
    rank_check(count == 1 && memcmp(p, element, sizeof element) == 0, "rank %d: wrong data", rank);
    rank_check(got == (rank < 2 ? dtype : IDIST_DTYPE_COUNT), "rank %d: got dtype %d", rank,
               (int)got);
    idist_free(p);
}

static void alloc_misuse(idist_group *world, int rank, int n, void *arg) {
    idist_request r = {NULL};
    idist_opts o = opts_of(world), async = opts_async(world, &r);
    size_t count, counts[RANKS_MAX];
    void *p = &o;
    (void)arg;
    rank_is(rank, idist_broadcast_alloc("x", 1, IDIST_U8, 0, NULL, &count, NULL, &o),
            IDIST_ERR_ARG);
    rank_is(rank, idist_broadcast_alloc("x", 1, IDIST_U8, 0, &p, NULL, NULL, &o), IDIST_ERR_ARG);
    rank_check(!p, "rank %d: broadcast_alloc without recvcount: not NULL", rank);
    p = &o;
    rank_is(rank, idist_broadcast_alloc("x", 1, IDIST_U8, n, &p, &count, NULL, &o), IDIST_ERR_ARG);
    rank_check(!p, "rank %d: the pointer is not NULL", rank);
    rank_is(rank, idist_broadcast_alloc("x", 1, IDIST_U8, 0, &p, &count, NULL, &async),
            IDIST_ERR_ARG);
    rank_is(rank, idist_broadcast_alloc(NULL, 1, IDIST_U8, rank, &p, &count, NULL, &o),
            IDIST_ERR_ARG);
    rank_is(rank, idist_broadcast_alloc("x", 1, IDIST_DTYPE_COUNT, rank, &p, &count, NULL, &o),
            IDIST_ERR_ARG);
    rank_is(rank, idist_all_gather_alloc("x", 1, IDIST_U8, NULL, counts, &o), IDIST_ERR_ARG);
    p = &o;
    rank_is(rank, idist_all_gather_alloc("x", 1, IDIST_U8, &p, NULL, &o), IDIST_ERR_ARG);
    rank_check(!p, "rank %d: all_gather_alloc without recvcounts: not NULL", rank);
    rank_is(rank, idist_all_gather_alloc(NULL, 1, IDIST_U8, &p, counts, &o), IDIST_ERR_ARG);
    rank_is(rank, idist_all_gather_alloc("x", SIZE_MAX / 8, IDIST_F64, &p, counts, &o),
            IDIST_ERR_ARG);
    rank_is(rank, idist_all_gather_alloc("x", 1, IDIST_DTYPE_COUNT, &p, counts, &o), IDIST_ERR_ARG);
    rank_ok(rank, idist_barrier(&o)); // nothing was sent
}

static void alloc_mismatch(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    size_t counts[RANKS_MAX];
    float x[4] = {0};
    void *p = &o;
    (void)n;
    (void)arg;
    rank_is(rank, idist_all_gather_alloc(x, 4, rank ? IDIST_F32 : IDIST_I32, &p, counts, &o),
            IDIST_ERR_MISMATCH);
    rank_check(strstr(idist_last_error(), "dtype differs") != NULL, "the text is: %s",
               idist_last_error());
    rank_check(!p, "rank %d: the pointer is not NULL", rank);
}

static void alloc_too_much(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    size_t counts[RANKS_MAX];
    void *p = &o;
    (void)n;
    (void)arg;
    idist_status status =
        idist_all_gather_alloc("x", rank ? 1 : (size_t)1 << 58, IDIST_U8, &p, counts, &o);
    rank_check(status == IDIST_ERR_NO_MEMORY, "rank %d: got %s: %s", rank,
               idist_status_name(status), idist_last_error());
    rank_check(!p, "rank %d: the pointer is not NULL", rank);
}

int main(void) {
    static const int sizes[5] = {1, 2, 3, 5, 8};
    tap_deadline(60);
    for (int i = 0; i < 5; i++) {
        for (int a = 0; a < N_ALGORITHMS; a++) {
            idist_desc desc = desc_with(i == 2 ? "tcp" : "auto", algorithm_names[a]);
            int n = sizes[i];
            ranks_case(n, &desc, broadcast_sizes, NULL, "broadcast_bytes n=%d %s", n,
                       algorithm_names[a]);
            ranks_case(n, &desc, gather_sizes, NULL, "all_gather_bytes n=%d %s", n,
                       algorithm_names[a]);
            ranks_case(n, &desc, alloc_sizes, NULL, "results that are allocated n=%d %s", n,
                       algorithm_names[a]);
            if (n == 1) continue;
            ranks_case(n, &desc, broadcast_no_room, NULL,
                       "broadcast_bytes n=%d %s: too small on some ranks", n, algorithm_names[a]);
            ranks_case(n, &desc, gather_no_room, NULL,
                       "all_gather_bytes n=%d %s: too small on one rank", n, algorithm_names[a]);
        }
    }
    ranks_case(4, NULL, strings, NULL, "strings");
    ranks_case(3, NULL, alloc_strings, NULL, "strings that are allocated");
    ranks_case(3, NULL, alloc_user_dtype, NULL, "broadcast_alloc of a dtype that one has not made");
    ranks_case(2, NULL, alloc_misuse, NULL, "misuse of what allocates");
    ranks_case_fault(3, NULL, alloc_mismatch, NULL, "all_gather_alloc of other dtypes");
#ifdef __SANITIZE_ADDRESS__
    tap_skip("all_gather_alloc of more than there is", "the sanitizer ends the program");
#else
    ranks_case_fault(3, NULL, alloc_too_much, NULL, "all_gather_alloc of more than there is");
#endif
    return tap_done();
}
