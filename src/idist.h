/* idist.h - v0.2.0 - embeddable distributed computing - MIT license

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

    Under a launcher, call the same function between idist_initialize(NULL) and idist_finalize().
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

    The implementation follows. It consists of the files of src/, ordered so that each file uses
    only files before it. ARCHITECTURE.md shows the path of a call through them.

    Copy this file together with idist_ring.h, the backend that connects ranks. Where
    IDIST_IMPLEMENTATION is defined, this file includes idist_ring.h if both are in the same folder.
    The other headers are optional. Copy and include the ones that you need:

      idist_mpi.h      the MPI backend
      idist_nccl.h     device memory through NCCL, CUDA IPC or pinned memory
      idist_xla.h      device memory of XLA: TPUs, and other devices with a PJRT plug-in
      idist_train.h    data-parallel training: samplers, loaders, gradient averaging, metrics
      idist.hpp        this API for C++: exceptions, spans, owners of handles, lambdas as workers

WHAT IT IS

    A header with ranks, collectives, send and receive, barriers, groups, worker processes,
    rendezvous and data-parallel helpers. It gives a C or C++ program what ignite.distributed,
    torch.distributed and Horovod give a Python program. The same source runs alone, spawns its own
    workers, or runs under a launcher that sets RANK and WORLD_SIZE. Ranks on one host communicate
    through shared memory, ranks on different hosts over TCP.

    It is not a task scheduler, a parameter server or a serialization format: it moves arrays of
    numbers and bytes. It is not meant for the open internet: connections are authenticated, but
    nothing is encrypted. All ranks must run the same build on machines of the same byte order.

BUILD AND LINK

    Linux. C99 or later, or C++11 or later. gcc, clang or nvcc. Needs only libc and pthread
    (-lpthread with glibc before 2.34).

        cc app.c                                    IDIST_IMPLEMENTATION defined in app.c
        cc -DIDIST_IMPLEMENTATION app.c             or on the command line, for one source file
        cc -c idist.c && ar rcs libidist.a idist.o  idist.c: the two lines of DO THIS

    Compile with optimization: the reduction loops are in these headers. Under -std=c99 or -std=c11,
    include idist.h before the system headers or define _DEFAULT_SOURCE. Otherwise the system
    headers hide declarations that the implementation needs, and an #error says so.

OPTIONS

    macro                  where          effect
    IDIST_IMPLEMENTATION   one file       compiles the implementation there
    IDIST_NO_RING          one file       leaves out the ring backend, in the file that defines
                                          IDIST_IMPLEMENTATION; worlds of 1 and the backends of
                                          other headers remain
    IDIST_API              everywhere     decorates each declaration; default: extern

CONCEPTS

    A world is a set of ranks 0 .. n-1. Each rank is a process or, with idist_open, a thread.
    idist_initialize joins the default world. NULL as a group stands for the default world. A group
    is a subset of the ranks of a world, in an order of its own. A rank that is passed to a call is
    a rank of the group that the call runs on. Error texts and log lines name ranks of the world.

    All ranks of a group call a collective in the same order and with matching arguments. A call
    blocks by default. With idist_opts.request it returns at once. Without a launcher,
    idist_initialize makes a world of 1, in which every call works and returns the rank's own
    contribution. Before idist_initialize, the getters answer as in a world of 1, and communication
    returns IDIST_ERR_STATE.

    Results are reproducible. The same input on the same number of ranks gives the same bits in
    every run, and on every rank that receives the result. The order of operands depends only on
    sizes and ranks. Another number of ranks, or another message size, may round differently.

    On x86 and 64-bit ARM, reductions, conversions and user ops run in the floating-point mode that
    a program starts with. The calling thread's mode (rounding, traps, or the flush-to-zero that a
    library built with -ffast-math sets) does not matter.

BACKENDS

    self   a world of 1. Always available.
    ring   any number of ranks; included by this header.
    mpi    the ranks of an MPI communicator; needs idist_mpi.h, which lists what MPI cannot do.

    gloo   an alias of ring, for programs that ask for torch.distributed's gloo.
    nccl   ring with the device backend nccl, as in Ignite; needs idist_nccl.h.
    xla    ring with an XLA device; needs idist_xla.h. Ignite's name xla-tpu means xla with a TPU.

    idist_nccl.h and idist_xla.h add device memory to self, ring and mpi. A program has the backends
    whose headers it includes in the file that defines IDIST_IMPLEMENTATION. It can add others with
    idist_register_backend. The world uses the backend that desc.backend or IDIST_BACKEND names.
    Otherwise it uses the first backend that accepts the configuration, in this order: the one
    registered last, ..., mpi, ring, self.

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
        PMI_ID, PMI_PORT                          MPICH, Intel MPI: mpiexec -pmi-port
        SLURM_PROCID, SLURM_STEP_NUM_TASKS        only in a step of srun
        TF_CONFIG
        PMIX_RANK, PMIX_NAMESPACE                 IDIST_ERR_ENV, because the size is missing
        none of them: a world of 1

    An empty variable counts as unset. IDIST_LAUNCHER selects the launcher whose variables are read:
    none, idist, env, torchrun, indexed, horovodrun, openmpi, mvapich2, jsrun, pals, flux, hydra,
    slurm, tf_config.

    IDIST_ERR_ENV names the variable at fault when

      - only half of a pair is set
      - a value is not a number
      - the rank is not below the size
      - RANK and WORLD_SIZE contradict Slurm
      - TF_CONFIG is not valid JSON (valid JSON without a cluster counts as unset)
      - nothing is set, but an init method other than env:// (see below) says that there are ranks
        to meet

    Half of a pair is not an error for

      - JOB_COMPLETION_INDEX, which pods of other kinds have as well
      - PMI_ID or PMI_PORT, which count only together
      - a world size where ranks are assigned (see below)

    In a step of srun, RANK and WORLD_SIZE may repeat Slurm's numbers (RANK=$SLURM_PROCID
    WORLD_SIZE=$SLURM_NTASKS). On one node, they may also come from a launcher that started more
    ranks than the step has tasks. Any other values contradict Slurm, unless LOCAL_WORLD_SIZE or
    torchrun's variables show that a launcher inside the step set them. In case of a contradiction,
    IDIST_LAUNCHER selects the values that count.

    The ranks meet at desc.store, or else at desc.init_method, or else at IDIST_INIT_METHOD:

        env://                MASTER_ADDR and MASTER_PORT (the default). Without these variables,
                              what the launcher offers: a local socket on one host, torchrun's
                              agent, PMI-1, or the first host of a Slurm step
        tcp://host:port       the given host and port
        tcp://239.x.y.z:port  a multicast group (224 to 239) where ranks of one subnet find rank 0
        file:///path          a file on a file system that all ranks share and that supports locks;
                              ranks can be assigned from the file (see below)

    Any other text gives IDIST_ERR_ENV, or IDIST_ERR_ARG if it is in desc.init_method, even in a
    world of 1.

    If LOCAL_WORLD_SIZE says that all ranks are on this host, or if the address is a loopback
    address, the ranks meet at a local socket named after the port. Then no TCP port is opened.

        for r in 0 1 2; do
            RANK=$r WORLD_SIZE=3 LOCAL_RANK=$r MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 ./app &
        done; wait

    At file:///path, processes without a rank are assigned one from the file. A process has no rank
    if only IDIST_WORLD_SIZE or WORLD_SIZE is set, or if desc.rank is -1. The first process becomes
    rank 0, and each rank is assigned once. Which process gets which rank differs from run to run.
    Local ranks follow from the hosts, as in any world.

        for i in 1 2 3; do
            IDIST_INIT_METHOD=file:///tmp/meet WORLD_SIZE=3 ./app &
        done; wait

    Rank 0 removes the file when all ranks have joined. The same processes may then make another
    world at the same path. A file left over from ranks that died is not used: the next rank 0
    replaces it, whether ranks are assigned or given.

    While the world is forming, a surplus process gets IDIST_ERR_RANK_TAKEN, with path, group and
    size in the text; the other processes do not notice. A process that arrives later is the first
    process of the next world. If a process dies after it was assigned its rank, the others get
    IDIST_ERR_PEER_LOST. If a rank is not assigned in time, IDIST_ERR_TIMEOUT names the rank.

    Either all processes must be given a rank, or none: processes that differ from rank 0 get
    IDIST_ERR_ENV. If several worlds start at one path at the same time, IDIST_GROUP_NAME
    (desc.group_name) keeps them apart.

    Other variables follow. For time-outs, 0 means the default and -1 means none.

        IDIST_TIMEOUT_MS, IDIST_INIT_TIMEOUT_MS
        IDIST_TRANSPORT      auto, socket or tcp
        IDIST_ALGO           auto, latency, bandwidth, chunked or remote
        IDIST_SHM_MIB        shared memory per rank in MiB
        IDIST_GROUP_NAME     the name of a world at file:///path
        IDIST_HOSTID         ranks with equal values share a host
        IDIST_ADDR           the address or name at which other hosts reach this host. Other hosts
                             retry the lookup of a name until it succeeds or the time is up. This
                             host looks the name up only if its own ranks do not share memory
                             (IDIST_TRANSPORT=tcp)
        IDIST_SOCKET_IFNAME  network interfaces that other hosts can reach: prefixes (eth,ib), whole
                             names (=eth0), or all interfaces except some (^docker). If unset,
                             NCCL_SOCKET_IFNAME is used, with the same syntax, then
                             GLOO_SOCKET_IFNAME, a list of whole names. If none of them is set,
                             idist uses the interface that leads to rank 0, or else the first
                             interface. See idist_show_config for the address and the interface
        IDIST_SOCKETS        number of TCP connections between two ranks, for networks that limit
                             each connection; see desc.sockets
        IDIST_BIND=core      keeps each rank on one processor
        IDIST_CHECK=0        the mpi backend does not compare calls (the ring always does)
        IDIST_START_METHOD   fork or exec
        IDIST_LOG            see LOGGING
        IDIST_TRACE          the file of a timeline; see [api:trace]
        IDIST_LOST_FILE      a file that a rank creates if it lost another rank, or could not join
                             because of another rank. Launchers set it to learn whether a rank
                             failed only because another rank failed
        LOCAL_RANK, LOCAL_WORLD_SIZE   optional

    idist reads the environment and never changes it. Workers that idist_spawn starts by exec have
    IDIST_SPAWN in their environment.

    idist_spawn forks. Call it before the program starts threads, opens a GPU or initializes MPI.
    Otherwise use start_method "exec" or a launcher.

BUFFERS

    Buffers belong to the caller and may have any address, aligned or not. Send and receive buffers
    are disjoint, or overlap exactly as the in-place rule of the call says (NCCL's rules). A send
    buffer is never written, except in place. If a call fails, the contents of its receive buffers
    are undefined. The library keeps no pointer to a buffer after the call, or idist_wait, returns.

ERRORS

    Functions return idist_status. After a failure, idist_last_error() tells the calling thread what
    happened, to whom, and what to do about it. The text stays until another call fails:

        all_reduce #42 (F32 x 1048576, SUM): rank 3 on node7 was lost: its process ended, or closed
        the connection without idist_finalize

    There are three kinds of errors:

        of a call   IDIST_ERR_ARG, _STATE, _TRUNCATED, _UNSUPPORTED ...: the call had no effect.
        of a group  IDIST_ERR_PEER_LOST, _MISMATCH, _TIMEOUT (except of a receive), _ABORTED: all
                    ranks of the group get the same status, from the present call or the next one.
                    The group cannot be used again.
        of init     IDIST_ERR_ENV, _NO_BACKEND, _AUTH ...: there is no world.

    If a rank dies, or exits without idist_finalize, every rank that is blocked in a call finds out
    within milliseconds. Between hosts, the connection to the dead rank breaks. Within a host, a
    waiting rank checks every 10 to 30 ms (less often if more than 32 ranks wait there). A machine
    that disappears without closing its connections is detected by the time-out.

    In a world of more than 64 ranks, not every rank is connected to every other rank (see
    idist_ring.h). In such a world, the ranks that are in calls pass on any failure of a group,
    including idist_abort. A rank that makes its call long after the others have left may report
    that one of those ranks was lost, instead of the original cause.

    If a rank leaves after the world has failed, groups that need that rank fail with the status of
    the world. The text begins with the cause of the world's failure.

    Ranks that call different operations get IDIST_ERR_MISMATCH. The text names two of them and the
    field that differs (operation, dtype, op, root, count, group, sequence). A rank whose own part
    is already complete gets the error from its next call that waits for others, or at the latest
    from its 16th call after the mismatch.

    A deadlock of two ranks is also a mismatch: calls on different groups, a receive against a
    collective, two sends, or two receives. Longer cycles, and calls on two groups over several
    hosts, may end only by the time-out. If the dtype of a message is not the one that the receive
    expects, only the receive fails, and the group remains usable.

TIME-OUTS AND ABORT

    Every call has a deadline: idist_opts.timeout_ms, or else desc.timeout_ms, or else 30 minutes.
    IDIST_ERR_TIMEOUT names the ranks that did not enter the call, or entered it and stopped
    responding, and where they were last seen. If such a rank waits for another rank, the text
    follows the chain to its end (not with idist_mpi.h). The text also says which rank got no
    answer, because a rank that is silent to one rank may still answer other ranks (when a path
    between two hosts is cut). A call that takes longer than a minute logs a warning with the same
    names.

    idist_abort, called from any thread, ends all calls on a group at once.

    Joining a world has a deadline of its own, 5 minutes. If a rank dies after it has reached the
    store, the other ranks get IDIST_ERR_PEER_LOST within a second.

THREADS

    Every function may be called from any thread. Calls on a group must be made in the same order on
    all ranks. If two threads use one group, guard the calls with your own lock, and hold it from
    idist_group_begin to idist_group_end. Or give each thread its own group.

    Callbacks (user ops, logger, allocator) run in whichever thread is inside the library. The first
    non-blocking call of a world starts one thread, which advances requests while the program
    computes. idist_finalize ends that thread. The thread blocks all signals, and the library
    installs no signal handlers.

    No call is a cancellation point: a thread that is cancelled (pthread_cancel) in a call ends
    after the call returns. Use idist_abort to end the call at once.

    A callback must not leave idist by longjmp. What happens if a callback throws a C++ exception
    depends on how the implementation is compiled. Compiled as C++:

      op              fails the group with IDIST_ERR_CALLBACK on all ranks
      allocator       counts as out of memory
      logger          its line goes to stderr
      idist_train.h   the function fails with IDIST_ERR_CALLBACK

    If the implementation is compiled as C, or without exceptions, the process ends by
    std::terminate, and the other ranks lose it. An exception in an op over MPI always ends the
    process.

    After fork() the child has no world, and its calls return IDIST_ERR_STATE. The child should exec
    or exit before its parent does. As long as it holds the descriptors of its parent open, the
    other ranks do not notice the death of the parent.

MEMORY

    desc.allocator provides all memory except the memory from idist_alloc, shared memory, the
    buffers and programs of idist_xla.h, some records of idist_nccl.h, timelines, the handles of
    worlds and groups, and a few short-lived buffers. idist_train.h uses malloc, except where a desc
    of idist_train.h has an allocator. Handles of closed worlds (up to 16) and of their groups (up
    to 256) are kept, about 340 KiB in all. That is why a call with a stale handle returns
    IDIST_ERR_STATE (see idist_close). In a shared library, the handles are kept until it is
    unloaded.

    A ring world takes 32 KiB, and another 32 KiB per rank. Messages that arrive before their
    receive take up to 2 MiB per rank (5 MiB if they are all empty, for the records of the
    messages). Large reductions over sockets use scratch memory of up to twice the message size.

    Ranks on one host share an anonymous file of up to 5 MiB per rank (desc.shm_nbytes), which
    disappears with the last of them. About half of the file is reserved when the ranks join. The
    rest is reserved as groups are made; a group that gets none uses messages instead. If there is
    no memfd, or a limit on memory, address space or file size forbids the file, the ranks use local
    sockets. A log line at info level says why.

    Large buffers are read directly from the memory of the other process if the kernel permits this
    and the reads are fast. The ranks measure the speed when they join. A message up to 1 MiB goes
    through the file if both ranks are waiting in their calls. A program that changes its user after
    joining, or restricts its own system calls (seccomp), must set IDIST_TRANSPORT=socket.

    Memory from idist_alloc is also part of a shared file, which takes address space only as memory
    is allocated. The other ranks of the host map the memory in their next large collective and read
    it in place from then on. If a limit keeps a rank from mapping more, data is copied.

    A program that locks its memory (mlockall, MCL_FUTURE) also locks the memory that idist maps:
    desc.shm_nbytes for each rank of the host, the memory from idist_alloc, and the stacks of
    idist's threads. If a limit on locked memory (ulimit -l) is too low for the shared file, the
    ranks use local sockets. Log lines, idist_show_config and error texts name the limit.

WAITING

    A waiting rank polls for at most half a millisecond if the host has a core for each rank. If
    there are more ranks than cores, it yields the core to other ranks instead. After that it sleeps
    and uses practically no CPU time.

LOGGING

    IDIST_LOG=error|warn|info|debug sets the level; the default is warn. Lines go to desc.logger, or
    else to stderr. The library never prints to stdout. A failure that a status reports is logged at
    info level, so a program that prints idist_last_error() does not print it twice.

SECURITY

    Every connection begins with a mutual handshake that proves knowledge of a secret (HMAC-SHA256).
    idist_spawn creates a secret by itself. Otherwise the secret comes from desc.secret, the file
    IDIST_SECRET_FILE (mode 600) or IDIST_SECRET. Local sockets also check the user, and shared
    memory is passed through them.

    Ranks of several hosts listen at all addresses of their host. Without a secret they refuse to
    listen (IDIST_ERR_NO_SECRET) unless IDIST_INSECURE=1; then each rank listens at one address
    only. In a world of more than 64 ranks, the ranks listen until the world is closed, otherwise
    only while they join.

    A rank that cannot prove that it knows the secret fails at once. Rank 0 logs a warning about
    such a process and keeps waiting, because a stranger must not be able to end the job. The data
    itself is neither encrypted nor signed: on a network you do not trust, use a tunnel.

WRITING A BACKEND

    Fill in an idist_backend_api (its contract is in src/core/model.h) and pass it to
    idist_register_backend. The backend receives each call as one struct and ends it with
    idist__task_complete. tests/compile/backend.c is a complete backend.

LIMITS

    Linux only. A ring world is meant for at most a few hundred ranks: each rank keeps memory for
    every other rank (see MEMORY), and rank 0 serves all ranks while they meet. A world has up to
    224 user-defined ops and 128 user-defined dtypes. Tags are 0 .. 2^31-1. A ring world does not
    shrink: after a loss, finalize and start again.

HISTORY

    See CHANGELOG.md. The license is at the end of this file.
*/
#if defined(IDIST_IMPLEMENTATION) && !defined(_DEFAULT_SOURCE)
// Declares clock_gettime, sockets and the like with -std=c99, too.
#define _DEFAULT_SOURCE
#endif
#if defined(IDIST_IMPLEMENTATION) && !defined(_FILE_OFFSET_BITS)
// Supports files above 2 GiB and inode numbers above 2^32 where a long has 32 bits.
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

