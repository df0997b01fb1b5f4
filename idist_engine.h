/* idist_engine.h - v0.2.0 - progress of the ring backend - MIT licence

    What makes the calls of the ring backend move. Calls start and are cancelled; frames arrive
    from other ranks and complete sends and receives; a rank with nothing to do sleeps; a call that
    waits too long names the ranks it waits for.

    Part of the implementation of idist: idist_ring.h includes it and puts its entry points into the
    backend's table. Everything runs under the lock of the world, which only sleeping releases.

CONTENTS

      [engine:deadlock]  two ranks that wait for each other in different calls
      [engine:absent]    which members hold up a call
      [engine:ask]       whom those members wait for in turn
      [engine:missing]   names the ranks that a call waits for
      [engine:frame]     what an arriving frame does
      [engine:announce]  tells other members that this rank waits in a call
      [engine:progress]  reads links, writes what is queued, finds links that ended
      [engine:wait]      sleeping, waking, and waiting until everything is written
      [engine:task]      calls start, and are checked against other ranks
      [engine:cancel]    forgetting a call, and telling others that a group failed
      [engine:group]     opening and closing a group, and its groups by host

PATH OF A MESSAGE

    idist__progress_run   a caller polls, or the progress thread does
    idist__progress_move_all       each link in turn: writes what is queued, reads what has arrived
    idist__progress_read   bytes, straight into a large message or through the stage of the link
    idist__progress_parse  cuts the stage into frames and payloads
    idist__incoming_begin     a header is complete: may the peer send this? where does the payload
go? idist__incoming_end       the payload is complete: the receive is done idist__op_run the
algorithm that posted the receive goes on
*/
#ifndef IDIST_ENGINE_H
#define IDIST_ENGINE_H

//------------------------------------------------------------------------------
// [engine:deadlock]  two ranks that wait for each other in different calls
// uses launch:env kind model core:world explain msg:types msg:op msg:failure
// uses share:share host
//
// Calls on different groups, or a receive and a collective, exchange nothing that could be
// compared. They are found by WAITS, a frame that a rank sends once it has waited for a while.
// Neither rank can ever go on if all of this holds on both sides:
//
//   - the rank has one thread and one call under way, which blocks without a time-out of its own,
//     so it can do nothing else;
//   - that call lacks something that only the other rank can begin to send; or it is a collective
//     that no rank completes before all have entered it, and the other rank, which waits in a send
//     or receive, has not;
//   - the other rank has not begun it, and nothing that could provide it is on its way.
//
// In any doubt (another thread, a request, a group we no longer know) this section says nothing,
// and the deadline of the call decides.
//------------------------------------------------------------------------------

static bool idist__deadlock_has_transfer(const idist__transfer_list *list, const idist__task *t) {
    const idist__transfer *v;

    for (v = list->first; v; v = v->next)
        if (v->task == t) return true;

    return false;
}

// Whether a receive has found no message yet.
static bool idist__deadlock_is_unmatched(const idist__task *t) {
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    const idist__transfer *v = idist__op_of(t)->transfer;
    return v && (v->list == &rg->recvs || v->list == &rg->wild);
}

// Whether t lacks something that the peer of this link has to begin.
static bool idist__deadlock_needs(const idist__link *l, const idist__task *t, int group_rank) {
    const idist__op *o = idist__op_of(t);

    if (t->call.kind == IDIST__RECV)
        return t->call.root == group_rank && idist__deadlock_is_unmatched(t);

    if (t->call.kind != IDIST__SEND &&
        o->algorithm == IDIST__ALGO_BY_HOST) { // ask the step under way
        const idist__task *step = idist__host_step_of(t);
        int rank = -1;

        if (step) rank = idist__ring_group_of(step->group)->rank_of[t->group->ranks[group_rank]];
        return rank >= 0 && idist__deadlock_needs(l, step, rank);
    }

    if (t->call.kind != IDIST__SEND && idist__share_serves(o->algorithm))
        return idist__share_needs(t, group_rank);

    return idist__deadlock_has_transfer(&l->posted, t) ||
           idist__deadlock_has_transfer(&l->waiting, t);
}

// Whether t is a collective that needs all members, and the peer waits in a send or receive before
// it has entered t. Its contribution may come through other ranks, so there may be no transfer that
// shows this.
static bool idist__deadlock_needs_entry(const idist__task *t, const idist__frame *waits) {
    if (!idist__kind_is_p2p((idist__kind)waits->fingerprint.kind)) return false;
    if ((int32_t)(t->seq - waits->tag) <= 0) return false; // tag: the last call that it has entered

    switch (t->call.kind) {
    case IDIST__BARRIER: return true;
    case IDIST__ALL_REDUCE:
    case IDIST__ALL_GATHER:
    case IDIST__REDUCE_SCATTER:
    case IDIST__ALL_TO_ALL: return t->call.count > 0;
    default: return false;
    }
}

// Whether what the peer waits for may still come from us.
static bool idist__deadlock_may_answer(idist__ring *ring, const idist__link *l,
                                       const idist__frame *waits) {
    const idist_group *g = idist__world_find_group(ring->w, waits->ctx);
    const idist__message *m;

    if (waits->fingerprint.kind == IDIST__RECV)
        return waits->aux != l->p2p_sent; // aux: messages it had got from us when it said so
    if (waits->fingerprint.kind != IDIST__SEND)
        return !g || (int32_t)(waits->fingerprint.seq - g->seq) <= 0; // we have entered that call

    for (m = l->early; m; m = m->next)
        if (m->frame.type == IDIST__RTS && m->frame.id == waits->id)
            return false; // its message is here, and no receive wants it

    return true;
}

static void idist__deadlock_find(idist__ring *ring, int peer) {
    idist__link *l = &ring->links[peer];
    const idist__frame *waits = &l->peer_waits;
    idist__task *ours;
    idist_group *theirs;
    char cause[400];
    bool same_group;
    int rank;

    if (waits->type != IDIST__WAITS || waits->flags != (IDIST__NEEDS_YOU | IDIST__ONLY_CALL))
        return;
    ours = idist__world_only_call(ring->w);
    if (!ours || !ours->announced) return;
    rank = idist__ring_group_of(ours->group)->rank_of[peer];
    same_group = ours->group->ctx == waits->ctx;
    if (rank < 0 || (same_group && ours->seq == waits->fingerprint.seq && ours->seq)) return;
    if (!idist__deadlock_needs(l, ours, rank) &&
        !(same_group && idist__deadlock_needs_entry(ours, waits)))
        return;
    if (idist__deadlock_may_answer(ring, l, waits)) return;

    theirs = idist__world_find_group(ring->w, waits->ctx);
    idist__explain_deadlock(ours, peer, &waits->fingerprint, same_group, cause, sizeof cause);
    idist__ring_fail(ring, ours->group, IDIST_ERR_MISMATCH, cause);
    idist__ring_settle(ring);
    if (theirs) idist__ring_fail(ring, theirs, IDIST_ERR_MISMATCH, cause);
}

//------------------------------------------------------------------------------
// [engine:absent]  which members hold up a call
// uses kind model timer msg:types share:share deadlock
//
// A rank knows how far each member has come (idist__seen) and, once it has sent WAITS, whether the
// member answered.
//------------------------------------------------------------------------------

// Returns the rank of the world whose message a receive is getting, or -1 if none has begun to
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

typedef enum idist__absence { // of a member that a call may be waiting for
    IDIST__ABSENT = 1,        // it has not entered the call
    IDIST__SILENT = 2,        // it has not answered when it was asked
    IDIST__NEEDED = 4         // this rank waits for something that only that one can send
} idist__absence;

static int idist__absent_how(const idist__task *t, int rank) {
    const idist_group *g = t->group;
    const idist__seen *seen = &idist__ring_group_of(g)->seen[rank];
    const idist__link *l = &idist__ring_of(g->w)->links[g->ranks[rank]];
    bool entered = (int32_t)(seen->seq - t->seq) >= 0;
    int64_t asked_ns = idist__timer_asked_ns(t);
    int absence = 0;

    if (t->whole.kind && seen->fingerprint.whole == t->whole.seq)
        entered = true; // or an earlier step of the same parent
    if (!entered) absence |= IDIST__ABSENT;
    if (asked_ns && l->here_ns < asked_ns && !l->bye) absence |= IDIST__SILENT;
    if (idist__deadlock_needs(l, t, rank)) absence |= IDIST__NEEDED;

    return absence;
}

// Returns the next member from `rank` on that is absent in all of these ways, or the size of the
// group if there is none.
static int idist__absent_next(const idist__task *t, int rank, int absence) {
    const idist_group *g = t->group;

    while (rank < g->size && (rank == g->rank || (idist__absent_how(t, rank) & absence) != absence))
        rank++;

    return rank;
}

// Returns the rank of the world that a call waits for, or -1 if it waits for none in particular. Of
// several ranks it is one that does not answer, or else one that has not entered the call.
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
// [engine:ask]  whom those members wait for in turn
// uses clock text kind model timer msg:types link absent
//
// A rank that holds up a call may itself wait for another one, which may be stopped. So before a
// call is given up or a warning is written, this rank asks (ASK) those that it waits for; each says
// for whom it waits (ANSWER), and that rank is asked next:
//
//     rank 0            rank 1              rank 2 (stopped)
//       | --- ASK ------> |
//       |                 | --- ASK --------> |     because of PASS_ON: does it answer rank 1?
//       | <-- ANSWER 2 -- |                   |
//       | --- ASK ----------------------------> |
//
// The ranks are asked once more in the middle of the time that is left. By then they know whether
// the rank that they wait for answers them. No rank has more than one question open to another one,
// so what waits in a link is bounded, and nobody asks before a call is nearly out of time.
//------------------------------------------------------------------------------

enum { IDIST__ASK_MOST = 8 };                  // members that one call asks, and links of a chain
#define IDIST__ASK_SILENCE_NS (50 * IDIST__MS) // from then on a rank counts as silent

// Returns true if a rank was asked and does not answer.
static bool idist__ask_is_silent(const idist__link *l) {
    return l->asks && l->open && idist__os_clock_now_ns() - l->asked_ns >= IDIST__ASK_SILENCE_NS;
}

static void idist__ask_rank(idist__ring *ring, int rank, uint8_t flags) {
    idist__link *l = &ring->links[rank];
    idist__frame f;

    if (rank == ring->w->group.rank || l->asks) return;
    idist__link_want(ring, l);
    if (!idist__link_is_connected(l)) return;
    l->asks = true;
    l->asked_ns = idist__os_clock_now_ns();

    memset(&f, 0, sizeof f);
    f.type = IDIST__ASK;
    f.flags = flags;
    idist__link_control(ring, l, &f, NULL);
}

// Asks a rank, unless this round of questions has done so.
static void idist__ask_once(idist__ring *ring, int rank) {
    if (ring->links[rank].asked_ns < ring->asking_ns) idist__ask_rank(ring, rank, IDIST__PASS_ON);
}

