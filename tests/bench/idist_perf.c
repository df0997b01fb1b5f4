// idist_perf - measures how fast each operation is, from small messages to large ones
//
//     make perf
//     build/idist_perf -op all_reduce -n 4 -b 4 -e 64M -f 4          # 4 processes on this host
//     torchrun --nproc-per-node 4 --no-python build/idist_perf ...   # or under any launcher
//
// Sizes and bandwidths follow nccl-tests. S is the size of the larger buffer of a rank, at the root
// if there is one:
//
//     all_reduce, reduce, broadcast, scan, sendrecv     S = count * size of the type
//     all other operations (count is per rank)          S = count * size of the type * ranks
//
// The bandwidths are algbw = S / t and busbw = algbw * f, where t is p50:
//
//     all_reduce                                        f = 2(n-1)/n
//     broadcast, reduce, scan, sendrecv                 f = 1
//     all other operations                              f = (n-1)/n
//
// A time is the time of one iteration on its slowest rank. Each iteration starts with a barrier.
// Before the timing one call is checked: every element of every rank is compared with a value
// computed from its position.
//
// With -plot FILE.svg the program draws the table: p50 and busbw (algbw for one rank) over the
// size, on logarithmic scales.
//
// With -s the measurement follows rule.h instead, as for the peers (make bench-peers), and prints
// CSV lines. The operations rate, bw and bibw send windows of messages and need -s.
#ifndef IDIST_IMPLEMENTATION
#define IDIST_IMPLEMENTATION
#endif
#include "../../idist.h"

#include <errno.h>
#include <limits.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "rule.h"

extern char **environ;

typedef enum perf_op {
    ALL_REDUCE,
    REDUCE,
    BROADCAST,
    ALL_GATHER,
    GATHER,
    SCATTER,
    REDUCE_SCATTER,
    ALL_TO_ALL,
    BARRIER,
    SENDRECV,
    SCAN,
    RATE, // RATE and the operations below are measured by rule.h only
    BW,
    BIBW,
    N_OPS
} perf_op;

// How an operation works in place.
typedef enum in_place { NEVER, ALWAYS, SAME, SEND_IN_RECV, RECV_IN_SEND } in_place;

typedef struct perf_kind {
    const char *name;
    bool per_rank;           // count is per rank, and the size counts all ranks
    bool reduces;            // has an idist_op
    bool rooted;             // has a root
    bool send_all, recv_all; // the buffer holds count elements for each rank
    in_place in_place;
} perf_kind;

static const perf_kind kinds[N_OPS] = {
    {"all_reduce", false, true, false, false, false, SAME},
    {"reduce", false, true, true, false, false, SAME},
    {"broadcast", false, false, true, false, false, ALWAYS},
    {"all_gather", true, false, false, false, true, SEND_IN_RECV},
    {"gather", true, false, true, false, true, SEND_IN_RECV},
    {"scatter", true, false, true, true, false, RECV_IN_SEND},
    {"reduce_scatter", true, true, false, true, false, RECV_IN_SEND},
    {"all_to_all", true, false, false, true, true, SAME},
    {"barrier", false, false, false, false, false, NEVER},
    {"sendrecv", false, false, false, false, false, NEVER},
    {"scan", false, true, false, false, false, SAME},
    {"rate", false, false, false, false, false, NEVER},
    {"bw", false, false, false, false, false, NEVER},
    {"bibw", false, false, false, false, false, NEVER},
};

typedef struct options {
    perf_op op;
    int nranks; // 0 if not given
    size_t min_nbytes, max_nbytes, factor;
    idist_dtype dtype;
    idist_op reduction;
    int warmup, iterations, root;
    bool check, json;
    int in_place;     // 1, 0, or -1 if not given
    bool own_alloc;   // buffers from idist_alloc
    bool by_rule;     // measure by rule.h
    bool grouped;     // windows between idist_group_begin and idist_group_end
    const char *plot; // the picture to draw, or NULL
    rule_options rule;
} options;

// State of one rank.
typedef struct bench {
    const options *opt;
    const perf_kind *kind;
    int rank, n;
    bool in_place;
    size_t count, size; // elements per call, bytes per element
    unsigned char *send, *recv;
    // Memory to free. send or recv may point into the memory of the other buffer.
    unsigned char *send_memory, *recv_memory;
} bench;

typedef struct row {
    size_t nbytes, count;
    double min_us, p50_us, p99_us, algbw, busbw;
    uint64_t wrong;
} row;

//------------------------------------------------------------------------------
// the command line
//------------------------------------------------------------------------------

