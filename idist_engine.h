/* idist_engine.h - v0.1.0 - progress of the ring backend - MIT licence

    Part of the implementation of idist; idist.h includes it where IDIST_IMPLEMENTATION is defined.

CONTENTS

      [engine:engine]  frames arrive, tasks start and end, waits are announced
*/
#ifndef IDIST_ENGINE_H
#define IDIST_ENGINE_H

//------------------------------------------------------------------------------
// [engine:engine]  frames arrive, tasks start and end, waits are announced
// uses os err mem base:type world self segment msg:types op link match verb
// uses share choose host
//------------------------------------------------------------------------------

static void idist__link_lost(idist__ring *ring, int peer, const char *how) {
    idist__link *l = &ring->links[peer];

    if (!l->open) return;
    l->open = false;
    l->transport->close(l->port);
    if (!l->transport->polled) ring->nstreams--;
    if (!l->bye) idist__world_lost(ring->w, peer, how);
}

// A frame of another rank failed a group. The group may not exist here yet: then the frame waits
// for it.
static void idist__ring_aborted(idist__ring *ring, idist__link *l) {
    idist_group *g = idist__world_find_group(ring->w, l->in.ctx);
    int status = (int)(int64_t)l->in.aux;

    l->text[l->in.nbytes] = 0;
    if (status >= 0 || status < IDIST_ERR_DEVICE) status = IDIST_ERR_INTERNAL;

    if (g) {
        idist__group_fail(g, (idist_status)status, l->text);
    } else if (!idist__ring_has_closed(ring, l->in.ctx)) {
        idist__message *m = idist__message_new(ring, l, &l->in, sizeof l->text);
        if (!m) return;
        m->frame.aux = (uint64_t)(int64_t)status;
        memcpy(m->data, l->text, sizeof l->text);
    }
}

static bool idist__verb_in(const idist__verbs *list, const idist__task *t) {
    const idist__verb *v;
    for (v = list->first; v; v = v->next)
        if (v->task == t) return true;
    return false;
}

// Whether a receive has found no message yet.
static bool idist__recv_unmatched(const idist__task *t) {
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    const idist__verb *v = idist__op_of(t)->verb;
    return v && (v->list == &rg->recvs || v->list == &rg->wild);
}

// ---- two ranks that wait for each other, in different calls ----
//
// Calls on different groups, or a receive against a collective, exchange nothing by which they
// could be compared. They are found by WAITS, which a rank sends when it has waited for a while. It
// is certain that neither will ever go on when all of this holds, on both sides:
//   - the rank has one thread and one call under way, which blocks without a time-out of its own:
//   it can do nothing else;
//   - that call lacks something that only the other rank can begin to send;
//   - and the other rank has not begun it: nothing of the kind is on its way.
// Any doubt (another thread, a request, a group we no longer know) means: say nothing, the deadline
// will.

// Whether t lacks something that the rank of this link has to begin.
static bool idist__ring_needs(const idist__link *l, const idist__task *t, int group_rank) {
    if (t->call.kind == IDIST__RECV) return t->call.root == group_rank && idist__recv_unmatched(t);

    if (t->call.kind != IDIST__SEND &&
        idist__op_of(t)->algorithm == IDIST__BY_HOST) { // then its part does
        const idist__task *part = idist__op_of(t)->step;
        int rank = part && !part->done
                       ? idist__ring_group_of(part->group)->rank_of[t->group->ranks[group_rank]]
                       : -1;
        return rank >= 0 && idist__ring_needs(l, part, rank);
    }

    if (t->call.kind != IDIST__SEND && idist__op_of(t)->algorithm >= IDIST__FLAT)
        return idist__share_needs(t, group_rank);

    return idist__verb_in(&l->posted, t) || idist__verb_in(&l->waiting, t);
}

// Whether what the other rank waits for may still come from us.
static bool idist__ring_answered(idist__ring *ring, idist__link *l, const idist__frame *waits) {
    idist_group *g = idist__world_find_group(ring->w, waits->ctx);
    idist__message *m;

    if (waits->print.kind == IDIST__RECV)
        return waits->aux != l->p2p_sent; // aux: how many messages it had got from us
    if (waits->print.kind != IDIST__SEND)
        return !g || (int32_t)(waits->print.seq - g->seq) <= 0; // we are, or were, in that call
    for (m = l->early; m; m = m->next) // its message lies here, and nobody wants it
        if (m->frame.type == IDIST__RTS && m->frame.id == waits->id) return false;

    return true;
}

static void idist__ring_find_deadlock(idist__ring *ring, int peer) {
    idist__link *l = &ring->links[peer];
    const idist__frame *waits = &l->peer_waits;
    idist__task *ours;
    idist_group *theirs;
    char cause[400];
    int rank;

    if (waits->type != IDIST__WAITS || waits->flags != (IDIST__NEEDS_YOU | IDIST__ONLY_CALL))
        return;
    ours = idist__world_only_call(ring->w);
    if (!ours || !ours->announced) return;
    rank = idist__ring_group_of(ours->group)->rank_of[peer];
    if (rank < 0 || (ours->group->ctx == waits->ctx && ours->seq == waits->print.seq && ours->seq))
        return;
    if (!idist__ring_needs(l, ours, rank) || idist__ring_answered(ring, l, waits)) return;
    theirs = idist__world_find_group(ring->w, waits->ctx);
    idist__deadlock_text(ours, peer, &waits->print, ours->group->ctx == waits->ctx, cause,
                         sizeof cause);
    idist__ring_fail(ring, ours->group, IDIST_ERR_MISMATCH, cause);
    idist__ring_settle(ring);
    if (theirs) idist__ring_fail(ring, theirs, IDIST_ERR_MISMATCH, cause);
}

