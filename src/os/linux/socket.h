// os/linux/socket.h: stream sockets, multicast datagrams, addresses and name lookup
#pragma once

#include "os/socket.h"
#include "os/unwind.h"
#include "os/poll.h"

static bool idist__os_socket_local_address(idist__os_address *address, const char *name) {
    struct sockaddr_un *local = (struct sockaddr_un *)&address->sa;
    size_t nbytes = strlen(name);

    memset(address, 0, sizeof *address);
    if (!nbytes || nbytes > IDIST__OS_SOCKET_NAME_MAX) return false;
    local->sun_family = AF_UNIX;
    memcpy(local->sun_path + 1, name, nbytes); // a leading zero byte: abstract namespace
    address->nbytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + nbytes);

    return true;
}

static const char *idist__os_socket_resolve(idist__os_address *address, const char *host, int port,
                                            int which, int *count) {
    struct addrinfo hints, *list = NULL, *at;
    char service[16];
    int error;

    memset(address, 0, sizeof *address);
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    snprintf(service, sizeof service, "%d", port);
    error = IDIST__OS_CALL(getaddrinfo(host, service, &hints, &list));
    if (error != 0 || !list) return gai_strerror(error);

    *count = 0;
    for (at = list; at; at = at->ai_next) ++*count;
    which %= *count;
    for (at = list; which > 0; which--) at = at->ai_next;

    memcpy(&address->sa, at->ai_addr, at->ai_addrlen);
    address->nbytes = at->ai_addrlen;
    freeaddrinfo(list);

    return NULL;
}

static bool idist__os_socket_is_local(const idist__os_address *address) {
    return address->sa.ss_family == AF_UNIX;
}

static bool idist__os_socket_is_ipv4(const idist__os_address *address) {
    // NOLINTNEXTLINE(clang-analyzer-core.UndefinedBinaryOperatorResult)
    return address->sa.ss_family == AF_INET;
}

static bool idist__os_socket_is_loopback(const idist__os_address *address) {
    if (idist__os_socket_is_local(address)) return true;

    if (idist__os_socket_is_ipv4(address)) {
        const struct sockaddr_in *v4 = (const struct sockaddr_in *)&address->sa;
        return (ntohl(v4->sin_addr.s_addr) >> 24) == 127;
    }

    return IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)&address->sa)->sin6_addr) != 0;
}

static bool idist__os_socket_is_link_local(const idist__os_address *address) {
    if (idist__os_socket_is_ipv4(address)) {
        const struct sockaddr_in *v4 = (const struct sockaddr_in *)&address->sa;
        return (ntohl(v4->sin_addr.s_addr) >> 16) == 0xA9FE;
    }

    return IN6_IS_ADDR_LINKLOCAL(&((const struct sockaddr_in6 *)&address->sa)->sin6_addr) != 0;
}

static bool idist__os_socket_is_same_host(const idist__os_address *a, const idist__os_address *b) {
    if (a->sa.ss_family != b->sa.ss_family) return false;

    if (idist__os_socket_is_ipv4(a))
        return ((const struct sockaddr_in *)&a->sa)->sin_addr.s_addr ==
               ((const struct sockaddr_in *)&b->sa)->sin_addr.s_addr;

    return memcmp(&((const struct sockaddr_in6 *)&a->sa)->sin6_addr,
                  &((const struct sockaddr_in6 *)&b->sa)->sin6_addr, sizeof(struct in6_addr)) == 0;
}

static void idist__os_socket_host_text(const idist__os_address *address, char *buf,
                                       size_t capacity) {
    const void *ip = idist__os_socket_is_ipv4(address)
                         ? (const void *)&((const struct sockaddr_in *)&address->sa)->sin_addr
                         : (const void *)&((const struct sockaddr_in6 *)&address->sa)->sin6_addr;
    if (!inet_ntop(address->sa.ss_family, ip, buf, (socklen_t)capacity))
        snprintf(buf, capacity, "?");
}

static int idist__os_socket_port(const idist__os_address *address) {
    if (address->sa.ss_family == AF_INET)
        return ntohs(((const struct sockaddr_in *)&address->sa)->sin_port);
    if (address->sa.ss_family == AF_INET6)
        return ntohs(((const struct sockaddr_in6 *)&address->sa)->sin6_port);
    return 0;
}

static bool idist__os_socket_own_address(int fd, idist__os_address *address) {
    memset(address, 0, sizeof *address);
    address->nbytes = sizeof address->sa;
    return getsockname(fd, (struct sockaddr *)&address->sa, &address->nbytes) == 0;
}

static bool idist__os_socket_peer_address(int fd, idist__os_address *address) {
    memset(address, 0, sizeof *address);
    address->nbytes = sizeof address->sa;
    return getpeername(fd, (struct sockaddr *)&address->sa, &address->nbytes) == 0;
}

