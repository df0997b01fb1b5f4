// rule.h - the rule by which idist and its peers are measured, compiled into each program
//
//     idist_perf -s LIST ...    peer_mpi ...    peer_gloo ...         all three end in rule_run()
//
// A program passes its library as a rule_library, a table of functions. This file does the rest in
// the same way for all programs: sizes, buffers, the check, pinning, warm-up, number of iterations,
// clock and output.
//
//     bytes      as in nccl-tests: the size of the larger buffer of a rank.
//     count      number of elements of a call in all_reduce, broadcast and sendrecv. In all_gather,
//                reduce_scatter and all_to_all count is per rank, and a call has count * ranks
//                elements. count is at least one. A size with the same count as the previous size
//                is skipped. F32, SUM, root 0.
//     buffers    on page boundaries, written before the first call. all_reduce works in place,
//                broadcast has one buffer, and the other operations have two. sendrecv sends to the
//                next rank and receives from the previous rank.
//     rate, bw, bibw
//                the loops of osu_mbw_mr, osu_bw and osu_bibw. Rank i of the lower half and rank i
//                + n/2 are a pair. A call is a window of 64 messages. The lower rank starts all
//                sends, and the upper rank starts all receives, before the first wait. When all
//                messages have arrived, the upper rank answers with one element. In bibw both ranks
//                send and receive a window at the same time, and no rank answers.
//                bytes is the size of a message. A time is the time of the call divided by the
//                number of messages of all ranks in the call. Therefore bytes / us is the bandwidth
//                in MB/s (of both directions in bibw), and 1 / us is the rate in millions per
//                second. OSU's loop has no barriers, so compare in mode b2b.
//                On both ranks each message of a window has its own buffer, on a cache line
//                boundary, if these buffers take at most 256 MiB (64 messages of 4 MiB). Larger
//                messages share buffers. OSU uses one buffer for all messages.
//     check      one call with values computed from rank and position; every element of every rank
//                is compared. Windows are checked three times, with values computed from rank,
//                message, window and position. The last window of each timed loop is checked as
//                well. Its buffers are overwritten before the loop.
//     pinning    rank r runs on the r-th allowed cpu if there are enough cpus. Otherwise no rank is
//                pinned. A binding by the launcher is undone first.
//     warm-up    calls until a tenth of RULE_BUDGET_US is spent or 200 calls were made. The time of
//                these calls gives the number of iterations: as many as fit into RULE_BUDGET_US,
//                but at least 11 and at most 2,000.
//     barrier    mode: the library's own barrier precedes each call, and only the call is timed.
//                The time of an iteration is the time of its slowest rank. p50 and min are taken
//                over the iterations.
//     b2b        mode: 11 to 51 batches of 1 to 2,000 calls in a row, which together take
//                RULE_BUDGET_US. A time is the time of a batch on its slowest rank, divided by the
//                number of calls. p50 and min are taken over the batches.
//     start      mode: one barrier and nothing else. The caller measures from outside how long a
//                job takes to start and to end.
//     blocked    mode: rank 0 enters a barrier 3 s after the other ranks. The result is the CPU
//                time that the other ranks spend in the barrier.
//
// Output, on rank 0: op,mode,ranks,bytes,p50_us,min_us
//
// GNU C99 and C++11. This file needs no feature macro, so it may be included after any header.
#ifndef IDIST_BENCH_RULE_H
#define IDIST_BENCH_RULE_H

#include <limits.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define RULE_BUDGET_US 2e5
#define RULE_MIN_BATCHES 11
#define RULE_MAX_BATCHES 51
#define RULE_MIN_ITERATIONS 11
#define RULE_MAX_ITERATIONS 2000
#define RULE_MAX_SIZES 64
#define RULE_BLOCKED_S 3
#define RULE_WINDOW 64
#define RULE_WINDOW_NBYTES ((size_t)256 << 20) // the most that the buffers of a window take
#define RULE_WINDOW_CHECKS 3
// result of rule_run: the library cannot do the operation, or not with this number of ranks
#define RULE_REFUSED 2
#define RULE_PERIOD 4099 // period of the values; a prime, so that no two blocks look alike

