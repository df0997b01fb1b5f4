#!/usr/bin/env bash
# cmake.sh - tests projects that use idist through CMake: by a folder, FetchContent, find_package
# and the components. Other projects export a library that uses idist, or have idist twice. Also
# tests what find_package must refuse, and pkg-config after make install and cmake --install.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
# shellcheck source=tests/lib/package.sh
. tests/lib/package.sh
# shellcheck source=tests/lib/mpi.sh
. tests/lib/mpi.sh

command -v cmake >/dev/null || {
    echo "1..0 # SKIP no cmake: apt-get install cmake"
    exit 0
}

# Installs idist, and then moves the installation, which may contain no path of the first place.
PREFIX=$WORK/prefix
readme_block install.sh | sed "s|~/.local|$WORK/first|" >"$WORK/install.sh"
ok_run 0 "docs/install.md: cmake --install" 100 sh -ec "cd '$SOURCE' && . '$WORK/install.sh'"
! grep -q Warning "$WORK/log"
ok $? "without a warning" || diag <"$WORK/log"
rm -rf "$SOURCE/build"
mv "$WORK/first" "$PREFIX"
! grep -rlE "$WORK|$ROOT" "$PREFIX" >"$WORK/log"
ok $? "and without a path of this machine" || diag <"$WORK/log"
ok_headers "$PREFIX/include" "cmake --install"
cmp -s LICENSE "$PREFIX/share/licenses/idist/LICENSE"
ok $? "and LICENSE"
find=(-DCMAKE_PREFIX_PATH="$PREFIX" -DCMAKE_FIND_USE_PACKAGE_REGISTRY=OFF)

snippet() { # FILE: saves stdin as a snippet
    cat >"$WORK/$1"
    [ -s "$WORK/$1" ] || echo "message(FATAL_ERROR \"docs/install.md has no $1\")" >"$WORK/$1"
}
for name in folder fetch package mpi; do readme_block $name.cmake | snippet $name.cmake; done
# configured ID [OPTION...]: configures a C project in the background, with stdin as its snippet.
configured() {
    snippet "$1.cmake"
    later "$1" 60 cmake -S "$PROJECT" -B "$WORK/build-$1" -DSNIPPET="$WORK/$1.cmake" \
        -DLANGUAGES=C "${find[@]}" "${@:2}"
}
# A folder, in a project of only C and in one of only C++.
ln -s "$SOURCE" "$PROJECT/idist"
cmake_app folder-c "$WORK/folder.cmake" C "main.c;implementation.c"
cmake_app folder-cxx "$WORK/folder.cmake" CXX "main.cpp;implementation.cpp"

# Uses the lines of docs/install.md. The project requires the exact version from find_package.
cmake_app fetch "$WORK/fetch.cmake" "C;CXX" "main.cpp;implementation.c"
{
    echo "find_package(idist $VERSION EXACT CONFIG REQUIRED)"
    cat "$WORK/package.cmake"
} | snippet exact.cmake
cmake_app package "$WORK/exact.cmake" C "main.c;implementation.c" "${find[@]}"

# Two parts of a project have their own clones of idist, and the project also finds an installed
# idist. The project must install idist once.
mkdir "$PROJECT/one" "$PROJECT/two"
ln -s "$SOURCE" "$PROJECT/one/idist"
ln -s "$SOURCE" "$PROJECT/two/idist"
grep -v '^target' "$WORK/folder.cmake" >"$PROJECT/one/CMakeLists.txt"
grep -v '^target' "$WORK/fetch.cmake" >"$PROJECT/two/CMakeLists.txt"
snippet twice.cmake <<<'set(IDIST_INSTALL ON)
add_subdirectory(one)
add_subdirectory(two)
find_package(idist CONFIG REQUIRED)
target_link_libraries(app PRIVATE idist::idist)'
cmake_app twice "$WORK/twice.cmake" C "main.c;implementation.c" "${find[@]}"

# A project uses an installed idist, and a part of it has a clone of another version.
mkdir "$PROJECT/other"
cp -r "$SOURCE" "$PROJECT/other/idist"
sed -i "/define IDIST_VERSION /s/$VERSION/9.8.7/" "$PROJECT/other/idist/idist.h"
grep -v '^target' "$WORK/folder.cmake" >"$PROJECT/other/CMakeLists.txt"
configured other <<<'find_package(idist CONFIG REQUIRED)
add_subdirectory(other)
target_link_libraries(app PRIVATE idist::idist)'

