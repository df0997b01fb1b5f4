#!/usr/bin/env bash
# vendor.sh - tests a copy of idist inside another program or library, as docs/install.md describes
# under Vendoring: in its own .c file, with hidden symbols or none, twice in one process, and with
# flags that other projects set. fast_math.sh, optimizer.sh, unity.sh and compile.sh test the other
# statements of that section.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"

# Makes the copy.
mkdir "$WORK/third_party"
cp idist.h idist_ring.h "$WORK/third_party/"
printf '#define IDIST_IMPLEMENTATION\n#include "idist.h"\n' >"$WORK/third_party/idist.c"
cp "$WORK/third_party/idist.c" "$WORK/third_party/idist.cpp"
cp tests/compile/vendor.c "$WORK/vendor.c"
cp tests/compile/vendor.c "$WORK/vendor.cpp"
IDIST=$WORK/third_party/idist
warn="-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror"

# ---- compilation, all in parallel ----

# COMPILER EXTENSION FLAGS of a program in two files. "fast" means not optimized. Flags that only
# the linker knows are passed only to the linker.
plan="gcc c -Os
gcc c -O3 -march=native
gcc c -O2 -flto
gcc c fast -fsanitize=address,undefined -fno-sanitize-recover=all
gcc c fast -fsanitize=thread
gcc c fast -ffunction-sections -fdata-sections -Wl,--gc-sections
gcc c fast -static
g++ cpp fast -std=c++11 -fno-exceptions -fno-rtti
clang++ cpp fast -std=c++20 -fno-exceptions -fno-rtti"
[ "${IDIST_TEST_FULL:-0}" != 1 ] || plan="$plan
gcc c -O1 -fstack-protector-strong -D_FORTIFY_SOURCE=2 -fPIE -pie -Wl,-z,relro,-z,now
clang c -Os
clang c -O2 -flto"

flags_of() { # FLAGS: prints the flags, one per line
    local flag
    for flag; do
        if [ "$flag" = fast ]; then printf '%s\n' "${NOT_OPTIMIZED[@]}"; else echo "$flag"; fi
    done
}
build_program() { # ID COMPILER EXTENSION FLAGS...: compiles two objects
    local id=$1 compiler=$2 ext=$3 flags compiled
    shift 3
    mapfile -t flags < <(flags_of "$@")
    mapfile -t compiled < <(flags_of "$@" | grep -vE '^(-Wl,.*|-pie|-static)$')
    # shellcheck disable=SC2086 # a list
    later "$id" 300 "$compiler" "${compiled[@]}" $warn -c "$IDIST.$ext" -o "$WORK/$id.idist.o"
    # shellcheck disable=SC2086
    later "$id-user" 60 "$compiler" "${compiled[@]}" $warn -DPROGRAM -I"$WORK/third_party" \
        -c "$WORK/vendor.$ext" -o "$WORK/$id.user.o"
    printf '%s\n' "${flags[@]}" >"$WORK/$id.flags"
}
id=0
while read -r compiler ext flags; do
    id=$((id + 1))
    command -v "$compiler" >/dev/null || continue
    # shellcheck disable=SC2086 # a list
    build_program "program$id" "$compiler" "$ext" $flags
done <<<"$plan"

# ID FLAGS: compiles a copy for shared libraries.
build_copy() {
    local id=$1
    shift
    # shellcheck disable=SC2086 # a list
    later "$id" 100 cc "${NOT_OPTIMIZED[@]}" $warn -fPIC "$@" -c "$IDIST.c" -o "$WORK/$id.o"
}
build_copy hidden -fvisibility=hidden
build_copy plain
build_copy exported -fvisibility=hidden '-DIDIST_API=__attribute__((visibility("default"))) extern'
static_api=("${NOT_OPTIMIZED[@]}" -fPIC -Wno-unused-function -DIDIST_IMPLEMENTATION
    -DIDIST_API=static -I"$WORK/third_party")
# shellcheck disable=SC2086 # a list
later static 100 cc "${static_api[@]}" $warn -DLIBRARY=b -c "$WORK/vendor.c" -o "$WORK/static.o"
# shellcheck disable=SC2086
command -v g++ >/dev/null && later static-cpp 100 g++ "${static_api[@]}" $warn -DLIBRARY=b \
    -c "$WORK/vendor.cpp" -o "$WORK/static-cpp.o"