typedef enum rule_op {
    RULE_ALL_REDUCE,
    RULE_BROADCAST,
    RULE_ALL_GATHER,
    RULE_REDUCE_SCATTER,
    RULE_ALL_TO_ALL,
    RULE_BARRIER,
    RULE_SENDRECV,
    RULE_RATE,
    RULE_BW,
    RULE_BIBW,
    RULE_N_OPS
} rule_op;

static const char *const rule_op_names[RULE_N_OPS] = {"all_reduce", "broadcast",
                                                      "all_gather", "reduce_scatter",
                                                      "all_to_all", "barrier",
                                                      "sendrecv",   "rate",
                                                      "bw",         "bibw"};

enum { RULE_MODE_BARRIER = 1, RULE_MODE_B2B = 2, RULE_MODE_START = 4, RULE_MODE_BLOCKED = 8 };

// Options of the command line.
typedef struct rule_options {
    rule_op op;
    int nranks;  // number of ranks to start, or 0 if not given
    int modes;   // RULE_MODE_ flags, or 0 for barrier and b2b
    int limit_s; // a rank ends itself after this many seconds; 0 for never
    int n_sizes;
    size_t sizes[RULE_MAX_SIZES];
} rule_options;

typedef struct rule_library rule_library;

// Arguments of one call. Elements are floats.
typedef struct rule_call {
    rule_op op;
    size_t count;                  // per rank in all_gather, reduce_scatter and all_to_all
    size_t send_count, recv_count; // number of elements of the whole buffers
    float *send, *recv;            // the same buffer in all_reduce and broadcast
    int next, previous;            // ranks, for sendrecv

    // For a window, in rate, bw and bibw. Message i begins at element slot[i] of its buffer.
    int partner;         // the other rank of the pair
    int sends, receives; // true if this rank sends or receives; if both, no rank answers
    int n_slots;         // number of different values in slot[]
    size_t slot[RULE_WINDOW];
} rule_call;

// A library under test. A function returns 0, or another value after it has printed the reason to
// stderr.
struct rule_library {
    const char *name;
    int rank, n;
    void *state; // for the library's own use
    int (*call)(const rule_library *lib, const rule_call *c);
    // Makes a call of rate, bw or bibw. The answer goes from send[0] to recv[0]. This pointer is
    // NULL if the library has no such operations.
    int (*window)(const rule_library *lib, const rule_call *c);
    int (*barrier)(const rule_library *lib);
    // Takes the maximum over the ranks, element by element and in place.
    int (*max)(const rule_library *lib, double *x, size_t n);
    // Called before the first call with these buffers, and after the last call. May be NULL.
    int (*prepare)(const rule_library *lib, const rule_call *c);
    void (*finish)(const rule_library *lib, const rule_call *c);
    // Allocate and free buffers. Without these functions the buffers are pages of this process.
    void *(*alloc)(const rule_library *lib, size_t nbytes);
    void (*free)(const rule_library *lib, void *p, size_t nbytes);
};

//------------------------------------------------------------------------------
// options
//------------------------------------------------------------------------------

static const char rule_usage[] =
    "  -s LIST    sizes in bytes, with commas: 4,64K,16M\n"
    "  -x MODES   of barrier, b2b, start, blocked, with commas (default barrier,b2b)\n"
    "  -l N       a rank ends itself after N seconds (default: never)\n";

// Parses a size such as "64K", which ends at a comma or at the end of the text. Sets *end to
// the position after the size. Returns 0 if the text is not a size.
static size_t rule_parse_size(const char *text, const char **end) {
    char *after;
    int shift = 0;
    unsigned long long value = text[0] >= '0' && text[0] <= '9' ? strtoull(text, &after, 10) : 0;
    if (value == 0) return 0;
    if ((*after | 32) == 'k') shift = 10;
    if ((*after | 32) == 'm') shift = 20;
    if ((*after | 32) == 'g') shift = 30;
    *end = after + (shift > 0);
    return (**end && **end != ',') || value > (SIZE_MAX >> shift) ? 0 : (size_t)value << shift;
}

