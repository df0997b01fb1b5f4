/* idist_net.h - v0.2.0 - connections and the handshake on each - MIT licence

    Part of the implementation of idist; idist.h includes it where IDIST_IMPLEMENTATION is defined.

    Two programs that want to exchange bytes meet here: addresses as text, sockets with deadlines
    and error texts, and the mutual handshake that every connection begins with. The store's server
    (idist_store.h) and the links between ranks (idist_connect.h) both accept strangers, so both use
    the bounded set of pending connections at the end of this file.

CONTENTS

      [net:parse]       numbers and host:port in texts
      [net:address]     addresses as texts
      [net:interface]   the address at which other hosts reach this one
      [net:connection]  listening, and whole transfers with a deadline
      [net:auth]        a mutual handshake on every connection
      [net:secret]      the secret that the ranks of a job share
      [net:pending]     connections whose handshake is under way
*/
#ifndef IDIST_NET_H
#define IDIST_NET_H

//------------------------------------------------------------------------------
// [net:parse]  numbers and host:port in texts
// uses -
//------------------------------------------------------------------------------

// The whole text must be a decimal number within the limits; otherwise *value stays as it is.
static bool idist__parse_int(const char *text, int64_t lowest, int64_t highest, int64_t *value) {
    char *end = NULL;
    long long number;

    if (!text || !(text[0] == '-' || (text[0] >= '0' && text[0] <= '9'))) return false;
    errno = 0;
    number = strtoll(text, &end, 10);
    if (errno || !end || *end || number < lowest || number > highest) return false;
    *value = number;

    return true;
}

// "host:port", or "[v6]:port", from which the brackets are taken.
static bool idist__parse_host_port(const char *text, char *host, size_t capacity, int *port) {
    const char *colon = strrchr(text, ':');
    size_t nbytes = colon ? (size_t)(colon - text) : 0;
    int64_t value;

    if (!colon || !idist__parse_int(colon + 1, 0, 65535, &value)) return false;

    if (nbytes >= 2 && text[0] == '[' && text[nbytes - 1] == ']') {
        text++;
        nbytes -= 2;
    }

    if (!nbytes || nbytes >= capacity) return false;
    memcpy(host, text, nbytes);
    host[nbytes] = 0;
    *port = (int)value;

    return true;
}

//------------------------------------------------------------------------------
// [net:address]  addresses as texts
// uses socket fail parse
//
// Ranks exchange addresses as texts: "unix:NAME" is a local socket, "tcp:HOST:PORT" a TCP port,
// with brackets around an IPv6 HOST.
//------------------------------------------------------------------------------

// Whether a host as the user writes it is this host's loopback interface.
static bool idist__address_host_is_loopback(const char *host) {
    return strcmp(host, "localhost") == 0 || strncmp(host, "127.", 4) == 0 ||
           strcmp(host, "::1") == 0;
}

// Whether a text can be a name or an address at all, rather than one with a port or in brackets, or
// a URL.
static bool idist__address_host_is_possible(const char *host) {
    const char *colon = strchr(host, ':'); // two or more: IPv6, perhaps with %SCOPE
    char end = host[strspn(host, "0123456789abcdefABCDEF:.")];

    if (colon) return strchr(colon + 1, ':') && (!end || end == '%');
    return !strpbrk(host, "/[]@ ");
}

static idist_status idist__address_local(idist__os_address *address, const char *name) {
    if (idist__os_socket_local_address(address, name)) return IDIST_OK;
    return idist__fail(IDIST_ERR_ARG, "the socket name \"%s\" is empty or longer than %d bytes",
                       name, IDIST__OS_SOCKET_NAME_MAX);
}

// One of the addresses of a host, see idist__os_socket_resolve. Blocks while the name is looked up.
// The resolver takes a name of digits only, as jobs and nodes may have it, for an address in
// 0.0.0.0/8.
static idist_status idist__address_one_of(idist__os_address *address, const char *host, int port,
                                          int which, int *count) {
    const char *error;

    memset(address, 0, sizeof *address);
    if (host[strspn(host, "0123456789")] == 0)
        return idist__fail(IDIST_ERR_ARG,
                           "the host name \"%s\" would be taken for a number: use the address, or "
                           "the name with its domain",
                           host);

    error = idist__os_socket_resolve(address, host, port, which, count);
    if (!error) return IDIST_OK;

    return idist__fail(IDIST_ERR_SYSTEM, "the host name \"%s\" cannot be resolved: %s", host,
                       error);
}

// The first of them.
static idist_status idist__address_tcp(idist__os_address *address, const char *host, int port) {
    int count;
    return idist__address_one_of(address, host, port, 0, &count);
}

