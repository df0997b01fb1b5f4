// ddp_buckets: buckets whose gradients are scattered in memory are sent in pieces, and after the
// first iteration buckets follow the order in which gradients arrive
//
// IDIST_TEST_FULL=1 runs every number of ranks over sockets too, not only 3.
#define IDIST_IMPLEMENTATION
#include "idist.h"

#include "idist_train.h"

#include "grid.h"

enum { MAX_GRADS = 300, GUARD = 16, GUARDED = 0x5a };

// Layouts of the gradients of a rank in memory.
enum { APART, ONE_IN_A_ROW, ONE_LAID_OUT, SOME_LAID_OUT, N_LAYOUTS, LAST_TWO_IN_A_ROW };
static const char *const layout_names[N_LAYOUTS] = {"apart", "in a row on rank 0",
                                                    "laid out on the last rank", "some laid out"};

// Numbers of elements of gradients that make two buckets. Gradients 4 and 5 are the first bucket.
// It has more pieces (of 256 or 512 KiB) than may be in flight, that is, than there are slots.
// Gradients 0 to 3, some of odd or small size, are the second bucket.
static const size_t large[6] = {900001, 5, 0, 131072, 1500000, 700001};
enum { LARGE_BUCKET_NBYTES = 8000000 };

// Numbers of elements of gradients that are each in their own bucket.
static const size_t small[6] = {3000, 2500, 4000, 3500, 2700, 5000};

typedef struct model {
    idist_tensor params[MAX_GRADS], grads[MAX_GRADS];
    char *memory;
    size_t nbytes;
    idist_ddp_desc desc;
} model;

static size_t nbytes_of(const idist_tensor *t) { return t->count * idist_dtype_size(t->dtype); }

static void set_value(const idist_tensor *t, size_t i, double x) {
    if (t->dtype == IDIST_F64) ((double *)t->data)[i] = x;
    else ((float *)t->data)[i] = (float)x;
}

static double value_of(const idist_tensor *t, size_t i) {
    return t->dtype == IDIST_F64 ? ((const double *)t->data)[i]
                                 : (double)((const float *)t->data)[i];
}

static bool is_laid_out(int layout, int rank, int n, int i) {
    return (layout == ONE_LAID_OUT && rank == n - 1) || (layout == SOME_LAID_OUT && i % 3 == 0);
}

// Makes a model. The GUARD bytes before each gradient that lies apart must stay unchanged.
static void model_init(model *m, idist_group *world, const size_t *counts, int n_grads, int layout,
                       idist_dtype dtype) {
    int rank = idist_group_rank(world), n = idist_group_size(world);
    bool in_a_row = layout == ONE_IN_A_ROW && rank == 0;
    char *at;

    memset(m, 0, sizeof *m);
    for (int i = 0; i < n_grads; i++)
        m->nbytes += 2 * counts[i] * idist_dtype_size(dtype) + (size_t)2 * GUARD;
    at = m->memory = (char *)malloc(m->nbytes);
    TAP_REQUIRE(at);
    memset(at, GUARDED, m->nbytes);
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < n_grads; i++) {
            idist_tensor *t = half ? &m->grads[i] : &m->params[i];
            t->dtype = dtype;
            t->count = counts[i];
            if (half && is_laid_out(layout, rank, n, i)) continue;
            bool joined = in_a_row || (layout == LAST_TWO_IN_A_ROW && i == n_grads - 1);
            if (half && !joined) at += GUARD;
            t->data = at;
            memset(at, 0, nbytes_of(t));
            at += nbytes_of(t);
        }
    m->desc.params = m->params;
    m->desc.grads = m->grads;
    m->desc.n = n_grads;
    m->desc.group = world;
}

static void check_guards(const model *m, int rank) {
    for (int i = 0; i < m->desc.n; i++) {
        const char *data = (const char *)m->grads[i].data;
        if (data < m->memory || data >= m->memory + m->nbytes) continue; // laid out by ddp
        for (int k = 1; k <= GUARD && data[-1] == GUARDED; k++)
            if (data[-k] != GUARDED) rank_fail("rank %d: written before gradient %d", rank, i);
    }
}

