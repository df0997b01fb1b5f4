// simulators_options.h - the options of the command line
#ifndef EXAMPLES_SIMULATORS_OPTIONS_H
#define EXAMPLES_SIMULATORS_OPTIONS_H

#include "../../lib/arguments.h"
#include "simulators.h"

// Sets the defaults and reads the command line. Prints an error and returns false for a bad option.
static inline bool simulators_parse(simulators_options *o, int argc, char **argv) {
    static const char *const names[] = {"--ranks", "--simulators", "--generations", "--seed",
                                        "--slow"};
    static const uint64_t min[] = {1, 2, 1, 0, 0}; // learning compares two or more simulators
    static const uint64_t max[] = {MAX_RANKS, MAX_SIMULATORS, 1000000, UINT64_MAX, MAX_RANKS - 1};
    uint64_t values[] = {0, 100, 200, 1, MAX_RANKS};

    for (int i = 1; i < argc; i += 2) {
        int k = 0;

        while (k < 5 && strcmp(argv[i], names[k])) k++;
        if (k == 5) {
            fprintf(
                stderr,
                "unknown option %s; the options are --ranks, --simulators, --generations, --seed "
                "and --slow\n",
                argv[i]);
            return false;
        }
        if (!option_number(names[k], i + 1 < argc ? argv[i + 1] : NULL, min[k], max[k], &values[k]))
            return false;
    }
    o->ranks = values[0];
    o->simulators = values[1];
    o->generations = values[2];
    o->seed = values[3];
    o->slow = values[4];
    return true;
}

// Returns what is wrong with the options in a world of this size, or NULL.
static inline const char *simulators_check(const simulators_options *o, int ranks) {
    if (ranks > MAX_RANKS) return "more ranks than this program has room for";
    if (o->ranks && (int)o->ranks != ranks) return "--ranks contradicts the launcher: leave it out";
    if (o->slow != MAX_RANKS && o->slow >= (uint64_t)ranks)
        return "--slow names a rank that is not there";
    return NULL;
}

#endif // EXAMPLES_SIMULATORS_OPTIONS_H
