// scores.c - scores of confusion matrices, top-k accuracy, errors of a regression and the area
// under the ROC curve, compared with Ignite and scikit-learn (tests/data/scores.txt, made by
// scores.py in that folder). Also wrong arguments, and a rank without memory.
//
// The malloc below can make a rank run out of memory.
#define malloc test_malloc
#define IDIST_IMPLEMENTATION
#include "idist.h"

#include "idist_train.h"

#include "ranks.h"

// Size in bytes from which allocations of this thread fail.
static __thread size_t no_memory_from = SIZE_MAX;

void *test_malloc(size_t nbytes) {
    return nbytes >= no_memory_from ? NULL : calloc(nbytes ? nbytes : 1, 1);
}

static double distance(double a, double b) { return a < b ? b - a : a - b; }
static bool near(double a, double b, double relative) {
    return distance(a, b) <= relative * (b < 0 ? -b : b);
}
static float nan_of_float(void) { return idist__small_float_from_bits(0x7fc00000u); }
static float infinity_of_float(void) { return idist__small_float_from_bits(0x7f800000u); }

//------------------------------------------------------------------------------
// against Ignite and scikit-learn
//------------------------------------------------------------------------------

enum { CLASSES = 10, SAMPLES = 300, SCORES = 36, CASES = 100 };

typedef struct score {
    char name[16], average[16];
    double beta, values[CLASSES];
} score;

// A case of one of the four kinds. The kinds use the same arrays.
typedef struct scores_case {
    int classes, n; // of errors: the width and the number of elements
    int labels[SAMPLES], predicted[SAMPLES];
    float x[SAMPLES], y[SAMPLES];
    double values[CLASSES];
    int n_scores;
    score scores[SCORES];
} scores_case;

typedef struct scores_cases {
    int n;
    scores_case cases[CASES];
} scores_cases;

static scores_cases confusions, top_ks, errors, rocs;

static void read_ints(FILE *f, int *x, int n) {
    TAP_REQUIRE(n <= SAMPLES);
    for (int i = 0; i < n; i++) TAP_REQUIRE(fscanf(f, "%d", &x[i]) == 1);
}

static void read_doubles(FILE *f, double *x, int n) {
    TAP_REQUIRE(n <= CLASSES);
    for (int i = 0; i < n; i++) TAP_REQUIRE(fscanf(f, "%la", &x[i]) == 1);
}

static void read_floats(FILE *f, float *x, int n) {
    TAP_REQUIRE(n <= SAMPLES);
    for (int i = 0; i < n; i++) {
        double value;
        TAP_REQUIRE(fscanf(f, "%la", &value) == 1);
        x[i] = (float)value;
    }
}

static void read_confusion(FILE *f, scores_case *c) {
    TAP_REQUIRE(fscanf(f, "%d %d", &c->classes, &c->n) == 2);
    read_ints(f, c->labels, c->n);
    read_ints(f, c->predicted, c->n);
    for (;;) {
        score *s = &c->scores[c->n_scores];
        TAP_REQUIRE(c->n_scores < SCORES && fscanf(f, "%15s", s->name) == 1);
        if (strcmp(s->name, "end") == 0) return;
        TAP_REQUIRE(fscanf(f, "%15s %la", s->average, &s->beta) == 2);
        read_doubles(f, s->values, strcmp(s->average, "none") == 0 ? c->classes : 1);
        c->n_scores++;
    }
}

static void read_cases(void) {
    char word[16], line[256];
    FILE *f = fopen("tests/data/scores.txt", "r");
    TAP_REQUIRE(f && fgets(line, sizeof line, f));
    while (fscanf(f, "%15s", word) == 1) {
        scores_cases *kind = *word == 'c' ? &confusions : *word == 't' ? &top_ks : NULL;
        if (!kind) kind = *word == 'e' ? &errors : &rocs;
        TAP_REQUIRE(kind->n < CASES);
        scores_case *c = &kind->cases[kind->n++];
        if (kind == &confusions) {
            read_confusion(f, c);
            continue;
        }
        if (kind != &rocs) TAP_REQUIRE(fscanf(f, "%d", &c->classes) == 1);
        TAP_REQUIRE(fscanf(f, "%d", &c->n) == 1);
        if (kind == &top_ks) read_ints(f, c->labels, c->n);
        read_floats(f, c->x, kind == &top_ks ? c->n * c->classes : c->n);
        if (kind == &errors) read_floats(f, c->y, c->n);
        if (kind == &rocs) read_ints(f, c->labels, c->n);
        read_doubles(f, c->values, kind == &top_ks ? c->classes : kind == &errors ? 4 : 1);
    }
    fclose(f);
}

