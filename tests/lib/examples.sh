# examples.sh - checks the promises in the head of an example. Source it after tap.sh.
# shellcheck shell=bash

# Prints the text from "// build:" up to "// run:".
build_line() {
    awk '/^\/\/ build:/ { inside = 1; sub(/build:/, "") }
         /^\/\/ run:/ { exit }
         inside { sub(/^\/\/ */, ""); line = line (line == "" ? "" : " ") $0 }
         END { print line }' "$1"
}

# Prints the indented lines after "// expected output", up to the next empty comment.
expected_output() {
    awk '/^\/\/ expected output/ { inside = 1; next }
         inside && !/^\/\/    / { exit }
         inside { print substr($0, 7) }' "$1"
}

# Examples that make builds by the lines in their heads, because other tests need them, too
# (TESTED_EXAMPLES in the Makefile).
WHOLE="digits cifar10"

# Builds an example in $WORK, which contains the headers and examples/, by exactly the line in its
# head. An optimized build takes ten seconds, most of them for the implementation, which is the same
# in every example. So unless the example is in WHOLE, the line runs only the front end of the
# compiler. The program is then linked with the implementation of the tests. IDIST_TEST_FULL=1
# builds all examples by the full lines.
build_example() { # SOURCE NAME
    local source=$1 name=$2 line compile implementation
    line=$(build_line "$source")
    compile=${line%" -o $name"}
    case $compile in
    "cc -O2 -DIDIST_IMPLEMENTATION $source" | "c++ -std=c++17 -O2 -DIDIST_IMPLEMENTATION $source")
        make -s -C "$ROOT" --no-print-directory -n -B "build/$name" |
            grep -qF "$compile -o build/$name"
        ok $? "$name: make has the line in its head"
        ;;
    *)
        ok_run 0 "$name: builds by the line in its head" 120 sh -c "cd '$WORK' && $line" &&
            no_warning "$name"
        return
        ;;
    esac
    if [ "${IDIST_TEST_FULL:-0}" = 1 ] || [[ " $WHOLE " == *" $name "* ]]; then
        ok_run 0 "$name: builds by the line in its head" 120 make -s -C "$ROOT" \
            --no-print-directory "build/$name" || return
        cp "$ROOT/build/$name" "$WORK/$name" && cp "$ROOT/build/$name.log" "$WORK/log"
        no_warning "$name"
        return
    fi
    ok_run 0 "$name: compiles by the line in its head" 60 sh -c "cd '$WORK' && $compile \
        -fsyntax-only" || return
    no_warning "$name"
    implementation=build/tests/idist_train.o
    ok_run 0 "$name: the implementation is there" 120 make -s -C "$ROOT" --no-print-directory \
        "$implementation" || return
    # Without IDIST_IMPLEMENTATION, the header asks for no extensions of libc.
    compile=${compile/-DIDIST_IMPLEMENTATION/-D_GNU_SOURCE}
    ok_run 0 "$name: builds" 60 sh -c "cd '$WORK' && $compile '$ROOT/$implementation' -o $name" &&
        no_warning "$name"
}
no_warning() { ok "$(wc -l <"$WORK/log")" "$1: without a warning" ||
    head -n 15 "$WORK/log" | diag; }
