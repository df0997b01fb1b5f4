#!/usr/bin/env bash
# fp8.sh - checks that F8E4M3 and F8E5M2 are CUDA's 8-bit types, bit for bit. Compares idist with
# CUDA's own conversions, compiled for the host, for all codes and for every 61st float. STEP=1
# compares all floats, which takes two minutes.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"

cuda=${CUDA_HOME:-}
[ -n "$cuda" ] || ! nvcc=$(command -v nvcc) || cuda=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
[ -n "$cuda" ] || cuda=/usr/local/cuda
for what in "$cuda/include/cuda_fp8.h" "$cuda/include/cuda_fp16.h"; do
    [ -e "$what" ] || {
        echo "1..0 # SKIP no $what (CUDA_HOME says where)"
        exit 0
    }
done
command -v c++ >/dev/null || {
    echo "1..0 # SKIP no c++"
    exit 0
}
ok_run 0 "a program with cuda_fp8.h and idist.h builds" 100 c++ -std=c++17 -O2 -Wall -Wextra \
    -isystem "$cuda/include" -I. \
    tests/gpu/fp8.cc -o "$WORK/fp8" -pthread -ldl
ok_run 0 "idist's conversions are CUDA's" 600 "$WORK/fp8" "${STEP:-61}"
diag <"$WORK/log"
done_testing
