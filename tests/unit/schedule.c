// schedule.c - compares idist_schedule_value, idist_schedule_sequence and idist_piecewise_linear
// with the schedulers of torch and Ignite. Their values are in tests/data/schedule.txt, made by
// schedule.py in that folder. Also checks that wrong arguments are refused.
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

static const char *read_integer(const char *at, uint64_t *x) {
    unsigned long long read;
    int used = 0;

    TAP_REQUIRE(sscanf(at, "%llu%n", &read, &used) == 1);
    *x = read;
    return at + used;
}

enum { MILESTONES = 8 };
typedef struct case_schedule {
    idist_schedule schedule;
    uint64_t milestones[MILESTONES]; // of the schedule
} case_schedule;

static const char *read_schedule(const char *at, case_schedule *c) {
    idist_schedule *s = &c->schedule;
    double *const field[7] = {&s->begin,  &s->end,   &s->peak,  &s->rise,
                              &s->factor, &s->power, &s->warmup};
    uint64_t *const integer[4] = {&s->warmup_steps, &s->steps, &s->down_steps, &s->multiple};
    int kind, linear, three_phase, used = 0;

    memset(c, 0, sizeof *c);
    TAP_REQUIRE(sscanf(at, " schedule %d%n", &kind, &used) == 1);
    at += used;
    for (int i = 0; i < 7; i++) at = read_number(at, field[i]);
    for (int i = 0; i < 4; i++) at = read_integer(at, integer[i]);

    TAP_REQUIRE(sscanf(at, "%d %d %d%n", &linear, &three_phase, &s->milestone_count, &used) == 3);
    TAP_REQUIRE(s->milestone_count <= MILESTONES);
    at += used;
    for (int i = 0; i < s->milestone_count; i++) at = read_integer(at, &c->milestones[i]);

    s->kind = (idist_schedule_kind)kind;
    s->linear = linear;
    s->three_phase = three_phase;
    s->milestones = c->milestones;

    return at;
}

enum { KINDS = IDIST_SCHEDULE_CYCLIC_EXPONENTIAL + 1 };
static int values[KINDS], wrong[KINDS];
static int one_cycles[4]; // values by linear + 2 * three_phase

static void compare_schedule(const char *line) {
    case_schedule c;
    unsigned long long step;
    double wanted;
    const char *at = read_schedule(line, &c);
    idist_schedule s = c.schedule;
    // Exponential values stay exact, however small they are.
    double scale = s.kind == IDIST_SCHEDULE_EXPONENTIAL && !s.warmup_steps ? 0 : largest(&s);
    int used = 0;

    while (sscanf(at, "%llu%n", &step, &used) == 1) {
        at = read_number(at + used, &wanted);
        double got = idist_schedule_value(&s, step);
        values[s.kind]++;
        if (s.kind == IDIST_SCHEDULE_ONE_CYCLE) one_cycles[s.linear + 2 * s.three_phase]++;
        if (is_near(got, wanted, scale)) continue;
        if (wrong[s.kind]++ < 3)
            tap_diag("kind %d, step %llu: %.17g, not %.17g: %.80s", (int)s.kind, step, got, wanted,
                     line);
    }
}

