// ring/join/join.h: all steps of a join, in order; makes and frees the ring
//
// Carries out idist_initialize in the ring backend. The ranks meet in a key-value store, learn
// where each rank listens, and agree on shared memory inside each host. Then they connect the pairs
// without shared memory: all of these pairs, or only some of them in a large world
// (ring/join/links.h). After that no rank needs the store. The ranks also stop listening, unless
// some connections will be made on demand.
//
// The entry point is idist__join_open.
//
// STEPS
//
// The ranks write the following into the store, in this order; R is a rank. All names without
// `idist/` begin with a prefix that no other world uses.
//
//   idist/ranks whether ranks were given (only in a file)       idist__draw_check_given
//   idist/R     number of worlds that rank R has opened here    idist__join_store_open
//   job         number of the job, number of ranks (rank 0)     idist__records_agree_on_job
//   node/R      the record of rank R                            idist__records_exchange
//   nodes       all records, collected by rank 0
//   tcp/R       where rank R listens for other hosts            idist__records_listen_tcp
//   -           ranks of a host map one file in memory          idist__segment_agree_share
//   -           each rank connects to lower ranks               idist__links_connect
//   joined/R    rank R is done; rank 0 waits for all ranks and  idist__join_store_leave
//               closes the store
//
// If a rank cannot join, the ranks also write:
//
//   failed      why the rank gave up                            idist__join_failure_tell
//   heard       number of ranks that have read `failed`
#pragma once

#include "os/clock.h"
#include "os/cpu.h"
#include "os/memory.h"
#include "os/poll.h"
#include "base/fail.h"
#include "base/text.h"
#include "base/mem.h"
#include "base/log.h"
#include "launch/env.h"
#include "core/model.h"
#include "ring/shm/liveness.h"
#include "ring/shm/pipe.h"
#include "ring/msg/ring_model.h"
#include "ring/msg/sockets.h"
#include "ring/msg/link.h"
#include "ring/msg/message.h"
#include "ring/connect/connector.h"
#include "ring/engine/progress.h"
#include "ring/join/join_state.h"
#include "ring/join/join_failure.h"
#include "ring/join/join_store.h"
#include "ring/join/records.h"
#include "ring/join/links.h"
#include "ring/join/segment_map.h"
#include "ring/join/segment_agree.h"

enum { IDIST__OPEN_NBYTES = 20 << 20 }; // a thread's stack, the store's server, buffers

static void idist__join_free(idist__ring *ring) {
    const idist_allocator *mem = &ring->w->cfg.mem;
    int i;

    if (ring->shm) idist__liveness_tell(ring->shm, ring->shm->me, IDIST__ENDED_LEFT);

    for (i = 0; ring->links && i < ring->w->group.size; i++) {
        idist__link *l = &ring->links[i];
        idist__message *msg, *next;

        idist__link_close(ring, l);
        idist__sockets_close(&l->sockets); // closes sockets of links that were not complete
        idist__link_write_failed(ring, l); // frees what was not written

        for (msg = l->early; msg; msg = next) {
            next = msg->next;
            idist__message_free(ring, l, msg);
        }
    }

    while (ring->idle) {
        idist__transfer *xfer = ring->idle;
        ring->idle = xfer->next;
        idist__mem_free(mem, xfer);
    }

    idist__connector_free(ring->connector);
    idist__os_descriptor_close(&ring->wake);
    idist__os_descriptor_close(&ring->watch);
    idist__segment_map_free(mem, ring->shm);
    idist__mem_free(mem, ring->links);
    idist__mem_free(mem, ring->stages);
    idist__mem_free(mem, ring->polls);
    idist__mem_free(mem, ring);
}

// Allocates the ring. On failure *out is NULL, or a partly initialized ring that the caller passes
// to idist__join_free.
static idist_status idist__join_new(idist__world *w, idist__ring **out) {
    const idist_allocator *mem = &w->cfg.mem;
    idist__ring *ring = (idist__ring *)idist__mem_alloc(mem, sizeof *ring);
    size_t n = (size_t)w->group.size, i;

    *out = ring;
    if (!ring) return IDIST_ERR_NO_MEMORY;
    ring->w = w;
    ring->watch = -1;
    ring->wake = idist__os_poll_wakeup_new();
    if (ring->wake >= 0) ring->watch = idist__os_watch_new();
    if (ring->watch < 0)
        return idist__fail_errno("initialize: cannot create a wake-up descriptor", errno);

    ring->links = (idist__link *)idist__mem_alloc(mem, sizeof *ring->links * n);
    ring->stages = (char *)idist__mem_raw(mem, IDIST__STAGE_BYTES * n);
    if (!ring->links) return IDIST_ERR_NO_MEMORY;

    for (i = 0; i < n; i++) {
        idist__link *l = &ring->links[i];
        l->out_end = &l->out;
        l->early_end = &l->early;
        l->window = IDIST__WINDOW_BYTES;
        l->their_window = IDIST__WINDOW_BYTES;
        l->watched_in = -1;
        l->watched_out = -1;
        idist__sockets_init(&l->sockets);
        if (ring->stages) l->stage = ring->stages + i * IDIST__STAGE_BYTES;
    }

    return ring->stages ? IDIST_OK : IDIST_ERR_NO_MEMORY;
}

// Allocates the poll sets. Called once the number of sockets is known.
static idist_status idist__join_polls(idist__ring *ring) {
    int i;

    ring->poll_capacity = (size_t)IDIST__PROGRESS_WAKES + (size_t)IDIST__CONNECTOR_POLLS;
    for (i = 0; ring->links && i < ring->w->group.size; i++)
        ring->poll_capacity += (size_t)ring->links[i].sockets.count;
    ring->polls =
        (idist__os_poll_entry *)idist__mem_alloc(&ring->w->cfg.mem,
                                                 sizeof *ring->polls * 2 * ring->poll_capacity);

    return ring->polls ? IDIST_OK : IDIST_ERR_NO_MEMORY;
}

