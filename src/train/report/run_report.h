// train/report/run_report.h: how fast a training run was, and which rank slowed it down
//
// In data-parallel training all ranks wait for the slowest one. So ranks have about the same number
// of examples per second, and the slowest rank is the rank that waits least.
#pragma once

#include "os/clock.h"
#include "base/fail.h"
#include "base/text.h"
#include "trace/trace_call.h"
#include "trace/trace_count.h"
#include "train/agree.h"

enum { IDIST__RUN_REPORT_RANKS = 16 }; // largest number of ranks in the log

// What the ranks exchange.
typedef struct idist__run_report {
    idist_run_rank numbers;
    int64_t world_rank;
    char host[64];
} idist__run_report;

idist_status idist_run_begin(idist_run *run) {
    if (!run) return idist__fail(IDIST_ERR_ARG, "run_begin: run is NULL");
    if (!idist__trace_call_install())
        return idist__fail(IDIST_ERR_SYSTEM, "run_begin: the system registers no function that "
                                             "runs after a fork");
    idist__trace_count_from_zero(run);
    run->started_ns = idist__os_clock_now_ns();

    return IDIST_OK;
}

// Returns the time that a rank did not spend in communication calls.
static double idist__run_report_computed(const idist__run_report *rank) {
    return rank->numbers.seconds - rank->numbers.waited;
}

// Returns the rank that computed longest among those that are not listed yet.
static int idist__run_report_next(const idist__run_report *ranks, const bool *listed, int n) {
    int r, longest = -1;

    for (r = 0; r < n; r++) {
        if (listed[r]) continue;
        if (longest < 0 ||
            idist__run_report_computed(&ranks[r]) > idist__run_report_computed(&ranks[longest]))
            longest = r;
    }

    return longest;
}

// Sets listed[r] for the ranks in the log: all ranks, or those that computed longest. Returns the
// rank that computed longest.
static int idist__run_report_list(const idist__run_report *ranks, bool *listed, int n) {
    int k, rank, slowest = 0, limit = n < IDIST__RUN_REPORT_RANKS ? n : IDIST__RUN_REPORT_RANKS;

    for (k = 0; k < limit; k++) {
        rank = idist__run_report_next(ranks, listed, n);
        listed[rank] = true;
        if (k == 0) slowest = rank;
    }

    return slowest;
}

// Appends "2010 examples/s, " to a text if there are examples.
static void idist__run_report_add_speed(char *text, size_t capacity, double examples,
                                        double seconds) {
    char number[IDIST__NUMBER_NBYTES];

    if (examples == 0 || !(seconds > 0)) return;
    idist__text_append(text, capacity, "%s examples/s, ",
                       idist__number_print_fixed(number, examples / seconds, 1));
}

static void idist__run_report_log_rank(const char *name, const idist__run_report *rank) {
    const idist_run_rank *numbers = &rank->numbers;
    double share = numbers->seconds > 0 ? 100 * numbers->waited / numbers->seconds : 0;
    char speed[64] = "", waited[IDIST__NUMBER_NBYTES], sent[IDIST__NUMBER_NBYTES];

    idist__run_report_add_speed(speed, sizeof speed, (double)numbers->examples, numbers->seconds);
    idist_train_log(name, "    rank %d (%s): %swaited %s %% of the time, sent %s MB in %llu calls",
                    (int)rank->world_rank, rank->host, speed,
                    idist__number_print_fixed(waited, share, 1),
                    idist__number_print_fixed(sent, (double)numbers->sent_nbytes / 1e6, 1),
                    (unsigned long long)numbers->calls);
}

// Logs the summary of n ranks. `listed` has n elements, all false.
static void idist__run_report_log(const char *name, const idist__run_report *ranks, bool *listed,
                                  int n) {
    int r, slowest = idist__run_report_list(ranks, listed, n);
    double examples = 0, seconds = 0, others = 0;
    char speed[64] = "", a[IDIST__NUMBER_NBYTES], b[IDIST__NUMBER_NBYTES];

    for (r = 0; r < n; r++) {
        examples += (double)ranks[r].numbers.examples;
        if (ranks[r].numbers.seconds > seconds) seconds = ranks[r].numbers.seconds;
        if (r != slowest) others += idist__run_report_computed(&ranks[r]);
    }

    idist__run_report_add_speed(speed, sizeof speed, examples, seconds);
    if (speed[0]) speed[strlen(speed) - 2] = 0; // the comma
    idist_train_log(name, "Run of %s s on %d rank%s%s%s", idist__number_print_fixed(a, seconds, 1),
                    n, n == 1 ? "" : "s", speed[0] ? ": " : "", speed);

    for (r = 0; r < n; r++)
        if (listed[r]) idist__run_report_log_rank(name, &ranks[r]);
    if (n > IDIST__RUN_REPORT_RANKS)
        idist_train_log(name, "    and %d ranks that computed for a shorter time",
                        n - IDIST__RUN_REPORT_RANKS);
    if (n > 1)
        idist_train_log(
            name,
            "    slowest: rank %d, which computed for %s s; the other ranks for %s s on average",
            (int)ranks[slowest].world_rank,
            idist__number_print_fixed(a, idist__run_report_computed(&ranks[slowest]), 1),
            idist__number_print_fixed(b, others / (n - 1), 1));
}

// Fills the numbers of this rank, and ends the count of this thread.
static void idist__run_report_own(const idist_run *run, idist__run_report *own) {
    own->numbers.seconds = (double)(idist__os_clock_now_ns() - run->started_ns) / 1e9;
    own->numbers.waited = (double)idist__trace_counter.waited_ns / 1e9;
    own->numbers.examples = run->examples;
    own->numbers.calls = idist__trace_counter.calls;
    own->numbers.sent_nbytes = idist__trace_counter.sent_nbytes;
    idist__text_copy(own->host, sizeof own->host, idist_hostname());
    idist__trace_count_from_zero(NULL);
}

idist_status idist_run_report(const idist_run *run, const char *name, idist_run_rank *ranks,
                              const idist_opts *opts) {
    idist__run_report own, *all;
    bool *listed;
    int n, r;
    idist_opts own_opts;
    idist_status status = IDIST_OK, entered;

    memset(&own, 0, sizeof own);
    if (!run) status = idist__fail(IDIST_ERR_ARG, "run_report: run is NULL");
    else if (idist__trace_counter.owner != run)
        status = idist__fail(IDIST_ERR_STATE,
                             "run_report: this thread has not called run_begin for this run");
    else idist__run_report_own(run, &own); // before the calls below, which must not count

    entered = idist__agree_enter("run_report", opts, &own_opts);
    if (entered != IDIST_OK) return entered;
    n = idist_group_size(own_opts.group);
    own.world_rank = own_opts.group ? own_opts.group->w->group.rank : idist_get_rank();
    all = (idist__run_report *)calloc((size_t)n, sizeof *all + sizeof *listed);
    listed = (bool *)(void *)(all ? all + n : NULL);
    if (!all && status == IDIST_OK)
        status = idist__fail(IDIST_ERR_NO_MEMORY, "run_report: no memory for %d ranks", n);
    status = idist__agree(status, &own_opts);
    if (status == IDIST_OK) status = idist_all_gather(&own, all, sizeof own, IDIST_U8, &own_opts);

    if (status == IDIST_OK) {
        for (r = 0; r < n && ranks; r++) ranks[r] = all[r].numbers;
        if (!own.world_rank) idist__run_report_log(name, all, listed, n);
    }

    free(all);

    return status;
}
