// os/beacon.h: a name that exists as long as its process, and wakes it
//
// A process opens a beacon under a local name. The kernel takes the name away when the process
// ends, however it ends. Others need no connection to see that, or to wake the process while it
// watches its beacon in poll: one socket of their own serves for any number of beacons.
//
// Here a beacon is a datagram socket. On macOS its name is a path, and one on which no socket is
// open gives ECONNREFUSED, too. On Windows the same takes a named mutex, which tells that its owner
// has ended, and an event.
#pragma once

#include "os/socket.h"
#include "os/system.h"

// A beacon under a local address, or -1 and errno. Watch it for IDIST__OS_READABLE.
IDIST__UNUSED static int idist__os_beacon_light(const idist__os_address *address);

// The socket that the next two functions take, or -1 and errno.
IDIST__UNUSED static int idist__os_beacon_observer(void);

// Makes a beacon readable. Never blocks.
//
// EAGAIN has two reasons. The queue of the beacon may be full; then it is readable already. Or the
// bytes that we have sent to all beacons, and that nobody has read yet, fill the send buffer of our
// socket (about 280 of them); then another socket can send.
IDIST__UNUSED static void idist__os_beacon_wake(int observer, const idist__os_address *address);

// Looks at a beacon, without waking its process. 0: it is lit; ECONNREFUSED: it has gone out;
// another errno: the system does not let us see it.
IDIST__UNUSED static int idist__os_beacon_look(int observer, const idist__os_address *address);

// Makes our own beacon unreadable again.
IDIST__UNUSED static void idist__os_beacon_clear(int beacon);
