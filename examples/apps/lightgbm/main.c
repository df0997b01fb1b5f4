// apps/lightgbm - LightGBM trains on all ranks, with idist as its network
//
// build:  cc -O2 -DIDIST_IMPLEMENTATION examples/apps/lightgbm/main.c -o lightgbm
// run:    pip install --no-deps --target lgb lightgbm     # only its library is used
//         export LIGHTGBM_LIBRARY=lgb/lightgbm/lib/lib_lightgbm.so
//         ./lightgbm                        starts 3 ranks
//         ./lightgbm --tree-learner voting  instead of data; serial, with --ranks 1
//         ./lightgbm --network socket       LightGBM's own sockets, for comparison
//         ./lightgbm --parameters 'num_leaves=63 learning_rate=0.05'
//         ./lightgbm --data FILE            a CSV file: a label of 0 or 1, then the values
//         mpirun -n 2 ./lightgbm --model model.txt
//
// expected output; dots depend on the machine:
//    20000 rows on 3 ranks, tree learner data, network idist
//    round   10: loss 0.5...
//    round   20: loss 0.4...
//    round   30: loss 0.3...
//    round   40: loss 0.3...
//    40 rounds in ... s; on rank 0, ... s of it in ... calls, which sent ... MB
//    trees 0x................ on all 3 ranks
//
// LightGBM is a library for gradient boosting on decision trees. Its C API takes a network as two
// functions: a reduce_scatter with LightGBM's own reducers, and an all_gather (see
// lightgbm_network.h). Each rank has a share of the rows:
//
//     rank 0   histograms of all features --.
//     rank 1   histograms of all features --+-- reduce_scatter: each rank adds the histograms of
//     rank 2   histograms of all features --'   some features, and finds the best split of these
//                                               all_gather: the best split of every rank
//
// With the voting learner, the ranks vote for features, and add only the histograms of these. The C
// API refuses LightGBM's third parallel learner, feature. All ranks end with the same trees, and
// idist and LightGBM's sockets give the same trees. If a rank dies, the other ranks end with an
// error that names the rank.
//
// Rank 0 also logs the speed of each rank, with idist_run_report. This log and LightGBM's own
// messages go to stderr.
//
// Exits with 0 if all ranks have the same trees, with 2 if the command line cannot be parsed, and
// otherwise with 1.
#include "../../../idist_train.h"

#include "../../lib/check.h"
#include "lightgbm_network.h"
#include "lightgbm_rows.h"

typedef struct job {
    lightgbm_options options;
    lightgbm_api api;
    int rank, ranks;
    lightgbm_rows rows;
    void *dataset, *booster;
    char parameters[2000];
    idist_run run;
    double start_s;
} job;

// ---- training, in the training thread ----

// Reads or computes this rank's share of the rows.
static int load_rows(job *j) {
    const char *path = j->options.data;

    if (path ? !lightgbm_rows_read(&j->rows, path, j->rank, j->ranks)
             : !lightgbm_rows_make(&j->rows, (int)j->options.rows, j->rank, j->ranks))
        return 1;
    if (j->rank == 0)
        printf("%d rows on %d ranks, tree learner %s, network %s\n", j->rows.total, j->ranks,
               lightgbm_learners[j->options.learner], lightgbm_networks[j->options.network]);
    fflush(stdout);
    return 0;
}

// Writes LightGBM's parameters. LightGBM takes the first of two values, so --parameters is first.
static int write_parameters(job *j) {
    int nbytes = snprintf(
        j->parameters, sizeof j->parameters,
        "%s tree_learner=%s num_machines=%d objective=binary metric=binary_logloss num_leaves=31 "
        "top_k=5 num_threads=1 pre_partition=true deterministic=true seed=1 verbosity=-1",
        j->options.parameters, lightgbm_learners[j->options.learner], j->ranks);

    if (nbytes >= 0 && (size_t)nbytes < sizeof j->parameters) return 0;
    fprintf(stderr, "--parameters is too long\n");
    return 1;
}