// Begins a round of questions for a call that is nearly out of time. Calls that are so at the same
// time share a round.
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

// Asks the ranks that have answered in this round once more, when it is time for that.
static void idist__ask_again(idist__ring *ring) {
    int i;

    if (idist__os_clock_now_ns() < ring->ask_again_ns) return;
    ring->ask_again_ns = 0;

    for (i = 0; i < ring->w->group.size; i++)
        if (ring->links[i].answered_ns > ring->asking_ns) idist__ask_rank(ring, i, IDIST__PASS_ON);
}

// Returns the call in which the program waits; NULL: it is not in one.
static const idist__task *idist__ask_call(const idist__world *w) {
    const idist__task *t, *oldest = NULL;

    for (t = w->tasks; t && w->blocked_count; t = t->next) {
        if (t->group->inner || t->detached || t->away) continue;
        if (!t->async) return t;
        oldest = t;
    }

    return oldest;
}

// Returns the rank that this rank waits for, as it has said in this round; -1: it has not.
static int idist__ask_answered(const idist__ring *ring, int rank) {
    const idist__link *l = &ring->links[rank];

    if (idist__ask_is_silent(l) || !l->answered_ns || l->answered_ns < ring->asking_ns) return -1;
    return (int)l->answer.aux - 1;
}

// Follows the answers from a rank on, to the end or until two ranks of them wait for each other.
// Fills chain, which begins with the rank, and returns its length.
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

// Appends whom a rank waits for, and whom that one waits for, and so on. Of a long chain only the
// ends are named. Returns whether there was anything to append.
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

//------------------------------------------------------------------------------
// [engine:missing]  names the ranks that a call waits for
// uses text launch:env kind model explain msg:types msg:op share:share host
// uses deadlock absent ask
//
// A call that waits for long or misses its deadline names the ranks that hold it up, and says in
// whose eyes: after a network has failed in part, a rank may read there that it does not answer.
//------------------------------------------------------------------------------

// Whether this rank itself could not connect to those that it names.
static void idist__missing_fds(const idist__task *t, char *text, size_t capacity) {
    if (idist__ring_of(t->group->w)->no_fds_ns > t->started_ns)
        idist__text_append(text, capacity,
                           "; this rank is out of file descriptors: raise ulimit -n");
}

static bool idist__missing_is_running(const idist_group *g, uint32_t seq) {
    const idist__task *t = g->w->tasks;

    while (t && (t->group != g || t->seq != seq)) t = t->next;

    return t != NULL;
}

// The last call before t that this rank has completed and that needs something from every member,
// so that all of them have entered it. NULL: none is remembered.
static const idist__fingerprint *idist__missing_common(const idist__task *t) {
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    uint32_t back;

    for (back = 1; back < IDIST__HISTORY; back++) {
        const idist__fingerprint *past = &rg->history[(t->seq - back) % IDIST__HISTORY];
        bool sums = past->kind == IDIST__ALL_REDUCE && past->dtype < IDIST_DTYPE_COUNT &&
                    past->check; // with 0 elements nobody waits

        if (past->seq != t->seq - back) return NULL;
        if (past->algorithm & IDIST__ON_DEVICE || !(sums || past->kind == IDIST__BARRIER)) continue;
        if (!idist__missing_is_running(t->group, past->seq)) return past;
    }

    return NULL;
}

// The last call in which a member was heard, or, if that is later, the last one that it must have
// entered: in many algorithms a rank receives from only a few others.
static const idist__fingerprint *idist__missing_last_seen(const idist__task *t, int rank) {
    const idist__seen *seen = &idist__ring_group_of(t->group)->seen[rank];
    const idist__fingerprint *common = idist__missing_common(t);

    if (common && (int32_t)(common->seq - seen->seq) > 0) return common;

    return &seen->fingerprint;
}

// Names the other side of a message, and whom that one waits for.
static int idist__missing_peer(const idist__task *t, char *text, size_t capacity) {
    const idist_group *g = t->group;
    int whom = idist__absent_whom(t), count = 1;

    if (t->call.kind == IDIST__RECV && !idist__deadlock_is_unmatched(t)) {
        if (!t->patient || whom < 0) return 0; // it gets more time
        idist__text_append(text, capacity, "rank %d on %s, whose message has begun to arrive", whom,
                           g->w->nodes[whom].hostname);
    } else {
        count = idist__explain_missing_peer(t, text, capacity);
    }

    if (whom >= 0) idist__ask_explain(idist__ring_of(g->w), whom, text, capacity);
    idist__missing_fds(t, text, capacity);

    return count;
}

// Every member has entered the call and answers, but the data does not come. Names the member that
// this rank needs, if that one has said whom it waits for.
static int idist__missing_needed(const idist__task *t, char *text, size_t capacity) {
    const idist_group *g = t->group;
    char chain[300] = "";
    int rank = idist__absent_next(t, 0, IDIST__NEEDED);

    if (rank == g->size) return 0;
    if (!idist__ask_explain(idist__ring_of(g->w), g->ranks[rank], chain, sizeof chain)) return 0;
    idist__explain_missing_rank(g, rank, idist__missing_last_seen(t, rank), 0, text, capacity);
    idist__text_append(text, capacity, "%s", chain);

    return 1;
}

// Which members to name: those of the first row below that fits any. A rank that has not entered
// the call may itself wait in an earlier one; then it answers. A rank that has entered may have
// been stopped since, or may have finished the call and be computing; in the second case this rank
// needs nothing from it.
static int idist__missing_name(idist__task *t, char *text, size_t capacity) {
    static const int order[] = {IDIST__ABSENT | IDIST__SILENT, IDIST__SILENT | IDIST__NEEDED,
                                IDIST__ABSENT, IDIST__SILENT};
    idist_group *g = t->group;
    const idist__ring *ring = idist__ring_of(g->w);
    idist__task *step;
    int i, row, first = 0, count = 0;

    if (idist__kind_is_p2p(t->call.kind)) return idist__missing_peer(t, text, capacity);

    step = idist__op_of(t)->algorithm == IDIST__ALGO_BY_HOST ? idist__host_step_of(t) : NULL;

    if (step && !t->announced) { // nobody was asked yet
        if (!idist__missing_name(step, text, capacity))
            idist__text_append(text, capacity, "ranks of another host");
        return 1;
    }

    idist__share_update_seen(t);

    for (row = 0; row < (int)IDIST__COUNT_OF(order) && !count; row++) {
        first = i = idist__absent_next(t, 0, order[row]);
        for (; i < g->size; i = idist__absent_next(t, i + 1, order[row]))
            idist__explain_missing_rank(g, i, idist__missing_last_seen(t, i), count++, text,
                                        capacity);
    }

    if (count > 8) idist__text_append(text, capacity, " and %d more", count - 8);
    if (!count) count = idist__missing_needed(t, text, capacity);
    else if (order[row - 1] & IDIST__SILENT)
        idist__text_append(text, capacity, ", which %s not answer rank %d",
                           count > 1 ? "do" : "does", g->w->group.rank);
    else idist__ask_explain(ring, g->ranks[first], text, capacity);
    idist__missing_fds(t, text, capacity);

    return count;
}

//------------------------------------------------------------------------------
// [engine:frame]  what an arriving frame does
// uses clock fail launch:env kind model core:world fingerprint core:group
// uses core:message msg:types transfer msg:failure link msg:message history
// uses match pool deadlock absent ask
//
// A frame is a header of 64 bytes, and for some types a payload; [msg:types] lists them. The reader
// calls idist__incoming_begin when a header is complete, writes the payload to link.target (NULL:
// drops it), and calls idist__incoming_end.
//
// A peer is authenticated but may be faulty. No frame of its can make this rank write out of bounds
// or read a payload that its type does not carry: idist__incoming_is_allowed checks every header,
// and the link is given up when one is malformed. A field that ends up in an error text (a status,
// the kind and the root of a call) must have a value that a rank of this world can send.
//------------------------------------------------------------------------------

// Writes a text for a failure whose sender had no memory for one.
static void idist__incoming_excuse(const idist__ring *ring, idist__link *l, int peer) {
    snprintf(l->text, sizeof l->text, "rank %d on %s reports a failure without its cause", peer,
             ring->w->nodes[peer].hostname);
}

// ABORT: another rank failed a group. If the group does not exist here yet, the frame waits for it.
static void idist__incoming_abort(idist__ring *ring, idist__link *l, int peer) {
    idist_group *g = idist__world_find_group(ring->w, l->in.ctx);
    int status = (int)(int64_t)l->in.aux;
    idist__message *m;

    l->text[l->in.nbytes] = 0;
    if (!l->in.nbytes) idist__incoming_excuse(ring, l, peer);
    if (l->peer_waits.ctx == l->in.ctx) l->peer_waits.type = 0; // its call has ended

    if (g) {
        idist__group_fail(g, (idist_status)status, l->text);
        return;
    }

    if (idist__message_find_closed(ring, l->in.ctx)) return;
    m = idist__message_new(ring, l, &l->in, sizeof l->text);
    if (!m) return;
    m->frame.aux = (uint64_t)(int64_t)status;
    memcpy(m->data, l->text, sizeof l->text);
}

// WAITS: the peer waits in a call. Since we may be what it waits for, it learns that we entered the
// call too, or which call of the group was our last. If we are in a different call, both ranks
// learn that.
static void idist__incoming_waits(idist__ring *ring, idist__link *l, int peer) {
    const idist__frame *waits = &l->in;
    idist_group *g = idist__world_find_group(ring->w, waits->ctx);
    const idist__closed *closed = g ? NULL : idist__message_find_closed(ring, waits->ctx);
    bool p2p = waits->fingerprint.kind == IDIST__SEND || waits->fingerprint.kind == IDIST__RECV;
    idist__frame answer;

    l->peer_waits = *waits;

    // It may not have been connected when the group failed.
    if (closed && closed->status != IDIST_OK)
        idist__link_abort(ring, l, waits->ctx, closed->status, "the group has failed before");

    if (!p2p && g && g->status == IDIST_OK) {
        if (!idist__history_agrees(ring, g, peer, waits)) return;
        answer = *waits;
        answer.type = IDIST__HERE;
        if ((int32_t)(waits->fingerprint.seq - g->seq) > 0)
            answer.fingerprint = idist__ring_group_of(g)->history[g->seq % IDIST__HISTORY];
        idist__link_control(ring, l, &answer, NULL);
    }

    idist__deadlock_find(ring, peer);
}

// ASK: a call of the peer is nearly out of time. It learns whom this rank waits for, and whether
// that rank answers this one.
static void idist__incoming_ask(idist__ring *ring, idist__link *l) {
    const idist__task *t = idist__ask_call(ring->w);
    int whom = t ? idist__absent_whom(t) : -1;
    bool pass_on = l->in.flags & IDIST__PASS_ON;
    idist__frame answer;

    if (whom == ring->w->group.rank) whom = -1;
    memset(&answer, 0, sizeof answer);
    answer.type = IDIST__ANSWER;
    answer.aux = (uint64_t)whom + 1;
    if (whom >= 0) answer.fingerprint = idist__fingerprint_of_task(t, IDIST__ALGO_AUTO);
    if (whom >= 0 && idist__ask_is_silent(&ring->links[whom])) answer.flags = IDIST__UNANSWERED;
    idist__link_control(ring, l, &answer, NULL);
    if (whom >= 0 && pass_on) idist__ask_rank(ring, whom, 0);
}

