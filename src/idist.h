/* idist.h - v0.2.0 - embeddable distributed computing - MIT licence

DO THIS

    In ONE C or C++ file:                          in all others, just:

        #define IDIST_IMPLEMENTATION                   #include "idist.h"
        #include "idist.h"

    In the file with IDIST_IMPLEMENTATION, include idist.h before the system headers. There is no
    library to link, no configure step and nothing to install: copy idist.h and idist_ring.h into
    your project. To copy exactly one file, take the idist.h that `make single` writes.

A COMPLETE PROGRAM

        #define IDIST_IMPLEMENTATION
        #include "idist.h"
        #include <stdio.h>

        static int work(int local_rank, void *arg) {
            float x[2] = {1.0f + (float)local_rank, 2.0f};
            (void)arg;
            if (idist_all_reduce(x, x, 2, IDIST_F32, IDIST_SUM, NULL) != IDIST_OK) {
                fprintf(stderr, "%s\n", idist_last_error());
                return 1;
            }
            printf("rank %d of %d: %g %g\n", idist_get_rank(), idist_get_world_size(), x[0], x[1]);
            return 0;
        }

        int main(void) {
            if (idist_spawn(work, NULL, 4, NULL) == IDIST_OK) return 0;
            fprintf(stderr, "%s\n", idist_last_error());
            return 1;
        }

    cc app.c -o app && ./app

        rank 2 of 4: 10 8        (four lines, in any order)

    Under a launcher, the same function runs between idist_initialize(NULL) and idist_finalize().
    idist_parallel_run(&desc, work, NULL) spawns workers if desc.nproc_per_node is set, and
    otherwise joins the launcher's world.

CONTENTS

    Search for the tags.

      [api:status]     status codes and error texts
      [api:types]      element types, reductions, options of a call
      [api:desc]       how a world starts
      [api:life]       initialize, finalize, and the getters
      [api:coll]       collectives
      [api:p2p]        send and receive, requests
      [api:group]      groups
      [api:op]         user-defined reductions and element types
      [api:spawn]      worker processes
      [api:memory]     buffers
      [api:store]      the key-value store for rendezvous
      [api:trace]      a timeline of a run
      [api:backend]    backends

    The implementation follows: the files of src/, in the order in which each uses only those before
    it. ARCHITECTURE.md shows how a call goes through them.

    Copy this file and idist_ring.h, which connects ranks. Where IDIST_IMPLEMENTATION is defined,
    this file includes idist_ring.h if it is in the same folder. Copy and include these yourself to
    use what they add:

      idist_mpi.h      the MPI backend
      idist_nccl.h     device memory through NCCL, CUDA IPC or pinned memory
      idist_train.h    data-parallel training: samplers, loaders, gradient averaging, metrics
      idist.hpp        this API for C++: exceptions, spans, owners of handles, lambdas as workers

WHAT IT IS

    Ranks, collectives, send and receive, barriers, groups, worker processes, rendezvous and
    data-parallel helpers in a header: what ignite.distributed, torch.distributed and Horovod give
    a Python program. The same source runs alone, spawns its own workers, or runs under a launcher
    that sets RANK and WORLD_SIZE. Ranks on one host communicate through shared memory, ranks on
    different hosts over TCP.

    It is not a task scheduler, a parameter server or a serialisation format: it moves arrays of
    numbers and bytes. It is not for the open internet: connections are authenticated, but nothing
    is encrypted. All ranks run the same build on machines of the same byte order.

BUILD AND LINK

    C99 or later, C++11 or later; gcc, clang, nvcc. Linux. Needs libc and pthread (with glibc before
    2.34: -lpthread).

        cc app.c                                    IDIST_IMPLEMENTATION defined in app.c
        cc -DIDIST_IMPLEMENTATION app.c             or on the command line, for one source file
        cc -c idist.c && ar rcs libidist.a idist.o  idist.c: the two lines of DO THIS

    Compile with optimisation: the reduction loops are in these headers. Under -std=c99 or -std=c11
    the system headers hide declarations that the implementation needs, unless idist.h comes first
    or _DEFAULT_SOURCE is defined; an #error says so.

OPTIONS

    macro                  where          effect
    IDIST_IMPLEMENTATION   one file       compiles the implementation there
    IDIST_NO_RING          one file       leaves out the ring backend, in the file that defines
                                          IDIST_IMPLEMENTATION; worlds of 1 and the backends of
                                          other headers remain
    IDIST_API              everywhere     decorates each declaration; default: extern

CONCEPTS

    A world is a set of ranks 0 .. n-1. Each rank is a process or, with idist_open, a thread.
    idist_initialize joins the default world, which is what NULL as a group stands for. A group is
    a subset of the ranks of a world in an order of its own. A rank passed to a call is a rank of
    the group that the call runs on; error texts and log lines name world ranks.

    All ranks of a group call a collective, in the same order and with matching arguments. A call
    blocks by default and returns at once with idist_opts.request. Without a launcher,
    idist_initialize makes a world of 1, in which every call works and returns the rank's own
    contribution. Before it, the getters answer as they would in such a world, and communication
    returns IDIST_ERR_STATE.

    Results are reproducible: the same input on the same number of ranks gives the same bits in
    every run, and the same bits on every rank that receives the result. The order of operands
    depends on sizes and ranks only. Another number of ranks, or another message size, may round
    differently. On x86 and 64-bit ARM numbers are reduced and converted, and user ops are called,
    in the floating-point mode that a program begins with, whatever mode the calling thread is in
    (flush-to-zero of a library built with -ffast-math, rounding, traps).

BACKENDS

    self   a world of 1. Always available.
    ring   any number of ranks; included by this header.
    mpi    the ranks of an MPI communicator; idist_mpi.h, which also says what MPI cannot give.

    gloo   an alias of ring, for programs that ask for torch.distributed's gloo.
    nccl   ring with the device backend nccl, as in Ignite; needs idist_nccl.h.

    idist_nccl.h adds device memory to any of them. A program has the backends whose headers it
    includes in the file that defines IDIST_IMPLEMENTATION, and those that it registers with
    idist_register_backend. desc.backend or IDIST_BACKEND chooses one by name; otherwise the first
    that accepts the configuration is used: the one registered last, ..., mpi, ring, self.

LAUNCHING

    Rank and size come from the first of these that is set:

        desc.rank and desc.world_size
        IDIST_RANK, IDIST_WORLD_SIZE
        RANK, WORLD_SIZE                          torchrun, or your own loop
        JOB_COMPLETION_INDEX, WORLD_SIZE          indexed jobs of Kubernetes
        HOROVOD_RANK, HOROVOD_SIZE
        OMPI_COMM_WORLD_RANK, _SIZE               Open MPI
        MV2_COMM_WORLD_RANK, _SIZE                MVAPICH2
        JSM_NAMESPACE_RANK, _SIZE                 jsrun
        PALS_RANKID, PMI_SIZE
        FLUX_TASK_RANK, FLUX_JOB_SIZE
        PMI_RANK, PMI_SIZE                        MPICH, Intel MPI
        PMI_ID, PMI_PORT                          the same with mpiexec -pmi-port
        SLURM_PROCID, SLURM_STEP_NUM_TASKS        only in a step of srun
        TF_CONFIG
        PMIX_RANK, PMIX_NAMESPACE                 IDIST_ERR_ENV: the size is missing
        none of them: a world of 1

    An empty variable counts as unset. IDIST_ERR_ENV names the variable when only half of a pair is
    set (except JOB_COMPLETION_INDEX, which pods of other kinds have as well, PMI_ID and PMI_PORT,
    which count only together, and a world size where ranks are drawn, see below), when a value is
    not a number, when the rank is not below the size, when RANK and WORLD_SIZE contradict Slurm,
    when TF_CONFIG is not valid JSON (without a cluster it counts as unset), or when nothing is set
    although an init method other than env:// (see below) says that there are ranks to meet.
    IDIST_LAUNCHER selects one: none, idist, env, torchrun, indexed, horovodrun, openmpi, mvapich2,
    jsrun, pals, flux, hydra, slurm, tf_config.

    In a step of srun, RANK and WORLD_SIZE may repeat Slurm's numbers (RANK=$SLURM_PROCID
    WORLD_SIZE=$SLURM_NTASKS) or, on one node, be those of a launcher that started more ranks than
    the step has tasks. Anything else contradicts, unless LOCAL_WORLD_SIZE or torchrun's variables
    say that a launcher inside the step has set them, or IDIST_LAUNCHER which to believe.

    The ranks meet at desc.store, or else at desc.init_method, or else at IDIST_INIT_METHOD:

        env://                MASTER_ADDR and MASTER_PORT (the default). Without them, what the
                              launcher offers: a local socket on one host, torchrun's agent, PMI-1,
                              the first host of a Slurm step
        tcp://host:port       the same, given explicitly
        tcp://239.x.y.z:port  a multicast group (224 to 239), in which ranks of one subnet find
                              rank 0
        file:///path          a file on a file system that all ranks share and that supports locks;
                              here ranks can be drawn, see below

    Any other text is IDIST_ERR_ENV (IDIST_ERR_ARG in desc.init_method), in a world of 1 as well.

    When that address is a loopback address, or when LOCAL_WORLD_SIZE says that all ranks are on
    this host, they meet at a local socket named after the port, and no TCP port is opened.

        for r in 0 1 2; do
            RANK=$r WORLD_SIZE=3 LOCAL_RANK=$r MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 ./app &
        done; wait

    At file:///path, processes without a rank draw one from the file: those that have
    IDIST_WORLD_SIZE or WORLD_SIZE only, or a desc.rank of -1. The first one is rank 0, and each
    rank is drawn once. Which process gets which differs from run to run. Local ranks follow from
    the hosts, as always.

        for i in 1 2 3; do
            IDIST_INIT_METHOD=file:///tmp/meet WORLD_SIZE=3 ./app &
        done; wait

    Rank 0 removes the file when all have joined; the same processes may then make another world
    there. A file left over from ranks that died is not used, whether ranks are drawn or given: the
    next rank 0 replaces it. A process too many gets IDIST_ERR_RANK_TAKEN, with path, group and
    size, as long as the world is being made; the others do not notice. After that it is the first
    one of a next world. A process that dies after it drew is IDIST_ERR_PEER_LOST to the others; if
    nobody has drawn the rank in time, IDIST_ERR_TIMEOUT names the rank. Of processes that were
    given a rank and others that were not, those that differ from rank 0 get IDIST_ERR_ENV.
    IDIST_GROUP_NAME keeps several worlds apart that begin at one path at the same time
    (desc.group_name).

    Other variables; for time-outs, 0 means the default and -1 none:

        IDIST_TIMEOUT_MS, IDIST_INIT_TIMEOUT_MS
        IDIST_TRANSPORT      auto, socket or tcp
        IDIST_ALGO           auto, latency, bandwidth, chunked or remote
        IDIST_SHM_MIB        shared memory per rank in MiB
        IDIST_GROUP_NAME     the name of a world at file:///path
        IDIST_HOSTID         ranks with equal values share a host
        IDIST_ADDR           the address or name at which other hosts reach this one; they look up a
                             name until they know it or the time is up. This host looks it up only
                             where its own ranks do not share memory (IDIST_TRANSPORT=tcp)
        IDIST_SOCKET_IFNAME  network interfaces that other hosts reach: prefixes (eth,ib), whole
                             names (=eth0), or all but those (^docker). Without it
                             NCCL_SOCKET_IFNAME, in the same grammar, then GLOO_SOCKET_IFNAME, a
                             list of whole names. Without any of them: the interface on the way to
                             rank 0, or else the first one. idist_show_config tells the address and
                             the interface
        IDIST_SOCKETS        TCP connections between two ranks, for networks that limit each
                             connection; see desc.sockets
        IDIST_BIND=core      keeps each rank on one processor
        IDIST_CHECK=0        the mpi backend does not compare calls (the ring always does)
        IDIST_START_METHOD   fork or exec
        IDIST_LOG            see LOGGING
        IDIST_TRACE          the file of a timeline: see [api:trace]
        IDIST_LOST_FILE      a file that a rank creates when it lost another rank, or could not
                             join because of one. Launchers set it to tell a cause from its
                             consequences
        LOCAL_RANK, LOCAL_WORLD_SIZE   optional

    The environment is read and never changed. Workers that idist_spawn starts by exec find
    IDIST_SPAWN in theirs.

    idist_spawn forks. Call it before the program starts threads, opens a GPU or initialises MPI;
    otherwise use start_method "exec" or a launcher.

BUFFERS

    Buffers belong to the caller and may have any address, aligned or not. Send and receive buffers
    are disjoint, or overlap exactly as the in-place rule of the call says (NCCL's rules). A send
    buffer is never written, except in place. When a call fails, the contents of its receive buffers
    are undefined. The library keeps no pointer to a buffer after the call, or idist_wait, returns.

ERRORS

    Functions return idist_status. For the calling thread, idist_last_error() then says what
    happened, to whom, and what to do about it. The text stays until another call fails:

        all_reduce #42 (F32 x 1048576, SUM): rank 3 on node7 was lost: its process ended, or closed
        the connection without idist_finalize

    There are three kinds:

        of a call   IDIST_ERR_ARG, _STATE, _TRUNCATED, _UNSUPPORTED ...: the call had no effect.
        of a group  IDIST_ERR_PEER_LOST, _MISMATCH, _TIMEOUT (except of a receive), _ABORTED: all
                    ranks of the group get the same status, from the present call or the next one,
                    and the group cannot be used again.
        of init     IDIST_ERR_ENV, _NO_BACKEND, _AUTH ...: there is no world.

    When a rank dies, or exits without idist_finalize, every rank that is blocked in a call learns
    of it within milliseconds: the connection ends or, within a host, a waiting rank looks every 10
    to 30 ms (less often if more than 32 ranks wait there). A machine that disappears without
    closing its connections is detected by the time-out. In a world of more than 64 ranks not every
    rank is connected to every other one (see idist_ring.h): there the ranks that are in calls pass
    on the news of any failure of a group, also of idist_abort. A rank that comes long after the
    others have left may then name one of those.

    If a rank leaves after the world has failed, groups that need that rank fail with the status of
    the world, and the text begins with the cause of the world's failure.

    Ranks that call different operations get IDIST_ERR_MISMATCH. The text names two of them and the
    field that differs (operation, dtype, op, root, count, group, sequence). A rank whose own part
    was already complete gets it from its next call that waits for others, at the latest from the
    17th. A deadlock of two ranks is a mismatch, too: calls on different groups, a receive against a
    collective, two sends, two receives. Longer cycles, and calls on two groups over several hosts,
    may end by the time-out. A receive whose message has another dtype fails alone, and the group
    goes on.

TIME-OUTS AND ABORT

    Every call has a deadline: idist_opts.timeout_ms, else desc.timeout_ms, else 30 minutes.
    IDIST_ERR_TIMEOUT names the ranks that did not enter the call, or entered it and stopped
    responding, and where they were last seen. Where such a rank waits for another one, the text
    follows the chain to its end (not with idist_mpi.h). It says which rank got no answer: when a
    path between two hosts is cut, each rank still answers those on its side. A call that takes
    longer than a minute logs a warning with the same names. idist_abort, from any thread, ends all
    calls on a group at once. Joining a world has a deadline of its own, 5 minutes; if a rank dies
    after it has reached the store, the others get IDIST_ERR_PEER_LOST within a second.

THREADS

    Every function may be called from any thread. Calls on a group are made in the same order on all
    ranks, so two threads that use one group need a lock of yours, held from idist_group_begin to
    idist_group_end, or a group each. Callbacks (user ops, logger, allocator) run in whichever
    thread is inside the library. The first immediate call of a world starts one thread, which
    advances requests while the program computes; idist_finalize ends it. That thread blocks all
    signals, and the library installs no signal handlers.

    No call is a cancellation point: a thread that is cancelled (pthread_cancel) in a call ends
    after the call returns. idist_abort ends the call at once.

    A callback must not leave idist by longjmp. What happens when a callback throws a C++ exception
    depends on how the implementation is compiled. Compiled as C++, an op fails the group with
    IDIST_ERR_CALLBACK on all ranks, an allocator is out of memory, a logger's line goes to stderr,
    and the functions of idist_train.h fail with IDIST_ERR_CALLBACK. Compiled as C, or without
    exceptions, the process ends by std::terminate, and the other ranks lose it. An op over MPI
    always ends the process.

    After fork() the child has no world, and its calls return IDIST_ERR_STATE. It should exec or
    exit before its parent does: a child that holds its descriptors open hides the death of its
    parent from the other ranks.

MEMORY

    desc.allocator serves everything except idist_alloc, shared memory, the handles of worlds and
    groups, and a few short-lived buffers. Handles of closed worlds (up to 16) and of their groups
    (up to 256), about 340 KiB in all, are kept so that a call with a stale handle returns
    IDIST_ERR_STATE (see idist_close), in a shared library until it is unloaded. A ring world takes
    32 KiB, another 32 KiB per rank, and up to 2 MiB per rank for messages that arrive before their
    receive (5 MiB if they are empty). Large reductions over sockets use scratch memory of up to
    twice the message size.

    Ranks on one host share an anonymous file of up to 5 MiB per rank (desc.shm_nbytes), which
    disappears with the last of them. About half of that is reserved when they join; the rest
    follows as groups are made, and a group that gets none uses messages instead. If the file cannot
    be had (no memfd, or a limit on memory, address space or file size), they use local sockets, and
    a log line at info level says why. Large buffers are read directly from the memory of the other
    process where the kernel permits it, and does it fast; the ranks measure that when they join. A
    message up to 1 MiB goes through the file if sender and receiver wait. A program that changes
    its user after joining, or restricts its own system calls (seccomp), must set
    IDIST_TRANSPORT=socket.

    Memory from idist_alloc lies in a shared file, too, and reserves address space only as it is
    allocated. The other ranks of the host map it in their next large collective, and from then on
    read it in place. If a limit keeps a rank from mapping more, data is copied.

    A program that locks its memory (mlockall, MCL_FUTURE) locks what idist maps: desc.shm_nbytes
    for each rank of the host, what the ranks get from idist_alloc, and the stacks of idist's
    threads. If a limit on locked memory (ulimit -l) leaves no room for the shared file, the ranks
    use local sockets; log lines, idist_show_config and error texts name the limit.

WAITING

    A waiting rank polls for at most half a millisecond while the host has a core for each rank.
    With more ranks than cores it yields the core to other ranks instead. After that it sleeps and
    uses practically no CPU time.

LOGGING

    IDIST_LOG=error|warn|info|debug, default warn. Lines go to desc.logger, or else to stderr. The
    library never prints to stdout. A failure that a status reports is logged at info level, so that
    a program which prints idist_last_error() does not print it twice.

SECURITY

    Every connection begins with a mutual handshake that proves knowledge of a secret (HMAC-SHA256).
    idist_spawn makes a secret by itself. Otherwise it comes from desc.secret, the file
    IDIST_SECRET_FILE (mode 600) or IDIST_SECRET. Local sockets also check the user, and shared
    memory is passed through them. Ranks of several hosts listen at all addresses of their host.
    Without a secret that is refused (IDIST_ERR_NO_SECRET) unless IDIST_INSECURE=1; then each
    listens at one address only. A rank that cannot prove the secret fails at once. Rank 0 warns of
    such a process and waits on, because a stranger must not end the job. In a world of more than
    64 ranks the ranks listen until it is closed, otherwise while they join. The data itself is
    neither encrypted nor signed: on a network you do not trust, use a tunnel.

WRITING A BACKEND

    Fill an idist_backend_api (its contract is in src/core/model.h) and pass it to
    idist_register_backend. The backend receives each call as one struct and ends it with
    idist__task_complete. tests/compile/backend.c is a complete one.

LIMITS

    Linux only. A ring world has up to some hundred ranks, because each keeps memory for every other
    one (see MEMORY), and rank 0 serves all of them while they meet. 224 user-defined ops and 128
    dtypes per world. Tags are 0 .. 2^31-1. A ring world does not shrink: after a loss, finalize and
    start again.

HISTORY

    See CHANGELOG.md. The licence is at the end of this file.
*/
#if defined(IDIST_IMPLEMENTATION) && !defined(_DEFAULT_SOURCE)
// clock_gettime, sockets and the like, also with -std=c99.
#define _DEFAULT_SOURCE
#endif
#if defined(IDIST_IMPLEMENTATION) && !defined(_FILE_OFFSET_BITS)
// Files above 2 GiB and inode numbers above 2^32, also where a long has 32 bits.
#define _FILE_OFFSET_BITS 64
#endif
#ifndef IDIST_H
#define IDIST_H