// Address number `which`, modulo *count, of those that the text stands for. IDIST_ERR_ARG: it is no
// address; other failures may pass.
static idist_status idist__address_parse_one_of(idist__os_address *address, const char *text,
                                                int which, int *count) {
    char host[256];
    int port;

    *count = 1;
    memset(address, 0, sizeof *address);
    if (strncmp(text, "unix:", 5) == 0) return idist__address_local(address, text + 5);
    if (strncmp(text, "tcp:", 4) == 0 && idist__parse_host_port(text + 4, host, sizeof host, &port))
        return idist__address_one_of(address, host, port, which, count);
    return idist__fail(IDIST_ERR_ARG, "\"%s\" is not an address", text);
}

// The first of them.
static idist_status idist__address_parse(idist__os_address *address, const char *text) {
    int count;
    return idist__address_parse_one_of(address, text, 0, &count);
}

//------------------------------------------------------------------------------
// [net:interface]  the address at which other hosts reach this one
// uses os:env socket fail text address
//
// In this order:
//
//   IDIST_ADDR            as it is; a name or the address of a router are possible, too. This host
//                         may not know the name, or know it as a loopback address, which is how
//                         installers write it into /etc/hosts
//   IDIST_SOCKET_IFNAME   the first address of an interface that it admits
//   the hint              an address of this host that another host is known to use, or this host
//                         itself to reach another one
//   otherwise             the first address of an interface; those of containers only if there is
//                         no other
//
// Addresses of the hint's family come first. Loopback and link-local addresses are of no use to
// other hosts: only IDIST_ADDR can name one.
//------------------------------------------------------------------------------

enum { IDIST__INTERFACES = 64 };

typedef struct idist__own_address {
    char ip[112];    // or the name that IDIST_ADDR gives
    char ifname[32]; // "": not known
} idist__own_address;

// Appends the interfaces that are up, with their addresses; where they do not all fit, "..." stands
// for the rest. Returns their number, or -1: they cannot be listed.
static int idist__interface_list(char *text, size_t capacity) {
    idist__os_interface all[IDIST__INTERFACES];
    int i, count = idist__os_socket_interfaces(all, IDIST__INTERFACES);
    char ip[64], entry[sizeof all[0].name + sizeof ip + 4];

    for (i = 0; i < count; i++) {
        const char *separator = i + 1 < count ? ", " : "";
        size_t reserved_nbytes = i + 1 < count ? sizeof "..." : 1;

        idist__os_socket_host_text(&all[i].address, ip, sizeof ip);
        entry[0] = 0; // not snprintf: gcc -O3 takes a name for one that may be cut off
        idist__text_append(entry, sizeof entry, "%s %s%s", all[i].name, ip, separator);

        if (strlen(text) + strlen(entry) + reserved_nbytes > capacity) {
            idist__text_append(text, capacity, "...");
            break;
        }

        idist__text_append(text, capacity, "%s", entry);
    }

    return count;
}

// A variable that says which interfaces are meant.
typedef struct idist__interface_filter {
    const char *variable, *list; // NULL: none is set
    bool exact;                  // the list has whole names, without prefixes
} idist__interface_filter;

static idist__interface_filter idist__interface_filter_of_user(void) {
    static const char *const variables[] = {"IDIST_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME",
                                            "GLOO_SOCKET_IFNAME"};
    idist__interface_filter filter = {NULL, NULL, false};
    int i;

    for (i = 0; i < 3 && !filter.list; i++) {
        filter.variable = variables[i];
        filter.list = idist__os_env(variables[i]);
        filter.exact = i == 2;
    }

    return filter;
}

// The address by which this host reaches its own server, which listens at all addresses: the one
// that the others use, so that the connection shows it; loopback where that is no address of this
// host, or is valid on one link only.
static void idist__interface_reach_self(const char *address_text, char *ip, size_t capacity) {
    idist__os_interface all[IDIST__INTERFACES];
    int i, count = idist__os_socket_interfaces(all, IDIST__INTERFACES);
    idist__os_address address;

    idist__text_copy(ip, capacity, "127.0.0.1");
    if (idist__address_parse(&address, address_text) != IDIST_OK) return;
    for (i = 0; i < count; i++)
        if (!idist__os_socket_is_link_local(&address) &&
            idist__os_socket_is_same_host(&all[i].address, &address))
            idist__os_socket_host_text(&address, ip, capacity);
}

