// net/auth.h: a mutual handshake on every connection
//
//     stage   client                                    server
//     0       hello C (64 bytes, with a nonce)  ------>
//     1                          <------  hello S (64 bytes, with a nonce) | HMAC(K, "S" | C | S)
//     2       HMAC(K, "C" | C | S)              ------>
//     3                                         <------ one byte: accepted
//
// A client that receives a wrong tag sends zeros in stage 2, so that the server learns why the
// client disconnects. K is derived from the job's secret. Without a secret K is a constant, which
// keeps out only other programs and other versions. The labels "C" and "S" keep an answer from
// being reflected to its sender. The nonces prevent replay. The tags cover version, role, rank and
// job, so that none of these can be changed in transit. Nothing is encrypted.
//
// A stranger can make the server read at most 96 bytes, and cannot make it allocate memory. The
// server also answers a hello that does not match, so that the client can report the difference. If
// the connection ends before the last byte, the client tries again, because the server may have had
// no slot for it; see net/pending.h.
//
// Neither side blocks: idist__auth_step continues as far as the socket allows.
#pragma once

#include "os/random.h"
#include "os/poll.h"
#include "os/socket.h"
#include "base/fail.h"
#include "base/hash.h"

#define IDIST__WIRE_VERSION 11
#define IDIST__HELLO_BYTES 64

// The message that each side sends first. Part of the wire format.
typedef struct idist__hello {
    char magic[4]; // "IDST"
    uint16_t version;
    uint16_t min_version;
    uint32_t byte_order; // 0x01020304 as this machine writes it
    uint32_t role;
    uint64_t job;
    uint32_t rank;
    uint32_t world_size;
    uint64_t server_id; // random number of a store's server, or 0
    uint8_t nonce[16];
    uint32_t socket; // index of this socket in a link with several sockets
    uint8_t secrecy; // IDIST__SECRECY_*, for error texts
    uint8_t zero[3];
} idist__hello;

// Purposes of a connection.
enum { IDIST__ROLE_STORE = 1, IDIST__ROLE_LINK = 2 };

// The credentials that a process was given.
enum {
    IDIST__SECRECY_NONE,     // connections within this host only
    IDIST__SECRECY_INSECURE, // IDIST_INSECURE is set
    IDIST__SECRECY_SECRET
};

// Stages of the handshake, for both sides. Each stage is one message.
enum {
    IDIST__AUTH_HELLO,
    IDIST__AUTH_ANSWER,
    IDIST__AUTH_PROOF,
    IDIST__AUTH_ACCEPTED,
    IDIST__AUTH_DONE
};
enum { IDIST__AUTH_TAG_NBYTES = 32 };

typedef struct idist__handshake {
    int fd; // -1 if none
    bool server;
    int stage;   // IDIST__AUTH_*
    size_t done; // bytes of this stage that were transferred
    bool broke;  // the connection ended or failed
    bool ready;  // poll has reported the connection, or it is new
    // A server with `asks` set stops before it accepts, and sets `proven`. The caller then closes
    // the connection, or clears `asks` and continues.
    bool asks, proven;
    const uint8_t *key;
    idist__hello mine, theirs;
    uint8_t out[96], in[96];
    int64_t deadline_ns;
} idist__handshake;

// Begins a handshake on a connection. The caller keeps ownership of fd and key.
static void idist__auth_begin(idist__handshake *shake, int fd, bool server, const uint8_t key[32],
                              uint32_t role, uint64_t job, int rank, int world_size,
                              int64_t deadline_ns) {
    memset(shake, 0, sizeof *shake);
    shake->fd = fd;
    shake->server = server;
    shake->key = key;
    shake->deadline_ns = deadline_ns;
    memcpy(shake->mine.magic, "IDST", 4);
    shake->mine.version = shake->mine.min_version = IDIST__WIRE_VERSION;
    shake->mine.byte_order = 0x01020304;
    shake->mine.role = role;
    shake->mine.job = job;
    shake->mine.rank = (uint32_t)rank;
    shake->mine.world_size = (uint32_t)world_size;
    idist__os_random(shake->mine.nonce, sizeof shake->mine.nonce);
    memcpy(shake->out, &shake->mine, IDIST__HELLO_BYTES);
}

