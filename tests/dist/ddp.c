// ddp: buckets, averages, no_sync, unused parameters, buffers, factors, compression, hooks and
// uneven inputs; ranks that disagree; broadcast_parameters, broadcast_optimizer_state, auto_optim
#define IDIST_IMPLEMENTATION
#include "idist.h"

#include "idist_train.h"

#include "grid.h"

enum { N_PARAMS = 9, MAX_COUNT = 30000 };
static const size_t counts[N_PARAMS] = {3, 30000, 1, 0, 1024, 17, 5000, 128, 2};
static const int64_t total_count = 3 + 30000 + 1 + 1024 + 17 + 5000 + 128 + 2;

// Layouts of the gradients in memory.
enum { APART, IN_A_ROW, LAID_OUT, N_LAYOUTS };
static const char *const layout_names[N_LAYOUTS] = {"apart", "in a row", "laid out by ddp"};

// The model of one rank. Its parameters differ from rank to rank.
typedef struct model {
    idist_tensor params[N_PARAMS], grads[N_PARAMS];
    char *memory;
    idist_ddp_desc desc;
} model;

static double value_of(const idist_tensor *t, size_t i) {
    if (t->dtype == IDIST_F64) return ((const double *)t->data)[i];
    if (t->dtype == IDIST_F32) return (double)((const float *)t->data)[i];
    if (t->dtype == IDIST_I32) return ((const int32_t *)t->data)[i];
    return (double)(t->dtype == IDIST_F16
                        ? idist__small_float_from_half(((const uint16_t *)t->data)[i])
                        : idist__small_float_from_bf16(((const uint16_t *)t->data)[i]));
}

static void set_value(const idist_tensor *t, size_t i, double x) {
    float f = (float)x;
    if (t->dtype == IDIST_F64) ((double *)t->data)[i] = x;
    else if (t->dtype == IDIST_F32) ((float *)t->data)[i] = f;
    else if (t->dtype == IDIST_I32) ((int32_t *)t->data)[i] = (int32_t)x;
    else idist__small_float_narrow((uint16_t *)t->data + i, &f, 1, t->dtype);
}

static void model_init(model *m, idist_group *world, int rank, int layout, bool mixed) {
    static const idist_dtype dtypes[4] = {IDIST_F32, IDIST_F64, IDIST_BF16, IDIST_F16};
    char *at;
    memset(m, 0, sizeof *m);
    at = m->memory = (char *)malloc(3 * N_PARAMS * 64 + (size_t)(20 * total_count));
    TAP_REQUIRE(at);
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < N_PARAMS; i++) {
            idist_tensor *t = half ? &m->grads[i] : &m->params[i];
            t->dtype = mixed ? dtypes[i % 4] : IDIST_F32;
            t->count = counts[i];
            t->data = half && layout == LAID_OUT ? NULL : at;
            at += t->count * idist_dtype_size(t->dtype) + (layout == IN_A_ROW && half ? 0 : 8);
            if (mixed) at += (size_t)(-(intptr_t)at & 7);
            for (size_t k = 0; k < t->count && !half; k++) set_value(t, k, rank + (double)(k % 50));
        }
    m->desc.params = m->params;
    m->desc.grads = m->grads;
    m->desc.n = N_PARAMS;
    m->desc.group = world;
    m->desc.bucket_nbytes = 6000;
}

// Returns a small whole number, so that sums over up to 8 ranks are exact in all dtypes.
static double grad_of(int rank, int step, int param, size_t i) {
    return (double)((i * 3 + (size_t)(param * 5 + rank * 7 + step * 11)) % 17) - 8;
}

static double grad_sum(int n, int step, int param, size_t i) {
    double sum = 0;
    for (int r = 0; r < n; r++) sum += grad_of(r, step, param, i);
    return sum;
}

static void fill_grad(model *m, const idist_ddp *ddp, int rank, int step, int param) {
    if (ddp) m->grads[param].data = idist_ddp_grad(ddp, param);
    for (size_t i = 0; i < m->grads[param].count; i++)
        set_value(&m->grads[param], i, grad_of(rank, step, param, i));
}

// Checks that each gradient is scale * sum over the ranks, rounded to the gradient's dtype.
static void check_grads(const model *m, int rank, int n, int step, double scale, const char *what) {
    for (int p = 0; p < N_PARAMS; p++) {
        const idist_tensor *g = &m->grads[p];
        double slack = g->dtype == IDIST_F64   ? 1e-15
                       : g->dtype == IDIST_F32 ? 1e-6
                       : g->dtype == IDIST_F16 ? 1e-3
                                               : 8e-3;
        for (size_t i = 0; i < g->count; i++) {
            double want = grad_sum(n, step, p, i) * scale, got = value_of(g, i),
                   off = got < want ? want - got : got - want;
            if (off <= slack * (want < 0 ? -want : want)) continue;
            rank_fail("rank %d of %d, %s: gradient %d, element %zu: got %g expected %g", rank, n,
                      what, p, i, got, want);
            return;
        }
    }
}

// Returns the parameter whose gradient is the k-th to become ready in a step. The order differs
// from rank to rank.
static int shuffled(int k, int rank, int step) {
    static const int strides[4] = {1, 2, 4, 5};
    return (N_PARAMS - 1) - (k * strides[(rank + step) % 4] + rank) % N_PARAMS;
}

static void one_step(model *m, idist_ddp *ddp, int rank, int step) {
    for (int k = 0; k < N_PARAMS; k++) {
        int p = shuffled(k, rank, step);
        fill_grad(m, ddp, rank, step, p);
        rank_ok(rank, idist_ddp_ready(ddp, p));
    }
    rank_ok(rank, idist_ddp_wait(ddp));
}