// Gets the name of a TCP socket's congestion control. Returns false if the name is unknown.
static bool idist__os_socket_congestion(int fd, char name[16]) {
    socklen_t nbytes = 15;

    memset(name, 0, 16);
    return getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &nbytes) == 0;
}

static bool idist__os_socket_out_of_fds(int error) { return error == EMFILE || error == ENFILE; }

// Opens a stream socket without Nagle's delay. Returns -1 on failure.
//
// BBR paces its sends by a timer, which costs more than half of the bandwidth inside a machine
// room. So another congestion control replaces BBR. If the peer is far away,
// idist__os_socket_measured restores BBR.
static int idist__os_socket_open(int family) {
    int one = 1, fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    char name[16];

    if (fd < 0 || family == AF_UNIX) return fd;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);

    if (idist__os_socket_congestion(fd, name) && strncmp(name, "bbr", 3) == 0 &&
        setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "cubic", 5) != 0)
        setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4); // every system has it

    return fd;
}

static int idist__os_socket_local_error(void) {
    int error = 0, fd = idist__os_socket_open(AF_UNIX);

    if (fd < 0 && !idist__os_socket_out_of_fds(errno)) error = errno;
    idist__os_descriptor_close(&fd);

    return error;
}

IDIST__UNUSED static uint32_t idist__os_socket_round_trip_us(int fd) {
    // Offset in struct tcp_info. The C library may declare only the beginning of the struct.
    enum { MIN_RTT_AT = 148 };
    unsigned char info[256];
    socklen_t nbytes = sizeof info;
    uint32_t min_rtt_us = 0;

    memset(info, 0, sizeof info);
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, &nbytes) != 0) return 0;
    if (nbytes >= MIN_RTT_AT + sizeof min_rtt_us)
        memcpy(&min_rtt_us, info + MIN_RTT_AT, sizeof min_rtt_us);

    return min_rtt_us != UINT32_MAX ? min_rtt_us : 0; // UINT32_MAX: not measured
}

// Returns the third number in a file of kernel settings, which is the maximum size of a buffer, or
// 0 if it is unknown.
static uint64_t idist__os_socket_setting(const char *path) {
    char text[64], *at = text;
    uint64_t number = 0;
    ssize_t n;
    int i, fd = IDIST__OS_CALL(open(path, O_RDONLY | O_CLOEXEC));

    if (fd < 0) return 0;
    n = IDIST__OS_CALL(read(fd, text, sizeof text - 1));
    IDIST__OS_CALL(close(fd));
    if (n <= 0) return 0;
    text[n] = 0;
    for (i = 0; i < 3; i++) number = strtoull(at, &at, 10);

    return number;
}

IDIST__UNUSED static uint64_t idist__os_socket_window_nbytes(void) {
    uint64_t send = idist__os_socket_setting("/proc/sys/net/ipv4/tcp_wmem");
    uint64_t receive = idist__os_socket_setting("/proc/sys/net/ipv4/tcp_rmem");

    return (send < receive ? send : receive) / 2;
}

IDIST__UNUSED static uint32_t idist__os_socket_interface_mbits(const char *name) {
    char path[96], text[16];
    long long mbits = 0;
    ssize_t n;
    int fd;

    snprintf(path, sizeof path, "/sys/class/net/%s/speed", name);
    fd = IDIST__OS_CALL(open(path, O_RDONLY | O_CLOEXEC));
    if (fd < 0) return 0;
    n = IDIST__OS_CALL(read(fd, text, sizeof text - 1));
    IDIST__OS_CALL(close(fd));

    if (n > 0) {
        text[n] = 0;
        mbits = strtoll(text, NULL, 10);
    }

    return mbits > 0 && mbits < UINT32_MAX ? (uint32_t)mbits : 0;
}

IDIST__UNUSED static void idist__os_socket_measured(int fd) {
    enum { NEAR_US = 2000 };
    char name[16];
    int fresh;

    if (idist__os_socket_round_trip_us(fd) < NEAR_US) return;

    fresh = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0); // has the system's congestion control
    if (fresh < 0) return;
    if (idist__os_socket_congestion(fresh, name))
        setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, (socklen_t)strlen(name));
    IDIST__OS_CALL(close(fresh));
}

static int idist__os_socket_listen(const idist__os_address *address) {
    int one = 1, zero = 0, error, fd = idist__os_socket_open(address->sa.ss_family);

    if (fd < 0) return -1;
    if (!idist__os_socket_is_local(address))
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (address->sa.ss_family == AF_INET6) // the wildcard accepts IPv4 as well
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &zero, sizeof zero);
    if (bind(fd, (const struct sockaddr *)&address->sa, address->nbytes) == 0 &&
        listen(fd, 4096) == 0)
        return fd;

    error = errno;
    idist__os_descriptor_close(&fd);
    errno = error;

    return -1;
}

