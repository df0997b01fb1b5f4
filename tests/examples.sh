#!/usr/bin/env bash
# examples.sh - builds every numbered example by the build line in its head, runs it, and compares with the output that the
# head promises (in any order of lines). 05_train_digits is run by train.sh.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/lib/tap.sh"

ln -s "$ROOT"/idist*.h "$ROOT/examples" "$WORK"/

# The line after "// build:".
build_line() { sed -n 's|^// build: *||p' "$1" | head -n 1; }

# The indented lines after "// expected output", up to the next empty comment.
expected_output() {
    awk '/^\/\/ expected output/ { inside = 1; next }
         inside && !/^\/\/         / { exit }
         inside { print substr($0, 12) }' "$1"
}

for source in examples/[0-9]*.c; do
    name=$(basename "$source" .c)
    [[ $name == *_mpi ]] && continue # run with each MPI by tests/mpi
    line=$(build_line "$source")
    case $line in
    "cc "*"-DIDIST_IMPLEMENTATION $source -o $name") ok 0 "$name: the head has a build line" ;;
    *) ok 1 "$name: the head has a build line" || echo "build line: \"$line\"" | diag ;;
    esac
    ok_run 0 "$name: builds by it" 120 sh -c "cd '$WORK' && $line" || continue
    ok "$(wc -l <"$WORK/log")" "$name: without a warning" || head -n 15 "$WORK/log" | diag
done

# compare NAME FILE...: the files together hold the promised lines.
compare() {
    local name=$1 rc=0
    shift
    expected_output "examples/$name.c" | sed "s/host box/host $(hostname)/" | sort >"$WORK/expected"
    cat "$@" | sort >"$WORK/got"
    diff "$WORK/expected" "$WORK/got" >"$WORK/diff" 2>&1 && [ -s "$WORK/expected" ] || rc=1
    ok $rc "$name: prints what the head says" || diag <"$WORK/diff"
}

one=$WORK/01_hello
if [ -x "$one" ]; then
    ok_run 0 "01_hello: alone" 60 "$one"
    grep -q '^hello from rank 0 of 1' "$WORK/log"
    ok $? "01_hello: a world of 1" || diag <"$WORK/log"
    ok_run 0 "01_hello: three ranks, spawned" 60 "$one" 3 && compare 01_hello "$WORK/log"
    run_ranks 3 60 "$one"
    ok $? "01_hello: three ranks, started by hand" || cat "$WORK"/rank.? | diag
    for r in 0 1 2; do
        grep -q "^hello from rank $r of 3: local rank $r of 3, node 0 of 1" "$WORK/rank.$r"
        ok $? "01_hello: rank $r says who it is" || diag <"$WORK/rank.$r"
    done
    ok_run 2 "01_hello: a bad argument" 60 "$one" none
    RANK=0 ok_run 1 "01_hello: RANK without WORLD_SIZE is an error" 60 "$one"
    grep -q WORLD_SIZE "$WORK/log"
    ok $? "01_hello: which names WORLD_SIZE" || diag <"$WORK/log"
fi
for name in 02_collectives 03_send_recv 04_ring_allreduce; do
    [ -x "$WORK/$name" ] || continue
    ok_run 0 "$name: three ranks, spawned" 60 "$WORK/$name" && compare $name "$WORK/log"
    run_ranks 3 60 "$WORK/$name"
    ok $? "$name: three ranks, started by hand" || cat "$WORK"/rank.? | diag
    compare $name "$WORK"/rank.[0-2]
done
for algorithm in latency bandwidth; do
    [ -x "$WORK/02_collectives" ] || continue
    IDIST_ALGO=$algorithm IDIST_TRANSPORT=tcp ok_run 0 "02_collectives: $algorithm over TCP" 60 "$WORK/02_collectives" &&
        compare 02_collectives "$WORK/log"
done
done_testing