static void averages(idist_group *world, int rank, int n, void *arg) {
    int how = *(const int *)arg, layout = how % N_LAYOUTS;
    bool mixed = how / N_LAYOUTS != 0;
    model m;
    idist_ddp *ddp = NULL;
    model_init(&m, world, rank, layout, mixed);
    rank_ok(rank, idist_ddp_create(&m.desc, &ddp));
    for (int p = 0; p < N_PARAMS; p++)
        for (size_t i = 0; i < counts[p]; i++)
            if (value_of(&m.params[p], i) != (double)(i % 50)) {
                rank_fail("rank %d: parameter %d is not that of rank 0", rank, p);
                break;
            }
    for (int step = 0; step < 4; step++) {
        one_step(&m, ddp, rank, step);
        check_grads(&m, rank, n, step, 1.0 / n, layout_names[layout]);
        rank_check(idist_ddp_used(ddp, 0) && idist_ddp_active(ddp) == n, "all used, all active");
    }
    // Only gradient 4 is marked ready. idist_ddp_wait counts the remaining gradients as ready.
    for (int p = 0; p < N_PARAMS; p++) fill_grad(&m, ddp, rank, 9, p);
    rank_ok(rank, idist_ddp_ready(ddp, 4));
    rank_ok(rank, idist_ddp_wait(ddp));
    check_grads(&m, rank, n, 9, 1.0 / n, "without ready");
    for (int b = 0; b < idist_ddp_buckets(ddp) && !mixed && layout != APART; b++)
        rank_check(ddp->buckets[b].view == (layout == IN_A_ROW), "rank %d: bucket %d is%s a view",
                   rank, b, ddp->buckets[b].view ? "" : " not");
    idist_ddp_free(&ddp);
    rank_check(ddp == NULL, "free leaves the pointer");
    free(m.memory);
}

static void assignment(void) {
    static const size_t mib = 1 << 20;
    // Gradient 5 comes first.
    static const size_t nbytes[6] = {2048, 1048576, 2048, 1048576, 2048, 1048576};
    static const int want[6] = {3, 2, 2, 1, 1, 0};
    static const int32_t order[6] = {4, 5, 1, 0, 3, 2};
    static const int want_in_order[6] = {2, 1, 3, 2, 0, 0};
    idist_tensor grads[6];
    idist_ddp ddp;
    int bucket[6], n;
    memset(grads, 0, sizeof grads);
    memset(&ddp, 0, sizeof ddp);
    for (int i = 0; i < 6; i++) grads[i].count = nbytes[i];
    for (int i = 0; i < 6; i++) grads[i].dtype = IDIST_U8;
    ddp.grads = grads;
    ddp.desc.n = 6;
    ddp.desc.bucket_nbytes = mib;
    n = idist__ddp_bucket_assign(&ddp, NULL, bucket);
    tap_ok(n == 4 && memcmp(bucket, want, sizeof want) == 0,
           "the buckets of PyTorch, from the other end");
    n = idist__ddp_bucket_assign(&ddp, order, bucket);
    tap_ok(n == 4 && memcmp(bucket, want_in_order, sizeof want_in_order) == 0,
           "the buckets in another order");
    ddp.desc.bucket_nbytes = SIZE_MAX;
    n = idist__ddp_bucket_assign(&ddp, NULL, bucket);
    tap_ok(n == 1 && bucket[0] == 0 && bucket[5] == 0, "one bucket without a limit");
    ddp.desc.bucket_nbytes = 0; // limits of 1 MiB, then of 25 MiB
    n = idist__ddp_bucket_assign(&ddp, NULL, bucket);
    tap_ok(n == 2 && bucket[5] == 0 && bucket[4] == 1 && bucket[0] == 1,
           "the first limit, then the other one");
    grads[4].dtype = grads[1].dtype = IDIST_F64;
    grads[4].count = grads[1].count = mib / 8;
    ddp.desc.bucket_nbytes = mib;
    n = idist__ddp_bucket_assign(&ddp, NULL, bucket);
    tap_ok(n == 5 && bucket[5] == 0 && bucket[4] == 1 && bucket[3] == 2 && bucket[2] == 3 &&
               bucket[1] == 4 && bucket[0] == 3,
           "a bucket has one dtype, and its number is that of its first gradient");
}

static void no_sync(idist_group *world, int rank, int n, void *arg) {
    model m;
    idist_ddp *ddp = NULL;
    (void)arg;
    model_init(&m, world, rank, IN_A_ROW, false);
    rank_ok(rank, idist_ddp_create(&m.desc, &ddp));
    for (int p = 0; p < N_PARAMS; p++)
        for (size_t i = 0; i < counts[p]; i++) set_value(&m.grads[p], i, 0);
    for (int step = 0; step < 3; step++) {
        rank_ok(rank, idist_ddp_no_sync(ddp, step < 2));
        rank_ok(rank, idist_ddp_forward(ddp));
        for (int p = N_PARAMS - 1; p >= 0; p--) {
            for (size_t i = 0; i < counts[p]; i++)
                set_value(&m.grads[p], i, value_of(&m.grads[p], i) + grad_of(rank, 0, p, i));
            rank_ok(rank, idist_ddp_ready(ddp, p));
        }
        rank_ok(rank, idist_ddp_wait(ddp));
        if (step < 2)
            rank_check(value_of(&m.grads[1], 5) == (step + 1) * grad_of(rank, 0, 1, 5),
                       "only of this rank yet");
    }
    check_grads(&m, rank, n, 0, 3.0 / n, "three passes");
    rank_ok(rank, idist_ddp_ready(ddp, 0));
    rank_is(rank, idist_ddp_no_sync(ddp, true), IDIST_ERR_STATE);
    rank_ok(rank, idist_ddp_wait(ddp));
    idist_ddp_free(&ddp);
    free(m.memory);
}

// Returns true if the rank has a gradient of this parameter. Only rank 0 has one for parameter 1,
// and no rank has one for parameters 4 and 7. All ranks have one for every other parameter.
static bool has_grad(int rank, int param) {
    return param == 1 ? rank == 0 : param != 4 && param != 7;
}

