// os/socket.h: stream sockets, multicast datagrams, addresses and name lookup
//
// Every socket is non-blocking and closed on exec; a descriptor belongs to the caller. A function
// blocks only where it takes a deadline, except for the name lookup. Failures leave the reason in
// errno. Elsewhere: on macOS a local name becomes a path in a private folder, on Windows too; there
// a SOCKET is cast to int, as its values allow.
#pragma once

#include "os/system.h"

// False: the name is empty or longer than IDIST__OS_SOCKET_NAME_MAX bytes.
static bool idist__os_socket_local_address(idist__os_address *address, const char *name);

// One of the TCP addresses of a host, which is a name or the text of an IP address: *count gets how
// many it has, and `which`, counted modulo that, chooses. May block for as long as the resolver
// takes. Returns NULL, or why the lookup failed (a static text).
static const char *idist__os_socket_resolve(idist__os_address *address, const char *host, int port,
                                            int which, int *count);

// Whether the address is that of a local socket.
static bool idist__os_socket_is_local(const idist__os_address *address);

// Whether it is an IPv4 address.
static bool idist__os_socket_is_ipv4(const idist__os_address *address);

// Whether only this host can reach the address.
static bool idist__os_socket_is_loopback(const idist__os_address *address);

// Whether it is an IP address that is valid on one link only: 169.254.0.0/16 or fe80::/10.
static bool idist__os_socket_is_link_local(const idist__os_address *address);

// Whether two IP addresses are equal, whatever their ports.
static bool idist__os_socket_is_same_host(const idist__os_address *a, const idist__os_address *b);

// The text of an IP address, without the port.
static void idist__os_socket_host_text(const idist__os_address *address, char *buf,
                                       size_t capacity);

// The port of a TCP address; 0: it has none.
static int idist__os_socket_port(const idist__os_address *address);

// The address to which a socket is bound.
static bool idist__os_socket_own_address(int fd, idist__os_address *address);

// The address of the other end of a connection.
static bool idist__os_socket_peer_address(int fd, idist__os_address *address);

static bool idist__os_socket_out_of_fds(int error);

// Why the system refuses local sockets to this process: an errno; 0: it does not refuse them.
static int idist__os_socket_local_error(void);

// The shortest round trip through a TCP socket so far, in us; 0: not known.
IDIST__UNUSED static uint32_t idist__os_socket_round_trip_us(int fd);

// How many bytes can be under way in one TCP socket, as far as the system's limits on buffers go,
// of which about half holds data; 0: not known.
IDIST__UNUSED static uint64_t idist__os_socket_window_nbytes(void);

// The bandwidth of a network interface in Mbit/s, as its driver gives it; 0: not known.
IDIST__UNUSED static uint32_t idist__os_socket_interface_mbits(const char *name);

// Called when some bytes have gone back and forth through a TCP socket: if the peer is far away,
// the congestion control of the system returns, as BBR is what helps against losses there.
IDIST__UNUSED static void idist__os_socket_measured(int fd);

// A socket that listens at an address, or -1; errno EADDRINUSE: another socket does.
static int idist__os_socket_listen(const idist__os_address *address);

// A socket that listens at a port of all addresses of this host, IPv4 and IPv6, or -1 as above.
// Port 0: a free one.
static int idist__os_socket_listen_everywhere(int port);

// An IP address of a network interface that is up.
typedef struct idist__os_interface {
    char name[32];
    idist__os_address address;
} idist__os_interface;

// The addresses of this host, in the order of the system, at most `capacity`. Returns how many are
// in `list`, or -1: they cannot be listed, errno says why.
static int idist__os_socket_interfaces(idist__os_interface *list, int capacity);

// The next connection, or -1; errno EAGAIN: none is pending. A local connection of another user is
// closed at once and reported as EAGAIN.
static int idist__os_socket_accept(int listener);

// Begins to connect. The socket is writable once the attempt has ended; see below. -1: errno says
// why.
static int idist__os_socket_connect_begin(const idist__os_address *address);

// The attempt has ended: 0, or why it failed; then the socket is closed. EPERM: another user
// listens at the local address.
static int idist__os_socket_connect_end(int *fd, bool local);

// One attempt to connect; blocks until the deadline at the latest. -1: errno says why, and the
// caller decides whether to try again. ETIMEDOUT: the deadline has passed.
static int idist__os_socket_connect(const idist__os_address *address, int64_t deadline_ns);

// Whether an error of connect means that the network is down, or that this host has no address of
// that kind (IPv4, IPv6), rather than that the peer is gone.
static bool idist__os_socket_is_unreachable(int error);

// Whether an error means that this process or the system has no descriptor left.
// Reads what has arrived. > 0: bytes; 0: it would block; -1: the end of the stream (errno 0) or an
// error.
static ptrdiff_t idist__os_socket_read(int fd, void *buf, size_t nbytes);

// A piece of memory that is sent from. Laid out as struct iovec, so that a send copies no list.
typedef struct idist__os_part {
    const void *data;
    size_t nbytes;
} idist__os_part;

// Writes as much of several pieces as the socket takes now. > 0: bytes; 0: it would block; -1: an
// error. Never raises SIGPIPE.
static ptrdiff_t idist__os_socket_write(int fd, const idist__os_part *parts, int nparts);

// Tells the peer that nothing more will be sent: it reads the end of the stream after what was sent
// before. This side may still read. Does not block.
IDIST__UNUSED static void idist__os_socket_end_stream(int fd);

// Ends both directions: what has arrived can still be read, and then the end.
IDIST__UNUSED static void idist__os_socket_end(int fd);

// Whether the peer has closed the connection and everything it sent has been read.
IDIST__UNUSED static bool idist__os_socket_at_end(int fd);

// The address of the interface through which datagrams to an IPv4 address leave this host.
static bool idist__os_socket_route(const idist__os_address *to, idist__os_address *own);

// A datagram socket that sends to an IPv4 multicast group through the interface of `own`, and as a
// member receives what is sent to the group. -1 on failure.
static int idist__os_socket_multicast(const idist__os_address *group, const idist__os_address *own,
                                      bool member);

// Sends one datagram. It may be lost without notice, so there is no result.
static void idist__os_socket_send_datagram(int fd, const void *data, size_t nbytes,
                                           const idist__os_address *to);

// Takes the next datagram: returns its whole size, of which at most `capacity` bytes are in buf, or
// -1 when none is pending.
static ptrdiff_t idist__os_socket_receive_datagram(int fd, void *buf, size_t capacity,
                                                   idist__os_address *from);

// The user whose processes may share local sockets, as a number for their names.
static unsigned long idist__os_socket_user(void);

// The name of this host; false when it has none that fits.
static bool idist__os_socket_host_name(char *buf, size_t capacity);

// A text that the processes of one machine have in common, whatever containers they are in: that of
// the boot, or else the host name.
static void idist__os_socket_machine(char *text, size_t capacity);

// A text that exactly those processes have in common which can connect through local sockets: the
// machine, the network namespace and the user.
IDIST__UNUSED static void idist__os_socket_reach(char *text, size_t capacity);
