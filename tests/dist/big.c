// big: sends more than 4 GiB of U8 in one call between two ranks. No size may be stored in 32 bits,
// not even the number of bytes that remain after the first 1 MiB piece.
#include "idist.h"

#include "grid.h"

#define GIB ((size_t)1 << 30)
#define BIG_COUNT (4 * GIB + (2 << 20) + 4099) // odd, so not a multiple of any piece size

static size_t mem_available(void) {
    char line[200];
    unsigned long long kib = 0;
    FILE *f = fopen("/proc/meminfo", "r");
    if (!f) return 0;
    while (fgets(line, sizeof line, f))
        if (sscanf(line, "MemAvailable: %llu kB", &kib) == 1) break;
    fclose(f);
    return (size_t)kib * 1024;
}

// Writes values that are cheap to compute and do not repeat after 2^32 bytes. Each 8-byte word
// holds its own index, mixed with the rank.
static void big_fill(unsigned char *p, size_t nbytes, int rank) {
    size_t words = nbytes / 8;
    for (size_t i = 0; i < words; i++) {
        uint64_t v = (i + 1) * 0x9E3779B97F4A7C15u + (uint64_t)rank;
        memcpy(p + 8 * i, &v, 8);
    }
    memset(p + 8 * words, 0x77, nbytes % 8);
}

static size_t big_find_wrong(const unsigned char *p, size_t nbytes, int rank) {
    size_t words = nbytes / 8;
    for (size_t i = 0; i < words; i++) {
        uint64_t v = (i + 1) * 0x9E3779B97F4A7C15u + (uint64_t)rank;
        if (memcmp(p + 8 * i, &v, 8) != 0) return 8 * i;
    }
    for (size_t i = 8 * words; i < nbytes; i++)
        if (p[i] != 0x77) return i;
    return nbytes;
}

static unsigned char *big_alloc(size_t nbytes) {
    void *p = mmap(NULL, nbytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TAP_REQUIRE(p != MAP_FAILED);
    return (unsigned char *)p;
}

static void big_message(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    unsigned char *p = big_alloc(BIG_COUNT);
    (void)arg;
    (void)n;
    if (rank == 0) {
        big_fill(p, BIG_COUNT, 0);
        rank_ok(rank, idist_send(p, BIG_COUNT, IDIST_U8, 1, 0, &o));
    } else {
        idist_recv_info info = {-1, -1, 0, IDIST_I8};
        rank_ok(rank, idist_recv(p, BIG_COUNT, IDIST_U8, 0, 0, &info, &o));
        rank_check(info.count == BIG_COUNT, "got %zu expected %zu", info.count, BIG_COUNT);
        size_t wrong = big_find_wrong(p, BIG_COUNT, 0);
        rank_check(wrong == BIG_COUNT, "byte %zu is wrong", wrong);
    }
    munmap(p, BIG_COUNT);
}

static void big_broadcast(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    unsigned char *p = big_alloc(BIG_COUNT);
    (void)arg;
    (void)n;
    if (rank == 1) big_fill(p, BIG_COUNT, 1);
    rank_ok(rank, idist_broadcast(p, BIG_COUNT, IDIST_U8, 1, &o));
    size_t wrong = big_find_wrong(p, BIG_COUNT, 1);
    rank_check(wrong == BIG_COUNT, "rank %d: byte %zu is wrong", rank, wrong);
    munmap(p, BIG_COUNT);
}

static void big_all_reduce(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    unsigned char *p = big_alloc(BIG_COUNT);
    size_t wrong = 0;
    (void)arg;
    (void)n;
    for (size_t i = 0; i < BIG_COUNT; i++) p[i] = (unsigned char)((i >> 12) + i * 3);
    rank_ok(rank, idist_all_reduce(p, p, BIG_COUNT, IDIST_U8, IDIST_SUM, &o));
    for (size_t i = 0; i < BIG_COUNT; i++)
        wrong += p[i] != (unsigned char)(2 * ((i >> 12) + i * 3));
    rank_check(wrong == 0, "rank %d: %zu bytes are wrong", rank, wrong);
    munmap(p, BIG_COUNT);
}

int main(void) {
    // "0" skips the test, "1" runs the first case regardless of the available memory, and "all"
    // runs all three cases.
    const char *force = getenv("IDIST_TEST_BIG");
    size_t available = mem_available();
    char reason[200];
    tap_deadline(300);
    idist_desc d = desc_with("auto", "auto");
    d.timeout_ms = 90000;
    snprintf(reason, sizeof reason, "needs 14 GiB of available memory, there are %.1f GiB",
             (double)available / (double)GIB);
    if (force && strcmp(force, "0") == 0) return tap_skip_all("IDIST_TEST_BIG=0");
    if (!force && test_quick()) return tap_skip_all("IDIST_TEST_QUICK is set");
    if (!force && available < 14 * GIB) return tap_skip_all(reason);
    ranks_case(2, &d, big_message, NULL, "send and recv of %zu bytes", BIG_COUNT);
    if (!force || strcmp(force, "all") != 0) {
        tap_skip("broadcast and all_reduce of as much",
                 "takes longer; IDIST_TEST_BIG=all runs them");
        return tap_done();
    }
    ranks_case(2, &d, big_broadcast, NULL, "broadcast of %zu bytes", BIG_COUNT);
    ranks_case(2, &d, big_all_reduce, NULL, "all_reduce of %zu bytes", BIG_COUNT);
    return tap_done();
}
