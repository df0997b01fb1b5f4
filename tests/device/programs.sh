#!/usr/bin/env bash
# programs.sh - the programs for machines with GPUs (make test-gpu, make bench-gpu) build without a
# warning, run on the stand-ins of tests/fake, and skip with a reason where there is no GPU.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
# shellcheck source=tests/lib/gpu.sh
. "$ROOT/tests/lib/gpu.sh"

gpu_header cuda_runtime_api.h >/dev/null || gpu_skip "no cuda_runtime_api.h (CUDA_HOME says where)"
gpu_header nccl.h >/dev/null || gpu_skip "no nccl.h (CUDA_HOME or NCCL_HOME says where)"
unset PART BACKENDS RANKS SMALL THIN SIZES ROUNDS COPY MARKDOWN SECONDS_MAX WORLD_SECONDS
unset FAKE_CUDA_DEVICES FAKE_CUDA_DELAY_US
unset IDIST_DEVICE IDIST_DEVICE_BACKEND IDIST_NCCL_LIB IDIST_LOG

if [ ! -e /dev/nvidia0 ]; then
    for script in test_gpu bench_gpu; do later $script 100 tests/gpu/$script.sh; done
fi
ok_run 0 "test_gpu on the stand-ins" 100 tests/gpu/test_gpu.sh --fake
grep -E 'not ok|SKIP' "$WORK/log" | diag
! grep -qE ':[0-9]+: warning:' "$WORK/log"
ok $? "it builds without a warning" || grep -E ':[0-9]+: warning:' "$WORK/log" | diag
for backend in nccl ipc staged; do
    n=$(grep -cE "^ok [0-9]+ - $backend, .*: [^#]*$" "$WORK/log")
    [ "$n" -ge 20 ]
    ok $? "it tests $backend" || echo "$n tests of it passed" | diag
done

ok_run 0 "bench_gpu on the stand-ins" 100 env SIZES=4K:16K ROUNDS=1 RANKS=1,2,4 \
    MARKDOWN="$WORK/results" \
    tests/gpu/bench_gpu.sh --fake
! grep -qE ':[0-9]+: warning:' "$WORK/log"
ok $? "it builds without a warning" || grep -E ':[0-9]+: warning:' "$WORK/log" | diag
cmp -s <(grep -v '^#  ' "$WORK/log") "$WORK/results"
ok $? "it leaves in a file what it prints"
grep -q 'no figure below means a thing' "$WORK/results"
ok $? "it does not pass for a measurement"
[ "$(grep -cE '^\| +(4096|16384) \|( +[0-9.]+ +[0-9.]+ +[0-9.]+ \|){6}$' "$WORK/results")" -ge 6 ]
ok $? "it has a line of six times for each size" || diag <"$WORK/results"
[ "$(grep -c '^Every element was right' "$WORK/results")" -ge 8 ]
ok $? "it checks what it measures"
us='[0-9.]+ us'
grep -qE "^A call on a stream, 1 float: idist_all_reduce $us, ncclAllReduce alone $us" \
    "$WORK/results"
ok $? "it compares a call with NCCL's own" || diag <"$WORK/results"
grep -qE '^ipc: [0-9.]+ us, [0-9.]+ times that' "$WORK/results"
ok $? "it has the bound and what ipc makes of it" || diag <"$WORK/results"

# Runs the benchmark in parts. Each part writes its own tables. Together, the parts have every table
# of a whole run once.
for k in 1 2; do
    ok_run 0 "bench_gpu on the stand-ins, part $k of 2" 100 env PART=$k/2 SIZES=4K:16K ROUNDS=1 \
        RANKS=1,2,4 \
        MARKDOWN="$WORK/parts.${k}of2.md" tests/gpu/bench_gpu.sh --fake
    gpu_join 2 "$WORK/parts"
    [ $k -eq 2 ] || grep -q '^Not run yet: part 2 of 2\.$' "$WORK/parts.md"
    ok $? "the tables of the parts so far" || diag <"$WORK/parts.md"
done
worlds() { grep -E '^## (nccl|ipc|staged),' "$1"; }
[ "$(worlds "$WORK/parts.1of2.md" | wc -l)" -ge 3 ] &&
    diff <(worlds "$WORK/results") <(worlds "$WORK/parts.md") >"$WORK/log"
ok $? "the parts have the worlds of the whole, each once" || diag <"$WORK/log"
grep -qE '^Over all parts: staged / ipc: [0-9.]+' "$WORK/parts.md"
ok $? "what needs the figures of two parts is there" || diag <"$WORK/parts.md"
ok_run 2 "there is no part 3 of 2" 100 env PART=3/2 tests/gpu/bench_gpu.sh --fake

if [ -e /dev/nvidia0 ]; then
    skip "without a GPU" "there is one here"
else
    for script in test_gpu bench_gpu; do
        ok_later $script "$script.sh ends well without a GPU"
        grep -qE '^1\.\.0 # SKIP no (GPU: .+|libcudart.so .*)$' "$WORK/log"
        ok $? "and says why it skips" || diag <"$WORK/log"
    done
fi
done_testing