static const char usage_text[] =
    "usage: idist_perf [options]\n"
    "  -op NAME   all_reduce reduce broadcast all_gather gather scatter reduce_scatter all_to_all "
    "barrier sendrecv scan\n"
    "             (default all_reduce)\n"
    "  -n N       ranks to start on this host (default 2; not used when a launcher started this "
    "program)\n"
    "  -b SIZE    first size in bytes, K, M, G are powers of 1024 (default 4)\n"
    "  -e SIZE    last size (default 16M)\n"
    "  -f N       factor from one size to the next, at least 2 (default 4)\n"
    "  -d TYPE    I8 U8 I16 U16 I32 U32 I64 U64 F16 BF16 F32 F64 F8E4M3 F8E5M2 (default F32)\n"
    "  -o OP      SUM PROD MIN MAX AVG BAND BOR BXOR LAND LOR (default SUM)\n"
    "  -r ROOT    root of reduce, broadcast, gather, scatter (default 0)\n"
    "  -w N       iterations before the timing (default 5)\n"
    "  -i N       iterations (default 20)\n"
    "  -c 0|1     check the results (default 1)\n"
    "  -p in|out  in place or not (default: in where the operation can, else out)\n"
    "  -m malloc|idist  where the buffers come from (default malloc)\n"
    "  -a         the same as -m idist\n"
    "  --json     one JSON object instead of the table\n"
    "  -plot FILE.svg  draw time and bandwidth over the size as well, with gnuplot; FILE.gnuplot\n"
    "             keeps the figures\n"
    "  --help     this text\n"
    "measured like the peers, F32, SUM, root 0, with CSV lines; -op, -n and -a of the above, and\n"
    "  -op NAME   also rate (pairs of ranks), bw and bibw (2 ranks): windows of 64 messages, as\n"
    "             in osu_mbw_mr, osu_bw and osu_bibw; the time is that of one message\n"
    "  -g         their windows between idist_group_begin and idist_group_end (else: requests)\n";

static void print_usage(void) {
    fputs(usage_text, stdout);
    fputs(rule_usage, stdout);
    fputs("exit code: 0 all well, 1 an error or a wrong result, 2 wrong usage\n", stdout);
}

static void fail_usage(const char *fmt, ...) __attribute__((format(printf, 1, 2), noreturn));
static void fail_usage(const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    fputs("idist_perf: ", stderr);
    vfprintf(stderr, fmt, args);
    fputs(" (--help lists the options)\n", stderr);
    va_end(args);
    exit(2);
}

static int parse_int(const char *name, const char *text, int lowest) {
    char *end;
    errno = 0;
    long value = strtol(text, &end, 10);
    if (end == text || *end || errno || value < lowest || value > INT_MAX)
        fail_usage("%s %s: an integer of at least %d is needed", name, text, lowest);
    return (int)value;
}

static size_t parse_size(const char *name, const char *text) {
    const char *end;
    size_t nbytes = rule_parse_size(text, &end);
    if (nbytes == 0 || *end)
        fail_usage("%s %s: a size like 4, 64K, 16M or 1G is needed", name, text);
    return nbytes;
}

// Returns the index of `text` among n names, ignoring case.
static int parse_name(const char *name, const char *text, const char *(*name_of)(int), int n) {
    for (int i = 0; i < n; i++) {
        const char *a = text, *b = name_of(i);
        while (*a && (*a | 32) == (*b | 32)) a++, b++;
        if (!*a && !*b) return i;
    }
    fail_usage("%s %s: no such name", name, text);
}

static const char *kind_name(int i) { return kinds[i].name; }
static const char *dtype_name(int i) { return idist_dtype_name((idist_dtype)i); }
static const char *reduction_name(int i) { return idist_op_name((idist_op)i); }

static int parse_choice(const char *name, const char *text, const char *no, const char *yes) {
    if (strcmp(text, yes) == 0) return 1;
    if (strcmp(text, no) != 0) fail_usage("%s %s: %s or %s is needed", name, text, no, yes);
    return 0;
}

static bool plot_has_suffix(const char *path) {
    size_t length = strlen(path);
    return length > 4 && strcmp(path + length - 4, ".svg") == 0;
}

static bool parse_option(options *o, const char *name, const char *text) {
    if (strcmp(name, "-op") == 0) o->op = (perf_op)parse_name(name, text, kind_name, N_OPS);
    else if (strcmp(name, "-n") == 0) o->nranks = parse_int(name, text, 1);
    else if (strcmp(name, "-b") == 0) o->min_nbytes = parse_size(name, text);
    else if (strcmp(name, "-e") == 0) o->max_nbytes = parse_size(name, text);
    else if (strcmp(name, "-f") == 0) o->factor = (size_t)parse_int(name, text, 2);
    else if (strcmp(name, "-d") == 0)
        o->dtype = (idist_dtype)parse_name(name, text, dtype_name, IDIST_F8E5M2 + 1);
    else if (strcmp(name, "-o") == 0)
        o->reduction = (idist_op)parse_name(name, text, reduction_name, IDIST_LXOR);
    else if (strcmp(name, "-r") == 0) o->root = parse_int(name, text, 0);
    else if (strcmp(name, "-w") == 0) o->warmup = parse_int(name, text, 0);
    else if (strcmp(name, "-i") == 0) o->iterations = parse_int(name, text, 1);
    else if (strcmp(name, "-c") == 0) o->check = parse_choice(name, text, "0", "1");
    else if (strcmp(name, "-p") == 0) o->in_place = parse_choice(name, text, "out", "in");
    else if (strcmp(name, "-m") == 0) o->own_alloc = parse_choice(name, text, "malloc", "idist");
    else if (strcmp(name, "-plot") == 0) o->plot = text;
    else if (strcmp(name, "-s") == 0 || strcmp(name, "-x") == 0 || strcmp(name, "-l") == 0) {
        if (rule_option(&o->rule, name, text))
            fail_usage("%s %s: cannot be understood", name, text);
        o->by_rule = true;
    } else return false;
    return true;
}

