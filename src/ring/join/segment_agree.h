// ring/join/segment_agree.h: the ranks of a host agree on a segment that all of them share
//
// The ranks of a host form a tree (ring/join/segment_vote.h). Each rank opens its beacon and
// connects to its parent. The root makes the file and sends its descriptor to its children. Every
// rank that receives the descriptor sends it on to its own children. Each rank maps the file,
// reserves its own pipes and first region, and votes on whether that worked:
//
//   root           makes the file    sends it    maps it   collects votes   sends the lowest
//   other ranks    receive it        send it     map it    collect votes,   receive the lowest
//                                                          send the lowest  and send it
//
// The file is used only if every rank succeeded. A second vote then decides whether the ranks read
// each other's memory through the kernel (ring/join/segment_probe.h), and pipes replace the sockets
// of the links (ring/join/take_over.h). If a rank failed, the tree's connections stay open, and the
// other pairs connect as well. The vote tells every rank which rank could not map the file, and
// why.
//
//   idist__segment_agree_share            the entry point; does all of this
//     idist__segment_beacon_light         from now on other ranks may check our beacon
//     idist__links_connect                connects to our parent and children
//     idist__segment_beacon_see           checks that the system lets us see beacons
//     idist__segment_agree_pass           receives the descriptor and sends it on
//     idist__segment_agree_vote_map       maps the file; first vote
//     idist__segment_agree_vote_reads     second vote
//     idist__take_over_links              replaces sockets with pipes
//
// MESSAGES
//
//   idist__segment_hello   parent to child, with the descriptor (or none if the root has no file)
//   idist__ballot          child to parent, then parent to child; twice
#pragma once

#include "os/cpu.h"
#include "os/memory.h"
#include "os/poll.h"
#include "os/segment.h"
#include "base/log.h"
#include "net/connection.h"
#include "ring/shm/segment.h"
#include "ring/msg/ring_model.h"
#include "ring/join/join_state.h"
#include "ring/join/links.h"
#include "ring/join/segment_layout.h"
#include "ring/join/segment_map.h"
#include "ring/join/segment_probe.h"
#include "ring/join/segment_vote.h"
#include "ring/join/segment_beacon.h"
#include "ring/join/take_over.h"

typedef struct idist__segment_hello { // sent with the descriptor; see ring/join/segment_layout.h
    uint64_t shm_nbytes, window_nbytes;
} idist__segment_hello;

// ---- passing the descriptor down the tree ----

// Sends a message with a descriptor, which may be -1.
static bool idist__segment_agree_send(int sock, const void *buf, size_t nbytes, int fd,
                                      int64_t deadline_ns) {
    ptrdiff_t sent = idist__os_segment_send(sock, buf, nbytes, fd);

    while (sent < 0 && errno == EAGAIN) {
        if (!idist__os_poll_wait(sock, IDIST__OS_WRITABLE, deadline_ns)) return false;
        sent = idist__os_segment_send(sock, buf, nbytes, fd);
    }

    return sent == (ptrdiff_t)nbytes; // a new socket never cuts a short message
}

// Receives a message. Sets *fd to its descriptor, or to -1 if it has none. On failure errno is 0 if
// the peer has closed the connection.
static bool idist__segment_agree_receive(int sock, void *buf, size_t nbytes, int *fd,
                                         int64_t deadline_ns) {
    ptrdiff_t received;

    *fd = -1;
    errno = ETIMEDOUT;
    if (!idist__os_poll_wait(sock, IDIST__OS_READABLE, deadline_ns)) return false;
    received = idist__os_segment_receive(sock, buf, nbytes, fd);
    if (received == 0) errno = 0;
    if (received <= 0) return false;

    return idist__connection_read_all(sock, (char *)buf + received, nbytes - (size_t)received,
                                      deadline_ns);
}

// Makes the file or receives its descriptor, and sends the descriptor to our children. If there is
// no file, sets *error to the reason; the ranks still vote.
static idist_status idist__segment_agree_pass(idist__join *j, idist__segment *seg,
                                              const idist__vote_tree *tree, int *error) {
    const idist__link *links = j->ring->links;
    idist__segment_hello hello;
    idist_status status;
    int i;

    *error = EINVAL;
    hello.shm_nbytes = j->w->cfg.shm_nbytes;

    if (tree->parent >= 0) {
        status = idist__segment_vote_await(j, tree->parent);
        if (status != IDIST_OK) return status;
        if (!idist__segment_agree_receive(links[tree->parent].sockets.fds[0], &hello, sizeof hello,
                                          &seg->fd, j->deadline_ns))
            return idist__segment_vote_broken(j, tree->parent);
        idist__segment_layout_set(seg, (size_t)hello.shm_nbytes, (size_t)hello.window_nbytes);
        if (seg->fd >= 0) *error = 0;
    } else {
        *error = idist__segment_map_create(seg, (size_t)hello.shm_nbytes);
        hello.window_nbytes = seg->window_nbytes;
    }

    for (i = 0; i < tree->child_count; i++)
        if (!idist__segment_agree_send(links[tree->children[i]].sockets.fds[0], &hello,
                                       sizeof hello, seg->fd, j->deadline_ns))
            return idist__segment_vote_broken(j, tree->children[i]);

    return IDIST_OK;
}

// ---- the two votes ----

