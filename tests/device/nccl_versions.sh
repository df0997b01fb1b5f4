#!/usr/bin/env bash
# nccl_versions.sh - tests idist_nccl.h with the oldest NCCL that it can use and with the newest one
# (make deps-nccl). Their headers must declare what idist_nccl.h assumes. With their libraries, the
# CPU path must work on a machine without a driver.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"

cuda=${CUDA_HOME:-}
[ -n "$cuda" ] || ! nvcc=$(command -v nvcc) || cuda=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
[ -n "$cuda" ] || cuda=/usr/local/cuda
[ -e "$cuda/include/cuda_runtime_api.h" ] || {
    echo "1..0 # SKIP no cuda_runtime_api.h in $cuda/include (CUDA_HOME says where)"
    exit 0
}
compgen -G 'build/nccl/*/installed' >/dev/null || {
    echo "1..0 # SKIP no build/nccl: make deps-nccl fetches it"
    exit 0
}
unset IDIST_NCCL_LIB IDIST_DEVICE IDIST_DEVICE_BACKEND LD_LIBRARY_PATH
export IDIST_LOG=error

# Runs two ranks on host memory. Their device must be "cpu". Also checks that the library has the
# version of its header.
cat >"$WORK/cpu.c" <<'END'
#include "idist.h"
#include <dlfcn.h>
#include <nccl.h>
#include <stdio.h>
#include <string.h>
static int work(int local_rank, void *arg) {
    float x = 1;
    (void)local_rank;
    (void)arg;
    if (idist_all_reduce(&x, &x, 1, IDIST_F32, IDIST_SUM, NULL) != IDIST_OK || x != 2) return 1;
    return strcmp(idist_device(), "cpu") != 0;
}
int main(int argc, char **argv) {
    int version = 0, (*get_version)(int *);
    void *library = dlopen(argc > 1 ? argv[1] : "libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!library) return printf("%s\n", dlerror()), 4;
    *(void **)&get_version = dlsym(library, "ncclGetVersion");
    if (!get_version || get_version(&version) || version != NCCL_VERSION_CODE)
        return printf("version %d, the header's is %d\n", version, NCCL_VERSION_CODE), 5;
    if (idist_spawn(work, NULL, 2, NULL) == IDIST_OK) return 0;
    printf("%s\n", idist_last_error());
    return 3;
}
END

for stamp in build/nccl/*/installed; do
    nccl=$ROOT/$(dirname "$stamp")
    version=$(basename "$nccl")
    include=(-isystem "$nccl/include" -isystem "$cuda/include")
    # shellcheck disable=SC2054 # the comma is the linker's
    cuda_lib=(-L"$cuda/lib64" -Wl,-rpath,"$cuda/lib64" -lcudart)
    ok_run 0 "NCCL $version: its numbers, sizes and functions" 60 cc -std=gnu11 -Wall -Wextra \
        -Werror "${include[@]}" -I. \
        tests/gpu/nccl_abi.c "$nccl/lib/libnccl.so.2" "${cuda_lib[@]}" -ldl -o "$WORK/abi"
    ok_run 0 "NCCL $version: and its dtypes" 10 env LD_LIBRARY_PATH="$nccl/lib" "$WORK/abi"
    build=(cc -DIDIST_IMPLEMENTATION -include idist_nccl.h "${include[@]}" -I. "$WORK/cpu.c")
    ok_run 0 "NCCL $version: a program that loads it builds" 60 "${build[@]}" "${cuda_lib[@]}" \
        -ldl -o "$WORK/loads"
    ok_run 0 "NCCL $version: a program linked with it builds" 60 "${build[@]}" "${cuda_lib[@]}" \
        -Wl,--no-as-needed "$nccl/lib/libnccl.so.2" -ldl -o "$WORK/linked"
    if [ -e /dev/nvidia0 ]; then
        skip "NCCL $version: without a driver" "there is a GPU here"
        continue
    fi
    ok_run 0 "NCCL $version: named by IDIST_NCCL_LIB, the CPU path works" 20 \
        env IDIST_NCCL_LIB="$nccl/lib/libnccl.so.2" "$WORK/loads" "$nccl/lib/libnccl.so.2"
    ok_run 0 "NCCL $version: found in LD_LIBRARY_PATH, the CPU path works" 20 env \
        LD_LIBRARY_PATH="$nccl/lib" "$WORK/loads"
    ok_run 0 "NCCL $version: linked, the CPU path works" 20 env LD_LIBRARY_PATH="$nccl/lib" \
        "$WORK/linked"
done
done_testing
