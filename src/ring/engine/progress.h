// ring/engine/progress.h: reads links, writes what is queued, finds links that have ended
//
// Drives the calls of the ring backend. Polls the links, hands frames to incoming.h, and decides
// which ended links mean a lost rank. Everything in ring/engine runs under the world's lock, which
// is released only while a thread sleeps.
//
// PATH OF A MESSAGE
//
// idist__progress_run       called by a thread that waits in a call, or by the progress thread
// idist__progress_move      for each link, writes what is queued and reads what has arrived
// idist__progress_read      reads bytes, directly into a large message or through the link's stage
// idist__progress_parse     cuts the stage into frames and payloads
// idist__incoming_begin     checks a complete header, and sets the payload's destination
// idist__incoming_end       ends the receive when the payload is complete
// idist__op_run             resumes the algorithm that posted the receive
//
// A link has a stage: memory for bytes that were read ahead. One read may deliver many small
// frames. The rest of a large payload bypasses the stage: it is read directly to its destination.
//
// With few links it is cheapest to try to read every one. With many links, ring->watch tells which
// ones have data. Links on which a read costs no system call are always tried.
#pragma once

#include "os/clock.h"
#include "os/thread.h"
#include "os/poll.h"
#include "os/beacon.h"
#include "base/fail.h"
#include "base/text.h"
#include "base/log.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/group.h"
#include "core/extent.h"
#include "ring/shm/segment.h"
#include "ring/shm/liveness.h"
#include "ring/msg/ring_model.h"
#include "ring/msg/link.h"
#include "ring/msg/match.h"
#include "ring/msg/recv.h"
#include "ring/share/share.h"
#include "ring/algo/host_run.h"
#include "ring/connect/attempt.h"
#include "ring/connect/connector.h"
#include "ring/engine/deadlock.h"
#include "ring/engine/ask.h"
#include "ring/engine/incoming.h"
#include "ring/engine/announce.h"

enum {
    IDIST__PROGRESS_READS = 16,    // reads of one link before the next link's turn
    IDIST__PROGRESS_DIRECT = 4096, // bytes of the smallest payload that bypasses the stage
    IDIST__PROGRESS_FEW = 4,       // most polled links for which reading each is cheaper than poll
    IDIST__PROGRESS_TURNS = 8,     // one in this many polls by a caller reads all links
    IDIST__PROGRESS_WAKES = 3      // entries of a poll set before the connector's
};

static size_t idist__progress_least(size_t a, size_t b) { return a < b ? a : b; }

// Takes a frame, or the part of it that has arrived, out of the stage. Most frames have arrived
// completely, and copying a constant size takes a fifth of the instructions.
static void idist__progress_take_frame(idist__link *l, size_t unread) {
    size_t nbytes = idist__progress_least(IDIST__FRAME_BYTES - l->in_moved, unread);

    if (nbytes == IDIST__FRAME_BYTES) memcpy(&l->in, l->stage + l->at, IDIST__FRAME_BYTES);
    else memcpy((char *)&l->in + l->in_moved, l->stage + l->at, nbytes);
    l->in_moved += nbytes;
    l->at += nbytes;
}

// Cuts the bytes in the stage into frames and payloads, until `frames` frames are complete. Returns
// false if a frame is malformed.
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

// Closes a link that can no longer be used. Declares the peer lost, unless it has sent BYE.
static void idist__progress_lost(idist__ring *ring, int peer, const char *how) {
    idist__link *l = &ring->links[peer];

    if (!l->open) return;
    idist__link_close(ring, l);
    if (!l->bye) idist__group_lose_rank(ring->w, peer, how);
}

// Returns the number of bytes to read into the stage, which is empty. If the transport shows
// headers without a system call, returns the size of the header for a frame with a large payload.
// The payload is then copied only once, to its destination.
static size_t idist__progress_capacity(const idist__link *l) {
    idist__frame frame;

    if (l->in_moved || !l->transport->peek_header || !l->transport->peek_header(l->port, &frame))
        return IDIST__STAGE_BYTES;
    if (frame.nbytes < IDIST__PROGRESS_DIRECT || frame.type == IDIST__RTS)
        return IDIST__STAGE_BYTES;
    return IDIST__FRAME_BYTES;
}

// Reads what has arrived, up to a limit. Returns false if the stream has just ended or broken: see
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

