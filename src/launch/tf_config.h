// launch/tf_config.h: TF_CONFIG, TensorFlow's description of a cluster
//
//     {"cluster": {"chief": ["h0:2222"], "worker": ["h1:2222", "h2:2222"], "ps": [...]},
//      "task": {"type": "worker", "index": 1}}
//
// The ranks are the chief ("master" in old versions), if there is one, and then the workers. The
// ranks meet at the address of the first rank. Valid JSON without a cluster is ignored. The code
// checks the syntax of the whole text, but reads only the task, and counts the strings in the lists
// that it knows.
#pragma once

#include "base/fail.h"
#include "base/text.h"
#include "net/meet.h"
#include "launch/env.h"

enum { IDIST__TF_DEPTH_MAX = 32 };

static void idist__tf_config_skip_blanks(const char **at) { *at += strspn(*at, " \t\r\n"); }

// Moves *at past a valid JSON string, or returns false.
static bool idist__tf_config_skip_string(const char **at) {
    const char *end = *at;

    if (*end++ != '"') return false;
    for (; *end && *end != '"'; end++)
        if (*end == '\\' && !*++end) break;
    if (!*end) return false;
    *at = end + 1;

    return true;
}

// Moves *at past a number, true, false or null, or returns false.
static bool idist__tf_config_skip_word(const char **at) {
    static const char *const words[] = {"true", "false", "null"};
    size_t i, nbytes = strspn(*at, "+-.0123456789eE");

    for (i = 0; i < IDIST__COUNT_OF(words); i++)
        if (strncmp(*at, words[i], strlen(words[i])) == 0) nbytes = strlen(words[i]);
    *at += nbytes;

    return nbytes > 0;
}

// Moves *at past a valid JSON value. Otherwise returns false and leaves *at where the text is
// wrong.
static bool idist__tf_config_skip_value(const char **at, int depth) {
    bool is_object = **at == '{';
    char end = is_object ? '}' : ']';

    if (**at == '"') return idist__tf_config_skip_string(at);
    if (!is_object && **at != '[') return idist__tf_config_skip_word(at);
    if (depth == IDIST__TF_DEPTH_MAX) return false;

    ++*at;
    idist__tf_config_skip_blanks(at);

    if (**at == end) {
        ++*at;
        return true;
    }

    while (true) {
        if (is_object) {
            if (!idist__tf_config_skip_string(at)) return false;
            idist__tf_config_skip_blanks(at);
            if (**at != ':') return false;
            ++*at;
            idist__tf_config_skip_blanks(at);
        }

        if (!idist__tf_config_skip_value(at, depth + 1)) return false;
        idist__tf_config_skip_blanks(at);
        if (**at != end && **at != ',') return false;
        if (*(*at)++ == end) return true;
        idist__tf_config_skip_blanks(at);
    }
}

// Checks that TF_CONFIG is a JSON object. A program must not run alone only because its TF_CONFIG
// has lost a quotation mark on the way.
static idist_status idist__tf_config_check(const char *text) {
    const char *at = text;
    bool valid;

    idist__tf_config_skip_blanks(&at);
    valid = *at == '{' && idist__tf_config_skip_value(&at, 0);
    idist__tf_config_skip_blanks(&at);
    if (valid && !*at) return IDIST_OK;

    return idist__fail(
        IDIST_ERR_ENV,
        "TF_CONFIG is not a valid JSON object: wrong from character %d on, %s%.40s%s. Fix it, or "
        "unset it if it is not meant for this program",
        (int)(at - text) + 1, *at ? "\"" : "its end", at, *at ? "\"" : "");
}

// Returns the number of strings in a list. Copies the first string to `first`, unless `first`
// already holds a host.
static int idist__tf_config_count_hosts(const char *text, const char *list, char first[256]) {
    const char *at = strstr(text, list);
    int count = 0;

    while (at && at[strlen(list) + strspn(at + strlen(list), " \t\n")] != ':')
        at = strstr(at + 1, list); // the match was a value, not a name
    at = at ? strpbrk(at, "[]{}") : NULL;
    if (!at || *at != '[') return 0;

    for (at = strpbrk(at + 1, "\"]"); at && *at == '"'; at = strpbrk(at, "\"]")) {
        size_t nbytes = strcspn(++at, "\"");

        if (!count && !first[0] && nbytes < 256) snprintf(first, nbytes + 1, "%s", at);
        count++;
        at += nbytes + (at[nbytes] == '"');
    }

    return count;
}

static idist_status idist__tf_config_read(idist__config *config, const char *text) {
    char first[256] = "", type[32] = "", host[256];
    int chiefs, workers, index = -1, port = 0;
    const char *task = strstr(text, "\"task\"");
    const char *type_at = task ? strstr(task, "\"type\"") : NULL;
    const char *index_at = task ? strstr(task, "\"index\"") : NULL;
    bool is_worker, is_chief;

    config->launcher_kind = IDIST__LAUNCHER_TF_CONFIG;
    config->launcher = "tf_config";
    config->rank_var = config->size_var = "TF_CONFIG";
    chiefs = idist__tf_config_count_hosts(text, "\"chief\"", first);
    chiefs += idist__tf_config_count_hosts(text, "\"master\"", first);
    workers = idist__tf_config_count_hosts(text, "\"worker\"", first);

    if (type_at) sscanf(type_at + 6, " : \"%31[a-z]\"", type);
    if (index_at) sscanf(index_at + 7, " : %9d", &index);
    is_worker = strcmp(type, "worker") == 0;
    is_chief = strcmp(type, "chief") == 0 || strcmp(type, "master") == 0;
    if (!(is_worker || is_chief) || index < 0 || index >= (is_worker ? workers : chiefs))
        return idist__fail(
            IDIST_ERR_ENV,
            "TF_CONFIG: task %s %d is not one of the %d chiefs and %d workers, which are the ranks",
            type, index, chiefs, workers);

    config->world_size = chiefs + workers;
    config->rank = is_worker ? chiefs + index : index;
    if (!idist__parse_host_port(first, host, sizeof host, &port) || !port)
        return idist__fail(IDIST_ERR_ENV,
                           "TF_CONFIG: the address of rank 0, \"%s\", is not host:port", first);
    idist__meet_set_host(&config->meet, IDIST__MEET_TCP, host, port);

    return IDIST_OK;
}
