// loader.c - checks idist_loader and idist_auto_loader.
//
// Batches come in the sampler's order with any number of workers. Further cases are failing
// fetches, epochs that begin in the middle, states for checkpoints, fork, and bounded memory.
#define IDIST_IMPLEMENTATION
#include "idist.h"

#include "idist_train.h"

#include "ranks.h"

enum { BATCH = 5, ROOM = 8 };

// The data source of a test. Controls the workers' fetches and counts what they do, including calls
// that workers must not make.
typedef struct source {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int n_running, most_running, n_fetched, n_calls_back;
    // The batch that contains this sample fails.
    size_t fail_at;
    // Fetches wait until this is false.
    bool held;
    // If true, the fetch of the first batch must end after the fetch of the second batch.
    bool first_late;
    int n_ended;
} source;

static source *source_new(void) {
    source *s = (source *)calloc(1, sizeof *s);
    TAP_REQUIRE(s);
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    s->fail_at = SIZE_MAX;
    return s;
}

static int fetch(void *batch, const size_t *indices, size_t n, void *arg) {
    source *s = (source *)arg;
    uint64_t *out = (uint64_t *)batch;
    int result = 0;
    pthread_mutex_lock(&s->lock);
    int number = s->n_fetched++;
    if (++s->n_running > s->most_running) s->most_running = s->n_running;
    pthread_cond_broadcast(&s->changed);
    while (s->held) pthread_cond_wait(&s->changed, &s->lock);
    while (s->first_late && number == 0 && !s->n_ended) pthread_cond_wait(&s->changed, &s->lock);
    pthread_mutex_unlock(&s->lock);
    for (size_t i = 0; i < n; i++) {
        out[i] = 1000 + indices[i];
        if (indices[i] == s->fail_at) result = 42;
    }
    bool refused = idist_barrier(NULL) == IDIST_ERR_STATE;
    pthread_mutex_lock(&s->lock);
    s->n_calls_back += !refused;
    s->n_running--;
    s->n_ended++;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    return result;
}

