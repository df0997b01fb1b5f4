// zero.c - idist_zero: an optimizer whose state is divided among the ranks ends with the same bits
// as AdamW on all ranks after idist_ddp. Also tests layouts, dtypes, gradient clipping, overflows,
// state that another number of ranks loads, and errors.
//
// Gradients are multiples of 1/8, so that sums are exact in any order. The calloc below can make a
// rank run out of memory.
#include <stdint.h>
#include <stdlib.h>

// Size in bytes from which allocations of this thread fail.
static __thread size_t no_memory_from = SIZE_MAX;

static void *test_calloc(size_t n, size_t size) {
    return n * size >= no_memory_from ? NULL : calloc(n, size);
}

#define calloc test_calloc
#define IDIST_IMPLEMENTATION
#include "idist.h"

#include "idist_train.h"

#undef calloc
#include "ranks.h"

#include <math.h>

enum { PARAMS = 6, MAX_COUNT = 1500, STEPS = 5 };

//------------------------------------------------------------------------------
// the model
//------------------------------------------------------------------------------

typedef enum layout { TOGETHER, APART, SWAPPED, LAYOUTS } layout;
static const char *const layout_names[LAYOUTS] = {"together", "apart", "swapped"};

typedef struct setting {
    size_t counts[PARAMS];
    idist_dtype dtypes[PARAMS];
    layout params, grads; // where the arrays are in memory
    bool own_grads;       // the program has the gradients
    size_t bucket_nbytes;
    idist_desc world; // of the ranks
} setting;

// Arrays of one rank, and where its tensors are in them.
typedef struct model {
    char params[PARAMS * MAX_COUNT * 4 + 64], grads[PARAMS * MAX_COUNT * 4 + 64];
    idist_tensor param[PARAMS], grad[PARAMS];
} model;

static void place(idist_tensor *tensors, char *memory, const setting *s, layout at) {
    size_t offset = 0;

    for (int k = 0; k < PARAMS; k++) {
        int i = at == SWAPPED ? k ^ 1 : k;
        tensors[i].count = s->counts[i];
        tensors[i].dtype = s->dtypes[i];
        offset =
            (offset + idist_dtype_size(s->dtypes[i]) - 1) & ~(idist_dtype_size(s->dtypes[i]) - 1);
        tensors[i].data = memory + offset;
        offset += s->counts[i] * idist_dtype_size(s->dtypes[i]) + (at == APART ? 8 : 0);
    }
}

static void set(const idist_tensor *tensor, size_t i, float x) {
    idist_tensor from = {&x, 1, IDIST_F32}, to = *tensor;

    to.data = (char *)tensor->data + i * idist_dtype_size(tensor->dtype);
    to.count = 1;
    TAP_REQUIRE(idist_convert(&from, &to, 1) == IDIST_OK);
}

static float get(const idist_tensor *tensor, size_t i) {
    float x;
    idist_tensor from = *tensor, to = {&x, 1, IDIST_F32};

    from.data = (char *)tensor->data + i * idist_dtype_size(tensor->dtype);
    from.count = 1;
    TAP_REQUIRE(idist_convert(&from, &to, 1) == IDIST_OK);
    return x;
}

// Fills the parameters. Only those of rank 0 count.
static void begin(model *m, const setting *s, int rank) {
    memset(m, 0, sizeof *m);
    place(m->param, m->params, s, s->params);
    place(m->grad, m->grads, s, s->grads);
    for (int p = 0; p < PARAMS; p++)
        for (size_t i = 0; i < s->counts[p]; i++)
            set(&m->param[p], i, rank ? 77 : (float)((i * 7 + (size_t)p) % 17) / 16 - 0.5f);
}

// The gradient of an element on a rank. It does not depend on the parameters, so that the gradients
// stay multiples of 1/8.
static float gradient(int step, int rank, int param, size_t i) {
    return (float)((size_t)(step * 31 + rank * 7 + param * 3) + i * 5) / 8 -
           (float)((i + (size_t)rank) % 23) * 16;
}

// The gradients of all ranks are small enough that their sum is exact also in F16 and BF16.
static float small_gradient(int step, int rank, int param, size_t i) {
    return (float)(((size_t)(step * 3 + rank + param) + i) % 5) / 8 - 0.25f;
}

static void backward(const idist_tensor *grad, const setting *s, int step, int rank) {
    for (int p = 0; p < PARAMS; p++)
        for (size_t i = 0; i < s->counts[p]; i++) {
            bool narrow = s->dtypes[p] != IDIST_F32;
            set(&grad[p], i,
                narrow ? small_gradient(step, rank, p, i) : gradient(step, rank, p, i));
        }
}

// Updates elements by AdamW, at step 1, 2, ... Fractions of powers of two stand in for the usual
// constants, and the root is left out.
static void adamw(float *w, const float *g, float *m, float *v, size_t count, int step) {
    for (size_t i = 0; i < count; i++) {
        m[i] = 0.875f * m[i] + 0.125f * g[i];
        v[i] = 0.75f * v[i] + 0.25f * (g[i] < 0 ? -g[i] : g[i]);
        w[i] = w[i] - 0.0625f * (m[i] / (v[i] + 1)) - 0.00390625f * w[i] / (float)step;
    }
}

//------------------------------------------------------------------------------
// the same training with and without sharding
//------------------------------------------------------------------------------

// Trains without sharding. Leaves the parameters in m, and the state in `state`.
typedef struct whole {
    float weights[PARAMS][MAX_COUNT], m[PARAMS][MAX_COUNT], v[PARAMS][MAX_COUNT];
} whole;

