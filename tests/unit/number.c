// number.c - checks that fractional numbers are written the same way in every locale. Such numbers
// appear in names of checkpoints, in scalars.csv, in log lines and in error texts.
#define IDIST_IMPLEMENTATION
#include "idist.h"

#include "idist_train.h"

#include "comma.h"
#include "tap.h"

#include <dirent.h>
#include <math.h> // NAN, INFINITY; libm is not needed

static char folder[64]; // a new folder for each locale

static void is_text(const char *got, const char *want) {
    if (!tap_ok(strcmp(got, want) == 0, "%s", want)) tap_diag("got: %s", got);
}

static void prints(void) {
    static const struct {
        double value;
        const char *six, *fixed, *exact;
    } cases[] = {
        {0, "0", "0.00", "0"},
        {-0.0, "-0", "-0.00", "-0"},
        {1.5, "1.5", "1.50", "1.5"},
        {0.1, "0.1", "0.10", "0.1"},
        {4.0249, "4.0249", "4.02", "4.0249"},
        {-1234567.25, "-1.23457e+06", "-1234567.25", "-1234567.25"},
        {1e15, "1e+15", "1e+15", "1e+15"},
        {999999999999999.0, "1e+15", "999999999999999.00", "999999999999999"},
        {0.1 + 0.2, "0.3", "0.30", "0.30000000000000004"},
        {1.5e-7, "1.5e-07", "0.00", "1.5e-07"},
        {4.9406564584124654e-324, "4.94066e-324", "0.00", "4.94065645841247e-324"},
        {-1.7976931348623157e308, "-1.79769e+308", "-1.79769e+308", "-1.7976931348623157e+308"},
        {(double)INFINITY, "inf", "inf", "inf"},
        {-(double)INFINITY, "-inf", "-inf", "-inf"},
        {(double)NAN, "nan", "nan", "nan"},
        {-(double)NAN, "nan", "nan", "nan"},
    };
    char text[IDIST__NUMBER_NBYTES];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        is_text(idist__number_print(text, cases[i].value, 6), cases[i].six);
        is_text(idist__number_print_fixed(text, cases[i].value, 2), cases[i].fixed);
        is_text(idist__number_print_exact(text, cases[i].value), cases[i].exact);
    }
}

static char said[1000];

static void note_line(idist_log_level level, const char *line, void *user) {
    (void)level;
    (void)user;
    if (strstr(line, " INFO: ")) snprintf(said, sizeof said, "%s", strstr(line, " INFO: "));
}

static int count_files(void) {
    DIR *dir = opendir(folder);
    int n = 0;
    TAP_REQUIRE(dir);
    for (struct dirent *e = readdir(dir); e; e = readdir(dir)) n += e->d_name[0] != '.';
    closedir(dir);
    return n;
}

static bool is_there(const char *name) {
    char path[200];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return access(path, F_OK) == 0;
}

static void checkpoints(void) {
    float x[1] = {0};
    const idist_tensor tensor = {x, 1, IDIST_F32};
    idist_checkpoint_desc d;
    char path[200];
    memset(&d, 0, sizeof d);
    d.folder = folder;
    d.keep = -1;
    for (int i = 0; i < 2; i++)
        tap_is(idist_checkpoint_save(&d, 7, 1.5e-7, &tensor, 1, NULL, 0, NULL), IDIST_OK, "saved");
    tap_ok(is_there("checkpoint_7_score=1.5e-07.idist"), "the score in the name has a period");
    tap_is(idist_checkpoint_find(&d, false, path, sizeof path, NULL), IDIST_OK, "found");
    tap_ok(strstr(path, "/checkpoint_7_score=1.5e-07.idist") != NULL, "under this name: %s", path);
    tap_is(count_files(), 1, "and there is no second file of this step");
}

static void texts(void) {
    static const char *const names[1] = {"Loss"};
    static const double values[1] = {0.7125};
    static const double negative[1] = {-0.5};
    static const idist_milestone back[2] = {{2.5, 1}, {1.25, 1}};
    size_t indices[2], count;
    idist_train_log_metrics("t", 3, 4.0249, "Test", names, values, 1);
    is_text(said, " INFO:     Loss: 0.7125");
    idist_train_log_metrics("t", 3, 4.0249, "Test", names, values, 0);
    is_text(said, " INFO: Epoch 3 - Evaluation time (seconds): 4.02 - Test metrics:");
    tap_is(idist_partition(2, negative, 1, 0, 0, indices, &count), IDIST_ERR_ARG, "a fraction");
    tap_like(idist_last_error(), "is -0.5", "that is not allowed");
    idist_piecewise_linear(back, 2, 1);
    tap_like(idist_last_error(), "is at 1.25, after 2.5", "steps that go back");
}

static void everything(const char *symbol, const char *expected) {
    char command[100];
    idist_desc desc;
    tap_diag("%s", symbol ? symbol : "C");
    if (symbol && !locale_begin(symbol, expected)) return;
    snprintf(folder, sizeof folder, "/tmp/idist-number-XXXXXX");
    TAP_REQUIRE(mkdtemp(folder));
    memset(&desc, 0, sizeof desc);
    desc.logger.log_fn = note_line;
    TAP_REQUIRE(idist_initialize(&desc) == IDIST_OK);
    prints();
    checkpoints();
    texts();
    tap_is(idist_finalize(), IDIST_OK, "finalize");
    if (symbol) locale_end();
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    TAP_REQUIRE(system(command) == 0);
}

int main(void) {
    tap_deadline(60);
    everything(NULL, NULL);
    everything("<U002C>", "1,5");
    everything("<U066B>", "1\xd9\xab"
                          "5");
    return tap_done();
}
