// ring/join/segment_beacon.h: opens and checks the beacons of the ranks of a host
//
// Ranks that share memory have no connection to each other. So a rank learns from a beacon
// (os/beacon.h) that the process of another rank has ended; ring/shm/liveness.h checks the beacons.
// Each rank opens its own beacon before it connects to any rank. From then on, other ranks may
// check the beacon.
//
// A system may forbid the sockets that beacons need. In that case the loss of a rank would go
// unnoticed, so the ranks do not share memory. Each rank checks the beacons of its parent and
// children in the tree (ring/join/segment_vote.h), and votes against the segment if it cannot see
// them. These beacons are open already, because their ranks are connected to this rank.
#pragma once

#include "os/beacon.h"
#include "os/socket.h"
#include "net/address.h"
#include "ring/shm/segment.h"
#include "ring/join/join_state.h"

// Sets *address to the beacon of a rank: the name of the rank's local socket with "-beacon"
// appended.
static bool idist__segment_beacon_find(const idist__join *j, int rank, idist__os_address *address) {
    char where[sizeof j->records->local + 8];

    snprintf(where, sizeof where, "%s-beacon", j->records[rank].local);

    return idist__address_parse(address, where) == IDIST_OK;
}

// Finds the beacons of all ranks of this host, and opens our own. Returns 0, or an errno.
static int idist__segment_beacon_light(const idist__join *j, idist__segment *seg,
                                       const int *ranks) {
    int i;

    for (i = 0; i < seg->n; i++)
        if (!idist__segment_beacon_find(j, ranks[i], &seg->ports[i].beacon)) return EINVAL;

    seg->beacon = idist__os_beacon_light(&seg->ports[seg->me].beacon);
    if (seg->beacon < 0) return errno;
    seg->observer = idist__os_beacon_observer();
    if (seg->observer < 0) return errno;
    seg->next_look = seg->me;

    return 0;
}

// Checks our own beacon and the beacons of our parent and children. Returns 0 if the system lets us
// see them all, or an errno.
static int idist__segment_beacon_see(const idist__segment *seg) {
    int bit, error = idist__os_beacon_look(seg->observer, &seg->ports[seg->me].beacon);

    if (!error && seg->me)
        error = idist__os_beacon_look(seg->observer, &seg->ports[seg->me & (seg->me - 1)].beacon);
    for (bit = 1; !error && seg->me + bit < seg->n && !(seg->me & bit); bit *= 2)
        error = idist__os_beacon_look(seg->observer, &seg->ports[seg->me + bit].beacon);

    return error;
}
