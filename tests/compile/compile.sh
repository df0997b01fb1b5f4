#!/bin/bash
# compile.sh - compiles the headers in every language, with every compiler, and in every arrangement
# of files. Writes TAP.
#
# Each program calls the library, spawns two ranks, and is run. If a compiler is absent, its tests
# are skipped with the reason. KEEP=1 keeps the folder with sources and logs.

root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/compile-test.XXXXXX") || exit 1
if [ "${KEEP:-0}" = 1 ]; then echo "# folder: $work"; else trap 'rm -rf "$work"' EXIT; fi
# Only the headers, as a program would copy them.
headers=$work/headers
mkdir "$headers" && cp "$root"/idist*.h "$root/idist.hpp" "$headers" || exit 1
# Variables of a launcher or of the user must not reach the programs.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT IDIST_RANK \
    IDIST_WORLD_SIZE IDIST_BACKEND
# Nothing here depends on the optimizer, so -Doptimize(level)= removes the attribute optimize("O3")
# of the reductions. gcc then needs half as long.
warn="-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror -Doptimize(level)="
limit="timeout -k 5 ${IDIST_COMPILE_LIMIT:-300}"
number=0
failed=0

result() { # result STATUS NAME: prints one TAP line, and the end of the log after a failure
    number=$((number + 1))
    if [ "$1" = 0 ]; then
        echo "ok $number - $2"
    else
        failed=$((failed + 1))
        echo "not ok $number - $2"
        if [ "$1" = 124 ] || [ "$1" = 137 ]; then echo "#   hang: killed after its deadline"; fi
        echo "#   got exit status $1 expected 0"
        tail -n 25 "$work/log" | sed 's/^/#   /'
    fi
}

skip() { # skip NAME REASON
    number=$((number + 1))
    echo "ok $number - $1 # SKIP $2"
}

run() { # run COMMAND...: with a deadline; the output goes to the log
    echo "+ $*" >>"$work/log"
    $limit "$@" >>"$work/log" 2>&1 </dev/null
}

have() { command -v "$1" >/dev/null 2>&1; }

# Everything that is only compiled is compiled first, with as many compilers at a time as there are
# cores. `later ID COMMAND` starts a compiler. `built ID` waits for it, appends its output to the
# log and returns its status.
cores=$(nproc 2>/dev/null || echo 2)
later() {
    local id=$1
    shift
    while [ "$(jobs -rp | wc -l)" -ge "$cores" ]; do wait -n; done
    (
        echo "+ $*" >"$work/$id.build"
        $limit "$@" >>"$work/$id.build" 2>&1 </dev/null
        echo $? >"$work/$id.tmp"
        mv "$work/$id.tmp" "$work/$id.status"
    ) &
}
built() {
    while [ ! -e "$work/$1.status" ]; do sleep 0.05; done
    cat "$work/$1.build" >>"$work/log"
    return "$(cat "$work/$1.status")"
}

#------------------------------------------------------------------------------
# sources
#------------------------------------------------------------------------------

cat >"$work/impl.c" <<'END'
#define IDIST_IMPLEMENTATION
#include "idist.h"
END

# This code is in the common subset of C99 and C++11. It makes the calls of a small program, in a
# world of 1 rank and on two ranks.
cat >"$work/user_body.h" <<'END'
#include <stdio.h>
#include <string.h>

static int user_worker(int local_rank, void *arg)
{
    int rank = idist_get_rank(), n = idist_get_world_size();
    float x[3] = {1.0f, 2.0f, 3.0f}, y[3] = {0.0f, 0.0f, 0.0f};
    int ids[2] = {-1, -1};
    idist_opts opts;
    idist_request request;
    memset(&opts, 0, sizeof opts);
    memset(&request, 0, sizeof request);
    if (n != *(const int *)arg || rank != local_rank) return 1;
    if (idist_all_reduce(x, y, 3, IDIST_F32, IDIST_SUM, NULL) != IDIST_OK) return 2;
    if (y[0] != (float)n || y[2] != 3.0f * (float)n) return 3;
    opts.request = &request;
    if (idist_all_gather(&rank, ids, 1, IDIST_I32, &opts) != IDIST_OK) return 4;
    if (idist_wait(&request) != IDIST_OK) return 5;
    if (ids[0] != 0 || ids[n - 1] != n - 1) return 6;
    return idist_barrier(NULL) == IDIST_OK ? 0 : 7;
}

