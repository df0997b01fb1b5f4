// cifar10_data.h - the images of apps/cifar10: CIFAR-10's binary files, or digits in the format of
// examples/data/digits.csv, and batches of them with augmentation. Nothing in this file
// communicates.
#ifndef CIFAR10_DATA_H
#define CIFAR10_DATA_H
#include "../../lib/digits.h"
#include "resnet.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

enum { CIFAR_SIDE = 32, DIGIT_SIDE = 8, DIGIT_PIXELS = DIGIT_SIDE * DIGIT_SIDE };
enum { MIN_IMAGES = 20, MAX_IMAGES = 1000000 };

// Text that --help and errors about these files print.
#define CIFAR_ARCHIVE                                                                   \
    "cifar-10-binary.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html "          \
    "(170,052,171 bytes,\nMD5 c32a1d4ab5d03f1284b67883e8d87530) unpacks to the folder " \
    "cifar-10-batches-bin with\ndata_batch_1.bin to data_batch_5.bin and "              \
    "test_batch.bin of 30,730,000 bytes each: 10,000 records\nof 3,073 bytes, a label " \
    "and the pixels.\n"

typedef struct image_set {
    int count, side;
    bool mirror;                    // a mirror image has the same class
    float mean[3], deviation[3];    // of the colors, from 0 to 1
    const char *names[CLASSES];     // of the classes
    unsigned char *labels, *pixels; // pixels: for each image three planes, red, green, blue
} image_set;

static size_t image_nbytes(const image_set *set) {
    return (size_t)(COLOURS * set->side * set->side);
}

// Returns the size in bytes of one image in a batch, as floats, with margins even for batches of
// one.
static size_t image_batch_nbytes(const image_set *set) {
    return (image_nbytes(set) + 2 * MARGIN) * sizeof(float);
}

static void free_images(image_set *set) {
    free(set->labels);
    free(set->pixels);
    set->labels = set->pixels = NULL;
}

// Adds an image with this label. Returns the place for the image's pixels, or NULL if memory cannot
// be allocated. Grows the arrays at powers of two.
static unsigned char *append_image(image_set *set, int label) {
    size_t n = (size_t)set->count, size = image_nbytes(set);

    if ((n & (n - 1)) == 0) {
        unsigned char *labels = (unsigned char *)realloc(set->labels, n ? 2 * n : 1), *pixels;

        if (labels) set->labels = labels;
        pixels = labels ? (unsigned char *)realloc(set->pixels, (n ? 2 * n : 1) * size) : NULL;
        if (!pixels) return NULL;
        set->pixels = pixels;
    }
    set->labels[set->count++] = (unsigned char)label;

    return set->pixels + n * size;
}

// ---- CIFAR-10 ----

// Prints why a file was not opened. CIFAR-10 exists in several versions, whose file names end
// differently.
static void say_what_is_missing(const char *path, int error) {
    char other[1024];
    size_t n = strlen(path) > strlen(".bin") ? strlen(path) - strlen(".bin") : 0;

    snprintf(other, sizeof other, "%.*s", (int)n, path);
    fprintf(stderr, "%s: %s\n", path, strerror(error));
    if (error == ENOENT && access(other, F_OK) == 0)
        fprintf(stderr,
                "%s is of CIFAR-10's Python version. This program reads the binary version: ",
                other);
    fprintf(stderr, "%s", CIFAR_ARCHIVE);
}

// Reads a file of records, each a label and the pixels of three planes. Prints an error and returns
// false on failure.
static bool read_cifar_file(const char *folder, const char *name, image_set *set) {
    char path[1024];
    unsigned char record[1 + COLOURS * CIFAR_SIDE * CIFAR_SIDE], *to;
    const char *error = NULL;
    size_t n;
    int before = set->count;
    FILE *f;

    snprintf(path, sizeof path, "%s/%s", folder, name);
    f = fopen(path, "rb");
    if (!f) {
        say_what_is_missing(path, errno);
        return false;
    }

    while (!error && (n = fread(record, 1, sizeof record, f)) != 0) {
        if (n < sizeof record) error = ferror(f) ? strerror(errno) : "the last record is torn";
        else if (record[0] >= CLASSES) error = "a label is above 9";
        else if (set->count == MAX_IMAGES) error = "too many images";
        else if ((to = append_image(set, record[0])) == NULL) error = "out of memory";
        else memcpy(to, record + 1, sizeof record - 1);
    }
    fclose(f);

    if (!error && set->count == before) error = "no image in it";
    if (error)
        fprintf(stderr, "%s: image %d: %s; expected records of %zu bytes\n%s", path,
                set->count - before + 1, error, sizeof record, CIFAR_ARCHIVE);

    return !error;
}