static void unused(idist_group *world, int rank, int n, void *arg) {
    model m;
    idist_ddp *ddp = NULL;
    model_init(&m, world, rank, *(const int *)arg, true);
    m.desc.find_unused = true;
    rank_ok(rank, idist_ddp_create(&m.desc, &ddp));
    for (int step = 0; step < 3; step++) {
        for (int p = N_PARAMS - 1; p >= 0; p--) {
            fill_grad(&m, ddp, rank, step, p);
            if (has_grad(rank, p)) rank_ok(rank, idist_ddp_ready(ddp, p));
        }
        rank_ok(rank, idist_ddp_wait(ddp));
        for (int p = 0; p < N_PARAMS; p++) {
            bool any = has_grad(0, p);
            rank_check(idist_ddp_used(ddp, p) == any, "rank %d: parameter %d is%s used", rank, p,
                       any ? "" : " not");
            for (size_t i = 0; i < counts[p] && i < 40; i++) {
                double want = p == 1 ? grad_of(0, step, p, i) / n : grad_of(rank, step, p, i),
                       got = value_of(&m.grads[p], i);
                if (any && p != 1) want = grad_sum(n, step, p, i) / n;
                rank_check(got - want < 0.02 && want - got < 0.02,
                           "rank %d: gradient %d[%zu] is %g, expected %g", rank, p, i, got, want);
            }
        }
    }
    // Only the last rank uses parameter 4, and only in a pass with no_sync.
    for (int p = 0; p < N_PARAMS; p++) fill_grad(&m, ddp, rank, 5, p);
    rank_ok(rank, idist_ddp_no_sync(ddp, true));
    if (rank == n - 1) rank_ok(rank, idist_ddp_ready(ddp, 4));
    rank_ok(rank, idist_ddp_no_sync(ddp, false));
    rank_ok(rank, idist_ddp_wait(ddp));
    double want = grad_of(n - 1, 5, 4, 3) / n, got = value_of(&m.grads[4], 3);
    rank_check(idist_ddp_used(ddp, 4) && !idist_ddp_used(ddp, 3), "rank %d: 4 was used, 3 was not",
               rank);
    rank_check(got - want < 0.02 && want - got < 0.02, "rank %d: of no_sync: got %g expected %g",
               rank, got, want);
    idist_ddp_free(&ddp);
    free(m.memory);
}

static void buffers(idist_group *world, int rank, int n, void *arg) {
    model m;
    idist_ddp *ddp = NULL;
    float mean[100];
    int64_t steps = 50 + rank;
    idist_tensor list[2] = {{mean, 100, IDIST_F32}, {&steps, 1, IDIST_I64}};
    (void)n;
    (void)arg;
    for (int i = 0; i < 100; i++) mean[i] = (float)(rank * 100 + i);
    model_init(&m, world, rank, LAID_OUT, false);
    m.desc.buffers = list;
    m.desc.n_buffers = 2;
    rank_ok(rank, idist_ddp_create(&m.desc, &ddp));
    rank_check(mean[99] == 99 && steps == 50, "rank %d: buffers of rank 0 at the start: %g", rank,
               (double)mean[99]);
    for (int step = 0; step < 2; step++) {
        for (int i = 0; i < 100; i++) mean[i] = (float)(rank * 100 + i + step);
        rank_ok(rank, idist_ddp_forward(ddp));
        rank_check(mean[99] == (float)(99 + step), "rank %d: buffers of rank 0: %g", rank,
                   (double)mean[99]);
        mean[99] = (float)(rank + 7); // without a backward pass
        rank_ok(rank, idist_ddp_forward(ddp));
        rank_check(mean[99] == 7, "rank %d: buffers of rank 0 again: %g", rank, (double)mean[99]);
        fill_grad(&m, ddp, rank, step, 3);
        rank_ok(rank, idist_ddp_ready(ddp, 3));
        rank_is(rank, idist_ddp_forward(ddp), IDIST_ERR_STATE);
        rank_ok(rank, idist_ddp_wait(ddp));
        one_step(&m, ddp, rank, step);
    }
    idist_ddp_free(&ddp);
    free(m.memory);
}

static void factors(idist_group *world, int rank, int n, void *arg) {
    for (int how = 0; how < 6; how++) {
        model m;
        idist_ddp *ddp = NULL;
        model_init(&m, world, rank, how % N_LAYOUTS, how < 4);
        m.desc.prescale = how & 1 ? 0.25 : 0;
        m.desc.postscale = how & 2 ? 8 : 0;
        m.desc.sum = how == 1;
        if (how >= 4) { // half floats hold these whole numbers exactly
            m.desc.sum = true;
            m.desc.compression = how == 4 ? IDIST_COMPRESS_F16 : IDIST_COMPRESS_BF16;
            m.desc.postscale = 3;
        }
        rank_ok(rank, idist_ddp_create(&m.desc, &ddp));
        one_step(&m, ddp, rank, how);
        check_grads(&m, rank, n, how,
                    (how & 1 ? 0.25 : 1) *
                        (how >= 4  ? 3
                         : how & 2 ? 8
                                   : 1) /
                        (m.desc.sum ? 1 : n),
                    "factors");
        idist_ddp_free(&ddp);
        free(m.memory);
    }
    (void)arg;
}

// Checks an average in half floats. Each gradient is rounded to a half float, and the average is
// rounded once.
static void halves(idist_group *world, int rank, int n, void *arg) {
    idist_dtype dtype =
        *(const idist_compression *)arg == IDIST_COMPRESS_F16 ? IDIST_F16 : IDIST_BF16;
    for (int wide = 0; wide < 2; wide++) {
        model m;
        idist_ddp *ddp = NULL;
        bool right = true;
        model_init(&m, world, rank, wide ? APART : IN_A_ROW, false);
        for (int p = 0; p < N_PARAMS && wide; p++) { // F64 gradients with their own memory
            m.grads[p].dtype = IDIST_F64;
            m.grads[p].data = calloc(counts[p] + 1, sizeof(double));
        }
        m.desc.compression = *(const idist_compression *)arg;
        rank_ok(rank, idist_ddp_create(&m.desc, &ddp));
        for (int p = N_PARAMS - 1; p >= 0; p--) {
            for (size_t i = 0; i < counts[p]; i++)
                set_value(&m.grads[p], i, grad_of(rank, 0, p, i) * 1.2345678);
            rank_ok(rank, idist_ddp_ready(ddp, p));
        }
        rank_ok(rank, idist_ddp_wait(ddp));
        for (int p = 0; p < N_PARAMS; p++)
            for (size_t i = 0; i < counts[p]; i++) {
                float sum = 0, x;
                uint16_t half;
                for (int r = 0; r < n; r++) {
                    x = (float)(grad_of(r, 0, p, i) * 1.2345678);
                    idist__small_float_narrow(&half, &x, 1, dtype);
                    idist__small_float_widen(&x, &half, 1, dtype);
                    sum += x;
                }
                sum /= (float)n;
                idist__small_float_narrow(&half, &sum, 1, dtype);
                idist__small_float_widen(&x, &half, 1, dtype);
                right = right && value_of(&m.grads[p], i) == (double)x;
            }
        rank_check(right, "rank %d: %s of %s", rank, idist_dtype_name(dtype), wide ? "F64" : "F32");
        idist_ddp_free(&ddp);
        for (int p = 0; p < N_PARAMS && wide; p++) free(m.grads[p].data);
        free(m.memory);
    }
}

