// algo.c - checks which algorithm a collective uses for each operation and size.
//
// Prints the table for each kind of group and compares it with the table in this file.
#define IDIST_IMPLEMENTATION
#include "idist.h"

#include "tap.h"

enum { N_SIZES = 14, N_GROUPS = 4, N_RANKS = 4 };

// Sizes in bytes of one block, or of the whole contribution if the contribution is one block.
static const size_t sizes[N_SIZES] = {0,     1024,  2048,  2049,   4096,   4097,   16384,
                                      16385, 65536, 65537, 131072, 131073, 262144, 262145};

static const char letters[] = "?LBC-FH"; // indexed by idist__algorithm

static const char *const group_names[N_GROUPS] = {"messages", "shared memory",
                                                  "hosts, ranks in order", "hosts, ranks mixed"};

typedef struct table_row {
    idist__kind kind;
    const char *letters[N_GROUPS];
} table_row;

static const table_row table[] = {
    // clang-format off
    //                     messages          shared memory     hosts, in order   hosts, mixed
  {IDIST__BARRIER,        {"LLLLLLLLLLLLLL", "FFFFFFFFFFFFFF", "HHHHHHHHHHHHHH", "HHHHHHHHHHHHHH"}},
  {IDIST__BROADCAST,      {"LLLLLLLLLLLLLB", "FFFFFCCCCCCCCC", "HHHHHHHHHHHHHH", "HHHHHHHHHHHHHH"}},
  {IDIST__REDUCE,         {"LLLLLLLLLLLLLB", "FFFFFCCCCCCCCC", "HHHHHHHHHHHHHH", "HHHHHHHHHHHHHH"}},
  {IDIST__ALL_REDUCE,     {"LLLLLLLLLBBBBB", "FFFFFCCCCCCCCC", "HHHHHHHHHHHHHH", "HHHHHHHHHHHHHH"}},
  {IDIST__REDUCE_SCATTER, {"LLLLLLLBBBBBBB", "FFCCCCCCCCCCCC", "HHHHHHHHHHHHHH", "LLLLLLLBBBBBBB"}},
  {IDIST__ALL_GATHER,     {"LLLLLLLBBBBBBB", "FFFFFCCCCCCCCC", "HHHHHHHHHHHHHH", "LLLLLLLBBBBBBB"}},
  {IDIST__GATHER,         {"LLLBBBBBBBBBBB", "FFFFFCCCCCCCCC", "LLLBBBBBBBBBBB", "LLLBBBBBBBBBBB"}},
  {IDIST__SCATTER,        {"LLLBBBBBBBBBBB", "FFCCCCCCCCCCCC", "LLLBBBBBBBBBBB", "LLLBBBBBBBBBBB"}},
  {IDIST__ALL_TO_ALL,     {"LLLBBBBBBBBBBB", "FFCCCCCCCCCCCC", "LLLBBBBBBBBBBB", "LLLBBBBBBBBBBB"}},
  {IDIST__SCAN,           {"LLLLLLLLLLLBBB", "FFFFFCCCCCCCCC", "LLLLLLLLLLLBBB", "LLLLLLLLLLLBBB"}},
  {IDIST__EXSCAN,         {"LLLLLLLLLLLBBB", "FFFFFCCCCCCCCC", "LLLLLLLLLLLBBB", "LLLLLLLLLLLBBB"}},
  {IDIST__ALL_GATHERV,    {"BBBBBBBBBBBBBB", "CCCCCCCCCCCCCC", "BBBBBBBBBBBBBB", "BBBBBBBBBBBBBB"}},
  {IDIST__GATHERV,        {"BBBBBBBBBBBBBB", "CCCCCCCCCCCCCC", "BBBBBBBBBBBBBB", "BBBBBBBBBBBBBB"}},
  {IDIST__SCATTERV,       {"BBBBBBBBBBBBBB", "CCCCCCCCCCCCCC", "BBBBBBBBBBBBBB", "BBBBBBBBBBBBBB"}},
  {IDIST__ALL_TO_ALLV,    {"BBBBBBBBBBBBBB", "CCCCCCCCCCCCCC", "BBBBBBBBBBBBBB", "BBBBBBBBBBBBBB"}},
  {IDIST__REDUCE_SCATTERV,{"LLLLLLLBBBBBBB", "CCCCCCCCCCCCCC", "LLLLLLLBBBBBBB", "LLLLLLLBBBBBBB"}},
    // clang-format on
};

static idist__world world;
static idist__segment segment;
static idist__share share;
static idist__ring_group parts[N_GROUPS];
static idist_group groups[N_GROUPS];

static void make_groups(void) {
    for (int i = 0; i < N_GROUPS; i++) {
        groups[i].w = &world;
        groups[i].size = N_RANKS;
        groups[i].impl = &parts[i];
    }

    share.shm = &segment;
    share.chunk_nbytes = (size_t)384 * 1024;
    parts[1].share = &share;
    parts[2].nhosts = parts[3].nhosts = 2;
    parts[2].in_order = true;
}

