#!/usr/bin/env bash
# unity.sh - tests the headers among other code. In a program of one file, other headers may have
# defined short words as macros, and none of idist's private macros may reach the code that follows.
# The headers must compile without the warnings that C++ projects enable. make install must be
# complete.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"

include=(-I.)
headers="idist.h idist_ring.h idist_train.h idist_xla.h"
for at in /usr/lib/*-linux-gnu/openmpi/include /usr/include/*-linux-gnu/mpich; do
    [ -e "$at/mpi.h" ] || continue
    headers="$headers idist_mpi.h"
    include+=(-isystem "$at")
    break
done
if [ -e build/cuda/12.9/installed ]; then
    headers="$headers idist_nccl.h"
    include+=(-isystem build/cuda/12.9/include)
fi

# Macros of windows.h and of careless headers. The headers of MPI and CUDA come first, because they
# may use such words.
words="near far small lock min max interface hyper pascal cdecl IN OUT OPTIONAL CONST ERROR DELETE"
{
    case $headers in *idist_mpi.h*) echo '#include <mpi.h>' ;; esac
    case $headers in *idist_nccl.h*) echo '#include <cuda_runtime_api.h>' ;; esac
    for word in $words; do echo "#define $word idist uses $word"; done
} >"$WORK/words.h"
for header in $headers; do
    # The macros must be defined again afterwards.
    {
        echo '#include "words.h"'
        echo '#define IDIST_IMPLEMENTATION'
        echo "#include \"$header\""
        for word in $words; do printf '#ifndef %s\n#error "%s is no macro any more"\n#endif\n' \
            "$word" "$word"; done
    } >"$WORK/${header%.h}_amid.c"
    cp "$WORK/${header%.h}_amid.c" "$WORK/${header%.h}_amid.cpp"
done

compile() { # compile ID COMPILER FLAGS...
    local id=$1
    shift
    later "$id" 100 "$@" "${include[@]}" -I"$WORK" -fsyntax-only
}
languages="gcc:gnu11:c clang++:c++17:cpp"
for entry in $languages; do
    IFS=: read -r compiler std ext <<<"$entry"
    command -v "$compiler" >/dev/null || continue
    for header in $headers; do compile "$compiler-$header" "$compiler" -std="$std" -w \
        "$WORK/${header%.h}_amid.$ext"; done
done

# Includes all headers in two orders. No private macro may be defined afterwards.
{
    echo '#define IDIST_IMPLEMENTATION'
    for header in $headers; do echo "#include \"$header\""; done
} >"$WORK/all.cpp"
{
    echo '#define IDIST_IMPLEMENTATION'
    for header in $(tr ' ' '\n' <<<"$headers" | sort -r); do echo "#include \"$header\""; done
} >"$WORK/reverse.cpp"
strict="-Wold-style-cast -Wzero-as-null-pointer-constant -Wall -Wextra -Wpedantic -Wshadow \
    -Wconversion -Werror"
for compiler in g++ clang++; do
    command -v $compiler >/dev/null || continue
    useless=$([ $compiler = g++ ] && echo -Wuseless-cast)
    # shellcheck disable=SC2086 # lists
    compile "strict-$compiler" $compiler -std=c++17 $strict $useless "$WORK/all.cpp"
    # shellcheck disable=SC2086
    compile "reverse-$compiler" $compiler -std=c++11 $strict $useless "$WORK/reverse.cpp"
done

for entry in $languages; do
    IFS=: read -r compiler std ext <<<"$entry"
    for header in $headers; do
        if command -v "$compiler" >/dev/null; then
            ok_later "$compiler-$header" "$compiler -std=$std: $header amid macros of short words"
        else
            skip "$compiler -std=$std: $header amid macros of short words" \
                "$compiler is not installed"
        fi
    done
done
for compiler in g++ clang++; do
    command -v $compiler >/dev/null || {
        skip "$compiler" "$compiler is not installed"
        continue
    }
    ok_later "strict-$compiler" \
        "$compiler -Wold-style-cast -Wzero-as-null-pointer-constant ...: no warning"
    ok_later "reverse-$compiler" "$compiler: headers in the reverse order"
done

# Uses C99, because otherwise libc itself defines F_OFD_*. In C++ libc always does.
for source in all.cpp reverse.cpp; do
    for language in "c -std=c99" "c++ -std=c++11"; do
        # shellcheck disable=SC2086 # a list
        cc -x $language "${include[@]}" -E -dM "$WORK/$source" >"$WORK/macros" 2>"$WORK/log"
        ok $? "$source as ${language%% *}: preprocesses" || diag <"$WORK/log"
        private='IDIST__'
        [ "${language%% *}" = c ] && private='(IDIST__|F_OFD_)'
        grep -E "define $private" "$WORK/macros" >"$WORK/left"
        ok $(($(wc -l <"$WORK/left") != 0)) "$source as ${language%% *}: no private macro is left" \
            || diag <"$WORK/left"
    done
done

compile_once
# CC may be another compiler, for example a cross compiler. make install also installs the license.
printf '#!/bin/sh\necho "$@" >>"%s/cc.log"\nexec cc "$@"\n' "$WORK" >"$WORK/other-cc"
chmod +x "$WORK/other-cc"
# A folder's name may have a space. Unquoted, this name would be two words, the first one a file.
INTO=(DESTDIR="$WORK/dest here" PREFIX=/opt/idist\ 0)
touch "$WORK/dest"
ok_run 0 "make install" 100 make -s install "${INTO[@]}" CC="$WORK/other-cc"
grep -q idistrun "$WORK/cc.log" 2>/dev/null
ok $? "which builds idistrun with CC"
cmp -s LICENSE "$WORK/dest here/opt/idist 0/share/licenses/idist/LICENSE"
ok $? "and installs LICENSE"
ok_run 0 "make uninstall" 20 make -s uninstall "${INTO[@]}"
[ -z "$(find "$WORK/dest here" -type f)" ] && [ -e "$WORK/dest" ]
ok $? "leaves no file, and removes no other"
done_testing
