// 13_xla_train.c - a small network, trained by a StableHLO program that runs over the ranks
//
// build:  cc -O2 -DIDIST_IMPLEMENTATION examples/13_xla_train.c -o 13_xla_train
// run:    IDIST_XLA_LIB=/path/to/xla_cpu_pjrt.so ./13_xla_train
//
// expected output, with a plug-in for CPUs:
//    4 ranks on xla: loss 25.86, after 200 steps 2.16
//    1 rank on xla: loss 25.86, after 200 steps 2.16
//    the weights are equal within 1e-4
//
// IDIST_XLA_LIB names a PJRT plug-in. The package xla-cpu-pjrt on PyPI contains one.
//
// Each rank is a thread with a device of its own and a quarter of the samples. A step is one
// program: forward pass, gradients, all_reduce, update. The weights stay on the device. Then rank 0
// trains alone on all samples, with a program over a group of one rank.
//
// Exits with 0 if the weights are equal, with 1 if not or if something failed.
#include "../idist.h"
#include "../idist_xla.h"
#include "lib/check.h"
#include "lib/stablehlo.h"

#include <pthread.h>
#include <stdlib.h>

enum { RANKS = 4, SAMPLES = 64, HIDDEN = 8, STEPS = 200, OUTPUTS = 3 };

// In this program, B stands for the number of samples per rank, and C for 2 B. SUM stands for the
// function and the attributes of an all_reduce over all ranks.
static const char step[] =
    "module @step {\n"
    "func.func public @main(%w1_flat: tensor<16xf32>, %w2_flat: tensor<8xf32>,\n"
    "    %x_flat: tensor<Cxf32>, %y_flat: tensor<Bxf32>)\n"
    "    -> (tensor<16xf32>, tensor<8xf32>, tensor<1xf32>) {\n"
    "  // a buffer of idist_xla_buffer_put has one dimension\n"
    "  %w1 = stablehlo.reshape %w1_flat : (tensor<16xf32>) -> tensor<8x2xf32>\n"
    "  %w2 = stablehlo.reshape %w2_flat : (tensor<8xf32>) -> tensor<1x8xf32>\n"
    "  %x = stablehlo.reshape %x_flat : (tensor<Cxf32>) -> tensor<Bx2xf32>\n"
    "  %y = stablehlo.reshape %y_flat : (tensor<Bxf32>) -> tensor<Bx1xf32>\n"
    "  %rate1 = stablehlo.constant dense<0.01> : tensor<16xf32>\n"
    "  %rate2 = stablehlo.constant dense<0.01> : tensor<8xf32>\n"
    "  %one = stablehlo.constant dense<1.0> : tensor<Bx8xf32>\n"
    "  // output = tanh(x w1') w2'\n"
    "  %in = stablehlo.dot_general %x, %w1, contracting_dims = [1] x [1]"
    " : (tensor<Bx2xf32>, tensor<8x2xf32>) -> tensor<Bx8xf32>\n"
    "  %hidden = stablehlo.tanh %in : tensor<Bx8xf32>\n"
    "  %out = stablehlo.dot_general %hidden, %w2, contracting_dims = [1] x [1]"
    " : (tensor<Bx8xf32>, tensor<1x8xf32>) -> tensor<Bx1xf32>\n"
    "  // gradients of the squared error\n"
    "  %e = stablehlo.subtract %out, %y : tensor<Bx1xf32>\n"
    "  %loss = stablehlo.dot_general %e, %e, contracting_dims = [0] x [0]"
    " : (tensor<Bx1xf32>, tensor<Bx1xf32>) -> tensor<1x1xf32>\n"
    "  %g2 = stablehlo.dot_general %e, %hidden, contracting_dims = [0] x [0]"
    " : (tensor<Bx1xf32>, tensor<Bx8xf32>) -> tensor<1x8xf32>\n"
    "  %back = stablehlo.dot_general %e, %w2, contracting_dims = [1] x [0]"
    " : (tensor<Bx1xf32>, tensor<1x8xf32>) -> tensor<Bx8xf32>\n"
    "  %square = stablehlo.multiply %hidden, %hidden : tensor<Bx8xf32>\n"
    "  %slope = stablehlo.subtract %one, %square : tensor<Bx8xf32>\n"
    "  %c = stablehlo.multiply %back, %slope : tensor<Bx8xf32>\n"
    "  %g1 = stablehlo.dot_general %c, %x, contracting_dims = [0] x [0]"
    " : (tensor<Bx8xf32>, tensor<Bx2xf32>) -> tensor<8x2xf32>\n"
    "  // one sum over all ranks, then the update\n"
    "  %v1 = stablehlo.reshape %g1 : (tensor<8x2xf32>) -> tensor<16xf32>\n"
    "  %v2 = stablehlo.reshape %g2 : (tensor<1x8xf32>) -> tensor<8xf32>\n"
    "  %v3 = stablehlo.reshape %loss : (tensor<1x1xf32>) -> tensor<1xf32>\n"
    "  %all = stablehlo.concatenate %v1, %v2, %v3, dim = 0"
    " : (tensor<16xf32>, tensor<8xf32>, tensor<1xf32>) -> tensor<25xf32>\n"
    "  %sums = \"stablehlo.all_reduce\"(%all) SUM : (tensor<25xf32>) -> tensor<25xf32>\n"
    "  %p1 = stablehlo.slice %sums [0:16] : (tensor<25xf32>) -> tensor<16xf32>\n"
    "  %p2 = stablehlo.slice %sums [16:24] : (tensor<25xf32>) -> tensor<8xf32>\n"
    "  %p3 = stablehlo.slice %sums [24:25] : (tensor<25xf32>) -> tensor<1xf32>\n"
    "  %d1 = stablehlo.multiply %p1, %rate1 : tensor<16xf32>\n"
    "  %d2 = stablehlo.multiply %p2, %rate2 : tensor<8xf32>\n"
    "  %new1 = stablehlo.subtract %w1_flat, %d1 : tensor<16xf32>\n"
    "  %new2 = stablehlo.subtract %w2_flat, %d2 : tensor<8xf32>\n"
    "  return %new1, %new2, %p3 : tensor<16xf32>, tensor<8xf32>, tensor<1xf32>\n"
    "}\n"
    "}\n";

