// 05_train_digits.c - several processes train one network on real images (data-parallel training)
//
// build:  cc -O2 -DIDIST_IMPLEMENTATION examples/05_train_digits.c -o 05_train_digits
// run:    ./05_train_digits                 one rank per core, at least 2, by idist_spawn
//         ./05_train_digits --ranks 1            alone
//         or by hand, with any free MASTER_PORT:
//         (export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29512
//          for r in 0 1; do RANK=$r LOCAL_RANK=$r ./05_train_digits & done; wait)
//         idistrun -n 2 --max-restarts 3 ./05_train_digits --checkpoint digits.ckpt
//                                           continues from the checkpoint when a rank has died
//
// expected output, when it is not a terminal (there, a progress bar runs as well):
//    data      examples/data/digits.csv: 1797 images, 1442 to train and 355 to test
//    model     conv 3x3x16, conv 3x3x16, max pool 2x2, dense 10: 5050 parameters
//    ranks     2 (backend ring, launcher spawn)
//    training  30 epochs, batch 64 in all (32 per rank), seed 1
//    epoch   1/30  loss 1.513284  train  49.10 %     .... samples/s
//    ...
//    epoch  30/30  loss 0.022489  train  99.24 %     .... samples/s
//    accuracy  99.44 % (353 of 355 test images)
//    time      ... s, ... % of it communicating
//    checksum 0x................ on all 2 ranks
// Dots: speed, time and checksum depend on machine and compiler.
//
// How the work is divided. All ranks hold the same weights. Every epoch they shuffle the images
// with the same seed, and so agree, without a message, on which images each global batch has; each
// takes its share of the batch, computes the gradient of that share, and one idist_all_reduce adds
// the shares up:
//
//     batch   | 17  3 88 41 | 62  9 70  5 |       images, after the shuffle
//               rank 0        rank 1              each: gradient of its share
//               `--- all_reduce SUM ---'        both: gradient of the batch, divided by its size
//
// The sum does not depend on where the cuts are: any number of ranks trains the same network, up
// to rounding. The numbers here are doubles, so that this rounding stays below the digits printed.
// (Large networks use float, and live with it.)
//
// Exit code: 0 when the weights are the same on all ranks and, with the default epochs and batch,
// accuracy is 97 % or more; 1 when something failed; 2 for bad options or data.
#include "../idist.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define CHECK(call)                                                        \
    do {                                                                   \
        if ((call) != IDIST_OK) {                                          \
            fprintf(stderr, "%s failed: %s\n", #call, idist_last_error()); \
            return 1;                                                      \
        }                                                                  \
    } while (0)

enum { SIDE = 8, PIXELS = SIDE * SIDE, CLASSES = 10 };
enum {
    DEFAULT_EPOCHS = 30,
    DEFAULT_BATCH = 64,
    MIN_IMAGES = 100,
    MAX_IMAGES = 1000000,
    DEADLINE_MS = 60000
};

// Feature maps have CH channels and carry a border of zeros, so that a 3x3 window fits everywhere.
enum { CH = 16, PAD = SIDE + 2, HALF = SIDE / 2, POOLED = HALF * HALF * CH };

// All parameters lie in one array, and so do their gradients: one all_reduce does it. Two more sums
// ride along.
enum {
    W1 = 0,
    B1 = W1 + 9 * CH,
    W2 = B1 + CH,
    B2 = W2 + 9 * CH * CH,
    W3 = B2 + CH,
    B3 = W3 + POOLED * CLASSES
};
enum { PARAMS = B3 + CLASSES, LOSS = PARAMS, HITS, SUMS };

typedef struct image {
    unsigned char pixels[PIXELS]; // 0 .. 16
    unsigned char label;          // 0 .. 9
} image;

typedef struct images {
    int count;
    image *at;
} images;

typedef struct job {
    int ranks, epochs, batch; // ranks == 0: not given
    uint64_t seed;
    const char *path;       // of the data; NULL: look for it
    const char *checkpoint; // file; NULL: none
    images train, test;
    bool bad_input; // this process could not read its data; the others must learn of it
    int exit_code;  // what the worker returned, when it ran in this process
} job;

// ---- small things ----

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// exp and log of our own, so that the program links without -lm.
static double exp_of(double x) { // x <= 0
    double y = x / 1024, sum = 1;
    if (x < -700) return 0;
    for (int k = 12; k >= 1; k--) sum = 1 + sum * y / k; // Taylor; |y| < 0.7
    for (int k = 0; k < 10; k++) sum *= sum;
    return sum;
}

static double log_of(double x) { // 1 <= x <= CLASSES: Halley's iteration on exp
    double y = 0;
    for (int k = 0; k < 8; k++) {
        double inverse = exp_of(-y);
        y += 2 * (x * inverse - 1) / (x * inverse + 1);
    }
    return y;
}

static uint64_t random_u64(uint64_t *state) { // splitmix64
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static uint64_t fnv1a(uint64_t hash, const void *data, size_t nbytes) {
    const unsigned char *p = (const unsigned char *)data;
    while (nbytes--) hash = (hash ^ *p++) * 0x100000001b3u;
    return hash;
}

// ---- data ----

// 64 pixels and the label, divided by commas; nothing else. Gives what is wrong, or NULL.
static const char *parse_line(const char *s, image *out) {
    for (int i = 0; i <= PIXELS; i++) {
        int value = 0, digits = 0;
        for (; *s >= '0' && *s <= '9' && digits < 3; digits++) value = 10 * value + (*s++ - '0');
        if (digits == 0 || (i < PIXELS && *s++ != ','))
            return "expected 65 numbers (64 pixels, 1 label) divided by commas";
        if (value > (i < PIXELS ? 16 : CLASSES - 1))
            return i < PIXELS ? "a pixel is above 16" : "the label is above 9";
        *(i < PIXELS ? &out->pixels[i] : &out->label) = (unsigned char)value;
    }
    return s[strspn(s, "\r\n")] ? "something follows the label" : NULL;
}

static bool append(images *to, const image *one) {
    if ((to->count & (to->count - 1)) == 0) { // grow at powers of two
        image *more =
            (image *)realloc(to->at, (to->count ? 2 * (size_t)to->count : 1) * sizeof *more);
        if (!more) return false;
        to->at = more;
    }
    to->at[to->count++] = *one;
    return true;
}

// Every fifth image of each class is kept for the test: a split that depends on nothing but the
// file.
static bool read_images(job *j, FILE *f) {
    char line[512];
    image one;
    int seen[CLASSES] = {0}, lines = 0;
    const char *error = NULL;
    while (!error && fgets(line, (int)sizeof line, f)) {
        error = parse_line(line, &one);
        if (++lines > MAX_IMAGES) error = "too many images";
        if (!error && !append(++seen[one.label] % 5 == 0 ? &j->test : &j->train, &one))
            error = "out of memory";
    }
    if (error) fprintf(stderr, "%s:%d: %s\n", j->path, lines, error);
    else if (ferror(f)) fprintf(stderr, "%s: %s\n", j->path, strerror(errno));
    else if (lines < MIN_IMAGES)
        fprintf(stderr, "%s: %d images, expected %d or more\n", j->path, lines, MIN_IMAGES);
    else return true;
    return false;
}

// Where digits.csv may be: below the current folder, beside this source file, beside or above the
// program.
static const char *find_data(const char *program) {
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

static bool load_data(job *j, const char *program) {
    if (!j->path) j->path = find_data(program);
    if (!j->path) {
        fprintf(stderr,
                "examples/data/digits.csv not found here, beside the source or beside the program; "
                "give it with --data PATH\n");
        return false;
    }
    FILE *f = fopen(j->path, "r");
    if (!f) {
        fprintf(stderr, "%s: %s\n", j->path, strerror(errno));
        return false;
    }
    bool ok = read_images(j, f);
    fclose(f);
    if (ok && j->batch > j->train.count) {
        fprintf(stderr, "--batch %d is more than the %d training images\n", j->batch,
                j->train.count);
        ok = false;
    }
    return ok;
}

// ---- the network: conv, conv, max pool, dense, softmax ----

typedef struct layers { // what one image makes of the layers, and the gradients on the way back
    double input[PAD * PAD], map1[PAD * PAD * CH], map2[PAD * PAD * CH], pooled[POOLED],
        prob[CLASSES];
    double dmap1[PAD * PAD * CH], dmap2[PAD * PAD * CH];
    int winner[POOLED]; // which place of map2 was the largest of its 2x2 window
} layers;

static int place(int y, int x) { return (y + 1) * PAD + x + 1; }

// out = relu(conv3x3(in) + b). Channels lie innermost: the loops over them have no branches and
// vectorise. After a relu about half of `in` is zero, and what is zero is skipped.
static void conv_forward(const double *in, int nin, const double *w, const double *b, double *out) {
    for (int y = 0; y < SIDE; y++) {
        for (int x = 0; x < SIDE; x++) {
            double sum[CH];
            memcpy(sum, b, sizeof sum);
            for (int tap = 0; tap < 9; tap++) {
                const double *from = in + place(y + tap / 3 - 1, x + tap % 3 - 1) * nin;
                for (int i = 0; i < nin; i++) {
                    const double *row = w + (tap * nin + i) * CH;
                    if (from[i] != 0)
                        for (int c = 0; c < CH; c++) sum[c] += from[i] * row[c];
                }
            }
            for (int c = 0; c < CH; c++) out[place(y, x) * CH + c] = sum[c] > 0 ? sum[c] : 0;
        }
    }
}

// Adds to dw and db what follows from dout, and to din where it is wanted (not for the image) and
// `in` is not zero: where a relu gave zero, nothing flows back.
static void conv_backward(const double *in, int nin, const double *w, const double *dout,
                          double *dw, double *db, double *din) {
    for (int y = 0; y < SIDE; y++) {
        for (int x = 0; x < SIDE; x++) {
            const double *g = dout + place(y, x) * CH;
            for (int c = 0; c < CH; c++) db[c] += g[c];
            for (int tap = 0; tap < 9; tap++) {
                int at = place(y + tap / 3 - 1, x + tap % 3 - 1) * nin;
                for (int i = 0; i < nin; i++) {
                    double value = in[at + i], even = 0, odd = 0;
                    const double *row = w + (tap * nin + i) * CH;
                    double *drow = dw + (tap * nin + i) * CH;
                    if (value == 0) continue;
                    for (int c = 0; c < CH; c++) drow[c] += value * g[c];
                    for (int c = 0; din && c < CH; c += 2)
                        even += row[c] * g[c], odd += row[c + 1] * g[c + 1];
                    if (din) din[at + i] += even + odd;
                }
            }
        }
    }
}

static void pool_forward(layers *l) {
    for (int i = 0; i < POOLED; i++) {
        int c = i % CH, y = i / CH / HALF * 2, x = i / CH % HALF * 2;
        int best = place(y, x) * CH + c;
        for (int k = 1; k < 4; k++) {
            int at = place(y + k / 2, x + k % 2) * CH + c;
            if (l->map2[at] > l->map2[best]) best = at;
        }
        l->winner[i] = best;
        l->pooled[i] = l->map2[best];
    }
}

// Fills l->prob; gives the class that is most likely, and in *loss the cross entropy to the label.
// The image is moved by `shift` places, at most one in each direction: its edge may slide into the
// border.
static int forward(const double *w, const image *im, int shift, layers *l, double *loss) {
    double logit[CLASSES], sum = 0;
    int best = 0;
    memset(l->input, 0, sizeof l->input);
    for (int i = 0; i < PIXELS; i++)
        l->input[place(i / SIDE, i % SIDE) + shift] = im->pixels[i] / 16.0;
    conv_forward(l->input, 1, w + W1, w + B1, l->map1);
    conv_forward(l->map1, CH, w + W2, w + B2, l->map2);
    pool_forward(l);
    memcpy(logit, w + B3, sizeof logit);
    for (int i = 0; i < POOLED; i++)
        for (int k = 0; k < CLASSES; k++) logit[k] += l->pooled[i] * w[W3 + i * CLASSES + k];
    for (int k = 1; k < CLASSES; k++)
        if (logit[k] > logit[best]) best = k;
    for (int k = 0; k < CLASSES; k++) sum += l->prob[k] = exp_of(logit[k] - logit[best]);
    for (int k = 0; k < CLASSES; k++) l->prob[k] /= sum;
    *loss = log_of(sum) + logit[best] - logit[im->label];
    return best;
}

// Adds the gradient of one image, its loss, and whether it was recognised.
static void add_gradient(const double *w, const image *im, int shift, layers *l, double *sums) {
    double loss, delta[CLASSES];
    sums[HITS] += forward(w, im, shift, l, &loss) == im->label;
    sums[LOSS] += loss;
    for (int k = 0; k < CLASSES; k++) {
        delta[k] = l->prob[k] - (k == im->label);
        sums[B3 + k] += delta[k];
    }
    memset(l->dmap1, 0, sizeof l->dmap1);
    memset(l->dmap2, 0, sizeof l->dmap2);
    for (int i = 0; i < POOLED; i++) {
        double back = 0;
        if (l->pooled[i] <= 0) continue;
        for (int k = 0; k < CLASSES; k++) {
            sums[W3 + i * CLASSES + k] += l->pooled[i] * delta[k];
            back += w[W3 + i * CLASSES + k] * delta[k];
        }
        l->dmap2[l->winner[i]] = back;
    }
    conv_backward(l->map1, CH, w + W2, l->dmap2, sums + W2, sums + B2, l->dmap1);
    conv_backward(l->input, 1, w + W1, l->dmap1, sums + W1, sums + B1, NULL);
}

// Uniform between -bound and bound; He's rule for relu: bound = sqrt(6 / inputs of a unit).
static void draw(double *w, int count, double bound, uint64_t *state) {
    for (int i = 0; i < count; i++)
        w[i] = bound * ((double)(random_u64(state) >> 11) * 0x1p-52 - 1);
}

static void initialise(double *w, uint64_t seed) { // biases stay 0
    draw(w + W1, 9 * CH, 0.8165, &seed);
    draw(w + W2, 9 * CH * CH, 0.2041, &seed);
    draw(w + W3, POOLED * CLASSES, 0.1531, &seed);
}

// ---- training ----

typedef struct trainer {
    job *j;
    int rank, ranks;
    int done; // epochs
    bool bar; // stdout is a terminal, and this is rank 0
    double w[PARAMS], speed[PARAMS], sums[SUMS];
    double started_s, comm_s, drawn_s;
    int *order; // the images, shuffled
    layers l;
} trainer;

static idist_status sum_over_ranks(trainer *t, double *values, size_t count) {
    double start_s = now_s();
    idist_status status = idist_all_reduce(values, values, count, IDIST_F64, IDIST_SUM, NULL);
    t->comm_s += now_s() - start_s;
    return status;
}

// The same permutation on every rank: it depends on the seed and the epoch only.
static void shuffle(int *order, int count, uint64_t seed, int epoch) {
    uint64_t state = seed * 1000003u + (uint64_t)epoch;
    for (int i = 0; i < count; i++) order[i] = i;
    for (int i = count - 1; i > 0; i--) {
        int k = (int)(random_u64(&state) % (uint64_t)(i + 1)), swap = order[i];
        order[i] = order[k];
        order[k] = swap;
    }
}

static void draw_bar(trainer *t, int epoch, int done, double loss, double epoch_s) {
    int filled = (int)(30LL * done / t->j->train.count);
    double now = now_s();
    if (now - t->drawn_s < 0.05) return;
    t->drawn_s = now;
    printf("\r\033[Kepoch %3d/%d [%.*s%.*s] loss %.4f %8.0f samples/s", epoch, t->j->epochs, filled,
           "##############################", 30 - filled, "..............................",
           loss / done, done / epoch_s);
    fflush(stdout);
}

// Half of the images are moved by up to one pixel, so that the network learns shapes, not places.
// Like the shuffle, this depends on the seed, the epoch and the image only, not on the rank that
// happens to have it.
static int choose_shift(uint64_t seed, int epoch, int n) {
    uint64_t state = seed * 7919u + (uint64_t)epoch * 1000003u + (uint64_t)n,
             r = random_u64(&state);
    return r % 2 ? 0 : (int)(r / 2 % 3 - 1) * PAD + (int)(r / 6 % 3 - 1);
}

// One global batch: own share of the gradient, sum over the ranks, step. Momentum 0.9, weight decay
// 1e-3.
static idist_status train_batch(trainer *t, int epoch, int first, int size, double rate) {
    int begin = first + (int)((int64_t)size * t->rank / t->ranks);
    int end = first + (int)((int64_t)size * (t->rank + 1) / t->ranks);
    memset(t->sums, 0, sizeof t->sums);
    for (int i = begin; i < end; i++) {
        int n = t->order[i];
        add_gradient(t->w, &t->j->train.at[n], choose_shift(t->j->seed, epoch, n), &t->l, t->sums);
    }
    idist_status status = sum_over_ranks(t, t->sums, SUMS);
    for (int i = 0; i < PARAMS && !status; i++) {
        t->speed[i] = 0.9 * t->speed[i] + t->sums[i] / size + 1e-3 * t->w[i];
        t->w[i] -= rate * t->speed[i];
    }
    return status;
}

// ---- checkpoints: rank 0 has the file ----

// Everything that training goes on from. The shuffles follow from seed and epoch.
typedef struct checkpoint {
    char magic[8];
    uint64_t training; // see identity
    int64_t done;
    double w[PARAMS], speed[PARAMS];
    uint64_t sum; // of the bytes before
} checkpoint;

static uint64_t identity(const job *j) {
    uint64_t numbers[3] = {j->seed, (uint64_t)j->epochs, (uint64_t)j->batch};
    uint64_t id = fnv1a(0xcbf29ce484222325u, numbers, sizeof numbers);
    return fnv1a(id, j->train.at,
                 (size_t)j->train.count * sizeof *j->train.at); // bytes only, so no padding
}

// A crash at any moment leaves the old file or the new one, never half of one.
static int save(const trainer *t) {
    static checkpoint c;
    char other[1100];
    memcpy(c.magic, "DIGITS1", 8);
    c.training = identity(t->j);
    c.done = t->done;
    memcpy(c.w, t->w, sizeof c.w);
    memcpy(c.speed, t->speed, sizeof c.speed);
    c.sum = fnv1a(0xcbf29ce484222325u, &c, offsetof(checkpoint, sum));
    snprintf(other, sizeof other, "%s.new", t->j->checkpoint);
    FILE *f = fopen(other, "wb");
    bool ok = f && fwrite(&c, sizeof c, 1, f) == 1 && fflush(f) == 0 && fsync(fileno(f)) == 0;
    if (f && fclose(f) != 0) ok = false;
    if (ok && rename(other, t->j->checkpoint) == 0) return 0;
    fprintf(stderr, "%s: %s\n", t->j->checkpoint, strerror(errno));
    unlink(other);
    return 1;
}

// 0 when there is none, -1 when it is not ours.
static int64_t load(trainer *t) {
    static checkpoint c;
    FILE *f = fopen(t->j->checkpoint, "rb");
    if (!f && errno == ENOENT) return 0;
    bool ok = f && fread(&c, sizeof c, 1, f) == 1 && fgetc(f) == EOF &&
              !memcmp(c.magic, "DIGITS1", 8) &&
              c.sum == fnv1a(0xcbf29ce484222325u, &c, offsetof(checkpoint, sum)) &&
              c.training == identity(t->j);
    if (f) fclose(f);
    if (!ok)
        fprintf(stderr,
                "%s is no checkpoint of this training: other data, other options, or damaged\n",
                t->j->checkpoint);
    if (!ok) return -1;
    memcpy(t->w, c.w, sizeof t->w);
    memcpy(t->speed, c.speed, sizeof t->speed);
    return c.done;
}

// Everybody begins with what rank 0 has: new weights, or those of the checkpoint.
static int begin(trainer *t) {
    int64_t done = 0;
    if (t->rank == 0) initialise(t->w, t->j->seed);
    if (t->rank == 0 && t->j->checkpoint) done = load(t);
    CHECK(idist_broadcast(&done, 1, IDIST_I64, 0, NULL));
    if (done < 0) return 2;
    CHECK(idist_broadcast(t->w, PARAMS, IDIST_F64, 0, NULL));
    CHECK(idist_broadcast(t->speed, PARAMS, IDIST_F64, 0, NULL));
    t->done = (int)done;
    if (t->rank == 0 && done)
        printf("resumed   after epoch %d, from %s\n", t->done, t->j->checkpoint);
    return 0;
}

static int train(trainer *t) {
    const job *j = t->j;
    int count = j->train.count;
    double base_rate =
        0.1 * (j->batch < 64 ? j->batch / 64.0 : 1); // small batches are noisy: smaller steps
    for (int epoch = t->done + 1; epoch <= j->epochs; epoch++) {
        double start_s = now_s(), loss = 0, hits = 0;
        shuffle(t->order, count, j->seed, epoch);
        for (int first = 0; first < count; first += j->batch) {
            int size = count - first < j->batch ? count - first : j->batch;
            double progress =
                (epoch - 1 + (double)first / count) / j->epochs; // the rate falls to zero
            CHECK(train_batch(t, epoch, first, size, base_rate * (1 - progress)));
            loss += t->sums[LOSS];
            hits += t->sums[HITS];
            if (t->bar) draw_bar(t, epoch, first + size, loss, now_s() - start_s);
        }
        if (!(loss < 1e100)) { // also true for NaN; every rank sees it
            fprintf(stderr, "rank %d: the training diverged\n", t->rank);
            return 1;
        }
        t->done = epoch;
        if (t->rank == 0 && j->checkpoint && save(t)) return 1;
        if (t->rank == 0) {
            printf("%sepoch %3d/%d  loss %.6f  train %6.2f %%  %7.0f samples/s\n",
                   t->bar ? "\r\033[K" : "", epoch, j->epochs, loss / count, 100 * hits / count,
                   count / (now_s() - start_s));
            fflush(stdout);
        }
    }
    return 0;
}

// Each rank classifies every ranks-th test image.
static int test(trainer *t, int *hits) {
    const images *all = &t->j->test;
    double found = 0, loss;
    for (int i = t->rank; i < all->count; i += t->ranks)
        found += forward(t->w, &all->at[i], 0, &t->l, &loss) == all->at[i].label;
    CHECK(sum_over_ranks(t, &found, 1));
    *hits = (int)found;
    return 0;
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

// All ranks must have read the same data and been given the same options. 2 when not.
static int agree(const job *j, int rank, int ranks) {
    int other;
    uint64_t id = j->bad_input ? 0 : fnv1a(identity(j), &j->ranks, sizeof j->ranks);
    if (compare_ranks(id, &other)) return 1;
    if (rank == 0 && other >= 0)
        fprintf(stderr, "rank %d has other data or options than rank 0\n", other);
    if (rank == 0 && j->ranks && j->ranks != ranks)
        fprintf(stderr, "--ranks %d, but the launcher made a world of %d: leave --ranks out\n",
                j->ranks, ranks);
    return j->bad_input || other >= 0 || (j->ranks && j->ranks != ranks) ? 2 : 0;
}

static void print_configuration(const job *j, int ranks) {
    int low = j->batch / ranks, high = (j->batch + ranks - 1) / ranks;
    printf("data      %s: %d images, %d to train and %d to test\n", j->path,
           j->train.count + j->test.count, j->train.count, j->test.count);
    printf("model     conv 3x3x%d, conv 3x3x%d, max pool 2x2, dense %d: %d parameters\n", CH, CH,
           CLASSES, PARAMS);
    printf("ranks     %d (backend %s, launcher %s)\n", ranks, idist_backend(), idist_launcher());
    printf("training  %d epochs, batch %d in all (%d", j->epochs, j->batch, low);
    if (high != low) printf(" or %d", high);
    printf(" per rank), seed %llu\n", (unsigned long long)j->seed);
    fflush(stdout);
}

static int finish(trainer *t) {
    const job *j = t->j;
    int hits = 0, other = -1;
    double seconds[2];
    seconds[0] = t->comm_s;
    seconds[1] = now_s() - t->started_s;
    if (test(t, &hits)) return 1;
    CHECK(sum_over_ranks(t, seconds, 2));
    uint64_t checksum = fnv1a(0xcbf29ce484222325u, t->w, sizeof t->w);
    if (compare_ranks(checksum, &other)) return 1;
    bool judged = j->epochs == DEFAULT_EPOCHS &&
                  j->batch == DEFAULT_BATCH; // other settings may well do worse
    bool enough = !judged || 100LL * hits >= 97LL * j->test.count;
    if (t->rank == 0) {
        printf("accuracy  %.2f %% (%d of %d test images)\n", 100.0 * hits / j->test.count, hits,
               j->test.count);
        printf("time      %.1f s, %.1f %% of it communicating\n", seconds[1] / t->ranks,
               100 * seconds[0] / seconds[1]);
        if (other < 0)
            printf("checksum 0x%016llx on all %d ranks\n", (unsigned long long)checksum, t->ranks);
        else fprintf(stderr, "rank %d ended with other weights than rank 0\n", other);
        if (!enough) fprintf(stderr, "accuracy is below 97 %%\n");
        fflush(stdout);
    }
    return other < 0 && enough ? 0 : 1;
}

static int work(job *j, int rank, int ranks) {
    static trainer t;
    int code = agree(j, rank, ranks);
    if (code) return code;
    if (rank == 0) print_configuration(j, ranks);
    t.j = j;
    t.rank = rank;
    t.ranks = ranks;
    t.bar = rank == 0 && isatty(STDOUT_FILENO);
    if ((code = begin(&t)) != 0) return code;
    t.order = (int *)malloc((size_t)j->train.count * sizeof *t.order);
    t.started_s = now_s();
    if (!t.order) fprintf(stderr, "rank %d: out of memory\n", rank);
    code = t.order && train(&t) == 0 ? finish(&t) : 1;
    free(t.order);
    return code;
}

static int worker(int local_rank, void *arg) {
    job *j = (job *)arg;
    (void)local_rank;
    return j->exit_code = work(j, idist_get_rank(), idist_get_world_size());
}

// ---- options ----

static void usage(FILE *out) {
    fprintf(out,
            "usage: 05_train_digits [options]\n"
            "  --ranks N    processes to start; default: one per core, at least 2. Under a "
            "launcher: leave it out\n"
            "  --epochs N   times to go through the training images; default %d\n"
            "  --batch N    images per step, over all ranks together; default %d\n"
            "  --seed N     of the first weights and of the shuffles; default 1\n"
            "  --data PATH  the images; default: examples/data/digits.csv\n"
            "  --checkpoint FILE  written after each epoch; when it is there at the start, "
            "training goes on from it\n"
            "  --help       this text\n",
            DEFAULT_EPOCHS, DEFAULT_BATCH);
}

static bool parse_number(const char *option, const char *text, uint64_t min, uint64_t max,
                         uint64_t *value) {
    char *end = NULL;
    errno = 0;
    unsigned long long v = strtoull(text, &end, 10);
    if (*text < '0' || *text > '9' || *end || errno || v < min || v > max) {
        fprintf(stderr, "%s %s: expected a number from %llu to %llu\n", option, text,
                (unsigned long long)min, (unsigned long long)max);
        return false;
    }
    *value = v;
    return true;
}

// 0: go on; 1: --help was answered; 2: wrong.
static int parse_options(job *j, int argc, char **argv) {
    static const char *const names[] = {"--ranks", "--epochs", "--batch",
                                        "--seed",  "--data",   "--checkpoint"};
    static const uint64_t limits[][2] = {{1, 1024}, {1, 100000}, {1, MAX_IMAGES}, {0, UINT64_MAX}};
    for (int i = 1; i < argc; i += 2) {
        int which = 0;
        uint64_t number = 0;
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) return usage(stdout), 1;
        while (which < 6 && strcmp(argv[i], names[which])) which++;
        if (which == 6) return fprintf(stderr, "unknown option %s\n", argv[i]), usage(stderr), 2;
        if (i + 1 == argc) return fprintf(stderr, "%s needs a value\n", argv[i]), 2;
        if (which < 4 &&
            !parse_number(names[which], argv[i + 1], limits[which][0], limits[which][1], &number))
            return 2;
        if (which == 0) j->ranks = (int)number;
        if (which == 1) j->epochs = (int)number;
        if (which == 2) j->batch = (int)number;
        if (which == 3) j->seed = number;
        if (which == 4) j->path = argv[i + 1];
        if (which == 5) j->checkpoint = argv[i + 1];
    }
    return 0;
}

// Somebody else started the ranks when these are set; idist complains when they are set by halves.
static bool is_launched(void) { return strcmp(idist_launcher(), "none") != 0; }

static int ranks_to_start(const job *j) {
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    if (j->ranks) return j->ranks;
    if (cores > j->batch) cores = j->batch; // a rank without an image would only watch
    return cores > 2 ? (int)cores : 2;
}

static int launch(job *j) {
    idist_report report;
    idist_desc desc;
    memset(&desc, 0, sizeof desc);
    memset(&report, 0, sizeof report);
    report.rank = -1;
    desc.timeout_ms = desc.init_timeout_ms = DEADLINE_MS;
    desc.report = &report;
    if (!is_launched()) {
        int ranks = ranks_to_start(j);
        desc.nproc_per_node =
            ranks > 1 ? ranks : 0; // 0 and no launcher: a world of 1, in this process
    }
    idist_status status = idist_parallel_run(&desc, worker, j);
    if (j->exit_code) return j->exit_code; // the worker ran in this process and said why
    if (status == IDIST_OK) return 0;
    fprintf(stderr, "05_train_digits: %s\n", idist_last_error());
    return report.rank >= 0 && report.exit_code == 2 ? 2 : 1;
}

int main(int argc, char **argv) {
    static job j;
    j.epochs = DEFAULT_EPOCHS;
    j.batch = DEFAULT_BATCH;
    j.seed = 1;
    int code = parse_options(&j, argc, argv);
    if (code) return code == 1 ? 0 : code;
    j.bad_input = !load_data(&j, argc > 0 ? argv[0] : "");
    // Under a launcher the others may have read theirs: join them, and let everybody end with the
    // same code.
    code = j.bad_input && !is_launched() ? 2 : launch(&j);
    free(j.train.at);
    free(j.test.at);
    return code;
}
