// train/schedule.h: values that follow the step, such as the learning rate
//
// The functions log, exp and sin would need -lm, so this file sums series instead. The series are
// so long that their next term would be below the last bit of a double.
#pragma once

#include "base/fail.h"
#include "base/text.h"
#include "base/small_float.h"

static const double idist__schedule_ln_2 = 0.69314718055994530942;
static const double idist__schedule_half_pi = 1.57079632679489661923;

// Returns the natural logarithm of x, which is positive. Writes x as m * 2^e with m near 1, and
// ln(m) as 2 * artanh((m - 1) / (m + 1)).
static double idist__schedule_log(double x) {
    double z, sum = 0;
    int k, exponent = 0;

    for (; x > 1.5; x /= 2) exponent++;
    for (; x < 0.75; x *= 2) exponent--;

    z = (x - 1) / (x + 1);
    for (k = 27; k >= 1; k -= 2) sum = sum * z * z + 1.0 / k;

    return exponent * idist__schedule_ln_2 + 2 * z * sum;
}

// Returns e^x. Writes x as a multiple of ln 2 plus a remainder, sums Taylor's series for the
// remainder, and then doubles or halves the sum.
static double idist__schedule_exp(double x) {
    double sum = 1;
    int k, doublings;

    if (x < -746) return 0;
    if (x > 710) x = 710; // the result is infinite

    doublings = (int)(x / idist__schedule_ln_2);
    x -= doublings * idist__schedule_ln_2;
    for (k = 18; k >= 1; k--) sum = 1 + sum * x / k;

    for (; doublings > 0; doublings--) sum *= 2;
    for (; doublings < 0; doublings++) sum /= 2;

    return sum;
}

// Returns value * x^exponent for x >= 0, even if x^exponent alone is too large or too small for a
// double.
static double idist__schedule_scaled(double value, double x, double exponent) {
    double size = value < 0 ? -value : value, scaled;

    if (value == 0 || exponent == 0) return value;
    if (exponent == 1 || x == 0) return value * x;
    scaled = idist__schedule_exp(idist__schedule_log(size) + exponent * idist__schedule_log(x));
    if (x <= 1 && scaled > size) scaled = size; // rounded up, perhaps to infinity

    return value < 0 ? -scaled : scaled;
}

// Returns the value at `left` on half a cosine: `to` at left = 0 and `from` at left = 1, exact at
// both ends. Computes (1 - cos(pi * left)) / 2 as the square of a sine, which keeps all its digits
// near 0.
static double idist__schedule_cosine(double from, double to, double left) {
    double x = left * idist__schedule_half_pi, sine = 1;
    int k;

    if (left > 0.5) return idist__schedule_cosine(to, from, 1 - left);

    for (k = 20; k >= 2; k -= 2) sine = 1 - sine * x * x / (k * (k + 1));
    sine *= x;

    return to + (from - to) * sine * sine;
}

// Returns the value of a one-cycle schedule. Its phases end one step before rise * steps and one
// step before `steps`, as in torch.
static double idist__schedule_one_cycle(const idist_schedule *schedule, uint64_t step) {
    double rise = schedule->rise != 0 ? schedule->rise : 0.3;
    double top = rise * (double)schedule->steps - 1, last = (double)schedule->steps - 1;
    double at = (double)step;

    if (step >= schedule->steps - 1) return schedule->end;
    if (at < top) return idist__schedule_cosine(schedule->begin, schedule->peak, 1 - at / top);

    return idist__schedule_cosine(schedule->peak, schedule->end, (last - at) / (last - top));
}

// Returns the value at a step, counted from the end of the warm-up.
static double idist__schedule_main(const idist_schedule *schedule, uint64_t step) {
    uint64_t steps = schedule->steps, done, rest;
    double range = schedule->begin - schedule->end;
    double power = schedule->power != 0 ? schedule->power : 1;

    switch (schedule->kind) {
    case IDIST_SCHEDULE_STEP:
        return idist__schedule_scaled(schedule->begin, schedule->factor, (double)(step / steps));
    case IDIST_SCHEDULE_EXPONENTIAL:
        return idist__schedule_scaled(schedule->begin, schedule->factor, (double)step);

    case IDIST_SCHEDULE_COSINE:
        done = step % steps;
        rest = step / steps % 2 ? done : steps - done;
        return idist__schedule_cosine(schedule->begin, schedule->end, (double)rest / (double)steps);

    case IDIST_SCHEDULE_POLYNOMIAL:
        rest = step < steps ? steps - step : 0;
        return schedule->end + idist__schedule_scaled(range, (double)rest / (double)steps, power);

    case IDIST_SCHEDULE_ONE_CYCLE: return idist__schedule_one_cycle(schedule, step);
    default: return schedule->begin;
    }
}

// Returns true if x is finite. Rounds x to a double first, because the x87 unit of i386 also holds
// larger numbers.
static bool idist__schedule_is_finite(double x) {
    volatile double rounded = x;
    return rounded - rounded == 0;
}

// Returns true if the values between which a schedule moves, and the differences between these
// values, are finite. A difference with infinity or NaN is not finite, so `end`, `peak` and
// `warmup` need no separate check.
static bool idist__schedule_is_bounded(const idist_schedule *schedule, bool has_end) {
    double begin = schedule->begin, end = schedule->end, peak = schedule->peak;

    if (!idist__schedule_is_finite(begin)) return false;
    if (has_end && !idist__schedule_is_finite(begin - end)) return false;
    if (schedule->kind == IDIST_SCHEDULE_ONE_CYCLE &&
        !(idist__schedule_is_finite(begin - peak) && idist__schedule_is_finite(peak - end)))
        return false;
    if (!schedule->warmup_steps) return true;

    // The warm-up ends at the value of step 0, which is not `begin` if the rise is so short that it
    // ends before step 0.
    return idist__schedule_is_finite(idist__schedule_main(schedule, 0) - schedule->warmup);
}