#define IDIST_VERSION_MAJOR 0
#define IDIST_VERSION_MINOR 2
#define IDIST_VERSION_PATCH 0
#define IDIST_VERSION "0.2.0"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifndef IDIST_API
#define IDIST_API extern
#endif

#ifdef __cplusplus
extern "C" {
#endif

//------------------------------------------------------------------------------
// [api:status]  status codes and error texts
//------------------------------------------------------------------------------

// Every status: name, value, meaning. 0 is success, errors are negative.
#define IDIST_STATUS_MAP(X)                                                                    \
    X(OK, 0, "success")                                                                        \
    X(ERR_ARG, -1, "an argument is invalid")                                                   \
    X(ERR_STATE, -2, "the call is not allowed in the present state")                           \
    X(ERR_NO_MEMORY, -3, "out of memory")                                                      \
    X(ERR_SYSTEM, -4, "an operating system call failed")                                       \
    X(ERR_TIMEOUT, -5, "the deadline passed")                                                  \
    X(ERR_PEER_LOST, -6, "a rank died or its connection broke")                                \
    X(ERR_MISMATCH, -7, "ranks called different operations, or the same with other arguments") \
    X(ERR_ABORTED, -8, "a rank called idist_abort")                                            \
    X(ERR_TRUNCATED, -9, "a message is longer than the buffer for it")                         \
    X(ERR_NO_BACKEND, -10, "no backend accepts this configuration")                            \
    X(ERR_UNSUPPORTED, -11, "not supported by this backend or build")                          \
    X(ERR_AUTH, -12, "the other side does not know the shared secret")                         \
    X(ERR_NO_SECRET, -13, "listening beyond this host requires a shared secret")               \
    X(ERR_NO_SPACE, -14, "no space left")                                                      \
    X(ERR_NO_FDS, -15, "out of file descriptors")                                              \
    X(ERR_RANK_TAKEN, -16, "another process already has this rank")                            \
    X(ERR_ADDR_IN_USE, -17, "the rendezvous address is in use")                                \
    X(ERR_NOT_FOUND, -18, "no such file")                                                      \
    X(ERR_WORKER_FAILED, -19, "a worker failed")                                               \
    X(ERR_ENV, -20, "an environment variable is missing or invalid")                           \
    X(ERR_CALLBACK, -21, "a callback reported failure")                                        \
    X(ERR_NO_DEVICE, -22, "no usable device, driver or device library")                        \
    X(ERR_INTERNAL, -23, "a bug in idist")                                                     \
    X(ERR_DEVICE, -24, "a device library call failed")                                         \
    X(ERR_CORRUPT, -25, "a file is damaged")                                                   \
    X(ERR_CANCELLED, -26, "idist_cancel ended the receive")

typedef enum idist_status {
#define IDIST__X(name, value, text) IDIST_##name = value,
    IDIST_STATUS_MAP(IDIST__X)
#undef IDIST__X
} idist_status;

// The name of a status ("IDIST_ERR_TIMEOUT") and its general meaning. Never NULL.
IDIST_API const char *idist_status_name(idist_status status);
IDIST_API const char *idist_status_string(idist_status status);

// Describes the last call in this thread that failed: operation, ranks, cause, and what to do about
// it. "" if none has failed yet. A call that succeeds leaves the text alone, also if one of its
// attempts failed. Valid until the next failure in this thread.
IDIST_API const char *idist_last_error(void);

// Sets that text, up to 1023 bytes of it; NULL: "". For a function that idist_spawn or
// idist_parallel_run runs: if it then returns a failure, their error and report quote the text, of
// which a report has room for 400 bytes.
IDIST_API void idist_set_last_error(const char *text);

//------------------------------------------------------------------------------
// [api:types]  element types, reductions, options of a call
//------------------------------------------------------------------------------

// Integers are reduced exactly, modulo 2^bits. F16 is IEEE binary16, BF16 the upper half of a
// float; F8E4M3 and F8E5M2 are the OCP formats (__nv_fp8_e4m3, __nv_fp8_e5m2 in CUDA). Sums and
// products of these four are computed in float and rounded once, at the end. In the 8-bit formats
// values that are too large, including infinity, become the largest finite number (448, 57344).
// idist_dtype_create adds elements of any other kind.
typedef enum idist_dtype {
    IDIST_I8 = 0,
    IDIST_U8 = 1, // bytes, bool, char
    IDIST_I16 = 2,
    IDIST_U16 = 3,
    IDIST_I32 = 4,
    IDIST_U32 = 5,
    IDIST_I64 = 6,
    IDIST_U64 = 7,
    IDIST_F16 = 8,
    IDIST_BF16 = 9,
    IDIST_F32 = 10,
    IDIST_F64 = 11,
    IDIST_F8E4M3 = 12,
    IDIST_F8E5M2 = 13,
    IDIST_F32_I64 = 14, // idist_f32_i64, a value and an index: see IDIST_MINLOC
    IDIST_F64_I64 = 15,
    IDIST_I32_I64 = 16,
    IDIST_I64_I64 = 17,
    IDIST_DTYPE_COUNT = 18,
    IDIST_DTYPE_USER = 64, // below what idist_dtype_create returns
    IDIST_DTYPE_LAST = 0x7fffffff
} idist_dtype;

// The elements of the pair dtypes.
typedef struct idist_f32_i64 {
    float value;
    int64_t index;
} idist_f32_i64;

typedef struct idist_f64_i64 {
    double value;
    int64_t index;
} idist_f64_i64;

typedef struct idist_i32_i64 {
    int32_t value;
    int64_t index;
} idist_i32_i64;

typedef struct idist_i64_i64 {
    int64_t value;
    int64_t index;
} idist_i64_i64;

// How two elements are combined. The algorithm fixes the order of the operands, never timing, so
// every rank gets the same bits in every run. MIN and MAX yield NaN when any operand is NaN. The
// bitwise and logical ops take integers only; the logical ops yield 0 or 1. AVG is SUM divided by
// the number of ranks (integers: rounded towards zero).
//
// MINLOC and MAXLOC take the pair dtypes, and these take no other built-in op: they yield the pair
// with the smallest or largest value, of equal values that with the lowest index. A NaN beats every
// number. idist_op_create returns further values, from IDIST_OP_USER on.
typedef enum idist_op {
    IDIST_SUM = 0,
    IDIST_PROD = 1,
    IDIST_MIN = 2,
    IDIST_MAX = 3,
    IDIST_AVG = 4,
    IDIST_BAND = 5,
    IDIST_BOR = 6,
    IDIST_BXOR = 7,
    IDIST_LAND = 8,
    IDIST_LOR = 9,
    IDIST_LXOR = 10,
    IDIST_MINLOC = 11,
    IDIST_MAXLOC = 12,
    IDIST_OP_COUNT = 13,
    IDIST_OP_USER = 16, // the first of the 224 values that idist_op_create returns
    IDIST_OP_LAST = 239
} idist_op;

// Bytes per element; 0 for an invalid dtype.
IDIST_API size_t idist_dtype_size(idist_dtype dtype);

// "F32", "SUM", ... Never NULL. "user dtype" and "user op" for those that a program creates.
IDIST_API const char *idist_dtype_name(idist_dtype dtype);
IDIST_API const char *idist_op_name(idist_op op);

// Some ranks of a world in a fixed order. NULL stands for the default world.
typedef struct idist_group idist_group;

// A small key-value table that all ranks can reach.
typedef struct idist_store idist_store;

// An operation in flight. Put its address into idist_opts.request (the old contents do not matter),
// then call idist_wait or idist_test. Until one of them reports completion, do not write the
// buffers of the operation, and do not read those that it receives into. A request of all zeros is
// empty: waiting for it returns IDIST_OK at once. A call that fails leaves it empty, too, unless it
// has no request form.
typedef struct idist_request {
    void *impl; // private
} idist_request;

// A call that is prepared once and made often; see idist_plan_create.
typedef struct idist_plan idist_plan;

// The last argument of every communication call. NULL or all zeros: the default world, blocking,
// the group's time-out.
typedef struct idist_opts {
    // Roots, sources and destinations of the call are ranks of this group. NULL: the default world.
    idist_group *group;

    // NULL: the call blocks until it is complete. Otherwise it returns at once, and idist_wait or
    // idist_test completes it.
    idist_request *request;

    // For device buffers, a cudaStream_t. The operation starts after the work that is in the stream
    // now. Without a request, work added to the stream later sees the result. See idist_nccl.h.
    void *stream;

    // Deadline of the call in milliseconds. 0: that of the world (desc.timeout_ms). < 0: none.
    int timeout_ms;

    // Not NULL: the call is not made but kept in this plan. See idist_plan_create.
    idist_plan *plan;
} idist_opts;

#define IDIST_ANY_SOURCE (-1)
#define IDIST_ANY_TAG (-1)

// What a receive got.
typedef struct idist_recv_info {
    int source;        // rank in the group
    int tag;           // of the message
    size_t count;      // elements in it
    idist_dtype dtype; // of its elements; IDIST_DTYPE_COUNT: one that this rank has not created
} idist_recv_info;

// A message that idist_mprobe or idist_improbe has matched, for idist_mrecv. All zeros: it is
// empty.
typedef struct idist_message {
    idist_recv_info info; // what it is; also when it was received
    idist_group *group;   // private; NULL: it is empty
    uint64_t world, ctx;  // private; of the group
    int64_t number;       // private
} idist_message;

// IDIST_DTYPE(ptr): the dtype of what a pointer points to, at compile time, in C11 and C++. For
// example: idist_all_reduce(x, x, n, IDIST_DTYPE(x), IDIST_SUM, NULL). bool is U8, char is I8.
#ifndef __cplusplus
#if defined(__STDC_VERSION__) && __STDC_VERSION__ >= 201112L
// clang-format off
#define IDIST_DTYPE(ptr)                                         \
    _Generic(*(ptr),                                             \
        char: IDIST_I8,                                          \
        signed char: IDIST_I8,                                   \
        unsigned char: IDIST_U8,                                 \
        _Bool: IDIST_U8,                                         \
        short: IDIST_I16,                                        \
        unsigned short: IDIST_U16,                               \
        int: IDIST_I32,                                          \
        unsigned int: IDIST_U32,                                 \
        long: (sizeof(long) == 8 ? IDIST_I64 : IDIST_I32),       \
        unsigned long: (sizeof(long) == 8 ? IDIST_U64 : IDIST_U32), \
        long long: IDIST_I64,                                    \
        unsigned long long: IDIST_U64,                           \
        float: IDIST_F32,                                        \
        double: IDIST_F64,                                       \
        idist_f32_i64: IDIST_F32_I64,                            \
        idist_f64_i64: IDIST_F64_I64,                            \
        idist_i32_i64: IDIST_I32_I64,                            \
        idist_i64_i64: IDIST_I64_I64)
// clang-format on
#endif
#endif

//------------------------------------------------------------------------------
// [api:desc]  how a world starts
//------------------------------------------------------------------------------

typedef enum idist_log_level {
    IDIST_LOG_ERROR = 1,
    IDIST_LOG_WARN = 2,
    IDIST_LOG_INFO = 3,
    IDIST_LOG_DEBUG = 4
} idist_log_level;

// Where log lines go. log_fn is called from any thread that calls idist and from the progress
// thread, by one thread at a time, and must not call idist. The line has no newline and names rank
// and host. NULL: stderr.
typedef struct idist_logger {
    void (*log_fn)(idist_log_level level, const char *line, void *user);
    void *user;
} idist_logger;

// Where memory comes from: both functions or neither, called from any thread. alloc_fn returns
// memory aligned like that of malloc, or NULL.
typedef struct idist_allocator {
    void *(*alloc_fn)(size_t nbytes, void *user);
    void (*free_fn)(void *ptr, void *user);
    void *user;
} idist_allocator;

// What idist_spawn says about the first worker that failed.
typedef struct idist_report {
    int rank;       // in the world of the workers; -1: no worker failed
    int exit_code;  // -1: a signal ended it
    int signal;     // 0: it exited
    char text[512]; // one sentence, with the worker's own last error if it left one
} idist_report;

// Everything about a world. All zeros are valid: then the environment decides, and without it the
// world has one rank. An explicit field overrides the environment (the variables named below),
// which overrides the built-in default.
typedef struct idist_desc {
    // "ring", "mpi", "self" or the name of another registered backend, or a list such as
    // "mpi,ring", of which the first that accepts the configuration is used. "gloo" is an alias of
    // "ring"; "nccl" means "ring" with device_backend "nccl", unless that field is set.
    // IDIST_BACKEND.
    const char *backend;

    // "env://", "tcp://host:port", "tcp://239.x.y.z:port" or "file:///path". All but the first need
    // world_size and, except with file:///path, rank, from this struct, the environment or MPI:
    // without them they are IDIST_ERR_ARG. IDIST_INIT_METHOD.
    const char *init_method;

    // Rendezvous through this store instead. The caller keeps owning it. Several worlds may begin
    // at it, one after another, if each rank takes part in all of them. Where the number of ranks
    // changes, or a rank did not come to one of them, each world needs a view of its own
    // (idist_store_prefix), with a prefix that all of its ranks know.
    idist_store *store;

    // World size and rank. If both are 0 they come from the environment; otherwise both are used,
    // and rank must be 0 .. world_size - 1, or -1: it is drawn, see LAUNCHING. With -1, a
    // world_size of 0 means IDIST_WORLD_SIZE or WORLD_SIZE.
    int world_size;
    int rank;

    // Workers of idist_spawn and idist_parallel_run on this host. 0: idist_spawn starts one per
    // core, and idist_parallel_run joins the world of the launcher.
    int nproc_per_node;

    // For idist_parallel_run on several hosts: how many there are, and which of them this is.
    int nnodes;
    int node_rank;

    // Host of rank 0 and the rendezvous port there. MASTER_ADDR, MASTER_PORT.
    const char *master_addr;
    int master_port;

    // Deadline of each call in milliseconds; 0: 30 minutes, < 0: none. IDIST_TIMEOUT_MS.
    int timeout_ms;

    // Deadline for all ranks to join, in milliseconds; 0: 5 minutes, < 0: none.
    // IDIST_INIT_TIMEOUT_MS. When a process ends while the ranks join, the others fail at once.
    // They wait until this deadline for a process that ends before it has told rank 0 which rank it
    // is, for rank 0 if it ends before they have reached it, and for any process if the ranks meet
    // at the store of torchrun, whose agent then ends them.
    int init_timeout_ms;

    // Shared by all ranks of the job, at least 16 bytes. IDIST_SECRET_FILE, IDIST_SECRET.
    const void *secret;
    size_t secret_nbytes;

    // "auto": shared memory within a host, TCP between hosts. "socket": local sockets within a
    // host. "tcp": TCP everywhere. IDIST_TRANSPORT.
    const char *transport;

    // "auto", or for tests "latency" or "bandwidth" (messages), "chunked" (shared memory, never the
    // path for small messages) or "remote" (as "auto", but large buffers are read from the other
    // processes even if this machine is slow at it). IDIST_ALGO.
    const char *algorithm;

    // "none", or "core": each rank stays on one of the processors it may use. IDIST_BIND.
    const char *bind;

    // Shared memory that each rank takes at most, in bytes, without that of idist_alloc; 0: 5 MiB.
    // IDIST_SHM_MIB (in MiB). Below about 400 KiB collectives are messages, as a log line says at
    // warn level.
    size_t shm_nbytes;

    // Ranks with equal ids share a host. NULL: boot id, user and network namespace. IDIST_HOSTID.
    const char *host_id;

    // For idist_mpi.h, an MPI_Comm *: the communicator whose ranks become those of the world. It is
    // duplicated and stays the caller's. NULL: MPI_COMM_WORLD.
    const void *mpi_comm;

    idist_allocator allocator;
    idist_logger logger;

    // idist_spawn: milliseconds that the other workers get to end after a first failure; 0: 2000.
    int grace_ms;

    // idist_spawn: do not end the other workers after a failure.
    bool keep_going;

    // idist_spawn: filled in when a worker failed. May be NULL.
    idist_report *report;

    // "cuda:1", "cuda" (local rank modulo number of devices) or "cpu". NULL: "cuda" if all ranks
    // have a device and the program includes idist_nccl.h, otherwise "cpu". IDIST_DEVICE.
    const char *device;

    // idist_spawn: "fork", or "exec" to run the program anew. IDIST_START_METHOD.
    const char *start_method;

    // "nccl", "ipc" or "staged". NULL or "auto": the best that is available, see idist_nccl.h.
    // Ignored without a device backend. IDIST_DEVICE_BACKEND.
    const char *device_backend;

    // An ncclComm_t * over the ranks of the world. It stays the caller's until the world fails,
    // which aborts it.
    const void *nccl_comm;

    // An ncclConfig_t * for the communicators that idist creates; copied, but strings in it must
    // stay valid until the world is closed. May be NULL.
    const void *nccl_config;

    // idist's own work on the device has priority. IDIST_HIGH_PRIORITY_STREAM=1.
    bool high_priority_stream;

    // TCP connections between two ranks, at most 8, over which messages are spread; the highest
    // number that any rank asks for counts. 0: one, and more where the round trip is so long that
    // one cannot fill the network. IDIST_SOCKETS.
    int sockets;

    // With init_method "file:///path": worlds of different names meet at one path, each in a file
    // of its own, path.NAME. Up to 63 letters, digits and ._-; NULL or "": the file is path itself.
    // Other methods do not use it. IDIST_GROUP_NAME.
    const char *group_name;
} idist_desc;

//------------------------------------------------------------------------------
// [api:life]  initialize, finalize, and the getters
//
// The getters, idist_get_rank to idist_show_config, never fail: outside a world they answer as in a
// world of 1. Any thread. Their strings are valid until idist_finalize, or else for as long as the
// thread lives, unless the function says otherwise.
//------------------------------------------------------------------------------

// Joins the default world: finds out rank and size, meets the other ranks and connects to them.
// Collective over all ranks of the job; blocks until all have joined (IDIST_ERR_TIMEOUT names those
// that did not). desc may be NULL. IDIST_ERR_STATE if it is joined already.
IDIST_API idist_status idist_initialize(const idist_desc *desc);

// Leaves the default world. Collective; blocks until the others call it, too, and have completed
// the calls that involve this rank, then frees everything.
//
// Call it before the process exits, also after a last barrier: a call that is complete on this rank
// may still be under way on others, and these get IDIST_ERR_PEER_LOST from it when this rank is
// gone.
//
// With requests pending or an idist_group_begin open it returns IDIST_ERR_STATE and does nothing.
// In all other cases the world and its groups are gone afterwards, even if the call returns an
// error (the one that the world failed with). Calls in which other threads are still blocked end
// with IDIST_ERR_ABORTED, or with IDIST_ERR_MISMATCH if it is a collective of the world, as this
// call is another one; no thread may begin a call meanwhile. A later call on one of those groups
// returns IDIST_ERR_STATE, and idist_free_group only sets the pointer to NULL.
//
// After a failure of the world it does not wait for the others. Groups that the failure does not
// concern go on: a call that this rank has completed completes on the other members, too. A call
// that needs this rank fails there with the status and the text of the failure of the world. (With
// idist_mpi.h these groups fail at once.)
IDIST_API idist_status idist_finalize(void);

// True between idist_initialize and idist_finalize.
IDIST_API bool idist_is_initialized(void);

IDIST_API int idist_get_rank(void);           // rank of the caller in the default world
IDIST_API int idist_get_world_size(void);     // number of ranks in the default world
IDIST_API int idist_get_local_rank(void);     // index among the ranks of this host, in rank order
IDIST_API int idist_get_nproc_per_node(void); // number of ranks on this host
IDIST_API int idist_get_nnodes(void);         // number of hosts
IDIST_API int idist_get_node_rank(void);      // of this host; hosts are ordered by lowest rank

// "self", "ring", "mpi", or the name of another registered backend.
IDIST_API const char *idist_backend(void);

// "cpu", "cuda:0".
IDIST_API const char *idist_device(void);

// "none"; with idist_nccl.h "nccl", "ipc" or "staged".
IDIST_API const char *idist_device_backend(void);

// The name of this host.
IDIST_API const char *idist_hostname(void);

// What started the ranks: "none", "spawn", "torchrun", "env", "openmpi", ... Before
// idist_initialize, what the environment indicates.
IDIST_API const char *idist_launcher(void);

// The backends in this program, in order of preference: "mpi,ring,self". The string is valid until
// this thread calls the function again.
IDIST_API const char *idist_available_backends(void);

// The configuration of the world, the backends that this program has (MPI and NCCL with their
// headers), and what its host gives this rank: cores, limits and interfaces. One "name: value" per
// line; "on this host" says how its ranks exchange data, and if not by shared memory, why. The
// string is valid until this thread calls the function again.
IDIST_API const char *idist_show_config(void);

// Ends all pending and later calls on the group with IDIST_ERR_ABORTED, on all its ranks. NULL: the
// default world. Any thread; does not block. A group that has failed already keeps its status.
// IDIST_ERR_STATE on a rank that is no member.
IDIST_API idist_status idist_abort(idist_group *group);

// Joins a further, independent world; several may be open at once, in any thread. *world is its
// group of all ranks (NULL on failure), for idist_opts.group. Collective over the ranks of that
// world. Worlds may be opened one directly after the other at the same address, by the same thread.
// Close it with idist_close.
IDIST_API idist_status idist_open(const idist_desc *desc, idist_group **world);

// Leaves such a world, as idist_finalize leaves the default world, and sets the pointer to NULL,
// unless the world stays open. Copies of the handle and the groups of that world become invalid:
// calls on them return IDIST_ERR_STATE. (After 16 more worlds or 256 more groups, a stale handle
// may be that of a new one.) IDIST_ERR_ARG if it is no such world.
IDIST_API idist_status idist_close(idist_group **world);

//------------------------------------------------------------------------------
// [api:coll]  collectives
//
// All ranks of the group make the same call in the same order, with the same count, dtype, op and
// root. If they do not, every rank gets IDIST_ERR_MISMATCH, which names two ranks and the field
// that differs. If a rank dies, the others get IDIST_ERR_PEER_LOST; if one does not call,
// IDIST_ERR_TIMEOUT. After any of these the group returns the same error at once. IDIST_ERR_ARG and
// IDIST_ERR_STATE are local: nothing was sent, and the group goes on.
//
// count is in elements, n is the number of ranks, r the rank of the caller, both of the group. Send
// and receive buffers are disjoint, or overlap as the in-place rule says; each rank chooses for
// itself. count may be 0, and then buffers may be NULL. Any thread, but the same order on all
// ranks.
//
// Without opts.request a call blocks until it is complete on this rank: the send buffer may be
// written, and the receive buffer holds the result. Other ranks may still be in the call, or not in
// it yet. The numbers after "send:" and "recv:" are elements on each rank.
//------------------------------------------------------------------------------

// recv[i] = op over all ranks of send[i], on every rank, with the same bits.
// send: count. recv: count. In place: send == recv.
IDIST_API idist_status idist_all_reduce(const void *send, void *recv, size_t count,
                                        idist_dtype dtype, idist_op op, const idist_opts *opts);

// Like all_reduce, with the result on root only. Elsewhere recv is not touched and may be NULL.
// send: count. recv: count, on root. In place: send == recv.
IDIST_API idist_status idist_reduce(const void *send, void *recv, size_t count, idist_dtype dtype,
                                    idist_op op, int root, const idist_opts *opts);

// Copies buf of root to buf of all ranks. buf: count.
IDIST_API idist_status idist_broadcast(void *buf, size_t count, idist_dtype dtype, int root,
                                       const idist_opts *opts);

// Completes when all ranks have called it.
IDIST_API idist_status idist_barrier(const idist_opts *opts);

// recv[k*count + i] = send[i] of rank k, on every rank.
// send: count. recv: n*count. In place: send == recv + r*count.
IDIST_API idist_status idist_all_gather(const void *send, void *recv, size_t count,
                                        idist_dtype dtype, const idist_opts *opts);

// Like all_gather, with the result on root only. Elsewhere recv is not touched and may be NULL.
// send: count. recv: n*count, on root. In place, on root: send == recv + r*count.
IDIST_API idist_status idist_gather(const void *send, void *recv, size_t count, idist_dtype dtype,
                                    int root, const idist_opts *opts);

// recv[i] = send[r*count + i] of root.
// send: n*count, on root; elsewhere it may be NULL. recv: count.
// In place, on root: recv == send + r*count.
IDIST_API idist_status idist_scatter(const void *send, void *recv, size_t count, idist_dtype dtype,
                                     int root, const idist_opts *opts);

// recv[i] = op over all ranks of send[r*count + i].
// send: n*count. recv: count. In place: recv == send + r*count.
IDIST_API idist_status idist_reduce_scatter(const void *send, void *recv, size_t count,
                                            idist_dtype dtype, idist_op op, const idist_opts *opts);

// recv[k*count + i] = send[r*count + i] of rank k.
// send: n*count. recv: n*count. In place: send == recv.
IDIST_API idist_status idist_all_to_all(const void *send, void *recv, size_t count,
                                        idist_dtype dtype, const idist_opts *opts);

// recv[i] = op over the ranks 0 .. r of send[i]. Not for AVG.
// send: count. recv: count. In place: send == recv.
IDIST_API idist_status idist_scan(const void *send, void *recv, size_t count, idist_dtype dtype,
                                  idist_op op, const idist_opts *opts);

// recv[i] = op over the ranks 0 .. r-1 of send[i]; on rank 0, recv is not touched. Not for AVG.
// send: count. recv: count. In place: send == recv.
IDIST_API idist_status idist_exscan(const void *send, void *recv, size_t count, idist_dtype dtype,
                                    idist_op op, const idist_opts *opts);

// The v-forms: the block of rank k has counts[k] elements and begins at element displs[k] of the
// larger buffer. displs == NULL: the blocks follow each other. Both arrays have n entries. The
// count of what goes from rank a to rank b must be the same on a and b. The arrays, like the
// buffers, must stay valid until the operation is complete. Blocks that are received must not
// overlap.
//
// Both arrays are size_t. In C, gcc and clang refuse arrays of int, which MPI takes, with an error
// and not only a warning. They also refuse an int where another call stores a size_t or a bool,
// such as *index of idist_wait_any and *done of idist_test. For this each of these functions is a
// macro, too, in C: its name without parentheses, as in a function pointer, is still the function.

// recv[recvdispls[k] + i] = send[i] of rank k, on every rank.
// send: sendcount == recvcounts[r]. recv: up to the end of the last block. The same recvcounts on
// all ranks; recvdispls may differ. In place: send == recv + recvdispls[r].
IDIST_API idist_status idist_all_gatherv(const void *send, size_t sendcount, void *recv,
                                         const size_t *recvcounts, const size_t *recvdispls,
                                         idist_dtype dtype, const idist_opts *opts);

// Like all_gatherv, with the result on root only; elsewhere recv, recvcounts and recvdispls are
// ignored. send: sendcount == recvcounts[r] of root.
// In place, on root: send == recv + recvdispls[r].
IDIST_API idist_status idist_gatherv(const void *send, size_t sendcount, void *recv,
                                     const size_t *recvcounts, const size_t *recvdispls,
                                     idist_dtype dtype, int root, const idist_opts *opts);

// recv[i] = send[senddispls[r] + i] of root. Elsewhere send, sendcounts and senddispls are ignored.
// recv: recvcount == sendcounts[r] of root. In place, on root: recv == send + senddispls[r].
IDIST_API idist_status idist_scatterv(const void *send, const size_t *sendcounts,
                                      const size_t *senddispls, void *recv, size_t recvcount,
                                      idist_dtype dtype, int root, const idist_opts *opts);

// recv[i] = op over all ranks of send[d + i], where block r begins at d, the sum of the recvcounts
// before recvcounts[r]. The same recvcounts on all ranks.
// send: the sum of all recvcounts. recv: recvcounts[r]. In place: recv == send + d.
IDIST_API idist_status idist_reduce_scatterv(const void *send, void *recv, const size_t *recvcounts,
                                             idist_dtype dtype, idist_op op,
                                             const idist_opts *opts);

// Sends sendcounts[k] elements at send + senddispls[k] to rank k, and receives recvcounts[k]
// elements from rank k at recv + recvdispls[k], for every k, itself included. Two ranks that
// exchange elements have the same dtype; others need not.
// In place: send == recv. Then sendcounts and senddispls are ignored and may be NULL: what goes to
// rank k is replaced by as many elements from rank k. This takes a copy of the buffer, up to the
// end of the last block.
IDIST_API idist_status idist_all_to_allv(const void *send, const size_t *sendcounts,
                                         const size_t *senddispls, void *recv,
                                         const size_t *recvcounts, const size_t *recvdispls,
                                         idist_dtype dtype, const idist_opts *opts);

// Bytes and strings whose size the receivers do not know. These two always block: opts.request must
// be NULL, and they are not allowed between idist_group_begin and idist_group_end.

// Copies the *nbytes bytes in buf of root to buf of all ranks, which holds up to capacity bytes,
// and sets *nbytes everywhere. IDIST_ERR_TRUNCATED on a rank whose buf is too small: *nbytes is the
// size needed, buf is untouched, and the group goes on.
IDIST_API idist_status idist_broadcast_bytes(void *buf, size_t capacity, size_t *nbytes, int root,
                                             const idist_opts *opts);

// Concatenates the bytes of all ranks in buf, in rank order; sizes[k] (n entries) is the number of
// bytes from rank k. send: nbytes, which may differ between ranks; not in place.
// IDIST_ERR_TRUNCATED on a rank whose capacity is below the total: sizes is set, buf is untouched,
// and the group goes on.
IDIST_API idist_status idist_all_gather_bytes(const void *send, size_t nbytes, void *buf,
                                              size_t capacity, size_t *sizes,
                                              const idist_opts *opts);

// The same with a result that is allocated: *recv, in host memory, which idist_free gives back. A
// zero byte follows the elements, so that text can be printed. On failure *recv is NULL. They
// block, like the two above; if a rank has no memory, the group fails with IDIST_ERR_NO_MEMORY.

// Gives every rank, root too, a copy of the count elements at send of root, and says how many they
// are and of which dtype, as in idist_recv_info. Elsewhere send, count and dtype are ignored.
// recvdtype may be NULL.
IDIST_API idist_status idist_broadcast_alloc(const void *send, size_t count, idist_dtype dtype,
                                             int root, void **recv, size_t *recvcount,
                                             idist_dtype *recvdtype, const idist_opts *opts);

// Concatenates the elements of all ranks, in rank order; recvcounts[k] (n entries) is how many came
// from rank k. send: count, which may differ between ranks. dtype is the same on all.
IDIST_API idist_status idist_all_gather_alloc(const void *send, size_t count, idist_dtype dtype,
                                              void **recv, size_t *recvcounts,
                                              const idist_opts *opts);

//------------------------------------------------------------------------------
// [api:p2p]  send and receive, requests
//
// dst and src are ranks of the group, and may be the caller's own. Messages from one rank to
// another with the same tag arrive in the order in which they were sent. A send may return before
// the receiver asks for the message (up to some KiB), or only afterwards; rely on neither. In a
// world of more than 64 ranks, the first message to a rank may wait until that one is in a call on
// the same world. Tags are 0 .. 2^31 - 1.
//
// A receive that times out before a message arrives ends with IDIST_ERR_TIMEOUT, and the group
// goes on. A send of more than some KiB that times out also fails the group, because the receiver
// already knows of the message.
//------------------------------------------------------------------------------

// Sends count elements to rank dst. Blocks until buf may be written.
IDIST_API idist_status idist_send(const void *buf, size_t count, idist_dtype dtype, int dst,
                                  int tag, const idist_opts *opts);

// Receives a message of at most count elements into buf; blocks until it is there. *info says what
// arrived; info may be NULL, and must otherwise stay valid until the operation is complete. src may
// be IDIST_ANY_SOURCE and tag IDIST_ANY_TAG (which also matches messages meant for later receives).
//
// A longer message gives IDIST_ERR_TRUNCATED, one of another dtype IDIST_ERR_MISMATCH. Then *info
// describes the message, buf is untouched, and the message stays: the next receive with that source
// and tag gets it, so it takes one of info->count elements of info->dtype.
IDIST_API idist_status idist_recv(void *buf, size_t count, idist_dtype dtype, int src, int tag,
                                  idist_recv_info *info, const idist_opts *opts);

// Waits until there is a message that idist_recv would take with this src and tag, and describes it
// in *info; the message stays. Receives that were posted before come first. Like a receive in all
// else: opts.request, time-out, lost ranks. Messages from device memory that do not pass through
// the host are not seen.
IDIST_API idist_status idist_probe(int src, int tag, idist_recv_info *info, const idist_opts *opts);

// The same without waiting: *found says whether there is one; info may be NULL. opts.request must
// be NULL, and it is not allowed between idist_group_begin and idist_group_end.
IDIST_API idist_status idist_iprobe(int src, int tag, bool *found, idist_recv_info *info,
                                    const idist_opts *opts);

// The same two, which also take the message away: no receive and no probe finds it from then on,
// only idist_mrecv with this *message, not with a copy. So several threads may probe and receive
// with IDIST_ANY_SOURCE, and each gets what it has probed. message->info describes it; what
// *message was before is overwritten. With a request, *message must stay valid until that is
// complete.
//
// A matched message that is never received is like any other that is not: a small one is dropped
// with its group or world, and the sender of a large one waits for its receive. Small ones that are
// kept for long may make a sender wait, too.
IDIST_API idist_status idist_mprobe(int src, int tag, idist_message *message,
                                    const idist_opts *opts);
IDIST_API idist_status idist_improbe(int src, int tag, bool *found, idist_message *message,
                                     const idist_opts *opts);

// Receives a matched message into buf and empties *message, which with a request must stay valid,
// and must not be used for another probe, until that is complete. Any thread, not only the one that
// has probed, but one at a time for a message. The group is that of the probe, whatever opts.group
// says; opts.plan must be NULL. IDIST_ERR_ARG if *message is empty.
//
// IDIST_ERR_TRUNCATED and IDIST_ERR_MISMATCH are those of idist_recv: buf is untouched, and
// *message keeps the message. If its group has failed, for example because a rank was lost, the
// message is lost, and the call returns the error of the group; if it was freed, IDIST_ERR_STATE.
IDIST_API idist_status idist_mrecv(void *buf, size_t count, idist_dtype dtype,
                                   idist_message *message, const idist_opts *opts);

// Both at once, so that neighbours can exchange data without deadlock. Always blocks: opts.request
// must be NULL, and it is not allowed between idist_group_begin and idist_group_end. The buffers
// are disjoint.
IDIST_API idist_status idist_sendrecv(const void *send, size_t sendcount, int dst, int sendtag,
                                      void *recv, size_t recvcount, int src, int recvtag,
                                      idist_dtype dtype, idist_recv_info *info,
                                      const idist_opts *opts);

// Blocks until the operation is complete, returns its status and empties the request. An empty
// request gives IDIST_OK. Any thread, but one at a time for a request. A request may be copied or
// moved in memory while its operation runs; one of the copies is waited for.
IDIST_API idist_status idist_wait(idist_request *request);

// Does not block. *done says whether the operation is complete; if so, like idist_wait. Requests
// also progress while the program computes.
IDIST_API idist_status idist_test(idist_request *request, bool *done);

// For device memory: work added to this stream (a cudaStream_t) from now on sees the result.
// Empties the request without waiting for the device, only for the host's part of a staged call. A
// later failure is one of the group.
IDIST_API idist_status idist_wait_stream(idist_request *request, void *stream);

// Releases a request without waiting: the request becomes empty and the operation continues. Its
// buffers must stay until the program knows by other means that it is complete. idist_free_group
// and idist_finalize wait for it. If it fails alone, as a receive may, only a warning in the log
// tells. IDIST_ERR_ARG for a request of idist_split_start, which has to be waited for.
IDIST_API idist_status idist_request_free(idist_request *request);

// Ends a receive or a probe, if no message has begun to go to it. Then *cancelled is true, buffer
// and *info stay as they are, and the message that it would have got is there for the next receive.
// Otherwise *cancelled is false, and the receive completes as if this function had not been called.
// Local; does not block.
//
// In both cases the request stays open, and is waited for, tested or freed like any other. If the
// receive was cancelled, idist_wait, idist_test and the waits for several requests return
// IDIST_ERR_CANCELLED at once. Another thread may be waiting for this request (not for a copy of
// it), by itself or among others; its wait ends.
//
// A request that is complete or empty gives IDIST_OK, and *cancelled is false. IDIST_ERR_ARG for
// the request of any other call that is under way, because other ranks already count on it.
// IDIST_ERR_UNSUPPORTED for device memory, and on backends that cannot cancel.
IDIST_API idist_status idist_cancel(idist_request *request, bool *cancelled);

// Waits for all of them, even after a failure, and returns the failure with the lowest index. They
// may belong to different worlds.
IDIST_API idist_status idist_wait_all(idist_request *requests, size_t n);

// Waits until one of them is complete, returns its status and empties it; *index says which one. If
// all are empty, IDIST_OK, and *index is n. They may belong to different worlds; then it looks at
// one world after the other, and may notice a completion up to a millisecond late.
IDIST_API idist_status idist_wait_any(idist_request *requests, size_t n, size_t *index);

// Waits until at least one of them is complete, and completes all that are by then. indices, with
// room for n, gets their positions in ascending order, and *count their number; 0 if all are empty.
// Returns the failure with the lowest index among these.
IDIST_API idist_status idist_wait_some(idist_request *requests, size_t n, size_t *indices,
                                       size_t *count);

// Tests each of them. Does not block. *done says whether all are complete now, also those that were
// complete, and so empty, before. Returns the failure with the lowest index among those that this
// call completes.
IDIST_API idist_status idist_test_all(idist_request *requests, size_t n, bool *done);

// The same for requests that are not contiguous in memory. NULL among the pointers is an empty one.
IDIST_API idist_status idist_wait_all_of(idist_request *const *requests, size_t n);
IDIST_API idist_status idist_wait_any_of(idist_request *const *requests, size_t n, size_t *index);

// Creates an empty plan. The next call with opts.plan is checked as usual, but not made: the plan
// keeps it, in place of an earlier one, with its group, stream and time-out (opts.request is NULL).
// idist_plan_start then makes it as often as the program likes:
//
//     idist_opts opts = {0};
//     idist_plan *plan;
//     idist_plan_create(&plan);
//     opts.plan = plan;
//     idist_all_reduce(x, x, n, IDIST_F32, IDIST_SUM, &opts);
//     for (step = 0; step < n_steps; step++) idist_plan_start(plan, NULL);
//     idist_plan_free(&plan);
//
// Creating, filling and freeing are local. For all calls that have a request form.
//
// The plans of a group that keep the same collective (operation, dtype, count, op and root) are
// numbered in the order in which they are filled, and a number is not used again when its plan is
// freed. So all ranks that have such plans fill them in the same order.
IDIST_API idist_status idist_plan_create(idist_plan **plan);

// Makes the call that the plan keeps; the other ranks may use plans for it or not. Like all calls
// on a group, those of plans are made in the same order on all ranks. If ranks start different
// plans, they get IDIST_ERR_MISMATCH, also where the plans keep the same collective; the text says
// which ones ("by plan 2"). Ranks without a plan may hide that from others until a later call.
// request: as in idist_opts; NULL: blocks. The buffers and *info stay where they were; so do the
// arrays of a v-form and what they hold. Like any call it is complete before the next one may use
// its buffers, so a plan is started again when its request is complete. IDIST_ERR_STATE if the plan
// is empty or its group is gone.
IDIST_API idist_status idist_plan_start(const idist_plan *plan, idist_request *request);

// Frees a plan and sets the pointer to NULL. Calls that it has started go on.
IDIST_API idist_status idist_plan_free(idist_plan **plan);

// Calls that this thread makes between begin and end start at once and complete together in
// idist_group_end, so their order does not matter: exchanges that would deadlock one by one work.
// The calls return when they have started; results are valid after idist_group_end, which returns
// the first failure. A call with opts.request is waited for by idist_wait, not by idist_group_end.
// Calls that have no request form (finalize, the groups, sendrecv, bytes, alloc) return
// IDIST_ERR_STATE in between. Begin and end may be nested; the outermost end waits.
IDIST_API idist_status idist_group_begin(void);
IDIST_API idist_status idist_group_end(void);

//------------------------------------------------------------------------------
// [api:group]  groups
//------------------------------------------------------------------------------

// Creates a group of the listed ranks of the default world: no duplicates, in any order (they are
// sorted). Collective over the world, with the same list on every rank, or else IDIST_ERR_MISMATCH;
// blocks. Ranks that are not listed get a group in which their rank is -1 and on which
// communication returns IDIST_ERR_STATE. *group is NULL on failure, here and below.
IDIST_API idist_status idist_new_group(const int *ranks, int n, idist_group **group);

// Creates a group of the listed ranks of parent (NULL: the default world), in this order, without
// the other ranks: only those listed call it, with the same list and tag, and block until all have.
// Threads of a rank that create groups at the same time use different tags, 0 .. 2^31 - 1 (with
// idist_mpi.h only one thread at a time makes a group). IDIST_ERR_ARG if the caller is not listed.
// If a rank does not come before the time-out of the world (desc.timeout_ms), or has another list
// or tag, those who wait for it get IDIST_ERR_TIMEOUT, and the parent goes on; the next try uses
// another tag.
IDIST_API idist_status idist_new_group_by_members(idist_group *parent, const int *ranks, int n,
                                                  int tag, idist_group **group);

// Creates a group for each color >= 0 of the ranks of parent (NULL: the default world), ordered by
// key, then by rank in parent. Ranks with color < 0 get a group in which their rank is -1.
// Collective over parent; blocks.
IDIST_API idist_status idist_split(idist_group *parent, int color, int key, idist_group **group);

// The same without waiting: *group is set when the request is complete, and must stay until then.
// The ranks go on with it only in calls that wait for this request, or test it. So they wait for
// several splits in the same order, or in any order by idist_wait_all, idist_wait_any or
// idist_test. IDIST_ERR_UNSUPPORTED on backends that block while they make a group (mpi).
IDIST_API idist_status idist_split_start(idist_group *parent, int color, int key,
                                         idist_group **group, idist_request *request);

// Frees a group and sets the pointer to NULL. Each rank that has the group calls it. It does not
// wait for the other ranks, except until calls with opts.stream have started on all of them.
// IDIST_ERR_STATE if requests on the group are pending, IDIST_ERR_ARG for the group of a world, and
// for NULL.
IDIST_API idist_status idist_free_group(idist_group **group);

// After the loss of a rank, creates a group of the live members of `group` (NULL: the default
// world), in the same order. Collective over these; blocks until all of them call it, and detects
// losses that had not been noticed yet. The old group stays failed and is freed like any other.
// IDIST_ERR_UNSUPPORTED on backends that cannot do it.
IDIST_API idist_status idist_shrink(idist_group *group, idist_group **survivors);

// Replaces *flag by the bitwise AND over all live members, the same on each, even in a group that
// has failed: "did everyone succeed?" Collective over the live members; blocks until all of them
// call it. IDIST_ERR_UNSUPPORTED on backends that cannot do it, except in a group of one rank.
IDIST_API idist_status idist_agree(idist_group *group, int *flag);

// Rank in the group, -1 for a non-member, and number of members. NULL: the default world.
IDIST_API int idist_group_rank(const idist_group *group);
IDIST_API int idist_group_size(const idist_group *group);

// The rank in `to` of rank `rank` of `from`, or -1. Both are groups of the same world.
IDIST_API int idist_group_translate(const idist_group *from, int rank, const idist_group *to);

//------------------------------------------------------------------------------
// [api:op]  user-defined reductions and element types
//------------------------------------------------------------------------------

// inout[i] = in[i] (op) inout[i] for i < count; `in` comes from the lower ranks. Must be
// associative. Runs in any thread that is inside idist, including the progress thread, and must not
// call idist. An exception fails the group with IDIST_ERR_CALLBACK or ends the process (THREADS).
typedef void (*idist_op_fn)(const void *in, void *inout, size_t count, idist_dtype dtype,
                            void *arg);

// commutative == false keeps the operands in rank order, at some cost. A local call, but all ranks
// of the world of `group` (NULL: the default world) create their ops in the same order. The op is
// valid in all groups of that world, until it is freed or the world ends. IDIST_ERR_NO_SPACE if 224
// exist.
IDIST_API idist_status idist_op_create(idist_op_fn fn, void *arg, bool commutative,
                                       idist_group *group, idist_op *op);

// SUM of factor * send, with a factor of each rank's own. Floating dtypes only.
IDIST_API idist_status idist_op_create_premul_sum(double factor, idist_group *group, idist_op *op);

// Makes the value available for the next op at once. Does not wait: operations in flight, including
// pending requests, complete with the old op, so fn and arg must stay valid until then.
// IDIST_ERR_ARG if it is no op of this world.
IDIST_API idist_status idist_op_free(idist_op op, idist_group *group);

// An element of nbytes bytes, 1 to 2^22: a struct, a complex number, a small vector. It travels as
// it is, padding included, in every call that takes a dtype; reductions need an op of your own,
// which always gets whole elements. `name`, of which 31 bytes are kept, stands for it in error
// texts.
//
// A local call, but all ranks of the world of `group` (NULL: the default world) create their dtypes
// in the same order, with the same size and name, or else a call with it is an
// IDIST_ERR_MISMATCH. The dtype is valid in all groups of that world, until it is freed or the
// world ends. With it counts are below 2^40. IDIST_ERR_NO_SPACE if 128 exist.
IDIST_API idist_status idist_dtype_create(size_t nbytes, const char *name, idist_group *group,
                                          idist_dtype *dtype);

// Makes the value available for another dtype. Does not wait: operations in flight complete.
// IDIST_ERR_ARG if it is no dtype of this world.
IDIST_API idist_status idist_dtype_free(idist_dtype dtype, idist_group *group);

// inout[i] = in[i] (op) inout[i] for i < count, within this process; needs no world. For the
// built-in ops except AVG. The buffers are disjoint or the same.
IDIST_API idist_status idist_reduce_local(const void *in, void *inout, size_t count,
                                          idist_dtype dtype, idist_op op);

//------------------------------------------------------------------------------
// [api:spawn]  worker processes
//------------------------------------------------------------------------------

// What a worker runs. The result modulo 256 becomes the exit code of the process: 0 for success; no
// other result becomes 0.
typedef int (*idist_worker_fn)(int local_rank, void *arg);

typedef struct idist_workers idist_workers;

// Forks nproc_per_node processes (0: one per core), each of which joins a new world, calls fn,
// finalizes and exits. Blocks until all have ended. IDIST_OK if all returned 0; otherwise, and if
// idist_finalize failed in one (except with IDIST_ERR_PEER_LOST or _ABORTED),
// IDIST_ERR_WORKER_FAILED, with the first failure in desc->report and idist_last_error().
//
// After a first failure the other workers have desc->grace_ms to end by themselves; then they get
// SIGTERM, then SIGKILL. When this process or the calling thread dies, they are killed, unless they
// have changed their user. Nothing else of the calling process changes, neither its signal handlers
// nor its environment. Workers never return to the caller's code and run no atexit handlers.
//
// A worker whose fn throws a C++ exception has failed, and the report says what() where the
// implementation is compiled as C++ with exceptions; compiled as C, std::terminate ends the worker.
// With glibc a worker whose fn calls longjmp to a function of the caller, or pthread_exit, has
// failed, too.
//
// desc->start_method "exec" is for programs that have started threads, opened a GPU or initialised
// MPI. Each worker runs the program anew, with its arguments (as they are now), environment,
// working directory, stdin and signal mask. It goes through main to the same call, with arg as main
// prepares it there, and runs fn in it. In a worker, earlier calls of idist_spawn return IDIST_OK
// at once. So all calls of idist_spawn come from one thread, and not from a worker. A worker that
// does not reach its call within desc->init_timeout_ms has failed.
IDIST_API idist_status idist_spawn(idist_worker_fn fn, void *arg, int nproc_per_node,
                                   const idist_desc *desc);

// Like idist_spawn, but returns when the workers have been started. Finish with idist_spawn_wait in
// the same thread; desc->report must stay valid until then. *workers is NULL on failure, and in
// workers of a later call.
IDIST_API idist_status idist_spawn_start(idist_worker_fn fn, void *arg, int nproc_per_node,
                                         const idist_desc *desc, idist_workers **workers);

// Sets *done if all workers have ended. Never blocks. The steps that follow a first failure are
// taken in this function and in idist_spawn_wait only.
IDIST_API idist_status idist_spawn_poll(idist_workers *workers, bool *done);

// Waits until all workers have ended, frees `workers` and returns what idist_spawn would. After
// timeout_ms milliseconds (< 0: no limit; 0: at once) IDIST_ERR_TIMEOUT, and `workers` stays valid.
// NULL gives IDIST_OK, here, above and below.
IDIST_API idist_status idist_spawn_wait(idist_workers *workers, int timeout_ms);

// Sends a signal (1 .. 64; 0: none) to all workers that are still running.
IDIST_API idist_status idist_spawn_kill(idist_workers *workers, int signal_number);

// Ignite's Parallel: idist_spawn if desc->nproc_per_node is set; otherwise joins the world of the
// launcher, calls fn in this process and finalizes. If fn does not return 0, the world ends at
// once: IDIST_ERR_WORKER_FAILED here, a lost rank for the others, and requests that fn has left
// open must not be used any more. Logs its steps at info level, with the name of fn, for which it
// is a macro.
#define idist_parallel_run(desc, fn, arg) idist_parallel_run_named((desc), (fn), (arg), #fn)
IDIST_API idist_status idist_parallel_run_named(const idist_desc *desc, idist_worker_fn fn,
                                                void *arg, const char *name);

// A task for the two functions below. Returns 0 for success.
typedef int (*idist_task_fn)(void *arg);

// The given rank runs fn first, the others when it is done: "rank 0 downloads, the rest find the
// file". With local, the rank with that local rank on each host runs fn first on its host. If fn
// fails there, the others do not run it, and all get IDIST_ERR_CALLBACK. Collective over
// opts->group; always blocks.
IDIST_API idist_status idist_one_rank_first(idist_task_fn fn, void *arg, int rank, bool local,
                                            const idist_opts *opts);

// Only the given rank of opts->group runs fn. With barrier, the call is collective and blocks: the
// others wait for fn and get its failure, IDIST_ERR_CALLBACK.
IDIST_API idist_status idist_one_rank_only(idist_task_fn fn, void *arg, int rank, bool barrier,
                                           const idist_opts *opts);

//------------------------------------------------------------------------------
// [api:memory]  buffers
//------------------------------------------------------------------------------

// Zeroed memory for communication buffers, aligned to at least 64 bytes. Any rank may call it at
// any time. All ranks of the host map it, so a collective whose buffers are all in such memory
// moves the data directly; this pays from about 16 KiB on. opts->group selects the world; NULL: the
// default one. Without a world, or where ranks share no memory, it is ordinary memory. Does not
// wait for other ranks. NULL on failure (see idist_last_error).
IDIST_API void *idist_alloc(size_t nbytes, const idist_opts *opts);

// Frees memory from idist_alloc, before or after the end of the world. NULL is allowed.
IDIST_API void idist_free(void *ptr);

//------------------------------------------------------------------------------
// [api:store]  the key-value store for rendezvous
//
// Keys are strings of 1 .. 1024 bytes, values have up to 8 MiB. Any thread, also several at once.
// Only idist_store_get and idist_store_wait wait for keys. Time-outs are in milliseconds, 0 means
// the store's own, < 0 none; IDIST_ERR_TIMEOUT names a missing key. IDIST_ERR_PEER_LOST if the
// server is gone. Pointers to results may be NULL, except `ready` and `n`.
//
// Every call may wait for the server. Over a socket it has the store's own time-out to answer, but
// at least 1 s and at most 30 s, also beyond the timeout_ms of the call. If it does not, because it
// was stopped, say, this call and all later ones return IDIST_ERR_TIMEOUT: close the store and open
// it again.
//------------------------------------------------------------------------------

typedef struct idist_store_desc {
    bool server;          // tcp, file: this process owns the table (rank 0, and no other)
    int timeout_ms;       // default of every wait; 0: 5 minutes
    const void *secret;   // as in idist_desc; tcp beyond loopback needs one (or IDIST_INSECURE=1)
    size_t secret_nbytes; // with one, a tcp server listens at that port of all addresses
    idist_allocator allocator;
} idist_store_desc;

// Opens a store, and waits until its server is there. desc may be NULL.
//
//   "tcp://host:port"  one process is the server, the others connect. The wire format is that of
//                      torch's TCPStore, after a mutual authentication. Port 0 on the server picks
//                      a free one, see idist_store_port.
//   "file:///path"     a file that all processes can lock. The server removes it when it closes; a
//                      file left behind by a dead server is recognised and not used. Every change
//                      of a key is appended to it, key and value and 8 bytes, and nothing is taken
//                      away while the server lives; each process reads all of it once. So keep it
//                      to the few KiB per rank of a rendezvous. A process whose requests follow
//                      each other without a pause lets others go first every few milliseconds.
//   "unix://name"      like tcp, within this host, network namespace and user; leaves no file.
//   "mem://"           within this process: share the pointer between threads.
IDIST_API idist_status idist_store_open(const char *url, const idist_store_desc *desc,
                                        idist_store **store);

// A view of `parent` in which every key is preceded by `prefix`. Closing it does not close parent,
// which must outlive it.
IDIST_API idist_status idist_store_prefix(idist_store *parent, const char *prefix,
                                          idist_store **store);

// Closes a store and sets the pointer to NULL. If it is the server, the store ends for all. No
// other thread may be using it.
IDIST_API idist_status idist_store_close(idist_store **store);

// The port of a tcp server; otherwise 0.
IDIST_API int idist_store_port(const idist_store *store);

// Sets the value of a key, whether or not it has one. value: nbytes.
IDIST_API idist_status idist_store_set(idist_store *store, const char *key, const void *value,
                                       size_t nbytes);

// Waits for the key. *nbytes is the size of its value; if that exceeds capacity,
// IDIST_ERR_TRUNCATED, and value is untouched.
IDIST_API idist_status idist_store_get(idist_store *store, const char *key, void *value,
                                       size_t capacity, size_t *nbytes, int timeout_ms);

// Adds delta to a number that is kept as decimal text and starts at 0; *result is the new number.
// IDIST_ERR_ARG, and the value stays, if it is no number or the sum is not between -2^63 + 1 and
// 2^63 - 1.
IDIST_API idist_status idist_store_add(idist_store *store, const char *key, int64_t delta,
                                       int64_t *result);

// Replaces the value by `desired` if it equals `expected`; a missing key equals an empty value.
// Both have up to 4 MiB. IDIST_OK in either case: `value` gets what the key has afterwards, *nbytes
// bytes (IDIST_ERR_TRUNCATED as above).
IDIST_API idist_status idist_store_compare_set(idist_store *store, const char *key,
                                               const void *expected, size_t nexpected,
                                               const void *desired, size_t ndesired, void *value,
                                               size_t capacity, size_t *nbytes);

// Waits until all n keys exist, at most 65536.
IDIST_API idist_status idist_store_wait(idist_store *store, const char *const *keys, size_t n,
                                        int timeout_ms);

// *ready: whether all keys exist now.
IDIST_API idist_status idist_store_check(idist_store *store, const char *const *keys, size_t n,
                                         bool *ready);

// *deleted: whether the key existed.
IDIST_API idist_status idist_store_delete(idist_store *store, const char *key, bool *deleted);

// The number of keys in the whole table, even through a view with a prefix.
IDIST_API idist_status idist_store_num_keys(idist_store *store, size_t *n);

//------------------------------------------------------------------------------
// [api:trace]  a timeline of a run, with a track per rank
//
// IDIST_TRACE=out.json ./app writes a file per rank, and idistrun --trace out.json one file for
// all. Open it in https://ui.perfetto.dev, in chrome://tracing, or in examples/trace.html, which
// needs no network. Calls of idist appear by themselves. A program adds what it computes:
//
//     idist_trace_begin("forward");
//     forward(batch);
//     idist_trace_end();
//
// WHAT IS IN IT
//
// A process per rank, "rank 3 on node7", with one track for each thread that marks or calls
// something: first the thread that joined the world, then "thread 1" and so on. Whatever is in
// flight while a thread goes on (a request from the call to its completion, a bucket of gradients)
// is on tracks of its own below these, as many as it takes for no two to overlap.
//
//     category   what                                         args
//     compute    from idist_trace_begin to idist_trace_end    -
//     call       a blocking call; or, until it is complete,   dtype, count, bytes (of the larger
//                a request or a call between group_begin      buffer), op, root or peer and tag,
//                and group_end                                ranks, seq; status
//     wait       idist_wait, idist_wait_any,                  the call that it waits for; status
//                idist_wait_stream, idist_group_end
//     bucket     what idist_train.h reduces during the        gradients, bytes
//                backward pass
//
// A call on a stream lasts for as long as the host is busy with it. idist_test is not recorded,
// nor are calls that fail before there is a world. seq is the number of the call within its group,
// as in the texts of errors.
//
// THE FILE
//
// A world of 1 writes to the file named by IDIST_TRACE. In a larger world each rank writes a file
// of its own: out.json becomes out.3.json for rank 3. If another live process is writing that
// file, the process id is appended. A process writes one file, from its first world on, for all
// worlds that it joins; the workers of idist_spawn are processes. A child that is merely forked
// writes none.
//
// The file is an array in Chrome's JSON format with an event per line. Events are written through
// a mapping, so the file contains the last events of a rank that was killed or hangs; a call that
// never returned has a begin and no end. The file is valid JSON at any moment except the instant
// in which an event is added. Times are microseconds since 1970, taken from the monotonic clock
// and its distance to the clock of the host at the start: ranks of a host agree, and hosts agree
// as well as NTP makes them.
//
// If the file cannot be written, a warning is logged and the program goes on without.
//
// WHAT IT COSTS
//
// Without IDIST_TRACE a load and a branch per call. With it about a microsecond and 60 to 200
// bytes per event; a call or a mark is two events. Memory is allocated only for a new thread or
// track.
//
// The functions may be called by any thread at any time; without a timeline nothing happens. Names
// are UTF-8 and are copied: up to about 150 bytes of a name and 60 of a category, whole characters
// only.
//------------------------------------------------------------------------------

// Whether this process writes a timeline: IDIST_TRACE is set, and it has joined a world.
IDIST_API bool idist_trace_on(void);

// Work of this thread from begin to end, category "compute". Calls nest; each begin needs its end
// in the same thread.
IDIST_API void idist_trace_begin(const char *name);
IDIST_API void idist_trace_end(void);

// Something that has already happened, from start_ns to end_ns of CLOCK_MONOTONIC. The categories
// "compute", "call" and "wait" go to the track of this thread, so such a span must lie inside or
// beside whatever else is there. Any other category, such as "bucket", has tracks of its own on
// which nothing overlaps. args: NULL or a JSON object, "{\"bytes\": 4096}"; it is left out if it is
// longer than 1,000 bytes.
IDIST_API void idist_trace_span(const char *name, const char *category, int64_t start_ns,
                                int64_t end_ns, const char *args);

//------------------------------------------------------------------------------
// [api:backend]  backends
//------------------------------------------------------------------------------

// A table of functions; src/core/model.h has its contract.
typedef struct idist_backend_api idist_backend_api;

// Adds a backend to those that the worlds of this process choose from, any number of them. The one
// registered last is asked first, and self last. The headers of idist register theirs before main.
// The table must stay valid until the process ends. Any thread; worlds that are open keep theirs.
//
// Registering the same table again does nothing. IDIST_ERR_ARG if backend is NULL, has no name, or
// has the name of another backend; IDIST_ERR_NO_BACKEND if it was compiled against another version
// of idist.h.
IDIST_API idist_status idist_register_backend(const idist_backend_api *backend);

// A world of 1; always available, always last.
IDIST_API const idist_backend_api *idist_self_backend(void);

#ifdef __cplusplus
} // extern "C"

