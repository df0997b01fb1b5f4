// os/beacon.h: a name that exists as long as its process, and through which others wake it
//
// A process opens a beacon under a local name. The kernel removes the name when the process ends,
// for whatever reason. Other processes need no connection to see this, or to wake the process while
// it polls its beacon. One socket per observer serves any number of beacons.
//
// On Linux a beacon is a datagram socket. On macOS its name is a path; a connection to a path on
// which no socket is open also fails with ECONNREFUSED. On Windows a beacon needs an event and a
// named mutex; the mutex shows that its owner has ended.
#pragma once

#include "os/socket.h"
#include "os/system.h"

// Opens a beacon under a local address. Returns its descriptor, or -1 with errno. Poll the
// descriptor for IDIST__OS_READABLE.
IDIST__UNUSED static int idist__os_beacon_light(const idist__os_address *address);

// Returns the socket that idist__os_beacon_wake and idist__os_beacon_look take, or -1 with errno.
IDIST__UNUSED static int idist__os_beacon_observer(void);

// Makes a beacon readable. Never blocks.
//
// On Linux the send may fail with EAGAIN, for one of two reasons. The queue of the beacon may be
// full; then the beacon is already readable. Or the send buffer of the observer is full of
// datagrams that nobody has read yet (about 280 of one byte each, over all beacons). Then a new
// socket can still send, so this function tries one.
IDIST__UNUSED static void idist__os_beacon_wake(int observer, const idist__os_address *address);

// Checks a beacon without waking its process. Returns 0 if the beacon is open, ECONNREFUSED if it
// is closed, or another errno if the system does not let us see the beacon.
IDIST__UNUSED static int idist__os_beacon_look(int observer, const idist__os_address *address);

// Makes the beacon of this process unreadable again.
IDIST__UNUSED static void idist__os_beacon_clear(int beacon);