// Gradients are small whole numbers, so that sums are exact. They repeat after PERIOD elements.
enum { PERIOD = 17 };

static double grad_of(int rank, int step, int param, size_t i) {
    return (double)((i * 3 + (size_t)(param * 5 + rank * 7 + step * 11)) % PERIOD) - 8;
}

// Repeats the first period_nbytes bytes until nbytes are filled. C library functions write and read
// most of the memory, because the C library is optimized and this file is not.
static void repeat(void *at, size_t period_nbytes, size_t nbytes) {
    char *bytes = (char *)at;
    for (size_t have = period_nbytes; have < nbytes; have *= 2)
        memcpy(bytes + have, bytes, have < nbytes - have ? have : nbytes - have);
}

static void fill(model *m, const idist_ddp *ddp, int rank, int step, int param) {
    idist_tensor *t = &m->grads[param];
    t->data = idist_ddp_grad(ddp, param);
    for (size_t i = 0; i < t->count && i < PERIOD; i++)
        set_value(t, i, grad_of(rank, step, param, i));
    repeat(t->data, PERIOD * idist_dtype_size(t->dtype), nbytes_of(t));
}

// Returns the first element that is not factor * sum over ranks first to n - 1, or count if there
// is none. Only the first PERIOD elements are computed. All others are compared bit for bit with
// the element one period before.
static size_t find_wrong(const model *m, int param, int first, int step, double factor,
                         double *want) {
    const idist_tensor *t = &m->grads[param];
    const char *data = (const char *)t->data;
    size_t esize = idist_dtype_size(t->dtype), i;
    for (i = 0; i < t->count && i < PERIOD; i++) {
        double sum = 0, off;
        for (int r = first; r < idist_group_size(m->desc.group); r++)
            sum += grad_of(r, step, param, i);
        *want = sum * factor;
        off = value_of(t, i) < *want ? *want - value_of(t, i) : value_of(t, i) - *want;
        if (!(off <= 1e-6 * (*want < 0 ? -*want : *want))) return i;
    }
    if (i == t->count || memcmp(data, data + PERIOD * esize, (t->count - PERIOD) * esize) == 0)
        return t->count;
    while (memcmp(data + i * esize, data + (i - PERIOD) * esize, esize) == 0) i++;
    *want = value_of(t, i - PERIOD);
    return i;
}

// Checks that the result is factor * sum over ranks first to n - 1, with the same bits on all
// ranks.
static void check_result(const model *m, int first, int step, double factor) {
    idist_opts o = opts_of(m->desc.group);
    int rank = idist_group_rank(m->desc.group), n = idist_group_size(m->desc.group);
    uint64_t hash = 0, all[RANKS_MAX];
    for (int p = 0; p < m->desc.n; p++) {
        const idist_tensor *t = &m->grads[p];
        double want = 0;
        size_t wrong = find_wrong(m, p, first, step, factor, &want);
        for (size_t i = 0; i < t->count && i < PERIOD; i++)
            hash = hash * 31 + (uint64_t)(int64_t)(value_of(t, i) * 1048576);
        if (wrong == t->count) continue;
        hash = hash * 31 + wrong + 1;
        rank_fail("rank %d of %d, step %d: gradient %d, element %zu: got %.9g expected %.9g", rank,
                  n, step, p, wrong, value_of(t, wrong), want);
    }
    rank_ok(rank, idist_all_gather(&hash, all, 1, IDIST_U64, &o));
    for (int r = 1; r < n; r++)
        rank_check(all[r] == all[0], "step %d: rank %d has other bits than rank 0", step, r);
}

static void check_pieces(const idist_ddp *ddp, int rank, int n, int layout) {
    for (int b = 0; b < idist_ddp_buckets(ddp); b++)
        rank_check(ddp->in_pieces[b] == (n > 1 || layout == APART || layout == SOME_LAID_OUT),
                   "rank %d: bucket %d goes%s in pieces", rank, b, ddp->in_pieces[b] ? "" : " not");
    rank_check(layout != APART || !ddp->bucket_memory, "rank %d: there is memory for whole buckets",
               rank);
}

