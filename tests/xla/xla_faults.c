// xla_faults.c - XLA programs that fail, that never end, or whose rank dies, run on the stand-in
// for PJRT (tests/fake/pjrt.c). Every rank gets the expected status before the deadline, and then
// exits.
#define IDIST_IMPLEMENTATION
#include "idist.h"
#include "idist_xla.h"

#include "ranks.h"
#include "xla_world.h"

// The settings of the stand-in for one case, and the expected result.
typedef struct fault {
    const char *name, *fault, *refuse, *minor, *grown;
    int on;                          // the process with the fault, or -1: all
    idist_status status, at_culprit; // of the call: on the other ranks, and on that process
    const char *text;
} fault;

static idist_xla_buffer *floats(idist_group *world, float value) {
    float data[64];
    idist_xla_buffer *b = NULL;
    for (int i = 0; i < 64; i++) data[i] = value;
    if (idist_xla_buffer_put(data, 64, IDIST_F32, world, &b) != IDIST_OK)
        rank_fail("put: %s", idist_last_error());
    return b;
}

static void set(const char *name, const char *value) {
    if (value) setenv(name, value, 1);
    else unsetenv(name);
}

// Makes two calls that succeed, and then a third call, in which the fault happens. The number of a
// PJRT process may differ from the rank, so the name of the device identifies the culprit.
static int run(int rank, int n, proc_slot *slot, const fault *f, idist_group *world) {
    idist_opts o = opts_of(world);
    idist_xla_buffer *a = floats(world, 1), *b = floats(world, 0);
    const char *device = world->w->about.device_name;
    bool culprit = f->on >= 0 && atoi(device + 4) / 10 == f->on;
    int64_t begin_ns = idist__os_clock_now_ns(), took_ms;
    idist_status s;
    float got[64];
    o.timeout_ms = f->status == IDIST_ERR_TIMEOUT ? 1000 : 20000;
    for (int i = 0; i < 2; i++) rank_ok(rank, idist_all_reduce(a, b, 64, IDIST_F32, IDIST_SUM, &o));
    s = idist_all_reduce(a, b, 64, IDIST_F32, IDIST_SUM, &o);
    took_ms = (idist__os_clock_now_ns() - begin_ns) / 1000000;
    rank_check(s == (culprit ? f->at_culprit : f->status), "rank %d: %s: got %s: %s", rank, f->name,
               idist_status_name(s), idist_last_error());
    if (s == IDIST_OK) {
        rank_ok(rank, idist_xla_buffer_get(b, got, sizeof got, -1));
        rank_check(got[63] == (float)n, "rank %d: %g", rank, (double)got[63]);
    } else {
        rank_check(strstr(idist_last_error(), f->text), "rank %d: the text: %s", rank,
                   idist_last_error());
        rank_check(took_ms < 3000 * test_slow_factor(), "it took %d ms", (int)took_ms);
    }
    idist_xla_buffer_free(&a);
    idist_xla_buffer_free(&b);
    proc_result(slot, s);
    return 0;
}

static int body(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    const fault *f = (const fault *)arg;
    int64_t begin_ns;
    run(rank, n, slot, f, world);
    begin_ns = idist__os_clock_now_ns();
    idist_close(&world);
    rank_check((idist__os_clock_now_ns() - begin_ns) / 1000000 < 5000 * test_slow_factor(),
               "closing takes long");
    fflush(stdout);
    _exit(0); // do not wait for the thread of a program that never ends
}

static void order(const fault *f) {
    char on[16];
    snprintf(on, sizeof on, "%d", f->on);
    set("FAKE_PJRT_FAULT", f->fault);
    set("FAKE_PJRT_AFTER", f->fault ? "2" : NULL);
    set("FAKE_PJRT_REFUSE", f->refuse);
    set("FAKE_PJRT_ON", f->on >= 0 ? on : NULL);
    set("FAKE_PJRT_MINOR", f->minor);
    set("FAKE_PJRT_GROWN", f->grown);
}

