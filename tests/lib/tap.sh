# tap.sh - functions that the shell tests share: TAP lines, a temporary folder, ranks started by
# hand. Source it from a script in tests/. It changes to the root of the project.
# shellcheck shell=bash
set -u
shopt -s lastpipe # so that ok counts at the end of a pipe
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
# shellcheck disable=SC2034 # used by the scripts that source this file
ROOT=$PWD
WORK=$(mktemp -d) || exit 1
declare -A LATER=() # by id: the processes that `later` has started; each has a deadline
trap '[ ${#LATER[@]} = 0 ] || wait "${LATER[@]}" 2>/dev/null; rm -rf "$WORK"' EXIT
TAP_RUN=0
TAP_FAILED=0

# Removes the variables of a launcher that may run these tests, and limits all waits to less than
# the time of a test.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK MASTER_ADDR MASTER_PORT IDIST_RANK \
    IDIST_WORLD_SIZE IDIST_BACKEND
unset IDIST_INIT_METHOD IDIST_GROUP_NAME IDIST_ALGO IDIST_TRANSPORT IDIST_LOG
export IDIST_TIMEOUT_MS=30000 IDIST_INIT_TIMEOUT_MS=30000

diag() { sed 's/^/#   /'; } # prints stdin as diagnostics

ok() { # STATUS NAME: 0 passes
    TAP_RUN=$((TAP_RUN + 1))
    if [ "$1" -eq 0 ]; then
        echo "ok $TAP_RUN - $2"
        return 0
    fi
    TAP_FAILED=$((TAP_FAILED + 1))
    echo "not ok $TAP_RUN - $2"
    return 1
}
skip() { # NAME REASON
    TAP_RUN=$((TAP_RUN + 1))
    echo "ok $TAP_RUN - $1 # SKIP $2"
}
# A command counts as hanging after PATIENCE times its SECONDS. The SECONDS of ok_run and later are
# ample for an idle machine. If speed matters, the tests measure it themselves.
PATIENCE=3
# Runs a command with its output in $WORK/log. Passes if the command ends with STATUS; otherwise,
# prints the output.
ok_run() { # STATUS NAME SECONDS COMMAND...
    local want=$1 name=$2 seconds=$(($3 * PATIENCE)) rc=0
    shift 3
    timeout -k 5 "$seconds" "$@" >"$WORK/log" 2>&1 </dev/null || rc=$?
    [ $rc -eq 124 ] && echo "hang: no end after $seconds s" >>"$WORK/log"
    ok $((rc != want)) "$name" && return 0
    grep -A 4 '^not ok' "$WORK/log" | head -n 30 | diag # from a test that the command ran
    grep -m 1 -A 30 -E '(WARNING: Thread|ERROR: (Address|Leak))Sanitizer|runtime error:' \
        "$WORK/log" | diag
    echo "exit status $rc, expected $want; the output ends with" | diag
    tail -n 15 "$WORK/log" | diag
    return 1
}
# Options for a program that does not depend on the optimizer. They cut the time to compile to a
# quarter. The macro removes the attribute optimize("O3") of the reductions.
# shellcheck disable=SC2034 # used by the scripts that source this file
NOT_OPTIMIZED=(-O0 '-Doptimize(level)=')
# Makes cc and c++ run compile_once.sh from here on, so that they do not repeat the compilations of
# other tests.
compile_once() {
    local compiler
    mkdir "$WORK/compilers"
    for compiler in cc c++; do
        command -v $compiler >/dev/null || continue
        printf '#!/bin/sh\nexec "%s" "%s" "$@"\n' "$ROOT/tests/lib/compile_once.sh" \
            "$(command -v $compiler)" >"$WORK/compilers/$compiler"
        chmod +x "$WORK/compilers/$compiler"
    done
    PATH=$WORK/compilers:$PATH
}
# later ID SECONDS COMMAND...: runs a command in the background. At most one command per core runs
# at a time. ok_later ID NAME waits for the command and then reports like ok_run 0.
CORES=$(nproc 2>/dev/null || echo 2)
# The status goes through a file, because bash forgets the status of a process once another child
# gets its number.
later() {
    local id=$1 seconds=$(($2 * PATIENCE)) other n=$CORES
    shift 2
    while [ "$n" -ge "$CORES" ]; do
        n=0
        for other in "${!LATER[@]}"; do [ -e "$WORK/$other.status" ] || n=$((n + 1)); done
        [ "$n" -lt "$CORES" ] || sleep 0.05
    done
    rm -f "$WORK/$id.status"
    {
        timeout -k 5 "$seconds" "$@" >"$WORK/$id.later" 2>&1 </dev/null
        echo $? >"$WORK/$id.ended"
        mv "$WORK/$id.ended" "$WORK/$id.status"
    } &
    LATER[$id]=$!
}
ok_later() {
    local rc
    until [ -e "$WORK/$1.status" ]; do sleep 0.05; done # the process has a deadline
    rc=$(cat "$WORK/$1.status")
    cp "$WORK/$1.later" "$WORK/log"
    ok "$rc" "$2" && return 0
    echo "exit status $rc (124: it took too long); the output ends with" | diag
    tail -n 15 "$WORK/log" | diag
    return 1
}
done_testing() {
    echo "1..$TAP_RUN"
    [ "$TAP_FAILED" -eq 0 ] && [ "$TAP_RUN" -gt 0 ]
    exit
}

free_port() {
    perl -MIO::Socket::INET -e \
        'print IO::Socket::INET->new(Listen => 1, LocalAddr => "127.0.0.1")->sockport'
}

# Starts COMMAND as N ranks, as a launcher does. Rank r writes to $WORK/rank.r. Fails if a rank
# fails.
run_ranks() { # N SECONDS COMMAND...
    local n=$1 seconds=$2 port r pids=() failed=0
    shift 2
    port=$(free_port)
    for ((r = 0; r < n; r++)); do
        RANK=$r LOCAL_RANK=$r WORLD_SIZE=$n LOCAL_WORLD_SIZE=$n MASTER_ADDR=127.0.0.1 \
            MASTER_PORT=$port \
            timeout -k 5 "$seconds" "$@" >"$WORK/rank.$r" 2>&1 </dev/null &
        pids+=($!)
    done
    for r in "${!pids[@]}"; do
        wait "${pids[$r]}" || {
            echo "rank $r ended with status $?" >>"$WORK/rank.$r"
            failed=1
        }
    done
    return $failed
}