static const char sum[] = "({\n^bb0(%p: tensor<f32>, %q: tensor<f32>):\n"
                          "  %r = stablehlo.add %p, %q : tensor<f32>\n"
                          "  stablehlo.return %r : tensor<f32>\n"
                          "}) {replica_groups = dense<[[RANKS]]> : tensor<1xNxi64>}";

typedef struct network {
    float w1[HIDDEN * 2], w2[HIDDEN], first_loss, last_loss;
} network;

// The data that the ranks of a group share. The ranks are threads.
typedef struct training {
    void *program;
    network net; // rank 0's network
} training;

static idist_store *store;
static training by_all, by_one;

// Fills in `count` samples from number `first` on: two coordinates in x, and a cubic function of
// the coordinates in y.
static void make_samples(float *x, float *y, int first, int count) {
    for (int i = 0; i < count; i++) {
        x[2 * i] = (float)((first + i) % 8) / 4 - 1;
        x[2 * i + 1] = (float)((first + i) / 8) / 4 - 1;
        y[i] = x[2 * i] * x[2 * i] * x[2 * i] + x[2 * i + 1];
    }
}

// Compiles a step for the ranks of a group.
static void *compile_step(idist_group *group) {
    int n = idist_group_size(group);
    char text[8000], samples[16], coordinates[16], size[16];

    snprintf(text, sizeof text, "%s", step);
    snprintf(samples, sizeof samples, "<%dx", SAMPLES / n);
    snprintf(coordinates, sizeof coordinates, "<%dx", 2 * SAMPLES / n);
    snprintf(size, sizeof size, "1x%dx", n);
    if (stablehlo_replace(text, sizeof text, "SUM", sum)) return NULL;
    if (stablehlo_replace(text, sizeof text, "RANKS", n == 1 ? "0" : "0, 1, 2, 3")) return NULL;
    if (stablehlo_replace(text, sizeof text, "1xNx", size)) return NULL;
    if (stablehlo_replace(text, sizeof text, "<Bx", samples)) return NULL;
    if (stablehlo_replace(text, sizeof text, "<Cx", coordinates)) return NULL;

    return stablehlo_compile(text, group);
}

// Replaces a buffer with a result of a program.
static int replace(idist_xla_buffer **buffer, void *result, idist_group *group) {
    CHECK(idist_xla_buffer_free(buffer));
    CHECK(idist_xla_buffer_adopt(result, group, buffer));
    return 0;
}

