#!/usr/bin/env bash
# lint.sh - checks the project's rules that a compiler does not know. Prints TAP. Exits with 1 if
# something was found.
#
#   contents   the list CONTENTS at the top of a header names all its sections, in their order
#   includes   a file of src/ includes only what includes.py allows
#   drop-ins   the headers at the root are up to date with src/
#   names      exported symbols start with idist_ and are declared in the API part; macros start
#              with IDIST_
#   text       ASCII, no tabs, no white space at the end of a line, at most 100 columns
#   house      the rules of house.py: names, nesting, length of functions, ...; for the launcher,
#              tools/idistrun/, only the rules that are not about src/
#   format     clang-format; also: shell scripts are executable and pass shellcheck
#   speech     no paths of somebody's machine, no FIXME or XXX, no TODO without an owner
#   tidy       clang-tidy over the implementation
set -u
shopt -s lastpipe # so that report, at the end of a pipe, can count
cd "$(dirname "$0")/../.." || exit 1

MAX_COLUMNS=100
TMP=$(mktemp -d) || exit 1
trap 'rm -rf "$TMP"' EXIT
N_RUN=0
N_FAILED=0

mapfile -t SOURCES < <(find src -name '*.h' | sort)
# All files that git tracks or would add. Without git, all files outside build/ and .git/.
mapfile -t ALL < <(git ls-files --cached --others --exclude-standard 2>/dev/null | sort -u ||
    find . -type f -not -path './build/*' -not -path './.git/*' | sed 's|^\./||' | sort)
FILES=()
for f in "${ALL[@]}"; do [ -f "$f" ] && FILES+=("$f"); done
# Leaves out the drop-ins, which are generated.
mapfile -t C_FILES < <(printf '%s\n' "${FILES[@]}" | grep -E '\.(c|h|hpp|cc|cpp|cu)$' |
    grep -vE '^idist[a-z_]*\.h$')
mapfile -t SCRIPTS < <(printf '%s\n' "${FILES[@]}" | grep -E '(\.sh|^\.ci/run)$')
mapfile -t TEXTS < <(printf '%s\n' "${FILES[@]}" |
    grep -E -e '\.(c|h|hpp|cc|cpp|cu|sh|py|awk|md|in|yml|cmake|build|json|wrap)$' \
        -e '(Makefile|LICENSE|CMakeLists\.txt|/usage|^\.ci/run|^\.[a-z-]+)$' |
    grep -vE '^idist[a-z_]*\.h$')

# report NAME: passes if there are no findings on stdin, and otherwise prints them as diagnostics.
report() {
    local findings
    findings=$(cat)
    N_RUN=$((N_RUN + 1))
    if [ -z "$findings" ]; then
        echo "ok $N_RUN - $1"
    else
        N_FAILED=$((N_FAILED + 1))
        echo "not ok $N_RUN - $1"
        printf '%s\n' "$findings" | sed 's/^/#   /'
    fi
}

skip() { # NAME REASON
    N_RUN=$((N_RUN + 1))
    echo "ok $N_RUN - $1 # SKIP $2"
}

#------------------------------------------------------------------------------
# contents
#------------------------------------------------------------------------------

# Prints the tags of a header's banners, in order: a line of dashes, then "// [tag]  text".
banner_tags() {
    awk '/^\/\/----------------------------------------/ { dashes = NR }
         /^\/\/ \[[a-z_]+:[a-z0-9_]+\]/ && dashes == NR - 1 {
             print substr($2, 2, index($2, "]") - 2)
         }' "$1"
}

