// grad_scaler.c - mixed precision: compares idist_grad_scaler step by step with torch's GradScaler,
// in runs where gradients overflow on one rank. The runs are in tests/data/grad_scaler.txt, made by
// grad_scaler.py in that folder. Also tests idist_convert, checkpoints of a scaler, and errors.
#include "idist.h"

#include "idist_train.h"

#include "ranks.h"

#include <float.h>
#include <limits.h>
#include <math.h>

enum { PARAMS = 4, STEPS = 40, RANKS = 4 };

//------------------------------------------------------------------------------
// the runs of torch
//------------------------------------------------------------------------------

typedef struct run {
    idist_dtype dtype;
    int ranks;
    float scale;
    double growth, backoff;
    int interval;
    float grads[STEPS][RANKS][PARAMS]; // before scaling
    struct {
        int found, tracker;
        float scale, params[PARAMS];
    } after[STEPS];
} run;

static float read_float(FILE *f) {
    char word[32];

    TAP_REQUIRE(fscanf(f, "%31s", word) == 1);
    return strtof(word, NULL);
}

static bool read_run(FILE *f, run *r) {
    char dtype[8];
    int params, steps;

    if (fscanf(f, " run %7s %d %d %d", dtype, &r->ranks, &params, &steps) != 4) return false;
    TAP_REQUIRE(params == PARAMS && steps == STEPS && r->ranks <= RANKS);
    r->dtype = strcmp(dtype, "F16") == 0 ? IDIST_F16 : IDIST_F32;
    if (strcmp(dtype, "BF16") == 0) r->dtype = IDIST_BF16;
    r->scale = read_float(f);
    TAP_REQUIRE(fscanf(f, "%lf %lf %d", &r->growth, &r->backoff, &r->interval) == 3);

    for (int s = 0; s < STEPS; s++) {
        for (int i = 0; i < r->ranks * PARAMS; i++)
            r->grads[s][i / PARAMS][i % PARAMS] = read_float(f);
        TAP_REQUIRE(fscanf(f, "%d", &r->after[s].found) == 1);
        r->after[s].scale = read_float(f);
        TAP_REQUIRE(fscanf(f, "%d", &r->after[s].tracker) == 1);
        for (int i = 0; i < PARAMS; i++) r->after[s].params[i] = read_float(f);
    }

    return true;
}

static idist_tensor tensor_of(void *data, idist_dtype dtype) {
    idist_tensor tensor = {data, PARAMS, dtype};
    return tensor;
}

// Makes one step. `model` and `grads` are in the dtype of the run, `master` is F32. Returns false
// after an error.
static bool step(idist_grad_scaler *scaler, idist_ddp *ddp, const run *r, int s, int rank,
                 float *master) {
    float scaled[PARAMS], unscaled[PARAMS];
    idist_tensor from = tensor_of(scaled, IDIST_F32), to = tensor_of(unscaled, IDIST_F32);
    idist_tensor grads = tensor_of(idist_ddp_grad(ddp, 0), r->dtype);

    for (int i = 0; i < PARAMS; i++)
        scaled[i] = r->grads[s][rank][i] * idist_grad_scaler_scale(scaler);
    if (!rank_ok(rank, idist_convert(&from, &grads, 1))) return false;
    if (!rank_ok(rank, idist_ddp_wait(ddp))) return false;
    if (!rank_ok(rank, idist_convert(&grads, &to, 1))) return false;
    if (!rank_ok(rank, idist_grad_scaler_unscale(scaler, &to, 1, true, NULL))) return false;
    rank_check(scaler->found_inf == r->after[s].found, "rank %d, step %d: found_inf is %d", rank, s,
               (int)scaler->found_inf);
    for (int i = 0; i < PARAMS && !scaler->found_inf; i++) master[i] -= 0.125f * unscaled[i];
    return rank_ok(rank, idist_grad_scaler_update(scaler));
}

static void replay(idist_group *world, int rank, int n, void *arg) {
    const run *r = (const run *)arg;
    float master[PARAMS] = {1, -2, 0.5f, 3}, model[PARAMS];
    idist_tensor params = tensor_of(model, r->dtype), masters = tensor_of(master, IDIST_F32);
    idist_grad_scaler scaler = {r->growth, r->backoff, r->interval, r->scale, 0, false, false};
    idist_ddp_desc desc = {0};
    idist_ddp *ddp = NULL;
    (void)n;

    if (!rank_ok(rank, idist_convert(&masters, &params, 1))) return;
    desc.params = &params;
    desc.n = 1;
    desc.group = world;
    if (!rank_ok(rank, idist_ddp_create(&desc, &ddp))) return;
    for (int s = 0; s < STEPS && step(&scaler, ddp, r, s, rank, master); s++) {
        rank_check(scaler.scale == r->after[s].scale && !scaler.found_inf &&
                       scaler.growth_tracker == r->after[s].tracker,
                   "rank %d, step %d: scale %g after %d, not %g", rank, s, (double)scaler.scale,
                   scaler.growth_tracker, (double)r->after[s].scale);
        for (int i = 0; i < PARAMS; i++)
            rank_check(master[i] == r->after[s].params[i], "rank %d, step %d: parameter %d is %.9g",
                       rank, s, i, (double)master[i]);
    }
    idist_ddp_free(&ddp);
}

