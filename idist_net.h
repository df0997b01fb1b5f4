/* idist_net.h - v0.1.0 - stream sockets and the handshake on each - MIT licence

    Part of the implementation of idist; idist.h includes it where IDIST_IMPLEMENTATION is defined.

CONTENTS

      [net:sock]  stream sockets: addresses, listen, connect, and transfers with a deadline
      [net:auth]  who is there: a mutual handshake on every connection
*/
#ifndef IDIST_NET_H
#define IDIST_NET_H

//------------------------------------------------------------------------------
// [net:sock]  stream sockets: addresses, listen, connect, and transfers with a deadline
// uses socket err
//------------------------------------------------------------------------------

static bool idist__address_host_is_loopback(const char *host) {
    return strcmp(host, "localhost") == 0 || strncmp(host, "127.", 4) == 0 ||
           strcmp(host, "::1") == 0;
}

static idist_status idist__addr_unix(idist__addr *a, const char *name) {
    if (idist__os_socket_local_address(a, name)) return IDIST_OK;
    return idist__fail(IDIST_ERR_ARG, "socket name \"%s\" is empty or longer than %d", name,
                       IDIST__OS_SOCKET_NAME_MAX);
}

static idist_status idist__addr_tcp(idist__addr *a, const char *host, int port) {
    const char *error = idist__os_socket_resolve(a, host, port);

    if (!error) return IDIST_OK;
    return idist__fail(IDIST_ERR_SYSTEM, "the host name \"%s\" cannot be resolved: %s", host,
                       error);
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

static idist_status idist__sock_listen(const idist__addr *a, const char *what, int *fd) {
    *fd = idist__os_socket_listen(a);
    if (*fd >= 0) return IDIST_OK;
    if (errno == EADDRINUSE)
        return idist__fail(
            IDIST_ERR_ADDR_IN_USE,
            "%s is taken: another job or server runs there. Choose another MASTER_PORT, or end it",
            what);

    return idist__fail_errno(what, errno);
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
// [net:auth]  who is there: a mutual handshake on every connection
// uses os socket os:file err hash
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

// Only the owner may be able to read IDIST_SECRET_FILE.
static idist_status idist__secret_from_file(idist__secret *secret, const char *path) {
    uint8_t text[sizeof secret->bytes + 1];
    idist__os_file file = idist__os_file_open(path, IDIST__OS_FILE_READ);
    bool is_private = file >= 0 && idist__os_file_is_private(file);
    ptrdiff_t nbytes;

    if (file < 0)
        return idist__fail(IDIST_ERR_ENV, "IDIST_SECRET_FILE=%s cannot be read: %s", path,
                           strerror(errno));
    nbytes = is_private ? idist__os_file_read(file, text, sizeof text) : 0;
    idist__os_close(&file);

    if (!is_private)
        return idist__fail(
            IDIST_ERR_ENV,
            "IDIST_SECRET_FILE=%s must belong to you and be readable by nobody else (chmod 600)",
            path);
    if (nbytes < 16 || nbytes > (ptrdiff_t)sizeof secret->bytes)
        return idist__fail(IDIST_ERR_ENV, "IDIST_SECRET_FILE=%s must hold 16 to %zu bytes", path,
                           sizeof secret->bytes);
    memcpy(secret->bytes, text, (size_t)nbytes);
    secret->nbytes = (size_t)nbytes;

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

#endif // IDIST_NET_H