# Prints the tags that the doc block (all before the first line of code) lists under CONTENTS.
contents_tags() {
    awk '/\*\// { exit }
         /CONTENTS/ { inside = 1; next }
         inside && /^ *\[/ && match($0, /\[[a-z_]+:[a-z0-9_]+\]/) {
             print substr($0, RSTART + 1, RLENGTH - 2)
         }' "$1"
}

check_contents() {
    local h=$1
    banner_tags "$h" >"$TMP/banners"
    contents_tags "$h" >"$TMP/contents"
    [ -s "$TMP/contents" ] || echo "$h: the doc block has no CONTENTS"
    [ -s "$TMP/banners" ] || echo "$h: no section banner found"
    grep -vxFf "$TMP/contents" "$TMP/banners" | sed "s|.*|$h: section [&] is missing in CONTENTS|"
    grep -vxFf "$TMP/banners" "$TMP/contents" |
        sed "s|.*|$h: CONTENTS lists [&], which has no section|"
    sort "$TMP/banners" | uniq -d | sed "s|.*|$h: section [&] appears twice|"
    grep -xFf "$TMP/contents" "$TMP/banners" >"$TMP/a"
    grep -xFf "$TMP/banners" "$TMP/contents" >"$TMP/b"
    cmp -s "$TMP/a" "$TMP/b" || {
        echo "$h: CONTENTS has another order than the sections; first difference:"
        paste "$TMP/a" "$TMP/b" | awk '$1 != $2 { print "    " $1 ", " $2; exit }'
    }
}

#------------------------------------------------------------------------------
# names
#------------------------------------------------------------------------------

check_names() {
    local cc=${CC:-cc}
    printf '#define IDIST_IMPLEMENTATION\n#include "idist.h"\n' >"$TMP/impl.c"
    printf '#include "idist.h"\n#include "idist_ring.h"\n' >"$TMP/api.c"
    "$cc" -O0 '-Doptimize(level)=' -I. -w -c "$TMP/impl.c" -o "$TMP/impl.o" ||
        { echo "idist.h does not compile"; return; }
    nm -g --defined-only "$TMP/impl.o" | awk 'NF == 3 { print $3 }' | sort -u >"$TMP/exported"
    grep -v '^idist_' "$TMP/exported" | sed 's/.*/exported: & does not start with idist_/'
    # IDIST_API marks each declaration that is meant for users. The name is the last one before the
    # first parenthesis.
    "$cc" -I. -E -P -DIDIST_API=idist_lint_mark "$TMP/api.c" | tr '\n' ' ' |
        sed 's/idist_lint_mark/\n&/g' |
        sed -n 's/^idist_lint_mark [^(;]*[ *]\([A-Za-z_0-9]*\)(.*/\1/p' | sort -u >"$TMP/declared"
    [ -s "$TMP/declared" ] || echo "no declaration with IDIST_API was found"
    comm -23 "$TMP/exported" "$TMP/declared" |
        sed 's/.*/exported: & is not declared with IDIST_API/'
    comm -13 "$TMP/exported" "$TMP/declared" | sed 's/.*/declared: & is not in the implementation/'
}

# Checks the macros that a user of the API sees, and every macro that the given headers define.
# Feature-test macros are allowed, too.
check_macros() {
    local cc=${CC:-cc}
    printf '#include <stdbool.h>\n#include <stddef.h>\n#include <stdint.h>\n' >"$TMP/base.c"
    printf '#include "idist.h"\n' >"$TMP/api.c"
    "$cc" -E -dM "$TMP/base.c" | awk '{ print $2 }' | sed 's/(.*//' | sort -u >"$TMP/before"
    "$cc" -I. -E -dM "$TMP/api.c" | awk '{ print $2 }' | sed 's/(.*//' | sort -u >"$TMP/after"
    comm -13 "$TMP/before" "$TMP/after" | grep -vE '^(IDIST_|idist_[a-z])' |
        sed 's/.*/the API defines the macro &/'
    grep -nE '^[[:space:]]*#[[:space:]]*define[[:space:]]' "$@" /dev/null |
        grep -vE 'define[[:space:]]+(IDIST_|idist_[a-z]|_[A-Z0-9_]+_SOURCE\b|_FILE_OFFSET_BITS\b)' |
        sed 's/$/ (does not start with IDIST_)/'
}

#------------------------------------------------------------------------------
# text, house, speech
#------------------------------------------------------------------------------

check_text() {
    local f
    for f in "${TEXTS[@]}"; do
        LC_ALL=C grep -nP '[^\x00-\x7f]' "$f" | sed "s|^\([0-9]*\):.*|$f:\1: not ASCII|"
        grep -nE '[[:space:]]+$' "$f" | sed "s|^\([0-9]*\):.*|$f:\1: white space at the end|"
        [ -z "$(tail -c 1 "$f")" ] || echo "$f: no newline at the end"
        case $f in
        Makefile | *.md) ;;
        *) grep -nP '\t' "$f" | sed "s|^\([0-9]*\):.*|$f:\1: a tab|" ;;
        esac
        # A row of a table in Markdown cannot be wrapped.
        awk -v max=$MAX_COLUMNS -v f="$f" '
            f ~ /\.md$/ && /^ *\|/ { next }
            length > max { printf "%s:%d: %d columns\n", f, FNR, length }' "$f"
    done
}

