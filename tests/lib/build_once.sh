#!/usr/bin/env bash
# build_once.sh OUTPUT COMMAND... - runs `COMMAND... -o OUTPUT` unless another test has already run
# the same command since a source last changed. Tests that need the same object at the same time
# wait for one compiler. OUTPUT is either complete or missing. The script prints the compiler's
# messages each time.
set -u
output=$1
shift
mkdir -p "$(dirname "$output")"
exec 9>"$output.lock"
flock 9

fresh() {
    local source
    [ -e "$output" ] && [ "$(cat "$output.command")" = "$*" ] || return 1
    for source in idist*.h tests/lib/*.h tests/fake/* tests/gpu/*; do
        [ "$output" -nt "$source" ] || return 1
    done
}

fresh "$@" || {
    rm -f "$output"
    echo "$*" >"$output.command"
    # The output gets the time when the build began, so that it is older than a source that changes
    # during the build.
    : >"$output.begin"
    "$@" -o "$output.new" >"$output.log" 2>&1 9>&- || {
        cat "$output.log"
        exit 1
    }
    touch -r "$output.begin" "$output.new"
    mv "$output.new" "$output"
}
cat "$output.log"
