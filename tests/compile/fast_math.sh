#!/usr/bin/env bash
# fast_math.sh - checks that a program built with -Ofast or -ffast-math gets the same bits as any
# other program. MIN and MAX keep NaN, floats of 16 and 8 bits are converted right, and a gradient
# that is not finite is detected. The program is linked with the same flag, which makes the
# processor treat subnormals as zero.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"

cp tests/compile/fast_math.c "$WORK/fast_math.cpp"

build() { # build ID COMPILER STD SOURCE FLAGS...
    local id=$1 compiler=$2 std=$3 source=$4
    shift 4
    later "$id" 100 "$compiler" -std="$std" -Wall -Wextra -Wpedantic -Werror \
        -DIDIST_NO_RING -I. "$@" "$source" -o "$WORK/$id" -pthread
}

# COMPILER STD SOURCE FLAGS. One build compiles the whole library with the flag. In the other builds
# the library is static, so that only the functions that the test calls are optimized, which takes
# half as long. -Ofast includes -ffast-math, and each compiler optimizes C++ in the same way as C.
used="-DIDIST_API=static -Wno-unused-function"
# shellcheck disable=SC2086 # a list
build plain cc gnu11 tests/compile/fast_math.c -O1 $used
plan="gcc gnu11 tests/compile/fast_math.c -Ofast
clang++ c++11 $WORK/fast_math.cpp -Ofast $used"
[ "${IDIST_TEST_FULL:-0}" = 1 ] && plan="$plan
gcc gnu11 tests/compile/fast_math.c -O1 -ffast-math $used
clang gnu11 tests/compile/fast_math.c -Ofast $used
g++ c++11 $WORK/fast_math.cpp -Ofast $used"
while read -r compiler std source flags; do
    # shellcheck disable=SC2086 # a list
    command -v "$compiler" >/dev/null && build "$compiler$flags" "$compiler" "$std" "$source" $flags
done <<<"$plan"

same() { # same ID NAME
    ok_later "$1" "$2: compiles" || return
    ok_run 0 "$2: runs" 20 "$WORK/$1"
    diff "$WORK/plain.out" "$WORK/log" >"$WORK/diff"
    ok $? "$2: the bits of a build without it" || diag <"$WORK/diff"
}

ok_later plain "cc -O1: compiles"
ok_run 0 "cc -O1: runs" 20 "$WORK/plain"
cp "$WORK/log" "$WORK/plain.out"
while read -r compiler std source flags; do
    if command -v "$compiler" >/dev/null; then
        same "$compiler$flags" "$compiler ${flags%%" $used"}"
    else
        skip "$compiler $flags" "$compiler is not installed"
    fi
done <<<"$plan"
done_testing
