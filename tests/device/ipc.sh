#!/usr/bin/env bash
# ipc.sh - tests src/gpu/ipc without a GPU: ranks read each other's device memory on the stand-ins
# for CUDA and NCCL (tests/fake), with and without sanitizers.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
# shellcheck source=tests/lib/on_fake.sh
. tests/lib/on_fake.sh

export IDIST_LOG=error IDIST_TEST_QUICK=1
build_ahead sanitizer-address -fsanitize=address,undefined "${NOT_OPTIMIZED[@]}"
build_ahead sanitizer-thread -fsanitize=thread -Wno-tsan "${NOT_OPTIMIZED[@]}"
build_ahead plain

export ASAN_OPTIONS=detect_leaks=1:exitcode=99 \
    TSAN_OPTIONS=die_after_fork=0:exitcode=99:atexit_sleep_ms=0
for sanitizer in address,undefined thread; do
    parts sanitizer-${sanitizer%%,*} "-fsanitize=$sanitizer"
    program_with_idist tests/fake/test_ipc.c "-fsanitize=$sanitizer" -Wno-tsan \
        "${NOT_OPTIMIZED[@]}"
    on_fake "ranks that read each other's memory, $sanitizer" IDIST_TEST_SLOW=4
done
parts plain "plain"
program_with_idist tests/fake/test_ipc.c "${NOT_OPTIMIZED[@]}"
on_fake "ranks that read each other's memory" IDIST_TEST_SLOW=1
done_testing
