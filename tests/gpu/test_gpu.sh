#!/usr/bin/env bash
# test_gpu.sh - runs test_gpu on this machine's GPUs; skips where there is none. Prints TAP, and
# also writes it to build/gpu_test.tap.
#
#     tests/gpu/test_gpu.sh                                  make test-gpu
#     PART=1/5 tests/gpu/test_gpu.sh                         make test-gpu PART=1/5: the first
#                                                            fifth, in under ten minutes; its TAP is
#                                                            in build/gpu_test.1of5.tap
#     BACKENDS=ipc,staged RANKS=2,4 tests/gpu/test_gpu.sh    a selection
#     SMALL=1 THIN=5 tests/gpu/test_gpu.sh                   no large messages, every 5th
#                                                            combination
#     tests/gpu/test_gpu.sh --fake                           small, on the stand-ins of tests/fake:
#                                                            no GPU needed
#
# SECONDS_MAX (default 1800; 510 for a part) limits the whole run. WORLD_SECONDS (default 120; in a
# part, at most the world's share) limits one set of ranks.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
# shellcheck source=tests/lib/gpu.sh
. "$ROOT/tests/lib/gpu.sh"

export IDIST_LOG=${IDIST_LOG:-warn}
fake=no
[ "${1:-}" != --fake ] || fake=yes
gpu_build "$WORK/test_gpu" tests/gpu/test_gpu.c "$fake"
options=()
[ -z "${BACKENDS:-}" ] || options+=(-backends "$BACKENDS")
[ -z "${RANKS:-}" ] || options+=(-ranks "$RANKS")
[ -z "${PART:-}" ] || options+=(-part "$PART")
[ "$fake" = no ] && [ -z "${SMALL:-}" ] || options+=(-small)
[ "$fake" = no ] && [ -z "${THIN:-}" ] || options+=(-thin "${THIN:-23}")
[ "$fake" = no ] || export FAKE_CUDA_DEVICES=${FAKE_CUDA_DEVICES:-2} \
    FAKE_CUDA_DELAY_US=${FAKE_CUDA_DELAY_US:-50}
log=$(gpu_file gpu_test tap)
[ "$fake" = no ] || log=$WORK/tap
timeout -k 10 "${SECONDS_MAX:-$(gpu_seconds_max 1800)}" \
    "${GPU_ENV[@]}" "$WORK/test_gpu" "${options[@]}" </dev/null |
    tee "$log"
exit "${PIPESTATUS[0]}"
