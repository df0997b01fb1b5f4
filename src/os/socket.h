// os/socket.h: stream sockets, multicast datagrams, addresses and name lookup
//
// Every socket is non-blocking and closed on exec. The caller owns the descriptors. Only functions
// with a deadline, and the name lookup, block. Failures leave the reason in errno. On a system
// without the abstract names of Linux, a local name would become a path in a private folder.
#pragma once

#include "os/system.h"

// Makes the address of a local socket. Returns false if the name is empty or longer than
// IDIST__OS_SOCKET_NAME_MAX bytes.
static bool idist__os_socket_local_address(idist__os_address *address, const char *name);

// Looks up a TCP address. `host` is a name or the text of an IP address. Sets *count to the number
// of addresses; `which` modulo *count selects one. May block as long as the resolver does. Returns
// NULL, or a static text that says why the lookup failed.
static const char *idist__os_socket_resolve(idist__os_address *address, const char *host, int port,
                                            int which, int *count);

// Returns true if the address is the address of a local socket.
static bool idist__os_socket_is_local(const idist__os_address *address);

// Returns true if the address is an IPv4 address.
static bool idist__os_socket_is_ipv4(const idist__os_address *address);

// Returns true if only this host can reach the address.
static bool idist__os_socket_is_loopback(const idist__os_address *address);

// Returns true if an IP address is valid on one link only: 169.254.0.0/16 or fe80::/10.
static bool idist__os_socket_is_link_local(const idist__os_address *address);

// Returns true if two IP addresses are equal, whatever their ports.
static bool idist__os_socket_is_same_host(const idist__os_address *a, const idist__os_address *b);

// Writes the text of an IP address, without the port.
static void idist__os_socket_host_text(const idist__os_address *address, char *buf,
                                       size_t capacity);

// Returns the port of a TCP address, or 0 for any other address.
static int idist__os_socket_port(const idist__os_address *address);

// Gets the address to which a socket is bound. Returns false on failure.
static bool idist__os_socket_own_address(int fd, idist__os_address *address);

// Gets the address of the other end of a connection. Returns false on failure.
static bool idist__os_socket_peer_address(int fd, idist__os_address *address);

// Returns true if an error means that this process or the system has no descriptors left.
static bool idist__os_socket_out_of_fds(int error);

// Returns the errno with which the system refuses local sockets to this process, or 0 if the system
// allows them.
static int idist__os_socket_local_error(void);

// Returns the shortest round-trip time of a TCP socket so far, in us, or 0 if it is unknown.
IDIST__UNUSED static uint32_t idist__os_socket_round_trip_us(int fd);

// Returns the number of bytes that the system's buffer limits allow in flight on one TCP socket, or
// 0 if it is unknown. About half of a buffer holds data.
IDIST__UNUSED static uint64_t idist__os_socket_window_nbytes(void);

// Returns the bandwidth of a network interface in Mbit/s as its driver reports it, or 0 if it is
// unknown.
IDIST__UNUSED static uint32_t idist__os_socket_interface_mbits(const char *name);

// Adapts a TCP socket after some bytes have been exchanged. If the system uses the congestion
// control BBR, a socket begins with another one. If the peer turns out to be far away, this
// function restores BBR, which copes with losses on long paths.
IDIST__UNUSED static void idist__os_socket_measured(int fd);

// Returns a socket that listens on an address, or -1. EADDRINUSE means that another socket listens
// there.
static int idist__os_socket_listen(const idist__os_address *address);

// Returns a socket that listens on a port on all addresses of this host, IPv4 and IPv6, or -1. Port
// 0 selects a free port. EADDRINUSE means that another socket listens there.
static int idist__os_socket_listen_everywhere(int port);

// An IP address of a network interface that is up.
typedef struct idist__os_interface {
    char name[32];
    idist__os_address address;
} idist__os_interface;

