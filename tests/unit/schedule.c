// schedule.c - compares idist_schedule_value and idist_piecewise_linear with the schedulers of
// torch and Ignite. Their values are in tests/data/schedule.txt, made by schedule.py in that
// folder. Also checks that wrong arguments are refused.
#include "idist.h"

#include "idist_train.h"

#include "tap.h"

#include <float.h>

// Returns true if two values are equal up to 1e-12 of the larger one, or of the schedule's largest
// value. The formulas of torch lose digits near 0.
static bool is_near(double got, double wanted, double scale) {
    double error = got > wanted ? got - wanted : wanted - got;
    double size = wanted < 0 ? -wanted : wanted;

    return error <= 1e-12 * (size > scale ? size : scale);
}

static const char *read_number(const char *at, double *x) {
    int used = 0;

    TAP_REQUIRE(sscanf(at, "%lf%n", x, &used) == 1);
    return at + used;
}

static double largest(const idist_schedule *s) {
    const double field[4] = {s->begin, s->end, s->peak, s->warmup};
    double scale = 0;

    for (int i = 0; i < 4; i++)
        if (field[i] > scale) scale = field[i];
    return scale;
}

static const char *read_schedule(const char *at, idist_schedule *s) {
    double *const field[7] = {&s->begin,  &s->end,   &s->peak,  &s->rise,
                              &s->factor, &s->power, &s->warmup};
    unsigned long long warmup_steps, steps;
    int kind, used = 0;

    memset(s, 0, sizeof *s);
    TAP_REQUIRE(sscanf(at, "schedule %d%n", &kind, &used) == 1);
    at += used;
    for (int i = 0; i < 7; i++) at = read_number(at, field[i]);
    TAP_REQUIRE(sscanf(at, "%llu %llu%n", &warmup_steps, &steps, &used) == 2);
    s->kind = (idist_schedule_kind)kind;
    s->warmup_steps = warmup_steps;
    s->steps = steps;

    return at + used;
}

enum { KINDS = IDIST_SCHEDULE_ONE_CYCLE + 1 };
static int values[KINDS], wrong[KINDS];

static void compare_schedule(const char *line) {
    idist_schedule s;
    unsigned long long step;
    double wanted;
    const char *at = read_schedule(line, &s);
    // Exponential values stay exact, however small they are.
    double scale = s.kind == IDIST_SCHEDULE_EXPONENTIAL && !s.warmup_steps ? 0 : largest(&s);
    int used = 0;

    while (sscanf(at, "%llu%n", &step, &used) == 1) {
        at = read_number(at + used, &wanted);
        double got = idist_schedule_value(&s, step);
        values[s.kind]++;
        if (is_near(got, wanted, scale)) continue;
        if (wrong[s.kind]++ < 3)
            tap_diag("kind %d, step %llu: %.17g, not %.17g: %.80s", (int)s.kind, step, got, wanted,
                     line);
    }
}

static void compare_piecewise(const char *line, int *count, int *bad) {
    idist_milestone milestones[8];
    double step, wanted;
    int n, used = 0;

    TAP_REQUIRE(sscanf(line, "piecewise %d%n", &n, &used) == 1 && n <= 8);
    const char *at = line + used;
    for (int i = 0; i < n; i++)
        at = read_number(read_number(at, &milestones[i].step), &milestones[i].value);

    while (sscanf(at, "%lf%n", &step, &used) == 1) {
        at = read_number(at + used, &wanted);
        double got = idist_piecewise_linear(milestones, n, step);
        ++*count;
        if (is_near(got, wanted, 1)) continue;
        if ((*bad)++ < 3) tap_diag("step %g: %.17g, not %.17g: %.80s", step, got, wanted, line);
    }
}

static void against_torch(void) {
    static const char *const names[KINDS] = {"constant", "step",       "exponential",
                                             "cosine",   "polynomial", "one cycle"};
    static const int enough[KINDS] = {5, 400, 600, 250, 400, 150};
    static char line[65536];
    int count = 0, bad = 0;
    FILE *f = fopen("tests/data/schedule.txt", "r");

    TAP_REQUIRE(f != NULL);
    while (fgets(line, sizeof line, f)) {
        if (line[0] == 's') compare_schedule(line);
        if (line[0] == 'p') compare_piecewise(line, &count, &bad);
    }
    fclose(f);

    for (int i = 0; i < KINDS; i++)
        tap_ok(values[i] >= enough[i] && !wrong[i], "%s: %d values of torch", names[i], values[i]);
    tap_ok(count == 320 && !bad, "piecewise linear: %d values of Ignite", count);
}

