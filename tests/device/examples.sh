#!/usr/bin/env bash
# examples.sh - tests the examples for GPUs. Builds them by the lines in their heads, and runs them
# with a GPU or without one. Also runs them with each device backend on the stand-ins for CUDA and
# NCCL (tests/fake), where a missing wait gives a wrong result.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
# shellcheck source=tests/lib/examples.sh
. tests/lib/examples.sh

cuda=${CUDA_HOME:-}
[ -n "$cuda" ] || ! nvcc=$(command -v nvcc) || cuda=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
[ -n "$cuda" ] || cuda=/usr/local/cuda
for header in cuda_runtime_api.h nccl.h; do
    if ! echo "#include <$header>" | cc -isystem "$cuda/include" -E - >/dev/null 2>&1; then
        echo "1..0 # SKIP no $header in $cuda/include (CUDA_HOME says where)"
        exit 0
    fi
done
export CUDA_HOME=$cuda IDIST_LOG=error
unset IDIST_DEVICE IDIST_DEVICE_BACKEND
ln -s "$ROOT"/idist*.h "$ROOT/examples" "$WORK"/
cd "$WORK" || exit 1 # 11_gpu_train reads examples/data

# promised NAME SED...: checks that the log contains each line that the head promises, after sed has
# edited the line. Dots stand for any text.
promised() {
    local name=$1 source line pattern rc=0
    shift
    source=$(ls examples/"$name".c*)
    expected_output "$source" | sed "$@" >expected
    while IFS= read -r line; do
        pattern=$(printf '%s\n' "$line" | sed 's/[][*^$\\]/\\&/g; s/\.\.\.*/.*/g')
        grep -q "^$pattern\$" log || { rc=1 && echo "not there: $line"; }
    done <expected >missing
    [ -s expected ] || rc=1
    ok $rc "$name: prints what the head says" || cat missing log | diag
}
none='s/cuda:0, device backend [a-z]*/cpu, device backend none/; /^on a stream/d'

# Runs the examples on the CPU. $1 is empty, or an assignment that turns the device off.
without_device() {
    local name n
    for name in 10_gpu_all_reduce 11_gpu_train 12_zero; do
        [ -x "$name" ] || continue
        for n in 1 2; do
            ok_run 0 "$name: no device${1:+, $1}, ranks: $n" 60 env ${1:+"$1"} "./$name" $n
            [ "$(grep -c '^no CUDA device for all ranks: ' log)" = 1 ]
            ok $? "$name: says so once" || diag <log
        done
        promised $name -e "$none"
        run_ranks 2 60 env ${1:+"$1"} "./$name"
        ok $? "$name: no device${1:+, $1}, two ranks started by hand" || cat rank.? | diag
    done
}

# Compiles everything first: the examples as they are, and the examples for the stand-ins. The host
# cannot access the device memory of the stand-ins, and their operations complete late.
fake=(-O1 -isystem "$cuda/include" -I"$ROOT/tests/fake")
later cuda 60 cc -std=gnu11 "${fake[@]}" -c "$ROOT/tests/fake/cuda.c" -o cuda.o
later nccl 60 cc -std=gnu11 "${fake[@]}" -shared -fPIC "$ROOT/tests/fake/nccl.c" -o libnccl.so
# Without a GPU, the examples have little to do, so they are compiled without optimization.
not_optimized() { sed "s/ -O2 / -O0 '-Doptimize(level)=' /"; }
head_line() {
    if [ -e /dev/nvidia0 ]; then build_line "$1"; else build_line "$1" | not_optimized; fi
}
later head_10 120 sh -c "$(head_line examples/10_gpu_all_reduce.c)"
if command -v nvcc >/dev/null; then
    for name in 11_gpu_train 12_zero; do later head_${name%%_*} 120 sh -c \
        "$(head_line examples/$name.cu)"; done
fi
ok_later cuda "the stand-in for CUDA: builds"
ok_later nccl "the stand-in for NCCL: builds"
line=$(build_line examples/10_gpu_all_reduce.c | not_optimized |
    sed 's|-L.*-lcudart|cuda.o -rdynamic -lpthread -ldl|; s|-o .*|-o fake_10|')
