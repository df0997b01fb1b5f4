#!/usr/bin/env bash
# readme.sh [PAGE...] - checks that the programs and commands of the given pages do what the pages
# say. The default is README.md and all pages of docs/.
#
# Every ```c or ```cpp block that contains "int main" is a program. The script compiles it, with an
# object of the implementation unless the block defines IDIST_IMPLEMENTATION or uses an optional
# backend. There must be no warning. A comment directly before a block gives further instructions:
#
#     <!-- test: run, expect "reduced: 3" -->       run the program too; the output must contain the
#                                                   text
#     <!-- test: object -->                         compile the block, which is not a program
#     <!-- test: hosts, expect "rank 3" -->         two_hosts.sh runs the block
#     <!-- test: file hello.c -->                   save the block under this name, for a sh block
#                                                   that compiles it
#     <!-- test: skip "needs two hosts" -->         do not test the block, and count a skip
#     <!-- test: sh, expect "hello from rank 0" --> before a ```sh or ```console block: run its
#                                                   lines in one shell
#
# Commas separate the words of a comment, and expect and run may appear several times. In console
# blocks, only lines that start with "$ " are commands. sh blocks without such a comment are not
# run. Programs and commands of all pages run in one folder. It contains the clone as idist/, and
# what a clone contains. A program may run for 60 s, and a block of commands, which may compile two
# programs, for 120 s. ok_run multiplies both limits by PATIENCE.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"

