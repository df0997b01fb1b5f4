// store/multicast.h: how clients find the server when nobody knows its address
//
// A client asks an IPv4 multicast group where the server of its job is. The server answers only
// that client. Both messages are datagrams of 18 bytes:
//
//     question   | tag 16 | 0 2    |        tag: the first half of HMAC(key, "multicast", "/" JOB)
//     answer     | tag 16 | port 2 |        port: big endian
//
// Anybody can answer. The handshake of the connection shows whether the answer came from the right
// server.
#pragma once

#include "os/clock.h"
#include "os/process.h"
#include "os/poll.h"
#include "os/socket.h"
#include "base/fail.h"
#include "base/hash.h"
#include "net/address.h"
#include "net/meet.h"

enum { IDIST__MULTICAST_TAG_NBYTES = 16, IDIST__MULTICAST_NBYTES = 18, IDIST__MULTICAST_MS = 100 };

typedef struct idist__multicast {
    int fd; // -1 if the store does not use multicast
    idist__os_address group;
    uint8_t tag[32];
    char ip[64]; // our address on the interface that sends packets to the group
} idist__multicast;

// Finds the address of our interface: IDIST_ADDR if it is set, otherwise the address that the
// routing table gives.
static idist_status idist__multicast_own_address(const idist__multicast *cast, const char *group,
                                                 idist__os_address *own) {
    const char *host = idist__os_env("IDIST_ADDR");
    idist_status status = IDIST_OK;

    if (!host) {
        if (idist__os_socket_route(&cast->group, own)) return IDIST_OK;
        if (idist__os_socket_out_of_fds(errno)) return idist__fail_errno("socket", errno);
        return idist__fail(IDIST_ERR_SYSTEM,
                           "store: no route to %s (%s): set IDIST_ADDR to this host's address",
                           group, strerror(errno));
    }

    status = idist__address_tcp(own, host, 0);
    if (status == IDIST_OK && !idist__os_socket_is_ipv4(own))
        return idist__fail(IDIST_ERR_ENV, "store: IDIST_ADDR=%s: multicast needs an IPv4 address",
                           host);

    return status;
}

// Opens the socket for a meeting place of kind MULTICAST. When this function fails, the caller
// closes cast->fd.
static idist_status idist__multicast_open(idist__multicast *cast, const idist__meet *meet,
                                          bool server, const uint8_t key[32]) {
    char group[300], job[300];
    int count;
    idist__os_address own;
    idist_status status;

    snprintf(group, sizeof group, "%s:%d", meet->host, meet->port);
    snprintf(job, sizeof job, "/%.298s", meet->name);
    idist__sha_hmac(key, "multicast", job, strlen(job), NULL, 0, cast->tag);
    status = idist__meet_resolve(meet, 0, &count, &cast->group);
    if (status != IDIST_OK) return status;
    status = idist__multicast_own_address(cast, group, &own);
    if (status != IDIST_OK) return status;

    idist__os_socket_host_text(&own, cast->ip, sizeof cast->ip);
    cast->fd = idist__os_socket_multicast(&cast->group, &own, server);
    if (cast->fd < 0)
        return idist__fail(IDIST_ERR_SYSTEM,
                           "store: no multicast to %s through the interface of %s%s: %s", group,
                           cast->ip, idist__os_env("IDIST_ADDR") ? " (IDIST_ADDR)" : "",
                           strerror(errno));

    return IDIST_OK;
}

// Answers all pending questions. Only the server calls this function.
static void idist__multicast_answer(const idist__multicast *cast, int port) {
    uint8_t message[IDIST__MULTICAST_NBYTES];
    idist__os_address from;
    ptrdiff_t nbytes;

    for (;;) {
        nbytes = idist__os_socket_receive_datagram(cast->fd, message, sizeof message, &from);
        if (nbytes < 0) return;
        if (nbytes != IDIST__MULTICAST_NBYTES ||
            memcmp(message, cast->tag, IDIST__MULTICAST_TAG_NBYTES) != 0 || message[16] ||
            message[17])
            continue;

        message[16] = (uint8_t)(port >> 8);
        message[17] = (uint8_t)port;
        idist__os_socket_send_datagram(cast->fd, message, sizeof message,
                                       &from); // if the answer is lost, the client asks again
    }
}

// Asks until somebody answers or the deadline passes. Sets *server to the TCP address of the
// server.
static idist_status idist__multicast_ask(const idist__multicast *cast, idist__meet *server,
                                         int64_t deadline_ns) {
    uint8_t message[IDIST__MULTICAST_NBYTES];
    char ip[64];
    idist__os_address from;

    for (;;) {
        memset(message, 0, sizeof message);
        memcpy(message, cast->tag, IDIST__MULTICAST_TAG_NBYTES);
        idist__os_socket_send_datagram(cast->fd, message, sizeof message, &cast->group);
        idist__os_poll_wait(cast->fd, IDIST__OS_READABLE,
                            idist__os_clock_deadline(IDIST__MULTICAST_MS));

        while (idist__os_socket_receive_datagram(cast->fd, message, sizeof message, &from) ==
               IDIST__MULTICAST_NBYTES) {
            if (memcmp(message, cast->tag, IDIST__MULTICAST_TAG_NBYTES) != 0 ||
                (!message[16] && !message[17]))
                continue;
            idist__os_socket_host_text(&from, ip, sizeof ip);
            idist__meet_set_host(server, IDIST__MEET_TCP, ip, message[16] << 8 | message[17]);
            return IDIST_OK;
        }

        if (idist__os_clock_ms_until(deadline_ns) == 0)
            return idist__fail(
                IDIST_ERR_TIMEOUT,
                "store: nobody in the multicast group has answered: rank 0 has not started, its "
                "secret or world size differs, or multicast from there does not reach %s",
                cast->ip);
    }
}
