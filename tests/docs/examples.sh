#!/usr/bin/env bash
# examples.sh - builds every numbered example by the build line in its head, runs it, and compares
# its output with the output that the head promises. The lines may be in any order, and three dots
# stand for any text. Other scripts run examples/apps (tests/train), 26_particles (particles.sh),
# and the examples for GPUs (tests/device/examples.sh).
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
# shellcheck source=tests/lib/examples.sh
. tests/lib/examples.sh

ln -s "$ROOT"/idist*.h "$ROOT/idist.hpp" "$ROOT/examples" "$WORK"/

for source in examples/[0-9]*.c examples/[0-9]*.cpp; do
    [ -e "$source" ] || continue
    name=$(basename "${source%.*}")
    [[ $source != *.cpp ]] || command -v c++ >/dev/null || {
        skip "$name" "no c++ here (apt-get install g++)"
        continue
    }
    [[ $name == *_mpi || $name == *_gpu_* || $name == *_xla_* ]] &&
        continue # run by tests/mpi, tests/device/examples.sh and tests/device/xla.sh
    line=$(build_line "$source")
    case $line in
    "cc "*"-DIDIST_IMPLEMENTATION $source -o $name" | \
        "c++ "*"-DIDIST_IMPLEMENTATION $source -o $name")
        ok 0 "$name: the head has a build line"
        ;;
    *) ok 1 "$name: the head has a build line" || echo "build line: \"$line\"" | diag ;;
    esac
    build_example "$source" "$name"
done