static int rule_parse_sizes(rule_options *o, const char *text) {
    for (o->n_sizes = 0; o->n_sizes < RULE_MAX_SIZES;) {
        size_t nbytes = rule_parse_size(text, &text);
        if (nbytes == 0) return -1;
        o->sizes[o->n_sizes++] = nbytes;
        if (!*text++) return 0;
    }
    return -1;
}

static int rule_parse_modes(rule_options *o, const char *text) {
    static const char *const names[] = {"barrier", "b2b", "start", "blocked"};
    for (;;) {
        size_t length = strcspn(text, ",");
        int mode = 0;
        for (int i = 0; i < 4; i++)
            if (strlen(names[i]) == length && strncmp(text, names[i], length) == 0) mode = 1 << i;
        if (!mode) return -1;
        o->modes |= mode;
        text += length;
        if (!*text++) return 0;
    }
}

// Takes one option. Returns -1 if the option is unknown or its value is invalid.
static int rule_option(rule_options *o, const char *name, const char *text) {
    int number = atoi(text);
    if (strcmp(name, "-s") == 0) return rule_parse_sizes(o, text);
    if (strcmp(name, "-x") == 0) return rule_parse_modes(o, text);
    if (strcmp(name, "-l") == 0 && number > 0) return o->limit_s = number, 0;
    if (strcmp(name, "-n") == 0 && number > 0) return o->nranks = number, 0;
    for (int i = 0; strcmp(name, "-op") == 0 && i < RULE_N_OPS; i++)
        if (strcmp(text, rule_op_names[i]) == 0) return o->op = (rule_op)i, 0;
    return -1;
}

static inline int rule_parse(rule_options *o, int argc, char **argv) {
    memset(o, 0, sizeof *o);
    for (int i = 1; i < argc; i += 2)
        if (i + 1 == argc || rule_option(o, argv[i], argv[i + 1])) {
            fprintf(stderr,
                    "usage: %s [options]\n  -op NAME   all_reduce broadcast all_gather "
                    "reduce_scatter all_to_all "
                    "barrier sendrecv rate bw bibw\n  -n N       ranks\n%s",
                    argv[0], rule_usage);
            return -1;
        }
    return 0;
}

//------------------------------------------------------------------------------
// pinning, clock, memory
//------------------------------------------------------------------------------

// Pins this rank to a cpu. Uses raw system calls, because the C library's functions need
// _GNU_SOURCE. A mask covers up to 1,024 cpus.
static void rule_pin(int rank, int n) {
    enum { BITS = 8 * sizeof(unsigned long), WORDS = 1024 / BITS };
    unsigned long allowed[WORDS], one[WORDS];
    int seen = 0, n_allowed = 0;
    memset(allowed, 0xff, sizeof allowed);
    memset(one, 0, sizeof one);
    // Undoes a binding by the launcher. The kernel leaves the cpus that the job may use.
    long rc = syscall(SYS_sched_setaffinity, 0, sizeof allowed, allowed);
    memset(allowed, 0, sizeof allowed);
    if (rc == 0) rc = syscall(SYS_sched_getaffinity, 0, sizeof allowed, allowed);
    for (unsigned i = 0; i < 1024; i++) n_allowed += (int)(allowed[i / BITS] >> (i % BITS) & 1);
    for (unsigned i = 0; i < 1024 && n <= n_allowed; i++) {
        if (!(allowed[i / BITS] >> (i % BITS) & 1) || seen++ != rank % n_allowed) continue;
        one[i / BITS] = 1ul << (i % BITS);
        if (rc >= 0) rc = syscall(SYS_sched_setaffinity, 0, sizeof one, one);
    }
    if (rc < 0) perror("rank not pinned: sched_setaffinity");
}

static double rule_now_us(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec * 1e6 + (double)ts.tv_nsec * 1e-3;
}

static double rule_cpu_us(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) * 1e6 +
           (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec);
}

static float *rule_alloc(const rule_library *lib, size_t count) {
    size_t nbytes = count * sizeof(float);
    if (lib->alloc) return (float *)lib->alloc(lib, nbytes);
    void *p = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return p == MAP_FAILED ? NULL : (float *)p;
}

