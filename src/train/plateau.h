// train/plateau.h: a rate that falls when a metric stops improving
//
// Follows torch's ReduceLROnPlateau, with the same formulas, so that the rates are equal bit by bit
// after any number of updates. On i386, the x87 unit rounds differently.
#pragma once

#include "base/fail.h"
#include "base/text.h"
#include "base/small_float.h"
#include "train/schedule.h"

// Replaces fields that are 0 or negative by the values that they mean.
static idist_plateau idist__plateau_resolve(const idist_plateau *plateau) {
    idist_plateau resolved = *plateau;

    if (resolved.factor == 0) resolved.factor = 0.1;
    if (resolved.eps == 0) resolved.eps = 1e-8;
    if (resolved.eps < 0) resolved.eps = 0;
    if (resolved.threshold == 0) resolved.threshold = 1e-4;
    if (resolved.threshold < 0) resolved.threshold = 0;
    if (resolved.patience == 0) resolved.patience = 10;
    if (resolved.patience < 0) resolved.patience = 0;

    return resolved;
}

static idist_status idist__plateau_check_state(const idist_plateau *plateau) {
    char text[IDIST__NUMBER_NBYTES];

    if (plateau->bad_count < 0 || plateau->cooldown_left < 0)
        return idist__fail(IDIST_ERR_ARG,
                           "plateau_update: bad_count and cooldown_left must not be negative, got "
                           "%d and %d",
                           plateau->bad_count, plateau->cooldown_left);
    if (plateau->best != plateau->best)
        return idist__fail(IDIST_ERR_ARG, "plateau_update: best is %s",
                           idist__number_print(text, plateau->best, 6));

    return IDIST_OK;
}

// Checks the fields of the program that idist__plateau_resolve may replace.
static idist_status idist__plateau_check_given(const idist_plateau *plateau) {
    char a[IDIST__NUMBER_NBYTES], b[IDIST__NUMBER_NBYTES];

    if (!(plateau->factor >= 0 && plateau->factor < 1))
        return idist__fail(IDIST_ERR_ARG,
                           "plateau_update: factor must be above 0 and below 1, got %s",
                           idist__number_print(a, plateau->factor, 6));
    if (idist__schedule_is_finite(plateau->eps) && idist__schedule_is_finite(plateau->threshold))
        return IDIST_OK;

    return idist__fail(IDIST_ERR_ARG,
                       "plateau_update: eps and threshold must be finite, got %s and %s",
                       idist__number_print(a, plateau->eps, 6),
                       idist__number_print(b, plateau->threshold, 6));
}

// Checks the fields after idist__plateau_resolve.
static idist_status idist__plateau_check(const idist_plateau *plateau) {
    char text[IDIST__NUMBER_NBYTES];

    if (!(plateau->value >= 0 && idist__schedule_is_finite(plateau->value)))
        return idist__fail(IDIST_ERR_ARG,
                           "plateau_update: value must be finite and not negative, got %s",
                           idist__number_print(text, plateau->value, 6));
    if (!idist__schedule_is_finite(plateau->min_value))
        return idist__fail(IDIST_ERR_ARG, "plateau_update: min_value must be finite, got %s",
                           idist__number_print(text, plateau->min_value, 6));
    if (!plateau->absolute && !plateau->high_is_best && plateau->threshold >= 1)
        return idist__fail(IDIST_ERR_ARG,
                           "plateau_update: a threshold that is a fraction must be below 1, got %s",
                           idist__number_print(text, plateau->threshold, 6));
    if (plateau->cooldown < 0)
        return idist__fail(IDIST_ERR_ARG, "plateau_update: cooldown must not be negative, got %d",
                           plateau->cooldown);

    return idist__plateau_check_state(plateau);
}

// Returns true if a metric is better than the best metric by more than the threshold. Returns false
// for a NaN.
static bool idist__plateau_is_better(const idist_plateau *plateau, double metric) {
    double best = plateau->best, threshold = plateau->threshold;

    if (plateau->high_is_best)
        return metric > (plateau->absolute ? best + threshold : best * (1 + threshold));
    return metric < (plateau->absolute ? best - threshold : best * (1 - threshold));
}

// Lowers the rate, unless the decrease is not larger than eps.
static void idist__plateau_lower(idist_plateau *plateau) {
    double lower = plateau->value * plateau->factor;

    if (lower < plateau->min_value) lower = plateau->min_value;
    if (plateau->value - lower > plateau->eps) plateau->value = lower;
}

idist_status idist_plateau_update(idist_plateau *plateau, double metric) {
    idist_plateau now; // with all fields resolved
    idist_status status;
    bool is_better;

    if (!plateau) return idist__fail(IDIST_ERR_ARG, "plateau_update: plateau is NULL");
    status = idist__plateau_check_given(plateau); // before NaN could pass for 0, with -Ofast
    if (status != IDIST_OK) return status;
    now = idist__plateau_resolve(plateau);
    status = idist__plateau_check(&now);
    if (status != IDIST_OK) return status;

    if (!now.begun) {
        now.best = (double)idist__small_float_from_bits(0x7f800000u); // infinity
        if (now.high_is_best) now.best = -now.best;
    }

    is_better = idist__plateau_is_better(&now, metric);
    if (is_better) now.best = metric;

    if (now.cooldown_left > 0) {
        now.cooldown_left--;
        now.bad_count = 0;
    } else if (is_better) {
        now.bad_count = 0;
    } else if (now.bad_count < now.patience) {
        now.bad_count++;
    } else {
        idist__plateau_lower(&now);
        now.cooldown_left = now.cooldown;
        now.bad_count = 0;
    }

    plateau->value = now.value;
    plateau->best = now.best;
    plateau->bad_count = now.bad_count;
    plateau->cooldown_left = now.cooldown_left;
    plateau->begun = true;

    return IDIST_OK;
}