static bool train_whole(idist_group *world, int rank, const setting *s, model *m, whole *state,
                        int first, int last) {
    float g[MAX_COUNT];
    idist_ddp_desc desc = {0};
    idist_ddp *ddp = NULL;

    desc.params = m->param;
    desc.grads = m->grad;
    desc.n = PARAMS;
    desc.group = world;
    if (!rank_ok(rank, idist_ddp_create(&desc, &ddp))) return false;
    for (int p = 0; p < PARAMS && first == 0; p++)
        for (size_t i = 0; i < s->counts[p]; i++) state->weights[p][i] = get(&m->param[p], i);
    for (int step = first; step < last; step++) {
        backward(m->grad, s, step, rank);
        if (!rank_ok(rank, idist_ddp_wait(ddp))) return false;
        for (int p = 0; p < PARAMS; p++) {
            for (size_t i = 0; i < s->counts[p]; i++) g[i] = get(&m->grad[p], i);
            adamw(state->weights[p], g, state->m[p], state->v[p], s->counts[p], step + 1);
            for (size_t i = 0; i < s->counts[p]; i++) set(&m->param[p], i, state->weights[p][i]);
        }
    }
    idist_ddp_free(&ddp);
    return true;
}

static bool create(idist_group *world, int rank, const setting *s, model *m, idist_zero **zero) {
    idist_zero_desc desc = {0};

    desc.params = m->param;
    if (s->own_grads) desc.grads = m->grad;
    desc.n = PARAMS;
    desc.states = 2;
    desc.group = world;
    desc.bucket_nbytes = s->bucket_nbytes;
    return rank_ok(rank, idist_zero_create(&desc, zero));
}

// Returns the gradients, which may be in the memory of `zero`.
static void grads_of(const idist_zero *zero, const setting *s, idist_tensor *grads) {
    for (int p = 0; p < PARAMS; p++) {
        grads[p].data = idist_zero_grad(zero, p);
        grads[p].count = s->counts[p];
        grads[p].dtype = s->dtypes[p];
    }
}

static void update(const idist_zero *zero, int step) {
    for (int k = 0; k < idist_zero_shards(zero); k++) {
        const idist_shard *shard = idist_zero_shard(zero, k);
        adamw(shard->weights, shard->grad, shard->states[0], shard->states[1], shard->count, step);
    }
}

static bool train_sharded(int rank, const setting *s, idist_zero *zero, int first, int last) {
    idist_tensor grads[PARAMS];

    grads_of(zero, s, grads);
    for (int step = first; step < last; step++) {
        backward(grads, s, step, rank);
        for (int p = PARAMS; step % 2 && p-- > 0;) // in the other order in step 3
            if (!rank_ok(rank, idist_zero_ready(zero, step == 3 ? PARAMS - 1 - p : p)))
                return false;
        if (!rank_ok(rank, idist_zero_wait(zero))) return false;
        update(zero, step + 1);
        if (!rank_ok(rank, idist_zero_gather(zero))) return false;
    }
    return true;
}

// Checks that two models have the same bits.
static void compare(int rank, const setting *s, const model *a, const model *b, const char *when) {
    for (int p = 0; p < PARAMS; p++) {
        size_t nbytes = s->counts[p] * idist_dtype_size(s->dtypes[p]);
        rank_check(memcmp(a->param[p].data, b->param[p].data, nbytes) == 0,
                   "rank %d: parameter %d differs %s", rank, p, when);
    }
}

// Checks that the shards of all ranks are the parameters, each element once.
static void coverage(idist_group *world, int rank, int n, const setting *s,
                     const idist_zero *zero) {
    static __thread uint8_t seen[PARAMS][MAX_COUNT];
    idist_opts o = opts_of(world);
    size_t own = 0, all = 0;

    memset(seen, 0, sizeof seen);
    for (int k = 0; k < idist_zero_shards(zero); k++) {
        const idist_shard *shard = idist_zero_shard(zero, k);
        const idist_tensor *grad = &idist_zero_shard_grads(zero)[k];
        rank_check(shard->count && shard->first + shard->count <= s->counts[shard->param] &&
                       grad->data == shard->grad && grad->count == shard->count,
                   "rank %d: shard %d", rank, k);
        for (size_t i = 0; i < shard->count; i++) seen[shard->param][shard->first + i]++;
        own += shard->count;
    }
    rank_check(!idist_zero_shard(zero, -1) && !idist_zero_shard(zero, idist_zero_shards(zero)),
               "rank %d: a shard that does not exist", rank);
    rank_ok(rank, idist_all_reduce(seen, seen, sizeof seen, IDIST_U8, IDIST_SUM, &o));
    for (int p = 0; p < PARAMS; p++)
        for (size_t i = 0; i < s->counts[p]; i++, all++)
            if (seen[p][i] != 1) {
                rank_fail("rank %d: element %zu of parameter %d is in %d shards", rank, i, p,
                          seen[p][i]);
                return;
            }
    rank_check(own <= all / (size_t)n + PARAMS, "rank %d: %zu of %zu elements", rank, own, all);
}

static void as_ddp(idist_group *world, int rank, int n, void *arg) {
    const setting *s = (const setting *)arg;
    model *whole_model = (model *)malloc(sizeof *whole_model);
    model *sharded = (model *)malloc(sizeof *sharded);
    whole *state = (whole *)calloc(1, sizeof *state);
    idist_zero *zero = NULL;

    TAP_REQUIRE(whole_model && sharded && state);
    begin(whole_model, s, rank);
    begin(sharded, s, rank);
    if (create(world, rank, s, sharded, &zero)) {
        coverage(world, rank, n, s, zero);
        if (train_whole(world, rank, s, whole_model, state, 0, STEPS) &&
            train_sharded(rank, s, zero, 0, STEPS))
            compare(rank, s, whole_model, sharded, "after training");
    }
    idist_zero_free(&zero);
    rank_check(!zero, "rank %d: not freed", rank);
    idist_zero_free(&zero);
    free(whole_model);
    free(sharded);
    free(state);
}

//------------------------------------------------------------------------------
// settings
//------------------------------------------------------------------------------

