// ring/engine/ask.h: finds the members that hold up a call, and the ranks that they wait for
//
// Functions: idist__ask_*, idist__absent_*.
#pragma once

#include "os/clock.h"
#include "base/text.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/task.h"
#include "core/timer.h"
#include "ring/msg/ring_model.h"
#include "ring/msg/link.h"
#include "ring/share/share.h"
#include "ring/engine/deadlock.h"

//------------------------------------------------------------------------------
// which members hold up a call
//
// For each member, a rank records the last call that the member is known to have entered
// (idist__seen). Once the rank has sent WAITS, it also knows which members have answered.
//------------------------------------------------------------------------------

// Returns the world rank whose message is arriving for a receive, or -1 if no message has begun to
// arrive.
static int idist__absent_sender(const idist__task *t) {
    const idist_group *g = t->group;
    const idist__ring *ring = idist__ring_of(g->w);
    int i;

    for (i = 0; i < g->size; i++) {
        const idist__link *l = &ring->links[g->ranks[i]];
        bool is_sender = l->in_transfer && l->in_transfer->task == t;

        if (is_sender || idist__deadlock_has_transfer(&l->receiving, t)) return g->ranks[i];
    }

    return -1;
}

typedef enum idist__absence { // ways in which a member may hold up a call; a set of bits
    IDIST__ABSENT = 1,        // the member has not entered the call
    IDIST__SILENT = 2,        // the member was asked and has not answered
    IDIST__NEEDED = 4         // this rank waits for something that only the member can send
} idist__absence;

static int idist__absent_how(const idist__task *t, int rank) {
    const idist_group *g = t->group;
    const idist__seen *seen = &idist__ring_group_of(g)->seen[rank];
    const idist__link *l = &idist__ring_of(g->w)->links[g->ranks[rank]];
    bool entered = (int32_t)(seen->seq - t->seq) >= 0;
    int64_t asked_ns = idist__timer_asked_ns(t);
    int absence = 0;

    if (t->whole.kind && seen->fingerprint.whole == t->whole.seq)
        entered = true; // an earlier step of the same larger call counts too
    if (!entered) absence |= IDIST__ABSENT;
    if (asked_ns && l->here_ns < asked_ns && !l->bye) absence |= IDIST__SILENT;
    if (idist__deadlock_needs(l, t, rank)) absence |= IDIST__NEEDED;

    return absence;
}

// Returns the first member at or after `rank` that is absent in all of the given ways, or the
// group's size if there is none.
static int idist__absent_next(const idist__task *t, int rank, int absence) {
    const idist_group *g = t->group;

    while (rank < g->size && (rank == g->rank || (idist__absent_how(t, rank) & absence) != absence))
        rank++;

    return rank;
}

// Returns the world rank that a call waits for, or -1 if it waits for no particular rank. Prefers a
// member that does not answer, then one whose data this rank needs, then one that has not entered
// the call.
static int idist__absent_whom(const idist__task *t) {
    static const int order[] = {IDIST__ABSENT | IDIST__SILENT, IDIST__SILENT | IDIST__NEEDED,
                                IDIST__ABSENT | IDIST__NEEDED, IDIST__NEEDED, IDIST__ABSENT};
    const idist_group *g = t->group;
    int i, rank;

    if (t->call.kind == IDIST__RECV && !idist__deadlock_is_unmatched(t))
        return idist__absent_sender(t);
    if (idist__kind_is_p2p(t->call.kind)) return t->call.root < 0 ? -1 : g->ranks[t->call.root];

    idist__share_update_seen(t);

    for (i = 0; i < (int)IDIST__COUNT_OF(order); i++) {
        rank = idist__absent_next(t, 0, order[i]);
        if (rank < g->size) return g->ranks[rank];
    }

    return -1;
}

//------------------------------------------------------------------------------
// which ranks those members wait for
//
// A rank that holds up a call may itself wait for another rank, which may be stopped. So before a
// call fails or a warning is written, this rank sends ASK to the ranks that it waits for. Each of
// these ranks answers with the rank that it waits for (ANSWER), and that rank is asked next:
//
//     rank 0            rank 1              rank 2 (stopped)
//       | --- ASK ------> |
//       |                 | --- ASK --------> |     because of PASS_ON: does it answer rank 1?
//       | <-- ANSWER 2 -- |                   |
//       | --- ASK ----------------------------> |
//
// Halfway through the remaining time, the ranks are asked again. At that point each of them knows
// whether the rank that it waits for answers. A rank has at most one unanswered ASK to each other
// rank, so the number of frames queued in a link is bounded. No ASK is sent before a call is nearly
// out of time.
//------------------------------------------------------------------------------

enum { IDIST__ASK_MOST = 8 }; // limit on the members that a call asks, and on the ranks in a chain
// Time without an answer after which a rank counts as silent.
#define IDIST__ASK_SILENCE_NS (50 * IDIST__MS)

// Returns true if a rank was asked and does not answer.
static bool idist__ask_is_silent(const idist__link *l) {
    return l->asks && l->open && idist__os_clock_now_ns() - l->asked_ns >= IDIST__ASK_SILENCE_NS;
}

