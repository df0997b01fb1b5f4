// train/compress/powersgd.h: buckets sent as products of two thin matrices
//
// The algorithm is from Vogels, Karimireddy and Jaggi, PowerSGD (2019), and torch's powerSGD_hook.
// Each iteration makes one step of a power iteration. The power iteration finds the singular
// vectors with the largest singular values of the mean of M over the ranks.
//
//     M  += error                             rows x cols, of this rank
//     P   = M * Q                             rows x rank
//     all_reduce of P                         together with the gradients that are not compressed
//     P   = P with orthonormal columns        equal on all ranks, because P is
//     Q   = transpose(M) * P                  cols x rank
//     all_reduce of Q                         then divided by the number of ranks
//     result = P * transpose(Q)
//     error  = M - result
//
// A rank's error has two parts: the error of the mean, and the difference between the rank's
// gradient and the mean. The second parts of all ranks add up to zero. For example, a gradient of
// 1e20 on one of two ranks leaves 5e19 on that rank and -5e19 on the other. Gradients that are
// added to such errors are lost in rounding. So every rank also sends the size of its P. All ranks
// begin again with M = gradient if the sum of the Ps is much smaller than the sum of their sizes,
// and if M is much larger than the gradient on some rank (idist__powersgd_recover).
//
// The next iteration starts with Q. The two all_reduces send (rows + cols) * rank floats per
// matrix, times 2 (n-1)/n. The first all_reduce runs during the backward pass, the second one in
// idist_ddp_wait.
//
// P and Q are stored by columns. Values that must be equal on all ranks are computed from the
// results of an all_reduce, or drawn from generators with the same seed.
#pragma once

#include "base/fail.h"
#include "base/text.h"
#include "base/log.h"
#include "base/small_float.h"
#include "base/reduce.h"
#include "train/permutation.h"
#include "train/auto.h"
#include "train/norm.h"
#include "train/checkpoint/checkpoint.h"
#include "train/compress/tensor_memory.h"
#include "train/compress/compress.h"

enum { IDIST__POWERSGD_RANK_MAX = 4 };

typedef struct idist__powersgd_matrix {
    size_t first; // index of its first element in the bucket
    size_t count; // elements in the bucket; the rest of rows * cols are zeros
    size_t rows, cols;
    int rank;
    float *p, *q; // point into the state's p and q
} idist__powersgd_matrix;

typedef struct idist__powersgd_state {
    idist__powersgd_matrix *matrices; // in the order of the bucket
    int matrix_count;
    float *error; // per element of the bucket; between start and finish this is M
    float *p;     // P of all matrices, then the gradients that are not compressed, then sizes
    float *sizes; // in p, by matrix: largest absolute value in P, later summed over the ranks
    float *q;     // Q of all matrices
    size_t p_count, q_count, plain_count;
    uint64_t iteration;
    uint64_t recovery_count;
    bool warm; // the next iteration starts with q; otherwise it draws a new q
    idist__twister twister;
} idist__powersgd_state;

static idist_powersgd_desc idist__powersgd_resolve(const idist_powersgd_desc *desc) {
    idist_powersgd_desc resolved;

    memset(&resolved, 0, sizeof resolved);
    if (desc) resolved = *desc;
    if (!resolved.rank) resolved.rank = 1;
    if (resolved.min_compression_rate == 0) resolved.min_compression_rate = 2;

    return resolved;
}

static idist_status idist__powersgd_check(const idist_powersgd_desc *desc) {
    char a[IDIST__NUMBER_NBYTES], b[IDIST__NUMBER_NBYTES];
    double rate = desc->min_compression_rate, epsilon = desc->epsilon;

    if (desc->rank < 0 || desc->rank > IDIST__POWERSGD_RANK_MAX)
        return idist__fail(IDIST_ERR_ARG, "ddp_create: powersgd: rank must be 1 .. %d, got %d",
                           (int)IDIST__POWERSGD_RANK_MAX, desc->rank);
    if (!(rate >= 0 && rate - rate == 0) || !(epsilon >= 0 && epsilon - epsilon == 0))
        return idist__fail(IDIST_ERR_ARG,
                           "ddp_create: powersgd: min_compression_rate and epsilon must not be "
                           "negative, got %s and %s",
                           idist__number_print(a, rate, 6), idist__number_print(b, epsilon, 6));

    return IDIST_OK;
}

