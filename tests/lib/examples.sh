# examples.sh - what the head of an example promises. Source it after tap.sh.
# shellcheck shell=bash

# What follows "// build:", until "// run:".
build_line() {
    awk '/^\/\/ build:/ { inside = 1; sub(/build:/, "") }
         /^\/\/ run:/ { exit }
         inside { sub(/^\/\/ */, ""); line = line (line == "" ? "" : " ") $0 }
         END { print line }' "$1"
}

# The indented lines after "// expected output", up to the next empty comment.
expected_output() {
    awk '/^\/\/ expected output/ { inside = 1; next }
         inside && !/^\/\/    / { exit }
         inside { print substr($0, 7) }' "$1"
}

# Builds it in $WORK, which has the headers and examples/, by exactly that line; or takes what make
# built by the same one.
build_example() { # SOURCE NAME
    local line
    line=$(build_line "$1")
    case $line in
    "cc -O2 -DIDIST_IMPLEMENTATION $1 -o $2" | "c++ -std=c++17 -O2 -DIDIST_IMPLEMENTATION $1 -o $2")
        make -s -C "$ROOT" --no-print-directory -n -B "build/$2" | grep -qF "${line% *} build/$2"
        ok $? "$2: make has the line in its head"
        ok_run 0 "$2: builds by the line in its head" 120 make -s -C "$ROOT" --no-print-directory \
            "build/$2" || return
        cp "$ROOT/build/$2" "$WORK/$2" && cp "$ROOT/build/$2.log" "$WORK/log"
        ok "$(wc -l <"$WORK/log")" "$2: without a warning" || head -n 15 "$WORK/log" | diag
        return 0
        ;;
    esac
    ok_run 0 "$2: builds by the line in its head" 120 sh -c "cd '$WORK' && $(build_line "$1")" ||
        return
    ok "$(wc -l <"$WORK/log")" "$2: without a warning" || head -n 15 "$WORK/log" | diag
}