static void between_steps(void) {
    static const idist_milestone milestones[3] = {{0.5, 1}, {1, 3}, {2, 3}};

    tap_ok(idist_piecewise_linear(milestones, 3, 0.75) == 2, "a step with a fraction");
    tap_ok(idist_piecewise_linear(milestones, 3, -7) == 1 &&
               idist_piecewise_linear(milestones, 3, 1e9) == 3,
           "before the first and after the last milestone");
    tap_ok(idist_piecewise_linear(milestones, 3, 1) == 3 &&
               idist_piecewise_linear(milestones, 3, 0.5) == 1,
           "at a milestone");
}

// Checks that a call returned NaN and that the last error gives the reason.
static void refused(double value, const char *reason, const char *what) {
    bool is_nan = value != value;

    if (!is_nan || !strstr(idist_last_error(), reason))
        tap_diag("%g, \"%s\"", value, idist_last_error());
    tap_ok(is_nan && strstr(idist_last_error(), reason), "refused: %s", what);
}

static void bad_milestones(void) {
    static const idist_milestone equal[3] = {{0, 1}, {2, 3}, {2, 4}}, falling[2] = {{1, 0}, {0, 1}};
    static const idist_milestone far_values[2] = {{0, -1e308}, {10, 1e308}};
    static const idist_milestone far_both[2] = {{0, 0}, {1e10, 1e300}};
    const double infinity = 1e308 * 10;
    idist_milestone infinite[2] = {{0, 1}, {1, 1}};

    infinite[1].value = infinity;
    refused(idist_piecewise_linear(NULL, 2, 0), "NULL", "no milestones");
    refused(idist_piecewise_linear(equal, 0, 0), "0 milestones", "n of 0");
    refused(idist_piecewise_linear(equal, 3, 0), "milestone 2 is at 2, after 2", "equal steps");
    refused(idist_piecewise_linear(falling, 2, 0), "must increase", "falling steps");
    refused(idist_piecewise_linear(infinite, 2, 0), "milestone 1", "an infinite value");
    refused(idist_piecewise_linear(falling, 1, infinity - infinity), "step", "a step of NaN");
    refused(idist_piecewise_linear(far_values, 2, 5), "milestones 0 and 1 are too far apart",
            "values with an infinite difference");
    refused(idist_piecewise_linear(far_both, 2, 5e9), "milestones 0 and 1 are too far apart",
            "values and steps with an infinite product");
}

static void bad_schedules(void) {
    idist_schedule s, good;

    memset(&good, 0, sizeof good);
    tap_ok(idist_schedule_value(&good, 7) == 0, "all zero is the constant 0");
    refused(idist_schedule_value(NULL, 0), "NULL", "no schedule");
    for (int kind = -1; kind <= 6; kind += 7) {
        s = good;
        s.kind = (idist_schedule_kind)kind;
        refused(idist_schedule_value(&s, 0), "invalid kind", "a kind that there is not");
    }

    good.begin = 1;
    good.kind = IDIST_SCHEDULE_COSINE;
    refused(idist_schedule_value(&good, 0), "steps", "no steps");
    good.steps = 10;
    s = good;
    s.end = 1e308 * 10;
    refused(idist_schedule_value(&s, 0), "finite", "an infinite end");

    s = good;
    s.kind = IDIST_SCHEDULE_STEP;
    refused(idist_schedule_value(&s, 0), "factor", "a factor of 0");
    s.kind = IDIST_SCHEDULE_POLYNOMIAL;
    s.power = -1;
    refused(idist_schedule_value(&s, 0), "power", "a negative power");
    s = good;
    s.kind = IDIST_SCHEDULE_ONE_CYCLE;
    s.rise = 1;
    refused(idist_schedule_value(&s, 0), "rise", "a rise that never ends");
}