static void rule_free(const rule_library *lib, float *p, size_t count) {
    if (!p) return;
    if (lib->free) lib->free(lib, p, count * sizeof(float));
    else munmap(p, count * sizeof(float));
}

static int rule_compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

//------------------------------------------------------------------------------
// windows: their ranks, buffers and values
//------------------------------------------------------------------------------

static int rule_is_window(rule_op op) { return op >= RULE_RATE && op <= RULE_BIBW; }

// Returns true if the library can do the operation with this number of ranks. Otherwise prints the
// reason.
static int rule_can(const rule_library *lib, rule_op op) {
    const char *lacks = NULL;

    if (!rule_is_window(op)) return 1;
    if (!lib->window) lacks = "immediate sends and receives";
    else if (op == RULE_RATE && lib->n % 2) lacks = "an even number of ranks";
    else if (op != RULE_RATE && lib->n != 2) lacks = "2 ranks";

    if (lacks && lib->rank == 0)
        fprintf(stderr, "%s: %s needs %s\n", lib->name, rule_op_names[op], lacks);
    return !lacks;
}

// Returns the number of messages that all ranks together send in one call.
static int rule_messages(const rule_library *lib, rule_op op) {
    if (!rule_is_window(op)) return 1;
    return op == RULE_BIBW ? RULE_WINDOW * lib->n : RULE_WINDOW * lib->n / 2;
}

// Sets the positions of the messages, the directions, send_count and recv_count.
static void rule_make_window(const rule_library *lib, rule_call *c) {
    size_t line = 64 / sizeof(float);
    size_t stride = (c->count + line - 1) / line * line;
    size_t n_slots = RULE_WINDOW_NBYTES / (stride * sizeof(float));
    int half = lib->n / 2, is_lower = lib->rank < half;

    if (n_slots > RULE_WINDOW) n_slots = RULE_WINDOW;
    if (n_slots == 0) n_slots = 1;
    c->n_slots = (int)n_slots;
    for (size_t i = 0; i < RULE_WINDOW; i++) c->slot[i] = i % n_slots * stride;

    c->partner = is_lower ? lib->rank + half : lib->rank - half;
    c->sends = c->op == RULE_BIBW || is_lower;
    c->receives = c->op == RULE_BIBW || !is_lower;
    c->send_count = c->sends ? n_slots * stride : 1;
    c->recv_count = c->receives ? n_slots * stride : 1;
}

// Returns element i of what a rank sends in a slot. All elements of a slot differ. The answer has
// slot RULE_WINDOW. Values are below 2^24, so that a float holds all their bits.
static float rule_window_value(int rank, int slot, int window, size_t i) {
    uint64_t x = (uint64_t)rank << 40 | (uint64_t)slot << 32 | ((uint64_t)window + 1);

    x *= 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 31)) * 0x94d049bb133111ebu;
    return (float)(((x >> 40) + i * 0x9e3779u) & 0xffffff);
}

static void rule_fill_window(const rule_library *lib, const rule_call *c, int window) {
    if (!c->sends) c->send[0] = rule_window_value(lib->rank, RULE_WINDOW, window, 0);
    for (int k = 0; c->sends && k < c->n_slots; k++)
        for (size_t i = 0; i < c->count; i++)
            c->send[c->slot[k] + i] = rule_window_value(lib->rank, k, window, i);
}

// Counts the elements of one slot that differ from the partner's message in `slot`.
static void rule_check_slot(const rule_library *lib, const rule_call *c, int window, int slot,
                            const float *got, size_t count, double *wrong) {
    for (size_t i = 0; i < count; i++) {
        float expected = rule_window_value(c->partner, slot, window, i);
        if (got[i] >= expected && got[i] <= expected) continue;
        if ((*wrong)++ < 1)
            fprintf(stderr,
                    "%s: rank %d of %d: %s of %zu elements: element %zu of message %d is %g, not "
                    "%g\n",
                    lib->name, lib->rank, lib->n, rule_op_names[c->op], c->count, i, slot,
                    (double)got[i], (double)expected);
    }
}

