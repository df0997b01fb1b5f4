// train/grad_scaler.h: the scale of the loss, for gradients with few bits
//
// The rules are those of torch.amp.GradScaler. As in torch, the scale and its reciprocal are
// floats. Both are computed in a floating-point mode that is the same on all ranks.
#pragma once

#include "base/fail.h"
#include "base/text.h"
#include "base/isa.h"
#include "base/reduce.h"
#include "train/agree.h"
#include "train/convert.h"

#define IDIST__GRAD_SCALER_LEAST 1.1754943508222875e-38 // 2^-126
#define IDIST__GRAD_SCALER_MOST 3.4028234663852886e38   // the largest float

float idist_grad_scaler_scale(const idist_grad_scaler *scaler) {
    return scaler && scaler->scale != 0 ? scaler->scale : 65536.0f;
}

static double idist__grad_scaler_growth(const idist_grad_scaler *scaler) {
    return scaler->growth_factor != 0 ? scaler->growth_factor : 2;
}

static double idist__grad_scaler_backoff(const idist_grad_scaler *scaler) {
    return scaler->backoff_factor != 0 ? scaler->backoff_factor : 0.5;
}

// Checks the scale and the factors of a scaler.
static idist_status idist__grad_scaler_check(const char *name, const idist_grad_scaler *scaler) {
    char text[IDIST__NUMBER_NBYTES];
    double scale, growth, backoff;

    if (!scaler) return idist__fail(IDIST_ERR_ARG, "%s: scaler is NULL", name);
    scale = (double)idist_grad_scaler_scale(scaler);
    growth = idist__grad_scaler_growth(scaler);
    backoff = idist__grad_scaler_backoff(scaler);

    if (!(scale >= IDIST__GRAD_SCALER_LEAST && scale - scale == 0))
        return idist__fail(IDIST_ERR_ARG, "%s: scale must be finite and at least 2^-126, got %s",
                           name, idist__number_print(text, scale, 6));
    if (!(growth > 1 && growth - growth == 0))
        return idist__fail(IDIST_ERR_ARG, "%s: growth_factor must be finite and above 1, got %s",
                           name, idist__number_print(text, growth, 6));
    if (!(backoff > 0 && backoff < 1))
        return idist__fail(IDIST_ERR_ARG, "%s: backoff_factor must be above 0 and below 1, got %s",
                           name, idist__number_print(text, backoff, 6));
    if (scaler->growth_interval < 0)
        return idist__fail(IDIST_ERR_ARG, "%s: growth_interval must not be negative, got %d", name,
                           scaler->growth_interval);
    if (scaler->growth_tracker < 0)
        return idist__fail(IDIST_ERR_ARG, "%s: growth_tracker must not be negative, got %d", name,
                           scaler->growth_tracker);

    return IDIST_OK;
}

static idist_status idist__grad_scaler_check_grads(const idist_tensor *grads, int n) {
    const char *name = "grad_scaler_unscale";
    int i;

    if (n < 0 || (n && !grads))
        return idist__fail(IDIST_ERR_ARG, "%s: %d gradients, or grads is NULL", name, n);

    for (i = 0; i < n; i++) {
        idist_dtype dtype = grads[i].dtype;

        if (dtype != IDIST_F32 && dtype != IDIST_F64 && dtype != IDIST_BF16)
            return idist__fail(IDIST_ERR_ARG,
                               "%s: gradients must be F32, F64 or BF16, but gradient %d is %s; "
                               "idist_convert makes F32 of F16",
                               name, i, idist_dtype_name(dtype));
        if (grads[i].count && !grads[i].data)
            return idist__fail(IDIST_ERR_ARG, "%s: gradient %d is NULL", name, i);
    }

    return IDIST_OK;
}

// Returns true if one of the elements is infinite or NaN: if all bits of its exponent are set.
static bool idist__grad_scaler_overflows(const char *at, size_t count, idist_dtype dtype) {
    const uint64_t all_f64 = UINT64_C(0x7ff0000000000000);
    const uint32_t all_f32 = 0x7f800000u, all_bf16 = 0x7f80u;
    uint64_t f64;
    uint32_t f32;
    uint16_t bf16;
    bool found = false;
    size_t i;

    for (i = 0; i < count && dtype == IDIST_F32; i++) {
        memcpy(&f32, at + i * sizeof f32, sizeof f32);
        found |= (f32 & all_f32) == all_f32;
    }

    for (i = 0; i < count && dtype == IDIST_F64; i++) {
        memcpy(&f64, at + i * sizeof f64, sizeof f64);
        found |= (f64 & all_f64) == all_f64;
    }

    for (i = 0; i < count && dtype == IDIST_BF16; i++) {
        memcpy(&bf16, at + i * sizeof bf16, sizeof bf16);
        found |= (bf16 & all_bf16) == all_bf16;
    }

    return found;
}