// Passes finite values whose difference is not finite.
static void far_apart(void) {
    idist_schedule s, good;

    memset(&good, 0, sizeof good);
    good.begin = 1e308;
    good.steps = 10;
    good.power = 2;
    good.end = -1e308;
    for (int kind = IDIST_SCHEDULE_COSINE; kind < KINDS; kind++) {
        s = good;
        s.kind = (idist_schedule_kind)kind;
        refused(idist_schedule_value(&s, 5), "differences", "an end that is too far away");
    }

    good.end = 1e308;
    good.kind = IDIST_SCHEDULE_ONE_CYCLE;
    s = good;
    s.peak = -1e308;
    refused(idist_schedule_value(&s, 1), "differences", "a peak that is too far away");
    s = good;
    s.warmup_steps = 4;
    s.warmup = -1e308;
    refused(idist_schedule_value(&s, 2), "differences", "a warm-up that is too far away");

    s = good;
    s.kind = IDIST_SCHEDULE_ONE_CYCLE;
    s.begin = s.peak = 0;
    s.steps = 1;
    s.warmup_steps = 4;
    s.warmup = -1e308;
    refused(idist_schedule_value(&s, 2), "differences", "a warm-up far from a cycle of one step");
}

// Uses steps and factors at the ends of their ranges.
static void extremes(void) {
    idist_schedule s;

    memset(&s, 0, sizeof s);
    s.begin = 1;
    s.factor = 4.9e-324;
    s.kind = IDIST_SCHEDULE_EXPONENTIAL;
    tap_ok(is_near(idist_schedule_value(&s, 1) * 1e300 * 1e20, 4.9406564584124654e-4, 0) ||
               idist_schedule_value(&s, 1) == 4.9e-324,
           "the smallest factor");
    tap_ok(idist_schedule_value(&s, UINT64_MAX) == 0, "and the last step");
    s.factor = 2;
    tap_ok(is_near(idist_schedule_value(&s, 1000), 1.0715086071862673e301, 0), "2^1000");
    s.begin = 0;
    tap_ok(idist_schedule_value(&s, UINT64_MAX) == 0, "0 times much");
    s.begin = 1e-100;
    s.factor = 10;
    tap_ok(is_near(idist_schedule_value(&s, 350), 1e250, 0), "a power above the largest double");
    s.begin = -1e20;
    s.factor = 0.1;
    tap_ok(is_near(idist_schedule_value(&s, 318), -1e-298, 0), "a power below the smallest one");

    s.factor = s.power = -1;
    s.rise = 5;
    s.kind = IDIST_SCHEDULE_CONSTANT;
    tap_ok(idist_schedule_value(&s, 7) == -1e20, "fields that are not used may be anything");
    s.factor = s.power = s.rise = 0;

    s.begin = 1;
    s.kind = IDIST_SCHEDULE_COSINE;
    s.steps = UINT64_MAX;
    tap_ok(is_near(idist_schedule_value(&s, UINT64_C(1) << 63), 0.5, 0), "half of 2^64 steps");
    s.steps = 1000000;
    tap_ok(is_near(idist_schedule_value(&s, 999999), 2.46740110027031e-12, 0),
           "the last step but one, with all its digits");

    s.kind = IDIST_SCHEDULE_ONE_CYCLE;
    s.end = 0.25;
    tap_ok(idist_schedule_value(&s, UINT64_MAX) == 0.25, "long after the cycle");
    s.warmup_steps = UINT64_MAX;
    s.warmup = 3;
    tap_ok(is_near(idist_schedule_value(&s, UINT64_C(1) << 63), 2, 0), "half of a long warm-up");

    memset(&s, 0, sizeof s);
    s.kind = IDIST_SCHEDULE_POLYNOMIAL;
    s.begin = DBL_MAX;
    s.power = 2;
    s.steps = 1000;
    tap_ok(is_near(idist_schedule_value(&s, 0), DBL_MAX, 0),
           "a polynomial from the largest double");
}

int main(void) {
    tap_deadline(60);
    against_torch();
    between_steps();
    bad_milestones();
    bad_schedules();
    far_apart();
    extremes();
    return tap_done();
}