// Returns a checksum over the options that must be equal on all ranks.
static int64_t idist__powersgd_digest(const idist_powersgd_desc *desc, int n) {
    idist_powersgd_desc resolved = idist__powersgd_resolve(desc);
    idist__checksum sum = idist__checksum_begin();
    uint64_t words[8];
    int i;

    words[0] = (uint64_t)resolved.rank;
    words[1] = resolved.start_iteration;
    words[2] = resolved.seed;
    memcpy(&words[3], &resolved.min_compression_rate, sizeof words[3]);
    memcpy(&words[4], &resolved.epsilon, sizeof words[4]);
    words[5] = resolved.no_error_feedback;
    words[6] = resolved.no_warm_start;
    words[7] = resolved.rows != NULL;
    idist__checksum_add(&sum, words, sizeof words);

    for (i = 0; i < n && resolved.rows; i++) {
        words[0] = resolved.rows[i];
        idist__checksum_add(&sum, words, sizeof words[0]);
    }

    return (int64_t)idist__checksum_end(&sum);
}

// Frees the state of a bucket. This is the free_fn of the hook.
static void idist__powersgd_free(void *data, void *arg) {
    idist__powersgd_state *state = (idist__powersgd_state *)data;

    (void)arg;
    free(state->matrices);
    free(state->error);
    free(state->p);
    free(state->q);
    free(state);
}

// Adds a matrix to the state of a bucket, unless compressing it would save too little according to
// min_compression_rate.
static void idist__powersgd_add(idist__powersgd_state *state, const idist_powersgd_desc *desc,
                                size_t first, size_t count, size_t rows, size_t cols) {
    idist__powersgd_matrix *matrix = &state->matrices[state->matrix_count];
    size_t least = rows < cols ? rows : cols;
    double sent = ((double)rows + (double)cols) * desc->rank;

    if (!(sent * desc->min_compression_rate < (double)rows * (double)cols)) return;

    matrix->first = first;
    matrix->count = count;
    matrix->rows = rows;
    matrix->cols = cols;
    matrix->rank = (size_t)desc->rank < least ? desc->rank : (int)least;

    state->p_count += rows * (size_t)matrix->rank;
    state->q_count += cols * (size_t)matrix->rank;
    state->plain_count -= count;
    state->matrix_count++;
}

static void idist__powersgd_add_all(idist__powersgd_state *state, const idist_powersgd_desc *desc,
                                    const idist_bucket *b) {
    size_t side = 0;
    int i;

    state->plain_count = b->count;

    if (!desc->rows) {
        while (side * side < b->count) side++;
        idist__powersgd_add(state, desc, 0, b->count, side, side);
        return;
    }

    for (i = 0; i < b->gradient_count; i++) {
        size_t end = i + 1 < b->gradient_count ? b->displs[i + 1] : b->count;
        size_t count = end - b->displs[i], rows = desc->rows[b->gradients[i]];

        if (rows && count)
            idist__powersgd_add(state, desc, b->displs[i], count, rows, count / rows);
    }
}

// Allocates the state of a bucket. After a failure the bucket may have an incomplete state, which
// idist__powersgd_free frees.
static idist_status idist__powersgd_alloc(const idist__reduction *reduction, idist_bucket *b) {
    idist__powersgd_state *state = (idist__powersgd_state *)calloc(1, sizeof *state);
    size_t gradients = (size_t)b->gradient_count, floats;
    float *p, *q;
    int i;

    b->state = state;
    if (state)
        state->matrices = (idist__powersgd_matrix *)calloc(gradients + 1, sizeof *state->matrices);

    if (state && state->matrices) {
        idist__powersgd_add_all(state, &reduction->powersgd, b);
        state->error = (float *)calloc(b->count + 1, sizeof *state->error);
        floats = state->p_count + state->plain_count + (size_t)state->matrix_count + 1;
        state->p = (float *)calloc(floats, sizeof *state->p);
        state->q = (float *)calloc(state->q_count + 1, sizeof *state->q);
    }

    if (!state || !state->error || !state->p || !state->q)
        return idist__fail(IDIST_ERR_NO_MEMORY, "ddp_create: no memory to compress a bucket");

    state->sizes = state->p + state->p_count + state->plain_count;

    for (i = 0, p = state->p, q = state->q; i < state->matrix_count; i++) {
        idist__powersgd_matrix *matrix = &state->matrices[i];

        matrix->p = p;
        matrix->q = q;
        p += matrix->rows * (size_t)matrix->rank;
        q += matrix->cols * (size_t)matrix->rank;
    }

    idist__twister_seed_array(&state->twister, reduction->powersgd.seed + (uint64_t)b->index);

    return IDIST_OK;
}

