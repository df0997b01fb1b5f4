#!/usr/bin/env bash
# gpu.sh - idist_nccl.h without a GPU: every compiler; the real library without a driver; and, on the stand-in for the CUDA
# runtime (tests/fake), its own test and the distributed tests with all their buffers on the device.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/lib/tap.sh"

cuda=${CUDA_HOME:-}
[ -n "$cuda" ] || ! nvcc=$(command -v nvcc) || cuda=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
[ -n "$cuda" ] || cuda=/usr/local/cuda
[ -e "$cuda/include/cuda_runtime_api.h" ] || {
    echo "1..0 # SKIP no cuda_runtime_api.h in $cuda/include (CUDA_HOME says where)"
    exit 0
}
export IDIST_LOG=error IDIST_TEST_QUICK=1
strict=(-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror -DIDIST_IMPLEMENTATION -isystem "$cuda/include" -I.)

for with in "gcc -std=c99 -x c" "clang -std=c99 -x c" "g++ -std=c++11 -x c++" "clang++ -std=c++17 -x c++"; do
    # shellcheck disable=SC2086 # a list
    if command -v "${with%% *}" >/dev/null; then
        ok_run 0 "$with" 60 $with "${strict[@]}" -include idist_nccl.h -c idist.h -o "$WORK/idist.o"
    else
        skip "$with" "no ${with%% *}"
    fi
done
echo '#include "idist_nccl.h"' >"$WORK/all.cu"
if command -v nvcc >/dev/null; then
    ok_run 0 "nvcc" 120 nvcc -DIDIST_IMPLEMENTATION -I. -c "$WORK/all.cu" -o "$WORK/idist.o"
else
    skip "nvcc" "no nvcc"
fi

cat >"$WORK/plain.c" <<'END'
#include "idist.h"
#include <stdio.h>
#include <string.h>
static int work(int local_rank, void *arg) {
    float x = 1;
    idist_opts o;
    (void)local_rank;
    (void)arg;
    memset(&o, 0, sizeof o);
    o.stream = &o;
    if (idist_all_reduce(&x, &x, 1, IDIST_F32, IDIST_SUM, NULL) != IDIST_OK || x != 2) return 1;
    if (idist_all_reduce(&x, &x, 1, IDIST_F32, IDIST_SUM, &o) != IDIST_ERR_NO_DEVICE) return 2;
    if (idist_get_rank() == 0) printf("%s: %s\n", idist_device(), idist_last_error());
    return 0;
}
int main(int argc, char **argv) {
    idist_desc d;
    memset(&d, 0, sizeof d);
    d.device = argc > 1 ? argv[1] : NULL;
    if (idist_spawn(work, NULL, 2, &d) == IDIST_OK) return 0;
    printf("%s\n", idist_last_error());
    return 3;
}
END
if [ -e /dev/nvidia0 ]; then
    skip "without a driver" "there is a GPU here"
else
    ok_run 0 "links with the real runtime" 60 cc -DIDIST_IMPLEMENTATION -include idist_nccl.h -isystem "$cuda/include" -I. \
        "$WORK/plain.c" -L"$cuda/lib64" -Wl,-rpath,"$cuda/lib64" -lcudart -o "$WORK/plain"
    ok_run 0 "without a driver the CPU path works" 10 "$WORK/plain"
    grep -q "^cpu: all_reduce: .*rank 0 has none: cudaGetDeviceCount: .*driver" "$WORK/log"
    ok $? "and a call with a stream says what is missing" || diag <"$WORK/log"
    ok_run 3 "a device asked for by name" 10 "$WORK/plain" cuda
    grep -q "rank 0 has no device: cudaGetDeviceCount" "$WORK/log"
    ok $? "is an error that says why" || diag <"$WORK/log"
fi

# On the stand-in. Everything runs in processes and threads of this machine, and takes the time that operations are given.
flags=(-std=gnu11 -O1 -g -Wall -Wextra -isystem "$cuda/include" -I. -Itests/lib -Itests/fake)
on_fake() { # NAME SOURCE FLAGS...
    local name=$1 source=$2
    shift 2
    cc "${flags[@]}" "$@" -c tests/fake/on_device.c -o "$WORK/on_device.o" 2>"$WORK/log" &&
        cc "${flags[@]}" "$@" -c tests/fake/cuda.c -o "$WORK/cuda.o" 2>>"$WORK/log"
    ok $? "$name: builds" || diag <"$WORK/log"
    cc "${flags[@]}" "$@" "$source" "$WORK/on_device.o" "$WORK/cuda.o" -o "$WORK/test" -lpthread 2>"$WORK/log"
    ok_run 0 "$name" 150 env FAKE_CUDA_DELAY_US=300 "$WORK/test"
}
export ASAN_OPTIONS=detect_leaks=1:exitcode=99 TSAN_OPTIONS=die_after_fork=0:exitcode=99
for sanitizer in address,undefined thread; do
    IDIST_TEST_SLOW=4 on_fake "device, -fsanitize=$sanitizer" tests/fake/test_device.c -fsanitize=$sanitizer -Wno-tsan
done
on_fake "device" tests/fake/test_device.c
for test in all_reduce broadcast all_gather gather scatter reduce_scatter all_to_all scan v_forms p2p \
    mismatch; do
    source=tests/dist/$test.c
    [ -e "$source" ] || source=tests/fault/$test.c
    cc "${flags[@]}" -include tests/fake/on_device.h -c "$source" -o "$WORK/$test.o" 2>"$WORK/log" &&
        cc "$WORK/$test.o" "$WORK/on_device.o" "$WORK/cuda.o" -o "$WORK/$test" -lpthread 2>>"$WORK/log"
    ok $? "$test on device memory: builds" || diag <"$WORK/log"
    ok_run 0 "$test on device memory" 150 "$WORK/$test"
    grep -Eq '^# [1-9][0-9]+ calls on the device' "$WORK/log"
    ok $? "$test: it was on device memory" || tail -n 3 "$WORK/log" | diag
done
done_testing
