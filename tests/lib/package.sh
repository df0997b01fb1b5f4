# package.sh - small projects outside the clone that use idist through a package manager. Source it
# after tap.sh. The projects come from tests/package, with the lines that docs/install.md gives.
# shellcheck shell=bash

VERSION=$(sed -n 's/^#define IDIST_VERSION "\(.*\)"/\1/p' idist.h)
PROJECT=$WORK/project
SOURCE="$WORK/clone & more" # a copy of the clone
mkdir "$PROJECT" "$SOURCE"
cp tests/package/*.c tests/package/*.cpp tests/package/CMakeLists.txt "$PROJECT/"
compile_once # applies to the compilers that the builds find
cp -r CMakeLists.txt meson.build Makefile idist.pc.in idist*.h* LICENSE packaging tools \
    "$SOURCE/"

# Tests must not reach the network, so every connection through a proxy fails immediately.
export http_proxy=http://127.0.0.1:9 https_proxy=http://127.0.0.1:9 all_proxy=http://127.0.0.1:9

# readme_block FILE: prints the block of README.md or docs/install.md that follows the line
# <!-- test: file FILE -->.
readme_block() {
    awk -v mark="<!-- test: file $1 -->" '
        /^```/ && inside { exit }
        inside { print }
        /^```/ && marked { inside = 1 }
        $0 == mark { marked = 1 }' README.md docs/install.md
}

# cmake_app ID SNIPPET LANGUAGES SOURCES [OPTION...]: configures, builds, and runs a project in the
# background. If the program should not spawn its ranks, RUN is the command that starts the program.
RUN=
cmake_app() {
    local id=$1 snippet=$2 languages=$3 sources=$4
    shift 4
    # shellcheck disable=SC2016 # the inner shell expands it
    later "$id" 150 bash -ec 'run=$0 build=$1
        cmake -B "$build" "${@:2}"
        cmake --build "$build" --verbose
        $run "$build/app" ${run:+launched}' "$RUN" "$WORK/build-$id" -S "$PROJECT" \
        -DSNIPPET="$snippet" -DLANGUAGES="$languages" -DSOURCES="$sources" "$@"
}
# ok_runs ID NAME [BACKEND]: checks that the project was built, and that both ranks had the sum.
ok_runs() {
    local n
    ok_later "$1" "$2: builds and runs" || return
    n=$(grep -c "^rank [01] of 2 over ${3:-ring}: 3, idist $VERSION\$" "$WORK/log")
    ok $((n != 2)) "$2: two ranks over ${3:-ring}" || tail -n 5 "$WORK/log" | diag
}
# ok_app ID NAME [BACKEND]: checks the same as ok_runs, and that the strict options were used.
ok_app() {
    ok_runs "$@" && ok_strict "$1" "$2"
}
ok_refused() { # ID NAME EXPECTED: checks that configuring failed with the text EXPECTED
    until [ -e "$WORK/$1.status" ]; do sleep 0.05; done
    [ "$(cat "$WORK/$1.status")" = 1 ] && tr -s '\n ' '  ' <"$WORK/$1.later" | grep -qF -- "$3"
    ok $? "$2" || diag <"$WORK/$1.later"
}
# Checks that the strict options reached the compiler.
ok_strict() { # ID NAME
    local option
    for option in -Wall -Wextra -Werror; do
        grep -E ' -c\b.*(implementation|test)\.c' "$WORK/$1.later" | grep -qw -- $option ||
            echo "no $option"
    done >"$WORK/log"
    ok "$(wc -l <"$WORK/log")" "$2: with -Wall -Wextra -Werror" || diag <"$WORK/log"
}
# Checks that the headers in FOLDER are equal to those in the clone.
ok_headers() { # FOLDER NAME
    diff <(cd "$1" 2>/dev/null && sha256sum idist*.h*) <(sha256sum idist*.h*) >"$WORK/log" 2>&1
    ok $? "$2: installs every header" || diag <"$WORK/log"
}