// The other rank waits in a call. It learns that we are there, or else which call of the group was
// our last, since we may be what it waits for; if we are in a different one, both learn that.
static void idist__ring_waits(idist__ring *ring, idist__link *l, int peer) {
    idist_group *g = idist__world_find_group(ring->w, l->in.ctx);
    idist__frame f;

    l->peer_waits = l->in;

    if (l->in.print.kind != IDIST__SEND && l->in.print.kind != IDIST__RECV && g &&
        g->status == IDIST_OK) {
        if (!idist__ring_agree(ring, g, peer, &l->in)) return;
        f = l->in;
        f.type = IDIST__HERE;
        if ((int32_t)(l->in.print.seq - g->seq) > 0)
            f.print = idist__ring_group_of(g)->history[g->seq % IDIST__HISTORY];
        idist__link_control(ring, l, &f, NULL);
    }

    idist__ring_find_deadlock(ring, peer);
}

// A message begins: all of it (EAGER), or the announcement (RTS), after which nothing follows. Sets
// where the payload goes. False when the frame is malformed.
static bool idist__link_begins(idist__ring *ring, idist__link *l, int peer) {
    idist_group *g = idist__world_find_group(ring->w, l->in.ctx);
    bool p2p = l->in.print.kind == IDIST__SEND,
         gone = !g && idist__ring_has_closed(ring, l->in.ctx);

    if (p2p &&
        (l->in.print.check > SIZE_MAX / 16 ||
         l->in.nbytes != l->in.print.check * idist_dtype_size((idist_dtype)l->in.print.dtype)))
        return false;
    if (p2p) l->p2p_got++;
    l->peer_waits.type = 0;
    l->in_verb = idist__match_frame(ring, l, peer, &l->in);

    if (l->in.type == IDIST__RTS) {
        idist__verb *v = l->in_verb;
        l->in_verb = NULL;
        if (v) idist__link_clear_to_send(ring, l, peer, v, &l->in);
        else if (!gone && !idist__message_new(ring, l, &l->in, 0))
            idist__ring_fail(ring, g ? g : &ring->w->group, IDIST_ERR_NO_MEMORY,
                             "a rank is out of memory");
        l->left = 0;
        return true;
    }

    if (l->in_verb) {
        l->in_verb->frame = l->in;
        l->target = l->in_verb->data;
    } else if (!gone && (!g || g->status == IDIST_OK)) {
        l->in_message = idist__message_new(ring, l, &l->in, (size_t)l->in.nbytes);
        l->target = l->in_message ? l->in_message->data : NULL;
        if (!l->in_message)
            idist__ring_fail(ring, g ? g : &ring->w->group, IDIST_ERR_NO_MEMORY,
                             "a rank is out of memory");
    }

    return true;
}

// Takes out the send that the frame answers; NULL: it was cancelled meanwhile.
static idist__verb *idist__link_answered(idist__ring *ring, const idist__link *l) {
    idist__verb *v = idist__verb_named(ring, &l->waiting, l->in.id);
    if (v) idist__verb_take(v);
    return v;
}

static void idist__link_cts(idist__ring *ring, idist__link *l) {
    idist__verb *v = idist__link_answered(ring, l);

    if (!v) return;
    v->frame.type = IDIST__DATA;
    v->frame.id = l->in.aux;
    v->piece = v->nbytes < IDIST__PIECE_BYTES ? v->nbytes : IDIST__PIECE_BYTES;
    v->frame.nbytes = v->piece;
    idist__link_push(l, v);
    idist__link_flush(ring, l);
}

static void idist__link_pulled(idist__ring *ring, const idist__link *l) {
    idist__verb *v = idist__link_answered(ring, l);
    if (v) idist__verb_done(ring, v);
}

static bool idist__link_data(idist__ring *ring, idist__link *l) {
    idist__verb *v = idist__verb_named(ring, &l->receiving, l->in.id);
    if (v && l->in.nbytes > v->nbytes - v->moved) return false;
    l->in_verb = v; // NULL: the receive was cancelled meanwhile
    l->target = v ? v->data + v->moved : NULL;
    return true;
}

