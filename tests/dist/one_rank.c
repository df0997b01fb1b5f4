// one_rank_first, one_rank_only: which ranks run the function, when they run it, and which ranks
// learn that it failed; on one host and on two.
#include "idist.h"

#include "grid.h"

// Counters of one call, shared by its ranks and updated atomically.
typedef struct tally {
    int n_runs[RANKS_MAX];
    int n_early; // runs that began before the first rank had run
    int fails_on;
} tally;

typedef struct job {
    tally *all;
    int rank, first;
} job;

static int task(void *arg) {
    job *j = (job *)arg;
    if (j->rank == j->first) tap_sleep_ms(30); // so that ranks that wrongly do not wait run first
    else if (!__atomic_load_n(&j->all->n_runs[j->first], __ATOMIC_ACQUIRE))
        __atomic_add_fetch(&j->all->n_early, 1, __ATOMIC_ACQ_REL);
    __atomic_add_fetch(&j->all->n_runs[j->rank], 1, __ATOMIC_ACQ_REL);
    return j->rank == j->all->fails_on ? 7 : 0;
}

static void on_one_host(idist_group *world, int rank, int n, void *arg) {
    // Four tallies, one per call. In the last two calls rank n - 1, the first to run, fails.
    tally *all = (tally *)arg;
    int first = n - 1;
    idist_opts o = opts_of(world);
    job j = {&all[0], rank, first};
    rank_ok(rank, idist_one_rank_first(task, &j, first, false, &o));
    rank_check(all[0].n_runs[rank] == 1 && all[0].n_early == 0,
               "first: rank %d ran %d times, %d too early", rank, all[0].n_runs[rank],
               all[0].n_early);
    j.all = &all[1];
    rank_ok(rank, idist_one_rank_only(task, &j, first, true, &o));
    rank_check(all[1].n_runs[rank] == (rank == first), "only: rank %d ran %d times", rank,
               all[1].n_runs[rank]);
    rank_check(all[1].n_runs[first] == 1, "only: rank %d goes on before rank %d was through", rank,
               first);
    j.all = &all[2];
    rank_is(rank, idist_one_rank_first(task, &j, first, false, &o), IDIST_ERR_CALLBACK);
    rank_check(text_names_rank(idist_last_error(), first), "rank %d: got \"%s\"", rank,
               idist_last_error());
    rank_check(all[2].n_runs[rank] == (rank == first), "rank %d runs although the first failed",
               rank);
    j.all = &all[3];
    rank_is(rank, idist_one_rank_only(task, &j, first, true, &o), IDIST_ERR_CALLBACK);
    rank_ok(rank, idist_barrier(&o));
}

typedef struct hosts {
    int port;
    tally calls[3];
} hosts;

// Calls one_rank_first on a group of ranks 0 and 2. The ranks outside the group must get
// IDIST_ERR_STATE and run nothing, and the world must stay usable.
static void for_members_only(int rank, tally *all) {
    const int members[2] = {0, 2};
    bool mine = rank % 2 == 0;
    idist_group *part = NULL;
    job j = {all, rank, 0};
    if (!rank_ok(rank, idist_new_group(members, 2, &part))) return;
    idist_opts o = opts_of(part);
    for (int local = 0; local < 2; local++)
        rank_is(rank, idist_one_rank_first(task, &j, 0, local == 1, &o),
                mine ? IDIST_OK : IDIST_ERR_STATE);
    rank_ok(rank, idist_barrier(NULL));
    rank_check(all->n_runs[rank] == (mine ? 2 : 0), "rank %d ran %d times", rank,
               all->n_runs[rank]);
    rank_ok(rank, idist_free_group(&part));
}

// Runs one rank of four. Ranks 0 and 2 are on host a, ranks 1 and 3 on host b. All calls on the
// world set `local`, so that local rank 0 of each host runs first.
static int on_two_hosts(int rank, void *arg) {
    hosts *h = (hosts *)arg;
    tally *all = h->calls;
    idist_desc d = desc_with("auto", "auto");
    d.master_addr = "127.0.0.1";
    d.master_port = h->port;
    d.rank = rank;
    d.world_size = 4;
    d.host_id = rank % 2 ? "b" : "a";
    d.timeout_ms = d.init_timeout_ms = RANKS_TIMEOUT_MS;
    if (!rank_ok(rank, idist_initialize(&d))) return 1;
    job j = {&all[0], rank, rank % 2};
    for (int i = 0; i < 2; i++) rank_ok(rank, idist_one_rank_first(task, &j, 0, true, NULL));
    rank_check(all[0].n_runs[rank] == 2 && all[0].n_early == 0, "rank %d ran %d times", rank,
               all[0].n_runs[rank]);
    for_members_only(rank, &all[2]);
    j.all = &all[1]; // rank 1 fails: rank 3 must learn of it, host a must not
    rank_is(rank, idist_one_rank_first(task, &j, 0, true, NULL),
            rank % 2 ? IDIST_ERR_CALLBACK : IDIST_OK);
    rank_ok(rank, idist_finalize());
    return 0;
}

int main(void) {
    static const int sizes[3] = {1, 2, 4};
    tap_deadline(60);
    (void)ranks__log();
    hosts *h = (hosts *)shared_alloc(sizeof *h);
    setenv("IDIST_ADDR", "127.0.0.1", 1); // otherwise the ranks find their own addresses
    h->port = free_port();
    h->calls[0].fails_on = -1;
    h->calls[1].fails_on = 1;
    h->calls[2].fails_on = -1;
    tap_running("two hosts");
    ranks_reset();
    procs_run(4, 20000, on_two_hosts, h);
    ranks_report("one rank of each host first");
    for (int i = 0; i < 3; i++) {
        tally calls[4];
        memset(calls, 0, sizeof calls);
        for (int k = 0; k < 4; k++) calls[k].fails_on = k < 2 ? -1 : sizes[i] - 1;
        ranks_case(sizes[i], NULL, on_one_host, calls, "one rank first, one rank only n=%d",
                   sizes[i]);
    }
    return tap_done();
}