// Makes an in-place call, whose program takes the memory of its input. There are two cases. If the
// program fails after it has begun, the contents are lost. If the call times out, the program
// continues, and the buffer still gets the program's result.
static int in_place(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    const fault *f = (const fault *)arg;
    idist_opts o = opts_of(world);
    idist_xla_buffer *a = floats(world, 1);
    bool is_late = f->status == IDIST_ERR_TIMEOUT;
    int64_t deadline_ns = idist__os_clock_deadline(10000);
    float got[64] = {0};
    idist_status s;
    rank_ok(rank, idist_all_reduce(a, a, 64, IDIST_F32, IDIST_SUM, &o));
    rank_ok(rank, idist_all_reduce(a, a, 64, IDIST_F32, IDIST_MAX, &o));
    o.timeout_ms = is_late ? 500 : 20000;
    s = idist_all_reduce(a, a, 64, IDIST_F32, IDIST_SUM, &o);
    rank_check(s == f->status && strstr(idist_last_error(), f->text), "rank %d: got %s: %s", rank,
               idist_status_name(s), idist_last_error());
    // Another rank may fail first, while this rank's program is still running.
    do {
        memset(got, 0, sizeof got);
        s = idist_xla_buffer_get(a, got, sizeof got, 1000);
    } while ((is_late ? got[63] != (float)(n * n) : s == IDIST_OK) &&
             idist__os_clock_now_ns() < deadline_ns);

    if (is_late) rank_check(got[63] == (float)(n * n), "rank %d: %g", rank, (double)got[63]);
    else
        rank_check(s == IDIST_ERR_DEVICE && strstr(idist_last_error(), "donated"),
                   "rank %d: the lost contents: %s: %s", rank, idist_status_name(s),
                   idist_last_error());
    rank_ok(rank, idist_xla_buffer_free(&a));
    proc_result(slot, f->status);
    return 0;
}

// Cancels a call whose program waits for its turn, because the device of one process is busy with a
// slow program of another group. The other rank's device waits inside the program, so the cancelled
// program must still run.
static int cancelled_launch(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    bool is_busy = atoi(world->w->about.device_name + 4) / 10 == 1;
    idist_opts o = opts_of(world);
    idist_xla_buffer *a = floats(world, 1), *b = floats(world, 1);
    idist_group *own = NULL;
    idist_request request = {NULL};
    int64_t deadline_ns = idist__os_clock_deadline(10000);
    float got[64], sum = (float)(n * n * n);
    idist_status s;
    (void)arg;
    rank_ok(rank, idist_split(world, rank, 0, &own));
    for (int i = 0; i < 2; i++) // so that the program is compiled
        rank_ok(rank, idist_all_reduce(a, a, 64, IDIST_F32, IDIST_SUM, &o));
    if (is_busy) {
        idist_opts slow = opts_async(own, &request);
        rank_ok(rank, idist_all_reduce(b, b, 64, IDIST_F32, IDIST_SUM, &slow));
    }
    o.timeout_ms = is_busy ? 500 : 20000;
    s = idist_all_reduce(a, a, 64, IDIST_F32, IDIST_SUM, &o);
    rank_check(s == IDIST_ERR_TIMEOUT, "rank %d: got %s: %s", rank, idist_status_name(s),
               idist_last_error());
    rank_check(strstr(idist_last_error(), "itself, whose device has not finished"), "rank %d: %s",
               rank, idist_last_error());
    do {
        memset(got, 0, sizeof got);
        (void)idist_xla_buffer_get(a, got, sizeof got, 1000);
    } while (!is_busy && got[63] != sum && idist__os_clock_now_ns() < deadline_ns);
    if (!is_busy)
        rank_check(got[63] == sum, "rank %d: its program has not ended: %g", rank, (double)got[63]);
    idist_xla_buffer_free(&a);
    idist_xla_buffer_free(&b);
    if (is_busy) (void)idist_wait(&request); // the world has failed
    idist_close(&world);                     // waits for the program
    proc_result(slot, s);
    return 0;
}