// Returns the dot product of a and b. Keeps eight sums, which a compiler may hold in a vector.
IDIST__VECTORIZE static float idist__powersgd_dot(const float *a, const float *b, size_t count) {
    float sums[8] = {0, 0, 0, 0, 0, 0, 0, 0}, rest = 0;
    size_t i;
    int k;

    for (i = 0; i + 8 <= count; i += 8)
        for (k = 0; k < 8; k++) sums[k] += a[i + (size_t)k] * b[i + (size_t)k];
    for (; i < count; i++) rest += a[i] * b[i];

    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) +
           ((sums[4] + sums[5]) + (sums[6] + sums[7])) + rest;
}

// Computes to += factor * from.
IDIST__VECTORIZE static void idist__powersgd_add_scaled(float *to, const float *from, size_t count,
                                                        float factor) {
    size_t i;

    for (i = 0; i < count; i++) to[i] += factor * from[i];
}

// Fills a column with random numbers. Each number is a sum of twelve uniform numbers, so its
// distribution is nearly normal. That is sufficient, because the columns are made orthogonal.
static void idist__powersgd_draw(idist__twister *twister, float *column, size_t count) {
    size_t i;

    for (i = 0; i < count; i++) {
        double sum = -6;
        int k;

        for (k = 0; k < 12; k++) sum += idist__twister_next(twister) / 4294967296.0;
        column[i] = (float)sum;
    }
}

static double idist__powersgd_norm(const float *column, size_t count) {
    double squares = 0;
    size_t i;

    for (i = 0; i < count; i++) squares += (double)column[i] * (double)column[i];
    return idist__norm_root(squares);
}

// Makes column k orthogonal to the columns before it, and normalizes it. Subtracts the projections
// twice, because the rounding errors of the first pass are not small if little of the column is
// left. Returns false if nothing but rounding errors is left.
static bool idist__powersgd_separate(float *columns, size_t count, int k, double epsilon) {
    float *column = columns + (size_t)k * count;
    double before = idist__powersgd_norm(column, count), norm, inverse;
    size_t i;
    int turn;

    for (turn = 0; turn < 2 * k; turn++) {
        const float *base = columns + (size_t)(turn % k) * count;

        idist__powersgd_add_scaled(column, base, count, -idist__powersgd_dot(base, column, count));
    }

    norm = idist__powersgd_norm(column, count);
    if (!(norm > 1e-6 * before)) return false;
    inverse = 1 / (norm + epsilon);
    for (i = 0; i < count; i++) column[i] = (float)(column[i] * inverse);

    return true;
}

// Orthogonalizes columns by modified Gram-Schmidt. If a column depends linearly on the columns
// before it, replaces it with a random column. If `twister` is NULL, or if the random column
// depends on these columns too, sets the column to zero.
static void idist__powersgd_orthogonalize(float *columns, size_t count, int rank, double epsilon,
                                          idist__twister *twister) {
    int k;

    for (k = 0; k < rank; k++) {
        float *column = columns + (size_t)k * count;

        if (idist__powersgd_separate(columns, count, k, epsilon)) continue;
        if (twister) idist__powersgd_draw(twister, column, count);
        if (twister && idist__powersgd_separate(columns, count, k, epsilon)) continue;
        memset(column, 0, count * sizeof *column);
    }
}

