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
// both ends. Computes (1 - cos(pi * left)) / 2 as the square of a sine, which keeps all digits
// near `to`.
static double idist__schedule_cosine(double from, double to, double left) {
    double x = left * idist__schedule_half_pi, sine = 1;
    int k;

    if (left > 0.5) return idist__schedule_cosine(to, from, 1 - left);

    for (k = 20; k >= 2; k -= 2) sine = 1 - sine * x * x / (k * (k + 1));
    sine *= x;

    return to + (from - to) * sine * sine;
}

// Returns the value at `left` between two values of a one-cycle schedule, on a straight line or on
// half a cosine: `to` at left = 0 and `from` at left = 1, exact at both ends.
static double idist__schedule_between(const idist_schedule *schedule, double from, double to,
                                      double left) {
    if (!schedule->linear) return idist__schedule_cosine(from, to, left);
    return left > 0.5 ? from + (to - from) * (1 - left) : to + (from - to) * left;
}

// Returns the value of a one-cycle schedule. The phases end where they end in torch: one step
// before rise * steps, two steps before 2 * rise * steps if there are three phases, and one step
// before `steps`.
static double idist__schedule_one_cycle(const idist_schedule *schedule, uint64_t step) {
    double rise = schedule->rise != 0 ? schedule->rise : 0.3;
    double top = rise * (double)schedule->steps - 1, last = (double)schedule->steps - 1;
    double at = (double)step, start = top, from = schedule->peak, left;

    if (step >= schedule->steps - 1) return schedule->end;
    if (at < top)
        return idist__schedule_between(schedule, schedule->begin, schedule->peak, 1 - at / top);

    if (schedule->three_phase) {
        start = 2 * top;
        from = schedule->begin;
        if (at < start)
            return idist__schedule_between(schedule, schedule->peak, from,
                                           (start - at) / (start - top));
    }

    // With very many steps, the rounded numbers of a step and of the last step may be equal.
    left = at < last ? (last - at) / (last - start) : 0;
    return idist__schedule_between(schedule, from, schedule->end, left);
}

// Returns the value of a cosine with restarts. A cycle has length * multiple steps, a product that
// may be above 2^64.
static double idist__schedule_restarts(const idist_schedule *schedule, uint64_t step) {
    uint64_t length = schedule->steps, multiple = 1, done = step;
    double rest;

    if (schedule->multiple <= 1) done %= length;
    while (done / multiple >= length) { // at most 64 times, because the length doubles at least
        length *= multiple;
        done -= length;
        multiple = schedule->multiple;
    }

    // Computes length * multiple - done as a sum of two parts that are not negative.
    rest = (double)(length - done / multiple - 1) * (double)multiple;
    rest += (double)(multiple - done % multiple);

    return idist__schedule_cosine(schedule->begin, schedule->end,
                                  rest / ((double)length * (double)multiple));
}

// Returns the value of a cyclic schedule.
static double idist__schedule_cyclic(const idist_schedule *schedule, uint64_t step) {
    uint64_t up = schedule->steps, down = schedule->down_steps ? schedule->down_steps : up;
    uint64_t cycle = 0, done = step;
    double height = schedule->peak - schedule->begin;

    if (down <= UINT64_MAX - up) { // otherwise the first cycle contains every step
        cycle = step / (up + down);
        done = step % (up + down);
    }

    if (done <= up) height *= (double)done / (double)up;
    else height *= (double)(down - (done - up)) / (double)down;

    if (schedule->kind == IDIST_SCHEDULE_CYCLIC_HALVED)
        height = idist__schedule_scaled(height, 0.5, (double)cycle);
    if (schedule->kind == IDIST_SCHEDULE_CYCLIC_EXPONENTIAL)
        height = idist__schedule_scaled(height, schedule->factor, (double)step);

    return schedule->begin + height;
}

// Returns the value of a multi-step schedule.
static double idist__schedule_multi_step(const idist_schedule *schedule, uint64_t step) {
    int passed = 0;

    while (passed < schedule->milestone_count && step >= schedule->milestones[passed]) passed++;

    return idist__schedule_scaled(schedule->begin, schedule->factor, (double)passed);
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
    case IDIST_SCHEDULE_MULTI_STEP: return idist__schedule_multi_step(schedule, step);
    case IDIST_SCHEDULE_COSINE_RESTARTS: return idist__schedule_restarts(schedule, step);

    case IDIST_SCHEDULE_CYCLIC:
    case IDIST_SCHEDULE_CYCLIC_HALVED:
    case IDIST_SCHEDULE_CYCLIC_EXPONENTIAL: return idist__schedule_cyclic(schedule, step);

    default: return schedule->begin;
    }
}

