// ring/join/segment_beacon.h: the beacons of the ranks of a host
//
// Ranks that share memory have no connection to each other. So a rank learns from beacons
// (os/beacon.h) that the process of another one has ended, and ring/shm/liveness.h looks at them.
// Each rank lights its own before it connects to anybody; from then on others may look for it.
//
// A system may forbid such sockets. Then the loss of a rank would go unnoticed, so the ranks do not
// share memory there: each of them looks at the beacons of its parent and children in the tree
// (ring/join/segment_vote.h), and votes against the segment if it cannot see them. These beacons
// are lit, because their ranks are connected to this one.
#pragma once

#include "os/beacon.h"
#include "os/socket.h"
#include "net/address.h"
#include "ring/shm/segment.h"
#include "ring/join/join_state.h"

// Sets *address to the beacon of a rank. Its local socket has the same name without the last word.
static bool idist__segment_beacon_find(const idist__join *j, int rank, idist__os_address *address) {
    char where[sizeof j->records->local + 8];

    snprintf(where, sizeof where, "%s-beacon", j->records[rank].local);

    return idist__address_parse(address, where) == IDIST_OK;
}

// Finds the beacons of all ranks of this host, and lights our own. Returns 0, or an errno.
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

// Looks at our own beacon and at those of our parent and children. Returns 0 if the system lets us
// see them all, or an errno.
static int idist__segment_beacon_see(const idist__segment *seg) {
    int bit, error = idist__os_beacon_look(seg->observer, &seg->ports[seg->me].beacon);

    if (!error && seg->me)
        error = idist__os_beacon_look(seg->observer, &seg->ports[seg->me & (seg->me - 1)].beacon);
    for (bit = 1; !error && seg->me + bit < seg->n && !(seg->me & bit); bit *= 2)
        error = idist__os_beacon_look(seg->observer, &seg->ports[seg->me + bit].beacon);

    return error;
}