// ANSWER: to an ASK of ours. The rank that the peer waits for is asked next.
static void idist__incoming_answer(idist__ring *ring, idist__link *l) {
    int whom = (int)l->in.aux - 1;

    l->asks = false;
    l->answered_ns = idist__os_clock_now_ns();
    l->answer = l->in;
    if (whom >= 0 && l->asked_ns >= ring->asking_ns && ring->asking_ns) idist__ask_once(ring, whom);
}

// BYE: the peer leaves the world. After a failure nothing else comes from it, and it reads nothing.
static void idist__incoming_bye(idist__ring *ring, idist__link *l, int peer) {
    idist__world *w = ring->w;

    l->bye = true;
    l->bye_status = (idist_status)(int)(int64_t)l->in.aux;
    ring->left_count++;
    if (l->bye_status == IDIST_OK) return;

    l->text[l->in.nbytes] = 0;
    if (!l->in.nbytes) idist__incoming_excuse(ring, l, peer);
    if (w->group.rank >= 0) idist__ring_fail(ring, &w->group, l->bye_status, l->text);
    idist__link_close(ring, l);
}

// HERE: the answer to a WAITS of ours.
static void idist__incoming_here(idist__ring *ring, idist__link *l, int peer) {
    idist_group *g = idist__world_find_group(ring->w, l->in.ctx);

    l->here_ns = idist__os_clock_now_ns();
    if (g && g->status == IDIST_OK) idist__history_agrees(ring, g, peer, &l->in);
}

static void idist__incoming_no_memory(idist__ring *ring, idist_group *g) {
    idist__ring_fail_memory(ring, g ? g : &ring->w->group);
}

// EAGER or RTS: a message begins. An EAGER payload goes to the receive that wants it, or to memory
// of its own; nothing follows an RTS. False when the frame is malformed.
static bool idist__incoming_message(idist__ring *ring, idist__link *l, int peer) {
    idist__frame *f = &l->in;
    idist_group *g = idist__world_find_group(ring->w, f->ctx);
    bool p2p = f->fingerprint.kind == IDIST__SEND;
    bool closed = !g && idist__message_find_closed(ring, f->ctx);
    idist__transfer *receive;

    if (p2p && !idist__fingerprint_has_nbytes(&f->fingerprint, f->nbytes)) return false;

    if (p2p) l->p2p_received++;
    l->peer_waits.type = 0;
    receive = idist__match_frame(ring, l, peer, f);

    if (f->type == IDIST__RTS) {
        if (receive) idist__link_answer_rts(ring, l, peer, receive, f);
        else if (!closed && !idist__message_new(ring, l, f, 0)) idist__incoming_no_memory(ring, g);
        l->left = 0;
        return true;
    }

    l->in_transfer = receive;

    if (receive) {
        receive->frame = *f;
        l->target = receive->data;
    } else if (!closed && (!g || g->status == IDIST_OK)) {
        l->in_message = idist__message_new(ring, l, f, (size_t)f->nbytes);
        l->target = l->in_message ? l->in_message->data : NULL;
        if (!l->in_message) idist__incoming_no_memory(ring, g);
    }

    return true;
}

// Takes out the send that a CTS or PULLED answers; NULL: it has been cancelled.
static idist__transfer *idist__incoming_answered(idist__ring *ring, const idist__link *l) {
    idist__transfer *v = idist__transfer_find(ring, &l->waiting, l->in.id);
    if (v) idist__transfer_take(v);
    return v;
}

// CTS without an RTS before it: the peer has posted a receive of a collective. If we have not
// posted the send, the frame waits for it.
static void idist__incoming_granted(idist__ring *ring, idist__link *l, int peer) {
    idist_group *g = idist__world_find_group(ring->w, l->in.ctx);
    idist__transfer *v;

    if (g ? g->status != IDIST_OK : idist__message_find_closed(ring, l->in.ctx) != NULL) return;
    if (g && !idist__history_agrees(ring, g, peer, &l->in)) return;

    v = idist__match_step(ring, &l->waiting, peer, &l->in);
    if (v) idist__link_send_data(ring, l, v, l->in.aux);
    else if (!idist__message_new(ring, l, &l->in, 0)) idist__incoming_no_memory(ring, g);
}

// CTS: the peer has a place for a message.
static void idist__incoming_clear_to_send(idist__ring *ring, idist__link *l, int peer) {
    idist__transfer *v;

    if (!l->in.id) {
        idist__incoming_granted(ring, l, peer);
        return;
    }

    v = idist__incoming_answered(ring, l);
    if (v) idist__link_send_data(ring, l, v, l->in.aux);
}

// PULLED: the peer has read a message that we announced in our memory.
static void idist__incoming_pulled(idist__ring *ring, const idist__link *l) {
    idist__transfer *v = idist__incoming_answered(ring, l);
    if (v) idist__transfer_done(ring, v);
}

// DATA: a piece of a message that we asked for. False when it is longer than the message, or has a
// number that we did not give.
static bool idist__incoming_data(idist__ring *ring, idist__link *l, int peer) {
    idist__transfer *v = idist__transfer_find(ring, &l->receiving, l->in.id);

    if (!v) {
        v = idist__match_granted(ring, l, peer, &l->in);
        if (v && (!v->granted || v->id != l->in.id)) return false;
    }

    if (v && l->in.nbytes > v->nbytes - v->moved) return false;
    l->in_transfer = v; // NULL: the receive has been cancelled
    l->target = v ? v->data + v->moved : NULL;

    return true;
}

// Returns true if the frame carries the status of a failure.
static bool idist__incoming_has_failure(const idist__frame *f) {
    int64_t status = (int64_t)f->aux;
    return status < 0 && status >= INT32_MIN && idist__fail_is_failure((int)status);
}

// Returns true if a rank of this world can be in the call that the frame names.
static bool idist__incoming_names_call(const idist__ring *ring, const idist__frame *f) {
    const idist__fingerprint *p = &f->fingerprint;

    if (f->type == IDIST__HERE && !p->kind && !p->seq) return true; // it has entered none yet
    if (f->type == IDIST__ANSWER && !f->aux) return true;
    if (f->type < IDIST__WAITS && p->kind == IDIST__RECV) return false;

    return p->kind > IDIST__NONE && p->kind < IDIST__KIND_COUNT && p->root >= -1 &&
           idist__fingerprint_root(p) < ring->w->group.size;
}

// Whether the peer may send this header, of a frame that carries no message.
static bool idist__incoming_is_control(const idist__ring *ring, const idist__link *l, int peer) {
    const idist__frame *f = &l->in;
    bool has_text = f->type == IDIST__ABORT || (f->type == IDIST__BYE && f->aux);

    if (has_text) return f->nbytes <= IDIST__TEXT_BYTES && idist__incoming_has_failure(f);
    if (f->type == IDIST__CREDIT) return f->nbytes <= IDIST__WINDOW_BYTES - l->window;
    if (f->nbytes) return false;

    switch (f->type) {
    case IDIST__CTS: return f->id || idist__incoming_names_call(ring, f);
    case IDIST__WAITS:
    case IDIST__HERE: return idist__incoming_names_call(ring, f);
    case IDIST__LEFT: return ring->shm && ring->shm->local[peer] >= 0;
    case IDIST__ANSWER:
        if (f->aux > (uint64_t)ring->w->group.size || !l->asks) return false;
        return idist__incoming_names_call(ring, f);
    case IDIST__PULLED:
    case IDIST__BYE:
    case IDIST__ASK: return true;
    default: return false;
    }
}

// Whether the peer may send this header. Messages that no receive wants yet are bounded by the
// eager window and, for groups that do not exist here, by a fixed number. Frames without payload
// (RTS, CTS) for groups that do exist are not bounded: a correct rank may have any number of calls
// under way.
static bool idist__incoming_is_allowed(const idist__ring *ring, const idist__link *l, int peer) {
    const idist__frame *f = &l->in;
    const idist_group *g = idist__world_find_group(ring->w, f->ctx);
    bool names_group =
        f->type <= IDIST__DATA || (f->type >= IDIST__WAITS && f->type <= IDIST__LEFT);

    if (names_group && g && idist__ring_group_of(g)->rank_of[peer] < 0) return false;

    switch (f->type) {
    case IDIST__EAGER:
        if (f->nbytes > IDIST__EAGER_BYTES || !idist__incoming_names_call(ring, f)) return false;
        return f->nbytes + IDIST__FRAME_BYTES <= l->their_window;
    case IDIST__RTS: return idist__incoming_names_call(ring, f);
    case IDIST__DATA: return f->nbytes <= IDIST__PIECE_BYTES && idist__incoming_names_call(ring, f);
    default: return idist__incoming_is_control(ring, l, peer);
    }
}

// A header is complete. False when it is malformed.
static bool idist__incoming_begin(idist__ring *ring, idist__link *l, int peer) {
    bool ok = true;

    l->in_transfer = NULL;
    l->in_message = NULL;
    l->target = NULL;
    if (!idist__incoming_is_allowed(ring, l, peer)) return false;

    l->left = (size_t)l->in.nbytes;

    switch (l->in.type) {
    case IDIST__EAGER:
        l->their_window -= (size_t)l->in.nbytes + IDIST__FRAME_BYTES;
        ok = idist__incoming_message(ring, l, peer);
        break;
    case IDIST__RTS: ok = idist__incoming_message(ring, l, peer); break;
    case IDIST__CTS: idist__incoming_clear_to_send(ring, l, peer); break;
    case IDIST__DATA: ok = idist__incoming_data(ring, l, peer); break;
    case IDIST__PULLED: idist__incoming_pulled(ring, l); break;
    case IDIST__CREDIT:
        l->window += (size_t)l->in.nbytes;
        l->left = 0; // nbytes is the credit; no payload follows
        break;
    case IDIST__WAITS: idist__incoming_waits(ring, l, peer); break;
    case IDIST__HERE: idist__incoming_here(ring, l, peer); break;
    case IDIST__ABORT: l->target = l->text; break;
    case IDIST__LEFT: idist__pool_member_left(ring, l->in.ctx); break;
    case IDIST__ASK: idist__incoming_ask(ring, l); break;
    case IDIST__ANSWER: idist__incoming_answer(ring, l); break;
    default: l->target = l->text; break; // IDIST__BYE
    }

    return ok;
}

