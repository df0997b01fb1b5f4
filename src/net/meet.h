// net/meet.h: where processes meet
//
//   kind        host, port                  name                         printed
//   NONE        -                           -                            none
//   LOCAL       -                           of a local socket            unix:NAME
//   TCP         of the server               -                            tcp:HOST:PORT
//   TORCH       of a torchrun agent         -                            torch:HOST:PORT
//   MULTICAST   of the group                shared by the job's ranks    cast:HOST:PORT/NAME
//   FILE        -                           a path                       file:NAME
//   DRAW        -                           a path                       draw:NAME
//   MEMORY      -                           -                            mem:
//   PMI         -                           -                            pmi:
//
// DRAW is a file; the first process that opens the file serves the store. PMI stands for an address
// that is not known yet: rank 0 chooses an address and tells the other ranks through the launcher.
#pragma once

#include "os/socket.h"
#include "base/fail.h"
#include "base/text.h"
#include "net/address.h"

typedef enum idist__meet_kind {
    IDIST__MEET_NONE,
    IDIST__MEET_LOCAL,
    IDIST__MEET_TCP,
    IDIST__MEET_TORCH,
    IDIST__MEET_MULTICAST,
    IDIST__MEET_FILE,
    IDIST__MEET_DRAW,
    IDIST__MEET_MEMORY,
    IDIST__MEET_PMI
} idist__meet_kind;

typedef struct idist__meet {
    idist__meet_kind kind;
    int port;
    char host[256]; // without brackets
    char name[4096];
} idist__meet;

enum { IDIST__MEET_NBYTES = 4400 }; // size of a buffer for the printed text

// Sets a kind that has a name. Pass "" for a kind without a name.
static void idist__meet_set_name(idist__meet *meet, idist__meet_kind kind, const char *name) {
    memset(meet, 0, sizeof *meet);
    meet->kind = kind;
    idist__text_copy(meet->name, sizeof meet->name, name);
}

// Sets a kind that has a host and a port.
static void idist__meet_set_host(idist__meet *meet, idist__meet_kind kind, const char *host,
                                 int port) {
    idist__meet_set_name(meet, kind, "");
    meet->port = port;
    idist__text_copy(meet->host, sizeof meet->host, host);
}

// Sets LOCAL or TCP from a text that idist__meet_print has written. Returns IDIST_ERR_ARG for any
// other text.
static idist_status idist__meet_read(idist__meet *meet, const char *text) {
    char host[sizeof meet->host];
    int port;

    if (idist__address_is_local(text)) idist__meet_set_name(meet, IDIST__MEET_LOCAL, text + 5);
    else if (idist__address_is_tcp(text) &&
             idist__parse_host_port(text + 4, host, sizeof host, &port))
        idist__meet_set_host(meet, IDIST__MEET_TCP, host, port);
    else return idist__fail(IDIST_ERR_ARG, "\"%s\" is not an address", text);

    return IDIST_OK;
}

// Prints a meeting place in readable form, and returns the text.
static const char *idist__meet_print(const idist__meet *meet, char *text, size_t capacity) {
    static const char *const schemes[] = {"none",  "unix:", "tcp:", "torch:", "cast:",
                                          "file:", "draw:", "mem:", "pmi:"};
    bool is_v6 = strchr(meet->host, ':') != NULL;

    idist__text_copy(text, capacity, schemes[meet->kind]);
    if (meet->host[0])
        idist__text_append(text, capacity, "%s%s%s:%d", is_v6 ? "[" : "", meet->host,
                           is_v6 ? "]" : "", meet->port);
    if (meet->kind == IDIST__MEET_MULTICAST) idist__text_append(text, capacity, "/");
    idist__text_append(text, capacity, "%s", meet->name);

    return text;
}

// Resolves LOCAL, TCP, TORCH or MULTICAST to an address. Sets *count to the number of addresses
// found; `which` modulo *count selects one. Blocks while a name is looked up. Returns IDIST_ERR_ARG
// if there is no valid address. Other failures may be temporary.
static idist_status idist__meet_resolve(const idist__meet *meet, int which, int *count,
                                        idist__os_address *address) {
    *count = 1;
    memset(address, 0, sizeof *address);
    if (meet->kind == IDIST__MEET_LOCAL) return idist__address_local(address, meet->name);
    return idist__address_one_of(address, meet->host, meet->port, which, count);
}

// Returns true if the text that the user wrote names a port of this host's loopback interface.
// Other names are not checked, although many systems map a host's name to a loopback address in
// /etc/hosts.
static bool idist__meet_is_loopback(const idist__meet *meet) {
    return meet->kind == IDIST__MEET_TCP && idist__address_host_is_loopback(meet->host);
}