static void hold(source *s, bool on) {
    pthread_mutex_lock(&s->lock);
    s->held = on;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

// Waits until n fetches have begun.
static void await_fetched(source *s, int n) {
    pthread_mutex_lock(&s->lock);
    while (s->n_fetched < n) pthread_cond_wait(&s->changed, &s->lock);
    pthread_mutex_unlock(&s->lock);
}

static int n_fetched(source *s) {
    pthread_mutex_lock(&s->lock);
    int n = s->n_fetched;
    pthread_mutex_unlock(&s->lock);
    return n;
}

static idist_sampler *sampler_of(size_t length, int rank, int replicas) {
    idist_sampler_desc d;
    idist_sampler *s = NULL;
    memset(&d, 0, sizeof d);
    d.length = length;
    d.rank = rank;
    d.num_replicas = replicas;
    d.seed = 3;
    TAP_REQUIRE(idist_sampler_create(&d, &s) == IDIST_OK);
    return s;
}

static idist_loader_desc desc_of(idist_sampler *sampler, source *src, int workers) {
    idist_loader_desc d;
    memset(&d, 0, sizeof d);
    d.sampler = sampler;
    d.batch_size = BATCH;
    d.batch_nbytes = ROOM * sizeof(uint64_t);
    d.fetch = fetch;
    d.arg = src;
    d.num_workers = workers;
    return d;
}

// Reads the epoch to its end and compares it with an undisturbed sampler. Returns the number of
// samples, or -1 if a batch is wrong.
static int read_all(idist_loader *l, idist_sampler *want) {
    idist_batch b;
    size_t index;
    int n = 0;
    for (;;) {
        if (idist_loader_next(l, &b) != IDIST_OK) return -1;
        if (!b.n) break;
        for (size_t i = 0; i < b.n; i++, n++)
            if (!idist_sampler_next(want, &index) || b.indices[i] != index ||
                ((uint64_t *)b.data)[i] != 1000 + index)
                return -1;
    }
    return b.data || idist_sampler_next(want, &index) ? -1 : n;
}

static void in_order(int workers) {
    source *src = source_new();
    idist_sampler *s = sampler_of(103, 1, 2), *want = sampler_of(103, 1, 2);
    idist_loader_desc d = desc_of(s, src, workers);
    idist_loader *l = NULL;
    int n_right = 0;
    src->first_late = workers > 1;
    TAP_REQUIRE(idist_loader_create(&d, &l) == IDIST_OK);
    tap_is(idist_loader_count(l), 11, "%d workers: 52 samples are 11 batches", workers);
    for (uint64_t epoch = 0; epoch < 6; epoch++) {
        // The loader begins in epoch 0. Passes 1 and 4 set no epoch, so the previous epoch repeats.
        if (epoch && epoch % 3 != 1) {
            idist_loader_set_epoch(l, epoch);
            idist_sampler_set_epoch(want, epoch);
        }
        n_right += read_all(l, want) == 52;
    }
    tap_is(n_right, 6, "%d workers: the samples of six passes in order", workers);
    tap_ok(src->n_calls_back == 0, "%d workers: fetch cannot call idist", workers);
    tap_is(src->most_running <= (workers ? workers : 1), true, "%d workers: %d fetches at a time",
           workers, src->most_running);
    idist_loader_free(&l);
    tap_ok(!l, "%d workers: freeing leaves NULL", workers);
    d.drop_last = true;
    idist_sampler_set_epoch(s, 0);
    idist_sampler_set_epoch(want, 0);
    TAP_REQUIRE(idist_loader_create(&d, &l) == IDIST_OK);
    idist_batch b;
    int n = 0;
    while (idist_loader_next(l, &b) == IDIST_OK && b.n == BATCH) n++;
    tap_ok(n == 10 && b.n == 0 && idist_loader_count(l) == 10,
           "%d workers: drop_last leaves ten batches", workers);
    tap_ok(idist_sampler_get_state(s).position == 0, "%d workers: and the sampler begins anew",
           workers);
    idist_loader_free(&l);
    idist_sampler_free(&s);
    idist_sampler_free(&want);
    free(src);
}

// Uses two workers. Each worker may fetch three batches ahead.
static void bounded(void) {
    source *src = source_new();
    idist_sampler *s = sampler_of(100, 0, 1);
    idist_loader_desc d = desc_of(s, src, 2);
    idist_loader *l = NULL;
    idist_batch b;
    d.prefetch = 3;
    TAP_REQUIRE(idist_loader_create(&d, &l) == IDIST_OK);
    await_fetched(src, 6);
    TAP_REQUIRE(idist_loader_next(l, &b) == IDIST_OK);
    await_fetched(src, 7);
    // A worker that ignored the limit would have fetched one more batch by now, because it has
    // nothing else to do.
    tap_sleep_ms(20);
    tap_is(n_fetched(src), 7, "six batches are fetched ahead of the one that is out, and no more");
    uint64_t first = *(uint64_t *)b.data;
    const size_t *indices = b.indices;
    tap_ok(first == 1000 + indices[0], "which nobody has written to");
    hold(src, true);
    TAP_REQUIRE(idist_loader_next(l, &b) == IDIST_OK);
    await_fetched(src, 8);
    hold(src, false);
    idist_loader_free(&l);
    tap_is(src->n_running, 0, "freed in the middle: no fetch runs any more");
    idist_sampler_free(&s);
    free(src);
}

static void failures(int workers) {
    source *src = source_new();
    idist_sampler *s = sampler_of(23, 0, 1), *want = sampler_of(23, 0, 1);
    idist_loader_desc d = desc_of(s, src, workers);
    idist_loader *l = NULL;
    idist_batch b;
    size_t index;
    int n_wrong = 0;
    for (int i = 0; i < 12; i++) idist_sampler_next(want, &src->fail_at); // in batch 2
    idist_sampler_set_epoch(want, 0);
    TAP_REQUIRE(idist_loader_create(&d, &l) == IDIST_OK);
    for (size_t k = 0; k < 5; k++) {
        idist_status status = idist_loader_next(l, &b);
        n_wrong +=
            status != (k == 2 ? IDIST_ERR_CALLBACK : IDIST_OK) || (b.data == NULL) != (k == 2);
        if (k == 2)
            tap_like(idist_last_error(), "fetch failed with 42", "%d workers: a failure", workers);
        for (size_t i = 0; i < b.n; i++)
            n_wrong += !idist_sampler_next(want, &index) || index != b.indices[i];
        n_wrong += idist_sampler_get_state(s).position != (k < 4 ? (k + 1) * BATCH : 23);
    }
    tap_is(n_wrong, 0, "%d workers: is one of its batch, and the others come as ever", workers);
    tap_ok(idist_loader_next(l, &b) == IDIST_OK && b.n == 0, "%d workers: to the end", workers);
    idist_loader_free(&l);
    idist_sampler_free(&s);
    idist_sampler_free(&want);
    free(src);
}

// Takes a state after a batch. The state must lead to the next batch, however far ahead the workers
// are, in a new loader as well as in this one.
static void states(int workers) {
    source *src = source_new();
    idist_sampler *s = sampler_of(64, 1, 2), *t = sampler_of(64, 1, 2),
                  *want = sampler_of(64, 1, 2);
    idist_loader_desc d = desc_of(s, src, workers);
    idist_loader *l = NULL, *m = NULL;
    idist_batch b;
    TAP_REQUIRE(idist_sampler_set_epoch(s, 7) == IDIST_OK &&
                idist_loader_create(&d, &l) == IDIST_OK);
    for (int i = 0; i < 3; i++) TAP_REQUIRE(idist_loader_next(l, &b) == IDIST_OK);
    await_fetched(src, 3 + 2 * workers < 7 ? 3 + 2 * workers : 7);
    idist_sampler_state state = idist_sampler_get_state(s);
    tap_ok(state.epoch == 7 && state.position == 15, "%d workers: the state is that of who reads",
           workers);
    TAP_REQUIRE(idist_sampler_set_state(t, state) == IDIST_OK &&
                idist_sampler_set_state(want, state) == IDIST_OK);
    d.sampler = t;
    TAP_REQUIRE(idist_loader_create(&d, &m) == IDIST_OK);
    tap_is(read_all(m, want), 17, "%d workers: a new loader goes on from it", workers);
    idist_loader_free(&m);
    TAP_REQUIRE(idist_sampler_set_state(t, state) == IDIST_OK &&
                idist_loader_create(&d, &m) == IDIST_OK);
    TAP_REQUIRE(idist_loader_next(m, &b) == IDIST_OK);
    tap_is(idist_sampler_get_state(t).position, 20, "%d workers: whose state goes on as well",
           workers);
    TAP_REQUIRE(idist_loader_next(l, &b) == IDIST_OK &&
                idist_sampler_set_state(s, state) == IDIST_OK);
    TAP_REQUIRE(idist_sampler_set_state(want, state) == IDIST_OK);
    tap_is(read_all(l, want), 17, "%d workers: the same one goes back to it", workers);
    TAP_REQUIRE(idist_loader_next(l, &b) == IDIST_OK &&
                idist_sampler_set_epoch(want, 2) == IDIST_OK);
    tap_is(idist_loader_set_epoch(l, 2), IDIST_OK, "%d workers: another epoch in the middle of one",
           workers);
    tap_is(read_all(l, want), 32, "%d workers: is whole", workers);
    // The test moves the sampler itself, first by one sample, then to another epoch. Batches must
    // begin at the sampler's new position.
    size_t index;
    TAP_REQUIRE(idist_loader_next(l, &b) == IDIST_OK && idist_sampler_next(s, &index));
    for (int i = 0; i < BATCH + 1; i++) TAP_REQUIRE(idist_sampler_next(want, &index));
    tap_is(read_all(l, want), 26, "%d workers: from where the sampler is", workers);
    TAP_REQUIRE(idist_loader_set_epoch(l, 3) == IDIST_OK &&
                idist_sampler_set_epoch(s, 4) == IDIST_OK);
    TAP_REQUIRE(idist_sampler_set_epoch(want, 4) == IDIST_OK);
    tap_is(read_all(l, want), 32, "%d workers: in the epoch that it is in", workers);
    idist_loader_free(&l);
    idist_loader_free(&m);
    idist_sampler_free(&s);
    idist_sampler_free(&t);
    idist_sampler_free(&want);
    free(src);
}

// Takes a state after the last batch of an epoch, or after its end. A loop over the epochs that
// begins with the state's epoch must continue with the next epoch.
static void ends(int workers) {
    for (int how = 0; how < 4; how++) {
        source *src = source_new();
        idist_sampler *s = sampler_of(64, 1, 2), *t = sampler_of(64, 1, 2),
                      *want = sampler_of(64, 1, 2);
        idist_loader_desc d = desc_of(s, src, workers);
        idist_loader *l = NULL, *m = NULL;
        idist_batch b;
        bool at_end = how % 2;
        int n_samples[4] = {0};
        d.drop_last = how / 2; // 32 samples are 6 batches and 2 samples
        TAP_REQUIRE(idist_loader_create(&d, &l) == IDIST_OK &&
                    idist_loader_set_epoch(l, 1) == IDIST_OK);
        for (int i = 0; i < (d.drop_last ? 6 : 7) + at_end; i++)
            TAP_REQUIRE(idist_loader_next(l, &b) == IDIST_OK && (b.n > 0) == (i < 7 - how / 2));
        idist_sampler_state state = idist_sampler_get_state(s);
        d.sampler = t;
        TAP_REQUIRE(idist_sampler_set_state(t, state) == IDIST_OK &&
                    idist_loader_create(&d, &m) == IDIST_OK);
        for (uint64_t epoch = state.epoch; epoch < 4; epoch++) {
            TAP_REQUIRE(idist_loader_set_epoch(m, epoch) == IDIST_OK &&
                        idist_sampler_set_epoch(want, epoch) == IDIST_OK);
            for (;;) {
                size_t index = 0;
                TAP_REQUIRE(idist_loader_next(m, &b) == IDIST_OK);
                if (!b.n) break;
                n_samples[epoch] += (int)b.n;
                for (size_t i = 0; i < b.n; i++)
                    if (!idist_sampler_next(want, &index) || index != b.indices[i])
                        n_samples[epoch] = -1000;
            }
        }
        int whole = d.drop_last ? 30 : 32;
        tap_ok(!n_samples[1] && n_samples[2] == whole && n_samples[3] == whole,
               "%d workers: the end of an epoch, case %d: %d %d %d samples follow", workers, how,
               n_samples[1], n_samples[2], n_samples[3]);
        idist_loader_free(&l);
        idist_loader_free(&m);
        idist_sampler_free(&s);
        idist_sampler_free(&t);
        idist_sampler_free(&want);
        free(src);
    }
}

static void *release_source(void *arg) {
    tap_sleep_ms(20);
    hold((source *)arg, false);
    return NULL;
}

// Begins a new epoch while fetches of the old epoch still run. Their results must be dropped.
static void late_fetches(void) {
    source *src = source_new();
    idist_sampler *s = sampler_of(100, 0, 1), *want = sampler_of(100, 0, 1);
    idist_loader_desc d = desc_of(s, src, 2);
    idist_loader *l = NULL;
    pthread_t thread;
    hold(src, true);
    TAP_REQUIRE(idist_loader_create(&d, &l) == IDIST_OK);
    await_fetched(src, 2);
    TAP_REQUIRE(pthread_create(&thread, NULL, release_source, src) == 0);
    tap_is(idist_loader_set_epoch(l, 1), IDIST_OK,
           "an epoch begun while fetches of another one run");
    TAP_REQUIRE(idist_sampler_set_epoch(want, 1) == IDIST_OK);
    tap_is(read_all(l, want), 100, "has its own samples only");
    TAP_REQUIRE(pthread_join(thread, NULL) == 0);
    idist_loader_free(&l);
    idist_sampler_free(&s);
    idist_sampler_free(&want);
    free(src);
}

// Holds fetches so that they do not return. Only the call that waits for them times out; the loader
// stays usable.
static void stuck_fetches(void) {
    source *src = source_new();
    idist_sampler *s = sampler_of(100, 0, 1), *want = sampler_of(100, 0, 1);
    idist_loader_desc d = desc_of(s, src, 2);
    idist_loader *l = NULL;
    idist_batch b;
    int n_threads = count_threads();
    d.timeout_ms = 300 * test_slow_factor();
    hold(src, true);
    TAP_REQUIRE(idist_loader_create(&d, &l) == IDIST_OK);
    for (int turn = 0; turn < 2; turn++) {
        int64_t start = tap_now_ms();
        tap_is(idist_loader_next(l, &b), IDIST_ERR_TIMEOUT, "a batch that does not come, turn %d",
               turn);
        int64_t took = tap_now_ms() - start;
        tap_ok(took >= d.timeout_ms && took < 4 * d.timeout_ms && !b.data, "in time: %d ms",
               (int)took);
    }
    hold(src, false);
    tap_is(read_all(l, want), 100, "it comes later, and all others");
    hold(src, true);
    int begun = n_fetched(src);
    (void)idist_loader_next(l, &b); // begins the next pass
    await_fetched(src, begun + 2);
    tap_is(idist_loader_set_epoch(l, 3), IDIST_ERR_TIMEOUT,
           "an epoch that cannot begin, while fetches of another one run");
    hold(src, false);
    tap_is(idist_loader_set_epoch(l, 3), IDIST_OK, "but later");
    TAP_REQUIRE(idist_sampler_set_epoch(want, 3) == IDIST_OK);
    tap_is(read_all(l, want), 100, "with its own samples");
    hold(src, true);
    begun = n_fetched(src);
    (void)idist_loader_next(l, &b);
    await_fetched(src, begun + 2);
    int64_t start = tap_now_ms();
    idist_loader_free(&l);
    int64_t took = tap_now_ms() - start;
    tap_ok(!l && took >= d.timeout_ms && took < 4 * d.timeout_ms, "freed while fetches hang: %d ms",
           (int)took);
    hold(src, false);
    pthread_mutex_lock(&src->lock);
    while (src->n_running) pthread_cond_wait(&src->changed, &src->lock);
    pthread_mutex_unlock(&src->lock);
    // The workers now take their last steps and free all remaining memory. The leak check would
    // report any memory that they leave.
    for (int i = 0; i < 5000 && count_threads() > n_threads; i++) tap_sleep_ms(1);
    tap_ok(count_threads() <= n_threads, "the workers end later");
    idist_sampler_free(&s);
    idist_sampler_free(&want);
    free(src);
}

// Forks a process that has a loader. The child has no workers. Therefore the child must not wait
// for workers or for a lock that a worker may hold.
static void forked(void) {
    source *src = source_new();
    idist_sampler *s = sampler_of(100, 0, 1);
    idist_loader_desc d = desc_of(s, src, 2);
    idist_loader *l = NULL, *own = NULL;
    idist_batch b;
    int status;
    hold(src, true);
    TAP_REQUIRE(idist_loader_create(&d, &l) == IDIST_OK);
    await_fetched(src, 2);
    idist__os_mutex_lock(&l->lock); // a worker may hold the lock at any time
    pid_t pid = fork();
    TAP_REQUIRE(pid >= 0);
    if (pid == 0) {
        alarm(20); // ends the child if it waits for the lock
        int wrong = idist_loader_next(l, &b) != IDIST_ERR_STATE;
        wrong += idist_loader_set_epoch(l, 1) != IDIST_ERR_STATE;
        idist_loader_free(&l);
        d.arg = source_new();
#if defined(__SANITIZE_THREAD__)
        d.num_workers =
            // The thread sanitizer allows no threads in a process that a threaded process forked.
            0;
#endif
        wrong += idist_loader_create(&d, &own) != IDIST_OK ||
                 idist_loader_next(own, &b) != IDIST_OK || b.n != BATCH;
        idist_loader_free(&own);
        _exit(wrong + (l != NULL));
    }
    idist__os_mutex_unlock(&l->lock);
    tap_register_child(pid);
    TAP_REQUIRE(waitpid(pid, &status, 0) == pid);
    tap_forget_child(pid);
    tap_is(status, 0, "a forked process is told so, frees the loader, and makes one of its own");
    hold(src, false);
    tap_ok(idist_loader_next(l, &b) == IDIST_OK && b.n == BATCH, "its parent goes on");
    idist_loader_free(&l);
    idist_sampler_free(&s);
    free(src);
}

static int n_blocks;
static void *counted_alloc(size_t nbytes, void *user) {
    ++*(int *)user;
    return n_blocks >= 4 ? NULL : malloc(nbytes);
}
static void counted_free(void *ptr, void *user) {
    --*(int *)user;
    free(ptr);
}

static void wrong(void) {
    source *src = source_new();
    idist_sampler *s = sampler_of(10, 0, 1);
    idist_loader_desc d = desc_of(s, src, 1);
    idist_loader *l = NULL;
    idist_batch b;
    d.allocator.alloc_fn = counted_alloc;
    d.allocator.free_fn = counted_free;
    d.allocator.user = &n_blocks;
    d.prefetch = 1;
    tap_is(idist_loader_create(&d, &l), IDIST_OK, "an allocator of the caller's");
    tap_is(n_blocks, 2, "is asked for a block for each slot");
    tap_is(idist_loader_next(NULL, &b), IDIST_ERR_ARG, "no loader");
    tap_is(idist_loader_next(l, NULL), IDIST_ERR_ARG, "no batch");
    idist_loader_free(&l);
    tap_is(n_blocks, 0, "which it gets back");
    d.prefetch = 5;
    tap_is(idist_loader_create(&d, &l), IDIST_ERR_NO_MEMORY, "no memory for all of them");
    // Refused allocations count, too.
    tap_ok(n_blocks == 1 && !l, "those that were there are given back");
    for (int half = 0; half < 2; half++) {
        d = desc_of(s, src, 1);
        if (half) d.allocator.alloc_fn = counted_alloc;
        else d.allocator.free_fn = counted_free;
        d.allocator.user = &n_blocks;
        tap_is(idist_loader_create(&d, &l), IDIST_ERR_ARG, "half an allocator");
        tap_like(idist_last_error(), "alloc_fn and free_fn", "and what is missing");
        // Memory that the given half allocates cannot be freed by the missing half.
        if (l) exit(tap_done());
    }
    d = desc_of(s, src, -1);
    tap_is(idist_loader_create(&d, &l), IDIST_ERR_ARG, "-1 workers");
    d = desc_of(s, src, 0);
    d.batch_size = 0;
    tap_is(idist_loader_create(&d, &l), IDIST_ERR_ARG, "batches of nothing");
    d = desc_of(NULL, src, 0);
    tap_is(idist_loader_create(&d, &l), IDIST_ERR_ARG, "no sampler");
    tap_ok(idist_loader_count(NULL) == 0 && !idist_loader_sampler(NULL),
           "no loader has no batches");
    idist_sampler_free(&s);
    free(src);
}

static char logged[400], warned[400];
static void keep_line(idist_log_level level, const char *line, void *user) {
    (void)user;
    if (!strstr(line, "auto_loader")) return;
    if (level == IDIST_LOG_WARN) copy_text(warned, sizeof warned, line);
    else copy_text(logged, sizeof logged, line);
}

// Runs idist_auto_loader on four ranks. A batch size of 512 and 8 workers become 128 and 2.
static int automatic(int local_rank, void *arg) {
    idist_sampler_desc samples;
    idist_loader *l = NULL;
    idist_batch b;
    source *src = source_new();
    idist_loader_desc d = desc_of(NULL, src, 8);
    (void)local_rank;
    (void)arg;
    memset(&samples, 0, sizeof samples);
    samples.length = 1024;
    d.batch_size = 512;
    d.batch_nbytes = 512 * sizeof(uint64_t);
    if (idist_auto_loader(&d, &samples, &l) != IDIST_OK || idist_loader_count(l) != 2) return 1;
    if (idist_loader_next(l, &b) != IDIST_OK || b.n != 128) return 2;
    if (idist_sampler_get_state(idist_loader_sampler(l)).position != 128) return 3;
    if (!strstr(logged, "batch_size 128 of 512, num_workers 2 of 8")) return 4;
    if (count_threads() - 1 < 2) return 5;
    idist_loader_free(&l);

    samples.num_replicas = 4; // the value that it has by default
    samples.rank = local_rank;
    if (warned[0] || idist_auto_loader(&d, &samples, &l) != IDIST_OK || warned[0]) return 7;
    idist_loader_free(&l);
    samples.rank = (local_rank + 1) % 4;
    if (idist_auto_loader(&d, &samples, &l) != IDIST_OK ||
        !strstr(warned, "num_replicas=4, but this is rank"))
        return 8;
    idist_loader_free(&l);
    samples.num_replicas = 5;
    samples.rank = local_rank;
    warned[0] = 0;
    if (idist_auto_loader(&d, &samples, &l) != IDIST_OK ||
        !strstr(warned, "num_replicas=5, but this is rank"))
        return 9;
    idist_loader_free(&l);
    samples.num_replicas = samples.rank = 0;

    d.sampler = sampler_of(5, 0, 1);
    if (idist_auto_loader(&d, &samples, &l) != IDIST_ERR_ARG) return 6;
    idist_sampler_free(&d.sampler);
    free(src);
    return 0;
}

int main(void) {
    static const int workers[4] = {0, 1, 2, 5};
    tap_deadline(60);
    idist_desc d;
    memset(&d, 0, sizeof d);
    d.logger.log_fn = keep_line;
    setenv("IDIST_LOG", "info", 1);
    tap_is(idist_spawn(automatic, NULL, 4, &d), IDIST_OK, "idist_auto_loader in four ranks");
    // Opens a world on which fetches make calls. These calls must be refused.
    TAP_REQUIRE(idist_initialize(NULL) == IDIST_OK);
    for (int i = 0; i < 4; i++) {
        tap_running("%d workers", workers[i]);
        in_order(workers[i]);
        failures(workers[i]);
        states(workers[i]);
        ends(workers[i]);
    }
    tap_running("limits");
    bounded();
    late_fetches();
    stuck_fetches();
    forked();
    wrong();
    tap_is(idist_finalize(), IDIST_OK, "finalize");
    return tap_done();
}
