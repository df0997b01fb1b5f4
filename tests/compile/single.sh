#!/usr/bin/env bash
# single.sh - tests idist.h as a single file (make single) and the archive that contains it (make
# dist). Archives made from two clones must be identical, and the files inside must need no other
# files. The README's first program and some tests of tests/dist must compile and run with them. The
# C examples must compile and link, and two of them must run.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
# shellcheck source=tests/lib/examples.sh
. tests/lib/examples.sh

# Copies the sources to a folder, with the given mode and date. Two such clones differ in name, age
# and permissions. An archive must not show from which clone it comes.
clone() { # FOLDER MODE DATE
    mkdir "$WORK/$1"
    cp -r Makefile LICENSE src tools idist*.h idist.hpp "$WORK/$1/"
    chmod "$2" "$WORK/$1"/*.h "$WORK/$1/LICENSE"
    find "$WORK/$1" -exec touch -d "$3" {} +
}
# Packs a clone. Changes the dates of the built files as well, so that these also differ between two
# clones.
dist() { # FOLDER DATE
    ok_run 0 "make single, $1 clone" 100 make -s -C "$WORK/$1" single BUILD=build
    touch -d "$2" "$WORK/$1"/build/single/*
    ok_run 0 "make dist, $1 clone" 100 make -s -C "$WORK/$1" dist BUILD=build
}
clone first 644 2024-01-02
clone second 600 2025-03-04
dist first 2024-01-03
dist second 2025-03-05
first=$(echo "$WORK"/first/build/idist-*.tar.gz)
cmp -s "$first" "$WORK"/second/build/idist-*.tar.gz
ok $? "two archives are identical" || sha256sum "$WORK"/*/build/*.tar.gz | diag
TZ=UTC tar --numeric-owner -tvzf "$first" >"$WORK/list"
! grep -v '^-rw-r--r-- 0/0 .* 1970-01-01 00:00 idist-[0-9.]*/[A-Za-z_.]*$' "$WORK/list" >"$WORK/log"
ok $? "it tells neither who made it nor when" || diag <"$WORK/log"
od -An -tx1 -N8 "$first" | grep -q '^ 1f 8b 08 00 00 00 00 00'
ok $? "nor does gzip" || od -An -tx1 -N8 "$first" | diag

tar -C "$WORK" -xzf "$first"
SINGLE=$WORK/$(basename "${first%.tar.gz}")
ok $? "the archive unpacks"
(cd "$SINGLE" && ls) >"$WORK/files"
printf "%s\n" LICENSE idist.h idist.hpp idist_mpi.h idist_nccl.h idist_train.h idist_xla.h |
    diff - "$WORK/files" >"$WORK/log"
ok $? "it has the headers and the licence, and nothing else" || diag <"$WORK/log"
grep -hoE '^#include "idist[a-z_]*\.h"' "$SINGLE"/*.h | tr -d '"' | awk '{ print $2 }' | sort -u |
    while read -r header; do
        [ -e "$SINGLE/$header" ] || echo "$header is included, and missing"
    done >"$WORK/log"
ok "$(wc -l <"$WORK/log")" "no header includes a part that is not there" || diag <"$WORK/log"
cmp LICENSE "$SINGLE/LICENSE" >"$WORK/log" 2>&1
ok $? "the licence is that of the project" || diag <"$WORK/log"

# A compiler must see the same text in the single file as in idist.h with idist_ring.h beside it,
# including every macro that they define and undefine.
preprocess() { # FOLDER HEADER LANGUAGE
    printf '#define IDIST_IMPLEMENTATION\n#include <%s>\n' "$2" |
        cc -I"$1" -D__LINE__=0 -Wno-builtin-macro-redefined -x "$3" \
            -E -dD -P - # coroutines contain line numbers
}
for language in c c++; do
    preprocess . idist.h $language >"$WORK/parts" 2>"$WORK/log" &&
        preprocess "$SINGLE" idist.h $language >"$WORK/whole" 2>>"$WORK/log" &&
        diff "$WORK/parts" "$WORK/whole" >"$WORK/log"
    ok $? "idist.h as $language: preprocesses to the same" || head -n 15 "$WORK/log" | diag
done
# A reader must find all lines of both files except the include. The other headers are unchanged.
for part in idist.h idist_ring.h; do
    diff -d "$part" "$SINGLE/idist.h" | sed -n 's/^< //p' |
        grep -vE '^#(ifndef __has_include|include "idist_ring\.h"|elif .*|endif)$' >"$WORK/log"
    ok "$(wc -l <"$WORK/log")" "$part: no line is missing" || head -n 15 "$WORK/log" | diag
done
for header in idist_mpi.h idist_nccl.h idist_xla.h idist_train.h idist.hpp; do
    cmp "$header" "$SINGLE/$header" >"$WORK/log" 2>&1
    ok $? "$header: is copied" || diag <"$WORK/log"
done
mkdir "$SINGLE/examples" # the examples include ../idist.h
cp -r examples/*.[ch] examples/lib examples/apps "$SINGLE/examples/"
ln -s "$ROOT/examples/data" "$SINGLE/examples/data"

# Starts all compilations, in parallel.
strict="-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror"
languages="gcc:c99:c clang:c11:c g++:c++11:c++ clang++:c++20:c++"
for entry in $languages; do
    IFS=: read -r compiler std language <<<"$entry"
    command -v "$compiler" >/dev/null || continue
    # shellcheck disable=SC2086 # a list
    later "$compiler" 100 "$compiler" -std="$std" $strict -DIDIST_IMPLEMENTATION -fsyntax-only \
        -x "$language" "$SINGLE/idist.h"
done
awk '/^```c$/ && !seen { inside = seen = 1; next } /^```/ { inside = 0 } inside' README.md \
    >"$SINGLE/app.c"
later app 100 sh -c "cd '$SINGLE' && cc app.c -o app"
later train 300 cc "${NOT_OPTIMIZED[@]}" -w -DIDIST_IMPLEMENTATION -x c \
    -c "$SINGLE/idist_train.h" -o "$WORK/train.o"
names=
for source in "$SINGLE"/examples/[0-9]*.c "$SINGLE"/examples/apps/*/main.c; do
    name=$(basename "${source%/main.c}" .c)
    [[ $name == *_mpi || $name == *_gpu_* || $name == *_xla_* ]] && continue # other headers
    names="$names $name"
    flags=-D_GNU_SOURCE # without the implementation, which link() adds
    [ "$name" = cifar10 ] && flags=-DIDIST_IMPLEMENTATION # which includes <time.h> for cifar10
    later "$name" 100 cc "${NOT_OPTIMIZED[@]}" $flags -Wall -Wextra -Werror \
        -c "$source" -o "$WORK/$name.o"
done
tests="reduce p2p v_forms groups"
for name in $tests; do
    later "test-$name" 100 cc -O0 -std=gnu11 -Wall -Wextra -Werror -I"$SINGLE" -Itests/lib \
        -c "tests/dist/$name.c" -o "$WORK/test-$name.o"
done

for entry in $languages; do
    IFS=: read -r compiler std language <<<"$entry"
    name="$compiler -std=$std: the single file"
    if command -v "$compiler" >/dev/null; then
        ok_later "$compiler" "$name"
    else
        skip "$name" "no $compiler"
    fi
done
ok_later app "README.md: the first program compiles" &&
    ok_run 0 "README.md: the first program runs" 60 "$SINGLE/app" 4
n_lines=$(grep -c ' of 4: 10 8$' "$WORK/log")
ok $((n_lines != 4)) "README.md: the first program prints what it says"
ok_later train "an object of idist_train.h, which has all of idist.h"

link() { # NAME OBJECT: adds the implementation if the object does not contain it
    local implementation=$WORK/train.o
    nm "$2" | grep ' T idist_finalize$' >/dev/null && implementation=
    # shellcheck disable=SC2086 # none or one
    cc "$2" $implementation -o "$WORK/$1" -lm -ldl -pthread >"$WORK/log" 2>&1
    ok $? "$1: links" || diag <"$WORK/log"
}
for name in $names; do ok_later "$name" "$name: compiles" && link "$name" "$WORK/$name.o"; done
ok_run 0 "01_hello runs" 60 "$WORK/01_hello" 3
ok_run 0 "digits runs" 60 "$WORK/digits" --ranks 2 --epochs 1
export IDIST_TEST_QUICK=1 IDIST_TEST_THIN=4 IDIST_LOG=error
for name in $tests; do
    ok_later "test-$name" "dist/$name.c: compiles" && link "test-$name" "$WORK/test-$name.o" &&
        ok_run 0 "dist/$name.c: passes" 120 "$WORK/test-$name"
done
done_testing