static void idist__ask_rank(idist__ring *ring, int rank, uint8_t flags) {
    idist__link *l = &ring->links[rank];
    idist__frame frame;

    if (rank == ring->w->group.rank || l->asks) return;
    idist__link_want(ring, l);
    if (!idist__link_is_connected(l)) return;
    l->asks = true;
    l->asked_ns = idist__os_clock_now_ns();

    memset(&frame, 0, sizeof frame);
    frame.type = IDIST__ASK;
    frame.flags = flags;
    idist__link_control(ring, l, &frame, NULL);
}

// Asks a rank, unless it has already been asked in this round.
static void idist__ask_once(idist__ring *ring, int rank) {
    if (ring->links[rank].asked_ns < ring->asking_ns) idist__ask_rank(ring, rank, IDIST__PASS_ON);
}

// Begins a round of ASK frames for a call that is nearly out of time. Calls that run out of time at
// about the same time share a round.
static void idist__ask_begin(idist__ring *ring, const idist__task *t) {
    static const int order[] = {IDIST__NEEDED, IDIST__ABSENT};
    int64_t now_ns = idist__os_clock_now_ns(), until_ns, again_ns;
    int whom = idist__absent_whom(t), i, rank, count = 0;

    if (now_ns - ring->asking_ns > IDIST__ASK_SILENCE_NS) ring->asking_ns = now_ns;
    (void)idist__timer_ask_at(t, &until_ns);
    again_ns = now_ns + (until_ns - now_ns) / 2;
    if (!ring->ask_again_ns || again_ns < ring->ask_again_ns) ring->ask_again_ns = again_ns;
    if (whom >= 0) idist__ask_once(ring, whom);
    if (idist__kind_is_p2p(t->call.kind)) return;

    for (i = 0; i < (int)IDIST__COUNT_OF(order); i++) {
        rank = idist__absent_next(t, 0, order[i]);

        for (; rank < t->group->size && count < IDIST__ASK_MOST; count++) {
            idist__ask_once(ring, t->group->ranks[rank]);
            rank = idist__absent_next(t, rank + 1, order[i]);
        }
    }
}

// When it is time, asks again each rank that has answered in this round.
static void idist__ask_again(idist__ring *ring) {
    int i;

    if (idist__os_clock_now_ns() < ring->ask_again_ns) return;
    ring->ask_again_ns = 0;

    for (i = 0; i < ring->w->group.size; i++)
        if (ring->links[i].answered_ns > ring->asking_ns) idist__ask_rank(ring, i, IDIST__PASS_ON);
}

// Returns the call in which the program waits, or NULL if there is none.
static const idist__task *idist__ask_call(const idist__world *w) {
    const idist__task *t, *oldest = NULL;

    for (t = w->tasks.running; t && w->wait.blocked_count; t = t->next) {
        if (t->group->inner || idist__task_is_detached(t) || t->state == IDIST__TASK_ON_DEVICE)
            continue;
        if (!idist__task_is_async(t)) return t;
        oldest = t;
    }

    return oldest;
}

// Returns the rank that `rank` waits for, according to its answer in this round. Returns -1 if
// `rank` has not answered or waits for no rank.
static int idist__ask_answered(const idist__ring *ring, int rank) {
    const idist__link *l = &ring->links[rank];

    if (idist__ask_is_silent(l) || !l->answered_ns || l->answered_ns < ring->asking_ns) return -1;
    return (int)l->answer.aux - 1;
}

// Follows the answers, beginning with the answer of `rank`, until one is missing or a rank occurs
// twice. Stores the ranks in chain[], beginning with `rank`, and returns their number, at most
// IDIST__ASK_MOST.
static int idist__ask_follow(const idist__ring *ring, int rank, int *chain) {
    int count = 1, i;

    chain[0] = rank;

    while (count < IDIST__ASK_MOST) {
        bool is_end = ring->links[rank].answer.flags & IDIST__UNANSWERED;

        if (rank == ring->w->group.rank) break;
        rank = idist__ask_answered(ring, rank);
        if (rank < 0) break;
        for (i = 0; i < count && chain[i] != rank; i++) continue;
        if (i < count) break;
        chain[count++] = rank;
        if (is_end) break;
    }

    return count;
}

// Appends to a text the chain in which each rank waits for the next, beginning with `rank`. Names
// only the two ends of a long chain. Returns true if there was anything to append.
static bool idist__ask_explain(const idist__ring *ring, int rank, char *text, size_t capacity) {
    int chain[IDIST__ASK_MOST], count = idist__ask_follow(ring, rank, chain), i;
    const idist__rank_info *nodes = ring->w->nodes;
    const idist__link *l = NULL;

    for (i = 0; i + 1 < count; i++) {
        l = &ring->links[chain[i]];
        if (i == 1 && count > 3) idist__text_append(text, capacity, "; ...");
        if (i && i < count - 2) continue;
        idist__text_append(text, capacity, "; rank %d waits for rank %d on %s in %s", chain[i],
                           chain[i + 1], nodes[chain[i + 1]].hostname,
                           idist__kind_names[l->answer.fingerprint.kind]);
    }

    rank = chain[count - 1];

    if (l && l->answer.flags & IDIST__UNANSWERED)
        idist__text_append(text, capacity, ", which does not answer rank %d", chain[count - 2]);
    else if (idist__ask_is_silent(&ring->links[rank]))
        idist__text_append(text, capacity, "; rank %d does not answer rank %d", rank,
                           ring->w->group.rank);
    else return count > 1;

    return true;
}
