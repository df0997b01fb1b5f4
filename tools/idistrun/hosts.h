// hosts.h: the list of --hosts
//
//     alpha:4,me@beta,[fe80::1]:2
//
// Each word is a host: an optional user and @, then a name or an address, then an optional colon
// and number of ranks. An IPv6 address contains colons, so it needs brackets if a number follows.
#pragma once

#include "base.h"
#include "options.h"

#include <stdbool.h>

struct host {
    const char *login; // the argument of ssh: "me@beta"
    const char *name;  // "beta"
    int rank_count;
};

static struct {
    struct host *items;
    int count;
} hosts;

// Returns true for a name that every host resolves to itself.
static bool hosts_is_loopback(const char *name) {
    return strcmp(name, "localhost") == 0 || strncmp(name, "127.", 4) == 0 ||
           strcmp(name, "::1") == 0;
}

// Returns true if every host of the list has a loopback name.
static bool hosts_are_all_loopback(void) {
    for (int i = 0; i < hosts.count; i++)
        if (!hosts_is_loopback(hosts.items[i].name)) return false;
    return true;
}

// Returns the closing bracket of an IPv6 address, or NULL if the word has no brackets.
static char *hosts_find_bracket(char *word) { return *word == '[' ? strchr(word, ']') : NULL; }

// Returns the colon before the number of ranks, or NULL if the word has no number.
static char *hosts_find_colon(char *word) {
    char *bracket = hosts_find_bracket(word), *last = strrchr(word, ':');

    if (bracket) return bracket[1] == ':' ? bracket + 1 : NULL;
    return last == strchr(word, ':') ? last : NULL; // several colons mean an IPv6 address
}

// Reads one word of the list, and splits the word into the parts of the host. Returns false if the
// host has no name.
static bool hosts_read(char *word, struct host *host, int default_rank_count) {
    char *bracket = hosts_find_bracket(word), *colon = hosts_find_colon(word), *at;

    host->rank_count = colon ? options_number(colon + 1, "--hosts", 1) : default_rank_count;
    if (colon) *colon = 0;
    if (bracket) {
        *bracket = 0;
        word++;
    }

    at = strchr(word, '@');
    host->login = word;
    host->name = at ? at + 1 : word;

    return *host->name && *word != '-'; // ssh would parse a leading dash as an option
}

// Reads the list. Hosts without a number get the default. Exits if the list is wrong.
static void hosts_parse(const char *list, int default_rank_count) {
    char *words = base_copy(list); // the hosts point into this copy

    for (char *word = strtok(words, ","); word; word = strtok(NULL, ",")) {
        size_t nbytes = ((size_t)hosts.count + 1) * sizeof *hosts.items;

        hosts.items = base_or_die(realloc(hosts.items, nbytes));
        if (!hosts_read(word, &hosts.items[hosts.count++], default_rank_count))
            base_usage_error("--hosts %s: a host has no name", list);
    }
    if (!hosts.count) base_usage_error("--hosts: expected a list like alpha:4,beta:2");
}
