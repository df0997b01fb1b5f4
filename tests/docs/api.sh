#!/usr/bin/env bash
# api.sh - tests make docs. It prints no warning, every declaration appears with its comment, and
# every link is right. Each function has a man page of its own name.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"

for tool in doxygen linkchecker man python3; do
    command -v $tool >/dev/null || {
        echo "1..0 # SKIP no $tool: apt-get install doxygen linkchecker man-db python3"
        exit 0
    }
done

touch "$WORK/the" # make must not treat the folder name as two names
chmod a+rx "$WORK" # linkchecker switches to another user if it runs as root
ok_run 0 "make docs" 60 make -s docs DOCS="$WORK/the docs"
[ -f "$WORK/the" ]
ok $? "which removes no other file"
! grep -iE 'warning|error' "$WORK/log" >"$WORK/warnings"
ok $? "without a warning" || diag <"$WORK/warnings"

mapfile -t headers < <(grep -l '^IDIST_API' idist*.h)
n=$(cat "${headers[@]}" | grep -c '^IDIST_API')
python3 tests/docs/api.py "$WORK/the docs" "${headers[@]}" >"$WORK/findings" 2>"$WORK/summary"
ok $? "the pages can be read" || diag <"$WORK/summary"
grep -q "^$n functions, [1-9][0-9]* lines of comments, [1-9][0-9]* links" "$WORK/summary"
ok $? "all of the $n functions are looked for" || diag <"$WORK/summary"
for what in lost code function name link troff; do
    grep "^$what: " "$WORK/findings" >"$WORK/log"
    case $what in
    lost) name="no comment of a header is lost" ;;
    code) name="what is in backticks is code" ;;
    function) name="each function has an anchor, its declaration, a description and a man page" ;;
    name) name="no man page can hide one of the system" ;;
    link) name="links within the pages" ;;
    troff) name="the formatter accepts the man pages" ;;
    esac
    ok "$(wc -l <"$WORK/log")" "$name" || head -n 20 "$WORK/log" | diag
done
ok_run 0 "links to files" 100 linkchecker --no-status "$WORK/the docs/html/index.html"

MANPAGER="cat" ok_run 0 "man" 20 man -M "$WORK/the docs/man" idist_all_reduce
grep -q "^ *idist_all_reduce - recv" "$WORK/log" && grep -q "^ *idist_api_coll(3)," "$WORK/log"
ok $? "shows a page about the function, which names its group" || diag <"$WORK/log"
done_testing
