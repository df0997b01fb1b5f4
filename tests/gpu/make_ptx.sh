#!/usr/bin/env bash
# make_ptx.sh - makes the text of the GPU kernels in src/gpu/ipc/ptx.h, from reduce.cu and pack.cu
#
#   tests/gpu/make_ptx.sh            prints the text, as C
#   tests/gpu/make_ptx.sh --write    writes the text to ptx.h
#   tests/gpu/make_ptx.sh --check    exits with 0 if ptx.h has the text, and with 1 if not; exits
#                                    with 77 if nvcc is absent, or is not the one that made the text
#
# nvcc generates PTX in its own version of the language, for the oldest GPU that it supports. The
# kernels need neither such a new version nor such a new GPU. The script therefore lowers them to a
# version that drivers since CUDA 10.1 read, for GPUs since 2016. It then shortens the text, which
# is part of a header.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
header=src/gpu/ipc/ptx.h
begin='// Made by tests/gpu/make_ptx.sh with nvcc'
end='// End of what tests/gpu/make_ptx.sh made.'
nvcc=${NVCC:-$(command -v nvcc || echo "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc")}

die() { # STATUS TEXT
    echo "make_ptx.sh: $2" >&2
    exit "$1"
}

# Reads nvcc's output from stdin, and writes the C text to stdout.
# shellcheck disable=SC2016 # Perl's variables
pack='
    undef $/;
    $_ = <STDIN>;
    s{//.*}{}g;
    s{^\s*\.(file|loc)\b.*}{}mg;
    s{^\.version .*}{.version 6.4}m && s{^\.target .*}{.target sm_60}m or die "this is no PTX\n";
    die "a kernel uses local memory\n" if /\.local|__local_depot/;
    die "a sum or product that ptxas may fuse\n"
        if /\b(add|sub|mul)(\.ftz)?\.f(32|64)|\b(mad|fma)\.\w+\.f/;

    # Shortens names. The names of registers, parameters and labels are local to a kernel.
    my %short = (p => "p", f => "f", r => "r", rd => "d", fd => "g", rs => "h");
    s{%(p|fd?|r[ds]?)(\d+|<)}{$short{$1}$2}g;
    s{\$L__BB\d+_(\d+)}{L$1}g;
    s{\b\w+_param_0\b}{a}g;
    s{\s+}{ }g;
    s{ ?([,;:(){}<>\[\]]) ?}{$1}g;

    # Replaces a branch around a single instruction with a predicate.
    s{\bbra\.uni}{bra}g;
    my @parts = split /(?=\.visible)/;
    for (@parts) {
        1 while s{\@p(\d+) bra (L\d+);([a-z][^;\@]*;)\2:}{\@!p$1 $3$2:};
        my %used = map { $_ => 1 } /bra (L\d+);/g;
        s{\b(L\d+):}{$used{$1} ? "$1:" : ""}ge;
    }
    $_ = join "", @parts;

    s{^ ?(\.version \S+) (\.target \S+) (\.address_size 64) ?}{$1\n$2\n$3\n}
        or die "another head than expected\n";
    s{"}{\\"}g;
    s{\n}{\\n}g;
    print "// clang-format off\nstatic const char *const idist__ptx[] IDIST__UNUSED = {\n";
    my @lines = /(.{1,91}(?<=[;,:{}> ])|.{1,91}$)/g;
    die "lost some of it\n" if join("", @lines) ne $_;
    print join(",\n", map { "    \"$_\"" } @lines), "};\n// clang-format on\n";
'

[ -x "$nvcc" ] || die 77 "no nvcc (NVCC or CUDA_HOME says where)"
version=$("$nvcc" --version | sed -n 's/.*, V\([0-9.]*\).*/\1/p')
made_by=$(sed -n "s|^$begin \(.*\)\.\$|\1|p" $header)
[ -n "$made_by" ] && grep -qxF "$end" $header || [ $# -eq 0 ] ||
    die 1 "$header lacks the lines \"$begin ...\" and \"$end\""
[ "${1:-}" != --check ] || [ "$made_by" = "$version" ] ||
    die 77 "$header has the text of nvcc $made_by, this is $version"

work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
"$nvcc" -ptx -arch=compute_75 -fmad=false tests/gpu/pack.cu -o "$work/ptx" ||
    die 1 "nvcc cannot compile pack.cu"
{ echo "$begin $version." && perl -e "$pack" <"$work/ptx" && echo "$end"; } >"$work/section" ||
    die 1 "cannot pack the PTX"
first=${begin//\//\\/} last=${end//\//\\/}
sed -e "/^$first /,/^$last\$/{/^$last\$/r $work/section" -e 'd}' $header >"$work/header"
case ${1:-} in
"") cat "$work/section" ;;
--write) cat "$work/header" >$header ;;
--check) diff -u $header "$work/header" ||
    die 1 "$header has another text: tests/gpu/make_ptx.sh --write" ;;
*) die 1 "what is $1?" ;;
esac
