#!/usr/bin/env bash
# notebook.sh - runs the cells of docs/notebook.md in real kernels, a C kernel and a Python kernel
# (make peers). notebook.py checks the output of the cells, and which processes and files are left
# after the kernel was interrupted, restarted, shut down or killed during a training.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"

PAGE=docs/notebook.md
JUPYTER=$ROOT/build/peers/jupyter
[ -e "$JUPYTER/installed" ] || {
    echo "1..0 # SKIP no Jupyter kernels: make peers"
    exit 0
}
command -v gcc >/dev/null || { # the C kernel calls gcc
    echo "1..0 # SKIP no gcc: apt-get install gcc"
    exit 0
}
export PATH=$JUPYTER/bin:$PATH
# The specification of the C kernel and the settings of IPython are in $WORK.
export JUPYTER_DATA_DIR=$WORK/jupyter IPYTHONDIR=$WORK/ipython

# Runs the lines of the page that prepare a folder, without the optimizer.
ln -s "$ROOT" "$WORK/idist"
sed -n '/^cp idist\//p; /^cc .* -o idist\.o$/p' $PAGE |
    sed "s/ -O2/ ${NOT_OPTIMIZED[0]} '${NOT_OPTIMIZED[1]}'/" >"$WORK/prepare.sh"
ok $(($(wc -l <"$WORK/prepare.sh") != 2)) "two lines prepare the folder" || diag <"$WORK/prepare.sh"
ok_run 0 "they run" 60 sh -ec "cd '$WORK' && . ./prepare.sh"

# As root, --user would install for all users.
user=(--user)
[ "$(id -u)" != 0 ] || user=()
ok_run 0 "install_c_kernel" 30 install_c_kernel "${user[@]}"

# Each part has a folder for its notebook and a folder for temporary files.
PARTS=("c stop" "python stop" "c cells" "python cells" "c kill" "python kill")
for part in "${PARTS[@]}"; do
    folder=$WORK/${part/ /.}
    mkdir "$folder" "$folder.tmp"
    ln -s "$WORK"/idist*.h "$WORK/idist.o" "$folder"
    # shellcheck disable=SC2086 # two words
    TMPDIR=$folder.tmp later "${part/ /.}" 60 python tests/docs/notebook.py $part $PAGE "$folder"
done
for part in "${PARTS[@]}"; do
    ok_later "${part/ /.}" "$part" && grep -q '^ok - ' "$WORK/log"
    ok $? "$part: has checks" || diag <"$WORK/log"
done
done_testing