compile_once
[ $# -gt 0 ] || set -- README.md docs/*.md
cp "$ROOT"/idist*.h "$ROOT/idist.hpp" "$WORK"/
ln -s "$ROOT"/{examples,tests,tools,Makefile} "$WORK"/
ln -s "$ROOT" "$WORK/idist"
ok_run 0 "the implementation" 60 sh -c "cd '$WORK' && cc -w ${NOT_OPTIMIZED[0]} \
    '${NOT_OPTIMIZED[1]}' -DIDIST_IMPLEMENTATION -x c -c idist_train.h -o idist_train.o"

# Writes one file per fenced block, LINE.LANGUAGE, and a file LINE.test with the words of the
# comment before the block.
blocks_of() { # PAGE: writes to $WORK/blocks
    rm -rf "$WORK/blocks"
    mkdir "$WORK/blocks"
    awk -v folder="$WORK/blocks" '
        /^[ ]*```/ && inside { inside = 0; close(file); next }
        /^[ ]*```/ {
            inside = 1; language = $0
            sub(/^[ ]*```[ ]*/, "", language); sub(/[ ,{].*/, "", language)
            file = sprintf("%s/%05d.%s", folder, NR, language == "" ? "none" : language)
            printf "" >file
            if (words != "") print words >(folder "/" sprintf("%05d", NR) ".test")
            words = ""; next
        }
        inside { print >file; next }
        /<!-- *test:.*-->/ {
            words = $0; sub(/.*<!-- *test: */, "", words); sub(/ *-->.*/, "", words); next
        }
        /[^ ]/ { words = "" }
        END { if (inside) print "unclosed" >(folder "/unclosed") }' "$1"
    [ ! -e "$WORK/blocks/unclosed" ]
    ok $? "every block of $1 is closed"
}

# Checks the table "Where to see it": every file exists and contains the names of its row. If the
# file is a test, the last name of the row is a function in it.
check_where_to_see_it() { # PAGE
    local feature shown file name
    sed -n '/^## Where to see it$/,/^## A program/p' "$1" | grep '^| `' >"$WORK/rows"
    while IFS='|' read -r _ feature shown _; do
        file=$(sed -n 's/.*](..\/\([^)]*\)).*/\1/p' <<<"$shown")
        [ -f "$file" ] || echo "\"$file\" of the row$feature is no file"
        # shellcheck disable=SC2016 # backticks of Markdown
        for name in $(grep -o '`[^`]*`' <<<"$feature" | tr -d '`'); do
            grep -qw -- "$name" "$file" || echo "$file does not mention $name"
        done
        # shellcheck disable=SC2016
        name=$(sed -n 's/.*, `\(.*\)`.*/\1/p' <<<"$shown")
        [[ $file != tests/* ]] || grep -q "^static .*\<$name(" "$file" ||
            echo "$file has no function \"$name\""
    done <"$WORK/rows" >"$WORK/wrong" 2>&1
    ok "$(wc -l <"$WORK/wrong")" "$1: what \"Where to see it\" names is there" ||
        diag <"$WORK/wrong"
    ok $(($(wc -l <"$WORK/rows") < 20)) "$1: there is that table" || diag <"$WORK/rows"
}

# Checks that every file and heading that the page links to exists.
check_links() { # PAGE
    local target file
    grep -oE '\]\([^)]*\)' "$1" | sed 's/^](//; s/)$//' | grep -v '^http' | while read -r target; do
        file=${target%%#*}
        file=$(dirname "$1")/${file:-$(basename "$1")}
        [ -e "$file" ] || echo "$target: no such file"
        [[ $target != *'#'* ]] || sed -n 's/^##* //p' "$file" | tr 'A-Z ' 'a-z-' | tr -d ',.:' |
            grep -qxF -- "${target#*#}" || echo "$target: no such heading"
    done >"$WORK/wrong"
    ok "$(wc -l <"$WORK/wrong")" "$1: every link leads somewhere" || diag <"$WORK/wrong"
}

# Checks that every idist name in the text exists, either in a header or as a file.
check_names() { # PAGE
    local name word
    grep -oE '\b(idist|IDIST)_[A-Za-z0-9_]+' "$1" | sort -u | while read -r name; do
        word="\\b($name|X\(${name#IDIST_})"
        [ "${name%_}" = "$name" ] && word="$word\\b" # otherwise a prefix of several names
        grep -qE "$word" idist*.h idist.hpp CMakeLists.txt tests/README.md ||
            compgen -G "*/$name*" >/dev/null || compgen -G "examples/apps/*/$name*" >/dev/null ||
            echo "$name"
    done >"$WORK/unknown"
    ok "$(wc -l <"$WORK/unknown")" "every name of idist in $1 exists" || diag <"$WORK/unknown"
}

# word KEY WORDS: prints the quoted or bare text after KEY, one line each time KEY occurs.
word() { printf '%s\n' "$2" | grep -oE "(^|[ ,])$1 +(\"[^\"]*\"|[^ ,]+)" |
    sed -E "s/^[ ,]*$1 +//; s/^\"(.*)\"\$/\1/"; }
has() { printf '%s\n' "$2" | sed 's/"[^"]*"//g' | grep -qE "(^|[ ,])$1([ ,]|\$)"; }

# Checks that $WORK/log contains every expected text.
check_expected() { # NAME WORDS
    word expect "$2" | while IFS= read -r text; do
        grep -qF -- "$text" "$WORK/log" || echo "\"$text\" is not in the output"
    done >"$WORK/missing"
    ok "$(wc -l <"$WORK/missing")" "$1: prints what is expected" ||
        cat "$WORK/missing" "$WORK/log" | diag
}

test_program() { # BLOCK NAME WORDS
    local block=$1 name=$2 words=$3 file compiler=cc flags=-DIDIST_IMPLEMENTATION object=
    file=$(word file "$words" | head -n 1)
    file=${file:-block_$(basename "$block")}
    case $block in *.cpp) compiler=c++ ;; esac
    cp "$block" "$WORK/$file"
    if grep -q 'define IDIST_IMPLEMENTATION' "$block"; then
        flags=
    elif ! grep -qE 'include "idist_(mpi|nccl|xla)' "$block"; then
        flags='' object=idist_train.o # the same implementation, compiled once
    fi
    command -v $compiler >/dev/null || {
        skip "$name: compiles" "no $compiler here (apt-get install g++)"
        return
    }
    ok_run 0 "$name: compiles" 120 sh -c \
        "cd '$WORK' && $compiler ${NOT_OPTIMIZED[0]} '${NOT_OPTIMIZED[1]}' -Wall -Wextra $flags \
        '$file' $object -o '${file%.*}.out'" || return
    ok "$(wc -l <"$WORK/log")" "$name: without a warning" || head -n 15 "$WORK/log" | diag
    has run "$words" || return
    ok_run 0 "$name: runs" 60 sh -c "cd '$WORK' && './${file%.*}.out'" || return
    check_expected "$name" "$words"
}

test_commands() { # BLOCK NAME WORDS
    local block=$1 name=$2 words=$3
    case $block in
    *.console) sed -n 's/^\$ //p' "$block" >"$WORK/commands.sh" ;;
    *) sed 's/^\$ //' "$block" >"$WORK/commands.sh" ;;
    esac
    ok_run 0 "$name: runs" 120 sh -c "cd '$WORK' && . ./commands.sh" || return
    check_expected "$name" "$words"
}

test_block() { # BLOCK PAGE
    local block=$1 name words reason
    name="$2:$(basename "$block" | sed 's/\..*//; s/^0*//')"
    words=$(cat "${block%.*}.test" 2>/dev/null)
    reason=$(word skip "$words")
    if [ -n "$reason" ]; then skip "$name" "$reason" && return; fi
    case $block in
    *.c | *.cpp)
        if has object "$words"; then
            ok_run 0 "$name: compiles" 60 cc -Wall -Wextra -Werror -I"$WORK" -c "$block" \
                -o "$WORK/object.o"
        elif grep -q 'int main' "$block"; then
            test_program "$block" "$name" "$words"
        fi
        ;;
    *.sh | *.console | *.bash) ! has sh "$words" || test_commands "$block" "$name" "$words" ;;
    esac
}

for page; do
    [ -f "$page" ] || {
        ok 1 "there is a $page"
        continue
    }
    blocks_of "$page"
    check_links "$page"
    check_names "$page"
    [ "$page" != docs/examples.md ] || check_where_to_see_it "$page"
    for block in "$WORK"/blocks/*.*; do
        [[ $block == *.test ]] || test_block "$block" "$page"
    done
done
done_testing
