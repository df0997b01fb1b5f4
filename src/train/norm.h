// train/norm.h: the norm of gradients, and clipping by it
#pragma once

#include "base/fail.h"
#include "base/text.h"
#include "base/dtype.h"
#include "base/isa.h"
#include "base/small_float.h"
#include "base/reduce.h"
#include "train/agree.h"

// Returns the square root of x by Newton's method, starting from half the exponent. The function
// sqrt would need -lm. The last bit may differ from the result of sqrt.
static double idist__norm_root(double x) {
    double root;
    uint64_t bits;
    int i;

    if (!(x > 0)) return 0;
    // A subnormal number has no exponent to halve, so scale it up.
    if (x < 1e-290) return idist__norm_root(x * 1e280) * 1e-140;

    memcpy(&bits, &x, sizeof bits);
    bits = (bits >> 1) + ((uint64_t)1023 << 51);
    memcpy(&root, &bits, sizeof root);
    for (i = 0; i < 5; i++) root = 0.5 * (root + x / root);

    return root;
}

#define IDIST__NORM_PIECE 256 // elements converted to double at a time

// Converts elements first .. first + count - 1 to double.
static void idist__norm_read(const idist_tensor *tensor, size_t first, size_t count, double *x) {
    const char *from = (const char *)tensor->data + first * idist_dtype_size(tensor->dtype);
    float wide[IDIST__NORM_PIECE];
    size_t i;

    if (tensor->dtype == IDIST_F64) {
        memcpy(x, from, count * sizeof *x);
        return;
    }

    if (tensor->dtype == IDIST_F32) memcpy(wide, from, count * sizeof *wide);
    else idist__small_float_widen(wide, from, count, tensor->dtype);
    for (i = 0; i < count; i++) x[i] = (double)wide[i];
}

static double idist__norm_squares(const idist_tensor *tensor) {
    double x[IDIST__NORM_PIECE], sum[4] = {0, 0, 0, 0};
    size_t first, i, count;

    for (first = 0; first < tensor->count; first += count) {
        count = tensor->count - first;
        if (count > IDIST__NORM_PIECE) count = IDIST__NORM_PIECE;
        idist__norm_read(tensor, first, count, x);
        for (i = count; i < IDIST__NORM_PIECE; i++) x[i] = 0;

        for (i = 0; i < IDIST__NORM_PIECE; i += 4) { // four chains, to hide the latency of the adds
            sum[0] += x[i] * x[i];
            sum[1] += x[i + 1] * x[i + 1];
            sum[2] += x[i + 2] * x[i + 2];
            sum[3] += x[i + 3] * x[i + 3];
        }
    }

    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

static idist_status idist__norm_check(const idist_tensor *grads, int n, double max_norm) {
    char text[IDIST__NUMBER_NBYTES];
    int i;

    if (n < 0 || (n && !grads))
        return idist__fail(IDIST_ERR_ARG, "clip_grad_norm: %d gradients, or grads is NULL", n);
    if (!(max_norm >= 0))
        return idist__fail(IDIST_ERR_ARG, "clip_grad_norm: max_norm must not be negative, got %s",
                           idist__number_print(text, max_norm, 6));

    for (i = 0; i < n; i++) {
        if (!idist__dtype_is_float(grads[i].dtype) || !idist_dtype_size(grads[i].dtype))
            return idist__fail(
                IDIST_ERR_ARG,
                "clip_grad_norm: gradients must be of a floating dtype; gradient %d is %s", i,
                idist_dtype_name(grads[i].dtype));
        if (grads[i].count && !grads[i].data)
            return idist__fail(IDIST_ERR_ARG, "clip_grad_norm: gradient %d is NULL", i);
    }

    return IDIST_OK;
}

static idist_status idist__norm_clip(const idist_tensor *grads, int n, double max_norm, bool shared,
                                     double *norm, const idist_opts *opts) {
    double squares = 0, before, factor;
    int i;
    idist_opts own_opts;
    idist_status status = shared ? IDIST_OK : idist__agree_enter("clip_grad_norm", opts, &own_opts);

    if (status != IDIST_OK) return status;
    status = idist__norm_check(grads, n, max_norm);
    if (!shared) status = idist__agree(status, &own_opts);
    if (status != IDIST_OK) return status;

    for (i = 0; i < n; i++) squares += idist__norm_squares(&grads[i]);
    if (!shared) status = idist_all_reduce(&squares, &squares, 1, IDIST_F64, IDIST_SUM, &own_opts);
    if (status != IDIST_OK) return status;
    if (!(squares - squares == 0))
        return idist__fail(
            IDIST_ERR_ARG,
            "clip_grad_norm: the norm of the gradients is not finite; nothing was scaled");

    before = idist__norm_root(squares);
    if (norm) *norm = before;
    factor = max_norm / (before + 1e-6);
    for (i = 0; i < n && factor < 1; i++)
        idist__reduce_scale(grads[i].data, grads[i].count, grads[i].dtype, factor);

    return IDIST_OK;
}

idist_status idist_clip_grad_norm(const idist_tensor *grads, int n, double max_norm, bool shared,
                                  double *norm, const idist_opts *opts) {
    uint32_t mode = idist__mode_enter(); // all ranks scale by the same factor
    idist_status status = idist__norm_clip(grads, n, max_norm, shared, norm, opts);

    idist__mode_leave(mode);
    return status;
}