static int user_main(int n)
{
    idist_desc desc;
    int one = 1;
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = 20000;
    desc.init_timeout_ms = 20000;
    if (idist_initialize(&desc) != IDIST_OK) return 10;
    if (user_worker(0, &one) != 0) return 11;
    if (idist_initialize(NULL) != IDIST_ERR_STATE || !idist_last_error()[0]) return 12;
    if (idist_finalize() != IDIST_OK) return 13;
    idist_status status = idist_spawn(user_worker, &n, n, &desc);
    if (status != IDIST_OK) {
        printf("%s: %s\n", idist_status_name(status), idist_last_error());
        return 14;
    }
    printf("fine: %s\n", idist_available_backends());
    return 0;
}
END

cat >"$work/user.c" <<'END'
#include "idist.h"
#include "user_body.h"
int main(void) { return user_main(2); }
END

cat >"$work/system_first.c" <<'END'
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "idist.h"
#include "idist.h"
#include "user_body.h"
int main(void) { return user_main(2); }
END

cat >"$work/single.c" <<'END'
#define IDIST_IMPLEMENTATION
#include "idist.h"
#include "user_body.h"
int main(void) { return user_main(2); }
END

cat >"$work/api_then_impl.c" <<'END'
#include "idist.h"
#include "idist.h"
#define IDIST_IMPLEMENTATION
#include "idist.h"
#include "idist.h"
#include "idist_ring.h"
#include "user_body.h"
int main(void) { return user_main(2); }
END

cat >"$work/ring_first.c" <<'END'
#define IDIST_IMPLEMENTATION
#include "idist_ring.h"
#include "idist.h"
#include "user_body.h"
int main(void) { return user_main(2); }
END

cat >"$work/ring_first_api.c" <<'END'
#include "idist_ring.h"
#include "idist.h"
#include "user_body.h"
int main(void) { return user_main(2); }
END

cat >"$work/no_ring.c" <<'END'
#define IDIST_NO_RING
#define IDIST_IMPLEMENTATION
#include "idist.h"
#include <stdio.h>
#include <string.h>
int main(void)
{
    idist_desc desc;
    double x = 2.5, y = 0.0;
    memset(&desc, 0, sizeof desc);
    if (strstr(idist_available_backends(), "ring")) return 1;
    if (idist_initialize(NULL) != IDIST_OK) return 2;
    if (strcmp(idist_backend(), "self") != 0) return 3;
    if (idist_all_reduce(&x, &y, 1, IDIST_F64, IDIST_SUM, NULL) != IDIST_OK || y != 2.5) return 4;
    if (idist_finalize() != IDIST_OK) return 5;
    desc.rank = 0;
    desc.world_size = 2; /* nothing in this program can connect two ranks */
    desc.init_method = "tcp://127.0.0.1:1";
    desc.init_timeout_ms = 3000;
    idist_status status = idist_initialize(&desc);
    printf("%s: %s\n", idist_status_name(status), idist_last_error());
    return status == IDIST_ERR_NO_BACKEND ? 0 : 6;
}
END

cat >"$work/dtype_body.h" <<'END'
#include <string.h>
#define TRY(type, want)                                                                       \
    do {                                                                                      \
        type v[2];                                                                            \
        memset(v, 0, sizeof v);                                                               \
        if (IDIST_DTYPE(v) != (want) || IDIST_DTYPE(&v[1]) != (want)) return __LINE__ % 250;  \
        if (idist_dtype_size(IDIST_DTYPE(v)) != sizeof v[0]) return __LINE__ % 250;           \
        if (idist_broadcast(v, 2, IDIST_DTYPE(v), 0, NULL) != IDIST_OK) return __LINE__ % 250; \
    } while (0)
static int dtype_main(void)
{
    double given[2] = {1.0, 2.0};
    const double *constant = given;
    if (idist_initialize(NULL) != IDIST_OK) return 1;
    if (IDIST_DTYPE(constant) != IDIST_F64) return 2;
    TRY(char, IDIST_I8);
    TRY(signed char, IDIST_I8);
    TRY(unsigned char, IDIST_U8);
    TRY(bool, IDIST_U8);
    TRY(short, IDIST_I16);
    TRY(unsigned short, IDIST_U16);
    TRY(int, IDIST_I32);
    TRY(unsigned int, IDIST_U32);
    TRY(long, sizeof(long) == 8 ? IDIST_I64 : IDIST_I32);
    TRY(unsigned long, sizeof(long) == 8 ? IDIST_U64 : IDIST_U32);
    TRY(long long, IDIST_I64);
    TRY(unsigned long long, IDIST_U64);
    TRY(int64_t, IDIST_I64);
    TRY(uint8_t, IDIST_U8);
    TRY(float, IDIST_F32);
    TRY(double, IDIST_F64);
    return idist_finalize() == IDIST_OK ? 0 : 3;
}
END
cat >"$work/dtype.c" <<'END'
#include "idist.h"
#include "dtype_body.h"
int main(void) { return dtype_main(); }
END