# A library that uses idist exports itself. Projects use the library's build tree, its installation
# with idist installed elsewhere, and its installation together with idist.
generator=()
command -v ninja >/dev/null && generator=(-G Ninja)
cp -r tests/package/exporting "$WORK/"
cp "$PROJECT/implementation.c" "$WORK/exporting/"
ln -s "$SOURCE" "$WORK/exporting/idist"
exporting() { # NAME FOLDER [OPTION...]: builds the library and installs it in FOLDER
    # shellcheck disable=SC2016 # the inner shell expands it
    ok_run 0 "$1" 150 bash -ec 'cmake -S "$0" -B "$1" "${@:3}"
        cmake --build "$1"
        cmake --install "$1" --prefix "$2"' "$WORK/exporting" "$WORK/exported" "${@:2}"
}
exporting "install(EXPORT) of a library that uses idist" "$WORK/only lib" "${generator[@]}"
[ ! -e "$WORK/only lib/include" ]
ok $? "it installs no idist"
exporting "with IDIST_INSTALL" "$WORK/lib & all" -DIDIST_INSTALL=ON
ok_headers "$WORK/lib & all/include" "with IDIST_INSTALL"
snippet lib.cmake <<<'find_package(lib CONFIG REQUIRED)
target_link_libraries(app PRIVATE lib::lib)'
cmake_app build-tree "$WORK/lib.cmake" C main.c -Dlib_DIR="$WORK/exported" \
    -Didist_DIR="$WORK/exported/idist"
cmake_app lib "$WORK/lib.cmake" C main.c "-DCMAKE_PREFIX_PATH=$WORK/only lib;$PREFIX"
cmake_app lib-all "$WORK/lib.cmake" C main.c "-DCMAKE_PREFIX_PATH=$WORK/lib & all"

# The component mpi, in C++ in a project that also has C, where its target is MPI::MPI_C, and in C.
# The component nccl needs no GPU to build or to run. Without a GPU, the program uses only host
# memory.
openmpi=$(mpi_missing openmpi4)
if [ -z "$openmpi" ]; then
    mpi_run_command openmpi4 2
    RUN=${MPI_RUN[*]} cmake_app openmpi "$WORK/mpi.cmake" "C;CXX" "main.c;implementation.cpp" \
        "${find[@]}" -DCMAKE_CXX_FLAGS=-DWITH_MPI -DMPI_C_COMPILER=mpicc.openmpi
fi
mpich=$(mpi_missing mpich4)
if [ -z "$mpich" ]; then
    mpi_run_command mpich4 2
    snippet folder-mpi.cmake <<<'set(IDIST_COMPONENTS mpi)
add_subdirectory(idist)
target_link_libraries(app PRIVATE idist::mpi)'
    RUN=${MPI_RUN[*]} cmake_app mpich "$WORK/folder-mpi.cmake" C "main.c;implementation.c" \
        -DCMAKE_C_FLAGS=-DWITH_MPI -DMPI_C_COMPILER=mpicc.mpich
    configured cxx -DLANGUAGES=CXX -DSOURCES=main.cpp -DMPI_CXX_COMPILER=mpicxx.mpich \
        <"$WORK/mpi.cmake"
fi
cuda=
for folder in "${CUDA_HOME:-}" /usr/local/cuda; do
    [ -n "$cuda" ] || [ ! -x "$folder/bin/nvcc" ] || [ ! -e "$folder/lib64/libcudart.so" ] ||
        cuda=$folder
done
snippet nccl.cmake <<<'find_package(idist CONFIG REQUIRED COMPONENTS nccl)
target_link_libraries(app PRIVATE idist::nccl)'
[ -z "$cuda" ] ||
    cmake_app nccl "$WORK/nccl.cmake" "C;CXX" "main.c;implementation.cpp" "${find[@]}" \
        -DCMAKE_CXX_FLAGS=-DWITH_NCCL -DCUDAToolkit_ROOT="$cuda"

