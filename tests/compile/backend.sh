#!/usr/bin/env bash
# backend.sh - tests a backend outside the library (backend.c), written against the contract in
# src/core/model.h. It must compile as C without a warning with both compilers, and run a world.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"

flags=(-std=gnu11 -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror -I. -Itests/lib)
if command -v clang >/dev/null; then
    later clang 100 clang "${flags[@]}" -fsyntax-only tests/compile/backend.c
fi
later cc 200 cc "${flags[@]}" "${NOT_OPTIMIZED[@]}" tests/compile/backend.c -o "$WORK/backend"
if command -v clang >/dev/null; then ok_later clang clang; else skip clang "no clang"; fi
export IDIST_LOG=error
ok_later cc cc && ok_run 0 "it carries a world" 100 "$WORK/backend"

# In a static library only the program's calls pull the backends in, and a linker that drops unused
# sections must keep the backends.
printf '#define IDIST_IMPLEMENTATION\n#include "idist.h"\n' >"$WORK/library.c"
cat >"$WORK/main.c" <<'END'
#include "idist.h"
#include <stdio.h>
int main(void) {
    puts(idist_available_backends());
    return 0;
}
END
in_archive() { # FLAGS...
    cc "$@" -I. -c "$WORK/library.c" -o "$WORK/library.o" &&
        rm -f "$WORK/library.a" && ar rc "$WORK/library.a" "$WORK/library.o" &&
        cc "$@" -I. "$WORK/main.c" "$WORK/library.a" -lpthread -o "$WORK/main" &&
        [ "$("$WORK/main")" = ring,self ]
}
in_archive "${NOT_OPTIMIZED[@]}" -ffunction-sections -fdata-sections -Wl,--gc-sections
ok $? "the backends are in a static library, without unused sections"
in_archive -O1 "${NOT_OPTIMIZED[1]}" -flto
ok $? "the backends are in a static library, with link-time optimization"
done_testing