static int idist__os_socket_listen_everywhere(int port) {
    idist__os_address any;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&any.sa;
    struct sockaddr_in *v4 = (struct sockaddr_in *)&any.sa;
    int fd;

    memset(&any, 0, sizeof any);
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons((uint16_t)port);
    any.nbytes = sizeof *v6;
    fd = idist__os_socket_listen(&any);
    if (fd >= 0 || errno == EADDRINUSE) return fd;

    memset(&any, 0, sizeof any); // the system has no IPv6
    v4->sin_family = AF_INET;
    v4->sin_port = htons((uint16_t)port);
    any.nbytes = sizeof *v4;

    return idist__os_socket_listen(&any);
}

static int idist__os_socket_interfaces(idist__os_interface *list, int capacity) {
    struct ifaddrs *all = NULL;
    const struct ifaddrs *at;
    int count = 0;

    if (IDIST__OS_CALL(getifaddrs(&all)) != 0) return -1;

    for (at = all; at && count < capacity; at = at->ifa_next) {
        idist__os_interface *to = &list[count];
        int family = at->ifa_addr ? at->ifa_addr->sa_family : AF_UNSPEC;

        if (!(at->ifa_flags & IFF_UP) || (family != AF_INET && family != AF_INET6)) continue;
        memset(to, 0, sizeof *to);
        snprintf(to->name, sizeof to->name, "%s", at->ifa_name);
        to->address.nbytes =
            family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
        memcpy(&to->address.sa, at->ifa_addr, to->address.nbytes);
        count++;
    }

    freeifaddrs(all);

    return count;
}

// Returns true if the process at the other end of a local socket belongs to our user. Abstract
// sockets have no permissions, so this check replaces them.
static bool idist__os_socket_is_same_user(int fd) {
    struct {
        pid_t pid;
        uid_t uid;
        gid_t gid;
    } peer;
    socklen_t nbytes = sizeof peer;

    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &nbytes) == 0 && peer.uid == geteuid();
}

static int idist__os_socket_accept(int listener) {
    struct sockaddr_storage peer;
    socklen_t nbytes = sizeof peer;
    int one = 1, fd = IDIST__OS_CALL(accept(listener, (struct sockaddr *)&peer, &nbytes));

    if (fd < 0) return -1;
    IDIST__OS_CALL(fcntl(fd, F_SETFD, FD_CLOEXEC));
    IDIST__OS_CALL(fcntl(fd, F_SETFL, O_NONBLOCK));
    if (peer.ss_family != AF_UNIX) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (peer.ss_family != AF_UNIX || idist__os_socket_is_same_user(fd)) return fd;

    IDIST__OS_CALL(close(fd));
    errno = EAGAIN;

    return -1;
}

static int idist__os_socket_connect_begin(const idist__os_address *address) {
    int error, fd = idist__os_socket_open(address->sa.ss_family);

    if (fd < 0) return -1;
    if (IDIST__OS_CALL(connect(fd, (const struct sockaddr *)&address->sa, address->nbytes)) == 0)
        return fd;
    if (errno == EINPROGRESS || errno == EINTR) return fd;

    error = errno;
    IDIST__OS_CALL(close(fd));
    errno = error;

    return -1;
}

static int idist__os_socket_connect_end(int *fd, bool local) {
    int error = 0;
    socklen_t nbytes = sizeof error;

    if (getsockopt(*fd, SOL_SOCKET, SO_ERROR, &error, &nbytes) != 0) error = errno;
    if (!error && local && !idist__os_socket_is_same_user(*fd)) error = EPERM;
    if (error) idist__os_descriptor_close(fd);

    return error;
}

static int idist__os_socket_connect(const idist__os_address *address, int64_t deadline_ns) {
    int error, fd = idist__os_socket_connect_begin(address);

    if (fd < 0) return -1;

    if (idist__os_poll_wait(fd, IDIST__OS_WRITABLE, deadline_ns)) {
        error = idist__os_socket_connect_end(&fd, idist__os_socket_is_local(address));
    } else {
        error = ETIMEDOUT;
        idist__os_descriptor_close(&fd);
    }

    errno = error;

    return fd;
}

static bool idist__os_socket_is_unreachable(int error) {
    return error == ENETUNREACH || error == ENETDOWN || error == EHOSTUNREACH ||
           error == EHOSTDOWN || error == EADDRNOTAVAIL || error == EAFNOSUPPORT;
}

static ptrdiff_t idist__os_socket_read(int fd, void *buf, size_t nbytes) {
    for (;;) {
        ssize_t n = IDIST__OS_CALL(recv(fd, buf, nbytes, 0));

        if (n > 0) return n;

        if (n == 0) {
            errno = 0;
            return -1;
        }

        if (errno == EINTR) continue;
        return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : -1;
    }
}

