// ring/msg/combine.h: reduces operands that have arrived
#pragma once

#include "base/fail.h"
#include "base/isa.h"
#include "base/reduce.h"
#include "core/model.h"
#include "ring/msg/ring_model.h"
#include "ring/msg/op.h"

enum { IDIST__OP_PIECE = 4096 };

// Calls a user op. Returns false if the op has thrown an exception; the group has then failed.
IDIST__NOINLINE static bool idist__combine_by_user(const idist__task *t, const void *in,
                                                   void *inout, size_t count, idist_dtype dtype) {
    const idist__op *op = idist__op_of(t);
    const idist__world *w = t->group->w;
    uint32_t mode = idist__mode_enter();
    char cause[400];

    IDIST__CALLBACK(op->user->fn(in, inout, count, dtype, op->user->arg));
    idist__mode_leave(mode);
    if (!idist__me.thrown[0]) return true;

    snprintf(cause, sizeof cause, "the user op of rank %d on %s threw an exception: %s",
             w->group.rank, w->about.hostname, idist__me.thrown);
    idist__me.thrown[0] = 0;
    idist__ring_fail(idist__ring_of(w), t->group, IDIST_ERR_CALLBACK, cause);

    return false;
}

// Computes acc = lo (op) hi over count elements. acc may be equal to lo, to hi or to neither. A
// user op works in place on its second operand, so an operand that must survive is copied first, in
// pieces. If the op throws an exception, the group fails, and nothing more is sent for this group.
static void idist__combine(const idist__task *t, char *acc, const char *lo, const char *hi,
                           size_t count, idist_dtype dtype) {
    const idist__op *op = idist__op_of(t);
    uint64_t some[IDIST__OP_PIECE / sizeof(uint64_t)];
    char *piece = op->element ? op->element : (char *)some;
    size_t at, k, most = op->element ? 1 : sizeof some / op->size;

    if (!op->user || !op->user->fn) {
        idist__reduce_by(op->reduce, acc, lo, hi, count);
        return;
    }

    if (acc == hi) {
        (void)idist__combine_by_user(t, lo, acc, count, dtype);
        return;
    }

    for (at = 0; at < count; at += k) {
        k = count - at < most ? count - at : most;
        memcpy(piece, hi + at * op->size, k * op->size);
        if (!idist__combine_by_user(t, lo + at * op->size, piece, k, dtype)) return;
        memcpy(acc + at * op->size, piece, k * op->size);
    }
}
