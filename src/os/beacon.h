// os/beacon.h: a name that exists as long as its process, and wakes it
//
// A process lights a beacon under a local name. The kernel takes the name away when the process
// ends, however it ends. Others need no connection to see that, or to wake the process while it
// watches its beacon in poll: one socket of their own serves for any number of beacons.
//
// Here a beacon is a datagram socket. On macOS its name is a path, and one on which no socket is
// open gives ECONNREFUSED, too. On Windows the same takes a named mutex, which tells that its owner
// has ended, and an event.
#pragma once

#include "os/unwind.h"
#include "os/poll.h"
#include "os/socket.h"

// A beacon under a local address, or -1 and errno. Watch it for IDIST__OS_READABLE.
IDIST__UNUSED static int idist__os_beacon_light(const idist__os_address *address) {
    int error, fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    if (fd < 0) return -1;
    if (bind(fd, (const struct sockaddr *)&address->sa, address->nbytes) == 0) return fd;

    error = errno;
    idist__os_descriptor_close(&fd);
    errno = error;

    return -1;
}

// The socket that the next two functions take, or -1 and errno.
IDIST__UNUSED static int idist__os_beacon_observer(void) {
    return socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
}

// Makes a beacon readable. Never blocks.
//
// EAGAIN has two reasons. The queue of the beacon may be full; then it is readable already. Or the
// bytes that we have sent to all beacons, and that nobody has read yet, fill the send buffer of our
// socket (about 280 of them); then another socket can send.
IDIST__UNUSED static void idist__os_beacon_wake(int observer, const idist__os_address *address) {
    const struct sockaddr *to = (const struct sockaddr *)&address->sa;
    int fresh;

    if (IDIST__OS_CALL(sendto(observer, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL, to, address->nbytes)) >=
        0)
        return;
    if (errno != EAGAIN) return;
    fresh = idist__os_beacon_observer();
    if (fresh < 0) return;
    IDIST__OS_CALL(sendto(fresh, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL, to, address->nbytes));
    idist__os_descriptor_close(&fresh);
}

// Looks at a beacon, without waking its process. 0: it is lit; ECONNREFUSED: it has gone out;
// another errno: the system does not let us see it.
IDIST__UNUSED static int idist__os_beacon_look(int observer, const idist__os_address *address) {
    return IDIST__OS_CALL(
               connect(observer, (const struct sockaddr *)&address->sa, address->nbytes)) == 0
               ? 0
               : errno;
}

// Makes our own beacon unreadable again.
IDIST__UNUSED static void idist__os_beacon_clear(int beacon) {
    char bytes[8];
    while (IDIST__OS_CALL(recv(beacon, bytes, sizeof bytes, MSG_DONTWAIT)) >= 0 || errno == EINTR)
        continue;
}