static setting setting_of(const size_t *counts, idist_dtype dtype, layout params, layout grads) {
    setting s = {0};

    for (int p = 0; p < PARAMS; p++) {
        s.counts[p] = counts[p];
        s.dtypes[p] = dtype;
    }
    s.params = params;
    s.grads = grads;
    s.own_grads = true;
    return s;
}

static const size_t mixed[PARAMS] = {1000, 1, 0, 333, 1500, 8}, tiny[PARAMS] = {1, 0, 0, 1, 0, 0};
static const size_t even[PARAMS] = {840, 840, 840, 840, 840, 840};

static void all_layouts(void) {
    static const idist_dtype dtypes[3] = {IDIST_F32, IDIST_F16, IDIST_BF16};
    static const int sizes[] = {1, 2, 3, 4, 7};
    static const size_t buckets[3] = {0, 64, 3000};
    int k = 0;

    for (int params = 0; params < LAYOUTS; params++)
        for (int grads = 0; grads < LAYOUTS; grads++)
            for (int d = 0; d < 3; d++, k++) {
                int n = sizes[k % 5];
                setting s =
                    setting_of(k % 2 ? mixed : even, dtypes[d], (layout)params, (layout)grads);
                s.bucket_nbytes = buckets[k % 3];
                ranks_case(n, NULL, as_ddp, &s, "parameters %s, gradients %s, %s, %d ranks",
                           layout_names[params], layout_names[grads], idist_dtype_name(dtypes[d]),
                           n);
            }
    for (int i = 0; i < 5; i++) {
        setting s = setting_of(mixed, IDIST_F32, TOGETHER, TOGETHER);
        s.own_grads = false;
        ranks_case(sizes[i], NULL, as_ddp, &s, "gradients of idist, %d ranks", sizes[i]);
        s = setting_of(tiny, IDIST_BF16, TOGETHER, APART);
        ranks_case(sizes[i], NULL, as_ddp, &s, "two elements, %d ranks", sizes[i]);
        s = setting_of(mixed, IDIST_F32, APART, TOGETHER);
        s.dtypes[1] = s.dtypes[4] = IDIST_BF16;
        s.dtypes[5] = IDIST_F16;
        s.bucket_nbytes = 1024;
        ranks_case(sizes[i], NULL, as_ddp, &s, "three dtypes, %d ranks", sizes[i]);
    }
}

static void all_transports(void) {
    for (int t = 0; t < N_PLACEMENTS; t++) {
        setting s = setting_of(mixed, t % 2 ? IDIST_F32 : IDIST_F16, SWAPPED, TOGETHER);
        idist_desc desc = desc_with(transport_names[t], "auto");
        s.bucket_nbytes = 2000;
        ranks_case(4, &desc, as_ddp, &s, "over %s", transport_names[t]);
    }
}

//------------------------------------------------------------------------------
// clipping, overflows, accumulation
//------------------------------------------------------------------------------

// Clips gradients by their joint norm, which only all shards together have. A second world of one
// rank has all gradients.
static void clipping(idist_group *world, int rank, int n, void *arg) {
    const setting *s = (const setting *)arg;
    model *m = (model *)malloc(sizeof *m);
    idist_tensor grads[PARAMS];
    idist_zero *zero = NULL;
    idist_opts o = opts_of(world);
    double norm = 0, squares = 0;

    TAP_REQUIRE(m != NULL);
    begin(m, s, rank);
    if (!create(world, rank, s, m, &zero)) return;
    grads_of(zero, s, grads);
    backward(grads, s, 3, rank);
    for (int p = 0; p < PARAMS; p++)
        for (size_t i = 0; i < s->counts[p]; i++) {
            double sum = 0;
            for (int r = 0; r < n; r++) sum += (double)gradient(3, r, p, i);
            squares += sum / n * (sum / n);
        }
    rank_ok(rank, idist_zero_wait(zero));
    rank_ok(rank, idist_clip_grad_norm(idist_zero_shard_grads(zero), idist_zero_shards(zero), 0.5,
                                       false, &norm, &o));
    rank_check(fabs(norm * norm - squares) < 1e-4 * squares, "rank %d: squares %g, not %g", rank,
               norm * norm, squares);
    idist_zero_free(&zero);
    free(m);
}

// A gradient overflows on one rank, in a shard of another rank. All ranks must skip the step.
static void overflow(idist_group *world, int rank, int n, void *arg) {
    const setting *s = (const setting *)arg;
    model *m = (model *)malloc(sizeof *m), *before = (model *)malloc(sizeof *before);
    idist_grad_scaler scaler = {0, 0, 0, 8, 0, false, false};
    idist_tensor grads[PARAMS];
    idist_zero *zero = NULL;
    idist_opts o = opts_of(world);

    TAP_REQUIRE(m && before);
    begin(m, s, rank);
    begin(before, s, 0);
    if (!create(world, rank, s, m, &zero)) return;
    grads_of(zero, s, grads);
    for (int step = 0; step < 4; step++) {
        backward(grads, s, step, rank);
        if (step % 2 == 0 && rank == n - 1) set(&grads[4], 5, -INFINITY);
        rank_ok(rank, idist_zero_wait(zero));
        rank_ok(rank, idist_grad_scaler_unscale(&scaler, idist_zero_shard_grads(zero),
                                                idist_zero_shards(zero), false, &o));
        rank_check(scaler.found_inf == (step % 2 == 0), "rank %d, step %d: found_inf is %d", rank,
                   step, (int)scaler.found_inf);
        if (!scaler.found_inf) update(zero, step + 1);
        if (!scaler.found_inf) rank_ok(rank, idist_zero_gather(zero));
        rank_ok(rank, idist_grad_scaler_update(&scaler));
        if (step == 0) compare(rank, s, before, m, "although the step was skipped");
    }
    rank_check(scaler.scale == 2, "rank %d: scale %g", rank, (double)scaler.scale);
    for (int p = 0; p < PARAMS; p++)
        for (size_t i = 0; i < s->counts[p]; i++)
            rank_check(isfinite(get(&m->param[p], i)), "rank %d: parameter %d", rank, p);
    idist_zero_free(&zero);
    free(m);
    free(before);
}