// A frame and its payload are complete.
static void idist__incoming_end(idist__ring *ring, idist__link *l, int peer) {
    idist__transfer *v = l->in_transfer;
    idist__message *m = l->in_message;

    l->in_transfer = NULL;
    l->in_message = NULL;

    if (l->in.type == IDIST__EAGER) {
        if (m) {
            m->moved = (size_t)l->in.nbytes;
            if (m->claim) idist__message_give(ring, l, peer, m, m->claim);
            return;
        }

        idist__link_consumed(ring, l, (size_t)l->in.nbytes);
        if (v) idist__transfer_received(ring, v, peer);
    } else if (l->in.type == IDIST__DATA && v) {
        v->moved += (size_t)l->in.nbytes;
        if (v->moved < v->nbytes) return;
        idist__transfer_take(v);
        idist__transfer_received(ring, v, peer);
    } else if (l->in.type == IDIST__ABORT) {
        idist__incoming_abort(ring, l, peer);
    } else if (l->in.type == IDIST__BYE) {
        idist__incoming_bye(ring, l, peer);
    }
}

//------------------------------------------------------------------------------
// [engine:announce]  tells other members that this rank waits in a call
// uses launch:env kind model core:world fingerprint msg:types msg:failure link
// uses deadlock ask
//
// A call that waits is announced to the members to which there is a connection, and to others when
// there is one. When they are asked once more before the call is given up (g->asked_ns),
// connections are made to all: those that do not answer will be named.
//------------------------------------------------------------------------------

// Tells a member, by its rank in the group, that this rank waits in t.
static void idist__announce_to(idist__ring *ring, const idist__task *t, bool only_call, int rank) {
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    idist__link *l = &ring->links[t->group->ranks[rank]];
    bool p2p = idist__kind_is_p2p(t->call.kind);
    const idist__transfer *v;
    idist__frame f;

    if (rank == t->group->rank || (p2p && t->call.root != rank)) return;
    memset(&f, 0, sizeof f);
    f.type = IDIST__WAITS;
    f.ctx = t->group->ctx;
    f.fingerprint = p2p ? idist__fingerprint_of_task(t, IDIST__ALGO_AUTO)
                        : rg->history[t->seq % IDIST__HISTORY];
    f.aux = l->p2p_received;
    f.tag = t->group->seq;

    // Only the search for deadlocks needs these, and there is no deadlock while this rank can do
    // something else.
    if (only_call) f.flags = IDIST__ONLY_CALL;
    if (only_call && idist__deadlock_needs(l, t, rank)) f.flags |= IDIST__NEEDS_YOU;
    for (v = l->waiting.first; v && p2p && only_call; v = v->next)
        if (v->task == t) f.id = v->id;

    idist__link_control(ring, l, &f, NULL);
    idist__deadlock_find(ring, t->group->ranks[rank]);
}

// Tells the other members, so that they can object, and answer that they are there.
static void idist__announce_wait(idist__task *t) {
    idist__ring *ring = idist__ring_of(t->group->w);
    bool asks_all = t->group->asked_ns > t->started_ns;
    bool only_call = idist__world_only_call(ring->w) == t;
    int i;

    if (!t->group->inner && !t->away && (t->asked || asks_all)) idist__ask_begin(ring, t);
    if (t->asked) return; // the peer of a message knows already

    for (i = 0; i < t->group->size && t->group->size > 1; i++) {
        idist__announce_to(ring, t, only_call, i);
        if (asks_all) idist__link_want(ring, &ring->links[t->group->ranks[i]]);
    }

    idist__ring_settle(ring);
}

// There is a connection to a rank now: it learns what others were told before.
static void idist__announce_late(idist__ring *ring, int peer) {
    idist__world *w = ring->w;
    idist__link *l = &ring->links[peer];
    const idist__task *t, *only = idist__world_only_call(w);
    const idist_group *g;

    // While the world is being closed its tables are gone, but its news is still true.
    for (g = &w->group; g; g = g->next)
        if (g->status != IDIST_OK &&
            (g == &w->group || (g->rank >= 0 && idist__ring_group_of(g)->rank_of[peer] >= 0)))
            idist__link_abort(ring, l, g->ctx, g->status, g->cause);

    for (t = w->tasks; t && !ring->failed; t = t->next) {
        int rank = idist__ring_group_of(t->group)->rank_of[peer];
        if (t->announced && !t->done && !t->group->inner && rank >= 0)
            idist__announce_to(ring, t, t == only, rank);
    }

    if (ring->said_bye) idist__link_bye(ring, l);
    idist__link_flush(ring, l);
}

//------------------------------------------------------------------------------
// [engine:progress]  reads links, writes what is queued, finds links that ended
// uses clock mutex poll os:watch beacon fail text base:log kind model
// uses core:group block shm:segment shm:ended msg:types msg:failure link match
// uses recv share:share host attempt connector deadlock ask frame announce
//
// A link has a stage, memory for bytes that were read ahead: many small frames arrive by one read.
// The rest of a large payload bypasses the stage: it is read straight to where it belongs.
//
// With few links it is cheapest to try to read every one; with many, ring->watch tells which ones
// have data. Links of which a read costs no system call are always tried.
//------------------------------------------------------------------------------

enum {
    IDIST__PROGRESS_READS = 16,    // of one link before the others get their turn
    IDIST__PROGRESS_DIRECT = 4096, // from how many bytes on a payload bypasses the stage
    IDIST__PROGRESS_FEW = 4,       // up to how many polled links trying each is cheaper than poll
    IDIST__PROGRESS_TURNS = 8,     // of a caller that polls, of which one reads all links
    IDIST__PROGRESS_WAKES = 3      // entries of a poll set before those of the connector
};

static size_t idist__progress_least(size_t a, size_t b) { return a < b ? a : b; }

// Takes a frame, or what is there of it, out of the stage. Most frames are there as a whole, and
// copying a constant size takes a fifth of the instructions.
static void idist__progress_take_frame(idist__link *l, size_t unread) {
    size_t nbytes = idist__progress_least(IDIST__FRAME_BYTES - l->in_moved, unread);

    if (nbytes == IDIST__FRAME_BYTES) memcpy(&l->in, l->stage + l->at, IDIST__FRAME_BYTES);
    else memcpy((char *)&l->in + l->in_moved, l->stage + l->at, nbytes);
    l->in_moved += nbytes;
    l->at += nbytes;
}

// Cuts the bytes in the stage into frames and payloads, until `frames` of them are complete. False
// when one is malformed.
static bool idist__progress_parse(idist__ring *ring, idist__link *l, int peer, size_t frames) {
    while (l->open && l->at < l->end && frames) {
        size_t unread = l->end - l->at;
        size_t nbytes;

        if (l->in_moved < IDIST__FRAME_BYTES) {
            idist__progress_take_frame(l, unread);
            if (l->in_moved < IDIST__FRAME_BYTES) break;
            if (!idist__incoming_begin(ring, l, peer)) return false;
        } else {
            nbytes = idist__progress_least(l->left, unread);

            if (l->target) {
                memcpy(l->target, l->stage + l->at, nbytes);
                l->target += nbytes;
            }

            l->left -= nbytes;
            l->at += nbytes;
        }

        if (l->in_moved == IDIST__FRAME_BYTES && !l->left) {
            l->in_moved = 0;
            frames--;
            idist__incoming_end(ring, l, peer);
        }

        idist__ring_settle(ring); // before a later frame completes the call that failed
    }

    if (l->at == l->end) l->at = l->end = 0;

    return true;
}

// The connection to a rank is of no use any more. Unless that rank has finalized, it is lost.
static void idist__progress_lost(idist__ring *ring, int peer, const char *how) {
    idist__link *l = &ring->links[peer];

    if (!l->open) return;
    idist__link_close(ring, l);
    if (!l->bye) idist__group_lose_rank(ring->w, peer, how);
}

// How much to read into the stage, which is empty: only the header of a frame with a large payload,
// if that costs no system call. Then the payload is copied once, to where it belongs.
static size_t idist__progress_capacity(const idist__link *l) {
    idist__frame f;

    if (l->in_moved || !l->transport->peek_header || !l->transport->peek_header(l->port, &f))
        return IDIST__STAGE_BYTES;
    if (f.nbytes < IDIST__PROGRESS_DIRECT || f.type == IDIST__RTS) return IDIST__STAGE_BYTES;
    return IDIST__FRAME_BYTES;
}

// Reads what has arrived, up to a bound. False when the stream has just ended or broken: see
// idist__progress_judge.
static bool idist__progress_read(idist__ring *ring, int peer) {
    idist__link *l = &ring->links[peer];
    int reads;

    if (l->open && l->at < l->end && !idist__progress_parse(ring, l, peer, SIZE_MAX))
        idist__progress_lost(ring, peer, "it sent a malformed frame");

    for (reads = 0; reads < IDIST__PROGRESS_READS && l->open && !l->ended; reads++) {
        bool direct =
            l->in_moved == IDIST__FRAME_BYTES && l->left >= IDIST__PROGRESS_DIRECT && l->target;
        size_t capacity = direct ? l->left : idist__progress_capacity(l);
        ptrdiff_t n = l->transport->read(l->port, direct ? l->target : l->stage, capacity);

        if (n == 0) break;

        if (n < 0) {
            l->ended = true;
            l->ended_errno = errno;
            return false;
        }

        if (direct) {
            l->target += n;
            l->left -= (size_t)n;
            if (l->left) continue;
            l->in_moved = 0;
            idist__incoming_end(ring, l, peer);
            idist__ring_settle(ring);
            continue;
        }

        l->at = 0;
        l->end = (size_t)n;

        if (!idist__progress_parse(ring, l, peer, SIZE_MAX)) {
            idist__progress_lost(ring, peer, "it sent a malformed frame");
            break;
        }

        if ((size_t)n < capacity) break; // most likely there is no more
    }

    if (l->open && l->polled) idist__link_watch_next(ring, l, l->watched_out >= 0);

    return true;
}

// The frame with which the stage of a link goes on, if its payload is there as well.
static bool idist__progress_staged(const idist__link *l, idist__frame *f) {
    size_t unread = l->end - l->at;

    if (unread < sizeof *f) return false;
    memcpy(f, l->stage + l->at, sizeof *f);

    return f->type == IDIST__EAGER && f->nbytes <= unread - sizeof *f;
}

// Reads what has arrived of a link if its stage is empty. Returns whether it holds anything.
static bool idist__progress_fill(idist__link *l) {
    idist__frame f;

    if (l->at < l->end) return true;
    if (!l->transport->peek_header(l->port, &f)) return false;
    l->at = 0;
    l->end = (size_t)l->transport->read(l->port, l->stage, IDIST__STAGE_BYTES);

    return true;
}