// Returns the first sample of a rank. The parts are uneven. If there are more than two ranks, rank
// n / 2 gets no samples.
static int first_of(int rank, int n, int total) {
    int before = 0, all = 0;
    for (int k = 0; k < n; k++) {
        int weight = n > 2 && k == n / 2 ? 0 : 1 + k * 5 % 4;
        if (k < rank) before += weight;
        all += weight;
    }
    return total * before / all;
}

static void check_score(int rank, const scores_case *c, const score *s, const uint64_t *cells) {
    static const char *const names[4] = {"macro", "micro", "weighted", "none"};
    bool one = strcmp(s->average, "one") == 0;
    int which = one ? IDIST_AVERAGE_NONE : 0;
    double values[CLASSES + 1];
    idist_status status = IDIST_ERR_ARG;
    while (!one && strcmp(s->average, names[which]) != 0) TAP_REQUIRE(++which < 4);
    idist_average average = (idist_average)which;
    int count = average == IDIST_AVERAGE_NONE ? c->classes : 1;
    values[count] = 7;
    if (strcmp(s->name, "precision") == 0)
        status = idist_precision(cells, c->classes, average, values);
    if (strcmp(s->name, "recall") == 0) status = idist_recall(cells, c->classes, average, values);
    if (strcmp(s->name, "iou") == 0) status = idist_iou(cells, c->classes, average, values);
    if (strcmp(s->name, "f_beta") == 0)
        status = idist_f_beta(cells, c->classes, s->beta, average, values);
    rank_ok(rank, status);
    if (one) values[0] = values[1];
    for (int i = 0; i < (one ? 1 : count); i++)
        rank_check(distance(values[i], s->values[i]) <= 1e-12,
                   "rank %d, %d classes, %d samples: %s %s %g [%d] is %.17g, not %.17g", rank,
                   c->classes, c->n, s->name, s->average, s->beta, i, values[i], s->values[i]);
    if (!one)
        rank_check(values[count] == 7, "rank %d: %s %s writes too much", rank, s->name, s->average);
}

static void confusion_scores(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    (void)arg;
    for (int i = 0; i < confusions.n; i++) {
        const scores_case *c = &confusions.cases[i];
        uint64_t own[CLASSES * CLASSES] = {0}, all[CLASSES * CLASSES];
        idist_confusion m = {own, c->classes};
        int first = first_of(rank, n, c->n), end = first_of(rank + 1, n, c->n);
        rank_ok(rank, idist_confusion_update(&m, c->predicted + first, c->labels + first,
                                             (size_t)(end - first)));
        rank_ok(rank, idist_confusion_compute(&m, all, &o));
        for (int k = 0; k < c->n_scores; k++) check_score(rank, c, &c->scores[k], all);
    }
}

static void top_k(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    (void)arg;
    for (int i = 0; i < top_ks.n; i++) {
        const scores_case *c = &top_ks.cases[i];
        int first = first_of(rank, n, c->n), end = first_of(rank + 1, n, c->n);
        size_t count = (size_t)(end - first);
        const float *x = c->x + first * c->classes;
        for (int k = 1; k <= c->classes; k++) {
            idist_accuracy m = {0, 0}, best = {0, 0};
            double value = -1;
            rank_ok(rank,
                    idist_accuracy_update_top_k(&m, x, c->labels + first, count, c->classes, k));
            rank_ok(rank, idist_accuracy_compute(&m, &value, &o));
            rank_check(value == c->values[k - 1], "rank %d, case %d: top %d of %d: %g, not %g",
                       rank, i, k, c->classes, value, c->values[k - 1]);
            if (k > 1) continue;
            rank_ok(rank, idist_accuracy_update(&best, x, c->labels + first, count, c->classes));
            rank_check(best.correct == m.correct && best.total == m.total,
                       "rank %d, case %d: top 1 differs from accuracy", rank, i);
        }
    }
}