typedef struct hooked {
    const model *m;
    int listed;                            // gradients that the buckets have listed
    int started, finished, freed, fail_at; // fail_at is the number of the start that fails
    int order_wrong;
    bool silent; // the failure sets no error text
} hooked;

// Returns true if the bucket lists the gradients that it holds and where they lie. Its data are the
// gradients themselves, or copies of them scaled by 2.
static bool names_its_gradients(const model *m, const idist_bucket *b) {
    const float *data = (const float *)b->data;
    size_t end = 0;
    for (int k = 0; k < b->gradient_count; k++) {
        const idist_tensor *g = &m->grads[b->gradients[k]];
        bool here = g->data == data + end;
        if (g->dtype != b->dtype || b->displs[k] != end) return false;
        for (size_t i = 0; i < g->count && !here; i++) {
            double wrong = (double)data[end + i] - 2 * value_of(g, i);
            if (wrong < 0 || wrong > 0) return false;
        }
        end += g->count;
    }
    return end == b->count;
}

static idist_status hook_start(idist_bucket *b, void *arg) {
    hooked *h = (hooked *)arg;
    if (!names_its_gradients(h->m, b)) h->order_wrong++;
    h->listed += b->gradient_count;
    if (!b->state) b->state = calloc(1, sizeof(int));
    if (b->state) ++*(int *)b->state;
    if (b->index && h->started % 7 == 0) h->order_wrong++; // there are 7 buckets
    if (++h->started == h->fail_at)
        return h->silent ? IDIST_ERR_CALLBACK
                         : idist__fail(IDIST_ERR_CALLBACK, "hook: this is enough");
    return idist_all_reduce(b->data, b->data, b->count, b->dtype, IDIST_SUM, &b->opts);
}

static idist_status hook_finish(idist_bucket *b, void *arg) {
    hooked *h = (hooked *)arg;
    h->finished++;
    if (b->opts.request) h->order_wrong++;
    for (size_t i = 0; i < b->count; i++) ((float *)b->data)[i] *= (float)b->scale * 2;
    return IDIST_OK;
}

static void hook_free(void *state, void *arg) {
    ((hooked *)arg)->freed += *(int *)state;
    free(state);
}

static void hooks(idist_group *world, int rank, int n, void *arg) {
    model m;
    hooked h = {&m, 0, 0, 0, 0, 0, 0, *(const int *)arg == 2};
    idist_ddp_hook hook = {hook_start, hook_finish, hook_free, &h};
    idist_ddp *ddp = NULL;
    bool fails = *(const int *)arg != 0;
    idist_opts o = opts_of(world);
    model_init(&m, world, rank, rank % 2 ? APART : IN_A_ROW, false);
    m.desc.hook = &hook;
    m.desc.bucket_nbytes = 300;
    m.desc.prescale = 2;
    if (fails && rank == n - 1) h.fail_at = 8;
    rank_ok(rank, idist_ddp_create(&m.desc, &ddp));
    int buckets = idist_ddp_buckets(ddp);
    memset(&hook, 0, sizeof hook); // ddp has copied the hook
    one_step(&m, ddp, rank, 0);
    check_grads(&m, rank, n, 0, 4.0 / n, "a hook");
    rank_check(h.started == buckets && h.finished == buckets && !h.order_wrong,
               "rank %d: %d started, %d finished of %d", rank, h.started, h.finished, buckets);
    rank_check(h.listed == N_PARAMS, "rank %d: the buckets name %d gradients", rank, h.listed);
    if (fails) {
        idist_barrier(&o); // ignored: may already report the failure below
        h.fail_at = rank == n - 1 ? h.started + 3 : 0;
        rank_is(rank, idist_ddp_ready(ddp, -1), IDIST_ERR_ARG); // sets a text unlike the hook's
        for (int p = N_PARAMS - 1; p >= 0; p--) {
            fill_grad(&m, ddp, rank, 1, p);
            idist_ddp_ready(ddp, p);
        }
        rank_is(rank, idist_ddp_wait(ddp), IDIST_ERR_CALLBACK);
        const char *why = h.silent ? "the hook's start failed for bucket 2" : "this is enough";
        rank_check(strstr(idist_last_error(), why) && text_names_rank(idist_last_error(), n - 1),
                   "rank %d: \"%s\"", rank, idist_last_error());
        rank_is(rank, idist_ddp_wait(ddp), IDIST_ERR_CALLBACK); // the group has failed
    }
    int started = h.started;
    idist_ddp_free(&ddp);
    rank_check(h.freed == started, "rank %d: %d of %d states freed", rank, h.freed, started);
    free(m.memory);
}

// Returns the number of steps of a rank. This is 2 + 3 * rank, except that rank 1 has only 2 steps,
// as many as rank 0.
static int steps_of(int rank) { return rank == 1 ? 2 : 2 + 3 * rank; }

