#!/usr/bin/env bash
# hpp.sh - compiles idist.hpp for every C++ standard with every compiler, without a warning. Tests
# it in a program of several files, with the implementation in C or C++. Checks the code that
# idist.hpp must refuse, with the text of the error.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"

command -v g++ >/dev/null || {
    echo "1..0 # SKIP no g++: apt-get install g++"
    exit 0
}
warn="-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wold-style-cast -Wnon-virtual-dtor
    -Woverloaded-virtual -Wzero-as-null-pointer-constant -Werror"
standards="c++11 c++17 c++20"
[ "${IDIST_TEST_FULL:-0}" = 1 ] && standards="$standards c++14 c++2b"
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)

ok_run 0 "the implementation, in C" 100 gcc "${NOT_OPTIMIZED[@]}" -DIDIST_IMPLEMENTATION -x c \
    -c idist.h -o "$WORK/idist.o"

# ---- each C++, each compiler ----

for compiler in g++ clang++; do
    command -v $compiler >/dev/null || continue
    for std in $standards; do
        # shellcheck disable=SC2086 # a list
        later "$compiler-$std" 60 $compiler -std=$std $warn -I. -c tests/compile/hpp.cpp \
            -o "$WORK/$compiler-$std.o"
    done
done
for compiler in g++ clang++; do
    command -v $compiler >/dev/null || {
        skip "$compiler" "$compiler is not installed"
        continue
    }
    # The other file uses the oldest standard, so that a type that differs between standards fails.
    # shellcheck disable=SC2086
    ok_run 0 "$compiler: another file of the program" 60 $compiler -std=c++11 $warn -DUSER -I. \
        -c tests/compile/hpp.cpp -o "$WORK/$compiler-user.o"
    for std in $standards; do
        ok_later "$compiler-$std" "$compiler -std=$std: no warning" || continue
        ok_run 0 "$compiler -std=$std: links with the other file" 30 $compiler \
            "$WORK/$compiler-$std.o" "$WORK/$compiler-user.o" "$WORK/idist.o" -o "$WORK/program" \
            -pthread &&
            ok_run 0 "$compiler -std=$std: runs" 60 "$WORK/program"
    done
done

# ---- arrangements ----

printf '%s\n' '#define IDIST_IMPLEMENTATION' '#include "idist.hpp"' '#include "idist.hpp"' \
    'int other_file();' 'int other_file() { return 3; }' >"$WORK/impl.cpp"
printf '%s\n' '#include "idist.hpp"' '#define IDIST_IMPLEMENTATION' '#include "idist.h"' \
    'int other_file();' 'int other_file() { return 3; }' >"$WORK/after.cpp"
for name in impl after; do
    ok_run 0 "$name.cpp: idist.hpp with the implementation" 100 g++ -std=c++11 \
        "${NOT_OPTIMIZED[@]}" -Wall -Wextra -Werror -I. -c "$WORK/$name.cpp" -o "$WORK/$name.o" &&
        ok_run 0 "$name.cpp: links" 30 g++ "$WORK/g++-c++17.o" "$WORK/$name.o" \
            -o "$WORK/program" -pthread && ok_run 0 "$name.cpp: runs" 60 "$WORK/program"
done
ok_run 0 "-fno-rtti" 60 g++ -std=c++17 -fno-rtti -Wall -Wextra -Werror -I. -fsyntax-only \
    tests/compile/hpp.cpp
if [ -x "$nvcc" ]; then
    cp tests/compile/hpp.cpp "$WORK/hpp.cu"
    ok_run 0 "nvcc" 100 "$nvcc" -std=c++17 -Werror all-warnings -Xcompiler -Wall,-Wextra -I. \
        -c "$WORK/hpp.cu" -o "$WORK/nvcc.o" &&
        ok_run 0 "nvcc: links" 60 "$nvcc" "$WORK/nvcc.o" "$WORK/g++-user.o" "$WORK/idist.o" \
            -o "$WORK/program" && ok_run 0 "nvcc: runs" 60 "$WORK/program"
else
    skip "nvcc" "nvcc is not installed"
fi

# ---- the program in the head of idist.hpp ----

awk '/^A COMPLETE PROGRAM/ { inside = 1; next } /^    c\+\+ app.cpp/ { exit }
     inside { print substr($0, 9) }' idist.hpp >"$WORK/app.cpp"
ok_run 0 "the program in the head of idist.hpp: no warning" 100 g++ -std=c++11 \
    "${NOT_OPTIMIZED[@]}" -Wall -Wextra -Werror -I. "$WORK/app.cpp" -o "$WORK/app" -pthread &&
    ok_run 0 "the program: runs" 30 "$WORK/app"
[ "$(grep -c '^rank [0-3]: 8 4$' "$WORK/log")" = 4 ]
ok $? "the program: prints what the head says" || diag <"$WORK/log"

# ---- code that is refused ----

refuses() { # NAME TEXT CODE [FLAG...]: CODE becomes the body of a function
    local name=$1 text=$2 code=$3 compiler
    shift 3
    printf '%s\n' '#include "idist.hpp"' 'struct thing { int x; };' 'void f(float *p);' \
        'void f(float *p) {' '    std::vector<float> x(3), y(3);' '    std::vector<int> ints(3);' \
        '    const std::vector<float> constant(3);' '    idist::request r;' "    $code" \
        '    (void)p;' '}' >"$WORK/refused.cpp"
    for compiler in g++ clang++; do
        command -v $compiler >/dev/null || continue
        ! $compiler -std=c++17 "$@" -I. -fsyntax-only "$WORK/refused.cpp" >"$WORK/log" 2>&1 &&
            grep -q -- "$text" "$WORK/log"
        ok $? "$compiler: refuses $name" || head -n 20 "$WORK/log" | diag
    done
}
refuses "-fno-exceptions" "with -fno-exceptions include idist.h" "" -fno-exceptions
mkdir "$WORK/older"
cp idist.hpp "$WORK/older"
sed 's/^\(#define IDIST_VERSION_MINOR\) .*/\1 1/' idist.h >"$WORK/older/idist.h"
refuses "an idist.h of another version" "copy both from one release" "" -I"$WORK/older"
refuses "elements without a dtype" "this type has no dtype" \
    "std::vector<thing> t; idist::all_reduce(t, idist::sum);"
refuses "a value without a dtype" "this type has no dtype" "(void)idist::broadcast(thing(), 0);"
refuses "vector<bool>" "this type has no dtype" \
    "(void)idist::broadcast(std::vector<bool>(), 0);"
refuses "elements that are not plain" "this type has no dtype" \
    "std::vector<std::string> t; idist::broadcast(t, 0);"
refuses "a const receive buffer" "its elements are const" \
    "idist::all_reduce(x, constant, idist::sum);"
refuses "a temporary receive buffer" "it is a temporary" \
    "idist::all_reduce(x, std::vector<float>(3), idist::sum);"
refuses "buffers of two types" "have different types" "idist::all_reduce(x, ints, idist::sum);"
refuses "an op of another type" "no matching function" \
    "idist::op<int> op([](int a, int b) { return a + b; }); idist::all_reduce(x, op);"
refuses "a pointer without a count" "no matching function" "idist::all_reduce(p, idist::sum);"
refuses "counts of int" "no matching function" "idist::all_gatherv(x, y, ints);"
refuses "a rank as options" "deleted function" "idist::all_gather(x, y, 0);"
refuses "copies of a request" "deleted" "idist::request copy = r; (void)copy;"
refuses "a result that is ignored" "nodiscard" "idist::all_reduce(1, idist::sum);" \
    -Wunused-result -Werror
done_testing
