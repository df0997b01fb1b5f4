// timeline.c - the program whose timelines trace.sh checks: training steps that average gradients
// during the backward pass
//
//     cc -O2 -DIDIST_IMPLEMENTATION -I. tests/launch/timeline.c -o timeline
//     IDIST_TRACE=out.json ./timeline STEPS [WORK [stay]]
//
// WORK is the amount of work. A value of 1 takes about a tenth of a millisecond per layer. With
// "stay", all ranks print "ready" after the steps, and then wait in a barrier that rank 0 does not
// enter.
#include "idist.h"

#include "idist_train.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LAYERS = 6, BUCKETS = 3, COUNT = 1 << 15 };

static float weights[LAYERS][COUNT], gradients[LAYERS][COUNT], scratch[4096];
static int amount = 1;

// Does a part of a layer's work, which takes longer on higher ranks.
static void work(const char *name, int layer, int units) {
    char text[64];
    snprintf(text, sizeof text, "%s %d", name, layer);
    idist_trace_begin(text);
    for (int k = 0; k < units * amount * (20 + 2 * idist_get_rank()); k++)
        for (int i = 0; i < 4096; i++) scratch[i] = scratch[i] * 0.999f + (float)(i & 15);
    idist_trace_end();
}

static bool step(idist_ddp *ddp) {
    bool fine = true;
    idist_trace_begin("forward");
    for (int i = 0; i < LAYERS; i++) work("layer", i, 2);
    idist_trace_end();
    idist_trace_begin("backward");
    for (int i = LAYERS; i-- > 0;) {
        work("layer", i, 4);
        for (int k = 0; k < COUNT; k++) gradients[i][k] = (float)(i + idist_get_rank());
        fine = fine && idist_ddp_ready(ddp, i) == IDIST_OK;
    }
    idist_trace_end();
    fine = fine && idist_ddp_wait(ddp) == IDIST_OK;
    work("update", 0, 2);
    return fine && gradients[1][COUNT - 1] == 1 + (float)(idist_get_world_size() - 1) / 2;
}

static idist_ddp *make_ddp(void) {
    idist_tensor params[LAYERS], grads[LAYERS];
    idist_ddp_desc desc = {.params = params,
                           .grads = grads,
                           .n = LAYERS,
                           .bucket_nbytes = sizeof weights / BUCKETS};
    idist_ddp *ddp = NULL;
    for (int i = 0; i < LAYERS; i++) {
        params[i] = (idist_tensor){weights[i], COUNT, IDIST_F32};
        grads[i] = (idist_tensor){gradients[i], COUNT, IDIST_F32};
    }
    idist_ddp_create(&desc, &ddp);
    return ddp;
}

int main(int argc, char **argv) {
    int steps = argc > 1 ? atoi(argv[1]) : 3;
    float loss = 1;
    if (argc > 2) amount = atoi(argv[2]);
    bool fine = idist_initialize(NULL) == IDIST_OK;
    idist_ddp *ddp = fine ? make_ddp() : NULL;
    fine = ddp != NULL;
    for (int i = 0; i < steps && fine; i++)
        fine =
            step(ddp) && idist_all_reduce(&loss, &loss, 1, IDIST_F32, IDIST_AVG, NULL) == IDIST_OK;
    if (argc > 3 && fine) {
        printf("ready\n");
        fflush(stdout);
        if (idist_get_rank() == 0) pause();
        fine = idist_barrier(NULL) == IDIST_OK;
    }
    if (!fine) fprintf(stderr, "rank %d: %s\n", idist_get_rank(), idist_last_error());
    idist_ddp_free(&ddp);
    return idist_finalize() != IDIST_OK || !fine;
}