// Copies the next frame in the stage of a link. Returns true if it is a complete EAGER message.
static bool idist__progress_staged(const idist__link *l, idist__frame *frame) {
    size_t unread = l->end - l->at;

    if (unread < sizeof *frame) return false;
    memcpy(frame, l->stage + l->at, sizeof *frame);

    return frame->type == IDIST__EAGER && frame->nbytes <= unread - sizeof *frame;
}

// Reads what has arrived on a link if its stage is empty. Returns true if the stage holds any
// bytes.
static bool idist__progress_fill(idist__link *l) {
    idist__frame frame;

    if (l->at < l->end) return true;
    if (!l->transport->peek_header(l->port, &frame)) return false;
    l->at = 0;
    l->end = (size_t)l->transport->read(l->port, l->stage, IDIST__STAGE_BYTES);

    return true;
}

// Tries to complete a receive without creating a task. Called if the receive has a request, if
// other calls are in progress, or if the link's stage holds bytes. Takes a message out of the
// stage, or a large one directly from the link. Messages that match earlier receives are first
// delivered to those receives.
static bool idist__progress_take(const idist_group *g, const idist__call *call) {
    idist__ring *ring = idist__ring_of(g->w);
    const idist__ring_group *rg = idist__ring_group_of(g);
    idist__link *l = idist__recv_link(g, call);
    int peer = l ? idist__link_rank(ring, l) : -1;
    idist__frame frame;

    if (!l) return false;
    if (l->at == l->end && !rg->recvs.first && !rg->wild.first &&
        l->transport->peek_header(l->port, &frame) && frame.nbytes >= IDIST__PROGRESS_DIRECT)
        return idist__recv_take(g, call, l, &frame);
    if (!idist__progress_fill(l)) return false;

    for (;;) {
        if (!idist__progress_staged(l, &frame) || frame.ctx != g->ctx) return false;
        if (frame.fingerprint.kind != IDIST__SEND) return false;
        if (!rg->recvs.first && !rg->wild.first) break;
        if (!idist__match_oldest(ring, g, peer, &frame)) break;
        if (!idist__progress_parse(ring, l, peer, 1)) {
            idist__progress_lost(ring, peer, "it sent a malformed frame");
            idist__ring_settle(ring);
            return false;
        }

        if (l->early || !l->open || g->status != IDIST_OK || !idist__progress_fill(l)) return false;
    }

    if (!idist__recv_wants(g, call, l, &frame)) return false;
    idist__block_copy(call->recv, l->stage + l->at + sizeof frame, (size_t)frame.nbytes);
    l->at += sizeof frame + (size_t)frame.nbytes;
    idist__recv_taken(ring, call, l, &frame);

    return true;
}

// Returns true if the process of a rank is known to have died, rather than to have left the world.
static bool idist__progress_has_died(const idist__ring *ring, int peer) {
    int local = ring->shm ? ring->shm->local[peer] : -1;
    return local >= 0 && idist__liveness_get(ring->shm, local) == IDIST__ENDED_DIED;
}

// Declares ranks lost because their streams have ended: all such ranks if `all` is set, otherwise
// only those that are known to have died.
static void idist__progress_declare(idist__ring *ring, bool all) {
    int i, me = ring->w->group.rank;

    for (i = 0; i < ring->w->group.size; i++) {
        const idist__link *l = &ring->links[i];
        char how[300];

        if (!l->open || !l->ended || !(all || idist__progress_has_died(ring, i))) continue;
        if (!idist__link_is_connected(l))
            snprintf(how, sizeof how,
                     "no connection to it from rank %d is possible (%s): it died, or left after a "
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

// Decides which ranks are lost after a stream has ended. When one rank dies, other ranks that learn
// of the death may end too, which ends their streams. These ranks may have sent the reason before
// they ended, so this function first reads everything that has arrived. Ranks whose processes have
// died are declared first, because such a rank is more likely to be the original cause than a rank
// that has left.
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
            ring->shm->ports[ring->shm->local[i]].look = true; // makes the read check for its death
            idist__progress_read(ring, i);                     // the rest of what the rank wrote
        }
    }

    if (ring->shm) idist__share_progress(ring); // a rank may leave once it has done its part
    idist__ring_settle(ring);

    idist__progress_declare(ring, false);
    idist__progress_declare(ring, true);
}

