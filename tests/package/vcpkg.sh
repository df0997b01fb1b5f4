#!/usr/bin/env bash
# vcpkg.sh - tests the port for vcpkg. vcpkg itself is not available here, so a stand-in,
# vcpkg.cmake, defines its functions. The port's files are installed as vcpkg would install them,
# and a project finds them. The port must have the version and the names of idist.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
# shellcheck source=tests/lib/package.sh
. tests/lib/package.sh

command -v cmake >/dev/null || {
    echo "1..0 # SKIP no cmake: apt-get install cmake"
    exit 0
}
PORT=packaging/vcpkg/ports/idist # in the clone
PACKAGE=$WORK/packages/idist
ok_run 0 "the commands of portfile.cmake, on a stand-in for vcpkg" 60 cmake \
    -D PORT_FOLDER="$SOURCE/$PORT" -D PACKAGE="$PACKAGE" -P tests/package/vcpkg.cmake
grep -q "^-- version $VERSION\$" "$WORK/log"
ok $? "of the version $VERSION, which vcpkg.json gives" || grep version "$WORK/log" | diag
ok_headers "$PACKAGE/include" "the port"
cmp -s LICENSE "$PACKAGE/share/idist/copyright" && cmp -s "$PORT/usage" "$PACKAGE/share/idist/usage"
ok $? "copyright and usage"
# vcpkg would complain about folders that are empty, or that belong to no configuration.
(cd "$PACKAGE" && find . -type d ! -path ./include | sort) >"$WORK/folders"
printf '%s\n' . ./share ./share/idist ./share/pkgconfig | diff - "$WORK/folders" >"$WORK/log"
ok $? "and no other folder" || diag <"$WORK/log"

# The lines of the file usage find the package after it was moved.
mv "$WORK/packages" "$WORK/installed"
sed -n 's/^    \([a-z].*\)/\1/p' "$PORT/usage" | sed 's/(main /(app /' >"$WORK/usage.cmake"
for language in c:C cxx:CXX; do
    ext=${language%:*}
    cmake_app "$ext" "$WORK/usage.cmake" "${language#*:}" \
        "main.${ext/xx/pp};implementation.${ext/xx/pp}" \
        -DCMAKE_PREFIX_PATH="$WORK/installed/idist"
done
for ext in c cxx; do ok_app $ext "usage, only $ext"; done
done_testing