inline idist_dtype idist_dtype_of(const char *) { return IDIST_I8; }
inline idist_dtype idist_dtype_of(const signed char *) { return IDIST_I8; }
inline idist_dtype idist_dtype_of(const unsigned char *) { return IDIST_U8; }
inline idist_dtype idist_dtype_of(const bool *) { return IDIST_U8; }
inline idist_dtype idist_dtype_of(const short *) { return IDIST_I16; }
inline idist_dtype idist_dtype_of(const unsigned short *) { return IDIST_U16; }
inline idist_dtype idist_dtype_of(const int *) { return IDIST_I32; }
inline idist_dtype idist_dtype_of(const unsigned int *) { return IDIST_U32; }
inline idist_dtype idist_dtype_of(const long *) {
    return sizeof(long) == 8 ? IDIST_I64 : IDIST_I32;
}
inline idist_dtype idist_dtype_of(const unsigned long *) {
    return sizeof(long) == 8 ? IDIST_U64 : IDIST_U32;
}
inline idist_dtype idist_dtype_of(const long long *) { return IDIST_I64; }
inline idist_dtype idist_dtype_of(const unsigned long long *) { return IDIST_U64; }
inline idist_dtype idist_dtype_of(const float *) { return IDIST_F32; }
inline idist_dtype idist_dtype_of(const double *) { return IDIST_F64; }
inline idist_dtype idist_dtype_of(const idist_f32_i64 *) { return IDIST_F32_I64; }
inline idist_dtype idist_dtype_of(const idist_f64_i64 *) { return IDIST_F64_I64; }
inline idist_dtype idist_dtype_of(const idist_i32_i64 *) { return IDIST_I32_I64; }
inline idist_dtype idist_dtype_of(const idist_i64_i64 *) { return IDIST_I64_I64; }
#define IDIST_DTYPE(ptr) (::idist_dtype_of(ptr))
#endif