// All status codes: name, value, meaning. Success is 0, errors are negative.
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

// Returns the name of a status ("IDIST_ERR_TIMEOUT"), or its general meaning. Never NULL.
IDIST_API const char *idist_status_name(idist_status status);
IDIST_API const char *idist_status_string(idist_status status);

// Describes the last call in this thread that failed: operation, ranks, cause, and what to do about
// it. Returns "" if no call has failed yet. A call that succeeds leaves the text alone, even if one
// of its attempts failed. The text is valid until the next failure in this thread.
IDIST_API const char *idist_last_error(void);

// Sets the text that idist_last_error returns in this thread, up to 1023 bytes. A text of NULL sets
// "". Meant for a function that idist_spawn or idist_parallel_run runs: if the function then
// returns a failure, the error text and the idist_report of that call quote the text, up to 400
// bytes in the report.
IDIST_API void idist_set_last_error(const char *text);

//------------------------------------------------------------------------------
// [api:types]  element types, reductions, options of a call
//------------------------------------------------------------------------------

// Type of an element. Integers are reduced exactly, modulo 2^bits. F16 is IEEE binary16, BF16 the
// upper half of a float. F8E4M3 and F8E5M2 are the OCP formats (__nv_fp8_e4m3, __nv_fp8_e5m2 in
// CUDA). Sums and products of these four are computed in float and rounded once, at the end. In the
// 8-bit formats, values that are too large, including infinity, become the largest finite number
// (448, 57344). idist_dtype_create adds elements of any other kind.
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
    IDIST_DTYPE_USER = 64, // idist_dtype_create returns values above this one
    IDIST_DTYPE_LAST = 0x7fffffff
} idist_dtype;