// A receive beside other calls, or with a request: takes its message out of the stage, or a large
// one out of the link, without a task. Messages that earlier receives want go to them first.
static bool idist__progress_take(const idist_group *g, const idist__call *c) {
    idist__ring *ring = idist__ring_of(g->w);
    const idist__ring_group *rg = idist__ring_group_of(g);
    idist__link *l = idist__recv_link(g, c);
    int peer = l ? idist__link_rank(ring, l) : -1;
    idist__frame f;

    if (!l) return false;
    if (l->at == l->end && !rg->recvs.first && !rg->wild.first &&
        l->transport->peek_header(l->port, &f) && f.nbytes >= IDIST__PROGRESS_DIRECT)
        return idist__recv_take(g, c, l, &f);
    if (!idist__progress_fill(l)) return false;

    for (;;) {
        if (!idist__progress_staged(l, &f) || f.ctx != g->ctx) return false;
        if (f.fingerprint.kind != IDIST__SEND) return false;
        if (!rg->recvs.first && !rg->wild.first) break;
        if (!idist__match_oldest(ring, g, peer, &f)) break;
        if (!idist__progress_parse(ring, l, peer, 1)) {
            idist__progress_lost(ring, peer, "it sent a malformed frame");
            idist__ring_settle(ring);
            return false;
        }

        if (l->early || !l->open || g->status != IDIST_OK || !idist__progress_fill(l)) return false;
    }

    if (!idist__recv_wants(g, c, l, &f)) return false;
    idist__block_copy(c->recv, l->stage + l->at + sizeof f, (size_t)f.nbytes);
    l->at += sizeof f + (size_t)f.nbytes;
    idist__recv_taken(ring, c, l, &f);

    return true;
}

// Whether the process of a rank is known to have died, rather than to have left the world.
static bool idist__progress_has_died(const idist__ring *ring, int peer) {
    int local = ring->shm ? ring->shm->local[peer] : -1;
    return local >= 0 && idist__liveness_get(ring->shm, local) == IDIST__ENDED_DIED;
}

// Declares ranks lost whose streams have ended: those that are known to have died, or all.
static void idist__progress_declare(idist__ring *ring, bool all) {
    int i, me = ring->w->group.rank;

    for (i = 0; i < ring->w->group.size; i++) {
        const idist__link *l = &ring->links[i];
        char how[300];

        if (!l->open || !l->ended || !(all || idist__progress_has_died(ring, i))) continue;
        if (!idist__link_is_connected(l))
            snprintf(how, sizeof how,
                     "no connection to it from rank %d can be made (%s): it died, or left after a "
                     "failure",
                     me, ring->unreachable);
        else if (l->ended_errno)
            snprintf(how, sizeof how, "its connection to rank %d broke: %s", me,
                     strerror(l->ended_errno));
        else
            snprintf(how, sizeof how,
                     "its process ended, or closed the connection without idist_finalize");
        idist__progress_lost(ring, i, how);
    }
}

// A stream has ended. When one rank dies, others that have heard of it may end too, and their
// streams with them. So what there is to know is gathered first: those others may have sent the
// reason before they ended, and one whose process died is more likely to be the first than one that
// has left.
static void idist__progress_judge(idist__ring *ring) {
    int i;

    if (ring->shm) {
        idist__liveness_look(ring->shm, ring->shm->n);
        idist__liveness_any(ring->shm);
    }

    for (i = 0; i < ring->w->group.size; i++) {
        const idist__link *l = &ring->links[i];

        if (l->open && !l->ended) idist__progress_read(ring, i);
        while (l->open && !l->ended && idist__progress_has_died(ring, i)) {
            ring->shm->ports[ring->shm->local[i]].look = true; // its death may not be counted yet
            idist__progress_read(ring, i);                     // the rest of what it has written
        }
    }

    if (ring->shm) idist__share_progress(ring); // a rank may leave once it has done its part
    idist__ring_settle(ring);

    idist__progress_declare(ring, false);
    idist__progress_declare(ring, true);
}

// Returns a call that waits for this rank, or has something to send to it; NULL: there is none.
static const idist__task *idist__progress_needs(const idist__ring *ring, int peer) {
    const idist__link *l = &ring->links[peer];
    const idist__transfer *v;
    const idist__task *t;

    for (v = l->out; v; v = v->next)
        if (v->task) return v->task;

    for (t = ring->w->tasks; t; t = t->next) {
        int rank = idist__ring_group_of(t->group)->rank_of[peer];
        if (rank < 0 || rank == t->group->rank || t->away) continue;
        if (idist__deadlock_needs(l, t, rank)) return t;
    }

    return NULL;
}

static bool idist__progress_all_left(const idist_group *g) {
    const idist__ring *ring = idist__ring_of(g->w);
    int i;

    for (i = 0; i < g->size; i++)
        if (i != g->rank && !ring->links[g->ranks[i]].bye) return false;

    return g->size > 1;
}

// Returns a receive from any rank of a group that has this member and that all others have left,
// too, or NULL if there is none.
static const idist__task *idist__progress_forsaken(const idist__ring *ring, int peer) {
    const idist__task *t;

    for (t = ring->w->tasks; t; t = t->next) {
        if (t->call.kind != IDIST__RECV || t->call.root != IDIST_ANY_SOURCE || t->away) continue;
        if (idist__ring_group_of(t->group)->rank_of[peer] < 0) continue;
        if (idist__deadlock_is_unmatched(t) && idist__progress_all_left(t->group)) return t;
    }

    return NULL;
}

// Fails the group of a call that needs a rank which has left the world. The cause is why the rank
// left, not the rank itself. A message to or from the rank says as well that it has left.
static void idist__progress_miss(idist__ring *ring, const idist__task *t, int peer) {
    const idist__link *l = &ring->links[peer];
    idist_group *g = t->group;
    const char *host = ring->w->nodes[peer].hostname;
    char cause[400];

    if (g->inner) g = idist__ring_group_of(g)->whole;

    if (l->bye_status == IDIST_OK) {
        snprintf(cause, sizeof cause, "rank %d on %s was lost: it has left the world", peer, host);
        idist__ring_fail(ring, g, IDIST_ERR_PEER_LOST, cause);
        return;
    }

    idist__text_copy(cause, sizeof cause, l->text);
    if (idist__kind_is_p2p(t->call.kind))
        idist__text_append(cause, sizeof cause, "; rank %d on %s has left the world after that",
                           peer, host);
    idist__ring_fail(ring, g, l->bye_status, cause);
}

// Looks for calls that need a rank which has left the world. A rank leaves when it has completed
// its calls, so the others complete these as well; but it begins nothing any more.
static void idist__progress_left(idist__ring *ring) {
    const idist__task *t;
    int i;

    for (i = 0; i < ring->w->group.size && !ring->failed; i++) {
        if (!ring->links[i].bye) continue;
        // A rank leaves in order when all have called idist_finalize, which ends the calls that
        // other threads of this rank are in.
        if (ring->w->closing && ring->links[i].bye_status == IDIST_OK) continue;
        t = idist__progress_needs(ring, i);
        if (!t) t = idist__progress_forsaken(ring, i);
        if (t) idist__progress_miss(ring, t, i);
    }
}

// Descriptors are short: what needs a connection goes on trying, and may miss its deadline.
static void idist__progress_short_of_fds(idist__ring *ring) {
    if (!ring->no_fds_ns)
        idist__log_print(&ring->w->log, IDIST_LOG_WARN,
                         "out of file descriptors: this rank cannot connect to others; raise "
                         "ulimit -n");
    ring->no_fds_ns = idist__os_clock_now_ns();
}

// A rank cannot be reached. If nothing waits for it, it may have left the world in order. Returns
// whether it is lost.
static bool idist__progress_unreachable(idist__ring *ring, const idist__connect_event *event) {
    idist__link *l = &ring->links[event->rank];

    if (!idist__progress_needs(ring, event->rank)) return false;
    l->ended = true;
    l->ended_errno = event->error;
    idist__text_copy(ring->unreachable, sizeof ring->unreachable,
                     event->error ? strerror(event->error) : idist__me.text);

    return true;
}

// Makes connections for links that want one, and takes those that other ranks make. Returns whether
// anything has happened.
static bool idist__progress_connect(idist__ring *ring) {
    idist__connector *c = ring->connector;
    idist__connect_event event;
    bool happened = false, ended = false;

    if (!c) return false;

    while (ring->wanted) {
        idist__link *l = ring->wanted;

        ring->wanted = l->next_wanted;
        l->wanted = false;
        if (!l->open || idist__link_is_connected(l)) continue;
        if (idist__connector_start(c, idist__link_rank(ring, l))) continue;
        idist__ring_fail_memory(ring, &ring->w->group);
        happened = true;
    }

    while (idist__connector_next(c, &event)) {
        if (event.status == IDIST_ERR_NO_FDS) {
            idist__progress_short_of_fds(ring);
            continue;
        }

        happened = true;
        if (event.status == IDIST_OK) idist__announce_late(ring, event.rank);
        else if (idist__progress_unreachable(ring, &event)) ended = true;
    }

    if (ended) idist__progress_judge(ring);

    return happened;
}

// Serves the links of which ring->watch reports something.
static void idist__progress_serve(idist__ring *ring) {
    idist__os_watch_events events;
    int i, count = idist__os_watch_take(ring->watch, &events);
    bool ended = false;

    for (i = 0; i < count; i++) {
        int rank = idist__os_watch_tag(&events, i);
        idist__link *l = &ring->links[rank];

        if (l->open && idist__os_watch_writable(&events, i)) idist__link_flush(ring, l);
        if (!l->open || !idist__os_watch_readable(&events, i)) continue;
        if (!idist__progress_read(ring, rank)) ended = true;
    }

    if (ended) idist__progress_judge(ring);
}

// Fills a poll set with what can wake a rank. Returns the number of entries.
static int idist__progress_watch(idist__ring *ring, idist__os_poll_entry *polls) {
    idist__os_poll_watch(&polls[0], ring->wake, IDIST__OS_READABLE);
    idist__os_poll_watch(&polls[1], ring->shm ? ring->shm->beacon : -1, IDIST__OS_READABLE);
    idist__os_poll_watch(&polls[2], ring->watch, IDIST__OS_READABLE);
    if (!ring->connector) return IDIST__PROGRESS_WAKES;

    return IDIST__PROGRESS_WAKES +
           idist__connector_polls(ring->connector, polls + IDIST__PROGRESS_WAKES);
}

// Waits for something to happen to the links, at most until the deadline or until `wake` is called,
// and serves them.
static void idist__progress_sleep(idist__ring *ring, int64_t until_ns) {
    idist__os_poll_entry *polls = ring->polls;
    int i, ready, count;

    if (idist__progress_connect(ring)) until_ns = 0; // the caller has to look at what has happened

    if (ring->connector) {
        int64_t due_ns = idist__connector_due_ns(ring->connector);
        if (due_ns < until_ns) until_ns = due_ns;
    }

    count = idist__progress_watch(ring, polls);
    idist__os_mutex_unlock(&ring->w->lock);
    ready = idist__os_poll(polls, count, idist__os_clock_ms_until(until_ns));
    idist__os_mutex_lock(&ring->w->lock);

    if (ready <= 0) return;
    if (idist__os_poll_ready(&polls[0])) idist__os_poll_wakeup_clear(ring->wake);
    if (idist__os_poll_ready(&polls[1])) idist__os_beacon_clear(ring->shm->beacon);
    if (idist__os_poll_ready(&polls[2])) idist__progress_serve(ring);

    for (i = IDIST__PROGRESS_WAKES; i < count && !idist__os_poll_ready(&polls[i]); i++) continue;
    if (i == count) return;
    idist__connector_polled(ring->connector);
    idist__progress_connect(ring);
}