#endif // IDIST_H

// Only here for the API? Stop reading.

#if defined(IDIST_IMPLEMENTATION) && !defined(IDIST_IMPLEMENTATION_DONE)
#define IDIST_IMPLEMENTATION_DONE

#undef IDIST_CHECKED
#undef idist_all_gatherv
#undef idist_gatherv
#undef idist_scatterv
#undef idist_all_to_allv
#undef idist_reduce_scatterv
#undef idist_broadcast_bytes
#undef idist_all_gather_bytes
#undef idist_broadcast_alloc
#undef idist_all_gather_alloc
#undef idist_iprobe
#undef idist_improbe
#undef idist_test
#undef idist_cancel
#undef idist_test_all
#undef idist_wait_any
#undef idist_wait_any_of
#undef idist_wait_some

#include "base/begin.h"

#include "os/system.h"
#include "os/unwind.h"
#include "os/clock.h"
#include "os/random.h"
#include "os/process.h"
#include "os/cpu.h"
#include "os/thread.h"
#include "os/file.h"
#include "os/memory.h"
#include "os/wake.h"
#include "os/poll.h"
#include "os/socket.h"
#include "os/beacon.h"
#include "os/segment.h"

#ifdef IDIST__OS_BODIES
#include IDIST__OS_BODIES
#else
#include "os/linux/unwind.h"
#include "os/linux/clock.h"
#include "os/linux/random.h"
#include "os/linux/process.h"
#include "os/linux/cpu.h"
#include "os/linux/thread.h"
#include "os/linux/file.h"
#include "os/linux/memory.h"
#include "os/linux/wake.h"
#include "os/linux/poll.h"
#include "os/linux/socket.h"
#include "os/linux/beacon.h"
#include "os/linux/segment.h"
#endif