// Whether a list of interfaces in NCCL's grammar admits one: prefixes, parted by commas; "=" before
// the list: whole names; "^" before that: all but these.
static bool idist__interface_admits(const char *list, bool exact, const char *name) {
    bool excludes = *list == '^', found = false;

    if (excludes) list++;

    if (*list == '=') {
        exact = true;
        list++;
    }

    while (*list && !found) {
        size_t nbytes = strcspn(list, ",");
        found = nbytes && strncmp(list, name, nbytes) == 0 && (!exact || !name[nbytes]);
        list += nbytes;
        if (*list) list++;
    }

    return found != excludes;
}

static bool idist__interface_serves(const idist__os_interface *at) {
    return !idist__os_socket_is_loopback(&at->address) &&
           !idist__os_socket_is_link_local(&at->address);
}

// The first interface that a list admits, of the family of `like` if there is one. NULL: none.
static const idist__os_interface *idist__interface_first(const idist__os_interface *all, int count,
                                                         const char *list, bool exact,
                                                         const idist__os_address *like) {
    const idist__os_interface *first = NULL;
    int i;

    for (i = 0; i < count; i++) {
        if (!idist__interface_serves(&all[i])) continue;
        if (!idist__interface_admits(list, exact, all[i].name)) continue;
        if (!like || idist__os_socket_is_ipv4(&all[i].address) == idist__os_socket_is_ipv4(like))
            return &all[i];
        if (!first) first = &all[i];
    }

    return first;
}

// The interface that has the address of the hint, which may be NULL.
static const idist__os_interface *
idist__interface_of_hint(const idist__os_interface *all, int count, const idist__os_address *hint) {
    int i;

    for (i = 0; hint && i < count; i++)
        if (idist__interface_serves(&all[i]) &&
            idist__os_socket_is_same_host(&all[i].address, hint))
            return &all[i];

    return NULL;
}

static idist_status idist__interface_none(const idist__interface_filter *filter,
                                          const idist__os_interface *all, int count) {
    char text[400] = "", ip[64];
    int i;

    for (i = 0; i < count; i++) {
        idist__os_socket_host_text(&all[i].address, ip, sizeof ip);
        idist__text_append(text, sizeof text, "%s%s (%s)", i ? ", " : "", ip, all[i].name);
    }

    if (filter->list)
        return idist__fail(IDIST_ERR_ENV,
                           "initialize: %s=%s leaves no interface that other hosts can reach: this "
                           "host has %s",
                           filter->variable, filter->list, count ? text : "none");
    return idist__fail(IDIST_ERR_ENV,
                       "initialize: no address known at which other hosts reach this one: set "
                       "IDIST_ADDR; this host has %s",
                       count ? text : "none");
}

// An address of this host that other hosts can use. hint: see above; NULL: none.
static idist_status idist__interface_find(const idist__os_address *hint, idist__own_address *own) {
    idist__os_interface all[IDIST__INTERFACES];
    idist__interface_filter filter = idist__interface_filter_of_user();
    const idist__os_interface *chosen = NULL;
    int count;

    memset(own, 0, sizeof *own);

    count = idist__os_socket_interfaces(all, IDIST__INTERFACES);
    if (count < 0) return idist__fail_errno("initialize: listing the network interfaces", errno);

    if (filter.list) {
        chosen = idist__interface_first(all, count, filter.list, filter.exact, hint);
    } else {
        chosen = idist__interface_of_hint(all, count, hint);
        if (!chosen) chosen = idist__interface_first(all, count, "^docker,virbr", false, hint);
        if (!chosen) chosen = idist__interface_first(all, count, "^", false, hint);
    }

    if (!chosen) return idist__interface_none(&filter, all, count);
    idist__os_socket_host_text(&chosen->address, own->ip, sizeof own->ip);
    idist__text_copy(own->ifname, sizeof own->ifname, chosen->name);

    return IDIST_OK;
}

// The address to tell the other hosts. hint: see above; NULL: none.
static idist_status idist__interface_choose(const idist__os_address *hint,
                                            idist__own_address *own) {
    const char *user = idist__os_env("IDIST_ADDR");

    if (!user) return idist__interface_find(hint, own);
    memset(own, 0, sizeof *own);
    if (strlen(user) >= sizeof own->ip)
        return idist__fail(IDIST_ERR_ENV, "initialize: IDIST_ADDR has more than %d characters",
                           (int)sizeof own->ip - 1);
    if (strcmp(user, "0.0.0.0") == 0 || strcmp(user, "::") == 0)
        return idist__fail(
            IDIST_ERR_ENV,
            "initialize: IDIST_ADDR is \"%s\", which is not the address of one host: "
            "give the one at which others reach this host, or none",
            user);
    if (!idist__address_host_is_possible(user))
        return idist__fail(IDIST_ERR_ENV,
                           "initialize: IDIST_ADDR is \"%s\": give only the name or the address of "
                           "this host, without a port, brackets or \"://\"",
                           user);
    idist__text_copy(own->ip, sizeof own->ip, user);

    return IDIST_OK;
}

