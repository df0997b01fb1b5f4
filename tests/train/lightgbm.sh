#!/usr/bin/env bash
# lightgbm.sh - tests examples/apps/lightgbm with LightGBM's own library, from PyPI. Over idist the
# model must have the same bytes as over LightGBM's sockets, for every tree learner and number of
# ranks. If a rank dies, the errors of the other ranks name it. An error names a wrong option.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
# shellcheck source=tests/lib/examples.sh
. tests/lib/examples.sh

SOURCE=examples/apps/lightgbm/main.c
PROGRAM=$WORK/lightgbm
unset LIGHTGBM_LIBRARY
ln -s "$ROOT"/idist*.h "$ROOT/examples" "$WORK"/
build_example $SOURCE lightgbm || done_testing

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
# bad STATUS TEXT OPTION...
bad() {
    local status=$1 text=$2
    shift 2
    ok_run "$status" "$*" 30 "$PROGRAM" "$@"
    check_said "$*: says what is wrong" "$text" "$WORK/log"
}
bad 2 "unknown option --nonsense; the options are --library, .*--model" --nonsense
bad 2 "--ranks 0: expected a number from 1 to 64" --ranks 0
bad 2 "--rows -1: expected a number from 1 to 100000000" --rows -1
bad 2 "--rounds .nothing.: expected a number" --rounds
bad 2 "--tree-learner feature: expected serial, data, voting" --tree-learner feature
bad 2 "--network .nothing.: expected idist, socket" --network
bad 2 "--model needs a value" --model
bad 1 "rank 0: nothing.so: cannot open .*No such file" --library nothing.so
check_said "no library: says where to find one" "LIGHTGBM_LIBRARY .*Python package lightgbm" \
    "$WORK/log"
ok $(($(grep -c 'cannot open' "$WORK/log") != 1)) "no library: one rank says so" ||
    diag <"$WORK/log"
bad 1 "rank 0: libc.so.6 has no function LGBM_GetLastError" --library libc.so.6

if [ ! -e build/peers/lightgbm/installed ]; then
    skip "with LightGBM's library" "make peers"
    done_testing
fi
LIBRARY=$(echo "$ROOT"/build/peers/lightgbm/lib/python3*/site-packages/lightgbm/lib/lib_lightgbm.so)
export LIGHTGBM_LIBRARY=$LIBRARY

# Prints a model without its section of parameters, which names the number of ranks.
trees() { sed '/^parameters:/,$d' "$1"; }
# same_trees NAME FILE FILE: compares two models, and checks that they have all trees.
same_trees() {
    local name=$1
    trees "$2" >"$WORK/trees"
    trees "$3" | diff "$WORK/trees" - >"$WORK/diff" &&
        [ "$(grep -c '^Tree=' "$WORK/trees")" = 40 ]
    ok $? "$name" || cut -c 1-90 "$WORK/diff" | head -n 10 | diag
}
# train NAME MODEL OPTION...: trains with few rows.
train() {
    local name=$1 model=$2
    shift 2
    ok_run 0 "$name" 60 "$PROGRAM" --rows 3000 --model "$WORK/$model" "$@"
}

# The output must have the lines of the head. Dots stand for a number.
# shellcheck disable=SC2016 # the inner shell expands it
ok_run 0 "by default" 60 sh -c '"$0" --model "$1/default" 2>"$1/errors"' "$PROGRAM" "$WORK" ||
    diag <"$WORK/errors"
expected_output $SOURCE | sed -e 's/0x\.\.\.*/0x[0-9a-f]+/' -e 's/\.\.\./[0-9.]+/g' \
    -e 's/.*/^&$/' >"$WORK/expected"
awk 'NR == FNR { promised[++n] = $0; next }
     $0 !~ promised[FNR] { print "line " FNR ": " $0; print "promised: " promised[FNR]; bad = 1 }
     END { exit bad || n < 5 || FNR != n }' "$WORK/expected" "$WORK/log" >"$WORK/diff"
ok $? "by default: prints what the head says" || diag <"$WORK/diff"
check_said "by default: reports what each rank did" \
    "rank 2 .*: .* examples/s, waited .* in .* calls" "$WORK/errors"

# LightGBM's own sockets are the reference.
for learner in data voting; do
    for n in 2 3 4 5; do
        train "$learner, $n ranks" own --tree-learner $learner --ranks $n &&
            train "$learner, $n ranks: LightGBM's sockets" reference --tree-learner $learner \
                --ranks $n --network socket &&
            same_trees "$learner, $n ranks: the same bytes as over LightGBM's sockets" \
                "$WORK/own" "$WORK/reference"
    done
