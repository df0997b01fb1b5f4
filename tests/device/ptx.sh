#!/usr/bin/env bash
# ptx.sh - tests the GPU kernels of src/gpu/ipc without a GPU. Their text is what tests/gpu/pack.cu
# compiles to, and ptxas accepts it for every GPU since 2018. The same source, compiled for the
# host, gives the same bits as the host's own loops.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"

cuda=${CUDA_HOME:-}
[ -n "$cuda" ] || ! nvcc=$(command -v nvcc) || cuda=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
[ -n "$cuda" ] || cuda=/usr/local/cuda
strict=(-std=gnu11 -g -ffp-contract=off -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror -I.
    -Itests/lib)
# The test calls only loops of the core. If all functions are static, the compiler drops the unused
# ones before it optimizes. That takes a third of the time.
strict+=(-DIDIST_NO_RING -DIDIST_API=static -Wno-unused-function)

host() { # ID COMPILER FLAGS...
    local id=$1
    shift
    command -v "$1" >/dev/null || return
    # shellcheck disable=SC2016 # the inner shell expands it
    later "$id" 160 bash -c '"$@" -o "$0" -lpthread && "$0"' "$WORK/$id" "$@" "${strict[@]}" \
        tests/gpu/test_reduce.c
}
host_passes() { # ID NAME
    local name="the kernels on the host have its bits, $2"
    if [ -n "${LATER[$1]:-}" ]; then ok_later "$1" "$name"; else skip "$name" "no ${2%% *}"; fi
}
host gcc gcc -O1
host clang clang -O1
host sanitized gcc -fsanitize=address,undefined -fno-sanitize-recover=all "${NOT_OPTIMIZED[@]}"
host_passes gcc gcc
host_passes clang clang
host_passes sanitized "gcc -fsanitize=address,undefined"

name="src/gpu/ipc/ptx.h has what pack.cu gives"
rc=0
why=$(CUDA_HOME=$cuda tests/gpu/make_ptx.sh --check 2>&1) || rc=$?
if [ $rc -eq 77 ]; then skip "$name" "$why"; else ok $rc "$name" || diag <<<"$why"; fi

cat >"$WORK/print.c" <<'END'
#define IDIST_IMPLEMENTATION
#include "idist_nccl.h"
#include <stdio.h>
int main(void) {
    size_t i;
    for (i = 0; i < sizeof idist__ptx / sizeof idist__ptx[0]; i++) fputs(idist__ptx[i], stdout);
    return sizeof(idist__ptx_args) == 168 ? 0 : 1; // what the text says
}
END
if [ ! -e "$cuda/include/cuda_runtime_api.h" ]; then
    skip "ptxas" "no cuda_runtime_api.h in $cuda/include (CUDA_HOME says where)"
    done_testing
fi
ok_run 0 "a program that prints the text" 60 cc -std=gnu11 "${NOT_OPTIMIZED[@]}" \
    -isystem "$cuda/include" -I. -Itests/fake "$WORK/print.c" \
    tests/fake/cuda.c -o "$WORK/print" -lpthread
ok_run 0 "prints it" 10 "$WORK/print"
cp "$WORK/log" "$WORK/kernels.ptx"
if [ ! -x "$cuda/bin/ptxas" ]; then
    skip "ptxas" "no ptxas in $cuda/bin (CUDA_HOME says where)"
    done_testing
fi
known() { "$cuda/bin/ptxas" --help | grep -qw "$1"; }
for arch in sm_75 sm_80 sm_86 sm_89 sm_90 sm_100 sm_103 sm_120; do
    known $arch && later $arch 60 "$cuda/bin/ptxas" -v -arch=$arch "$WORK/kernels.ptx" -o \
        "$WORK/$arch.cubin"
done
for arch in sm_75 sm_80 sm_86 sm_89 sm_90 sm_100 sm_103 sm_120; do
    if ! known $arch; then
        skip "$arch" "this ptxas does not know it"
        continue
    fi
    ok_later $arch "$arch: ptxas takes it" || continue
    [ "$(grep -c ' 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads' "$WORK/log")" \
        -eq 5 ]
    ok $? "$arch: five kernels, none spills" || diag <"$WORK/log"
    # With 64 registers per thread, two of the largest blocks fit on a multiprocessor.
    [ "$(sed -n 's/.*Used \([0-9]*\) registers.*/\1/p' "$WORK/log" | sort -n | tail -n 1)" -le 64 ]
    ok $? "$arch: at most 64 registers" || diag <"$WORK/log"
done
done_testing