//------------------------------------------------------------------------------
// [net:connection]  listening, and whole transfers with a deadline
// uses poll socket fail address interface
//------------------------------------------------------------------------------

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

//------------------------------------------------------------------------------
// [net:auth]  a mutual handshake on every connection
// uses os:random poll socket fail sha
//
//     stage   client                                    server
//     0       hello C (64 bytes, with a nonce)  ------>
//     1                          <------  hello S (64 bytes, with a nonce) | HMAC(K, "S" | C | S)
//     2       HMAC(K, "C" | C | S)              ------>
//     3                                         <------ one byte: accepted
//
// A client that finds a wrong tag sends zeros as stage 2, so that the server learns why it leaves.
// K comes from the job's secret. The labels "C" and "S" keep an answer from being reflected to its
// sender, the nonces prevent replay, and the tags cover version, role, rank and job, so that none
// of these can be changed on the way. A stranger makes the server read 96 bytes and allocate
// nothing. Nothing is encrypted. The server answers a hello that does not match too, so that the
// client can report the difference. A client whose connection ends before the last byte was turned
// away for lack of room and tries again; see [net:pending]. Without a secret K is a constant, which
// only keeps out other programs and other versions.
//
// Neither side blocks: idist__auth_step goes as far as the socket allows.
//------------------------------------------------------------------------------

#define IDIST__WIRE_VERSION 11
#define IDIST__HELLO_BYTES 64

// Part of the wire format.
typedef struct idist__hello {
    char magic[4]; // "IDST"
    uint16_t version;
    uint16_t min_version;
    uint32_t byte_order; // 0x01020304 as this machine writes it
    uint32_t role;
    uint64_t job;
    uint32_t rank;
    uint32_t world_size;
    uint64_t server_id; // of the server of a store: a random number; otherwise 0
    uint8_t nonce[16];
    uint32_t socket; // of a link that has several: which one the client connects
    uint8_t secrecy; // IDIST__SECRECY_*, for error texts
    uint8_t zero[3];
} idist__hello;

// What the connection is for.
enum { IDIST__ROLE_STORE = 1, IDIST__ROLE_LINK = 2 };

// What a process was given to prove itself to others.
enum {
    IDIST__SECRECY_NONE,     // connections within this host only
    IDIST__SECRECY_INSECURE, // IDIST_INSECURE
    IDIST__SECRECY_SECRET
};

// Stages of both sides; each is one message.
enum {
    IDIST__AUTH_HELLO,
    IDIST__AUTH_ANSWER,
    IDIST__AUTH_PROOF,
    IDIST__AUTH_ACCEPTED,
    IDIST__AUTH_DONE
};
enum { IDIST__AUTH_TAG_NBYTES = 32 };

typedef struct idist__handshake {
    int fd; // -1: none
    bool server;
    int stage;   // IDIST__AUTH_*
    size_t done; // bytes of this stage
    bool broke;  // the connection ended or failed
    bool ready;  // poll has reported it, or it is new
    // A server with `asks` stops before it accepts, and sets `proven`. Its caller then closes the
    // connection, or sets asks to false and goes on.
    bool asks, proven;
    const uint8_t *key;
    idist__hello mine, theirs;
    uint8_t out[96], in[96];
    int64_t deadline_ns;
} idist__handshake;

// Begins a handshake on a connection; the caller goes on owning fd and key.
static void idist__auth_begin(idist__handshake *h, int fd, bool server, const uint8_t key[32],
                              uint32_t role, uint64_t job, int rank, int world_size,
                              int64_t deadline_ns) {
    memset(h, 0, sizeof *h);
    h->fd = fd;
    h->server = server;
    h->key = key;
    h->deadline_ns = deadline_ns;
    memcpy(h->mine.magic, "IDST", 4);
    h->mine.version = h->mine.min_version = IDIST__WIRE_VERSION;
    h->mine.byte_order = 0x01020304;
    h->mine.role = role;
    h->mine.job = job;
    h->mine.rank = (uint32_t)rank;
    h->mine.world_size = (uint32_t)world_size;
    idist__os_random(h->mine.nonce, sizeof h->mine.nonce);
    memcpy(h->out, &h->mine, IDIST__HELLO_BYTES);
}

