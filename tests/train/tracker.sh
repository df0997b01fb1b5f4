#!/usr/bin/env bash
# tracker.sh - lets MLflow read the file stores of examples/27_mlflow.c and of tracker.c, which uses
# the same header. MLflow must find every value of scalars.csv, and the right status, also after an
# error, a crash and a full disk. Then MLflow itself must be able to add to each run.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
# shellcheck source=tests/lib/examples.sh
. tests/lib/examples.sh

EXAMPLE=$WORK/27_mlflow
TRACKER=$WORK/tracker
MLFLOW=$ROOT/build/peers/mlflow
ln -s "$ROOT"/idist*.h "$ROOT/examples" "$WORK/"
build_example examples/27_mlflow.c 27_mlflow || done_testing
ok_run 0 "tracker.c builds" 60 cc -O1 -D_GNU_SOURCE -Wall -Wextra -Werror -I. -Iexamples/lib \
    -Itests/lib tests/train/tracker.c build/tests/idist_train.o -o "$TRACKER" -lm -ldl -pthread ||
    done_testing

# Runs a command in a folder of its own. The URI of this folder needs escapes.
IN=$WORK/$'50% \xc3\xa9'
STORES=()
in_folder() { # STATUS FOLDER COMMAND...
    local status=$1 folder=$IN/$2
    mkdir -p "$folder"
    ln -sfn "$ROOT/examples" "$folder/examples"
    STORES+=("$folder/mlruns")
    # shellcheck disable=SC2016 # the inner shell expands it
    ok_run "$status" "$2" 60 sh -c 'cd "$1" && shift && "$@"; exit $?' sh "$folder" "${@:3}"
}
in_folder 0 spawned "$EXAMPLE"
for mode in values full names comma; do in_folder 0 $mode "$TRACKER" $mode; done
! grep -q SKIP "$WORK/log" || skip "comma: the locale" "localedef (Debian package locales) failed"
in_folder 137 killed "$TRACKER" killed

# Starts two ranks in folders of their own.
ranks() { # FOLDER
    STORES+=("$WORK/$1.0/mlruns")
    # shellcheck disable=SC2016 # the ranks expand it
    run_ranks 2 60 sh -c 'cd "$1.$RANK" && exec "$2"' sh "$WORK/$1" "$EXAMPLE"
}
for folder in launched.0 launched.1 failed.0 failed.1; do
    mkdir "$WORK/$folder"
    ln -s "$ROOT/examples" "$WORK/$folder/"
done
ranks launched
ok $? "launched" || cat "$WORK"/rank.? | diag
ok "$(find "$WORK/launched.1" -mindepth 1 ! -name examples | wc -l)" "rank 1 writes nothing" ||
    find "$WORK/launched.1" | diag
rm "$WORK/failed.1/examples" # rank 1 does not find the images
ranks failed
for r in 0 1; do
    grep -q "^rank $r ended with status 1" "$WORK/rank.$r"
    ok $? "failed: rank $r ends with an error" || diag <"$WORK/rank.$r"
done
ok "$(find "$WORK" -name 'outside*' | wc -l)" "names: no file is outside of the run"

if [ ! -e "$MLFLOW/installed" ]; then
    skip "MLflow reads the stores" "make peers"
    done_testing
fi
ok_run 0 "MLflow reads the stores" 30 "$MLFLOW/bin/python" tests/train/tracker.py "${STORES[@]}" ||
    done_testing

# Checks that MLflow finds exactly the given lines, apart from those of values.
finds() { # STORE LINE...
    local store=$1
    shift
    printf '%s\n' 'experiment Default' 'artifacts True' 'times True' 'continued True' \
        'tag mlflow.source.type LOCAL' "$@" | sort >"$WORK/want"
    grep -vE '^(metric|csv) ' "$store/mlruns.txt" | sort | diff "$WORK/want" - >"$WORK/log"
    ok $? "$(basename "$store"): MLflow finds the run" || diag <"$WORK/log"
}
# Checks that MLflow finds exactly the given values: "NAME STEP VALUE" ...
has() { # STORE VALUE...
    local store=$1
    shift
    printf '%s\n' "$@" >"$WORK/want"
    sed -n 's/^metric \(.*\) [0-9]*$/\1/p' "$store/mlruns.txt" | diff "$WORK/want" - >"$WORK/log"
    ok $? "$(basename "$store"): MLflow finds the values" || diag <"$WORK/log"
}
# Compares the values with scalars.csv. MLflow's times are in milliseconds.
equals_csv() { # STORE COUNT
    local kind name
    name=$(basename "$1")
    for kind in metric csv; do
        sed -n "s/^$kind \(.*\) [0-9]*\$/\1/p" "$1/mlruns.txt" | sort >"$WORK/$kind"
    done
    diff "$WORK/csv" "$WORK/metric" >"$WORK/log" && [ "$(wc -l <"$WORK/metric")" -eq "$2" ]
    ok $? "$name: all $2 values are those of scalars.csv" || diag <"$WORK/log"
    awk '{ id = $0; sub(/^[a-z]+ /, "", id); sub(/ [0-9]+$/, "", id) }
        $1 == "csv" { us[id] = $NF }
        $1 == "metric" { ms[id] = $NF }
        END {
            for (id in ms) {
                n++
                if ((us[id] - 1000 * ms[id]) ^ 2 > 501 ^ 2) print id ": " us[id] " and " ms[id]
            }
            if (!n) print "no values"
        }' "$1/mlruns.txt" >"$WORK/log"
    ok "$(wc -l <"$WORK/log")" "$name: the times are those of scalars.csv" || diag <"$WORK/log"
}

VERSION=$(sed -n 's/^#define IDIST_VERSION "\(.*\)"/\1/p' src/idist.h)
for store in "$IN/spawned" "$WORK/launched.0"; do
    finds "$store" 'experiment digits' 'run 27_mlflow FINISHED' 'tag mlflow.runName 27_mlflow' \
        'param learning_rate 0.00625' 'param ranks 2' "tag idist.version $VERSION"
    equals_csv "$store" 7
done
finds "$WORK/failed.0" 'experiment digits' 'run 27_mlflow FAILED' 'tag mlflow.runName 27_mlflow' \
    'param learning_rate 0.00625' 'param ranks 2' "tag idist.version $VERSION"
for mode in values:FINISHED comma:FINISHED full:FINISHED names:FINISHED killed:RUNNING; do
    finds "$IN/${mode%:*}" 'experiment an experiment' "run ${mode/:/ }" \
        "tag mlflow.runName ${mode%:*}"
done
for mode in values comma; do equals_csv "$IN/$mode" 30; done
has "$IN/full" 'train/loss 0 0.5' 'train/loss 1 0.25' 'train/loss 3 0.125'
has "$IN/names" 'a/b 0 1.0' "$(printf 'x%.0s' {1..250}) 0 1.0"
has "$IN/killed" 'train/loss 0 0.5'
done_testing