// Whether the peer may send the frame that has arrived. It is authenticated but may be faulty. No
// frame from it can make this rank write out of bounds, or read a payload that its type does not
// carry. What came early is bounded by the eager window, and by IDIST__UNKNOWN_MOST messages for
// groups that do not exist here. Announcements (RTS) for groups that do are not bounded: an honest
// rank may have any number of sends under way.
static bool idist__link_allows(const idist__ring *ring, const idist__link *l, int peer) {
    const idist__frame *f = &l->in;
    const idist_group *g = idist__world_find_group(ring->w, f->ctx);
    bool of_group = f->type <= IDIST__RTS || (f->type >= IDIST__WAITS && f->type <= IDIST__LEFT);

    if (of_group && g && idist__ring_group_of(g)->rank_of[peer] < 0) return false;

    switch (f->type) {
    case IDIST__EAGER:
        if (f->nbytes > IDIST__EAGER_BYTES || f->nbytes + IDIST__FRAME_BYTES > l->their_window)
            return false;
        return true;
    case IDIST__RTS: return true;
    case IDIST__ABORT: return f->nbytes <= IDIST__TEXT_BYTES;
    case IDIST__DATA: return f->nbytes <= IDIST__PIECE_BYTES;
    case IDIST__CREDIT: return f->nbytes <= IDIST__WINDOW_BYTES - l->window;
    case IDIST__CTS:
    case IDIST__PULLED:
    case IDIST__WAITS:
    case IDIST__HERE:
    case IDIST__LEFT:
    case IDIST__BYE: return f->nbytes == 0;
    default: return false;
    }
}

// A frame's 64 bytes are here. False when they make no sense.
static bool idist__link_frame(idist__ring *ring, idist__link *l, int peer) {
    bool ok = true;

    l->in_verb = NULL;
    l->in_message = NULL;
    l->target = NULL;
    if (!idist__link_allows(ring, l, peer)) return false;

    l->left = (size_t)l->in.nbytes;

    switch (l->in.type) {
    case IDIST__EAGER:
        l->their_window -= (size_t)l->in.nbytes + IDIST__FRAME_BYTES;
        ok = idist__link_begins(ring, l, peer);
        break;
    case IDIST__RTS: ok = idist__link_begins(ring, l, peer); break;
    case IDIST__CTS: idist__link_cts(ring, l); break;
    case IDIST__DATA: ok = idist__link_data(ring, l); break;
    case IDIST__PULLED: idist__link_pulled(ring, l); break;
    case IDIST__CREDIT:
        l->window += (size_t)l->in.nbytes;
        l->left = 0;
        break;
    case IDIST__WAITS: idist__ring_waits(ring, l, peer); break;
    case IDIST__HERE: {
        idist_group *g = idist__world_find_group(ring->w, l->in.ctx);
        l->here_ns = idist__os_now_ns();
        if (g && g->status == IDIST_OK) idist__ring_agree(ring, g, peer, &l->in);
        break;
    }
    case IDIST__ABORT: l->target = l->text; break;
    case IDIST__LEFT: idist__share_left(ring, l->in.ctx); break;
    default: l->bye = true; break; // IDIST__BYE
    }

    return ok;
}

// A frame and its payload are complete.
static void idist__link_payload(idist__ring *ring, idist__link *l, int peer) {
    idist__verb *v = l->in_verb;
    idist__message *m = l->in_message;

    l->in_verb = NULL;
    l->in_message = NULL;

    if (l->in.type == IDIST__EAGER) {
        if (m) {
            m->moved = (size_t)l->in.nbytes;
            if (m->claim) idist__message_give(ring, l, peer, m, m->claim);
            return;
        }

        idist__link_consumed(ring, l, (size_t)l->in.nbytes);
        if (v) idist__verb_received(ring, v, peer);
    } else if (l->in.type == IDIST__DATA && v) {
        v->moved += (size_t)l->in.nbytes;
        if (v->moved < v->nbytes) return;
        idist__verb_take(v);
        idist__verb_received(ring, v, peer);
    } else if (l->in.type == IDIST__ABORT) {
        idist__ring_aborted(ring, l);
    }
}

// Takes what lies in the stage apart. False when it makes no sense.
static bool idist__link_parse(idist__ring *ring, idist__link *l, int peer) {
    while (l->open && l->at < l->end) {
        size_t have = l->end - l->at;

        if (l->in_moved < IDIST__FRAME_BYTES) {
            size_t k =
                IDIST__FRAME_BYTES - l->in_moved < have ? IDIST__FRAME_BYTES - l->in_moved : have;
            memcpy((char *)&l->in + l->in_moved, l->stage + l->at, k);
            l->in_moved += k;
            l->at += k;
            if (l->in_moved < IDIST__FRAME_BYTES) break;
            if (!idist__link_frame(ring, l, peer)) return false;
            idist__ring_settle(ring); // before a later frame ends the call that went wrong
        } else {
            size_t k = l->left < have ? l->left : have;

            if (l->target) {
                memcpy(l->target, l->stage + l->at, k);
                l->target += k;
            }

            l->left -= k;
            l->at += k;
        }

        if (l->in_moved == IDIST__FRAME_BYTES && !l->left) {
            l->in_moved = 0;
            idist__link_payload(ring, l, peer);
        }
    }

    if (l->at == l->end) l->at = l->end = 0;

    return true;
}

static void idist__link_read(idist__ring *ring, int peer);

// The stream of a rank ended. When one rank dies, others that heard of it may end as well, and
// their streams with them; those have told the reason before. So all others are read first, and
// then the ends are judged.
static void idist__link_ended(idist__ring *ring, int peer, int err) {
    int i;

    ring->links[peer].ended = true;
    ring->links[peer].ended_errno = err;
    if (ring->judging) return;
    ring->judging = true;
    for (i = 0; i < ring->w->group.size; i++)
        if (ring->links[i].open && !ring->links[i].ended) idist__link_read(ring, i);
    ring->judging = false;

    for (i = 0; i < ring->w->group.size; i++) {
        idist__link *l = &ring->links[i];
        char how[160];
        if (!l->open || !l->ended) continue;
        if (l->ended_errno)
            snprintf(how, sizeof how, "its connection broke: %s", strerror(l->ended_errno));
        else
            snprintf(how, sizeof how,
                     "its process ended, or closed the connection without idist_finalize");
        idist__link_lost(ring, i, how);
    }
}