#include "base/fail.h"
#include "base/text.h"
#include "base/mem.h"
#include "base/window.h"
#include "base/log.h"
#include "base/dtype.h"
#include "base/reduce_op.h"
#include "base/isa.h"
#include "base/small_float.h"
#include "base/reduce.h"
#include "base/hash.h"

#include "net/address.h"
#include "net/meet.h"
#include "net/interface.h"
#include "net/connection.h"
#include "net/auth.h"
#include "net/secret.h"
#include "net/pending.h"

#include "store/table.h"
#include "store/file_store.h"
#include "store/wire.h"
#include "store/multicast.h"
#include "store/server.h"
#include "store/client.h"
#include "store/store.h"

#include "launch/env.h"
#include "launch/slurm.h"
#include "launch/pmi.h"
#include "launch/tf_config.h"
#include "launch/detect.h"
#include "launch/where.h"
#include "launch/draw.h"
#include "launch/config.h"

#include "core/kind.h"
#include "core/model.h"
#include "core/backend.h"
#include "core/world.h"
#include "core/fingerprint.h"
#include "core/explain.h"
#include "core/task.h"
#include "core/together.h"
#include "core/group.h"
#include "core/timer.h"
#include "core/wait.h"
#include "core/progress_thread.h"
#include "core/extent.h"
#include "core/check.h"
#include "core/call.h"
#include "core/matching.h"
#include "core/self.h"