static void against_torch(void) {
    static run r;
    FILE *f = fopen("tests/data/grad_scaler.txt", "r");
    int runs = 0, overflows = 0;

    TAP_REQUIRE(f != NULL && fscanf(f, "#%*[^\n]") == 0);
    while (read_run(f, &r)) {
        runs++;
        for (int s = 0; s < STEPS; s++) overflows += r.after[s].found;
        ranks_case(r.ranks, NULL, replay, &r, "torch's run %d: %s, %d ranks", runs,
                   idist_dtype_name(r.dtype), r.ranks);
    }
    fclose(f);
    tap_ok(runs == 9 && overflows > 60, "%d runs with %d overflows", runs, overflows);
}

//------------------------------------------------------------------------------
// gradients that differ between ranks
//------------------------------------------------------------------------------

// Each rank has its own gradients, and those of the last rank overflow. All ranks must skip.
static void own_gradients(idist_group *world, int rank, int n, void *arg) {
    double wide[3] = {65536, 131072, 1e300};
    float narrow[5] = {65536, 1, 2, 3, -65536};
    uint16_t half[2] = {0x4780, 0xc780}; // BF16 of 65536 and -65536
    idist_tensor grads[4] = {{wide, 3, IDIST_F64},
                             {narrow, 5, IDIST_F32},
                             {NULL, 0, IDIST_F32},
                             {half, 2, IDIST_BF16}};
    idist_grad_scaler scaler = {0};
    idist_opts o = opts_of(world);
    (void)arg;

    rank_ok(rank, idist_grad_scaler_unscale(&scaler, grads, 4, false, &o));
    rank_check(!scaler.found_inf && wide[0] == 1 && wide[1] == 2 && wide[2] == 1e300 / 65536 &&
                   narrow[0] == 1 && narrow[4] == -1 && half[0] == 0x3f80 && half[1] == 0xbf80,
               "rank %d: wrong quotients", rank);
    rank_ok(rank, idist_grad_scaler_update(&scaler));
    rank_check(scaler.growth_tracker == 1 && scaler.scale == 65536, "rank %d: scale %g", rank,
               (double)scaler.scale);

    for (int i = 0; i < 3; i++) { // one of each dtype
        if (rank == n - 1 && i == 0) narrow[4] = INFINITY;
        if (rank == n - 1 && i == 1) narrow[4] = 0, wide[2] = -(double)NAN;
        if (rank == n - 1 && i == 2) wide[2] = 0, half[0] = 0xff80;
        rank_ok(rank, idist_grad_scaler_unscale(&scaler, grads, 4, false, &o));
        rank_check(scaler.found_inf, "rank %d: overflow %d not found", rank, i);
        rank_ok(rank, idist_grad_scaler_update(&scaler));
    }
    rank_check(scaler.growth_tracker == 0 && scaler.scale == 8192, "rank %d: scale %g", rank,
               (double)scaler.scale);

    // A rank with wrong arguments must not leave the others waiting.
    if (rank == n - 1) grads[1].dtype = IDIST_F16;
    rank_is(rank, idist_grad_scaler_unscale(&scaler, grads, 4, false, &o), IDIST_ERR_ARG);
    rank_check(strstr(idist_last_error(), "gradient 1 is F16") && !scaler.unscaled, "rank %d: %s",
               rank, idist_last_error());
}

// Looks for one element that is not finite, at every position of a gradient.
static void every_position(void) {
    enum { COUNT = 9001 };
    static float x[COUNT];
    idist_tensor grads = {x, COUNT, IDIST_F32};
    int found = 0;

    for (int i = 0; i < COUNT; i += i < 20 || i > COUNT - 20 || (i > 4090 && i < 4100) ? 1 : 7) {
        idist_grad_scaler scaler = {0};
        x[i] = i % 2 ? NAN : -INFINITY;
        TAP_REQUIRE(idist_grad_scaler_unscale(&scaler, &grads, 1, true, NULL) == IDIST_OK);
        x[i] = FLT_MAX;
        found += scaler.found_inf;
        scaler.unscaled = false;
        TAP_REQUIRE(idist_grad_scaler_unscale(&scaler, &grads, 1, true, NULL) == IDIST_OK);
        found -= scaler.found_inf;
        x[i] = 0;
    }
    tap_ok(found > 1300, "one element that is not finite, at %d positions", found);
}