// Elements of the pair dtypes.
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

// How two elements are combined. The order of the operands depends on the algorithm, never on
// timing, so every rank gets the same bits in every run. MIN and MAX yield NaN if any operand is
// NaN. The bitwise and logical ops take integers only. The logical ops yield 0 or 1. AVG is SUM
// divided by the number of ranks (integers: rounded toward zero).
//
// MINLOC and MAXLOC take the pair dtypes, which take no other built-in op. They yield the pair with
// the smallest or largest value and, among equal values, the lowest index. A NaN beats every
// number. idist_op_create returns further values, starting at IDIST_OP_USER.
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

// Returns the number of bytes per element, or 0 for an invalid dtype.
IDIST_API size_t idist_dtype_size(idist_dtype dtype);

// Returns the name of a dtype or an op, such as "F32" or "SUM". Never NULL. The name of a dtype or
// op that the program created is "user dtype" or "user op".
IDIST_API const char *idist_dtype_name(idist_dtype dtype);
IDIST_API const char *idist_op_name(idist_op op);

// A group: some ranks of a world in a fixed order. The default world is the group NULL.
typedef struct idist_group idist_group;

// A small key-value table that all ranks can reach.
typedef struct idist_store idist_store;

// An operation in flight. Put the address of a request into idist_opts.request (its old contents do
// not matter), then call idist_wait or idist_test. Until one of them reports completion, do not
// write to the buffers of the operation, and do not read its receive buffers. A request of all
// zeros is empty, and waiting for it returns IDIST_OK at once. A call that fails also leaves the
// request empty. A call that does not support requests leaves the request unchanged.
typedef struct idist_request {
    void *impl; // private
} idist_request;

// A call that is prepared once and made many times; see idist_plan_create.
typedef struct idist_plan idist_plan;

// Options of a call, the last argument of every communication call. Passing NULL or all zeros means
// the default world, a blocking call, and the world's time-out.
typedef struct idist_opts {
    // Group of the call: its roots, sources and destinations are ranks of this group (NULL means
    // the default world).
    idist_group *group;

    // If NULL, the call blocks until it is complete. Otherwise the call returns at once, and
    // idist_wait or idist_test completes it.
    idist_request *request;

    // For device buffers, a cudaStream_t. The operation starts after the work that is in the stream
    // now. Without a request, work added to the stream later sees the result. See idist_nccl.h.
    void *stream;

    // Deadline of the call in milliseconds (0 means desc.timeout_ms of the world, < 0 means none).
    int timeout_ms;

    // If not NULL, the call is stored in this plan instead of being made. See idist_plan_create.
    idist_plan *plan;
} idist_opts;

#define IDIST_ANY_SOURCE (-1)
#define IDIST_ANY_TAG (-1)

// Description of a received message.
typedef struct idist_recv_info {
    int source;        // rank in the group
    int tag;           // of the message
    size_t count;      // elements in it
    idist_dtype dtype; // of its elements; IDIST_DTYPE_COUNT if this rank has not created it
} idist_recv_info;

// A message that idist_mprobe or idist_improbe has matched, for idist_mrecv. All zeros means empty.
typedef struct idist_message {
    idist_recv_info info; // description; stays after idist_mrecv
    idist_group *group;   // private; NULL if the message is empty
    uint64_t world, ctx;  // private; of the group
    int64_t number;       // private
} idist_message;

// IDIST_DTYPE(ptr) is the dtype of the elements that a pointer points to, found at compile time, in
// C11 and C++. For example: idist_all_reduce(x, x, n, IDIST_DTYPE(x), IDIST_SUM, NULL). bool is U8,
// char is I8.
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

// Receiver of log lines. Any thread that calls idist, and the progress thread, may call log_fn, but
// only one at a time. The function log_fn must not call idist. The line has no newline and names
// rank and host. If log_fn is NULL, lines go to stderr.
typedef struct idist_logger {
    void (*log_fn)(idist_log_level level, const char *line, void *user);
    void *user;
} idist_logger;

// Source of memory. Set both functions or neither; any thread may call them. alloc_fn returns
// memory aligned as malloc aligns it, or NULL.
typedef struct idist_allocator {
    void *(*alloc_fn)(size_t nbytes, void *user);
    void (*free_fn)(void *ptr, void *user);
    void *user;
} idist_allocator;

// Report of idist_spawn about the first worker that failed.
typedef struct idist_report {
    int rank;       // in the world of the workers; -1 if no worker failed
    int exit_code;  // -1 if a signal ended the worker
    int signal;     // 0 if the worker exited
    char text[512]; // one sentence, with the worker's own last error if there is one
} idist_report;

