#!/usr/bin/env bash
# meson.sh - tests projects that use idist through Meson: as a subproject, in C and in C++, and as
# an installed package.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
# shellcheck source=tests/lib/package.sh
. tests/lib/package.sh

for tool in meson ninja pkg-config; do
    command -v $tool >/dev/null || {
        echo "1..0 # SKIP no $tool: apt-get install meson ninja-build pkg-config"
        exit 0
    }
done

PREFIX="$WORK/pre & fix"
ok_run 0 "meson setup" 60 meson setup --prefix "$PREFIX" "$WORK/build" "$SOURCE"
ok_run 0 "meson install" 60 meson install -C "$WORK/build"
ok_headers "$PREFIX/include" "meson install"
cmp -s LICENSE "$PREFIX/share/licenses/idist/LICENSE"
ok $? "and LICENSE"

# meson_app ID LANGUAGES SOURCES [OPTION...]: sets up, builds and runs a project in the background,
# with the line of docs/install.md.
meson_app() {
    local id=$1 languages=$2 sources=$3 folder=$WORK/project-$1
    shift 3
    cp -r "$PROJECT" "$folder"
    mkdir "$folder/subprojects"
    ln -s "$SOURCE" "$folder/subprojects/idist"
    sed "s/LANGUAGES/$languages/; s/SOURCES/$sources/; /^SNIPPET/d" tests/package/meson.build \
        >"$folder/meson.build"
    readme_block app.meson >>"$folder/meson.build"
    # shellcheck disable=SC2016 # the inner shell expands it
    later "$id" 150 bash -ec 'cd "$0"
        meson setup build "$@"
        meson compile -C build --verbose
        build/app' "$folder" "$@"
}
CXX=/bin/false meson_app folder-c "'c'" "'main.c', 'implementation.c'"
CC=/bin/false meson_app folder-cxx "'cpp'" "'main.cpp', 'implementation.cpp'"
meson_app installed "'c', 'cpp'" "'main.c', 'implementation.cpp'" \
    --pkg-config-path "$PREFIX/share/pkgconfig" --wrap-mode nofallback
for id in folder-c folder-cxx; do
    ok_app $id "subprojects/idist, only ${id#*-}"
    grep -qE "^Dependency idist .*found: YES $VERSION( |\$)" "$WORK/$id.later"
    ok $? "from that folder" || diag <"$WORK/$id.later"
done
ok_app installed "an installed idist"
grep -q "^Run-time dependency idist found: YES $VERSION\$" "$WORK/installed.later"
ok $? "from pkg-config" || diag <"$WORK/installed.later"
done_testing