static idist_status idist__schedule_check(const idist_schedule *schedule) {
    char text[IDIST__NUMBER_NBYTES];
    bool has_factor, has_end, one_cycle;
    idist_schedule_kind kind;

    if (!schedule) return idist__fail(IDIST_ERR_ARG, "schedule_value: schedule is NULL");
    kind = schedule->kind;
    if ((int)kind < IDIST_SCHEDULE_CONSTANT || kind > IDIST_SCHEDULE_ONE_CYCLE)
        return idist__fail(IDIST_ERR_ARG, "schedule_value: invalid kind %d", (int)kind);
    if (!schedule->steps && kind != IDIST_SCHEDULE_CONSTANT && kind != IDIST_SCHEDULE_EXPONENTIAL)
        return idist__fail(IDIST_ERR_ARG, "schedule_value: steps must be positive");

    has_factor = kind == IDIST_SCHEDULE_STEP || kind == IDIST_SCHEDULE_EXPONENTIAL;
    has_end = !has_factor && kind != IDIST_SCHEDULE_CONSTANT;
    one_cycle = kind == IDIST_SCHEDULE_ONE_CYCLE;

    if (has_factor && !(schedule->factor > 0 && idist__schedule_is_finite(schedule->factor)))
        return idist__fail(IDIST_ERR_ARG,
                           "schedule_value: factor must be finite and positive, got %s",
                           idist__number_print(text, schedule->factor, 6));
    if (kind == IDIST_SCHEDULE_POLYNOMIAL &&
        !(schedule->power >= 0 && idist__schedule_is_finite(schedule->power)))
        return idist__fail(IDIST_ERR_ARG,
                           "schedule_value: power must be finite and not negative, got %s",
                           idist__number_print(text, schedule->power, 6));
    if (one_cycle && !(schedule->rise >= 0 && schedule->rise < 1))
        return idist__fail(IDIST_ERR_ARG,
                           "schedule_value: rise must be at least 0 and below 1, got %s",
                           idist__number_print(text, schedule->rise, 6));
    if (!idist__schedule_is_bounded(schedule, has_end))
        return idist__fail(IDIST_ERR_ARG, "schedule_value: begin, end, peak and warmup, and their "
                                          "differences, must be finite");

    return IDIST_OK;
}

static double idist__schedule_nan(void) {
    return (double)idist__small_float_from_bits(0x7fc00000u);
}

double idist_schedule_value(const idist_schedule *schedule, uint64_t step) {
    double first, part;

    if (idist__schedule_check(schedule) != IDIST_OK) return idist__schedule_nan();
    if (step >= schedule->warmup_steps)
        return idist__schedule_main(schedule, step - schedule->warmup_steps);

    first = idist__schedule_main(schedule, 0);
    part = (double)step / (double)schedule->warmup_steps;

    return schedule->warmup + (first - schedule->warmup) * part;
}

static idist_status idist__schedule_check_milestones(const idist_milestone *milestones, int n,
                                                     double step) {
    char a[IDIST__NUMBER_NBYTES], b[IDIST__NUMBER_NBYTES];
    int i;

    if (!milestones || n < 1)
        return idist__fail(IDIST_ERR_ARG, "piecewise_linear: %d milestones, or milestones is NULL",
                           n);
    if (!idist__schedule_is_finite(step))
        return idist__fail(IDIST_ERR_ARG, "piecewise_linear: step is %s",
                           idist__number_print(a, step, 6));

    for (i = 0; i < n; i++) {
        const idist_milestone *at = &milestones[i];

        if (!idist__schedule_is_finite(at->step) || !idist__schedule_is_finite(at->value))
            return idist__fail(IDIST_ERR_ARG, "piecewise_linear: milestone %d is (%s, %s)", i,
                               idist__number_print(a, at->step, 6),
                               idist__number_print(b, at->value, 6));
        if (i > 0 && !(at->step > milestones[i - 1].step))
            return idist__fail(IDIST_ERR_ARG,
                               "piecewise_linear: steps must increase, but milestone %d is at %s, "
                               "after %s",
                               i, idist__number_print(a, at->step, 6),
                               idist__number_print(b, milestones[i - 1].step, 6));
        if (i > 0 && !idist__schedule_is_finite((at->value - milestones[i - 1].value) *
                                                (at->step - milestones[i - 1].step)))
            return idist__fail(IDIST_ERR_ARG,
                               "piecewise_linear: milestones %d and %d are too far apart", i - 1,
                               i);
    }

    return IDIST_OK;
}

double idist_piecewise_linear(const idist_milestone *milestones, int n, double step) {
    const idist_milestone *from, *to;
    int i = 1;

    if (idist__schedule_check_milestones(milestones, n, step) != IDIST_OK)
        return idist__schedule_nan();
    if (step <= milestones[0].step) return milestones[0].value;
    if (step >= milestones[n - 1].step) return milestones[n - 1].value;

    while (milestones[i].step <= step) i++;
    from = &milestones[i - 1];
    to = &milestones[i];

    return from->value + (to->value - from->value) * (step - from->step) / (to->step - from->step);
}