//------------------------------------------------------------------------------
// limits, checkpoints and errors
//------------------------------------------------------------------------------

static void limits(void) {
    float one = 1, bad = INFINITY;
    idist_tensor good = {&one, 1, IDIST_F32}, overflow = {&bad, 1, IDIST_F32};
    idist_grad_scaler scaler = {0}, given = {4, 0.25, 1, 0x1p126f, 0, false, false};

    for (int i = 0; i < 200; i++) {
        TAP_REQUIRE(idist_grad_scaler_unscale(&scaler, &overflow, 1, true, NULL) == IDIST_OK);
        TAP_REQUIRE(idist_grad_scaler_update(&scaler) == IDIST_OK);
    }
    tap_ok(scaler.scale == 0x1p-126f,
           "200 overflows: the scale stays at the smallest normal float");

    TAP_REQUIRE(idist_grad_scaler_unscale(&given, &good, 1, true, NULL) == IDIST_OK);
    TAP_REQUIRE(idist_grad_scaler_update(&given) == IDIST_OK);
    tap_ok(given.scale == 0x1p126f && given.growth_tracker == 0, "the scale stays finite");

    given.growth_tracker = INT_MAX; // of a damaged checkpoint
    given.scale = 8;
    TAP_REQUIRE(idist_grad_scaler_unscale(&given, &good, 1, true, NULL) == IDIST_OK);
    TAP_REQUIRE(idist_grad_scaler_update(&given) == IDIST_OK);
    tap_ok(given.scale == 32 && given.growth_tracker == 0, "the largest growth tracker");

    scaler = (idist_grad_scaler){0};
    tap_ok(idist_grad_scaler_scale(&scaler) == 65536 && idist_grad_scaler_scale(NULL) == 65536,
           "the default scale");
    for (int i = 0; i < 2000; i++) {
        TAP_REQUIRE(idist_grad_scaler_scale(&scaler) == 65536);
        TAP_REQUIRE(idist_grad_scaler_unscale(&scaler, &good, 1, true, NULL) == IDIST_OK);
        TAP_REQUIRE(idist_grad_scaler_update(&scaler) == IDIST_OK);
    }
    tap_ok(scaler.scale == 131072, "it doubles after 2,000 steps");
}

// The scaler of rank 0 continues on all ranks after a checkpoint.
static void checkpoint(idist_group *world, int rank, int n, void *arg) {
    const char *folder = (const char *)arg;
    float one = 1, infinity = INFINITY;
    idist_tensor grads = {rank == 0 ? &infinity : &one, 1, IDIST_F32};
    idist_grad_scaler scaler = {0, 0, 5, 1024, 3, false, false}, loaded;
    idist_checkpoint_desc desc = {folder, NULL, 0, 0, false};
    char path[512];
    idist_opts o = opts_of(world);
    (void)n;

    rank_ok(rank, idist_grad_scaler_unscale(&scaler, &grads, 1, false, &o));
    rank_ok(rank, idist_grad_scaler_update(&scaler));
    rank_ok(rank, idist_checkpoint_save(&desc, 7, 0.5, NULL, 0, &scaler, sizeof scaler, &o));
    rank_ok(rank, idist_checkpoint_find(&desc, true, path, sizeof path, &o));
    memset(&loaded, 0xff, sizeof loaded);
    rank_ok(rank, idist_checkpoint_load(path, NULL, 0, &loaded, sizeof loaded, &o));
    rank_check(loaded.scale == 512 && loaded.growth_tracker == 0 && loaded.growth_interval == 5,
               "rank %d: scale %g", rank, (double)loaded.scale);
    one = 512;
    grads.data = &one;
    rank_ok(rank, idist_grad_scaler_unscale(&loaded, &grads, 1, false, &o));
    rank_check(one == 1 && !loaded.found_inf, "rank %d: %g", rank, (double)one);
}

static void refused(idist_status status, idist_status wanted, const char *reason) {
    tap_ok(status == wanted && strstr(idist_last_error(), reason), "refused: %s", reason);
    if (status != wanted || !strstr(idist_last_error(), reason))
        tap_diag("%s: %s", idist_status_name(status), idist_last_error());
}

