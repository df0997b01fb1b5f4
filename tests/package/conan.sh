#!/usr/bin/env bash
# conan.sh - runs Conan's own test of the recipe (conan create), which builds test_package as C and
# as C++. Also tests a project that finds the package and its component mpi through CMake.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
# shellcheck source=tests/lib/package.sh
. tests/lib/package.sh
# shellcheck source=tests/lib/mpi.sh
. tests/lib/mpi.sh

CONAN=$ROOT/build/peers/conan/bin/conan
[ -x "$CONAN" ] || CONAN=$(command -v conan)
[ -n "$CONAN" ] || {
    echo "1..0 # SKIP no conan: PyPI package conan (make peers)"
    exit 0
}
command -v cmake >/dev/null || {
    echo "1..0 # SKIP no cmake: apt-get install cmake"
    exit 0
}

export CONAN_HOME=$WORK/conan
ok_run 0 "conan profile detect" 60 "$CONAN" profile detect
ok_run 0 "without a remote" 60 "$CONAN" remote disable '*'
readme_block conan.sh | sed -n "s|^conan |'$CONAN' |p" >"$WORK/create.sh"
echo tools.compilation:verbosity=verbose >"$CONAN_HOME/global.conf"
ok_run 0 "docs/install.md: conan create" 150 sh -ec "cd '$SOURCE' && . '$WORK/create.sh'"
cp "$WORK/log" "$WORK/create.later"
ok_strict create "it builds"
for compiler in cc c++; do
    grep -q "/$compiler .* -c .*/test_package/test\.c" "$WORK/create.later"
    ok $? "with $compiler" || diag <"$WORK/create.later"
done
n=$(grep -c "^rank [01] of 2: 3, idist $VERSION\$" "$WORK/create.later")
ok $((n != 4)) "and runs: two ranks, twice" || diag <"$WORK/create.later"

package=$("$CONAN" cache path "idist/$VERSION:$(
    "$CONAN" list "idist/$VERSION:*" 2>/dev/null | grep -oE '\b[0-9a-f]{40}\b' | head -n 1
)" 2>"$WORK/log")
ok $? "conan cache path" || diag <"$WORK/log"
ok_headers "$package/include" "the package"
cmp -s LICENSE "$package/licenses/LICENSE"
ok $? "and LICENSE"

ok_run 0 "conan install" 60 "$CONAN" install --requires "idist/$VERSION" -g CMakeDeps \
    --output-folder "$WORK/found"
find=(-DCMAKE_PREFIX_PATH="$WORK/found" -DCMAKE_BUILD_TYPE=Release)
mpi=
[ -z "$(mpi_missing openmpi4)" ] && mpi=openmpi
[ -z "$(mpi_missing mpich4)" ] && mpi=mpich
readme_block mpi.cmake >"$WORK/mpi.cmake"
sed 's/ mpi)/ tcp)/' "$WORK/mpi.cmake" >"$WORK/tcp.cmake"
[ -z "$mpi" ] || cmake_app mpi "$WORK/mpi.cmake" C "main.c;implementation.c" "${find[@]}" \
    -DCMAKE_C_FLAGS=-DWITH_MPI -DMPI_C_COMPILER=mpicc.$mpi
cmake_app tcp "$WORK/tcp.cmake" C "main.c;implementation.c" "${find[@]}"
if [ -n "$mpi" ]; then
    ok_app mpi "find_package, component mpi"
else
    skip "find_package, component mpi" "no MPI"
fi
ok_refused tcp "an unknown component is refused" "component tcp: idist has the components"
done_testing
