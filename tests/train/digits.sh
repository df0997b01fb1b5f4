#!/usr/bin/env bash
# digits.sh - tests examples/apps/digits. The program reaches its accuracy. Any number of ranks,
# however started, trains the same network: all ranks have equal weights, and the loss curve is the
# same up to rounding.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"

EPOCHS=3
PROGRAM=$WORK/digits
ok_run 0 "builds with one line" 120 make -s build/digits || done_testing
cp build/digits "$PROGRAM"

losses() { sed -n 's/.*epoch  *\([0-9]*\)\/.*loss  *\([0-9.eE+-]*\).*/\1 \2/p' "$1"; }
accuracy() { sed -n 's/.*accuracy[^0-9]*\([0-9.]*\) *%.*/\1/p' "$1" | tail -n 1; }

# Succeeds if the loss curve equals the curve of one rank. The relative difference may be 1e-4, and
# rounding to six printed digits may add 2e-6.
same_curve() { # FILE
    losses "$1" >"$WORK/curve"
    paste "$WORK/reference" "$WORK/curve" | awk -v n="$EPOCHS" '
        { d = $2 - $4; if (d < 0) d = -d; if (NF != 4 || $1 != $3 || d > 1e-4 * $2 + 2e-6) bad = 1 }
        END { exit bad || NR != n }'
}

check_run() { # NAME FILE RANKS
    same_curve "$2"
    ok $? "$1: the loss curve of 1 rank" || paste "$WORK/reference" "$WORK/curve" | diag
    grep -Eq "checksum 0x[0-9a-f]+ on all $3 rank" "$2"
    ok $? "$1: equal checksums" || tail -n 5 "$2" | diag
}

ok_run 0 "1 rank" 100 "$PROGRAM" --epochs $EPOCHS --ranks 1 --seed 7
losses "$WORK/log" >"$WORK/reference"
ok $(($(wc -l <"$WORK/reference") != EPOCHS)) "1 rank: a loss per epoch" || diag <"$WORK/log"
awk 'NR == 1 { first = $2 } { last = $2 } END { exit !(last < first / 2) }' "$WORK/reference"
ok $? "1 rank: the loss falls" || diag <"$WORK/reference"
for n in 2 3 4; do
    ok_run 0 "$n ranks" 100 "$PROGRAM" --epochs $EPOCHS --ranks $n --seed 7 &&
        check_run "$n ranks" "$WORK/log" $n
done

run_ranks 2 100 "$PROGRAM" --epochs $EPOCHS --seed 7
ok $? "2 ranks started by hand" || tail -n 5 "$WORK"/rank.? | diag
check_run "2 ranks started by hand" "$WORK/rank.0" 2
ok "$(wc -l <"$WORK/rank.1")" "2 ranks started by hand: rank 1 is silent" || diag <"$WORK/rank.1"
IDIST_TRANSPORT=tcp ok_run 0 "3 ranks over TCP" 100 "$PROGRAM" --epochs $EPOCHS --ranks 3 --seed 7 \
    &&
    check_run "3 ranks over TCP" "$WORK/log" 3

# The curves must match the printed values and must not change the training.
grep checksum "$WORK/log" >"$WORK/without"
ok_run 0 "3 ranks, with curves" 100 env IDIST_TRANSPORT=tcp "$PROGRAM" --epochs $EPOCHS --ranks 3 \
    --seed 7 --summary "$WORK/curves" && check_run "with curves" "$WORK/log" 3
grep checksum "$WORK/log" | cmp -s - "$WORK/without"
ok $? "with curves: the same weights" || cat "$WORK/without" "$WORK/log" | diag
awk -F, '$3 == "train/loss" { printf "%d %.6f\n", $2, $4 }' "$WORK/curves/scalars.csv" >"$WORK/csv"
losses "$WORK/log" | cmp -s - "$WORK/csv"
ok $? "with curves: the losses in scalars.csv" || diag <"$WORK/csv"
awk -F, -v n=$EPOCHS '$3 == "train/accuracy" { train++ }
    $3 == "test/accuracy" && $2 == n { printf "%.2f\n", 100 * $4 } END { exit train != n }' \
    "$WORK/curves/scalars.csv" >"$WORK/csv"
ok $(($? || $(accuracy "$WORK/log" | cmp -s - "$WORK/csv"; echo $?))) \
    "with curves: the accuracies" || diag <"$WORK/curves/scalars.csv"

# Runs from another folder with the defaults, as make run does.
started=$SECONDS
ok_run 0 "defaults, from another folder" 110 sh -c \
    "cd / && '$PROGRAM' --data '$ROOT/examples/data/digits.csv'"
ok $((SECONDS - started >= 60)) "defaults: in less than a minute ($((SECONDS - started)) s)"
grep -Eq 'checksum 0x[0-9a-f]+ on all [0-9]+ rank' "$WORK/log"
ok $? "defaults: equal checksums" || tail -n 5 "$WORK/log" | diag
percent=$(accuracy "$WORK/log")
awk -v p="${percent:-0}" 'BEGIN { exit !(p >= 97) }'
ok $? "defaults: accuracy is 97 % or more (${percent:-none})"
grep -Eq '[0-9] % of it communicating|communicat' "$WORK/log"
ok $? "defaults: says how much of the time was communication" || tail -n 5 "$WORK/log" | diag
ok $(($(tr -d '\n' <"$WORK/log" | grep -c "$(printf '\r')") != 0)) \
    "defaults: plain lines where stdout is no terminal"

# A training that is killed in the middle must resume from the checkpoint and end with the weights
# of an undisturbed training.
checked=("$PROGRAM" --epochs "$EPOCHS" --seed 7 --ranks 2 --checkpoint "$WORK/saved")
ok_run 0 "with a checkpoint" 100 "${checked[@]}"
grep -o 'checksum 0x[0-9a-f]*' "$WORK/log" >"$WORK/sum"
rm "$WORK/saved"
"${checked[@]}" >"$WORK/killed" 2>&1 </dev/null &
pid=$!
for _ in $(seq 600); do
    grep -q "epoch   2/" "$WORK/killed" && break
    sleep 0.05
done
kill -KILL $pid
wait $pid 2>/dev/null
ok_run 0 "killed, and again" 100 "${checked[@]}"
grep -q "resumed   after epoch 2" "$WORK/log" && grep -qf "$WORK/sum" "$WORK/log"
ok $? "killed, and again: the same weights" || diag <"$WORK/log"
ok_run 2 "the checkpoint of another training" 30 "${checked[@]}" --seed 8
head -c 50000 "$WORK/saved" >"$WORK/torn" && printf x |
    dd of="$WORK/saved" bs=1 seek=900 conv=notrunc status=none
ok_run 2 "a damaged checkpoint" 30 "${checked[@]}"
ok_run 2 "a torn checkpoint" 30 "${checked[@]}" --checkpoint "$WORK/torn"

ok_run 2 "an unknown option" 30 "$PROGRAM" --nonsense
ok_run 2 "no such data" 30 "$PROGRAM" --ranks 1 --data "$WORK/nothing.csv"
done_testing
