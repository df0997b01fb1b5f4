// arguments.h - reads whole numbers from the command line
#ifndef EXAMPLES_ARGUMENTS_H
#define EXAMPLES_ARGUMENTS_H

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Returns argument i as a number, or `otherwise` if the argument is missing. Returns 0 if the
// argument is not a whole number from min to max; min is 1 or more.
static inline int argument(int argc, char **argv, int i, int otherwise, int min, int max) {
    int value;

    if (i >= argc) return otherwise;
    size_t n = strspn(argv[i], "0123456789");
    value = n >= 1 && n <= 9 && !argv[i][n] ? atoi(argv[i]) : 0;
    return value >= min && value <= max ? value : 0;
}

// Returns the number of ranks, which is the only argument. Prints the usage and returns 0 if the
// arguments are wrong.
static inline int ranks_argument(int argc, char **argv, int otherwise, int min, int max) {
    int ranks = argument(argc, argv, 1, otherwise, min, max);

    if (argc <= 2 && ranks) return ranks;
    fprintf(stderr, "usage: %s [number of ranks, %d to %d]\n", argv[0], min, max);
    return 0;
}

// Returns true, and prints an error, if the number of ranks was given although a launcher has
// chosen it.
static inline bool ranks_contradict(bool given, const char *launcher) {
    if (!given || strcmp(launcher, "none") == 0) return false;
    fprintf(stderr, "%s has chosen the number of ranks: leave it out\n", launcher);
    return true;
}

// Returns true, and prints an error, if the launcher's world does not have `wanted` ranks. A
// `wanted` of 0 accepts any world.
static inline bool world_contradicts(int wanted, int ranks) {
    if (!wanted || wanted == ranks) return false;
    fprintf(stderr, "number of ranks %d, but the launcher made a world of %d\n", wanted, ranks);
    return true;
}

// Sets *value to the number in `text`, which is the value of an option. `text` is NULL if the
// option has no value. Prints an error and returns false if `text` is not a number from min to max.
static inline bool option_number(const char *option, const char *text, uint64_t min, uint64_t max,
                                 uint64_t *value) {
    char *end = NULL;

    if (!text) text = "(nothing)";
    errno = 0;
    *value = strtoull(text, &end, 10);
    if (*text >= '0' && *text <= '9' && !*end && !errno && *value >= min && *value <= max)
        return true;
    fprintf(stderr, "%s %s: expected a number from %llu to %llu\n", option, text,
            (unsigned long long)min, (unsigned long long)max);
    return false;
}

#endif // EXAMPLES_ARGUMENTS_H