// Reduces in pieces. Before idist_ddp_wait, all gradients are ready in steps 0 and 3, none in step
// 1, and some in step 2. Even and odd ranks make them ready in opposite orders.
static void pieces(idist_group *world, int rank, int n, void *arg) {
    int layout = *(const int *)arg;
    model m;
    idist_ddp *ddp = NULL;
    model_init(&m, world, large, 6, layout, IDIST_F32);
    m.desc.bucket_nbytes = LARGE_BUCKET_NBYTES;
    m.desc.prescale = 0.5;
    m.desc.postscale = 4;
    rank_ok(rank, idist_ddp_create(&m.desc, &ddp));
    check_pieces(ddp, rank, n, layout);
    for (int step = 0; step < 4; step++) {
        for (int p = 0; p < 6; p++) fill(&m, ddp, rank, step, p);
        for (int k = 0; k < 6 && step != 1; k++) {
            int p = rank % 2 ? k : 5 - k;
            if (step == 2 && (p + rank) % 2) continue;
            rank_ok(rank, idist_ddp_ready(ddp, p));
        }
        rank_ok(rank, idist_ddp_wait(ddp));
        check_result(&m, 0, step, 2.0 / n);
        check_guards(&m, rank);
    }
    idist_ddp_free(&ddp);
    free(m.memory);
}

// Reduces two small buckets. The gradients of the first are scattered in memory on all ranks except
// rank 0, those of the second on all ranks. Together they have fewer pieces than there can be
// slots.
static void few_pieces(idist_group *world, int rank, int n, void *arg) {
    static const size_t counts[4] = {1000, 1000, 1000, 1000};
    enum { SPARE = 1 << 19 };
    model m;
    idist_ddp *ddp = NULL;
    idist_opts o = opts_of(world);
    (void)arg;
    model_init(&m, world, counts, 4, rank ? APART : LAST_TWO_IN_A_ROW, IDIST_F32);
    m.desc.bucket_nbytes = 8000;
    rank_ok(rank, idist_ddp_create(&m.desc, &ddp));
    rank_check(idist_ddp_buckets(ddp) == 2 && ddp->in_pieces[0] == (n > 1), "rank %d: the buckets",
               rank);
    char *spare = (char *)idist_alloc(SPARE, &o); // follows the slots in shared memory
    TAP_REQUIRE(spare);
    memset(spare, GUARDED, SPARE);
    for (int step = 0; step < 3; step++) {
        for (int p = 0; p < 4; p++) fill(&m, ddp, rank, step, p);
        for (int p = 3; p >= 0; p--) rank_ok(rank, idist_ddp_ready(ddp, p));
        rank_ok(rank, idist_ddp_wait(ddp));
        check_result(&m, 0, step, 1.0 / n);
    }
    for (int i = 0; i < SPARE; i++)
        if (spare[i] != GUARDED) {
            rank_fail("rank %d: byte %d of other memory was written", rank, i);
            break;
        }
    idist_free(spare);
    idist_ddp_free(&ddp);
    free(m.memory);
}

// Reduces pieces of about IDIST__DDP_PARTS gradients, the largest number that is reduced in place.
// Some pieces have fewer gradients and some have more. Some pieces begin within a gradient or with
// an empty one.
static void many_parts(idist_group *world, int rank, int n, void *arg) {
    static const size_t each[5] = {508, 511, 512, 513, 520};
    size_t counts[MAX_GRADS];
    (void)arg;
    for (int k = 0; k < 5; k++) {
        model m;
        idist_ddp *ddp = NULL;
        for (int p = 0; p < MAX_GRADS; p++) counts[p] = p % 50 ? each[k] : (size_t)k % 3;
        model_init(&m, world, counts, MAX_GRADS, rank ? APART : SOME_LAID_OUT, IDIST_F32);
        rank_ok(rank, idist_ddp_create(&m.desc, &ddp));
        for (int step = 0; step < 2; step++) {
            for (int p = 0; p < MAX_GRADS; p++) fill(&m, ddp, rank, step, p);
            rank_ok(rank, idist_ddp_wait(ddp));
            check_result(&m, 0, step, 1.0 / n);
            check_guards(&m, rank);
        }
        idist_ddp_free(&ddp);
        free(m.memory);
    }
}

