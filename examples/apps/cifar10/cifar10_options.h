// cifar10_options.h - the options of apps/cifar10, named as in PyTorch-Ignite's CIFAR10 example,
// and the learning rate that follows from them
#ifndef CIFAR10_OPTIONS_H
#define CIFAR10_OPTIONS_H
#include "cifar10_data.h"
#include "options.h"

typedef struct config {
    idist_desc world; // backend, nproc_per_node, nnodes, node_rank, master_addr, master_port
    int seed, batch_size, accumulate, num_workers, num_epochs, num_warmup_epochs, validate_every,
        checkpoint_every, log_every_iters, stop_iteration, side, width;
    double learning_rate, momentum, weight_decay, clip;
    const char *data, *output_path, *model, *resume_from;
    const char *images; // `data`, or the path of digits.csv, or NULL
    bool bf16, sync_bn, no_overlap;
} config;

static config cfg = {
    .seed = 543,
    .batch_size = 64,
    .accumulate = 1,
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

static const option_row OPTIONS[] = {
    {"seed", OPTION_WHOLE, &cfg.seed, 0, INT32_MAX,
     "of the first weights, the shuffles and the augmentation"},
    {"data", OPTION_TEXT, &cfg.data, 0, 0,
     "folder with CIFAR-10's binary files, or a file like digits.csv"},
    {"output_path", OPTION_TEXT, &cfg.output_path, 0, 0, "folder of checkpoints and curves"},
    {"model", OPTION_TEXT, &cfg.model, 0, 0, "resnet8, resnet14, resnet20, ...: 6 n + 2 layers"},
    {"width", OPTION_WHOLE, &cfg.width, 2, 256, "channels of the first stage"},
    {"side", OPTION_WHOLE, &cfg.side, 16, CIFAR_SIDE,
     "pixels to which the digits are scaled up: 16 or 32"},
    {"batch_size", OPTION_WHOLE, &cfg.batch_size, 1, 65536,
     "images per backward pass, of all ranks together"},
    {"accumulate", OPTION_WHOLE, &cfg.accumulate, 1, 1024, "backward passes per step"},
    {"momentum", OPTION_REAL, &cfg.momentum, 0, 1, "of the optimizer, Nesterov's"},
    {"weight_decay", OPTION_REAL, &cfg.weight_decay, 0, 1,
     "added to the gradient, times the weights"},
    {"clip", OPTION_REAL, &cfg.clip, 0, 1e9,
     "largest norm of all gradients together, which are scaled down to it; 0: any"},
    {"sync_bn", OPTION_SWITCH, &cfg.sync_bn, 0, 1,
     "batch norms by the images of all ranks, not of each by itself"},
    {"num_workers", OPTION_WHOLE, &cfg.num_workers, 0, 256,
     "threads that prepare batches, of all ranks together"},
    {"num_epochs", OPTION_WHOLE, &cfg.num_epochs, 1, 100000, "times through the training images"},
    {"learning_rate", OPTION_REAL, &cfg.learning_rate, 0, 100, "at its peak, after the warm-up"},
    {"num_warmup_epochs", OPTION_WHOLE, &cfg.num_warmup_epochs, 0, 100000,
     "in which it grows from 0; then it falls to 0"},
    {"validate_every", OPTION_WHOLE, &cfg.validate_every, 1, 100000, "epochs"},
    {"checkpoint_every", OPTION_WHOLE, &cfg.checkpoint_every, 1, INT32_MAX, "iterations"},
    {"resume_from", OPTION_TEXT, &cfg.resume_from, 0, 0,
     "a checkpoint \"training_...\", or the word latest"},
    {"log_every_iters", OPTION_WHOLE, &cfg.log_every_iters, 1, INT32_MAX,
     "iterations from one line with the loss to the next"},
    {"backend", OPTION_TEXT, &cfg.world.backend, 0, 0,
     "of idist: ring, self, mpi; else the first that fits"},
    {"nproc_per_node", OPTION_WHOLE, &cfg.world.nproc_per_node, 0, 1024,
     "ranks to start on this host; 0: a launcher's, or 1"},
    {"nnodes", OPTION_WHOLE, &cfg.world.nnodes, 0, 65536,
     "hosts on which this is started, each with nproc_per_node ranks; 0: 1"},
    {"node_rank", OPTION_WHOLE, &cfg.world.node_rank, 0, 65535, "which of them this is, from 0 on"},
    {"master_addr", OPTION_TEXT, &cfg.world.master_addr, 0, 0, "name or address of host 0"},
    {"master_port", OPTION_WHOLE, &cfg.world.master_port, 0, 65535, "a free port there"},
    {"bf16", OPTION_SWITCH, &cfg.bf16, 0, 1, "gradients travel as bfloat16"},
    {"no_overlap", OPTION_SWITCH, &cfg.no_overlap, 0, 1,
     "gradients travel after the backward pass only, for comparison"},
    {"stop_iteration", OPTION_WHOLE, &cfg.stop_iteration, 0, INT32_MAX,
     "end early after so many; 0: do not"},
};
enum { OPTION_COUNT = sizeof OPTIONS / sizeof OPTIONS[0] };

// Returns the number of residual blocks per stage, or 0 if there is no such model.
static int model_blocks(const char *model) {
    int layers = 0, end = 0;

    if (sscanf(model, "resnet%d%n", &layers, &end) != 1 || model[end]) return 0;

    return layers % 6 == 2 && layers / 6 <= MAX_BLOCKS ? layers / 6 : 0;
}

// Parses the options and checks how they combine. Returns a code as options_parse does:
// OPTIONS_GOOD, OPTIONS_HELP, or OPTIONS_WRONG after printing an error.
static int parse_options(int argc, char **argv) {
    static const option_table table = {
        "cifar10", OPTIONS, OPTION_COUNT,
        "Without --data: examples/data/digits.csv, which comes with idist. CIFAR-10's binary "
        "version:\n" CIFAR_ARCHIVE "Files with fewer records are read as well.\n"
        "Two hosts, with the same IDIST_SECRET: --nproc-per-node 2 --nnodes 2 --master-addr HOST0\n"
        "--master-port 29520 on both; --node-rank 0 on HOST0, --node-rank 1 on the other.\n"};
    const idist_desc *world = &cfg.world;
    int code = options_parse(&table, argc, argv);

    if (code != OPTIONS_GOOD) return code;
    if (cfg.side != 16 && cfg.side != CIFAR_SIDE) {
        fprintf(stderr, "--side %d: expected 16 or 32\n", cfg.side);
        return OPTIONS_WRONG;
    }
    if (!model_blocks(cfg.model)) {
        fprintf(stderr, "--model %s: expected resnet8, resnet14, ... resnet%d\n", cfg.model,
                6 * MAX_BLOCKS + 2);
        return OPTIONS_WRONG;
    }
    if (world->nnodes > 1 && world->nproc_per_node == 0) {
        fprintf(stderr, "--nnodes %d: expected --nproc_per_node with it\n", world->nnodes);
        return OPTIONS_WRONG;
    }
    if (world->node_rank > 0 && world->node_rank >= world->nnodes) {
        fprintf(stderr, "--node_rank %d: expected less than --nnodes\n", world->node_rank);
        return OPTIONS_WRONG;
    }
    cfg.images = cfg.data ? cfg.data : digits_find(argc > 0 ? argv[0] : "");

    return OPTIONS_GOOD;
}

// Returns the learning rate after this many epochs. The rate rises from 0 to --learning_rate in the
// warm-up, then falls to 0.
static double learning_rate_after(double epochs) {
    double warm = cfg.num_warmup_epochs, all = cfg.num_epochs;
    idist_milestone line[3] = {{0, 0}, {warm, cfg.learning_rate}, {all, 0}};
    int first = warm > 0 ? 0 : 1, end = all > warm ? 3 : 2;

    return idist_piecewise_linear(line + first, end - first, epochs);
}

#endif // CIFAR10_OPTIONS_H
