/* idist_launch.h - v0.1.0 - how the ranks of idist meet: authentication, store, launchers - MIT
licence

    Part of the implementation of idist: idist.h includes it where IDIST_IMPLEMENTATION is defined.

CONTENTS

      [launch:sock]    stream sockets: addresses, listen, connect, and transfers with a deadline
      [launch:auth]    who is there: a mutual handshake on every connection
      [launch:store]   rendezvous: a key-value table in memory, in a file, or behind a socket
      [launch:config]  the configuration: explicit field, then environment, then built-in
*/
#ifndef IDIST_LAUNCH_H
#define IDIST_LAUNCH_H

//------------------------------------------------------------------------------
// [launch:sock]  stream sockets: addresses, listen, connect, and transfers with a deadline
// uses os err
//------------------------------------------------------------------------------

// An address is text: "unix:NAME" is a socket in the abstract namespace, which leaves no file
// behind and is seen inside one network namespace only, exactly as loopback TCP is; "tcp:HOST:PORT"
// has an IPv6 HOST in brackets.
typedef struct idist__addr {
    struct sockaddr_storage sa;
    socklen_t nbytes;
} idist__addr;

static bool idist__sock_host_is_loopback(const char *host) {
    return strcmp(host, "localhost") == 0 || strncmp(host, "127.", 4) == 0 ||
           strcmp(host, "::1") == 0;
}

static bool idist__addr_is_loopback(const idist__addr *a) {
    if (a->sa.ss_family == AF_UNIX) return true;

    if (a->sa.ss_family == AF_INET) {
        const struct sockaddr_in *v4 = (const struct sockaddr_in *)&a->sa;
        return (ntohl(v4->sin_addr.s_addr) >> 24) == 127;
    }

    return IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)&a->sa)->sin6_addr) != 0;
}

static idist_status idist__addr_unix(idist__addr *a, const char *name) {
    struct sockaddr_un *un = (struct sockaddr_un *)&a->sa;
    size_t n = strlen(name);

    memset(a, 0, sizeof *a);
    if (!n || n > sizeof un->sun_path - 1)
        return idist__fail(IDIST_ERR_ARG, "socket name \"%s\" is empty or longer than %zu", name,
                           sizeof un->sun_path - 1);
    un->sun_family = AF_UNIX;
    memcpy(un->sun_path + 1, name, n);
    a->nbytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n);

    return IDIST_OK;
}

static idist_status idist__addr_tcp(idist__addr *a, const char *host, int port) {
    struct addrinfo hints, *list = NULL;
    char service[16];
    int rc;

    memset(a, 0, sizeof *a);
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    snprintf(service, sizeof service, "%d", port);
    rc = getaddrinfo(host, service, &hints, &list);
    if (rc != 0 || !list)
        return idist__fail(IDIST_ERR_SYSTEM, "the host name \"%s\" cannot be resolved: %s", host,
                           gai_strerror(rc));
    memcpy(&a->sa, list->ai_addr, list->ai_addrlen);
    a->nbytes = list->ai_addrlen;
    freeaddrinfo(list);

    return IDIST_OK;
}

// Numbers in a given text only; the whole text must be a number within the limits.
static bool idist__parse_int(const char *text, int64_t lo, int64_t hi, int64_t *value) {
    char *end = NULL;
    long long v;

    if (!text || !(text[0] == '-' || (text[0] >= '0' && text[0] <= '9'))) return false;
    errno = 0;
    v = strtoll(text, &end, 10);
    if (errno || !end || *end || v < lo || v > hi) return false;
    *value = v;

    return true;
}

// "host:port" or "[v6]:port".
static bool idist__parse_host_port(const char *text, char *host, size_t cap, int *port) {
    const char *colon = strrchr(text, ':');
    size_t n = colon ? (size_t)(colon - text) : 0;
    int64_t value;

    if (!colon || !idist__parse_int(colon + 1, 0, 65535, &value)) return false;

    if (n >= 2 && text[0] == '[' && text[n - 1] == ']') {
        text++;
        n -= 2;
    }

    if (!n || n >= cap) return false;
    memcpy(host, text, n);
    host[n] = 0;
    *port = (int)value;

    return true;
}

static idist_status idist__addr_parse(idist__addr *a, const char *text) {
    char host[256];
    int port;

    memset(a, 0, sizeof *a);
    if (strncmp(text, "unix:", 5) == 0) return idist__addr_unix(a, text + 5);
    if (strncmp(text, "tcp:", 4) == 0 && idist__parse_host_port(text + 4, host, sizeof host, &port))
        return idist__addr_tcp(a, host, port);
    return idist__fail(IDIST_ERR_ARG, "\"%s\" is no address", text);
}

// Text of an IP address, without the port.
static void idist__addr_host_text(const idist__addr *a, char *buf, size_t cap) {
    const void *ip = a->sa.ss_family == AF_INET
                         ? (const void *)&((const struct sockaddr_in *)&a->sa)->sin_addr
                         : (const void *)&((const struct sockaddr_in6 *)&a->sa)->sin6_addr;
    if (!inet_ntop(a->sa.ss_family, ip, buf, (socklen_t)cap)) idist__copy_text(buf, cap, "?");
}

static int idist__addr_port(const idist__addr *a) {
    if (a->sa.ss_family == AF_INET) return ntohs(((const struct sockaddr_in *)&a->sa)->sin_port);
    if (a->sa.ss_family == AF_INET6) return ntohs(((const struct sockaddr_in6 *)&a->sa)->sin6_port);
    return 0;
}

// Non-blocking, closed on exec; TCP without Nagle's delay.
static int idist__sock_open(int family) {
    int one = 1, fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0 && family != AF_UNIX) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return fd;
}

static idist_status idist__sock_listen(const idist__addr *a, const char *what, int *fd) {
    int one = 1, err;

    *fd = idist__sock_open(a->sa.ss_family);
    if (*fd < 0) return idist__fail_errno("socket", errno);
    if (a->sa.ss_family != AF_UNIX) setsockopt(*fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(*fd, (const struct sockaddr *)&a->sa, a->nbytes) == 0 && listen(*fd, 4096) == 0)
        return IDIST_OK;
    err = errno;
    idist__os_close(fd);
    if (err == EADDRINUSE)
        return idist__fail(
            IDIST_ERR_ADDR_IN_USE,
            "%s is taken: another job or server runs there. Choose another MASTER_PORT, or end it",
            what);

    return idist__fail_errno(what, err);
}

// Whether the process at the other end of a local socket belongs to our user: abstract sockets have
// no permissions.
static bool idist__sock_same_user(int fd) {
    struct {
        pid_t pid;
        uid_t uid;
        gid_t gid;
    } cred;
    socklen_t n = sizeof cred;

    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &n) == 0 && cred.uid == geteuid();
}

// -1 and errno EAGAIN when nobody is waiting. Connections of other users are closed at once.
static int idist__sock_accept(int listener) {
    struct sockaddr_storage sa;
    socklen_t n = sizeof sa;
    int one = 1, fd = accept(listener, (struct sockaddr *)&sa, &n);

    if (fd < 0) return -1;
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    if (sa.ss_family != AF_UNIX) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (sa.ss_family != AF_UNIX || idist__sock_same_user(fd)) return fd;
    close(fd);
    errno = EAGAIN;

    return -1;
}

static bool idist__sock_wait(int fd, short events, int64_t deadline_ns);

// One attempt. errno says why not; the caller decides whether to try again. EPERM: another user
// listens there.
static int idist__sock_connect(const idist__addr *a, int64_t deadline_ns) {
    int fd = idist__sock_open(a->sa.ss_family), err = 0;
    socklen_t n = sizeof err;

    if (fd < 0) return -1;
    if (connect(fd, (const struct sockaddr *)&a->sa, a->nbytes) != 0) err = errno;

    if (err == EINPROGRESS || err == EINTR) {
        if (!idist__sock_wait(fd, POLLOUT, deadline_ns)) err = ETIMEDOUT;
        else if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &err, &n) != 0) err = errno;
    }

    if (!err && a->sa.ss_family == AF_UNIX && !idist__sock_same_user(fd)) err = EPERM;
    if (!err) return fd;
    close(fd);
    errno = err;

    return -1;
}

// Whether it is the network that is missing, and not the other side.
static bool idist__sock_cut_off(int err) {
    return err == ENETUNREACH || err == ENETDOWN || err == EHOSTUNREACH || err == EHOSTDOWN;
}

// Moves what is possible now. > 0: bytes; 0: would block; -1: end of stream (errno 0) or an error.
static ptrdiff_t idist__sock_read(int fd, void *buf, size_t nbytes) {
    for (;;) {
        ssize_t n = recv(fd, buf, nbytes, 0);
        if (n > 0) return n;

        if (n == 0) {
            errno = 0;
            return -1;
        }

        if (errno == EINTR) continue;
        return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : -1;
    }
}

static ptrdiff_t idist__sock_write(int fd, const struct iovec *parts, int nparts) {
    struct msghdr m;

    memset(&m, 0, sizeof m);
    m.msg_iov = (struct iovec *)(uintptr_t)parts;
    m.msg_iovlen = (size_t)nparts;

    for (;;) {
        ssize_t n = sendmsg(fd, &m, MSG_NOSIGNAL);
        if (n >= 0) return n;
        if (errno == EINTR) continue;
        return errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS ? 0 : -1;
    }
}

// Whether the other side has ended, and everything that it wrote was read.
IDIST__UNUSED static bool idist__sock_at_end(int fd) {
    char c;
    ssize_t n;
    do n = recv(fd, &c, 1, MSG_PEEK | MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    return n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK);
}

static bool idist__sock_wait(int fd, short events, int64_t deadline_ns) {
    for (;;) {
        struct pollfd p;
        int rc;
        p.fd = fd;
        p.events = events;
        rc = poll(&p, 1, idist__os_ms_until(deadline_ns));
        if (rc > 0) return true;
        if (rc == 0 && idist__os_ms_until(deadline_ns) == 0)
            return false; // poll's own limit is shorter
        if (rc < 0 && errno != EINTR) return false;
    }
}

// The whole buffer or an error; errno ETIMEDOUT when the deadline passed, 0 at the end of the
// stream.
static bool idist__sock_read_all(int fd, void *buf, size_t nbytes, int64_t deadline_ns) {
    char *p = (char *)buf;

    while (nbytes) {
        ptrdiff_t n = idist__sock_read(fd, p, nbytes);
        if (n < 0) return false;

        if (n == 0 && !idist__sock_wait(fd, POLLIN, deadline_ns)) {
            errno = ETIMEDOUT;
            return false;
        }

        p += n;
        nbytes -= (size_t)n;
    }

    return true;
}

static bool idist__sock_write_all(int fd, const void *buf, size_t nbytes, int64_t deadline_ns) {
    const char *p = (const char *)buf;

    while (nbytes) {
        struct iovec part;
        ptrdiff_t n;
        part.iov_base = (void *)(uintptr_t)p;
        part.iov_len = nbytes;
        n = idist__sock_write(fd, &part, 1);
        if (n < 0) return false;

        if (n == 0 && !idist__sock_wait(fd, POLLOUT, deadline_ns)) {
            errno = ETIMEDOUT;
            return false;
        }

        p += n;
        nbytes -= (size_t)n;
    }

    return true;
}

//------------------------------------------------------------------------------
// [launch:auth]  who is there: a mutual handshake on every connection
// uses os err hash sock
//
//   client                                     server
//     hello C (64 bytes, with a nonce)  ------>
//                          <------  hello S (64 bytes, with a nonce) | HMAC(K, "S" | C | S)
//     HMAC(K, "C" | C | S)              ------>
//                                       <------  one byte: you are in
//
// K comes from the job's secret. Different labels keep one side's answer from being thrown back at
// it, the nonces keep an old conversation from being replayed, and the tags cover version, role,
// rank and job, so that nothing in them can be changed on the way. A stranger makes the server read
// 96 bytes and allocate none. Nothing is encrypted. A hello that does not fit is answered all the
// same, so that the client can say what differs. A client whose connection ends before the last
// byte was turned away because all places were taken, and tries again; see idist__porch_place.
// Without a secret K is a constant: then this only keeps out other programs and other versions.
//------------------------------------------------------------------------------

#define IDIST__WIRE_VERSION 3
#define IDIST__HELLO_BYTES 64

typedef struct idist__hello {
    char magic[4]; // "IDST"
    uint16_t version;
    uint16_t min_version;
    uint32_t byte_order; // 0x01020304 as this machine writes it
    uint32_t role;
    uint64_t job;
    uint32_t rank;
    uint32_t world_size;
    uint64_t epoch;
    uint8_t nonce[16];
    uint8_t zero[8];
} idist__hello;

enum { IDIST__ROLE_STORE = 1, IDIST__ROLE_LINK = 2 };

typedef struct idist__handshake {
    int fd;
    bool server;
    int stage; // client: write hello, read answer, write tag, read byte. server: the other side of
               // each.
    size_t done; // bytes of this stage
    bool broke;  // the connection ended, or broke
    bool ready;  // poll has seen something there, or it is new
    const uint8_t *key;
    idist__hello mine, theirs;
    uint8_t out[96], in[96];
    int64_t deadline_ns;
} idist__handshake;

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

static void idist__auth_tag(const idist__handshake *h, const char *label, uint8_t tag[32]) {
    const idist__hello *c = h->server ? &h->theirs : &h->mine,
                       *s = h->server ? &h->mine : &h->theirs;
    idist__hmac(h->key, label, c, IDIST__HELLO_BYTES, s, IDIST__HELLO_BYTES, tag);
}

static bool idist__auth_tag_is(const idist__handshake *h, const char *label,
                               const uint8_t *theirs) {
    uint8_t want[32], diff = 0;
    int i;

    idist__auth_tag(h, label, want);
    for (i = 0; i < 32; i++)
        diff |= (uint8_t)(want[i] ^ theirs[i]); // no early exit: time tells nothing
    return diff == 0;
}

static bool idist__auth_other_order(const idist__handshake *h) {
    return memcmp(h->theirs.magic, "IDST", 4) == 0 && h->theirs.byte_order == 0x04030201;
}

static idist_status idist__auth_check_hello(const idist__handshake *h) {
    const idist__hello *t = &h->theirs;

    if (memcmp(t->magic, "IDST", 4) != 0)
        return idist__fail(IDIST_ERR_AUTH, "the other side does not speak idist");
    if (t->byte_order != h->mine.byte_order)
        return idist__fail(IDIST_ERR_UNSUPPORTED,
                           "the other side has another byte order; mixed worlds are not supported");
    if (t->min_version > h->mine.version || t->version < h->mine.min_version)
        return idist__fail(
            IDIST_ERR_UNSUPPORTED,
            "the other side speaks version %u of the protocol, this one %u: build all "
            "ranks from the same idist.h",
            (unsigned)t->version, (unsigned)h->mine.version);
    if (t->role != h->mine.role || t->job != h->mine.job)
        return idist__fail(IDIST_ERR_AUTH,
                           "the other side belongs to another job (or an earlier run of this one)");
    if (t->world_size != h->mine.world_size)
        return idist__fail(IDIST_ERR_ENV, "the other side says the world has %u ranks, this one %u",
                           (unsigned)t->world_size, (unsigned)h->mine.world_size);

    return IDIST_OK;
}

// Moves one stage as far as it goes. 1: stage complete, 0: would block, -1: failed.
static int idist__auth_move(idist__handshake *h, bool write, uint8_t *buf, size_t nbytes) {
    while (h->done < nbytes) {
        struct iovec part;
        ptrdiff_t n;
        part.iov_base = buf + h->done;
        part.iov_len = nbytes - h->done;
        n = write ? idist__sock_write(h->fd, &part, 1)
                  : idist__sock_read(h->fd, part.iov_base, part.iov_len);
        if (n < 0) return -1;
        if (n == 0) return 0;
        h->done += (size_t)n;
        // A stranger is recognised by his first bytes.
        if (!write && h->server && h->stage == 0 && h->done >= 4 && memcmp(buf, "IDST", 4) != 0)
            h->done = nbytes;
    }

    h->done = 0;

    return 1;
}

static bool idist__auth_writes(const idist__handshake *h) {
    return (h->stage % 2 == 1) == h->server;
}

// A stage is complete: checks what it has brought, prepares what comes next.
static idist_status idist__auth_next(idist__handshake *h) {
    h->stage++;

    if (h->server && h->stage == 1) {
        memcpy(&h->theirs, h->in, IDIST__HELLO_BYTES);
        if (memcmp(h->theirs.magic, "IDST", 4) != 0) return idist__auth_check_hello(h);
        idist__auth_tag(h, "S", h->out + 64);
    } else if (h->server && h->stage == 2) {
        return idist__auth_check_hello(h);
    } else if (h->server && h->stage == 3) {
        if (!idist__auth_tag_is(h, "C", h->in))
            return idist__fail(IDIST_ERR_AUTH,
                               "the other side does not know the secret of this job");
        h->out[0] = 1;
    } else if (!h->server && h->stage == 2) {
        idist_status status;
        memcpy(&h->theirs, h->in, IDIST__HELLO_BYTES);
        status = idist__auth_check_hello(h);
        if (status != IDIST_OK) return status;
        if (!idist__auth_tag_is(h, "S", h->in + 64))
            return idist__fail(IDIST_ERR_AUTH,
                               "the other side does not know the secret of this job");
        idist__auth_tag(h, "C", h->out);
    }

    return IDIST_OK;
}

// IDIST_OK with *done set when both sides are sure of each other. Does not block. h->broke: the
// connection ended.
static idist_status idist__auth_step(idist__handshake *h, bool *done) {
    static const size_t nbytes[4] = {64, 96, 32, 1};
    idist_status status = IDIST_OK;

    *done = false;

    while (h->stage < 4) {
        bool write = idist__auth_writes(h);
        int rc = idist__auth_move(h, write, write ? h->out : h->in, nbytes[h->stage]);
        if (rc == 0) return IDIST_OK;
        h->broke = rc < 0;
        if (rc < 0 && errno)
            return idist__fail(IDIST_ERR_PEER_LOST, "the handshake broke off: %s", strerror(errno));
        if (rc < 0)
            return idist__fail(IDIST_ERR_PEER_LOST,
                               "the other side closed the connection during the handshake: it "
                               "ended, it had no room for "
                               "one more connection, or it does not speak idist");

        status = idist__auth_next(h);
        if (status != IDIST_OK) return status;
    }

    *done = true;

    return IDIST_OK;
}

