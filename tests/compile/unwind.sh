#!/usr/bin/env bash
# unwind.sh - tests functions of a C++ program that end with an exception, longjmp or pthread_exit.
# The implementation is compiled as C, as C++, and as C++ without exceptions (unwind.cpp).
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
command -v c++ >/dev/null || {
    echo "1..0 # SKIP no C++ compiler"
    exit 0
}
export IDIST_LOG=error
ulimit -c 0

later c 100 cc "${NOT_OPTIMIZED[@]}" -DIDIST_IMPLEMENTATION -x c -c idist_train.h -o "$WORK/c.o"
later c-O2 200 cc -O2 -fomit-frame-pointer -DIDIST_IMPLEMENTATION -x c -c idist.h -o "$WORK/c-O2.o"
later notables 100 cc "${NOT_OPTIMIZED[@]}" -fno-asynchronous-unwind-tables -DIDIST_IMPLEMENTATION \
    -x c -c idist.h -o "$WORK/notables.o"
later c++ 100 c++ "${NOT_OPTIMIZED[@]}" -DIDIST_IMPLEMENTATION -x c++ -c idist_train.h \
    -o "$WORK/c++.o"
later noexcept 100 c++ "${NOT_OPTIMIZED[@]}" -fno-exceptions -DIDIST_IMPLEMENTATION -x c++ \
    -c idist.h -o "$WORK/noexcept.o"
kinds="c c-O2 notables c++ noexcept"
if command -v clang >/dev/null; then
    later clang 100 clang -O1 -DIDIST_IMPLEMENTATION -x c -c idist.h -o "$WORK/clang.o"
    kinds="$kinds clang"
fi
for train in "" -DWITH_TRAIN; do
    c++ -std=c++11 -O0 -Wall -Wextra -Werror $train -I. -c tests/compile/unwind.cpp \
        -o "$WORK/unwind$train.o" || exit 1
done
for kind in $kinds; do
    train=
    case $kind in c | c++) train=-DWITH_TRAIN ;; esac
    ok_later "$kind" "the implementation compiles: $kind" &&
        c++ "$WORK/unwind$train.o" "$WORK/$kind.o" -lpthread -o "$WORK/unwind-$kind" || exit 1
done

# Runs workers whose function does not return. Only the parent may return from the call, with the
# reason.
spawned() { # KIND CASE HOW PATTERN
    timeout 60 "$WORK/unwind-$1" "$2" "$3" >"$WORK/out" 2>"$WORK/err" </dev/null
    grep -Eqx "$4" "$WORK/out" && [ "$(wc -l <"$WORK/out")" = 1 ]
    ok $? "$1: $3 out of a worker, $2" || cat "$WORK/out" "$WORK/err" | diag
}
for kind in $kinds; do
    dies='IDIST_ERR_WORKER_FAILED rank 1 was killed by signal 6 \(Aborted\)'
    threw="$dies" threw_int="$dies"
    if [ "$kind" = c++ ]; then
        text='IDIST_ERR_WORKER_FAILED rank 1 ended with code 1: .*: the function threw an exception'
        threw="$text: no such map"
        threw_int="$text: an exception not derived from std::exception"
    fi
    left='IDIST_ERR_WORKER_FAILED rank 1 ended with code 1: its function did not return: .*'
    for case in fork exec parallel; do
        spawned "$kind" $case throw "$threw"
        [ $case != fork ] || spawned "$kind" $case throw-int "$threw_int"
        spawned "$kind" $case longjmp "$left"
        [ $case != fork ] || spawned "$kind" $case pthread_exit "$left"
        [ $case != fork ] || spawned "$kind" $case own-longjmp 'IDIST_OK '
    done
done

