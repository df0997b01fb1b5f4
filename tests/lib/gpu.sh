# gpu.sh - builds the programs of tests/gpu, for the GPU of this machine or for the stand-ins of
# tests/fake. Source it after tap.sh. Needs cc, the CUDA runtime, and nccl.h for the stand-ins;
# libnccl.so.2 is loaded when there is one.
# shellcheck shell=bash

gpu_skip() {
    echo "1..0 # SKIP $1"
    exit 0
}

# Folders that may have a CUDA toolkit or NCCL, those named first, that of a Python package
# (nvidia-nccl-cu13) last.
gpu_places() {
    local nvcc
    printf '%s\n' "${CUDA_HOME:-}" "${NCCL_HOME:-}"
    nvcc=$(command -v nvcc) && dirname "$(dirname "$(readlink -f "$nvcc")")"
    printf '%s\n' /usr/local/cuda /usr/local /usr
    python3 -c 'import nvidia.nccl as m; print(list(m.__path__)[0])' 2>/dev/null
    return 0
}
gpu_header() { # NAME: the folder that has it
    local at
    while read -r at; do
        [ -n "$at" ] || continue
        for at in "$at/include" "$at/targets/$(uname -m)-linux/include"; do
            [ -e "$at/$1" ] && echo "$at" && return
        done
    done < <(gpu_places)
    return 1
}
gpu_library() { # NAME: its file, libNAME.so or libNAME.so.N
    local at
    while read -r at; do
        [ -n "$at" ] || continue
        for at in "$at"/lib64/lib"$1".so* "$at"/lib/lib"$1".so* \
            "$at"/targets/"$(uname -m)"-linux/lib/lib"$1".so*; do
            [ -e "$at" ] && echo "$at" && return
        done
    done < <(gpu_places)
    at=$({ ldconfig -p || /sbin/ldconfig -p; } 2>/dev/null |
        awk -v name="lib$1.so" 'index($1, name) == 1 { print $NF }')
    at=${at%%$'\n'*}
    [ -n "$at" ] && echo "$at"
}

# Where a run leaves what it prints: build/NAME.EXTENSION, of a part build/NAME.KofN.EXTENSION.
gpu_file() { # NAME EXTENSION
    mkdir -p build
    echo "build/$1${PART:+.${PART/\//of}}.$2"
}
gpu_seconds_max() { # SECONDS: of all of it; a part has ten minutes, with what it takes to compile
    if [ -n "${PART:-}" ]; then echo 510; else echo "$1"; fi
}
# BASE.md: the tables of all N parts that are there, one after the other, and what needs two of
# them.
gpu_join() { # N BASE
    local k files=() missing=""
    for ((k = 1; k <= $1; k++)); do
        if [ -s "$2.${k}of$1.md" ]; then files+=("$2.${k}of$1.md"); else missing+=" $k"; fi
    done
    {
        cat "${files[@]}"
        awk '/^ipc: [0-9.]+ us/ { ipc = $2 }
            /^staged: [0-9.]+ us/ { staged = $2 }
            END {
                if (!ipc || !staged) exit
                printf "\nOver all parts: staged / ipc: %.1f (target: 20)\n", staged / ipc
            }' "${files[@]}"
        [ -z "$missing" ] || printf '\nNot run yet: part%s of %s.\n' "$missing" "$1"
    } >"$2.md"
}

gpu_run_cc() {
    "$@" >"$WORK/log" 2>&1 </dev/null || {
        diag <"$WORK/log"
        echo "Bail out! the compiler fails"
        exit 1
    }
    diag <"$WORK/log" # warnings
}
gpu_cc() { gpu_run_cc "$(command -v cc || echo gcc)" "$@"; }
# NAME ARGUMENT...: to build/fake/gpu/NAME, for all who ask for the same.
gpu_cc_once() {
    local name=$1
    shift
    gpu_run_cc tests/lib/build_once.sh "build/fake/gpu/$name" "$(command -v cc || echo gcc)" "$@"
}

# PROGRAM SOURCE yes|no: yes is for the stand-ins. They come as the program's own CUDA, and as a
# libnccl.so.2 that is loaded as the real one is. Sets GPU_ENV, which the program needs around it.
# Does not return when it cannot be.
gpu_build() {
    local program=$1 source=$2 fake=$3 cuda nccl="" runtime library flags compiled implementation
    cuda=$(gpu_header cuda_runtime_api.h) || gpu_skip "no cuda_runtime_api.h (CUDA_HOME says where)"
    [ "$fake" = no ] || nccl=$(gpu_header nccl.h) ||
        gpu_skip "no nccl.h (CUDA_HOME or NCCL_HOME says where)"
    [ "$fake" = yes ] || runtime=$(gpu_library cudart) ||
        gpu_skip "no libcudart.so (CUDA_HOME says where)"
    flags=(-std=gnu11 -g -Wall -Wextra -Wpedantic -Wshadow -Wconversion -I. -Itests/lib
        -Itests/gpu -isystem "$cuda")
    [ -z "$nccl" ] || [ "$nccl" = "$cuda" ] || flags+=(-isystem "$nccl")
    flags+=(-pthread -O2)
    [ "$fake" = no ] || flags+=(-DIDIST_NCCL_CONNECT_BYTES=32768)
    # Where no GPU is there is nothing to measure: idist itself is not optimized.
    implementation=idist.o compiled=("${flags[@]}")
    [ "$fake" = no ] || implementation=idist_fake.o
    [ "$fake" = no ] && [ -e /dev/nvidia0 ] || compiled+=("${NOT_OPTIMIZED[@]}")
    gpu_cc_once "$implementation" "${compiled[@]}" -c tests/gpu/idist.c
    implementation=build/fake/gpu/$implementation
    GPU_ENV=(env)
    if [ "$fake" = yes ]; then
        gpu_cc_once libnccl.so.2 "${flags[@]}" -shared -fPIC tests/fake/nccl.c
        gpu_cc_once cuda.o "${flags[@]}" -c tests/fake/cuda.c
        gpu_cc_once "$(basename "$program")" "${flags[@]}" "$source" "$implementation" \
            build/fake/gpu/cuda.o -rdynamic -ldl -lm
        ln -sf "$PWD/build/fake/gpu/$(basename "$program")" "$program"
        GPU_ENV+=(IDIST_NCCL_LIB="$PWD/build/fake/gpu/libnccl.so.2")
        return
    fi
    gpu_cc "${flags[@]}" "$source" "$implementation" "$runtime" \
        -Wl,-rpath,"$(dirname "$runtime")" -o "$program" -ldl -lm
    library=$(gpu_library nccl) || return 0 # the program says what it is without
    [ -n "${IDIST_NCCL_LIB:-}" ] || GPU_ENV+=(IDIST_NCCL_LIB="$library")
}