static void uneven(idist_group *world, int rank, int n, void *arg) {
    int how = *(const int *)arg, last = -1;
    model m;
    idist_ddp *ddp = NULL;
    float mean[10] = {0};
    idist_tensor list[1] = {{mean, 10, IDIST_F32}};
    model_init(&m, world, rank, how % N_LAYOUTS, how >= 3);
    m.desc.uneven = true;
    m.desc.divide_by_active = how % 2 != 0;
    m.desc.find_unused = how == 2;
    m.desc.buffers = list;
    m.desc.n_buffers = 1;
    rank_ok(rank, idist_ddp_create(&m.desc, &ddp));
    for (int epoch = 0; epoch < 2; epoch++) {
        for (int step = 0; step < steps_of(rank); step++) {
            int active = 0, first = -1;
            for (int r = n; r-- > 0;)
                if (steps_of(r) > step) active++, first = r;
            for (int i = 0; i < 10; i++) mean[i] = (float)(rank * 100 + step);
            rank_ok(rank, idist_ddp_forward(ddp));
            rank_check(mean[9] == (float)(first * 100 + step),
                       "rank %d: buffers of rank %d, got %g", rank, first, (double)mean[9]);
            for (int p = N_PARAMS - 1; p >= 0; p--) {
                fill_grad(&m, ddp, rank, step, p);
                rank_ok(rank, idist_ddp_ready(ddp, p));
            }
            rank_ok(rank, idist_ddp_wait(ddp));
            rank_check(idist_ddp_active(ddp) == active, "rank %d: %d active", rank,
                       idist_ddp_active(ddp));
            double sum = 0, got = value_of(&m.grads[1], 33);
            for (int r = 0; r < n; r++) sum += steps_of(r) > step ? grad_of(r, step, 1, 33) : 0;
            sum /= m.desc.divide_by_active ? active : n;
            rank_check(got - sum < 1e-5 && sum - got < 1e-5, "rank %d, step %d: got %g expected %g",
                       rank, step, got, sum);
            for (int p = 0; p < N_PARAMS; p++)
                if (counts[p]) set_value(&m.params[p], 0, epoch * 100 + step); // an "optimizer"
        }
        rank_ok(rank, idist_ddp_join(ddp, &last));
        int most = n == 2 ? 1 : n - 1;
        rank_check(last == most, "rank %d: the last one was %d, not %d", rank, most, last);
        rank_check(value_of(&m.params[1], 0) == epoch * 100 + steps_of(most) - 1,
                   "rank %d: parameters of the last: %g", rank, value_of(&m.params[1], 0));
        rank_check(idist_ddp_active(ddp) == n, "all are back");
    }
    rank_ok(rank, idist_ddp_join(ddp, &last)); // no rank has trained
    idist_ddp_free(&ddp);
    free(m.memory);
}

// Passes descriptions that are wrong on all ranks. No rank may be left waiting.
static void wrong_descs(idist_group *world, int rank, int n, void *arg) {
    model m;
    idist_ddp *ddp = NULL;
    (void)n;
    (void)arg;
    model_init(&m, world, rank, LAID_OUT, true);
    m.desc.n = 0;
    rank_is(rank, idist_ddp_create(&m.desc, &ddp), IDIST_ERR_ARG);
    m.desc.n = N_PARAMS;
    m.desc.compression = IDIST_COMPRESS_BF16; // of BF16 and F16 gradients
    rank_is(rank, idist_ddp_create(&m.desc, &ddp), IDIST_ERR_UNSUPPORTED);
    m.desc.compression = (idist_compression)3; // a value of an older version
    rank_is(rank, idist_ddp_create(&m.desc, &ddp), IDIST_ERR_ARG);
    m.desc.compression = (idist_compression)9;
    rank_is(rank, idist_ddp_create(&m.desc, &ddp), IDIST_ERR_ARG);
    m.desc.compression = IDIST_COMPRESS_NONE;
    m.desc.prescale = 1e308 * 10;
    rank_is(rank, idist_ddp_create(&m.desc, &ddp), IDIST_ERR_ARG);
    m.desc.prescale = 0;
    m.desc.on_device = true; // there is no device
    rank_check(idist_ddp_create(&m.desc, &ddp) != IDIST_OK &&
                   text_has_word(idist_last_error(), "device"),
               "rank %d: on a device that is not there: got \"%s\"", rank, idist_last_error());
    m.desc.on_device = false;
    idist_tensor huge[9];
    for (int i = 0; i < 9; i++) {
        huge[i] = m.params[1];
        huge[i].count = SIZE_MAX / 64;
        huge[i].dtype = IDIST_F64;
    }
    m.desc.params = huge;
    m.desc.grads = NULL;
    m.desc.keep_params = true;
    rank_is(rank, idist_ddp_create(&m.desc, &ddp), IDIST_ERR_ARG); // larger than any memory
    free(m.memory);
}

// Passes tied weights, which are listed twice. Two calls would average the same memory at the same
// time, so gradients that overlap must be refused.
static void tied(idist_group *world, int rank, int n, void *arg) {
    const idist_status wanted[] = {IDIST_ERR_ARG, IDIST_ERR_ARG, IDIST_ERR_ARG, IDIST_OK, IDIST_OK};
    (void)arg;
    for (int how = 0; how < 5; how++) {
        model m;
        idist_ddp *ddp = NULL;
        int last = N_PARAMS - 1;
        model_init(&m, world, rank, IN_A_ROW, false);
        m.params[0].count = m.grads[0].count = m.params[last].count = m.grads[last].count = 40;
        m.grads[0].data = m.memory;
        if (how == 0) m.grads[last].data = m.memory;
        if (how == 1) m.grads[last].data = m.memory + 39 * sizeof(float);
        if (how == 2 && rank == n - 1) m.grads[last].data = m.memory;
        if (how == 4) {
            m.grads[last].data = m.memory;
            m.params[last].count = m.grads[last].count = 0;
        }
        m.params[0].data = m.params[last].data = m.params[1].data;
        rank_is(rank, idist_ddp_create(&m.desc, &ddp), wanted[how]);
        if (wanted[how] != IDIST_OK)
            rank_check(strstr(idist_last_error(), "overlap in memory") != NULL,
                       "rank %d got \"%s\"", rank, idist_last_error());
        idist_ddp_free(&ddp);
        free(m.memory);
    }
}

