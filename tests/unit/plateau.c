// plateau.c - compares idist_plateau_update with torch's ReduceLROnPlateau, update by update. The
// metrics and torch's rates are in tests/data/schedule.txt, made by schedule.py in that folder.
// Also checks the defaults, and that wrong fields are refused.
#include "idist.h"

#include "idist_train.h"

#include "tap.h"

#include <float.h>

static const char *read_number(const char *at, double *x) {
    int used = 0;

    TAP_REQUIRE(sscanf(at, "%lf%n", x, &used) == 1);
    return at + used;
}

// Returns true if two rates are equal. The x87 unit of i386 rounds twice, so its rates may differ
// in the last bit.
static bool is_equal(double got, double wanted) {
    double tolerance = FLT_EVAL_METHOD == 0 ? 0 : 1e-12 * wanted;
    double error = got > wanted ? got - wanted : wanted - got;

    return error <= tolerance;
}

static const char *read_plateau(const char *at, idist_plateau *p) {
    double *const field[5] = {&p->value, &p->factor, &p->min_value, &p->eps, &p->threshold};
    int absolute, high_is_best, used = 0;

    memset(p, 0, sizeof *p);
    TAP_REQUIRE(!strncmp(at, "plateau", 7));
    at += 7;
    for (int i = 0; i < 5; i++) at = read_number(at, field[i]);
    TAP_REQUIRE(sscanf(at, "%d %d %d %d%n", &p->patience, &p->cooldown, &absolute, &high_is_best,
                       &used) == 4);
    p->absolute = absolute;
    p->high_is_best = high_is_best;

    return at + used;
}

// Replaces fields by the 0 that means the same value.
static idist_plateau with_defaults(idist_plateau p) {
    if (p.factor == 0.1) p.factor = 0;
    if (p.eps == 1e-8) p.eps = 0;
    if (p.threshold == 1e-4) p.threshold = 0;
    if (p.patience == 10) p.patience = 0;

    return p;
}

static int updates[2][2], wrong[2][2]; // by absolute and high_is_best

// Compares two plateaus with torch. They are equal but for fields that have the default.
static void compare(const char *line) {
    idist_plateau p, q;
    double metric, value, best;
    int bad_count, cooldown_left, used = 0, n = 0;
    const char *at = read_plateau(line, &p);

    q = with_defaults(p);
    while (sscanf(at, "%lf%n", &metric, &used) == 1) {
        at = read_number(read_number(at + used, &value), &best);
        TAP_REQUIRE(sscanf(at, "%d %d%n", &bad_count, &cooldown_left, &used) == 2);
        at += used;

        bool done = idist_plateau_update(&p, metric) == IDIST_OK &&
                    idist_plateau_update(&q, metric) == IDIST_OK;
        n++;
        updates[p.absolute][p.high_is_best]++;
        if (done && is_equal(p.value, value) && p.best == best && p.bad_count == bad_count &&
            p.cooldown_left == cooldown_left && p.begun && q.value == p.value && q.best == p.best &&
            q.bad_count == p.bad_count)
            continue;
        if (wrong[p.absolute][p.high_is_best]++ < 3)
            tap_diag("update %d, metric %g: %.17g %g %d %d, not %.17g %g %d %d: %.120s", n, metric,
                     p.value, p.best, p.bad_count, p.cooldown_left, value, best, bad_count,
                     cooldown_left, line);
    }
}

static void against_torch(void) {
    static char line[65536];
    FILE *f = fopen("tests/data/schedule.txt", "r");

    TAP_REQUIRE(f != NULL);
    while (fgets(line, sizeof line, f))
        if (!strncmp(line, "plateau", 7)) compare(line);
    fclose(f);

    for (int absolute = 0; absolute < 2; absolute++)
        for (int high = 0; high < 2; high++)
            tap_ok(updates[absolute][high] == 550 && !wrong[absolute][high],
                   "mode %s, threshold_mode %s: %d updates of torch", high ? "max" : "min",
                   absolute ? "abs" : "rel", updates[absolute][high]);
}

// Saves the plateau after some updates, as the info of a checkpoint does, and continues with both.
static void copies(void) {
    idist_plateau p = {0}, q = {0};
    char saved[sizeof p];
    bool equal = true;

    p.value = 1;
    p.patience = p.cooldown = 1;
    for (int i = 0; i < 5; i++) idist_plateau_update(&p, 1);
    memcpy(saved, &p, sizeof p);
    memcpy(&q, saved, sizeof q);
    for (int i = 0; i < 20; i++) {
        idist_plateau_update(&p, i % 7 ? 1.0 : 0.5);
        idist_plateau_update(&q, i % 7 ? 1.0 : 0.5);
        equal = equal && p.value == q.value && p.best == q.best && p.bad_count == q.bad_count;
    }

    tap_ok(equal && q.value < 0.1, "a copy continues as the original does");
}

