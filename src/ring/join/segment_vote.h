// ring/join/segment_vote.h: the ranks of a host vote, and the lowest vote decides
//
// The ranks of a host form a binomial tree. Its root is the lowest rank. In the tree, the ranks of
// a host are numbered from 0. The parent's number is the rank's number with its lowest set bit
// cleared:
//
//   0 --+-- 1          a rank has at most log2(n) children,
//       +-- 2 -- 3     and the tree has log2(n) levels below the root
//       +-- 4 --+-- 5
//               +-- 6 -- 7
//
// A ballot holds a vote, which is a number, and the reason if the rank votes against. Each rank
// waits for the ballots of its children. It compares these ballots with its own, and sends the
// lowest one to its parent. Then it waits for the winning ballot, and passes that ballot on to its
// children. In this way every rank learns the result, and the reason of a rank that voted against:
//
//   up      leaf -> ... -> root     the lowest ballot so far
//   down    root -> ... -> leaf     the lowest ballot of all
//
// The ballots travel over the connections of the tree (ring/join/links.h), before any frames. If a
// rank fails during a vote, its connections end, and with them the vote of all ranks. Each rank
// that waits for the failed rank reads the reason from the store (ring/join/join_failure.h).
#pragma once

#include "os/clock.h"
#include "os/poll.h"
#include "base/fail.h"
#include "net/connection.h"
#include "ring/join/join_state.h"
#include "ring/join/join_failure.h"

enum { IDIST__VOTE_CHILDREN = 32 }; // most children of a rank

typedef struct idist__vote_tree { // our place in the tree, in world ranks
    const int *ranks;             // all ranks of this host, by rank on this host
    int parent;                   // -1 if we are the root
    int children[IDIST__VOTE_CHILDREN];
    int child_count;
} idist__vote_tree;

enum { // votes on whether the segment is used
    IDIST__VOTE_FAILED,
    IDIST__VOTE_FENCED, // mapped, but the kernel has no membarrier: writers need a fence
    IDIST__VOTE_MAPPED
};

typedef struct idist__ballot { // a ballot as it travels through the tree
    char vote;
    char why[255]; // for IDIST__VOTE_FAILED: which rank failed, and why
} idist__ballot;

// Finds the place of rank `me` in a tree of n ranks.
static void idist__segment_vote_set_tree(idist__vote_tree *tree, const int *ranks, int n, int me) {
    int bit;

    tree->ranks = ranks;
    tree->parent = me ? ranks[me & (me - 1)] : -1;
    tree->child_count = 0;
    for (bit = 1; me + bit < n && !(me & bit); bit *= 2)
        tree->children[tree->child_count++] = ranks[me + bit];
}

static idist_status idist__segment_vote_broken(idist__join *j, int rank) {
    if (errno == ETIMEDOUT)
        return idist__fail(IDIST_ERR_TIMEOUT,
                           "initialize: rank %d on %s did not answer while the ranks of this host "
                           "set up their shared memory: it is stopped, too slow, or waits for a "
                           "rank that is",
                           rank, j->w->nodes[rank].hostname);

    return idist__join_failure_lost(
        j, rank, "its connection ended while the ranks of this host agreed on shared memory");
}

// Waits until a link can be read. Meanwhile, regularly checks whether a rank has given up, which
// may be why nothing arrives.
static idist_status idist__segment_vote_await(idist__join *j, int rank) {
    idist_status status;

    for (;;) {
        int64_t ask_ns = idist__os_clock_deadline(idist__join_state_ask_ms(j));

        if (idist__os_poll_wait(j->ring->links[rank].sockets.fds[0], IDIST__OS_READABLE,
                                ask_ns < j->deadline_ns ? ask_ns : j->deadline_ns))
            return IDIST_OK;
        status = idist__join_failure_check(j);
        if (status != IDIST_OK) return status;
        errno = ETIMEDOUT;
        if (idist__os_clock_ms_until(j->deadline_ns) == 0)
            return idist__segment_vote_broken(j, rank);
    }
}

// Receives the ballot of a rank.
static idist_status idist__segment_vote_hear(idist__join *j, int rank, idist__ballot *ballot) {
    int sock = j->ring->links[rank].sockets.fds[0];
    idist_status status = idist__segment_vote_await(j, rank);

    if (status != IDIST_OK) return status;
    if (!idist__connection_read_all(sock, ballot, sizeof *ballot, j->deadline_ns))
        return idist__segment_vote_broken(j, rank);
    ballot->why[sizeof ballot->why - 1] = 0;

    return IDIST_OK;
}

static idist_status idist__segment_vote_say(idist__join *j, int rank, const idist__ballot *ballot) {
    int sock = j->ring->links[rank].sockets.fds[0];

    if (idist__connection_write_all(sock, ballot, sizeof *ballot, j->deadline_ns)) return IDIST_OK;
    return idist__segment_vote_broken(j, rank);
}

// Votes, and replaces our ballot with the lowest ballot of this host.
static idist_status idist__segment_vote_decide(idist__join *j, const idist__vote_tree *tree,
                                               idist__ballot *ballot) {
    idist_status status = IDIST_OK;
    int i;

    for (i = 0; i < tree->child_count && status == IDIST_OK; i++) {
        idist__ballot other;

        status = idist__segment_vote_hear(j, tree->children[i], &other);
        if (status == IDIST_OK && other.vote < ballot->vote) *ballot = other;
    }

    if (tree->parent >= 0 && status == IDIST_OK) {
        status = idist__segment_vote_say(j, tree->parent, ballot);
        if (status == IDIST_OK) status = idist__segment_vote_hear(j, tree->parent, ballot);
    }

    for (i = 0; i < tree->child_count && status == IDIST_OK; i++)
        status = idist__segment_vote_say(j, tree->children[i], ballot);
    if (status != IDIST_OK) ballot->vote = IDIST__VOTE_FAILED;

    return status;
}