// Description of a world. All zeros are valid: then the environment decides, and without it the
// world has one rank. A field that is set overrides the environment (the variables named below),
// which overrides the built-in default.
typedef struct idist_desc {
    // "ring", "mpi", "self", the name of another registered backend, or a list such as "mpi,ring".
    // The world uses the first backend of a list that accepts the configuration. The name "gloo" is
    // an alias of "ring". The name "nccl" means "ring" with device_backend "nccl", and the names
    // "xla" and "xla-tpu" mean "ring" with device "xla" and "tpu", unless those fields are set.
    // Environment: IDIST_BACKEND.
    const char *backend;

    // "env://", "tcp://host:port", "tcp://239.x.y.z:port" or "file:///path". All but the first need
    // world_size and, except for file:///path, also rank, which come from this struct, the
    // environment or MPI. If they are missing, the status is IDIST_ERR_ARG. Environment:
    // IDIST_INIT_METHOD.
    const char *init_method;

    // Store for the rendezvous, instead of an init method. The caller keeps ownership. Several
    // worlds may begin at one store, one after another, if each rank takes part in all of them. If
    // the number of ranks changes or a rank missed a world, each world needs a view of its own
    // (idist_store_prefix). All of its ranks must know the prefix.
    idist_store *store;

    // World size and rank. If both are 0 they come from the environment. Otherwise both are used,
    // and rank must be 0 .. world_size - 1, or -1 to be assigned (see LAUNCHING). With rank -1, a
    // world_size of 0 means IDIST_WORLD_SIZE or WORLD_SIZE.
    int world_size;
    int rank;

    // For idist_parallel_run: number of workers on this host, or 0 to join the world of the
    // launcher. (idist_spawn takes the number as an argument.)
    int nproc_per_node;

    // For idist_parallel_run on several hosts: the number of hosts, and the index of this host.
    int nnodes;
    int node_rank;

    // Host of rank 0 and the rendezvous port there. Environment: MASTER_ADDR, MASTER_PORT.
    const char *master_addr;
    int master_port;

    // Deadline of each call in milliseconds (0 means 30 minutes, < 0 means none). Environment:
    // IDIST_TIMEOUT_MS.
    int timeout_ms;

    // Deadline for all ranks to join, in milliseconds (0 means 5 minutes, < 0 means none).
    // Environment: IDIST_INIT_TIMEOUT_MS. If a process ends while the ranks join, the others fail
    // at once. There are three exceptions, in which the others wait until this deadline:
    //
    //   - The process ends before it has told rank 0 which rank it is.
    //   - Rank 0 ends before the others have reached it.
    //   - The ranks meet at the store of torchrun, whose agent then ends them.
    int init_timeout_ms;

    // Secret that all ranks of the job share, at least 16 bytes. Environment: IDIST_SECRET_FILE,
    // IDIST_SECRET.
    const void *secret;
    size_t secret_nbytes;

    // "auto": shared memory within a host, TCP between hosts. "socket": local sockets within a
    // host. "tcp": TCP everywhere. Environment: IDIST_TRANSPORT.
    const char *transport;

    // "auto". For tests also "latency" or "bandwidth" (messages), or "chunked" (shared memory in
    // chunks, even for small messages). Or "remote": as "auto", but large buffers are read from the
    // other processes even where such reads are slow. Environment: IDIST_ALGO.
    const char *algorithm;

    // "none", or "core" to keep each rank on one of the processors it may use. Environment:
    // IDIST_BIND.
    const char *bind;

    // Limit of the shared memory of each rank in bytes, not counting idist_alloc (0 means 5 MiB).
    // Below about 400 KiB collectives are messages, and a log line at warn level says so.
    // Environment: IDIST_SHM_MIB (in MiB).
    size_t shm_nbytes;

    // Identifier of the host: ranks with equal ids share a host (NULL means boot id, user and
    // network namespace). Environment: IDIST_HOSTID.
    const char *host_id;

    // For idist_mpi.h: an MPI_Comm *, the communicator whose ranks form the world (NULL means
    // MPI_COMM_WORLD). It is duplicated, and the caller keeps ownership.
    const void *mpi_comm;

    idist_allocator allocator;
    idist_logger logger;

    // For idist_spawn: milliseconds that the other workers get to end after a first failure (0
    // means 2000).
    int grace_ms;

    // For idist_spawn: do not end the other workers after a failure.
    bool keep_going;

    // For idist_spawn: filled in if a worker failed. May be NULL.
    idist_report *report;

    // "cpu", "cuda", "cuda:1", "tpu", "tpu:1", "xla" or "xla:1". Without a number the device is the
    // local rank modulo the number of devices. The default, NULL, uses devices if all ranks have
    // one: "cuda" if the program includes idist_nccl.h, "tpu" or "xla" if the program includes
    // idist_xla.h. Otherwise it is "cpu". Environment: IDIST_DEVICE.
    const char *device;

    // For idist_spawn: "fork", or "exec" to run the program anew. Environment: IDIST_START_METHOD.
    const char *start_method;

    // "nccl", "ipc", "xla" or "staged". The default, NULL or "auto", is the best that is available
    // (see idist_nccl.h and idist_xla.h). Ignored without a device backend. Environment:
    // IDIST_DEVICE_BACKEND.
    const char *device_backend;

    // An ncclComm_t * over the ranks of the world. The caller owns it until the world fails, which
    // aborts it.
    const void *nccl_comm;

    // An ncclConfig_t * for the communicators that idist creates. It is copied, but strings in it
    // must stay valid until the world is closed. May be NULL.
    const void *nccl_config;

    // A PJRT_Api * and a PJRT_Client * that the program has opened, for idist_xla.h: set both or
    // neither. The caller owns them, and they must stay until every world and idist_xla_buffer of
    // the process has ended. Only one client of a process can have a TPU.
    const void *xla_api;
    void *xla_client;

    // Give idist's own work priority on the device. Environment: IDIST_HIGH_PRIORITY_STREAM=1.
    bool high_priority_stream;

    // Number of TCP connections between two ranks, at most 8, over which messages are spread. The
    // highest number that any rank asks for is used. The default, 0, is one connection, or more if
    // the round trip is so long that one connection cannot fill the network. Environment:
    // IDIST_SOCKETS.
    int sockets;

    // For init_method "file:///path": worlds of different names meet at one path, each in a file of
    // its own, path.NAME. A name has up to 63 letters, digits and ._-. Without a name, the file is
    // path itself. Other methods ignore it. Environment: IDIST_GROUP_NAME.
    const char *group_name;
} idist_desc;

//------------------------------------------------------------------------------
// [api:life]  initialize, finalize, and the getters
//
// The getters, idist_get_rank to idist_show_config, never fail. Outside a world they answer as in a
// world of 1. Any thread. Unless the function says otherwise, their strings are valid until
// idist_finalize or, outside a world, for as long as the thread lives.
//------------------------------------------------------------------------------

// Joins the default world: finds out rank and size, meets the other ranks and connects to them.
// Collective over all ranks of the job; blocks until all have joined (IDIST_ERR_TIMEOUT names the
// ranks that did not). desc may be NULL. Returns IDIST_ERR_STATE if this process has joined
// already.
IDIST_API idist_status idist_initialize(const idist_desc *desc);

// Leaves the default world. Collective; blocks until the other ranks call it as well and have
// completed the calls that involve this rank, then frees everything.
//
// Call it before the process exits, even after a last barrier. A call that is complete on this rank
// may still be under way on other ranks. If this process just exits, the call returns
// IDIST_ERR_PEER_LOST there.
//
// If requests are pending or an idist_group_begin is open, idist_finalize returns IDIST_ERR_STATE
// and does nothing. In all other cases the world and its groups are gone afterwards, even if the
// call returns the error that the world failed with. A later call on one of those groups returns
// IDIST_ERR_STATE, and idist_free_group only sets the pointer to NULL.
//
// No other thread may begin a call meanwhile. Calls in which other threads are still blocked end
// with IDIST_ERR_ABORTED. A collective of the world ends with IDIST_ERR_MISMATCH instead, because
// idist_finalize is a different collective.
//
// After a failure of the world, idist_finalize does not wait for the other ranks. Groups that the
// failure does not concern remain usable: a call that this rank has completed completes on the
// other members, too. A call that needs this rank fails there with the status and the text of the
// world's failure. With idist_mpi.h these groups fail at once.
IDIST_API idist_status idist_finalize(void);

// Returns true between idist_initialize and idist_finalize.
IDIST_API bool idist_is_initialized(void);

IDIST_API int idist_get_rank(void);           // rank of the caller in the default world
IDIST_API int idist_get_world_size(void);     // number of ranks in the default world
IDIST_API int idist_get_local_rank(void);     // index among the ranks of this host, in rank order
IDIST_API int idist_get_nproc_per_node(void); // number of ranks on this host
IDIST_API int idist_get_nnodes(void);         // number of hosts
IDIST_API int idist_get_node_rank(void);      // index of this host, in order of lowest rank

// Returns the name of the backend: "self", "ring", "mpi", or another registered name.
IDIST_API const char *idist_backend(void);

// Returns the device of this rank, such as "cpu", "cuda:0", "tpu:0" or "xla:0".
IDIST_API const char *idist_device(void);

// Returns the device backend: "none"; with idist_nccl.h "nccl", "ipc" or "staged"; with idist_xla.h
// "xla" or "staged".
IDIST_API const char *idist_device_backend(void);

// Returns the name of this host.
IDIST_API const char *idist_hostname(void);

// Returns what started the ranks, such as "none", "spawn", "torchrun", "env" or "openmpi". Before
// idist_initialize, returns what the environment indicates.
IDIST_API const char *idist_launcher(void);

// Returns the backends in this program, in order of preference, such as "mpi,ring,self". The string
// is valid until this thread calls the function again.
IDIST_API const char *idist_available_backends(void);

// Describes the world, the program and the host, with one "name: value" per line. Lists the
// configuration of the world and the backends of the program (MPI and NCCL if it includes their
// headers). Also lists what the host gives this rank: cores, limits and interfaces. The line "on
// this host" says how the ranks of the host exchange data and, if not by shared memory, why. The
// string is valid until this thread calls the function again.
IDIST_API const char *idist_show_config(void);

// Ends all pending and later calls on the group with IDIST_ERR_ABORTED, on all its ranks (NULL
// means the default world). Any thread; does not block. A group that has already failed keeps its
// status. Returns IDIST_ERR_STATE on a rank that is not a member.
IDIST_API idist_status idist_abort(idist_group *group);

// Joins a further, independent world. Several worlds may be open at once, in any thread. Sets
// *world to the group of all its ranks, for idist_opts.group, or to NULL on failure. Collective
// over the ranks of that world. One thread may open worlds directly one after the other at the same
// address. Close the world with idist_close.
IDIST_API idist_status idist_open(const idist_desc *desc, idist_group **world);

// Leaves a world that idist_open joined, as idist_finalize leaves the default world. Sets the
// pointer to NULL, unless the world stays open. Copies of the handle become invalid, and so do the
// groups of that world: calls on them return IDIST_ERR_STATE. After 16 more worlds or 256 more
// groups, a stale handle may be the handle of a new one. Returns IDIST_ERR_ARG if *world is not
// such a world.
IDIST_API idist_status idist_close(idist_group **world);

//------------------------------------------------------------------------------
// [api:coll]  collectives
//
// All ranks of the group make the same call in the same order, with the same count, dtype, op and
// root. If they do not, every rank gets IDIST_ERR_MISMATCH, which names two ranks and the field
// that differs. If a rank dies, the others get IDIST_ERR_PEER_LOST. If a rank does not call, they
// get IDIST_ERR_TIMEOUT. After any of these errors, every call on the group returns the same error
// at once. IDIST_ERR_ARG and IDIST_ERR_STATE are local: nothing was sent, and the group remains
// usable.
//
// Counts are in elements. In the rules, n is the number of ranks of the group and r the rank of the
// caller in the group. Send and receive buffers are disjoint, or overlap as the in-place rule says;
// each rank chooses for itself. A count may be 0, and then buffers may be NULL. Any thread may
// call, but the calls must have the same order on all ranks.
//
// Without opts.request a call blocks until it is complete on this rank: the send buffer may be
// written, and the receive buffer holds the result. Other ranks may still be in the call, or may
// not have entered it yet. The numbers after "send:" and "recv:" are elements on each rank.
//------------------------------------------------------------------------------

// recv[i] = op over all ranks of send[i], on every rank, with the same bits.
// send: count. recv: count. In place: send == recv.
IDIST_API idist_status idist_all_reduce(const void *send, void *recv, size_t count,
                                        idist_dtype dtype, idist_op op, const idist_opts *opts);

// recv[i] = op over all ranks of send[i], on root only. On other ranks recv is not touched and may
// be NULL.
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

