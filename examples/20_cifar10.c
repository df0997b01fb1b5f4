// 20_cifar10.c - a residual network learns CIFAR-10, or the digits in examples/data
//
// build:  cc -O2 -DIDIST_IMPLEMENTATION examples/20_cifar10.c -o 20_cifar10
// run:    ./20_cifar10 --data cifar-10-batches-bin     one rank; CIFAR-10's binary version
//         ./20_cifar10 --side 16 --nproc-per-node 2    two ranks, by idist_spawn; the digits
//         torchrun --no_python --nproc_per_node 2 ./20_cifar10 --side 16    under a launcher
//         mpirun -n 2 ./20_cifar10 --side 16
//         srun -n 2 ./20_cifar10 --side 16
//         or by hand, with any free MASTER_PORT:
//         (export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29520
//          for r in 0 1; do RANK=$r LOCAL_RANK=$r ./20_cifar10 & done; wait)
//         ./20_cifar10 --side 16 --nproc-per-node 2 --resume-from latest    continues
// Without --resume-from the folder of the checkpoints, --output-path, has none of another training.
//
// expected output of the second line, on stderr; a progress bar where that is a terminal:
//    2026-01-30 19:26:12,180 CIFAR10-Training INFO: Train resnet8 on examples/data/digits.csv: ...
//    ...                                          versions, the world, all options
//    ... INFO: Epoch [1/24]: loss 2.3557, .... images/s, ... % of the time in wait for gradients
//    ...
//    ... INFO: Epoch 24 - Evaluation time (seconds): 0.10 - Test metrics:
//    ... INFO:     Accuracy: 0.99....
//    ... INFO:     Loss: 0.0....
//    ... INFO: Best accuracy 0.99..; checksum of the weights ................ on all 2 ranks
// It takes some 15 s on two cores. How the last digits fall depends on compiler, machine and
// number of ranks.
//
// Other builds: with -DUSE_BLAS and -lopenblas (or -lblas) at the end, that library multiplies the
// matrices; with mpicc and -DUSE_MPI there is --backend mpi.
//
// The program is that of the CIFAR10 example of PyTorch-Ignite (examples/cifar10/main.py), and its
// options are called as there: a rate that warms up and falls, Nesterov's momentum, weight decay,
// images moved and mirrored, a validation every few epochs of which the two best networks are
// kept, checkpoints from which a training goes on bit for bit, and --bf16 for gradients in 16 bits
// on their way (--with_amp there). Defaults are for processors: a network of 8 layers (--model
// resnet20 and more for CIFAR-10; the original has resnet18), batches of 64 (512), the rate of
// such batches (0.1; 0.4), a checkpoint every 200 iterations (1000), 2 worker threads in all (12).
//
// What every rank does, and what idist_train.h does about it:
//     its share of the images         idist_sampler; idist_loader, whose threads prepare batches
//     forward and backward            resnet.h, which calls idist_ddp_ready for each gradient
//     the mean of all gradients       idist_ddp, while earlier gradients are still computed
//     the same step everywhere        idist_auto_optim
//     accuracy and loss               idist_accuracy and idist_mean, over all ranks
//     output and checkpoints          idist_train_log, idist_progress, idist_checkpoint: rank 0
// The statistics of the batch norms are those of each rank's own part of the batch, the running
// ones those of rank 0.
//
// Exit code: 0 when all ranks end with the same weights; 1 when something failed; 2 for bad
// options, data or checkpoints.
#ifdef USE_MPI
#include "../idist_mpi.h"
#endif
#include "../idist_train.h"
#include "resnet.h"