static void wrong_calls(idist_group *world, int rank, int n, void *arg) {
    model m;
    idist_ddp *ddp = NULL;
    int last;
    (void)n;
    (void)arg;
    model_init(&m, world, rank, LAID_OUT, true);
    rank_is(rank, idist_ddp_create(NULL, &ddp), IDIST_ERR_ARG);
    rank_is(rank, idist_ddp_wait(NULL), IDIST_ERR_ARG);
    rank_is(rank, idist_ddp_ready(NULL, 0), IDIST_ERR_ARG);
    rank_is(rank, idist_ddp_join(NULL, &last), IDIST_ERR_ARG);
    rank_is(rank, idist_auto_optim(NULL, NULL, NULL), IDIST_ERR_ARG);
    idist_ddp_free(NULL);
    idist_ddp_free(&ddp);
    rank_ok(rank, idist_ddp_create(&m.desc, &ddp));
    rank_is(rank, idist_ddp_join(ddp, &last), IDIST_ERR_STATE);
    rank_is(rank, idist_ddp_ready(ddp, -1), IDIST_ERR_ARG);
    rank_is(rank, idist_ddp_ready(ddp, N_PARAMS), IDIST_ERR_ARG);
    rank_ok(rank, idist_ddp_ready(ddp, 3));
    rank_is(rank, idist_ddp_ready(ddp, 3), IDIST_ERR_STATE);
    rank_ok(rank, idist_group_begin());
    rank_is(rank, idist_ddp_wait(ddp), IDIST_ERR_STATE); // nothing would be reduced on return
    rank_is(rank, idist_ddp_ready(ddp, 2), IDIST_ERR_STATE);
    rank_ok(rank, idist_group_end());
    rank_check(idist_ddp_grad(ddp, -1) == NULL && idist_ddp_bucket(ddp, N_PARAMS) == -1,
               "getters outside");
    rank_ok(rank, idist_ddp_wait(ddp));
    rank_ok(rank, idist_ddp_forward(ddp)); // for validation
    rank_ok(rank, idist_ddp_no_sync(ddp, true));
    rank_ok(rank, idist_ddp_no_sync(ddp, false));
    rank_ok(rank, idist_ddp_ready(ddp, 8)); // freed in the middle of an iteration
    idist_ddp_free(&ddp);
    free(m.memory);
}

// Passes a description that differs on one rank. All ranks must report this, and the world stays
// usable.
static void disagree(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    int odd = n - 1, one = 1;
    (void)arg;
    for (int how = 0; how < 8; how++) {
        model m;
        idist_ddp *ddp = NULL;
        idist_status want = how == 5 ? IDIST_ERR_ARG : IDIST_ERR_MISMATCH;
        model_init(&m, world, rank, APART, false);
        if (rank == odd && how == 0) m.params[5].count = m.grads[5].count = 16;
        if (rank == odd && how == 1) m.grads[2].dtype = IDIST_I32;
        if (rank == odd && how == 2) m.desc.n--;
        if (rank == odd && how == 3) m.desc.bucket_nbytes = 7000;
        if (rank == odd && how == 4) m.desc.find_unused = true;
        if (rank == odd && how == 5) m.params[1].data = NULL;
        if (rank == odd && how == 6) m.desc.n_buffers = 1, m.desc.buffers = m.params;
        if (rank == odd && how == 7) m.desc.postscale = 2.5;
        rank_is(rank, idist_ddp_create(&m.desc, &ddp), want);
        rank_check(!ddp && (rank == odd || text_names_rank(idist_last_error(), odd)),
                   "rank %d, %d: \"%s\"", rank, how, idist_last_error());
        static const char *const texts[8] = {"parameter 5 is F32 x 16 here, and F32 x 17 on rank 0",
                                             "gradient 2 is I32",
                                             "number of parameters is 8 here, and 9 on rank 0",
                                             "bucket_nbytes is 7000 here, and 6000 on rank 0",
                                             "find_unused is 1 here, and 0 on rank 0",
                                             "parameter 1 is NULL",
                                             "number of buffers is 1 here, and 0 on rank 0",
                                             "postscale is 2.5 here, and 1 on rank 0"};
        rank_check(strstr(idist_last_error(), texts[how]), "\"%s\"", idist_last_error());
        free(m.memory);
        rank_ok(rank, idist_all_reduce(&one, &one, 1, IDIST_I32, IDIST_MAX, &o));
    }
}

static void parameters(idist_group *world, int rank, int n, void *arg) {
    enum { MANY = 200 };
    static const idist_dtype dtypes[3] = {IDIST_F32, IDIST_U8, IDIST_F64};
    idist_tensor list[MANY];
    idist_opts o = opts_of(world);
    struct options {
        double rate;
        int step;
    } options = {0.1 * rank, rank};
    int root = n - 1;
    (void)arg;
    memset(list, 0, sizeof list);
    for (int i = 0; i < MANY; i++) {
        list[i].count = i == 77 ? 100000 : (size_t)(i % 23);
        list[i].dtype = dtypes[i % 3];
        list[i].data = calloc(list[i].count + 1, idist_dtype_size(list[i].dtype));
        memset(list[i].data, rank + 1, list[i].count * idist_dtype_size(list[i].dtype));
    }
    rank_ok(rank, idist_broadcast_optimizer_state(list, MANY, &options, sizeof options, root, &o));
    rank_check(options.step == root, "rank %d: the numbers of the root", rank);
    for (int i = 0; i < MANY; i++)
        for (size_t k = 0; k < list[i].count * idist_dtype_size(list[i].dtype); k++)
            if (((unsigned char *)list[i].data)[k] != root + 1) {
                rank_fail("rank %d: tensor %d is not that of the root", rank, i);
                break;
            }
    rank_ok(rank, idist_broadcast_parameters(list, 0, root, &o));
    rank_is(rank, idist_broadcast_parameters(NULL, 3, root, &o), IDIST_ERR_ARG);
    if (rank == 0) list[150].count++;
    if (n > 1) {
        rank_is(rank, idist_broadcast_parameters(list, MANY, root, &o), IDIST_ERR_MISMATCH);
        rank_check(strstr(idist_last_error(), "parameter 150") != NULL, "\"%s\"",
                   idist_last_error());
        rank_is(rank, idist_broadcast_parameters(list, rank == root ? 101 : 100, root, &o),
                IDIST_ERR_MISMATCH);
        rank_check(strstr(idist_last_error(),
                          "number of parameters is 100 here, and 101 on rank") != NULL,
                   "\"%s\"", idist_last_error());
        rank_is(rank,
                idist_broadcast_optimizer_state(NULL, 0, &options, 4 + (size_t)rank, root, &o),
                IDIST_ERR_MISMATCH);
    }
    if (rank == 0) list[150].count--;
    rank_is(rank, idist_broadcast_parameters(list, MANY, n, &o), IDIST_ERR_ARG);
    // The root is invalid on one rank only.
    rank_is(rank, idist_broadcast_parameters(list, MANY, rank == n - 1 ? 77 : 0, &o),
            IDIST_ERR_ARG);
    for (int i = 0; i < MANY; i++) free(list[i].data);
}