// recv[k*count + i] = send[i] of rank k, on root only. On other ranks recv is not touched and may
// be NULL.
// send: count. recv: n*count, on root. In place, on root: send == recv + r*count.
IDIST_API idist_status idist_gather(const void *send, void *recv, size_t count, idist_dtype dtype,
                                    int root, const idist_opts *opts);

// recv[i] = send[r*count + i] of root.
// send: n*count, on root; on other ranks it may be NULL. recv: count.
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
// larger buffer. If displs is NULL, the blocks follow each other. Both arrays have n entries. The
// count of the elements that go from rank a to rank b must be the same on a and b. The arrays, like
// the buffers, must stay valid until the operation is complete. Blocks that are received must not
// overlap.
//
// Both arrays are size_t. In C, gcc and clang reject arrays of int, which MPI takes, with an error
// and not only a warning. They also reject a pointer to int where another call stores a size_t or a
// bool, such as *index of idist_wait_any and *done of idist_test. For this purpose, each of these
// functions is also a macro in C. Its name without parentheses, as in a function pointer, is still
// the function.

// recv[recvdispls[k] + i] = send[i] of rank k, on every rank.
// send: sendcount == recvcounts[r]. recv: up to the end of the last block.
// In place: send == recv + recvdispls[r]. All ranks pass the same recvcounts; recvdispls may
// differ.
IDIST_API idist_status idist_all_gatherv(const void *send, size_t sendcount, void *recv,
                                         const size_t *recvcounts, const size_t *recvdispls,
                                         idist_dtype dtype, const idist_opts *opts);

// recv[recvdispls[k] + i] = send[i] of rank k, on root only. On other ranks recv, recvcounts and
// recvdispls are ignored. send: sendcount == recvcounts[r] of root.
// In place, on root: send == recv + recvdispls[r].
IDIST_API idist_status idist_gatherv(const void *send, size_t sendcount, void *recv,
                                     const size_t *recvcounts, const size_t *recvdispls,
                                     idist_dtype dtype, int root, const idist_opts *opts);

// recv[i] = send[senddispls[r] + i] of root. On other ranks send, sendcounts and senddispls are
// ignored. recv: recvcount == sendcounts[r] of root.
// In place, on root: recv == send + senddispls[r].
IDIST_API idist_status idist_scatterv(const void *send, const size_t *sendcounts,
                                      const size_t *senddispls, void *recv, size_t recvcount,
                                      idist_dtype dtype, int root, const idist_opts *opts);

// recv[i] = op over all ranks of send[d + i]. Block r begins at d, the sum of the recvcounts before
// recvcounts[r]. All ranks pass the same recvcounts.
// send: the sum of all recvcounts. recv: recvcounts[r]. In place: recv == send + d.
IDIST_API idist_status idist_reduce_scatterv(const void *send, void *recv, const size_t *recvcounts,
                                             idist_dtype dtype, idist_op op,
                                             const idist_opts *opts);

// Exchanges elements with every rank k, including the caller: sends sendcounts[k] elements at send
// + senddispls[k], and receives recvcounts[k] elements at recv + recvdispls[k]. Two ranks that
// exchange elements must pass the same dtype; other ranks may pass another one.
// In place: send == recv. Then sendcounts and senddispls are ignored and may be NULL. The elements
// from rank k replace the same number of elements that go to rank k. The call copies the buffer
// first, up to the end of the last block.
IDIST_API idist_status idist_all_to_allv(const void *send, const size_t *sendcounts,
                                         const size_t *senddispls, void *recv,
                                         const size_t *recvcounts, const size_t *recvdispls,
                                         idist_dtype dtype, const idist_opts *opts);

// The next two functions send bytes and strings whose size the receivers do not know. They always
// block: opts.request must be NULL, and they are not allowed between idist_group_begin and
// idist_group_end.

// Copies the *nbytes bytes in buf of root to buf of all ranks, which holds up to capacity bytes,
// and sets *nbytes on every rank. Returns IDIST_ERR_TRUNCATED on a rank whose buf is too small:
// *nbytes is the size needed, buf is untouched, and the group remains usable.
IDIST_API idist_status idist_broadcast_bytes(void *buf, size_t capacity, size_t *nbytes, int root,
                                             const idist_opts *opts);

// Concatenates the bytes of all ranks in buf, in rank order. The number of bytes from rank k is
// sizes[k] (n entries).
// send: nbytes, which may differ between ranks; not in place.
// Returns IDIST_ERR_TRUNCATED on a rank whose capacity is below the total: sizes is set, buf is
// untouched, and the group remains usable.
IDIST_API idist_status idist_all_gather_bytes(const void *send, size_t nbytes, void *buf,
                                              size_t capacity, size_t *sizes,
                                              const idist_opts *opts);

// The result of idist_broadcast_alloc and idist_all_gather_alloc is allocated: *recv points to host
// memory, which idist_free frees. A zero byte follows the elements, so that text can be printed. On
// failure *recv is NULL. Both functions always block: opts.request must be NULL, and they are not
// allowed between idist_group_begin and idist_group_end. If a rank cannot allocate the memory, the
// group fails with IDIST_ERR_NO_MEMORY.

// Gives every rank, including root, a copy of the count elements at send of root. Sets *recvcount
// to their number and *recvdtype to their dtype, as in idist_recv_info. On other ranks send, count
// and dtype are ignored. recvdtype may be NULL.
IDIST_API idist_status idist_broadcast_alloc(const void *send, size_t count, idist_dtype dtype,
                                             int root, void **recv, size_t *recvcount,
                                             idist_dtype *recvdtype, const idist_opts *opts);

// Concatenates the elements of all ranks, in rank order. The number of elements from rank k is
// recvcounts[k] (n entries). All ranks pass the same dtype.
// send: count, which may differ between ranks.
IDIST_API idist_status idist_all_gather_alloc(const void *send, size_t count, idist_dtype dtype,
                                              void **recv, size_t *recvcounts,
                                              const idist_opts *opts);

//------------------------------------------------------------------------------
// [api:p2p]  send and receive, requests
//
// dst and src are ranks of the group, and may be the caller's own. Messages from one rank to
// another with the same tag arrive in the order in which they were sent. A send may return before
// the receiver asks for the message (up to several KiB), or only afterwards; do not rely on either
// behavior. In a world of more than 64 ranks, the first message to a rank may wait until that rank
// makes a call on the same world. Tags are 0 .. 2^31 - 1.
//
// A receive that times out before a message arrives ends with IDIST_ERR_TIMEOUT, and the group
// remains usable. A send of a larger message that times out also fails the group, because the
// message was already announced to the receiver.
//------------------------------------------------------------------------------

// Sends count elements to rank dst. Blocks until buf may be written to.
IDIST_API idist_status idist_send(const void *buf, size_t count, idist_dtype dtype, int dst,
                                  int tag, const idist_opts *opts);

// Receives a message of at most count elements into buf; blocks until the message has arrived.
// Describes the message in *info. If info is not NULL, it must stay valid until the operation is
// complete. The source may be IDIST_ANY_SOURCE and the tag IDIST_ANY_TAG (which also matches
// messages meant for later receives).
//
// If the message is longer than count, returns IDIST_ERR_TRUNCATED; if it has another dtype,
// returns IDIST_ERR_MISMATCH. Then *info describes the message, buf is untouched, and the message
// stays. The next receive with that source and tag gets it, so pass info->count and info->dtype to
// that receive.
IDIST_API idist_status idist_recv(void *buf, size_t count, idist_dtype dtype, int src, int tag,
                                  idist_recv_info *info, const idist_opts *opts);

// Waits until there is a message that idist_recv would take with this src and tag, and describes
// the message in *info. The message stays. Receives that were posted earlier take precedence. In
// all other respects (opts.request, time-out, lost ranks) a probe is like a receive. Does not see
// messages from device memory that do not pass through the host.
IDIST_API idist_status idist_probe(int src, int tag, idist_recv_info *info, const idist_opts *opts);

// Probes for a message without waiting; see idist_probe. Sets *found to true if there is one, and
// describes it in *info (info may be NULL). Not allowed with opts.request, or between
// idist_group_begin and idist_group_end.
IDIST_API idist_status idist_iprobe(int src, int tag, bool *found, idist_recv_info *info,
                                    const idist_opts *opts);

// Probes for a message and reserves it. From then on, other receives and probes do not find the
// message; only idist_mrecv with this *message (not with a copy of it) receives it. So several
// threads may probe and receive with IDIST_ANY_SOURCE, and each gets the message that it probed.
// The function idist_mprobe waits for a message, like idist_probe. The function idist_improbe does
// not wait; found and opts are as in idist_iprobe.
//
// message->info describes the message. The old contents of *message are overwritten. With a
// request, *message must stay valid until the request is complete. A matched message that is never
// received is treated like any other message that is never received. A small one is dropped with
// its group or world, and the sender of a large one waits for its receive. Small messages that are
// kept for long may make a sender wait, too.
IDIST_API idist_status idist_mprobe(int src, int tag, idist_message *message,
                                    const idist_opts *opts);
IDIST_API idist_status idist_improbe(int src, int tag, bool *found, idist_message *message,
                                     const idist_opts *opts);

// Receives a matched message into buf and empties *message. With a request, *message must stay
// valid, and must not be used for another probe, until the request is complete. Any thread may
// receive the message, not only the thread that probed, but only one thread at a time. The group is
// the group of the probe, whatever opts.group says. opts.plan must be NULL. Returns IDIST_ERR_ARG
// if *message is empty.
//
// Returns IDIST_ERR_TRUNCATED and IDIST_ERR_MISMATCH as idist_recv does: buf is untouched, and
// *message keeps the message. If the group has failed, for example because a rank was lost, the
// message is lost, and the call returns the error of the group. If the group was freed, the call
// returns IDIST_ERR_STATE.
IDIST_API idist_status idist_mrecv(void *buf, size_t count, idist_dtype dtype,
                                   idist_message *message, const idist_opts *opts);