// Returns a call that waits for the peer or has something to send to it. Returns NULL if there is
// no such call.
static const idist__task *idist__progress_needs(const idist__ring *ring, int peer) {
    const idist__link *l = &ring->links[peer];
    const idist__transfer *xfer;
    const idist__task *t;

    for (xfer = l->out; xfer; xfer = xfer->next)
        if (xfer->task) return xfer->task;

    for (t = ring->w->tasks.running; t; t = t->next) {
        int rank = idist__ring_group_of(t->group)->rank_of[peer];
        if (rank < 0 || rank == t->group->rank || t->state == IDIST__TASK_ON_DEVICE) continue;
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

// Returns a receive from any source that can no longer be matched, or NULL if there is none. That
// is a receive in a group that contains the peer, and of which all members except this rank have
// left.
static const idist__task *idist__progress_forsaken(const idist__ring *ring, int peer) {
    const idist__task *t;

    for (t = ring->w->tasks.running; t; t = t->next) {
        if (t->call.kind != IDIST__RECV || t->call.root != IDIST_ANY_SOURCE ||
            t->state == IDIST__TASK_ON_DEVICE)
            continue;
        if (idist__ring_group_of(t->group)->rank_of[peer] < 0) continue;
        if (idist__deadlock_is_unmatched(t) && idist__progress_all_left(t->group)) return t;
    }

    return NULL;
}

// Fails the group of a call that needs a rank that has left the world. If the rank left after a
// failure, that failure is the cause. If the call is a message to or from the rank, the text adds
// that the rank has left.
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
        idist__text_append(cause, sizeof cause, "; rank %d on %s left the world afterwards", peer,
                           host);
    idist__ring_fail(ring, g, l->bye_status, cause);
}

// Finds calls that need a rank that has left the world, and fails their groups. A rank completes
// its calls before it leaves, so the other ranks can complete these calls as well. But a rank that
// has left begins no new call.
static void idist__progress_left(idist__ring *ring) {
    const idist__task *t;
    int i;

    for (i = 0; i < ring->w->group.size && !ring->failed; i++) {
        if (!ring->links[i].bye) continue;
        // A rank leaves cleanly only after all ranks have called idist_finalize. The calls that
        // other threads of this rank are in then end because this rank closes its world.
        if (ring->w->life.closing && ring->links[i].bye_status == IDIST_OK) continue;
        t = idist__progress_needs(ring, i);
        if (!t) t = idist__progress_forsaken(ring, i);
        if (t) idist__progress_miss(ring, t, i);
    }
}

// Warns once that this process is out of file descriptors. Calls that need a connection keep
// trying, and may miss their deadline.
static void idist__progress_short_of_fds(idist__ring *ring) {
    if (!ring->no_fds_ns)
        idist__log_print(&ring->w->log, IDIST_LOG_WARN,
                         "out of file descriptors: this rank cannot connect to others; raise "
                         "ulimit -n");
    ring->no_fds_ns = idist__os_clock_now_ns();
}

// Handles a rank that cannot be reached. If no call needs the rank, it may have left the world
// cleanly. Returns true if the rank is lost.
static bool idist__progress_unreachable(idist__ring *ring, const idist__connect_event *event) {
    idist__link *l = &ring->links[event->rank];

    if (!idist__progress_needs(ring, event->rank)) return false;
    l->ended = true;
    l->ended_errno = event->error;
    idist__text_copy(ring->unreachable, sizeof ring->unreachable,
                     event->error ? strerror(event->error) : idist__me.text);

    return true;
}

// Connects the links that want a connection, and accepts the connections that other ranks make.
// Returns true if anything has happened.
static bool idist__progress_connect(idist__ring *ring) {
    idist__connector *conn = ring->connector;
    idist__connect_event event;
    bool happened = false, ended = false;

    if (!conn) return false;

    while (ring->wanted) {
        idist__link *l = ring->wanted;

        ring->wanted = l->next_wanted;
        l->wanted = false;
        if (!l->open || idist__link_is_connected(l)) continue;
        if (idist__connector_start(conn, idist__link_rank(ring, l))) continue;
        idist__ring_fail_memory(ring, &ring->w->group);
        happened = true;
    }

    while (idist__connector_next(conn, &event)) {
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

// Serves the links on which ring->watch reports an event.
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

// Fills a poll set with the descriptors that can wake this rank. Returns the number of entries.
static int idist__progress_watch(idist__ring *ring, idist__os_poll_entry *polls) {
    idist__os_poll_watch(&polls[0], ring->wake, IDIST__OS_READABLE);
    idist__os_poll_watch(&polls[1], ring->shm ? ring->shm->beacon : -1, IDIST__OS_READABLE);
    idist__os_poll_watch(&polls[2], ring->watch, IDIST__OS_READABLE);
    if (!ring->connector) return IDIST__PROGRESS_WAKES;

    return IDIST__PROGRESS_WAKES +
           idist__connector_polls(ring->connector, polls + IDIST__PROGRESS_WAKES);
}

// Waits until the links have an event, the deadline passes or `wake` is called. Then serves the
// links.
static void idist__progress_sleep(idist__ring *ring, int64_t until_ns) {
    idist__os_poll_entry *polls = ring->polls;
    int i, ready, count;

    if (idist__progress_connect(ring)) until_ns = 0; // the caller must see what has happened

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

// Serves the links and advances the connections, without blocking. Uses its own poll set, because
// another thread may be in idist__progress_sleep.
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

// Returns true if an algorithm waits for a frame from this link.
static bool idist__progress_awaits(const idist__link *l) {
    return l->posted.first || l->receiving.first || l->waiting.first;
}

static bool idist__progress_awaits_any(const idist__ring *ring) {
    int i;

    for (i = 0; i < ring->w->group.size; i++)
        if (ring->links[i].polled && idist__progress_awaits(&ring->links[i])) return true;

    return false;
}

// Makes all progress that is possible without blocking. If `all` is false and only a few links are
// polled, skips the polled links that no algorithm waits for, unless that would skip all of them.
static void idist__progress_move(idist__ring *ring, bool all) {
    bool few = ring->polled_link_count <= IDIST__PROGRESS_FEW && !ring->connector, ended = false;
    int i;

    if (ring->shm) idist__liveness_any(ring->shm); // if a rank has ended, the reads below say which
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
    if (ring->w->nnodes > 1) idist__host_run_progress(ring);
    if (ring->left_count) idist__progress_left(ring);
    if (ring->ask_again_ns) idist__ask_again(ring);
}

// Writes the sends that are held back. Called before a sleep.
static void idist__progress_uncork(idist__ring *ring) {
    int i;

    for (i = 0; ring->corked_count && i < ring->w->group.size; i++)
        if (ring->links[i].corked) idist__link_flush(ring, &ring->links[i]);
}

// Makes all progress that is possible without blocking, on all links.
static void idist__progress_move_all(idist__ring *ring) { idist__progress_move(ring, true); }

// Returns the interval at which a rank looks for processes of its host that have ended.
static int64_t idist__progress_look_ns(const idist__segment *seg) {
    return idist__liveness_patience(seg) * IDIST__LOOK_NS;
}

// Warns once that the system does not let us see whether other processes of this host have ended.
static void idist__progress_is_blind(idist__ring *ring) {
    if (!ring->told_blind)
        idist__log_print(
            &ring->w->log, IDIST_LOG_WARN,
            "cannot detect that other processes of this host have ended (%s), except by a "
            "time-out; IDIST_TRANSPORT=socket avoids this",
            strerror(ring->shm->blind_error));
    ring->told_blind = true;
}

// If it is time, checks whether a process on this host has ended, which neither reading nor the
// doorbell reports. Also checks the sockets for input, because this rank may never sleep. If
// `waits` is set, this rank is about to sleep. Otherwise it is busy, and checks only a few beacons.
static void idist__progress_look(idist__ring *ring, int64_t now_ns, bool waits) {
    if (!ring->shm || now_ns - ring->looked_ns <= idist__progress_look_ns(ring->shm)) return;
    ring->looked_ns = now_ns;
    idist__liveness_look(ring->shm,
                         waits ? idist__liveness_share(ring->shm) : IDIST__ENDED_LOOKS_LEAST);
    if (ring->shm->blind_error) idist__progress_is_blind(ring);
    if (idist__liveness_any(ring->shm)) idist__progress_move_all(ring);
    if (ring->polled_link_count) idist__progress_turn(ring);
}

// Makes progress for a caller that polls. A read that finds nothing costs a system call, so links
// that no algorithm waits for are read less often.
static void idist__progress_run(idist__world *w) {
    idist__ring *ring = idist__ring_of(w);

    idist__progress_move(ring, ring->polled_count++ % IDIST__PROGRESS_TURNS == 0);
    idist__ring_settle(ring);
}
