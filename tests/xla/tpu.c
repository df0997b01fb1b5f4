// tpu.c - checks the TPU_* variables that idist sets for libtpu, without a TPU
#define IDIST_IMPLEMENTATION
#include "idist.h"
#include "idist_xla.h"

#include "tap.h"

static const char *const names[] = {"TPU_VISIBLE_CHIPS",  "TPU_CHIPS_PER_PROCESS_BOUNDS",
                                    "TPU_PROCESS_BOUNDS", "TPU_PROCESS_ADDRESSES",
                                    "TPU_PROCESS_PORT",   "CLOUD_TPU_TASK_ID",
                                    "TPU_HOST_BOUNDS",    "TPU_CHIPS_PER_HOST_BOUNDS"};

static void unset_all(void) {
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) unsetenv(names[i]);
    unsetenv("IDIST_TPU_VARIABLES");
}

static void is_set(const char *name, const char *value) {
    const char *got = getenv(name);
    tap_ok(got ? strcmp(got, value) == 0 : !value[0], "%s is \"%s\": got \"%s\"", name, value,
           got ? got : "");
}

// Fills in a world of `hosts` hosts with `chips` ranks each, as `rank` sees it.
static void fill(idist__world *w, idist__rank_info *nodes, int hosts, int chips, int rank) {
    memset(w, 0, sizeof *w);
    w->nodes = nodes;
    w->nnodes = hosts;
    w->group.size = hosts * chips;
    w->group.rank = rank;
    for (int i = 0; i < hosts * chips; i++) {
        memset(&nodes[i], 0, sizeof nodes[i]);
        snprintf(nodes[i].hostname, sizeof nodes[i].hostname, "host%d", i / chips);
        nodes[i].local_rank = i % chips;
        nodes[i].local_size = chips;
    }
}

int main(void) {
    static idist__rank_info nodes[16];
    idist__world w;
    char why[200] = "";

    unset_all();
    fill(&w, nodes, 1, 4, 2);
    tap_ok(idist__tpu_set_variables(&w, 2, why, sizeof why), "one host with four chips");
    is_set("TPU_VISIBLE_CHIPS", "2");
    is_set("TPU_CHIPS_PER_PROCESS_BOUNDS", "1,1,1");
    is_set("TPU_PROCESS_BOUNDS", "2,2,1");
    is_set("TPU_PROCESS_ADDRESSES", "localhost:8476,localhost:8477,localhost:8478,localhost:8479");
    is_set("TPU_PROCESS_PORT", "8478");
    is_set("CLOUD_TPU_TASK_ID", "2");

    // A second world, in this process or in a process that it starts, replaces the variables that
    // idist has set. IDIST_TPU_VARIABLES is a bit mask of these variables: here all six, or 63.
    fill(&w, nodes, 1, 8, 3);
    tap_ok(idist__tpu_set_variables(&w, 3, why, sizeof why), "then one host with eight chips");
    is_set("TPU_VISIBLE_CHIPS", "3");
    is_set("TPU_PROCESS_BOUNDS", "2,4,1");
    is_set("TPU_PROCESS_PORT", "8479");
    is_set("IDIST_TPU_VARIABLES", "63");

    unset_all();
    setenv("TPU_VISIBLE_CHIPS", "7", 1);
    setenv("TPU_PROCESS_BOUNDS", "1,3,1", 1);
    fill(&w, nodes, 1, 3, 0);
    tap_ok(idist__tpu_set_variables(&w, 0, why, sizeof why), "what the user has set");
    is_set("TPU_VISIBLE_CHIPS", "7");
    is_set("TPU_PROCESS_BOUNDS", "1,3,1");

    unset_all();
    tap_ok(!idist__tpu_set_variables(&w, 0, why, sizeof why), "three chips have no known grid");
    tap_like(why, "set TPU_PROCESS_BOUNDS", "the error names the variable");
    is_set("TPU_VISIBLE_CHIPS", "");

    fill(&w, nodes, 2, 4, 5);
    tap_ok(!idist__tpu_set_variables(&w, 1, why, sizeof why), "two hosts have no known grid");
    setenv("TPU_HOST_BOUNDS", "1,2,1", 1);
    tap_ok(idist__tpu_set_variables(&w, 1, why, sizeof why), "unless the user says how they lie");
    is_set("TPU_PROCESS_BOUNDS", "2,4,1");
    tap_like(getenv("TPU_PROCESS_ADDRESSES"), "host0:8476,host0:8477", "addresses have host names");
    is_set("TPU_PROCESS_PORT", "8477");

    unset_all();
    setenv("TPU_HOST_BOUNDS", "1,x,1", 1);
    tap_ok(!idist__tpu_set_variables(&w, 1, why, sizeof why), "a grid that is none");
    if (!idist__tpu_has_chip()) {
        const idist__pjrt_api *api = idist__pjrt_load(why, sizeof why);
        tap_ok(!api, "without a chip nothing is loaded");
        tap_like(why, "has no TPU", "and the reason is given");
    }
    return tap_done();
}