static void regression(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    (void)arg;
    for (int i = 0; i < errors.n; i++) {
        const scores_case *c = &errors.cases[i];
        idist_mean squared = {0, 0}, absolute = {0, 0};
        double values[2] = {-1, -1};
        int first = first_of(rank, n, c->n), end = first_of(rank + 1, n, c->n);
        size_t count = (size_t)(end - first);
        rank_ok(rank, idist_mean_squared_error_update(&squared, count ? c->x + first : NULL,
                                                      count ? c->y + first : NULL, count));
        rank_ok(rank, idist_mean_absolute_error_update(&absolute, count ? c->x + first : NULL,
                                                       count ? c->y + first : NULL, count));
        rank_ok(rank, idist_mean_compute(&squared, &values[0], &o));
        rank_ok(rank, idist_mean_compute(&absolute, &values[1], &o));
        for (int k = 0; k < 4; k++)
            rank_check(near(values[k % 2], c->values[k], k < 2 ? 1e-6 : 1e-12),
                       "rank %d, case %d, width %d: %.17g, not %.17g (%d)", rank, i, c->classes,
                       values[k % 2], c->values[k], k);
    }
}

static void roc(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    (void)arg;
    for (int i = 0; i < rocs.n; i++) {
        const scores_case *c = &rocs.cases[i];
        double value = -1;
        int first = first_of(rank, n, c->n), end = first_of(rank + 1, n, c->n);
        size_t count = (size_t)(end - first);
        rank_ok(rank, idist_roc_auc(count ? c->x + first : NULL, count ? c->labels + first : NULL,
                                    count, &value, &o));
        rank_check(distance(value, c->values[0]) <= 1e-12, "rank %d, case %d: %.17g, not %.17g",
                   rank, i, value, c->values[0]);
    }
}

//------------------------------------------------------------------------------
// limits of the scores
//------------------------------------------------------------------------------

static void large_counts(void) {
    uint64_t cells[9];
    double values[3] = {0, 0, 0}, micro = 0, weighted = 0;
    for (int i = 0; i < 9; i++) cells[i] = UINT64_MAX;
    bool all_ok = idist_precision(cells, 3, IDIST_AVERAGE_NONE, values) == IDIST_OK &&
                  idist_iou(cells, 3, IDIST_AVERAGE_MICRO, &micro) == IDIST_OK &&
                  idist_f_beta(cells, 3, 2, IDIST_AVERAGE_WEIGHTED, &weighted) == IDIST_OK;
    tap_ok(all_ok && near(values[0], 1 / 3.0, 1e-15) && near(values[2], 1 / 3.0, 1e-15) &&
               near(micro, 0.2, 1e-15) && near(weighted, 1 / 3.0, 1e-15),
           "counts of 2^64 - 1: %g %g %g", values[0], micro, weighted);
}

// Checks that an extreme beta gives the precision or the recall. The class 2 is never predicted,
// and the class 3 has no labels.
static void extreme_betas(void) {
    static const uint64_t cells[16] = {5, 2, 0, 1, 1, 7, 0, 3, 2, 2, 0, 4, 0, 0, 0, 0};
    const double betas[6] = {0, -0.0, 1e-200, 1e200, 1e308, (double)infinity_of_float()};
    double precision[4], recall[4], got[4];
    idist_precision(cells, 4, IDIST_AVERAGE_NONE, precision);
    idist_recall(cells, 4, IDIST_AVERAGE_NONE, recall);
    for (int i = 0; i < 6; i++) {
        const double *wanted = i < 3 ? precision : recall;
        idist_status status = idist_f_beta(cells, 4, betas[i], IDIST_AVERAGE_NONE, got);
        tap_ok(status == IDIST_OK && near(got[0], wanted[0], 1e-15) &&
                   near(got[1], wanted[1], 1e-15) && got[2] == 0 && got[3] == 0 && wanted[2] == 0 &&
                   wanted[3] == 0,
               "beta %g: %g %g %g %g", betas[i], got[0], got[1], got[2], got[3]);
    }
}