// The whole handshake, blocking until the deadline in it.
static idist_status idist__auth_run(idist__handshake *h) {
    bool done = false;

    for (;;) {
        idist_status s = idist__auth_step(h, &done);
        if (s != IDIST_OK || done) return s;
        if (!idist__sock_wait(h->fd, idist__auth_writes(h) ? POLLOUT : POLLIN, h->deadline_ns))
            return idist__fail(IDIST_ERR_TIMEOUT,
                               "the other side did not answer the handshake in time");
    }
}

typedef struct idist__secret {
    uint8_t bytes[256];
    size_t nbytes; // 0: none
    bool insecure; // IDIST_INSECURE: listen beyond this host all the same
} idist__secret;

// The key of a job from its secret; the constant one without.
static void idist__auth_key(const idist__secret *secret, uint8_t key[32]) {
    idist__sha s;
    idist__sha_begin(&s);
    idist__sha_add(&s, "idist v1", 8);
    idist__sha_add(&s, secret->bytes, secret->nbytes);
    idist__sha_end(&s, key);
}

// IDIST_SECRET_FILE must be a file that only its owner can read.
static idist_status idist__secret_from_file(idist__secret *secret, const char *path) {
    uint8_t text[sizeof secret->bytes + 1];
    struct stat st;
    ssize_t n = -1;
    int fd = open(path, O_RDONLY | O_CLOEXEC);

    if (fd < 0)
        return idist__fail(IDIST_ERR_ENV, "IDIST_SECRET_FILE=%s cannot be read: %s", path,
                           strerror(errno));

    if (fstat(fd, &st) != 0 || (st.st_mode & 077) || st.st_uid != geteuid()) {
        close(fd);
        return idist__fail(
            IDIST_ERR_ENV,
            "IDIST_SECRET_FILE=%s must be yours and readable by nobody else (chmod 600)", path);
    }

    do n = read(fd, text, sizeof text);
    while (n < 0 && errno == EINTR);
    close(fd);
    if (n < 16 || n > (ssize_t)sizeof secret->bytes)
        return idist__fail(IDIST_ERR_ENV, "IDIST_SECRET_FILE=%s must hold 16 to %zu bytes", path,
                           sizeof secret->bytes);
    memcpy(secret->bytes, text, (size_t)n);
    secret->nbytes = (size_t)n;

    return IDIST_OK;
}

// The secret of a desc, else that of the environment, else none.
static idist_status idist__secret_find(idist__secret *secret, const void *field, size_t nbytes) {
    const char *text = idist__os_env("IDIST_SECRET"), *file = idist__os_env("IDIST_SECRET_FILE");
    const char *insecure = idist__os_env("IDIST_INSECURE");

    memset(secret, 0, sizeof *secret);
    secret->insecure = insecure && strcmp(insecure, "0") != 0;

    if (field || nbytes) {
        if (!field || nbytes < 16 || nbytes > sizeof secret->bytes)
            return idist__fail(IDIST_ERR_ARG, "a secret needs a pointer and 16 to %zu bytes",
                               sizeof secret->bytes);
        text = (const char *)field;
    } else if (file) {
        return idist__secret_from_file(secret, file);
    } else if (text) {
        nbytes = strlen(text);
        if (nbytes < 16 || nbytes > sizeof secret->bytes)
            return idist__fail(IDIST_ERR_ENV, "IDIST_SECRET has %zu bytes; 16 to %zu are needed",
                               nbytes, sizeof secret->bytes);
    }

    if (nbytes) memcpy(secret->bytes, text, nbytes);
    secret->nbytes = nbytes;

    return IDIST_OK;
}

// Where strangers wait until their handshake is through: a fixed number of places, so that nobody
// makes us allocate. When all are taken, newcomers stay in the listener's queue until a connection
// may be evicted: the oldest that has sent nothing for 50 ms; failing that, the oldest handshake
// that is more than a second old. An honest client that is evicted because it got no processor time
// tries again.
enum {
    IDIST__PORCH = 256,
    IDIST__PORCH_MS = 5000,
    IDIST__PORCH_SILENT_MS = 50,
    IDIST__PORCH_SLOW_MS = 1000
};

typedef struct idist__porch {
    idist__handshake place[IDIST__PORCH]; // fd -1: free
} idist__porch;

static void idist__porch_init(idist__porch *p) {
    int i;
    memset(p, 0, sizeof *p);
    for (i = 0; i < IDIST__PORCH; i++) p->place[i].fd = -1;
}

static void idist__porch_close(idist__porch *p) {
    int i;
    for (i = 0; i < IDIST__PORCH; i++) idist__os_close(&p->place[i].fd);
}

// The stranger who may be sent away first, or NULL: nobody may.
static idist__handshake *idist__porch_oldest(idist__porch *p) {
    int64_t now = idist__os_now_ns();
    idist__handshake *silent = NULL, *slow = NULL;
    int i;

    for (i = 0; i < IDIST__PORCH; i++) {
        idist__handshake *h = &p->place[i];
        idist__handshake **oldest = h->stage || h->done ? &slow : &silent;
        if (h->fd < 0) continue;
        if (now >= h->deadline_ns) return h;
        if (!*oldest || h->deadline_ns < (*oldest)->deadline_ns) *oldest = h;
    }

    if (silent &&
        now >= silent->deadline_ns - (IDIST__PORCH_MS - IDIST__PORCH_SILENT_MS) * IDIST__MS)
        return silent;
    if (slow && now >= slow->deadline_ns - (IDIST__PORCH_MS - IDIST__PORCH_SLOW_MS) * IDIST__MS)
        return slow;

    return NULL;
}

// The place for a newcomer: a free one, else that of the stranger who may be sent away, which the
// caller does by closing his connection when the newcomer is there. NULL: there is none now.
static idist__handshake *idist__porch_place(idist__porch *p) {
    int i;
    for (i = 0; i < IDIST__PORCH; i++)
        if (p->place[i].fd < 0) return &p->place[i];
    return idist__porch_oldest(p);
}

// Descriptors are short: sends a stranger away if one may be. False: there are none, so we need
// more descriptors ourselves.
static bool idist__porch_make_way(idist__porch *p) {
    idist__handshake *h = idist__porch_oldest(p);
    int i;

    if (h) idist__os_close(&h->fd);
    for (i = 0; !h && i < IDIST__PORCH; i++)
        if (p->place[i].fd >= 0) h = &p->place[i];
    return h != NULL;
}

// What poll should look at; returns how many.
static int idist__porch_poll(const idist__porch *p, struct pollfd *fds) {
    int i, n = 0;

    for (i = 0; i < IDIST__PORCH; i++) {
        if (p->place[i].fd < 0) continue;
        fds[n].fd = p->place[i].fd;
        fds[n++].events = idist__auth_writes(&p->place[i]) ? POLLOUT : POLLIN;
    }

    return n;
}

// What poll has seen there. The places are those of idist__porch_poll.
static void idist__porch_polled(idist__porch *p, const struct pollfd *fds) {
    int i, n = 0;

    for (i = 0; i < IDIST__PORCH; i++) {
        if (p->place[i].fd < 0) continue;
        p->place[i].ready = fds[n++].revents != 0;
    }
}

//------------------------------------------------------------------------------
// [launch:store]  rendezvous: a key-value table in memory, in a file, or behind a socket
// uses os err mem hash sock auth
//
// Every call of the public API fills one idist__req and gives it to the store's `run`. The table
// itself, and what each request does to it, is written once (idist__table_apply) and serves all
// three kinds.
//------------------------------------------------------------------------------

enum { // the numbers of torch's TCPStore, which is what travels over the wire
    IDIST__REQ_VALIDATE = 0,
    IDIST__REQ_SET = 1,
    IDIST__REQ_COMPARE_SET = 2,
    IDIST__REQ_GET = 3,
    IDIST__REQ_ADD = 4,
    IDIST__REQ_CHECK = 5,
    IDIST__REQ_WAIT = 6,
    IDIST__REQ_NUM_KEYS = 7,
    IDIST__REQ_DELETE = 8,
    IDIST__REQ_CANCEL_WAIT = 12,
    IDIST__REQ_WILL = 100 // not torch's: set this key when my connection ends
};

#define IDIST__KEY_MAX 1024u
#define IDIST__VALUE_MAX (8u << 20)
#define IDIST__KEYS_MAX 65536u
// The length in an answer to a GET whose key is not there (any more), and the answer to an ADD that
// found text; torch's protocol has no word for it.
static const uint64_t IDIST__NO_VALUE = UINT64_MAX;
static const int64_t IDIST__NOT_A_NUMBER = INT64_MIN;

typedef struct idist__blob { // bytes with a length, not owned
    const char *data;
    size_t nbytes;
} idist__blob;

typedef struct idist__req {
    int op;
    idist__blob key;
    idist__blob a, b;        // SET: value; COMPARE_SET: expected, desired
    int64_t number;          // ADD: delta in, new value out; NUM_KEYS: out
    const idist__blob *keys; // CHECK, WAIT
    size_t nkeys;
    void *value; // GET, COMPARE_SET: where the value goes
    size_t capacity;
    size_t nbytes; // its size
    bool flag;     // CHECK: all there; DELETE: was there
    int64_t deadline_ns;
} idist__req;

typedef struct idist__entry {
    struct idist__entry *next;
    char *key, *value;
    size_t nkey, nvalue;
} idist__entry;

typedef struct idist__table {
    idist_allocator mem;
    idist__entry *bucket[256];
    size_t count;
} idist__table;

struct idist_store {
    idist_status (*run)(idist_store *store, idist__req *req);
    void (*close)(idist_store *store);
    idist_allocator mem;
    int timeout_ms;
    int port;
    void *impl;
};

static idist__entry **idist__table_find(idist__table *t, const char *key, size_t nkey) {
    idist__entry **e = &t->bucket[idist__hash(key, nkey) & 255];
    while (*e && ((*e)->nkey != nkey || memcmp((*e)->key, key, nkey) != 0)) e = &(*e)->next;
    return e;
}

static idist_status idist__table_put(idist__table *t, idist__blob key, const void *value,
                                     size_t nbytes) {
    idist__entry **at = idist__table_find(t, key.data, key.nbytes), *e = *at;
    char *copy = (char *)idist__mem_alloc(&t->mem, nbytes);

    if (!copy) return IDIST_ERR_NO_MEMORY;
    if (nbytes) memcpy(copy, value, nbytes);

    if (!e) {
        e = (idist__entry *)idist__mem_alloc(&t->mem, sizeof *e + key.nbytes);
        if (!e) {
            idist__mem_free(&t->mem, copy);
            return IDIST_ERR_NO_MEMORY;
        }

        e->key = (char *)(e + 1);
        e->nkey = key.nbytes;
        memcpy(e->key, key.data, key.nbytes);
        *at = e;
        t->count++;
    }

    idist__mem_free(&t->mem, e->value);
    e->value = copy;
    e->nvalue = nbytes;

    return IDIST_OK;
}

static bool idist__table_remove(idist__table *t, idist__blob key) {
    idist__entry **at = idist__table_find(t, key.data, key.nbytes), *e = *at;

    if (!e) return false;
    *at = e->next;
    t->count--;
    idist__mem_free(&t->mem, e->value);
    idist__mem_free(&t->mem, e);
    return true;
}

static void idist__table_clear(idist__table *t) {
    size_t i;

    for (i = 0; i < IDIST__COUNT_OF(t->bucket); i++)
        while (t->bucket[i]) {
            idist__blob key;
            key.data = t->bucket[i]->key;
            key.nbytes = t->bucket[i]->nkey;
            idist__table_remove(t, key);
        }
}

static bool idist__table_has_all(idist__table *t, const idist__req *r) {
    size_t i;
    for (i = 0; i < r->nkeys; i++)
        if (!*idist__table_find(t, r->keys[i].data, r->keys[i].nbytes)) return false;
    return true;
}

static idist_status idist__table_add(idist__table *t, idist__req *r) {
    idist__entry *e = *idist__table_find(t, r->key.data, r->key.nbytes);
    char text[32];
    int64_t old = 0;

    if (e) {
        bool number = e->nvalue < sizeof text;

        if (number) {
            memcpy(text, e->value, e->nvalue);
            text[e->nvalue] = 0;
            number = idist__parse_int(text, INT64_MIN, INT64_MAX, &old);
        }

        if (!number)
            return idist__fail(IDIST_ERR_ARG, "store: add to a key whose value is no number");
    }

    r->number = (int64_t)((uint64_t)old + (uint64_t)r->number);
    snprintf(text, sizeof text, "%lld", (long long)r->number);

    return idist__table_put(t, r->key, text, strlen(text));
}

// Gives a value to the caller; IDIST_ERR_TRUNCATED when it does not fit.
static idist_status idist__req_give(idist__req *r, const void *value, size_t nbytes) {
    r->nbytes = nbytes;
    if (nbytes > r->capacity)
        return idist__fail(IDIST_ERR_TRUNCATED, "store: the value has %zu bytes, the buffer %zu",
                           nbytes, r->capacity);
    if (nbytes) memcpy(r->value, value, nbytes);
    return IDIST_OK;
}

// Carries a request out. *wait is set when it has to be tried again after the table changed;
// *changed when it did change the table (then r->key holds what idist__table_find finds).
static idist_status idist__table_apply(idist__table *t, idist__req *r, bool *wait, bool *changed) {
    idist__entry *e;
    idist_status s;

    *wait = *changed = false;

    switch (r->op) {
    case IDIST__REQ_SET:
        *changed = true;
        return idist__table_put(t, r->key, r->a.data, r->a.nbytes);
    case IDIST__REQ_COMPARE_SET:
        e = *idist__table_find(t, r->key.data, r->key.nbytes);
        if ((e ? e->nvalue : 0) == r->a.nbytes &&
            (!r->a.nbytes || memcmp(e->value, r->a.data, r->a.nbytes) == 0)) {
            if ((s = idist__table_put(t, r->key, r->b.data, r->b.nbytes)) != IDIST_OK) return s;
            *changed = true;
            return idist__req_give(r, r->b.data, r->b.nbytes);
        }

        return idist__req_give(r, e ? e->value : NULL, e ? e->nvalue : 0);
    case IDIST__REQ_GET:
        e = *idist__table_find(t, r->key.data, r->key.nbytes);
        *wait = !e;
        return e ? idist__req_give(r, e->value, e->nvalue) : IDIST_OK;
    case IDIST__REQ_ADD:
        s = idist__table_add(t, r);
        *changed = s == IDIST_OK;
        return s;
    case IDIST__REQ_CHECK: r->flag = idist__table_has_all(t, r); return IDIST_OK;
    case IDIST__REQ_WAIT: *wait = !idist__table_has_all(t, r); return IDIST_OK;
    case IDIST__REQ_NUM_KEYS: r->number = (int64_t)t->count; return IDIST_OK;
    case IDIST__REQ_DELETE: *changed = r->flag = idist__table_remove(t, r->key); return IDIST_OK;
    default: return idist__fail(IDIST_ERR_ARG, "store: unknown request %d", r->op);
    }
}

// Which keys a waiting request lacks, for the time-out's text.
static idist_status idist__req_late(const idist__req *r, idist__table *t) {
    const idist__blob *missing = r->nkeys ? &r->keys[0] : &r->key;
    size_t i;

    for (i = 0; t && i < r->nkeys; i++)
        if (!*idist__table_find(t, r->keys[i].data, r->keys[i].nbytes)) {
            missing = &r->keys[i];
            break;
        }

    return idist__fail(IDIST_ERR_TIMEOUT, "store: the key \"%.*s\" did not appear in time",
                       (int)missing->nbytes, missing->data);
}

// ---- in this process ----

typedef struct idist__mem_store {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    idist__table table;
} idist__mem_store;

static idist_status idist__mem_store_run(idist_store *store, idist__req *r) {
    idist__mem_store *m = (idist__mem_store *)store->impl;
    bool wait, changed;
    idist_status s;

    pthread_mutex_lock(&m->lock);

    for (;;) {
        s = idist__table_apply(&m->table, r, &wait, &changed);
        if (changed) pthread_cond_broadcast(&m->changed);
        if (!wait) break;

        if (idist__os_ms_until(r->deadline_ns) == 0) {
            s = idist__req_late(r, &m->table);
            break;
        }

        idist__os_cond_wait(&m->changed, &m->lock, r->deadline_ns);
    }

    pthread_mutex_unlock(&m->lock);

    return s;
}

static void idist__mem_store_close(idist_store *store) {
    idist__mem_store *m = (idist__mem_store *)store->impl;
    idist__table_clear(&m->table);
    pthread_cond_destroy(&m->changed);
    pthread_mutex_destroy(&m->lock);
    idist__mem_free(&store->mem, m);
}

static idist_status idist__mem_store_open(idist_store *store) {
    idist__mem_store *m = (idist__mem_store *)idist__mem_alloc(&store->mem, sizeof *m);

    if (!m) return IDIST_ERR_NO_MEMORY;
    m->table.mem = store->mem;
    pthread_mutex_init(&m->lock, NULL);
    idist__os_cond_init(&m->changed);
    store->impl = m;
    store->run = idist__mem_store_run;
    store->close = idist__mem_store_close;

    return IDIST_OK;
}

// ---- in a file ----
//
//   0   "IDSTORE1"
//   8   number of committed bytes after the header (u64)
//   16  records: u32 nkey, u32 nvalue (0xffffffff: deleted), key, value
//
// A key that begins with a zero byte is a will: the place of a byte (u64) that its maker keeps
// locked; its value is what is to be set when that lock is gone: u32 nkey, key, value. Any process
// that waits carries it out.
//
// Byte 0 of the file stays locked by the server as long as it lives: a file without that lock was
// left by a dead job. Byte 1 is locked by whoever reads or appends. The locks belong to the open
// file (F_OFD_*), not to the process, so threads may be ranks. A writer that dies halfway leaves
// bytes beyond the committed ones, which the next writer overwrites.

enum {
    IDIST__OFD_GETLK = 36,
    IDIST__OFD_SETLK = 37,
    IDIST__OFD_SETLKW = 38
}; // names that strict modes hide

typedef struct idist__file_store {
    pthread_mutex_t lock;
    int fd;
    bool server;
    char *path;
    idist__table table; // what the records read so far amount to
    idist__table wills; // the same, of wills
    uint64_t applied;   // bytes of records in both
    uint64_t will_at;   // the byte that is locked for our own will; 0: none
    int64_t looked_ns;  // when the makers of the wills were last looked for
} idist__file_store;

