// os/linux/beacon.h: a name that exists as long as its process, and through which others wake it
#pragma once

#include "os/beacon.h"
#include "os/unwind.h"
#include "os/poll.h"
#include "os/socket.h"

IDIST__UNUSED static int idist__os_beacon_light(const idist__os_address *address) {
    int error, fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    if (fd < 0) return -1;
    if (bind(fd, (const struct sockaddr *)&address->sa, address->nbytes) == 0) return fd;

    error = errno;
    idist__os_descriptor_close(&fd);
    errno = error;

    return -1;
}

IDIST__UNUSED static int idist__os_beacon_observer(void) {
    return socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
}

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

IDIST__UNUSED static int idist__os_beacon_look(int observer, const idist__os_address *address) {
    return IDIST__OS_CALL(
               connect(observer, (const struct sockaddr *)&address->sa, address->nbytes)) == 0
               ? 0
               : errno;
}

IDIST__UNUSED static void idist__os_beacon_clear(int beacon) {
    char bytes[8];
    while (IDIST__OS_CALL(recv(beacon, bytes, sizeof bytes, MSG_DONTWAIT)) >= 0 || errno == EINTR)
        continue;
}