// Tells clients which server this is. The server calls this function before the first step.
IDIST__UNUSED static void idist__auth_set_server_id(idist__handshake *shake, uint64_t id) {
    shake->mine.server_id = id;
    memcpy(shake->out, &shake->mine, IDIST__HELLO_BYTES);
}

// Tells the server which socket of a link this connection is. The client calls this function before
// the first step.
IDIST__UNUSED static void idist__auth_set_socket(idist__handshake *shake, int socket) {
    shake->mine.socket = (uint32_t)socket;
    memcpy(shake->out, &shake->mine, IDIST__HELLO_BYTES);
}

// Tells the peer which credentials this process was given (IDIST__SECRECY_*). Called before the
// first step.
static void idist__auth_set_secrecy(idist__handshake *shake, int secrecy) {
    shake->mine.secrecy = (uint8_t)secrecy;
    memcpy(shake->out, &shake->mine, IDIST__HELLO_BYTES);
}

static bool idist__auth_has_magic(const idist__hello *hello) {
    return memcmp(hello->magic, "IDST", 4) == 0;
}

static void idist__auth_tag(const idist__handshake *shake, const char *label,
                            uint8_t tag[IDIST__AUTH_TAG_NBYTES]) {
    const idist__hello *client = shake->server ? &shake->theirs : &shake->mine;
    const idist__hello *server = shake->server ? &shake->mine : &shake->theirs;
    idist__sha_hmac(shake->key, label, client, IDIST__HELLO_BYTES, server, IDIST__HELLO_BYTES, tag);
}