static void compare_sequence(const char *line, int *count, int *bad) {
    case_schedule cases[4];
    idist_schedule schedules[4];
    uint64_t milestones[3];
    unsigned long long step;
    double wanted, scale = 0;
    int n, used = 0;

    TAP_REQUIRE(sscanf(line, "sequence %d%n", &n, &used) == 1 && n <= 4);
    const char *at = line + used;
    for (int i = 0; i < n - 1; i++) at = read_integer(at, &milestones[i]);
    for (int i = 0; i < n; i++) {
        at = read_schedule(at, &cases[i]);
        schedules[i] = cases[i].schedule;
        if (largest(&schedules[i]) > scale) scale = largest(&schedules[i]);
    }

    while (sscanf(at, "%llu%n", &step, &used) == 1) {
        at = read_number(at + used, &wanted);
        double got = idist_schedule_sequence(schedules, n > 1 ? milestones : NULL, n, step);
        ++*count;
        if (is_near(got, wanted, scale)) continue;
        if ((*bad)++ < 3) tap_diag("step %llu: %.17g, not %.17g: %.80s", step, got, wanted, line);
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
    static const char *const names[KINDS] = {
        "constant",   "step",           "exponential",        "cosine",
        "polynomial", "one cycle",      "multi-step",         "cosine with restarts",
        "cyclic",     "cyclic, halved", "cyclic, exponential"};
    static const int enough[KINDS] = {5, 400, 600, 250, 700, 1400, 1000, 840, 720, 720, 720};
    static char line[65536];
    int count = 0, bad = 0, sequence_count = 0, sequence_bad = 0;
    FILE *f = fopen("tests/data/schedule.txt", "r");

    TAP_REQUIRE(f != NULL);
    while (fgets(line, sizeof line, f)) {
        if (!strncmp(line, "schedule", 8)) compare_schedule(line);
        if (!strncmp(line, "sequence", 8)) compare_sequence(line, &sequence_count, &sequence_bad);
        if (!strncmp(line, "piecewise", 9)) compare_piecewise(line, &count, &bad);
    }
    fclose(f);

    for (int i = 0; i < KINDS; i++)
        tap_ok(values[i] >= enough[i] && !wrong[i], "%s: %d values of torch", names[i], values[i]);
    for (int i = 1; i < 4; i++)
        tap_ok(one_cycles[i] >= 440, "%d values of a one cycle%s%s", one_cycles[i],
               i & 1 ? ", linear" : "", i & 2 ? ", three phases" : "");
    tap_ok(sequence_count == 660 && !sequence_bad, "sequences: %d values of torch", sequence_count);
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
    for (int kind = -1; kind <= KINDS; kind += KINDS + 1) {
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
    s.rise = 0.75;
    tap_ok(idist_schedule_value(&s, 9) == 0, "a rise of 3/4");
    s.three_phase = true;
    refused(idist_schedule_value(&s, 0), "at most 0.5, got 0.75", "a rise of 3/4 and three phases");
}

static void bad_fields_of_cycles(void) {
    static const uint64_t falling[3] = {1, 5, 4};
    idist_schedule s, good;

    memset(&good, 0, sizeof good);
    good.begin = good.factor = 1;
    for (int kind = IDIST_SCHEDULE_COSINE_RESTARTS; kind < KINDS; kind++) {
        s = good;
        s.kind = (idist_schedule_kind)kind;
        refused(idist_schedule_value(&s, 0), "steps must be positive", "no steps");
    }

    good.steps = 10;
    good.factor = 0;
    good.kind = IDIST_SCHEDULE_CYCLIC_EXPONENTIAL;
    refused(idist_schedule_value(&good, 0), "factor", "a cyclic factor of 0");
    good.kind = IDIST_SCHEDULE_MULTI_STEP;
    refused(idist_schedule_value(&good, 0), "factor", "a multi-step factor of 0");
    good.factor = 0.5;
    tap_ok(idist_schedule_value(&good, 7) == 1, "no milestones");
    good.milestone_count = 3;
    refused(idist_schedule_value(&good, 0), "3 milestones", "milestones that are NULL");
    good.milestones = falling;
    refused(idist_schedule_value(&good, 0), "milestone 2 is at 4, after 5", "falling milestones");
    good.milestone_count = -1;
    refused(idist_schedule_value(&good, 0), "-1 milestones", "a negative number of milestones");
}

static void sequences(void) {
    static const uint64_t milestones[3] = {0, 5, 9}, equal[2] = {5, 5};
    idist_schedule s[3];

    memset(s, 0, sizeof s);
    for (int i = 0; i < 3; i++) s[i].begin = i + 1;

    tap_ok(idist_schedule_sequence(s, NULL, 1, UINT64_MAX) == 1, "a sequence of one schedule");
    tap_ok(idist_schedule_sequence(s, milestones + 1, 3, 4) == 1 &&
               idist_schedule_sequence(s, milestones + 1, 3, 5) == 2 &&
               idist_schedule_sequence(s, milestones + 1, 3, 8) == 2 &&
               idist_schedule_sequence(s, milestones + 1, 3, 9) == 3 &&
               idist_schedule_sequence(s, milestones + 1, 3, UINT64_MAX) == 3,
           "a schedule begins at its milestone");
    tap_ok(idist_schedule_sequence(s, milestones, 3, 0) == 2, "a milestone at step 0");
    s[1].warmup_steps = 4;
    tap_ok(idist_schedule_sequence(s, milestones + 1, 3, 5) == 0 &&
               idist_schedule_sequence(s, milestones + 1, 3, 7) == 1,
           "the warm-up of a later schedule");

    refused(idist_schedule_sequence(s, milestones, 0, 0), "0 schedules", "an empty sequence");
    refused(idist_schedule_sequence(NULL, milestones, 3, 0), "3 schedules, or",
            "a sequence that is NULL");
    refused(idist_schedule_sequence(s, NULL, 2, 0), "NULL", "a sequence without milestones");
    refused(idist_schedule_sequence(s, equal, 3, 0), "milestone 1 is at 5, after 5",
            "a sequence with equal milestones");
    s[2].kind = IDIST_SCHEDULE_COSINE;
    refused(idist_schedule_sequence(s, milestones, 3, 0), "schedule 2: steps must be positive",
            "a sequence whose last schedule is wrong");
}

// Passes finite values whose difference is not finite.
static void far_apart(void) {
    idist_schedule s, good;

    memset(&good, 0, sizeof good);
    good.begin = 1e308;
    good.steps = 10;
    good.power = 2;
    good.end = -1e308;
    good.factor = 1;
    for (int kind = IDIST_SCHEDULE_COSINE; kind < KINDS; kind++) {
        s = good;
        s.kind = (idist_schedule_kind)kind;
        if (kind == IDIST_SCHEDULE_MULTI_STEP) continue;
        if (kind >= IDIST_SCHEDULE_CYCLIC) s.peak = -1e308;
        refused(idist_schedule_value(&s, 5), "differences",
                "an end or a peak that is too far away");
    }

    s = good;
    s.kind = IDIST_SCHEDULE_CYCLIC;
    tap_ok(is_near(idist_schedule_value(&s, 5), 5e307, 0), "a cycle does not use the end");

    good.end = 1e308;
    good.kind = IDIST_SCHEDULE_ONE_CYCLE;
    s = good;
    s.peak = -1e308;
    refused(idist_schedule_value(&s, 1), "differences", "a peak that is too far away");
    s = good;
    s.begin = 0;
    s.end = 1e308;
    s.peak = -1e308;
    refused(idist_schedule_value(&s, 1), "differences", "a peak that is too far from the end");
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

// Uses steps, factors and lengths of cycles at the ends of their ranges.
static void extremes_of_restarts(void) {
    const uint64_t half = UINT64_C(1) << 63;
    idist_schedule s;

    memset(&s, 0, sizeof s);
    s.begin = 1;
    s.kind = IDIST_SCHEDULE_COSINE_RESTARTS;
    s.steps = 1;
    tap_ok(idist_schedule_value(&s, UINT64_MAX) == 1, "restarts after every step");
    s.steps = 10;
    tap_ok(is_near(idist_schedule_value(&s, UINT64_MAX), 0.5, 0), "restarts after ten steps");
    s.steps = 1;
    s.multiple = 2; // the cycles begin at the steps 2^n - 1
    tap_ok(idist_schedule_value(&s, UINT64_MAX) == 1 && idist_schedule_value(&s, half - 1) == 1,
           "the cycles of 2^64 and of 2^63 steps begin");
    tap_ok(is_near(idist_schedule_value(&s, half + half / 2 - 1), 0.5, 0), "half of 2^63 steps");
    s.multiple = UINT64_MAX;
    tap_ok(idist_schedule_value(&s, 1) == 1, "a multiple of 2^64 - 1, after the first cycle");
    tap_ok(is_near(idist_schedule_value(&s, half), 0.5, 0), "and half of the second cycle");
    tap_ok(is_near(idist_schedule_value(&s, UINT64_MAX - 1) * 1e38, 2.9004160545828315, 0),
           "and two steps before its end, with all digits");
    s.steps = half;
    s.multiple = 3; // cycles of 2^63 and of 3 * 2^63 steps
    tap_ok(is_near(idist_schedule_value(&s, half / 2), 0.5, 0), "half of a first cycle of 2^63");
    tap_ok(idist_schedule_value(&s, half) == 1 &&
               is_near(idist_schedule_value(&s, UINT64_MAX), 0.75, 0),
           "a second cycle that ends above 2^64");
    s.multiple = 2;
    tap_ok(is_near(idist_schedule_value(&s, UINT64_MAX), 0.5, 0), "a second cycle of 2^64 steps");
}

static void extremes_of_triangles(void) {
    const uint64_t half = UINT64_C(1) << 63;
    idist_schedule s;

    memset(&s, 0, sizeof s);
    s.begin = 1;
    s.peak = 3;
    s.kind = IDIST_SCHEDULE_CYCLIC;
    s.steps = 1;
    tap_ok(idist_schedule_value(&s, UINT64_MAX) == 3, "cycles of two steps");
    s.steps = UINT64_MAX;
    tap_ok(idist_schedule_value(&s, UINT64_MAX) == 3 &&
               is_near(idist_schedule_value(&s, half), 2, 0),
           "2^64 - 1 steps up");
    s.steps = half;
    tap_ok(idist_schedule_value(&s, half) == 3 &&
               is_near(idist_schedule_value(&s, half + half / 2), 2, 0),
           "a cycle of 2^64 steps");
    s.steps = 1;
    s.down_steps = UINT64_MAX;
    tap_ok(idist_schedule_value(&s, 1) == 3 && is_near(idist_schedule_value(&s, half), 2, 0),
           "2^64 - 1 steps down");
    s.down_steps = 0;
    s.kind = IDIST_SCHEDULE_CYCLIC_HALVED;
    tap_ok(idist_schedule_value(&s, UINT64_MAX) == 1, "halved 2^63 times");
    s.peak = 1e308;
    tap_ok(is_near(idist_schedule_value(&s, 2001), 9332637.185032189, 0),
           "a high peak, halved 1000 times");
    s.begin = 0;
    tap_ok(is_near(idist_schedule_value(&s, 2001), 9332636.185032189, 0), "and above 0");
    s.kind = IDIST_SCHEDULE_CYCLIC_EXPONENTIAL;
    s.factor = DBL_MAX;
    tap_ok(idist_schedule_value(&s, 2) == 0, "a huge factor at the bottom of a cycle");
    tap_ok(idist_schedule_value(&s, 3) > DBL_MAX, "and at its top");
    s.factor = 4.9e-324;
    tap_ok(idist_schedule_value(&s, UINT64_MAX) == 0, "the smallest factor and the last step");
}

static void extremes_of_milestones(void) {
    static const uint64_t last[3] = {0, UINT64_MAX, UINT64_MAX};
    idist_schedule s;

    memset(&s, 0, sizeof s);
    s.begin = 1;
    s.kind = IDIST_SCHEDULE_MULTI_STEP;
    s.milestones = last;
    s.milestone_count = 3;
    s.factor = 1e200;
    tap_ok(idist_schedule_value(&s, UINT64_MAX - 1) == 1e200, "a milestone at step 0");
    tap_ok(idist_schedule_value(&s, UINT64_MAX) > DBL_MAX, "a huge factor, three times");
    s.begin = 1e-300;
    tap_ok(is_near(idist_schedule_value(&s, UINT64_MAX), 1e300, 0),
           "a power above the largest double");
    s.begin = 1e200;
    s.warmup_steps = 10;
    refused(idist_schedule_value(&s, 5), "differences", "a warm-up to an infinite value");
}

static void extremes_of_phases(void) {
    idist_schedule s;

    memset(&s, 0, sizeof s);
    s.kind = IDIST_SCHEDULE_ONE_CYCLE;
    s.begin = 1;
    s.peak = 4;
    s.end = 0.5;
    s.three_phase = true;
    for (int linear = 0; linear < 2; linear++) {
        s.linear = linear;
        s.steps = 1;
        s.rise = 0.5;
        tap_ok(idist_schedule_value(&s, 0) == 0.5, "three phases in one step");
        s.steps = 2;
        tap_ok(idist_schedule_value(&s, 0) == 1 && idist_schedule_value(&s, 1) == 0.5,
               "three phases in two steps");
        s.steps = 8;
        tap_ok(idist_schedule_value(&s, 3) == 4 && idist_schedule_value(&s, 6) == 1 &&
                   idist_schedule_value(&s, 7) == 0.5,
               "the phases meet at peak and at begin");
        s.steps = UINT64_C(1) << 60; // the last phase of one step vanishes in a double
        double last = idist_schedule_value(&s, s.steps - 2);
        tap_ok(last >= 0.5 && last <= 1, "a last phase without steps");
        tap_ok(idist_schedule_value(&s, s.steps / 2) == 4, "the peak after 2^59 steps");
        s.steps = UINT64_MAX;
        tap_ok(idist_schedule_value(&s, UINT64_MAX) == 0.5, "the last step");
        s.rise = 1e-300;
        tap_ok(is_near(idist_schedule_value(&s, UINT64_C(1) << 63), 0.75, 0),
               "half of the last phase, without the others");
    }
}

int main(void) {
    tap_deadline(60);
    against_torch();
    between_steps();
    bad_milestones();
    bad_schedules();
    bad_fields_of_cycles();
    sequences();
    far_apart();
    extremes();
    extremes_of_restarts();
    extremes_of_triangles();
    extremes_of_milestones();
    extremes_of_phases();
    return tap_done();
}
