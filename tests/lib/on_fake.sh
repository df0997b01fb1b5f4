# on_fake.sh - builds tests with the stand-ins for CUDA and NCCL (tests/fake) and runs them. Source
# it after tap.sh and before anything else. It skips the test if the real headers are missing,
# because the stand-ins are compiled against them. Sets cuda to the folder of the toolkit.
# shellcheck shell=bash

# shellcheck source=tests/lib/gpu.sh
. tests/lib/gpu.sh
cuda=$(gpu_header cuda_runtime_api.h) || gpu_skip "no cuda_runtime_api.h (CUDA_HOME says where)"
nccl=$(gpu_header nccl.h) || gpu_skip "no nccl.h (CUDA_HOME or NCCL_HOME says where)"

# All devices are simulated in processes and threads of this machine. Operations take the time that
# the test sets.
flags=(-std=gnu11 -O1 -g -Wall -Wextra -isystem "$cuda" -I. -Itests/lib -Itests/fake)
[ "$nccl" = "$cuda" ] || flags+=(-isystem "$nccl")
cuda=$(dirname "$cuda")
flags+=(-DIDIST_NCCL_CONNECT_BYTES=32768) # the stand-in has no algorithm for larger calls
# build_ahead FOLDER FLAGS...: starts to compile idist with its shims, and the stand-ins, into
# build/fake/FOLDER, for all tests that use this folder. The stand-ins are always optimized, because
# they do the arithmetic of a device, which is most of the work.
build_ahead() {
    local folder=$1 part optimized
    shift
    for part in on_device cuda nccl; do
        optimized=(-O2)
        [ $part != on_device ] || optimized=("${NOT_OPTIMIZED[1]}") # no function at -O3
        later "$folder-$part" 150 tests/lib/build_once.sh "$ROOT/build/fake/$folder/$part.o" \
            cc "${flags[@]}" "$@" "${optimized[@]}" -c tests/fake/$part.c
    done
}
parts() { # FOLDER NAME: waits for the parts in FOLDER, which the next programs use
    local part
    PARTS=$ROOT/build/fake/$1
    for part in on_device cuda nccl; do ok_later "$1-$part" "$2: $part builds"; done
}
program() { # SOURCE FLAGS...
    local source=$1
    shift
    cc "${flags[@]}" "$@" -c "$source" -o "$WORK/test.o" 2>"$WORK/log" &&
        cc "${flags[@]}" "$@" -rdynamic "$WORK/test.o" "$PARTS"/{on_device,cuda,nccl}.o -o \
            "$WORK/test" -lpthread -ldl -lm \
            2>>"$WORK/log"
    ok $? "$source builds" || diag <"$WORK/log"
}
program_with_idist() { # SOURCE FLAGS...: a test that contains the implementation
    local source=$1
    shift
    cc "${flags[@]}" "$@" -rdynamic "$source" "$PARTS"/{cuda,nccl}.o -o "$WORK/test" -lpthread \
        -ldl -lm >"$WORK/log" 2>&1
    ok $? "$source builds" || diag <"$WORK/log"
}
on_fake() { # NAME ENVIRONMENT...
    local name=$1
    shift
    ok_run 0 "$name" 150 env "$@" "$WORK/test"
}
# shellcheck disable=SC2034 # used by the scripts that source this file
nccl=(FAKE_CUDA_DEVICES=8 IDIST_TEST_NCCL=1)
# shellcheck disable=SC2034
ipc=(FAKE_CUDA_DEVICES=1)
# shellcheck disable=SC2034
staged=(FAKE_CUDA_DEVICES=1 IDIST_DEVICE_BACKEND=staged)