// Creates ddp with dtypes that have no sum. This must be refused.
static void no_sums(idist_group *world, int rank, int n, void *arg) {
    idist_dtype dtypes[2] = {IDIST_F32_I64, IDIST_I8};
    idist_ddp *ddp = NULL;
    (void)n;
    (void)arg;
    rank_ok(rank, idist_dtype_create(12, "triple", world, &dtypes[1]));
    for (int i = 0; i < 2; i++) {
        char data[64] = {0};
        idist_tensor param = {data, 2, dtypes[i]};
        idist_ddp_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.params = &param;
        desc.n = 1;
        desc.group = world;
        rank_is(rank, idist_ddp_create(&desc, &ddp), IDIST_ERR_UNSUPPORTED);
    }
}

// Reduces pieces when rank 0 runs out of data first.
static void pieces_uneven(idist_group *world, int rank, int n, void *arg) {
    model m;
    idist_ddp *ddp = NULL;
    int last = -1;
    model_init(&m, world, large, 6, *(const int *)arg, IDIST_F64);
    m.desc.uneven = m.desc.sum = true;
    rank_ok(rank, idist_ddp_create(&m.desc, &ddp));
    for (int step = 0; step < (rank ? 2 : 1); step++) {
        for (int p = 5; p >= 0; p--) {
            fill(&m, ddp, rank, step, p);
            rank_ok(rank, idist_ddp_ready(ddp, p));
        }
        rank_ok(rank, idist_ddp_wait(ddp));
        if (step == 0) check_result(&m, 0, step, 1);
        for (size_t i = 0; i < 900001 && step == 1; i += 1000) {
            double want = 0;
            for (int r = 1; r < n; r++) want += grad_of(r, 1, 0, i);
            rank_check(value_of(&m.grads[0], i) - want < 0.5 &&
                           want - value_of(&m.grads[0], i) < 0.5,
                       "rank %d: element %zu without rank 0: got %g expected %g", rank, i,
                       value_of(&m.grads[0], i), want);
        }
    }
    rank_ok(rank, idist_ddp_join(ddp, &last));
    rank_check(last == (n > 1 ? n - 1 : 0), "rank %d: the last one was %d", rank, last);
    idist_ddp_free(&ddp);
    free(m.memory);
}

// Aborts the world on one rank while pieces are in flight. All other ranks must name that rank.
static void pieces_lost(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    model m;
    idist_ddp *ddp = NULL;
    bool frees = *(const int *)arg != 0;
    model_init(&m, world, large, 6, APART, IDIST_F32);
    m.desc.bucket_nbytes = LARGE_BUCKET_NBYTES;
    rank_ok(rank, idist_ddp_create(&m.desc, &ddp));
    // All ranks have created their ddp. The status is ignored, because a rank that leaves the
    // barrier late may see the abort there.
    idist_barrier(&o);
    for (int p = 4; p < 6; p++) idist_ddp_ready(ddp, p);
    rank_check(rank < n - 1 || ddp->started_pieces >= ddp->slot_limit,
               "rank %d: %zu pieces in flight", rank, ddp->started_pieces);
    if (rank == n - 1) {
        idist_ddp_free(&ddp);
        idist_abort(world);
    } else {
        if (!frees) rank_is(rank, idist_ddp_wait(ddp), IDIST_ERR_ABORTED);
        if (!frees)
            rank_check(text_names_rank(idist_last_error(), n - 1), "rank %d: \"%s\"", rank,
                       idist_last_error());
    }
    idist_ddp_free(&ddp);
    free(m.memory);
}

// Checks the order in which buckets are launched. Each bucket has one gradient.
static void check_order(const idist_ddp *ddp, int rank, const int *order, const char *when) {
    for (int k = 0; k < 6; k++) {
        int gradient = ddp->buckets[ddp->launch_order[k]].exposed.gradients[0];
        rank_check(gradient == order[k],
                   "rank %d, %s: gradient %d is launched at position %d, expected %d", rank, when,
                   gradient, k, order[k]);
    }
}