#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define NAME "CIFAR10-Training"
#define CHECK(call)                                                        \
    do {                                                                   \
        if ((call) != IDIST_OK) {                                          \
            fprintf(stderr, "%s failed: %s\n", #call, idist_last_error()); \
            return 1;                                                      \
        }                                                                  \
    } while (0)

enum { CIFAR_SIDE = 32, DIGIT_SIDE = 8, DIGIT_PIXELS = DIGIT_SIDE * DIGIT_SIDE };
enum { MIN_IMAGES = 20, MAX_IMAGES = 1000000 };

// ---- options ----

typedef struct config {
    int seed, batch_size, num_workers, num_epochs, num_warmup_epochs, validate_every,
        checkpoint_every, log_every_iters;
    int nproc_per_node, stop_iteration, side, width;
    double learning_rate, momentum, weight_decay;
    const char *data, *output_path, *model, *backend, *resume_from;
    bool bf16, no_overlap;
} config;

static config cfg = {
    .seed = 543,
    .batch_size = 64,
    .num_workers = 2,
    .num_epochs = 24,
    .num_warmup_epochs = 4,
    .validate_every = 3,
    .checkpoint_every = 200,
    .log_every_iters = 15,
    .side = CIFAR_SIDE,
    .width = 16,
    .learning_rate = 0.1,
    .momentum = 0.9,
    .weight_decay = 1e-4,
    .output_path = "output-cifar10",
    .model = "resnet8",
};

typedef struct option {
    const char *name;
    enum { WHOLE, REAL, TEXT, SWITCH } kind;
    void *value;
    double min, max;
    const char *help;
} option;

static const option OPTIONS[] = {
    {"seed", WHOLE, &cfg.seed, 0, INT32_MAX,
     "of the first weights, the shuffles and the augmentation"},
    {"data", TEXT, &cfg.data, 0, 0,
     "folder with CIFAR-10's binary files, or a file like digits.csv"},
    {"output_path", TEXT, &cfg.output_path, 0, 0, "folder of the checkpoints"},
    {"model", TEXT, &cfg.model, 0, 0, "resnet8, resnet14, resnet20, ...: 6 n + 2 layers"},
    {"width", WHOLE, &cfg.width, 2, 256, "channels of the first stage"},
    {"side", WHOLE, &cfg.side, 16, CIFAR_SIDE,
     "pixels to which the digits are scaled up: 16 or 32"},
    {"batch_size", WHOLE, &cfg.batch_size, 1, 65536, "images per step, of all ranks together"},
    {"momentum", REAL, &cfg.momentum, 0, 1, "of the optimizer, Nesterov's"},
    {"weight_decay", REAL, &cfg.weight_decay, 0, 1, "added to the gradient, times the weights"},
    {"num_workers", WHOLE, &cfg.num_workers, 0, 256,
     "threads that prepare batches, of all ranks together"},
    {"num_epochs", WHOLE, &cfg.num_epochs, 1, 100000, "times through the training images"},
    {"learning_rate", REAL, &cfg.learning_rate, 0, 100, "at its peak, after the warm-up"},
    {"num_warmup_epochs", WHOLE, &cfg.num_warmup_epochs, 0, 100000,
     "in which it grows from 0; then it falls to 0"},
    {"validate_every", WHOLE, &cfg.validate_every, 1, 100000, "epochs"},
    {"checkpoint_every", WHOLE, &cfg.checkpoint_every, 1, INT32_MAX, "iterations"},
    {"resume_from", TEXT, &cfg.resume_from, 0, 0,
     "a checkpoint \"training_...\", or the word latest"},
    {"log_every_iters", WHOLE, &cfg.log_every_iters, 1, INT32_MAX,
     "iterations from one line with the loss to the next"},
    {"backend", TEXT, &cfg.backend, 0, 0, "of idist: ring, self, mpi; else the first that fits"},
    {"nproc_per_node", WHOLE, &cfg.nproc_per_node, 0, 1024,
     "ranks to start; 0: a launcher's, or 1"},
    {"bf16", SWITCH, &cfg.bf16, 0, 1, "gradients travel as bfloat16"},
    {"no_overlap", SWITCH, &cfg.no_overlap, 0, 1,
     "gradients travel after the backward pass only, for comparison"},
    {"stop_iteration", WHOLE, &cfg.stop_iteration, 0, INT32_MAX,
     "end early after so many; 0: do not"},
};
enum { N_OPTIONS = sizeof OPTIONS / sizeof OPTIONS[0] };

// The value as text; the same for help and log.
static const char *option_text(const option *o, char *text, size_t capacity) {
    const char *s = o->kind == TEXT ? *(const char *const *)o->value : NULL;
    if (o->kind == SWITCH) s = *(const bool *)o->value ? "yes" : "no";
    if (o->kind == WHOLE) snprintf(text, capacity, "%d", *(const int *)o->value);
    else if (o->kind == REAL) snprintf(text, capacity, "%g", *(const double *)o->value);
    else snprintf(text, capacity, "%s", s ? s : "-");
    return text;
}

static void usage(FILE *out) {
    char text[256];
    fprintf(out, "usage: 20_cifar10 [options]; - and _ are the same in their names\n");
    for (const option *o = OPTIONS; o < OPTIONS + N_OPTIONS; o++)
        fprintf(out, "  --%-18s %s [%s]\n", o->name, o->help, option_text(o, text, sizeof text));
}

// How many characters of `s` spell the option's name: all up to the end or a '='; 0 when it is
// another one.
static size_t match(const char *s, const char *name) {
    size_t i = 0;
    while (name[i] && (s[i] == name[i] || (s[i] == '-' && name[i] == '_'))) i++;
    return !name[i] && (!s[i] || s[i] == '=') ? i : 0;
}

static bool set_option(const option *o, const char *text) {
    char *end = NULL;
    double number;
    if (o->kind == TEXT) return *(const char **)o->value = text, true;
    if (o->kind == SWITCH) return *(bool *)o->value = true;
    number = strtod(text, &end);
    if (end == text || *end || !(number >= o->min && number <= o->max) ||
        (o->kind == WHOLE && number != (double)(int)number)) {
        fprintf(stderr, "--%s %s: expected a %snumber from %g to %g\n", o->name, text,
                o->kind == WHOLE ? "whole " : "", o->min, o->max);
        return false;
    }
    if (o->kind == WHOLE) *(int *)o->value = (int)number;
    else *(double *)o->value = number;
    return true;
}

// Residual blocks per stage; 0 when there is no such model.
static int model_blocks(const char *model) {
    int layers = 0, end = 0;
    if (sscanf(model, "resnet%d%n", &layers, &end) != 1 || model[end]) return 0;
    return layers % 6 == 2 && layers / 6 <= MAX_BLOCKS ? layers / 6 : 0;
}

// 0: go on; 1: --help was answered; 2: wrong.
static int parse_options(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const option *o = OPTIONS;
        const char *s = argv[i];
        size_t n = 0;
        if (!strcmp(s, "--help") || !strcmp(s, "-h")) return usage(stdout), 1;
        while (o < OPTIONS + N_OPTIONS &&
               (s[0] != '-' || s[1] != '-' || (n = match(s + 2, o->name)) == 0))
            o++;
        if (o == OPTIONS + N_OPTIONS)
            return fprintf(stderr, "unknown option %s\n", s), usage(stderr), 2;
        const char *text = s[2 + n] ? s + 3 + n : NULL;
        if (o->kind == SWITCH && text) return fprintf(stderr, "--%s takes no value\n", o->name), 2;
        if (o->kind != SWITCH && !text && (text = argv[++i]) == NULL)
            return fprintf(stderr, "--%s needs a value\n", o->name), 2;
        if (!set_option(o, text)) return 2;
    }
    if (cfg.side != 16 && cfg.side != CIFAR_SIDE)
        return fprintf(stderr, "--side %d: expected 16 or 32\n", cfg.side), 2;
    if (!model_blocks(cfg.model))
        return fprintf(stderr, "--model %s: expected resnet8, resnet14, ... resnet%d\n", cfg.model,
                       6 * MAX_BLOCKS + 2),
               2;
    return 0;
}