// Serves the links, and goes on with connections, without blocking. The poll set is not that of
// idist__progress_sleep, in which another thread may be.
static void idist__progress_turn(idist__ring *ring) {
    idist__os_poll_entry *polls = ring->polls + ring->poll_capacity;
    int count;

    if (ring->watch >= 0) idist__progress_serve(ring);
    if (!ring->connector) return;

    idist__progress_connect(ring);
    count = idist__connector_polls(ring->connector, polls);
    if (count <= 0 || idist__os_poll(polls, count, 0) <= 0) return;
    idist__connector_polled(ring->connector);
    idist__progress_connect(ring);
}

// Whether an algorithm waits for something from this link.
static bool idist__progress_awaits(const idist__link *l) {
    return l->posted.first || l->receiving.first || l->waiting.first;
}

static bool idist__progress_awaits_any(const idist__ring *ring) {
    int i;

    for (i = 0; i < ring->w->group.size; i++)
        if (ring->links[i].polled && idist__progress_awaits(&ring->links[i])) return true;

    return false;
}

// Moves what can move, without blocking. all: otherwise, of a few polled links only those are read
// from which an algorithm waits for something.
static void idist__progress_move(idist__ring *ring, bool all) {
    bool few = ring->polled_link_count <= IDIST__PROGRESS_FEW && !ring->connector, ended = false;
    int i;

    if (ring->shm) idist__liveness_any(ring->shm); // then reading tells which one
    if (few && !all) all = !idist__progress_awaits_any(ring);

    for (i = 0; i < ring->w->group.size; i++) {
        idist__link *l = &ring->links[i];
        if (!l->open || (l->polled && !few && !l->corked)) continue;
        if (l->out) idist__link_flush(ring, l);
        if (l->polled && (!few || (!all && !idist__progress_awaits(l)))) continue;
        if (!idist__progress_read(ring, i)) ended = true;
    }

    if (ended) idist__progress_judge(ring);
    if (!few) idist__progress_turn(ring);
    if (ring->shm) idist__share_progress(ring);
    if (ring->w->nnodes > 1) idist__host_progress(ring);
    if (ring->left_count) idist__progress_left(ring);
    if (ring->ask_again_ns) idist__ask_again(ring);
}

// Before a sleep: nothing may wait for more to send.
static void idist__progress_uncork(idist__ring *ring) {
    int i;

    for (i = 0; ring->corked_count && i < ring->w->group.size; i++)
        if (ring->links[i].corked) idist__link_flush(ring, &ring->links[i]);
}

// Moves everything that can move, without blocking.
static void idist__progress_move_all(idist__ring *ring) { idist__progress_move(ring, true); }

// How often a rank looks for processes of its host that have ended.
static int64_t idist__progress_look_ns(const idist__segment *m) {
    return idist__liveness_patience(m) * IDIST__LOOK_NS;
}

// The system does not let us see whether other processes of this host have ended.
static void idist__progress_is_blind(idist__ring *ring) {
    if (!ring->told_blind)
        idist__log_print(&ring->w->log, IDIST_LOG_WARN,
                         "cannot see whether other processes of this host have ended (%s), so only "
                         "a time-out will tell; IDIST_TRANSPORT=socket avoids that",
                         strerror(ring->shm->blind_error));
    ring->told_blind = true;
}

// If it is time for that, looks for what neither reading nor the doorbell tells: the end of a
// process on this host and, in case this rank never sleeps, what its sockets have. waits: we are
// about to sleep. Otherwise we are busy, and check only a few beacons.
static void idist__progress_look(idist__ring *ring, int64_t now_ns, bool waits) {
    if (!ring->shm || now_ns - ring->looked_ns <= idist__progress_look_ns(ring->shm)) return;
    ring->looked_ns = now_ns;
    idist__liveness_look(ring->shm,
                         waits ? idist__liveness_share(ring->shm) : IDIST__ENDED_LOOKS_LEAST);
    if (ring->shm->blind_error) idist__progress_is_blind(ring);
    if (idist__liveness_any(ring->shm)) idist__progress_move_all(ring);
    if (ring->polled_link_count) idist__progress_turn(ring);
}

// A caller polls. A read that finds nothing costs a system call, so links that no algorithm is
// waiting on are read less often.
static void idist__progress_run(idist__world *w) {
    idist__ring *ring = idist__ring_of(w);

    idist__progress_move(ring, ring->polled_count++ % IDIST__PROGRESS_TURNS == 0);
    idist__ring_settle(ring);
}

//------------------------------------------------------------------------------
// [engine:wait]  sleeping, waking, and waiting until everything is written
// uses clock mutex wake poll model shm:segment doorbell msg:types msg:failure
// uses link share:share connector progress
//
// A rank sleeps in one of three ways:
//
//   no shared memory             in poll, on ring->watch (all connections), the sockets of the
//                                connector and the wake-up of this process
//   shared memory and streams    in poll as well, and its beacon is in the set; its doorbell says
//                                ASLEEP_IN_POLL, so that a rank of this host wakes it by the beacon
//   shared memory only           on its doorbell, a futex (ASLEEP_ON_WORD)
//
// With shared memory it looks for processes that have ended every IDIST__LOOK_NS (10 ms), in a long
// wait every 30 ms, and less often while many ranks sleep: see [shm:ended].
//
// A rank marks its doorbell before it sleeps and then looks at everything once more, so no wake-up
// is lost between the look and the sleep. A doorbell that has been rung is not rung again. The last
// look may itself consume a wake-up (it polls when there are many streams), so we sleep only while
// the doorbell is still marked. Another thread that reads the links while we sleep may consume one
// as well; it has to call `wake` afterwards.
//------------------------------------------------------------------------------

// Sleeps beside the other ranks of this host: in poll or on the doorbell, until something happens
// or it is time to look for processes that have ended. Each sleep that nothing interrupts makes the
// next one a little longer.
static void idist__sleep_near_others(idist__ring *ring, int64_t now_ns, int64_t until_ns) {
    idist__world *w = ring->w;
    const idist__segment *m = ring->shm;
    int64_t look_ns = now_ns + idist__progress_look_ns(m) + ring->extra_sleep_ns;
    int64_t wake_ns = look_ns < until_ns ? look_ns : until_ns;

    if (ring->polled_link_count) {
        idist__progress_sleep(ring, wake_ns);
    } else {
        idist__os_mutex_unlock(&w->lock);
        idist__os_wake_await_word(&idist__segment_doorbell(m, m->me)->asleep, IDIST__ASLEEP_ON_WORD,
                                  wake_ns);
        idist__os_mutex_lock(&w->lock);
    }

    if (idist__os_clock_now_ns() < look_ns) ring->extra_sleep_ns = 0;
    else if (ring->extra_sleep_ns < 2 * IDIST__LOOK_NS) ring->extra_sleep_ns += IDIST__MS;
}

// Sleeps until I/O arrives, `wake` is called or the deadline passes; handles what arrived.
static void idist__sleep_begin(idist__world *w, int64_t until_ns) {
    idist__ring *ring = idist__ring_of(w);
    const idist__segment *m = ring->shm;
    uint32_t ended = w->ended_count;
    int64_t now_ns = idist__os_clock_now_ns();
    uint32_t place = ring->polled_link_count ? IDIST__ASLEEP_IN_POLL : IDIST__ASLEEP_ON_WORD;
    int awaited;

    idist__progress_uncork(ring);
    if (ring->ask_again_ns && ring->ask_again_ns < until_ns) until_ns = ring->ask_again_ns;

    if (!m) {
        idist__progress_sleep(ring, until_ns);
        idist__ring_settle(ring);
        return;
    }

    idist__progress_look(ring, now_ns, true);
    awaited = idist__share_awaited(ring);
    idist__doorbell_arm(m, place, awaited);
    idist__progress_move_all(ring);

    if (w->ended_count == ended && !ring->failed && !idist__doorbell_was_rung(m) &&
        idist__share_awaited(ring) == awaited)
        idist__sleep_near_others(ring, now_ns, until_ns);

    idist__doorbell_disarm(m);
    idist__ring_settle(ring);
}

// Tells the other ranks of the host whether this one is in a call that waits.
static void idist__sleep_attend(idist__world *w, bool waits) {
    const idist__ring *ring = idist__ring_of(w);
    if (ring->shm) idist__doorbell_attend(ring->shm, waits);
}

// Ends the sleep of a thread of this process. The caller holds the lock of the world.
static void idist__sleep_wake(idist__world *w) {
    const idist__ring *ring = idist__ring_of(w);
    const idist__segment *m = ring->shm;

    if (m && __atomic_load_n(&idist__segment_doorbell(m, m->me)->asleep, __ATOMIC_RELAXED) ==
                 IDIST__ASLEEP_ON_WORD)
        idist__doorbell_wake(m, m->me);
    else idist__os_poll_wakeup_signal(ring->wake);
}

// Whether frames are waiting to be written or, when all ranks leave in order, a BYE has yet to
// arrive.
static bool idist__sleep_is_busy(const idist__ring *ring, bool clean) {
    int i;

    for (i = 0; i < ring->w->group.size; i++) {
        const idist__link *l = &ring->links[i];
        if (!idist__link_is_connected(l)) continue;
        if (l->out && !l->write_dead) return true;
        if (clean && !l->bye && l->transport->lossy_close) return true;
    }

    return clean && ring->connector && idist__connector_leave(ring->connector);
}

static void idist__sleep_drain(idist__ring *ring, bool clean, int64_t until_ns) {
    while (idist__sleep_is_busy(ring, clean) && idist__os_clock_ms_until(until_ns) != 0) {
        int64_t soon_ns =
            idist__os_clock_now_ns() + IDIST__MS; // no wake-up is sent when a pipe has space again
        idist__progress_sleep(ring, soon_ns < until_ns && ring->shm ? soon_ns : until_ns);
        idist__progress_look(ring, idist__os_clock_now_ns(), true);
        idist__progress_move_all(ring);
    }
}

static void idist__sleep_flush(idist__world *w, int64_t until_ns) {
    idist__sleep_drain(idist__ring_of(w), false, until_ns);
    idist__ring_settle(idist__ring_of(w));
}

//------------------------------------------------------------------------------
// [engine:task]  calls start, and are checked against other ranks
// uses clock mem launch:env kind model fingerprint self doorbell msg:types
// uses msg:op index msg:failure history send recv share:share host choose
// uses progress
//
// idist__start_task_start sends a call one of five ways:
//
//   send, recv                 idist_msg.h
//   a group of one rank        idist_core.h, a copy
//   members share memory       idist_share.h
//   members on several hosts   [algo:host]
//   otherwise                  [algo:choose], messages between ranks
//
// Every collective notes its fingerprint first, and compares it with what other ranks have already
// sent for the call of the same number.
//------------------------------------------------------------------------------