// Reports that the tags differ, and which side lacks a secret if only one side has a secret.
static idist_status idist__auth_fail_tag(const idist__handshake *shake) {
    bool mine = shake->mine.secrecy == IDIST__SECRECY_SECRET;
    bool theirs = shake->theirs.secrecy == IDIST__SECRECY_SECRET;

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

// Checks the peer's tag. Compares in constant time, so that timing reveals nothing about the tag.
static idist_status idist__auth_check_tag(const idist__handshake *shake, const char *label,
                                          const uint8_t *theirs) {
    uint8_t expected[IDIST__AUTH_TAG_NBYTES], difference = 0;
    int i;

    idist__auth_tag(shake, label, expected);
    for (i = 0; i < IDIST__AUTH_TAG_NBYTES; i++) difference |= (uint8_t)(expected[i] ^ theirs[i]);
    return difference ? idist__auth_fail_tag(shake) : IDIST_OK;
}

// Returns true if the handshake failed because the peer's machine has the other byte order.
static bool idist__auth_other_order(const idist__handshake *shake) {
    return idist__auth_has_magic(&shake->theirs) && shake->theirs.byte_order == 0x04030201;
}

static idist_status idist__auth_check_hello(const idist__handshake *shake) {
    const idist__hello *theirs = &shake->theirs, *mine = &shake->mine;

    if (!idist__auth_has_magic(theirs))
        return idist__fail(
            IDIST_ERR_AUTH,
            "the peer does not use the protocol of idist, so it is another program. Choose "
            "another port, or end that program");
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
        return idist__fail(IDIST_ERR_ENV,
                           "the peer has world_size %u, but this process has world_size %u",
                           (unsigned)theirs->world_size, (unsigned)mine->world_size);

    return IDIST_OK;
}

// Returns true if this side sends the message of the current stage. The server sends in odd stages.
static bool idist__auth_writes(const idist__handshake *shake) {
    return (shake->stage % 2 == 1) == shake->server;
}

// Returns the poll event that the current stage waits for.
static int idist__auth_awaits(const idist__handshake *shake) {
    return idist__auth_writes(shake) ? IDIST__OS_WRITABLE : IDIST__OS_READABLE;
}

// Sends or receives the message of a stage as far as the socket allows. Returns 1 if the message is
// complete, 0 if the socket would block, or -1 on error.
static int idist__auth_transfer(idist__handshake *shake, bool write, uint8_t *buf, size_t nbytes) {
    while (shake->done < nbytes) {
        idist__os_part part;
        ptrdiff_t n;

        part.data = buf + shake->done;
        part.nbytes = nbytes - shake->done;
        n = write ? idist__os_socket_write(shake->fd, &part, 1)
                  : idist__os_socket_read(shake->fd, buf + shake->done, nbytes - shake->done);
        if (n < 0) return -1;
        if (n == 0) return 0;
        shake->done += (size_t)n;
        // The first four bytes are enough to recognize a stranger.
        if (!write && shake->server && shake->stage == IDIST__AUTH_HELLO && shake->done >= 4 &&
            memcmp(buf, "IDST", 4) != 0)
            shake->done = nbytes;
    }

    shake->done = 0;

    return 1;
}

// Handles a complete message on the server: checks the client and prepares the next message.
static idist_status idist__auth_next_of_server(idist__handshake *shake) {
    idist_status status = IDIST_OK;

    switch (shake->stage) {
    case IDIST__AUTH_HELLO:
        memcpy(&shake->theirs, shake->in, IDIST__HELLO_BYTES);
        if (!idist__auth_has_magic(&shake->theirs)) return idist__auth_check_hello(shake);
        idist__auth_tag(shake, "S", shake->out + IDIST__HELLO_BYTES);
        break;
    case IDIST__AUTH_ANSWER: return idist__auth_check_hello(shake); // the client now has our hello
    case IDIST__AUTH_PROOF:
        status = idist__auth_check_tag(shake, "C", shake->in);
        if (status != IDIST_OK) return status;
        shake->out[0] = 1;
        break;
    default: break;
    }

    return IDIST_OK;
}

static idist_status idist__auth_next_of_client(idist__handshake *shake) {
    idist__os_part zeros;
    idist_status status;

    if (shake->stage != IDIST__AUTH_ANSWER) return IDIST_OK;
    memcpy(&shake->theirs, shake->in, IDIST__HELLO_BYTES);
    status = idist__auth_check_hello(shake);
    if (status != IDIST_OK) return status;
    status = idist__auth_check_tag(shake, "S", shake->in + IDIST__HELLO_BYTES);

    if (status != IDIST_OK) { // one write is enough: the send buffer has space
        memset(shake->out, 0, IDIST__AUTH_TAG_NBYTES);
        zeros.data = shake->out;
        zeros.nbytes = IDIST__AUTH_TAG_NBYTES;
        idist__os_socket_write(shake->fd, &zeros, 1);
        return status;
    }

    idist__auth_tag(shake, "C", shake->out);

    return IDIST_OK;
}

static idist_status idist__auth_fail_transfer(void) {
    if (errno)
        return idist__fail(IDIST_ERR_PEER_LOST, "the connection broke during the handshake: %s",
                           strerror(errno));
    return idist__fail(
        IDIST_ERR_PEER_LOST,
        "the peer closed the connection during the handshake: it ended, it accepts no more "
        "connections, or it does not use the protocol of idist");
}

// Continues a handshake without blocking. Returns IDIST_OK with *done set once each side has proven
// itself to the other. Returns IDIST_OK with shake->proven set if the caller must accept or reject
// the client. A failure is final; shake->broke is true if the connection was the cause.
static idist_status idist__auth_step(idist__handshake *shake, bool *done) {
    static const size_t nbytes[IDIST__AUTH_DONE] = {IDIST__HELLO_BYTES,
                                                    IDIST__HELLO_BYTES + IDIST__AUTH_TAG_NBYTES,
                                                    IDIST__AUTH_TAG_NBYTES, 1};

    *done = false;

    while (shake->stage < IDIST__AUTH_DONE) {
        bool write = idist__auth_writes(shake);
        int rc = idist__auth_transfer(shake, write, write ? shake->out : shake->in,
                                      nbytes[shake->stage]);
        idist_status status;

        if (rc == 0) return IDIST_OK;
        shake->broke = rc < 0;
        if (shake->broke) return idist__auth_fail_transfer();

        status =
            shake->server ? idist__auth_next_of_server(shake) : idist__auth_next_of_client(shake);
        shake->stage++;
        if (status != IDIST_OK) return status;

        shake->proven = shake->asks && shake->stage == IDIST__AUTH_ACCEPTED;
        if (shake->proven) return IDIST_OK;
    }

    *done = true;

    return IDIST_OK;
}

// Runs the whole handshake. Blocks until its deadline at the latest.
static idist_status idist__auth_run(idist__handshake *shake) {
    bool done = false;

    for (;;) {
        idist_status status = idist__auth_step(shake, &done);

        if (status != IDIST_OK || done) return status;
        if (!idist__os_poll_wait(shake->fd, idist__auth_awaits(shake), shake->deadline_ns))
            return idist__fail(IDIST_ERR_TIMEOUT, "the peer did not answer the handshake in time");
    }
}