// ---- small things ----

static uint64_t fnv1a(uint64_t hash, const void *data, size_t nbytes) {
    const unsigned char *p = (const unsigned char *)data;
    while (nbytes--) hash = (hash ^ *p++) * 0x100000001b3u;
    return hash;
}

static double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// ---- data ----

typedef struct image_set {
    int count, side;
    bool mirror;                    // a mirror image is of the same class
    float mean[3], deviation[3];    // of the colours, from 0 to 1
    unsigned char *labels, *pixels; // pixels: for each image three planes, red, green, blue
} image_set;

static size_t image_nbytes(const image_set *set) {
    return (size_t)(COLOURS * set->side * set->side);
}

// Room for one image more; NULL without memory. Grows at powers of two.
static unsigned char *append(image_set *set, int label) {
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

// CIFAR-10 comes in several versions, whose files differ by the end of their names.
static void say_what_is_missing(const char *path, int error) {
    char other[1024];
    size_t n = strlen(path) > strlen(".bin") ? strlen(path) - strlen(".bin") : 0;
    snprintf(other, sizeof other, "%.*s", (int)n, path);
    fprintf(stderr, "%s: %s\n", path, strerror(error));
    if (error == ENOENT && access(other, F_OK) == 0)
        fprintf(
            stderr,
            "%s is of CIFAR-10's Python version. This program reads the binary version: "
            "cifar-10-binary.tar.gz from "
            "https://www.cs.toronto.edu/~kriz/cifar.html, whose folder is cifar-10-batches-bin\n",
            other);
}

// Records of a label and the pixels of three planes.
static bool read_cifar_file(const char *folder, const char *name, image_set *set) {
    char path[1024];
    unsigned char record[1 + COLOURS * CIFAR_SIDE * CIFAR_SIDE], *to;
    const char *error = NULL;
    size_t n;
    int before = set->count;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "rb");
    if (!f) return say_what_is_missing(path, errno), false;
    while (!error && (n = fread(record, 1, sizeof record, f)) != 0) {
        if (n < sizeof record) error = ferror(f) ? strerror(errno) : "the last record is torn";
        else if (record[0] >= CLASSES) error = "a label is above 9";
        else if (set->count == MAX_IMAGES) error = "too many images";
        else if ((to = append(set, record[0])) == NULL) error = "out of memory";
        else memcpy(to, record + 1, sizeof record - 1);
    }
    fclose(f);
    if (!error && set->count == before) error = "no image in it";
    if (error)
        fprintf(stderr, "%s: image %d: %s; expected records of %zu bytes\n", path,
                set->count - before + 1, error, sizeof record);
    return !error;
}