// Adds the number of wrong elements in the receive buffer after `window` to *wrong.
static void rule_check_window(const rule_library *lib, const rule_call *c, int window,
                              double *wrong) {
    if (!c->receives) rule_check_slot(lib, c, window, RULE_WINDOW, c->recv, 1, wrong);
    for (int k = 0; c->receives && k < c->n_slots; k++)
        rule_check_slot(lib, c, window, k, c->recv + c->slot[k], c->count, wrong);
}

// Makes one call of any operation.
static int rule_call_once(const rule_library *lib, const rule_call *c) {
    return rule_is_window(c->op) ? lib->window(lib, c) : lib->call(lib, c);
}

static void rule_spoil(const rule_call *c) { memset(c->recv, 0x55, c->recv_count * sizeof(float)); }

// Checks RULE_WINDOW_CHECKS windows. Leaves the values of the last window in the send buffers, for
// the timed loops.
static int rule_check_windows(const rule_library *lib, const rule_call *c) {
    double wrong = 0;
    int rc = 0;

    for (int window = 0; !rc && window < RULE_WINDOW_CHECKS; window++) {
        rule_fill_window(lib, c, window);
        rule_spoil(c);
        rc = lib->window(lib, c);
        if (!rc) rule_check_window(lib, c, window, &wrong);
    }
    if (!rc) rc = lib->max(lib, &wrong, 1);
    return rc ? rc : wrong > 0;
}

// Checks the data that the last window of a timed loop left.
static int rule_check_last(const rule_library *lib, const rule_call *c) {
    double wrong = 0;

    rule_check_window(lib, c, RULE_WINDOW_CHECKS - 1, &wrong);
    int rc = lib->max(lib, &wrong, 1);
    return rc ? rc : wrong > 0;
}

//------------------------------------------------------------------------------
// values
//------------------------------------------------------------------------------

// Returns element i of a rank's send buffer. Values are 0 to 63, so that sums are exact.
static float rule_value(int rank, size_t i) {
    uint64_t x =
        (uint64_t)rank * 0x9e3779b97f4a7c15u + (uint64_t)(i % RULE_PERIOD) * 0xbf58476d1ce4e5b9u;
    return (float)((x ^ (x >> 29)) * 0x94d049bb133111ebu >> 40 & 63);
}

// Allocates the buffers. A pointer is NULL if its memory cannot be allocated.
static void rule_make_buffers(const rule_library *lib, rule_call *c) {
    size_t n = (size_t)lib->n;
    c->send_count =
        c->op == RULE_REDUCE_SCATTER || c->op == RULE_ALL_TO_ALL ? c->count * n : c->count;
    c->recv_count = c->op == RULE_ALL_GATHER || c->op == RULE_ALL_TO_ALL ? c->count * n : c->count;
    if (rule_is_window(c->op)) rule_make_window(lib, c);
    c->send = rule_alloc(lib, c->send_count);
    c->recv = c->op == RULE_ALL_REDUCE || c->op == RULE_BROADCAST ? c->send
                                                                  : rule_alloc(lib, c->recv_count);
}

static void rule_free_buffers(const rule_library *lib, const rule_call *c) {
    if (c->recv != c->send) rule_free(lib, c->recv, c->recv_count);
    rule_free(lib, c->send, c->send_count);
}

// Returns the element that the receive buffer must hold at i. `sums` holds the sum over the ranks
// of each value in a period.
static float rule_expected(const rule_library *lib, const rule_call *c, const float *sums,
                           size_t i) {
    size_t own = (size_t)lib->rank * c->count;
    switch (c->op) {
    case RULE_ALL_REDUCE: return sums[i % RULE_PERIOD];
    case RULE_REDUCE_SCATTER: return sums[(own + i) % RULE_PERIOD];
    case RULE_ALL_TO_ALL: return rule_value((int)(i / c->count), own + i % c->count);
    case RULE_ALL_GATHER: return rule_value((int)(i / c->count), i % c->count);
    case RULE_SENDRECV: return rule_value(c->previous, i);
    default: return rule_value(0, i); // broadcast
    }
}