// Accumulates the gradients of two passes.
static void accumulate(idist_group *world, int rank, int n, void *arg) {
    const setting *s = (const setting *)arg;
    model *m = (model *)malloc(sizeof *m);
    idist_tensor grads[PARAMS];
    idist_zero *zero = NULL;

    TAP_REQUIRE(m != NULL);
    begin(m, s, rank);
    if (!create(world, rank, s, m, &zero)) return;
    grads_of(zero, s, grads);
    rank_ok(rank, idist_zero_no_sync(zero, true));
    backward(grads, s, 0, rank);
    rank_ok(rank, idist_zero_ready(zero, 3));
    rank_ok(rank, idist_zero_wait(zero));
    rank_ok(rank, idist_zero_no_sync(zero, false));
    for (int p = 0; p < PARAMS; p++)
        for (size_t i = 0; i < s->counts[p]; i++)
            set(&grads[p], i, get(&grads[p], i) + gradient(1, rank, p, i));
    rank_ok(rank, idist_zero_ready(zero, PARAMS - 1));
    rank_is(rank, idist_zero_gather(zero), IDIST_ERR_STATE);
    rank_is(rank, idist_zero_get_state(zero, NULL, 0), IDIST_ERR_STATE);
    rank_is(rank, idist_zero_no_sync(zero, true), IDIST_ERR_STATE);
    rank_ok(rank, idist_zero_wait(zero));
    for (int k = 0; k < idist_zero_shards(zero); k++) {
        const idist_shard *shard = idist_zero_shard(zero, k);
        for (size_t i = 0; i < shard->count; i++) {
            float sum = 0;
            for (int r = 0; r < n; r++)
                sum += gradient(0, r, shard->param, shard->first + i) +
                       gradient(1, r, shard->param, shard->first + i);
            rank_check(fabsf(shard->grad[i] * (float)n - sum) <= 1e-5f * fabsf(sum),
                       "rank %d: parameter %d: %g", rank, shard->param, (double)shard->grad[i]);
        }
    }
    idist_zero_free(&zero);
    free(m);
}

// A full bucket is launched while the backward pass goes on.
static void overlap(idist_group *world, int rank, int n, void *arg) {
    const setting *s = (const setting *)arg;
    model *m = (model *)malloc(sizeof *m);
    idist_tensor grads[PARAMS];
    idist_zero *zero = NULL;
    (void)n;

    TAP_REQUIRE(m != NULL);
    begin(m, s, rank);
    if (!create(world, rank, s, m, &zero)) return;
    grads_of(zero, s, grads);
    backward(grads, s, 0, rank);
    for (int p = PARAMS; p-- > 1;) rank_ok(rank, idist_zero_ready(zero, p));
    rank_check(zero->ddp->launched_count > 0, "rank %d: %d of %d buckets are launched", rank,
               zero->ddp->launched_count, idist_ddp_buckets(zero->ddp));
    rank_ok(rank, idist_zero_wait(zero));
    idist_zero_free(&zero);
    free(m);
}

//------------------------------------------------------------------------------
// the state, for checkpoints
//------------------------------------------------------------------------------

typedef struct saved {
    setting s;
    char folder[64];
    int root;
    bool alone; // rank 0 reads the file in a group of its own
} saved;

// Returns the tensors of a checkpoint: the parameters, then the states.
static int checkpoint_list(const model *m, whole *state, idist_tensor *list, const setting *s,
                           int arrays) {
    float(*const of[3])[MAX_COUNT] = {state->m, state->v, state->weights};
    int n = 0;

    for (int p = 0; p < PARAMS; p++) list[n++] = m->param[p];
    for (int j = 0; j < arrays; j++)
        for (int p = 0; p < PARAMS; p++, n++) {
            list[n].data = of[j][p];
            list[n].count = s->counts[p];
            list[n].dtype = IDIST_F32;
        }
    return n;
}

// Trains to the middle and saves a checkpoint.
static void save(idist_group *world, int rank, int n, void *arg) {
    const saved *c = (const saved *)arg;
    model *m = (model *)malloc(sizeof *m);
    whole *state = (whole *)calloc(1, sizeof *state);
    idist_checkpoint_desc desc = {c->folder, NULL, 0, 0, false};
    idist_tensor list[4 * PARAMS];
    idist_zero *zero = NULL;
    idist_opts o = opts_of(world);
    bool narrow = c->s.dtypes[0] != IDIST_F32;
    (void)n;

    TAP_REQUIRE(m && state);
    begin(m, &c->s, rank);
    if (create(world, rank, &c->s, m, &zero) && train_sharded(rank, &c->s, zero, 0, 3)) {
        rank_check(idist_zero_state_count(zero) == (narrow ? 3 : 2), "rank %d: %d arrays", rank,
                   idist_zero_state_count(zero));
        int count = checkpoint_list(m, state, list, &c->s, idist_zero_state_count(zero));
        rank_ok(rank, idist_zero_get_state(zero, rank == 0 ? list + PARAMS : NULL, 0));
        rank_ok(rank, idist_checkpoint_save(&desc, 3, 0, list, count, NULL, 0, &o));
    }
    idist_zero_free(&zero);
    free(m);
    free(state);
}