static void extremes(void) {
    const double infinity = 1e308 * 10;
    idist_plateau p = {0};

    tap_ok(idist_plateau_update(&p, 1) == IDIST_OK && p.value == 0 && p.best == 1,
           "all zero is valid");

    memset(&p, 0, sizeof p);
    p.value = DBL_MAX;
    p.patience = -1;
    p.factor = 4.9e-324;
    p.min_value = -1;
    tap_ok(idist_plateau_update(&p, infinity - infinity) == IDIST_OK && p.best == infinity &&
               is_equal(p.value * 1e12, DBL_MAX * 4.9e-324 * 1e12),
           "the largest rate and the smallest factor");
    p.min_value = 5;
    tap_ok(idist_plateau_update(&p, 1) == IDIST_OK && idist_plateau_update(&p, 1) == IDIST_OK &&
               p.value < 5,
           "a rate below min_value stays");

    memset(&p, 0, sizeof p);
    p.value = 1;
    p.patience = INT32_MAX;
    p.begun = true;
    p.bad_count = INT32_MAX - 1;
    p.cooldown = INT32_MAX;
    tap_ok(idist_plateau_update(&p, 1) == IDIST_OK && p.bad_count == INT32_MAX && p.value == 1,
           "the largest patience");
    tap_ok(idist_plateau_update(&p, 1) == IDIST_OK && p.bad_count == 0 && p.value == 0.1 &&
               p.cooldown_left == INT32_MAX,
           "has an end, and the largest cooldown follows");
    p.bad_count = 3;
    tap_ok(idist_plateau_update(&p, 1) == IDIST_OK && p.bad_count == 0 &&
               p.cooldown_left == INT32_MAX - 1,
           "in which no update is bad");

    memset(&p, 0, sizeof p);
    p.value = 1;
    p.high_is_best = true;
    p.threshold = 1e300;
    p.patience = -1;
    tap_ok(idist_plateau_update(&p, 1e10) == IDIST_OK &&
               idist_plateau_update(&p, DBL_MAX) == IDIST_OK && p.best == 1e10 && p.value == 0.1,
           "a bound that is infinite");
}

// Checks that a plateau is refused with a reason, and stays as it is.
static void refused(const idist_plateau *plateau, const char *reason) {
    idist_plateau p;

    memcpy(&p, plateau, sizeof p);
    idist_status status = idist_plateau_update(&p, 1);
    tap_ok(status == IDIST_ERR_ARG && strstr(idist_last_error(), reason) &&
               !memcmp(&p, plateau, sizeof p),
           "refused: %s", reason);
}

static void bad_fields(void) {
    const double infinity = 1e308 * 10, nan = infinity - infinity;
    const double bad_factors[4] = {-0.1, 1, nan, infinity};
    const double bad_values[3] = {-1, nan, infinity};
    const double not_finite[3] = {nan, infinity, -infinity};
    idist_plateau p, good;

    memset(&good, 0, sizeof good);
    good.value = 1;
    tap_ok(idist_plateau_update(NULL, 1) == IDIST_ERR_ARG && strstr(idist_last_error(), "NULL"),
           "refused: NULL");

    for (int i = 0; i < 4; i++) {
        p = good;
        p.factor = bad_factors[i];
        refused(&p, "factor must be above 0 and below 1");
    }
    for (int i = 0; i < 3; i++) {
        p = good;
        p.value = bad_values[i];
        refused(&p, "value must be finite and not negative");
    }
    for (int i = 0; i < 3; i++) {
        p = good;
        p.min_value = not_finite[i];
        refused(&p, "min_value must be finite");
        p = good;
        p.eps = not_finite[i];
        refused(&p, "eps and threshold must be finite");
        p = good;
        p.threshold = not_finite[i];
        refused(&p, "eps and threshold must be finite");
    }

    p = good;
    p.threshold = 1;
    refused(&p, "must be below 1, got 1");
    p.absolute = true;
    tap_ok(idist_plateau_update(&p, 1) == IDIST_OK, "a difference of 1");
    p = good;
    p.cooldown = -1;
    refused(&p, "cooldown must not be negative, got -1");
    p = good;
    p.bad_count = -1;
    refused(&p, "bad_count and cooldown_left must not be negative, got -1 and 0");
    p = good;
    p.cooldown_left = -2;
    refused(&p, "bad_count and cooldown_left must not be negative, got 0 and -2");
    p = good;
    p.best = nan;
    refused(&p, "best is");
}

int main(void) {
    tap_deadline(60);
    against_torch();
    copies();
    extremes();
    bad_fields();
    return tap_done();
}