// Checks that perfect predictions score 1, and never more, for every beta.
static void perfect(void) {
    int wrong = 0;
    for (int i = 0; i < 2000; i++) {
        const uint64_t cells[4] = {(uint64_t)(i * 7 + 1), 0, 0, (uint64_t)i};
        double value = -1;
        idist_f_beta(cells, 2, i / 100.0, IDIST_AVERAGE_MICRO, &value);
        if (!(value <= 1 && value > 1 - 1e-15)) wrong++;
    }
    tap_is(wrong, 0, "perfect predictions");
}

static void no_samples(void) {
    static const uint64_t cells[4] = {0, 0, 0, 0};
    double values[2];
    int wrong = 0;
    for (int i = 0; i <= IDIST_AVERAGE_NONE; i++) {
        idist_average average = (idist_average)i;
        values[0] = values[1] = 7;
        if (idist_precision(cells, 2, average, values) != IDIST_OK || values[0] != 0) wrong++;
        if (values[1] != (average == IDIST_AVERAGE_NONE ? 0 : 7)) wrong++;
        values[0] = 7;
        if (idist_iou(cells, 2, average, values) != IDIST_OK || values[0] != 0) wrong++;
    }
    tap_is(wrong, 0, "the scores of no samples are 0");
}

//------------------------------------------------------------------------------
// wrong arguments, and values that are not finite
//------------------------------------------------------------------------------

static void refused(idist_status status, const char *text, const char *what) {
    bool ok = status == IDIST_ERR_ARG && strstr(idist_last_error(), text);
    if (!ok) tap_diag("%s: \"%s\"", idist_status_name(status), idist_last_error());
    tap_ok(ok, "refused: %s", what);
}

static void bad_scores(void) {
    static const uint64_t cells[4] = {1, 2, 3, 4};
    const double nan = (double)nan_of_float();
    double values[2] = {7, 7};
    idist_average macro = IDIST_AVERAGE_MACRO, none = IDIST_AVERAGE_NONE;
    refused(idist_precision(NULL, 2, macro, values), "precision: 2 classes, or a pointer is NULL",
            "precision without cells");
    refused(idist_recall(cells, 2, macro, NULL), "recall: 2 classes, or a pointer is NULL",
            "recall without values");
    refused(idist_iou(cells, 0, none, values), "iou: 0 classes", "IoU of no classes");
    refused(idist_f_beta(cells, -1, 1, none, values), "f_beta: -1 classes", "F-beta of -1 classes");
    refused(idist_f_beta(cells, 2, -0.5, none, values), "at least 0, got -0.5", "a negative beta");
    refused(idist_f_beta(cells, 2, nan, none, values), "at least 0, got nan", "a beta of NaN");
    refused(idist_precision(cells, 2, (idist_average)4, values), "invalid average 4", "average 4");
    refused(idist_recall(cells, 2, (idist_average)-1, values), "invalid average -1", "average -1");
    tap_ok(values[0] == 7 && values[1] == 7, "no values are written");
}

