#!/usr/bin/env bash
# optimizer.sh - checks that the headers compile without a warning at -O2 as C and at -O3 as C++.
# With IDIST_TEST_FULL=1, compiles at every level and with LTO, with each compiler. Some warnings
# need gcc's optimizer: -Wmaybe-uninitialized, -Warray-bounds, -Wstringop-overflow, and the warnings
# of LTO. The optimizer is the same for C and C++, so by default each compiles one level.
#
# Other scripts cover the remaining levels. Most tests are linked with idist.h compiled at -O1, and
# make compiles that object with the same warnings. Hardly any of clang's warnings need its
# optimizer, and compile.sh and bits32.sh compile the headers at -O0 with each compiler. vendor.sh
# compiles idist.h alone with the same warnings: with gcc at -Os, -O3 and with LTO, and with clang
# at -Os.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"

all="-O0 -O1 -O2 -O3 -Os"
warn="-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror"
limit=200

# All headers are in one file, because most of the time goes into idist.h, which each of them
# includes. The other code in the file affects inlining, so at -O3, which inlines most, idist.h is
# compiled alone as well, by vendor.sh and here with IDIST_TEST_FULL=1.
printf '#define IDIST_IMPLEMENTATION\n#include "idist.h"\n%s\n' \
    'int main(void) { return idist_get_rank(); }' >"$WORK/alone.c"
headers="idist.h idist_train.h idist_xla.h"
include=(-I.)
for at in /usr/lib/*-linux-gnu/openmpi/include /usr/include/*-linux-gnu/mpich; do
    [ -e "$at/mpi.h" ] || continue
    headers="$headers idist_mpi.h"
    include+=(-isystem "$at")
    break
done
if [ -e build/cuda/12.9/installed ]; then
    headers="$headers idist_nccl.h"
    include+=(-isystem build/cuda/12.9/include)
fi
{
    echo '#define IDIST_IMPLEMENTATION'
    case $headers in *idist_nccl.h*) echo '#include "idist_nccl.h"' ;; esac \
        # before idist_train.h, which uses it
    for header in $headers; do echo "#include \"$header\""; done
} >"$WORK/all.c"
cp "$WORK/all.c" "$WORK/all.cpp"
cp "$WORK/alone.c" "$WORK/alone.cpp"

# COMPILER STD EXTENSION LEVELS. "alone" and "lto" compile idist.h by itself, see below.
of_gcc="-O2"
of_clang=""
of_clangxx=""
of_gxx="-O3"
[ "${IDIST_TEST_FULL:-0}" = 1 ] &&
    of_gcc="$all alone lto" of_clang="$all lto" of_clangxx="$all lto" of_gxx="$all lto"
plan="gcc gnu11 c $of_gcc
g++ c++17 cpp $of_gxx
clang gnu11 c $of_clang
clang++ c++17 cpp $of_clangxx"

compile() { # compile ID COMPILER STD FLAGS...
    local id=$1 compiler=$2 std=$3
    shift 3
    # shellcheck disable=SC2086 # a list
    later "$id" $limit nice "$compiler" -std="$std" $warn "${include[@]}" "$@" -o "$WORK/$id.o"
}

while read -r compiler std ext levels; do
    command -v "$compiler" >/dev/null || continue
    for level in $levels; do
        case $level in
        alone) compile "$compiler$level" "$compiler" "$std" -O3 -c "$WORK/alone.$ext" ;;
        # Linked as well, because with LTO the linker optimizes and prints the warnings.
        lto) compile "$compiler$level" "$compiler" "$std" -O2 -flto "$WORK/alone.$ext" -pthread ;;
        *) compile "$compiler$level" "$compiler" "$std" "$level" -c "$WORK/all.$ext" ;;
        esac
    done
done <<<"$plan"

echo "# $headers"
while read -r compiler std ext levels; do
    if ! command -v "$compiler" >/dev/null; then
        skip "$compiler" "$compiler is not installed"
        continue
    fi
    for level in $levels; do
        case $level in
        alone) name="-O3: no warning from idist.h alone" ;;
        lto) name="-O2 -flto: no warning from idist.h, linked" ;;
        *) name="$level: no warning" ;;
        esac
        ok_later "$compiler$level" "$compiler -std=$std $name"
    done
done <<<"$plan"
done_testing