enum { IDIST__GRAD_SCALER_PIECE = 4096 }; // elements that are read twice, while they are cached

// Multiplies a gradient by a factor. Returns true if it had an infinite element or a NaN.
static bool idist__grad_scaler_multiply(const idist_tensor *gradient, double factor) {
    size_t first, count;
    bool found = false;

    for (first = 0; first < gradient->count; first += count) {
        char *at = idist__convert_at(gradient, first);

        count = gradient->count - first;
        if (count > IDIST__GRAD_SCALER_PIECE) count = IDIST__GRAD_SCALER_PIECE;
        if (idist__grad_scaler_overflows(at, count, gradient->dtype)) found = true;
        idist__reduce_scale(at, count, gradient->dtype, factor);
    }

    return found;
}

static double idist__grad_scaler_reciprocal(const idist_grad_scaler *scaler) {
    uint32_t mode = idist__mode_enter();
    float reciprocal = (float)(1 / (double)idist_grad_scaler_scale(scaler));

    idist__mode_leave(mode);
    return (double)reciprocal;
}

idist_status idist_grad_scaler_unscale(idist_grad_scaler *scaler, const idist_tensor *grads, int n,
                                       bool shared, const idist_opts *opts) {
    const char *name = "grad_scaler_unscale";
    uint8_t found = 0;
    double factor;
    int i;
    idist_opts own_opts;
    idist_status status = shared ? IDIST_OK : idist__agree_enter(name, opts, &own_opts);

    if (status != IDIST_OK) return status;
    status = idist__grad_scaler_check(name, scaler);
    if (status == IDIST_OK && scaler->unscaled)
        status = idist__fail(IDIST_ERR_STATE,
                             "%s: the gradients of this iteration are unscaled already; call "
                             "grad_scaler_update before the next",
                             name);
    if (status == IDIST_OK) status = idist__grad_scaler_check_grads(grads, n);
    if (!shared) status = idist__agree(status, &own_opts);
    if (status != IDIST_OK) return status;

    factor = idist__grad_scaler_reciprocal(scaler);
    for (i = 0; i < n; i++)
        if (idist__grad_scaler_multiply(&grads[i], factor)) found = 1;
    if (!shared) status = idist_all_reduce(&found, &found, 1, IDIST_U8, IDIST_MAX, &own_opts);
    if (status != IDIST_OK) return status;

    scaler->unscaled = true;
    scaler->found_inf = found;

    return IDIST_OK;
}

// Sets the scale and the growth tracker at the end of an iteration.
static void idist__grad_scaler_adapt(idist_grad_scaler *scaler) {
    double scale = (double)idist_grad_scaler_scale(scaler), grown;
    int interval = scaler->growth_interval ? scaler->growth_interval : 2000;

    if (scaler->found_inf) {
        scale *= idist__grad_scaler_backoff(scaler);
        scaler->growth_tracker = 0;
    } else if (scaler->growth_tracker < interval - 1) {
        scaler->growth_tracker++;
    } else {
        grown = scale * idist__grad_scaler_growth(scaler);
        if (grown <= IDIST__GRAD_SCALER_MOST) scale = grown;
        scaler->growth_tracker = 0;
    }

    if (scale < IDIST__GRAD_SCALER_LEAST) scale = IDIST__GRAD_SCALER_LEAST;
    scaler->scale = (float)scale;
}

idist_status idist_grad_scaler_update(idist_grad_scaler *scaler) {
    const char *name = "grad_scaler_update";
    uint32_t mode;
    idist_status status = idist__grad_scaler_check(name, scaler);

    if (status != IDIST_OK) return status;
    if (!scaler->unscaled)
        return idist__fail(IDIST_ERR_STATE, "%s: no gradients were unscaled since the last update",
                           name);

    mode = idist__mode_enter();
    idist__grad_scaler_adapt(scaler);
    idist__mode_leave(mode);
    scaler->unscaled = false;
    scaler->found_inf = false;

    return IDIST_OK;
}