static void processes(const fault *f, int n, proc_fn fn) {
    procs p;
    int hung, dead = 0;
    tap_running("%s, %d processes", f->name, n);
    ranks_reset();
    order(f);
    xla_world_begin(true);
    procs_start(&p, n, NULL, fn, (void *)(uintptr_t)f);
    hung = procs_wait(&p, RANKS_TIMEOUT_MS + 5000);
    rank_check(hung == 0, "%d ranks hang", hung);
    for (int k = 0; k < n; k++) {
        bool killed = WIFSIGNALED(p.wait_status[k]) && WTERMSIG(p.wait_status[k]) == SIGKILL;
        if (killed) dead++;
        else rank_check(p.wait_status[k] == 0, "rank %d: 0x%x", k, (unsigned)p.wait_status[k]);
    }
    rank_check(dead == (f->fault && strcmp(f->fault, "die") == 0), "%d died", dead);
    procs_free(&p);
    ranks_report("%s, %d processes", f->name, n);
}

// A step of a call that is slow or fails, in ranks that are threads.
typedef struct step {
    const char *variable, *value; // the setting of the stand-in
    bool staged;                  // the call has no program
    int ready_count, is_set;      // atomic: ranks with buffers; rank 0 has made the setting
    idist_status status;
    const char *text;
} step;

// Makes one call after the setting. The time-out is shorter than the step. The error names a rank.
static void late_step(idist_group *world, int rank, int n, void *arg) {
    step *s = (step *)arg;
    idist_opts o = opts_of(world);
    idist_xla_buffer *a = floats(world, 1), *b = floats(world, 0);
    idist_status got;
    // No call of idist here: a rank that is ahead fails the group.
    __atomic_add_fetch(&s->ready_count, 1, __ATOMIC_ACQ_REL);
    while (__atomic_load_n(&s->ready_count, __ATOMIC_ACQUIRE) < n) idist__os_clock_pause_ms(1);
    if (rank == 0) {
        setenv(s->variable, s->value, 1);
        __atomic_store_n(&s->is_set, 1, __ATOMIC_RELEASE);
    }
    while (!__atomic_load_n(&s->is_set, __ATOMIC_ACQUIRE)) idist__os_clock_pause_ms(1);
    o.timeout_ms = s->status == IDIST_ERR_TIMEOUT ? 300 : 20000;
    got = s->staged ? idist_scan(a, b, 64, IDIST_F32, IDIST_SUM, &o)
                    : idist_all_reduce(a, b, 64, IDIST_F32, IDIST_SUM, &o);
    rank_check(got == s->status && strstr(idist_last_error(), s->text), "rank %d: got %s: %s", rank,
               idist_status_name(got), idist_last_error());
    rank_check(strstr(idist_last_error(), "rank 0") || strstr(idist_last_error(), "rank 1"),
               "no rank is named: %s", idist_last_error());
    idist_xla_buffer_free(&a);
    idist_xla_buffer_free(&b);
}

// Waits for a buffer that is never ready.
static void never_ready(idist_group *world, int rank, int n, void *arg) {
    idist_xla_buffer *a = floats(world, 1);
    float got[64];
    (void)n;
    (void)arg;
    rank_check(idist_xla_buffer_get(a, got, sizeof got, 200) == IDIST_ERR_TIMEOUT &&
                   strstr(idist_last_error(), "has not finished after 200 ms"),
               "rank %d: %s", rank, idist_last_error());
    idist_xla_buffer_free(&a);
}