// Loads the checkpoint, trains to the end, and compares with a run without an interruption.
static void resume(idist_group *world, int rank, int n, void *arg) {
    const saved *c = (const saved *)arg;
    model *m = (model *)malloc(sizeof *m), *whole_model = (model *)malloc(sizeof *whole_model);
    whole *state = (whole *)calloc(1, sizeof *state), *wanted = (whole *)calloc(1, sizeof *wanted);
    idist_checkpoint_desc desc = {c->folder, NULL, 0, 0, false};
    idist_tensor list[4 * PARAMS];
    idist_group *reader = NULL;
    idist_zero *zero = NULL;
    idist_opts o = opts_of(world);
    char path[256];
    (void)n;

    TAP_REQUIRE(m && whole_model && state && wanted);
    begin(m, &c->s, 1); // other parameters than those of the checkpoint
    if (create(world, rank, &c->s, m, &zero)) {
        int count = checkpoint_list(m, state, list, &c->s, idist_zero_state_count(zero));
        if (c->alone) {
            rank_ok(rank, idist_split(world, rank == c->root ? 0 : -1, 0, &reader));
            o.group = reader;
        }
        if (!c->alone || rank == c->root) {
            rank_ok(rank, idist_checkpoint_find(&desc, true, path, sizeof path, &o));
            rank_ok(rank, idist_checkpoint_load(path, list, count, NULL, 0, &o));
        }
        if (reader) idist_free_group(&reader);
        rank_ok(rank, idist_zero_set_state(zero, rank == c->root ? list + PARAMS : NULL, c->root));
        // The gradients of the checkpointed run came from three ranks. So this run repeats three
        // steps of three ranks, and then goes on with its own.
        begin(whole_model, &c->s, 1);
        for (int p = 0; p < PARAMS; p++)
            memcpy(whole_model->param[p].data, m->param[p].data,
                   c->s.counts[p] * idist_dtype_size(c->s.dtypes[p]));
        rank_ok(rank, idist_zero_get_state(zero, rank == c->root ? list + PARAMS : NULL, c->root));
        memcpy(wanted, state, sizeof *wanted);
        o.group = world;
        rank_ok(rank, idist_broadcast(wanted, sizeof *wanted, IDIST_U8, c->root, &o));
        if (c->s.dtypes[0] == IDIST_F32)
            for (int p = 0; p < PARAMS; p++)
                memcpy(wanted->weights[p], m->param[p].data, c->s.counts[p] * 4);
        if (train_whole(world, rank, &c->s, whole_model, wanted, 3, STEPS) &&
            train_sharded(rank, &c->s, zero, 3, STEPS))
            compare(rank, &c->s, whole_model, m, "after the resumed training");
    }
    idist_zero_free(&zero);
    free(m);
    free(whole_model);
    free(state);
    free(wanted);
}

// Checks the state that get_state collects against the state of the unsharded training.
static void state_values(idist_group *world, int rank, int n, void *arg) {
    const saved *c = (const saved *)arg;
    model *m = (model *)malloc(sizeof *m), *whole_model = (model *)malloc(sizeof *whole_model);
    whole *got = (whole *)calloc(1, sizeof *got), *wanted = (whole *)calloc(1, sizeof *wanted);
    idist_tensor list[4 * PARAMS];
    idist_zero *zero = NULL;

    TAP_REQUIRE(m && whole_model && got && wanted);
    begin(m, &c->s, rank);
    begin(whole_model, &c->s, rank);
    if (create(world, rank, &c->s, m, &zero) && train_sharded(rank, &c->s, zero, 0, 3) &&
        train_whole(world, rank, &c->s, whole_model, wanted, 0, 3)) {
        checkpoint_list(m, got, list, &c->s, idist_zero_state_count(zero));
        rank_ok(rank, idist_zero_get_state(zero, rank == n - 1 ? list + PARAMS : NULL, n - 1));
        if (c->s.dtypes[0] == IDIST_F32) memcpy(got->weights, wanted->weights, sizeof got->weights);
        rank_check(rank != n - 1 || memcmp(got, wanted, sizeof *got) == 0, "rank %d: wrong state",
                   rank);
    }
    idist_zero_free(&zero);
    free(m);
    free(whole_model);
    free(got);
    free(wanted);
}

static void checkpoints(void) {
    static const idist_dtype dtypes[3] = {IDIST_F32, IDIST_F16, IDIST_BF16};
    static const int sizes[5] = {1, 2, 3, 4, 7};
    char command[128];

    for (int d = 0; d < 3; d++) {
        saved c = {setting_of(mixed, dtypes[d], APART, TOGETHER), "/tmp/zero.XXXXXX", 0, false};
        c.s.bucket_nbytes = 1000;
        TAP_REQUIRE(mkdtemp(c.folder) != NULL);
        ranks_case(3, NULL, save, &c, "%s: saved by 3 ranks", idist_dtype_name(dtypes[d]));
        for (int i = 0; i < 5; i++) {
            c.alone = i % 2;
            c.root = c.alone ? sizes[i] - 1 : 0;
            ranks_case(sizes[i], NULL, resume, &c, "%s: resumed by %d", idist_dtype_name(dtypes[d]),
                       sizes[i]);
            ranks_case(sizes[i], NULL, state_values, &c, "%s: the state of %d ranks",
                       idist_dtype_name(dtypes[d]), sizes[i]);
        }
        snprintf(command, sizeof command, "rm -rf %s", c.folder);
        tap_is(system(command), 0, "the folder is removed");
    }
}

//------------------------------------------------------------------------------
// errors
//------------------------------------------------------------------------------

static void says(int rank, const char *text) {
    rank_check(strstr(idist_last_error(), text) != NULL, "rank %d: \"%s\" is not in \"%s\"", rank,
               text, idist_last_error());
}