// Tells the clients which server this is.
IDIST__UNUSED static void idist__auth_set_server_id(idist__handshake *h, uint64_t id) {
    h->mine.server_id = id;
    memcpy(h->out, &h->mine, IDIST__HELLO_BYTES);
}

// Says which socket of a link this is. The client calls it before the first step.
IDIST__UNUSED static void idist__auth_set_socket(idist__handshake *h, int socket) {
    h->mine.socket = (uint32_t)socket;
    memcpy(h->out, &h->mine, IDIST__HELLO_BYTES);
}

// Tells the other side whether we have a secret. To be called before the first step.
static void idist__auth_set_secrecy(idist__handshake *h, int secrecy) {
    h->mine.secrecy = (uint8_t)secrecy;
    memcpy(h->out, &h->mine, IDIST__HELLO_BYTES);
}

static bool idist__auth_has_magic(const idist__hello *hello) {
    return memcmp(hello->magic, "IDST", 4) == 0;
}

static void idist__auth_tag(const idist__handshake *h, const char *label,
                            uint8_t tag[IDIST__AUTH_TAG_NBYTES]) {
    const idist__hello *client = h->server ? &h->theirs : &h->mine;
    const idist__hello *server = h->server ? &h->mine : &h->theirs;
    idist__sha_hmac(h->key, label, client, IDIST__HELLO_BYTES, server, IDIST__HELLO_BYTES, tag);
}

// The tags differ.
static idist_status idist__auth_fail_tag(const idist__handshake *h) {
    bool mine = h->mine.secrecy == IDIST__SECRECY_SECRET;
    bool theirs = h->theirs.secrecy == IDIST__SECRECY_SECRET;

    if (theirs && !mine)
        return idist__fail(IDIST_ERR_AUTH,
                           "the peer has a secret and this process has none: set IDIST_SECRET or "
                           "IDIST_SECRET_FILE to the secret of the job");
    if (mine && !theirs)
        return idist__fail(IDIST_ERR_AUTH,
                           "this process has a secret and the peer has none: set IDIST_SECRET or "
                           "IDIST_SECRET_FILE there, too");

    return idist__fail(IDIST_ERR_AUTH,
                       "the peer does not know the secret of this job: IDIST_SECRET, "
                       "IDIST_SECRET_FILE or desc.secret differs, or it belongs to another job");
}

// Compares in constant time, so that timing reveals nothing about the tag.
static idist_status idist__auth_check_tag(const idist__handshake *h, const char *label,
                                          const uint8_t *theirs) {
    uint8_t expected[IDIST__AUTH_TAG_NBYTES], difference = 0;
    int i;

    idist__auth_tag(h, label, expected);
    for (i = 0; i < IDIST__AUTH_TAG_NBYTES; i++) difference |= (uint8_t)(expected[i] ^ theirs[i]);
    return difference ? idist__auth_fail_tag(h) : IDIST_OK;
}

// Whether the handshake failed because the peer's machine has the other byte order.
static bool idist__auth_other_order(const idist__handshake *h) {
    return idist__auth_has_magic(&h->theirs) && h->theirs.byte_order == 0x04030201;
}

static idist_status idist__auth_check_hello(const idist__handshake *h) {
    const idist__hello *theirs = &h->theirs, *mine = &h->mine;

    if (!idist__auth_has_magic(theirs))
        return idist__fail(IDIST_ERR_AUTH, "the peer does not speak the protocol of idist: it is "
                                           "another program. Choose another port, or end it");
    if (theirs->byte_order != mine->byte_order)
        return idist__fail(IDIST_ERR_UNSUPPORTED,
                           "the peer has another byte order; mixed worlds are not supported");
    if (theirs->min_version > mine->version || theirs->version < mine->min_version)
        return idist__fail(IDIST_ERR_UNSUPPORTED,
                           "the peer speaks version %u of the protocol, this process version %u: "
                           "build all ranks from the same idist.h",
                           (unsigned)theirs->version, (unsigned)mine->version);
    if (theirs->role != mine->role || theirs->job != mine->job)
        return idist__fail(IDIST_ERR_AUTH,
                           "the peer belongs to another job (or to an earlier run of this one)");
    if (theirs->world_size != mine->world_size)
        return idist__fail(IDIST_ERR_ENV, "the peer has a world_size of %u, this process one of %u",
                           (unsigned)theirs->world_size, (unsigned)mine->world_size);

    return IDIST_OK;
}

// Whether this side sends the message of the current stage: the server sends the odd ones.
static bool idist__auth_writes(const idist__handshake *h) {
    return (h->stage % 2 == 1) == h->server;
}

