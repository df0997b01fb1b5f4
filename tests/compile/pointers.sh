#!/usr/bin/env bash
# pointers.sh - checks that counts and displacements of type int, as MPI takes them, do not compile,
# in C or in C++, without any option. Nor must a pointer to int compile where a call stores a size_t
# or a bool. Correct code must compile without a warning: NULL, compound literals, and pointers to
# the functions.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"

warn="-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror"
languages="gcc:c99:c gcc:gnu17:c clang:c99:c clang:gnu17:c g++:c++11:cpp clang++:c++20:cpp"
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
[ ! -x "$nvcc" ] || languages="$languages nvcc:c++17:cu"

# FUNCTION WHAT CALL: WHAT is the word in CALL that the test replaces with a wrong argument and then
# with a right one.
calls='
all_gatherv COUNTS idist_all_gatherv(x, 1, y, COUNTS, NULL, IDIST_F32, NULL)
all_gatherv DISPLS idist_all_gatherv(x, 1, y, NULL, DISPLS, IDIST_F32, NULL)
gatherv COUNTS idist_gatherv(x, 1, y, COUNTS, NULL, IDIST_F32, 0, NULL)
gatherv DISPLS idist_gatherv(x, 1, y, NULL, DISPLS, IDIST_F32, 0, NULL)
scatterv COUNTS idist_scatterv(x, COUNTS, NULL, y, 1, IDIST_F32, 0, NULL)
scatterv DISPLS idist_scatterv(x, NULL, DISPLS, y, 1, IDIST_F32, 0, NULL)
all_to_allv COUNTS idist_all_to_allv(x, COUNTS, NULL, y, NULL, NULL, IDIST_F32, NULL)
all_to_allv COUNTS idist_all_to_allv(x, NULL, NULL, y, COUNTS, NULL, IDIST_F32, NULL)
all_to_allv DISPLS idist_all_to_allv(x, NULL, DISPLS, y, NULL, NULL, IDIST_F32, NULL)
all_to_allv DISPLS idist_all_to_allv(x, NULL, NULL, y, NULL, DISPLS, IDIST_F32, NULL)
reduce_scatterv COUNTS idist_reduce_scatterv(x, y, COUNTS, IDIST_F32, IDIST_SUM, NULL)
broadcast_bytes COUNTS idist_broadcast_bytes(x, 4, COUNTS, 0, NULL)
all_gather_bytes COUNTS idist_all_gather_bytes(x, 4, y, 4, COUNTS, NULL)
broadcast_alloc COUNTS idist_broadcast_alloc(x, 1, IDIST_F32, 0, &p, COUNTS, NULL, NULL)
all_gather_alloc COUNTS idist_all_gather_alloc(x, 1, IDIST_F32, &p, COUNTS, NULL)
wait_any COUNTS idist_wait_any(&request, 1, COUNTS)
wait_any_of COUNTS idist_wait_any_of(&pointer, 1, COUNTS)
wait_some COUNTS idist_wait_some(&request, 1, COUNTS, sizes)
wait_some COUNTS idist_wait_some(&request, 1, sizes, COUNTS)
test_all FLAG idist_test_all(&request, 1, FLAG)
test FLAG idist_test(&request, FLAG)
cancel FLAG idist_cancel(&request, FLAG)
iprobe FLAG idist_iprobe(0, 0, FLAG, NULL, NULL)
improbe FLAG idist_improbe(0, 0, FLAG, &message, NULL)'

program() { # CALL
    printf '%s\n' '#include "idist.h"' \
        'int compiles(float *x, float *y, size_t *sizes, bool *flag, int *mark);' \
        'int compiles(float *x, float *y, size_t *sizes, bool *flag, int *mark) {' \
        '    void *p = NULL;' \
        '    idist_request request = {NULL}, *pointer = &request;' \
        '    idist_message message;' \
        '    (void)x, (void)y, (void)sizes, (void)flag, (void)mark;' \
        '    (void)p, (void)pointer, (void)message;' \
        "    return $1;" \
        '}'
}

# compiles COMPILER STD FILE
compiles() {
    local compiler=$1 std=$2 file=$3 flags
    case $compiler in
    nvcc) flags=(-w -c -o /dev/null) && compiler=$nvcc ;;
    *) flags=(-w -fsyntax-only) ;;
    esac
    "$compiler" -std="$std" "${flags[@]}" -I. "$file" >"$WORK/log" 2>&1
}