static void bad_top_k(void) {
    static const float scores[6] = {1, 2, 3, 3, 2, 1};
    static const int labels[2] = {0, 1}, above[2] = {0, 3}, below[2] = {0, -1};
    idist_accuracy m = {3, 5};
    const char *is_null = "a pointer is NULL";
    refused(idist_accuracy_update_top_k(NULL, scores, labels, 2, 3, 2), is_null, "no metric");
    refused(idist_accuracy_update_top_k(&m, NULL, labels, 2, 3, 2), is_null, "no scores");
    refused(idist_accuracy_update_top_k(&m, scores, NULL, 2, 3, 2), is_null, "no labels");
    refused(idist_accuracy_update_top_k(&m, scores, labels, 2, 0, 1), "0 classes", "no classes");
    refused(idist_accuracy_update_top_k(&m, scores, labels, 2, 3, 0),
            "accuracy_update_top_k: k is 0, which is not in 1 .. 3", "k of 0");
    refused(idist_accuracy_update_top_k(&m, scores, labels, 2, 3, 4), "k is 4", "k above classes");
    refused(idist_accuracy_update_top_k(&m, scores, above, 2, 3, 2),
            "accuracy_update_top_k: label 3 of sample 1 is not in 0 .. 2", "a label of 3");
    refused(idist_accuracy_update_top_k(&m, scores, below, 2, 3, 2), "label -1", "a label of -1");
    refused(idist_accuracy_update(&m, scores, above, 2, 3), "accuracy_update: label 3",
            "a label of 3 without k");
    tap_ok(m.correct == 3 && m.total == 5, "nothing is counted");
    tap_ok(idist_accuracy_update_top_k(&m, NULL, NULL, 0, 3, 2) == IDIST_OK && m.total == 5,
           "no samples are no error");
}

static void top_k_of_nan(void) {
    const float nan = nan_of_float(), high = infinity_of_float();
    const float rows[5][3] = {{nan, 1, 2}, {1, nan, 2}, {2, 1, nan}, {high, 1, -high}, {1, 1, 1}};
    static const int labels[5] = {0, 0, 0, 2, 1};
    static const uint64_t wanted[3] = {0, 1, 2}; // for k = 1, 2, 3
    for (int k = 1; k <= 3; k++) {
        idist_accuracy m = {0, 0};
        idist_status status = idist_accuracy_update_top_k(&m, rows[0], labels, 5, 3, k);
        tap_ok(status == IDIST_OK && m.correct == wanted[k - 1] && m.total == 5,
               "top %d with NaN and infinity: %d", k, (int)m.correct);
    }
}

static void regression_limits(void) {
    const float nan = nan_of_float(), high = infinity_of_float(), most = 3e38f;
    const float x[4] = {nan, high, high, most}, y[4] = {1, 1, high, -most};
    idist_mean m = {0, 0};
    idist_status large = idist_mean_squared_error_update(&m, x + 3, y + 3, 1);
    tap_ok(large == IDIST_OK && near(m.sum, 3.6e77, 1e-6) && m.weight == 1,
           "the square of a large difference: %g", m.sum);
    tap_ok(idist_mean_absolute_error_update(&m, x + 1, y + 1, 1) == IDIST_OK &&
               m.sum == (double)high && m.weight == 2,
           "infinity propagates");
    for (int i = 0; i < 3; i += 2)
        for (int squared = 0; squared < 2; squared++) {
            idist_mean one = {1, 1};
            idist_status status = squared ? idist_mean_squared_error_update(&one, x + i, y + i, 1)
                                          : idist_mean_absolute_error_update(&one, x + i, y + i, 1);
            tap_ok(status == IDIST_OK && one.sum != one.sum && one.weight == 2,
                   "NaN propagates: %g - %g", (double)x[i], (double)y[i]);
        }
    m.sum = m.weight = 5;
    refused(idist_mean_squared_error_update(NULL, x, y, 1), "mean_squared_error_update: a pointer",
            "no mean");
    refused(idist_mean_squared_error_update(&m, NULL, y, 1), "is NULL", "no predictions");
    refused(idist_mean_absolute_error_update(&m, x, NULL, 1), "mean_absolute_error_update: a",
            "no targets");
    tap_ok(m.sum == 5 && m.weight == 5, "nothing is counted");
}

//------------------------------------------------------------------------------
// the area under the ROC curve
//------------------------------------------------------------------------------

