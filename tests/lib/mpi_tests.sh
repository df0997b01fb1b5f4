# mpi_tests.sh LIBRARY - runs the distributed tests and the examples over one MPI, started by its
# own mpirun
#
# Open MPI 4 and MPICH 4 run every test, with one case in six of the grid. The other libraries
# run, with 3 ranks, the tests that depend on how a library waits, matches, and ends.
# IDIST_TEST_FULL=1 makes all libraries run all tests. TESTS and RANKS select the tests and the
# numbers of ranks.
# shellcheck shell=bash
# shellcheck source=tests/lib/tap.sh
. "$(dirname "${BASH_SOURCE[0]}")/tap.sh"
# shellcheck source=tests/lib/mpi.sh
. tests/lib/mpi.sh
LIBRARY=$1
missing=$(mpi_missing "$LIBRARY")
if [ -n "$missing" ]; then
    echo "1..0 # skipped: $missing"
    exit 0
fi
# All ranks use the same random numbers. The bodies of the tests run in their quick mode.
export IDIST_TEST_SEED=${IDIST_TEST_SEED:-$RANDOM} IDIST_TEST_QUICK=${IDIST_TEST_QUICK:-1} \
    IDIST_LOG=error
export I_MPI_CBWR=1 # otherwise Intel MPI gives different bits in every run
OUT=build/mpi/$LIBRARY
mkdir -p "$OUT"

# compile OUTPUT SOURCE... [OPTIONS]: compiles with the compiler of the library if a source is
# newer.
LOG=$WORK/log
compile() {
    local output=$1 source newer=1
    shift
    [ -e "$output" ] || newer=0
    for source in "$@" idist*.h; do [ -f "$source" ] && [ "$source" -nt "$output" ] && newer=0; done
    [ $newer = 1 ] && return 0
    mpi_cc "$LIBRARY" -std=gnu11 -O1 -g -Wall -Wextra -I. -Itests/lib "$@" -o "$output" >"$LOG" \
        2>&1 &&
        ! grep -q warning "$LOG"
}
# Runs compile in the background. A caller that needs the output calls compile again, which repeats
# a build that failed.
AHEAD=()
ahead() {
    { LOG=$OUT/ahead.log compile "$@" || rm -f "$1"; } &
    AHEAD+=($!)
}

# With more ranks than cores, MPICH's own collectives take milliseconds per call.
case $LIBRARY in
mpich4) most=2 ;;
mpich5) most=3 ;;
*) most=5 ;;
esac
whole=1
case ${IDIST_TEST_FULL:-0}-$LIBRARY in
1-* | *-openmpi4 | *-mpich4) \
    TESTS=${TESTS:-"all_reduce reduce broadcast barrier all_gather gather scatter reduce_scatter
    all_to_all scan v_forms dtypes ops p2p cancel bytes group_calls requests groups plans stress
    mismatch late abort"} ;;
*)
    whole=0 most=3
    TESTS=${TESTS:-"all_reduce ops dtypes p2p cancel requests stress mismatch late abort"} ;;
esac
[ "${IDIST_TEST_FULL:-0}" = 1 ] || export IDIST_TEST_THIN=${IDIST_TEST_THIN:-6}
RANKS=${RANKS:-$most}
[ -n "${ONLY_LIFE:-}" ] && TESTS=

SMALL=("${NOT_OPTIMIZED[@]}")
SMALL+=(-DIDIST_IMPLEMENTATION -DIDIST__MPI_COUNT=1000 -include idist_mpi.h -x c -c idist.h)
[ $whole = 0 ] || ahead "$OUT/idist_small.o" "${SMALL[@]}"
objects=
for test in $TESTS; do objects="$objects build/mpi/$test.o"; done
ABI=$OUT/digits_abi
if [ "$LIBRARY" = impi ] && [ -z "$(mpi_missing mpich5)" ]; then
    later abi 150 "$MPI_PEERS/mpich5/bin/mpicc_abi" -O1 -DIDIST_IMPLEMENTATION -include \
        idist_mpi.h examples/apps/digits/main.c -o "$ABI"