static char letter_of(int group, idist__kind kind, idist_dtype dtype, size_t nbytes,
                      const idist__user_op *user) {
    idist__call c;
    idist__algorithm algorithm;

    memset(&c, 0, sizeof c);
    c.kind = kind;
    c.dtype = dtype;
    c.count = kind == IDIST__BARRIER ? 0 : nbytes / idist_dtype_size(dtype);
    c.u.user = user;
    if (user) c.op = (idist_op)IDIST_OP_USER;
    algorithm = idist__choose_algorithm(&groups[group], &c);

    return (unsigned)algorithm < sizeof letters - 1 ? letters[algorithm] : '?';
}

static void letters_of(char *text, int group, idist__kind kind, idist_dtype dtype,
                       const idist__user_op *user) {
    for (int i = 0; i < N_SIZES; i++) text[i] = letter_of(group, kind, dtype, sizes[i], user);
    text[N_SIZES] = 0;
}

static void check_table(int group) {
    char text[N_SIZES + 1];
    int failed = 0;

    tap_diag("%s, %d ranks: L latency, B bandwidth, C chunked, F flat, H by host",
             group_names[group], N_RANKS);

    for (size_t row = 0; row < sizeof table / sizeof *table; row++) {
        letters_of(text, group, table[row].kind, IDIST_I8, NULL);
        tap_diag("  %-14s %s", idist__kind_names[table[row].kind], text);
        if (strcmp(text, table[row].letters[group]) == 0) continue;
        tap_diag("  %-14s %s was expected", "", table[row].letters[group]);
        failed++;
    }

    tap_ok(failed == 0, "the table of a group: %s", group_names[group]);
}

static void check_one(const char *what, int group, idist__kind kind, idist_dtype dtype,
                      const idist__user_op *user, const char *expected) {
    char text[N_SIZES + 1];

    letters_of(text, group, kind, dtype, user);
    tap_ok(strcmp(text, expected) == 0, "%s", what);
    if (strcmp(text, expected) != 0) tap_diag("  got %s expected %s", text, expected);
}

static void check_setting(idist__algorithm setting, const char *name, const char *messages,
                          const char *shared, const char *hosts) {
    char what[100];
    const char *expected[3] = {messages, shared, hosts};

    world.cfg.algorithm = (int)setting;

    for (int i = 0; i < 3; i++) {
        snprintf(what, sizeof what, "all_reduce under IDIST_ALGO=%s: %s", name, group_names[i]);
        check_one(what, i, IDIST__ALL_REDUCE, IDIST_I8, NULL, expected[i]);
    }

    world.cfg.algorithm = IDIST__ALGO_AUTO;
}

static void function(const void *in, void *inout, size_t count, idist_dtype dtype, void *arg) {
    (void)in, (void)inout, (void)count, (void)dtype, (void)arg;
}

int main(void) {
    idist__user_op ordered, scaled;

    tap_deadline(20);
    memset(&ordered, 0, sizeof ordered);
    ordered.fn = function;
    memset(&scaled, 0, sizeof scaled);
    scaled.commutative = true;
    scaled.factor = 0.5;
    make_groups();

    for (int i = 0; i < N_GROUPS; i++) check_table(i);

    check_setting(IDIST__ALGO_LATENCY, "latency", "LLLLLLLLLLLLLL", "LLLLLLLLLLLLLL",
                  "LLLLLLLLLLLLLL");
    check_setting(IDIST__ALGO_BANDWIDTH, "bandwidth", "LBBBBBBBBBBBBB", "LBBBBBBBBBBBBB",
                  "LBBBBBBBBBBBBB");
    check_setting(IDIST__ALGO_CHUNKED, "chunked", "LLLLLLLLLBBBBB", "FCCCCCCCCCCCCC",
                  "LLLLLLLLLBBBBB");

    check_setting(IDIST__ALGO_REMOTE, "remote", "LLLLLLLLLBBBBB", "FFFFFCCCCCCCCC",
                  "HHHHHHHHHHHHHH");

    check_one("an all_reduce of F16 counts as F32", 0, IDIST__ALL_REDUCE, IDIST_F16, NULL,
              "LLLLLLLLBBBBBB");
    check_one("an all_reduce of F16 does not go by host", 2, IDIST__ALL_REDUCE, IDIST_F16, NULL,
              "LLLLLLLLBBBBBB");
    check_one("a scaled sum of F16 does not go through shared memory", 1, IDIST__ALL_REDUCE,
              IDIST_F16, &scaled, "LLLLLLLLBBBBBB");
    check_one("an all_reduce that does not commute keeps the order", 0, IDIST__ALL_REDUCE, IDIST_I8,
              &ordered, "LLLLLLLLLLLLLL");
    check_one("... over hosts too", 2, IDIST__ALL_REDUCE, IDIST_I8, &ordered, "LLLLLLLLLLLLLL");
    check_one("a scan that does not commute may be a chain", 0, IDIST__SCAN, IDIST_I8, &ordered,
              "LLLLLLLLLLLBBB");

    return tap_done();
}