#include "calls/choose_backend.h"
#include "calls/life.h"
#include "calls/get.h"
#include "calls/collective.h"
#include "calls/p2p.h"
#include "calls/request.h"
#include "calls/several.h"
#include "calls/new_group.h"
#include "calls/split.h"
#include "calls/user_op.h"
#include "calls/alloc.h"
#include "calls/one_rank.h"

#include "spawn/worker.h"
#include "spawn/rerun.h"
#include "spawn/watch.h"
#include "spawn/start.h"
#include "spawn/report.h"
#include "spawn/parallel.h"

#include "trace/trace_file.h"
#include "trace/trace_track.h"
#include "trace/trace_call.h"

#include "base/end.h"

#endif // IDIST_IMPLEMENTATION

// The ring backend. A compiler without __has_include expects the file.
#if defined(IDIST_IMPLEMENTATION) && !defined(IDIST_NO_RING)
#ifndef __has_include
#include "idist_ring.h"
#elif __has_include("idist_ring.h")
#include "idist_ring.h"
#endif
#endif

// A pointer of another type is only a warning in C, until gcc 14 and clang 16. Where the parameter
// is a transparent union, that pointer is an error, except a void pointer and NULL. The functions
// themselves have no such parameters, because gcc has a pedantic warning for each call. Instead
// each macro casts the result to the type of an unevaluated call of a prototype with such
// parameters.
#if defined(__GNUC__) && !defined(__cplusplus) && !defined(IDIST_CHECKED)
#ifndef IDIST_POINTERS
#define IDIST_POINTERS