static void roc_limits(idist_group *world, int rank, int n, void *arg) {
    const float high = infinity_of_float();
    const float ends[4] = {-high, 0, -0.0f, high};
    static const int equal[4] = {1, 1, 1, 1}, split[4] = {0, 0, 1, 1}, inverse[4] = {1, 1, 0, 0};
    static const float same[4] = {2, 2, 2, 2};
    double value = 7;
    idist_opts o = opts_of(world);
    (void)arg;
    rank_ok(rank, idist_roc_auc(NULL, NULL, 0, &value, &o));
    rank_check(value != value, "rank %d: the area of nothing is %g", rank, value);
    value = 7;
    rank_ok(rank, idist_roc_auc(ends, equal, rank == n - 1 ? 4 : 0, &value, &o));
    rank_check(value != value, "rank %d: the area of equal labels is %g", rank, value);
    rank_ok(rank, idist_roc_auc(ends, split, 4, &value, &o));
    rank_check(value == 0.875, "rank %d: infinity and two zeros give %g", rank, value);
    rank_ok(rank, idist_roc_auc(ends, inverse, 4, &value, &o));
    rank_check(value == 0.125, "rank %d: the inverse gives %g", rank, value);
    rank_ok(rank, idist_roc_auc(same, split, 4, &value, &o));
    rank_check(value == 0.5, "rank %d: equal scores give %g", rank, value);
    // Only the last rank wants the value.
    value = 7;
    rank_ok(rank, idist_roc_auc(ends, split, 4, rank == n - 1 ? &value : NULL, &o));
    rank_check(value == (rank == n - 1 ? 0.875 : 7), "rank %d: %g", rank, value);
}

static void check_refusal(int rank, int culprit, idist_status status, idist_status wanted,
                          const char *text) {
    rank_is(rank, status, wanted);
    rank_check(strstr(idist_last_error(), text), "rank %d: \"%s\" without \"%s\"", rank,
               idist_last_error(), text);
    if (rank != culprit)
        rank_check(text_names_only(idist_last_error(), culprit, rank, culprit + 1),
                   "rank %d: \"%s\"", rank, idist_last_error());
}

static void bad_roc(idist_group *world, int rank, int n, void *arg) {
    const float nan = nan_of_float();
    const float scores[3] = {1, 2, 3}, bad_scores_of[3] = {1, 2, nan};
    static const int labels[3] = {0, 1, 0}, two[3] = {0, 2, 1}, negative[3] = {-1, 0, 1};
    double value = 7;
    idist_opts o = opts_of(world);
    (void)arg;
    for (int culprit = 0; culprit<n; culprit += n> 1 ? n - 1 : 1) {
        bool bad = rank == culprit;
        check_refusal(rank, culprit, idist_roc_auc(scores, bad ? two : labels, 3, &value, &o),
                      IDIST_ERR_ARG, "roc_auc: label 2 of sample 1 is neither 0 nor 1");
        check_refusal(rank, culprit, idist_roc_auc(scores, bad ? negative : labels, 3, &value, &o),
                      IDIST_ERR_ARG, "label -1 of sample 0");
        check_refusal(rank, culprit,
                      idist_roc_auc(bad ? bad_scores_of : scores, labels, 3, &value, &o),
                      IDIST_ERR_ARG, "the score of sample 2 is NaN");
        check_refusal(rank, culprit, idist_roc_auc(bad ? NULL : scores, labels, 3, &value, &o),
                      IDIST_ERR_ARG, "roc_auc: 3 samples, or a pointer is NULL");
        check_refusal(rank, culprit, idist_roc_auc(scores, bad ? NULL : labels, 3, &value, &o),
                      IDIST_ERR_ARG, "roc_auc: 3 samples, or a pointer is NULL");
        check_refusal(rank, culprit,
                      idist_roc_auc(scores, labels, bad ? SIZE_MAX / 4 : 3, &value, &o),
                      IDIST_ERR_ARG, "samples, or a pointer is NULL");
    }
    rank_check(value == 7, "rank %d: a refused call gives %g", rank, value);
    rank_ok(rank, idist_roc_auc(scores, labels, 3, &value, &o));
    rank_check(value == 0.5, "rank %d: %g after refused calls", rank, value);
}

enum { MANY = 140001, LEVELS = 1000 };

