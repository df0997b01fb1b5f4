// doctor_test.h: the self test of idistrun --doctor
//
// Two ranks add up numbers, over shared memory and over TCP on the loopback interface. On a machine
// with more than two cores, the tests are repeated with one rank per core, but with at most
// DOCTOR_TEST_MOST_RANKS ranks. All tests share DOCTOR_TEST_MS; when this time has passed, no other
// test starts.
#pragma once

#include "../../idist.h"
#include "doctor_line.h"
#include "doctor_settings.h"

#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { DOCTOR_TEST_MS = 2000, DOCTOR_TEST_MOST_RANKS = 4, DOCTOR_TEST_COUNT = 1 << 20 };

enum doctor_test_kind {
    DOCTOR_TEST_SHM,
    DOCTOR_TEST_TCP,
    DOCTOR_TEST_SHM_MANY,
    DOCTOR_TEST_TCP_MANY,
    DOCTOR_TEST_KINDS
};

enum doctor_test_state { DOCTOR_TEST_NOT_RUN, DOCTOR_TEST_FAILED, DOCTOR_TEST_PASSED };

// A test, in memory that this process and the ranks of the test share.
struct doctor_test {
    int rank_count;
    const char *transport;
    enum doctor_test_state state;
    char failure[300];
    // written by rank 0
    double small_us, large_gb_per_s;
    char sharing[160];
    // written by all ranks, atomically
    int wrong_count;
};

static struct {
    struct doctor_test *items; // indexed by kind
} doctor_tests;

// Discards the log of the ranks.
static void doctor_test_no_log(idist_log_level level, const char *line, void *user) {
    (void)level;
    (void)line;
    (void)user;
}

// Fills in the numbers that a rank adds.
static void doctor_test_fill(float *x, int rank) {
    for (int i = 0; i < DOCTOR_TEST_COUNT; i++) x[i] = (float)(rank + i % 7);
}

// Returns the number of wrong sums over n ranks.
static int doctor_test_count_wrong(const float *x, int n) {
    int wrong_count = 0;

    for (int i = 0; i < DOCTOR_TEST_COUNT; i++) {
        float sum = (float)(n * (i % 7) + n * (n - 1) / 2);

        wrong_count += x[i] < sum || x[i] > sum;
    }

    return wrong_count;
}

// Returns the time of one all_reduce in seconds, or a negative number after a failure. Untimed
// calls before the timed calls warm up the path.
static double doctor_test_time(const float *x, float *y, int count, int times) {
    int64_t begun_ns = 0;

    for (int i = -times / 4 - 1; i < times; i++) {
        if (i == 0) begun_ns = idist__os_clock_now_ns();
        if (idist_all_reduce(x, y, (size_t)count, IDIST_F32, IDIST_SUM, NULL) != IDIST_OK)
            return -1;
    }

    return (double)(idist__os_clock_now_ns() - begun_ns) * 1e-9 / times;
}

// Runs in each rank of a test. Returns the exit code of the rank.
static int doctor_test_rank(int rank, void *arg) {
    struct doctor_test *test = (struct doctor_test *)arg;
    float *x = (float *)malloc(2 * sizeof *x * DOCTOR_TEST_COUNT), *y = x + DOCTOR_TEST_COUNT;
    const char *sharing = strstr(idist_show_config(), "on this host: ");
    double small_s, large_s;

    if (!x) return 1;
    doctor_test_fill(x, rank);
    small_s = doctor_test_time(x, y, 1, 100);
    large_s = small_s < 0 ? -1 : doctor_test_time(x, y, DOCTOR_TEST_COUNT, 3);
    if (large_s < 0) return 1;

    __atomic_add_fetch(&test->wrong_count, doctor_test_count_wrong(y, idist_get_world_size()),
                       __ATOMIC_RELAXED);
    free(x);
    if (rank != 0) return 0;

    test->small_us = small_s * 1e6;
    test->large_gb_per_s = DOCTOR_TEST_COUNT * sizeof *x / large_s * 1e-9;
    if (sharing) sscanf(sharing, "on this host: %159[^\n]", test->sharing);

    return 0;
}

// Describes the world of a test.
static void doctor_test_describe(const struct doctor_test *test, int left_ms, idist_report *report,
                                 idist_desc *desc) {
    memset(report, 0, sizeof *report);
    memset(desc, 0, sizeof *desc);
    desc->backend = "ring";
    desc->transport = test->transport;
    desc->timeout_ms = desc->init_timeout_ms = left_ms;
    desc->grace_ms = 50;
    desc->report = report;
    desc->logger.log_fn = doctor_test_no_log;
}

