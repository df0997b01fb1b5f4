// core/kind.h: the operations and their traits
//
// A row says everything that is the same for all calls of an operation. Fingerprints contain the
// numbers of the rows, so a new row goes at the end. A row without traits only labels a
// fingerprint: most such rows are public calls that are built from other operations.
#pragma once

enum {
    IDIST__COLLECTIVE = 1,   // all members take part
    IDIST__REDUCES = 2,      // has an op
    IDIST__SCATTERS_SUM = 4, // each rank gets one block of the result
    IDIST__ROOTED = 8,
    IDIST__V = 16,       // the blocks of the ranks may have different counts
    IDIST__BY_PAIR = 32, // only the two ranks of a pair know what one sends to the other
    IDIST__P2P = 64,
    IDIST__GIVES_BLOCKS = 128, // a contribution is one block per rank
    IDIST__TAKES_BLOCKS = 256  // a result is one block per rank, in rank order
};

// clang-format off
#define IDIST__KIND_MAP(X)                                                                       \
    X(NONE, "nothing", 0)                                                                        \
    X(ALL_REDUCE, "all_reduce", IDIST__COLLECTIVE | IDIST__REDUCES)                              \
    X(REDUCE, "reduce", IDIST__COLLECTIVE | IDIST__REDUCES | IDIST__ROOTED)                      \
    X(BROADCAST, "broadcast", IDIST__COLLECTIVE | IDIST__ROOTED)                                 \
    X(BARRIER, "barrier", IDIST__COLLECTIVE)                                                     \
    X(ALL_GATHER, "all_gather", IDIST__COLLECTIVE | IDIST__TAKES_BLOCKS)                         \
    X(GATHER, "gather", IDIST__COLLECTIVE | IDIST__ROOTED | IDIST__TAKES_BLOCKS)                 \
    X(SCATTER, "scatter", IDIST__COLLECTIVE | IDIST__ROOTED | IDIST__GIVES_BLOCKS)               \
    X(REDUCE_SCATTER, "reduce_scatter",                                                          \
      IDIST__COLLECTIVE | IDIST__REDUCES | IDIST__SCATTERS_SUM | IDIST__GIVES_BLOCKS)            \
    X(ALL_TO_ALL, "all_to_all", IDIST__COLLECTIVE | IDIST__GIVES_BLOCKS | IDIST__TAKES_BLOCKS)   \
    X(SCAN, "scan", IDIST__COLLECTIVE | IDIST__REDUCES)                                          \
    X(EXSCAN, "exscan", IDIST__COLLECTIVE | IDIST__REDUCES)                                      \
    X(ALL_GATHERV, "all_gatherv", IDIST__COLLECTIVE | IDIST__V | IDIST__TAKES_BLOCKS)            \
    X(GATHERV, "gatherv",                                                                        \
      IDIST__COLLECTIVE | IDIST__V | IDIST__BY_PAIR | IDIST__ROOTED | IDIST__TAKES_BLOCKS)       \
    X(SCATTERV, "scatterv",                                                                      \
      IDIST__COLLECTIVE | IDIST__V | IDIST__BY_PAIR | IDIST__ROOTED | IDIST__GIVES_BLOCKS)       \
    X(ALL_TO_ALLV, "all_to_allv",                                                                \
      IDIST__COLLECTIVE | IDIST__V | IDIST__BY_PAIR | IDIST__GIVES_BLOCKS | IDIST__TAKES_BLOCKS) \
    X(REDUCE_SCATTERV, "reduce_scatterv",                                                        \
      IDIST__COLLECTIVE | IDIST__V | IDIST__REDUCES | IDIST__SCATTERS_SUM | IDIST__GIVES_BLOCKS) \
    X(SEND, "send", IDIST__P2P)                                                                  \
    X(RECV, "recv", IDIST__P2P)                                                                  \
    X(BROADCAST_BYTES, "broadcast_bytes", 0)                                                     \
    X(ALL_GATHER_BYTES, "all_gather_bytes", 0)                                                   \
    X(NEW_GROUP, "new_group", 0)                                                                 \
    X(SPLIT, "split", 0)                                                                         \
    X(ONE_RANK_FIRST, "one_rank_first", 0)                                                       \
    X(ONE_RANK_ONLY, "one_rank_only", 0)                                                         \
    X(FINALIZE, "finalize", 0)                                                                   \
    X(FIRST_DEVICE_CALL, "first_device_call", 0)                                                 \
    X(PROBE, "probe", 0)                                                                         \
    X(IPROBE, "iprobe", 0)                                                                       \
    X(MPROBE, "mprobe", 0)                                                                       \
    X(IMPROBE, "improbe", 0)                                                                     \
    X(MRECV, "mrecv", 0)                                                                         \
    X(BROADCAST_ALLOC, "broadcast_alloc", 0)                                                     \
    X(ALL_GATHER_ALLOC, "all_gather_alloc", 0)                                                   \
    X(NEW_GROUP_BY_MEMBERS, "new_group_by_members", 0)
// clang-format on

typedef enum idist__kind {
#define IDIST__X(name, text, traits) IDIST__##name,
    IDIST__KIND_MAP(IDIST__X)
#undef IDIST__X
        IDIST__KIND_COUNT
} idist__kind;

static const char *const idist__kind_names[IDIST__KIND_COUNT] = {
#define IDIST__X(name, text, traits) text,
    IDIST__KIND_MAP(IDIST__X)
#undef IDIST__X
};

// Returns true if the operation has all of these traits.
static inline bool idist__kind_has(idist__kind kind, int traits) {
    static const uint16_t table[IDIST__KIND_COUNT] = {
#define IDIST__X(name, text, traits_) traits_,
        IDIST__KIND_MAP(IDIST__X)
#undef IDIST__X
    };

    return (table[kind] & traits) == traits;
}

static inline bool idist__kind_is_collective(idist__kind kind) {
    return idist__kind_has(kind, IDIST__COLLECTIVE);
}

static inline bool idist__kind_reduces(idist__kind kind) {
    return idist__kind_has(kind, IDIST__REDUCES);
}

static inline bool idist__kind_is_p2p(idist__kind kind) {
    return idist__kind_has(kind, IDIST__P2P);
}

static inline bool idist__kind_is_v(idist__kind kind) { return idist__kind_has(kind, IDIST__V); }

static inline bool idist__kind_is_by_pair(idist__kind kind) {
    return idist__kind_has(kind, IDIST__BY_PAIR);
}

static inline bool idist__kind_gives_blocks(idist__kind kind) {
    return idist__kind_has(kind, IDIST__GIVES_BLOCKS);
}

static inline bool idist__kind_takes_blocks(idist__kind kind) {
    return idist__kind_has(kind, IDIST__TAKES_BLOCKS);
}

static inline bool idist__kind_scatters_sum(idist__kind kind) {
    return idist__kind_has(kind, IDIST__SCATTERS_SUM);
}

static inline bool idist__kind_has_root(idist__kind kind) {
    return idist__kind_has(kind, IDIST__ROOTED);
}
