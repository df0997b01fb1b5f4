#!/usr/bin/env bash
# two_backends.sh - tests a program with idist_nccl.h and idist_xla.h on the stand-ins of
# tests/fake. A name selects the device backend. Without a name, the first backend that finds a
# device is used.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
# shellcheck source=tests/lib/on_fake.sh
. tests/lib/on_fake.sh

cat >"$WORK/both.c" <<'END'
#define IDIST_IMPLEMENTATION
#include "idist.h"
#include "idist_nccl.h"
#include "idist_xla.h"
#include <stdio.h>
int main(void) {
    if (idist_initialize(NULL) != IDIST_OK) return printf("%s\n", idist_last_error()), 1;
    printf("%s %s\n", idist_device(), idist_device_backend());
    return idist_finalize() != IDIST_OK;
}
END
later stand_in 100 cc -std=gnu11 "${NOT_OPTIMIZED[@]}" -w -Isrc -fPIC -shared "-Wl,-Bsymbolic" \
    tests/fake/pjrt.c -lpthread -o "$WORK/pjrt.so"
build_ahead plain
parts plain "plain"
program_with_idist "$WORK/both.c" "${NOT_OPTIMIZED[@]}"
ok_later stand_in "the stand-in for PJRT builds"
export IDIST_LOG=error IDIST_XLA_LIB=$WORK/pjrt.so

gives() { # STATUS NAME TEXT ENVIRONMENT...
    ok_run "$1" "$2" 20 env "${@:4}" "$WORK/test"
    grep -qF "$3" "$WORK/log"
    ok $? "gives $3" || diag <"$WORK/log"
}
gives 0 "no name, both devices" "cuda:0 nccl" FAKE_CUDA_DEVICES=1
gives 0 "no name, no GPU" "xla:3 xla" FAKE_CUDA_DEVICES=0
gives 0 "no name, no plug-in" "cuda:0 nccl" FAKE_CUDA_DEVICES=1 IDIST_XLA_LIB=
gives 0 "neither device" "cpu none" FAKE_CUDA_DEVICES=0 IDIST_XLA_LIB=
gives 0 "backend xla" "xla:3 xla" FAKE_CUDA_DEVICES=1 IDIST_BACKEND=xla
gives 0 "backend nccl" "cuda:0 nccl" FAKE_CUDA_DEVICES=1 IDIST_BACKEND=nccl
gives 0 "device xla" "xla:3 xla" FAKE_CUDA_DEVICES=1 IDIST_DEVICE=xla
gives 0 "device cuda" "cuda:0 nccl" FAKE_CUDA_DEVICES=1 IDIST_DEVICE=cuda
gives 0 "device cpu" "cpu none" FAKE_CUDA_DEVICES=1 IDIST_DEVICE=cpu
gives 0 "device backend xla" "xla:3 xla" FAKE_CUDA_DEVICES=1 IDIST_DEVICE_BACKEND=xla
gives 0 "device backend ipc" "cuda:0 ipc" FAKE_CUDA_DEVICES=1 IDIST_DEVICE_BACKEND=ipc
gives 0 "device xla, staged" "xla:3 staged" FAKE_CUDA_DEVICES=1 IDIST_DEVICE=xla \
    IDIST_DEVICE_BACKEND=staged
gives 1 "device cuda without a GPU" "has no device" FAKE_CUDA_DEVICES=0 IDIST_DEVICE=cuda
gives 1 "device xla with nccl" "no device backend serves device \"xla\"" FAKE_CUDA_DEVICES=1 \
    IDIST_DEVICE=xla IDIST_DEVICE_BACKEND=nccl
gives 1 "a wrong name" "fast" FAKE_CUDA_DEVICES=1 IDIST_DEVICE_BACKEND=fast
done_testing