// Returns the number of elements of row i that are in the bucket, and sets *first to the index of
// the first one.
static size_t idist__powersgd_row(const idist__powersgd_matrix *matrix, size_t i, size_t *first) {
    size_t before = i * matrix->cols;

    *first = matrix->first + before;
    if (before >= matrix->count) return 0;

    return matrix->count - before < matrix->cols ? matrix->count - before : matrix->cols;
}

// Computes P = M * Q.
static void idist__powersgd_project(const idist__powersgd_matrix *matrix, const float *m) {
    size_t i, first;
    int k;

    for (i = 0; i < matrix->rows; i++) {
        size_t count = idist__powersgd_row(matrix, i, &first);

        for (k = 0; k < matrix->rank; k++)
            matrix->p[(size_t)k * matrix->rows + i] =
                idist__powersgd_dot(m + first, matrix->q + (size_t)k * matrix->cols, count);
    }
}

// Computes Q = transpose(M) * P.
static void idist__powersgd_project_back(const idist__powersgd_matrix *matrix, const float *m) {
    size_t i, first;
    int k;

    memset(matrix->q, 0, matrix->cols * (size_t)matrix->rank * sizeof *matrix->q);

    for (i = 0; i < matrix->rows; i++) {
        size_t count = idist__powersgd_row(matrix, i, &first);

        for (k = 0; k < matrix->rank; k++)
            idist__powersgd_add_scaled(matrix->q + (size_t)k * matrix->cols, m + first, count,
                                       matrix->p[(size_t)k * matrix->rows + i]);
    }
}

static bool idist__powersgd_is_finite(const float *x, size_t count) {
    float sum = 0;
    size_t i;

    for (i = 0; i < count; i++) sum += x[i] - x[i]; // NaN for NaN and infinity, otherwise 0

    return sum == 0;
}

// Returns the largest absolute value in x, ignoring NaN.
IDIST__VECTORIZE static float idist__powersgd_size(const float *x, size_t count) {
    float largest = 0;
    size_t i;

    for (i = 0; i < count; i++) {
        float size = x[i] < 0 ? -x[i] : x[i];

        largest = size > largest ? size : largest;
    }

    return largest;
}

// Returns the largest absolute value of `count` elements of a bucket, beginning at `first`.
static float idist__powersgd_size_of_gradient(const idist_bucket *b, size_t first, size_t count) {
    const double *doubles = (const double *)b->data + first;
    double largest = 0;
    size_t i;

    if (b->dtype == IDIST_F32) return idist__powersgd_size((const float *)b->data + first, count);

    for (i = 0; i < count; i++) {
        double size = doubles[i] < 0 ? -doubles[i] : doubles[i];

        largest = size > largest ? size : largest;
    }

    return (float)largest;
}

// Adds `count` elements of a bucket, beginning at `first`, to `to`.
IDIST__VECTORIZE static void idist__powersgd_get(const idist_bucket *b, size_t first, float *to,
                                                 size_t count) {
    const float *floats = (const float *)b->data + first;
    const double *doubles = (const double *)b->data + first;
    size_t i;

    if (b->dtype == IDIST_F32)
        for (i = 0; i < count; i++) to[i] += floats[i];
    else
        for (i = 0; i < count; i++) to[i] += (float)doubles[i];
}

IDIST__VECTORIZE static void idist__powersgd_set(const idist_bucket *b, size_t first,
                                                 const float *from, size_t count, float factor) {
    float *floats = (float *)b->data + first;
    double *doubles = (double *)b->data + first;
    size_t i;

    if (b->dtype == IDIST_F32)
        for (i = 0; i < count; i++) floats[i] = factor * from[i];
    else
        for (i = 0; i < count; i++) doubles[i] = (double)(factor * from[i]);
}

enum { IDIST__POWERSGD_PIECE = 256 }; // elements of a row computed at a time