fi
# shellcheck disable=SC2086 # a list
[ -z "$objects" ] || make -s --no-print-directory -j2 $objects >/dev/null 2>&1 &
AHEAD+=($!)
# Objects that all programs link with.
compile "$OUT/idist.o" "${NOT_OPTIMIZED[@]}" -DIDIST_IMPLEMENTATION -include idist_mpi.h -x c -c \
    idist_train.h &&
    compile "$OUT/ranks.o" -c tests/lib/ranks_mpi.c
rc=$?
wait "${AHEAD[@]}" # does not wait for `later` jobs, whose status is read later
ok $rc "$LIBRARY: idist_mpi.h compiles without a warning" || { head -n 20 "$WORK/log" |
    diag; done_testing; }

for std in c99 c11 c++11; do
    language=c
    [ $std = c++11 ] && language=c++
    mpi_cc "$LIBRARY" -x $language -std=$std -Wall -Wextra -Wpedantic -Wshadow -Wconversion \
        -Werror -fsyntax-only -I. \
        -DIDIST_IMPLEMENTATION -DOMPI_SKIP_MPICXX -DMPICH_SKIP_MPICXX -include idist_mpi.h \
        /dev/null >"$WORK/log" 2>&1
    ok $? "$LIBRARY: idist_mpi.h is clean as $std" || head -n 20 "$WORK/log" | diag
done

# passes NAME SECONDS RANKS COMMAND...: turns each TAP line of rank 0 into a TAP line of this test.
passes() {
    local name=$1 seconds=$2 n=$3 rc=0 line count=0
    shift 3
    mpi_run_command "$LIBRARY" "$n"
    timeout -k 5 "$seconds" "${MPI_RUN[@]}" "$@" >"$WORK/out" 2>"$WORK/err" </dev/null || rc=$?
    while IFS= read -r line; do
        case $line in
        "ok "*"# SKIP"*) skip "$name: ${line#ok * - }" "${line#*# SKIP }" && count=$((count + 1)) ;;
        "ok "*) ok 0 "$name: ${line#ok * - }" && count=$((count + 1)) ;;
        "not ok "*) ok 1 "$name: ${line#not ok * - }" || count=$((count + 1)) ;;
        "#"*) echo "$line" ;;
        esac
    done <"$WORK/out"
    [ $rc -eq 0 ] && [ $count -gt 0 ]
    ok $? "$name with $n ranks: ends well" && return 0
    [ $rc -eq 124 ] && echo "hang: no end after $seconds s" | diag
    echo "exit status $rc" | diag
    tail -n 12 "$WORK/err" | diag
    return 1
}

for test in $TESTS; do
    make -s --no-print-directory "build/mpi/$test.o" >"$WORK/log" 2>&1 &&
        compile "$OUT/$test" "build/mpi/$test.o" "$OUT/idist.o" "$OUT/ranks.o" -lpthread
    ok $? "$test: builds" || { head -n 20 "$WORK/log" | diag; continue; }
    # idist can be sure that two different calls never match only if just one thread may call it. So
    # the ranks of this test call MPI_Init.
    case $test in mismatch) export RANKS_MPI_SINGLE=1 ;; *) unset RANKS_MPI_SINGLE ;; esac
    for n in $RANKS; do passes "$test" 100 "$n" "$OUT/$test"; done
done
unset RANKS_MPI_SINGLE

#------------------------------------------------------------------------------
# the owner of MPI, the choice of the backend, and errors
#------------------------------------------------------------------------------

compile "$OUT/life" tests/mpi/life.c "$OUT/idist.o" -lpthread
ok $? "life: builds" || { head -n 20 "$WORK/log" | diag; done_testing; }
for mode in nothing single threads given unfit again early early_threads settings makers stopped \
    idle; do
    passes "$mode" 60 3 "$OUT/life" $mode
done
IDIST_BACKEND=ring passes "IDIST_BACKEND=ring" 60 3 "$OUT/life" ring
IDIST_CHECK=0 passes "IDIST_CHECK=0" 60 3 "$OUT/life" nothing