static const int forwards[6] = {0, 1, 2, 3, 4, 5}, backwards[6] = {5, 4, 3, 2, 1, 0};

// Runs one iteration in the order of the forward or of the backward pass. If `early` is true,
// checks how many buckets are in flight after each gradient. Otherwise checks that none is in
// flight before the last gradient.
static void pass(model *m, idist_ddp *ddp, int step, bool forward, bool early) {
    int rank = idist_group_rank(m->desc.group);
    for (int k = 0; k < 6; k++) {
        int p = forward ? k : 5 - k, want = early ? k + 1 : 0;
        fill(m, ddp, rank, step, p);
        rank_ok(rank, idist_ddp_ready(ddp, p));
        if (want > 5 || k == 5) want = 5; // idist_ddp_wait launches the last one
        rank_check(ddp->launched_count == want,
                   "rank %d, step %d: %d buckets launched after %d gradients, expected %d", rank,
                   step, ddp->launched_count, k + 1, want);
    }
    rank_ok(rank, idist_ddp_wait(ddp));
}

// Runs iterations in which the gradients of rank 0 arrive in the order of the forward pass. If arg
// is 0, the gradients of all other ranks arrive in this order as well. Otherwise they arrive in the
// opposite order.
static void order(idist_group *world, int rank, int n, void *arg) {
    int how = *(const int *)arg;
    bool forward = how % 2 == 0 || rank == 0;
    for (int layout = 0; layout < N_LAYOUTS; layout++) {
        model m;
        idist_ddp *ddp = NULL;
        model_init(&m, world, small, 6, layout, IDIST_F32);
        m.desc.bucket_nbytes = 1;
        rank_ok(rank, idist_ddp_create(&m.desc, &ddp));
        rank_ok(rank, idist_ddp_no_sync(ddp, true)); // nothing is sent, so no order is learned
        rank_ok(rank, idist_ddp_ready(ddp, 5));
        rank_ok(rank, idist_ddp_wait(ddp));
        rank_ok(rank, idist_ddp_no_sync(ddp, false));
        check_order(ddp, rank, backwards, "before the first iteration");
        pass(&m, ddp, 0, forward, !forward);
        check_result(&m, 0, 0, 1.0 / n);
        check_order(ddp, rank, forwards, "after it");
        for (int step = 1; step < 4; step++) {
            pass(&m, ddp, step, forward, forward);
            check_result(&m, 0, step, 1.0 / n);
        }
        pass(&m, ddp, 4, !forward, !forward); // the order is not learned again
        check_result(&m, 0, 4, 1.0 / n);
        check_order(ddp, rank, forwards, "after another order");
        for (int i = 0; i < 6; i++)
            rank_check(idist_ddp_bucket(ddp, i) == 5 - i, "rank %d: gradient %d is in bucket %d",
                       rank, i, idist_ddp_bucket(ddp, i));
        idist_ddp_free(&ddp);
        free(m.memory);
    }
}

// Makes gradients 0 and 3 ready before idist_ddp_wait. idist_ddp_wait then makes the remaining
// gradients ready, from the last to the first.
static void order_of_some(idist_group *world, int rank, int n, void *arg) {
    static const int expected[6] = {0, 3, 5, 4, 2, 1};
    model m;
    idist_ddp *ddp = NULL;
    (void)arg;
    model_init(&m, world, small, 6, APART, IDIST_F64);
    m.desc.bucket_nbytes = 1;
    rank_ok(rank, idist_ddp_create(&m.desc, &ddp));
    for (int step = 0; step < 3; step++) {
        for (int p = 0; p < 6; p++) fill(&m, ddp, rank, step, p);
        rank_ok(rank, idist_ddp_ready(ddp, 0));
        rank_ok(rank, idist_ddp_ready(ddp, 3));
        rank_ok(rank, idist_ddp_wait(ddp));
        check_result(&m, 0, step, 1.0 / n);
        check_order(ddp, rank, expected, "some");
    }
    idist_ddp_free(&ddp);
    free(m.memory);
}

