// net/connection.h: listening, and whole transfers with a deadline
//
// Opens listeners, and reads or writes whole buffers before a deadline. The handshake that begins
// every connection is in net/auth.h. The bounded set of connections in the handshake is in
// net/pending.h. Both the server of the store and the links between ranks use this set, because
// both accept connections from strangers.
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

// Returns true and sets the error text if this process is not allowed to use local sockets at all,
// as in some sandboxes. Called after an operation on a local socket has failed.
static bool idist__connection_lacks_local(void) {
    int refused = idist__os_socket_local_error();

    if (!refused) return false;
    idist__fail(
        IDIST_ERR_SYSTEM,
        "socket(AF_UNIX): %s: this process may not use local sockets, which the ranks of a host "
        "use to meet. IDIST_TRANSPORT=tcp (desc.transport) uses TCP over loopback instead",
        strerror(refused));

    return true;
}

// Listens at an address. `what` names the address in error texts. Sets *fd to the socket, or to -1
// on failure.
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

// Listens at a port on all addresses of this host. Port 0 selects a free port. Sets *fd to the
// socket, or to -1 on failure.
static idist_status idist__connection_listen_everywhere(int port, const char *what, int *fd) {
    *fd = idist__os_socket_listen_everywhere(port);
    return *fd >= 0 ? IDIST_OK : idist__connection_listen_failed(what);
}

// Listens for other hosts at the address that this host advertises. IDIST_ADDR may give an address
// that this host does not have, or a name that it cannot resolve or resolves to loopback. In these
// cases, listens at the address that this host would advertise without IDIST_ADDR. Used with
// IDIST_INSECURE=1; a process with a secret listens on all addresses instead.
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

// Reads a whole buffer. Blocks until the buffer is full. Returns false on failure; the number of
// bytes read is then unknown. Sets errno to ETIMEDOUT if the deadline has passed, to 0 at the end
// of the stream, or to the error of the socket.
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

// Writes a whole buffer. Blocks until the socket has accepted all bytes. Returns false on failure.
// Sets errno to ETIMEDOUT if the deadline has passed, or to the error of the socket.
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