// Lists at most `capacity` addresses of this host, in the system's order. Returns the number of
// entries, or -1 if the addresses cannot be listed.
static int idist__os_socket_interfaces(idist__os_interface *list, int capacity);

// Accepts the next connection. Returns -1 with EAGAIN if none is pending. If a local connection
// comes from another user, closes it immediately and reports EAGAIN.
static int idist__os_socket_accept(int listener);

// Begins to connect. The returned socket becomes writable when the attempt has ended; then call
// idist__os_socket_connect_end. Returns -1 on failure.
static int idist__os_socket_connect_begin(const idist__os_address *address);

// Ends an attempt to connect. Returns 0, or an errno after closing the socket. EPERM means that
// another user listens on the local address.
static int idist__os_socket_connect_end(int *fd, bool local);

// Tries once to connect, and blocks until the deadline at the latest. Returns -1 on failure; the
// caller decides whether to try again. ETIMEDOUT means that the deadline has passed.
static int idist__os_socket_connect(const idist__os_address *address, int64_t deadline_ns);

// Returns true if an error of connect means that the network is down, or that this host has no
// address of that kind (IPv4, IPv6). Other errors mean that the peer is gone.
static bool idist__os_socket_is_unreachable(int error);

// Reads the data that have arrived. Returns the number of bytes, 0 if the call would block, or -1
// at the end of the stream (errno 0) or on an error.
static ptrdiff_t idist__os_socket_read(int fd, void *buf, size_t nbytes);

// A piece of memory to send. Has the layout of struct iovec, so that a send need not copy the list.
typedef struct idist__os_part {
    const void *data;
    size_t nbytes;
} idist__os_part;

// Writes as much of several pieces as the socket accepts now. Returns the number of bytes, 0 if the
// call would block, or -1 on an error. Never raises SIGPIPE.
static ptrdiff_t idist__os_socket_write(int fd, const idist__os_part *parts, int nparts);

// Ends the outgoing stream: the peer reads the end of the stream after all data sent before. The
// caller may still read. Does not block.
IDIST__UNUSED static void idist__os_socket_end_stream(int fd);

// Ends both directions. Data that have arrived can still be read; the end of the stream follows
// them.
IDIST__UNUSED static void idist__os_socket_end(int fd);

// Returns true if the peer has closed the connection and all its data have been read, or if the
// connection has failed.
IDIST__UNUSED static bool idist__os_socket_at_end(int fd);

// Gets the address of the interface through which datagrams to an IPv4 address leave this host.
static bool idist__os_socket_route(const idist__os_address *to, idist__os_address *own);

// Returns a datagram socket that sends to an IPv4 multicast group through the interface of `own`,
// or -1. If `member` is set, the socket also receives what is sent to the group.
static int idist__os_socket_multicast(const idist__os_address *group, const idist__os_address *own,
                                      bool member);

// Sends one datagram. A datagram may be lost without notice, so there is no result.
static void idist__os_socket_send_datagram(int fd, const void *data, size_t nbytes,
                                           const idist__os_address *to);

// Receives the next datagram, at most `capacity` bytes of it. Returns the full size of the
// datagram, or -1 if none is pending.
static ptrdiff_t idist__os_socket_receive_datagram(int fd, void *buf, size_t capacity,
                                                   idist__os_address *from);

// Returns the user of this process as a number, which becomes part of the names of local sockets.
// Only processes of the same user share local sockets.
static unsigned long idist__os_socket_user(void);

// Gets the name of this host. Returns false if the host has no name that fits.
static bool idist__os_socket_host_name(char *buf, size_t capacity);

// Writes a text that all processes of one machine have in common, even across containers. The text
// is the boot id, or the host name if the boot id is unknown.
static void idist__os_socket_machine(char *text, size_t capacity);

// Writes a text that is equal in two processes if and only if local sockets can connect them. The
// text names the machine, the network namespace and the user.
IDIST__UNUSED static void idist__os_socket_reach(char *text, size_t capacity);