static bool read_cifar(const char *folder, image_set *train, image_set *test) {
    static const image_set colours = {.side = CIFAR_SIDE,
                                      .mirror = true,
                                      .mean = {0.4914f, 0.4822f, 0.4465f},
                                      .deviation = {0.2023f, 0.1994f, 0.2010f}};
    char name[32];
    *train = *test = colours;
    for (int i = 1; i <= 5; i++) {
        snprintf(name, sizeof name, "data_batch_%d.bin", i);
        if (!read_cifar_file(folder, name, train)) return false;
    }
    return read_cifar_file(folder, "test_batch.bin", test);
}

// 64 pixels of 0 .. 16 and the label, divided by commas; nothing else. Gives what is wrong, or
// NULL.
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

// Grey digits as images in three equal colours, each pixel a square. Every fifth of a class is kept
// for the test.
static bool read_digits(const char *path, int side, image_set *train, image_set *test) {
    const image_set grey = {.side = side,
                            .mean = {0.3f, 0.3f, 0.3f},
                            .deviation = {0.38f, 0.38f, 0.38f}};
    unsigned char pixels[DIGIT_PIXELS], *to;
    char line[512];
    const char *error = NULL;
    int seen[CLASSES] = {0}, lines = 0, label = 0, square = side / DIGIT_SIDE;
    FILE *f = fopen(path, "r");
    if (!f) return fprintf(stderr, "%s: %s\n", path, strerror(errno)), false;
    *train = *test = grey;
    while (!error && fgets(line, (int)sizeof line, f)) {
        error = ++lines > MAX_IMAGES ? "too many images" : parse_digit(line, pixels, &label);
        if (error) break;
        if ((to = append(++seen[label] % 5 == 0 ? test : train, label)) == NULL)
            error = "out of memory";
        for (int i = 0; to && i < COLOURS * side * side; i++) {
            int y = i / side % side / square, x = i % side / square;
            to[i] = (unsigned char)(pixels[y * DIGIT_SIDE + x] * 255 / 16);
        }
    }
    if (!error && ferror(f)) error = strerror(errno);
    if (!error && (train->count < MIN_IMAGES || !test->count)) error = "too few images";
    fclose(f);
    if (error) fprintf(stderr, "%s:%d: %s\n", path, lines, error);
    return !error;
}

// Where digits.csv may be: below the current folder, beside this source file, beside or above the
// program.
static const char *find_digits(const char *program) {
    static char path[1024];
    const char *bases[] = {"", __FILE__, program, program, program};
    const char *tails[] = {"examples/data/digits.csv", "data/digits.csv", "data/digits.csv",
                           "examples/data/digits.csv", "../examples/data/digits.csv"};
    for (size_t i = 0; i < sizeof bases / sizeof bases[0]; i++) {
        const char *slash = strrchr(bases[i], '/');
        int folder = slash ? (int)(slash - bases[i]) + 1 : 0;
        int n = snprintf(path, sizeof path, "%.*s%s", folder, bases[i], tails[i]);
        if (n > 0 && (size_t)n < sizeof path && access(path, R_OK) == 0) return path;
    }
    return NULL;
}

// What a loader fetches from.
typedef struct source {
    image_set set;
    bool augment;
    _Atomic uint64_t epoch; // of the augmentation: worker threads read it
} source;

// Images as floats of about mean 0 and deviation 1: all red planes, then all green, then all blue.
// With augment moved by up to an eighth, and perhaps mirrored, as seed, epoch and index have it,
// whichever rank and thread does it.
static int fetch(void *batch, const size_t *indices, size_t n, void *arg) {
    source *s = (source *)arg;
    const image_set *set = &s->set;
    int side = set->side, reach = side / 8;
    float value[COLOURS][256];
    for (int i = 0; i < COLOURS * 256; i++)
        value[i / 256][i % 256] =
            ((float)(i % 256) / 255 - set->mean[i / 256]) / set->deviation[i / 256];
    for (size_t i = 0; i < n; i++) {
        const unsigned char *pixels = set->pixels + indices[i] * image_nbytes(set);
        uint64_t state =
            (uint64_t)cfg.seed * 7919u + atomic_load(&s->epoch) * 1000003u + indices[i];
        uint64_t r = s->augment ? random_u64(&state) : 0, places = (uint64_t)(2 * reach + 1);
        int dy = s->augment ? (int)(r / 2 % places) - reach : 0,
            dx = s->augment ? (int)(r / 256 % places) - reach : 0;
        bool mirror = set->mirror && r % 2;
        for (int row = 0; row < COLOURS * side; row++) {
            int colour = row / side, y = row % side + dy;
            bool inside = y >= 0 && y < side;
            const unsigned char *from = pixels + (inside ? (colour * side + y) * side : 0);
            float *to =
                (float *)batch + MARGIN +
                (((size_t)colour * n + i) * (size_t)side + (size_t)(row % side)) * (size_t)side;
            for (int k = 0; k < side; k++) {
                int x = (mirror ? side - 1 - k : k) + dx;
                to[k] = value[colour][inside && x >= 0 && x < side ? from[x] : 0];
            }
        }
    }
    return 0;
}

