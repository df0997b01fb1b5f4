#!/usr/bin/env bash
# from_mpi.sh - checks that from_mpi.c contains every statement in the tables of docs/from-mpi.md,
# and does what the page says with 1 to 4 ranks. (readme.sh tests the programs of the page.)
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"

PAGE=docs/from-mpi.md
squeeze() { tr -s ' \n' '  '; }
# Every span of code in a table that ends with a semicolon is a statement.
# shellcheck disable=SC2016 # backticks of Markdown
grep '^|' $PAGE | grep -oE '`[^`]+;`' | tr -d '`' >"$WORK/statements"
squeeze <tests/docs/from_mpi.c >"$WORK/program"
while IFS= read -r statement; do
    grep -qF -- "$(squeeze <<<"$statement" | sed 's/ $//')" "$WORK/program" || echo "$statement"
done <"$WORK/statements" >"$WORK/missing"
n=$(wc -l <"$WORK/statements")
ok "$(wc -l <"$WORK/missing")" "each of the $n statements of $PAGE is one of from_mpi.c" ||
    diag <"$WORK/missing"
ok $((n < 50)) "$PAGE has statements"

ok_run 0 "the implementation is there" 200 make -s build/tests/idist.o
ok_run 0 "from_mpi.c: no warning" 60 cc -Wall -Wextra -Wconversion -Werror -D_GNU_SOURCE -I. \
    tests/docs/from_mpi.c build/tests/idist.o -o "$WORK/from_mpi" -pthread
for n in 1 2 3 4; do
    ok_run 0 "from_mpi.c: $n ranks" 60 "$WORK/from_mpi" $n "$WORK/file.$n"
    [ "$(grep -c ': fine$' "$WORK/log")" = $n ]
    ok $? "from_mpi.c: $n ranks get to the end" || diag <"$WORK/log"
done
done_testing