enum { IDIST__WILL_KEY_BYTES = 9, IDIST__WILLS_MS = 50 };

static int idist__file_lock(int fd, int cmd, short type, off_t byte, struct flock *fl) {
    memset(fl, 0, sizeof *fl);
    fl->l_type = type;
    fl->l_whence = SEEK_SET;
    fl->l_start = byte;
    fl->l_len = 1;
    return fcntl(fd, cmd, fl);
}

// Takes or gives back the lock of the records. Holders keep it for microseconds, unless they are
// stopped; a dead holder's lock is gone.
static bool idist__file_records(int fd, bool take, int64_t deadline_ns) {
    struct flock fl;

    for (;;) {
        if (idist__file_lock(fd, IDIST__OFD_SETLK, take ? F_WRLCK : F_UNLCK, 1, &fl) == 0)
            return true;
        if (errno == EINTR) continue;
        if ((errno != EAGAIN && errno != EACCES) || idist__os_ms_until(deadline_ns) == 0)
            return false;
        idist__os_pause_ms(1);
    }
}

static idist_status idist__file_late(const idist__file_store *f) {
    return idist__fail(
        IDIST_ERR_TIMEOUT,
        "store: %s stays locked: a process that uses it is stopped, or the file system cannot lock",
        f->path);
}

static bool idist__file_server_lives(int fd) {
    struct flock fl;
    return idist__file_lock(fd, IDIST__OFD_GETLK, F_WRLCK, 0, &fl) == 0 && fl.l_type != F_UNLCK;
}

// Reads into `to`, or else writes what is at `from`.
static bool idist__file_move(int fd, char *to, const char *from, size_t nbytes, uint64_t at) {
    size_t done = 0;

    while (done < nbytes) {
        off_t place = (off_t)(at + done);
        ssize_t n = to ? pread(fd, to + done, nbytes - done, place)
                       : pwrite(fd, from + done, nbytes - done, place);
        if (n <= 0 && !(n < 0 && errno == EINTR)) return false;
        if (n > 0) done += (size_t)n;
    }

    return true;
}

static bool idist__file_pread(int fd, void *buf, size_t nbytes, uint64_t at) {
    return idist__file_move(fd, (char *)buf, NULL, nbytes, at);
}

static bool idist__file_pwrite(int fd, const void *buf, size_t nbytes, uint64_t at) {
    return idist__file_move(fd, NULL, (const char *)buf, nbytes, at);
}

static idist__table *idist__file_table(idist__file_store *f, idist__blob key) {
    bool will = key.nbytes == IDIST__WILL_KEY_BYTES && !key.data[0];
    return will ? &f->wills : &f->table;
}

static void idist__file_forget(idist__file_store *f) {
    idist__table_clear(&f->table);
    idist__table_clear(&f->wills);
    f->applied = 0;
}

// Brings the tables up to date. Called with the records locked.
static idist_status idist__file_replay(idist__file_store *f) {
    char magic[8];
    uint64_t committed;

    if (!idist__file_pread(f->fd, magic, 8, 0) || memcmp(magic, "IDSTORE1", 8) != 0 ||
        !idist__file_pread(f->fd, &committed, 8, 8))
        return idist__fail(IDIST_ERR_ARG, "store: %s is no store file", f->path);

    while (f->applied < committed) {
        uint32_t size[2];
        idist__blob key;
        size_t nvalue;
        char *buf;
        idist_status s = IDIST_OK;
        if (!idist__file_pread(f->fd, size, 8, 16 + f->applied))
            return idist__fail_errno("reading the store file", errno);
        nvalue = size[1] == 0xffffffffu ? 0 : size[1];
        if (size[0] > IDIST__KEY_MAX + 1 || nvalue > IDIST__VALUE_MAX)
            return idist__fail(IDIST_ERR_ARG, "store: %s is damaged", f->path);
        buf = (char *)idist__mem_alloc(&f->table.mem, size[0] + nvalue);
        if (!buf) return IDIST_ERR_NO_MEMORY;
        key.data = buf;
        key.nbytes = size[0];
        if (!idist__file_pread(f->fd, buf, size[0] + nvalue, 24 + f->applied))
            s = idist__fail_errno("reading the store file", errno);
        else if (size[1] == 0xffffffffu) idist__table_remove(idist__file_table(f, key), key);
        else s = idist__table_put(idist__file_table(f, key), key, buf + size[0], nvalue);
        idist__mem_free(&f->table.mem, buf);
        if (s != IDIST_OK) return s;
        f->applied += 8 + size[0] + nvalue;
    }

    return IDIST_OK;
}

// Appends what a request did to its key.
static idist_status idist__file_append(idist__file_store *f, idist__blob key) {
    idist__entry *e = *idist__table_find(idist__file_table(f, key), key.data, key.nbytes);
    uint32_t size[2];
    uint64_t at = 16 + f->applied, committed;

    size[0] = (uint32_t)key.nbytes;
    size[1] = e ? (uint32_t)e->nvalue : 0xffffffffu;
    committed = f->applied + 8 + key.nbytes + (e ? e->nvalue : 0);
    if (!idist__file_pwrite(f->fd, size, 8, at) ||
        !idist__file_pwrite(f->fd, key.data, key.nbytes, at + 8) ||
        (e && !idist__file_pwrite(f->fd, e->value, e->nvalue, at + 8 + key.nbytes)) ||
        !idist__file_pwrite(f->fd, &committed, 8, 8))
        return idist__fail_errno("writing the store file", errno);
    f->applied = committed;

    return IDIST_OK;
}

// The key of the will whose maker locks the byte `at`.
static idist__blob idist__will_key(uint64_t at, char *buf) {
    idist__blob key;

    buf[0] = 0;
    memcpy(buf + 1, &at, sizeof at);
    key.data = buf;
    key.nbytes = IDIST__WILL_KEY_BYTES;
    return key;
}

// Takes our will back, if there is one.
static idist_status idist__file_revoke(idist__file_store *f) {
    char buf[IDIST__WILL_KEY_BYTES];
    idist__blob key = idist__will_key(f->will_at, buf);
    idist_status status = IDIST_OK;
    struct flock fl;

    if (!f->will_at) return IDIST_OK;
    if (idist__table_remove(&f->wills, key)) status = idist__file_append(f, key);
    idist__file_lock(f->fd, IDIST__OFD_SETLK, F_UNLCK, (off_t)f->will_at, &fl);
    f->will_at = 0;

    return status;
}

// The place of its record, which nobody else has, names the byte to be locked. An empty key only
// takes the old will back.
static idist_status idist__file_bequeath(idist__file_store *f, const idist__req *r) {
    char buf[IDIST__WILL_KEY_BYTES];
    uint32_t nkey = (uint32_t)r->key.nbytes;
    size_t nbytes = sizeof nkey + r->key.nbytes + r->a.nbytes;
    idist_status status = idist__file_revoke(f);
    idist__blob key;
    struct flock fl;
    char *value;

    if (status != IDIST_OK || !nkey) return status;
    value = (char *)idist__mem_alloc(&f->table.mem, nbytes);
    if (!value) return IDIST_ERR_NO_MEMORY;
    memcpy(value, &nkey, sizeof nkey);
    memcpy(value + sizeof nkey, r->key.data, nkey);
    memcpy(value + sizeof nkey + nkey, r->a.data, r->a.nbytes);

    f->will_at = 16 + f->applied;
    key = idist__will_key(f->will_at, buf);
    if (idist__file_lock(f->fd, IDIST__OFD_SETLK, F_WRLCK, (off_t)f->will_at, &fl) != 0)
        status = idist__fail_errno("locking the store file", errno);
    else status = idist__table_put(&f->wills, key, value, nbytes);
    if (status == IDIST_OK) status = idist__file_append(f, key);
    idist__mem_free(&f->table.mem, value);

    return status;
}

// Sets what the maker of a will wanted to be set.
static idist_status idist__file_execute(idist__file_store *f, const idist__entry *will) {
    char buf[IDIST__WILL_KEY_BYTES];
    idist__blob key, will_key = {buf, IDIST__WILL_KEY_BYTES};
    uint32_t nkey;
    idist_status status;

    memcpy(buf, will->key, sizeof buf);
    memcpy(&nkey, will->value, sizeof nkey);
    key.data = will->value + sizeof nkey;
    key.nbytes = nkey;
    status = idist__table_put(&f->table, key, key.data + nkey, will->nvalue - sizeof nkey - nkey);
    if (status == IDIST_OK) status = idist__file_append(f, key);
    idist__table_remove(&f->wills, will_key);
    if (status == IDIST_OK) status = idist__file_append(f, will_key);

    return status;
}

// Whether the process that made a will has ended without taking it back.
static bool idist__file_will_is_due(const idist__file_store *f, const idist__entry *will) {
    uint64_t at;
    uint32_t nkey = 0;
    struct flock fl;

    memcpy(&at, will->key + 1, sizeof at);
    if (will->nvalue >= sizeof nkey) memcpy(&nkey, will->value, sizeof nkey);
    if (at == f->will_at || !nkey || nkey > will->nvalue - sizeof nkey) return false;

    return idist__file_lock(f->fd, IDIST__OFD_GETLK, F_WRLCK, (off_t)at, &fl) == 0 &&
           fl.l_type == F_UNLCK;
}

// Carries out the wills of processes that ended. Called with the records locked.
static idist_status idist__file_wills(idist__file_store *f) {
    int64_t now = idist__os_now_ns();
    idist_status status = IDIST_OK;
    size_t i;

    if (!f->wills.count || now - f->looked_ns < IDIST__WILLS_MS * IDIST__MS) return IDIST_OK;
    f->looked_ns = now;

    for (i = 0; i < IDIST__COUNT_OF(f->wills.bucket); i++) {
        idist__entry *e, *next;

        for (e = f->wills.bucket[i]; e && status == IDIST_OK; e = next) {
            next = e->next;
            if (idist__file_will_is_due(f, e)) status = idist__file_execute(f, e);
        }
    }

    return status;
}

// Carries out a request. Called with the records locked.
static idist_status idist__file_apply(idist__file_store *f, idist__req *r, bool *wait,
                                      bool *changed) {
    idist_status status = idist__file_replay(f);

    if (status == IDIST_OK) status = idist__file_wills(f);
    if (status != IDIST_OK) return status;
    if (r->op == IDIST__REQ_WILL) return idist__file_bequeath(f, r);
    status = idist__table_apply(&f->table, r, wait, changed);
    return *changed ? idist__file_append(f, r->key) : status;
}

static idist_status idist__file_request(idist__file_store *f, idist__req *r, bool *wait) {
    bool changed = false;
    idist_status s;

    if (!idist__file_records(f->fd, true, r->deadline_ns)) return idist__file_late(f);
    s = idist__file_apply(f, r, wait, &changed);
    if (s != IDIST_OK) idist__file_forget(f); // the tables may be ahead of the file: read it anew
    idist__file_records(f->fd, false, r->deadline_ns);

    if (s == IDIST_OK && (*wait || changed || r->op == IDIST__REQ_CHECK) && !f->server &&
        !idist__file_server_lives(f->fd))
        s = idist__fail(IDIST_ERR_PEER_LOST, "store: the process that owns %s ended", f->path);
    if (s == IDIST_OK && *wait && idist__os_ms_until(r->deadline_ns) == 0)
        s = idist__req_late(r, &f->table);

    return s;
}

static idist_status idist__file_store_run(idist_store *store, idist__req *r) {
    idist__file_store *f = (idist__file_store *)store->impl;
    int pause_ms = 1;

    for (;;) {
        bool wait = false;
        idist_status s;
        pthread_mutex_lock(&f->lock);
        s = idist__file_request(f, r, &wait);
        pthread_mutex_unlock(&f->lock);
        if (s != IDIST_OK || !wait) return s;
        idist__os_pause_ms(pause_ms);
        if (pause_ms < 16) pause_ms *= 2;
    }
}

static bool idist__file_is_at(int fd, const char *path);

static void idist__file_store_close(idist_store *store) {
    idist__file_store *f = (idist__file_store *)store->impl;

    if (f->server && f->fd >= 0 && idist__file_is_at(f->fd, f->path)) unlink(f->path);
    idist__os_close(&f->fd);
    idist__file_forget(f);
    pthread_mutex_destroy(&f->lock);
    idist__mem_free(&store->mem, f->path);
    idist__mem_free(&store->mem, f);
}

// Whether a file may be emptied: it is empty, or a store's.
static bool idist__file_is_store(int fd) {
    struct stat st;
    char magic[8];
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) return false;
    return st.st_size == 0 ||
           (idist__file_pread(fd, magic, 8, 0) && memcmp(magic, "IDSTORE1", 8) == 0);
}

// Whether the path still leads to the open file: a server that ends removes its file, perhaps
// between our open and our lock.
static bool idist__file_is_at(int fd, const char *path) {
    struct stat a, b;
    return fstat(fd, &a) == 0 && stat(path, &b) == 0 && a.st_dev == b.st_dev &&
           a.st_ino == b.st_ino;
}

