// xla/tpu.h: the variables that libtpu reads when it is loaded
//
// libtpu forms a slice from TPU_* variables. If a variable is missing, libtpu asks the metadata
// server of Google's cloud, 30 times per value. On a machine without that server this takes
// minutes. idist knows the ranks and their hosts. If there is one process per chip, idist sets the
// variables that the user has not set. Nothing is set if several ranks are threads of one process,
// because that process owns all chips of the host. The values follow torch_xla
// (torch_xla/_internal/tpu.py).
#pragma once

#include "os/process.h"
#include "base/text.h"
#include "base/mem.h"
#include "core/model.h"

enum {
    IDIST__TPU_VENDOR = 0x1ae0,
    IDIST__TPU_PORT = 8476,
    IDIST__TPU_BOUNDS = 2, // index of TPU_PROCESS_BOUNDS in idist__tpu_names
    IDIST__TPU_VARIABLES = 6
};

static const char *const idist__tpu_names[IDIST__TPU_VARIABLES] = {"TPU_VISIBLE_CHIPS",
                                                                   "TPU_CHIPS_PER_PROCESS_BOUNDS",
                                                                   "TPU_PROCESS_BOUNDS",
                                                                   "TPU_PROCESS_ADDRESSES",
                                                                   "TPU_PROCESS_PORT",
                                                                   "CLOUD_TPU_TASK_ID"};

// Returns the variables that idist set for an earlier world, perhaps in the process from which this
// process was started, as bits. Such variables do not count as the user's.
static int64_t idist__tpu_own_variables(void) {
    const char *text = idist__os_env("IDIST_TPU_VARIABLES");
    int64_t own = 0;

    return text && idist__parse_int(text, 0, (1 << IDIST__TPU_VARIABLES) - 1, &own) ? own : 0;
}

// Returns true if the user has set a variable.
static bool idist__tpu_is_users(int variable) {
    return idist__os_env(idist__tpu_names[variable]) &&
           !(idist__tpu_own_variables() >> variable & 1);
}

// Sets the variables that the user has not set, and records them in IDIST_TPU_VARIABLES. Ignores
// values that are empty. Returns false if memory cannot be allocated.
static bool idist__tpu_export(const char *const values[IDIST__TPU_VARIABLES]) {
    int64_t own = idist__tpu_own_variables();
    char number[24];
    int i;

    for (i = 0; i < IDIST__TPU_VARIABLES; i++) {
        if (!values[i][0] || idist__tpu_is_users(i)) continue;
        if (!idist__os_env_set(idist__tpu_names[i], values[i])) return false;
        own |= (int64_t)1 << i;
    }

    snprintf(number, sizeof number, "%d", (int)own);

    return idist__os_env_set("IDIST_TPU_VARIABLES", number);
}

// Returns true if this machine has a TPU chip. Without a chip, libtpu must not be loaded.
static bool idist__tpu_has_chip(void) { return idist__os_pci_has_vendor(IDIST__TPU_VENDOR); }

// Returns the grid of the processes of one host, or NULL if idist does not know the grid.
static const char *idist__tpu_bounds(int processes) {
    switch (processes) {
    case 1: return "1,1,1";
    case 4: return "2,2,1";
    case 8: return "2,4,1";
    default: return NULL;
    }
}

// Multiplies two grids "x,y,z" into `bounds`. Returns false if one of them is no grid.
static bool idist__tpu_multiply(const char *a, const char *b, char *bounds, size_t capacity) {
    int x[3], y[3], end_a = 0, end_b = 0, i;

    if (sscanf(a, "%d,%d,%d%n", &x[0], &x[1], &x[2], &end_a) != 3 || a[end_a]) return false;
    if (sscanf(b, "%d,%d,%d%n", &y[0], &y[1], &y[2], &end_b) != 3 || b[end_b]) return false;

    for (i = 0; i < 3; i++)
        if (x[i] < 1 || x[i] > 4096 || y[i] < 1 || y[i] > 4096) return false;
    snprintf(bounds, capacity, "%d,%d,%d", x[0] * y[0], x[1] * y[1], x[2] * y[2]);

    return true;
}

// Writes the grid of all processes. Returns false, with the reason, if idist cannot know the grid.
static bool idist__tpu_process_bounds(const idist__world *w, char *bounds, size_t capacity,
                                      char *why, size_t why_capacity) {
    const char *hosts = idist__os_env("TPU_HOST_BOUNDS");
    const char *chips = idist__os_env("TPU_CHIPS_PER_HOST_BOUNDS");
    const char *own = idist__tpu_bounds(w->nodes[w->group.rank].local_size);

    if (idist__tpu_is_users(IDIST__TPU_BOUNDS)) return true; // idist keeps the user's value
    if (!chips) chips = own;
    if (!hosts && w->nnodes == 1) hosts = "1,1,1";
    if (hosts && chips && idist__tpu_multiply(hosts, chips, bounds, capacity)) return true;
    snprintf(why, why_capacity,
             "set TPU_PROCESS_BOUNDS: the grid of %d processes on %d hosts is not known "
             "(TPU_HOST_BOUNDS x TPU_CHIPS_PER_HOST_BOUNDS would tell)",
             w->group.size, w->nnodes);

    return false;
}

// Writes "host:port" of every rank, separated by commas.
static void idist__tpu_addresses(const idist__world *w, char *text, size_t capacity) {
    int i;

    text[0] = 0;
    for (i = 0; i < w->group.size; i++)
        idist__text_append(text, capacity, "%s%s:%d", i ? "," : "",
                           w->nnodes == 1 ? "localhost" : w->nodes[i].hostname,
                           IDIST__TPU_PORT + w->nodes[i].local_rank);
}

// Sets the variables that libtpu needs if there is one process per chip, except those that the user
// has set. `chip` is the number of the chip on this host. Returns false, with the reason, if idist
// does not know a value.
static bool idist__tpu_set_variables(const idist__world *w, int chip, char *why, size_t capacity) {
    size_t nbytes = 100 * (size_t)w->group.size;
    char *addresses, bounds[40] = "", number[16], port[16], task[16];
    const char *values[IDIST__TPU_VARIABLES];
    bool ok;

    if (!idist__tpu_process_bounds(w, bounds, sizeof bounds, why, capacity)) return false;
    addresses = (char *)idist__mem_alloc(&w->cfg.mem, nbytes);
    snprintf(why, capacity, "out of memory");
    if (!addresses) return false;

    idist__tpu_addresses(w, addresses, nbytes);
    snprintf(number, sizeof number, "%d", chip);
    snprintf(port, sizeof port, "%d", IDIST__TPU_PORT + w->nodes[w->group.rank].local_rank);
    snprintf(task, sizeof task, "%d", w->group.rank);
    values[0] = number;
    values[1] = "1,1,1";
    values[IDIST__TPU_BOUNDS] = bounds;
    values[3] = addresses;
    values[4] = port;
    values[5] = task;
    ok = idist__tpu_export(values);
    idist__mem_free(&w->cfg.mem, addresses);

    return ok;
}