// Checks how buckets are regrouped. At first, gradients 7 to 0 are in buckets of two. The gradients
// with odd numbers, a branch of the network, arrive first, so the buckets become {7, 5}, {3, 1},
// {6, 4} and {2, 0}. With two dtypes the gradients with odd numbers are doubles, and only the order
// changes. If no gradients lie apart, nothing is copied and the buckets stay unchanged.
static void check_regrouped(const idist_ddp *ddp, int rank, const int *before,
                            const void *const *at) {
    static const int anew[8] = {3, 1, 3, 1, 2, 0, 2, 0};
    const int *buckets = before ? before : anew;
    rank_check(idist_ddp_buckets(ddp) == 4, "rank %d: %d buckets", rank, idist_ddp_buckets(ddp));
    for (int i = 0; i < 8; i++) {
        rank_check(idist_ddp_bucket(ddp, i) == buckets[i],
                   "rank %d: gradient %d is in bucket %d, expected %d", rank, i,
                   idist_ddp_bucket(ddp, i), buckets[i]);
        rank_check(idist_ddp_grad(ddp, i) == at[i], "rank %d: gradient %d was moved", rank, i);
    }
}

static void regroup(idist_group *world, int rank, int n, void *arg) {
    static const int arrival[8] = {7, 5, 3, 1, 6, 4, 2, 0};
    static const int in_a_row[8] = {5, 7, 1, 3, 4, 6, 0, 2}; // the later buckets are contiguous
    size_t each = *(const size_t *)arg, counts[8];
    for (int i = 0; i < 8; i++) counts[i] = each;
    for (int k = 0; k < 2 * (N_LAYOUTS + 2); k++) {
        int layout = k / 2;
        if (each > 1000 && k != APART && layout < N_LAYOUTS) continue; // these cases take long
        bool two_dtypes = k % 2, laid_out = layout == N_LAYOUTS, by_bucket = layout > N_LAYOUTS;
        const void *at[8];
        int before[8];
        model m;
        idist_ddp *ddp = NULL;
        if (by_bucket) layout = ONE_IN_A_ROW;
        model_init(&m, world, counts, 8, laid_out ? APART : layout, IDIST_F32);
        for (int i = 0; i < 8; i++) at[i] = m.grads[i].data;
        for (int i = 0; i < 8 && by_bucket; i++)
            m.grads[in_a_row[i]].data = (void *)(intptr_t)at[i];
        for (int i = 1; i < 8 && two_dtypes; i += 2) { // half as many elements
            m.params[i].dtype = m.grads[i].dtype = IDIST_F64;
            m.params[i].count = m.grads[i].count = each / 2;
        }
        if (laid_out) m.desc.grads = NULL;
        m.desc.bucket_nbytes = 2 * sizeof(float) * (each / 2 * 2);
        rank_ok(rank, idist_ddp_create(&m.desc, &ddp));
        if (!ddp) return; // the world has failed
        bool apart = false;
        for (int b = 0; b < 4; b++) apart = apart || ddp->in_pieces[b];
        rank_check(n == 1 || apart == !laid_out, "rank %d: the gradients lie%s apart", rank,
                   apart ? "" : " not");
        for (int b = 0; b < 4 && (laid_out || layout == APART); b++) // what the log counts
            rank_check(idist__ddp_create_in_place(ddp, &ddp->buckets[b]) == laid_out,
                       "rank %d: bucket %d is%s in place", rank, b, laid_out ? " not" : "");
        for (int i = 0; i < 8; i++) at[i] = idist_ddp_grad(ddp, i);
        for (int i = 0; i < 8; i++) before[i] = idist_ddp_bucket(ddp, i);
        for (int i = 0; i < 8; i++)
            rank_check(two_dtypes || idist_ddp_bucket(ddp, i) == (7 - i) / 2,
                       "rank %d: gradient %d begins in bucket %d", rank, i,
                       idist_ddp_bucket(ddp, i));
        for (int step = 0; step < 3; step++) {
            for (int i = 0; i < 8; i++) fill(&m, ddp, rank, step, i);
            for (int i = 0; i < 8; i++) {
                rank_ok(rank, idist_ddp_ready(ddp, arrival[i]));
                rank_check(!step || !apart ||
                               ddp->launched_count + (ddp->next_first > 0) >= i / 2 ||
                               ddp->started_pieces >= ddp->slot_limit,
                           "rank %d, step %d: %d buckets launched after %d gradients", rank, step,
                           ddp->launched_count, i + 1);
            }
            rank_ok(rank, idist_ddp_wait(ddp));
            check_result(&m, 0, step, 1.0 / n);
            if (!laid_out) check_guards(&m, rank);
            check_regrouped(ddp, rank, apart ? NULL : before, at);
        }
        idist_ddp_free(&ddp);
        free(m.memory);
    }
}