// The last rank passes wrong arguments. All ranks must get the error.
static void bad_descs(idist_group *world, int rank, int n, void *arg) {
    float x[4] = {1, 2, 3, 4}, y[4] = {0};
    idist_tensor param = {x, 4, IDIST_F32}, grad = {y, 4, IDIST_F32};
    idist_zero_desc good = {0}, desc;
    idist_zero *zero = (idist_zero *)x;
    idist_opts o = opts_of(world);
    bool last = rank == n - 1;
    (void)arg;

    good.params = &param;
    good.grads = &grad;
    good.n = 1;
    good.group = world;
    desc = good;
    if (last) param.dtype = IDIST_F64;
    rank_is(rank, idist_zero_create(&desc, &zero), IDIST_ERR_UNSUPPORTED);
    says(rank, "parameter 0 is F64");
    rank_check(!zero, "rank %d: a zero", rank);
    param.dtype = IDIST_F32;
    if (last) grad.dtype = IDIST_BF16;
    rank_is(rank, idist_zero_create(&desc, &zero), IDIST_ERR_UNSUPPORTED);
    says(rank, "parameter 0 is F32, but its gradient is BF16");
    grad.dtype = IDIST_F32;
    if (last) desc.states = 5;
    rank_is(rank, idist_zero_create(&desc, &zero), IDIST_ERR_ARG);
    says(rank, "states must be from 0 to 4, got 5");
    desc = good;
    if (last) grad.count = 3;
    rank_is(rank, idist_zero_create(&desc, &zero), IDIST_ERR_ARG);
    grad.count = 4;
    if (last) desc.n = 0;
    rank_is(rank, idist_zero_create(&desc, &zero), IDIST_ERR_ARG);
    desc = good;
    if (last) desc.params = NULL;
    rank_is(rank, idist_zero_create(&desc, &zero), IDIST_ERR_ARG);
    desc = good;
    if (n > 1) {
        if (last) param.count = grad.count = 2;
        rank_is(rank, idist_zero_create(&desc, &zero), IDIST_ERR_MISMATCH);
        param.count = grad.count = 4;
        if (last) desc.states = 1;
        rank_is(rank, idist_zero_create(&desc, &zero), IDIST_ERR_MISMATCH);
        says(rank, "states");
    }
    rank_is(rank, idist_zero_create(NULL, &zero), IDIST_ERR_ARG);
    rank_is(rank, idist_zero_create(&good, NULL), IDIST_ERR_ARG);
    rank_is(rank, idist_zero_ready(NULL, 0), IDIST_ERR_ARG);
    rank_is(rank, idist_zero_wait(NULL), IDIST_ERR_ARG);
    rank_is(rank, idist_zero_gather(NULL), IDIST_ERR_ARG);
    rank_is(rank, idist_zero_no_sync(NULL, true), IDIST_ERR_ARG);
    rank_is(rank, idist_zero_get_state(NULL, NULL, 0), IDIST_ERR_ARG);
    rank_is(rank, idist_zero_set_state(NULL, NULL, 0), IDIST_ERR_ARG);
    rank_check(!idist_zero_shards(NULL) && !idist_zero_shard(NULL, 0) &&
                   !idist_zero_grad(NULL, 0) && !idist_zero_shard_grads(NULL) &&
                   !idist_zero_state_count(NULL),
               "rank %d: NULL has a shard", rank);
    rank_ok(rank, idist_barrier(&o)); // the group is usable
}

// Tensors of the last rank overlap in memory.
static void overlapping(idist_group *world, int rank, int n, void *arg) {
    float x[4] = {1, 2, 3, 4}, y[4] = {0};
    bool last = rank == n - 1;
    idist_tensor two[2] = {{x, 2, IDIST_F32}, {last ? x + 1 : x + 2, 2, IDIST_F32}};
    idist_tensor param = {x, 4, IDIST_F32}, grad = {last ? x + 3 : y, 4, IDIST_F32};
    idist_zero_desc desc = {0};
    idist_zero *zero = NULL;
    (void)arg;

    desc.params = two;
    desc.n = 2;
    desc.group = world;
    rank_is(rank, idist_zero_create(&desc, &zero), IDIST_ERR_ARG);
    says(rank, "parameters 0 and 1 overlap in memory");
    desc.params = &param;
    desc.grads = &grad;
    desc.n = 1;
    rank_is(rank, idist_zero_create(&desc, &zero), IDIST_ERR_ARG);
    says(rank, "parameter 0 and gradient 0 overlap in memory");
}

static void bad_states(idist_group *world, int rank, int n, void *arg) {
    float x[4] = {1, 2, 3, 4}, state[2][4] = {{5, 5, 5, 5}, {6, 6, 6, 6}};
    idist_tensor param = {x, 4, IDIST_F32};
    idist_tensor good[2] = {{state[0], 4, IDIST_F32}, {state[1], 4, IDIST_F32}}, bad[2];
    idist_zero_desc desc = {0};
    idist_zero *zero = NULL;
    (void)arg;

    desc.params = &param;
    desc.n = 1;
    desc.states = 2;
    desc.group = world;
    if (!rank_ok(rank, idist_zero_create(&desc, &zero))) return;
    rank_is(rank, idist_zero_get_state(zero, NULL, n - 1), IDIST_ERR_ARG);
    says(rank, "list is NULL");
    rank_is(rank, idist_zero_get_state(zero, good, n), IDIST_ERR_ARG);
    rank_is(rank, idist_zero_set_state(zero, good, -1), IDIST_ERR_ARG);
    // One rank is within an iteration. All ranks must get the error.
    if (rank == n - 1) rank_ok(rank, idist_zero_ready(zero, 0));
    rank_is(rank, idist_zero_get_state(zero, good, 0), IDIST_ERR_STATE);
    says(rank, "gradients are ready");
    rank_is(rank, idist_zero_set_state(zero, good, 0), IDIST_ERR_STATE);
    if (rank == n - 1) rank_is(rank, idist_zero_ready(zero, 0), IDIST_ERR_STATE);
    if (rank == n - 1) says(rank, "zero_ready: gradient 0 is ready already; call zero_wait");
    rank_ok(rank, idist_zero_wait(zero));
    memcpy(bad, good, sizeof bad);
    bad[1].dtype = IDIST_F64;
    rank_is(rank, idist_zero_set_state(zero, bad, 0), IDIST_ERR_ARG);
    says(rank, "state 1 is F64 x 4, not F32 x 4");
    bad[1] = good[1];
    bad[1].count = 3;
    rank_is(rank, idist_zero_get_state(zero, bad, 0), IDIST_ERR_ARG);
    bad[1].count = 4;
    bad[1].data = NULL;
    rank_is(rank, idist_zero_get_state(zero, bad, 0), IDIST_ERR_ARG);
    rank_check(state[0][0] == 5, "rank %d: a refused call wrote", rank);
    rank_ok(rank, idist_zero_set_state(zero, good, 0));
    memset(state, 0, sizeof state);
    rank_ok(rank, idist_zero_get_state(zero, good, 0));
    rank_check(rank || (state[0][3] == 5 && state[1][0] == 6), "rank %d: another state", rank);
    idist_zero_free(&zero);
}

