// digits.h - reads the images of examples/data/digits.csv, split into training and test images
#ifndef EXAMPLES_DIGITS_H
#define EXAMPLES_DIGITS_H

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { DIGITS_COUNT = 1797, DIGITS_SIDE = 8, DIGITS_PIXELS = 64, DIGITS_CLASSES = 10 };
enum { DIGITS_MIN = 100, DIGITS_MAX = 1000000 }; // images in a user's file

typedef struct digit {
    unsigned char pixels[DIGITS_PIXELS]; // 0 .. 16
    unsigned char label;                 // 0 .. 9
} digit;

// Parses 64 pixels and a label, separated by commas. Returns an error message, or NULL if the line
// is valid.
static inline const char *digits_parse(const char *s, digit *out) {
    for (int i = 0; i <= DIGITS_PIXELS; i++) {
        int value = 0, n = 0;

        for (; *s >= '0' && *s <= '9' && n < 3; n++) value = 10 * value + (*s++ - '0');
        if (n == 0 || (i < DIGITS_PIXELS && *s++ != ','))
            return "expected 65 numbers (64 pixels, 1 label) divided by commas";
        if (value > (i < DIGITS_PIXELS ? 16 : DIGITS_CLASSES - 1))
            return i < DIGITS_PIXELS ? "a pixel is above 16" : "the label is above 9";
        *(i < DIGITS_PIXELS ? &out->pixels[i] : &out->label) = (unsigned char)value;
    }
    return s[strspn(s, "\r\n")] ? "something follows the label" : NULL;
}

// ---- all of digits.csv, as doubles ----

typedef struct digits {
    double pixels[DIGITS_COUNT][DIGITS_PIXELS]; // 0 .. 1
    int label[DIGITS_COUNT];                    // 0 .. 9
} digits;

// Loads digits.csv from examples/data below the current folder, or from the data folder beside this
// header's folder. Prints an error and returns false on failure.
static inline bool digits_load(digits *d) {
    char line[512], beside[1024];
    const char *slash = strrchr(__FILE__, '/');
    FILE *f = fopen("examples/data/digits.csv", "r");
    digit one;
    int n = 0;

    snprintf(beside, sizeof beside, "%.*s../data/digits.csv",
             slash ? (int)(slash - __FILE__) + 1 : 0, __FILE__);
    if (!f) f = fopen(beside, "r");
    if (!f) {
        fprintf(stderr, "examples/data/digits.csv is not here: run this in the folder that has "
                        "examples/\n");
        return false;
    }
    for (; n < DIGITS_COUNT && fgets(line, (int)sizeof line, f) && !digits_parse(line, &one); n++) {
        for (int i = 0; i < DIGITS_PIXELS; i++) d->pixels[n][i] = one.pixels[i] / 16.0;
        d->label[n] = one.label;
    }
    fclose(f);
    if (n == DIGITS_COUNT) return true;
    fprintf(stderr, "digits.csv: line %d is not 64 pixels and a label\n", n + 1);
    return false;
}

// ---- any file in this format, split into training and test images ----

typedef struct digit_list {
    int count;
    digit *at;
} digit_list;

static inline bool digits_append(digit_list *to, const digit *one) {
    if ((to->count & (to->count - 1)) == 0) { // grows at powers of two
        size_t room = to->count ? 2 * (size_t)to->count : 1;
        digit *more = (digit *)realloc(to->at, room * sizeof *more);

        if (!more) return false;
        to->at = more;
    }
    to->at[to->count++] = *one;
    return true;
}

// Reads the images of a file. Every fifth image of each class goes to `test` and the others to
// `train`, so the split depends only on the file. Prints an error and returns false on failure.
static inline bool digits_read(const char *path, digit_list *train, digit_list *test) {
    char line[512];
    digit one;
    int seen[DIGITS_CLASSES] = {0}, lines = 0;
    const char *error = NULL;
    FILE *f = fopen(path, "r");
    bool ok = false;

    while (f && !error && fgets(line, (int)sizeof line, f)) {
        error = digits_parse(line, &one);
        if (++lines > DIGITS_MAX) error = "too many images";
        if (!error && !digits_append(++seen[one.label] % 5 == 0 ? test : train, &one))
            error = "out of memory";
    }
    if (!f || (!error && ferror(f))) fprintf(stderr, "%s: %s\n", path, strerror(errno));
    else if (error) fprintf(stderr, "%s:%d: %s\n", path, lines, error);
    else if (lines < DIGITS_MIN)
        fprintf(stderr, "%s: %d images, expected %d or more\n", path, lines, DIGITS_MIN);
    else ok = true;
    if (f) fclose(f);

    return ok;
}

// Returns the first path at which digits.csv exists: below the current folder, beside this header's
// folder, or beside or above the program. Returns NULL if the file is in none of these places.
static inline const char *digits_find(const char *program) {
    static char path[1024];
    const char *bases[] = {"", __FILE__, program, program, program};
    const char *tails[] = {"examples/data/digits.csv", "../data/digits.csv", "data/digits.csv",
                           "examples/data/digits.csv", "../examples/data/digits.csv"};

    for (size_t i = 0; i < sizeof bases / sizeof bases[0]; i++) {
        const char *slash = strrchr(bases[i], '/');
        int folder = slash ? (int)(slash - bases[i]) + 1 : 0;
        int n = snprintf(path, sizeof path, "%.*s%s", folder, bases[i], tails[i]);

        if (n > 0 && (size_t)n < sizeof path && access(path, R_OK) == 0) return path;
    }
    return NULL;
}

#endif // EXAMPLES_DIGITS_H
