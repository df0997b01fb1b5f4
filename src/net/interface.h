// net/interface.h: chooses the address at which other hosts reach this host
//
// The candidates, in this order:
//
//   IDIST_ADDR            taken as it is. The value may also be a name or a router's address. This
//                         host may not know the name, or may know it as a loopback address, because
//                         installers write such a line into /etc/hosts.
//   IDIST_SOCKET_IFNAME   (or NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME) the first address of an
//                         interface that the variable admits
//   the hint              an address of this host that another host is known to use, or that this
//                         host uses to reach another host
//   otherwise             the first address of an interface; docker* and virbr* only if there are
//                         no other interfaces
//
// Addresses of the hint's family come first. Other hosts cannot use loopback and link-local
// addresses, so only IDIST_ADDR can name one.
#pragma once

#include "os/process.h"
#include "os/socket.h"
#include "base/fail.h"
#include "base/text.h"
#include "net/address.h"
#include "net/meet.h"

enum { IDIST__INTERFACES = 64 };

typedef struct idist__own_address {
    char ip[112];    // an address, or the name that IDIST_ADDR gives
    char ifname[32]; // "" if not known
} idist__own_address;

// Appends the interfaces that are up, with their addresses. If the list does not fit, "..." stands
// for the rest. Returns the number of interfaces, or -1 if they cannot be listed.
static int idist__interface_list(char *text, size_t capacity) {
    idist__os_interface all[IDIST__INTERFACES];
    int i, count = idist__os_socket_interfaces(all, IDIST__INTERFACES);
    char ip[64], entry[sizeof all[0].name + sizeof ip + 4];

    for (i = 0; i < count; i++) {
        const char *separator = i + 1 < count ? ", " : "";
        size_t reserved_nbytes = i + 1 < count ? sizeof "..." : 1;

        idist__os_socket_host_text(&all[i].address, ip, sizeof ip);
        entry[0] = 0; // not snprintf: gcc -O3 would warn that a name may be truncated
        idist__text_append(entry, sizeof entry, "%s %s%s", all[i].name, ip, separator);

        if (strlen(text) + strlen(entry) + reserved_nbytes > capacity) {
            idist__text_append(text, capacity, "...");
            break;
        }

        idist__text_append(text, capacity, "%s", entry);
    }

    return count;
}

// The environment variable that selects interfaces.
typedef struct idist__interface_filter {
    const char *variable, *list; // the list is NULL if no variable is set
    bool exact;                  // the list has whole names, not prefixes
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

// Finds the address by which this host reaches its own server, which listens on all addresses.
// Chooses the address that other hosts use, because rank 0 later takes the local address of this
// connection as its hint (see idist__records_store_address). Chooses loopback if that address does
// not belong to this host, or is valid on one link only.
static void idist__interface_reach_self(const idist__meet *server, char *ip, size_t capacity) {
    idist__os_interface all[IDIST__INTERFACES];
    int i, addresses, count = idist__os_socket_interfaces(all, IDIST__INTERFACES);
    idist__os_address address;

    idist__text_copy(ip, capacity, "127.0.0.1");
    if (idist__meet_resolve(server, 0, &addresses, &address) != IDIST_OK) return;
    for (i = 0; i < count; i++)
        if (!idist__os_socket_is_link_local(&address) &&
            idist__os_socket_is_same_host(&all[i].address, &address))
            idist__os_socket_host_text(&address, ip, capacity);
}

// Returns true if a list of interfaces in NCCL's grammar admits an interface. The list has
// prefixes, separated by commas. A "=" before the list means whole names. A "^" at the very
// beginning means all interfaces except the listed ones.
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

// Returns the first interface that a list admits, or NULL if there is none. Prefers an address of
// the same family as `like`, which may be NULL.
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

// Returns the interface that has the hint's address, or NULL if there is none. The hint may be
// NULL.
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
    return idist__fail(
        IDIST_ERR_ENV,
        "initialize: found no address at which other hosts can reach this host: set IDIST_ADDR. "
        "This host has %s",
        count ? text : "none");
}

// Finds an address of this host that other hosts can use, and ignores IDIST_ADDR. The hint,
// described at the top of this file, may be NULL.
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

// Chooses the address to advertise to other hosts. The hint, described at the top of this file, may
// be NULL.
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