// Parameters become the master weights of a state, also where the file had other parameters.
static void masters_count(idist_group *world, int rank, int n, void *arg) {
    uint16_t half[3] = {0, 0, 0};
    float master[3] = {0.5f, 1 + 0x1p-20f, -2};
    idist_tensor param = {half, 3, IDIST_F16}, state = {master, 3, IDIST_F32};
    idist_zero_desc desc = {0};
    idist_zero *zero = NULL;
    (void)arg;

    desc.params = &param;
    desc.n = 1;
    desc.group = world;
    if (!rank_ok(rank, idist_zero_create(&desc, &zero))) return;
    rank_ok(rank, idist_zero_set_state(zero, rank == n - 1 ? &state : NULL, n - 1));
    rank_check(half[0] == 0x3800 && half[1] == 0x3c00 && half[2] == 0xc000,
               "rank %d: %04x %04x %04x", rank, half[0], half[1], half[2]);
    memset(master, 0, sizeof master);
    rank_ok(rank, idist_zero_get_state(zero, &state, 0));
    rank_check(rank || master[1] == 1 + 0x1p-20f, "rank %d: master weights are rounded", rank);
    idist_zero_free(&zero);
}

// In a model of two dtypes, the last array of an F32 parameter does not count.
static void mixed_state(idist_group *world, int rank, int n, void *arg) {
    float x[2] = {5, 6};
    uint16_t half[3] = {0, 0, 0};
    float arrays[2][3] = {{30, 31, 32}, {0.5f, 0.5f, 0.5f}};
    idist_tensor params[2] = {{x, 2, IDIST_F32}, {half, 3, IDIST_F16}};
    idist_tensor states[2] = {{arrays[0], 2, IDIST_F32}, {arrays[1], 3, IDIST_F32}};
    idist_zero_desc desc = {0};
    idist_zero *zero = NULL;
    (void)arg;

    desc.params = params;
    desc.n = 2;
    desc.group = world;
    if (!rank_ok(rank, idist_zero_create(&desc, &zero))) return;
    x[0] = rank == n - 1 ? 7 : 8;
    rank_ok(rank, idist_zero_set_state(zero, rank == n - 1 ? states : NULL, n - 1));
    rank_check(x[0] == 7 && x[1] == 6 && half[2] == 0x3800, "rank %d: %g %g %04x", rank,
               (double)x[0], (double)x[1], half[2]);
    rank_ok(rank, idist_zero_get_state(zero, states, 0));
    rank_check(rank || (arrays[0][0] == 7 && arrays[0][1] == 6 && arrays[1][2] == 0.5f),
               "rank %d: %g %g", rank, (double)arrays[0][0], (double)arrays[0][1]);
    idist_zero_free(&zero);
}

// Root's states overlap its own shard, which only root can notice. No rank may wait for long.
static void own_memory(idist_group *world, int rank, int n, void *arg) {
    float x[8] = {0};
    idist_tensor param = {x, 8, IDIST_F32}, state = {NULL, 8, IDIST_F32};
    idist_zero_desc desc = {0};
    idist_zero *zero = NULL;
    (void)n, (void)arg;

    desc.params = &param;
    desc.n = 1;
    desc.states = 1;
    desc.group = world;
    if (!rank_ok(rank, idist_zero_create(&desc, &zero))) return;
    state.data = idist_zero_shard(zero, 0)->states[0] + (rank == 0 ? -1 : 0);
    rank_is(rank, idist_zero_get_state(zero, &state, 0), IDIST_ERR_ARG);
    says(rank, "overlap");
    idist_zero_free(&zero);
}

// The world has another size or order than at the creation. Each rank must get the error.
typedef struct worlds {
    int first, second; // sizes; the ranks of the first world are a part of the second
} worlds;

static int other_world(int number, void *arg) {
    const worlds *w = (const worlds *)arg;
    float x[16] = {0}, y[16] = {0};
    idist_tensor param = {x, 16, IDIST_F32}, state = {y, 16, IDIST_F32};
    idist_zero_desc zero_desc = {0};
    idist_zero *zero = NULL;
    int wrong = 0;

    // Worlds of `first` ranks side by side, at one store each.
    char url[64];
    idist_desc desc = {0};
    snprintf(url, sizeof url, "file:///tmp/zero.%d.%d", (int)getppid(), number / w->first);
    desc.rank = number % w->first;
    desc.world_size = w->first;
    desc.init_method = url;
    if (idist_initialize(&desc) != IDIST_OK) return 10;
    zero_desc.params = &param;
    zero_desc.n = 1;
    zero_desc.states = 1;
    if (idist_zero_create(&zero_desc, &zero) != IDIST_OK) return 11;
    if (idist_finalize() != IDIST_OK) return 12;

    snprintf(url, sizeof url, "file:///tmp/zero.%d.all", (int)getppid());
    desc.rank = number;
    desc.world_size = w->second;
    if (number < w->second) {
        if (idist_initialize(&desc) != IDIST_OK) return 13;
        wrong += idist_zero_gather(zero) != IDIST_ERR_STATE ||
                 !strstr(idist_last_error(), "create a zero in each world");
        wrong += idist_zero_get_state(zero, number == 0 ? &state : NULL, 0) != IDIST_ERR_STATE;
        wrong += idist_zero_set_state(zero, number == 0 ? &state : NULL, 0) != IDIST_ERR_STATE;
        wrong += idist_zero_wait(zero) != IDIST_ERR_STATE;
        wrong += idist_barrier(NULL) != IDIST_OK;
        if (idist_finalize() != IDIST_OK) return 14;
    }
    idist_zero_free(&zero);
    return wrong;
}