// Reads what is there, up to a bound so that other links get their turn. Large payloads go straight
// to their place.
static void idist__link_read(idist__ring *ring, int peer) {
    idist__link *l = &ring->links[peer];
    int turns;

    for (turns = 0; turns < 16 && l->open && !l->ended; turns++) {
        bool direct = l->in_moved == IDIST__FRAME_BYTES && l->left >= 4096 && l->target;
        size_t room = direct ? l->left : IDIST__STAGE_BYTES;
        ptrdiff_t n = l->transport->read(l->port, direct ? l->target : l->stage, room);
        if (n == 0) return;

        if (n < 0) {
            idist__link_ended(ring, peer, errno);
            return;
        }

        if (direct) {
            l->target += n;
            l->left -= (size_t)n;
            if (l->left) continue;
            l->in_moved = 0;
            idist__link_payload(ring, l, peer);
        } else {
            l->at = 0;
            l->end = (size_t)n;

            if (!idist__link_parse(ring, l, peer)) {
                idist__link_lost(ring, peer, "it sent a malformed frame");
                return;
            }

            if ((size_t)n < room) return; // that was all, most likely
        }
    }
}

// Looks after all links that poll says something about.
static void idist__ring_poll(idist__ring *ring, int64_t until_ns, bool sleep) {
    idist__world *w = ring->w;
    // One thread may sleep over the first half of the table while another has a quick look with the
    // second.
    struct pollfd *polls = ring->polls + (sleep ? 0 : w->group.size + 1);
    int *ranks = ring->poll_ranks + (sleep ? 0 : w->group.size + 1);
    int i, n = 1;
    uint64_t count;

    polls[0].fd = ring->wake;
    polls[0].events = POLLIN;

    for (i = 0; i < w->group.size; i++) {
        idist__link *l = &ring->links[i];
        if (!l->open || l->transport->poll_fd(l->port) < 0) continue;
        polls[n].fd = l->transport->poll_fd(l->port);
        polls[n].events =
            (short)(POLLIN | (l->out && !l->write_dead && !l->transport->polled ? POLLOUT : 0));
        ranks[n++] = i;
    }

    if (sleep) pthread_mutex_unlock(&w->lock);
    i = poll(polls, (nfds_t)n, sleep ? idist__os_ms_until(until_ns) : 0);
    if (sleep) pthread_mutex_lock(&w->lock);
    if (i <= 0) return;
    if (sleep && polls[0].revents) // a quick look leaves it for the sleeper
        while (read(ring->wake, &count, sizeof count) < 0 && errno == EINTR) continue;

    for (i = 1; i < n; i++) {
        idist__link *l = &ring->links[ranks[i]];
        if (polls[i].revents & POLLOUT) idist__link_flush(ring, l);
        if (!l->open || !(polls[i].revents & ~POLLOUT)) continue;
        if (l->transport->polled) l->transport->polled(l->port);
        idist__link_read(ring, ranks[i]);
    }
}

static void idist__ring_move(idist__ring *ring) {
    bool few =
        ring->nstreams <= 4; // then asking each link is cheaper than asking poll which one to ask
    int i;

    for (i = 0; i < ring->w->group.size; i++) {
        idist__link *l = &ring->links[i];
        if (!l->open || !(few || l->transport->polled)) continue;
        if (l->out) idist__link_flush(ring, l);
        idist__link_read(ring, i);
    }

    if (!few) idist__ring_poll(ring, 0, false);
    if (ring->shm) idist__share_progress(ring);
    if (ring->w->nnodes > 1) idist__host_progress(ring);
}

static void idist__ring_progress(idist__world *w) {
    idist__ring_move(idist__ring_of(w));
    idist__ring_settle(idist__ring_of(w));
}

// Where all links go through memory we sleep on our bell, and look at the sockets, whose end is
// that of the other rank, every 10 ms, in a long wait every 30; otherwise in poll. Looks at
// everything once more after having said that we sleep.
//
// Nobody knocks at a bell that was rung already. A knock that arrives during that last look may be
// read by the look itself (it polls when there are many streams), so we sleep only while the bell
// is still set. Another thread that reads from the links while we sleep may take a knock away as
// well; it has to call `wake` afterwards.
static void idist__ring_sleep(idist__world *w, int64_t until_ns) {
    idist__ring *ring = idist__ring_of(w);
    idist__shm *m = ring->shm;
    uint32_t ended = w->nended;
    int64_t now = idist__os_now_ns();

    if (!m) {
        idist__ring_poll(ring, until_ns, true);
        idist__ring_settle(ring);
        return;
    }

    if (now - ring->polled_ns > IDIST__LOOK_NS) {
        ring->polled_ns = now;
        idist__ring_poll(ring, 0, false);
    }

    idist__shm_falls_asleep(m, ring->nstreams ? 2 : 1);
    idist__ring_move(ring);

    if (w->nended == ended && !ring->failed && !idist__shm_was_woken(m)) {
        if (ring->nstreams) {
            idist__ring_poll(ring, until_ns, true);
        } else {
            int64_t look_ns = now + IDIST__LOOK_NS + ring->drowsy_ns;
            pthread_mutex_unlock(&w->lock);
            idist__os_futex_wait(&idist__shm_bell(m, m->me)->asleep, 1,
                                 look_ns < until_ns ? look_ns : until_ns);
            pthread_mutex_lock(&w->lock);
            if (idist__os_now_ns() < look_ns) ring->drowsy_ns = 0;
            else if (ring->drowsy_ns < 2 * IDIST__LOOK_NS) ring->drowsy_ns += IDIST__MS;
        }
    }

    idist__shm_awake(m);
    idist__ring_settle(ring);
}