# Runs two ranks; a callback throws on rank 1. If the library catches the exception, both ranks get
# its text, rank 0 perhaps in its next call. Otherwise rank 1 ends and rank 0 reports the loss.
ranks() { # KIND CASE HOW
    run_ranks 2 60 "$WORK/unwind-$1" "$2" "$3" >/dev/null 2>&1
    cat "$WORK/rank.0" "$WORK/rank.1" >"$WORK/out"
}
expect() { # NAME PATTERN...
    local name=$1 pattern status=0
    shift
    for pattern in "$@"; do
        grep -Eq -- "$pattern" "$WORK/out" || {
            status=1
            echo "nothing matches: $pattern" | diag
        }
    done
    ok $status "$name" || diag <"$WORK/out"
}
for transport in auto socket tcp; do
    export IDIST_TRANSPORT=$transport
    for case in op op-large; do
        ranks c++ $case x
        expect "c++: $case throws, $transport" \
            '^rank 1 op: IDIST_ERR_CALLBACK .*the user op of rank 1 on .* threw.*: overflow' \
            '^rank 0 (op|next): IDIST_ERR_CALLBACK .*overflow in the op$' \
            '^rank 0 next: IDIST_ERR_CALLBACK' '^rank 1 next: IDIST_ERR_CALLBACK' \
            '^rank 0 finalize' '^rank 1 finalize'
        ! grep -q '^rank 0 op: IDIST_OK' "$WORK/out" || [ $case = op ]
        ok $? "c++: no rank takes a wrong result, $case, $transport"
        ranks c $case x
        expect "c: $case throws, $transport" 'what\(\):  overflow in the op' \
            '^rank 0 next: IDIST_ERR_PEER_LOST .*rank 1 on'
    done
done
unset IDIST_TRANSPORT
for case in first only; do
    ranks c++ $case x
    expect "c++: one_rank_$case throws" \
        "^rank 1 $case: IDIST_ERR_CALLBACK .*the function threw an exception: no such data set" \
        "^rank 0 $case: IDIST_ERR_CALLBACK .*threw an exception on rank 1" \
        '^rank 0 next: IDIST_OK' '^rank 1 next: IDIST_OK' '^rank 1 finalize: IDIST_OK'
    ranks c $case x
    expect "c: one_rank_$case throws" 'no such data set' \
        "^rank 0 $case: IDIST_ERR_PEER_LOST .*rank 1 on"
done
for case in order fetch fetch-threads metric track; do
    ranks c++ $case x
    expect "c++: $case throws" "^rank 0 $case: IDIST_ERR_CALLBACK .*threw an exception.*: no " \
        '^rank 0 next: IDIST_OK' '^rank 1 next: IDIST_OK' '^rank 1 finalize: IDIST_OK'
    ranks c $case x
    expect "c: $case throws" 'what\(\):  no '
done
ranks c++ op-hpp x
expect "c++: an op of idist.hpp throws" '^rank 1 op-hpp: IDIST_ERR_CALLBACK .*exception: no sum' \
    '^rank 0 next: IDIST_ERR_CALLBACK' '^rank 1 next: IDIST_ERR_CALLBACK'
ranks c++ hook x # the first rank that calls the hook fails the group for both
expect "c++: hook throws" '^rank [01] hook: IDIST_ERR_CALLBACK .*threw an exception: no codec' \
    '^rank 0 finalize: IDIST_ERR_CALLBACK' '^rank 1 finalize: IDIST_ERR_CALLBACK'
ranks c hook x
expect "c: hook throws" 'what\(\):  no codec'
ranks c++ alloc x
expect "c++: the allocator throws" '^rank 1 split: IDIST_ERR_NO_MEMORY' '^rank 1 finalize'
IDIST_LOG=info ranks c++ log x
expect "c++: the logger throws, and the line is not lost" \
    'the logger threw an exception: disk full' \
    'IDIST_ERR_ABORTED' '^rank 0 next: IDIST_ERR_ABORTED' '^rank 1 next: IDIST_ERR_ABORTED'
ranks c++ join throw
expect "c++: parallel_run in a world of a launcher, the function throws" \
    'join: IDIST_ERR_WORKER_FAILED .*the function threw an exception: no such map' \
    'join: IDIST_ERR_WORKER_FAILED .*rank 1 on'
ranks c join throw
expect "c: parallel_run in a world of a launcher, the function throws" 'what\(\):  no such map' \
    'join: IDIST_ERR_WORKER_FAILED .*rank 1 on'
done_testing