static bool read_cifar(const char *folder, image_set *train, image_set *test) {
    static const image_set colours = {.side = CIFAR_SIDE,
                                      .mirror = true,
                                      .mean = {0.4914f, 0.4822f, 0.4465f},
                                      .deviation = {0.2023f, 0.1994f, 0.2010f},
                                      .names = {"airplane", "automobile", "bird", "cat", "deer",
                                                "dog", "frog", "horse", "ship", "truck"}};
    char name[32];

    *train = *test = colours;
    for (int i = 1; i <= 5; i++) {
        snprintf(name, sizeof name, "data_batch_%d.bin", i);
        if (!read_cifar_file(folder, name, train)) return false;
    }

    return read_cifar_file(folder, "test_batch.bin", test);
}

// ---- digits ----

// Parses 64 pixels, from 0 to 16, and the label, separated by commas, with nothing else on the
// line. Returns a text that says what is wrong, or NULL if the line is valid.
static const char *parse_digit(const char *s, unsigned char *pixels, int *label) {
    for (int i = 0; i <= DIGIT_PIXELS; i++) {
        int value = 0, digits = 0;

        for (; *s >= '0' && *s <= '9' && digits < 3; digits++) value = 10 * value + (*s++ - '0');
        if (digits == 0 || (i < DIGIT_PIXELS && *s++ != ','))
            return "expected 65 numbers (64 pixels, 1 label) divided by commas";
        if (value > (i < DIGIT_PIXELS ? 16 : CLASSES - 1))
            return "a pixel is above 16, or the label above 9";
        if (i < DIGIT_PIXELS) pixels[i] = (unsigned char)value;
        else *label = value;
    }

    return s[strspn(s, "\r\n")] ? "something follows the label" : NULL;
}

// Turns each pixel into a square, with the same value in all three colors.
static void enlarge_digit(const unsigned char *pixels, int side, unsigned char *to) {
    int square = side / DIGIT_SIDE;

    for (int i = 0; i < COLOURS * side * side; i++) {
        int y = i / side % side / square, x = i % side / square;

        to[i] = (unsigned char)(pixels[y * DIGIT_SIDE + x] * 255 / 16);
    }
}

// Reads a file of digits. Every fifth image of a class is for the test. Prints an error and returns
// false on failure.
static bool read_digits(const char *path, int side, image_set *train, image_set *test) {
    const image_set grey = {.side = side,
                            .mean = {0.3f, 0.3f, 0.3f},
                            .deviation = {0.38f, 0.38f, 0.38f},
                            .names = {"0", "1", "2", "3", "4", "5", "6", "7", "8", "9"}};
    unsigned char pixels[DIGIT_PIXELS], *to;
    char line[512];
    const char *error = NULL;
    int seen[CLASSES] = {0}, lines = 0, label = 0;
    FILE *f = fopen(path, "r");

    if (!f) {
        fprintf(stderr, "%s: %s\n", path, strerror(errno));
        return false;
    }

    *train = *test = grey;
    while (!error && fgets(line, (int)sizeof line, f)) {
        error = ++lines > MAX_IMAGES ? "too many images" : parse_digit(line, pixels, &label);
        if (error) break;
        to = append_image(++seen[label] % 5 == 0 ? test : train, label);
        if (to) enlarge_digit(pixels, side, to);
        else error = "out of memory";
    }
    if (!error && ferror(f)) error = strerror(errno);
    if (!error && (train->count < MIN_IMAGES || !test->count)) error = "too few images";
    fclose(f);
    if (error) fprintf(stderr, "%s:%d: %s\n", path, lines, error);

    return !error;
}

