// model - prints projected times of collectives on 8 to 4,096 hosts, with the schedules of
// ring/algo on the simulated network of tests/lib/model.h
//
//     make model ARGS='-L us -o us -g us -G Gbit/s -R GB/s'
#define IDIST_IMPLEMENTATION
#include "model.h"

enum { LARGEST = 4096 }; // number of hosts

static void print_row(int n) {
    static const struct {
        idist__kind kind;
        size_t nbytes;
    } columns[] = {{IDIST__BARRIER, 0},           {IDIST__ALL_REDUCE, 8},
                   {IDIST__ALL_REDUCE, 65536},    {IDIST__ALL_REDUCE, 1 << 20},
                   {IDIST__ALL_REDUCE, 64 << 20}, {IDIST__BROADCAST, 1 << 20},
                   {IDIST__ALL_GATHER, 1024}};
    int peers = 0;
    printf("%6d", n);
    for (size_t k = 0; k < IDIST__COUNT_OF(columns); k++) {
        outcome all =
            run(n, columns[k].kind, columns[k].nbytes / sizeof(int64_t), IDIST__ALGO_AUTO);
        members_free();
        TAP_REQUIRE(all.done);
        if (all.peer_count > peers) peers = all.peer_count;
        printf(" %10.3f", 1e3 * all.seconds);
        fflush(stdout);
    }
    printf(" %6d\n", peers);
}

static int print_table(int argc, char **argv) {
    for (int i = 1; i + 1 < argc; i += 2) {
        double value = atof(argv[i + 1]);
        char which = argv[i][0] == '-' ? argv[i][1] : 0;
        if (!(value > 0) || !which || !strchr("LogGR", which)) {
            fprintf(stderr, "%s %s: see the head of tests/lib/model.h\n", argv[i], argv[i + 1]);
            return 2;
        }
        if (which == 'L') latency = value * 1e-6;
        if (which == 'o') overhead = value * 1e-6;
        if (which == 'g') gap = value * 1e-6;
        if (which == 'G') gap_per_byte = 8 / (value * 1e9);
        if (which == 'R') reduction_per_byte = 1 / (value * 1e9);
    }
    latency_nbytes = (size_t)((latency + 2 * overhead) / gap_per_byte);
    printf("LogGP model: L %.1f us, o %.1f us, g %.1f us, G %.1f Gbit/s, R %.1f GB/s\n",
           1e6 * latency, 1e6 * overhead, 1e6 * gap, 8e-9 / gap_per_byte,
           1e-9 / reduction_per_byte);
    printf("projected, not measured; milliseconds until the last host is done\n\n");
    printf("%6s %10s %10s %10s %10s %10s %10s %10s %6s\n", "", "", "all_reduce", "all_reduce",
           "all_reduce", "all_reduce", "broadcast", "all_gather", "most");
    printf("%6s %10s %10s %10s %10s %10s %10s %10s %6s\n", "hosts", "barrier", "8 B", "64 KiB",
           "1 MiB", "64 MiB", "1 MiB", "1 KiB each", "peers");
    for (int n = 8; n <= LARGEST; n *= 2) print_row(n);
    return 0;
}

int main(int argc, char **argv) {
    model_init();
    return print_table(argc, argv);
}
