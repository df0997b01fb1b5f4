#!/usr/bin/env bash
# summary.sh - reads the files of idist_summary with other programs. TensorBoard's own reader must
# find every value in the events files, and Python's csv module must find every value in
# scalars.csv, even after a crash and a resumed training. make plots must draw the values.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"

SCALARS=$WORK/scalars
RUN=$WORK/run
TENSORBOARD=build/peers/tensorboard/bin/python
ok_run 0 "builds" 120 cc "${NOT_OPTIMIZED[@]}" -Wall -Wextra -DIDIST_IMPLEMENTATION -I. \
    tests/train/scalars.c -o "$SCALARS" -lpthread || done_testing

# Lets two ranks add steps FIRST, FIRST + 1, ... and appends their lines to $WORK/added.
add() { # NAME FIRST COUNT
    run_ranks 2 60 "$SCALARS" "$RUN" "$2" "$3"
    ok $? "$1" || cat "$WORK"/rank.? | diag
    grep -E '^[0-9]+ [0-9a-f]+ [0-9a-f]{16}$' "$WORK/rank.0" >>"$WORK/added"
    [ ! -s "$WORK/rank.1" ]
    ok $? "$1: rank 1 has nothing to say" || diag <"$WORK/rank.1"
}

# Replaces all NaNs with one pattern, and ignores the wall time, which the program does not print.
same_values() { # NAME: compares the values in $WORK/log and $WORK/added
    awk '{ if ($3 ~ /^[7f]ff8/) $3 = "7ff8000000000000"; print $1, $2, $3 }' "$WORK/added" |
        sort >"$WORK/want"
    awk '{ print $1, $2, $3 }' "$WORK/log" | sort >"$WORK/got"
    diff "$WORK/want" "$WORK/got" >"$WORK/diff" && [ "$(wc -l <"$WORK/got")" -gt 0 ]
    ok $? "$1: $(wc -l <"$WORK/got") values, all bits of them" || head -n 10 "$WORK/diff" | diag
}

read_all() { # NAME
    if ! command -v python3 >/dev/null; then
        skip "$1: Python reads scalars.csv" "no python3: Debian package python3"
        return
    fi
    ok_run 0 "$1: Python reads scalars.csv" 30 python3 tests/train/scalars.py csv "$RUN" &&
        same_values "$1: scalars.csv"
    if [ ! -e build/peers/tensorboard/installed ]; then
        skip "$1: TensorBoard reads the events files" "make peers"
        return
    fi
    python3 tests/train/scalars.py csv "$RUN" --floats | sort >"$WORK/floats"
    ok_run 0 "$1: TensorBoard reads the events files" 120 \
        "$TENSORBOARD" tests/train/scalars.py tensorboard "$RUN"
    grep -E '^[0-9]+ [0-9a-f]+ [0-9a-f]{16} [0-9a-f]{16}$' "$WORK/log" | sort |
        diff "$WORK/floats" - >"$WORK/diff" && [ -s "$WORK/floats" ]
    ok $? "$1: $(wc -l <"$WORK/floats") values, and the times of scalars.csv" ||
        head -n 10 "$WORK/diff" | diag
}

add "a training" 0 40
read_all "a training"

# Simulates a crash in the middle of a line and of a record.
printf '1769801172.5,40,"train/lo' >>"$RUN/scalars.csv"
printf '\030\000\000\000\000\000\000\000\243\177' >>"$(ls "$RUN"/events.out.tfevents.*)"
add "resumed" 40 35
grep -q 'scalars.csv: removed an incomplete last line that a crash had left' "$WORK/rank.0"
ok $? "resumed: says that a line is lost" || head -n 3 "$WORK/rank.0" | diag
read_all "resumed"
ok $(($(grep -c '^wall_time' "$RUN/scalars.csv") != 1)) "resumed: one header"
ok $(($(find "$RUN" -name 'events.out.tfevents.*' | wc -l) != 2)) "resumed: two events files"

# ---- make plots ----
if ! command -v gnuplot >/dev/null; then
    skip "make plots" "no gnuplot: Debian package gnuplot-nox"
    done_testing
fi
# A folder's name may have dots and spaces. There are three curves in the panels "loss" and
# "accuracy". Values that are not finite are left out.
mkdir "$WORK/v1.5 b"
DRAWN="$WORK/v1.5 b/drawn"
grep -E '^wall_time|,(train|test)/' "$RUN/scalars.csv" >"$DRAWN.csv"
printf '1,75,train/loss,nan\n1,76,test/accuracy,-inf\n1,75,train/gone,nan\n' >>"$DRAWN.csv"
ok_run 0 "make plots" 60 make -s plots CSV="$DRAWN.csv"
points=$(grep -c "<use xlink:href='#gpPt[0-9]*' transform='translate" "$DRAWN.svg")
ok $((points != 3 * 75 + 3)) "make plots: a point per value, and three in the key ($points)"
for text in train/loss train/accuracy test/accuracy loss accuracy step; do
    grep -q ">$text<" "$DRAWN.svg"
    ok $? "make plots: says $text"
done
! grep -q 'gone' "$DRAWN.svg"
ok $? "make plots: nothing of a tag without a finite value"
head -n 1 "$RUN/scalars.csv" >"$WORK/empty.csv"
ok_run 2 "make plots: no values" 60 make -s plots CSV="$WORK/empty.csv"
grep -q 'empty.csv: no finite values' "$WORK/log"
ok $? "make plots: no values: says so" || diag <"$WORK/log"
ok_run 2 "make plots: onto its own input" 60 make -s plots CSV="$WORK/empty.csv" \
    SVG="$WORK/empty.csv"
ok $(($(wc -l <"$WORK/empty.csv") != 1)) "make plots: onto its own input: it is untouched"
done_testing