// Whether something that others must still get, or say, is under way.
static bool idist__ring_busy(idist__ring *ring, bool clean) {
    int i;

    for (i = 0; i < ring->w->group.size; i++) {
        idist__link *l = &ring->links[i];
        if (!l->open) continue;
        if (l->out && !l->write_dead) return true;
        if (clean && !l->bye && l->transport->lossy_close) return true;
    }

    return false;
}

// Until everything is out, or the moment is there.
static void idist__ring_drain(idist__ring *ring, bool clean, int64_t until_ns) {
    while (idist__ring_busy(ring, clean) && idist__os_ms_until(until_ns) != 0) {
        int64_t soon = idist__os_now_ns() + IDIST__MS; // nobody knocks for room in a pipe here
        idist__ring_poll(ring, soon < until_ns && ring->shm ? soon : until_ns, true);
        idist__ring_move(ring);
    }
}

static void idist__ring_flush(idist__world *w, int64_t until_ns) {
    idist__ring_drain(idist__ring_of(w), false, until_ns);
    idist__ring_settle(idist__ring_of(w));
}

static void idist__ring_wake(idist__world *w) {
    const idist__shm *m = idist__ring_of(w)->shm;
    uint64_t one = 1;

    if (m && __atomic_load_n(&idist__shm_bell(m, m->me)->asleep, __ATOMIC_RELAXED) == 1) {
        idist__shm_wake(m, m->me);
        return;
    }

    while (write(idist__ring_of(w)->wake, &one, sizeof one) < 0 && errno == EINTR) continue;
}

// Compares the new call with what others already said about the call of this number.
static void idist__ring_check_start(idist__ring *ring, idist__task *t) {
    idist_group *g = t->group;
    idist__ring_group *rg = idist__ring_group_of(g);
    const idist__print *ours = &rg->history[t->seq % IDIST__HISTORY];
    int i;

    for (i = 0; i < g->size; i++) {
        uint64_t key = idist__ring_key(g->ctx, g->ranks[i], false, t->seq);
        idist__hook *hook = ring->messages[key % IDIST__BUCKETS].first;
        const char *field = NULL;
        if (i == g->rank) continue;
        if (rg->seen[i].seq == t->seq && rg->seen[i].print.seq == t->seq)
            field = idist__print_difference(&rg->seen[i].print, ours);
        if (field) idist__ring_mismatch(ring, g, g->ranks[i], &rg->seen[i].print, ours, field);

        for (; hook && !ring->failed; hook = hook->next) {
            const idist__message *m = idist__hook_message(hook);
            if (m->peer == g->ranks[i] && m->frame.ctx == g->ctx && m->frame.print.seq == t->seq &&
                m->frame.print.kind != IDIST__SEND && m->frame.type <= IDIST__RTS)
                idist__ring_agree(ring, g, g->ranks[i], &m->frame);
        }
    }
}

static bool idist__ring_quick(idist_group *g, const idist__call *c) {
    return c->kind == IDIST__SEND   ? idist__send_quick(g, c)
           : c->kind == IDIST__RECV ? idist__recv_quick(g, c)
                                    : idist__share_quick(g, c);
}

static void idist__ring_start(idist__task *t) {
    idist__ring *ring = idist__ring_of(t->group->w);
    int shared = 0;

    memset(t->impl, 0, t->call.kind < IDIST__SEND ? sizeof(idist__op) : offsetof(idist__op, n));
    if (t->call.kind < IDIST__SEND) shared = idist__share_choose(t->group, &t->call);
    if (t->call.kind < IDIST__SEND && idist__host_serves(t->group, &t->call))
        shared = IDIST__BY_HOST;

    // After a while outside the library, hear first what the others have said: perhaps the group
    // has failed.
    if (t->started_ns - ring->looked_ns > IDIST__MS && !t->group->inner) {
        idist__ring_progress(t->group->w);
        if (t->done) return;
    }

    ring->looked_ns = t->started_ns;

    // The end of a process shows at its socket only, which otherwise is looked at by who sleeps:
    // perhaps nobody does.
    if (ring->shm && t->started_ns - ring->polled_ns > IDIST__LOOK_NS && !t->group->inner) {
        ring->polled_ns = t->started_ns;
        idist__ring_poll(ring, 0, false);
        idist__ring_settle(ring);
        if (t->done) return;
    }

    if (t->call.kind == IDIST__SEND) idist__send_start(t);
    else if (t->call.kind == IDIST__RECV) idist__recv_start(t);
    else if (t->group->size == 1) idist__self_collective(t);
    else if (shared) {
        idist__share_prepare(t, shared);
        idist__ring_note(t, idist__op_of(t), shared);
        idist__ring_check_start(ring, t);
        if (shared == IDIST__BY_HOST) idist__host_start(t);
        else idist__share_start(t);
    } else if (!idist__op_begin(t))
        idist__ring_fail(ring, t->group, IDIST_ERR_NO_MEMORY, "a rank is out of memory");
    else {
        idist__ring_note(t, idist__op_of(t), idist__op_of(t)->algorithm);
        idist__ring_check_start(ring, t);
        idist__op_choose_run(t);
        if (!ring->failed) idist__op_run(t);
    }

    idist__ring_settle(ring);
}