// Checks the options for rule.h, which knows the operations by name.
static void check_rule_options(options *o) {
    if (o->json || o->plot || o->in_place >= 0 || o->dtype != IDIST_F32 ||
        o->reduction != IDIST_SUM || o->root != 0)
        fail_usage("-s, -x, -l: go with -op, -n, -a and -g only");
    if (rule_option(&o->rule, "-op", kinds[o->op].name))
        fail_usage("-op %s: not one that the peers have", kinds[o->op].name);
}

static void check_options(const options *o) {
    in_place rule = kinds[o->op].in_place;
    bool bits = o->reduction >= IDIST_BAND && o->reduction <= IDIST_LOR;
    if (o->op >= RATE && !o->by_rule)
        fail_usage("-op %s: the sizes of its messages come with -s", kinds[o->op].name);
    if (o->grouped && o->op < RATE) fail_usage("-g: goes with -op rate, bw and bibw only");
    if (o->min_nbytes > o->max_nbytes)
        fail_usage("-b %zu is above -e %zu", o->min_nbytes, o->max_nbytes);
    if (rule == NEVER && o->in_place == 1)
        fail_usage("-p in: %s cannot work in place", kinds[o->op].name);
    if (rule == ALWAYS && o->in_place == 0)
        fail_usage("-p out: %s has one buffer only", kinds[o->op].name);
    if (kinds[o->op].reduces && bits && o->dtype >= IDIST_F16)
        fail_usage("-o %s takes integers only, not %s", idist_op_name(o->reduction),
                   idist_dtype_name(o->dtype));
    if (o->op == SCAN && o->reduction == IDIST_AVG) fail_usage("-o AVG: scan cannot average");
    if (o->plot && !plot_has_suffix(o->plot))
        fail_usage("-plot %s: the name of a file is needed that ends with .svg", o->plot);
    if (o->plot && o->op == BARRIER) fail_usage("-plot: barrier has no sizes");
}

static options parse_options(int argc, char **argv) {
    options o;
    memset(&o, 0, sizeof o);
    o.op = ALL_REDUCE;
    o.min_nbytes = 4;
    o.max_nbytes = (size_t)16 << 20;
    o.factor = 4;
    o.dtype = IDIST_F32;
    o.reduction = IDIST_SUM;
    o.warmup = 5;
    o.iterations = 20;
    o.check = true;
    o.in_place = -1;
    bool min_given = false, max_given = false;
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i];
        if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0) {
            print_usage();
            exit(0);
        }
        if (strcmp(name, "--json") == 0 || strcmp(name, "-a") == 0 || strcmp(name, "-g") == 0) {
            if (name[1] == 'a') o.own_alloc = true;
            else if (name[1] == 'g') o.grouped = true;
            else o.json = true;
            continue;
        }
        if (strcmp(name, "--op") == 0) name = "-op";
        if (strcmp(name, "-b") == 0) min_given = true;
        if (strcmp(name, "-e") == 0) max_given = true;
        // an empty text is not a valid value of any option
        const char *text = i + 1 < argc ? argv[i + 1] : "";
        if (!parse_option(&o, name, text)) fail_usage("unknown option %s", name);
        i++;
    }
    // If only one of -b and -e is given, the default of the other option is adjusted.
    if (!min_given && o.min_nbytes > o.max_nbytes) o.min_nbytes = o.max_nbytes;
    if (!max_given && o.max_nbytes < o.min_nbytes) o.max_nbytes = o.min_nbytes;
    check_options(&o);
    if (o.by_rule) check_rule_options(&o);
    if (o.nranks && o.root >= o.nranks)
        fail_usage("-r %d: there are only %d ranks", o.root, o.nranks);
    return o;
}

//------------------------------------------------------------------------------
// values: computed from rank and position, small enough to be exact in every type
//------------------------------------------------------------------------------

static unsigned mix(size_t rank, size_t i) {
    uint64_t x = (uint64_t)rank * 0x9e3779b97f4a7c15u + (uint64_t)i * 0xbf58476d1ce4e5b9u;
    return (unsigned)((x ^ (x >> 29)) * 0x94d049bb133111ebu >> 40);
}

// Returns element i of a rank's send buffer. Products are at most 8, because at most three ranks
// have a 2 at one position.
static int value_at(const bench *b, int rank, size_t i) {
    unsigned most = b->opt->dtype == IDIST_F8E4M3 || b->opt->dtype == IDIST_F8E5M2 ? 7 : 127;
    if (!b->kind->reduces) return (int)(mix((size_t)rank, i) & most);
    if (b->opt->reduction == IDIST_SUM || b->opt->reduction == IDIST_AVG)
        return (int)(mix((size_t)rank, i) & 3);
    if (b->opt->reduction == IDIST_PROD) return ((size_t)rank + i) % (size_t)b->n < 3 ? 2 : 1;
    if (b->opt->reduction >= IDIST_LAND) return (int)(mix((size_t)rank, i) & 7) % 4 == 0;
    return (int)(mix((size_t)rank, i) & most);
}

