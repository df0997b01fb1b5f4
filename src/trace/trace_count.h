// trace/trace_count.h: counts the communication calls of a thread
//
// A thread that counts (train/report/run_report.h) adds up its calls, their bytes, and the time
// from the beginning to the end of each call or wait. A call within another one, such as an
// all_reduce within idist_ddp_wait, adds its bytes but not its time.
#pragma once

#include "os/clock.h"
#include "core/model.h"
#include "core/extent.h"
#include "core/check.h"

static __thread struct idist__trace_counter {
    const void *owner; // NULL if the thread does not count
    int depth;         // calls and waits of the thread that have begun and not ended
    int64_t begun_ns;  // when the outermost of them began
    int64_t waited_ns;
    uint64_t calls, sent_nbytes;
} idist__trace_counter;

// Starts to count from zero, or stops if `owner` is NULL.
IDIST__UNUSED static void idist__trace_count_from_zero(const void *owner) {
    memset(&idist__trace_counter, 0, sizeof idist__trace_counter);
    idist__trace_counter.owner = owner;
}

// Returns the number of elements in n blocks, without the gaps between the blocks.
static size_t idist__trace_count_blocks(const size_t *counts, int n) {
    size_t total = 0;
    int i;

    for (i = 0; i < n; i++) total += counts[i];
    return total;
}

// Adds a call, and the bytes that this rank sends in it.
static void idist__trace_count_add(const idist_group *g, const idist__call *call) {
    idist__extent extent;

    idist__trace_counter.calls++;
    if (idist__check_call(g, call) != IDIST_OK || idist__extent_of(g, call, &extent) != IDIST_OK)
        return;
    if (call->kind == IDIST__BROADCAST && call->root == g->rank) extent.send = call->count;
    if (call->kind == IDIST__ALL_TO_ALLV ||
        (call->kind == IDIST__SCATTERV && call->root == g->rank))
        extent.send = idist__trace_count_blocks(call->sendcounts, g->size);
    idist__trace_counter.sent_nbytes += extent.send * idist_dtype_size(call->dtype);
}

// Called when a call or a wait begins.
static void idist__trace_count_enter(void) {
    if (!idist__trace_counter.owner) return;
    if (!idist__trace_counter.depth++) idist__trace_counter.begun_ns = idist__os_clock_now_ns();
}

// Called when a call or a wait ends.
static void idist__trace_count_leave(void) {
    struct idist__trace_counter *me = &idist__trace_counter;

    if (!me->owner || !me->depth || --me->depth) return;
    me->waited_ns += idist__os_clock_now_ns() - me->begun_ns;
}