// The server makes the file its own: an empty table under the lock of the living.
static idist_status idist__file_claim(idist__file_store *f, int64_t deadline_ns) {
    struct flock fl;
    uint64_t zero = 0;
    idist_status s = IDIST_OK;

    for (;;) {
        f->fd = open(f->path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (f->fd < 0)
            return idist__fail(IDIST_ERR_SYSTEM, "store: %s cannot be opened: %s", f->path,
                               strerror(errno));
        if (!idist__file_records(f->fd, true, deadline_ns)) return idist__file_late(f);
        if (idist__file_is_at(f->fd, f->path)) break;
        idist__os_close(&f->fd);
    }

    if (idist__file_lock(f->fd, IDIST__OFD_SETLK, F_WRLCK, 0, &fl) != 0)
        s = idist__fail(IDIST_ERR_ADDR_IN_USE, "store: %s belongs to a job that is running",
                        f->path);
    else if (!idist__file_is_store(f->fd))
        s = idist__fail(IDIST_ERR_ARG, "store: %s exists and is no store file; it is left alone",
                        f->path);
    else if (ftruncate(f->fd, 0) != 0 || !idist__file_pwrite(f->fd, "IDSTORE1", 8, 0) ||
             !idist__file_pwrite(f->fd, &zero, 8, 8))
        s = idist__fail_errno("writing the store file", errno);
    idist__file_records(f->fd, false, deadline_ns);
    if (s != IDIST_OK) idist__os_close(&f->fd); // before anybody takes us for the owner

    return s;
}

// The others wait for a file whose server lives, and look it up by name again each time: it may
// have been replaced.
static idist_status idist__file_join(idist__file_store *f, int64_t deadline_ns) {
    for (;;) {
        bool alive = false;
        char magic[8];
        f->fd = open(f->path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);

        if (f->fd >= 0 && idist__file_records(f->fd, true, deadline_ns)) {
            alive = idist__file_server_lives(f->fd) && idist__file_pread(f->fd, magic, 8, 0) &&
                    memcmp(magic, "IDSTORE1", 8) == 0;
            idist__file_records(f->fd, false, deadline_ns);
        }

        if (alive) return IDIST_OK;
        if (f->fd < 0 && errno != ENOENT)
            return idist__fail(IDIST_ERR_SYSTEM, "store: %s cannot be opened: %s", f->path,
                               strerror(errno));
        idist__os_close(&f->fd);
        if (idist__os_ms_until(deadline_ns) == 0)
            return idist__fail(IDIST_ERR_TIMEOUT,
                               "store: no living process owns %s: rank 0 has not started", f->path);
        idist__os_pause_ms(5);
    }
}

static idist_status idist__file_store_open(idist_store *store, const char *path, bool server,
                                           int64_t deadline_ns) {
    idist__file_store *f = (idist__file_store *)idist__mem_alloc(&store->mem, sizeof *f);

    if (!f) return IDIST_ERR_NO_MEMORY;
    f->fd = -1;
    f->table.mem = f->wills.mem = store->mem;
    f->server = server;
    pthread_mutex_init(&f->lock, NULL);
    store->impl = f;
    store->run = idist__file_store_run;
    store->close = idist__file_store_close;
    f->path = (char *)idist__mem_alloc(&store->mem, strlen(path) + 1);
    if (!f->path) return IDIST_ERR_NO_MEMORY;
    memcpy(f->path, path, strlen(path) + 1);

    return server ? idist__file_claim(f, deadline_ns) : idist__file_join(f, deadline_ns);
}

// ---- behind a socket: the wire ----
//
// torch's TCPStore: one byte of request, strings as u64 length and bytes, every key with a '/'
// before it. The first request is VALIDATE with a magic number. A client sends WAIT before GET. See
// IDIST__REQ_* for the numbers.

#define IDIST__STORE_MAGIC 0x3C85F7CEu
#define IDIST__STORE_REQUEST_MAX ((size_t)IDIST__VALUE_MAX + 64 * 1024)

typedef struct idist__reader {
    const char *p;
    size_t left;
    bool more; // ran out of bytes
    bool bad;  // a length is beyond what is allowed
} idist__reader;

static uint64_t idist__read_u64(idist__reader *r) {
    uint64_t v = 0;

    if (r->more || r->left < 8) r->more = true;
    else {
        memcpy(&v, r->p, 8);
        r->p += 8;
        r->left -= 8;
    }

    return v;
}

static idist__blob idist__read_blob(idist__reader *r, uint64_t max) {
    idist__blob b;
    uint64_t n = idist__read_u64(r);

    b.data = r->p;
    b.nbytes = 0;
    if (r->more) return b;

    if (n > max) r->bad = true;
    else if (n > r->left) r->more = true;
    else {
        b.nbytes = (size_t)n;
        r->p += n;
        r->left -= (size_t)n;
    }

    return b;
}

// Reads one request from the front of a buffer. > 0: its size, 0: more bytes are needed, -1:
// nonsense. The request points into the buffer; keys has room for `maxkeys`.
static ptrdiff_t idist__store_parse(const char *buf, size_t nbytes, idist__req *req,
                                    idist__blob *keys, size_t maxkeys) {
    idist__reader r;
    uint32_t magic;
    uint64_t i, n;

    memset(req, 0, sizeof *req);
    memset(&r, 0, sizeof r);
    if (!nbytes) return 0;
    r.p = buf + 1;
    r.left = nbytes - 1;
    req->op = (unsigned char)buf[0];

    switch (req->op) {
    case IDIST__REQ_VALIDATE:
        if (r.left < 4) return 0;
        memcpy(&magic, r.p, sizeof magic); // in the client's byte order, as all numbers here and in
                                           // torch's protocol
        req->number = (int64_t)magic;
        r.p += sizeof magic;
        break;
    case IDIST__REQ_SET:
    case IDIST__REQ_WILL:
        req->key = idist__read_blob(&r, IDIST__KEY_MAX + 1);
        if (!r.more && !r.bad) req->a = idist__read_blob(&r, IDIST__VALUE_MAX);
        break;
    case IDIST__REQ_COMPARE_SET:
        req->key = idist__read_blob(&r, IDIST__KEY_MAX + 1);
        if (!r.more && !r.bad) req->a = idist__read_blob(&r, IDIST__VALUE_MAX / 2);
        if (!r.more && !r.bad) req->b = idist__read_blob(&r, IDIST__VALUE_MAX / 2);
        break;
    case IDIST__REQ_GET:
    case IDIST__REQ_DELETE: req->key = idist__read_blob(&r, IDIST__KEY_MAX + 1); break;
    case IDIST__REQ_ADD:
        req->key = idist__read_blob(&r, IDIST__KEY_MAX + 1);
        if (!r.more && !r.bad) req->number = (int64_t)idist__read_u64(&r);
        break;
    case IDIST__REQ_CHECK:
    case IDIST__REQ_WAIT:
        n = idist__read_u64(&r);
        if (!r.more && n > maxkeys) r.bad = true;
        for (i = 0; i < n && !r.more && !r.bad; i++)
            keys[i] = idist__read_blob(&r, IDIST__KEY_MAX + 1);
        req->keys = keys;
        req->nkeys = (size_t)n;
        break;
    case IDIST__REQ_NUM_KEYS:
    case IDIST__REQ_CANCEL_WAIT: break;
    default: return -1;
    }

    if (r.bad) return -1;

    return r.more ? 0 : r.p - buf;
}

// ---- behind a socket: found by multicast ----
//
// "cast:GROUP:PORT/JOB". Who looks for the server asks the group, and the server answers the asker
// alone:
//
//     question | tag 16 | 0 2 |        answer | tag 16 | port 2 |        tag: HMAC(key, JOB), port:
//     big endian
//
// What is found this way is believed only after the handshake.

typedef struct idist__cast {
    int fd;
    idist__addr group;
    uint8_t tag[32];
    char ip[64]; // ours, where packets for the group leave
} idist__cast;

static idist_status idist__cast_open(idist__cast *c, const char *text, bool server,
                                     const uint8_t key[32]) {
    const char *job = strchr(text, '/'), *own = idist__os_env("IDIST_ADDR");
    char group[300];
    struct ip_mreq member;
    idist__addr a;
    idist_status s;
    int yes = 1;

    memset(&member, 0, sizeof member);
    snprintf(group, sizeof group, "tcp:%.*s", (int)(job - text), text);
    idist__hmac(key, "multicast", job, strlen(job), NULL, 0, c->tag);
    if ((s = idist__addr_parse(&c->group, group)) != IDIST_OK) return s;
    c->fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (c->fd < 0) return idist__fail_errno("socket", errno);
    if (own) s = idist__addr_tcp(&a, own, 0);
    if (s == IDIST_OK && own && a.sa.ss_family != AF_INET)
        s = idist__fail(IDIST_ERR_ENV, "store: IDIST_ADDR=%s: multicast takes an IPv4 address",
                        own);
    if (s != IDIST_OK) return s;
    a.nbytes = sizeof a.sa;
    if (!own && (connect(c->fd, (struct sockaddr *)&c->group.sa, c->group.nbytes) != 0 ||
                 getsockname(c->fd, (struct sockaddr *)&a.sa, &a.nbytes) != 0))
        return idist__fail(IDIST_ERR_SYSTEM,
                           "store: no way to %s (%s): set IDIST_ADDR to this host's address",
                           group + 4, strerror(errno));
    idist__addr_host_text(&a, c->ip, sizeof c->ip);
    idist__os_close(&c->fd); // a socket that was connected hears its peer only
    c->fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    member.imr_multiaddr = ((struct sockaddr_in *)&c->group.sa)->sin_addr;
    member.imr_interface = ((struct sockaddr_in *)&a.sa)->sin_addr;
    if (c->fd < 0 ||
        setsockopt(c->fd, IPPROTO_IP, IP_MULTICAST_IF, &member.imr_interface,
                   sizeof member.imr_interface) != 0 ||
        (server && (setsockopt(c->fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) != 0 ||
                    bind(c->fd, (struct sockaddr *)&c->group.sa, c->group.nbytes) != 0 ||
                    setsockopt(c->fd, IPPROTO_IP, IP_ADD_MEMBERSHIP, &member, sizeof member) != 0)))
        return idist__fail(IDIST_ERR_SYSTEM, "store: multicast to %s by the interface of %s%s: %s",
                           group + 4, c->ip, own ? " (IDIST_ADDR)" : "", strerror(errno));

    return IDIST_OK;
}

// The server's part: answers all questions that are there.
static void idist__cast_answer(const idist__cast *c, int port) {
    uint8_t msg[18];
    idist__addr a;

    a.nbytes = sizeof a.sa;

    while (recvfrom(c->fd, msg, sizeof msg, MSG_TRUNC, (struct sockaddr *)&a.sa, &a.nbytes) >= 0) {
        if (memcmp(msg, c->tag, 16) == 0 && !msg[16] && !msg[17]) {
            msg[16] = (uint8_t)(port >> 8);
            msg[17] = (uint8_t)port;
            sendto(c->fd, msg, sizeof msg, MSG_NOSIGNAL, (struct sockaddr *)&a.sa,
                   a.nbytes); // lost: it asks again
        }

        a.nbytes = sizeof a.sa;
    }
}

// The others': asks until somebody says where the server is.
static idist_status idist__cast_ask(const idist__cast *c, char *addr_text, size_t cap,
                                    int64_t deadline_ns) {
    uint8_t msg[18];
    char ip[64];
    idist__addr a;

    for (;;) {
        memset(msg, 0, sizeof msg);
        memcpy(msg, c->tag, 16);
        sendto(c->fd, msg, sizeof msg, MSG_NOSIGNAL, (const struct sockaddr *)&c->group.sa,
               c->group.nbytes);
        idist__sock_wait(c->fd, POLLIN, idist__os_deadline(100));

        for (;;) {
            a.nbytes = sizeof a.sa;
            if (recvfrom(c->fd, msg, sizeof msg, MSG_TRUNC, (struct sockaddr *)&a.sa, &a.nbytes) !=
                sizeof msg)
                break;
            if (memcmp(msg, c->tag, 16) != 0 || (!msg[16] && !msg[17])) continue;
            idist__addr_host_text(&a, ip, sizeof ip);
            snprintf(addr_text, cap, "tcp:%s:%d", ip, msg[16] << 8 | msg[17]);
            return IDIST_OK;
        }

        if (idist__os_ms_until(deadline_ns) == 0)
            return idist__fail(
                IDIST_ERR_TIMEOUT,
                "store: nobody in the multicast group has answered: rank 0 has not started, its "
                "secret or the "
                "size of its world is another one, or no multicast gets from there to %s",
                c->ip);
    }
}

// ---- behind a socket: the server ----

typedef struct idist__client { // one connection of the server
    int fd;
    bool valid;   // said the magic number
    bool waiting; // its first request waits for keys
    char *in;
    size_t nin, capin;
    char *out;
    size_t nout, capout;
    char *will; // key and value, behind each other: put into the table when the client is gone and
                // has not taken it back
    size_t will_nkey, will_nbytes;
} idist__client;

typedef struct idist__server {
    idist_allocator mem;
    uint8_t key[32];
    int listener, wake, port;
    idist__cast cast; // its fd is -1: nobody asks where we are
    pthread_t thread;
    bool running;
    idist__table table;
    idist__blob *keys; // scratch for the parser
    char *value;       // scratch for replies
    struct pollfd *polls;
    idist__porch porch;
    idist__client *clients[4096];
    int nclients;
    bool executed;   // a will: the table has changed
    int nrefused;    // handshakes that failed, for the text of a time-out
    int other_order; // one of them came from a machine of another byte order
    int no_fds;      // a connection could not be accepted for want of a descriptor
} idist__server;

// The client has gone without taking its will back. A value that stands there already stays.
static void idist__client_execute(idist__server *sv, const idist__client *c) {
    idist__blob key;

    key.data = c->will;
    key.nbytes = c->will_nkey;
    if (*idist__table_find(&sv->table, key.data, key.nbytes)) return;
    sv->executed = idist__table_put(&sv->table, key, c->will + c->will_nkey,
                                    c->will_nbytes - c->will_nkey) == IDIST_OK;
}

static void idist__server_drop(idist__server *sv, int i) {
    idist__client *c = sv->clients[i];

    idist__os_close(&c->fd);
    if (c->will_nkey) idist__client_execute(sv, c);
    idist__mem_free(&sv->mem, c->will);
    idist__mem_free(&sv->mem, c->in);
    idist__mem_free(&sv->mem, c->out);
    idist__mem_free(&sv->mem, c);
    sv->clients[i] = sv->clients[--sv->nclients];
}

static bool idist__buffer_reserve(const idist_allocator *mem, char **buf, size_t *cap, size_t used,
                                  size_t want) {
    size_t n = *cap ? *cap : 512;
    char *p;

    if (want <= *cap) return true;
    while (n < want) n *= 2;
    p = (char *)idist__mem_raw(mem, n);
    if (!p) return false;
    if (used) memcpy(p, *buf, used);
    idist__mem_free(mem, *buf);
    *buf = p;
    *cap = n;

    return true;
}

static bool idist__client_reply(idist__server *sv, idist__client *c, const void *data,
                                size_t nbytes) {
    if (!idist__buffer_reserve(&sv->mem, &c->out, &c->capout, c->nout, c->nout + nbytes))
        return false;
    if (nbytes) memcpy(c->out + c->nout, data, nbytes);
    c->nout += nbytes;
    return true;
}

static bool idist__client_answer(idist__server *sv, idist__client *c, const idist__req *r) {
    uint8_t byte = 0;
    uint64_t n = r->nbytes;
    int64_t number = r->number;

    switch (r->op) {
    case IDIST__REQ_GET:
    case IDIST__REQ_COMPARE_SET:
        return idist__client_reply(sv, c, &n, 8) && idist__client_reply(sv, c, r->value, r->nbytes);
    case IDIST__REQ_ADD:
    case IDIST__REQ_NUM_KEYS: return idist__client_reply(sv, c, &number, 8);
    case IDIST__REQ_DELETE: number = r->flag ? 1 : 0; return idist__client_reply(sv, c, &number, 8);
    case IDIST__REQ_CHECK: byte = r->flag ? 0 : 1; return idist__client_reply(sv, c, &byte, 1);
    case IDIST__REQ_WAIT: return idist__client_reply(sv, c, &byte, 1);
    default: return true;
    }
}

// An empty key takes the will back.
static bool idist__client_bequeath(idist__server *sv, idist__client *c, const idist__req *r) {
    idist__mem_free(&sv->mem, c->will);
    c->will_nkey = c->will_nbytes = 0;
    c->will = r->key.nbytes ? (char *)idist__mem_raw(&sv->mem, r->key.nbytes + r->a.nbytes) : NULL;
    if (!c->will) return !r->key.nbytes;
    memcpy(c->will, r->key.data, r->key.nbytes);
    if (r->a.nbytes) memcpy(c->will + r->key.nbytes, r->a.data, r->a.nbytes);
    c->will_nkey = r->key.nbytes;
    c->will_nbytes = r->key.nbytes + r->a.nbytes;

    return true;
}

// Carries out one request of a client. *wait: it has to be tried again when the table has changed.
// False: drop the client.
static bool idist__client_request(idist__server *sv, idist__client *c, idist__req *r, bool *wait,
                                  bool *changed) {
    static const uint64_t gone = IDIST__NO_VALUE;
    bool touched = false;

    *wait = false;
    if (r->op == IDIST__REQ_VALIDATE) return c->valid = r->number == (int64_t)IDIST__STORE_MAGIC;
    if (!c->valid) return false;
    if (r->op == IDIST__REQ_CANCEL_WAIT)
        return true; // nothing waits any more: it crossed our answer
    if (r->op == IDIST__REQ_WILL) return idist__client_bequeath(sv, c, r);
    r->value = sv->value;
    r->capacity = IDIST__VALUE_MAX;

    if (idist__table_apply(&sv->table, r, wait, &touched) != IDIST_OK) {
        if (r->op != IDIST__REQ_ADD) return false;
        r->number = IDIST__NOT_A_NUMBER;
    }

    if (touched) *changed = true;

    if (*wait &&
        r->op ==
            IDIST__REQ_GET) { // the key went between the client's WAIT and its GET: it waits again
        *wait = false;
        return idist__client_reply(sv, c, &gone, 8);
    }

    return *wait || idist__client_answer(sv, c, r);
}

// Serves what lies in a client's buffer, up to a request that has to wait; while it does, the
// client is silent, or cancels. *changed is set when the table changed. False: drop the client.
static bool idist__client_serve(idist__server *sv, idist__client *c, bool *changed) {
    static const uint8_t canceled = 1;
    size_t used = 0;

    c->waiting = false;

    while (!c->waiting) {
        idist__req r;
        bool wait;
        ptrdiff_t n =
            idist__store_parse(c->in + used, c->nin - used, &r, sv->keys, IDIST__KEYS_MAX);
        if (n == 0 && c->nin - used < IDIST__STORE_REQUEST_MAX) break;
        if (n <= 0 || !idist__client_request(sv, c, &r, &wait, changed)) return false;

        if (wait && c->nin - used > (size_t)n &&
            c->in[used + (size_t)n] == IDIST__REQ_CANCEL_WAIT) {
            n++;
            if (!idist__client_reply(sv, c, &canceled, 1)) return false;
        } else if (wait) {
            c->waiting = true;
            break;
        }

        used += (size_t)n;
    }

    if (used) memmove(c->in, c->in + used, c->nin - used);
    c->nin -= used;

    return c->nout < 8 * IDIST__STORE_REQUEST_MAX; // it asks and asks, and never reads
}

// Reads what has come. False: drop the client.
static bool idist__client_read(idist__server *sv, idist__client *c) {
    for (;;) {
        ptrdiff_t n;
        if (c->nin >= IDIST__STORE_REQUEST_MAX)
            return true; // a whole request is there: serve it first
        if (!idist__buffer_reserve(&sv->mem, &c->in, &c->capin, c->nin, c->nin + 4096))
            return false;
        n = idist__sock_read(c->fd, c->in + c->nin, c->capin - c->nin);
        if (n <= 0) return n == 0;
        c->nin += (size_t)n;
    }
}

static bool idist__client_write(idist__client *c) {
    size_t sent = 0;

    while (sent < c->nout) {
        struct iovec part;
        ptrdiff_t n;
        part.iov_base = c->out + sent;
        part.iov_len = c->nout - sent;
        n = idist__sock_write(c->fd, &part, 1);
        if (n < 0) return false;
        if (n == 0) break;
        sent += (size_t)n;
    }

    if (sent) memmove(c->out, c->out + sent, c->nout - sent);
    c->nout -= sent;

    return true;
}

// Takes newcomers onto the porch while it has room.
static void idist__server_accept(idist__server *sv) {
    idist__handshake *h;

    while ((h = idist__porch_place(&sv->porch)) != NULL) {
        int fd = idist__sock_accept(sv->listener);

        if (fd < 0 && (errno == EMFILE || errno == ENFILE)) {
            if (!idist__porch_make_way(&sv->porch))
                __atomic_store_n(&sv->no_fds, 1, __ATOMIC_RELAXED);
            idist__os_pause_ms(1); // no spin while descriptors are short
        }

        if (fd < 0) return;
        idist__os_close(&h->fd);
        idist__auth_begin(h, fd, true, sv->key, IDIST__ROLE_STORE, 0, 0, 0,
                          idist__os_deadline(IDIST__PORCH_MS));
        h->ready = true;
    }
}

// Handshakes go on; whoever is through becomes a client.
static void idist__server_porch(idist__server *sv) {
    int i;

    for (i = 0; i < IDIST__PORCH; i++) {
        idist__handshake *h = &sv->porch.place[i];
        bool done = false;
        idist__client *c;
        if (h->fd >= 0 && idist__os_now_ns() >= h->deadline_ns) idist__os_close(&h->fd);
        if (h->fd < 0 || !h->ready) continue;
        h->ready = false;

        if (idist__auth_step(h, &done) != IDIST_OK) {
            if (idist__auth_other_order(h)) __atomic_store_n(&sv->other_order, 1, __ATOMIC_RELAXED);
            idist__os_close(&h->fd);
            __atomic_add_fetch(&sv->nrefused, 1, __ATOMIC_RELAXED);
        }

        if (h->fd < 0 || !done) continue;
        c = sv->nclients < (int)IDIST__COUNT_OF(sv->clients)
                ? (idist__client *)idist__mem_alloc(&sv->mem, sizeof *c)
                : NULL;
        if (c) {
            c->fd = h->fd;
            sv->clients[sv->nclients++] = c;
            h->fd = -1;
        } else {
            idist__os_close(&h->fd);
        }
    }
}

static bool idist__server_client(idist__server *sv, idist__client *c, bool *changed) {
    bool alive = idist__client_read(sv, c); // what it said before it left still counts
    return idist__client_serve(sv, c, changed) && alive && idist__client_write(c);
}

static void *idist__server_main(void *arg) {
    idist__server *sv = (idist__server *)arg;
    struct pollfd *fds = sv->polls;

    for (;;) {
        int i, n = sv->nclients, strangers;
        bool changed = false, room = idist__porch_place(&sv->porch) != NULL;
        fds[0].fd = sv->wake;
        fds[1].fd = room ? sv->listener : -1;
        fds[2].fd = sv->cast.fd;
        fds[0].events = fds[1].events = fds[2].events = POLLIN;

        for (i = 0; i < n; i++) {
            fds[i + 3].fd = sv->clients[i]->fd;
            fds[i + 3].events = (short)(POLLIN | (sv->clients[i]->nout ? POLLOUT : 0));
        }

        strangers = idist__porch_poll(&sv->porch, fds + n + 3);
        i = !strangers ? -1 : room ? 100 : 10;
        if (poll(fds, (nfds_t)n + 3 + (nfds_t)strangers, i) < 0 && errno != EINTR) return NULL;
        if (fds[0].revents) return NULL;
        idist__porch_polled(&sv->porch, fds + n + 3);
        for (i = n - 1; i >= 0; i--) // downwards: a dropped client is replaced by the last one
            if (fds[i + 3].revents && !idist__server_client(sv, sv->clients[i], &changed))
                idist__server_drop(sv, i);

        while (changed || sv->executed) {
            changed = sv->executed = false;

            for (i = sv->nclients - 1; i >= 0; i--) {
                idist__client *c = sv->clients[i];
                if (c->waiting && !(idist__client_serve(sv, c, &changed) && idist__client_write(c)))
                    idist__server_drop(sv, i);
            }
        }

        if (fds[2].revents) idist__cast_answer(&sv->cast, sv->port);
        if (room && fds[1].revents) idist__server_accept(sv);
        idist__server_porch(sv);
    }
}

static void idist__server_stop(idist__server *sv) {
    uint64_t one = 1;

    if (sv->running) {
        while (write(sv->wake, &one, sizeof one) < 0 && errno == EINTR) continue;
        pthread_join(sv->thread, NULL);
    }

    while (sv->nclients) idist__server_drop(sv, 0);
    idist__porch_close(&sv->porch);
    idist__os_close(&sv->wake);
    idist__os_close(&sv->listener);
    idist__os_close(&sv->cast.fd);
    idist__table_clear(&sv->table);
    idist__mem_free(&sv->mem, sv->keys);
    idist__mem_free(&sv->mem, sv->value);
    idist__mem_free(&sv->mem, sv->polls);
    idist__mem_free(&sv->mem, sv);
}

// Serves on a listening socket, which it owns from now on (as that of `cast`), in a thread of its
// own.
static idist_status idist__server_start(const idist_allocator *mem, int listener, int port,
                                        idist__cast *cast, const uint8_t key[32],
                                        idist__server **out) {
    idist__server *sv = (idist__server *)idist__mem_alloc(mem, sizeof *sv);

    *out = NULL;

    if (!sv) {
        idist__os_close(&listener);
        idist__os_close(&cast->fd);
        return IDIST_ERR_NO_MEMORY;
    }

    if (mem) sv->mem = *mem;
    sv->table.mem = sv->mem;
    memcpy(sv->key, key, 32);
    sv->listener = listener;
    sv->port = port;
    sv->cast = *cast;
    idist__porch_init(&sv->porch);
    sv->polls =
        (struct pollfd *)idist__mem_raw(mem, sizeof *sv->polls *
                                                 (IDIST__COUNT_OF(sv->clients) + IDIST__PORCH + 3));
    sv->keys = (idist__blob *)idist__mem_raw(mem, sizeof *sv->keys * IDIST__KEYS_MAX);
    sv->value = (char *)idist__mem_raw(mem, IDIST__VALUE_MAX);
    sv->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);

    if (!sv->polls || !sv->keys || !sv->value || sv->wake < 0) {
        idist_status s = sv->wake < 0 ? idist__fail_errno("eventfd", errno) : IDIST_ERR_NO_MEMORY;
        idist__server_stop(sv);
        return s;
    }

    if (idist__os_thread(&sv->thread, idist__server_main, sv) != 0) {
        idist__server_stop(sv);
        return idist__fail(IDIST_ERR_SYSTEM, "store: no thread for the server");
    }

    sv->running = true;
    *out = sv;

    return IDIST_OK;
}