static void bad_scalers(void) {
    float x[2] = {1, 2};
    idist_tensor good = {x, 2, IDIST_F32}, bad = {NULL, 2, IDIST_F32};
    const idist_grad_scaler none = {0};
    idist_grad_scaler s = none;

    refused(idist_grad_scaler_update(&s), IDIST_ERR_STATE, "no gradients were unscaled");
    refused(idist_grad_scaler_update(NULL), IDIST_ERR_ARG, "scaler is NULL");
    refused(idist_grad_scaler_unscale(NULL, &good, 1, true, NULL), IDIST_ERR_ARG, "is NULL");
    refused(idist_grad_scaler_unscale(&s, NULL, 1, true, NULL), IDIST_ERR_ARG, "grads is NULL");
    refused(idist_grad_scaler_unscale(&s, &bad, 1, true, NULL), IDIST_ERR_ARG,
            "gradient 0 is NULL");
    for (int dtype = 0; dtype < IDIST_DTYPE_COUNT; dtype++) {
        if (dtype == IDIST_F32 || dtype == IDIST_F64 || dtype == IDIST_BF16) continue;
        bad.data = x;
        bad.dtype = (idist_dtype)dtype;
        if (idist_grad_scaler_unscale(&s, &bad, 1, true, NULL) != IDIST_ERR_ARG) break;
        if (dtype == IDIST_DTYPE_COUNT - 1) tap_ok(true, "refused: all other dtypes");
    }
    static const float scales[] = {-1, NAN, INFINITY, 1e-40f};
    for (int i = 0; i < 4; i++) {
        s = none;
        s.scale = scales[i];
        refused(idist_grad_scaler_unscale(&s, &good, 1, true, NULL), IDIST_ERR_ARG,
                "scale must be");
        s.unscaled = true;
        refused(idist_grad_scaler_update(&s), IDIST_ERR_ARG, "scale must be");
    }
    static const double growths[] = {1, 0.5, -2, (double)NAN, (double)INFINITY};
    for (int i = 0; i < 5; i++) {
        s = none;
        s.growth_factor = growths[i];
        refused(idist_grad_scaler_unscale(&s, &good, 1, true, NULL), IDIST_ERR_ARG,
                "growth_factor must be");
    }
    static const double backoffs[] = {1, 2, -0.5, (double)NAN};
    for (int i = 0; i < 4; i++) {
        s = none;
        s.backoff_factor = backoffs[i];
        refused(idist_grad_scaler_unscale(&s, &good, 1, true, NULL), IDIST_ERR_ARG,
                "backoff_factor must be");
    }
    s = none;
    s.growth_interval = -1;
    refused(idist_grad_scaler_unscale(&s, &good, 1, true, NULL), IDIST_ERR_ARG, "growth_interval");
    s = none;
    s.growth_tracker = -1;
    refused(idist_grad_scaler_unscale(&s, &good, 1, true, NULL), IDIST_ERR_ARG, "growth_tracker");
    tap_ok(x[0] == 1 && x[1] == 2, "refused calls change nothing");
    s = none;
    tap_is(idist_grad_scaler_unscale(&s, &good, 1, true, NULL), IDIST_OK, "the first call");
    refused(idist_grad_scaler_unscale(&s, &good, 1, true, NULL), IDIST_ERR_STATE,
            "unscaled already");
    tap_ok(x[0] == 1 / 65536.0f, "and divides only once");
}

//------------------------------------------------------------------------------
// conversions
//------------------------------------------------------------------------------