# Versions and components that find_package must refuse, and an optional component.
minor=${VERSION%.*}
configured next <<<"find_package(idist ${minor%.*}.$((${minor#*.} + 1)) CONFIG REQUIRED)"
configured patch <<<"find_package(idist $minor.99 CONFIG REQUIRED)"
configured older <<<"find_package(idist ${minor%.*}.$((${minor#*.} - 1)) CONFIG REQUIRED)"
configured range <<<"find_package(idist ${minor%.*}.1...<$minor CONFIG REQUIRED)"
configured in-range <<<"find_package(idist ${minor%.*}.1...$VERSION CONFIG REQUIRED)"
configured unknown <<<"find_package(idist CONFIG REQUIRED COMPONENTS tcp)"
configured no-mpi -DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON <"$WORK/mpi.cmake"
configured no-cuda -DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON <"$WORK/nccl.cmake"
# shellcheck disable=SC2016 # CMake expands it
configured optional -DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON <<<'
find_package(idist CONFIG REQUIRED OPTIONAL_COMPONENTS mpi)
if(idist_mpi_FOUND OR TARGET idist::mpi OR NOT TARGET idist::idist)
    message(FATAL_ERROR "idist_mpi_FOUND is ${idist_mpi_FOUND}")
endif()'

# Runs the pkg-config line of docs/install.md on the program of README.md, after make install. Also
# checks the output of pkg-config after cmake --install.
ok_run 0 "make install" 100 make -s install PREFIX="$WORK/made"
cat >"$WORK/pkg_config.sh" <<END
set -e
cd "$WORK"
$(readme_block pkg_config.sh | sed 's/^cc /cc -O3 -Wall -Wextra -Werror /')
./app 4
export PKG_CONFIG_PATH="$PREFIX/share/pkgconfig"
c++ -Wall -Wextra -Werror \$(pkg-config --cflags idist) -c "$PROJECT/main.cpp" -o main.o
pkg-config --modversion idist
END
readme_block app.c >"$WORK/app.c"
! command -v pkg-config >/dev/null ||
    later pkg-config 100 env PKG_CONFIG_PATH="$WORK/made/share/pkgconfig" sh "$WORK/pkg_config.sh"

for language in c cxx; do
    ok_app folder-$language "add_subdirectory, only $language"
done
ok_app fetch "FetchContent"
ok_app twice "idist in two parts of a project"
ok_run 0 "and installed" 60 cmake --install "$WORK/build-twice" --prefix "$WORK/twice"
ok_headers "$WORK/twice/include" "idist in two parts of a project"
! grep -q "is not used" "$WORK/twice.later"
ok $? "without a word on versions" || diag <"$WORK/twice.later"
ok_later other "idist in two versions"
tr -s '\n ' '  ' <"$WORK/other.later" |
    grep -q "idist 9.8.7 in .*other/idist is not used: the project already has idist $VERSION"
ok $? "warns of the second one" || diag <"$WORK/other.later"
ok_runs build-tree "the build tree of a library that uses idist"
ok_runs lib "an installed library that uses idist"
ok_runs lib-all "a library and idist installed together"
ok_app package "find_package of the exact version"
if [ -z "$openmpi" ]; then
    ok_app openmpi "find_package, component mpi, Open MPI, C++" mpi
else
    skip "component mpi, Open MPI" "$openmpi"
fi
if [ -z "$mpich" ]; then
    ok_app mpich "add_subdirectory, component mpi, MPICH, C" mpi
    ok_later cxx "find_package, component mpi, only cxx"
else
    skip "component mpi, MPICH" "$mpich"
fi
if [ -n "$cuda" ]; then
    ok_app nccl "find_package, component nccl"
else
    skip "component nccl" "no CUDA toolkit (CUDA_HOME says where)"
fi
version="is compatible with requested version"
ok_refused next "the next minor version is refused" "$version"
ok_refused patch "a later patch is refused" "$version"
ok_refused older "an earlier minor version is refused" "$version"
cmake=$(cmake --version | awk 'NR == 1 { print $3 }')
if [ "$(printf '%s\n' 3.19 "$cmake" | sort -V | head -n 1)" = 3.19 ]; then # supports ranges
    ok_refused range "a range that ends before this version is refused" "$version"
    ok_later in-range "a range that includes this version"
fi
ok_refused unknown "an unknown component is refused" "component tcp: idist has the components"
ok_refused no-mpi "the component mpi is refused without MPI" "component mpi: no MPI was found"
ok_refused no-cuda "the component nccl is refused without CUDA" "component nccl: no CUDA toolkit"
ok_later optional "an optional component may be missing"
if command -v pkg-config >/dev/null; then
    ok_later pkg-config "pkg-config after make install, and after cmake --install"
    n=$(grep -cE "^rank [0-3] of 4: 10 8\$|^$VERSION\$" "$WORK/log")
    ok $((n != 5)) "four ranks, and the version" || diag <"$WORK/log"
else
    skip "pkg-config" "no pkg-config"
fi
done_testing