// What the current stage waits for.
static int idist__auth_awaits(const idist__handshake *h) {
    return idist__auth_writes(h) ? IDIST__OS_WRITABLE : IDIST__OS_READABLE;
}

// Moves the message of a stage as far as the socket allows. 1: complete, 0: would block, -1: error.
static int idist__auth_transfer(idist__handshake *h, bool write, uint8_t *buf, size_t nbytes) {
    while (h->done < nbytes) {
        idist__os_part part;
        ptrdiff_t n;

        part.data = buf + h->done;
        part.nbytes = nbytes - h->done;
        n = write ? idist__os_socket_write(h->fd, &part, 1)
                  : idist__os_socket_read(h->fd, buf + h->done, nbytes - h->done);
        if (n < 0) return -1;
        if (n == 0) return 0;
        h->done += (size_t)n;
        // A stranger is recognised by its first bytes.
        if (!write && h->server && h->stage == IDIST__AUTH_HELLO && h->done >= 4 &&
            memcmp(buf, "IDST", 4) != 0)
            h->done = nbytes;
    }

    h->done = 0;

    return 1;
}

// The server's side: checks the message that is complete, and prepares the next.
static idist_status idist__auth_next_of_server(idist__handshake *h) {
    idist_status status = IDIST_OK;

    switch (h->stage) {
    case IDIST__AUTH_HELLO:
        memcpy(&h->theirs, h->in, IDIST__HELLO_BYTES);
        if (!idist__auth_has_magic(&h->theirs)) return idist__auth_check_hello(h);
        idist__auth_tag(h, "S", h->out + IDIST__HELLO_BYTES);
        break;
    case IDIST__AUTH_ANSWER: return idist__auth_check_hello(h); // the client now has our hello
    case IDIST__AUTH_PROOF:
        status = idist__auth_check_tag(h, "C", h->in);
        if (status != IDIST_OK) return status;
        h->out[0] = 1;
        break;
    default: break;
    }

    return IDIST_OK;
}

static idist_status idist__auth_next_of_client(idist__handshake *h) {
    idist__os_part zeros;
    idist_status status;

    if (h->stage != IDIST__AUTH_ANSWER) return IDIST_OK;
    memcpy(&h->theirs, h->in, IDIST__HELLO_BYTES);
    status = idist__auth_check_hello(h);
    if (status != IDIST_OK) return status;
    status = idist__auth_check_tag(h, "S", h->in + IDIST__HELLO_BYTES);

    if (status != IDIST_OK) { // the socket has room for the zeros
        memset(h->out, 0, IDIST__AUTH_TAG_NBYTES);
        zeros.data = h->out;
        zeros.nbytes = IDIST__AUTH_TAG_NBYTES;
        idist__os_socket_write(h->fd, &zeros, 1);
        return status;
    }

    idist__auth_tag(h, "C", h->out);

    return IDIST_OK;
}

static idist_status idist__auth_fail_transfer(void) {
    if (errno)
        return idist__fail(IDIST_ERR_PEER_LOST, "the connection broke during the handshake: %s",
                           strerror(errno));
    return idist__fail(IDIST_ERR_PEER_LOST,
                       "the peer closed the connection during the handshake: it ended, it had no "
                       "room for one more connection, or it does not speak the protocol of idist");
}

// Continues a handshake without blocking. IDIST_OK with *done set: each side has proven itself to
// the other. IDIST_OK with h->proven set: the caller decides. A failure is final; h->broke tells
// whether the connection was the cause.
static idist_status idist__auth_step(idist__handshake *h, bool *done) {
    static const size_t nbytes[IDIST__AUTH_DONE] = {IDIST__HELLO_BYTES,
                                                    IDIST__HELLO_BYTES + IDIST__AUTH_TAG_NBYTES,
                                                    IDIST__AUTH_TAG_NBYTES, 1};

    *done = false;

    while (h->stage < IDIST__AUTH_DONE) {
        bool write = idist__auth_writes(h);
        int rc = idist__auth_transfer(h, write, write ? h->out : h->in, nbytes[h->stage]);
        idist_status status;

        if (rc == 0) return IDIST_OK;
        h->broke = rc < 0;
        if (h->broke) return idist__auth_fail_transfer();

        status = h->server ? idist__auth_next_of_server(h) : idist__auth_next_of_client(h);
        h->stage++;
        if (status != IDIST_OK) return status;

        h->proven = h->asks && h->stage == IDIST__AUTH_ACCEPTED;
        if (h->proven) return IDIST_OK;
    }

    *done = true;

    return IDIST_OK;
}