static int rule_check(const rule_library *lib, const rule_call *c) {
    static float sums[RULE_PERIOD];
    double wrong = 0;
    for (size_t i = 0; i < RULE_PERIOD; i++) {
        sums[i] = 0;
        for (int r = 0; r < lib->n; r++) sums[i] += rule_value(r, i);
    }
    rule_spoil(c);
    for (size_t i = 0; i < c->send_count && (c->op != RULE_BROADCAST || lib->rank == 0); i++)
        c->send[i] = rule_value(lib->rank, i);
    int rc = lib->call(lib, c);
    for (size_t i = 0; !rc && i < c->recv_count; i++) {
        float expected = rule_expected(lib, c, sums, i);
        if (c->recv[i] >= expected && c->recv[i] <= expected) continue;
        if (wrong++ < 1)
            fprintf(stderr, "%s: rank %d of %d: %s of %zu elements: element %zu is %g, not %g\n",
                    lib->name, lib->rank, lib->n, rule_op_names[c->op], c->count, i,
                    (double)c->recv[i], (double)expected);
    }
    if (!rc) rc = lib->max(lib, &wrong, 1);
    return rc ? rc : wrong > 0;
}

//------------------------------------------------------------------------------
// time
//------------------------------------------------------------------------------

// Makes a number of calls. In mode barrier a barrier precedes each call, and times[i] is the time
// of call i alone. `times` may be NULL.
static int rule_repeat(const rule_library *lib, const rule_call *c, int mode, int calls,
                       double *times) {
    int rc = 0;
    for (int i = 0; !rc && i < calls; i++) {
        if (mode == RULE_MODE_B2B) {
            rc = rule_call_once(lib, c);
            continue;
        }
        rc = lib->barrier(lib);
        double start_us = rule_now_us();
        if (!rc) rc = rule_call_once(lib, c);
        if (times) times[i] = rule_now_us() - start_us;
    }
    return rc;
}

// Warms up. Sets *each_us to the time that a call then takes on the slowest rank, with its barrier
// if the mode has one.
static int rule_warm_up(const rule_library *lib, const rule_call *c, int mode, double *each_us) {
    double spent_us = 0;
    int rc = 0;
    for (int calls = 1, n = 0;
         !rc && spent_us < RULE_BUDGET_US / 10 && n < RULE_MAX_ITERATIONS / 10;
         n += calls, calls *= 2) {
        double start_us = rule_now_us();
        rc = rule_repeat(lib, c, mode, calls, NULL);
        double took_us = rule_now_us() - start_us;
        if (!rc) rc = lib->max(lib, &took_us, 1);
        spent_us += took_us;
        *each_us = took_us / calls;
    }
    return rc;
}

static int rule_clamp(double x, int low, int high) {
    return x < low ? low : x > high ? high : (int)x;
}

static int rule_time(const rule_library *lib, const rule_call *c, int mode, double *p50_us,
                     double *min_us) {
    static double times[RULE_MAX_ITERATIONS];
    double each_us = 1;
    int rc = rule_warm_up(lib, c, mode, &each_us);
    int batches = mode == RULE_MODE_B2B;
    int n = rule_clamp(RULE_BUDGET_US / each_us, batches ? RULE_MIN_BATCHES : RULE_MIN_ITERATIONS,
                       batches ? RULE_MAX_BATCHES : RULE_MAX_ITERATIONS);
    int calls = rule_clamp(RULE_BUDGET_US / n / each_us, 1, RULE_MAX_ITERATIONS);
    if (!rc && !batches) rc = rule_repeat(lib, c, mode, n, times);
    for (int i = 0; !rc && batches && i < n; i++) {
        rc = lib->barrier(lib);
        double start_us = rule_now_us();
        if (!rc) rc = rule_repeat(lib, c, mode, calls, NULL);
        times[i] = (rule_now_us() - start_us) / calls;
    }
    if (!rc) rc = lib->max(lib, times, (size_t)n);
    qsort(times, (size_t)n, sizeof times[0], rule_compare_doubles);
    *p50_us = times[(n - 1) / 2];
    *min_us = times[0];
    return rc;
}

static void rule_print(const rule_library *lib, const char *op, const char *mode, size_t nbytes,
                       double p50, double min) {
    if (lib->rank != 0) return;
    printf("%s,%s,%d,%zu,%.4f,%.4f\n", op, mode, lib->n, nbytes, p50, min);
    fflush(stdout);
}