static void idist__start_task_compare(idist__ring *ring, const idist__task *t) {
    idist_group *g = t->group;
    const idist__ring_group *rg = idist__ring_group_of(g);
    const idist__fingerprint *ours = &rg->history[t->seq % IDIST__HISTORY];
    int i;

    for (i = 0; i < g->size; i++) {
        uint64_t key = idist__index_key(g->ctx, g->ranks[i], false, t->seq);
        idist__index_node *hook = ring->messages[key % IDIST__BUCKETS].first;
        const char *field = NULL;

        if (i == g->rank) continue;
        if (rg->seen[i].seq == t->seq && rg->seen[i].fingerprint.seq == t->seq)
            field = idist__fingerprint_difference(&rg->seen[i].fingerprint, ours);
        if (field)
            idist__history_mismatch(ring, g, g->ranks[i], &rg->seen[i].fingerprint, ours, field);

        for (; hook && !ring->failed; hook = hook->next) {
            const idist__message *m = idist__index_message(hook);

            if (m->peer != g->ranks[i] || m->frame.ctx != g->ctx ||
                m->frame.fingerprint.seq != t->seq)
                continue;
            if (m->frame.fingerprint.kind == IDIST__SEND || m->frame.type > IDIST__CTS) continue;
            idist__history_agrees(ring, g, g->ranks[i], &m->frame);
        }
    }
}

// A blocking call without a task, while there are no tasks. False: it needs one.
static bool idist__start_task_quick(idist_group *g, const idist__call *c) {
    const idist__link *l;

    if (c->kind == IDIST__SEND) return idist__send_quick(g, c);
    if (c->kind != IDIST__RECV) return idist__share_quick(g, c);
    l = idist__recv_link(g, c);
    if (!l) return false;

    return l->at < l->end ? idist__progress_take(g, c) : idist__recv_quick(g, c);
}

static bool idist__start_task_quick_message(idist_group *g, const idist__call *c) {
    return c->kind == IDIST__SEND ? idist__send_quick(g, c) : idist__progress_take(g, c);
}

// Before a call starts: reads what has arrived, in case its group has failed.
static void idist__start_task_listen(idist__ring *ring, const idist__task *t) {
    if (t->started_ns - ring->last_start_ns > IDIST__MS && !t->group->inner) {
        idist__progress_move_all(ring);
        idist__ring_settle(ring);
        if (t->done) return;
    }

    ring->last_start_ns = t->started_ns;

    // A sleeping rank looks for processes that have ended, but this one may never sleep.
    if (!t->group->inner) {
        idist__progress_look(ring, t->started_ns, false);
        idist__ring_settle(ring);
    }
}

static void idist__start_task_start_collective(idist__ring *ring, idist__task *t,
                                               idist__algorithm algorithm) {
    bool shared = idist__share_serves(algorithm);
    bool by_host = algorithm == IDIST__ALGO_BY_HOST, prepared = true;

    if (shared) prepared = idist__share_prepare(t, algorithm);
    else if (by_host) idist__host_prepare(t);
    else prepared = idist__choose_begin(t, algorithm);

    if (!prepared) {
        idist__ring_fail_memory(ring, t->group);
        return;
    }

    idist__history_add(t, idist__op_of(t), algorithm);
    idist__start_task_compare(ring, t);

    if (shared) {
        idist__share_start(t);
    } else if (by_host) {
        idist__host_start(t);
    } else {
        idist__choose_run(t);
        if (!ring->failed) idist__op_run(t);
    }
}

static void idist__start_task_start(idist__task *t) {
    idist__ring *ring = idist__ring_of(t->group->w);
    bool collective = t->call.kind < IDIST__SEND;
    idist__algorithm algorithm = IDIST__ALGO_AUTO;

    if (ring->shm) idist__doorbell_widen(ring->shm);
    if (collective) idist__mem_clear(t->impl, sizeof(idist__op));
    else idist__op_of(t)->transfer = NULL;

    if (collective && t->group->size > 1) algorithm = idist__choose_algorithm(t->group, &t->call);

    idist__start_task_listen(ring, t);
    if (t->done) return;

    if (t->call.kind == IDIST__SEND) idist__send_start(t);
    else if (t->call.kind == IDIST__RECV) idist__recv_start(t);
    else if (t->group->size == 1) idist__self_collective(t);
    else idist__start_task_start_collective(ring, t, algorithm);

    idist__ring_settle(ring);
}

//------------------------------------------------------------------------------
// [engine:cancel]  forgetting a call, and telling others that a group failed
// uses mem launch:env kind model core:group shm:segment msg:types msg:op
// uses transfer link msg:message share:share host deadlock
//
// After idist__cancel_task no byte of the buffers of a call is touched, whatever still arrives.
// What a task may have in the links, and what becomes of it:
//
//   receives posted, or matched    taken out; payloads that still come for them are dropped
//   sends not begun                taken out; the credit of an eager one comes back
//   sends partly written           completed from a copy, or the stream would be useless
//   sends that wait for CTS        taken out; the answer will find nothing
//
// A call that no other rank knows of ends without consequences. If a peer knows of it already, the
// group fails too; the return values say which it is.
//------------------------------------------------------------------------------

// Invalidates the addresses that this rank has announced in RTS frames: what peers on this host
// read there from now on, they discard.
static void idist__cancel_withdraw(const idist__ring *ring) {
    if (!ring->shm) return;
    __atomic_fetch_add(&idist__segment_doorbell(ring->shm, ring->shm->me)->withdrawn, 1u,
                       __ATOMIC_SEQ_CST);
}

// Removes the transfers of a task from a list. Returns whether there were any.
static bool idist__cancel_list(idist__ring *ring, const idist__transfer_list *list,
                               const idist__task *t) {
    idist__transfer *v, *next;
    bool any = false;

    for (v = list->first; v; v = next) {
        next = v->next;
        if (v->task != t) continue;
        idist__transfer_take(v);
        idist__transfer_free(ring, v);
        any = true;
    }

    return any;
}

// A frame that is partly written must be completed. Its payload is copied, because the buffer
// belongs to the caller again.
static void idist__cancel_written(idist__ring *ring, idist__link *l, idist__transfer *v) {
    size_t unwritten = v->piece - v->piece_moved;

    if (idist__kind_is_p2p(v->task->call.kind)) idist__op_of(v->task)->transfer = NULL;
    v->task = NULL;
    if (v->frame.type == IDIST__RTS) idist__cancel_withdraw(ring);

    if (!unwritten) {
        // An RTS would wait for its CTS; its type is written already and can change here.
        if (v->frame.type == IDIST__RTS) v->frame.type = IDIST__CREDIT;
        v->nbytes = v->piece = v->piece_moved = v->moved = 0;
        return;
    }

    v->owned = (char *)idist__mem_raw(&ring->w->cfg.mem, unwritten);

    if (!v->owned) {
        idist__link_write_failed(ring, l);
        return;
    }

    memcpy(v->owned, v->data + v->moved + v->piece_moved, unwritten);
    v->data = v->owned;
    v->moved = v->piece_moved = 0;
    v->nbytes = v->piece = unwritten;
}

// Takes out what is queued to be written. Returns whether the peer knows of any of it.
static bool idist__cancel_queue(idist__ring *ring, idist__link *l, const idist__task *t) {
    idist__transfer **at = &l->out;
    bool known = false;

    if (l->out && l->out->task == t && l->out->frame_moved + l->out->piece_moved > 0) {
        known = true;
        idist__cancel_written(ring, l, l->out);
    }

    while (*at) {
        idist__transfer *v = *at;

        if (v->task != t) {
            at = &v->next;
            continue;
        }

        known = known || v->started;
        if (v->frame.type == IDIST__EAGER) l->window += v->nbytes + IDIST__FRAME_BYTES;
        *at = v->next;
        idist__transfer_free(ring, v);
    }

    l->out_end = at;

    return known;
}

// Takes a task out of the messages that came early. Returns whether it had claimed one.
static bool idist__cancel_early(idist__ring *ring, idist__link *l, const idist__task *t) {
    idist__message *m, *next;
    bool claimed = false;

    for (m = l->early; m; m = next) {
        next = m->next;

        if (m->claim && m->claim->task == t) {
            idist__transfer_free(ring, m->claim);
            m->claim = NULL;
            claimed = true;
        }

        if (m->self_send && m->self_send->task == t) {
            idist__transfer_free(ring, m->self_send);
            idist__message_free(ring, l, m);
        }
    }

    return claimed;
}

// Takes a task out of all links. Returns whether a peer knows of any of it.
static bool idist__cancel_links(idist__ring *ring, const idist__task *t) {
    bool known = false;
    int i;

    for (i = 0; i < ring->w->group.size; i++) {
        idist__link *l = &ring->links[i];

        if (l->in_transfer && l->in_transfer->task == t) {
            idist__transfer *v = l->in_transfer;
            if (l->in.type == IDIST__EAGER) idist__transfer_free(ring, v); // it is in no list
            l->in_transfer = NULL;
            l->target = NULL;
            known = true;
        }

        known |= idist__cancel_early(ring, l, t);
        known |= idist__cancel_queue(ring, l, t);
        if (ring->shm && idist__deadlock_has_transfer(&l->waiting, t)) idist__cancel_withdraw(ring);
        known |= idist__cancel_list(ring, &l->waiting, t);
        known |= idist__cancel_list(ring, &l->receiving, t);
        idist__cancel_list(ring, &l->posted, t);
    }

    return known;
}

// The fast path for a send that waits for CTS or a receive without a message: it has one transfer,
// and thousands may be cancelled at once. False: it is not of this kind.
static bool idist__cancel_waiting(idist__ring *ring, const idist__task *t) {
    idist__transfer *v = idist__kind_is_p2p(t->call.kind) ? idist__op_of(t)->transfer : NULL;

    if (!v || !v->list) return false;
    if (t->call.kind == IDIST__RECV && !idist__deadlock_is_unmatched(t)) return false;
    if (t->call.kind == IDIST__SEND) idist__cancel_withdraw(ring);
    idist__transfer_take(v);
    idist__transfer_free(ring, v);

    return true;
}

// Takes back the announcement that this rank waits in a receive.
static void idist__cancel_announced(idist__ring *ring, const idist__task *t) {
    idist__frame f;

    if (!t->announced || t->call.root < 0) return;
    memset(&f, 0, sizeof f);
    f.type = IDIST__WAITS;
    f.fingerprint.kind = IDIST__RECV;
    idist__link_control(ring, &ring->links[idist__group_world_rank(t->group, t->call.root)], &f,
                        NULL);
}

static void idist__cancel_collective(idist__ring *ring, idist__task *t) {
    idist__op *o = idist__op_of(t);

    if (o->algorithm == IDIST__ALGO_BY_HOST && !idist__host_cancel(t)) return;
    if (idist__share_serves(o->algorithm)) idist__share_cancel(t);

    idist__mem_free(&ring->w->cfg.mem, o->memory);
    o->memory = NULL;
}