// ---- training ----

// How far the training is; part of a checkpoint.
typedef struct position {
    uint64_t job;              // see job_number
    uint64_t iteration, epoch; // steps made, epochs through
    uint64_t samples;          // of all ranks, in the epoch after these
    double best;               // accuracy; below 0 before the first validation
} position;

typedef struct trainer {
    net net;
    source train, test, seen; // seen: the training images as they are
    idist_sampler *sampler;
    idist_loader *loader, *seen_loader, *test_loader;
    idist_ddp *ddp;
    float *velocity;
    idist_tensor kept[3]; // in a checkpoint
    int *labels;
    int rank, ranks;
    position at;
    double rate;
    double backward_s,
        waited_s; // when the last backward pass ended; from there to the averages, in this epoch
    bool stopped; // by --stop-iteration
    const char *program, *data;
    int exit_code; // what the worker returned, when it ran in this process
} trainer;

// Piecewise linear: from 0 up to --learning-rate in the warm-up, then down to 0.
static double rate_after(double epochs) {
    double warm = cfg.num_warmup_epochs, all = cfg.num_epochs;
    if (epochs < warm) return cfg.learning_rate * epochs / warm;
    return epochs < all ? cfg.learning_rate * (all - epochs) / (all - warm) : 0;
}

// Gradient descent with weight decay and the momentum of Nesterov, in torch.optim's form.
static int optimizer_step(void *arg) {
    trainer *t = (trainer *)arg;
    float m = (float)cfg.momentum, decay = (float)cfg.weight_decay, rate = (float)t->rate,
          *v = t->velocity;
    t->waited_s += seconds_now() - t->backward_s;
    for (int i = 0; i < t->net.n_params; v += t->net.params[i++].count) {
        float *p = (float *)t->net.params[i].data;
        const float *grad = (const float *)t->net.grads[i].data;
        for (size_t k = 0; k < t->net.params[i].count; k++) {
            float g = grad[k] + decay * p[k];
            v[k] = m * v[k] + g;
            p[k] -= rate * (g + m * v[k]);
        }
    }
    return 0;
}

static const float *batch_begin(trainer *t, const idist_batch *batch, const image_set *set) {
    for (size_t i = 0; i < batch->n; i++) t->labels[i] = set->labels[batch->indices[i]];
    t->net.images = (int)batch->n;
    return (const float *)batch->data + MARGIN;
}

static idist_status train_batch(trainer *t, const idist_batch *batch, double *loss) {
    const float *in = batch_begin(t, batch, &t->train.set);
    idist_status status = idist_ddp_forward(t->ddp);
    if (status) return status;
    t->net.training = true;
    idist_trace_begin("forward");
    forward(&t->net, in);
    *loss = cross_entropy(&t->net, t->labels);
    idist_trace_end();
    idist_trace_begin("backward");
    backward(&t->net, in);
    idist_trace_end();
    t->backward_s = seconds_now();
    return t->net.sent ? t->net.sent : idist_auto_optim(t->ddp, optimizer_step, t);
}

// What a training goes on from, in a file that is whole or not there.
static idist_status save(trainer *t, const char *prefix, int keep, double score) {
    idist_checkpoint_desc desc = {.folder = cfg.output_path, .prefix = prefix, .keep = keep};
    return idist_checkpoint_save(&desc, t->at.iteration, score, t->kept, 3, &t->at, sizeof t->at,
                                 NULL);
}

static int resume(trainer *t) {
    idist_checkpoint_desc desc = {.folder = cfg.output_path, .prefix = "training"};
    char latest[1024];
    const char *path = cfg.resume_from;
    uint64_t job = t->at.job;
    if (!strcmp(path, "latest")) {
        CHECK(idist_checkpoint_find(&desc, true, latest, sizeof latest, NULL));
        path = latest;
    }
    CHECK(idist_checkpoint_load(path, t->kept, 3, &t->at, sizeof t->at, NULL));
    if (t->at.job != job)
        return fprintf(stderr, "%s is of other data, seed, batch size, side or model\n", path), 1;
    idist_train_log(NAME, "Resumed from %s: %llu iterations, %llu epochs", path,
                    (unsigned long long)t->at.iteration, (unsigned long long)t->at.epoch);
    return 0;
}

// A training that does not go on from the checkpoints of its folder would keep them, where they are
// better, and not its own.
static int folder_is_free(const trainer *t) {
    idist_checkpoint_desc desc = {.folder = cfg.output_path, .prefix = "training"};
    char found[1024];
    idist_status status = idist_checkpoint_find(&desc, true, found, sizeof found, NULL);
    if (status == IDIST_ERR_NOT_FOUND) return 0;
    if (status != IDIST_OK) return fprintf(stderr, "%s\n", idist_last_error()), 2;
    if (t->rank == 0)
        fprintf(stderr,
                "%s has a training already, %s: go on from it with --resume_from latest, or give "
                "another --output_path\n",
                cfg.output_path, found);
    return 2;
}