// Splits a bucket in two, because the gradient that arrives first reaches the limit by itself.
static void one_bucket(idist_group *world, int rank, int n, void *arg) {
    static const size_t counts[2] = {2000, 100};
    model m;
    idist_ddp *ddp = NULL;
    (void)arg;
    model_init(&m, world, counts, 2, APART, IDIST_F32);
    m.desc.bucket_nbytes = 8000;
    rank_ok(rank, idist_ddp_create(&m.desc, &ddp));
    rank_check(idist_ddp_buckets(ddp) == 1, "rank %d: %d buckets", rank, idist_ddp_buckets(ddp));
    for (int step = 0; step < 2; step++) {
        for (int p = 0; p < 2; p++) {
            fill(&m, ddp, rank, step, p);
            rank_ok(rank, idist_ddp_ready(ddp, p));
        }
        rank_ok(rank, idist_ddp_wait(ddp));
        check_result(&m, 0, step, 1.0 / n);
        rank_check(idist_ddp_buckets(ddp) == 2, "rank %d, step %d: %d buckets", rank, step,
                   idist_ddp_buckets(ddp));
    }
    idist_ddp_free(&ddp);
    free(m.memory);
}

// Regroups two buckets into three, which need three slots.
static void more_buckets(idist_group *world, int rank, int n, void *arg) {
    static const size_t counts[6] = {2000, 2000, 100, 100, 100, 100};
    model m;
    idist_ddp *ddp = NULL;
    (void)arg;
    model_init(&m, world, counts, 6, APART, IDIST_F32);
    m.desc.bucket_nbytes = 8000;
    rank_ok(rank, idist_ddp_create(&m.desc, &ddp));
    rank_check(idist_ddp_buckets(ddp) == 2 && ddp->slot_count == 2, "rank %d: %d buckets", rank,
               idist_ddp_buckets(ddp));
    for (int step = 0; step < 3; step++) {
        for (int p = 0; p < 6; p++) {
            fill(&m, ddp, rank, step, p);
            rank_ok(rank, idist_ddp_ready(ddp, p));
        }
        rank_ok(rank, idist_ddp_wait(ddp));
        check_result(&m, 0, step, 1.0 / n);
        check_guards(&m, rank);
        rank_check(idist_ddp_buckets(ddp) == 3 && ddp->slot_count == 3,
                   "rank %d: %d buckets, %zu slots", rank, idist_ddp_buckets(ddp), ddp->slot_count);
    }
    idist_ddp_free(&ddp);
    free(m.memory);
}

// Gives rank 0 no data in the first iteration. Rank 1, which has data, sets the order.
static void order_uneven(idist_group *world, int rank, int n, void *arg) {
    model m;
    idist_ddp *ddp = NULL;
    (void)n;
    (void)arg;
    model_init(&m, world, small, 6, APART, IDIST_F32);
    m.desc.bucket_nbytes = 1;
    m.desc.uneven = true;
    rank_ok(rank, idist_ddp_create(&m.desc, &ddp));
    if (rank) pass(&m, ddp, 0, rank == 1, rank != 1);
    rank_ok(rank, idist_ddp_join(ddp, NULL));
    check_order(ddp, rank, forwards, "uneven");
    idist_ddp_free(&ddp);
    free(m.memory);
}