// Creates the dataset and the booster. For the dataset, the ranks agree how to divide the values of
// each feature into bins.
static int create_booster(job *j) {
    LGBM_CHECK(&j->api, DatasetCreateFromMat(j->rows.values, LIGHTGBM_F64, j->rows.count,
                                             j->rows.columns, 1, j->parameters, NULL, &j->dataset));
    LGBM_CHECK(&j->api,
               DatasetSetField(j->dataset, "label", j->rows.labels, j->rows.count, LIGHTGBM_F32));
    LGBM_CHECK(&j->api, BoosterCreate(j->dataset, j->parameters, &j->booster));
    return 0;
}

// Prints the loss over the rows of all ranks.
static int print_loss(job *j, int round) {
    double loss = 0, sums[2];
    int count;

    LGBM_CHECK(&j->api, BoosterGetEval(j->booster, 0, &count, &loss));
    sums[0] = loss * j->rows.count;
    sums[1] = j->rows.count;
    CHECK(idist_all_reduce(sums, sums, 2, IDIST_F64, IDIST_SUM, NULL));
    if (j->rank == 0) printf("round %4d: loss %.6f\n", round, sums[0] / sums[1]);
    fflush(stdout);
    return 0;
}

// Prints how long the training took. Only calls of idist are counted, not LightGBM's sockets.
static int print_times(job *j, int rounds) {
    idist_run_rank ranks[LIGHTGBM_MAX_RANKS];
    double seconds = now_s() - j->start_s;

    if (j->options.network == NETWORK_IDIST)
        CHECK(idist_run_report(&j->run, "lightgbm", ranks, NULL));
    if (j->rank != 0) return 0;
    printf("%d rounds in %.2f s", rounds, seconds);
    if (j->options.network == NETWORK_IDIST)
        printf("; on rank 0, %.2f s of it in %llu calls, which sent %.1f MB", ranks[0].waited,
               (unsigned long long)ranks[0].calls, (double)ranks[0].sent_nbytes / 1e6);
    printf("\n");
    return 0;
}

static int write_model(const char *path, const char *text) {
    FILE *file = fopen(path, "w");
    bool good = file && fputs(text, file) >= 0;

    if (file) good = fclose(file) == 0 && good;
    if (!good) fprintf(stderr, "%s: %s\n", path, strerror(errno));
    return good ? 0 : 1;
}

// Returns a hash of the trees. The text after the trees names parameters. With the voting learner,
// the internal_value of a tree's root differs from rank to rank, with any network. The leaves,
// which predict, do not differ.
static uint64_t hash_trees(const char *text) {
    uint64_t hash = FNV_START;

    while (*text && strncmp(text, "parameters:", 11) != 0) {
        size_t nbytes = strcspn(text, "\n");

        if (strncmp(text, "internal_value=", 15) && strncmp(text, "tree_sizes=", 11))
            hash = fnv1a(hash, text, nbytes);
        text += nbytes + (text[nbytes] == '\n');
    }
    return hash;
}

// Compares the models of all ranks, and writes the model.
static int finish_model(job *j, const char *text) {
    uint64_t hash = hash_trees(text), least, most;

    CHECK(idist_all_reduce(&hash, &least, 1, IDIST_U64, IDIST_MIN, NULL));
    CHECK(idist_all_reduce(&hash, &most, 1, IDIST_U64, IDIST_MAX, NULL));
    if (least != most && j->rank == 0) fprintf(stderr, "the ranks ended with different trees\n");
    if (least == most && j->rank == 0)
        printf("trees 0x%016llx on all %d ranks\n", (unsigned long long)hash, j->ranks);
    fflush(stdout);
    CHECK(idist_barrier(NULL)); // no rank exits with an error before this is printed
    if (least != most) return 1;
    return j->rank == 0 && j->options.model ? write_model(j->options.model, text) : 0;
}

static int finish(job *j) {
    int64_t nbytes = 0;
    char *text;
    int code;

    LGBM_CHECK(&j->api, BoosterSaveModelToString(j->booster, 0, -1, 0, 0, &nbytes, NULL));
    text = (char *)malloc((size_t)nbytes + 1);
    if (!text) {
        fprintf(stderr, "no memory for the model\n");
        return 1;
    }
    LGBM_CHECK(&j->api, BoosterSaveModelToString(j->booster, 0, -1, 0, nbytes, &nbytes, text));
    code = finish_model(j, text);
    free(text);
    LGBM_CHECK(&j->api, BoosterFree(j->booster));
    LGBM_CHECK(&j->api, DatasetFree(j->dataset));
    LGBM_CHECK(&j->api, NetworkFree());
    lightgbm_rows_free(&j->rows);
    return code;
}