// Sends and receives at the same time, so that neighbors can exchange data without deadlock. Always
// blocks: opts.request must be NULL, and the call is not allowed between idist_group_begin and
// idist_group_end. The buffers are disjoint.
IDIST_API idist_status idist_sendrecv(const void *send, size_t sendcount, int dst, int sendtag,
                                      void *recv, size_t recvcount, int src, int recvtag,
                                      idist_dtype dtype, idist_recv_info *info,
                                      const idist_opts *opts);

// Blocks until the operation is complete, returns its status and empties the request. Returns
// IDIST_OK for an empty request. Any thread may wait, but only one thread at a time for the same
// request. A request may be copied or moved in memory while its operation runs; wait for only one
// of the copies.
IDIST_API idist_status idist_wait(idist_request *request);

// Sets *done to true if the operation is complete, and then returns its status and empties the
// request, as idist_wait does. Does not block. Requests also progress while the program computes.
IDIST_API idist_status idist_test(idist_request *request, bool *done);

// Makes a stream (a cudaStream_t) wait for an operation on device memory: work added to the stream
// from now on sees the result. Empties the request. Does not wait for the device, only for the
// host's part of a staged call (see idist_nccl.h). A later failure fails the group.
IDIST_API idist_status idist_wait_stream(idist_request *request, void *stream);

// Detaches a request without waiting: the request becomes empty and the operation continues. The
// buffers must stay valid until the program knows by other means that the operation is complete.
// idist_free_group and idist_finalize wait for the operation. If the operation fails but its group
// does not, as may happen with a receive, only a warning in the log says so. Returns IDIST_ERR_ARG
// for a request of idist_split_start, which must be waited for.
IDIST_API idist_status idist_request_free(idist_request *request);

// Cancels a receive or a probe, unless it has already matched a message. Then *cancelled is true,
// buffer and *info stay as they are, and the next receive can get the message that would have
// matched. Otherwise *cancelled is false, and the receive completes as if this function had not
// been called. Local; does not block.
//
// In both cases the request stays open: wait for it, test it or free it like any other request. If
// the receive was cancelled, idist_wait, idist_test and the waits for several requests return
// IDIST_ERR_CANCELLED at once. Another thread may be waiting for this request (not for a copy of
// it), alone or among others; its wait ends.
//
// If the request is complete or empty, returns IDIST_OK and sets *cancelled to false. Returns
// IDIST_ERR_ARG for the request of any other call that is under way, because other ranks already
// count on the call. Returns IDIST_ERR_UNSUPPORTED for device memory, and on backends that cannot
// cancel.
IDIST_API idist_status idist_cancel(idist_request *request, bool *cancelled);

// Waits for all n requests, even after a failure, and returns the failure with the lowest index.
// The requests may belong to different worlds.
IDIST_API idist_status idist_wait_all(idist_request *requests, size_t n);

// Waits until one of the requests is complete, returns its status and empties it. *index is the
// index of that request. If all requests are empty, returns IDIST_OK and sets *index to n. The
// requests may belong to different worlds. In that case, the function looks at one world after the
// other, and may notice a completion up to a millisecond late.
IDIST_API idist_status idist_wait_any(idist_request *requests, size_t n, size_t *index);

// Waits until at least one of the requests is complete, and empties every request that is complete
// at that time. Writes the positions of these requests to indices (n entries), in ascending order,
// and their number to *count. The number is 0 if all requests are empty. Returns the failure with
// the lowest index among them.
IDIST_API idist_status idist_wait_some(idist_request *requests, size_t n, size_t *indices,
                                       size_t *count);

// Tests each of the requests. Does not block. *done is true if all requests are complete now,
// including requests that were complete, and so empty, before. Returns the failure with the lowest
// index among the requests that this call completes.
IDIST_API idist_status idist_test_all(idist_request *requests, size_t n, bool *done);

// Waits like idist_wait_all or idist_wait_any, for requests that are not contiguous in memory. A
// NULL pointer counts as an empty request.
IDIST_API idist_status idist_wait_all_of(idist_request *const *requests, size_t n);
IDIST_API idist_status idist_wait_any_of(idist_request *const *requests, size_t n, size_t *index);

// Creates an empty plan. The next call with opts.plan is checked as usual, but not made. Instead
// the plan stores the call with its group, stream and time-out, in place of an earlier call. The
// opts.request of the call must be NULL. After that, idist_plan_start makes the call as often as
// the program likes:
//
//     idist_opts opts = {0};
//     idist_plan *plan;
//     idist_plan_create(&plan);
//     opts.plan = plan;
//     idist_all_reduce(x, x, n, IDIST_F32, IDIST_SUM, &opts);
//     for (step = 0; step < n_steps; step++) idist_plan_start(plan, NULL);
//     idist_plan_free(&plan);
//
// Creating, filling and freeing a plan are local. Every call that has a request form can be
// planned.
//
// Plans of a group that store the same collective (operation, dtype, count, op and root) are
// numbered in the order of filling. A number is not used again when its plan is freed. So all ranks
// that have such plans must fill them in the same order.
IDIST_API idist_status idist_plan_create(idist_plan **plan);

// Makes the call that the plan stores. The other ranks may make the call with or without a plan.
// Plans follow the rule of all calls on a group: make their calls in the same order on all ranks.
// If ranks start different plans, they get IDIST_ERR_MISMATCH, even if the plans store the same
// collective; the text says which plans ("by plan 2"). Ranks without a plan may hide the mismatch
// from others until a later call.
//
// The request is used as in idist_opts; if it is NULL, the call blocks. The buffers and *info must
// stay where they were, and so must the arrays of a v-form with their contents. A call may use the
// buffers of an earlier call only after the earlier call is complete. So start a plan again only
// when its request is complete. Returns IDIST_ERR_STATE if the plan is empty or its group is gone.
IDIST_API idist_status idist_plan_start(const idist_plan *plan, idist_request *request);

// Frees a plan and sets the pointer to NULL. Calls that the plan has started continue.
IDIST_API idist_status idist_plan_free(idist_plan **plan);

// Between begin and end, the calls of this thread only start and return, and idist_group_end
// completes all of them together. So their order does not matter: exchanges that would deadlock one
// by one work. Results are valid after idist_group_end, which returns the first failure. Wait for a
// call that has opts.request with idist_wait; idist_group_end does not wait for such a call. Calls
// that have no request form (finalize, the groups, sendrecv, bytes, alloc) return IDIST_ERR_STATE
// in between. Begin and end may be nested; the outermost end waits.
IDIST_API idist_status idist_group_begin(void);
IDIST_API idist_status idist_group_end(void);

//------------------------------------------------------------------------------
// [api:group]  groups
//------------------------------------------------------------------------------

// Creates a group of the listed ranks of the default world. The list has no duplicates and may be
// in any order; the group is sorted by rank. Collective over the world; blocks. If the list differs
// between ranks, fails with IDIST_ERR_MISMATCH. A rank that is not listed gets a group in which its
// rank is -1 and on which communication returns IDIST_ERR_STATE. On failure *group is NULL.
IDIST_API idist_status idist_new_group(const int *ranks, int n, idist_group **group);

// Creates a group of the listed ranks of parent (NULL: the default world), in this order, without
// the other ranks. Only the listed ranks call it, with the same list and tag, and block until all
// of them have called. Threads of a rank that create groups at the same time must use different
// tags, 0 .. 2^31 - 1. (With idist_mpi.h only one thread at a time may make a group.) Returns
// IDIST_ERR_ARG if the caller is not listed. On failure *group is NULL.
//
// If a rank has another list or tag, or does not call before the time-out of the world
// (desc.timeout_ms), the waiting ranks get IDIST_ERR_TIMEOUT. The parent remains usable; use
// another tag for the next attempt.
IDIST_API idist_status idist_new_group_by_members(idist_group *parent, const int *ranks, int n,
                                                  int tag, idist_group **group);

// Creates a group for each color >= 0 of the ranks of parent (NULL: the default world), ordered by
// key, then by rank in parent. Ranks with color < 0 get a group in which their rank is -1.
// Collective over parent; blocks. On failure *group is NULL.
IDIST_API idist_status idist_split(idist_group *parent, int color, int key, idist_group **group);

// Begins idist_split and does not wait. *group is set when the request is complete, and must stay
// valid until then. The split makes progress only while every member waits for, or tests, its
// request. So wait for several splits in the same order on all ranks, or in any order by
// idist_wait_all, idist_wait_any or idist_test. Returns IDIST_ERR_UNSUPPORTED on backends that
// block while they make a group (mpi).
IDIST_API idist_status idist_split_start(idist_group *parent, int color, int key,
                                         idist_group **group, idist_request *request);

// Frees a group and sets the pointer to NULL. Each rank that has the group calls it. Does not wait
// for the other ranks, except until they have started the calls that this rank made with
// opts.stream. Returns IDIST_ERR_STATE if requests on the group are pending. Returns IDIST_ERR_ARG
// for the group of a world, and for NULL.
IDIST_API idist_status idist_free_group(idist_group **group);

