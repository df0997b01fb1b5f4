#!/usr/bin/env bash
# install.sh - checks that make install, cmake --install and meson install install the same files
# with the same modes, whatever the umask and the names of the folders are. Also checks that CFLAGS
# and LDFLAGS reach idistrun, what pkg-config prints, and make uninstall.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
# shellcheck source=tests/lib/package.sh
. tests/lib/package.sh

# Only the owner can read the clone, and the user's new files are private.
chmod -R go= "$SOURCE"
umask 077
FOLDER="the & %1 | folder"
export CFLAGS=-DPASSED_ON=1 LDFLAGS=-Wl,-z,now

ok_run 0 "make install" 100 make -C "$SOURCE" install DESTDIR="$WORK/staged" PREFIX="/$FOLDER/make"
grep -q -- "$CFLAGS .*$LDFLAGS.*idistrun\.c" "$WORK/log"
ok $? "CFLAGS and LDFLAGS reach idistrun" || diag <"$WORK/log"
! grep -q -- -O "$WORK/log"
ok $? "without options of the clone" || diag <"$WORK/log"
mv "$WORK/staged/$FOLDER" "$WORK/$FOLDER"
present=(make)
if command -v cmake >/dev/null; then
    # shellcheck disable=SC2016 # the inner shell expands it
    ok_run 0 "cmake --install" 100 sh -ec 'cmake -S "$0" -B "$1" && cmake --build "$1"
        cmake --install "$1" --prefix "$2"' "$SOURCE" "$WORK/a & b" "$WORK/$FOLDER/cmake"
    present+=(cmake)
else
    skip "cmake --install" "no cmake: apt-get install cmake"
fi
if command -v meson >/dev/null && command -v ninja >/dev/null; then
    # shellcheck disable=SC2016 # the inner shell expands it
    ok_run 0 "meson install" 100 sh -ec 'meson setup --prefix "$2" "$1" "$0"
        meson install -C "$1"' "$SOURCE" "$WORK/c & d" "$WORK/$FOLDER/meson"
    present+=(meson)
else
    skip "meson install" "no meson: apt-get install meson ninja-build"
fi

# The files that each of the three must install.
{
    echo "d 755 bin"
    echo "f 755 bin/idistrun"
    printf 'd 755 %s\n' include share share/{cmake,cmake/idist,licenses,licenses/idist,pkgconfig}
    printf 'f 644 include/%s\n' idist*.h*
    printf 'f 644 share/cmake/idist/idist-%s.cmake\n' components config config-version
    printf 'f 644 share/%s\n' licenses/idist/LICENSE pkgconfig/idist.pc
} | sort >"$WORK/expected"
for by in "${present[@]}"; do
    find "$WORK/$FOLDER/$by" -mindepth 1 -printf '%y %m %P\n' | sort | diff "$WORK/expected" - \
        >"$WORK/log"
    ok $? "$by installs headers, idistrun, licence, packages, with their modes" || diag <"$WORK/log"
    ok_headers "$WORK/$FOLDER/$by/include" "$by"
    ok_run 0 "$by: idistrun" 20 "$WORK/$FOLDER/$by/bin/idistrun" -n 1 true
    readelf -d "$WORK/$FOLDER/$by/bin/idistrun" 2>&1 | grep -q NOW
    ok $? "$by: LDFLAGS reached it"
    diff -r -x idistrun "$WORK/$FOLDER/make" "$WORK/$FOLDER/$by" >"$WORK/log"
    ok $? "$by: the same contents" || diag <"$WORK/log"
done

# pkg-config must print options for the folder to which the files were moved.
readme_block app.c >"$WORK/app.c"
if command -v pkg-config >/dev/null; then
    for by in "${present[@]}"; do
        # shellcheck disable=SC2016 # the inner shell expands it
        PKG_CONFIG_PATH=$WORK/$FOLDER/$by/share/pkgconfig ok_run 0 "$by: pkg-config" 60 sh -ec '
            pkg-config --cflags idist
            eval "cc -fsyntax-only $(pkg-config --cflags idist) $1"' sh "$WORK/app.c"
    done
else
    skip "pkg-config" "no pkg-config: apt-get install pkg-config"
fi

# Existing folders keep their modes, but existing files do not. make uninstall leaves only folders.
mkdir -p "$WORK/it's/include"
touch "$WORK/it's/include/idist.h"
chmod 750 "$WORK/it's/include"
ok_run 0 "make install, to a folder that is there" 100 make -s install PREFIX="$WORK/it's"
[ "$(stat -c %a "$WORK/it's/include" "$WORK/it's/include/idist.h" | paste -sd' ')" = "750 644" ]
ok $? "which keeps its mode" || stat -c '%a %n' "$WORK/it's"/include{,/idist.h} | diag
ok_run 0 "make uninstall" 20 make -s uninstall PREFIX="$WORK/it's"
find "$WORK/it's" ! -type d >"$WORK/log"
ok "$(wc -l <"$WORK/log")" "which leaves no file" || diag <"$WORK/log"
done_testing