// Computes product = P * transpose(Q), writes factor * product to the bucket, and subtracts product
// from M. If Q is not finite, all results of the matrix are NaN, and Q and the errors of the matrix
// become zero.
static void idist__powersgd_expand(const idist_bucket *b, const idist__powersgd_matrix *matrix,
                                   float *m, float factor) {
    size_t i, j, first, count, q_count = matrix->cols * (size_t)matrix->rank;
    bool finite = idist__powersgd_is_finite(matrix->q, q_count);
    float product[IDIST__POWERSGD_PIECE];
    int k;

    if (!finite) factor = idist__small_float_from_bits(0x7fc00000u);

    for (i = 0; i < matrix->rows; i++) {
        size_t rest = idist__powersgd_row(matrix, i, &first);

        for (j = 0; rest; j += count, first += count, rest -= count) {
            count = rest < IDIST__POWERSGD_PIECE ? rest : (size_t)IDIST__POWERSGD_PIECE;
            memset(product, 0, sizeof product);

            for (k = 0; k < matrix->rank && finite; k++)
                idist__powersgd_add_scaled(product, matrix->q + (size_t)k * matrix->cols + j, count,
                                           matrix->p[(size_t)k * matrix->rows + i]);

            idist__powersgd_set(b, first, product, count, factor);
            idist__powersgd_add_scaled(m + first, product, count, -1);
            if (!finite) memset(m + first, 0, count * sizeof *m);
        }
    }

    if (!finite) memset(matrix->q, 0, q_count * sizeof *matrix->q);
}

// Copies the gradients that are not compressed to the memory after the Ps. If `back` is set, scales
// them and copies them back instead.
static void idist__powersgd_copy_plain(const idist_bucket *b, const idist__powersgd_state *state,
                                       bool back) {
    float *plain = state->p + state->p_count;
    size_t at = 0, count;
    int i;

    if (!back) memset(plain, 0, state->plain_count * sizeof *plain);

    for (i = 0; i <= state->matrix_count; i++) {
        count = (i < state->matrix_count ? state->matrices[i].first : b->count) - at;
        if (back) idist__powersgd_set(b, at, plain, count, (float)b->scale);
        else idist__powersgd_get(b, at, plain, count);
        plain += count;
        at += count;
        if (i < state->matrix_count) at += state->matrices[i].count;
    }
}

static idist_status idist__powersgd_start(idist_bucket *b, void *arg) {
    const idist__reduction *reduction = (const idist__reduction *)arg;
    const idist_powersgd_desc *desc = &reduction->powersgd;
    idist__powersgd_state *state = (idist__powersgd_state *)b->state;
    int k;

    if (state->iteration < desc->start_iteration)
        return idist_all_reduce(b->data, b->data, b->count, b->dtype, reduction->op, &b->opts);

    if (!state->warm) memset(state->q, 0, state->q_count * sizeof *state->q);
    state->warm = !desc->no_warm_start;

    for (k = 0; k < state->matrix_count; k++) {
        const idist__powersgd_matrix *matrix = &state->matrices[k];
        float *m = state->error + matrix->first;

        if (desc->no_error_feedback) memset(m, 0, matrix->count * sizeof *m);
        idist__powersgd_get(b, matrix->first, m, matrix->count);
        idist__powersgd_orthogonalize(matrix->q, matrix->cols, matrix->rank, desc->epsilon,
                                      &state->twister);
        idist__powersgd_project(matrix, state->error);
        state->sizes[k] = idist__powersgd_size(matrix->p, matrix->rows * (size_t)matrix->rank);
    }

    idist__powersgd_copy_plain(b, state, false);

    return idist_all_reduce(state->p, state->p,
                            state->p_count + state->plain_count + (size_t)state->matrix_count,
                            IDIST_F32, IDIST_SUM, &b->opts);
}

// Warns on the first rank of the group, and only if the count is a power of 2, so that warnings
// become rare.
static void idist__powersgd_warn(const idist_bucket *b, const idist__powersgd_matrix *matrix,
                                 uint64_t count) {
    idist__log without_world;
    const idist__log *log = idist__auto_log_of(b->opts.group, &without_world);
    int i = 0;

    if (!log || idist_group_rank(b->opts.group) != 0 || (count & (count - 1)) != 0) return;
    while (i + 1 < b->gradient_count && b->displs[i + 1] <= matrix->first) i++;
    idist__log_print(
        log, IDIST_LOG_WARN,
        "ddp: PowerSGD: bucket %d: the error feedback from gradient %d on was so large "
        "that gradients were lost in rounding, as after a gradient that is far too "
        "large on one rank; all ranks dropped it (%llu times so far)",
        b->index, b->gradients[i], (unsigned long long)count);
}

