#!/usr/bin/env bash
# big_endian.sh - tests idist on a big-endian processor (s390x, emulated by qemu): the unit tests of
# types and reductions, worlds of big-endian ranks, and a world of both byte orders. Such a mixed
# world must be refused with an error text that gives the reason.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"

cc=s390x-linux-gnu-gcc
emulate=(qemu-s390x -L /usr/s390x-linux-gnu)
for tool in $cc "${emulate[0]}"; do
    command -v "$tool" >/dev/null || {
        packages="gcc-s390x-linux-gnu libc6-dev-s390x-cross qemu-user"
        echo "1..0 # SKIP no $tool: apt-get install $packages"
        exit 0
    }
done
echo '#include <stdio.h>' | $cc -E - >/dev/null 2>&1 || {
    echo "1..0 # SKIP no libc for s390x: apt-get install libc6-dev-s390x-cross"
    exit 0
}
export IDIST_TEST_QUICK=1 IDIST_TEST_SLOW=4

# Computes sums of every dtype in a world that a launcher started, or with `world N` in a world that
# it spawns. The emulator is slow if there are more threads than cores, so the threads of tests/dist
# would not meet in time. Therefore the ranks of this program are processes.
cat >"$WORK/world.c" <<'END'
#include "idist.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static int check(int local_rank, void *arg) {
    static const size_t counts[] = {0, 1, 2, 1000, 65537};
    static unsigned char buf[8 * 65537], want[8];
    int n = idist_get_world_size(), dtype, i;
    const char *name;
    (void)local_rank, (void)arg;
    for (dtype = 0; dtype <= IDIST_F8E5M2; dtype++) {
        double one = 1, sum = n;
        name = idist_dtype_name((idist_dtype)dtype);
        size_t size = idist_dtype_size((idist_dtype)dtype), k;
        unsigned char first[8];
        /* of integers: the low bytes are the last ones here */
        const uint64_t bits = 1, total = (uint64_t)n;
        memcpy(first, (const char *)&bits + 8 - size, size);
        memcpy(want, (const char *)&total + 8 - size, size);
        if (dtype >= IDIST_F16) {
            float f = 1, g = (float)n;
            static const unsigned short f16[] = {0, 0x3c00, 0x4000, 0x4200, 0x4400};
            static const unsigned short bf16[] = {0, 0x3f80, 0x4000, 0x4040, 0x4080};
            static const unsigned char e4m3[] = {0, 0x38, 0x40, 0x44, 0x48};
            static const unsigned char e5m2[] = {0, 0x3c, 0x40, 0x42, 0x44};
            const void *a = &one, *b = &sum;
            if (dtype == IDIST_F32) a = &f, b = &g;
            if (dtype == IDIST_F16) a = &f16[1], b = &f16[n];
            if (dtype == IDIST_BF16) a = &bf16[1], b = &bf16[n];
            if (dtype == IDIST_F8E4M3) a = &e4m3[1], b = &e4m3[n];
            if (dtype == IDIST_F8E5M2) a = &e5m2[1], b = &e5m2[n];
            memcpy(first, a, size);
            memcpy(want, b, size);
        }
        for (i = 0; i < 5; i++) {
            for (k = 0; k < counts[i]; k++) memcpy(buf + k * size, first, size);
            if (idist_all_reduce(buf, buf, counts[i], (idist_dtype)dtype, IDIST_SUM, NULL) !=
                IDIST_OK)
                return 2;
            for (k = 0; k < counts[i]; k++)
                if (memcmp(buf + k * size, want, size) != 0)
                    return printf("%s, element %zu of %zu is wrong\n", name, k, counts[i]), 3;
        }
    }
    return 0;
}
int main(int argc, char **argv) {
    idist_status status;
    int rc;
    if (argc > 1) {
        status = idist_spawn(check, NULL, atoi(argv[1]), NULL);
        if (status != IDIST_OK) printf("%s: %s\n", idist_status_name(status), idist_last_error());
        return status != IDIST_OK;
    }
    status = idist_initialize(NULL);
    if (status != IDIST_OK) {
        printf("%s: %s\n", idist_status_name(status), idist_last_error());
        return 1;
    }
    rc = check(0, NULL);
    return idist_finalize() == IDIST_OK ? rc : 1;
}
END

flags=(-std=gnu11 -I. -Itests/lib -pthread)
warn=(-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror)
later world 200 $cc "${flags[@]}" -O1 "${warn[@]}" -DIDIST_IMPLEMENTATION "$WORK/world.c" -o \
    "$WORK/world"
later train 100 $cc "${flags[@]}" "${NOT_OPTIMIZED[@]}" "${warn[@]}" -DIDIST_IMPLEMENTATION -x c \
    -c idist_train.h -o "$WORK/train.o"
later native 100 cc "${flags[@]}" "${NOT_OPTIMIZED[@]}" -DIDIST_IMPLEMENTATION "$WORK/world.c" \
    -o "$WORK/native"
later types 100 $cc "${flags[@]}" -O1 -DIDIST_IMPLEMENTATION -DIDIST_NO_RING tests/unit/types.c -o \
    "$WORK/types"
later reduce 100 $cc "${flags[@]}" -O1 -DIDIST_NO_RING tests/unit/reduce.c -o "$WORK/reduce"

ok_later train "idist_train.h: compiles without a warning"
ok_later types "tests/unit/types.c: compiles"
ok_run 0 "types" 100 "${emulate[@]}" "$WORK/types"
ok_later reduce "tests/unit/reduce.c: compiles"
ok_run 0 "reductions" 150 "${emulate[@]}" "$WORK/reduce"
ok_later world "idist.h: compiles without a warning"
for n in 2 4; do ok_run 0 "all_reduce of every dtype by $n spawned ranks" 100 "${emulate[@]}" \
    "$WORK/world" $n; done
run_ranks 2 60 "${emulate[@]}" "$WORK/world"
ok $? "and by 2 that a launcher started" || cat "$WORK"/rank.* | diag

# Runs a native rank and an emulated rank, which cannot know of each other's byte order until they
# meet.
mixed() { # mixed NAME RANK_0 RANK_1: the program of each rank, as words of one argument
    local name=$1 port failed=0
    port=$(free_port)
    for rank in 0 1; do
        # shellcheck disable=SC2086 # a list
        RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 \
            MASTER_PORT=$port \
            IDIST_INIT_TIMEOUT_MS=4000 timeout -k 5 60 $2 >"$WORK/rank.$rank" 2>&1 </dev/null &
        shift
    done
    wait
    for rank in 0 1; do grep -q 'another byte order; mixed worlds are not supported' \
        "$WORK/rank.$rank" || failed=1; done
    ok $failed "$name" || cat "$WORK"/rank.* | diag
}
ok_later native "and by the native compiler"
mixed "rank 0 is little-endian, rank 1 is not: both say so" "$WORK/native" \
    "${emulate[*]} $WORK/world"
mixed "rank 0 is big-endian, rank 1 is not: both say so" "${emulate[*]} $WORK/world" "$WORK/native"
done_testing
