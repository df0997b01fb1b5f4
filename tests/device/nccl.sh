#!/usr/bin/env bash
# nccl.sh - tests idist_nccl.h without a GPU: with every compiler, with the real libraries but no
# driver, and with its own tests on the stand-ins for CUDA and NCCL (tests/fake).
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
# shellcheck source=tests/lib/on_fake.sh
. tests/lib/on_fake.sh

export IDIST_LOG=error IDIST_TEST_QUICK=1
strict=("${NOT_OPTIMIZED[@]}" -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror
    -DIDIST_IMPLEMENTATION -isystem "$cuda/include" -I.)

# Starts all compilations first, in parallel. Without optimization, the sanitizers check more, and
# cc takes half the time.
build_ahead sanitizer-address -fsanitize=address,undefined "${NOT_OPTIMIZED[@]}"
build_ahead sanitizer-thread -fsanitize=thread -Wno-tsan "${NOT_OPTIMIZED[@]}"
build_ahead plain
compilers=("gcc -std=c99 -x c" "clang -std=c99 -x c" "g++ -std=c++11 -x c++"
    "clang++ -std=c++17 -x c++")
for with in "${compilers[@]}"; do
    # shellcheck disable=SC2086 # a list
    command -v "${with%% *}" >/dev/null &&
        later "${with%% *}" 100 $with "${strict[@]}" -include idist_nccl.h -c idist.h -o \
            "$WORK/${with%% *}.o"
done
echo '#include "idist_nccl.h"' >"$WORK/all.cu"
command -v nvcc >/dev/null && later nvcc 150 nvcc -DIDIST_IMPLEMENTATION -I. -c "$WORK/all.cu" -o \
    "$WORK/nvcc.o"
for with in "${compilers[@]}"; do
    if command -v "${with%% *}" >/dev/null; then ok_later "${with%% *}" "$with"; else skip "$with" \
        "no ${with%% *}"; fi
done
if command -v nvcc >/dev/null; then
    ok_later nvcc "nvcc"
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
    ok_run 0 "links with the real runtime" 60 cc "${NOT_OPTIMIZED[@]}" -DIDIST_IMPLEMENTATION \
        -include idist_nccl.h -isystem "$cuda/include" -I. \
        "$WORK/plain.c" -L"$cuda/lib64" -Wl,-rpath,"$cuda/lib64" -lcudart -o "$WORK/plain"
    ok_run 0 "without a driver the CPU path works" 10 "$WORK/plain"
    grep -q "^cpu: all_reduce: .*rank 0 has none: cudaGetDeviceCount: .*driver" "$WORK/log"
    ok $? "and a call with a stream says what is missing" || diag <"$WORK/log"
    ok_run 3 "a device asked for by name" 10 "$WORK/plain" cuda
    grep -q "rank 0 has no device: cudaGetDeviceCount" "$WORK/log"
    ok $? "is an error that says why" || diag <"$WORK/log"
fi

export ASAN_OPTIONS=detect_leaks=1:exitcode=99 \
    TSAN_OPTIONS=die_after_fork=0:exitcode=99:atexit_sleep_ms=0
for sanitizer in address,undefined thread; do
    with=("-fsanitize=$sanitizer" -Wno-tsan "${NOT_OPTIMIZED[@]}")
    parts sanitizer-${sanitizer%%,*} "-fsanitize=$sanitizer"
    program tests/fake/test_nccl.c "${with[@]}"
    on_fake "NCCL, $sanitizer" IDIST_TEST_SLOW=4 FAKE_CUDA_DELAY_US=100
    program tests/fake/test_device.c "${with[@]}"
    [ $sanitizer = thread ] || on_fake "device memory, ipc, $sanitizer" IDIST_TEST_SLOW=4 \
        FAKE_CUDA_DELAY_US=300 "${ipc[@]}"
    on_fake "device memory, staged, $sanitizer" IDIST_TEST_SLOW=4 FAKE_CUDA_DELAY_US=300 \
        "${staged[@]}"
done
parts plain "plain"
awk '/^        \/\/ app.c/ { inside = 1 } inside; inside && /^        }$/ { exit }' idist_nccl.h \
    >"$WORK/doc.c"
cc "${flags[@]}" -include idist_nccl.h "$WORK/doc.c" "$PARTS"/{on_device,cuda,nccl}.o -rdynamic -o \
    "$WORK/doc" -lpthread \
    -ldl -lm >"$WORK/log" 2>&1
ok $? "the program in the header builds" || diag <"$WORK/log"
ok_run 0 "it runs" 20 "$WORK/doc"
grep -q '^rank 0 on cuda:0: 1$' "$WORK/log"
ok $? "and prints what it should" || diag <"$WORK/log"

# NCCL where a Python package installs it. The stand-in has another name, because the loader may
# know an NCCL of this machine.
cat >"$WORK/where.c" <<'END'
#include "idist.h"
#include <stdio.h>
int main(void) {
    if (idist_initialize(NULL) != IDIST_OK) return printf("%s\n", idist_last_error()), 1;
    printf("by %s\n", idist_device_backend());
    return idist_finalize() != IDIST_OK;
}
END
python=$WORK/venv/lib/python3.12/site-packages/nvidia/nccl/lib
mkdir -p "$python"
cc "${flags[@]}" -shared -fPIC tests/fake/nccl.c -o "$python/libidist_fake.so.2" >"$WORK/log" 2>&1 \
    &&
    cc "${flags[@]}" "${NOT_OPTIMIZED[@]}" -DIDIST_IMPLEMENTATION \
        -DIDIST__NCCL_FILE='"libidist_fake.so.2"' -include \
        idist_nccl.h "$WORK/where.c" \
        "$PARTS/cuda.o" -rdynamic -o "$WORK/where" -lpthread -ldl -lm >>"$WORK/log" 2>&1
ok $? "a program that looks for NCCL builds" || diag <"$WORK/log"
without=(-u VIRTUAL_ENV -u CONDA_PREFIX -u IDIST_NCCL_LIB)
for prefix in VIRTUAL_ENV CONDA_PREFIX; do
    ok_run 0 "it runs, with $prefix" 20 env "${without[@]}" $prefix="$WORK/venv" "$WORK/where"
    grep -q '^by nccl$' "$WORK/log"
    ok $? "and finds the library of the package" || diag <"$WORK/log"
done
ok_run 0 "it runs without" 20 env "${without[@]}" HOME="$WORK" "$WORK/where"
grep -q '^by ipc$' "$WORK/log"
ok $? "and finds none" || diag <"$WORK/log"

program tests/fake/test_device.c
on_fake "device memory, nccl" FAKE_CUDA_DELAY_US=300 "${nccl[@]}"
if [ "${IDIST_TEST_FULL:-0}" = 1 ]; then # the same tests without sanitizers
    on_fake "device memory, ipc" FAKE_CUDA_DELAY_US=300 "${ipc[@]}"
    on_fake "device memory, staged" FAKE_CUDA_DELAY_US=300 "${staged[@]}"
    program tests/fake/test_nccl.c
    on_fake "NCCL" FAKE_CUDA_DELAY_US=100
fi
done_testing