// Takes the verbs of a task out of a list. Returns whether there were any.
static bool idist__verbs_purge(idist__ring *ring, const idist__verbs *list, const idist__task *t) {
    idist__verb *v, *next;
    bool any = false;

    for (v = list->first; v; v = next) {
        next = v->next;
        if (v->task != t) continue;
        idist__verb_take(v);
        idist__verb_free(ring, v);
        any = true;
    }

    return any;
}

// A frame that has partly gone out must go out to its end, or the stream is useless; its payload is
// copied, since the buffer belongs to the caller again.
static void idist__verb_orphan(idist__ring *ring, idist__link *l, idist__verb *v) {
    size_t left = v->piece - v->piece_moved;

    v->task = NULL;
    if (v->frame.type == IDIST__RTS && ring->shm)
        __atomic_fetch_add(&idist__shm_bell(ring->shm, ring->shm->me)->withdrawn, 1u,
                           __ATOMIC_SEQ_CST);

    if (!left) {
        if (v->frame.type == IDIST__RTS)
            v->frame.type = IDIST__CREDIT; // already written: only keeps it from waiting for CTS
        v->nbytes = v->piece = v->piece_moved = v->moved = 0;
        return;
    }

    v->owned = (char *)idist__mem_raw(&ring->w->cfg.mem, left);

    if (!v->owned) {
        idist__link_write_failed(ring, l);
        return;
    }

    memcpy(v->owned, v->data + v->moved + v->piece_moved, left);
    v->data = v->owned;
    v->moved = v->piece_moved = 0;
    v->nbytes = v->piece = left;
}

// The same for what waits to go out. Returns whether the other side has heard of any of it.
static bool idist__link_purge_out(idist__ring *ring, idist__link *l, const idist__task *t) {
    idist__verb **at = &l->out;
    bool heard = false;

    if (l->out && l->out->task == t && l->out->frame_moved + l->out->piece_moved > 0) {
        heard = true;
        idist__verb_orphan(ring, l, l->out);
    }

    while (*at) {
        idist__verb *v = *at;

        if (v->task != t) {
            at = &v->next;
            continue;
        }

        heard = heard || v->started;
        if (v->frame.type == IDIST__EAGER)
            l->window += v->nbytes + IDIST__FRAME_BYTES; // it will not arrive
        *at = v->next;
        idist__verb_free(ring, v);
    }

    l->out_end = at;

    return heard;
}

// Forgets what a task has among the links. Returns whether the other side has heard of any of it.
static bool idist__links_purge(idist__ring *ring, const idist__task *t) {
    bool heard = false;
    int i;

    for (i = 0; i < ring->w->group.size; i++) {
        idist__link *l = &ring->links[i];
        idist__message *m, *next;

        if (l->in_verb && l->in_verb->task == t) {
            idist__verb *v = l->in_verb;
            if (l->in.type == IDIST__EAGER) idist__verb_free(ring, v); // it is in no list
            l->in_verb = NULL;
            l->target = NULL;
            heard = true;
        }

        for (m = l->early; m; m = next) {
            next = m->next;

            if (m->claim && m->claim->task == t) {
                idist__verb_free(ring, m->claim);
                m->claim = NULL;
                heard = true;
            }

            if (m->self_send && m->self_send->task == t) {
                idist__verb_free(ring, m->self_send);
                idist__message_free(ring, l, m);
            }
        }

        heard = idist__link_purge_out(ring, l, t) || heard;
        if (ring->shm && idist__verb_in(&l->waiting, t))
            __atomic_fetch_add(&idist__shm_bell(ring->shm, ring->shm->me)->withdrawn, 1u,
                               __ATOMIC_SEQ_CST);
        heard = idist__verbs_purge(ring, &l->waiting, t) || heard;
        heard = idist__verbs_purge(ring, &l->receiving, t) || heard;
        idist__verbs_purge(ring, &l->posted, t);
    }

    return heard;
}

// The same for a send or receive that waits for the other side: it has one verb, and thousands may
// be cancelled at once. False when it is not like that.
static bool idist__verb_purge(idist__ring *ring, const idist__task *t) {
    idist__verb *v = idist__kind_is_p2p(t->call.kind) ? idist__op_of(t)->verb : NULL;

    if (!v || !v->list || (t->call.kind == IDIST__RECV && !idist__recv_unmatched(t))) return false;
    if (t->call.kind == IDIST__SEND && ring->shm)
        __atomic_fetch_add(&idist__shm_bell(ring->shm, ring->shm->me)->withdrawn, 1u,
                           __ATOMIC_SEQ_CST);
    idist__verb_take(v);
    idist__verb_free(ring, v);

    return true;
}