// Checks whether the errors of some rank have made the sum of the Ps worthless. If so, all ranks
// drop the errors of the matrix and compute P again without them. All ranks make the same decision,
// because it depends only on sums over the ranks. Collective.
static idist_status idist__powersgd_recover(const idist_bucket *b,
                                            const idist__reduction *reduction,
                                            idist__powersgd_state *state, int k) {
    const idist__powersgd_matrix *matrix = &state->matrices[k];
    size_t p_count = matrix->rows * (size_t)matrix->rank;
    float *m = state->error + matrix->first, own, sum = 0;
    idist_status status;

    if (!idist__powersgd_is_finite(matrix->p, p_count)) return IDIST_OK;
    if (!(idist__powersgd_size(matrix->p, p_count) < state->sizes[k] / 65536)) return IDIST_OK;

    // The sum may also be small because the gradients cancel out. In that case M is not much larger
    // than the gradient on any rank.
    own = idist__powersgd_size_of_gradient(b, matrix->first, matrix->count);
    own = idist__powersgd_size(m, matrix->count) / 4096 > own ? 1.0f : 0.0f;
    status = idist_all_reduce(&own, &sum, 1, IDIST_F32, IDIST_SUM, &b->opts);
    if (status != IDIST_OK || sum == 0) return status;

    memset(m, 0, matrix->count * sizeof *m);
    idist__powersgd_get(b, matrix->first, m, matrix->count);
    memset(matrix->q, 0, matrix->cols * (size_t)matrix->rank * sizeof *matrix->q);
    idist__powersgd_orthogonalize(matrix->q, matrix->cols, matrix->rank,
                                  reduction->powersgd.epsilon, &state->twister);
    idist__powersgd_project(matrix, state->error);
    idist__powersgd_warn(b, matrix, ++state->recovery_count);

    return idist_all_reduce(matrix->p, matrix->p, p_count, IDIST_F32, IDIST_SUM, &b->opts);
}

static idist_status idist__powersgd_finish(idist_bucket *b, void *arg) {
    const idist__reduction *reduction = (const idist__reduction *)arg;
    const idist_powersgd_desc *desc = &reduction->powersgd;
    idist__powersgd_state *state = (idist__powersgd_state *)b->state;
    double ranks = reduction->group_size;
    idist_status status = IDIST_OK;
    int k;

    if (state->iteration++ < desc->start_iteration)
        return idist__tensor_memory_scale(&reduction->memory, b->data, b->count, b->dtype,
                                          reduction->postscale);

    for (k = 0; k < state->matrix_count && status == IDIST_OK; k++)
        status = idist__powersgd_recover(b, reduction, state, k);
    if (status != IDIST_OK) return status;

    for (k = 0; k < state->matrix_count; k++) {
        const idist__powersgd_matrix *matrix = &state->matrices[k];
        bool finite = idist__powersgd_is_finite(matrix->p, matrix->rows * (size_t)matrix->rank);

        idist__powersgd_orthogonalize(matrix->p, matrix->rows, matrix->rank, desc->epsilon, NULL);
        idist__powersgd_project_back(matrix, state->error);
        if (!finite) matrix->q[0] = idist__small_float_from_bits(0x7fc00000u);
    }

    if (state->q_count)
        status =
            idist_all_reduce(state->q, state->q, state->q_count, IDIST_F32, IDIST_SUM, &b->opts);
    if (status != IDIST_OK) return status;
    idist__reduce_scale(state->q, state->q_count, IDIST_F32, 1 / ranks);

    for (k = 0; k < state->matrix_count; k++)
        idist__powersgd_expand(b, &state->matrices[k], state->error, (float)(b->scale * ranks));
    idist__powersgd_copy_plain(b, state, true);

    return IDIST_OK;
}