// The images of a set, shared out in order. A set that does not divide evenly is filled up with its
// first images: those come last here, and do not count.
static int evaluate(trainer *t, const source *s, idist_loader *loader, const char *tag,
                    double *accuracy) {
    static const char *const names[] = {"Accuracy", "Loss"};
    double start_s = seconds_now(), values[2];
    idist_accuracy hits = {0};
    idist_mean loss = {0};
    idist_batch batch;
    int left = (s->set.count - t->rank + t->ranks - 1) / t->ranks;
    t->net.training = false;
    for (;;) {
        CHECK(idist_loader_next(loader, &batch));
        if (batch.n == 0) break;
        forward(&t->net, batch_begin(t, &batch, &s->set));
        if (t->net.images > left) t->net.images = left;
        left -= t->net.images;
        if (t->net.images == 0) continue;
        CHECK(
            idist_accuracy_update(&hits, t->net.scores, t->labels, (size_t)t->net.images, CLASSES));
        idist_mean_update(&loss, cross_entropy(&t->net, t->labels), t->net.images);
    }
    CHECK(idist_accuracy_compute(&hits, &values[0], NULL));
    CHECK(idist_mean_compute(&loss, &values[1], NULL));
    idist_train_log_metrics(NAME, (int)t->at.epoch, seconds_now() - start_s, tag, names, values, 2);
    *accuracy = values[0];
    return 0;
}

// Every rank evaluates with the running statistics of the first. The two best networks are kept.
static int validate(trainer *t) {
    double accuracy;
    CHECK(idist_broadcast_parameters(&t->kept[2], 1, 0, NULL)); // the running statistics
    if (evaluate(t, &t->seen, t->seen_loader, "Train", &accuracy)) return 1;
    if (evaluate(t, &t->test, t->test_loader, "Test", &accuracy)) return 1;
    if (accuracy > t->at.best) t->at.best = accuracy;
    CHECK(save(t, "best", 2, accuracy));
    return 0;
}

static int train_epoch(trainer *t) {
    char title[64], text[64] = "";
    idist_mean epoch_loss = {0}, recent = {0};
    idist_batch batch;
    double loss, mean, seconds, start_s = seconds_now();
    uint64_t first = t->at.samples,
             step = (uint64_t)(t->ranks * idist_auto_batch_size(cfg.batch_size));
    idist_progress bar = {.title = title, .total = idist_loader_count(t->loader)};
    snprintf(title, sizeof title, "Epoch [%d/%d]", (int)t->at.epoch + 1, cfg.num_epochs);
    t->waited_s = 0;
    for (;;) {
        CHECK(idist_loader_next(t->loader, &batch));
        if (batch.n == 0) break;
        t->rate = rate_after((double)t->at.epoch + (double)t->at.samples / t->train.set.count);
        CHECK(train_batch(t, &batch, &loss));
        idist_mean_update(&epoch_loss, loss, 1);
        idist_mean_update(&recent, loss, 1);
        t->at.samples += step;
        if (++t->at.iteration % (uint64_t)cfg.log_every_iters == 0) {
            CHECK(idist_mean_compute(&recent, &mean, NULL));
            memset(&recent, 0, sizeof recent);
            snprintf(text, sizeof text, "loss=%.4f rate=%.4f", mean, t->rate);
            if (!isatty(STDERR_FILENO))
                idist_train_log(NAME, "%s: [%d/%d] %s", title, (int)(t->at.samples / step),
                                (int)bar.total, text);
        }
        idist_progress_update(&bar, t->at.samples / step, text);
        t->stopped = t->at.iteration == (uint64_t)cfg.stop_iteration;
        if (t->stopped || t->at.iteration % (uint64_t)cfg.checkpoint_every == 0)
            CHECK(save(t, "training", 1, (double)t->at.iteration));
        if (t->stopped) return 0;
    }
    CHECK(idist_mean_compute(&epoch_loss, &mean, NULL));
    seconds = seconds_now() - start_s;
    idist_train_log(NAME, "%s: loss %.4f, %.0f images/s, %.1f %% of the time in wait for gradients",
                    title, mean, (double)(t->at.samples - first) / seconds,
                    100 * t->waited_s / seconds);
    if (t->at.samples == first || mean < 1e6) return 0; // a NaN is not below
    if (t->rank == 0) fprintf(stderr, "the training diverged\n");
    return 1;
}

