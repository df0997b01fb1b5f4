// core/kind.h: the operations, and what kinds of them there are
#pragma once

typedef enum idist__kind {
    IDIST__NONE,
    IDIST__ALL_REDUCE,
    IDIST__REDUCE,
    IDIST__BROADCAST,
    IDIST__BARRIER,
    IDIST__ALL_GATHER,
    IDIST__GATHER,
    IDIST__SCATTER,
    IDIST__REDUCE_SCATTER,
    IDIST__ALL_TO_ALL,
    IDIST__SCAN,
    IDIST__EXSCAN,
    IDIST__ALL_GATHERV,
    IDIST__GATHERV,
    IDIST__SCATTERV,
    IDIST__ALL_TO_ALLV,
    IDIST__REDUCE_SCATTERV,
    IDIST__SEND,
    IDIST__RECV,
    // Public calls that are built from those above. They only label the fingerprint.
    IDIST__BROADCAST_BYTES,
    IDIST__ALL_GATHER_BYTES,
    IDIST__NEW_GROUP,
    IDIST__SPLIT,
    IDIST__ONE_RANK_FIRST,
    IDIST__ONE_RANK_ONLY,
    IDIST__FINALIZE,
    IDIST__FIRST_DEVICE_CALL,
    IDIST__PROBE,
    IDIST__IPROBE,
    IDIST__MPROBE,
    IDIST__IMPROBE,
    IDIST__MRECV,
    IDIST__BROADCAST_ALLOC,
    IDIST__ALL_GATHER_ALLOC,
    IDIST__NEW_GROUP_BY_MEMBERS,
    IDIST__KIND_COUNT
} idist__kind;

static const char *const idist__kind_names[IDIST__KIND_COUNT] = {
    "nothing",
    "all_reduce",
    "reduce",
    "broadcast",
    "barrier",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "scan",
    "exscan",
    "all_gatherv",
    "gatherv",
    "scatterv",
    "all_to_allv",
    "reduce_scatterv",
    "send",
    "recv",
    "broadcast_bytes",
    "all_gather_bytes",
    "new_group",
    "split",
    "one_rank_first",
    "one_rank_only",
    "finalize",
    "first_device_call",
    "probe",
    "iprobe",
    "mprobe",
    "improbe",
    "mrecv",
    "broadcast_alloc",
    "all_gather_alloc",
    "new_group_by_members",
};

static bool idist__kind_reduces(idist__kind kind) {
    return kind == IDIST__ALL_REDUCE || kind == IDIST__REDUCE || kind == IDIST__REDUCE_SCATTER ||
           kind == IDIST__REDUCE_SCATTERV || kind == IDIST__SCAN || kind == IDIST__EXSCAN;
}

static bool idist__kind_is_p2p(idist__kind kind) {
    return kind == IDIST__SEND || kind == IDIST__RECV;
}

// The v-forms, in which the blocks of the ranks may have different counts.
static bool idist__kind_is_v(idist__kind kind) {
    return kind >= IDIST__ALL_GATHERV && kind <= IDIST__REDUCE_SCATTERV;
}

// Those in which only the two ranks of a pair know what one sends to the other.
static bool idist__kind_is_by_pair(idist__kind kind) {
    return kind == IDIST__GATHERV || kind == IDIST__SCATTERV || kind == IDIST__ALL_TO_ALLV;
}

// Each rank gets one block of what is reduced.
IDIST__UNUSED static bool idist__kind_scatters_sum(idist__kind kind) {
    return kind == IDIST__REDUCE_SCATTER || kind == IDIST__REDUCE_SCATTERV;
}

static bool idist__kind_has_root(idist__kind kind) {
    return kind == IDIST__REDUCE || kind == IDIST__BROADCAST || kind == IDIST__GATHER ||
           kind == IDIST__SCATTER || kind == IDIST__GATHERV || kind == IDIST__SCATTERV;
}
