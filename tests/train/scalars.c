// scalars.c - adds scalars to a summary, as a training run does, and prints the added scalars
//
//     scalars FOLDER FIRST COUNT      steps FIRST, FIRST + 1, ... of each tag
//
// Prints a line per value with the step, the tag and the value. Tag and value are printed in
// hexadecimal digits. See summary.sh.
#include "idist.h"

#include "idist_train.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const tags[] = {"train/loss", "train/accuracy", "test/accuracy",
                                   "say \"a\", then\n\"b\"", "\xc3\xa9poque/\xe2\x82\xac"};

// Returns values that a float holds exactly, that it rounds, and that it cannot hold.
static double value_at(size_t tag, unsigned long long step) {
    static const double special[] = {0,      -0.0,  0.1,   1e300,        -1e300,
                                     1e-300, 1e-42, 1e308, 5e-324,       16777217,
                                     1e-45,  -1,    0.5,   3.4028236e38, 0.30000000000000004};
    const unsigned long long n = sizeof special / sizeof *special;
    if (tag == 3) return special[step % n];
    if (tag == 4) return step % 3 == 0 ? (double)NAN : (step % 3 == 1 ? 1 : -1) * (double)INFINITY;
    return tag == 0 ? 2.3 / (1.0 + (double)step / 3) : 1 - 0.9 / (1.0 + (double)(step + tag) / 7);
}

static void print(unsigned long long step, const char *tag, double value) {
    unsigned long long bits;
    memcpy(&bits, &value, sizeof bits);
    printf("%llu ", step);
    for (; *tag; tag++) printf("%02x", (unsigned char)*tag);
    printf(" %016llx\n", bits);
}

int main(int argc, char **argv) {
    idist_summary_desc desc;
    idist_summary *summary;
    memset(&desc, 0, sizeof desc);
    if (argc != 4 || idist_initialize(NULL) != IDIST_OK) return 2;
    unsigned long long first = strtoull(argv[2], NULL, 10), count = strtoull(argv[3], NULL, 10);
    desc.folder = argv[1];
    idist_status status = idist_summary_create(&desc, &summary);
    for (unsigned long long step = first; status == IDIST_OK && step < first + count; step++)
        for (size_t i = 0; i < sizeof tags / sizeof *tags && status == IDIST_OK; i++) {
            double value = value_at(i, step);
            status = idist_summary_add(summary, tags[i], value, step);
            if (idist_get_rank() == 0) print(step, tags[i], value);
        }
    if (status == IDIST_OK) status = idist_summary_free(&summary);
    if (status != IDIST_OK) fprintf(stderr, "%s\n", idist_last_error());
    if (idist_finalize() != IDIST_OK) return 2;
    return status == IDIST_OK ? 0 : 1;
}