// Trains on the samples of this rank. Ranks that are threads share one compiled program, because
// XLA identifies a program's collectives by numbers that differ between compilations. If a rank is
// lost, the barrier before each step fails with an error that names the rank. XLA itself would wait
// for the rank forever.
static int train(idist_group *group, training *shared) {
    int n = idist_group_size(group), rank = idist_group_rank(group), count = SAMPLES / n;
    idist_xla_buffer *b[4] = {NULL}, *loss = NULL;
    float x[2 * SAMPLES], y[SAMPLES];
    network own, *net = rank == 0 ? &shared->net : &own;
    idist_opts opts = {0};

    opts.group = group;
    if (rank == 0) shared->program = compile_step(group);
    CHECK(idist_barrier(&opts));
    if (!shared->program) return 1;
    make_samples(x, y, rank * count, count);
    for (int i = 0; i < HIDDEN * 2; i++) net->w1[i] = (float)(7 * i % 17) / 16 - 0.5f;
    for (int i = 0; i < HIDDEN; i++) net->w2[i] = (float)(5 * i % 9) / 8 - 0.5f;
    CHECK(idist_xla_buffer_put(net->w1, HIDDEN * 2, IDIST_F32, group, &b[0]));
    CHECK(idist_xla_buffer_put(net->w2, HIDDEN, IDIST_F32, group, &b[1]));
    CHECK(idist_xla_buffer_put(x, 2 * (size_t)count, IDIST_F32, group, &b[2]));
    CHECK(idist_xla_buffer_put(y, (size_t)count, IDIST_F32, group, &b[3]));

    for (int i = 0; i < STEPS; i++) {
        void *in[4], *out[OUTPUTS];

        for (int k = 0; k < 4; k++) in[k] = idist_xla_buffer_pjrt(b[k]);
        CHECK(idist_barrier(&opts));
        TRY(stablehlo_run(shared->program, in, 4, out, i + 1, group));
        TRY(replace(&b[0], out[0], group));
        TRY(replace(&b[1], out[1], group));
        TRY(replace(&loss, out[2], group));
        CHECK(idist_xla_buffer_get(loss, &net->last_loss, sizeof net->last_loss, -1));
        if (i == 0) net->first_loss = net->last_loss;
    }

    CHECK(idist_xla_buffer_get(b[0], net->w1, sizeof net->w1, -1));
    CHECK(idist_xla_buffer_get(b[1], net->w2, sizeof net->w2, -1));
    for (int k = 0; k < 4; k++) CHECK(idist_xla_buffer_free(&b[k]));
    CHECK(idist_xla_buffer_free(&loss));
    CHECK(idist_barrier(&opts));
    if (rank == 0) stablehlo_free(shared->program);

    return 0;
}

// Trains with all ranks; rank 0 then trains alone.
static int work(idist_group *world) {
    int rank = idist_group_rank(world);
    idist_group *self = NULL;

    TRY(train(world, &by_all));
    CHECK(idist_split(world, rank, 0, &self));
    if (rank == 0) TRY(train(self, &by_one));
    CHECK(idist_free_group(&self));

    return 0;
}

static void *run_rank(void *arg) {
    static int failed = 1;
    idist_desc desc = {0};
    idist_group *world = NULL;
    int code = 1;

    desc.rank = *(int *)arg;
    desc.world_size = RANKS;
    desc.store = store;
    desc.device = "xla";
    if (idist_open(&desc, &world) == IDIST_OK) code = work(world);
    else fprintf(stderr, "%s\n", idist_last_error());
    if (world && idist_close(&world) != IDIST_OK) code = 1;

    return code ? &failed : NULL;
}

int main(void) {
    pthread_t threads[RANKS];
    int ranks[RANKS], failed = 0;
    void *result;

    setenv("IDIST_XLA_CPU_DEVICES", "4", 0); // has no effect on TPUs
    CHECK(idist_store_open("mem://", NULL, &store));

    for (int i = 0; i < RANKS; i++) {
        ranks[i] = i;
        if (pthread_create(&threads[i], NULL, run_rank, &ranks[i]) != 0) return 1;
    }

    for (int i = 0; i < RANKS; i++) {
        pthread_join(threads[i], &result);
        if (result) failed = 1;
    }

    CHECK(idist_store_close(&store));
    if (failed) return 1;
    printf("4 ranks on xla: loss %.2f, after %d steps %.2f\n", (double)by_all.net.first_loss, STEPS,
           (double)by_all.net.last_loss);
    printf("1 rank on xla: loss %.2f, after %d steps %.2f\n", (double)by_one.net.first_loss, STEPS,
           (double)by_one.net.last_loss);
    for (int i = 0; i < HIDDEN * 2; i++)
        if (!(by_all.net.w1[i] - by_one.net.w1[i] < 1e-4f) ||
            !(by_one.net.w1[i] - by_all.net.w1[i] < 1e-4f))
            return 1;
    printf("the weights are equal within 1e-4\n");

    return 0;
}