// States in the ballot that this rank cannot share memory, and why: it cannot see beacons, or
// something else failed.
static void idist__segment_agree_refuse(const idist__join *j, const idist__segment *seg,
                                        int beacon_error, int error, idist__ballot *ballot) {
    char limit[160] = "";

    ballot->vote = IDIST__VOTE_FAILED;
    if (!beacon_error) idist__os_memory_limit(seg->window_at, limit, sizeof limit);
    snprintf(ballot->why, sizeof ballot->why, "rank %d: %s%s", j->w->group.rank,
             beacon_error ? "processes on this host cannot detect that another one has ended: "
                          : "",
             *limit ? limit : strerror(beacon_error ? beacon_error : error));
}

// Maps the file, unless an error has already occurred, and votes on the result. Sets *all if every
// rank of this host has mapped the file.
static idist_status idist__segment_agree_vote_map(idist__join *j, idist__segment *seg,
                                                  const idist__vote_tree *tree, int beacon_error,
                                                  int error, bool *all) {
    idist__ballot ballot;
    idist_status status;

    memset(&ballot, 0, sizeof ballot);
    ballot.vote = idist__os_cpu_fence_others(true) ? IDIST__VOTE_MAPPED : IDIST__VOTE_FENCED;
    if (!error && !beacon_error) error = idist__segment_map_open(seg);
    if (error || beacon_error) idist__segment_agree_refuse(j, seg, beacon_error, error, &ballot);
    else idist__segment_probe_prepare(seg);

    status = idist__segment_vote_decide(j, tree, &ballot);
    *all = status == IDIST_OK && ballot.vote > IDIST__VOTE_FAILED;

    if (status == IDIST_OK && !*all) {
        snprintf(j->w->about.sharing, sizeof j->w->about.sharing, "no shared memory: %s",
                 ballot.why);
        idist__log_print(&j->w->log, IDIST_LOG_INFO, "%s", j->w->about.sharing);
    }

    if (*all && seg->me == 0) {
        idist__segment_header *head = idist__segment_header_of(seg);
        head->ncores = (uint32_t)idist__os_cpu_set_count(&head->cpus);
        head->fenced = ballot.vote == IDIST__VOTE_FENCED || seg->n > (int)head->ncores;
    }

    return status;
}

// Votes on how the ranks read each other's memory. All ranks of this host have mapped the file.
static idist_status idist__segment_agree_vote_reads(idist__join *j, idist__segment *seg,
                                                    const idist__vote_tree *tree) {
    idist__ballot ballot;
    idist_status status;

    memset(&ballot, 0, sizeof ballot);
    ballot.vote = idist__segment_probe_reads(seg);
    status = idist__segment_vote_decide(j, tree, &ballot);
    seg->reads_remote = ballot.vote >= IDIST__READS_SLOWLY;
    seg->reads_fast = ballot.vote == IDIST__READS_FAST;

    return status;
}

// ---- all of it ----

// Finds the ranks of this host that take part, and this rank's number among them. Stores their
// world ranks in `ranks`.
static void idist__segment_agree_find_ranks(const idist__join *j, idist__segment *seg, int *ranks) {
    const idist__record *own = &j->records[j->w->group.rank];
    int i;

    for (i = 0; i < j->w->group.size; i++) {
        const idist__record *record = &j->records[i];

        seg->local[i] = -1;
        if (!record->shm || record->host != own->host || !record->local[0]) continue;
        if (i == j->w->group.rank) seg->me = seg->n;
        ranks[seg->n++] = i;
    }
}

// Agrees on the segment with the other ranks of this host, if there are any. Sets *all if every
// rank of this host has mapped the file, even if this rank fails later.
static idist_status idist__segment_agree_run(idist__join *j, idist__segment *seg,
                                             const idist__vote_tree *tree, bool *all) {
    int i, beacon_error, error = 0;
    idist_status status;

    if (seg->n < 2) return IDIST_OK;
    beacon_error = idist__segment_beacon_light(j, seg, tree->ranks);

    if (tree->parent >= 0) idist__links_want(j, tree->parent);
    for (i = 0; i < tree->child_count; i++) idist__links_want(j, tree->children[i]);
    status = idist__links_connect(j);
    if (!beacon_error) beacon_error = idist__segment_beacon_see(seg);

    if (status == IDIST_OK) status = idist__segment_agree_pass(j, seg, tree, &error);
    if (status == IDIST_OK)
        status = idist__segment_agree_vote_map(j, seg, tree, beacon_error, error, all);
    if (status == IDIST_OK && *all) status = idist__segment_agree_vote_reads(j, seg, tree);

    return status;
}

// Shares memory with the other ranks of this host, if all of them can.
static idist_status idist__segment_agree_share(idist__join *j) {
    const idist_allocator *mem = &j->w->cfg.mem;
    int size = j->w->group.size, *ranks;
    idist__segment *seg;
    idist__vote_tree tree;
    bool all = false;
    idist_status status;

    if (!j->records[j->w->group.rank].shm) return IDIST_OK;
    seg = idist__segment_map_new(mem, (size_t)size);
    if (!seg) return IDIST_ERR_NO_MEMORY;

    ranks = seg->local + size; // allocated together with seg->local
    idist__segment_agree_find_ranks(j, seg, ranks);
    idist__segment_vote_set_tree(&tree, ranks, seg->n, seg->me);
    status = idist__segment_agree_run(j, seg, &tree, &all);

    if (all) idist__take_over_links(j, seg, ranks, status);
    else idist__segment_map_free(mem, seg);
    j->voting = status != IDIST_OK;

    return status;
}
