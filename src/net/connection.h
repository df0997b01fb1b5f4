// net/connection.h: listening, and whole transfers with a deadline
//
// Opens listeners, and reads or writes whole buffers before a deadline. net/auth.h is the handshake
// with which every connection begins. net/pending.h is the bounded set of connections in the
// handshake: the server of the store and the links between ranks both accept strangers.
#pragma once

#include "os/poll.h"
#include "os/socket.h"
#include "base/fail.h"
#include "net/address.h"
#include "net/interface.h"

static idist_status idist__connection_listen_failed(const char *what) {
    if (errno == EADDRINUSE)
        return idist__fail(
            IDIST_ERR_ADDR_IN_USE,
            "%s is taken: another job or server runs there. Choose another MASTER_PORT, or end it",
            what);

    return idist__fail_errno(what, errno);
}

// An operation on a local socket failed. If no local socket works, as in some sandboxes, says so.
static bool idist__connection_lacks_local(void) {
    int refused = idist__os_socket_local_error();

    if (!refused) return false;
    idist__fail(IDIST_ERR_SYSTEM,
                "socket(AF_UNIX): %s: this process may not use local sockets, by which the ranks "
                "of a host meet. IDIST_TRANSPORT=tcp (desc.transport) uses TCP over loopback "
                "instead",
                strerror(refused));

    return true;
}

// `what` is the address in the words of the caller. Returns the socket in *fd, -1 on failure.
static idist_status idist__connection_listen(const idist__os_address *address, const char *what,
                                             int *fd) {
    int error;

    *fd = idist__os_socket_listen(address);
    if (*fd >= 0) return IDIST_OK;
    error = errno;
    if (idist__os_socket_is_local(address) && idist__connection_lacks_local())
        return IDIST_ERR_SYSTEM;
    errno = error;

    return idist__connection_listen_failed(what);
}

// The same at a port of all addresses of this host. Port 0: a free one.
static idist_status idist__connection_listen_everywhere(int port, const char *what, int *fd) {
    *fd = idist__os_socket_listen_everywhere(port);
    return *fd >= 0 ? IDIST_OK : idist__connection_listen_failed(what);
}

// Listens for other hosts at the address that this host advertises, or else, where IDIST_ADDR gives
// one that this host does not have, at the one that it would advertise without IDIST_ADDR. For
// those who trust the network; with a secret, a server listens everywhere.
static idist_status idist__connection_listen_beyond(const idist__own_address *own,
                                                    const idist__os_address *hint, int port,
                                                    const char *what, int *fd) {
    idist__os_address address;
    idist__own_address other;
    idist_status status = idist__address_tcp(&address, own->ip, port);
    bool is_meant = idist__address_host_is_loopback(own->ip);

    if (status == IDIST_OK && (is_meant || !idist__os_socket_is_loopback(&address))) {
        *fd = idist__os_socket_listen(&address);
        if (*fd >= 0) return IDIST_OK;
        if (errno != EADDRNOTAVAIL) return idist__connection_listen_failed(what);
    }

    status = idist__interface_find(hint, &other);
    if (status == IDIST_OK) status = idist__address_tcp(&address, other.ip, port);

    return status == IDIST_OK ? idist__connection_listen(&address, what, fd) : status;
}

// Blocks until the buffer is full. False: errno is ETIMEDOUT when the deadline has passed, 0 at the
// end of the stream, or the error; how much was read is lost.
static bool idist__connection_read_all(int fd, void *buf, size_t nbytes, int64_t deadline_ns) {
    char *to = (char *)buf;

    while (nbytes) {
        ptrdiff_t n = idist__os_socket_read(fd, to, nbytes);

        if (n < 0) return false;

        if (n == 0 && !idist__os_poll_wait(fd, IDIST__OS_READABLE, deadline_ns)) {
            errno = ETIMEDOUT;
            return false;
        }

        to += n;
        nbytes -= (size_t)n;
    }

    return true;
}

// Blocks until the socket has taken all bytes. False as above.
static bool idist__connection_write_all(int fd, const void *buf, size_t nbytes,
                                        int64_t deadline_ns) {
    const char *from = (const char *)buf;

    while (nbytes) {
        idist__os_part part;
        ptrdiff_t n;

        part.data = from;
        part.nbytes = nbytes;
        n = idist__os_socket_write(fd, &part, 1);
        if (n < 0) return false;

        if (n == 0 && !idist__os_poll_wait(fd, IDIST__OS_WRITABLE, deadline_ns)) {
            errno = ETIMEDOUT;
            return false;
        }

        from += n;
        nbytes -= (size_t)n;
    }

    return true;
}