// Converts between all pairs of dtypes. The numbers are exact in each dtype.
static void conversions(void) {
    static const idist_dtype dtypes[] = {IDIST_F8E4M3, IDIST_F8E5M2, IDIST_F16,
                                         IDIST_BF16,   IDIST_F32,    IDIST_F64};
    enum { COUNT = 700, KINDS = 6 };
    static float numbers[COUNT], back[COUNT];
    static char a[COUNT * 8 + 1], b[COUNT * 8 + 1]; // used from an odd address on
    int wrong = 0;

    for (int i = 0; i < COUNT; i++) numbers[i] = (float)(i % 8 - 4) * (i % 3 ? 1 : 0.25f);
    for (int j = 0; j < KINDS * KINDS; j++) {
        idist_tensor list[4] = {{numbers, COUNT, IDIST_F32},
                                {a + 1, COUNT, dtypes[j / KINDS]},
                                {b + 1, COUNT, dtypes[j % KINDS]},
                                {back, COUNT, IDIST_F32}};
        memset(back, 0xff, sizeof back);
        for (int k = 0; k < 3; k++)
            TAP_REQUIRE(idist_convert(&list[k], &list[k + 1], 1) == IDIST_OK);
        if (memcmp(numbers, back, sizeof back) != 0) wrong++;
    }
    tap_ok(!wrong, "36 pairs of dtypes, at odd addresses");

    double wide[5] = {1e300, -1e-300, 1 + 0x1p-40, (double)NAN, 65520};
    float narrow[5];
    uint16_t half[5];
    double same[5];
    idist_tensor from = {wide, 5, IDIST_F64}, to = {narrow, 5, IDIST_F32};
    idist_tensor f16 = {half, 5, IDIST_F16}, f64 = {same, 5, IDIST_F64};
    TAP_REQUIRE(idist_convert(&from, &to, 1) == IDIST_OK);
    TAP_REQUIRE(idist_convert(&from, &f16, 1) == IDIST_OK);
    TAP_REQUIRE(idist_convert(&from, &f64, 1) == IDIST_OK);
    tap_ok(narrow[0] == INFINITY && narrow[1] == 0 && signbit(narrow[1]) && narrow[2] == 1 &&
               isnan(narrow[3]) && narrow[4] == 65520,
           "F64 to F32 rounds");
    tap_ok(half[0] == 0x7c00 && half[2] == 0x3c00 && half[4] == 0x7c00, "F64 to F16 rounds");
    tap_ok(memcmp(wide, same, sizeof wide) == 0, "F64 to F64 copies the bits");
    float large[3] = {1e9f, INFINITY, -INFINITY};
    uint8_t f8[3];
    idist_tensor over = {large, 3, IDIST_F32}, e4m3 = {f8, 3, IDIST_F8E4M3};
    TAP_REQUIRE(idist_convert(&over, &e4m3, 1) == IDIST_OK);
    tap_ok(f8[0] == 0x7e && f8[1] == 0x7e && f8[2] == 0xfe, "F8E4M3 saturates");
    e4m3.dtype = IDIST_F8E5M2;
    TAP_REQUIRE(idist_convert(&over, &e4m3, 1) == IDIST_OK);
    tap_ok(f8[0] == 0x7b && f8[1] == 0x7b && f8[2] == 0xfb, "F8E5M2 saturates");
    tap_is(idist_convert(&from, &from, 1), IDIST_OK, "a tensor to itself");
    tap_is(idist_convert(NULL, NULL, 0), IDIST_OK, "no tensors");
}

static void bad_conversions(void) {
    float x[2] = {1, 2}, y[2] = {3, 4};
    idist_tensor from[2] = {{x, 2, IDIST_F32}, {x, 2, IDIST_F32}}, to[2], good[2];

    good[0] = good[1] = (idist_tensor){y, 2, IDIST_BF16};
    refused(idist_convert(from, NULL, 2), IDIST_ERR_ARG, "a list is NULL");
    refused(idist_convert(from, good, -1), IDIST_ERR_ARG, "-1 tensors");
    memcpy(to, good, sizeof to);
    to[1].count = 1;
    refused(idist_convert(from, to, 2), IDIST_ERR_ARG, "from[1] has 2 elements, but to[1] 1");
    to[1].count = 2;
    to[1].data = NULL;
    refused(idist_convert(from, to, 2), IDIST_ERR_ARG, "to[1] is NULL");
    to[1].data = x;
    refused(idist_convert(from, to, 2), IDIST_ERR_ARG, "are the same memory, but F32 and BF16");
    to[1].dtype = IDIST_I32;
    refused(idist_convert(from, to, 2), IDIST_ERR_ARG, "must be of a floating dtype, not I32");
    to[1].dtype = (idist_dtype)-3;
    refused(idist_convert(from, to, 2), IDIST_ERR_ARG, "floating dtype");
    tap_ok(y[0] == 3 && y[1] == 4, "refused calls convert nothing");
}

int main(void) {
    static const int sizes[4] = {1, 2, 3, 4};
    char folder[] = "/tmp/grad_scaler.XXXXXX", command[64];

    tap_deadline(60);
    against_torch();
    for (int i = 0; i < 4; i++)
        ranks_case(sizes[i], NULL, own_gradients, NULL, "own gradients, %d ranks", sizes[i]);
    every_position();
    limits();
    TAP_REQUIRE(mkdtemp(folder) != NULL);
    ranks_case(3, NULL, checkpoint, folder, "a checkpoint");
    snprintf(command, sizeof command, "rm -rf %s", folder);
    tap_is(system(command), 0, "its folder");
    bad_scalers();
    conversions();
    bad_conversions();
    return tap_done();
}