// Sends gradients at odd addresses as half floats.
static void misaligned(idist_group *world, int rank, int n, void *arg) {
    enum { COUNT = 3000 };
    static const idist_compression list[2] = {IDIST_COMPRESS_F16, IDIST_COMPRESS_BF16};
    (void)arg;
    for (int k = 0; k < 2; k++) {
        float *values = (float *)malloc(COUNT * sizeof *values), one;
        char *raw = (char *)malloc(COUNT * sizeof *values + 1);
        idist_tensor param = {values, COUNT, IDIST_F32}, grad = {raw + 1, COUNT, IDIST_F32};
        idist_ddp_desc desc;
        idist_ddp *ddp = NULL;
        memset(&desc, 0, sizeof desc);
        for (int i = 0; i < COUNT; i++) values[i] = (float)(rank * 2);
        memcpy(raw + 1, values, COUNT * sizeof *values);
        desc.params = &param;
        desc.grads = &grad;
        desc.n = 1;
        desc.group = world;
        desc.compression = list[k];
        rank_ok(rank, idist_ddp_create(&desc, &ddp));
        rank_ok(rank, idist_ddp_wait(ddp));
        memcpy(&one, raw + 1 + 2999 * sizeof one, sizeof one);
        rank_check(one - (float)(n - 1) < 0.1f && (float)(n - 1) - one < 0.1f, "rank %d: got %g",
                   rank, (double)one);
        idist_ddp_free(&ddp);
        free(values);
        free(raw);
    }
}

static int optimizer_step(void *arg) { return ++*(int *)arg > 2 ? 5 : 0; }

static void auto_optim(idist_group *world, int rank, int n, void *arg) {
    model m;
    idist_ddp *ddp = NULL;
    int steps = 0;
    (void)n;
    (void)arg;
    model_init(&m, world, rank, LAID_OUT, false);
    rank_ok(rank, idist_ddp_create(&m.desc, &ddp));
    rank_ok(rank, idist_auto_optim(ddp, optimizer_step, &steps));
    rank_ok(rank, idist_ddp_no_sync(ddp, true));
    rank_ok(rank, idist_auto_optim(ddp, optimizer_step, &steps));
    rank_check(steps == 1, "no step while no_sync is on");
    rank_ok(rank, idist_ddp_no_sync(ddp, false));
    rank_ok(rank, idist_auto_optim(ddp, optimizer_step, &steps));
    rank_is(rank, idist_auto_optim(ddp, optimizer_step, &steps), IDIST_ERR_CALLBACK);
    idist_ddp_free(&ddp);
    free(m.memory);
}

static void in_groups(idist_group *world, int rank, int n, void *arg) {
    idist_group *half = NULL;
    (void)arg;
    rank_ok(rank, idist_split(world, rank % 2, rank, &half));
    int me = idist_group_rank(half), size = idist_group_size(half);
    model m;
    idist_ddp *ddp = NULL;
    model_init(&m, half, me, APART, true);
    m.desc.bucket_nbytes = 0;
    rank_ok(rank, idist_ddp_create(&m.desc, &ddp));
    one_step(&m, ddp, me, rank % 2);
    check_grads(&m, me, size, rank % 2, 1.0 / size, "of half the ranks");
    idist_ddp_free(&ddp);
    free(m.memory);
    rank_ok(rank, idist_free_group(&half));
    (void)n;
}

// Aborts the world on one rank in the middle of an iteration. All other ranks must name that rank.
static void lost(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    model m;
    idist_ddp *ddp = NULL;
    (void)arg;
    model_init(&m, world, rank, LAID_OUT, false);
    rank_ok(rank, idist_ddp_create(&m.desc, &ddp));
    one_step(&m, ddp, rank, 0);
    fill_grad(&m, ddp, rank, 1, 8);
    rank_ok(rank, idist_ddp_ready(ddp, 8));
    // All ranks have completed the first step. The status is ignored, because a rank that leaves
    // the barrier late may see the abort there.
    idist_barrier(&o);
    if (rank == n - 1) {
        idist_ddp_free(&ddp);
        idist_abort(world);
    } else {
        rank_is(rank, idist_ddp_wait(ddp), IDIST_ERR_ABORTED);
        rank_is(rank, idist_ddp_wait(ddp), IDIST_ERR_ABORTED);
        rank_check(text_names_rank(idist_last_error(), n - 1), "rank %d: \"%s\"", rank,
                   idist_last_error());
        idist_ddp_free(&ddp);
    }
    free(m.memory);
}

