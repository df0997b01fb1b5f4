#!/usr/bin/env bash
# compile_once.sh COMPILER ARGUMENT... - a compiler for tests that compiles each source once for
# several builds (compile_once in tap.sh). Two compilations are the same if the compiler, the
# options, and the preprocessed text are the same. Options that only affect the preprocessor or the
# messages do not count. An object whose header came from -I also serves builds that use -isystem,
# which hides warnings. The script keeps only objects that compiled without messages, in
# build/package. If one command builds a program from one source, the script compiles the source
# first and then links it.
set -u
compiler=$1
shift
args=("$@") compile=() key=("$compiler $("$compiler" -dumpfullversion)")
source='' output='' system='' compiled=() linked=()
while [ $# -gt 0 ]; do
    case $1 in
    -o)
        output=$2
        shift
        ;;
    -c) ;;
    -isystem | -I | -MT | -MF | -MQ | -include)
        [ "$1" != -isystem ] || system=system
        compile+=("$1" "$2")
        shift
        ;;
    *)
        compile+=("$1")
        case $1 in
        *.c | *.cpp) source=$1 ;;
        -isystem*) system=system ;;
        -I* | -D* | -U* | -M* | -pipe | -Winvalid-pch | -fdiagnostics-*) ;;
        *) key+=("$1") ;;
        esac
        ;;
    esac
    shift
done
{ [ -n "$source" ] && [ -n "$output" ]; } || exec "$compiler" "${args[@]}"
case " ${args[*]} " in
*" -c "*) ;;
*" -E "* | *" -S "* | *" -M"* | *" -x "* | *" -shared "* | *".o "* | *".a "*)
    exec "$compiler" "${args[@]}"
    ;;
*)
    object=$(mktemp --suffix .o) || exit
    for argument in "${args[@]}"; do
        case $argument in
        "$source") linked+=("$object") compiled+=("$source") ;;
        "$output") linked+=("$output") compiled+=("$object") ;;
        *) linked+=("$argument") compiled+=("$argument") ;;
        esac
    done
    "$0" "$compiler" "${compiled[@]}" -c && "$compiler" "${linked[@]}"
    status=$?
    rm -f "$object"
    exit $status
    ;;
esac

folder=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)/build/package
mkdir -p "$folder"
text=$(set -o pipefail && "$compiler" "${compile[@]}" -E -P 2>/dev/null | sha256sum) ||
    exec "$compiler" "${args[@]}"
id=$({ echo "$text" && printf '%s\n' "${key[@]}" | sort -u; } | sha256sum | cut -c1-40)
exec 9>"$folder/$id.lock"
flock 9
for object in "$folder/$id.o" ${system:+"$folder/$id.$system.o"}; do
    if [ -e "$object" ]; then
        cp "$object" "$output"
        exit
    fi
done
"$compiler" "${args[@]}" >"$folder/$id.log" 2>&1 9>&-
status=$?
cat "$folder/$id.log" >&2
[ $status != 0 ] || [ -s "$folder/$id.log" ] ||
    { cp "$output" "$folder/$id.new" && mv "$folder/$id.new" "$object"; }
rm -f "$folder/$id.log"
exit $status
