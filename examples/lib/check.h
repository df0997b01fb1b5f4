// check.h - CHECK and EXPECT print what failed and return 1 from the function; TRY returns the exit
// code of a function that failed
#ifndef EXAMPLES_CHECK_H
#define EXAMPLES_CHECK_H

#include <stdio.h>

// Checks a call of idist.
#define CHECK(call)                                                        \
    do {                                                                   \
        if ((call) != IDIST_OK) {                                          \
            fprintf(stderr, "%s failed: %s\n", #call, idist_last_error()); \
            return 1;                                                      \
        }                                                                  \
    } while (0)

// Checks a call of a function that returns an exit code and prints its own errors.
#define TRY(call)                           \
    do {                                    \
        int try_code = (call);              \
                                            \
        if (try_code != 0) return try_code; \
    } while (0)

// Checks a result.
#define EXPECT(condition)                                                              \
    do {                                                                               \
        if (!(condition)) {                                                            \
            fprintf(stderr, "rank %d: wrong result, not true: %s\n", idist_get_rank(), \
                    #condition);                                                       \
            return 1;                                                                  \
        }                                                                              \
    } while (0)

#endif // EXAMPLES_CHECK_H
