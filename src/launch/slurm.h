// launch/slurm.h: what Slurm tells us: host lists, tasks per node, whether srun started us
#pragma once

#include "os/process.h"
#include "base/fail.h"
#include "base/text.h"
#include "launch/env.h"

// A function that is called for each host of a list. Returns false to end the walk.
typedef bool (*idist__slurm_host_fn)(void *arg, const char *host);

// One item between the brackets of a host list.
typedef struct idist__slurm_range {
    long first, last;
    int width; // digits of the first number: "03-11" is 03, 04, ..., 11
} idist__slurm_range;

enum { IDIST__SLURM_HOST_NBYTES = 256, IDIST__SLURM_RANGE_MAX = 65535 };

// Parses "7" or "03-11" up to a comma or the closing bracket. Returns a pointer to this comma or
// bracket, or NULL if the text is invalid.
static const char *idist__slurm_parse_range(const char *text, const char *close,
                                            idist__slurm_range *range) {
    size_t digits = strspn(text, "0123456789");
    char *end;

    if (digits < 1 || digits > 9) return NULL;
    range->width = (int)digits;
    range->first = range->last = strtol(text, &end, 10);

    if (*end == '-') {
        end++;
        digits = strspn(end, "0123456789");
        range->last = strtol(end, NULL, 10);
        end += digits;
        if (digits < 1 || digits > 9 || range->last < range->first ||
            range->last - range->first > IDIST__SLURM_RANGE_MAX)
            return NULL;
    }

    return end <= close && (*end == ',' || end == close) ? end : NULL;
}

// Expands one element of a host list, from `at` to `end`. The first `used` bytes of `host` hold the
// text before `at`. Recurses for the text after a bracket.
static bool idist__slurm_expand(const char *at, const char *end, char *host, size_t used,
                                idist__slurm_host_fn fn, void *arg) {
    const char *close;

    while (at < end && *at != '[' && *at != ']' && used < IDIST__SLURM_HOST_NBYTES - 1)
        host[used++] = *at++;
    host[used] = 0;
    if (at == end) return used && fn(arg, host);
    close = *at == '[' ? (const char *)memchr(at, ']', (size_t)(end - at)) : NULL;
    if (!close || used >= IDIST__SLURM_HOST_NBYTES - 16) return false;

    while (at < close) { // at the bracket, or at a comma
        idist__slurm_range range;
        long number;

        at = idist__slurm_parse_range(at + 1, close, &range);
        if (!at) return false;

        for (number = range.first; number <= range.last; number++) {
            int more = snprintf(host + used, 12, "%0*ld", range.width, number);

            if (!idist__slurm_expand(close + 1, end, host, used + (size_t)more, fn, arg))
                return false;
        }
    }

    return true;
}

// Calls fn for each host of Slurm's compressed host list, in order: "a,b[1-3,07],rack[0-1]n[1-2]".
// Returns false if the text is not such a list, or if fn has ended the walk.
static bool idist__slurm_each_host(const char *list, idist__slurm_host_fn fn, void *arg) {
    char host[IDIST__SLURM_HOST_NBYTES];
    const char *at = list;

    do {
        const char *end;
        int depth = 0;

        at += strspn(at, " ");
        for (end = at; *end && (*end != ',' || depth); end++)
            depth += (*end == '[') - (*end == ']');
        if (!idist__slurm_expand(at, end, host, 0, fn, arg)) return false;
        at = end;
    } while (*at++ == ',');

    return true;
}

// Keeps the first host. Continues the walk, so that the whole list is checked.
static bool idist__slurm_first_host(void *arg, const char *host) {
    char *first = (char *)arg;
    if (!first[0]) idist__text_copy(first, IDIST__SLURM_HOST_NBYTES, host);
    return true;
}

// Returns the number of tasks of a node, or -1 if the text does not contain it. "2(x3),1" means 2,
// 2, 2, 1.
static int idist__slurm_tasks(const char *text, int node) {
    while (text && *text >= '0' && *text <= '9') {
        char *rest;
        long tasks = strtol(text, &rest, 10), times = 1;

        if (strncmp(rest, "(x", 2) == 0) {
            times = strtol(rest + 2, &rest, 10);
            if (times < 1 || *rest++ != ')') return -1;
        }

        if (node < times) return tasks > 0 && tasks <= IDIST__ENV_RANKS_MAX ? (int)tasks : -1;
        node -= (int)times;
        if (*rest != ',') return -1;
        text = rest + 1;
    }

    return -1;
}

static const char *idist__slurm_step_var(void) {
    return idist__env_either("SLURM_STEP_ID", "SLURM_STEPID");
}

static const char *idist__slurm_nodes_var(void) {
    return idist__env_either("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES");
}

static const char *idist__slurm_size_var(void) {
    return idist__env_either("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS");
}

// Returns true if srun started this process. The body of a batch script and an salloc shell also
// have Slurm's variables, but their step number is above the limit.
static bool idist__slurm_in_step(void) {
    int64_t step;
    return idist__parse_int(idist__os_env(idist__slurm_step_var()), 0, 0xffffffefll, &step) &&
           idist__os_env("SLURM_PROCID");
}

// Sets config->local_size to the number of ranks on our node. Slurm gives one number per node.
static void idist__slurm_local_size(idist__config *config) {
    const char *tasks =
        idist__os_env(idist__env_either("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"));
    int node = 0, nodes = 0;

    idist__env_index("SLURM_NODEID", &node);
    config->local_size = idist__slurm_tasks(tasks, node);
    idist__env_count(idist__slurm_nodes_var(), &nodes);
    if (nodes == 1) config->local_size = config->world_size;
}

// Decides whether to use RANK and WORLD_SIZE inside a Slurm step, and sets *used. The variables may
// come from an inner launcher such as torchrun, repeat Slurm's own numbers, or be left over from
// elsewhere. If the variables repeat Slurm's numbers without the rest of torch's variables, Slurm
// is the launcher, because Slurm also provides the local rank and the meeting place.
static idist_status idist__slurm_check_env(bool *used) {
    int rank = 0, size = 1, slurm_rank = 0, slurm_size = 1, nodes = 1;
    const char *size_var = idist__slurm_size_var();
    bool same, inner;

    *used = true;
    if (idist__os_env("TORCHELASTIC_RUN_ID") || idist__os_env("LOCAL_WORLD_SIZE") ||
        !idist__slurm_in_step())
        return IDIST_OK;
    if (idist__env_index("RANK", &rank) != IDIST_OK ||
        idist__env_count("WORLD_SIZE", &size) != IDIST_OK)
        return IDIST_OK; // idist__detect_numbers reports the error
    idist__env_index("SLURM_PROCID", &slurm_rank);
    idist__env_count(size_var, &slurm_size);
    idist__env_count(idist__slurm_nodes_var(), &nodes);

    // On one node, an inner launcher may have started more ranks than Slurm has tasks.
    same = rank == slurm_rank && size == slurm_size;
    inner = nodes == 1 && rank >= slurm_rank && size >= slurm_size;

    if (!same && !inner)
        return idist__fail(IDIST_ERR_ENV,
                           "RANK=%d and WORLD_SIZE=%d are inconsistent with SLURM_PROCID=%d and "
                           "%s=%d: unset those that are left over, or set IDIST_LAUNCHER=env or "
                           "=slurm",
                           rank, size, slurm_rank, size_var, slurm_size);
    if (same)
        *used = idist__os_env("LOCAL_RANK") && idist__os_env("MASTER_ADDR") &&
                idist__os_env("MASTER_PORT");

    return IDIST_OK;
}
