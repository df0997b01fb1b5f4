// unread: a rank that has not yet read the one frame that differs must not come through the next call with IDIST_OK
//
// Rank 0 gathers to the last rank, the others to rank 0. Only the last rank gets a frame of rank 0 in that call, and it has
// no eyes for it: its reads of that connection are held back here. So are all of rank 0, which would notice by itself, until
// the last rank has its answer. The barrier after the call needs nothing of rank 0 on the last rank.
#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/socket.h>

static _Atomic int held = -1;      // of the last rank
static _Atomic bool answered;      // it has
static _Thread_local bool is_deaf; // rank 0

static ssize_t read_unless_held(int fd, void *buf, size_t nbytes, int flags) {
    if (fd == held || (is_deaf && !answered)) {
        errno = EAGAIN;
        return -1;
    }
    return recv(fd, buf, nbytes, flags);
}

#define recv read_unless_held
#define IDIST_IMPLEMENTATION
#include "idist.h"

#include "ranks.h"

typedef struct plan {
    bool mismatch;
    size_t count; // of rank 0, which gathers to the last rank, in a mismatch
    _Atomic bool ready;
} plan;

static void body(idist_group *world, int rank, int n, void *arg) {
    plan *p = (plan *)arg;
    idist_opts o = opts_of(world);
    static float s[4][710], r[4][4 * 710];
    bool odd = p->mismatch && rank == 0;
    if (rank == n - 1) {
        held = *(int *)idist__ring_of(world->w)->links[0].port;
        p->ready = true;
    }
    while (!p->ready) tap_sleep_ms(1);
    is_deaf = odd;
    idist_status got = idist_gather(s[rank], r[rank], odd ? p->count : 700, IDIST_F32, odd ? n - 1 : 0, &o);
    if (got == IDIST_OK) got = idist_barrier(&o);
    rank_is(rank, got, p->mismatch ? IDIST_ERR_MISMATCH : IDIST_OK);
    if (p->mismatch && got)
        rank_check(text_names_rank(idist_last_error(), 0) && text_has_word(idist_last_error(), "root differs"),
                   "rank %d: the text names rank 0 and the root: got \"%s\"", rank, idist_last_error());
    if (rank == n - 1) {
        held = -1;
        answered = true;
    }
}

int main(void) {
    idist_desc d = desc_with("tcp", "auto");
    tap_deadline(60);
    d.timeout_ms = 5000 * test_slow_factor();
    for (size_t i = 0; i < 12; i++) {
        plan p = {i > 1, 698 + i, false};
        answered = false;
        if (p.mismatch) ranks_case_fault(4, &d, body, &p, "another root, count %zu", p.count);
        else ranks_case_fault(4, &d, body, &p, "a connection that is not read, nothing else: round %zu", i);
    }
    return tap_done();
}