typedef char idist__os_part_is_iovec[sizeof(idist__os_part) == sizeof(struct iovec) &&
                                             offsetof(idist__os_part, nbytes) ==
                                                 offsetof(struct iovec, iov_len)
                                         ? 1
                                         : -1];

static ptrdiff_t idist__os_socket_write(int fd, const idist__os_part *parts, int nparts) {
    struct msghdr message;

    memset(&message, 0, sizeof message);
    message.msg_iov = (struct iovec *)(uintptr_t)parts;
    message.msg_iovlen = (size_t)nparts;

    for (;;) {
        ssize_t n = IDIST__OS_CALL(sendmsg(fd, &message, MSG_NOSIGNAL));

        if (n >= 0) return n;
        if (errno == EINTR) continue;
        return errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS ? 0 : -1;
    }
}

IDIST__UNUSED static void idist__os_socket_end_stream(int fd) { shutdown(fd, SHUT_WR); }

IDIST__UNUSED static void idist__os_socket_end(int fd) { shutdown(fd, SHUT_RDWR); }

IDIST__UNUSED static bool idist__os_socket_at_end(int fd) {
    char byte;
    ssize_t n;

    do n = IDIST__OS_CALL(recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT));
    while (n < 0 && errno == EINTR);
    return n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK);
}

static bool idist__os_socket_route(const idist__os_address *to, idist__os_address *own) {
    int error, fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    bool found;

    if (fd < 0) return false;
    // Connecting a datagram socket sends nothing.
    found = IDIST__OS_CALL(connect(fd, (const struct sockaddr *)&to->sa, to->nbytes)) == 0 &&
            idist__os_socket_own_address(fd, own);
    error = errno;
    IDIST__OS_CALL(close(fd));
    errno = error;

    return found;
}

static int idist__os_socket_multicast(const idist__os_address *group, const idist__os_address *own,
                                      bool member) {
    int one = 1, error, fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    struct ip_mreq membership;
    bool ready;

    if (fd < 0) return -1;
    memset(&membership, 0, sizeof membership);
    membership.imr_multiaddr = ((const struct sockaddr_in *)&group->sa)->sin_addr;
    membership.imr_interface = ((const struct sockaddr_in *)&own->sa)->sin_addr;

    ready = setsockopt(fd, IPPROTO_IP, IP_MULTICAST_IF, &membership.imr_interface,
                       sizeof membership.imr_interface) == 0;
    if (ready && member)
        ready = setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0 &&
                bind(fd, (const struct sockaddr *)&group->sa, group->nbytes) == 0 &&
                setsockopt(fd, IPPROTO_IP, IP_ADD_MEMBERSHIP, &membership, sizeof membership) == 0;
    if (ready) return fd;

    error = errno;
    IDIST__OS_CALL(close(fd));
    errno = error;

    return -1;
}

static void idist__os_socket_send_datagram(int fd, const void *data, size_t nbytes,
                                           const idist__os_address *to) {
    IDIST__OS_CALL(
        sendto(fd, data, nbytes, MSG_NOSIGNAL, (const struct sockaddr *)&to->sa, to->nbytes));
}

static ptrdiff_t idist__os_socket_receive_datagram(int fd, void *buf, size_t capacity,
                                                   idist__os_address *from) {
    from->nbytes = sizeof from->sa;
    return IDIST__OS_CALL(
        recvfrom(fd, buf, capacity, MSG_TRUNC, (struct sockaddr *)&from->sa, &from->nbytes));
}

static unsigned long idist__os_socket_user(void) { return (unsigned long)geteuid(); }

static bool idist__os_socket_host_name(char *buf, size_t capacity) {
    memset(buf, 0, capacity);
    return gethostname(buf, capacity - 1) == 0;
}

static void idist__os_socket_machine(char *text, size_t capacity) {
    ssize_t n;
    int fd = IDIST__OS_CALL(open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));

    memset(text, 0, capacity);

    if (fd >= 0) {
        do n = IDIST__OS_CALL(read(fd, text, capacity - 1));
        while (n < 0 && errno == EINTR);
        IDIST__OS_CALL(close(fd));
    }

    if (!text[0] && !idist__os_socket_host_name(text, capacity)) text[0] = '?';
}

IDIST__UNUSED static void idist__os_socket_reach(char *text, size_t capacity) {
    struct stat name_space;
    char boot[65];

    idist__os_socket_machine(boot, sizeof boot);
    if (stat("/proc/self/ns/net", &name_space) == 0)
        snprintf(text, capacity, "%s/%llu/%lu", boot, (unsigned long long)name_space.st_ino,
                 idist__os_socket_user());
    else snprintf(text, capacity, "%s/%lu", boot, idist__os_socket_user());
}