// ---- behind a socket: the client ----

// How long a request that does not wait for keys may take, and how long a thread that waits keeps
// the connection to itself.
enum { IDIST__ANSWER_MS = 30000, IDIST__SLICE_MS = 50, IDIST__PROBE_MS = 5000 };

// How long a client that was turned away tries again.
enum { IDIST__RETRY_MS = 10000 };

typedef struct idist__tcp_store {
    pthread_mutex_t lock;
    int nwant; // threads that want the lock
    int fd;
    idist__server *server; // in the process that owns the table
    char *out;
    size_t nout, capout;
    idist_status broken; // the connection is unusable since this
} idist__tcp_store;

static void idist__put(idist_store *store, const void *data, size_t nbytes, bool *ok) {
    idist__tcp_store *t = (idist__tcp_store *)store->impl;
    *ok = *ok && idist__buffer_reserve(&store->mem, &t->out, &t->capout, t->nout, t->nout + nbytes);
    if (!*ok) return;
    if (nbytes) memcpy(t->out + t->nout, data, nbytes);
    t->nout += nbytes;
}

static void idist__put_blob(idist_store *store, idist__blob b, const char *prefix, bool *ok) {
    uint64_t n = b.nbytes + strlen(prefix);
    idist__put(store, &n, 8, ok);
    idist__put(store, prefix, strlen(prefix), ok);
    idist__put(store, b.data, b.nbytes, ok);
}

// One request on the wire. GET needs a WAIT before it, which is a request of its own.
static bool idist__tcp_encode(idist_store *store, const idist__req *r) {
    idist__tcp_store *t = (idist__tcp_store *)store->impl;
    uint8_t op = (uint8_t)r->op;
    uint64_t n = r->nkeys;
    size_t i;
    bool ok = true;

    t->nout = 0;
    idist__put(store, &op, 1, &ok);

    switch (r->op) {
    case IDIST__REQ_CHECK:
    case IDIST__REQ_WAIT:
        idist__put(store, &n, 8, &ok);
        for (i = 0; i < r->nkeys; i++) idist__put_blob(store, r->keys[i], "/", &ok);
        break;
    case IDIST__REQ_SET:
    case IDIST__REQ_WILL:
        idist__put_blob(store, r->key, r->key.nbytes || r->op == IDIST__REQ_SET ? "/" : "", &ok);
        idist__put_blob(store, r->a, "", &ok);
        break;
    case IDIST__REQ_COMPARE_SET:
        idist__put_blob(store, r->key, "/", &ok);
        idist__put_blob(store, r->a, "", &ok);
        idist__put_blob(store, r->b, "", &ok);
        break;
    case IDIST__REQ_ADD:
        idist__put_blob(store, r->key, "/", &ok);
        idist__put(store, &r->number, 8, &ok);
        break;
    case IDIST__REQ_GET:
    case IDIST__REQ_DELETE: idist__put_blob(store, r->key, "/", &ok); break;
    default: break;
    }

    return ok;
}

static idist_status idist__tcp_broken(idist__tcp_store *t) {
    int err = errno;

    if (err == ETIMEDOUT)
        t->broken = idist__fail(IDIST_ERR_TIMEOUT, "store: the server did not answer in time");
    else
        t->broken =
            idist__fail(IDIST_ERR_PEER_LOST, "store: the connection to the server broke: %s",
                        err ? strerror(err) : "it closed");

    return t->broken;
}

// The reply to GET and COMPARE_SET: into the caller's buffer, or thrown away when it does not fit.
static idist_status idist__tcp_value(idist__tcp_store *t, idist__req *r, int64_t deadline_ns) {
    uint64_t n, left;

    if (!idist__sock_read_all(t->fd, &n, 8, deadline_ns)) return idist__tcp_broken(t);
    r->flag = n == IDIST__NO_VALUE;
    if (r->flag) return IDIST_OK;

    if (n > IDIST__VALUE_MAX) {
        errno = EPROTO;
        return idist__tcp_broken(t);
    }

    r->nbytes = (size_t)n;

    if (n <= r->capacity) {
        if (n && !idist__sock_read_all(t->fd, r->value, (size_t)n, deadline_ns))
            return idist__tcp_broken(t);
        return IDIST_OK;
    }

    for (left = n; left;) {
        char waste[4096];
        size_t k = left < sizeof waste ? (size_t)left : sizeof waste;
        if (!idist__sock_read_all(t->fd, waste, k, deadline_ns)) return idist__tcp_broken(t);
        left -= k;
    }

    return idist__fail(IDIST_ERR_TRUNCATED, "store: the value has %zu bytes, the buffer %zu",
                       (size_t)n, r->capacity);
}

// Waits for keys, at most for a slice of time, after which other threads get their turn on the
// connection. r->flag: they are there.
static idist_status idist__tcp_wait_slice(idist_store *store, idist__req *r) {
    idist__tcp_store *t = (idist__tcp_store *)store->impl;
    int64_t slice = idist__os_deadline(IDIST__SLICE_MS),
            probe = idist__os_deadline(IDIST__PROBE_MS), soon;
    uint8_t answer = 0, cancel = IDIST__REQ_CANCEL_WAIT;
    bool there;

    do {
        if (slice > r->deadline_ns) slice = r->deadline_ns;
        there = idist__sock_read_all(t->fd, &answer, 1, slice);
        if (there || errno != ETIMEDOUT || slice == r->deadline_ns) break;
        slice = idist__os_deadline(IDIST__SLICE_MS);
        // Nobody else wants the connection: no need to ask anew, but for finding out whether the
        // server still answers.
    } while (!__atomic_load_n(&t->nwant, __ATOMIC_RELAXED) && idist__os_ms_until(probe) != 0);

    if (!there) {
        if (errno != ETIMEDOUT) return idist__tcp_broken(t);
        soon = idist__os_deadline(IDIST__ANSWER_MS);
        if (!idist__sock_write_all(t->fd, &cancel, 1, soon) ||
            !idist__sock_read_all(t->fd, &answer, 1, soon))
            return idist__tcp_broken(t);
    }

    r->flag = answer == 0;

    return IDIST_OK;
}

// One request and its answer, except that a WAIT may end without one (r->flag false).
static idist_status idist__tcp_exchange(idist_store *store, idist__req *r) {
    idist__tcp_store *t = (idist__tcp_store *)store->impl;
    int64_t soon = idist__os_deadline(IDIST__ANSWER_MS);
    uint8_t byte;

    if (t->broken != IDIST_OK)
        return idist__fail(t->broken, "store: the connection to the server broke earlier");
    if (!idist__tcp_encode(store, r)) return IDIST_ERR_NO_MEMORY;
    if (!idist__sock_write_all(t->fd, t->out, t->nout, soon)) return idist__tcp_broken(t);

    switch (r->op) {
    case IDIST__REQ_GET:
    case IDIST__REQ_COMPARE_SET: return idist__tcp_value(t, r, soon);
    case IDIST__REQ_ADD:
    case IDIST__REQ_NUM_KEYS:
    case IDIST__REQ_DELETE:
        if (!idist__sock_read_all(t->fd, &r->number, 8, soon)) return idist__tcp_broken(t);
        r->flag = r->number > 0;
        if (r->op == IDIST__REQ_ADD && r->number == IDIST__NOT_A_NUMBER)
            return idist__fail(IDIST_ERR_ARG, "store: add to a key whose value is no number");
        return IDIST_OK;
    case IDIST__REQ_CHECK:
        if (!idist__sock_read_all(t->fd, &byte, 1, soon)) return idist__tcp_broken(t);
        r->flag = byte == 0;
        return IDIST_OK;
    case IDIST__REQ_WAIT: return idist__tcp_wait_slice(store, r);
    default: return IDIST_OK;
    }
}

// SET has no answer of its own. A question behind it has: once that is answered, every other client
// sees the value.
static idist_status idist__tcp_confirm(idist_store *store, const idist__req *r) {
    idist__req check = *r;
    check.op = IDIST__REQ_CHECK;
    check.keys = &r->key;
    check.nkeys = 1;
    return idist__tcp_exchange(store, &check);
}

static idist_status idist__tcp_store_run(idist_store *store, idist__req *r) {
    idist__tcp_store *t = (idist__tcp_store *)store->impl;
    bool waits = r->op == IDIST__REQ_WAIT || r->op == IDIST__REQ_GET;

    for (;;) {
        idist__req w = *r;
        idist_status s = IDIST_OK;
        bool there = true;
        __atomic_add_fetch(&t->nwant, 1, __ATOMIC_RELAXED);
        pthread_mutex_lock(&t->lock);
        __atomic_sub_fetch(&t->nwant, 1, __ATOMIC_RELAXED);

        if (waits) { // a GET is preceded by a WAIT, as in torch's protocol
            w.op = IDIST__REQ_WAIT;
            w.keys = r->nkeys ? r->keys : &r->key;
            w.nkeys = r->nkeys ? r->nkeys : 1;
            s = idist__tcp_exchange(store, &w);
            there = w.flag;
        }

        if (s == IDIST_OK && there && r->op != IDIST__REQ_WAIT) s = idist__tcp_exchange(store, r);
        if (s == IDIST_OK && r->op == IDIST__REQ_SET) s = idist__tcp_confirm(store, r);
        if (s == IDIST_OK && r->op == IDIST__REQ_GET && r->flag) there = false;
        pthread_mutex_unlock(&t->lock);
        if (s != IDIST_OK || there) return s;
        if (idist__os_ms_until(r->deadline_ns) == 0) return idist__req_late(r, NULL);
        if (__atomic_load_n(&t->nwant, __ATOMIC_RELAXED))
            idist__os_pause_ms(1); // a mutex alone is not fair
    }
}

static void idist__tcp_store_close(idist_store *store) {
    idist__tcp_store *t = (idist__tcp_store *)store->impl;

    idist__os_close(&t->fd);
    if (t->server) idist__server_stop(t->server);
    idist__mem_free(&store->mem, t->out);
    pthread_mutex_destroy(&t->lock);
    idist__mem_free(&store->mem, t);
}

// Nobody answers at an address: why that may be. It is tried again until the deadline passes.
static void idist__tcp_unreached(const char *addr_text, bool local, int err) {
    if (idist__sock_cut_off(err))
        idist__fail(
            IDIST_ERR_TIMEOUT,
            "%s cannot be reached from here (%s): the network interface is down, or no route "
            "leads there",
            addr_text, strerror(err));
    else if (local)
        idist__fail(IDIST_ERR_TIMEOUT,
                    "nobody listens at %s (%s): rank 0 has not started, its MASTER_PORT differs, "
                    "or it is of another "
                    "user, network namespace (container) or host. Ranks of one host meet at a "
                    "local socket of their "
                    "user and network namespace",
                    addr_text, strerror(err));
    else
        idist__fail(IDIST_ERR_TIMEOUT,
                    "nobody listens at %s (%s): rank 0 has not started, or MASTER_ADDR / "
                    "MASTER_PORT differ",
                    addr_text, strerror(err));
}

// Tries until the server is there. The first refusals are normal: it may start later than we do.
static idist_status idist__tcp_store_connect(idist__tcp_store *t, const char *addr_text,
                                             const uint8_t key[32], int64_t deadline_ns) {
    int pause_ms = 1;
    int64_t give_up_ns =
        0; // the server has closed a connection, and is not to be asked again after this

    for (;;) {
        idist__addr addr;
        idist_status s = idist__addr_parse(&addr, addr_text);
        if (s == IDIST_OK && addr.sa.ss_family != AF_UNIX && idist__addr_port(&addr) == 0)
            s = idist__fail(IDIST_ERR_ARG, "store: a client needs the port of the server, not 0");
        if (s == IDIST_ERR_ARG) return s;

        if (s == IDIST_OK) {
            t->fd = idist__sock_connect(&addr, deadline_ns);
            if (t->fd < 0 && (errno == EMFILE || errno == ENFILE))
                return idist__fail_errno("socket", errno);
            if (t->fd < 0 && errno == EPERM)
                return idist__fail(IDIST_ERR_AUTH, "another user of this machine listens at %s",
                                   addr_text);
            if (t->fd >= 0 && !key) return IDIST_OK;

            if (t->fd >= 0) {
                idist__handshake h;
                int64_t own = idist__os_deadline(
                    IDIST__PORCH_MS); // our own server answers at once, if it can at all
                idist__auth_begin(&h, t->fd, false, key, IDIST__ROLE_STORE, 0, 0, 0,
                                  t->server && own < deadline_ns ? own : deadline_ns);
                s = idist__auth_run(&h);
                if (s != IDIST_OK && t->server &&
                    __atomic_load_n(&t->server->no_fds, __ATOMIC_RELAXED))
                    return idist__fail(IDIST_ERR_NO_FDS,
                                       "store: out of file descriptors: raise ulimit -n");
                if (!h.broke) return s;
                idist__os_close(&t->fd);
                if (!give_up_ns) give_up_ns = idist__os_deadline(IDIST__RETRY_MS);
                if (idist__os_ms_until(give_up_ns) == 0) return s;
            } else if (give_up_ns && errno == ECONNREFUSED) {
                return idist__fail(IDIST_ERR_PEER_LOST,
                                   "store: the server at %s (rank 0) was lost during the handshake",
                                   addr_text);
            } else {
                idist__tcp_unreached(addr_text, addr.sa.ss_family == AF_UNIX, errno);
            }
        }

        if (idist__os_ms_until(deadline_ns) == 0)
            return idist__fail(IDIST_ERR_TIMEOUT, "store: %s", idist__me.text);
        idist__os_pause_ms(pause_ms);
        if (pause_ms < 50) pause_ms *= 2;
    }
}

// Asks the group, and again when the answer was none: anybody may answer, and a server may be gone
// by then.
static idist_status idist__cast_connect(idist__tcp_store *t, const idist__cast *cast,
                                        const uint8_t key[32], int64_t deadline_ns) {
    char at[320];
    idist_status s;

    do {
        int64_t soon = idist__os_deadline(1000);
        if ((s = idist__cast_ask(cast, at, sizeof at, deadline_ns)) != IDIST_OK) return s;
        s = idist__tcp_store_connect(t, at, key, soon < deadline_ns ? soon : deadline_ns);
        if (s != IDIST_OK) idist__os_close(&t->fd);
    } while (s != IDIST_OK && s != IDIST_ERR_NO_FDS && idist__os_ms_until(deadline_ns) != 0);

    return s;
}

