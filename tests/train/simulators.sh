#!/usr/bin/env bash
# simulators.sh - tests examples/apps/simulators: the program learns to balance and prints what the
# comment at its head promises. Any number of ranks, however started, learns the same. If a rank
# dies, the errors of the other ranks name it. An error names a wrong option.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
# shellcheck source=tests/lib/examples.sh
. tests/lib/examples.sh

SOURCE=examples/apps/simulators/main.c
PROGRAM=$WORK/simulators
ln -s "$ROOT"/idist*.h "$ROOT/examples" "$WORK"/
build_example $SOURCE simulators || done_testing

# Prints what was learned: the generations and the weights.
learned() { sed -n -e '/^generation/p' -e 's/^\(checksum 0x[0-9a-f]*\).*/\1/p' "$1"; }

# Checks that FILE shows the reference's generations and weights, on this number of ranks.
check_learned() { # NAME FILE RANKS
    learned "$2" | cmp -s - "$WORK/reference"
    ok $? "$1: the same generations and weights as one rank" || learned "$2" |
        diff "$WORK/reference" - | head -n 5 | diag
    grep -q "^checksum 0x[0-9a-f]* on all $3 ranks$" "$2"
    ok $? "$1: equal weights on all $3 ranks" || tail -n 3 "$2" | diag
}

# check_said NAME PATTERN FILE...: checks that each file has a line that matches.
check_said() {
    local name=$1 pattern=$2 file rc=0
    shift 2
    for file in "$@"; do
        grep -Eqe "$pattern" "$file" && continue
        rc=1
        { echo "no \"$pattern\" in $(basename "$file"), which ends with" && tail -n 5 "$file"; } |
            diag
    done
    ok $rc "$name"
}

# Waits until PATTERN is in FILE. Fails after 20 s.
wait_for() { # PATTERN FILE
    local i
    for ((i = 0; i < 400; i++)); do
        grep -q "$1" "$2" && return
        sleep 0.05
    done
    return 1
}

# The output must have the lines of the head in the same order. Dots in the head stand for a number,
# and a line "..." stands for all other generations.
ok_run 0 "by default" 60 "$PROGRAM"
expected_output $SOURCE | grep -v '^\.\.\.$' |
    sed -e 's/%/[%]/g' -e 's/0x\.\.\./0x[0-9a-f]+/' -e 's/\.\.\./[0-9.]+/g' \
    -e 's/.*/^&$/' >"$WORK/expected"
awk 'NR == FNR { promised[++n] = $0; next }
     FNR > 2 &&
     /^generation +[0-9]+: mean return [0-9.]+ of 500, episodes of [0-9]+ to [0-9]+ steps$/ { next }
     {
        seen++
        if ($0 !~ promised[seen]) {
            print "line " FNR ": " $0; print "promised: " promised[seen]; bad = 1
        }
     }
     END { exit bad || n == 0 || seen != n }' "$WORK/expected" "$WORK/log" >"$WORK/diff"
ok $? "by default: prints what the head says" || diag <"$WORK/diff"
awk '/^generation/ { sum[++n] = $5; if ($10 == $12) even = 1 }
     END { exit !(n > 5 && n < 100 && sum[1] < 60 && sum[n] >= 475 && sum[n] <= 500) || even }' \
    "$WORK/log"
ok $? "by default: learns from a mean return below 60 to 475, by episodes of different lengths" ||
    diag <"$WORK/log"

ok_run 0 "1 rank" 60 "$PROGRAM" --ranks 1
learned "$WORK/log" >"$WORK/reference"
check_learned "1 rank" "$WORK/log" 1
for n in 2 3 5; do
    ok_run 0 "$n ranks" 60 "$PROGRAM" --ranks $n && check_learned "$n ranks" "$WORK/log" $n
done
IDIST_TRANSPORT=tcp ok_run 0 "3 ranks over TCP" 60 "$PROGRAM" &&
    check_learned "3 ranks over TCP" "$WORK/log" 3
run_ranks 2 60 "$PROGRAM"
ok $? "2 ranks started by hand" || tail -n 5 "$WORK"/rank.? | diag
check_learned "2 ranks started by hand" "$WORK/rank.0" 2
ok "$(wc -l <"$WORK/rank.1")" "2 ranks started by hand: rank 1 is silent" || diag <"$WORK/rank.1"