# compare NAME FILE...: checks that the files together contain exactly the promised lines.
compare() {
    local name=$1 rc=0 source=examples/$1.c promised got
    shift
    [ -f "$source" ] || source=examples/$name.cpp
    expected_output "$source" | sed "s/host box/host $(hostname)/" | sort >"$WORK/expected"
    cat "$@" | sort >"$WORK/got"
    # A line that matches a promised line with dots counts as that line.
    while IFS= read -r promised <&3 && IFS= read -r got <&4; do
        # shellcheck disable=SC2053 # a pattern
        [[ $promised == *...* && $got == ${promised//.../?*} ]] && got=$promised
        printf '%s\n' "$got"
    done 3<"$WORK/expected" 4<"$WORK/got" >"$WORK/matched"
    [ "$(wc -l <"$WORK/got")" -eq "$(wc -l <"$WORK/expected")" ] &&
        cmp -s "$WORK/expected" "$WORK/matched" &&
        [ -s "$WORK/expected" ] || rc=1
    ok $rc "$name: prints what the head says" || diff "$WORK/expected" "$WORK/got" | diag
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

# The training programs: 05_train, those from 21 to 25, and 27_mlflow. With the number of ranks that
# the head shows, a program prints what the head says, however it was started. With other numbers of
# ranks, the program checks itself, and its output contains the given lines.
spawned() { # NAME RANKS LINE...
    local name=$1 n=$2 line
    shift 2
    ok_run 0 "$name: $n spawned" 60 "$WORK/$name" "$n" || return
    for line; do
        grep -qxF -- "$line" "$WORK/log"
        ok $? "$name: $n spawned: \"$line\"" || diag <"$WORK/log"
    done
}
by_hand() { # NAME RANKS: also checks that only rank 0 prints
    local name=$1 n=$2
    run_ranks "$n" 60 "$WORK/$name"
    ok $? "$name: $n started by hand" || cat "$WORK"/rank.? | diag
    cat "$WORK"/rank.[1-9] >"$WORK/others"
    ok "$(wc -c <"$WORK/others")" "$name: $n started by hand: only rank 0 speaks" ||
        diag <"$WORK/others"
    rm "$WORK"/rank.[1-9]
}
refuses() { # NAME ARGUMENT...: tries each argument alone, and five that no program accepts
    local name=$1 argument
    shift
    for argument in "$@" "" none 3x -1 0; do
        ok_run 2 "$name: refuses \"$argument\"" 20 "$WORK/$name" "$argument"
    done
    grep -q '^usage: ' "$WORK/log"
    ok $? "$name: and says how to call it" || diag <"$WORK/log"
}
# Starts three ranks, of which rank 1 does not find the images. Rank 1 ends with an error. The other
# ranks also end with an error, and print TEXT.
without_data() { # NAME TEXT
    local name=$1 text=$2 r
    # shellcheck disable=SC2016 # the ranks expand it
    run_ranks 3 60 sh -c '[ "$RANK" != 1 ] || cd /; exec "$1"' sh "$WORK/$name"
    for r in 0 1 2; do
        [ $r != 1 ] || text='digits.csv is not here'
        grep -q -- "$text" "$WORK/rank.$r" && grep -q "^rank $r ended with status 1" "$WORK/rank.$r"
        ok $? "$name: rank 1 does not find the images: rank $r says so and ends" ||
            diag <"$WORK/rank.$r"
        text=$2
    done
    rm "$WORK"/rank.?
}

name=05_train
if [ -x "$WORK/$name" ]; then
    ok_run 0 "$name: spawned" 60 "$WORK/$name" && compare $name "$WORK/log"
    by_hand $name 2
    compare $name "$WORK/rank.0"
    by_hand $name 3
    without_data $name 'failed: .*rank 1 on .* was lost'
fi

name=21_average_gradients
if [ -x "$WORK/$name" ]; then
    ok_run 0 "$name: spawned" 60 "$WORK/$name" && compare $name "$WORK/log"
    by_hand $name 2
    compare $name "$WORK/rank.0"
    for n in 1 3 4; do
        spawned $name $n \
            "1437 images to train; each of $n ranks has $((1437 / n)), in batches of $((128 / n))"
    done
    by_hand $name 3
    without_data $name 'failed: .*rank 1 on .* was lost'
    refuses $name 65 2.5
    ok_run 2 "$name: refuses two numbers" 20 "$WORK/$name" 2 2
fi

name=22_pipeline
if [ -x "$WORK/$name" ]; then
    ok_run 0 "$name: spawned" 60 "$WORK/$name" && compare $name "$WORK/log"
    IDIST_TRANSPORT=tcp ok_run 0 "$name: over TCP" 60 "$WORK/$name" && compare $name "$WORK/log"
    by_hand $name 3
    compare $name "$WORK/rank.0"
    expected_output examples/$name.c | grep -E '^(epoch|weights|accuracy)' >"$WORK/promised"
    mapfile -t promised <"$WORK/promised" # the same for any number of ranks
    for n in 1 2 4; do spawned $name $n "${promised[@]}"; done
    by_hand $name 2
    without_data $name 'failed: .*rank 1 on .* was lost'
    refuses $name 5
    run_ranks 5 60 "$WORK/$name"
    ok $(($? == 0)) "$name: more ranks than layers fail"
    grep -q '5 ranks are too many: there are 4 layers' "$WORK"/rank.?
    ok $? "$name: and it says so" || cat "$WORK"/rank.? | diag
    rm "$WORK"/rank.?
fi

name=23_parameter_server
if [ -x "$WORK/$name" ]; then
    ok_run 0 "$name: spawned" 60 "$WORK/$name" && compare $name "$WORK/log"
    by_hand $name 4
    compare $name "$WORK/rank.0"
    ok_run 0 "$name: one worker" 60 "$WORK/$name" 2 && cp "$WORK/log" "$WORK/first"
    grep -qx 'worker 1: 2000 updates, staleness 0.00 on average and 0 at most' "$WORK/first"
    ok $? "$name: one worker: makes all updates, none is stale" || diag <"$WORK/first"
    ok_run 0 "$name: one worker, again" 60 "$WORK/$name" 2
    cmp -s "$WORK/log" "$WORK/first"
    ok $? "$name: one worker: every run is the same" || cat "$WORK/first" "$WORK/log" | diag
    for n in 3 6; do
        ok_run 0 "$name: $n ranks" 60 "$WORK/$name" $n 1000 || continue
        sum=$(sed -n 's/^worker [0-9]*: \([0-9]*\) updates.*/\1/p' "$WORK/log" | paste -sd+)
        ok $(((sum) != 1000)) "$name: $n ranks: the workers' updates, $sum, are 1000" ||
            diag <"$WORK/log"
    done
    without_data $name 'failed: .*rank 1 on .* was lost'
    refuses $name 1 17
    for updates in 3 none 100x "" 99999999999 100000001; do
        ok_run 2 "$name: refuses '$updates' updates" 20 "$WORK/$name" 4 "$updates"
        grep -q 'usage: .*number of ranks, 2 to 16.*updates, 4 to 100000000' "$WORK/log"
        ok $? "$name: and names the argument" || diag <"$WORK/log"
    done
    ok_run 2 "$name: refuses a third argument" 20 "$WORK/$name" 4 8 8
    run_ranks 3 20 "$WORK/$name" 4
    [ "$(cat "$WORK"/rank.[0-2] | grep -c 'ended with status 2')" = 3 ] &&
        grep -q 'number of ranks 4, but the launcher made a world of 3' "$WORK/rank.0"
    ok $? "$name: refuses a number of ranks that is not the launcher's" ||
        cat "$WORK"/rank.? | diag
    rm "$WORK"/rank.?
    run_ranks 1 20 "$WORK/$name"
    grep -q '1 ranks: it takes 2 to 16' "$WORK/rank.0"
    ok $? "$name: a server alone is refused" || diag <"$WORK/rank.0"

    # Kills a worker in the middle of an endless training. The other ranks end, and name the killed
    # rank.
    port=$(free_port)
    pids=()
    for r in 0 1 2 3; do
        RANK=$r LOCAL_RANK=$r WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port timeout -k 5 60 \
            sh -c "echo \$\$ >'$WORK/pid.$r'; exec '$WORK/$name' 4 100000000" >"$WORK/rank.$r" \
            2>&1 </dev/null &
        pids+=($!)
    done
    for _ in $(seq 600); do
        grep -q '^server on rank 0' "$WORK/rank.0" && break
        sleep 0.05
    done
    kill -KILL "$(cat "$WORK/pid.2")"
    wait "${pids[2]}" 2>/dev/null
    for r in 0 1 3; do
        rc=0
        wait "${pids[$r]}" || rc=$?
        ok $((rc != 1)) "$name: worker 2 killed: rank $r ends with 1" ||
            diag <<<"it was $rc (124: a hang)"
        grep -q 'failed: .*rank 2 on .* was lost' "$WORK/rank.$r"
        ok $? "$name: worker 2 killed: rank $r names it" || diag <"$WORK/rank.$r"
    done
    rm "$WORK"/rank.?
fi

name=25_mixed
if [ -x "$WORK/$name" ]; then
    ok_run 0 "$name: spawned" 60 "$WORK/$name" && compare $name "$WORK/log"
    by_hand $name 2
    compare $name "$WORK/rank.0"
    for n in 1 3 4; do
        spawned $name $n "1437 images to train, 359 to test, on $n ranks" \
            "the same weights on every rank"
    done
    by_hand $name 4
    without_data $name '^25_mixed: .*abort'
    refuses $name 65
    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 ok_run 2 \
        "$name: the number of ranks is the launcher's" 20 "$WORK/$name" 3
fi

name=27_mlflow
if [ -x "$WORK/$name" ]; then
    cd "$WORK" || exit 1 # where the program makes mlruns
    ok_run 0 "$name: spawned" 60 "$WORK/$name" && compare $name "$WORK/log"
    by_hand $name 2
    compare $name "$WORK/rank.0"
    by_hand $name 3
    without_data $name 'failed: .*rank 1 on .* was lost'
    cd "$ROOT" || exit 1
fi

for algorithm in latency bandwidth; do
    [ -x "$WORK/02_collectives" ] || continue
    IDIST_ALGO=$algorithm IDIST_TRANSPORT=tcp ok_run 0 "02_collectives: $algorithm over TCP" 60 \
        "$WORK/02_collectives" &&
        compare 02_collectives "$WORK/log"
done
done_testing