later fake_10 120 sh -c "$line"
mkdir -p fake_sources/lib
for source in examples/lib/*.h examples/11_gpu_train.cu examples/12_zero.cu; do
    sed 's/kernel<element><<<[^>]*>>>(t, \([ab]\), n)/fake_launch(element, t, \1, n, stream)/
         s/(int)(blockIdx.x \* blockDim.x + threadIdx.x)/0/' "$source" >fake_sources/"${source#*/}"
done
grep -rn '<<<\|blockIdx' fake_sources >log
ok "$(wc -l <log)" "every launch of a kernel was found" || diag <log
for name in 11_gpu_train 12_zero; do
    mv fake_sources/$name.cu fake_sources/$name.cc
    later fake_${name%%_*} 120 g++ -std=c++11 "${fake[@]}" "${NOT_OPTIMIZED[@]}" \
        -DIDIST_IMPLEMENTATION -include launch.h \
        fake_sources/$name.cc cuda.o -rdynamic -lpthread -ldl -o "fake_${name%%_*}"
done
for name in 10_gpu_all_reduce 11_gpu_train 12_zero; do
    [ $name = 10_gpu_all_reduce ] || command -v nvcc >/dev/null || {
        skip "$name: builds by the line in its head" "no nvcc"
        continue
    }
    ok_later head_${name%%_*} "$name: builds by the line in its head" || continue
    ok "$(wc -l <log)" "$name: without a warning" || head -n 15 log | diag
done
if [ -e /dev/nvidia0 ]; then
    for name in 10_gpu_all_reduce 11_gpu_train 12_zero; do
        [ -x $name ] || continue
        for n in 1 2; do
            ok_run 0 "$name: on the GPU, ranks: $n" 120 ./$name $n
            grep -q '^no CUDA device' log
            ok $((!$?)) "$name: it was on the GPU" || diag <log
        done
        promised $name -e 's/backend nccl/backend .../'
    done
    without_device IDIST_DEVICE=cpu
else
    skip "10_gpu_all_reduce, 11_gpu_train, 12_zero: on a GPU" "no /dev/nvidia0"
    without_device
fi
for name in 10_gpu_all_reduce 11_gpu_train 12_zero; do
    [ -x $name ] || continue
    ok_run 2 "$name: a bad argument" 10 ./$name none
    RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=$(free_port) ok_run 2 \
        "$name: the number of ranks is the launcher's" 20 ./$name 2
done

# On the stand-ins
unset CUDA_VISIBLE_DEVICES
export FAKE_CUDA_DELAY_US=100 IDIST_NCCL_LIB=$WORK/libnccl.so
for name in 10_gpu_all_reduce 11_gpu_train 12_zero; do ok_later fake_${name%%_*} \
    "$name: builds for the stand-in"; done
for name in 10_gpu_all_reduce 11_gpu_train 12_zero; do
    [ -x fake_${name%%_*} ] || continue
    args=()
    [ $name = 10_gpu_all_reduce ] && args=(1) # MiB
    for backend in staged ipc nccl; do
        for n in 1 2; do # NCCL needs a device for each rank; other backends can share one
            [ $backend = nccl ] && export FAKE_CUDA_DEVICES=$n
            IDIST_DEVICE_BACKEND=$backend ok_run 0 "$name: on the stand-in, $backend, ranks: $n" \
                60 ./fake_${name%%_*} $n \
                "${args[@]}"
            unset FAKE_CUDA_DEVICES
        done
        promised $name -e "s/backend nccl/backend $backend/; s/16 MiB/1 MiB/"
    done
done
if [ -x fake_10 ]; then
    ok_run 0 "10_gpu_all_reduce: two ranks share a device" 60 ./fake_10 2 1
    grep -q '^ranks share a GPU' log
    ok $? "10_gpu_all_reduce: says so" || diag <log
    FAKE_CUDA_DEVICES=2 ok_run 0 "10_gpu_all_reduce: a device each" 60 ./fake_10 2 1
    grep -q '^ranks share a GPU' log
    ok $((!$?)) "10_gpu_all_reduce: does not say so" || diag <log
    FAKE_CUDA_FAIL=cudaMalloc:4:2 ok_run 1 "10_gpu_all_reduce: no memory on the device" 60 ./fake_10
    grep -q 'cudaMalloc.* failed: out of memory' log
    ok $? "10_gpu_all_reduce: says what failed" || diag <log
fi
done_testing
