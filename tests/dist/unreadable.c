// unreadable: buffers that other processes cannot read (memfd_secret). Normally a rank reads large
// buffers directly from the memory of the other process. Here such reads fail, and the data must
// arrive nevertheless.
#include "idist.h"

#include "ranks.h"

#include <sys/mman.h>
#include <sys/syscall.h>

enum { COUNT = 200000, KINDS = 10 };
enum { SEND_BUFFER = 1, RECV_BUFFER = 2, SECOND_HALF = 4 }; // the parts that are unreadable

static const char *const kind_names[KINDS] = {"all_reduce", "broadcast", "all_gather",
                                              "gather",     "scatter",   "reduce_scatter",
                                              "all_to_all", "scan",      "reduce",
                                              "send"};

typedef struct setting {
    int where; // SEND_BUFFER, ...
    int who;   // rank with such buffers, -1 for all ranks
    bool in_place;
} setting;

static bool has_secret_memory(void) {
    int fd = (int)syscall(447 /* memfd_secret */, 0);
    if (fd >= 0) close(fd);
    return fd >= 0;
}

// Returns zeroed memory. If `secret` is true, no other process can read the memory. If `half` is
// true as well, only the second half is unreadable.
static int32_t *get_memory(size_t nbytes, bool secret, bool half) {
    size_t at = half ? nbytes / 2 / 4096 * 4096 : 0;
    char *p =
        (char *)mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TAP_REQUIRE(p != MAP_FAILED);
    if (secret) {
        int fd = (int)syscall(447, 0);
        TAP_REQUIRE(fd >= 0 && ftruncate(fd, (off_t)(nbytes - at)) == 0);
        TAP_REQUIRE(mmap(p + at, nbytes - at, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd,
                         0) == p + at);
        close(fd);
    }
    return (int32_t *)(void *)p;
}

// Returns element i of block b that rank k sends.
static int32_t gives(int k, int b, int i) { return k * 1000 + b * 100 + i % 97; }

// Returns element i of block b of the result on rank r.
static int32_t arrives(int kind, int n, int r, int b, int i) {
    int32_t sum = 0;
    int last = kind == 7 ? r : n - 1;
    if (kind == 1) return gives(0, 0, i);
    if (kind == 2 || kind == 3) return gives(b, 0, i);
    if (kind == 4) return gives(0, r, i);
    if (kind == 6) return gives(b, r, i);
    if (kind == 9) return gives(0, 0, i);
    for (int k = 0; k <= last; k++) sum += gives(k, kind == 5 ? r : 0, i);
    return sum;
}

static idist_status run(int kind, int rank, int n, int32_t *send, int32_t *recv, idist_opts *o) {
    switch (kind) {
    case 0: return idist_all_reduce(send, recv, COUNT, IDIST_I32, IDIST_SUM, o);
    case 1: return idist_broadcast(rank == 0 ? send : recv, COUNT, IDIST_I32, 0, o);
    case 2: return idist_all_gather(send, recv, COUNT, IDIST_I32, o);
    case 3: return idist_gather(send, recv, COUNT, IDIST_I32, n - 1, o);
    case 4: return idist_scatter(send, recv, COUNT, IDIST_I32, 0, o);
    case 5: return idist_reduce_scatter(send, recv, COUNT, IDIST_I32, IDIST_SUM, o);
    case 6: return idist_all_to_all(send, recv, COUNT, IDIST_I32, o);
    case 7: return idist_scan(send, recv, COUNT, IDIST_I32, IDIST_SUM, o);
    case 8: return idist_reduce(send, recv, COUNT, IDIST_I32, IDIST_SUM, n - 1, o);
    default:
        if (rank == 0) return idist_send(send, COUNT, IDIST_I32, n - 1, 1, o);
        return rank == n - 1 ? idist_recv(recv, COUNT, IDIST_I32, 0, 1, NULL, o) : IDIST_OK;
    }
}

static bool gets_result(int kind, int rank, int n) {
    if (kind == 1) return rank != 0;
    return (kind != 3 && kind != 8 && kind != 9) || rank == n - 1;
}

static void all_kinds(idist_group *world, int rank, int n, void *arg) {
    const setting *s = (const setting *)arg;
    bool mine = s->who < 0 || s->who == rank, half = (s->where & SECOND_HALF) != 0;
    size_t nbytes = sizeof(int32_t) * (size_t)n * COUNT;
    int32_t *send = get_memory(nbytes, mine && (s->where & SEND_BUFFER), half);
    int32_t *recv = get_memory(nbytes, mine && (s->where & RECV_BUFFER), half);
    idist_opts o = opts_of(world);

    for (int kind = 0; kind < KINDS; kind++) {
        bool in_place = s->in_place && (kind == 0 || kind == 6 || kind == 7 || kind == 8);
        int32_t *result = in_place ? send : recv;
        int nblocks = kind == 2 || kind == 3 || kind == 6 ? n : 1, bad = 0;
        for (int b = 0; b < n; b++)
            for (int i = 0; i < COUNT; i++) send[b * COUNT + i] = gives(rank, b, i);
        rank_ok(rank, run(kind, rank, n, send, result, &o));
        for (int b = 0; b < nblocks && gets_result(kind, rank, n); b++)
            for (int i = 0; i < COUNT; i++)
                bad += result[b * COUNT + i] != arrives(kind, n, rank, b, i);
        rank_check(bad == 0, "rank %d %s: %d wrong elements", rank, kind_names[kind], bad);
    }

    munmap(send, nbytes);
    munmap(recv, nbytes);
}

int main(void) {
    idist_desc d = desc_with("auto", "remote");
    static const char *const wheres[8] = {"", "send",         "recv",         "both",
                                          "", "half of send", "half of recv", "half of both"};
    tap_deadline(120);
    (void)ranks__log();
    if (!has_secret_memory()) {
        tap_skip("buffers that other processes cannot read", "no memfd_secret");
        return tap_done();
    }
    for (int n = 2; n <= 4; n++)
        for (int where = 1; where <= 7; where += where == 3 ? 2 : 1)
            for (int who = -1; who < 2; who++)
                for (int in_place = 0; in_place < 2; in_place++) {
                    setting s = {where, who, in_place != 0};
                    if (test_quick() && (n > 2 + (where == 3) || (where & SECOND_HALF))) continue;
                    procs_case(n, &d, all_kinds, &s, "%s of %s%s, n=%d", wheres[where],
                               who < 0 ? "all ranks"
                               : who   ? "rank 1"
                                       : "rank 0",
                               in_place ? ", in place" : "", n);
                }
    return tap_done();
}