done
train "one rank" own --ranks 1 && train "one rank: the serial learner" reference --ranks 1 \
    --tree-learner serial && same_trees "one rank: is the serial learner" "$WORK/own" \
    "$WORK/reference"

# Quantized gradients have other sizes of elements, and other reducers.
train "quantized" own --parameters use_quantized_grad=true &&
    train "quantized: LightGBM's sockets" reference --parameters use_quantized_grad=true \
        --network socket &&
    same_trees "quantized: the same bytes" "$WORK/own" "$WORK/reference"

# With such a long description of a split, LightGBM passes one buffer as input and output.
train "data, 2 ranks" reference --ranks 2 &&
    train "one buffer" own --ranks 2 --parameters max_cat_threshold=1000 &&
    same_trees "one buffer: the same bytes" "$WORK/own" "$WORK/reference"

train "data, 3 ranks" reference
IDIST_TRANSPORT=tcp train "over TCP" own && same_trees "over TCP: the same bytes" "$WORK/own" \
    "$WORK/reference"
run_ranks 3 60 "$PROGRAM" --rows 3000 --model "$WORK/own"
ok $? "started by hand" || tail -n 5 "$WORK"/rank.? | diag
same_trees "started by hand: the same bytes" "$WORK/own" "$WORK/reference"

# A rank makes the bins of some features from its own rows. Here each rank sees all values of all
# features, so the bins, and the trees, are the same for any number of ranks.
awk 'BEGIN {
        srand(1)
        for (i = 0; i < 4000; i++) {
            score = 0; line = ""
            for (k = 0; k < 6; k++) {
                v = int(16 * rand()); score += k % 3 ? v * v : -v * v; line = line "," v / 16
            }
            print (score > 150) line
        }
     }' >"$WORK/rows.csv"
for n in 2 3 5; do
    train "a CSV file, $n ranks" csv.$n --data "$WORK/rows.csv" --ranks $n &&
        same_trees "a CSV file, $n ranks: the trees of 2 ranks" "$WORK/csv.$n" "$WORK/csv.2"
done
check_said "a CSV file: has all rows" "^4000 rows on 5 ranks" "$WORK/log"
sed -i '7s/,/;/' "$WORK/rows.csv"
bad 1 "rows.csv:7: expected a label and values" --data "$WORK/rows.csv"
sed -i '7s/.*/1,2,3/' "$WORK/rows.csv"
bad 1 "rows.csv:7: expected .* as many as in the first line" --data "$WORK/rows.csv"
bad 1 "nowhere.csv: No such file" --data nowhere.csv

bad 1 "LGBM_.* failed: .*num_leaves" --parameters num_leaves=-1
bad 1 "2 rows are too few for 3 ranks" --rows 2
bad 1 "rank 0: --tree-learner serial is for one rank" --tree-learner serial
run_ranks 2 30 "$PROGRAM" --ranks 3
ok $(($? == 0)) "--ranks that the launcher contradicts"
check_said "--ranks that the launcher contradicts: says so" "leave it out" "$WORK/rank.0"
# shellcheck disable=SC2016 # for the shell of each rank
run_ranks 2 30 sh -c '"$0" --rounds 1$RANK' "$PROGRAM"
ok $(($? == 0)) "ranks with different options"
check_said "ranks with different options: says so" "rank 1: rank 0 was given different options" \
    "$WORK/rank.1"

# Kills rank 1 in the middle. The error occurs inside of LightGBM.
rm -f "$WORK"/rank.?
port=$(free_port)
pids=()
for r in 0 1 2; do
    deadline=(timeout -k 5 90)
    [ $r = 1 ] && deadline=() # pids[1] must be the process of the rank, not of timeout
    RANK=$r LOCAL_RANK=$r WORLD_SIZE=3 LOCAL_WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
        "${deadline[@]}" "$PROGRAM" --rows 3000 --rounds 1000000 >"$WORK/rank.$r" 2>&1 </dev/null &
    pids+=($!)
done
for _ in $(seq 600); do
    grep -q '^round   20' "$WORK/rank.0" && break
    sleep 0.05
done
grep -q '^round   20' "$WORK/rank.0"
ok $? "killed: gets to round 20" || tail -n 5 "$WORK"/rank.? | diag
started=$SECONDS
kill -KILL "${pids[1]}"
wait "${pids[1]}" 2>/dev/null
for r in 0 2; do
    wait "${pids[$r]}"
    rc=$?
    ok $((rc != 1)) "killed: rank $r ends with 1" || diag <<<"exit status $rc (124: a hang)"
done
ok $((SECONDS - started > 5)) "killed: within 5 s"
check_said "killed: the other ranks name the rank" "idist_[a-z_]+ failed: .*rank 1 on .* was lost" \
    "$WORK/rank.0" "$WORK/rank.2"
done_testing