static double combine(idist_op op, double x, int y) {
    int a = (int)x;
    switch ((int)op) {
    case IDIST_PROD: return x * y;
    case IDIST_MIN: return x < y ? x : y;
    case IDIST_MAX: return x > y ? x : y;
    case IDIST_BAND: return a & y;
    case IDIST_BOR: return a | y;
    case IDIST_BXOR: return a ^ y;
    case IDIST_LAND: return a && y;
    case IDIST_LOR: return a || y;
    default: return x + y;
    }
}

// Returns element i after the reduction over the ranks 0 .. last.
static double reduced_at(const bench *b, int last, size_t i) {
    double x = value_at(b, 0, i);
    for (int k = 1; k <= last; k++) x = combine(b->opt->reduction, x, value_at(b, k, i));
    if (b->opt->reduction != IDIST_AVG) return x;
    return b->opt->dtype >= IDIST_F16 ? x / b->n : (double)((int64_t)x / b->n);
}

// Returns element i that this rank's receive buffer must hold.
static double expected_at(const bench *b, size_t i) {
    size_t own = (size_t)b->rank * b->count;
    size_t block = i / b->count, within = i % b->count;
    switch (b->opt->op) {
    case ALL_REDUCE:
    case REDUCE: return reduced_at(b, b->n - 1, i);
    case SCAN: return reduced_at(b, b->rank, i);
    case REDUCE_SCATTER: return reduced_at(b, b->n - 1, own + i);
    case BROADCAST: return value_at(b, b->opt->root, i);
    case SCATTER: return value_at(b, b->opt->root, own + i);
    case ALL_TO_ALL: return value_at(b, (int)block, own + within);
    case SENDRECV: return value_at(b, (b->rank + b->n - 1) % b->n, i);
    default: return value_at(b, (int)block, within); // all_gather, gather
    }
}

// Formats of floats of 16 and 8 bits: mantissa bits, exponent bias and tolerance. The small test
// values are converted through the bits of a float.
static const struct {
    int mantissa, bias;
    double slack;
} formats[IDIST_F8E5M2 + 1] = {[IDIST_F16] = {10, 15, 1e-3},
                               [IDIST_BF16] = {7, 127, 8e-3},
                               [IDIST_F8E4M3] = {3, 7, 0.0625},
                               [IDIST_F8E5M2] = {2, 15, 0.125}};

static uint16_t narrow_from(double x, idist_dtype dtype) {
    float f = (float)x;
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    if (x < 0.5) return 0;
    return (uint16_t)((bits >> (23 - formats[dtype].mantissa)) -
                      ((uint32_t)(127 - formats[dtype].bias) << formats[dtype].mantissa));
}