// The whole handshake; blocks until its deadline.
static idist_status idist__auth_run(idist__handshake *h) {
    bool done = false;

    for (;;) {
        idist_status status = idist__auth_step(h, &done);

        if (status != IDIST_OK || done) return status;
        if (!idist__os_poll_wait(h->fd, idist__auth_awaits(h), h->deadline_ns))
            return idist__fail(IDIST_ERR_TIMEOUT, "the peer did not answer the handshake in time");
    }
}

//------------------------------------------------------------------------------
// [net:secret]  the secret that the ranks of a job share
// uses os:env os:file fail sha auth
//
// It comes from a field of the desc, a file or an environment variable, and has 16 to 256 bytes.
//------------------------------------------------------------------------------

enum { IDIST__SECRET_MIN = 16 };

typedef struct idist__secret {
    uint8_t bytes[256];
    size_t nbytes; // 0: none
    bool insecure; // IDIST_INSECURE: listen beyond this host without a secret
} idist__secret;

static int idist__secret_secrecy(const idist__secret *secret) {
    if (secret->nbytes) return IDIST__SECRECY_SECRET;
    return secret->insecure ? IDIST__SECRECY_INSECURE : IDIST__SECRECY_NONE;
}

// The key of handshakes; without a secret a constant.
static void idist__secret_key(const idist__secret *secret, uint8_t key[32]) {
    idist__sha sha;
    idist__sha_begin(&sha);
    idist__sha_add(&sha, "idist v1", 8);
    idist__sha_add(&sha, secret->bytes, secret->nbytes);
    idist__sha_end(&sha, key);
}

static bool idist__secret_fits(const idist__secret *secret, size_t nbytes) {
    return nbytes >= IDIST__SECRET_MIN && nbytes <= sizeof secret->bytes;
}

static void idist__secret_set(idist__secret *secret, const void *bytes, size_t nbytes) {
    memcpy(secret->bytes, bytes, nbytes);
    secret->nbytes = nbytes;
}

// Only its owner may have access to IDIST_SECRET_FILE.
static idist_status idist__secret_from_file(idist__secret *secret, const char *path) {
    uint8_t text[sizeof secret->bytes + 1];
    idist__os_file file = idist__os_file_open(path, IDIST__OS_FILE_READ);
    bool is_private = file >= 0 && idist__os_file_is_private(file);
    ptrdiff_t nbytes;

    if (file < 0)
        return idist__fail(IDIST_ERR_ENV, "IDIST_SECRET_FILE=%s cannot be read: %s", path,
                           strerror(errno));
    nbytes = is_private ? idist__os_file_read(file, text, sizeof text) : 0;
    idist__os_file_close(&file);

    if (!is_private)
        return idist__fail(
            IDIST_ERR_ENV,
            "IDIST_SECRET_FILE=%s must belong to you and be readable by nobody else (chmod 600)",
            path);
    if (nbytes < 0 || !idist__secret_fits(secret, (size_t)nbytes))
        return idist__fail(IDIST_ERR_ENV, "IDIST_SECRET_FILE=%s must hold %d to %zu bytes", path,
                           IDIST__SECRET_MIN, sizeof secret->bytes);
    idist__secret_set(secret, text, (size_t)nbytes);

    return IDIST_OK;
}

static idist_status idist__secret_from_field(idist__secret *secret, const void *field,
                                             size_t nbytes) {
    if (!field || !idist__secret_fits(secret, nbytes))
        return idist__fail(IDIST_ERR_ARG, "a secret needs a pointer and %d to %zu bytes",
                           IDIST__SECRET_MIN, sizeof secret->bytes);
    idist__secret_set(secret, field, nbytes);
    return IDIST_OK;
}

static idist_status idist__secret_from_env(idist__secret *secret, const char *text) {
    if (!idist__secret_fits(secret, strlen(text)))
        return idist__fail(IDIST_ERR_ENV, "IDIST_SECRET has %zu bytes but needs %d to %zu",
                           strlen(text), IDIST__SECRET_MIN, sizeof secret->bytes);
    idist__secret_set(secret, text, strlen(text));
    return IDIST_OK;
}

// The secret of a desc, or else IDIST_SECRET_FILE, or else IDIST_SECRET, or else none.
static idist_status idist__secret_find(idist__secret *secret, const void *field, size_t nbytes) {
    const char *text = idist__os_env("IDIST_SECRET"), *file = idist__os_env("IDIST_SECRET_FILE");
    const char *insecure = idist__os_env("IDIST_INSECURE");

    memset(secret, 0, sizeof *secret);
    secret->insecure = insecure && strcmp(insecure, "0") != 0;
    if (field || nbytes) return idist__secret_from_field(secret, field, nbytes);
    if (file) return idist__secret_from_file(secret, file);
    if (text) return idist__secret_from_env(secret, text);

    return IDIST_OK;
}