typedef union idist__sizes {
    const size_t *must_be_size_t;
} idist__sizes __attribute__((__transparent_union__));

typedef union idist__size_out {
    size_t *must_be_size_t;
} idist__size_out __attribute__((__transparent_union__));

typedef union idist__bool_out {
    bool *must_be_bool;
} idist__bool_out __attribute__((__transparent_union__));

idist_status idist__all_gatherv_types(const void *send, size_t sendcount, void *recv,
                                      idist__sizes recvcounts, idist__sizes recvdispls,
                                      idist_dtype dtype, const idist_opts *opts);
idist_status idist__gatherv_types(const void *send, size_t sendcount, void *recv,
                                  idist__sizes recvcounts, idist__sizes recvdispls,
                                  idist_dtype dtype, int root, const idist_opts *opts);
idist_status idist__scatterv_types(const void *send, idist__sizes sendcounts,
                                   idist__sizes senddispls, void *recv, size_t recvcount,
                                   idist_dtype dtype, int root, const idist_opts *opts);
idist_status idist__all_to_allv_types(const void *send, idist__sizes sendcounts,
                                      idist__sizes senddispls, void *recv, idist__sizes recvcounts,
                                      idist__sizes recvdispls, idist_dtype dtype,
                                      const idist_opts *opts);