# Rank 1 never makes its call, or fails. The other ranks must end, and mpirun must end with them.
mpi_run_command "$LIBRARY" 3
for mode in stuck fails; do
    timeout -k 5 30 "${MPI_RUN[@]}" "$OUT/life" $mode >"$WORK/log" 2>&1 </dev/null
    grep -q "^ok - $mode" "$WORK/log"
    ok $? "$mode: the others name the rank that does not come, and end" ||
        tail -n 12 "$WORK/log" | diag
done

# A rank is killed. The launcher must end the job.
timeout -k 5 15 "${MPI_RUN[@]}" "$OUT/life" dies >"$WORK/log" 2>&1 </dev/null
rc=$?
[ $rc -ne 0 ] && [ $rc -ne 124 ] && grep -q begun "$WORK/log"
ok $? "dies: the launcher ends the job (status $rc)" || tail -n 12 "$WORK/log" | diag
pgrep -f "^$OUT/life dies" >/dev/null
ok $((!$?)) "dies: no process is left"

if [ "$LIBRARY" = openmpi5 ]; then
    for turn in 1 2 3; do
        MPI_OPTIONS="--with-ft ulfm" mpi_run_command openmpi5 3
        timeout -k 5 60 "${MPI_RUN[@]}" "$OUT/life" ulfm >"$WORK/log" 2>&1 </dev/null
        grep -q '^ok - ulfm' "$WORK/log"
        ok $? "ulfm: survivors learn who is lost, shrink, and go on ($turn)" ||
            tail -n 12 "$WORK/log" | diag
        grep '^# ' "$WORK/log"
    done
    MPI_OPTIONS="--with-ft ulfm" mpi_run_command openmpi5 5
    timeout -k 5 60 "${MPI_RUN[@]}" "$OUT/life" ulfm_groups >"$WORK/log" 2>&1 </dev/null
    grep -q '^ok - ulfm_groups' "$WORK/log"
    ok $? "ulfm_groups: without the dead ranks, groups go on and make others" ||
        tail -n 12 "$WORK/log" | diag
fi

# A program of one library runs under the mpirun of another library.
case $LIBRARY in openmpi*) other=mpich4 ;; *) other=openmpi4 ;; esac
if [ "$LIBRARY" = mpich5 ]; then
    skip "wrong: under the mpirun of $other" \
        "MPICH 5 ends the process by itself there, and says why"
elif [ -z "$(mpi_missing $other)" ]; then
    mpi_run_command $other 3
    IDIST_LOG=error timeout -k 5 60 "${MPI_RUN[@]}" "$OUT/life" wrong >"$WORK/log" 2>&1 </dev/null
    grep -q "linked with" "$WORK/log" && grep -q '^ok - wrong' "$WORK/log"
    ok $? "wrong: under the mpirun of $other the error names launcher and library" ||
        tail -n 12 "$WORK/log" | diag
fi

#------------------------------------------------------------------------------
# counts above MPI's limit, which these builds set to 1000
#------------------------------------------------------------------------------

for test in all_reduce reduce_scatter all_to_all v_forms scatter; do
    [[ $whole = 1 && " $TESTS " == *[[:space:]]"$test"[[:space:]]* ]] || continue
    compile "$OUT/idist_small.o" "${SMALL[@]}" &&
        compile "$OUT/${test}_small" "build/mpi/$test.o" "$OUT/idist_small.o" "$OUT/ranks.o" \
            -lpthread &&
        passes "$test, counts above MPI's" 100 3 "$OUT/${test}_small"
done

#------------------------------------------------------------------------------
# the examples, unchanged
#------------------------------------------------------------------------------