static idist_status hook_start(idist_bucket *b, void *arg) {
    int *next = (int *)arg;
    if (b->index != *next) rank_fail("the hook got bucket %d, expected %d", b->index, *next);
    *next = (*next + 1) % 6;
    return idist_all_reduce(b->data, b->data, b->count, b->dtype, IDIST_AVG, &b->opts);
}

static idist_status hook_finish(idist_bucket *b, void *arg) {
    (void)b;
    (void)arg;
    return IDIST_OK;
}

// Checks that the order does not change with a hook or with find_unused.
static void order_stays(idist_group *world, int rank, int n, void *arg) {
    (void)arg;
    for (int with_hook = 0; with_hook < 2; with_hook++) {
        model m;
        idist_ddp *ddp = NULL;
        int next = 0;
        idist_ddp_hook hook = {hook_start, hook_finish, NULL, &next};
        model_init(&m, world, small, 6, APART, IDIST_F32);
        m.desc.bucket_nbytes = 1;
        m.desc.find_unused = !with_hook;
        if (with_hook) m.desc.hook = &hook;
        rank_ok(rank, idist_ddp_create(&m.desc, &ddp));
        for (int step = 0; step < 3; step++) {
            pass(&m, ddp, step, true, false);
            check_result(&m, 0, step, 1.0 / n);
            check_order(ddp, rank, backwards, with_hook ? "a hook" : "find_unused");
        }
        idist_ddp_free(&ddp);
        free(m.memory);
    }
}

static void with_ranks(int n, const char *transport) {
    static const char *const arrivals[2] = {"alike", "different"};
    size_t each[2] = {500, 140000};
    idist_desc d = desc_with(transport, "auto");

    for (int layout = 0; layout < N_LAYOUTS; layout++)
        ranks_case(n, &d, pieces, &layout, "pieces, gradients %s, n=%d, %s", layout_names[layout],
                   n, transport);
    ranks_case(n, &d, few_pieces, NULL, "few pieces, n=%d, %s", n, transport);
    ranks_case(n, &d, many_parts, NULL, "pieces of many gradients, n=%d, %s", n, transport);
    for (int layout = 0; layout <= ONE_IN_A_ROW; layout++)
        ranks_case(n, &d, pieces_uneven, &layout, "pieces of uneven inputs, gradients %s, n=%d, %s",
                   layout_names[layout], n, transport);
    for (int frees = 0; frees < 2 && n > 1; frees++)
        ranks_case_fault(n, &d, pieces_lost, &frees, "a rank is lost, then %s, n=%d, %s",
                         frees ? "free" : "wait", n, transport);
    for (int how = 0; how < 2; how++)
        ranks_case(n, &d, order, &how, "order of arrival, ranks %s, n=%d, %s", arrivals[how], n,
                   transport);
    ranks_case(n, &d, order_of_some, NULL, "order of some buckets, n=%d, %s", n, transport);
    for (int k = 0; k < (n <= 3 ? 2 : 1); k++)
        ranks_case(n, &d, regroup, &each[k], "buckets in order of arrival, n=%d, %s, %zu elements",
                   n, transport, each[k]);
    ranks_case(n, &d, one_bucket, NULL, "two buckets of one, n=%d, %s", n, transport);
    ranks_case(n, &d, more_buckets, NULL, "more buckets than before, n=%d, %s", n, transport);
    ranks_case(n, &d, order_stays, NULL, "the order stays, n=%d, %s", n, transport);
    if (n > 1)
        ranks_case(n, &d, order_uneven, NULL, "order without rank 0, n=%d, %s", n, transport);
}

int main(void) {
    const char *full = getenv("IDIST_TEST_FULL");

    tap_deadline(400);
    for (int n = 1; n <= (test_quick() ? 3 : 5); n++)
        for (int t = 0; t < N_TRANSPORTS; t++)
            if (t == 0 || n == 3 || (full && *full)) with_ranks(n, transport_names[t]);
    ranks_case(2, NULL, no_sums, NULL, "dtypes that have no sum");
    return tap_done();
}
