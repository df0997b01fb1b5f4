// stream.c - checks the copy that bypasses the caches, and when the library chooses it
#include <stdbool.h>

#define IDIST_IMPLEMENTATION
#include "idist.h"

#include "tap.h"

enum { ROOM = 1 << 17 };

static unsigned char from[ROOM], to[ROOM];

// Returns true if a copy is right and leaves the bytes before and after it unchanged.
static bool copies(size_t to_at, size_t from_at, size_t nbytes) {
    memset(to, 0xEE, sizeof to);
    idist__os_cpu_stream((char *)to + to_at, (const char *)from + from_at, nbytes);

    for (size_t i = 0; i < to_at; i++)
        if (to[i] != 0xEE) return false;
    if (memcmp(to + to_at, from + from_at, nbytes) != 0) return false;
    for (size_t i = to_at + nbytes; i < to_at + nbytes + 128; i++)
        if (to[i] != 0xEE) return false;

    return true;
}

static void copies_all(void) {
    static const size_t large[] = {4095, 4096, 4097, 65536 - 1, 65536 + 63};
    bool all = true;

    for (size_t i = 0; i < ROOM; i++) from[i] = (unsigned char)(i * 7 % 251);

    for (size_t to_at = 64; to_at < 128; to_at++)
        for (size_t nbytes = 0; nbytes < 200 && all; nbytes++) all = copies(to_at, 3, nbytes);
    tap_ok(all, "every place in a line, up to 199 bytes");

    for (size_t i = 0; i < sizeof large / sizeof *large; i++)
        for (size_t k = 0; k < 64 && all; k += 7) all = copies(64 + k, 80 - k, large[i]);
    tap_ok(all, "large ones");
}

// Makes n writes of nbytes that take plain_ns with ordinary stores and stream_ns past the caches.
// Returns how many writes bypassed the caches.
static int writes(idist__pace *p, int n, size_t nbytes, int64_t plain_ns, int64_t stream_ns) {
    int streamed = 0;

    for (int i = 0; i < n; i++) {
        int64_t begin_ns;
        bool way = idist__pace_begin(p, nbytes, &begin_ns);

        streamed += way;
        if (begin_ns) idist__pace_add(p, way, way ? stream_ns : plain_ns, nbytes);
    }

    return streamed;
}

// Mixes one small write, for which the caches are faster, with fifteen large ones, for which
// bypassing the caches is faster.
static void mixes(void) {
    idist__pace p;
    int streamed = 0;

    memset(&p, 0, sizeof p);

    for (int i = 0; i < 200; i++) {
        writes(&p, 1, 4096, 150, 400);
        streamed += writes(&p, 15, 32768, 20000, 5000);
    }

    tap_ok(streamed > 2400, "sizes in a rhythm: %d of 3,000 large writes past the caches",
           streamed);
}

static void chooses(void) {
    idist__pace p;
    int n;

    memset(&p, 0, sizeof p);
    tap_ok(writes(&p, 1000, IDIST__STREAM_BYTES - 1, 400, 100) == 0, "never a small write");

    n = writes(&p, 1190, 16384, 400, 500);
    tap_ok(!p.streams && n == 4 + 9, "caches are faster: %d of 1,190 writes past them", n);

    n = writes(&p, 1190, 16384, 2000, 500);
    tap_ok(p.streams && n > 700, "that changes: %d of 1,190 writes past them", n);

    n = writes(&p, 1190, 16384, 400, 500);
    tap_ok(!p.streams && n < 595, "and changes back: %d of 1,190 writes past them", n);

    memset(&p, 0, sizeof p);
    writes(&p, 8, 16384, 2000, 500);
    tap_ok(p.streams, "eight writes are enough");

    idist__pace_add(&p, true, INT64_MAX, 16384);
    tap_ok(p.streams, "an interrupted write past the caches changes nothing");

    memset(&p, 0, sizeof p);
    writes(&p, 8, 16384, 900, 500);
    idist__pace_add(&p, false, 1000000000, 16384);
    tap_ok(!p.streams, "nor does one into them, and nearly twice as fast is not enough");

    idist__pace_add(&p, true, INT64_MAX, IDIST__STREAM_BYTES);
    idist__pace_add(&p, true, 0, 1 << 30);
    tap_ok(p.times[true][0] && p.times[true][1], "the longest and the shortest time count");
}

int main(void) {
    tap_deadline(60);
    copies_all();
    chooses();
    mixes();
    return tap_done();
}