// The server: listens, unless it brings a socket that does, and says in `own` where. Takes that
// socket and that of `cast`.
static idist_status idist__tcp_store_serve(idist_store *store, const char *addr_text, int listener,
                                           idist__cast *cast, const uint8_t key[32],
                                           bool may_be_public, char *own, size_t cap) {
    idist__tcp_store *t = (idist__tcp_store *)store->impl;
    idist__addr addr;
    idist_status s = IDIST_OK;
    char ip[64];

    if (listener < 0) s = idist__addr_parse(&addr, addr_text);
    if (listener < 0 && s == IDIST_OK && !may_be_public && !idist__addr_is_loopback(&addr))
        s = idist__fail(
            IDIST_ERR_NO_SECRET,
            "listening at %s, beyond this host, needs a shared secret: set IDIST_SECRET or "
            "IDIST_SECRET_FILE on all ranks, or IDIST_INSECURE=1 to trust the network",
            addr_text);
    if (listener < 0 && s == IDIST_OK) s = idist__sock_listen(&addr, addr_text, &listener);

    if (s != IDIST_OK) {
        idist__os_close(&cast->fd);
        return s;
    }

    idist__copy_text(own, cap, addr_text);
    memset(&addr, 0, sizeof addr);
    addr.nbytes = sizeof addr.sa;

    if (getsockname(listener, (struct sockaddr *)&addr.sa, &addr.nbytes) == 0 &&
        addr.sa.ss_family != AF_UNIX) {
        store->port = idist__addr_port(&addr);
        idist__addr_host_text(&addr, ip, sizeof ip);
        snprintf(own, cap, "tcp:[%s]:%d", ip, store->port);
    }

    return idist__server_start(&store->mem, listener, store->port, cast, key, &t->server);
}

// addr: "unix:NAME", "tcp:HOST:PORT" or "cast:GROUP:PORT/JOB". A server may bring a listening
// socket (else -1), which is ours from here on. Without a key no handshake: with a server of torch.
static idist_status idist__tcp_store_open(idist_store *store, const char *addr_text, bool server,
                                          int listener, const uint8_t key[32], bool may_be_public,
                                          int64_t deadline_ns) {
    idist__tcp_store *t = (idist__tcp_store *)idist__mem_alloc(&store->mem, sizeof *t);
    uint32_t magic = IDIST__STORE_MAGIC;
    char hello[5], at[320], own[320];
    bool asks = strncmp(addr_text, "cast:", 5) == 0;
    idist__cast cast;
    idist_status s = IDIST_OK;

    if (!t) {
        idist__os_close(&listener);
        return IDIST_ERR_NO_MEMORY;
    }

    memset(&cast, 0, sizeof cast);
    t->fd = cast.fd = -1;
    pthread_mutex_init(&t->lock, NULL);
    store->impl = t;
    store->run = idist__tcp_store_run;
    store->close = idist__tcp_store_close;
    idist__copy_text(at, sizeof at, addr_text);
    if (asks) s = idist__cast_open(&cast, addr_text + 5, server, key);
    if (asks && server) snprintf(at, sizeof at, "tcp:%s:0", cast.ip);
    idist__copy_text(own, sizeof own, at);
    if (s == IDIST_OK && server)
        s = idist__tcp_store_serve(store, at, listener, &cast, key, may_be_public, own, sizeof own);
    else if (s == IDIST_OK && asks) s = idist__cast_connect(t, &cast, key, deadline_ns);
    if (!server || (s != IDIST_OK && !t->server)) idist__os_close(&cast.fd);
    if (s == IDIST_OK && (server || !asks)) s = idist__tcp_store_connect(t, own, key, deadline_ns);
    if (s != IDIST_OK) return s;
    hello[0] = IDIST__REQ_VALIDATE;
    memcpy(hello + 1, &magic, 4);
    if (!idist__sock_write_all(t->fd, hello, 5, deadline_ns)) return idist__tcp_broken(t);

    return IDIST_OK;
}

// ---- a view with a prefix ----

typedef struct idist__prefix_store {
    idist_store *parent;
    char prefix[IDIST__KEY_MAX + 1];
} idist__prefix_store;

static idist_status idist__prefix_run(idist_store *store, idist__req *r) {
    idist__prefix_store *p = (idist__prefix_store *)store->impl;
    size_t i, np = strlen(p->prefix), nkeys = r->nkeys ? r->nkeys : 1,
              total = 0; // NUM_KEYS has an empty key: harmless
    const idist__blob *from = r->nkeys ? r->keys : &r->key;
    idist__req inner = *r;
    idist__blob *keys;
    char *text;
    idist_status s;

    for (i = 0; i < nkeys; i++) {
        total += np + from[i].nbytes;
        if (np + from[i].nbytes > IDIST__KEY_MAX)
            return idist__fail(IDIST_ERR_ARG,
                               "store: prefix and key together have at most %u bytes",
                               IDIST__KEY_MAX);
    }

    keys = (idist__blob *)idist__mem_alloc(&store->mem, nkeys * sizeof *keys + total);
    if (!keys) return IDIST_ERR_NO_MEMORY;
    text = (char *)(keys + nkeys);

    for (i = 0; i < nkeys; i++) {
        keys[i].data = text;
        keys[i].nbytes = np + from[i].nbytes;
        memcpy(text, p->prefix, np);
        if (from[i].nbytes) memcpy(text + np, from[i].data, from[i].nbytes);
        text += keys[i].nbytes;
    }

    inner.key = keys[0];
    inner.keys = r->nkeys ? keys : NULL;
    s = p->parent->run(p->parent, &inner);
    r->number = inner.number;
    r->nbytes = inner.nbytes;
    r->flag = inner.flag;
    idist__mem_free(&store->mem, keys);

    return s;
}

static void idist__prefix_close(idist_store *store) { idist__mem_free(&store->mem, store->impl); }

// ---- public ----

static idist_store *idist__store_new(const idist_allocator *mem, int timeout_ms) {
    idist_store *store = (idist_store *)idist__mem_alloc(mem, sizeof *store);
    if (!store) return NULL;
    if (mem) store->mem = *mem;
    store->timeout_ms = timeout_ms ? timeout_ms : 300000;
    return store;
}

idist_status idist_store_close(idist_store **store) {
    idist_store *s;

    if (!store) return idist__fail(IDIST_ERR_ARG, "store_close: the pointer is NULL");
    s = *store;
    *store = NULL;
    if (!s) return IDIST_OK;
    if (s->impl) s->close(s);
    idist__mem_free(&s->mem, s);

    return IDIST_OK;
}

// All kinds: "mem:", "file:PATH", "unix:NAME", "tcp:HOST:PORT", "torch:HOST:PORT" (of an agent of
// torchrun).
static idist_status idist__store_open(const char *where, const idist_store_desc *d, int listener,
                                      idist_store **out) {
    idist_store *store = idist__store_new(&d->allocator, d->timeout_ms);
    int64_t deadline_ns;
    idist__secret secret;
    uint8_t key[32];
    idist_status s = idist__secret_find(&secret, d->secret, d->secret_nbytes);

    *out = NULL;
    if (s == IDIST_OK && !store) s = IDIST_ERR_NO_MEMORY;

    if (s != IDIST_OK) {
        idist__os_close(&listener);
        idist_store_close(&store);
        return s;
    }

    deadline_ns = idist__os_deadline(store->timeout_ms);
    idist__auth_key(&secret, key);

    if (strncmp(where, "file:", 5) == 0)
        s = idist__file_store_open(store, where + 5, d->server, deadline_ns);
    else if (strcmp(where, "mem:") == 0) s = idist__mem_store_open(store);
    else if (strncmp(where, "torch:", 6) == 0) {
        char addr[4096];
        snprintf(addr, sizeof addr, "tcp:%s", where + 6);
        s = idist__tcp_store_open(store, addr, false, -1, NULL, false, deadline_ns);
    } else
        s = idist__tcp_store_open(store, where, d->server, listener, key,
                                  secret.nbytes || secret.insecure, deadline_ns);

    if (s != IDIST_OK) idist_store_close(&store);
    else *out = store;

    return s;
}

idist_status idist_store_open(const char *url, const idist_store_desc *desc, idist_store **store) {
    idist_store_desc d;
    char where[4096];

    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (!store) return idist__fail(IDIST_ERR_ARG, "store_open: store is NULL");
    *store = NULL;
    if (!url) return idist__fail(IDIST_ERR_ARG, "store_open: url is NULL");
    if (strlen(url) >= sizeof where)
        return idist__fail(IDIST_ERR_ARG, "store_open: the url is too long");
    if (strcmp(url, "mem://") == 0) idist__copy_text(where, sizeof where, "mem:");
    else if (strncmp(url, "file://", 7) == 0 && url[7] == '/')
        snprintf(where, sizeof where, "file:%s", url + 7);
    else if (strncmp(url, "tcp://", 6) == 0) snprintf(where, sizeof where, "tcp:%s", url + 6);
    else if (strncmp(url, "unix://", 7) == 0) snprintf(where, sizeof where, "unix:%s", url + 7);
    else
        return idist__fail(
            IDIST_ERR_ARG,
            "store_open: \"%s\" is none of tcp://host:port, unix://name, file:///path, mem://",
            url);

    return idist__store_open(where, &d, -1, store);
}

idist_status idist_store_prefix(idist_store *parent, const char *prefix, idist_store **store) {
    idist__prefix_store *p;

    if (!store) return idist__fail(IDIST_ERR_ARG, "store_prefix: store is NULL");
    *store = NULL;
    if (!parent || !prefix || strlen(prefix) >= IDIST__KEY_MAX)
        return idist__fail(IDIST_ERR_ARG,
                           "store_prefix: needs a parent and a prefix of less than %u bytes",
                           IDIST__KEY_MAX);
    *store = idist__store_new(&parent->mem, parent->timeout_ms);
    if (!*store) return IDIST_ERR_NO_MEMORY;
    p = (idist__prefix_store *)idist__mem_alloc(&parent->mem, sizeof *p);
    if (!p) {
        idist_store_close(store);
        return IDIST_ERR_NO_MEMORY;
    }

    p->parent = parent;
    idist__copy_text(p->prefix, sizeof p->prefix, prefix);
    (*store)->impl = p;
    (*store)->run = idist__prefix_run;
    (*store)->close = idist__prefix_close;
    (*store)->port = parent->port;

    return IDIST_OK;
}

int idist_store_port(const idist_store *store) { return store ? store->port : 0; }

// Fills what all requests have, and looks at the keys.
static idist_status idist__store_begin(idist_store *store, idist__req *r, int op, const char *key,
                                       int timeout_ms) {
    memset(r, 0, sizeof *r);
    if (!store) return idist__fail(IDIST_ERR_ARG, "store: the store is NULL");
    r->op = op;
    r->deadline_ns = idist__os_deadline(timeout_ms ? timeout_ms : store->timeout_ms);
    if (op == IDIST__REQ_NUM_KEYS || op == IDIST__REQ_CHECK || op == IDIST__REQ_WAIT)
        return IDIST_OK;
    if (!key || !key[0] || strlen(key) > IDIST__KEY_MAX)
        return idist__fail(IDIST_ERR_ARG, "store: a key has 1 to %u bytes", IDIST__KEY_MAX);
    r->key.data = key;
    r->key.nbytes = strlen(key);

    return IDIST_OK;
}

static idist_status idist__store_value(idist__blob *blob, const void *value, size_t nbytes,
                                       size_t max) {
    if ((nbytes && !value) || nbytes > max)
        return idist__fail(IDIST_ERR_ARG, "store: a value is NULL or longer than %zu bytes", max);
    blob->data = (const char *)value;
    blob->nbytes = nbytes;
    return IDIST_OK;
}

idist_status idist_store_set(idist_store *store, const char *key, const void *value,
                             size_t nbytes) {
    idist__req r;
    idist_status s = idist__store_begin(store, &r, IDIST__REQ_SET, key, 0);
    if (s == IDIST_OK) s = idist__store_value(&r.a, value, nbytes, IDIST__VALUE_MAX);
    return s == IDIST_OK ? store->run(store, &r) : s;
}

// Runs a request that brings a value.
static idist_status idist__store_fetch(const char *name, idist_store *store, idist__req *r,
                                       void *value, size_t capacity, size_t *nbytes) {
    idist_status s;

    if (capacity && !value) return idist__fail(IDIST_ERR_ARG, "%s: value is NULL", name);
    r->value = value;
    r->capacity = capacity;
    s = store->run(store, r);
    if (nbytes && (s == IDIST_OK || s == IDIST_ERR_TRUNCATED)) *nbytes = r->nbytes;
    return s;
}

idist_status idist_store_get(idist_store *store, const char *key, void *value, size_t capacity,
                             size_t *nbytes, int timeout_ms) {
    idist__req r;
    idist_status s = idist__store_begin(store, &r, IDIST__REQ_GET, key, timeout_ms);
    return s == IDIST_OK ? idist__store_fetch("store_get", store, &r, value, capacity, nbytes) : s;
}

idist_status idist_store_add(idist_store *store, const char *key, int64_t delta, int64_t *result) {
    idist__req r;
    idist_status s = idist__store_begin(store, &r, IDIST__REQ_ADD, key, 0);

    if (s != IDIST_OK) return s;
    r.number = delta;
    s = store->run(store, &r);
    if (s == IDIST_OK && result) *result = r.number;
    return s;
}

idist_status idist_store_compare_set(idist_store *store, const char *key, const void *expected,
                                     size_t nexpected, const void *desired, size_t ndesired,
                                     void *value, size_t capacity, size_t *nbytes) {
    idist__req r;
    idist_status s = idist__store_begin(store, &r, IDIST__REQ_COMPARE_SET, key, 0);

    if (s == IDIST_OK) s = idist__store_value(&r.a, expected, nexpected, IDIST__VALUE_MAX / 2);
    if (s == IDIST_OK) s = idist__store_value(&r.b, desired, ndesired, IDIST__VALUE_MAX / 2);
    return s == IDIST_OK
               ? idist__store_fetch("store_compare_set", store, &r, value, capacity, nbytes)
               : s;
}

static idist_status idist__store_keys(idist_store *store, int op, const char *const *keys, size_t n,
                                      int timeout_ms, bool *flag) {
    idist__req r;
    idist_status s = idist__store_begin(store, &r, op, NULL, timeout_ms);
    idist__blob *blobs;
    size_t i, total = 0;

    if (s != IDIST_OK) return s;
    if ((n && !keys) || n > IDIST__KEYS_MAX)
        return idist__fail(IDIST_ERR_ARG, "store: keys is NULL or more than %u", IDIST__KEYS_MAX);

    for (i = 0; i < n; i++) {
        if (!keys[i] || !keys[i][0] || strlen(keys[i]) > IDIST__KEY_MAX)
            return idist__fail(IDIST_ERR_ARG, "store: a key has 1 to %u bytes", IDIST__KEY_MAX);
        if ((total += strlen(keys[i]) + 9) > IDIST__VALUE_MAX)
            return idist__fail(IDIST_ERR_ARG, "store: the keys of one call have more than %u bytes",
                               IDIST__VALUE_MAX);
    }

    if (flag) *flag = true;
    if (!n) return IDIST_OK;
    blobs = (idist__blob *)idist__mem_alloc(&store->mem, n * sizeof *blobs);
    if (!blobs) return IDIST_ERR_NO_MEMORY;

    for (i = 0; i < n; i++) {
        blobs[i].data = keys[i];
        blobs[i].nbytes = strlen(keys[i]);
    }

    r.keys = blobs;
    r.nkeys = n;
    s = store->run(store, &r);
    if (flag) *flag = r.flag;
    idist__mem_free(&store->mem, blobs);

    return s;
}

idist_status idist_store_wait(idist_store *store, const char *const *keys, size_t n,
                              int timeout_ms) {
    return idist__store_keys(store, IDIST__REQ_WAIT, keys, n, timeout_ms, NULL);
}

idist_status idist_store_check(idist_store *store, const char *const *keys, size_t n, bool *ready) {
    if (!ready) return idist__fail(IDIST_ERR_ARG, "store_check: ready is NULL");
    return idist__store_keys(store, IDIST__REQ_CHECK, keys, n, 0, ready);
}

idist_status idist_store_delete(idist_store *store, const char *key, bool *deleted) {
    idist__req r;
    idist_status s = idist__store_begin(store, &r, IDIST__REQ_DELETE, key, 0);
    if (s == IDIST_OK) s = store->run(store, &r);
    if (s == IDIST_OK && deleted) *deleted = r.flag;
    return s;
}

idist_status idist_store_num_keys(idist_store *store, size_t *n) {
    idist__req r;
    idist_status s = idist__store_begin(store, &r, IDIST__REQ_NUM_KEYS, NULL, 0);

    if (s != IDIST_OK) return s;
    if (!n) return idist__fail(IDIST_ERR_ARG, "store_num_keys: n is NULL");
    s = store->run(store, &r);
    *n = s == IDIST_OK ? (size_t)r.number : 0;
    return s;
}

//------------------------------------------------------------------------------
// [launch:config]  the configuration: explicit field, then environment, then built-in
// uses os err hash sock auth store
//------------------------------------------------------------------------------

#define IDIST__SHM_MIB 4 // shared memory per rank

enum { IDIST__DEVICE_BACKEND_NCCL = 1 };

typedef struct idist__config {
    int rank, world_size;
    int local_rank, local_size;      // what the launcher says; -1: nothing
    const char *launcher;            // "none", "spawn", "explicit", "idist", "torchrun", ...
    const char *rank_var, *size_var; // which variables decided, or NULL
    const char *job_var; // which one tells this job from others of the same launcher, or NULL
    char notice[200];    // a warning for the log of the world
    char where[4096];    // rendezvous: "unix:NAME", "tcp:HOST:PORT", "file:PATH"; "" for none
    idist_store *store;  // or this one
    int listener;        // rank 0 of a spawn inherits a socket that already listens; else -1
    int timeout_ms, init_timeout_ms; // resolved: > 0, or -1 for none
    idist__secret secret;
    int transport;     // 0 shared memory inside a host, 1 local sockets there, 2 TCP everywhere
    int algorithm;     // 0 auto, 1 latency, 2 bandwidth, 3 chunked
    int bind;          // 1: each rank to a processor of its own, if there are enough
    size_t shm_nbytes; // of shared memory per rank
    bool shm_asked;    // that number is the user's
    const void *mpi_comm;
    bool unchecked; // a backend that has collectives of its own may leave out the comparison of
                    // calls
    char host_id[128];
    char device[32];    // asked for, or ""
    int device_backend; // 0 auto, 1 IDIST__DEVICE_BACKEND_NCCL, 2 ipc, 3 staged
    const void *nccl_comm, *nccl_config;
    bool high_priority; // of the streams on the device
    char backends[128]; // names asked for, or ""
    int *lost; // a worker's mark for its parent: another rank was lost, what follows may be only a
               // consequence
    idist_allocator mem;
    idist_logger logger;
} idist__config;

