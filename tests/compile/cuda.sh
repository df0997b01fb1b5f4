#!/usr/bin/env bash
# cuda.sh - compiles idist_nccl.h against the headers of several CUDA runtimes (make peers fetches
# them), as C and as C++, alone and together with idist_train.h. No CUDA library is needed, because
# nothing is linked.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"

versions="11.8 12.1 12.6 12.9 13.0"
warn="-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror"

cat >"$WORK/all.c" <<'END'
#define IDIST_IMPLEMENTATION
#include "idist_nccl.h"
#include "idist_train.h"
END
cp "$WORK/all.c" "$WORK/all.cpp"

compile() { # compile ID COMPILER VERSION FLAGS...
    local id=$1 compiler=$2 version=$3
    shift 3
    # shellcheck disable=SC2086 # a list
    later "$id" 100 "$compiler" $warn -I. -isystem "build/cuda/$version/include" -fsyntax-only "$@"
}

# Checks that a folder has the headers of its version. Otherwise a version would be tested under
# another version's name.
is_version() { # is_version VERSION
    local number
    number=$(echo CUDART_VERSION |
        cc -include cuda_runtime_api.h -isystem "build/cuda/$1/include" -E -P - | tail -n 1)
    [ "$number" = "$((${1%.*} * 1000 + ${1#*.} * 10))" ]
}

for version in $versions; do
    [ -e "build/cuda/$version/installed" ] || continue
    compile "c-$version" cc "$version" -std=c99 "$WORK/all.c"
    compile "cxx-$version" c++ "$version" -std=c++11 "$WORK/all.cpp"
done

for version in $versions; do
    if [ ! -e "build/cuda/$version/installed" ]; then
        skip "CUDA $version" "no build/cuda/$version: make peers fetches it"
        continue
    fi
    is_version "$version"
    ok $? "CUDA $version: its headers say so"
    ok_later "c-$version" "CUDA $version: C99"
    ok_later "cxx-$version" "CUDA $version: C++11"
done
done_testing