// Aborts a world of 1 rank. Such a world sends nothing, but its calls must report the abort.
static void lost_alone(idist_group *world, int rank, int n, void *arg) {
    bool begun = *(const int *)arg != 0;
    model m;
    idist_ddp *ddp = NULL;
    (void)n;
    model_init(&m, world, rank, LAID_OUT, false);
    rank_ok(rank, idist_ddp_create(&m.desc, &ddp));
    one_step(&m, ddp, rank, 0);
    if (begun) rank_ok(rank, idist_ddp_ready(ddp, 8));
    rank_ok(rank, idist_abort(world));
    if (!begun) rank_is(rank, idist_ddp_forward(ddp), IDIST_ERR_ABORTED);
    if (!begun) rank_is(rank, idist_ddp_ready(ddp, 8), IDIST_ERR_ABORTED);
    rank_is(rank, idist_ddp_wait(ddp), IDIST_ERR_ABORTED);
    rank_is(rank, idist_ddp_wait(ddp), IDIST_ERR_ABORTED);
    idist_ddp_free(&ddp);
    free(m.memory);
}

static void finalized(void) {
    model m;
    idist_ddp *ddp = NULL;
    TAP_REQUIRE(idist_initialize(NULL) == IDIST_OK);
    model_init(&m, NULL, 0, LAID_OUT, false);
    tap_is(idist_ddp_create(&m.desc, &ddp), IDIST_OK, "a ddp of a world of 1");
    tap_is(idist_finalize(), IDIST_OK, "that is finalized");
    tap_is(idist_ddp_forward(ddp), IDIST_ERR_STATE, "forward after it");
    tap_is(idist_ddp_ready(ddp, 8), IDIST_ERR_STATE, "ready after it");
    tap_is(idist_ddp_wait(ddp), IDIST_ERR_STATE, "wait after it");
    idist_ddp_free(&ddp);
    free(m.memory);
}

static char created[400]; // line that idist_ddp_create logged

static void keep_created(idist_log_level level, const char *line, void *user) {
    const char *at = strstr(line, "ddp_create: ");
    (void)level;
    (void)user;
    if (at) snprintf(created, sizeof created, "%s", at);
}

static void create_only(idist_group *world, int rank, int n, void *arg) {
    model m;
    idist_ddp *ddp = NULL;
    (void)n;
    (void)arg;
    model_init(&m, world, rank, APART, false);
    m.desc.find_unused = true;
    rank_ok(rank, idist_ddp_create(&m.desc, &ddp));
    idist_ddp_free(&ddp);
    free(m.memory);
}

static void says_what_it_made(void) {
    const char *before = getenv("IDIST_LOG");
    char kept[40], want[80];
    idist_desc d;
    snprintf(kept, sizeof kept, "%s", before ? before : "");
    setenv("IDIST_LOG", "info", 1);
    memset(&d, 0, sizeof d);
    d.logger.log_fn = keep_created;
    ranks_case(2, &d, create_only, NULL, "a ddp that is logged");
    setenv("IDIST_LOG", kept, 1);
    snprintf(want, sizeof want, "ddp_create: %d gradients, ", N_PARAMS);
    tap_ok(strncmp(created, want, strlen(want)) == 0 &&
               strstr(created, "averaged over 2 ranks, sent as they are, find_unused"),
           "ddp_create says what it has made: %s", created);
}

int main(void) {
    static const int sizes[] = {1, 2, 3, 8};
    static const idist_compression compressions[2] = {IDIST_COMPRESS_F16, IDIST_COMPRESS_BF16};
    int n_sizes = test_quick() ? 3 : 4;
    tap_deadline(200);
    assignment();
    finalized();
    for (int begun = 0; begun < 2; begun++)
        ranks_case_fault(1, NULL, lost_alone, &begun, "a world of 1 that is gone, %s an iteration",
                         begun ? "in" : "before");
    for (int k = 0; k < n_sizes; k++) {
        int n = sizes[k];
        for (int how = 0; how < 2 * N_LAYOUTS; how++)
            ranks_case(n, NULL, averages, &how, "averages with %d ranks, gradients %s, %s", n,
                       layout_names[how % N_LAYOUTS],
                       how / N_LAYOUTS ? "of four dtypes" : "of one dtype");
        for (int how = 0; how < N_LAYOUTS; how++)
            ranks_case(n, NULL, unused, &how, "unused parameters with %d ranks, gradients %s", n,
                       layout_names[how]);
        ranks_case(n, NULL, no_sync, NULL, "no_sync with %d ranks", n);
        ranks_case(n, NULL, buffers, NULL, "buffers with %d ranks", n);
        ranks_case(n, NULL, factors, NULL, "factors with %d ranks", n);
        for (int c = 0; c < 2; c++)
            ranks_case(n, NULL, halves, (void *)(uintptr_t)&compressions[c],
                       "halves with %d ranks, %s", n, c ? "BF16" : "F16");
        int fails = 0;
        ranks_case(n, NULL, hooks, &fails, "a hook with %d ranks", n);
        for (fails = 1; fails <= 2; fails++)
            ranks_case_fault(n, NULL, hooks, &fails, "a hook that fails%s, with %d ranks",
                             fails == 2 ? " silently" : "", n);
        for (int how = 0; how < 5; how++)
            ranks_case(n, NULL, uneven, &how, "uneven inputs with %d ranks, %d", n, how);
        ranks_case(n, NULL, wrong_calls, NULL, "wrong calls with %d ranks", n);
        ranks_case(n, NULL, tied, NULL, "tied gradients with %d ranks", n);
        ranks_case(n, NULL, wrong_descs, NULL, "wrong descriptions with %d ranks", n);
        if (n > 1) ranks_case(n, NULL, disagree, NULL, "a rank that is different, of %d", n);
        ranks_case(n, NULL, parameters, NULL,
                   "broadcast_parameters and _optimizer_state with %d ranks", n);
        ranks_case(n, NULL, misaligned, NULL, "gradients at odd addresses, %d ranks", n);
        ranks_case(n, NULL, auto_optim, NULL, "auto_optim with %d ranks", n);
        if (n > 1) ranks_case(n, NULL, in_groups, NULL, "in two groups of %d ranks", n);
        if (n > 1)
            ranks_case_fault(n, NULL, lost, NULL, "a rank that leaves %d others alone", n - 1);
    }
    says_what_it_made();
    return tap_done();
}