static void test_steps(void) {
    static const step steps[] = {
        {"FAKE_PJRT_SLOW", "compile", false, 0, 0, IDIST_ERR_TIMEOUT, "has not finished compiling"},
        {"FAKE_PJRT_SLOW", "get", true, 0, 0, IDIST_ERR_TIMEOUT, "has not finished a copy"},
        {"FAKE_PJRT_SLOW", "put", true, 0, 0, IDIST_ERR_TIMEOUT, "has not finished a copy"},
        {"FAKE_PJRT_BROKEN", "get", true, 0, 0, IDIST_ERR_DEVICE, "the bus is broken"},
        {"FAKE_PJRT_BROKEN", "put", true, 0, 0, IDIST_ERR_DEVICE, "the bus is broken"}};
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
        step s = steps[i];
        xla_world_begin(false);
        ranks_case_fault(2, NULL, late_step, &s, "%s=%s", s.variable, s.value);
        unsetenv(s.variable);
    }
    setenv("FAKE_PJRT_SLOW", "ready", 1);
    xla_world_begin(false);
    ranks_case(1, NULL, never_ready, NULL, "a buffer that is never ready");
    unsetenv("FAKE_PJRT_SLOW");
}

// Checks that a plug-in that is too old for idist gives IDIST_ERR_NO_DEVICE and a reason.
static void old(idist_group *world, int rank, int n, void *arg) {
    idist_xla_buffer *b = NULL;
    float x = 1;
    (void)n;
    (void)arg;
    rank_check(idist_xla_buffer_put(&x, 1, IDIST_F32, world, &b) == IDIST_ERR_NO_DEVICE, "put: %s",
               idist_last_error());
    rank_check(strstr(idist_last_error(), "PJRT 0.56"), "rank %d: %s", rank, idist_last_error());
}

int main(void) {
    static const fault faults[] = {
        {"no fault", NULL, NULL, NULL, NULL, -1, IDIST_OK, IDIST_OK, ""},
        {"a newer ABI", NULL, NULL, "140", "1", -1, IDIST_OK, IDIST_OK, ""},
        {"one rank cannot compile", NULL, "all_reduce", NULL, NULL, 1, IDIST_OK, IDIST_OK, ""},
        {"no rank can compile", NULL, "all_reduce", NULL, NULL, -1, IDIST_OK, IDIST_OK, ""},
        {"a program fails on one rank", "fail", NULL, NULL, NULL, 1, IDIST_ERR_DEVICE,
         IDIST_ERR_DEVICE, "the chip is on fire"},
        {"a program fails on all ranks", "fail", NULL, NULL, NULL, -1, IDIST_ERR_DEVICE,
         IDIST_ERR_DEVICE, "the chip is on fire"},
        {"a program never ends on one rank", "hang", NULL, NULL, NULL, 1, IDIST_ERR_TIMEOUT,
         IDIST_ERR_TIMEOUT, "itself, whose device has not finished"},
        {"a rank dies inside its program", "die", NULL, NULL, NULL, 1, IDIST_ERR_PEER_LOST,
         IDIST_ERR_PEER_LOST, "was lost"}};
    static const fault in_place_faults[] = {{"a program fails after it has begun", "late", NULL,
                                             NULL, NULL, -1, IDIST_ERR_DEVICE, IDIST_ERR_DEVICE,
                                             "the chip melts"},
                                            {"a program is slow", "slow", NULL, NULL, NULL, -1,
                                             IDIST_ERR_TIMEOUT, IDIST_ERR_TIMEOUT,
                                             "itself, whose device has not finished"}};
    static const fault busy = {"a cancelled call whose program waits for its turn",
                               "slow",
                               NULL,
                               NULL,
                               NULL,
                               1,
                               IDIST_ERR_TIMEOUT,
                               IDIST_ERR_TIMEOUT,
                               ""};
    fault too_old = {"an old plug-in", NULL, NULL, "56", NULL, -1, IDIST_OK, IDIST_OK, ""};
    for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++)
        for (int n = 2; n <= 4; n += 2) processes(&faults[i], n, body);
    for (int i = 0; i < 2; i++) processes(&in_place_faults[i], 2, in_place);
    processes(&busy, 2, cancelled_launch);
    order(&too_old);
    xla_world_begin(true);
    procs_case(2, NULL, old, NULL, "an old plug-in");
    order(&faults[0]);
    test_steps(); // from here on, this process has the plug-in loaded
    return tap_done();
}