// Creates a group of the live members of `group` (NULL: the default world), in the same order,
// after the loss of a rank. Collective over the live members; blocks until all of them call it, and
// detects losses that had not been noticed yet. The old group stays failed; free it like any other
// group. Returns IDIST_ERR_UNSUPPORTED on backends that cannot shrink. On failure *survivors is
// NULL.
IDIST_API idist_status idist_shrink(idist_group *group, idist_group **survivors);

// Replaces *flag by the bitwise AND over all live members, the same on each, even in a group that
// has failed. It answers "did everyone succeed?". Collective over the live members; blocks until
// all of them call it. Returns IDIST_ERR_UNSUPPORTED on backends that cannot agree, except in a
// group of one rank.
IDIST_API idist_status idist_agree(idist_group *group, int *flag);

// Returns the caller's rank in the group (-1 for a non-member), or the number of members. With
// NULL, answers for the default world.
IDIST_API int idist_group_rank(const idist_group *group);
IDIST_API int idist_group_size(const idist_group *group);

// Returns the rank in `to` of rank `rank` of `from`, or -1 if there is none. Both are groups of the
// same world.
IDIST_API int idist_group_translate(const idist_group *from, int rank, const idist_group *to);

//------------------------------------------------------------------------------
// [api:op]  user-defined reductions and element types
//------------------------------------------------------------------------------

// A user-defined reduction: inout[i] = in[i] (op) inout[i] for i < count. `in` comes from the lower
// ranks. The reduction must be associative. The function runs in any thread that is inside idist,
// including the progress thread, and must not call idist. An exception fails the group with
// IDIST_ERR_CALLBACK or ends the process (see THREADS).
typedef void (*idist_op_fn)(const void *in, void *inout, size_t count, idist_dtype dtype,
                            void *arg);

// Creates an op. If commutative is false, the operands stay in rank order, at some cost. A local
// call, but all ranks of the world of `group` (NULL: the default world) must create their ops in
// the same order. The op is valid in all groups of that world, until the op is freed or the world
// ends. Returns IDIST_ERR_NO_SPACE if 224 ops exist.
IDIST_API idist_status idist_op_create(idist_op_fn fn, void *arg, bool commutative,
                                       idist_group *group, idist_op *op);

// Creates an op for the SUM of factor * send, where each rank has its own factor. Floating-point
// dtypes only.
IDIST_API idist_status idist_op_create_premul_sum(double factor, idist_group *group, idist_op *op);

// Frees an op and makes its value available for the next op at once. Does not wait: operations in
// flight, including pending requests, complete with the old op, so fn and arg must stay valid until
// then. Returns IDIST_ERR_ARG if `op` is not an op of this world.
IDIST_API idist_status idist_op_free(idist_op op, idist_group *group);

// Creates a dtype for an element of nbytes bytes, 1 to 2^22: a struct, a complex number, a small
// vector. The elements are sent as they are, padding included, in every call that takes a dtype.
// Reductions need a user-defined op, which always gets whole elements. Error texts name the dtype
// by `name`, of which 31 bytes are kept.
//
// A local call, but all ranks of the world of `group` (or the default world) must create their
// dtypes in the same order, with the same size and name. Otherwise a call with the dtype gives
// IDIST_ERR_MISMATCH. The dtype is valid in all groups of that world, until it is freed or the
// world ends. Counts of such elements must be below 2^40. Returns IDIST_ERR_NO_SPACE if 128 dtypes
// exist.
IDIST_API idist_status idist_dtype_create(size_t nbytes, const char *name, idist_group *group,
                                          idist_dtype *dtype);

// Frees a dtype and makes its value available for another dtype. Does not wait: operations in
// flight complete. Returns IDIST_ERR_ARG if `dtype` is not a dtype of this world.
IDIST_API idist_status idist_dtype_free(idist_dtype dtype, idist_group *group);

// Computes inout[i] = in[i] (op) inout[i] for i < count, within this process. Needs no world. For
// the built-in ops except AVG. The buffers are disjoint or the same.
IDIST_API idist_status idist_reduce_local(const void *in, void *inout, size_t count,
                                          idist_dtype dtype, idist_op op);

//------------------------------------------------------------------------------
// [api:spawn]  worker processes
//------------------------------------------------------------------------------

// The function that a worker runs. Its result modulo 256 becomes the exit code of the process; 0
// means success. A nonzero multiple of 256 becomes 1.
typedef int (*idist_worker_fn)(int local_rank, void *arg);

typedef struct idist_workers idist_workers;

// Forks nproc_per_node processes, or one per core if that is 0. Each process joins a new world,
// calls fn, finalizes and exits. Blocks until all have ended. Returns IDIST_OK if fn returned 0 in
// all of them. Otherwise, or if idist_finalize failed in one (except with IDIST_ERR_PEER_LOST or
// _ABORTED), returns IDIST_ERR_WORKER_FAILED. Then desc->report and idist_last_error() describe the
// first failure.
//
// After a first failure, the other workers have desc->grace_ms to end by themselves. Then they get
// SIGTERM, then SIGKILL. If this process or the calling thread dies, the workers are killed, unless
// they have changed their user. Nothing else in the calling process changes, neither its signal
// handlers nor its environment. Workers never return to the caller's code and run no atexit
// handlers.
//
// A worker whose fn throws a C++ exception has failed. If the implementation is compiled as C++
// with exceptions, the report quotes what(); compiled as C, std::terminate ends the worker. With
// glibc, a worker also fails if fn calls pthread_exit, or longjmp to a function of the caller.
//
// Use desc->start_method "exec" for programs that have started threads, opened a GPU or initialized
// MPI. Then each worker runs the program anew, with its arguments (as they are now), environment,
// working directory, stdin and signal mask. The worker goes through main to the same call, with arg
// as main prepares it there, and runs fn in that call. In a worker, earlier calls of idist_spawn
// return IDIST_OK at once. So make all calls of idist_spawn from one thread, and not from a worker.
// A worker that does not reach its call within desc->init_timeout_ms has failed.
IDIST_API idist_status idist_spawn(idist_worker_fn fn, void *arg, int nproc_per_node,
                                   const idist_desc *desc);

// Starts workers as idist_spawn does, but returns when they have been started. Finish with
// idist_spawn_wait in the same thread; desc->report must stay valid until then. *workers is NULL on
// failure, and in workers of a later call.
IDIST_API idist_status idist_spawn_start(idist_worker_fn fn, void *arg, int nproc_per_node,
                                         const idist_desc *desc, idist_workers **workers);

// Sets *done to true if all workers have ended. Never blocks. Only this function and
// idist_spawn_wait take the steps that follow a first failure. Returns IDIST_OK if workers is NULL.
IDIST_API idist_status idist_spawn_poll(idist_workers *workers, bool *done);

// Waits until all workers have ended, frees `workers` and returns what idist_spawn would. Returns
// IDIST_ERR_TIMEOUT after timeout_ms milliseconds, and `workers` stays valid. With 0 it returns at
// once; with < 0 there is no limit. Returns IDIST_OK if workers is NULL.
IDIST_API idist_status idist_spawn_wait(idist_workers *workers, int timeout_ms);

// Sends a signal (1 .. 64, or 0 for none) to all workers that are still running. Returns IDIST_OK
// if workers is NULL.
IDIST_API idist_status idist_spawn_kill(idist_workers *workers, int signal_number);

// Runs fn like Ignite's Parallel: by idist_spawn if desc->nproc_per_node is set. Otherwise joins
// the world of the launcher, calls fn in this process and finalizes. If fn does not return 0, the
// world ends at once: this rank gets IDIST_ERR_WORKER_FAILED, and the other ranks lose this rank.
// Requests that fn has left open must not be used any more. Logs its steps at info level with the
// name of fn. idist_parallel_run is a macro so that it can pass this name.
#define idist_parallel_run(desc, fn, arg) idist_parallel_run_named((desc), (fn), (arg), #fn)
IDIST_API idist_status idist_parallel_run_named(const idist_desc *desc, idist_worker_fn fn,
                                                void *arg, const char *name);

// A task for idist_one_rank_first and idist_one_rank_only. Returns 0 for success.
typedef int (*idist_task_fn)(void *arg);

// Runs fn on the given rank first, and on the others when it is done: "rank 0 downloads, the rest
// find the file". With local, the rank with that local rank on each host runs fn first on its host.
// If fn fails there, the others do not run it, and all get IDIST_ERR_CALLBACK. Collective over
// opts->group; always blocks.
IDIST_API idist_status idist_one_rank_first(idist_task_fn fn, void *arg, int rank, bool local,
                                            const idist_opts *opts);

// Runs fn only on the given rank of opts->group. With barrier, the call is collective and blocks:
// the other ranks wait for fn, and get IDIST_ERR_CALLBACK if fn fails.
IDIST_API idist_status idist_one_rank_only(idist_task_fn fn, void *arg, int rank, bool barrier,
                                           const idist_opts *opts);

//------------------------------------------------------------------------------
// [api:memory]  buffers
//------------------------------------------------------------------------------

// Allocates zeroed memory for communication buffers, aligned to at least 64 bytes. Any rank may
// call it at any time. All ranks of the host map the memory, so a collective whose buffers are all
// in such memory moves the data directly; this pays from about 16 KiB on. The world is the world of
// opts->group, or the default world. Without a world, or if ranks share no memory, returns ordinary
// memory. Does not wait for other ranks. Returns NULL on failure (see idist_last_error).
IDIST_API void *idist_alloc(size_t nbytes, const idist_opts *opts);

// Frees memory from idist_alloc, before or after the end of the world. NULL is allowed.
IDIST_API void idist_free(void *ptr);

