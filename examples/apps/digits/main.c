// apps/digits - data-parallel training: several processes train one network on real images
//
// build:  cc -O2 -DIDIST_IMPLEMENTATION examples/apps/digits/main.c -o digits
// run:    ./digits       starts one rank per core, at least 2; --help lists the options
//         idistrun -n 2 --max-restarts 3 ./digits --checkpoint FILE  resumes after a crash
//
// expected output; dots and checksum depend on the machine; a terminal also gets a progress bar:
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
//
// All ranks hold the same weights and shuffle the images with the same seed. They therefore agree
// on the images of every batch without a message. Each rank computes the gradient of its share of
// the batch, and one all_reduce adds the gradients:
//
//     batch   | 17  3 88 41 | 62  9 70  5 |       images, after the shuffle
//               rank 0        rank 1              each: gradient of its share
//               `--- all_reduce SUM ---'          both: gradient of the batch
//
// Any number of ranks trains the same network, up to rounding. Doubles keep the rounding below the
// printed digits.
//
// Exits with 0 if the weights are the same on all ranks. With the default epochs and batch, the
// accuracy must also be 97 % or more. Exits with 2 for bad options or data, otherwise with 1.
#include "../../../idist_train.h"

#include "../../lib/check.h"
#include "digits_checkpoint.h"
#include "digits_curves.h"
#include "digits_print.h"

enum { DEADLINE_MS = 60000 };

// Sets *same to true if all ranks have this value. Otherwise rank 0 prints the first rank that has
// another `what`.
static int compare_ranks(uint64_t value, const char *what, bool *same) {
    uint64_t expected = value;
    int32_t other;

    CHECK(idist_broadcast(&expected, 1, IDIST_U64, 0, NULL));
    other = value == expected ? INT32_MAX : idist_get_rank();
    CHECK(idist_all_reduce(&other, &other, 1, IDIST_I32, IDIST_MIN, NULL));
    *same = other == INT32_MAX;
    if (!*same && idist_get_rank() == 0)
        fprintf(stderr, "rank %d has other %s than rank 0\n", other, what);
    if (!*same) CHECK(idist_barrier(NULL)); // no rank exits before the error is printed
    return 0;
}

// Checks that all ranks have the same options and images, which each rank has read itself. Returns
// 2 if they are bad or differ.
static int agree(const job *j) {
    bool same;

    if (compare_ranks(job_identity(j), "data or options", &same)) return 1;
    return job_is_contradicted(j) || j->bad_input || !same ? 2 : 0;
}

// Starts or resumes the training. Rank 0 draws weights or reads the checkpoint, and sends the state
// to all other ranks.
static int start(job *j) {
    if (j->rank == 0) job_print(j, idist_backend(), idist_launcher());
    if (j->rank == 0 && !job_resume(j)) j->state.done = -1;
    CHECK(idist_broadcast(&j->state, sizeof j->state, IDIST_U8, 0, NULL));
    CHECK(job_begin_curves(j)); // only rank 0 writes them
    j->start_s = now_s();
    return j->state.done < 0 ? 2 : 0;
}

// Trains one batch. Each rank computes the gradient of its share of the batch, and all ranks make
// the same step.
static int train_batch(job *j, int epoch, int first, int size) {
    int begin = first + (int)((int64_t)size * j->rank / j->ranks);
    int end = first + (int)((int64_t)size * (j->rank + 1) / j->ranks);

    job_gradient(j, epoch, begin, end);
    j->comm_s -= now_s();
    CHECK(idist_all_reduce(j->sums, j->sums, SUMS, IDIST_F64, IDIST_SUM, NULL));
    j->comm_s += now_s();
    job_step(j, epoch, first, size);
    return 0;
}

// Adds an epoch to the curves. Each rank classifies its share of the test images.
static int write_curves(job *j, int epoch) {
    double test_hits = job_test(j);

    CHECK(idist_all_reduce(&test_hits, &test_hits, 1, IDIST_F64, IDIST_SUM, NULL));
    CHECK(job_add_to_curves(j, epoch, test_hits));
    return 0;
}

static int train_epoch(job *j, int epoch) {
    job_begin_epoch(j, epoch);
    for (int first = 0, size; first < j->train.count; first += size) {
        size = j->train.count - first < j->batch ? j->train.count - first : j->batch;
        if (train_batch(j, epoch, first, size)) return 1;
        if (j->rank == 0) job_print_bar(j, epoch, first + size);
    }
    if (job_diverged(j)) return 1; // the same on all ranks
    j->state.done = epoch;
    if (j->rank == 0 && !job_save(j)) return 1;
    if (j->rank == 0) job_print_epoch(j, epoch);
    return j->curves ? write_curves(j, epoch) : 0;
}

static int finish(job *j) {
    double sums[3] = {0, j->comm_s, now_s() - j->start_s};
    uint64_t hash = fnv1a(FNV_START, j->state.w, sizeof j->state.w);
    bool same;

    CHECK(idist_summary_free(&j->summary));
    sums[0] = job_test(j);
    CHECK(idist_all_reduce(sums, sums, 3, IDIST_F64, IDIST_SUM, NULL));
    if (compare_ranks(hash, "weights", &same)) return 1;
    if (j->rank == 0) job_print_result(j, sums, hash, same);
    return same && job_is_accurate(j, (int)sums[0]) ? 0 : 1;
}

static int worker(int local_rank, void *arg) {
    job *j = (job *)arg;
    int *code = &j->exit_code; // set for main if the worker runs in this process

    (void)local_rank;
    j->rank = idist_get_rank();
    j->ranks = idist_get_world_size();
    if ((*code = agree(j)) == 0) *code = start(j);
    for (int epoch = (int)j->state.done + 1; *code == 0 && epoch <= j->epochs; epoch++)
        *code = train_epoch(j, epoch);
    return *code == 0 ? *code = finish(j) : *code;
}

int main(int argc, char **argv) {
    static job j;
    bool launched = strcmp(idist_launcher(), "none") != 0;
    int code = job_options(&j, argc, argv);
    idist_report report = {0};
    idist_desc desc = {0};

    if (code >= 0) return code;
    j.bad_input = !job_input(&j, argv[0]);
    if (j.bad_input && !launched) return 2; // a launched rank tells the others in agree()
    desc.timeout_ms = desc.init_timeout_ms = DEADLINE_MS;
    desc.report = &report;
    if (!launched && j.wanted_ranks != 1) desc.nproc_per_node = job_ranks(&j);
    if (idist_parallel_run(&desc, worker, &j) == IDIST_OK || j.exit_code) return j.exit_code;
    fprintf(stderr, "digits: %s\n", idist_last_error());
    return report.exit_code == 2 ? 2 : 1;
}
