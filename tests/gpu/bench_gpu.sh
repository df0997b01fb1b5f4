#!/usr/bin/env bash
# bench_gpu.sh - runs bench_gpu on this machine's GPUs; skips where there is none. Prints tables in
# Markdown, and also writes them to build/gpu_results.md, to be copied into tests/gpu/RESULTS.md.
#
#     tests/gpu/bench_gpu.sh                                       make bench-gpu
#     PART=1/3 tests/gpu/bench_gpu.sh                              make bench-gpu PART=1/3: the
#                                                                  first third, in under ten
#                                                                  minutes, with its own tables
#     BACKENDS=ipc RANKS=4 SIZES=1M:256M tests/gpu/bench_gpu.sh    a selection
#     tests/gpu/bench_gpu.sh --fake                                on the stand-ins of tests/fake,
#                                                                  to see that it runs
#
# A part's tables are in build/gpu_results.1of3.md. After each part, build/gpu_results.md holds the
# tables of all parts that have run.
#
# Other variables are ROUNDS (default 7), COPY (bytes of the copies within the device, default 1G)
# and MARKDOWN (the file). SECONDS_MAX (default 3000; 510 for a part) limits the whole run.
# WORLD_SECONDS (default 300; in a part, at most the world's share) limits one set of ranks.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
# shellcheck source=tests/lib/gpu.sh
. "$ROOT/tests/lib/gpu.sh"
export IDIST_LOG=${IDIST_LOG:-warn} IDIST_TIMEOUT_MS=120000

fake=no
[ "${1:-}" != --fake ] || fake=yes
gpu_build "$WORK/bench_gpu" tests/gpu/bench_gpu.c "$fake"
options=(-rounds "${ROUNDS:-7}")
[ -z "${BACKENDS:-}" ] || options+=(-backends "$BACKENDS")
[ -z "${RANKS:-}" ] || options+=(-ranks "$RANKS")
if [ "$fake" = yes ]; then
    export FAKE_CUDA_DEVICES=${FAKE_CUDA_DEVICES:-2}
    SIZES=${SIZES:-4:64K} COPY=${COPY:-1M}
    options+=(-fake)
fi
[ -z "${PART:-}" ] || options+=(-part "$PART")
[ -z "${SIZES:-}" ] || options+=(-b "${SIZES%:*}" -e "${SIZES#*:}")
[ -z "${COPY:-}" ] || options+=(-copy "$COPY")
markdown=${MARKDOWN:-$(gpu_file gpu_results md)}
[ "$fake" = yes ] && [ -z "${MARKDOWN:-}" ] || options+=(-markdown "$markdown") # grows line by line
timeout -k 10 "${SECONDS_MAX:-$(gpu_seconds_max 3000)}" \
    "${GPU_ENV[@]}" "$WORK/bench_gpu" "${options[@]}" </dev/null
rc=$?
[ -z "${PART:-}" ] || [ -n "${MARKDOWN:-}" ] || [ "$fake" = yes ] ||
    gpu_join "${PART#*/}" build/gpu_results
exit $rc