idist_status idist__reduce_scatterv_types(const void *send, void *recv, idist__sizes recvcounts,
                                          idist_dtype dtype, idist_op op, const idist_opts *opts);
idist_status idist__broadcast_bytes_types(void *buf, size_t capacity, idist__size_out nbytes,
                                          int root, const idist_opts *opts);
idist_status idist__all_gather_bytes_types(const void *send, size_t nbytes, void *buf,
                                           size_t capacity, idist__size_out sizes,
                                           const idist_opts *opts);
idist_status idist__broadcast_alloc_types(const void *send, size_t count, idist_dtype dtype,
                                          int root, void **recv, idist__size_out recvcount,
                                          idist_dtype *recvdtype, const idist_opts *opts);
idist_status idist__all_gather_alloc_types(const void *send, size_t count, idist_dtype dtype,
                                           void **recv, idist__size_out recvcounts,
                                           const idist_opts *opts);
idist_status idist__iprobe_types(int src, int tag, idist__bool_out found, idist_recv_info *info,
                                 const idist_opts *opts);
idist_status idist__improbe_types(int src, int tag, idist__bool_out found, idist_message *message,
                                  const idist_opts *opts);
idist_status idist__test_types(idist_request *request, idist__bool_out done);
idist_status idist__cancel_types(idist_request *request, idist__bool_out cancelled);
idist_status idist__test_all_types(idist_request *requests, size_t n, idist__bool_out done);
idist_status idist__wait_some_types(idist_request *requests, size_t n, idist__size_out indices,
                                    idist__size_out count);
idist_status idist__wait_any_types(idist_request *requests, size_t n, idist__size_out index);
idist_status idist__wait_any_of_types(idist_request *const *requests, size_t n,
                                      idist__size_out index);
#endif // IDIST_POINTERS

// clang-format off
#define IDIST_CHECKED(name, args) \
    ((__typeof__(__extension__ idist__##name##_types args))(idist_##name) args)
#define idist_all_gatherv(...) IDIST_CHECKED(all_gatherv, (__VA_ARGS__))
#define idist_gatherv(...) IDIST_CHECKED(gatherv, (__VA_ARGS__))
#define idist_scatterv(...) IDIST_CHECKED(scatterv, (__VA_ARGS__))
#define idist_all_to_allv(...) IDIST_CHECKED(all_to_allv, (__VA_ARGS__))
#define idist_reduce_scatterv(...) IDIST_CHECKED(reduce_scatterv, (__VA_ARGS__))
#define idist_broadcast_bytes(...) IDIST_CHECKED(broadcast_bytes, (__VA_ARGS__))
#define idist_all_gather_bytes(...) IDIST_CHECKED(all_gather_bytes, (__VA_ARGS__))
#define idist_broadcast_alloc(...) IDIST_CHECKED(broadcast_alloc, (__VA_ARGS__))
#define idist_all_gather_alloc(...) IDIST_CHECKED(all_gather_alloc, (__VA_ARGS__))
#define idist_iprobe(...) IDIST_CHECKED(iprobe, (__VA_ARGS__))
#define idist_improbe(...) IDIST_CHECKED(improbe, (__VA_ARGS__))
#define idist_test(...) IDIST_CHECKED(test, (__VA_ARGS__))
#define idist_cancel(...) IDIST_CHECKED(cancel, (__VA_ARGS__))
#define idist_test_all(...) IDIST_CHECKED(test_all, (__VA_ARGS__))
#define idist_wait_some(...) IDIST_CHECKED(wait_some, (__VA_ARGS__))
#define idist_wait_any(...) IDIST_CHECKED(wait_any, (__VA_ARGS__))
#define idist_wait_any_of(...) IDIST_CHECKED(wait_any_of, (__VA_ARGS__))
// clang-format on
#endif

/*
MIT License

Copyright (c) 2026 idist contributors

Permission is hereby granted, free of charge, to any person obtaining a copy
of this software and associated documentation files (the "Software"), to deal
in the Software without restriction, including without limitation the rights
to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
copies of the Software, and to permit persons to whom the Software is
furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all
copies or substantial portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
SOFTWARE.
*/