//------------------------------------------------------------------------------
// [api:store]  the key-value store for rendezvous
//
// Keys are strings of at least 1 and at most 1024 bytes. Values have up to 8 MiB. Any thread, also
// several at once. Only idist_store_get and idist_store_wait wait for keys. Time-outs are in
// milliseconds (0 means the store's own, < 0 means none). IDIST_ERR_TIMEOUT names a missing key.
// IDIST_ERR_PEER_LOST says that the server is gone. Pointers to results may be NULL, except `ready`
// and `n`.
//
// Every call may wait for the server. Over a socket, a call waits for the server's answer for up to
// the store's own time-out, limited to 1 s .. 30 s, even if the call's timeout_ms is shorter. If
// the server does not answer, for example because it was stopped, this call and all later ones
// return IDIST_ERR_TIMEOUT. Then close the store and open it again.
//------------------------------------------------------------------------------

typedef struct idist_store_desc {
    bool server;          // for tcp and file: this process is the server; set on rank 0 only
    int timeout_ms;       // default of every wait; 0 means 5 minutes
    const void *secret;   // as in idist_desc; tcp beyond loopback needs one (or IDIST_INSECURE=1)
    size_t secret_nbytes; // with a secret, a tcp server listens at that port of all addresses
    idist_allocator allocator;
} idist_store_desc;

// Opens a store and waits until its server is there. desc may be NULL.
//
//   "tcp://host:port"  one process is the server, the others connect. After a mutual
//                      authentication, the wire format is the one of torch's TCPStore. Port 0 on
//                      the server picks a free port; see idist_store_port.
//   "file:///path"     a file that all processes can lock. The server removes it when it closes. A
//                      file left behind by a dead server is recognized and not used. The file is an
//                      append-only log: each change of a key adds the key, the value and 8 bytes,
//                      and it never shrinks while the server runs. Every process reads all of it
//                      once, so keep it to a few KiB per rank. A process whose requests follow each
//                      other without a pause gives way to others every few milliseconds.
//   "unix://name"      like tcp, within this host, network namespace and user; leaves no file.
//   "mem://"           within this process: share the pointer between threads.
IDIST_API idist_status idist_store_open(const char *url, const idist_store_desc *desc,
                                        idist_store **store);

// Creates a view of `parent` in which every key is preceded by `prefix`. Closing the view does not
// close parent, which must outlive the view.
IDIST_API idist_status idist_store_prefix(idist_store *parent, const char *prefix,
                                          idist_store **store);

// Closes a store and sets the pointer to NULL. If this process is the server, the store ends for
// all. No other thread may be using the store.
IDIST_API idist_status idist_store_close(idist_store **store);

// Returns the port of a tcp server, or 0 for any other store.
IDIST_API int idist_store_port(const idist_store *store);

// Sets the value of a key, whether or not the key has one. value: nbytes.
IDIST_API idist_status idist_store_set(idist_store *store, const char *key, const void *value,
                                       size_t nbytes);

// Waits for a key and copies its value. *nbytes is the size of the value. If that exceeds capacity,
// returns IDIST_ERR_TRUNCATED, and value is untouched.
IDIST_API idist_status idist_store_get(idist_store *store, const char *key, void *value,
                                       size_t capacity, size_t *nbytes, int timeout_ms);

// Adds delta to a number that is stored as decimal text and starts at 0. *result is the new number.
// If the value is not a number, or the sum is not between -2^63 + 1 and 2^63 - 1, returns
// IDIST_ERR_ARG and changes nothing.
IDIST_API idist_status idist_store_add(idist_store *store, const char *key, int64_t delta,
                                       int64_t *result);

// Replaces the value by `desired` if it equals `expected`; a missing key equals an empty value.
// Both have up to 4 MiB. Returns IDIST_OK whether or not the value was replaced. Copies the value
// that the key then has to `value`, and sets *nbytes to its size. If the size exceeds capacity,
// returns IDIST_ERR_TRUNCATED, and `value` is untouched.
IDIST_API idist_status idist_store_compare_set(idist_store *store, const char *key,
                                               const void *expected, size_t nexpected,
                                               const void *desired, size_t ndesired, void *value,
                                               size_t capacity, size_t *nbytes);

// Waits until all n keys exist. n is at most 65536.
IDIST_API idist_status idist_store_wait(idist_store *store, const char *const *keys, size_t n,
                                        int timeout_ms);

// Sets *ready to true if all n keys exist now.
IDIST_API idist_status idist_store_check(idist_store *store, const char *const *keys, size_t n,
                                         bool *ready);

// Deletes a key. *deleted is true if the key existed.
IDIST_API idist_status idist_store_delete(idist_store *store, const char *key, bool *deleted);

// Sets *n to the number of keys in the whole table, even through a view with a prefix.
IDIST_API idist_status idist_store_num_keys(idist_store *store, size_t *n);

//------------------------------------------------------------------------------
// [api:trace]  a timeline of a run, with a track per rank
//
// IDIST_TRACE=out.json ./app writes a file per rank, and idistrun --trace out.json one file for
// all. Open the file in https://ui.perfetto.dev, in chrome://tracing, or in examples/trace.html,
// which needs no network. Calls of idist appear by themselves. A program adds what it computes:
//
//     idist_trace_begin("forward");
//     forward(batch);
//     idist_trace_end();
//
// WHAT IS IN IT
//
// The timeline has a process per rank, "rank 3 on node7", with one track for each thread that marks
// or calls something. The thread that joined the world comes first, then "thread 1" and so on.
// Below them are tracks for what is in flight while a thread continues: a request until its
// completion, or a bucket of gradients. There are as many such tracks as it takes for no two
// operations to overlap.
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
// A call on a stream lasts for as long as the host is busy with it. Neither idist_test nor calls
// that fail before there is a world are recorded. In args, seq is the number of the call within its
// group, as in error texts.
//
// THE FILE
//
// A world of 1 writes to the file named by IDIST_TRACE. In a larger world each rank writes a file
// of its own: out.json becomes out.3.json for rank 3. If another live process is writing that file,
// the process id is appended to the name. A process, such as a worker of idist_spawn, writes one
// file from its first world on, for all worlds that it joins. A child that is merely forked writes
// none.
//
// The file is an array in Chrome's JSON format with one event per line. Events are written through
// a mapping, so the file contains the last events of a rank that was killed or hangs. A call that
// never returned has a begin and no end. The file is valid JSON at any moment except the instant in
// which an event is added.
//
// Times are microseconds since 1970. They are the monotonic clock plus its offset from the host's
// clock, which is measured once at the start. So ranks of a host agree, and hosts agree as well as
// NTP synchronizes their clocks.
//
// If the file cannot be written, a warning is logged, and the program continues without it.
//
// WHAT IT COSTS
//
// Without IDIST_TRACE, a call costs an extra load and branch. With it, an event costs about a
// microsecond and 60 to 200 bytes. A call or a mark is two events. Memory is allocated only for a
// new thread or track.
//
// Any thread may call the functions at any time; without a timeline nothing happens. Names are
// UTF-8 and are copied: up to about 150 bytes of a name and 60 of a category, whole characters
// only.
//------------------------------------------------------------------------------

// Returns true if this process writes a timeline: IDIST_TRACE is set, and the process has joined a
// world.
IDIST_API bool idist_trace_on(void);

// Marks the beginning or the end of work of this thread, in category "compute". Calls nest; each
// begin needs its end in the same thread.
IDIST_API void idist_trace_begin(const char *name);
IDIST_API void idist_trace_end(void);

// Records something that has already happened, from start_ns to end_ns of CLOCK_MONOTONIC. Spans of
// the categories "compute", "call" and "wait" go to the track of this thread. There a span must be
// inside another span or not overlap it. Any other category, such as "bucket", has tracks of its
// own on which nothing overlaps. args is NULL or a JSON object, "{\"bytes\": 4096}". It is left out
// if it is longer than 1,000 bytes.
IDIST_API void idist_trace_span(const char *name, const char *category, int64_t start_ns,
                                int64_t end_ns, const char *args);

//------------------------------------------------------------------------------
// [api:backend]  backends
//------------------------------------------------------------------------------

// A table of functions; src/core/model.h has its contract.
typedef struct idist_backend_api idist_backend_api;

// Adds a backend, so that the worlds of this process can choose it. There may be any number of
// backends. The backend registered last is asked first, and self is asked last. The headers of
// idist register their backends before main. The table must stay valid until the process ends. Any
// thread; worlds that are open keep the backend that they have.
//
// Registering the same table again does nothing. Returns IDIST_ERR_ARG if backend is NULL, has no
// name, or has the name of another backend. Returns IDIST_ERR_NO_BACKEND if the backend was
// compiled against another version of idist.h.
IDIST_API idist_status idist_register_backend(const idist_backend_api *backend);

// Returns the backend for a world of 1, which is always available and always asked last.
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

#include "os/bodies.h"

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
#include "launch/python.h"

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
#include "core/survey.h"
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
#include "trace/trace_count.h"
#include "trace/trace_call.h"

#include "base/end.h"

#endif // IDIST_IMPLEMENTATION

// Includes the ring backend, if the file is there. A compiler without __has_include cannot look for
// the file, and requires it.
#if defined(IDIST_IMPLEMENTATION) && !defined(IDIST_NO_RING)
#ifndef __has_include
#include "idist_ring.h"
#elif __has_include("idist_ring.h")
#include "idist_ring.h"
#endif
#endif

// Makes a pointer of a wrong type an error in C. Before gcc 14 and clang 16, such a pointer causes
// only a warning. If the parameter is a transparent union, the pointer is an error, except a void
// pointer and NULL. The functions themselves have no such parameters, because gcc would issue a
// pedantic warning for each call. Instead, each macro casts the result to the type of an
// unevaluated call of a prototype with such parameters.
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
