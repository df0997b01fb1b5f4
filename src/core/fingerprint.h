// core/fingerprint.h: the part of a call that two ranks compare
//
// Two ranks may have created different dtypes with the same number. So for a user dtype, `check`
// also carries a tag, which is a hash of the dtype's size and name:
//
//     bits 63 .. 40   the tag
//     bits 39 .. 0    the count, or the low bits of a hash of counts
//
// In all_to_allv each pair of ranks may use a different dtype. The pair's dtype is sent with the
// pair's count (idist__extent_pair) or with its message.
//
// If a plan starts the collective, `root` also carries the number of the plan:
//
//     bits 30 .. 20   the plan's number, never 0
//     bits 19 .. 0    the root, or all ones if there is none
//
// A collective that a plan starts may also match one that is started without a plan. Their roots
// then differ only in the plan's number.
#pragma once

#include "base/text.h"
#include "base/dtype.h"
#include "launch/env.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/world.h"

enum { IDIST__TAG_BITS = 24, IDIST__DTYPE_BY_PAIR = 255 };
#define IDIST__TAGGED_COUNT ((uint64_t)1 << (64 - IDIST__TAG_BITS))

// Returns the tag of a call's user dtype, or 0 if the dtype is not a user dtype. Prefers the tag
// stored in the call, because the program may free the dtype while the call runs and create another
// one.
static uint32_t idist__fingerprint_tag(const idist__world *w, const idist__call *call) {
    int user = idist__dtype_user_number(call->dtype);

    if (user < 0) return 0;
    return call->dtype_tag ? call->dtype_tag : w->user.dtypes[user].tag;
}

static uint64_t idist__fingerprint_tagged(const idist__world *w, const idist__call *call,
                                          uint64_t check) {
    uint64_t tag = idist__fingerprint_tag(w, call);
    return tag ? tag << (64 - IDIST__TAG_BITS) | check % IDIST__TAGGED_COUNT : check;
}

enum {
    IDIST__PLAN_SHIFT = 20,
    IDIST__PLAN_MAX = 2047,
    IDIST__ROOT_MASK = (1 << IDIST__PLAN_SHIFT) - 1
};

static int32_t idist__fingerprint_planned_root(const idist__call *call) {
    uint32_t root = (uint32_t)call->root;
    return call->plan ? (int32_t)(call->plan << IDIST__PLAN_SHIFT | (root & IDIST__ROOT_MASK))
                      : call->root;
}

static uint32_t idist__fingerprint_plan(const idist__fingerprint *print) {
    return print->root < 0 ? 0 : (uint32_t)print->root >> IDIST__PLAN_SHIFT;
}

// Returns the root without the plan's number, or -1 if the call has no root.
static int32_t idist__fingerprint_root(const idist__fingerprint *print) {
    uint32_t root = (uint32_t)print->root & IDIST__ROOT_MASK;
    return root == IDIST__ROOT_MASK ? -1 : (int32_t)root;
}

// Returns true if two ranks make the same call. Plan numbers are compared only if both ranks use a
// plan.
static bool idist__fingerprint_equal(const idist__fingerprint *a, const idist__fingerprint *b) {
    idist__fingerprint first, second;

    if (memcmp(a, b, sizeof *a) == 0) return true;
    if (idist__fingerprint_plan(a) && idist__fingerprint_plan(b)) return false;
    first = *a;
    second = *b;
    first.root = idist__fingerprint_root(a);
    second.root = idist__fingerprint_root(b);

    return memcmp(&first, &second, sizeof first) == 0;
}

// Returns the count stored in a fingerprint.
static uint64_t idist__fingerprint_count(const idist__fingerprint *print) {
    return print->dtype >= IDIST_DTYPE_USER ? print->check % IDIST__TAGGED_COUNT : print->check;
}

// Returns true if a message with this fingerprint can be nbytes long.
IDIST__UNUSED static bool idist__fingerprint_has_nbytes(const idist__fingerprint *print,
                                                        uint64_t nbytes) {
    uint64_t count = idist__fingerprint_count(print);

    if (count > SIZE_MAX / 16) return false;
    if (print->dtype < IDIST_DTYPE_USER)
        return nbytes == count * idist_dtype_size((idist_dtype)print->dtype);
    if (!count) return !nbytes;
    return nbytes % count == 0 && nbytes / count <= IDIST__DTYPE_MAX_NBYTES;
}

static idist__fingerprint idist__fingerprint_of_call(const idist__world *w, const idist__call *call,
                                                     uint32_t seq) {
    idist__fingerprint print;

    memset(&print, 0, sizeof print);
    // Messages are compared by `kind`, not by `label`: a probe counts as a receive.
    print.kind = (uint8_t)(idist__kind_is_p2p(call->kind) ? call->kind : call->label);
    print.dtype =
        (uint8_t)(call->kind == IDIST__ALL_TO_ALLV ? IDIST__DTYPE_BY_PAIR : (int)call->dtype);
    print.op = (uint8_t)call->op;
    print.root = idist__fingerprint_planned_root(call);
    print.check =
        call->kind == IDIST__ALL_TO_ALLV ? 0 : idist__fingerprint_tagged(w, call, call->check);
    print.seq = seq;

    return print;
}