cat >"$work/trace.c" <<'END'
#define IDIST_IMPLEMENTATION
#include "idist.h"
#include "user_body.h"
int main(void)
{
    idist_trace_begin("a name");
    idist_trace_span("a name", "a category", 1, 2, NULL);
    idist_trace_end();
    return idist_trace_on() ? 1 : user_main(2);
}
END

for name in impl trace user system_first single api_then_impl ring_first ring_first_api no_ring \
    dtype; do
    cp "$work/$name.c" "$work/$name.cpp"
    cp "$work/$name.c" "$work/$name.cu"
done

#------------------------------------------------------------------------------
# every language standard, with the implementation in a separate file
#------------------------------------------------------------------------------

standards="gcc:c99:c gcc:gnu17:c clang:c99:c clang:gnu17:c g++:c++11:cpp g++:c++20:cpp
    clang++:c++11:cpp clang++:c++20:cpp"
[ "${IDIST_TEST_FULL:-0}" != 1 ] || standards="$standards gcc:c11:c clang:c11:c"

build_standard() { # build_standard COMPILER STD EXTENSION
    have "$1" || return
    # shellcheck disable=SC2086
    later "$1-$2-impl" "$1" -std="$2" $warn -I"$headers" -c "$work/impl.$3" -o "$work/$1-$2-impl.o"
}

standard() { # standard COMPILER STD EXTENSION
    local cc=$1 std=$2 ext=$3 id status=0 program
    id="$cc-$std"
    if ! have "$cc"; then
        skip "$cc -std=$std" "$cc is not installed"
        return
    fi
    : >"$work/log"
    built "$id-impl" || status=$?
    for program in user system_first ring_first_api; do
        # shellcheck disable=SC2086
        [ $status = 0 ] && { run "$cc" -std="$std" $warn -I"$headers" -I"$work" \
            "$work/$program.$ext" "$work/$id-impl.o" \
            -o "$work/$id-$program" && run "$work/$id-$program" || status=$?; }
    done
    result $status "$cc -std=$std: implementation in a file of its own, three users"
    [ "$std" = c99 ] && return
    : >"$work/log"
    status=0
    # shellcheck disable=SC2086
    run "$cc" -std="$std" $warn -I"$headers" -I"$work" "$work/dtype.$ext" "$work/$id-impl.o" -o \
        "$work/$id-dtype" &&
        run "$work/$id-dtype" || status=$?
    result $status "$cc -std=$std: IDIST_DTYPE"
}

#------------------------------------------------------------------------------
# arrangements in one file
#------------------------------------------------------------------------------

# COMPILER STD PROGRAM EXTENSION TEXT. With -std=c99 the first system header hides POSIX, and the
# API alone includes three system headers. So in C, "API first" needs a gnu standard. gcc builds and
# runs each arrangement. The other compilers only check the syntax, because the arrangement does not
# affect the later stages. IDIST_TEST_FULL=1 builds and runs all of them.
arrangements="gcc c99 single c one file
clang++ c++11 single cpp one file
gcc gnu11 api_then_impl c API first, then the implementation, each twice
clang gnu17 api_then_impl c API first, then the implementation, each twice
g++ c++11 api_then_impl cpp API first, then the implementation, each twice
gcc gnu17 ring_first c idist_ring.h before idist.h
clang gnu17 ring_first c idist_ring.h before idist.h
g++ c++20 ring_first cpp idist_ring.h before idist.h
gcc c99 trace c idist_trace_begin
clang++ c++11 trace cpp idist_trace_begin
gcc c99 no_ring c IDIST_NO_RING
g++ c++11 no_ring cpp IDIST_NO_RING"

front_end_only() { # front_end_only COMPILER
    [ "${IDIST_TEST_FULL:-0}" != 1 ] && [ "$1" != gcc ] && have gcc
}

build_arrangement() {
    have "$1" || return
    local target=(-o "$work/$1-$3")
    front_end_only "$1" && target=(-fsyntax-only)
    # shellcheck disable=SC2086
    later "$1-$3" "$1" -std="$2" $warn -I"$headers" -I"$work" "$work/$3.$4" "${target[@]}"
}

arrangement() { # arrangement COMPILER STD PROGRAM EXTENSION TEXT
    local status=0 name="$1 -std=$2: $5"
    if ! have "$1"; then
        skip "$name" "$1 is not installed"
        return
    fi
    : >"$work/log"
    built "$1-$3" && { front_end_only "$1" || run "$work/$1-$3"; } || status=$?
    result $status "$name"
}