// One rank runs out of memory. All ranks must get the error.
static void no_memory(idist_group *world, int rank, int n, void *arg) {
    static __thread float x[50000];
    idist_tensor param = {x, 50000, IDIST_F32};
    idist_zero_desc desc = {0};
    idist_zero *zero = NULL;
    idist_opts o = opts_of(world);

    desc.params = &param;
    desc.n = 1;
    desc.states = 4;
    desc.group = world;
    if (rank == n - 1) no_memory_from = *(const size_t *)arg;
    idist_status status = idist_zero_create(&desc, &zero);
    no_memory_from = SIZE_MAX;
    rank_is(rank, status, IDIST_ERR_NO_MEMORY);
    says(rank, "no memory");
    rank_check(!zero, "rank %d: a zero", rank);
    rank_ok(rank, idist_barrier(&o));
}

// Rank 1 ends during a backward pass.
static int ends(int number, void *arg) {
    float x[64] = {0};
    idist_tensor param = {x, 64, IDIST_F32};
    idist_zero_desc desc = {0};
    idist_zero *zero = NULL;
    idist_status status;

    desc.params = &param;
    desc.n = 1;
    if (idist_zero_create(&desc, &zero) != IDIST_OK) return 10;
    for (int step = 0; step < 3; step++) {
        if (number == 1 && step == 2) _exit(7);
        status = idist_zero_wait(zero);
        if (status != IDIST_OK) break;
        status = idist_zero_gather(zero);
        if (status != IDIST_OK) break;
    }
    bool named = status == IDIST_ERR_PEER_LOST && text_names_rank(idist_last_error(), 1);
    if (!named) fprintf(stderr, "%s: %s\n", idist_status_name(status), idist_last_error());
    idist_zero_free(&zero);
    ((bool *)arg)[number] = named;
    return 0;
}

static void lost_rank(void) {
    bool *named = (bool *)shared_alloc(3 * sizeof *named);
    idist_desc desc = {0};
    idist_report report;

    desc.keep_going = true;
    desc.report = &report;
    tap_is(idist_spawn(ends, named, 3, &desc), IDIST_ERR_WORKER_FAILED, "a rank ends");
    tap_ok(report.rank == 1 && report.exit_code == 7 && named[0] && named[2],
           "the others name rank 1");
}

// A world of one rank is closed.
static void closed_world(void) {
    float x[4] = {1, 2, 3, 4};
    idist_tensor param = {x, 4, IDIST_F32};
    idist_zero_desc desc = {0};
    idist_zero *zero = NULL;

    desc.params = &param;
    desc.n = 1;
    TAP_REQUIRE(idist_initialize(NULL) == IDIST_OK);
    tap_is(idist_zero_create(&desc, &zero), IDIST_OK, "in the default world");
    TAP_REQUIRE(idist_finalize() == IDIST_OK);
    tap_is(idist_zero_wait(zero), IDIST_ERR_STATE, "wait after finalize");
    tap_is(idist_zero_gather(zero), IDIST_ERR_STATE, "gather after finalize");
    tap_is(idist_zero_get_state(zero, NULL, 0), IDIST_ERR_STATE, "get_state after finalize");
    idist_zero_free(&zero);
    tap_is(idist_zero_create(&desc, &zero), IDIST_ERR_STATE, "create without a world");
}

int main(void) {
    static const int sizes[4] = {1, 2, 3, 4};
    static const size_t limits[3] = {1, 300, 100000};
    static const worlds other[3] = {{3, 2}, {1, 2}, {2, 4}};
    tap_deadline(120);
    all_layouts();
    all_transports();
    setting s = setting_of(mixed, IDIST_F32, TOGETHER, TOGETHER);
    setting half = setting_of(mixed, IDIST_F16, TOGETHER, APART);
    s.bucket_nbytes = 1500;
    for (int i = 0; i < 4; i++) {
        ranks_case(sizes[i], NULL, clipping, &s, "clipped, %d ranks", sizes[i]);
        ranks_case(sizes[i], NULL, overflow, &s, "an overflow, %d ranks", sizes[i]);
        ranks_case(sizes[i], NULL, overflow, &half, "an overflow of F16, %d ranks", sizes[i]);
        ranks_case(sizes[i], NULL, overlap, &s, "during the backward pass, %d ranks", sizes[i]);
        ranks_case(sizes[i], NULL, accumulate, &s, "two passes, %d ranks", sizes[i]);
        ranks_case(sizes[i], NULL, bad_descs, NULL, "bad descs, %d ranks", sizes[i]);
        ranks_case(sizes[i], NULL, overlapping, NULL, "overlaps, %d ranks", sizes[i]);
        ranks_case(sizes[i], NULL, bad_states, NULL, "bad states, %d ranks", sizes[i]);
        ranks_case(sizes[i], NULL, masters_count, NULL, "master weights, %d ranks", sizes[i]);
        ranks_case(sizes[i], NULL, mixed_state, NULL, "two dtypes, %d ranks", sizes[i]);
        for (int k = 0; k < 3; k++)
            ranks_case(sizes[i], NULL, no_memory, (void *)&limits[k],
                       "no memory for %zu bytes on one of %d ranks", limits[k], sizes[i]);
    }
    checkpoints();
    ranks_case_fault(3, NULL, own_memory, NULL, "states in the memory of a shard");
    for (int i = 0; i < 3; i++) {
        int first = other[i].first, second = other[i].second;
        ranks_reset();
        procs_run(first > second ? first : second, 30000, other_world, (void *)&other[i]);
        ranks_report("created in a world of %d, used in a world of %d", first, second);
    }
    lost_rank();
    closed_world();
    return tap_done();
}