// Runs a test if there is time left.
static void doctor_test_run(struct doctor_test *test, int64_t deadline_ns) {
    int left_ms = idist__os_clock_ms_until(deadline_ns);
    idist_workers *workers = NULL;
    idist_report report;
    idist_desc desc;
    idist_status status;

    snprintf(test->failure, sizeof test->failure, "not run: the time was up");
    if (left_ms <= 0) return;

    doctor_test_describe(test, left_ms, &report, &desc);
    status = idist_spawn_start(doctor_test_rank, test, test->rank_count, &desc, &workers);
    if (status == IDIST_OK) status = idist_spawn_wait(workers, left_ms);

    doctor_line_copy_failure(test->failure, sizeof test->failure);
    if (report.text[0]) snprintf(test->failure, sizeof test->failure, "%.299s", report.text);

    if (status == IDIST_ERR_TIMEOUT) {
        snprintf(test->failure, sizeof test->failure, "not done in %d ms", left_ms);
        idist_spawn_kill(workers, SIGKILL);
        idist_spawn_wait(workers, -1);
    }

    if (status == IDIST_OK && test->wrong_count)
        snprintf(test->failure, sizeof test->failure, "%d sums are wrong", test->wrong_count);
    test->state =
        status == IDIST_OK && !test->wrong_count ? DOCTOR_TEST_PASSED : DOCTOR_TEST_FAILED;
}

// Allocates the memory that ranks and this process share.
static void doctor_test_allocate(void) {
    void *memory = mmap(NULL, sizeof *doctor_tests.items * DOCTOR_TEST_KINDS,
                        PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    if (memory == MAP_FAILED) {
        perror("idistrun --doctor: memory");
        exit(1);
    }
    doctor_tests.items = (struct doctor_test *)memory;
}

// Runs all tests. With at most two cores, skips the tests of many ranks, which would only repeat
// the tests of two ranks.
static void doctor_test_run_all(void) {
    int64_t deadline_ns = idist__os_clock_deadline(DOCTOR_TEST_MS);
    int many = idist__os_cpu_count();

    doctor_test_allocate();
    if (many > DOCTOR_TEST_MOST_RANKS) many = DOCTOR_TEST_MOST_RANKS;

    for (int kind = 0; kind < DOCTOR_TEST_KINDS; kind++) {
        struct doctor_test *test = &doctor_tests.items[kind];
        bool is_shm = kind == DOCTOR_TEST_SHM || kind == DOCTOR_TEST_SHM_MANY;
        bool has_many = kind == DOCTOR_TEST_SHM_MANY || kind == DOCTOR_TEST_TCP_MANY;

        test->rank_count = has_many ? many : 2;
        test->transport = is_shm ? "auto" : "tcp";
        if (!has_many || many > 2) doctor_test_run(test, deadline_ns);
    }
}

// Prints the result of a test. Ranks on one host do not need TCP unless the user asks for TCP.
// Wrong sums are always an error.
static void doctor_test_print(const struct doctor_test *test) {
    bool is_tcp = strcmp(test->transport, "tcp") == 0;
    bool wants_tcp = doctor_settings.config.transport == IDIST__TRANSPORT_TCP;
    bool is_needed = !is_tcp || wants_tcp || test->wrong_count;
    enum doctor_verdict verdict = DOCTOR_NOTE;
    char name[32];

    snprintf(name, sizeof name, "%d ranks, %s", test->rank_count, is_tcp ? "tcp" : "host");

    if (test->state == DOCTOR_TEST_PASSED) {
        doctor_line_print(name, DOCTOR_FINE, NULL,
                          "all_reduce right; 4 B in %.1f us, 4 MiB at %.2f GB/s", test->small_us,
                          test->large_gb_per_s);
        return;
    }

    if (is_needed && test->state == DOCTOR_TEST_FAILED) verdict = DOCTOR_WRONG;
    doctor_line_print(name, verdict, "see the lines above", "%s", test->failure);
}

// Prints the results of all tests for which this machine has enough cores.
static void doctor_test_print_all(void) {
    for (int kind = 0; kind < DOCTOR_TEST_KINDS; kind++) {
        const struct doctor_test *test = &doctor_tests.items[kind];

        if (kind < DOCTOR_TEST_SHM_MANY || test->rank_count > 2) doctor_test_print(test);
    }
}