# Skips this script, which contains the words that it looks for.
check_speech() {
    local f
    for f in "${TEXTS[@]}"; do
        [ "$f" = tests/lint/lint.sh ] && continue
        grep -nE '/root/|/home/[a-z]|/(work|tmp)/[a-z]+/[a-z]+\.(c|h|md)' "$f" | sed "s|^|$f:|"
        grep -nwE 'FIXME|XXX' "$f" | sed "s|^|$f:|"
        grep -nw 'TODO' "$f" | grep -vE 'TODO\([A-Za-z]' |
            sed "s|^|$f:|; s|\$| (a TODO needs an owner)|"
    done
}

#------------------------------------------------------------------------------
# tools
#------------------------------------------------------------------------------

check_format() {
    local f
    for f in "${C_FILES[@]}"; do
        clang-format --dry-run -Werror "$f" >"$TMP/format" 2>&1 && continue
        echo "$f: $(grep -c 'error:' "$TMP/format") places differ from make format, first:"
        grep -m 1 'error:' "$TMP/format" | sed 's/^/    /'
    done
}

check_scripts() {
    local f
    for f in "${SCRIPTS[@]}"; do
        case $f in tests/lib/*_once.sh) ;; tests/lib/*) continue ;; esac # sourced, not run
        [ -x "$f" ] || echo "$f: not executable"
        head -n 1 "$f" | grep -q '^#!' || echo "$f: the first line names no interpreter"
    done
}

# The analyzer visits as many states of a function as its budget allows. The default is 225,000,
# which takes three minutes in all. This check visits half as many, unless IDIST_TEST_FULL=1.
check_tidy() {
    local budget=112500
    [ "${IDIST_TEST_FULL:-0}" = 1 ] && budget=225000
    printf '#define IDIST_IMPLEMENTATION\n#include "idist.h"\n' >"$TMP/tidy.c"
    cp .clang-tidy "$TMP/"
    timeout 900 clang-tidy --quiet "$TMP/tidy.c" -- -std=gnu11 -I"$PWD/src" \
        -Xclang -analyzer-opt-analyze-headers -Xclang -analyzer-config -Xclang \
        max-nodes=$budget >"$TMP/tidy.log" 2>"$TMP/tidy.err"
    local rc=$?
    grep -E 'warning:|error:' "$TMP/tidy.log" | sed "s|^$PWD/||"
    if [ $rc -ne 0 ] && ! grep -qE 'warning:|error:' "$TMP/tidy.log"; then
        echo "clang-tidy ended with $rc"
        tail -n 5 "$TMP/tidy.err"
    fi
}

for h in src/idist.h src/idist_train.h idist.hpp; do
    check_contents "$h" | report "$h: CONTENTS against the sections"
done
check_names | report "exported names"
check_macros "${SOURCES[@]}" idist.hpp | report "macros"
tests/lint/includes.py 2>&1 | report "includes in src/"
tests/lint/house.py 2>&1 | report "house rules"
tools/drop_ins.py --check 2>&1 | report "the drop-ins are not stale"
printf '%s\n' "${C_FILES[@]}" | grep -E '^(tests|examples)/.*\.[ch]$' |
    xargs tests/lint/house.py --only length 2>&1 |
    report "functions of tests and examples: length"
tests/lint/house.py --only decl,columns,length,nesting,branches,blank,statements,chain,parse \
    tools/idistrun/*.[ch] 2>&1 | report "house rules of the launcher"
tests/lint/house_test.py >"$TMP/house_test" 2>&1 || echo "exit status $?" >>"$TMP/house_test"
grep -vE '^(ok |1\.\.)' "$TMP/house_test" | report "house.py passes its own test"
check_text | report "text: ASCII, tabs, line ends, $MAX_COLUMNS columns"
check_speech | report "speech"
check_scripts | report "scripts can be run"
if command -v clang-format >/dev/null; then
    check_format | report "clang-format"
else
    skip "clang-format" "apt-get install clang-format"
fi
if command -v shellcheck >/dev/null; then
    shellcheck -x -f gcc "${SCRIPTS[@]}" | report "shellcheck"
else
    skip "shellcheck" "apt-get install shellcheck"
fi
if command -v clang-tidy >/dev/null; then
    check_tidy | report "clang-tidy"
else
    skip "clang-tidy" "apt-get install clang-tidy"
fi
echo "1..$N_RUN"
[ $N_FAILED -eq 0 ] || { echo "# $N_FAILED of $N_RUN checks found something" && exit 1; }
