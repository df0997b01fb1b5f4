#!/usr/bin/env bash
# fake.sh - tests the stand-ins for libcudart and libnccl, with which the GPU tests are linked on a
# machine without a GPU. The stand-ins compile against the real headers with both compilers, and
# pass their own tests, also under the sanitizers.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"

cuda=${CUDA_HOME:-}
[ -n "$cuda" ] || ! nvcc=$(command -v nvcc) || cuda=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
[ -n "$cuda" ] || cuda=/usr/local/cuda
for header in cuda_runtime_api.h nccl.h; do
    if ! echo "#include <$header>" | cc -isystem "$cuda/include" -E - >/dev/null 2>&1; then
        echo "1..0 # SKIP no $header in $cuda/include (CUDA_HOME says where)"
        exit 0
    fi
done

flags=(-std=gnu11 -O1 -g -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror -isystem
    "$cuda/include" -Itests/lib)
sources=(tests/fake/test_fake.c tests/fake/cuda.c tests/fake/nccl.c)
unset CUDA_VISIBLE_DEVICES
export ASAN_OPTIONS=detect_leaks=1:exitcode=99 \
    TSAN_OPTIONS=die_after_fork=0:halt_on_error=1:exitcode=99:atexit_sleep_ms=0

build() { # ID COMPILER FLAGS...: starts a build
    local id=$1 cc=$2
    shift 2
    later "$id" 100 "$cc" "${flags[@]}" "$@" "${sources[@]}" -o "$WORK/test_$id" -pthread
}
passes() { # ID NAME
    ok_later "$1" "$2: compiles" && ok_run 0 "$2: passes" 200 "$WORK/test_$1"
}
sanitizes() { # SANITIZERS: succeeds if cc supports them
    echo 'int main(void) { return 0; }' | cc -fsanitize="$1" -x c - -o "$WORK/try" 2>/dev/null &&
        "$WORK/try"
}

for sanitizer in address,undefined thread; do
    sanitizes $sanitizer && build ${sanitizer%%,*} cc -fsanitize=$sanitizer \
        -fno-sanitize-recover=all
done
for compiler in gcc clang; do command -v $compiler >/dev/null && build $compiler $compiler; done
for compiler in gcc clang; do
    if command -v $compiler >/dev/null; then passes $compiler $compiler; else skip "$compiler" \
        "no $compiler"; fi
done
for sanitizer in address,undefined thread; do
    if sanitizes $sanitizer; then
        IDIST_TEST_SLOW=4 passes ${sanitizer%%,*} "-fsanitize=$sanitizer"
    else
        skip "-fsanitize=$sanitizer" "cc cannot do that here"
    fi
done
done_testing