# ---- flags ----

id=0
while read -r compiler ext flags; do
    id=$((id + 1))
    name="$compiler ${flags/fast/-O0}"
    program=program$id
    if ! command -v "$compiler" >/dev/null; then
        skip "$name" "$compiler is not installed"
        continue
    fi
    ok_later $program "$name: idist.$ext compiles without a warning"
    ok_later $program-user "$name: and so does a user" || continue
    mapfile -t all_flags <"$WORK/$program.flags"
    link=$compiler
    [ "$ext" = cpp ] && link=cc # the C++ library is not needed
    [[ $flags == *-std=c++* ]] && all_flags=()
    # With LTO the linker optimizes and prints the warnings.
    # shellcheck disable=SC2086 # a list
    ok_run 0 "$name: links without a warning" 200 "$link" "${all_flags[@]}" $warn \
        "$WORK/$program.user.o" "$WORK/$program.idist.o" -o "$WORK/$program" -pthread || continue
    ok_run 0 "$name: two ranks" 60 "$WORK/$program"
    grep -qx right "$WORK/log"
    ok $? "$name: get the right values" || diag <"$WORK/log"
done <<<"$plan"

# The first program's size must be within 5 percent of the size in docs/install.md if the compiler
# is the same.
# shellcheck disable=SC2016 # Markdown
claimed=$(sed -n 's/^| `idist.h`, -Os | .* | \([0-9]*\) kB |$/\1/p' docs/install.md)
name="docs/install.md: idist.o has ${claimed:=0} kB at -Os"
if [ "$(gcc -dumpfullversion 2>/dev/null)-$(uname -m)" = 12.2.0-x86_64 ]; then
    size "$WORK/program1.idist.o" >"$WORK/log"
    awk -v kb="$claimed" 'NR == 2 { exit !($4 > 950 * kb && $4 < 1050 * kb) }' "$WORK/log"
    ok $? "$name" || diag <"$WORK/log"
else
    skip "$name" "not gcc 12.2 for x86-64"
fi

# ---- symbols ----

# Prints the symbols of idist that FILE exports.
exported_of() { nm -D --defined-only "$1" | awk '$3 ~ /idist/ { print $3 }' | sort -u; }
global_of() { nm -g --defined-only "$1" | awk '$3 ~ /idist/ { print $3 }' | sort -u; }
none() { # NAME: succeeds if stdin is empty
    cat >"$WORK/symbols"
    ok "$(wc -l <"$WORK/symbols")" "$1" || head -n 5 "$WORK/symbols" | diag
}
library() { # FILE LETTER OBJECT: links a library with this copy
    ok_run 0 "$1: links" 60 cc "${NOT_OPTIMIZED[@]}" -fPIC -fvisibility=hidden -DLIBRARY="$2" \
        -I"$WORK/third_party" -shared "$WORK/vendor.c" "$WORK/$3.o" -o "$WORK/$1" -pthread
}
for copy in hidden plain exported; do ok_later $copy "a copy, $copy"; done
library liba.so a hidden
library libb.so b hidden
for letter in a b; do
    exported_of "$WORK/lib$letter.so" | none "-fvisibility=hidden: lib$letter.so exports no idist"
    ok_run 0 "-fvisibility=hidden: nm" 20 nm -D --defined-only "$WORK/lib$letter.so"
    grep -q " T ${letter}_start" "$WORK/log"
    ok $? "-fvisibility=hidden: lib$letter.so exports what is its own" || diag <"$WORK/log"
done
global_of "$WORK/plain.o" >"$WORK/api"
grep -qx idist_all_reduce "$WORK/api"
ok $? "a plain copy has global functions" || head -n 5 "$WORK/api" | diag
mkdir "$WORK/plain" "$WORK/exported"
library plain/liba.so a plain
library plain/libb.so b plain
library exported/liba.so a exported
for folder in plain exported; do
    exported_of "$WORK/$folder/liba.so" | diff "$WORK/api" - >"$WORK/diff"
    ok $? "$folder: the library exports the API and nothing else of idist" || diag <"$WORK/diff"