// Launchers that give each process its rank and the size in one pair of variables, inner ones
// first: a torchrun inside srun or mpirun wins over what it inherited, and mpirun over the step of
// Slurm that its daemon is.
typedef struct idist__launcher {
    const char *name, *rank, *size, *local_rank, *local_size, *job;
} idist__launcher;

static const idist__launcher idist__launchers[] = {
    {"idist", "IDIST_RANK", "IDIST_WORLD_SIZE", "IDIST_LOCAL_RANK", "IDIST_LOCAL_WORLD_SIZE", NULL},
    {"env", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
     NULL}, // "torchrun", if it says so
    {"indexed", "JOB_COMPLETION_INDEX", "WORLD_SIZE", NULL, NULL,
     NULL}, // Kubernetes gives the first one
    {"horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE",
     "HOROVOD_GLOO_RENDEZVOUS_PORT"},
    {"openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE"},
    {"mvapich2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
     "MV2_COMM_WORLD_LOCAL_SIZE", "MPIRUN_ID"},
    {"jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK",
     "JSM_NAMESPACE_LOCAL_SIZE", "PMIX_NAMESPACE"},
    {"pals", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", "PALS_APID"},
    {"flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", NULL, "FLUX_JOB_ID"},
    {"hydra", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", NULL},
    {"slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", NULL, "SLURM_JOB_ID"}};

static idist_status idist__env_int(const char *name, int64_t lo, int64_t hi, int *value) {
    const char *text = name ? idist__os_env(name) : NULL;
    int64_t v;

    if (!text) return IDIST_OK;
    if (!idist__parse_int(text, lo, hi, &v))
        return idist__fail(IDIST_ERR_ENV, "%s=%s: expected a whole number from %lld to %lld", name,
                           text, (long long)lo, (long long)hi);
    *value = (int)v;

    return IDIST_OK;
}

// ---- Slurm ----

typedef bool (*idist__host_fn)(void *arg, const char *host); // false: enough

// One element of a host list from `at` on; `host` holds what comes before, of n bytes.
static bool idist__hosts_element(const char *at, const char *end, char *host, size_t n,
                                 idist__host_fn fn, void *arg) {
    const char *close;

    while (at < end && *at != '[' && *at != ']' && n < 255) host[n++] = *at++;
    host[n] = 0;
    if (at == end) return n && fn(arg, host);
    close = *at == '[' ? (const char *)memchr(at, ']', (size_t)(end - at)) : NULL;
    if (!close || n >= 240) return false;

    while (at <
           close) { // behind the bracket or a comma: "7" or "03-11", as wide as the first number
        char *rest;
        size_t width = strspn(++at, "0123456789");
        long v = strtol(at, &rest, 10), last = v;
        if (width < 1 || width > 9) return false;

        if (*rest == '-') {
            size_t digits = strspn(++rest, "0123456789");
            last = strtol(rest, NULL, 10);
            rest += digits;
            if (digits < 1 || digits > 9 || last < v || last - v > 65535) return false;
        }

        if (rest > close || (*rest != ',' && rest != close)) return false;

        for (; v <= last; v++) {
            int more = snprintf(host + n, 12, "%0*ld", (int)width, v);
            if (!idist__hosts_element(close + 1, end, host, n + (size_t)more, fn, arg))
                return false;
        }

        at = rest;
    }

    return true;
}

// Slurm's compressed host lists, in the order given: "a,b[1-3,07],rack[0-1]n[1-2]". False: it is
// none, or fn had enough.
static bool idist__hosts_each(const char *list, idist__host_fn fn, void *arg) {
    char host[256];
    const char *at = list;

    do {
        const char *end;
        int depth = 0;
        at += strspn(at, " ");
        for (end = at; *end && (*end != ',' || depth); end++)
            depth += (*end == '[') - (*end == ']');
        if (!idist__hosts_element(at, end, host, 0, fn, arg)) return false;
        at = end;
    } while (*at++ == ',');

    return true;
}

static bool idist__hosts_first(void *arg, const char *host) {
    char *first = (char *)arg;
    if (!first[0]) idist__copy_text(first, 256, host);
    return true;
}

// "2(x3),1" says 2, 2, 2, 1: the entry of a node, or -1.
static int idist__slurm_tasks(const char *text, int node) {
    while (text && *text >= '0' && *text <= '9') {
        char *rest;
        long tasks = strtol(text, &rest, 10), times = 1;

        if (strncmp(rest, "(x", 2) == 0) {
            times = strtol(rest + 2, &rest, 10);
            if (times < 1 || *rest++ != ')') return -1;
        }

        if (node < times) return tasks > 0 && tasks <= 1000000 ? (int)tasks : -1;
        node -= (int)times;
        if (*rest != ',') return -1;
        text = rest + 1;
    }

    return -1;
}

// The first of these variables that is set; if none is, the last.
static const char *idist__env_either(const char *a, const char *b) {
    return idist__os_env(a) ? a : b;
}

// Whether srun started this process. The body of a batch script and a shell of salloc have its
// variables too.
static bool idist__slurm_step(void) {
    int64_t id;
    return idist__parse_int(idist__os_env(idist__env_either("SLURM_STEP_ID", "SLURM_STEPID")), 0,
                            0xffffffefll, &id) &&
           idist__os_env("SLURM_PROCID");
}

// RANK and WORLD_SIZE inside a step of Slurm: of an inner launcher, or the same in other words.
// *use: they count.
static idist_status idist__slurm_compare(idist__config *c, bool *use) {
    int rank = 0, size = 1, procid = 0, tasks = 1, nodes = 1;
    const char *size_var = idist__env_either("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS");

    *use = true;
    if (idist__os_env("TORCHELASTIC_RUN_ID") || idist__os_env("LOCAL_WORLD_SIZE") ||
        !idist__slurm_step())
        return IDIST_OK;
    *use =
        idist__os_env("LOCAL_RANK") && idist__os_env("MASTER_ADDR") && idist__os_env("MASTER_PORT");

    if (!*use) {
        snprintf(c->notice, sizeof c->notice,
                 "RANK and WORLD_SIZE do not count inside a step of Slurm without LOCAL_RANK, "
                 "MASTER_ADDR and MASTER_PORT");
        return IDIST_OK;
    }

    if (idist__env_int("RANK", 0, 1000000, &rank) != IDIST_OK ||
        idist__env_int("WORLD_SIZE", 1, 1000000, &size) != IDIST_OK)
        return IDIST_OK; // which is said later
    idist__env_int("SLURM_PROCID", 0, 1000000, &procid);
    idist__env_int(size_var, 1, 1000000, &tasks);
    idist__env_int(idist__env_either("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES"), 1, 1000000,
                   &nodes);
    if (nodes == 1 ? rank >= procid && size >= tasks : rank == procid && size == tasks)
        return IDIST_OK;

    return idist__fail(IDIST_ERR_ENV,
                       "RANK=%d and WORLD_SIZE=%d are inconsistent with SLURM_PROCID=%d and %s=%d: "
                       "unset the ones that are "
                       "left over, or set IDIST_LAUNCHER=env or =slurm",
                       rank, size, procid, size_var, tasks);
}

// ---- PMI-1, the text protocol of MPICH's launcher ----

// MPI would speak it in our place, if the program has it.
#ifdef __cplusplus
extern "C" int MPI_Pcontrol(const int level, ...) __attribute__((weak));
#else
int MPI_Pcontrol(const int level, ...) __attribute__((weak));
#endif
#define IDIST__HAS_MPI (MPI_Pcontrol != NULL)

typedef struct idist__pmi {
    int fd;
    int64_t deadline_ns;
    char line[600]; // the last answer
} idist__pmi;

// A line, byte by byte: what follows is another one. What the launcher hands down is a blocking
// socket, so we wait first.
static bool idist__pmi_hear(idist__pmi *p) {
    size_t n = 0;

    while (n + 1 < sizeof p->line && idist__sock_wait(p->fd, POLLIN, p->deadline_ns) &&
           idist__sock_read_all(p->fd, p->line + n, 1, p->deadline_ns) && p->line[n] != '\n')
        n++;
    p->line[n] = 0;
    return n > 0;
}

// Says a line and hears the answer that begins so.
static bool idist__pmi_ask(idist__pmi *p, const char *line, const char *answer) {
    if (!idist__sock_write_all(p->fd, line, strlen(line), p->deadline_ns)) return false;

    do {
        if (!idist__pmi_hear(p)) return false;
    } while (strncmp(p->line, answer, strlen(answer)) != 0);

    return !strstr(p->line, "rc=") || strstr(p->line, "rc=0") != NULL;
}

static const char *idist__pmi_value(const idist__pmi *p, const char *name) {
    const char *at = strstr(p->line, name);
    return at ? at + strlen(name) : "";
}

// What PMI told this process, once: afterwards the launcher has taken leave of it.
static struct {
    pthread_mutex_t lock;
    int fd, size, rank; // of PMI_PORT; size 0: not asked yet
    char where[320];    // rank 0 is
} idist__pmi_known = {PTHREAD_MUTEX_INITIALIZER, -1, 0, 0, ""};

// With mpiexec -pmi-port nothing is inherited: connects, and hears who we are. The connection stays
// open for the rest.
static idist_status idist__pmi_introduce(idist__config *c, const char *port, const char *id) {
    idist__pmi p;
    char text[320];
    idist__addr addr;
    int value = 0;
    bool ok = true;

    pthread_mutex_lock(&idist__pmi_known.lock);
    p.deadline_ns = idist__os_deadline(c->init_timeout_ms > 0 ? c->init_timeout_ms : 5000);

    if (!idist__pmi_known.size) {
        snprintf(text, sizeof text, "tcp:%.300s", port);
        p.fd = idist__addr_parse(&addr, text) == IDIST_OK
                   ? idist__sock_connect(&addr, p.deadline_ns)
                   : -1;
        snprintf(text, sizeof text, "cmd=initack pmiid=%.100s\n", id);
        ok = p.fd >= 0 && idist__pmi_ask(&p, text, "cmd=initack");
        while (ok && !strstr(p.line, "debug=")) {
            ok = idist__pmi_hear(&p);
            if (sscanf(p.line, "cmd=set size=%d", &value) == 1) idist__pmi_known.size = value;
            if (sscanf(p.line, "cmd=set rank=%d", &value) == 1) idist__pmi_known.rank = value;
        }

        if (!ok) idist__os_close(&p.fd);
        idist__pmi_known.fd = p.fd;
    }

    c->launcher = "hydra";
    c->rank_var = "PMI_ID";
    c->size_var = "PMI_PORT";
    c->world_size = idist__pmi_known.size;
    c->rank = idist__pmi_known.rank;
    pthread_mutex_unlock(&idist__pmi_known.lock);
    idist__env_int("MPI_LOCALRANKID", 0, 1000000, &c->local_rank);
    idist__env_int("MPI_LOCALNRANKS", 1, 1000000, &c->local_size);
    if (ok && c->rank >= 0 && c->rank < c->world_size) return IDIST_OK;

    return idist__fail(IDIST_ERR_ENV,
                       "PMI_PORT=%s: no launcher of MPICH answers there; unset it to run alone",
                       port);
}

// Rank 0's place: it listens already, so that nobody else can have it.
static idist_status idist__pmi_listen(idist__config *c, char *where, size_t cap) {
    const char *host = idist__os_env("IDIST_ADDR");
    char name[256] = "";
    idist__addr addr;
    uint64_t id[2];
    idist_status s;

    idist__os_random(id, sizeof id);
    snprintf(where, cap, "unix:idist-%016llx%016llx", (unsigned long long)id[0],
             (unsigned long long)id[1]);

    if (c->local_size == c->world_size && c->transport != 2) {
        if ((s = idist__addr_parse(&addr, where)) != IDIST_OK) return s;
        return idist__sock_listen(&addr, where, &c->listener);
    }

    if (!c->secret.nbytes && !c->secret.insecure)
        return idist__fail(
            IDIST_ERR_NO_SECRET,
            "initialize: ranks on several hosts need a shared secret: set IDIST_SECRET or "
            "IDIST_SECRET_FILE on all ranks, or IDIST_INSECURE=1 to trust the network");
    gethostname(name, sizeof name - 1);
    if ((s = idist__addr_tcp(&addr, "0.0.0.0", 0)) != IDIST_OK) return s;
    if ((s = idist__sock_listen(&addr, "0.0.0.0", &c->listener)) != IDIST_OK) return s;
    addr.nbytes = sizeof addr.sa;
    if (getsockname(c->listener, (struct sockaddr *)&addr.sa, &addr.nbytes) != 0)
        return idist__fail_errno("getsockname", errno);
    snprintf(where, cap, "tcp:%s:%d", host ? host : name, idist__addr_port(&addr));

    return IDIST_OK;
}

// Rank 0 tells the others where it is.
IDIST__UNUSED static idist_status idist__pmi_meet(idist__config *c) {
    char kvs[256], text[900], where[320] = "-";
    idist__pmi p;
    idist_status s = IDIST_OK;
    bool ok = true;

    memset(&p, 0, sizeof p);
    p.deadline_ns =
        c->init_timeout_ms < 0 ? IDIST__FOREVER : idist__os_deadline(c->init_timeout_ms);
    pthread_mutex_lock(&idist__pmi_known.lock);
    p.fd = idist__pmi_known.fd;

    if (!idist__pmi_known.where[0]) {
        if (c->rank == 0 && (s = idist__pmi_listen(c, where, sizeof where)) != IDIST_OK)
            snprintf(where, sizeof where, "-");
        ok = (p.fd >= 0 || idist__env_int("PMI_FD", 0, INT32_MAX, &p.fd) == IDIST_OK) &&
             idist__pmi_ask(&p, "cmd=init pmi_version=1 pmi_subversion=1\n",
                            "cmd=response_to_init") &&
             idist__pmi_ask(&p, "cmd=get_my_kvsname\n", "cmd=my_kvsname");
        snprintf(kvs, sizeof kvs, "%.*s", (int)strcspn(idist__pmi_value(&p, "kvsname="), " "),
                 idist__pmi_value(&p, "kvsname="));
        snprintf(text, sizeof text, "cmd=put kvsname=%s key=idist value=%s\n", kvs, where);
        if (c->rank == 0) ok = ok && idist__pmi_ask(&p, text, "cmd=put_result");
        ok = ok && idist__pmi_ask(&p, "cmd=barrier_in\n", "cmd=barrier_out");
        snprintf(text, sizeof text, "cmd=get kvsname=%s key=idist\n", kvs);
        ok = ok && idist__pmi_ask(&p, text, "cmd=get_result");
        idist__copy_text(where, sizeof where, ok ? idist__pmi_value(&p, "value=") : "-");
        if (ok && idist__pmi_ask(&p, "cmd=finalize\n", "cmd=finalize_ack") && where[0] != '-')
            idist__copy_text(idist__pmi_known.where, sizeof idist__pmi_known.where, where);
    }

    idist__copy_text(c->where, sizeof c->where, idist__pmi_known.where);
    pthread_mutex_unlock(&idist__pmi_known.lock);
    if (s != IDIST_OK || c->where[0]) return s;
    if (ok)
        return idist__fail(IDIST_ERR_PEER_LOST,
                           "initialize: rank 0 could not listen; its own message says why");

    return idist__fail(
        IDIST_ERR_TIMEOUT,
        "initialize: not all ranks came to the barrier of the launcher (PMI) within %d ms",
        c->init_timeout_ms);
}

// ---- which launcher ----

// Whether this launcher started us; its variables as they are called here. Half a pair is an error:
// guessing the rest would start N worlds of 1.
static idist_status idist__launch_match(idist__config *c, idist__launcher *l, bool asked,
                                        bool *match) {
    bool env = strcmp(l->name, "env") == 0, slurm = strcmp(l->name, "slurm") == 0, rank, size;
    const char *missing;

    *match = false;
    if (slurm) l->size = idist__env_either(l->size, "SLURM_NTASKS");
    rank = idist__os_env(l->rank) != NULL;
    size = idist__os_env(l->size) != NULL;
    missing = rank ? l->size : l->rank;

    if (slurm && !idist__slurm_step()) {
        rank = size = false;
        missing = idist__env_either("SLURM_STEP_ID", "SLURM_STEPID");
    }

    if (strcmp(l->name, "hydra") == 0 && !idist__os_env(l->local_rank) && idist__slurm_step() &&
        !asked)
        return IDIST_OK;
    if (env && !rank && idist__os_env("JOB_COMPLETION_INDEX")) return IDIST_OK;
    if (strcmp(l->name, "indexed") == 0 && !(rank && size))
        rank = size = false;                                 // pods without a size are no world
    if (strcmp(l->name, "pals") == 0 && !rank) size = false; // PMI_SIZE is of others as well
    if (asked && strcmp(l->name, "hydra") == 0 && !rank && !size && idist__os_env("PMI_PORT"))
        return IDIST_OK;
    if (asked && !(rank && size))
        return idist__fail(IDIST_ERR_ENV,
                           "IDIST_LAUNCHER=%s, but %s is not set: it did not start this process",
                           idist__os_env("IDIST_LAUNCHER"), missing);
    if (rank != size)
        return idist__fail(IDIST_ERR_ENV,
                           "%s is set but %s is not: a launcher sets both; unset it to run alone",
                           rank ? l->rank : l->size, missing);
    *match = rank;

    return env && rank && !asked ? idist__slurm_compare(c, match) : IDIST_OK;
}

static idist_status idist__launch_numbers(idist__config *c, const idist__launcher *l) {
    int node = 0, nodes = 0;
    idist_status s;

    if ((s = idist__env_int(l->size, 1, 1000000, &c->world_size)) != IDIST_OK) return s;
    if ((s = idist__env_int(l->rank, 0, 1000000, &c->rank)) != IDIST_OK) return s;
    if ((s = idist__env_int(l->local_rank, 0, 1000000, &c->local_rank)) != IDIST_OK) return s;
    if ((s = idist__env_int(l->local_size, 1, 1000000, &c->local_size)) != IDIST_OK) return s;

    if (strcmp(l->name, "slurm") == 0) {
        idist__env_int("SLURM_NODEID", 0, 1000000, &node);
        c->local_size =
            idist__slurm_tasks(idist__os_env(idist__env_either("SLURM_STEP_TASKS_PER_NODE",
                                                               "SLURM_TASKS_PER_NODE")),
                               node);
        idist__env_int(idist__env_either("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES"), 1, 1000000,
                       &nodes);
        if (nodes == 1) c->local_size = c->world_size;
    }

    if (c->rank >= c->world_size)
        return idist__fail(IDIST_ERR_ENV, "%s=%d is not below %s=%d", l->rank, c->rank, l->size,
                           c->world_size);
    if (c->local_rank >= (c->local_size > 0 ? c->local_size : c->world_size))
        return idist__fail(IDIST_ERR_ENV, "%s=%d is not below %s=%d", l->local_rank, c->local_rank,
                           c->local_size > 0 && l->local_size ? l->local_size : l->size,
                           c->local_size > 0 ? c->local_size : c->world_size);
    if (c->local_size > c->world_size)
        return idist__fail(IDIST_ERR_ENV, "%s=%d is more than %s=%d",
                           l->local_size ? l->local_size : l->name, c->local_size, l->size,
                           c->world_size);

    return IDIST_OK;
}

// TensorFlow's description of a cluster: the chief, if there is one, then the workers are ranks. No
// JSON parser: it counts the strings of the lists that it knows.
static int idist__tf_hosts(const char *text, const char *list, char *first) {
    const char *at = strstr(text, list);
    int n = 0;

    while (at && at[strlen(list) + strspn(at + strlen(list), " \t\n")] != ':')
        at = strstr(at + 1, list); // a value
    at = at ? strpbrk(at, "[]{}") : NULL;
    if (!at || *at != '[') return 0;

    for (at = strpbrk(at + 1, "\"]"); at && *at == '"'; at = strpbrk(at, "\"]")) {
        size_t nbytes = strcspn(++at, "\"");
        if (!n++ && !first[0] && nbytes < 256) snprintf(first, nbytes + 1, "%s", at);
        at += nbytes + (at[nbytes] == '"');
    }

    return n;
}

static idist_status idist__launch_tf(idist__config *c, const char *text) {
    char first[256] = "", kind[32] = "", host[256];
    int nchiefs =
            idist__tf_hosts(text, "\"chief\"", first) + idist__tf_hosts(text, "\"master\"", first),
        index = -1, port = 0;
    int nworkers = idist__tf_hosts(text, "\"worker\"", first);
    const char *task = strstr(text, "\"task\""), *type = task ? strstr(task, "\"type\"") : NULL;
    const char *number = task ? strstr(task, "\"index\"") : NULL;
    bool worker, chief;

    c->launcher = "tf_config";
    c->rank_var = c->size_var = "TF_CONFIG";
    if (type) sscanf(type + 6, " : \"%31[a-z]\"", kind);
    if (number) sscanf(number + 7, " : %9d", &index);
    worker = strcmp(kind, "worker") == 0;
    chief = strcmp(kind, "chief") == 0 || strcmp(kind, "master") == 0;
    if (!(worker || chief) || index < 0 || index >= (worker ? nworkers : nchiefs))
        return idist__fail(
            IDIST_ERR_ENV,
            "TF_CONFIG: task %s %d is none of its %d chiefs and %d workers, which are the ranks",
            kind, index, nchiefs, nworkers);
    c->world_size = nchiefs + nworkers;
    c->rank = worker ? nchiefs + index : index;
    if (!idist__parse_host_port(first, host, sizeof host, &port) || !port)
        return idist__fail(IDIST_ERR_ENV, "TF_CONFIG: \"%s\", where rank 0 is, is no host:port",
                           first);
    snprintf(c->where, sizeof c->where, "tcp:%s", first);

    return IDIST_OK;
}

// Takes the first launcher that fits, or the one that IDIST_LAUNCHER names.
static idist_status idist__launch_detect(idist__config *c) {
    const char *asked = idist__os_env("IDIST_LAUNCHER"), *tf = idist__os_env("TF_CONFIG");
    const char *port = idist__os_env("PMI_PORT"), *id = idist__os_env("PMI_ID");
    bool match = false, known = !asked || strcmp(asked, "none") == 0;
    size_t i;
    idist_status s;

    for (i = 0; i < IDIST__COUNT_OF(idist__launchers); i++) {
        idist__launcher l = idist__launchers[i];
        bool torchrun = i == 1 && idist__os_env("TORCHELASTIC_RUN_ID");
        if (asked && strcmp(asked, l.name) != 0 && !(i == 1 && strcmp(asked, "torchrun") == 0))
            continue;
        known = true;
        s = idist__launch_match(c, &l, asked != NULL, &match);
        if (!match && s == IDIST_OK) continue;
        c->launcher = torchrun ? "torchrun" : l.name;
        c->rank_var = l.rank;
        c->size_var = l.size;
        c->job_var = l.job;
        return s == IDIST_OK ? idist__launch_numbers(c, &l) : s;
    }

    if (!known && strcmp(asked, "tf_config") != 0)
        return idist__fail(IDIST_ERR_ENV,
                           "IDIST_LAUNCHER=%s: use none, idist, env, torchrun, indexed, "
                           "horovodrun, openmpi, mvapich2, jsrun, "
                           "pals, flux, hydra, slurm or tf_config",
                           asked);
    if (asked && known && strcmp(asked, "hydra") != 0) return IDIST_OK;
    if (asked && !known && !tf)
        return idist__fail(IDIST_ERR_ENV, "IDIST_LAUNCHER=tf_config, but TF_CONFIG is not set");
    if (port && id && (!asked || known) && !IDIST__HAS_MPI)
        return idist__pmi_introduce(c, port, id);
    if (asked && known) return IDIST_OK;
    if (tf && (asked || strstr(tf, "\"cluster\""))) return idist__launch_tf(c, tf);
    if (idist__os_env("PMIX_RANK") && idist__os_env("PMIX_NAMESPACE"))
        return idist__fail(IDIST_ERR_ENV, "PMIX_RANK is set, but nothing in the environment says "
                                          "how many ranks there are: set IDIST_RANK and "
                                          "IDIST_WORLD_SIZE, or IDIST_LAUNCHER=none to run alone");

    return IDIST_OK;
}

static idist_status idist__launch_rank(idist__config *c, const idist_desc *d) {
    c->rank = 0;
    c->world_size = 1;
    c->local_rank = c->local_size = -1;
    c->launcher = "none";
    if (d->world_size == 0 && d->rank == 0) return idist__launch_detect(c);
    if (d->world_size < 1 || d->rank < 0 || d->rank >= d->world_size)
        return idist__fail(IDIST_ERR_ARG,
                           "rank %d of world_size %d: both are needed, and 0 <= rank < world_size",
                           d->rank, d->world_size);
    c->launcher = "explicit";
    c->rank = d->rank;
    c->world_size = d->world_size;

    return IDIST_OK;
}

// Ranks that share a loopback address share a host, and need no TCP: the same address names a local
// socket, together with the run, since a port that nobody listens at may be that of two jobs.
static void idist__launch_where_tcp(idist__config *c, const char *host, int port) {
    const char *restart = idist__os_env("TORCHELASTIC_RESTART_COUNT"),
               *run = idist__os_env("TORCHELASTIC_RUN_ID");

    if (c->transport != 2 && (idist__sock_host_is_loopback(host) || c->local_size == c->world_size))
        snprintf(c->where, sizeof c->where, "unix:idist-%lu-%d-%s-%08x", (unsigned long)geteuid(),
                 port, restart ? restart : "0", run ? (unsigned)idist__hash(run, strlen(run)) : 0u);
    else
        snprintf(c->where, sizeof c->where, strchr(host, ':') ? "tcp:[%s]:%d" : "tcp:%s:%d", host,
                 port);
}

// All ranks are on this host and nobody has said where they meet: at a place that belongs to the
// job.
static void idist__launch_where_job(idist__config *c) {
    const char *job = c->job_var ? idist__os_env(c->job_var) : NULL;
    const char *step = strcmp(c->launcher, "slurm") == 0
                           ? idist__os_env(idist__env_either("SLURM_STEP_ID", "SLURM_STEPID"))
                           : "";
    char text[600];
    uint64_t name;

    if (job) snprintf(text, sizeof text, "%s %.300s %s", c->launcher, job, step);
    else
        snprintf(text, sizeof text, "%s %ld", c->launcher,
                 (long)getppid()); // the launcher's part on this host
    name = idist__hash(text, strlen(text));
    if (c->transport == 2)
        snprintf(c->where, sizeof c->where, "tcp:127.0.0.1:%d", 15000 + (int)(name % 10000));
    else
        snprintf(c->where, sizeof c->where, "unix:idist-%lu-%016llx", (unsigned long)geteuid(),
                 (unsigned long long)name);
}

// The first host of the step, and a port that follows from job and step: where rank 0 is, unless
// ranks were placed in an order of the user's.
static idist_status idist__launch_where_slurm(idist__config *c) {
    const char *var = idist__env_either("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
               *list = idist__os_env(var);
    const char *order = idist__os_env("SLURM_DISTRIBUTION");
    char host[256] = "";
    int job = 0, step = 0;

    if (!list ||
        (order && (strncmp(order, "arbitrary", 9) == 0 || strncmp(order, "plane", 5) == 0)))
        return IDIST_OK;
    if (!idist__hosts_each(list, idist__hosts_first, host) || !host[0])
        return idist__fail(IDIST_ERR_ENV, "%s=%s is no list of hosts", var, list);
    idist__env_int("SLURM_JOB_ID", 0, INT32_MAX, &job);
    idist__env_int(idist__env_either("SLURM_STEP_ID", "SLURM_STEPID"), 0, INT32_MAX, &step);
    idist__launch_where_tcp(c, host, 15000 + (job % 10000 + step % 10000) % 10000);

    return IDIST_OK;
}

static idist_status idist__launch_where_env(idist__config *c, const idist_desc *d) {
    const char *host = d->master_addr ? d->master_addr : idist__os_env("MASTER_ADDR"),
               *text = idist__os_env("MASTER_PORT"), *agent;
    bool local = c->local_size == c->world_size,
         own = c->job_var || strcmp(c->launcher, "hydra") == 0;
    int port = 29500;
    idist_status s = idist__env_int("MASTER_PORT", 1, 65535, &port);

    if (d->master_port) {
        if (d->master_port < 0 || d->master_port > 65535)
            return idist__fail(IDIST_ERR_ARG, "master_port %d is not between 1 and 65535",
                               d->master_port);
        port = d->master_port;
    } else if (s != IDIST_OK) {
        return s;
    }

    if (host && !d->master_port && !text)
        return idist__fail(d->master_addr ? IDIST_ERR_ARG : IDIST_ERR_ENV,
                           "MASTER_ADDR (desc.master_addr) is set but MASTER_PORT "
                           "(desc.master_port) is not: give rank 0's port as well");
    agent = idist__os_env("TORCHELASTIC_USE_AGENT_STORE");
    if (!d->master_addr && !d->master_port && !local && host && agent &&
        strcmp(agent, "True") == 0) {
        snprintf(c->where, sizeof c->where, strchr(host, ':') ? "torch:[%s]:%d" : "torch:%s:%d",
                 host, port);
        return IDIST_OK; // the agent listens there, and nobody else can
    }

    if (!host && !d->master_port && !text && c->rank_var && strcmp(c->launcher, "hydra") == 0 &&
        !IDIST__HAS_MPI && (idist__os_env("PMI_FD") || idist__os_env("PMI_PORT"))) {
        idist__copy_text(c->where, sizeof c->where, "pmi:");
        return IDIST_OK;
    }

    if (!host && own && local && !d->master_port && !text) {
        idist__launch_where_job(c);
        return IDIST_OK;
    }

    if (!host && !local && strcmp(c->launcher, "slurm") == 0) return idist__launch_where_slurm(c);
    if (!host && !local) return IDIST_OK; // a backend that needs it will say so
    idist__launch_where_tcp(c, host ? host : "127.0.0.1", port);

    return IDIST_OK;
}

static idist_status idist__launch_where(idist__config *c, const idist_desc *d) {
    const char *init = d->init_method ? d->init_method : idist__os_env("IDIST_INIT_METHOD");
    char host[256];
    int port;

    c->store = d->store;
    if (c->world_size == 1 || c->store || (c->where[0] && !init)) return IDIST_OK;
    if (!init || strcmp(init, "env://") == 0) return idist__launch_where_env(c, d);

    if (strncmp(init, "file:///", 8) == 0 && strlen(init) < sizeof c->where) {
        snprintf(c->where, sizeof c->where, "file:%s", init + 7);
        return IDIST_OK;
    }

    if (strncmp(init, "tcp://", 6) == 0 &&
        idist__parse_host_port(init + 6, host, sizeof host, &port) && port > 0) {
        int first = atoi(host); // 224 to 239 begin a multicast group

        if (first >= 224 && first < 240 && strspn(host, "0123456789.") == strlen(host)) {
            const char *run = idist__os_env("TORCHELASTIC_RUN_ID"),
                       *restart = idist__os_env("TORCHELASTIC_RESTART_COUNT");
            snprintf(c->where, sizeof c->where, "cast:%s:%d/%d %.200s %.20s", host, port,
                     c->world_size, run ? run : "", restart ? restart : "0");
            return IDIST_OK;
        }

        idist__launch_where_tcp(c, host, port);
        return IDIST_OK;
    }

    return idist__fail(d->init_method ? IDIST_ERR_ARG : IDIST_ERR_ENV,
                       "%s \"%s\" is none of env://, tcp://host:port (a port from 1 to 65535), "
                       "tcp://239.x.y.z:port, file:///path",
                       d->init_method ? "init_method" : "IDIST_INIT_METHOD", init);
}

static idist_status idist__launch_choice(const char *field, const char *var, const char *names,
                                         int *choice) {
    const char *text = field ? field : idist__os_env(var), *at = names;
    size_t n = text ? strlen(text) : 0;

    for (*choice = 0; text && at; ++*choice) {
        if (strncmp(at, text, n) == 0 && (at[n] == ',' || !at[n])) return IDIST_OK;
        if ((at = strchr(at, ',')) != NULL) at += 2;
    }

    *choice = 0;
    if (!text) return IDIST_OK;
    if (field)
        return idist__fail(IDIST_ERR_ARG, "desc: \"%s\" (%s) is none of %s", text, var, names);

    return idist__fail(IDIST_ERR_ENV, "%s=%s: use one of %s", var, text, names);
}

static idist_status idist__launch_timeout(int field, const char *var, int fallback, int *value) {
    idist_status s;

    *value = 0;
    if (field) *value = field;
    else if ((s = idist__env_int(var, -1, INT32_MAX, value)) != IDIST_OK) return s;
    if (!*value) *value = fallback;
    if (*value < 0) *value = -1;
    return IDIST_OK;
}

// The one place where defaults are filled in.
static idist_status idist__launch_config(idist__config *c, const idist_desc *desc) {
    idist_desc d;
    idist_status s;
    const char *text;
    int mib = 0, check = 1, priority = 0;

    memset(c, 0, sizeof *c);
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    c->listener = -1;
    c->mem = d.allocator;
    c->logger = d.logger;
    if (!c->mem.alloc_fn != !c->mem.free_fn)
        return idist__fail(IDIST_ERR_ARG, "allocator: give both alloc_fn and free_fn, or none");
    if ((s = idist__launch_choice(d.transport, "IDIST_TRANSPORT", "auto, socket, tcp",
                                  &c->transport)) ||
        (s = idist__launch_choice(d.algorithm, "IDIST_ALGO", "auto, latency, bandwidth, chunked",
                                  &c->algorithm)) ||
        (s = idist__launch_choice(d.bind, "IDIST_BIND", "none, core", &c->bind)) ||
        (s = idist__launch_choice(d.device_backend, "IDIST_DEVICE_BACKEND",
                                  "auto, nccl, ipc, staged", &c->device_backend)) ||
        (s = idist__launch_timeout(d.timeout_ms, "IDIST_TIMEOUT_MS", 30 * 60 * 1000,
                                   &c->timeout_ms)) ||
        (s = idist__launch_timeout(d.init_timeout_ms, "IDIST_INIT_TIMEOUT_MS", 5 * 60 * 1000,
                                   &c->init_timeout_ms)) ||
        (s = idist__env_int("IDIST_SHM_MIB", 0, 1024, &mib)) ||
        (s = idist__env_int("IDIST_CHECK", 0, 1, &check)) ||
        (s = idist__env_int("IDIST_HIGH_PRIORITY_STREAM", 0, 1, &priority)))
        return s;
    c->unchecked = !check;
    c->mpi_comm = d.mpi_comm;
    c->shm_asked = d.shm_nbytes || mib;
    c->shm_nbytes = d.shm_nbytes ? d.shm_nbytes : (size_t)(mib ? mib : IDIST__SHM_MIB) << 20;
    text = d.host_id ? d.host_id : idist__os_env("IDIST_HOSTID");
    if (text) idist__copy_text(c->host_id, sizeof c->host_id, text);
    c->nccl_comm = d.nccl_comm;
    c->nccl_config = d.nccl_config;
    c->high_priority = d.high_priority_stream || priority;
    text = d.device ? d.device : idist__os_env("IDIST_DEVICE");
    if (text) idist__copy_text(c->device, sizeof c->device, text);
    text = d.backend ? d.backend : idist__os_env("IDIST_BACKEND");
    if (text) idist__copy_text(c->backends, sizeof c->backends, text);
    if ((s = idist__secret_find(&c->secret, d.secret, d.secret_nbytes)) != IDIST_OK) return s;
    if ((s = idist__launch_rank(c, &d)) != IDIST_OK) return s;

    return idist__launch_where(c, &d);
}

// What ranks of one host have in common.
IDIST__UNUSED static uint64_t idist__host_key(const idist__config *cfg) {
    char text[256];
    struct stat st;
    ssize_t n;
    int fd;

    if (cfg->host_id[0]) return idist__hash(cfg->host_id, strlen(cfg->host_id));
    memset(text, 0, sizeof text);
    fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        do n = read(fd, text, 64);
        while (n < 0 && errno == EINTR);
        close(fd);
    }

    if (!text[0] && gethostname(text, 64) != 0) text[0] = '?';
    // Local sockets live in a network namespace and are checked against the user.
    if (stat("/proc/self/ns/net", &st) == 0)
        idist__append(text, sizeof text, "/%llu", (unsigned long long)st.st_ino);
    idist__append(text, sizeof text, "/%lu", (unsigned long)geteuid());

    return idist__hash(text, strlen(text));
}

#endif // IDIST_LAUNCH_H