# Compiles the wrong call with -w, so that only an error can stop it, and then the right call.
for entry in $languages; do
    IFS=: read -r compiler std ext <<<"$entry"
    name="$compiler -std=$std"
    command -v "$compiler" >/dev/null || [ "$compiler" = nvcc ] || {
        skip "$name" "$compiler is not installed"
        continue
    }
    wrong='' refused='' n=0
    while read -r function what call; do
        [ -n "$function" ] || continue
        # nvcc takes a second for each call and always uses the C++ parser, so two calls are enough
        [ "$compiler" != nvcc ] || [ "$function" = gatherv ] || continue
        n=$((n + 1))
        case $what in FLAG) bad='mark' good='flag' ;; *) bad='(int *)mark' good='sizes' ;; esac
        program "${call//$what/$bad}" >"$WORK/bad.$ext"
        program "${call//$what/$good}" >"$WORK/good.$ext"
        compiles "$compiler" "$std" "$WORK/bad.$ext" && wrong="$wrong $function"
        compiles "$compiler" "$std" "$WORK/good.$ext" || refused="$refused $function"
    done <<<"$calls"
    [ -z "$wrong" ] && [ $n -gt 0 ]
    ok $? "$name: an int is an error in $n calls" || diag <<<"compiles:$wrong"
    [ -z "$refused" ]
    ok $? "$name: a size_t or a bool is not" || { echo "$refused" && cat "$WORK/log"; } | diag
done

# Compiles all the correct calls in a program whose file also has the implementation, before or
# after the API.
cat >"$WORK/right.c" <<'END'
#ifdef AFTER
#include "idist.h"
#endif
#define IDIST_IMPLEMENTATION
#include "idist.h"
#include "idist.h"
#include <string.h>

typedef idist_status (*gather_fn)(const void *, size_t, void *, const size_t *, const size_t *,
                                  idist_dtype, const idist_opts *);
static const gather_fn pointer = idist_all_gatherv;

#define CHECK(call)                                   \
    do {                                              \
        if ((call) != IDIST_OK || y[0] != 1.0f) return __LINE__; \
        memset(y, 0, sizeof y);                       \
    } while (0)

int main(void) {
    float x[1] = {1.0f}, y[1] = {0.0f}, *from = x;
    size_t counts[1] = {1}, displs[1] = {0};
    const size_t *constant = counts;
    void *untyped = displs;
    idist_request request;
    idist_opts opts;
    bool done = false;

    memset(&opts, 0, sizeof opts);
    if (idist_initialize(NULL) != IDIST_OK) return 1;
    CHECK(idist_all_gatherv(x, 1, y, counts, displs, IDIST_F32, NULL));
    CHECK(idist_all_gatherv(x, 1, y, constant, NULL, IDIST_F32, NULL));
    CHECK(idist_all_gatherv(from++, 1, y, counts, 0, IDIST_F32, NULL));
    if (from != x + 1) return 2; /* evaluated once */
    CHECK((idist_all_gatherv)(x, 1, y, counts, NULL, IDIST_F32, NULL));
    CHECK(pointer(x, 1, y, counts, NULL, IDIST_F32, NULL));
#ifndef __cplusplus
    CHECK(idist_all_gatherv(x, 1, y, (const size_t[]){1}, untyped, IDIST_F32, NULL));
    CHECK(idist_reduce_scatterv((const float[]){1.0f}, y, (size_t[1]){1}, IDIST_F32, IDIST_SUM,
                                &(idist_opts){NULL, NULL, NULL, 0, NULL}));
#endif
    CHECK(idist_scatterv(x, counts, NULL, y, 1, IDIST_F32, 0, NULL));
    CHECK(idist_gatherv(x, 1, y, counts, displs, IDIST_F32, 0, NULL));
    CHECK(idist_all_to_allv(x, counts, NULL, y, counts, NULL, IDIST_F32, NULL));
    opts.request = &request;
    idist_all_gatherv(x, 1, y, counts, NULL, IDIST_F32, &opts);
    while (!done)
        if (idist_test(&request, &done) != IDIST_OK) return 3;
    (void)untyped;
    return y[0] == 1.0f && idist_finalize() == IDIST_OK ? 0 : 4;
}
END
for entry in gcc:c99:c gcc:gnu17:c clang:gnu11:c g++:c++11:cpp; do
    for order in BEFORE AFTER; do
        IFS=: read -r compiler std ext <<<"$entry"
        # With -std=c99 the first system header hides POSIX, so the implementation must come first.
        [ "$order-$std" != AFTER-c99 ] || continue
        name="$compiler -std=$std, implementation ${order,,} the API"
        command -v "$compiler" >/dev/null || { skip "$name" "no $compiler" && continue; }
        cp "$WORK/right.c" "$WORK/right.$ext" 2>/dev/null
        # shellcheck disable=SC2086 # a list
        ok_run 0 "$name: no warning" 60 "$compiler" -std="$std" "${NOT_OPTIMIZED[@]}" $warn \
            -D$order -I. "$WORK/right.$ext" -o "$WORK/right" -pthread &&
            ok_run 0 "$name: right values" 20 "$WORK/right"
    done
done
done_testing