# The other ranks wait for a slow rank. They wait longer than it does, and learn the same.
ok_run 0 "a slow rank" 60 "$PROGRAM" --slow 1 && check_learned "a slow rank" "$WORK/log" 3
awk '/^rank/ { speed[$2] = $7; waits[$2] = $9 }
     END {
        for (r = 0; r < 3; r += 2)
            if (speed["1:"] * 4 > speed[r ":"] || waits["1:"] >= waits[r ":"]) bad = 1
           exit bad }' "$WORK/log"
ok $? "a slow rank: the others wait for it" || diag <"$WORK/log"

ok_run 0 "another seed" 60 "$PROGRAM" --seed 2
learned "$WORK/log" | cmp -s - "$WORK/reference"
ok $(($? != 1)) "another seed: learns something else"
ok_run 1 "more ranks than simulators, and no time to learn" 60 "$PROGRAM" --ranks 5 --simulators 3 \
    --generations 4
check_said "more ranks than simulators: equal weights" "^checksum 0x[0-9a-f]* on all 5 ranks$" \
    "$WORK/log"
check_said "no time to learn: is told" "^not solved" "$WORK/log"

# Kills rank 1 in the middle. The other two ranks, one of which waits for rank 1, must end by
# themselves and report the reason. Rank 1 is slow, so that the run does not end before the kill.
rm -f "$WORK"/rank.? # files of earlier ranks, which wait_for must not read
port=$(free_port)
pids=()
for r in 0 1 2; do
    deadline=(timeout -k 5 60)
    [ $r = 1 ] && deadline=() # pids[1] must be the process of the rank, not of timeout
    RANK=$r LOCAL_RANK=$r WORLD_SIZE=3 LOCAL_WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
        "${deadline[@]}" "$PROGRAM" --simulators 1000 --slow 1 >"$WORK/rank.$r" 2>&1 </dev/null &
    pids+=($!)
done
wait_for "^generation   3" "$WORK/rank.0"
ok $? "killed: gets to the third generation" || tail -n 5 "$WORK"/rank.? | diag
started=$SECONDS
kill -KILL "${pids[1]}"
wait "${pids[1]}" 2>/dev/null
for r in 0 2; do
    wait "${pids[$r]}"
    rc=$?
    ok $((rc != 1)) "killed: rank $r ends with 1" || echo "exit status $rc" | diag
done
ok $((SECONDS - started > 5)) "killed: within 5 s"
check_said "killed: the others name the rank and what happened" \
    "idist_.* failed: .*rank 1.* was lost" \
    "$WORK/rank.0" "$WORK/rank.2"

# bad STATUS TEXT OPTION...
bad() {
    local status=$1 text=$2
    shift 2
    ok_run "$status" "$*" 30 "$PROGRAM" "$@"
    check_said "$*: says what is wrong" "$text" "$WORK/log"
}
bad 2 "unknown option --nonsense; the options are --ranks, .*--slow" --nonsense
bad 2 "--ranks 0: expected a number from 1 to 256" --ranks 0
bad 2 "--ranks 257: expected a number from 1 to 256" --ranks 257
bad 2 "--simulators 1: expected a number from 2 to 1000" --simulators 1
bad 2 "--generations 1x: expected a number from 1 to" --generations 1x
bad 2 "--seed -1: expected a number from 0 to 18446744073709551615" --seed -1
bad 2 "--slow .nothing.: expected a number" --slow
bad 1 "--slow names a rank that is not there" --slow 3
run_ranks 2 30 "$PROGRAM" --ranks 3
ok $(($? == 0)) "--ranks that the launcher contradicts"
check_said "--ranks that the launcher contradicts: says so" "leave it out" "$WORK/rank.0"
# shellcheck disable=SC2016 # for the shell of each rank
run_ranks 2 30 sh -c '"$0" --seed $RANK' "$PROGRAM"
ok $(($? == 0)) "ranks with different options"
check_said "ranks with different options: says so" "the ranks were given different options" \
    "$WORK/rank.0"
done_testing