// Writes what LightGBM reports. LightGBM itself would write to stdout.
static void write_log(const char *text) { fputs(text, stderr); }

static int train(void *arg) {
    job *j = (job *)arg;
    int round = 0, finished = 0; // LightGBM has finished when no split is worth it

    LGBM_CHECK(&j->api, RegisterLogCallback(write_log));
    TRY(write_parameters(j));
    TRY(load_rows(j));
    TRY(network_connect(&j->api, j->options.network));
    CHECK(idist_barrier(NULL)); // the clock starts when every rank is ready
    CHECK(idist_run_begin(&j->run));
    j->start_s = now_s();
    TRY(create_booster(j));
    while (round < (int)j->options.rounds && !finished) {
        LGBM_CHECK(&j->api, BoosterUpdateOneIter(j->booster, &finished));
        j->run.examples += (uint64_t)j->rows.count;
        if (++round % 10 == 0) TRY(print_loss(j, round));
    }
    TRY(print_times(j, round));
    return finish(j);
}

// ---- the main thread ----

// Returns what is wrong with the options in this world, or NULL. Chooses the tree learner if it was
// not given.
static const char *check_options(job *j) {
    lightgbm_options *o = &j->options;

    if (j->ranks > LIGHTGBM_MAX_RANKS) return "more ranks than this program has room for";
    if (o->ranks && (int)o->ranks != j->ranks)
        return "--ranks contradicts the launcher: leave it out";
    if (o->network == NETWORK_SOCKET && idist_get_nnodes() > 1)
        return "--network socket works on one host only";
    if (o->learner < 0) o->learner = j->ranks > 1 ? LEARNER_DATA : LEARNER_SERIAL;
    if (o->learner == LEARNER_SERIAL && j->ranks > 1)
        return "--tree-learner serial is for one rank";
    return NULL;
}

// Checks that all ranks have the same options and the library. Returns 0 if they do. Otherwise the
// first rank that found an error prints the error.
static int agree(job *j) {
    char reason[500] = "";
    const char *wrong = check_options(j);
    const lightgbm_options *o = &j->options;
    uint64_t mine[5] = {o->rows, o->rounds, (uint64_t)o->learner, (uint64_t)o->network}, zero[5];
    int32_t first;

    mine[4] = fnv1a(FNV_START, o->parameters, strlen(o->parameters));
    memcpy(zero, mine, sizeof zero);
    CHECK(idist_broadcast(zero, 5, IDIST_U64, 0, NULL));
    if (!wrong && memcmp(zero, mine, sizeof zero)) wrong = "rank 0 was given different options";
    if (!wrong && !lightgbm_load(&j->api, o->library, reason, sizeof reason)) wrong = reason;
    first = wrong ? j->rank : j->ranks;
    CHECK(idist_all_reduce(&first, &first, 1, IDIST_I32, IDIST_MIN, NULL));
    if (first == j->rank) fprintf(stderr, "lightgbm: rank %d: %s\n", j->rank, wrong);
    if (first == j->rank && wrong == reason)
        fprintf(stderr, "lightgbm: --library or LIGHTGBM_LIBRARY names lib_lightgbm.so, which is "
                        "in the Python package lightgbm\n");
    if (first < j->ranks) CHECK(idist_barrier(NULL)); // no rank exits before the error is printed
    return first < j->ranks;
}

static int worker(int local_rank, void *arg) {
    job *j = (job *)arg;

    (void)local_rank;
    j->rank = idist_get_rank();
    j->ranks = idist_get_world_size();
    return agree(j) ? 1 : network_run(train, j);
}

int main(int argc, char **argv) {
    static job j;
    idist_desc desc = {0};

    if (!lightgbm_parse(&j.options, argc, argv)) return 2;
    if (strcmp(idist_launcher(), "none") == 0)
        desc.nproc_per_node = j.options.ranks ? (int)j.options.ranks : 3;
    CHECK(idist_parallel_run(&desc, worker, &j));
    return 0;
}