// Reads a folder with CIFAR-10's files, or a file of digits, which are scaled up to `side`. Prints
// an error and returns false if the path is neither.
static bool read_images(const char *path, int side, image_set *train, image_set *test) {
    struct stat info;

    if (!path) {
        fprintf(stderr, "examples/data/digits.csv not found: give it with --data\n");
        return false;
    }
    if (stat(path, &info) != 0) {
        fprintf(stderr, "%s: %s\n", path, strerror(errno));
        return false;
    }

    return S_ISDIR(info.st_mode) ? read_cifar(path, train, test)
                                 : read_digits(path, side, train, test);
}

// ---- batches ----

// The images that a loader fetches.
typedef struct source {
    image_set set;
    idist_loader *loader;
    bool augment;           // and shuffle
    uint64_t seed;          // of the augmentation
    _Atomic uint64_t epoch; // of the augmentation; worker threads read it
} source;

// The offset of an image in pixels, and whether the image is mirrored.
typedef struct placement {
    int dy, dx;
    bool mirror;
} placement;

// Returns the placement of an image. With augmentation, the image moves by up to an eighth of its
// side. The placement depends only on seed, epoch and index. Every rank and thread therefore sees
// the same image, and a training run can be repeated on a different number of ranks. (A program
// that wants different random numbers on each rank seeds its generator with idist_auto_seed.)
static placement place_image(source *s, size_t index) {
    int reach = s->set.side / 8;
    uint64_t state = s->seed * 7919u + atomic_load(&s->epoch) * 1000003u + index;
    uint64_t r = random_u64(&state), places = (uint64_t)(2 * reach + 1);
    placement p = {0, 0, false};

    if (!s->augment) return p;

    p.dy = (int)(r / 2 % places) - reach;
    p.dx = (int)(r / 256 % places) - reach;
    p.mirror = s->set.mirror && r % 2;

    return p;
}

// Writes one plane of an image: value[] holds a float for each of the 256 values. Pixels from
// outside the image are black.
static void write_plane(const unsigned char *from, int side, placement p, const float *value,
                        float *to) {
    for (int row = 0; row < side; row++) {
        int y = row + p.dy;
        bool inside = y >= 0 && y < side;
        const unsigned char *line = from + (inside ? y * side : 0);

        for (int k = 0; k < side; k++) {
            int x = (p.mirror ? side - 1 - k : k) + p.dx;

            to[row * side + k] = value[inside && x >= 0 && x < side ? line[x] : 0];
        }
    }
}

// Writes images as floats with a mean of about 0 and a deviation of about 1. All red planes come
// first, then all green planes, then all blue planes.
static int fetch_images(void *batch, const size_t *indices, size_t n, void *arg) {
    source *s = (source *)arg;
    const image_set *set = &s->set;
    size_t area = (size_t)(set->side * set->side);
    float value[COLOURS][256];

    for (int i = 0; i < COLOURS * 256; i++)
        value[i / 256][i % 256] =
            ((float)(i % 256) / 255 - set->mean[i / 256]) / set->deviation[i / 256];

    for (size_t i = 0; i < n; i++) {
        const unsigned char *pixels = set->pixels + indices[i] * image_nbytes(set);
        placement p = place_image(s, indices[i]);

        for (size_t c = 0; c < COLOURS; c++)
            write_plane(pixels + c * area, set->side, p, value[c],
                        (float *)batch + MARGIN + (c * n + i) * area);
    }

    return 0;
}

// Copies the labels of a fetched batch to the net, and sets its number of images. Returns the
// images for the passes.
static const float *take_batch(net *n, const image_set *set, const idist_batch *batch) {
    for (size_t i = 0; i < batch->n; i++) n->labels[i] = set->labels[batch->indices[i]];
    n->images = (int)batch->n;

    return (const float *)batch->data + MARGIN;
}

#endif // CIFAR10_DATA_H