static double narrow_to(uint16_t h, idist_dtype dtype) {
    uint32_t bits = h ? ((uint32_t)h << (23 - formats[dtype].mantissa)) +
                            ((uint32_t)(127 - formats[dtype].bias) << 23)
                      : 0;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static void store_value(void *p, idist_dtype dtype, int value) {
    float f = (float)value;
    double d = value;
    int64_t word = value;
    uint16_t narrow;
    if (dtype == IDIST_F32) memcpy(p, &f, sizeof f);
    else if (dtype == IDIST_F64) memcpy(p, &d, sizeof d);
    else if (dtype >= IDIST_F16)
        narrow = narrow_from(value, dtype), memcpy(p, &narrow, idist_dtype_size(dtype));
    else memcpy(p, &word, idist_dtype_size(dtype)); // the low bytes, little endian
}

// Compares an element with its expected value. Integers must be exact, modulo their width. Floats
// may be rounded once if the type cannot represent the true value (AVG, large sums).
static bool is_value(const void *p, idist_dtype dtype, double expected) {
    double got, slack = 0;
    int64_t word = (int64_t)expected;
    float f;
    uint16_t narrow = 0;
    if (dtype < IDIST_F16) return memcmp(p, &word, idist_dtype_size(dtype)) == 0;
    if (dtype == IDIST_F64) memcpy(&got, p, sizeof got), slack = 1e-15;
    else if (dtype == IDIST_F32) memcpy(&f, p, sizeof f), got = f, slack = 1e-6;
    else
        memcpy(&narrow, p, idist_dtype_size(dtype)), got = narrow_to(narrow, dtype),
                                                     slack = formats[dtype].slack;
    double difference = got > expected ? got - expected : expected - got;
    return difference <= slack * expected;
}

//------------------------------------------------------------------------------
// one size
//------------------------------------------------------------------------------

static void *allocate(const bench *b, size_t nbytes) {
    return b->opt->own_alloc ? idist_alloc(nbytes, NULL) : calloc(1, nbytes);
}

static void release(const bench *b, void *p) {
    if (b->opt->own_alloc) idist_free(p);
    else free(p);
}

static size_t send_count(const bench *b) {
    return b->kind->send_all ? b->count * (size_t)b->n : b->count;
}
static size_t recv_count(const bench *b) {
    return b->kind->recv_all ? b->count * (size_t)b->n : b->count;
}

// Places send and recv according to the operation's in-place rule.
static bool make_buffers(bench *b) {
    size_t own = (size_t)b->rank * b->count * b->size;
    in_place rule = b->in_place ? b->kind->in_place : NEVER;
    b->send_memory = b->recv_memory = NULL;
    if (b->opt->op == BARRIER) return true;
    if (rule != SEND_IN_RECV)
        b->send_memory = (unsigned char *)allocate(b, send_count(b) * b->size);
    if (rule == NEVER || rule == SEND_IN_RECV)
        b->recv_memory = (unsigned char *)allocate(b, recv_count(b) * b->size);
    b->send = b->send_memory;
    b->recv = b->recv_memory;
    if (rule == SAME || rule == ALWAYS) b->recv = b->send;
    if (rule == RECV_IN_SEND && b->send) b->recv = b->send + own;
    if (rule == SEND_IN_RECV && b->recv) b->send = b->recv + own;
    if (b->send && b->recv) return true;
    fprintf(stderr, "idist_perf: rank %d: no memory for buffers of %zu elements\n", b->rank,
            recv_count(b));
    return false;
}

static void free_buffers(bench *b) {
    release(b, b->send_memory);
    release(b, b->recv_memory);
}

static idist_status call(const bench *b) {
    const options *o = b->opt;
    idist_dtype d = o->dtype;
    int next = (b->rank + 1) % b->n, previous = (b->rank + b->n - 1) % b->n;
    switch (o->op) {
    case ALL_REDUCE: return idist_all_reduce(b->send, b->recv, b->count, d, o->reduction, NULL);
    case REDUCE: return idist_reduce(b->send, b->recv, b->count, d, o->reduction, o->root, NULL);
    case BROADCAST: return idist_broadcast(b->send, b->count, d, o->root, NULL);
    case ALL_GATHER: return idist_all_gather(b->send, b->recv, b->count, d, NULL);
    case GATHER: return idist_gather(b->send, b->recv, b->count, d, o->root, NULL);
    case SCATTER: return idist_scatter(b->send, b->recv, b->count, d, o->root, NULL);
    case REDUCE_SCATTER:
        return idist_reduce_scatter(b->send, b->recv, b->count, d, o->reduction, NULL);
    case ALL_TO_ALL: return idist_all_to_all(b->send, b->recv, b->count, d, NULL);
    case BARRIER: return idist_barrier(NULL);
    case SENDRECV:
        return idist_sendrecv(b->send, b->count, next, 0, b->recv, b->count, previous, 0, d, NULL,
                              NULL);
    default: return idist_scan(b->send, b->recv, b->count, d, o->reduction, NULL);
    }
}

static idist_status check_once(const bench *b, uint64_t *wrong) {
    bool receives = (b->opt->op != REDUCE && b->opt->op != GATHER) || b->rank == b->opt->root;
    bool sends = b->opt->op != BROADCAST || b->rank == b->opt->root;
    *wrong = 0;
    if (b->opt->op == BARRIER) return IDIST_OK;
    memset(b->recv, 0x55, recv_count(b) * b->size);
    for (size_t i = 0; sends && i < send_count(b); i++)
        store_value(b->send + i * b->size, b->opt->dtype, value_at(b, b->rank, i));
    idist_status status = call(b);
    for (size_t i = 0; !status && receives && i < recv_count(b); i++)
        if (!is_value(b->recv + i * b->size, b->opt->dtype, expected_at(b, i))) ++*wrong;
    if (!status) status = idist_all_reduce(wrong, wrong, 1, IDIST_U64, IDIST_SUM, NULL);
    return status;
}

// Times the iterations. times[i] is the time of an iteration on its slowest rank. The array is
// sorted at the end.
static idist_status time_calls(const bench *b, double *times) {
    idist_status status = IDIST_OK;
    int n = b->opt->iterations;
    for (int i = 0; !status && i < b->opt->warmup; i++) status = call(b);
    for (int i = 0; !status && i < n; i++) {
        status = idist_barrier(NULL);
        double start_us = rule_now_us();
        if (!status) status = call(b);
        times[i] = rule_now_us() - start_us;
    }
    if (!status) status = idist_all_reduce(times, times, (size_t)n, IDIST_F64, IDIST_MAX, NULL);
    qsort(times, (size_t)n, sizeof times[0], rule_compare_doubles);
    return status;
}

static double bus_factor(const bench *b) {
    double n = b->n;
    if (b->opt->op == ALL_REDUCE) return 2 * (n - 1) / n;
    return b->kind->per_rank ? (n - 1) / n : 1;
}

static idist_status measure(bench *b, double *times, row *r) {
    size_t n = (size_t)b->opt->iterations;
    memset(r, 0, sizeof *r);
    r->count = b->count;
    r->nbytes = b->count * b->size * (b->kind->per_rank ? (size_t)b->n : 1);
    // If a rank cannot allocate its buffers, all ranks must learn of it, so that none waits.
    uint64_t no_memory = make_buffers(b) ? 0 : 1;
    idist_status status = idist_all_reduce(&no_memory, &no_memory, 1, IDIST_U64, IDIST_SUM, NULL);
    if (!status && no_memory) status = IDIST_ERR_NO_MEMORY;
    if (!status && b->opt->check) status = check_once(b, &r->wrong);
    if (!status) status = time_calls(b, times);
    free_buffers(b);
    r->min_us = times[0];
    r->p50_us = times[(n - 1) / 2];
    r->p99_us = times[(n * 99 + 99) / 100 - 1];
    if (b->opt->op != BARRIER && r->p50_us > 0) r->algbw = (double)r->nbytes / r->p50_us / 1e3;
    r->busbw = r->algbw * bus_factor(b);
    return status;
}

//------------------------------------------------------------------------------
// output, on rank 0
//------------------------------------------------------------------------------

static const char *type_text(const bench *b) {
    return b->opt->op == BARRIER ? "-" : idist_dtype_name(b->opt->dtype);
}
static const char *op_text(const bench *b) {
    return b->kind->reduces ? idist_op_name(b->opt->reduction) : "-";
}

static void print_head(const bench *b) {
    const options *o = b->opt;
    if (b->rank != 0) return;
    if (o->json) {
        printf("{\"program\": \"idist_perf\", \"version\": \"%s\", \"operation\": \"%s\", "
               "\"ranks\": %d, \"nodes\": %d, ",
               IDIST_VERSION, b->kind->name, b->n, idist_get_nnodes());
        printf("\"backend\": \"%s\", \"launcher\": \"%s\", \"type\": \"%s\", \"op\": \"%s\", "
               "\"in_place\": %s, ",
               idist_backend(), idist_launcher(), type_text(b), op_text(b),
               b->in_place ? "true" : "false");
        printf("\"warmup\": %d, \"iterations\": %d, \"checked\": %s, \"results\": [", o->warmup,
               o->iterations, o->check ? "true" : "false");
        return;
    }
    printf("# idist_perf %s: %s%s, ranks %d, nodes %d, backend %s, launcher %s, warm-up %d, "
           "iterations %d\n",
           IDIST_VERSION, b->kind->name, b->in_place ? " in place" : "", b->n, idist_get_nnodes(),
           idist_backend(), idist_launcher(), o->warmup, o->iterations);
    printf("# %10s %12s %6s %6s %11s %11s %11s %9s %9s %8s\n", "size", "count", "type", "op", "min",
           "p50", "p99", "algbw", "busbw", "wrong");
    printf("# %10s %12s %6s %6s %11s %11s %11s %9s %9s\n", "B", "elements", "", "", "us", "us",
           "us", "GB/s", "GB/s");
}

static void print_row(const bench *b, const row *r, bool first) {
    if (b->rank != 0) return;
    if (b->opt->json) {
        printf("%s\n  {\"size\": %zu, \"count\": %zu, \"min_us\": %.3f, \"p50_us\": %.3f, "
               "\"p99_us\": %.3f, \"algbw\": %.4f, "
               "\"busbw\": %.4f, \"wrong\": ",
               first ? "" : ",", r->nbytes, r->count, r->min_us, r->p50_us, r->p99_us, r->algbw,
               r->busbw);
        if (b->opt->check) printf("%llu}", (unsigned long long)r->wrong);
        else printf("null}");
    } else {
        printf("  %10zu %12zu %6s %6s %11.2f %11.2f %11.2f %9.3f %9.3f ", r->nbytes, r->count,
               type_text(b), op_text(b), r->min_us, r->p50_us, r->p99_us, r->algbw, r->busbw);
        if (b->opt->check) printf("%8llu\n", (unsigned long long)r->wrong);
        else printf("%8s\n", "-");
    }
    fflush(stdout);
}

static void print_tail(const bench *b) {
    if (b->rank == 0 && b->opt->json) printf("\n]}\n");
    fflush(stdout);
}

//------------------------------------------------------------------------------
// the picture, on rank 0
//------------------------------------------------------------------------------

// Returns the path of the gnuplot script, which also contains the figures. The path is the
// picture's path with another suffix. The caller frees the path.
static char *plot_script_path(const bench *b) {
    size_t nbytes = strlen(b->opt->plot) + sizeof ".gnuplot";
    char *path = (char *)malloc(nbytes);
    if (path) snprintf(path, nbytes, "%.*s.gnuplot", (int)strlen(b->opt->plot) - 4, b->opt->plot);
    return path;
}

// Writes the commands that draw one column over the size.
static void plot_panel(FILE *f, const char *label, int column) {
    fprintf(f,
            "set ylabel '%s'\nplot $figures using 1:%d with linespoints pointtype 7 pointsize 0.5 "
            "linewidth 1.5 notitle\n",
            label, column);
}

static void plot_write(const bench *b, FILE *f, const row *rows, size_t n_rows) {
    fprintf(f, "# idist_perf %s: size in bytes, p50 in us, %s in GB/s\n$figures << END\n",
            IDIST_VERSION, b->n > 1 ? "busbw" : "algbw");
    for (size_t i = 0; i < n_rows; i++)
        fprintf(f, "%zu %.3f %.6f\n", rows[i].nbytes, rows[i].p50_us,
                b->n > 1 ? rows[i].busbw : rows[i].algbw);
    fprintf(f, "END\nset terminal svg size 900, 360 background 'white' noenhanced\nset output '");
    for (const char *at = b->opt->plot; *at; at++) {
        if (*at == '\'') fputc('\'', f); // a quote within quotes is written twice
        fputc(*at, f);
    }
    fprintf(f,
            "'\nset logscale x 2\nset logscale y\nset format x '%%.0b %%BB'\nset format y '%%g'\n"
            "set grid\nset xlabel 'size'\nset multiplot layout 1, 2 "
            "title '%s%s, %s, ranks %d, nodes %d, backend %s'\n",
            b->kind->name, b->in_place ? " in place" : "", type_text(b), b->n, idist_get_nnodes(),
            idist_backend());
    plot_panel(f, "p50, us", 2);
    plot_panel(f, b->n > 1 ? "busbw, GB/s" : "algbw, GB/s", 3);
    fprintf(f, "unset multiplot\n");
}

// Runs gnuplot. Returns true on success, and prints the reason otherwise.
static bool plot_draw(char *script) {
    char program[] = "gnuplot", *argv[] = {program, script, NULL};
    pid_t child;
    int status = 0, error = posix_spawnp(&child, program, NULL, NULL, argv, environ);
    while (!error && waitpid(child, &status, 0) < 0)
        if (errno != EINTR) error = errno;
    if (error == ENOENT)
        fprintf(stderr,
                "idist_perf: there is no gnuplot here (Debian package gnuplot-nox); elsewhere, "
                "\"gnuplot %s\" draws the figures\n",
                script);
    else if (error) fprintf(stderr, "idist_perf: gnuplot: %s\n", strerror(error));
    else if (status) fprintf(stderr, "idist_perf: gnuplot %s failed\n", script);
    return !error && !status;
}

static bool plot(const bench *b, const row *rows, size_t n_rows) {
    char *script = plot_script_path(b);
    FILE *f = script ? fopen(script, "w") : NULL;
    bool good = f != NULL;
    if (f) {
        plot_write(b, f, rows, n_rows);
        good = !ferror(f);
        if (fclose(f) != 0) good = false;
    }
    if (!good)
        fprintf(stderr, "idist_perf: %s: %s\n", script ? script : b->opt->plot, strerror(errno));
    good = good && plot_draw(script);
    free(script);
    return good;
}

//------------------------------------------------------------------------------
// all sizes
//------------------------------------------------------------------------------

// Returns the count for a size. It is at least one, because a row for an empty call would be
// useless.
static size_t count_of(const bench *b, size_t nbytes) {
    size_t count = nbytes / b->size / (b->kind->per_rank ? (size_t)b->n : 1);
    if (b->opt->op == BARRIER) return 0;
    return count ? count : 1;
}

static int run_sizes(bench *b, double *times) {
    const options *o = b->opt;
    row rows[64]; // enough, because each size is at least twice the previous size
    size_t last_count = SIZE_MAX, n_rows = 0;
    uint64_t wrong = 0;
    print_head(b);
    for (size_t nbytes = o->min_nbytes;; nbytes *= o->factor) {
        b->count = count_of(b, nbytes);
        if (b->count != last_count) {
            row *r = &rows[n_rows++];
            idist_status status = measure(b, times, r);
            if (status) {
                fprintf(stderr, "idist_perf: rank %d: %s: %s: %s\n", b->rank, b->kind->name,
                        idist_status_name(status), idist_last_error());
                return 1;
            }
            print_row(b, r, n_rows == 1);
            wrong += r->wrong;
        }
        last_count = b->count;
        if (nbytes > o->max_nbytes / o->factor) break;
    }
    print_tail(b);
    if (b->rank == 0 && o->plot && !plot(b, rows, n_rows)) return 1;
    return wrong != 0;
}

//------------------------------------------------------------------------------
// measurement by rule.h
//------------------------------------------------------------------------------

static int said(const char *what, idist_status status) {
    if (status)
        fprintf(stderr, "idist_perf: rank %d: %s: %s: %s\n", idist_get_rank(), what,
                idist_status_name(status), idist_last_error());
    return status != IDIST_OK;
}

static int rule_call_idist(const rule_library *lib, const rule_call *c) {
    idist_status status;
    (void)lib;
    switch (c->op) {
    case RULE_ALL_REDUCE:
        status = idist_all_reduce(c->send, c->recv, c->count, IDIST_F32, IDIST_SUM, NULL);
        break;
    case RULE_BROADCAST: status = idist_broadcast(c->recv, c->count, IDIST_F32, 0, NULL); break;
    case RULE_ALL_GATHER:
        status = idist_all_gather(c->send, c->recv, c->count, IDIST_F32, NULL);
        break;
    case RULE_REDUCE_SCATTER:
        status = idist_reduce_scatter(c->send, c->recv, c->count, IDIST_F32, IDIST_SUM, NULL);
        break;
    case RULE_ALL_TO_ALL:
        status = idist_all_to_all(c->send, c->recv, c->count, IDIST_F32, NULL);
        break;
    case RULE_BARRIER: status = idist_barrier(NULL); break;
    default:
        status = idist_sendrecv(c->send, c->count, c->next, 0, c->recv, c->count, c->previous, 0,
                                IDIST_F32, NULL, NULL);
    }
    return said(rule_op_names[c->op], status);
}

// Starts the sends and receives of a window as requests, and counts them in *n. If `requests` is
// NULL, the caller is between group_begin and group_end.
static idist_status start_window(const rule_call *c, idist_request *requests, size_t *n) {
    idist_status status = IDIST_OK;
    idist_opts opts;
    memset(&opts, 0, sizeof opts);

    for (int i = 0; !status && c->receives && i < RULE_WINDOW; i++) {
        if (requests) opts.request = &requests[*n];
        status = idist_recv(c->recv + c->slot[i], c->count, IDIST_F32, c->partner, 0, NULL, &opts);
        if (!status) ++*n;
    }

    for (int i = 0; !status && c->sends && i < RULE_WINDOW; i++) {
        if (requests) opts.request = &requests[*n];
        status = idist_send(c->send + c->slot[i], c->count, IDIST_F32, c->partner, 0, &opts);
        if (!status) ++*n;
    }
    return status;
}

static idist_status answer_window(const rule_call *c) {
    if (c->sends && c->receives) return IDIST_OK;
    if (c->sends) return idist_recv(c->recv, 1, IDIST_F32, c->partner, 1, NULL, NULL);
    return idist_send(c->send, 1, IDIST_F32, c->partner, 1, NULL);
}

static int rule_window_requests(const rule_library *lib, const rule_call *c) {
    idist_request requests[2 * RULE_WINDOW];
    size_t n = 0;
    idist_status status = start_window(c, requests, &n);
    idist_status waited = idist_wait_all(requests, n);
    (void)lib;
    if (!status) status = waited;
    if (!status) status = answer_window(c);
    return said(rule_op_names[c->op], status);
}

static int rule_window_group(const rule_library *lib, const rule_call *c) {
    size_t n = 0;
    idist_status status = idist_group_begin();
    (void)lib;
    if (!status) {
        status = start_window(c, NULL, &n);
        idist_status ended = idist_group_end();
        if (!status) status = ended;
    }
    if (!status) status = answer_window(c);
    return said(rule_op_names[c->op], status);
}

static int rule_barrier_idist(const rule_library *lib) {
    (void)lib;
    return said("barrier", idist_barrier(NULL));
}

static int rule_max_idist(const rule_library *lib, double *x, size_t n) {
    (void)lib;
    return said("maximum", idist_all_reduce(x, x, n, IDIST_F64, IDIST_MAX, NULL));
}

static void *rule_alloc_idist(const rule_library *lib, size_t nbytes) {
    (void)lib;
    return idist_alloc(nbytes, NULL);
}

static void rule_free_idist(const rule_library *lib, void *p, size_t nbytes) {
    (void)lib, (void)nbytes;
    idist_free(p);
}

static int run_rule(const options *o) {
    rule_library lib;
    memset(&lib, 0, sizeof lib);
    lib.name = "idist_perf";
    lib.rank = idist_get_rank();
    lib.n = idist_get_world_size();
    lib.call = rule_call_idist;
    lib.window = o->grouped ? rule_window_group : rule_window_requests;
    lib.barrier = rule_barrier_idist;
    lib.max = rule_max_idist;
    if (o->own_alloc) lib.alloc = rule_alloc_idist, lib.free = rule_free_idist;
    int rc = rule_run(&lib, &o->rule);
    return rc == RULE_REFUSED ? 2 : rc != 0;
}

static int worker(int local_rank, void *arg) {
    bench b;
    (void)local_rank;
    memset(&b, 0, sizeof b);
    b.opt = (const options *)arg;
    if (b.opt->by_rule) return run_rule(b.opt);
    b.kind = &kinds[b.opt->op];
    b.rank = idist_get_rank();
    b.n = idist_get_world_size();
    b.size = idist_dtype_size(b.opt->dtype);
    b.in_place = b.kind->in_place != NEVER && b.opt->in_place != 0;
    if (b.kind->rooted && b.opt->root >= b.n) {
        fprintf(stderr, "idist_perf: -r %d: there are only %d ranks\n", b.opt->root, b.n);
        return 2;
    }
    double *times = (double *)calloc((size_t)b.opt->iterations, sizeof *times);
    if (!times) return 1;
    int result = run_sizes(&b, times);
    free(times);
    return result;
}

static bool has_launcher(void) {
    static const char *const names[] = {"WORLD_SIZE", "IDIST_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE",
                                        "PMI_SIZE", "HOROVOD_SIZE"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const char *value = getenv(names[i]);
        if (value && *value) return true;
    }
    return false;
}

// Keeps the worker's result, which idist_parallel_run does not return when it runs in this process.
typedef struct job {
    options options;
    int result;
} job;

static int run_job(int local_rank, void *arg) {
    job *j = (job *)arg;
    return j->result = worker(local_rank, &j->options);
}

int main(int argc, char **argv) {
    job j;
    idist_desc desc;
    idist_report report;
    memset(&desc, 0, sizeof desc);
    memset(&report, 0, sizeof report);
    report.rank = -1;
    j.options = parse_options(argc, argv);
    j.result = 0;
    desc.report = &report;
    // A benchmark that hangs should report it soon.
    if (!getenv("IDIST_TIMEOUT_MS")) desc.timeout_ms = 120000;
    if (!getenv("IDIST_INIT_TIMEOUT_MS")) desc.init_timeout_ms = 60000;
    if (!has_launcher()) desc.nproc_per_node = j.options.nranks ? j.options.nranks : 2;
    idist_status status = idist_parallel_run(&desc, run_job, &j);
    if (j.result) return j.result;
    if (report.rank >= 0 && report.exit_code == 2) return 2;
    if (status)
        fprintf(stderr, "idist_perf: %s: %s\n", idist_status_name(status), idist_last_error());
    return status ? 1 : 0;
}