done
ok_later static "IDIST_API=static: compiles, user and implementation in one file"
global_of "$WORK/static.o" | none "IDIST_API=static: no global symbol of idist"
if command -v g++ >/dev/null; then
    ok_later static-cpp "IDIST_API=static: and as C++"
    global_of "$WORK/static-cpp.o" | none "IDIST_API=static: as C++, no global symbol of idist"
else
    skip "IDIST_API=static, as C++" "g++ is not installed"
fi
mkdir "$WORK/static"
ok_run 0 "IDIST_API=static: a library" 60 cc -shared "$WORK/static.o" -o "$WORK/static/libb.so" \
    -pthread
exported_of "$WORK/static/libb.so" | none "IDIST_API=static: the library exports no idist"

# ---- two libraries in one process ----

both() { # ID FOLDER_OF_A FOLDER_OF_B
    ok_run 0 "$1: links" 60 cc "${NOT_OPTIMIZED[@]}" -DBOTH "$WORK/vendor.c" "$2/liba.so" \
        "$3/libb.so" -o "$WORK/$1" -pthread -Wl,-rpath,"$2" -Wl,-rpath,"$3"
}
ranks_right() { # NAME PROGRAM ARGUMENT...: runs two ranks
    local name=$1 r
    shift
    run_ranks 2 60 "$@"
    ok $? "$name: two ranks end" || cat "$WORK"/rank.? | diag
    for r in 0 1; do
        grep -qx right "$WORK/rank.$r"
        ok $? "$name: rank $r gets the right values" || diag <"$WORK/rank.$r"
    done
}
both hidden-both "$WORK" "$WORK"
both static-both "$WORK" "$WORK/static"
for program in hidden-both static-both; do
    name=${program%-both}
    ranks_right "$name: one after the other" "$WORK/$program" plain
    ranks_right "$name: an address for each" "$WORK/$program" plain \
        "tcp://127.0.0.1:$(free_port)"
    ranks_right "$name: in two threads" "$WORK/$program" threads "tcp://127.0.0.1:$(free_port)"
    ok_run 0 "$name: one spawns, the other is told" 60 "$WORK/$program" spawn \
        "tcp://127.0.0.1:$(free_port)"
    grep -qx right "$WORK/log"
    ok $? "$name: one spawns: right values" || diag <"$WORK/log"
done
run_ranks 2 60 "$WORK/hidden-both" lost "tcp://127.0.0.1:$(free_port)" 2>"$WORK/log"
grep -qx right "$WORK/rank.0"
ok $? "a rank is killed: the other ends" || diag <"$WORK/rank.0"
for letter in a b; do
    n=$(grep -c "^$letter: IDIST_ERR_PEER_LOST: .*rank [01] on .* was lost" "$WORK/rank.0")
    ok $((n != 2)) "a rank is killed: library $letter says so, each time" || diag <"$WORK/rank.0"
done

# A plugin must leave no memory and no threads behind when it is unloaded.
ok_run 0 "unloaded: links" 60 cc "${NOT_OPTIMIZED[@]}" -DPLUGIN "$WORK/vendor.c" -o "$WORK/plugin" \
    -ldl
ranks_right "unloaded, many times" "$WORK/plugin" "$WORK/liba.so"

# Code compiled for a shared library must not hang when a child process exits.
ok_run 0 "forked: links" 60 cc "${NOT_OPTIMIZED[@]}" -fPIC -DFORKED -DIDIST_IMPLEMENTATION -I. \
    "$WORK/vendor.c" -o "$WORK/forked" -pthread -lm
ok_run 0 "forked, the child exits" 60 "$WORK/forked"

# Shows why symbols should be hidden: otherwise both libraries call the copy that the linker finds
# first.
both plain-both "$WORK/plain" "$WORK/plain"
run_ranks 2 60 "$WORK/plain-both" plain
ok $(($? == 0)) "not hidden: the second library cannot have a default world of its own"
for r in 0 1; do
    grep -q '^b: IDIST_ERR_STATE' "$WORK/rank.$r"
    ok $? "not hidden: rank $r is told so" || diag <"$WORK/rank.$r"
done
done_testing