static bool idist__ring_cancel(idist__task *t) {
    idist__ring *ring = idist__ring_of(t->group->w);
    idist__frame f;
    idist__op *o;
    bool waited = idist__verb_purge(ring, t), unmatched = waited && t->call.kind == IDIST__RECV;
    bool heard = waited || idist__links_purge(ring, t); // a send waits when its RTS is out

    if (t->call.kind == IDIST__RECV && t->announced &&
        t->call.root >= 0) { // it does not wait any more
        memset(&f, 0, sizeof f);
        f.type = IDIST__WAITS;
        f.print.kind = IDIST__RECV;
        idist__link_control(ring, &ring->links[idist__world_rank(t->group, t->call.root)], &f,
                            NULL);
    }

    if (t->call.kind == IDIST__RECV) return unmatched;
    if (t->call.kind == IDIST__SEND) return !heard;
    o = idist__op_of(t);
    if (o->step && !o->step->done)
        return false; // near and leads fail before the group that they are parts of
    if (o->algorithm == IDIST__BY_HOST) idist__host_remove(t);
    else if (o->algorithm >= IDIST__FLAT) idist__share_cancel(t);
    if (o->step) idist__task_free(o->step);
    o->step = NULL;
    idist__mem_free(&ring->w->cfg.mem, o->memory);
    o->memory = NULL;

    return false;
}

static void idist__ring_tell(idist_group *g) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__frame f;
    int i;

    memset(&f, 0, sizeof f);
    f.type = IDIST__ABORT;
    f.ctx = g->ctx;
    f.aux = (uint64_t)(int64_t)g->status;
    idist__share_withdraw(g);
    for (i = 0; i < g->size; i++)
        if (i != g->rank) idist__link_control(ring, &ring->links[g->ranks[i]], &f, g->cause);
    if (idist__ring_group_of(g)->near)
        idist__group_fail(idist__ring_group_of(g)->near, g->status, g->cause);
    if (idist__ring_group_of(g)->leads)
        idist__group_fail(idist__ring_group_of(g)->leads, g->status, g->cause);
    idist__share_let_go(g);
}

static void idist__ring_announce(idist__task *t) {
    idist__ring *ring = idist__ring_of(t->group->w);
    idist__ring_group *rg = idist__ring_group_of(t->group);
    idist__frame f;
    int i;
    bool p2p = t->call.kind == IDIST__SEND || t->call.kind == IDIST__RECV, blocked;

    memset(&f, 0, sizeof f);
    f.type = IDIST__WAITS;
    f.ctx = t->group->ctx;
    f.print = idist__task_print(t, 0);
    if (t->group->size == 1) return;
    blocked = idist__world_only_call(ring->w) == t;
    if (!p2p) f.print = rg->history[t->seq % IDIST__HISTORY];

    for (i = 0; i < t->group->size; i++) {
        idist__link *l = &ring->links[t->group->ranks[i]];
        idist__verb *v;
        if (i == t->group->rank || (p2p && t->call.root != i)) continue;
        // Only a deadlock asks for these, and there is none while this rank can do something else.
        f.flags = (uint8_t)(blocked ? (idist__ring_needs(l, t, i) ? IDIST__NEEDS_YOU : 0) |
                                          IDIST__ONLY_CALL
                                    : 0);
        f.aux = l->p2p_got;
        for (v = l->waiting.first; v && p2p && blocked; v = v->next)
            if (v->task == t) f.id = v->id;
        idist__link_control(ring, l, &f, NULL);
        idist__ring_find_deadlock(ring, t->group->ranks[i]);
    }

    idist__ring_settle(ring);
}

// A receive whose message has begun to come: from whom.
static int idist__recv_missing(const idist__task *t, char *text, size_t cap) {
    const idist_group *g = t->group;
    const idist__ring *ring = idist__ring_of(g->w);
    int i;

    if (!t->patient) return 0; // it gets more time

    for (i = 0; i < g->size; i++) {
        const idist__link *l = &ring->links[g->ranks[i]];
        bool here = l->in_verb && l->in_verb->task == t;
        if (!here && !idist__verb_in(&l->receiving, t)) continue;
        idist__append(text, cap, "rank %d on %s, whose message has begun to come", g->ranks[i],
                      g->w->nodes[g->ranks[i]].hostname);
        return 1;
    }

    return 0;
}

typedef enum idist__absence { // of a member that the end of a call may wait for
    IDIST__ABSENT = 1,        // it has not entered the call
    IDIST__SILENT = 2,        // it has not answered when it was asked
    IDIST__NEEDED = 4         // this rank waits for something that only that one can send
} idist__absence;

static int idist__ring_absence(const idist__task *t, int rank) {
    const idist_group *g = t->group;
    const idist__seen *seen = &idist__ring_group_of(g)->seen[rank];
    const idist__link *l = &idist__ring_of(g->w)->links[g->ranks[rank]];
    bool entered = (int32_t)(seen->seq - t->seq) >= 0;

    if (t->whole.kind && seen->print.whole == t->whole.seq)
        entered = true; // or an earlier part of it

    return (entered ? 0 : IDIST__ABSENT) |
           (g->asked_ns && l->here_ns < g->asked_ns ? IDIST__SILENT : 0) |
           (idist__ring_needs(l, t, rank) ? IDIST__NEEDED : 0);
}