// Returns the fingerprint of a task. If the task is part of a larger call, the ranks compare the
// larger call, which the user made. Then only the sequence number and the algorithm are the task's
// own.
static idist__fingerprint idist__fingerprint_of_task(const idist__task *t,
                                                     idist__algorithm algorithm) {
    idist__fingerprint print = t->whole;

    if (print.kind) {
        print.whole = print.seq;
        print.seq = t->seq;
        print.algorithm = (uint8_t)(algorithm | (print.algorithm & IDIST__ON_DEVICE));
        return print;
    }

    print = idist__fingerprint_of_call(t->group->w, &t->call, t->seq);
    print.algorithm = (uint8_t)algorithm;

    return print;
}

// Returns the value that both ranks of a pair must agree on for the elements that one rank sends to
// the other in a v-form. Returns 0 if there are no elements.
//
//     bits 63 .. 56   the dtype's number, which the fingerprint of an all_to_allv does not contain
//     bits 55 .. 40   for a user dtype: the low bits of its tag
//     below           the count
static uint64_t idist__fingerprint_pair(const idist__world *w, const idist__call *call,
                                        uint64_t count) {
    uint64_t tag = idist__fingerprint_tag(w, call) & 0xffff;
    return count ? (uint64_t)(uint8_t)call->dtype << 56 | tag << 40 | count : 0;
}

static uint64_t idist__fingerprint_pair_count(uint64_t pair) {
    bool user = (pair >> 56) >= IDIST_DTYPE_USER;
    return pair & (((uint64_t)1 << (user ? 40 : 56)) - 1);
}

// Returns the name of the field in which the two values of idist__fingerprint_pair differ.
static const char *idist__fingerprint_pair_difference(uint64_t sent, uint64_t expected) {
    uint64_t differs = sent ^ expected;
    bool user = (sent >> 56) >= IDIST_DTYPE_USER;

    if (!sent || !expected) return "count";
    if (differs >> 56) return "dtype";
    return user && differs >> 40 ? "definition of the dtype" : "count";
}

// Returns the name of the field in which two calls differ, or NULL if the calls match.
IDIST__UNUSED static const char *idist__fingerprint_difference(const idist__fingerprint *a,
                                                               const idist__fingerprint *b) {
    bool by_pair = a->kind == IDIST__ALL_TO_ALLV;

    if (a->kind != b->kind) return "operation";
    if (a->dtype != b->dtype && !by_pair) return "dtype";
    if (a->op != b->op) return "op";
    if (idist__fingerprint_root(a) != idist__fingerprint_root(b)) return "root";
    if (a->dtype >= IDIST_DTYPE_USER && !by_pair && (a->check ^ b->check) >= IDIST__TAGGED_COUNT)
        return "definition of the dtype";
    if (a->check != b->check && !by_pair) return a->kind == IDIST__NEW_GROUP ? "group" : "count";
    if ((a->algorithm ^ b->algorithm) & IDIST__ON_DEVICE) return "memory";
    if (a->algorithm != b->algorithm) return "algorithm";
    if (!idist__fingerprint_plan(a) || !idist__fingerprint_plan(b)) return NULL;

    return idist__fingerprint_plan(a) != idist__fingerprint_plan(b) ? "plan" : NULL;
}

// Appends the arguments of a call, for example " (F32 x 1024, SUM)".
static void idist__fingerprint_add_arguments(const idist__world *w, const idist__fingerprint *print,
                                             idist__kind kind, char *buf, size_t cap) {
    int root = idist__fingerprint_root(print);

    if (kind == IDIST__BARRIER || kind == IDIST__ALL_TO_ALLV || !idist__kind_is_collective(kind)) {
        if (print->algorithm & IDIST__ON_DEVICE) idist__text_append(buf, cap, " (on a device)");
        return;
    }

    idist__text_append(buf, cap, " (%s",
                       idist__world_dtype_name(w, idist__world_dtype(w, print->dtype)));
    if (!idist__kind_is_v(kind))
        idist__text_append(buf, cap, " x %llu",
                           (unsigned long long)idist__fingerprint_count(print));
    if (idist__kind_reduces(kind))
        idist__text_append(buf, cap, ", %s", idist_op_name((idist_op)print->op));
    if (root >= 0) idist__text_append(buf, cap, ", root %d", root);
    idist__text_append(buf, cap, print->algorithm & IDIST__ON_DEVICE ? ", on a device)" : ")");
}

// Writes the description of a call, for example "all_reduce #42 (F32 x 1024, SUM) by plan 2".
static void idist__fingerprint_text(const idist__world *w, const idist__fingerprint *print,
                                    char *buf, size_t cap) {
    idist__kind kind = print->kind < IDIST__KIND_COUNT ? (idist__kind)print->kind : IDIST__NONE;

    snprintf(buf, cap, "%s", idist__kind_names[kind]);
    if (print->seq)
        idist__text_append(buf, cap, " #%u", (unsigned)(print->whole ? print->whole : print->seq));
    idist__fingerprint_add_arguments(w, print, kind, buf, cap);
    if (idist__fingerprint_plan(print))
        idist__text_append(buf, cap, " by plan %u", (unsigned)idist__fingerprint_plan(print));
}