//------------------------------------------------------------------------------
// all of it
//------------------------------------------------------------------------------

static int rule_run_modes(const rule_library *lib, const rule_options *o, const rule_call *c,
                          size_t nbytes) {
    static const char *const names[] = {"", "barrier", "b2b"};
    double p50_us = 0, min_us = 0;
    int rc = 0, messages = rule_messages(lib, c->op);
    for (int mode = RULE_MODE_BARRIER; !rc && mode <= RULE_MODE_B2B; mode *= 2) {
        if (!(o->modes & mode)) continue;
        if (rule_is_window(c->op)) rule_spoil(c);
        rc = rule_time(lib, c, mode, &p50_us, &min_us);
        if (!rc && rule_is_window(c->op)) rc = rule_check_last(lib, c);
        if (!rc)
            rule_print(lib, rule_op_names[o->op], names[mode], nbytes, p50_us / messages,
                       min_us / messages);
    }
    return rc;
}

static int rule_run_size(const rule_library *lib, const rule_options *o, rule_call *c,
                         size_t nbytes) {
    rule_make_buffers(lib, c);
    double missing = !c->send || !c->recv;
    int rc = lib->max(lib, &missing, 1); // tells all ranks
    if (!rc && missing > 0) {
        if (lib->rank == 0)
            fprintf(stderr, "%s: no memory for buffers of %zu bytes\n", lib->name, nbytes);
        rc = -1;
    }
    if (!rc && lib->prepare) rc = lib->prepare(lib, c);
    if (!rc) rc = rule_is_window(c->op) ? rule_check_windows(lib, c) : rule_check(lib, c);
    if (!rc) rc = rule_run_modes(lib, o, c, nbytes);
    if (!rc) rc = lib->barrier(lib);
    if (lib->finish) lib->finish(lib, c);
    rule_free_buffers(lib, c);
    return rc;
}

static int rule_run_blocked(const rule_library *lib) {
    struct timespec late = {RULE_BLOCKED_S, 0};
    int rc = lib->barrier(lib);
    double start_us = rule_cpu_us();
    if (lib->rank == 0) nanosleep(&late, NULL);
    if (!rc) rc = lib->barrier(lib);
    double used_us = lib->rank == 0 ? 0 : rule_cpu_us() - start_us;
    if (!rc) rc = lib->max(lib, &used_us, 1);
    if (!rc) rule_print(lib, "blocked", "-", 0, used_us, used_us);
    return rc;
}

// Runs the whole measurement, on every rank. Returns 0 if everything succeeded and all values were
// right, and RULE_REFUSED if nothing could be measured.
static int rule_run(const rule_library *lib, const rule_options *options) {
    rule_options o = *options;
    rule_call c;
    int rc = 0, n = lib->n;
    size_t last_count = 0;
    memset(&c, 0, sizeof c);
    c.op = o.op;
    c.next = (lib->rank + 1) % n;
    c.previous = (lib->rank + n - 1) % n;
    if (!o.modes) o.modes = RULE_MODE_BARRIER | RULE_MODE_B2B;
    if (o.limit_s) alarm((unsigned)o.limit_s);
    rule_pin(lib->rank, n);
    if (o.modes & RULE_MODE_START) return lib->barrier(lib);
    if (o.modes & RULE_MODE_BLOCKED) return rule_run_blocked(lib);
    if (!rule_can(lib, o.op)) return RULE_REFUSED;
    if (o.op == RULE_BARRIER) return rule_run_modes(lib, &o, &c, 0);
    for (int i = 0; !rc && i < o.n_sizes; i++) {
        int per_rank =
            o.op == RULE_ALL_GATHER || o.op == RULE_REDUCE_SCATTER || o.op == RULE_ALL_TO_ALL ? n
                                                                                              : 1;
        c.count = o.sizes[i] / sizeof(float) / (size_t)per_rank;
        if (c.count == 0) c.count = 1;
        if (c.count == last_count) continue;
        last_count = c.count;
        rc = rule_run_size(lib, &o, &c, c.count * sizeof(float) * (size_t)per_rank);
    }
    return rc;
}

#endif
