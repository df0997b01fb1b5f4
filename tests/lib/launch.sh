# launch.sh - what the tests of the launchers share. Sourced after tap.sh.
# shellcheck shell=bash

# A program that says where each rank is; and the examples as a user builds them. Copies, which no
# other test runs.
launch_build() {
    # shellcheck disable=SC2034 # used by those who source this
    WHO=$WORK/who TRAIN=$WORK/train
    ok_run 0 "the programs build" 240 make -s build/tests/launch/who build/digits \
        build/idistrun || done_testing
    cp build/tests/launch/who build/digits "$WORK" && mv "$WORK/digits" "$TRAIN"
    "$TRAIN" --epochs 1 --ranks 1 --seed 7 >"$WORK/alone" 2>&1
}

# A Python that has torch.distributed, in $PYTHON. False: there is none.
torch_python() {
    for PYTHON in python3 /usr/bin/python3; do
        "$PYTHON" -c 'import torch.distributed' 2>/dev/null && return
    done
    return 1
}

# How many processes have this in their command line; whether none has within some seconds.
left() { pgrep -fc -- "$1"; }
gone() { # PATTERN SECONDS
    local tries=$(($2 * 20))
    while [ "$(left "$1")" != 0 ]; do
        [ $((tries--)) -gt 0 ] || return 1
        sleep 0.05
    done
}

# Lines that who printed, in the order given, whatever else the launcher puts around them.
says() { # NAME LINE...
    local name=$1 line
    shift
    grep -o 'launcher .*\|rank [0-9]*: local.*' "$WORK/log" >"$WORK/said"
    for line in "$@"; do echo "$line"; done | cmp -s - "$WORK/said"
    ok $? "$name: every rank is where it should be" && return
    tail -n 15 "$WORK/log" | diag
}

# The network that one rank alone trains.
trains() { # NAME SECONDS COMMAND...
    local name=$1 seconds=$2
    shift 2
    ok_run 0 "$name: digits runs" "$seconds" "$@" "$TRAIN" --epochs 1 --seed 7 || return
    [ "$(grep -o 'accuracy.*%' "$WORK/log" | tail -n 1)" = \
        "$(grep -o 'accuracy.*%' "$WORK/alone" | tail -n 1)" ]
    ok $? "$name: digits reaches the accuracy of one rank" ||
        tail -n 5 "$WORK/log" "$WORK/alone" | diag
}