// Returns true if x is finite. Rounds x to a double first, because the x87 unit of i386 also holds
// larger numbers.
static bool idist__schedule_is_finite(double x) {
    volatile double rounded = x;
    return rounded - rounded == 0;
}

// The fields that a kind uses, beside begin and the warm-up.
enum {
    IDIST__SCHEDULE_USES_STEPS = 1,
    IDIST__SCHEDULE_USES_FACTOR = 2,
    IDIST__SCHEDULE_USES_END = 4,
    IDIST__SCHEDULE_USES_PEAK = 8
};

// Returns the fields that a kind uses, or -1 if there is no such kind.
static int idist__schedule_fields(idist_schedule_kind kind) {
    switch (kind) {
    case IDIST_SCHEDULE_CONSTANT: return 0;
    case IDIST_SCHEDULE_STEP: return IDIST__SCHEDULE_USES_STEPS | IDIST__SCHEDULE_USES_FACTOR;

    case IDIST_SCHEDULE_EXPONENTIAL:
    case IDIST_SCHEDULE_MULTI_STEP: return IDIST__SCHEDULE_USES_FACTOR;

    case IDIST_SCHEDULE_COSINE:
    case IDIST_SCHEDULE_POLYNOMIAL:
    case IDIST_SCHEDULE_COSINE_RESTARTS:
        return IDIST__SCHEDULE_USES_STEPS | IDIST__SCHEDULE_USES_END;

    case IDIST_SCHEDULE_ONE_CYCLE:
        return IDIST__SCHEDULE_USES_STEPS | IDIST__SCHEDULE_USES_END | IDIST__SCHEDULE_USES_PEAK;

    case IDIST_SCHEDULE_CYCLIC:
    case IDIST_SCHEDULE_CYCLIC_HALVED:
        return IDIST__SCHEDULE_USES_STEPS | IDIST__SCHEDULE_USES_PEAK;
    case IDIST_SCHEDULE_CYCLIC_EXPONENTIAL:
        return IDIST__SCHEDULE_USES_STEPS | IDIST__SCHEDULE_USES_PEAK | IDIST__SCHEDULE_USES_FACTOR;
    }

    return -1;
}

// Returns true if the values between which a schedule moves, and the differences between these
// values, are finite. A difference with infinity or NaN is not finite, so `end`, `peak` and
// `warmup` need no separate check.
static bool idist__schedule_is_bounded(const idist_schedule *schedule) {
    double begin = schedule->begin, end = schedule->end, peak = schedule->peak;
    int fields = idist__schedule_fields(schedule->kind);
    bool has_end = (fields & IDIST__SCHEDULE_USES_END) != 0;
    bool has_peak = (fields & IDIST__SCHEDULE_USES_PEAK) != 0;

    if (!idist__schedule_is_finite(begin)) return false;
    if (has_end && !idist__schedule_is_finite(begin - end)) return false;
    if (has_peak && !idist__schedule_is_finite(begin - peak)) return false;
    if (has_end && has_peak && !idist__schedule_is_finite(peak - end)) return false;
    if (!schedule->warmup_steps) return true;

    // The warm-up ends at the value of step 0, which is not `begin` if the rise is so short that it
    // ends before step 0, or if a milestone is at step 0.
    return idist__schedule_is_finite(idist__schedule_main(schedule, 0) - schedule->warmup);
}

static idist_status idist__schedule_check_rise(const char *name, const idist_schedule *schedule) {
    char text[IDIST__NUMBER_NBYTES];
    double rise = schedule->rise;

    if (schedule->three_phase && !(rise >= 0 && rise <= 0.5))
        return idist__fail(IDIST_ERR_ARG,
                           "%s: with three phases, rise must be at least 0 and at most 0.5, got %s",
                           name, idist__number_print(text, rise, 6));
    if (!(rise >= 0 && rise < 1))
        return idist__fail(IDIST_ERR_ARG, "%s: rise must be at least 0 and below 1, got %s", name,
                           idist__number_print(text, rise, 6));

    return IDIST_OK;
}

static idist_status idist__schedule_check_multi_step(const char *name,
                                                     const idist_schedule *schedule) {
    const uint64_t *milestones = schedule->milestones;
    int i, n = schedule->milestone_count;

    if (n < 0 || (n > 0 && !milestones))
        return idist__fail(IDIST_ERR_ARG, "%s: %d milestones, or milestones is NULL", name, n);
    for (i = 1; i < n; i++)
        if (milestones[i] < milestones[i - 1])
            return idist__fail(IDIST_ERR_ARG,
                               "%s: milestones must not decrease, but milestone %d is at %llu, "
                               "after %llu",
                               name, i, (unsigned long long)milestones[i],
                               (unsigned long long)milestones[i - 1]);

    return IDIST_OK;
}

