# launch.sh - functions that the tests of the launchers share. Source it after tap.sh.
# shellcheck shell=bash

# Builds a program that prints where each rank runs, and an example as a user builds it. Copies both
# programs, so that no other test runs the same files.
launch_build() {
    # shellcheck disable=SC2034 # used by the scripts that source this file
    WHO=$WORK/who TRAIN=$WORK/train
    ok_run 0 "the programs build" 240 make -s build/tests/launch/who build/digits \
        build/idistrun || done_testing
    cp build/tests/launch/who build/digits "$WORK" && mv "$WORK/digits" "$TRAIN"
    "$TRAIN" --epochs 1 --ranks 1 --seed 7 >"$WORK/alone" 2>&1
}

# Sets $PYTHON to a Python that has torch.distributed. Fails if there is none.
torch_python() {
    for PYTHON in python3 /usr/bin/python3; do
        "$PYTHON" -c 'import torch.distributed' 2>/dev/null && return
    done
    return 1
}

# left prints the number of processes with PATTERN in their command lines. gone waits up to SECONDS
# until there is none, and fails if one is left.
left() { pgrep -fc -- "$1"; }
gone() { # PATTERN SECONDS
    local tries=$(($2 * 20))
    while [ "$(left "$1")" != 0 ]; do
        [ $((tries--)) -gt 0 ] || return 1
        sleep 0.05
    done
}

# Checks the lines that the program who printed, in the given order. Ignores the output that the
# launcher adds.
says() { # NAME LINE...
    local name=$1 line
    shift
    grep -o 'launcher .*\|rank [0-9]*: local.*' "$WORK/log" >"$WORK/said"
    for line in "$@"; do echo "$line"; done | cmp -s - "$WORK/said"
    ok $? "$name: every rank is where it should be" && return
    tail -n 15 "$WORK/log" | diag
}

# Trains with COMMAND and checks that the accuracy is the same as with one rank alone.
trains() { # NAME SECONDS COMMAND...
    local name=$1 seconds=$2
    shift 2
    ok_run 0 "$name: digits runs" "$seconds" "$@" "$TRAIN" --epochs 1 --seed 7 || return
    [ "$(grep -o 'accuracy.*%' "$WORK/log" | tail -n 1)" = \
        "$(grep -o 'accuracy.*%' "$WORK/alone" | tail -n 1)" ]
    ok $? "$name: digits reaches the accuracy of one rank" ||
        tail -n 5 "$WORK/log" "$WORK/alone" | diag
}
