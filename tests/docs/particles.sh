#!/usr/bin/env bash
# particles.sh - tests 26_particles. On any number of ranks, it prints the same lines as the serial
# program from which it was made, including a checksum over the bits of all positions. Both programs
# print what their heads say. Their difference is as short as docs/examples.md says, and that page
# shows the difference.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
# shellcheck source=tests/lib/examples.sh
. tests/lib/examples.sh

BEFORE=examples/before/26_particles.c
AFTER=examples/26_particles.c
MAX_LINES=12 # lines added or changed, without the line of the include
ln -s "$ROOT"/idist*.h "$ROOT/examples" "$WORK"/
! grep -qE 'include "|(idist|IDIST)_' <(sed -n '/^#include/,$p' $BEFORE)
ok $? "there is no idist in the program before" || diag <<<"$BEFORE"
build_example $BEFORE 26_particles_before
build_example $AFTER 26_particles || done_testing
ok_run 0 "idistrun builds" 240 make -s build/idistrun || done_testing
cp build/idistrun "$WORK"

# ---- results ----

same() { # NAME FILE: checks that FILE equals the output of the serial program
    cmp -s "$WORK/serial" "$2"
    ok $? "$1: the bits of the serial program" || diff "$WORK/serial" "$2" | diag
}

for source in $BEFORE $AFTER; do
    program=26_particles
    [ "$source" = $BEFORE ] && program=26_particles_before
    ok_run 0 "$program: runs" 60 "$WORK/$program"
    expected_output "$source" | diff - "$WORK/log" >"$WORK/diff"
    ok $? "$program: prints what its head says" || diag <"$WORK/diff"
    [ "$source" = $BEFORE ] && cp "$WORK/log" "$WORK/serial"
done
[ "$(sed 's/.*checksum //' "$WORK/serial" | sort -u | wc -l)" = 5 ]
ok $? "the checksum is another one in each report" || diag <"$WORK/serial"
awk '{ gsub(",", ""); energy = $8; if (NR == 1) first = energy
       if ($4 == kinetic || energy - first > 1 || first - energy > 1) bad = 1
       kinetic = $4 }
     END { exit bad || NR != 5 }' "$WORK/serial"
ok $? "the kinetic energy changes, and the sum stays" || diag <"$WORK/serial"

same "alone" "$WORK/log"
# ranks N PROGRAM [STEPS]: checks that the program on N ranks prints what is in $WORK/serial. Only
# one rank may print.
ranks() {
    local n=$1
    shift
    ok_run 0 "$n ranks: $*" 60 "$WORK/idistrun" -n "$n" "$WORK/$1" "${@:2}" &&
        same "$n ranks: $*" "$WORK/log"
}
for n in 2 5; do ranks $n 26_particles; done
IDIST_TRANSPORT=tcp ok_run 0 "3 ranks over TCP" 60 "$WORK/idistrun" -n 3 "$WORK/26_particles" &&
    same "3 ranks over TCP" "$WORK/log"
run_ranks 3 60 "$WORK/26_particles"
ok $? "3 ranks started by hand" || cat "$WORK"/rank.? | diag
same "3 ranks started by hand" "$WORK/rank.0"
cat "$WORK"/rank.[12] >"$WORK/others"
ok "$(wc -l <"$WORK/others")" "only rank 0 speaks" || diag <"$WORK/others"

# 32 of 44 ranks have 23 atoms, and the others 22.
ok_run 0 "before: 2 steps" 60 "$WORK/26_particles_before" 2 && cp "$WORK/log" "$WORK/serial"
ranks 44 26_particles 2

# A cube of 8 atoms on 5, 8 and 9 ranks: unequal shares, one atom per rank, and a rank without
# atoms.
mkdir "$WORK/cube"
for source in $BEFORE $AFTER; do
    name=small
    [ "$source" = $BEFORE ] && name=small_before
    sed 's/SIDE = 10,/SIDE = 2,/' "$source" >"$WORK/cube/$name.c"
    cmp -s "$source" "$WORK/cube/$name.c"
    ok $(($? != 1)) "$name: a cube of another size"
    ok_run 0 "$name: builds" 120 cc "${NOT_OPTIMIZED[@]}" -DIDIST_IMPLEMENTATION \
        "$WORK/cube/$name.c" -o "$WORK/$name"
done
ok_run 0 "8 atoms" 60 "$WORK/small_before" && cp "$WORK/log" "$WORK/serial"
for n in 5 8 9; do ranks $n small; done

# bad TEXT ARGUMENT...
bad() {
    local text=$1
    shift
    ok_run 1 "refuses \"$*\"" 20 "$WORK/26_particles" "$@"
    grep -qF -- "$text" "$WORK/log"
    ok $? "refuses \"$*\": says why" || diag <"$WORK/log"
}
for steps in 0 -1 1x none "" 1000001; do
    bad "\"$steps\": expected a number from 1 to 1000000" "$steps"
    ok_run 1 "before: refuses \"$steps\"" 20 "$WORK/26_particles_before" "$steps"
done
bad 'usage: 26_particles [steps]' 1 2
ok_run 1 "before: refuses \"1 2\"" 20 "$WORK/26_particles_before" 1 2

# ---- the difference ----

# Compares the programs without their heads, and drops the line numbers.
code() { sed -n '/^#include/,$p' "$1"; }
diff -p -U0 <(code $BEFORE) <(code $AFTER) | sed -e '1,2d' -e 's/^@@ [^@]* @@/@@/' -e 's/ $//' \
    >"$WORK/difference"
added=$(grep '^+' "$WORK/difference" | grep -vc '^+#include')
ok $((added > MAX_LINES || added == 0)) "the difference is $added lines, at most $MAX_LINES"
awk '/^```diff$/ { inside = 1; next } /^```/ { inside = 0 } inside' docs/examples.md >"$WORK/shown"
diff "$WORK/difference" "$WORK/shown" >"$WORK/diff"
ok $? "docs/examples.md shows it" || diag <"$WORK/diff"
grep -q "^Only $added lines and an include turn a simulator of $(wc -l <$BEFORE) lines" \
    docs/examples.md &&
    grep -q "the difference, which is $added lines" $AFTER
ok $? "docs/examples.md and the head say how long they are"
done_testing