// Checks an area of more than 2^32 pairs. The expected number of pairs comes from the number of
// samples of each score.
static void many_pairs(idist_group *world, int rank, int n, void *arg) {
    static __thread float scores[MANY];
    static __thread int labels[MANY];
    uint64_t counts[LEVELS][2] = {{0, 0}}, all[2] = {0, 0}, halves = 0;
    int first = first_of(rank, n, MANY), end = first_of(rank + 1, n, MANY);
    double value = -1;
    idist_opts o = opts_of(world);
    (void)arg;
    for (int i = 0; i < MANY; i++) {
        uint64_t bits = tap_mix((uint64_t)i);
        labels[i] = bits % 3 == 0;
        int level = (int)(bits / 3 % LEVELS);
        if (labels[i]) level = level / 2 + LEVELS / 2;
        counts[level][labels[i]]++;
        scores[i] = (float)(level - 300) / 8;
    }
    for (int k = 0; k < LEVELS; k++) {
        halves += counts[k][1] * (2 * all[0] + counts[k][0]);
        for (int j = 0; j < 2; j++) all[j] += counts[k][j];
    }
    rank_check(all[0] * all[1] > UINT32_MAX, "rank %d: too few pairs", rank);
    rank_ok(rank, idist_roc_auc(scores + first, labels + first, (size_t)(end - first), &value, &o));
    rank_check(near(value, (double)halves / (2.0 * (double)all[0] * (double)all[1]), 5e-16),
               "rank %d: %.17g", rank, value);
}

// Makes one rank run out of memory. The last rank has none for its own samples, or rank 0 has none
// for the samples of all ranks. All ranks must get an error, and the next call must succeed.
static void no_memory(idist_group *world, int rank, int n, void *arg) {
    enum { COUNT = 5000 };
    static __thread float scores[COUNT];
    static __thread int labels[COUNT];
    bool of_all = *(const int *)arg != 0;
    int culprit = of_all ? 0 : n - 1;
    double value = 7;
    idist_opts o = opts_of(world);
    for (int i = 0; i < COUNT; i++) {
        scores[i] = (float)(i % 100);
        labels[i] = i % 2;
    }
    if (rank == culprit) no_memory_from = of_all && n > 1 ? COUNT * 9 : COUNT * 8;
    idist_status status = idist_roc_auc(scores, labels, COUNT, &value, &o);
    no_memory_from = SIZE_MAX;
    check_refusal(rank, culprit, status, IDIST_ERR_NO_MEMORY, "roc_auc: no memory for");
    rank_check(value == 7, "rank %d: %g without memory", rank, value);
    rank_ok(rank, idist_roc_auc(scores, labels, COUNT, &value, &o));
    rank_check(value == 0.51, "rank %d: %.17g", rank, value);
}

int main(void) {
    static const int sizes[5] = {1, 2, 3, 4, 7};
    tap_deadline(60);
    read_cases();
    tap_ok(confusions.n == 76 && top_ks.n == 44 && errors.n == 24 && rocs.n == 40,
           "all cases: %d %d %d %d", confusions.n, top_ks.n, errors.n, rocs.n);
    large_counts();
    extreme_betas();
    perfect();
    no_samples();
    bad_scores();
    bad_top_k();
    top_k_of_nan();
    regression_limits();
    for (int i = 0; i < 5; i++) {
        int n = sizes[i];
        ranks_case(n, NULL, confusion_scores, NULL, "scores as in Ignite, %d ranks", n);
        ranks_case(n, NULL, top_k, NULL, "top-k accuracies as in Ignite, %d ranks", n);
        ranks_case(n, NULL, regression, NULL, "errors as in Ignite, %d ranks", n);
        ranks_case(n, NULL, roc, NULL, "areas as in Ignite, %d ranks", n);
        ranks_case(n, NULL, roc_limits, NULL, "areas of special scores, %d ranks", n);
        ranks_case(n, NULL, bad_roc, NULL, "samples that have no area, %d ranks", n);
        ranks_case(n, NULL, many_pairs, NULL, "more than 2^32 pairs, %d ranks", n);
        for (int k = 0; k < 2; k++)
            ranks_case(n, NULL, no_memory, &k, "a rank without memory, of %d: %s", n,
                       k ? "for all samples" : "for its samples");
    }
    double value;
    float score_of_one = 1;
    int label = 1;
    tap_is(idist_roc_auc(&score_of_one, &label, 1, &value, NULL), IDIST_ERR_STATE, "no world");
    return tap_done();
}