//------------------------------------------------------------------------------
// [net:pending]  connections whose handshake is under way
// uses clock descriptor poll auth
//
// There are a fixed number of slots, so that strangers cannot make us allocate. When all are taken,
// new connections stay in the listener's queue until one may be evicted:
//
//     first   a handshake whose deadline has passed
//     then    the oldest that has sent nothing for 50 ms
//     then    the oldest that began more than a second ago
//
// An honest client that is evicted, because it got no processor time, tries again.
//------------------------------------------------------------------------------

enum {
    IDIST__PENDING_SLOTS = 256, // slots
    IDIST__PENDING_MS = 5000,   // a handshake may take so long
    IDIST__PENDING_SILENT_MS = 50,
    IDIST__PENDING_SLOW_MS = 1000
};

typedef struct idist__pending {
    idist__handshake place[IDIST__PENDING_SLOTS]; // fd -1: a free slot
} idist__pending;

static void idist__pending_init(idist__pending *pending) {
    int i;
    memset(pending, 0, sizeof *pending);
    for (i = 0; i < IDIST__PENDING_SLOTS; i++) pending->place[i].fd = -1;
}

static void idist__pending_close(idist__pending *pending) {
    int i;
    for (i = 0; i < IDIST__PENDING_SLOTS; i++) idist__os_descriptor_close(&pending->place[i].fd);
}

// When a handshake began.
static int64_t idist__pending_since_ns(const idist__handshake *h) {
    return h->deadline_ns - IDIST__PENDING_MS * IDIST__MS;
}

// The connection to evict first; NULL: none may be evicted now.
static idist__handshake *idist__pending_find_evictable(idist__pending *pending) {
    int64_t now = idist__os_clock_now_ns();
    idist__handshake *silent = NULL, *slow = NULL;
    int i;

    for (i = 0; i < IDIST__PENDING_SLOTS; i++) {
        idist__handshake *h = &pending->place[i];
        idist__handshake **oldest = h->stage || h->done ? &slow : &silent;

        if (h->fd < 0) continue;
        if (now >= h->deadline_ns) return h;
        if (!*oldest || h->deadline_ns < (*oldest)->deadline_ns) *oldest = h;
    }

    if (silent && now - idist__pending_since_ns(silent) >= IDIST__PENDING_SILENT_MS * IDIST__MS)
        return silent;
    if (slow && now - idist__pending_since_ns(slow) >= IDIST__PENDING_SLOW_MS * IDIST__MS)
        return slow;

    return NULL;
}

// A slot for a new connection: a free one, or else that of the connection to evict, which the
// caller closes once the new one is there. NULL: there is none now.
static idist__handshake *idist__pending_slot(idist__pending *pending) {
    int i;
    for (i = 0; i < IDIST__PENDING_SLOTS; i++)
        if (pending->place[i].fd < 0) return &pending->place[i];
    return idist__pending_find_evictable(pending);
}

static int idist__pending_count(const idist__pending *pending) {
    int i, count = 0;

    for (i = 0; i < IDIST__PENDING_SLOTS; i++)
        if (pending->place[i].fd >= 0) count++;

    return count;
}

// Descriptors are short: evicts a connection if one may be. False: none is pending, so it is not
// strangers who use them up.
static bool idist__pending_evict(idist__pending *pending) {
    idist__handshake *evicted = idist__pending_find_evictable(pending);

    if (evicted) {
        idist__os_descriptor_close(&evicted->fd);
        return true;
    }

    return idist__pending_count(pending) > 0;
}

// Fills the entries of poll for all pending connections, and returns how many there are.
static int idist__pending_fill_polls(const idist__pending *pending, idist__os_poll_entry *polls) {
    int i, count = 0;

    for (i = 0; i < IDIST__PENDING_SLOTS; i++) {
        const idist__handshake *h = &pending->place[i];
        if (h->fd >= 0) idist__os_poll_watch(&polls[count++], h->fd, idist__auth_awaits(h));
    }

    return count;
}

// Marks the connections that poll has reported. Nothing may have been opened or closed since
// idist__pending_fill_polls.
static void idist__pending_take_polls(idist__pending *pending, const idist__os_poll_entry *polls) {
    int i, count = 0;

    for (i = 0; i < IDIST__PENDING_SLOTS; i++) {
        if (pending->place[i].fd < 0) continue;
        pending->place[i].ready = idist__os_poll_ready(&polls[count]);
        count++;
    }
}

#endif // IDIST_NET_H