#------------------------------------------------------------------------------
# linking
#------------------------------------------------------------------------------

library() { # library COMPILER_OF_THE_LIBRARY STD EXT COMPILER_OF_THE_USER STD EXT
    local status=0 name="static library by $1 -std=$2, user by $4 -std=$5"
    if ! have "$1" || ! have "$4" || ! have ar; then
        skip "$name" "$1, $4 or ar is not installed"
        return
    fi
    : >"$work/log"
    rm -f "$work/libidist.a"
    # shellcheck disable=SC2086
    { built "$1-$2-impl" && run ar rcs "$work/libidist.a" "$work/$1-$2-impl.o" &&
        run "$4" -std="$5" $warn -I"$headers" -I"$work" "$work/user.$6" -L"$work" -lidist -o \
            "$work/library-user" &&
        run "$work/library-user" && grep -q 'fine:.*ring' "$work/log"; } || status=$?
    result $status "$name: spawns two ranks over ring"
}


#------------------------------------------------------------------------------
# examples as C++; tests/docs/examples.sh tests the build lines in their heads
#------------------------------------------------------------------------------

# Links the example with the implementation that g++ has already compiled.
example() { # example SOURCE
    local status=0 name
    name=$(basename "$1" .c)
    if ! have g++; then
        skip "$1 as C++" "g++ is not installed"
        return
    fi
    : >"$work/log"
    run g++ -D_GNU_SOURCE -x c++ "$1" -x none "$work/g++-c++11-impl.o" -o "$work/$name-cpp" &&
        run "$work/$name-cpp" || status=$?
    result $status "$1 as C++, and run"
}

# Compiles the C++ example with a compiler that tests/docs/examples.sh does not use.
build_cxx_example() {
    have clang++ || return
    # shellcheck disable=SC2086
    later 25_mixed clang++ -std=c++17 $warn -DIDIST_IMPLEMENTATION examples/25_mixed.cpp -o \
        "$work/25_mixed"
}

cxx_example() {
    local status=0 name="clang++ -std=c++17: examples/25_mixed.cpp, and run"
    if ! have clang++; then
        skip "$name" "clang++ is not installed"
        return
    fi
    : >"$work/log"
    built 25_mixed && run "$work/25_mixed" || status=$?
    result $status "$name"
}

#------------------------------------------------------------------------------
# nvcc
#------------------------------------------------------------------------------

nvcc=$(command -v nvcc || { [ -x /usr/local/cuda/bin/nvcc ] && echo /usr/local/cuda/bin/nvcc; })
cuda_warn="-Werror all-warnings -Xcompiler -Wall,-Wextra,-Wshadow"

build_cuda() {
    { [ -n "$nvcc" ] && have g++; } || return
    # shellcheck disable=SC2086
    later nvcc-impl "$nvcc" $cuda_warn -I"$headers" -c "$work/impl.cu" -o "$work/nvcc-impl.o"
    # shellcheck disable=SC2086
    later nvcc-user "$nvcc" $cuda_warn -I"$headers" -I"$work" -c "$work/user.cu" \
        -o "$work/nvcc-user.o"
}

cuda() {
    local status=0
    if [ -z "$nvcc" ]; then
        skip "nvcc" "nvcc is not installed"
    elif ! have g++; then
        skip "nvcc" "g++, which nvcc needs, is not installed"
    else
        : >"$work/log"
        { built nvcc-impl && built nvcc-user &&
            run "$nvcc" "$work/nvcc-user.o" "$work/nvcc-impl.o" -o "$work/nvcc-user" &&
                run "$work/nvcc-user"; } || status=$?
        result $status "nvcc: implementation in a file of its own, and run"
    fi
}

#------------------------------------------------------------------------------
# build everything, then check the results
#------------------------------------------------------------------------------

for_standards() { # for_standards FUNCTION
    local entry
    for entry in $standards; do
        # shellcheck disable=SC2086
        "$1" ${entry//:/ }
    done
}

for_arrangements() { # for_arrangements FUNCTION
    local cc std program ext text
    while read -r cc std program ext text; do "$1" "$cc" "$std" "$program" "$ext" "$text"; done \
        <<<"$arrangements"
}

cd "$root" || exit 1
for_standards build_standard
for_arrangements build_arrangement
build_cuda
build_cxx_example
wait

for_standards standard
for_arrangements arrangement
library gcc c99 c gcc c11 c
library gcc gnu17 c g++ c++11 cpp
library clang c99 c clang++ c++20 cpp
library g++ c++11 cpp g++ c++20 cpp
for source in examples/0[1-4]_*.c; do example "$source"; done
cxx_example
cuda

echo "1..$number"
[ $failed = 0 ]
