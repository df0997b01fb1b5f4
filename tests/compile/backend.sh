#!/usr/bin/env bash
# backend.sh - a backend that is no part of the library (backend.c), written against the contract in
# idist_core.h: it compiles without a warning, as C by both compilers, and carries a world.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"

flags=(-std=gnu11 -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror -I. -Itests/lib)
if command -v clang >/dev/null; then
    later clang 100 clang "${flags[@]}" -fsyntax-only tests/compile/backend.c
fi
later cc 200 cc "${flags[@]}" -O0 tests/compile/backend.c -o "$WORK/backend"
if command -v clang >/dev/null; then ok_later clang clang; else skip clang "no clang"; fi
export IDIST_LOG=error
ok_later cc cc && ok_run 0 "it carries a world" 100 "$WORK/backend"
done_testing
