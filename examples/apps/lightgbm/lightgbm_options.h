// lightgbm_options.h - the options of the command line
#ifndef LIGHTGBM_OPTIONS_H
#define LIGHTGBM_OPTIONS_H

#include "../../lib/arguments.h"

enum { LIGHTGBM_MAX_RANKS = 64, LIGHTGBM_MAX_ROWS = 100000000 };

typedef enum lightgbm_learner { LEARNER_SERIAL, LEARNER_DATA, LEARNER_VOTING } lightgbm_learner;

typedef enum lightgbm_network { NETWORK_IDIST, NETWORK_SOCKET } lightgbm_network;

static const char *const lightgbm_learners[] = {"serial", "data", "voting", NULL};
static const char *const lightgbm_networks[] = {"idist", "socket", NULL};

typedef struct lightgbm_options {
    const char *library, *parameters;
    const char *data, *model;     // NULL if not given
    uint64_t ranks, rows, rounds; // ranks is 0 if not given
    int learner, network;         // learner is -1 if not given
} lightgbm_options;

// Sets *value to the index of `text` in `names`. Prints an error and returns false if `text` is not
// there.
static inline bool lightgbm_option_name(const char *option, const char *text,
                                        const char *const *names, int *value) {
    for (*value = 0; names[*value]; ++*value)
        if (strcmp(text, names[*value]) == 0) return true;
    fprintf(stderr, "%s %s: expected", option, text);
    for (int i = 0; names[i]; i++) fprintf(stderr, "%s %s", i ? "," : "", names[i]);
    fprintf(stderr, "\n");
    return false;
}

// Sets one option. Prints an error and returns false if the option or its value is wrong.
static inline bool lightgbm_set_option(lightgbm_options *o, const char *name, const char *value) {
    static const char *const texts[] = {"--library", "--parameters", "--data", "--model"};
    const char **const to[] = {&o->library, &o->parameters, &o->data, &o->model};

    for (int i = 0; i < 4; i++) {
        if (strcmp(name, texts[i])) continue;
        if (!value) fprintf(stderr, "%s needs a value\n", name);
        else *to[i] = value;
        return value != NULL;
    }
    if (strcmp(name, "--ranks") == 0)
        return option_number(name, value, 1, LIGHTGBM_MAX_RANKS, &o->ranks);
    if (strcmp(name, "--rows") == 0)
        return option_number(name, value, 1, LIGHTGBM_MAX_ROWS, &o->rows);
    if (strcmp(name, "--rounds") == 0)
        return option_number(name, value, 1, LIGHTGBM_MAX_ROWS, &o->rounds);
    if (strcmp(name, "--tree-learner") == 0)
        return lightgbm_option_name(name, value ? value : "(nothing)", lightgbm_learners,
                                    &o->learner);
    if (strcmp(name, "--network") == 0)
        return lightgbm_option_name(name, value ? value : "(nothing)", lightgbm_networks,
                                    &o->network);
    fprintf(stderr,
            "unknown option %s; the options are --library, --data, --rows, --rounds, "
            "--tree-learner, --network, --ranks, --parameters and --model\n",
            name);
    return false;
}

// Sets the defaults and reads the command line. Prints an error and returns false for a bad option.
static inline bool lightgbm_parse(lightgbm_options *o, int argc, char **argv) {
    const char *library = getenv("LIGHTGBM_LIBRARY");

    memset(o, 0, sizeof *o);
    o->library = library ? library : "lib_lightgbm.so";
    o->parameters = "";
    o->rows = 20000;
    o->rounds = 40;
    o->learner = -1;
    for (int i = 1; i < argc; i += 2)
        if (!lightgbm_set_option(o, argv[i], i + 1 < argc ? argv[i + 1] : NULL)) return false;

    return true;
}

#endif // LIGHTGBM_OPTIONS_H