// Whom to name. Whoever has not entered the call may wait for somebody else in an earlier one; then
// it answers when asked. A rank that entered the call may since have been stopped, or may have
// finished it and be computing. In the second case this rank needs nothing from it.
static int idist__ring_missing(idist__task *t, char *text, size_t cap) {
    static const int order[4] = {IDIST__ABSENT | IDIST__SILENT, IDIST__SILENT | IDIST__NEEDED,
                                 IDIST__ABSENT, IDIST__SILENT};
    idist_group *g = t->group;
    idist__ring_group *rg = idist__ring_group_of(g);
    int i, k, n = 0;

    if (t->call.kind == IDIST__RECV && !idist__recv_unmatched(t))
        return idist__recv_missing(t, text, cap);
    if (idist__kind_is_p2p(t->call.kind)) return idist__missing_peer(t, text, cap);

    if (!t->announced && idist__op_of(t)->algorithm == IDIST__BY_HOST &&
        idist__op_of(t)->step) { // nobody was asked yet
        if (!idist__ring_missing(idist__op_of(t)->step, text, cap))
            idist__append(text, cap, "ranks of another host");
        return 1;
    }

    idist__share_look(t);
    for (k = 0; k < 4 && !n; k++)
        for (i = 0; i < g->size; i++)
            if (i != g->rank && (idist__ring_absence(t, i) & order[k]) == order[k])
                idist__missing_rank(g, i, &rg->seen[i].print, n++, text, cap);
    if (n > 8) idist__append(text, cap, " and %d more", n - 8);
    if (n && (order[k - 1] & IDIST__SILENT)) idist__append(text, cap, ", which does not answer");

    return n;
}

static void idist__ring_group_close(idist_group *g);

static idist_status idist__ring_group_open(idist_group *g) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__ring_group *rg = idist__ring_group_of(g);
    idist_status s;
    int i;

    rg->rank_of = (int *)idist__mem_alloc(&g->w->cfg.mem, sizeof(int) * (size_t)g->w->group.size);
    rg->seen = (idist__seen *)idist__mem_alloc(&g->w->cfg.mem, sizeof *rg->seen * (size_t)g->size);

    if (!rg->rank_of || !rg->seen) {
        idist__mem_free(&g->w->cfg.mem, rg->rank_of);
        idist__mem_free(&g->w->cfg.mem, rg->seen);
        return IDIST_ERR_NO_MEMORY;
    }

    for (i = 0; i < g->w->group.size; i++) rg->rank_of[i] = -1;
    for (i = 0; i < g->size; i++) rg->rank_of[g->ranks[i]] = i;

    for (i = 0; i < g->size; i++) {
        idist__link *l = &ring->links[g->ranks[i]];
        idist__message *m;

        for (m = l->early; m; m = m->next) {
            if (m->frame.ctx != g->ctx || !m->unknown) continue;
            m->unknown = false;
            l->nunknown--;
        }

        for (m = l->early; m; m = m->next)
            if (m->frame.ctx == g->ctx && m->frame.type == IDIST__ABORT)
                idist__group_fail(g, (idist_status)(int)(int64_t)m->frame.aux, m->data);

        if (i != g->rank && !l->open) {
            char cause[200];
            snprintf(cause, sizeof cause, "rank %d on %s was lost", g->ranks[i],
                     g->w->nodes[g->ranks[i]].hostname);
            idist__group_fail(g, IDIST_ERR_PEER_LOST, cause);
        }
    }

    if (g != &g->w->group) return IDIST_OK;
    idist__share_offer_place(g);
    s = idist__host_open(g, NULL);
    if (s != IDIST_OK) idist__ring_group_close(g);

    return s;
}

static void idist__ring_group_close(idist_group *g) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__ring_group *rg = idist__ring_group_of(g);
    idist_group *other;
    int i;

    for (i = 0; i < g->w->group.size; i++) {
        idist__message *m, *next;

        for (m = ring->links[i].early; m; m = next) {
            bool whole = m->frame.type == IDIST__EAGER && m->moved == m->frame.nbytes;
            size_t nbytes = (size_t)m->frame.nbytes;
            next = m->next;
            if (m->frame.ctx != g->ctx) continue;
            idist__message_free(ring, &ring->links[i], m);
            if (whole && i != g->w->group.rank) idist__link_consumed(ring, &ring->links[i], nbytes);
        }
    }

    ring->closed[ring->nclosed++ % IDIST__CLOSED] = g->ctx;
    if (rg->near) idist__group_free(rg->near);
    if (rg->leads) idist__group_free(rg->leads);

    for (other = &g->w->group; g->inner && other; other = other->next) {
        idist__ring_group *of =
            other->rank >= 0 && other->impl ? idist__ring_group_of(other) : NULL;
        if (of && of->near == g) of->near = NULL;
        if (of && of->leads == g) of->leads = NULL;
    }

    idist__share_free(g);
    idist__mem_free(&g->w->cfg.mem, rg->rank_of);
    idist__mem_free(&g->w->cfg.mem, rg->seen);
}

static void *idist__ring_alloc(idist__world *w, size_t nbytes) {
    const idist__shm *m = idist__ring_of(w)->shm;
    return m && m->window_nbytes ? idist__window_alloc(m->window, nbytes) : NULL;
}

#endif // IDIST_ENGINE_H
