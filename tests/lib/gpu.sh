# gpu.sh - builds the programs of tests/gpu, for the GPU of this machine or for the stand-ins of
# tests/fake. Source it after tap.sh. It needs cc, the CUDA runtime, and nccl.h for the stand-ins.
# The programs load libnccl.so.2 if there is one.
# shellcheck shell=bash

gpu_skip() {
    echo "1..0 # SKIP $1"
    exit 0
}

# Prints folders that may contain a CUDA toolkit or NCCL. Folders named by variables come first, and
# the folder of a Python package (nvidia-nccl-cu13) comes last.
gpu_places() {
    local nvcc
    printf '%s\n' "${CUDA_HOME:-}" "${NCCL_HOME:-}"
    nvcc=$(command -v nvcc) && dirname "$(dirname "$(readlink -f "$nvcc")")"
    printf '%s\n' /usr/local/cuda /usr/local /usr
    python3 -c 'import nvidia.nccl as m; print(list(m.__path__)[0])' 2>/dev/null
    return 0
}
gpu_header() { # NAME: prints the folder of a header
    local at
    while read -r at; do
        [ -n "$at" ] || continue
        for at in "$at/include" "$at/targets/$(uname -m)-linux/include"; do
            [ -e "$at/$1" ] && echo "$at" && return
        done
    done < <(gpu_places)
    return 1
}
gpu_library() { # NAME: prints the file of a library, libNAME.so or libNAME.so.N
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

# Prints the file for the output of a run: build/NAME.EXTENSION, or build/NAME.KofN.EXTENSION for a
# part.
gpu_file() { # NAME EXTENSION
    mkdir -p build
    echo "build/$1${PART:+.${PART/\//of}}.$2"
}
gpu_seconds_max() { # SECONDS for all parts; one part has ten minutes, including the time to compile
    if [ -n "${PART:-}" ]; then echo 510; else echo "$1"; fi
}
# Writes BASE.md: the tables of those of the N parts that exist, in order, followed by the results
# that need two of the parts.
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
# NAME ARGUMENT...: compiles to build/fake/gpu/NAME, once for all callers with the same arguments.
gpu_cc_once() {
    local name=$1
    shift
    gpu_run_cc tests/lib/build_once.sh "build/fake/gpu/$name" "$(command -v cc || echo gcc)" "$@"
}

# PROGRAM SOURCE yes|no: builds a program; yes selects the stand-ins. The stand-ins for CUDA are
# linked into the program, and the stand-in for NCCL is a libnccl.so.2 that is loaded like the real
# one. Sets GPU_ENV, the command to run the program with. Exits with a skip if the program cannot be
# built.
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
    # Without a GPU there is nothing to measure, so idist itself is not optimized.
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
    library=$(gpu_library nccl) || return 0 # the program reports that NCCL is missing
    [ -n "${IDIST_NCCL_LIB:-}" ] || GPU_ENV+=(IDIST_NCCL_LIB="$library")
}