static int train(trainer *t) {
    while (t->at.epoch < (uint64_t)cfg.num_epochs) {
        int code = train_epoch(t);
        if (code || t->stopped) return code;
        t->at.epoch++;
        t->at.samples = 0;
        atomic_store(&t->train.epoch, t->at.epoch);
        CHECK(idist_loader_set_epoch(t->loader, t->at.epoch));
        bool last = t->at.epoch == (uint64_t)cfg.num_epochs;
        if ((last || t->at.epoch % (uint64_t)cfg.validate_every == 0) && (code = validate(t)) != 0)
            return code;
        if (last) CHECK(save(t, "training", 1, (double)t->at.iteration));
    }
    return 0;
}

// ---- the parts put together ----

// Reads the data. 0 is success.
static int read_data(void *arg) {
    trainer *t = (trainer *)arg;
    struct stat info;
    t->data = cfg.data ? cfg.data : find_digits(t->program);
    if (!t->data)
        return fprintf(stderr, "examples/data/digits.csv not found: give it with --data\n"), 1;
    if (stat(t->data, &info) != 0) return fprintf(stderr, "%s: %s\n", t->data, strerror(errno)), 1;
    bool good = S_ISDIR(info.st_mode) ? read_cifar(t->data, &t->train.set, &t->test.set)
                                      : read_digits(t->data, cfg.side, &t->train.set, &t->test.set);
    t->seen.set = t->train.set;
    t->train.augment = true;
    return good ? 0 : 1;
}

// *other: the first rank whose value differs from rank 0's; -1 when all have the same.
static int compare_ranks(uint64_t value, int *other) {
    int n = idist_get_world_size();
    uint64_t *all = (uint64_t *)malloc((size_t)n * sizeof *all);
    idist_status status =
        all ? idist_all_gather(&value, all, 1, IDIST_U64, NULL) : IDIST_ERR_NO_MEMORY;
    *other = -1;
    for (int r = n - 1; r > 0 && !status; r--)
        if (all[r] != all[0]) *other = r;
    free(all);
    CHECK(status);
    return 0;
}

// Ranks, and a training and its checkpoint, have to have this in common.
static uint64_t job_number(const trainer *t) {
    int numbers[] = {cfg.seed, cfg.batch_size, cfg.width, t->train.set.side};
    uint64_t hash = fnv1a(0xcbf29ce484222325u, t->train.set.labels, (size_t)t->train.set.count);
    return fnv1a(fnv1a(hash, numbers, sizeof numbers), cfg.model, strlen(cfg.model));
}

static void log_configuration(const trainer *t) {
    char text[256];
    idist_train_log(NAME, "Train %s on %s: %d images to train, %d to test", cfg.model, t->data,
                    t->train.set.count, t->test.set.count);
    idist_train_log_config(NAME);
    idist_train_log(NAME, "Configuration:");
    for (const option *o = OPTIONS; o < OPTIONS + N_OPTIONS; o++)
        idist_train_log(NAME, "\t%s: %s", o->name, option_text(o, text, sizeof text));
    idist_train_log(NAME, "%zu parameters in %d buckets; batch %d per rank", t->net.n_values,
                    idist_ddp_buckets(t->ddp), idist_auto_batch_size(cfg.batch_size));
}

static int make_loaders(trainer *t, int batch) {
    idist_sampler_desc samples = {.length = (size_t)t->train.set.count, .seed = (uint64_t)cfg.seed};
    idist_sampler_state state = {.epoch = t->at.epoch,
                                 .position = t->at.samples / (uint64_t)t->ranks};
    idist_loader_desc desc = {.batch_size = (size_t)batch,
                              .fetch = fetch,
                              .arg = &t->train,
                              .drop_last = true,
                              .num_workers = idist_auto_num_workers(cfg.num_workers)};
    size_t sample_nbytes = (image_nbytes(&t->train.set) + 2 * MARGIN) *
                           sizeof(float); // with margins even for batches of one
    desc.batch_nbytes = sample_nbytes * (size_t)batch;
    CHECK(idist_sampler_create(&samples, &t->sampler));
    if (state.position > idist_sampler_count(t->sampler))
        state.position = idist_sampler_count(t->sampler);
    CHECK(idist_sampler_set_state(t->sampler, state));
    desc.sampler = t->sampler;
    atomic_store(&t->train.epoch, t->at.epoch);
    CHECK(idist_loader_create(&desc, &t->loader));
    if (idist_loader_count(t->loader) == 0) {
        if (t->rank == 0)
            fprintf(stderr, "--batch_size %d is more than the training images\n", cfg.batch_size);
        return 2;
    }
    desc.sampler = NULL;
    desc.batch_size = (size_t)cfg.batch_size;
    desc.batch_nbytes = sample_nbytes * (size_t)cfg.batch_size;
    desc.num_workers = cfg.num_workers;
    desc.drop_last = false;
    samples.in_order = true;
    desc.arg = &t->seen;
    CHECK(idist_auto_loader(&desc, &samples, &t->seen_loader));
    samples.length = (size_t)t->test.set.count;
    desc.arg = &t->test;
    CHECK(idist_auto_loader(&desc, &samples, &t->test_loader));
    return 0;
}

