#!/usr/bin/env bash
# faults.sh - tests idist_nccl.h without a GPU when NCCL does not return, or fails. Runs on the
# stand-ins for CUDA and NCCL (tests/fake), with and without sanitizers.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
# shellcheck source=tests/lib/on_fake.sh
. tests/lib/on_fake.sh

export IDIST_LOG=error IDIST_TEST_QUICK=1
build_ahead sanitizer-address -fsanitize=address,undefined "${NOT_OPTIMIZED[@]}"
build_ahead sanitizer-thread -fsanitize=thread -Wno-tsan "${NOT_OPTIMIZED[@]}"
build_ahead plain

export ASAN_OPTIONS=detect_leaks=1:exitcode=99
export TSAN_OPTIONS=die_after_fork=0:exitcode=99:atexit_sleep_ms=0
for sanitizer in address,undefined thread; do
    parts sanitizer-${sanitizer%%,*} "-fsanitize=$sanitizer"
    program tests/fake/test_nccl_faults.c "-fsanitize=$sanitizer" -Wno-tsan -O0
    on_fake "NCCL does not come back, $sanitizer" IDIST_TEST_SLOW=4
done
parts plain "plain"
program tests/fake/test_nccl_faults.c
on_fake "NCCL does not come back" IDIST_TEST_SLOW=1
done_testing