// Meets the other ranks. Called once the store is open.
static idist_status idist__join_meet(idist__join *j) {
    const idist_allocator *mem = &j->w->cfg.mem;
    size_t n = (size_t)j->w->group.size;
    idist__record *records = (idist__record *)idist__mem_alloc(mem, sizeof *records * n);
    idist_status status;

    j->wanted = (bool *)idist__mem_alloc(mem, sizeof *j->wanted * n);
    j->connector = idist__connector_new(j->ring);

    if (!records || !j->wanted || !j->connector) {
        idist__mem_free(mem, records);
        return IDIST_ERR_NO_MEMORY;
    }

    status = idist__records_agree_on_job(j);
    if (status == IDIST_OK) status = idist__records_make(j, records);
    if (status == IDIST_OK) idist__links_find(j);
    if (status == IDIST_OK) status = idist__segment_agree_share(j);
    if (status == IDIST_OK) status = idist__links_connect_others(j);
    if (status == IDIST_OK) status = idist__join_polls(j->ring);
    if (status == IDIST_OK) status = idist__join_store_leave(j);

    j->records = NULL;
    idist__mem_free(mem, records);

    return status;
}

// Tells the ranks that may have joined why this rank could not join. Adds this rank's number to the
// text, unless the text already names the ranks at fault. The text of a time-out or a loss names
// them, and so does a reason that came from another rank.
static void idist__join_tell_joined(const idist__join *j, idist_status status) {
    idist__ring *ring = j->ring;
    char text[sizeof idist__me.text], cause[IDIST__TEXT_BYTES] = "";
    int i;

    memcpy(text, idist__me.text, sizeof text); // sending may overwrite the text
    if (!j->others_know && status != IDIST_ERR_TIMEOUT && status != IDIST_ERR_PEER_LOST)
        snprintf(cause, sizeof cause, "rank %d could not join: ", ring->w->group.rank);
    idist__text_append(cause, sizeof cause, "%s", idist__text_behind(text, "initialize: "));

    for (i = 0; i < ring->w->group.size; i++) {
        idist__link *l = &ring->links[i];

        if (!idist__link_is_connected(l)) continue;
        if (j->voting && l->transport != &idist__pipe_transport) continue; // votes in transit
        idist__link_abort(ring, l, ring->w->group.ctx, status, cause);
    }

    memcpy(idist__me.text, text, sizeof text);
}

// Frees what was needed only to join, whether joining succeeded or not.
static void idist__join_end(idist__join *j) {
    const idist_allocator *mem = &j->w->cfg.mem;

    idist__os_descriptor_close(&j->w->cfg.listener);
    idist__connector_free(j->connector);
    idist__mem_free(mem, j->wanted);
    idist__mem_free(mem, j->tcp);

    if (j->store) {
        char text[sizeof idist__me.text];
        memcpy(text, idist__me.text, sizeof text); // closing may overwrite the text
        idist_store_close(&j->store);
        memcpy(idist__me.text, text, sizeof text);
    }
}

// Warns if a memory limit may keep this rank from joining or from sharing memory. The warning is
// needed because the error texts of other ranks cannot name the limit.
static void idist__join_warn_of_limit(idist__world *w) {
    size_t needed = 2 * w->cfg.shm_nbytes + IDIST__OPEN_NBYTES;
    char limit[160];

    idist__os_memory_limit(needed, limit, sizeof limit);
    if (*limit)
        idist__log_print(&w->log, IDIST_LOG_WARN,
                         "initialize: %s; to share memory with the other ranks of this host, this "
                         "rank needs at least %zu KiB more",
                         limit, needed >> 10);
}

static idist_status idist__join_open(idist__world *w) {
    idist__join j;
    idist_status status = IDIST_OK;

    memset(&j, 0, sizeof j);
    j.w = w;
    j.deadline_ns = idist__os_clock_deadline(w->cfg.init_timeout_ms);
    if (w->group.size > 1) idist__join_warn_of_limit(w);

    // This call is made early, because it takes 15 ms once there is a second thread, such as the
    // store's server.
    if (w->cfg.transport == IDIST__TRANSPORT_AUTO && w->group.size > 1)
        idist__os_cpu_fence_others(true);

    // The store is opened first, so that the other ranks learn of any later failure.
    if (w->group.size > 1) status = idist__join_store_open(&j);
    else idist__text_copy(w->nodes[0].hostname, sizeof w->nodes[0].hostname, w->about.hostname);

    if (status == IDIST_OK) status = idist__join_new(w, &j.ring);
    if (status == IDIST_OK)
        status = w->group.size > 1 ? idist__join_meet(&j) : idist__join_polls(j.ring);
    idist__join_failure_of_store(&j, status);

    w->impl = j.ring;
    // The ranks that have joined are told first, because one of their calls may be about to time
    // out, and the store may be slow.
    if (status != IDIST_OK && j.ring && j.ring->links) idist__join_tell_joined(&j, status);
    if (status != IDIST_OK) idist__join_failure_tell(&j, status);
    idist__join_end(&j);

    if (status == IDIST_OK && !j.ring->polled_link_count)
        idist__os_descriptor_close(&j.ring->watch); // nothing will ever be watched

    if (status != IDIST_OK && j.ring) idist__join_free(j.ring);

    return status;
}