for example in 01_hello 02_collectives 03_send_recv 04_ring_allreduce 06_adopt_mpi; do
    n=3
    [ $example = 06_adopt_mpi ] && n=4
    compile "$OUT/$example" -include idist_mpi.h examples/$example.c "$OUT/idist.o" -lpthread
    ok $? "$example: builds without a change" || { head -n 20 "$WORK/log" | diag; continue; }
    mpi_run_command "$LIBRARY" $n
    timeout -k 5 60 "${MPI_RUN[@]}" "$OUT/$example" >"$WORK/out" 2>"$WORK/err" </dev/null
    rc=$?
    awk '/^\/\/ expected output/ { inside = 1; next }
         inside && !/^\/\/    / { exit }
         inside { print substr($0, 7) }' \
        examples/$example.c | sed "s/host box/host $(hostname)/" |
        sed "s/backend ring, launcher spawn/backend mpi, launcher mpirun/" | sort >"$WORK/expected"
    sed "s/launcher [a-z0-9]*/launcher mpirun/" "$WORK/out" | sort |
        diff "$WORK/expected" - >"$WORK/diff" && [ $rc -eq 0 ]
    ok $? "$example: prints what its head says with $n ranks" ||
        { diag <"$WORK/diff"; tail -n 5 "$WORK/err" | diag; }
done
# Without idist_mpi.h, mpirun starts ranks that use the ring.
make -s --no-print-directory build/01_hello build/digits
mpi_run_command "$LIBRARY" 3
timeout -k 5 60 "${MPI_RUN[@]}" build/01_hello >"$WORK/out" 2>"$WORK/err" </dev/null &&
    [ "$(grep -c "of 3: local rank . of 3, node 0 of 1, .*backend ring" "$WORK/out")" = 3 ]
ok $? "01_hello: without idist_mpi.h, the ring" || tail -n 5 "$WORK/out" "$WORK/err" | diag

# Trains digits. The losses must follow the curve of one rank alone, built and started without MPI.
compile "$OUT/digits" -D_GNU_SOURCE -include idist_mpi.h examples/apps/digits/main.c \
    "$OUT/idist.o" -lpthread
ok $? "digits: builds without a change" || { head -n 20 "$WORK/log" | diag; done_testing; }
losses() { sed -n 's/.*epoch  *\([0-9]*\)\/.*loss  *\([0-9.eE+-]*\).*/\1 \2/p' "$1"; }
build/digits --ranks 1 --epochs 2 --seed 7 >"$WORK/out" 2>&1
losses "$WORK/out" >"$WORK/reference"

trains() { # NAME COMMAND...
    local name=$1
    shift
    timeout -k 5 120 "$@" --epochs 2 --seed 7 >"$WORK/out" 2>"$WORK/err" </dev/null
    losses "$WORK/out" >"$WORK/curve"
    paste "$WORK/reference" "$WORK/curve" | awk '
        { d = $2 - $4; if (d < 0) d = -d; if (NF != 4 || d > 1e-4 * $2 + 2e-6) bad = 1 }
        END { exit bad || NR != 2 }' &&
        grep -q 'backend mpi' "$WORK/out" && grep -q 'checksum 0x.* on all 3 ranks' "$WORK/out"
    ok $? "$name: trains to the loss curve of one rank alone, with equal checksums" ||
        tail -n 12 "$WORK/out" "$WORK/err" | diag
}
case $LIBRARY in
mpich4) skip "digits" \
    "with more ranks than cores each of its 2000 collectives takes MPICH 4 milliseconds" ;;
*)
    mpi_run_command "$LIBRARY" 3
    trains "digits" "${MPI_RUN[@]}" "$OUT/digits" ;;
esac

# One binary for the standard ABI of MPI 5.0. It is built by MPICH 5 and runs there. With
# LD_LIBRARY_PATH alone, it also runs under Intel MPI.
if [ "$LIBRARY" = impi ] && [ -z "$(mpi_missing mpich5)" ]; then
    ok_later abi "ABI: digits builds by mpicc_abi" || done_testing
    for library in mpich5 impi; do
        mpi_run_command $library 3
        ldd=$(LD_LIBRARY_PATH=$MPI_PEERS/$library/lib ldd "$ABI" | grep libmpi_abi)
        [[ $ldd == *"$MPI_PEERS/$library/lib"* ]]
        ok $? "ABI: the same binary finds the library of $library" || echo "$ldd" | diag
        trains "ABI: digits under $library" "${MPI_RUN[@]}" "$ABI"
    done
fi
done_testing