// Checks a schedule. `name` begins the text of a failure.
static idist_status idist__schedule_check(const char *name, const idist_schedule *schedule) {
    char text[IDIST__NUMBER_NBYTES];
    idist_status status = IDIST_OK;
    int fields;

    if (!schedule) return idist__fail(IDIST_ERR_ARG, "%s: schedule is NULL", name);
    fields = idist__schedule_fields(schedule->kind);
    if (fields < 0)
        return idist__fail(IDIST_ERR_ARG, "%s: invalid kind %d", name, (int)schedule->kind);
    if ((fields & IDIST__SCHEDULE_USES_STEPS) && !schedule->steps)
        return idist__fail(IDIST_ERR_ARG, "%s: steps must be positive", name);

    if ((fields & IDIST__SCHEDULE_USES_FACTOR) &&
        !(schedule->factor > 0 && idist__schedule_is_finite(schedule->factor)))
        return idist__fail(IDIST_ERR_ARG, "%s: factor must be finite and positive, got %s", name,
                           idist__number_print(text, schedule->factor, 6));
    if (schedule->kind == IDIST_SCHEDULE_POLYNOMIAL &&
        !(schedule->power >= 0 && idist__schedule_is_finite(schedule->power)))
        return idist__fail(IDIST_ERR_ARG, "%s: power must be finite and not negative, got %s", name,
                           idist__number_print(text, schedule->power, 6));

    if (schedule->kind == IDIST_SCHEDULE_ONE_CYCLE)
        status = idist__schedule_check_rise(name, schedule);
    if (schedule->kind == IDIST_SCHEDULE_MULTI_STEP)
        status = idist__schedule_check_multi_step(name, schedule);
    if (status != IDIST_OK) return status;

    if (!idist__schedule_is_bounded(schedule))
        return idist__fail(IDIST_ERR_ARG,
                           "%s: begin, end, peak and warmup, and their differences, must be finite",
                           name);

    return IDIST_OK;
}

static double idist__schedule_nan(void) {
    return (double)idist__small_float_from_bits(0x7fc00000u);
}

// Returns the value of a valid schedule.
static double idist__schedule_at(const idist_schedule *schedule, uint64_t step) {
    double first, part;

    if (step >= schedule->warmup_steps)
        return idist__schedule_main(schedule, step - schedule->warmup_steps);

    first = idist__schedule_main(schedule, 0);
    part = (double)step / (double)schedule->warmup_steps;

    return schedule->warmup + (first - schedule->warmup) * part;
}

double idist_schedule_value(const idist_schedule *schedule, uint64_t step) {
    if (idist__schedule_check("schedule_value", schedule) != IDIST_OK) return idist__schedule_nan();
    return idist__schedule_at(schedule, step);
}

static idist_status idist__schedule_check_sequence(const idist_schedule *schedules,
                                                   const uint64_t *milestones, int n) {
    char name[64];
    idist_status status;
    int i;

    if (n < 1 || !schedules || (n > 1 && !milestones))
        return idist__fail(IDIST_ERR_ARG,
                           "schedule_sequence: %d schedules, or schedules or milestones is NULL",
                           n);

    for (i = 1; i < n - 1; i++)
        if (milestones[i] <= milestones[i - 1])
            return idist__fail(IDIST_ERR_ARG,
                               "schedule_sequence: milestones must increase, but milestone %d is "
                               "at %llu, after %llu",
                               i, (unsigned long long)milestones[i],
                               (unsigned long long)milestones[i - 1]);

    for (i = 0; i < n; i++) {
        snprintf(name, sizeof name, "schedule_sequence: schedule %d", i);
        status = idist__schedule_check(name, &schedules[i]);
        if (status != IDIST_OK) return status;
    }

    return IDIST_OK;
}

double idist_schedule_sequence(const idist_schedule *schedules, const uint64_t *milestones, int n,
                               uint64_t step) {
    int i = 0;

    if (idist__schedule_check_sequence(schedules, milestones, n) != IDIST_OK)
        return idist__schedule_nan();

    while (i < n - 1 && step >= milestones[i]) i++;
    return idist__schedule_at(&schedules[i], i > 0 ? step - milestones[i - 1] : step);
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
