#!/usr/bin/env bash
# dist.sh - runs distributed tests with all their blocking calls on device memory, over each device
# backend, on the stand-ins for CUDA and NCCL (tests/fake). Runs one of every twelve cases of the
# grid, or all cases if IDIST_TEST_FULL=1.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
# shellcheck source=tests/lib/on_fake.sh
. tests/lib/on_fake.sh

export IDIST_LOG=error IDIST_TEST_QUICK=1 IDIST_TEST_SLOW=2
[ "${IDIST_TEST_FULL:-0}" = 1 ] || export IDIST_TEST_THIN=12
build_ahead plain
parts plain "plain"
while read -r test ways; do
    source=tests/dist/$test.c
    [ -e "$source" ] || source=tests/fault/$test.c
    program "$source" -include tests/fake/on_device.h
    for way in $ways; do
        declare -n environment=$way
        on_fake "$test on device memory, $way" "${environment[@]}"
        grep -Eq '^# [1-9][0-9]+ calls on the device' "$WORK/log"
        ok $? "$test: it was on device memory" || tail -n 3 "$WORK/log" | diag
    done
done <<'END'
all_reduce nccl ipc
broadcast ipc
all_gather staged
gather nccl
scatter staged
reduce_scatter ipc
all_to_all nccl
scan staged
v_forms nccl
mismatch nccl staged
END
done_testing