static bool idist__cancel_task(idist__task *t) {
    idist__ring *ring = idist__ring_of(t->group->w);
    bool was_waiting = idist__cancel_waiting(ring, t);
    bool known = was_waiting || idist__cancel_links(ring, t); // a waiting send has announced itself

    if (t->call.kind == IDIST__SEND) return !known;

    if (t->call.kind == IDIST__RECV) {
        idist__cancel_announced(ring, t);
        return was_waiting;
    }

    idist__cancel_collective(ring, t);

    return false;
}

// A receive that has found no message is in a list of its group only.
static bool idist__cancel_retract(idist__task *t) {
    return idist__deadlock_is_unmatched(t) && idist__cancel_task(t);
}

// Tells the other members that a group failed.
static void idist__cancel_tell(idist_group *g) {
    idist__ring *ring = idist__ring_of(g->w);
    const idist__ring_group *rg = idist__ring_group_of(g);
    int i;

    idist__share_withdraw(g);

    for (i = 0; i < g->size; i++)
        if (i != g->rank)
            idist__link_abort(ring, &ring->links[g->ranks[i]], g->ctx, g->status, g->cause);

    if (rg->near) idist__group_fail(rg->near, g->status, g->cause);
    if (rg->leads) idist__group_fail(rg->leads, g->status, g->cause);
    idist__share_await_writers(g);
}

//------------------------------------------------------------------------------
// [engine:group]  opening and closing a group, and its groups by host
// uses mem base:window hash model core:group shm:segment shm:window msg:types
// uses link msg:message pool host
//
// Frames for a group may arrive before it exists here. They wait in the links until the group is
// opened. Closing a group drops what is left, and the ring remembers its context for a while, to
// drop frames that arrive later.
//
// Once a group is open, its members meet. If they all share memory, each of them has offered a
// region there, and collectives use those. If they are on several hosts, the group gets two inner
// groups for collectives by host (near and leads, see [algo:host]).
//------------------------------------------------------------------------------

enum { IDIST__GROUP_NEAR = 1, IDIST__GROUP_LEADS = 2 }; // mixed into the context of the parent

// Drops what has arrived for a context, and what still arrives.
static void idist__members_drop(idist__ring *ring, uint64_t ctx, idist_status status) {
    idist__closed *closed = &ring->closed[ring->nclosed++ % IDIST__CLOSED];
    int i;

    closed->ctx = ctx;
    closed->status = status;

    for (i = 0; i < ring->w->group.size; i++) {
        idist__link *l = &ring->links[i];
        idist__message *m, *next;

        for (m = l->early; m; m = next) {
            bool complete = m->frame.type == IDIST__EAGER && m->moved == m->frame.nbytes;
            size_t nbytes = (size_t)m->frame.nbytes;

            next = m->next;
            if (m->frame.ctx != ctx) continue;
            idist__message_free(ring, l, m);
            if (complete && i != ring->w->group.rank) idist__link_consumed(ring, l, nbytes);
        }
    }
}

static bool idist__members_spans_hosts(const idist_group *g) {
    const idist__rank_info *nodes = g->w->nodes;
    int i;

    for (i = 1; i < g->size; i++)
        if (nodes[g->ranks[i]].host != nodes[g->ranks[0]].host) return true;

    return false;
}

static void idist__members_close(idist_group *g) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__ring_group *rg = idist__ring_group_of(g);
    bool has_failed = g->status != IDIST_OK && !g->inner && rg->spans_hosts;
    bool drops_near = has_failed && !rg->near, drops_leads = has_failed && !rg->leads;
    const idist_group *parent;

    idist__members_drop(ring, g->ctx, g->status);
    if (rg->near) idist__group_free(rg->near);
    if (rg->leads) idist__group_free(rg->leads);

    // If the group failed before its members met here, others may have used the groups by host.
    if (drops_near)
        idist__members_drop(ring, idist__hash_mix(g->ctx, IDIST__GROUP_NEAR), g->status);
    if (drops_leads)
        idist__members_drop(ring, idist__hash_mix(g->ctx, IDIST__GROUP_LEADS), g->status);

    for (parent = &g->w->group; g->inner && parent; parent = parent->next) {
        idist__ring_group *of =
            parent->rank >= 0 && parent->impl ? idist__ring_group_of(parent) : NULL;
        if (of && of->near == g) of->near = NULL;
        if (of && of->leads == g) of->leads = NULL;
    }

    idist__pool_leave(g);
    idist__mem_free(&g->w->cfg.mem, rg->rank_of);
    idist__mem_free(&g->w->cfg.mem, rg->seen);
}

// Handles what arrived from a rank for this group before the group existed.
static void idist__members_hear(idist_group *g, idist__link *l) {
    idist__message *m;

    for (m = l->early; m; m = m->next) {
        if (m->frame.ctx != g->ctx || !m->unknown) continue;
        m->unknown = false;
        l->unknown_count--;
    }

    for (m = l->early; m; m = m->next)
        if (m->frame.ctx == g->ctx && m->frame.type == IDIST__ABORT)
            idist__group_fail(g, (idist_status)(int)(int64_t)m->frame.aux, m->data);
}

// Makes the ring's part of a group.
static idist_status idist__members_init(idist_group *g) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__ring_group *rg = idist__ring_group_of(g);
    const idist_allocator *mem = &g->w->cfg.mem;
    int i;

    rg->rank_of = (int *)idist__mem_alloc(mem, sizeof(int) * (size_t)g->w->group.size);
    rg->seen = (idist__seen *)idist__mem_alloc(mem, sizeof *rg->seen * (size_t)g->size);

    if (!rg->rank_of || !rg->seen) {
        idist__mem_free(mem, rg->rank_of);
        idist__mem_free(mem, rg->seen);
        return IDIST_ERR_NO_MEMORY;
    }

    rg->spans_hosts = idist__members_spans_hosts(g);
    for (i = 0; i < g->w->group.size; i++) rg->rank_of[i] = -1;
    for (i = 0; i < g->size; i++) rg->rank_of[g->ranks[i]] = i;

    for (i = 0; i < g->size; i++) {
        idist__link *l = &ring->links[g->ranks[i]];

        idist__members_hear(g, l);

        if (i != g->rank && !l->open && !l->bye) {
            char cause[200];
            snprintf(cause, sizeof cause, "rank %d on %s was lost", g->ranks[i],
                     g->w->nodes[g->ranks[i]].hostname);
            idist__group_fail(g, IDIST_ERR_PEER_LOST, cause);
        }
    }

    return IDIST_OK;
}

// ---- near and leads ----

// Makes a group inside another one, from world ranks.
static idist_status idist__members_new_inner(idist_group *parent, uint64_t salt, const int *ranks,
                                             int n, idist_group **out) {
    idist__world *w = parent->w;
    idist_group *g = idist__group_new(w, n);
    idist_status status;

    if (!g) return IDIST_ERR_NO_MEMORY;
    idist__group_set(g, idist__hash_mix(parent->ctx, salt), ranks, n);
    g->inner = true;
    status = idist__members_init(g);

    if (status != IDIST_OK) {
        g->rank = -1; // it is not open
        idist__group_free(g);
        return status;
    }

    idist__ring_group_of(g)->whole = parent;
    g->next = w->group.next;
    w->group.next = g;
    *out = g;

    return IDIST_OK;
}

typedef struct idist__group_hosts { // the members of a group by host
    uint64_t *near_offers;          // regions that the members on this host offer
    int *near, *leads;              // world ranks: members on this host; first member of each host
    int near_count, lead_count;
    bool in_order; // the members of each host are consecutive
} idist__group_hosts;

static void idist__members_find_hosts(const idist_group *g, const uint64_t *offers,
                                      idist__group_hosts *hosts) {
    int i, k, changes = 1;

    for (i = 0; i < g->size; i++) {
        uint64_t host = idist__host_of(g, i);

        for (k = 0; k < i && idist__host_of(g, k) != host; k++) continue;

        if (k == i) hosts->leads[hosts->lead_count++] = g->ranks[i];
        if (i && host != idist__host_of(g, i - 1)) changes++;
        if (host != idist__host_of(g, g->rank)) continue;
        hosts->near_offers[hosts->near_count] = offers ? offers[i] : 1;
        hosts->near[hosts->near_count++] = g->ranks[i];
    }

    hosts->in_order = changes == hosts->lead_count;
}

static idist_status idist__members_split_by_host(idist_group *g, const idist__group_hosts *hosts) {
    idist__ring_group *rg = idist__ring_group_of(g);
    idist_status status = IDIST_OK;

    rg->nhosts = hosts->lead_count;
    rg->in_order = hosts->in_order;

    if (hosts->near_count > 1)
        status = idist__members_new_inner(g, IDIST__GROUP_NEAR, hosts->near, hosts->near_count,
                                          &rg->near);
    if (status == IDIST_OK && rg->near) status = idist__pool_meet(rg->near, hosts->near_offers);
    if (status == IDIST_OK && hosts->near[0] == g->w->group.rank)
        status = idist__members_new_inner(g, IDIST__GROUP_LEADS, hosts->leads, hosts->lead_count,
                                          &rg->leads);

    return status;
}

// Gives a group what its members can use: regions of shared memory, or near and leads. offers: the
// region that each member offers; NULL: the first one of each. The world passes NULL and so needs
// no exchange: all ranks know the table of hosts, and all first regions are free.
static idist_status idist__members_meet(idist_group *g, const uint64_t *offers) {
    const idist_allocator *mem = &g->w->cfg.mem;
    size_t n = (size_t)g->size;
    idist__group_hosts hosts;
    idist_status status = IDIST_OK;

    idist__ring_group_of(g)->met = true;
    memset(&hosts, 0, sizeof hosts);
    hosts.near_offers =
        (uint64_t *)idist__mem_alloc(mem, n * (sizeof *hosts.near_offers + 2 * sizeof(int)));
    if (!hosts.near_offers) return IDIST_ERR_NO_MEMORY;
    hosts.near = (int *)(void *)(hosts.near_offers + n);
    hosts.leads = hosts.near + n;
    idist__members_find_hosts(g, offers, &hosts);

    if (hosts.lead_count == 1) status = idist__pool_meet(g, hosts.near_offers);
    else if (hosts.lead_count < g->size) status = idist__members_split_by_host(g, &hosts);

    idist__mem_free(mem, hosts.near_offers);

    return status;
}

static idist_status idist__members_open(idist_group *g) {
    idist_status status = idist__members_init(g);

    if (status != IDIST_OK || g != &g->w->group) return status;
    idist__pool_offer_region(g);
    status = idist__members_meet(g, NULL);
    if (status != IDIST_OK) idist__members_close(g);

    return status;
}

// ---- memory that other ranks can reach ----

static void *idist__members_alloc(idist__world *w, size_t nbytes) {
    idist__segment *m = idist__ring_of(w)->shm;
    void *p = m && m->window ? idist__window_alloc(m->window, nbytes) : NULL;

    if (p) idist__view_publish(m);
    return p;
}

#endif // IDIST_ENGINE_H