static int make_network(trainer *t, int batch) {
    if (!net_create(&t->net, model_blocks(cfg.model), cfg.width, t->train.set.side, batch,
                    (uint64_t)cfg.seed) ||
        (t->velocity = new_floats(&t->net, t->net.n_values)) == NULL ||
        (t->labels = (int *)calloc((size_t)batch, sizeof *t->labels)) == NULL)
        return fprintf(stderr, "rank %d: no memory for the network\n", t->rank), 1;
    idist_tensor weights = {t->net.values, t->net.n_values, IDIST_F32},
                 velocity = {t->velocity, t->net.n_values, IDIST_F32};
    idist_tensor running = {t->net.running, t->net.n_running, IDIST_F32};
    t->kept[0] = weights;
    t->kept[1] = velocity;
    t->kept[2] = running;
    idist_ddp_desc desc = {.params = t->net.params,
                           .n = t->net.n_params,
                           .buffers = &t->kept[2],
                           .n_buffers = 1,
                           .compression = cfg.bf16 ? IDIST_COMPRESS_BF16 : IDIST_COMPRESS_NONE};
    desc.bucket_nbytes =
        64
        << 10; // small, as the network is: most of them are under way before the backward pass ends
    CHECK(idist_ddp_create(&desc, &t->ddp));
    for (int i = 0; i < t->net.n_params; i++) {
        t->net.grads[i] = t->net.params[i];
        t->net.grads[i].data = idist_ddp_grad(t->ddp, i);
    }
    t->net.ddp = cfg.no_overlap ? NULL : t->ddp;
    return 0;
}

static void clean_up(trainer *t) {
    idist_loader_free(&t->loader);
    idist_loader_free(&t->seen_loader);
    idist_loader_free(&t->test_loader);
    idist_sampler_free(&t->sampler);
    idist_ddp_free(&t->ddp);
    net_free(&t->net);
    free(t->labels);
    free(t->train.set.labels);
    free(t->train.set.pixels);
    free(t->test.set.labels);
    free(t->test.set.pixels);
}

static int run_training(trainer *t) {
    int other, code, batch = idist_auto_batch_size(cfg.batch_size);
    char best[40];
    double start_s;
    idist_status status = idist_one_rank_first(read_data, t, 0, true, NULL);
    if (status == IDIST_ERR_CALLBACK) return 2;
    CHECK(status);
    t->at.job = job_number(t);
    t->at.best = -1;
    if (compare_ranks(t->at.job, &other)) return 1;
    if (other >= 0 && t->rank == 0)
        fprintf(stderr, "rank %d has other data or options than rank 0\n", other);
    if (other >= 0) return 2;
    if ((code = make_network(t, batch)) != 0) return code;
    if (cfg.resume_from ? resume(t) : folder_is_free(t)) return 2;
    if ((code = make_loaders(t, batch)) != 0) return code;
    log_configuration(t);
    start_s = seconds_now();
    if ((code = train(t)) != 0) return code;
    uint64_t sum = fnv1a(0xcbf29ce484222325u, t->net.values, t->net.n_values * sizeof(float));
    if (compare_ranks(sum, &other)) return 1;
    if (other >= 0)
        return fprintf(stderr, "rank %d ended with other weights than rank 0\n", other), 1;
    idist_train_log(NAME, "%s after %llu iterations, %.1f s", t->stopped ? "Stopped" : "Trained",
                    (unsigned long long)t->at.iteration, seconds_now() - start_s);
    if (t->at.best < 0) snprintf(best, sizeof best, "Not validated yet");
    else snprintf(best, sizeof best, "Best accuracy %.4f", t->at.best);
    idist_train_log(NAME, "%s; checksum of the weights %016llx on all %d ranks", best,
                    (unsigned long long)sum, t->ranks);
    return 0;
}

static int training(int local_rank, void *arg) {
    trainer *t = (trainer *)arg;
    (void)local_rank;
    t->rank = idist_get_rank();
    t->ranks = idist_get_world_size();
    t->exit_code = run_training(t);
    clean_up(t);
    return t->exit_code;
}

int main(int argc, char **argv) {
    static trainer t;
    static idist_report report;
    idist_desc desc = {.report = &report};
    int code = parse_options(argc, argv);
    if (code) return code == 1 ? 0 : code;
    desc.backend = cfg.backend;
    desc.nproc_per_node = cfg.nproc_per_node;
    report.rank = -1;
    t.program = argc > 0 ? argv[0] : "";
    idist_status status = idist_parallel_run(&desc, training, &t);
    if (t.exit_code) return t.exit_code; // it ran in this process and said why
    if (status == IDIST_OK) return 0;
    fprintf(stderr, "20_cifar10: %s\n", idist_last_error());
    return report.rank >= 0 && report.exit_code == 2 ? 2 : 1;
}
